//! Special tokens inside the text of a user or a tool are encoded as plain text: `<|im_end|>` in a question must not
//! end the turn. (Text rows, prompt-completion rows, and assistant and system messages are written by the data's author
//! and keep their special tokens.) If the tokenizer puts a space before each text, the parts of such a token and the text
//! after it are encoded behind another character, and have no space that the user did not write.

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
        let adds_space = adds_space(self.codec)?;
        let mut out = Vec::with_capacity(ids.len());
        let mut t = 0;
        while t < ids.len() {
            let (id, (start, end)) = (ids[t], offsets[t]);
            // A token may include adjacent white space; only its own text decides whether it is part of the message.
            let own = self.text[start..end].trim_start();
            let own = end - own.len()..end - own.len() + own.trim_end().len();
            let inside = foreign.iter().any(|r| r.start <= own.start && own.end <= r.end);
            t += 1;
            if start >= end || !inside || !self.codec.is_special(id) {
                out.push((id, (start, end)));
                continue;
            }
            out.extend(moved(
                spelled_out(self.codec, &self.text[start..end], adds_space)?,
                start,
            ));
            if !adds_space {
                continue;
            }
            // The text up to the next special token was encoded as a new text.
            let is_special = |u: &usize| offsets[*u].0 < offsets[*u].1 && self.codec.is_special(ids[*u]);
            let next = (t..ids.len()).find(is_special).unwrap_or(ids.len());
            let until = offsets.get(next).map_or(self.text.len(), |(start, _)| *start);
            let rest = self.text.get(end..until);
            if let Some(tokens) = rest.map(|rest| behind(self.codec, rest)).transpose()?.flatten() {
                out.extend(moved(tokens, end));
                t = next;
            }
        }
        Ok(out.into_iter().unzip())
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

/// Ids with their byte ranges.
type Tokens = Vec<(u32, (usize, usize))>;

/// The tokens of a part of a text that begins at `by`.
fn moved(tokens: Tokens, by: usize) -> impl Iterator<Item = (u32, (usize, usize))> {
    tokens
        .into_iter()
        .map(move |(id, (start, end))| (id, (by + start, by + end)))
}

fn tokens(codec: &dyn TextCodec, text: &str) -> Result<Tokens> {
    let (ids, offsets) = codec.encode_with_offsets(text, false)?;
    Ok(ids.into_iter().zip(offsets).collect())
}

/// Characters that no tokenizer is known to join with a following one of another kind: a digit, a punctuation mark.
const BEFORE: [&str; 2] = ["0", "|"];

/// The tokens of a text behind other text. `None`: they cannot be separated from those of the other text.
fn behind(codec: &dyn TextCodec, text: &str) -> Result<Option<Tokens>> {
    for before in BEFORE {
        let n = before.len();
        let mut all = tokens(codec, &format!("{before}{text}"))?;
        let first = all.iter().position(|(_, (_, end))| *end > n).unwrap_or(all.len());
        let found = all.split_off(first);
        if found.iter().all(|(_, (start, _))| *start >= n) {
            let back = |(id, (start, end)): (u32, (usize, usize))| (id, (start - n, end - n));
            return Ok(Some(found.into_iter().map(back).collect()));
        }
    }
    Ok(None)
}

/// True if the tokenizer puts a space before each text, also before each text between special tokens (SentencePiece).
fn adds_space(codec: &dyn TextCodec) -> Result<bool> {
    let [digit, mark] = BEFORE;
    let alone = codec.encode(digit, false)?;
    let (ids, offsets) = codec.encode_with_offsets(&format!("{mark}{digit}"), false)?;
    let last = ids.iter().zip(&offsets).filter(|(_, (_, end))| *end > mark.len());
    Ok(!last.map(|(id, _)| id).eq(&alone))
}

