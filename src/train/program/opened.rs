//! The run directory: all remaining checks run before it is changed. Then the header and the warnings of the run.

use super::RunContext;
use crate::base::{Result, signal, staging};
use crate::checkpoint::{self, LoadedState};
use crate::data::describe::visible;
use crate::data::order::BatchStream;
use crate::engine::StepStrategy;
use crate::hf::{self, AdapterSet, BaseHashes, Fingerprint};
use crate::plan::Plan;
use crate::plan::resumed_choices;
use crate::recipe::{self, Method, ModelInit, ReportTo};
use crate::report::{self, Reporter};
use crate::setup::active_schedule::ActiveSchedule;
use crate::setup::{locate, rewards, rows};
use crate::train::checkpoint_size::CheckpointSize;
use crate::train::directory::{self, RunDirectory};
use crate::train::gpus::OwnDevice;
use crate::train::header::{HeaderInput, header, trained_elements};
use crate::train::state::{self, RunFingerprint};
use crate::train::{learning, owner, ranks, rehearsal, resumed, side_inputs};
use serde_json::json;
use std::path::{Path, PathBuf};

/// A warning if the planner has chosen codes for the frozen weights, because nothing else fits: the user may expect LoRA, not QLoRA.
fn lossy_choice(plan: &Plan) -> Option<String> {
    let chosen = plan
        .choices
        .iter()
        .find(|choice| choice.key.0 == "memory.frozen_weights")?;
    ["int8", "int4", "nf4"].contains(&&*chosen.value).then(|| {
        format!(
            "the frozen weights are quantized to `{}`, which loses precision ({}): set `memory.frozen_weights` to choose their storage",
            chosen.value, chosen.why
        )
    })
}

/// The directory of a run and the state from which it goes on.
pub(super) struct OpenedRun {
    pub directory: RunDirectory,
    pub resumed: Option<LoadedState>,
    /// On rank 0: the checkpoint from which the run goes on, if it is that of another run.
    pub taken: Option<PathBuf>,
    /// The directory of the files that the run needs meanwhile.
    pub scratch: PathBuf,
    pub fingerprint: RunFingerprint,
    /// Of the base weights.
    pub base: BaseHashes,
    /// Number of trained elements.
    elements: u64,
}

impl OpenedRun {
    /// Errors: the directory holds another run; too little space; an adapter on another base; ranks that differ.
    pub fn new(
        cx: &RunContext,
        own: &OwnDevice,
        adapters: &AdapterSet,
        schedule: &ActiveSchedule,
        strategy: &StepStrategy,
    ) -> Result<Self> {
        let RunContext {
            options,
            inputs,
            recipe,
            run_dir,
            ..
        } = *cx;
        let (ranks, model, rows) = (cx.ranks(), &inputs.model, &inputs.rows);
        let print = match recipe.model.init {
            ModelInit::Pretrained => Some(model.fingerprint()?),
            ModelInit::Random => None,
        };
        let base = print.as_ref().map(Fingerprint::base).unwrap_or_default();
        let mut fingerprint = state::of_run(
            cx.loaded,
            print,
            &rows.train,
            rows.eval.as_ref(),
            (ranks.size(), &own.kind),
            cx.total_steps,
        );
        fingerprint.side_inputs = side_inputs::hashes(recipe)?;
        fingerprint.chosen = resumed_choices::kept_choices(&cx.plan.choices);
        if let Some(dir) = &recipe.tune.lora.adapter
            && recipe.tune.method == Method::Lora
        {
            hf::check_base(&locate::adapter_directory(dir)?, &base)?;
        }
        let params = model.spec.params();
        let elements = trained_elements(schedule, cx.total_steps, &params, &adapters.adapters);
        let size = CheckpointSize::new(recipe, schedule, cx.total_steps, &params, &adapters.adapters);
        let needed = directory::space_needed(recipe, model, &size, strategy.placement);
        if ranks.several() {
            ranks.same(&ranks::agreed(
                &fingerprint,
                &format!("{strategy:?}"),
                &own.kind,
                options,
            )?)?;
        }
        let (mut directory, resumed) = if ranks.is_root() {
            checkpoint::check_space(run_dir, needed.saturating_sub(directory::freed(run_dir, options)))?;
            let same = |checkpoint: &LoadedState| {
                resumed::check_same(&state::fingerprint(checkpoint), &fingerprint)?;
                resumed::check_length(checkpoint, cx.total_steps)
            };
            let (directory, resumed) = directory::open(run_dir, options, &same)?;
            owner::remove_scratch_of_ranks(run_dir)?;
            let first = resumed.as_ref().map_or(1, |checkpoint| checkpoint.step + 1);
            let parts = if recipe.distributed.writes_parts(ranks.size()) {
                ranks.size()
            } else {
                1
            };
            // After `--overwrite` removed the earlier run.
            let needed = needed.saturating_sub(directory::freed(run_dir, options));
            rehearsal::of_disk(recipe, &model.spec, run_dir, (&size, parts), first, needed)?;
            ranks.path(resumed.as_ref().map(|checkpoint| checkpoint.path.as_path()))?;
            (directory, resumed)
        } else {
            let from = ranks.path(None)?;
            let resumed = from.map(|from| checkpoint::load(&from)).transpose()?;
            (RunDirectory::of_other_rank(run_dir), resumed)
        };
        // Each rank verifies the files of the checkpoint, and rank 0 is the first to end.
        ranks.meet_after_reading()?;
        if recipe.distributed.writes_parts(ranks.size()) {
            let first = resumed.as_ref().map_or(1, |checkpoint| checkpoint.step + 1);
            checkpoint::check_shared(&*ranks.0, run_dir, first)?;
        }
        let scratch = if ranks.is_root() {
            run_dir.to_path_buf()
        } else {
            let own = owner::of_rank(run_dir, ranks.0.world().rank);
            staging::scratch(&own)?;
            own
        };
        if let Some(checkpoint) = &resumed {
            let step = checkpoint.step;
            signal::quit(format!("stopped: the run is unchanged, after step {step}"));
        }
        directory.begin();
        let taken = directory.taken.take();
        Ok(Self {
            directory,
            taken,
            resumed,
            scratch,
            fingerprint,
            base,
            elements,
        })
    }

