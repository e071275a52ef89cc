//! The end of a growing file of lines.

use crate::base::{Error, Result};
use crate::history;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Bytes before the place of reading that must not change.
const MARK: u64 = 256;
/// Most bytes of one call.
const PIECE: u64 = 1 << 20;

/// Follows `metrics.jsonl` of a run in progress.
#[derive(Debug)]
pub struct Tail {
    path: PathBuf,
    /// Bytes that were read: complete lines only.
    at: u64,
    /// Inode, and the last bytes before `at`: they change if a resumed run cuts the file and writes on.
    inode: u64,
    mark: Vec<u8>,
}

/// The change since the last call.
#[derive(Debug, PartialEq)]
pub enum TailChange {
    /// Complete lines, possibly none.
    Lines(Vec<Vec<u8>>),
    /// Lines that were read are gone: the reader starts again from the beginning.
    Cut,
}

impl Tail {
    /// Follows the file from byte `at`, which is the end of a line.
    pub fn new(path: &Path, at: u64) -> Self {
        let mut tail = Self {
            path: path.to_path_buf(),
            at,
            inode: 0,
            mark: Vec::new(),
        };
        // Without the file, the first call reports the cut.
        if let Ok((mut file, inode, length)) = tail.open()
            && at <= length
        {
            tail.inode = inode;
            tail.mark = tail.marked(&mut file).unwrap_or_default();
        }
        tail
    }

    fn open(&self) -> Result<(File, u64, u64)> {
        let file = history::open_own(&self.path)?;
        let data = file.metadata().map_err(|e| self.fault(e))?;
        Ok((file, data.ino(), data.len()))
    }

    fn fault(&self, e: std::io::Error) -> Error {
        Error::io("cannot read the file").at_path(&self.path).cause(e)
    }

    /// The bytes before `at`.
    fn marked(&self, file: &mut File) -> Result<Vec<u8>> {
        self.bytes(file, self.at.saturating_sub(MARK), self.at.min(MARK))
    }

    fn bytes(&self, file: &mut File, from: u64, most: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(from)).map_err(|e| self.fault(e))?;
        file.take(most).read_to_end(&mut bytes).map_err(|e| self.fault(e))?;
        Ok(bytes)
    }

    /// Reads the complete lines that were added, at most 1 MiB.
    ///
    /// Errors: the file cannot be read. A missing file is empty.
    pub fn read(&mut self) -> Result<TailChange> {
        if !self.path.exists() {
            return Ok(if self.at > 0 {
                TailChange::Cut
            } else {
                TailChange::Lines(Vec::new())
            });
        }
        let (mut file, inode, length) = self.open()?;
        if self.at == 0 {
            self.inode = inode;
        }
        if length < self.at || inode != self.inode || self.marked(&mut file)? != self.mark {
            return Ok(TailChange::Cut);
        }
        let mut bytes = self.bytes(&mut file, self.at, PIECE)?;
        let whole = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |end| end + 1);
        if whole == 0 && bytes.len() as u64 == PIECE {
            // No line end in 1 MiB: this is not the log of a run, so these bytes are skipped.
            self.at += PIECE;
            bytes.clear();
        }
        bytes.truncate(whole);
        self.at += whole as u64;
        self.mark = self.marked(&mut file)?;
        let lines = bytes.split_inclusive(|b| *b == b'\n').map(<[u8]>::to_vec);
        Ok(TailChange::Lines(lines.collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_tail_reads_complete_lines_and_sees_every_cut() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let lines = |all: &[&str]| TailChange::Lines(all.iter().map(|l| l.as_bytes().to_vec()).collect());
        let mut tail = Tail::new(&path, 0);
        assert_eq!(tail.read().unwrap(), lines(&[]));
        fs::write(&path, "a\nb\nhal").unwrap();
        assert_eq!(tail.read().unwrap(), lines(&["a\n", "b\n"]));
        assert_eq!(tail.read().unwrap(), lines(&[]));
        fs::write(&path, "a\nb\nhalf\n").unwrap();
        assert_eq!(tail.read().unwrap(), lines(&["half\n"]));
        // A resumed run cuts the file, and can write more bytes than it cut before the file is read again.
        fs::write(&path, "a\nB\nhalf\nmore\n").unwrap();
        assert_eq!(tail.read().unwrap(), TailChange::Cut);
        let mut tail = Tail::new(&path, 4);
        assert_eq!(tail.read().unwrap(), lines(&["half\n", "more\n"]));
        fs::write(&path, "a\n").unwrap();
        assert_eq!(tail.read().unwrap(), TailChange::Cut);
        // The same bytes in a new file: it was written again.
        let mut tail = Tail::new(&path, 2);
        fs::write(dir.path().join("new"), "a\n").unwrap();
        fs::rename(dir.path().join("new"), &path).unwrap();
        assert_eq!(tail.read().unwrap(), TailChange::Cut);
        fs::remove_file(&path).unwrap();
        assert_eq!(Tail::new(&path, 9).read().unwrap(), TailChange::Cut);
    }
}
