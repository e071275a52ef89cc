//! Columns with other names: which column is the prompt, the answer, the conversation; names of roles; a template for
//! the prompt; a system prompt. Rows are changed here, before their layout is determined, so that all other code finds
//! the columns under their usual names.

mod nulls;
mod path;
mod presets;

#[cfg(test)]
mod tests;

use super::layout::{ANSWERS, ColumnLayout, LISTS, PROMPTS, RenderRules, Rendering, RowPurpose, is_turns};
use super::read::{Row, clip};
use crate::RowFormat;
use ft_base::{Error, Result, named};
use path::{ColumnPath, PathValue, TextTemplate, as_text};
use presets::RowConversion;
use serde_json::{Map, Value, json};

named!(
    /// The use of a column; the name is that of the column that is read for it without a mapping.
    ColumnRole {
        /// The question, or all messages before the answer.
        Prompt = "prompt",
        /// The answer to train on.
        Completion = "completion",
        /// A list of messages.
        Messages = "messages",
        /// The better answer.
        Chosen = "chosen",
        /// The worse answer.
        Rejected = "rejected",
        /// A text of which every token is trained.
        Text = "text",
        /// The system message.
        System = "system",
        /// Text that is appended to the prompt.
        Input = "input",
        /// Earlier turns of an `alpaca` row.
        History = "history",
        /// Whether an answer is desirable.
        Label = "label",
        /// The required reward margin of a pair.
        Margin = "margin",
        /// The tools that a conversation declares.
        Tools = "tools",
        /// The known answer of a prompt, for rewards.
        Answer = "answer",
        /// The field of a message with the role.
        Role = "role",
        /// The field of a message with the text.
        Content = "content",
    }
);

named!(
    /// The role of a message, for the chat template.
    ChatRole { System = "system", User = "user", Assistant = "assistant", Tool = "tool" }
);

/// How the columns of the rows become those that are read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mapping {
    /// The column of each use, by name or by path: `question`, `answers.text[0]`. Others are found by their names.
    pub columns: Vec<(ColumnRole, String)>,
    /// Roles of messages that have another name in the rows.
    pub roles: Vec<(String, ChatRole)>,
    /// The prompt, as a text with columns in braces.
    pub prompt_template: Option<String>,
    /// The system message of rows without one.
    pub system_prompt: Option<String>,
}

impl Mapping {
    /// Checks the template of the prompt.
    ///
    /// # Errors
    /// The template is not valid, or the prompt is given twice.
    pub fn check(&self) -> Result<()> {
        let Some(template) = &self.prompt_template else {
            return Ok(());
        };
        TextTemplate::new(template)?;
        let twice = [
            ColumnRole::Prompt,
            ColumnRole::Messages,
            ColumnRole::Text,
            ColumnRole::Input,
        ];
        match twice.into_iter().find(|role| self.path(*role).is_some()) {
            None => Ok(()),
            Some(role) => Err(Error::usage(format!(
                "`Mapping::prompt_template` and `{}` of `Mapping::columns` contradict each other",
                role.name()
            ))
            .hint("keep one of them: the template is the whole prompt")),
        }
    }

    fn path(&self, role: ColumnRole) -> Option<&str> {
        let found = self.columns.iter().find(|(r, _)| *r == role);
        found.map(|(_, path)| path.as_str())
    }
}

