//! An interpreter of Jinja templates: what jinja2 prints in the sandbox of transformers, or an error.
//!
//! A template is a stranger's program. It sees the values that it is given and nothing else. Its work, texts, lists,
//! nesting and stack are accounted for and limited (`fail`); the same template fails at the same place on every machine.
//! Values are Python's: numbers, text, lists and dicts print, compare and convert as there. Anything that is not the same is an
//! error that says so (`FailKind::Unsupported`), never another text.

mod args;
mod ast;
mod attributes;
mod eval;
mod fail;
mod filters;
mod format;
mod from_json;
mod functions;
mod interp;
mod lexer;
mod loops;
mod methods;
mod ops;
mod parse_expr;
mod parser;
mod percent;
mod predicates;
mod print;
mod scopes;
mod sequences;
mod text;
#[rustfmt::skip]
mod unicode;
mod value;

pub(crate) use fail::{Fail, FailKind, LONGEST};
pub(crate) use functions::GLOBALS;

#[cfg(test)]
mod tests;

use interp::{Interp, Output};
use serde_json::Value as Json;
use std::ops::Range;
use value::Value;

/// A rendered text, and what `{% generation %}` blocks printed of it, in bytes.
pub(crate) type Text = (String, Vec<Range<usize>>);

/// A parsed template.
#[derive(Debug)]
pub(crate) struct Template {
    tree: parser::Tree,
}

impl Template {
    /// Errors: the text is not a template, or is nested too deeply.
    pub(crate) fn parse(source: &str) -> Result<Self, Fail> {
        parser::parse(source).map(|tree| Self { tree })
    }

    pub(crate) fn marks_generation(&self) -> bool {
        self.tree.marks_generation
    }

    /// True if the template reads a variable of this name.
    pub(crate) fn reads(&self, name: &str) -> bool {
        let at = self.tree.names.iter().position(|n| **n == *name);
        at.is_some_and(|at| self.tree.reads.contains(&(at as ast::Name)))
    }

    /// The text of each rendering: the number of messages it contains, and whether a generation prompt follows.
    /// `variables` are those of every rendering.
    ///
    /// Errors, one by one: the template fails, runs into a limit, or needs what ft has not.
    pub(crate) fn render(
        &self,
        variables: &[(&str, &Json)],
        messages: &[Json],
        renderings: &[(usize, bool)],
    ) -> Vec<Result<Text, Fail>> {
        let input = size(messages.iter()) + size(variables.iter().map(|(_, v)| *v));
        fail::begin(input);
        let given = || -> Result<_, Fail> {
            let mut all = Vec::with_capacity(variables.len() + 2);
            for (name, json) in variables {
                all.push((*name, from_json::from_json(json)?));
            }
            let messages = messages
                .iter()
                .map(from_json::from_json)
                .collect::<Result<Vec<Value>, Fail>>()?;
            Ok((all, messages))
        };
        let (mut all, messages) = match given() {
            Ok(given) => given,
            Err(fail) => return renderings.iter().map(|_| Err(fail.clone())).collect(),
        };
        let shared = all.len();
        let mut one = |(upto, prompt): &(usize, bool)| {
            fail::begin(input);
            all.truncate(shared);
            let beginning = messages.get(..*upto).unwrap_or(&messages);
            all.push(("messages", Value::list(beginning.to_vec())?));
            all.push(("add_generation_prompt", Value::Bool(*prompt)));
            let out = Interp::render(&self.tree, &all, input, None)?;
            if out.is_captured {
                self.marked(&all, input, out)
            } else {
                Ok((out.text, out.generation))
            }
        };
        renderings.iter().map(&mut one).collect()
    }

    /// A `{% generation %}` block inside a macro does not know at which offset its text ends up. So the template is
    /// rendered again with marker characters around the blocks. If the text without the markers differs from the first
    /// text, the text is returned without ranges.
    fn marked(&self, variables: &[(&str, Value)], input: usize, plain: Output) -> Result<Text, Fail> {
        // Unicode noncharacters: the first two that the text does not contain.
        let free: Vec<char> = ('\u{fdd0}'..='\u{fdef}')
            .filter(|c| !plain.text.contains(*c))
            .take(2)
            .collect();
        let lost = (plain.text, Vec::new());
        let [start, end] = free[..] else { return Ok(lost) };
        let Ok(out) = Interp::render(&self.tree, variables, input, Some([start, end])) else {
            return Ok(lost);
        };
        let (mut text, mut open, mut found) = (String::with_capacity(lost.0.len()), Vec::new(), Vec::new());
        for c in out.text.chars() {
            if c == start {
                open.push(text.len());
            } else if c == end {
                match open.pop() {
                    Some(start) => found.push(start..text.len()),
                    None => return Ok(lost),
                }
            } else {
                text.push(c);
            }
        }
        if !open.is_empty() || text != lost.0 {
            return Ok(lost);
        }
        found.sort_by_key(|r| (r.start, r.end));
        Ok((text, found))
    }
}

/// Bytes of the texts in values, and some for each element.
fn size<'a>(values: impl Iterator<Item = &'a Json>) -> usize {
    values
        .map(|value| match value {
            Json::String(s) => s.len() + 16,
            Json::Array(list) => 16 + size(list.iter()),
            Json::Object(map) => 16 + map.keys().map(String::len).sum::<usize>() + size(map.values()),
            _ => 16,
        })
        .sum()
}
