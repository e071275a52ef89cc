//! Files that ft keeps for a later process, and what it receives from other programs: a hub, a browser, a reward program.

use super::{dir, good_tokenizer, put, said, with_file};
use ft::base::lock as locks;
use ft::data::{Dataset, TokenCache};
use ft::hub::DatasetPart;
use ft::setup::rewards;
use ft::train::{teacher_cache as outputs, verify};
use serde_json::{Value, json};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

/// `run.json` of a run with a result.
pub fn run(bytes: &[u8]) {
    let path = put("owned/run.json", bytes);
    put("owned/final/config.json", b"{}");
    said(verify::check_result(&path.with_file_name("final")));
}

/// `run.lock`.
pub fn lock(bytes: &[u8]) {
    let path = put("locked/run.lock", bytes);
    let dir = path.parent().unwrap();
    let is_lock = locks::is_lock(&path);
    let process = locks::last_process(dir);
    assert!(is_lock || process.is_none());
    if process.is_none() {
        assert_eq!(locks::state(dir), locks::LockState::Free);
    }
}

/// `rows.json` of the token cache: the bytes as they are, which change no row, then with the right hash.
pub fn token_cache(bytes: &[u8]) {
    const ROWS: &[u8] = b"{\"text\": \"a b c\"}\n{\"text\": \"d\"}\n";
    // The cache knows a file by its time of change.
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    static WHOLE: OnceLock<(PathBuf, String)> = OnceLock::new();
    with_file(FILE.get_or_init(|| put("cached.jsonl", ROWS)), |spec, _| {
        let place = dir().join("tokens");
        let cache = TokenCache {
            dir: &place,
            least_bytes: 0,
            most_bytes: Some(1 << 30),
            required: true,
            note: &|_| {},
        };
        let try_load = || Dataset::load_cached(spec, good_tokenizer(), None, &cache);
        let load = || said(try_load());
        let (file, fingerprint) = WHOLE.get_or_init(|| {
            let rows = try_load().unwrap_or_else(|e| panic!("{e}"));
            let sets = fs::read_dir(&place).unwrap().map(|set| set.unwrap().path());
            let mut files = sets.map(|set| set.join("rows.json"));
            (files.find(|file| file.is_file()).unwrap(), rows.fingerprint.clone())
        });
        fs::write(file, bytes).unwrap();
        assert_eq!(load().unwrap().fingerprint, *fingerprint);
        let Ok(content) = std::str::from_utf8(bytes) else {
            return;
        };
        let hash = blake3::hash(bytes).to_hex();
        let sealed = format!("{{\"seal\":\"{}\",\"content\":{content}}}\n", &hash[..32]);
        fs::write(file, sealed).unwrap();
        if let Some(rows) = load() {
            rows.examples.iter().take(8).for_each(|row| drop(said(row)));
        }
    });
}

/// The hash of the settings in `cache.json`. They are read as ft reads them.
fn key(settings: &Value) -> String {
    let word = |key: &str| settings[key].as_str().unwrap_or_default();
    let number = |key: &str| settings[key].as_u64().unwrap_or(0);
    let own = json!({
        "format": "ft teacher outputs 1", "key": "", "common": number("common"), "k": number("k"),
        "temperature": settings["temperature"].as_f64().unwrap_or(0.0) as f32, "data": word("data"), "teacher": word("teacher"),
    });
    blake3::hash(own.to_string().as_bytes()).to_hex()[..32].to_string()
}

/// `cache.json` of stored outputs of a teacher: as it is, then with the right hash of its settings.
pub fn teacher_cache(bytes: &[u8]) {
    let path = put("outputs/cache.json", bytes);
    let dir = path.parent().unwrap();
    said(outputs::check(dir));
    if let Ok(mut settings) = serde_json::from_slice::<Value>(bytes)
        && settings.is_object()
    {
        settings["key"] = key(&settings).into();
        fs::write(&path, settings.to_string()).unwrap();
        said(outputs::check(dir));
    }
}

/// A page of a hub's list of files: all names are inside the repository.
pub fn hub(bytes: &[u8]) {
    let Some(names) = ft::hub::listed(bytes) else { return };
    for name in &names {
        let is_inside = |name: &String| {
            let mut parts = Path::new(name).components();
            parts.all(|part| matches!(part, Component::Normal(_)))
        };
        assert!(!name.is_empty() && is_inside(name), "{name:?}");
    }
    said(ft::hub::select(&names, &DatasetPart::TRAIN));
}

/// The head of a request to the page of `ft dash`.
pub fn request(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Some(request) = ft::look::parse_request(text)
    {
        assert!(request.path.starts_with('/') && !request.path.contains('?'));
        assert!(!request.method.contains(' ') && !request.host.contains("\r\n"));
    }
}

/// A line of a reward program.
pub fn score(bytes: &[u8]) {
    let line = String::from_utf8_lossy(bytes);
    if let Some(score) = rewards::score_of_line(&line) {
        assert!(!score.is_infinite());
    }
}
