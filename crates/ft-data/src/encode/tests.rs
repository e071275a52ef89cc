//! Tests of text and prompt-completion rows, truncation, and refused rows.

use super::{EncodedRow, Encoder};
use crate::TrainOn;
use crate::codec::TextCodec;
use crate::rows::Sample;
use crate::testing::*;
use ft_base::Result;

fn gpt() -> Words {
    Words::new(&["</s>"], None, Some("</s>"))
}

fn llama() -> Words {
    Words::new(&["<s>", "</s>"], Some("<s>"), Some("</s>"))
}

fn encoder(codec: &Words, train_on: TrainOn, max_length: usize) -> Encoder<'_> {
    Encoder {
        codec,
        template: None,
        train_on,
        max_length,
        embedding_rows: 1000,
    }
}

fn text(codec: &Words, text: &str) -> Result<EncodedRow> {
    encoder(codec, TrainOn::Assistant, 100).encode(&Sample::Text(text.into()))
}

fn sample(prompt: &str, completion: &str) -> Sample {
    Sample::PromptCompletion {
        prompt: prompt.into(),
        completion: completion.into(),
    }
}

/// Tokens, with trained tokens in brackets.
fn show(codec: &Words, encoded: &EncodedRow) -> String {
    let e = &encoded.example;
    let one = |(token, &trained): (String, &bool)| if trained { format!("[{token}]") } else { token };
    codec.tokens(&e.ids).into_iter().zip(&e.trained).map(one).collect()
}

#[test]
fn text_is_encoded_as_the_tokenizer_does_and_ends_once() {
    let codec = gpt();
    assert_eq!(
        show(&codec, &text(&codec, "one two three").unwrap()),
        "one[ two][ three][</s>]"
    );
    assert_eq!(show(&codec, &text(&codec, "one two</s>").unwrap()), "one[ two][</s>]");
    let codec = llama();
    assert_eq!(show(&codec, &text(&codec, "one two").unwrap()), "<s>[one][ two][</s>]");
    let mut codec = llama();
    codec.adds_eos = true;
    assert_eq!(show(&codec, &text(&codec, "one two").unwrap()), "<s>[one][ two][</s>]");
}

#[test]
fn completion_and_eos_are_trained_and_the_prompt_is_not() {
    let codec = llama();
    for train_on in [TrainOn::Assistant, TrainOn::Completion] {
        let row = encoder(&codec, train_on, 100)
            .encode(&sample("2+2 is", " four indeed"))
            .unwrap();
        assert_eq!(show(&codec, &row), "<s>2+2 is[ four][ indeed][</s>]");
    }
    let row = encoder(&codec, TrainOn::All, 100)
        .encode(&sample("2+2 is", " four"))
        .unwrap();
    assert_eq!(show(&codec, &row), "<s>[2][+][2][ is][ four][</s>]");
}

#[test]
fn a_token_across_the_border_belongs_to_the_completion() {
    let codec = llama();
    let show_row = |prompt: &str, completion: &str| {
        let row = encoder(&codec, TrainOn::Completion, 100)
            .encode(&sample(prompt, completion))
            .unwrap();
        show(&codec, &row)
    };
    assert_eq!(show_row("say: over", "board"), "<s>say:[ overboard][</s>]");
    assert_eq!(show_row("say: ", "board"), "<s>say:[ board][</s>]");
    assert_eq!(show_row("é", "ü"), "<s>[éü][</s>]");
    assert_eq!(show_row("", "all of it"), "<s>[all][ of][ it][</s>]");
    assert_eq!(show_row("nothing more", ""), "<s>nothing more[</s>]");
    assert_eq!(show_row("x", " y</s>"), "<s>x[ y][</s>]");
    let codec = gpt();
    let row = encoder(&codec, TrainOn::Completion, 100)
        .encode(&sample("", "a b"))
        .unwrap();
    assert_eq!(show(&codec, &row), "a[ b][</s>]");
}

#[test]
fn a_tokenizer_that_adds_eos_gives_one_eos_and_it_is_trained() {
    let mut codec = llama();
    codec.adds_eos = true;
    for (completion, expected) in [(" b", "<s>a[ b][</s>]"), ("", "<s>a[</s>]")] {
        let row = encoder(&codec, TrainOn::Completion, 100)
            .encode(&sample("a", completion))
            .unwrap();
        assert_eq!(show(&codec, &row), expected);
    }
    let question = encoder(&codec, TrainOn::Completion, 100)
        .question(&sample("a", " b"))
        .unwrap()
        .unwrap();
    assert_eq!(codec.decode(&question.prompt).unwrap(), "<s>a");
    assert_eq!(question.answer, " b");
}

#[test]
fn a_long_row_keeps_its_head_and_says_what_it_lost() {
    let codec = llama();
    let row = encoder(&codec, TrainOn::Completion, 4)
        .encode(&sample("a b", " c d e"))
        .unwrap();
    assert_eq!(show(&codec, &row), "<s>a b[ c]");
    assert_eq!((row.cut, row.trained_before_cut), (3, 4));
    let row = encoder(&codec, TrainOn::Completion, 7)
        .encode(&sample("a b", " c d e"))
        .unwrap();
    assert_eq!(row.cut, 0);
}

#[test]
fn two_beginnings_are_refused() {
    let codec = llama();
    let e = text(&codec, "<s>hello").unwrap_err().to_string();
    assert!(
        e.contains("two beginning-of-sequence tokens") && e.contains("hint:"),
        "{e}"
    );
    // If the tokenizer adds no BOS, the BOS in the text is correct.
    let mut codec = llama();
    codec.adds_bos = false;
    assert_eq!(show(&codec, &text(&codec, "<s>hello").unwrap()), "<s>[hello][</s>]");
}

#[test]
fn an_id_beyond_the_embedding_is_refused() {
    let codec = gpt();
    codec.id("known");
    let row = codec.id("new");
    let mut small = encoder(&codec, TrainOn::All, 100);
    small.embedding_rows = row as usize;
    assert!(small.encode(&Sample::Text("known".into())).is_ok());
    let e = small
        .encode(&Sample::Text("known".to_string() + "\nnew"))
        .unwrap_err()
        .to_string();
    assert!(
        e.contains("expected ids below 2") && e.contains("same directory"),
        "{e}"
    );
}

#[test]
fn no_end_token_and_no_template_are_refused() {
    let codec = Words::new(&[], None, None);
    assert!(text(&codec, "a").unwrap_err().to_string().contains("eos_token"));
    let codec = gpt();
    let chat = crate::rows::Chat {
        messages: vec![serde_json::json!({"role": "user", "content": "a"})],
        tools: None,
        first_trained: 0,
        untrained: Vec::new(),
    };
    let e = encoder(&codec, TrainOn::All, 100)
        .encode(&Sample::Chat(chat))
        .unwrap_err();
    assert_eq!(e.exit_code(), 2);
    assert!(e.to_string().contains("ChatTemplate::from_file"), "{e}");
}
