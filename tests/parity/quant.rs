//! NF4 compared with bitsandbytes, bit by bit: quantized data, absmax, dequantized values. `training.rs` has the QLoRA
//! runs.

use crate::support::{data, eval, ft, goldens, json, path, tensors, training_model};
use ft::quant::{Format, QMatrix, quantize};
use ft::recipe::Dtype;
use safetensors::SafeTensors;
use std::fs;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// The same values as `weight` of `make_quant.py`.
fn weight(rows: usize, columns: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut values: Vec<f32> = (0..rows * columns)
        .map(|_| {
            let sum: i64 = (0..4)
                .map(|_| {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    (state >> 48) as i64
                })
                .sum();
            (sum - 2 * 65_535) as f32 * (-20f32).exp2()
        })
        .collect();
    values[rows / 2 * columns..][..columns]
        .iter_mut()
        .for_each(|x| *x *= 8.0);
    values
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn part(quantized: &QMatrix, name: &str) -> Vec<u8> {
    quantized
        .parts()
        .into_iter()
        .find(|p| p.name == name)
        .unwrap()
        .bytes
        .into_owned()
}

#[test]
fn nf4_is_that_of_bitsandbytes() {
    let dir = goldens().join("quant");
    let bytes = fs::read(dir.join("nf4.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let raw = |name: String| file.tensor(&name).unwrap().data().to_vec();
    let floats = |name: String| -> Vec<f32> {
        raw(name)
            .as_chunks::<4>()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b))
            .collect()
    };
    let info = json(&dir.join("nf4.json"));
    for (name, about) in info["weights"].as_object().unwrap() {
        let size = |key: &str| about[key].as_u64().unwrap() as usize;
        let dims = (size("rows"), size("columns"));
        let values = weight(dims.0, dims.1, about["seed"].as_u64().unwrap());

        let plain = quantize(&values, dims, Format::Nf4 { double: false }, Dtype::F32).unwrap();
        assert!(part(&plain, "codes") == raw(format!("{name}.codes")), "{name}: codes");
        assert!(
            part(&plain, "absmax") == raw(format!("{name}.absmax")),
            "{name}: absmax"
        );
        assert!(
            bits(&plain.dequantize()) == bits(&floats(format!("{name}.decoded"))),
            "{name}: decoded values"
        );

        // The mean of the absmax is a sum: its last bit may depend on the order of addition.
        let format = Format::Nf4 { double: true };
        let double = quantize(&values, dims, format, Dtype::F32).unwrap();
        let offset = about["offset"].as_f64().unwrap() as f32;
        let own = f32::from_le_bytes(part(&double, "nested_offset").try_into().unwrap());
        assert!((own - offset).abs() <= 2e-7 * offset, "{name}: offset {own} {offset}");
        assert!(
            part(&double, "absmax") == raw(format!("{name}.nested_codes")),
            "{name}: coded absmax"
        );
        let nested = part(&double, "nested_absmax");
        let nested = nested.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
        for (own, theirs) in nested.zip(floats(format!("{name}.nested_absmax"))) {
            assert!(
                (own - theirs).abs() <= 1e-6 * theirs,
                "{name}: absmax of absmax {own} {theirs}"
            );
        }

        // Dequantizing their bytes gives their values, bit by bit.
        for (dtype, want) in [(Dtype::F32, "decoded_double"), (Dtype::Bf16, "decoded_bf16")] {
            let take = |part: &str| {
                Ok(match part {
                    "codes" => raw(format!("{name}.codes")),
                    "absmax" => raw(format!("{name}.nested_codes")),
                    "nested_absmax" => raw(format!("{name}.nested_absmax")),
                    _ => offset.to_le_bytes().to_vec(),
                })
            };
            let theirs = QMatrix::from_parts(format, dims, dtype, take).unwrap();
            assert!(
                bits(&theirs.dequantize()) == bits(&floats(format!("{name}.{want}"))),
                "{name}: {want}"
            );
        }
    }
    assert_eq!(
        ft::quant::tables().0.map(f32::to_bits).to_vec(),
        bits(&floats("table".into()))
    );
    assert_eq!(
        ft::quant::tables().1.map(f32::to_bits).to_vec(),
        bits(&floats("nested_table".into()))
    );
}

/// Runs `ft train` for a few steps; returns the losses.
fn train(work: &Path, model: &Path, more: &str) -> Vec<f64> {
    let recipe = format!(
        "[model]\npath = {:?}\ndtype = \"f32\"\n[data]\ntrain = {:?}\nmax_length = 512\npacking = false\nshuffle = false\n\
         [optimizer]\nlearning_rate = 5e-3\n[train]\nmax_steps = 4\nbatch_size = 2\ngradient_accumulation_steps = 1\n\
         save_steps = 0\noutput_dir = {:?}\n{more}",
        path(model),
        path(&data("messages")),
        path(&work.join("run")),
    );
    let file = work.join("recipe.toml");
    fs::write(&file, recipe).unwrap();
    ft(&["train", "--recipe", path(&file), "--overwrite"]);
    let lines = fs::read_to_string(work.join("run/metrics.jsonl")).unwrap();
    let lines = lines
        .lines()
        .map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
    lines.filter_map(|l| l["loss"].as_f64()).collect()
}

const LORA: &str = "[tune]\nmethod = \"lora\"\n";

/// Training on a quantized directory equals training with a recipe that quantizes the weights on load.
#[test]
fn a_quantized_directory_is_what_a_recipe_quantizes() {
    let model = training_model("llama");
    for (to, group) in [("int8", ""), ("int8", "128"), ("int4", "64"), ("nf4", "")] {
        let work = TempDir::new().unwrap();
        let out = work.path().join("coded");
        let mut arguments = vec![
            "quantize",
            "--model",
            path(model.path()),
            "--to",
            to,
            "--out",
            path(&out),
        ];
        let mut memory = format!("[memory]\nfrozen_weights = \"{to}\"\n");
        if !group.is_empty() {
            arguments.extend(["--group-size", group]);
            memory.push_str(&format!("group_size = {group}\n"));
        }
        ft(&arguments);
        assert!(
            fs::read_to_string(out.join("quantization.md"))
                .unwrap()
                .contains(&format!("| {to}"))
        );
        let own = train(work.path(), model.path(), &format!("{LORA}{memory}"));
        let stored = train(work.path(), &out, LORA);
        assert_eq!(own.len(), 4);
        assert_eq!(own, stored, "{to} {group}");
        let exact = train(work.path(), model.path(), LORA);
        assert!(
            own[0] != exact[0] && (own[0] - exact[0]).abs() < 0.3,
            "{to}: {} {}",
            own[0],
            exact[0]
        );

        // Evaluation and decoding accept it as any model.
        let adapter = work.path().join("run/final");
        let (loss, _) = eval(&out, None, &data("messages"));
        assert!(loss.is_finite());
        ft(&[
            "generate",
            "--model",
            path(&out),
            "--prompt",
            "a",
            "--max-new-tokens",
            "2",
        ]);
        let merged = work.path().join("merged");
        // Merging into the original model works: weights without an adapter keep their values.
        ft(&[
            "merge",
            "--model",
            path(model.path()),
            "--adapter",
            path(&adapter),
            "--out",
            path(&merged),
        ]);
        let (before, after) = (
            tensors(&model.path().join("model.safetensors")),
            tensors(&merged.join("model.safetensors")),
        );
        for (name, values) in &after {
            let largest = values
                .iter()
                .zip(&before[name])
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f64::max);
            let adapted = name.ends_with("_proj.weight");
            assert!(
                if adapted { largest < 0.1 } else { largest == 0.0 },
                "{name}: {largest}"
            );
        }
    }
}

