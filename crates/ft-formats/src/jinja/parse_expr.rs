//! Tokens to expressions, weakest operator first.

use super::ast::{Binary, CallArgs, Compare, Const, Expr, ExprKind};
use super::fail::{Fail, JinjaResult};
use super::lexer::Token;
use super::parser::Parser;
use std::sync::Arc;

impl Parser {
    /// An expression, or a tuple where commas follow.
    pub(super) fn tuple(&mut self, conditions: bool, loop_head: bool) -> JinjaResult<Expr> {
        self.tuple_in(conditions, loop_head, false)
    }

    fn tuple_in(&mut self, conditions: bool, loop_head: bool, brackets: bool) -> JinjaResult<Expr> {
        let line = self.line();
        let mut items = Vec::new();
        let mut is_tuple = false;
        loop {
            let end = matches!(self.token(), Token::PrintEnd | Token::BlockEnd)
                || self.is_op(")")
                || (loop_head && self.is_word("recursive"));
            if end {
                break;
            }
            items.push(if conditions { self.expression()? } else { self.or()? });
            if !self.skip_op(",") {
                break;
            }
            is_tuple = true;
        }
        if !is_tuple {
            if let Some(one) = items.pop() {
                return Ok(one);
            }
            if !brackets {
                return self.unexpected("an expression");
            }
        }
        Expr::new(ExprKind::Tuple(items), line)
    }

    pub(super) fn expression(&mut self) -> JinjaResult<Expr> {
        self.nested(Self::condition)
    }

    fn condition(&mut self) -> JinjaResult<Expr> {
        let line = self.line();
        let mut value = self.or()?;
        while self.skip_word("if") {
            let test = self.or()?;
            let otherwise = if self.skip_word("else") {
                Some(Box::new(self.nested(Self::condition)?))
            } else {
                None
            };
            value = Expr::new(ExprKind::Cond(Box::new(test), Box::new(value), otherwise), line)?;
        }
        Ok(value)
    }

    fn or(&mut self) -> JinjaResult<Expr> {
        let line = self.line();
        let mut left = self.and()?;
        while self.skip_word("or") {
            left = Expr::new(ExprKind::Or(Box::new(left), Box::new(self.and()?)), line)?;
        }
        Ok(left)
    }

    fn and(&mut self) -> JinjaResult<Expr> {
        let line = self.line();
        let mut left = self.not()?;
        while self.skip_word("and") {
            left = Expr::new(ExprKind::And(Box::new(left), Box::new(self.not()?)), line)?;
        }
        Ok(left)
    }

    fn not(&mut self) -> JinjaResult<Expr> {
        let line = self.line();
        if self.skip_word("not") {
            Expr::new(ExprKind::Not(Box::new(self.nested(Self::not)?)), line)
        } else {
            self.compare()
        }
    }

    fn compare(&mut self) -> JinjaResult<Expr> {
        let line = self.line();
        let first = self.sum()?;
        let mut rest = Vec::new();
        loop {
            let next_in = matches!(self.next_token(), Token::Name(n) if &**n == "in");
            let op = match self.token() {
                Token::Op("==") => Compare::Eq,
                Token::Op("!=") => Compare::Ne,
                Token::Op("<") => Compare::Lt,
                Token::Op("<=") => Compare::Le,
                Token::Op(">") => Compare::Gt,
                Token::Op(">=") => Compare::Ge,
                Token::Name(n) if &**n == "in" => Compare::In,
                Token::Name(n) if &**n == "not" && next_in => Compare::NotIn,
                _ => break,
            };
            self.step();
            if op == Compare::NotIn {
                self.step();
            }
            rest.push((op, self.sum()?));
        }
        if rest.is_empty() {
            Ok(first)
        } else {
            Expr::new(ExprKind::Compare(Box::new(first), rest), line)
        }
    }

    fn sum(&mut self) -> JinjaResult<Expr> {
        let line = self.line();
        let mut left = self.concat()?;
        loop {
            let op = match self.token() {
                Token::Op("+") => Binary::Add,
                Token::Op("-") => Binary::Sub,
                _ => return Ok(left),
            };
            self.step();
            left = binary(op, left, self.concat()?, line)?;
        }
    }

    fn concat(&mut self) -> JinjaResult<Expr> {
        let line = self.line();
        let first = self.product()?;
        if !self.is_op("~") {
            return Ok(first);
        }
        let mut all = vec![first];
        while self.skip_op("~") {
            all.push(self.product()?);
        }
        Expr::new(ExprKind::Concat(all), line)
    }

    fn product(&mut self) -> JinjaResult<Expr> {
        let line = self.line();
        let mut left = self.power()?;
        loop {
            let op = match self.token() {
                Token::Op("*") => Binary::Mul,
                Token::Op("/") => Binary::Div,
                Token::Op("//") => Binary::FloorDiv,
                Token::Op("%") => Binary::Mod,
                _ => return Ok(left),
            };
            self.step();
            left = binary(op, left, self.power()?, line)?;
        }
    }

