//! The memory plan of a run: every open setting gets the fastest value that fits. Also the error if nothing fits.

use crate::base::units::bytes;
use crate::base::{Error, Result, memory};
use crate::engine::{GradientStorage, StepStrategy};
use crate::model::{Adapters, Spec};
use crate::ops::device::DeviceMemory;
use crate::ops::{self, quantized::Products};
use crate::plan::advice;
use crate::plan::gpu_time::GpuRates;
use crate::plan::knee;
use crate::plan::search::{PlanBase, PlanContext, PlannedStrategy, fits};
use crate::plan::{Plan, PlanInputs};
use crate::recipe::table::KeyPath;
use crate::recipe::{Activations, Auto, ChunkSize, DistributedSection, Memory, RankWeights, Recipe, Tier};
use crate::setup::StoredWeights;
use crate::setup::active_schedule::ActiveSchedule;
use crate::setup::defaults::Choice;
use crate::setup::prompts;
use crate::setup::rewards;
use crate::setup::row_sizes::RowSizes;
use crate::setup::teacher;
use crate::source::Placement;
use candle_core::Device;
use std::sync::Arc;

/// Tenths of the free memory that a run without a budget may take for speed.
const OF_FREE: u64 = 8;

/// The strategy of a run and its memory.
pub struct MemoryPlan {
    pub plan: Plan,
    pub strategy: StepStrategy,
    /// The inputs of the plan, with this strategy.
    pub inputs: PlanInputs,
    /// Set if the run does not fit: the error to report.
    pub refused: Option<PlanRefusal>,
    pub limits: MemoryLimits,
}

/// States if the run fits in the memory of this machine now.
#[derive(Debug, Clone, PartialEq)]
pub struct FitVerdict {
    pub fits: bool,
    /// One line of text.
    pub text: String,
}

pub struct PlanRefusal {
    pub error: Error,
    /// True if the recipe's budget is too small, false if the machine is.
    pub by_budget: bool,
}

/// Available memory: the goal of the search, and the hard limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryLimits {
    pub goal: Option<u64>,
    pub most: Option<u64>,
    /// Host memory beside a GPU.
    pub host: Option<u64>,
}

impl MemoryLimits {
    /// `page_cache`: bytes of the free memory of this rank for files that the ranks of a machine share. The goal of a run on a CPU
    /// leaves it free, up to half of the memory: what is not in the page cache is read from the disk.
    fn of(recipe: &Recipe, gpu_free: Option<u64>, on_gpu: bool, process: ProcessState, page_cache: u64) -> Self {
        let free = process.available;
        // The plan includes the current memory of this process.
        let here = free.map(|free| free + process.resident);
        let goal = |free: u64| free / 10 * OF_FREE;
        let (goal, most) = match (recipe.memory.budget, gpu_free) {
            (Some(budget), _) => (Some(budget), Some(budget)),
            (None, Some(free)) => (Some(goal(free)), Some(free)),
            (None, None) if on_gpu => (None, None),
            (None, None) => (free.map(|free| goal(free - page_cache.min(free / 2))), here),
        };
        // If the GPU is on another machine, its host is assumed to be like this one.
        let host = recipe.memory.host_budget.or(here).filter(|_| on_gpu);
        Self { goal, most, host }
    }
}

/// The state of this process on which a plan depends. Ranks of one job plan with numbers on which they agree.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProcessState {
    /// Free host memory.
    pub available: Option<u64>,
    /// Memory that the process uses now.
    pub resident: u64,
    /// Compute threads.
    pub threads: usize,
    /// Ranks of the job.
    pub ranks: usize,
    /// Machines of the job.
    pub machines: usize,
}

impl ProcessState {
    /// The state now.
    pub fn now() -> Self {
        Self {
            available: memory::available(),
            resident: memory::resident(),
            threads: rayon::current_num_threads(),
            ranks: 1,
            machines: 1,
        }
    }

    /// The memory of one of `ranks` ranks on `machines` machines like this one, which share the memory of theirs.
    pub fn shared_by(ranks: usize, machines: usize) -> Self {
        let now = Self::now();
        Self {
            available: now.available.map(|free| free / ranks.div_ceil(machines) as u64),
            ranks,
            machines,
            ..now
        }
    }
}

