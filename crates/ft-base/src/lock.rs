//! One run per directory: an advisory lock on `run.lock`, which the system releases when the process ends.

mod holder;
mod kept;

pub use holder::{LockState, state};

use crate::{Error, Result, files};
use holder::{is_elsewhere, line, process_in};
use kept::KeptFile;
use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// Name of the lock file.
pub const NAME: &str = "run.lock";

/// Name of the file that marks a directory as used.
pub(crate) const USED: &str = "used";

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Most bytes of a line that says who holds a lock.
const LINE: u64 = 200;

/// How often a file is opened again because another process has removed it before it was locked.
pub(crate) const TRIES: usize = 1000;

/// True if the file at a path, of which `found` has the properties, is this open file: a lock on a file that was removed or
/// renamed protects nothing.
pub(crate) fn is_same(file: &File, found: std::io::Result<Metadata>) -> bool {
    let same = |a: Metadata, b: Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    file.metadata()
        .is_ok_and(|own| found.is_ok_and(|found| same(own, found)))
}

/// The error of a lock that the system refuses, with what is missing if its file system has no locks.
pub(crate) fn refused(error: Error, e: std::io::Error) -> Error {
    let without_locks = matches!(e.raw_os_error(), Some(libc::ENOSYS | libc::ENOLCK | libc::EOPNOTSUPP));
    let error = error.cause(e);
    if without_locks {
        error.expected("a file system with locks (`flock`)")
    } else {
        error
    }
}

/// True for a time less than a day ago: what is newer may belong to a process that cannot be seen from here.
pub(crate) fn is_recent(time: SystemTime) -> bool {
    // A time in the future, of a machine with another clock, is recent.
    time.elapsed().unwrap_or_default() < DAY
}

/// Marks a directory as used: many processes hold the mark, and a process that removes the directory holds it alone. Its
/// time of change is that of the last use. Held until this value is dropped.
#[derive(Debug)]
pub struct UseMark {
    file: File,
    path: PathBuf,
}

impl UseMark {
    fn open(path: &Path) -> std::io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)
    }

    /// Marks a directory as used now, and makes it if it does not exist.
    ///
    /// # Errors
    /// The mark cannot be written.
    pub fn hold(directory: &Path) -> Result<Self> {
        let path = directory.join(USED);
        let cannot = || Error::io("cannot mark the directory as used").at_path(&path);
        for _ in 0..TRIES {
            files::create_dir_all(directory)?;
            let file = match Self::open(&path) {
                // Another process has just removed the directory.
                Err(e) if e.kind() == ErrorKind::NotFound => continue,
                opened => opened.map_err(|e| cannot().cause(e))?,
            };
            // A disk without locks has no other processes that remove the directory.
            let _ = file.lock_shared();
            if is_same(&file, path.symlink_metadata()) {
                let _ = file.set_modified(SystemTime::now());
                return Ok(Self { file, path });
            }
        }
        Err(cannot().found("another file at each try"))
    }

    /// Writes the process and its machine into the mark, for machines that do not see its lock.
    ///
    /// # Errors
    /// The mark cannot be written.
    pub(crate) fn sign(&mut self) -> Result<()> {
        let mut write = || {
            self.file.set_len(0)?;
            self.file.rewind()?;
            self.file.write_all(line().as_bytes())?;
            // Other machines read what is stored.
            self.file.sync_all()
        };
        write().map_err(|e| {
            Error::io("cannot mark the directory as used")
                .at_path(&self.path)
                .cause(e)
        })
    }

    /// True if a process on another machine or in another container has signed the mark less than a day ago. Whether it still
    /// holds the mark cannot be seen from here: some file systems have locks that are valid on one machine only.
    pub(crate) fn is_elsewhere(directory: &Path) -> bool {
        let path = directory.join(USED);
        path.symlink_metadata().is_ok_and(|m| m.is_file() && m.len() < LINE)
            && Self::last(directory).is_some_and(is_recent)
            && files::read_text(&path).is_ok_and(|text| is_elsewhere(&text))
    }

    /// The mark, if no process holds it.
    pub fn alone(directory: &Path) -> Option<Self> {
        let path = directory.join(USED);
        let file = Self::open(&path).ok()?;
        let alone = file.try_lock().is_ok() && is_same(&file, path.symlink_metadata());
        alone.then_some(Self { file, path })
    }

    /// The time of the last use.
    pub fn last(directory: &Path) -> Option<SystemTime> {
        directory.join(USED).metadata().and_then(|of| of.modified()).ok()
    }

    /// Removes the mark, but not that of a process that has made the directory again.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn remove(self) -> Result<()> {
        if is_same(&self.file, self.path.symlink_metadata()) {
            files::remove_file(&self.path)
        } else {
            Ok(())
        }
    }
}

