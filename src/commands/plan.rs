//! `ft plan`: the memory forecast of a recipe from `config.json` alone. Also reads the rows if they are available.

use crate::base::units::{bytes, counted};
use crate::base::{Error, Result, files, memory};
use crate::data::describe::visible;
use crate::model::shapes;
use crate::ops;
use crate::plan::gpu_time::{self, GpuRates, StepTime};
use crate::plan::memory_plan::FitVerdict;
use crate::plan::{self as plans, Plan, PlanDevice, PlanModel, ProcessState, RunPlan};
use crate::recipe::table::KeyPath;
use crate::recipe::{self, DeviceRef, Memory, ModelInit, ModelRef, Recipe, Tier};
use crate::setup::defaults::ResumedValues;
use crate::setup::rows::{self, RecipeRows};
use crate::setup::vocabulary::{self, NewRows, TextChanges};
use crate::setup::{ModelFiles, adapters};
use crate::source::Placement;
use crate::train::checkpoint_size::CheckpointSize;
use crate::train::directory;
use crate::train::learning;
use crate::train::ranks;
use candle_core::Device;
use serde_json::{Value, json};
use std::path::Path;

pub struct RecipePlan {
    pub plan: Plan,
    pub verdict: FitVerdict,
    pub disk: DiskSpace,
    /// For the GPU that `plan` is given.
    pub time: Option<GpuEstimate>,
    /// Assumptions of the plan.
    pub notes: Vec<String>,
    /// The run does not fit this machine.
    pub refused: bool,
    /// The most bytes that a rank sends in a step; 0 on one rank.
    pub sent: u64,
    /// Steps between the averages for which the bytes are sent; 0: they are sent in each step.
    pub sync_every: usize,
}

/// Disk space of a run, computed as `ft train` does before it starts.
#[derive(Debug, Clone, PartialEq)]
pub struct DiskSpace {
    /// Checkpoints (temporarily one more than the limit), the result, and scratch files.
    pub needed: u64,
    /// `None`: the free space is unknown.
    pub free: Option<u64>,
    pub directory: String,
}

impl DiskSpace {
    pub fn fits(&self) -> bool {
        self.free.is_none_or(|free| self.needed <= free)
    }

    pub fn text(&self) -> String {
        let free = match self.free {
            Some(free) => format!("{} free", bytes(free)),
            None => "free space unknown".into(),
        };
        let verdict = if self.fits() { "" } else { "does not fit: " };
        format!(
            "disk: {verdict}{} for checkpoints and the result, {free} in {}",
            bytes(self.needed),
            self.directory
        )
    }
}

impl RecipePlan {
    /// The JSON of the plan with verdict and disk space.
    pub fn json(&self) -> Value {
        let mut out = self.plan.json();
        out["fits"] = json!(self.verdict.fits);
        out["verdict"] = json!(self.verdict.text);
        out["disk"] = json!({
            "needed_bytes": self.disk.needed,
            "free_bytes": self.disk.free,
            "directory": self.disk.directory,
            "fits": self.disk.fits(),
        });
        if self.sent > 0 {
            out["sent_bytes"] = json!(self.sent);
            out["sync_every"] = json!(self.sync_every);
        }
        if let Some(time) = self.time.as_ref().and_then(GpuEstimate::json) {
            out["time"] = time;
        }
        out
    }
}

/// The time of a step on a GPU that this machine may not have.
pub struct GpuEstimate {
    pub gpu: &'static GpuRates,
    /// Or why it is not known.
    pub time: std::result::Result<StepTime, &'static str>,
}

impl GpuEstimate {
    /// One line of text.
    pub fn text(&self) -> String {
        let name = self.gpu.name;
        let time = match &self.time {
            Ok(time) => time,
            Err(why) => return format!("time like {name}: not known for {why}"),
        };
        let seconds = time.seconds();
        let mut parts: Vec<(&str, f64)> = time.parts().map(|(part, s)| (part, s / seconds)).collect();
        parts.sort_by(|a, b| b.1.total_cmp(&a.1));
        let shares = parts.iter().filter(|part| part.1 >= 0.01);
        let named: Vec<String> = shares
            .map(|(part, share)| format!("{part} {:.0} %", 100.0 * share))
            .collect();
        let source = (!self.gpu.measured).then(|| "from data sheets, not measured".to_string());
        let details: Vec<String> = [named.join(", ")]
            .into_iter()
            .chain(source)
            .filter(|d| !d.is_empty())
            .collect();
        let details = if details.is_empty() {
            String::new()
        } else {
            format!(" ({})", details.join("; "))
        };
        format!(
            "time like {name}: about {seconds:.3} s a step, {:.0} tokens/s, limited by {}{details}",
            time.tokens_per_second(),
            time.limit(),
        )
    }

