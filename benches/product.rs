//! Times the three products of training on bf16 weights: `cargo bench --bench product`. Activations are f32 and are
//! packed in every call, as in training. Prints one JSON line per product, with the keys of `benches/peer_product.py`.

use candle_core::{DType, Device, Tensor};
use clap::Parser;
use ft::base::allocator;
use ft::base::rng::{Rng, Stream};
use ft::ops::prepacked::{Dense, Orders, Prepacked};
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
    /// Use packed weights, in the layout of the tile unit.
    #[arg(long)]
    packed: bool,
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
    rayon::ThreadPoolBuilder::new()
        .num_threads(o.threads)
        .build_global()
        .expect("a thread pool");
    if let Ok(path) = std::env::var("FT_CPU") {
        CpuBackend::force(&path).expect("a path that this CPU can run");
    }
    allocator::retain_freed();
    let mut shapes = SHAPES.to_vec();
    if !o.tokens.is_empty() {
        let with = |n: &usize| SHAPES.map(|(_, i, out)| (*n, i, out));
        shapes = o.tokens.iter().flat_map(with).collect();
        shapes.dedup();
    }
    for (n, i, out) in shapes {
        let (x, dy) = (random(n, i, 1), random(n, out, 2));
        let w = random(out, i, 3).to_dtype(DType::BF16).expect("a tensor");
        let copy = if o.packed {
            Prepacked::new(&w, Orders::Both, 0).expect("packed")
        } else {
            None
        };
        let weight = || copy.as_ref().map_or(Dense::from(&w), Dense::from);
        let forms: [(&str, &dyn Fn() -> Tensor); 3] = [
            ("x·Wᵀ", &|| linear::forward(&x, weight(), None).expect("y")),
            ("dy·W", &|| linear::backward_input(&dy, weight()).expect("dx")),
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
                serde_json::json!({"impl": "ft", "cpu": CpuBackend::current().name(), "shape": [n, i, out], "form": form, "packed": copy.is_some(),
                    "gflops": (rate * 10.0).round() / 10.0})
            );
        }
    }
}
