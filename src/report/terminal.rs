//! Terminal lines of a training run: the box at its start, the report lines, and the progress.

use super::layout::{boxed, columns, fit};
use super::screen::{self, style};
use super::{EvalMetrics, StepMetrics};
use crate::base::progress::{self, Phase};
use crate::base::units;
use std::time::{Duration, Instant};

pub(super) struct Terminal {
    phase: Option<Phase>,
    total: u64,
    first: u64,
    started: Instant,
}

impl Terminal {
    pub(super) fn new(total: u64, first: u64) -> Self {
        let phase = progress::phase("training", usize::try_from(total).unwrap_or(0), "steps");
        phase.set(first);
        Self {
            phase: Some(phase),
            total,
            first,
            started: Instant::now(),
        }
    }

    pub(super) fn note(&self, line: &str) {
        screen::note(line);
    }

    pub(super) fn warn(&self, line: &str) {
        screen::warn(line);
    }

    pub(super) fn header(&self, lines: &[(&str, String)]) {
        // The lines are wrapped already, so they are printed unchanged.
        for line in boxed(lines, style().unicode, screen::width()) {
            screen::note(&line);
        }
    }

    /// Marks the start of the first step: earlier time does not count in the estimate of the remaining time.
    pub(super) fn begin(&mut self) {
        self.started = Instant::now();
    }

    /// Updates the progress.
    pub(super) fn step(&self, m: &StepMetrics) {
        if let Some(phase) = &self.phase {
            phase.set(m.step);
            phase.note(format!(
                "loss {:.4}  eta {}",
                unsigned_zero(m.loss),
                units::duration(self.eta(m.step))
            ));
        }
    }

    /// Prints the report line of a step. `before`: the loss of the previous line.
    pub(super) fn report_line(&self, m: &StepMetrics, before: Option<f64>) {
        let eta = self.eta(m.step);
        let line = step_line(m, before, self.total, eta, style().unicode, screen::width());
        screen::note(&line);
    }

    pub(super) fn eval(&self, m: &EvalMetrics) {
        let mut line = format!("eval  step {}  loss {:.4}", m.step, m.eval_loss);
        if let Some(perplexity) = m.eval_perplexity {
            line.push_str(&format!("  perplexity {perplexity:.3}"));
        }
        // Stages that compare answers show how often they are right.
        for (name, value) in &m.more {
            if name.contains("accurac") || name.contains("margin") {
                line.push_str(&format!("  {name} {value:.4}"));
            }
        }
        line.push_str(&format!("  {} tokens", units::count(m.eval_tokens)));
        if let Some(a) = m.eval_accuracy {
            line.push_str(&format!("  accuracy {:.1} %", a * 100.0));
        }
        screen::colored("36", &line);
    }

    pub(super) fn finish(&mut self) {
        if self.phase.take().is_some() {
            screen::clear();
        }
    }

