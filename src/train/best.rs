//! Which evaluation of a run was the best, and when a run ends early. Works on numbers only.
//!
//! As `EarlyStoppingCallback` and `load_best_model_at_end` of transformers. The state is the evaluations in
//! `metrics.jsonl`, so a resumed run goes on with the same counts. A full disk may have kept a line out of that file: a checkpoint
//! has the values too.
//!
//! A full disk may also keep the model of an evaluation from being saved. Such an evaluation cannot become `final/`: the best one of
//! those whose model is saved does. Early stopping counts it as any other, because that measures the progress of the training.

use crate::base::{Error, Result};
use crate::recipe::{Auto, Train};
use crate::report;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
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
    /// Steps of evaluations whose model could not be saved.
    unsaved: BTreeSet<u64>,
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
            unsaved: BTreeSet::new(),
            name: String::new(),
        }
    }

    /// Adds the evaluations up to `last`, the step after which the run goes on, that a run directory has. Later ones are those of a
    /// run that was abandoned, whose lines could not be removed yet.
    pub fn replay(&mut self, run_dir: &Path, last: u64) {
        let all = report::evaluations(run_dir).into_iter();
        for (step, values) in all.filter(|(step, _)| *step <= last) {
            // A line of an evaluation that was interrupted may lack the metric; it is repeated.
            let _ = self.add(step, &values);
        }
    }

    /// The values so far, for the state in the checkpoint of `step`, and the other steps whose model could not be saved. The values
    /// are texts, because JSON has no number that is not finite; such a value is the same after a resume from `metrics.jsonl`.
    pub fn saved(&self, step: u64) -> Value {
        let unsaved: Vec<u64> = self.unsaved.iter().copied().filter(|other| *other != step).collect();
        if self.values.is_empty() && unsaved.is_empty() {
            return Value::Null;
        }
        let text = |value: f64| format!("{:?}", if value.is_finite() { value } else { f64::NAN });
        let values = self
            .values
            .iter()
            .map(|(step, value)| (step.to_string(), json!(text(*value))));
        let mut saved = json!({"metric": self.name, "values": values.collect::<Map<_, _>>()});
        if !unsaved.is_empty() {
            saved["unsaved"] = json!(unsaved);
        }
        saved
    }

    /// Adds the values in a checkpoint of `saved` for steps that `metrics.jsonl` does not have, if they are those of the same metric,
    /// and the steps whose model could not be saved. Checkpoints of earlier versions have none.
    pub fn add_saved(&mut self, saved: &Value) {
        // Another metric finds no checkpoint of these steps either.
        let unsaved = saved["unsaved"].as_array().into_iter().flatten();
        self.unsaved.extend(unsaved.filter_map(Value::as_u64));
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

    /// The model after `step` is saved, or is the one at the end of the run.
    pub fn set_saved(&mut self, step: u64) {
        self.unsaved.remove(&step);
    }

    /// Step and value of the best of the evaluations that count, and the number of these since one was better by the threshold.
    fn state_of(&self, counts: impl Fn(u64) -> bool) -> (Option<(u64, f64)>, usize) {
        let better = |new: f64, old: f64| if falls(&self.name) { new < old } else { new > old };
        let (mut best, mut waited) = (None, 0);
        for (&step, &value) in self.values.iter().filter(|(step, _)| counts(**step)) {
            let improved = best.map_or(value.is_finite(), |(_, old)| better(value, old));
            let by_threshold = best.is_none_or(|(_, old): (u64, f64)| (value - old).abs() > self.threshold);
            waited = if improved && by_threshold { 0 } else { waited + 1 };
            if improved {
                best = Some((step, value));
            }
        }
        (best, waited)
    }

    /// Step and value of the best of all evaluations, and the number of evaluations since one was better by the threshold.
    fn state(&self) -> (Option<(u64, f64)>, usize) {
        self.state_of(|_| true)
    }

    /// Step and value of the best evaluation, without those whose model could not be saved.
    fn best_saved(&self) -> Option<(u64, f64)> {
        self.state_of(|step| !self.unsaved.contains(&step)).0
    }

    /// Step of the evaluation whose model is needed at the end: the best one, without those whose model could not be saved. Another one
    /// takes its place only if its model is saved: the caller saves it, or calls `lose`.
    pub fn step(&self) -> Option<u64> {
        self.best_saved().filter(|_| self.is_final).map(|(step, _)| step)
    }

    /// True if the last evaluations did not get better.
    pub fn is_over(&self) -> bool {
        self.patience > 0 && self.state().1 >= self.patience
    }

    /// Of the best of all evaluations: `eval_loss 0.2314 after step 40`.
    pub fn describe(&self) -> String {
        self.named(self.state().0)
    }

    /// As `describe`, of the evaluation that `step()` names.
    pub fn describe_saved(&self) -> String {
        self.named(self.best_saved())
    }

    fn named(&self, evaluation: Option<(u64, f64)>) -> String {
        match evaluation {
            Some((step, value)) => format!("{} {value:.4} after step {step}", self.name),
            None => format!("no finite {}", self.name),
        }
    }

    /// The model after `step`, which is that of `step()`, could not be saved: the best one before it takes its place again. Returns the
    /// text of a warning.
    pub fn lose(&mut self, step: u64) -> String {
        let lost = self.describe_saved();
        self.unsaved.insert(step);
        let now = match self.best_saved() {
            Some(_) => format!("the best saved model stays the one with {}", self.describe_saved()),
            None => "no evaluation has a saved model yet".into(),
        };
        format!("the model with {lost} is not saved for `final/`. The run goes on, and {now}")
    }

    /// A warning if `final/` is not the model of the best evaluation, because that could not be saved. `last`: the last step.
    pub fn lost(&self, last: u64) -> Option<String> {
        let (best, saved) = (self.state().0?, self.best_saved());
        if !self.is_final || saved.is_some_and(|(step, _)| step == best.0) {
            return None;
        }
        let now = match saved {
            Some(_) => format!("the one with {}", self.describe_saved()),
            None => format!("the one after the last step, {last}"),
        };
        Some(format!(
            "the model of the best evaluation ({}) could not be saved: `final/` gets {now}",
            self.describe()
        ))
    }
}

