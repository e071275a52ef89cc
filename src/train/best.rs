//! Which evaluation of a run was the best, and when a run ends early. Works on numbers only.
//!
//! As `EarlyStoppingCallback` and `load_best_model_at_end` of transformers. The state is the evaluations in
//! `metrics.jsonl`, so a resumed run goes on with the same counts. A full disk may have kept a line out of that file: a checkpoint
//! has the values too.

use crate::base::{Error, Result};
use crate::recipe::{Auto, Train};
use crate::report;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// The evaluations of a run so far.
#[derive(Debug, Clone)]
pub struct BestModel {
    /// `Auto`: `eval_loss`, or `eval_reward` if there is none.
    metric: Auto<String>,
    patience: usize,
    threshold: f64,
    /// True if `final/` is the model of the best evaluation.
    pub is_final: bool,
    /// Values of the metric by step.
    values: BTreeMap<u64, f64>,
    /// Name of the metric, once it is known.
    name: String,
}

/// True if a lower value of this metric is better.
fn falls(name: &str) -> bool {
    ["loss", "perplexity", "kl", "divergence"]
        .iter()
        .any(|word| name.split('_').any(|part| part == *word))
}

impl BestModel {
    pub fn new(train: &Train) -> Self {
        Self {
            metric: train.metric_for_best_model.clone(),
            patience: train.early_stopping_patience,
            threshold: train.early_stopping_threshold,
            is_final: train.load_best_model_at_end,
            values: BTreeMap::new(),
            name: String::new(),
        }
    }

    /// Adds the evaluations that a run directory has.
    pub fn replay(&mut self, run_dir: &Path) {
        for (step, values) in report::evaluations(run_dir) {
            // A line of an evaluation that was interrupted may lack the metric; it is repeated.
            let _ = self.add(step, &values);
        }
    }

    /// The values so far, for the state of a checkpoint. They are texts, because JSON has no number that is not finite; such a value
    /// is the same after a resume from `metrics.jsonl`.
    pub fn saved(&self) -> Value {
        if self.values.is_empty() {
            return Value::Null;
        }
        let text = |value: f64| format!("{:?}", if value.is_finite() { value } else { f64::NAN });
        let values = self
            .values
            .iter()
            .map(|(step, value)| (step.to_string(), json!(text(*value))));
        json!({"metric": self.name, "values": values.collect::<Map<_, _>>()})
    }

    /// Adds the values in a checkpoint of `saved` for steps that `metrics.jsonl` does not have, if they are those of the same metric.
    /// Checkpoints of earlier versions have none.
    pub fn add_saved(&mut self, saved: &Value) {
        let Some(name) = saved["metric"].as_str().filter(|_| self.is_needed()) else {
            return;
        };
        let is_chosen = match &self.metric {
            Auto::Of(chosen) => name == chosen || name.strip_prefix("eval_") == Some(chosen.as_str()),
            Auto::Auto => ["eval_loss", "eval_reward"].contains(&name),
        };
        if !is_chosen || !(self.name.is_empty() || self.name == name) {
            return;
        }
        self.name = name.to_string();
        for (step, value) in saved["values"].as_object().into_iter().flatten() {
            if let (Ok(step), Some(Ok(value))) = (step.parse(), value.as_str().map(str::parse)) {
                self.values.entry(step).or_insert(value);
            }
        }
    }

    fn is_needed(&self) -> bool {
        self.is_final || self.patience > 0
    }

    /// Adds the numbers of an evaluation.
    ///
    /// Errors: the metric is not among them.
    pub fn add(&mut self, step: u64, values: &[(String, f64)]) -> Result<()> {
        if !self.is_needed() {
            return Ok(());
        }
        let named = |name: &str| values.iter().find(|(n, _)| n == name);
        let found = match &self.metric {
            Auto::Of(name) => named(name).or_else(|| named(&format!("eval_{name}"))),
            Auto::Auto => named("eval_loss").or_else(|| named("eval_reward")),
        };
        let Some((name, value)) = found else {
            let names: Vec<&str> = values.iter().map(|(name, _)| name.as_str()).collect();
            return Err(Error::usage("the evaluation has no such number")
                .at(Train::metric_for_best_model)
                .found(&self.metric)
                .expected(format!("one of {}", names.join(", "))));
        };
        self.name.clone_from(name);
        if step > 0 {
            self.values.insert(step, *value);
        }
        Ok(())
    }

    /// Step and value of the best evaluation, and the number of evaluations since one was better by the threshold.
    fn state(&self) -> (Option<(u64, f64)>, usize) {
        let better = |new: f64, old: f64| if falls(&self.name) { new < old } else { new > old };
        let (mut best, mut waited) = (None, 0);
        for (&step, &value) in &self.values {
            let improved = best.map_or(value.is_finite(), |(_, old)| better(value, old));
            let by_threshold = best.is_none_or(|(_, old): (u64, f64)| (value - old).abs() > self.threshold);
            waited = if improved && by_threshold { 0 } else { waited + 1 };
            if improved {
                best = Some((step, value));
            }
        }
        (best, waited)
    }

