//! Reads the files of a run directory. Somebody else may have written them: links are refused, and lines and texts have a limit.

use crate::base::{Error, Result, files};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// Most bytes of a line.
const LINE: u64 = 1 << 20;
/// Most bytes of a file that is read as a whole.
const TEXT: u64 = 8 << 20;

fn fault(path: &Path, e: std::io::Error) -> Error {
    Error::io("cannot read the file").at_path(path).cause(e)
}

/// Opens a file of a run. The run directory itself may be a link.
///
/// Errors: it is a link, whose target may be any file of the reader; it is not a regular file; it cannot be opened.
pub fn open_own(path: &Path) -> Result<File> {
    if path.is_symlink() {
        return Err(Error::io("cannot open the file")
            .at_path(path)
            .found("a symbolic link")
            .expected("a regular file")
            .hint("replace the link by the file; the run directory itself may be a link"));
    }
    files::open(path)
}

/// Reads a text of a run.
///
/// Errors: as `open_own`; it is larger than 8 MiB; it is not UTF-8.
pub fn read_own_text(path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    let file = open_own(path)?;
    file.take(TEXT + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| fault(path, e))?;
    if bytes.len() as u64 > TEXT {
        return Err(Error::format("the file is too large for the description of a run")
            .at_path(path)
            .expected("at most 8 MiB"));
    }
    files::text_of(path, bytes)
}

/// Calls `each` with every line and its line break. The file is not held in memory: metrics of a long run are large.
pub fn each_line(path: &Path, mut each: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let mut file = BufReader::with_capacity(1 << 16, files::open(path)?);
    let mut line = Vec::new();
    loop {
        line.clear();
        match file.read_until(b'\n', &mut line).map_err(|e| fault(path, e))? {
            0 => return Ok(()),
            _ => each(&line)?,
        }
    }
}

/// As `each_line` for a run that may be somebody else's. `each` also gets the length of the line; of a line with more than 1 MiB
/// it gets no bytes.
///
/// Errors: as `open_own`; the file cannot be read; those of `each`.
pub fn each_own_line(path: &Path, mut each: impl FnMut(&[u8], u64) -> Result<()>) -> Result<()> {
    let mut file = BufReader::with_capacity(1 << 16, open_own(path)?);
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = file.by_ref().take(LINE).read_until(b'\n', &mut line);
        let mut length = read.map_err(|e| fault(path, e))? as u64;
        if length == 0 {
            return Ok(());
        }
        if length == LINE && !line.ends_with(b"\n") {
            line.clear();
            length += file.skip_until(b'\n').map_err(|e| fault(path, e))? as u64;
        }
        each(&line, length)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn long_lines_are_counted_and_large_texts_and_links_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lines");
        let long = "x".repeat(3 << 20);
        fs::write(&path, format!("a\n{long}\nb")).unwrap();
        let mut seen = Vec::new();
        each_own_line(&path, |line, length| {
            seen.push((line.to_vec(), length));
            Ok(())
        })
        .unwrap();
        let of = |text: &str, length: u64| (text.as_bytes().to_vec(), length);
        assert_eq!(seen, [of("a\n", 2), of("", (3 << 20) + 1), of("b", 1)]);
        assert_eq!(read_own_text(&path).unwrap().len(), (3 << 20) + 4);
        fs::write(&path, "x".repeat((8 << 20) + 1)).unwrap();
        assert!(read_own_text(&path).unwrap_err().to_string().contains("8 MiB"));
        fs::write(&path, "secret").unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        for refused in [read_own_text(&link).map(drop), each_own_line(&link, |_, _| Ok(()))] {
            assert!(refused.unwrap_err().to_string().contains("a symbolic link"));
        }
    }
}
