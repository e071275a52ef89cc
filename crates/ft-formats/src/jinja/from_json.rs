//! JSON to values, and `tojson` as `json.dumps`.

use super::fail::{Fail, JinjaResult, charge, charge_text, check_text};
use super::print::{FLOAT, float_text, int_text};
use super::value::{Dict, Value};
use std::fmt::Write;
use std::rc::Rc;

/// Errors: nested too deeply.
pub(super) fn from_json(json: &serde_json::Value) -> JinjaResult<Value> {
    use serde_json::Value as Json;
    charge(20)?;
    Ok(match json {
        Json::Null => Value::None,
        Json::Bool(b) => Value::Bool(*b),
        Json::Number(n) => match (n.as_i64(), n.as_u64(), n.as_f64()) {
            (Some(n), ..) => Value::Int(n.into()),
            (_, Some(n), _) => Value::Int(n.into()),
            (_, _, Some(x)) => Value::Float(x),
            _ => return Err(Fail::unsupported("a number beyond the range of float")),
        },
        Json::String(s) => {
            charge(s.len())?;
            Value::str(s.as_str())
        }
        Json::Array(list) => Value::list(list.iter().map(from_json).collect::<JinjaResult<_>>()?)?,
        Json::Object(map) => {
            let mut out = Dict::default();
            for (key, value) in map {
                out.insert(Value::str(key.as_str()), from_json(value)?)?;
            }
            Value::Dict(Rc::new(out))
        }
    })
}

/// The arguments of `json.dumps` that transformers passes on.
pub(super) struct JsonStyle {
    pub ascii: bool,
    pub indent: Option<String>,
    pub item: String,
    pub key: String,
    pub sort: bool,
}

impl JsonStyle {
    /// Errors: the value has no JSON, or is too large.
    pub(super) fn dumps(&self, value: &Value) -> JinjaResult<String> {
        let mut out = String::new();
        self.write(&mut out, value, 0)?;
        charge_text(out.len())?;
        Ok(out)
    }

    fn line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn write(&self, out: &mut String, value: &Value, depth: usize) -> JinjaResult<()> {
        check_text(out)?;
        charge(20)?;
        match value {
            Value::None => out.push_str("null"),
            Value::Bool(b) => out.push_str(if *b { "true" } else { "false" }),
            Value::Int(n) => out.push_str(&int_text(*n)),
            Value::Float(x) => {
                charge(FLOAT)?;
                out.push_str(&json_float(*x));
            }
            Value::Str(s) | Value::Markup(s) => self.string(out, s)?,
            Value::List(seq) | Value::Tuple(seq) | Value::Group(seq) => {
                out.push('[');
                for (i, item) in seq.items.iter().enumerate() {
                    if i > 0 {
                        out.push_str(&self.item);
                    }
                    self.line(out, depth + 1);
                    self.write(out, item, depth + 1)?;
                }
                if !seq.items.is_empty() {
                    self.line(out, depth);
                }
                out.push(']');
            }
            Value::Dict(dict) => {
                let mut entries: Vec<&(Value, Value)> = dict.iter().collect();
                if self.sort {
                    let keys: Vec<Value> = entries.iter().map(|(k, _)| k.clone()).collect();
                    let order = super::ops::sorted(&keys, false)?;
                    entries = order.into_iter().map(|i| entries[i]).collect();
                }
                out.push('{');
                for (i, (key, value)) in entries.iter().enumerate() {
                    if i > 0 {
                        out.push_str(&self.item);
                    }
                    self.line(out, depth + 1);
                    match key {
                        Value::Str(s) | Value::Markup(s) => self.string(out, s)?,
                        Value::None => out.push_str("\"null\""),
                        Value::Bool(b) => {
                            let _ = write!(out, "\"{b}\"");
                        }
                        Value::Int(n) => {
                            let _ = write!(out, "\"{n}\"");
                        }
                        Value::Float(x) => {
                            charge(FLOAT)?;
                            let _ = write!(out, "\"{}\"", json_float(*x));
                        }
                        other => {
                            return Err(Fail::failed(format!(
                                "tojson: keys must be str, int, float, bool or None, not {}",
                                other.type_name()
                            )));
                        }
                    }
                    out.push_str(&self.key);
                    self.write(out, value, depth + 1)?;
                }
                if dict.len() > 0 {
                    self.line(out, depth);
                }
                out.push('}');
            }
            other => {
                let text = format!("tojson: Object of type {} is not JSON serializable", other.type_name());
                return Err(Fail::failed(text));
            }
        }
        Ok(())
    }

    fn string(&self, out: &mut String, text: &str) -> JinjaResult<()> {
        charge(text.len().saturating_mul(2))?;
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.ascii && c as u32 > 0x7e) => {
                    // The escape is longer than the character, and slower to write.
                    charge(64)?;
                    let mut units = [0u16; 2];
                    for unit in c.encode_utf16(&mut units) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
        Ok(())
    }
}

/// A float as `json.dumps` of Python writes it.
fn json_float(x: f64) -> String {
    match x {
        x if x.is_nan() => "NaN".into(),
        f64::INFINITY => "Infinity".into(),
        f64::NEG_INFINITY => "-Infinity".into(),
        x => float_text(x),
    }
}
