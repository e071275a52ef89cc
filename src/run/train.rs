//! `ft train`: recipe, data, model, plan, then one optimizer step after the other, then `final/`.

use super::forecast::{self, Forecast};
use super::rows::{self, Rows};
use super::setup::{self, Described};
use super::stage::{self, Feed, Stage};
use super::starts::{self, Setting};
use super::state::{self, Facts};
use super::tuning::{self, Tuning};
use super::{adapters, allocation, directory, finish, samples};
use crate::base::lock::RunLock;
use crate::base::units::{bytes, count};
use crate::base::{Error, Result, files, memory, signal};
use crate::checkpoint;
use crate::data::Dataset;
use crate::data::order::BatchStream;
use crate::engine::{self, Engine, Gradients};
use crate::export;
use crate::model::Adapters;
use crate::ops::transfer::Copier;
use crate::ops::{self, update};
use crate::optim::Schedule;
use crate::plan::Plan;
use crate::recipe::{self, Activations, Method, Recipe};
use crate::report::{EvalMetrics, Reporter, StepMetrics};
use crate::sft::CausalLm;
use crate::source::Prepacking;
use candle_core::Device;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// How `ft train` was called, beside the recipe.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Resume from the newest checkpoint of the run directory, or from this run or checkpoint directory.
    pub resume: Option<Option<PathBuf>>,
    /// Start anew in a directory that holds a run.
    pub overwrite: bool,
    /// Stop after the plan.
    pub dry_run: bool,
}

/// What the run left behind.
pub struct Outcome {
    pub final_dir: Option<PathBuf>,
    pub plan: Plan,
    pub peak_memory_bytes: u64,
}

