//! JSONL files, and the event file. A line that cannot be written is kept in memory, and is written when that is possible again: a
//! full disk may be so for a moment only. A fault is stored for one report, and so is its end.

use crate::base::files::{self, AppendFile, AtomicFile};
use crate::base::{Error, Result, units};
use crate::history::{self, each_line};
use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub(super) const METRICS: &str = "metrics.jsonl";
pub(super) const EVENTS: &str = "events.jsonl";
pub(super) const SAMPLES: &str = "samples.jsonl";

/// From a fault to the next try, unless there is a sync before: a broken disk must not slow the steps down.
const RETRY: Duration = Duration::from_secs(5);

/// Most bytes of lines that wait for the end of a fault: some ten thousand lines of steps.
const MOST_WAITING: u64 = 4 << 20;

pub(super) struct LogFile {
    /// `None`: the lines are dropped.
    path: Option<PathBuf>,
    /// `None` after a fault.
    file: Option<AppendFile>,
    /// Bytes of whole lines in the file, and those of them that were synced. `None`: not known yet.
    length: Option<u64>,
    synced: u64,
    /// Lines that are not in the file yet.
    waiting: VecDeque<Vec<u8>>,
    waiting_bytes: u64,
    /// Bytes of the oldest lines, which were too many to wait.
    dropped: u64,
    failing: Option<Failing>,
    fault: Option<Error>,
    note: Option<String>,
}

/// A fault that has not ended yet.
#[derive(Clone, Copy)]
struct Failing {
    last_try: Instant,
    /// Only a sync can show its end.
    at_sync: bool,
}

impl LogFile {
    pub(super) fn open(path: &Path) -> Self {
        let mut log = Self {
            path: Some(path.to_path_buf()),
            ..Self::none()
        };
        log.write_waiting();
        log
    }

    /// A new event file of TensorBoard, with what `metrics.jsonl` in `dir` has.
    pub(super) fn event_file(dir: &Path) -> Self {
        match history::new_event_file(dir, unix_time()) {
            Ok(path) => Self::open(&path),
            Err(fault) => Self {
                fault: Some(fault),
                ..Self::none()
            },
        }
    }

    /// A log that drops its lines.
    pub(super) fn none() -> Self {
        Self {
            path: None,
            file: None,
            length: None,
            synced: 0,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            dropped: 0,
            failing: None,
            fault: None,
            note: None,
        }
    }

    pub(super) fn line(&mut self, value: &Value) {
        self.bytes(format!("{value}\n").into_bytes());
    }

    /// Appends bytes in a single write.
    pub(super) fn bytes(&mut self, bytes: Vec<u8>) {
        if self.path.is_none() {
            return;
        }
        self.waiting_bytes += bytes.len() as u64;
        self.waiting.push_back(bytes);
        if self.failing.is_none_or(|failing| failing.last_try.elapsed() >= RETRY) {
            self.write_waiting();
        }
        self.drop_oldest();
    }

    /// Syncs the lines to the disk; tries again to write those that wait.
    pub(super) fn sync(&mut self) {
        self.write_waiting();
        let Some(file) = &mut self.file else { return };
        match file.sync() {
            Ok(()) => {
                self.synced = self.length.unwrap_or(0);
                self.recovered();
            }
            Err(fault) => self.sync_failed(fault),
        }
    }

    /// Opens the file again: another one has its name now.
    pub(super) fn reopen(&mut self) {
        (self.file, self.length) = (None, None);
        self.write_waiting();
    }

    pub(super) fn is_failing(&self) -> bool {
        self.failing.is_some()
    }

    pub(super) fn take_fault(&mut self) -> Option<Error> {
        self.fault.take()
    }

    /// What to say about the end of a fault.
    pub(super) fn take_note(&mut self) -> Option<String> {
        self.note.take()
    }

    /// Tries to write the lines that wait, if there are any.
    pub(super) fn write_waiting(&mut self) {
        match self.try_waiting() {
            Ok(()) if self.failing.is_some_and(|failing| failing.at_sync) => {}
            Ok(()) => self.recovered(),
            Err(fault) => self.failed(fault, false),
        }
    }

