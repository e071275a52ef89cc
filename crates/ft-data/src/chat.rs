//! Checks the messages of a conversation and converts them to the form that chat templates use.

use super::read::{clip, kind};
use super::rows::label;
use ft_base::{Error, Result};
use serde_json::{Map, Value, json};
use std::borrow::Cow;

const ROLES: [&str; 7] = [
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
    "ipython",
];

/// Fields that say whether the answer of a message is trained: those of OpenAI, Axolotl (two names) and ms-swift.
const WEIGHTS: [&str; 4] = ["weight", "train", "training", "loss"];

/// Messages in the form of chat templates.
#[derive(Debug)]
pub(super) struct Turns {
    pub messages: Vec<Value>,
    /// Indices of assistant messages whose weight is 0.
    pub untrained: Vec<usize>,
    /// The first assistant message whose weight is not 0 or 1: an error only where weights are used.
    pub fault: Option<Error>,
}

impl Turns {
    pub(super) fn of(messages: Vec<Value>) -> Self {
        Self {
            messages,
            untrained: Vec::new(),
            fault: None,
        }
    }
}

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
pub(super) fn messages(list: &[Value]) -> Result<Turns> {
    turns(list, one)
}

/// Converts ShareGPT turns `{from, value}` (or `{role, content}`) to messages. Other fields of a turn stay.
pub(super) fn sharegpt(list: &[Value]) -> Result<Turns> {
    turns(list, shared)
}

fn turns(list: &[Value], read: fn(usize, &Value) -> Result<Value>) -> Result<Turns> {
    if list.is_empty() {
        return Err(Error::format("the conversation is empty").expected("at least one message"));
    }
    let mut out = Turns::of(Vec::with_capacity(list.len()));
    for (i, turn) in list.iter().enumerate() {
        let turn = with_calls(i, turn)?;
        let mut message = read(i, &turn)?;
        let weight = take_weight(i, &mut message);
        if role(&message) == "assistant" {
            match weight {
                Ok(true) => {}
                Ok(false) => out.untrained.push(i),
                Err(e) => {
                    out.fault.get_or_insert(e);
                }
            }
        }
        out.messages.push(message);
    }
    Ok(out)
}

/// The turn with its calls as a list, if they are JSON text (as columns of csv have them). Text without a call is
/// removed, and so is an empty list: templates that look for the field would print it, or refuse it.
fn with_calls(i: usize, turn: &Value) -> Result<Cow<'_, Value>> {
    let found = turn.get("tool_calls");
    let calls = match found {
        Some(Value::String(text)) => called(text),
        Some(Value::Array(list)) if list.is_empty() => Some(Vec::new()),
        _ => return Ok(Cow::Borrowed(turn)),
    };
    let calls = calls.ok_or_else(|| {
        bad(i, "has `tool_calls` that cannot be read")
            .found(clip(found.and_then(Value::as_str).unwrap_or_default()))
            .expected(
                "a list of calls, or the same as JSON text: [{\"function\": {\"name\": ..., \"arguments\": ...}}]",
            )
    })?;
    let mut turn = turn.clone();
    if let Value::Object(fields) = &mut turn {
        if calls.is_empty() {
            fields.retain(|name, _| name != "tool_calls");
        } else {
            fields.insert("tool_calls".to_string(), calls.into());
        }
    }
    Ok(Cow::Owned(turn))
}

/// The calls of a JSON text, which may be blank. `None`: it is no list of objects.
pub(super) fn called(text: &str) -> Option<Vec<Value>> {
    match text.trim() {
        "" | "null" => Some(Vec::new()),
        text => {
            let calls: Vec<Value> = serde_json::from_str(text).ok()?;
            calls.iter().all(Value::is_object).then_some(calls)
        }
    }
}

/// Removes the fields that say whether a message is trained, which are not for the template; returns whether it is.
fn take_weight(i: usize, message: &mut Value) -> Result<bool> {
    let trained = weight(i, message);
    if let Value::Object(fields) = message {
        fields.retain(|name, _| !WEIGHTS.contains(&name.as_str()));
    }
    trained
}