/// Runs a recipe.
///
/// Errors: any input that is wrong (before the first step), a loss or gradient that is not finite, a full
/// disk; a signal after the state was saved (exit code 128 + signal).
pub fn train(loaded: &recipe::Loaded, options: &Options) -> Result<Outcome> {
    let recipe = &forecast::as_before(&loaded.recipe, &options.resume)?;
    let run_dir = PathBuf::from(&recipe.train.output_dir);
    let device = setup::device(&recipe.model.device)?;
    signal::install()?;

    // ---- model directory and data: everything that can be wrong is found before anything is written
    let model = Described::open(
        &recipe.model.path,
        &recipe.model.revision,
        recipe.data.chat_template.as_deref(),
    )?;
    model.check_weights(recipe.model.init)?;
    let Rows { train, eval, questions } = Rows::read(recipe, &model)?;
    stage::check(recipe, &model, &train)?;
    let stream = BatchStream::new(&train, rows::stream(recipe, train.examples.len()))?;
    let total_steps = stream.steps();

    // ---- adapters, what is trained when, plan
    let mut prepared = adapters::of(recipe, &model.spec)?;
    allocation::settle(recipe, &mut prepared, total_steps)?;
    let params = model.spec.params();
    let mut tuning = Tuning::new(recipe, &model.spec, &params, &prepared, train.examples.len())?;
    let Forecast {
        mut plan,
        gradients,
        keep_layers,
        mlp_tokens,
        storage,
        place,
        copies: packed,
        refused,
    } = forecast::forecast(
        recipe,
        &model.spec,
        &prepared.adapters,
        &tuning,
        Some(&stream),
        &setup::Stored::find(&model.dir, &model.spec, recipe.model.init)?,
        &device,
    )?;
    plan.choices.extend(forecast::settled(&loaded.recipe, recipe));
    if options.dry_run {
        return Ok(Outcome {
            final_dir: None,
            plan,
            peak_memory_bytes: 0,
        });
    }

    if let Some(refused) = refused {
        return Err(refused.error);
    }
    if let Some(budget) = recipe.memory.budget {
        ops::device::limit(&device, budget)?;
    }

    // ---- run directory
    files::create_dir_all(&run_dir)?;
    let _lock = RunLock::acquire(&run_dir)?;
    let resumed = directory::open(&run_dir, options)?;
    let facts = facts(loaded, &model, &train, eval.as_ref())?;
    if let (Some(dir), recipe::ModelInit::Pretrained) = (&recipe.tune.lora.adapter, recipe.model.init)
        && recipe.tune.method == Method::Lora
    {
        export::check_base(Path::new(dir), &facts.base)?;
    }
    let start_step = match &resumed {
        Some(checkpoint) => {
            state::check_same(&state::facts(checkpoint), &facts).map_err(|e| e.or_at(checkpoint.path.display()))?;
            checkpoint::set_aside_later(&run_dir, checkpoint.step)?;
            checkpoint.step
        }
        None => 0,
    };
    let elements = trained_elements(&tuning, total_steps, &params, &prepared.adapters);
    checkpoint::check_space(&run_dir, directory::space_needed(recipe, &model, elements, place))?;
    directory::describe(&run_dir, loaded, &plan)?;
    let mut reporter = Reporter::new(&run_dir, total_steps, start_step);
    let lines = header(recipe, &model, &train, eval.as_ref(), &stream, &plan, elements, &params);
    reporter.header(&lines);
    for warning in loaded
        .warnings
        .iter()
        .cloned()
        .chain(rows::warnings(&train, recipe, model.spec.max_positions))
    {
        reporter.warn(&warning);
    }

    // ---- engine
    let mut network = model.load_to(place, &storage, recipe, &run_dir, &device)?;
    for adapter in prepared.adapters.values_mut() {
        *adapter = Arc::new(adapter.on(&device)?);
    }
    network.adapters = prepared.adapters.clone();
    network.mlp_tokens = mlp_tokens;
    adapters::place_rows(&prepared, &mut network)?;
    network.ranks = allocation::of(recipe, &prepared);
    if let Some(checkpoint) = &resumed {
        let sizes = state::sizes(checkpoint)?;
        let ranks = starts::ranks_of(&network, |name| sizes.get(name).copied());
        starts::resize(recipe, &mut network, &mut prepared, &ranks)?;
    }
    if resumed.is_none() || starts::changes_base(recipe) {
        let mut setting = Setting {
            recipe,
            model: &model,
            objective: &CausalLm::new(model.spec.vocab),
            train: &train.flat(),
            base: &facts.base,
            cache: &run_dir.parent().unwrap_or(Path::new("")).join(START_CACHE),
            note: &mut |line| reporter.note(line),
        };
        starts::fill(&mut setting, &mut network, &mut prepared)?;
    }
    let setting = stage::Setting {
        recipe,
        spec: &model.spec,
        model: &model,
        device: &device,
        run_dir: &run_dir,
        train: &train,
        stream,
        eval: eval.as_ref(),
        questions: questions.as_ref(),
    };
    let Stage { mut feed, objective } = stage::open(setting)?;
    network.own = objective.params();
    let own = network.own.iter().map(|p| p.name.to_string());
    tuning = Tuning::new(recipe, &model.spec, &params, &prepared, train.examples.len())?.with_own(own);
    if let Some(copies) = packed {
        let first = tuning.active(start_step + 1);
        network.source = Box::new(Prepacking::new(network.source, copies, first.names()));
    }
    let mut engine = Engine {
        objective,
        optimizer: tuning::optimizer(recipe),
        gradients,
        keep_layers,
        parked: match recipe.memory.activations {
            Activations::Host => Some(Copier::new(&device)?),
            _ => None,
        },
        max_grad_norm: recipe.train.max_grad_norm,
        seed: recipe.train.seed,
        network,
    };
    let mut trained_tokens = 0;
    if let Some(checkpoint) = &resumed {
        state::restore(checkpoint, &mut engine)?;
        if let Some(state) = state::feed(checkpoint)? {
            feed.restore(&state).map_err(|e| e.or_at(checkpoint.path.display()))?;
        }
        trained_tokens = state::facts(checkpoint).trained_tokens;
        reporter.event(
            "resume",
            json!({"step": start_step, "checkpoint": checkpoint.path.display().to_string()}),
        );
        reporter.note(&format!("resumed after step {start_step}"));
    } else {
        for (name, tensor) in &prepared.given {
            let values = update::to_f32_vec(tensor)?;
            let param = engine.network.param(name)?;
            engine.optimizer.restore_weight(name, &param.tensor, &values)?;
        }
        reporter.event("start", json!({"steps": total_steps}));
        feed.prepare(&engine)?;
    }
    let mut run = Run {
        recipe,
        run_dir: &run_dir,
        model: &model,
        eval: eval.as_ref(),
        feed,
        tuning: &tuning,
        facts,
        reporter,
        plan: &plan,
    };
    if start_step == 0 && total_steps > 0 {
        run.samples(&engine, "before")?;
        run.evaluate(&engine, 0)?;
        run.stop_if_asked(&engine, 0)?;
    }

    // ---- steps
    let schedule = Schedule::new(&recipe.schedule, total_steps);
    let mut active = tuning.active(start_step + 1);
    for step in start_step + 1..=total_steps {
        let switches = tuning.switches_at(step);
        if switches || step == start_step + 1 {
            let survives = |name: &str| !switches || tuning.survives_switch(name, step);
            active = tuning.active(step);
            let recoded = engine.switch(&active, survives)?;
            if !recoded.is_empty() {
                let errors: serde_json::Map<_, _> =
                    recoded.iter().map(|r| (r.name.to_string(), json!(r.error))).collect();
                run.reporter
                    .event("recode", json!({"step": step, "relative_error": errors}));
            }
        }
        if switches {
            run.reporter
                .event("switch", json!({"step": step, "active_block": tuning.label(step)}));
        }
        let started = Instant::now();
        let window = match run.feed.window(step - 1, &engine) {
            Ok(window) => window,
            Err(e) => {
                // A rollout takes long: a signal in it loses nothing.
                if !switches {
                    run.stop_if_asked(&engine, step - 1)?;
                }
                return Err(run.failed(&engine, step, trained_tokens, e));
            }
        };
        let lr = recipe.optimizer.learning_rate * schedule.multiplier(step) * tuning.warmup(step);
        let report = engine.step(step, &window, &active, lr);
        let report = report.map_err(|e| run.failed(&engine, step, trained_tokens, e))?;
        trained_tokens += report.totals.trained;
        let metrics = StepMetrics {
            step,
            epoch: run.feed.epoch_after(step),
            loss: report.totals.loss(),
            learning_rate: lr,
            grad_norm: report.grad_norm,
            tokens_per_second: report.totals.tokens as f64 / started.elapsed().as_secs_f64(),
            trained_tokens,
            peak_memory_bytes: peak_memory(&device)?,
            active_block: tuning.label(step),
            more: [engine.objective.metrics(), run.feed.metrics(), copies(&engine)?].concat(),
        };
        let every = recipe.train.logging_steps.max(1) as u64;
        run.reporter.step(&metrics, step % every == 0 || step == total_steps);
        run.facts.trained_tokens = trained_tokens;
        for sample in run.feed.samples() {
            run.reporter.sample(&sample);
        }

        let due = |every: usize| every > 0 && step % every as u64 == 0;
        if due(recipe.train.save_steps) {
            run.save(&engine, step)?;
        }
        run.stop_if_asked(&engine, step)?;
        if due(recipe.train.eval_steps) && step < total_steps {
            run.evaluate(&engine, step)?;
            run.stop_if_asked(&engine, step)?;
        }
    }

    // ---- what the user takes away
    if total_steps > start_step {
        run.evaluate(&engine, total_steps)?;
        run.samples(&engine, "after")?;
    }
    let mut said = Vec::new();
    let final_dir = finish::export(&run_dir, recipe, &model, &engine, &prepared, &mut |line| {
        said.push(line.to_string());
    })?;
    said.iter().for_each(|line| run.reporter.note(line));
    let peak = peak_memory(&device)?;
    drop(engine);
    directory::clean(&run_dir)?;
    if final_dir.is_none() {
        run.reporter
            .note("a built-in shape has random weights: no `final/` is written");
    }
    run.reporter
        .event("stop", json!({"step": total_steps, "reason": "done"}));
    run.reporter.finish();
    drop(run);
    Ok(Outcome {
        final_dir,
        plan,
        peak_memory_bytes: peak,
    })
}

