//! The directory of stored outputs: its lock, and which files may be there.

use super::shard::{CacheShard, is_damage};
use super::{CacheKey, CacheManifest, FORMAT, MANIFEST};
use crate::base::lock::{self, LockWords, RunLock};
use crate::base::{Error, Result, files, staging};
use crate::formats::weights::Weights;
use crate::setup;
use serde_json::Value;
use std::path::Path;

const WORDS: LockWords = LockWords {
    busy: "another `ft distill cache` is in progress in this directory",
    instead: "give `--out` a new directory",
};

/// The lock of a directory of stored outputs. Its file is removed on drop, if this call made it.
pub(super) struct CacheLock(Option<RunLock>);

impl CacheLock {
    /// Creates the directory if necessary, and locks it.
    ///
    /// Errors: another process works there; the directory has other files (then it is not changed).
    pub(super) fn acquire(out: &Path) -> Result<Self> {
        // By name only: another process may write or remove the files.
        if out.is_dir()
            && let Some(other) = files::list(out)?.iter().find(|path| !is_name(&name_of(path)))
        {
            return Err(refused(other));
        }
        files::create_dir_all(out)?;
        RunLock::acquire_as(out, WORDS).map(|lock| Self(Some(lock)))
    }
}

impl Drop for CacheLock {
    fn drop(&mut self) {
        if let Some(lock) = self.0.take() {
            // A file that stays is no obstacle for the next call.
            let _ = lock.abandon();
        }
    }
}

fn refused(path: &Path) -> Error {
    Error::usage("the directory contains other files")
        .at_path(path)
        .hint("give `--out` a new directory")
}

fn name_of(path: &Path) -> String {
    path.file_name()
        .map(|n| n.to_string_lossy().into_owned())
        .unwrap_or_default()
}

fn is_shard(name: &str) -> bool {
    name.starts_with("rows-") && name.ends_with(".safetensors")
}

/// True for a temporary name of a shard, as `shard_path` names it, or of `cache.json`.
fn is_temporary(name: &str) -> bool {
    let Some(original) = staging::original(name) else {
        return false;
    };
    let digits = original
        .strip_prefix("rows-")
        .and_then(|n| n.strip_suffix(".safetensors"));
    original == MANIFEST || digits.is_some_and(|d| d.len() >= 5 && d.bytes().all(|b| b.is_ascii_digit()))
}

/// True for all names that `cache` uses.
fn is_name(name: &str) -> bool {
    is_shard(name) || is_temporary(name) || [MANIFEST, setup::TEACHER, lock::NAME].contains(&name)
}

fn is_manifest(path: &Path) -> bool {
    let text = files::read_text(path).unwrap_or_default();
    serde_json::from_str::<Value>(&text).is_ok_and(|m| m["format"] == FORMAT)
}

/// Accepts only an empty directory, or one with the same outputs. A file of them may be damaged if another one shows that
/// they are the same. Removes the unfinished files of killed processes, if there is nothing else to refuse. Requires the lock.
pub(super) fn check_place(out: &Path, facts: &CacheKey) -> Result<()> {
    if !out.is_dir() {
        return Ok(());
    }
    let is_same = holds(out, &facts.key);
    let mut unfinished = Vec::new();
    for path in files::list(out)? {
        let name = name_of(&path);
        if is_temporary(&name) && path.symlink_metadata().is_ok_and(|m| m.is_file())
            // Killed before it was marked.
            || name == setup::TEACHER && staging::is_empty(&path)
        {
            unfinished.push(path);
        } else if is_shard(&name) {
            match CacheShard::open(&path, &facts.key, facts.k) {
                Err(e) if is_damage(&e, &path) && is_same => {}
                Err(e) if is_damage(&e, &path) => return Err(e.hint("give `--out` a new directory")),
                opened => opened.map(drop)?,
            }
        } else if !(name == MANIFEST && (is_same && !path.is_symlink() || is_manifest(&path))
            || name == setup::TEACHER && staging::is_marked(&path)
            || name == lock::NAME && lock::is_lock(&path))
        {
            return Err(refused(&path));
        }
    }
    for path in unfinished {
        if staging::is_directory(&path) {
            files::remove_dir_all(&path)?;
        } else {
            files::remove_file(&path)?;
        }
    }
    Ok(())
}

/// True if `cache.json` or one of the shards in `out` has this key.
pub(super) fn holds(out: &Path, key: &str) -> bool {
    if CacheManifest::read(&out.join(MANIFEST)).is_ok_and(|manifest| manifest.facts.key == key) {
        return true;
    }
    let shards = files::list(out).unwrap_or_default().into_iter();
    let mut shards = shards.filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("rows-")));
    shards.any(|p| Weights::open_file(&p).is_ok_and(|w| w.metadata().get("ft_key").is_some_and(|k| k == key)))
}