/// A changed row, or the reason why it is not used.
pub(crate) enum MappedRow {
    Row(Row),
    Skipped(&'static str),
}

/// The mapping of one file: from the settings, or from the columns of a well-known dataset.
#[derive(Debug)]
pub(crate) struct Mapper {
    /// The name of a column that is read, and the path of its value.
    columns: Vec<(String, ColumnPath)>,
    template: Option<TextTemplate>,
    role: Option<String>,
    content: Option<String>,
    roles: Vec<(String, ChatRole)>,
    /// Columns that are not read although their names are usual.
    hidden: Vec<&'static str>,
    convert: Option<RowConversion>,
    system_prompt: Option<String>,
    /// The dataset whose columns these are.
    preset: Option<&'static str>,
    appends_input: bool,
}

impl Mapper {
    /// The mapping of the file with this first row.
    ///
    /// Errors: a column that is not there, or that has no use in rows for this purpose.
    pub(crate) fn new(
        mapping: &Mapping,
        row: &Row,
        format: RowFormat,
        purpose: RowPurpose,
        rules: &RenderRules,
    ) -> Result<Self> {
        mapping.check()?;
        let fields = &row.fields;
        let has = |role: ColumnRole| mapping.path(role).is_some();
        let mut out = Self {
            columns: Vec::new(),
            template: mapping.prompt_template.as_deref().map(TextTemplate::new).transpose()?,
            role: mapping.path(ColumnRole::Role).map(str::to_string),
            content: mapping.path(ColumnRole::Content).map(str::to_string),
            roles: mapping.roles.clone(),
            hidden: hidden(mapping),
            convert: None,
            system_prompt: mapping.system_prompt.clone().filter(|s| !s.is_empty()),
            preset: None,
            appends_input: has(ColumnRole::Input),
        };
        for (role, path) in &mapping.columns {
            let name = match role {
                ColumnRole::Role | ColumnRole::Content => continue,
                ColumnRole::Answer if purpose == RowPurpose::Ask && !rules.answer.is_empty() => rules.answer,
                ColumnRole::Answer => {
                    return Err(Error::usage(
                        "`answer` of `Mapping::columns` has no use in rows with answers to train on",
                    )
                    .found(format!("`answer` for the column `{path}`"))
                    .hint(format!(
                        "map the column `{path}` to `completion`: the answer to train on"
                    )));
                }
                role => role.name(),
            };
            out.columns.push((name.to_string(), ColumnPath::new(path)));
        }
        let paths = out.columns.iter().map(|(_, path)| path);
        for path in paths.chain(out.template.iter().flat_map(TextTemplate::places)) {
            if path.find(fields) == PathValue::Missing {
                return Err(no_column(path, fields).at(&row.place));
            }
        }
        let maps_rows = mapping.columns.len() > usize::from(out.role.is_some()) + usize::from(out.content.is_some());
        if !maps_rows && out.template.is_none() {
            refuse_media(fields)?;
        }
        if !maps_rows && out.template.is_none() && !matches!(format, RowFormat::Text | RowFormat::Alpaca) {
            presets::recognize(&mut out, fields, purpose, rules);
        }
        if purpose == RowPurpose::Ask && !out.columns.iter().any(|(name, _)| name == rules.answer) {
            // A nested column, such as `reward_model.ground_truth`.
            let path = ColumnPath::new(rules.answer);
            if !fields.contains_key(rules.answer) && matches!(path.find(fields), PathValue::Value(_)) {
                out.columns.push((rules.answer.to_string(), path));
            }
        }
        Ok(out)
    }

    /// The row with its columns under their usual names. Columns that are no longer read move to `Row::rest`.
    ///
    /// Errors, with the place of the row: a column is missing, or is not a text.
    pub(crate) fn apply(&self, mut row: Row) -> Result<MappedRow> {
        let changed = self.change(&mut row).map_err(|e| e.or_at(&row.place))?;
        Ok(match changed {
            None => MappedRow::Row(row),
            Some(why) => MappedRow::Skipped(why),
        })
    }

