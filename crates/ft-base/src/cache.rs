//! Cache directory of ft: small files that can be recomputed, shared by all runs of a user.

use super::files;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();

/// Sets the cache directory of the process; only the first call has an effect. Without a directory nothing is cached.
pub fn set_directory(directory: PathBuf) {
    let _ = DIRECTORY.set(directory);
}

fn path(name: &str) -> Option<PathBuf> {
    Some(DIRECTORY.get()?.join(name))
}

/// Reads the text cached under this name. Returns `None` on any error: a broken cache must not fail the caller.
pub fn read(name: &str) -> Option<String> {
    let path = path(name)?;
    if path.is_file() {
        files::read_text(&path).ok()
    } else {
        None
    }
}

/// Caches a text. Errors are ignored: the text is then not cached.
pub fn write(name: &str, text: &str) {
    let Some(path) = path(name) else { return };
    let made = files::create_dir_all(path.parent().unwrap_or(Path::new(".")));
    let _ = made.and_then(|()| files::write_atomic(&path, text.as_bytes()));
}
