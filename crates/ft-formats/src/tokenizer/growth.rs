//! How long a text may become in the steps of a `tokenizer.json`. Each step can multiply its length, so a sequence of
//! small steps makes gigabytes of one row: such a file is refused before the tokenizer library reads it, which already
//! normalizes the added tokens.

use ft_base::{Error, Result};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::Path;

/// The most bytes that the steps before the model may make of one byte; also the most tokens of one token after the model, and the
/// most bytes of one byte of the decoder. Byte-level files have 3, those of Llama and Gemma up to 12, those with a map of characters
/// of SentencePiece about 500.
const LIMIT: f64 = 10_000.0;
/// Counted for a step without a text of its own. `ByteLevel` doubles a byte and adds a space.
const OTHER: f64 = 3.0;

// Steps that add nothing, or as the Unicode forms only once, however often they are repeated.
const NORMALIZERS: [&str; 9] = [
    "Sequence",
    "Strip",
    "StripAccents",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Lowercase",
    "Nmt",
];
const PRE_TOKENIZERS: [&str; 10] = [
    "Sequence",
    "BertPreTokenizer",
    "Delimiter",
    "Whitespace",
    "WhitespaceSplit",
    "Split",
    "Punctuation",
    "Digits",
    "UnicodeScripts",
    "FixedLength",
];
const POST_PROCESSORS: [&str; 2] = ["Sequence", "ByteLevel"];
const DECODERS: [&str; 4] = ["Sequence", "Strip", "Fuse", "ByteFallback"];

/// The keys of a `Sequence`.
const LISTS: [&str; 4] = ["normalizers", "pretokenizers", "processors", "decoders"];

/// The steps of a `tokenizer.json`.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Steps {
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
}

impl Steps {
    /// Errors: no valid JSON, or two entries of the same step.
    pub(super) fn read(text: &[u8]) -> serde_json::Result<Self> {
        serde_json::from_slice(text)
    }

    /// Errors: the steps can make more than `LIMIT` bytes or tokens of one.
    pub(super) fn check(&self, path: &Path) -> Result<()> {
        let text = growth(&self.normalizer, &NORMALIZERS) * growth(&self.pre_tokenizer, &PRE_TOKENIZERS);
        for (steps, unit, found) in [
            ("`normalizer` and `pre_tokenizer`", "bytes", text),
            (
                "`post_processor`",
                "tokens",
                growth(&self.post_processor, &POST_PROCESSORS),
            ),
            ("`decoder`", "bytes", growth(&self.decoder, &DECODERS)),
        ] {
            if found > LIMIT {
                let found = match found {
                    n if n < 1e9 => format!("up to {n:.0} {unit} for one"),
                    _ => format!("no useful limit of the {unit} for one"),
                };
                return Err(
                    Error::format(format!("{steps} of `tokenizer.json` can make a text too long"))
                        .at_path(path)
                        .found(found)
                        .expected(format!("at most {LIMIT:.0}"))
                        .hint(
                            "download the tokenizer again from the author of the model (a usual one has less than 20), or remove steps from it",
                        ),
                );
            }
        }
        Ok(())
    }
}

/// The factor of a step and of those in it. A step in a form that no tool writes, which the library may read all the same, has no
/// limit.
fn growth(step: &Value, plain: &[&str]) -> f64 {
    let map = match step {
        Value::Null => return 1.0,
        Value::Object(map) => map,
        _ => return f64::INFINITY,
    };
    let inner = LISTS.iter().filter_map(|key| map.get(*key)?.as_array()).flatten();
    inner.map(|step| growth(step, plain)).product::<f64>() * own_growth(map, plain)
}

/// The factor of one step. The keys decide: the library does not check the type of every step.
fn own_growth(step: &Map<String, Value>, plain: &[&str]) -> f64 {
    let text = |key: &str| step.get(key).and_then(Value::as_str);
    let mut found = Vec::new();
    if let (Some(content), Some(pattern)) = (text("content"), step.get("pattern")) {
        let pattern = pattern.get("String").and_then(Value::as_str).unwrap_or_default();
        found.push(replacing(content.len(), pattern.len()));
    }
    // Once for each piece between two added tokens, which may have one byte.
    found.extend(
        ["prepend", "replacement"]
            .into_iter()
            .filter_map(text)
            .map(|t| replacing(t.len().max(1), 0)),
    );
    found.extend(text("precompiled_charsmap").map(|map| longest_replacement(map) as f64));
    if let Some(pieces) = step.get("single").and_then(Value::as_array) {
        found.push(pieces.iter().map(|piece| tokens_of(piece, step)).sum::<usize>().max(1) as f64);
    }
    let is_plain = text("type").is_some_and(|kind| plain.contains(&kind));
    let adds = ["handle_chinese_chars", "sep"]
        .iter()
        .any(|key| step.contains_key(*key));
    if adds || (found.is_empty() && !is_plain) {
        found.push(OTHER);
    }
    found.iter().product()
}

