//! The plan of a run, and how its gradients live.

use super::tuning::Tuning;
use crate::base::units::bytes;
use crate::base::{Error, Result, memory};
use crate::data::order::BatchStream;
use crate::engine::Gradients;
use crate::model::{Adapters, Spec};
use crate::ops;
use crate::plan::{self, Inputs, Plan};
use crate::recipe::{Activations, Dtype, Method, Recipe};
use candle_core::Device;

/// Tenths of the free memory that a run without a budget may take for speed.
const OF_FREE: u64 = 8;

/// How a run goes through a step, and what it needs.
pub struct Forecast {
    pub plan: Plan,
    pub gradients: Gradients,
    /// Uppermost layers that keep their activations.
    pub keep_layers: usize,
}

/// The plan for the largest micro-batch that the rows of `stream` can make; without rows, for full ones. A recipe
/// that names a GPU is planned for one, whether or not it is here.
pub fn forecast(
    recipe: &Recipe,
    spec: &Spec,
    adapters: &Adapters,
    tuning: &Tuning,
    stream: Option<&BatchStream>,
    device: &Device,
) -> Result<Forecast> {
    let gpu = ops::device::memory(device)?;
    let on_gpu = recipe.model.device.starts_with("cuda") || gpu.is_some();
    let choose = |keep_fits| {
        let all_active = recipe.tune.method == Method::Full;
        let micro_batches = recipe.train.gradient_accumulation_steps;
        Gradients::choose(micro_batches, recipe.train.max_grad_norm, all_active, keep_fits)
    };
    let plan = |gradients, keep_layers| {
        let mut inputs = Inputs::of_recipe(recipe, tuning.possible(), adapters, gradients);
        inputs.keep_layers = keep_layers;
        inputs.on_gpu = on_gpu;
        if on_gpu && recipe.model.dtype == Dtype::Bf16 {
            inputs.element = 2;
        }
        if let Some(stream) = stream {
            measure(recipe, stream, &mut inputs);
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
    let mut gradients = choose(true);
    let mut chosen = plan(gradients, least);
    if choose(false) != gradients && !fits(&chosen) {
        gradients = choose(false);
        chosen = plan(gradients, least);
    }
    let mut keep_layers = least;
    if recipe.memory.activations == Activations::Auto && fits(&chosen) {
        // The most that fits: `low` does, `high` does not.
        let (mut low, mut high) = (0, layers + 1);
        while high - low > 1 {
            let middle = (low + high) / 2;
            let tried = plan(gradients, middle);
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
