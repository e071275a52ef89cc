//! Expressions: names, operators, attributes, calls.

use super::args::Args;
use super::ast::{CallArgs, Const, Expr, ExprKind};
use super::fail::{Fail, JinjaResult, NODE, charge, charge_text, check_stack};
use super::interp::Interp;
use super::loops;
use super::value::{Dict, Object, UndefinedReason, Value};
use super::{attributes, filters, functions, methods, ops, predicates};
use std::rc::Rc;
use std::sync::Arc;

impl Interp<'_> {
    pub(super) fn eval(&mut self, expr: &Expr) -> JinjaResult<Value> {
        charge(NODE)?;
        match &expr.kind {
            ExprKind::Const(value) => Ok(match value {
                Const::None => Value::None,
                Const::Bool(b) => Value::Bool(*b),
                Const::Int(n) => Value::Int(*n),
                Const::Float(x) => Value::Float(*x),
                Const::Str(s) => Value::Str(s.clone()),
            }),
            ExprKind::Name(name) => self.get(*name),
            ExprKind::And(a, b) => {
                let left = self.eval(a)?;
                if left.truth() { self.eval(b) } else { Ok(left) }
            }
            ExprKind::Or(a, b) => {
                let left = self.eval(a)?;
                if left.truth() { Ok(left) } else { self.eval(b) }
            }
            ExprKind::Not(e) => Ok(Value::Bool(!self.eval(e)?.truth())),
            ExprKind::Attribute(e, name) => {
                let value = self.eval(e)?;
                self.attribute(&value, name).map_err(|e| e.at(expr.line))
            }
            _ => self.compound(expr).map_err(|e| e.at(expr.line)),
        }
    }

    fn compound(&mut self, expr: &Expr) -> JinjaResult<Value> {
        match &expr.kind {
            ExprKind::Item(e, index) => {
                let value = self.eval(e)?;
                let index = self.eval(index)?;
                self.item(&value, &index)
            }
            ExprKind::Binary(op, a, b) => {
                let a = self.eval(a)?;
                let b = self.eval(b)?;
                ops::binary(*op, &a, &b)
            }
            ExprKind::Compare(first, rest) => {
                let mut left = self.eval(first)?;
                for (op, right) in rest {
                    let right = self.eval(right)?;
                    if !ops::compare(*op, &left, &right)? {
                        return Ok(Value::Bool(false));
                    }
                    left = right;
                }
                Ok(Value::Bool(true))
            }
            ExprKind::Concat(list) => {
                let mut out = String::new();
                for e in list {
                    let value = self.eval(e)?;
                    match value.as_str() {
                        Some(text) => out.push_str(text),
                        None => out.push_str(&self.text(&value)?),
                    }
                    super::fail::check_text(&out)?;
                }
                charge_text(out.len())?;
                Ok(Value::str(out))
            }
            ExprKind::Cond(test, yes, no) => match (self.eval(test)?.truth(), no) {
                (true, _) => self.eval(yes),
                (false, Some(no)) => self.eval(no),
                (false, None) => Ok(Value::hint(
                    "the inline if-expression evaluated to false and no else section was defined.",
                )),
            },
            ExprKind::Call(callee, args) => {
                check_stack()?;
                let callee = self.eval(callee)?;
                let args = self.arguments(args)?;
                self.call(&callee, args)
            }
            ExprKind::Filter(value, name, args) => {
                let value = match value {
                    Some(e) => self.eval(e)?,
                    None => Value::None,
                };
                let args = self.arguments(args)?;
                self.filter(name, value, args)
            }
            ExprKind::Test(e, name, args) => {
                let value = self.eval(e)?;
                let args = self.arguments(args)?;
                self.test(name, &value, &args).map(Value::Bool)
            }
            ExprKind::Tuple(list) => {
                let items = list.iter().map(|e| self.eval(e)).collect::<JinjaResult<_>>()?;
                Value::tuple(items)
            }
            ExprKind::List(list) => {
                let items = list.iter().map(|e| self.eval(e)).collect::<JinjaResult<_>>()?;
                Value::list(items)
            }
            ExprKind::Dict(pairs) => {
                let mut dict = Dict::default();
                for (key, value) in pairs {
                    let key = self.eval(key)?;
                    let value = self.eval(value)?;
                    dict.insert(key, value)?;
                }
                Ok(Value::Dict(Rc::new(dict)))
            }
            ExprKind::Neg(e) => ops::negative(&self.eval(e)?, true),
            ExprKind::Pos(e) => ops::negative(&self.eval(e)?, false),
            ExprKind::Slice(e, parts) => {
                let value = self.eval(e)?;
                let mut given = [Value::None, Value::None, Value::None];
                for (slot, part) in given.iter_mut().zip(parts.iter()) {
                    if let Some(part) = part {
                        *slot = self.eval(part)?;
                    }
                }
                ops::slice(&value, [&given[0], &given[1], &given[2]])
            }
            _ => self.eval(expr),
        }
    }

    pub(super) fn arguments(&mut self, args: &CallArgs) -> JinjaResult<Args> {
        let mut out = Args::default();
        for e in &args.positional {
            out.positional.push(self.eval(e)?);
        }
        for (name, e) in &args.named {
            out.named.push((name.clone(), self.eval(e)?));
        }
        if let Some(e) = &args.more {
            let more = self.eval(e)?;
            out.positional.extend(more.elements()?);
        }
        if let Some(e) = &args.more_named {
            let more = self.eval(e)?;
            let Value::Dict(dict) = &more else {
                return Err(Fail::failed(format!(
                    "argument after ** must be a mapping, not {}",
                    more.type_name()
                )));
            };
            for (key, value) in dict.iter() {
                let Value::Str(name) = key else {
                    return Err(Fail::failed("keywords must be strings"));
                };
                charge(out.named.len().saturating_mul(4).saturating_add(name.len()))?;
                if out.named.iter().any(|(n, _)| n == name) {
                    return Err(Fail::failed(format!(
                        "got multiple values for keyword argument '{name}'"
                    )));
                }
                out.named.push((name.clone(), value.clone()));
            }
        }
        Ok(out)
    }

    /// `value.name`: an attribute of the type, else an element.
    pub(super) fn attribute(&self, value: &Value, name: &Arc<str>) -> JinjaResult<Value> {
        charge(name.len())?;
        value.defined()?;
        if let Some(found) = attributes::of(self, value, name)? {
            return Ok(found);
        }
        if let Value::Dict(dict) = value
            && let Some(found) = dict.get_str(name)
        {
            return Ok(found.clone());
        }
        Ok(no_attribute(value, name))
    }

    /// `value[index]`: an element, else an attribute of the type.
    pub(super) fn item(&self, value: &Value, index: &Value) -> JinjaResult<Value> {
        value.defined()?;
        if let Some(found) = ops::item(value, index)? {
            return Ok(found);
        }
        let name = match index {
            Value::Str(name) | Value::Markup(name) => {
                charge(name.len())?;
                name
            }
            _ => {
                let key = self.repr_text(index)?;
                return Ok(Value::undefined(UndefinedReason::Element(python_object(value), key)));
            }
        };
        Ok(attributes::of(self, value, name)?.unwrap_or_else(|| no_attribute(value, name)))
    }

    pub(super) fn call(&mut self, callee: &Value, args: Args) -> JinjaResult<Value> {
        callee.defined()?;
        let Value::Object(object) = callee else {
            return Err(Fail::failed(format!("'{}' object is not callable", callee.type_name())));
        };
        match &**object {
            Object::Macro { code, scope, .. } => self.call_macro(code, *scope, args),
            Object::Loop(_) => loops::call(self, object, &args),
            Object::Method(Value::Object(receiver), name) if matches!(**receiver, Object::Loop(_)) => {
                loops::method(receiver, name, args)
            }
            Object::Method(receiver, name) => methods::call(self, receiver, name, args),
            Object::Function(name) => functions::call(self, name, args),
            Object::Joiner(separator, used) => {
                args.bind("joiner", [], 0)?;
                Ok(if used.replace(true) {
                    Value::Str(separator.clone())
                } else {
                    Value::str("")
                })
            }
            Object::Cycler(..) => Err(Fail::failed("'Cycler' object is not callable")),
        }
    }

    pub(super) fn filter(&mut self, name: &str, value: Value, args: Args) -> JinjaResult<Value> {
        charge(NODE)?;
        filters::call(self, name, value, args)
    }

    pub(super) fn test(&mut self, name: &str, value: &Value, args: &Args) -> JinjaResult<bool> {
        charge(NODE)?;
        predicates::call(self, name, value, args)
    }
}

/// `dict object` in Python's messages.
fn python_object(value: &Value) -> String {
    match value {
        Value::None => "None".into(),
        _ => format!("{} object", value.type_name()),
    }
}

fn no_attribute(value: &Value, name: &Arc<str>) -> Value {
    Value::undefined(UndefinedReason::Attribute(python_object(value), name.clone()))
}
