//! Directories that appear complete or not at all: built under a temporary name beside the final one, renamed at the
//! end. Also directories for temporary files. Both contain a marker file while ft may remove them: a name alone does
//! not prove that ft made a directory.

mod held;

use crate::lock::{USED, is_recent};
use crate::{Error, Result, files};
pub use held::ScratchDirectory;
use held::Use;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// As [`files::TEMPORARY`], in the name that a directory has for a short time before another one takes its name, where the system cannot
/// swap two names.
pub const REPLACED: &str = ".old-";
/// The file that marks a directory whose contents ft may remove.
const MARKER: &str = ".ft-temporary";
const MARK: &str = "Temporary files of ft: ft removes this directory when it needs it no more.\n";

/// A directory under construction; if it is dropped before `commit`, it leaves nothing.
#[derive(Debug)]
pub struct Staging {
    temporary: PathBuf,
    target: PathBuf,
    done: bool,
}

impl Staging {
    /// Creates `<target>.tmp-<pid>`, and its parent if necessary.
    ///
    /// # Errors
    /// `target` exists and is not a directory; a file operation fails.
    pub fn create(target: &Path) -> Result<Self> {
        if let Some(parent) = target.parent().filter(|p| !p.as_os_str().is_empty()) {
            files::create_dir_all(parent)?;
        }
        Self::beside(target)
    }

    /// As `create`, but the parent must exist.
    ///
    /// # Errors
    /// `target` has no file name, or is not a directory (`Argument`, `Io`); the temporary directory cannot be created.
    pub fn beside(target: &Path) -> Result<Self> {
        if target.file_name().is_none() {
            return Err(Error::argument("output path has no file name").at_path(target));
        }
        if target.exists() && !target.is_dir() {
            return Err(Error::io("the output directory cannot be written: a file has its name").at_path(target));
        }
        Ok(Self {
            temporary: new_temporary(target)?,
            target: target.to_path_buf(),
            done: false,
        })
    }

    /// The directory to write to.
    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// Adds a file of another directory under its own name, as a hard link. The file must never be changed in place. Returns
    /// false if the file systems do not allow it, or if there is no such file: see `copy`.
    pub fn link(&self, from: &Path) -> bool {
        let to = self.temporary.join(from.file_name().unwrap_or_default());
        // Not a link, not on another file system, and not a file of another user.
        from.symlink_metadata().is_ok_and(|m| m.is_file()) && files::hard_link(from, &to).is_ok()
    }

    /// As `link`, as a copy.
    ///
    /// # Errors
    /// The file does not exist; it cannot be copied.
    pub fn copy(&self, from: &Path) -> Result<()> {
        files::copy_atomic(from, &self.temporary.join(from.file_name().unwrap_or_default()))
    }

    /// Gives the directory its final name, durably. An existing nonempty directory is kept as `<name>.left`.
    ///
    /// # Errors
    /// As `commit_over`.
    pub fn commit(self) -> Result<PathBuf> {
        self.commit_over(&|_| false)
    }

    /// As `commit`, for a name that was free before the work.
    ///
    /// # Errors
    /// Another process has made a nonempty directory of this name: then this one is kept as `<name>.left`. As `commit_over`.
    pub fn commit_new(mut self) -> Result<PathBuf> {
        let target = self.target.clone();
        if target.symlink_metadata().is_err() || is_empty(&target) {
            return self.commit_over(&|_| false);
        }
        unmark(&self.temporary)?;
        files::sync_dir(&self.temporary)?;
        files::finished(&self.temporary);
        self.done = true;
        let kept = set_aside(&self.temporary, &target)?;
        Err(Error::usage("another process has written to the output directory")
            .at_path(&target)
            .found(format!("the result of this process is in {}", kept.display()))
            .hint("give each command an output directory of its own"))
    }