    /// Copies the metrics of the run in `from`, which this one goes on with. Returns a warning if its evaluations are needed and
    /// not known.
    fn take_metrics(&self, from: &Path, cx: &RunContext) -> Option<String> {
        let (step, train) = (self.start_step(), &cx.recipe.train);
        if let Err(e) = report::copy_until(from, cx.run_dir, step) {
            return Some(format!("the metrics up to step {step} cannot be copied: {e}"));
        }
        let needed = train.load_best_model_at_end || train.early_stopping_patience > 0;
        let evaluated = train.eval_steps > 0 && step >= train.eval_steps as u64;
        (needed && evaluated && report::evaluations(cx.run_dir).is_empty()).then(|| {
            format!(
                "{} has no evaluations up to step {step}: the best one is searched among those that follow",
                from.join("metrics.jsonl").display()
            )
        })
    }

    /// The step after which the run goes on.
    pub fn start_step(&self) -> u64 {
        self.resumed.as_ref().map_or(0, |checkpoint| checkpoint.step)
    }

    /// Writes the recipe and the plan to the directory, and prints the header and the warnings of the run.
    pub fn reporter(
        &self,
        cx: &RunContext,
        own: &OwnDevice,
        adapters: &AdapterSet,
        schedule: &ActiveSchedule,
        stream: &BatchStream,
    ) -> Result<Reporter> {
        let RunContext {
            inputs,
            recipe,
            loaded,
            plan,
            run_dir,
            ..
        } = *cx;
        let (ranks, model) = (cx.ranks(), &inputs.model);
        let (train, eval, screened) = (&inputs.rows.train, inputs.rows.eval.as_ref(), &inputs.rows.screened);
        let mut unknown = None;
        let mut reporter = if ranks.is_root() {
            directory::describe(run_dir, loaded, plan)?;
            directory::list_rows(run_dir, &inputs.rows, model)?;
            if let Some(from) = self.taken.as_deref().and_then(Path::parent) {
                unknown = self.take_metrics(from, cx);
            }
            let board = recipe.train.report_to == ReportTo::TensorBoard;
            Reporter::new(run_dir, cx.total_steps, self.start_step()).with_event_file(board)
        } else {
            Reporter::silent(run_dir, cx.total_steps)
        };
        let mut lines = header(&HeaderInput {
            recipe,
            model,
            train,
            eval,
            stream,
            plan,
            schedule,
            elements: self.elements,
        });
        if let Some(given) = &recipe.tune.lora.adapter
            && recipe.tune.method == Method::Lora
            && self.start_step() == 0
        {
            let line = format!("the weights of {given}; optimizer and data start anew");
            lines.push(("start", visible(&line)));
        }
        let dropped = screened.iter().flat_map(|s| s.lines());
        lines.extend(dropped.map(|line| ("screen", visible(&line))));
        lines.extend(ranks::header(recipe, ranks.size()).map(|line| ("ranks", line)));
        lines.extend(own.shared().map(|line| ("gpu", line)));
        let programs = if recipe.train.stage.is_rl() {
            rewards::programs(&recipe.rl)?
        } else {
            Vec::new()
        };
        lines.extend(programs.iter().map(|(command, rights)| {
            let line = format!("starts `{command}` {rights}");
            ("reward", visible(&line))
        }));
        reporter.header(&lines);
        reporter.event("data", rows::counts(recipe, train, stream));
        for (command, rights) in &programs {
            reporter.event("reward_program", json!({ "program": command, "rights": rights }));
        }
        let changes = (self.resumed.iter()).filter_map(|from| resumed::allowed_changes(from, &self.fingerprint));
        for line in self.directory.notes.iter().chain(&changes.collect::<Vec<_>>()) {
            reporter.note(line);
            reporter.event("directory", json!({ "message": line }));
        }
        let positions = model.spec.max_positions;
        let of_rewards = match &inputs.rows.questions {
            Some(asked) => rewards::warnings(&recipe.rl, &asked.train, &asked.eval)?,
            None => Vec::new(),
        };
        for warning in loaded
            .warnings
            .iter()
            .cloned()
            .chain(rows::warnings(train, eval, recipe, model.template.is_some(), positions))
            .chain(of_rewards)
            .chain(screened.iter().flat_map(|s| s.warnings()))
            .chain(learning::warnings(recipe, schedule, stream, cx.options.only_steps))
            .chain(lossy_choice(plan))
            .chain(adapters.warnings.iter().map(|line| recipe::in_program_terms(line)))
            .chain(model.tokenizer.end_conflict().map(str::to_string))
            .chain(self.resumed.iter().flat_map(|from| {
                let bits = resumed::other_bits(from, &self.fingerprint);
                bits.into_iter()
                    .chain(resumed::other_rates(from, cx.total_steps, &recipe.schedule))
                    .chain(resumed::other_program(from, &self.fingerprint))
            }))
            .chain(unknown)
        {
            reporter.warn(&warning);
        }
        Ok(reporter)
    }
}
