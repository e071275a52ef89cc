//! The tests behind `is`.

use super::args::Args;
use super::ast::Compare;
use super::fail::{Fail, JinjaResult};
use super::filters;
use super::interp::Interp;
use super::ops;
use super::value::{Object, Value};

/// Tests by the names that templates use.
pub(super) const NAMES: [&str; 39] = [
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "boolean",
    "callable",
    "defined",
    "divisibleby",
    "eq",
    "equalto",
    "escaped",
    "even",
    "false",
    "filter",
    "float",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "integer",
    "iterable",
    "le",
    "lessthan",
    "lower",
    "lt",
    "mapping",
    "ne",
    "none",
    "number",
    "odd",
    "sameas",
    "sequence",
    "string",
    "test",
    "true",
    "undefined",
    "upper",
];

pub(super) fn call(interp: &Interp, name: &str, value: &Value, args: &Args) -> JinjaResult<bool> {
    let none = || args.bind::<0>(name, [], 0).map(|_| ());
    let other = || -> JinjaResult<Value> {
        let [other] = args.bind(name, [argument_name(name)], 1)?;
        Ok(other.unwrap_or(Value::None))
    };
    let compare = |op: Compare| ops::compare(op, value, &other()?);
    let rest = |by: &Value, wanted: i128| -> JinjaResult<bool> {
        let rest = ops::binary(super::ast::Binary::Mod, value, by)?;
        rest.equals(&Value::Int(wanted))
    };
    match name {
        "==" | "eq" | "equalto" => return compare(Compare::Eq),
        "!=" | "ne" => return compare(Compare::Ne),
        "<" | "lt" | "lessthan" => return compare(Compare::Lt),
        "<=" | "le" => return compare(Compare::Le),
        ">" | "gt" | "greaterthan" => return compare(Compare::Gt),
        ">=" | "ge" => return compare(Compare::Ge),
        "in" => return compare(Compare::In),
        "divisibleby" => return rest(&other()?, 0),
        "sameas" => return same(value, &other()?),
        _ => none()?,
    }
    Ok(match name {
        "defined" => !value.is_undefined(),
        "undefined" => value.is_undefined(),
        "none" => matches!(value, Value::None),
        "boolean" => matches!(value, Value::Bool(_)),
        "true" => matches!(value, Value::Bool(true)),
        "false" => matches!(value, Value::Bool(false)),
        "integer" => matches!(value, Value::Int(_)),
        "float" => matches!(value, Value::Float(_)),
        "number" => value.as_float().is_some(),
        "string" => value.as_str().is_some(),
        "mapping" => matches!(value, Value::Dict(_)),
        "sequence" => match value {
            // Each has a length, and these have no `__getitem__`.
            Value::View(..) => false,
            // Undefined gives an error for `__getitem__`, which is no error here.
            Value::Undefined(_) => true,
            _ => value.length().is_ok(),
        },
        "iterable" => value.is_iterable(),
        "callable" => match value {
            Value::Object(object) => !matches!(**object, Object::Cycler(..)),
            Value::Undefined(_) => true,
            _ => false,
        },
        "escaped" => matches!(value, Value::Markup(_)),
        "odd" => rest(&Value::Int(2), 1)?,
        "even" => rest(&Value::Int(2), 0)?,
        "lower" | "upper" => {
            let text = interp.text(value)?;
            super::fail::charge(text.len().saturating_mul(16))?;
            match name {
                "lower" => super::text::is_lower(&text),
                _ => super::text::is_upper(&text),
            }
        }
        "filter" | "test" => {
            let known = match name {
                "filter" => &filters::NAMES[..],
                _ => &NAMES[..],
            };
            match value {
                Value::List(_) | Value::Dict(_) => return Err(Fail::failed("unhashable type")),
                _ => value.as_str().is_some_and(|n| known.contains(&n)),
            }
        }
        _ => return Err(Fail::failed(format!("No test named '{name}'."))),
    })
}

fn argument_name(test: &str) -> &'static str {
    match test {
        "divisibleby" => "num",
        "sameas" => "other",
        "in" => "seq",
        _ => "",
    }
}

/// `value is other`: the same object. Errors: Python may or may not keep one object for equal values.
fn same(value: &Value, other: &Value) -> JinjaResult<bool> {
    use std::rc::Rc;
    Ok(match (value, other) {
        (Value::None, Value::None) => true,
        (Value::Bool(a), Value::Bool(b)) => a == b,
        (Value::Int(a), Value::Int(b)) if a != b => false,
        (Value::Int(a), Value::Int(_)) if (-5..=256).contains(a) => true,
        (Value::List(a), Value::List(b)) => Rc::ptr_eq(a, b),
        (Value::Dict(a), Value::Dict(b)) => Rc::ptr_eq(a, b),
        (Value::Namespace(a), Value::Namespace(b)) => a == b,
        (Value::Tuple(a), Value::Tuple(b)) if Rc::ptr_eq(a, b) => true,
        (a, b) if a.type_name() != b.type_name() => false,
        _ => {
            return Err(Fail::unsupported(format!(
                "`is sameas` of two values of type {}",
                value.type_name()
            )));
        }
    })
}
