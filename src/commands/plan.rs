//! `ft plan`: the memory forecast of a recipe from `config.json` alone. Also reads the rows if they are available.

use crate::base::units::bytes;
use crate::base::{Result, files, memory};
use crate::data::describe::visible;
use crate::model::shapes;
use crate::ops;
use crate::plan::gpu_time::{self, GpuRates, StepTime};
use crate::plan::memory_plan::Verdict;
use crate::plan::{Model, Plan, RunPlan};
use crate::recipe::{ModelInit, ModelRef, Recipe};
use crate::setup::defaults::ResumedValues;
use crate::setup::rows::{self, RecipeRows};
use crate::setup::{self, ModelDir};
use crate::train::directory;
use crate::train::header;
use crate::train::learning;
use candle_core::Device;
use serde_json::{Value, json};
use std::path::Path;

pub struct RecipePlan {
    pub plan: Plan,
    pub verdict: Verdict,
    pub disk: Space,
    /// The time of a step, if it is planned for a GPU of which the speed is known.
    pub time: Option<(&'static str, StepTime)>,
    /// Assumptions of the plan.
    pub notes: Vec<String>,
    /// The run does not fit this machine.
    pub refused: bool,
}

/// Disk space of a run, computed as `ft train` does before it starts.
#[derive(Debug, Clone, PartialEq)]
pub struct Space {
    /// Checkpoints (temporarily one more than the limit), the result, and scratch files.
    pub needed: u64,
    /// `None`: the free space is unknown.
    pub free: Option<u64>,
    pub directory: String,
}

impl Space {
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
        if let Some((gpu, time)) = &self.time {
            let parts: serde_json::Map<String, Value> = time
                .parts()
                .iter()
                .map(|(name, seconds)| ((*name).into(), json!(seconds)))
                .collect();
            out["time"] = json!({
                "device_like": gpu, "step_seconds": time.seconds(), "tokens_per_second": time.tokens_per_second(),
                "limit": time.limit(), "parts_seconds": parts, "calls_seconds": time.calls, "copies_seconds": time.copies,
            });
        }
        out
    }
}

impl RecipePlan {
    /// The time of a step on this GPU, in one line.
    pub fn time_text(&self, gpu: &GpuRates) -> String {
        let Some((_, time)) = &self.time else {
            return format!("time like {}: not known for a model in f32", gpu.name);
        };
        let all = time.seconds();
        let mut parts = time.parts().map(|(name, seconds)| (name, seconds / all));
        parts.sort_by(|a, b| b.1.total_cmp(&a.1));
        let named: Vec<String> = parts
            .iter()
            .filter(|part| part.1 >= 0.01)
            .map(|(name, share)| format!("{name} {:.0} %", 100.0 * share))
            .collect();
        let source = if gpu.measured {
            ""
        } else {
            "; from data sheets, not measured"
        };
        format!(
            "time like {}: about {all:.3} s a step, {:.0} tokens/s, limited by {} ({}{source})",
            gpu.name,
            time.tokens_per_second(),
            time.limit(),
            named.join(", "),
        )
    }
}

