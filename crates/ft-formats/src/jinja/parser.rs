//! Tokens to statements. Expressions are in `parse_expr`.

use super::ast::{Body, Expr, ExprKind, ForLoop, Macro, Name, Stmt, StmtKind, Target};
use super::fail::{Fail, JinjaResult, begin, charge};
use super::lexer::{self, Token};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Deepest nesting of blocks; CPython allows 20 loops in each other.
const BLOCKS: usize = 60;
/// Deepest nesting of brackets.
const BRACKETS: usize = 60;

/// A parsed template.
#[derive(Debug)]
pub(super) struct Tree {
    pub body: Body,
    pub names: Vec<Arc<str>>,
    /// Names that it reads.
    pub reads: HashSet<Name>,
    /// It has `{% generation %}`.
    pub marks_generation: bool,
}

impl Tree {
    /// The number of a name, if the template has it.
    pub(super) fn word(&self, word: &str) -> JinjaResult<Option<Name>> {
        charge(self.names.len())?;
        let at = self.names.iter().position(|n| **n == *word);
        Ok(at.map(|n| n as Name))
    }
}

pub(super) struct Parser {
    tokens: Vec<(Token, u32)>,
    at: usize,
    names: Vec<Arc<str>>,
    by_name: HashMap<Arc<str>, Name>,
    /// Names in the order in which they are read (true) or written.
    pub(super) uses: Vec<(Name, bool)>,
    brackets: usize,
    blocks: usize,
    loops: usize,
    /// `for` statements around, also those outside of a macro.
    fors: usize,
    marks_generation: bool,
}

pub(super) fn parse(source: &str) -> JinjaResult<Tree> {
    begin(source.len());
    let mut parser = Parser {
        tokens: lexer::tokens(source)?,
        at: 0,
        names: Vec::new(),
        by_name: HashMap::new(),
        uses: Vec::new(),
        brackets: 0,
        blocks: 0,
        loops: 0,
        fors: 0,
        marks_generation: false,
    };
    let line = |p: &Parser| p.line();
    let nodes = parser.statements(&[]);
    let nodes = nodes.map_err(|e| e.at(line(&parser)))?;
    let mut body = Body {
        nodes,
        unset: Vec::new(),
    };
    super::scopes::resolve(&mut body)?;
    Ok(Tree {
        body,
        reads: parser
            .uses
            .iter()
            .filter(|(_, read)| *read)
            .map(|(name, _)| *name)
            .collect(),
        names: parser.names,
        marks_generation: parser.marks_generation,
    })
}

impl Parser {
    pub(super) fn token(&self) -> &Token {
        // The last token is `End`, and nothing goes past it.
        self.tokens.get(self.at).map_or(&Token::End, |(t, _)| t)
    }

    pub(super) fn next_token(&self) -> &Token {
        self.tokens.get(self.at + 1).map_or(&Token::End, |(t, _)| t)
    }

    pub(super) fn line(&self) -> u32 {
        let at = self.at.min(self.tokens.len().saturating_sub(1));
        self.tokens.get(at).map_or(1, |(_, line)| *line)
    }

    pub(super) fn step(&mut self) -> Token {
        let token = self.token().clone();
        self.at = (self.at + 1).min(self.tokens.len());
        token
    }

    pub(super) fn is_op(&self, op: &str) -> bool {
        matches!(self.token(), Token::Op(o) if *o == op)
    }

    pub(super) fn is_word(&self, word: &str) -> bool {
        matches!(self.token(), Token::Name(n) if **n == *word)
    }

    pub(super) fn skip_op(&mut self, op: &str) -> bool {
        let found = self.is_op(op);
        if found {
            self.at += 1;
        }
        found
    }

    pub(super) fn skip_word(&mut self, word: &str) -> bool {
        let found = self.is_word(word);
        if found {
            self.at += 1;
        }
        found
    }

    pub(super) fn unexpected<T>(&self, expected: &str) -> JinjaResult<T> {
        Err(Fail::syntax(format!("expected {expected}, got {}", self.token().describe())).at(self.line()))
    }

    pub(super) fn expect_op(&mut self, op: &str) -> JinjaResult<()> {
        if self.skip_op(op) {
            Ok(())
        } else {
            self.unexpected(&format!("'{op}'"))
        }
    }

    pub(super) fn expect_word(&mut self, word: &str) -> JinjaResult<()> {
        if self.skip_word(word) {
            Ok(())
        } else {
            self.unexpected(&format!("'{word}'"))
        }
    }

    pub(super) fn expect_name(&mut self) -> JinjaResult<Arc<str>> {
        match self.token() {
            Token::Name(name) => {
                let name = name.clone();
                self.at += 1;
                Ok(name)
            }
            _ => self.unexpected("a name"),
        }
    }

