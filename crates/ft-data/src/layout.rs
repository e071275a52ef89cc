//! The column layout of a file: which columns are read and their roles; determined once, from the first row.
//!
//! Columns are found by name. A row that could be read in two ways is refused with both options; nothing is guessed.
//! Handles names and kinds of values; `rows`, `preference` and `prompts` read the values.

use super::chat;
use super::codec::{ChatRender, TextCodec};
use super::read::Row;
use super::rows::{is_chat, names};
use crate::{Render, RowFormat};
use ft_base::{Error, Result};
use serde_json::{Map, Value};

/// Columns that contain a prompt. `input` is a prompt only if there is no other one; else it is appended to it.
pub(super) const PROMPTS: [&str; 6] = ["prompt", "instruction", "question", "problem", "query", "input"];
/// Columns that contain an answer.
pub(super) const ANSWERS: [&str; 5] = ["completion", "output", "answer", "solution", "response"];
/// Column names that belong together, if a row has several prompts or several answers.
const PAIRS: [(&str, &str); 8] = [
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("problem", "solution"),
    ("query", "response"),
    ("input", "output"),
];
/// Columns whose text is appended to the prompt, except to the column `prompt`, which is complete.
const EXTRAS: [&str; 2] = ["input", "context"];
const SYSTEMS: [&str; 2] = ["system", "system_prompt"];
pub(super) const LISTS: [&str; 3] = ["messages", "conversations", "conversation"];
/// Substrings of column names that may contain a prompt, or a part of one.
const LIKE_A_PROMPT: [&str; 17] = [
    "prompt",
    "question",
    "instruction",
    "problem",
    "query",
    "input",
    "context",
    "system",
    "user",
    "conversation",
    "history",
    "dialog",
    "message",
    "passage",
    "article",
    "document",
    "task",
];

/// Use of the rows of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowPurpose {
    /// Text, answers or conversations to train on.
    Learn,
    /// Answers that are compared or judged.
    Prefer,
    /// Prompts to answer.
    Ask,
}

/// How a prompt and its answer are combined to one text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rendering {
    /// The rows are conversations, or are converted to conversations: the chat template renders them.
    Template,
    /// Plain concatenation, with the reason.
    Plain(&'static str),
    /// Rows of a single text.
    Text,
}

/// Settings and objects that decide the rendering.
pub(crate) struct RenderRules<'a> {
    /// The wanted rendering; `Auto`: by template if the model has one.
    pub render: Render,
    /// The chat template, if the model has one.
    pub template: Option<&'a dyn ChatRender>,
    /// The tokenizer.
    pub codec: &'a dyn TextCodec,
    /// The column with the known answer of a prompt.
    pub answer: &'a str,
}

/// Roles of the columns of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnLayout {
    /// Never `RowFormat::Auto`.
    pub format: RowFormat,
    /// How the rows become text.
    pub rendering: Rendering,
    /// The column with the conversation.
    pub list: Option<String>,
    /// The column with the prompt.
    pub prompt: Option<String>,
    /// Columns whose text is appended to the prompt.
    pub extras: Vec<String>,
    /// The column with the answer.
    pub answer: Option<String>,
    /// Columns that may hold the system message of a row.
    pub systems: Vec<String>,
    /// The system message of rows without one.
    pub system_prompt: Option<String>,
    /// The well-known dataset that has these columns.
    pub preset: Option<&'static str>,
    /// The known answer is the part of its column after this mark.
    pub after: Option<&'static str>,
    /// Columns that are read under another name, with the path of their values in the file.
    pub from: Vec<(String, String)>,
    /// Columns of the file from which these values come.
    pub used: Vec<String>,
}

impl ColumnLayout {
    /// Determines the layout of a file from its first row. `format` may be `RowFormat::Auto`.
    ///
    /// Errors, with the place of the row: no known columns, columns that can be read in two ways, rows for another
    /// stage, a conversation although the model has no chat template.
    pub(crate) fn find(row: &Row, format: RowFormat, purpose: RowPurpose, rules: &RenderRules) -> Result<Self> {
        let find = || {
            let fields = Fields(&row.fields);
            let mut layout = match purpose {
                RowPurpose::Learn => fields.learned(format)?,
                RowPurpose::Prefer => fields.preferred()?,
                RowPurpose::Ask => fields.asked(format, rules.answer)?,
            };
            layout.rendering = layout.rendered(&fields, rules)?;
            Ok(layout)
        };
        find().map_err(|e: Error| e.or_at(&row.place))
    }