    /// Estimates the remaining time from the mean step time in this process.
    fn eta(&self, step: u64) -> Duration {
        let done = step.saturating_sub(self.first).max(1);
        let left = self.total.saturating_sub(step);
        // The seconds of a run "without end" overflow a `Duration`.
        let seconds = self.started.elapsed().as_secs_f64() / done as f64 * left as f64;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

/// The number, without the sign of one that is shown as `-0.0000`.
fn unsigned_zero(x: f64) -> f64 {
    if x.abs() < 5e-5 { 0.0 } else { x }
}

/// Formats a report line. On a terminal of `width` columns only the parts that fit on one line are used; the selection
/// is the same for all lines of a run.
fn step_line(
    m: &StepMetrics,
    before: Option<f64>,
    total: u64,
    eta: Duration,
    unicode: bool,
    width: Option<usize>,
) -> String {
    let arrow = match before {
        Some(b) if m.loss < b && unicode => "▼",
        Some(b) if m.loss > b && unicode => "▲",
        Some(b) if m.loss < b => "v",
        Some(b) if m.loss > b => "^",
        _ => " ",
    };
    let digits = total.to_string().len();
    // Text, reserved columns in this run, and rank: parts with a high rank are dropped first.
    let mut parts = vec![
        (format!("step {:>digits$}/{total}", m.step), 0, 0),
        (format!("loss {:.4} {arrow}", unsigned_zero(m.loss)), 13, 0),
        (format!("grad {:.3}", m.grad_norm), 10, 4),
        (format!("lr {:<7}", units::rate(m.learning_rate)), 10, 3),
        (
            format!("{:>6} tok/s", units::count(m.tokens_per_second.round() as u64)),
            12,
            2,
        ),
        (units::bytes(m.peak_memory_bytes), 9, 5),
        (format!("eta {}", units::duration(eta)), 11, 1),
    ];
    for (name, value) in m.more.iter().filter(|(n, _)| ["reward", "kl"].contains(n)) {
        parts.push((format!("{name} {value:.3}"), name.len() + 7, 1));
    }
    // The largest load of an expert, relative to an even one.
    if let Some((_, load)) = m.more.iter().find(|(n, _)| *n == "router_max_load") {
        parts.push((format!("load {load:.2}"), 9, 5));
    }
    if let Some(block) = &m.active_block {
        parts.push((block.clone(), columns(block), 6));
    }
    let shown = fit(&parts, width.unwrap_or(usize::MAX / 2));
    shown.join("  ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics() -> StepMetrics {
        StepMetrics {
            step: 7,
            loss: 2.5,
            grad_norm: 1.25,
            learning_rate: 1e-5,
            tokens_per_second: 1234.4,
            peak_memory_bytes: 3 << 30,
            active_block: Some("layers.3".into()),
            ..Default::default()
        }
    }

    #[test]
    fn a_report_line_tells_all() {
        let m = metrics();
        let line = step_line(&m, Some(2.6), 120, Duration::from_secs(65), false, None);
        assert_eq!(
            line,
            "step   7/120  loss 2.5000 v  grad 1.250  lr 1e-5      1,234 tok/s  3.0 GiB  eta 1m 05s  layers.3"
        );
        assert!(step_line(&m, Some(2.4), 9, Duration::ZERO, true, None).contains("2.5000 ▲"));
        let nearly = StepMetrics {
            loss: -1e-9,
            ..m.clone()
        };
        assert!(step_line(&nearly, None, 9, Duration::ZERO, true, None).contains("loss 0.0000"));
        let experts = StepMetrics {
            more: vec![("router_entropy", 1.0), ("router_max_load", 1.5)],
            ..m
        };
        assert!(step_line(&experts, None, 9, Duration::ZERO, true, None).contains("load 1.50  layers.3"));
    }

    #[test]
    fn a_report_line_fits_the_terminal() {
        let mut m = metrics();
        for width in [60, 80, 100] {
            let mut names = Vec::new();
            for (loss, speed, eta) in [(0.5, 7.0, 1), (9.5, 99_456.0, 3599), (1.0, 1e3, 359_000)] {
                (m.loss, m.tokens_per_second) = (loss, speed);
                let line = step_line(&m, Some(2.0), 1000, Duration::from_secs(eta), true, Some(width));
                assert!(columns(&line) <= width, "{line}");
                let words: Vec<bool> = ["grad ", "lr ", "tok/s", "iB", "eta ", "layers"]
                    .map(|w| line.contains(w))
                    .to_vec();
                names.push(words);
            }
            assert!(
                names.windows(2).all(|w| w[0] == w[1]),
                "{width}: the same parts in every line"
            );
            assert!(names[0][4], "{width}: the time that is left is shown");
        }
        let line = step_line(&m, None, 1000, Duration::ZERO, true, Some(80));
        assert!(
            line.contains("grad ") && line.contains("lr ") && line.contains("tok/s"),
            "{line}"
        );
    }

    #[test]
    fn a_run_without_end_has_an_end_in_sight() {
        let mut terminal = Terminal::new(u64::MAX, 0);
        terminal.started -= Duration::from_secs(100);
        assert_eq!(terminal.eta(1), Duration::MAX);
        assert!(terminal.eta(u64::MAX - 2) < Duration::from_secs(1));
    }
}
