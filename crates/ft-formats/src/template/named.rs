//! Chat templates that ft has by name, for models without one.

use super::ChatTemplate;
use crate::Tokenizer;
use ft_base::Result;

/// A template by name.
#[derive(Debug)]
pub struct NamedTemplate {
    /// The name that a user writes.
    pub name: &'static str,
    source: &'static str,
    /// Markers that should be single tokens; the first one ends a turn.
    pub markers: &'static [&'static str],
}

macro_rules! named {
    ($($name:literal: $($marker:literal)*;)+) => {
        /// Every template that has a name.
        pub const NAMED: &[NamedTemplate] = &[$(NamedTemplate {
            name: $name,
            source: include_str!(concat!("named/", $name, ".jinja")),
            markers: &[$($marker),*],
        }),+];
    };
}
named! {
    "chatml": "<|im_end|>" "<|im_start|>";
    "qwen2.5": "<|im_end|>" "<|im_start|>";
    "qwen3": "<|im_end|>" "<|im_start|>";
    "llama3": "<|eot_id|>" "<|start_header_id|>" "<|end_header_id|>";
    "llama3.1": "<|eot_id|>" "<|start_header_id|>" "<|end_header_id|>";
    "gemma": "<end_of_turn>" "<start_of_turn>";
    "phi3": "<|end|>" "<|user|>" "<|assistant|>" "<|system|>";
    "phi4": "<|im_end|>" "<|im_start|>" "<|im_sep|>";
    "mistral":;
    "zephyr":;
    "alpaca":;
}

/// The template with this name; `_` and `-` may stand for `.` or be left out.
pub fn find(name: &str) -> Option<&'static NamedTemplate> {
    let plain = |name: &str| name.to_ascii_lowercase().replace(['.', '_', '-'], "");
    let wanted = plain(name);
    // A path is never a name.
    let bare = !name.contains(['/', '\\']) && !name.ends_with(".jinja");
    NAMED.iter().find(|t| bare && plain(t.name) == wanted)
}

impl NamedTemplate {
    /// The template for a tokenizer.
    ///
    /// # Errors
    /// None that depends on the tokenizer: the texts are tested.
    pub fn template(&self, tokenizer: &Tokenizer) -> Result<ChatTemplate> {
        ChatTemplate::from_text(self.source.trim_end(), self.name, tokenizer)
    }

    /// Markers that this tokenizer splits into pieces.
    pub fn missing(&self, tokenizer: &Tokenizer) -> Vec<&'static str> {
        let single = |marker: &&&'static str| tokenizer.token_to_id(marker).is_none();
        self.markers.iter().filter(single).copied().collect()
    }

    /// The token that ends a turn, if this tokenizer has it.
    pub fn turn_end(&self, tokenizer: &Tokenizer) -> Option<u32> {
        tokenizer.token_to_id(self.markers.first()?)
    }
}
