//! A file that is completed over several runs: a download that can be resumed.

use crate::lock::{TRIES, is_same, refused};
use crate::{Error, Result, files, progress};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time between two tries to lock the file.
const PAUSE: Duration = Duration::from_millis(100);

/// One process at a time holds the file; the written bytes stay when it is dropped.
#[derive(Debug)]
pub struct PartialFile {
    file: File,
    path: PathBuf,
    length: u64,
}

impl PartialFile {
    /// Opens or creates the file; waits while another process writes it.
    ///
    /// # Errors
    /// The file cannot be opened or locked; a signal asked to stop.
    pub fn open(path: &Path) -> Result<Self> {
        let cannot = || Error::io("cannot open the partial download").at_path(path);
        for _ in 0..TRIES {
            let opened = OpenOptions::new().read(true).append(true).create(true).open(path);
            let file = opened.map_err(|e| cannot().cause(e))?;
            wait(&file, path)?;
            // The process before may have given it its final name.
            if is_same(&file, path.metadata()) {
                let length = file.metadata().map_err(|e| cannot().cause(e))?.len();
                let path = path.to_path_buf();
                return Ok(Self { file, path, length });
            }
        }
        Err(cannot().found("another file at each try"))
    }

    /// Where locks are valid on one machine only, another machine may complete or remove the file meanwhile.
    ///
    /// Errors: the open file is not the one with this name any more. A write would change the complete file.
    fn check(&self) -> Result<()> {
        if is_same(&self.file, self.path.metadata()) {
            return Ok(());
        }
        Err(Error::new("another process has moved or removed the partial download")
            .at_path(&self.path)
            .hint("run the same command again, when no other process downloads the same file"))
    }

    /// Number of bytes in the file.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Appends bytes at the end.
    ///
    /// # Errors
    /// The file cannot be written; another process has moved or removed it.
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.check()?;
        self.file
            .write_all(bytes)
            .map_err(|e| Error::io("cannot write the download").at_path(&self.path).cause(e))?;
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Discards the contents.
    ///
    /// # Errors
    /// The file cannot be truncated; another process has moved or removed it.
    pub fn clear(&mut self) -> Result<()> {
        self.check()?;
        self.file.set_len(0).map_err(|e| {
            Error::io("cannot empty the partial download")
                .at_path(&self.path)
                .cause(e)
        })?;
        self.length = 0;
        Ok(())
    }

    /// Passes the whole contents to `f`, piece by piece.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(&mut self, f: &mut dyn FnMut(&[u8])) -> Result<()> {
        let cannot = |e: std::io::Error| Error::io("cannot read the download").at_path(&self.path).cause(e);
        self.file.rewind().map_err(cannot)?;
        let mut buffer = vec![0u8; 1 << 20];
        loop {
            let n = self.file.read(&mut buffer).map_err(cannot)?;
            if n == 0 {
                return Ok(());
            }
            f(&buffer[..n]);
        }
    }

    /// Syncs the file and renames it to its final name.
    ///
    /// # Errors
    /// The file cannot be synced or renamed; another process has moved or removed it.
    pub fn finish(self, to: &Path) -> Result<()> {
        self.file
            .sync_all()
            .map_err(|e| Error::io("cannot sync the download").at_path(&self.path).cause(e))?;
        self.check()?;
        files::rename(&self.path, to)
    }

    /// Removes the file if it has no bytes: it is not needed if another process has completed the download.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn remove_if_empty(self) -> Result<()> {
        if self.file.metadata().is_ok_and(|found| found.len() == 0) && self.check().is_ok() {
            files::remove_file(&self.path)
        } else {
            Ok(())
        }
    }
}

/// Locks the file; waits while another process holds the lock.
fn wait(file: &File, path: &Path) -> Result<()> {
    let mut phase = None;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) => {
                let waiting = || progress::phase("waiting for another process that downloads this file", 0, "");
                phase.get_or_insert_with(waiting).unless_stopped()?;
                std::thread::sleep(PAUSE);
            }
            Err(TryLockError::Error(e)) => return Err(cannot_lock(path, e)),
        }
    }
}

fn cannot_lock(path: &Path, e: std::io::Error) -> Error {
    refused(Error::io("cannot lock the partial download").at_path(path), e)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_on_where_it_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.incomplete");
        PartialFile::open(&path).unwrap().append(b"ab").unwrap();
        let mut f = PartialFile::open(&path).unwrap();
        assert_eq!(f.length(), 2);
        f.append(b"cd").unwrap();
        let mut all = Vec::new();
        f.read(&mut |p| all.extend_from_slice(p)).unwrap();
        assert_eq!(all, b"abcd");
        f.clear().unwrap();
        f.append(b"z").unwrap();
        f.finish(&dir.path().join("x")).unwrap();
        assert_eq!(files::read(&dir.path().join("x")).unwrap(), b"z");
        assert!(!path.exists());
    }

    #[test]
    fn a_second_download_says_that_it_waits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.incomplete");
        let mut first = PartialFile::open(&path).unwrap();
        first.append(b"abc").unwrap();
        let second = std::thread::scope(|scope| {
            let second = scope.spawn(|| PartialFile::open(&path).unwrap());
            let is_shown = || {
                progress::now()
                    .iter()
                    .any(|phase| phase.label.contains("that downloads this file"))
            };
            let start = std::time::Instant::now();
            while !is_shown() && start.elapsed() < Duration::from_secs(20) {
                std::thread::sleep(Duration::from_millis(5));
            }
            let in_time = is_shown();
            first.finish(&dir.path().join("x")).unwrap();
            assert!(in_time);
            second.join().unwrap()
        });
        // It does not hold the complete file.
        assert_eq!(second.length(), 0);
        second.remove_if_empty().unwrap();
        assert!(!path.exists() && files::read(&dir.path().join("x")).unwrap() == b"abc");
        let e = cannot_lock(&path, std::io::Error::from_raw_os_error(libc::ENOLCK)).to_string();
        assert!(e.contains("a file system with locks"), "{e}");
        let e = cannot_lock(&path, std::io::Error::from_raw_os_error(libc::EIO)).to_string();
        assert!(!e.contains("a file system with locks"), "{e}");
    }

    #[test]
    fn a_file_that_another_machine_completed_is_not_changed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, complete) = (dir.path().join("x.incomplete"), dir.path().join("x"));
        let mut slow = PartialFile::open(&path).unwrap();
        slow.append(b"abc").unwrap();
        // The lock does not hold another machine back.
        std::fs::rename(&path, &complete).unwrap();
        // Also not if there is a new file with the name.
        for again in [false, true] {
            if again {
                std::fs::write(&path, "").unwrap();
            }
            for refused in [slow.clear(), slow.append(b"d")] {
                let e = refused.unwrap_err().to_string();
                assert!(e.contains("another process has moved or removed"), "{e}");
            }
        }
        assert!(slow.finish(&complete).is_err());
        assert_eq!(std::fs::read(&complete).unwrap(), b"abc");
        assert_eq!(std::fs::read(&path).unwrap(), b"");
    }
}