/// The factor if `content` bytes take the place of `pattern` bytes; 0: also at places between two bytes.
fn replacing(content: usize, pattern: usize) -> f64 {
    match pattern {
        0 if content == 0 => 1.0,
        0 => 1.0 + content as f64,
        n => (content as f64 / n as f64).max(1.0),
    }
}

/// Number of tokens, or of copies of the text, of a piece of a template.
fn tokens_of(piece: &Value, template: &Map<String, Value>) -> usize {
    let ids = |token: &Value| {
        let name = token.get("id")?.as_str()?;
        let ids = template.get("special_tokens")?.get(name)?.get("ids")?;
        Some(ids.as_array()?.len())
    };
    piece.get("SpecialToken").and_then(ids).unwrap_or(1)
}

/// The longest replacement of a map of characters: the size of its index, the index, and texts that end with a zero.
fn longest_replacement(map: &str) -> usize {
    let bytes = base64(map);
    let Some((size, rest)) = bytes.split_first_chunk::<4>() else {
        return 1;
    };
    let index = u32::from_le_bytes(*size) as usize / 4 * 4;
    let texts = rest.get(index..).unwrap_or_default();
    let longest = texts.split(|byte| *byte == 0).map(<[u8]>::len).max();
    longest.unwrap_or(1).max(1)
}

