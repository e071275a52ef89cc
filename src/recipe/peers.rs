//! Maps keys and values of other training tools to those of ft. Uses the table of keys; the rows are in `keys` and
//! `values`.

mod keys;
mod values;

use super::table;
use super::value::{ValueKind, quoted};

/// Names of ft's own keys with another meaning in other tools: here a row of `keys` has priority.
const SHADOWED: [&str; 1] = ["alpha"];

fn plain(name: &str) -> String {
    name.trim().to_lowercase().replace(['-', ' '], "_")
}

/// Formats the answer of a row as a hint.
pub fn shown(answer: &str) -> String {
    match table::find(answer) {
        Some(_) => format!("did you mean `{answer}`?"),
        None => answer.to_string(),
    }
}

fn find(wanted: impl Fn(&str) -> bool) -> Option<&'static str> {
    let mut rows = keys::KEYS.iter();
    rows.find(|(names, _)| names.split(' ').any(&wanted)).map(|(_, a)| *a)
}

/// The answer for a key in exactly this table; `""` means outside of any table.
pub fn qualified(table: &str, name: &str) -> Option<&'static str> {
    let wanted = format!("{}.{}", plain(table), plain(name));
    find(|n| n == wanted)
}

/// The answer for a name in any table.
pub fn anywhere(name: &str) -> Option<&'static str> {
    let name = plain(name);
    find(|n| n == name)
}

/// The answer for a family of names, such as `wandb_*`.
pub fn family(name: &str) -> Option<&'static str> {
    let name = plain(name);
    find(|n| n.strip_suffix('*').is_some_and(|start| name.starts_with(start)))
}

/// True if the name is one of ft's own keys, but users usually mean the key of another tool.
pub fn is_shadowed(name: &str) -> bool {
    SHADOWED.contains(&plain(name).as_str())
}

/// The hint for a table of another tool.
pub fn of_table(name: &str) -> Option<String> {
    let name = plain(name);
    let row = keys::TABLES
        .iter()
        .find(|(names, _)| names.split(' ').any(|n| n == name));
    match row {
        Some((_, answer)) => Some(answer.to_string()),
        None => anywhere(&name).or_else(|| family(&name)).map(shown),
    }
}

/// The path of ft's key for `name`, which was written outside of any table: as a flag, or in a line of YAML.
pub fn key_for(name: &str) -> Option<String> {
    let name = plain(name);
    if table::find(&name).is_some() {
        return Some(name);
    }
    let mut own = table::keys().filter(|k| k.name == name);
    let own = match (own.next(), own.next()) {
        (Some(key), None) if !is_shadowed(&name) => Some(key.path.0.to_string()),
        _ => None,
    };
    let answer = || qualified("", &name).or_else(|| anywhere(&name)).map(str::to_string);
    qualified("", &name)
        .map(str::to_string)
        .or(own)
        .or_else(answer)
        .filter(|a| table::find(a).is_some())
}

/// Converts a value of another tool's key to TOML for ft's `key`; `None`: only the user can convert it.
pub fn value_for(name: &str, key: &str, value: &str) -> Option<String> {
    let is_true = ["true", "1", "yes"].contains(&value.to_lowercase().as_str());
    let flag = match plain(name).as_str() {
        "bf16" | "bfloat16" | "pure_bf16" => Some("bf16"),
        "fp16" | "float16" | "half" => Some("f16"),
        "float32" => Some("f32"),
        "use_cpu" | "no_cuda" => Some("cpu"),
        "train_from_scratch" | "from_scratch" | "reinit_weights" => Some("random"),
        "lora_target_linear" | "target_linear" => Some("all-linear"),
        _ => None,
    };
    if let Some(meant) = flag {
        return is_true.then(|| format!("\"{meant}\""));
    }
    if plain(name) == "disable_shuffling" {
        return Some((!is_true).to_string());
    }
    let value = match self::value(key, value) {
        Some(sentence) if sentence.contains(' ') => return None,
        Some(name) => name,
        None => value,
    };
    if let Some(hint) = super::suggest::list_hint(key, value) {
        return hint.split('`').nth(1).map(str::to_string);
    }
    let kind = table::find(key)?.kind;
    let is_number = value.parse::<f64>().is_ok();
    let is_flag = ["true", "false"].contains(&value);
    match kind {
        ValueKind::Text | ValueKind::Name(_) | ValueKind::Texts | ValueKind::Size => {
            let items = value.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
            Some(match (value.parse::<toml_edit::Value>(), items) {
                (Ok(toml_edit::Value::Array(_)), _) => value.to_string(),
                (_, Some(items)) if matches!(kind, ValueKind::Texts) => {
                    let items = items
                        .split(',')
                        .map(|item| quoted(item.trim().trim_matches(['"', '\''])));
                    format!("[{}]", items.collect::<Vec<_>>().join(", "))
                }
                _ => quoted(value),
            })
        }
        ValueKind::Flag => is_flag.then(|| value.to_string()),
        ValueKind::Map(_) | ValueKind::Fields(_) | ValueKind::Tables(_) | ValueKind::Free => None,
        _ => is_number.then(|| value.to_string()),
    }
}

/// The explanation for another tool's key that was written outside of any table.
pub fn sentence_for(name: &str) -> Option<&'static str> {
    let answer = qualified("", name).or_else(|| anywhere(name)).or_else(|| family(name));
    answer.filter(|a| table::find(a).is_none())
}

