//! `final/` in the manifest of a run: recorded when it is written, later recognized and compared with its hashes.

use super::{FINAL, OwnedFiles, StoredFile, inside, name_of};
use crate::base::{Error, Result, files, staging};
use crate::checkpoint;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The result of `verify_final`.
#[derive(Debug)]
pub enum FinalCheck {
    /// The run wrote no `final/`, or no hashes (earlier versions).
    Unknown,
    /// The files are there, but their hashes are not: the run records or computes them now, or ended before that.
    Unrecorded,
    /// The number of files, and what is wrong with them, each named.
    Compared(usize, Vec<Error>),
}

/// A new `final/` whose files are in the manifest, and what is left to do for the previous ones.
#[derive(Debug)]
#[must_use]
pub struct RecordedFinal {
    /// The previous one, if it was changed, or this run did not write it.
    other: Option<PathBuf>,
    /// Previous ones that this run wrote, under temporary names.
    old: Vec<PathBuf>,
}

/// What became of previous results.
#[derive(Debug, Default)]
pub struct FinalCleanup {
    /// The last one was changed by another program, so it stays.
    pub stays: bool,
    /// Results of killed processes of this run that were removed, because they have the bytes of the new one.
    pub removed: Vec<PathBuf>,
    /// Why others that this run wrote are not removed.
    pub errors: Vec<Error>,
}

/// True for the end of a name from `staging::left_name`: `.left` or `.left-2`.
fn is_left(end: &str) -> bool {
    let is_number = |n: &str| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit());
    let rest = end.strip_prefix(".left");
    rest.is_some_and(|rest| rest.is_empty() || rest.strip_prefix('-').is_some_and(is_number))
}

impl OwnedFiles {
    /// Records the files of a new `final/` without their hashes, directly after it got its name: before this the manifest has the
    /// files of the previous one, whose name is `before` now. If this run wrote all of the previous one, it is marked for removal.
    pub fn record_final(&mut self, run_dir: &Path, before: &Path) -> Result<RecordedFinal> {
        // First: nothing shows whose a previous one is when its files are not in the manifest any more.
        let mut old = self.temporaries(run_dir)?;
        old.retain(|(_, path)| self.is_retired_final(path));
        let mut old: Vec<PathBuf> = old.into_iter().map(|(_, path)| path).collect();
        let ours = self.is_final(before);
        if ours {
            old.push(staging::retire(before)?);
        }
        self.finals = inside(&run_dir.join(FINAL))?;
        for file in self.finals.values_mut() {
            file.hash = Some(String::new());
        }
        self.write(run_dir)?;
        let stays = !ours && before.symlink_metadata().is_ok();
        Ok(RecordedFinal {
            other: stays.then(|| before.to_path_buf()),
            old,
        })
    }

    /// Records the hashes of the new result, and removes previous ones that this run wrote: both take minutes for a large model.
    ///
    /// Errors: a file of the new result cannot be read; the manifest cannot be written.
    pub fn complete_final(&mut self, run_dir: &Path, recorded: RecordedFinal) -> Result<FinalCleanup> {
        let out = run_dir.join(FINAL);
        for (name, file) in &mut self.finals {
            file.hash = Some(checkpoint::hash(&out.join(name))?.1);
        }
        self.write(run_dir)?;
        let mut cleanup = FinalCleanup::default();
        for path in &recorded.old {
            cleanup.errors.extend(staging::remove_unused(path).err());
        }
        match recorded.other {
            // Killed before it was recorded, then written again.
            Some(before) if self.doubles(&before) => match staging::remove_whole(&before) {
                Ok(()) => cleanup.removed.push(before),
                Err(e) => cleanup.errors.push(e),
            },
            other => cleanup.stays = other.is_some(),
        }
        for (kept, path) in self.temporaries(run_dir)? {
            // Killed between its last file and its name; or while it removed a previous result.
            let is_result = kept.is_empty();
            let is_known = if is_result {
                self.doubles(&path)
            } else {
                staging::is_marked(&path) || staging::is_empty(&path)
            };
            if is_known && !recorded.old.contains(&path) {
                match staging::remove_unused(&path) {
                    Ok(true) if is_result => cleanup.removed.push(path),
                    Ok(_) => {}
                    Err(e) => cleanup.errors.push(e),
                }
            }
        }
        Ok(cleanup)
    }

