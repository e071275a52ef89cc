//! Arguments of a call, and how they are bound to the parameters of a function.

use super::fail::{Fail, JinjaResult};
use super::value::Value;
use std::sync::Arc;

#[derive(Default, Clone)]
pub(super) struct Args {
    pub positional: Vec<Value>,
    pub named: Vec<(Arc<str>, Value)>,
}

impl Args {
    /// Values of the parameters `names`, of which the first `required` must be given.
    pub(super) fn bind<const N: usize>(
        &self,
        of: &str,
        names: [&str; N],
        required: usize,
    ) -> JinjaResult<[Option<Value>; N]> {
        let mut out: [Option<Value>; N] = std::array::from_fn(|_| None);
        if self.positional.len() > N {
            return Err(Fail::failed(format!(
                "{of}() takes at most {N} arguments ({} given)",
                self.positional.len()
            )));
        }
        for (slot, value) in out.iter_mut().zip(&self.positional) {
            *slot = Some(value.clone());
        }
        for (name, value) in &self.named {
            let Some(at) = names.iter().position(|n| *n == &**name) else {
                return Err(Fail::failed(format!(
                    "{of}() got an unexpected keyword argument '{name}'"
                )));
            };
            if out[at].is_some() {
                return Err(Fail::failed(format!(
                    "{of}() got multiple values for argument '{name}'"
                )));
            }
            out[at] = Some(value.clone());
        }
        match out.iter().take(required).position(Option::is_none) {
            Some(at) => Err(Fail::failed(format!(
                "{of}() missing required argument: '{}'",
                names[at]
            ))),
            None => Ok(out),
        }
    }

    /// As `bind`, for Python's built-in functions that take no keyword arguments.
    pub(super) fn bind_unnamed<const N: usize>(&self, of: &str, required: usize) -> JinjaResult<[Option<Value>; N]> {
        if !self.named.is_empty() {
            return Err(Fail::failed(format!("{of}() takes no keyword arguments")));
        }
        if self.positional.len() < required || self.positional.len() > N {
            return Err(Fail::failed(format!(
                "{of}() takes {required} to {N} arguments ({} given)",
                self.positional.len()
            )));
        }
        self.bind(of, [""; N], 0)
    }
}

/// An integer argument.
pub(super) fn int(of: &str, value: &Value) -> JinjaResult<i128> {
    value.defined()?;
    value.as_int().ok_or_else(|| {
        Fail::failed(format!(
            "{of}: '{}' object cannot be used as an integer",
            value.type_name()
        ))
    })
}

/// A count that may be used as a length; what is far too large fails where it is used.
pub(super) fn count(of: &str, value: &Value) -> JinjaResult<usize> {
    Ok(usize::try_from(int(of, value)?.max(0)).unwrap_or(usize::MAX))
}

/// A text argument.
pub(super) fn text<'a>(of: &str, value: &'a Value) -> JinjaResult<&'a str> {
    value.defined()?;
    value
        .as_str()
        .ok_or_else(|| Fail::failed(format!("{of}: expected str instance, {} found", value.type_name())))
}

/// The truth of an argument that may be missing.
pub(super) fn flag(value: &Option<Value>) -> bool {
    value.as_ref().is_some_and(Value::truth)
}

/// The argument, unless it is missing or none.
pub(super) fn given(value: Option<Value>) -> Option<Value> {
    value.filter(|v| !matches!(v, Value::None))
}
