//! Which bytes of a rendered conversation an assistant turn wrote.
//!
//! A template is a program; it may strip the thinking of earlier turns, add a default system prompt, have no
//! generation prompt, or refuse part of a conversation. So two ways are tried for each turn i:
//!
//! 1. Prefixes. P renders the messages before i with a generation prompt, F the messages up to and with i.
//!    Where both begin the full text, the turn is what F has more than P.
//! 2. A probe. The conversation is rendered with other words in message i; the texts part where its content
//!    begins and meet again where it ends. What follows the content inside the turn is learned from F.

use crate::base::{Error, Result};
use crate::data::chat;
use crate::data::codec::ChatRender;
use serde_json::Value;
use std::ops::Range;

/// Words that no row holds; two of them, so that one differs from the content in its first and last character.
const PROBES: [&str; 2] = ["Zq7probe4xW", "9Kv probe Yj3"];

/// The full text of a conversation and the byte range of each wanted assistant turn in it.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::data) struct Rendered {
    pub text: String,
    /// Turn by turn: from after the generation prompt to the end of the turn. White space after the turn's
    /// end token is still inside; the caller cuts at the token.
    pub turns: Vec<Range<usize>>,
}

/// Renders once and finds the turns of `wanted` (indices of assistant messages, ascending).
///
/// Errors: the template refuses the conversation, or a turn cannot be found in its text.
pub(in crate::data) fn render(
    template: &dyn ChatRender,
    messages: &[Value],
    tools: Option<&Value>,
    wanted: &[usize],
) -> Result<Rendered> {
    let text = template.render(messages, tools, false)?;
    let mut turns = Vec::with_capacity(wanted.len());
    for &i in wanted {
        let finder = Finder {
            template,
            messages,
            tools,
            text: &text,
            i,
        };
        let turn = finder.find();
        // Turns stand one after the other; anything else means that the template was misread.
        let after = turns.last().map_or(0, |t: &Range<usize>| t.end);
        match turn {
            Some(turn) if turn.start >= after && !text[turn.clone()].is_empty() => turns.push(turn),
            _ => {
                return Err(Error::new(format!(
                    "cannot tell which part of the chat template's text is assistant message {}",
                    i + 1
                ))
                .hint("set `data.train_on = \"all\"`, or `data.chat_template` to a template that prints each message in place"));
            }
        }
    }
    Ok(Rendered { text, turns })
}

struct Finder<'a> {
    template: &'a dyn ChatRender,
    messages: &'a [Value],
    tools: Option<&'a Value>,
    text: &'a str,
    i: usize,
}

impl Finder<'_> {
    fn find(&self) -> Option<Range<usize>> {
        let before = &self.messages[..self.i];
        // A template may refuse a history that ends here: then only the probe is left.
        let prompt = self.template.render(before, self.tools, true).ok();
        let turn = self.template.render(&self.messages[..=self.i], self.tools, false).ok();
        let prompt_start = prompt
            .as_ref()
            .filter(|p| self.text.starts_with(p.as_str()))
            .map(String::len);
        // Without a generation prompt the prefix ends before the turn's header, which is not the assistant's.
        let has_generation_prompt = prompt.is_some() && prompt != self.template.render(before, self.tools, false).ok();
        let prefix_end = turn
            .as_ref()
            .filter(|f| self.text.starts_with(f.as_str()))
            .map(String::len);
        if let (Some(start), Some(end), true) = (prompt_start, prefix_end, has_generation_prompt)
            && end > start
        {
            return Some(start..end);
        }

        let content = self.probe(self.messages, self.text);
        let start = match (prompt_start, &content) {
            (Some(start), _) if has_generation_prompt => start,
            (_, Some(content)) => content.start.max(prompt_start.unwrap_or(0)),
            (Some(start), None) => start,
            (None, None) => return None,
        };
        let end = match prefix_end.filter(|&end| end > start) {
            Some(end) => end,
            None => self.end_by_tail(content?, &turn?)?,
        };
        (end >= start).then_some(start..end)
    }

    /// The turn's end in the full text: after the content comes what comes after it in F. Where the last turn of
    /// a conversation ends in more than an inner one, what both have.
    fn end_by_tail(&self, content: Range<usize>, turn: &str) -> Option<usize> {
        let alone = self.probe(&self.messages[..=self.i], turn)?;
        let (tail, rest) = (&turn[alone.end..], &self.text[content.end..]);
        let shared = &rest[..common_prefix(tail, rest)];
        // `<|end|>` before `<|user|>` and `<|end|>` before `<|endoftext|>` share the start of the next token too.
        let whole = match shared.len() == tail.len() {
            true => shared,
            false => shared.trim_end_matches(|c: char| !c.is_whitespace() && c != '>' && c != ']'),
        };
        Some(content.end + whole.len())
    }

    fn probe(&self, messages: &[Value], text: &str) -> Option<Range<usize>> {
        content_range(self.template, messages, self.tools, false, text, self.i)
    }
}

/// Where the content of message i stands in `text`, the conversation's rendering: the place at which it parts from
/// a rendering with a probe instead. `None`: the template does not print the content, or not once.
pub(super) fn content_range(
    template: &dyn ChatRender,
    messages: &[Value],
    tools: Option<&Value>,
    add_generation_prompt: bool,
    text: &str,
    i: usize,
) -> Option<Range<usize>> {
    let content = chat::content(&messages[i]).trim();
    let differs = |probe: &&&str| {
        probe.chars().next() != content.chars().next() && probe.chars().last() != content.chars().last()
    };
    let probe = PROBES.iter().find(differs).or(PROBES.first())?;
    let mut changed = messages.to_vec();
    changed[i]
        .as_object_mut()?
        .insert("content".into(), Value::String((*probe).to_string()));
    let other = template.render(&changed, tools, add_generation_prompt).ok()?;
    if other.matches(*probe).count() != 1 {
        return None;
    }
    let start = common_prefix(text, &other).min(other.find(*probe)?);
    let end = text.len() - common_suffix(text, &other).min(text.len() - start);
    Some(start..end)
}

/// Bytes that two texts share at their start, on a character boundary.
fn common_prefix(a: &str, b: &str) -> usize {
    a.char_indices()
        .zip(b.chars())
        .find(|((_, x), y)| x != y)
        .map_or(a.len().min(b.len()), |((i, _), _)| i)
}

/// Bytes that two texts share at their end, on a character boundary.
fn common_suffix(a: &str, b: &str) -> usize {
    a.chars()
        .rev()
        .zip(b.chars().rev())
        .take_while(|(x, y)| x == y)
        .map(|(x, _)| x.len_utf8())
        .sum()
}