    fn json(&self) -> Option<Value> {
        let time = self.time.as_ref().ok()?;
        let parts: serde_json::Map<String, Value> = time
            .parts()
            .map(|(name, seconds)| (name.into(), json!(seconds)))
            .collect();
        Some(json!({
            "device_like": self.gpu.name, "step_seconds": time.seconds(), "tokens_per_second": time.tokens_per_second(),
            "limit": time.limit(), "parts_seconds": parts, "calls_seconds": time.calls, "copies_seconds": time.copies,
        }))
    }
}

/// Plans a recipe. Loads no weights. `like`: plan for a GPU of this kind, within its memory and the budget of the recipe.
///
/// Errors: an invalid config or data file, or a plan above a budget of the recipe.
pub fn plan(recipe: &Recipe, like: Option<&'static GpuRates>) -> Result<RecipePlan> {
    plan_for(recipe, like, 1, 1)
}

/// As `plan`, for one of `ranks` ranks on `machines` machines like this one.
///
/// Errors: as `plan`; more ranks than micro-batches in a step; ranks that the machines cannot share equally.
pub fn plan_for(recipe: &Recipe, like: Option<&'static GpuRates>, ranks: usize, machines: usize) -> Result<RecipePlan> {
    if !ranks.is_multiple_of(machines) {
        return Err(Error::usage("each machine needs the same number of ranks")
            .found(format!("{} on {machines} machines", counted(ranks, "rank")))
            .expected(format!("a number of ranks that {machines} divides")));
    }
    let like_recipe = like.map(|gpu| on_gpu(recipe, gpu));
    let recipe = like_recipe.as_ref().unwrap_or(recipe);
    let mut model = ModelFiles::of_recipe(recipe)?;
    model.untie_for(recipe)?;
    // The recipe may name a GPU of another machine.
    let device = match (like, &recipe.model.device) {
        (Some(gpu), _) => PlanDevice::like(gpu),
        (None, DeviceRef::Auto) => PlanDevice::of(&ops::device::open("auto")?.device)?,
        (None, _) => PlanDevice::of(&Device::Cpu)?,
    };
    let device = if ranks > 1 {
        device.with_process(ProcessState::shared_by(ranks, machines))
    } else {
        device
    };
    let (has_rows, changes) = (recipe.data.is_here(), TextChanges::of_recipe(recipe)?);
    let mut notes = Vec::new();
    let (model, rows, recipe) = if model.has_tokenizer() && (has_rows || recipe.data.adds_tokens()) {
        let model = model.with_text(&changes)?;
        let recipe = vocabulary::with_new_rows(recipe, model.new_rows.as_ref(), &model.spec);
        let rows = has_rows.then(|| RecipeRows::read(&recipe, &model)).transpose()?;
        (model.files, rows, recipe)
    } else {
        let new = NewRows::assumed(&changes, model.spec.vocab)?;
        if let Some(new) = &new {
            model.spec.vocab = new.vocab;
        }
        notes.extend(new.as_ref().map(|new| {
            format!(
                "the tokenizer is not available: the plan counts {} and {} of the embedding",
                counted(new.ids.len(), "new token"),
                counted(new.vocab, "row")
            )
        }));
        let recipe = vocabulary::with_new_rows(recipe, new.as_ref(), &model.spec);
        (model, None, recipe)
    };
    let (recipe, spec) = (&recipe, &model.spec);
    let stored = model.stored_if_here(recipe.model.init).unwrap_or_else(|e| {
        notes.push(format!("`ft train` would reject this model: {e}"));
        None
    });
    let RunPlan {
        recipe: resolved,
        adapters,
        active_schedule,
        stream,
        memory,
        ..
    } = RunPlan::new(
        recipe,
        spec,
        rows.as_ref(),
        &stored.unwrap_or_default(),
        &ResumedValues::default(),
        &device,
        adapters::AdapterValues::Shapes,
    )?;
    notes.extend(adapters.warnings.iter().map(|line| recipe::in_program_terms(line)));
    match (&rows, &stream) {
        (Some(rows), Some(stream)) => {
            let formats = rows::formats(recipe, &rows.train, rows.eval.as_ref());
            notes.extend(formats.iter().map(|line| format!("format {}", visible(line))));
            notes.extend(rows.train.readings.iter().flat_map(|r| r.warnings()));
            match learning::check(&resolved, &active_schedule, stream.steps()) {
                Ok(()) => notes.extend(learning::warnings(&resolved, &active_schedule, stream, false)),
                Err(e) => notes.push(format!("`ft train` would reject this recipe: {e}")),
            }
        }
        _ => notes.push(format!(
            "the rows are not available: the plan assumes {} tokens in every row and gradient accumulation {}",
            recipe.data.max_length, resolved.train.gradient_accumulation_steps
        )),
    }
    let recipe = &resolved;
    ranks::check(recipe, spec, memory.inputs.on_gpu, ranks)?;
    let time = like.map(|gpu| {
        let model = PlanModel::new(spec, &memory.strategy.storage, &memory.inputs.adapters);
        let time = match gpu_time::not_known(recipe, &memory.inputs) {
            Some(why) => Err(why),
            None => Ok(gpu_time::step_time(&model, recipe, &memory.inputs)),
        };
        GpuEstimate { gpu, time }
    });
    if like.is_some() && recipe.memory.host_budget.is_none() {
        notes.push("the host memory is that of this machine: `memory.host_budget` sets another".into());
    }
    if like.is_some() && matches!(memory.strategy.placement, Placement::Disk { .. }) {
        notes.push("the time assumes a disk that reads 1 GB/s".into());
    }
    let given = u64::try_from(recipe.train.max_steps).ok();
    let steps = stream
        .as_ref()
        .map(|stream| stream.steps())
        .or(given)
        .unwrap_or(u64::MAX);
    let checkpoint = CheckpointSize::new(recipe, &active_schedule, steps, &spec.params(), &adapters.adapters);
    let directory = Path::new(&recipe.train.output_dir);
    let disk = DiskSpace {
        needed: directory::space_needed(recipe, &model, &checkpoint, memory.strategy.placement),
        free: files::free_space(directory),
        directory: recipe.train.output_dir.clone(),
    };
    let mut sent = 0;
    if let Some(line) = ranks::header(recipe, ranks) {
        notes.push(format!("ranks: {line}"));
        let model = PlanModel::new(spec, &memory.strategy.storage, &memory.inputs.adapters);
        sent = plans::sent(&model, recipe, &memory.inputs);
        let when = match recipe.distributed.sync_every {
            0 => "in a step".to_string(),
            every => format!("for an average, after every {}", counted(every, "step")),
        };
        let even = match memory.strategy.placement {
            Placement::ExpertParallel => ", if the router chooses all experts equally often",
            _ => "",
        };
        notes.push(format!(
            "a rank sends up to {} {when}{even}; the memory is that of one rank",
            bytes(sent)
        ));
        if recipe.distributed.shares_files() {
            let storage = &memory.strategy.storage;
            let weights = spec.params().iter().map(|p| storage.of(p).bytes(&p.shape)).sum();
            notes.push(format!(
                "the ranks of a machine share its page cache: up to {} of frozen weights, once for each machine and beside the \
                 memory of the ranks; what does not fit there is read from the disk again",
                bytes(weights)
            ));
        }
        if memory.inputs.machines > 1 {
            notes.push(format!(
                "no layer travels between the {machines} machines: a rank sends gradients there, and up to {} of new values in a step",
                bytes(plans::most_renewed(&model, recipe, &memory.inputs))
            ));
        }
    }
    if like.is_none() && recipe.model.device == DeviceRef::Auto && memory.inputs.on_gpu {
        let here = ops::device::identities()?.len();
        let ranks = ranks / machines;
        if here < ranks {
            notes.push(format!(
                "`ft train` would reject {ranks} ranks on this machine: it has {}",
                counted(here, "GPU")
            ));
        }
    }
    let verdict = memory.verdict(recipe);
    let does_not_fit = memory.refused.is_some();
    match memory.refused {
        Some(refused) if refused.by_budget => return Err(refused.error),
        // The run may be planned for another machine.
        Some(refused) => notes.push(format!(
            "`ft train` would reject this recipe on this machine: {}",
            refused.error
        )),
        None => {}
    }
    Ok(RecipePlan {
        plan: memory.plan,
        verdict,
        disk,
        time,
        notes,
        refused: does_not_fit,
        sent,
        sync_every: recipe.distributed.sync_every,
    })
}

