//! Attributes that Python's types have, and those that the sandbox keeps away.

use super::fail::{Fail, JinjaResult};
use super::interp::Interp;
use super::loops;
use super::value::{Object, Value, View};
use std::rc::Rc;

pub(super) const STR: [&str; 47] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "encode",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "maketrans",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
];
const MARKUP: [&str; 3] = ["escape", "striptags", "unescape"];
pub(super) const LIST: [&str; 11] = [
    "append", "clear", "copy", "count", "extend", "index", "insert", "pop", "remove", "reverse", "sort",
];
pub(super) const DICT: [&str; 11] = [
    "clear",
    "copy",
    "fromkeys",
    "get",
    "items",
    "keys",
    "pop",
    "popitem",
    "setdefault",
    "update",
    "values",
];
const TUPLE: [&str; 2] = ["count", "index"];
pub(super) const INT: [&str; 11] = [
    "as_integer_ratio",
    "bit_count",
    "bit_length",
    "conjugate",
    "denominator",
    "from_bytes",
    "imag",
    "is_integer",
    "numerator",
    "real",
    "to_bytes",
];
pub(super) const FLOAT: [&str; 7] = [
    "as_integer_ratio",
    "conjugate",
    "fromhex",
    "hex",
    "imag",
    "is_integer",
    "real",
];
const RANGE: [&str; 5] = ["count", "index", "start", "step", "stop"];
const KEYS: [&str; 2] = ["isdisjoint", "mapping"];
const VALUES: [&str; 1] = ["mapping"];

/// Methods that would change a value.
fn changes(value: &Value, name: &str) -> bool {
    match value {
        Value::List(_) => !["copy", "count", "index"].contains(&name),
        Value::Dict(_) => ["clear", "pop", "popitem", "setdefault", "update"].contains(&name),
        _ => false,
    }
}

/// The attribute `name` of the value's type; `None`: it has none.
pub(super) fn of(interp: &Interp, value: &Value, name: &str) -> JinjaResult<Option<Value>> {
    if name.starts_with("__") && name.ends_with("__") && name.len() > 4 && !matches!(value, Value::Namespace(_)) {
        // Whether the type has it or not, it cannot be used; a key of that name is no attribute.
        let is_key = matches!(value, Value::Dict(d) if d.get_str(name).is_some());
        return if is_key {
            Err(Fail::unsupported(format!("the key `{name}`")))
        } else {
            Ok(Some(unsafe_attribute(value, name)))
        };
    }
    let find = |names: &[&'static str]| names.iter().find(|n| **n == name).copied();
    let found = match value {
        Value::Str(_) => find(&STR),
        Value::Markup(_) => find(&STR).or_else(|| find(&MARKUP)),
        Value::List(_) => find(&LIST),
        Value::Dict(_) => find(&DICT),
        Value::Tuple(_) => find(&TUPLE),
        Value::Group(seq) => match name {
            "grouper" => return Ok(seq.items.first().cloned()),
            "list" => return Ok(seq.items.get(1).cloned()),
            "_asdict" | "_make" | "_replace" | "_fields" | "_field_defaults" => {
                return Ok(Some(unsafe_attribute(value, name)));
            }
            _ => find(&TUPLE),
        },
        Value::Bool(_) | Value::Int(_) => match (name, value.as_int()) {
            ("real" | "numerator", Some(n)) => return Ok(Some(Value::Int(n))),
            ("imag", _) => return Ok(Some(Value::Int(0))),
            ("denominator", _) => return Ok(Some(Value::Int(1))),
            ("is_integer", _) => return Err(Fail::unsupported("`is_integer` of an integer: older Pythons have none")),
            _ => find(&INT),
        },
        Value::Float(x) => match name {
            "real" => return Ok(Some(Value::Float(*x))),
            "imag" => return Ok(Some(Value::Float(0.0))),
            _ => find(&FLOAT),
        },
        Value::Range(range) => match name {
            "start" => return Ok(Some(Value::Int(range.start))),
            "stop" => return Ok(Some(Value::Int(range.stop))),
            "step" => return Ok(Some(Value::Int(range.step))),
            _ => find(&RANGE),
        },
        Value::View(View::Values, _) => find(&VALUES),
        Value::View(..) => find(&KEYS),
        Value::Namespace(at) => {
            let dict = interp.namespaces.get(*at);
            return Ok(dict.and_then(|d| d.get_str(name)).cloned());
        }
        Value::Object(object) => match &**object {
            Object::Loop(_) => {
                if name.starts_with('_') {
                    return Ok(Some(unsafe_attribute(value, name)));
                }
                return loops::attribute(object, name);
            }
            Object::Cycler(items, at) => match name {
                "current" => return Ok(items.items.get(at.get()).cloned()),
                "next" => Some("next"),
                "reset" => Some("reset"),
                "items" | "pos" => return Err(Fail::unsupported(format!("`{name}` of a cycler"))),
                _ => None,
            },
            Object::Macro { code, name: own, .. } => match name {
                "name" => return Ok(Some(own.clone().map_or(Value::None, Value::Str))),
                "arguments" => {
                    let names = code.args.iter().map(|(n, _)| Value::Str(interp.name(*n))).collect();
                    return Value::tuple(names).map(Some);
                }
                "catch_kwargs" => return Ok(Some(Value::Bool(code.uses_kwargs))),
                "catch_varargs" => return Ok(Some(Value::Bool(code.uses_varargs))),
                "caller" => return Ok(Some(Value::Bool(code.uses_caller))),
                _ => None,
            },
            Object::Function("dict") if name == "fromkeys" => Some("fromkeys"),
            _ => return Err(Fail::unsupported(format!("`{name}` of a {}", value.type_name()))),
        },
        Value::Iter(_) => return Err(Fail::unsupported(format!("`{name}` of a {}", value.type_name()))),
        Value::None | Value::Undefined(_) => None,
    };
    Ok(found.map(|name| {
        if changes(value, name) {
            unsafe_attribute(value, name)
        } else {
            Value::Object(Rc::new(Object::Method(value.clone(), name)))
        }
    }))
}

fn unsafe_attribute(value: &Value, name: &str) -> Value {
    Value::hint(format!(
        "access to attribute '{name}' of '{}' object is unsafe.",
        value.type_name()
    ))
}
