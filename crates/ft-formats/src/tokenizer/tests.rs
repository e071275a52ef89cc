//! Tests of `tokenizer`: valid files, and all refused inconsistencies.

use super::*;
use serde_json::json;

/// Byte-level BPE with one merge, like the tokenizers of Qwen and Llama 3; `post` is the post-processor.
fn write(dir: &Path, post: Value, config: Value) {
    let alphabet = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
    let mut letters: Vec<char> = alphabet.into_iter().collect();
    letters.sort_unstable();
    let mut vocab: Map<String, Value> = letters
        .iter()
        .enumerate()
        .map(|(i, c)| (c.to_string(), json!(i)))
        .collect();
    vocab.insert("he".into(), json!(256));
    let added = |id: u32, text: &str, special: bool| {
        json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": special})
    };
    let t = json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "x"},
        "added_tokens": [added(257, "<s>", true), added(258, "<end>", true), added(259, "<tool>", false)],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true},
        "post_processor": post,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
                  "merges": [["h", "e"]]}
    });
    std::fs::write(dir.join("tokenizer.json"), t.to_string()).unwrap();
    std::fs::write(dir.join("tokenizer_config.json"), config.to_string()).unwrap();
}

fn bos_template() -> Value {
    json!({"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                 {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [257], "tokens": ["<s>"]}}})
}

fn load(post: Value, config: Value) -> Tokenizer {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), post, config);
    Tokenizer::load(dir.path()).unwrap()
}

#[test]
fn encodes_whole_texts_and_decodes_them() {
    let t = load(Value::Null, json!({"eos_token": "<end>"}));
    let text = "hello, wörld <end>";
    let ids = t.encode(text, true).unwrap();
    assert_eq!(ids[0], 256);
    assert_eq!(*ids.last().unwrap(), 258);
    assert!(ids.len() > 2, "the stored truncation was applied");
    assert_eq!(t.decode(&ids, false).unwrap(), text);
    assert_eq!(t.decode(&ids, true).unwrap(), "hello, wörld ");
    assert_eq!(t.vocab_size(), 260);
    assert_eq!(
        (t.token_to_id("<tool>"), t.id_to_token(258)),
        (Some(259), Some("<end>".into()))
    );
}

#[test]
fn offsets_are_bytes_of_the_text() {
    let t = load(bos_template(), json!({"bos_token": "<s>"}));
    let text = "öhe<end>x";
    let (ids, at) = t.encode_with_offsets(text, true).unwrap();
    assert_eq!((ids[0], at[0]), (257, (0, 0)));
    assert_eq!(at[1..], [(0, 2), (0, 2), (2, 4), (4, 9), (9, 10)]);
    assert_eq!(&text[at[4].0..at[4].1], "<end>");
}

#[test]
fn the_post_processor_of_tokenizer_json_decides_about_bos() {
    for config in [
        json!({}),
        json!({"add_bos_token": true}),
        json!({"add_bos_token": false, "add_eos_token": true}),
    ] {
        for class in [
            "LlamaTokenizerFast",
            "TokenizersBackend",
            "PreTrainedTokenizerFast",
            "Qwen2Tokenizer",
        ] {
            let mut config = config.clone();
            config["tokenizer_class"] = json!(class);
            config["bos_token"] = json!("<s>");
            let with = load(bos_template(), config.clone());
            assert_eq!(with.encode("he", true).unwrap(), [257, 256]);
            assert_eq!(with.encode("he", false).unwrap(), [256]);
            assert_eq!(load(Value::Null, config).encode("he", true).unwrap(), [256]);
        }
    }
}

#[test]
fn offsets_without_white_space_never_cut_a_character() {
    let dir = tempfile::tempdir().unwrap();
    let post = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let config = json!({"added_tokens_decoder": {"260": {"content": "<cut>", "special": true, "lstrip": true}}});
    write(dir.path(), post, config);
    let t = Tokenizer::load(dir.path()).unwrap();
    // The token takes the white space before it, of which the library counts one byte for a character of 3 bytes.
    let (ids, at) = t.encode_with_offsets("a\u{3000}<cut>", true).unwrap();
    assert_eq!((ids[1], at), (260, vec![(0, 1), (1, 9)]));
    let at = |range| whole_characters("a\u{3000}b", range);
    assert_eq!(
        [(0, 1), (2, 3), (1, 4), (4, 5)].map(at),
        [(0, 1), (1, 4), (1, 4), (4, 5)]
    );
    assert_eq!(
        [(0, 0), (5, 5), (5, 9), (9, 12)].map(at),
        [(0, 0), (5, 5), (5, 5), (5, 5)]
    );
}