/// For the fuzzer: what the checkpoint of `step` keeps after the evaluations in a run directory and what another checkpoint kept.
#[doc(hidden)]
pub fn best_again(train: &Train, run_dir: &Path, saved: &Value, step: u64) -> Value {
    let mut best = BestModel::new(train);
    best.replay(run_dir, u64::MAX);
    best.add_saved(saved);
    let kept = best.saved(step);
    best.is_over();
    best.lost(step);
    for _ in 0..4 {
        if let Some(last) = best.step() {
            best.lose(last);
        }
    }
    kept
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
            unsaved: BTreeSet::new(),
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
        assert!(before.saved(0).is_null());
        let third = 1.0 / 3.0 + 1e-16;
        for (step, value) in [(10, third), (20, f64::NAN), (30, 0.25), (40, f64::INFINITY)] {
            loss(&mut before, step, value);
        }
        let text = before.saved(40).to_string();
        let saved: Value = serde_json::from_str(&text).unwrap();
        // As `metrics.jsonl` without the lines of the steps 20 and 30.
        let mut after = best("loss", 3, 0.0);
        loss(&mut after, 10, third);
        loss(&mut after, 40, f64::NAN);
        assert_eq!(after.state(), (Some((10, third)), 1));
        after.add_saved(&saved);
        assert_eq!(after.state(), (Some((30, 0.25)), 1));
        assert_eq!(after.saved(40).to_string(), text, "the next checkpoint has the same");
        let mut alone = best("auto", 0, 0.0);
        alone.add_saved(&saved);
        assert_eq!(alone.saved(40).to_string(), text);
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

    /// Row C3.
    #[test]
    fn a_run_that_goes_on_has_no_evaluation_after_its_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let line = |step: u64| format!("{}\n", json!({"step": step, "eval_loss": 1.0 / step as f64}));
        let lines: String = (10..=100).step_by(10).map(line).collect();
        std::fs::write(dir.path().join("metrics.jsonl"), lines).unwrap();
        let mut resumed = best("auto", 3, 0.0);
        resumed.replay(dir.path(), 50);
        assert_eq!((resumed.values.len(), resumed.step()), (5, Some(50)));
        resumed.replay(dir.path(), 100);
        assert_eq!(resumed.step(), Some(100));
    }

    /// Evaluations after the steps 10, 20...
    fn evaluated(mut best: BestModel, values: &[f64]) -> BestModel {
        for (step, value) in (10..).step_by(10).zip(values) {
            best.add(step, &[("eval_loss".into(), *value)]).unwrap();
        }
        best
    }

    #[test]
    fn an_evaluation_without_a_saved_model_is_not_the_best_one_but_counts_for_the_end() {
        let mut all = evaluated(best("auto", 3, 0.0), &[0.5, 0.2]);
        assert_eq!((all.step(), all.lost(60)), (Some(20), None));
        assert_eq!(
            all.lose(20),
            "the model with eval_loss 0.2000 after step 20 is not saved for `final/`. The run goes on, and the best saved model \
             stays the one with eval_loss 0.5000 after step 10"
        );
        assert_eq!((all.step(), all.state()), (Some(10), (Some((20, 0.2)), 0)));
        // Not the best one of all, but better than what is saved.
        all.add(30, &[("eval_loss".into(), 0.4)]).unwrap();
        assert_eq!((all.step(), all.state().1), (Some(30), 1));
        all.add(40, &[("eval_loss".into(), 0.45)]).unwrap();
        assert!(all.step() == Some(30) && !all.is_over());
        all.add(50, &[("eval_loss".into(), 0.3)]).unwrap();
        assert!(
            all.step() == Some(50) && all.is_over(),
            "three without a better value than 0.2"
        );
        assert_eq!(all.describe(), "eval_loss 0.2000 after step 20");
        let lost = all.lost(60).unwrap();
        assert!(
            lost.contains("(eval_loss 0.2000 after step 20)") && lost.ends_with("with eval_loss 0.3000 after step 50"),
            "{lost}"
        );
        // A later save of the same step.
        all.set_saved(20);
        assert_eq!((all.step(), all.lost(60)), (Some(20), None));
        // Where the model of the best evaluation is not needed there is nothing to lose.
        let mut other = BestModel {
            is_final: false,
            ..evaluated(best("auto", 3, 0.0), &[0.5, 0.2])
        };
        other.unsaved.insert(20);
        assert_eq!((other.step(), other.lost(60)), (None, None));
    }

    #[test]
    fn without_any_saved_model_there_is_no_best_one() {
        let mut all = evaluated(best("auto", 0, 0.0), &[0.5]);
        assert!(all.lose(10).ends_with("no evaluation has a saved model yet"));
        assert_eq!(all.step(), None);
        assert!(all.lost(15).unwrap().ends_with("the one after the last step, 15"));
    }

    #[test]
    fn a_checkpoint_names_the_evaluations_without_a_saved_model() {
        let mut before = evaluated(best("auto", 2, 0.0), &[0.5, 0.2, 0.1]);
        assert!(before.saved(30).get("unsaved").is_none());
        before.unsaved.extend([20, 30]);
        assert_eq!(before.saved(35)["unsaved"], json!([20, 30]));
        // The checkpoint is that of this evaluation.
        let saved = before.saved(30);
        assert_eq!(saved["unsaved"], json!([20]));
        // As `metrics.jsonl` without the line of step 10.
        let mut after = best("auto", 2, 0.0);
        for (step, value) in [(20, 0.2), (30, 0.1)] {
            after.add(step, &[("eval_loss".into(), value)]).unwrap();
        }
        after.add_saved(&saved);
        assert_eq!((after.step(), after.state()), (Some(30), before.state()));
        after.lose(30);
        assert_eq!((after.step(), after.saved(40)), (Some(10), before.saved(40)));
        // Another metric, for which step 20 would be the best one.
        let mut other = best("accuracy", 0, 0.0);
        for (step, value) in [(10, 0.1), (20, 0.9), (30, 0.3)] {
            other.add(step, &[("eval_accuracy".into(), value)]).unwrap();
        }
        other.add_saved(&saved);
        assert_eq!(other.step(), Some(30));
        // A resume that needs no best model keeps the steps for one that does.
        let mut unused = BestModel {
            is_final: false,
            ..best("auto", 0, 0.0)
        };
        unused.add_saved(&saved);
        assert_eq!(unused.saved(40)["unsaved"], json!([20]));
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
