//! RL: advantages, importance ratios, KL, losses and gradients of fixed rollouts, compared with TRL's own trainers
//! (GRPO, RLOO) and plain torch (PPO).

use crate::support::{all_close, close, goldens, ids, json, numbers, tensors, training_model};
use crate::wire_rl::{self, Rollout};
use serde_json::Value;
use std::collections::BTreeMap;

const TOLERANCE: f64 = 1e-4;

fn lists(value: &Value) -> Vec<Vec<f64>> {
    value
        .as_array()
        .map_or_else(Vec::new, |rows| rows.iter().map(numbers).collect())
}

fn rows_of_ids(value: &Value) -> Vec<Vec<u32>> {
    value.as_array().unwrap().iter().map(ids).collect()
}

/// Converts the golden's settings to a recipe.
fn recipe(kind: &str, golden: &Value, case: &Value) -> String {
    let mut tables: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let mut put = |table: &'static str, key: &str, value: &Value| {
        tables.entry(table).or_default().push(format!("{key} = {value}"));
    };
    let quoted = |text: &str| Value::String(text.into());
    put("train", "stage", &quoted(if kind == "ppo" { "ppo" } else { "grpo" }));
    put("train", "batch_size", &6.into());
    put("train", "gradient_accumulation_steps", &1.into());
    put("rlhf", "rewards", &serde_json::json!(["exact", "exact"]));
    put("rlhf", "reward_weights", &golden["reward_weights"]);
    put("rlhf", "num_generations", &golden["group"]);
    put("rlhf", "num_iterations", &2.into());
    put("rlhf", "max_completion_length", &golden["max_completion_length"]);
    if kind == "rloo" {
        put("rlhf.grpo", "loss_type", &quoted("rloo"));
    }
    for (key, value) in case["settings"].as_object().unwrap() {
        match key.as_str() {
            "vllm_importance_sampling_mode" => {
                put("rlhf", "rollout_weights", &quoted("int8"));
                put("rlhf", "rollout_correction", value);
                put("rlhf", "rollout_clip_min", &golden["clip"][0]);
                put("rlhf", "rollout_clip_max", &golden["clip"][1]);
            }
            "temperature" => put("rlhf", key, value),
            _ if kind == "ppo" => put("rlhf.ppo", key, value),
            _ => put("rlhf.grpo", key, value),
        }
    }
    let table = |(name, lines): (&str, Vec<String>)| format!("[{name}]\n{}\n", lines.join("\n"));
    tables.into_iter().map(table).collect()
}

fn check(name: &str) {
    let golden = json(&goldens().join("rl/golden.json"));
    let case = &golden["cases"][name];
    let kind = case["kind"].as_str().unwrap();
    let model = training_model("llama");
    let (prompts, answers) = (rows_of_ids(&golden["prompts"]), rows_of_ids(&golden["answers"]));
    let ended: Vec<usize> = numbers(&golden["ended"]).into_iter().map(|x| x as usize).collect();
    let rewards: Vec<Vec<f64>> = golden["rewards"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| {
            row.as_array()
                .unwrap()
                .iter()
                .map(|x| x.as_f64().unwrap_or(f64::NAN))
                .collect()
        })
        .collect();
    let rollout = Rollout {
        recipe: recipe(kind, &golden, case),
        prompts,
        finished: (0..answers.len()).map(|i| ended.contains(&i)).collect(),
        answers,
        rewards,
        old: lists(&case["old"]),
        reference: lists(&case["reference"]),
        sampling: lists(&case["sampling"]),
        values: lists(&case["values"]),
        value_head: case
            .get("value_weight")
            .map(|w| (numbers(w), numbers(&case["value_bias"])[0])),
    };
    let got = wire_rl::rl(model.path(), &rollout);
    // TRL does not compute masked answers.
    let masked = case["settings"]["mask_truncated_completions"] == true;
    for (i, (row, want)) in got.exact.iter().zip(lists(&case["exact"])).enumerate() {
        if masked && !rollout.finished[i] {
            continue;
        }
        all_close(
            row,
            &want,
            TOLERANCE,
            &format!("{name}: log-probabilities of answer {i}"),
        );
    }
    let want = match kind {
        "ppo" => lists(&case["advantages"]),
        _ => numbers(&case["advantages"]).into_iter().map(|a| vec![a]).collect(),
    };
    for (what, got, want) in [
        ("advantages", &got.advantages, want),
        ("returns", &got.returns, lists(&case["returns"])),
        ("importance ratios", &got.ratios, lists(&case["ratios"])),
    ] {
        assert_eq!(
            got.iter().filter(|r| !r.is_empty()).count(),
            want.len(),
            "{name}: {what}"
        );
        for (i, (row, want)) in got.iter().zip(&want).enumerate() {
            all_close(row, want, TOLERANCE, &format!("{name}: {what} of answer {i}"));
        }
    }
    close(
        got.loss,
        case["loss"].as_f64().unwrap(),
        TOLERANCE,
        &format!("{name}: loss"),
    );
    for key in [
        "kl",
        "entropy",
        "clip_ratio_low",
        "clip_ratio_high",
        "policy_loss",
        "value_loss",
    ] {
        if let Some(want) = case[key].as_f64() {
            let found = got
                .metrics
                .get(key)
                .unwrap_or_else(|| panic!("{name}: no metric `{key}`"));
            close(*found, want, TOLERANCE, &format!("{name}: {key}"));
        }
    }
    let mut seen = 0;
    for (tensor, want) in tensors(&goldens().join("rl/gradients.safetensors")) {
        let Some(parameter) = tensor.strip_prefix(&format!("{name}/")) else {
            continue;
        };
        let found = got
            .gradients
            .get(parameter)
            .unwrap_or_else(|| panic!("{name}: no gradient of {parameter}"));
        all_close(found, &want, TOLERANCE, &format!("{name}: gradient of {parameter}"));
        seen += 1;
    }
    assert!(seen >= if kind == "ppo" { 5 } else { 3 }, "{name}: gradients");
}

macro_rules! cases {
    ($($name:ident),+ $(,)?) => {
        $(#[test] fn $name() { check(stringify!($name)); })+

        #[test]
        fn every_golden_has_a_test() {
            let golden = json(&goldens().join("rl/golden.json"));
            let mut names: Vec<&str> = golden["cases"].as_object().unwrap().keys().map(String::as_str).collect();
            names.sort();
            let mut tested = vec![$(stringify!($name)),+];
            tested.sort();
            assert_eq!(names, tested);
        }
    };
}

cases!(
    grpo,
    dapo,
    dr_grpo,
    bnpo,
    gspo,
    gspo_dapo,
    plain_kl,
    token_mask,
    sequence_mask,
    sequence_truncate,
    masked,
    masked_grpo,
    rloo,
    rloo_normalized,
    ppo,
    ppo_k3,
);
