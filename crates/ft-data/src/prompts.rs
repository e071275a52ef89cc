//! Rows with prompts for training by reward: the prompt, the answer if the row has one, and all columns.
//!
//! A row of format `prompt` has the column `prompt` (or one that is read as such), as text or as a list of messages. A
//! row of any other format with an answer (a conversation, prompt and completion) gives its prompt; its last answer is
//! the known answer. A conversation that ends with a question or the result of a tool is itself a prompt.

use super::chat;
use super::dataset::{DatasetSpec, RowOrigin};
use super::encode::Encoder;
use super::faults::BadRows;
use super::layout::{self, ColumnLayout, RenderRules, RowPurpose};
use super::load::unless_stopped;
use super::mixture::SourceShare;
use super::read::{self, Row};
use super::reading::ReadingReport;
use super::rows::{self, Chat, Sample};
use super::screen::Screen;
use super::source::{self, Source};
use super::tokens::TokenCache;
use crate::{Long, Render, RowFormat};
use ft_base::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The text or the messages before the answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum PromptContent {
    /// Plain text to continue.
    Text(String),
    /// A conversation.
    Chat {
        /// Objects with `role` and `content`.
        messages: Vec<Value>,
        /// The tools that it declares.
        tools: Option<Value>,
    },
}

/// One prompt of a generation or a rollout.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// `[T]`, up to and including the generation prompt.
    pub ids: Vec<u32>,
    /// The prompt before encoding.
    pub said: PromptContent,
    /// The prompt as in the row: a text, or messages.
    pub shown: Value,
    /// A text, a number, or a list of correct answers.
    pub answer: Option<Value>,
    /// All columns of the row.
    pub columns: Map<String, Value>,
    /// Its row in the file.
    pub place: read::RowPosition,
}

impl Prompt {
    /// The row that ends with `answer`: a conversation, or a prompt with its completion if the prompt is plain text.
    pub fn answered(&self, answer: &str) -> Sample {
        match &self.said {
            PromptContent::Text(text) => Sample::PromptCompletion {
                prompt: text.clone(),
                completion: answer.to_string(),
            },
            PromptContent::Chat { messages, tools } => {
                let mut messages = messages.clone();
                messages.push(chat::message("assistant", answer));
                Sample::Chat(Chat {
                    first_trained: messages.len() - 1,
                    messages,
                    tools: tools.clone(),
                    untrained: Vec::new(),
                })
            }
        }
    }
}

/// Limits of the length of a prompt and its answer, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptLimits {
    /// Most tokens of a prompt with its answer.
    pub window: usize,
    /// Tokens that a prompt must leave for the answer.
    pub answer: usize,
    /// A longer prompt: `Drop` leaves it out; otherwise it is an error.
    pub long: Long,
}

impl PromptLimits {
    /// True if the prompt leaves room for the answer; false: it is left out.
    ///
    /// # Errors
    /// It is too long, and `long` does not say that such prompts are left out.
    pub fn admit(self, prompt: &Prompt) -> Result<bool> {
        let fits = prompt.ids.len().saturating_add(self.answer) <= self.window;
        if fits || self.long == Long::Drop {
            Ok(fits)
        } else {
            Err(too_long(prompt, self))
        }
    }
}

/// The default settings of the program `ft`.
impl Default for PromptLimits {
    fn default() -> Self {
        Self {
            window: 2048,
            answer: 256,
            long: Long::Auto,
        }
    }
}

/// All prompts of the files.
#[derive(Debug, Clone, Default)]
pub struct Prompts {
    /// The prompts, in file order.
    pub rows: Vec<Prompt>,
    /// Origin of each prompt.
    pub origins: Vec<RowOrigin>,
    /// The sources of the prompts.
    pub shares: Vec<SourceShare>,
    /// Description of how each file was read.
    pub readings: Vec<ReadingReport>,
    /// Prompts that were left out because they are too long, and their tokens.
    pub dropped: (usize, u64),
    /// Hash of ids and columns.
    pub fingerprint: String,
}

