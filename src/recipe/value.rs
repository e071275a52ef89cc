//! The values of keys: as TOML types (`KeyValue`), and as the types of the fields of a section (`KeyType`).

use super::table::RecipeKey;
use super::types::{NamedEnum, WeightStorage};
use crate::base::units;
use ft_data::{ChatRole, ColumnRole, describe};
use serde_json::Map as JsonMap;
use std::fmt;

/// The text of a value that is not given.
pub const AUTO: &str = "auto";

/// A text as a value of TOML, on one line.
pub fn quoted(text: &str) -> String {
    let value = toml_edit::Value::from(text).to_string();
    if !value.contains('\n') {
        return value.trim().to_string();
    }
    // The escapes of JSON are escapes of TOML too. Only DEL needs one more.
    serde_json::Value::from(text).to_string().replace('\u{7f}', "\\u007F")
}

/// A text in a comment of TOML: a line break would end the comment, and what follows would be a key.
pub fn in_comment(text: &str) -> String {
    let shown = describe::visible(text);
    shown.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// The values that a key accepts.
#[derive(Debug, Clone, Copy)]
pub enum ValueKind {
    Text,
    /// One of these names.
    Name(&'static [&'static str]),
    Flag,
    /// A whole number.
    Integer,
    Number,
    /// Two numbers.
    Pair,
    /// A string or a list of strings.
    Texts,
    /// A list of whole numbers.
    Integers,
    /// A list of numbers.
    Numbers,
    /// A list of pairs of whole numbers.
    Pairs,
    /// Bytes as `24GiB`.
    Size,
    /// A table from user-defined texts to one of these names.
    Map(&'static [&'static str]),
    /// A table from some of these names to texts.
    Fields(&'static [&'static str]),
    /// A list of tables with these keys.
    Tables(&'static [RecipeKey]),
    /// A table from user-defined names to texts, numbers, flags, lists and tables.
    Free,
}

/// A value of one of these kinds; `auto` is a text.
#[derive(Debug, Clone, PartialEq)]
pub enum KeyValue {
    Text(String),
    Integer(i64),
    Number(f64),
    Flag(bool),
    List(Vec<String>),
    Integers(Vec<usize>),
    Numbers(Vec<f64>),
    Pair([f64; 2]),
    Pairs(Vec<(usize, usize)>),
    Map(Vec<(String, String)>),
    /// The written keys of each table.
    Tables(Vec<Vec<(&'static str, KeyValue)>>),
    Free(JsonMap<String, serde_json::Value>),
}

/// The type of a field of a section. `By` is a marker: with it one implementation for
/// all enums can stand beside those of other types.
pub trait KeyType<By> {
    /// The values that a key of this type accepts.
    const KIND: ValueKind;
    /// Converts `value`, which is of kind `KIND` or `auto`, to the typed value.
    fn read(value: &KeyValue) -> Self;
}

pub struct ByName;
pub struct ByKind;

impl<T: NamedEnum> KeyType<ByName> for T {
    const KIND: ValueKind = ValueKind::Name(T::NAMES);
    fn read(value: &KeyValue) -> Self {
        match value {
            KeyValue::Text(name) => T::of(name),
            _ => T::of(""),
        }
    }
}

/// The value of a key that splits work into chunks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ChunkSize {
    /// The planner chooses.
    #[default]
    Auto,
    /// 0: no chunks.
    Whole,
    /// Items of a chunk, at least 1.
    Of(usize),
}

impl ChunkSize {
    /// As written: 0 is `Whole`.
    pub fn of(n: usize) -> Self {
        if n == 0 { Self::Whole } else { Self::Of(n) }
    }

    /// The number that a recipe has for it; `None` is `auto`.
    pub fn written(self) -> Option<usize> {
        match self {
            Self::Auto => None,
            Self::Whole => Some(0),
            Self::Of(n) => Some(n),
        }
    }
}

/// The value of a key for which `auto` is a value of its own, beside those of `T`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Auto<T> {
    /// As the reason in the table says.
    #[default]
    Auto,
    /// As written.
    Of(T),
}

impl<T> Auto<T> {
    /// The value, if it is not `auto`.
    pub fn given(&self) -> Option<&T> {
        match self {
            Self::Auto => None,
            Self::Of(value) => Some(value),
        }
    }
}

impl Auto<String> {
    /// True if the text is written and has no characters.
    pub fn is_empty(&self) -> bool {
        self.given().is_some_and(String::is_empty)
    }
}

impl From<&str> for Auto<String> {
    fn from(text: &str) -> Self {
        if text == AUTO {
            Self::Auto
        } else {
            Self::Of(text.into())
        }
    }
}

