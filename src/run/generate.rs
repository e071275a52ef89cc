//! `ft generate`: the continuation of a prompt, or a chat.

use super::setup::{Described, device};
use crate::base::{Error, Result};
use crate::formats::Tokenizer;
use crate::generate::{Settings, generate};
use crate::model::Network;
use crate::recipe::Dtype;
use serde_json::{Value, json};
use std::path::Path;

/// How tokens are chosen.
#[derive(Debug, Clone, Copy)]
pub struct Choice {
    pub max_new_tokens: usize,
    /// 0 is greedy.
    pub temperature: f32,
    pub top_k: Option<usize>,
    pub top_p: Option<f32>,
    pub seed: u64,
}

/// A model that writes, and what was said so far.
pub struct Writer {
    described: Described,
    network: Network,
    choice: Choice,
    conversation: Vec<Value>,
}

impl Writer {
    pub fn open(model: &str, adapter: Option<&Path>, dtype: Option<Dtype>, choice: Choice) -> Result<Self> {
        let described = Described::open(model, "main", None)?;
        let network = described.infer(adapter, dtype, &device("auto")?)?;
        Ok(Self {
            described,
            network,
            choice,
            conversation: Vec::new(),
        })
    }

    /// Continues `prompt`; `show` gets the text as it is made.
    pub fn complete(&self, prompt: &str, show: &mut dyn FnMut(&str) -> Result<()>) -> Result<String> {
        let tokenizer = &self.described.tokenizer;
        let mut ids = tokenizer.encode(prompt, true)?;
        // A tokenizer that ends every text must not end a prompt.
        while ids.len() > 1 && ids.last().copied() == tokenizer.eos_id() {
            ids.pop();
        }
        if ids.is_empty() {
            return Err(Error::usage("the prompt has no tokens").at("--prompt"));
        }
        self.write(ids, show)
    }

    /// Answers `message` in the conversation.
    pub fn reply(&mut self, message: &str, show: &mut dyn FnMut(&str) -> Result<()>) -> Result<String> {
        let Some(template) = &self.described.template else {
            return Err(Error::new("this model has no chat template")
                .at_path(&self.described.dir)
                .hint("use `--prompt` without `--chat`"));
        };
        self.conversation.push(json!({"role": "user", "content": message}));
        let text = template.render(&self.conversation, None, true);
        let ids = text.and_then(|text| self.described.tokenizer.encode(&text, false));
        let answer = ids.and_then(|ids| self.write(ids, show));
        match &answer {
            Ok(text) => self.conversation.push(json!({"role": "assistant", "content": text})),
            // The turn is taken back: the conversation can go on.
            Err(_) => drop(self.conversation.pop()),
        }
        answer
    }

    fn write(&self, prompt: Vec<u32>, show: &mut dyn FnMut(&str) -> Result<()>) -> Result<String> {
        let tokenizer = &self.described.tokenizer;
        let settings = Settings {
            max_new_tokens: self.choice.max_new_tokens,
            temperature: self.choice.temperature,
            top_k: self.choice.top_k,
            top_p: self.choice.top_p,
            seed: self.choice.seed,
            stop_ids: tokenizer.stop_ids().to_vec(),
        };
        let mut stream = TextStream::new(tokenizer, &prompt);
        let mut whole = String::new();
        let mut give = |text: String, whole: &mut String| -> Result<()> {
            whole.push_str(&text);
            if text.is_empty() { Ok(()) } else { show(&text) }
        };
        generate(&self.network, &[prompt], &settings, &mut |_, id| {
            give(stream.push(id)?, &mut whole)
        })?;
        give(stream.pending()?, &mut whole)?;
        Ok(whole)
    }
}

/// Tokens of context that are decoded again with a new one: how a token reads depends on those before it
/// (leading spaces).
const CONTEXT: usize = 8;

/// Token ids to text while they come. A character of several tokens is held back until it is whole.
struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Context, then ids whose text was not given yet.
    ids: Vec<u32>,
    context: usize,
}

impl<'a> TextStream<'a> {
    fn new(tokenizer: &'a Tokenizer, before: &[u32]) -> Self {
        let ids = before[before.len().saturating_sub(CONTEXT)..].to_vec();
        Self {
            tokenizer,
            context: ids.len(),
            ids,
        }
    }

    /// Text of the ids behind the context.
    fn pending(&self) -> Result<String> {
        let all = self.tokenizer.decode(&self.ids, true)?;
        let before = self.tokenizer.decode(&self.ids[..self.context], true)?;
        match all.strip_prefix(&before) {
            Some(rest) => Ok(rest.to_string()),
            None => self.tokenizer.decode(&self.ids[self.context..], true),
        }
    }

    /// What can be shown after one more token; may be empty.
    fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = self.pending()?;
        if text.is_empty() || text.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        self.ids.drain(..self.ids.len().saturating_sub(CONTEXT));
        self.context = self.ids.len();
        Ok(text)
    }
}