    fn change(&self, row: &mut Row) -> Result<Option<&'static str>> {
        if let Some(convert) = &self.convert
            && let Some(why) = convert.apply(&mut row.fields)?
        {
            return Ok(Some(why));
        }
        let mut new: Vec<(&str, Value)> = Vec::new();
        let mut used: Vec<String> = Vec::new();
        for (name, path) in &self.columns {
            let value = match path.find(&row.fields) {
                PathValue::Value(value) => of_role(name, value, path.text())?,
                // An item of an empty list, such as a question without an answer.
                PathValue::Nothing if path.text().contains('[') => return Ok(Some("no value in a list")),
                PathValue::Nothing => Value::Null,
                PathValue::Missing => return Err(path::missing(path, &row.fields)),
            };
            used.push(path.column(&row.fields).to_string());
            new.push((name, value));
        }
        if let Some(template) = &self.template {
            new.push(("prompt", Value::String(template.fill(&row.fields)?)));
            used.extend(template.places().map(|path| path.column(&row.fields).to_string()));
        }
        for name in used.iter().map(String::as_str).chain(self.hidden.iter().copied()) {
            if let Some(value) = row.fields.remove(name) {
                row.rest.insert(name.to_string(), value);
            }
        }
        for (name, value) in new {
            if let Some(old) = row.fields.insert(name.to_string(), value) {
                row.rest.insert(name.to_string(), old);
            }
        }
        if self.role.is_some() || self.content.is_some() || !self.roles.is_empty() {
            let lists = ["prompt", "completion", "chosen", "rejected"];
            for name in lists.into_iter().chain(LISTS) {
                if let Some(value) = row.fields.get_mut(name) {
                    self.rename_turns(value);
                }
            }
        }
        if row.place.is_columnar() {
            nulls::remove(&mut row.fields);
        }
        Ok(None)
    }

    /// Gives the fields of messages their usual names, and roles their standard names.
    fn rename_turns(&self, value: &mut Value) {
        if let Value::String(text) = value
            && text.trim_start().starts_with('[')
            && let Ok(list @ Value::Array(_)) = serde_json::from_str(text)
        {
            *value = list;
        }
        let turns = match value {
            Value::Array(turns) => turns.iter_mut().collect(),
            one @ Value::Object(_) => vec![one],
            _ => return,
        };
        for turn in turns.into_iter().filter_map(Value::as_object_mut) {
            for (name, own) in [("role", &self.role), ("content", &self.content)] {
                if let Some(value) = own.as_ref().and_then(|own| turn.remove(own)) {
                    turn.insert(name.to_string(), value);
                }
            }
            for key in ["role", "from"] {
                let Some(Value::String(role)) = turn.get(key) else {
                    continue;
                };
                let standard = self.roles.iter().find(|(name, _)| name == role);
                if let Some((_, standard)) = standard {
                    turn.insert(key.to_string(), json!(standard.name()));
                }
            }
        }
    }

    /// Completes the layout of the changed rows.
    ///
    /// Errors: a mapped column that rows of this format do not have; a system prompt that nothing renders.
    pub(crate) fn complete(&self, layout: &mut ColumnLayout) -> Result<()> {
        if self.appends_input && layout.prompt.is_some() {
            layout.extras = vec!["input".to_string()];
        }
        for (name, path) in &self.columns {
            if !layout.reads(name) && Some(name) != layout.answer.as_ref() {
                return Err(Error::usage(format!(
                    "`{name} = \"{}\"` of `Mapping::columns` has no use in rows of format `{}`",
                    path.text(),
                    layout.format.name()
                ))
                .found(format!("the format reads {}", layout.columns().join(", ")))
                .hint("remove it, or set `data::Source::format`"));
            }
            if name == ColumnRole::System.name() {
                // The user names the column, so no other one is read.
                layout.systems.retain(|column| column == name);
            }
            let shown = match (&self.convert, name.as_str()) {
                (Some(RowConversion::Ratings), "chosen") => "the best of completions",
                (Some(RowConversion::Ratings), _) => "the worst of completions",
                _ => path.text(),
            };
            layout.from.push((name.clone(), shown.to_string()));
            layout
                .used
                .push(path.text().split(['.', '[']).next().unwrap_or_default().to_string());
            layout.used.push(path.text().to_string());
        }
        if let Some(template) = &self.template {
            let places: Vec<&str> = template.places().map(ColumnPath::text).collect();
            layout.used.extend(
                places
                    .iter()
                    .map(|path| path.split(['.', '[']).next().unwrap_or(path).to_string()),
            );
            layout.from.push(("prompt".to_string(), places.join(" and ")));
        }
        if let Some(system) = &self.system_prompt {
            if layout.rendering != Rendering::Template {
                return Err(Error::usage(
                    "`Mapping::system_prompt` needs conversations, or prompts and answers that the chat template renders",
                )
                .found(format!("rows of format `{}`, read as plain text", layout.format.name()))
                .hint(match layout.rendering {
                    // No setting renders texts.
                    Rendering::Text => "remove it; of several sources, write it in those with conversations, as `system_prompt`",
                    _ => "remove it, or use `Render::Chat`; a model without a template needs `ChatTemplate::from_file`",
                }));
            }
            layout.system_prompt = Some(system.clone());
        }
        if self.convert == Some(RowConversion::Ratings) {
            layout.used.push("completions".to_string());
        }
        layout.preset = self.preset;
        layout.after = match self.convert {
            Some(RowConversion::AfterHashes) => Some("####"),
            _ => None,
        };
        Ok(())
    }
}

