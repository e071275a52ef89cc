//! Rebuilds a tokenizer as transformers 5 does if its class builds its own pipeline: vocabulary, merges, added tokens
//! and post-processor are those of `tokenizer.json`; normalizer, pre-tokenizer, decoder and model flags are those of
//! the class. `tokenizer_config.json` and `config.json` determine the class. A golden file from transformers 5.23 tests
//! this.
//!
//! Other classes with their own pipeline belong to unsupported models: their file is used unchanged.

use super::content;
use ft_base::{Error, Result};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use tokenizers::{DecoderWrapper, ModelWrapper, NormalizerWrapper, PreTokenizerWrapper, Tokenizer};

/// Pre-tokenizer pattern of Qwen2: contractions, words, single digits, punctuation, line breaks, spaces.
pub(super) const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// That of Qwen3.5: combining marks belong to words.
pub(super) const QWEN3_5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Tokenizer classes that build their own pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenizerClass {
    Llama,
    CodeLlama,
    Gemma,
    Qwen2,
    Qwen3_5,
    Gpt2,
    GptNeox,
}

impl TokenizerClass {
    fn named(name: &str) -> Option<Self> {
        Some(match name.strip_suffix("Fast").unwrap_or(name) {
            "LlamaTokenizer" => Self::Llama,
            "CodeLlamaTokenizer" => Self::CodeLlama,
            "GemmaTokenizer" => Self::Gemma,
            "Qwen2Tokenizer" => Self::Qwen2,
            "Qwen3_5Tokenizer" => Self::Qwen3_5,
            "GPT2Tokenizer" => Self::Gpt2,
            "GPTNeoXTokenizer" => Self::GptNeox,
            _ => return None,
        })
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Llama => "LlamaTokenizer",
            Self::CodeLlama => "CodeLlamaTokenizer",
            Self::Gemma => "GemmaTokenizer",
            Self::Qwen2 => "Qwen2Tokenizer",
            Self::Qwen3_5 => "Qwen3_5Tokenizer",
            Self::Gpt2 => "GPT2Tokenizer",
            Self::GptNeox => "GPTNeoXTokenizer",
        }
    }

    /// The class that transformers uses for a model directory; `None`: the file is used unchanged. `declared` is
    /// `tokenizer_class` of `tokenizer_config.json`, else of `config.json`; `byte_level`: the file contains
    /// `ByteLevel`.
    pub(super) fn of(declared: Option<&str>, model_type: Option<&str>, byte_level: bool) -> Option<Self> {
        let declared_class = declared.and_then(Self::named);
        match model_type {
            // The class declared in their configs is known to be wrong.
            Some("qwen2") => Some(Self::Qwen2),
            Some("qwen3_5" | "qwen3_5_moe" | "qwen3_5_moe_text") => Some(Self::Qwen3_5),
            Some(
                "ernie4_5" | "hyperclovax" | "internlm3" | "iquestcoder" | "minicpm3" | "mistral" | "nemotron" | "phi3",
            ) => None,
            _ if declared_class == Some(Self::Llama) && byte_level => None,
            Some("qwen3" | "qwen3_next") if declared.is_none() => Some(Self::Qwen2),
            Some("qwen3_5_text") if declared.is_none() => Some(Self::Qwen3_5),
            Some("jais2") if declared.is_none() => Some(Self::Gpt2),
            Some("gemma" | "gemma2" | "gemma3" | "gemma3_text" | "gemma3n" | "gemma3n_text") if declared.is_none() => {
                Some(Self::Gemma)
            }
            _ => declared_class,
        }
    }
}

/// The parts that a class defines, in the form of `tokenizer.json`.
struct Pipeline {
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    unk_token: Option<String>,
    affixes: Option<String>,
    fuse_unk: bool,
    byte_fallback: bool,
}