    fn expect_block_end(&mut self) -> JinjaResult<()> {
        match self.token() {
            Token::BlockEnd => {
                self.at += 1;
                Ok(())
            }
            _ => self.unexpected("end of statement block"),
        }
    }

    pub(super) fn intern(&mut self, name: &Arc<str>) -> Name {
        if let Some(id) = self.by_name.get(name) {
            return *id;
        }
        let id = self.names.len() as Name;
        self.names.push(name.clone());
        self.by_name.insert(name.clone(), id);
        id
    }

    /// A bracket is entered, or left. Errors: too deep.
    pub(super) fn nested<T>(&mut self, inner: impl FnOnce(&mut Self) -> JinjaResult<T>) -> JinjaResult<T> {
        self.brackets += 1;
        if self.brackets > BRACKETS {
            return Err(Fail::limit("an expression is nested too deeply").at(self.line()));
        }
        let out = inner(self);
        self.brackets -= 1;
        out
    }

    /// Statements up to a tag of `ends`, which stays.
    fn statements(&mut self, ends: &[&str]) -> JinjaResult<Vec<Stmt>> {
        let mut out = Vec::new();
        loop {
            let line = self.line();
            match self.token() {
                Token::Data(text) => {
                    let text = text.clone();
                    self.at += 1;
                    out.push(Stmt {
                        kind: StmtKind::Text(text),
                        line,
                    });
                }
                Token::PrintBegin => {
                    self.at += 1;
                    let value = self.tuple(true, false)?;
                    if *self.token() != Token::PrintEnd {
                        return self.unexpected("end of print statement");
                    }
                    self.at += 1;
                    out.push(Stmt {
                        kind: StmtKind::Print(value),
                        line,
                    });
                }
                Token::BlockBegin => {
                    if ends
                        .iter()
                        .any(|end| matches!(self.next_token(), Token::Name(n) if **n == **end))
                    {
                        self.at += 1;
                        return Ok(out);
                    }
                    self.at += 1;
                    let kind = self.statement(ends)?;
                    out.push(Stmt { kind, line });
                    self.expect_block_end()?;
                }
                Token::End if ends.is_empty() => return Ok(out),
                Token::End => {
                    return Err(Fail::syntax(format!(
                        "Unexpected end of template. Jinja was looking for the following tags: {}",
                        ends.iter().map(|e| format!("'{e}'")).collect::<Vec<_>>().join(" or ")
                    ))
                    .at(line));
                }
                _ => return self.unexpected("text or a tag"),
            }
        }
    }

    /// The end of the opening tag, and the statements up to a tag of `ends`, whose name stays.
    fn block(&mut self, ends: &[&str]) -> JinjaResult<Vec<Stmt>> {
        self.skip_op(":");
        self.expect_block_end()?;
        self.blocks += 1;
        if self.blocks > BLOCKS {
            return Err(Fail::limit("blocks are nested too deeply").at(self.line()));
        }
        let out = self.statements(ends);
        self.blocks -= 1;
        out
    }

    fn body(&mut self, end: &str) -> JinjaResult<Body> {
        let nodes = self.block(&[end])?;
        self.at += 1;
        Ok(Body {
            nodes,
            unset: Vec::new(),
        })
    }

