//! Lines and a progress bar on standard error. A terminal gets a bar that redraws; anything else gets plain
//! lines without carriage returns. Faults of standard error are ignored: a closed terminal ends no run.

use super::{EvalMetrics, StepMetrics};
use crate::base::units;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::Write;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How to write; `cli` decides, from flags, the environment and what standard error is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Style {
    /// A bar that redraws itself.
    pub bar: bool,
    pub color: bool,
    /// Box and arrow characters outside of ASCII.
    pub unicode: bool,
}

static STYLE: OnceLock<Style> = OnceLock::new();

/// Sets the style of the whole process; only the first call counts.
pub fn set_style(style: Style) {
    let _ = STYLE.set(style);
}

/// The style of the process; plain text where none was set.
pub fn style() -> Style {
    STYLE.get().copied().unwrap_or_default()
}

/// A warning outside of a run's progress.
pub fn warn(line: &str) {
    let label = if style().color {
        "\x1b[33mwarning:\x1b[0m"
    } else {
        "warning:"
    };
    let _ = writeln!(std::io::stderr(), "{label} {line}");
}

pub(super) struct Terminal {
    style: Style,
    bar: Option<ProgressBar>,
    total: u64,
    first: u64,
    started: Instant,
}

impl Terminal {
    pub(super) fn new(style: Style, total: u64, first: u64) -> Self {
        let bar = style.bar.then(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
            let filled = if style.unicode { "━╸ " } else { "=> " };
            if let Ok(look) = ProgressStyle::with_template("{bar:30} {pos}/{len}  {elapsed}  {msg}") {
                bar.set_style(look.progress_chars(filled));
            }
            bar.set_position(first);
            bar
        });
        Self {
            style,
            bar,
            total,
            first,
            started: Instant::now(),
        }
    }

    fn put(&self, text: &str) {
        let write = || {
            let _ = writeln!(std::io::stderr(), "{text}");
        };
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }

    fn paint(&self, code: &str, text: &str) -> String {
        match self.style.color {
            true => format!("\x1b[{code}m{text}\x1b[0m"),
            false => text.to_string(),
        }
    }

    pub(super) fn note(&self, line: &str) {
        self.put(line);
    }

    pub(super) fn warn(&self, line: &str) {
        self.put(&format!("{} {line}", self.paint("33", "warning:")));
    }

    pub(super) fn header(&self, lines: &[(&str, String)]) {
        for line in boxed(lines, self.style.unicode) {
            self.put(&line);
        }
    }

    /// `print` is given for a report line, with the loss of the line before.
    pub(super) fn step(&self, m: &StepMetrics, print: Option<Option<f64>>) {
        let eta = self.eta(m.step);
        if let Some(bar) = &self.bar {
            bar.set_position(m.step);
            bar.set_message(format!("loss {:.4}  eta {}", m.loss, units::duration(eta)));
        }
        if let Some(before) = print {
            self.put(&step_line(m, before, self.total, eta, self.style.unicode));
        }
    }

    pub(super) fn eval(&self, m: &EvalMetrics) {
        let mut line = format!("eval  step {}  loss {:.4}", m.step, m.eval_loss);
        // Stages that compare answers say how often they are right; theirs is no loss of tokens.
        let mut shown = m
            .more
            .iter()
            .filter(|(n, _)| n.contains("accurac") || n.contains("margin"))
            .peekable();
        if shown.peek().is_none() {
            line.push_str(&format!("  perplexity {:.3}", m.eval_perplexity));
        }
        shown.for_each(|(name, value)| line.push_str(&format!("  {name} {value:.4}")));
        line.push_str(&format!("  {} tokens", units::count(m.eval_tokens)));
        if let Some(a) = m.eval_accuracy {
            line.push_str(&format!("  accuracy {:.1} %", a * 100.0));
        }
        self.put(&self.paint("36", &line));
    }

    pub(super) fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// From the mean time of a step in this process.
    fn eta(&self, step: u64) -> Duration {
        let done = step.saturating_sub(self.first).max(1);
        let left = self.total.saturating_sub(step);
        // A run "without end" has more seconds than a `Duration` holds.
        let seconds = self.started.elapsed().as_secs_f64() / done as f64 * left as f64;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

fn step_line(m: &StepMetrics, before: Option<f64>, total: u64, eta: Duration, unicode: bool) -> String {
    let arrow = match before {
        Some(b) if m.loss < b && unicode => "▼",
        Some(b) if m.loss > b && unicode => "▲",
        Some(b) if m.loss < b => "v",
        Some(b) if m.loss > b => "^",
        _ => " ",
    };
    let width = total.to_string().len();
    let mut line = format!(
        "step {:>width$}/{total}  loss {:.4} {arrow}  grad {:.3}  lr {:<7}  {:>6} tok/s  {}  eta {}",
        m.step,
        m.loss,
        m.grad_norm,
        units::rate(m.learning_rate),
        units::count(m.tokens_per_second.round() as u64),
        units::bytes(m.peak_memory_bytes),
        units::duration(eta),
    );
    for (name, value) in m.more.iter().filter(|(n, _)| ["reward", "kl"].contains(n)) {
        line.push_str(&format!("  {name} {value:.3}"));
    }
    if let Some(block) = &m.active_block {
        line.push_str(&format!("  {block}"));
    }
    line
}

fn boxed(lines: &[(&str, String)], unicode: bool) -> Vec<String> {
    let names = lines.iter().map(|(n, _)| n.chars().count()).max().unwrap_or(0);
    let rows: Vec<String> = lines.iter().map(|(n, v)| format!("{n:<names$}  {v}")).collect();
    let width = rows.iter().map(|r| r.chars().count()).max().unwrap_or(0);
    let [tl, tr, bl, br, h, v] = if unicode {
        ["┌", "┐", "└", "┘", "─", "│"]
    } else {
        ["+", "+", "+", "+", "-", "|"]
    };
    let mut out = vec![format!("{tl}{}{tr}", h.repeat(width + 2))];
    out.extend(rows.iter().map(|r| format!("{v} {r:<width$} {v}")));
    out.push(format!("{bl}{}{br}", h.repeat(width + 2)));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_line_tells_all() {
        let m = StepMetrics {
            step: 7,
            loss: 2.5,
            grad_norm: 1.25,
            learning_rate: 1e-5,
            tokens_per_second: 1234.4,
            peak_memory_bytes: 3 << 30,
            active_block: Some("layers.3".into()),
            ..Default::default()
        };
        let line = step_line(&m, Some(2.6), 120, Duration::from_secs(65), false);
        assert_eq!(
            line,
            "step   7/120  loss 2.5000 v  grad 1.250  lr 1e-5      1,234 tok/s  3.0 GiB  eta 1m 05s  layers.3"
        );
        assert!(step_line(&m, Some(2.4), 9, Duration::ZERO, true).contains("2.5000 ▲"));
    }

    #[test]
    fn a_run_without_end_has_an_end_in_sight() {
        let mut terminal = Terminal::new(Style::default(), u64::MAX, 0);
        terminal.started -= Duration::from_secs(100);
        assert_eq!(terminal.eta(1), Duration::MAX);
        assert!(terminal.eta(u64::MAX - 2) < Duration::from_secs(1));
    }

    #[test]
    fn the_box_is_straight() {
        let rows = boxed(&[("model", "größe".into()), ("output", "runs/x".into())], true);
        assert_eq!(rows.len(), 4);
        assert!(rows.iter().all(|r| r.chars().count() == rows[0].chars().count()));
        assert_eq!(boxed(&[("a", "b".into())], false), ["+------+", "| a  b |", "+------+"]);
    }
}
