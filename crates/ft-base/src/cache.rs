//! Where ft keeps what it can compute again: small files of its own, shared by all runs of a user.

use super::files;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();

/// Sets the directory of the whole process; only the first call counts. Without one nothing is kept.
pub fn set_directory(directory: PathBuf) {
    let _ = DIRECTORY.set(directory);
}

fn path(name: &str) -> Option<PathBuf> {
    Some(DIRECTORY.get()?.join(name))
}

/// The text that was kept under this name. A fault of the cache is no fault of the caller: nothing is found then.
pub fn read(name: &str) -> Option<String> {
    let path = path(name)?;
    match path.is_file() {
        true => files::read_text(&path).ok(),
        false => None,
    }
}

/// Keeps a text; where that fails it is not kept.
pub fn write(name: &str, text: &str) {
    let Some(path) = path(name) else { return };
    let made = files::create_dir_all(path.parent().unwrap_or(Path::new(".")));
    let _ = made.and_then(|()| files::write_atomic(&path, text.as_bytes()));
}
