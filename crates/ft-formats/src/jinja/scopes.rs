//! Which names a scope hides before it sets them.
//!
//! jinja2 decides where a name lives when it compiles: a name that a scope sets, does not read before, and that no
//! scope outside knows, is undefined until then, even if the conversation has a variable of that name. (Set inside an
//! `if`, it is not.)

use super::ast::{Body, Expr, ForLoop, Macro, Name, Stmt, StmtKind, Target};
use super::fail::{JinjaResult, NODE, charge};
use super::parser::target_names;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Work of one name in a copy of a scope.
const COPY: usize = 150;

/// The names of one scope. True: undefined until it is set.
#[derive(Default, Clone)]
struct Scope {
    refs: HashMap<Name, bool>,
    stores: HashSet<Name>,
}

/// The scopes around, the innermost last.
type OuterScopes<'a> = &'a [Scope];

fn known_outside(outside: OuterScopes, name: Name) -> bool {
    outside.iter().any(|s| s.refs.contains_key(&name))
}

impl Scope {
    fn read(&mut self, outside: OuterScopes, name: Name) {
        if !known_outside(outside, name) {
            self.refs.entry(name).or_insert(false);
        }
    }

    fn write(&mut self, outside: OuterScopes, name: Name) {
        self.stores.insert(name);
        self.refs.entry(name).or_insert(!known_outside(outside, name));
    }

    fn parameter(&mut self, name: Name) {
        self.stores.insert(name);
        self.refs.insert(name, false);
    }

    fn expr(&mut self, outside: OuterScopes, expr: &Expr) {
        expr.names(&mut |name| self.read(outside, name));
    }

    fn target(&mut self, outside: OuterScopes, target: &Target) {
        match target {
            Target::Name(name) => self.write(outside, *name),
            Target::Attribute(name, _) => self.read(outside, *name),
            Target::Tuple(list) => list.iter().for_each(|t| self.target(outside, t)),
        }
    }

    fn nodes(&mut self, outside: OuterScopes, nodes: &[Stmt]) -> JinjaResult<()> {
        for node in nodes {
            charge(NODE)?;
            match &node.kind {
                StmtKind::Print(e) => self.expr(outside, e),
                StmtKind::Set(target, e) => {
                    self.expr(outside, e);
                    self.target(outside, target);
                }
                StmtKind::SetBlock(target, filter, _) => {
                    self.target(outside, target);
                    filter.iter().for_each(|e| self.expr(outside, e));
                }
                StmtKind::If(branches, otherwise) => self.branches(outside, branches, otherwise)?,
                StmtKind::For(node) => self.expr(outside, &node.iter),
                StmtKind::With(values, _) => values.iter().for_each(|(_, e)| self.expr(outside, e)),
                StmtKind::Macro(node) => node.name.iter().for_each(|name| self.write(outside, *name)),
                StmtKind::CallBlock(e, _) | StmtKind::FilterBlock(e, _) => self.expr(outside, e),
                StmtKind::Text(_)
                | StmtKind::Generation(_)
                | StmtKind::Scope(_)
                | StmtKind::Break
                | StmtKind::Continue
                | StmtKind::Refused(_) => {}
            }
        }
        Ok(())
    }

    /// Accounts for copies of this scope, and for their merging.
    fn charge_copies(&self, copies: usize) -> JinjaResult<()> {
        charge((self.refs.len() + self.stores.len()).saturating_mul(copies * COPY))
    }

    fn branches(
        &mut self,
        outside: OuterScopes,
        branches: &[(Expr, Vec<Stmt>)],
        otherwise: &[Stmt],
    ) -> JinjaResult<()> {
        let Some(((test, body), rest)) = branches.split_first() else {
            return Ok(());
        };
        self.expr(outside, test);
        self.charge_copies(3)?;
        let before = self.clone();
        let mut scopes = vec![before.clone(), before.clone(), before];
        scopes[0].nodes(outside, body)?;
        for (test, body) in rest {
            // An `elif` is an `if` of its own.
            let inner = &mut scopes[1];
            inner.expr(outside, test);
            inner.charge_copies(1)?;
            let mut branch = inner.clone();
            branch.nodes(outside, body)?;
            inner.merge(vec![branch]);
        }
        scopes[2].nodes(outside, otherwise)?;
        self.merge(scopes);
        Ok(())
    }

    fn merge(&mut self, branches: Vec<Scope>) {
        let mut new: HashSet<Name> = branches.iter().flat_map(|b| b.stores.iter().copied()).collect();
        new.retain(|name| !self.stores.contains(name));
        for branch in branches {
            self.refs.extend(branch.refs);
            self.stores.extend(branch.stores);
        }
        self.refs.extend(new.into_iter().map(|name| (name, false)));
    }
}

/// Fills `unset` of a template and of all bodies in it.
///
/// Errors: too much work.
pub(super) fn resolve(body: &mut Body) -> JinjaResult<()> {
    body_of(body, &mut Vec::new(), Scope::default())
}

fn body_of(body: &mut Body, outside: &mut Vec<Scope>, mut scope: Scope) -> JinjaResult<()> {
    scope.nodes(outside, &body.nodes)?;
    body.unset = scope
        .refs
        .iter()
        .filter(|(_, unset)| **unset)
        .map(|(n, _)| *n)
        .collect();
    body.unset.sort_unstable();
    outside.push(scope);
    inner(&mut body.nodes, outside)?;
    outside.pop();
    Ok(())
}

fn inner(nodes: &mut [Stmt], outside: &mut Vec<Scope>) -> JinjaResult<()> {
    for node in nodes {
        match &mut node.kind {
            StmtKind::If(branches, otherwise) => {
                for (_, body) in branches {
                    inner(body, outside)?;
                }
                inner(otherwise, outside)?;
            }
            StmtKind::SetBlock(_, _, body) | StmtKind::FilterBlock(_, body) | StmtKind::Scope(body) => {
                body_of(body, outside, Scope::default())?
            }
            StmtKind::Generation(code) => body_of(&mut code.body, outside, Scope::default())?,
            StmtKind::With(values, body) => {
                let mut scope = Scope::default();
                parameters(&mut scope, values.iter().flat_map(|(t, _)| target_names(t)));
                body_of(body, outside, scope)?;
            }
            StmtKind::For(node) => {
                // Only this tree holds it yet.
                let Some(ForLoop {
                    target,
                    body,
                    otherwise,
                    ..
                }) = Arc::get_mut(node)
                else {
                    continue;
                };
                let mut scope = Scope::default();
                parameters(&mut scope, target_names(target));
                body_of(body, outside, scope)?;
                body_of(otherwise, outside, Scope::default())?;
            }
            StmtKind::Macro(node) | StmtKind::CallBlock(_, node) => {
                let Some(Macro { args, body, .. }) = Arc::get_mut(node) else {
                    continue;
                };
                let mut scope = Scope::default();
                parameters(&mut scope, args.iter().map(|(name, _)| *name));
                for (_, default) in args.iter() {
                    default.iter().for_each(|e| scope.expr(outside, e));
                }
                body_of(body, outside, scope)?;
            }
            StmtKind::Text(_)
            | StmtKind::Print(_)
            | StmtKind::Set(..)
            | StmtKind::Break
            | StmtKind::Continue
            | StmtKind::Refused(_) => {}
        }
    }
    Ok(())
}

fn parameters(scope: &mut Scope, names: impl IntoIterator<Item = Name>) {
    names.into_iter().for_each(|name| scope.parameter(name));
}
