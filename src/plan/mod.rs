//! The memory a run will need, worked out on paper: one optimizer step is walked through as the engine takes
//! it, every tensor written into a ledger when it comes and struck out when it goes. Allocates nothing.
//!
//! Letters: N tokens of the largest micro-batch, D hidden size, H heads, K key/value heads, E head size,
//! I intermediate size, V vocabulary, R rank of an adapter.
//!
//! In short: resident weights + optimizer(active) + layers above the lowest active · N · D · 4 + the larger of
//! (work of one layer, chunk of logits) + gradients.

mod ledger;
mod mlp;
mod step;
mod table;
mod teacher;
mod time;
mod turns;
mod weights;
mod work;

pub use table::{Choice, Line, Plan};
pub use teacher::Teacher;
pub use time::seconds;

use crate::engine::active::group_of;
use crate::engine::{Active, Gradients};
use crate::model::{Adapters, Spec};
use crate::optim::Optimizer;
use crate::peft::Cost;
use crate::peft::start::cost;
use crate::quant::Storage;
use crate::recipe::{LoraInit, Method, Recipe, RolloutWeights};
use crate::source::{Copies, Group, Policy};
use ledger::{Kind, Ledger};
use std::collections::{BTreeMap, BTreeSet};

/// Where the weights live that are not trained now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Device,
    /// In the host's memory, computing on a GPU; the head and what is trained are on the device.
    Host,
    /// Layers come from the disk; the output projection so many rows at a time, or held whole.
    Disk {
        head_rows: Option<usize>,
    },
}

impl Place {
    /// Of weights that travel to the device layer by layer: the rows of the head that come at a time, or all at once.
    pub(crate) fn travels(self) -> Option<Option<usize>> {
        match self {
            Place::Device => None,
            Place::Host => Some(None),
            Place::Disk { head_rows } => Some(head_rows),
        }
    }
}

/// Code that is read in when it first runs (1.6 to 1.9 MiB in the steps of `tests/memory`), stacks, small blocks of the heap.
pub const CODE: u64 = 3 << 20;

/// What the plan needs to know beside model and recipe.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// N: tokens of the largest micro-batch.
    pub tokens: usize,
    /// Tokens of the longest document in it.
    pub longest: usize,
    /// Fewest documents in a micro-batch.
    pub documents: usize,
    /// Micro-batches of an optimizer step.
    pub micro_batches: usize,
    pub gradients: Gradients,
    /// Uppermost layers that keep their activations.
    pub keep_layers: usize,
    /// Tokens that go through an MLP at a time; `None`: all.
    pub mlp_tokens: Option<usize>,
    pub threads: usize,
    /// Bytes of an element of an activation: 4 on the CPU, as the weights on a GPU.
    pub element: u64,
    /// Tensors lie on a GPU; the program, its rows and what retired blocks leave behind on the host.
    pub on_gpu: bool,
    /// Every set of parameters that can be trained at one time.
    pub active: Vec<Active>,
    /// How each weight is stored.
    pub storage: Policy,
    /// What is kept packed, where a tile unit is.
    pub copies: Option<Copies>,
    /// Bytes of a number of the files as it is read to be coded; none where they hold codes already.
    pub file_bytes: u64,
    /// What the adapter on each linear that has one holds and needs, by module.
    pub adapters: BTreeMap<String, Cost>,
    pub place: Place,
    /// Runs beside the model.
    pub teacher: Option<Teacher>,
    /// Inputs of layers wait on the host.
    pub parked: bool,
    /// A frozen copy of the weights stands beside those that train.
    pub reference: bool,
    /// Answers of a rollout before the step.
    pub rollout: usize,
    /// The tokenized rows.
    pub data_bytes: u64,
    /// What the program holds before the model is loaded, and `CODE`.
    pub process_bytes: u64,
}

impl Inputs {
    /// The largest that the recipe allows: every row as long as `max_length`.
    pub fn of_recipe(recipe: &Recipe, active: Vec<Active>, adapters: &Adapters, gradients: Gradients) -> Self {
        let rows = recipe.train.batch_size;
        Self {
            tokens: rows * recipe.data.max_length,
            longest: recipe.data.max_length,
            documents: rows,
            micro_batches: recipe.train.gradient_accumulation_steps,
            gradients,
            keep_layers: 0,
            mlp_tokens: None,
            threads: rayon::current_num_threads(),
            element: 4,
            on_gpu: false,
            active,
            storage: Policy::dense(recipe.model.dtype),
            copies: None,
            file_bytes: recipe.model.dtype.bytes(),
            adapters: adapters
                .iter()
                .map(|(module, adapter)| (module.clone(), adapter.cost()))
                .collect(),
            place: Place::Device,
            teacher: None,
            parked: recipe.memory.activations == crate::recipe::Activations::Host,
            reference: false,
            rollout: 0,
            data_bytes: 0,
            process_bytes: crate::base::memory::resident() + CODE,
        }
    }
}

