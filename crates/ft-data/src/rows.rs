//! Row formats: interprets the fields of a row as one of three samples.

use super::chat::{self, Turns};
use super::layout::{self, ColumnLayout};
use super::read::{Row, clip, kind};
use crate::RowFormat;
use ft_base::{Error, Result};
use serde_json::{Map, Value, json};

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
    /// Indices of assistant messages behind it that are not trained either: their weight in the row is 0.
    pub untrained: Vec<usize>,
}

impl Chat {
    /// True if the last answer is one that the row excludes from the training.
    pub(crate) fn ends_untrained(&self) -> bool {
        let last = self.messages.iter().rposition(|m| chat::role(m) == "assistant");
        last.is_some_and(|i| self.untrained.contains(&i))
    }
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
    interpret(row, layout, true)
}

/// As `understand`, for stages that do not use weights: one that is not 0 or 1 is no error.
pub(super) fn unweighed(row: &Row, layout: &ColumnLayout) -> Result<Sample> {
    interpret(row, layout, false)
}

fn interpret(row: &Row, layout: &ColumnLayout, weighs: bool) -> Result<Sample> {
    let sample = || match layout.format {
        RowFormat::Text => Ok(Sample::Text(text(&row.fields, "text", layout.format)?.to_string())),
        RowFormat::Messages | RowFormat::Sharegpt => {
            refuse_rejected(&row.fields)?;
            let name = layout.list.as_deref().unwrap_or("messages");
            let list = list(&row.fields, name, layout.format)?;
            let turns = match layout.format {
                RowFormat::Messages => chat::messages(&list)?,
                _ => chat::sharegpt(&list)?,
            };
            let turns = weighed_with_system(turns, &row.fields, layout)?;
            check_weights(weighs, turns.fault)?;
            conversation(turns.messages, &row.fields, 0, turns.untrained)
        }
        _ => {
            refuse_rejected(&row.fields)?;
            pair(&row.fields, layout, weighs)
        }
    };
    sample().map_err(|e| e.within(&row.place))
}

/// Errors: the fault, if weights are used.
fn check_weights(weighs: bool, fault: Option<Error>) -> Result<()> {
    fault.filter(|_| weighs).map_or(Ok(()), Err)
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

/// The system message in the columns of a row, with the name of its column.
///
/// Errors: no column has a text, and one has another value; two columns have different texts.
fn system<'a>(fields: &'a Map<String, Value>, layout: &'a ColumnLayout) -> Result<Option<(&'a str, &'a str)>> {
    let mut found: Option<(&str, &str)> = None;
    let mut other_type = None;
    for name in &layout.systems {
        let text = match optional(fields, name) {
            Ok(Some(text)) => text,
            Ok(None) => continue,
            Err(e) => {
                other_type.get_or_insert(e.hint(format!(
                    "make it a text, or remove the column `{name}` if it is not a system message"
                )));
                continue;
            }
        };
        match found {
            Some((first, other)) if other.trim() != text.trim() => {
                return Err(Error::format("the row has two system messages")
                    .found(format!("`{first}`: {}, `{name}`: {}", clip(other), clip(text)))
                    .expected("one")
                    .hint(format!(
                        "write `Mapping::columns = {{ system = \"{first}\" }}` to read this column only"
                    )));
            }
            Some(_) => {}
            None => found = Some((name.as_str(), text)),
        }
    }
    match (found, other_type) {
        (None, Some(e)) => Err(e),
        _ => Ok(found),
    }
}

/// `with_system` for turns with weights.
fn weighed_with_system(turns: Turns, fields: &Map<String, Value>, layout: &ColumnLayout) -> Result<Turns> {
    let (messages, added) = with_system(turns.messages, fields, layout)?;
    Ok(Turns {
        messages,
        untrained: turns.untrained.iter().map(|i| i + usize::from(added)).collect(),
        fault: turns.fault,
    })
}

/// Puts the text of the system column before the messages, if the row has one; also returns whether it did.
///
/// Errors: as `system`; the messages already contain another system message.
pub(super) fn with_system(
    mut messages: Vec<Value>,
    fields: &Map<String, Value>,
    layout: &ColumnLayout,
) -> Result<(Vec<Value>, bool)> {
    let Some((column, system)) = system(fields, layout)? else {
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
            .hint(format!("remove the column `{column}`, or the first message"))),
        None => {
            messages.insert(0, chat::message("system", system));
            Ok((messages, true))
        }
    }
}

