//! Compares the checkpoints and the result of a run with the hashes that the run stored.

use crate::base::{Error, Result};
use crate::checkpoint;
use crate::report;
use crate::train::owner::{DirectoryState, FINAL, FinalCheck, OwnedFiles};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// One checkpoint, or `final/`.
pub struct CheckedDirectory {
    pub path: PathBuf,
    /// Number of files with a stored hash; `None`: an earlier version stored none.
    pub files: Option<usize>,
    /// The faults; each names its file.
    pub errors: Vec<Error>,
}

/// Reads every file of the checkpoints and of `final/`. Changes nothing. A run in progress can remove a checkpoint and replace
/// `final/` meanwhile: what cannot be checked is not in the result, and a note names it.
///
/// Errors: this is not the directory of a run.
pub fn verify(run_dir: &Path) -> Result<Vec<CheckedDirectory>> {
    if !matches!(DirectoryState::of(run_dir)?, DirectoryState::Run(_)) {
        return Err(Error::usage("this is not a run directory")
            .at_path(run_dir)
            .expected("a directory that `ft train` wrote"));
    }
    let listed = checkpoint::list(run_dir)?.into_iter();
    let mut all: Vec<CheckedDirectory> = listed.filter_map(|(_, path)| of_checkpoint(path)).collect();
    let path = run_dir.join(FINAL);
    match OwnedFiles::verify_final(run_dir)? {
        FinalCheck::Compared(files, errors) => all.push(CheckedDirectory {
            path,
            files: Some(files),
            errors,
        }),
        FinalCheck::Unrecorded => report::note(&format!(
            "{}: not checked: the run has not recorded the hashes of these files yet, or ended before that",
            path.display()
        )),
        FinalCheck::Unknown if path.exists() => all.push(CheckedDirectory {
            path,
            files: None,
            errors: Vec::new(),
        }),
        FinalCheck::Unknown => {}
    }
    Ok(all)
}

/// Checks one of the checkpoints that were listed. `None`: it was removed meanwhile.
fn of_checkpoint(path: PathBuf) -> Option<CheckedDirectory> {
    let (files, errors) = match checkpoint::verify(&path) {
        Ok(manifest) => (manifest.files.len(), Vec::new()),
        Err(_) if is_gone(&path) => {
            report::note(&format!(
                "{}: not checked: the run removed this checkpoint meanwhile",
                path.display()
            ));
            return None;
        }
        Err(e) => (0, vec![e]),
    };
    Some(CheckedDirectory {
        path,
        files: Some(files),
        errors,
    })
}

/// The error that was met while this checkpoint was read. If it is gone, the run has removed it: its files are not damaged.
pub fn or_removed(e: Error, checkpoint: &Path) -> Error {
    if is_gone(checkpoint) {
        e.hint(
            "this checkpoint does not exist any more: the run keeps the newest `train.save_total_limit` ones, and removed it \
             meanwhile; give a newer one",
        )
    } else {
        e
    }
}

fn is_gone(path: &Path) -> bool {
    path.symlink_metadata().is_err_and(|e| e.kind() == ErrorKind::NotFound)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_checkpoint_that_the_run_removes_meanwhile_is_not_called_damaged() {
        let dir = tempfile::tempdir().unwrap();
        for step in [1, 2, 3] {
            checkpoint::save(dir.path(), step, &json!({}), &[], &mut |_, _, _| Ok(())).unwrap();
        }
        let listed: Vec<PathBuf> = checkpoint::list(dir.path())
            .unwrap()
            .into_iter()
            .map(|(_, p)| p)
            .collect();
        let [removed, damaged, whole] = listed.as_slice() else {
            panic!("{listed:?}")
        };
        assert!(checkpoint::remove(removed).unwrap());
        std::fs::write(damaged.join(checkpoint::STATE), "{ }").unwrap();
        assert!(of_checkpoint(removed.clone()).is_none());
        let checked = of_checkpoint(damaged.clone()).unwrap();
        assert_eq!((checked.files, checked.errors.len()), (Some(0), 1));
        let checked = of_checkpoint(whole.clone()).unwrap();
        assert_eq!((checked.files, checked.errors.len()), (Some(1), 0));

        // A program that reads one of them has the same race.
        let said = |path: &PathBuf| {
            let e = checkpoint::load(path).unwrap_err();
            or_removed(e, path).to_string()
        };
        assert!(
            said(removed).contains("removed it meanwhile; give a newer one"),
            "{}",
            said(removed)
        );
        assert!(!said(damaged).contains("meanwhile"), "{}", said(damaged));
    }
}
