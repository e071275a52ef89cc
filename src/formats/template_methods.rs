//! What chat templates expect of Python: how values print, `tojson` as `json.dumps`, string methods,
//! `raise_exception`, `strftime_now`; and the clock that ends a template that runs too long.

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};
use std::cell::{Cell, RefCell};
use std::fmt::Write;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Starts the detail of an error that the template itself raised.
pub(crate) const REFUSED: &str = "the template says: ";
pub(crate) const TOO_LONG: &str = "time is up";
pub(crate) const TOO_MUCH: &str = "output limit reached";

/// Deepest nesting of a value that is printed.
const DEPTH: usize = 100;
/// Longest text that one filter or method makes here, bytes.
const LONGEST: usize = super::template::OUTPUT_LIMIT;
/// Elements of a range, as Jinja's sandbox allows.
const RANGE: usize = 100_000;

thread_local! {
    static DEADLINE: Cell<Option<Instant>> = const { Cell::new(None) };
    static MARKS: RefCell<Marks> = const { RefCell::new(Marks { printed: 0, open: Vec::new(), closed: Vec::new() }) };
}

/// What `{% generation %}` blocks print, in bytes of the output.
struct Marks {
    printed: usize,
    open: Vec<usize>,
    closed: Vec<Range<usize>>,
}

pub(crate) fn start_marks() {
    MARKS.with_borrow_mut(|m| (m.printed, m.open, m.closed) = (0, Vec::new(), Vec::new()));
}

pub(crate) fn printed(bytes: usize) {
    MARKS.with_borrow_mut(|m| m.printed = bytes);
}

pub(crate) fn take_marks() -> Vec<Range<usize>> {
    MARKS.with_borrow_mut(|m| std::mem::take(&mut m.closed))
}

pub(crate) fn start_clock(time: Duration) {
    DEADLINE.set(Instant::now().checked_add(time));
}

pub(crate) fn stop_clock() {
    DEADLINE.set(None);
}

/// Instructions are counted by the interpreter; what takes long inside one of them looks at the clock.
fn in_time() -> Result<(), Error> {
    match DEADLINE.get() {
        Some(end) if Instant::now() > end => Err(Error::new(ErrorKind::InvalidOperation, TOO_LONG)),
        _ => Ok(()),
    }
}

fn wrong(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, text.into())
}

pub(crate) fn install(env: &mut Environment<'static>) {
    env.set_formatter(|out: &mut Output, _: &mut State, value: &Value| print(out, value));
    env.set_unknown_method_callback(method);
    env.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, format!("{REFUSED}{message}")))
    });
    env.add_function("strftime_now", |format: String| strftime_now(&format));
    env.add_function("ft_generation_start", || {
        MARKS.with_borrow_mut(|m| m.open.push(m.printed));
    });
    env.add_function("ft_generation_end", || {
        MARKS.with_borrow_mut(|m| {
            let start = m.open.pop().unwrap_or(m.printed);
            m.closed.push(start..m.printed);
        });
    });
    env.add_function("range", range);
    env.add_filter("tojson", tojson);
    env.add_filter("string", |value: &Value| -> Result<String, Error> { text_of(value) });
    env.add_filter("indent", indent);
    env.add_filter("list", |state: &mut State, value: Value| {
        in_time()?;
        minijinja::filters::list(state, value)
    });
    env.add_filter("join", |state: &mut State, value: Value, args: Rest<Value>| {
        in_time()?;
        join(state, &value, &args)
    });
}

fn print(out: &mut Output, value: &Value) -> Result<(), Error> {
    in_time()?;
    let done = match value.as_str() {
        Some(text) => out.write_str(text),
        None => out.write_str(&text_of(value)?),
    };
    done.map_err(|_| Error::new(ErrorKind::WriteFailure, TOO_MUCH))
}

