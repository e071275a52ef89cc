//! A lock during a long run: whether it still protects its directory. Other programs remove old files, and a network mount
//! fails for a moment: neither may end the run.

use super::RunLock;
use crate::{Error, ErrorKind, Result};
use std::fs::{File, FileTimes, Metadata, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// So many looks at the directory that fail one after the other, for this time, are an error. Until then a run goes on: nothing is
/// written at a wrong place, because a save into a directory that cannot be reached fails itself.
const FAILED: u32 = 300;
const PATIENCE: Duration = Duration::from_secs(300);

/// An open file or directory with its device and number, which no other one gets as long as it is open.
#[derive(Debug)]
pub(super) struct KeptFile {
    file: File,
    id: (u64, u64),
}

impl KeptFile {
    fn new(file: File) -> io::Result<Self> {
        let found = file.metadata()?;
        let id = (found.dev(), found.ino());
        Ok(Self { file, id })
    }

    /// Writes the content of a lock file.
    pub(super) fn write(mut file: File, line: &str) -> io::Result<Self> {
        file.set_len(0)?;
        file.rewind()?;
        file.write_all(line.as_bytes())?;
        Self::new(file)
    }

    /// Opens a directory; follows links.
    pub(super) fn directory(path: &Path) -> io::Result<Self> {
        Self::new(
            OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_DIRECTORY)
                .open(path)?,
        )
    }

    /// True if `found` has the properties of this file, under whatever name. The own properties are not asked again: that
    /// could fail.
    pub(super) fn is(&self, found: &Metadata) -> bool {
        (found.dev(), found.ino()) == self.id
    }

    /// Where it is now, also after it was moved.
    fn path(&self) -> Option<PathBuf> {
        let now = std::fs::read_link(format!("/proc/self/fd/{}", self.file.as_raw_fd())).ok()?;
        let is_there = now.symlink_metadata().is_ok_and(|found| self.is(&found));
        is_there.then_some(now)
    }
}

/// The directory of a file.
pub(super) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

