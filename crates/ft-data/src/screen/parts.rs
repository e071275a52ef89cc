//! The texts of a row, each with the role that it has in the row, whatever the format. Rows of different formats with the
//! same roles and texts have the same parts.

use crate::chat;
use crate::layout::{ColumnLayout, is_turns};
use crate::read::Row;
use serde_json::{Map, Value};

/// A text and its role: `user`, `assistant`, `chosen`, `text`, ...
pub(super) struct RowText {
    pub role: String,
    pub text: String,
    /// True for an answer of weight 0.
    pub is_untrained: bool,
    /// Parts of a message other than its content, with the names of their fields, as JSON in one form. Only an exact
    /// comparison reads them.
    fields: String,
}

/// Names of the reasoning before an answer.
const REASONING: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

impl RowText {
    /// True for texts that many rows share: they say nothing about the row.
    pub(super) fn is_frame(&self) -> bool {
        matches!(self.role.as_str(), "system" | "developer" | "tools" | "label")
    }
}

/// The parts of a row, in the order of the layout's roles.
pub(super) fn of(row: &Row, layout: &ColumnLayout) -> Vec<RowText> {
    let mut out = Vec::new();
    for (role, columns) in layout.roles() {
        if role == "margin" {
            continue;
        }
        for column in columns {
            match row.fields.get(column) {
                None | Some(Value::Null) => {}
                Some(value) => push(&mut out, role_name(role), value),
            }
        }
    }
    out
}

/// The role of a column or of a message, under one name for all formats.
fn role_name(role: &str) -> &str {
    match role {
        "prompt" | "human" => "user",
        "completion" | "answer" | "gpt" | "bot" | "model" | "chatgpt" => "assistant",
        other => other,
    }
}

fn push(out: &mut Vec<RowText>, role: &str, value: &Value) {
    match value {
        // Columns of csv and parquet may hold messages as JSON text.
        Value::String(text) if text.trim_start().starts_with("[{") => match serde_json::from_str::<Value>(text) {
            Ok(list) if is_turns(&list) => push(out, role, &list),
            _ => out.push(part(role, text)),
        },
        Value::String(text) => out.push(part(role, text)),
        list if is_turns(list) => {
            let one = std::slice::from_ref(list);
            for item in list.as_array().map_or(one, Vec::as_slice) {
                match item {
                    Value::String(text) => out.push(part(role, text)),
                    // A question and its answer in `history`.
                    Value::Array(pair) => {
                        let texts = pair.iter().zip(["user", "assistant"]);
                        texts.for_each(|(text, role)| push(out, role, text));
                    }
                    other => out.push(message(role, other)),
                }
            }
        }
        other => out.push(part(role, &other.to_string())),
    }
}

fn part(role: &str, text: &str) -> RowText {
    RowText {
        role: role.to_string(),
        text: text.to_string(),
        is_untrained: false,
        fields: String::new(),
    }
}

/// A message, or another object in a list, such as a tool.
fn message(role: &str, message: &Value) -> RowText {
    let own = ["role", "from"].iter().find_map(|key| message.get(*key)?.as_str());
    // The sides of a pair must not be exchangeable.
    let is_side = matches!(role, "chosen" | "rejected");
    let role = if is_side { role } else { role_name(own.unwrap_or(role)) };
    let (mut text, mut fields) = (String::new(), Map::new());
    for key in ["content", "value"] {
        message.get(key).into_iter().for_each(|v| content(v, &mut text));
    }
    let mut reasoning = String::new();
    for key in REASONING {
        message.get(key).into_iter().for_each(|v| content(v, &mut reasoning));
    }
    if !reasoning.is_empty() {
        leaves(&Value::from(reasoning.as_str()), &mut text);
        fields.insert("reasoning".to_string(), reasoning.into());
    }
    let given = message.get("tool_calls").cloned().unwrap_or_default();
    let given = match given.as_str().and_then(chat::called) {
        Some(calls) => Value::Array(calls),
        None => given,
    };
    let calls: Value = match given {
        Value::Array(calls) if calls.is_empty() => Value::Null,
        Value::Array(calls) => calls.iter().map(call).collect(),
        other => other,
    };
    if !calls.is_null() {
        leaves(&calls, &mut text);
        fields.insert("tool_calls".to_string(), calls);
    }
    // The same conversation may be there once for each answer that it trains. Sides of a pair have no weights.
    let is_untrained = !is_side && chat::is_untrained(message);
    if is_untrained {
        fields.insert("weight".to_string(), 0.into());
    }
    if own.is_none() && text.is_empty() {
        fields.insert("value".to_string(), in_one_form(message));
    }
    RowText {
        role: role.to_string(),
        text,
        is_untrained,
        fields: if fields.is_empty() {
            String::new()
        } else {
            Value::Object(fields).to_string()
        },
    }
}

