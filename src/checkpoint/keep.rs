//! Which checkpoints a run has, and which of them stay.

use super::manifest::verify;
use crate::base::staging;
use crate::base::{Error, Result, files};
use std::path::{Path, PathBuf};

const PREFIX: &str = "checkpoint-";

pub(super) fn name_of(step: u64) -> String {
    format!("{PREFIX}{step}")
}

/// The step in a directory's name, if it is a checkpoint's name as `save` writes it.
pub(super) fn step_of(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    let step = name.strip_prefix(PREFIX)?.parse().ok()?;
    (name == name_of(step)).then_some(step)
}

/// The directories with a checkpoint's name, oldest step first. They are not verified.
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

/// Deletes the oldest checkpoints beyond `keep`, and only after the newest was verified: a damaged newest one
/// never costs a good older one. `keep = 0` keeps all, as `save_total_limit` of Hugging Face does. Returns what
/// was deleted.
///
/// Errors: the newest does not verify (nothing is deleted then).
pub fn rotate(run_dir: &Path, keep: usize) -> Result<Vec<PathBuf>> {
    let all = list(run_dir)?;
    if keep == 0 || all.len() <= keep {
        return Ok(Vec::new());
    }
    if let Some((_, newest)) = all.last() {
        verify(newest)?;
    }
    let mut deleted = Vec::new();
    for (_, path) in all.iter().take(all.len() - keep) {
        staging::remove_whole(path)?;
        deleted.push(path.clone());
    }
    Ok(deleted)
}

/// Removes what killed processes left: `*.tmp-<pid>`. Returns what was found, so that it can be mentioned.
/// Call it with the run's lock held and before `latest`: a save that was cut off while it replaced a
/// checkpoint of the same step is put right here too.
pub fn clean_leftovers(run_dir: &Path) -> Result<Vec<PathBuf>> {
    staging::clean(run_dir)
}

/// For a run that resumes at `step` although later checkpoints exist: renames those to
/// `checkpoint-<step>.left`, `.left-2` and so on. They belong to a run that is no longer continued, and must
/// neither be resumed next time nor push out the new ones. Returns the new names.
pub fn set_aside_later(run_dir: &Path, step: u64) -> Result<Vec<PathBuf>> {
    let mut out = Vec::new();
    for (_, path) in list(run_dir)?.into_iter().filter(|(s, _)| *s > step) {
        let name = path
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        let free = (1..1000)
            .map(|i| match i {
                1 => path.with_file_name(format!("{name}.left")),
                i => path.with_file_name(format!("{name}.left-{i}")),
            })
            .find(|p| p.symlink_metadata().is_err());
        let Some(free) = free else {
            return Err(Error::new("too many checkpoints of this step were set aside").at_path(&path));
        };
        files::rename(&path, &free)?;
        out.push(free);
    }
    Ok(out)
}
