//! The parsed input with positions: recipe text and `key=value` arguments become one list of written keys.
//! Uses TOML and text positions only; no names of keys.

use crate::base::Error;
use std::ops::Range;
use toml_edit::{Document, InlineTable, Item, Value};

/// A position: a byte offset in the file, or the index of an argument.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum TextPosition {
    File(usize),
    Argument(usize),
}

/// One key as written.
#[derive(Debug, Clone)]
pub struct WrittenKey {
    /// The parts of the dotted path.
    pub path: Vec<String>,
    pub key_at: TextPosition,
    pub value: WrittenValue,
    pub value_at: TextPosition,
}

impl WrittenKey {
    pub fn dotted(&self) -> String {
        self.path.join(".")
    }
}

/// A value as written; a list stores the position of each item.
#[derive(Debug, Clone)]
pub enum WrittenValue {
    Text(String),
    Integer(i64),
    Number(f64),
    Flag(bool),
    List(Vec<(WrittenValue, TextPosition)>),
    Table,
    /// `[[name]]`, or a list that contains tables.
    Tables,
    Date,
}

impl WrittenValue {
    /// Describes the value for error messages: `the string "a"`.
    pub fn describe(&self) -> String {
        match self {
            WrittenValue::Text(t) => format!("the string {t:?}"),
            WrittenValue::Integer(i) => format!("the number {i}"),
            WrittenValue::Number(x) => format!("the number {x}"),
            WrittenValue::Flag(b) => format!("`{b}`"),
            WrittenValue::List(l) => format!("a list of {}", l.len()),
            WrittenValue::Table => "a table".into(),
            WrittenValue::Tables => "a list of tables".into(),
            WrittenValue::Date => "a date".into(),
        }
    }

    /// The value as JSON, a table without its entries. `None`: a date, a number that is not finite, a list of tables.
    pub fn json(&self) -> Option<serde_json::Value> {
        Some(match self {
            WrittenValue::Text(t) => t.as_str().into(),
            WrittenValue::Integer(i) => (*i).into(),
            WrittenValue::Number(x) => serde_json::Number::from_f64(*x)?.into(),
            WrittenValue::Flag(b) => (*b).into(),
            WrittenValue::List(l) => serde_json::Value::Array(l.iter().map(|(v, _)| v.json()).collect::<Option<_>>()?),
            WrittenValue::Table => serde_json::json!({}),
            WrittenValue::Tables | WrittenValue::Date => return None,
        })
    }
}

/// An error with its position; errors are sorted by position before they are shown.
#[derive(Debug)]
pub struct Problem {
    pub place: TextPosition,
    pub error: Error,
}

impl Problem {
    pub fn new(place: &TextPosition, error: Error) -> Self {
        Self {
            place: place.clone(),
            error,
        }
    }
}

/// All input: first in the order of the text, then the arguments.
#[derive(Debug)]
pub struct Draft<'a> {
    name: &'a str,
    text: &'a str,
    arguments: &'a [String],
    pub written: Vec<WrittenKey>,
    pub problems: Vec<Problem>,
}

impl<'a> Draft<'a> {
    /// Parses text and arguments; syntax errors become problems.
    pub fn new(text: &'a str, name: &'a str, arguments: &'a [String]) -> Self {
        let mut draft = Self {
            name,
            text,
            arguments,
            written: Vec::new(),
            problems: Vec::new(),
        };
        match Document::parse(text) {
            Ok(document) => {
                let mut path = Vec::new();
                for (key, item) in document.iter() {
                    let at = document
                        .get_key_value(key)
                        .and_then(|(k, _)| k.span())
                        .map_or(0, |s| s.start);
                    draft.item(&mut path, key, TextPosition::File(at), item);
                }
                draft.written.sort_by(|a, b| a.key_at.cmp(&b.key_at));
            }
            Err(e) => {
                let at = TextPosition::File(e.span().map_or(0, |s| s.start));
                let error = Error::usage("recipe is not valid TOML")
                    .at(draft.show(&at))
                    .cause(one_line(e.message()));
                draft.problems.push(Problem::new(&at, error));
            }
        }
        for index in 0..arguments.len() {
            draft.argument(index);
        }
        draft
    }

    /// `file:line:column`, both counted from 1, columns in characters; or the argument itself.
    pub fn show(&self, place: &TextPosition) -> String {
        match place {
            TextPosition::File(at) => {
                let before = self.text.get(..*at).unwrap_or(self.text);
                let line = before.matches('\n').count() + 1;
                let column = before.rsplit('\n').next().map_or(0, |l| l.chars().count()) + 1;
                format!("{}:{line}:{column}", self.name)
            }
            TextPosition::Argument(index) => match self.arguments.get(*index) {
                Some(a) => format!("argument `{a}`"),
                None => "an argument".into(),
            },
        }
    }