    fn of(format: RowFormat) -> Self {
        Self {
            format,
            rendering: Rendering::Text,
            list: None,
            prompt: None,
            extras: Vec::new(),
            answer: None,
            systems: SYSTEMS.map(str::to_string).to_vec(),
            system_prompt: None,
            preset: None,
            after: None,
            from: Vec::new(),
            used: Vec::new(),
        }
    }

    /// True if prompt and answer texts are converted to conversations.
    pub fn renders(&self) -> bool {
        self.rendering == Rendering::Template
    }

    fn rendered(&self, fields: &Fields, rules: &RenderRules) -> Result<Rendering> {
        match self.format {
            RowFormat::Text => return Ok(Rendering::Text),
            RowFormat::Messages | RowFormat::Sharegpt => return Ok(Rendering::Template),
            _ => {}
        }
        let read = ["chosen", "rejected"]
            .into_iter()
            .chain(self.prompt.as_deref())
            .chain(self.answer.as_deref());
        let values: Vec<&Value> = read.filter_map(|name| fields.value(name)).collect();
        if self.list.is_some() || values.iter().any(|v| is_turns(v)) {
            return Ok(Rendering::Template);
        }
        let implied = self.format == RowFormat::Preference && self.prompt.is_none();
        match rules.render {
            Render::Plain => return Ok(Rendering::Plain("Render::Plain")),
            Render::Chat if implied => {
                return Err(Error::usage("rows without a prompt cannot be rendered as a chat")
                    .found(names(fields.0))
                    .expected("a column `prompt`")
                    .hint("add the prompt, or use `Render::Plain`"));
            }
            Render::Chat if rules.template.is_none() => {
                return Err(
                    Error::usage("`Render::Chat` needs a chat template, and the model has none")
                        .hint("give `ChatTemplate::from_file` the path of a Jinja file, or use `Render::Plain`"),
                );
            }
            Render::Chat => return Ok(Rendering::Template),
            Render::Auto => {}
        }
        let texts: Vec<&str> = values.iter().filter_map(|v| v.as_str()).collect();
        Ok(match rules.template {
            _ if implied => Rendering::Plain("the answers contain the prompt"),
            // Alpaca rows are always conversations, never a text to continue.
            _ if self.format == RowFormat::Alpaca => Rendering::Template,
            None => Rendering::Plain("the model has no chat template"),
            Some(template) if is_rendered(&texts, template, rules.codec) => {
                Rendering::Plain("the rows already contain the tokens of a chat template")
            }
            Some(_) => Rendering::Template,
        })
    }

    /// The roles in words, with their columns.
    pub(super) fn roles(&self) -> Vec<(&str, Vec<&str>)> {
        let mut out: Vec<(&str, Vec<&str>)> = Vec::new();
        if self.format == RowFormat::Text {
            return vec![("text", vec!["text"])];
        }
        out.extend(self.list.as_deref().map(|name| ("messages", vec![name])));
        out.push(("system", self.systems.iter().map(String::as_str).collect()));
        if self.format == RowFormat::Alpaca {
            out.push(("history", vec!["history"]));
        }
        if let Some(prompt) = &self.prompt {
            let extras = self.extras.iter().map(String::as_str);
            out.push(("prompt", std::iter::once(prompt.as_str()).chain(extras).collect()));
        }
        match self.format {
            RowFormat::Preference => {
                out.extend(["chosen", "rejected", "margin"].map(|name| (name, vec![name])));
                if let Some(answer) = &self.answer {
                    out.extend([("completion", vec![answer.as_str()]), ("label", vec!["label"])]);
                }
            }
            RowFormat::Messages | RowFormat::Sharegpt => {}
            RowFormat::PromptCompletion => {
                out.extend(self.answer.as_deref().map(|name| ("completion", vec![name])));
            }
            _ => out.extend(self.answer.as_deref().map(|name| ("answer", vec![name]))),
        }
        if self.renders() {
            out.push(("tools", vec!["tools"]));
        }
        out
    }

    /// Names of all columns that are read.
    pub(super) fn columns(&self) -> Vec<&str> {
        self.roles().into_iter().flat_map(|(_, columns)| columns).collect()
    }

    /// True if the column is read.
    pub(super) fn reads(&self, column: &str) -> bool {
        self.roles().iter().any(|(_, columns)| columns.contains(&column))
    }
}

/// True for a list of messages, or one message.
pub(super) fn is_turns(value: &Value) -> bool {
    is_chat(value) || value.get("role").is_some() || value.get("from").is_some()
}

