//! `ft push` with a small local server that takes uploads as the hub does: questions, Git LFS with whole files and with
//! parts at another address, commits. It checks every hash.

#[path = "../run/patience.rs"]
mod patience;

use super::request::Request;
use super::{HubSettings, oid, resolve_with, sha256};
use patience::{ended, signal, until};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

const ID: &str = "tester/answers";
const TOKEN: &str = "hf_secret_of_the_test";
const COMMIT: &str = "89abcdef0123456789abcdef0123456789abcdef";
/// Larger files are uploaded in parts of this size.
const PART: usize = 100_000;
/// Larger files are wanted by Git LFS, and all safetensors.
const TEXT: u64 = 10_000;

#[derive(Default)]
struct State {
    exists: bool,
    private: bool,
    files: BTreeMap<String, Vec<u8>>,
    /// Large files by their SHA-256.
    objects: BTreeMap<String, Vec<u8>>,
    /// Parts by their addresses.
    parts: BTreeMap<String, Vec<u8>>,
    commits: usize,
    /// Bytes that reached the server for large files.
    received: usize,
    /// A request to it had credentials.
    token_left: bool,
    /// Number of the next uploads of whole files (not of parts) that break in the middle.
    breaks: usize,
    /// The server for large files accepts a request, and then waits.
    holds: bool,
    /// Number of requests that wait.
    held: usize,
}

struct Hub {
    address: String,
    state: Arc<Mutex<State>>,
}

impl Hub {
    /// Two servers: the hub, and the one for large files.
    fn start() -> Self {
        let state = Arc::new(Mutex::new(State::default()));
        let [hub, storage] = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let [address, store] = [&hub, &storage].map(|l| format!("http://{}", l.local_addr().unwrap()));
        for (listener, own) in [(hub, true), (storage, false)] {
            let (state, store, address) = (state.clone(), store.clone(), address.clone());
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let (state, store, address) = (state.clone(), store.clone(), address.clone());
                    std::thread::spawn(move || {
                        if own {
                            serve(stream, &state, &address, &store);
                        } else {
                            keep(stream, &state);
                        }
                    });
                }
            });
        }
        Self { address, state }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

fn reply(mut stream: TcpStream, status: &str, extra: &str, body: &str) {
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n{extra}\r\n{body}");
    let _ = stream.write_all(head.as_bytes());
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let _ = stream.read(&mut [0; 16]);
}

fn is_held(state: &Mutex<State>) -> bool {
    state.lock().unwrap().holds
}