/// The value of a column for its use: a prompt or an answer that is a number becomes a text.
fn of_role(name: &str, value: &Value, path: &str) -> Result<Value> {
    match name {
        "prompt" | "completion" | "chosen" | "rejected" if is_turns(value) && !has_texts(value) => Ok(value.clone()),
        "prompt" | "completion" | "chosen" | "rejected" | "text" | "system" | "input" => {
            as_text(value, path).map(Value::String)
        }
        "messages" => Ok(presets::alternating(value).unwrap_or_else(|| value.clone())),
        _ => Ok(value.clone()),
    }
}

/// True for a list with texts in place of messages.
fn has_texts(value: &Value) -> bool {
    value.as_array().is_some_and(|list| list.iter().any(Value::is_string))
}

/// Usual columns that would be read in place of the mapped ones.
fn hidden(mapping: &Mapping) -> Vec<&'static str> {
    let has = |role: ColumnRole| mapping.path(role).is_some();
    let (messages, text) = (has(ColumnRole::Messages), has(ColumnRole::Text));
    let prompt = has(ColumnRole::Prompt) || mapping.prompt_template.is_some();
    let mut out: Vec<&str> = Vec::new();
    if messages || text || prompt {
        out.extend(PROMPTS);
    }
    if messages || text || has(ColumnRole::Completion) {
        out.extend(ANSWERS);
    }
    if messages || text || prompt || has(ColumnRole::Completion) {
        out.extend(LISTS);
        out.push("text");
    }
    out
}

/// Errors: the row has images, videos or sounds, which a text model would miss.
fn refuse_media(fields: &Map<String, Value>) -> Result<()> {
    let is_full = |value: &Value| match value {
        Value::Array(list) => !list.is_empty(),
        Value::Object(_) => true,
        _ => false,
    };
    let media = ["images", "image", "videos", "video", "audios", "audio"];
    match media.into_iter().find(|name| fields.get(*name).is_some_and(is_full)) {
        None => Ok(()),
        Some(name) => Err(Error::unsupported("rows with images, videos or sounds are not supported")
            .found(format!("`{name}`: {}", clip(&fields[name].to_string())))
            .expected("rows of text")
            .hint(
                "to train on the text alone, name its columns: `Mapping::columns = { messages = \"messages\" }`, or \
                 `{ prompt = \"...\", completion = \"...\" }`",
            )),
    }
}

fn no_column(path: &ColumnPath, fields: &Map<String, Value>) -> Error {
    let names: Vec<&str> = fields.keys().map(String::as_str).collect();
    let error = Error::usage(format!(
        "the rows have no `{}`, which `Mapping::columns` or `Mapping::prompt_template` names",
        path.text()
    ));
    let column = path.column(fields);
    if let Some(value) = fields.get(column) {
        return error
            .found(format!("`{column}`: {}", clip(&value.to_string())))
            .hint("a path is written as `column.field`, `column[0]` or `column[0].field`");
    }
    let same = names.iter().find(|name| name.eq_ignore_ascii_case(column));
    let like = same.or_else(|| {
        names
            .iter()
            .find(|name| name.contains(column) || column.contains(**name))
    });
    let error = error.found(format!("columns {}", names.join(", ")));
    match like {
        Some(like) => error.hint(format!("did you mean `{like}`?")),
        None => error.hint("name one of these columns"),
    }
}
