//! Filters on lists, dicts and iterators.

use super::args::{Args, count, flag, given, int};
use super::fail::{Fail, JinjaResult, NODE, charge, charge_items, charge_text, check_text};
use super::interp::Interp;
use super::ops::{self, sorted};
use super::value::{Dict, Value};
use std::sync::Arc;

pub(super) fn call(interp: &mut Interp, name: &str, value: Value, mut args: Args) -> JinjaResult<Value> {
    match name {
        "list" => {
            args.bind::<0>(name, [], 0)?;
            Value::list(value.elements()?)
        }
        "first" | "last" => {
            args.bind::<0>(name, [], 0)?;
            let found = match (&value, name) {
                (Value::Iter(iter), "first") => iter.next()?,
                (Value::Iter(_), _) => {
                    return Err(Fail::failed(format!(
                        "'{}' object is not reversible",
                        value.type_name()
                    )));
                }
                (_, "first") => value.elements()?.into_iter().next(),
                // Undefined has a length and raises for its elements.
                (Value::Undefined(_), _) => None,
                _ => value.elements()?.pop(),
            };
            Ok(found.unwrap_or_else(|| Value::hint(format!("No {name} item, sequence was empty."))))
        }
        "reverse" => {
            args.bind::<0>(name, [], 0)?;
            if let Some(text) = value.as_str() {
                charge_text(text.len())?;
                charge(text.len().saturating_mul(8))?;
                return Ok(ops::same_text(&value, text.chars().rev().collect()));
            }
            let mut items = value.elements()?;
            items.reverse();
            match value {
                Value::Iter(_) => Value::list(items),
                _ => Value::iter_of(items, "list_reverseiterator"),
            }
        }
        "join" => {
            let [separator, attribute] = args.bind(name, ["d", "attribute"], 0)?;
            let separator = match separator {
                Some(s) => interp.text(&s)?,
                None => "".into(),
            };
            let mut out = String::new();
            for (i, item) in value.elements()?.into_iter().enumerate() {
                let item = match given(attribute.clone()) {
                    Some(attribute) => attribute_of(interp, item, &attribute, None)?,
                    None => item,
                };
                if i > 0 {
                    out.push_str(&separator);
                }
                match item.as_str() {
                    Some(text) => out.push_str(text),
                    None => out.push_str(&interp.text(&item)?),
                }
                check_text(&out)?;
            }
            charge_text(out.len())?;
            Ok(Value::str(out))
        }
        "items" => {
            args.bind::<0>(name, [], 0)?;
            match &value {
                Value::Undefined(_) => Value::iter_of(Vec::new(), "generator"),
                Value::Dict(dict) => Value::iter_of(pairs(dict)?, "generator"),
                _ => Err(Fail::failed("Can only get item pairs from a mapping.")),
            }
        }
        "dictsort" => {
            let [case, by, reverse] = args.bind(name, ["case_sensitive", "by", "reverse"], 0)?;
            let at = match by.as_ref().map(Value::as_str) {
                None | Some(Some("key")) => 0,
                Some(Some("value")) => 1,
                _ => return Err(Fail::failed("You can only sort by either \"key\" or \"value\"")),
            };
            let Value::Dict(dict) = &value else {
                return Err(match value.undefined_error() {
                    Some(e) => e,
                    None => Fail::failed(format!("'{}' object has no attribute 'items'", value.type_name())),
                });
            };
            let keys: Vec<Value> = dict
                .iter()
                .map(|(k, v)| folded(if at == 0 { k } else { v }.clone(), flag(&case)))
                .collect::<JinjaResult<_>>()?;
            let items = pairs(dict)?;
            let order = sorted(&keys, flag(&reverse))?;
            Value::list(order.into_iter().map(|i| items[i].clone()).collect())
        }
        "sort" => {
            let [reverse, case, attribute] = args.bind(name, ["reverse", "case_sensitive", "attribute"], 0)?;
            let items = value.elements()?;
            let mut keys = Vec::with_capacity(items.len());
            for item in &items {
                let key = match given(attribute.clone()) {
                    // Several attributes may be named, with commas.
                    Some(Value::Str(names)) => {
                        let mut key = Vec::new();
                        for name in names.split(',') {
                            let found = attribute_of(interp, item.clone(), &Value::str(name), None)?;
                            key.push(folded(found, flag(&case))?);
                        }
                        Value::list(key)?
                    }
                    Some(other) => {
                        let found = attribute_of(interp, item.clone(), &other, None)?;
                        Value::list(vec![folded(found, flag(&case))?])?
                    }
                    None => Value::list(vec![folded(item.clone(), flag(&case))?])?,
                };
                keys.push(key);
            }
            let order = sorted(&keys, flag(&reverse))?;
            Value::list(order.into_iter().map(|i| items[i].clone()).collect())
        }
        "unique" => {
            let [case, attribute] = args.bind(name, ["case_sensitive", "attribute"], 0)?;
            let mut seen = Dict::default();
            let mut out = Vec::new();
            for item in value.elements_ahead()? {
                let key = key_of(interp, &item, &attribute, flag(&case), None)?;
                if seen.get(&key)?.is_none() {
                    seen.insert(key, Value::None)?;
                    out.push(item);
                }
            }
            Value::iter_of(out, "generator")
        }
        "min" | "max" => {
            let [case, attribute] = args.bind(name, ["case_sensitive", "attribute"], 0)?;
            let mut best: Option<(Value, Value)> = None;
            for item in value.elements()? {
                let key = key_of(interp, &item, &attribute, flag(&case), None)?;
                let better = match &best {
                    None => true,
                    Some((of_best, _)) => {
                        let op = if name == "min" { "<" } else { ">" };
                        let order = ops::order(&key, of_best, op)?;
                        order.is_some_and(|o| if name == "min" { o.is_lt() } else { o.is_gt() })
                    }
                };
                if better {
                    best = Some((key, item));
                }
            }
            Ok(best.map_or_else(
                || Value::hint("No aggregated item, sequence was empty."),
                |(_, item)| item,
            ))
        }
        "sum" => {
            let [attribute, start] = args.bind(name, ["attribute", "start"], 0)?;
            let mut total = start.unwrap_or(Value::Int(0));
            if total.as_str().is_some() {
                return Err(Fail::failed("sum() can't sum strings [use ''.join(seq) instead]"));
            }
            for item in value.elements()? {
                let item = match given(attribute.clone()) {
                    Some(attribute) => attribute_of(interp, item, &attribute, None)?,
                    None => item,
                };
                total = add(&total, &item)?;
            }
            Ok(total)
        }
        "batch" => {
            let [size, fill] = args.bind(name, ["linecount", "fill_with"], 1)?;
            let size = int(name, &size.unwrap_or(Value::None))?;
            let items = value.elements_ahead()?;
            // A size below 1 is never reached: everything is one batch.
            let length = usize::try_from(size).ok().filter(|n| *n > 0).unwrap_or(usize::MAX);
            if size == 0 && !items.is_empty() {
                return Err(Fail::unsupported("batches of nothing"));
            }
            let mut out = Vec::new();
            for chunk in items.chunks(length.min(items.len().max(1))) {
                let mut batch = chunk.to_vec();
                if let Some(fill) = given(fill.clone())
                    && size > 0
                {
                    let more = length - batch.len();
                    charge_items(more)?;
                    batch.extend(std::iter::repeat_n(fill, more));
                }
                out.push(Value::list(batch)?);
            }
            Value::iter_of(out, "generator")
        }
        "slice" => {
            let [slices, fill] = args.bind(name, ["slices", "fill_with"], 1)?;
            let slices = count(name, &slices.unwrap_or(Value::None))?;
            let items = value.elements_ahead()?;
            if slices == 0 {
                return Err(Fail::unsupported("`slice` into nothing"));
            }
            charge_items(slices.saturating_mul(2))?;
            let (each, extra) = (items.len() / slices, items.len() % slices);
            let mut rest = items.into_iter();
            let mut out = Vec::new();
            for i in 0..slices {
                let mut part: Vec<Value> = rest.by_ref().take(each + usize::from(i < extra)).collect();
                if let Some(fill) = given(fill.clone())
                    && i >= extra
                {
                    part.push(fill);
                }
                out.push(Value::list(part)?);
            }
            Value::iter_of(out, "generator")
        }
        "groupby" => {
            let [attribute, default, case] = args.bind(name, ["attribute", "default", "case_sensitive"], 1)?;
            let items = value.elements()?;
            let mut keys = Vec::new();
            for item in &items {
                keys.push(key_of(interp, item, &attribute, flag(&case), given(default.clone()))?);
            }
            let mut groups: Vec<(Value, Vec<Value>)> = Vec::new();
            for at in sorted(&keys, false)? {
                match groups.last_mut() {
                    Some((key, group)) if keys[at].equals(key)? => group.push(items[at].clone()),
                    _ => groups.push((keys[at].clone(), vec![items[at].clone()])),
                }
            }
            let mut out = Vec::new();
            for (key, group) in groups {
                let key = match (flag(&case), group.first()) {
                    (false, Some(first)) => key_of(interp, first, &attribute, true, given(default.clone()))?,
                    _ => key,
                };
                let group = Value::list(group)?;
                out.push(Value::Group(super::value::Seq::new(vec![key, group])?));
            }
            Value::list(out)
        }
        "map" => {
            if !value.truth() {
                return Value::iter_of(Vec::new(), "generator");
            }
            let mut out = Vec::new();
            if args.positional.is_empty() && args.named.iter().any(|(n, _)| &**n == "attribute") {
                let [attribute, default] = args.bind(name, ["attribute", "default"], 1)?;
                let attribute = attribute.unwrap_or(Value::None);
                for item in value.elements_ahead()? {
                    out.push(attribute_of(interp, item, &attribute, given(default.clone()))?);
                }
            } else {
                let filter = filter_name(&mut args, "map requires a filter argument")?;
                for item in value.elements_ahead()? {
                    // Each call has its own copy.
                    charge((args.positional.len() + args.named.len()).saturating_mul(32))?;
                    out.push(interp.filter(&filter, item, args.clone())?);
                }
            }
            Value::iter_of(out, "generator")
        }
        "select" | "reject" | "selectattr" | "rejectattr" => {
            if !value.truth() {
                return Value::iter_of(Vec::new(), "generator");
            }
            let wanted = name.starts_with("select");
            let attribute = if !name.ends_with("attr") {
                None
            } else if args.positional.is_empty() {
                return Err(Fail::failed("Missing parameter for attribute name"));
            } else {
                Some(args.positional.remove(0))
            };
            let test = if args.positional.is_empty() {
                None
            } else {
                Some(filter_name(&mut args, "")?)
            };
            let mut out = Vec::new();
            for item in value.elements_ahead()? {
                let looked_at = match &attribute {
                    Some(attribute) => attribute_of(interp, item.clone(), attribute, None)?,
                    None => item.clone(),
                };
                let holds = match &test {
                    Some(test) => interp.test(test, &looked_at, &args)?,
                    None => looked_at.truth(),
                };
                if holds == wanted {
                    out.push(item);
                }
            }
            Value::iter_of(out, "generator")
        }
        _ => Err(Fail::unsupported(format!("the filter `{name}`"))),
    }
}

