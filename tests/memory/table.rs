//! Every storage, tier and setting of the activations: forecast, allocator and resident memory, each in a process of its
//! own. The table of `docs/memory.md`:
//!
//! `cargo test --release --test memory table::wide -- --ignored --nocapture`

use crate::counting::{LIVE, MOST};
use crate::peak::adapters;
use crate::{RESULT, case};
use candle_core::Device;
use ft::base::rng::{Rng, Stream};
use ft::base::{allocator, memory};
use ft::data::{Batch, Example};
use ft::engine::{ActiveSet, Ema, Engine, StepStrategy};
use ft::formats::config::Config;
use ft::formats::weights::Weights;
use ft::model::spec::Spec;
use ft::model::{TrainableNetwork, families, shapes};
use ft::ops::cross_entropy::PIECE;
use ft::optim::Optimizer;
use ft::plan::{self, Plan, PlanInputs, PlanModel};
use ft::recipe::{self, Dtype, Recipe};
use ft::setup::row_sizes::EvaluationSize;
use ft::sft::CausalLm;
use ft::source::Placement;
use ft::source::{DiskWeights, ParamInfo, ResidentWeights, StoragePolicy, TrainableStore, disk, resident};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

const STORAGES: [&str; 4] = ["bf16", "int8", "int4", "nf4"];
const TIERS: [&str; 3] = ["device", "disk", "disk, head in pieces"];
const ACTIVATIONS: [&str; 4] = ["keep", "recompute", "recompute, MLP in pieces", AVERAGES];
/// With moving averages of the weights, which an evaluation uses.
const AVERAGES: &str = "recompute, averages";

/// One row of the table.
#[derive(Clone)]
struct Case {
    /// `tiny`, or layers of a real width.
    model: &'static str,
    method: &'static str,
    storage: &'static str,
    tier: &'static str,
    activations: &'static str,
}

fn spec(model: &str) -> Spec {
    if model == "tiny" {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny");
        return families::read(&Config::load(&dir).unwrap()).unwrap();
    }
    // The whole vocabulary would only make a case take minutes.
    let mut spec = families::read(&shapes::config("shape:qwen2.5-7b").unwrap().unwrap()).unwrap();
    spec.layers.truncate(3);
    spec.vocab = 16_384;
    spec
}

/// Resident pages of files, bytes: the program itself.
fn of_files() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("RssFile:")).unwrap();
    1024 * line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap()
}

/// Rows, and tokens of a row.
fn rows(model: &str) -> (usize, usize) {
    if model == "tiny" { (8, 256) } else { (2, 128) }
}

fn recipe(case: &Case) -> Recipe {
    let text = format!(
        "[model]\npath = \"m\"\ndtype = \"bf16\"\n[data]\ntrain = \"t.jsonl\"\n[tune]\nmethod = \"{}\"\n\
         [memory]\nfrozen_weights = \"{}\"\n[train]\nema_decay = {}\n",
        case.method,
        case.storage,
        if case.activations == AVERAGES { 0.9 } else { 0.0 }
    );
    recipe::parse(&text, "test", &[]).unwrap().recipe
}

fn place(case: &Case) -> Placement {
    match case.tier {
        "device" => Placement::Device,
        "disk" => Placement::Disk { head_rows: None },
        _ => Placement::Disk { head_rows: Some(PIECE) },
    }
}

fn store(case: &Case, spec: &Spec, storage: &StoragePolicy, file: &Path) -> Arc<dyn TrainableStore> {
    let (params, weights) = (spec.params(), Weights::open_file(file).unwrap());
    let Placement::Disk { head_rows } = place(case) else {
        let source = ResidentWeights::load(params, &weights, |p: &ParamInfo| storage.of(p), &Device::Cpu).unwrap();
        return Arc::new(source.with_originals(move |p, dtype| resident::read_dense(&weights, p, dtype, &Device::Cpu)));
    };
    let dir = file.parent().unwrap();
    let options = disk::DiskOptions {
        dtype: Dtype::Bf16,
        storage: storage.clone(),
        device: Device::Cpu,
        trained: dir.join("trained"),
        codes: dir.join("codes.safetensors"),
        head: spec.head_name().into(),
        head_rows,
    };
    Arc::new(DiskWeights::open(params, weights, options).unwrap())
}

