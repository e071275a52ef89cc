//! `ft train`: recipe, data, model and plan, then the optimizer steps, then `final/`.

use crate::base::signal::{Conduct, Stop};
use crate::base::{Error, ErrorKind, Result, progress, signal, staging};
use crate::checkpoint::{self, LoadedState};
use crate::data::describe::visible;
use crate::engine::Engine;
use crate::hf::{self, Fingerprint};
use crate::ops::{self, update};
use crate::optim::Schedule;
use crate::plan::memory_plan::{self, MemoryPlan};
use crate::plan::{Plan, RunPlan};
use crate::recipe::{self, Method, ReportTo};
use crate::report::Reporter;
use crate::setup::active_schedule::{self, ActiveSchedule};
use crate::setup::allocation;
use crate::setup::defaults::{self, ResumedValues};
use crate::setup::locate;
use crate::setup::prompts;
use crate::setup::rows::{self, RecipeRows};
use crate::setup::vocabulary;
use crate::setup::{ModelDir, adapters};
use crate::sft::CausalLm;
use crate::train::best::BestModel;
use crate::train::budget::Budget;
use crate::train::directory::{self, Directory};
use crate::train::finish::{self, TrainedModel};
use crate::train::from_checkpoint;
use crate::train::header::{header, trained_elements};
use crate::train::learning::{self, RateSweep, Watch};
use crate::train::next;
use crate::train::owner;
use crate::train::profile::Profile;
use crate::train::ranks::{self, Ranks};
use crate::train::rehearsal;
use crate::train::running::{self, Pace, Run, UnreadStep};
use crate::train::stage::{self, Stage};
use crate::train::starts::{self, AdapterInitContext};
use crate::train::state;
use crate::train::step_metrics;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Command-line options of `ft train`, beside the recipe.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Resume from the newest checkpoint of the run directory, or from this run or checkpoint directory.
    pub resume: Option<Option<PathBuf>>,
    /// Resume from an older checkpoint if the newest one is damaged.
    pub allow_older: bool,
    /// Start from the beginning in a directory that holds a run.
    pub overwrite: bool,
    /// Stop after the plan.
    pub dry_run: bool,
    /// The ranks of the run.
    pub ranks: Ranks,
    /// The command line, for the user who looks at the run later.
    pub command: String,
    /// Steps of a profile; 0: none.
    pub profile: u64,
    /// No evaluations, samples and results: the steps are measured.
    pub only_steps: bool,
    /// The learning rate of each step, in place of that of the recipe.
    pub sweep: Option<RateSweep>,
}

/// The result of a run.
pub struct Outcome {
    pub final_dir: Option<PathBuf>,
    pub plan: Plan,
    /// The resolved recipe.
    pub resolved: String,
    /// Commands to suggest next.
    pub next: Vec<String>,
    pub peak_memory_bytes: u64,
}