/// The server for large files: the address is the permission.
fn keep(stream: TcpStream, state: &Mutex<State>) {
    let Some(mut request) = Request::read(&stream) else {
        return;
    };
    assert_eq!(request.method, "PUT");
    state.lock().unwrap().token_left |= request.headers.contains_key("authorization");
    if is_held(state) {
        state.lock().unwrap().held += 1;
        while is_held(state) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let breaks = {
        let mut state = state.lock().unwrap();
        let now = state.breaks > 0 && !request.path.starts_with("/part/");
        state.breaks -= usize::from(now);
        now
    };
    if breaks {
        let _ = request.reader.read(&mut [0; 1000]);
        let _ = stream.shutdown(std::net::Shutdown::Both);
        return;
    }
    let Some(body) = request.body() else { return };
    let mut state = state.lock().unwrap();
    state.received += body.len();
    let tag = format!("ETag: \"{}\"\r\n", sha256(&body));
    if request.path.starts_with("/part/") {
        state.parts.insert(request.path, body);
    } else {
        // Git LFS wants the headers that the hub names; the client in Python leaves them out.
        let own = request.headers["user-agent"].starts_with("ft/");
        assert!(!own || request.headers["x-of-the-hub"] == "yes");
        let hash = request.path.trim_start_matches('/').to_string();
        assert_eq!(sha256(&body), hash);
        state.objects.insert(hash, body);
    }
    drop(state);
    reply(stream, "200 OK", &tag, "");
}

fn decoded(text: &str) -> Vec<u8> {
    let letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bits: Vec<u8> = text
        .trim_end_matches('=')
        .chars()
        .flat_map(|c| {
            let n = letters.find(c).unwrap();
            (0..6).rev().map(move |i| (n >> i & 1) as u8)
        })
        .collect();
    bits.chunks_exact(8)
        .map(|b| b.iter().fold(0, |n, bit| n << 1 | bit))
        .collect()
}

fn serve(stream: TcpStream, state: &Mutex<State>, address: &str, store: &str) {
    let Some(mut request) = Request::read(&stream) else {
        return;
    };
    let Some(body) = request.body() else { return };
    let auth = request.headers.get("authorization").cloned().unwrap_or_default();
    if auth != format!("Bearer {TOKEN}") {
        // An insecure server that repeats the credentials in its answer.
        let text = json!({"error": format!("bad credentials: {auth}")}).to_string();
        return reply(stream, "401 Unauthorized", "", &text);
    }
    let json = || -> Value { serde_json::from_slice(&body).unwrap() };
    let mut state = state.lock().unwrap();
    let path = request.path.as_str();
    let answer = if path == "/api/repos/create" {
        let asked = json();
        assert_eq!(
            (asked["organization"].as_str(), asked["name"].as_str()),
            ID.split_once('/').map(|(a, b)| (Some(a), Some(b))).unwrap()
        );
        if std::mem::replace(&mut state.exists, true) {
            return reply(
                stream,
                "409 Conflict",
                "",
                "{\"error\": \"You already created this model repo\"}",
            );
        }
        state.private = asked["private"] == true;
        json!({"url": format!("{address}/{ID}"), "name": ID, "id": "0"})
    } else if path == format!("/api/models/{ID}/preupload/main") {
        let asked = json()["files"].as_array().unwrap().clone();
        let files = asked.iter().map(|file| {
            let (name, size) = (file["path"].as_str().unwrap(), file["size"].as_u64().unwrap());
            assert_eq!(decoded(file["sample"].as_str().unwrap()).len() as u64, size.min(512));
            let large = size > TEXT || name.ends_with(".safetensors");
            let known = state.files.get(name).map(|bytes| if large { sha256(bytes) } else { oid(bytes) });
            json!({"path": name, "uploadMode": if large { "lfs" } else { "regular" }, "shouldIgnore": false, "oid": known})
        });
        json!({"files": files.collect::<Vec<_>>()})
    } else if path == format!("/{ID}.git/info/lfs/objects/batch") {
        let asked = json();
        assert_eq!(request.headers["accept"], "application/vnd.git-lfs+json");
        let objects = asked["objects"].as_array().unwrap().iter().map(|object| {
            let hash = object["oid"].as_str().unwrap();
            let size = object["size"].as_u64().unwrap() as usize;
            let mut answer = json!({"oid": hash, "size": size});
            if state.objects.contains_key(hash) {
                return answer;
            }
            let verify = json!({"href": format!("{address}/verify"), "header": {}});
            let upload = if size > PART {
                let mut header = json!({"chunk_size": PART.to_string()});
                for part in 1..=size.div_ceil(PART) {
                    header[format!("{part:05}")] = json!(format!("{store}/part/{hash}/{part}"));
                }
                json!({"href": format!("{address}/complete/{hash}"), "header": header})
            } else {
                json!({"href": format!("{store}/{hash}"), "header": {"x-of-the-hub": "yes"}})
            };
            answer["actions"] = json!({"upload": upload, "verify": verify});
            answer
        });
        json!({"transfer": "basic", "objects": objects.collect::<Vec<_>>()})
    } else if let Some(hash) = path.strip_prefix("/complete/") {
        let asked = json();
        let mut whole = Vec::new();
        for (number, part) in asked["parts"].as_array().unwrap().iter().enumerate() {
            assert_eq!(part["partNumber"], number as u64 + 1);
            let bytes = &state.parts[&format!("/part/{hash}/{}", number + 1)];
            assert_eq!(part["etag"], format!("\"{}\"", sha256(bytes)));
            whole.extend(bytes);
        }
        assert_eq!(sha256(&whole), hash);
        state.objects.insert(hash.into(), whole);
        json!({})
    } else if path == "/verify" {
        let asked = json();
        assert_eq!(
            state.objects[asked["oid"].as_str().unwrap()].len() as u64,
            asked["size"]
        );
        return reply(stream, "200 OK", "", "OK");
    } else if path == format!("/api/models/{ID}/commit/main") {
        for line in std::str::from_utf8(&body).unwrap().lines() {
            let line: Value = serde_json::from_str(line).unwrap();
            let value = &line["value"];
            let name = value["path"].as_str().unwrap_or_default().to_string();
            match line["key"].as_str().unwrap() {
                "header" => assert!(value["summary"].is_string()),
                "file" => {
                    state.files.insert(name, decoded(value["content"].as_str().unwrap()));
                }
                "lfsFile" => {
                    let bytes = state.objects[value["oid"].as_str().unwrap()].clone();
                    state.files.insert(name, bytes);
                }
                other => panic!("{other}"),
            }
        }
        state.commits += 1;
        json!({"success": true, "commitOid": COMMIT, "commitUrl": format!("{address}/{ID}/commit/{COMMIT}")})
    } else {
        json!({"error": path})
    };
    drop(state);
    reply(
        stream,
        "200 OK",
        "Content-Type: application/json\r\n",
        &answer.to_string(),
    );
}

fn ft(dir: &Path, hub: &Hub, token: Option<&str>, arguments: &[&str]) -> Output {
    command(dir, hub, token, arguments).output().unwrap()
}

fn command(dir: &Path, hub: &Hub, token: Option<&str>, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ft"));
    command
        .args(arguments)
        .current_dir(dir)
        .env("HF_HOME", dir.join("hf"))
        .env("HF_ENDPOINT", &hub.address)
        .env_remove("HF_HUB_OFFLINE")
        .env_remove("HF_TOKEN");
    if let Some(token) = token {
        command.env("HF_TOKEN", token);
    }
    command
}

fn said(out: &Output) -> String {
    String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr)
}

