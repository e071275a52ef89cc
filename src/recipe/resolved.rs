//! Text generated from the table: the resolved recipe of a run, and the reference of all keys.

use super::check::{KeyEntry, KeyValues, ValueOrigin, expectation};
use super::lower::unused;
use super::table::{RecipeKey, RecipeSections, TABLES, keys};
use super::value::{KeyValue, ValueKind, in_comment};
use toml_edit::{Decor, DocumentMut, Item};

/// A text as TOML; one with line breaks has several lines. Checkpoints contain such texts, and a resume compares them.
fn quoted(text: &str) -> String {
    toml_edit::Value::from(text).to_string().trim().to_string()
}

/// A value as TOML.
pub fn toml(value: &KeyValue) -> String {
    match value {
        KeyValue::Text(t) => quoted(t),
        KeyValue::Integer(i) => i.to_string(),
        KeyValue::Number(x) => number(*x),
        KeyValue::Flag(b) => b.to_string(),
        KeyValue::List(l) => format!("[{}]", l.iter().map(|t| quoted(t)).collect::<Vec<_>>().join(", ")),
        KeyValue::Map(m) if m.is_empty() => "{}".into(),
        KeyValue::Map(m) => {
            let lines = m.iter().map(|(k, v)| format!("{} = {}", quoted(k), quoted(v)));
            format!("{{ {} }}", lines.collect::<Vec<_>>().join(", "))
        }
        KeyValue::Tables(tables) => {
            let one = |table: &Vec<(&str, KeyValue)>| {
                let keys: Vec<String> = table.iter().map(|(name, v)| format!("{name} = {}", toml(v))).collect();
                format!("{{ {} }}", keys.join(", "))
            };
            format!("[{}]", tables.iter().map(one).collect::<Vec<_>>().join(", "))
        }
        KeyValue::Free(m) => free(&serde_json::Value::Object(m.clone())),
        KeyValue::Integers(l) => format!("{l:?}"),
        KeyValue::Numbers(l) => format!("[{}]", l.iter().map(|x| number(*x)).collect::<Vec<_>>().join(", ")),
        KeyValue::Pairs(l) => {
            let pairs: Vec<String> = l.iter().map(|(a, b)| format!("[{a}, {b}]")).collect();
            format!("[{}]", pairs.join(", "))
        }
        KeyValue::Pair([a, b]) => format!("[{}, {}]", number(*a), number(*b)),
    }
}

/// The tables of `data.sources`, as the values of a recipe have them, without the keys that say where the files are.
pub fn without_paths(sources: &str) -> String {
    let Ok(mut value) = sources.parse::<toml_edit::Value>() else {
        return sources.to_string();
    };
    for table in value.as_array_mut().into_iter().flat_map(|tables| tables.iter_mut()) {
        for key in ["path", "config", "split", "revision"] {
            table.as_inline_table_mut().and_then(|table| table.remove(key));
        }
    }
    value.to_string()
}

/// A value of a free table as TOML.
fn free(value: &serde_json::Value) -> String {
    use serde_json::Value as Json;
    match value {
        Json::Object(m) if m.is_empty() => "{}".into(),
        Json::Object(m) => {
            let lines = m.iter().map(|(k, v)| format!("{} = {}", quoted(k), free(v)));
            format!("{{ {} }}", lines.collect::<Vec<_>>().join(", "))
        }
        Json::Array(l) => format!("[{}]", l.iter().map(free).collect::<Vec<_>>().join(", ")),
        Json::String(t) => quoted(t),
        Json::Number(n) => match n.as_i64() {
            Some(i) => i.to_string(),
            None => number(n.as_f64().unwrap_or(0.0)),
        },
        Json::Bool(_) | Json::Null => value.to_string(),
    }
}

/// Formats the number as a TOML float without loss.
pub fn number(x: f64) -> String {
    match x.abs() {
        0.0 => "0.0".into(),
        1e-3..1e15 => format!("{x:?}"),
        _ => format!("{x:e}"),
    }
}

/// Formats the entry for the resolved recipe: `all-linear` and file names as written.
fn line(entry: &KeyEntry) -> String {
    format!("{} = {}", entry.key.name, toml(&entry.value))
}

