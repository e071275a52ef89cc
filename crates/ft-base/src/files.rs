//! File operations that put the path into every error, and atomic writes: a file appears complete or not at all.
//!
//! # Errors
//!
//! Unless a function says more, it fails with `ErrorKind::NotFound` if a path does not exist, and with `Io` if the
//! system refuses the operation.

use crate::stalled::{Watched, watched};
use crate::sync::lock;
use crate::{Error, ErrorKind, Result, paths};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, Read, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

mod output;

pub use output::{check_output, write_output};

fn io(what: &str, path: &Path, e: std::io::Error) -> Error {
    let kind = match e.kind() {
        std::io::ErrorKind::NotFound => ErrorKind::NotFound,
        _ => ErrorKind::Io,
    };
    let err = Error::of(kind, format!("cannot {what}")).at_path(path).cause(&e);
    match e.kind() {
        std::io::ErrorKind::StorageFull => err.hint("free some disk space, or write to another disk"),
        std::io::ErrorKind::QuotaExceeded => err.hint("free some of the quota (`quota -s`), or write to another disk"),
        std::io::ErrorKind::PermissionDenied => err.hint("check the permissions of this path"),
        _ => err,
    }
}

/// If the file does not exist, the error suggests similar names: the path may be misspelled.
fn not_read(what: &str, path: &Path, e: std::io::Error) -> Error {
    match e.kind() {
        std::io::ErrorKind::NotFound => paths::missing("file", path),
        _ => io(what, path, e),
    }
}

/// Opens a regular file for reading; follows links.
///
/// # Errors
/// The path is a pipe, a device, a socket or a directory: a read could block or never end.
pub fn open(path: &Path) -> Result<File> {
    let kind = fs::metadata(path)
        .map_err(|e| not_read("open the file", path, e))?
        .file_type();
    regular(kind, path)?;
    // O_NONBLOCK: if a pipe has replaced the file since the check, `open` does not wait for a writer.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(|e| io("open the file", path, e))?;
    let kind = file.metadata().map_err(|e| io("open the file", path, e))?.file_type();
    regular(kind, path)?;
    Ok(file)
}

fn regular(kind: fs::FileType, path: &Path) -> Result<()> {
    let found = match kind {
        k if k.is_file() => return Ok(()),
        k if k.is_dir() => "a directory",
        k if k.is_fifo() => "a named pipe",
        k if k.is_socket() => "a socket",
        k if k.is_char_device() || k.is_block_device() => "a device",
        _ => "another kind of file",
    };
    Err(Error::io("cannot open the file")
        .at_path(path)
        .found(found)
        .expected("a regular file"))
}

/// Reads a whole regular file.
///
/// # Errors
/// The path does not exist, is not a regular file, or cannot be read.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    open(path)?
        .read_to_end(&mut out)
        .map_err(|e| io("read the file", path, e))?;
    Ok(out)
}

/// Reads UTF-8 text and drops a byte order mark at the start.
///
/// # Errors
/// The file cannot be read, or is not UTF-8.
pub fn read_text(path: &Path) -> Result<String> {
    text_of(path, read(path)?)
}

/// As `read_text`, but also accepts standard input and a shell's `<(command)`. Other pipes are refused.
///
/// # Errors
/// As `read_text`.
pub fn read_text_or_stdin(path: &Path) -> Result<String> {
    let handed_over = path == Path::new("/dev/stdin") || path.parent() == Some(Path::new("/dev/fd"));
    if handed_over && !path.is_dir() {
        text_of(path, fs::read(path).map_err(|e| io("read the file", path, e))?)
    } else {
        read_text(path)
    }
}

/// The text of a file with these bytes, without a byte order mark at the start.
///
/// # Errors
/// The bytes are not UTF-8.
pub fn text_of(path: &Path, bytes: Vec<u8>) -> Result<String> {
    let text = String::from_utf8(bytes).map_err(|e| {
        Error::format("file is not UTF-8 text")
            .at_path(path)
            .found(format!("byte {} is not valid", e.utf8_error().valid_up_to()))
    })?;
    Ok(text.strip_prefix('\u{feff}').map(str::to_string).unwrap_or(text))
}

/// The size of a file in bytes.
///
/// # Errors
/// There is no such file, or its properties cannot be read.
pub fn size(path: &Path) -> Result<u64> {
    Ok(fs::metadata(path).map_err(|e| io("check the file", path, e))?.len())
}