/// Replaces the pipeline of `inner` (normalizer, pre-tokenizer, decoder) by the one that this tokenizer class of transformers
/// builds. Returns true if this changes how text is split.
///
/// Errors: a part that the crate `tokenizers` refuses.
pub(super) fn rebuild(inner: &mut Tokenizer, class: TokenizerClass, config: &Map<String, Value>) -> Result<bool> {
    let ModelWrapper::BPE(bpe) = inner.get_model() else {
        // The file has another model type than the class builds.
        return Ok(false);
    };
    let want = pipeline(class, config);
    let mut model = None;
    let flags = (&bpe.unk_token, bpe.fuse_unk, bpe.byte_fallback, bpe.ignore_merges);
    let affix = |own: &Option<String>| own.as_deref().unwrap_or("") == want.affixes.as_deref().unwrap_or("");
    let affixes = affix(&bpe.continuing_subword_prefix) && affix(&bpe.end_of_word_suffix);
    if flags != (&want.unk_token, want.fuse_unk, want.byte_fallback, false) || bpe.dropout.is_some() || !affixes {
        let mut new = bpe.clone();
        new.unk_token = want.unk_token.clone();
        new.fuse_unk = want.fuse_unk;
        new.byte_fallback = want.byte_fallback;
        new.ignore_merges = false;
        new.dropout = None;
        new.continuing_subword_prefix = want.affixes.clone();
        new.end_of_word_suffix = want.affixes.clone();
        model = Some(new);
    }
    let splits = [
        differs(inner.get_normalizer(), &want.normalizer),
        differs(inner.get_pre_tokenizer(), &want.pre_tokenizer),
    ];
    if let Some(model) = model {
        inner.with_model(model);
    }
    if splits[0] {
        inner
            .with_normalizer(part::<NormalizerWrapper>(&want.normalizer)?)
            .map_err(|e| Error::format("cannot set the normalizer of the tokenizer class").cause(e))?;
    }
    if splits[1] {
        inner.with_pre_tokenizer(part::<PreTokenizerWrapper>(&want.pre_tokenizer)?);
    }
    inner.with_decoder(part::<DecoderWrapper>(&want.decoder)?);
    Ok(splits.contains(&true))
}

fn part<T: DeserializeOwned>(value: &Value) -> Result<Option<T>> {
    serde_json::from_value(value.clone())
        .map_err(|e| Error::format("the tokenizer library rejects a part of the tokenizer class").cause(e))
}

/// True if a part of the file behaves differently from the part of the class.
fn differs(own: Option<&impl serde::Serialize>, want: &Value) -> bool {
    let mut own = own
        .and_then(|own| serde_json::to_value(own).ok())
        .unwrap_or(Value::Null);
    let mut want = want.clone();
    for value in [&mut own, &mut want] {
        without_offsets(value);
    }
    own != want
}

/// Removes settings that affect only offsets, and unwraps sequences of one part.
fn without_offsets(value: &mut Value) {
    if let Value::Object(map) = value {
        map.remove("trim_offsets");
        if map.get("type") == Some(&json!("Sequence")) {
            for key in ["normalizers", "pretokenizers"] {
                if let Some(Value::Array(parts)) = map.get_mut(key) {
                    parts.iter_mut().for_each(without_offsets);
                    if let [only] = &parts[..] {
                        *value = only.clone();
                        return;
                    }
                }
            }
        }
    }
}

