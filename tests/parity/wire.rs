//! The only place where the parity tests touch the library. Everything else goes through the `ft` program.

use candle_core::{DType, Device, Tensor};
use ft::data::{Batch, batch::Example};
use ft::engine::{self, Active, Keeping};
use ft::model::Network;
use ft::ops::tally::Tally;
use ft::ops::transfer::Copier;
use ft::ops::{CpuPath, step};
use ft::optim::{Optimizer, Schedule};
use ft::recipe::{self, Dtype, Recipe};
use ft::run::setup::Described;
use ft::sft::CausalLm;
use std::collections::BTreeMap;
use std::path::Path;

/// One document: ids and which of them are trained.
pub struct Document {
    pub ids: Vec<u32>,
    pub trained: Vec<bool>,
}

/// What one forward and backward pass over documents, laid end to end, gives.
pub struct Measured {
    /// `[T, V]` of each document, row-major.
    pub logits: Vec<Vec<f64>>,
    /// Sum over the trained tokens / their number.
    pub loss: f64,
    /// By the name in the checkpoint.
    pub gradients: BTreeMap<String, Vec<f64>>,
}

fn values(t: &Tensor) -> Vec<f64> {
    let flat = t.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    flat.to_vec1::<f32>().unwrap().into_iter().map(f64::from).collect()
}

fn open(dir: &Path, adapter: Option<&Path>) -> Network {
    // All parity tests on one set of CPU operations: FT_CPU=portable cargo test --release --test parity
    if let Ok(path) = std::env::var("FT_CPU") {
        CpuPath::force(&path).unwrap_or_else(|e| panic!("{e}"));
    }
    let model = Described::open(dir.to_str().unwrap(), "main", None).unwrap_or_else(|e| panic!("{e}"));
    model
        .infer(adapter, Some(Dtype::F32), &Device::Cpu)
        .unwrap_or_else(|e| panic!("{e}"))
}

fn batch(documents: &[Document]) -> Batch {
    let examples: Vec<Example> = documents
        .iter()
        .map(|d| Example {
            ids: d.ids.clone(),
            trained: d.trained.clone(),
        })
        .collect();
    Batch::from_examples(&examples)
}

fn logits_of(network: &Network, batch: &Batch) -> Vec<Vec<f64>> {
    let ctx = network.context(&batch.positions, &batch.documents, None).unwrap();
    let hidden = network.hidden_states(&batch.ids, &ctx).unwrap();
    let head = network.head().unwrap();
    let mut all = values(&head.logits(&hidden).unwrap());
    if let Some(cap) = head.softcap {
        all.iter_mut().for_each(|x| *x = cap as f64 * (*x / cap as f64).tanh());
    }
    let vocab = all.len() / batch.len();
    let bounds = batch.documents.windows(2);
    bounds.map(|d| all[d[0] * vocab..d[1] * vocab].to_vec()).collect()
}

/// Logits of documents, with or without an adapter.
pub fn logits(dir: &Path, adapter: Option<&Path>, documents: &[Document]) -> Vec<Vec<f64>> {
    logits_of(&open(dir, adapter), &batch(documents))
}

/// Loads a model directory in f32; logits, loss and the gradient of every parameter.
pub fn logits_and_grads(dir: &Path, documents: &[Document]) -> Measured {
    let network = open(dir, None);
    let batch = batch(documents);
    let logits = logits_of(&network, &batch);
    let active = Active::new(network.spec.params().iter().map(|p| p.name.to_string()));
    let objective = CausalLm::new(network.spec.vocab);
    let mut sink = engine::sinks::Collect {
        active: &active,
        gradients: BTreeMap::new(),
    };
    let tally = Tally::new(&network.device).unwrap();
    let batches = [batch];
    let keep = Keeping::default();
    let totals = engine::window(
        &network,
        &objective,
        &batches,
        &active,
        keep,
        |_| None,
        &mut sink,
        &tally,
    )
    .unwrap();
    let totals = totals.with(tally.read().unwrap());
    // Inputs that wait elsewhere are the same bits.
    let copier = Copier::new(&network.device).unwrap();
    let parked = Keeping {
        layers: 1,
        parked: Some(&copier),
    };
    let mut again = engine::sinks::Collect {
        active: &active,
        gradients: BTreeMap::new(),
    };
    engine::window(
        &network,
        &objective,
        &batches,
        &active,
        parked,
        |_| None,
        &mut again,
        &tally,
    )
    .unwrap();
    for (name, gradient) in &sink.gradients {
        assert_eq!(values(gradient), values(&again.gradients[name]), "{name}");
    }
    Measured {
        logits,
        loss: totals.loss(),
        gradients: sink.gradients.iter().map(|(n, g)| (n.clone(), values(g))).collect(),
    }
}