    /// Temporary directories for `final/`, and for previous ones, of processes of this run. Each with its name between `final` and
    /// the process.
    pub(super) fn temporaries(&self, run_dir: &Path) -> Result<Vec<(String, PathBuf)>> {
        let mut found = Vec::new();
        for path in files::list(run_dir)? {
            let name = name_of(&path);
            let Some((kept, process)) = parts(&name) else { continue };
            let process = process.split('-').next().and_then(|p| p.parse().ok());
            let is_ours = process.is_some_and(|p| self.processes.contains(&p));
            if is_ours && (kept.is_empty() || is_left(kept)) {
                found.push((kept.to_string(), path));
            }
        }
        Ok(found)
    }

    /// Both steps.
    #[cfg(test)]
    pub(super) fn exported(&mut self, run_dir: &Path, before: &Path) -> Result<(bool, Vec<PathBuf>)> {
        let recorded = self.record_final(run_dir, before)?;
        let cleanup = self.complete_final(run_dir, recorded)?;
        assert!(cleanup.errors.is_empty(), "{:?}", cleanup.errors);
        Ok((cleanup.stays, cleanup.removed))
    }

    /// True if each file of this directory is in `final/` too, with the same bytes.
    fn doubles(&self, dir: &Path) -> bool {
        let known = |name: &String, now: &StoredFile| {
            let known = self.finals.get(name);
            known.filter(|stored| stored.size == now.size && now.changed != -1)
        };
        let is_same = |name: &String, now: &StoredFile| {
            let hash = known(name, now).and_then(|stored| stored.hash.clone());
            hash.is_some_and(|stored| checkpoint::hash(&dir.join(name)).is_ok_and(|(_, hash)| hash == stored))
        };
        // Before the first file is read: names and sizes.
        let all = |now: BTreeMap<String, StoredFile>| {
            !now.is_empty()
                && now.iter().all(|(name, file)| known(name, file).is_some())
                && now.iter().all(|(name, file)| is_same(name, file))
        };
        staging::is_directory(dir) && inside(dir).is_ok_and(all)
    }

    /// True if this directory is an unchanged `final/` of this run.
    pub(super) fn is_final(&self, dir: &Path) -> bool {
        staging::is_directory(dir) && inside(dir).is_ok_and(|now| self.is_unchanged(&now))
    }

    /// As `is_final`, for one with a temporary name. A process may have been killed while it wrote the mark for the removal.
    pub(super) fn is_retired_final(&self, dir: &Path) -> bool {
        let unmarked = |mut now: BTreeMap<String, StoredFile>| {
            now.retain(|name, _| !staging::is_marker(&dir.join(name)));
            self.is_unchanged(&now)
        };
        staging::is_directory(dir) && inside(dir).is_ok_and(unmarked)
    }

    fn is_unchanged(&self, now: &BTreeMap<String, StoredFile>) -> bool {
        let mut files = now.iter().zip(&self.finals);
        let equal = |a: &StoredFile, b: &StoredFile| (a.size, a.changed) == (b.size, b.changed);
        !now.is_empty() && now.len() == self.finals.len() && files.all(|(a, b)| a.0 == b.0 && equal(a.1, b.1))
    }

    /// Compares `final/` with what the run wrote.
    pub fn verify_final(run_dir: &Path) -> Result<FinalCheck> {
        Self::verify_files(run_dir, &|_| true)
    }

    /// Compares those files of `final/` for whose names `is_wanted` is true.
    pub fn verify_files(run_dir: &Path, is_wanted: &dyn Fn(&str) -> bool) -> Result<FinalCheck> {
        loop {
            let Some(manifest) = Self::read(run_dir)? else {
                return Ok(FinalCheck::Unknown);
            };
            let check = manifest.compare_final(run_dir, is_wanted);
            // A run in progress may have written another one meanwhile.
            let is_wrong = matches!(&check, FinalCheck::Compared(_, wrong) if !wrong.is_empty());
            if !is_wrong || Self::read(run_dir)?.is_none_or(|now| now.finals == manifest.finals) {
                return Ok(check);
            }
        }
    }