/// True if these texts are already rendered: they contain special tokens that the template prints, or the prompt ends
/// with the template's generation prompt.
fn is_rendered(texts: &[&str], template: &dyn ChatRender, codec: &dyn TextCodec) -> bool {
    const WORD: &str = "Zq7probe4xW";
    let specials = |text: &str| {
        let mut ids = codec.encode(text, false).unwrap_or_default();
        ids.retain(|&id| codec.is_special(id));
        ids
    };
    let asked = [chat::message("user", WORD)];
    let answered = [chat::message("user", WORD), chat::message("assistant", WORD)];
    let printed = template.render(&answered, None, false).map(|text| specials(&text));
    let is_mark = |id: &u32| printed.as_ref().map_or(true, |printed| printed.contains(id));
    if texts.iter().any(|text| specials(text).iter().any(is_mark)) {
        return true;
    }
    let Ok(shown) = template.render(&asked, None, true) else {
        return false;
    };
    let tail = shown.rsplit(WORD).next().unwrap_or_default().trim();
    tail.len() > 1 && texts.iter().any(|text| text.trim_end().ends_with(tail))
}

/// The fields of the first row.
struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    fn value(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|v| !v.is_null())
    }

    fn has(&self, name: &str) -> bool {
        self.value(name).is_some()
    }

    /// True for a text or messages; also for a number, for which the reader gives an error.
    fn is_said(&self, name: &str) -> bool {
        self.value(name).is_some_and(|v| match v {
            Value::Array(_) | Value::Object(_) => is_chat(v),
            _ => true,
        })
    }

    fn extras(&self, prompt: &str) -> Vec<String> {
        if prompt == "prompt" {
            return Vec::new();
        }
        let text = |name: &&str| *name != prompt && self.value(name).is_none_or(|v| v.is_string());
        EXTRAS.into_iter().filter(text).map(str::to_string).collect()
    }

    fn pair_layout(&self, format: RowFormat, prompt: &str, answer: &str) -> ColumnLayout {
        ColumnLayout {
            prompt: Some(prompt.to_string()),
            extras: self.extras(prompt),
            answer: Some(answer.to_string()),
            ..ColumnLayout::of(format)
        }
    }

    /// Prompt columns of the row, without an `input` beside another one.
    fn prompts(&self) -> Vec<&'static str> {
        let mut found: Vec<&str> = PROMPTS.into_iter().filter(|name| self.is_said(name)).collect();
        if found.len() > 1 {
            found.retain(|name| *name != "input");
        }
        found
    }

    /// The columns of a prompt and its answer. `None`: there is no such pair.
    fn pair(&self) -> Result<Option<(&'static str, &'static str)>> {
        for pair in [PAIRS[0], PAIRS[2]] {
            if self.is_said(pair.0) && self.is_said(pair.1) {
                return Ok(Some(pair));
            }
        }
        let prompts = self.prompts();
        let answers: Vec<&str> = ANSWERS.into_iter().filter(|name| self.is_said(name)).collect();
        if prompts.is_empty() || answers.is_empty() {
            return Ok(None);
        }
        let known: Vec<_> = PAIRS
            .into_iter()
            .filter(|(p, a)| prompts.contains(p) && answers.contains(a))
            .collect();
        match (&prompts[..], &answers[..], &known[..]) {
            (_, _, [pair]) => Ok(Some(*pair)),
            ([prompt], [answer], _) => Ok(Some((prompt, answer))),
            _ => Err(
                Error::format("cannot determine which column is the prompt and which is the answer")
                    .found(format!("{} and {}", prompts.join(", "), answers.join(", ")))
                    .expected("one of each")
                    .hint(format!(
                        "name them: `Mapping::columns = {{ prompt = \"{}\", completion = \"{}\" }}`",
                        prompts[0], answers[0]
                    )),
            ),
        }
    }

    fn list(&self, preferred: &'static str) -> &'static str {
        let first = std::iter::once(preferred).chain(LISTS);
        first.into_iter().find(|name| self.has(name)).unwrap_or(preferred)
    }

    fn list_layout(&self, format: RowFormat, preferred: &'static str) -> ColumnLayout {
        ColumnLayout {
            list: Some(self.list(preferred).to_string()),
            ..ColumnLayout::of(format)
        }
    }

    fn learned(&self, format: RowFormat) -> Result<ColumnLayout> {
        match format {
            RowFormat::Auto => self.detected(),
            RowFormat::Messages => Ok(self.list_layout(format, "messages")),
            RowFormat::Sharegpt => Ok(self.list_layout(format, "conversations")),
            RowFormat::Text => Ok(ColumnLayout::of(format)),
            RowFormat::PromptCompletion => {
                if self.has("prompt") && self.has("completion") {
                    Ok(self.pair_layout(format, "prompt", "completion"))
                } else {
                    match self.pair()? {
                        Some((prompt, answer)) => Ok(self.pair_layout(format, prompt, answer)),
                        None => Err(self.no_pair(format)),
                    }
                }
            }
            RowFormat::Alpaca => {
                let prompt = if self.has("prompt") && !self.has("instruction") {
                    "prompt"
                } else {
                    "instruction"
                };
                let answer = ANSWERS.into_iter().filter(|name| self.has(name)).collect::<Vec<_>>();
                match (&answer[..], self.has("output")) {
                    ([answer], false) => Ok(self.pair_layout(format, prompt, answer)),
                    _ => Ok(self.pair_layout(format, prompt, "output")),
                }
            }
            RowFormat::Preference | RowFormat::Prompt => Err(for_another_stage(format, self.0)),
        }
    }

    fn no_pair(&self, format: RowFormat) -> Error {
        Error::format(format!("the rows are not of format `{}`", format.name()))
            .found(names(self.0))
            .expected(format!(
                "a prompt ({}) and an answer ({})",
                PROMPTS.join(", "),
                ANSWERS.join(", ")
            ))
            .hint(self.rename())
    }

    /// Suggests how to rename the columns, as far as the row shows it.
    fn rename(&self) -> String {
        let texts: Vec<&str> = self
            .0
            .iter()
            .filter(|(_, v)| v.is_string())
            .map(|(name, _)| name.as_str())
            .collect();
        let of_rows =
            |(_, v): &(&String, &Value)| v.as_array().is_some_and(|l| l.first().is_some_and(Value::is_object));
        if let Some((name, _)) = self.0.iter().find(of_rows) {
            return format!(
                "if the rows are the elements of `{name}`, write only this list to the file: `jq .{name} FILE > rows.json`"
            );
        }
        match &texts[..] {
            [] => "rows need columns of text, or a list of messages".to_string(),
            [only] => format!("write `Mapping::columns = {{ text = \"{only}\" }}` to train on all of it"),
            [first, second, ..] => format!(
                "name the columns of the prompt and of the answer, for example `Mapping::columns = {{ prompt = \"{first}\", \
                 completion = \"{second}\" }}`; in csv the first line has the names"
            ),
        }
    }

    fn detected(&self) -> Result<ColumnLayout> {
        if let Some(list) = LISTS.into_iter().find(|name| self.has(name)) {
            let turns = self.value(list).and_then(Value::as_array);
            let from = turns.is_some_and(|t| t.first().is_some_and(|t| t.get("from").is_some()));
            return Ok(if from || list == "conversations" {
                self.list_layout(RowFormat::Sharegpt, list)
            } else {
                self.list_layout(RowFormat::Messages, list)
            });
        }
        let preference = self.has("chosen") && self.has("rejected");
        let pair = match self.pair() {
            Err(_) if preference => None,
            pair => pair?,
        };
        match pair {
            Some(("prompt", "completion")) => Ok(self.pair_layout(RowFormat::PromptCompletion, "prompt", "completion")),
            Some(("instruction", answer)) if !preference && (answer == "output" || !self.has("text")) => {
                Ok(self.pair_layout(RowFormat::Alpaca, "instruction", answer))
            }
            Some((prompt, answer)) if self.has("text") => Err(Error::format("the rows can be read in two ways")
                .found(names(self.0))
                .expected(format!("`text` alone, or `{prompt}` and `{answer}`"))
                .hint("use `RowFormat::PromptCompletion`, or `RowFormat::Text`")),
            Some((prompt, answer)) if !preference => Ok(self.pair_layout(RowFormat::PromptCompletion, prompt, answer)),
            _ if self.has("text") => Ok(ColumnLayout::of(RowFormat::Text)),
            _ if preference => Err(for_another_stage(RowFormat::Preference, self.0)),
            _ => Err(Error::format("cannot determine the format of the rows")
                .found(names(self.0))
                .expected(
                    "messages | conversations | prompt, completion | instruction, output | question, answer | problem, \
                     solution | query, response | input, output | text",
                )
                .hint(self.rename())),
        }
    }

    fn preferred(&self) -> Result<ColumnLayout> {
        let mut layout = ColumnLayout::of(RowFormat::Preference);
        let prompts = self.prompts();
        match &prompts[..] {
            ["prompt", ..] | [_] => {
                layout.prompt = Some(prompts[0].to_string());
                layout.extras = self.extras(prompts[0]);
            }
            [] => {}
            _ => {
                return Err(Error::format("cannot determine which column is the prompt")
                    .found(prompts.join(", "))
                    .expected("one")
                    .hint(format!(
                        "name it: `Mapping::columns = {{ prompt = \"{}\" }}`",
                        prompts[0]
                    )));
            }
        }
        if !self.has("chosen") && !self.has("rejected") {
            let answers: Vec<&str> = ANSWERS.into_iter().filter(|name| self.is_said(name)).collect();
            if answers.is_empty() && !self.has("label") {
                return Err(not_a_preference(self.0));
            }
            layout.answer = Some(match &answers[..] {
                [answer] => answer.to_string(),
                _ => "completion".to_string(),
            });
        }
        // A conversation, and answers to it.
        let whole = self
            .value("chosen")
            .is_some_and(|v| is_chat(v) && starts_with_a_question(v));
        if prompts.is_empty() && !whole {
            layout.list = LISTS.into_iter().find(|name| self.has(name)).map(str::to_string);
        }
        Ok(layout)
    }

    fn asked(&self, format: RowFormat, answer: &str) -> Result<ColumnLayout> {
        let asked = |prompt: &str| ColumnLayout {
            prompt: Some(prompt.to_string()),
            extras: self.extras(prompt),
            answer: Some(answer.to_string()),
            ..ColumnLayout::of(RowFormat::Prompt)
        };
        match format {
            RowFormat::Prompt => {}
            RowFormat::Auto if self.has("prompt") && !self.has("completion") => {}
            RowFormat::Auto if LISTS.into_iter().any(|name| self.has(name)) => return self.learned(format),
            RowFormat::Auto if self.has(answer) && self.prompts().len() == 1 => {}
            RowFormat::Auto => match (self.pair(), &self.prompts()[..]) {
                (Ok(None), [_]) => {}
                _ => return self.learned(format),
            },
            other => return self.learned(other),
        }
        match &self.prompts()[..] {
            _ if self.has("prompt") => Ok(asked("prompt")),
            [prompt] => Ok(asked(prompt)),
            _ => Err(Error::format("cannot determine which column is the prompt")
                .found(names(self.0))
                .expected(format!("one of {}", PROMPTS.join(", ")))
                .hint(match self.0.keys().next() {
                    Some(first) => format!("name it: `Mapping::columns = {{ prompt = \"{first}\" }}`"),
                    None => "rows need a column with a prompt".to_string(),
                })),
        }
    }
}

