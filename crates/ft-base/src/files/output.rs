//! A file that the user names for a result.

use super::{regular, write_atomic};
use crate::Result;
use std::fs;
use std::path::Path;

/// Checks a path that the user gave for a file: a rename would replace a device or a pipe of this name, such as `/dev/null`.
///
/// # Errors
/// The path, or what it links to, is not a regular file, and exists.
pub fn check_output(path: &Path) -> Result<()> {
    fs::metadata(path).map_or(Ok(()), |found| regular(found.file_type(), path))
}

/// Writes a whole file that the user named: it appears complete or not at all. The target of a link is written, not the link.
///
/// # Errors
/// As `check_output` and `write_atomic`.
pub fn write_output(path: &Path, bytes: &[u8]) -> Result<()> {
    check_output(path)?;
    let target = path.canonicalize();
    write_atomic(target.as_deref().unwrap_or(path), bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_followed_and_a_pipe_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link, new) = (dir.path().join("a"), dir.path().join("link"), dir.path().join("new"));
        write_output(&new, b"new").unwrap();
        fs::write(&file, "before").unwrap();
        std::os::unix::fs::symlink("a", &link).unwrap();
        write_output(&link, b"after").unwrap();
        assert!(link.is_symlink() && fs::read(&file).unwrap() == b"after" && fs::read(&new).unwrap() == b"new");
        std::os::unix::fs::symlink("/dev/null", dir.path().join("null")).unwrap();
        for (path, kind) in [
            (dir.path().join("null"), "a device"),
            (dir.path().to_path_buf(), "a directory"),
        ] {
            let e = write_output(&path, b"x").unwrap_err().to_string();
            assert!(e.contains(kind), "{e}");
        }
    }
}