#[test]
fn special_tokens_come_from_every_config() {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({"bos_token": {"content": "<s>", "__type": "AddedToken"}, "eos_token": "<end>", "pad_token": null,
        "added_tokens_decoder": {"260": {"content": "<new>", "special": true}, "900": {"content": "<far>"}}});
    write(dir.path(), Value::Null, config);
    std::fs::write(
        dir.path().join("special_tokens_map.json"),
        r#"{"pad_token": "he", "unk_token": "absent"}"#,
    )
    .unwrap();
    std::fs::write(
        dir.path().join("generation_config.json"),
        r#"{"eos_token_id": [258, 7]}"#,
    )
    .unwrap();
    std::fs::write(dir.path().join("config.json"), r#"{"eos_token_id": 9}"#).unwrap();
    let t = Tokenizer::load(dir.path()).unwrap();
    assert_eq!((t.bos_id(), t.eos_id(), t.pad_id()), (Some(257), Some(258), Some(256)));
    let named: Vec<_> = t.named_tokens().map(|(_, text)| text).collect();
    assert_eq!(named, ["<s>", "<end>", "absent", "he"]);
    assert_eq!(t.stop_ids(), [258, 7, 9]);
    assert_eq!(t.encode("<new>", false).unwrap(), [260]);
    assert_eq!(t.vocab_size(), 261);
    assert!(t.is_special(257) && t.is_special(256) && t.is_special(260) && !t.is_special(259) && !t.is_special(0));
}

#[test]
fn eos_falls_back_to_the_configs() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), Value::Null, json!({}));
    assert_eq!(Tokenizer::load(dir.path()).unwrap().eos_id(), None);
    std::fs::write(dir.path().join("config.json"), r#"{"eos_token_id": [258, 257]}"#).unwrap();
    let t = Tokenizer::load(dir.path()).unwrap();
    assert_eq!(t.eos_id(), Some(258));
    assert!(t.named_tokens().any(|n| n == ("eos_token", "<end>")));
    assert_eq!(t.stop_ids(), [258, 257]);
}

#[test]
fn broken_and_missing_tokenizers_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = || Tokenizer::load(dir.path()).unwrap_err().to_string();
    assert!(error().contains("no `tokenizer.json`"));
    std::fs::write(dir.path().join("tokenizer.model"), b"x").unwrap();
    assert!(error().contains("only `tokenizer.model`") && error().contains("save_pretrained"));
    let path = dir.path().join("tokenizer.json");
    std::fs::write(&path, b"{\"model\": 5}").unwrap();
    assert!(error().contains("cannot be read"));
    std::fs::write(&path, b"version https://git-lfs.github.com/spec/v1\n").unwrap();
    assert!(error().contains("Git LFS"));
    write(dir.path(), Value::Null, json!({}));
    std::fs::write(dir.path().join("tokenizer_config.json"), b"[").unwrap();
    assert!(error().contains("tokenizer_config.json:1:1"));
}

/// Writes `tokenizer.json` with this `dropout`, and loads it with this config.
fn with_dropout(dropout: Value, config: Value) -> Result<Tokenizer> {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), Value::Null, config);
    let path = dir.path().join("tokenizer.json");
    let mut file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    file["model"]["dropout"] = dropout;
    std::fs::write(&path, file.to_string()).unwrap();
    Tokenizer::load(dir.path())
}