/// The files with prompts, and how they are read.
#[derive(Clone, Copy)]
pub struct PromptSpec<'a> {
    /// The files with their columns, in order.
    pub sources: &'a [Source],
    /// How conversations become text.
    pub render: Render,
    /// Tokenizer and template.
    pub encoder: &'a Encoder<'a>,
    /// The column with the known answer.
    pub answer: &'a str,
    /// The limits of the length.
    pub limits: PromptLimits,
    /// Drops rows.
    pub screen: Option<&'a Screen>,
}

impl<'a> PromptSpec<'a> {
    /// The same for rows that are trained: files and options.
    pub(super) fn rows(&self) -> DatasetSpec<'a> {
        DatasetSpec {
            sources: self.sources,
            render: self.render,
            max_length: self.encoder.max_length,
            long: self.limits.long,
            overlap: 1,
            train_on: self.encoder.train_on,
            embedding_rows: self.encoder.embedding_rows,
            screen: self.screen,
        }
    }

    /// Reads all rows. Also returns how each file was read, with its index over all sources.
    pub(super) fn read(&self) -> Result<(Prompts, Vec<(usize, ReadingReport)>)> {
        let Self {
            sources,
            encoder,
            answer,
            limits,
            screen,
            ..
        } = *self;
        let mut out = Prompts {
            shares: source::shares(sources),
            ..Prompts::default()
        };
        let mut hasher = blake3::Hasher::new();
        let mut bad = BadRows::new();
        let rules = RenderRules {
            answer,
            ..self.rows().rules(encoder)
        };
        let readings = source::rows(
            sources,
            RowPurpose::Ask,
            &rules,
            screen,
            &mut bad,
            &mut |row, layout, origin, bad| {
                unless_stopped()?;
                let prompt = one(&row, layout, encoder, answer).map_err(|e| e.or_at(&row.place));
                let prompt = match prompt {
                    Ok(prompt) => prompt,
                    Err(e) => return bad.add(e),
                };
                match limits.admit(&prompt) {
                    Ok(true) => {}
                    Ok(false) => {
                        bad.good();
                        out.dropped.0 += 1;
                        out.dropped.1 += prompt.ids.len() as u64;
                        return Ok(());
                    }
                    Err(e) => return bad.add(e),
                }
                bad.good();
                prompt.ids.iter().for_each(|id| {
                    hasher.update(&id.to_le_bytes());
                });
                hasher.update(Value::Object(row.fields).to_string().as_bytes());
                out.rows.push(prompt);
                out.origins.push(origin);
                Ok(())
            },
        )?;
        bad.end()?;
        if out.rows.is_empty() {
            let names: Vec<&str> = sources.iter().map(|source| source.name.as_str()).collect();
            let found = match out.dropped.0 {
                0 => "0 rows".to_string(),
                n => format!("{n} rows, all of them too long"),
            };
            return Err(Error::format("the data has no rows").at(names.join(", ")).found(found));
        }
        out.fingerprint = hasher.finalize().to_hex().to_string();
        Ok((out, readings))
    }
}

impl Prompts {
    /// Reads all rows of these files.
    ///
    /// # Errors
    /// A row without a prompt (with its place), no rows, a prompt that leaves no space for the answer, a signal.
    pub fn load(spec: &PromptSpec) -> Result<Self> {
        let (out, readings) = spec.read()?;
        let readings = source::readings(readings);
        Ok(Self { readings, ..out })
    }

    /// As `load`; prompts of large files are tokenized once, and stored in `cache` with their columns.
    ///
    /// # Errors
    /// As for `load`; the cache cannot be written.
    pub fn load_cached(spec: &PromptSpec, cache: &TokenCache) -> Result<Self> {
        match cache.prompts(spec)? {
            Some(prompts) => Ok(prompts),
            None => Self::load(spec),
        }
    }
}

fn too_long(prompt: &Prompt, limits: PromptLimits) -> Error {
    Error::format("the prompt and its answer do not fit")
        .at(&prompt.place)
        .found(format!(
            "{} tokens, plus {} for the answer",
            prompt.ids.len(),
            limits.answer
        ))
        .expected(format!(
            "at most {} together (`data::DatasetSpec::max_length`, and the context length of the model)",
            limits.window
        ))
        .hint(
            "raise `data::DatasetSpec::max_length`, lower the limit of the answer, or leave such rows out with \
             `Long::Drop`",
        )
}

