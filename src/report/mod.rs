//! The output of a run: metrics (also for TensorBoard), events and environment as files; progress and report lines on the terminal.
//! Handles numbers and texts only. Never blocks or fails a step: a file that cannot be written gives one warning,
//! and its lines wait until it can be.

mod environment;
mod fullscreen;
mod layout;
mod log;
mod screen;
mod terminal;

pub use environment::{Cpu, cpu, environment, write_environment};
pub use fullscreen::FullScreen;
pub use layout::{ascii, columns, visible, visible_but_colors, with_note, wrapped};
pub use log::{copy_until, evaluations};
pub use screen::{
    OutputStyle, above, aside, ask, bug, clear, error, final_line, note, result_is_terminal, result_width, start,
    style, warn, width,
};

use crate::history;
use log::{LogFile, Removal};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use terminal::Terminal;

/// Metrics of one optimizer step, with the names of `metrics.jsonl`.
#[derive(Debug, Clone, Default)]
pub struct StepMetrics {
    pub step: u64,
    pub epoch: f64,
    /// Mean over the trained tokens of the window, before the update.
    pub loss: f64,
    pub learning_rate: f64,
    /// Before clipping.
    pub grad_norm: f64,
    pub tokens_per_second: f64,
    /// Since the start of the run, including all resumes.
    pub trained_tokens: u64,
    pub peak_memory_bytes: u64,
    pub active_block: Option<String>,
    /// Other metrics of the stage.
    pub more: Vec<(&'static str, f64)>,
}

#[derive(Debug, Clone, Default)]
pub struct EvalMetrics {
    pub step: u64,
    pub eval_loss: f64,
    /// `None`: the loss is not the mean cross-entropy of tokens.
    pub eval_perplexity: Option<f64>,
    pub eval_tokens: u64,
    /// Fraction of the rows with an answer that were answered exactly.
    pub eval_accuracy: Option<f64>,
    /// Other metrics of the stage; the names get the prefix `eval_`.
    pub more: Vec<(&'static str, f64)>,
}

impl EvalMetrics {
    /// The numbers that can say which model is better, by their names in `metrics.jsonl`.
    pub fn numbers(&self) -> Vec<(String, f64)> {
        let perplexity = self.eval_perplexity.map(|perplexity| ("perplexity", perplexity));
        let accuracy = self.eval_accuracy.map(|accuracy| ("accuracy", accuracy));
        let named = [("loss", self.eval_loss)].into_iter().chain(perplexity).chain(accuracy);
        let all = named.chain(self.more.iter().copied());
        all.map(|(name, value)| (format!("eval_{name}"), value)).collect()
    }
}

/// Writes `metrics.jsonl` and `events.jsonl` of one run directory, and lines to the terminal.
pub struct Reporter {
    metrics: LogFile,
    events: LogFile,
    /// Opened with the first sample.
    samples: Option<LogFile>,
    /// The event file of TensorBoard.
    board: Option<LogFile>,
    dir: PathBuf,
    terminal: Terminal,
    /// Mean loss of the last printed line.
    last_loss: Option<f64>,
    /// Losses since that line.
    losses: Vec<f64>,
}

impl Reporter {
    /// `total_steps`: length of the whole run; `resumed_from`: step of the checkpoint, 0 for a new run. Removes lines
    /// of `metrics.jsonl` and `samples.jsonl` after that step, and incomplete lines: the run will write them again.
    pub fn new(dir: &Path, total_steps: u64, resumed_from: u64) -> Self {
        let later = Removal::After(resumed_from);
        let samples = dir.join(log::SAMPLES);
        let samples = samples.exists().then(|| LogFile::open_without(&samples, later));
        let mut reporter = Self {
            metrics: LogFile::open_without(&dir.join(log::METRICS), later),
            events: LogFile::open_without(&dir.join(log::EVENTS), Removal::Torn),
            // Lines that could not be removed have to go before the first sample.
            samples: samples.filter(LogFile::is_failing),
            board: None,
            dir: dir.to_path_buf(),
            terminal: Terminal::new(total_steps, resumed_from),
            last_loss: None,
            losses: Vec::new(),
        };
        reporter.complain();
        reporter
    }

