//! Directories that appear whole or not at all: built under a temporary name beside the final one, renamed
//! at the end. What a killed process leaves behind is recognised by its name and can be cleaned.

use crate::base::{Error, Result, files};
use std::path::{Path, PathBuf};

const TEMPORARY: &str = ".tmp-";
const REPLACED: &str = ".old-";

/// A directory in the making; dropped before `commit` it leaves nothing.
#[derive(Debug)]
pub struct Staging {
    temporary: PathBuf,
    target: PathBuf,
    done: bool,
}

impl Staging {
    /// Starts `<target>.tmp-<pid>`; the parent is created if need be.
    ///
    /// Errors: `target` is there and is no directory; the disk refuses.
    pub fn create(target: &Path) -> Result<Self> {
        if target.file_name().is_none() {
            return Err(Error::new("output path has no name of its own").at_path(target));
        }
        if target.exists() && !target.is_dir() {
            return Err(Error::new("a file stands where a directory should be written").at_path(target));
        }
        let temporary = files::temporary(target);
        // Process ids come back (in containers always): what an earlier process left here is not ours to keep.
        remove(&temporary)?;
        files::begun(&temporary);
        files::create_dir_all(&temporary)?;
        Ok(Self {
            temporary,
            target: target.to_path_buf(),
            done: false,
        })
    }

    /// Where to write.
    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// Gives the directory its name, durably. A directory that is there is replaced in one step where the
    /// system can swap two names; elsewhere it is moved aside first, and `clean` moves it back if the process
    /// ends between the two steps.
    pub fn commit(mut self) -> Result<PathBuf> {
        files::sync_dir(&self.temporary)?;
        if self.target.symlink_metadata().is_err() {
            files::rename(&self.temporary, &self.target)?;
        } else if files::exchange(&self.temporary, &self.target)? {
            remove(&self.temporary)?;
        } else {
            let aside = with_suffix(&self.target, REPLACED);
            remove(&aside)?;
            files::rename(&self.target, &aside)?;
            files::rename(&self.temporary, &self.target)?;
            remove(&aside)?;
        }
        self.done = true;
        Ok(self.target.clone())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        files::finished(&self.temporary);
        if !self.done {
            let _ = remove(&self.temporary);
        }
    }
}

/// Removes a directory so that it is never seen half removed under its own name.
pub fn remove_whole(path: &Path) -> Result<()> {
    let temporary = files::temporary(path);
    remove(&temporary)?;
    files::rename(path, &temporary)?;
    remove(&temporary)
}

/// Removes what killed processes left in `dir` (`<name>.tmp-<pid>`); a directory that was moved aside while
/// it was replaced (`<name>.old-<pid>`) gets its name back if nothing took it. Returns what was found.
///
/// Only for the process that owns `dir`: another one's work in progress has such names too.
pub fn clean(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    if !dir.is_dir() {
        return Ok(found);
    }
    for path in files::list(dir)? {
        let name = path
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        if let Some(original) = before(&name, REPLACED) {
            let original = dir.join(original);
            if original.symlink_metadata().is_err() {
                files::rename(&path, &original)?;
            } else {
                remove(&path)?;
            }
        } else if before(&name, TEMPORARY).is_some() {
            remove(&path)?;
        } else {
            continue;
        }
        found.push(path);
    }
    Ok(found)
}

fn with_suffix(path: &Path, mark: &str) -> PathBuf {
    let name = path
        .file_name()
        .map(|n| n.to_string_lossy().into_owned())
        .unwrap_or_default();
    path.with_file_name(format!("{name}{mark}{}", std::process::id()))
}

/// `checkpoint-5` of `checkpoint-5.tmp-1234`.
fn before<'a>(name: &'a str, mark: &str) -> Option<&'a str> {
    let (original, pid) = name.rsplit_once(mark)?;
    (!original.is_empty() && !pid.is_empty() && pid.bytes().all(|b| b.is_ascii_digit())).then_some(original)
}

/// Removes a file, a link or a directory, if it is there.
fn remove(path: &Path) -> Result<()> {
    match path.symlink_metadata() {
        Err(_) => Ok(()),
        Ok(m) if m.is_dir() => files::remove_dir_all(path),
        Ok(_) => files::remove_file(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make(target: &Path, text: &str) -> Staging {
        let staging = Staging::create(target).unwrap();
        files::write_atomic(&staging.path().join("a.txt"), text.as_bytes()).unwrap();
        staging
    }

    fn read(target: &Path) -> String {
        files::read_text(&target.join("a.txt")).unwrap()
    }

    #[test]
    fn a_directory_appears_whole_is_replaced_whole_or_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("deep/final");
        drop(make(&target, "lost"));
        assert!(files::list(target.parent().unwrap()).unwrap().is_empty());
        make(&target, "one").commit().unwrap();
        assert_eq!(read(&target), "one");
        std::fs::write(target.join("stale.txt"), "x").unwrap();
        make(&target, "two").commit().unwrap();
        assert_eq!(read(&target), "two");
        assert_eq!(
            files::list(&target).unwrap().len(),
            1,
            "nothing of the old directory is mixed in"
        );
        assert_eq!(files::list(target.parent().unwrap()).unwrap().len(), 1);
        std::fs::write(dir.path().join("file"), "x").unwrap();
        assert!(Staging::create(&dir.path().join("file")).is_err());
    }

    #[test]
    fn a_leftover_of_the_same_process_id_does_not_mix_in() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("final");
        let left = files::temporary(&target);
        std::fs::create_dir(&left).unwrap();
        std::fs::write(left.join("half.bin"), "x").unwrap();
        make(&target, "one").commit().unwrap();
        assert!(!target.join("half.bin").exists());
    }

    #[test]
    fn cleaning_removes_leftovers_gives_names_back_and_touches_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        for name in [
            "final",
            "final.tmp-77",
            "checkpoint-5.old-77",
            "checkpoint-6",
            "checkpoint-6.old-9",
            "my.tmp-notes",
        ] {
            std::fs::create_dir(d.join(name)).unwrap();
            std::fs::write(d.join(name).join("a.txt"), name).unwrap();
        }
        std::fs::write(d.join("plan.json.tmp-12"), "x").unwrap();
        assert_eq!(clean(d).unwrap().len(), 4);
        let names: Vec<String> = files::list(d)
            .unwrap()
            .iter()
            .map(|p| p.file_name().unwrap().to_string_lossy().into_owned())
            .collect();
        assert_eq!(names, ["checkpoint-5", "checkpoint-6", "final", "my.tmp-notes"]);
        assert_eq!(read(&d.join("checkpoint-5")), "checkpoint-5.old-77");
        assert_eq!(read(&d.join("checkpoint-6")), "checkpoint-6");
        assert!(clean(&d.join("not there")).unwrap().is_empty());
        remove_whole(&d.join("final")).unwrap();
        assert!(!d.join("final").exists() && clean(d).unwrap().is_empty());
    }
}