/// Milliseconds that the step's copies to the device took, and the part that was hidden behind computing.
fn copies(engine: &Engine) -> Result<Vec<(&'static str, f64)>> {
    let parked = engine.parked.as_ref().map(Copier::times).transpose()?.flatten();
    let mut sum = engine.network.source.copies()?.unwrap_or_default();
    if let Some(parked) = parked {
        sum.copying += parked.copying;
        sum.waiting += parked.waiting;
    }
    let hidden = sum
        .hidden()
        .map(|hidden| vec![("copy_ms", sum.copying), ("copy_hidden", hidden)]);
    Ok(hidden.unwrap_or_default())
}

/// Most memory so far: of the GPU's tensors, or of this process on the CPU.
fn peak_memory(device: &Device) -> Result<u64> {
    let gpu = ops::device::memory(device)?;
    Ok(gpu.map_or_else(memory::peak_resident, |m| m.peak_used))
}

fn facts(loaded: &recipe::Loaded, model: &Described, train: &Dataset, eval: Option<&Dataset>) -> Result<Facts> {
    Ok(Facts {
        recipe: loaded.values.iter().cloned().collect(),
        data: train.fingerprint.clone(),
        eval_data: eval.map(|e| e.fingerprint.clone()).unwrap_or_default(),
        base: match loaded.recipe.model.init {
            recipe::ModelInit::Pretrained => export::fingerprint(&model.dir)?,
            recipe::ModelInit::Random => "random".to_string(),
        },
        trained_tokens: 0,
    })
}

