//! A cache that cannot be written, or not to the end: the error names the path and the variable that moves the cache, no final name
//! has a part of a file, and the next download goes on.

use super::bench::{Bench, files, said};
use super::disk::{Fault, on_disk, recorded};
use super::unprivileged::unprivileged;
use super::{COMMIT, DATA, Hub, ID, etag, incomplete, sha256};
use ft::hub::{DatasetPart, resolve_dataset_with, resolve_with};
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const ENOSPC: i32 = 28;
const EROFS: i32 = 30;
const WEIGHTS: &str = "model.safetensors";

struct Place {
    hub: Hub,
    bench: Bench,
    model: BTreeMap<String, Vec<u8>>,
    cache: PathBuf,
}

impl Place {
    fn new() -> Self {
        let (hub, bench) = (Hub::start(), Bench::new());
        let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny");
        let model: BTreeMap<String, Vec<u8>> = files(&tiny).into_iter().collect();
        hub.put(&format!("models/{ID}"), model.clone());
        let cache = bench.dir.path().canonicalize().unwrap().join("hub");
        Self {
            hub,
            bench,
            model,
            cache,
        }
    }

    /// The folder of the model in the cache.
    fn folder(&self) -> PathBuf {
        self.cache.join("models--tester--tiny-model")
    }

    /// A command that downloads the model.
    fn command(&self) -> Command {
        let mut command = self
            .bench
            .command(&["generate", "--model", ID, "--prompt", "a", "--max-new-tokens", "1"]);
        command
            .env("HF_HUB_CACHE", &self.cache)
            .env("HF_ENDPOINT", &self.hub.address)
            .env_remove("HF_HUB_OFFLINE")
            .env_remove("HF_TOKEN");
        command
    }

    /// The command on a disk with a fault in the cache alone, or in the paths that begin with `root`.
    fn on_disk(&self, root: &str, fault: Fault, at: usize) -> Option<Command> {
        let mut command = self.command();
        on_disk(&self.bench, &mut command, fault, at)?;
        command.env("FT_DISK_ROOT", root);
        Some(command)
    }

    fn root(&self) -> &str {
        self.cache.to_str().unwrap()
    }

    /// Every final name has the whole content that belongs to it.
    fn is_whole(&self, what: &str) {
        let below = |name: &str| {
            let place = self.folder().join(name);
            let found = if place.is_dir() { files(&place) } else { Vec::new() };
            found.into_iter().filter(|(name, _)| !name.contains(".tmp-"))
        };
        for (name, bytes) in below("blobs").filter(|(name, _)| !name.ends_with(".incomplete")) {
            assert_eq!(etag(&bytes), name, "{what}: {} bytes", bytes.len());
        }
        for (name, bytes) in below("snapshots") {
            let file = name.strip_prefix(&format!("{COMMIT}/")).unwrap();
            assert!(self.model[file] == bytes, "{what}: {name}, {} bytes", bytes.len());
        }
        for (name, bytes) in below("refs") {
            assert!(name == "main" && bytes == COMMIT.as_bytes(), "{what}: {name}");
        }
    }

    /// The next download has everything.
    fn goes_on(&self, what: &str) {
        let dir = resolve_with(&self.hub.settings(&self.cache), ID, "main").unwrap();
        let found: BTreeMap<String, Vec<u8>> = files(&dir)
            .into_iter()
            .filter(|(name, _)| !name.contains(".tmp-"))
            .collect();
        assert!(found == self.model, "{what}: {:?}", found.keys());
        self.is_whole(what);
        assert!(incomplete(&self.folder().join("blobs")).is_empty(), "{what}");
    }

    /// The error of a command that could not write `path`.
    fn refused(&self, out: &Output, path: &Path, cause: &str, what: &str) {
        let text = said(out);
        assert_eq!(out.status.code(), Some(1), "{what}\n{text}");
        let place = format!("--> {}", path.display());
        for part in [
            place.as_str(),
            cause,
            "hint: ",
            "set HF_HUB_CACHE (or HF_HOME) to another directory",
        ] {
            assert!(text.contains(part), "{what}: no {part:?}\n{text}");
        }
        self.is_whole(what);
    }
}

/// Row C3.
#[test]
fn a_file_in_the_place_of_the_cache_or_of_a_part_of_it_is_named_with_what_to_set() {
    let place = Place::new();
    let folder = place.folder();
    // A directory cannot be made below a file, nor under its name.
    let (below, same) = ("Not a directory", "File exists");
    for (file, named, cause) in [
        (place.cache.clone(), folder.clone(), below),
        (folder.clone(), folder.clone(), below),
        (folder.join("blobs"), folder.join("blobs"), same),
        (folder.join("snapshots"), folder.join("snapshots"), below),
        (folder.join("refs"), folder.join("refs"), same),
    ] {
        let what = file.display().to_string();
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "mine").unwrap();
        let out = place.command().output().unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"mine", "{what}");
        fs::remove_file(&file).unwrap();
        place.refused(&out, &named, cause, &what);
        place.goes_on(&what);
        fs::remove_dir_all(&place.cache).unwrap();
    }
}

