//! Many prompts answered together, in any company: the ids of transformers, which answered each alone.

use crate::support::{Form, directories, family, goldens, json, numbers};
use crate::wire::{self, Question, Setup};
use serde_json::Value;
use std::fs;

fn rows(name: &str) -> Vec<Value> {
    let text = fs::read_to_string(goldens().join("rollouts").join(format!("{name}.jsonl"))).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn ids(row: &Value, key: &str) -> Vec<u32> {
    numbers(&row[key]).iter().map(|x| *x as u32).collect()
}

#[test]
fn greedy_batches_are_the_rows_of_transformers() {
    let base = Setup {
        rows: 64,
        prefill_tokens: 1024,
        share_prefixes: true,
        same_bits: false,
    };
    let setups = [
        base,
        // A row alone; few in flight and prompts in small pieces; nothing shared.
        Setup { rows: 1, ..base },
        Setup {
            rows: 3,
            prefill_tokens: 17,
            ..base
        },
        Setup {
            rows: 7,
            share_prefixes: false,
            same_bits: true,
            ..base
        },
    ];
    let names = directories(&goldens().join("families"));
    assert_eq!(names.len(), 18);
    for name in names {
        let rows = rows(&name);
        let stops =
            numbers(&json(&goldens().join("families").join(&name).join("generation_config.json"))["eos_token_id"]);
        let stops: Vec<u32> = stops.iter().map(|x| *x as u32).collect();
        let questions: Vec<Question> = rows
            .iter()
            .map(|row| Question {
                prompt: ids(row, "prompt"),
                stops: stops.clone(),
            })
            .collect();
        let dir = family(&name, Form::V5);
        let mut shared = Vec::new();
        for setup in setups {
            let (answers, from_cache) = wire::rollouts(dir.path(), &questions, setup);
            shared.push(from_cache);
            for (i, (row, got)) in rows.iter().zip(&answers).enumerate() {
                let want = ids(row, "new_ids");
                assert!(got.ids.len() >= want.len(), "{name}: row {i}");
                assert_eq!(got.ids[..want.len()], want, "{name}: row {i}, {setup:?}");
                if !row["cut"].as_bool().unwrap() {
                    assert_eq!(got.ids.len(), want.len(), "{name}: row {i}");
                    assert_eq!(got.finished, row["finished"].as_bool().unwrap(), "{name}: row {i}");
                }
                for (g, w) in got.log_probs.iter().zip(numbers(&row["log_probs"])) {
                    let off = (*g as f64 - w).abs();
                    assert!(off < 1e-4 * w.abs().max(1.0), "{name}: row {i}: {g} instead of {w}");
                }
            }
        }
        assert!(
            shared[0] > 200 && shared[0] == shared[1] && shared[3] == 0,
            "{name}: {shared:?}"
        );
    }
}