/// The answer for a value: one of the key's names, or an explanation.
pub fn value(path: &str, typed: &str) -> Option<&'static str> {
    let typed = typed.trim().to_lowercase();
    let mut rows = values::VALUES.iter();
    let row = rows.find(|(key, names, _)| *key == path && names.split('|').any(|n| n == typed));
    row.map(|(_, _, answer)| *answer)
}

/// The table of names in `docs/coming-from.md`: the keys of ft with the names that mean the same key in other tools.
#[cfg(test)]
fn page() -> String {
    let mut text = "| key | names in other tools |\n|---|---|\n".to_string();
    for key in table::keys() {
        let names = keys::KEYS.iter().filter(|(_, answer)| *answer == key.path.0);
        let names = names
            .flat_map(|(names, _)| names.split(' '))
            .filter(|name| !name.contains(['.', '*']));
        let names: Vec<String> = names.map(|name| format!("`{name}`")).collect();
        if !names.is_empty() {
            text += &format!("| `{}` | {} |\n", key.path, names.join(", "));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::files;
    use std::collections::BTreeSet;
    use std::path::Path;

    const BEGIN: &str = "<!-- the names: FT_BLESS=1 cargo test --lib peers -->\n\n";
    const END: &str = "\n<!-- end of the names -->\n";

    #[test]
    fn the_page_has_all_names() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/coming-from.md");
        let text = files::read_text(&path).unwrap();
        let (before, rest) = text.split_once(BEGIN).unwrap();
        let (kept, after) = rest.split_once(END).unwrap();
        let now = page();
        assert!(now.lines().count() > 60);
        if std::env::var_os("FT_BLESS").is_some() {
            files::write_atomic(&path, format!("{before}{BEGIN}{now}{END}{after}").as_bytes()).unwrap();
        } else {
            assert!(kept == now, "docs/coming-from.md is stale: run `FT_BLESS=1 cargo test`");
        }
    }

    /// Paths in backticks that start with one of ft's tables.
    fn paths(text: &str) -> Vec<String> {
        let quoted = text.split('`').skip(1).step_by(2);
        let paths = quoted.map(|q| q.split([' ', '=', '[']).next().unwrap_or_default().to_string());
        let is_path = |p: &String| {
            p.split_once('.').is_some_and(|(root, rest)| {
                !rest.is_empty()
                    && !["toml", "json", "jsonl"].contains(&rest)
                    && table::TABLES.iter().any(|(t, _)| t.split('.').next() == Some(root))
            })
        };
        paths.filter(is_path).collect()
    }

    #[test]
    fn every_answer_names_keys_that_exist() {
        let answers = keys::KEYS.iter().map(|(_, a)| *a);
        let answers = answers.chain(keys::TABLES.iter().map(|(_, a)| *a));
        for answer in answers.chain(values::VALUES.iter().map(|(_, _, a)| *a)) {
            let looks_like_a_path = !answer.contains(' ') && answer.contains('.');
            assert!(!looks_like_a_path || table::find(answer).is_some(), "{answer}");
            for path in paths(answer) {
                assert!(table::find(&path).is_some(), "`{path}` in: {answer}");
            }
        }
    }

    #[test]
    fn every_value_is_accepted_or_explained() {
        for (path, names, answer) in values::VALUES {
            let key = table::find(path).unwrap();
            if let ValueKind::Name(accepted) = key.kind {
                for name in names.split('|') {
                    assert!(!accepted.contains(&name), "`{name}` is a value of `{path}`");
                }
                assert!(accepted.contains(answer) || answer.contains(' '), "{path}: {answer}");
            }
        }
    }

    #[test]
    fn no_name_has_two_answers() {
        let mut seen = BTreeSet::new();
        for name in keys::KEYS.iter().flat_map(|(names, _)| names.split(' ')) {
            assert!(seen.insert(name), "{name}");
            let own = table::find(name).is_some();
            assert!(!own && !name.is_empty(), "`{name}` is a key of ft");
        }
    }

    /// Names that other tools use only inside tables of their own; the tables themselves have answers.
    const NESTED: &str = "adaptive_max_tokens capabilities compute_capability enabled end env_capabilities \
                          feature_layers gt_length_multiplier host include_end include_start length port save \
                          save_sliding_window skip start stride torch_version";

    /// Tests every option of other tools: `tests/peers/make_names.py` lists them with the versions.
    #[test]
    fn the_options_of_other_tools_have_answers() {
        let known: BTreeSet<&str> = table::keys().map(|k| k.name).collect();
        let mut missing = Vec::new();
        for line in include_str!("../../tests/peers/names.txt").lines() {
            let (tool, names) = line.split_once(": ").unwrap();
            for name in names.split(' ') {
                let answered = qualified("", name).or_else(|| anywhere(name)).or_else(|| family(name));
                let own = known.contains(name) || table::TABLES.iter().any(|(t, _)| *t == name);
                let nested = NESTED.split_whitespace().any(|n| n == name);
                if answered.is_none() && !own && !nested && of_table(name).is_none() {
                    missing.push(format!("{tool}: {name}"));
                }
            }
        }
        assert!(
            missing.is_empty(),
            "{} without an answer:\n{}",
            missing.len(),
            missing.join("\n")
        );
    }
}
