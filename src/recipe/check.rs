//! Typed values: every written key must be known, have the right type and be in range; other keys get their default.
//! Uses the table of keys only; `lower` checks combinations of keys.

use super::draft::{Draft, Problem, TextPosition, WrittenKey, WrittenValue};
use super::table::{self, KeyPath, KeyRange, RecipeKey, TABLES};
use super::value::{AUTO, KeyType, KeyValue, ValueKind};
use super::{peers, suggest};
use crate::base::{Error, secrets, units};
use std::collections::HashMap;
use std::sync::LazyLock;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueOrigin {
    Recipe,
    Argument,
    Default,
}

/// One key of the table with its value.
#[derive(Debug)]
pub struct KeyEntry {
    pub key: &'static RecipeKey,
    pub value: KeyValue,
    pub origin: ValueOrigin,
    /// The position in the text or the arguments.
    pub place: Option<TextPosition>,
    /// False: the written value is refused, and `value` is a placeholder.
    pub sound: bool,
}

impl KeyEntry {
    pub fn written(&self) -> bool {
        self.origin != ValueOrigin::Default
    }
}

/// Every key, in the order of the table.
#[derive(Debug)]
pub struct KeyValues(pub Vec<KeyEntry>);

impl KeyValues {
    /// These keys with their defaults.
    pub fn defaults(keys: impl Iterator<Item = &'static RecipeKey>) -> Self {
        let entry = |key| KeyEntry {
            key,
            value: default_of(key),
            origin: ValueOrigin::Default,
            place: None,
            sound: true,
        };
        Self(keys.map(entry).collect())
    }

    pub fn entry(&self, key: KeyPath) -> Option<&KeyEntry> {
        self.0.iter().find(|e| e.key.path == key)
    }

    /// The typed value of a key.
    pub fn get<T: KeyType<By>, By>(&self, key: KeyPath) -> T {
        // Every key has an entry: both come from the sections.
        let none = KeyValue::Text(String::new());
        T::read(self.entry(key).map_or(&none, |e| &e.value))
    }

    /// True if the value is `auto`.
    pub fn is_auto(&self, key: KeyPath) -> bool {
        self.entry(key).is_some_and(|e| e.value == KeyValue::Text(AUTO.into()))
    }
}

/// The default of a key; for a required key the empty value of its kind. The texts of the table are parsed once.
pub fn default_of(key: &RecipeKey) -> KeyValue {
    static DEFAULTS: LazyLock<HashMap<&'static str, (&'static RecipeKey, KeyValue)>> = LazyLock::new(|| {
        let defaults = table::keys().map(|key| (key.path.0, (key, parsed_default(key))));
        defaults.collect()
    });
    match DEFAULTS.get(key.path.0) {
        Some((of_table, value)) if std::ptr::eq(*of_table, key) => value.clone(),
        // A key inside a list of tables.
        _ => parsed_default(key),
    }
}

fn parsed_default(key: &RecipeKey) -> KeyValue {
    let empty = match key.kind {
        ValueKind::Texts => KeyValue::List(Vec::new()),
        ValueKind::Map(_) | ValueKind::Fields(_) => KeyValue::Map(Vec::new()),
        ValueKind::Tables(_) => KeyValue::Tables(Vec::new()),
        ValueKind::Free => KeyValue::Free(serde_json::Map::new()),
        _ => KeyValue::Text(String::new()),
    };
    let source = format!("value = {}", key.default);
    let draft = Draft::new(&source, "default", &[]);
    let written = draft.written.first().cloned();
    written
        .and_then(|w| convert(&draft, key, &w).ok())
        .filter(|_| !key.default.is_empty())
        .unwrap_or(empty)
}