/// Plans a recipe. Loads no weights. `like`: plan for a GPU of this kind, and within its memory if the recipe has no budget.
///
/// Errors: an invalid config or data file, or a plan above a budget of the recipe.
pub fn plan(recipe: &Recipe, like: Option<&'static GpuRates>) -> Result<RecipePlan> {
    let like_recipe = like.map(|gpu| on_gpu(recipe, gpu));
    let recipe = like_recipe.as_ref().unwrap_or(recipe);
    let (dir, mut spec) = setup::read_spec(&recipe.model.path, &recipe.model.revision, recipe.model.init)?;
    spec.tied = setup::stays_tied(recipe, &spec)?;
    // The recipe may name a GPU of another machine.
    let device = match recipe.model.device.as_str() {
        "auto" => ops::device::open("auto")?.device,
        _ => Device::Cpu,
    };
    let rows = if rows_are_here(recipe, &dir) {
        Some(read(recipe, &dir)?)
    } else {
        None
    };
    let stored = setup::StoredWeights::find(&dir, &spec, recipe.model.init)?;
    let RunPlan {
        recipe: settled,
        adapters,
        active_schedule,
        stream,
        memory,
        ..
    } = RunPlan::new(
        recipe,
        &spec,
        rows.as_ref(),
        &stored,
        &ResumedValues::default(),
        &device,
    )?;
    let mut notes = Vec::new();
    match (&rows, &stream) {
        (Some(rows), Some(stream)) => {
            let formats = rows::formats(recipe, &rows.train, rows.eval.as_ref());
            notes.extend(formats.iter().map(|line| format!("format {}", visible(line))));
            notes.extend(rows.train.readings.iter().flat_map(|r| r.warnings()));
            match learning::check(&settled, &active_schedule, stream.steps()) {
                Ok(()) => notes.extend(learning::warnings(&settled, &active_schedule, stream)),
                Err(e) => notes.push(format!("`ft train` would reject this recipe: {e}")),
            }
        }
        _ => notes.push(format!(
            "the rows are not available: the plan assumes {} tokens in every row and {} forward passes per step",
            recipe.data.max_length, settled.train.gradient_accumulation_steps
        )),
    }
    let recipe = &settled;
    let time = like.and_then(|gpu| {
        let model = Model::new(&spec, &memory.strategy.storage, &memory.inputs.adapters);
        gpu_time::step_time(&model, recipe, &memory.inputs, gpu).map(|time| (gpu.name, time))
    });
    let given = u64::try_from(recipe.train.max_steps).ok();
    let steps = stream
        .as_ref()
        .map(|stream| stream.steps())
        .or(given)
        .unwrap_or(u64::MAX);
    let elements = header::trained_elements(&active_schedule, steps, &spec.params(), &adapters.adapters);
    let directory = Path::new(&recipe.train.output_dir);
    let disk = Space {
        needed: directory::space_needed(recipe, &spec, elements, memory.strategy.placement),
        free: files::free_space(directory),
        directory: recipe.train.output_dir.clone(),
    };
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
    })
}

/// How well a recipe fits the free memory of this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fit {
    Fits,
    /// It needs nearly all memory, or fits only with weights on the disk or with fewer bits.
    Tight,
    No,
}

pub struct Fitted {
    pub fit: Fit,
    pub peak: u64,
    /// The restrictions that the planner chose to make it fit.
    pub remark: Option<String>,
}

/// Checks a recipe with built-in shapes as models. Reads and downloads nothing.
///
/// Errors: settings that contradict each other.
pub fn fit(recipe: &Recipe) -> Result<Fitted> {
    let recipe = with_shapes(recipe);
    let gpu = ops::device::memory(&ops::device::open("auto")?.device)?;
    let free = match gpu {
        Some(gpu) => Some(gpu.free),
        None => memory::available(),
    };
    let planned = plan(&recipe, None)?;
    let peak = planned.plan.peak_bytes;
    let lost = |key: &str, values: &[&str]| {
        let choices = planned.plan.choices.iter();
        let choice = choices
            .filter(|c| c.key == key)
            .find(|c| values.contains(&c.value.as_str()));
        choice.map(|c| c.value.clone())
    };
    let disk = lost("memory.tier", &["disk"]).map(|_| "weights on disk".to_string());
    let fewer = lost("memory.frozen_weights", &["int8", "int4", "nf4"]).map(|bits| format!("frozen weights in {bits}"));
    let fit = match planned.refused {
        true => Fit::No,
        false if disk.is_some() || fewer.is_some() => Fit::Tight,
        false if free.is_some_and(|free| peak > free / 10 * 9) => Fit::Tight,
        false => Fit::Fits,
    };
    let remark = [disk, fewer].into_iter().flatten().collect::<Vec<_>>().join(", ");
    Ok(Fitted {
        fit,
        peak,
        remark: Some(remark).filter(|r| !r.is_empty() && fit != Fit::No),
    })
}

fn shape_of(model: &ModelRef) -> ModelRef {
    shapes::of_model(&model.to_string()).map_or_else(|| model.clone(), ModelRef::Shape)
}

