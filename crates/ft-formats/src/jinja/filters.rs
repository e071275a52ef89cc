//! The filters behind `|` that work on one value. Those on sequences are in `sequences`.

use super::args::{Args, count, flag, given, int};
use super::fail::{Fail, JinjaResult, charge, charge_text};
use super::from_json::JsonStyle;
use super::interp::Interp;
use super::ops::{self, escape, same_text};
use super::sequences;
use super::text as texts;
use super::unicode::{is_alpha, is_space};
use super::value::Value;
use std::sync::Arc;

/// Filters by the names that templates use.
pub(super) const NAMES: [&str; 54] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "random",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "striptags",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "urlize",
    "wordcount",
    "wordwrap",
    "xmlattr",
];

pub(super) fn call(interp: &mut Interp, name: &str, value: Value, args: Args) -> JinjaResult<Value> {
    match name {
        "d" | "default" => {
            let [default, boolean] = args.bind(name, ["default_value", "boolean"], 0)?;
            let missing = value.is_undefined() || (flag(&boolean) && !value.truth());
            Ok(if missing {
                default.unwrap_or_else(|| Value::str(""))
            } else {
                value
            })
        }
        "length" | "count" => {
            args.bind_unnamed::<0>(name, 0)?;
            match &value {
                Value::Object(_) => Err(Fail::unsupported(format!("`{name}` of a {}", value.type_name()))),
                _ => Ok(Value::Int(value.length()? as i128)),
            }
        }
        "upper" | "lower" | "capitalize" | "title" | "trim" | "center" | "wordcount" | "string" | "replace"
        | "format" | "truncate" | "indent" | "e" | "escape" | "forceescape" | "safe" | "urlencode" => {
            on_text(interp, name, &value, &args)
        }
        "tojson" => tojson(&value, &args),
        "int" => {
            let [default, base] = args.bind(name, ["default", "base"], 0)?;
            to_int(&value, default.unwrap_or(Value::Int(0)), base)
        }
        "float" => {
            let [default] = args.bind(name, ["default"], 0)?;
            value.defined()?;
            let default = default.unwrap_or(Value::Float(0.0));
            Ok(match (&value, value.as_float()) {
                (_, Some(x)) => Value::Float(x),
                (Value::Str(s) | Value::Markup(s), _) => parse_float(s)?.map_or(default, Value::Float),
                _ => default,
            })
        }
        "abs" => {
            args.bind_unnamed::<0>(name, 0)?;
            value.defined()?;
            match (&value, value.as_int()) {
                (Value::Float(x), _) => Ok(Value::Float(x.abs())),
                (_, Some(n)) => Ok(Value::Int(
                    n.checked_abs().ok_or_else(|| Fail::unsupported("such an integer"))?,
                )),
                _ => Err(Fail::failed(format!(
                    "bad operand type for abs(): '{}'",
                    value.type_name()
                ))),
            }
        }
        "round" => round(&value, &args),
        "filesizeformat" => {
            let [binary] = args.bind(name, ["binary"], 0)?;
            let bytes = match (&value, value.as_float()) {
                (_, Some(x)) => Some(x),
                (Value::Str(s), _) => parse_float(s)?,
                _ => None,
            };
            let bytes = bytes.ok_or_else(|| Fail::failed("filesizeformat: the value is no number"))?;
            Ok(Value::str(file_size(bytes, flag(&binary))?))
        }
        "attr" => {
            let [attribute] = args.bind(name, ["name"], 1)?;
            let attribute = attribute.unwrap_or(Value::None);
            let attribute: Arc<str> = super::args::text(name, &attribute)?.into();
            value.defined()?;
            match super::attributes::of(interp, &value, &attribute)? {
                Some(found) => Ok(found),
                None => Ok(Value::hint(format!("no attribute '{attribute}'"))),
            }
        }
        "pprint" | "random" | "striptags" | "urlize" | "wordwrap" | "xmlattr" => {
            Err(Fail::unsupported(format!("the filter `{name}`")))
        }
        _ if NAMES.contains(&name) => sequences::call(interp, name, value, args),
        _ => Err(Fail::failed(format!("No filter named '{name}'."))),
    }
}

