//! `str(value)` and `repr(value)` of Python.

use super::fail::{Fail, JinjaResult, charge, charge_text, check_text};
use super::interp::Interp;
use super::unicode::is_printable;
use super::value::{Dict, Object, Value, View, whole};
use std::fmt::Write;
use std::sync::Arc;

pub(super) fn int_text(n: i128) -> String {
    n.to_string()
}

/// Work of one float as text: some need exact arithmetic with large integers.
pub(super) const FLOAT: usize = 1000;

/// The fewest digits that read back, as `repr(float)`.
pub(super) fn float_text(x: f64) -> String {
    match x {
        x if x.is_nan() => "nan".into(),
        f64::INFINITY => "inf".into(),
        f64::NEG_INFINITY => "-inf".into(),
        x if x != 0.0 && !(1e-4..1e16).contains(&x.abs()) => exponent(&even(x, format!("{x:e}"))),
        x => match whole(x) {
            Some(_) => format!("{x:.1}"),
            None => even(x, format!("{x}")),
        },
    }
}

/// The text `shortest` of Rust. If another text of this length is equally near, Python takes the one with an even last
/// digit.
fn even(x: f64, shortest: String) -> String {
    let (mantissa, has_exponent) = match shortest.split_once('e') {
        Some((mantissa, _)) => (mantissa, true),
        None => (&*shortest, false),
    };
    // No float is halfway between two texts of fewer digits that both read back.
    if mantissa.len() < 16 {
        return shortest;
    }
    let places = mantissa.split_once('.').map_or(0, |(_, digits)| digits.len());
    let rounded = if has_exponent {
        format!("{x:.places$e}")
    } else {
        format!("{x:.places$}")
    };
    if rounded.parse() == Ok(x) { rounded } else { shortest }
}

/// `1.5e7` of Rust as `1.5e+07` of C.
pub(super) fn exponent(text: &str) -> String {
    match text.split_once('e') {
        Some((mantissa, e)) => {
            let (sign, digits) = e.strip_prefix('-').map_or(('+', e), |d| ('-', d));
            format!("{mantissa}e{sign}{digits:0>2}")
        }
        None => text.to_string(),
    }
}

impl Interp<'_> {
    /// `str(value)`. Errors: the text would hold an address in memory, or is too long.
    pub(super) fn text(&self, value: &Value) -> JinjaResult<Arc<str>> {
        Ok(match value {
            Value::Str(s) | Value::Markup(s) => s.clone(),
            Value::Undefined(_) => "".into(),
            _ => {
                let mut out = String::new();
                repr(&mut out, value, 0, &self.namespaces)?;
                charge_text(out.len())?;
                out.into()
            }
        })
    }

    pub(super) fn repr_text(&self, value: &Value) -> JinjaResult<String> {
        let mut out = String::new();
        repr(&mut out, value, 0, &self.namespaces)?;
        charge_text(out.len())?;
        Ok(out)
    }
}

/// `repr` of a value that holds no namespace.
pub(super) fn simple_repr(value: &Value) -> JinjaResult<String> {
    let mut out = String::new();
    repr(&mut out, value, 0, &[])?;
    charge_text(out.len())?;
    Ok(out)
}

fn sequence<'v>(
    out: &mut String,
    items: impl Iterator<Item = &'v Value>,
    depth: usize,
    spaces: &[Dict],
) -> JinjaResult<()> {
    for (i, item) in items.enumerate() {
        if i > 0 {
            out.push_str(", ");
        }
        repr(out, item, depth + 1, spaces)?;
    }
    Ok(())
}

fn repr(out: &mut String, value: &Value, depth: usize, spaces: &[Dict]) -> JinjaResult<()> {
    if depth > 250 {
        return Err(Fail::limit("a value is nested too deeply"));
    }
    check_text(out)?;
    charge(20)?;
    match value {
        Value::None => out.push_str("None"),
        Value::Undefined(_) => out.push_str("Undefined"),
        Value::Bool(b) => out.push_str(if *b { "True" } else { "False" }),
        Value::Int(n) => {
            let _ = write!(out, "{n}");
        }
        Value::Float(x) => {
            charge(FLOAT)?;
            out.push_str(&float_text(*x));
        }
        Value::Str(s) => quote(out, s)?,
        Value::Markup(s) => {
            out.push_str("Markup(");
            quote(out, s)?;
            out.push(')');
        }
        Value::List(seq) => {
            out.push('[');
            sequence(out, seq.items.iter(), depth, spaces)?;
            out.push(']');
        }
        Value::Tuple(seq) | Value::Group(seq) => {
            out.push('(');
            sequence(out, seq.items.iter(), depth, spaces)?;
            out.push_str(if seq.items.len() == 1 { ",)" } else { ")" });
        }
        Value::Dict(dict) => pairs(out, dict.iter(), depth, spaces)?,
        Value::View(view, dict) => {
            out.push_str(value.type_name());
            out.push_str("([");
            match view {
                View::Keys => sequence(out, dict.iter().map(|(k, _)| k), depth, spaces)?,
                View::Values => sequence(out, dict.iter().map(|(_, v)| v), depth, spaces)?,
                View::Items => {
                    for (i, (key, value)) in dict.iter().enumerate() {
                        out.push_str(if i > 0 { ", (" } else { "(" });
                        sequence(out, [key, value].into_iter(), depth, spaces)?;
                        out.push(')');
                    }
                }
            }
            out.push_str("])");
        }
        Value::Range(r) => {
            let _ = match r.step {
                1 => write!(out, "range({}, {})", r.start, r.stop),
                step => write!(out, "range({}, {}, {step})", r.start, r.stop),
            };
        }
        Value::Namespace(at) => {
            out.push_str("<Namespace ");
            match spaces.get(*at) {
                Some(dict) => pairs(out, dict.iter(), depth, spaces)?,
                None => return Err(address(value)),
            }
            out.push('>');
        }
        Value::Iter(_) => return Err(address(value)),
        Value::Object(object) => match &**object {
            Object::Macro { name, .. } => match name {
                Some(name) => {
                    let _ = write!(out, "<Macro '{name}'>");
                }
                None => out.push_str("<Macro anonymous>"),
            },
            Object::Loop(state) => {
                let length = super::loops::length(state)?;
                let _ = write!(out, "<LoopContext {}/{length}>", state.borrow().index0 + 1);
            }
            _ => return Err(address(value)),
        },
    }
    Ok(())
}

fn pairs<'v>(
    out: &mut String,
    entries: impl Iterator<Item = &'v (Value, Value)>,
    depth: usize,
    spaces: &[Dict],
) -> JinjaResult<()> {
    out.push('{');
    for (i, (key, value)) in entries.enumerate() {
        if i > 0 {
            out.push_str(", ");
        }
        repr(out, key, depth + 1, spaces)?;
        out.push_str(": ");
        repr(out, value, depth + 1, spaces)?;
    }
    out.push('}');
    Ok(())
}

fn address(value: &Value) -> Fail {
    Fail::unsupported(format!(
        "a {} as text: Python prints its address in memory",
        value.type_name()
    ))
}

/// A string between the quotes that Python chooses.
pub(super) fn quote(out: &mut String, text: &str) -> JinjaResult<()> {
    charge(text.len().saturating_mul(6))?;
    let mark = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(mark);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == mark => {
                out.push('\\');
                out.push(c);
            }
            c if is_printable(c) => out.push(c),
            c => {
                let _ = match c as u32 {
                    code @ ..0x100 => write!(out, "\\x{code:02x}"),
                    code @ ..0x10000 => write!(out, "\\u{code:04x}"),
                    code => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(mark);
    Ok(())
}
