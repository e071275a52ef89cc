//! The plan of a run, and how its gradients live.

use super::teacher;
use super::tuning::Tuning;
use crate::base::units::bytes;
use crate::base::{Error, Result, memory};
use crate::data::order::BatchStream;
use crate::engine::Gradients;
use crate::model::{Adapters, Spec};
use crate::ops;
use crate::ops::cross_entropy::PIECE;
use crate::plan::{self, Inputs, Place, Plan};
use crate::quant::Format;
use crate::recipe::{Activations, Correction, Dtype, Method, Recipe, Tier};
use crate::source::Policy;
use candle_core::Device;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Tenths of the free memory that a run without a budget may take for speed.
const OF_FREE: u64 = 8;

/// How a run goes through a step, and what it needs.
pub struct Forecast {
    pub plan: Plan,
    pub gradients: Gradients,
    /// Uppermost layers that keep their activations.
    pub keep_layers: usize,
    /// How each weight is stored.
    pub storage: Policy,
    /// Where the weights live that are not trained now.
    pub place: Place,
}

/// Where the weights may live, the fastest first.
fn places(recipe: &Recipe, on_gpu: bool, codes_in_files: bool) -> Result<Vec<Place>> {
    let disk: Vec<Place> = match recipe.memory.head_chunk {
        Some(0) => vec![Place::Disk { head_rows: None }],
        Some(rows) => vec![Place::Disk {
            head_rows: Some(rows.next_multiple_of(PIECE)),
        }],
        None => [None, Some(PIECE)].map(|head_rows| Place::Disk { head_rows }).to_vec(),
    };
    let correction = recipe.tune.block.correction;
    let corrects_all =
        recipe.tune.method == Method::Block && matches!(correction, Correction::Sgd | Correction::Signsgd);
    match recipe.memory.tier {
        // On a CPU the host's memory is the device's.
        Tier::Device => Ok(vec![Place::Device]),
        Tier::Host if !on_gpu => Ok(vec![Place::Device]),
        Tier::Auto if on_gpu || codes_in_files => Ok(vec![Place::Device]),
        Tier::Host | Tier::Disk if codes_in_files => Err(Error::new(
            "weights that the model's own files store as codes are not read layer by layer yet",
        )
        .at("memory.tier")
        .hint("use `memory.tier = \"device\"`, or give the unquantized model and `memory.frozen_weights`")),
        Tier::Host | Tier::Disk if on_gpu => Err(Error::usage(format!(
            "`memory.tier = \"{}\"` is not built yet for a GPU",
            recipe.memory.tier.name()
        ))
        .at("memory.tier")
        .hint("use `device`, or `model.device = \"cpu\"`")),
        // These change every weight, and only what is trained comes back from the disk.
        Tier::Auto if corrects_all => Ok(vec![Place::Device]),
        Tier::Disk if corrects_all => Err(Error::usage(
            "`memory.tier = \"disk\"` and `tune.block.correction` contradict each other",
        )
        .found(format!("a correction of all weights: {}", correction.name()))
        .hint("use `memory.tier = \"device\"`, or another correction")),
        Tier::Auto => Ok([&[Place::Device], &disk[..]].concat()),
        Tier::Host | Tier::Disk => Ok(disk),
    }
}

