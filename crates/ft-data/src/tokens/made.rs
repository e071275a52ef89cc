//! Results of the cache that are one sequence of bytes: computed once from datasets, and read at every later start.
//!
//! The directory of a result is named by a hash of everything on which it depends: `made` has the bytes, `chunks.jsonl`
//! their hash, written last.

use super::seal::hash;
use super::{CHUNKS, FORMAT, TokenCache, wait};
use ft_base::lock::UseMark;
use ft_base::{Error, Result, files};
use std::path::Path;

/// The file with the bytes.
pub(super) const MADE: &str = "made";

impl TokenCache<'_> {
    /// The bytes that `make` returns: from the cache, if they were made before with the same `names`, which are
    /// everything on which they depend. `None`: there is no cache, and `make` was not called.
    ///
    /// # Errors
    /// Those of `make`; the cache cannot be written.
    pub fn made(&self, names: &[&str], make: &dyn Fn() -> Result<Vec<u8>>) -> Result<Option<Vec<u8>>> {
        let dir = self.dir.join(key(names));
        let Some(_used) = self.mark(&dir)? else {
            return Ok(None);
        };
        if dir.join(CHUNKS).is_file() {
            if let Some(bytes) = read(&dir) {
                return Ok(Some(bytes));
            }
            (self.note)(&format!(
                "{} of the token cache is damaged: it is made again",
                dir.display()
            ));
        }
        let _lock = wait(&dir)?;
        // Another run may have finished it.
        if let Some(bytes) = read(&dir) {
            return Ok(Some(bytes));
        }
        let bytes = make()?;
        files::write_atomic(&dir.join(MADE), &bytes)?;
        let line = serde_json::to_vec(&hash(&bytes)).map_err(|e| Error::internal("a hash of the cache").cause(e))?;
        files::write_atomic(&dir.join(CHUNKS), &line)?;
        super::limit::remove_old(self);
        Ok(Some(bytes))
    }

    /// Marks a dataset as used. `None`: its directory cannot be made, and no cache is required.
    pub(super) fn mark(&self, dir: &Path) -> Result<Option<UseMark>> {
        match files::create_dir_all(dir).and_then(|()| UseMark::hold(dir)) {
            Err(e) if !self.required => {
                (self.note)(&format!("no token cache: {}", e.line()));
                Ok(None)
            }
            used => used.map(Some),
        }
    }
}

/// The name of a result in the cache.
fn key(names: &[&str]) -> String {
    let mut hasher = blake3::Hasher::new();
    for text in [FORMAT, MADE].iter().chain(names) {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    }
    hasher.finalize().to_hex()[..32].to_string()
}

/// `None`: the bytes are missing or damaged.
fn read(dir: &Path) -> Option<Vec<u8>> {
    let line = files::read(&dir.join(CHUNKS)).ok()?;
    let bytes = files::read(&dir.join(MADE)).ok()?;
    let known: String = serde_json::from_slice(&line).ok()?;
    (known == hash(&bytes)).then_some(bytes)
}
