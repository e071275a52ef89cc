//! Tests with real tokenizers and templates: ids and masks against golden files, and turns of model families.

use super::{Encoder, spans};
use crate::codec::ChatRender;
use crate::read::{TextUnit, read_rows};
use crate::rows::Sample;
use crate::testing::{goldens, real, understand};
use crate::{RowFormat, TrainOn};
use ft_base::files;
use ft_formats::{ChatTemplate, Tokenizer};
use serde_json::Value;
use std::path::Path;

fn samples(path: &Path) -> Vec<Sample> {
    let mut out = Vec::new();
    read_rows(path.to_str().unwrap(), TextUnit::Auto, &mut |row| {
        out.push(understand(&row?, RowFormat::Auto)?);
        Ok(())
    })
    .unwrap();
    out
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&files::read_text(path).unwrap()).unwrap()
}

#[test]
fn ids_and_masks_are_those_of_the_goldens() {
    let directory = goldens().join("tokenizers/chat");
    let codec = real();
    let template = ChatTemplate::from_dir(&directory, &codec).unwrap().unwrap();
    let encoder = Encoder {
        codec: &codec,
        template: Some(&template),
        train_on: TrainOn::Assistant,
        max_length: 4096,
        embedding_rows: codec.vocab_size(),
    };
    let golden = json(&goldens().join("data/tokens.json"));
    for name in ["text", "messages"] {
        let rows = samples(&goldens().join(format!("data/{name}.jsonl")));
        let wanted = golden[name].as_array().unwrap();
        assert!(rows.len() == wanted.len() && !rows.is_empty());
        for (sample, wanted) in rows.iter().zip(wanted) {
            let got = encoder.encode(sample).unwrap().example;
            let ids: Vec<u64> = got.ids.iter().map(|&id| id.into()).collect();
            let trained: Vec<u64> = got.trained.iter().map(|&t| t.into()).collect();
            assert_eq!(Value::from(ids), wanted["ids"], "{name}: {sample:?}");
            assert_eq!(Value::from(trained), wanted["trained"], "{name}: {sample:?}");
        }
    }
}

#[test]
fn a_completion_after_a_line_break_is_cut_as_if_encoded_alone() {
    for name in ["chat", "small", "small_bos"] {
        let codec = Tokenizer::load(&goldens().join("tokenizers").join(name)).unwrap();
        let encoder = Encoder {
            codec: &codec,
            template: None,
            train_on: TrainOn::Completion,
            max_length: 4096,
            embedding_rows: codec.vocab_size(),
        };
        for sample in samples(&goldens().join("data/eval_prompt_completion.jsonl")) {
            let Sample::PromptCompletion { prompt, completion } = &sample else {
                panic!("{sample:?}");
            };
            let before = codec.encode(prompt, true).unwrap();
            let mut ids = before.clone();
            ids.extend(codec.encode(completion, false).unwrap());
            ids.extend(codec.eos_id());
            let got = encoder.encode(&sample).unwrap().example;
            assert_eq!(got.ids, ids, "{name}: {sample:?}");
            let trained: Vec<bool> = (0..ids.len()).map(|t| t >= before.len()).collect();
            assert_eq!(got.trained, trained, "{name}: {sample:?}");
            assert_eq!(encoder.question(&sample).unwrap().unwrap().prompt, before);
        }
    }
}

/// The assistant turns of a conversation in the template of a family.
fn turns(template: &str, chat: &str) -> Vec<String> {
    let all = json(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../ft-formats/src/testdata/templates.json"));
    let source = all["templates"][template].as_str().unwrap();
    let template = ChatTemplate::from_text(source, template, &real()).unwrap();
    let messages = all["chats"][chat].as_array().unwrap();
    let wanted: Vec<usize> = (0..messages.len())
        .filter(|&i| messages[i]["role"] == "assistant")
        .collect();
    let rendered = spans::render(&template, messages, None, &wanted, spans::Search::Others).unwrap();
    assert_eq!(
        rendered.text,
        ChatRender::render(&template, messages, None, false).unwrap()
    );
    rendered
        .turns
        .into_iter()
        .map(|t| rendered.text[t].to_string())
        .collect()
}

#[test]
fn turns_in_the_templates_of_the_families() {
    let thought = "<think>\nadd\n</think>\n\n2";
    for (name, end) in [
        ("qwen", "<|im_end|>\n"),
        ("llama3", "<|eot_id|>"),
        ("gemma", "<end_of_turn>\n"),
        ("gemma3", "<end_of_turn>\n"),
        ("mistral", "<|endoftext|>"),
    ] {
        assert_eq!(turns(name, "plain"), [format!("{thought}{end}")], "{name}");
        assert_eq!(
            turns(name, "two"),
            [format!("{thought}{end}"), format!("4{end}")],
            "{name}"
        );
    }
    // The thinking of earlier turns is removed, that of the last turn is kept.
    assert_eq!(
        turns("qwen_think", "two"),
        ["2<|im_end|>\n", "<think>\ntwice\n</think>\n\n4<|im_end|>\n"]
    );
    // The last turn ends with an additional token.
    assert_eq!(
        turns("phi", "two"),
        [format!("{thought}<|end|>\n"), "4<|end|>\n<|endoftext|>".into()]
    );
    // Spaces around the content are kept if the template keeps them.
    assert_eq!(turns("qwen", "system"), [" I am a model.\n<|im_end|>\n"]);
    assert_eq!(turns("phi", "system"), [" I am a model.\n<|end|>\n"]);
    assert_eq!(turns("llama3", "system"), ["I am a model.<|eot_id|>"]);
    assert_eq!(turns("mistral", "system"), ["I am a model.<|endoftext|>"]);
    // Tool calls belong to the turn.
    let call =
        "<tool_call>\n{\"name\": \"w\", \"arguments\": {\"city\": \"Bern\", \"n\": 2, \"x\": 1.0}}\n</tool_call>";
    assert_eq!(
        turns("qwen", "calls"),
        [format!("{call}<|im_end|>\n"), "Sunny.<|im_end|>\n".into()]
    );
    let call = "w(city=\"Bern\", n=\"2\", x=\"1.0\")<|eom_id|>";
    assert_eq!(turns("llama3", "calls"), [call, "Sunny.<|eot_id|>"]);
}
