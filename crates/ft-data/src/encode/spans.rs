//! Finds the bytes of a rendered conversation that each assistant turn wrote.
//!
//! A template with `{% generation %}` blocks marks them. Any other template is a program that may remove the thinking
//! of earlier turns, open a turn differently from its generation prompt, print a tool's answer inside the turn that
//! called it, or refuse part of a conversation. So for turn i the text is compared with other renderings:
//!
//! - Start: P, the messages before i with a generation prompt. If the text begins with P, the turn begins after it; if
//!   the text differs from P inside the generation prompt (which opens an empty thought), at the first difference.
//! - End: F, the messages up to and including i. If the text begins with F, the turn ends there. Else the content (or
//!   the arguments of the last call) is located by rendering probe words in its place; the suffix after it in F, or in
//!   F with a generation prompt, is the suffix in the text.
//! - Tool messages are excluded from the turn: the text that appears twice if the message is duplicated.
//!
//! In marked text a turn is looked for only if the marks do not say whose they are (`Search`).

use crate::chat;
use crate::codec::ChatRender;
use ft_base::{Error, Result};
use serde_json::{Value, json};
use std::cell::OnceCell;
use std::ops::Range;

/// Words that occur in no row; two, so that one of them differs from the content in its first and last character.
const PROBES: [&str; 2] = ["Zq7probe4xW", "9Kv probe Yj3"];

/// The full text of a conversation and the byte range of each wanted assistant turn.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RenderedTurns {
    pub text: String,
    /// Per turn: from after the generation prompt to the end of the turn. White space after the end-of-turn token is
    /// still included; the caller cuts at the token.
    pub turns: Vec<Range<usize>>,
    /// Byte ranges of tool answers, inside turns or directly after them.
    pub tools: Vec<Range<usize>>,
    /// True if the ranges come from the template's own marks; they are used unchanged.
    pub marked: bool,
}

/// The turns that are looked for in marked text, if each assistant message does not have exactly one mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Search {
    /// Only those that are wanted: marks outside of them are left out.
    Wanted,
    /// The others: their marks are left out.
    Others,
}

/// Renders once and locates the turns of `wanted` (indices of assistant messages, ascending).
///
/// Errors: the template refuses the conversation, or a turn is not found in its text.
pub(crate) fn render(
    template: &dyn ChatRender,
    messages: &[Value],
    tools: Option<&Value>,
    wanted: &[usize],
    search: Search,
) -> Result<RenderedTurns> {
    if let Some(marked) = template.render_marked(messages, tools, false)? {
        let text = marked.text;
        let talk = Conversation::new(template, messages, tools, &text);
        let turns = talk.of_marks(wanted, search, marked.generation)?;
        return Ok(RenderedTurns {
            text,
            turns,
            tools: Vec::new(),
            marked: true,
        });
    }
    let text = template.render(messages, tools, false)?;
    let talk = Conversation::new(template, messages, tools, &text);
    let mut turns: Vec<Range<usize>> = Vec::with_capacity(wanted.len());
    for &i in wanted {
        let after = turns.last().map_or(0, |t| t.end);
        // Turns must be in order; otherwise the template was misinterpreted.
        match talk.turn(i, after) {
            Some(turn) if turn.start >= after && !text[turn.clone()].is_empty() => turns.push(turn),
            _ => return Err(not_found(i)),
        }
    }
    let tools = talk.tool_outputs(wanted, &turns);
    Ok(RenderedTurns {
        text,
        turns,
        tools,
        marked: false,
    })
}

fn not_found(i: usize) -> Error {
    Error::format(format!(
        "cannot determine which part of the chat template's output is assistant message {}",
        i + 1
    ))
    .hint(
        "use `TrainOn::All`, or with `ChatTemplate::from_file` a template that prints each message in place or has \
           `{% generation %}` blocks",
    )
}

/// A conversation and its rendered text.
struct Conversation<'a> {
    template: &'a dyn ChatRender,
    messages: &'a [Value],
    tools: Option<&'a Value>,
    text: &'a str,
    /// The generation prompt; `None`: the template has none.
    prompt: OnceCell<Option<String>>,
}

/// A part of a message that is printed once: the content, or the arguments of the last call.
#[derive(Clone, Copy)]
enum Anchor {
    Content,
    Arguments,
}

impl<'a> Conversation<'a> {
    fn new(template: &'a dyn ChatRender, messages: &'a [Value], tools: Option<&'a Value>, text: &'a str) -> Self {
        Self {
            template,
            messages,
            tools,
            text,
            prompt: OnceCell::new(),
        }
    }

