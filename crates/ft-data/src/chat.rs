//! Checks the messages of a conversation and converts them to the form that chat templates use.

use super::read::{clip, kind};
use ft_base::{Error, Result};
use serde_json::{Map, Value, json};

const ROLES: [&str; 7] = [
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
    "ipython",
];

pub(super) fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

pub(super) fn role(message: &Value) -> &str {
    message.get("role").and_then(Value::as_str).unwrap_or_default()
}

/// The text of a message; empty if there is none.
pub(super) fn content(message: &Value) -> &str {
    message.get("content").and_then(Value::as_str).unwrap_or_default()
}

fn bad(index: usize, what: impl std::fmt::Display) -> Error {
    Error::format(format!("message {} {what}", index + 1))
}

/// Checks `[{role, content, ...}]`. Drops null fields of a message, as transformers does: columnar files add them, and
/// templates print them. Concatenates content that is given as text parts.
pub(super) fn messages(list: &[Value]) -> Result<Vec<Value>> {
    if list.is_empty() {
        return Err(Error::format("the conversation is empty").expected("at least one message"));
    }
    list.iter().enumerate().map(|(i, m)| one(i, m)).collect()
}

fn one(i: usize, value: &Value) -> Result<Value> {
    let Value::Object(fields) = value else {
        return Err(bad(i, "is not an object")
            .found(format!("{}: {}", kind(value), clip(&value.to_string())))
            .expected("{\"role\": ..., \"content\": ...}"));
    };
    let mut out: Map<String, Value> = fields
        .iter()
        .filter(|(_, v)| !v.is_null())
        .map(|(k, v)| (k.clone(), v.clone()))
        .collect();
    let role = match out.get("role") {
        Some(Value::String(role)) => standard(role).map_or(role.clone(), str::to_string),
        Some(other) => return Err(bad(i, "has a role that is not a string").found(kind(other))),
        None => {
            let names: Vec<&str> = fields.keys().map(String::as_str).collect();
            let error = bad(i, "has no `role`")
                .found(format!("fields {}", names.join(", ")))
                .expected("role, content");
            return Err(match &names[..] {
                _ if fields.contains_key("from") => {
                    error.hint("set `RowFormat::Sharegpt` to read the fields `from` and `value`")
                }
                [role, content, ..] => error.hint(format!(
                    "name the fields of a message: `Mapping::columns = {{ role = \"{role}\", content = \"{content}\" }}`"
                )),
                _ => error,
            });
        }
    };
    if !ROLES.contains(&role.as_str()) {
        let error = bad(i, "has an unknown role")
            .found(format!("`{}`", clip(&role)))
            .expected(ROLES.join(", "));
        return Err(error.hint(format!(
            "write `Mapping::roles = {{ {} = \"user\" }}`, or another of system, user, assistant, tool",
            Value::from(clip(&role))
        )));
    }
    out.insert("role".into(), Value::String(role.clone()));
    let calls = out
        .get("tool_calls")
        .and_then(Value::as_array)
        .is_some_and(|c| !c.is_empty());
    if let Some(Value::Array(calls)) = out.get_mut("tool_calls") {
        calls.iter_mut().for_each(open_arguments);
    }
    match out.get("content") {
        Some(Value::String(_)) => {}
        Some(Value::Array(parts)) => {
            let text = join_parts(i, parts)?;
            out.insert("content".into(), Value::String(text));
        }
        None if calls && role == "assistant" => {}
        None => {
            let what = if fields.contains_key("content") {
                "has null `content`"
            } else {
                "has no `content`"
            };
            return Err(bad(i, what)
                .found(format!("role `{role}` without tool calls"))
                .expected("a string; only an assistant message with `tool_calls` may have none"));
        }
        Some(other) => {
            return Err(bad(i, "has `content` that is not text")
                .found(format!("{}: {}", kind(other), clip(&other.to_string())))
                .expected("a string"));
        }
    }
    Ok(Value::Object(out))
}

/// Parses call arguments given as JSON text (as in the OpenAI API) to the object that chat templates print; text would
/// be quoted a second time.
fn open_arguments(call: &mut Value) {
    let holder = match call.get("function") {
        Some(Value::Object(_)) => &mut call["function"],
        _ => call,
    };
    if let Some(Value::String(text)) = holder.get("arguments")
        && let Ok(object @ Value::Object(_)) = serde_json::from_str::<Value>(text)
    {
        holder["arguments"] = object;
    }
}

