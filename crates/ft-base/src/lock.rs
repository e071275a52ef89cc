//! One run per directory: an advisory lock on `run.lock`, which the system releases when the process ends.

use crate::{Error, Result, files, units};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Name of the lock file.
pub const NAME: &str = "run.lock";

/// Name of the file that marks a directory as used.
const USED: &str = "used";

/// Marks a directory as used: many processes hold the mark, and a process that removes the directory holds it alone. Its
/// time of change is that of the last use. Held until this value is dropped.
#[derive(Debug)]
pub struct UseMark {
    file: File,
    path: PathBuf,
}

impl UseMark {
    fn open(directory: &Path) -> Result<Self> {
        let path = directory.join(USED);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let opened = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(&path);
        let file = opened.map_err(|e| Error::io("cannot mark the directory as used").at_path(&path).cause(e))?;
        Ok(Self { file, path })
    }

    /// Marks a directory as used now, and makes it if it does not exist.
    ///
    /// # Errors
    /// The mark cannot be written.
    pub fn hold(directory: &Path) -> Result<Self> {
        loop {
            files::create_dir_all(directory)?;
            let mark = Self::open(directory)?;
            // A disk without locks has no other processes that remove the directory.
            let _ = mark.file.lock_shared();
            let _ = mark.file.set_modified(std::time::SystemTime::now());
            // Another process may have removed it before.
            if mark.path.exists() {
                return Ok(mark);
            }
        }
    }

    /// The mark, if no process holds it.
    pub fn alone(directory: &Path) -> Option<Self> {
        let mark = Self::open(directory).ok()?;
        mark.file.try_lock().is_ok().then_some(mark)
    }

    /// The time of the last use.
    pub fn last(directory: &Path) -> Option<std::time::SystemTime> {
        directory.join(USED).metadata().and_then(|of| of.modified()).ok()
    }

    /// Removes the mark.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn remove(self) -> Result<()> {
        files::remove_file(&self.path)
    }
}

/// The lock is held until this value is dropped.
#[derive(Debug)]
pub struct RunLock {
    file: File,
    path: PathBuf,
    made: bool,
}

impl RunLock {
    /// Locks a run directory for this process.
    ///
    /// # Errors
    /// Another process holds the lock (the message says which process and since when); `run.lock` was not made by ft.
    pub fn acquire(directory: &Path) -> Result<Self> {
        let path = directory.join(NAME);
        let made = path.symlink_metadata().is_err();
        if !made && !is_lock(&path) {
            return Err(Error::format("the directory has a `run.lock` that ft did not write")
                .at_path(&path)
                .hint("use another directory for the run"));
        }
        let cannot = |e: std::io::Error| Error::io("cannot lock the run directory").at_path(&path).cause(e);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(&path)
            .map_err(cannot)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                let _ = file.read_to_string(&mut holder);
                return Err(Error::new("another run is in progress in this directory")
                    .at_path(&path)
                    .found(if holder.trim().is_empty() {
                        "a held lock".to_string()
                    } else {
                        holder.trim().to_string()
                    })
                    .hint("wait for it to end, or use another directory for the run"));
            }
            Err(TryLockError::Error(e)) => return Err(cannot(e)),
        }
        file.set_len(0).map_err(cannot)?;
        file.rewind().map_err(cannot)?;
        let since = units::utc(std::time::SystemTime::now());
        let line = format!("process {} since {since}\n", std::process::id());
        file.write_all(line.as_bytes()).map_err(cannot)?;
        Ok(Self { file, path, made })
    }

    /// Checks that the lock still protects the directory with this name.
    ///
    /// # Errors
    /// The directory was moved, removed or replaced since it was locked; writes by name would go elsewhere.
    pub fn check(&self) -> Result<()> {
        let same = |a: &std::fs::Metadata, b: &std::fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
        match (self.file.metadata(), self.path.symlink_metadata()) {
            (Ok(own), Ok(now)) if same(&own, &now) => Ok(()),
            _ => {
                let directory = self.path.parent().unwrap_or(Path::new("."));
                let error = Error::new("the run directory was moved or removed during the run").at_path(directory);
                Err(match self.found_at() {
                    Some(now) => error
                        .found(format!("it at {}", now.display()))
                        .hint("move it back, or continue the run there"),
                    None => error.hint("the saved state is in the moved directory"),
                })
            }
        }
    }

    /// Current location of the lock file.
    fn found_at(&self) -> Option<PathBuf> {
        let descriptor = std::os::fd::AsRawFd::as_raw_fd(&self.file);
        let now = std::fs::read_link(format!("/proc/self/fd/{descriptor}")).ok()?;
        (now.file_name()? == NAME && now.exists()).then(|| now.parent().map(Path::to_path_buf))?
    }

    /// Removes the lock file if this call created it; used when the run is refused.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn abandon(self) -> Result<()> {
        if self.made && self.check().is_ok() {
            files::remove_file(&self.path)
        } else {
            Ok(())
        }
    }
}

