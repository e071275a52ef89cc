//! A vocabulary as lists: tokens with their kinds, merges, scores, and the name that llama.cpp has for the
//! pre-tokenizer. For files of other programs, which do not read `tokenizer.json`.

use super::Tokenizer;
use super::rebuilt::{QWEN2, QWEN3_5};
use ft_base::{Error, Result};
use serde_json::Value;
use std::collections::HashMap;

/// The kind of a token, with the number that SentencePiece and GGUF give it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    /// Ordinary text.
    Normal = 1,
    /// Stands for text that no token covers.
    Unknown = 2,
    /// A special token.
    Control = 3,
    /// An added token that is ordinary text.
    UserDefined = 4,
    /// An id without a token.
    Unused = 5,
    /// One byte.
    Byte = 6,
}

/// How a text becomes tokens.
#[derive(Debug, Clone, PartialEq)]
pub enum TextSplitting {
    /// Byte-level BPE after a pre-tokenizer.
    ByteLevel {
        /// Pairs of tokens separated by a space, best first.
        merges: Vec<String>,
        /// The name of the pre-tokenizer in llama.cpp; `None`: it has none that is equal or near.
        pre_tokenizer: Option<&'static str>,
        /// Where the named one differs.
        differs: Option<&'static str>,
    },
    /// BPE of SentencePiece: the neighbors whose union has the highest score are merged.
    Sentences {
        /// By id.
        scores: Vec<f32>,
        /// A space is put before a text.
        space_before: bool,
    },
}

/// A vocabulary.
#[derive(Debug, Clone, PartialEq)]
pub struct Vocabulary {
    /// By id.
    pub tokens: Vec<String>,
    /// By id.
    pub kinds: Vec<TokenKind>,
    /// How texts are split.
    pub splitting: TextSplitting,
    /// A text begins with the beginning-of-sequence token.
    pub adds_bos: bool,
    /// A text ends with the end-of-sequence token.
    pub adds_eos: bool,
}

/// Contractions, words with one character before them, up to three digits, punctuation, line breaks, spaces.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Words split at changes of case, with contractions.
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Words split at changes of case, single digits.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The last of the three patterns of DeepSeek-V3.
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
/// Words, single digits, punctuation, spaces; no contractions.
const PLAIN: &str = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Marks of parts that are not a pattern.
const GPT2: &str = "ByteLevel";
const DIGITS: &str = "Digits";

/// The patterns of a pre-tokenizer, its flag `ignore_merges`, the name, and the difference.
type KnownPretokenizer = (&'static [&'static str], bool, &'static str, Option<&'static str>);

const KNOWN: [KnownPretokenizer; 10] = [
    (&[LLAMA3], true, "llama-bpe", None),
    (&[LLAMA3], false, "smaug-bpe", None),
    (&[QWEN2], false, "qwen2", None),
    (&[QWEN3_5], false, "qwen35", None),
    (&[O200K], false, "gpt-4o", None),
    (&[TEKKEN], true, "tekken", None),
    (
        &[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3],
        false,
        "deepseek-v3",
        None,
    ),
    (&[DIGITS, GPT2], false, "starcoder", None),
    (&[GPT2], false, "gpt-2", None),
    (
        &[PLAIN],
        false,
        "starcoder",
        Some("letters after an apostrophe (`'s`, `'that`) are split differently, and some runs of spaces"),
    ),
];

