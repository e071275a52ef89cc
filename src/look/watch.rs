//! The screen of `ft watch`: a run in a terminal, drawn again while it goes on.

use super::tail::{Tail, TailChange};
use crate::base::units::{bytes, count, duration, rate};
use crate::base::{Result, files, secrets};
use crate::history::{self, Curve, Curves, RunRecord};
use crate::report::{columns, visible};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

/// Points of a curve in memory.
const MOST: usize = 4000;
/// Events in memory.
const EVENTS: usize = 50;
/// Steps in the mean of a shown number.
const RECENT: usize = 10;
/// Fewest rows of a plot.
const LEAST_ROWS: usize = 4;

/// A run that is followed.
pub struct WatchedRun {
    run: PathBuf,
    record: RunRecord,
    curves: Curves,
    metrics: Tail,
    events: Vec<Value>,
    events_bytes: u64,
    /// The curve that is shown, a place in `shown`.
    place: usize,
    raw: bool,
}

/// How a frame is drawn.
#[derive(Debug, Clone, Copy)]
pub struct FrameStyle {
    pub width: usize,
    pub height: usize,
    pub color: bool,
    pub unicode: bool,
}

impl WatchedRun {
    /// Errors: it is no run; a file cannot be read.
    pub fn open(run: &Path) -> Result<Self> {
        let curves = Curves::read(run, MOST)?;
        let mut watched = Self {
            run: run.to_path_buf(),
            record: RunRecord::read_at_most(run, 0)?,
            metrics: Tail::new(&run.join("metrics.jsonl"), curves.bytes),
            curves,
            events: Vec::new(),
            events_bytes: 0,
            place: 0,
            raw: false,
        };
        watched.read_events();
        Ok(watched)
    }

    fn read_events(&mut self) {
        let path = self.run.join("events.jsonl");
        self.events_bytes = files::size(&path).unwrap_or(0);
        self.events = super::view::last_lines(&self.run, "events.jsonl", EVENTS);
    }

    /// Reads what the run wrote since the last call. A resumed run may have cut its lines: then all are read again. A file
    /// that is being replaced is read at the next call.
    pub fn refresh(&mut self) {
        match self.metrics.read() {
            Ok(TailChange::Lines(lines)) => lines.iter().for_each(|line| self.curves.line(line, MOST)),
            Ok(TailChange::Cut) => {
                if let Ok(curves) = Curves::read(&self.run, MOST) {
                    self.metrics = Tail::new(&self.run.join("metrics.jsonl"), curves.bytes);
                    self.curves = curves;
                }
            }
            Err(_) => {}
        }
        if files::size(&self.run.join("events.jsonl")).unwrap_or(0) != self.events_bytes {
            self.read_events();
        }
        if let Ok(record) = RunRecord::read_at_most(&self.run, 0) {
            self.record = record;
        }
    }

    /// The curves that can be shown: the loss first.
    fn shown(&self) -> Vec<&str> {
        const FIRST: [&str; 5] = ["loss", "reward", "kl", "learning_rate", "grad_norm"];
        const NOT: [&str; 4] = ["time", "epoch", "trained_tokens", "eval_tokens"];
        let mut all: Vec<&str> = FIRST
            .into_iter()
            .filter(|name| self.curves.get(name).is_some())
            .collect();
        let partner = |name: &str| name.strip_prefix("eval_").is_some_and(|n| self.curves.get(n).is_some());
        let others = self.curves.names();
        let others = others.filter(|name| !FIRST.contains(name) && !NOT.contains(name) && !partner(name));
        all.extend(others);
        all
    }

    /// The next curve, or the one before.
    pub fn turn(&mut self, back: bool) {
        let n = self.shown().len().max(1);
        self.place = (self.place + if back { n - 1 } else { 1 }) % n;
    }

    /// Values as they are, or smoothed.
    pub fn toggle_raw(&mut self) {
        self.raw = !self.raw;
    }

    fn last(&self, name: &str) -> Option<f64> {
        self.curves.get(name)?.last()
    }

    fn recent(&self, name: &str) -> Option<f64> {
        self.curves.get(name)?.recent(RECENT)
    }