impl Inputs {
    /// What fresh adapters need to start: covariances of a layer, decompositions.
    fn start_bytes(&self, recipe: &Recipe, spec: &Spec) -> u64 {
        let lora = &recipe.tune.lora;
        let (samples, own) = match lora.init_lora_weights {
            LoraInit::Corda => (lora.corda.samples, lora.corda.data.is_empty()),
            _ => (lora.init_samples, true),
        };
        let mut tokens = (samples * self.longest) as u64;
        if own && self.data_bytes > 0 {
            tokens = tokens.min(self.data_bytes / 5);
        }
        cost::bytes(lora, spec.hidden, tokens, &self.adapters)
    }

    /// Keys and values of one answer. On a GPU those of a layer are put together for its attention.
    fn cache(&self, spec: &Spec) -> u64 {
        let layer = self.element * (2 * self.longest * spec.kv_width()) as u64;
        layer * (spec.layers.len() + self.on_gpu as usize) as u64
    }
}

/// Shape of every parameter and adapter matrix by name.
fn shapes(spec: &Spec, adapters: &BTreeMap<String, Cost>) -> BTreeMap<String, Vec<usize>> {
    let mut all: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for p in spec.params() {
        all.insert(p.name.to_string(), p.shape);
    }
    for cost in adapters.values() {
        all.extend(
            cost.trained
                .iter()
                .map(|(name, shape)| (name.to_string(), shape.clone())),
        );
    }
    all
}

/// Elements of every parameter and adapter matrix by name.
pub(crate) fn elements(spec: &Spec, adapters: &BTreeMap<String, Cost>) -> BTreeMap<String, u64> {
    let count = |shape: Vec<usize>| shape.into_iter().product::<usize>() as u64;
    let all = shapes(spec, adapters).into_iter();
    all.map(|(name, shape)| (name, count(shape))).collect()
}

/// Bytes of the optimizer's state of a parameter of `shape`: moments of its active part, lower halves of all of it.
fn state_bytes(recipe: &Recipe, active: &Active, name: &str, shape: &[usize], bf16: bool) -> u64 {
    let n: usize = shape.iter().product();
    let moments = match active.places(name, n) {
        Some(part) => Optimizer::state_bytes(&recipe.optimizer, &[part.len]),
        None => Optimizer::state_bytes(&recipe.optimizer, shape),
    };
    moments + n as u64 * Optimizer::master_bytes(&recipe.optimizer, bf16)
}

/// Of active sets that differ in the number of their layer only, the one with the lowest: it keeps the most.
fn distinct<'a>(spec: &Spec, inputs: &'a Inputs) -> Vec<&'a Active> {
    // Layers with storages of their own are not alike.
    let mut storages: BTreeMap<String, Storage> = BTreeMap::new();
    let below = |name: &str| name.splitn(4, '.').nth(3).unwrap_or_default().to_string();
    for p in spec.params().iter().filter(|p| matches!(p.group, Group::Layer(_))) {
        let storage = inputs.storage.of(p);
        if *storages.entry(below(&p.name)).or_insert(storage) != storage {
            return inputs.active.iter().collect();
        }
    }
    let mut lowest: BTreeMap<Vec<String>, &Active> = BTreeMap::new();
    let mut others = Vec::new();
    for active in &inputs.active {
        let Group::Layer(first) = active.lowest() else {
            others.push(active);
            continue;
        };
        if active.is_masked() || active.corrected().next().is_some() {
            others.push(active);
            continue;
        }
        let relative = |name: &str| match group_of(name) {
            Group::Layer(l) => format!("{} {}", l - first, below(name)),
            _ => name.to_string(),
        };
        let kept = lowest.entry(active.names().map(relative).collect()).or_insert(active);
        if active.lowest() < kept.lowest() {
            *kept = active;
        }
    }
    others.extend(lowest.into_values());
    others
}

