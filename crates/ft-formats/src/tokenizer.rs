//! The tokenizer of a model directory: text to ids and back, special tokens, stop ids.
//!
//! Some tokenizer classes build their own pipeline around the vocabulary of `tokenizer.json` (`rebuilt`); all other
//! files are used unchanged. `tokenizer.json` decides which tokens are added around a text, as in transformers 5:
//! `add_bos_token` and `add_eos_token` of `tokenizer_config.json` have no effect beside it (measured with 5.23, for
//! every tokenizer class and both values). Truncation and padding settings in `tokenizer.json` are not applied.

use crate::config::Config;
use crate::{header, index, read_json_object};
use ft_base::{Error, Result, catch_panic, files};
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::path::Path;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, ModelWrapper};

mod added;
mod growth;
mod rebuilt;
mod token_bytes;
mod vocabulary;
pub use added::{NewToken, write_files};
use rebuilt::TokenizerClass;
pub use vocabulary::{TextSplitting, TokenKind, Vocabulary};

/// Largest `tokenizer.json`, bytes.
const LIMIT: u64 = 512 << 20;

/// Token ids of a text, and for each token its byte range (start, end) in the text.
pub type IdsAndOffsets = (Vec<u32>, Vec<(usize, usize)>);

/// A special token named in the config.
#[derive(Debug, Clone, PartialEq)]
struct SpecialToken {
    text: String,
    id: Option<u32>,
}

/// A loaded tokenizer.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    config: Value,
    named: Vec<(&'static str, SpecialToken)>,
    special: HashSet<u32>,
    stop: Vec<u32>,
    size: usize,
    conflict: Option<String>,
    warning: Option<String>,
    /// Tokens that its files do not have.
    added: Vec<(u32, NewToken)>,
}

const ROLES: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
];

impl Tokenizer {
    /// Reads `tokenizer.json` of a model directory, and the special tokens from the configs beside it.
    ///
    /// # Errors
    /// No `tokenizer.json` (`NotFound`); a damaged file, one of a newer version of the tokenizer library, or one whose steps
    /// can make a text more than 10,000 times as long (`Format`); one that leaves out merges at random (`Unsupported`).
    pub fn load(dir: &Path) -> Result<Self> {
        Self::load_below(dir, usize::MAX)
    }

    /// As `load`, without the added tokens from id `first` on.
    ///
    /// # Errors
    /// As for `load`.
    pub fn load_below(dir: &Path, first: usize) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        let mut inner = read_tokenizer(dir, &path, first)?;
        let config = match optional(dir, "tokenizer_config.json")? {
            Some(map) => map,
            None => Map::new(),
        };
        let map = optional(dir, "special_tokens_map.json")?.unwrap_or_default();
        let warning = as_its_class(dir, &mut inner, &config)?;
        check_dropout(&path, &inner)?;
        add_listed(&mut inner, &config, first);
        let mut named = Vec::new();
        for role in ROLES {
            if let Some(text) = content(config.get(role)).or_else(|| content(map.get(role))) {
                named.push((role, text));
            }
        }
        // A token of the plain vocabulary that the config names as special is also split off as a whole.
        let specials: Vec<AddedToken> = named
            .iter()
            .filter(|(_, t)| is_plain(&inner, t))
            .map(|(_, t)| AddedToken::from(t.clone(), true).normalized(false))
            .collect();
        inner.add_special_tokens(specials).map_err(|e| {
            Error::format("cannot register the special tokens")
                .at_path(&path)
                .cause(e)
        })?;
        let mut special: HashSet<u32> = inner
            .get_added_tokens_decoder()
            .iter()
            .filter(|(_, t)| t.special)
            .map(|(id, _)| *id)
            .collect();
        let mut named: Vec<(&'static str, SpecialToken)> = named
            .into_iter()
            .map(|(role, text)| {
                let id = inner.token_to_id(&text);
                (role, SpecialToken { text, id })
            })
            .collect();
        special.extend(named.iter().filter_map(|(_, n)| n.id));
        let (generation, model) = (end_ids(dir, "generation_config.json")?, end_ids(dir, "config.json")?);
        let own: Vec<u32> = named
            .iter()
            .filter(|(role, _)| *role == "eos_token")
            .filter_map(|(_, n)| n.id)
            .collect();
        let said = [
            ("the tokenizer", own.as_slice()),
            ("generation_config.json", &generation),
            ("config.json", &model),
        ];
        let conflict = ends_disagree(&said, &|id| inner.id_to_token(id));
        if !named.iter().any(|(role, n)| *role == "eos_token" && n.id.is_some())
            && let Some((id, text)) = generation
                .iter()
                .chain(&model)
                .find_map(|&id| Some((id, inner.id_to_token(id)?)))
        {
            named.retain(|(role, _)| *role != "eos_token");
            named.push(("eos_token", SpecialToken { text, id: Some(id) }));
        }
        let own = named
            .iter()
            .filter(|(role, _)| *role == "eos_token")
            .filter_map(|(_, n)| n.id);
        let mut stop: Vec<u32> = Vec::new();
        for id in own.chain(generation).chain(model) {
            if !stop.contains(&id) {
                stop.push(id);
            }
        }
        let size = inner.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        Ok(Self {
            inner,
            config: Value::Object(config),
            named,
            special,
            stop,
            size,
            conflict,
            warning,
            added: Vec::new(),
        })
    }