/// How well a recipe fits the free memory of this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryFit {
    Fits,
    /// It uses nearly all memory, or fits only with weights on the disk or with fewer bits.
    Tight,
    No,
}

pub struct MachineFit {
    pub fit: MemoryFit,
    pub peak: u64,
    /// The restrictions that the planner chose to make it fit.
    pub remark: Option<String>,
}

/// Checks a recipe with built-in shapes as models. Reads and downloads nothing.
///
/// Errors: settings that contradict each other.
pub fn fit(recipe: &Recipe) -> Result<MachineFit> {
    let recipe = with_shapes(recipe);
    let gpu = ops::device::memory(&ops::device::open("auto")?.device)?;
    let free = match gpu {
        Some(gpu) => Some(gpu.free),
        None => memory::available(),
    };
    let planned = plan(&recipe, None)?;
    let peak = planned.plan.peak_bytes;
    let lost = |of: &Plan, key: KeyPath, values: &[&str]| {
        let choices = of.choices.iter();
        let choice = choices
            .filter(|c| c.key == key)
            .find(|c| values.contains(&c.value.as_str()));
        choice.map(|c| c.value.clone())
    };
    let fewer_bits = |of: &Plan| lost(of, Memory::frozen_weights, &["int8", "int4", "nf4"]);
    let disk = lost(&planned.plan, Memory::tier, &["disk"]).map(|_| "weights on disk".to_string());
    let fewer = fewer_bits(&planned.plan).map(|bits| format!("frozen weights in {bits}"));
    let nearly_full = |peak: u64| free.is_some_and(|free| peak > free / 10 * 9);
    // The planner also takes the disk to save more activations, with enough memory for the weights.
    let mut in_memory = recipe.clone();
    in_memory.memory.tier = if gpu.is_some() { Tier::Host } else { Tier::Device };
    let fits_in_memory = || {
        plan(&in_memory, None).is_ok_and(|other| {
            !other.refused && fewer_bits(&other.plan).is_none() && !nearly_full(other.plan.peak_bytes)
        })
    };
    let needs_disk = disk.is_some() && !fits_in_memory();
    let fit = if planned.refused {
        MemoryFit::No
    } else if needs_disk || fewer.is_some() || nearly_full(peak) {
        MemoryFit::Tight
    } else {
        MemoryFit::Fits
    };
    let remark = [disk, fewer].into_iter().flatten().collect::<Vec<_>>().join(", ");
    Ok(MachineFit {
        fit,
        peak,
        remark: Some(remark).filter(|r| !r.is_empty() && fit != MemoryFit::No),
    })
}

