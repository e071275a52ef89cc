//! The messages of `ft data`, `ft plan` and `ft train` about the columns of a file and the rendering of texts.

use crate::bench::{Bench, said};
use std::fs;

fn shown(bench: &Bench, command: &str, more: &[&str]) -> String {
    let arguments = [&[command, "--recipe", "r.toml", "data.train=q.csv"], more].concat();
    let out = bench.ft(&arguments);
    assert!(out.status.success(), "{}", said(&out));
    // The box of the header may wrap lines.
    let text = String::from_utf8_lossy(&out.stdout).to_string() + &said(&out);
    let words = text.split_whitespace().filter(|w| !["│", "|"].contains(w));
    words.collect::<Vec<_>>().join(" ")
}

#[test]
fn every_column_is_named() {
    let bench = Bench::new();
    fs::write(
        bench.path("q.csv"),
        "id,question,answer\n1,What is 2 + 2?,4\n2,What is 1 + 1?,2\n",
    )
    .unwrap();
    let line = "prompt-completion: prompt from question, completion from answer; not used: id; rendered with the chat template";
    let data = shown(&bench, "data", &[]);
    assert!(
        data.contains(&format!("format {line}")) && data.contains("<|im_start|>user What is 2 + 2?"),
        "{data}"
    );
    assert!(shown(&bench, "plan", &[]).contains(line));
    let train = shown(&bench, "train", &["train.max_steps=1", "train.output_dir=chat"]);
    assert!(train.contains(line) && !train.contains("no row is rendered"), "{train}");

    // The output states plain text, and warns that a chat would differ from the training.
    let more = ["data.render=plain", "train.max_steps=1", "train.output_dir=plain"];
    let train = shown(&bench, "train", &more);
    assert!(train.contains("plain text (data.render = \"plain\")"), "{train}");
    assert!(train.contains("no row is rendered with the chat template"), "{train}");
    assert!(
        train.contains("no space or line break between prompt and answer"),
        "{train}"
    );
    let data = shown(&bench, "data", &["data.render=plain"]);
    assert!(data.contains("What is 2 + 2?⟦4<|endoftext|>⟧"), "{data}");
}

#[test]
fn bad_rows_are_counted_and_rejected_answers_are_not_learned() {
    let bench = Bench::new();
    let good = r#"{"prompt": "a", "completion": "b", "label": true}"#;
    let rows = format!("{good}\n{{\"prompt\": \"cut \\ud83d\"}}\n{{\"prompt\": 1}}\nx\n");
    fs::write(bench.path("bad.jsonl"), rows).unwrap();
    let refused = |more: &[&str], words: &[&str]| {
        let arguments = [
            &[
                "train",
                "--recipe",
                "r.toml",
                "data.train=bad.jsonl",
                "train.output_dir=bad",
            ],
            more,
        ]
        .concat();
        let out = bench.ft(&arguments);
        assert_eq!(out.status.code(), Some(1), "{}", said(&out));
        for word in words {
            assert!(said(&out).contains(word), "no {word} in {}", said(&out));
        }
        assert!(!bench.path("bad").exists());
    };
    refused(&[], &["3 of 4 rows", "bad.jsonl:2", "bad.jsonl:3", "bad.jsonl:4"]);
    fs::write(
        bench.path("bad.jsonl"),
        format!("{good}\n{}\n", good.replace("true", "false")),
    )
    .unwrap();
    refused(&[], &["bad.jsonl:2", "marks this answer as bad", "kto"]);
    fs::write(
        bench.path("bad.jsonl"),
        "{\"question\": \"q\", \"chosen\": \"a\", \"rejected\": \"b\", \"system\": \"s\"}\n",
    )
    .unwrap();
    refused(&["train.stage=dpo", "data.render=plain"], &["cannot contain `system`"]);
}