/// The plan for the largest micro-batch that the rows of `stream` can make; without rows, for full ones. A recipe
/// that names a GPU is planned for one, whether or not it is here. `stored`: weights that are codes already.
pub fn forecast(
    recipe: &Recipe,
    spec: &Spec,
    adapters: &Adapters,
    tuning: &Tuning,
    stream: Option<&BatchStream>,
    stored: &BTreeMap<Arc<str>, Format>,
    device: &Device,
) -> Result<Forecast> {
    let gpu = ops::device::memory(device)?;
    let on_gpu = recipe.model.device.starts_with("cuda") || gpu.is_some();
    let choose = |keep_fits| {
        let all_active = recipe.tune.method == Method::Full;
        let micro_batches = recipe.train.gradient_accumulation_steps;
        Gradients::choose(micro_batches, recipe.train.max_grad_norm, all_active, keep_fits)
    };
    let places = places(recipe, on_gpu, !stored.is_empty())?;
    let possible = tuning.possible();
    // What trains by turns is stored like the rest while it does not.
    let always = |name: &str| possible.iter().all(|active| active.contains(name));
    let mut storage = Policy::new(&recipe.memory, recipe.model.dtype, &spec.params(), always)?;
    for (name, format) in stored {
        if recipe.tune.method != Method::Lora {
            return Err(Error::new(
                "the weights of this model are stored as codes: only adapters can be trained on them",
            )
            .at(&**name)
            .found(format)
            .hint("set `tune.method = \"lora\"`, or give the model's unquantized weights"));
        }
        storage.set(name.clone(), Some(*format));
    }
    let teacher = teacher::cost(recipe, spec)?;
    let plan = |place, gradients, keep_layers| {
        let mut inputs = Inputs::of_recipe(recipe, possible.clone(), adapters, gradients);
        inputs.storage = storage.clone();
        inputs.keep_layers = keep_layers;
        inputs.place = place;
        inputs.on_gpu = on_gpu;
        if on_gpu && recipe.model.dtype == Dtype::Bf16 {
            inputs.element = 2;
        }
        if let Some(stream) = stream {
            measure(recipe, stream, &mut inputs);
        }
        inputs.teacher.clone_from(&teacher);
        if teacher.is_some() && recipe.distill.lmbda > 0.0 {
            // Answers of the student can be as long as a row may be.
            inputs.tokens = recipe.train.batch_size * recipe.data.max_length;
            inputs.longest = recipe.data.max_length;
        }
        plan::forecast(spec, recipe, &inputs)
    };
    let budget = recipe.memory.budget.or_else(|| match gpu {
        Some(gpu) => Some(gpu.free / 10 * OF_FREE),
        None if on_gpu => None,
        None => memory::available().map(|b| b / 10 * OF_FREE),
    });
    let fits = |plan: &Plan| budget.is_none_or(|b| plan.peak_bytes <= b);
    let layers = spec.layers.len();
    let least = match recipe.memory.activations {
        Activations::Keep => layers,
        _ => 0,
    };
    // The first that fits; else the smallest.
    let mut ways: Vec<(Place, Gradients)> = Vec::new();
    for place in places {
        ways.push((place, choose(true)));
        if choose(false) != choose(true) {
            ways.push((place, choose(false)));
        }
    }
    let mut best: Option<(Plan, Place, Gradients)> = None;
    for (place, gradients) in ways {
        let tried = plan(place, gradients, least);
        let smaller = best.as_ref().is_none_or(|(b, ..)| tried.peak_bytes < b.peak_bytes);
        if smaller {
            best = Some((tried, place, gradients));
        }
        if best.as_ref().is_some_and(|(b, ..)| fits(b)) {
            break;
        }
    }
    let Some((mut chosen, place, gradients)) = best else {
        return Err(Error::new("there is no place for the weights"));
    };
    let mut keep_layers = least;
    if recipe.memory.activations == Activations::Auto && fits(&chosen) {
        // The most that fits: `low` does, `high` does not.
        let (mut low, mut high) = (0, layers + 1);
        while high - low > 1 {
            let middle = (low + high) / 2;
            let tried = plan(place, gradients, middle);
            if fits(&tried) {
                (low, chosen) = (middle, tried);
            } else {
                high = middle;
            }
        }
        keep_layers = low;
    }
    Ok(Forecast {
        plan: chosen,
        gradients,
        keep_layers,
        storage,
        place,
    })
}

/// Errors: the plan needs more than the `memory.budget` of the recipe.
pub fn check_budget(plan: &Plan, recipe: &Recipe) -> Result<()> {
    match recipe.memory.budget {
        Some(budget) if plan.peak_bytes > budget => {
            let most = plan.lines.iter().max_by_key(|l| l.at_peak);
            let most = most.map_or(String::new(), |l| {
                format!(", most of it {} ({})", l.label, bytes(l.at_peak))
            });
            Err(Error::new("the run does not fit the memory budget")
                .at("memory.budget")
                .found(format!("a forecast peak of {}{most}", bytes(plan.peak_bytes)))
                .expected(format!("at most {}", bytes(budget)))
                .hint("lower `data.max_length` or `train.batch_size`, or use `tune.method = \"lora\"` or `\"block\"`"))
        }
        _ => Ok(()),
    }
}

/// The largest micro-batch that these rows can make.
fn measure(recipe: &Recipe, stream: &BatchStream, inputs: &mut Inputs) {
    let mut lengths = stream.lengths().to_vec();
    lengths.sort_unstable_by(|a, b| b.cmp(a));
    let rows = recipe.train.batch_size;
    let longest = lengths.first().copied().unwrap_or(1);
    inputs.longest = longest;
    inputs.tokens = match recipe.data.packing {
        true => (rows * recipe.data.max_length).min(lengths.iter().sum()),
        // Any rows can meet in a micro-batch: the longest do at worst.
        false => lengths.iter().cycle().take(rows).sum(),
    };
    // The rows are read already: they are part of what the process holds.
    inputs.data_bytes = lengths.iter().map(|n| 5 * *n as u64 + 80).sum();
    inputs.process_bytes = inputs.process_bytes.saturating_sub(inputs.data_bytes);
}
