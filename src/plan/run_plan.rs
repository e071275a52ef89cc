//! Every decision of a run that is made before weights are loaded. `ft plan` and `ft train` share it, so that their plans
//! are equal.

use super::memory_plan::{self, MemoryPlan, PlanDevice};
use crate::base::Result;
use crate::data::Dataset;
use crate::data::order::BatchStream;
use crate::hf::AdapterSet;
use crate::model::Spec;
use crate::recipe::{Method, Recipe};
use crate::setup::active_schedule::ActiveSchedule;
use crate::setup::defaults::{self, Choice, ResumedValues};
use crate::setup::row_sizes::RowSizes;
use crate::setup::rows::{self, RecipeRows};
use crate::setup::{StoredWeights, adapters, allocation};

/// A run with all its decisions.
pub struct RunPlan<'a> {
    /// The recipe without `auto` for keys that depend on rows and model.
    pub recipe: Recipe,
    /// The values of these keys, with reasons.
    pub choices: Vec<Choice>,
    pub adapters: AdapterSet,
    pub active_schedule: ActiveSchedule,
    /// The order of the rows; `None` without rows.
    pub stream: Option<BatchStream<'a>>,
    pub memory: MemoryPlan,
}

impl<'a> RunPlan<'a> {
    /// `rows`: `None` if they are not available; `stored`: how the files store the weights; `before`: the values of the
    /// run that is resumed; `values`: those of fresh adapters.
    ///
    /// Errors: settings that contradict each other, the rows, or the model. A run that does not fit is no error here.
    pub fn new(
        recipe: &Recipe,
        spec: &Spec,
        rows: Option<&'a RecipeRows>,
        stored: &StoredWeights,
        before: &ResumedValues,
        device: &PlanDevice,
        values: adapters::AdapterValues,
    ) -> Result<Self> {
        // Of rows that are read during the run only the first ones are known.
        let known = rows.filter(|_| !recipe.data.streaming);
        let lengths = known.map(|rows| rows.train.lengths());
        let whole = recipe.open.whole_steps;
        let (mut recipe, mut choices) = defaults::resolve(recipe, spec, lengths.as_deref(), before);
        let stream = match rows {
            Some(rows) => {
                let count = rows.train.examples.len();
                let stream = BatchStream::new(&rows.train, rows::stream(&recipe, count))?;
                let steps = steps_of_whole(whole, &recipe, &rows.train, &stream)?;
                choices.extend(defaults::resolve_blocks(&mut recipe, spec, count, steps, before));
                Some(stream)
            }
            None => None,
        };
        let mut adapters = adapters::with(&recipe, spec, adapters::AdapterValues::Shapes)?;
        // A run of an earlier version may have it: what it has trained must not be lost.
        if let Some(error) = adapters.left_out.take().filter(|_| !before.goes_on()) {
            return Err(error);
        }
        if let Some(stream) = &stream {
            allocation::resolve(&recipe, &mut adapters, stream.steps())?;
        }
        let active_schedule = ActiveSchedule::new(&recipe, spec, &spec.params(), &adapters)?;
        let eval = rows.and_then(|rows| rows.eval.as_ref());
        let sizes = stream
            .as_ref()
            .map(|stream| RowSizes::new(&recipe, stream, eval))
            .transpose()?;
        let sets = &adapters.adapters;
        let mut memory = memory_plan::forecast(&recipe, spec, sets, &active_schedule, sizes.as_ref(), stored, device)?;
        memory.plan.choices.splice(0..0, choices.iter().cloned());
        // The forecast counts them: they must not be in the memory that the process has before.
        if values == adapters::AdapterValues::Drawn && recipe.tune.lora.adapter.is_none() {
            adapters = AdapterSet {
                config: adapters.config,
                ..adapters::with(&recipe, spec, values)?
            };
        }
        Ok(Self {
            recipe,
            choices,
            adapters,
            active_schedule,
            stream,
            memory,
        })
    }
}

/// The steps of the run for which the steps per block are chosen. `whole`: `OpenKeys::whole_steps` of the recipe.
fn steps_of_whole(whole: Option<i64>, recipe: &Recipe, rows: &Dataset, stream: &BatchStream) -> Result<u64> {
    let Some(max_steps) = whole.filter(|_| recipe.tune.method == Method::Block) else {
        return Ok(stream.steps());
    };
    let mut run = recipe.clone();
    run.train.max_steps = max_steps;
    Ok(BatchStream::new(rows, rows::stream(&run, rows.examples.len()))?.steps())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe;
    use crate::setup::ModelFiles;
    use crate::setup::defaults::Resume;
    use candle_core::Device;
    use std::path::Path;

    #[test]
    fn modules_that_peft_does_not_have_are_refused_for_new_runs_only() {
        let dir = tempfile::tempdir().unwrap();
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/goldens/families/mixtral");
        let text = format!(
            "[model]\npath = {golden:?}\n[data]\ntrain = \"t.jsonl\"\n[tune]\nmethod = \"lora\"\n[tune.lora]\n\
             modules_to_save = [\"w2\"]\n[train]\noutput_dir = {:?}\n",
            dir.path()
        );
        let recipe = recipe::parse(&text, "r.toml", &[]).unwrap().recipe;
        let spec = ModelFiles::of_recipe(&recipe).unwrap().spec;
        let device = PlanDevice::of(&Device::Cpu).unwrap();
        let plan = |resume: &Resume| {
            let (before, stored) = (ResumedValues::read(&recipe, resume).unwrap(), StoredWeights::default());
            let values = adapters::AdapterValues::Shapes;
            RunPlan::new(&recipe, &spec, None, &stored, &before, &device, values).map(|plan| plan.adapters.whole.len())
        };
        for resume in [Resume::No, Resume::Newest] {
            let e = plan(&resume).unwrap_err();
            assert!(e.to_string().contains("linear layers of single experts"), "{e}");
        }
        std::fs::create_dir(dir.path().join("checkpoint-2")).unwrap();
        assert!(plan(&Resume::No).is_err());
        assert!(plan(&Resume::Newest).unwrap() > 0);
    }

    #[test]
    fn blocks_of_a_run_that_is_measured_take_turns_as_in_the_whole_run() {
        let text = "[model]\npath = \"m\"\n[data]\ntrain = \"t.jsonl\"\npacking = false\n[tune]\nmethod = \"block\"\n\
                    [train]\nmax_steps = 21\nbatch_size = 8\ngradient_accumulation_steps = 1\nnum_epochs = 3\n";
        let recipe = recipe::parse(text, "r.toml", &[]).unwrap().recipe;
        let rows = Dataset::random(1000, 2, 50, 1);
        let stream = BatchStream::new(&rows, rows::stream(&recipe, 1000)).unwrap();
        let steps = |whole| steps_of_whole(whole, &recipe, &rows, &stream).unwrap();
        assert_eq!((steps(None), steps(Some(-1)), steps(Some(300))), (21, 375, 300));
    }
}
