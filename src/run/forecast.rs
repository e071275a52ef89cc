//! The plan of a run: every setting that the recipe leaves open becomes the fastest that fits; and what to say where
//! nothing does.

use super::advice;
use super::defaults;
use super::choose::{Chosen, Setting, Way};
use super::setup::Stored;
use super::teacher;
use super::tuning::Tuning;
use crate::base::units::bytes;
use crate::base::{Error, Result, files, memory};
use crate::data::order::BatchStream;
use crate::engine::Gradients;
use crate::model::{Adapters, Spec};
use crate::ops::{self, prepacked::Orders};
use crate::plan::{self, Choice, Place, Plan};
use crate::recipe::{Activations, FrozenWeights, PackedWeights, Recipe, Tier};
use crate::source::{Copies, Policy};
use candle_core::Device;
use std::path::PathBuf;

/// Tenths of the free memory that a run without a budget may take for speed.
const OF_FREE: u64 = 8;

/// How a run goes through a step, and what it needs.
pub struct Forecast {
    pub plan: Plan,
    pub gradients: Gradients,
    /// Uppermost layers that keep their activations.
    pub keep_layers: usize,
    /// Tokens that go through an MLP at a time; `None`: all.
    pub mlp_tokens: Option<usize>,
    /// How each weight is stored.
    pub storage: Policy,
    /// Where the weights live that are not trained now.
    pub place: Place,
    /// What is kept packed.
    pub copies: Option<Copies>,
    /// It does not fit: what to say instead of running.
    pub refused: Option<Refused>,
}

pub struct Refused {
    pub error: Error,
    /// The recipe's own budget is too small, not the machine.
    pub by_budget: bool,
}

/// How much memory there is: what a choice aims at, and what nothing may exceed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Limits {
    pub goal: Option<u64>,
    pub most: Option<u64>,
    /// Of the host beside a GPU.
    pub host: Option<u64>,
}

impl Limits {
    fn of(recipe: &Recipe, gpu_free: Option<u64>, on_gpu: bool) -> Self {
        let free = memory::available();
        // What this process holds already is part of a plan.
        let here = free.map(|free| free + memory::resident());
        let goal = |free: u64| free / 10 * OF_FREE;
        let (goal, most) = match (recipe.memory.budget, gpu_free) {
            (Some(budget), _) => (Some(budget), Some(budget)),
            (None, Some(free)) => (Some(goal(free)), Some(free)),
            (None, None) if on_gpu => (None, None),
            (None, None) => (free.map(goal), here),
        };
        let host = here.filter(|_| gpu_free.is_some());
        Self { goal, most, host }
    }
}

/// The plan for the largest micro-batch that the rows of `stream` can make; without rows, for full ones. A recipe
/// that names a GPU is planned for one, whether or not it is here. `stored`: how the weights lie in the files.
///
/// Errors: settings that contradict each other. A run that does not fit is no error: see `refused`.
pub fn forecast(
    recipe: &Recipe,
    spec: &Spec,
    adapters: &Adapters,
    tuning: &Tuning,
    stream: Option<&BatchStream>,
    stored: &Stored,
    device: &Device,
) -> Result<Forecast> {
    let gpu = ops::device::memory(device)?;
    let on_gpu = recipe.model.device.starts_with("cuda") || gpu.is_some();
    let teacher = teacher::cost(recipe, spec, on_gpu)?;
    let setting = Setting {
        spec,
        adapters,
        tuning,
        lengths: stream.map(BatchStream::lengths),
        stored,
        on_gpu,
        teacher: teacher.as_ref(),
    };
    let limits = Limits::of(recipe, gpu.map(|g| g.free), setting.on_gpu);
    let mut chosen = setting.choose(recipe, limits)?;
    chosen.plan.choices = setting.choices(recipe, limits, &chosen)?;
    let host = chosen.plan.peak_host_bytes.unwrap_or(0);
    let host_short = limits.host.filter(|most| host > *most);
    let refused = match (chosen.fits, host_short) {
        (false, _) => Some(advice::refused(&setting, recipe, limits, &chosen)),
        (true, Some(most)) => Some(Refused {
            error: Error::new("the run does not fit the host's memory")
                .at("what stays on the host beside the GPU")
                .found(format!("a forecast peak of {}", bytes(host)))
                .expected(format!("at most {}", bytes(most)))
                .hint("use fewer rows, or set `optimizer.master = \"stochastic\"`"),
            by_budget: false,
        }),
        (true, None) => None,
    };
    Ok(Forecast {
        copies: chosen.way.copies.map(|orders| setting.copies(recipe, orders)),
        gradients: chosen.way.gradients,
        keep_layers: chosen.keep,
        mlp_tokens: chosen.way.mlp,
        storage: chosen.storage,
        place: chosen.way.place,
        plan: chosen.plan,
        refused,
    })
}

