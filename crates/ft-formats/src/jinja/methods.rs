//! Methods of text, lists, dicts and numbers.

use super::args::{Args, count, flag, given, int, text};
use super::fail::{Fail, JinjaResult, charge, charge_text};
use super::format;
use super::interp::Interp;
use super::ops::{escape, same_text};
use super::text as texts;
use super::unicode::{is_alpha, is_printable, is_space};
use super::value::{Dict, Object, Value, View};
use std::rc::Rc;

/// Methods that escaped text has.
const ON_ESCAPED: [&str; 9] = [
    "endswith",
    "lower",
    "replace",
    "rsplit",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "upper",
];

pub(super) fn call(interp: &mut Interp, receiver: &Value, name: &str, args: Args) -> JinjaResult<Value> {
    match receiver {
        Value::Markup(_) if !ON_ESCAPED.contains(&name) => Err(Fail::unsupported(format!("`{name}` of escaped text"))),
        Value::Str(s) | Value::Markup(s) => {
            charge(s.len() / 4)?;
            on_text(interp, receiver, s, name, &args)
        }
        Value::List(seq) | Value::Tuple(seq) | Value::Group(seq) => {
            if name == "copy" {
                args.bind_unnamed::<0>(name, 0)?;
                return Value::list(seq.items.clone());
            }
            in_sequence(&seq.items, name, &args)
        }
        Value::Range(_) => in_sequence(&receiver.elements()?, name, &args),
        Value::Dict(dict) => on_dict(receiver, dict, name, &args),
        Value::Int(_) | Value::Bool(_) | Value::Float(_) => on_number(receiver, name, &args),
        Value::Object(object) => match (&**object, name) {
            (Object::Function("dict"), _) => super::functions::from_keys(&args),
            (Object::Cycler(items, at), "next") => {
                args.bind_unnamed::<0>(name, 0)?;
                let item = items.items.get(at.get()).cloned().unwrap_or(Value::None);
                at.set((at.get() + 1) % items.items.len().max(1));
                Ok(item)
            }
            (Object::Cycler(_, at), "reset") => {
                args.bind_unnamed::<0>(name, 0)?;
                at.set(0);
                Ok(Value::None)
            }
            _ => Err(not_here(receiver, name)),
        },
        _ => Err(not_here(receiver, name)),
    }
}

fn not_here(receiver: &Value, name: &str) -> Fail {
    Fail::unsupported(format!("`{name}` of a {}", receiver.type_name()))
}

fn in_sequence(items: &[Value], name: &str, args: &Args) -> JinjaResult<Value> {
    let [item, start, stop] = args.bind_unnamed(name, 1)?;
    let item = item.unwrap_or(Value::None);
    if name == "count" && start.is_some() {
        return Err(Fail::failed("count() takes exactly one argument"));
    }
    let bound = |v: &Option<Value>, default: i128| -> JinjaResult<usize> {
        let n = items.len() as i128;
        let at = v.as_ref().map_or(Ok(default), |v| int(name, v))?;
        Ok(if at < 0 { at.saturating_add(n).max(0) } else { at.min(n) } as usize)
    };
    let (start, stop) = (bound(&start, 0)?, bound(&stop, items.len() as i128)?);
    let mut found = 0;
    for (i, element) in items.iter().enumerate().take(stop).skip(start) {
        if element.equals(&item)? {
            match name {
                "index" => return Ok(Value::Int(i as i128)),
                _ => found += 1,
            }
        }
    }
    match name {
        "count" => Ok(Value::Int(found)),
        "index" => Err(Fail::failed("the value is not in the list")),
        _ => Err(Fail::unsupported(format!("`{name}` of a list"))),
    }
}

fn on_dict(receiver: &Value, dict: &Rc<Dict>, name: &str, args: &Args) -> JinjaResult<Value> {
    Ok(match name {
        "get" => {
            let [key, default] = args.bind_unnamed(name, 1)?;
            let found = dict.get(&key.unwrap_or(Value::None))?;
            found.cloned().or(default).unwrap_or(Value::None)
        }
        "fromkeys" => return super::functions::from_keys(args),
        _ => {
            args.bind_unnamed::<0>(name, 0)?;
            match name {
                "items" => Value::View(View::Items, dict.clone()),
                "keys" => Value::View(View::Keys, dict.clone()),
                "values" => Value::View(View::Values, dict.clone()),
                // A copy is another object.
                "copy" => Value::Dict(Rc::new(Dict::new(dict.iter().cloned())?)),
                _ => return Err(not_here(receiver, name)),
            }
        }
    })
}