/// Replaces defaults by the values of the draft. Errors go to `draft.problems`, repeated arguments to `warnings`.
pub fn check(draft: &mut Draft, values: &mut KeyValues, warnings: &mut Vec<String>) {
    let mut refused: Vec<(Vec<String>, TextPosition)> = Vec::new();
    for written in draft.written.clone() {
        let path = written.dotted();
        // If a whole table is refused, its keys give no further errors.
        let inside = |(table, at): &(Vec<String>, TextPosition)| {
            written.path.len() > table.len()
                && written.path.starts_with(table)
                && match (at, &written.key_at) {
                    (TextPosition::File(_), TextPosition::File(_)) => true,
                    (at, own) => at == own,
                }
        };
        if refused.iter().any(inside) {
            continue;
        }
        let is_table = TABLES
            .iter()
            .any(|(t, _)| *t == path || t.starts_with(&format!("{path}.")));
        if is_table {
            if let Err(e) = check_table(draft, &written) {
                draft.problems.push(Problem::new(&written.value_at, e));
                refused.push((written.path.clone(), written.key_at.clone()));
            }
            continue;
        }
        if let Some(entry) = values.0.iter_mut().find(|e| is_in_map(e.key, &path)) {
            if let Err(problem) = put(draft, entry, &written) {
                entry.sound = false;
                draft.problems.push(problem);
                refused.push((written.path.clone(), written.key_at.clone()));
            }
            continue;
        }
        let Some(entry) = values.0.iter_mut().find(|e| e.key.path.0 == path) else {
            draft.problems.push(unknown(draft, &written));
            refused.push((written.path.clone(), written.key_at.clone()));
            continue;
        };
        let origin = match written.key_at {
            TextPosition::File(_) => ValueOrigin::Recipe,
            TextPosition::Argument(_) => ValueOrigin::Argument,
        };
        if entry.origin == ValueOrigin::Argument {
            warnings.push(format!(
                "`{path}` is given twice on the command line: the last value is used"
            ));
        }
        entry.origin = origin;
        entry.place = Some(written.value_at.clone());
        match convert(draft, entry.key, &written) {
            Ok(value) => {
                entry.value = value;
                entry.sound = true;
            }
            Err(problems) => {
                entry.sound = false;
                draft.problems.extend(problems);
                refused.push((written.path.clone(), written.key_at.clone()));
            }
        }
    }
}

/// True if `path` is a user-defined name in the table of `key`.
fn is_in_map(key: &RecipeKey, path: &str) -> bool {
    let below = path.strip_prefix(key.path.0).is_some_and(|rest| rest.starts_with('.'));
    below && matches!(key.kind, ValueKind::Map(_) | ValueKind::Fields(_) | ValueKind::Free)
}