    /// Renders messages; `None` if the template refuses a history that ends here.
    fn show(&self, messages: &[Value], add_generation_prompt: bool) -> Option<String> {
        self.template.render(messages, self.tools, add_generation_prompt).ok()
    }

    /// The marked ranges of the wanted turns, without those of other messages.
    ///
    /// Errors: a turn of `search` is not found.
    fn of_marks(&self, wanted: &[usize], search: Search, mut marks: Vec<Range<usize>>) -> Result<Vec<Range<usize>>> {
        marks.retain(|m| !m.is_empty());
        let Some(&first) = wanted.first() else {
            return Ok(Vec::new());
        };
        let answers = (0..self.messages.len()).filter(|i| chat::role(&self.messages[*i]) == "assistant");
        let answers: Vec<usize> = answers.collect();
        if self.are_of(&answers, &marks) {
            let own = answers.iter().zip(marks).filter(|(i, _)| wanted.contains(i));
            return Ok(own.map(|(_, mark)| mark).collect());
        }
        let mut after = 0;
        let mut find = |i: usize| -> Result<Range<usize>> {
            let turn = self.printed(i, after).ok_or_else(|| not_found(i))?;
            after = turn.end;
            Ok(turn)
        };
        if search == Search::Wanted {
            let turns: Vec<Range<usize>> = wanted.iter().map(|i| find(*i)).collect::<Result<_>>()?;
            let inside = |m: &Range<usize>, turn: &Range<usize>| m.start.max(turn.start)..m.end.min(turn.end);
            let parts = turns.iter().flat_map(|turn| marks.iter().map(|m| inside(m, turn)));
            return Ok(parts.filter(|part| !part.is_empty()).collect());
        }
        if answers.iter().any(|i| *i < first) {
            let start = self.start(first, 0).ok_or_else(|| not_found(first))?;
            marks.retain(|m| m.end > start);
        }
        for i in answers.into_iter().filter(|i| *i >= first && !wanted.contains(i)) {
            let other = find(i)?;
            // A block may print several messages: what is around this one stays.
            let around = |m: Range<usize>| [m.start..m.end.min(other.start), m.start.max(other.end)..m.end];
            marks = marks.into_iter().flat_map(around).filter(|m| !m.is_empty()).collect();
        }
        Ok(marks)
    }

    /// True if each of these messages has exactly one mark, which contains its text.
    fn are_of(&self, answers: &[usize], marks: &[Range<usize>]) -> bool {
        let has_text = |(i, mark): (&usize, &Range<usize>)| {
            let content = chat::content(&self.messages[*i]).trim();
            let printed = self.text.get(mark.clone());
            !content.is_empty() && printed.is_some_and(|printed| printed.contains(content))
        };
        answers.len() == marks.len() && answers.iter().zip(marks).all(has_text)
    }

    fn turn(&self, i: usize, after: usize) -> Option<Range<usize>> {
        let start = self.start(i, after)?;
        let end = self.end(i, start)?;
        Some(start..end)
    }

    /// Message i with its header.
    fn printed(&self, i: usize, after: usize) -> Option<Range<usize>> {
        let turn = self.turn(i, after)?;
        let history = self.show(&self.messages[..i], false);
        let history = history.filter(|history| self.text.starts_with(history.as_str()));
        Some(history.map_or(turn.start, |history| history.len().min(turn.start))..turn.end)
    }

    /// The generation prompt after the last question, or after a generic question.
    fn prompt(&self) -> Option<&str> {
        let asked = |messages: &[Value]| {
            let (with, without) = (self.show(messages, true)?, self.show(messages, false)?);
            let prompt = with.strip_prefix(&without)?;
            (!prompt.is_empty()).then(|| prompt.to_string())
        };
        let find = || {
            let questions = (0..self.messages.len()).rev();
            let mut questions = questions.filter(|&u| chat::role(&self.messages[u]) == "user");
            questions
                .find_map(|u| asked(&self.messages[..=u]))
                .or_else(|| asked(&[chat::message("user", PROBES[0])]))
        };
        self.prompt.get_or_init(find).as_deref()
    }