/// A run of one step with LoRA.
fn trained(dir: &Path, hub: &Hub) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let recipe = format!(
        "[model]\npath = \"{}\"\ndtype = \"f32\"\n[data]\ntrain = \"{}\"\nmax_length = 64\n[tune]\nmethod = \"lora\"\n\
         [tune.lora]\nr = 2\n[train]\nmax_steps = 1\noutput_dir = \"run\"\n",
        root.join("assets/tiny").display(),
        root.join("assets/world/eval.jsonl").display()
    );
    std::fs::write(dir.join("r.toml"), recipe).unwrap();
    let out = ft(dir, hub, None, &["train", "r.toml"]);
    assert!(out.status.success(), "{}", said(&out));
}

#[test]
fn a_run_is_pushed_with_an_honest_card_and_only_once() {
    let (hub, place) = (Hub::start(), tempfile::tempdir().unwrap());
    let dir = place.path();
    trained(dir, &hub);

    // ---- a dry run sends no request
    let dry = ft(dir, &hub, None, &["push", "run", ID, "--dry-run", "--json"]);
    assert!(dry.status.success(), "{}", said(&dry));
    let dry: Value = serde_json::from_slice(&dry.stdout).unwrap();
    let card = dry["card"].as_str().unwrap();
    assert!(!hub.state().exists && dry["bytes"].as_u64().unwrap() > 0);
    for line in [
        "library_name: peft\n",
        "- lora\n",
        "ft train r.toml\n",
        "| fingerprint (BLAKE3 of the encoded rows) | `",
        "| steps | 1 of 1 |",
        "train = \".../eval.jsonl\"",
        "path = \".../tiny\"",
        "its id on the hub is not known",
        "| training loss",
        "## License\n\nNot stated.",
    ] {
        assert!(card.contains(line), "{line:?}\n{card}");
    }
    let machine = [dir, Path::new(env!("CARGO_MANIFEST_DIR"))].map(|p| p.display().to_string());
    assert!(machine.iter().all(|path| !card.contains(path)), "{card}");
    // The fingerprint is that of the run.
    let events = std::fs::read_to_string(dir.join("run/events.jsonl")).unwrap();
    let data = events.lines().find(|line| line.contains("\"event\":\"data\"")).unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    let print = data["fingerprint"].as_str().unwrap();
    assert!(print.len() == 64 && card.contains(print), "{print}");

    // ---- an upload that breaks at every attempt, then the same command again
    let push = |more: &[&str]| ft(dir, &hub, Some(TOKEN), &[&["push", "run", ID], more].concat());
    hub.state().breaks = 1;
    let out = push(&["--private", "--license", "mit"]);
    assert!(out.status.success(), "{}", said(&out));
    assert_eq!(
        String::from_utf8_lossy(&out.stdout).trim(),
        format!("{}/{ID}", hub.address)
    );
    let received = {
        let state = hub.state();
        assert!(state.private && !state.token_left && state.commits == 1);
        let mut names: Vec<String> = std::fs::read_dir(dir.join("run/final"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        assert_eq!(state.files.keys().cloned().collect::<Vec<_>>(), names);
        for name in names.iter().filter(|name| *name != "README.md") {
            let own = std::fs::read(dir.join("run/final").join(name)).unwrap();
            assert!(state.files[name] == own, "{name}");
        }
        let card = String::from_utf8_lossy(&state.files["README.md"]);
        assert!(card.contains("\nlicense: mit\n"), "{card}");
        state.received
    };
    let again = push(&["--license", "mit"]);
    assert!(said(&again).contains("no commit was made"), "{}", said(&again));
    let state = hub.state();
    assert_eq!((state.commits, state.received), (1, received));
    drop(state);

    // ---- the token is in no output and in no file
    let mut folders = vec![dir.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let bytes = std::fs::read(&path).unwrap();
                assert!(!String::from_utf8_lossy(&bytes).contains(TOKEN), "{}", path.display());
            }
        }
    }
    for out in [&out, &again] {
        assert!(!said(out).contains(TOKEN));
    }
}