/// `soft_str`: text as it is, anything else as `str`.
fn soft(interp: &Interp, value: &Value) -> JinjaResult<Value> {
    match value {
        Value::Str(_) | Value::Markup(_) => Ok(value.clone()),
        _ => interp.text(value).map(Value::Str),
    }
}

fn on_text(interp: &mut Interp, name: &str, value: &Value, args: &Args) -> JinjaResult<Value> {
    let given_text = soft(interp, value)?;
    let s: &str = given_text.as_str().unwrap_or_default();
    charge(s.len().saturating_mul(3))?;
    let made = |text: String| -> JinjaResult<Value> {
        charge_text(text.len())?;
        Ok(same_text(&given_text, text))
    };
    match name {
        "upper" | "lower" | "capitalize" | "title" | "string" | "wordcount" => {
            args.bind::<0>(name, [], 0)?;
            match name {
                "upper" => made(s.to_uppercase()),
                "lower" => made(s.to_lowercase()),
                "capitalize" => made(texts::capitalized(s)?),
                "title" => Ok(Value::str(texts::title_words(s)?)),
                "string" => Ok(given_text),
                _ => word_count(s),
            }
        }
        "trim" => {
            let [chars] = args.bind(name, ["chars"], 0)?;
            let chars = given(chars);
            let chars = chars.as_ref().map(|c| super::args::text("strip", c)).transpose()?;
            made(texts::stripped(s, chars, true, true)?.to_string())
        }
        "center" => {
            let [width] = args.bind(name, ["width"], 0)?;
            let width = width.map_or(Ok(80), |w| count(name, &w))?;
            made(texts::centered(s, width, ' ')?)
        }
        "replace" => {
            let [old, new, most] = args.bind(name, ["old", "new", "count"], 2)?;
            let (old, new) = (old.unwrap_or(Value::None), new.unwrap_or(Value::None));
            let most = given(most).map(|m| int(name, &m)).transpose()?.filter(|m| *m >= 0);
            let most = most.map(|m| usize::try_from(m).unwrap_or(usize::MAX));
            let (old, new) = (interp.text(&old)?, interp.text(&new)?);
            Ok(Value::str(texts::replaced(s, &old, &new, most)?))
        }
        "format" => match &given_text {
            Value::Markup(_) => Err(Fail::unsupported("`format` of escaped text")),
            _ => super::percent::filter(s, args),
        },
        "truncate" => {
            let names = ["length", "killwords", "end", "leeway"];
            let [length, kill, end, leeway] = args.bind(name, names, 0)?;
            let length = length.map_or(Ok(255), |v| int(name, &v))?;
            let end = end.unwrap_or_else(|| Value::str("..."));
            let end = super::args::text(name, &end)?;
            let leeway = given(leeway).map_or(Ok(5), |v| int(name, &v))?;
            charge(end.len())?;
            let end_length = end.chars().count() as i128;
            if length < end_length || leeway < 0 {
                return Err(Fail::failed(format!("expected length >= {end_length}, got {length}")));
            }
            if value.as_str().is_none() {
                // A short text does not change.
                return if value.length()? as i128 <= length.saturating_add(leeway) {
                    Ok(value.clone())
                } else {
                    Err(Fail::unsupported(format!("`truncate` of a {}", value.type_name())))
                };
            }
            if s.chars().count() as i128 <= length.saturating_add(leeway) {
                return Ok(given_text.clone());
            }
            let kept: String = s.chars().take((length - end_length) as usize).collect();
            let kept = if flag(&kill) {
                &kept
            } else {
                kept.rsplit_once(' ').map_or(&*kept, |(head, _)| head)
            };
            made([kept, end].concat())
        }
        "indent" => indent(value, &given_text, args),
        "e" | "escape" => {
            args.bind_unnamed::<0>(name, 0)?;
            match &given_text {
                Value::Markup(_) => Ok(given_text.clone()),
                _ => Ok(Value::Markup(escape(s)?.into())),
            }
        }
        "forceescape" => {
            args.bind::<0>(name, [], 0)?;
            Ok(Value::Markup(escape(s)?.into()))
        }
        "safe" => {
            args.bind::<0>(name, [], 0)?;
            Ok(Value::Markup(s.into()))
        }
        _ => {
            args.bind::<0>(name, [], 0)?;
            if value.is_iterable() && value.as_str().is_none() {
                return Err(Fail::unsupported("`urlencode` of more than one value"));
            }
            charge(s.len().saturating_mul(8))?;
            let hex = |n: u8| char::from_digit(u32::from(n), 16).map_or('0', |c| c.to_ascii_uppercase());
            let mut out = String::new();
            for byte in s.bytes() {
                match byte {
                    b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' | b'/' => {
                        out.push(char::from(byte));
                    }
                    _ => out.extend(['%', hex(byte >> 4), hex(byte & 15)]),
                }
            }
            made(out)
        }
    }
}

