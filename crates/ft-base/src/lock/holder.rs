//! The line of a run's lock: which process holds it, since when and on which machine; and whether it still does.

use super::{NAME, is_lock};
use crate::{files, units};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Ticks in a second in `/proc/<process>/stat`, the same on all machines on which ft runs.
const TICKS: u64 = 100;
/// The clock may have been set by so many seconds since the lock was written.
const SLACK: u64 = 60;

/// Whether a process holds the lock of a run directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LockState {
    /// No process of this machine.
    Free,
    /// A process of this machine.
    Held,
    /// A process on another machine or in another container wrote it last, and cannot be seen from here. The text names the
    /// machine.
    Elsewhere(String),
}

/// A machine, and a set of process ids on it: those of a container are not the same as those of the machine.
#[derive(Debug, PartialEq)]
struct ProcessPlace {
    host: String,
    namespace: u64,
}

impl ProcessPlace {
    /// `None`: not a name of a machine, or not a number.
    fn of(host: &str, namespace: &str) -> Option<Self> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        let valid = (1..=64).contains(&host.len()) && host.chars().all(plain);
        Some(Self {
            host: valid.then(|| host.to_string())?,
            namespace: namespace.parse().ok()?,
        })
    }

    /// That of this process. `None`: the system does not say it.
    fn own() -> Option<Self> {
        let host = files::read_text(Path::new("/proc/sys/kernel/hostname")).ok()?;
        let link = std::fs::read_link("/proc/self/ns/pid").ok()?;
        let namespace = link.to_str()?.strip_prefix("pid:[")?.strip_suffix(']')?;
        Self::of(host.trim(), namespace)
    }
}

/// What the line says.
struct LockLine<'a> {
    process: u32,
    since: &'a str,
    /// `None` in locks of earlier versions.
    place: Option<ProcessPlace>,
}

impl<'a> LockLine<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let (process, rest) = text.strip_prefix("process ")?.split_once(" since ")?;
        let rest = rest.trim_end();
        let (since, place) = rest.split_once(" on ").unwrap_or((rest, ""));
        let place = place.split_once(" (process namespace ").and_then(|(host, number)| {
            let number = number.strip_suffix(')')?;
            ProcessPlace::of(host, number)
        });
        Some(Self {
            process: process.parse().ok()?,
            since,
            place,
        })
    }

    /// The machine of the line, if it is not this one, or another container of this one.
    fn elsewhere(&self) -> Option<String> {
        self.elsewhere_than(ProcessPlace::own().as_ref())
    }

    /// As `elsewhere`, for a process at `own`. On a machine without a name, a line with a name is from another one.
    fn elsewhere_than(&self, own: Option<&ProcessPlace>) -> Option<String> {
        let its = self.place.as_ref()?;
        if Some(its) == own {
            return None;
        }
        let container = if own.is_some_and(|own| its.host == own.host) {
            ", in another container"
        } else {
            ""
        };
        Some(format!("{}{container}", its.host))
    }
}

/// True if a process on another machine or in another container wrote the line.
pub(super) fn is_elsewhere(text: &str) -> bool {
    LockLine::parse(text).is_some_and(|line| line.elsewhere().is_some())
}

/// The line for a lock of this process from now on.
pub(super) fn line() -> String {
    let since = units::utc(SystemTime::now());
    // Readers of earlier versions take all behind "since" as the time.
    let place = ProcessPlace::own().map_or(String::new(), |own| {
        format!(" on {} (process namespace {})", own.host, own.namespace)
    });
    format!("process {} since {since}{place}\n", std::process::id())
}

/// The process of a line.
pub(super) fn process_in(text: &str) -> Option<u32> {
    LockLine::parse(text).map(|line| line.process)
}

/// Whether the lock of a run directory is held. Does not touch the lock, so a run that starts at the same time is not
/// disturbed.
pub fn state(directory: &Path) -> LockState {
    let path = directory.join(NAME);
    let text = is_lock(&path).then(|| files::read_text(&path).ok()).flatten();
    let Some(line) = text.as_deref().and_then(LockLine::parse) else {
        return LockState::Free;
    };
    let open = has_open(line.process, &path);
    if open == Some(true) {
        return LockState::Held;
    }
    if let Some(place) = line.elsewhere() {
        return LockState::Elsewhere(place);
    }
    // The process of another user, if it is not a later one with the same number.
    let other = open.is_none() && Path::new(&format!("/proc/{}", line.process)).exists();
    if other && !began_after(line.process, line.since) {
        LockState::Held
    } else {
        LockState::Free
    }
}