    fn compare_final(&self, run_dir: &Path, is_wanted: &dyn Fn(&str) -> bool) -> FinalCheck {
        let out = run_dir.join(FINAL);
        // The run has replaced it, and is about to record the new one, or was killed before that: the one that is recorded has another
        // name.
        let is_recorded = |path: &PathBuf| {
            // A marked `final.tmp-1` may be an export that was stopped.
            is_previous(path)
                && (self.is_retired_final(path) || name_of(path).contains(".left") && staging::is_marked(path))
        };
        let replaced = || files::list(run_dir).is_ok_and(|all| all.iter().any(is_recorded));
        if self.finals.values().all(|file| file.hash.is_none()) {
            // Each version that registers its processes records the files of its `final/`: this is the first one, without a record.
            let is_first = self.finals.is_empty() && !self.processes.is_empty();
            let is_new = out.is_dir() && (is_first || replaced());
            return if is_new {
                FinalCheck::Unrecorded
            } else {
                FinalCheck::Unknown
            };
        }
        let wanted = self.finals.iter().filter(|(name, _)| is_wanted(name));
        let faults = wanted.map(|(name, file)| compare(&out.join(name), file));
        let wrong: Vec<Error> = faults.filter_map(Result::err).collect();
        let is_unrecorded = |file: &StoredFile| file.hash.as_deref().is_none_or(str::is_empty);
        let unrecorded = self.finals.values().any(is_unrecorded);
        if wrong.is_empty() && unrecorded || !wrong.is_empty() && !unrecorded && out.is_dir() && replaced() {
            FinalCheck::Unrecorded
        } else {
            FinalCheck::Compared(self.finals.len(), wrong)
        }
    }
}

/// Divides a temporary name for `final/`, or for a previous one, into what is between `final` and the process, and the process.
fn parts(name: &str) -> Option<(&str, &str)> {
    let end = name.strip_prefix(FINAL)?;
    end.split_once(files::TEMPORARY)
        .or_else(|| end.split_once(staging::REPLACED))
}

/// True for the names that a previous `final/` gets: `final.left`, `final.left-2`, and temporary ones.
fn is_previous(path: &Path) -> bool {
    let name = name_of(path);
    match parts(&name) {
        Some((kept, _)) => kept.is_empty() || is_left(kept),
        None => is_left(name.strip_prefix(FINAL).unwrap_or_default()),
    }
}

