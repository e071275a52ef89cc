//! Encodes samples to token ids and a loss mask. The mask uses positions in the text, never token ids.
//!
//! Letters: T tokens of a row.
//!
//! - Text: the tokenizer's own encoding, then EOS unless it is already last. All tokens are trained.
//! - Prompt and completion: encoded as one text (so that a word across the boundary is tokenized as in
//!   training), then EOS. Trained from the first token that ends after the prompt's last byte: a token with the end of the
//!   prompt and the start of the completion belongs to the completion.
//! - Conversations: rendered once, encoded without added special tokens. In each assistant turn the tokens after the
//!   generation prompt, up to and including the end-of-turn token, are trained; if the template has `{% generation %}`
//!   blocks, their tokens are trained instead. An answer with the weight 0 is not trained, also if all tokens are; what
//!   a tool printed inside its turn is.
//!
//! The first token of a row is never trained: it has no context.

mod literal;
mod long;
mod question;
mod spans;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_chat;
#[cfg(test)]
mod tests_real;
#[cfg(test)]
mod tests_templates;
#[cfg(test)]
mod tests_turns;

use super::batch::Example;
use super::chat;
use super::codec::{ChatRender, TextCodec};
use super::rows::{Chat, Sample};
use crate::TrainOn;
use ft_base::{Error, Result};
use serde_json::Value;
use spans::Search;
use std::ops::Range;

pub(super) use long::FittedRows;
pub use question::{Question, plain_prompt};

/// Encodes samples to examples.
#[derive(Clone, Copy)]
pub struct Encoder<'a> {
    /// The tokenizer.
    pub codec: &'a dyn TextCodec,
    /// `None`: there is no chat template.
    pub template: Option<&'a dyn ChatRender>,
    /// The parts of a conversation that are trained.
    pub train_on: TrainOn,
    /// Longest row in tokens; longer rows are truncated at the end.
    pub max_length: usize,
    /// Rows of the model's embedding: all ids must be smaller.
    pub embedding_rows: usize,
}

/// A tokenized row, with counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedRow {
    /// The tokens and their mask.
    pub example: Example,
    /// Tokens removed by truncation at `max_length`.
    pub cut: usize,
    /// Trained tokens before truncation.
    pub trained_before_cut: usize,
    /// Trained assistant turns that do not end with a special token: the model does not learn to end them.
    pub open_turns: usize,
}

/// `[T]`: ids and mask before the checks.
struct MaskedIds {
    ids: Vec<u32>,
    trained: Vec<bool>,
    open_turns: usize,
}