/// Beside the run directories: starts that other runs of the same model and rows can use.
const START_CACHE: &str = ".ft-starts";

/// Elements that the whole run trains.
fn trained_elements(tuning: &Tuning, steps: u64, params: &[crate::source::ParamInfo], adapters: &Adapters) -> u64 {
    let names = tuning.trained_until(steps.max(1));
    let weights: usize = params
        .iter()
        .filter(|p| names.contains(&*p.name))
        .map(|p| p.elements())
        .sum();
    let lora: usize = adapters.values().map(|a| a.elements()).sum();
    (weights + lora) as u64
}

#[allow(clippy::too_many_arguments)]
fn header(
    recipe: &Recipe,
    model: &Described,
    train: &Dataset,
    eval: Option<&Dataset>,
    stream: &BatchStream,
    plan: &Plan,
    elements: u64,
    params: &[crate::source::ParamInfo],
) -> Vec<(&'static str, String)> {
    let all: usize = params.iter().map(|p| p.elements()).sum();
    let share = 100.0 * elements as f64 / all as f64;
    let eval = eval.map_or(String::new(), |e| {
        format!(", {} held out", count(e.examples.len() as u64))
    });
    vec![
        (
            "model",
            format!(
                "{} ({}, {} parameters, {})",
                recipe.model.path,
                model.spec.model_type,
                count(all as u64),
                recipe.model.dtype.name()
            ),
        ),
        (
            "method",
            format!(
                "{}, trains {} parameters over the run ({share:.2} %)",
                recipe.tune.method.name(),
                count(elements)
            ),
        ),
        (
            "data",
            format!(
                "{} rows, {} tokens, {} of them trained{eval}",
                count(train.examples.len() as u64),
                count(train.stats.tokens),
                count(train.stats.trained_tokens)
            ),
        ),
        (
            "steps",
            format!(
                "{} of {} × {} {}",
                count(stream.steps()),
                recipe.train.batch_size,
                recipe.train.gradient_accumulation_steps,
                if recipe.data.packing { "packed rows" } else { "rows" }
            ),
        ),
        ("memory", format!("{} forecast peak", bytes(plan.peak_bytes))),
        ("output", recipe.train.output_dir.clone()),
    ]
}

/// What a running training needs beside the engine.
struct Run<'a> {
    recipe: &'a Recipe,
    run_dir: &'a Path,
    model: &'a Described,
    eval: Option<&'a Dataset>,
    feed: Box<dyn Feed + 'a>,
    tuning: &'a Tuning,
    facts: Facts,
    reporter: Reporter,
    plan: &'a Plan,
}

