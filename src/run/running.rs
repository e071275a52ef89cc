//! A training between two steps: save, evaluate, show samples, stop after a signal, explain a failure.
//! Knows the engine and the run directory; the order of the events is `train`'s.

use super::samples;
use super::setup::Described;
use super::stage::Feed;
use super::state::{self, Facts};
use super::tuning::Tuning;
use crate::base::units::bytes;
use crate::base::{Error, Result, signal};
use crate::checkpoint;
use crate::data::Dataset;
use crate::engine::{self, Engine, Gradients};
use crate::ops;
use crate::plan::Plan;
use crate::recipe::Recipe;
use crate::report::{EvalMetrics, Reporter};
use serde_json::json;
use std::path::Path;

/// What a training needs beside the engine.
pub struct Run<'a> {
    pub recipe: &'a Recipe,
    pub run_dir: &'a Path,
    pub model: &'a Described,
    pub eval: Option<&'a Dataset>,
    pub feed: Box<dyn Feed + 'a>,
    pub tuning: &'a Tuning,
    pub facts: Facts,
    pub reporter: Reporter,
    pub plan: &'a Plan,
}

impl Run<'_> {
    pub fn save(&mut self, engine: &Engine, step: u64) -> Result<()> {
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

    pub fn evaluate(&mut self, engine: &Engine, step: u64) -> Result<()> {
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

    pub fn samples(&mut self, engine: &Engine, when: &str) -> Result<()> {
        for (prompt, answer) in samples::answers(self.recipe, self.model, engine)? {
            self.reporter.note(&format!("{when}: {prompt}\n        -> {answer}"));
        }
        Ok(())
    }

    /// Errors: a signal was received; the state after `step` is saved then.
    pub fn stop_if_asked(&mut self, engine: &Engine, step: u64) -> Result<()> {
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
    pub fn failed(&mut self, engine: &Engine, step: u64, trained_tokens: u64, e: Error) -> Error {
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
