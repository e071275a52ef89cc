//! Datasets of other tools.

use super::registry::DatasetTable;
use super::tools::{ToolConfig, TrainingTool};
use super::yaml::YamlNode;
use super::{Findings, quoted};
use crate::recipe::value::ValueKind;
use crate::recipe::{peers, table};
use std::collections::BTreeSet;

/// A list of datasets with their settings, a path, or names.
pub fn datasets(found: &mut Findings, file: &ToolConfig, shown: &str, name: &str, node: &YamlNode) {
    let key = if ["eval_dataset", "test_datasets"].contains(&name) {
        "data.eval"
    } else {
        "data.train"
    };
    let items: Vec<YamlNode> = match node {
        YamlNode::List(items) => items.clone(),
        YamlNode::Scalar(text) => text.split(',').map(|t| YamlNode::Scalar(t.trim().into())).collect(),
        other => vec![other.clone()],
    };
    if file.tool == TrainingTool::LlamaFactory && items.iter().all(|item| item.scalar().is_some_and(is_registered)) {
        registered(found, file, shown, key, &items);
        return;
    }
    let mut paths = Vec::new();
    for item in &items {
        let path = item.scalar().or_else(|| item.get("path")?.scalar());
        paths.extend(path.map(quoted));
        let YamlNode::Map(settings) = item else { continue };
        for (name, node) in settings.iter().filter(|(_, node)| !node.is_off()) {
            setting(found, file, &format!("{shown}: {name}"), key, name, node);
        }
    }
    // A format holds for all rows; without one it is detected for each file.
    let kinds: BTreeSet<&str> = items.iter().filter_map(|item| item.get("type")?.scalar()).collect();
    if kinds.len() > 1 {
        found.taken.retain(|taken| taken.key != "data.format");
    }
    match paths.as_slice() {
        [] => found.leave(shown, "write `data.train`"),
        [one] => found.take(key, one.clone(), shown),
        many => found.take(key, format!("[{}]", many.join(", ")), shown),
    }
}

/// True for a name in `dataset_info.json`: a file has an ending, a hub dataset an owner.
fn is_registered(name: &str) -> bool {
    !name.contains(['.', '/', '\\'])
}

/// Datasets by name. A name without a meaning stays the path, so that the recipe shows what to write.
fn registered(found: &mut Findings, file: &ToolConfig, shown: &str, key: &str, items: &[YamlNode]) {
    let mut sources: Vec<DatasetTable> = Vec::new();
    for name in items.iter().filter_map(YamlNode::scalar) {
        let source = file.registry.and_then(|registry| registry.source(found, name));
        sources.push(source.unwrap_or_else(|| {
            let why = match file.registry {
                Some(_) => format!("`dataset_info.json` has no file or hub dataset for `{name}`"),
                None => {
                    let folder = file.text("dataset_dir").unwrap_or("data");
                    format!("there is no `{folder}/dataset_info.json` that says what `{name}` is")
                }
            };
            found.leave(
                shown,
                format!("{why}: write the file or the hub dataset (docs/data.md)"),
            );
            vec![("path", quoted(name))]
        }));
    }
    match sources.as_slice() {
        _ if key == "data.eval" => {
            let paths: Vec<&str> = sources.iter().map(|source| source[0].1.as_str()).collect();
            found.take(key, format!("[{}]", paths.join(", ")), shown);
            if sources.iter().any(|source| source.len() > 1) {
                found.leave(shown, "rows of an evaluation are read with the settings of `[data]`");
            }
        }
        [one] => {
            for (field, value) in one {
                let name = if *field == "path" { "train" } else { *field };
                found.replace(&format!("data.{name}"), value.clone(), shown);
            }
        }
        many if many.iter().all(|source| source.len() == 1) => {
            let paths: Vec<&str> = many.iter().map(|source| source[0].1.as_str()).collect();
            found.take(key, format!("[{}]", paths.join(", ")), shown);
        }
        many => {
            let table = |source: &DatasetTable| {
                let fields: Vec<String> = source.iter().map(|(name, value)| format!("{name} = {value}")).collect();
                format!("{{ {} }}", fields.join(", "))
            };
            let tables: Vec<String> = many.iter().map(table).collect();
            found.take("data.sources", format!("[{}]", tables.join(", ")), shown);
        }
    }
}

