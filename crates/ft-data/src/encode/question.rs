//! The prompt of a row's last answer, and the tokens that follow it in the row.

use super::{Encoder, literal, reaching_past, spans};
use crate::chat;
use crate::codec::TextCodec;
use crate::rows::{Chat, Sample};
use ft_base::Result;

/// A prompt, and the answer in its row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// `[T]`, up to and including the generation prompt.
    pub prompt: Vec<u32>,
    /// The known answer, as text.
    pub answer: String,
    /// What follows the prompt in the row, up to the token that ends generation. A chat template may print more than the answer:
    /// an empty thought before it, or the name of a channel.
    pub expected: Vec<u32>,
}

/// The tokens of a plain text to continue: without the end-of-sequence token that some tokenizers append to every text.
///
/// # Errors
/// The tokenizer cannot convert the text.
pub fn plain_prompt(codec: &dyn TextCodec, prompt: &str) -> Result<Vec<u32>> {
    let (mut ids, offsets) = codec.encode_with_offsets(prompt, true)?;
    let is_appended = |at: usize| offsets.get(at).is_some_and(|(start, end)| start >= end);
    while ids.len() > 1 && ids.last().copied() == codec.eos_id() && is_appended(ids.len() - 1) {
        ids.pop();
    }
    Ok(ids)
}

impl Encoder<'_> {
    /// The prompt of the row's last answer, and what follows it; `None` if the row has no text answer.
    ///
    /// # Errors
    /// As in `encode`.
    pub fn question(&self, sample: &Sample) -> Result<Option<Question>> {
        let Some((prompt, answer)) = self.asked(sample)? else {
            return Ok(None);
        };
        let turn = match sample {
            Sample::Chat(chat) => self.answered_turn(chat)?,
            _ => None,
        };
        let mut expected = match turn {
            Some(turn) => turn,
            None => {
                let mut ids = self.codec.encode(&answer, false)?;
                ids.extend(self.codec.eos_id());
                ids
            }
        };
        // Generation ends at the first of these.
        let end = expected.iter().position(|id| self.codec.stop_ids().contains(id));
        expected.truncate(end.map_or(expected.len(), |end| end + 1));
        Ok(Some(Question {
            prompt,
            answer,
            expected,
        }))
    }

    /// The prompt of the row's last answer, and the answer as text. Errors: as in `encode`.
    pub(crate) fn asked(&self, sample: &Sample) -> Result<Option<(Vec<u32>, String)>> {
        let (ids, answer) = match sample {
            Sample::Text(_) => return Ok(None),
            Sample::PromptCompletion { prompt, completion } => (plain_prompt(self.codec, prompt)?, completion.as_str()),
            Sample::Chat(chat) => {
                let Some(last) = last_answer(chat) else {
                    return Ok(None);
                };
                let ids = self.rendered(&chat.messages[..last], chat.tools.as_ref(), true)?;
                (ids, chat::content(&chat.messages[last]))
            }
        };
        self.check(&ids)?;
        Ok(Some((ids, answer.to_string())))
    }

    /// The tokens of the last answer behind its generation prompt, up to its end-of-turn token. `None`: the template does not show
    /// where the answer begins.
    fn answered_turn(&self, chat: &Chat) -> Result<Option<Vec<u32>>> {
        let (Some(last), tools) = (last_answer(chat), chat.tools.as_ref()) else {
            return Ok(None);
        };
        let template = self.template()?;
        let messages = &chat.messages[..=last];
        let Ok(text) = template.render(messages, tools, false) else {
            return Ok(None);
        };
        let prompt = template.render(&messages[..last], tools, true)?;
        let start = if text.starts_with(&prompt) {
            Some(prompt.len())
        } else {
            let found = spans::render(template, messages, tools, &[last], spans::Search::Wanted);
            found.ok().and_then(|found| found.turns.first().map(|turn| turn.start))
        };
        let Some(start) = start else {
            return Ok(None);
        };
        let source = literal::RenderedSource {
            codec: self.codec,
            template,
            messages,
            tools,
            add_generation_prompt: false,
            text: &text,
        };
        let (ids, offsets) = source.encode()?;
        let mut tokens = reaching_past(&offsets, start)..ids.len();
        if let Some(end) = self.end_of_turn(&ids, &offsets, &text, tokens.clone()) {
            tokens.end = end + 1;
        }
        Ok((!tokens.is_empty()).then(|| ids[tokens].to_vec()))
    }
}

