//! Training runs: twenty steps of `ft train` compared with a plain PyTorch loop.

use crate::support::{all_close, close, data, goldens, json, numbers, path, tensors, text, training_model};
use crate::{support::ft, wire};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// Tolerance of losses and gradient norms at every step.
const TOLERANCE: f64 = 1e-4;
/// Relative to the total change of each parameter: AdamW amplifies the rounding of gradients near zero.
const TOLERANCE_CHANGE: f64 = 1e-3;

/// Builds a recipe. JSON numbers, texts, flags and lists of them are valid TOML too.
pub fn recipe(golden: &Value, model: &Path, out: &Path) -> String {
    let mut all: Vec<(String, Value)> = Vec::new();
    let mut put = |dotted: &str, value: Value| all.push((dotted.to_string(), value));
    put("model.path", path(model).into());
    put("model.dtype", "f32".into());
    put("model.device", "cpu".into());
    put("data.train", path(&data(&text(golden, "data"))).into());
    put("data.max_length", 512.into());
    put("data.packing", false.into());
    put("data.shuffle", false.into());
    put("train.output_dir", path(out).into());
    put("train.save_steps", 0.into());
    put("train.logging_steps", 1.into());
    for (key, value) in golden["recipe"].as_object().unwrap() {
        match key.as_str() {
            "tune.lora.adapter" => {
                let name = value.as_str().unwrap();
                put(key, path(&goldens().join("training/adapters").join(name)).into());
            }
            "tune.lora.corda.method" => {
                put(key, value.clone());
                put("tune.lora.corda.data", path(&data(&text(golden, "data"))).into());
            }
            _ => put(key, value.clone()),
        }
    }
    recipe_lines(&all)
}

/// Builds recipe text from dotted keys.
pub fn recipe_lines(keys: &[(String, Value)]) -> String {
    let mut tables: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (dotted, value) in keys {
        let (table, key) = dotted.rsplit_once('.').unwrap();
        let line = format!("{key} = {}", serde_json::to_string(value).unwrap());
        tables.entry(table.to_string()).or_default().push(line);
    }
    let mut out = String::new();
    for (table, lines) in tables {
        out.push_str(&format!("[{table}]\n{}\n\n", lines.join("\n")));
    }
    out
}

/// The step lines of `metrics.jsonl`.
pub fn steps(run: &Path) -> Vec<Value> {
    let all = fs::read_to_string(run.join("metrics.jsonl")).expect("metrics.jsonl");
    let lines = all.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    lines.filter(|l| l.get("loss").is_some()).collect()
}

/// For each step the first step with the same value: the pattern of repeats, independent of names.
fn pattern<T: PartialEq>(values: &[T]) -> Vec<usize> {
    values
        .iter()
        .map(|v| values.iter().position(|w| w == v).unwrap())
        .collect()
}

