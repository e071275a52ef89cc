//! Times the three products of training on bf16 weights: `cargo bench --bench product`. Activations are f32 and are
//! packed in every call, as in training. Prints one JSON line per product, with the keys of `benches/peer_product.py`.
//! `--experts`: the products of the experts of a layer, one after the other as in `model/experts`, against one dense product
//! with as many multiplications, in turn; `dense_share` is the part of its rate that they reach.

use candle_core::{DType, Device, Tensor};
use clap::Parser;
use ft::base::rng::{Rng, Stream};
use ft::base::{allocator, threads};
use ft::ops::routing::{RouterSpec, Score};
use ft::ops::{CpuBackend, linear};
use std::hint::black_box;
use std::time::Instant;

#[derive(Parser)]
struct Options {
    #[arg(long, default_value_t = 2)]
    threads: usize,
    #[arg(long, default_value_t = 7)]
    repeats: usize,
    /// Numbers of tokens, in place of those of the shapes: `--tokens 1,4,8` times products with few rows.
    #[arg(long, value_delimiter = ',')]
    tokens: Vec<usize>,
    /// Compare the products of experts with a dense product.
    #[arg(long)]
    experts: bool,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Tokens, input and output features.
const SHAPES: [(usize, usize, usize); 5] = [
    (512, 896, 4864),
    (2048, 896, 4864),
    (512, 4864, 896),
    (2048, 4864, 896),
    (2048, 4096, 4096),
];

fn random(rows: usize, columns: usize, seed: u64) -> Tensor {
    let rng = Rng::new(seed, Stream::Init, &[]);
    let values: Vec<f32> = (0..(rows * columns) as u64).map(|i| rng.normal(i)).collect();
    Tensor::from_vec(values, (rows, columns), &Device::Cpu).expect("a tensor")
}

#[global_allocator]
static HEAP: ft::base::allocator::CachingAllocator = ft::base::allocator::CachingAllocator;

fn main() {
    let o = Options::parse();
    threads::start(o.threads).expect("a thread pool");
    if let Ok(path) = std::env::var("FT_CPU") {
        CpuBackend::force(&path).expect("a path that this CPU can run");
    }
    allocator::retain_freed();
    if o.experts {
        for (hidden, intermediate) in [(1024, 512), (2048, 768)] {
            experts(&o, hidden, intermediate);
        }
        return;
    }
    let mut shapes = SHAPES.to_vec();
    if !o.tokens.is_empty() {
        let with = |n: &usize| SHAPES.map(|(_, i, out)| (*n, i, out));
        shapes = o.tokens.iter().flat_map(with).collect();
        shapes.dedup();
    }
    for (n, i, out) in shapes {
        let (x, dy) = (random(n, i, 1), random(n, out, 2));
        let w = random(out, i, 3).to_dtype(DType::BF16).expect("a tensor");
        let forms: [(&str, &dyn Fn() -> Tensor); 3] = [
            ("x·Wᵀ", &|| linear::forward(&x, &w, None).expect("y")),
            ("dy·W", &|| linear::backward_input(&dy, &w).expect("dx")),
            ("dyᵀ·x", &|| linear::grad_weight(&dy, &x, DType::BF16).expect("dW")),
        ];
        for (form, f) in forms {
            black_box(f());
            let mut seconds: Vec<f64> = (0..o.repeats)
                .map(|_| {
                    let started = Instant::now();
                    black_box(f());
                    started.elapsed().as_secs_f64()
                })
                .collect();
            seconds.sort_by(f64::total_cmp);
            let rate = 2.0 * (n * i * out) as f64 / seconds[seconds.len() / 2] / 1e9;
            println!(
                "{}",
                serde_json::json!({"impl": "ft", "cpu": CpuBackend::current().name(), "shape": [n, i, out], "form": form,
                    "gflops": (rate * 10.0).round() / 10.0})
            );
        }
    }
}

/// The median of the seconds.
fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn timed(f: &dyn Fn()) -> f64 {
    let started = Instant::now();
    f();
    started.elapsed().as_secs_f64()
}

/// A product from x, dy and W.
type Form = dyn Fn(&Tensor, &Tensor, &Tensor) -> Tensor;

/// 64 experts, 8 for each of 2048 tokens as random logits choose them: uneven groups of rows.
fn experts(o: &Options, hidden: usize, intermediate: usize) {
    const TOKENS: usize = 2048;
    const EXPERTS: usize = 64;
    let router = RouterSpec {
        score: Score::Softmax,
        top_k: 8,
        renormalize: true,
        scale: 1.0,
        groups: None,
    };
    let routing = router.route(&random(TOKENS, EXPERTS, 4), None).expect("a routing");
    let counts = routing.counts();
    let rows: usize = counts.iter().sum();
    let bf16 = |seed| {
        random(intermediate, hidden, seed)
            .to_dtype(DType::BF16)
            .expect("a tensor")
    };
    let weights: Vec<Tensor> = (0..EXPERTS as u64).map(|e| bf16(10 + e)).collect();
    let (x, dy) = (random(rows, hidden, 1), random(rows, intermediate, 2));
    let mut start = 0;
    let groups: Vec<(Tensor, Tensor)> = (counts.iter())
        .map(|&n| {
            start += n;
            let part = |t: &Tensor| t.narrow(0, start - n, n).expect("rows");
            (part(&x), part(&dy))
        })
        .collect();
    let each = |f: &Form| {
        for ((x, dy), w) in groups.iter().zip(&weights) {
            black_box(f(x, dy, w));
        }
    };
    let forward = |x: &Tensor, _: &Tensor, w: &Tensor| linear::forward(x, w, None).expect("y");
    let input = |_: &Tensor, dy: &Tensor, w: &Tensor| linear::backward_input(dy, w).expect("dx");
    let weight = |x: &Tensor, dy: &Tensor, _: &Tensor| linear::grad_weight(dy, x, DType::BF16).expect("dW");
    let forms: [(&str, &Form); 3] = [("x·Wᵀ", &forward), ("dy·W", &input), ("dyᵀ·x", &weight)];
    for (form, f) in forms {
        let (dense, of_experts) = (|| drop(black_box(f(&x, &dy, &weights[0]))), || each(f));
        dense();
        of_experts();
        let pairs: Vec<(f64, f64)> = (0..o.repeats).map(|_| (timed(&dense), timed(&of_experts))).collect();
        let (dense, of_experts) = (
            median(pairs.iter().map(|p| p.0).collect()),
            median(pairs.iter().map(|p| p.1).collect()),
        );
        let rate = 2.0 * (rows * hidden * intermediate) as f64 / of_experts / 1e9;
        println!(
            "{}",
            serde_json::json!({"impl": "ft", "cpu": CpuBackend::current().name(), "experts": EXPERTS, "rows": rows,
                "most": counts.iter().max(), "least": counts.iter().min(), "weight": [intermediate, hidden], "form": form,
                "gflops": (rate * 10.0).round() / 10.0, "dense_share": (dense / of_experts * 1e3).round() / 1e3})
        );
    }
}