    /// Writes and prints nothing: for a rank that is not the first.
    pub fn silent(dir: &Path, total_steps: u64) -> Self {
        Self {
            metrics: LogFile::none(),
            events: LogFile::none(),
            samples: Some(LogFile::none()),
            board: None,
            dir: dir.to_path_buf(),
            terminal: Terminal::new(total_steps, 0),
            last_loss: None,
            losses: Vec::new(),
        }
    }

    /// With `wanted`: writes the metrics to an event file of TensorBoard too, with those that are there already.
    pub fn with_event_file(mut self, wanted: bool) -> Self {
        self.board = wanted.then(|| LogFile::event_file(&self.dir));
        self.update_board(None, true);
        self.complain();
        self
    }

    /// Writes a line of metrics.
    fn metrics(&mut self, line: Map<String, Value>) {
        let record = self.board.is_some().then(|| history::event(&line));
        self.metrics.line(&Value::Object(line));
        self.update_board(record, false);
    }

    /// Adds the record of the last line of the metrics to the event file. If there is no event file, or if lines of the metrics were
    /// removed, it is written with all lines of the metrics. `now`: as for `LogFile::create`.
    fn update_board(&mut self, record: Option<Vec<u8>>, now: bool) {
        let Some(board) = &mut self.board else { return };
        if self.metrics.take_removed() {
            board.renew();
        }
        // Without the file the record is dropped: `create` finds its line in the metrics.
        if let Some(record) = record {
            board.bytes(record);
        }
        board.create(&self.metrics, now);
    }

    /// Prints the box at the start, with names and values.
    pub fn header(&mut self, lines: &[(&str, String)]) {
        self.terminal.header(lines);
    }

    /// Writes one line of metrics. With `print` also a line on the terminal; its loss is the mean since the last
    /// printed line.
    pub fn step(&mut self, m: &StepMetrics, print: bool) {
        let line = json!({
            "step": m.step,
            "epoch": m.epoch,
            "loss": m.loss,
            "learning_rate": m.learning_rate,
            "grad_norm": m.grad_norm,
            "tokens_per_second": m.tokens_per_second,
            "trained_tokens": m.trained_tokens,
            "peak_memory_bytes": m.peak_memory_bytes,
            "active_block": m.active_block,
            "time": log::unix_time(),
        });
        let mut line = match line {
            Value::Object(line) => line,
            _ => Map::new(),
        };
        line.extend(m.more.iter().map(|(name, value)| (name.to_string(), json!(value))));
        self.metrics(line);
        self.losses.push(m.loss);
        if print {
            // Rounds as printed: equal texts must not show a change.
            let mean = self.losses.iter().sum::<f64>() / self.losses.len() as f64;
            let loss = (mean * 1e4).round() / 1e4;
            let shown = StepMetrics { loss, ..m.clone() };
            self.terminal.step(&shown);
            self.terminal.report_line(&shown, self.last_loss);
            self.last_loss = Some(loss);
            self.losses.clear();
        } else {
            self.terminal.step(m);
        }
        self.complain();
    }

    pub fn eval(&mut self, m: &EvalMetrics) {
        let mut line = Map::new();
        line.insert("step".into(), json!(m.step));
        line.insert("eval_loss".into(), json!(m.eval_loss));
        if let Some(perplexity) = m.eval_perplexity {
            line.insert("eval_perplexity".into(), json!(perplexity));
        }
        line.insert("eval_tokens".into(), json!(m.eval_tokens));
        if let Some(accuracy) = m.eval_accuracy {
            line.insert("eval_accuracy".into(), json!(accuracy));
        }
        line.insert("time".into(), json!(log::unix_time()));
        for (name, value) in &m.more {
            line.insert(format!("eval_{name}"), json!(value));
        }
        self.metrics(line);
        self.terminal.eval(m);
        self.complain();
    }

    /// Writes an event. `kind`: start, resume, switch, save, warning, stop. `fields` is an object; the unix time is
    /// added.
    pub fn event(&mut self, kind: &str, fields: Value) {
        let mut line = Map::new();
        line.insert("time".into(), json!(log::unix_time()));
        line.insert("event".into(), json!(kind));
        match fields {
            Value::Object(more) => line.extend(more),
            Value::Null => {}
            other => {
                line.insert("value".into(), other);
            }
        }
        self.events.line(&Value::Object(line));
        self.complain();
    }