/// What the errors of a lock say about a directory that is not of a run.
#[derive(Debug, Clone, Copy)]
pub struct LockWords {
    /// The error if another process holds the lock.
    pub busy: &'static str,
    /// What the user can do without waiting.
    pub instead: &'static str,
}

/// What the user can do if the directory cannot be locked.
fn instead(words: Option<LockWords>) -> &'static str {
    words.map_or("use another directory for the run", |w| w.instead)
}

/// The error of a directory that the system does not lock.
fn cannot(path: &Path, words: Option<LockWords>, e: std::io::Error) -> Error {
    let error = Error::io("cannot lock the directory").at_path(path);
    refused(error.hint(instead(words)), e)
}

/// The lock is held until this value is dropped.
#[derive(Debug)]
pub struct RunLock {
    file: KeptFile,
    directory: KeptFile,
    path: PathBuf,
    /// The content of the file.
    line: String,
    words: Option<LockWords>,
    made: bool,
    /// How many looks at the directory have failed since the last one that did not.
    failed: u32,
    /// The time of the first of them.
    failing_since: Option<Instant>,
}

impl RunLock {
    /// Locks a run directory for this process.
    ///
    /// # Errors
    /// Another process holds the lock (the message says which process and since when); `run.lock` was not made by ft.
    pub fn acquire(directory: &Path) -> Result<Self> {
        Self::acquire_with(directory, None)
    }

    /// As `acquire`, for a directory of something else.
    ///
    /// # Errors
    /// As `acquire`, with these words.
    pub fn acquire_as(directory: &Path, words: LockWords) -> Result<Self> {
        Self::acquire_with(directory, Some(words))
    }

    fn acquire_with(directory: &Path, words: Option<LockWords>) -> Result<Self> {
        let path = directory.join(NAME);
        // First: if no more files can be opened, no lock file stays behind.
        let directory = KeptFile::directory(kept::parent(&path)).map_err(|e| cannot(&path, words, e))?;
        let (file, made) = Self::take(&path, words)?;
        let line = line();
        let file = KeptFile::write(file, &line).map_err(|e| cannot(&path, words, e))?;
        Ok(Self {
            file,
            directory,
            path,
            line,
            words,
            made,
            failed: 0,
            failing_since: None,
        })
    }

    /// Makes or opens the file and locks it. Returns it, and whether it was made; its content is that of before.
    fn take(path: &Path, words: Option<LockWords>) -> Result<(File, bool)> {
        for _ in 0..TRIES {
            if let Some(taken) = Self::try_take(path, words)? {
                return Ok(taken);
            }
        }
        Err(Error::io("cannot lock the directory")
            .at_path(path)
            .found("another file at each try")
            .expected("one that no other program removes")
            .hint(instead(words)))
    }

