//! Resolves a path or a hub id to local files: a model directory, or the data files of a dataset.
//!
//! `upload` sends files to a repository.
//!
//! Downloads go to the cache that the Hugging Face tools share (blobs, snapshots, refs). Files are fetched in ranges
//! into `blobs/<hash>.incomplete`, which a later run continues. A hub is not trusted: names of commits and files are
//! checked before they become paths (`store`), a file must have the announced hash, and the token is sent only to the
//! hub's own address (`http`).

#![warn(missing_docs, unreachable_pub)]
// Outside of tests only errors may end the program: clippy denies calls that panic. Nothing is printed, and files and the environment
// are left to others (`clippy.toml`).
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::unreachable,
        clippy::todo,
        clippy::unimplemented,
        clippy::print_stdout,
        clippy::print_stderr,
        clippy::disallowed_methods,
        clippy::disallowed_types
    )
)]

#[cfg(feature = "hub")]
mod dataset;
#[cfg(feature = "hub")]
mod download;
#[cfg(feature = "hub")]
mod errors;
#[cfg(feature = "hub")]
mod http;
#[cfg(feature = "hub")]
mod model;
mod select;
mod settings;
#[cfg(feature = "hub")]
mod store;
mod upload;

#[cfg(feature = "hub")]
#[doc(hidden)]
pub use download::{described, listed};
#[cfg(feature = "hub")]
#[doc(hidden)]
pub use http::{paged, redirected};
pub use select::{DatasetPart, SeveralKinds, is_about_the_data, select};
pub use settings::HubSettings;
pub use upload::{LocalFile, Upload, UploadContent, UploadReport, check_target, upload};
#[cfg(feature = "hub")]
#[doc(hidden)]
pub use upload::{RecordedRequest, uploaded};

use ft_base::{Error, Result, paths};
use std::path::{Path, PathBuf};

/// Returns a local directory unchanged; else downloads the missing files of the model or adapter with this hub id. The id
/// may name its revision: `org/name@v1.0`; then `revision` must be `main`.
///
/// # Errors
/// Neither a directory nor an id; not found; no access; no network and not cached.
pub fn resolve_model(path: &str, revision: &str, progress: bool) -> Result<PathBuf> {
    if Path::new(path).is_dir() {
        return Ok(PathBuf::from(path));
    }
    let mut settings = HubSettings::from_env();
    settings.progress &= progress;
    resolve_with(&settings, path, revision)
}

/// As `resolve_model`, with explicit settings instead of those from the environment.
///
/// # Errors
/// As for `resolve_model`.
pub fn resolve_with(settings: &HubSettings, path: &str, revision: &str) -> Result<PathBuf> {
    let (path, revision) = with_revision(path, revision)?;
    if Path::new(path).exists() || paths::is_meant(path) || !is_id(path) {
        return local_model(Path::new(path));
    }
    check_revision(revision)?;
    #[cfg(feature = "hub")]
    return model::resolve(settings, path, revision).map_err(|e| not_here("directory", path, e));
    #[cfg(not(feature = "hub"))]
    Err(no_feature(settings, path))
}

/// The local directory of a model, which is not a hub id.
///
/// # Errors
/// There is no such directory.
pub fn local_model(path: &Path) -> Result<PathBuf> {
    if path.is_dir() {
        return Ok(path.to_path_buf());
    }
    if path.is_file() {
        return Err(Error::format("the model is a file, not a directory")
            .at_path(path)
            .hint("give the directory that contains `config.json` and the weights"));
    }
    Err(paths::missing("directory", path).expected("a directory, or a hub id such as `Qwen/Qwen2.5-0.5B-Instruct`"))
}

/// As `resolve_model`, but downloads only `config.json`: enough for a plan.
///
/// # Errors
/// As for `resolve_model`.
pub fn resolve_config(path: &str, revision: &str) -> Result<PathBuf> {
    resolve_small(path, revision, false)
}

/// As `resolve_model`, but downloads no weights: enough to read rows.
///
/// # Errors
/// As for `resolve_model`.
pub fn resolve_text(path: &str, revision: &str) -> Result<PathBuf> {
    resolve_small(path, revision, true)
}

fn resolve_small(path: &str, revision: &str, text: bool) -> Result<PathBuf> {
    let settings = HubSettings::from_env();
    let (path, revision) = with_revision(path, revision)?;
    #[cfg(feature = "hub")]
    if !Path::new(path).exists() && is_id(path) && !paths::is_meant(path) {
        check_revision(revision)?;
        return model::resolve_small(&settings, path, revision, text).map_err(|e| not_here("directory", path, e));
    }
    #[cfg(not(feature = "hub"))]
    let _ = text;
    resolve_with(&settings, path, revision)
}

