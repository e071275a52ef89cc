//! A directory for temporary files under a name of its own, which the process that made it holds.

use super::{all_in_use, discard, is_directory, is_marked, mark, remove_temporary, reserve};
use crate::lock::UseMark;
use crate::{Result, files};
use std::path::{Path, PathBuf};

/// A new marked directory for temporary files. It is removed on drop, and when a signal ends the process. If the process was
/// killed, `clean` removes it: no process holds its `UseMark` any more. Where locks are valid on one machine only, the mark says
/// which machine that is.
#[derive(Debug)]
pub struct ScratchDirectory {
    path: PathBuf,
    /// Held for the whole life. A process id does not show that: containers have processes with the same ids.
    _used: UseMark,
}

impl ScratchDirectory {
    /// Creates `<target>.tmp-<pid>`, and its parent if necessary. A name that is in use is left alone.
    ///
    /// # Errors
    /// The directory, its mark or its lock cannot be created.
    pub fn beside(target: &Path) -> Result<Self> {
        if let Some(parent) = target.parent().filter(|p| !p.as_os_str().is_empty()) {
            files::create_dir_all(parent)?;
        }
        let path = reserve(target)?.ok_or_else(|| all_in_use(target, files::TEMPORARY))?;
        // First the lock: another process may remove a marked directory that no process holds.
        let held = UseMark::hold(&path).and_then(|mut used| {
            used.sign()?;
            mark(&path)?;
            Ok(used)
        });
        match held {
            Ok(used) => Ok(Self { path, _used: used }),
            Err(e) => {
                discard(&path);
                Err(e)
            }
        }
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ScratchDirectory {
    fn drop(&mut self) {
        // If this fails, `clean` removes it.
        let _ = remove_temporary(&self.path);
        files::finished(&self.path);
    }
}

/// The use of a directory with a temporary name.
pub(super) enum Use {
    /// A process works in it, or may do so on another machine.
    Held,
    /// A `ScratchDirectory` of a process that has ended, which no other process can hold while this value lives.
    Left(UseMark),
    /// It has no lock.
    Unknown,
}

impl Use {
    pub(super) fn of(dir: &Path) -> Self {
        if !is_directory(dir) || UseMark::last(dir).is_none() {
            return Self::Unknown;
        }
        if UseMark::is_elsewhere(dir) {
            return Self::Held;
        }
        match UseMark::alone(dir) {
            Some(alone) if is_marked(dir) => Self::Left(alone),
            Some(_) => Self::Unknown,
            None => Self::Held,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CleanupReport, LeftoverOwner, MARKER, clean, remove_contents, remove_unused};
    use super::*;
    use std::collections::BTreeSet;
    use std::fs::File;
    use std::time::{Duration, SystemTime};

    fn is_name(name: &str) -> bool {
        name == "final" || name.starts_with("checkpoint-")
    }

    /// Changes the time of a file or directory to two days ago.
    fn make_old(path: &Path) {
        let before = SystemTime::now() - Duration::from_secs(2 * 24 * 60 * 60);
        File::open(path).unwrap().set_modified(before).unwrap();
    }

    /// A directory as a killed process leaves it.
    fn left(path: &Path) {
        std::fs::create_dir(path).unwrap();
        std::fs::write(path.join("used"), "").unwrap();
        mark(path).unwrap();
        std::fs::create_dir(path.join("model")).unwrap();
        std::fs::write(path.join("model/weights.bin"), "x").unwrap();
    }

    /// Row C10: containers have processes with the same ids.
    #[test]
    fn a_scratch_directory_takes_a_free_name_and_leaves_that_of_another_process() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("checkpoint-20");
        let now = files::temporary(&target);
        let now = now.to_str().unwrap();
        let number = now.rsplit_once(".tmp-").unwrap().1.split_once('-').map_or("0", |n| n.1);
        let next = number.parse::<usize>().unwrap() + 1;
        // The names that come next, also if other tests take some of them.
        let process = std::process::id();
        let taken: Vec<PathBuf> = (next..next + 200)
            .map(|n| dir.path().join(format!("checkpoint-20.tmp-{process}-{n}")))
            .collect();
        for path in &taken {
            std::fs::create_dir(path).unwrap();
            std::fs::write(path.join("model.bin"), "x").unwrap();
        }
        let scratch = ScratchDirectory::beside(&target).unwrap();
        let own = scratch.path().to_path_buf();
        assert!(is_marked(&own) && !taken.contains(&own), "{}", own.display());
        std::fs::create_dir(own.join("model")).unwrap();
        std::fs::write(own.join("model/a.txt"), "x").unwrap();
        drop(scratch);
        assert!(!own.exists());
        for path in &taken {
            let names: Vec<PathBuf> = files::list(path).unwrap();
            assert_eq!(names, [path.join("model.bin")], "unchanged");
        }
        // A directory that does not exist yet is made.
        let deep = ScratchDirectory::beside(&dir.path().join("deep/out")).unwrap();
        assert!(deep.path().parent().unwrap().ends_with("deep"));
    }

    /// Row C1.
    #[test]
    fn cleaning_removes_what_a_killed_process_left_and_nothing_that_is_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        // Of processes that the owner does not know.
        let dead = [d.join("checkpoint-5.tmp-77"), d.join("final.tmp-78-3")];
        dead.iter().for_each(|path| left(path));
        // Another name; no mark; a link.
        let others = ["notes.tmp-77", "checkpoint-6.tmp-77", "final.tmp-79"].map(|name| d.join(name));
        left(&others[0]);
        std::fs::create_dir(&others[1]).unwrap();
        std::fs::write(others[1].join("used"), "").unwrap();
        std::os::unix::fs::symlink(&others[0], &others[2]).unwrap();
        // This process is one of the owner, as one of another container with the same id would be.
        let live = ScratchDirectory::beside(&d.join("checkpoint-7")).unwrap();
        let processes = BTreeSet::from([std::process::id()]);
        let owner = LeftoverOwner {
            processes: &processes,
            is_name: &is_name,
            is_ours: &|_| false,
        };
        let cleaned = clean(d, &owner).unwrap();
        assert_eq!(cleaned.removed, dead);
        assert!(cleaned.left.is_empty() && cleaned.restored.is_empty(), "{cleaned:?}");
        assert!(is_marked(live.path()) && others.iter().all(|path| path.symlink_metadata().is_ok()));
        assert!(others[0].join("model/weights.bin").exists());
        drop(live);
        assert_eq!(clean(d, &owner).unwrap(), CleanupReport::default());
    }

    /// Row C1: another machine may not see the lock.
    #[test]
    fn a_scratch_directory_of_another_machine_stays_for_a_day() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let processes = BTreeSet::from([77]);
        let owner = LeftoverOwner {
            processes: &processes,
            is_name: &is_name,
            is_ours: &|_| false,
        };
        let other = d.join("checkpoint-5.tmp-77");
        left(&other);
        let used = other.join("used");
        // A mark that was written here has this machine in it.
        let live = ScratchDirectory::beside(&d.join("checkpoint-7")).unwrap();
        let line = std::fs::read_to_string(live.path().join("used")).unwrap();
        assert!(
            line.starts_with(&format!("process {} since ", std::process::id())),
            "{line}"
        );
        assert!(!UseMark::is_elsewhere(live.path()));
        drop(live);
        std::fs::write(
            &used,
            "process 77 since 2026-01-01 00:00:00 UTC on another-machine (process namespace 7)\n",
        )
        .unwrap();
        assert_eq!(clean(d, &owner).unwrap(), CleanupReport::default());
        assert!(!remove_unused(&other).unwrap() && other.join("model/weights.bin").exists());
        make_old(&used);
        assert_eq!(clean(d, &owner).unwrap().removed, [other]);
    }

    /// Row C1.
    #[test]
    fn a_removal_that_was_killed_leaves_nothing_that_stays_for_good() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let processes = BTreeSet::new();
        let owner = LeftoverOwner {
            processes: &processes,
            is_name: &is_name,
            is_ours: &|_| false,
        };
        // Killed before its end: the lock still says whose it is.
        let path = d.join("final.tmp-77");
        left(&path);
        std::fs::write(path.join("weights"), "x").unwrap();
        remove_contents(&path).unwrap();
        assert_eq!(files::list(&path).unwrap(), [path.join(MARKER), path.join("used")]);
        assert_eq!(clean(d, &owner).unwrap().removed, [path]);
        // Killed at its end. A new directory is empty too.
        let rest = [d.join("checkpoint-5.tmp-77"), d.join("checkpoint-6.tmp-77")];
        rest.iter().for_each(|path| std::fs::create_dir(path).unwrap());
        mark(&rest[0]).unwrap();
        assert_eq!(clean(d, &owner).unwrap(), CleanupReport::default());
        rest.iter().for_each(|path| make_old(path));
        assert_eq!(clean(d, &owner).unwrap().removed, rest);
    }
}
