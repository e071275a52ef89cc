//! A small tokenizer and small templates for the tests of this module.

use super::codec::{ChatRender, IdsAndOffsets, TextCodec};
use super::layout::{ColumnLayout, RenderRules, RowPurpose};
use super::read::{Row, RowPosition};
use super::rows::{self, Sample};
use super::source::Source;
use crate::{DatasetSpec, Long, Render, RowFormat, TrainOn};
use ft_base::Result;
use ft_formats::{ChatTemplate, Tokenizer};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The golden files of the parity tests: tokenizers, and rows with their expected ids and masks.
pub(crate) fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/goldens")
}

/// A row at line 3 of `t.jsonl`.
pub(crate) fn row(value: Value) -> Row {
    Row {
        fields: value.as_object().unwrap().clone(),
        place: RowPosition {
            file: "t.jsonl".into(),
            number: 3,
            is_line: true,
        },
        rest: serde_json::Map::new(),
    }
}

/// The layout of a row without a chat template.
pub(crate) fn layout(row: &Row, format: RowFormat, purpose: RowPurpose) -> Result<ColumnLayout> {
    let rules = RenderRules {
        render: Render::Auto,
        template: None,
        codec: &Words::chatml(),
        answer: "answer",
    };
    ColumnLayout::find(row, format, purpose, &rules)
}

/// Interprets a row for training, read as `format`.
pub(crate) fn understand(row: &Row, format: RowFormat) -> Result<Sample> {
    rows::understand(row, &layout(row, format, RowPurpose::Learn)?)
}

/// Temporary files of rows, removed when this is dropped.
pub(crate) struct Files {
    _dir: tempfile::TempDir,
    pub paths: Vec<String>,
    /// All files as one source.
    pub sources: Vec<Source>,
}

/// Rows of at most 16 tokens; longer texts are split.
pub(crate) fn short_rows(files: &Files) -> DatasetSpec<'_> {
    DatasetSpec {
        sources: &files.sources,
        render: Render::Auto,
        max_length: 16,
        long: Long::Auto,
        overlap: 1,
        train_on: TrainOn::Assistant,
        embedding_rows: 1 << 20,
        screen: None,
    }
}

impl Files {
    /// The rows have this format.
    pub(crate) fn read_as(mut self, format: RowFormat) -> Self {
        self.sources[0].format = format;
        self
    }
}

pub(crate) fn files(contents: &[(&str, &str)]) -> Files {
    let dir = tempfile::tempdir().unwrap();
    let mut paths = Vec::new();
    for (name, text) in contents {
        let path = dir.path().join(name);
        ft_base::files::write_atomic(&path, text.as_bytes()).unwrap();
        paths.push(path.to_str().unwrap().to_string());
    }
    Files {
        _dir: dir,
        sources: vec![Source::new(paths.clone())],
        paths,
    }
}

/// A byte-level tokenizer like those of real models.
pub(crate) fn real() -> Tokenizer {
    Tokenizer::load(&goldens().join("tokenizers/chat")).unwrap()
}

/// Tokens are words (with the space before them), runs of line breaks, and single characters, numbered in order of use.
pub(crate) struct Words {
    specials: Vec<&'static str>,
    bos: Option<&'static str>,
    eos: Option<&'static str>,
    /// Adds BOS before a text if special tokens are requested.
    pub adds_bos: bool,
    /// Adds EOS after a text if special tokens are requested.
    pub adds_eos: bool,
    table: Mutex<Vec<String>>,
    pub stops: Vec<u32>,
}