/// Runs of `\w`.
fn word_count(s: &str) -> JinjaResult<Value> {
    charge(s.len().saturating_mul(8))?;
    let is_word = |c: char| c == '_' || c.is_ascii_alphanumeric() || (!c.is_ascii() && is_alpha(c));
    let mut words = 0;
    let mut inside = false;
    for c in s.chars() {
        let clear = c.is_ascii() || is_alpha(c) || is_space(c) || !c.is_alphanumeric();
        if !clear {
            return Err(Fail::unsupported("`wordcount` of digits outside of ASCII"));
        }
        let word = is_word(c);
        words += usize::from(word && !inside);
        inside = word;
    }
    Ok(Value::Int(words as i128))
}

fn indent(value: &Value, text: &Value, args: &Args) -> JinjaResult<Value> {
    let [width, first, blank] = args.bind("indent", ["width", "first", "blank"], 0)?;
    if value.as_str().is_none() {
        return Err(match value.undefined_error() {
            Some(e) => e,
            None => Fail::failed(format!("indent: unsupported operand type '{}'", value.type_name())),
        });
    }
    let s = text.as_str().unwrap_or_default();
    let pad = match width {
        None => "    ".to_string(),
        Some(Value::Str(pad)) => pad.to_string(),
        Some(Value::Markup(_)) => return Err(Fail::unsupported("escaped text as an indent")),
        Some(width) => {
            let width = count("indent", &width)?;
            charge_text(width)?;
            " ".repeat(width)
        }
    };
    let (first, blank) = (flag(&first), flag(&blank));
    charge(s.len())?;
    // The line break that jinja2 adds makes a last empty line of text that ends with one.
    let mut lines = texts::lines(s, false)?;
    if s.is_empty() || s.ends_with(super::unicode::is_line_end) {
        lines.push("");
    }
    // The text plus "\n": without a break at its end there is no further line.
    charge_text(s.len().saturating_add(lines.len().saturating_mul(pad.len() + 1)))?;
    let mut out = String::new();
    for (i, line) in lines.iter().enumerate() {
        if i > 0 {
            out.push('\n');
        }
        if (i == 0 && first) || (i > 0 && (blank || !line.is_empty())) {
            out.push_str(&pad);
        }
        out.push_str(line);
    }
    Ok(same_text(text, out))
}

fn tojson(value: &Value, args: &Args) -> JinjaResult<Value> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ascii, indent, separators, sort] = args.bind("tojson", names, 0)?;
    let indent = match given(indent) {
        None => None,
        Some(Value::Str(text)) => Some(text.to_string()),
        Some(width) => {
            let width = count("tojson", &width)?;
            if width > 1000 {
                return Err(Fail::limit("tojson: `indent` must be a small number"));
            }
            Some(" ".repeat(width))
        }
    };
    let (item, key) = match given(separators) {
        None => (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string()),
        Some(pair) => {
            let parts = pair.elements()?;
            let [item, key] = &parts[..] else {
                return Err(Fail::failed("tojson: `separators` must be two texts"));
            };
            (
                super::args::text("tojson", item)?.into(),
                super::args::text("tojson", key)?.into(),
            )
        }
    };
    let style = JsonStyle {
        ascii: flag(&ascii),
        indent,
        item,
        key,
        sort: flag(&sort),
    };
    style.dumps(value).map(Value::str)
}

