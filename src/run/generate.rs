//! `ft generate`: the continuation of a prompt, or a chat.

use super::setup::{Described, device};
use crate::base::{Error, Result};
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
        let ids = self.described.tokenizer.encode(prompt, true)?;
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
        let text = template.render(&self.conversation, None, true)?;
        let answer = self.write(self.described.tokenizer.encode(&text, false)?, show)?;
        self.conversation.push(json!({"role": "assistant", "content": answer}));
        Ok(answer)
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
        // A continuation depends on what is before it (leading spaces, split characters), so the text of
        // prompt and answer is decoded together and shown only as far as it is whole.
        let before = tokenizer.decode(&prompt, true)?;
        let mut ids = prompt.clone();
        let mut shown = before.len();
        generate(&self.network, &[prompt], &settings, &mut |_, id| {
            ids.push(id);
            let text = tokenizer.decode(&ids, true)?;
            if !text.ends_with('\u{fffd}') && text.len() > shown && text.is_char_boundary(shown) {
                show(&text[shown..])?;
                shown = text.len();
            }
            Ok(())
        })?;
        let text = tokenizer.decode(&ids, true)?;
        if text.len() > shown && text.is_char_boundary(shown) {
            show(&text[shown..])?;
        }
        Ok(text.get(before.len()..).unwrap_or_default().to_string())
    }
}
