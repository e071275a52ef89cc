//! Tests of downloads with a small local server that emulates the hub: listing, files with ranges, tokens, broken
//! connections, damaged content, no network.
#![cfg(feature = "hub")]

#[path = "run/bench.rs"]
#[allow(dead_code, reason = "other tests need more of it")]
mod bench;
#[path = "hub/cache.rs"]
mod cache;
#[path = "run/disk.rs"]
#[allow(dead_code, reason = "other tests need more of it")]
mod disk;
#[path = "hub/lies.rs"]
mod lies;
#[path = "hub/plan.rs"]
mod plan;
#[path = "hub/programs.rs"]
mod programs;
#[path = "hub/push.rs"]
mod push;
#[path = "hub/request.rs"]
mod request;
#[path = "run/unprivileged.rs"]
mod unprivileged;

use ft::formats::{Config, StoredDtype, TensorPlan, Tokenizer, Values, Weights, writer};
use ft::hub::{DatasetPart, HubSettings, resolve_dataset_with, resolve_with};
use request::Request;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const ID: &str = "tester/tiny-model";
const DATA: &str = "tester/rows";
const TOOL_TEMPLATE: &str = "additional_chat_templates/tool_use.jinja";

#[derive(Default)]
struct State {
    /// Maps `models/<id>` or `datasets/<id>` to its files.
    repos: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    token: Option<String>,
    lists: bool,
    ranges: bool,
    /// A file, and the number of its next transfers (after the first piece) that end after half of the announced bytes.
    breaks: Option<(String, usize)>,
    /// A file whose bytes are changed on the way.
    damages: Option<String>,
    /// Method, path, first requested byte.
    log: Vec<(String, String, Option<u64>)>,
    lies: Lies,
    /// Number of requests with a token.
    tokens: usize,
}

/// False answers of a hostile mirror.
#[derive(Default, Clone)]
struct Lies {
    /// Name of the commit, in headers and in the API.
    commit: Option<String>,
    /// `ETag` and `X-Linked-Etag`.
    tag: Option<String>,
    /// Hash of a file in the list.
    oid: Option<String>,
    /// Size of a file in the list, and in headers.
    size: Option<u64>,
    /// Target of a redirect for a file request.
    location: Option<String>,
    /// A listed file that does not exist.
    path: Option<String>,
    /// Link from every page of a list to the next one.
    next: Option<String>,
    /// Endless bytes after every file.
    endless: bool,
}

struct Hub {
    address: String,
    state: Arc<Mutex<State>>,
}

impl Hub {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new(State {
            lists: true,
            ranges: true,
            ..State::default()
        }));
        let shared = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = shared.clone();
                std::thread::spawn(move || serve(stream, &state));
            }
        });
        Self { address, state }
    }

    fn with_model() -> Self {
        let hub = Self::start();
        hub.put(&format!("models/{ID}"), model());
        hub
    }

    fn put(&self, repo: &str, files: BTreeMap<String, Vec<u8>>) {
        self.state().repos.insert(repo.into(), files);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn settings(&self, cache: &Path) -> HubSettings {
        HubSettings {
            cache: cache.to_path_buf(),
            endpoint: self.address.clone(),
            token: None,
            insecure_token: false,
            offline: false,
            progress: false,
            attempts: 3,
            wait: Duration::from_millis(5),
            piece: 32 << 10,
        }
    }

    /// First bytes of the requested ranges of a file since the last call; clears the log.
    fn transfers(&self, file: &str) -> Vec<u64> {
        let log = std::mem::take(&mut self.state().log);
        log.into_iter()
            .filter(|(method, path, _)| method == "GET" && path.ends_with(file))
            .map(|(.., start)| start.unwrap_or(0))
            .collect()
    }
}

fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest;
    sha2::Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// Git object id of a file, or of the Git LFS pointer of a large file.