    fn power(&mut self) -> JinjaResult<Expr> {
        let line = self.line();
        let mut left = self.unary(true)?;
        while self.skip_op("**") {
            left = binary(Binary::Pow, left, self.unary(true)?, line)?;
        }
        Ok(left)
    }

    fn unary(&mut self, with_filters: bool) -> JinjaResult<Expr> {
        let line = self.line();
        let node = if self.skip_op("-") {
            Expr::new(ExprKind::Neg(Box::new(self.nested(|p| p.unary(false))?)), line)?
        } else if self.skip_op("+") {
            Expr::new(ExprKind::Pos(Box::new(self.nested(|p| p.unary(false))?)), line)?
        } else {
            self.primary()?
        };
        let node = self.postfix(node)?;
        if with_filters { self.filtered(node) } else { Ok(node) }
    }

    fn primary(&mut self) -> JinjaResult<Expr> {
        let line = self.line();
        let kind = match self.token().clone() {
            Token::Name(name) => {
                self.step();
                match &*name {
                    "true" | "True" => ExprKind::Const(Const::Bool(true)),
                    "false" | "False" => ExprKind::Const(Const::Bool(false)),
                    "none" | "None" => ExprKind::Const(Const::None),
                    _ => {
                        let id = self.intern(&name);
                        self.uses.push((id, true));
                        ExprKind::Name(id)
                    }
                }
            }
            Token::Str(mut text) => {
                self.step();
                while let Token::Str(more) = self.token() {
                    text.push_str(more);
                    self.step();
                }
                ExprKind::Const(Const::Str(text.into()))
            }
            Token::Int(value) => {
                self.step();
                ExprKind::Const(Const::Int(value))
            }
            Token::Float(value) => {
                self.step();
                ExprKind::Const(Const::Float(value))
            }
            Token::Op("(") => {
                self.step();
                let inner = self.nested(|p| p.tuple_in(true, false, true))?;
                self.expect_op(")")?;
                return Ok(inner);
            }
            Token::Op("[") => {
                self.step();
                let items = self.nested(|p| p.items("]"))?;
                ExprKind::List(items)
            }
            Token::Op("{") => {
                self.step();
                let mut pairs = Vec::new();
                while !self.is_op("}") {
                    if !pairs.is_empty() {
                        self.expect_op(",")?;
                        if self.is_op("}") {
                            break;
                        }
                    }
                    let key = self.expression()?;
                    self.expect_op(":")?;
                    pairs.push((key, self.expression()?));
                }
                self.expect_op("}")?;
                ExprKind::Dict(pairs)
            }
            other => return Err(Fail::syntax(format!("unexpected {}", other.describe())).at(line)),
        };
        Expr::new(kind, line)
    }

    /// Expressions with commas up to `end`.
    fn items(&mut self, end: &str) -> JinjaResult<Vec<Expr>> {
        let mut items = Vec::new();
        while !self.is_op(end) {
            if !items.is_empty() {
                self.expect_op(",")?;
                if self.is_op(end) {
                    break;
                }
            }
            items.push(self.expression()?);
        }
        self.expect_op(end)?;
        Ok(items)
    }

    fn postfix(&mut self, mut node: Expr) -> JinjaResult<Expr> {
        loop {
            node = match self.token() {
                Token::Op(".") => self.attribute(node)?,
                Token::Op("[") => self.subscript(node)?,
                Token::Op("(") => self.call(node)?,
                _ => return Ok(node),
            };
        }
    }

    fn filtered(&mut self, mut node: Expr) -> JinjaResult<Expr> {
        loop {
            if self.is_op("|") {
                match self.filters(Some(Box::new(node)), false)? {
                    Some(filtered) => node = filtered,
                    None => return self.unexpected("a filter"),
                }
            } else if self.is_word("is") {
                node = self.test(node)?;
            } else if self.is_op("(") {
                node = self.call(node)?;
            } else {
                return Ok(node);
            }
        }
    }

    fn attribute(&mut self, node: Expr) -> JinjaResult<Expr> {
        let line = self.line();
        self.step();
        match self.step() {
            Token::Name(name) => Expr::new(ExprKind::Attribute(Box::new(node), name), line),
            Token::Int(index) => {
                let index = Expr::new(ExprKind::Const(Const::Int(index)), line)?;
                Expr::new(ExprKind::Item(Box::new(node), Box::new(index)), line)
            }
            other => Err(Fail::syntax(format!("expected name or number, got {}", other.describe())).at(line)),
        }
    }