    /// Seconds from the start to the last line, and to the end at the pace of the last steps.
    fn times(&self) -> (Option<f64>, Option<f64>) {
        let Some(time) = self.curves.get("time") else {
            return (self.record.began.zip(self.record.ended).map(|(a, b)| b - a), None);
        };
        let elapsed = time.last().zip(self.record.began).map(|(now, began)| now - began);
        // The time between an end and a resume is not the time of a step.
        let resumed = self.record.resumed.unwrap_or(f64::NEG_INFINITY);
        let since = time.points.partition_point(|(_, at)| *at < resumed);
        let points = &time.points[since.max(time.points.len().saturating_sub(30))..];
        let pace = points.first().zip(points.last()).filter(|(a, b)| b.0 > a.0);
        let pace = pace.map(|(a, b)| (b.1 - a.1) / (b.0 - a.0) as f64);
        let left = self
            .record
            .total_steps
            .map(|total| total.saturating_sub(self.curves.steps));
        let running = self.record.is_running();
        (
            elapsed,
            pace.zip(left)
                .filter(|_| running)
                .map(|(pace, left)| pace * left as f64),
        )
    }

    /// The lines of a window, at most `height`.
    pub fn frame(&self, look: FrameStyle) -> Vec<String> {
        let bold = |text: &str| {
            if look.color {
                format!("\x1b[1m{text}\x1b[0m")
            } else {
                text.to_string()
            }
        };
        let record = &self.record;
        let time = |s: Option<f64>| s.map(|s| duration(Duration::try_from_secs_f64(s.max(0.0)).unwrap_or_default()));
        let what = ["train.stage", "tune.method", "model.path"]
            .map(|key| record.setting(key))
            .join(" ");
        let name = on_one_line(&self.run.display().to_string());
        let mut lines = vec![
            format!("{}  {}", bold(&name), on_one_line(&record.state)),
            on_one_line(&what),
            String::new(),
        ];

        let (elapsed, left) = self.times();
        let done = self.curves.steps;
        let mut line = match record.total_steps {
            Some(total) => {
                let part = (done as f64 / total.max(1) as f64).min(1.0);
                let bar = bar(part, 24, look.unicode);
                format!("step {} of {}  {bar} {:.0} %", count(done), count(total), part * 100.0)
            }
            None => "no step yet".to_string(),
        };
        for (name, value) in [("elapsed", time(elapsed)), ("remaining", time(left))] {
            line += &value.map_or(String::new(), |v| format!("  {name} {v}"));
        }
        lines.push(line);

        let plain = |x: f64| format!("{x:.4}");
        let best = self.curves.get("eval_loss").and_then(Curve::lowest);
        let numbers = [
            ("loss", self.recent("loss").map(plain)),
            ("eval", self.last("eval_loss").map(plain)),
            ("best", best.map(plain)),
            ("reward", self.recent("reward").map(plain)),
            ("rate", self.last("learning_rate").map(rate)),
            ("grad", self.recent("grad_norm").map(plain)),
            ("tok/s", self.recent("tokens_per_second").map(|x| count(x as u64))),
        ];
        let numbers = numbers
            .into_iter()
            .filter_map(|(name, value)| Some(format!("{name} {}", value?)));
        lines.push(numbers.collect::<Vec<_>>().join("  "));

        let peak = self
            .curves
            .get("peak_memory_bytes")
            .and_then(|c| c.points.iter().map(|p| p.1).reduce(f64::max));
        if let Some(peak) = peak {
            lines.push(match record.planned_bytes {
                Some(planned) => {
                    let bar = bar((peak / planned.max(1) as f64).min(1.0), 24, look.unicode);
                    format!("memory {bar} peak {}, forecast {}", bytes(peak as u64), bytes(planned))
                }
                None => format!("memory peak {}", bytes(peak as u64)),
            });
        }
        lines.push(String::new());

        let events = self.events.len().min(5).min(look.height / 5);
        // Title, axis, labels; an empty line and a title; the keys.
        let rows = look.height.saturating_sub(lines.len() + 6 + events);
        if rows >= LEAST_ROWS {
            lines.extend(self.plot(rows, look));
        }
        lines.push(String::new());
        lines.extend(self.events[self.events.len() - events..].iter().map(event));
        lines.truncate(look.height.saturating_sub(1));
        lines.resize(look.height.saturating_sub(1), String::new());
        lines.push("q quit   m next metric   n previous   r raw or smoothed".to_string());
        for line in &mut lines {
            if columns(line) > look.width && !line.contains('\x1b') {
                *line = line.chars().take(look.width).collect();
            }
        }
        lines
    }