/// Decodes base64. Other characters are skipped: the library refuses them.
fn base64(text: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0u32, 0);
    for byte in text.bytes() {
        let value = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => continue,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            out.push((bits >> count) as u8);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tokenizer;
    use serde_json::json;

    /// Loads a tokenizer of one word with these steps.
    fn load(steps: &Value) -> Result<Tokenizer> {
        let dir = tempfile::tempdir().unwrap();
        let mut file = json!({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}});
        file.as_object_mut().unwrap().extend(steps.as_object().unwrap().clone());
        std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
        Tokenizer::load(dir.path())
    }

    fn refused(steps: &Value, found: &str) {
        let e = load(steps)
            .err()
            .unwrap_or_else(|| panic!("accepted: {steps}"))
            .to_string();
        for part in ["tokenizer.json", found, "expected at most 10000", "hint: "] {
            assert!(e.contains(part), "no {part}: {e}");
        }
    }

    fn replace(pattern: Value, content: &str) -> Value {
        json!({"type": "Replace", "pattern": pattern, "content": content})
    }

    fn normalizers(steps: Vec<Value>) -> Value {
        json!({"normalizer": {"type": "Sequence", "normalizers": steps}})
    }

    fn decoders(steps: Vec<Value>) -> Value {
        json!({"decoder": {"type": "Sequence", "decoders": steps}})
    }

    #[test]
    fn a_sequence_that_multiplies_a_text_is_refused() {
        let ten = replace(json!({"String": "a"}), &"a".repeat(10));
        for of in [normalizers, decoders] {
            assert!(load(&of(vec![ten.clone(); 4])).is_ok());
            refused(&of(vec![ten.clone(); 5]), "found up to 100000 bytes for one");
            refused(&of(vec![ten.clone(); 400]), "found no useful limit");
        }
        // In sequences in sequences too.
        let inner = normalizers(vec![ten.clone(); 3])["normalizer"].clone();
        refused(&normalizers(vec![inner.clone(), inner]), "found up to 1000000 bytes");
    }

    #[test]
    fn one_step_with_a_long_text_is_refused() {
        let long = "x".repeat(10_001);
        for step in [
            replace(json!({"String": "a"}), &long),
            replace(json!({"String": ""}), &long),
            replace(json!({"Regex": "(?=a)"}), &long),
            json!({"type": "Prepend", "prepend": long}),
            // Four bytes of zeros, the size of the index, and two more; then one text.
            json!({"type": "Precompiled", "precompiled_charsmap": format!("AAAAAAAA{}", "YWFh".repeat(3334))}),
        ] {
            refused(&json!({"normalizer": step}), "found up to 1000");
        }
        // A long pattern takes the place of its own bytes.
        assert!(load(&json!({"normalizer": replace(json!({"String": "a".repeat(100)}), &long)})).is_ok());
        let template = |pieces: Vec<Value>, ids: usize| {
            json!({"post_processor": {"type": "TemplateProcessing", "single": pieces, "pair": [],
                "special_tokens": {"a": {"id": "a", "ids": vec![0; ids], "tokens": vec!["a"; ids]}}}})
        };
        let (text, token) = (
            json!({"Sequence": {"id": "A", "type_id": 0}}),
            json!({"SpecialToken": {"id": "a", "type_id": 0}}),
        );
        assert!(load(&template(vec![token.clone(), text.clone()], 1)).is_ok());
        refused(
            &template(vec![token, text.clone()], 20_000),
            "found up to 20001 tokens for one",
        );
        refused(&template(vec![text; 15_000], 1), "found up to 15000 tokens for one");
    }

    #[test]
    fn forms_that_no_tool_writes_are_refused() {
        let long = "x".repeat(20_000);
        refused(&json!({"normalizer": [{"String": "a"}, long]}), "no useful limit");
        refused(&json!({"normalizer": {"prepend": long}}), "found up to 20001");
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
        let many = json!({"pre_tokenizer": {"type": "Sequence", "pretokenizers": vec![bytes; 30]}});
        refused(&many, "no useful limit");
        // The library takes the last of two, so that the first must not be the one that is checked.
        let twice = br#"{"normalizer": {"type": "NFC"}, "normalizer": {"type": "NFD"}}"#;
        assert!(Steps::read(twice).is_err());
    }

    #[test]
    fn the_steps_of_known_tokenizers_are_far_from_the_limit() {
        let space = || json!({"String": " "});
        let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
        for (steps, text, tokens, decoded) in [
            // Llama 2.
            (
                json!({"normalizer": {"type": "Sequence", "normalizers":
                        [{"type": "Prepend", "prepend": "▁"}, replace(space(), "▁")]},
                    "post_processor": {"type": "TemplateProcessing", "single":
                        [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
                    "decoder": {"type": "Sequence", "decoders": [replace(json!({"String": "▁"}), " "),
                        {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}}),
                12.0,
                2.0,
                1.0,
            ),
            // Gemma, Qwen and CLIP.
            (json!({"normalizer": replace(space(), "▁")}), 3.0, 1.0, 1.0),
            (
                json!({"normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                        {"type": "Split", "pattern": {"Regex": "\\p{N}"}, "behavior": "Isolated", "invert": false},
                        {"type": "ByteLevel"}]},
                    "post_processor": {"type": "ByteLevel"}, "decoder": {"type": "ByteLevel"}}),
                3.0,
                1.0,
                3.0,
            ),
            (
                json!({"normalizer": {"type": "Sequence", "normalizers":
                    [{"type": "NFC"}, replace(json!({"Regex": "\\s+"}), " "), {"type": "Lowercase"}]}}),
                2.0,
                1.0,
                1.0,
            ),
            // XLM-RoBERTa; the longest replacement of its map has 33 bytes.
            (
                json!({"normalizer": {"type": "Sequence", "normalizers": [
                        {"type": "Precompiled", "precompiled_charsmap": format!("AAAAAAAA{}", "YWFh".repeat(11))},
                        replace(json!({"Regex": " {2,}"}), "▁")]},
                    "pre_tokenizer": metaspace}),
                528.0,
                1.0,
                1.0,
            ),
        ] {
            let read = Steps::read(steps.to_string().as_bytes()).unwrap();
            let before = growth(&read.normalizer, &NORMALIZERS) * growth(&read.pre_tokenizer, &PRE_TOKENIZERS);
            assert_eq!(before, text, "{steps}");
            assert_eq!(growth(&read.post_processor, &POST_PROCESSORS), tokens, "{steps}");
            assert_eq!(growth(&read.decoder, &DECODERS), decoded, "{steps}");
            read.check(Path::new("tokenizer.json")).unwrap();
        }
    }
}