/// Adds one entry of a table with user-defined names.
fn put(draft: &Draft, entry: &mut KeyEntry, written: &WrittenKey) -> Result<(), Problem> {
    let path = entry.key.path.0;
    let name = written.dotted()[path.len() + 1..].to_string();
    let key = entry.key;
    let fault = |error: Error| {
        let error = error.at(draft.show(&written.value_at)).expected(expectation(key));
        Problem::new(&written.value_at, error)
    };
    let origin = match written.key_at {
        TextPosition::File(_) => ValueOrigin::Recipe,
        TextPosition::Argument(_) => ValueOrigin::Argument,
    };
    if let KeyValue::Free(map) = &mut entry.value {
        let below = written.path.get(path.split('.').count()..).unwrap_or_default();
        let value = match (&written.value, draft.raw_value(&written.value_at)) {
            // A bare word that looks like a date.
            (WrittenValue::Date, Some(raw)) => Some(raw.into()),
            (value, _) => value.json(),
        };
        let Some(value) = value else {
            return Err(fault(
                Error::usage(format!("`{name}` in `{path}` has the wrong type")).found(written.value.describe()),
            ));
        };
        put_free(map, below, value);
        (entry.origin, entry.place) = (origin, Some(written.value_at.clone()));
        return Ok(());
    }
    let value = match &written.value {
        WrittenValue::Table => {
            return Err(fault(Error::usage(format!("`{name}` in `{path}` is a table")).hint(
                match entry.key.kind {
                    ValueKind::Map(_) => "write the name in quotes: `\"layers.0.\" = \"bf16\"`",
                    _ => "write the name of a column in quotes: `prompt = \"question\"`",
                },
            )));
        }
        _ => as_text(draft, written).unwrap_or_default(),
    };
    match entry.key.kind {
        ValueKind::Map(names) if name.is_empty() || !names.contains(&value.as_str()) => {
            return Err(fault(Error::usage(format!(
                "`{}` is not a value of `{path}` (for `{name}`)",
                secrets::mask(&value)
            ))));
        }
        ValueKind::Fields(names) if !names.contains(&name.as_str()) => {
            let error = Error::usage(format!("`{name}` is not a name of `{path}`"));
            let other_way = names.contains(&value.as_str());
            let hint = if other_way {
                Some(format!("write `{value} = \"{name}\"`: the column is on the right"))
            } else {
                suggest::value(path, &name, names)
            };
            return Err(fault(match hint {
                Some(hint) => error.hint(hint),
                None => error,
            }));
        }
        ValueKind::Fields(_) if value.is_empty() => {
            return Err(fault(Error::usage(format!(
                "`{name}` in `{path}` is not the name of a column"
            ))));
        }
        _ => {}
    }
    let KeyValue::Map(map) = &mut entry.value else {
        return Ok(());
    };
    map.retain(|(known, _)| *known != name);
    map.push((name, value));
    (entry.origin, entry.place) = (origin, Some(written.value_at.clone()));
    Ok(())
}

/// Puts a value at a path of names; a table that an argument names again keeps its other values.
fn put_free(map: &mut serde_json::Map<String, serde_json::Value>, path: &[String], value: serde_json::Value) {
    match path {
        [] => {}
        [name] if value.is_object() => drop(map.entry(name.clone()).or_insert(value)),
        [name] => drop(map.insert(name.clone(), value)),
        [name, rest @ ..] => {
            let inner = map.entry(name.clone()).or_insert_with(|| serde_json::json!({}));
            if !inner.is_object() {
                *inner = serde_json::json!({});
            }
            if let serde_json::Value::Object(inner) = inner {
                put_free(inner, rest, value);
            }
        }
    }
}

fn check_table(draft: &Draft, written: &WrittenKey) -> Result<(), Error> {
    let path = written.dotted();
    match (&written.value, &written.key_at) {
        (WrittenValue::Table, TextPosition::File(_)) => Ok(()),
        (WrittenValue::Table, TextPosition::Argument(_)) => Err(Error::usage(format!("`{path}` is a table"))
            .at(draft.show(&written.value_at))
            .hint("set one key, as in `train.max_steps=20`")),
        (other, _) => Err(Error::usage(format!("`{path}` is a table"))
            .at(draft.show(&written.value_at))
            .found(other.describe())
            .expected(format!("`[{path}]` with keys below it"))),
    }
}

fn unknown(draft: &Draft, written: &WrittenKey) -> Problem {
    let path = written.dotted();
    let place = draft.show(&written.key_at);
    let (name, table) = match written.path.split_last() {
        Some((name, table)) => (name.clone(), table.join(".")),
        None => (String::new(), String::new()),
    };
    let is_table = matches!(written.value, WrittenValue::Table | WrittenValue::Tables(_));
    let what = match (is_table, table.is_empty()) {
        (true, _) => format!("unknown table `[{path}]`"),
        (false, true) => format!("unknown key `{name}` outside of any table"),
        (false, false) => format!("unknown key `{name}` in `[{table}]`"),
    };
    let error = Error::usage(what).at(place);
    let argument = draft.raw_value(&written.key_at).filter(|_| table.is_empty());
    let hint = match argument.zip(peers::key_for(&name)) {
        Some((value, key)) => format!("write `{key}={}`", secrets::mask(value)),
        None => suggest::hint(&written.path, is_table),
    };
    Problem::new(&written.key_at, error.hint(hint))
}