/// Identifies the present content of a file without reading it: its path without links, its size, and its time of
/// change.
///
/// # Errors
/// As `size`.
pub fn stamp(path: &Path) -> Result<String> {
    let check = |e| io("check the file", path, e);
    let place = fs::canonicalize(path).map_err(check)?;
    let meta = fs::metadata(&place).map_err(check)?;
    let changed = meta.modified().ok();
    let changed = changed.and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok());
    let nanoseconds = changed.map_or(0, |t| t.as_nanos());
    Ok(format!("{} {} {nanoseconds}", place.display(), meta.len()))
}

/// Creates a directory and its parents, durably. It may exist already.
///
/// # Errors
/// A directory cannot be created or synced.
pub fn create_dir_all(path: &Path) -> Result<()> {
    let missing = path.ancestors().take_while(|p| p.symlink_metadata().is_err());
    let new: Vec<&Path> = missing.filter(|p| !p.as_os_str().is_empty()).collect();
    fs::create_dir_all(path).map_err(|e| io("create the directory", path, e))?;
    // Without it a loss of power can take the directory with all synced files in it.
    for parent in new.iter().filter_map(|p| p.parent()) {
        match sync_dir(parent) {
            // A parent that may be searched and written, but not read, cannot be opened.
            Err(_) if File::open(parent).is_err_and(|e| e.kind() == std::io::ErrorKind::PermissionDenied) => {}
            synced => synced?,
        }
    }
    Ok(())
}

/// Removes a directory with all its contents.
///
/// # Errors
/// There is no such directory, or it cannot be removed.
pub fn remove_dir_all(path: &Path) -> Result<()> {
    fs::remove_dir_all(path).map_err(|e| io("remove the directory", path, e))
}

/// Removes an empty directory. Returns `false` if it is not empty.
///
/// # Errors
/// As `remove_dir_all`.
pub fn remove_empty_dir(path: &Path) -> Result<bool> {
    match fs::remove_dir(path) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == std::io::ErrorKind::DirectoryNotEmpty => Ok(false),
        Err(e) => Err(io("remove the directory", path, e)),
    }
}

/// Creates a directory that must not exist yet. Returns `false` if the name is taken.
pub(crate) fn create_new_dir(path: &Path) -> Result<bool> {
    match fs::create_dir(path) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Ok(false),
        Err(e) => Err(io("create the directory", path, e)),
    }
}

/// Removes a file.
///
/// # Errors
/// There is no such file, or it cannot be removed.
pub fn remove_file(path: &Path) -> Result<()> {
    fs::remove_file(path).map_err(|e| io("remove the file", path, e))
}

/// Renames a file and makes the new name durable.
///
/// # Errors
/// The file cannot be renamed, or its directory cannot be synced.
pub fn rename(from: &Path, to: &Path) -> Result<()> {
    watched(to, || fs::rename(from, to)).map_err(|e| io("rename to", to, e))?;
    sync_dir(to.parent().unwrap_or(Path::new(".")))
}

/// Creates a symbolic link to `target`; replaces an existing link.
///
/// # Errors
/// The link cannot be created; as `rename`.
pub fn link(target: &Path, path: &Path) -> Result<()> {
    let mut temporary = temporary(path);
    while temporary.symlink_metadata().is_ok() {
        temporary = self::temporary(path);
    }
    std::os::unix::fs::symlink(target, &temporary).map_err(|e| io("create the link", path, e))?;
    rename(&temporary, path)
}

