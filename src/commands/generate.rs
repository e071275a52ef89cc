//! `ft generate`: continues a prompt, or answers in a chat.

use crate::base::{Error, Result, progress, signal};
use crate::commands::{export, named};
use crate::data::plain_prompt;
use crate::formats::Tokenizer;
use crate::generate::{
    CopyFormats, GenerateLimits, GenerateSettings, GenerateStats, KvDtype, QuantizedCopy, Request, SampledModel,
    Session,
};
use crate::model::Network;
use crate::quant::Format;
use crate::recipe::Dtype;
use crate::setup::ModelDir;
use crate::setup::vocabulary::TextChanges;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Sampling settings.
#[derive(Debug, Clone, Copy)]
pub struct SamplingSettings {
    pub max_new_tokens: usize,
    /// 0 means greedy decoding.
    pub temperature: f32,
    pub top_k: Option<usize>,
    pub top_p: Option<f32>,
    pub seed: u64,
}

/// How the model is loaded.
#[derive(Debug, Clone, Default)]
pub struct LoadSettings {
    /// `auto`, `cpu`, `cuda:0`.
    pub device: Option<String>,
    pub dtype: Option<Dtype>,
    /// Quantization format of the projections.
    pub weights: Option<Format>,
    pub kv_cache: Option<KvDtype>,
}

/// A loaded model with the conversation so far.
pub struct ChatWriter {
    model_dir: ModelDir,
    network: Network,
    /// Quantized copy that decodes instead of `network`.
    quantized: Option<QuantizedCopy>,
    settings: GenerateSettings,
    conversation: Vec<Value>,
    session: Session,
    /// The model that was used, if it differs from the given name.
    pub notes: Vec<String>,
}

/// A generated text.
pub struct GeneratedText {
    pub text: String,
    pub speed: GenerateStats,
    /// True if a signal stopped the generation.
    pub stopped: bool,
}

impl GeneratedText {
    /// The speed in tokens per second, as text.
    pub fn speed(&self) -> String {
        let s = &self.speed;
        let rate = |tokens: u64, seconds: f64| match tokens {
            0 => String::new(),
            _ => format!(", {:.1} tokens/s", tokens as f64 / seconds.max(1e-9)),
        };
        let known = match s.shared_tokens {
            0 => String::new(),
            n => format!(" ({n} more were cached)"),
        };
        format!(
            "prefill {} tokens{known}{}; decode {} tokens{}",
            s.prefill_tokens,
            rate(s.prefill_tokens, s.prefill_seconds),
            s.decode_tokens,
            rate(s.decode_tokens, s.decode_seconds),
        )
    }
}

impl ChatWriter {
    /// Opens `model`: a model directory, a hub id, an adapter directory, a run or a checkpoint. `template`: a Jinja
    /// file or a name that replaces the model's own template; `kwargs`: its variables. Errors: an invalid model, adapter or template.
    pub fn open(
        model: &str,
        adapter: Option<&Path>,
        template: Option<&str>,
        kwargs: Map<String, Value>,
        holding: &LoadSettings,
        choice: SamplingSettings,
    ) -> Result<Self> {
        let named = named::find(model, adapter)?;
        let changes = TextChanges {
            template: template.map(str::to_string),
            adapter_template: named.template.clone(),
            kwargs,
            adapters: named.adapter.iter().cloned().collect(),
            ..TextChanges::default()
        };
        let model_dir = ModelDir::open(&named.model, "main", &changes)?;
        let place = export::device(holding.device.as_deref())?;
        let network = model_dir.infer(named.adapter.as_deref(), holding.dtype, &place)?;
        let quantized = holding
            .weights
            .map(|w| QuantizedCopy::new(&network, CopyFormats::of(w)));
        let settings = GenerateSettings {
            max_new_tokens: choice.max_new_tokens,
            temperature: choice.temperature,
            top_k: choice.top_k,
            top_p: choice.top_p,
            seed: choice.seed,
            stop_ids: model_dir.tokenizer.stop_ids().to_vec(),
            limits: GenerateLimits {
                kv_cache: holding.kv_cache,
                // A GPU reads a long prompt faster in larger passes (docs/benchmarks-gpu.md).
                prefill_tokens: GenerateLimits::default().prefill_tokens * if place.is_cuda() { 4 } else { 1 },
                ..GenerateLimits::default()
            },
        };
        Ok(Self {
            notes: named.notes.clone(),
            model_dir,
            network,
            quantized: quantized.transpose()?,
            settings,
            conversation: Vec::new(),
            session: Session::default(),
        })
    }

