//! Loads a training state.

use super::parts::parts_of;
use super::{STATE, keep, manifest};
use crate::base::{Error, Result, files, paths};
use crate::formats::weights::Weights;
use std::path::{Path, PathBuf};

/// A state whose files were verified.
#[derive(Debug)]
pub struct LoadedState {
    pub step: u64,
    pub path: PathBuf,
    pub state: serde_json::Value,
    files: Vec<String>,
}

impl LoadedState {
    /// Opens the tensors of one file by the name under which it was saved, also if each rank saved a part of it: the
    /// tensors are whole and flat then.
    ///
    /// Errors: the checkpoint has no such file, or parts of it that do not fit together.
    pub fn open(&self, file: &str) -> Result<Weights> {
        if let Some(parts) = parts_of(file, &self.files) {
            return Weights::open_pieces(&self.path, &parts);
        }
        if !self.files.iter().any(|f| f == file) {
            return Err(Error::format(format!("checkpoint has no file `{file}`"))
                .at_path(&self.path)
                .found(self.files.join(", "))
                .hint("it was saved by a run with other settings, or by another version of ft"));
        }
        Weights::open_file(&self.path.join(file))
    }
}

/// Verifies the checkpoint in `dir` and reads its state. Errors: as `verify`; the step in the directory's name differs
/// from the manifest (a copy with a wrong name must not be resumed as that step).
pub fn load(dir: &Path) -> Result<LoadedState> {
    if !dir.is_dir() {
        return Err(paths::missing("checkpoint directory", dir).expected("a `checkpoint-<step>` directory of a run"));
    }
    let manifest = manifest::verify(dir)?;
    if let Some(named) = keep::step_of(dir).filter(|s| *s != manifest.step) {
        return Err(
            Error::new("the name of the checkpoint directory has another step number")
                .at_path(dir)
                .found(format!("step {} in its manifest", manifest.step))
                .expected(format!("step {named}")),
        );
    }
    let path = dir.join(STATE);
    let state = serde_json::from_str(&files::read_text(&path)?)
        .map_err(|e| Error::new("training state is not valid JSON").at_path(&path).cause(e))?;
    Ok(LoadedState {
        step: manifest.step,
        path: dir.to_path_buf(),
        state,
        files: manifest.files.into_iter().map(|f| f.name).collect(),
    })
}

/// Loads and verifies the newest checkpoint of a run; `None` if there is none. Ignores incomplete saves
/// (`checkpoint-<step>.tmp-<pid>`); `clean_leftovers` removes them.
///
/// Errors: the newest one is damaged. An older one is used only if the user names it: using it without notice would
/// lose training that the user expects to exist.
pub fn latest(run_dir: &Path) -> Result<Option<LoadedState>> {
    match keep::list(run_dir)?.last() {
        None => Ok(None),
        Some((_, path)) => load(path).map(Some),
    }
}

/// As `latest`, but ignores damaged checkpoints: loads the newest one that verifies. Also returns what is wrong with
/// the newer ones, one line each.
///
/// Errors: all are damaged; that of the newest one.
pub fn latest_whole(run_dir: &Path) -> Result<(Option<LoadedState>, Vec<String>)> {
    let mut damaged: Vec<Error> = Vec::new();
    for (_, path) in keep::list(run_dir)?.iter().rev() {
        match load(path) {
            Ok(state) => return Ok((Some(state), damaged.iter().map(Error::line).collect())),
            Err(e) => damaged.push(e),
        }
    }
    match damaged.into_iter().next() {
        Some(newest) => Err(newest),
        None => Ok((None, Vec::new())),
    }
}