fn run(name: &str) {
    let golden = json(&goldens().join("training/runs").join(format!("{name}.json")));
    let model = training_model(&text(&golden, "model"));
    let work = TempDir::new().unwrap();
    let out = work.path().join("run");
    let file = work.path().join("recipe.toml");
    fs::write(&file, recipe(&golden, model.path(), &out)).unwrap();
    ft(&["train", "--recipe", path(&file)]);

    let steps = steps(&out);
    let wanted = numbers(&golden["losses"]);
    assert_eq!(steps.len(), wanted.len(), "{name}: number of steps");
    for (key, golden_key, tolerance) in [
        ("loss", "losses", TOLERANCE),
        ("grad_norm", "grad_norms", TOLERANCE),
        ("learning_rate", "learning_rates", 1e-6),
    ] {
        for (i, (step, want)) in steps.iter().zip(numbers(&golden[golden_key])).enumerate() {
            assert_eq!(step["step"].as_u64(), Some(i as u64 + 1));
            let got = step[key]
                .as_f64()
                .unwrap_or_else(|| panic!("{name}: no `{key}` in step {}", i + 1));
            close(got, want, tolerance, &format!("{name}: {key} of step {}", i + 1));
        }
    }
    if golden.get("active").is_some() {
        let got: Vec<&Value> = steps.iter().map(|s| &s["active_block"]).collect();
        assert_eq!(
            pattern(&got),
            pattern(golden["active"].as_array().unwrap()),
            "{name}: active blocks"
        );
    }

    let last = out.join("final");
    if golden["recipe"]["tune.method"] == "lora" {
        let got = tensors(&last.join("adapter_model.safetensors"));
        let want = tensors(
            &goldens()
                .join("training/runs")
                .join(format!("{name}.final.safetensors")),
        );
        assert_eq!(
            got.keys().collect::<Vec<_>>(),
            want.keys().collect::<Vec<_>>(),
            "{name}: names of adapter tensors"
        );
        for (tensor, values) in &got {
            all_close(values, &want[tensor], TOLERANCE_CHANGE, &format!("{name}: {tensor}"));
        }
        return;
    }
    let before = tensors(&model.path().join("model.safetensors"));
    let after = tensors(&last.join("model.safetensors"));
    assert_eq!(
        before.keys().collect::<Vec<_>>(),
        after.keys().collect::<Vec<_>>(),
        "{name}: names of weights"
    );
    let untouched: Vec<&str> = golden["untouched"]
        .as_array()
        .unwrap()
        .iter()
        .map(|n| n.as_str().unwrap())
        .collect();
    for tensor in &untouched {
        assert_eq!(after[*tensor], before[*tensor], "{name}: {tensor} was never active");
    }
    let changes = golden["change_norms"].as_object().unwrap();
    assert_eq!(changes.len() + untouched.len(), before.len(), "{name}");
    for (tensor, want) in changes {
        let pairs = after[tensor].iter().zip(&before[tensor]);
        let change = pairs.map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
        close(
            change,
            want.as_f64().unwrap(),
            TOLERANCE_CHANGE,
            &format!("{name}: change of {tensor}"),
        );
    }
}

/// One test per run, and one that checks that no golden is missing.
macro_rules! runs {
    ($($name:ident),+ $(,)?) => {
        $(#[test] fn $name() { run(stringify!($name)); })+

        #[test]
        fn every_golden_run_is_tested() {
            let tested: BTreeSet<String> = [$(stringify!($name)),+].iter().map(|n| n.to_string()).collect();
            let files = fs::read_dir(goldens().join("training/runs")).unwrap();
            let there: BTreeSet<String> = files
                .filter_map(|f| f.unwrap().file_name().into_string().unwrap().strip_suffix(".json").map(str::to_string))
                .collect();
            assert_eq!(tested, there);
        }
    };
}

runs!(
    full_llama_messages,
    full_llama_text,
    full_llama_no_clip,
    full_qwen3_messages,
    full_qwen3_text,
    sgd_momentum,
    sgd_plain,
    freeze_llama,
    lora_llama,
    lora_llama_rslora,
    lora_qwen3_targets,
    qlora_llama_nf4,
    qlora_qwen3_nf4_single,
    block_layer_ascending,
    block_layer_descending,
    block_layer_triples,
    block_module_ascending,
    block_module_descending,
    block_matrix_ascending,
    block_matrix_descending,
    block_with_ends_ascending,
    block_with_ends_descending,
    block_with_ends_tied,
    block_head_tied,
    ema_full,
    ema_lora,
    ema_block,
    ema_ratio,
    full_lion,
    full_adafactor,
    full_adafactor_tied,
    block_ratio_adjacent,
    block_ratio_scattered,
    block_ratio_with_ends,
    block_bread_sgd,
    block_bread_sgd_partial,
    block_bread_signsgd,
    block_bread_lora,
    block_bread_lora_partial,
);

#[test]
fn ids_and_trained_marks_are_those_of_the_reference() {
    let golden = json(&goldens().join("data/tokens.json"));
    let model = training_model("llama");
    for (name, stage) in [("messages", "sft"), ("text", "pretrain"), ("text", "sft")] {
        let got = wire::rows(model.path(), &data(name), stage);
        let want = golden[name].as_array().unwrap();
        assert_eq!(got.len(), want.len());
        for (i, (row, want)) in got.iter().zip(want).enumerate() {
            let ids: Vec<f64> = row.ids.iter().map(|id| *id as f64).collect();
            let trained: Vec<f64> = row.trained.iter().map(|t| f64::from(u8::from(*t))).collect();
            assert_eq!(ids, numbers(&want["ids"]), "{name} row {i}: ids");
            assert_eq!(trained, numbers(&want["trained"]), "{name} row {i}: trained");
        }
    }
}