    fn start(&self, i: usize, after: usize) -> Option<usize> {
        let before = &self.messages[..i];
        let (with, without) = (self.show(before, true), self.show(before, false));
        let prefix = with.as_deref().filter(|p| self.text.starts_with(p)).map(str::len);
        if let Some(start) = prefix.filter(|_| with != without) {
            return Some(start);
        }
        let content = content_range(self.template, self.messages, self.tools, false, self.text, i);
        let Some(prompt) = self.prompt() else {
            // Without a generation prompt the turn's header is not the assistant's text.
            return match content {
                Some(content) => Some(content.start.max(prefix.unwrap_or(0))),
                None => prefix,
            };
        };
        if i > 0
            && let Some(history) = without.as_deref().filter(|h| self.text.starts_with(h))
        {
            // The turn opens differently from the generation prompt, or continues an open turn.
            let here = with
                .as_deref()
                .and_then(|w| w.strip_prefix(history))
                .unwrap_or_default();
            let header = if here.is_empty() { prompt } else { here };
            let rest = &self.text[history.len()..];
            return Some(history.len() + whole_part(&rest[..common_prefix(header, rest)]));
        }
        let said = match i {
            0 => 0,
            _ => content_range(self.template, self.messages, self.tools, false, self.text, i - 1)
                .map_or(after, |r| r.end.max(after)),
        };
        self.after_header(prompt, said, content.as_ref())
            .or_else(|| {
                let with = with.as_deref()?;
                let shared = whole_part(&self.text[..common_prefix(with, self.text)]);
                (shared >= said.max(1)).then_some(shared)
            })
            .or(content.map(|c| c.start))
    }

    /// The end of the last occurrence of the generation prompt, or of a prefix of it, between `said` and the content.
    fn after_header(&self, prompt: &str, said: usize, content: Option<&Range<usize>>) -> Option<usize> {
        let between = self.text.get(said..content?.start)?;
        let mut header = prompt;
        while !header.is_empty() {
            if let Some(at) = between.rfind(header) {
                return Some(said + at + header.len());
            }
            let last = header.chars().next_back().map_or(0, char::len_utf8);
            header = &header[..whole_part(&header[..header.len() - last])];
        }
        None
    }

    fn end(&self, i: usize, start: usize) -> Option<usize> {
        let whole = |shown: &Option<String>| {
            let shown = shown.as_deref()?;
            (self.text.starts_with(shown) && shown.len() > start).then_some(shown.len())
        };
        let upto = &self.messages[..=i];
        let last = self.show(upto, false);
        if let Some(end) = whole(&last) {
            return Some(end);
        }
        // An inner turn may end differently from the last one.
        let inner = self.as_inner(upto);
        if let Some(end) = whole(&inner) {
            return Some(end);
        }
        let ours = [chat::message("user", "x"), chat::message("assistant", "y")];
        for anchor in [Anchor::Content, Anchor::Arguments] {
            let Some(here) = self.find(anchor, self.messages, self.text, i) else {
                continue;
            };
            let rest = &self.text[here.end..];
            let mut best = None;
            for (messages, shown, is_ours) in [
                (upto, &inner, false),
                (upto, &last, false),
                (&ours[..], &self.as_inner(&ours), true),
                (&ours[..], &self.show(&ours, false), true),
            ] {
                let Some(shown) = shown else { continue };
                let Some(there) = self.find(anchor, messages, shown, messages.len() - 1) else {
                    continue;
                };
                let tail = &shown[there.end..];
                if !tail.is_empty() && rest.starts_with(tail) {
                    best = Some(here.end + tail.len());
                    break;
                }
                // If the last turn has a longer end than an inner one, use their common part.
                let shared = here.end + whole_part(&rest[..common_prefix(tail, rest)]);
                if !is_ours {
                    best = best.max(Some(shared));
                }
            }
            if let Some(end) = best.filter(|&end| end >= start) {
                return Some(end);
            }
        }
        None
    }

    /// The rendering of these messages, up to the generation prompt that follows them.
    fn as_inner(&self, messages: &[Value]) -> Option<String> {
        let shown = self.show(messages, true)?;
        shown.strip_suffix(self.prompt()?).map(str::to_string)
    }