impl Setting<'_> {
    /// What was chosen for what the recipe leaves open, and why.
    fn choices(&self, recipe: &Recipe, limits: Limits, chosen: &Chosen) -> Result<Vec<Choice>> {
        let way = chosen.way;
        let mut all = Vec::new();
        let mut say = |key, value: String, why: String| all.push(Choice { key, value, why });
        let needs = |what: &str, least: Option<u64>| match least {
            Some(least) => format!("{what} takes {} at least", bytes(least)),
            None => format!("{what} does not fit"),
        };
        if let (None, Some(goal)) = (recipe.memory.budget, limits.goal) {
            say(
                "memory.budget",
                bytes(goal),
                format!("{} % of what is free", 10 * OF_FREE),
            );
        }
        if recipe.memory.frozen_weights == FrozenWeights::Auto {
            match way.lossy {
                Some(lossy) => say(
                    "memory.frozen_weights",
                    lossy.name().into(),
                    needs("a storage without loss", self.least(recipe, None, |_| true)?),
                ),
                None => say(
                    "memory.frozen_weights",
                    recipe.model.dtype.name().into(),
                    "nothing is lost".into(),
                ),
            }
        }
        let on_device = |w: &Way| w.place == Place::Device;
        if recipe.memory.tier == Tier::Auto {
            match way.place {
                Place::Device => say("memory.tier", "device".into(), "nothing has to be read again".into()),
                Place::Host => {
                    let least = self.least(recipe, way.lossy, on_device)?;
                    say("memory.tier", "host".into(), needs("all weights on the GPU", least));
                }
                Place::Disk { .. } => {
                    let least = self.least(recipe, way.lossy, on_device)?;
                    say("memory.tier", "disk".into(), needs("all weights in memory", least));
                }
            }
        }
        if let (None, Place::Disk { head_rows }) = (recipe.memory.head_chunk, way.place) {
            let whole = |w: &Way| w.place == Place::Disk { head_rows: None };
            match head_rows {
                None => say("memory.head_chunk", "0".into(), "the head fits whole".into()),
                Some(rows) => say(
                    "memory.head_chunk",
                    rows.to_string(),
                    needs("a whole head", self.least(recipe, way.lossy, whole)?),
                ),
            }
        }
        if recipe.memory.activations == Activations::Auto {
            let layers = self.spec.layers.len();
            let value = format!("keep {} of {layers}", chosen.keep);
            if chosen.keep == layers {
                say("memory.activations", value, "nothing is computed twice".into());
            } else {
                let more = self.inputs(recipe, &way, &chosen.storage, chosen.keep + 1);
                let more = plan::forecast(self.spec, recipe, &more).peak_bytes;
                say("memory.activations", value, needs("one layer more", Some(more)));
            }
        }
        if recipe.memory.mlp_chunk.is_none() {
            let whole = |w: &Way| w.mlp.is_none() && w.place == way.place;
            match way.mlp {
                None => say("memory.mlp_chunk", "0".into(), "all tokens at once fit".into()),
                Some(tokens) => say(
                    "memory.mlp_chunk",
                    tokens.to_string(),
                    needs("all tokens at once", self.least(recipe, way.lossy, whole)?),
                ),
            }
        }
        let packed = |orders: Option<Orders>| match orders {
            None => PackedWeights::None,
            Some(Orders::Forward) => PackedWeights::Forward,
            Some(Orders::Both) => PackedWeights::Both,
        };
        let can_pack = self.can_pack(recipe, way.place);
        match recipe.memory.packed_weights {
            PackedWeights::Auto if can_pack => {
                let more = |w: &Way| w.copies > way.copies && w.place == way.place;
                let why = match way.copies {
                    Some(Orders::Both) => "no frozen weight is packed in a product".into(),
                    _ => needs("more of them", self.least(recipe, way.lossy, more)?),
                };
                say("memory.packed_weights", packed(way.copies).name().into(), why);
            }
            PackedWeights::Forward | PackedWeights::Both if !can_pack => say(
                "memory.packed_weights",
                PackedWeights::None.name().into(),
                "needs a CPU with AMX or fast bf16 dot products, and frozen bf16 weights in its memory".into(),
            ),
            _ => {}
        }
        if way.gradients == Gradients::NormFirst {
            let kept = |w: &Way| w.gradients == Gradients::Keep && w.place == way.place;
            say(
                "gradients",
                "two passes".into(),
                needs("keeping them for clipping", self.least(recipe, way.lossy, kept)?),
            );
        }
        Ok(all)
    }
}

