//! Runs the tree: scopes, output and statements. Expressions are in `eval`, loops in `loops`.

use super::args::Args;
use super::ast::{Body, Expr, ExprKind, ForLoop, Macro, Name, Stmt, StmtKind, Target};
use super::fail::{Fail, JinjaResult, LONGEST, NODE, begin, charge, charge_text, check_stack};
use super::loops;
use super::parser::Tree;
use super::value::{Dict, Loop, Object, UndefinedReason, Value};
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

pub(super) struct Scope {
    /// `None`: not set yet, and hidden from what is outside.
    vars: Vec<(Name, Option<Value>)>,
    outer: Option<usize>,
    /// A macro was made in it: it stays as long as the rendering.
    kept: bool,
}

/// The text of a rendering, and the parts of its `{% generation %}` blocks.
pub(super) struct Output {
    pub text: String,
    pub generation: Vec<Range<usize>>,
    /// A generation block printed into a macro, a call or a block of `set` or `filter`: its place is not known.
    pub is_captured: bool,
}

pub(super) struct Interp<'t> {
    tree: &'t Tree,
    context: Vec<Option<Value>>,
    pub(super) scopes: Vec<Scope>,
    pub(super) scope: usize,
    pub(super) namespaces: Vec<Dict>,
    /// The text itself, and texts that are captured.
    out: Vec<String>,
    generation: Vec<Range<usize>>,
    is_captured: bool,
    /// Printed around each generation block, if given.
    marks: Option<[char; 2]>,
}

#[derive(PartialEq, Eq)]
pub(super) enum Flow {
    Next,
    Break,
    Continue,
}

impl<'t> Interp<'t> {
    /// Renders with these variables.
    pub(super) fn render(
        tree: &'t Tree,
        variables: &[(&str, Value)],
        input_bytes: usize,
        marks: Option<[char; 2]>,
    ) -> JinjaResult<Output> {
        begin(input_bytes);
        let given = |name: &Arc<str>| variables.iter().find(|(n, _)| *n == &**name).map(|(_, v)| v.clone());
        let mut interp = Self {
            tree,
            context: tree.names.iter().map(given).collect(),
            scopes: Vec::new(),
            scope: 0,
            namespaces: Vec::new(),
            out: vec![String::new()],
            generation: Vec::new(),
            is_captured: false,
            marks,
        };
        interp.scopes.push(Scope {
            vars: Vec::new(),
            outer: None,
            kept: true,
        });
        interp.hide(&tree.body);
        interp.block(&tree.body.nodes)?;
        Ok(Output {
            text: interp.out.pop().unwrap_or_default(),
            generation: interp.generation,
            is_captured: interp.is_captured,
        })
    }

    pub(super) fn name(&self, name: Name) -> Arc<str> {
        self.tree.names.get(name as usize).cloned().unwrap_or_else(|| "".into())
    }

    fn hide(&mut self, body: &Body) {
        for name in &body.unset {
            self.scopes[self.scope].vars.push((*name, None));
        }
    }

    pub(super) fn enter(&mut self, outer: usize, body: &Body) -> JinjaResult<usize> {
        charge(body.unset.len().saturating_mul(32))?;
        let before = self.scope;
        self.scopes.push(Scope {
            vars: Vec::new(),
            outer: Some(outer),
            kept: false,
        });
        self.scope = self.scopes.len() - 1;
        self.hide(body);
        Ok(before)
    }

    /// Back to the scope `before`; the one that was entered last goes, unless a macro still needs it.
    pub(super) fn leave(&mut self, before: usize) {
        self.scope = before;
        while self.scopes.len() > before + 1 && self.scopes.last().is_some_and(|s| !s.kept) {
            self.scopes.pop();
        }
    }

    pub(super) fn set(&mut self, name: Name, value: Option<Value>) -> JinjaResult<()> {
        let vars = &mut self.scopes[self.scope].vars;
        charge(vars.len())?;
        match vars.iter_mut().find(|(n, _)| *n == name) {
            Some((_, slot)) => *slot = value,
            None => vars.push((name, value)),
        }
        Ok(())
    }

    /// The variable: of the scopes from inside out, of the conversation, or a function of Jinja.
    pub(super) fn get(&self, name: Name) -> JinjaResult<Value> {
        let mut at = Some(self.scope);
        while let Some(i) = at {
            charge(self.scopes[i].vars.len())?;
            if let Some((_, value)) = self.scopes[i].vars.iter().find(|(n, _)| *n == name) {
                return Ok(value.clone().unwrap_or_else(|| self.not_set(name)));
            }
            at = self.scopes[i].outer;
        }
        if let Some(Some(value)) = self.context.get(name as usize) {
            return Ok(value.clone());
        }
        let global = super::functions::GLOBALS.iter().find(|g| **g == &*self.name(name));
        Ok(match global {
            Some(global) => Value::Object(Rc::new(Object::Function(global))),
            None => self.not_set(name),
        })
    }