    /// Byte range of the anchor of message i in `text`, the rendering of `messages`.
    fn find(&self, anchor: Anchor, messages: &[Value], text: &str, i: usize) -> Option<Range<usize>> {
        match anchor {
            Anchor::Content => content_range(self.template, messages, self.tools, false, text, i),
            Anchor::Arguments => {
                let mut changed = messages.to_vec();
                let call = changed[i].get_mut("tool_calls")?.as_array_mut()?.last_mut()?;
                let call = match call.get("function") {
                    Some(Value::Object(_)) => &mut call["function"],
                    _ => call,
                };
                let arguments = call.get_mut("arguments")?;
                *arguments = match arguments {
                    Value::String(_) => json!(PROBES[0]),
                    _ => json!({"k": PROBES[0]}),
                };
                parting(self.template, &changed, self.tools, false, text, PROBES[0])
            }
        }
    }

    /// Byte ranges printed by the tool messages after the wanted turns, if they touch a turn.
    fn tool_outputs(&self, wanted: &[usize], turns: &[Range<usize>]) -> Vec<Range<usize>> {
        let mut out = Vec::new();
        for &i in wanted {
            let answers = (i + 1..self.messages.len())
                .take_while(|&j| !["assistant", "user"].contains(&chat::role(&self.messages[j])));
            for j in answers {
                let Some(block) = self.printed_by(j) else { continue };
                if turns.iter().any(|t| t.start < block.end && block.start < t.end) {
                    out.push(block);
                }
            }
        }
        out
    }

    /// Byte range printed by message j: the text that appears twice if the message is duplicated. `None`: not found.
    fn printed_by(&self, j: usize) -> Option<Range<usize>> {
        let content = content_range(self.template, self.messages, self.tools, false, self.text, j);
        let mut doubled = self.messages.to_vec();
        doubled.insert(j, self.messages[j].clone());
        let Some(other) = self.show(&doubled, false).filter(|o| o.len() > self.text.len()) else {
            return content;
        };
        let length = other.len() - self.text.len();
        let end = common_prefix(self.text, &other);
        let from = self.text.len() - common_suffix(self.text, &other).min(self.text.len());
        let Some(to) = end.checked_sub(length).filter(|to| from <= *to) else {
            return content;
        };
        // If the text around it is similar, several ranges are possible: choose one that contains the content, starts
        // at a token boundary, and preferably starts with an opening character.
        let holds = |at: &usize| content.as_ref().is_none_or(|c| *at <= c.start && c.end <= at + length);
        let cuts_no_character = |at: &usize| [*at, at + length].iter().all(|&b| self.text.is_char_boundary(b));
        let places: Vec<usize> = (from..=to).rev().filter(holds).filter(cuts_no_character).collect();
        let borders = |at: &&usize| whole_part(&self.text[..**at]) == **at;
        let opens = |at: &&usize| borders(at) && self.text[**at..].starts_with(['<', '[', '\n', ' ']);
        let best = places.iter().find(opens).or(places.iter().find(borders));
        let Some(&start) = best.or(places.first()) else {
            return content;
        };
        Some(start..start + length)
    }
}

/// Byte range of the content of message i in `text`, the conversation's rendering: the difference to a rendering with a
/// probe instead. `None`: the template does not print the content, or not exactly once.
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
    parting(template, &changed, tools, add_generation_prompt, text, probe)
}

/// The part of `text` that is replaced by the probe in the rendering of `changed`.
fn parting(
    template: &dyn ChatRender,
    changed: &[Value],
    tools: Option<&Value>,
    add_generation_prompt: bool,
    text: &str,
    probe: &str,
) -> Option<Range<usize>> {
    let other = template.render(changed, tools, add_generation_prompt).ok()?;
    if other.matches(probe).count() != 1 {
        return None;
    }
    let at = other.find(probe)?;
    let start = common_prefix(text, &other).min(at);
    let behind = other.len() - at - probe.len();
    let end = text.len() - common_suffix(text, &other).min(text.len() - start).min(behind);
    Some(start..end)
}

/// Length of `text` up to the last white space or bracket, so that no special token is split.
fn whole_part(text: &str) -> usize {
    text.trim_end_matches(|c: char| !c.is_whitespace() && c != '>' && c != ']')
        .len()
}

/// Length of the common prefix in bytes, on a character boundary.
fn common_prefix(a: &str, b: &str) -> usize {
    a.char_indices()
        .zip(b.chars())
        .find(|((_, x), y)| x != y)
        .map_or(a.len().min(b.len()), |((i, _), _)| i)
}

/// Length of the common suffix in bytes, on a character boundary.
fn common_suffix(a: &str, b: &str) -> usize {
    a.chars()
        .rev()
        .zip(b.chars().rev())
        .take_while(|(x, y)| x == y)
        .map(|(x, _)| x.len_utf8())
        .sum()
}
