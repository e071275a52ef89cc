//! Lists, rotates and removes the checkpoints of a run.

use super::STATE;
use super::manifest::{self, verify};
use crate::base::staging::{self, CleanupReport, LeftoverOwner};
use crate::base::{Result, files};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const PREFIX: &str = "checkpoint-";

pub(super) fn name_of(step: u64) -> String {
    format!("{PREFIX}{step}")
}

/// The step in a directory's name, if the name has the form that `save` writes.
pub(super) fn step_of(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    let step = name.strip_prefix(PREFIX)?.parse().ok()?;
    (name == name_of(step)).then_some(step)
}

/// The directories with a checkpoint name, oldest step first; not verified.
pub fn list(run_dir: &Path) -> Result<Vec<(u64, PathBuf)>> {
    if !run_dir.is_dir() {
        return Ok(Vec::new());
    }
    let mut out: Vec<_> = files::list(run_dir)?
        .into_iter()
        .filter(|p| p.is_dir())
        .filter_map(|p| Some((step_of(&p)?, p)))
        .collect();
    out.sort();
    Ok(out)
}

/// True if this directory (not a link) is a checkpoint of ft and contains nothing else: its sealed manifest lists all
/// its files. The files may be damaged.
pub fn is_ours(path: &Path) -> bool {
    let Some(named) = manifest::files_of(path).filter(|_| staging::is_directory(path)) else {
        return false;
    };
    let known = |entry: &PathBuf| {
        let name = entry.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let plain = entry.symlink_metadata().is_ok_and(|m| m.is_file());
        plain && (name == manifest::MANIFEST || named.iter().any(|n| n == name)) || staging::is_marker(entry)
    };
    files::list(path).is_ok_and(|entries| entries.iter().all(known))
}

/// The result of a rotation.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RotationReport {
    pub deleted: Vec<PathBuf>,
    /// Checkpoints that stay: they contain other files, or are links.
    pub kept: Vec<PathBuf>,
}

/// Deletes the oldest checkpoints beyond `keep`, but only after it verified the newest one: a damaged newest checkpoint
/// never leads to the loss of a valid older one. `keep = 0` keeps all, as `save_total_limit` of Hugging Face does. The
/// checkpoint of step `best` stays in addition.
///
/// Errors: the newest checkpoint does not verify (then nothing is deleted).
pub fn rotate(run_dir: &Path, keep: usize, best: Option<u64>) -> Result<RotationReport> {
    let mut out = RotationReport::default();
    let all = list(run_dir)?;
    if keep == 0 || all.len() <= keep {
        return Ok(out);
    }
    if let Some((_, newest)) = all.last() {
        verify(newest)?;
    }
    let old = all.iter().take(all.len() - keep);
    for (_, path) in old.filter(|(step, _)| Some(*step) != best) {
        if remove(path)? {
            out.deleted.push(path.clone())
        } else {
            out.kept.push(path.clone())
        }
    }
    Ok(out)
}

/// Removes a checkpoint. Returns `false` and keeps it if ft did not write it, or if it contains other files.
pub fn remove(path: &Path) -> Result<bool> {
    if is_ours(path) {
        staging::remove_whole(path).map(|()| true)
    } else {
        Ok(false)
    }
}

/// Removes leftovers of killed processes of this run (`checkpoint-<step>.tmp-<pid>` and similar). `processes`: those
/// that worked in the run directory; `is_name` is true for other names that the run uses.
///
/// Requires the lock of the run; call it before `latest`. It also repairs a save that was interrupted while it replaced
/// a checkpoint of the same step.
pub fn clean_leftovers(
    run_dir: &Path,
    processes: &BTreeSet<u32>,
    is_name: &dyn Fn(&str) -> bool,
) -> Result<CleanupReport> {
    let owner = LeftoverOwner {
        processes,
        is_name: &|name| step_of(Path::new(name)).is_some() || is_name(name),
        is_ours: &is_ours,
    };
    staging::clean(run_dir, &owner)
}

/// For a run that resumes at `step` although later checkpoints exist: renames those to `checkpoint-<step>.left`,
/// `.left-2` and so on. They belong to an abandoned continuation: the next resume must not use them, and rotation must
/// not prefer them to new ones. A directory without any checkpoint file stays. Returns the new names.
pub fn set_aside_later(run_dir: &Path, step: u64) -> Result<Vec<PathBuf>> {
    let mut out = Vec::new();
    for (_, path) in list(run_dir)?.into_iter().filter(|(s, _)| *s > step) {
        // Also damaged ones: the next resume would fail on them.
        let part = |name: &str| path.join(name).symlink_metadata().is_ok_and(|m| m.is_file());
        if staging::is_directory(&path) && (part(manifest::MANIFEST) || part(STATE)) {
            out.push(staging::set_aside(&path, &path)?);
        }
    }
    Ok(out)
}
