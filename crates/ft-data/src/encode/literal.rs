//! Special tokens inside the text of a user or a tool are encoded as plain text: `<|im_end|>` in a question must not
//! end the turn. (Text rows, prompt-completion rows, and assistant and system messages are written by the data's author
//! and keep their special tokens.)

use super::spans::content_range;
use crate::chat;
use crate::codec::{ChatRender, IdsAndOffsets, TextCodec};
use crate::read::clip;
use ft_base::{Error, Result};
use serde_json::Value;
use std::ops::Range;

/// A rendered conversation, with the template's inputs.
pub(super) struct RenderedSource<'a> {
    pub codec: &'a dyn TextCodec,
    pub template: &'a dyn ChatRender,
    pub messages: &'a [Value],
    pub tools: Option<&'a Value>,
    pub add_generation_prompt: bool,
    pub text: &'a str,
}

impl RenderedSource<'_> {
    /// Encodes the text; special tokens that come from a message, not from the template, are encoded as plain text.
    ///
    /// Errors: the message is not found in the text, or the token cannot be encoded as plain text.
    pub(super) fn encode(&self) -> Result<IdsAndOffsets> {
        let (ids, offsets) = self.codec.encode_with_offsets(self.text, false)?;
        let foreign = self.foreign(&ids, &offsets)?;
        if foreign.is_empty() {
            return Ok((ids, offsets));
        }
        let (mut new_ids, mut new_offsets) = (Vec::with_capacity(ids.len()), Vec::with_capacity(ids.len()));
        for (id, (start, end)) in ids.into_iter().zip(offsets) {
            // A token may include adjacent white space; only its own text decides whether it is part of the message.
            let own = self.text[start..end].trim_start();
            let own = end - own.len()..end - own.len() + own.trim_end().len();
            let inside = foreign.iter().any(|r| r.start <= own.start && own.end <= r.end);
            if start < end && inside && self.codec.is_special(id) {
                for (piece, offset) in spelled_out(self.codec, &self.text[start..end])? {
                    new_ids.push(piece);
                    new_offsets.push((start + offset.0, start + offset.1));
                }
            } else {
                new_ids.push(id);
                new_offsets.push((start, end));
            }
        }
        Ok((new_ids, new_offsets))
    }

    /// Byte ranges of user and tool contents that contain special tokens.
    fn foreign(&self, ids: &[u32], offsets: &[(usize, usize)]) -> Result<Vec<Range<usize>>> {
        let mut specials: Vec<&str> = ids
            .iter()
            .zip(offsets)
            .filter(|&(&id, _)| self.codec.is_special(id))
            .map(|(_, &(start, end))| self.text[start..end].trim())
            .filter(|special| !special.is_empty())
            .collect();
        specials.sort_unstable();
        specials.dedup();
        let mut ranges = Vec::new();
        for (i, message) in self.messages.iter().enumerate() {
            let content = chat::content(message);
            let foreign = matches!(chat::role(message), "user" | "tool" | "function" | "ipython");
            if !foreign || !specials.iter().any(|special| content.contains(special)) {
                continue;
            }
            let (prompt, text) = (self.add_generation_prompt, self.text);
            match content_range(self.template, self.messages, self.tools, prompt, text, i) {
                Some(range) => ranges.push(range),
                None => {
                    return Err(Error::format(format!(
                        "message {} contains the text of a special token, which is not found in the output of the \
                         template",
                        i + 1
                    ))
                    .found(clip(content))
                    .hint("remove the special token's text from the message"));
                }
            }
        }
        Ok(ranges)
    }
}

/// Encodes a special token's text in two parts, so that it is not recognized; in single characters if that fails.
fn spelled_out(codec: &dyn TextCodec, token: &str) -> Result<Vec<(u32, (usize, usize))>> {
    let first = token.chars().next().map_or(0, char::len_utf8);
    let characters: Vec<usize> = token.char_indices().map(|(i, _)| i).collect();
    for cuts in [vec![0, first], characters] {
        let mut out = Vec::new();
        for (k, &start) in cuts.iter().enumerate() {
            let end = cuts.get(k + 1).copied().unwrap_or(token.len());
            let (ids, offsets) = codec.encode_with_offsets(&token[start..end], false)?;
            out.extend(
                ids.into_iter()
                    .zip(offsets.into_iter().map(|(s, e)| (start + s, start + e))),
            );
        }
        if !out.iter().any(|&(id, _)| codec.is_special(id)) {
            return Ok(out);
        }
    }
    Err(
        Error::format("the text of a special token in a message cannot be encoded as plain text")
            .found(format!("`{token}`"))
            .hint("remove it from the message"),
    )
}
