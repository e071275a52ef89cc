//! Translates a configuration of another training tool to a recipe: the rows of `peers`, and rules for keys whose value
//! decides which key of ft is meant.

mod rules;
mod yaml;

use super::peers;
use super::table;
use crate::base::{Error, Result};
pub use yaml::Node;

/// A recipe from a configuration of another tool.
#[derive(Debug, Clone, PartialEq)]
pub struct Imported {
    /// TOML with comments.
    pub text: String,
    /// Keys without a counterpart: their names, and why.
    pub left: Vec<(String, String)>,
    /// Number of keys with one.
    pub taken: usize,
}

/// One key of the recipe: its path, its value in TOML, and the key of the other tool.
#[derive(Debug, Clone, PartialEq)]
struct Taken {
    key: String,
    value: String,
    from: String,
}

/// What was found so far.
#[derive(Debug, Default)]
struct Findings {
    taken: Vec<Taken>,
    left: Vec<(String, String)>,
}

impl Findings {
    /// The first value of a key stays.
    fn take(&mut self, key: &str, value: impl Into<String>, from: &str) {
        if self.taken.iter().all(|t| t.key != key) {
            self.taken.push(Taken {
                key: key.into(),
                value: value.into(),
                from: from.into(),
            });
        }
    }

    fn leave(&mut self, from: &str, why: impl Into<String>) {
        self.left.push((from.into(), why.into()));
    }
}

/// Translates the text of a file; `name` is shown in the recipe.
///
/// Errors: text that is neither YAML nor JSON with keys.
pub fn import(text: &str, name: &str) -> Result<Imported> {
    let Node::Map(entries) = yaml::read(text).map_err(|e| e.within(name))? else {
        return Err(Error::usage("the file has no keys")
            .at(name)
            .expected("`key: value` lines, or a JSON object"));
    };
    let mut found = Findings::default();
    let root = Node::Map(entries.clone());
    for (key, node) in &entries {
        one(&mut found, &root, "", key, node);
    }
    rules::afterwards(&mut found, &root);
    let taken = found.taken.len();
    Ok(Imported {
        text: recipe(&found, name),
        left: found.left,
        taken,
    })
}

fn one(found: &mut Findings, root: &Node, table: &str, name: &str, node: &Node) {
    let shown = if table.is_empty() {
        name.to_string()
    } else {
        format!("{table}.{name}")
    };
    if rules::apply(found, root, &shown, name, node) {
        return;
    }
    let own = format!("tune.lora.{name}");
    let qualified = peers::qualified(table, name).map(str::to_string);
    let key = qualified.filter(|a| table::find(a).is_some()).or_else(|| {
        let lora = table::find(&own).is_some() && rules::LORA_TABLES.contains(&table);
        if lora { Some(own) } else { peers::key_for(name) }
    });
    match (key, node) {
        (_, node) if node.is_off() && !matches!(node, Node::Scalar(text) if text == "0" || text == "false") => {}
        (Some(key), Node::Scalar(text)) => match peers::value_for(name, &key, text) {
            Some(value) => found.take(&key, number(&value), &shown),
            // An option that is off needs no key.
            None if node.is_off() => {}
            None => {
                let why = peers::value(&key, text).map_or(format!("`{key}` has no value `{text}`"), str::to_string);
                found.leave(&shown, why);
            }
        },
        (Some(key), Node::List(list)) => {
            let texts: Vec<&str> = list.iter().filter_map(Node::scalar).collect();
            if texts.len() == list.len() {
                let quoted: Vec<String> = texts.iter().map(|t| item(t)).collect();
                found.take(&key, format!("[{}]", quoted.join(", ")), &shown);
            } else {
                found.leave(&shown, format!("write `{key}`"));
            }
        }
        (None, Node::Map(inner)) if peers::sentence_for(name).is_none() => {
            for (below, node) in inner {
                one(found, root, name, below, node);
            }
        }
        (_, node) if node.is_off() => {}
        (None, _) => {
            let why = peers::sentence_for(name).map(str::to_string);
            let why = why
                .or_else(|| peers::of_table(name))
                .unwrap_or_else(|| "ft has no such key".into());
            found.leave(&shown, why);
        }
        (Some(key), _) => found.leave(&shown, format!("write `{key}`")),
    }
}

/// A number as TOML has it: `.1` is `0.1`.
fn number(text: &str) -> String {
    match (text.parse::<i64>(), text.parse::<f64>()) {
        (Err(_), Ok(x)) if x.is_finite() => format!("{x:?}"),
        _ => text.to_string(),
    }
}

/// An item of a list in TOML.
fn item(text: &str) -> String {
    if text.parse::<f64>().is_ok() || ["true", "false"].contains(&text) {
        number(text)
    } else {
        quoted(text)
    }
}

/// A text in TOML.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// The recipe, in the order of the tables of ft.
fn recipe(found: &Findings, name: &str) -> String {
    let mut out = format!("# From {name}. `ft plan` shows what this recipe needs.\n");
    let mut current = "";
    for key in table::keys() {
        let Some(taken) = found.taken.iter().find(|t| t.key == key.path.0) else {
            continue;
        };
        if key.table != current {
            current = key.table;
            out += &format!("\n[{current}]\n");
        }
        let line = format!("{} = {}", key.name, taken.value);
        out += &format!("{line:<44} # {}\n", taken.from);
    }
    if found.taken.iter().all(|t| !t.key.starts_with("data.train")) {
        out += "\n# The rows are missing: [data] train = \"rows.jsonl\"\n";
    }
    if !found.left.is_empty() {
        out += "\n# Without a counterpart:\n";
    }
    for (from, why) in &found.left {
        out += &format!("#   {from}: {}\n", why.replace('\n', " "));
    }
    out
}

#[cfg(test)]
mod tests;
