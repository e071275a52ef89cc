//! Speed of the operations relative to the peak of the arithmetic unit, measured in the same run: `cargo bench --bench
//! kernels`. Rates are floating-point operations (matrix products, attention) or bytes moved (others) per second.

use candle_core::{DType, Device, Tensor};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ft::base::allocator;
use ft::base::rng::{Rng, Stream};
use ft::ops::attention::{self, AttentionGradInputs};
use ft::ops::glu::Activation;
use ft::ops::low_rank::{self, BaseWeight, LowRank};
use ft::ops::{Dtype, glu, linear, rms_norm};
use ft::quant::{Format, Weight, quantize};
use std::hint::black_box;
use std::time::{Duration, Instant};

#[global_allocator]
static HEAP: ft::base::allocator::CachingAllocator = ft::base::allocator::CachingAllocator;

fn random(rows: usize, columns: usize, seed: u64) -> Tensor {
    let rng = Rng::new(seed, Stream::Init, &[]);
    let values: Vec<f32> = (0..(rows * columns) as u64).map(|i| rng.normal(i)).collect();
    Tensor::from_vec(values, (rows, columns), &Device::Cpu).expect("a tensor")
}

/// Multiply-adds on registers only: the peak of the f32 unit. Returns the number of operations in `rounds`.
mod peak {
    const SUMS: usize = 12;

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    pub fn avx512(rounds: u64) -> (u64, f32) {
        use std::arch::x86_64::*;
        let (a, b) = (_mm512_set1_ps(1.000_001), _mm512_set1_ps(1e-9));
        let mut sums = [a; SUMS];
        for _ in 0..rounds {
            for s in &mut sums {
                *s = _mm512_fmadd_ps(*s, a, b);
            }
        }
        let mut total = 0.0;
        for s in sums {
            total += _mm512_reduce_add_ps(s);
        }
        (rounds * SUMS as u64 * 32, total)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    pub fn avx2(rounds: u64) -> (u64, f32) {
        use std::arch::x86_64::*;
        let (a, b) = (_mm256_set1_ps(1.000_001), _mm256_set1_ps(1e-9));
        let mut sums = [a; SUMS];
        for _ in 0..rounds {
            for s in &mut sums {
                *s = _mm256_fmadd_ps(*s, a, b);
            }
        }
        let mut lanes = [0f32; 8];
        let mut total = 0.0;
        for s in sums {
            // SAFETY: the buffer has room for eight floats.
            unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), s) };
            total += lanes.iter().sum::<f32>();
        }
        (rounds * SUMS as u64 * 16, total)
    }

    pub fn run(rounds: u64) -> Option<(u64, f32)> {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                // SAFETY: the CPU feature was detected.
                return Some(unsafe { avx512(rounds) });
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                // SAFETY: the CPU features were detected.
                return Some(unsafe { avx2(rounds) });
            }
        }
        let _ = rounds;
        None
    }
}

/// Uses all threads; shows the best of several runs, because other programs can only reduce the speed.
fn show_peak() {
    const ROUNDS: u64 = 20_000_000;
    let best = (0..5)
        .filter_map(|_| {
            let started = Instant::now();
            let done = rayon::broadcast(|_| peak::run(black_box(ROUNDS)));
            let seconds = started.elapsed().as_secs_f64();
            let flops: u64 = done
                .into_iter()
                .map(|d| d.map(|(flops, sum)| (flops, black_box(sum)).0))
                .sum::<Option<u64>>()?;
            Some(flops as f64 / seconds / 1e9)
        })
        .fold(0.0, f64::max);
    if best > 0.0 {
        println!(
            "peak of the f32 unit: {best:.0} GFLOP/s with {} threads",
            rayon::current_num_threads()
        )
    } else {
        println!("peak of the f32 unit: not measured on this processor")
    }
}

fn products(c: &mut Criterion) {
    allocator::retain_freed();
    show_peak();
    for (n, i, o) in [
        (512, 896, 4864),
        (512, 4864, 896),
        (2048, 4096, 4096),
        (512, 896, 16),
        (1, 896, 4864),
    ] {
        let mut group = c.benchmark_group(format!("product {n} x {i} x {o}"));
        group.throughput(Throughput::Elements(2 * (n * i * o) as u64));
        let (x, dy) = (random(n, i, 1), random(n, o, 2));
        let f32_weight = random(o, i, 3);
        for (name, dtype) in [("f32", DType::F32), ("bf16", DType::BF16)] {
            let w = f32_weight.to_dtype(dtype).expect("a tensor");
            group.bench_function(BenchmarkId::new("forward", name), |b| {
                b.iter(|| linear::forward(&x, &w, None).expect("y"))
            });
            group.bench_function(BenchmarkId::new("backward input", name), |b| {
                b.iter(|| linear::backward_input(&dy, &w).expect("dx"))
            });
            group.bench_function(BenchmarkId::new("gradient of the weight", name), |b| {
                b.iter(|| linear::grad_weight(&dy, &x, dtype).expect("dW"))
            });
        }
        group.finish();
    }
}