    fn plot(&self, rows: usize, look: FrameStyle) -> Vec<String> {
        let shown = self.shown();
        let Some(name) = shown.get(self.place.min(shown.len().saturating_sub(1))) else {
            return vec!["no metrics yet".to_string()];
        };
        let (own, evaluated) = (self.curves.get(name), self.curves.get(&format!("eval_{name}")));
        let smooth = !self.raw && !name.starts_with("eval_") && !["learning_rate", "peak_memory_bytes"].contains(name);
        let own = own.map(|c| if smooth { c.smoothed() } else { c.clone() });
        let curves: Vec<&Curve> = own.iter().chain(evaluated).collect();
        let points = evaluated.map(|c| c.points.len()).filter(|n| *n > 0);
        let title = format!("{}{}", on_one_line(name), if smooth { ", smoothed" } else { "" });
        let more = points.map_or(String::new(), |points| format!("{points} evaluations"));
        let between = if points.is_some() { ", and " } else { "" };
        // In the colors of the curves, if both fit.
        let colored = points.is_some() && look.color && look.unicode;
        let mut lines = vec![
            if colored && columns(&title) + columns(&more) + between.len() <= look.width {
                let tint = |n: usize, text: &str| format!("\x1b[{}m{text}\x1b[0m", history::color(n));
                tint(0, &title) + between + &tint(1, &more)
            } else {
                title + between + &more
            },
        ];
        let drawn = history::plot(&curves, look.width.min(160), rows, look.color && look.unicode);
        let dots = |line: String| -> String {
            let plain = |c: char| if ('\u{2801}'..='\u{28ff}').contains(&c) { '*' } else { c };
            line.chars().map(plain).collect()
        };
        lines.extend(drawn.into_iter().map(|line| {
            if look.unicode {
                line
            } else {
                crate::report::ascii(&dots(line))
            }
        }));
        lines
    }
}

/// A bar of `width` columns that is filled to `part`.
fn bar(part: f64, width: usize, unicode: bool) -> String {
    let full = (part * width as f64).round() as usize;
    let [on, off] = if unicode { ["━", "╌"] } else { ["#", "-"] };
    on.repeat(full) + &off.repeat(width - full.min(width))
}

/// Text of a file in a line of a frame.
fn on_one_line(text: &str) -> String {
    visible(text).replace(['\n', '\t'], " ")
}

/// `15:22:01 save  step 200`, in UTC.
fn event(event: &Value) -> String {
    let seconds = event["time"]
        .as_f64()
        .filter(|s| (0.0..1e11).contains(s))
        .unwrap_or(0.0);
    let clock = crate::base::units::utc(UNIX_EPOCH + Duration::from_secs_f64(seconds));
    let clock = clock.split(' ').nth(1).unwrap_or_default().to_string();
    let fields = event.as_object().into_iter().flatten();
    let fields = fields.filter(|(name, value)| !["time", "event", "command"].contains(&&***name) && !value.is_null());
    let text = |(name, value): (&String, &Value)| match value.as_str() {
        Some(text) if name == "message" => text.to_string(),
        Some(text) => format!("{name} {text}"),
        None => format!("{name} {value}"),
    };
    let text = fields.map(text).collect::<Vec<_>>().join(", ");
    let shown = |text: &str| on_one_line(&secrets::mask(text));
    let kind = event["event"].as_str().unwrap_or("-");
    format!("{clock} {:<8} {}", shown(kind), shown(&text))
}