    fn statement(&mut self, ends: &[&str]) -> JinjaResult<StmtKind> {
        let line = self.line();
        let tag = self.expect_name()?;
        Ok(match &*tag {
            "set" => return self.set(),
            "if" => return self.branches(),
            "for" => return self.loop_over(line),
            "with" => {
                let mut values = Vec::new();
                while *self.token() != Token::BlockEnd && !self.is_op(":") {
                    if !values.is_empty() {
                        self.expect_op(",")?;
                    }
                    let target = self.target(false)?;
                    self.expect_op("=")?;
                    values.push((target, self.expression()?));
                }
                StmtKind::With(values, self.body("endwith")?)
            }
            "macro" => {
                let name = self.expect_name()?;
                let name = self.write(&name)?;
                StmtKind::Macro(Arc::new(self.callable(Some(name), "endmacro")?))
            }
            "call" => return self.call_block(),
            "filter" => {
                let filter = self.filters(None, true)?;
                let Some(filter) = filter else {
                    return self.unexpected("a filter");
                };
                StmtKind::FilterBlock(filter, self.body("endfilter")?)
            }
            "generation" => {
                self.marks_generation = true;
                StmtKind::Generation(self.callable_body(None, Vec::new(), "endgeneration")?)
            }
            "print" => {
                let mut all = vec![self.expression()?];
                while self.skip_op(",") {
                    all.push(self.expression()?);
                }
                StmtKind::Print(super::ast::Expr::new(ExprKind::Concat(all), line)?)
            }
            "break" | "continue" => {
                if self.loops == 0 {
                    return Err(Fail::syntax(format!("'{tag}' outside of a loop")).at(line));
                }
                match &*tag {
                    "break" => StmtKind::Break,
                    _ => StmtKind::Continue,
                }
            }
            "autoescape" => {
                let value = self.expression()?;
                if !matches!(value.kind, ExprKind::Const(super::ast::Const::Bool(false))) {
                    return Err(Fail::unsupported("`{% autoescape %}` with a value other than false").at(line));
                }
                StmtKind::Scope(self.body("endautoescape")?)
            }
            "block" => {
                self.expect_name()?;
                while matches!(self.token(), Token::Name(_)) {
                    self.at += 1;
                }
                self.block(&["endblock"])?;
                self.at += 1;
                if matches!(self.token(), Token::Name(_)) {
                    self.at += 1;
                }
                StmtKind::Refused("`{% block %}`")
            }
            "include" | "import" | "from" | "extends" => {
                while !matches!(self.token(), Token::BlockEnd | Token::End) {
                    self.at += 1;
                }
                StmtKind::Refused(match &*tag {
                    "include" => "`{% include %}`: there are no other templates",
                    "extends" => "`{% extends %}`: there are no other templates",
                    _ => "`{% import %}`: there are no other templates",
                })
            }
            other => {
                let mut text = format!("Encountered unknown tag '{other}'.");
                if let Some(end) = ends.first() {
                    text.push_str(&format!(" Jinja was looking for the tag '{end}'."));
                }
                return Err(Fail::syntax(text).at(line));
            }
        })
    }

    /// A name that is written to.
    pub(super) fn write(&mut self, name: &Arc<str>) -> JinjaResult<Name> {
        if ["true", "false", "none", "True", "False", "None"].contains(&&**name) {
            return Err(Fail::syntax(format!("can't assign to '{name}'")).at(self.line()));
        }
        let id = self.intern(name);
        self.uses.push((id, false));
        Ok(id)
    }

    /// `a`, `a.b` with `attributes`, or several with commas between them.
    fn target(&mut self, attributes: bool) -> JinjaResult<Target> {
        self.targets(attributes, false)
    }

    fn targets(&mut self, attributes: bool, in_brackets: bool) -> JinjaResult<Target> {
        let mut list = Vec::new();
        let mut is_tuple = false;
        loop {
            // A comma may end the list only here: `a, =` is an error.
            if *self.token() == Token::BlockEnd || self.is_op(")") {
                break;
            }
            list.push(self.one_target(attributes)?);
            if !self.skip_op(",") {
                break;
            }
            is_tuple = true;
        }
        match (is_tuple, list.pop()) {
            (false, Some(one)) => Ok(one),
            (true, Some(last)) => {
                list.push(last);
                Ok(Target::Tuple(list))
            }
            (_, None) if in_brackets => Ok(Target::Tuple(list)),
            (_, None) => self.unexpected("a name to assign to"),
        }
    }

    fn one_target(&mut self, attributes: bool) -> JinjaResult<Target> {
        if self.skip_op("(") {
            let inner = self.nested(|p| p.targets(false, true))?;
            self.expect_op(")")?;
            return Ok(inner);
        }
        let name = self.expect_name()?;
        if attributes && self.skip_op(".") {
            let attribute = self.expect_name()?;
            let id = self.intern(&name);
            self.uses.push((id, true));
            return Ok(Target::Attribute(id, attribute));
        }
        Ok(Target::Name(self.write(&name)?))
    }

    /// Errors: the target has the name `loop`, which a `for` statement gives a value.
    fn check_not_loop(&self, target: &Target, line: u32) -> JinjaResult<()> {
        let is_loop = |n: &Name| self.names.get(*n as usize).is_some_and(|name| &**name == "loop");
        if target_names(target).iter().any(is_loop) {
            Err(Fail::syntax("Can't assign to special loop variable in for-loop target").at(line))
        } else {
            Ok(())
        }
    }

    fn set(&mut self) -> JinjaResult<StmtKind> {
        let line = self.line();
        let target = self.target(true)?;
        if self.fors > 0 {
            self.check_not_loop(&target, line)?;
        }
        if self.skip_op("=") {
            return Ok(StmtKind::Set(target, self.tuple(true, false)?));
        }
        let filter = self.filters(None, false)?;
        let body = self.body("endset")?;
        Ok(StmtKind::SetBlock(target, filter, body))
    }