fn on_number(receiver: &Value, name: &str, args: &Args) -> JinjaResult<Value> {
    match (receiver, receiver.as_int(), name) {
        (Value::Float(x), _, "is_integer") => {
            args.bind_unnamed::<0>(name, 0)?;
            Ok(Value::Bool(x.is_finite() && x.fract() == 0.0))
        }
        (Value::Float(_), _, "conjugate") => {
            args.bind_unnamed::<0>(name, 0)?;
            Ok(receiver.clone())
        }
        (_, Some(n), "conjugate") => {
            args.bind_unnamed::<0>(name, 0)?;
            Ok(Value::Int(n))
        }
        (_, Some(n), "bit_length") => {
            args.bind_unnamed::<0>(name, 0)?;
            Ok(Value::Int(i128::from(128 - n.unsigned_abs().leading_zeros())))
        }
        (_, Some(n), "bit_count") => {
            args.bind_unnamed::<0>(name, 0)?;
            Ok(Value::Int(i128::from(n.unsigned_abs().count_ones())))
        }
        _ => Err(not_here(receiver, name)),
    }
}

/// The part of the text that `start` and `end` cut out, and where it begins in characters and bytes.
fn window<'a>(
    of: &str,
    s: &'a str,
    start: &Option<Value>,
    end: &Option<Value>,
) -> JinjaResult<Option<(&'a str, usize, usize)>> {
    let (start, end) = (given(start.clone()), given(end.clone()));
    if start.is_none() && end.is_none() {
        return Ok(Some((s, 0, 0)));
    }
    charge(s.len())?;
    let length = s.chars().count() as i128;
    let bound = |v: &Option<Value>, default: i128| -> JinjaResult<i128> {
        let at = v.as_ref().map_or(Ok(default), |v| int(of, v))?;
        Ok(if at < 0 { at.saturating_add(length).max(0) } else { at })
    };
    let (start, end) = (bound(&start, 0)?, bound(&end, length)?.min(length));
    if start > end {
        return Ok(None);
    }
    let byte = |n: i128| s.char_indices().nth(n as usize).map_or(s.len(), |(i, _)| i);
    let (from, to) = (byte(start), byte(end));
    Ok(Some((&s[from..to], start as usize, from)))
}

fn separator(of: &str, value: Option<Value>) -> JinjaResult<Option<String>> {
    match given(value) {
        None => Ok(None),
        Some(v) => match text(of, &v)? {
            "" => Err(Fail::failed("empty separator")),
            s => {
                charge(s.len().saturating_mul(2))?;
                Ok(Some(s.to_string()))
            }
        },
    }
}

fn fill(of: &str, value: Option<Value>) -> JinjaResult<char> {
    let Some(value) = value else { return Ok(' ') };
    let mut chars = text(of, &value)?.chars();
    match (chars.next(), chars.next()) {
        (Some(c), None) => Ok(c),
        _ => Err(Fail::failed("The fill character must be exactly one character long")),
    }
}

/// The parts of the text `of`, escaped if that is.
fn all_of<'a>(of: &Value, parts: impl Iterator<Item = &'a str>) -> JinjaResult<Value> {
    let mut items = Vec::new();
    for part in parts {
        // Counted as they come: there may be as many as the text has bytes.
        charge(part.len().saturating_add(64))?;
        items.push(match of {
            Value::Markup(_) => Value::Markup(part.into()),
            _ => Value::str(part),
        });
    }
    Value::list(items)
}

/// The text that `replace` puts into escaped text. Errors: what ft does not have.
fn escaped_new(old: &Value, new: &Value) -> JinjaResult<Value> {
    let is_special = |s: &str| s.contains(['&', '<', '>', '\'', '"']);
    match (old, new) {
        (Value::Str(old), _) if is_special(old) => Err(Fail::unsupported(
            "`replace` of `&`, `<`, `>` or quotes in escaped text: it depends on the version of markupsafe",
        )),
        (_, Value::Str(new)) => Ok(Value::Markup(escape(new)?.into())),
        (_, Value::Markup(_)) => Ok(new.clone()),
        _ => Err(Fail::unsupported(format!(
            "`replace` in escaped text with a {}",
            new.type_name()
        ))),
    }
}