    /// As `commit`, but removes the existing directory if `ours` returns true for it (all its contents belong to ft).
    /// The replacement is atomic if the system can swap two names. Otherwise the old directory is moved aside first,
    /// and `clean` moves it back if the process ends between the two steps.
    ///
    /// # Errors
    /// The directory cannot be synced or renamed, or the existing one cannot be moved aside.
    pub fn commit_over(mut self, ours: &dyn Fn(&Path) -> bool) -> Result<PathBuf> {
        unmark(&self.temporary)?;
        files::sync_dir(&self.temporary)?;
        // From here on the temporary name may hold the previous directory: a signal must not remove it.
        files::finished(&self.temporary);
        let mut replaced = None;
        if self.target.symlink_metadata().is_err() {
            files::rename(&self.temporary, &self.target)?;
        } else if files::exchange(&self.temporary, &self.target)? {
            // The temporary name has the previous directory now: an error must not remove it.
            self.done = true;
            files::sync_dir(self.target.parent().unwrap_or(Path::new(".")))?;
            replaced = Some(self.temporary.clone());
        } else {
            let aside = with_suffix(&self.target, REPLACED)?;
            files::rename(&self.target, &aside)?;
            files::rename(&self.temporary, &self.target)?;
            replaced = Some(aside);
        }
        self.done = true;
        if let Some(old) = replaced {
            if !is_directory(&old) || !(ours(&old) || is_empty(&old)) {
                set_aside(&old, &self.target)?;
            } else {
                remove_temporary(&old)?;
            }
        }
        Ok(self.target.clone())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        files::finished(&self.temporary);
        if !self.done {
            // This object created it.
            let _ = files::remove_dir_all(&self.temporary);
        }
    }
}

/// Creates a new marked directory under a temporary name.
fn new_temporary(target: &Path) -> Result<PathBuf> {
    let temporary = reserve(target)?.ok_or_else(|| all_in_use(target, files::TEMPORARY))?;
    // Without the marker a later start could not know whose it is.
    mark(&temporary).inspect_err(|_| discard(&temporary))?;
    Ok(temporary)
}

/// Creates a new empty directory under a temporary name, which a signal that ends the process removes. `None`: a thousand names
/// are in use.
fn reserve(target: &Path) -> Result<Option<PathBuf>> {
    for _ in 0..1000 {
        let temporary = files::temporary(target);
        if files::create_new_dir(&temporary)? {
            files::begun(&temporary);
            return Ok(Some(temporary));
        }
    }
    Ok(None)
}

/// Removes a directory that `reserve` created.
fn discard(temporary: &Path) {
    let _ = files::remove_dir_all(temporary);
    files::finished(temporary);
}

fn mark(dir: &Path) -> Result<()> {
    files::write_atomic(&dir.join(MARKER), MARK.as_bytes())
}

fn unmark(dir: &Path) -> Result<()> {
    files::remove_file(&dir.join(MARKER))
}

/// True if this is a directory (not a link) whose contents ft may remove.
pub fn is_marked(dir: &Path) -> bool {
    let marker = dir.join(MARKER);
    is_directory(dir)
        && marker.symlink_metadata().is_ok_and(|m| m.is_file())
        && files::read(&marker).is_ok_and(|text| text == MARK.as_bytes())
}

/// True for a directory itself, not for a link to one.
pub fn is_directory(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|m| m.is_dir())
}

/// True if this file is a marker, complete or truncated.
pub fn is_marker(path: &Path) -> bool {
    path.file_name()
        .is_some_and(|n| n.to_string_lossy().starts_with(MARKER))
        && path
            .symlink_metadata()
            .is_ok_and(|m| m.is_file() && m.len() <= MARK.len() as u64)
}

/// True if this is a directory (not a link) without files, or with markers only.
pub fn is_empty(dir: &Path) -> bool {
    is_directory(dir) && files::list(dir).is_ok_and(|entries| entries.iter().all(|e| is_marker(e)))
}

/// Makes `dir` a directory for temporary files, or reuses the one that ft made. Anything else of this name is renamed
/// to `<name>.left`.
///
/// # Errors
/// The directory cannot be created, or another one cannot be moved aside.
pub fn scratch(dir: &Path) -> Result<()> {
    if is_marked(dir) {
        return Ok(());
    }
    if dir.symlink_metadata().is_ok() && !is_empty(dir) {
        set_aside(dir, dir)?;
    }
    files::create_dir_all(dir)?;
    mark(dir)
}

