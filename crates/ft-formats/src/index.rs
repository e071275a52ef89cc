//! Finds the weight files of a directory, and checks that they may be opened.
//!
//! Names in an index are untrusted: only plain file names in the same directory are accepted. A link may leave the
//! directory only as in the hub cache (`snapshots/<rev>/x` to `blobs/<hash>`).

use crate::{header, json_kind, read_json_object};
use ft_base::{Error, Result, files, paths};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

/// The index of a model in several files.
pub const INDEX: &str = "model.safetensors.index.json";
/// The only weight file of a small model.
pub const SINGLE: &str = "model.safetensors";

/// Extensions of PyTorch pickles.
const PICKLES: [&str; 5] = ["bin", "pt", "pth", "ckpt", "pkl"];

/// The weight files of a model directory, and the index if there is one (tensor to file name).
pub(crate) struct Shards {
    /// The weight files, sorted.
    pub files: Vec<PathBuf>,
    /// From tensor to file name, as in the index.
    pub map: Option<BTreeMap<String, String>>,
}

/// Finds `model.safetensors`, or the index and its shards.
pub(crate) fn find(dir: &Path) -> Result<Shards> {
    if !dir.is_dir() {
        return Err(paths::missing("directory", dir));
    }
    let single = dir.join(SINGLE);
    if single.symlink_metadata().is_ok() {
        stays_inside(&single)?;
        return Ok(Shards {
            files: vec![single],
            map: None,
        });
    }
    let index = dir.join(INDEX);
    if index.symlink_metadata().is_ok() {
        stays_inside(&index)?;
        return from_index(dir, &index);
    }
    Err(no_weights(dir)?)
}

/// Reads the tensor to file map of an index and checks every name.
///
/// # Errors
/// The index is not valid, or names a file outside its directory.
pub fn read_map(dir: &Path, index: &Path) -> Result<BTreeMap<String, String>> {
    let json = read_json_object(index)?;
    let map = match json.get("weight_map") {
        Some(Value::Object(map)) if !map.is_empty() => map,
        Some(Value::Object(_)) => return Err(Error::format("index lists no tensor").at_path(index)),
        other => {
            return Err(Error::format("index has no `weight_map`")
                .at_path(index)
                .found(other.map_or("nothing".into(), json_kind))
                .expected("an object that maps tensor names to file names"));
        }
    };
    let mut out = BTreeMap::new();
    for (tensor, file) in map {
        let Value::String(file) = file else {
            return Err(Error::format(format!("index names no file for tensor `{tensor}`"))
                .at_path(index)
                .found(json_kind(file))
                .expected("a file name"));
        };
        check_name(file).map_err(|why| {
            Error::format(format!("index names a file that ft will not open: {why}"))
                .at_path(index)
                .found(format!("{file:?} for tensor `{tensor}`"))
                .expected("a plain file name such as `model-00001-of-00002.safetensors`")
                .hint("this index may be an attempt to read files outside the model directory: do not trust this model")
        })?;
        let path = dir.join(file);
        if is_pickle(&path) {
            return Err(header::pickle(&path));
        }
        out.insert(tensor.clone(), file.clone());
    }
    Ok(out)
}

fn from_index(dir: &Path, index: &Path) -> Result<Shards> {
    let out = read_map(dir, index)?;
    let names: BTreeSet<&str> = out.values().map(String::as_str).collect();
    let missing: Vec<&str> = names.iter().copied().filter(|n| !dir.join(n).exists()).collect();
    if !missing.is_empty() {
        return Err(
            Error::not_found(format!("{} of {} weight files are missing", missing.len(), names.len()))
                .at_path(dir)
                .found(format!("no {}", missing.join(", ")))
                .hint("the download is not complete: download the model again (files that are there are kept)"),
        );
    }
    extra_shard(dir, index, &names)?;
    let files: Vec<PathBuf> = names.iter().map(|n| dir.join(n)).collect();
    for file in &files {
        stays_inside(file)?;
    }
    Ok(Shards { files, map: Some(out) })
}

/// Detects a shard such as `model-00003-of-00003.safetensors` that is missing in the index: the index is out of date.
fn extra_shard(dir: &Path, index: &Path, names: &BTreeSet<&str>) -> Result<()> {
    let totals: BTreeSet<&str> = names.iter().filter_map(|n| shard_total(n)).collect();
    for path in files::list(dir)? {
        let name = path
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        if !names.contains(name.as_str()) && shard_total(&name).is_some_and(|t| totals.contains(t)) {
            return Err(Error::format("a shard in the directory is not in the index")
                .at_path(index)
                .found(format!("`{name}`"))
                .hint("the index belongs to another version of the weights: download both again"));
        }
    }
    Ok(())
}

/// The total in a shard name: the second `00003` of `model-00003-of-00003.safetensors`.
fn shard_total(name: &str) -> Option<&str> {
    let rest = name.strip_prefix("model-")?.strip_suffix(".safetensors")?;
    let (i, n) = rest.split_once("-of-")?;
    (i.len() == 5 && n.len() == 5 && i.bytes().chain(n.bytes()).all(|b| b.is_ascii_digit())).then_some(n)
}