fn oid(bytes: &[u8]) -> String {
    use sha1::Digest;
    let pointer = format!(
        "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n",
        sha256(bytes),
        bytes.len()
    );
    let text = if bytes.len() > 10_000 {
        pointer.as_bytes()
    } else {
        bytes
    };
    let blob = [format!("blob {}\0", text.len()).as_bytes(), text].concat();
    sha1::Sha1::digest(blob).iter().map(|b| format!("{b:02x}")).collect()
}

/// The hub's ETag of a file: SHA-256 for a large one, the Git object id for a small one.
fn etag(bytes: &[u8]) -> String {
    if bytes.len() > 10_000 {
        sha256(bytes)
    } else {
        oid(bytes)
    }
}

fn serve(mut stream: TcpStream, state: &Mutex<State>) -> Option<()> {
    let Request {
        method, path, headers, ..
    } = Request::read(&stream)?;
    let range = headers.get("range").and_then(|r| {
        let (a, b) = r.strip_prefix("bytes=")?.split_once('-')?;
        Some((a.parse::<u64>().ok()?, b.parse::<u64>().ok()?))
    });
    let path = path.replace("%20", " ");
    let mut state = state.lock().unwrap();
    state.log.push((method.clone(), path.clone(), range.map(|r| r.0)));
    let mut reply = |status: &str, extra: &str, body: &[u8], length: usize| {
        let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n{extra}\r\n");
        stream.write_all(head.as_bytes()).ok()?;
        if method != "HEAD" {
            stream.write_all(body).ok()?;
        }
        stream.flush().ok()
    };
    let auth = headers.get("authorization").cloned().unwrap_or_default();
    state.tokens += usize::from(!auth.is_empty());
    let lies = state.lies.clone();
    let named = lies.commit.clone().unwrap_or_else(|| COMMIT.to_string());
    if state.token.as_ref().is_some_and(|t| auth != format!("Bearer {t}")) {
        // An insecure server that repeats the credentials in its answer.
        let body = json!({"error": format!("bad credentials: {auth}")}).to_string();
        return reply("401 Unauthorized", "", body.as_bytes(), body.len());
    }
    if let Some(rest) = path.strip_prefix("/api/") {
        let (repo, revision) = rest.split_once("/tree/").or_else(|| rest.split_once("/revision/"))?;
        if !state.lists {
            return reply("404 Not Found", "", b"", 0);
        }
        let Some(files) = state.repos.get(repo) else {
            return reply("404 Not Found", "X-Error-Code: RepoNotFound\r\n", b"", 0);
        };
        if revision != "main" && revision != COMMIT {
            return reply("404 Not Found", "X-Error-Code: RevisionNotFound\r\n", b"", 0);
        }
        if rest.contains("/revision/") {
            let body = json!({ "sha": named }).to_string();
            return reply("200 OK", "", body.as_bytes(), body.len());
        }
        let entry = |(path, bytes): (&String, &Vec<u8>)| {
            let size = lies.size.unwrap_or(bytes.len() as u64);
            let mut entry = json!({"type": "file", "oid": oid(bytes), "size": size, "path": path});
            if bytes.len() > 10_000 {
                // The real hub names the hash `oid` here.
                entry["lfs"] = json!({"oid": sha256(bytes), "size": size, "pointerSize": 130});
            }
            if let Some(oid) = &lies.oid {
                entry["oid"] = json!(oid);
                entry["lfs"] = json!({"oid": oid, "size": size});
            }
            entry
        };
        let mut all: Vec<Value> = files.iter().map(entry).collect();
        if let Some(path) = &lies.path {
            all.push(json!({"type": "file", "oid": oid(b"x"), "size": 1, "path": path}));
        }
        let body = Value::Array(all).to_string();
        let link = |next: &String| format!("Link: <{next}>; rel=\"next\"\r\n");
        let link = lies.next.as_ref().map(link).unwrap_or_default();
        return reply("200 OK", &link, body.as_bytes(), body.len());
    }
    let (repo, rest) = path.trim_start_matches('/').split_once("/resolve/")?;
    let repo = if repo.starts_with("datasets/") {
        repo.to_string()
    } else {
        format!("models/{repo}")
    };
    let (_, file) = rest.split_once('/')?;
    let commit = format!("X-Repo-Commit: {named}\r\n");
    let Some(mut bytes) = state.repos.get(&repo).and_then(|f| f.get(file)).cloned() else {
        let extra = format!("{commit}X-Error-Code: EntryNotFound\r\n");
        return reply("404 Not Found", &extra, b"", 0);
    };
    let tag = lies.tag.clone().unwrap_or_else(|| etag(&bytes));
    let linked = lies.tag.as_ref().map(|t| format!("X-Linked-Etag: \"{t}\"\r\n"));
    let linked = linked.unwrap_or_default();
    let mut extra = format!("{commit}ETag: \"{tag}\"\r\n{linked}Accept-Ranges: bytes\r\n");
    if let Some(size) = lies.size {
        extra.push_str(&format!("X-Linked-Size: {size}\r\n"));
    }
    if let Some(location) = &lies.location {
        let extra = format!("{extra}Location: {location}\r\n");
        return reply("302 Found", &extra, b"", 0);
    }
    if method == "HEAD" {
        return reply("200 OK", &extra, b"", bytes.len());
    }
    if lies.endless {
        let head = format!("HTTP/1.1 206 Partial Content\r\nConnection: close\r\n{extra}\r\n");
        drop(state);
        stream.write_all(head.as_bytes()).ok()?;
        while stream.write_all(&[b'x'; 4096]).is_ok() {}
        return Some(());
    }
    if state.damages.as_deref() == Some(file) {
        bytes[0] ^= 1;
    }
    if range.is_some_and(|r| r.0 >= bytes.len() as u64) {
        return reply("416 Range Not Satisfiable", "", b"", 0);
    }
    let (status, body) = match range.filter(|_| state.ranges) {
        Some((a, b)) => (
            "206 Partial Content",
            &bytes[a as usize..=(b as usize).min(bytes.len() - 1)],
        ),
        None => ("200 OK", &bytes[..]),
    };
    let broken = match &mut state.breaks {
        Some((name, left)) if name == file && *left > 0 && range.is_none_or(|r| r.0 > 0) => {
            *left -= 1;
            true
        }
        _ => false,
    };
    drop(state);
    let sent = if broken { &body[..body.len() / 2] } else { body };
    reply(status, &extra, sent, body.len())?;
    // Let the client read before the connection is dropped.
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let _ = stream.read(&mut [0; 16]);
    Some(())
}

