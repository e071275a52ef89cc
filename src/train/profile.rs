//! A profile of some steps: a table of the work by its time, and a trace for Perfetto or `chrome://tracing`.

use crate::base::{Result, files};
use crate::report::Reporter;
use crate::trace::{self, Span};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// The trace in the run directory.
pub const TRACE: &str = "trace.json";

/// Lines of the table.
const LINES: usize = 24;

/// The steps to record, and the recording.
pub struct Profile<'a> {
    run_dir: &'a Path,
    /// The first and the last step; `None`: no profile.
    steps: Option<(u64, u64)>,
    recording: bool,
    recorded: bool,
}

impl<'a> Profile<'a> {
    /// Records `steps` steps (0: none) after the first one after `start`: the first one allocates memory and opens files.
    pub fn new(run_dir: &'a Path, start: u64, steps: u64) -> Self {
        Self {
            run_dir,
            steps: (steps > 0).then_some((start + 2, start + 1 + steps)),
            recording: false,
            recorded: false,
        }
    }

    /// Before step `step`: begins or ends the recording. Returns the span of the step.
    ///
    /// Errors: the trace cannot be written.
    pub fn before(&mut self, step: u64, reporter: &mut Reporter) -> Result<trace::SpanGuard> {
        if let Some((first, last)) = self.steps {
            if step == first {
                trace::start();
                self.recording = true;
            } else if step > last {
                self.write(reporter)?;
            }
        }
        Ok(trace::numbered("step", step as usize))
    }

    /// At the end of the run.
    ///
    /// Errors: the trace cannot be written.
    pub fn end(&mut self, reporter: &mut Reporter) -> Result<()> {
        self.write(reporter)?;
        if let Some((first, _)) = self.steps.filter(|_| !self.recorded) {
            reporter.warn(&format!(
                "no step was profiled: profiling starts at step {first}, but the run ended before it"
            ));
        }
        Ok(())
    }

    /// Ends the recording, if there is one: writes the trace and prints the table.
    fn write(&mut self, reporter: &mut Reporter) -> Result<()> {
        if !std::mem::take(&mut self.recording) {
            return Ok(());
        }
        self.recorded = true;
        let spans = trace::stop();
        let wanted = self.steps.map_or(0, |(first, last)| last + 1 - first);
        let found = spans.iter().filter(|span| span.name == "step").count() as u64;
        if found < wanted {
            reporter.warn(&format!(
                "the profile has {found} of {wanted} steps: the run ended early"
            ));
        }
        let path = self.run_dir.join(TRACE);
        files::write_atomic(&path, chrome(&spans).to_string().as_bytes())?;
        for line in table(&spans) {
            reporter.note(&line);
        }
        reporter.note(&format!(
            "{}: open it in https://ui.perfetto.dev or chrome://tracing",
            path.display()
        ));
        Ok(())
    }
}

/// The trace event format: complete events with times in microseconds.
fn chrome(spans: &[Span]) -> Value {
    let micros = |d: Duration| d.as_nanos() as f64 / 1000.0;
    let event = |span: &Span| {
        let name = span
            .of
            .as_ref()
            .map_or(span.name.to_string(), |of| format!("{} {of}", span.name));
        json!({
            "name": name, "cat": span.name, "ph": "X", "ts": micros(span.from), "dur": micros(span.to - span.from),
            "pid": 1, "tid": span.thread,
        })
    };
    json!({"traceEvents": spans.iter().map(event).collect::<Vec<_>>(), "displayTimeUnit": "ms"})
}

/// Times of equal work.
#[derive(Debug, Default, Clone, PartialEq)]
struct TimeSum {
    count: u64,
    /// With the work inside of it.
    total: Duration,
    /// Without it.
    own: Duration,
}