impl Tokenizer {
    /// The vocabulary, with an entry for each of `rows` ids.
    ///
    /// # Errors
    /// A tokenizer that is neither byte-level BPE nor a BPE of SentencePiece; ids beyond `rows`.
    pub fn vocabulary(&self, rows: usize) -> Result<Vocabulary> {
        let text = self.inner.to_string(false);
        let text = text.map_err(|e| Error::format("the tokenizer cannot be written").cause(e))?;
        let file: Value =
            serde_json::from_str(&text).map_err(|e| Error::internal("the tokenizer is not JSON").cause(e))?;
        let model = &file["model"];
        let kind = model["type"].as_str().unwrap_or("no type");
        if kind != "BPE" {
            return Err(unsupported("this kind of tokenizer").found(kind).expected("BPE"));
        }
        if self.size > rows {
            return Err(Error::format("the tokenizer has ids beyond the rows of the embedding")
                .found(self.size)
                .expected(format!("at most {rows}")));
        }
        let merges = merges(model);
        let splitting = if model["byte_fallback"] == Value::Bool(true) {
            TextSplitting::Sentences {
                scores: Vec::new(),
                space_before: space_before(&file),
            }
        } else {
            let ignores = model["ignore_merges"] == Value::Bool(true);
            let patterns = patterns(&file)?;
            let equal = |(known, own, ..): &&KnownPretokenizer| *own == ignores && patterns == *known;
            let found = KNOWN.iter().find(equal);
            TextSplitting::ByteLevel {
                merges: merges.iter().map(|[left, right]| format!("{left} {right}")).collect(),
                pre_tokenizer: found.map(|(.., name, _)| *name),
                differs: found.and_then(|(.., differs)| *differs),
            }
        };
        let mut tokens: Vec<String> = (0..rows).map(|id| format!("[PAD{id}]")).collect();
        let mut kinds = vec![TokenKind::Unused; rows];
        let unknown = model["unk_token"]
            .as_str()
            .or(self.named("unk_token").map(|t| t.text.as_str()));
        let added = self.inner.get_added_tokens_decoder();
        let sentences = matches!(splitting, TextSplitting::Sentences { .. });
        for id in 0..self.size as u32 {
            let Some(token) = self.id_to_token(id) else { continue };
            let byte = sentences && token.len() == 6 && token.starts_with("<0x") && token.ends_with('>');
            kinds[id as usize] = match added.get(&id) {
                _ if sentences && unknown == Some(token.as_str()) => TokenKind::Unknown,
                _ if self.is_special(id) => TokenKind::Control,
                Some(_) => TokenKind::UserDefined,
                None if byte => TokenKind::Byte,
                None => TokenKind::Normal,
            };
            tokens[id as usize] = token;
        }
        let splitting = match splitting {
            TextSplitting::Sentences { space_before, .. } => TextSplitting::Sentences {
                scores: scores(&tokens, &merges),
                space_before,
            },
            other => other,
        };
        let around = self.encode("a", true)?;
        Ok(Vocabulary {
            adds_bos: self.bos_id().is_some_and(|id| around.first() == Some(&id)),
            adds_eos: self.eos_id().is_some_and(|id| around.last() == Some(&id)),
            tokens,
            kinds,
            splitting,
        })
    }
}

fn unsupported(what: &str) -> Error {
    Error::unsupported(format!(
        "{what} is not supported in other formats than that of Hugging Face"
    ))
}

