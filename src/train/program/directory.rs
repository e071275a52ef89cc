//! The run directory: all remaining checks run before it is changed. Then the header and the warnings of the run.

use super::RunContext;
use crate::base::{Result, signal, staging};
use crate::checkpoint::{self, LoadedState};
use crate::data::describe::visible;
use crate::data::order::BatchStream;
use crate::engine::StepStrategy;
use crate::hf::{self, AdapterSet, BaseHashes, Fingerprint};
use crate::plan::Plan;
use crate::recipe::{self, Method, ModelInit, ReportTo};
use crate::report::Reporter;
use crate::setup::active_schedule::ActiveSchedule;
use crate::setup::{locate, rows};
use crate::train::checkpoint_size::CheckpointSize;
use crate::train::directory::{self, RunDirectory};
use crate::train::gpus::OwnDevice;
use crate::train::header::{HeaderInput, header, trained_elements};
use crate::train::state::{self, RunFingerprint};
use crate::train::{learning, owner, ranks, rehearsal};
use serde_json::json;
use std::path::PathBuf;

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
        let fingerprint = state::of_run(
            cx.loaded,
            print,
            &rows.train,
            rows.eval.as_ref(),
            ranks.size(),
            &own.kind,
        );
        if let Some(dir) = &recipe.tune.lora.adapter
            && recipe.tune.method == Method::Lora
        {
            hf::check_base(&locate::adapter_directory(dir)?, &base)?;
        }
        let params = model.spec.params();
        let elements = trained_elements(schedule, cx.total_steps, &params, &adapters.adapters);
        let size = CheckpointSize::new(recipe, schedule, cx.total_steps, &params, &adapters.adapters);
        let needed = directory::space_needed(recipe, &model.spec, &size, strategy.placement);
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
            let same = |checkpoint: &LoadedState| state::check_same(&state::fingerprint(checkpoint), &fingerprint);
            let (directory, resumed) = directory::open(run_dir, options, &same)?;
            owner::remove_scratch_of_ranks(run_dir)?;
            let first = resumed.as_ref().map_or(1, |checkpoint| checkpoint.step + 1);
            let parts = if recipe.distributed.writes_parts(ranks.size()) {
                ranks.size()
            } else {
                1
            };
            rehearsal::of_disk(recipe, &model.spec, run_dir, (&size, parts), first)?;
            ranks.path(resumed.as_ref().map(|checkpoint| checkpoint.path.as_path()))?;
            (directory, resumed)
        } else {
            let from = ranks.path(None)?;
            let resumed = from.map(|from| checkpoint::load(&from)).transpose()?;
            (RunDirectory::of_other_rank(run_dir), resumed)
        };
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
        Ok(Self {
            directory,
            resumed,
            scratch,
            fingerprint,
            base,
            elements,
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
        let mut reporter = if ranks.is_root() {
            directory::describe(run_dir, loaded, plan)?;
            directory::list_rows(run_dir, &inputs.rows, model)?;
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
        let dropped = screened.iter().flat_map(|s| s.lines());
        lines.extend(dropped.map(|line| ("screen", visible(&line))));
        lines.extend(ranks::header(recipe, ranks.size()).map(|line| ("ranks", line)));
        lines.extend(own.shared().map(|line| ("gpu", line)));
        reporter.header(&lines);
        reporter.event("data", rows::counts(recipe, train, stream));
        for line in &self.directory.notes {
            reporter.note(line);
            reporter.event("directory", json!({ "message": line }));
        }
        let positions = model.spec.max_positions;
        for warning in loaded
            .warnings
            .iter()
            .cloned()
            .chain(rows::warnings(train, eval, recipe, model.template.is_some(), positions))
            .chain(screened.iter().flat_map(|s| s.warnings()))
            .chain(learning::warnings(recipe, schedule, stream, cx.options.only_steps))
            .chain(lossy_choice(plan))
            .chain(adapters.warnings.iter().map(|line| recipe::in_program_terms(line)))
            .chain(model.tokenizer.end_conflict().map(str::to_string))
            .chain(
                self.resumed
                    .iter()
                    .filter_map(|c| state::other_bits(c, &self.fingerprint)),
            )
        {
            reporter.warn(&warning);
        }
        Ok(reporter)
    }
}
