//! The tree of a parsed template. Every node knows how deep it is, so that no recursion over it overflows the stack.

use super::fail::Fail;
use std::sync::Arc;

/// Deepest nesting of expressions and of blocks.
pub(super) const DEPTH: u16 = 120;

/// A name, as its place in the program's table.
pub(super) type Name = u32;

#[derive(Debug)]
pub(super) struct Expr {
    pub kind: ExprKind,
    pub line: u32,
    pub depth: u16,
}

#[derive(Debug, Clone)]
pub(super) enum Const {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Mod,
    Pow,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
}

#[derive(Debug)]
pub(super) enum ExprKind {
    Const(Const),
    Name(Name),
    Tuple(Vec<Expr>),
    List(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Neg(Box<Expr>),
    Pos(Box<Expr>),
    Not(Box<Expr>),
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    Binary(Binary, Box<Expr>, Box<Expr>),
    Concat(Vec<Expr>),
    Compare(Box<Expr>, Vec<(Compare, Expr)>),
    /// Test, value if it holds, value if not.
    Cond(Box<Expr>, Box<Expr>, Option<Box<Expr>>),
    Attribute(Box<Expr>, Arc<str>),
    Item(Box<Expr>, Box<Expr>),
    Slice(Box<Expr>, Box<[Option<Expr>; 3]>),
    Call(Box<Expr>, Box<CallArgs>),
    /// Without a value: the head of a filter block.
    Filter(Option<Box<Expr>>, Arc<str>, Box<CallArgs>),
    Test(Box<Expr>, Arc<str>, Box<CallArgs>),
}

#[derive(Debug, Default)]
pub(super) struct CallArgs {
    pub positional: Vec<Expr>,
    pub named: Vec<(Arc<str>, Expr)>,
    pub more: Option<Expr>,
    pub more_named: Option<Expr>,
}

impl CallArgs {
    fn all(&self) -> impl Iterator<Item = &Expr> {
        let named = self.named.iter().map(|(_, e)| e);
        self.positional
            .iter()
            .chain(named)
            .chain(&self.more)
            .chain(&self.more_named)
    }
}

impl Expr {
    /// Calls `found` for every name that is read, in the order of the text.
    pub(super) fn names(&self, found: &mut dyn FnMut(Name)) {
        match &self.kind {
            ExprKind::Const(_) => {}
            ExprKind::Name(name) => found(*name),
            ExprKind::Tuple(list) | ExprKind::List(list) | ExprKind::Concat(list) => {
                list.iter().for_each(|e| e.names(found));
            }
            ExprKind::Dict(pairs) => pairs.iter().for_each(|(k, v)| {
                k.names(found);
                v.names(found);
            }),
            ExprKind::Neg(e) | ExprKind::Pos(e) | ExprKind::Not(e) | ExprKind::Attribute(e, _) => e.names(found),
            ExprKind::And(a, b) | ExprKind::Or(a, b) | ExprKind::Binary(_, a, b) | ExprKind::Item(a, b) => {
                a.names(found);
                b.names(found);
            }
            ExprKind::Compare(first, rest) => {
                first.names(found);
                rest.iter().for_each(|(_, e)| e.names(found));
            }
            ExprKind::Cond(a, b, c) => {
                a.names(found);
                b.names(found);
                c.iter().for_each(|e| e.names(found));
            }
            ExprKind::Slice(e, parts) => {
                e.names(found);
                parts.iter().flatten().for_each(|e| e.names(found));
            }
            ExprKind::Call(e, args) | ExprKind::Test(e, _, args) => {
                e.names(found);
                args.all().for_each(|e| e.names(found));
            }
            ExprKind::Filter(e, _, args) => {
                e.iter().for_each(|e| e.names(found));
                args.all().for_each(|e| e.names(found));
            }
        }
    }

    /// Errors: the expression is nested too deeply.
    pub(super) fn new(kind: ExprKind, line: u32) -> Result<Self, Fail> {
        fn deepest<'a>(all: impl IntoIterator<Item = &'a Expr>) -> u16 {
            all.into_iter().map(|e| e.depth).max().unwrap_or(0)
        }
        let below = match &kind {
            ExprKind::Const(_) | ExprKind::Name(_) => 0,
            ExprKind::Tuple(list) | ExprKind::List(list) | ExprKind::Concat(list) => deepest(list),
            ExprKind::Dict(pairs) => deepest(pairs.iter().flat_map(|(k, v)| [k, v])),
            ExprKind::Neg(e) | ExprKind::Pos(e) | ExprKind::Not(e) | ExprKind::Attribute(e, _) => e.depth,
            ExprKind::And(a, b) | ExprKind::Or(a, b) | ExprKind::Binary(_, a, b) | ExprKind::Item(a, b) => {
                a.depth.max(b.depth)
            }
            ExprKind::Compare(first, rest) => first.depth.max(deepest(rest.iter().map(|(_, e)| e))),
            ExprKind::Cond(a, b, c) => a.depth.max(b.depth).max(c.as_ref().map_or(0, |e| e.depth)),
            ExprKind::Slice(e, parts) => e.depth.max(deepest(parts.iter().flatten())),
            ExprKind::Call(e, args) | ExprKind::Test(e, _, args) => e.depth.max(deepest(args.all())),
            ExprKind::Filter(e, _, args) => e.as_ref().map_or(0, |e| e.depth).max(deepest(args.all())),
        };
        if below >= DEPTH {
            return Err(Fail::limit("an expression is nested too deeply").at(line));
        }
        Ok(Self {
            kind,
            line,
            depth: below + 1,
        })
    }
}

/// The target of an assignment.
#[derive(Debug)]
pub(super) enum Target {
    Name(Name),
    Attribute(Name, Arc<str>),
    Tuple(Vec<Target>),
}

/// Statements that share a scope.
#[derive(Debug, Default)]
pub(super) struct Body {
    pub nodes: Vec<Stmt>,
    /// Names that are undefined until the body sets them, whatever is set outside.
    pub unset: Vec<Name>,
}

#[derive(Debug)]
pub(super) struct Stmt {
    pub kind: StmtKind,
    pub line: u32,
}

#[derive(Debug)]
pub(super) enum StmtKind {
    Text(Arc<str>),
    Print(Expr),
    Set(Target, Expr),
    SetBlock(Target, Option<Expr>, Body),
    /// Test and statements of each branch, then the statements of `else`.
    If(Vec<(Expr, Vec<Stmt>)>, Vec<Stmt>),
    For(Arc<ForLoop>),
    With(Vec<(Target, Expr)>, Body),
    Macro(Arc<Macro>),
    /// The call, and the body as a macro `caller`.
    CallBlock(Expr, Arc<Macro>),
    FilterBlock(Expr, Body),
    /// The body is a call block of its own.
    Generation(Macro),
    Scope(Body),
    Break,
    Continue,
    /// A statement of Jinja that is refused when it is reached.
    Refused(&'static str),
}

#[derive(Debug)]
pub(super) struct ForLoop {
    pub target: Target,
    pub iter: Expr,
    pub test: Option<Expr>,
    pub recursive: bool,
    pub body: Body,
    pub otherwise: Body,
    pub has_else: bool,
    pub line: u32,
}

#[derive(Debug)]
pub(super) struct Macro {
    /// None for the body of a call block.
    pub name: Option<Name>,
    pub args: Vec<(Name, Option<Expr>)>,
    pub body: Body,
    pub uses_caller: bool,
    pub uses_kwargs: bool,
    pub uses_varargs: bool,
}
