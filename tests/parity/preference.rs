//! Preference learning compared with TRL's trainers: tokens, losses, metrics, the gradient of every weight, complete
//! runs.

use crate::support::{all_close, close, copy_matching, ft, goldens, ids, json, numbers, path, tensors, text};
use crate::training::{recipe_lines, steps as step_lines};
use crate::wire;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;

const TOLERANCE: f64 = 1e-4;

fn dir() -> PathBuf {
    goldens().join("preference")
}

/// A model directory of these goldens with its tokenizer.
fn model(name: &str) -> TempDir {
    let out = TempDir::new().unwrap();
    for from in [dir().join(name), goldens().join("tokenizers/small")] {
        copy_matching(&from, out.path(), |_| true);
    }
    out
}

/// Builds `[rlhf]`, `[train]` and so on from dotted keys.
fn lines(golden: &Value, more: &[(&str, Value)]) -> String {
    let mut keys: Vec<(String, Value)> = golden["recipe"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(k, v)| (k.clone(), v.clone()))
        .collect();
    for (key, value) in more {
        if !keys.iter().any(|(k, _)| k == key) {
            keys.push((key.to_string(), value.clone()));
        }
    }
    recipe_lines(&keys)
}

#[test]
fn tokens_are_those_of_trl() {
    let golden = json(&dir().join("tokens.json"));
    let policy = model("policy");
    let rows = |file: &str, stage: &str, batch: usize| {
        let lines = recipe_lines(&[
            ("train.stage".into(), stage.into()),
            ("train.batch_size".into(), batch.into()),
            ("data.max_length".into(), 60.into()),
            ("data.shuffle".into(), false.into()),
        ]);
        wire::preference_rows(policy.path(), &dir().join(format!("{file}.jsonl")), &lines)
    };
    let mut compared = 0;
    for file in ["text", "messages", "implicit", "implicit_messages"] {
        let (pairs, whole) = (rows(file, "dpo", 1), rows(file, "reward", 1));
        let wanted = golden["rows"][file].as_array().unwrap();
        assert_eq!(pairs.len(), wanted.len(), "{file}");
        for ((pair, whole), want) in pairs.iter().zip(&whole).zip(wanted) {
            let prompt = ids(&want["prompt_ids"]);
            for (side, name) in ["chosen_ids", "rejected_ids"].iter().enumerate() {
                let answer = ids(&want[*name]);
                let trained: Vec<bool> = (0..prompt.len() + answer.len())
                    .map(|t| t >= prompt.len().max(1))
                    .collect();
                assert_eq!(pair[side].ids, [prompt.clone(), answer].concat(), "{file}: {name}");
                assert_eq!(pair[side].trained, trained, "{file}: {name}");
                assert_eq!(
                    whole[side].ids,
                    ids(&want["whole"][side]),
                    "{file}: {name} of a reward model"
                );
                compared += 1;
            }
        }
    }
    for file in ["judged", "text"] {
        let got = rows(file, "kto", 3);
        let wanted = golden["rows"][format!("kto_{file}")].as_array().unwrap();
        assert_eq!(got.len(), wanted.len(), "{file}");
        for (i, (got, want)) in got.iter().zip(wanted).enumerate() {
            for (document, name) in ["completion_ids", "KL_completion_ids"].iter().enumerate() {
                // In TRL the last group, with one row, uses this row as its own mismatch; ft uses the row before it.
                if document == 1 && i + 1 == wanted.len() && i % 3 == 0 {
                    continue;
                }
                let whole = [ids(&want["prompt_ids"]), ids(&want[*name])].concat();
                assert_eq!(got[document].ids, whole, "{file} {i}: {name}");
                compared += 1;
            }
        }
    }
    assert_eq!(compared, 2 * (4 + 2 + 2 + 1) + 2 * 5 + 2 * 8);
}

