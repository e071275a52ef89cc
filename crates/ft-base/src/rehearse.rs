//! Tries the file operations of a save before hours of work depend on them: permissions, space, quota, file names,
//! file system.

use crate::staging::{self, Staging};
use crate::units::bytes;
use crate::{Error, Result, files};
use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Names that a save creates at most, with some room.
const NAMES: u64 = 32;
/// Bytes that every file system for large disks has room for in one file (ext4: 16 TiB).
const LARGEST_FILE: u64 = 8 << 40;

/// Makes a directory beside `target` as a save does: creates it, writes and syncs a file, reserves disk space for files of
/// `sizes` bytes and for `later` bytes more, renames the directory, and removes it. Nothing is left, also after an error; a killed
/// process leaves a directory that `staging::clean` removes. No data is written for the reserved space.
///
/// # Errors
/// Any of these operations fails; `target` is a mount point, so it cannot get a new directory by a rename; the limit on the
/// size of a file is too low; the file system has too few free inodes.
pub fn rehearse(target: &Path, sizes: &[u64], later: u64) -> Result<()> {
    let parent = target.parent().filter(|p| !p.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    let device = |path: &Path| path.metadata().ok().map(|m| m.dev());
    if target.is_dir() && device(target) != device(parent) {
        return Err(Error::io("the directory is a mount point and cannot be replaced").at_path(target));
    }
    let limit = largest_file();
    if let Some(size) = sizes.iter().find(|size| **size > limit) {
        return Err(Error::io("a file will be larger than the limit of this process")
            .at_path(target)
            .found(format!("files of at most {} (`ulimit -f`)", bytes(limit)))
            .expected(format!("a file of {}", bytes(*size)))
            .hint("raise the limit: `ulimit -f unlimited`"));
    }
    if let Some(free) = free_names(parent).filter(|free| *free < NAMES) {
        return Err(Error::io("the file system has no room for more files")
            .at_path(parent)
            .found(format!("{free} free inodes (`df -i`)"))
            .expected(format!("at least {NAMES}"))
            .hint("remove some files, or write to another disk"));
    }
    let staging = Staging::beside(target)?;
    files::write_atomic(&staging.path().join("rehearsal"), &[0; 4096])?;
    let mut sizes = sizes.to_vec();
    let mut left = later;
    while left > 0 {
        let part = left.min(limit).min(LARGEST_FILE);
        sizes.push(part);
        left -= part;
    }
    for (n, size) in sizes.into_iter().enumerate() {
        reserve(&staging.path().join(format!("space-{n}")), size, target)?;
    }
    let renamed = files::temporary(target);
    let done = files::rename(staging.path(), &renamed).and_then(|()| staging::remove_temporary(&renamed));
    if done.is_err() {
        // One more time: what is left would make the directory of a new run look like somebody else's.
        let _ = files::remove_dir_all(&renamed);
    }
    done
}

/// Reserves space for a new file. File systems that cannot are skipped, as is memory (tmpfs), where reserved pages are used
/// pages.
fn reserve(path: &Path, size: u64, target: &Path) -> Result<()> {
    let cannot = |e: std::io::Error| {
        let hint = match e.raw_os_error() {
            Some(libc::EDQUOT) => "free some of the quota (`quota -s`), or write to another disk",
            _ => "free some disk space, or write to another disk",
        };
        Error::io("the disk has no room for what the run writes")
            .at_path(target)
            .expected(bytes(size))
            .cause(&e)
            .hint(hint)
    };
    let file = OpenOptions::new().write(true).create_new(true).open(path);
    let file = file.map_err(cannot)?;
    #[cfg(target_os = "linux")]
    if size > 0 && !is_memory(&file) {
        let size = i64::try_from(size).unwrap_or(i64::MAX);
        // SAFETY: a valid descriptor for the whole call.
        let rc = unsafe { libc::fallocate64(file.as_raw_fd(), 0, 0, size) };
        let e = std::io::Error::last_os_error();
        let refused = matches!(
            e.raw_os_error(),
            Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG | libc::EIO | libc::EROFS)
        );
        if rc != 0 && refused {
            return Err(cannot(e));
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (&file, size);
    Ok(())
}

#[cfg(target_os = "linux")]
fn is_memory(file: &std::fs::File) -> bool {
    const TMPFS: i64 = 0x0102_1994;
    // SAFETY: a plain struct of numbers, for which zeros are a value.
    let mut stat: libc::statfs64 = unsafe { std::mem::zeroed() };
    // SAFETY: a valid descriptor and a valid out pointer for the whole call.
    unsafe { libc::fstatfs64(file.as_raw_fd(), &mut stat) == 0 && stat.f_type as i64 == TMPFS }
}

/// Bytes that a file of this process may have.
fn largest_file() -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: a valid out pointer for the whole call.
    match unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) } {
        0 => limit.rlim_cur,
        _ => u64::MAX,
    }
}

/// Free inodes on the file system of `path`; `None` if it does not count them.
fn free_names(path: &Path) -> Option<u64> {
    let c = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).ok()?;
    // SAFETY: a plain struct of numbers, for which zeros are a value.
    let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: `c` is a valid C string and `stat` a valid out pointer for the whole call.
    let known = unsafe { libc::statvfs(c.as_ptr(), &mut stat) } == 0 && stat.f_files > 0;
    known.then_some(stat.f_favail as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> usize {
        files::list(dir).unwrap().len()
    }

    #[test]
    fn a_rehearsal_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("final");
        rehearse(&target, &[1 << 20, 0, 5000], 70_000).unwrap();
        assert_eq!(names(dir.path()), 0);
        files::create_dir_all(&target).unwrap();
        files::write_atomic(&target.join("a"), b"x").unwrap();
        rehearse(&target, &[1], 0).unwrap();
        assert_eq!((names(dir.path()), names(&target)), (1, 1));
        assert!(free_names(dir.path()).is_none_or(|n| n > 0) && largest_file() > 0);
    }

    /// Row C12.
    #[test]
    fn what_would_fail_later_fails_now_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        // No disk has this much, and tmpfs is not asked.
        let target = dir.path().join("checkpoint-1");
        let memory = is_memory(&std::fs::File::open(dir.path()).unwrap());
        for (sizes, later) in [(&[1 << 60][..], 0), (&[1], 1 << 60)] {
            let e = rehearse(&target, sizes, later);
            assert!(memory || e.unwrap_err().to_string().contains("has no room"));
        }
        assert_eq!(names(dir.path()), 0);
        let file = dir.path().join("file");
        files::write_atomic(&file, b"x").unwrap();
        assert!(rehearse(&file, &[], 0).is_err() && rehearse(&file.join("final"), &[], 0).is_err());
        assert!(rehearse(&dir.path().join("none/final"), &[], 0).is_err());
        assert_eq!(names(dir.path()), 1);
        let e = rehearse(Path::new("/proc"), &[], 0).unwrap_err().to_string();
        assert!(e.contains("mount point"), "{e}");
    }
}