fn tokenizer_json() -> Vec<u8> {
    json!({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "<end>": 1}, "unk_token": "a"}})
        .to_string()
        .into_bytes()
}

/// A tiny model with 200 kB of weights.
fn model() -> BTreeMap<String, Vec<u8>> {
    let dir = tempfile::tempdir().unwrap();
    let plan = [TensorPlan {
        name: "model.embed_tokens.weight".into(),
        dtype: StoredDtype::F32,
        shape: vec![50, 1000],
    }];
    let numbers: Vec<f32> = (0..50_000).map(|i| i as f32).collect();
    writer::write_model(dir.path(), &plan, writer::SHARD_BYTES, |_, put| {
        put(Values::F32(&numbers))
    })
    .unwrap();
    let weights = std::fs::read(dir.path().join("model.safetensors")).unwrap();
    let config = br#"{"model_type": "llama", "hidden_size": 1000, "eos_token_id": 1}"#;
    BTreeMap::from([
        ("README.md".into(), b"not needed".to_vec()),
        ("config.json".into(), config.to_vec()),
        ("tokenizer.json".into(), tokenizer_json()),
        ("chat_template.jinja".into(), b"{{ messages }}".to_vec()),
        (TOOL_TEMPLATE.into(), b"{{ tools }}".to_vec()),
        ("model.safetensors".into(), weights),
        ("pytorch_model.bin".into(), b"never asked for".to_vec()),
    ])
}