/// Removes a directory of temporary files, and nothing else. Returns true if the name is free afterwards.
///
/// # Errors
/// The directory cannot be removed.
pub fn remove_scratch(dir: &Path) -> Result<bool> {
    if is_marked(dir) {
        files::remove_dir_all(dir)?;
    }
    Ok(dir.symlink_metadata().is_err())
}

/// The first free name of `<name>.left`, `<name>.left-2`, ...
///
/// # Errors
/// A thousand names are in use.
pub fn left_name(target: &Path) -> Result<PathBuf> {
    let name = target
        .file_name()
        .map(|n| n.to_string_lossy().into_owned())
        .unwrap_or_default();
    (1..1000)
        .map(|i| match i {
            1 => target.with_file_name(format!("{name}.left")),
            i => target.with_file_name(format!("{name}.left-{i}")),
        })
        .find(|p| p.symlink_metadata().is_err())
        .ok_or_else(|| Error::new("too many earlier directories with this name were moved aside").at_path(target))
}

/// Renames `path` to the `left_name` of `target`.
///
/// # Errors
/// As `left_name`; `path` cannot be renamed.
pub fn set_aside(path: &Path, target: &Path) -> Result<PathBuf> {
    let free = left_name(target)?;
    files::rename(path, &free)?;
    Ok(free)
}

/// Removes a directory that is known to be ft's, so that it is never visible half removed under its own name.
///
/// # Errors
/// The directory cannot be renamed or removed.
pub fn remove_whole(path: &Path) -> Result<()> {
    remove_temporary(&retire(path)?)
}

/// Gives a directory that is known to be ft's a temporary name, and marks it for removal. Returns the name.
///
/// # Errors
/// The directory cannot be renamed.
pub fn retire(path: &Path) -> Result<PathBuf> {
    let mut temporary = files::temporary(path);
    while temporary.symlink_metadata().is_ok() {
        temporary = files::temporary(path);
    }
    files::rename(path, &temporary)?;
    // Without space for the marker the removal goes on: it makes space.
    let _ = mark(&temporary);
    Ok(temporary)
}

/// Removes a directory that is known to be ft's and has a temporary name, if no process works in it. Returns true if it was
/// removed.
///
/// # Errors
/// The directory cannot be removed.
pub fn remove_unused(dir: &Path) -> Result<bool> {
    // Held during the removal.
    let used = Use::of(dir);
    if matches!(used, Use::Held) {
        return Ok(false);
    }
    remove_temporary(dir).map(|()| true)
}

/// The marker is removed last, so that `clean` recognizes the rest if the process is killed.
pub(crate) fn remove_temporary(dir: &Path) -> Result<()> {
    if !is_marked(dir) {
        // As in `retire`.
        let _ = mark(dir);
    }
    remove_contents(dir)?;
    let used = dir.join(USED);
    if used.symlink_metadata().is_ok() {
        files::remove_file(&used)?;
    }
    files::remove_dir_all(dir)
}

/// Removes all but what says that ft may remove the directory.
fn remove_contents(dir: &Path) -> Result<()> {
    for entry in files::list(dir)? {
        let is_used = entry.file_name().is_some_and(|name| name == USED) && !is_directory(&entry);
        if is_used || is_marker(&entry) {
            continue;
        }
        if is_directory(&entry) {
            files::remove_dir_all(&entry)?;
        } else {
            files::remove_file(&entry)?;
        }
    }
    Ok(())
}

/// True for an empty directory that no process has changed for a day: the end of a removal that was killed. A process that has
/// just made one will write to it.
fn is_old_rest(dir: &Path) -> bool {
    let changed = || dir.symlink_metadata().and_then(|of| of.modified());
    is_empty(dir) && changed().is_ok_and(|changed| !is_recent(changed))
}

/// Result of `clean`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CleanupReport {
    /// Removed files and directories.
    pub removed: Vec<PathBuf>,
    /// Directories that got their original names back.
    pub restored: Vec<PathBuf>,
    /// Entries that look like ft's, but without proof.
    pub left: Vec<PathBuf>,
}