    /// Writes measurements of a stage on held-out rows without a loss; the names get the prefix `eval_`.
    pub fn measured(&mut self, step: u64, values: &[(&'static str, f64)]) {
        let mut line = Map::new();
        line.insert("step".into(), json!(step));
        line.insert("time".into(), json!(log::unix_time()));
        let mut text = format!("eval  step {step}");
        for (name, value) in values {
            line.insert(format!("eval_{name}"), json!(value));
            text.push_str(&format!("  {name} {value:.4}"));
        }
        self.metrics(line);
        self.terminal.note(&text);
        self.complain();
    }

    /// Writes a line of `samples.jsonl`: text that the model generated during the run.
    pub fn sample(&mut self, sample: &Value) {
        let path = self.dir.join(log::SAMPLES);
        self.samples.get_or_insert_with(|| LogFile::open(&path)).line(sample);
        self.complain();
    }

    /// True if `samples.jsonl` has a line of `step` with these texts as `when` and `prompt`: a resumed run may have written it.
    pub fn has_sample(&self, step: u64, when: &str, prompt: &str) -> bool {
        let stays = self.samples.as_ref().is_none_or(|log| log.keeps(step, &Value::Null));
        stays && log::has_sample(&self.dir, step, when, prompt)
    }

    /// True if `metrics.jsonl` has a complete line of `step` with a key that starts with `key`, which is not to be removed: a run that
    /// goes on from this step may have been stopped after its evaluation. Lines that wait for the disk do not count.
    pub fn has_evaluation(&self, step: u64, key: &str) -> bool {
        self.metrics.has_evaluation(step, key)
    }

    /// Removes the lines of an evaluation that is repeated.
    pub fn drop_evaluation(&mut self, step: u64) {
        self.metrics.drop_evaluation(step);
        self.update_board(None, true);
        self.complain();
    }

    /// Syncs the lines to the disk.
    pub fn sync(&mut self) {
        for log in [&mut self.metrics, &mut self.events]
            .into_iter()
            .chain(&mut self.samples)
            .chain(&mut self.board)
        {
            log.sync();
        }
        self.update_board(None, true);
        self.complain();
    }

    /// Prints a line above the progress bar.
    pub fn note(&mut self, line: &str) {
        self.terminal.note(line);
    }

    /// Prints a warning and writes it to `events.jsonl`.
    pub fn warn(&mut self, line: &str) {
        self.terminal.warn(line);
        self.event("warning", json!({ "message": line }));
    }

    /// Marks the start of the first step.
    pub fn begin(&mut self) {
        self.terminal.begin();
    }

    /// Marks the end of the run: removes the progress line.
    pub fn finish(&mut self) {
        self.terminal.finish();
    }

    fn complain(&mut self) {
        for log in [&mut self.metrics, &mut self.events]
            .into_iter()
            .chain(&mut self.samples)
            .chain(&mut self.board)
        {
            if let Some(note) = log.take_note() {
                self.terminal.note(&note);
            }
            if let Some(warning) = log.take_warning() {
                self.terminal.warn(&warning);
            }
            if let Some(fault) = log.take_fault() {
                self.terminal.warn(&format!(
                    "the run continues, and writes the lines of this file when that is possible again: {fault}"
                ));
            }
        }
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        // The last try: the lines may be those of the end of the run.
        for log in [&mut self.metrics, &mut self.events]
            .into_iter()
            .chain(&mut self.samples)
            .chain(&mut self.board)
            .filter(|log| log.is_failing())
        {
            log.last_try();
        }
        self.update_board(None, true);
        self.complain();
        self.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::files;

    fn step(step: u64, loss: f64) -> StepMetrics {
        StepMetrics {
            step,
            loss,
            ..Default::default()
        }
    }

    fn lines(dir: &Path, name: &str) -> Vec<Value> {
        let text = files::read_text(&dir.join(name)).unwrap();
        text.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
    }

    #[test]
    fn metrics_have_the_promised_fields_in_full_precision() {
        let dir = tempfile::tempdir().unwrap();
        let mut r = Reporter::new(dir.path(), 3, 0);
        let loss = 1.0 / 3.0 + 1e-16;
        r.header(&[("model", "tiny".into())]);
        r.step(
            &StepMetrics {
                active_block: Some("layers.1".into()),
                ..step(1, loss)
            },
            true,
        );
        r.step(&step(2, f64::NAN), false);
        let eval = EvalMetrics {
            step: 2,
            eval_loss: 0.5,
            eval_accuracy: Some(1.0),
            ..Default::default()
        };
        r.eval(&eval);
        let with_perplexity = EvalMetrics {
            eval_perplexity: Some(1.5),
            ..eval.clone()
        };
        r.eval(&with_perplexity);
        r.event("stop", json!({ "reason": "finished" }));
        r.finish();
        let lines = lines(dir.path(), "metrics.jsonl");
        let names: Vec<&String> = lines[0].as_object().unwrap().keys().collect();
        assert_eq!(
            names,
            [
                "step",
                "epoch",
                "loss",
                "learning_rate",
                "grad_norm",
                "tokens_per_second",
                "trained_tokens",
                "peak_memory_bytes",
                "active_block",
                "time"
            ]
        );
        assert_eq!(lines[0]["loss"].as_f64().unwrap().to_bits(), loss.to_bits());
        assert_eq!(lines[0]["active_block"], "layers.1");
        assert!(lines[1]["loss"].is_null() && lines[1]["active_block"].is_null());
        assert_eq!(lines[2]["eval_accuracy"], 1.0);
        assert!(lines[2].get("eval_perplexity").is_none());
        assert_eq!(lines[3]["eval_perplexity"], 1.5);
        let names = |m: &EvalMetrics| m.numbers().into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names(&eval), ["eval_loss", "eval_accuracy"]);
        assert_eq!(
            names(&with_perplexity),
            ["eval_loss", "eval_perplexity", "eval_accuracy"]
        );
        let events = super::tests::lines(dir.path(), "events.jsonl");
        assert_eq!(events[0]["event"], "stop");
        assert!(events[0]["time"].as_f64().unwrap() > 1.7e9);
    }

    #[test]
    fn a_resumed_run_leaves_no_line_twice() {
        let dir = tempfile::tempdir().unwrap();
        let mut r = Reporter::new(dir.path(), 6, 0);
        for s in 1..=5 {
            r.step(&step(s, s as f64), false);
            r.eval(&EvalMetrics {
                step: s,
                ..Default::default()
            });
        }
        drop(r);
        // The process was killed while it wrote a line.
        let path = dir.path().join("metrics.jsonl");
        let mut text = files::read_text(&path).unwrap();
        text.push_str("{\"step\": 3, \"lo");
        files::write_atomic(&path, text.as_bytes()).unwrap();
        let mut r = Reporter::new(dir.path(), 6, 3);
        r.step(&step(4, 4.0), false);
        r.drop_evaluation(3);
        assert!(r.has_evaluation(2, "eval_loss") && !r.has_evaluation(3, "eval_"));
        r.sync();
        drop(r);
        let steps: Vec<u64> = lines(dir.path(), "metrics.jsonl")
            .iter()
            .filter(|l| l.get("loss").is_some())
            .map(|l| l["step"].as_u64().unwrap())
            .collect();
        assert_eq!(steps, [1, 2, 3, 4]);
        drop(Reporter::new(dir.path(), 6, 0));
        assert!(lines(dir.path(), "metrics.jsonl").is_empty());
    }

    /// Step and scalars of each record of the event file in `dir`. Those before it have none.
    pub(super) fn records(dir: &Path) -> Vec<(u64, Vec<(String, f32)>)> {
        let mut found = files::list(dir).unwrap();
        found.retain(|path| history::is_event_file(path.file_name().unwrap().to_str().unwrap()));
        let mut all = found
            .iter()
            .map(|path| history::read_events(&files::read(path).unwrap()));
        let events = all.next_back().unwrap();
        assert!(all.all(|before| before.len() == 1), "the files before it have a header");
        assert!(events.len() >= 2 && events.iter().all(|(time, ..)| *time > 1.7e9));
        events
            .into_iter()
            .skip(2)
            .map(|(_, step, values)| (step, values))
            .collect()
    }

    #[test]
    fn an_event_file_has_the_lines_of_the_metrics() {
        let dir = tempfile::tempdir().unwrap();
        let mut r = Reporter::new(dir.path(), 6, 0).with_event_file(true);
        for s in 1..=5 {
            r.step(&step(s, s as f64), false);
            // While the run goes on.
            assert_eq!(records(dir.path()).last().unwrap().0, s);
        }
        let eval = EvalMetrics {
            step: 5,
            eval_loss: 0.5,
            more: vec![("reward", 2.0)],
            ..Default::default()
        };
        r.eval(&eval);
        let last = records(dir.path()).pop().unwrap();
        assert!(last.1.contains(&("eval/loss".into(), 0.5)) && last.1.contains(&("eval/reward".into(), 2.0)));
        r.measured(5, &[("kl", 0.25)]);
        assert_eq!(records(dir.path()).pop().unwrap(), (5, vec![("eval/kl".into(), 0.25)]));
        // A kill with a record and a line that are not whole, and a resume after step 3, with an evaluation there.
        let half = |name: &str, bytes: &[u8]| {
            let mut file = files::AppendFile::open(&dir.path().join(name)).unwrap();
            file.write(bytes).unwrap();
        };
        r.eval(&EvalMetrics { step: 3, ..eval });
        drop(r);
        half("metrics.jsonl", b"{\"step\": 3, \"lo");
        let before: Vec<_> = files::list(dir.path()).unwrap();
        let before = before
            .iter()
            .find(|p| p.to_str().unwrap().contains("tfevents"))
            .unwrap();
        half(before.file_name().unwrap().to_str().unwrap(), &[9, 0, 0]);
        let mut r = Reporter::new(dir.path(), 6, 3).with_event_file(true);
        assert!(before.exists(), "a reader that has it open looks for it once more");
        let steps = || records(dir.path()).iter().map(|(s, _)| *s).collect::<Vec<_>>();
        assert_eq!(steps(), [1, 2, 3, 3]);
        r.drop_evaluation(3);
        r.step(&step(4, 4.0), false);
        assert_eq!(steps(), [1, 2, 3, 4]);
        drop(r);
        // A new start has nothing of it.
        drop(Reporter::new(dir.path(), 6, 0).with_event_file(true));
        assert!(records(dir.path()).is_empty());
    }

    #[test]
    fn samples_of_later_steps_go_too() {
        let dir = tempfile::tempdir().unwrap();
        let sample = |r: &mut Reporter, s: u64| r.sample(&json!({"step": s, "completion": "a"}));
        let mut r = Reporter::new(dir.path(), 6, 0);
        (1..=5).for_each(|s| sample(&mut r, s));
        drop(r);
        let mut r = Reporter::new(dir.path(), 6, 3);
        sample(&mut r, 4);
        drop(r);
        let steps = lines(dir.path(), "samples.jsonl");
        assert_eq!(
            steps.iter().map(|l| l["step"].as_u64().unwrap()).collect::<Vec<_>>(),
            [1, 2, 3, 4]
        );
        drop(Reporter::new(dir.path(), 6, 0));
        assert!(lines(dir.path(), "samples.jsonl").is_empty());
    }

    #[test]
    fn an_unwritable_directory_fails_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let gone = dir.path().join("gone");
        let mut r = Reporter::new(&gone, 1, 0);
        r.step(&step(1, 1.0), true);
        r.event("save", Value::Null);
        assert!(r.metrics.take_fault().is_none(), "the fault is reported once only");
        assert!(!gone.exists());
    }

    #[test]
    fn the_environment_says_where_the_run_was() {
        let dir = tempfile::tempdir().unwrap();
        write_environment(dir.path(), "avx2").unwrap();
        let text = files::read_text(&dir.path().join("environment.json")).unwrap();
        let e: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(e["version"], env!("CARGO_PKG_VERSION"));
        assert!(e["threads"].as_u64().unwrap() >= 1);
        assert!(e["cpu"]["name"].is_string() && e["os"].is_string() && e["build"]["features"].is_array());
    }

    #[test]
    fn a_run_that_goes_on_elsewhere_has_the_lines_before() {
        let (old, new) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let metrics = "{\"step\":1,\"loss\":2.0}\n{\"step\":1,\"eval_loss\":null,\"eval_tokens\":7}\n{\"step\":2,\"loss\":1.0}\n\
                       {\"step\":3,\"loss\":1.0}\n{\"st";
        std::fs::write(old.path().join(log::METRICS), metrics).unwrap();
        copy_until(old.path(), new.path(), 2).unwrap();
        let copied = lines(new.path(), log::METRICS);
        assert_eq!(copied.len(), 3);
        assert!(!new.path().join(log::SAMPLES).exists());
        // An evaluation that is not finite is one, too: `early_stopping_patience` counts it.
        let (step, numbers) = &evaluations(new.path())[0];
        assert_eq!((*step, numbers.len()), (1, 2));
        assert!(
            numbers.iter().any(|(name, x)| name == "eval_loss" && x.is_nan()),
            "{numbers:?}"
        );
    }
}
