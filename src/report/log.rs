//! Files of one JSON object a line. A fault is kept to be told once; after it the file is left alone.

use crate::base::files::{self, AppendFile};
use crate::base::{Error, Result};
use serde_json::Value;
use std::path::Path;

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

    pub(super) fn line(&mut self, value: &Value) {
        if let Some(file) = &mut self.file
            && let Err(fault) = file.line(&value.to_string())
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

/// Rewrites `metrics.jsonl` in `dir` without the lines of steps after `step` and without a torn line, so that
/// a resumed run leaves each step once. `step` 0 is a new start: nothing is kept. No file is no error.
pub fn truncate_after(dir: &Path, step: u64) -> Result<()> {
    let path = dir.join("metrics.jsonl");
    if !path.exists() {
        return Ok(());
    }
    let bytes = files::read(&path)?;
    let mut kept = Vec::with_capacity(bytes.len());
    if step > 0 {
        for line in bytes.split_inclusive(|b| *b == b'\n') {
            let at = serde_json::from_slice::<Value>(line)
                .ok()
                .and_then(|v| v.get("step")?.as_u64());
            if line.ends_with(b"\n") && at.is_some_and(|s| s <= step) {
                kept.extend_from_slice(line);
            }
        }
    }
    if kept.len() == bytes.len() {
        return Ok(());
    }
    files::write_atomic(&path, &kept)
}
