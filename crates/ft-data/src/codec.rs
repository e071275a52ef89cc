//! The interfaces of a tokenizer and of a chat template, so that tests can use their own.

use ft_base::Result;
use ft_formats::{ChatTemplate, Tokenizer};
use serde_json::Value;

pub use ft_formats::template::{RenderJob, RenderedChat};
pub use ft_formats::tokenizer::IdsAndOffsets;

/// Converts text to token ids and back.
pub trait TextCodec: Send + Sync {
    /// `add_special`: adds the special tokens that the tokenizer puts around a text.
    ///
    /// # Errors
    /// The tokenizer cannot convert the text.
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>>;

    /// The same ids, with byte ranges in `text`; a token without text has an empty range.
    ///
    /// # Errors
    /// As for `encode`.
    fn encode_with_offsets(&self, text: &str, add_special: bool) -> Result<IdsAndOffsets>;

    /// Text of the tokens, including special tokens.
    ///
    /// # Errors
    /// An id that the vocabulary does not have.
    fn decode(&self, ids: &[u32]) -> Result<String>;

    /// The id of the beginning-of-sequence token, if there is one.
    fn bos_id(&self) -> Option<u32>;

    /// The id of the end-of-sequence token, if there is one.
    fn eos_id(&self) -> Option<u32>;

    /// True for the id of a special token.
    fn is_special(&self, id: u32) -> bool;

    /// Number of ids in the vocabulary.
    fn vocab_size(&self) -> usize;

    /// Ids at which generation stops.
    fn stop_ids(&self) -> &[u32];

    /// A text that contains everything on which the ids depend. `None`: tokenized rows are not cached.
    fn identity(&self) -> Option<String> {
        None
    }
}

/// Renders a conversation to text.
pub trait ChatRender: Send + Sync {
    /// The text of a conversation. `messages`: objects with `role` and `content`.
    ///
    /// # Errors
    /// The template fails or refuses the conversation.
    fn render(&self, messages: &[Value], tools: Option<&Value>, add_generation_prompt: bool) -> Result<String>;

    /// As `render`, with the byte ranges printed by `{% generation %}` blocks. `None`: the template has no such block.
    ///
    /// # Errors
    /// As for `render`.
    fn render_marked(
        &self,
        _messages: &[Value],
        _tools: Option<&Value>,
        _add_generation_prompt: bool,
    ) -> Result<Option<RenderedChat>> {
        Ok(None)
    }

    /// Renders many conversations at once, for each request of each job. For `None` or a missing text use `render`.
    fn render_many(&self, _jobs: &[RenderJob]) -> Vec<Vec<Option<RenderedChat>>> {
        Vec::new()
    }

    /// No rendering follows for a while: idle workers may exit.
    fn rest(&self) {}

    /// A text that contains everything on which the texts depend. `None`: tokenized rows are not cached.
    fn identity(&self) -> Option<String> {
        None
    }
}

impl TextCodec for Tokenizer {
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        self.encode(text, add_special)
    }

    fn encode_with_offsets(&self, text: &str, add_special: bool) -> Result<IdsAndOffsets> {
        self.encode_with_offsets(text, add_special)
    }

    fn decode(&self, ids: &[u32]) -> Result<String> {
        self.decode(ids, false)
    }

    fn bos_id(&self) -> Option<u32> {
        self.bos_id()
    }

    fn eos_id(&self) -> Option<u32> {
        self.eos_id()
    }

    fn is_special(&self, id: u32) -> bool {
        self.is_special(id)
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size()
    }

    fn stop_ids(&self) -> &[u32] {
        self.stop_ids()
    }

    fn identity(&self) -> Option<String> {
        self.identity()
    }
}

impl ChatRender for ChatTemplate {
    fn render(&self, messages: &[Value], tools: Option<&Value>, add_generation_prompt: bool) -> Result<String> {
        self.render(messages, tools, add_generation_prompt)
    }

    fn render_marked(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<Option<RenderedChat>> {
        if self.marks_generation(tools) {
            self.render_marked(messages, tools, add_generation_prompt).map(Some)
        } else {
            Ok(None)
        }
    }

    fn render_many(&self, jobs: &[RenderJob]) -> Vec<Vec<Option<RenderedChat>>> {
        self.render_many(jobs)
    }

    fn rest(&self) {
        self.rest();
    }

    fn identity(&self) -> Option<String> {
        self.identity()
    }
}