/// The local data files for `path`: an existing path is returned unchanged (readers refuse a directory); else a hub
/// dataset, as `org/name` (the files of `part`) or `org/name:file.jsonl`.
///
/// # Errors
/// Neither a file nor an id (`NotFound`); a dataset without such a part (`NotFound`); no
/// access or no network (`Network`).
pub fn resolve_dataset_file(path: &str, revision: &str, part: &DatasetPart, progress: bool) -> Result<Vec<PathBuf>> {
    if Path::new(path).exists() {
        return Ok(vec![PathBuf::from(path)]);
    }
    let mut settings = HubSettings::from_env();
    settings.progress &= progress;
    resolve_dataset_with(&settings, path, revision, part)
}

/// As `resolve_dataset_file`, with explicit settings instead of those from the environment.
///
/// # Errors
/// As for `resolve_dataset_file`.
pub fn resolve_dataset_with(
    settings: &HubSettings,
    path: &str,
    revision: &str,
    part: &DatasetPart,
) -> Result<Vec<PathBuf>> {
    if Path::new(path).exists() {
        return Ok(vec![PathBuf::from(path)]);
    }
    let (id, file) = match path.split_once(':') {
        Some((id, file)) => (id, Some(file)),
        None => (path, None),
    };
    let looks_like_a_file = file.is_none() && data_kind(path).is_some();
    let is_path = file.is_none() && paths::is_meant(path);
    if !is_id(id) || is_path || looks_like_a_file || file.is_some_and(|f| !is_inside(f)) {
        return Err(paths::missing("file", Path::new(path))
            .expected("a file, or a hub dataset: `org/name`, or `org/name:train.jsonl`"));
    }
    check_revision(revision)?;
    #[cfg(feature = "hub")]
    return dataset::resolve(settings, id, file, revision, part).map_err(|e| not_here("file", id, e));
    #[cfg(not(feature = "hub"))]
    {
        let _ = part;
        Err(no_feature(settings, id))
    }
}

/// Error texts of a hub id that was not found or could not be looked up: it may have been meant as a path.
#[cfg(feature = "hub")]
const NOT_FOUND: [&str; 4] = [
    "cannot reach",
    "the hub has no",
    "does not exist",
    "not in the local cache",
];

