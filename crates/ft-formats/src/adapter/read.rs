//! Reads the values of an `adapter_config.json`, with an error for each wrong value.

use super::Targets;
use crate::json_kind;
use ft_base::{Error, Result};
use serde_json::{Map, Value};
use std::path::Path;

pub(super) struct ConfigReader<'a> {
    pub map: &'a Map<String, Value>,
    pub path: &'a Path,
}

impl ConfigReader<'_> {
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    pub(super) fn wrong(&self, key: &str, expected: &str) -> Error {
        Error::format(format!("`{key}` has a wrong value"))
            .at_path(self.path)
            .found(self.map.get(key).map_or("nothing".into(), json_kind))
            .expected(expected)
    }

    pub(super) fn number(&self, key: &str, default: f64) -> Result<f64> {
        match self.get(key) {
            None => Ok(default),
            Some(v) => v
                .as_f64()
                .filter(|x| x.is_finite())
                .ok_or_else(|| self.wrong(key, "a finite number")),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<bool> {
        self.flag_or(key, false)
    }

    pub(super) fn flag_or(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(v) => v.as_bool().ok_or_else(|| self.wrong(key, "true or false")),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<String>> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => Ok(Some(v.as_str().ok_or_else(|| self.wrong(key, "a string"))?.to_string())),
        }
    }

    /// A list of strings, or a single string.
    pub(super) fn texts(&self, key: &str) -> Result<Vec<String>> {
        match self.get(key) {
            None => Ok(Vec::new()),
            Some(Value::String(s)) => Ok(vec![s.clone()]),
            Some(Value::Array(list)) => list
                .iter()
                .map(|v| {
                    v.as_str()
                        .map(str::to_string)
                        .ok_or_else(|| self.wrong(key, "a list of strings"))
                })
                .collect(),
            Some(_) => Err(self.wrong(key, "a list of strings")),
        }
    }

    pub(super) fn targets(&self, key: &str) -> Result<Option<Targets>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(s)) if s == "all-linear" => Ok(Some(Targets::AllLinear)),
            Some(Value::String(s)) => Ok(Some(Targets::Pattern(s.clone()))),
            Some(_) => {
                let mut list = self.texts(key)?;
                list.sort();
                list.dedup();
                Ok(Some(Targets::List(list)))
            }
        }
    }

    pub(super) fn rank(&self, key: &str, value: &Value) -> Result<usize> {
        match value.as_u64() {
            Some(n) if (1..=1 << 20).contains(&n) => Ok(n as usize),
            _ => Err(self.wrong(key, "a whole number of at least 1")),
        }
    }

    pub(super) fn rank_or(&self, key: &str, default: usize) -> Result<usize> {
        match self.get(key) {
            None => Ok(default),
            Some(v) => self.rank(key, v),
        }
    }

    /// In file order: the first key that matches a module applies.
    pub(super) fn table<T>(&self, key: &str, read: impl Fn(&Value) -> Result<T>) -> Result<Vec<(String, T)>> {
        match self.get(key) {
            None => Ok(Vec::new()),
            Some(Value::Object(map)) => map.iter().map(|(k, v)| Ok((k.clone(), read(v)?))).collect(),
            Some(_) => Err(self.wrong(key, "an object")),
        }
    }

    /// Row ids: a list belongs to the embedding, an object names the module of each list.
    pub(super) fn token_rows(&self, key: &str) -> Result<Vec<(String, Vec<u32>)>> {
        let wrong = || self.wrong(key, "a list of token ids, or an object of such lists");
        let ids = |v: &Value| -> Result<Vec<u32>> {
            let list = v.as_array().ok_or_else(wrong)?.iter();
            let ids: Vec<u32> = list
                .map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(wrong))
                .collect::<Result<_>>()?;
            let mut sorted = ids.clone();
            sorted.sort_unstable();
            sorted.dedup();
            if sorted.len() == ids.len() {
                Ok(ids)
            } else {
                Err(self.wrong(key, "every token once"))
            }
        };
        Ok(match self.get(key) {
            None => Vec::new(),
            Some(Value::Array(list)) if list.is_empty() => Vec::new(),
            Some(list @ Value::Array(_)) => vec![("embed_tokens".to_string(), ids(list)?)],
            Some(Value::Object(map)) => {
                let each = map.iter().map(|(module, list)| Ok((module.clone(), ids(list)?)));
                each.collect::<Result<_>>()?
            }
            Some(_) => return Err(wrong()),
        })
    }

    /// One layer number or a list of them.
    pub(super) fn layers(&self, key: &str) -> Result<Option<Vec<usize>>> {
        let wrong = || self.wrong(key, "a layer number or a list of them");
        let one = |v: &Value| v.as_u64().map(|n| n as usize).ok_or_else(wrong);
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(list)) if list.is_empty() => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list.iter().map(one).collect::<Result<_>>()?)),
            Some(single) => Ok(Some(vec![one(single)?])),
        }
    }
}

/// True if a value means "not used".
pub(super) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::Array(v) => v.is_empty(),
        Value::Object(m) => m.is_empty(),
        Value::String(s) => s.is_empty(),
        Value::Number(n) => n.as_f64() == Some(0.0),
    }
}