fn merges(model: &Value) -> Vec<[String; 2]> {
    let one = |merge: &Value| match merge {
        Value::String(text) => text.split_once(' ').map(|(left, right)| [left.into(), right.into()]),
        Value::Array(pair) => Some([pair.first()?.as_str()?.into(), pair.get(1)?.as_str()?.into()]),
        _ => None,
    };
    model["merges"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(one)
        .collect()
}

/// The score of a token is the negative rank of the first merge that makes it, which orders merges as SentencePiece did.
fn scores(tokens: &[String], merges: &[[String; 2]]) -> Vec<f32> {
    let mut rank: HashMap<String, usize> = HashMap::new();
    for (at, [left, right]) in merges.iter().enumerate() {
        rank.entry(format!("{left}{right}")).or_insert(at);
    }
    // Tokens that no merge makes are characters: after all others.
    let last = merges.len();
    tokens.iter().map(|t| -(*rank.get(t).unwrap_or(&last) as f32)).collect()
}

/// The parts of a pre-tokenizer, sequences flattened.
fn parts(value: &Value) -> Vec<&Value> {
    match value["pretokenizers"].as_array() {
        Some(inner) => inner.iter().flat_map(parts).collect(),
        None if value.is_null() => Vec::new(),
        None => vec![value],
    }
}

/// The patterns of a byte-level pre-tokenizer.
fn patterns(file: &Value) -> Result<Vec<&str>> {
    let normalizer = file["normalizer"]["type"].as_str();
    if normalizer.is_some_and(|kind| !["NFC", "Sequence"].contains(&kind)) {
        return Err(unsupported("a normalizer of a byte-level tokenizer").found(&file["normalizer"]));
    }
    let mut found = Vec::new();
    for part in parts(&file["pre_tokenizer"]) {
        let isolated = part["behavior"] == "Isolated" && part["invert"] == Value::Bool(false);
        let kept = part["behavior"] == "Removed" && part["invert"] == Value::Bool(true);
        match (part["type"].as_str(), part["pattern"]["Regex"].as_str()) {
            (Some("Split"), Some(regex)) if isolated || kept => found.push(regex),
            (Some("Digits"), _) if part["individual_digits"] == Value::Bool(true) => found.push(DIGITS),
            (Some("ByteLevel"), _) if part["add_prefix_space"] != Value::Bool(true) => {
                if part["use_regex"] != Value::Bool(false) {
                    found.push(GPT2);
                }
            }
            _ => return Err(unsupported("a part of the pre-tokenizer").found(part)),
        }
    }
    Ok(found)
}

/// True if a SentencePiece tokenizer puts a space before a text.
fn space_before(file: &Value) -> bool {
    let normalizers = match file["normalizer"]["normalizers"].as_array() {
        Some(list) => list.iter().collect(),
        None => vec![&file["normalizer"]],
    };
    let prepends = normalizers.iter().any(|n| n["type"] == "Prepend");
    let scheme = parts(&file["pre_tokenizer"])
        .into_iter()
        .find(|part| part["type"] == "Metaspace")
        .map(|part| part["prepend_scheme"].as_str().unwrap_or("always"));
    prepends || scheme.is_some_and(|scheme| scheme != "never")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn of(dir: &str, rows: usize) -> Result<Vocabulary> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        Tokenizer::load(&root.join(dir))?.vocabulary(rows)
    }

    #[test]
    fn byte_level_vocabularies() {
        let chat = of("tests/parity/goldens/tokenizers/chat", 322).unwrap();
        assert_eq!((chat.tokens.len(), chat.kinds[321]), (322, TokenKind::Unused));
        assert_eq!(chat.tokens[321], "[PAD321]");
        let TextSplitting::ByteLevel {
            merges,
            pre_tokenizer,
            differs,
        } = &chat.splitting
        else {
            panic!("{:?}", chat.splitting)
        };
        assert_eq!((*pre_tokenizer, *differs), (Some("qwen2"), None));
        assert!(merges.iter().all(|m| m.split(' ').count() == 2) && merges.len() > 50);
        let end = chat.tokens.iter().position(|t| t == "<|im_end|>").unwrap();
        assert_eq!(chat.kinds[end], TokenKind::Control);
        let bos = of("tests/parity/goldens/tokenizers/small_bos", 128).unwrap();
        assert!(bos.adds_bos && !bos.adds_eos);
        assert!(matches!(
            bos.splitting,
            TextSplitting::ByteLevel {
                pre_tokenizer: Some("gpt-2"),
                ..
            }
        ));
        let tiny = of("assets/tiny", 896).unwrap();
        assert!(matches!(
            tiny.splitting,
            TextSplitting::ByteLevel { differs: Some(_), .. }
        ));
        assert!(
            of("assets/tiny", 100)
                .unwrap_err()
                .to_string()
                .contains("beyond the rows")
        );
    }

    #[test]
    fn sentence_pieces_have_scores_in_the_order_of_their_merges() {
        let dir = tempfile::tempdir().unwrap();
        let json = r#"{"version": "1.0", "added_tokens": [{"id": 0, "content": "<s>", "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false}],
            "normalizer": null, "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false},
            "decoder": null,
            "model": {"type": "BPE", "unk_token": "<unk>", "vocab": {"<s>": 0, "<unk>": 6, "<0xE4>": 1, "▁": 2, "a": 3, "▁a": 4, "aa": 5},
            "merges": [["a", "a"], ["▁", "a"]], "byte_fallback": true}}"#;
        ft_base::files::write_atomic(&dir.path().join("tokenizer.json"), json.as_bytes()).unwrap();
        let v = Tokenizer::load(dir.path()).unwrap().vocabulary(7).unwrap();
        let TextSplitting::Sentences { scores, space_before } = &v.splitting else {
            panic!()
        };
        assert!(*space_before && scores[5] > scores[4] && scores[4] > scores[3]);
        use TokenKind::{Byte, Control, Normal, Unknown};
        assert_eq!(v.kinds, [Control, Byte, Normal, Normal, Normal, Normal, Unknown]);
    }
}