/// The first argument, which names a filter or a test.
fn filter_name(args: &mut Args, missing: &str) -> JinjaResult<Arc<str>> {
    if args.positional.is_empty() {
        return Err(Fail::failed(missing));
    }
    match args.positional.remove(0) {
        Value::Str(name) => Ok(name),
        other => Err(Fail::failed(format!("No filter or test named {}.", other.type_name()))),
    }
}

fn pairs(dict: &Dict) -> JinjaResult<Vec<Value>> {
    dict.iter()
        .map(|(k, v)| Value::tuple(vec![k.clone(), v.clone()]))
        .collect()
}

/// Text in lower case, unless case matters.
fn folded(value: Value, case_sensitive: bool) -> JinjaResult<Value> {
    match (&value, case_sensitive) {
        (Value::Str(s) | Value::Markup(s), false) => {
            charge_text(s.len())?;
            Ok(Value::str(s.to_lowercase()))
        }
        _ => Ok(value),
    }
}

/// Numbers and lists as `sum` adds them.
fn add(a: &Value, b: &Value) -> JinjaResult<Value> {
    // From Python 3.12 on, sums of floats are corrected; the last digits depend on the version.
    if matches!(b, Value::Float(_)) && matches!(a, Value::Float(x) if *x != 0.0) {
        return Err(Fail::unsupported(
            "`sum` of several floats: it depends on the version of Python",
        ));
    }
    ops::binary(super::ast::Binary::Add, a, b)
}

