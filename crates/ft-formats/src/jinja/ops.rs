//! Operators: arithmetic, comparison, membership, indices and slices, as Python computes them.

use super::ast::{Binary, Compare};
use super::fail::{Fail, JinjaResult, charge, charge_items, charge_text};
use super::value::{RangeValue, Value, View, whole};
use std::cmp::Ordering;
use std::rc::Rc;

fn unsupported_operands(op: &str, a: &Value, b: &Value) -> Fail {
    Fail::failed(format!(
        "unsupported operand type(s) for {op}: '{}' and '{}'",
        a.type_name(),
        b.type_name()
    ))
}

fn too_big<T>() -> JinjaResult<T> {
    Err(Fail::unsupported("an integer of more than 127 bits"))
}

pub(super) fn escape(text: &str) -> JinjaResult<String> {
    charge(text.len())?;
    // All that is escaped is of one byte.
    let more = |b: u8| match b {
        b'<' | b'>' => 3,
        b'&' | b'\'' | b'"' => 4,
        _ => 0,
    };
    let length = text.len() + text.bytes().map(more).sum::<usize>();
    charge_text(length)?;
    let mut out = String::with_capacity(length);
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    Ok(out)
}

fn joined(a: &str, b: &str) -> JinjaResult<String> {
    charge_text(a.len() + b.len())?;
    Ok([a, b].concat())
}

pub(super) fn binary(op: Binary, a: &Value, b: &Value) -> JinjaResult<Value> {
    let name = match op {
        Binary::Add => "+",
        Binary::Sub => "-",
        Binary::Mul => "*",
        Binary::Div => "/",
        Binary::FloorDiv => "//",
        Binary::Mod => "%",
        Binary::Pow => "** or pow()",
    };
    a.defined()?;
    // Formatting looks at its arguments itself.
    if !(op == Binary::Mod && a.as_str().is_some()) {
        b.defined()?;
    }
    match (op, a, b) {
        (Binary::Add, Value::Str(x), Value::Str(y)) => return Ok(Value::str(joined(x, y)?)),
        (Binary::Add, Value::Markup(x), Value::Markup(y)) => return Ok(Value::Markup(joined(x, y)?.into())),
        (Binary::Add, Value::Markup(x), Value::Str(y)) => return Ok(Value::Markup(joined(x, &escape(y)?)?.into())),
        (Binary::Add, Value::Str(x), Value::Markup(y)) => return Ok(Value::Markup(joined(&escape(x)?, y)?.into())),
        (Binary::Add, Value::List(x), Value::List(y)) => {
            return Value::list(x.items.iter().chain(&y.items).cloned().collect());
        }
        (Binary::Add, Value::Tuple(x) | Value::Group(x), Value::Tuple(y) | Value::Group(y)) => {
            return Value::tuple(x.items.iter().chain(&y.items).cloned().collect());
        }
        (Binary::Mul, many, times) | (Binary::Mul, times, many)
            if times.as_int().is_some()
                && matches!(
                    many,
                    Value::Str(_) | Value::Markup(_) | Value::List(_) | Value::Tuple(_) | Value::Group(_)
                ) =>
        {
            return repeated(many, times.as_int().unwrap_or(0));
        }
        (Binary::Mod, Value::Str(format), args) => return super::percent::percent(format, args),
        (Binary::Mod, Value::Markup(_), _) => return Err(Fail::unsupported("`%` on escaped text")),
        _ => {}
    }
    match (a.as_int(), b.as_int()) {
        (Some(x), Some(y)) => integers(op, x, y),
        _ => match (a.as_float(), b.as_float()) {
            (Some(x), Some(y)) => floats(op, x, y),
            _ if matches!((op, a, b), (Binary::Add, Value::Str(_) | Value::Markup(_), _)) => Err(Fail::failed(
                format!("can only concatenate str (not \"{}\") to str", b.type_name()),
            )),
            _ if matches!(a, Value::View(..)) || matches!(b, Value::View(..)) => {
                Err(Fail::unsupported(format!("`{name}` on a {}", a.type_name())))
            }
            _ => Err(unsupported_operands(name, a, b)),
        },
    }
}

