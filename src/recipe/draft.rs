//! The parsed input with positions: recipe text and `key=value` arguments become one list of written keys.
//! Uses TOML and text positions only; no names of keys.

use crate::base::{Error, secrets};
use std::ops::Range;
use toml_edit::{Document, Item, TableLike, Value};

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
    /// `[[name]]`, or a list of tables: the keys of each, with paths inside the table.
    Tables(Vec<Vec<WrittenKey>>),
    Date,
}

impl WrittenValue {
    /// Describes the value for error messages: `the string "a"`.
    pub fn describe(&self) -> String {
        match self {
            WrittenValue::Text(t) => format!("the string {:?}", secrets::mask(t)),
            WrittenValue::Integer(i) => format!("the number {i}"),
            WrittenValue::Number(x) => format!("the number {x}"),
            WrittenValue::Flag(b) => format!("`{b}`"),
            WrittenValue::List(l) => format!("a list of {}", l.len()),
            WrittenValue::Table => "a table".into(),
            WrittenValue::Tables(_) => "a list of tables".into(),
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
            WrittenValue::Tables(_) | WrittenValue::Date => return None,
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
                draft.written = keys_of(document.as_table());
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

    /// `file:line:column`, both counted from 1, columns in characters; or the argument itself, without what looks like a secret.
    pub fn show(&self, place: &TextPosition) -> String {
        match place {
            TextPosition::File(at) => {
                let before = self.text.get(..*at).unwrap_or(self.text);
                let line = before.matches('\n').count() + 1;
                let column = before.rsplit('\n').next().map_or(0, |l| l.chars().count()) + 1;
                format!("{}:{line}:{column}", self.name)
            }
            TextPosition::Argument(index) => match self.arguments.get(*index) {
                Some(a) => format!("argument `{}`", secrets::mask(a)),
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
            Ok(v) => typed(v, &place),
            // A quote or a bracket means that the value is TOML; anything else is a bare word.
            Err(e) if raw.starts_with(['"', '\'', '[', '{']) => {
                let error = Error::usage("argument's value is not valid TOML")
                    .at(self.show(&place))
                    .cause(one_line(e.message()))
                    .hint("a text that begins with a quote, `{` or `[` needs quotes: `'KEY=\"TEXT\"'`");
                self.problems.push(Problem::new(&place, error));
                return;
            }
            Err(_) => WrittenValue::Text(raw.to_string()),
        };
        let lines = match &parsed {
            Ok(Value::InlineTable(table)) => keys_of(table),
            _ => Vec::new(),
        };
        let own = WrittenKey {
            path: path.clone(),
            key_at: place.clone(),
            value,
            value_at: place.clone(),
        };
        let inside = lines.into_iter().map(|line| WrittenKey {
            path: path.iter().cloned().chain(line.path.clone()).collect(),
            ..line
        });
        let at_place = |key: WrittenKey| key.at_argument(&place);
        self.written.extend(std::iter::once(own).chain(inside).map(at_place));
    }
}

/// All keys of a table and of the tables in it.
fn keys_of(table: &dyn TableLike) -> Vec<WrittenKey> {
    let mut out = Vec::new();
    for (name, item) in table.iter() {
        let at = table
            .get_key_value(name)
            .and_then(|(k, _)| k.span())
            .map_or(0, |s| s.start);
        let key_at = TextPosition::File(at);
        let start = |span: Option<Range<usize>>| span.map_or(key_at.clone(), |s| TextPosition::File(s.start));
        let (value, value_at) = match item {
            Item::Value(v) => (typed(v, &key_at), start(v.span())),
            Item::Table(t) => (WrittenValue::Table, start(t.span())),
            Item::ArrayOfTables(list) => {
                let tables = list.iter().map(|t| keys_of(t)).collect();
                (WrittenValue::Tables(tables), start(list.span()))
            }
            Item::None => continue,
        };
        let inside = match (&value, item.as_table_like()) {
            (WrittenValue::Table, Some(inner)) => keys_of(inner),
            _ => Vec::new(),
        };
        out.push(WrittenKey {
            path: vec![name.to_string()],
            key_at,
            value,
            value_at,
        });
        out.extend(inside.into_iter().map(|mut key| {
            key.path.insert(0, name.to_string());
            key
        }));
    }
    out
}

fn one_line(message: &str) -> String {
    message.lines().map(str::trim).collect::<Vec<_>>().join("; ")
}

/// `key`: the position of the key, for parts of the value without an own one.
fn typed(value: &Value, key: &TextPosition) -> WrittenValue {
    match value {
        Value::String(s) => WrittenValue::Text(s.value().clone()),
        Value::Integer(i) => WrittenValue::Integer(*i.value()),
        Value::Float(x) => WrittenValue::Number(*x.value()),
        Value::Boolean(b) => WrittenValue::Flag(*b.value()),
        Value::Datetime(_) => WrittenValue::Date,
        Value::InlineTable(_) => WrittenValue::Table,
        Value::Array(a) if !a.is_empty() && a.iter().all(Value::is_inline_table) => {
            let tables = a.iter().filter_map(Value::as_inline_table);
            WrittenValue::Tables(tables.map(|t| keys_of(t)).collect())
        }
        Value::Array(a) => WrittenValue::List(
            a.iter()
                .map(|v| {
                    let at = v.span().map_or(key.clone(), |s| TextPosition::File(s.start));
                    (typed(v, key), at)
                })
                .collect(),
        ),
    }
}

impl WrittenKey {
    /// Replaces the spans in an argument: its position is the whole argument.
    fn at_argument(self, place: &TextPosition) -> Self {
        Self {
            path: self.path,
            key_at: place.clone(),
            value: at_argument(self.value, place),
            value_at: place.clone(),
        }
    }
}

fn at_argument(value: WrittenValue, place: &TextPosition) -> WrittenValue {
    match value {
        WrittenValue::List(items) => WrittenValue::List(
            items
                .into_iter()
                .map(|(v, _)| (at_argument(v, place), place.clone()))
                .collect(),
        ),
        WrittenValue::Tables(tables) => {
            let keys = |table: Vec<WrittenKey>| table.into_iter().map(|key| key.at_argument(place)).collect();
            WrittenValue::Tables(tables.into_iter().map(keys).collect())
        }
        other => other,
    }
}
