//! The parsed input with positions: recipe text and `key=value` arguments become one list of written keys.
//! Uses TOML and text positions only; no names of keys.

use crate::base::Error;
use std::ops::Range;
use toml_edit::{Document, Item, Value};

/// A position: a byte offset in the file, or the index of an argument.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    File(usize),
    Argument(usize),
}

/// One key as written.
#[derive(Debug, Clone)]
pub struct Written {
    /// The parts of the dotted path.
    pub path: Vec<String>,
    pub key_at: Place,
    pub value: Typed,
    pub value_at: Place,
}

impl Written {
    pub fn dotted(&self) -> String {
        self.path.join(".")
    }
}

/// A value as written; a list stores the position of each item.
#[derive(Debug, Clone)]
pub enum Typed {
    Text(String),
    Integer(i64),
    Number(f64),
    Flag(bool),
    List(Vec<(Typed, Place)>),
    Table,
    /// `[[name]]`, or a list that contains tables.
    Tables,
    Date,
}

impl Typed {
    /// Describes the value for error messages: `the string "a"`.
    pub fn describe(&self) -> String {
        match self {
            Typed::Text(t) => format!("the string {t:?}"),
            Typed::Integer(i) => format!("the number {i}"),
            Typed::Number(x) => format!("the number {x}"),
            Typed::Flag(b) => format!("`{b}`"),
            Typed::List(l) => format!("a list of {}", l.len()),
            Typed::Table => "a table".into(),
            Typed::Tables => "a list of tables".into(),
            Typed::Date => "a date".into(),
        }
    }
}

/// An error with its position; errors are sorted by position before they are shown.
#[derive(Debug)]
pub struct Problem {
    pub place: Place,
    pub error: Error,
}

impl Problem {
    pub fn new(place: &Place, error: Error) -> Self {
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
    pub written: Vec<Written>,
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
                    draft.item(&mut path, key, Place::File(at), item);
                }
                draft.written.sort_by(|a, b| a.key_at.cmp(&b.key_at));
            }
            Err(e) => {
                let at = Place::File(e.span().map_or(0, |s| s.start));
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
    pub fn show(&self, place: &Place) -> String {
        match place {
            Place::File(at) => {
                let before = self.text.get(..*at).unwrap_or(self.text);
                let line = before.matches('\n').count() + 1;
                let column = before.rsplit('\n').next().map_or(0, |l| l.chars().count()) + 1;
                format!("{}:{line}:{column}", self.name)
            }
            Place::Argument(index) => match self.arguments.get(*index) {
                Some(a) => format!("argument `{a}`"),
                None => "an argument".into(),
            },
        }
    }

    /// The text after the `=` of an argument.
    pub fn raw_value(&self, place: &Place) -> Option<&'a str> {
        match place {
            Place::Argument(index) => self.arguments.get(*index)?.split_once('=').map(|(_, v)| v.trim()),
            Place::File(_) => None,
        }
    }

    fn item(&mut self, path: &mut Vec<String>, key: &str, key_at: Place, item: &Item) {
        let start = |span: Option<Range<usize>>| span.map_or(key_at.clone(), |s| Place::File(s.start));
        path.push(key.to_string());
        let (value, value_at) = match item {
            Item::Value(Value::InlineTable(t)) => (Typed::Table, start(t.span())),
            Item::Value(v) => (typed(v), start(v.span())),
            Item::Table(t) => (Typed::Table, start(t.span())),
            Item::ArrayOfTables(t) => (Typed::Tables, start(t.span())),
            Item::None => {
                path.pop();
                return;
            }
        };
        let is_table = matches!(value, Typed::Table);
        self.written.push(Written {
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
                self.item(path, name, Place::File(at), inner);
            }
        }
        path.pop();
    }

    fn argument(&mut self, index: usize) {
        let argument = &self.arguments[index];
        let place = Place::Argument(index);
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
            Err(_) => Typed::Text(raw.to_string()),
        };
        let lines = match &parsed {
            Ok(Value::InlineTable(table)) => table.iter().map(|(k, v)| (k.to_string(), typed(v))).collect(),
            _ => Vec::new(),
        };
        let mut push = |path: Vec<String>, value: Typed| {
            self.written.push(Written {
                path,
                key_at: place.clone(),
                value: at_argument(value, &place),
                value_at: place.clone(),
            })
        };
        push(path.clone(), value);
        for (name, value) in lines {
            push(path.iter().cloned().chain([name]).collect(), value);
        }
    }
}

fn one_line(message: &str) -> String {
    message.lines().map(str::trim).collect::<Vec<_>>().join("; ")
}

fn typed(value: &Value) -> Typed {
    match value {
        Value::String(s) => Typed::Text(s.value().clone()),
        Value::Integer(i) => Typed::Integer(*i.value()),
        Value::Float(x) => Typed::Number(*x.value()),
        Value::Boolean(b) => Typed::Flag(*b.value()),
        Value::Datetime(_) => Typed::Date,
        Value::InlineTable(_) => Typed::Table,
        Value::Array(a) if a.iter().any(Value::is_inline_table) => Typed::Tables,
        Value::Array(a) => Typed::List(
            a.iter()
                .map(|v| (typed(v), Place::File(v.span().map_or(0, |s| s.start))))
                .collect(),
        ),
    }
}

/// Replaces the spans in an argument's value: its position is the whole argument.
fn at_argument(value: Typed, place: &Place) -> Typed {
    match value {
        Typed::List(items) => Typed::List(
            items
                .into_iter()
                .map(|(v, _)| (at_argument(v, place), place.clone()))
                .collect(),
        ),
        other => other,
    }
}