/// Describes the possible owner of leftover entries in a directory.
pub struct LeftoverOwner<'a> {
    /// Process ids that are known to have worked here.
    pub processes: &'a BTreeSet<u32>,
    /// True for names that ft gives to files and directories here.
    pub is_name: &'a dyn Fn(&str) -> bool,
    /// True if everything in this directory belongs to ft.
    pub is_ours: &'a dyn Fn(&Path) -> bool,
}

/// Removes leftovers of killed processes in `dir` (`<name>.tmp-<pid>`). A directory that was moved aside during a
/// replacement (`<name>.old-<pid>`) gets its name back if the name is free.
///
/// Only the process that owns `dir` may call this. An entry is changed only if its name and process belong to the
/// owner; a directory only if it has ft's marker, is empty, or its contents belong to the owner; a link never.
/// A `ScratchDirectory` may be of any process: it is removed if no process holds it, and else left alone; for a day also if its
/// process was on another machine or in another container. An empty directory of any process is removed after a day.
///
/// # Errors
/// `dir` cannot be read; a leftover cannot be removed or renamed.
pub fn clean(dir: &Path, owner: &LeftoverOwner) -> Result<CleanupReport> {
    let mut out = CleanupReport::default();
    if !dir.is_dir() {
        return Ok(out);
    }
    for path in files::list(dir)? {
        let name = path
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        let named = |mark: &str| before(&name, mark).filter(|(original, _)| (owner.is_name)(original));
        let mine = |mark: &str| named(mark).filter(|(_, pid)| owner.processes.contains(pid));
        let certain = |path: &Path| is_directory(path) && (is_marked(path) || is_empty(path) || (owner.is_ours)(path));
        if let Some((original, _)) = mine(REPLACED) {
            let original = dir.join(original);
            if original.symlink_metadata().is_err() && is_directory(&path) {
                files::rename(&path, &original)?;
                out.restored.push(original);
            } else if certain(&path) {
                remove_temporary(&path)?;
                out.removed.push(path);
            } else {
                out.left.push(path);
            }
        } else if named(files::TEMPORARY).is_some() {
            // Held during the removal.
            let alone = match Use::of(&path) {
                Use::Held => continue,
                Use::Left(mark) => Some(mark),
                Use::Unknown => None,
            };
            if alone.is_none() && mine(files::TEMPORARY).is_none() && !is_old_rest(&path) {
                continue;
            }
            if certain(&path) {
                remove_temporary(&path)?;
                out.removed.push(path);
            } else if path.symlink_metadata().is_ok_and(|m| m.is_file()) {
                files::remove_file(&path)?;
                out.removed.push(path);
            } else {
                out.left.push(path);
            }
        }
    }
    Ok(out)
}

fn with_suffix(path: &Path, mark: &str) -> Result<PathBuf> {
    let name = path
        .file_name()
        .map(|n| n.to_string_lossy().into_owned())
        .unwrap_or_default();
    let process = std::process::id();
    (0..1000)
        .map(|n| match n {
            0 => path.with_file_name(format!("{name}{mark}{process}")),
            n => path.with_file_name(format!("{name}{mark}{process}-{n}")),
        })
        .find(|p| p.symlink_metadata().is_err())
        .ok_or_else(|| all_in_use(path, mark))
}

fn all_in_use(path: &Path, mark: &str) -> Error {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    Error::new("all temporary names next to this directory are in use")
        .at_path(path)
        .hint(format!("remove the directories of earlier runs: `{name}{mark}*`"))
}

/// The name in a temporary name: `plan.json` in `plan.json.tmp-1234`.
pub fn original(name: &str) -> Option<&str> {
    before(name, files::TEMPORARY).map(|(original, _)| original)
}

/// Splits `checkpoint-5.tmp-1234` or `checkpoint-5.tmp-1234-2` into `checkpoint-5` and 1234.
fn before<'a>(name: &'a str, mark: &str) -> Option<(&'a str, u32)> {
    let (original, process) = name.rsplit_once(mark)?;
    let (process, number) = process.split_once('-').unwrap_or((process, "0"));
    let digits = |t: &str| !t.is_empty() && t.bytes().all(|b| b.is_ascii_digit());
    if original.is_empty() || !digits(process) || !digits(number) {
        return None;
    }
    Some((original, process.parse().ok()?))
}

#[cfg(test)]
mod tests;