/// The run that a user means by these directories: the newest one in progress, else the newest one.
///
/// Errors: a directory cannot be listed.
pub fn newest(places: &[PathBuf]) -> Result<Option<PathBuf>> {
    let found = history::find(places)?;
    let newest = found.into_iter().max_by_key(|run| {
        let record = RunRecord::read_at_most(run, 0).ok();
        let running = record.as_ref().is_some_and(RunRecord::is_running);
        // One that cannot be read is the last choice.
        let can_be_read = record.is_some();
        let began = record.and_then(|r| r.began).unwrap_or(0.0);
        (can_be_read, running, began as u64)
    });
    Ok(newest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn write(run: &Path, steps: std::ops::RangeInclusive<u64>) {
        let line = |s: u64| {
            let eval = if s.is_multiple_of(10) {
                format!("{{\"step\":{s},\"eval_loss\":2.0}}\n")
            } else {
                String::new()
            };
            format!(
                "{{\"step\":{s},\"loss\":{},\"learning_rate\":2e-5,\"peak_memory_bytes\":1048576,\"time\":{s}.5}}\n{eval}",
                3.0 / s as f64
            )
        };
        fs::write(run.join("metrics.jsonl"), steps.map(line).collect::<String>()).unwrap();
    }

    #[test]
    fn a_frame_fits_its_window_and_follows_the_run() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path();
        fs::write(
            run.join("resolved.toml"),
            "[train]\nstage = \"s\\u001b[2Jft\"  # recipe\n",
        )
        .unwrap();
        let start = "{\"event\":\"start\",\"steps\":100,\"time\":0.5}\n{\"event\":\"warning\",\"message\":\"a\\u001b[31mb\\nc\",\"time\":1}\n{\"event\":\"d\\u001b[8m\\ne\",\"time\":2}\n";
        fs::write(run.join("events.jsonl"), start).unwrap();
        write(run, 1..=40);
        let mut watched = WatchedRun::open(run).unwrap();
        // The name of a curve is text of a file too.
        let odd = "{\"step\":1,\"a\\nb\\tc\":2.0}\n";
        fs::write(run.join("metrics.jsonl"), odd).unwrap();
        let look = FrameStyle {
            width: 80,
            height: 24,
            color: false,
            unicode: true,
        };
        let frame = WatchedRun::open(run).unwrap().frame(look);
        assert!(
            frame.iter().any(|line| line.starts_with("a b c, smoothed")),
            "{frame:?}"
        );
        write(run, 1..=40);
        for (width, height) in [(80, 24), (40, 12), (24, 5), (200, 60), (10, 2)] {
            for (color, unicode) in [(false, true), (true, true), (false, false)] {
                let look = FrameStyle {
                    width,
                    height,
                    color,
                    unicode,
                };
                let frame = watched.frame(look);
                assert_eq!(frame.len(), height.max(1), "{width} x {height}");
                for line in &frame {
                    assert!(!line.contains('\n') && (color || !line.contains('\x1b')), "{line:?}");
                    assert!(width < 24 || color || columns(line) <= width, "{line}");
                    assert!(unicode || line.is_ascii(), "{line}");
                }
            }
        }
        let look = FrameStyle {
            width: 80,
            height: 24,
            color: false,
            unicode: true,
        };
        let text = watched.frame(look).join("\n");
        for shown in [
            "step 40 of 100",
            "40 %",
            "loss, smoothed, and 4 evaluations",
            "eval 2.0000",
            "rate 2e-5",
            "1.0 MiB",
            "00:00:01 warning",
            "00:00:02 d\\u{1b}[8m e",
        ] {
            assert!(text.contains(shown), "{shown}\n{text}");
        }
        watched.turn(false);
        assert!(watched.frame(look).join("\n").contains("learning_rate"));
        watched.turn(true);
        // A resumed run writes the lines after step 20 again.
        write(run, 1..=25);
        watched.refresh();
        assert!(watched.frame(look).join("\n").contains("step 25 of 100"));
        write(run, 1..=60);
        watched.refresh();
        watched.refresh();
        assert!(watched.frame(look).join("\n").contains("step 60 of 100"));
    }

    #[test]
    fn the_pause_before_a_resume_is_no_time_of_a_step() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path();
        fs::write(run.join("resolved.toml"), "").unwrap();
        let events = "{\"event\":\"start\",\"steps\":100,\"time\":0}\n{\"event\":\"resume\",\"time\":30000}\n";
        fs::write(run.join("events.jsonl"), events).unwrap();
        let line = |step: u64| {
            let time = if step <= 10 { step } else { 30_000 + step };
            format!("{{\"step\":{step},\"eval_loss\":{step},\"time\":{time}}}\n")
        };
        fs::write(run.join("metrics.jsonl"), (0..=20).map(line).collect::<String>()).unwrap();
        let mut watched = WatchedRun::open(run).unwrap();
        watched.record.state = "running".to_string();
        assert_eq!(watched.times(), (Some(30_020.0), Some(80.0)));
        let look = FrameStyle {
            width: 80,
            height: 24,
            color: false,
            unicode: true,
        };
        // The evaluation before the first step is not the best one.
        assert!(watched.frame(look).join("\n").contains("best 1.0000"));
    }
}