#[test]
fn a_tokenizer_that_leaves_out_merges_at_random_is_refused() {
    for dropout in [json!(0.1), json!(1), json!(1e-9)] {
        let e = with_dropout(dropout.clone(), json!({})).err();
        let e = e.unwrap_or_else(|| panic!("accepted: {dropout}"));
        assert_eq!(e.kind(), ft_base::ErrorKind::Unsupported, "{e}");
        let e = e.to_string();
        for part in ["`dropout`", "tokenizer.json", "expected null or 0", "hint: set "] {
            assert!(e.contains(part), "no {part}: {e}");
        }
    }
    let e = with_dropout(json!(0.25), json!({})).unwrap_err().to_string();
    assert!(e.contains("found 0.25"), "{e}");
    let always_merges = |tokenizer: Tokenizer| (0..64).all(|_| tokenizer.encode("he", false).unwrap() == [256]);
    for dropout in [Value::Null, json!(0), json!(0.0)] {
        assert!(always_merges(with_dropout(dropout, json!({})).unwrap()));
    }
    // This class builds its model without it, in transformers too.
    let class = json!({"tokenizer_class": "GPT2Tokenizer"});
    assert!(always_merges(with_dropout(json!(0.9), class).unwrap()));
}

#[test]
fn a_unigram_model_never_samples() {
    let dir = tempfile::tempdir().unwrap();
    let vocab = json!([["<unk>", 0.0], ["a", -1.0], ["b", -1.0], ["ab", -1.5]]);
    // With these settings the library would take `ab` about every second time.
    let file = json!({"version": "1.0", "model":
        {"type": "Unigram", "unk_id": 0, "vocab": vocab, "alpha": 0.1, "nbest_size": 4}});
    std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    assert!((0..64).all(|_| tokenizer.encode("ab", false).unwrap() == [3]));
}

#[test]
fn the_tokenizer_of_bytes_carries_every_text() {
    let bytes = Tokenizer::bytes().unwrap();
    assert_eq!(bytes.vocab_size(), 257);
    for text in ["", "Hello, world!\n", "größer → 日本 \u{1F600}\0"] {
        let ids = bytes.encode(text, true).unwrap();
        assert_eq!(ids.len(), text.len());
        assert_eq!(bytes.decode(&ids, true).unwrap(), text);
    }
    assert_eq!(bytes.stop_ids(), [bytes.eos_id().unwrap()]);
}

#[test]
fn added_tokens_are_those_of_the_saved_files() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny");
    let mut tokenizer = Tokenizer::load(&dir).unwrap();
    let before = tokenizer.vocab_size();
    let token = |text: &str, special| NewToken {
        text: text.into(),
        special,
    };
    let ids = tokenizer
        .add_tokens(&[token("<think>", true), token("Δx y", false), token("<|im_end|>", true)])
        .unwrap();
    assert_eq!(ids[..2], [before as u32, before as u32 + 1]);
    assert_eq!(Some(ids[2]), tokenizer.token_to_id("<|im_end|>"));
    assert!(tokenizer.is_special(ids[0]) && !tokenizer.is_special(ids[1]));
    let text = "a<think>b Δx yz";
    let encoded = tokenizer.encode(text, false).unwrap();
    assert!(encoded.contains(&ids[0]) && encoded.contains(&ids[1]), "{encoded:?}");
    let copy = tempfile::tempdir().unwrap();
    for file in files::list(&dir).unwrap() {
        if file.extension().is_some_and(|e| e == "json" || e == "jinja") {
            std::fs::copy(&file, copy.path().join(file.file_name().unwrap())).unwrap();
        }
    }
    write_files(copy.path(), &tokenizer.files_with_added(&dir).unwrap()).unwrap();
    let read = Tokenizer::load(copy.path()).unwrap();
    assert_eq!(read.vocab_size(), before + 2);
    assert_eq!(read.encode(text, false).unwrap(), encoded);
    assert!(read.is_special(ids[0]) && !read.is_special(ids[1]));
    assert_eq!(
        read.decode(&encoded, true).unwrap(),
        tokenizer.decode(&encoded, true).unwrap()
    );
    let listed = Tokenizer::listed_from(copy.path(), before).unwrap();
    assert_eq!(
        listed,
        [(ids[0], token("<think>", true)), (ids[1], token("Δx y", false))]
    );
    let below = Tokenizer::load_below(copy.path(), before).unwrap();
    assert_eq!(below.vocab_size(), before);
    assert_eq!(
        below.encode(text, false).unwrap(),
        Tokenizer::load(&dir).unwrap().encode(text, false).unwrap()
    );
    // A second time they are known.
    let mut again = Tokenizer::load(copy.path()).unwrap();
    assert_eq!(again.add_tokens(&[token("<think>", true)]).unwrap(), ids[..1]);
    assert!(again.files_with_added(copy.path()).unwrap().is_empty());
}