fn join_parts(i: usize, parts: &[Value]) -> Result<String> {
    let mut text = String::new();
    for part in parts {
        let is_text = part.get("type").and_then(Value::as_str) == Some("text");
        match part.get("text").and_then(Value::as_str).filter(|_| is_text) {
            Some(piece) => text.push_str(piece),
            None => {
                return Err(bad(i, "has `content` with a part that is not text")
                    .found(clip(&part.to_string()))
                    .expected("parts {\"type\": \"text\", \"text\": ...}; images and audio are not supported"));
            }
        }
    }
    Ok(text)
}

/// Converts ShareGPT turns `{from, value}` (or `{role, content}`) to messages.
pub(super) fn sharegpt(list: &[Value]) -> Result<Vec<Value>> {
    let mut out = Vec::with_capacity(list.len());
    for (i, turn) in list.iter().enumerate() {
        let Some(from) = turn.get("from") else {
            if turn.get("role").is_some() {
                out.push(one(i, turn)?);
                continue;
            }
            return Err(bad(i, "has no `from`")
                .found(clip(&turn.to_string()))
                .expected("{\"from\": \"human\" or \"gpt\", \"value\": ...}"));
        };
        let value = turn.get("value").unwrap_or(&Value::Null);
        let Some(text) = value.as_str() else {
            return Err(bad(i, "has a `value` that is not text")
                .found(kind(value))
                .expected("a string"));
        };
        let name = from.as_str().unwrap_or_default();
        out.push(match standard(name).unwrap_or(name) {
            role @ ("user" | "assistant" | "system" | "tool") => message(role, text),
            "function" => message("tool", text),
            "function_call" => call(i, text)?,
            _ => {
                return Err(bad(i, "has an unknown `from`")
                    .found(clip(&from.to_string()))
                    .expected("human, gpt, system, tool, function_call")
                    .hint(format!(
                        "write `Mapping::roles = {{ {} = \"user\" }}`, or another of system, user, assistant, tool",
                        Value::from(clip(name))
                    )));
            }
        });
    }
    if out.is_empty() {
        return Err(Error::format("the conversation is empty").expected("at least one message"));
    }
    Ok(out)
}

/// The standard role (`system`, `user`, ...) of a role name, without regard to case. Usual other names (`human`, `gpt`)
/// have one too.
fn standard(name: &str) -> Option<&'static str> {
    let lower = name.to_ascii_lowercase();
    let known = ROLES.into_iter().find(|role| *role == lower);
    known.or_else(|| sharegpt_role(name))
}

/// The standard role of a ShareGPT role name.
fn sharegpt_role(name: &str) -> Option<&'static str> {
    match name.to_ascii_lowercase().as_str() {
        "human" => Some("user"),
        "gpt" | "chatgpt" | "bot" | "model" | "bing" | "bard" | "ai" | "chatbot" => Some("assistant"),
        "observation" | "function_response" => Some("tool"),
        _ => None,
    }
}

/// Parses a call written as `{"name", "arguments"}`, or a list of them.
fn call(i: usize, text: &str) -> Result<Value> {
    let calls = match serde_json::from_str::<Value>(text) {
        Ok(Value::Array(list)) => list,
        Ok(value @ Value::Object(_)) => vec![value],
        _ => Vec::new(),
    };
    if calls.is_empty() || calls.iter().any(|c| !c.get("name").is_some_and(Value::is_string)) {
        return Err(bad(i, "is a function call that cannot be read")
            .found(clip(text))
            .expected("{\"name\": ..., \"arguments\": {...}}"));
    }
    let calls: Vec<Value> = calls
        .into_iter()
        .map(|function| json!({"type": "function", "function": function}))
        .collect();
    Ok(json!({"role": "assistant", "content": "", "tool_calls": calls}))
}

/// Refuses orders of roles that are wrong for every template; a template may refuse more.
pub(super) fn check_order(messages: &[Value]) -> Result<()> {
    for (i, m) in messages.iter().enumerate() {
        let before = i.checked_sub(1).map(|j| role(&messages[j]));
        match (role(m), before) {
            ("tool" | "function" | "ipython", None | Some("system" | "developer" | "user")) => {
                return Err(bad(i, "is a tool result without an earlier tool call of the assistant")
                    .found(format!(
                        "`{}` after {}",
                        role(m),
                        before.map_or("nothing".into(), |b| format!("`{b}`"))
                    ))
                    .expected("an assistant message before it"));
            }
            ("system" | "developer", Some("user" | "assistant" | "tool" | "function" | "ipython")) => {
                return Err(bad(i, "is a system message in the middle of the conversation")
                    .found(format!("`{}` after `{}`", role(m), before.unwrap_or_default()))
                    .expected("system messages first"));
            }
            _ => {}
        }
    }
    Ok(())
}