/// Whether a message is trained, by its fields. Errors: one of them is not 0 or 1.
fn weight(i: usize, message: &Value) -> Result<bool> {
    let mut trained = true;
    for name in WEIGHTS {
        let Some(value) = message.get(name).filter(|v| !v.is_null()) else {
            continue;
        };
        // A number is the loss of some model.
        if name == "loss" && !value.is_boolean() {
            continue;
        }
        let number = || match value.as_str()?.trim().parse::<f64>() {
            Ok(1.0) => Some(true),
            Ok(0.0) => Some(false),
            _ => None,
        };
        trained &= label(value).or_else(number).ok_or_else(|| {
            bad(i, format!("has a `{name}` that is not 0 or 1"))
                .found(clip(&value.to_string()))
                .expected("0 or false (the answer is not trained), 1 or true (it is), or null")
                .hint(format!(
                    "round it to 0 or 1; if `{name}` means something else, remove or rename it"
                ))
        })?;
    }
    Ok(trained)
}

/// True for a message of the assistant, as it is in a row, that its weight excludes from the training.
pub(super) fn is_untrained(message: &Value) -> bool {
    let name = ["role", "from"].iter().find_map(|key| message.get(*key)?.as_str());
    let answers = name.is_some_and(|name| name == "function_call" || standard(name) == Some("assistant"));
    answers && weight(0, message).is_ok_and(|trained| !trained)
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

/// Converts a ShareGPT turn to a message.
fn shared(i: usize, turn: &Value) -> Result<Value> {
    let (Value::Object(fields), Some(from)) = (turn, turn.get("from")) else {
        if turn.get("role").is_some() {
            return one(i, turn);
        }
        return Err(bad(i, "has no `from`")
            .found(clip(&turn.to_string()))
            .expected("{\"from\": \"human\" or \"gpt\", \"value\": ...}"));
    };
    let has_calls = fields
        .get("tool_calls")
        .and_then(Value::as_array)
        .is_some_and(|calls| !calls.is_empty());
    let text = match fields.get("value").unwrap_or(&Value::Null) {
        Value::String(text) => Some(text.as_str()),
        Value::Null if has_calls => None,
        value => {
            return Err(bad(i, "has a `value` that is not text")
                .found(kind(value))
                .expected("a string"));
        }
    };
    let name = from.as_str().unwrap_or_default();
    let mut out = Map::new();
    let mut written = None;
    let (role, text) = match (standard(name).unwrap_or(name), text) {
        (role @ ("user" | "assistant" | "system" | "tool"), text) => (role, text),
        ("function", text) => ("tool", text),
        ("function_call", None) => ("assistant", None),
        ("function_call", Some(text)) => {
            written = Some(calls(i, text)?);
            ("assistant", Some(""))
        }
        _ => {
            return Err(bad(i, "has an unknown `from`")
                .found(clip(&from.to_string()))
                .expected("human, gpt, system, tool, function_call")
                .hint(format!(
                    "write `Mapping::roles = {{ {} = \"user\" }}`, or another of system, user, assistant, tool",
                    Value::from(clip(name))
                )));
        }
    };
    out.insert("role".into(), role.into());
    out.extend(text.map(|text| ("content".to_string(), text.into())));
    let others = fields
        .iter()
        .filter(|(name, _)| !["from", "value", "role", "content"].contains(&name.as_str()));
    out.extend(others.map(|(name, value)| (name.clone(), value.clone())));
    out.extend(written.map(|calls| ("tool_calls".to_string(), calls)));
    one(i, &Value::Object(out))
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
fn calls(i: usize, text: &str) -> Result<Value> {
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
    Ok(calls
        .into_iter()
        .map(|function| json!({"type": "function", "function": function}))
        .collect())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RowFormat;
    use crate::rows::{Chat, Sample};
    use crate::testing::{row, understand};

    fn shown(turns: &[Value]) -> Vec<Value> {
        sharegpt(turns).unwrap().messages
    }

    fn chat(value: Value, format: RowFormat) -> Chat {
        match understand(&row(value), format).unwrap() {
            Sample::Chat(chat) => chat,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_sharegpt_turn_keeps_its_other_fields() {
        let turns = [
            json!({"from": "human", "value": "2+2?", "name": "Ada", "lang": null}),
            json!({"from": "gpt", "value": "4", "reasoning_content": "two and two", "content": "x", "role": "user"}),
            json!({"from": "gpt", "value": null, "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\": 1}"}}]}),
            json!({"from": "observation", "value": "noon", "tool_call_id": "c1"}),
        ];
        let expected = [
            json!({"role": "user", "content": "2+2?", "name": "Ada"}),
            json!({"role": "assistant", "content": "4", "reasoning_content": "two and two"}),
            json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}),
            json!({"role": "tool", "content": "noon", "tool_call_id": "c1"}),
        ];
        assert_eq!(shown(&turns), expected);
    }

    #[test]
    fn arguments_of_a_sharegpt_call_become_what_templates_print() {
        let call = r#"[{"name": "f", "arguments": "{\"a\": 1}"}, {"name": "g", "arguments": {"b": null}}]"#;
        let found = shown(&[json!({"from": "function_call", "value": call, "reasoning_content": "so"})]);
        let expected = json!({"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
            {"type": "function", "function": {"name": "g", "arguments": {"b": null}}}]});
        assert_eq!(found, [expected]);
    }

    #[test]
    fn plain_tools_are_wrapped_in_sharegpt_rows_only() {
        let wrapped = json!({"type": "function", "function": {"name": "f", "parameters": {}}});
        let tools = json!([{"name": "f", "parameters": {}}, wrapped]);
        let turns = json!([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]);
        let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
        for list in [turns.clone(), Value::String(turns.to_string())] {
            for tools in [tools.clone(), Value::String(tools.to_string())] {
                let chat = chat(json!({"conversations": list, "tools": tools}), RowFormat::Sharegpt);
                assert_eq!(chat.tools, Some(json!([wrapped, wrapped])));
            }
        }
        let chat = chat(json!({"messages": messages, "tools": tools}), RowFormat::Messages);
        assert_eq!(chat.tools, Some(tools));
    }

    #[test]
    fn a_weight_of_0_is_remembered_and_no_template_sees_it() {
        for (name, off, on) in [
            ("weight", json!(0), json!(1)),
            ("weight", json!(0.0), json!(1.0)),
            ("train", json!(false), json!(true)),
            ("training", json!(false), Value::Null),
            ("loss", json!(false), json!(true)),
        ] {
            let messages = json!([
                {"role": "user", "content": "a", name: off}, {"role": "assistant", "content": "b", name: off},
                {"role": "user", "content": "c", name: on}, {"role": "assistant", "content": "d", name: on}]);
            let turns = json!([
                {"from": "human", "value": "a", name: off}, {"from": "gpt", "value": "b", name: off},
                {"from": "human", "value": "c", name: on}, {"from": "gpt", "value": "d", name: on}]);
            let plain = json!([
                {"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]);
            for (list, format) in [(&messages, RowFormat::Messages), (&turns, RowFormat::Sharegpt)] {
                let chat = chat(json!({"messages": list, "system": "s"}), format);
                assert_eq!(Value::Array(chat.messages), plain, "{name}");
                assert_eq!(chat.untrained, [2], "{name}");
            }
            let answered =
                json!({"prompt": [messages[0]], "completion": [messages[1], messages[2], messages[3]], "system": "s"});
            let chat = chat(answered, RowFormat::PromptCompletion);
            assert_eq!((chat.first_trained, chat.untrained), (2, vec![2]), "{name}");
            assert_eq!(Value::Array(chat.messages), plain, "{name}");
        }
    }

    #[test]
    fn a_weight_that_is_a_text_is_a_number_too() {
        for (off, on) in [("0", "1"), ("0.0", " 1.0 "), ("false", "True")] {
            let list = json!([
                {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": off},
                {"role": "assistant", "content": "c", "weight": on}]);
            let chat = chat(json!({"messages": list}), RowFormat::Messages);
            assert_eq!(chat.untrained, [1], "{off} {on}");
        }
    }

    #[test]
    fn weights_that_nothing_uses_are_removed_and_not_checked() {
        let with = |mut message: Value, weight: f64| {
            message["weight"] = json!(weight);
            message
        };
        let (question, answer) = (
            json!({"role": "user", "content": "a"}),
            json!({"role": "assistant", "content": "b"}),
        );
        // Of a question; of an answer in a prompt.
        let asked = json!({"messages": [with(question.clone(), 0.5), answer]});
        let prompt = [question.clone(), with(answer.clone(), 0.5), question.clone()];
        let completed = json!({"prompt": prompt, "completion": [answer]});
        for (row, format) in [(asked, RowFormat::Messages), (completed, RowFormat::PromptCompletion)] {
            let chat = chat(row, format);
            assert!(chat.messages.iter().all(|m| m.get("weight").is_none()), "{chat:?}");
            assert!(chat.untrained.is_empty());
        }
        // The same answer where it is trained.
        let e = understand(&row(json!({"instruction": prompt, "output": "b"})), RowFormat::Alpaca);
        assert!(e.unwrap_err().to_string().contains("message 2 has a `weight`"));
    }

    #[test]
    fn weights_in_the_prompt_of_an_alpaca_row_are_used() {
        let prompt = [
            json!({"role": "user", "content": "a"}),
            json!({"role": "assistant", "content": "b", "weight": 0}),
            json!({"role": "user", "content": "c"}),
        ];
        for (row, untrained) in [
            (json!({"instruction": prompt, "output": "d"}), 1),
            (json!({"instruction": prompt, "output": "d", "system": "s"}), 2),
        ] {
            let chat = chat(row, RowFormat::Alpaca);
            assert_eq!((chat.first_trained, chat.untrained), (0, vec![untrained]));
        }
    }

    #[test]
    fn calls_that_are_json_text_become_a_list() {
        let call = json!([{"function": {"name": "f", "arguments": {"a": 1}}}]);
        let text = json!(r#"[{"function": {"name": "f", "arguments": "{\"a\": 1}"}}]"#);
        let read = |calls: &Value, content: Value| {
            let turns = [json!({"from": "gpt", "value": content, "tool_calls": calls})];
            let list = [json!({"role": "assistant", "content": content, "tool_calls": calls})];
            let (shared, own) = (sharegpt(&turns), messages(&list));
            [shared, own].map(|turns| turns.map(|turns| turns.messages[0].clone()))
        };
        for found in read(&text, json!("hi")).into_iter().chain(read(&text, Value::Null)) {
            assert_eq!(found.unwrap()["tool_calls"], call);
        }
        for found in read(&json!([]), json!("hi")) {
            assert!(found.unwrap().get("tool_calls").is_none());
        }
        for none in ["", " ", "[]", " [ ] ", "null"] {
            for found in read(&json!(none), json!("hi")) {
                assert_eq!(found.unwrap(), message("assistant", "hi"), "{none:?}");
            }
        }
        for other in ["f(1)", "{\"name\": \"f\"}", "[1]", "[{]"] {
            for found in read(&json!(other), json!("hi")) {
                let e = found.unwrap_err().to_string();
                assert!(e.contains("message 1 has `tool_calls`") && e.contains(other), "{e}");
            }
        }
    }

    #[test]
    fn a_number_under_the_name_loss_is_no_weight() {
        let list = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "loss": 0.0}]);
        let turns = messages(list.as_array().unwrap()).unwrap();
        assert!(turns.untrained.is_empty() && turns.fault.is_none());
        assert!(turns.messages[1].get("loss").is_none());
    }

    #[test]
    fn other_weights_are_refused_with_their_row_and_message() {
        for (name, value) in [("weight", json!(0.5)), ("weight", json!(2)), ("train", json!("a"))] {
            let list = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: value}]);
            let e = understand(&row(json!({"messages": list})), RowFormat::Messages)
                .unwrap_err()
                .to_string();
            for part in [
                "t.jsonl:3",
                "message 2",
                &format!("`{name}`"),
                &value.to_string(),
                "hint:",
            ] {
                assert!(e.contains(part), "no {part:?} in: {e}");
            }
        }
    }
}
