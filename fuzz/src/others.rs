//! Files that ft keeps for a later process, and what it receives from other programs: a hub, a browser, a reward program.

use super::{put, said};
use ft::base::lock as locks;
use ft::hub::{DatasetPart, SeveralKinds};
use ft::setup::rewards;
use ft::train::verify;
use serde_json::Value;
use std::path::{Component, Path};

/// The files of a result.
const RESULT: [(&str, &[u8]); 3] = [
    ("config.json", b"{}"),
    ("model.safetensors", b"weights"),
    ("README.md", b"card"),
];

/// `run.json` of a run with a result: as it is, then with the right sizes and hashes of the files that there are.
pub fn run(bytes: &[u8]) {
    let path = put("owned/run.json", bytes);
    for (name, content) in RESULT {
        put(&format!("owned/final/{name}"), content);
    }
    let result = path.with_file_name("final");
    said(verify::check_result(&result));
    let Ok(mut run) = serde_json::from_slice::<Value>(bytes) else {
        return;
    };
    let Some(files) = run.get_mut("final").and_then(Value::as_object_mut) else {
        return;
    };
    let mut is_known = true;
    for (name, stored) in files {
        let content = RESULT.iter().find(|(known, _)| name == known);
        let stored = stored.as_array_mut().filter(|stored| stored.len() > 2);
        let (Some((_, content)), Some(stored)) = (content, stored) else {
            is_known = false;
            continue;
        };
        stored[0] = content.len().into();
        // An empty hash is not computed yet.
        if stored[2] != "" {
            stored[2] = blake3::hash(content).to_hex().as_str().into();
        }
    }
    put("owned/run.json", run.to_string().as_bytes());
    let checked = verify::check_result(&result);
    assert!(checked.is_ok() || !is_known, "{run}");
    said(checked);
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
    // What ft writes in its place is read again.
    let lock = said(locks::RunLock::acquire(dir));
    assert_eq!(lock.is_some(), is_lock);
    if lock.is_some() {
        assert_eq!(locks::last_process(dir), Some(std::process::id()));
        assert_eq!(locks::state(dir), locks::LockState::Held);
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
    for kinds in [SeveralKinds::MostFiles, SeveralKinds::Refused] {
        let Some(chosen) = said(ft::hub::select(&names, &DatasetPart::TRAIN, kinds)) else {
            continue;
        };
        assert!(!chosen.is_empty() && chosen.iter().all(|name| names.contains(name)));
        assert!(chosen.windows(2).all(|pair| pair[0] < pair[1]), "{chosen:?}");
    }
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
        // Only a row without a score has none.
        let said: Value = serde_json::from_str(line.trim()).unwrap();
        let said = said.as_object().map_or(&said, |fields| &fields["score"]);
        assert_eq!(score.is_nan(), said.is_null());
    }
}