#[test]
fn a_model_in_parts_arrives_whole_and_a_broken_upload_goes_on() {
    let (hub, place) = (Hub::start(), tempfile::tempdir().unwrap());
    let dir = place.path();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny");
    let weights = std::fs::read(model.join("model.safetensors")).unwrap();
    assert!(weights.len() > 2 * PART, "the weights have several parts");
    let model = model.to_str().unwrap();
    let push = |token| ft(dir, &hub, token, &["push", model, ID]);

    let out = push(None);
    assert!(
        out.status.code() == Some(2) && said(&out).contains("HF_TOKEN"),
        "{}",
        said(&out)
    );
    let out = push(Some("hf_other_token"));
    assert!(
        out.status.code() == Some(1) && said(&out).contains("write access"),
        "{}",
        said(&out)
    );
    assert!(
        said(&out).contains("code: FT802") && !said(&out).contains("hf_other_token"),
        "{}",
        said(&out)
    );

    // The weights arrive in parts, the tokenizer breaks as often as ft tries.
    let settings = HubSettings::default();
    hub.state().breaks = settings.attempts;
    let out = push(Some(TOKEN));
    let text = said(&out);
    assert!(
        out.status.code() == Some(1) && text.contains("cannot reach the hub") && text.contains("then upload again"),
        "{text}"
    );
    let stopped = {
        let state = hub.state();
        (state.commits, state.received)
    };
    assert_eq!(stopped, (0, weights.len()));
    let out = push(Some(TOKEN));
    assert!(out.status.success(), "{}", said(&out));
    let tokenizer = hub.state().files["tokenizer.json"].len();
    assert_eq!(
        hub.state().received,
        weights.len() + tokenizer,
        "the weights were sent once"
    );
    assert!(hub.state().files["model.safetensors"] == weights);
    let card = String::from_utf8_lossy(&hub.state().files["README.md"]).into_owned();
    assert!(card.contains("does not say how it was trained"), "{card}");

    // The uploaded files are downloaded again as a model.
    let files = hub.state().files.clone();
    let download = super::Hub::start();
    download.put(&format!("models/{ID}"), files);
    let cached = resolve_with(&download.settings(&dir.join("cache")), ID, "main").unwrap();
    assert!(std::fs::read(cached.join("model.safetensors")).unwrap() == weights);
}

