//! Reading a training state back.

use super::{STATE, keep, manifest};
use crate::base::{Error, Result, files, paths};
use crate::formats::weights::Weights;
use std::path::{Path, PathBuf};

/// A state whose files were all verified.
#[derive(Debug)]
pub struct Loaded {
    pub step: u64,
    pub path: PathBuf,
    pub state: serde_json::Value,
    files: Vec<String>,
}

impl Loaded {
    /// The tensors of one file, by the name it was saved under.
    ///
    /// Errors: the checkpoint has no such file.
    pub fn open(&self, file: &str) -> Result<Weights> {
        if !self.files.iter().any(|f| f == file) {
            return Err(Error::new(format!("checkpoint has no file `{file}`"))
                .at_path(&self.path)
                .found(self.files.join(", "))
                .hint("it was saved by a run with other settings, or by another version of ft"));
        }
        Weights::open_file(&self.path.join(file))
    }
}

/// Verifies the checkpoint in `dir` and reads its state. Errors as `verify`; also a directory whose name says
/// another step than its manifest (a copy under a wrong name must not be resumed as that step).
pub fn load(dir: &Path) -> Result<Loaded> {
    if !dir.is_dir() {
        return Err(paths::missing("checkpoint directory", dir).expected("a `checkpoint-<step>` directory of a run"));
    }
    let manifest = manifest::verify(dir)?;
    if let Some(named) = keep::step_of(dir).filter(|s| *s != manifest.step) {
        return Err(Error::new("checkpoint directory has the name of another step")
            .at_path(dir)
            .found(format!("step {} in its manifest", manifest.step))
            .expected(format!("step {named}")));
    }
    let path = dir.join(STATE);
    let state = serde_json::from_str(&files::read_text(&path)?)
        .map_err(|e| Error::new("training state is not valid JSON").at_path(&path).cause(e))?;
    Ok(Loaded {
        step: manifest.step,
        path: dir.to_path_buf(),
        state,
        files: manifest.files.into_iter().map(|f| f.name).collect(),
    })
}

/// The newest checkpoint of a run, verified; `None` when there is none. Work that was never finished
/// (`checkpoint-<step>.tmp-<pid>`) does not count; `clean_leftovers` removes it.
///
/// Errors: the newest one is damaged. An older one is then taken only when the user names it: going back in
/// silence would lose training that the user believes done.
pub fn latest(run_dir: &Path) -> Result<Option<Loaded>> {
    match keep::list(run_dir)?.last() {
        None => Ok(None),
        Some((_, path)) => load(path).map(Some),
    }
}