    /// A text that contains everything on which ids and masks depend. `None`: the library cannot print the tokenizer.
    pub fn identity(&self) -> Option<String> {
        let named: Vec<String> = self.named.iter().map(|named| format!("{named:?}")).collect();
        let mut special: Vec<u32> = self.special.iter().copied().collect();
        special.sort_unstable();
        let inner = self.inner.to_string(false).ok()?;
        Some(format!("{} {special:?} {:?} {inner}", named.join(" "), self.stop))
    }

    /// A message for the user if the files of the model name different end tokens.
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }

    /// A warning if the end-of-sequence token of the tokenizer is not the one of the model's config.
    pub fn end_conflict(&self) -> Option<&str> {
        self.conflict.as_deref()
    }

    /// A tokenizer with one token per byte and an end-of-sequence token, for models without a tokenizer.
    ///
    /// # Errors
    /// None: its vocabulary is fixed.
    pub fn bytes() -> Result<Self> {
        let failed = |e: tokenizers::Error| Error::new("cannot create the byte-level tokenizer").cause(e);
        let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
        alphabet.sort_unstable();
        let vocab: Vec<(String, u32)> = alphabet.iter().map(char::to_string).zip(0..).collect();
        let vocab = <[(String, u32); 256]>::try_from(vocab);
        let vocab = vocab.map_err(|v| Error::format("the byte-level alphabet lacks a byte").found(v.len()))?;
        let model = BPE::builder()
            .vocab_and_merges(vocab, Vec::new())
            .build()
            .map_err(failed)?;
        let mut inner = tokenizers::Tokenizer::new(model);
        let level = ByteLevel::new(false, true, false);
        inner.with_pre_tokenizer(Some(level));
        inner.with_decoder(Some(level));
        let text = "<|endoftext|>".to_string();
        let special = AddedToken::from(text.clone(), true).normalized(false);
        inner.add_special_tokens([special]).map_err(failed)?;
        let id = inner.token_to_id(&text);
        Ok(Self {
            size: inner.get_vocab_size(true),
            inner,
            config: Value::Object(Map::new()),
            special: id.into_iter().collect(),
            stop: id.into_iter().collect(),
            named: vec![("eos_token", SpecialToken { text, id })],
            conflict: None,
            warning: None,
            added: Vec::new(),
        })
    }

    /// The ids of a text, with or without the added special tokens.
    ///
    /// # Errors
    /// The tokenizer cannot convert the text.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        // Without offsets, which cost a good part of the time.
        let found = self.inner.encode_fast(text, add_special_tokens);
        Ok(found.map_err(|e| failed(text, e))?.get_ids().to_vec())
    }

    /// The ids of a text and the byte range `start..end` of each token. An added token has `0..0`; a token inside a
    /// multi-byte character has the range of the whole character; some tokenizers exclude the space before a word.
    ///
    /// # Errors
    /// As for `encode`.
    pub fn encode_with_offsets(&self, text: &str, add_special_tokens: bool) -> Result<IdsAndOffsets> {
        let e = self.encoding(text, add_special_tokens)?;
        let offsets = e.get_offsets().iter().map(|range| whole_characters(text, *range));
        Ok((e.get_ids().to_vec(), offsets.collect()))
    }

    fn encoding(&self, text: &str, add_special_tokens: bool) -> Result<tokenizers::Encoding> {
        self.inner.encode(text, add_special_tokens).map_err(|e| failed(text, e))
    }

    /// Decodes ids to text.
    ///
    /// # Errors
    /// An id that the vocabulary does not have.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        self.inner
            .decode(ids, skip_special_tokens)
            .map_err(|e| Error::new("cannot turn token ids into text").cause(e))
    }

    /// Highest id + 1, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.size
    }

    fn named(&self, role: &str) -> Option<&SpecialToken> {
        self.named.iter().find(|(r, _)| *r == role).map(|(_, n)| n)
    }

    /// The id of the beginning-of-sequence token, if there is one.
    pub fn bos_id(&self) -> Option<u32> {
        self.named("bos_token")?.id
    }

    /// The id of the end-of-sequence token: that of the tokenizer, else the first `eos_token_id` of
    /// `generation_config.json` or `config.json` that the vocabulary has.
    pub fn eos_id(&self) -> Option<u32> {
        self.named("eos_token")?.id
    }

    /// The id of the padding token, if there is one.
    pub fn pad_id(&self) -> Option<u32> {
        self.named("pad_token")?.id
    }

    /// All named special tokens, as `("bos_token", "<s>")`.
    pub fn named_tokens(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.named.iter().map(|(role, n)| (*role, n.text.as_str()))
    }

    /// Ids that stop generation: the end-of-sequence token of the tokenizer, then the `eos_token_id` of
    /// `generation_config.json` and `config.json`.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop
    }

    /// True for the id of a special token.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// The id of this token, if the vocabulary has it.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The token with this id, as stored in the vocabulary.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// `tokenizer_config.json`; an empty object if it does not exist.
    pub fn config(&self) -> &Value {
        &self.config
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({} ids, stop {:?})", self.size, self.stop)
    }
}