fn one(row: &Row, layout: &ColumnLayout, encoder: &Encoder, answer: &str) -> Result<Prompt> {
    let sample = match layout.format {
        RowFormat::Prompt => prompt(&row.fields, layout).map_err(|e| e.within(&row.place))?,
        _ => rows::unweighed(row, layout)?,
    };
    let none = || {
        Error::format("the row has no answer after its prompt")
            .expected("`prompt`, or a conversation with a question, or prompt and completion")
    };
    let (ids, written_answer) = asked(&sample, encoder)
        .map_err(|e| e.within(&row.place))?
        .ok_or_else(none)?;
    let is_excluded = matches!(&sample, Sample::Chat(chat) if chat.ends_untrained());
    let written = layout.prompt.as_deref().and_then(|name| row.fields.get(name));
    let is_text = written.is_some_and(|v| v.is_string() && !layout::is_turns(v));
    let said = match sample {
        Sample::PromptCompletion { prompt, .. } => PromptContent::Text(prompt),
        Sample::Chat(chat) => {
            let mut messages = chat.messages;
            if written_answer.is_some() {
                let last = messages.iter().rposition(|m| chat::role(m) == "assistant");
                messages.truncate(last.unwrap_or(0));
            }
            PromptContent::Chat {
                messages,
                tools: chat.tools,
            }
        }
        Sample::Text(_) => return Err(none()),
    };
    let column = row.fields.get(answer).or(row.rest.get(answer));
    let column = column.filter(|v| !v.is_null()).cloned();
    let column = match (&column, layout.after) {
        (Some(Value::String(text)), Some(mark)) => {
            let last = text.rsplit(mark).next().unwrap_or_default();
            Some(Value::String(last.trim().to_string()))
        }
        _ => column,
    };
    let known = match layout.format {
        RowFormat::Prompt => column,
        // An answer that the row excludes from the training is no correct one.
        _ => column.or(written_answer.filter(|_| !is_excluded).map(Value::String)),
    };
    if ids.is_empty() {
        return Err(Error::format("the prompt has no tokens").hint("give it some text to continue"));
    }
    Ok(Prompt {
        ids,
        shown: match &said {
            _ if is_text => Value::String(rows::prompt_text(&row.fields, layout)?),
            PromptContent::Text(text) => Value::String(text.clone()),
            PromptContent::Chat { messages, .. } => Value::Array(messages.clone()),
        },
        said,
        answer: known,
        columns: row.columns(),
        place: row.place.clone(),
    })
}

/// The tokens of the prompt, and the answer that follows it in the row, if there is one. `None`: the row has neither an
/// open question nor a text answer.
fn asked(sample: &Sample, encoder: &Encoder) -> Result<Option<(Vec<u32>, Option<String>)>> {
    if let Sample::Chat(chat) = sample
        && let Some("user" | "tool" | "function" | "ipython") = chat.messages.last().map(chat::role)
    {
        let ids = encoder.rendered(&chat.messages, chat.tools.as_ref(), true)?;
        encoder.check(&ids)?;
        return Ok(Some((ids, None)));
    }
    let asked = encoder.asked(sample)?;
    Ok(asked.map(|(ids, answer)| (ids, Some(answer))))
}