    fn subscript(&mut self, node: Expr) -> JinjaResult<Expr> {
        let line = self.line();
        self.step();
        let mut parts: [Option<Expr>; 3] = [None, None, None];
        let mut colons = 0;
        let mut items = Vec::new();
        let mut is_tuple = false;
        self.nested(|p| {
            while !p.is_op("]") {
                if p.skip_op(":") {
                    colons += 1;
                    if colons > 2 {
                        return p.unexpected("']'");
                    }
                } else if p.skip_op(",") {
                    is_tuple = true;
                } else {
                    let value = p.expression()?;
                    if p.is_op(":") || colons > 0 {
                        if parts[colons].is_some() {
                            return p.unexpected("']'");
                        }
                        parts[colons] = Some(value);
                    } else {
                        items.push(value);
                        if !p.is_op("]") && !p.is_op(",") {
                            return p.unexpected("']'");
                        }
                    }
                }
                if colons > 0 && is_tuple {
                    return Err(Fail::unsupported("a slice with several dimensions").at(line));
                }
            }
            Ok(())
        })?;
        self.expect_op("]")?;
        if colons > 0 {
            return Expr::new(ExprKind::Slice(Box::new(node), Box::new(parts)), line);
        }
        let item = match (is_tuple, items.len()) {
            (false, 1) => Box::new(items.remove(0)),
            _ => Box::new(Expr::new(ExprKind::Tuple(items), line)?),
        };
        Expr::new(ExprKind::Item(Box::new(node), item), line)
    }

    fn call(&mut self, node: Expr) -> JinjaResult<Expr> {
        let line = self.line();
        let args = self.arguments()?;
        Expr::new(ExprKind::Call(Box::new(node), Box::new(args)), line)
    }

    fn arguments(&mut self) -> JinjaResult<CallArgs> {
        let line = self.line();
        self.expect_op("(")?;
        let wrong = || Fail::syntax("invalid syntax for function call expression").at(line);
        let mut args = CallArgs::default();
        let mut first = true;
        while !self.is_op(")") {
            if !first {
                self.expect_op(",")?;
                if self.is_op(")") {
                    break;
                }
            }
            first = false;
            if self.skip_op("*") {
                if args.more.is_some() || args.more_named.is_some() {
                    return Err(wrong());
                }
                args.more = Some(self.expression()?);
            } else if self.skip_op("**") {
                if args.more_named.is_some() {
                    return Err(wrong());
                }
                args.more_named = Some(self.expression()?);
            } else if matches!(self.token(), Token::Name(_)) && *self.next_token() == Token::Op("=") {
                let name: Arc<str> = self.expect_name()?;
                self.step();
                if args.more_named.is_some() {
                    return Err(wrong());
                }
                if args.named.iter().any(|(n, _)| *n == name) {
                    return Err(Fail::syntax(format!("keyword argument repeated: {name}")).at(line));
                }
                args.named.push((name, self.expression()?));
            } else {
                if args.more.is_some() || args.more_named.is_some() || !args.named.is_empty() {
                    return Err(wrong());
                }
                args.positional.push(self.expression()?);
            }
        }
        self.expect_op(")")?;
        Ok(args)
    }

    /// Filters behind `|`; the first one without it if `inline`.
    pub(super) fn filters(&mut self, mut node: Option<Box<Expr>>, mut inline: bool) -> JinjaResult<Option<Expr>> {
        let mut last = None;
        while inline || self.is_op("|") {
            if !inline {
                self.step();
            }
            inline = false;
            let line = self.line();
            let name = self.dotted_name()?;
            let args = if self.is_op("(") {
                self.arguments()?
            } else {
                CallArgs::default()
            };
            let value = match last.take() {
                Some(expr) => Some(Box::new(expr)),
                None => node.take(),
            };
            last = Some(Expr::new(ExprKind::Filter(value, name, Box::new(args)), line)?);
        }
        Ok(last)
    }

    fn dotted_name(&mut self) -> JinjaResult<Arc<str>> {
        let mut name = self.expect_name()?;
        while self.skip_op(".") {
            name = format!("{name}.{}", self.expect_name()?).into();
        }
        Ok(name)
    }

    fn test(&mut self, node: Expr) -> JinjaResult<Expr> {
        self.step();
        let line = self.line();
        let negated = self.skip_word("not");
        let name = self.dotted_name()?;
        let mut args = CallArgs::default();
        let word = match self.token() {
            Token::Name(word) => Some(word.clone()),
            _ => None,
        };
        if self.is_op("(") {
            args = self.arguments()?;
        } else if word.as_ref().is_some_and(|w| &**w == "is") {
            return Err(Fail::syntax("You cannot chain multiple tests with is").at(line));
        } else if word.is_some_and(|w| !["else", "or", "and"].contains(&&*w))
            || matches!(self.token(), Token::Str(_) | Token::Int(_) | Token::Float(_))
            || self.is_op("[")
            || self.is_op("{")
        {
            let value = self.nested(Self::primary)?;
            args.positional.push(self.postfix(value)?);
        }
        let test = Expr::new(ExprKind::Test(Box::new(node), name, Box::new(args)), line)?;
        if negated {
            Expr::new(ExprKind::Not(Box::new(test)), line)
        } else {
            Ok(test)
        }
    }
}

fn binary(op: Binary, left: Expr, right: Expr, line: u32) -> JinjaResult<Expr> {
    Expr::new(ExprKind::Binary(op, Box::new(left), Box::new(right)), line)
}