/// The range with all of its characters: a post-processor that leaves out white space counts it in characters, and takes so many bytes
/// off the range.
fn whole_characters(text: &str, (start, end): (usize, usize)) -> (usize, usize) {
    let is_boundary = |at: &usize| text.is_char_boundary(*at);
    let start = (0..=start.min(text.len())).rev().find(is_boundary).unwrap_or(0);
    let end = (end..text.len()).find(is_boundary).unwrap_or(text.len());
    (start, end.max(start))
}

fn failed(text: &str, e: tokenizers::Error) -> Error {
    Error::new("cannot tokenize the text").found(clip(text)).cause(e)
}

fn read_tokenizer(dir: &Path, path: &Path, first: usize) -> Result<tokenizers::Tokenizer> {
    if !path.exists() {
        let error = Error::not_found("model directory has no `tokenizer.json`").at_path(dir);
        let old = [
            "tokenizer.model",
            "vocab.json",
            "vocab.txt",
            "spiece.model",
            "tekken.json",
        ];
        return Err(match old.iter().find(|n| dir.join(n).exists()) {
            Some(name) => error.found(format!("only `{name}`")).hint(
                "create one with transformers: `python -c \"from transformers import AutoTokenizer as T; \
                 T.from_pretrained('DIR').save_pretrained('DIR')\"`",
            ),
            None => {
                error.hint("the tokenizer files must be in the directory of the weights: download the complete model")
            }
        });
    }
    index::stays_inside(path)?;
    let bytes = files::size(path)?;
    if bytes > LIMIT {
        return Err(Error::format("`tokenizer.json` is too large")
            .at_path(path)
            .found(ft_base::units::bytes(bytes))
            .expected(format!("at most {}", ft_base::units::bytes(LIMIT))));
    }
    let text = files::read(path)?;
    if text.starts_with(b"version https://git-lfs") {
        return Err(header::lfs_pointer(path, bytes));
    }
    let text = match first {
        usize::MAX => text,
        first => added::without(path, first)?,
    };
    let bad = |cause: String| {
        Error::format("`tokenizer.json` cannot be read")
            .at_path(path)
            .cause(cause)
            .hint("the file is damaged or written by a newer `tokenizers`: download it again")
    };
    let steps = growth::Steps::read(&text).map_err(|e| bad(e.to_string()))?;
    steps.check(path)?;
    let mut inner = catch_panic(|| tokenizers::Tokenizer::from_bytes(&text))
        .ok_or_else(|| bad("the tokenizer library found a value that it does not support".into()))?
        .map_err(|e| bad(e.to_string()))?;
    inner.with_padding(None);
    inner.with_truncation(None).map_err(|e| bad(e.to_string()))?;
    if inner.get_vocab_size(true) == 0 {
        return Err(bad("the vocabulary is empty".into()));
    }
    Ok(inner)
}