fn pipeline(class: TokenizerClass, config: &Map<String, Value>) -> Pipeline {
    let flag = |key: &str| config.get(key).and_then(Value::as_bool);
    let unk = || content(config.get("unk_token")).unwrap_or_else(|| "<unk>".into());
    let level = |prefix: bool, regex: bool| json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": regex});
    let metaspace =
        |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false});
    let pieces = |strip: bool| {
        let mut parts = vec![
            json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if strip {
            parts.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        json!({"type": "Sequence", "decoders": parts})
    };
    let bytes = |normalizer: Value, pre_tokenizer: Value| Pipeline {
        normalizer,
        pre_tokenizer,
        decoder: level(true, true),
        unk_token: None,
        affixes: Some(String::new()),
        fuse_unk: false,
        byte_fallback: false,
    };
    let sentences = |normalizer, pre_tokenizer, decoder, unk_token| Pipeline {
        normalizer,
        pre_tokenizer,
        decoder,
        unk_token,
        affixes: None,
        fuse_unk: true,
        byte_fallback: true,
    };
    let prefix = flag("add_prefix_space");
    match class {
        TokenizerClass::Llama => {
            // Absent means false, as in the class.
            let legacy = flag("legacy").unwrap_or(false);
            let scheme = match (prefix.unwrap_or(true), legacy) {
                (false, _) => "never",
                (true, true) => "always",
                (true, false) => "first",
            };
            sentences(Value::Null, metaspace(scheme), pieces(prefix.unwrap_or(true)), None)
        }
        TokenizerClass::CodeLlama => {
            let scheme = if prefix.unwrap_or(true) { "first" } else { "never" };
            sentences(Value::Null, metaspace(scheme), pieces(true), Some(unk()))
        }
        TokenizerClass::Gemma => sentences(
            json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}),
            json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false}),
            pieces(false),
            Some(unk()),
        ),
        TokenizerClass::Qwen2 | TokenizerClass::Qwen3_5 => {
            let words = if class == TokenizerClass::Qwen2 { QWEN2 } else { QWEN3_5 };
            let split = json!({"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": false});
            let level = level(prefix.unwrap_or(false), false);
            bytes(
                json!({"type": "NFC"}),
                json!({"type": "Sequence", "pretokenizers": [split, level]}),
            )
        }
        TokenizerClass::Gpt2 => bytes(Value::Null, level(prefix.unwrap_or(false), true)),
        TokenizerClass::GptNeox => bytes(json!({"type": "NFC"}), level(prefix.unwrap_or(false), true)),
    }
}

#[cfg(test)]
mod tests {
    use crate::tokenizer::Tokenizer;
    use serde_json::Value;

    /// Compares with ids and texts of transformers, for every class and config variant.
    #[test]
    fn as_the_classes_of_transformers() {
        let golden: Value = serde_json::from_str(include_str!("../testdata/tokenizers_rebuilt.json")).unwrap();
        let list = |value: &Value| value.as_array().unwrap().clone();
        let cases = list(&golden["cases"]);
        assert!(cases.len() > 20);
        for case in cases {
            let name = case["name"].as_str().unwrap();
            let mut file = golden["bases"][case["base"].as_str().unwrap()].clone();
            for (key, value) in case["other"].as_object().unwrap() {
                file[key] = value.clone();
            }
            let dir = tempfile::tempdir().unwrap();
            let write = |name: &str, value: &Value| std::fs::write(dir.path().join(name), value.to_string()).unwrap();
            write("tokenizer.json", &file);
            write("tokenizer_config.json", &case["tokenizer_config"]);
            write("config.json", &case["config"]);
            let tokenizer = Tokenizer::load(dir.path()).unwrap();
            let rows = list(&case["ids"]).into_iter().zip(list(&case["texts"]));
            for (text, (ids, back)) in list(&golden["texts"]).iter().zip(rows) {
                let text = text.as_str().unwrap();
                let want: Vec<u32> = list(&ids).iter().map(|id| id.as_u64().unwrap() as u32).collect();
                let got = tokenizer.encode(text, true).unwrap();
                assert_eq!(got, want, "{name}: {text:?}");
                assert_eq!(tokenizer.decode(&got, false).unwrap(), back.as_str().unwrap(), "{name}");
            }
        }
    }

    /// Offsets are valid for every class: loss masks are computed from them.
    #[test]
    fn offsets_lie_in_the_text() {
        let golden: Value = serde_json::from_str(include_str!("../testdata/tokenizers_rebuilt.json")).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: String| std::fs::write(dir.path().join(name), text).unwrap();
        write("tokenizer.json", golden["bases"]["spm"].to_string());
        write(
            "tokenizer_config.json",
            r#"{"tokenizer_class": "LlamaTokenizer"}"#.into(),
        );
        let tokenizer = Tokenizer::load(dir.path()).unwrap();
        let text = "The mill<end>the über mill";
        let (_, at) = tokenizer.encode_with_offsets(text, false).unwrap();
        assert_eq!((at[0].0, at.last().unwrap().1), (0, text.len()));
        assert!(at.windows(2).all(|w| w[0].1 >= w[1].0 && w[0].0 <= w[1].0), "{at:?}");
        assert!(
            at.iter()
                .all(|(a, b)| text.is_char_boundary(*a) && text.is_char_boundary(*b))
        );
    }
}