    fn not_set(&self, name: Name) -> Value {
        Value::undefined(UndefinedReason::Name(self.name(name)))
    }

    pub(super) fn write(&mut self, text: &str) -> JinjaResult<()> {
        let held: usize = self.out.iter().map(String::len).sum();
        if held + text.len() > LONGEST {
            return Err(Fail::limit(format!(
                "the template prints more than {} MiB",
                LONGEST >> 20
            )));
        }
        charge(text.len())?;
        if let Some(out) = self.out.last_mut() {
            out.push_str(text);
        }
        Ok(())
    }

    /// The output of `inner`, as text.
    pub(super) fn capture(
        &mut self,
        inner: impl FnOnce(&mut Self) -> JinjaResult<Flow>,
    ) -> JinjaResult<(String, Flow)> {
        self.out.push(String::new());
        let done = inner(self);
        let text = self.out.pop().unwrap_or_default();
        done.map(|flow| (text, flow))
    }

    /// The statements of a body in a scope of its own.
    fn body(&mut self, body: &Body) -> JinjaResult<Flow> {
        let before = self.enter(self.scope, body)?;
        let done = self.block(&body.nodes);
        self.leave(before);
        done
    }

    pub(super) fn block(&mut self, nodes: &[Stmt]) -> JinjaResult<Flow> {
        for node in nodes {
            let flow = self.statement(node).map_err(|e| e.at(node.line))?;
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    fn statement(&mut self, node: &Stmt) -> JinjaResult<Flow> {
        charge(NODE)?;
        match &node.kind {
            StmtKind::Text(text) => self.write(text)?,
            StmtKind::Print(expr) => {
                let value = self.eval(expr)?;
                match value.as_str() {
                    Some(text) => self.write(text)?,
                    None => {
                        let text = self.text(&value)?;
                        self.write(&text)?;
                    }
                }
            }
            StmtKind::Set(target, expr) => {
                let value = self.eval(expr)?;
                self.assign(target, value)?;
            }
            StmtKind::If(branches, otherwise) => {
                for (test, nodes) in branches {
                    if self.eval(test)?.truth() {
                        return self.block(nodes);
                    }
                }
                return self.block(otherwise);
            }
            StmtKind::For(node) => return self.loop_statement(node),
            StmtKind::Break => return Ok(Flow::Break),
            StmtKind::Continue => return Ok(Flow::Continue),
            _ => return self.rare(node),
        }
        Ok(Flow::Next)
    }

    /// The statements that `statement` does not run itself: few templates have them.
    fn rare(&mut self, node: &Stmt) -> JinjaResult<Flow> {
        check_stack()?;
        match &node.kind {
            StmtKind::SetBlock(target, filter, body) => {
                let (text, flow) = self.capture(|i| i.body(body))?;
                if flow != Flow::Next {
                    // The loop goes on or ends before the text is used.
                    return Ok(flow);
                }
                charge_text(text.len())?;
                let mut value = Value::str(text);
                if let Some(filter) = filter {
                    value = self.filter_chain(filter, value)?;
                }
                self.assign(target, value)?;
            }
            StmtKind::With(values, body) => {
                let mut given = Vec::new();
                for (target, expr) in values {
                    given.push((target, self.eval(expr)?));
                }
                let before = self.enter(self.scope, body)?;
                let run = || {
                    for (target, value) in given {
                        self.assign(target, value)?;
                    }
                    self.block(&body.nodes)
                };
                let done = run();
                self.leave(before);
                return done;
            }
            StmtKind::Macro(code) => {
                let value = self.make_macro(code)?;
                if let Some(name) = code.name {
                    self.set(name, Some(value))?;
                }
            }
            StmtKind::CallBlock(call, code) => {
                let caller = self.make_macro(code)?;
                let ExprKind::Call(callee, args) = &call.kind else {
                    return Err(Fail::syntax("expected call"));
                };
                let callee = self.eval(callee)?;
                let mut args = self.arguments(args)?;
                args.named.push(("caller".into(), caller));
                let value = self.call(&callee, args).map_err(|e| e.at(call.line))?;
                self.write_block(&value)?;
            }
            StmtKind::FilterBlock(filter, body) => {
                let (text, flow) = self.capture(|i| i.body(body))?;
                if flow != Flow::Next {
                    return Ok(flow);
                }
                charge_text(text.len())?;
                let value = self.filter_chain(filter, Value::str(text))?;
                self.write_block(&value)?;
            }
            StmtKind::Generation(code) => self.generation(code)?,
            StmtKind::Scope(body) => return self.body(body),
            StmtKind::Refused(what) => return Err(Fail::unsupported(*what)),
            _ => {}
        }
        Ok(Flow::Next)
    }

    /// Prints what a call or a filter makes of a block. Errors: no text; jinja2 does not convert it here.
    fn write_block(&mut self, value: &Value) -> JinjaResult<()> {
        match value.as_str() {
            Some(text) => self.write(text),
            None => Err(Fail::failed(format!(
                "a block must print text: expected str instance, {} found",
                value.type_name()
            ))),
        }
    }

    fn generation(&mut self, code: &Macro) -> JinjaResult<()> {
        let is_top = self.out.len() == 1;
        self.is_captured |= !is_top;
        if let Some([start, _]) = self.marks {
            self.write(start.encode_utf8(&mut [0; 4]))?;
        }
        let start = self.out.last().map_or(0, String::len);
        let number = self.generation.len();
        if is_top {
            self.generation.push(start..start);
        }
        let before = self.enter(self.scope, &code.body)?;
        let done = self.generated(code);
        self.leave(before);
        done?;
        let end = self.out.last().map_or(0, String::len);
        if let Some(range) = self.generation.get_mut(number).filter(|_| is_top) {
            range.end = end;
        }
        if let Some([_, end]) = self.marks {
            self.write(end.encode_utf8(&mut [0; 4]))?;
        }
        Ok(())
    }

    /// The statements of a generation block. It is a call block in jinja2, called without arguments.
    fn generated(&mut self, code: &Macro) -> JinjaResult<()> {
        if code.uses_caller {
            self.set_word("caller", Value::hint("No caller defined"))?;
        }
        if code.uses_kwargs {
            self.set_word("kwargs", Value::Dict(Rc::new(Dict::default())))?;
        }
        if code.uses_varargs {
            self.set_word("varargs", Value::tuple(Vec::new())?)?;
        }
        self.block(&code.body.nodes).map(|_| ())
    }

    /// A filter or a chain of them on `value`; the innermost one has no value of its own.
    fn filter_chain(&mut self, filter: &Expr, value: Value) -> JinjaResult<Value> {
        let ExprKind::Filter(inner, name, args) = &filter.kind else {
            return self.eval(filter);
        };
        let value = match inner {
            Some(inner) => self.filter_chain(inner, value)?,
            None => value,
        };
        let args = self.arguments(args)?;
        self.filter(name, value, args).map_err(|e| e.at(filter.line))
    }

    pub(super) fn assign(&mut self, target: &Target, value: Value) -> JinjaResult<()> {
        match target {
            Target::Name(name) => self.set(*name, Some(value))?,
            Target::Attribute(name, attribute) => {
                let Value::Namespace(at) = self.get(*name)? else {
                    return Err(Fail::failed("cannot assign attribute on non-namespace object"));
                };
                super::functions::check_namespace_name(attribute)?;
                // `loop` is no part of a namespace, which may live longer.
                let value = super::value::Seq::new(vec![value])?.items[0].clone();
                if let Some(dict) = self.namespaces.get_mut(at) {
                    dict.insert(Value::Str(attribute.clone()), value)?;
                }
            }
            Target::Tuple(targets) => {
                value.defined()?;
                let items = value.elements()?;
                if items.len() != targets.len() {
                    let what = if items.len() < targets.len() {
                        format!(
                            "not enough values to unpack (expected {}, got {})",
                            targets.len(),
                            items.len()
                        )
                    } else {
                        format!("too many values to unpack (expected {})", targets.len())
                    };
                    return Err(Fail::failed(what));
                }
                for (target, item) in targets.iter().zip(items) {
                    self.assign(target, item)?;
                }
            }
        }
        Ok(())
    }

    fn make_macro(&mut self, code: &Arc<Macro>) -> JinjaResult<Value> {
        // Its scopes stay until the end.
        charge(40 * NODE)?;
        let mut at = Some(self.scope);
        while let Some(i) = at.filter(|i| !self.scopes[*i].kept) {
            self.scopes[i].kept = true;
            at = self.scopes[i].outer;
        }
        Ok(Value::Object(Rc::new(Object::Macro {
            code: code.clone(),
            scope: self.scope,
            name: code.name.map(|n| self.name(n)),
        })))
    }

    /// Calls a macro. Errors: its own, or arguments that it does not take.
    pub(super) fn call_macro(&mut self, code: &Macro, scope: usize, args: Args) -> JinjaResult<Value> {
        check_stack()?;
        let Args {
            mut positional,
            mut named,
        } = args;
        // Each parameter is looked for among the names.
        charge(
            code.args
                .len()
                .saturating_mul(named.len().saturating_mul(4).saturating_add(NODE)),
        )?;
        let name = code
            .name
            .map_or_else(|| "None".into(), |n| format!("'{}'", self.name(n)));
        let more = positional.split_off(positional.len().min(code.args.len()));
        let before = self.enter(scope, &code.body)?;
        let run = || -> JinjaResult<String> {
            let mut given = positional.into_iter();
            let mut missing = Vec::new();
            let mut found_caller = false;
            for (parameter, default) in &code.args {
                let parameter_name = self.name(*parameter);
                found_caller |= &*parameter_name == "caller";
                let value = given.next().or_else(|| {
                    let at = named.iter().position(|(n, _)| *n == parameter_name)?;
                    Some(named.remove(at).1)
                });
                if value.is_none() {
                    missing.push((*parameter, default, parameter_name));
                }
                self.set(*parameter, value)?;
            }
            if code.uses_caller && !found_caller {
                let at = named.iter().position(|(n, _)| &**n == "caller");
                let caller = match at.map(|at| named.remove(at).1).filter(|v| !matches!(v, Value::None)) {
                    Some(caller) => caller,
                    None => Value::hint("No caller defined"),
                };
                self.set_word("caller", caller)?;
            }
            if code.uses_kwargs {
                let pairs = named.drain(..).map(|(k, v)| (Value::Str(k), v));
                let dict = Value::Dict(Rc::new(Dict::new(pairs.collect::<Vec<_>>())?));
                self.set_word("kwargs", dict)?;
            } else if let Some((word, _)) = named.first() {
                return Err(Fail::failed(match &**word {
                    "caller" => format!(
                        "macro {name} was invoked with two values for the special caller argument. This is most \
                         likely a bug."
                    ),
                    _ => format!("macro {name} takes no keyword argument '{word}'"),
                }));
            }
            if code.uses_varargs {
                let list = Value::tuple(more)?;
                self.set_word("varargs", list)?;
            } else if !more.is_empty() {
                return Err(Fail::failed(format!(
                    "macro {name} takes not more than {} argument(s)",
                    code.args.len()
                )));
            }
            for (parameter, default, parameter_name) in missing {
                let value = match default {
                    Some(expr) => self.eval(expr)?,
                    None => Value::hint(format!("parameter '{parameter_name}' was not provided")),
                };
                self.set(parameter, Some(value))?;
            }
            self.capture(|i| i.block(&code.body.nodes)).map(|(text, _)| text)
        };
        let done = run();
        self.leave(before);
        let text = done?;
        charge_text(text.len())?;
        Ok(Value::str(text))
    }

    fn set_word(&mut self, word: &str, value: Value) -> JinjaResult<()> {
        match self.tree.word(word)? {
            Some(name) => self.set(name, Some(value)),
            None => Ok(()),
        }
    }

    /// One run through a loop; `recursive` tells the depth of a call of `loop(...)`.
    pub(super) fn run_loop(
        &mut self,
        node: &Arc<ForLoop>,
        iterable: Value,
        scope: usize,
        depth0: i128,
    ) -> JinjaResult<Flow> {
        check_stack()?;
        let source = match &node.test {
            Some(test) => loops::filtered(self, node, test, iterable, scope)?,
            None => iterable.source()?,
        };
        let state = Rc::new(Object::Loop(Box::new(RefCell::new(Loop {
            length: match &source {
                super::value::LoopSource::Items(_, length) if node.test.is_none() => Some(*length as i128),
                _ => None,
            },
            source,
            index0: -1,
            before: None,
            current: None,
            after: None,
            depth0,
            changed: None,
            recursive: node.recursive.then(|| (node.clone(), scope)),
        }))));
        let loop_name = self.tree.word("loop")?;
        // `else` runs unless some element reached the end of the body.
        let mut reached_end = false;
        while let Some(item) = loops::step(&state)? {
            charge(NODE)?;
            let before = self.enter(scope, &node.body)?;
            if let Some(name) = loop_name {
                self.set(name, Some(Value::Object(state.clone())))?;
            }
            let flow = match self.assign(&node.target, item) {
                Ok(()) => self.block(&node.body.nodes),
                Err(e) => Err(e.at(node.line)),
            };
            self.leave(before);
            match flow? {
                Flow::Next => reached_end = true,
                Flow::Continue => {}
                Flow::Break => break,
            }
        }
        if reached_end || !node.has_else {
            return Ok(Flow::Next);
        }
        let before = self.enter(scope, &node.otherwise)?;
        let done = self.block(&node.otherwise.nodes);
        self.leave(before);
        done
    }

    fn loop_statement(&mut self, node: &Arc<ForLoop>) -> JinjaResult<Flow> {
        let iterable = self.eval(&node.iter)?;
        if !iterable.is_iterable() {
            return Err(Fail::failed(format!("'{}' object is not iterable", iterable.type_name())).at(node.line));
        }
        self.run_loop(node, iterable, self.scope, 0)
    }
}
