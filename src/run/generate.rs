//! `ft generate`: the continuation of a prompt, or a chat.

use super::named;
use super::setup::{Described, device};
use crate::base::{Error, Result, progress, signal};
use crate::formats::Tokenizer;
use crate::generate::{CodedCopy, Formats, Limits, Policy, Request, Session, Settings, Speed, Stored};
use crate::model::Network;
use crate::quant::Format;
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

/// How the model is held.
#[derive(Debug, Clone, Default)]
pub struct Holding {
    /// `auto`, `cpu`, `cuda:0`.
    pub device: Option<String>,
    pub dtype: Option<Dtype>,
    /// The projections as codes.
    pub weights: Option<Format>,
    pub kv_cache: Option<Stored>,
}

/// A model that writes, and what was said so far.
pub struct Writer {
    described: Described,
    network: Network,
    /// Decodes in place of `network`.
    coded: Option<CodedCopy>,
    settings: Settings,
    conversation: Vec<Value>,
    session: Session,
    /// Which model was taken, where that is not what was written.
    pub notes: Vec<String>,
}

/// What was written.
pub struct Written {
    pub text: String,
    pub speed: Speed,
    /// A signal ended it early.
    pub stopped: bool,
}

impl Written {
    /// Tokens per second, for a person.
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

impl Writer {
    /// `model` is a model directory, a hub id, an adapter directory, a run or a checkpoint; `template` a Jinja file in
    /// place of the model's own. Errors: what is wrong with them.
    pub fn open(
        model: &str,
        adapter: Option<&Path>,
        template: Option<&str>,
        holding: &Holding,
        choice: Choice,
    ) -> Result<Self> {
        let named = named::find(model, adapter)?;
        let template = template.map(str::to_string).or(named.template.clone());
        let described = Described::open(&named.model, "main", template.as_deref())?;
        let place = device(holding.device.as_deref().unwrap_or("auto"))?;
        let network = described.infer(named.adapter.as_deref(), holding.dtype, &place)?;
        let coded = holding.weights.map(|w| CodedCopy::new(&network, Formats::of(w)));
        let settings = Settings {
            max_new_tokens: choice.max_new_tokens,
            temperature: choice.temperature,
            top_k: choice.top_k,
            top_p: choice.top_p,
            seed: choice.seed,
            stop_ids: described.tokenizer.stop_ids().to_vec(),
            limits: Limits {
                kv_cache: holding.kv_cache,
                ..Limits::default()
            },
        };
        Ok(Self {
            notes: named.notes.clone(),
            described,
            network,
            coded: coded.transpose()?,
            settings,
            conversation: Vec::new(),
            session: Session::default(),
        })
    }

    /// Continues `prompt`; `show` gets the text as it is made.
    pub fn complete(&mut self, prompt: &str, show: &mut dyn FnMut(&str) -> Result<()>) -> Result<Written> {
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

    /// What the model is told before the first message.
    pub fn instruct(&mut self, system: &str) {
        self.conversation.push(json!({"role": "system", "content": system}));
    }

    /// A new conversation begins; what the model is told before the first message stays.
    pub fn forget(&mut self) {
        self.conversation.retain(|message| message["role"] == "system");
    }

    /// Answers `message` in the conversation. An answer that a signal ended belongs to it as far as it went.
    pub fn reply(&mut self, message: &str, show: &mut dyn FnMut(&str) -> Result<()>) -> Result<Written> {
        let Some(template) = &self.described.template else {
            return Err(Error::new("this model has no chat template")
                .at_path(&self.described.dir)
                .hint("use `--prompt` without `--chat`"));
        };
        self.conversation.push(json!({"role": "user", "content": message}));
        let text = template.render(&self.conversation, None, true);
        let ids = text.and_then(|text| self.described.tokenizer.encode(&text, false));
        let written = ids.and_then(|ids| self.room(ids.len()).map(|()| ids));
        let written = written.and_then(|ids| self.write(ids, show));
        match &written {
            Ok(w) => self.conversation.push(json!({"role": "assistant", "content": w.text})),
            // The turn is taken back: the conversation can go on.
            Err(_) => drop(self.conversation.pop()),
        }
        written
    }

    fn room(&self, tokens: usize) -> Result<()> {
        let most = self.network.spec.max_positions;
        match tokens <= most {
            true => Ok(()),
            false => Err(Error::new("the conversation is longer than the model's positions")
                .found(format!("{tokens} tokens"))
                .expected(format!("at most {most}"))
                .hint("begin a new one, or say this in fewer words")),
        }
    }

    fn write(&mut self, prompt: Vec<u32>, show: &mut dyn FnMut(&str) -> Result<()>) -> Result<Written> {
        let tokenizer = &self.described.tokenizer;
        let policy = match &self.coded {
            Some(coded) => coded.into(),
            None => Policy::from(&self.network),
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
            // From here on the text itself shows that something happens.
            phase = None;
            give(stream.push(id)?, &mut text)
        });
        let stopped = signal::answering(false);
        give(stream.pending()?, &mut text)?;
        let speed = match result {
            Ok((_, speed)) => speed,
            Err(_) if stopped => Speed::default(),
            Err(e) => return Err(e),
        };
        Ok(Written { text, speed, stopped })
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