/// Whether a process has this file open. `None`: there is no such process, or it is one of another user.
fn has_open(process: u32, path: &Path) -> Option<bool> {
    let entries = std::fs::read_dir(format!("/proc/{process}/fd")).ok()?;
    let own = path.metadata().ok()?;
    let mut open = entries
        .flatten()
        .filter_map(|entry| std::fs::metadata(entry.path()).ok());
    Some(open.any(|file| (file.dev(), file.ino()) == (own.dev(), own.ino())))
}

/// True if a process began after the time of a line: then it is not the one that wrote the line.
fn began_after(process: u32, since: &str) -> bool {
    let since = match since.strip_prefix("unix time ") {
        Some(seconds) => utc(seconds.trim().parse().unwrap_or(0)),
        None => since.to_string(),
    };
    // Times as text have the order of the times.
    began(process).is_some_and(|began| utc(began.saturating_sub(SLACK)) > since)
}

fn utc(seconds: u64) -> String {
    // Far years are of no use, and too large numbers overflow.
    units::utc(UNIX_EPOCH + Duration::from_secs(seconds.min(1 << 36)))
}

/// Unix seconds of the start of a process.
fn began(process: u32) -> Option<u64> {
    let read = |path: &str| files::read(Path::new(path)).ok();
    let of_process = read(&format!("/proc/{process}/stat"))?;
    // The name of the program is in brackets and may contain blanks and brackets.
    let text = String::from_utf8_lossy(&of_process);
    let ticks: u64 = text.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
    let of_system = read("/proc/stat")?;
    let text = String::from_utf8_lossy(&of_system);
    let boot: u64 = text
        .lines()
        .find_map(|line| line.strip_prefix("btime "))?
        .trim()
        .parse()
        .ok()?;
    Some(boot + ticks / TICKS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::{RunLock, last_process};

    fn write(directory: &Path, line: &str) {
        std::fs::write(directory.join(NAME), line).unwrap();
    }

    #[test]
    fn a_lock_says_its_machine_and_one_of_another_machine_is_elsewhere() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        assert_eq!(state(dir), LockState::Free);
        let lock = RunLock::acquire(dir).unwrap();
        let text = std::fs::read_to_string(dir.join(NAME)).unwrap();
        let own = ProcessPlace::own().unwrap();
        assert_eq!(LockLine::parse(&text).unwrap().place.unwrap(), own);
        assert!(text.len() < 200 && is_lock(&dir.join(NAME)), "{text}");
        assert_eq!(state(dir), LockState::Held);
        drop(lock);
        assert_eq!(state(dir), LockState::Free);

        let start = "process 1 since 2026-01-01 00:00:00 UTC";
        write(
            dir,
            &format!("{start} on another.host-1 (process namespace {})\n", own.namespace),
        );
        assert_eq!(state(dir), LockState::Elsewhere("another.host-1".into()));
        assert_eq!(last_process(dir), Some(1));
        write(dir, &format!("{start} on {} (process namespace 7)\n", own.host));
        let container = format!("{}, in another container", own.host);
        assert_eq!(state(dir), LockState::Elsewhere(container));
        RunLock::acquire(dir).unwrap();

        // A machine without a name.
        let there = LockLine::parse(&text).unwrap();
        assert_eq!(there.elsewhere_than(None), Some(own.host));
        assert_eq!(there.elsewhere_than(there.place.as_ref()), None);

        // Lines of earlier versions, lines that were cut off, and names that are none.
        let number = u32::MAX;
        for rest in [
            "",
            " on another",
            " on a\u{1b}[31m (process namespace 7)",
            " on  (process namespace 7)",
        ] {
            write(dir, &format!("process {number} since 2026-01-01 00:00:00 UTC{rest}"));
            assert_eq!(state(dir), LockState::Free, "{rest}");
            assert_eq!(last_process(dir), Some(number), "{rest}");
        }
    }

    #[test]
    fn a_later_process_with_the_number_of_a_holder_is_another_one() {
        let own = std::process::id();
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let began = began(own).unwrap();
        assert!(began <= since + SLACK && began + 86_400 > since, "{began} {since}");
        assert!(began_after(own, "2020-01-01 00:00:00 UTC") && began_after(own, "unix time 1700000000"));
        assert!(!began_after(own, &utc(since)) && !began_after(own, &format!("unix time {since}")));
        assert!(
            !began_after(u32::MAX, "2020-01-01 00:00:00 UTC"),
            "there is no such process"
        );
    }
}
