//! Times decoding of a built-in shape with random weights: `cargo bench --bench generate -- --help`.
//!
//! Generates `rows` answers to one prompt (with `--apart`, each to its own prompt). Prints one line of JSON: seconds
//! and tokens per second of prefill and decode, CPU seconds of both, bytes of weights and cache.

use clap::Parser;
use ft::base::threads;
use ft::formats::config::Config;
use ft::generate::{
    CopyFormats, GenerateLimits, GenerateSettings, GenerateStats, KvDtype, QuantizedCopy, Request, SampledModel, answer,
};
use ft::model::{Network, families, shapes};
use ft::ops::{self, CpuBackend};
use ft::quant::Format;
use ft::recipe::Dtype;
use ft::source::ResidentWeights;
use std::path::Path;
use std::time::Instant;

#[derive(Parser)]
struct Options {
    /// Built-in shape, or a folder with a `config.json`.
    #[arg(long, default_value = "qwen2.5-0.5b")]
    shape: String,
    /// Number of layers of the model [default: those of the shape].
    #[arg(long)]
    layers: Option<usize>,
    #[arg(long, default_value = "cpu")]
    device: String,
    #[arg(long, default_value = "f32")]
    dtype: String,
    /// Storage of the weights: exact, int8 or int4.
    #[arg(long, default_value = "exact")]
    weights: String,
    /// Type of the KV cache: f32, bf16 or int8.
    #[arg(long, default_value = "f32")]
    kv_cache: String,
    #[arg(long, default_value_t = 1)]
    rows: usize,
    #[arg(long, default_value_t = 128)]
    prompt: usize,
    #[arg(long, default_value_t = 32)]
    new: usize,
    /// Most tokens of prompts in a pass [default: 1024, as in rollouts].
    #[arg(long)]
    prefill_tokens: Option<usize>,
    /// Use a different prompt for each row.
    #[arg(long)]
    apart: bool,
    #[arg(long)]
    same_bits: bool,
    /// Rows end after this many tokens on average, at different times, and at the latest after `new`.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    ends_after: Option<u32>,
    /// How often the same answers are generated; the figures are those of the last time.
    #[arg(long, default_value_t = 1)]
    repeat: usize,
    /// Launch every kernel of a step by itself, also on a GPU.
    #[arg(long)]
    no_graphs: bool,
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// CPU seconds of this process, all threads.
fn cpu_seconds() -> f64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is valid for the write.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut t) };
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

#[global_allocator]
static HEAP: ft::base::allocator::CachingAllocator = ft::base::allocator::CachingAllocator;

fn main() {
    let o = Options::parse();
    threads::start(o.threads).expect("a thread pool");
    if let Ok(path) = std::env::var("FT_CPU") {
        CpuBackend::force(&path).expect("FT_CPU");
    }
    ft::base::allocator::retain_freed();
    let mut config = if Path::new(&o.shape).is_dir() {
        Config::load(Path::new(&o.shape)).expect("a config.json")
    } else {
        let shape = shapes::config(&format!("{}{}", shapes::PREFIX, o.shape));
        shape.expect("a shape").expect("a shape")
    };
    if let Some(layers) = o.layers {
        config.raw["num_hidden_layers"] = layers.into();
    }
    let spec = families::read(&config).expect("a model");
    let dtype = Dtype::parse(&o.dtype).expect("f32 or bf16");
    let device = ops::device::open(&o.device).expect("the device").device;
    let source = ResidentWeights::random(spec.params(), 1, 0.02, 1.0, dtype, &device).expect("weights");
    let vocab = spec.vocab;
    let network = Network::new(spec, std::sync::Arc::new(source), device.clone());
    let format = match o.weights.as_str() {
        "exact" => None,
        "int8" => Some(Format::Int8 { group: 0 }),
        "int4" => Some(Format::Int4 { group: 64 }),
        other => panic!("no weights `{other}`"),
    };
    let started = Instant::now();
    let copy = format.map(|f| QuantizedCopy::new(&network, CopyFormats::of(f)).expect("quantized weights"));
    let coding = started.elapsed().as_secs_f64();
    let kv_cache = match o.kv_cache.as_str() {
        "f32" => KvDtype::F32,
        "bf16" => KvDtype::Bf16,
        "int8" => KvDtype::Int8,
        other => panic!("no cache `{other}`"),
    };
    let requests: Vec<Request> = (0..o.rows)
        .map(|row| {
            let seed = if o.apart { row } else { 0 };
            let prompt = (0..o.prompt).map(|i| ((i * 7919 + seed * 104_729) % vocab) as u32);
            Request {
                prompt: prompt.collect(),
                number: row as u64,
            }
        })
        .collect();
    let settings = GenerateSettings {
        max_new_tokens: o.new,
        temperature: 1.0,
        // With random weights each id is about as likely.
        stop_ids: (0..o.ends_after.map_or(0, |tokens| vocab as u32 / tokens)).collect(),
        limits: GenerateLimits {
            kv_cache: Some(kv_cache),
            same_bits: o.same_bits,
            graphs_after: GenerateLimits::default().graphs_after.filter(|_| !o.no_graphs),
            prefill_tokens: o.prefill_tokens.unwrap_or(GenerateLimits::default().prefill_tokens),
            ..GenerateLimits::default()
        },
        ..GenerateSettings::default()
    };
    let policy = || copy.as_ref().map_or(SampledModel::from(&network), SampledModel::from);
    let short = GenerateSettings {
        max_new_tokens: 2,
        ..settings.clone()
    };
    answer(policy(), &requests[..1], &short, &mut |_, _| Ok(())).expect("warm up");
    let (mut s, mut cpu, mut runs) = (GenerateStats::default(), 0.0, Vec::new());
    for _ in 0..o.repeat.max(1) {
        let before = cpu_seconds();
        (_, s) = answer(policy(), &requests, &settings, &mut |_, _| Ok(())).expect("answers");
        cpu = cpu_seconds() - before;
        runs.push([s.prefill_seconds, s.decode_seconds]);
    }
    println!(
        "{}",
        serde_json::json!({
            "shape": o.shape, "layers": o.layers, "device": o.device, "dtype": o.dtype, "weights": o.weights, "kv_cache": o.kv_cache, "rows": o.rows,
            "ends_after": o.ends_after, "runs": runs, "decode_tokens": s.decode_tokens,
            "prompt": o.prompt, "prompt_pass_tokens": settings.limits.prefill_tokens, "apart": o.apart, "same_bits": o.same_bits, "threads": o.threads,
            "prefill_tokens": s.prefill_tokens, "shared_tokens": s.shared_tokens,
            "prefill_tokens_per_second": s.prefill_tokens as f64 / s.prefill_seconds,
            "decode_tokens_per_second": s.decode_tokens as f64 / s.decode_seconds,
            "seconds": s.prefill_seconds + s.decode_seconds, "cpu_seconds": cpu,
            "graph_steps": s.graph_steps, "cache_bytes": s.cache_bytes, "exact_bytes": network.source.resident_bytes(),
            "peak_device_mib": ops::device::memory(&device).expect("the device's memory").map(|m| m.peak_used >> 20),
            "peak_graph_mib": ops::graph::memory(&device).expect("the memory of graphs").1 >> 20,
            "no_graphs": ops::graph::take_refusal(),
            "code_bytes": copy.as_ref().map_or(0, QuantizedCopy::bytes), "coding_seconds": coding,
        })
    );
}