/// A run that goes on keeps what its first plan chose, where another choice would change what it learns: the storage of
/// frozen weights and the tokens of an MLP at a time. `resume` as in `train::Options`.
///
/// Errors: a plan that cannot be read.
pub fn as_before(recipe: &Recipe, resume: &Option<Option<PathBuf>>) -> Result<Recipe> {
    let mut recipe = recipe.clone();
    let Some(from) = resume else { return Ok(recipe) };
    let file = defaults::run_of(&recipe, from.as_deref()).join("plan.json");
    if !file.is_file() {
        return Ok(recipe);
    }
    let text = files::read_text(&file)?;
    let plan: serde_json::Value = serde_json::from_str(&text)
        .map_err(|e| Error::new("the plan of the run cannot be read").at_path(&file).cause(e))?;
    let value = |key: &str| plan["chosen"][key]["value"].as_str();
    if recipe.memory.frozen_weights == FrozenWeights::Auto
        && let Some(before) = value("memory.frozen_weights").and_then(FrozenWeights::parse)
    {
        recipe.memory.frozen_weights = before;
    }
    if recipe.memory.mlp_chunk.is_none() {
        recipe.memory.mlp_chunk = value("memory.mlp_chunk").and_then(|n| n.parse().ok());
    }
    Ok(recipe)
}

/// What `as_before` has settled, for the plan of a run that goes on: the next resume reads it there.
pub fn settled(open: &Recipe, recipe: &Recipe) -> Vec<Choice> {
    let kept = |key, value| Choice {
        key,
        value,
        why: "as the run began".into(),
    };
    let (was, memory) = (&open.memory, &recipe.memory);
    let mut all = Vec::new();
    if was.frozen_weights != memory.frozen_weights {
        all.push(kept("memory.frozen_weights", memory.frozen_weights.name().into()));
    }
    if let (None, Some(tokens)) = (was.mlp_chunk, memory.mlp_chunk) {
        all.push(kept("memory.mlp_chunk", tokens.to_string()));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe;
    use std::path::Path;

    #[test]
    fn a_run_that_goes_on_keeps_what_it_chose() {
        let dir = tempfile::tempdir().unwrap();
        let chosen = r#"{"chosen": {"memory.frozen_weights": {"value": "nf4", "why": ""},
            "memory.mlp_chunk": {"value": "512", "why": ""}, "memory.tier": {"value": "disk", "why": ""}}}"#;
        std::fs::write(dir.path().join("plan.json"), chosen).unwrap();
        std::fs::create_dir(dir.path().join("checkpoint-3")).unwrap();
        std::fs::write(dir.path().join("checkpoint-3/manifest.json"), "{}").unwrap();
        let recipe = |more: &str| {
            let text = format!("[model]\npath = \"shape:small\"\n[memory]\n{more}");
            recipe::parse(&text, "r.toml", &[]).unwrap().recipe
        };
        let memory = |recipe: &Recipe, from: Option<&Path>| {
            let resume = from.map(|p| Some(p.to_path_buf()));
            let memory = as_before(recipe, &resume).unwrap().memory;
            (memory.frozen_weights, memory.mlp_chunk, memory.tier)
        };
        let open = recipe("");
        assert_eq!(memory(&open, None), (FrozenWeights::Auto, None, Tier::Auto));
        for from in [dir.path().to_path_buf(), dir.path().join("checkpoint-3")] {
            assert_eq!(memory(&open, Some(&from)), (FrozenWeights::Nf4, Some(512), Tier::Auto));
        }
        // And the one after that, though the recipe is not open any more when the plan is made anew.
        let again = as_before(&open, &Some(Some(dir.path().to_path_buf()))).unwrap();
        let choices = settled(&open, &again).into_iter().map(|c| (c.key, c.value));
        let want = [("memory.frozen_weights", "nf4"), ("memory.mlp_chunk", "512")];
        assert!(choices.eq(want.map(|(key, value)| (key, value.to_string()))));
        assert!(settled(&open, &open).is_empty());
        let written = recipe("frozen_weights = \"int8\"\nmlp_chunk = 0\n");
        assert_eq!(
            memory(&written, Some(dir.path())),
            (FrozenWeights::Int8, Some(0), Tier::Auto)
        );
        assert_eq!(
            memory(&open, Some(&dir.path().join("none"))),
            (FrozenWeights::Auto, None, Tier::Auto)
        );
    }
}