/// The key by which an element is sorted or grouped.
fn key_of(
    interp: &Interp,
    item: &Value,
    attribute: &Option<Value>,
    case_sensitive: bool,
    default: Option<Value>,
) -> JinjaResult<Value> {
    let found = match given(attribute.clone()) {
        Some(attribute) => attribute_of(interp, item.clone(), &attribute, default)?,
        None => item.clone(),
    };
    folded(found, case_sensitive)
}

/// `item.a.0.b`, by names and indices with dots between them.
fn attribute_of(interp: &Interp, item: Value, attribute: &Value, default: Option<Value>) -> JinjaResult<Value> {
    let step = |item: Value, key: &Value| -> JinjaResult<Value> {
        let found = interp.item(&item, key)?;
        Ok(match (&default, found.is_undefined()) {
            (Some(default), true) => default.clone(),
            _ => found,
        })
    };
    let Some(path) = attribute.as_str() else {
        return step(item, attribute);
    };
    charge(path.len())?;
    let mut item = item;
    for part in path.split('.') {
        charge(2 * NODE)?;
        let key = match part.parse::<u32>() {
            Ok(n) if part.bytes().all(|b| b.is_ascii_digit()) => Value::Int(n.into()),
            _ => Value::str(part),
        };
        item = step(item, &key)?;
    }
    Ok(item)
}