/// True if this is a lock file of ft, held or not, also one that was cut off: a full disk or a loss of power leaves the
/// start of its line, or zeros.
pub fn is_lock(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|m| m.is_file() && m.len() < 200)
        && files::read_text(path).is_ok_and(|text| process_in(&text).is_some() || is_start(text.trim_end_matches('\0')))
}

/// True for the start of a line of `acquire`, up to all of ` since `.
fn is_start(text: &str) -> bool {
    const PARTS: [&str; 2] = ["process ", " since "];
    let Some(rest) = text.strip_prefix(PARTS[0]) else {
        return PARTS[0].starts_with(text);
    };
    PARTS[1].starts_with(rest.trim_start_matches(|c: char| c.is_ascii_digit()))
}

/// True if a process of this machine holds the lock of a run directory. Does not touch the lock, so a run that starts at
/// the same time is not disturbed.
pub fn is_held(directory: &Path) -> bool {
    let Some(process) = last_process(directory) else {
        return false;
    };
    let open_files = format!("/proc/{process}/fd");
    let Ok(entries) = std::fs::read_dir(&open_files) else {
        // The process of another user, if it exists.
        return Path::new(&format!("/proc/{process}")).exists();
    };
    let Ok(own) = directory.join(NAME).metadata() else {
        return false;
    };
    let mut open = entries
        .flatten()
        .filter_map(|entry| std::fs::metadata(entry.path()).ok());
    open.any(|file| (file.dev(), file.ino()) == (own.dev(), own.ino()))
}

/// Process id of the last holder of the lock.
pub fn last_process(directory: &Path) -> Option<u32> {
    let path = directory.join(NAME);
    is_lock(&path).then(|| process_in(&files::read_text(&path).ok()?))?
}

fn process_in(text: &str) -> Option<u32> {
    text.strip_prefix("process ")?.split_once(" since ")?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_lock_is_refused_until_the_first_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let first = RunLock::acquire(dir.path()).unwrap();
        let second = RunLock::acquire(dir.path()).unwrap_err();
        assert!(second.to_string().contains("in progress"));
        assert!(second.to_string().contains(" UTC"), "{second}");
        assert_eq!(last_process(dir.path()), Some(std::process::id()));
        drop(first);
        RunLock::acquire(dir.path()).unwrap();
        RunLock::acquire(dir.path()).unwrap().abandon().unwrap();
        assert!(dir.path().join(NAME).exists(), "an earlier call has made it");
    }

    #[test]
    fn a_directory_that_moves_away_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let (run, moved) = (dir.path().join("run"), dir.path().join("moved"));
        std::fs::create_dir(&run).unwrap();
        let lock = RunLock::acquire(&run).unwrap();
        lock.check().unwrap();
        std::fs::rename(&run, &moved).unwrap();
        let e = lock.check().unwrap_err().to_string();
        assert!(
            e.contains("moved or removed") && e.contains(moved.to_str().unwrap()),
            "{e}"
        );
        std::fs::create_dir(&run).unwrap();
        drop(RunLock::acquire(&run).unwrap());
        assert!(lock.check().is_err(), "another directory has its name");
        lock.abandon().unwrap();
        std::fs::remove_dir_all(&moved).unwrap();
        let lock = RunLock::acquire(&run).unwrap();
        std::fs::remove_dir_all(&run).unwrap();
        assert!(lock.check().is_err());
    }

    /// Row C10.
    #[test]
    fn a_file_of_another_program_is_no_lock() {
        let dir = tempfile::tempdir().unwrap();
        let (target, lock) = (dir.path().join("target"), dir.path().join(NAME));
        std::fs::write(&target, "").unwrap();
        std::os::unix::fs::symlink(&target, &lock).unwrap();
        assert!(RunLock::acquire(dir.path()).is_err());
        std::fs::remove_file(&lock).unwrap();
        std::fs::write(&lock, "my notes").unwrap();
        assert!(RunLock::acquire(dir.path()).is_err());
        assert_eq!(std::fs::read_to_string(&lock).unwrap(), "my notes");
        for other in ["processes", "process x", "process 12 sin\0ce", "\0notes"] {
            std::fs::write(&lock, other).unwrap();
            assert!(RunLock::acquire(dir.path()).is_err(), "{other}");
        }
        // Remains of a lock after a loss of power or on a full disk.
        for torn in [
            "",
            "\0\0\0",
            "proc",
            "process ",
            "process 12",
            "process 12 si",
            "process 12\0\0",
        ] {
            std::fs::write(&lock, torn).unwrap();
            drop(RunLock::acquire(dir.path()).unwrap());
        }
        std::fs::write(&lock, "process 12 since unix time 1700000000\n").unwrap();
        assert_eq!(last_process(dir.path()), Some(12));
        RunLock::acquire(dir.path()).unwrap();
    }
}