/// Every key with its value and the origin of the value. Parsing it gives the same recipe.
pub fn resolved(values: &KeyValues, settings: &RecipeSections) -> String {
    let mut out = String::from("# Every key of this run, its value, and the source of the value.\n");
    for (table, _) in TABLES {
        out.push_str(&format!("\n[{table}]\n"));
        for entry in values.0.iter().filter(|e| e.key.table == *table) {
            let no_effect = unused(values, settings, entry.key).map(|why| in_comment(&why));
            let origin = match entry.origin {
                ValueOrigin::Recipe => "recipe".to_string(),
                ValueOrigin::Argument => "argument".to_string(),
                ValueOrigin::Default if entry.key.default.is_empty() => {
                    out.push_str(&format!("# {} is not set\n", entry.key.name));
                    continue;
                }
                ValueOrigin::Default => format!("default: {}", entry.key.reason),
            };
            let line = line(entry);
            let text = match no_effect {
                // Commented out: a default without effect must not look like a choice.
                Some(why) if entry.origin == ValueOrigin::Default => format!("# {line}  # no effect with {why}"),
                Some(why) => format!("{line}  # {origin}; no effect with {why}"),
                None => format!("{line}  # {origin}"),
            };
            out.push_str(&text);
            out.push('\n');
        }
    }
    out
}

/// Replaces the value of an `auto` key in the text of `resolved` by the chosen number. A text value may have lines that look like
/// keys and headers, so the text is parsed.
pub fn with_value(text: &str, key: &str, value: &str, why: &str) -> String {
    let (Ok(mut document), Ok(mut value)) = (text.parse::<DocumentMut>(), value.parse::<toml_edit::Value>()) else {
        return text.to_string();
    };
    let found = key
        .split('.')
        .try_fold(document.as_item_mut(), |item, part| item.get_mut(part));
    let Some(item) = found.filter(|item| item.is_value()) else {
        return text.to_string();
    };
    *value.decor_mut() = Decor::new(" ", format!("  # auto: {}", in_comment(why)));
    *item = Item::Value(value);
    document.to_string()
}

/// Generates `docs/recipe.md`: one table of keys for each recipe table.
pub fn reference() -> String {
    let mut out = String::from(
        "# Recipe reference\n\n\
         Generated from the table in `src/recipe/table.rs`; `FT_BLESS=1 cargo test` regenerates it.\n\n\
         A recipe is TOML. Every key can also be given on the command line, as `table.key=value`; an argument\n\
         overrides the value in the recipe and is checked in the same way. An unknown key is an error. `ft train` writes\n\
         all values, with the reason for each default, to `resolved.toml` in the run directory.\n",
    );
    for (table, about) in TABLES {
        out.push_str(&format!("\n## [{table}]\n\n{about}\n\n"));
        out.push_str("| key | accepted values | default | reason for the default | effect |\n|---|---|---|---|---|\n");
        for key in keys().filter(|k| k.table == *table) {
            out.push_str(&row(key));
        }
        let lists = keys().filter(|k| k.table == *table).filter_map(|k| match k.kind {
            ValueKind::Tables(keys) => Some((k, keys)),
            _ => None,
        });
        for (key, keys) in lists {
            out.push_str(&format!("\n### [[{}]]\n\n{}\n\n", key.path, key.doc));
            out.push_str(
                "| key | accepted values | default | reason for the default | effect |\n|---|---|---|---|---|\n",
            );
            keys.iter().for_each(|key| out.push_str(&row(key)));
        }
    }
    out
}

/// The row of a key in `docs/recipe.md`.
pub fn row(key: &RecipeKey) -> String {
    let (default, reason) = match key.default {
        "" => ("required".to_string(), "-"),
        d => (format!("`{d}`"), key.reason),
    };
    let used_with = key.when.map_or(String::new(), |(other, values)| {
        let values: Vec<String> = values.iter().map(|v| format!("`{v}`")).collect();
        format!(" Used with `{other}` = {}.", values.join(" or "))
    });
    let (name, doc, accepted) = (key.name, key.doc, expectation(key));
    format!("| `{name}` | {accepted} | {default} | {reason} | {doc}{used_with} |\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chosen_value_is_recorded_below_a_text_with_lines() {
        let text = "# Every key.\n\n[data]\n# sources is not set\nsystem_prompt = \"\"\"\n[be]\npacking_length = 3\n\"\"\"  # recipe\n\
                    packing_length = \"auto\"  # default: rows\n\n[tune]\nmethod = \"block\"  # default: x\n\n[tune.block]\n\
                    # order = 1  # no effect\nswitch_every = \"auto\"  # default: y\n";
        let resolved = with_value(text, "data.packing_length", "77", "a\nb");
        let resolved = with_value(&resolved, "tune.block.switch_every", "9", "c");
        let expected = text
            .replace(
                "packing_length = \"auto\"  # default: rows",
                "packing_length = 77  # auto: a b",
            )
            .replace("switch_every = \"auto\"  # default: y", "switch_every = 9  # auto: c");
        assert_eq!(resolved, expected);
        assert_eq!(with_value(text, "tune.block.order", "2", "not written"), text);
    }
}