/// The device that a run is planned for.
pub struct PlanDevice {
    /// `None`: the state when the plan is made.
    process: Option<ProcessState>,
    /// The memory of the GPU; `None`: no GPU of this machine limits the plan.
    gpu: Option<DeviceMemory>,
    rates: &'static GpuRates,
    /// Layers can run as CUDA graphs.
    graphs: bool,
}

impl PlanDevice {
    /// Errors: a driver that does not answer.
    pub fn of(device: &Device) -> Result<Self> {
        let name = ops::device::name(device)?;
        Ok(Self {
            process: None,
            gpu: ops::device::memory(device)?,
            rates: GpuRates::of_name(&name.unwrap_or_default()),
            graphs: ops::graph::available(device),
        })
    }

    /// Plans for this state of the process.
    pub fn with_process(self, process: ProcessState) -> Self {
        Self {
            process: Some(process),
            ..self
        }
    }

    /// Free memory of the GPU; `None` on a CPU.
    pub fn free(&self) -> Option<u64> {
        self.gpu.map(|gpu| gpu.free)
    }

    /// Plans for this free memory of the GPU.
    pub fn with_free(mut self, free: u64) -> Self {
        if let Some(gpu) = &mut self.gpu {
            gpu.free = free;
        }
        self
    }

    /// A GPU that this machine may not have.
    pub fn like(rates: &'static GpuRates) -> Self {
        Self {
            process: None,
            gpu: None,
            rates,
            graphs: true,
        }
    }
}

/// Plans the largest micro-batch of a run over these rows; without rows, full ones. A recipe with a GPU is planned for
/// a GPU even if there is none. `stored`: how the files store the weights.
///
/// Errors: settings that contradict each other. A run that does not fit is no error: see `refused`.
pub fn forecast(
    recipe: &Recipe,
    spec: &Spec,
    adapters: &Adapters,
    schedule: &ActiveSchedule,
    rows: Option<&RowSizes>,
    stored: &StoredWeights,
    device: &PlanDevice,
) -> Result<MemoryPlan> {
    let gpu = device.gpu;
    let on_gpu = recipe.model.device.is_gpu() || gpu.is_some();
    if recipe.memory.host_budget.is_some() && !on_gpu {
        return Err(Error::usage("`memory.host_budget` has no effect on a CPU")
            .at(Memory::host_budget)
            .found("a CPU run: host memory and device memory are the same")
            .hint("set `memory.budget`"));
    }
    recipe.model.dtype.runs_on(on_gpu)?;
    if on_gpu {
        device.rates.check(recipe.memory.frozen_products)?
    } else {
        recipe.memory.frozen_products.check(&Device::Cpu)?
    }
    let teacher = teacher::spec(recipe, spec, on_gpu)?;
    let judges = if prompts::reinforces(recipe) {
        rewards::costs(&recipe.rl)?.into()
    } else {
        Arc::default()
    };
    let process = device.process.unwrap_or_else(ProcessState::now);
    let setting = PlanContext {
        spec,
        adapters,
        schedule,
        rows,
        stored,
        on_gpu,
        gpu_rates: device.rates,
        graphs: on_gpu && device.graphs,
        teacher: teacher.as_ref(),
        judges: &judges,
        process,
    };
    let gpu_free = gpu.map(|g| g.free);
    let limits = MemoryLimits::of(recipe, gpu_free, setting.on_gpu, process, setting.page_cache(recipe)?);
    let mut chosen = setting.choose(recipe, limits)?;
    setting.check_loftq(recipe, &chosen.inputs.strategy.storage)?;
    chosen.plan.choices = setting.choices(recipe, limits, &chosen)?;
    let refused = if !chosen.fits {
        Some(advice::refused(&setting, recipe, limits, &chosen))
    } else {
        None
    };
    Ok(MemoryPlan {
        strategy: chosen.inputs.strategy.clone(),
        inputs: chosen.inputs,
        plan: chosen.plan,
        refused,
        limits,
    })
}

