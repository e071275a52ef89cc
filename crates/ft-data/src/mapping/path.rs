//! Paths of values inside a row (`answers.text[0]`), and texts with places for such values (`{context}`).

use super::super::read::{clip, kind};
use ft_base::{Error, Result};
use serde_json::{Map, Value};

/// A column, and the way to a value inside it: `name`, `a.b`, `a.b[0]`, `a[-1].b`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ColumnPath {
    text: String,
}

/// The value at a path in one row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum PathValue<'a> {
    Value(&'a Value),
    /// Null, or an empty list at an index.
    Nothing,
    /// The row has no such column or field.
    Missing,
}

impl ColumnPath {
    pub(crate) fn new(text: &str) -> Self {
        Self {
            text: text.trim().to_string(),
        }
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// The name of the column of `fields` in which the path begins.
    pub(crate) fn column<'a>(&'a self, fields: &Map<String, Value>) -> &'a str {
        if fields.contains_key(&self.text) {
            return &self.text;
        }
        self.text.split(['.', '[']).next().unwrap_or(&self.text)
    }

    pub(crate) fn find<'a>(&self, fields: &'a Map<String, Value>) -> PathValue<'a> {
        // A column may have a dot in its name.
        if let Some(value) = fields.get(&self.text) {
            return found(value);
        }
        let Some(mut value) = fields.get(self.column(fields)) else {
            return PathValue::Missing;
        };
        let mut rest = &self.text[self.column(fields).len()..];
        while !rest.is_empty() {
            if value.is_null() {
                return PathValue::Nothing;
            }
            let Some((step, after)) = step(rest) else {
                return PathValue::Missing;
            };
            let next = match step {
                PathStep::Field(name) => value.get(name),
                PathStep::Index(at) => {
                    let Some(list) = value.as_array() else {
                        return PathValue::Missing;
                    };
                    let at = usize::try_from(at).ok().or_else(|| {
                        let back = usize::try_from(at.unsigned_abs()).ok()?;
                        list.len().checked_sub(back)
                    });
                    match at.and_then(|at| list.get(at)) {
                        None => return PathValue::Nothing,
                        some => some,
                    }
                }
            };
            let Some(next) = next else {
                return PathValue::Missing;
            };
            (value, rest) = (next, after);
        }
        found(value)
    }
}

fn found(value: &Value) -> PathValue<'_> {
    match value {
        Value::Null => PathValue::Nothing,
        value => PathValue::Value(value),
    }
}

enum PathStep<'a> {
    Field(&'a str),
    Index(i64),
}

/// The first step of `.name...` or `[0]...`, and the rest.
fn step(rest: &str) -> Option<(PathStep<'_>, &str)> {
    if let Some(inner) = rest.strip_prefix('[') {
        let (index, after) = inner.split_once(']')?;
        return Some((PathStep::Index(index.trim().parse().ok()?), after));
    }
    let name = rest.strip_prefix('.')?;
    let end = name.find(['.', '[']).unwrap_or(name.len());
    (end > 0).then(|| (PathStep::Field(&name[..end]), &name[end..]))
}

/// A value as the text of a prompt or an answer; numbers and flags are written out.
pub(crate) fn as_text(value: &Value, name: &str) -> Result<String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Number(_) | Value::Bool(_) => Ok(value.to_string()),
        Value::Null => Ok(String::new()),
        Value::Array(_) => Err(not_text(value, name).hint(format!("`{name}[0]` names the first item of a list"))),
        Value::Object(fields) => {
            let inner = fields.keys().next().map_or("field", String::as_str);
            Err(not_text(value, name).hint(format!("`{name}.{inner}` names a field inside it")))
        }
    }
}

fn not_text(value: &Value, name: &str) -> Error {
    Error::format(format!("`{name}` is not a text"))
        .found(format!("{}: {}", kind(value), clip(&value.to_string())))
        .expected("a text")
}

/// A text with places for values: `Context: {context}`; `{{` and `}}` are braces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TextTemplate {
    parts: Vec<TemplatePart>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum TemplatePart {
    Text(String),
    Place(ColumnPath),
}

