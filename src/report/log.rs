//! JSONL files. The first error is stored for one report; after it the file is not written any more.

use crate::base::files::{self, AppendFile};
use crate::base::{Error, Result};
use serde_json::Value;
use std::path::Path;

pub(super) const METRICS: &str = "metrics.jsonl";
pub(super) const EVENTS: &str = "events.jsonl";
pub(super) const SAMPLES: &str = "samples.jsonl";

pub(super) struct Log {
    file: Option<AppendFile>,
    fault: Option<Error>,
}

impl Log {
    pub(super) fn open(path: &Path) -> Self {
        match AppendFile::open(path) {
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
        if let Some(file) = &mut self.file
            && let Err(fault) = file.line(&value.to_string())
        {
            self.file = None;
            self.fault = Some(fault);
        }
    }

    /// Syncs the lines to the disk.
    pub(super) fn sync(&mut self) {
        if let Some(file) = &mut self.file
            && let Err(fault) = file.sync()
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

/// Rewrites `metrics.jsonl` and `samples.jsonl` in `dir` without the lines of steps after `step` and without an
/// incomplete line, so that a resumed run writes each line once. With `step` 0, a new start, nothing is kept. A missing
/// file is not an error.
pub fn truncate_after(dir: &Path, step: u64) -> Result<()> {
    for name in [METRICS, SAMPLES] {
        keep_lines(&dir.join(name), |at, _| step > 0 && at <= step)?;
    }
    Ok(())
}

/// Rewrites `events.jsonl` in `dir` without lines that a loss of power or a full disk left incomplete. They are only at the
/// end: what was synced before is complete.
pub(super) fn drop_torn_events(dir: &Path) -> Result<()> {
    let path = dir.join(EVENTS);
    if !path.exists() {
        return Ok(());
    }
    let bytes = files::read(&path)?;
    let is_whole = |line: &[u8]| line.ends_with(b"\n") && serde_json::from_slice::<Value>(line).is_ok();
    let lines: Vec<&[u8]> = bytes.split_inclusive(|b| *b == b'\n').collect();
    let torn = lines.iter().rev().take_while(|line| !is_whole(line)).count();
    let kept: usize = lines[..lines.len() - torn].iter().map(|line| line.len()).sum();
    if torn == 0 {
        return Ok(());
    }
    files::write_atomic(&path, &bytes[..kept])
}

/// Rewrites `metrics.jsonl` in `dir` without the evaluation of `step`.
pub(super) fn drop_evaluation(dir: &Path, step: u64) -> Result<()> {
    keep_lines(&dir.join(METRICS), |at, line| {
        at != step || !is_evaluation(line, "eval_")
    })
}

/// True if `metrics.jsonl` in `dir` has a complete line of `step` with a key that starts with `key`.
pub fn has_evaluation(dir: &Path, step: u64, key: &str) -> bool {
    let bytes = files::read(&dir.join(METRICS)).unwrap_or_default();
    let mut lines = bytes.split_inclusive(|b| *b == b'\n').filter_map(whole);
    lines.any(|(at, line)| at == step && is_evaluation(&line, key))
}

fn is_evaluation(line: &Value, key: &str) -> bool {
    line.as_object().is_some_and(|l| l.keys().any(|k| k.starts_with(key)))
}

/// The step of a complete line.
fn whole(line: &[u8]) -> Option<(u64, Value)> {
    let value: Value = serde_json::from_slice(line.strip_suffix(b"\n")?).ok()?;
    Some((value.get("step")?.as_u64()?, value))
}

fn keep_lines(path: &Path, keep: impl Fn(u64, &Value) -> bool) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    let bytes = files::read(path)?;
    let mut kept = Vec::with_capacity(bytes.len());
    for line in bytes.split_inclusive(|b| *b == b'\n') {
        if whole(line).is_some_and(|(at, value)| keep(at, &value)) {
            kept.extend_from_slice(line);
        }
    }
    if kept.len() == bytes.len() {
        return Ok(());
    }
    files::write_atomic(path, &kept)
}
