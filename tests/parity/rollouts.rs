//! Many prompts answered in one batch give the ids of transformers, which answered each prompt alone.

use crate::support::{Form, directories, family, goldens, ids, json, numbers};
use crate::wire::{self, Question, Setup};
use serde_json::Value;
use std::fs;

fn rows(name: &str) -> Vec<Value> {
    let text = fs::read_to_string(goldens().join("rollouts").join(format!("{name}.jsonl"))).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn names() -> Vec<String> {
    let mut names = directories(&goldens().join("families"));
    // Decoding with `longrope` has at most `original_max_position_embeddings` tokens, here 32: less than the prompts.
    names.retain(|name| name != "phi3_longrope");
    assert_eq!(names.len(), 110);
    names
}

fn questions(name: &str, rows: &[Value]) -> Vec<Question> {
    let stops = json(&goldens().join("families").join(name).join("generation_config.json"));
    let question = |row: &Value| Question {
        prompt: ids(&row["prompt"]),
        stops: ids(&stops["eos_token_id"]),
    };
    rows.iter().map(question).collect()
}

#[test]
fn greedy_batches_are_the_rows_of_transformers() {
    let setups = [
        Setup::ALL,
        // One row at a time; few rows in flight and prompts in small pieces; no shared prefixes.
        Setup { rows: 1, ..Setup::ALL },
        Setup {
            rows: 3,
            prefill_tokens: 17,
            ..Setup::ALL
        },
        Setup {
            rows: 7,
            share_prefixes: false,
            same_bits: true,
            ..Setup::ALL
        },
    ];
    for name in names() {
        let rows = rows(&name);
        let questions = questions(&name, &rows);
        let dir = family(&name, Form::V5);
        let mut shared = Vec::new();
        for setup in setups {
            let (answers, speed) = wire::rollouts(dir.path(), &questions, setup);
            shared.push(speed.shared_tokens);
            for (i, (row, got)) in rows.iter().zip(&answers).enumerate() {
                let want = ids(&row["new_ids"]);
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
            shared[0] > 100 && shared[0] == shared[1] && shared[3] == 0,
            "{name}: {shared:?}"
        );
    }
}

/// The result is shown with `--nocapture`. The weights are random: the logits of a trained model are further apart.
#[test]
fn smaller_caches_stay_near() {
    for (stored, mean, worst) in [("bf16", 8e-3, 0.12), ("int8", 3e-2, 0.5)] {
        let (mut sum, mut most, mut n, mut same, mut all) = (0f64, 0f64, 0, 0, 0);
        for name in names() {
            let rows = rows(&name);
            let questions = questions(&name, &rows);
            let dir = family(&name, Form::V5);
            let (answers, speed) = wire::rollouts(dir.path(), &questions, Setup::stored(stored));
            let (_, exact) = wire::rollouts(dir.path(), &questions, Setup::ALL);
            assert!(speed.cache_bytes * 10 <= exact.cache_bytes * 6, "{name}");
            // Three tokens of Solar Open go to other experts with rounded keys and values, in transformers too: 0.11, 0.17 and
            // 0.19 off there as here (docs/lab-book.md).
            let bound = if name == "solar_open" { 0.3 } else { worst };
            let mut own = Vec::new();
            for (row, got) in rows.iter().zip(&answers) {
                let want = ids(&row["new_ids"]);
                // After the first different token the texts cannot be compared.
                let alike = got.ids.iter().zip(&want).take_while(|(a, b)| a == b).count();
                (same, all) = (same + alike, all + want.len());
                for (g, w) in got.log_probs.iter().zip(numbers(&row["log_probs"])).take(alike) {
                    let off = (*g as f64 - w).abs();
                    (sum, most, n) = (sum + off, most.max(off), n + 1);
                    own.push(off);
                }
            }
            own.sort_by(f64::total_cmp);
            if let [.., second, largest] = own[..] {
                println!("{stored}, {name}: {second:.1e} and {largest:.1e} at most");
                assert!(largest < bound, "{stored}, {name}: {largest}");
            }
        }
        println!(
            "{stored}: log-probabilities off by {:.2e} in the mean, {most:.2e} at most; {same} of {all} ids before the first other choice",
            sum / n as f64
        );
        assert!(sum / (n as f64) < mean && same * 2 > all, "{stored}");
    }
}