/// Describes the values that a key accepts, for errors and the reference.
pub fn expectation(key: &RecipeKey) -> String {
    let KeyRange { min, max, .. } = key.range;
    let accepted = match key.kind {
        ValueKind::Text => "a string".into(),
        ValueKind::Name(names) => format!("one of {}", names.join(", ")),
        ValueKind::Flag => "`true` or `false`".into(),
        ValueKind::Integer if max.is_finite() => format!("a whole number from {min} to {max}"),
        ValueKind::Integer => format!("a whole number, at least {min}"),
        ValueKind::Number => format!("a number{}", limits(key.range)),
        ValueKind::Pair => format!("a list of two numbers, each{}", limits(key.range)),
        ValueKind::Texts => "a string or a list of strings".into(),
        ValueKind::Integers => "a list of whole numbers, each at least 0".into(),
        ValueKind::Numbers => "a list of numbers".into(),
        ValueKind::Pairs => "a list of pairs of whole numbers such as `[[1, 2], [3, 6]]`".into(),
        ValueKind::Size => "a size such as `24GiB`".into(),
        ValueKind::Map(names) => format!("a table of names, each with one of {}", names.join(", ")),
        ValueKind::Fields(names) => format!("a table with some of {}, each with a column", names.join(", ")),
        ValueKind::Tables(_) => "a list of tables".into(),
        ValueKind::Free => "a table of names and values (texts, numbers, `true`, `false`, lists)".into(),
    };
    if key.accepts_auto() {
        format!("`auto`, or {accepted}")
    } else {
        accepted
    }
}

fn limits(range: KeyRange) -> String {
    let low = if range.min_open { "above" } else { "at least" };
    let high = if range.max_open { "below" } else { "at most" };
    if range.max.is_finite() {
        format!(" {low} {} and {high} {}", range.min, range.max)
    } else {
        format!(" {low} {}", range.min)
    }
}

/// Returns the value as text. For an argument also a bare word that TOML parses as a number, a flag or a date.
fn as_text(draft: &Draft, written: &WrittenKey) -> Option<String> {
    match (&written.value, draft.raw_value(&written.value_at)) {
        (WrittenValue::Text(t), _) => Some(t.clone()),
        (
            WrittenValue::Integer(_) | WrittenValue::Number(_) | WrittenValue::Flag(_) | WrittenValue::Date,
            Some(raw),
        ) => Some(raw.to_string()),
        _ => None,
    }
}

