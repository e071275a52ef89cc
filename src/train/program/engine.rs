//! Loads the weights and makes the engine; restores the state of a resumed run.

use super::RunContext;
use super::opened::OpenedRun;
use crate::base::{Result, progress};
use crate::data::order::BatchStream;
use crate::engine::{ActiveSet, Engine, RankConfig, StepStrategy, TrainConfig};
use crate::hf::AdapterSet;
use crate::ops::update;
use crate::report::Reporter;
use crate::setup::active_schedule::{self, ActiveSchedule};
use crate::setup::allocation;
use crate::sft::CausalLm;
use crate::train::finish::TrainedModel;
use crate::train::stage::{self, BatchSource, PolicyStart, Stage, StageContext};
use crate::train::starts::{self, AdapterInitContext};
use crate::train::{learning, rehearsal, running, state, trained_names};
use serde_json::json;
use std::path::Path;

/// Directory next to the run directories: initial adapter pairs that other runs of the same model and rows can use.
const START_CACHE: &str = ".ft-starts";

/// The engine with the source of its batches.
pub(super) struct Trainer<'a> {
    pub engine: Engine,
    pub batches: Box<dyn BatchSource + 'a>,
    pub schedule: ActiveSchedule,
    /// The active parameters of the first step.
    first: ActiveSet,
}

/// The decisions that are made before the weights are loaded.
pub(super) struct TrainerParts<'a> {
    pub strategy: StepStrategy,
    pub stream: BatchStream<'a>,
    pub schedule: ActiveSchedule,
}

impl<'a> Trainer<'a> {
    /// `scratch`: that of `opened`. The adapters get their start values.
    pub fn new(
        cx: &RunContext<'a>,
        opened: &OpenedRun,
        scratch: &'a Path,
        adapters: &mut AdapterSet,
        parts: TrainerParts<'a>,
        reporter: &mut Reporter,
    ) -> Result<Self> {
        let TrainerParts {
            strategy,
            stream,
            schedule,
        } = parts;
        let RunContext {
            inputs,
            recipe,
            device,
            run_dir,
            total_steps,
            ..
        } = *cx;
        let (ranks, model, rows) = (cx.ranks(), &inputs.model, &inputs.rows);
        let mut loaded_model = model.load_for(&strategy, recipe, scratch, device, &ranks.0)?;
        // Each rank reads the weights at its own speed; what follows has the time limit of a step.
        ranks.meet_after_reading()?;
        adapters.attach(&mut loaded_model.network)?;
        let step_hook = allocation::of(recipe, adapters);
        if let Some(checkpoint) = &opened.resumed {
            let sizes = state::sizes(checkpoint)?;
            let ranks = starts::ranks_of(&loaded_model.network, |name| sizes.get(name).copied());
            starts::resize(recipe, &mut loaded_model.network, adapters, &ranks)?;
        }
        if opened.resumed.is_none() || starts::requantizes_base(recipe) {
            let mut setting = AdapterInitContext {
                recipe,
                model,
                objective: &CausalLm::new(model.spec.vocab),
                train: &*rows.train.flat()?,
                base: &opened.fingerprint.base,
                cache: &run_dir.parent().unwrap_or(Path::new("")).join(START_CACHE),
                ranks,
                store: &*loaded_model.store,
                note: &mut |line| reporter.note(line),
            };
            starts::fill(&mut setting, &mut loaded_model.network, adapters)?;
        }
        let start = PolicyStart {
            network: &loaded_model.network,
            strategy: &strategy,
            schedule: &schedule,
        };
        let context = StageContext {
            recipe,
            spec: &model.spec,
            model,
            device,
            run_dir: scratch,
            train: &rows.train,
            stream,
            eval: rows.eval.as_ref(),
            questions: rows.questions.as_ref(),
            is_root: ranks.is_root(),
        };
        let Stage { batches, objective } = stage::open(context, &start)?;
        // The stage may have read another model, such as a teacher.
        ranks.meet_after_reading()?;
        let objective_params = objective.params().into_iter().map(|p| p.name.to_string());
        let schedule = schedule
            .with_adapters(recipe.tune.method, adapters)
            .with_objective_params(objective_params);
        let first = schedule.active(opened.start_step().max(1));
        let config = TrainConfig {
            step_hook,
            ranks: Some(RankConfig {
                comm: ranks.0.clone(),
                exchange: recipe.distributed.exchange(),
                sequence: recipe.distributed.shared(ranks.size()),
                outer: recipe.distributed.outer(ranks.size(), total_steps),
            }),
            ..learning::train_config(recipe)
        };
        let optimizer = active_schedule::optimizer(recipe, &model.spec, adapters);
        let engine = Engine::with_config(loaded_model, objective, optimizer, strategy, &first, config)?;
        let trained = TrainedModel::new(recipe, model, &engine, adapters, &opened.base);
        rehearsal::of_files(&trained, &schedule, &run_dir.join("final"), total_steps)?;
        Ok(Self {
            engine,
            batches,
            schedule,
            first,
        })
    }

    /// Restores the state of a resumed run, or sets the values of a given adapter and prepares the stage. Returns the
    /// number of trained tokens so far.
    pub fn restore(
        &mut self,
        cx: &RunContext,
        opened: &OpenedRun,
        adapters: &AdapterSet,
        reporter: &mut Reporter,
    ) -> Result<u64> {
        let Self {
            engine, batches, first, ..
        } = self;
        let Some(checkpoint) = &opened.resumed else {
            for (name, tensor) in &adapters.given {
                let values = update::to_f32_vec(tensor)?;
                let param = engine.network.param(name)?;
                engine.optimizer.restore_weight(name, &param.tensor, &values)?;
            }
            reporter.event("start", json!({"steps": cx.total_steps, "command": cx.options.command}));
            running::prepare(&mut **batches, engine, cx.ranks())?;
            return Ok(0);
        };
        let _phase = progress::phase("restoring the state", 0, "");
        // Before the first step of a block run nothing has trained.
        if checkpoint.step > 0 {
            let saved = state::sizes(checkpoint)?;
            trained_names::check_resumed(&saved, first, adapters, &cx.inputs.model.spec)
                .map_err(|e| e.or_at(checkpoint.path.display()))?;
        }
        state::restore(checkpoint, engine, first)?;
        if let Some(state) = state::stage_state(checkpoint)? {
            batches
                .restore(&state)
                .map_err(|e| e.or_at(checkpoint.path.display()))?;
        }
        let step = checkpoint.step;
        reporter.event(
            "resume",
            json!({
                "step": step, "steps": cx.total_steps, "checkpoint": checkpoint.path.display().to_string(),
                "command": cx.options.command,
            }),
        );
        reporter.note(&format!("resumed after step {step}"));
        Ok(state::fingerprint(checkpoint).trained_tokens)
    }
}
