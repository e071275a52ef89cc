//! Row formats: what the fields of a row mean. Everything becomes one of three samples.

use super::chat;
use super::read::{Row, clip, kind};
use crate::base::{Error, Result};
use crate::recipe::RowFormat;
use serde_json::{Map, Value};

/// A row, understood.
#[derive(Debug, Clone, PartialEq)]
pub enum Sample {
    /// Plain text, all of it to learn.
    Text(String),
    /// The completion is to learn.
    PromptCompletion { prompt: String, completion: String },
    /// A conversation for the chat template.
    Chat(Chat),
}

/// A conversation as the chat template takes it.
#[derive(Debug, Clone, PartialEq)]
pub struct Chat {
    /// Objects with `role` and `content`, as in the OpenAI format.
    pub messages: Vec<Value>,
    pub tools: Option<Value>,
    /// Assistant messages before this index belong to a prompt and are not trained.
    pub first_trained: usize,
}

/// The fields that a format needs, as messages show them.
fn shape(format: RowFormat) -> &'static str {
    match format {
        RowFormat::Auto => "messages | conversations | prompt, completion | instruction, output | text",
        RowFormat::Messages => "messages: [{role, content}, ...]",
        RowFormat::PromptCompletion => "prompt, completion",
        RowFormat::Alpaca => "instruction, output (and input, system, history, tools)",
        RowFormat::Sharegpt => "conversations: [{from, value}, ...]",
        RowFormat::Text => "text",
        RowFormat::Preference => "prompt, chosen, rejected",
        RowFormat::Prompt => "prompt",
    }
}

pub(super) fn names(fields: &Map<String, Value>) -> String {
    match fields.is_empty() {
        true => "no fields".to_string(),
        false => format!("fields {}", fields.keys().cloned().collect::<Vec<_>>().join(", ")),
    }
}

/// The format of a file, from its first row.
///
/// Errors: no known set of fields is there, or the rows are for another kind of training.
pub fn detect(row: &Row) -> Result<RowFormat> {
    let has = |name: &str| row.fields.get(name).is_some_and(|v| !v.is_null());
    let format = if has("messages") {
        RowFormat::Messages
    } else if has("conversations") {
        RowFormat::Sharegpt
    } else if has("prompt") && has("completion") {
        RowFormat::PromptCompletion
    } else if has("instruction") && has("output") {
        RowFormat::Alpaca
    } else if has("text") {
        RowFormat::Text
    } else if has("chosen") && has("rejected") {
        RowFormat::Preference
    } else {
        return Err(Error::new("cannot tell the format of the rows")
            .at(&row.place)
            .found(names(&row.fields))
            .expected(shape(RowFormat::Auto))
            .hint("rename the fields, or set `data.format`"));
    };
    supported(format).map_err(|e| e.or_at(&row.place).found(names(&row.fields)))
}

fn supported(format: RowFormat) -> Result<RowFormat> {
    match format {
        RowFormat::Preference | RowFormat::Prompt => Err(Error::new(format!(
            "rows of format `{}` cannot be learned from directly",
            format.name()
        ))
        .expected(shape(RowFormat::Auto))
        .hint("use rows with an answer for stages `sft` and `pretrain`; pairs are for `dpo` and `reward`")),
        other => Ok(other),
    }
}

/// Reads a row as `format` (not `auto`).
///
/// Errors, with the place of the row: a field is missing or has another type, a role is unknown.
pub fn understand(row: &Row, format: RowFormat) -> Result<Sample> {
    let fields = &row.fields;
    let sample = supported(format).and_then(|format| match format {
        RowFormat::Text => Ok(Sample::Text(text(fields, "text", format)?.to_string())),
        RowFormat::PromptCompletion => prompt_completion(fields),
        RowFormat::Messages => {
            let messages = chat::messages(&list(fields, "messages", format)?)?;
            conversation(messages, fields, 0)
        }
        RowFormat::Alpaca => alpaca(fields),
        RowFormat::Sharegpt => {
            let mut messages = chat::sharegpt(&list(fields, "conversations", format)?)?;
            if let Some(system) = optional(fields, "system")? {
                messages.insert(0, chat::message("system", system));
            }
            conversation(messages, fields, 0)
        }
        other => detect(row).and_then(|_| Err(Error::new(format!("format `{}` is not a row format", other.name())))),
    });
    sample.map_err(|e| e.or_at(&row.place))
}

fn conversation(messages: Vec<Value>, fields: &Map<String, Value>, first_trained: usize) -> Result<Sample> {
    chat::check_order(&messages)?;
    Ok(Sample::Chat(Chat {
        messages,
        tools: tools(fields)?,
        first_trained,
    }))
}

pub(super) fn missing(fields: &Map<String, Value>, name: &str, format: RowFormat) -> Error {
    let what = match fields.get(name) {
        Some(_) => format!("field `{name}` is null"),
        None => format!("field `{name}` is missing"),
    };
    Error::new(what)
        .found(names(fields))
        .expected(shape(format))
        .hint("every row of a file has the same fields; set `data.format` if this is another format")
}

