//! Functions that templates find by name: those of Jinja, and those that transformers adds.

use super::args::{Args, int};
use super::fail::{Fail, JinjaResult, charge, charge_items};
use super::interp::Interp;
use super::value::{Dict, Object, RangeValue, Value};
use std::cell::Cell;
use std::rc::Rc;

pub(crate) const GLOBALS: [&str; 9] = [
    "cycler",
    "dict",
    "joiner",
    "lipsum",
    "namespace",
    "raise_exception",
    "range",
    "self",
    "strftime_now",
];

/// Elements of a range, as Jinja's sandbox allows.
const RANGE: i128 = 100_000;

pub(super) fn call(interp: &mut Interp, name: &str, args: Args) -> JinjaResult<Value> {
    match name {
        "range" => {
            let [first, end, step] = args.bind_unnamed("range", 1)?;
            let whole = |v: Option<Value>, default: i128| v.map_or(Ok(default), |v| int("range", &v));
            let step = whole(step, 1)?;
            if step == 0 {
                return Err(Fail::failed("range() arg 3 must not be zero"));
            }
            let (start, stop) = match end {
                Some(_) => (whole(first, 0)?, whole(end, 0)?),
                None => (0, whole(first, 0)?),
            };
            let range = range(start, stop, step)?;
            if range.length as i128 > RANGE {
                Err(Fail::failed(format!(
                    "Range too big. The sandbox blocks ranges larger than {RANGE} (too many elements)"
                )))
            } else {
                Ok(Value::Range(Rc::new(range)))
            }
        }
        "dict" => Ok(Value::Dict(Rc::new(dict("dict", args)?))),
        "namespace" => {
            let dict = dict("namespace", args)?;
            for (key, _) in dict.iter() {
                if let Some(name) = key.as_str() {
                    check_namespace_name(name)?;
                }
            }
            // They stay until the end of the rendering.
            charge_items(16)?;
            interp.namespaces.push(dict);
            Ok(Value::Namespace(interp.namespaces.len() - 1))
        }
        "cycler" => {
            if !args.named.is_empty() {
                return Err(Fail::failed("cycler() takes no keyword arguments"));
            }
            if args.positional.is_empty() {
                return Err(Fail::failed("at least one item has to be provided"));
            }
            // Counts and checks the items.
            let items = super::value::Seq::new(args.positional)?;
            Ok(Value::Object(Rc::new(Object::Cycler(items, Cell::new(0)))))
        }
        "joiner" => {
            let [separator] = args.bind("joiner", ["sep"], 0)?;
            let separator = match separator {
                None => ", ".into(),
                Some(Value::Str(s)) => s,
                Some(other) => return Err(Fail::unsupported(format!("a joiner of {}", other.type_name()))),
            };
            Ok(Value::Object(Rc::new(Object::Joiner(separator, Cell::new(false)))))
        }
        "raise_exception" => {
            let [message] = args.bind("raise_exception", ["message"], 1)?;
            let text = interp.text(&message.unwrap_or(Value::None))?;
            Err(Fail::raised(&*text))
        }
        "strftime_now" => {
            let [format] = args.bind("strftime_now", ["format"], 1)?;
            let format = format.unwrap_or(Value::None);
            strftime_now(super::args::text("strftime", &format)?).map(Value::str)
        }
        "lipsum" => Err(Fail::unsupported("`lipsum()`: its text is random")),
        _ => Err(Fail::unsupported(format!("`{name}()`"))),
    }
}

/// Errors: the sandbox allows no such name in a namespace.
pub(super) fn check_namespace_name(name: &str) -> JinjaResult<()> {
    if name.starts_with('_') {
        Err(Fail::failed(format!(
            "Chat templates cannot store underscore-prefixed attributes on a namespace, but got '{name}'."
        )))
    } else {
        Ok(())
    }
}

