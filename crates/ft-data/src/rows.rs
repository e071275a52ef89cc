//! Row formats: interprets the fields of a row as one of three samples.

use super::chat;
use super::layout::{self, ColumnLayout};
use super::read::{Row, clip, kind};
use crate::RowFormat;
use ft_base::{Error, Result};
use serde_json::{Map, Value};

/// An interpreted row.
#[derive(Debug, Clone, PartialEq)]
pub enum Sample {
    /// Plain text; all of it is trained.
    Text(String),
    /// Only the completion is trained.
    PromptCompletion {
        /// The text before the answer.
        prompt: String,
        /// The answer.
        completion: String,
    },
    /// A conversation for the chat template.
    Chat(Chat),
}

/// A conversation in the form of the chat template.
#[derive(Debug, Clone, PartialEq)]
pub struct Chat {
    /// Objects with `role` and `content`, as in the OpenAI format.
    pub messages: Vec<Value>,
    /// The tools that the conversation declares, for the template.
    pub tools: Option<Value>,
    /// Assistant messages before this index belong to a prompt and are not trained.
    pub first_trained: usize,
}

/// The fields that a format needs, for error messages.
fn shape(format: RowFormat) -> &'static str {
    match format {
        RowFormat::Auto | RowFormat::Messages => "messages: [{role, content}, ...]",
        RowFormat::PromptCompletion => "prompt, completion",
        RowFormat::Alpaca => "instruction, output (and input, context, system, history, tools)",
        RowFormat::Sharegpt => "conversations: [{from, value}, ...]",
        RowFormat::Text => "text",
        RowFormat::Preference => "prompt, chosen, rejected",
        RowFormat::Prompt => "prompt",
    }
}

pub(super) fn names(fields: &Map<String, Value>) -> String {
    if fields.is_empty() {
        "no fields".to_string()
    } else {
        let name = |(name, value): (&String, &Value)| match value {
            Value::Null => format!("{name} (null)"),
            _ => name.clone(),
        };
        format!("fields {}", fields.iter().map(name).collect::<Vec<_>>().join(", "))
    }
}

/// Interprets a row.
///
/// Errors, with the place of the row: a field is missing or has another type, a role is unknown, the answer is marked
/// as a bad one.
pub(crate) fn understand(row: &Row, layout: &ColumnLayout) -> Result<Sample> {
    let sample = || match layout.format {
        RowFormat::Text => Ok(Sample::Text(text(&row.fields, "text", layout.format)?.to_string())),
        RowFormat::Messages | RowFormat::Sharegpt => {
            refuse_rejected(&row.fields)?;
            let name = layout.list.as_deref().unwrap_or("messages");
            let list = list(&row.fields, name, layout.format)?;
            let messages = match layout.format {
                RowFormat::Messages => chat::messages(&list)?,
                _ => chat::sharegpt(&list)?,
            };
            let (messages, _) = with_system(messages, &row.fields, layout)?;
            conversation(messages, &row.fields, 0)
        }
        _ => {
            refuse_rejected(&row.fields)?;
            pair(&row.fields, layout)
        }
    };
    sample().map_err(|e| e.within(&row.place))
}

/// Errors: the answer is marked as undesirable (KTO).
fn refuse_rejected(fields: &Map<String, Value>) -> Result<()> {
    let rejected = |name: &&str| fields.get(*name).is_some_and(|v| label(v) == Some(false));
    match ["label", "kto_tag"].into_iter().find(rejected) {
        None => Ok(()),
        Some(name) => Err(Error::format(format!("the column `{name}` marks this answer as bad"))
            .found(format!("{name}: {}", fields[name]))
            .expected("good answers")
            .hint(format!(
                "`PreferencePart::Judged` trains on good and bad answers; if `{name}` means something else, rename or remove it"
            ))),
    }
}