/// Swaps two existing names atomically. Returns `false` if the system does not support it. For a durable swap the caller syncs
/// their directory: an error of this function means that nothing was swapped.
///
/// # Errors
/// A name does not exist, or may not be changed.
pub fn exchange(a: &Path, b: &Path) -> Result<bool> {
    #[cfg(target_os = "linux")]
    {
        let c = |p: &Path| std::ffi::CString::new(p.as_os_str().as_encoded_bytes()).ok();
        let (Some(from), Some(to)) = (c(a), c(b)) else {
            return Ok(false);
        };
        // SAFETY: both are valid C strings for the whole call. The last argument 2 is RENAME_EXCHANGE.
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
///
/// # Errors
/// The directory cannot be read.
pub fn list(path: &Path) -> Result<Vec<PathBuf>> {
    let mut out = Vec::new();
    for entry in fs::read_dir(path).map_err(|e| io("list the directory", path, e))? {
        out.push(entry.map_err(|e| io("list the directory", path, e))?.path());
    }
    out.sort();
    Ok(out)
}

/// Makes the entries of a directory durable (fsync).
pub(crate) fn sync_dir(path: &Path) -> Result<()> {
    let path = if path.as_os_str().is_empty() {
        Path::new(".")
    } else {
        path
    };
    watched(path, || File::open(path).and_then(|d| d.sync_all())).map_err(|e| io("sync the directory", path, e))
}

/// Files and directories that are being written under a temporary name.
static UNFINISHED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn unfinished() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    lock(&UNFINISHED)
}

/// Registers `path` as being written: it is removed if a signal ends the process before `finished`.
pub(super) fn begun(path: &Path) {
    unfinished().insert(path.to_path_buf());
}

pub(super) fn finished(path: &Path) {
    unfinished().remove(path);
}

/// Removes half-written files before a signal ends the process. Another thread may still write.
pub(super) fn remove_unfinished() {
    for path in unfinished().iter() {
        // A thread that creates a file in a directory meanwhile makes its removal fail.
        for _ in 0..10 {
            let removed = if path.is_dir() {
                fs::remove_dir_all(path)
            } else {
                fs::remove_file(path)
            };
            if removed.is_ok() || path.symlink_metadata().is_err() {
                break;
            }
        }
    }
}

/// Separates the name from the id of the writing process: `model.safetensors.tmp-1234`.
pub const TEMPORARY: &str = ".tmp-";

/// A new temporary name beside `path`, different in every call.
pub fn temporary(path: &Path) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = path
        .file_name()
        .map(|n| n.to_string_lossy().into_owned())
        .unwrap_or_default();
    let process = std::process::id();
    path.with_file_name(match NEXT.fetch_add(1, Ordering::Relaxed) {
        0 => format!("{name}{TEMPORARY}{process}"),
        n => format!("{name}{TEMPORARY}{process}-{n}"),
    })
}

/// A file that appears at its name, synced, only at `commit`. If `commit` is not called or fails, no file is left.
pub struct AtomicFile {
    file: Option<BufWriter<File>>,
    temporary: PathBuf,
    path: PathBuf,
    written: u64,
    committed: bool,
    watched: Watched,
}

impl AtomicFile {
    /// Opens a temporary file beside `path`, for writing.
    ///
    /// # Errors
    /// The directory does not exist or is not writable. Never overwrites a file at the temporary name.
    pub fn create(path: &Path) -> Result<Self> {
        let mut tries = 0;
        let (file, temporary) = loop {
            let temporary = temporary(path);
            match OpenOptions::new().write(true).create_new(true).open(&temporary) {
                Ok(file) => break (file, temporary),
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists && tries < 1000 => tries += 1,
                Err(e) => return Err(cannot_create(path, e)),
            }
        };
        begun(&temporary);
        Ok(Self {
            file: Some(BufWriter::with_capacity(1 << 20, file)),
            watched: Watched::new(&temporary),
            temporary,
            path: path.to_path_buf(),
            written: 0,
            committed: false,
        })
    }

    /// Appends bytes to the temporary file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let path = &self.path;
        if let Some(file) = self.file.as_mut() {
            let wrote = self.watched.run(bytes.len() as u64, || file.write_all(bytes));
            wrote.map_err(|e| io("write the file", path, e))?;
        }
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Number of bytes written so far.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Syncs all written bytes to the disk.
    pub(super) fn sync(&mut self) -> Result<()> {
        let Some(file) = self.file.as_mut() else { return Ok(()) };
        let synced = || file.flush().and_then(|()| file.get_ref().sync_data());
        let synced = self.watched.run(self.written, synced);
        synced.map_err(|e| io("sync the file", &self.path, e))
    }

    /// Opens a second handle, to read the bytes written so far.
    pub(super) fn reopen(&self) -> Result<File> {
        open(&self.temporary)
    }

