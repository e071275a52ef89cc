//! One run a directory: an advisory lock on `run.lock` that the system drops when the process ends.

use crate::base::{Error, Result};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::Path;

/// Held for as long as it lives.
#[derive(Debug)]
pub struct RunLock {
    _file: File,
}

impl RunLock {
    /// Errors: another process holds the lock (who and since when are in the message).
    pub fn acquire(directory: &Path) -> Result<Self> {
        let path = directory.join("run.lock");
        let cannot = |e: std::io::Error| Error::new("cannot lock the run directory").at_path(&path).cause(e);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
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
                    .hint("wait for it to end, or set `train.output_dir` to another directory"));
            }
            Err(TryLockError::Error(e)) => return Err(cannot(e)),
        }
        let since = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |d| d.as_secs());
        file.set_len(0).map_err(cannot)?;
        file.rewind().map_err(cannot)?;
        writeln!(file, "process {} since unix time {since}", std::process::id()).map_err(cannot)?;
        Ok(Self { _file: file })
    }
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
        drop(first);
        RunLock::acquire(dir.path()).unwrap();
    }
}