/// The forecast of one run: the worst moment of its worst step.
pub fn forecast(spec: &Spec, recipe: &Recipe, inputs: &Inputs) -> Plan {
    let sizes = elements(spec, &inputs.adapters);
    let shapes = shapes(spec, &inputs.adapters);
    let params = spec.params();
    let stored = recipe.model.dtype.bytes();
    let parameters: u64 = params.iter().map(|p| p.elements() as u64).sum();
    let adapters: u64 = sizes.values().sum::<u64>() - parameters;
    let fixed: u64 = inputs.adapters.values().map(|c| c.fixed).sum();
    let names: BTreeSet<&str> = params.iter().map(|p| &*p.name).collect();
    let is_adapter = |name: &str| !names.contains(name);
    let size = |name: &str| sizes.get(name).copied().unwrap_or(0);
    let changed = |active: &'_ Active| {
        active
            .names()
            .chain(active.corrected())
            .map(str::to_string)
            .collect::<Vec<_>>()
    };
    let ever: BTreeSet<String> = inputs.active.iter().flat_map(changed).collect();
    let part = |active: &Active, name: &str| match active.places(name, size(name) as usize) {
        Some(part) => part.len as u64,
        None => size(name),
    };

    let mut worst: Option<(Ledger, u64)> = None;
    for active in distinct(spec, inputs) {
        let mut ledger = Ledger::new(inputs.on_gpu);
        ledger.moment("loading");
        let trained: u64 = active.names().map(|n| part(active, n)).sum();
        let state: u64 = active
            .names()
            .filter_map(|n| {
                let bf16 = stored == 2 && !is_adapter(n);
                Some(state_bytes(recipe, active, n, shapes.get(n)?, bf16))
            })
            .sum::<u64>()
            // Lower halves of what is corrected have to be at hand too.
            + active
                .corrected()
                .map(|n| size(n) * Optimizer::master_bytes(&recipe.optimizer, stored == 2))
                .sum::<u64>();
        // What a master knows beyond bf16 stays when its block retires.
        let master = Optimizer::master_bytes(&recipe.optimizer, stored == 2);
        let retired: u64 = match inputs.place {
            Place::Device | Place::Host => ever
                .iter()
                .filter(|n| !active.wants(n) && !is_adapter(n))
                .map(|n| match inputs.storage.coded().contains_key(n.as_str()) {
                    // The exact value is beside the codes.
                    true => (stored + master) * size(n),
                    false => master * size(n),
                })
                .sum(),
            Place::Disk { .. } => 0,
        };
        // What travels starts on the host: all of it, or two layers that were read ahead.
        let on_host: u64 = match inputs.place {
            Place::Host => spec.params().iter().map(|p| inputs.storage.of(p).bytes(&p.shape)).sum(),
            Place::Disk { .. } if inputs.on_gpu => weights::held(spec, &inputs.storage, stored, inputs.place, active),
            _ => 0,
        };
        let mut held = vec![
            ledger.hold(Kind::Process, inputs.process_bytes),
            ledger.hold(Kind::Data, inputs.data_bytes),
        ];
        turns::load(&mut ledger, &params, inputs);
        held.push(ledger.hold(
            Kind::Weights,
            weights::held(spec, &inputs.storage, stored, inputs.place, active),
        ));
        held.push(ledger.hold(Kind::Retired, retired));
        if inputs.reference {
            held.push(ledger.hold(Kind::Reference, stored * parameters));
        }
        turns::turn(&mut ledger, &params, inputs, active, (stored, master));
        if let Some(teacher) = &inputs.teacher {
            held.push(ledger.hold(Kind::Teacher, teacher.weights()));
            held.push(ledger.hold(Kind::OnHost, teacher.on_host(inputs.on_gpu)));
        }
        held.extend([
            ledger.hold(Kind::Adapters, (adapters + fixed) * 4),
            ledger.hold(Kind::OnHost, on_host),
            ledger.hold(Kind::Optimizer, state),
        ]);
        if let Some(teacher) = &inputs.teacher {
            ledger.moment("the answers of the student");
            ledger.touch(Kind::Activations, teacher.answers(spec, inputs));
        }
        if inputs.rollout > 0 {
            // Codes of every matrix: of eight bits, or of four with a scale and a minimum for 64.
            let matrices: u64 = params
                .iter()
                .filter(|p| p.shape.len() == 2)
                .map(|p| p.elements() as u64)
                .sum();
            let codes = match recipe.reinforce.rollout_weights {
                RolloutWeights::Exact => 0,
                RolloutWeights::Int8 => matrices,
                RolloutWeights::Int4 => matrices * 9 / 16,
            };
            held.push(ledger.hold(Kind::Rollout, codes));
            ledger.moment("rollout");
            // Keys and values of every token of every answer, and logits of one token each, twice.
            let answer = inputs.cache(spec) + 8 * spec.vocab as u64;
            ledger.touch(Kind::Rollout, inputs.rollout as u64 * answer);
        }
        ledger.moment("start of the adapters");
        ledger.touch(Kind::Scratch, inputs.start_bytes(recipe, spec));
        held.push(ledger.hold(Kind::Copies, weights::copies(spec, inputs, active)));
        step::walk(&mut ledger, spec, recipe, inputs, active);
        // A checkpoint or `final/` takes one tensor at a time as f32; what is on the disk, a small part of it.
        ledger.moment("saving");
        let largest = match (recipe.tune.method, inputs.place) {
            (Method::Lora, _) | (_, Place::Disk { .. }) => active.names().map(size).max(),
            _ => sizes.values().copied().max(),
        };
        ledger.touch(Kind::Saving, 4 * largest.unwrap_or(0));
        ledger.drop_all(held);
        if worst.as_ref().is_none_or(|(w, _)| ledger.peak > w.peak) {
            worst = Some((ledger, trained));
        }
    }
    let (ledger, trained) = worst.unwrap_or_default();
    table::plan(spec, recipe, inputs, ledger, parameters + adapters, trained)
}

#[cfg(test)]
mod tests;
