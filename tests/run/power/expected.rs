//! What a file operation that fails requires, by its path: an error, a warning, or nothing.

use crate::bench::said;
use crate::disk::Operation;
use std::process::Output;

/// What has to follow an operation that fails.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Due {
    /// Exit code 1, and an error that names the path or its directory: all that a later start or the user needs.
    Error,
    /// The run goes on, and a warning names the path.
    Warning,
    /// The run goes on, and needs no message.
    Nothing,
}

/// Files of a run that its result does not need: "never blocks or fails a step".
const LOGS: [&str; 4] = [
    "run/metrics.jsonl",
    "run/events.jsonl",
    "run/samples.jsonl",
    "run/curves.svg",
];

/// The event files of TensorBoard: their names contain a time.
const EVENT_FILES: &str = "run/events.out.tfevents.";

fn is_log(path: &str) -> bool {
    LOGS.contains(&path) || path.starts_with(EVENT_FILES)
}

/// The mark of a directory that ft may remove.
const MARK: &str = ".ft-temporary";

/// Splits a path into its directory and its name.
fn parts(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

/// The path that gets the contents of a temporary file.
fn lasting(path: &str) -> &str {
    let (_, name) = parts(path);
    let cut = name.find(".tmp-").map_or(0, |at| name.len() - at);
    &path[..path.len() - cut]
}

/// The directory of a checkpoint below `run`, and its step if that is a temporary name.
fn of_checkpoint(path: &str) -> Option<(&str, Option<u64>)> {
    let name = path.strip_prefix("run/")?.split('/').next()?;
    let rest = name.strip_prefix("checkpoint-")?;
    Some((name, rest.split_once(".tmp-").and_then(|(step, _)| step.parse().ok())))
}

/// True if the operation belongs to a save of one of these steps, or its rotation. The rehearsal of the first step is none, and neither
/// is a checkpoint that is brought from another run.
fn is_of_save(operation: &Operation, before: &[Operation], (first, last): (u64, u64)) -> bool {
    // After the rehearsal the first event is written.
    let is_running = |o: &Operation| o.path == "run/events.jsonl" && o.what != 'u';
    if !before.iter().any(is_running) {
        return false;
    }
    // Only a save makes such a directory.
    let mut made = std::iter::once(operation).chain(before.iter().rev());
    let step = made.find_map(|o| of_checkpoint(&o.path).filter(|_| o.what == 'm')?.1);
    let is_in = |path: &str| of_checkpoint(path).is_some();
    // The run directory is synced for the name of a checkpoint.
    let of_name = operation.what == 's' && operation.path == "run";
    let is_name = of_name && before.last().is_some_and(|o| is_in(&o.path) || is_in(&o.other));
    step.is_some_and(|step| (first..=last).contains(&step)) && (is_in(&operation.path) || is_name)
}

/// `before`: the operations before this one. `saves`: the first and the last step of the saves, if a full disk is the fault: the run
/// goes on after a save that failed.
pub fn due(operation: &Operation, before: &[Operation], saves: Option<(u64, u64)>) -> Due {
    let Operation { what, path, .. } = operation;
    let (dir, name) = parts(path);
    // Only what is being removed was given a temporary name, or has got one in exchange.
    let is_removed = |dir: &str| {
        let mut done = before.iter().filter(|o| !o.failed);
        done.any(|o| (o.what == 'r' && o.other == dir) || (o.what == 'x' && o.path == dir))
    };
    // It is computed again.
    let is_cache = path == "cache" || path.starts_with("cache/");
    // The rest of a file that could not be written, which is an error already: the next start removes it.
    let is_rest = *what == 'u' && name.contains(".tmp-");
    // The mark of a directory that is being removed, and the sync of its name: without space for it the removal goes on.
    let is_mark = name.starts_with(MARK) && matches!(what, 'c' | 'w' | 's' | 'r') && is_removed(dir);
    let is_its_sync = *what == 's' && name.contains(".tmp-") && is_removed(path);
    // The end of a directory for temporary files: the result has its name already.
    let is_scratch = |dir: &str| {
        let lock = format!("{dir}/used");
        before.iter().any(|o| o.what == 'c' && !o.failed && o.path == lock)
    };
    let is_end = dir.contains(".tmp-") && *what == 'u' && is_scratch(dir) || *what == 'd' && is_scratch(path);
    // The result is there already.
    let is_previous = matches!(what, 'u' | 'd') && path.starts_with("run/final.left");
    // The directory is synced for the name of a log.
    let of_log = *what == 's' && path == "run" && before.last().is_some_and(|o| is_log(&o.other));
    let is_refused = saves.is_some_and(|saves| is_of_save(operation, before, saves));
    // The file is copied instead.
    let is_link = *what == 'h';
    // Only a run in place of an earlier one removes them.
    let is_of_earlier_run = *what == 'u' && is_log(path);
    // An event file whose name could not be synced: another one takes its place.
    let is_replaced = *what == 'u' && path.starts_with(EVENT_FILES) && before.iter().any(|o| o.other == *path);
    // The removal of the files of a save that failed.
    let own = of_checkpoint(path);
    let mut failed = before.iter().filter(|o| o.failed);
    let is_removal = matches!(what, 'u' | 'd')
        && own.is_some_and(|own| own.1.is_some())
        && failed.any(|o| of_checkpoint(&o.path) == own);
    if is_cache || is_rest || is_mark || is_its_sync || is_end || is_link || is_replaced || is_refused && is_removal {
        Due::Nothing
    } else if is_of_earlier_run {
        Due::Error
    } else if is_refused || of_log || is_previous || is_log(lasting(path)) {
        Due::Warning
    } else {
        Due::Error
    }
}

/// True if lines of a log may be lost with the power: its sync failed, or that of the directory for the name of a log, which had to
/// write the names of the others too.
pub fn may_lose_lines(done: &[Operation], out: &Output) -> bool {
    let is_name = |at: usize| {
        let Operation { what, path, failed, .. } = &done[at];
        *failed && *what == 's' && path == "run" && is_log(&done[at - 1].other)
    };
    said(out).contains("jsonl") || (1..done.len()).any(is_name)
}

/// The places (`--> ...`) in the messages with this label.
fn places<'a>(text: &'a str, label: &str) -> Vec<&'a str> {
    let (mut is_own, mut out) = (false, Vec::new());
    for line in text.lines() {
        if !line.starts_with(' ') {
            is_own = line.starts_with(label);
        }
        out.extend(line.trim_start().strip_prefix("--> ").filter(|_| is_own));
    }
    out
}