    fn try_waiting(&mut self) -> Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        if self.file.is_none() {
            // The fault may have left a part of a line.
            let file = match self.length {
                Some(length) => AppendFile::continue_at(path, length)?,
                None => AppendFile::open(path)?,
            };
            let found = file.length()?;
            self.synced = self.length.map_or(found, |_| self.synced.min(found));
            self.length = Some(found);
            self.file = Some(file);
        }
        let Some(file) = &mut self.file else { return Ok(()) };
        while let Some(first) = self.waiting.front() {
            file.write(first)?;
            let written = first.len() as u64;
            self.length = self.length.map(|length| length + written);
            self.waiting_bytes -= written;
            self.waiting.pop_front();
        }
        Ok(())
    }

    fn failed(&mut self, fault: Error, at_sync: bool) {
        self.file = None;
        match &mut self.failing {
            Some(failing) => {
                failing.last_try = Instant::now();
                failing.at_sync |= at_sync;
            }
            None => {
                self.fault = Some(fault);
                self.failing = Some(Failing {
                    last_try: Instant::now(),
                    at_sync,
                });
            }
        }
    }

    /// The system may drop what a failed sync had to write, and no later sync writes it: so these lines are written again.
    fn sync_failed(&mut self, fault: Error) {
        let length = self.length.unwrap_or(0);
        let again = length.saturating_sub(self.synced);
        let read = |path: &PathBuf| {
            let mut bytes = vec![0; again as usize];
            files::open(path)
                .ok()?
                .read_exact_at(&mut bytes, self.synced)
                .ok()
                .map(|()| bytes)
        };
        // What cannot be read, or is too much, stays in the file as it is.
        if (1..=MOST_WAITING - self.waiting_bytes).contains(&again)
            && let Some(bytes) = self.path.as_ref().and_then(read)
        {
            self.waiting.push_front(bytes);
            self.waiting_bytes += again;
            self.length = Some(self.synced);
        }
        self.failed(fault, true);
    }

    fn recovered(&mut self) {
        if self.failing.take().is_none() {
            return;
        }
        let place = self.path.as_deref().unwrap_or(Path::new("")).display();
        let dropped = std::mem::take(&mut self.dropped);
        self.note = Some(match dropped {
            0 => format!("{place} is written again, with all lines"),
            _ => format!(
                "{place} is written again; {} of its lines are missing",
                units::bytes(dropped)
            ),
        });
    }

    fn drop_oldest(&mut self) {
        while self.waiting_bytes > MOST_WAITING
            && let Some(oldest) = self.waiting.pop_front()
        {
            self.waiting_bytes -= oldest.len() as u64;
            self.dropped += oldest.len() as u64;
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn steps(path: &Path) -> Vec<u64> {
        let text = files::read_text(path).unwrap();
        text.lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap()["step"].as_u64().unwrap())
            .collect()
    }

    fn step(log: &mut LogFile, step: u64) {
        log.line(&json!({"step": step}));
    }

    /// The line of a step, for a disk that has space for a part of it only.
    fn half_a_step(log: &mut LogFile, step: u64) {
        let line = json!({"step": step}).to_string();
        let path = log.path.clone().unwrap();
        AppendFile::open(&path).unwrap().write(&line.as_bytes()[..4]).unwrap();
        log.waiting_bytes += line.len() as u64 + 1;
        log.waiting.push_back(format!("{line}\n").into_bytes());
        log.failed(Error::io("cannot append to the file").at_path(&path), false);
    }

    /// As if the last try was long ago.
    fn wait(log: &mut LogFile) {
        let failing = log.failing.as_mut().unwrap();
        failing.last_try = failing.last_try.checked_sub(RETRY).unwrap();
    }

    #[test]
    fn a_file_that_fails_once_has_all_lines_later() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(METRICS);
        let mut log = LogFile::open(&path);
        step(&mut log, 1);
        half_a_step(&mut log, 2);
        assert!(log.take_fault().unwrap().to_string().contains(METRICS));
        step(&mut log, 3);
        let before = files::read_text(&path).unwrap();
        assert_eq!(before, "{\"step\":1}\n{\"st", "not every line tries again");
        wait(&mut log);
        step(&mut log, 4);
        assert_eq!(steps(&path), [1, 2, 3, 4]);
        assert!(log.take_note().unwrap().contains("with all lines"));
        half_a_step(&mut log, 5);
        assert!(log.take_fault().is_some(), "another fault is reported too");
        log.sync();
        step(&mut log, 6);
        assert_eq!(steps(&path), [1, 2, 3, 4, 5, 6], "a sync tries again at once");
        assert!(log.take_note().is_some() && log.take_fault().is_none());
    }

    #[test]
    fn a_file_that_cannot_be_opened_has_all_lines_later() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("later").join(METRICS);
        let mut log = LogFile::open(&path);
        assert!(log.take_fault().is_some());
        step(&mut log, 1);
        log.sync();
        assert!(log.is_failing() && log.take_fault().is_none() && log.take_note().is_none());
        files::create_dir_all(path.parent().unwrap()).unwrap();
        log.sync();
        step(&mut log, 2);
        assert_eq!(steps(&path), [1, 2]);
        // A file that was removed or replaced meanwhile is not filled with zeros.
        half_a_step(&mut log, 3);
        files::remove_file(&path).unwrap();
        log.sync();
        assert_eq!(steps(&path), [3]);
    }

    #[test]
    fn lines_of_a_failed_sync_are_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(METRICS);
        let mut log = LogFile::open(&path);
        step(&mut log, 1);
        log.sync();
        step(&mut log, 2);
        log.sync_failed(Error::io("cannot sync the file"));
        // What the system dropped.
        let kept = AppendFile::continue_at(&path, log.synced).unwrap();
        assert_eq!(kept.length().unwrap(), log.synced);
        step(&mut log, 3);
        assert_eq!(steps(&path), [1]);
        wait(&mut log);
        step(&mut log, 4);
        assert_eq!(steps(&path), [1, 2, 3, 4]);
        assert!(
            log.take_note().is_none(),
            "only a sync shows that the disk is good again"
        );
        log.sync();
        assert!(log.take_note().is_some() && !log.is_failing());
        assert_eq!(log.synced, files::size(&path).unwrap());
    }

    #[test]
    fn the_newest_lines_of_a_long_fault_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(METRICS);
        let mut log = LogFile::open(&path);
        half_a_step(&mut log, 1);
        for step in 2..=6 {
            log.line(&json!({"step": step, "text": "a".repeat(1 << 20)}));
        }
        log.sync();
        assert_eq!(steps(&path), [4, 5, 6]);
        assert!(log.take_note().unwrap().contains("are missing"));
    }
}