impl TextTemplate {
    /// Errors: a brace without its partner, an empty place, no place.
    pub(crate) fn new(source: &str) -> Result<Self> {
        let fault = |what: String| {
            Error::usage(what)
                .at("`Mapping::prompt_template`")
                .found(clip(source))
                .expected("a text with columns in braces, such as `{context}\\n\\n{question}`")
                .hint("write `{{` and `}}` for braces of the text itself")
        };
        let mut parts = Vec::new();
        let mut text = String::new();
        let mut rest = source.chars().peekable();
        while let Some(c) = rest.next() {
            match c {
                '{' | '}' if rest.peek() == Some(&c) => {
                    rest.next();
                    text.push(c);
                }
                '}' => return Err(fault("the template has a `}` without its `{`".into())),
                '{' => {
                    let mut name = String::new();
                    loop {
                        match rest.next() {
                            Some('}') => break,
                            None | Some('{') => return Err(fault("the template has a `{` without its `}`".into())),
                            Some(c) => name.push(c),
                        }
                    }
                    if name.trim().is_empty() {
                        return Err(fault("the template has a place without a name".into()));
                    }
                    parts.push(TemplatePart::Text(std::mem::take(&mut text)));
                    parts.push(TemplatePart::Place(ColumnPath::new(&name)));
                }
                c => text.push(c),
            }
        }
        parts.push(TemplatePart::Text(text));
        parts.retain(|part| *part != TemplatePart::Text(String::new()));
        if !parts.iter().any(|part| matches!(part, TemplatePart::Place(_))) {
            return Err(fault("the template has no place for a column".into()));
        }
        Ok(Self { parts })
    }

    pub(crate) fn places(&self) -> impl Iterator<Item = &ColumnPath> {
        self.parts.iter().filter_map(|part| match part {
            TemplatePart::Place(path) => Some(path),
            TemplatePart::Text(_) => None,
        })
    }

    /// Errors: a value is a list or an object, or the row has no such column.
    pub(crate) fn fill(&self, fields: &Map<String, Value>) -> Result<String> {
        let mut out = String::new();
        for part in &self.parts {
            match part {
                TemplatePart::Text(text) => out.push_str(text),
                TemplatePart::Place(path) => match path.find(fields) {
                    PathValue::Value(value) => out.push_str(&as_text(value, path.text())?),
                    PathValue::Nothing => {}
                    PathValue::Missing => return Err(missing(path, fields)),
                },
            }
        }
        Ok(out)
    }
}

/// The error of a row without the column or field of a path.
pub(crate) fn missing(path: &ColumnPath, fields: &Map<String, Value>) -> Error {
    let names: Vec<&str> = fields.keys().map(String::as_str).collect();
    let column = path.column(fields);
    let error = Error::format(format!("the row has no `{}`", path.text()));
    match fields.get(column) {
        Some(value) if column != path.text() => error
            .found(format!("`{column}` is {}: {}", kind(value), clip(&value.to_string())))
            .hint("a path is written as `column.field`, `column[0]` or `column[0].field`"),
        _ => error
            .found(format!("columns {}", names.join(", ")))
            .hint("every row of a file must have the columns of its first row"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row() -> Map<String, Value> {
        let row = json!({
            "a": "x", "b.c": "dotted", "n": null, "k": 7,
            "answers": {"text": ["one", "two"], "none": []},
            "turns": [{"v": "first"}, {"v": "last"}],
        });
        row.as_object().unwrap().clone()
    }

    #[test]
    fn a_path_finds_columns_fields_and_items() {
        let row = row();
        let at = |path: &str| ColumnPath::new(path).find(&row);
        for (path, value) in [
            ("a", json!("x")),
            ("b.c", json!("dotted")),
            ("answers.text[0]", json!("one")),
            ("answers.text[-1]", json!("two")),
            ("turns[1].v", json!("last")),
            ("turns[-2].v", json!("first")),
        ] {
            assert_eq!(at(path), PathValue::Value(&value), "{path}");
        }
        for path in ["n", "n.x", "answers.none[0]", "answers.text[2]", "answers.text[-3]"] {
            assert_eq!(at(path), PathValue::Nothing, "{path}");
        }
        for path in [
            "z",
            "a.b",
            "answers.texts",
            "a[0]",
            "answers.text[x]",
            "answers..text",
            "answers.text[0",
            "",
        ] {
            assert_eq!(at(path), PathValue::Missing, "{path}");
        }
    }

    #[test]
    fn a_template_is_filled_and_its_braces_are_checked() {
        let filled = |source: &str| TextTemplate::new(source).unwrap().fill(&row());
        assert_eq!(filled("Q: {a} ({answers.text[1]}) {k}{n}.").unwrap(), "Q: x (two) 7.");
        assert_eq!(filled("{{\"q\": {a}}}").unwrap(), "{\"q\": x}");
        assert!(filled("{zz}").unwrap_err().to_string().contains("columns a,"));
        assert!(filled("{answers}").unwrap_err().to_string().contains("`answers.text`"));
        for bad in ["no place", "{a", "a}", "{}", "{a{b}}"] {
            assert!(TextTemplate::new(bad).is_err(), "{bad}");
        }
    }
}
