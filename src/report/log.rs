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

/// The least time from a fault to the next try, unless there is a sync before: a broken disk must not slow the steps down.
const RETRY: Duration = Duration::from_secs(5);

/// Most bytes of lines that wait for the end of a fault: some ten thousand lines of steps.
const MOST_WAITING: u64 = 4 << 20;

pub(super) struct LogFile {
    /// `None`: the lines are dropped.
    path: Option<PathBuf>,
    /// The run directory, for an event file: `path` is `None` until `create` has written the file.
    run: Option<PathBuf>,
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
    /// Lines to remove from the file before another one is written.
    removals: Vec<Removal>,
    /// Lines were removed since `take_removed`.
    removed: bool,
    /// Removals that were given up.
    gave_up: Vec<Removal>,
    /// The file may end with a part of a line. A line break goes before all that waits.
    needs_newline: bool,
    /// For an event file: those before it could not be emptied.
    has_old_numbers: bool,
    failing: Option<Failing>,
    fault: Option<Error>,
    note: Option<String>,
    /// A fault that the next lines do not repair.
    warning: Option<String>,
}

/// A fault that has not ended yet.
#[derive(Clone, Copy)]
struct Failing {
    last_try: Instant,
    /// Duration of that try.
    time: Duration,
    /// Only a sync can show its end.
    at_sync: bool,
}

impl Failing {
    /// The time until the next try. Some tries read a whole file: they take less than a tenth of the time of the run.
    fn pause(self) -> Duration {
        RETRY.max(10 * self.time)
    }
}

/// Lines that must go, so that each line is in the file once.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Removal {
    /// The lines of steps after this one, for a resumed run: it writes them again. 0, a new start: all lines. Incomplete lines too.
    After(u64),
    /// The evaluation of this step, which is repeated. Incomplete lines too.
    Evaluation(u64),
    /// Lines at the end that a loss of power or a full disk left incomplete. Earlier synced lines are complete.
    Torn,
}

impl Removal {
    /// True if a complete line of the step `at` stays.
    fn keeps(self, at: u64, line: &Value) -> bool {
        match self {
            Self::After(step) => step > 0 && at <= step,
            Self::Evaluation(step) => at != step || !is_evaluation(line, "eval_"),
            Self::Torn => true,
        }
    }

    /// Removes the lines from a file. A missing file is not an error. True if the file was changed.
    fn apply(self, path: &Path) -> Result<bool> {
        match self {
            Self::Torn => drop_torn(path),
            _ => keep_lines(path, |at, line| self.keeps(at, line)),
        }
    }
}

impl LogFile {
    pub(super) fn open(path: &Path) -> Self {
        Self::opened(path, Vec::new())
    }

    /// As `open`, without these lines of an earlier run.
    pub(super) fn open_without(path: &Path, removal: Removal) -> Self {
        Self::opened(path, vec![removal])
    }

    fn opened(path: &Path, removals: Vec<Removal>) -> Self {
        let mut log = Self {
            path: Some(path.to_path_buf()),
            removals,
            ..Self::none()
        };
        log.write_waiting();
        log
    }

    /// The event file of TensorBoard of the run in `dir`. It drops its lines until `create` has written it.
    pub(super) fn event_file(dir: &Path) -> Self {
        Self {
            run: Some(dir.to_path_buf()),
            ..Self::none()
        }
    }

    /// Writes an event file that is not there yet, with all lines of `metrics`, if that is possible. After a fault it is tried
    /// again as `bytes` does, or at once with `now`. Earlier event files are emptied; one that
    /// could not be emptied is tried again with `now` only.
    pub(super) fn create(&mut self, metrics: &LogFile, now: bool) {
        let Some(run) = &self.run else { return };
        if let Some(path) = &self.path {
            if now && self.has_old_numbers {
                self.has_old_numbers = history::empty_event_files(run, path, unix_time()).is_err();
            }
            return;
        }
        // It is read from the file of the metrics, which does not have the lines that wait.
        if !metrics.waiting.is_empty() || !(now || self.is_time()) {
            return;
        }
        let begun = Instant::now();
        match history::new_event_file(run, unix_time()) {
            Ok(path) => {
                let emptied = history::empty_event_files(run, &path, unix_time());
                self.path = Some(path);
                self.has_old_numbers = emptied.is_err();
                self.write_waiting();
                if let Err(e) = emptied {
                    self.warning = Some(format!(
                        "an earlier event file cannot be emptied, so TensorBoard may show some numbers twice: {e}"
                    ));
                }
            }
            Err(fault) => self.failed(fault, false, begun.elapsed()),
        }
    }

