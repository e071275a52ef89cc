//! `ft push`: uploads the result of a run, or a model directory, with a model card.

mod card;

use crate::base::{Error, Result, files};
use crate::commands::export::refuse_link_out;
use crate::formats::adapter::CONFIG;
use crate::formats::read_json_to_rewrite;
use crate::history::RunRecord;
use crate::hub::{LocalFile, UploadContent};
use crate::setup::locate::{self, NamedKind};
use crate::train::verify;
use card::ModelCard;
use serde_json::Value;
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
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// The name of a model card.
const README: &str = "README.md";
/// The directory in that of an adapter with the base model of its own.
const OWN_BASE: &str = "base";

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
    let notes = name_own_base(&directory, &mut files)?;
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
        notes,
    })
}

/// True for an adapter with a base model in its own directory.
fn has_own_base(directory: &Path) -> bool {
    directory.join(CONFIG).is_file() && directory.join(OWN_BASE).join("config.json").is_file()
}

/// Lets the uploaded config of an adapter with a base of its own name that in the repository: a path of this machine is of no
/// use elsewhere. Returns notes.
fn name_own_base(directory: &Path, files: &mut [LocalFile]) -> Result<Vec<String>> {
    if !has_own_base(directory) {
        return Ok(Vec::new());
    }
    let path = directory.join(CONFIG);
    let mut config = read_json_to_rewrite(&path)?;
    config.insert("base_model_name_or_path".into(), OWN_BASE.into());
    let text = format!("{:#}\n", Value::Object(config));
    for file in files.iter_mut().filter(|file| file.name == CONFIG) {
        file.content = UploadContent::Bytes(text.clone().into_bytes());
    }
    Ok(vec![format!(
        "the adapter works on the model in `{OWN_BASE}/` only, which is uploaded with it: its config names `{OWN_BASE}` in \
         place of a path of this machine, so that it works in a directory with all files of the repository"
    )])
}

/// The files of a directory and of those in it, without hidden and temporary ones.
fn collect(dir: &Path, prefix: &str, out: &mut Vec<LocalFile>) -> Result<()> {
    for path in files::list(dir)? {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            return Err(Error::format("the name of a file is not UTF-8")
                .at_path(&path)
                .hint("rename it, or remove it from the directory"));
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
    fn an_adapter_with_its_own_base_names_no_path_of_this_machine() {
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().join("final");
        std::fs::create_dir_all(from.join("base")).unwrap();
        let place = from.join("base").display().to_string();
        let config = serde_json::json!({"peft_type": "LORA", "base_model_name_or_path": place, "r": 2});
        std::fs::write(from.join("adapter_config.json"), config.to_string()).unwrap();
        std::fs::write(from.join("adapter_model.safetensors"), "x").unwrap();
        let request = PushRequest {
            from: &from,
            id: "me/adapter",
            license: None,
            keep_readme: false,
        };
        let of_config = |prepared: &UploadFiles| {
            let mut files = prepared.files.iter();
            let file = files.find(|file| file.name == "adapter_config.json").unwrap();
            let text = match &file.content {
                UploadContent::Bytes(bytes) => bytes.clone(),
                UploadContent::Path(path) => std::fs::read(path).unwrap(),
            };
            serde_json::from_slice::<Value>(&text).unwrap()
        };
        // Without a base of its own it is uploaded as it is.
        let plain = prepare(&request).unwrap();
        assert_eq!(of_config(&plain), config);
        assert!(plain.notes.is_empty());
        std::fs::write(from.join("base/config.json"), "{}").unwrap();
        let own = prepare(&request).unwrap();
        let mut expected = config.clone();
        expected["base_model_name_or_path"] = "base".into();
        assert_eq!(of_config(&own), expected);
        assert!(own.files.iter().any(|file| file.name == "base/config.json"));
        assert!(
            own.notes.len() == 1 && own.notes[0].contains("`base/`"),
            "{:?}",
            own.notes
        );
        let card = own.card.unwrap();
        assert!(
            card.contains("hf download me/adapter") && !card.contains("base_model:"),
            "{card}"
        );
        assert!(!card.contains(&place), "{card}");
    }

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