/// The times by name, and by name and weight for work that has a weight.
fn sums(spans: &[Span]) -> BTreeMap<String, TimeSum> {
    let mut sums: BTreeMap<String, TimeSum> = BTreeMap::new();
    // The spans that are open at a place, as indices: each is inside of the one before.
    let mut open: Vec<usize> = Vec::new();
    let mut inside = vec![Duration::ZERO; spans.len()];
    for (i, span) in spans.iter().enumerate() {
        while open
            .last()
            .is_some_and(|&o| spans[o].thread != span.thread || spans[o].to <= span.from)
        {
            open.pop();
        }
        if let Some(&outer) = open.last() {
            inside[outer] += span.to - span.from;
        }
        open.push(i);
    }
    for (span, inside) in spans.iter().zip(inside) {
        let numbered = span.of.as_ref().is_none_or(|of| of.bytes().all(|b| b.is_ascii_digit()));
        let name = match &span.of {
            Some(of) if !numbered => format!("{} {of}", span.name),
            _ => span.name.to_string(),
        };
        let sum = sums.entry(name).or_default();
        sum.count += 1;
        sum.total += span.to - span.from;
        sum.own += (span.to - span.from).saturating_sub(inside);
    }
    sums
}

/// Lines of a table: the work that takes most time by itself first.
fn table(spans: &[Span]) -> Vec<String> {
    let mut sums: Vec<(String, TimeSum)> = sums(spans).into_iter().collect();
    sums.sort_by_key(|(_, sum)| std::cmp::Reverse(sum.own));
    let whole: Duration = sums.iter().map(|(_, sum)| sum.own).sum();
    let steps = sums
        .iter()
        .find(|(name, _)| name == "step")
        .map_or(1, |(_, sum)| sum.count.max(1));
    let ms = |d: Duration| d.as_secs_f64() * 1e3 / steps as f64;
    let mut lines = vec![format!(
        "{:<36} {:>7} {:>10} {:>10} {:>6}",
        "per step", "calls", "own ms", "total ms", "own %"
    )];
    let line = |(name, sum): &(String, TimeSum)| {
        let share = 100.0 * sum.own.as_secs_f64() / whole.as_secs_f64().max(1e-12);
        let calls = sum.count as f64 / steps as f64;
        format!(
            "{name:<36} {calls:>7.1} {:>10.2} {:>10.2} {share:>6.1}",
            ms(sum.own),
            ms(sum.total)
        )
    };
    lines.extend(sums.iter().take(LINES).map(line));
    let rest: Duration = sums.iter().skip(LINES).map(|(_, sum)| sum.own).sum();
    if !rest.is_zero() {
        lines.push(format!(
            "{:<36} {:>7} {:>10.2}",
            format!("{} others", sums.len() - LINES),
            "",
            ms(rest)
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(name: &'static str, of: Option<&str>, thread: u32, from: u64, to: u64) -> Span {
        Span {
            name,
            of: of.map(|of| of.to_string().into()),
            thread,
            from: Duration::from_millis(from),
            to: Duration::from_millis(to),
        }
    }

    #[test]
    fn own_time_is_the_time_without_inner_work() {
        let spans = [
            span("step", Some("2"), 1, 0, 100),
            span("layer", Some("0"), 1, 10, 40),
            span("linear", Some("q_proj"), 1, 10, 20),
            span("linear", Some("k_proj"), 1, 20, 25),
            span("layer", Some("1"), 1, 40, 60),
            span("linear", Some("q_proj"), 1, 45, 50),
            span("step", Some("3"), 1, 100, 150),
            span("linear", Some("q_proj"), 2, 0, 7),
        ];
        let sums = sums(&spans);
        let own = |name: &str| {
            (
                sums[name].count,
                sums[name].total.as_millis(),
                sums[name].own.as_millis(),
            )
        };
        assert_eq!(own("step"), (2, 150, 100));
        assert_eq!(own("layer"), (2, 50, 30));
        assert_eq!(own("linear q_proj"), (3, 22, 22));
        assert_eq!(own("linear k_proj"), (1, 5, 5));
        let lines = table(&spans);
        assert!(
            lines[1].starts_with("step ") && lines[1].contains("50.00"),
            "{lines:#?}"
        );
        let events = chrome(&spans);
        assert_eq!(events["traceEvents"][2]["name"], "linear q_proj");
        assert_eq!(events["traceEvents"][2]["dur"], 10_000.0);
    }
}