    /// Flushes, syncs and renames the file, then syncs the directory.
    ///
    /// # Errors
    /// The file cannot be written or synced; as `rename`.
    pub fn commit(mut self) -> Result<()> {
        if let Some(file) = self.file.take() {
            let file = self.watched.run(0, || file.into_inner());
            let file = file.map_err(|e| io("write the file", &self.path, e.into_error()))?;
            let synced = self.watched.run(self.written, || file.sync_all());
            synced.map_err(|e| io("sync the file", &self.path, e))?;
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

/// The error names the requested file, not the temporary one.
fn cannot_create(path: &Path, e: std::io::Error) -> Error {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    match (e.kind(), parent) {
        (std::io::ErrorKind::NotFound, Some(parent)) if !parent.exists() => Error::not_found("cannot create the file")
            .at_path(path)
            .found(format!("no directory {}", parent.display()))
            .hint(format!("create it first: `mkdir -p {}`", parent.display())),
        _ => io("create the file", path, e),
    }
}

/// Writes a whole file: it appears complete at `path` or not at all.
///
/// # Errors
/// As for [`AtomicFile::create`]; or the disk is full.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.write(bytes)?;
    file.commit()
}

/// A file to which lines or bytes are appended (metrics, events, tokens).
pub struct AppendFile {
    file: File,
    path: PathBuf,
}

impl AppendFile {
    /// Opens the file for appending; creates it if it does not exist.
    ///
    /// # Errors
    /// The path is not a regular file. Links are refused too: the target may belong to another program.
    pub fn open(path: &Path) -> Result<Self> {
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(path)
            .map_err(|e| io("open the file", path, e))?;
        let kind = file.metadata().map_err(|e| io("open the file", path, e))?.file_type();
        regular(kind, path)?;
        Ok(Self {
            file,
            path: path.to_path_buf(),
        })
    }

    /// As `open`; drops everything after the first `length` bytes. A shorter file stays as it is.
    ///
    /// # Errors
    /// As for `open`.
    pub fn continue_at(path: &Path, length: u64) -> Result<Self> {
        let out = Self::open(path)?;
        if out.length()? > length {
            out.file.set_len(length).map_err(|e| io("shorten the file", path, e))?;
        }
        Ok(out)
    }

    /// The present size of the file in bytes.
    ///
    /// # Errors
    /// Its properties cannot be read.
    pub fn length(&self) -> Result<u64> {
        let found = self.file.metadata();
        Ok(found.map_err(|e| io("check the file", &self.path, e))?.len())
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file
            .write_all(bytes)
            .map_err(|e| io("append to the file", &self.path, e))
    }

    /// Makes everything written so far durable.
    ///
    /// # Errors
    /// The file cannot be synced.
    pub fn sync(&mut self) -> Result<()> {
        self.file.sync_data().map_err(|e| io("sync the file", &self.path, e))
    }
}

/// Copies a file atomically: the copy appears complete or not at all.
///
/// # Errors
/// `from` cannot be read, or `to` cannot be written.
pub fn copy_atomic(from: &Path, to: &Path) -> Result<()> {
    let mut source = open(from)?;
    let mut out = AtomicFile::create(to)?;
    let mut buffer = vec![0u8; 1 << 20];
    loop {
        let n = source.read(&mut buffer).map_err(|e| io("read the file", from, e))?;
        if n == 0 {
            return out.commit();
        }
        out.write(&buffer[..n])?;
    }
}

/// Gives a file a second name (a hard link).
///
/// # Errors
/// The file systems or their rules do not allow it.
pub fn hard_link(from: &Path, to: &Path) -> Result<()> {
    fs::hard_link(from, to).map_err(|e| io("link the file", to, e))
}

/// Turns off the system's readahead, for a file that is not read from beginning to end.
pub fn no_readahead(file: &File) {
    #[cfg(target_os = "linux")]
    // SAFETY: a valid descriptor for the whole call; only advice.
    unsafe {
        libc::posix_fadvise(std::os::fd::AsRawFd::as_raw_fd(file), 0, 0, libc::POSIX_FADV_RANDOM);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = file;
}

/// Drops `bytes` bytes from `offset` on (0: to the end) from the page cache. Dirty pages stay.
pub fn forget(file: &File, offset: u64, bytes: u64) {
    #[cfg(target_os = "linux")]
    {
        // Rounds outward to whole pages; otherwise the pages at both ends of every read would stay cached.
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

/// Free bytes on the disk of `path` (or of its nearest existing parent).
pub fn free_space(path: &Path) -> Option<u64> {
    let mut dir = path;
    while !dir.exists() {
        dir = dir.parent()?;
        if dir.as_os_str().is_empty() {
            dir = Path::new(".");
        }
    }
    let c = std::ffi::CString::new(dir.as_os_str().as_encoded_bytes()).ok()?;
    // SAFETY: a plain struct of numbers, for which zeros are a value.
    let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: `c` is a valid C string and `stat` a valid out pointer for the whole call.
    (unsafe { libc::statvfs(c.as_ptr(), &mut stat) } == 0).then_some(stat.f_bavail as u64 * stat.f_frsize as u64)
}

#[cfg(test)]
mod tests;