fn starts_with_a_question(chat: &Value) -> bool {
    let text = |v: &Value| v.as_str().and_then(|s| serde_json::from_str::<Value>(s).ok());
    let list = text(chat).unwrap_or_else(|| chat.clone());
    let role = list.get(0).and_then(|m| m.get("role").or(m.get("from")));
    role.and_then(Value::as_str)
        .is_some_and(|role| !["assistant", "gpt", "bot", "model"].contains(&role))
}

pub(super) fn not_a_preference(fields: &Map<String, Value>) -> Error {
    Error::format("this is not a preference row")
        .found(names(fields))
        .expected("prompt, chosen, rejected (text or messages; optional margin), or prompt, completion, label")
        .hint(
            "name the columns: `Mapping::columns = { prompt = \"...\", chosen = \"...\", rejected = \"...\" }`; stages \
             `sft` and `pretrain` use rows with one answer",
        )
}

fn for_another_stage(format: RowFormat, fields: &Map<String, Value>) -> Error {
    Error::unsupported(format!("this stage cannot train on rows of format `{}`", format.name()))
        .found(names(fields))
        .expected("rows with one answer, as messages, prompt and completion, or text")
        .hint(
            "stages `sft` and `pretrain` need one answer per row; pairs are for `dpo` and \
             `reward`, prompts for `grpo` and `ppo`",
        )
}

/// True if a column of this name may contain a prompt.
pub(super) fn is_like_a_prompt(column: &str) -> bool {
    let name = column.to_ascii_lowercase();
    let is_number =
        name.ends_with("_id") || name.ends_with("_ids") || name.ends_with("_hash") || name.ends_with("_type");
    !is_number && LIKE_A_PROMPT.iter().any(|part| name.contains(part))
}

#[cfg(test)]
mod tests;
