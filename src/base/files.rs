//! Files with the path in every error; whole files appear at their name or not at all.

use crate::base::{Error, Result};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

fn io(what: &str, path: &Path, e: std::io::Error) -> Error {
    let err = Error::new(format!("cannot {what}")).at_path(path).cause(&e);
    match e.kind() {
        std::io::ErrorKind::StorageFull => err.hint("free some disk space, or set `train.output_dir` to another disk"),
        std::io::ErrorKind::PermissionDenied => err.hint("check the permissions of this path"),
        _ => err,
    }
}

pub fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|e| io("open the file", path, e))
}

pub fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|e| io("read the file", path, e))
}

/// Reads UTF-8 text; a byte order mark at the start is dropped.
pub fn read_text(path: &Path) -> Result<String> {
    let bytes = read(path)?;
    let text = String::from_utf8(bytes).map_err(|e| {
        Error::new("file is not UTF-8 text")
            .at_path(path)
            .found(format!("byte {} is not valid", e.utf8_error().valid_up_to()))
    })?;
    Ok(text.strip_prefix('\u{feff}').map(str::to_string).unwrap_or(text))
}

pub fn size(path: &Path) -> Result<u64> {
    Ok(fs::metadata(path).map_err(|e| io("look at the file", path, e))?.len())
}

pub fn create_dir_all(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(|e| io("create the directory", path, e))
}

pub fn remove_dir_all(path: &Path) -> Result<()> {
    fs::remove_dir_all(path).map_err(|e| io("remove the directory", path, e))
}

pub fn remove_file(path: &Path) -> Result<()> {
    fs::remove_file(path).map_err(|e| io("remove the file", path, e))
}

/// Renames and makes the new name durable.
pub fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(|e| io("rename to", to, e))?;
    sync_dir(to.parent().unwrap_or(Path::new(".")))
}

/// Swaps two names in one step, durably; both must exist. `false`: this system or this disk cannot do it.
pub fn exchange(a: &Path, b: &Path) -> Result<bool> {
    #[cfg(target_os = "linux")]
    {
        let c = |p: &Path| std::ffi::CString::new(p.as_os_str().as_encoded_bytes()).ok();
        let (Some(from), Some(to)) = (c(a), c(b)) else {
            return Ok(false);
        };
        // Both are valid C strings for the whole call; the numbers are AT_FDCWD and RENAME_EXCHANGE.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_renameat2,
                libc::AT_FDCWD,
                from.as_ptr(),
                libc::AT_FDCWD,
                to.as_ptr(),
                2 as libc::c_uint,
            )
        };
        if rc == 0 {
            sync_dir(b.parent().unwrap_or(Path::new(".")))?;
            return Ok(true);
        }
        let e = std::io::Error::last_os_error();
        match e.raw_os_error() {
            Some(libc::ENOSYS | libc::EINVAL | libc::EOPNOTSUPP | libc::EPERM) => Ok(false),
            _ => Err(io("swap names with", b, e)),
        }
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (a, b);
        Ok(false)
    }
}

/// Entries of a directory, sorted by name.
pub fn list(path: &Path) -> Result<Vec<PathBuf>> {
    let mut out = Vec::new();
    for entry in fs::read_dir(path).map_err(|e| io("list the directory", path, e))? {
        out.push(entry.map_err(|e| io("list the directory", path, e))?.path());
    }
    out.sort();
    Ok(out)
}

/// Makes names in a directory durable.
pub fn sync_dir(path: &Path) -> Result<()> {
    let path = if path.as_os_str().is_empty() {
        Path::new(".")
    } else {
        path
    };
    File::open(path)
        .and_then(|d| d.sync_all())
        .map_err(|e| io("sync the directory", path, e))
}

/// Files and directories that are being written under a temporary name.
static UNFINISHED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn unfinished() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `path` is being written: it is removed if the process ends by a signal before `finished`.
pub(super) fn begun(path: &Path) {
    unfinished().insert(path.to_path_buf());
}

pub(super) fn finished(path: &Path) {
    unfinished().remove(path);
}

/// Before the process ends by a signal: removes what is written halfway. Another thread may still write.
pub(super) fn remove_unfinished() {
    for path in unfinished().iter() {
        let _ = match path.is_dir() {
            true => fs::remove_dir_all(path),
            false => fs::remove_file(path),
        };
    }
}

/// The temporary name beside `path`; leftovers are recognised by `.tmp-`.
pub fn temporary(path: &Path) -> PathBuf {
    let name = path
        .file_name()
        .map(|n| n.to_string_lossy().into_owned())
        .unwrap_or_default();
    path.with_file_name(format!("{name}.tmp-{}", std::process::id()))
}

/// A file that appears at its name, synced, only when `commit` is called; without a `commit` that went well it leaves
/// nothing.
pub struct AtomicFile {
    file: Option<BufWriter<File>>,
    temporary: PathBuf,
    path: PathBuf,
    written: u64,
    committed: bool,
}