    /// Step of the best evaluation, if its model is needed at the end.
    pub fn step(&self) -> Option<u64> {
        self.state().0.filter(|_| self.is_final).map(|(step, _)| step)
    }

    /// True if the last evaluations did not get better.
    pub fn is_over(&self) -> bool {
        self.patience > 0 && self.state().1 >= self.patience
    }

    /// `eval_loss 0.2314 after step 40`.
    pub fn describe(&self) -> String {
        match self.state().0 {
            Some((step, value)) => format!("{} {value:.4} after step {step}", self.name),
            None => format!("no finite {}", self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn best(metric: &str, patience: usize, threshold: f64) -> BestModel {
        BestModel {
            metric: metric.into(),
            patience,
            threshold,
            is_final: true,
            values: BTreeMap::new(),
            name: String::new(),
        }
    }

    /// Steps of the best evaluation and of the end, for values at the steps 0, 1, 2...
    fn run(mut best: BestModel, name: &str, values: &[f64]) -> (Option<u64>, Option<u64>) {
        let mut end = None;
        for (step, value) in (0..).zip(values) {
            best.add(step, &[("eval_tokens".into(), 5.0), (name.to_string(), *value)])
                .unwrap();
            if end.is_none() && best.is_over() {
                end = Some(step);
            }
        }
        (best.step(), end)
    }

    #[test]
    fn the_best_evaluation_and_the_end_are_those_of_transformers() {
        let loss = |patience, threshold, values: &[f64]| run(best("auto", patience, threshold), "eval_loss", values);
        // The model before the first step is not a result of the run.
        assert_eq!(loss(2, 0.0, &[0.1, 0.9, 0.5, 0.6, 0.4, 0.5, 0.45]), (Some(4), Some(6)));
        // An improvement below the threshold makes a better model, and does not prolong the run.
        assert_eq!(loss(2, 0.1, &[9.0, 0.9, 0.88, 0.86, 0.5]), (Some(4), Some(3)));
        assert_eq!(loss(0, 0.0, &[9.0, 0.9, 1.0, 1.1]), (Some(1), None));
        assert_eq!(loss(1, 0.0, &[9.0, f64::NAN, 1.0]), (Some(2), Some(1)));
        let accuracy = |name| run(best(name, 2, 0.0), "eval_accuracy", &[1.0, 0.2, 0.3, 0.3, 0.1]);
        assert_eq!(accuracy("eval_accuracy"), (Some(2), Some(4)));
        assert_eq!(accuracy("accuracy"), accuracy("eval_accuracy"));
        assert_eq!(
            run(best("auto", 1, 0.0), "eval_reward", &[0.0, 1.0, 2.0, 2.0]),
            (Some(2), Some(3))
        );
    }

    #[test]
    fn a_checkpoint_has_the_values_whose_lines_are_missing() {
        let loss = |best: &mut BestModel, step, value| best.add(step, &[("eval_loss".into(), value)]).unwrap();
        let mut before = best("auto", 3, 0.0);
        assert!(before.saved().is_null());
        let third = 1.0 / 3.0 + 1e-16;
        for (step, value) in [(10, third), (20, f64::NAN), (30, 0.25), (40, f64::INFINITY)] {
            loss(&mut before, step, value);
        }
        let text = before.saved().to_string();
        let saved: Value = serde_json::from_str(&text).unwrap();
        // As `metrics.jsonl` without the lines of the steps 20 and 30.
        let mut after = best("loss", 3, 0.0);
        loss(&mut after, 10, third);
        loss(&mut after, 40, f64::NAN);
        assert_eq!(after.state(), (Some((10, third)), 1));
        after.add_saved(&saved);
        assert_eq!(after.state(), (Some((30, 0.25)), 1));
        assert_eq!(after.saved().to_string(), text, "the next checkpoint has the same");
        let mut alone = best("auto", 0, 0.0);
        alone.add_saved(&saved);
        assert_eq!(alone.saved().to_string(), text);
        assert_eq!(alone.describe(), "eval_loss 0.2500 after step 30");
        // A line counts more than the checkpoint.
        let mut other = best("auto", 3, 0.0);
        loss(&mut other, 30, 0.5);
        other.add_saved(&saved);
        assert_eq!(other.state().0, Some((10, third)));
        // Values of another metric, and of a checkpoint without any.
        for (metric, saved) in [("accuracy", saved), ("auto", Value::Null)] {
            let mut other = best(metric, 3, 0.0);
            other.add_saved(&saved);
            assert_eq!(other.state(), (None, 0), "{metric}");
        }
    }

    #[test]
    fn an_unknown_number_is_named() {
        let e = best("eval_bleu", 1, 0.0)
            .add(0, &[("eval_loss".into(), 1.0)])
            .unwrap_err()
            .to_string();
        assert!(e.contains("eval_bleu") && e.contains("one of eval_loss"), "{e}");
    }
}