/// A recipe from the lines that matter.
fn parse(lines: &str) -> Recipe {
    let text = format!("[model]\npath = \"unused\"\n[data]\ntrain = \"unused.jsonl\"\n{lines}");
    recipe::parse(&text, "parity", &[])
        .unwrap_or_else(|e| panic!("{e}\n{text}"))
        .recipe
}

/// Multipliers of steps 1 to `steps`; `lines` is the `[schedule]` table.
pub fn multipliers(lines: &str, steps: u64) -> Vec<f64> {
    let schedule = Schedule::new(&parse(lines).schedule, steps);
    (1..=steps).map(|k| schedule.multiplier(k)).collect()
}

/// One parameter `[3, 4]` under an optimizer (`lines` is the `[optimizer]` table): after each step the weights
/// and the moments that are kept.
pub fn optimizer_steps(lines: &str, start: &[f32], gradients: &[Vec<f32>]) -> Vec<(Vec<f64>, Vec<f64>, Vec<f64>)> {
    let settings = parse(lines).optimizer;
    let lr = settings.learning_rate;
    let mut optimizer = Optimizer::new(settings);
    let tensor = |v: &[f32]| Tensor::from_slice(v, (3, 4), &Device::Cpu).unwrap();
    let weight = tensor(start);
    let mut out = Vec::new();
    for gradient in gradients {
        optimizer.update("w", &weight, &tensor(gradient), lr, 1.0).unwrap();
        let parts = optimizer.saved().next().map(|s| s.parts).unwrap_or_default();
        let part = |name| {
            parts
                .iter()
                .find(|(n, _)| *n == name)
                .map_or(vec![], |(_, t)| values(t))
        };
        let (m, v) = (part("m"), part("v"));
        out.push((values(&weight), m, v));
    }
    out
}

/// Elements of a block of an eight-bit moment.
pub const INT8_BLOCK: usize = step::BLOCK;

/// The table of eight-bit codes.
pub fn code_table(signed: bool) -> [f32; 256] {
    step::code_table(signed)
}

/// Codes and scales of `values`.
pub fn encode(values: &[f32], signed: bool) -> (Vec<u8>, Vec<f32>) {
    step::encode(values, signed)
}

/// AdamW with moments in eight bits on one vector (`lines` is the `[optimizer]` table): the weights after each step.
/// Parameters of that few elements keep f32 moments in a run, so the rule is called below `Optimizer`.
pub fn int8_steps(lines: &str, start: &[f32], gradients: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let settings = parse(lines).optimizer;
    let n = start.len();
    let tensor = |v: &[f32]| Tensor::from_slice(v, n, &Device::Cpu).unwrap();
    let zeros = || step::Moment::zeros(n, true, &Device::Cpu).unwrap();
    let (weight, first, second) = (tensor(start), zeros(), zeros());
    let mut out = Vec::new();
    for (k, gradient) in gradients.iter().enumerate() {
        let item = step::Item {
            weight: &weight,
            precision: step::Precision::Whole,
            gradient: &tensor(gradient),
            first: Some(&first),
            second: Some(&second),
            lr: settings.learning_rate,
            weight_decay: 0.0,
            step: k as u64 + 1,
        };
        let rule = step::Rule::Adamw {
            betas: settings.betas,
            eps: settings.eps,
        };
        step::step(rule, &[item], 1.0).unwrap();
        out.push(weight.to_vec1::<f32>().unwrap());
    }
    out
}

/// Ids and trained marks of every row of a file, as a training run would see them.
pub fn rows(model: &Path, file: &Path, stage: &str) -> Vec<Document> {
    let quoted = |p: &Path| serde_json::to_string(p.to_str().unwrap()).unwrap();
    let text = format!(
        "[model]\npath = {}\n[data]\ntrain = {}\nmax_length = 512\nshuffle = false\npacking = false\n[train]\nstage = \"{stage}\"\n",
        quoted(model),
        quoted(file)
    );
    let recipe = recipe::parse(&text, "parity", &[])
        .unwrap_or_else(|e| panic!("{e}"))
        .recipe;
    let described = Described::open(&recipe.model.path, "main", None).unwrap_or_else(|e| panic!("{e}"));
    let rows = ft::run::rows::Rows::read(&recipe, &described).unwrap_or_else(|e| panic!("{e}"));
    let examples = rows.train.examples.into_iter();
    examples
        .map(|e| Document {
            ids: e.ids,
            trained: e.trained,
        })
        .collect()
}
