//! Real templates with real tokenizers, compared with transformers. By hand: `tests/parity/make_templates.py` fetches
//! them.

use super::Encoder;
use crate::TrainOn;
use crate::rows::Sample;
use crate::testing::{goldens, row, understand};
use ft_base::files;
use ft_formats::{ChatTemplate, Tokenizer};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Differences that are named in docs/templates.md: a part of the error of ft.
const KNOWN: [&str; 1] = ["which ft does not support"];

#[derive(Default)]
struct Count {
    same: usize,
    refused: usize,
    masks: usize,
    /// Tokens across the border of a block.
    across: usize,
    /// Turns that ft found without generation blocks.
    found: usize,
    lost: usize,
}

#[test]
#[ignore = "needs FT_REAL_TEMPLATES, made by tests/parity/make_templates.py"]
fn real_templates_are_rendered_as_by_transformers() {
    let directory = std::env::var("FT_REAL_TEMPLATES").expect("FT_REAL_TEMPLATES is not set");
    let directory = Path::new(&directory);
    let golden = files::read_text(&goldens().join("templates.json")).unwrap();
    let golden: Value = serde_json::from_str(&golden).unwrap();
    let mut tokenizers: BTreeMap<String, Tokenizer> = BTreeMap::new();
    let mut counts: BTreeMap<String, Count> = BTreeMap::new();
    let mut faults: Vec<String> = Vec::new();
    for line in files::read_text(&directory.join("cases.jsonl")).unwrap().lines() {
        let case: Value = serde_json::from_str(line).unwrap();
        let text = |key: &str| case[key].as_str().unwrap().to_string();
        let name = text("template");
        let codec = tokenizers
            .entry(text("tokenizer"))
            .or_insert_with(|| Tokenizer::load(&directory.join("tokenizers").join(text("tokenizer"))).unwrap());
        let count = counts.entry(name.clone()).or_default();
        let place = format!(
            "{name} {} {} {} {}",
            case["chat"], case["kwargs"], case["tools"], case["prompt"]
        );
        let source = files::read_text(&directory.join(format!("templates/{name}.jinja"))).unwrap();
        let template = match ChatTemplate::from_text(&source, &name, codec) {
            Ok(template) => template.with_kwargs(case["kwargs"].as_object().unwrap()).unwrap(),
            Err(e) => {
                faults.push(format!("{place}: {e}"));
                continue;
            }
        };
        let messages = golden["chats"][text("chat")].as_array().unwrap();
        let tools = (case["tools"] == true).then_some(&golden["tools"]);
        let got = match (
            template.render(messages, tools, case["prompt"] == true),
            case["text"].as_str(),
        ) {
            (Ok(got), Some(wanted)) if got == wanted => got,
            (Err(_), None) => {
                count.refused += 1;
                continue;
            }
            (Err(e), Some(_)) if KNOWN.iter().any(|known| e.to_string().contains(known)) => {
                count.lost += 1;
                continue;
            }
            (got, wanted) => {
                faults.push(format!("{place}:\n  ft   {got:?}\n  real {wanted:?}"));
                continue;
            }
        };
        let ids: Vec<u64> = codec.encode(&got, false).unwrap().into_iter().map(u64::from).collect();
        if json!(ids) != case["ids"] {
            faults.push(format!("{place}: other ids"));
            continue;
        }
        count.same += 1;
        let ends_with_an_answer = messages.last().is_some_and(|m| m["role"] == "assistant");
        // In rows, ft encodes control tokens in the text of a user as plain text.
        if case["prompt"] == true || !ends_with_an_answer || case["chat"] == "markers" {
            continue;
        }
        let sample = understand(
            &row(json!({"messages": messages, "tools": tools})),
            crate::RowFormat::Messages,
        );
        let Ok(sample @ Sample::Chat(_)) = sample else {
            faults.push(format!("{place}: {sample:?}"));
            continue;
        };
        let encoder = Encoder {
            codec,
            template: Some(&template),
            train_on: TrainOn::Assistant,
            max_length: 1 << 20,
            embedding_rows: codec.vocab_size(),
        };
        let example = match (encoder.encode(&sample), case["mask"].as_array()) {
            (Ok(encoded), _) => encoded.example,
            (Err(e), None) => {
                println!("{place}: {}", e.to_string().replace('\n', " "));
                count.lost += 1;
                continue;
            }
            (Err(e), Some(_)) => {
                faults.push(format!("{place}: {e}"));
                continue;
            }
        };
        let own: Vec<u64> = example.ids.iter().map(|id| u64::from(*id)).collect();
        if own != ids {
            faults.push(format!("{place}: the row has other ids"));
        } else if let Some(mask) = case["mask"].as_array() {
            let wanted: Vec<bool> = mask.iter().enumerate().map(|(i, m)| *m == 1 && i > 0).collect();
            let differ: Vec<usize> = (0..own.len()).filter(|i| example.trained[*i] != wanted[*i]).collect();
            // A token across the border of a block, also of an empty one (a tokenizer of another family splits the
            // markers): transformers trains it, ft does not.
            let alone = |i: usize| wanted.get(i + 1) != Some(&true) && (i == 0 || !wanted[i - 1]);
            let across = |i: &usize| wanted[*i] && (example.trained.get(i + 1) == Some(&true) || alone(*i));
            if differ.iter().all(across) {
                count.masks += 1;
                count.across += differ.len();
            } else {
                let at = example
                    .trained
                    .iter()
                    .zip(&wanted)
                    .position(|(a, b)| a != b)
                    .unwrap_or(0);
                let near = codec.decode(
                    &example.ids[at.saturating_sub(5)..(at + 5).min(example.ids.len())],
                    false,
                );
                faults.push(format!(
                    "{place}: other mask at {at}, near {near:?}: ft {}",
                    example.trained[at]
                ));
            }
        } else {
            count.found += 1;
        }
    }
    for (name, c) in &counts {
        println!(
            "{name}: {} same, {} refused by both, {} masks ({} tokens across), {} rows without blocks, {} refused by ft",
            c.same, c.refused, c.masks, c.across, c.found, c.lost
        );
    }
    println!("{} templates, {} differences", counts.len(), faults.len());
    faults.iter().take(40).for_each(|fault| println!("{fault}"));
    assert!(faults.is_empty() && counts.len() > 50);
}