/// Row C3.
#[test]
fn a_read_only_cache_is_named_with_what_to_set_and_is_used_if_it_is_whole() {
    let place = Place::new();
    fs::create_dir(&place.cache).unwrap();
    let mode = |mode| fs::set_permissions(&place.cache, Permissions::from_mode(mode)).unwrap();
    mode(0o555);
    let out = unprivileged(&place.command()).output().unwrap();
    mode(0o755);
    place.refused(&out, &place.cache, "Permission denied", "mode 0555");
    assert!(files(&place.cache).is_empty());

    let Some(mut command) = place.on_disk(place.root(), Fault::From(EROFS), 1) else {
        return;
    };
    let out = command.output().unwrap();
    place.refused(&out, &place.cache, "Read-only file system", "read-only");
    assert!(files(&place.cache).is_empty());

    // Nothing is written to a cache that has the model.
    place.goes_on("written again");
    let mut command = place.on_disk(place.root(), Fault::Record, 0).unwrap();
    let out = command.output().unwrap();
    assert!(out.status.success(), "{}", said(&out));
    let written = recorded(&place.bench);
    assert!(written.is_empty(), "{written:?}");
}

/// Row C3.
#[test]
fn a_disk_that_is_full_in_a_download_loses_nothing_and_the_next_one_goes_on() {
    let place = Place::new();
    let Some(mut command) = place.on_disk(place.root(), Fault::Record, 0) else {
        return;
    };
    let out = command.output().unwrap();
    assert!(out.status.success(), "{}", said(&out));
    let all = recorded(&place.bench).len();
    place.goes_on("without a fault");
    // A network divides the contents into writes as it likes, so the last operations may not be there again.
    let mut failed = 0;
    for at in (1..=all).step_by((all / 12).max(1)) {
        fs::remove_dir_all(&place.cache).unwrap();
        let what = format!("operation {at} of {all}");
        let out = place
            .on_disk(place.root(), Fault::From(ENOSPC), at)
            .unwrap()
            .output()
            .unwrap();
        if out.status.success() {
            assert!(at > all / 2, "{what}");
        } else {
            place.refused(&out, &place.cache, "No space left on device", &what);
            failed += 1;
        }
        place.goes_on(&what);
    }
    assert!(failed >= 6, "{failed} of {all}");

    // In the weights: the file is made, two writes are done, and the third finds no space.
    fs::remove_dir_all(&place.cache).unwrap();
    let blob = place.folder().join("blobs").join(sha256(&place.model[WEIGHTS]));
    let root = format!("{}*", blob.display());
    let out = place.on_disk(&root, Fault::From(ENOSPC), 4).unwrap().output().unwrap();
    place.refused(&out, &blob, "No space left on device", "weights");
    let kept = incomplete(&place.folder().join("blobs"));
    let all = place.model[WEIGHTS].len() as u64;
    assert!(
        kept.len() == 1 && (1..all).contains(&kept[0]),
        "{kept:?} of {all} bytes"
    );
    place.hub.transfers("");
    place.goes_on("weights");
    assert_eq!(place.hub.transfers(WEIGHTS).iter().min(), Some(&kept[0]));
}

/// Row C15. An interrupted download left a part of the files: without a network that part would be trained on as if it were all.
#[test]
fn a_part_of_a_data_set_is_not_the_whole_one_without_a_network() {
    let (hub, cache) = (Hub::start(), tempfile::tempdir().unwrap());
    let of = |kind: &str| {
        (0..3)
            .map(|n| {
                (
                    format!("train-0000{n}-of-00003.{kind}"),
                    format!("{{\"text\": \"{n}\"}}\n").into_bytes(),
                )
            })
            .collect()
    };
    let rows: BTreeMap<String, Vec<u8>> = of("jsonl");
    hub.put(&format!("datasets/{DATA}"), rows.clone());
    let mut settings = hub.settings(cache.path());
    let resolve = |settings: &_| resolve_dataset_with(settings, DATA, "main", &DatasetPart::TRAIN);
    let first = "train-00000-of-00003.jsonl";
    resolve_dataset_with(&settings, &format!("{DATA}:{first}"), "main", &DatasetPart::TRAIN).unwrap();
    settings.offline = true;
    let folder = cache.path().join(format!("datasets--{}", DATA.replace('/', "--")));
    assert_eq!(files(&folder.join("snapshots")).len(), 1);
    let missing = "`train-00001-of-00003.jsonl` of the dataset";
    let e = resolve(&settings).unwrap_err().to_string();
    assert!(e.contains(missing), "{e}");
    // Another tool stores no list: the names say how many files there are.
    fs::remove_dir_all(folder.join("lists")).unwrap();
    let e = resolve(&settings).unwrap_err().to_string();
    assert!(e.contains(missing), "{e}");
    settings.offline = false;
    assert_eq!(resolve(&settings).unwrap().len(), 3);
    settings.offline = true;
    assert_eq!(resolve(&settings).unwrap().len(), 3);
    // A list that was changed names no file outside.
    fs::write(folder.join(format!("lists/{COMMIT}.json")), "[\"../train.jsonl\"]").unwrap();
    assert_eq!(resolve(&settings).unwrap().len(), 3);
}

/// Row C15. The template of an adapter's training is downloaded before its weights, and is missed without a network.
#[test]
fn an_adapter_without_its_template_is_not_whole() {
    let (hub, cache) = (Hub::start(), tempfile::tempdir().unwrap());
    let names = [
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
    ];
    let file = |name: &&str| (name.to_string(), name.as_bytes().to_vec());
    hub.put(&format!("models/{ID}"), names.iter().map(file).collect());
    let mut settings = hub.settings(cache.path());
    let dir = resolve_with(&settings, ID, "main").unwrap();
    settings.offline = true;
    assert_eq!(resolve_with(&settings, ID, "main").unwrap(), dir);
    fs::remove_file(dir.join("chat_template.jinja")).unwrap();
    let e = resolve_with(&settings, ID, "main").unwrap_err().to_string();
    assert!(e.contains("`chat_template.jinja` of the model"), "{e}");
}