impl<T: fmt::Display> fmt::Display for Auto<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str(AUTO),
            Self::Of(value) => value.fmt(f),
        }
    }
}

/// The names of the values of `Auto<WeightStorage>`.
const STORAGES: [&str; 1 + WeightStorage::NAMES.len()] = {
    let mut names = [AUTO; 1 + WeightStorage::NAMES.len()];
    let mut i = 1;
    while i < names.len() {
        names[i] = WeightStorage::NAMES[i - 1];
        i += 1;
    }
    names
};

impl NamedEnum for Auto<WeightStorage> {
    const NAMES: &'static [&'static str] = &STORAGES;
    fn of(name: &str) -> Self {
        WeightStorage::parse(name).map_or(Self::Auto, Self::Of)
    }
}

impl Auto<WeightStorage> {
    /// The name of this value.
    pub fn name(self) -> &'static str {
        self.given().map_or(AUTO, |storage| storage.name())
    }
}

/// `type: kind, value => typed value`. Any other value, such as the `auto` of a number, gives the default of the type.
macro_rules! settings {
    ($($(#[doc = $doc:literal])? $type:ty: $kind:expr, $value:pat => $typed:expr;)+) => {
        $($(#[doc = $doc])? impl KeyType<ByKind> for $type {
            const KIND: ValueKind = $kind;
            fn read(value: &KeyValue) -> Self {
                match value {
                    $value => $typed,
                    _ => Self::default(),
                }
            }
        })+
    };
}
settings! {
    String: ValueKind::Text, KeyValue::Text(t) => t.clone();
    /// `None` is the empty text.
    Option<String>: ValueKind::Text, KeyValue::Text(t) => Some(t.clone()).filter(|t| !t.is_empty());
    Auto<String>: ValueKind::Text, KeyValue::Text(t) => Auto::from(t.as_str());
    bool: ValueKind::Flag, KeyValue::Flag(b) => *b;
    /// `None` is `auto`.
    Option<bool>: ValueKind::Flag, KeyValue::Flag(b) => Some(*b);
    i64: ValueKind::Integer, KeyValue::Integer(i) => *i;
    u64: ValueKind::Integer, KeyValue::Integer(i) => u64::try_from(*i).unwrap_or(0);
    usize: ValueKind::Integer, KeyValue::Integer(i) => usize::try_from(*i).unwrap_or(0);
    /// `None` is `auto`.
    Option<usize>: ValueKind::Integer, KeyValue::Integer(i) => usize::try_from(*i).ok();
    /// Bytes; `None` is `auto`.
    Option<u64>: ValueKind::Size, KeyValue::Text(t) => units::parse_bytes(t).ok();
    ChunkSize: ValueKind::Integer, KeyValue::Integer(n) => usize::try_from(*n).map_or(ChunkSize::Auto, ChunkSize::of);
    f64: ValueKind::Number, KeyValue::Number(x) => *x;
    /// `None` is `auto`.
    Option<f64>: ValueKind::Number, KeyValue::Number(x) => Some(*x);
    [f64; 2]: ValueKind::Pair, KeyValue::Pair(p) => *p;
    Vec<String>: ValueKind::Texts, KeyValue::List(l) => l.clone();
    Vec<Auto<String>>: ValueKind::Texts, KeyValue::List(l) => l.iter().map(|t| Auto::from(t.as_str())).collect();
    Vec<usize>: ValueKind::Integers, KeyValue::Integers(l) => l.clone();
    Vec<f64>: ValueKind::Numbers, KeyValue::Numbers(l) => l.clone();
    /// `None` is `auto`.
    Option<Vec<(usize, usize)>>: ValueKind::Pairs, KeyValue::Pairs(l) => Some(l.clone());
    JsonMap<String, serde_json::Value>: ValueKind::Free, KeyValue::Free(m) => m.clone();
    Vec<(String, WeightStorage)>: ValueKind::Map(WeightStorage::NAMES),
        KeyValue::Map(m) => m.iter().filter_map(|(name, t)| Some((name.clone(), WeightStorage::parse(t)?))).collect();
    Vec<(String, ChatRole)>: ValueKind::Map(ChatRole::NAMES),
        KeyValue::Map(m) => m.iter().filter_map(|(name, t)| Some((name.clone(), ChatRole::parse(t)?))).collect();
    Vec<(ColumnRole, String)>: ValueKind::Fields(ColumnRole::NAMES),
        KeyValue::Map(m) => m.iter().filter_map(|(name, t)| Some((ColumnRole::parse(name)?, t.clone()))).collect();
}