/// Parses a label: true or 1, false or 0, also as text.
pub(super) fn label(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(label) => Some(*label),
        Value::Number(n) if n.as_f64() == Some(1.0) => Some(true),
        Value::Number(n) if n.as_f64() == Some(0.0) => Some(false),
        Value::String(s) => match s.trim().to_ascii_lowercase().as_str() {
            "true" | "1" => Some(true),
            "false" | "0" => Some(false),
            _ => None,
        },
        _ => None,
    }
}

/// Puts the text of the system column before the messages, if the row has one; also returns whether it did.
///
/// Errors: the messages already contain another system message.
pub(super) fn with_system(
    mut messages: Vec<Value>,
    fields: &Map<String, Value>,
    layout: &ColumnLayout,
) -> Result<(Vec<Value>, bool)> {
    let Some(system) = optional(fields, &layout.system)? else {
        let has_own = messages
            .first()
            .is_some_and(|m| matches!(chat::role(m), "system" | "developer"));
        return Ok(match &layout.system_prompt {
            Some(system) if !has_own => {
                messages.insert(0, chat::message("system", system));
                (messages, true)
            }
            _ => (messages, false),
        });
    };
    match messages
        .first()
        .filter(|m| matches!(chat::role(m), "system" | "developer"))
    {
        Some(own) if chat::content(own).trim() == system.trim() => Ok((messages, false)),
        Some(own) => Err(Error::format("the row has two system messages")
            .found(format!("`{}` and {}", clip(system), clip(chat::content(own))))
            .expected("one")
            .hint(format!("remove the column `{}`, or the first message", layout.system))),
        None => {
            messages.insert(0, chat::message("system", system));
            Ok((messages, true))
        }
    }
}

/// Errors: the row has a system text, which needs a chat template.
pub(super) fn without_system(fields: &Map<String, Value>, layout: &ColumnLayout) -> Result<()> {
    match optional(fields, &layout.system)? {
        None => Ok(()),
        Some(system) => Err(Error::format(format!("plain text cannot contain `{}`", layout.system))
            .found(clip(system))
            .expected("a chat template, which renders it as a system message")
            .hint(format!(
                "set a template with `ChatTemplate::from_file`, or use `Render::Chat`; or put the text into the prompt and \
                 remove `{}`",
                layout.system
            ))),
    }
}

/// The prompt's text, with the text of the columns that are appended to it.
pub(super) fn prompt_text(fields: &Map<String, Value>, layout: &ColumnLayout) -> Result<String> {
    let name = layout.prompt.as_deref().unwrap_or("prompt");
    let mut prompt = text(fields, name, layout.format)?.to_string();
    for extra in &layout.extras {
        if let Some(extra) = optional(fields, extra)? {
            if !prompt.is_empty() {
                prompt.push('\n');
            }
            prompt.push_str(extra);
        }
    }
    Ok(prompt)
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
    Error::format(what)
        .found(names(fields))
        .expected(shape(format))
        .hint("every row of a file must have the columns of its first row")
}

pub(super) fn text<'a>(fields: &'a Map<String, Value>, name: &str, format: RowFormat) -> Result<&'a str> {
    match fields.get(name) {
        None | Some(Value::Null) => Err(missing(fields, name, format)),
        Some(value) => string(value, name),
    }
}

pub(super) fn string<'a>(value: &'a Value, name: &str) -> Result<&'a str> {
    value.as_str().ok_or_else(|| wrong(value, name, "a string"))
}

pub(super) fn wrong(value: &Value, name: &str, expected: &str) -> Error {
    Error::format(format!("field `{name}` has the wrong type"))
        .found(format!("{}: {}", kind(value), clip(&value.to_string())))
        .expected(expected)
}

/// A text that may be missing, null or empty.
pub(super) fn optional<'a>(fields: &'a Map<String, Value>, name: &str) -> Result<Option<&'a str>> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => Ok(Some(string(value, name)?).filter(|s| !s.is_empty())),
    }
}

/// A list, or a list written as JSON text (csv has no lists).
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

/// True for a list of messages, or one written as JSON text.
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

/// Tools: a list of JSON schemas, or the same as JSON text. An empty list means no tools.
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