fn shape_of(model: &ModelRef) -> ModelRef {
    let path = model.to_string();
    let shape = match path.as_str() {
        "assets/small" => Some("shape:tiny-student".into()),
        "assets/moe" => Some("shape:tiny-moe".into()),
        // The shipped recipes write tiny models to `runs/`.
        text if text.starts_with("runs/") => Some("shape:tiny".into()),
        text => shapes::of_model(text),
    };
    shape.map_or_else(|| model.clone(), ModelRef::Shape)
}

/// Returns the recipe with built-in shapes instead of its models, and without rows.
pub fn with_shapes(recipe: &Recipe) -> Recipe {
    let mut recipe = recipe.clone();
    recipe.model.path = shape_of(&recipe.model.path);
    recipe.model.init = ModelInit::Random;
    recipe.distill.teacher = recipe.distill.teacher.as_ref().map(shape_of);
    recipe.data.set_train(vec!["-".into()]);
    recipe.data.eval = Vec::new();
    recipe
}

/// The recipe for a GPU that this machine may not have.
fn on_gpu(recipe: &Recipe, gpu: &GpuRates) -> Recipe {
    let mut recipe = recipe.clone();
    if !recipe.model.device.is_gpu() {
        recipe.model.device = DeviceRef::Gpu(Some(0));
    }
    let budget = recipe.memory.budget.unwrap_or(u64::MAX);
    recipe.memory.budget = Some(budget.min(gpu.memory));
    recipe
}

#[cfg(test)]
mod tests;