/// Installs the pipeline of the tokenizer's class if transformers uses it instead of the file's.
fn as_its_class(dir: &Path, inner: &mut tokenizers::Tokenizer, config: &Map<String, Value>) -> Result<Option<String>> {
    let model = optional(dir, "config.json")?.unwrap_or_default();
    let text = |map: &Map<String, Value>, key: &str| map.get(key).and_then(Value::as_str).map(str::to_string);
    let declared = text(config, "tokenizer_class").or_else(|| text(&model, "tokenizer_class"));
    let written = [
        serde_json::to_string(&inner.get_normalizer()),
        serde_json::to_string(&inner.get_pre_tokenizer()),
        serde_json::to_string(&inner.get_decoder()),
        serde_json::to_string(&inner.get_post_processor()),
    ];
    let byte_level = written.iter().flatten().any(|part| part.contains("\"ByteLevel\""));
    let model_type = text(&model, "model_type");
    let Some(class) = TokenizerClass::of(declared.as_deref(), model_type.as_deref(), byte_level) else {
        return Ok(None);
    };
    let changed = rebuilt::rebuild(inner, class, config)?;
    let warning = || {
        format!(
            "{}: the tokenizer class {} splits text as in transformers 5, which differs from `tokenizer.json`; a \
             model that was trained with `tokenizer.json`, also by earlier versions of ft, gets other tokens",
            dir.display(),
            class.name()
        )
    };
    Ok(changed.then(warning))
}

/// Errors: BPE dropout, with which the library leaves out merges at random in every call. Caches, token counts and a resumed run
/// need the same tokens each time. The other random choice of the library, a sample of the pieces of `Unigram`, is not read from
/// a file.
fn check_dropout(path: &Path, inner: &tokenizers::Tokenizer) -> Result<()> {
    match inner.get_model() {
        ModelWrapper::BPE(BPE { dropout: Some(p), .. }) if *p != 0.0 => Err(Error::unsupported(
            "BPE `dropout` in `tokenizer.json` skips merges at random, so the same text gets different tokens each time",
        )
        .at_path(path)
        .found(p)
        .expected("null or 0")
        .hint(
            "set `dropout` in the part `model` of this file to null: it is only for pretraining",
        )),
        _ => Ok(()),
    }
}

