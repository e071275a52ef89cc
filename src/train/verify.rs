//! Compares the checkpoints and the result of a run with the hashes that the run stored.

use crate::base::paths::shell_word;
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

/// The card of an adapter. A user may edit it before an upload.
const CARD: &str = "README.md";

/// If `dir` is the `final/` of a run, compares its files with the hashes that the run stored: before an upload, and before another
/// directory is made of it. Files that were added, the card, and a result whose hashes are not recorded (yet) pass.
///
/// Errors: a file is missing, or is not as the run wrote it.
pub fn check_result(dir: &Path) -> Result<()> {
    let is_result = |path: &Path| path.file_name().is_some_and(|name| name == FINAL) && !path.is_symlink();
    let dir = if is_result(dir) {
        dir.to_path_buf()
    } else {
        dir.canonicalize().unwrap_or_default()
    };
    let Some(run_dir) = dir.parent().filter(|_| is_result(&dir)) else {
        return Ok(());
    };
    let run_dir = if run_dir.as_os_str().is_empty() {
        Path::new(".")
    } else {
        run_dir
    };
    // An error: the run of another version, whose records this one cannot read.
    let Ok(FinalCheck::Compared(_, errors)) = OwnedFiles::verify_files(run_dir, &|name| name != CARD) else {
        return Ok(());
    };
    let Some(first) = errors.into_iter().next() else {
        return Ok(());
    };
    let shown = |path: &Path| shell_word(&path.display().to_string());
    let newest = checkpoint::list(run_dir)
        .ok()
        .and_then(|all| all.into_iter().next_back());
    let again = match newest {
        Some((_, newest)) => format!("`ft export {} --out DIR` makes a new one", shown(&newest)),
        None => "restore the file from a copy".to_string(),
    };
    Err(first.hint(format!(
        "{again}, `ft runs verify {}` names all such files; if the change is yours, give a copy of the directory",
        shown(run_dir)
    )))
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