/// `str(value)` of Python.
fn text_of(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_string());
    }
    let mut out = String::new();
    if !value.is_undefined() {
        repr(&mut out, value, 0)?;
    }
    Ok(out)
}

fn room(out: &str, depth: usize) -> Result<(), Error> {
    if depth > DEPTH {
        return Err(wrong("value is nested too deeply"));
    }
    if out.len() > LONGEST {
        return Err(wrong(TOO_MUCH));
    }
    Ok(())
}

/// `repr(value)` of Python.
fn repr(out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    room(out, depth)?;
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => quote(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            let tuple = value.is_tuple();
            out.push(if tuple { '(' } else { '[' });
            let mut count = 0;
            for item in value.try_iter()?.checked() {
                if count > 0 {
                    out.push_str(", ");
                }
                repr(out, &item?, depth + 1)?;
                count += 1;
            }
            out.push_str(match (tuple, count) {
                (true, 1) => ",)",
                (true, _) => ")",
                _ => "]",
            });
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.checked().enumerate() {
                let key = key?;
                if i > 0 {
                    out.push_str(", ");
                }
                repr(out, &key, depth + 1)?;
                out.push_str(": ");
                repr(out, &value.get_item(&key)?, depth + 1)?;
            }
            out.push('}');
        }
        _ => write!(out, "{value}").map_err(|_| wrong("value cannot be printed"))?,
    }
    Ok(())
}

/// A string between quotes as Python chooses them.
fn quote(out: &mut String, text: &str) {
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
            c if (c as u32) < 0x20 || c as u32 == 0x7f => {
                let _ = write!(out, "\\x{:02x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push(mark);
}

/// A number as Python prints it: whole numbers as they are, others with the fewest digits that read back.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(x) = f64::try_from(value.clone()) else {
        return value.to_string();
    };
    match x {
        x if x.is_nan() => "nan".into(),
        f64::INFINITY => "inf".into(),
        f64::NEG_INFINITY => "-inf".into(),
        x if x != 0.0 && !(1e-4..1e16).contains(&x.abs()) => {
            let text = format!("{x:e}");
            match text.split_once('e') {
                Some((m, e)) => {
                    let (sign, digits) = e.strip_prefix('-').map_or(('+', e), |d| ('-', d));
                    format!("{m}e{sign}{digits:0>2}")
                }
                None => text,
            }
        }
        x => {
            let text = format!("{x}");
            if text.contains('.') { text } else { format!("{text}.0") }
        }
    }
}