fn repeated(many: &Value, times: i128) -> JinjaResult<Value> {
    let length = match many {
        Value::Str(s) | Value::Markup(s) => s.len(),
        Value::List(s) | Value::Tuple(s) | Value::Group(s) => s.items.len(),
        _ => 0,
    };
    // An empty value stays empty, whatever the number of repetitions.
    let times = match length {
        0 => 0,
        _ => usize::try_from(times.max(0)).unwrap_or(usize::MAX),
    };
    let total = length.saturating_mul(times);
    Ok(match many {
        Value::Str(s) => {
            charge_text(total)?;
            Value::str(s.repeat(times))
        }
        Value::Markup(s) => {
            charge_text(total)?;
            Value::Markup(s.repeat(times).into())
        }
        Value::List(s) => {
            charge_items(total)?;
            Value::list(s.items.iter().cloned().cycle().take(total).collect())?
        }
        Value::Tuple(s) | Value::Group(s) => {
            charge_items(total)?;
            Value::tuple(s.items.iter().cloned().cycle().take(total).collect())?
        }
        other => other.clone(),
    })
}

fn floor_div_rem(x: i128, y: i128) -> Option<(i128, i128)> {
    let (q, r) = (x.checked_div(y)?, x.checked_rem(y)?);
    if r != 0 && (r < 0) != (y < 0) {
        Some((q - 1, r + y))
    } else {
        Some((q, r))
    }
}

fn integers(op: Binary, x: i128, y: i128) -> JinjaResult<Value> {
    const EXACT: i128 = 1 << 53;
    let zero = || Err(Fail::failed("integer division or modulo by zero"));
    let value = match op {
        Binary::Add => x.checked_add(y),
        Binary::Sub => x.checked_sub(y),
        Binary::Mul => x.checked_mul(y),
        Binary::Div if y == 0 => return Err(Fail::failed("division by zero")),
        Binary::Div => {
            if x.abs() > EXACT || y.abs() > EXACT {
                return Err(Fail::unsupported("a quotient of integers of more than 53 bits"));
            }
            return Ok(Value::Float(x as f64 / y as f64));
        }
        Binary::FloorDiv | Binary::Mod if y == 0 => return zero(),
        Binary::FloorDiv => floor_div_rem(x, y).map(|(q, _)| q),
        Binary::Mod => floor_div_rem(x, y).map(|(_, r)| r),
        Binary::Pow if y < 0 => {
            if x.abs() > EXACT || y < -1_000_000 {
                return Err(Fail::unsupported("a power of large integers"));
            }
            return floats(op, x as f64, y as f64);
        }
        Binary::Pow => match (x, u32::try_from(y)) {
            (0 | 1, _) => Some(if y == 0 { 1 } else { x }),
            (-1, _) => Some(if y % 2 == 0 { 1 } else { -1 }),
            (_, Ok(n)) => x.checked_pow(n),
            _ => None,
        },
    };
    value.map_or_else(too_big, |n| Ok(Value::Int(n)))
}

/// Quotient, rounded down, and remainder of Python.
fn float_div_rem(x: f64, y: f64) -> (f64, f64) {
    let mut rem = x % y;
    let mut div = (x - rem) / y;
    if rem != 0.0 {
        if (y < 0.0) != (rem < 0.0) {
            rem += y;
            div -= 1.0;
        }
    } else {
        rem = 0.0f64.copysign(y);
    }
    let floor = if div != 0.0 {
        let floor = div.floor();
        if div - floor > 0.5 { floor + 1.0 } else { floor }
    } else {
        0.0f64.copysign(x / y)
    };
    (floor, rem)
}

fn floats(op: Binary, x: f64, y: f64) -> JinjaResult<Value> {
    Ok(Value::Float(match op {
        Binary::Add => x + y,
        Binary::Sub => x - y,
        Binary::Mul => x * y,
        Binary::Div | Binary::FloorDiv | Binary::Mod if y == 0.0 => {
            return Err(Fail::failed("float division or modulo by zero"));
        }
        Binary::Div => x / y,
        Binary::FloorDiv => float_div_rem(x, y).0,
        Binary::Mod => float_div_rem(x, y).1,
        Binary::Pow if x == 0.0 && y < 0.0 => return Err(Fail::failed("0.0 cannot be raised to a negative power")),
        Binary::Pow if x < 0.0 && y.is_finite() && y.fract() != 0.0 => {
            return Err(Fail::unsupported("a complex number"));
        }
        Binary::Pow => {
            let power = x.powf(y);
            if power.is_infinite() && x.is_finite() && y.is_finite() {
                return Err(Fail::failed("Numerical result out of range"));
            }
            power
        }
    }))
}