impl Run<'_> {
    fn save(&mut self, engine: &Engine, step: u64) -> Result<()> {
        let path = state::save(
            self.run_dir,
            step,
            engine,
            self.tuning,
            &self.facts,
            self.feed.state(step)?,
        )?;
        checkpoint::rotate(self.run_dir, self.recipe.train.save_total_limit)?;
        self.reporter
            .event("save", json!({"step": step, "checkpoint": path.display().to_string()}));
        Ok(())
    }

    fn evaluate(&mut self, engine: &Engine, step: u64) -> Result<()> {
        let found = match self.feed.evaluate(engine) {
            Err(_) if signal::received().is_some() => return Ok(()), // the caller saves and stops
            found => found?,
        };
        if !found.is_empty() {
            self.reporter.measured(step, &found);
        }
        let batches = self.feed.eval()?;
        if batches.is_empty() {
            return Ok(());
        }
        engine.objective.metrics();
        let mut totals = engine::Totals::default();
        for batch in &batches {
            if signal::received().is_some() {
                return Ok(()); // the caller saves and stops
            }
            totals.add(engine::evaluate(&engine.network, engine.objective.as_ref(), batch)?);
        }
        let eval_accuracy = match self.eval {
            Some(eval) if self.recipe.train.predict_with_generate => {
                Some(samples::accuracy(self.recipe, self.model, engine, eval)?)
            }
            _ => None,
        };
        self.reporter.eval(&EvalMetrics {
            step,
            eval_loss: totals.loss(),
            eval_perplexity: totals.loss().exp(),
            eval_tokens: totals.trained,
            eval_accuracy,
            more: engine.objective.metrics(),
        });
        Ok(())
    }

    fn samples(&mut self, engine: &Engine, when: &str) -> Result<()> {
        for (prompt, answer) in samples::answers(self.recipe, self.model, engine)? {
            self.reporter.note(&format!("{when}: {prompt}\n        -> {answer}"));
        }
        Ok(())
    }

    /// Errors: a signal was received; the state after `step` is saved then.
    fn stop_if_asked(&mut self, engine: &Engine, step: u64) -> Result<()> {
        let Some(signal) = signal::received() else {
            return Ok(());
        };
        self.save(engine, step)?;
        self.reporter
            .event("stop", json!({"step": step, "reason": "signal", "signal": signal}));
        self.reporter.finish();
        Err(Error::signal(
            signal,
            format!("stopped by a signal; the state after step {step} is saved"),
        )
        .at_path(self.run_dir)
        .hint("go on with `--resume`"))
    }

    /// A step failed. Its weights are those of the step before where gradients are kept: that state is saved.
    fn failed(&mut self, engine: &Engine, step: u64, trained_tokens: u64, e: Error) -> Error {
        self.facts.trained_tokens = trained_tokens;
        let whole = engine.gradients == Gradients::Keep && !self.tuning.corrects_at_once();
        let safe = whole && step > 1 && !self.tuning.switches_at(step);
        let saved = if safe && self.recipe.train.save_steps > 0 {
            self.save(engine, step - 1)
        } else {
            Ok(())
        };
        if let Err(save) = saved {
            self.reporter
                .warn(&format!("the state before the failed step could not be saved: {save}"));
        }
        self.reporter.event("stop", json!({"step": step, "reason": e.what()}));
        self.reporter.finish();
        match ops::device::out_of_memory(&e) {
            true => self.explain_memory(engine, e),
            false => e,
        }
    }

    /// A GPU ran out of memory: the plan beside what was really used, and what to change.
    fn explain_memory(&mut self, engine: &Engine, e: Error) -> Error {
        self.reporter.note(&self.plan.table());
        let used = ops::device::memory(&engine.network.device)
            .ok()
            .flatten()
            .unwrap_or_default();
        Error::new("the GPU has no memory left")
            .found(format!(
                "tensors of {} at most, {} taken from the GPU for them, {} of {} free; forecast {}",
                bytes(used.peak_used),
                bytes(used.peak_reserved),
                bytes(used.free),
                bytes(used.total),
                bytes(self.plan.peak_bytes)
            ))
            .hint(
                "set `memory.activations = \"recompute\"`, lower `train.batch_size` or `data.max_length`, \
                 or let other programs leave the GPU",
            )
            .cause(e)
    }
}