/// Loads, trains every active set for a step, the lowest last and twice; in a process of its own.
fn measure(case: &Case, file: &Path) -> Value {
    allocator::retain_freed();
    let spec = spec(case.model);
    let recipe = recipe(case);
    let (before, process) = (LIVE.load(Relaxed), memory::resident() + plan::CODE);
    let files = of_files();
    let params = spec.params();
    let layer = |l: usize| {
        let names = params.iter().map(|p| p.name.to_string());
        ActiveSet::new(
            names
                .filter(|n| n.starts_with(&format!("model.layers.{l}.")))
                .collect::<Vec<_>>(),
        )
    };
    let lora = case.method == "lora";
    let active: Vec<ActiveSet> = if lora {
        let names = spec.sites().into_iter();
        vec![ActiveSet::new(names.flat_map(|s| {
            ["A", "B"].map(|side| format!("{}.lora_{side}.weight", s.module))
        }))]
    } else {
        (0..spec.layers.len()).rev().map(layer).collect()
    };
    let storage = StoragePolicy::new(&recipe.memory.storage_rules(), Dtype::Bf16, &params, |_| false).unwrap();
    let mut model = TrainableNetwork::new(spec.clone(), store(case, &spec, &storage, file), Device::Cpu);
    let network = &mut model.network;
    if lora {
        network.adapters = adapters(&spec, 8);
    }
    let (count, length) = rows(case.model);
    let keep = if case.activations == "keep" {
        spec.layers.len()
    } else {
        0
    };
    let strategy = StepStrategy {
        saved_layers: keep,
        mlp_tokens: case.activations.contains("pieces").then_some(count * length / 4),
        placement: place(case),
        storage: storage.clone(),
        ..StepStrategy::new(Dtype::Bf16)
    };
    let costs = plan::costs(&network.adapters);
    let inputs = PlanInputs {
        teacher: None,
        judges: Arc::default(),
        reference: Default::default(),
        rollout: 0,
        batch_tokens: count * length,
        tokens: count * length,
        longest: length,
        documents: count,
        micro_batches: 1,
        strategy: strategy.clone(),
        threads: rayon::current_num_threads(),
        element: 4,
        on_gpu: false,
        gpu_rates: &ft::plan::gpu_time::GPUS[0],
        turns: plan::turns_of(&PlanModel::new(&spec, &storage, &costs), &storage, active.clone()).into(),
        evaluation: EvaluationSize::default(),
        file_bytes: 2,
        adapters: costs,
        data_bytes: 0,
        process_bytes: process,
        ranks: 1,
        machines: 1,
        sequence: Default::default(),
    };
    let rng = Rng::new(9, Stream::Init, &[]);
    let row = |r: usize| Example {
        ids: (0..length)
            .map(|t| rng.below((r * length + t) as u64, spec.vocab as u64) as u32)
            .collect(),
        trained: vec![true; length],
    };
    let batches = [Batch::from_examples((0..count).map(row).collect::<Vec<_>>())];
    let optimizer = Optimizer::new(recipe.optimizer.clone());
    let objective = Box::new(CausalLm::new(spec.vocab));
    let mut engine = Engine::new(model, objective, optimizer, strategy, &active[0]).unwrap();
    engine.max_grad_norm = 0.0;
    engine.seed = 1;
    engine.ema = recipe.train.ema().map(Ema::new);
    let last = active.last().cloned().unwrap();
    for (step, active) in (1..).zip(active.iter().chain([&last])) {
        if step == 1 || !lora {
            // As a run does: moments of a block end with it.
            engine.switch(active, |name| active.contains(name)).unwrap();
        }
        engine.step(step, &batches, active, 1e-3).unwrap();
        engine.with_averages(|_| Ok(())).unwrap();
    }
    let plan: Plan = plan::forecast(&spec, &recipe, &inputs);
    json!({
        "forecast": plan.peak_bytes,
        "process": process,
        "allocated": MOST.load(Relaxed) - before,
        "resident": memory::peak_resident(),
        "code": of_files() - files,
        "moment": plan.peak_moment,
        "table": plan.table(),
    })
}

