//! The variable `loop`: where a loop stands, what comes next, and calls of a recursive one.

use super::args::Args;
use super::ast::{Body, Expr, ForLoop};
use super::fail::{Fail, JinjaResult, NODE, charge, charge_text};
use super::interp::Interp;
use super::value::{Loop, LoopSource, Object, Seq, Value};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

fn state(object: &Object) -> JinjaResult<&RefCell<Loop>> {
    match object {
        Object::Loop(state) => Ok(state),
        _ => Err(Fail::failed("not a loop")),
    }
}

/// The next element, which becomes the current one.
pub(super) fn step(object: &Rc<Object>) -> JinjaResult<Option<Value>> {
    let mut l = state(object)?.borrow_mut();
    let next = match l.after.take() {
        Some(item) => Some(item),
        None => l.source.next()?,
    };
    let Some(item) = next else { return Ok(None) };
    l.index0 += 1;
    l.before = l.current.replace(item.clone());
    Ok(Some(item))
}

fn peek(state: &RefCell<Loop>) -> JinjaResult<Option<Value>> {
    let mut l = state.borrow_mut();
    if l.after.is_none() {
        l.after = l.source.next()?;
    }
    Ok(l.after.clone())
}

/// The number of elements; of an iterator, all are read for it.
pub(super) fn length(state: &RefCell<Loop>) -> JinjaResult<i128> {
    let mut l = state.borrow_mut();
    if let Some(length) = l.length {
        return Ok(length);
    }
    let mut rest = Vec::new();
    while let Some(item) = l.source.next()? {
        rest.push(item);
    }
    let length = rest.len() as i128 + l.index0 + 1 + i128::from(l.after.is_some());
    l.source = LoopSource::Items(rest.into(), 0);
    l.length = Some(length);
    Ok(length)
}

/// An attribute of `loop`. `None`: there is no such attribute.
pub(super) fn attribute(object: &Rc<Object>, name: &str) -> JinjaResult<Option<Value>> {
    let state = state(object)?;
    let (index0, depth0) = {
        let l = state.borrow();
        (l.index0, l.depth0)
    };
    Ok(Some(match name {
        "index0" => Value::Int(index0),
        "index" => Value::Int(index0 + 1),
        "first" => Value::Bool(index0 == 0),
        "depth0" => Value::Int(depth0),
        "depth" => Value::Int(depth0 + 1),
        "length" => Value::Int(length(state)?),
        "revindex0" => Value::Int(length(state)? - index0 - 1),
        "revindex" => Value::Int(length(state)? - index0),
        "last" => Value::Bool(peek(state)?.is_none()),
        "nextitem" => peek(state)?.unwrap_or_else(|| Value::hint("there is no next item")),
        "previtem" => match index0 {
            0 => Value::hint("there is no previous item"),
            _ => state.borrow().before.clone().unwrap_or(Value::None),
        },
        "cycle" => Value::Object(Rc::new(Object::Method(Value::Object(object.clone()), "cycle"))),
        "changed" => Value::Object(Rc::new(Object::Method(Value::Object(object.clone()), "changed"))),
        _ => return Ok(None),
    }))
}

pub(super) fn method(object: &Rc<Object>, name: &str, args: Args) -> JinjaResult<Value> {
    let state = state(object)?;
    if !args.named.is_empty() {
        return Err(Fail::failed(format!("loop.{name}() takes no keyword arguments")));
    }
    if name == "cycle" {
        let count = args.positional.len() as i128;
        if count == 0 {
            return Err(Fail::failed("no items for cycling given"));
        }
        let at = state.borrow().index0.rem_euclid(count) as usize;
        return Ok(args.positional[at].clone());
    }
    // `loop` itself must not be kept in it.
    let given = Seq::new(args.positional)?;
    let same = match &state.borrow().changed {
        Some(last) => Value::Tuple(given.clone()).equals(&Value::tuple(last.clone())?)?,
        None => false,
    };
    state.borrow_mut().changed = Some(given.items.clone());
    Ok(Value::Bool(!same))
}

/// `loop(iterable)` of a recursive loop.
pub(super) fn call(interp: &mut Interp, object: &Rc<Object>, args: &Args) -> JinjaResult<Value> {
    let state = state(object)?;
    let [iterable] = args.bind("loop", ["iterable"], 1)?;
    let (recursive, depth0) = {
        let l = state.borrow();
        (l.recursive.clone(), l.depth0)
    };
    let Some((node, scope)) = recursive else {
        return Err(Fail::failed(
            "The loop must have the 'recursive' marker to be called recursively.",
        ));
    };
    let iterable = iterable.unwrap_or(Value::None);
    let (text, _) = interp.capture(|i| i.run_loop(&node, iterable, scope, depth0 + 1))?;
    charge_text(text.len())?;
    Ok(Value::str(text))
}

/// The elements for which `test` holds.
pub(super) fn filtered(
    interp: &mut Interp,
    node: &Arc<ForLoop>,
    test: &Expr,
    iterable: Value,
    scope: usize,
) -> JinjaResult<LoopSource> {
    let mut out = Vec::new();
    for item in iterable.elements_ahead()? {
        charge(NODE)?;
        let before = interp.enter(scope, &Body::default())?;
        let keep = match interp.assign(&node.target, item.clone()) {
            Ok(()) => interp.eval(test).map(|v| v.truth()),
            Err(e) => Err(e),
        };
        interp.leave(before);
        if keep? {
            out.push(item);
        }
    }
    let length = out.len();
    Ok(LoopSource::Items(out.into(), length))
}