/// `dict(mapping or pairs, **named)`.
fn dict(of: &str, args: Args) -> JinjaResult<Dict> {
    let Args { mut positional, named } = args;
    if positional.len() > 1 {
        return Err(Fail::failed(format!(
            "{of} expected at most 1 argument, got {}",
            positional.len()
        )));
    }
    let mut out = Dict::default();
    match positional.pop() {
        None => {}
        Some(Value::Dict(dict)) => {
            for (key, value) in dict.iter() {
                out.insert(key.clone(), value.clone())?;
            }
        }
        Some(Value::Namespace(_)) => return Err(Fail::unsupported("a dict of a namespace")),
        Some(pairs) => {
            pairs.defined()?;
            for (i, pair) in pairs.elements()?.into_iter().enumerate() {
                let pair = pair.elements()?;
                let [key, value] = &pair[..] else {
                    return Err(Fail::failed(format!(
                        "dictionary update sequence element #{i} has length {}; 2 is required",
                        pair.len()
                    )));
                };
                out.insert(key.clone(), value.clone())?;
            }
        }
    }
    for (key, value) in named {
        out.insert(Value::Str(key), value)?;
    }
    Ok(out)
}

pub(super) fn from_keys(args: &Args) -> JinjaResult<Value> {
    let [keys, value] = args.bind_unnamed("fromkeys", 1)?;
    let value = value.unwrap_or(Value::None);
    let keys = keys.unwrap_or(Value::None).elements()?;
    Ok(Value::Dict(Rc::new(Dict::new(
        keys.into_iter().map(|k| (k, value.clone())),
    )?)))
}

/// A range of any length.
pub(super) fn range(start: i128, stop: i128, step: i128) -> JinjaResult<RangeValue> {
    const MOST: i128 = 1 << 100;
    if start.abs() > MOST || stop.abs() > MOST {
        return Err(Fail::unsupported("a range of such large integers"));
    }
    let span = if step > 0 { stop - start } else { start - stop };
    let length = if span <= 0 { 0 } else { (span - 1) / step.abs() + 1 };
    Ok(RangeValue {
        start,
        stop,
        step,
        length: usize::try_from(length).map_err(|_| Fail::failed("Python int too large to convert to C ssize_t"))?,
    })
}

/// The format that Python's `datetime` passes on to C: without a time zone, and with the microseconds.
fn naive_format(format: &str, micros: impl std::fmt::Display) -> String {
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('f') => out.push_str(&format!("{micros:06}")),
            Some('z' | 'Z') => {}
            Some(c) => out.extend(['%', c]),
            None => out.push('%'),
        }
    }
    out
}

/// The local time now, as `datetime.now().strftime(format)`.
fn strftime_now(format: &str) -> JinjaResult<String> {
    let bad = || Fail::failed("strftime_now: the format cannot be used");
    charge(1000)?;
    if format.is_empty() {
        return Ok(String::new());
    }
    if format.len() > 256 {
        return Err(bad());
    }
    // SAFETY: all zeros are a value of both types; `gettimeofday` and `localtime_r` write only to what they are given.
    let (micros, parts) = unsafe {
        let mut now: libc::timeval = std::mem::zeroed();
        let mut parts: libc::tm = std::mem::zeroed();
        if libc::gettimeofday(&mut now, std::ptr::null_mut()) != 0
            || libc::localtime_r(&now.tv_sec, &mut parts).is_null()
        {
            return Err(bad());
        }
        // As Python does: no time zone, also for forms such as `%-z`.
        parts.tm_isdst = -1;
        parts.tm_gmtoff = 0;
        parts.tm_zone = std::ptr::null_mut();
        (now.tv_usec, parts)
    };
    let format = naive_format(format, micros);
    // Python's largest buffer: it prints nothing if the text is longer.
    let room = format.chars().count().saturating_mul(256).next_power_of_two().max(1024);
    charge(room)?;
    let format = std::ffi::CString::new(format).map_err(|_| bad())?;
    let mut out = vec![0u8; room];
    // SAFETY: `strftime` writes at most `out.len()` bytes and reads a C string that ends with 0.
    let length = unsafe { libc::strftime(out.as_mut_ptr().cast(), out.len(), format.as_ptr(), &parts) };
    out.truncate(length);
    String::from_utf8(out).map_err(|_| bad())
}