/// Row S3.
#[test]
fn a_signal_in_an_upload_ends_it_without_a_commit_and_the_next_one_goes_on() {
    let (hub, place) = (Hub::start(), tempfile::tempdir().unwrap());
    let dir = place.path();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny");
    let push = ["push", model.to_str().unwrap(), ID];
    for (name, code) in [("-INT", 130), ("-TERM", 143)] {
        hub.state().holds = true;
        let mut command = command(dir, &hub, Some(TOKEN), &push);
        let before = hub.state().held;
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        until("no upload", || hub.state().held > before);
        signal(&child, name);
        let out = ended(child, Duration::from_secs(10), "an upload");
        assert_eq!(out.status.code(), Some(code), "{}", said(&out));
        assert!(out.stdout.is_empty() && !said(&out).contains(TOKEN), "{}", said(&out));
        let state = hub.state();
        assert!(state.commits == 0 && state.files.is_empty());
    }
    hub.state().holds = false;
    let out = ft(dir, &hub, Some(TOKEN), &push);
    assert!(out.status.success(), "{}", said(&out));
    let weights = std::fs::read(model.join("model.safetensors")).unwrap();
    assert!(hub.state().commits == 1 && hub.state().files["model.safetensors"] == weights);
}

#[test]
fn what_cannot_be_pushed_is_refused_before_anything_is_sent() {
    let (hub, place) = (Hub::start(), tempfile::tempdir().unwrap());
    let dir = place.path();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny");
    let model = model.to_str().unwrap();
    std::fs::write(dir.join("rows.jsonl"), "").unwrap();
    for (arguments, part) in [
        (["push", model, "answers"], "this is not a repository of a hub"),
        (["push", model, "a/b/c"], "this is not a repository of a hub"),
        (["push", "rows.jsonl", ID], "this is a file, not a directory"),
        (["push", "none", ID], "there is no such directory"),
    ] {
        for more in [&["--dry-run"][..], &[]] {
            let out = ft(dir, &hub, Some(TOKEN), &[&arguments[..], more].concat());
            assert_eq!(out.status.code(), Some(2), "{arguments:?}: {}", said(&out));
            assert!(said(&out).contains(part), "{arguments:?}: {}", said(&out));
            assert!(out.stdout.is_empty());
        }
    }
    assert_eq!(hub.state().received, 0);
    // An adapter for mlx-lm is none of PEFT.
    std::fs::create_dir(dir.join("mlx")).unwrap();
    std::fs::write(dir.join("mlx/adapter_config.json"), "{\"fine_tune_type\": \"lora\"}").unwrap();
    std::fs::write(dir.join("mlx/adapters.safetensors"), "x").unwrap();
    let out = ft(dir, &hub, None, &["push", "mlx", ID, "--dry-run"]);
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(
        text.contains("library_name: mlx\n") && text.contains("--adapter-path adapter"),
        "{text}"
    );
    let out = ft(dir, &hub, None, &["generate", "--model", "mlx", "--prompt", "x"]);
    assert!(said(&out).contains("this is an adapter for mlx-lm"), "{}", said(&out));
}

/// By hand: is the server like the hub? `HF_ENDPOINT=... HF_TOKEN=hf_secret_of_the_test hf upload tester/answers DIR .`
#[test]
#[ignore = "for another client, by hand"]
fn the_stand_in_waits_for_another_client() {
    let hub = Hub::start();
    println!("{}", hub.address);
    while hub.state().commits == 0 {
        std::thread::sleep(Duration::from_millis(100));
    }
    for (name, bytes) in &hub.state().files {
        println!("{name} {}", sha256(bytes));
    }
}
