//! Translates a configuration of another training tool to a recipe: the rows of `peers`, and rules for keys whose value
//! decides which key of ft is meant.

mod registry;
mod rows;
mod rules;
mod schedules;
mod tools;
mod trl;
mod yaml;

use super::peers;
use super::table::{self, OnResume};
use super::value::{ValueKind, in_comment, quoted};
use crate::base::{Error, Result, secrets};
pub use registry::Registry;
use tools::{ToolConfig, TrainingTool};
pub use yaml::YamlNode;

/// A recipe from a configuration of another tool.
#[derive(Debug, Clone, PartialEq)]
pub struct ImportedRecipe {
    /// TOML with comments.
    pub text: String,
    /// Keys without a counterpart: their names, and why.
    pub left: Vec<(String, String)>,
    /// Number of keys with one.
    pub taken: usize,
}

/// One key of the recipe: its path, its value in TOML, and the key of the other tool.
#[derive(Debug, Clone, PartialEq)]
struct ImportedKey {
    key: String,
    value: String,
    from: String,
    /// The file does not have it.
    default: bool,
}

/// The keys that were found so far.
#[derive(Debug, Default)]
struct Findings {
    taken: Vec<ImportedKey>,
    left: Vec<(String, String)>,
}

impl Findings {
    /// The first value of a key stays.
    fn take(&mut self, key: &str, value: impl Into<String>, from: &str) {
        if self.taken.iter().all(|t| t.key != key) {
            self.taken.push(ImportedKey {
                key: key.into(),
                value: value.into(),
                from: from.into(),
                default: false,
            });
        }
    }

    /// The value of a key, in TOML.
    fn value(&self, key: &str) -> Option<&str> {
        let taken = self.taken.iter().find(|taken| taken.key == key);
        taken.map(|taken| taken.value.as_str())
    }

    /// As `take`, in the place of the value that was there.
    fn replace(&mut self, key: &str, value: impl Into<String>, from: &str) {
        self.taken.retain(|t| t.key != key);
        self.take(key, value, from);
    }

    /// A value that the file does not have, if the key has none.
    fn take_default(&mut self, key: &str, value: Option<String>, from: &str) {
        let before = self.taken.len();
        if let Some(value) = value {
            self.take(key, value, from);
        }
        self.taken[before..].iter_mut().for_each(|t| t.default = true);
    }

    fn leave(&mut self, from: &str, why: impl Into<String>) {
        self.left.push((from.into(), why.into()));
    }
}

/// The folder with the `dataset_info.json` that a file names datasets of; `None`: it is not of LLaMA-Factory.
pub fn registry_folder(text: &str) -> Option<String> {
    let root = yaml::read(text).ok()?;
    let file = ToolConfig::new(&root, None);
    let folder = || file.text("dataset_dir").unwrap_or("data").to_string();
    (file.tool == TrainingTool::LlamaFactory).then(folder)
}

/// Translates the text of a file; `name` is shown in the recipe. `registry`: the datasets that the file names.
///
/// Errors: text that is neither YAML nor JSON with keys.
pub fn import(text: &str, name: &str, registry: Option<&Registry>) -> Result<ImportedRecipe> {
    let YamlNode::Map(entries) = yaml::read(text).map_err(|e| e.within(name))? else {
        return Err(Error::usage("the file has no keys")
            .at(name)
            .expected("`key: value` lines, or a JSON object"));
    };
    let mut found = Findings::default();
    let root = YamlNode::Map(entries.clone());
    let file = ToolConfig::new(&root, registry);
    tools::take_stage(&mut found, &file);
    for (key, node) in &entries {
        one(&mut found, &file, "", key, node);
    }
    rules::afterwards(&mut found, &file);
    refuse(&mut found);
    let taken = found.taken.len();
    tools::defaults(&mut found, &file);
    hide_secrets(&mut found);
    Ok(ImportedRecipe {
        text: recipe(&found, name),
        left: found.left,
        taken,
    })
}