    /// The text after the `=` of an argument.
    pub fn raw_value(&self, place: &TextPosition) -> Option<&'a str> {
        match place {
            TextPosition::Argument(index) => self.arguments.get(*index)?.split_once('=').map(|(_, v)| v.trim()),
            TextPosition::File(_) => None,
        }
    }

    fn item(&mut self, path: &mut Vec<String>, key: &str, key_at: TextPosition, item: &Item) {
        let start = |span: Option<Range<usize>>| span.map_or(key_at.clone(), |s| TextPosition::File(s.start));
        path.push(key.to_string());
        let (value, value_at) = match item {
            Item::Value(Value::InlineTable(t)) => (WrittenValue::Table, start(t.span())),
            Item::Value(v) => (typed(v), start(v.span())),
            Item::Table(t) => (WrittenValue::Table, start(t.span())),
            Item::ArrayOfTables(t) => (WrittenValue::Tables, start(t.span())),
            Item::None => {
                path.pop();
                return;
            }
        };
        let is_table = matches!(value, WrittenValue::Table);
        self.written.push(WrittenKey {
            path: path.clone(),
            key_at,
            value,
            value_at,
        });
        if is_table && let Some(table) = item.as_table_like() {
            for (name, inner) in table.iter() {
                let at = table
                    .get_key_value(name)
                    .and_then(|(k, _)| k.span())
                    .map_or(0, |s| s.start);
                self.item(path, name, TextPosition::File(at), inner);
            }
        }
        path.pop();
    }

    fn argument(&mut self, index: usize) {
        let argument = &self.arguments[index];
        let place = TextPosition::Argument(index);
        let Some((key, raw)) = argument.split_once('=') else {
            let error = Error::usage("argument is not `key=value`")
                .at(self.show(&place))
                .hint("write the dotted recipe path and the value, as in `train.max_steps=20`");
            self.problems.push(Problem::new(&place, error));
            return;
        };
        let raw = raw.trim();
        let path: Vec<String> = key.trim().split('.').map(|p| p.trim().to_string()).collect();
        let parsed = raw.parse::<Value>();
        let value = match &parsed {
            Ok(v) => typed(v),
            // A quote or a bracket means that the value is TOML; anything else is a bare word.
            Err(e) if raw.starts_with(['"', '\'', '[', '{']) => {
                let error = Error::usage("argument's value is not valid TOML")
                    .at(self.show(&place))
                    .cause(one_line(e.message()));
                self.problems.push(Problem::new(&place, error));
                return;
            }
            Err(_) => WrittenValue::Text(raw.to_string()),
        };
        let mut lines = Vec::new();
        if let Ok(Value::InlineTable(table)) = &parsed {
            entries(&path, table, &mut lines);
        }
        let mut push = |path: Vec<String>, value: WrittenValue| {
            self.written.push(WrittenKey {
                path,
                key_at: place.clone(),
                value: at_argument(value, &place),
                value_at: place.clone(),
            })
        };
        push(path, value);
        lines.into_iter().for_each(|(path, value)| push(path, value));
    }
}

/// The entries of an inline table and of the tables in it, with their paths.
fn entries(path: &[String], table: &InlineTable, out: &mut Vec<(Vec<String>, WrittenValue)>) {
    for (name, value) in table {
        let path: Vec<String> = path.iter().cloned().chain([name.to_string()]).collect();
        out.push((path.clone(), typed(value)));
        if let Value::InlineTable(inner) = value {
            entries(&path, inner, out);
        }
    }
}

fn one_line(message: &str) -> String {
    message.lines().map(str::trim).collect::<Vec<_>>().join("; ")
}

fn typed(value: &Value) -> WrittenValue {
    match value {
        Value::String(s) => WrittenValue::Text(s.value().clone()),
        Value::Integer(i) => WrittenValue::Integer(*i.value()),
        Value::Float(x) => WrittenValue::Number(*x.value()),
        Value::Boolean(b) => WrittenValue::Flag(*b.value()),
        Value::Datetime(_) => WrittenValue::Date,
        Value::InlineTable(_) => WrittenValue::Table,
        Value::Array(a) if a.iter().any(Value::is_inline_table) => WrittenValue::Tables,
        Value::Array(a) => WrittenValue::List(
            a.iter()
                .map(|v| (typed(v), TextPosition::File(v.span().map_or(0, |s| s.start))))
                .collect(),
        ),
    }
}

/// Replaces the spans in an argument's value: its position is the whole argument.
fn at_argument(value: WrittenValue, place: &TextPosition) -> WrittenValue {
    match value {
        WrittenValue::List(items) => WrittenValue::List(
            items
                .into_iter()
                .map(|(v, _)| (at_argument(v, place), place.clone()))
                .collect(),
        ),
        other => other,
    }
}
