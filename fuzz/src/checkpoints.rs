//! Checkpoints: the manifest with its hash, and the state that it lists.

use super::{put, said};
use ft::checkpoint;
use ft::train::{resumed, state};
use serde_json::{Value, json};

/// The hash of a manifest: its fields, each with its length. `None`: a field is missing, or has another type.
fn seal(manifest: &Value) -> Option<String> {
    let mut hasher = blake3::Hasher::new();
    let mut field = |of: &Value, key: &str| {
        let text = match of.get(key)? {
            Value::String(text) => text.clone(),
            other => other.as_u64()?.to_string(),
        };
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
        Some(())
    };
    for key in ["format", "ft", "step"] {
        field(manifest, key)?;
    }
    for file in manifest.get("files")?.as_array()? {
        for key in ["name", "size", "blake3"] {
            field(file, key)?;
        }
    }
    Some(hasher.finalize().to_hex().to_string())
}

/// The bytes as they are, then with the right hash: what is behind it is read too.
pub fn manifest(bytes: &[u8]) {
    let path = put("checkpoint-1/manifest.json", bytes);
    let dir = path.parent().unwrap();
    said(checkpoint::verify(dir));
    let Ok(mut sealed) = serde_json::from_slice::<Value>(bytes) else {
        return;
    };
    let Some(hash) = seal(&sealed) else { return };
    sealed["seal"] = hash.into();
    put("checkpoint-1/state.json", b"{}");
    put("checkpoint-1/manifest.json", sealed.to_string().as_bytes());
    if let Some(loaded) = said(checkpoint::load(dir)) {
        assert_eq!(loaded.step, 1);
        said(state::sizes(&loaded));
    }
}

/// A checkpoint of which every file is the same bytes, then one with a manifest that fits.
pub fn state(bytes: &[u8]) {
    let path = put("checkpoint-2/state.json", bytes);
    let dir = path.parent().unwrap();
    put("checkpoint-2/manifest.json", bytes);
    said(checkpoint::load(dir));
    let hash = blake3::hash(bytes).to_hex().to_string();
    let files = json!([{"name": "state.json", "size": bytes.len(), "blake3": hash}]);
    let mut manifest = json!({"format": 1, "ft": "0", "step": 2, "files": files});
    manifest["seal"] = seal(&manifest).unwrap().into();
    put("checkpoint-2/manifest.json", manifest.to_string().as_bytes());
    let loaded = said(checkpoint::load(dir));
    // A mark at the start of a text is no part of it.
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let wanted = serde_json::from_slice::<Value>(text).ok();
    assert_eq!(loaded.as_ref().map(|loaded| &loaded.state), wanted.as_ref());
    if let Some(loaded) = loaded {
        let own = state::fingerprint(&loaded);
        said(resumed::check_same(&own, &own));
        resumed::other_bits(&loaded, &own);
        resumed::allowed_changes(&loaded, &own);
        resumed::other_rates(&loaded, 7, &Default::default());
        said(state::stage_state(&loaded));
    }
}