/// A call of a tool in one form: arguments given as JSON text are parsed, and the kind of the call, which is always the
/// same, is left out.
fn call(value: &Value) -> Value {
    let mut value = value.clone();
    if let Some(fields) = value.as_object_mut() {
        fields.remove("type");
    }
    let holder = if value.get("function").is_some_and(Value::is_object) {
        value.get_mut("function")
    } else {
        Some(&mut value)
    };
    if let Some(arguments) = holder.and_then(|holder| holder.get_mut("arguments"))
        && let Some(Ok(parsed @ Value::Object(_))) = arguments.as_str().map(serde_json::from_str::<Value>)
    {
        *arguments = parsed;
    }
    in_one_form(&value)
}

/// The same value with the fields of objects in the order of their names, without null fields, which columnar files add.
fn in_one_form(value: &Value) -> Value {
    match value {
        Value::Array(list) => list.iter().map(in_one_form).collect(),
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields.iter().filter(|(_, v)| !v.is_null()).collect();
            fields.sort_by_key(|(key, _)| *key);
            let fields = fields.into_iter().map(|(key, v)| (key.clone(), in_one_form(v)));
            Value::Object(fields.collect())
        }
        other => other.clone(),
    }
}

/// Appends the text of a message: a string, or a list of parts whose kind is no text.
fn content(value: &Value, out: &mut String) {
    let Value::Array(parts) = value else {
        return leaves(value, out);
    };
    for part in parts {
        match part {
            Value::Object(fields) => fields
                .iter()
                .filter(|(key, _)| *key != "type")
                .for_each(|(_, v)| leaves(v, out)),
            other => leaves(other, out),
        }
    }
}

/// Appends all strings inside a value; numbers and booleans as text.
fn leaves(value: &Value, out: &mut String) {
    match value {
        Value::Null => {}
        Value::String(text) => {
            if !out.is_empty() {
                out.push('\n');
            }
            out.push_str(text);
        }
        Value::Array(list) => list.iter().for_each(|v| leaves(v, out)),
        Value::Object(fields) => fields.values().for_each(|v| leaves(v, out)),
        other => leaves(&Value::String(other.to_string()), out),
    }
}

/// Hash of all parts.
pub(super) fn hash(parts: &[RowText]) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        for text in [&part.role, &part.text, &part.fields] {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
    }
    let mut out = [0; 16];
    out.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    out
}

/// Hashes of the words of a text: lower case, without punctuation. A character of a script without spaces is a word.
pub(super) fn words(text: &str) -> Vec<u64> {
    let mut out = Vec::new();
    each_word(text, &mut |word| out.push(mixed(fnv(word))));
    out
}

/// The words `first..first + count` of a text, as they are compared.
pub(super) fn shown(text: &str, first: usize, count: usize) -> String {
    let (mut out, mut at) = (String::new(), 0);
    each_word(text, &mut |word| {
        if (first..first + count).contains(&at) {
            if !out.is_empty() {
                out.push(' ');
            }
            out.push_str(word);
        }
        at += 1;
    });
    out
}

fn each_word(text: &str, each: &mut dyn FnMut(&str)) {
    let mut word = String::new();
    for c in text.chars().flat_map(char::to_lowercase) {
        if c.is_alphanumeric() && !is_own_word(c) {
            word.push(c);
            continue;
        }
        if !word.is_empty() {
            each(&word);
            word.clear();
        }
        if is_own_word(c) {
            each(c.encode_utf8(&mut [0; 4]));
        }
    }
    if !word.is_empty() {
        each(&word);
    }
}

/// True for letters of scripts that write no spaces: Thai, Lao, Kana, Han.
fn is_own_word(c: char) -> bool {
    c.is_alphanumeric()
        && matches!(c as u32, 0x0e00..=0x0eff | 0x3040..=0x30ff | 0x3400..=0x9fff | 0xf900..=0xfaff | 0x2_0000..=0x3_ffff)
}

/// FNV-1a.
pub(super) fn fnv(text: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    text.bytes().fold(0xcbf2_9ce4_8422_2325, step)
}

/// Spreads the bits of a hash (the finalizer of SplitMix64).
pub(super) fn mixed(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