/// Frozen weights that are quantized in memory are written to `final/` with their original values.
#[test]
fn frozen_codes_leave_the_weights_as_they_were() {
    let model = training_model("qwen3");
    let work = TempDir::new().unwrap();
    let more = "[tune]\nmethod = \"freeze\"\n[tune.freeze]\ntrainable_layers = 1\n[memory]\nfrozen_weights = \"int4\"\n\
                overrides = { \"layers.0.\" = \"int8\", \"*.o_proj.*\" = \"f32\" }\n";
    train(work.path(), model.path(), more);
    let before = tensors(&model.path().join("model.safetensors"));
    let after = tensors(&work.path().join("run/final/model.safetensors"));
    let mut trained = 0;
    for (name, values) in &before {
        if name.contains("layers.2.") {
            trained += usize::from(after[name] != *values);
        } else {
            assert!(after[name] == *values, "{name} is frozen");
        }
    }
    assert!(trained > 5);
}

/// A budget between the smallest and the full size gives a size in between, and the report has the measurements.
#[test]
fn a_budget_chooses_bits() {
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets");
    let (model, work) = (assets.join("tiny"), TempDir::new().unwrap());
    // Text sampled from the model itself: on average no other distribution gives it a lower loss.
    let rows = work.path().join("rows.jsonl");
    let written: Vec<String> = (1..25)
        .map(|seed| {
            let arguments = ["--prompt", "The", "--max-new-tokens", "120", "--temperature", "1"];
            let seed = seed.to_string();
            let out = Command::new(env!("CARGO_BIN_EXE_ft"))
                .args(["generate", "--model", path(&model), "--seed", &seed])
                .args(arguments)
                .output()
                .unwrap();
            let text = format!("The{}", String::from_utf8(out.stdout).unwrap().trim_end());
            serde_json::json!({ "text": text }).to_string()
        })
        .collect();
    fs::write(&rows, written.join("\n")).unwrap();
    let size = |dir: &Path| fs::metadata(dir.join("model.safetensors")).unwrap().len();
    let all = work.path().join("all");
    ft(&[
        "quantize",
        "--model",
        path(&model),
        "--to",
        "int4",
        "--group-size",
        "128",
        "--out",
        path(&all),
    ]);
    let (least, most) = (size(&all), size(&model));
    let budget = ((2 * least + most) / 3).to_string();
    let out = work.path().join("mixed");
    let quantize = |out: &Path, budget: &str| {
        Command::new(env!("CARGO_BIN_EXE_ft"))
            .args([
                "quantize",
                "--model",
                path(&model),
                "--to",
                "int4",
                "--group-size",
                "128",
                "--out",
                path(out),
            ])
            .args([
                "--budget",
                budget,
                "--data",
                path(&rows),
                "--calibration-tokens",
                "1500",
            ])
            .output()
            .unwrap()
    };
    let done = quantize(&out, &budget);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    // The budget applies to the weights; the file also has a header.
    assert!(size(&out) > least && size(&out) < (2 * least + most) / 3 + 32_768);
    let report = fs::read_to_string(out.join("quantization.md")).unwrap();
    assert!(
        report.contains("## Bits per layer") && report.contains("| 0 | mlp |"),
        "{report}"
    );
    let (mixed, _) = eval(&out, None, &rows);
    let (exact, _) = eval(&model, None, &rows);
    let (coarse, _) = eval(&all, None, &rows);
    assert!(coarse > exact + 0.0005, "4 bits must cost something: {exact} {coarse}");
    assert!(mixed - exact < 0.5 * (coarse - exact), "{exact} {mixed} {coarse}");
    let refused = quantize(&work.path().join("none"), "1KiB");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("does not fit the budget"));
    assert!(!work.path().join("none").exists());
}