    /// `None`: another process has made or removed the file in the meantime.
    fn try_take(path: &Path, words: Option<LockWords>) -> Result<Option<(File, bool)>> {
        let busy = words.map_or("another run is in progress in this directory", |w| w.busy);
        let instead = instead(words);
        let made = path.symlink_metadata().is_err();
        if !made && !is_lock(path) {
            if path.symlink_metadata().is_err() {
                return Ok(None);
            }
            return Err(Error::format("the directory has a `run.lock` that ft did not write")
                .at_path(path)
                .hint(instead));
        }
        let cannot = |e: std::io::Error| cannot(path, words, e);
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(made)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(path);
        let mut file = match opened {
            Err(e) if made && e.kind() == ErrorKind::AlreadyExists => return Ok(None),
            Err(e) if !made && e.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(cannot)?,
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                let _ = file.read_to_string(&mut holder);
                return Err(Error::new(busy)
                    .at_path(path)
                    .found(if holder.trim().is_empty() {
                        "a held lock".to_string()
                    } else {
                        holder.trim().to_string()
                    })
                    .hint(format!("wait for it to end, or {instead}")));
            }
            Err(TryLockError::Error(e)) => return Err(cannot(e)),
        }
        if !is_same(&file, path.symlink_metadata()) {
            return Ok(None);
        }
        Ok(Some((file, made)))
    }

    /// Removes the lock file if this call created it; used when the run is refused.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn abandon(self) -> Result<()> {
        if self.made && self.path.symlink_metadata().is_ok_and(|found| self.file.is(&found)) {
            files::remove_file(&self.path)
        } else {
            Ok(())
        }
    }
}

/// True if this is a lock file of ft, held or not, also one that was cut off: a full disk or a loss of power leaves the
/// start of its line, or zeros.
pub fn is_lock(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|m| m.is_file() && m.len() < LINE)
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

/// Process id of the last holder of the lock.
pub fn last_process(directory: &Path) -> Option<u32> {
    let path = directory.join(NAME);
    is_lock(&path).then(|| process_in(&files::read_text(&path).ok()?))?
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

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
        let mut lock = RunLock::acquire(&run).unwrap();
        assert!(!lock.check().unwrap());
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
        let mut lock = RunLock::acquire(&run).unwrap();
        std::fs::remove_dir_all(&run).unwrap();
        assert!(lock.check().is_err());
    }

    /// Row C10.
    #[test]
    fn a_lock_or_mark_on_a_removed_file_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let (held, taken) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let rounds = || {
            for _ in 0..3000 {
                let Ok(mut lock) = RunLock::acquire(dir.path()) else {
                    continue;
                };
                assert!(!lock.check().unwrap());
                assert_eq!(held.fetch_add(1, SeqCst), 0);
                taken.fetch_add(1, SeqCst);
                held.fetch_sub(1, SeqCst);
                // As `abandon` does.
                std::fs::remove_file(dir.path().join(NAME)).unwrap();
                drop(lock);
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(rounds))));
        assert!(taken.into_inner() > 100 && !dir.path().join(NAME).exists());

        let used = dir.path().join("set");
        drop(UseMark::hold(&used).unwrap());
        let alone = UseMark::alone(&used).unwrap();
        let waits = std::thread::scope(|scope| {
            let waits = scope.spawn(|| UseMark::hold(&used).unwrap());
            std::thread::sleep(std::time::Duration::from_millis(200));
            // As if it was removed, and used again by a third process.
            std::fs::remove_file(used.join(USED)).unwrap();
            std::fs::write(used.join(USED), "").unwrap();
            drop(alone);
            waits.join().unwrap()
        });
        assert!(is_same(&waits.file, waits.path.symlink_metadata()));
        assert!(UseMark::alone(&used).is_none(), "it is used");
    }

    #[test]
    fn a_file_system_without_locks_is_named() {
        let said = |number: i32| {
            let error = Error::io("cannot lock the directory");
            refused(error, std::io::Error::from_raw_os_error(number)).to_string()
        };
        for number in [libc::ENOSYS, libc::ENOLCK, libc::EOPNOTSUPP] {
            assert!(
                said(number).contains("expected a file system with locks"),
                "{}",
                said(number)
            );
        }
        assert!(
            !said(libc::EIO).contains("a file system with locks"),
            "{}",
            said(libc::EIO)
        );
        // The error of a directory that cannot be locked says what else the user can do.
        let dir = tempfile::tempdir().unwrap();
        let e = RunLock::acquire(&dir.path().join("missing")).unwrap_err();
        assert_eq!(e.hint_text(), Some("use another directory for the run"));
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
