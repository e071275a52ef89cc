//! Parses files to validated types: safetensors and their index, config, tokenizer, chat template, adapter. All files
//! are untrusted. Puts no tensor on a device, does not execute file contents, and is independent of model families.

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

pub mod adapter;
pub mod config;
pub mod dtype;
mod fits;
pub mod gguf;
pub mod header;
pub mod index;
mod jinja;
pub mod joined;
pub mod template;
pub mod tokenizer;
pub mod weights;
pub mod writer;

pub use adapter::AdapterConfig;
pub use config::Config;
pub use dtype::StoredDtype;
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;
pub use weights::{TensorInfo, Weights};
pub use writer::{TensorPlan, Values};

use ft_base::{Error, Result, files};
use serde_json::{Map, Value};
use std::path::Path;

/// Size limit of JSON files: those of a model directory are small.
const JSON_LIMIT: u64 = 256 << 20;

/// Reads a file of a model or an adapter with one JSON object. A number that JSON does not have (`NaN`, `Infinity`, `-Infinity`) becomes
/// a string.
///
/// # Errors
/// The file cannot be read, is a link out of its directory, or is no JSON object (`Format`); line and column are named.
pub fn read_json_object(path: &Path) -> Result<Map<String, Value>> {
    index::stays_inside(path)?;
    let bytes = files::size(path)?;
    if bytes > JSON_LIMIT {
        return Err(Error::format("JSON file is too large")
            .at_path(path)
            .found(ft_base::units::bytes(bytes))
            .expected(format!("at most {}", ft_base::units::bytes(JSON_LIMIT))));
    }
    let text = files::read_text(path)?;
    if text.starts_with("version https://git-lfs") {
        return Err(header::lfs_pointer(path, bytes));
    }
    let quoted = |word: &str| format!("\"{word}\"");
    let parsed = serde_json::from_str(&text).or_else(|e| match replaced_numbers(&text, quoted) {
        Some(text) => serde_json::from_str(&text).map_err(|_| e),
        None => Err(e),
    });
    match parsed {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(Error::format("JSON file does not hold an object")
            .at_path(path)
            .found(json_kind(&other))
            .expected("an object `{...}`")),
        Err(e) => Err(Error::format("file is not valid JSON")
            .at(format!("{}:{}:{}", path.display(), e.line(), e.column()))
            .cause(e)),
    }
}

/// Reads a file with one JSON object that is written again with other values. A key with a number that JSON does not have
/// (`NaN`, `Infinity`, `-Infinity`; Python writes them) is left out: other tools use their default for it.
///
/// # Errors
/// The file cannot be read, or is no JSON object (`Format`).
pub fn read_json_to_rewrite(path: &Path) -> Result<Map<String, Value>> {
    let mut map = read_json_object(path)?;
    // The keys whose values differ if such a number is `null` instead of a string.
    if let Some(text) = replaced_numbers(&files::read_text(path)?, |_| "null".into())
        && let Ok(Value::Object(nulls)) = serde_json::from_str(&text)
    {
        map.retain(|key, value| nulls.get(key) == Some(value));
    }
    Ok(map)
}

/// Replaces the numbers that Python writes and JSON does not have: `Infinity`, `-Infinity` and `NaN`. Most callers need a string
/// for them, so that the error of a file with them names the key that is read. `None`: there are none.
fn replaced_numbers(text: &str, instead: impl Fn(&str) -> String) -> Option<String> {
    const WORDS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];
    let mut out = String::with_capacity(text.len() + 8);
    let (mut rest, mut inside, mut found) = (text, false, false);
    while let Some(c) = rest.chars().next() {
        let word = WORDS.iter().find(|word| !inside && rest.starts_with(**word));
        let length = match word {
            Some(word) => {
                found = true;
                out.push_str(&instead(word));
                word.len()
            }
            None => {
                inside ^= c == '"';
                // An escaped character, such as a quote.
                let escaped = if inside && c == '\\' { rest.chars().nth(1) } else { None };
                let length = c.len_utf8() + escaped.map_or(0, char::len_utf8);
                out.push_str(&rest[..length]);
                length
            }
        };
        rest = &rest[length..];
    }
    found.then_some(out)
}

/// Describes a JSON value in words, with its text if it is short.
pub(crate) fn json_kind(value: &Value) -> String {
    let kind = match value {
        Value::Null => return "null".into(),
        Value::Bool(b) => return format!("{b}"),
        Value::Number(n) => return format!("{n}"),
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    };
    let text = value.to_string();
    if text.len() <= 60 {
        format!("{kind} {text}")
    } else {
        kind.to_string()
    }
}