impl Words {
    pub(crate) fn new(specials: &[&'static str], bos: Option<&'static str>, eos: Option<&'static str>) -> Self {
        let table: Vec<String> = specials.iter().map(|s| s.to_string()).collect();
        Self {
            specials: specials.to_vec(),
            bos,
            eos,
            adds_bos: bos.is_some(),
            adds_eos: false,
            table: Mutex::new(table),
            stops: Vec::new(),
        }
    }

    pub(crate) fn chatml() -> Self {
        Self::new(
            &["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            None,
            Some("<|im_end|>"),
        )
    }

    pub(crate) fn id(&self, token: &str) -> u32 {
        let mut table = self.table.lock().unwrap();
        let found = table.iter().position(|t| t == token);
        found.unwrap_or_else(|| {
            table.push(token.to_string());
            table.len() - 1
        }) as u32
    }

    pub(crate) fn tokens(&self, ids: &[u32]) -> Vec<String> {
        let table = self.table.lock().unwrap();
        ids.iter().map(|&id| table[id as usize].clone()).collect()
    }

    /// Length of the first token of `text`.
    fn first(&self, text: &str) -> usize {
        if let Some(special) = self.specials.iter().find(|s| text.starts_with(**s)) {
            return special.len();
        }
        let run = |from: usize, f: fn(char) -> bool| text[from..].find(|c| !f(c)).map_or(text.len(), |i| from + i);
        let space = usize::from(text.starts_with(' '));
        let word = run(space, char::is_alphanumeric);
        match (word > space, text.starts_with('\n')) {
            (true, _) => word,
            (_, true) => run(0, |c| c == '\n'),
            _ => text.chars().next().map_or(0, char::len_utf8),
        }
    }
}

impl TextCodec for Words {
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        Ok(self.encode_with_offsets(text, add_special)?.0)
    }

    fn encode_with_offsets(&self, text: &str, add_special: bool) -> Result<IdsAndOffsets> {
        let (mut ids, mut offsets) = (Vec::new(), Vec::new());
        let add = |token: Option<&str>, ids: &mut Vec<u32>, offsets: &mut Vec<(usize, usize)>| {
            if let Some(token) = token {
                ids.push(self.id(token));
                offsets.push((0, 0));
            }
        };
        if add_special && self.adds_bos {
            add(self.bos, &mut ids, &mut offsets);
        }
        let mut at = 0;
        while at < text.len() {
            let n = self.first(&text[at..]);
            ids.push(self.id(&text[at..at + n]));
            offsets.push((at, at + n));
            at += n;
        }
        if add_special && self.adds_eos {
            add(self.eos, &mut ids, &mut offsets);
        }
        Ok((ids, offsets))
    }

    fn decode(&self, ids: &[u32]) -> Result<String> {
        Ok(self.tokens(ids).concat())
    }

    fn bos_id(&self) -> Option<u32> {
        self.bos.map(|t| self.id(t))
    }

    fn eos_id(&self) -> Option<u32> {
        self.eos.map(|t| self.id(t))
    }

    fn is_special(&self, id: u32) -> bool {
        (id as usize) < self.specials.len()
    }

    fn vocab_size(&self) -> usize {
        self.table.lock().unwrap().len()
    }

    fn stop_ids(&self) -> &[u32] {
        &self.stops
    }
}

/// A template with its special tokens, without a tokenizer.
pub(crate) struct Jinja(ChatTemplate);

impl Jinja {
    pub(crate) fn new(source: &'static str) -> Self {
        let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
        let tokens = tokens.map(|(name, text)| (name.to_string(), Value::from(text)));
        Self(ChatTemplate::with_tokens(source, "chat", tokens.into_iter().collect()).unwrap())
    }
}

impl ChatRender for Jinja {
    fn render(&self, messages: &[Value], tools: Option<&Value>, add_generation_prompt: bool) -> Result<String> {
        self.0.render(messages, tools, add_generation_prompt)
    }
}

/// ChatML with a default system prompt; tool calls after the content.
pub(crate) const QWEN: &str = r#"{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}
{% for m in messages %}
{% if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}
{{ '<|im_start|>' + m.role + '\n' }}{% if m.content %}{{ m.content }}{% endif %}
{% for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}
{{ '<|im_end|>\n' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"#;

/// Removes the thinking of earlier turns; keeps that of the last turn.
pub(crate) const QWEN_THINKING: &str = r#"{% set ns = namespace(last=0) %}
{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{% for m in messages %}
{% set content = m.content %}
{% if m.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
{% set content = content.split('</think>')[-1].lstrip('\n') %}
{% endif %}
{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"#;

/// The generation prompt opens the thinking, the history has none.
pub(crate) const OPENS_THINKING: &str = r#"{% for m in messages %}
{% set content = m.content.split('</think>')[-1] if m.role == 'assistant' else m.content %}
{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"#;

pub(crate) const LLAMA3: &str = r#"{{ '<s>' }}{% for m in messages %}
{{ '<|start|>' + m.role + '<|end|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"#;

pub(crate) const GEMMA: &str = r#"{{ '<s>' }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for m in messages %}
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}
{{ '<|turn|>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<|turn_end|>\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|turn|>model\n' }}{% endif %}"#;

/// Has no generation prompt.
pub(crate) const MISTRAL: &str = r#"{{ '<s>' }}{% for m in messages %}
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}
{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}
{% endfor %}"#;

/// ChatML that ignores `add_generation_prompt`.
pub(crate) const NO_PROMPT: &str =
    r#"{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"#;

/// Refuses a conversation that ends with a user, and ends the last turn differently from the others.
pub(crate) const PICKY: &str = r#"{% if messages[-1].role == 'user' %}{{ raise_exception('must end with assistant') }}{% endif %}
{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% if loop.last %}{{ '<|endoftext|>' }}{% else %}{{ '\n' }}{% endif %}{% endfor %}"#;

/// Plain words, no special token after a turn.
pub(crate) const PLAIN: &str = r#"{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}
{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"#;

/// Does not print the messages.
pub(crate) const MUTE: &str = r#"{{ messages | length }} messages"#;