/// The messages of a field: a list (or one written as JSON text), or one message.
pub(super) fn turns(fields: &Map<String, Value>, name: &str, format: RowFormat) -> Result<Vec<Value>> {
    let list = match fields.get(name) {
        Some(one @ Value::Object(_)) => vec![one.clone()],
        _ => list(fields, name, format)?,
    };
    let messages = if list.first().is_some_and(|m| m.get("from").is_some()) {
        chat::sharegpt(&list)
    } else {
        chat::messages(&list)
    };
    messages.map_err(|e| e.within(format!("`{name}`")))
}

/// The messages of an answer: those of the field, or its text as one assistant message.
pub(super) fn answer_turns(fields: &Map<String, Value>, name: &str, format: RowFormat) -> Result<Vec<Value>> {
    match fields.get(name) {
        Some(value) if layout::is_turns(value) => turns(fields, name, format),
        _ => Ok(vec![chat::message("assistant", text(fields, name, format)?)]),
    }
}

/// The messages before an answer: those of the prompt, or its text as one user message, after system and history.
pub(super) fn prompt_turns(fields: &Map<String, Value>, layout: &ColumnLayout) -> Result<Vec<Value>> {
    let name = layout.prompt.as_deref().unwrap_or("prompt");
    let messages = match fields.get(name) {
        Some(value) if layout::is_turns(value) => turns(fields, name, layout.format)?,
        _ => {
            let mut messages = Vec::new();
            if layout.format == RowFormat::Alpaca {
                messages = history(fields, layout.format)?;
            }
            messages.push(chat::message("user", &prompt_text(fields, layout)?));
            messages
        }
    };
    Ok(with_system(messages, fields, layout)?.0)
}

/// A prompt and its answer.
fn pair(fields: &Map<String, Value>, layout: &ColumnLayout) -> Result<Sample> {
    let format = layout.format;
    let prompt = layout.prompt.as_deref().unwrap_or("prompt");
    let answer = layout.answer.as_deref().unwrap_or("completion");
    let value = |name: &str| match fields.get(name) {
        None | Some(Value::Null) => Err(missing(fields, name, format)),
        Some(value) => Ok(value),
    };
    let (said, answered) = (value(prompt)?, value(answer)?);
    let chats = (layout::is_turns(said), layout::is_turns(answered));
    if layout.renders() || chats.0 {
        let mut messages = prompt_turns(fields, layout)?;
        // The answers in an alpaca row's history are trained too.
        let first_trained = if format == RowFormat::Alpaca { 0 } else { messages.len() };
        messages.extend(answer_turns(fields, answer, format)?);
        return conversation(messages, fields, first_trained);
    }
    if chats.1 {
        return Err(Error::format(format!("`{prompt}` and `{answer}` have different types"))
            .found(format!("{} and {}", kind(said), kind(answered)))
            .expected("two strings or two lists of messages"));
    }
    without_system(fields, layout)?;
    if format == RowFormat::Alpaca && !history(fields, format)?.is_empty() {
        return Err(Error::format("plain text cannot contain `history`")
            .expected("a chat template, which renders it as earlier turns")
            .hint("set a template with `ChatTemplate::from_file`, or use `Render::Chat`"));
    }
    Ok(Sample::PromptCompletion {
        prompt: prompt_text(fields, layout)?,
        completion: text(fields, answer, format)?.to_string(),
    })
}

/// Earlier turns of an alpaca row.
fn history(fields: &Map<String, Value>, format: RowFormat) -> Result<Vec<Value>> {
    let history = match fields.get("history") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::String(s)) if s.trim().is_empty() => Vec::new(),
        Some(_) => list(fields, "history", format)?,
    };
    let mut messages = Vec::with_capacity(2 * history.len());
    for turn in &history {
        let pair = turn.as_array().map(Vec::as_slice);
        let Some([Value::String(question), Value::String(answer)]) = pair else {
            return Err(wrong(turn, "history", "pairs of strings: [[question, answer], ...]"));
        };
        messages.push(chat::message("user", question));
        messages.push(chat::message("assistant", answer));
    }
    Ok(messages)
}