fn check_name(name: &str) -> std::result::Result<(), &'static str> {
    if name.is_empty() {
        return Err("the name is empty");
    }
    if name.contains('\\') {
        return Err("the name has a backslash");
    }
    if name.contains(':') {
        return Err("the name looks like a URL or a drive");
    }
    if name.chars().any(char::is_control) {
        return Err("the name has control characters");
    }
    let mut parts = Path::new(name).components();
    match (parts.next(), parts.next()) {
        (Some(Component::RootDir), _) => Err("the path is absolute"),
        (Some(Component::ParentDir), _) => Err("the path leaves the directory"),
        (Some(Component::Normal(_)), None) if !name.contains('/') => Ok(()),
        (Some(Component::Normal(_)), _) if name.split('/').any(|p| p == "..") => Err("the path leaves the directory"),
        _ => Err("the path is not a plain file name"),
    }
}

/// Refuses a link to a place outside the file's directory, except into the `blobs` of a hub cache. All readers of a model or an adapter
/// call it: a directory of somebody else must not name other files of the user. For what is no link it does nothing.
///
/// # Errors
/// `file` is such a link (`Format`), or a link to nothing (`Io`).
pub fn stays_inside(file: &Path) -> Result<()> {
    if !file.is_symlink() {
        return Ok(());
    }
    let cannot = |e: std::io::Error| Error::io("cannot open the file").at_path(file).cause(e);
    let parent = match file.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    };
    let directory = parent.canonicalize().map_err(cannot)?;
    let target = file.canonicalize().map_err(cannot)?;
    let snapshots = directory
        .ancestors()
        .skip(1)
        .find(|d| d.file_name().is_some_and(|name| name == "snapshots"));
    if target.starts_with(&directory) || snapshots.is_some_and(|dir| is_blob(file, &target, &directory, dir)) {
        return Ok(());
    }
    let hint = match snapshots {
        None => "copy the file into the directory, or give the directory that contains it",
        Some(_) => {
            "in a hub cache only links such as `../../blobs/HASH` are followed: download the model again, or copy the directory \
             with the contents of its links (`cp -rL`)"
        }
    };
    Err(Error::format("file is a link to a path outside its directory")
        .at_path(file)
        .found(format!("a link to {}", target.display()))
        .hint(hint))
}

/// True if `target`, to which the link `file` leads, is in the `blobs` beside `snapshots`. `directory` is that of the link.
fn is_blob(file: &Path, target: &Path, directory: &Path, snapshots: &Path) -> bool {
    let Some(blobs) = snapshots.parent().map(|repository| repository.join("blobs")) else {
        return false;
    };
    if target.starts_with(&blobs) {
        return true;
    }
    // `blobs` may be a link to a larger disk. It must not bring other files of the user into a model: only a link of the form that
    // the hub cache has is followed, to a file that has a hash as its name.
    let named = |name: &str| {
        let levels = directory
            .strip_prefix(snapshots)
            .map_or(0, |below| below.components().count());
        let form = PathBuf::from("../".repeat(levels + 1)).join("blobs").join(name);
        // Not as components: they are equal for `a//b` and `a/./b` too.
        file.read_link().is_ok_and(|link| link.as_os_str() == form.as_os_str())
    };
    let is_hash = |name: &&str| [40, 64].contains(&name.len()) && name.bytes().all(|b| b.is_ascii_hexdigit());
    let name = target.file_name().and_then(|name| name.to_str()).filter(is_hash);
    name.is_some_and(named) && blobs.canonicalize().is_ok_and(|blobs| target.parent() == Some(&*blobs))
}

fn is_pickle(path: &Path) -> bool {
    path.extension()
        .is_some_and(|e| PICKLES.iter().any(|p| e.eq_ignore_ascii_case(p)))
}

/// True if a file name is a pickle that may contain weights (not `optimizer.pt`, `training_args.bin`, ...).
pub fn is_weight_pickle(path: &Path) -> bool {
    let name = path
        .file_name()
        .map(|n| n.to_string_lossy().to_lowercase())
        .unwrap_or_default();
    is_pickle(path)
        && !["training_args", "optimizer", "scheduler", "rng_state", "scaler"]
            .iter()
            .any(|s| name.starts_with(s))
}

/// The error for a directory without supported weights.
fn no_weights(dir: &Path) -> Result<Error> {
    let found = files::list(dir)?;
    if let Some(pickle) = found.iter().find(|p| is_weight_pickle(p)) {
        return Ok(header::pickle(pickle));
    }
    let error = Error::not_found("directory contains no weights")
        .at_path(dir)
        .expected(format!("`{SINGLE}`, or `{INDEX}` and its shards"));
    let has = |name: &str| found.iter().any(|p| p.file_name().is_some_and(|n| n == name));
    if has("adapter_config.json") {
        return Ok(error.hint("this is an adapter: give its base as the model and this directory as the adapter"));
    }
    if let Some(gguf) = found.iter().find(|p| p.extension().is_some_and(|e| e == "gguf")) {
        return Ok(error
            .found(format!("`{}`", gguf.file_name().unwrap_or_default().to_string_lossy()))
            .hint("training starts from the Hugging Face weights, not from a GGUF file"));
    }
    if found.iter().any(|p| {
        p.file_name()
            .is_some_and(|n| shard_total(&n.to_string_lossy()).is_some())
    }) {
        return Ok(error
            .found("shards without their index")
            .hint(format!("download `{INDEX}` too")));
    }
    Ok(error.hint("check the path; for a model on the hub give its id, e.g. `Qwen/Qwen2.5-0.5B-Instruct`"))
}