    fn branches(&mut self) -> JinjaResult<StmtKind> {
        let mut branches = Vec::new();
        loop {
            let test = self.tuple(false, false)?;
            let body = self.block(&["elif", "else", "endif"])?;
            branches.push((test, body));
            let tag = self.expect_name()?;
            match &*tag {
                "elif" => continue,
                "else" => {
                    let body = self.block(&["endif"])?;
                    self.at += 1;
                    return Ok(StmtKind::If(branches, body));
                }
                _ => return Ok(StmtKind::If(branches, Vec::new())),
            }
        }
    }

    fn loop_over(&mut self, line: u32) -> JinjaResult<StmtKind> {
        let target = self.target(false)?;
        self.check_not_loop(&target, line)?;
        self.expect_word("in")?;
        let iter = self.tuple(false, true)?;
        let test = if self.skip_word("if") {
            Some(self.expression()?)
        } else {
            None
        };
        let recursive = self.skip_word("recursive");
        self.fors += 1;
        self.loops += 1;
        let nodes = self.block(&["endfor", "else"])?;
        self.loops -= 1;
        let has_else = &*self.expect_name()? == "else";
        let otherwise = if has_else {
            // A recursive loop is a function: its `else` cannot leave a loop outside.
            let loops = self.loops;
            if recursive {
                self.loops = 0;
            }
            let otherwise = self.body("endfor")?;
            self.loops = loops;
            otherwise
        } else {
            Body::default()
        };
        self.fors -= 1;
        Ok(StmtKind::For(Arc::new(ForLoop {
            target,
            iter,
            test,
            recursive,
            body: Body {
                nodes,
                unset: Vec::new(),
            },
            otherwise,
            has_else,
            line,
        })))
    }

    fn call_block(&mut self) -> JinjaResult<StmtKind> {
        // The signature comes before the call, the body after it.
        let args = if self.is_op("(") { self.signature()? } else { Vec::new() };
        let line = self.line();
        let call = self.expression()?;
        if !matches!(call.kind, ExprKind::Call(..)) {
            return Err(Fail::syntax("expected call").at(line));
        }
        let body = self.callable_body(None, args, "endcall")?;
        Ok(StmtKind::CallBlock(call, Arc::new(body)))
    }

    fn signature(&mut self) -> JinjaResult<Vec<(Name, Option<Expr>)>> {
        self.expect_op("(")?;
        let mut args: Vec<(Name, Option<Expr>)> = Vec::new();
        while !self.is_op(")") {
            if !args.is_empty() {
                self.expect_op(",")?;
            }
            let name = self.expect_name()?;
            let id = self.write(&name)?;
            let default = if self.skip_op("=") {
                Some(self.expression()?)
            } else if args.last().is_some_and(|(_, d)| d.is_some()) {
                return Err(Fail::syntax("non-default argument follows default argument").at(self.line()));
            } else {
                None
            };
            args.push((id, default));
        }
        self.expect_op(")")?;
        Ok(args)
    }

    fn callable(&mut self, name: Option<Name>, end: &str) -> JinjaResult<Macro> {
        let args = self.signature()?;
        self.callable_body(name, args, end)
    }

    fn callable_body(&mut self, name: Option<Name>, args: Vec<(Name, Option<Expr>)>, end: &str) -> JinjaResult<Macro> {
        let line = self.line();
        let before = self.uses.len();
        // A loop outside cannot be left from inside.
        let loops = std::mem::take(&mut self.loops);
        let body = self.body(end)?;
        self.loops = loops;
        // Whether the body reads the word, and the default of a parameter of this name.
        let mut word = |word: &str| {
            let id = self.intern(&word.into());
            let own = args
                .iter()
                .find(|(n, _)| *n == id)
                .map(|(_, default)| default.is_some());
            let first = self.uses[before..].iter().find(|(n, _)| *n == id);
            (first.is_some_and(|(_, read)| *read), own)
        };
        let (uses_caller, own_caller) = word("caller");
        let (kwargs, varargs) = (word("kwargs"), word("varargs"));
        if uses_caller && own_caller == Some(false) {
            return Err(Fail::syntax(
                "When defining macros or call blocks the special \"caller\" argument must be omitted or be given a \
                 default.",
            )
            .at(line));
        }
        Ok(Macro {
            uses_caller,
            uses_kwargs: kwargs == (true, None),
            uses_varargs: varargs == (true, None),
            name,
            args,
            body,
        })
    }
}

pub(super) fn target_names(target: &Target) -> Vec<Name> {
    match target {
        Target::Name(name) => vec![*name],
        Target::Attribute(..) => Vec::new(),
        Target::Tuple(list) => list.iter().flat_map(target_names).collect(),
    }
}
