//! Numbers in `config.json` that Python writes and JSON does not have: `NaN`, `Infinity` and `-Infinity`. Reading makes strings of
//! them, so that an error can name the key.

use crate::formats::config::Config;
use crate::formats::read_json_to_rewrite;
use serde_json::{Map, Value};
use std::path::Path;

/// A note about settings that are not in a written file, because their values cannot be. `file`: its name; `keys`: those that
/// `writable_config` or `set_stop_ids` left out. `None`: there are none.
pub fn left_out_note(file: &str, keys: &[String]) -> Option<String> {
    let keys = keys.join(", ");
    (!keys.is_empty())
        .then(|| format!("{file} is written without {keys}: the value there is a number that JSON does not have"))
}

/// As `left_out_note`, for the `config.json` that `model` and `OutputModel::write` make of these contents.
pub fn config_note(config: &Map<String, Value>, base_dir: &Path) -> Option<String> {
    left_out_note("config.json", &writable_config(config, base_dir).1)
}

const NUMBERS: [&str; 3] = ["NaN", "Infinity", "-Infinity"];

/// The contents of `config.json` for an output directory: without the keys whose values have numbers in the base model's file that
/// JSON does not have. A string in their place would be wrong, and the number itself would make the file unreadable for most tools;
/// without the key, tools use their default. Also returns the names of these keys.
pub fn writable_config(config: &Map<String, Value>, base_dir: &Path) -> (Map<String, Value>, Vec<String>) {
    let (mut config, mut left_out) = (config.clone(), Vec::new());
    // Random weights have no base.
    let path = base_dir.join("config.json");
    let (Ok(base), Ok(valid)) = (Config::read(base_dir), read_json_to_rewrite(&path)) else {
        return (config, left_out);
    };
    let has_numbers = |key: &str| base.raw.contains_key(key) && !valid.contains_key(key);
    config.retain(|key, value| !has_numbers(key) || stays(value, key, &mut left_out));
    (config, left_out)
}

/// False if the value is such a number or a list with one. Removes the keys of objects inside it for which that is so.
fn stays(value: &mut Value, name: &str, left_out: &mut Vec<String>) -> bool {
    match value {
        Value::String(text) if NUMBERS.contains(&text.as_str()) => {
            left_out.push(name.to_string());
            false
        }
        Value::Array(list) => list.iter_mut().all(|value| stays(value, name, left_out)),
        Value::Object(map) => {
            map.retain(|key, value| stays(value, &format!("{name}.{key}"), left_out));
            true
        }
        _ => true,
    }
}