fn optional(dir: &Path, name: &str) -> Result<Option<Map<String, Value>>> {
    let path = dir.join(name);
    if path.exists() {
        read_json_object(&path).map(Some)
    } else {
        Ok(None)
    }
}

/// The text of a token given as a string or as an object with `content`.
fn content(value: Option<&Value>) -> Option<String> {
    let text = match value? {
        Value::String(s) => s,
        Value::Object(o) => o.get("content")?.as_str()?,
        _ => return None,
    };
    (!text.is_empty()).then(|| text.to_string())
}

/// True if the token is in the vocabulary, but not an added token.
fn is_plain(inner: &tokenizers::Tokenizer, token: &str) -> bool {
    inner.token_to_id(token).is_some() && !inner.get_added_vocabulary().get_vocab().contains_key(token)
}

/// Adds the tokens of `added_tokens_decoder` that `tokenizer.json` lacks, if their ids fit.
fn add_listed(inner: &mut tokenizers::Tokenizer, config: &Map<String, Value>, first: usize) {
    let Some(Value::Object(listed)) = config.get("added_tokens_decoder") else {
        return;
    };
    let mut sorted: Vec<(u32, &Value)> = listed
        .iter()
        .filter_map(|(id, v)| Some((id.parse().ok()?, v)))
        .filter(|(id, _): &(u32, _)| (*id as usize) < first)
        .collect();
    sorted.sort_by_key(|(id, _)| *id);
    for (id, value) in sorted {
        let Some(text) = content(Some(value)) else { continue };
        let fits = match inner.token_to_id(&text) {
            Some(known) => known == id && is_plain(inner, &text),
            // `get_vocab_size` counts all added tokens: call it only if necessary.
            None => id as usize == inner.get_vocab_size(true),
        };
        if !fits {
            continue;
        }
        let flag = |key: &str| value.get(key).and_then(Value::as_bool).unwrap_or(false);
        let token = AddedToken::from(text, flag("special"))
            .single_word(flag("single_word"))
            .lstrip(flag("lstrip"))
            .rstrip(flag("rstrip"))
            .normalized(flag("normalized"));
        // Fails only if a normalizer fails on the token, which then stays ordinary text.
        let _ = inner.add_tokens([token]);
    }
}

/// `eos_token_id` of a config file.
fn end_ids(dir: &Path, name: &str) -> Result<Vec<u32>> {
    match optional(dir, name)? {
        Some(raw) => Config::from_map(raw, &dir.join(name)).token_ids("eos_token_id"),
        None => Ok(Vec::new()),
    }
}

/// Returns a message if a file lacks the first end token of the first file that has end tokens.
fn ends_disagree(said: &[(&str, &[u32])], token: &dyn Fn(u32) -> Option<String>) -> Option<String> {
    let mut said = said.iter().filter(|(_, ids)| !ids.is_empty());
    let (first, taken) = said.next()?;
    let others: Vec<_> = said.filter(|(_, ids)| !ids.contains(&taken[0])).collect();
    if others.is_empty() {
        return None;
    }
    let show = |ids: &[u32]| -> String {
        let one = |id: &u32| match token(*id) {
            Some(text) => format!("{id} {}", clip(&text)),
            None => format!("{id}, which is no token"),
        };
        ids.iter().map(one).collect::<Vec<_>>().join(" or ")
    };
    let others: Vec<String> = others
        .iter()
        .map(|(file, ids)| format!("{file} has {}", show(ids)))
        .collect();
    Some(format!(
        "the files of the model have different end tokens: {first} has {}, {}; rows end with the first, answers with \
         any of them: change the files if this is not intended",
        show(&taken[..1]),
        others.join(", ")
    ))
}

fn clip(text: &str) -> String {
    let short: String = text.chars().take(80).collect();
    if short.len() < text.len() {
        format!("{short:?}...")
    } else {
        format!("{short:?}")
    }
}

#[cfg(test)]
mod tests;