/// A setting of a dataset. A setting that ft always has needs no key.
fn setting(found: &mut Findings, file: &ToolConfig, shown: &str, key: &str, name: &str, node: &YamlNode) {
    let text = node.scalar().unwrap_or_default();
    match (name, text) {
        ("path" | "ds_type", _) => {}
        ("type", "") => found.leave(
            shown,
            "write `data.columns` for the names of the columns, `data.prompt_template` for the text of a prompt",
        ),
        ("type", kind) => {
            let first = kind.split('.').next().unwrap_or_default();
            // A type of rows with preferences or prompts has names of its own, such as `chatml.intel`.
            let texts = matches!(file.stage, None | Some("sft" | "pretrain"));
            let format = peers::value_for("type", "data.format", first).filter(|_| texts);
            match format.filter(|value| is_value("data.format", value)) {
                // Plain text in a column: detected by its name.
                Some(_) if kind == "completion" && key == "data.train" => {
                    found.take("data.format", quoted("text"), shown)
                }
                Some(format) if key == "data.train" => found.take("data.format", format, shown),
                Some(_) => {}
                None => found.leave(
                    &format!("{shown} {kind}"),
                    "the format of rows is detected; see docs/data.md",
                ),
            }
        }
        ("split" | "train_on_split", "train") => {}
        ("split" | "train_on_split", part) if part.contains('[') => {
            found.leave(shown, "write `data.limit` for the first rows of a split");
        }
        ("split" | "train_on_split", split) if key == "data.train" => found.take("data.split", quoted(split), shown),
        ("split", split) => found.take("data.eval_split", quoted(split), shown),
        ("name", name) => found.take("data.config", quoted(name), shown),
        ("train_on_eos", "turn" | "all") | ("field", "text") => {}
        // Rows with `from` and `value` are detected.
        ("field_messages", "messages" | "conversations") => {}
        _ if name == "roles_to_train" && is_assistant(node) => {}
        _ if name == "message_property_mappings" && is_sharegpt(node) => {}
        _ => {
            let why = peers::sentence_for(name).unwrap_or("ft has no such key");
            found.leave(shown, why);
        }
    }
}

fn is_assistant(node: &YamlNode) -> bool {
    let is = |node: &YamlNode| node.scalar().is_some_and(|role| ["assistant", "gpt"].contains(&role));
    match node {
        YamlNode::List(roles) => roles.iter().all(is),
        one => is(one),
    }
}

fn is_sharegpt(node: &YamlNode) -> bool {
    let names = ["role", "content"].map(|name| node.get(name).and_then(YamlNode::scalar));
    [[Some("from"), Some("value")], [Some("role"), Some("content")]].contains(&names)
}

/// `hf_dataset` of mlx-lm: a dataset on the hub, or a list of them.
pub fn hub(found: &mut Findings, shown: &str, node: &YamlNode) {
    let items = match node {
        YamlNode::List(items) => items.as_slice(),
        one => std::slice::from_ref(one),
    };
    let [item] = items else {
        found.leave(shown, "write `[[data.sources]]` tables");
        return;
    };
    let text = |name: &str| item.get(name).and_then(YamlNode::scalar);
    if let Some(path) = text("path").or_else(|| text("name")) {
        found.replace("data.train", quoted(path), shown);
    }
    for (name, key) in [("train_split", "data.split"), ("valid_split", "data.eval_split")] {
        match text(name) {
            Some(split) if split.contains('[') => found.leave(
                &format!("{shown}: {name}"),
                "write `data.limit` for the first rows, `data.eval_fraction` for rows that are held out",
            ),
            Some(split) => found.take(key, quoted(split), &format!("{shown}: {name}")),
            None => {}
        }
    }
    let uses = [
        ("prompt_feature", "prompt"),
        ("completion_feature", "completion"),
        ("chat_feature", "messages"),
        ("text_feature", "text"),
    ];
    let columns: Vec<String> = uses
        .iter()
        .filter_map(|(name, column)| Some(format!("{column} = {}", quoted(text(name)?))))
        .collect();
    if !columns.is_empty() {
        found.take("data.columns", format!("{{ {} }}", columns.join(", ")), shown);
    }
}

fn is_value(key: &str, value: &str) -> bool {
    match table::find(key).map(|key| key.kind) {
        Some(ValueKind::Name(names)) => names.contains(&value.trim_matches('"')),
        _ => true,
    }
}
