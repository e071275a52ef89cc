//! `ft push`: uploads the result of a run, or a model directory, with a model card.

mod card;

use crate::base::{Error, Result, files};
use crate::commands::export::refuse_link_out;
use crate::history::RunRecord;
use crate::hub::{LocalFile, UploadContent};
use crate::setup::locate::{self, NamedKind};
use crate::train::verify;
use card::ModelCard;
use std::path::{Path, PathBuf};

/// The files to upload and their description.
#[derive(Debug)]
pub struct PushRequest<'a> {
    /// A run, its `final/`, or a model or adapter directory.
    pub from: &'a Path,
    /// `owner/name`.
    pub id: &'a str,
    /// The license for the card, as the hub names it.
    pub license: Option<&'a str>,
    /// Upload the README of the directory in place of a card.
    pub keep_readme: bool,
}

/// The files of an upload.
#[derive(Debug)]
pub struct UploadFiles {
    pub directory: PathBuf,
    pub files: Vec<LocalFile>,
    pub bytes: u64,
    /// The text of `README.md`, if ft wrote it.
    pub card: Option<String>,
}

/// The name of a model card.
const README: &str = "README.md";

/// Lists the files and writes the card. Nothing is sent.
///
/// Errors: no model there; the run has only checkpoints; a file cannot be read, or is not as the run wrote it.
pub fn prepare(request: &PushRequest) -> Result<UploadFiles> {
    let from = request.from;
    if from.is_file() {
        return Err(Error::usage("this is a file, not a directory")
            .at_path(from)
            .expected("a run, or a model or adapter directory"));
    }
    if !from.is_dir() {
        return Err(Error::usage("there is no such directory")
            .at_path(from)
            .expected("a run, or a model or adapter directory"));
    }
    let (directory, adapter) = match locate::locate(&from.to_string_lossy())? {
        NamedKind::Model(dir) => (dir, false),
        NamedKind::Adapter(dir) => (dir, true),
        NamedKind::Checkpoint(dir) => {
            return Err(Error::usage("a checkpoint is not a model directory yet")
                .at_path(&dir)
                .hint(format!("`ft export {} --out DIR`, then `ft push DIR`", dir.display())));
        }
    };
    verify::check_result(&directory)?;
    let run = [Some(from), directory.parent()].into_iter().flatten();
    let run = run
        .filter_map(|dir| Some((dir.to_path_buf(), RunRecord::read(dir).ok()?)))
        .next();
    let mut files = Vec::new();
    collect(&directory, "", &mut files)?;
    let card = if request.keep_readme {
        None
    } else {
        files.retain(|file| file.name != README);
        let card = ModelCard {
            id: request.id,
            license: request.license,
            adapter,
            directory: &directory,
            run: run.as_ref().map(|(dir, record)| (dir.as_path(), record)),
        };
        let text = card.text();
        files.push(LocalFile {
            name: README.into(),
            content: UploadContent::Bytes(text.clone().into_bytes()),
        });
        Some(text)
    };
    files.sort_by(|a, b| a.name.cmp(&b.name));
    let mut bytes = 0;
    for file in &files {
        bytes += file.size()?;
    }
    Ok(UploadFiles {
        directory,
        files,
        bytes,
        card,
    })
}

/// The files of a directory and of those in it, without hidden and temporary ones.
fn collect(dir: &Path, prefix: &str, out: &mut Vec<LocalFile>) -> Result<()> {
    for path in files::list(dir)? {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        if name.starts_with('.') || name.contains(".tmp-") {
            continue;
        }
        let name = format!("{prefix}{name}");
        refuse_link_out(&path)?;
        if path.is_dir() {
            collect(&path, &format!("{name}/"), out)?;
        } else {
            // What the upload cannot read is refused here, also for `--dry-run`: a pipe, a device.
            files::open(&path)?;
            out.push(LocalFile {
                name,
                content: UploadContent::Path(path.clone()),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_are_listed() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.json"), "{}").unwrap();
        let mut found = Vec::new();
        collect(dir.path(), "", &mut found).unwrap();
        assert_eq!((found.len(), &*found[0].name), (1, "a.json"));
        let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("b")).unwrap();
        let e = collect(dir.path(), "", &mut Vec::new()).unwrap_err().to_string();
        assert!(e.contains("a socket") && e.contains("a regular file"), "{e}");
    }
}