fn loads(dir: &Path) {
    assert_eq!(Config::load(dir).unwrap().usize("hidden_size").unwrap(), 1000);
    assert_eq!(Tokenizer::load(dir).unwrap().eos_id(), Some(1));
    let weights = Weights::open(dir).unwrap();
    let numbers = weights.read_f32("model.embed_tokens.weight").unwrap();
    assert!(numbers.iter().enumerate().all(|(i, x)| *x == i as f32));
}

fn incomplete(blobs: &Path) -> Vec<u64> {
    std::fs::read_dir(blobs)
        .unwrap()
        .map(|f| f.unwrap())
        .filter(|f| f.file_name().to_string_lossy().ends_with(".incomplete"))
        .map(|f| f.metadata().unwrap().len())
        .collect()
}

#[test]
fn a_model_is_downloaded_loaded_and_then_found_in_the_cache() {
    let (hub, cache) = (Hub::with_model(), tempfile::tempdir().unwrap());
    let settings = hub.settings(cache.path());
    let dir = resolve_with(&settings, ID, "main").unwrap();
    let repo = cache.path().join("models--tester--tiny-model");
    assert_eq!(dir, repo.join("snapshots").join(COMMIT));
    loads(&dir);
    assert!(dir.join(TOOL_TEMPLATE).exists());
    assert!(!dir.join("pytorch_model.bin").exists() && !dir.join("README.md").exists());
    assert_eq!(std::fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    // Every file was downloaded in ranges and verified.
    let log = std::mem::take(&mut hub.state().log);
    let whole = log
        .iter()
        .filter(|(m, p, start)| m == "GET" && p.contains("/resolve/") && start.is_none());
    assert_eq!(whole.count(), 0, "{log:#?}");
    assert_eq!(resolve_with(&settings, ID, "main").unwrap(), dir);
    assert!(
        hub.state()
            .log
            .iter()
            .all(|(m, p, _)| m != "GET" || !p.contains("/resolve/"))
    );
    loads(&resolve_with(&settings, ID, COMMIT).unwrap());
}

#[test]
fn a_connection_that_breaks_is_taken_up_where_it_broke() {
    let (hub, cache) = (Hub::with_model(), tempfile::tempdir().unwrap());
    hub.state().breaks = Some(("model.safetensors".into(), 2));
    loads(&resolve_with(&hub.settings(cache.path()), ID, "main").unwrap());
    assert_eq!(hub.state().breaks.as_ref().unwrap().1, 0, "nothing broke");
    let starts = hub.transfers("model.safetensors");
    let again = starts.iter().filter(|s| **s == 0).count();
    assert_eq!(again, 1, "the first piece was fetched again: {starts:?}");
}

#[test]
fn a_stopped_download_goes_on_in_the_next_run() {
    let (hub, cache) = (Hub::with_model(), tempfile::tempdir().unwrap());
    let mut settings = hub.settings(cache.path());
    settings.attempts = 1;
    hub.state().breaks = Some(("model.safetensors".into(), 1000));
    let e = resolve_with(&settings, ID, "main").unwrap_err().to_string();
    assert!(
        e.contains("cannot reach the hub") && e.contains("downloaded data is kept"),
        "{e}"
    );
    let repo = cache.path().join("models--tester--tiny-model");
    let kept = incomplete(&repo.join("blobs"));
    assert_eq!(kept, [settings.piece], "not kept: the first piece");
    assert!(Weights::open(&repo.join("snapshots").join(COMMIT)).is_err());
    hub.state().breaks = None;
    hub.transfers("");
    loads(&resolve_with(&settings, ID, "main").unwrap());
    let starts = hub.transfers("model.safetensors");
    assert_eq!(starts.iter().min(), Some(&settings.piece), "{starts:?}");
    assert!(incomplete(&repo.join("blobs")).is_empty());
}

#[test]
fn a_server_without_ranges_or_listing_works_too() {
    for (lists, ranges) in [(true, false), (false, true)] {
        let (hub, cache) = (Hub::with_model(), tempfile::tempdir().unwrap());
        {
            let mut state = hub.state();
            (state.lists, state.ranges) = (lists, ranges);
        }
        loads(&resolve_with(&hub.settings(cache.path()), ID, "main").unwrap());
    }
}

/// Row W5.
#[test]
fn damaged_content_never_gets_into_the_cache() {
    let (hub, cache) = (Hub::with_model(), tempfile::tempdir().unwrap());
    hub.state().damages = Some("model.safetensors".into());
    let settings = hub.settings(cache.path());
    let e = resolve_with(&settings, ID, "main").unwrap_err().to_string();
    assert!(
        e.contains("damaged during the download") && e.contains("SHA-256"),
        "{e}"
    );
    hub.state().damages = None;
    loads(&resolve_with(&settings, ID, "main").unwrap());
}

#[test]
fn a_wrong_token_is_explained_and_not_shown() {
    let (hub, cache) = (Hub::with_model(), tempfile::tempdir().unwrap());
    hub.state().token = Some("hf_right".into());
    let mut settings = hub.settings(cache.path());
    settings.token = Some("hf_wrong_secret".into());
    for lists in [true, false] {
        hub.state().lists = lists;
        let e = resolve_with(&settings, ID, "main").unwrap_err();
        let text = format!("{e} {e:?}");
        assert!(
            text.contains("does not allow this token") && text.contains("HF_TOKEN") && text.contains(ID),
            "{text}"
        );
        assert!(!text.contains("hf_wrong_secret"), "{text}");
    }
    settings.token = Some("hf_right".into());
    loads(&resolve_with(&settings, ID, "main").unwrap());
}

#[test]
fn what_is_not_there_is_named() {
    let (hub, cache) = (Hub::with_model(), tempfile::tempdir().unwrap());
    let settings = hub.settings(cache.path());
    let e = resolve_with(&settings, "tester/other", "main").unwrap_err().to_string();
    assert!(e.contains("`tester/other`") && e.contains("hint:"), "{e}");
    let e = resolve_with(&settings, ID, "v9").unwrap_err().to_string();
    assert!(e.contains("`v9`") && e.contains(ID), "{e}");
    let mut files = model();
    files.remove("model.safetensors");
    hub.put(&format!("models/{ID}"), files);
    let e = resolve_with(&settings, ID, "main").unwrap_err().to_string();
    assert!(
        e.contains("no `model.safetensors`") && e.contains("pytorch_model.bin") && e.contains("pickle"),
        "{e}"
    );
}

#[test]
fn shards_follow_the_index_and_stay_inside() {
    let (hub, cache) = (Hub::with_model(), tempfile::tempdir().unwrap());
    let settings = hub.settings(cache.path());
    let mut files = model();
    let weights = files.remove("model.safetensors").unwrap();
    let index = |name: &str| {
        json!({"weight_map": {"model.embed_tokens.weight": name}})
            .to_string()
            .into_bytes()
    };
    files.insert(
        "model.safetensors.index.json".into(),
        index("../../../../evil.safetensors"),
    );
    hub.put(&format!("models/{ID}"), files.clone());
    let e = resolve_with(&settings, ID, "main").unwrap_err().to_string();
    assert!(e.contains("will not open") && e.contains("leaves the directory"), "{e}");
    assert!(hub.state().log.iter().all(|(_, path, _)| !path.contains("evil")));
    let name = "model-00001-of-00001.safetensors";
    files.insert("model.safetensors.index.json".into(), index(name));
    hub.put(&format!("models/{ID}"), files.clone());
    let e = resolve_with(&settings, ID, "main").unwrap_err().to_string();
    assert!(e.contains("has no file") && e.contains(name), "{e}");
    files.insert(name.into(), weights);
    hub.put(&format!("models/{ID}"), files);
    loads(&resolve_with(&settings, ID, "main").unwrap());
}

#[test]
fn offline_means_the_cache_and_nothing_else() {
    let (hub, cache) = (Hub::with_model(), tempfile::tempdir().unwrap());
    let mut settings = hub.settings(cache.path());
    settings.offline = true;
    let e = resolve_with(&settings, ID, "main").unwrap_err().to_string();
    assert!(
        e.contains("not in the local cache") && e.contains("HF_HUB_OFFLINE"),
        "{e}"
    );
    assert!(hub.state().log.is_empty(), "the network was used");
    settings.offline = false;
    let dir = resolve_with(&settings, ID, "main").unwrap();
    hub.state().log.clear();
    settings.offline = true;
    assert_eq!(resolve_with(&settings, ID, "main").unwrap(), dir);
    loads(&dir);
    std::fs::remove_file(dir.join("model.safetensors")).unwrap();
    let e = resolve_with(&settings, ID, "main").unwrap_err().to_string();
    assert!(
        e.contains("`model.safetensors`") && e.contains("not in the local cache"),
        "{e}"
    );
    assert!(hub.state().log.is_empty(), "the network was used");
}

#[test]
fn without_a_network_the_cache_is_used_or_the_error_says_so() {
    let (hub, cache) = (Hub::with_model(), tempfile::tempdir().unwrap());
    let mut settings = hub.settings(cache.path());
    let dir = resolve_with(&settings, ID, "main").unwrap();
    // A port without a server.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    settings.endpoint = format!("http://127.0.0.1:{port}");
    assert_eq!(resolve_with(&settings, ID, "main").unwrap(), dir);
    let e = resolve_with(&settings, "tester/other", "main").unwrap_err().to_string();
    assert!(
        e.contains("cannot reach the hub") && e.contains("HF_HUB_OFFLINE=1") && e.contains("HF_ENDPOINT"),
        "{e}"
    );
    settings.endpoint = "no url".into();
    assert!(
        resolve_with(&settings, ID, "main")
            .unwrap_err()
            .to_string()
            .contains("HF_ENDPOINT")
    );
}

#[test]
fn data_sets_are_found_by_split_or_by_name() {
    let (hub, cache) = (Hub::start(), tempfile::tempdir().unwrap());
    let row = b"{\"text\": \"a\"}\n".to_vec();
    let names = [
        "README.md",
        "data/train.jsonl",
        "data/test.jsonl",
        "extra/odd name.jsonl",
    ];
    let file = |name: &&str| (name.to_string(), [&row[..], name.as_bytes()].concat());
    hub.put(&format!("datasets/{DATA}"), names.iter().map(file).collect());
    let mut settings = hub.settings(cache.path());
    let got = resolve_dataset_with(&settings, DATA, "main", &DatasetPart::TRAIN).unwrap();
    assert_eq!(got.len(), 1);
    assert!(got[0].ends_with("data/train.jsonl") && got[0].starts_with(cache.path()));
    assert!(std::fs::read(&got[0]).unwrap().starts_with(&row));
    let named = resolve_dataset_with(
        &settings,
        &format!("{DATA}:extra/odd name.jsonl"),
        "main",
        &DatasetPart::TRAIN,
    )
    .unwrap();
    assert!(named[0].ends_with("extra/odd name.jsonl"));
    let e = resolve_dataset_with(&settings, &format!("{DATA}:nope.jsonl"), "main", &DatasetPart::TRAIN)
        .unwrap_err()
        .to_string();
    assert!(e.contains("no file `nope.jsonl`"), "{e}");
    settings.offline = true;
    assert_eq!(
        resolve_dataset_with(&settings, DATA, "main", &DatasetPart::TRAIN).unwrap(),
        got
    );
    settings.offline = false;
    hub.put(
        &format!("datasets/{DATA}"),
        BTreeMap::from([("test.csv".to_string(), b"a\n".to_vec())]),
    );
    let e = resolve_dataset_with(&settings, DATA, "main", &DatasetPart::TRAIN)
        .unwrap_err()
        .to_string();
    assert!(
        e.contains("no split `train`") && e.contains("`DatasetPart::split = \"test\"`"),
        "{e}"
    );
}