impl MemoryPlan {
    /// Whether the run fits, in one line.
    pub fn verdict(&self, recipe: &Recipe) -> FitVerdict {
        let (limits, plan) = (self.limits, &self.plan);
        let of = |needed: u64, most: u64, budget: bool| {
            if budget {
                format!("{} of a budget of {}", bytes(needed), bytes(most))
            } else {
                format!("{} of {} free", bytes(needed), bytes(most))
            }
        };
        let device = match limits.most {
            Some(most) => of(plan.peak_bytes, most, recipe.memory.budget.is_some()),
            None => format!("{} of GPU memory (no GPU on this machine)", bytes(plan.peak_bytes)),
        };
        let host = match (plan.peak_host_bytes, limits.host) {
            (Some(host), Some(most)) => {
                format!(", on the host {}", of(host, most, recipe.memory.host_budget.is_some()))
            }
            _ => String::new(),
        };
        let fits = self.refused.is_none();
        let word = match (fits, limits.most) {
            (true, Some(_)) => "fits",
            (true, None) => "needs",
            (false, _) => "does not fit",
        };
        FitVerdict {
            fits,
            text: format!("{word}: {device}{host}"),
        }
    }
}

impl PlanContext<'_> {
    /// The part of this rank of the frozen weights that the ranks of its machine share in the page cache, in bytes.
    fn page_cache(&self, recipe: &Recipe) -> Result<u64> {
        let ProcessState { ranks, machines, .. } = self.process;
        if self.on_gpu || !recipe.distributed.shares_files() || ranks < 2 {
            return Ok(0);
        }
        let storage = self.policy(recipe, None)?;
        let all: u64 = self.spec.params().iter().map(|p| storage.of(p).bytes(&p.shape)).sum();
        Ok(all / ranks.div_ceil(machines) as u64)
    }

    /// The chosen values of open settings, with reasons.
    fn choices(&self, recipe: &Recipe, limits: MemoryLimits, chosen: &PlannedStrategy) -> Result<Vec<Choice>> {
        let strategy = &chosen.inputs.strategy;
        let base = self.base(recipe, chosen.lossy)?;
        let least = |allowed: &dyn Fn(&StepStrategy) -> bool| self.least(recipe, &base, allowed);
        let mut all = Vec::new();
        let mut say = |key, value: String, why: String| all.push(Choice { key, value, why });
        let needs = |what: &str, least: Option<Plan>| match least {
            Some(plan) => match (plan.peak_host_bytes, limits.host) {
                (Some(host), Some(most)) if host > most => {
                    format!("{what}: at least {} of host memory", bytes(host))
                }
                _ => format!("{what}: at least {}", bytes(plan.peak_bytes)),
            },
            None => format!("{what}: does not fit"),
        };
        if let (None, Some(goal)) = (recipe.memory.budget, limits.goal) {
            let without = match self.page_cache(recipe)? {
                0 => "",
                _ => " without the page cache of frozen weights",
            };
            say(
                Memory::budget,
                bytes(goal),
                format!("{} % of the free memory{without}", 10 * OF_FREE),
            );
        }
        let goal = knee::choice(chosen);
        if let Some(choice) = &goal {
            say(choice.key, choice.value.clone(), choice.why.clone());
        }
        // A setting that would take more memory, which fits.
        let more_fits = |plan: &Plan| goal.is_some() && fits(plan, limits.goal, limits.host);
        let no_more = || "more memory would not pay (`memory.goal`)".to_string();
        // The planner may leave weights out of memory that would fit in it.
        let not_there = |what: &str, least: Option<Plan>| match &least {
            Some(plan) if more_fits(plan) => no_more(),
            Some(plan) if fits(plan, limits.goal, limits.host) => format!(
                "{what} (at least {}) would leave less memory for saved activations, which is slower by the estimate",
                bytes(plan.peak_bytes)
            ),
            _ => needs(what, least),
        };
        if recipe.memory.frozen_weights == Auto::Auto {
            match chosen.lossy {
                Some(lossy) if recipe.memory.frozen_products != Products::Dequantized => say(
                    Memory::frozen_weights,
                    lossy.name().into(),
                    "`memory.frozen_products` needs it".into(),
                ),
                Some(lossy) => {
                    let exact: PlanBase = self.base(recipe, None)?;
                    let least = self.least(recipe, &exact, |_| true)?;
                    say(
                        Memory::frozen_weights,
                        lossy.name().into(),
                        needs("unquantized weights", least),
                    )
                }
                None => say(
                    Memory::frozen_weights,
                    recipe.model.dtype.name().into(),
                    "no quantization error".into(),
                ),
            }
        }
        let on_device = |w: &StepStrategy| w.placement == Placement::Device;
        if recipe.memory.tier == Tier::Auto {
            match strategy.placement {
                Placement::Device | Placement::Sharded | Placement::ExpertParallel => {
                    say(Memory::tier, "device".into(), "the weights are loaded only once".into())
                }
                Placement::ShardedHost => say(
                    Memory::tier,
                    "host".into(),
                    "each rank has a part of every layer in host memory".into(),
                ),
                Placement::Host => {
                    let least = least(&on_device)?;
                    say(Memory::tier, "host".into(), not_there("all weights on the GPU", least));
                }
                Placement::Disk { .. } if self.process.ranks > 1 && recipe.distributed.shares_files() => say(
                    Memory::tier,
                    "disk".into(),
                    "the ranks of a machine share the files".into(),
                ),
                Placement::Disk { .. } => {
                    let on_host = |w: &StepStrategy| w.placement == Placement::Host;
                    let (what, least) = if self.on_gpu {
                        ("all weights in host memory", least(&on_host)?)
                    } else {
                        ("all weights in memory", least(&on_device)?)
                    };
                    say(Memory::tier, "disk".into(), not_there(what, least));
                }
            }
        }
        if self.process.ranks > 1 && recipe.distributed.weights == RankWeights::Auto {
            let (value, why) = match strategy.placement {
                Placement::Sharded | Placement::ShardedHost => {
                    ("sharded", needs("all weights on every rank", least(&on_device)?))
                }
                _ if self.on_gpu => (
                    "replicated",
                    "with GPUs weights are divided only if the recipe says so".into(),
                ),
                _ => ("replicated", "no weights travel before they are used".into()),
            };
            say(DistributedSection::weights, value.into(), why);
        }
        if let (ChunkSize::Auto, Placement::Disk { head_rows }) = (recipe.memory.head_chunk, strategy.placement) {
            let whole = |w: &StepStrategy| w.placement == Placement::Disk { head_rows: None };
            match head_rows {
                None => say(Memory::head_chunk, "0".into(), "the full output head fits".into()),
                Some(rows) => say(
                    Memory::head_chunk,
                    rows.to_string(),
                    needs("the full output head", least(&whole)?),
                ),
            }
        }
        if recipe.memory.activations == Activations::Auto {
            let layers = self.spec.layers.len();
            let value = format!("keep {} of {layers}", strategy.saved_layers);
            if strategy.saved_layers == layers {
                say(Memory::activations, value, "no layer is recomputed".into());
            } else {
                let more = StepStrategy {
                    saved_layers: strategy.saved_layers + 1,
                    ..strategy.clone()
                };
                let more = self.plan(recipe, &base, &more);
                let why = if more_fits(&more) {
                    no_more()
                } else {
                    needs("saved activations of one more layer", Some(more))
                };
                say(Memory::activations, value, why);
            }
        }
        if recipe.memory.mlp_chunk == ChunkSize::Auto {
            let whole = |w: &StepStrategy| w.mlp_tokens.is_none() && w.placement == strategy.placement;
            match strategy.mlp_tokens {
                None => say(Memory::mlp_chunk, "0".into(), "all tokens fit at once".into()),
                Some(tokens) => say(
                    Memory::mlp_chunk,
                    tokens.to_string(),
                    needs("all tokens at once", least(&whole)?),
                ),
            }
        }
        if strategy.gradients == GradientStorage::NormFirst {
            let kept = |w: &StepStrategy| w.gradients == GradientStorage::Keep && w.placement == strategy.placement;
            say(
                // No key: it cannot be set.
                KeyPath("gradients"),
                "two passes".into(),
                needs("gradients kept for clipping", least(&kept)?),
            );
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe;

    #[test]
    fn the_goal_of_a_cpu_leaves_the_page_cache_of_shared_files_free() {
        let recipe = recipe::parse("[model]\npath = \"shape:small\"\n", "r.toml", &[])
            .unwrap()
            .recipe;
        let process = ProcessState {
            available: Some(1000),
            resident: 50,
            threads: 1,
            ranks: 2,
            machines: 1,
        };
        let limits = |on_gpu, page_cache| {
            let limits = MemoryLimits::of(&recipe, None, on_gpu, process, page_cache);
            (limits.goal, limits.most, limits.host)
        };
        assert_eq!(limits(false, 0), (Some(800), Some(1050), None));
        assert_eq!(limits(false, 300), (Some(560), Some(1050), None));
        // Files that do not fit are read from the disk again.
        assert_eq!(limits(false, 5000), (Some(400), Some(1050), None));
        assert_eq!(limits(true, 300), (None, None, Some(1050)));
    }
}