/// Errors: digits that Python may read.
fn foreign_digits(text: &str) -> JinjaResult<()> {
    if text.chars().any(|c| !c.is_ascii() && c.is_numeric()) {
        Err(Fail::unsupported("digits outside of ASCII"))
    } else {
        Ok(())
    }
}

/// `int(text)` of Python: white space around, a sign, single `_` between digits.
fn parse_int(s: &str, base: u32) -> JinjaResult<Option<i128>> {
    charge(s.len().saturating_mul(16))?;
    let t = s.trim_matches(is_space);
    if !t.is_ascii() {
        return foreign_digits(t).map(|()| None);
    }
    let (negative, t) = match t.strip_prefix('-') {
        Some(t) => (true, t),
        None => (false, t.strip_prefix('+').unwrap_or(t)),
    };
    let lower = t.to_ascii_lowercase();
    let prefixed = |p: &str| {
        lower
            .strip_prefix(p)
            .map(|d| d.strip_prefix('_').unwrap_or(d).to_string())
    };
    let (digits, radix) = match base {
        0 => match (prefixed("0x"), prefixed("0o"), prefixed("0b")) {
            (Some(d), ..) => (d, 16),
            (_, Some(d), _) => (d, 8),
            (_, _, Some(d)) => (d, 2),
            _ if lower.starts_with('0') && !lower.trim_matches(['0', '_']).is_empty() => return Ok(None),
            _ => (lower.clone(), 10),
        },
        16 => (prefixed("0x").unwrap_or(lower.clone()), 16),
        8 => (prefixed("0o").unwrap_or(lower.clone()), 8),
        2 => (prefixed("0b").unwrap_or(lower.clone()), 2),
        base => (lower.clone(), base),
    };
    let well_formed = !digits.is_empty()
        && !digits.starts_with('_')
        && !digits.ends_with('_')
        && !digits.contains("__")
        && digits.chars().all(|c| c == '_' || c.is_digit(radix));
    if !well_formed {
        return Ok(None);
    }
    match i128::from_str_radix(&digits.replace('_', ""), radix) {
        Ok(n) => Ok(Some(if negative { -n } else { n })),
        Err(_) => Err(Fail::unsupported("an integer of more than 127 bits")),
    }
}

/// `float(text)` of Python.
fn parse_float(s: &str) -> JinjaResult<Option<f64>> {
    charge(s.len().saturating_mul(8))?;
    let t = s.trim_matches(is_space);
    if !t.is_ascii() {
        return foreign_digits(t).map(|()| None);
    }
    let bytes = t.as_bytes();
    let between = |i: usize| i > 0 && bytes[i - 1].is_ascii_digit() && bytes.get(i + 1).is_some_and(u8::is_ascii_digit);
    if (0..bytes.len()).any(|i| bytes[i] == b'_' && !between(i)) {
        return Ok(None);
    }
    let t = t.replace('_', "").to_ascii_lowercase();
    // Rust reads the same forms.
    Ok(t.parse().ok())
}