fn convert(draft: &Draft, key: &RecipeKey, written: &WrittenKey) -> Result<KeyValue, Vec<Problem>> {
    let path = key.path.0;
    let one = |error: Error| vec![Problem::new(&written.value_at, error.at(draft.show(&written.value_at)))];
    let wrong_type = || {
        let error = Error::usage(format!("`{path}` has the wrong type"))
            .found(written.value.describe())
            .expected(expectation(key));
        one(match suggest::type_hint(key, &written.value) {
            Some(hint) => error.hint(hint),
            None => error,
        })
    };
    let out_of_range = |found: String| {
        one(Error::usage(format!("`{path}` is out of range"))
            .found(found)
            .expected(expectation(key)))
    };
    let whole = |v: &WrittenValue| match v {
        WrittenValue::Integer(i) => usize::try_from(*i).ok(),
        _ => None,
    };
    if key.accepts_auto() && matches!(&written.value, WrittenValue::Text(t) if t == AUTO) {
        return Ok(KeyValue::Text(AUTO.into()));
    }
    match key.kind {
        ValueKind::Text => as_text(draft, written).map(KeyValue::Text).ok_or_else(wrong_type),
        ValueKind::Name(names) => {
            let Some(text) = as_text(draft, written) else {
                return Err(wrong_type());
            };
            if names.contains(&text.as_str()) {
                return Ok(KeyValue::Text(text));
            }
            let shown = secrets::mask(&text);
            let error = Error::usage(format!("`{shown}` is not a value of `{path}`")).expected(expectation(key));
            Err(one(match suggest::value(path, &text, names) {
                Some(hint) => error.hint(hint),
                None => error,
            }))
        }
        ValueKind::Flag => match written.value {
            WrittenValue::Flag(b) => Ok(KeyValue::Flag(b)),
            _ => Err(wrong_type()),
        },
        ValueKind::Integer => match written.value {
            WrittenValue::Integer(i) if key.range.contains(i as f64) => Ok(KeyValue::Integer(i)),
            WrittenValue::Integer(i) => Err(out_of_range(i.to_string())),
            _ => Err(wrong_type()),
        },
        ValueKind::Number => match as_number(&written.value) {
            Some(x) if key.range.contains(x) => Ok(KeyValue::Number(x)),
            Some(x) => Err(out_of_range(x.to_string())),
            None => Err(wrong_type()),
        },
        ValueKind::Pair => {
            let WrittenValue::List(items) = &written.value else {
                return Err(wrong_type());
            };
            let numbers: Option<Vec<f64>> = items.iter().map(|(v, _)| as_number(v)).collect();
            match numbers.as_deref() {
                Some(&[a, b]) if key.range.contains(a) && key.range.contains(b) => Ok(KeyValue::Pair([a, b])),
                Some(&[a, b]) => Err(out_of_range(format!("[{a}, {b}]"))),
                _ => Err(wrong_type()),
            }
        }
        ValueKind::Pairs => {
            let pair = |v: &WrittenValue| match v {
                WrittenValue::List(items) => match &items[..] {
                    [(a, _), (b, _)] => Some((whole(a)?, whole(b)?)),
                    _ => None,
                },
                _ => None,
            };
            match &written.value {
                WrittenValue::List(items) => {
                    let all: Option<Vec<(usize, usize)>> = items.iter().map(|(v, _)| pair(v)).collect();
                    all.map(KeyValue::Pairs).ok_or_else(wrong_type)
                }
                _ => Err(wrong_type()),
            }
        }
        ValueKind::Integers => {
            let all = match &written.value {
                WrittenValue::List(items) => items.iter().map(|(v, _)| whole(v)).collect(),
                single => whole(single).map(|i| vec![i]),
            };
            all.map(KeyValue::Integers).ok_or_else(wrong_type)
        }
        ValueKind::Numbers => {
            let numbers: Option<Vec<f64>> = match &written.value {
                WrittenValue::List(items) => items.iter().map(|(v, _)| as_number(v)).collect(),
                single => as_number(single).map(|x| vec![x]),
            };
            let finite = numbers.filter(|l| l.iter().all(|x| x.is_finite()));
            finite.map(KeyValue::Numbers).ok_or_else(wrong_type)
        }
        ValueKind::Texts => {
            if let WrittenValue::List(items) = &written.value {
                let mut out = Vec::new();
                let mut problems = Vec::new();
                for (item, at) in items {
                    match item {
                        WrittenValue::Text(t) if !t.is_empty() => out.push(t.clone()),
                        other => {
                            let error = Error::usage(format!("`{path}` has an item of the wrong type"))
                                .at(draft.show(at))
                                .found(other.describe())
                                .expected("a string that is not empty");
                            problems.push(Problem::new(at, error));
                        }
                    }
                }
                return if problems.is_empty() {
                    Ok(KeyValue::List(out))
                } else {
                    Err(problems)
                };
            }
            match as_text(draft, written) {
                Some(t) if t.is_empty() => Ok(KeyValue::List(Vec::new())),
                Some(t) => match suggest::list_hint(path, &t) {
                    Some(hint) => Err(one(Error::usage(format!(
                        "`{}` is not a value of `{path}`",
                        secrets::mask(&t)
                    ))
                    .expected(expectation(key))
                    .hint(hint))),
                    None => Ok(KeyValue::List(vec![t])),
                },
                None => Err(wrong_type()),
            }
        }
        // The entries follow one by one.
        ValueKind::Map(_) | ValueKind::Fields(_) => match written.value {
            WrittenValue::Table => Ok(KeyValue::Map(Vec::new())),
            _ => Err(wrong_type()),
        },
        ValueKind::Tables(keys) => match &written.value {
            WrittenValue::Tables(tables) => {
                let read = |table: &Vec<WrittenKey>| one_table(draft, keys, written, table);
                let (mut out, mut problems) = (Vec::new(), Vec::new());
                for table in tables.iter().map(read) {
                    match table {
                        Ok(table) => out.push(table),
                        Err(faults) => problems.extend(faults),
                    }
                }
                if problems.is_empty() {
                    Ok(KeyValue::Tables(out))
                } else {
                    Err(problems)
                }
            }
            WrittenValue::List(items) if items.is_empty() => Ok(KeyValue::Tables(Vec::new())),
            _ => Err(wrong_type()),
        },
        ValueKind::Free => match written.value {
            WrittenValue::Table => Ok(KeyValue::Free(serde_json::Map::new())),
            _ => Err(wrong_type()),
        },
        ValueKind::Size => match &written.value {
            WrittenValue::Integer(i) if *i > 0 => Ok(KeyValue::Text(i.to_string())),
            WrittenValue::Text(t) => match units::parse_bytes(t) {
                Ok(n) if n > 0 => Ok(KeyValue::Text(t.trim().to_string())),
                _ => Err(out_of_range(format!("`{}`", secrets::mask(t)))),
            },
            WrittenValue::Integer(i) => Err(out_of_range(i.to_string())),
            _ => Err(wrong_type()),
        },
    }
}