impl Encoder<'_> {
    /// The tokens of a row, with the mask of trained tokens; a long row is truncated at its end.
    ///
    /// # Errors
    /// A conversation without a chat template, a template error, two BOS tokens, an id outside the embedding.
    pub fn encode(&self, sample: &Sample) -> Result<EncodedRow> {
        let mut row = self.masked(sample)?;
        let count = |mask: &[bool]| mask.iter().filter(|&&t| t).count();
        let trained_before_cut = count(&row.trained);
        let cut = row.ids.len().saturating_sub(self.max_length);
        row.ids.truncate(self.max_length);
        row.trained.truncate(self.max_length);
        Ok(EncodedRow {
            example: Example {
                ids: row.ids,
                trained: row.trained,
            },
            cut,
            trained_before_cut,
            open_turns: row.open_turns,
        })
    }

    /// The whole row. Errors: as in `encode`.
    fn masked(&self, sample: &Sample) -> Result<MaskedIds> {
        let mut row = match sample {
            Sample::Text(text) => self.text(text)?,
            Sample::PromptCompletion { prompt, completion } => self.completion(prompt, completion)?,
            Sample::Chat(chat) => self.chat(chat)?,
        };
        if let Some(first) = row.trained.first_mut() {
            *first = false;
        }
        self.check(&row.ids)?;
        Ok(row)
    }

    pub(super) fn eos(&self) -> Result<u32> {
        self.codec.eos_id().ok_or_else(|| {
            Error::format("the tokenizer has no end-of-sequence token")
                .expected("`eos_token` in tokenizer_config.json")
                .hint("without it the model would never learn to stop; add the token's text to tokenizer_config.json")
        })
    }

    fn text(&self, text: &str) -> Result<MaskedIds> {
        let mut ids = self.codec.encode(text, true)?;
        let eos = self.eos()?;
        if ids.last() != Some(&eos) {
            ids.push(eos);
        }
        Ok(MaskedIds {
            trained: vec![true; ids.len()],
            ids,
            open_turns: 0,
        })
    }

    fn completion(&self, prompt: &str, completion: &str) -> Result<MaskedIds> {
        let (mut ids, offsets) = self.codec.encode_with_offsets(&format!("{prompt}{completion}"), true)?;
        let eos = self.eos()?;
        let mut first = reaching_past(&offsets, prompt.len());
        if first == offsets.len() {
            // An empty completion: the special tokens that the tokenizer appends are still its end.
            first = offsets
                .iter()
                .rposition(|(start, end)| end > start)
                .map_or(0, |i| i + 1);
        }
        if ids.last() != Some(&eos) {
            ids.push(eos);
        }
        let all = self.train_on == TrainOn::All;
        Ok(MaskedIds {
            trained: (0..ids.len()).map(|t| all || t >= first).collect(),
            ids,
            open_turns: 0,
        })
    }

    fn template(&self) -> Result<&dyn ChatRender> {
        self.template.ok_or_else(|| {
            Error::usage("the rows are conversations and the model has no chat template")
                .expected("chat_template.jinja, or `chat_template` in tokenizer_config.json")
                .hint("give `ChatTemplate::from_file` the path of a Jinja file, or use prompt-completion or text rows")
        })
    }

    /// Tokens of the rendered conversation. Errors: as in `encode`.
    pub(super) fn rendered(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>> {
        let template = self.template()?;
        let text = template.render(messages, tools, add_generation_prompt)?;
        let source = literal::RenderedSource {
            codec: self.codec,
            template,
            messages,
            tools,
            add_generation_prompt,
            text: &text,
        };
        Ok(source.encode()?.0)
    }

    /// The renderings that a conversation needs: the whole text, and begin and end of each turn that is located.
    pub(super) fn renderings(&self, chat: &Chat) -> Vec<(usize, bool)> {
        let mut out = vec![(chat.messages.len(), false)];
        for i in self.located(chat) {
            out.extend([(i, true), (i + 1, false), (i, false)]);
        }
        out.sort_unstable();
        out.dedup();
        out
    }

    /// Indices of the trained assistant messages; with `TrainOn::All`, of those whose weight is 0.
    fn located(&self, chat: &Chat) -> Vec<usize> {
        let mut turns =
            (chat.first_trained..chat.messages.len()).filter(|&i| chat::role(&chat.messages[i]) == "assistant");
        let is_trained = |i: &usize| !chat.untrained.contains(i);
        match self.train_on {
            TrainOn::All => turns.filter(|i| !is_trained(i)).collect(),
            TrainOn::Assistant => turns.filter(is_trained).collect(),
            TrainOn::Completion => turns.next_back().filter(is_trained).into_iter().collect(),
        }
    }

    fn chat(&self, chat: &Chat) -> Result<MaskedIds> {
        let template = self.template()?;
        let all = self.train_on == TrainOn::All;
        let search = if all { Search::Wanted } else { Search::Others };
        let rendered = spans::render(
            template,
            &chat.messages,
            chat.tools.as_ref(),
            &self.located(chat),
            search,
        )?;
        let source = literal::RenderedSource {
            codec: self.codec,
            template,
            messages: &chat.messages,
            tools: chat.tools.as_ref(),
            add_generation_prompt: false,
            text: &rendered.text,
        };
        let (ids, offsets) = source.encode()?;
        let mut trained = vec![all; ids.len()];
        let mut open_turns = 0;
        for turn in &rendered.turns {
            let mut tokens = reaching_past(&offsets, turn.start)..reaching_past(&offsets, turn.end);
            if rendered.marked {
                // A token that contains the last byte is included, as in transformers; of a character, all its tokens.
                tokens.end = begun_before(&offsets, turn.end);
            } else if let Some(end) = self.end_of_turn(&ids, &offsets, &rendered.text, tokens.clone()) {
                tokens.end = end + 1;
            } else {
                open_turns += 1;
            }
            if tokens.is_empty() {
                return Err(
                    Error::format("an assistant turn has no tokens in the output of the chat template")
                        .hint("look at the encoded rows; another template can be set with `ChatTemplate::from_file`"),
                );
            }
            trained[tokens].fill(!all);
        }
        if let (true, Some(last)) = (rendered.marked, rendered.turns.last()) {
            let tokens = reaching_past(&offsets, last.start)..reaching_past(&offsets, last.end);
            open_turns += usize::from(self.end_of_turn(&ids, &offsets, &rendered.text, tokens).is_none());
        }
        for block in &rendered.tools {
            let tokens = reaching_past(&offsets, block.start)..begun_before(&offsets, block.end);
            if block.is_empty() || tokens.is_empty() {
                continue;
            }
            let first = tokens.start;
            // If the opening token is a stop id, generation ends with it, so the assistant writes it.
            let stops = first > 0 && trained[first - 1] != all && self.codec.stop_ids().contains(&ids[first]);
            trained[tokens].fill(all);
            if stops {
                trained[first] = !all;
            }
        }
        Ok(MaskedIds {
            ids,
            trained,
            open_turns: if all { 0 } else { open_turns },
        })
    }

    /// The special token that ends a turn: the last one, followed by white space only. If there are several (`<|end|>`
    /// and a final `<|endoftext|>`), the first one that is a stop id.
    fn end_of_turn(&self, ids: &[u32], offsets: &[(usize, usize)], text: &str, turn: Range<usize>) -> Option<usize> {
        let blank = |t: &usize| {
            let (start, end) = offsets[*t];
            self.codec.is_special(ids[*t]) || text[start..end].trim().is_empty()
        };
        let ends = turn.rev().take_while(blank).filter(|&t| self.codec.is_special(ids[t]));
        let ends: Vec<usize> = ends.collect();
        let stops = |t: &&usize| self.codec.stop_ids().contains(&ids[**t]);
        ends.iter().rev().find(stops).or(ends.first()).copied()
    }

    pub(super) fn check(&self, ids: &[u32]) -> Result<()> {
        if let Some(&id) = ids.iter().find(|&&id| id as usize >= self.embedding_rows) {
            let token = self.codec.decode(&[id]).unwrap_or_default();
            return Err(
                Error::format("the tokenizer returns a token id for which the model has no embedding")
                    .found(format!("id {id} (`{}`)", super::read::clip(&token)))
                    .expected(format!("ids below {}", self.embedding_rows))
                    .hint("use the tokenizer that belongs to the model: both from the same directory"),
            );
        }
        if let (Some(bos), [first, second, ..]) = (self.codec.bos_id(), ids)
            && *first == bos
            && *second == bos
            && self.codec.eos_id() != Some(bos)
        {
            return Err(Error::format("the row starts with two beginning-of-sequence tokens")
                .found(format!("id {bos} twice"))
                .expected("one")
                .hint(
                    "the text already contains the token that the tokenizer or the template adds: remove it from the \
                     row",
                ));
        }
        Ok(())
    }
}

/// Index of the first token that ends after `byte`.
fn reaching_past(offsets: &[(usize, usize)], byte: usize) -> usize {
    offsets.iter().position(|&(_, end)| end > byte).unwrap_or(offsets.len())
}

/// One past the last token that begins before `byte`. The bytes of a character may be several tokens, which all have its
/// range.
fn begun_before(offsets: &[(usize, usize)], byte: usize) -> usize {
    offsets
        .iter()
        .rposition(|&(start, end)| start < end && start < byte)
        .map_or(0, |last| last + 1)
}