/// Index of the last answer of a conversation; `None`: it has no text. A first message has no question before it.
fn last_answer(chat: &Chat) -> Option<usize> {
    let last = (chat.first_trained..chat.messages.len())
        .rev()
        .find(|&i| chat::role(&chat.messages[i]) == "assistant");
    last.filter(|&i| i > 0 && !chat::content(&chat.messages[i]).is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Jinja, OPENS_THINKING, QWEN, Words, real, row, understand};
    use crate::{RowFormat, TrainOn};
    use ft_formats::template::named;
    use serde_json::{Value, json};

    fn conversation(answer: Value) -> Sample {
        let mut turn = json!({"role": "assistant"});
        turn.as_object_mut()
            .unwrap()
            .extend(answer.as_object().unwrap().clone());
        let row = row(json!({"messages": [{"role": "user", "content": "2 + 3?"}, turn]}));
        understand(&row, RowFormat::Messages).unwrap()
    }

    #[test]
    fn the_expected_tokens_are_those_that_qwen3_is_trained_to_write() {
        let codec = real();
        let template = named::find("qwen3").unwrap().template(&codec).unwrap();
        let encoder = Encoder {
            codec: &codec,
            template: Some(&template),
            train_on: TrainOn::Assistant,
            max_length: 4096,
            embedding_rows: codec.vocab_size(),
        };
        for (answer, expected) in [
            (json!({"content": "5"}), "<think>\n\n</think>\n\n5<|im_end|>"),
            (
                json!({"content": "5", "reasoning_content": "3 more"}),
                "<think>\n3 more\n</think>\n\n5<|im_end|>",
            ),
        ] {
            let sample = conversation(answer);
            let question = encoder.question(&sample).unwrap().unwrap();
            assert_eq!(question.answer, "5");
            assert_eq!(TextCodec::decode(&codec, &question.expected).unwrap(), expected);
            let example = encoder.encode(&sample).unwrap().example;
            let trained = example
                .ids
                .iter()
                .zip(&example.trained)
                .filter(|(_, trained)| **trained);
            assert!(trained.map(|(id, _)| id).eq(&question.expected));
            assert!(example.ids.starts_with(&[question.prompt, question.expected].concat()));
        }
    }

    #[test]
    fn the_expected_tokens_end_where_generation_ends() {
        let expected = |codec: &Words, template: &'static str, sample: &Sample| {
            let template = Jinja::new(template);
            let encoder = Encoder {
                codec,
                template: Some(&template),
                train_on: TrainOn::All,
                max_length: 4096,
                embedding_rows: 1 << 20,
            };
            let question = encoder.question(sample).unwrap().unwrap();
            codec.tokens(&question.expected).concat()
        };
        let mut codec = Words::chatml();
        let five = conversation(json!({"content": "five of <|endoftext|> them"}));
        assert_eq!(expected(&codec, QWEN, &five), "five of <|endoftext|> them<|im_end|>");
        // The history does not have the thought that the generation prompt opens.
        assert_eq!(
            expected(&codec, OPENS_THINKING, &conversation(json!({"content": "five"}))),
            "five<|im_end|>"
        );
        let completion = Sample::PromptCompletion {
            prompt: "one two".into(),
            completion: " three".into(),
        };
        assert_eq!(expected(&codec, QWEN, &completion), " three<|im_end|>");
        codec.stops = vec![codec.id("<|endoftext|>")];
        assert_eq!(expected(&codec, QWEN, &five), "five of <|endoftext|>");
    }

    #[test]
    fn an_appended_end_of_sequence_is_no_part_of_a_prompt() {
        let mut codec = Words::new(&["<s>", "</s>"], Some("<s>"), Some("</s>"));
        codec.adds_eos = true;
        let shown = |text: &str| codec.tokens(&plain_prompt(&codec, text).unwrap()).concat();
        assert_eq!(shown("a b"), "<s>a b");
        // What the user wrote stays.
        assert_eq!(shown("a</s>"), "<s>a</s>");
        assert_eq!(shown(""), "<s>");
    }
}