/// The values of one table in a list of tables.
fn one_table(
    draft: &Draft,
    keys: &'static [RecipeKey],
    list: &WrittenKey,
    table: &[WrittenKey],
) -> Result<Vec<(&'static str, KeyValue)>, Vec<Problem>> {
    let mut values = KeyValues::defaults(keys.iter());
    let mut problems = Vec::new();
    for written in table {
        let path = [list.path.clone(), written.path.clone()].concat().join(".");
        let entry = values
            .0
            .iter_mut()
            .find(|e| e.key.path.0 == path || is_in_map(e.key, &path));
        let Some(entry) = entry else {
            let name = written.path.first().map_or("", String::as_str);
            let names = keys.iter().map(|key| key.name);
            let error = Error::usage(format!("unknown key `{}` in `{}`", written.dotted(), list.dotted()))
                .at(draft.show(&written.key_at));
            let hint = match suggest::nearest(name, names.clone()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("the keys are {}", names.collect::<Vec<_>>().join(", ")),
            };
            problems.push(Problem::new(&written.key_at, error.hint(hint)));
            continue;
        };
        let whole = WrittenKey {
            path: path.split('.').map(str::to_string).collect(),
            ..written.clone()
        };
        if entry.key.path.0 != path {
            problems.extend(put(draft, entry, &whole).err());
            continue;
        }
        match convert(draft, entry.key, &whole) {
            Ok(value) => {
                entry.value = value;
                entry.origin = ValueOrigin::Recipe;
            }
            Err(faults) => problems.extend(faults),
        }
    }
    let missing = |e: &&KeyEntry| e.key.default.is_empty() && !e.written();
    if let Some(entry) = values.0.iter().find(missing).filter(|_| problems.is_empty()) {
        let error = Error::usage(format!("a table of `{}` has no `{}`", list.dotted(), entry.key.name));
        problems.push(Problem::new(&list.value_at, error.at(draft.show(&list.value_at))));
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    let written = values.0.into_iter().filter(KeyEntry::written);
    Ok(written.map(|e| (e.key.name, e.value)).collect())
}

fn as_number(value: &WrittenValue) -> Option<f64> {
    match value {
        WrittenValue::Integer(i) => Some(*i as f64),
        WrittenValue::Number(x) => Some(*x),
        _ => None,
    }
}
