//! Times optimizer steps of a built-in shape with random weights: `cargo bench --bench step -- --help`.
//!
//! The same step as in `ft train` (`Engine::step`), on synthetic rows. One configuration per process, because peak
//! resident memory is measured per process. Prints one line of JSON, with the same keys as `benches/peer_cpu.py`.

use candle_core::Device;
use clap::Parser;
use ft::base::rng::{Rng, Stream};
use ft::base::{allocator, memory, threads};
use ft::data::{Batch, Example};
use ft::engine::{ActiveSet, Engine, GradientStorage, QueuedStep, StepStrategy};
use ft::formats::config::Config;
use ft::model::{Adapters, Spec, TrainableNetwork, families, shapes};
use ft::ops::{self, CpuBackend};
use ft::optim::Optimizer;
use ft::peft::{Adapter, DropoutMask, Lora, lora};
use ft::recipe::{self, Dtype};
use ft::sft::CausalLm;
use ft::source::ResidentWeights;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

#[derive(Parser)]
struct Options {
    /// 0.5b, small (hidden 256, 4 layers, vocabulary 4096), another built-in shape, or a folder with a `config.json`.
    #[arg(long, default_value = "0.5b")]
    size: String,
    /// lora (r = 16 on every linear), full, or block (one layer; mean over first, middle and last).
    #[arg(long, default_value = "lora")]
    method: String,
    #[arg(long, default_value = "bf16")]
    dtype: String,
    #[arg(long, default_value = "cpu")]
    device: String,
    #[arg(long, default_value_t = 1)]
    batch: usize,
    #[arg(long, default_value_t = 512)]
    seq: usize,
    #[arg(long, default_value_t = 3)]
    steps: usize,
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Number of layers with saved activations [default: all].
    #[arg(long)]
    keep: Option<usize>,
    /// Number of layers of the model, for a profile [default: those of the shape].
    #[arg(long)]
    layers: Option<usize>,
    /// Optimizer keys, as in a recipe: optimizer.state=int8
    #[arg(long)]
    set: Vec<String>,
    /// Layers run as CUDA graphs.
    #[arg(long)]
    graphs: bool,
    /// Each step has rows of another length: from `seq` down, in turn of eight.
    #[arg(long)]
    vary: bool,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

fn spec(size: &str, layers: Option<usize>) -> Spec {
    let name = match size {
        "0.5b" => "qwen2.5-0.5b",
        other => other,
    };
    let mut config = if Path::new(name).is_dir() {
        Config::load(Path::new(name)).expect("a config.json")
    } else {
        let shape = shapes::config(&format!("{}{name}", shapes::PREFIX));
        shape.expect("a shape").expect("a shape")
    };
    if let Some(layers) = layers {
        config.raw["num_hidden_layers"] = layers.into();
    }
    families::read(&config).expect("a model")
}

fn adapters(spec: &Spec, rank: usize, device: &Device) -> Adapters {
    let sites = spec.sites().into_iter().enumerate();
    sites
        .map(|(i, site)| {
            let (a, b) = lora::fresh(rank, site.input, site.output, false, 1, i as u64).expect("an adapter");
            let pair = Lora::new(&site.module, (a, b), 2.0, DropoutMask::default());
            let adapter = Adapter::Lora(pair).on(device).expect("an adapter");
            (site.module, Arc::new(adapter))
        })
        .collect()
}

/// Minor page faults of this process so far, 4 KiB each.
fn page_faults() -> i64 {
    // SAFETY: all zeros is a valid `rusage`, and it is valid for the write.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage.ru_minflt
    }
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
    let spec = spec(&o.size, o.layers);
    let dtype = if o.dtype == "f32" { Dtype::F32 } else { Dtype::Bf16 };
    let device = ops::device::open(&o.device).expect("the device").device;
    let source = ResidentWeights::random(spec.params(), 3, 0.02, 1.0, dtype, &device).expect("weights");
    let mut model = TrainableNetwork::new(spec.clone(), Arc::new(source), device.clone());
    let network = &mut model.network;
    if o.method == "lora" {
        network.adapters = adapters(&spec, 16, &device);
    }
    let layers = spec.layers.len();
    let named = |prefix: &str| {
        let params = spec.params();
        let names: Vec<String> = params.iter().map(|p| p.name.to_string()).collect();
        ActiveSet::new(names.into_iter().filter(|n| n.starts_with(prefix)))
    };
    let sets: Vec<ActiveSet> = match o.method.as_str() {
        "full" => vec![named("")],
        "block" => [0, layers / 2, layers - 1]
            .map(|l| named(&format!("model.layers.{l}.")))
            .into(),
        _ => vec![ActiveSet::new(
            network
                .adapters
                .values()
                .flat_map(|a| a.parts())
                .map(|part| part.name.to_string()),
        )],
    };
    let text = "[model]\npath = \"m\"\n[data]\ntrain = \"t.jsonl\"\n";
    let optimizer = recipe::parse(text, "bench", &o.set).expect("a recipe").recipe.optimizer;
    let strategy = StepStrategy {
        gradients: if o.method == "full" {
            GradientStorage::Fused
        } else {
            GradientStorage::Keep
        },
        saved_layers: o.keep.unwrap_or(layers),
        layer_graphs: o.graphs,
        ..StepStrategy::new(dtype)
    };
    let (objective, optimizer) = (Box::new(CausalLm::new(spec.vocab)), Optimizer::new(optimizer));
    let mut engine = Engine::new(model, objective, optimizer, strategy, &sets[0]).expect("an engine");
    engine.max_grad_norm = 0.0;
    engine.seed = 1;
    let rng = Rng::new(9, Stream::Init, &[]);
    let rows: Vec<Example> = (0..o.batch)
        .map(|r| Example {
            ids: (0..o.seq)
                .map(|t| rng.below((r * o.seq + t) as u64, spec.vocab as u64) as u32)
                .collect(),
            trained: vec![true; o.seq],
        })
        .collect();
    let batches: Vec<[Batch; 1]> = (0..if o.vary { 8 } else { 1 })
        .map(|shorter| {
            let short = rows.iter().map(|row| Example {
                ids: row.ids[..o.seq - shorter].to_vec(),
                trained: row.trained[shorter..].to_vec(),
            });
            [Batch::from_examples(short)]
        })
        .collect();
    let tokens = (o.batch * o.seq) as f64;
    let mut medians = Vec::new();
    let mut all = Vec::new();
    let mut loss = 0.0;
    let mut faults = Vec::new();
    for active in &sets {
        engine.switch(active, |_| false).expect("the active block is switched");
        // As in a run: on a GPU the numbers of a step are read after the next one is queued.
        let mut last: Option<QueuedStep> = None;
        // On a GPU the first call only queues a step, and the second waits for it.
        let untimed = if device.is_cuda() { 2 } else { 1 };
        let mut seconds: Vec<f64> = (0..o.steps + untimed)
            .map(|step| {
                let (started, before) = (Instant::now(), page_faults());
                let batch = &batches[step % batches.len()];
                let queued = engine.queue_step(step as u64 + 1, batch, active, 1e-4, false, last.as_ref());
                if let Some(last) = last.replace(queued.expect("a step")) {
                    loss = engine.finish(&last).expect("a step").totals.loss();
                }
                faults.push(page_faults() - before);
                started.elapsed().as_secs_f64()
            })
            .skip(untimed)
            .collect();
        if let Some(last) = last {
            loss = engine.finish(&last).expect("a step").totals.loss();
        }
        all.extend(seconds.iter().map(|s| (s * 1e4).round() / 1e4));
        seconds.sort_by(f64::total_cmp);
        medians.push(seconds[seconds.len() / 2]);
    }
    let median = medians.iter().sum::<f64>() / medians.len() as f64;
    let gpu = ops::device::memory(&device).expect("the device's memory");
    let graph_layers = engine.layer_graphs.as_ref().map(|graphs| graphs.launches());
    println!(
        "{}",
        serde_json::json!({
            "device": o.device, "peak_device_mib": gpu.map(|m| m.peak_used >> 20),
            "impl": "ft", "size": o.size, "method": o.method, "dtype": o.dtype, "batch": o.batch, "seq": o.seq,
            "threads": o.threads, "cpu": CpuBackend::current().name(), "keep": o.keep.unwrap_or(layers), "set": o.set,
            "graph_layers": graph_layers, "no_graphs": ops::graph::take_refusal(),
            "peak_graph_mib": ops::graph::memory(&device).expect("the memory of graphs").1 >> 20, "vary": o.vary,
            "tokens_per_s": (tokens / median * 10.0).round() / 10.0, "step_s": all,
            "peak_rss_mib": memory::peak_resident() >> 20, "loss": loss,
            "page_faults": faults,
        })
    );
}