/// Up to three of `names` that are most similar to `name`, for error messages.
pub(crate) fn nearest<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut scored: Vec<(f64, &str)> = names
        .map(|n| (strsim::normalized_levenshtein(name, n), n))
        .filter(|(score, _)| *score > 0.5)
        .collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    scored.into_iter().take(3).map(|(_, n)| n.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_errors_name_the_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(&path, "{\n  \"a\": ,\n}").unwrap();
        assert!(
            read_json_object(&path)
                .unwrap_err()
                .to_string()
                .contains("config.json:2:8")
        );
        std::fs::write(&path, "[1, 2]").unwrap();
        let e = read_json_object(&path).unwrap_err().to_string();
        assert!(e.contains("found an array [1,2]"), "{e}");
        std::fs::write(&path, b"\xff\xfe{}").unwrap();
        assert!(read_json_object(&path).unwrap_err().to_string().contains("not UTF-8"));
        assert!(
            read_json_object(&dir.path().join("none.json"))
                .unwrap_err()
                .to_string()
                .contains("none.json")
        );
    }

    /// Row W6.
    #[test]
    fn a_link_is_read_inside_the_directory_and_in_a_hub_cache_only() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let [blobs, snapshot, model] = ["m/blobs", "m/snapshots/abc/sub", "model"].map(|name| dir.path().join(name));
        for path in [&blobs, &snapshot, &model] {
            std::fs::create_dir_all(path).unwrap();
        }
        for path in [
            &blobs.join("1"),
            &model.join("real.json"),
            &dir.path().join("other.json"),
        ] {
            std::fs::write(path, "{\"a\": 1}").unwrap();
        }
        let read = |at: &Path, target: &str| {
            let link = at.join("config.json");
            let _ = std::fs::remove_file(&link);
            symlink(target, &link).unwrap();
            read_json_object(&link).map_err(|e| e.to_string())
        };
        assert_eq!(read(&snapshot, "../../../blobs/1").unwrap().len(), 1);
        assert_eq!(read(snapshot.parent().unwrap(), "../../blobs/1").unwrap().len(), 1);
        assert_eq!(read(&model, "real.json").unwrap().len(), 1);
        // A directory that is a link itself is what the user named.
        symlink(&model, dir.path().join("named")).unwrap();
        assert!(read_json_object(&dir.path().join("named/config.json")).is_ok());
        for (at, target) in [
            (&model, "../other.json"),
            (&model, "../m/blobs/1"),
            (&snapshot, "../../../../other.json"),
        ] {
            let e = read(at, target).unwrap_err();
            assert!(e.contains("a link to a path outside its directory"), "{target}: {e}");
        }
        assert!(read(&model, "none.json").unwrap_err().contains("cannot open the file"));
    }

    /// Row W6. `blobs` on another disk is a link, and brings no other files of the user into a model.
    #[test]
    fn a_hub_cache_may_have_its_blobs_on_another_disk() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let (snapshot, disk) = (dir.path().join("m/snapshots/abc/sub"), dir.path().join("disk/blobs"));
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::create_dir_all(&disk).unwrap();
        symlink(&disk, dir.path().join("m/blobs")).unwrap();
        let hash = "0123456789abcdef0123456789abcdef01234567";
        for name in [hash, "id.json"] {
            std::fs::write(disk.join(name), "{\"a\": 1}").unwrap();
        }
        let read = |at: &Path, target: &str| {
            let link = at.join("config.json");
            let _ = std::fs::remove_file(&link);
            symlink(target, &link).unwrap();
            read_json_object(&link).map_err(|e| e.to_string())
        };
        let parent = snapshot.parent().unwrap();
        assert_eq!(read(parent, &format!("../../blobs/{hash}")).unwrap().len(), 1);
        assert_eq!(read(&snapshot, &format!("../../../blobs/{hash}")).unwrap().len(), 1);
        let absolute = disk.join(hash).display().to_string();
        for target in [
            "../../../blobs/id.json",
            &format!("../../../../disk/blobs/{hash}"),
            &absolute,
            // A link to the link.
            "../config.json",
        ] {
            let e = read(&snapshot, target).unwrap_err();
            assert!(e.contains("a link to a path outside its directory"), "{target}: {e}");
            assert!(e.contains("only links such as `../../blobs/HASH`"), "{target}: {e}");
        }
        // A file of another place with a hash as its name.
        std::fs::rename(disk.join(hash), dir.path().join("other")).unwrap();
        symlink("../../other", disk.join(hash)).unwrap();
        assert!(read(parent, &format!("../../blobs/{hash}")).is_err());
    }

    #[test]
    fn numbers_that_only_python_has_are_strings() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(
            &path,
            r#"{"a\"Infinity": "x NaN \\", "b": [0.5, Infinity, -Infinity, NaN]}"#,
        )
        .unwrap();
        let got = Value::Object(read_json_object(&path).unwrap());
        let want = serde_json::json!({"a\"Infinity": "x NaN \\", "b": [0.5, "Infinity", "-Infinity", "NaN"]});
        assert_eq!(got, want);
        std::fs::write(&path, "{\"a\": Infinity,, }").unwrap();
        let e = read_json_object(&path).unwrap_err().to_string();
        assert!(e.contains("config.json:1:7"), "{e}");
    }

    #[test]
    fn keys_with_numbers_that_only_python_has_are_not_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("generation_config.json");
        let text = r#"{"b": "NaN", "a": NaN, "c": [[[1], -Infinity]], "d": null, "e": {"f": ["Infinity", 0.5]}, "g": {"h": NaN}}"#;
        std::fs::write(&path, text).unwrap();
        let got = Value::Object(read_json_to_rewrite(&path).unwrap());
        let want = serde_json::json!({"b": "NaN", "d": null, "e": {"f": ["Infinity", 0.5]}});
        assert_eq!(got, want);
        std::fs::write(&path, r#"{"b": "NaN", "a": 1}"#).unwrap();
        assert_eq!(read_json_to_rewrite(&path).unwrap(), read_json_object(&path).unwrap());
        std::fs::write(&path, "{\"a\": NaN,, }").unwrap();
        assert!(read_json_to_rewrite(&path).is_err());
    }
}