#[test]
fn losses_metrics_and_gradients_are_those_of_trl() {
    let golden = json(&dir().join("steps.json"));
    let (policy, reference) = (model("policy"), model("reference"));
    let all = golden["steps"].as_object().unwrap();
    assert_eq!(all.len(), 31);
    for (name, want) in all {
        let stage = text(want, "stage");
        let lines = lines(
            want,
            &[
                ("train.stage", stage.clone().into()),
                ("train.batch_size", want["batch"].clone()),
                ("train.gradient_accumulation_steps", 1.into()),
                ("data.max_length", golden["max_length"].clone()),
                ("data.shuffle", false.into()),
            ],
        );
        let mut wanted = tensors(&dir().join("steps").join(format!("{name}.safetensors")));
        let score = wanted.remove("score");
        let got = wire::preference_step(
            policy.path(),
            reference.path(),
            &dir().join(text(want, "rows")),
            &lines,
            score.as_deref(),
        );
        close(
            got.loss,
            want["loss"].as_f64().unwrap(),
            TOLERANCE,
            &format!("{name}: loss"),
        );
        if let Some(answers) = want["reference"].as_array() {
            let got: Vec<f64> = got.reference.clone();
            // TRL: all chosen answers, then all rejected ones. ft: pair by pair.
            for (side, answers) in answers.iter().enumerate() {
                let mine: Vec<f64> = got.iter().skip(side).step_by(answers_per_row(want)).copied().collect();
                all_close(
                    &mine,
                    &numbers(answers),
                    TOLERANCE,
                    &format!("{name}: reference {side}"),
                );
            }
        }
        for (metric, value) in want["metrics"].as_object().unwrap() {
            let mine = got.metrics.iter().find(|(m, _)| m == metric);
            let (_, mine) = mine.unwrap_or_else(|| {
                // TRL writes a KL of 0 and a cross-entropy even if the loss does not contain them.
                assert!(["kl", "nll_loss"].contains(&metric.as_str()), "{name}: no {metric}");
                &("", 0.0)
            });
            let (mine, value) = (*mine, value.as_f64().unwrap());
            assert!(
                (mine - value).abs() <= TOLERANCE * (1.0 + value.abs()),
                "{name}: {metric} {mine} {value}"
            );
        }
        // If the loss does not depend on a weight, TRL has no gradient or zeros.
        for (parameter, gradient) in &got.gradients {
            match wanted.get(&parameter.replace("objective.score", "score")) {
                Some(want) => all_close(gradient, want, TOLERANCE, &format!("{name}: gradient of {parameter}")),
                None => panic!("{name}: {parameter} has a gradient"),
            }
        }
        assert_eq!(got.gradients.len(), wanted.len(), "{name}: gradients");
    }
}

/// Number of documents in a row.
fn answers_per_row(want: &Value) -> usize {
    want["reference"].as_array().map_or(2, Vec::len)
}

#[test]
fn runs_are_those_of_trl() {
    let golden = json(&dir().join("runs.json"));
    let runs = golden["runs"].as_object().unwrap();
    assert_eq!(runs.len(), 4);
    let policy = model("policy");
    for (name, want) in runs {
        let work = TempDir::new().unwrap();
        let out = work.path().join("run");
        let rows = dir().join(text(want, "rows"));
        let lines = lines(
            want,
            &[
                ("train.stage", text(want, "stage").into()),
                ("train.output_dir", path(&out).into()),
                ("train.save_steps", 0.into()),
                ("data.train", path(&rows).into()),
                ("data.max_length", golden["max_length"].clone()),
                ("data.shuffle", false.into()),
                ("data.render", "plain".into()),
                ("model.path", path(policy.path()).into()),
                ("model.dtype", "f32".into()),
                ("model.device", "cpu".into()),
            ],
        );
        let file = work.path().join("recipe.toml");
        fs::write(&file, lines).unwrap();
        ft(&["train", "--recipe", path(&file)]);
        let got = step_lines(&out);
        let wanted = want["steps"].as_array().unwrap();
        assert_eq!(got.len(), wanted.len(), "{name}: steps");
        for (i, (got, want)) in got.iter().zip(wanted).enumerate() {
            for (key, value) in want.as_object().unwrap() {
                let Some(mine) = got[key].as_f64() else {
                    panic!("{name}: no `{key}` in step {}", i + 1)
                };
                let value = value.as_f64().unwrap();
                // The trainer rounds some of its values to four digits.
                assert!(
                    (mine - value).abs() <= 5e-4 * (1.0 + value.abs()),
                    "{name}: {key} of step {}: {mine} {value}",
                    i + 1
                );
            }
        }
    }
}