/// The prompt with a placeholder answer, which `Encoder::asked` removes again.
fn prompt(fields: &Map<String, Value>, layout: &ColumnLayout) -> Result<Sample> {
    const ANSWER: &str = "answer";
    let name = layout.prompt.as_deref().unwrap_or("prompt");
    let is_turns = match fields.get(name) {
        None | Some(Value::Null) => return Err(rows::missing(fields, name, RowFormat::Prompt)),
        Some(value) if layout::is_turns(value) => true,
        Some(Value::String(_)) => false,
        Some(other) => return Err(rows::wrong(other, name, "a text, or a list of messages")),
    };
    if !is_turns && !layout.renders() {
        rows::without_system(fields, layout)?;
        return Ok(Sample::PromptCompletion {
            prompt: rows::prompt_text(fields, layout)?,
            completion: ANSWER.to_string(),
        });
    }
    let mut messages = rows::prompt_turns(fields, layout)?;
    messages.push(chat::message("assistant", ANSWER));
    chat::check_order(&messages)?;
    Ok(Sample::Chat(Chat {
        first_trained: messages.len() - 1,
        messages,
        tools: rows::tools(fields)?,
        untrained: Vec::new(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Jinja, QWEN, Words, files};
    use crate::{ChatRender, TextCodec};
    use serde_json::json;

    /// The prompt of a row, and its text.
    fn read(row: &Value) -> Result<(Prompt, String)> {
        let (files, jinja, codec) = (
            files(&[("a.jsonl", &row.to_string())]),
            Jinja::new(QWEN),
            Words::chatml(),
        );
        let spec = DatasetSpec {
            sources: &files.sources,
            ..DatasetSpec::default()
        };
        let encoder = spec.encoder(&codec, Some(&jinja as &dyn ChatRender));
        let mut prompts = Prompts::load(&PromptSpec {
            sources: &files.sources,
            render: Render::Auto,
            encoder: &encoder,
            answer: "answer",
            limits: PromptLimits::default(),
            screen: None,
        })?;
        let prompt = prompts.rows.remove(0);
        let text = codec.decode(&prompt.ids)?;
        Ok((prompt, text))
    }

    fn message(role: &str, content: &str) -> Value {
        json!({"role": role, "content": content})
    }

    #[test]
    fn a_conversation_that_ends_with_a_question_is_the_prompt_and_the_column_has_its_answer() {
        let (question, answer) = (message("user", "1+1?"), message("assistant", "2"));
        let open = "<|im_start|>assistant\n";
        for (last, end) in [
            (message("user", "7*6?"), "<|im_start|>user\n7*6?<|im_end|>\n"),
            (
                message("tool", "42"),
                "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n",
            ),
        ] {
            let messages = json!([question, answer, last]);
            let (prompt, text) = read(&json!({"messages": messages, "answer": "42"})).unwrap();
            let first = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n";
            assert!(text.ends_with(&format!("{first}{end}{open}")), "{text}");
            assert_eq!((prompt.answer, prompt.shown), (Some(json!("42")), messages.clone()));
            // The answer of an earlier question is not the known answer.
            assert_eq!(read(&json!({"messages": messages})).unwrap().0.answer, None);
            let Sample::Chat(answered) = prompt_with(&messages).answered("a") else {
                panic!("a text");
            };
            assert_eq!((answered.messages.len(), answered.first_trained), (4, 3));
        }
        // A single question.
        let (prompt, text) = read(&json!({"messages": [question], "answer": "2"})).unwrap();
        assert!(text.ends_with(&format!("1+1?<|im_end|>\n{open}")), "{text}");
        assert_eq!(prompt.answer, Some(json!("2")));
        // A conversation with the answer.
        for (row, known) in [
            (json!({"messages": [question, answer]}), "2"),
            (json!({"messages": [question, answer], "answer": "two"}), "two"),
        ] {
            let (prompt, text) = read(&row).unwrap();
            assert!(text.ends_with(&format!("1+1?<|im_end|>\n{open}")), "{text}");
            assert_eq!((prompt.answer, prompt.shown), (Some(json!(known)), json!([question])));
        }
        // An answer that is not trained is not the known answer; the prompt and the column stay.
        let mut excluded = answer.clone();
        excluded["weight"] = json!(0);
        for (row, known) in [
            (json!({"messages": [question, excluded]}), None),
            (
                json!({"messages": [question, excluded], "answer": "two"}),
                Some(json!("two")),
            ),
        ] {
            let (prompt, text) = read(&row).unwrap();
            assert!(text.ends_with(&format!("1+1?<|im_end|>\n{open}")), "{text}");
            assert_eq!((prompt.answer, prompt.shown), (known, json!([question])));
        }
        // Weights of training are not checked.
        excluded["weight"] = json!(0.5);
        let (prompt, _) = read(&json!({"messages": [question, excluded]})).unwrap();
        assert_eq!(prompt.answer, Some(json!("2")));
        // No question at all.
        let e = read(&json!({"messages": [message("system", "s")]}))
            .unwrap_err()
            .to_string();
        assert!(e.contains("no answer after its prompt"), "{e}");
    }

    fn prompt_with(messages: &Value) -> Prompt {
        read(&json!({"messages": messages})).unwrap().0
    }
}