pub(super) fn negative(value: &Value, minus: bool) -> JinjaResult<Value> {
    value.defined()?;
    match (value, value.as_int()) {
        (Value::Float(x), _) => Ok(Value::Float(if minus { -x } else { *x })),
        (_, Some(n)) => n
            .checked_mul(if minus { -1 } else { 1 })
            .map_or_else(too_big, |n| Ok(Value::Int(n))),
        _ => Err(Fail::failed(format!(
            "bad operand type for unary {}: '{}'",
            if minus { '-' } else { '+' },
            value.type_name()
        ))),
    }
}

impl Value {
    /// `a == b`. Errors: what Python compares by address.
    pub(super) fn equals(&self, other: &Value) -> JinjaResult<bool> {
        charge(16)?;
        Ok(match (self, other) {
            (Self::Str(a) | Self::Markup(a), Self::Str(b) | Self::Markup(b)) => {
                charge(a.len().min(b.len()) / 4)?;
                a == b
            }
            (Self::None, Self::None) | (Self::Undefined(_), Self::Undefined(_)) => true,
            (Self::List(a), Self::List(b)) | (Self::Tuple(a) | Self::Group(a), Self::Tuple(b) | Self::Group(b)) => {
                if a.items.len() != b.items.len() {
                    return Ok(false);
                }
                for (a, b) in a.items.iter().zip(&b.items) {
                    if !a.equals(b)? {
                        return Ok(false);
                    }
                }
                true
            }
            (Self::Dict(a), Self::Dict(b)) => {
                if a.len() != b.len() {
                    return Ok(false);
                }
                for (key, value) in a.iter() {
                    match b.get(key)? {
                        Some(other) if value.equals(other)? => {}
                        _ => return Ok(false),
                    }
                }
                true
            }
            (Self::Range(a), Self::Range(b)) => {
                a.length == b.length && (a.length == 0 || (a.start == b.start && (a.length == 1 || a.step == b.step)))
            }
            (Self::View(View::Keys, a), Self::View(View::Keys, b)) => {
                let mut same = a.len() == b.len();
                for (key, _) in a.iter() {
                    same = same && b.get(key)?.is_some();
                }
                same
            }
            (Self::View(..), Self::View(..)) | (Self::Object(_), Self::Object(_)) | (Self::Iter(_), Self::Iter(_)) => {
                return Err(Fail::unsupported(format!("`==` of a {}", self.type_name())));
            }
            (Self::Namespace(a), Self::Namespace(b)) => a == b,
            _ => matches!(number_order(self, other), Some(Ordering::Equal)),
        })
    }
}

/// Order of two numbers, exact between integers and floats. `None`: not numbers, or NaN.
fn number_order(a: &Value, b: &Value) -> Option<Ordering> {
    fn against(n: i128, x: f64) -> Option<Ordering> {
        match whole(x) {
            Some(m) => Some(n.cmp(&m)),
            None if x.is_nan() => None,
            None if x.abs() >= 1e38 => Some(if x > 0.0 { Ordering::Less } else { Ordering::Greater }),
            // Between two integers.
            None => Some(if n <= x.floor() as i128 {
                Ordering::Less
            } else {
                Ordering::Greater
            }),
        }
    }
    match (a, b) {
        (Value::Float(x), Value::Float(y)) => x.partial_cmp(y),
        (Value::Float(x), _) => against(b.as_int()?, *x).map(Ordering::reverse),
        (_, Value::Float(y)) => against(a.as_int()?, *y),
        _ => Some(a.as_int()?.cmp(&b.as_int()?)),
    }
}