/// `json.dumps` with the arguments that transformers allows; separators are `", "` and `": "`, or `","` at
/// the end of a line with `indent`.
fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    in_time()?;
    let ascii = match args.first() {
        Some(v) => v.is_true(),
        None => kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    let indent = match args.get(1) {
        Some(v) => Some(v.clone()),
        None => kwargs.get::<Option<Value>>("indent")?,
    };
    let indent = match indent.filter(|v| !v.is_none()) {
        None => None,
        Some(v) => match (v.as_str(), v.as_usize()) {
            (Some(text), _) => Some(text.to_string()),
            (None, Some(n)) if n <= 64 => Some(" ".repeat(n)),
            _ => return Err(wrong("tojson: `indent` must be a small number or a string")),
        },
    };
    let separators = match args.get(2) {
        Some(v) => Some(v.clone()),
        None => kwargs.get::<Option<Value>>("separators")?,
    };
    let (item, key) = match separators.filter(|v| !v.is_none()) {
        None => (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string()),
        Some(pair) => (
            text_of(&pair.get_item_by_index(0)?)?,
            text_of(&pair.get_item_by_index(1)?)?,
        ),
    };
    let sort = match args.get(3) {
        Some(v) => v.is_true(),
        None => kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    let style = Json {
        ascii,
        indent,
        item,
        key,
        sort,
    };
    let mut out = String::new();
    style.write(&mut out, value, 0)?;
    Ok(Value::from(out))
}

struct Json {
    ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort: bool,
}

impl Json {
    fn line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        room(out, depth)?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => match number(value).as_str() {
                "nan" => out.push_str("NaN"),
                "inf" => out.push_str("Infinity"),
                "-inf" => out.push_str("-Infinity"),
                text => out.push_str(text),
            },
            ValueKind::String => self.string(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                out.push('[');
                let mut any = false;
                for item in value.try_iter()?.checked() {
                    if any {
                        out.push_str(&self.item);
                    }
                    any = true;
                    self.line(out, depth + 1);
                    self.write(out, &item?, depth + 1)?;
                }
                if any {
                    self.line(out, depth);
                }
                out.push(']');
            }
            ValueKind::Map => {
                let mut keys = value.try_iter()?.checked().collect::<Result<Vec<Value>, Error>>()?;
                if self.sort {
                    keys.sort();
                }
                out.push('{');
                for (i, key) in keys.iter().enumerate() {
                    if i > 0 {
                        out.push_str(&self.item);
                    }
                    self.line(out, depth + 1);
                    match key.kind() {
                        ValueKind::String => self.string(out, key.as_str().unwrap_or_default()),
                        _ => {
                            let mut text = String::new();
                            self.write(&mut text, key, depth + 1)?;
                            self.string(out, &text);
                        }
                    }
                    out.push_str(&self.key);
                    self.write(out, &value.get_item(key)?, depth + 1)?;
                }
                if !keys.is_empty() {
                    self.line(out, depth);
                }
                out.push('}');
            }
            ValueKind::Undefined => return Err(wrong("tojson: the value is not defined")),
            kind => return Err(wrong(format!("tojson: a {kind} is not JSON"))),
        }
        Ok(())
    }

    fn string(&self, out: &mut String, text: &str) {
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
                    let mut units = [0u16; 2];
                    for unit in c.encode_utf16(&mut units) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// `range` with Jinja's limit on the number of elements.
fn range(first: i64, end: Option<i64>, step: Option<i64>) -> Result<Value, Error> {
    in_time()?;
    let (start, end, step) = match end {
        None => (0, first, 1),
        Some(end) => (first, end, step.unwrap_or(1)),
    };
    if step == 0 {
        return Err(wrong("range() with a step of 0"));
    }
    let span = if step > 0 {
        end as i128 - start as i128
    } else {
        start as i128 - end as i128
    };
    let count = if span <= 0 {
        0
    } else {
        (span - 1) / (step as i128).abs() + 1
    };
    if count > RANGE as i128 {
        return Err(wrong("range() has too many elements"));
    }
    let at = |i: i128| (start as i128 + i * step as i128) as i64;
    Ok((0..count).map(at).collect())
}

fn indent(
    text: String,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    in_time()?;
    let width = match width {
        Some(w) => Some(w),
        None => kwargs.get::<Option<Value>>("width")?,
    };
    let pad = match width {
        None => "    ".to_string(),
        Some(w) => match (w.as_str(), w.as_usize()) {
            (Some(text), _) => text.to_string(),
            (None, Some(n)) if n <= 1024 => " ".repeat(n),
            _ => return Err(wrong("indent: the width must be a small number or a string")),
        },
    };
    let flag = |given: Option<bool>, name: &str| -> Result<bool, Error> {
        match given {
            Some(b) => Ok(b),
            None => Ok(kwargs.get::<Option<bool>>(name)?.unwrap_or(false)),
        }
    };
    let (first, blank) = (flag(first, "first")?, flag(blank, "blank")?);
    kwargs.assert_all_used()?;
    let mut out = String::new();
    for (i, line) in text.split('\n').enumerate() {
        if i > 0 {
            out.push('\n');
        }
        if (i > 0 || first) && (blank || !line.is_empty()) {
            out.push_str(&pad);
        }
        out.push_str(line);
        room(&out, 0)?;
    }
    Ok(out)
}

/// `join(separator="", attribute=None)`.
fn join(state: &mut State, value: &Value, args: &[Value]) -> Result<String, Error> {
    let (args, kwargs): (&[Value], Kwargs) = minijinja::value::from_args(args)?;
    let separator = match args.first() {
        Some(v) => text_of(v)?,
        None => kwargs.get::<Option<String>>("d")?.unwrap_or_default(),
    };
    let attribute = match args.get(1) {
        Some(v) => Some(v.clone()),
        None => kwargs.get::<Option<Value>>("attribute")?,
    };
    kwargs.assert_all_used()?;
    let _ = state;
    let mut out = String::new();
    for (i, item) in value.try_iter()?.checked().enumerate() {
        let item = match &attribute {
            Some(key) => item?.get_item(key)?,
            None => item?,
        };
        if i > 0 {
            out.push_str(&separator);
        }
        out.push_str(&text_of(&item)?);
        room(&out, 0)?;
        if i % 1024 == 0 {
            in_time()?;
        }
    }
    Ok(out)
}

/// Python's methods: those of the compatibility crate, and some that it lacks.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    in_time()?;
    let text = value.as_str();
    let argument = |i: usize| args.get(i).and_then(Value::as_str);
    match (text, name, argument(0)) {
        (Some(s), "removeprefix", Some(p)) => Ok(Value::from(s.strip_prefix(p).unwrap_or(s))),
        (Some(s), "removesuffix", Some(p)) => Ok(Value::from(s.strip_suffix(p).unwrap_or(s))),
        (Some(s), "rsplit", Some(by)) if !by.is_empty() => {
            let limit = args.get(1).and_then(Value::as_i64).filter(|n| *n >= 0);
            let mut parts: Vec<&str> = match limit {
                Some(n) => s.rsplitn(n as usize + 1, by).collect(),
                None => s.rsplit(by).collect(),
            };
            parts.reverse();
            Ok(parts.into_iter().map(Value::from).collect())
        }
        (Some(s), "partition", Some(by)) if !by.is_empty() => Ok(match s.split_once(by) {
            Some((a, b)) => [a, by, b].into_iter().map(Value::from).collect(),
            None => [s, "", ""].into_iter().map(Value::from).collect(),
        }),
        (Some(s), "index", Some(part)) => match s.find(part) {
            Some(at) => Ok(Value::from(s[..at].chars().count())),
            None => Err(wrong("substring not found")),
        },
        (Some(_), "join", _) if args.len() == 1 => Ok(Value::from(join(state, &args[0], std::slice::from_ref(value))?)),
        (None, "index", _) if value.kind() == ValueKind::Seq && args.len() == 1 => {
            for (i, item) in value.try_iter()?.checked().enumerate() {
                if item? == args[0] {
                    return Ok(Value::from(i));
                }
            }
            Err(wrong("value is not in the list"))
        }
        (None, "copy", _) if args.is_empty() => Ok(value.clone()),
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// The local time now, in the format of C's `strftime`.
fn strftime_now(format: &str) -> Result<String, Error> {
    let bad = || wrong("strftime_now: the format cannot be used");
    if format.is_empty() {
        return Ok(String::new());
    }
    if format.len() > 256 {
        return Err(bad());
    }
    let format = std::ffi::CString::new(format).map_err(|_| bad())?;
    let mut out = vec![0u8; 4096];
    // `time` and `localtime_r` write only to what they are given; `strftime` writes at most `out.len()` bytes
    // and reads a C string that ends with 0.
    let length = unsafe {
        let now = libc::time(std::ptr::null_mut());
        let mut parts: libc::tm = std::mem::zeroed();
        if libc::localtime_r(&now, &mut parts).is_null() {
            return Err(bad());
        }
        libc::strftime(out.as_mut_ptr().cast(), out.len(), format.as_ptr(), &parts)
    };
    out.truncate(length);
    String::from_utf8(out).map_err(|_| bad())
}