/// Returns the recipe with built-in shapes instead of its models, and without rows.
pub fn with_shapes(recipe: &Recipe) -> Recipe {
    let mut recipe = recipe.clone();
    recipe.model.path = shape_of(&recipe.model.path);
    recipe.model.init = ModelInit::Random;
    recipe.distill.teacher = recipe.distill.teacher.as_ref().map(shape_of);
    recipe.data.train = vec!["-".into()];
    recipe.data.eval = Vec::new();
    recipe
}

/// The recipe for a GPU that this machine may not have.
fn on_gpu(recipe: &Recipe, gpu: &GpuRates) -> Recipe {
    let mut recipe = recipe.clone();
    if !recipe.model.device.starts_with("cuda") {
        recipe.model.device = "cuda:0".into();
    }
    recipe.memory.budget.get_or_insert(gpu.memory);
    recipe
}

fn rows_are_here(recipe: &Recipe, dir: &Path) -> bool {
    let files = recipe.data.train.iter().chain(&recipe.data.eval);
    let files = files.chain(&recipe.data.quality.decontaminate);
    dir.join("tokenizer.json").is_file() && files.into_iter().all(|f| Path::new(f).is_file())
}

/// Reads rows with the tokenizer of the local model directory: a hub id would download the full model.
fn read(recipe: &Recipe, dir: &Path) -> Result<RecipeRows> {
    let here = ModelRef::Dir(dir.to_path_buf());
    RecipeRows::read(recipe, &ModelDir::of_recipe_at(recipe, &here)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::gpu_time::GPUS;

    /// Steps of docs/benchmarks-gpu.md, measured on an H100 with 2048 tokens a row and saved activations.
    #[test]
    fn the_estimated_time_is_near_the_measured_one() {
        let measured = [
            ("llama-3.1-8b", "lora", 1, 0.1345),
            ("llama-3.1-8b", "block", 1, 2048.0 / 21_939.0),
            ("qwen2.5-0.5b", "lora", 8, 0.1326),
            ("qwen2.5-0.5b", "lora", 1, 0.0297),
            ("qwen2.5-0.5b", "full", 8, 0.1548),
        ];
        for (shape, method, rows, seconds) in measured {
            let text = format!(
                "[model]\npath = \"shape:{shape}\"\ndtype = \"bf16\"\n[data]\ntrain = \"-\"\nmax_length = 2048\n\
                 packing = false\n[tune]\nmethod = \"{method}\"\n[tune.lora]\nr = 16\n[train]\nbatch_size = {rows}\n\
                 gradient_accumulation_steps = 1\nmax_grad_norm = 0.0\n[memory]\nactivations = \"keep\"\ntier = \"device\"\n"
            );
            let recipe = crate::recipe::parse(&text, "test", &[]).unwrap().recipe;
            let planned = plan(&recipe, Some(&GPUS[0])).unwrap();
            let (_, time) = planned.time.unwrap();
            let ratio = time.seconds() / seconds;
            println!(
                "{shape} {method} {rows}: {:.4} s, measured {seconds:.4}, ratio {ratio:.3}",
                time.seconds()
            );
            assert!(
                (0.9..1.1).contains(&ratio),
                "{shape} {method}: {time:?}, measured {seconds}"
            );
        }
    }

    #[test]
    fn a_gpu_sets_the_budget_and_a_slower_one_takes_longer() {
        let text = "[model]\npath = \"shape:llama-3.1-8b\"\ndtype = \"bf16\"\n[data]\ntrain = \"-\"\nmax_length = 2048\n\
                    [tune]\nmethod = \"block\"\n[train]\nbatch_size = 1\n";
        let recipe = crate::recipe::parse(text, "test", &[]).unwrap().recipe;
        let seconds = GPUS.map(|gpu| {
            let like = GPUS.iter().find(|g| g.name == gpu.name);
            let planned = plan(&recipe, like).unwrap();
            assert!(planned.plan.peak_bytes <= gpu.memory, "{}", gpu.name);
            planned.time.unwrap().1.seconds()
        });
        assert!(
            seconds[1] <= seconds[0] && seconds[0] < seconds[2] && seconds[2] < seconds[3],
            "{seconds:?}"
        );
        assert!(seconds[3] < seconds[4], "{seconds:?}");
    }
}