/// A linear with a LoRA pair of rank 16: without it, with separate products for it, and with the fused product.
fn deltas(c: &mut Criterion) {
    for (n, i, o) in [(512, 896, 4864), (512, 4864, 896), (2048, 896, 4864)] {
        let (x, dy) = (random(n, i, 1), random(n, o, 2));
        let w = random(o, i, 3).to_dtype(DType::BF16).expect("a tensor");
        let (a, b) = (random(16, i, 4), random(o, 16, 5));
        let low = LowRank {
            a: &a,
            b: &b,
            scale: 2.0,
        };
        let mut group = c.benchmark_group(format!("LoRA of rank 16 on {n} x {i} x {o}"));
        group.throughput(Throughput::Elements(2 * (n * i * o) as u64));
        group.bench_function("forward without LoRA", |b| {
            b.iter(|| linear::forward(&x, &w, None).expect("y"))
        });
        group.bench_function("forward separate", |b| {
            b.iter(|| {
                let y = linear::forward(&x, &w, None).expect("y");
                low.up_add(&y, &low.down(&x).expect("u")).expect("y");
                y
            })
        });
        group.bench_function("forward fused", |b| {
            b.iter(|| low_rank::forward(&x, BaseWeight::Dense(&w), None, low).expect("y"))
        });
        group.bench_function("backward without LoRA", |b| {
            b.iter(|| linear::backward_input(&dy, &w).expect("dx"))
        });
        group.bench_function("backward separate", |b| {
            b.iter(|| {
                let dx = linear::backward_input(&dy, &w).expect("dx");
                low.down_backward_add(&dx, &low.up_backward(&dy).expect("du"))
                    .expect("dx");
                dx
            })
        });
        group.bench_function("backward fused", |b| {
            b.iter(|| low_rank::backward(&dy, BaseWeight::Dense(&w), None, low).expect("dx"))
        });
        group.finish();
    }
}

/// Products with dense and with quantized weights. For few tokens there are as many weights as do not fit in the cache, as in
/// a model.
fn quantized(c: &mut Criterion) {
    for n in [512, 1, 4, 8] {
        let (i, o) = (896, 4864);
        let copies = if n <= 8 { 24 } else { 1 };
        let (x, dy, w) = (random(n, i, 1), random(n, o, 2), random(o, i, 3));
        let values: Vec<f32> = w.flatten_all().and_then(|w| w.to_vec1()).expect("values");
        let dense = || Weight::from(w.to_dtype(DType::BF16).expect("a tensor"));
        let of = |format: Option<Format>| match format {
            None => dense(),
            Some(format) => quantize(&values, (o, i), format, Dtype::Bf16).expect("codes").into(),
        };
        let mut group = c.benchmark_group(format!("quantized product {n} x {i} x {o}"));
        group.throughput(Throughput::Elements(2 * (n * i * o) as u64));
        for format in [None].into_iter().chain(Format::ALL.into_iter().map(Some)) {
            let name = format.map_or("bf16".to_string(), |format| format.to_string());
            let weights: Vec<Weight> = (0..copies).map(|_| of(format)).collect();
            let mut turn = 0;
            let mut next = || {
                turn += 1;
                &weights[turn % copies]
            };
            group.bench_function(BenchmarkId::new("forward", &name), |b| {
                b.iter(|| next().forward(&x, None).expect("y"))
            });
            group.bench_function(BenchmarkId::new("backward input", &name), |b| {
                b.iter(|| next().backward_input(&dy).expect("dx"))
            });
        }
        group.finish();
    }
}

fn attentions(c: &mut Criterion) {
    for n in [512, 2048] {
        let (heads, kv_heads, head_dim) = (14, 2, 64);
        let spec = attention::AttentionSpec {
            heads,
            kv_heads,
            head_dim,
            scale: 0.125,
            softcap: None,
            window: None,
            bf16: false,
        };
        let q = random(n, heads * head_dim, 1);
        let (k, v) = (random(n, kv_heads * head_dim, 2), random(n, kv_heads * head_dim, 3));
        let dout = random(n, heads * head_dim, 4);
        let documents = [0, n];
        let (out, lse) = attention::forward(&q, &k, &v, &spec, &documents, &documents).expect("o");
        // Two products of the lower half of [N, N] per head; backward has five.
        let flops = 2 * (n * n * heads * head_dim) as u64;
        let mut group = c.benchmark_group(format!("attention {n} tokens, 14 heads of 64"));
        group.throughput(Throughput::Elements(flops));
        group.bench_function("forward", |b| {
            b.iter(|| attention::forward(&q, &k, &v, &spec, &documents, &documents).expect("o"))
        });
        group.throughput(Throughput::Elements(flops / 2 * 5));
        let inputs = AttentionGradInputs {
            q: &q,
            k: &k,
            v: &v,
            o: &out,
            lse: &lse,
            dout: &dout,
        };
        group.bench_function("backward", |b| {
            b.iter(|| attention::backward(inputs, &spec, &documents).expect("dq"))
        });
        group.finish();
    }
}

fn elementwise(c: &mut Criterion) {
    let (n, d, i) = (512, 896, 4864);
    let (x, dy, w) = (
        random(n, d, 1),
        random(n, d, 2),
        random(1, d, 3).flatten_all().expect("w"),
    );
    let (gate, up, dm) = (random(n, i, 4), random(n, i, 5), random(n, i, 6));
    let mut group = c.benchmark_group("elementwise, 512 tokens");
    let bytes = |tensors: usize, width: usize| Throughput::Bytes((4 * tensors * n * width) as u64);
    group.throughput(bytes(2, d));
    group.bench_function("rms_norm forward", |b| {
        b.iter(|| rms_norm::forward(&x, &w, 1e-6, false).expect("y"))
    });
    group.throughput(bytes(3, d));
    group.bench_function("rms_norm backward", |b| {
        b.iter(|| rms_norm::backward(&x, &w, &dy, 1e-6, false, false).expect("dx"))
    });
    group.throughput(bytes(3, i));
    group.bench_function("swiglu forward", |b| {
        b.iter(|| glu::forward(&gate, &up, Activation::Silu).expect("m"))
    });
    group.throughput(bytes(5, i));
    group.bench_function("swiglu backward", |b| {
        b.iter(|| glu::backward(&gate, &up, &dm, Activation::Silu).expect("dgate"))
    });
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    targets = products, deltas, quantized, attentions, elementwise
}
criterion_main!(benches);