/// True if one of the places is the path of the operation, the one that it was to become, or the directory.
fn names(operation: &Operation, places: &[&str]) -> bool {
    let Operation { path, other, .. } = operation;
    let mut all = vec![if path.is_empty() { "." } else { parts(path).0 }];
    for path in [path, other] {
        all.extend([
            path.as_str(),
            lasting(path),
            path.split(".tmp-").next().unwrap_or_default(),
        ]);
    }
    all.retain(|name| !name.is_empty());
    // Each try gives the event file another name, and one warning is for all.
    let is_event_file = path.starts_with(EVENT_FILES);
    let is_in = |place: &str| {
        let is_named = |name: &&str| place == *name || place.ends_with(&format!("({name})"));
        all.iter().any(is_named) || is_event_file && place.contains(EVENT_FILES)
    };
    places.iter().any(|place| is_in(place))
}

/// Asserts the exit code and the messages that are due for the operations of `done` that failed. The number of them.
/// `saves`: as for `due`.
pub fn assert_expected(done: &[Operation], out: &Output, saves: Option<(u64, u64)>) -> usize {
    let text = said(out);
    let code = out.status.code();
    let lines: Vec<&str> = text.lines().collect();
    let end = lines[lines.len().saturating_sub(12)..].join("\n");
    let failed = (0..done.len()).filter(|at| done[*at].failed);
    let failed: Vec<_> = failed
        .map(|at| (&done[at], due(&done[at], &done[..at], saves)))
        .collect();
    let fatal = failed.iter().position(|(_, due)| *due == Due::Error);
    // What fails behind an error is part of its end.
    for (operation, due) in &failed[..fatal.map_or(failed.len(), |at| at + 1)] {
        let (expected, label) = match due {
            Due::Error => (Some(1), "error:"),
            Due::Warning => (code, "warning:"),
            Due::Nothing => continue,
        };
        assert!(
            code == expected && names(operation, &places(&text, label)),
            "{operation}: {due:?} is due, exit code {code:?}; the end of what ft said:\n{end}"
        );
    }
    if fatal.is_none() {
        let all: Vec<String> = failed.iter().map(|(operation, _)| operation.to_string()).collect();
        assert!(
            code == Some(0),
            "exit code {code:?}, but these may fail: {}; the end of what ft said:\n{end}",
            all.join(", ")
        );
    }
    failed.len()
}