/// Encodes a special token's text in two parts, so that it is not recognized; in single characters if that fails.
fn spelled_out(codec: &dyn TextCodec, token: &str, adds_space: bool) -> Result<Tokens> {
    let first = token.chars().next().map_or(0, char::len_utf8);
    let characters: Vec<usize> = token.char_indices().map(|(i, _)| i).collect();
    for cuts in [vec![0, first], characters] {
        let mut out = Vec::new();
        for (k, &start) in cuts.iter().enumerate() {
            let end = cuts.get(k + 1).copied().unwrap_or(token.len());
            let part = &token[start..end];
            let found = if adds_space { behind(codec, part)? } else { None };
            let found = match found {
                Some(found) => found,
                None => tokens(codec, part)?,
            };
            out.extend(moved(found, start));
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

#[cfg(test)]
mod tests {
    use super::adds_space;
    use crate::encode::Encoder;
    use crate::testing::{Jinja, MISTRAL, Words, real, row, understand};
    use crate::{RowFormat, TrainOn};
    use ft_formats::Tokenizer;
    use serde_json::{Map, Value, json};

    /// A tokenizer with these steps and a token for each character; a space is `▁`.
    fn characters(steps: Value) -> Tokenizer {
        let specials = ["<unk>", "<s>", "</s>"].map(str::to_string);
        let letters = ('!'..='~').chain(['▁']).map(String::from);
        let vocab: Map<String, Value> = specials
            .into_iter()
            .chain(letters)
            .zip(0..)
            .map(|(t, i)| (t, json!(i)))
            .collect();
        let added = [(0, "<unk>"), (1, "<s>"), (2, "</s>")].map(|(id, text)| {
            json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": true})
        });
        let mut file = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
            "pre_tokenizer": null, "post_processor": null, "decoder": null,
            "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": false, "vocab": vocab, "merges": []},
        });
        let (Value::Object(file), Value::Object(steps)) = (&mut file, steps) else {
            panic!()
        };
        file.extend(steps);
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, value: &Value| std::fs::write(dir.path().join(name), value.to_string()).unwrap();
        write("tokenizer.json", &Value::Object(file.clone()));
        write(
            "tokenizer_config.json",
            &json!({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
        );
        Tokenizer::load(dir.path()).unwrap()
    }

    #[test]
    fn a_special_token_in_a_text_adds_no_space_that_the_user_did_not_write() {
        let prepend = json!({"normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}});
        let metaspace = json!({"pre_tokenizer":
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}});
        for steps in [prepend, metaspace] {
            let codec = characters(steps);
            assert!(adds_space(&codec).unwrap());
            let template = Jinja::new(MISTRAL);
            let encoder = Encoder {
                codec: &codec,
                template: Some(&template),
                train_on: TrainOn::Assistant,
                max_length: 100,
                embedding_rows: 100,
            };
            for (said, seen) in [
                ("use </s> here", "use▁</s>▁here"),
                ("a</s>b<s></s>0", "a</s>b<s></s>0"),
                ("</s>", "</s>"),
            ] {
                let value = json!({"messages": [
                    {"role": "user", "content": said}, {"role": "assistant", "content": "ok"}]});
                let example = encoder
                    .encode(&understand(&row(value), RowFormat::Messages).unwrap())
                    .unwrap()
                    .example;
                let shown: Vec<String> = example.ids.iter().map(|id| codec.id_to_token(*id).unwrap()).collect();
                assert_eq!(shown.concat(), format!("<s>▁[INST]▁{seen}▁[/INST]▁ok</s>"));
                // Begin and end of the row only.
                assert_eq!(example.ids.iter().filter(|id| **id < 3).count(), 2, "{shown:?}");
                let trained = shown.iter().zip(&example.trained).filter(|(_, trained)| **trained);
                assert_eq!(trained.map(|(t, _)| t.as_str()).collect::<String>(), "ok</s>");
            }
        }
        assert!(!adds_space(&real()).unwrap() && !adds_space(&Words::chatml()).unwrap());
    }
}