#[cfg(feature = "hub")]
fn not_here(kind: &str, id: &str, error: Error) -> Error {
    if !NOT_FOUND.iter().any(|words| error.what().contains(words)) {
        return error;
    }
    let error = error.after(&format!("no {kind} `{id}` here"));
    match paths::hint(Path::new(id)) {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

#[cfg(not(feature = "hub"))]
fn no_feature(settings: &HubSettings, id: &str) -> Error {
    Error::unsupported("this build of ft cannot download")
        .found(format!("the hub id `{id}`"))
        .expected("a local path")
        .hint(format!(
            "build with `--features hub`, or download it with another tool (cache: {})",
            settings.cache.display()
        ))
}

/// Result of a connection test.
#[derive(Debug, Clone, PartialEq)]
pub enum HubStatus {
    /// The hub answered the request, after this time.
    Reached(std::time::Duration),
    /// The hub refused the token.
    Refused,
    /// No answer, or a useless one: the reason.
    Failed(String),
}

/// Requests the file list of a small public model, as every download does first; waits for at most `limit`.
#[cfg(feature = "hub")]
pub fn ask(settings: &HubSettings, limit: std::time::Duration) -> HubStatus {
    let (sender, receiver) = std::sync::mpsc::channel();
    let settings = settings.clone();
    // The thread may still wait for the network when the program ends.
    let asking = std::thread::Builder::new().name("hub".into()).spawn(move || {
        let _ = sender.send(download::ask(&settings));
    });
    match asking.map(|_| receiver.recv_timeout(limit)) {
        Ok(Ok(answer)) => answer,
        _ => HubStatus::Failed(format!("no answer within {} s", limit.as_secs())),
    }
}

/// True for `org/name` with the characters that the hub allows.
pub fn is_id(text: &str) -> bool {
    let part = |p: &str| {
        !p.is_empty()
            && p.len() <= 96
            && p.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
            && !p.starts_with(['-', '.'])
            && !p.ends_with(['-', '.'])
            && !p.contains("..")
            && !p.contains("--")
    };
    matches!(text.split_once('/'), Some((org, name)) if part(org) && part(name))
}

/// Splits `org/name@revision`. `None`: the text is not a hub id with a revision.
pub fn split_revision(text: &str) -> Option<(&str, &str)> {
    let (id, revision) = text.split_once('@')?;
    (is_id(id) && !revision.is_empty() && !paths::is_meant(id)).then_some((id, revision))
}

/// The id and the revision for a name that may contain a revision.
///
/// Errors: two revisions.
fn with_revision<'a>(path: &'a str, revision: &'a str) -> Result<(&'a str, &'a str)> {
    match split_revision(path) {
        Some((id, own)) if !Path::new(path).exists() => {
            if revision == "main" || revision == own {
                return Ok((id, own));
            }
            Err(Error::usage("the hub id has a revision, and another one is given")
                .found(format!("`{path}` and `{revision}`"))
                .expected("one revision"))
        }
        _ => Ok((path, revision)),
    }
}

/// True for a path inside a repository: no `..`, not absolute.
fn is_inside(path: &str) -> bool {
    !path.is_empty()
        && !path.contains('\\')
        && !path.contains(':')
        && path
            .split('/')
            .all(|p| !p.is_empty() && p != "." && p != ".." && !p.chars().any(char::is_control))
}

fn check_revision(revision: &str) -> Result<()> {
    let good = is_inside(revision) && revision.len() <= 200;
    if good {
        return Ok(());
    }
    Err(Error::usage(format!("`{revision}` is not a revision"))
        .expected("a branch, a tag or a commit hash")
        .hint("use the revision `main`"))
}

/// File extensions of supported data files, those with the most structure first.
const DATA_KINDS: [&str; 10] = [
    "parquet", "arrow", "feather", "jsonl", "ndjson", "json", "csv", "tsv", "txt", "md",
];

/// The extension of a supported data file; a text file may be compressed.
fn data_kind(path: &str) -> Option<&'static str> {
    let lower = path.to_lowercase();
    let inner = lower.strip_suffix(".gz").or(lower.strip_suffix(".zst"));
    let binary = |inner: &str| {
        [".parquet", ".arrow", ".feather"]
            .iter()
            .any(|kind| inner.ends_with(kind))
    };
    if inner.is_some_and(binary) {
        return None;
    }
    let lower = inner.unwrap_or(&lower);
    DATA_KINDS.into_iter().find(|kind| lower.ends_with(&format!(".{kind}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_told_from_paths() {
        for good in ["Qwen/Qwen2.5-0.5B-Instruct", "a/b", "org_1/na.me_2"] {
            assert!(is_id(good), "{good}");
        }
        for bad in [
            "a",
            "a/b/c",
            "/a/b",
            "../b",
            "a/..",
            "./a",
            "a b/c",
            "a/b\n",
            "~/x",
            "a/",
            "a--b/c",
            "http://x/y",
        ] {
            assert!(!is_id(bad), "{bad}");
        }
    }

    #[test]
    fn a_revision_follows_the_id() {
        assert_eq!(split_revision("org/name@v1.0"), Some(("org/name", "v1.0")));
        assert_eq!(split_revision("org/name@refs/pr/3"), Some(("org/name", "refs/pr/3")));
        for other in ["org/name", "org/name@", "name@v1", "./org/name@v1", "/a/b@c"] {
            assert_eq!(split_revision(other), None, "{other}");
        }
        assert_eq!(with_revision("a/b@v1", "main").unwrap(), ("a/b", "v1"));
        assert_eq!(with_revision("a/b", "v2").unwrap(), ("a/b", "v2"));
        let e = with_revision("a/b@v1", "v2").unwrap_err();
        assert!(e.to_string().contains("`a/b@v1` and `v2`"), "{e}");
    }

    #[test]
    fn local_directories_need_no_hub() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        assert_eq!(resolve_model(path, "main", false).unwrap(), dir.path());
        let e = resolve_model("no such model", "main", false).unwrap_err().to_string();
        assert!(
            e.contains("no directory `no such model` here") && e.contains("Qwen/"),
            "{e}"
        );
        let file = dir.path().join("train.jsonl");
        std::fs::write(&file, "{}").unwrap();
        let found = resolve_dataset_file(file.to_str().unwrap(), "main", &DatasetPart::TRAIN, false).unwrap();
        assert_eq!(found, std::slice::from_ref(&file));
        assert!(
            resolve_model(file.to_str().unwrap(), "main", false)
                .unwrap_err()
                .to_string()
                .contains("is a file")
        );
        // A directory is not a hub id, although it looks like one.
        let inside = dir.path().join("rows");
        std::fs::create_dir(&inside).unwrap();
        assert_eq!(
            resolve_dataset_file(inside.to_str().unwrap(), "main", &DatasetPart::TRAIN, false).unwrap(),
            [inside]
        );
        for bad in [
            "data/train.jsonl",
            "data/train.tsv",
            "org/name:../x.jsonl",
            "org/name:/etc/passwd",
            "nothing",
        ] {
            let e = resolve_dataset_file(bad, "main", &DatasetPart::TRAIN, false)
                .unwrap_err()
                .to_string();
            assert!(e.contains("no file `") && e.contains(bad), "{e}");
        }
        assert_eq!(
            resolve_with(&HubSettings::from_env(), "a/b", "../x")
                .unwrap_err()
                .exit_code(),
            2
        );
    }
}