    /// Leaves the event file: `create` writes another one.
    pub(super) fn renew(&mut self) {
        (self.path, self.file, self.length) = (None, None, None);
        self.waiting.clear();
        (self.waiting_bytes, self.dropped) = (0, 0);
    }

    /// A log that drops its lines.
    pub(super) fn none() -> Self {
        Self {
            path: None,
            run: None,
            file: None,
            length: None,
            synced: 0,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            dropped: 0,
            removals: Vec::new(),
            removed: false,
            gave_up: Vec::new(),
            needs_newline: false,
            has_old_numbers: false,
            failing: None,
            fault: None,
            note: None,
            warning: None,
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
        if self.is_time() {
            self.write_waiting();
        }
        self.drop_oldest();
    }

    fn is_time(&self) -> bool {
        self.failing
            .is_none_or(|failing| failing.last_try.elapsed() >= failing.pause())
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

    /// As `sync`, at the end of the run. If lines still cannot be removed, the others are written all the same.
    pub(super) fn last_try(&mut self) {
        self.sync();
        if !self.waiting.is_empty() && self.give_up_removals() {
            self.sync();
        }
    }

    /// Removes the lines of the evaluation of `step`, before the next line is written. All lines should be synced, if possible.
    pub(super) fn drop_evaluation(&mut self, step: u64) {
        if self.path.is_none() {
            return;
        }
        let removal = Removal::Evaluation(step);
        let stays = |line: &&[u8]| whole(line).is_none_or(|(at, value)| removal.keeps(at, &value));
        for bytes in &mut self.waiting {
            let before = bytes.len();
            let lines = bytes.split_inclusive(|byte| *byte == b'\n');
            let kept: Vec<u8> = lines.filter(stays).flatten().copied().collect();
            self.waiting_bytes -= (before - kept.len()) as u64;
            self.removed |= kept.len() < before;
            *bytes = kept;
        }
        self.waiting.retain(|bytes| !bytes.is_empty());
        if !self.removals.contains(&removal) {
            self.removals.push(removal);
        }
        self.write_waiting();
    }

    /// True if this line of a step, which is in the file, stays there and is not one that could not be removed.
    pub(super) fn keeps(&self, step: u64, line: &Value) -> bool {
        let mut removals = self.removals.iter().chain(&self.gave_up);
        removals.all(|removal| removal.keeps(step, line))
    }

    /// True if the file has a complete line of `step` with a key that starts with `key`, and `keeps` it.
    pub(super) fn has_evaluation(&self, step: u64, key: &str) -> bool {
        let Some(path) = &self.path else { return false };
        let is_it = |at: u64, line: &Value| at == step && is_evaluation(line, key) && self.keeps(at, line);
        let mut found = false;
        let read = each_line(path, |line| {
            found |= whole(line).is_some_and(|(at, line)| is_it(at, &line));
            Ok(())
        });
        read.is_ok() && found
    }

    /// True if lines were removed since the last call.
    pub(super) fn take_removed(&mut self) -> bool {
        std::mem::take(&mut self.removed)
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

    pub(super) fn take_warning(&mut self) -> Option<String> {
        self.warning.take()
    }

    /// Tries to write the lines that wait, if there are any.
    fn write_waiting(&mut self) {
        if self.path.is_none() {
            return;
        }
        let begun = Instant::now();
        match self.try_waiting() {
            Ok(()) if self.failing.is_some_and(|failing| failing.at_sync) => {}
            Ok(()) => self.recovered(),
            Err(fault) => self.failed(fault, false, begun.elapsed()),
        }
    }

    fn try_waiting(&mut self) -> Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        while let Some(removal) = self.removals.first().copied() {
            // The fault may have left a part of a line, or lines that wait now.
            if let (None, Some(length)) = (&self.file, self.length) {
                AppendFile::continue_at(path, length)?;
            }
            let changed = removal.apply(path)?;
            self.removals.remove(0);
            // Another file may have the name now.
            self.file = None;
            if changed {
                self.length = None;
            }
            // A try that failed may have changed the file, too.
            self.removed |= changed || self.failing.is_some();
        }
        if self.file.is_none() {
            // The fault may have left a part of a line.
            let mut file = match self.length {
                Some(length) => AppendFile::continue_at(path, length)?,
                None => AppendFile::open(path)?,
            };
            if self.needs_newline {
                file.write(b"\n")?;
                self.needs_newline = false;
            }
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

    /// `time`: how long the try took.
    fn failed(&mut self, fault: Error, at_sync: bool, time: Duration) {
        self.file = None;
        let before = self.failing;
        self.failing = Some(Failing {
            last_try: Instant::now(),
            time,
            at_sync: at_sync || before.is_some_and(|failing| failing.at_sync),
        });
        if before.is_none() {
            self.fault = Some(fault);
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
        // The next try only writes, so the shortest wait before it is enough.
        self.failed(fault, true, Duration::ZERO);
    }

    fn recovered(&mut self) {
        if self.failing.take().is_none() {
            return;
        }
        let place = self.path.as_deref().unwrap_or(Path::new("")).display();
        let dropped = std::mem::take(&mut self.dropped);
        let mut note = match dropped {
            0 => format!("{place} is written again, with all lines"),
            _ => format!(
                "{place} is written again; {} of its lines are missing",
                units::bytes(dropped)
            ),
        };
        if !self.gave_up.is_empty() {
            note.push_str("; old lines could not be removed, so some may be in it twice");
        }
        self.note = Some(note);
    }

    /// A line that is in the file twice is better than lines that are missing. True if there was something to give up.
    fn give_up_removals(&mut self) -> bool {
        if self.removals.is_empty() {
            return false;
        }
        self.gave_up.append(&mut self.removals);
        self.needs_newline |= self.length.is_none();
        true
    }

    fn drop_oldest(&mut self) {
        if self.waiting_bytes > MOST_WAITING && self.give_up_removals() {
            self.write_waiting();
        }
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

/// Removes incomplete lines from the end of a file. True if there were some.
fn drop_torn(path: &Path) -> Result<bool> {
    if !path.exists() {
        return Ok(false);
    }
    let (mut at, mut end) = (0, 0);
    each_line(path, |line| {
        at += line.len() as u64;
        if line.ends_with(b"\n") && serde_json::from_slice::<Value>(line).is_ok() {
            end = at;
        }
        Ok(())
    })?;
    if end < at {
        cut(path, end)?;
    }
    Ok(end < at)
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

/// Step and numbers of the evaluations in `metrics.jsonl`, in order. An evaluation may have more than one line; of a number that is
/// there twice, because a line could not be removed, the later one counts.
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
        let all = found.entry(step).or_default();
        for (name, number) in numbers.filter(|(name, _)| name.starts_with("eval_")) {
            all.retain(|(other, _)| *other != name);
            all.push((name, number));
        }
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

/// Removes the other lines. Only if one that stays follows one that goes, the file is written again. True if there were some.
fn keep_lines(path: &Path, keep: impl Fn(u64, &Value) -> bool) -> Result<bool> {
    if !path.exists() {
        return Ok(false);
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
    let Some(first) = first else { return Ok(false) };
    if !stays_after {
        cut(path, first)?;
        return Ok(true);
    }
    let mut out = AtomicFile::create(path)?;
    each_line(path, |line| if stays(line) { out.write(line) } else { Ok(()) })?;
    out.commit()?;
    Ok(true)
}

#[cfg(test)]
mod tests;