/// Runs a recipe.
///
/// Errors: any invalid input (before the first step), a loss or gradient that is not finite, a full disk; a signal
/// after the state was saved (exit code 128 + signal).
pub fn train(loaded: &recipe::LoadedRecipe, options: &Options) -> Result<Outcome> {
    let recipe = &memory_plan::pin_resumed_choices(&loaded.recipe, &options.resume)?;
    let run_dir = PathBuf::from(&recipe.train.output_dir);
    let ranks = &options.ranks;
    ranks.0.set_timeout(recipe.distributed.limit());
    if !options.dry_run && ranks.is_root() {
        directory::check(&run_dir, options)?;
    }
    let own = ranks.device(&recipe.model.device)?;
    let device = own.device.clone();
    signal::install()?;
    signal::quit("stopped before the first step");

    // ---- model directory and data: all input errors are found before anything is written
    let mut model = ModelDir::of_recipe(recipe)?;
    let recipe = &vocabulary::settle(recipe, model.new_rows.as_ref(), &model.spec);
    model.untie_for(recipe)?;
    model.check_weights(recipe.model.init)?;
    let rows = RecipeRows::read(recipe, &model)?;

    // ---- all decisions: values of `auto` keys, adapters, schedule of active parameters, memory
    let before = ResumedValues::read(recipe, &options.resume)?;
    let stored = model.stored(recipe.model.init)?;
    let RunPlan {
        recipe: settled,
        choices,
        adapters: mut prepared,
        active_schedule,
        stream,
        memory: MemoryPlan {
            mut plan,
            strategy,
            refused,
            ..
        },
    } = RunPlan::new(
        recipe,
        &model.spec,
        Some(&rows),
        &stored,
        &before,
        &ranks.plan_device(&own)?,
        adapters::Values::Drawn,
    )?;
    let Some(stream) = stream else {
        return Err(Error::internal("a run has no rows"));
    };
    let RecipeRows {
        train,
        eval,
        questions,
        screened,
    } = &rows;
    let mut loaded = defaults::record(loaded, &choices);
    loaded.remark("data", &rows::formats(recipe, train, eval.as_ref()));
    let (loaded, open, recipe) = (&loaded, recipe, &settled);
    let (total_steps, params) = (stream.steps(), model.spec.params());
    stage::check(recipe, &model, train)?;
    learning::check(recipe, &active_schedule, total_steps)?;
    ranks::check(recipe, &model.spec, device.is_cuda(), ranks.size())?;
    plan.choices.extend(memory_plan::settled(&loaded.recipe, open));
    if options.dry_run {
        return Ok(Outcome {
            final_dir: None,
            plan,
            resolved: loaded.resolved.clone(),
            next: Vec::new(),
            peak_memory_bytes: 0,
        });
    }

    if let Some(refused) = refused {
        return Err(refused.error);
    }
    if let Some(budget) = recipe.memory.budget {
        ops::device::limit(&device, budget)?;
    }

    // ---- run directory: all remaining checks run before it is changed
    let print = match recipe.model.init {
        recipe::ModelInit::Pretrained => Some(model.fingerprint()?),
        recipe::ModelInit::Random => None,
    };
    let base = print.as_ref().map(Fingerprint::base).unwrap_or_default();
    let facts = state::of_run(loaded, print, train, eval.as_ref(), ranks.size(), &own.kind);
    if let Some(dir) = &recipe.tune.lora.adapter
        && recipe.tune.method == Method::Lora
    {
        hf::check_base(&locate::adapter_directory(dir)?, &base)?;
    }
    let elements = trained_elements(&active_schedule, total_steps, &params, &prepared.adapters);
    let needed = directory::space_needed(recipe, &model.spec, elements, strategy.placement);
    if ranks.several() {
        ranks.same(&ranks::agreed(&facts, &format!("{strategy:?}"), &own.kind, options)?)?;
    }
    let (mut directory, resumed) = if ranks.is_root() {
        checkpoint::check_space(&run_dir, needed.saturating_sub(directory::freed(&run_dir, options)))?;
        let same = |checkpoint: &LoadedState| state::check_same(&state::facts(checkpoint), &facts);
        let (directory, resumed) = directory::open(&run_dir, options, &same)?;
        owner::remove_scratch_of_ranks(&run_dir)?;
        let first = resumed.as_ref().map_or(1, |checkpoint| checkpoint.step + 1);
        rehearsal::of_disk(recipe, &model.spec, &run_dir, elements, first)?;
        ranks.path(resumed.as_ref().map(|checkpoint| checkpoint.path.as_path()))?;
        (directory, resumed)
    } else {
        let from = ranks.path(None)?;
        let resumed = from.map(|from| checkpoint::load(&from)).transpose()?;
        (Directory::of_other_rank(&run_dir), resumed)
    };
    // The files that a run needs meanwhile.
    let scratch = if ranks.is_root() {
        run_dir.clone()
    } else {
        let own = owner::of_rank(&run_dir, ranks.0.world().rank);
        staging::scratch(&own)?;
        own
    };
    let start_step = resumed.as_ref().map_or(0, |checkpoint| checkpoint.step);
    if resumed.is_some() {
        signal::quit(format!("stopped: the run is unchanged, after step {start_step}"));
    }
    directory.begin();
    let mut reporter = if ranks.is_root() {
        directory::describe(&run_dir, loaded, &plan)?;
        directory::list_rows(&run_dir, &rows, &model)?;
        let board = recipe.train.report_to == ReportTo::TensorBoard;
        Reporter::new(&run_dir, total_steps, start_step).with_event_file(board)
    } else {
        Reporter::silent(&run_dir, total_steps)
    };
    let mut lines = header(
        recipe,
        &model,
        train,
        eval.as_ref(),
        &stream,
        &plan,
        &active_schedule,
        elements,
        &params,
    );
    let dropped = screened.iter().flat_map(|s| s.lines());
    lines.extend(dropped.map(|line| ("screen", visible(&line))));
    lines.extend(ranks::header(recipe, ranks.size()).map(|line| ("ranks", line)));
    lines.extend(own.shared().map(|line| ("gpu", line)));
    reporter.header(&lines);
    reporter.event("data", rows::counts(recipe, train, &stream));
    for line in &directory.notes {
        reporter.note(line);
        reporter.event("directory", json!({ "message": line }));
    }
    let learning_warnings = learning::warnings(recipe, &active_schedule, &stream, options.only_steps);
    for warning in loaded
        .warnings
        .iter()
        .cloned()
        .chain(rows::warnings(
            train,
            eval.as_ref(),
            recipe,
            model.template.is_some(),
            model.spec.max_positions,
        ))
        .chain(screened.iter().flat_map(|s| s.warnings()))
        .chain(learning_warnings)
        .chain(prepared.warnings.iter().map(|line| recipe::in_program_terms(line)))
        .chain(model.tokenizer.end_conflict().map(str::to_string))
        .chain(resumed.iter().filter_map(|c| state::other_bits(c, &facts)))
    {
        reporter.warn(&warning);
    }

    // ---- engine
    let budget = Budget::of(recipe, &device);
    if let Some(warning) = budget.and_then(Budget::warning) {
        reporter.warn(&warning);
    }
    let mut loaded_model = model.load_for(&strategy, recipe, &scratch, &device, &ranks.0)?;
    prepared.attach(&mut loaded_model.network)?;
    let step_hook = allocation::of(recipe, &prepared);
    if let Some(checkpoint) = &resumed {
        let sizes = state::sizes(checkpoint)?;
        let ranks = starts::ranks_of(&loaded_model.network, |name| sizes.get(name).copied());
        starts::resize(recipe, &mut loaded_model.network, &mut prepared, &ranks)?;
    }
    if resumed.is_none() || starts::requantizes_base(recipe) {
        let mut setting = AdapterInitContext {
            recipe,
            model: &model,
            objective: &CausalLm::new(model.spec.vocab),
            train: &*train.flat()?,
            base: &facts.base,
            cache: &run_dir.parent().unwrap_or(Path::new("")).join(START_CACHE),
            store: &*loaded_model.store,
            note: &mut |line| reporter.note(line),
        };
        starts::fill(&mut setting, &mut loaded_model.network, &mut prepared)?;
    }
    let setting = stage::StageContext {
        recipe,
        spec: &model.spec,
        model: &model,
        device: &device,
        run_dir: &scratch,
        train,
        stream,
        eval: eval.as_ref(),
        questions: questions.as_ref(),
    };
    let Stage { mut feed, objective } = stage::open(setting)?;
    // The start values may have changed which modules have adapters.
    let objective_params = objective.params().into_iter().map(|p| p.name.to_string());
    let active_schedule =
        ActiveSchedule::new(recipe, &model.spec, &params, &prepared)?.with_objective_params(objective_params);
    let first = active_schedule.active(start_step.max(1));
    let optimizer = active_schedule::optimizer(recipe);
    let mut engine = Engine::new(loaded_model, objective, optimizer, strategy, &first)?;
    learning::configure(&mut engine, recipe);
    engine.step_hook = step_hook;
    engine.join(ranks.0.clone(), &first, recipe.distributed.exchange())?;
    engine.sequence = recipe.distributed.shared(ranks.size());
    if let Some(outer) = recipe.distributed.outer(ranks.size(), total_steps) {
        engine.train_apart(outer);
    }
    let trained = TrainedModel::new(recipe, &model, &engine, &prepared, &base);
    rehearsal::of_files(&trained, &active_schedule, &run_dir.join("final"), total_steps)?;
    let mut trained_tokens = 0;
    if let Some(checkpoint) = &resumed {
        let _phase = progress::phase("restoring the state", 0, "");
        state::restore(checkpoint, &mut engine, &first)?;
        if let Some(state) = state::feed(checkpoint)? {
            feed.restore(&state).map_err(|e| e.or_at(checkpoint.path.display()))?;
        }
        trained_tokens = state::facts(checkpoint).trained_tokens;
        reporter.event(
            "resume",
            json!({
                "step": start_step, "checkpoint": checkpoint.path.display().to_string(), "command": options.command,
            }),
        );
        reporter.note(&format!("resumed after step {start_step}"));
    } else {
        for (name, tensor) in &prepared.given {
            let values = update::to_f32_vec(tensor)?;
            let param = engine.network.param(name)?;
            engine.optimizer.restore_weight(name, &param.tensor, &values)?;
        }
        reporter.event("start", json!({"steps": total_steps, "command": options.command}));
        running::prepare(&mut *feed, &engine, ranks)?;
    }
    let mut best = BestModel::new(&recipe.train);
    if ranks.is_root() && start_step > 0 {
        best.replay(&run_dir);
    }
    let mut run = Run {
        ranks,
        best,
        recipe,
        run_dir: &run_dir,
        model: &model,
        eval: eval.as_ref(),
        feed,
        schedule: &active_schedule,
        facts,
        reporter,
        plan: &plan,
        directory,
        budget,
        stopped: false,
        pace: Pace {
            saved: start_step,
            several: ranks.several(),
            ..Pace::default()
        },
    };
    run.facts.trained_tokens = trained_tokens;
    run.expect_signal_after(start_step);
    let due = |step: u64, every: usize| every > 0 && step.is_multiple_of(every as u64);
    let eval_due = |step: u64| due(step, recipe.train.eval_steps);
    let save_due = |step: u64| due(step, recipe.train.save_steps);
    let checkpoint_of = |step: u64| run_dir.join(format!("checkpoint-{step}"));
    if let Some(step) = run.best.step().filter(|step| !checkpoint_of(*step).exists()) {
        return Err(
            Error::new("the checkpoint of the best evaluation does not exist any more")
                .at_path(&checkpoint_of(step))
                .found(run.best.describe())
                .hint("resume with `train.load_best_model_at_end=false`, or start the run again with `--overwrite`"),
        );
    }
    if start_step == 0 && total_steps > 0 && !options.only_steps {
        run.samples(&mut engine, 0, "before")?;
        run.evaluate(&mut engine, 0)?;
        run.stop_if_asked(&engine, 0)?;
    } else if start_step < total_steps && eval_due(start_step) {
        // The checkpoint of this step was written before its evaluation.
        run.evaluate_if_missing(&mut engine, start_step)?;
    } else if start_step < total_steps {
        rehearsal::of_evaluation(&engine, &run.feed.eval()?, &mut run.reporter)?;
    }

    // ---- steps
    run.reporter.begin();
    let lr_schedule = Schedule::new(&recipe.schedule, total_steps);
    let mut active = active_schedule.active(start_step + 1);
    let mut watch = Watch::new(recipe, model.spec.vocab);
    // On a GPU the numbers of a step are read after the next one is queued. A rollout waits for the device anyway.
    // An average needs the weights of each step.
    // Several ranks wait for the sums of each step.
    let late = device.is_cuda() && !ranks.several() && !prompts::reinforces(recipe) && engine.ema.is_none();
    let mut unread: Option<UnreadStep> = None;
    let mut last_step = start_step;
    let mut profile = Profile::new(&run_dir, start_step, if ranks.is_root() { options.profile } else { 0 });
    let mut over = start_step > 0 && start_step < total_steps && run.ends_early(start_step)?;
    for step in start_step + 1..=total_steps {
        if over {
            break;
        }
        last_step = step;
        let _span = profile.before(step, &mut run.reporter)?;
        run.directory.check()?;
        let switches = active_schedule.switches_at(step);
        if switches || step == start_step + 1 {
            let survives = |name: &str| !switches || active_schedule.survives_switch(name, step);
            active = active_schedule.active(step);
            let recoded = engine.switch(&active, survives)?;
            if !recoded.is_empty() {
                let errors: serde_json::Map<_, _> =
                    recoded.iter().map(|r| (r.name.to_string(), json!(r.error))).collect();
                run.reporter
                    .event("recode", json!({"step": step, "relative_error": errors}));
            }
        }
        if switches {
            run.reporter.event(
                "switch",
                json!({"step": step, "active_block": active_schedule.label(step)}),
            );
        }
        let started = Instant::now();
        run.expect_signal(step, engine.changes_last(&active));
        let window = match run.window(step - 1, &engine) {
            Ok(window) => window,
            Err(e) => {
                if let Some(before) = unread.take() {
                    run.log_step(&mut engine, before, &mut watch)?;
                }
                // A rollout takes long: a signal during it saves the state and stops.
                if !ranks.several() || run.stopped {
                    run.stop_if_asked(&engine, step - 1)?;
                }
                return Err(run.failed(&engine, step, trained_tokens, e));
            }
        };
        let lr = match &options.sweep {
            Some(sweep) => sweep.rate(step),
            None => learning::rate(recipe, &lr_schedule, &active_schedule, step, engine.skipped_steps()),
        };
        let scale = engine.loss_scale;
        let queued = engine.queue_step(step, &window, &active, lr, true, unread.as_ref().map(|u| &u.queued));
        if let Some(before) = unread.take() {
            run.log_step(&mut engine, before, &mut watch)?;
        }
        let queued = match queued {
            Ok(queued) => queued,
            Err(e) => {
                if matches!(e.kind(), ErrorKind::Signal(_)) {
                    run.stop_if_asked(&engine, step - 1)?;
                }
                return Err(run.failed(&engine, step, trained_tokens, e));
            }
        };
        run.expect_signal_after(step);
        let this = UnreadStep {
            step,
            epoch: run.feed.epoch_after(step),
            learning_rate: lr,
            trained_before: trained_tokens,
            label: active_schedule.label(step),
            print: step.is_multiple_of(recipe.train.logging_steps.max(1) as u64) || step == total_steps,
            loads: engine.routers.loads(),
            more: [
                engine.objective.metrics(),
                run.feed.metrics(),
                engine.routers.metrics(),
                step_metrics::scale_metrics(scale, &engine),
            ]
            .concat(),
            started,
            queued,
        };
        trained_tokens += this.queued.trained();
        // Before anything else looks at the state, its step is complete and found to be finite.
        let read_now = !late
            || step == total_steps
            || save_due(step)
            || eval_due(step)
            || active_schedule.switches_at(step + 1)
            || signal::received().is_some();
        if !read_now {
            unread = Some(this);
            continue;
        }
        run.log_step(&mut engine, this, &mut watch)?;
        for sample in run.feed.samples() {
            run.reporter.sample(&sample);
        }

        // Between averages there is no state that all ranks have.
        if !engine.is_synchronized() {
            continue;
        }
        if save_due(step) {
            let saved = run.save(&engine, step);
            saved.map_err(|e| run.ended(step, e))?;
        }
        run.stop_if_asked(&engine, step)?;
        run.stop_above_budget(&engine, step)?;
        if eval_due(step) && step < total_steps {
            run.evaluate(&mut engine, step)?;
            run.stop_if_asked(&engine, step)?;
            run.keep_best(&engine, step)?;
            over = run.ends_early(step)?;
        }
    }
    profile.end(&mut run.reporter)?;
    if options.only_steps {
        run.reporter.finish();
        drop(run);
        return Ok(Outcome {
            final_dir: None,
            resolved: loaded.resolved.clone(),
            next: Vec::new(),
            peak_memory_bytes: running::peak_memory(&device)?,
            plan,
        });
    }

    // ---- results for the user
    for warning in watch.end() {
        run.reporter.warn(&warning);
    }
    if total_steps > 0 {
        run.evaluate_if_missing(&mut engine, last_step)?;
    }
    if ranks.of_root(last_step > start_step || !run_dir.join("final").exists())? {
        run.samples(&mut engine, last_step, "after")?;
        run.stop_if_asked(&engine, last_step)?;
    }
    signal::conduct(Conduct::Stop(Stop {
        what: "the last step is done and `final/` is being written".into(),
        then: "; Ctrl-C again stops now, without `final/`".into(),
        lost: "`final/` was not written; `--resume` continues from the newest checkpoint".into(),
        finishes: None,
    }));
    let mut said = Vec::new();
    run.directory.check()?;
    let before = run.directory.aside()?;
    let out = run_dir.join("final");
    let peak = running::peak_memory(&device)?;
    let earlier = run.best.step().filter(|step| *step != last_step && !model.is_shape());
    let final_dir = if ranks.of_root(earlier.is_some())? {
        drop(engine);
        match earlier.filter(|_| ranks.is_root()) {
            Some(step) => {
                said.push(format!(
                    "final/ is the model of the best evaluation: {}",
                    run.best.describe()
                ));
                let written = from_checkpoint::write(&checkpoint_of(step), &out);
                said.extend(written.map_err(|e| run.ended(last_step, e))?.notes);
                Some(out)
            }
            None => None,
        }
    } else {
        let exported = engine.with_averages(|engine| {
            let trained = TrainedModel::new(recipe, &model, engine, &prepared, &base);
            engine.by_root(|| finish::export(&trained, &out, &mut |line| said.push(line.to_string())))
        });
        let written = exported.map_err(|e| run.export_failed(&engine, last_step, e))?;
        drop(engine);
        written.flatten()
    };
    said.iter().for_each(|line| run.reporter.note(line));
    // Rank 0 removes the files of all ranks when none needs them any more.
    ranks.meet()?;
    if ranks.is_root() {
        owner::remove_scratch(&run_dir)?;
    }
    if final_dir.is_some() {
        for line in run.directory.exported(&before)? {
            run.reporter.note(&line);
        }
    } else {
        run.reporter
            .note("a built-in shape has random weights: no `final/` is written");
    }
    run.draw(true);
    run.reporter.event(
        "stop",
        json!({"step": last_step, "reason": if over { "early stopping" } else { "done" }}),
    );
    run.reporter.finish();
    drop(run);
    Ok(Outcome {
        next: final_dir
            .as_deref()
            .map_or(Vec::new(), |dir| next::after_training(recipe, dir)),
        final_dir,
        plan,
        resolved: loaded.resolved.clone(),
        peak_memory_bytes: peak,
    })
}

/// Directory next to the run directories: initial adapter pairs that other runs of the same model and rows can use.
const START_CACHE: &str = ".ft-starts";