fn to_int(value: &Value, default: Value, base: Option<Value>) -> JinjaResult<Value> {
    value.defined()?;
    let base = base.map_or(Ok(10), |b| int("int", &b))?;
    let truncated = |x: f64| match super::value::whole(x.trunc()) {
        Some(n) => Ok(Some(n)),
        None if x.is_finite() => Err(Fail::unsupported("an integer of more than 127 bits")),
        None => Ok(None),
    };
    let found = match (value, value.as_int()) {
        (_, Some(n)) => Some(n),
        (Value::Float(x), _) if x.is_infinite() => {
            return Err(Fail::failed("cannot convert float infinity to integer"));
        }
        (Value::Float(x), _) => truncated(*x)?,
        (Value::Str(s) | Value::Markup(s), _) => {
            let radix = u32::try_from(base).ok().filter(|b| *b == 0 || (2..=36).contains(b));
            let whole = match radix {
                Some(radix) => parse_int(s, radix)?,
                None => None,
            };
            match (whole, parse_float(s)?) {
                (Some(n), _) => Some(n),
                (None, Some(x)) => truncated(x)?,
                (None, None) => None,
            }
        }
        _ => None,
    };
    Ok(found.map_or(default, Value::Int))
}

fn round(value: &Value, args: &Args) -> JinjaResult<Value> {
    let [precision, method] = args.bind("round", ["precision", "method"], 0)?;
    let precision = precision.map_or(Ok(0), |p| int("round", &p))?;
    let method = method.unwrap_or_else(|| Value::str("common"));
    value.defined()?;
    let Some(x) = value.as_float() else {
        return Err(Fail::failed(format!(
            "type {} doesn't define __round__ method",
            value.type_name()
        )));
    };
    let small = i32::try_from(precision).ok().filter(|p| p.abs() <= 300);
    let precision = small.ok_or_else(|| Fail::unsupported("rounding to so many digits"))?;
    match method.as_str() {
        Some("common") => match (value.as_int(), precision) {
            (Some(n), 0..) => Ok(Value::Int(n)),
            (Some(n), places) => {
                // To a multiple of a power of ten, ties to even.
                let Some(unit) = 10i128.checked_pow(places.unsigned_abs()).filter(|u| *u < i128::MAX / 4) else {
                    return Ok(Value::Int(0));
                };
                let (q, r) = (n.div_euclid(unit), n.rem_euclid(unit));
                let up = r * 2 > unit || (r * 2 == unit && q % 2 != 0);
                let rounded = (q + i128::from(up)).checked_mul(unit);
                rounded
                    .map(Value::Int)
                    .ok_or_else(|| Fail::unsupported("such an integer"))
            }
            (None, places) if !x.is_finite() || places > 17 => Ok(Value::Float(x)),
            (None, places @ 0..) => {
                let text = format!("{x:.*}", places as usize);
                text.parse().map(Value::Float).map_err(|_| Fail::failed("round"))
            }
            (None, _) => Err(Fail::unsupported("rounding a float to tens")),
        },
        Some(method @ ("ceil" | "floor")) => {
            let scale = match precision {
                0.. => ops::binary(super::ast::Binary::Pow, &Value::Int(10), &Value::Int(precision.into()))?,
                _ => Value::Float(10f64.powi(precision)),
            };
            let scaled = ops::binary(super::ast::Binary::Mul, value, &scale)?;
            let x = scaled.as_float().unwrap_or(0.0);
            let whole = if method == "ceil" { x.ceil() } else { x.floor() };
            let whole = super::value::whole(whole).ok_or_else(|| Fail::failed("cannot convert float to integer"))?;
            ops::binary(super::ast::Binary::Div, &Value::Int(whole), &scale)
        }
        _ => Err(Fail::failed("method must be common, ceil or floor")),
    }
}

fn file_size(bytes: f64, binary: bool) -> JinjaResult<String> {
    let base: f64 = if binary { 1024.0 } else { 1000.0 };
    let prefixes = if binary {
        ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"]
    } else {
        ["kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"]
    };
    if !bytes.is_finite() {
        return Err(Fail::failed("filesizeformat: the value is no number"));
    }
    if bytes == 1.0 {
        return Ok("1 Byte".into());
    }
    if bytes < base {
        return Ok(format!("{} Bytes", bytes.trunc() as i128));
    }
    let mut unit = base;
    for (i, prefix) in prefixes.iter().enumerate() {
        unit *= base;
        if bytes < unit || i + 1 == prefixes.len() {
            return Ok(format!("{:.1} {prefix}", base * bytes / unit));
        }
    }
    Ok(String::new())
}