/// Order of two values; `None` where NaN is involved. Errors: they have none.
pub(super) fn order(a: &Value, b: &Value, op: &str) -> JinjaResult<Option<Ordering>> {
    charge(4)?;
    a.defined()?;
    b.defined()?;
    match (a, b) {
        (Value::Str(x) | Value::Markup(x), Value::Str(y) | Value::Markup(y)) => {
            charge(x.len().min(y.len()) / 8)?;
            return Ok(Some(x.cmp(y)));
        }
        (Value::List(x), Value::List(y)) | (Value::Tuple(x) | Value::Group(x), Value::Tuple(y) | Value::Group(y)) => {
            for (a, b) in x.items.iter().zip(&y.items) {
                if !a.equals(b)? {
                    return order(a, b, op);
                }
            }
            return Ok(Some(x.items.len().cmp(&y.items.len())));
        }
        (Value::View(..), _) | (_, Value::View(..)) => {
            return Err(Fail::unsupported(format!("`{op}` of a {}", a.type_name())));
        }
        _ => {}
    }
    if a.as_float().is_some() && b.as_float().is_some() {
        return Ok(number_order(a, b));
    }
    Err(Fail::failed(format!(
        "'{op}' not supported between instances of '{}' and '{}'",
        a.type_name(),
        b.type_name()
    )))
}

pub(super) fn compare(op: Compare, a: &Value, b: &Value) -> JinjaResult<bool> {
    let is = |name: &str, wanted: fn(Ordering) -> bool| Ok(order(a, b, name)?.is_some_and(wanted));
    match op {
        Compare::Eq => a.equals(b),
        Compare::Ne => a.equals(b).map(|same| !same),
        Compare::Lt => is("<", Ordering::is_lt),
        Compare::Le => is("<=", Ordering::is_le),
        Compare::Gt => is(">", Ordering::is_gt),
        Compare::Ge => is(">=", Ordering::is_ge),
        Compare::In => contains(b, a),
        Compare::NotIn => contains(b, a).map(|inside| !inside),
    }
}