fn text<'a>(fields: &'a Map<String, Value>, name: &str, format: RowFormat) -> Result<&'a str> {
    match fields.get(name) {
        None | Some(Value::Null) => Err(missing(fields, name, format)),
        Some(value) => string(value, name),
    }
}

pub(super) fn string<'a>(value: &'a Value, name: &str) -> Result<&'a str> {
    value.as_str().ok_or_else(|| wrong(value, name, "a string"))
}

pub(super) fn wrong(value: &Value, name: &str, expected: &str) -> Error {
    Error::new(format!("field `{name}` has the wrong type"))
        .found(format!("{}: {}", kind(value), clip(&value.to_string())))
        .expected(expected)
}

/// A text that may be missing, null or empty.
fn optional<'a>(fields: &'a Map<String, Value>, name: &str) -> Result<Option<&'a str>> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => Ok(Some(string(value, name)?).filter(|s| !s.is_empty())),
    }
}

/// A list, also one written as JSON text (csv has no lists).
pub(super) fn list(fields: &Map<String, Value>, name: &str, format: RowFormat) -> Result<Vec<Value>> {
    let value = match fields.get(name) {
        None | Some(Value::Null) => return Err(missing(fields, name, format)),
        Some(value) => value,
    };
    match value {
        Value::Array(list) => Ok(list.clone()),
        Value::String(s) if s.trim_start().starts_with('[') => match serde_json::from_str(s) {
            Ok(Value::Array(list)) => Ok(list),
            _ => Err(wrong(value, name, "a list (the text is not valid JSON)")),
        },
        other => Err(wrong(other, name, "a list")),
    }
}

/// A list of messages, also one written as JSON text.
pub(super) fn is_chat(value: &Value) -> bool {
    match value {
        Value::Array(_) => true,
        Value::String(s) => {
            s.trim_start().starts_with('[')
                && serde_json::from_str::<Vec<Value>>(s)
                    .is_ok_and(|l| !l.is_empty() && l.iter().all(|m| m.get("role").is_some()))
        }
        _ => false,
    }
}

/// Tools: a list of JSON schemas, or the same as JSON text. An empty list is no tools.
pub(super) fn tools(fields: &Map<String, Value>) -> Result<Option<Value>> {
    match fields.get("tools") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(s)) if s.trim().is_empty() => Ok(None),
        Some(_) => {
            let list = list(fields, "tools", RowFormat::Messages)?;
            Ok((!list.is_empty()).then_some(Value::Array(list)))
        }
    }
}

/// Are prompt and completion conversations? Errors: one is, the other is text.
pub(super) fn are_chats(prompt: &Value, completion: &Value) -> Result<bool> {
    match (is_chat(prompt), is_chat(completion)) {
        (a, b) if a == b => Ok(a),
        _ => Err(Error::new("`prompt` and `completion` are of different kinds")
            .found(format!("{} and {}", kind(prompt), kind(completion)))
            .expected("two strings or two lists of messages")),
    }
}

fn prompt_completion(fields: &Map<String, Value>) -> Result<Sample> {
    let format = RowFormat::PromptCompletion;
    let field = |name: &str| match fields.get(name) {
        None | Some(Value::Null) => Err(missing(fields, name, format)),
        Some(value) => Ok(value),
    };
    if are_chats(field("prompt")?, field("completion")?)? {
        let mut messages = chat::messages(&list(fields, "prompt", format)?)?;
        let first_trained = messages.len();
        messages.extend(chat::messages(&list(fields, "completion", format)?)?);
        return conversation(messages, fields, first_trained);
    }
    Ok(Sample::PromptCompletion {
        prompt: text(fields, "prompt", format)?.to_string(),
        completion: text(fields, "completion", format)?.to_string(),
    })
}

fn alpaca(fields: &Map<String, Value>) -> Result<Sample> {
    let format = RowFormat::Alpaca;
    let mut messages = Vec::new();
    if let Some(system) = optional(fields, "system")? {
        messages.push(chat::message("system", system));
    }
    let history = match fields.get("history") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::String(s)) if s.trim().is_empty() => Vec::new(),
        Some(_) => list(fields, "history", format)?,
    };
    for turn in &history {
        let pair = turn.as_array().map(Vec::as_slice);
        let Some([Value::String(question), Value::String(answer)]) = pair else {
            return Err(wrong(turn, "history", "pairs of strings: [[question, answer], ...]"));
        };
        messages.push(chat::message("user", question));
        messages.push(chat::message("assistant", answer));
    }
    let mut instruction = text(fields, "instruction", format)?.to_string();
    if let Some(input) = optional(fields, "input")? {
        if !instruction.is_empty() {
            instruction.push('\n');
        }
        instruction.push_str(input);
    }
    messages.push(chat::message("user", &instruction));
    messages.push(chat::message("assistant", text(fields, "output", format)?));
    conversation(messages, fields, 0)
}
