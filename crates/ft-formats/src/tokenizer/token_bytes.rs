//! The bytes of text that each token of a vocabulary stands for.

use super::Tokenizer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

impl Tokenizer {
    /// For each id: the bytes that it adds to a text; empty for special tokens and unused ids.
    pub fn token_bytes(&self) -> Vec<Vec<u8>> {
        let decoder = self
            .inner
            .get_decoder()
            .map(|d| serde_json::to_string(d).unwrap_or_default());
        let has = |name: &str| decoder.as_ref().is_some_and(|d| d.contains(&format!("\"{name}\"")));
        let alphabet = has("ByteLevel").then(alphabet);
        let added = self.inner.get_added_tokens_decoder();
        let one = |id: u32| {
            if self.is_special(id) {
                return Vec::new();
            }
            if let Some(token) = added.get(&id) {
                return if token.special {
                    Vec::new()
                } else {
                    token.content.clone().into_bytes()
                };
            }
            let text = self.id_to_token(id).unwrap_or_default();
            if let Some(alphabet) = &alphabet {
                let byte = |c: char| alphabet.iter().position(|a| *a == c).map(|b| b as u8);
                return text
                    .chars()
                    .map(byte)
                    .collect::<Option<Vec<u8>>>()
                    .unwrap_or(text.into_bytes());
            }
            let byte = text.strip_prefix("<0x").and_then(|t| t.strip_suffix('>'));
            if let Some(byte) = byte.and_then(|b| u8::from_str_radix(b, 16).ok())
                && has("ByteFallback")
            {
                return vec![byte];
            }
            text.replace('\u{2581}', " ").into_bytes()
        };
        (0..self.vocab_size() as u32).map(one).collect()
    }
}

/// The character of each byte in vocabularies of byte-level tokenizers: printable bytes are themselves, the others are
/// numbered from U+0100 on.
fn alphabet() -> Vec<char> {
    let known = ByteLevel::alphabet();
    let mut next = (0x100..).filter_map(char::from_u32);
    (0..=255u8)
        .map(|byte| match char::from(byte) {
            c if known.contains(&c) => c,
            c => next.next().unwrap_or(c),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// The bytes of the tokens of a text are those of the text, also where a token has a part of a character.
    #[test]
    fn tokens_give_the_bytes_of_their_text() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let text = "Corra is a river, naïve café — 日本語 🙂\n\n\tx  y";
        for dir in ["assets/tiny", "tests/parity/goldens/tokenizers/chat"] {
            let tokenizer = Tokenizer::load(&root.join(dir)).unwrap();
            let bytes = tokenizer.token_bytes();
            let ids = tokenizer.encode(text, false).unwrap();
            let all: Vec<u8> = ids.iter().flat_map(|id| bytes[*id as usize].clone()).collect();
            assert_eq!(String::from_utf8_lossy(&all), text, "{dir}");
            assert!(tokenizer.stop_ids().iter().all(|id| bytes[*id as usize].is_empty()));
        }
    }

    /// A tokenizer in the form of SentencePiece.
    #[test]
    fn sentence_pieces_and_single_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let json = r#"{"version": "1.0", "added_tokens": [{"id": 0, "content": "<s>", "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false}],
            "normalizer": null, "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": false},
            "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]},
            "model": {"type": "BPE", "vocab": {"<s>": 0, "<0xE4>": 1, "▁": 2, "a": 3, "▁a": 4}, "merges": [["▁", "a"]], "byte_fallback": true}}"#;
        ft_base::files::write_atomic(&dir.path().join("tokenizer.json"), json.as_bytes()).unwrap();
        let bytes = Tokenizer::load(dir.path()).unwrap().token_bytes();
        assert_eq!(bytes, [&b""[..], b"\xe4", b" ", b"a", b" a"]);
    }
}