impl AtomicFile {
    pub fn create(path: &Path) -> Result<Self> {
        let temporary = temporary(path);
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&temporary)
            .map_err(|e| io("create the file", &temporary, e))?;
        begun(&temporary);
        Ok(Self {
            file: Some(BufWriter::with_capacity(1 << 20, file)),
            temporary,
            path: path.to_path_buf(),
            written: 0,
            committed: false,
        })
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let path = &self.path;
        if let Some(file) = self.file.as_mut() {
            file.write_all(bytes).map_err(|e| io("write the file", path, e))?;
        }
        self.written += bytes.len() as u64;
        Ok(())
    }

    pub fn written(&self) -> u64 {
        self.written
    }

    /// What was written so far is on the disk.
    pub(super) fn sync(&mut self) -> Result<()> {
        let Some(file) = self.file.as_mut() else { return Ok(()) };
        let synced = file.flush().and_then(|()| file.get_ref().sync_data());
        synced.map_err(|e| io("sync the file", &self.path, e))
    }

    /// Another handle, to read what was written.
    pub(super) fn reopen(&self) -> Result<File> {
        open(&self.temporary)
    }

    /// Flush, fsync, rename, fsync of the directory.
    pub fn commit(mut self) -> Result<()> {
        if let Some(file) = self.file.take() {
            let file = file
                .into_inner()
                .map_err(|e| io("write the file", &self.path, e.into_error()))?;
            file.sync_all().map_err(|e| io("sync the file", &self.path, e))?;
        }
        rename(&self.temporary, &self.path)?;
        self.committed = true;
        Ok(())
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        finished(&self.temporary);
        if !self.committed {
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.write(bytes)?;
    file.commit()
}

/// A text file of lines that only grows (metrics, events).
pub struct AppendFile {
    file: File,
    path: PathBuf,
}

impl AppendFile {
    pub fn open(path: &Path) -> Result<Self> {
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map_err(|e| io("open the file", path, e))?;
        Ok(Self {
            file,
            path: path.to_path_buf(),
        })
    }

    /// Appends one line in one write.
    pub fn line(&mut self, text: &str) -> Result<()> {
        self.file
            .write_all(format!("{text}\n").as_bytes())
            .map_err(|e| io("append to the file", &self.path, e))
    }
}

/// Copies a file so that it appears whole or not at all.
pub fn copy_atomic(from: &Path, to: &Path) -> Result<()> {
    let mut source = open(from)?;
    let mut out = AtomicFile::create(to)?;
    let mut buffer = vec![0u8; 1 << 20];
    loop {
        let n = std::io::Read::read(&mut source, &mut buffer).map_err(|e| io("read the file", from, e))?;
        if n == 0 {
            return out.commit();
        }
        out.write(&buffer[..n])?;
    }
}

/// The file is read at places of our own choosing: the system reads nothing ahead of us.
pub fn no_readahead(file: &File) {
    #[cfg(target_os = "linux")]
    // SAFETY: a valid descriptor for the whole call; only advice.
    unsafe {
        libc::posix_fadvise(std::os::fd::AsRawFd::as_raw_fd(file), 0, 0, libc::POSIX_FADV_RANDOM);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = file;
}

/// Gives back the memory in which the system caches `bytes` bytes from `offset` on (0: to the end). What was not
/// written to the disk yet stays.
pub fn forget(file: &File, offset: u64, bytes: u64) {
    #[cfg(target_os = "linux")]
    {
        // Whole pages only: outward, or the ends of every read would stay.
        const PAGE: u64 = 4096;
        let start = offset / PAGE * PAGE;
        let len = match bytes {
            0 => 0,
            _ => (offset + bytes).next_multiple_of(PAGE) - start,
        };
        // SAFETY: as above.
        unsafe {
            libc::posix_fadvise(
                std::os::fd::AsRawFd::as_raw_fd(file),
                start as libc::off_t,
                len as libc::off_t,
                libc::POSIX_FADV_DONTNEED,
            );
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (file, offset, bytes);
}

/// Free bytes on the disk that holds `path` (or its nearest existing parent).
pub fn free_space(path: &Path) -> Option<u64> {
    let mut dir = path;
    while !dir.exists() {
        dir = dir.parent()?;
        if dir.as_os_str().is_empty() {
            dir = Path::new(".");
        }
    }
    let c = std::ffi::CString::new(dir.as_os_str().as_encoded_bytes()).ok()?;
    let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
    // `c` is a valid C string and `stat` a valid out pointer for the whole call.
    (unsafe { libc::statvfs(c.as_ptr(), &mut stat) } == 0).then_some(stat.f_bavail as u64 * stat.f_frsize as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_file_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.txt");
        let mut f = AtomicFile::create(&path).unwrap();
        f.write(b"half").unwrap();
        drop(f);
        assert!(list(dir.path()).unwrap().is_empty());
        write_atomic(&path, b"whole").unwrap();
        assert_eq!(read_text(&path).unwrap(), "whole");
        assert_eq!(list(dir.path()).unwrap().len(), 1);
        // A file cannot take the place of a directory.
        let taken = dir.path().join("taken");
        create_dir_all(&taken).unwrap();
        assert!(write_atomic(&taken, b"x").is_err());
        assert_eq!(list(dir.path()).unwrap().len(), 2);
        assert!(free_space(&dir.path().join("not/there")).unwrap() > 0);
    }
}