fn on_text(interp: &mut Interp, receiver: &Value, s: &str, name: &str, args: &Args) -> JinjaResult<Value> {
    let made = |text: String| -> JinjaResult<Value> {
        charge_text(text.len())?;
        Ok(same_text(receiver, text))
    };
    match name {
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = args.bind_unnamed(name, 0)?;
            let chars = given(chars);
            let chars = chars.as_ref().map(|c| text(name, c)).transpose()?;
            charge(s.len())?;
            let out = texts::stripped(s, chars, name != "rstrip", name != "lstrip")?;
            made(out.to_string())
        }
        "startswith" | "endswith" => {
            let [what, start, end] = args.bind_unnamed(name, 1)?;
            let what = what.unwrap_or(Value::None);
            let Some((s, ..)) = window(name, s, &start, &end)? else {
                return Ok(Value::Bool(false));
            };
            let is = |v: &Value| -> JinjaResult<bool> {
                let part = text(name, v)?;
                charge(part.len() / 4 + 16)?;
                Ok(match name {
                    "startswith" => s.starts_with(part),
                    _ => s.ends_with(part),
                })
            };
            if let Value::Tuple(list) = &what {
                for item in &list.items {
                    if is(item)? {
                        return Ok(Value::Bool(true));
                    }
                }
                return Ok(Value::Bool(false));
            }
            is(&what).map(Value::Bool)
        }
        "find" | "index" | "rfind" | "rindex" | "count" => {
            let [what, start, end] = args.bind_unnamed(name, 1)?;
            let what = what.unwrap_or(Value::None);
            let part = text(name, &what)?;
            charge(s.len().saturating_mul(2).saturating_add(part.len()))?;
            let found = window(name, s, &start, &end)?;
            if name == "count" {
                return Ok(Value::Int(found.map_or(0, |(s, ..)| s.matches(part).count()) as i128));
            }
            let at = found.and_then(|(s, first, _)| {
                let at = if name.starts_with('r') {
                    s.rfind(part)
                } else {
                    s.find(part)
                };
                at.map(|at| first + s[..at].chars().count())
            });
            match at {
                Some(at) => Ok(Value::Int(at as i128)),
                None if name.ends_with("find") => Ok(Value::Int(-1)),
                None => Err(Fail::failed("substring not found")),
            }
        }
        "split" | "rsplit" => {
            let [by, most] = args.bind(name, ["sep", "maxsplit"], 0)?;
            let most = most.map(|m| int(name, &m)).transpose()?.filter(|m| *m >= 0);
            let most = most.map(|m| usize::try_from(m).unwrap_or(usize::MAX - 1));
            charge(s.len().saturating_mul(2))?;
            match (separator(name, by)?, most, name) {
                (None, most, "split") => all_of(receiver, texts::words(s, most)?.into_iter()),
                (None, None, _) => all_of(receiver, texts::words(s, None)?.into_iter()),
                (None, Some(most), _) => all_of(receiver, texts::words_from_end(s, most)?.into_iter()),
                (Some(by), None, _) => all_of(receiver, s.split(&*by)),
                (Some(by), Some(most), "split") => all_of(receiver, s.splitn(most.saturating_add(1), &*by)),
                (Some(by), Some(most), _) => {
                    let mut parts = Vec::new();
                    for part in s.rsplitn(most.saturating_add(1), &*by) {
                        charge(32)?;
                        parts.push(part);
                    }
                    parts.reverse();
                    all_of(receiver, parts.into_iter())
                }
            }
        }
        "splitlines" => {
            let [keep] = args.bind(name, ["keepends"], 0)?;
            charge(s.len().saturating_mul(2))?;
            all_of(receiver, texts::lines(s, flag(&keep))?.into_iter())
        }
        "partition" | "rpartition" => {
            let [by] = args.bind_unnamed(name, 1)?;
            let by = separator(name, by)?.ok_or_else(|| Fail::failed("must be str, not NoneType"))?;
            charge(s.len())?;
            let parts = match (name, s.split_once(&*by), s.rsplit_once(&*by)) {
                ("partition", Some((a, b)), _) | ("rpartition", _, Some((a, b))) => [a, &*by, b],
                ("partition", ..) => [s, "", ""],
                _ => ["", "", s],
            };
            Value::tuple(parts.into_iter().map(Value::str).collect())
        }
        "replace" => {
            let [old, new, most] = args.bind_unnamed(name, 2)?;
            let (old, mut new) = (old.unwrap_or(Value::None), new.unwrap_or(Value::None));
            if matches!(receiver, Value::Markup(_)) {
                new = escaped_new(&old, &new)?;
            }
            let most = most.map(|m| int(name, &m)).transpose()?.filter(|m| *m >= 0);
            let most = most.map(|m| usize::try_from(m).unwrap_or(usize::MAX));
            made(texts::replaced(s, text(name, &old)?, text(name, &new)?, most)?)
        }
        "join" => {
            let [items] = args.bind_unnamed(name, 1)?;
            let items = items.unwrap_or(Value::None).elements()?;
            let mut out = String::new();
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push_str(s);
                }
                out.push_str(text("join", item)?);
                super::fail::check_text(&out)?;
            }
            made(out)
        }
        "format" => made(format::braces(interp, s, args)?),
        "format_map" => {
            let [map] = args.bind_unnamed(name, 1)?;
            let Some(Value::Dict(dict)) = map else {
                return Err(Fail::unsupported("`format_map` of what is no dict"));
            };
            let mut named = Args::default();
            for (key, value) in dict.iter() {
                charge(64)?;
                if let Value::Str(key) = key {
                    named.named.push((key.clone(), value.clone()));
                }
            }
            made(format::braces(interp, s, &named)?)
        }
        "removeprefix" | "removesuffix" => {
            let [part] = args.bind_unnamed(name, 1)?;
            let part = part.unwrap_or(Value::None);
            let part = text(name, &part)?;
            let out = match name {
                "removeprefix" => s.strip_prefix(part),
                _ => s.strip_suffix(part),
            };
            made(out.unwrap_or(s).to_string())
        }
        "center" | "ljust" | "rjust" => {
            let [width, with] = args.bind_unnamed(name, 1)?;
            let width = count(name, &width.unwrap_or(Value::None))?;
            let with = fill(name, with)?;
            let pad = width.saturating_sub(s.chars().count());
            made(match name {
                "center" => texts::centered(s, width, with)?,
                "ljust" => texts::padded(s, 0, pad, with)?,
                _ => texts::padded(s, pad, 0, with)?,
            })
        }
        "zfill" => {
            let [width] = args.bind_unnamed(name, 1)?;
            let width = count(name, &width.unwrap_or(Value::None))?;
            let pad = width.saturating_sub(s.chars().count());
            let sign = usize::from(s.starts_with(['+', '-']));
            let digits = texts::padded(&s[sign..], pad, 0, '0')?;
            made([&s[..sign], &digits].concat())
        }
        "expandtabs" => {
            let [size] = args.bind(name, ["tabsize"], 0)?;
            let size = size.map_or(Ok(8), |v| count(name, &v))?;
            charge(s.len().saturating_mul(4))?;
            let mut out = String::new();
            let mut column = 0;
            for c in s.chars() {
                match c {
                    '\t' if size > 0 => {
                        let pad = size - column % size;
                        charge_text(pad)?;
                        out.extend(std::iter::repeat_n(' ', pad));
                        super::fail::check_text(&out)?;
                        column += pad;
                    }
                    '\t' => {}
                    c => {
                        column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
                        out.push(c);
                    }
                }
            }
            made(out)
        }
        "encode" | "maketrans" | "translate" => Err(not_here(receiver, name)),
        _ => {
            args.bind_unnamed::<0>(name, 0)?;
            charge(s.len().saturating_mul(8))?;
            let ascii = || {
                if s.is_ascii() {
                    Ok(())
                } else {
                    Err(Fail::unsupported(format!("`{name}` of letters outside of ASCII")))
                }
            };
            Ok(Value::Bool(match name {
                "lower" => return made(s.to_lowercase()),
                "upper" => return made(s.to_uppercase()),
                "capitalize" => return made(texts::capitalized(s)?),
                "title" => return made(texts::title(s)?),
                "swapcase" => return made(texts::swap_case(s)?),
                "casefold" => {
                    ascii()?;
                    return made(s.to_ascii_lowercase());
                }
                "islower" => texts::is_lower(s),
                "isupper" => texts::is_upper(s),
                "istitle" => texts::is_title_case(s),
                "isspace" => !s.is_empty() && s.chars().all(is_space),
                "isalpha" => !s.is_empty() && s.chars().all(is_alpha),
                "isascii" => s.is_ascii(),
                "isprintable" => s.chars().all(is_printable),
                "isdigit" | "isdecimal" | "isnumeric" => texts::all(s, name, |c| c.is_ascii_digit())?,
                "isalnum" if s.chars().all(is_alpha) => !s.is_empty(),
                "isalnum" => texts::all(s, name, |c| c.is_ascii_alphanumeric())?,
                "isidentifier" => {
                    ascii()?;
                    let first = s.chars().next();
                    first.is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
                        && s.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
                }
                _ => return Err(not_here(receiver, name)),
            }))
        }
    }
}