impl RunLock {
    /// Checks that the lock still protects the directory with this name. If only the file was removed, it is written and
    /// locked again: true. A few looks that fail in a row are no error: false, as if all is in order.
    ///
    /// # Errors
    /// The directory was moved, removed or replaced since it was locked: writes by name would go elsewhere. Another process
    /// has locked it in the meantime. Many looks in a row have failed.
    pub fn check(&mut self) -> Result<bool> {
        let found = self.path.symlink_metadata();
        if found.as_ref().is_ok_and(|found| self.file.is(found)) {
            (self.failed, self.failing_since) = (0, None);
            return Ok(false);
        }
        match parent(&self.path).metadata() {
            Ok(now) if self.directory.is(&now) => {}
            Ok(_) => return Err(self.moved()),
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Err(self.moved());
            }
            Err(e) => return self.tolerate(self.out_of_reach(e)),
        }
        match found {
            Err(e) if e.kind() != io::ErrorKind::NotFound => self.tolerate(self.out_of_reach(e)),
            // It is missing, or another file has its name.
            _ => match self.lock_again() {
                Err(e) if e.kind() == ErrorKind::Io => self.tolerate(e),
                locked => {
                    locked?;
                    (self.failed, self.failing_since) = (0, None);
                    Ok(true)
                }
            },
        }
    }

    /// Makes the file as recent as the work in the directory: some disks lose their old files.
    pub fn touch(&self) {
        let now = SystemTime::now();
        // `check` writes the file again if it is removed all the same.
        let _ = self
            .file
            .file
            .set_times(FileTimes::new().set_accessed(now).set_modified(now));
    }

    /// Locks a file with the same content. One that another process has written since is left as it is: that process may have
    /// changed the run.
    fn lock_again(&mut self) -> Result<()> {
        let removed = "`run.lock` of this run was removed by another program";
        let because = |e: Error| if e.kind() == ErrorKind::Io { e } else { e.cause(removed) };
        let (mut file, made) = Self::take(&self.path, self.words).map_err(because)?;
        let cannot = |e| super::cannot(&self.path, self.words, e);
        if !made {
            let mut text = String::new();
            file.read_to_string(&mut text).map_err(cannot)?;
            // A full disk leaves the start of the own line.
            if !self.line.starts_with(&text) {
                return Err(
                    Error::new("another process has locked the run directory in the meantime")
                        .at_path(&self.path)
                        .found(text.trim())
                        .expected(self.line.trim())
                        .cause(removed)
                        .hint("check what is in the directory, then continue the run"),
                );
            }
        }
        self.file = KeptFile::write(file, &self.line).map_err(cannot)?;
        Ok(())
    }

    fn moved(&self) -> Error {
        let error = Error::new("the run directory was moved or removed during the run").at_path(parent(&self.path));
        match self.directory.path() {
            Some(now) => error
                .found(format!("it at {}", now.display()))
                .hint("move it back, or continue the run there"),
            None => error.hint("the saved state is in the moved directory"),
        }
    }

    fn out_of_reach(&self, e: io::Error) -> Error {
        let directory = parent(&self.path);
        Error::io("the run directory cannot be reached")
            .at_path(directory)
            .cause(e)
            .hint(format!(
                "when `stat {}` works again, continue the run",
                directory.display()
            ))
    }

    /// Counts a look that failed with this error.
    fn tolerate(&mut self, e: Error) -> Result<bool> {
        self.failed = self.failed.saturating_add(1);
        let since = *self.failing_since.get_or_insert_with(Instant::now);
        if self.failed < FAILED || since.elapsed() < PATIENCE {
            return Ok(false);
        }
        Err(e.found(format!("a failure at each of {} attempts", self.failed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::{LockState, NAME, is_recent, state};
    use std::os::unix::fs::symlink;

    /// Row C10.
    #[test]
    fn a_lock_file_that_was_removed_is_written_and_locked_again() {
        let dir = tempfile::tempdir().unwrap();
        let (run, path) = (dir.path(), dir.path().join(NAME));
        let mut lock = RunLock::acquire(run).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(!lock.check().unwrap());
        // A second time too.
        for _ in 0..2 {
            std::fs::remove_file(&path).unwrap();
            assert!(lock.check().unwrap(), "the caller can say it");
            assert!(!lock.check().unwrap(), "it is there");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
            assert_eq!(state(run), LockState::Held);
            let e = RunLock::acquire(run).unwrap_err().to_string();
            assert!(e.contains("in progress") && e.contains(text.trim()), "{e}");
        }
        // A copy of the file, as after a restore, or its start, as after a full disk.
        for content in [&text[..], &text[..10], ""] {
            std::fs::remove_file(&path).unwrap();
            std::fs::write(&path, content).unwrap();
            assert!(lock.check().unwrap());
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
            assert!(RunLock::acquire(run).is_err());
        }
        std::fs::remove_file(&path).unwrap();
        assert!(lock.check().unwrap());
        lock.abandon().unwrap();
        assert!(!path.exists());
    }

    /// Row C10.
    #[test]
    fn a_lock_of_another_process_in_the_place_of_a_removed_one_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let (run, path) = (dir.path(), dir.path().join(NAME));
        let mut lock = RunLock::acquire(run).unwrap();
        std::fs::remove_file(&path).unwrap();
        let other = RunLock::acquire(run).unwrap();
        let e = lock.check().unwrap_err().to_string();
        assert!(e.contains("another run is in progress"), "{e}");
        assert!(e.contains("was removed by another program"), "{e}");
        drop(other);
        // It has ended, but it may have changed the run.
        let line = "process 7 since 2026-01-01 00:00:00 UTC\n";
        std::fs::write(&path, line).unwrap();
        for _ in 0..2 {
            let e = lock.check().unwrap_err().to_string();
            assert!(e.contains("in the meantime") && e.contains("process 7"), "{e}");
        }
        std::fs::write(&path, "my notes").unwrap();
        let e = lock.check().unwrap_err().to_string();
        assert!(e.contains("that ft did not write"), "{e}");
        lock.abandon().unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "my notes");
    }

    /// Row C7.
    #[test]
    fn a_directory_that_cannot_be_reached_for_a_moment_does_not_end_the_run() {
        let dir = tempfile::tempdir().unwrap();
        let (run, moved) = (dir.path().join("run"), dir.path().join("moved"));
        std::fs::create_dir(&run).unwrap();
        let mut lock = RunLock::acquire(&run).unwrap();
        let fail = |lock: &mut RunLock, times: u32| {
            std::fs::rename(&run, &moved).unwrap();
            // A link to itself: the look fails, also for root.
            symlink(&run, &run).unwrap();
            for _ in 0..times {
                assert!(!lock.check().unwrap());
            }
            let next = (times == FAILED - 1).then(|| {
                assert!(!lock.check().unwrap(), "within a moment");
                lock.failing_since = lock.failing_since.and_then(|since| since.checked_sub(PATIENCE));
                lock.check()
            });
            std::fs::remove_file(&run).unwrap();
            std::fs::rename(&moved, &run).unwrap();
            next
        };
        assert!(fail(&mut lock, FAILED - 2).is_none());
        assert!(!lock.check().unwrap());
        // Those of before do not count.
        let e = fail(&mut lock, FAILED - 1).unwrap().unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Io);
        let e = e.to_string();
        let code = format!("os error {}", libc::ELOOP);
        assert!(e.contains("cannot be reached") && e.contains(&code), "{e}");
        assert!(e.contains(&format!("{} attempts", FAILED + 1)), "{e}");
        // It is there again.
        assert!(!lock.check().unwrap());
        assert!(!lock.check().unwrap());
    }

    /// Row C7.
    #[test]
    fn a_directory_with_only_its_file_removed_is_still_found_after_a_move() {
        let dir = tempfile::tempdir().unwrap();
        let (above, moved) = (dir.path().join("above"), dir.path().join("moved"));
        let run = above.join("run");
        std::fs::create_dir_all(&run).unwrap();
        let mut lock = RunLock::acquire(&run).unwrap();
        std::fs::remove_file(run.join(NAME)).unwrap();
        std::fs::rename(&run, &moved).unwrap();
        for now in ["nothing", "a file above", "another directory"] {
            match now {
                "a file above" => {
                    std::fs::remove_dir(&above).unwrap();
                    std::fs::write(&above, "").unwrap();
                }
                "another directory" => {
                    std::fs::remove_file(&above).unwrap();
                    std::fs::create_dir_all(&run).unwrap();
                }
                _ => {}
            }
            let e = lock.check().unwrap_err().to_string();
            let place = moved.canonicalize().unwrap();
            assert!(e.contains("moved or removed"), "{now}: {e}");
            assert!(e.contains(place.to_str().unwrap()), "{now}: {e}");
        }
        assert!(!run.join(NAME).exists(), "nothing is written into another directory");
    }

    #[test]
    fn a_lock_is_as_recent_as_the_last_save() {
        let dir = tempfile::tempdir().unwrap();
        let lock = RunLock::acquire(dir.path()).unwrap();
        let path = dir.path().join(NAME);
        let old = SystemTime::now() - Duration::from_secs(90 * 24 * 60 * 60);
        let times = FileTimes::new().set_accessed(old).set_modified(old);
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_times(times)
            .unwrap();
        let found = path.metadata().unwrap();
        assert!(!is_recent(found.modified().unwrap()) && !is_recent(found.accessed().unwrap()));
        lock.touch();
        let found = path.metadata().unwrap();
        assert!(is_recent(found.modified().unwrap()) && is_recent(found.accessed().unwrap()));
    }
}