fn one(found: &mut Findings, file: &ToolConfig, table: &str, name: &str, node: &YamlNode) {
    let shown = if table.is_empty() {
        name.to_string()
    } else {
        format!("{table}.{name}")
    };
    if rules::apply(found, file, &shown, name, node) {
        return;
    }
    let is_key = |path: &String| table::find(path).is_some();
    let of_adapter = || {
        let own = format!("tune.lora.{name}");
        let other = peers::qualified("tune.lora", name).map(str::to_string);
        [Some(own), other].into_iter().flatten().find(is_key)
    };
    let key = peers::qualified(table, name)
        .map(str::to_string)
        .filter(is_key)
        .or_else(|| rules::LORA_TABLES.contains(&table).then(of_adapter).flatten())
        .or_else(|| file.of_stage(name))
        .or_else(|| peers::key_for(name));
    let kind = key.as_deref().and_then(table::find).map(|key| key.kind);
    // One value, or none, for a key that is no list.
    let lists = matches!(
        kind,
        Some(ValueKind::Texts | ValueKind::Integers | ValueKind::Numbers | ValueKind::Pair | ValueKind::Pairs)
    );
    let node = match node {
        YamlNode::List(list) if key.is_some() && !lists && list.len() == 1 => &list[0],
        node => node,
    };
    match (key, node) {
        (_, node) if node.is_off() && !matches!(node, YamlNode::Scalar(text) if text == "0" || text == "false") => {}
        (Some(key), YamlNode::Scalar(text)) if text.contains('\n') => {
            found.leave(&shown, format!("a text of several lines: write `{key}`"));
        }
        (Some(key), YamlNode::Scalar(text)) => match peers::value_for(name, &key, text) {
            Some(value) => found.take(&key, number(&value), &shown),
            // An option that is off needs no key.
            None if node.is_off() => {}
            None => {
                let why = peers::value(&key, text).map_or(format!("`{key}` has no value `{text}`"), str::to_string);
                found.leave(&shown, why);
            }
        },
        (Some(key), YamlNode::List(list)) if lists => {
            let texts: Vec<&str> = list.iter().filter_map(YamlNode::scalar).collect();
            if texts.len() == list.len() {
                let quoted: Vec<String> = texts.iter().map(|t| item(t)).collect();
                found.take(&key, format!("[{}]", quoted.join(", ")), &shown);
            } else {
                found.leave(&shown, format!("write `{key}`"));
            }
        }
        (Some(key), YamlNode::Map(inner)) if matches!(kind, Some(ValueKind::Free | ValueKind::Fields(_))) => {
            match inline(inner) {
                Some(value) => found.take(&key, value, &shown),
                None => found.leave(&shown, format!("write `{key}`")),
            }
        }
        (key, YamlNode::Map(inner)) if key.is_some() || peers::sentence_for(name).is_none() => {
            for (below, node) in inner {
                one(found, file, name, below, node);
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

/// A table of TOML in one line; `None`: it has more than texts and numbers.
fn inline(entries: &[(String, YamlNode)]) -> Option<String> {
    let pair = |(name, node): &(String, YamlNode)| Some(format!("{} = {}", key_name(name), item(node.scalar()?)));
    let pairs: Option<Vec<String>> = entries.iter().map(pair).collect();
    Some(format!("{{ {} }}", pairs?.join(", ")))
}

/// A key in TOML: with quotes where it needs them.
fn key_name(name: &str) -> String {
    toml_edit::Key::new(name).to_string()
}

/// True for a value with which a run starts a program, or gives it more rights: the file may come from somebody else.
fn starts_programs(taken: &ImportedKey) -> bool {
    match taken.key.as_str() {
        "rlhf.reward_network" => true,
        "rlhf.rewards" => names_program(&taken.value.parse().unwrap_or_else(|_| "".into())),
        _ => false,
    }
}

/// Of the decoded texts: an escape can hide the word in the TOML.
fn names_program(value: &toml_edit::Value) -> bool {
    match value {
        toml_edit::Value::String(text) => text.value().contains("program:"),
        toml_edit::Value::Array(items) => items.iter().any(names_program),
        _ => false,
    }
}

/// Leaves out values that are not TOML, because such a text could add keys to the recipe. Also leaves out the values that ft
/// refuses whatever the other keys are.
fn refuse(found: &mut Findings) {
    const LEAST: &str = "[model]\npath = \"m\"\n[data]\ntrain = \"t\"\n";
    for mut taken in std::mem::take(&mut found.taken) {
        if taken.value.parse::<toml_edit::Value>().is_err() {
            // Numbers such as `.1`.
            taken.value = number(&taken.value);
        }
        if taken.value.parse::<toml_edit::Value>().is_err() {
            found.leave(&taken.from, format!("`{}` has no value `{}`", taken.key, taken.value));
            continue;
        }
        if starts_programs(&taken) {
            found.leave(
                &taken.from,
                format!("`{}` starts programs: write it yourself", taken.key),
            );
            continue;
        }
        let argument = format!("{}={}", taken.key, taken.value);
        let refused = super::parse(LEAST, "", &[argument]).err();
        let wrong = ["has the wrong type", "is out of range", "is not a value of"];
        match refused.filter(|e| wrong.iter().any(|part| e.what().contains(part))) {
            Some(error) => found.leave(&taken.from, format!("`{}`: {}", taken.key, error.what())),
            None => found.taken.push(taken),
        }
    }
}

/// True for a key with paths or ids. There a name may look like a token, and with a mask the recipe would not work.
fn is_place(key: &str) -> bool {
    let others = [
        "adapter",
        "cache_dir",
        "chat_template",
        "data",
        "decontaminate",
        "output_dir",
    ];
    table::find(key).is_some_and(|key| matches!(key.on_resume, OnResume::Path(_)) || others.contains(&key.name))
}

/// Masks tokens, and the user and password of a URL: a recipe is shown to others, and a run copies it.
fn hide_secrets(found: &mut Findings) {
    for (from, why) in &mut found.left {
        (*from, *why) = (secrets::mask_known(from), secrets::mask_known(why));
    }
    for taken in &mut found.taken {
        taken.from = secrets::mask_known(&taken.from);
        let masked = if is_place(&taken.key) {
            secrets::mask_users(&taken.value)
        } else {
            secrets::mask_known(&taken.value)
        };
        if masked != taken.value {
            let why = format!("`{}` has `{}` in the place of a secret", taken.key, secrets::MASK);
            found.left.push((taken.from.clone(), why));
            taken.value = masked;
        }
    }
}

/// A number as TOML has it: `.1` is `0.1`.
fn number(text: &str) -> String {
    match (text.parse::<i64>(), text.parse::<f64>()) {
        (Ok(n), _) => n.to_string(),
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

/// The recipe, in the order of the tables of ft.
fn recipe(found: &Findings, name: &str) -> String {
    let mut out = format!("# From {}. `ft plan` shows what this recipe needs.\n", in_comment(name));
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
        out += &format!("{line:<44} # {}\n", in_comment(&taken.from));
    }
    let rows = |t: &ImportedKey| ["data.train", "data.sources"].contains(&t.key.as_str());
    if !found.taken.iter().any(rows) {
        out += "\n# The rows are missing: write train = \"rows.jsonl\" below [data]\n";
    }
    if !found.left.is_empty() {
        out += "\n# Without a counterpart:\n";
    }
    for (from, why) in &found.left {
        out += &format!("#   {}: {}\n", in_comment(from), in_comment(why));
    }
    out
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_optim;