#[test]
#[ignore = "a process of its own for one row of a table"]
fn child() {
    let Some(text) = case() else { return };
    let words: Vec<&'static str> = text.split('|').map(|w| &*w.to_string().leak()).collect();
    let [model, method, storage, tier, activations, file] = words[..] else {
        panic!("{text}")
    };
    let case = Case {
        model,
        method,
        storage,
        tier,
        activations,
    };
    println!("{RESULT}{}", measure(&case, Path::new(file)));
}

/// Prints the rows whose indices (method, storage, tier, activations) are wanted; returns those that are more than a tenth
/// off.
fn table(model: &'static str, wanted: impl Fn([usize; 4]) -> bool) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.safetensors");
    disk::write_random(&file, &spec(model).params(), 3, 0.02, 1.0, Dtype::Bf16).unwrap();
    let (count, length) = rows(model);
    println!("\n{model}, {count} × {length} tokens\n");
    println!(
        "| method | storage | tier | activations | forecast MiB | allocator | off | resident MiB | off | code MiB |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    let mut wrong = Vec::new();
    for (m, method) in ["lora", "block"].into_iter().enumerate() {
        for (s, storage) in STORAGES.into_iter().enumerate() {
            for (t, tier) in TIERS.into_iter().enumerate() {
                for (a, activations) in ACTIVATIONS.into_iter().enumerate() {
                    if !wanted([m, s, t, a]) {
                        continue;
                    }
                    let case = Case {
                        model,
                        method,
                        storage,
                        tier,
                        activations,
                    };
                    wrong.extend(one(&case, &file));
                }
            }
        }
    }
    wrong
}

/// Prints one row; says so if it is more than a tenth off.
fn one(case: &Case, file: &Path) -> Option<String> {
    let Case {
        model,
        method,
        storage,
        tier,
        activations,
    } = case.clone();
    let text = format!("{model}|{method}|{storage}|{tier}|{activations}|{}", file.display());
    let result = crate::child("table::child", &text).unwrap_or_else(|said| panic!("{said}"));
    let result: Value = serde_json::from_str(&result).unwrap();
    let number = |key: &str| result[key].as_f64().unwrap();
    let own = number("forecast") - number("process");
    let off = [
        own / number("allocated") - 1.0,
        number("forecast") / number("resident") - 1.0,
    ];
    let mib = |bytes: f64| bytes / (1 << 20) as f64;
    let row = format!(
        "| {method} | {storage} | {tier} | {activations} | {:.1} + {:.1} | {:.1} | {:+.1} % | {:.1} | {:+.1} % | {:.1} |",
        mib(own),
        mib(number("process")),
        mib(number("allocated")),
        100.0 * off[0],
        mib(number("resident")),
        100.0 * off[1],
        mib(number("code"))
    );
    println!("{row}");
    // A process of the tiny model has 40 MiB: code, stacks and what libraries keep. `wide` compares it.
    let compared = if model == "tiny" { &off[..1] } else { &off[..] };
    let wrong = compared.iter().any(|off| off.abs() > 0.1);
    wrong.then(|| format!("{row}\n{}", result["table"].as_str().unwrap()))
}

/// A third of the rows: each two settings meet.
#[test]
fn tiny() {
    let wrong = table("tiny", |[m, s, t, a]| (m + s + t + a) % 3 == 0);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
#[ignore = "96 processes, 2 GB of disk"]
fn wide() {
    let wrong = table("three layers of Qwen2.5-7B's width", |_| true);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