/// Errors: the row has a system text, which needs a chat template.
pub(super) fn without_system(fields: &Map<String, Value>, layout: &ColumnLayout) -> Result<()> {
    match system(fields, layout)? {
        None => Ok(()),
        Some((column, text)) => Err(Error::format(format!("plain text cannot contain `{column}`"))
            .found(clip(text))
            .expected("a chat template, which renders it as a system message")
            .hint(format!(
                "set a template with `ChatTemplate::from_file`, or use `Render::Chat`; or put the text into the prompt and \
                 remove `{column}`"
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

fn conversation(
    messages: Vec<Value>,
    fields: &Map<String, Value>,
    first_trained: usize,
    untrained: Vec<usize>,
) -> Result<Sample> {
    chat::check_order(&messages)?;
    Ok(Sample::Chat(Chat {
        messages,
        tools: tools(fields)?,
        first_trained,
        untrained,
    }))
}

/// The hint for a column that a row does not have.
pub(super) const SAME_COLUMNS: &str = "every row of a file must have the columns of its first row";

pub(super) fn missing(fields: &Map<String, Value>, name: &str, format: RowFormat) -> Error {
    let what = match fields.get(name) {
        Some(_) => format!("field `{name}` is null"),
        None => format!("field `{name}` is missing"),
    };
    Error::format(what)
        .found(names(fields))
        .expected(shape(format))
        .hint(SAME_COLUMNS)
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

/// Tools: a list of JSON schemas, or the same as JSON text. An empty list means no tools. In ShareGPT rows the schemas
/// are often plain functions, which LLaMA-Factory wraps: templates print tools as the OpenAI API has them.
pub(super) fn tools(fields: &Map<String, Value>) -> Result<Option<Value>> {
    match fields.get("tools") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(s)) if s.trim().is_empty() => Ok(None),
        Some(_) => {
            let mut list = list(fields, "tools", RowFormat::Messages)?;
            let is_plain = |tool: &Value| {
                tool.get("name").is_some_and(Value::is_string)
                    && tool.get("type").is_none_or(Value::is_null)
                    && tool.get("function").is_none_or(Value::is_null)
            };
            if list.iter().any(is_plain) && is_sharegpt(fields) {
                for tool in list.iter_mut().filter(|tool| is_plain(tool)) {
                    *tool = json!({"type": "function", "function": tool.take()});
                }
            }
            Ok((!list.is_empty()).then_some(Value::Array(list)))
        }
    }
}

/// True if the row has ShareGPT turns, also as JSON text or as the sides of a pair.
fn is_sharegpt(fields: &Map<String, Value>) -> bool {
    let from = |turn: &Value| turn.get("from").is_some();
    let has_from = |value: &Value| match value {
        Value::Array(list) => list.first().is_some_and(from),
        Value::String(text) => {
            text.trim_start().starts_with('[')
                && serde_json::from_str::<Vec<Value>>(text).is_ok_and(|list| list.first().is_some_and(from))
        }
        turn => from(turn),
    };
    let lists = layout::LISTS
        .into_iter()
        .filter(|name| fields.get(*name).is_some_and(|v| !v.is_null()));
    let sides = ["prompt", "completion", "chosen", "rejected"];
    lists.clone().next() == Some("conversations")
        || lists.chain(sides).filter_map(|name| fields.get(name)).any(has_from)
}

/// Fields of a turn that templates are meant to read. Others describe the turn: its `id`, its time, its model.
const SAID: [&str; 8] = [
    "role",
    "content",
    "tool_calls",
    "tool_call_id",
    "name",
    "reasoning_content",
    "reasoning",
    "thinking",
];

/// True if two turns say the same.
pub(super) fn is_same_turn(a: &Value, b: &Value) -> bool {
    SAID.iter().all(|field| a.get(field) == b.get(field))
}

/// The messages of a field: a list (or one written as JSON text), or one message.
pub(super) fn turns(fields: &Map<String, Value>, name: &str, format: RowFormat) -> Result<Vec<Value>> {
    Ok(weighed_turns(fields, name, format)?.messages)
}

fn weighed_turns(fields: &Map<String, Value>, name: &str, format: RowFormat) -> Result<Turns> {
    let list = match fields.get(name) {
        Some(one @ Value::Object(_)) => vec![one.clone()],
        _ => list(fields, name, format)?,
    };
    let messages = if list.first().is_some_and(|m| m.get("from").is_some()) {
        chat::sharegpt(&list)
    } else {
        chat::messages(&list)
    };
    let within = |e: Error| e.within(format!("`{name}`"));
    let turns = messages.map_err(within)?;
    Ok(Turns {
        fault: turns.fault.map(within),
        ..turns
    })
}

/// The messages of an answer: those of the field, or its text as one assistant message.
pub(super) fn answer_turns(fields: &Map<String, Value>, name: &str, format: RowFormat) -> Result<Vec<Value>> {
    Ok(weighed_answer(fields, name, format)?.messages)
}

fn weighed_answer(fields: &Map<String, Value>, name: &str, format: RowFormat) -> Result<Turns> {
    match fields.get(name) {
        Some(value) if layout::is_turns(value) => weighed_turns(fields, name, format),
        _ => {
            let answer = chat::message("assistant", text(fields, name, format)?);
            Ok(Turns::of(vec![answer]))
        }
    }
}

/// The messages before an answer: those of the prompt, or its text as one user message, after system and history.
pub(super) fn prompt_turns(fields: &Map<String, Value>, layout: &ColumnLayout) -> Result<Vec<Value>> {
    Ok(weighed_prompt(fields, layout)?.messages)
}

fn weighed_prompt(fields: &Map<String, Value>, layout: &ColumnLayout) -> Result<Turns> {
    let name = layout.prompt.as_deref().unwrap_or("prompt");
    let turns = match fields.get(name) {
        Some(value) if layout::is_turns(value) => weighed_turns(fields, name, layout.format)?,
        _ => {
            let mut messages = Vec::new();
            if layout.format == RowFormat::Alpaca {
                messages = history(fields, layout.format)?;
            }
            messages.push(chat::message("user", &prompt_text(fields, layout)?));
            Turns::of(messages)
        }
    };
    weighed_with_system(turns, fields, layout)
}

/// A prompt and its answer.
fn pair(fields: &Map<String, Value>, layout: &ColumnLayout, weighs: bool) -> Result<Sample> {
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
        let mut asked = weighed_prompt(fields, layout)?;
        // The answers before the last one of an alpaca row (`history`, or the list of its prompt) are trained too.
        let first_trained = if format == RowFormat::Alpaca {
            check_weights(weighs, asked.fault)?;
            0
        } else {
            asked.untrained.clear();
            asked.messages.len()
        };
        let said = weighed_answer(fields, answer, format)?;
        check_weights(weighs, said.fault)?;
        let (mut messages, mut untrained) = (asked.messages, asked.untrained);
        untrained.extend(said.untrained.iter().map(|i| i + messages.len()));
        messages.extend(said.messages);
        return conversation(messages, fields, first_trained, untrained);
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
