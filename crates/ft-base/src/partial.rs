//! A file that is completed over several runs: a download that can be resumed.

use crate::{Error, Result, files};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

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
    /// The file cannot be opened or locked.
    pub fn open(path: &Path) -> Result<Self> {
        let cannot = |e: std::io::Error| Error::io("cannot open the partial download").at_path(path).cause(e);
        let file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(path)
            .map_err(cannot)?;
        file.lock().map_err(cannot)?;
        let length = file.metadata().map_err(cannot)?.len();
        Ok(Self {
            file,
            path: path.to_path_buf(),
            length,
        })
    }

    /// Number of bytes in the file.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Appends bytes at the end.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|e| {
            Error::io("cannot write the download")
                .at_path(&self.path)
                .cause(e)
                .hint(
                    "free some disk space, or set HF_HUB_CACHE to another disk; the download continues where it \
                     stopped",
                )
        })?;
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Discards the contents.
    ///
    /// # Errors
    /// The file cannot be truncated.
    pub fn clear(&mut self) -> Result<()> {
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
    /// The file cannot be synced or renamed.
    pub fn finish(self, to: &Path) -> Result<()> {
        self.file
            .sync_all()
            .map_err(|e| Error::io("cannot sync the download").at_path(&self.path).cause(e))?;
        files::rename(&self.path, to)
    }
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
}
