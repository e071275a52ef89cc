//! Datasets by name: `dataset_info.json` of LLaMA-Factory.

use super::yaml::{self, YamlNode};
use super::{Findings, quoted};
use crate::base::Result;

/// The columns of LLaMA-Factory, that of ft, and the name that a column has there if none is given.
const COLUMNS: [(&str, &str, &str); 10] = [
    ("prompt", "prompt", "instruction"),
    ("query", "input", "input"),
    ("response", "completion", "output"),
    ("history", "history", ""),
    ("messages", "messages", "conversations"),
    ("system", "system", ""),
    ("tools", "tools", ""),
    ("chosen", "chosen", "chosen"),
    ("rejected", "rejected", "rejected"),
    ("kto_tag", "label", "kto_tag"),
];
/// The roles of a message, as `COLUMNS`.
const ROLES: [(&str, &str, &str); 5] = [
    ("user_tag", "user", "human"),
    ("assistant_tag", "assistant", "gpt"),
    ("system_tag", "system", "system"),
    ("observation_tag", "tool", "observation"),
    ("function_tag", "assistant", "function_call"),
];
/// Names of roles that need no `data.roles`.
const KNOWN_ROLES: [&str; 8] = [
    "human",
    "gpt",
    "system",
    "observation",
    "function_call",
    "user",
    "assistant",
    "tool",
];

/// `dataset_info.json`, and the folder that its file names are relative to.
#[derive(Debug)]
pub struct Registry {
    folder: String,
    entries: YamlNode,
}

/// A dataset as a table of `[[data.sources]]`: its fields, each with a value in TOML. The first one is `path`.
pub(super) type DatasetTable = Vec<(&'static str, String)>;

impl Registry {
    /// Errors: a text that is not JSON.
    pub fn read(text: &str, folder: &str) -> Result<Self> {
        let folder = folder.trim_end_matches('/');
        Ok(Self {
            entries: yaml::read(text).map_err(|e| e.within(format!("{folder}/dataset_info.json")))?,
            folder: folder.into(),
        })
    }

    /// The dataset with this name; `None`: there is none. A key without a counterpart is added to `found`.
    pub(super) fn source(&self, found: &mut Findings, name: &str) -> Option<DatasetTable> {
        let entry = self.entries.get(name)?;
        let text = |key: &str| {
            entry
                .get(key)
                .and_then(YamlNode::scalar)
                .filter(|text| !text.is_empty())
        };
        let mut source = DatasetTable::new();
        match (text("hf_hub_url"), text("file_name")) {
            (Some(id), _) => source.push(("path", quoted(id))),
            (None, Some(file)) => source.push(("path", quoted(&format!("{}/{file}", self.folder)))),
            (None, None) => return None,
        }
        for (key, field) in [("subset", "config"), ("split", "split")] {
            source.extend(text(key).map(|value| (field, quoted(value))));
        }
        source.extend(text("num_samples").map(|rows| ("limit", rows.to_string())));
        let shown = |key: &str| format!("dataset_info.json: {name}: {key}");
        let (columns, tags) = (entry.get("columns"), entry.get("tags"));
        let table = |pairs: Vec<(String, String)>| {
            let pairs: Vec<String> = pairs.iter().map(|(name, value)| format!("{name} = {value}")).collect();
            format!("{{ {} }}", pairs.join(", "))
        };
        let columns = named(found, &shown, columns, &COLUMNS);
        let roles = named(found, &shown, tags, &ROLES);
        let mut pairs: Vec<(String, String)> = Vec::new();
        // Columns with the names that LLaMA-Factory expects are detected.
        if columns.iter().any(|(_, usual, column)| usual != column) {
            pairs.extend(
                columns
                    .iter()
                    .map(|(ours, _, column)| ((*ours).to_string(), quoted(column))),
            );
        }
        let tag = |key: &str| tags.and_then(|tags| tags.get(key)).and_then(YamlNode::scalar);
        let keys = (tag("role_tag").unwrap_or("from"), tag("content_tag").unwrap_or("value"));
        if ![("from", "value"), ("role", "content")].contains(&keys) {
            pairs.push(("role".into(), quoted(keys.0)));
            pairs.push(("content".into(), quoted(keys.1)));
        }
        if !pairs.is_empty() {
            source.push(("columns", table(pairs)));
        }
        let other: Vec<(String, String)> = roles
            .iter()
            .filter(|(_, _, tag)| !KNOWN_ROLES.contains(&tag.as_str()))
            .map(|(role, _, tag)| (quoted(tag), quoted(role)))
            .collect();
        if !other.is_empty() {
            source.push(("roles", table(other)));
        }
        let known = [
            "hf_hub_url",
            "file_name",
            "subset",
            "split",
            "num_samples",
            "columns",
            "tags",
            "formatting",
            "ranking",
            "ms_hub_url",
            "om_hub_url",
        ];
        if let YamlNode::Map(entries) = entry {
            let other = entries
                .iter()
                .filter(|(key, node)| !known.contains(&key.as_str()) && !node.is_off());
            for (key, _) in other {
                found.leave(&shown(key), "ft has no such key for rows");
            }
        }
        Some(source)
    }
}

/// The entries of a table of names, as (name in ft, usual name, name here). Others are left.
fn named<'t>(
    found: &mut Findings,
    shown: &impl Fn(&str) -> String,
    node: Option<&YamlNode>,
    known: &[(&str, &'t str, &'t str)],
) -> Vec<(&'t str, &'t str, String)> {
    let Some(YamlNode::Map(entries)) = node else {
        return Vec::new();
    };
    let mut out = Vec::new();
    for (key, node) in entries {
        let Some(text) = node.scalar().filter(|text| !text.is_empty()) else {
            continue;
        };
        match known.iter().find(|(theirs, _, _)| theirs == key) {
            Some((_, ours, usual)) => out.push((*ours, *usual, text.to_string())),
            None if ["role_tag", "content_tag"].contains(&key.as_str()) => {}
            None => found.leave(&shown(key), "ft reads no such column"),
        }
    }
    out
}
