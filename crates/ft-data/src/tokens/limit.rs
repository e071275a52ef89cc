//! Removes datasets of the cache that were not used for the longest time.

use super::made::MADE;
use super::{CHUNKS, INDEX, PAIRS, ROWS, TOKENS, TokenCache};
use ft_base::lock::{self, UseMark};
use ft_base::units::{bytes as size_text, counted};
use ft_base::{Result, files};
use std::path::{Path, PathBuf};

/// The files of a dataset.
const NAMES: [&str; 7] = [TOKENS, INDEX, PAIRS, MADE, CHUNKS, ROWS, lock::NAME];

/// Keeps the cache below its limit. A dataset that a process uses stays; so does everything that is not a dataset.
pub(super) fn remove_old(cache: &TokenCache) {
    let mut sets: Vec<(PathBuf, u64)> = files::list(cache.dir)
        .unwrap_or_default()
        .into_iter()
        .filter_map(set)
        .collect();
    let mut total: u64 = sets.iter().map(|(_, bytes)| bytes).sum();
    let half = || files::free_space(cache.dir).map_or(u64::MAX, |free| free.saturating_add(total) / 2);
    let limit = cache.most_bytes.unwrap_or_else(half);
    sets.sort_by_key(|(dir, _)| UseMark::last(dir));
    let (before, mut removed) = (total, 0);
    for (dir, bytes) in &sets {
        if total <= limit {
            break;
        }
        if UseMark::alone(dir).is_some_and(|alone| remove(dir, alone).is_ok()) {
            total -= bytes;
            removed += 1;
        }
    }
    if removed > 0 {
        let (freed, sets) = (size_text(before - total), counted(removed, "dataset"));
        (cache.note)(&format!(
            "removed {sets} ({freed}) of the token cache that no run used for the longest time"
        ));
    }
}

/// A dataset of the cache with its bytes; `None`: another file.
fn set(dir: PathBuf) -> Option<(PathBuf, u64)> {
    let name = dir.file_name()?.to_str()?;
    let is_key = name.len() == 32 && name.bytes().all(|b| b.is_ascii_hexdigit());
    if !is_key || !dir.join(CHUNKS).is_file() {
        return None;
    }
    let bytes = NAMES.iter().filter_map(|name| files::size(&dir.join(name)).ok()).sum();
    Some((dir, bytes))
}

fn remove(dir: &Path, alone: UseMark) -> Result<()> {
    for name in NAMES {
        let path = dir.join(name);
        if path.is_file() {
            files::remove_file(&path)?;
        }
    }
    alone.remove()?;
    files::remove_empty_dir(dir).map(drop)
}