/// Errors: the file is missing, or is not as the run wrote it. Without a stored hash only its size is compared.
fn compare(path: &Path, stored: &StoredFile) -> Result<()> {
    if !path.symlink_metadata().is_ok_and(|m| m.is_file()) {
        return Err(Error::new("file of the result is missing").at_path(path));
    }
    let changed = |found: String, expected: String| {
        Error::new("file of the result is damaged or was changed")
            .at_path(path)
            .found(found)
            .expected(format!("{expected}, as the run wrote it"))
    };
    let size = files::size(path)?;
    if size != stored.size {
        return Err(changed(format!("{size} bytes"), format!("{} bytes", stored.size)));
    }
    let Some(expected) = stored.hash.as_ref().filter(|hash| !hash.is_empty()) else {
        return Ok(());
    };
    let (_, hash) = checkpoint::hash(path)?;
    if hash != *expected {
        return Err(changed(format!("contents with blake3 hash {hash}"), expected.clone()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::owner::DirectoryState;

    fn put(dir: &Path, name: &str, text: &str) {
        let path = dir.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        // Times of files differ by more than the clock of a file system resolves.
        std::thread::sleep(std::time::Duration::from_millis(20));
        std::fs::write(path, text).unwrap();
    }

    /// The manifest as the next process reads it.
    fn next(dir: &Path) -> OwnedFiles {
        match DirectoryState::of(dir).unwrap() {
            DirectoryState::Run(manifest) => manifest,
            other => panic!("{other:?}"),
        }
    }

    fn wrong(dir: &Path) -> Vec<String> {
        match OwnedFiles::verify_final(dir).unwrap() {
            FinalCheck::Compared(_, wrong) => wrong.iter().map(Error::to_string).collect(),
            other => panic!("{other:?}"),
        }
    }

    /// `exported` fails at the first hash: the state that a kill leaves there.
    fn killed_at_the_hashes(dir: &Path) {
        let unreadable = dir.join("final/a-link");
        std::os::unix::fs::symlink("/nowhere", &unreadable).unwrap();
        let e = next(dir).exported(dir, &dir.join("final.left")).unwrap_err();
        assert!(e.to_string().contains("a-link"), "{e}");
        std::fs::remove_file(&unreadable).unwrap();
        let mut manifest = next(dir);
        manifest.finals.remove("a-link");
        manifest.write(dir).unwrap();
    }

    /// Row C2.
    #[test]
    fn a_result_without_hashes_is_not_called_damaged_and_is_known_to_be_ours() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let left = d.join("final.left");
        OwnedFiles::default().join(d).unwrap();
        put(d, "final/model.safetensors", "after step 4");
        assert_eq!(next(d).exported(d, &left).unwrap(), (false, Vec::new()));
        assert_eq!(wrong(d), Vec::<String>::new());
        // A resumed run replaces it, and is killed while it computes the hashes.
        std::fs::rename(d.join("final"), &left).unwrap();
        put(d, "final/model.safetensors", "after step 6!");
        killed_at_the_hashes(d);
        assert!(!left.exists());
        assert!(matches!(OwnedFiles::verify_final(d).unwrap(), FinalCheck::Unrecorded));
        assert!(next(d).is_final(&d.join("final")));
        // What is missing or has another size is found without hashes too.
        put(d, "final/model.safetensors", "after step");
        assert!(
            wrong(d)[0].contains("expected 13 bytes, as the run wrote it"),
            "{:?}",
            wrong(d)
        );
        std::fs::remove_file(d.join("final/model.safetensors")).unwrap();
        assert!(wrong(d)[0].contains("is missing"), "{:?}", wrong(d));
        put(d, "final/model.safetensors", "after step 6!");
        assert!(!next(d).is_final(&d.join("final")));
        // The next export replaces the unchanged result without leaving a copy.
        killed_at_the_hashes(d);
        std::fs::rename(d.join("final"), &left).unwrap();
        put(d, "final/model.safetensors", "after step 8");
        assert_eq!(next(d).exported(d, &left).unwrap(), (false, Vec::new()));
        assert!(!left.exists() && wrong(d).is_empty());
        put(d, "final/model.safetensors", "after step 9");
        assert!(wrong(d)[0].contains("contents with blake3 hash"), "{:?}", wrong(d));
    }

    /// Row C2.
    #[test]
    fn a_result_that_was_not_recorded_is_removed_when_the_new_one_has_its_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let left = d.join("final.left");
        for (name, text, stays) in [
            ("final.left/config.json", "the same", false),
            ("final.left/config.json", "another.", true),
            ("final.left/notes.txt", "the same", true),
        ] {
            let mut manifest = OwnedFiles::default();
            manifest.join(d).unwrap();
            put(d, name, text);
            put(d, "final/config.json", "the same");
            // The rest of a removal that was killed.
            let rest = d.join(format!("final.left-2{}{}", files::TEMPORARY, std::process::id()));
            staging::scratch(&rest).unwrap();
            let (said, removed) = manifest.exported(d, &left).unwrap();
            assert_eq!((said, left.exists()), (stays, stays), "{name} {text}");
            assert_eq!(removed.len(), usize::from(!stays), "{name} {text}");
            assert!(!rest.exists());
            for dir in [&left, &d.join("final")] {
                let _ = std::fs::remove_dir_all(dir);
            }
        }
    }

    /// Row C2: what a kill leaves at any place between the name of a new result and its hashes.
    #[test]
    fn a_kill_before_the_hashes_leaves_no_result_that_is_called_damaged_or_stays_for_good() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let left = d.join("final.left");
        OwnedFiles::default().join(d).unwrap();
        put(d, "final/model.safetensors", "after step 4");
        next(d).exported(d, &left).unwrap();
        // The files are recorded, the previous ones are not removed yet.
        std::fs::rename(d.join("final"), &left).unwrap();
        put(d, "final/model.safetensors", "after step 6!");
        let recorded = next(d).record_final(d, &left).unwrap();
        assert!(matches!(OwnedFiles::verify_final(d).unwrap(), FinalCheck::Unrecorded));
        assert!(!left.exists() && recorded.old.len() == 1);
        assert!(recorded.old[0].exists() && staging::is_marked(&recorded.old[0]));
        // The previous one has its temporary name, but no mark.
        let unmarked = d.join(format!("final.left{}{}-9000", files::TEMPORARY, std::process::id()));
        std::fs::rename(d.join("final"), &unmarked).unwrap();
        put(d, "final/model.safetensors", "after step 8");
        assert_eq!(next(d).exported(d, &left).unwrap(), (false, Vec::new()));
        assert!(!unmarked.exists() && !recorded.old[0].exists());
        assert_eq!(wrong(d), Vec::<String>::new());
    }

    /// Row C2: where names cannot be swapped, the previous result has a name of its own for a moment.
    #[test]
    fn a_previous_result_that_was_moved_aside_before_a_kill_is_removed_later() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let (left, aside) = (d.join("final.left"), format!("final.old-{}", std::process::id()));
        OwnedFiles::default().join(d).unwrap();
        put(d, "final/model.safetensors", "after step 4");
        next(d).exported(d, &left).unwrap();
        std::fs::rename(d.join("final"), d.join(&aside)).unwrap();
        put(d, "final/model.safetensors", "after step 6!");
        assert!(matches!(OwnedFiles::verify_final(d).unwrap(), FinalCheck::Unrecorded));
        // The resumed run writes the same result again.
        std::fs::rename(d.join("final"), &left).unwrap();
        put(d, "final/model.safetensors", "after step 6!");
        assert_eq!(next(d).exported(d, &left).unwrap(), (false, vec![left.clone()]));
        assert!(!left.exists() && !d.join(&aside).exists());
        assert_eq!(wrong(d), Vec::<String>::new());
    }

    /// Rows C1, C2, C6.
    #[test]
    fn a_previous_result_whose_removal_was_killed_is_removed_later() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let temporary = d.join(format!("final.left.tmp-{}-9", std::process::id()));
        let whole = "Temporary files of ft: ft removes this directory when it needs it no more.\n";
        // While the mark was written, before and after; when it was removed.
        for (mark, text, keeps_files) in [
            (None, "", true),
            (Some(".ft-temporary.tmp-1-2"), "", true),
            (Some(".ft-temporary.tmp-1-2"), &whole[..9], true),
            (Some(".ft-temporary"), "\0\0\0", true),
            (Some(".ft-temporary"), whole, true),
            (Some(".ft-temporary"), whole, false),
            (None, "", false),
        ] {
            let mut first = OwnedFiles::default();
            first.join(d).unwrap();
            put(d, "final/model.safetensors", "after step 4");
            next(d).exported(d, &d.join("final.left")).unwrap();
            std::fs::rename(d.join("final"), &temporary).unwrap();
            if !keeps_files {
                std::fs::remove_file(temporary.join("model.safetensors")).unwrap();
            }
            if let Some(mark) = mark {
                std::fs::write(temporary.join(mark), text).unwrap();
            }
            put(d, "final/model.safetensors", "after step 6!");
            next(d).exported(d, &d.join("final.left")).unwrap();
            assert!(!temporary.exists(), "{mark:?} {text:?} {keeps_files}");
            assert_eq!(wrong(d), Vec::<String>::new());
            std::fs::remove_dir_all(d.join("final")).unwrap();
        }
        // A file of someone else.
        put(d, "final/model.safetensors", "after step 8");
        next(d).exported(d, &d.join("final.left")).unwrap();
        std::fs::rename(d.join("final"), &temporary).unwrap();
        std::fs::write(temporary.join("notes.txt"), "mine").unwrap();
        put(d, "final/model.safetensors", "after step 9!");
        next(d).exported(d, &d.join("final.left")).unwrap();
        assert!(temporary.join("notes.txt").exists());
    }

    #[test]
    fn temporary_directories_of_other_names_or_in_use_stay() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let mut manifest = OwnedFiles::default();
        manifest.join(d).unwrap();
        put(d, "final/config.json", "{}");
        // A command writes there now, with `--out final.left`.
        let live = staging::ScratchDirectory::beside(&d.join("final.left")).unwrap();
        let others = ["final.leftovers", "final.left-old", "final.left-"];
        let others = others.map(|name| d.join(format!("{name}{}{}", files::TEMPORARY, std::process::id())));
        others.iter().for_each(|path| staging::scratch(path).unwrap());
        manifest.exported(d, &d.join("final.left")).unwrap();
        assert!(live.path().exists() && others.iter().all(|path| path.exists()));
        assert!(is_left(".left") && is_left(".left-2"));
    }

    /// Row C2.
    #[test]
    fn a_new_result_that_is_not_recorded_yet_is_not_called_damaged() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        OwnedFiles::default().join(d).unwrap();
        put(d, "final/model.safetensors", "after step 4");
        assert_eq!(next(d).exported(d, &d.join("final.left")).unwrap(), (false, Vec::new()));
        // The names were swapped, and the previous result has got a name of its own.
        std::fs::rename(d.join("final"), d.join("final.left")).unwrap();
        put(d, "final/model.safetensors", "after step 6!");
        assert!(matches!(OwnedFiles::verify_final(d).unwrap(), FinalCheck::Unrecorded));
        std::fs::rename(d.join("final.left"), d.join("final.tmp-1")).unwrap();
        assert!(matches!(OwnedFiles::verify_final(d).unwrap(), FinalCheck::Unrecorded));
        // Without the recorded one, the files are not those that the run wrote.
        std::fs::remove_dir_all(d.join("final.tmp-1")).unwrap();
        assert_eq!(wrong(d).len(), 1);
        // A run that is replaced has no result.
        next(d).remove(d).unwrap();
        let mut manifest = next(d);
        manifest.remove(d).unwrap();
        manifest.join(d).unwrap();
        assert!(matches!(OwnedFiles::verify_final(d).unwrap(), FinalCheck::Unknown));
    }

    /// Row C2.
    #[test]
    fn a_first_result_that_is_not_recorded_yet_is_not_called_one_of_an_earlier_version() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        OwnedFiles::default().join(d).unwrap();
        assert!(matches!(OwnedFiles::verify_final(d).unwrap(), FinalCheck::Unknown));
        put(d, "final/model.safetensors", "after step 4");
        assert!(matches!(OwnedFiles::verify_final(d).unwrap(), FinalCheck::Unrecorded));
        assert_eq!(next(d).exported(d, &d.join("final.left")).unwrap(), (false, Vec::new()));
        assert_eq!(wrong(d), Vec::<String>::new());
    }

    #[test]
    fn hashes_that_an_earlier_version_did_not_store_are_not_compared() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        put(d, "final/config.json", "{}");
        put(
            d,
            "run.json",
            r#"{"format": "ft run 1", "final": {"config.json": [9, 9]}}"#,
        );
        assert!(matches!(OwnedFiles::verify_final(d).unwrap(), FinalCheck::Unknown));
        // Also after a later process has registered.
        next(d).join(d).unwrap();
        assert!(matches!(OwnedFiles::verify_final(d).unwrap(), FinalCheck::Unknown));
        // That process replaces the result, and has not recorded the new one yet.
        let mut manifest = next(d);
        manifest.finals = inside(&d.join("final")).unwrap();
        manifest.write(d).unwrap();
        assert!(matches!(OwnedFiles::verify_final(d).unwrap(), FinalCheck::Unknown));
        std::fs::rename(d.join("final"), d.join("final.left")).unwrap();
        put(d, "final/config.json", "{ }");
        assert!(matches!(OwnedFiles::verify_final(d).unwrap(), FinalCheck::Unrecorded));
    }
}
