//! JSONL files, and the event file. The first error is stored for one report; after it the file is not written any more.

use crate::base::files::{AppendFile, AtomicFile};
use crate::base::{Error, Result};
use crate::history::{self, each_line};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

pub(super) const METRICS: &str = "metrics.jsonl";
pub(super) const EVENTS: &str = "events.jsonl";
pub(super) const SAMPLES: &str = "samples.jsonl";

pub(super) struct LogFile {
    file: Option<AppendFile>,
    fault: Option<Error>,
}

impl LogFile {
    pub(super) fn open(path: &Path) -> Self {
        Self::of(AppendFile::open(path))
    }

    /// A new event file of TensorBoard, with what `metrics.jsonl` in `dir` has.
    pub(super) fn event_file(dir: &Path) -> Self {
        Self::of(history::new_event_file(dir, unix_time()).and_then(|path| AppendFile::open(&path)))
    }

    fn of(file: Result<AppendFile>) -> Self {
        match file {
            Ok(file) => Self {
                file: Some(file),
                fault: None,
            },
            Err(fault) => Self {
                file: None,
                fault: Some(fault),
            },
        }
    }

    /// A log that drops its lines.
    pub(super) fn none() -> Self {
        Self {
            file: None,
            fault: None,
        }
    }

    pub(super) fn line(&mut self, value: &Value) {
        self.with(|file| file.line(&value.to_string()));
    }

    /// Appends bytes in a single write.
    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.with(|file| file.write(bytes));
    }

    /// Syncs the lines to the disk.
    pub(super) fn sync(&mut self) {
        self.with(AppendFile::sync);
    }

    fn with(&mut self, f: impl FnOnce(&mut AppendFile) -> Result<()>) {
        if let Some(file) = &mut self.file
            && let Err(fault) = f(file)
        {
            self.file = None;
            self.fault = Some(fault);
        }
    }

    pub(super) fn take_fault(&mut self) -> Option<Error> {
        self.fault.take()
    }
}

/// Seconds since 1970, with fractions.
pub(super) fn unix_time() -> f64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0.0, |d| d.as_secs_f64())
}

/// Removes the lines of steps after `step` from `metrics.jsonl` and `samples.jsonl` in `dir`, and incomplete lines, so that a
/// resumed run writes each line once. With `step` 0, a new start, nothing is kept. A missing file is not an error.
pub fn truncate_after(dir: &Path, step: u64) -> Result<()> {
    for name in [METRICS, SAMPLES] {
        keep_lines(&dir.join(name), |at, _| step > 0 && at <= step)?;
    }
    Ok(())
}

/// Copies the lines of `metrics.jsonl` and `samples.jsonl` up to `step` from the run in `from` to `dir`, for a run that goes on
/// there. A missing file is not an error.
pub fn copy_until(from: &Path, dir: &Path, step: u64) -> Result<()> {
    for name in [METRICS, SAMPLES] {
        let source = from.join(name);
        if source.symlink_metadata().is_err() {
            continue;
        }
        let mut out = AtomicFile::create(&dir.join(name))?;
        each_line(&source, |line| match whole(line) {
            Some((at, _)) if at <= step => out.write(line),
            _ => Ok(()),
        })?;
        out.commit()?;
    }
    Ok(())
}

/// Removes lines from the end of `events.jsonl` in `dir` that a loss of power or a full disk left incomplete. Earlier
/// synced lines are complete.
pub(super) fn drop_torn_events(dir: &Path) -> Result<()> {
    let path = dir.join(EVENTS);
    if !path.exists() {
        return Ok(());
    }
    let (mut at, mut end) = (0, 0);
    each_line(&path, |line| {
        at += line.len() as u64;
        if line.ends_with(b"\n") && serde_json::from_slice::<Value>(line).is_ok() {
            end = at;
        }
        Ok(())
    })?;
    if end < at { cut(&path, end) } else { Ok(()) }
}

/// Rewrites `metrics.jsonl` in `dir` without the evaluation of `step`.
pub(super) fn drop_evaluation(dir: &Path, step: u64) -> Result<()> {
    keep_lines(&dir.join(METRICS), |at, line| {
        at != step || !is_evaluation(line, "eval_")
    })
}

/// True if `metrics.jsonl` in `dir` has a complete line of `step` with a key that starts with `key`.
pub fn has_evaluation(dir: &Path, step: u64, key: &str) -> bool {
    let mut found = false;
    let read = each_line(&dir.join(METRICS), |line| {
        found |= whole(line).is_some_and(|(at, line)| at == step && is_evaluation(&line, key));
        Ok(())
    });
    read.is_ok() && found
}

/// True if `samples.jsonl` in `dir` has a line of `step` with these texts as `when` and `prompt`.
pub(super) fn has_sample(dir: &Path, step: u64, when: &str, prompt: &str) -> bool {
    let mut found = false;
    let read = each_line(&dir.join(SAMPLES), |line| {
        found |= whole(line).is_some_and(|(at, line)| at == step && line["when"] == when && line["prompt"] == prompt);
        Ok(())
    });
    read.is_ok() && found
}

/// Step and numbers of the evaluations in `metrics.jsonl`, in order. An evaluation may have more than one line.
pub fn evaluations(dir: &Path) -> Vec<(u64, Vec<(String, f64)>)> {
    let mut found: BTreeMap<u64, Vec<(String, f64)>> = BTreeMap::new();
    // Without the file there are none.
    let _ = each_line(&dir.join(METRICS), |line| {
        let Some((step, line)) = whole(line).filter(|(_, line)| is_evaluation(line, "eval_")) else {
            return Ok(());
        };
        let numbers = line.as_object().into_iter().flatten();
        // JSON has no number that is not finite: such a value is `null` in the file.
        let number = |value: &Value| value.is_null().then_some(f64::NAN).or(value.as_f64());
        let numbers = numbers.filter_map(|(name, value)| Some((name.clone(), number(value)?)));
        let numbers = numbers.filter(|(name, _)| name.starts_with("eval_"));
        found.entry(step).or_default().extend(numbers);
        Ok(())
    });
    found.into_iter().collect()
}

fn is_evaluation(line: &Value, key: &str) -> bool {
    line.as_object().is_some_and(|l| l.keys().any(|k| k.starts_with(key)))
}

/// The step of a complete line.
fn whole(line: &[u8]) -> Option<(u64, Value)> {
    let value: Value = serde_json::from_slice(line.strip_suffix(b"\n")?).ok()?;
    Some((value.get("step")?.as_u64()?, value))
}

/// Shortens the file to its first `length` bytes.
fn cut(path: &Path, length: u64) -> Result<()> {
    AppendFile::continue_at(path, length)?.sync()
}

/// Removes the other lines. Only if one that stays follows one that goes, the file is written again.
fn keep_lines(path: &Path, keep: impl Fn(u64, &Value) -> bool) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    let stays = |line: &[u8]| whole(line).is_some_and(|(at, value)| keep(at, &value));
    let (mut at, mut first, mut stays_after) = (0, None, false);
    each_line(path, |line| {
        match (stays(line), first) {
            (false, None) => first = Some(at),
            (true, Some(_)) => stays_after = true,
            _ => {}
        }
        at += line.len() as u64;
        Ok(())
    })?;
    let Some(first) = first else { return Ok(()) };
    if !stays_after {
        return cut(path, first);
    }
    let mut out = AtomicFile::create(path)?;
    each_line(path, |line| if stays(line) { out.write(line) } else { Ok(()) })?;
    out.commit()
}