/// `item in whole`.
pub(super) fn contains(inside: &Value, item: &Value) -> JinjaResult<bool> {
    match inside {
        Value::Str(text) | Value::Markup(text) => match item.as_str() {
            Some(part) => {
                charge(text.len().saturating_add(part.len()))?;
                Ok(text.contains(part))
            }
            None => Err(Fail::failed(format!(
                "'in <string>' requires string as left operand, not {}",
                item.type_name()
            ))),
        },
        Value::Dict(dict) | Value::View(View::Keys, dict) => Ok(dict.get(item)?.is_some()),
        Value::Range(range) => match item.as_int().or_else(|| match item {
            Value::Float(x) => whole(*x),
            _ => None,
        }) {
            Some(n) => {
                let (from, step) = (n - range.start, range.step);
                Ok(from % step == 0 && (0..range.length as i128).contains(&(from / step)))
            }
            None => Ok(false),
        },
        Value::Iter(iter) => {
            while let Some(element) = iter.next()? {
                if element.equals(item)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        Value::List(seq) | Value::Tuple(seq) | Value::Group(seq) => any_equal(&seq.items, item),
        Value::View(..) | Value::Undefined(_) => any_equal(&inside.elements()?, item),
        _ if inside.is_iterable() => any_equal(&inside.elements()?, item),
        _ => Err(Fail::failed(format!(
            "argument of type '{}' is not iterable",
            inside.type_name()
        ))),
    }
}

fn any_equal(items: &[Value], item: &Value) -> JinjaResult<bool> {
    for element in items {
        if element.equals(item)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Places of `keys` in ascending or descending order; equal ones keep theirs. Errors: two have no order.
pub(super) fn sorted(keys: &[Value], reverse: bool) -> JinjaResult<Vec<usize>> {
    charge_items(keys.len())?;
    let mut failure = None;
    let mut places: Vec<usize> = (0..keys.len()).collect();
    places.sort_by(|a, b| {
        if failure.is_some() {
            return Ordering::Equal;
        }
        let (a, b) = if reverse { (*b, *a) } else { (*a, *b) };
        match order(&keys[a], &keys[b], "<") {
            Ok(Some(order)) => order,
            Ok(None) => {
                failure = Some(Fail::unsupported("sorting with a value that is not a number (NaN)"));
                Ordering::Equal
            }
            Err(e) => {
                failure = Some(e);
                Ordering::Equal
            }
        }
    });
    failure.map_or(Ok(places), Err)
}

/// `whole[index]`; `None`: there is no such element, or it takes no index.
pub(super) fn item(whole: &Value, index: &Value) -> JinjaResult<Option<Value>> {
    if let Value::Dict(dict) = whole {
        // A key that cannot be hashed is not there.
        return Ok(match index {
            Value::Str(key) => {
                charge(key.len())?;
                dict.get_str(key).cloned()
            }
            Value::List(_) | Value::Dict(_) => None,
            _ => dict.get(index)?.cloned(),
        });
    }
    let Some(index) = index.as_int() else { return Ok(None) };
    let at = |length: usize| {
        let length = length as i128;
        let at = if index < 0 { index.saturating_add(length) } else { index };
        (0..length).contains(&at).then_some(at as usize)
    };
    Ok(match whole {
        Value::List(seq) | Value::Tuple(seq) | Value::Group(seq) => at(seq.items.len()).map(|i| seq.items[i].clone()),
        Value::Str(text) | Value::Markup(text) => {
            let i = if text.is_ascii() {
                at(text.len())
            } else {
                at(text.chars().count())
            };
            charge(text.len())?;
            let c = match (i, text.is_ascii()) {
                (Some(i), true) => Some(char::from(text.as_bytes()[i])),
                (Some(i), false) => text.chars().nth(i),
                (None, _) => None,
            };
            c.map(|c| same_text(whole, c.to_string()))
        }
        Value::Range(range) => at(range.length).map(|i| Value::Int(range.get(i))),
        _ => None,
    })
}

/// Text, marked safe if `like` is.
pub(super) fn same_text(like: &Value, text: String) -> Value {
    match like {
        Value::Markup(_) => Value::Markup(text.into()),
        _ => Value::str(text),
    }
}

/// `whole[start:stop:step]`. Errors: it cannot be sliced.
pub(super) fn slice(whole: &Value, parts: [&Value; 3]) -> JinjaResult<Value> {
    whole.defined()?;
    let number = |v: &Value| match v {
        Value::None => Ok(None),
        _ => v
            .as_int()
            .map(Some)
            .ok_or_else(|| Fail::failed("slice indices must be integers or None or have an __index__ method")),
    };
    let length = match whole {
        Value::Str(s) | Value::Markup(s) if s.is_ascii() => s.len(),
        Value::Str(_) | Value::Markup(_) | Value::List(_) | Value::Tuple(_) | Value::Group(_) | Value::Range(_) => {
            whole.length()?
        }
        _ => return Err(not_subscriptable(whole)),
    };
    let (start, stop, step) = (number(parts[0])?, number(parts[1])?, number(parts[2])?);
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(Fail::failed("slice step cannot be zero"));
    }
    let n = length as i128;
    let bound = |v: Option<i128>, default: i128| {
        let (low, high) = if step < 0 { (-1, n - 1) } else { (0, n) };
        match v {
            None => default,
            Some(v) if v < 0 => v.saturating_add(n).max(low),
            Some(v) => v.min(high),
        }
    };
    let (start, stop) = if step < 0 {
        (bound(start, n - 1), bound(stop, -1))
    } else {
        (bound(start, 0), bound(stop, n))
    };
    let range = super::functions::range(start, stop, step)?;
    charge_items(range.length)?;
    let places = (0..range.length).map(|i| range.get(i) as usize);
    Ok(match whole {
        Value::Str(s) | Value::Markup(s) if step == 1 && s.is_ascii() => {
            let end = (start as usize + range.length).min(length);
            same_text(whole, s.get(start as usize..end).unwrap_or_default().to_string())
        }
        Value::Str(s) | Value::Markup(s) if step == 1 => {
            charge(s.len())?;
            same_text(whole, s.chars().skip(start as usize).take(range.length).collect())
        }
        Value::Str(s) | Value::Markup(s) => {
            charge(s.len())?;
            let chars: Vec<char> = s.chars().collect();
            same_text(whole, places.map(|i| chars[i]).collect())
        }
        Value::List(seq) => Value::list(places.map(|i| seq.items[i].clone()).collect())?,
        Value::Tuple(seq) | Value::Group(seq) => Value::tuple(places.map(|i| seq.items[i].clone()).collect())?,
        Value::Range(of) => Value::Range(Rc::new(RangeValue {
            start: of.start + start * of.step,
            stop: of.start + stop * of.step,
            step: of.step.saturating_mul(step),
            length: range.length,
        })),
        _ => return Err(not_subscriptable(whole)),
    })
}

fn not_subscriptable(value: &Value) -> Fail {
    Fail::failed(format!("'{}' object is not subscriptable", value.type_name()))
}