    /// Continues `prompt`; `show` receives the text while it is generated.
    pub fn complete(&mut self, prompt: &str, show: &mut dyn FnMut(&str) -> Result<()>) -> Result<GeneratedText> {
        let ids = plain_prompt(&self.model_dir.tokenizer, prompt)?;
        if ids.is_empty() {
            return Err(Error::usage("the prompt has no tokens").at("--prompt"));
        }
        self.write(ids, show)
    }

    /// Adds a system message to the conversation.
    pub fn instruct(&mut self, system: &str) {
        self.conversation.push(json!({"role": "system", "content": system}));
    }

    /// Starts a new conversation; the system message stays.
    pub fn forget(&mut self) {
        self.conversation.retain(|message| message["role"] == "system");
    }

    /// Answers `message` in the conversation. If a signal stops the answer, the generated part is added to the
    /// conversation.
    pub fn reply(&mut self, message: &str, show: &mut dyn FnMut(&str) -> Result<()>) -> Result<GeneratedText> {
        let Some(template) = &self.model_dir.template else {
            return Err(Error::new("this model has no chat template")
                .at_path(&self.model_dir.dir)
                .hint("use `--prompt` without `--chat`"));
        };
        self.conversation.push(json!({"role": "user", "content": message}));
        let text = template.render(&self.conversation, None, true);
        let ids = text.and_then(|text| self.model_dir.tokenizer.encode(&text, false));
        let written = ids.and_then(|ids| self.room(ids.len()).map(|()| ids));
        let written = written.and_then(|ids| self.write(ids, show));
        match &written {
            Ok(w) => self.conversation.push(json!({"role": "assistant", "content": w.text})),
            // Removes the message, so that the conversation can continue.
            Err(_) => drop(self.conversation.pop()),
        }
        written
    }

    fn room(&self, tokens: usize) -> Result<()> {
        let most = self.network.spec.generated_positions();
        if tokens <= most {
            Ok(())
        } else {
            Err(
                Error::new("the conversation is longer than the context length of the model")
                    .found(format!("{tokens} tokens"))
                    .expected(format!("at most {most}"))
                    .hint("start a new conversation, or shorten the message"),
            )
        }
    }

    fn write(&mut self, prompt: Vec<u32>, show: &mut dyn FnMut(&str) -> Result<()>) -> Result<GeneratedText> {
        let tokenizer = &self.model_dir.tokenizer;
        let policy = match &self.quantized {
            Some(quantized) => quantized.into(),
            None => SampledModel::from(&self.network),
        };
        let mut stream = TextStream::new(tokenizer, &prompt);
        let mut text = String::new();
        let mut give = |new: String, text: &mut String| -> Result<()> {
            text.push_str(&new);
            if new.is_empty() { Ok(()) } else { show(&new) }
        };
        let mut phase = Some(progress::phase("reading the prompt", 0, ""));
        let request = Request { prompt, number: 0 };
        signal::answering(true);
        let result = self.session.answer(policy, &request, &self.settings, &mut |_, id| {
            // From here on the generated text shows the progress.
            phase = None;
            give(stream.push(id)?, &mut text)
        });
        let stopped = signal::answering(false);
        give(stream.pending()?, &mut text)?;
        let speed = match result {
            Ok((_, speed)) => speed,
            Err(_) if stopped => GenerateStats::default(),
            Err(e) => return Err(e),
        };
        Ok(GeneratedText { text, speed, stopped })
    }
}

/// Number of earlier tokens that are decoded again with a new one: the text of a token depends on the tokens before it
/// (leading spaces).
const CONTEXT: usize = 8;

/// Converts token ids to text in a stream. A character of several tokens is shown when it is complete.
struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The context, then the ids whose text was not returned yet.
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

    /// Text of the ids after the context.
    fn pending(&self) -> Result<String> {
        let all = self.tokenizer.decode(&self.ids, true)?;
        let before = self.tokenizer.decode(&self.ids[..self.context], true)?;
        match all.strip_prefix(&before) {
            Some(rest) => Ok(rest.to_string()),
            None => self.tokenizer.decode(&self.ids[self.context..], true),
        }
    }

    /// Adds a token and returns the text that can be shown now; may be empty.
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
