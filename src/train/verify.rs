//! Compares the checkpoints and the result of a run with the hashes that the run stored.

use crate::base::{Error, Result};
use crate::checkpoint;
use crate::train::owner::{DirectoryState, FINAL, OwnedFiles};
use std::path::{Path, PathBuf};

/// One checkpoint, or `final/`.
pub struct CheckedDirectory {
    pub path: PathBuf,
    /// Number of files with a stored hash; `None`: an earlier version stored none.
    pub files: Option<usize>,
    /// The faults; each names its file.
    pub errors: Vec<Error>,
}

/// Reads every file of the checkpoints and of `final/`. Changes nothing.
///
/// Errors: this is not the directory of a run.
pub fn verify(run_dir: &Path) -> Result<Vec<CheckedDirectory>> {
    if !matches!(DirectoryState::of(run_dir)?, DirectoryState::Run(_)) {
        return Err(Error::usage("this is not a run directory")
            .at_path(run_dir)
            .expected("a directory that `ft train` wrote"));
    }
    let mut all = Vec::new();
    for (_, path) in checkpoint::list(run_dir)? {
        let (files, errors) = match checkpoint::verify(&path) {
            Ok(manifest) => (manifest.files.len(), Vec::new()),
            Err(e) => (0, vec![e]),
        };
        all.push(CheckedDirectory {
            path,
            files: Some(files),
            errors,
        });
    }
    let path = run_dir.join(FINAL);
    match OwnedFiles::verify_final(run_dir)? {
        Some((files, errors)) => all.push(CheckedDirectory {
            path,
            files: Some(files),
            errors,
        }),
        None if path.exists() => all.push(CheckedDirectory {
            path,
            files: None,
            errors: Vec::new(),
        }),
        None => {}
    }
    Ok(all)
}
