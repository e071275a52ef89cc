//! Adapters made by PEFT: load, evaluate, merge.

use crate::support::{
    Form, all_close, close, data, directories, eval, family, ft, goldens, json, path, tensors, text, training_model,
};
use crate::wire::{self, Document};
use std::path::PathBuf;
use tempfile::TempDir;

fn adapters() -> Vec<(String, PathBuf, TempDir)> {
    let dir = goldens().join("training/adapters");
    let all: Vec<_> = directories(&dir)
        .into_iter()
        .map(|name| {
            let from = dir.join(&name);
            let base = text(&json(&from.join("golden.json")), "base");
            let model = match base.as_str() {
                other @ ("phi3" | "deepseek_v2_groups") => family(other, Form::V5),
                trained => training_model(trained),
            };
            (name, from, model)
        })
        .collect();
    assert_eq!(all.len(), 6);
    all
}

/// Row A5.
#[test]
fn logits_with_an_adapter_are_those_of_peft() {
    for (name, from, model) in adapters() {
        let golden = tensors(&from.join("golden.safetensors"));
        let ids: Vec<u32> = golden["input_ids"].iter().map(|x| *x as u32).collect();
        let document = Document {
            trained: vec![false; ids.len()],
            ids,
        };
        let got = wire::logits(model.path(), Some(&from), &[document]);
        all_close(&got[0], &golden["logits"], 1e-4, &format!("{name}: logits"));
    }
}

#[test]
fn eval_with_an_adapter_gives_the_loss_of_peft() {
    for (name, from, model) in adapters() {
        let info = json(&from.join("golden.json"));
        let (loss, tokens) = eval(model.path(), Some(&from), &data(&text(&info, "data")));
        assert_eq!(Some(tokens), info["tokens"].as_u64(), "{name}: trained tokens");
        close(loss, info["loss"].as_f64().unwrap(), 1e-4, &format!("{name}: loss"));
    }
}

/// Row A6.
#[test]
fn merged_weights_are_those_of_peft() {
    let mut compared = 0;
    for (name, from, model) in adapters() {
        let info = json(&from.join("golden.json"));
        let golden = tensors(&from.join("golden.safetensors"));
        let out = TempDir::new().unwrap();
        let merged = out.path().join("merged");
        ft(&[
            "merge",
            "--model",
            path(model.path()),
            "--adapter",
            path(&from),
            "--out",
            path(&merged),
        ]);
        let got = tensors(&merged.join("model.safetensors"));
        let before = tensors(&model.path().join("model.safetensors"));
        assert_eq!(
            got.keys().collect::<Vec<_>>(),
            before.keys().collect::<Vec<_>>(),
            "{name}: names"
        );
        if golden.keys().any(|k| k.starts_with("merged.")) {
            for (tensor, values) in &got {
                match golden.get(&format!("merged.{tensor}")) {
                    Some(wanted) => {
                        all_close(values, wanted, 1e-6, &format!("{name}: {tensor}"));
                        compared += 1;
                    }
                    None => assert_eq!(values, &before[tensor], "{name}: {tensor} has no adapter"),
                }
            }
        }
        let (loss, _) = eval(&merged, None, &data(&text(&info, "data")));
        close(
            loss,
            info["loss"].as_f64().unwrap(),
            1e-4,
            &format!("{name}: loss of the merged model"),
        );
    }
    assert_eq!(compared, 28 + 8 + 10);
}

/// The directory names below goldens/adapters, with or without adapter files.
fn kinds(filled: bool) -> Vec<String> {
    let dir = goldens().join("adapters");
    let all = directories(&dir).into_iter();
    all.filter(|n| dir.join(n).join("adapter_config.json").is_file() == filled)
        .collect()
}

/// Row A5.
#[test]
fn every_kind_by_peft_gives_its_logits_and_its_loss_also_merged() {
    let names = kinds(true);
    assert_eq!(names.len(), 19);
    for name in names {
        let from = goldens().join("adapters").join(&name);
        let info = json(&from.join("golden.json"));
        let model = training_model(&text(&info, "model"));
        let golden = tensors(&from.join("golden.safetensors"));
        let ids: Vec<u32> = golden["input_ids"].iter().map(|x| *x as u32).collect();
        let document = Document {
            trained: vec![false; ids.len()],
            ids,
        };
        let got = wire::logits(model.path(), Some(&from), &[document]);
        all_close(&got[0], &golden["logits"], 1e-4, &format!("{name}: logits"));
        let rows = data(&text(&info, "data"));
        let (loss, tokens) = eval(model.path(), Some(&from), &rows);
        assert_eq!(Some(tokens), info["tokens"].as_u64(), "{name}: trained tokens");
        close(loss, info["loss"].as_f64().unwrap(), 1e-4, &format!("{name}: loss"));
        let out = TempDir::new().unwrap();
        let merged = out.path().join("merged");
        let args = [
            "merge",
            "--model",
            path(model.path()),
            "--adapter",
            path(&from),
            "--out",
            path(&merged),
        ];
        ft(&args);
        let (loss, _) = eval(&merged, None, &rows);
        close(
            loss,
            info["loss"].as_f64().unwrap(),
            1e-4,
            &format!("{name}: loss merged"),
        );
    }
}

/// Product of two row-major matrices; the first is `[rows, inner]`.
fn product(a: &[f64], b: &[f64], rows: usize, inner: usize) -> Vec<f64> {
    let columns = b.len() / inner;
    let mut out = vec![0.0; rows * columns];
    for i in 0..rows {
        for k in 0..inner {
            for j in 0..columns {
                out[i * columns + j] += a[i * inner + k] * b[k * columns + j];
            }
        }
    }
    out
}

/// The largest difference between the rows of two matrices, up to the sign of each row, relative to the largest value.
fn up_to_sign(got: &[f64], want: &[f64], width: usize) -> f64 {
    let largest = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    let rows = got.chunks(width).zip(want.chunks(width));
    let worst = rows.map(|(g, w)| {
        let apart = |sign: f64| g.iter().zip(w).map(|(a, b)| (a - sign * b).abs()).fold(0.0, f64::max);
        apart(1.0).min(apart(-1.0))
    });
    worst.fold(0.0, f64::max) / largest
}

#[test]
fn starts_are_those_of_peft_up_to_sign_and_change_nothing() {
    const R: usize = 4;
    for name in kinds(false) {
        let golden = goldens().join("adapters").join(&name);
        let info = json(&golden.join("golden.json"));
        let model = training_model(&text(&info, "model"));
        let work = TempDir::new().unwrap();
        let run = work.path().join("run");
        let mut recipe = info.clone();
        recipe["recipe"]["train.max_steps"] = 0.into();
        let file = work.path().join("recipe.toml");
        std::fs::write(&file, crate::training::recipe(&recipe, model.path(), &run)).unwrap();
        ft(&["train", "--recipe", path(&file)]);
        let last = run.join("final");
        let got = tensors(&last.join("adapter_model.safetensors"));
        let want = tensors(&golden.join("golden.safetensors"));
        assert_eq!(got.len(), want.len(), "{name}");
        for (tensor, theirs) in want.iter().filter(|(t, _)| t.contains("lora_A")) {
            let a = &got[&format!("base_model.model.{tensor}")];
            let other = tensor.replace("lora_A", "lora_B");
            let b = &got[&format!("base_model.model.{other}")];
            let (inputs, outputs) = (theirs.len() / R, want[&other].len() / R);
            // Saved as [A; A₀] and [B, -B₀]: at the start both halves are equal.
            assert_eq!(a[..R * inputs], a[R * inputs..], "{name}: {tensor}");
            assert!(up_to_sign(&a[..R * inputs], theirs, inputs) < 1e-3, "{name}: {tensor}");
            let half: Vec<f64> = b.chunks(2 * R).flat_map(|row| row[..R].to_vec()).collect();
            let ours = product(&half, &a[..R * inputs], outputs, R);
            all_close(
                &ours,
                &product(&want[&other], theirs, outputs, R),
                1e-3,
                &format!("{name}: B·A of {tensor}"),
            );
        }
        let rows = data(&text(&info, "data"));
        let (with, _) = eval(model.path(), Some(&last), &rows);
        let (without, _) = eval(model.path(), None, &rows);
        close(with, without, 1e-5, &format!("{name}: the model before training"));
    }
}

#[test]
fn eva_spends_ranks_as_peft_does() {
    eva_as_in_peft("eva");
}

/// Two linears with one input: the one with the smaller rank gets directions that only the other one asks for.
#[test]
fn eva_spends_ranks_as_peft_does_if_linears_with_one_input_have_other_ranks() {
    eva_as_in_peft("eva_ranks");
}

fn eva_as_in_peft(name: &str) {
    let golden = goldens().join(name);
    let info = json(&golden.join("golden.json"));
    let model = training_model(&text(&info, "model"));
    let work = TempDir::new().unwrap();
    let run = work.path().join("run");
    let file = work.path().join("recipe.toml");
    std::fs::write(&file, crate::training::recipe(&info, model.path(), &run)).unwrap();
    ft(&["train", "--recipe", path(&file)]);
    let config = json(&run.join("final/adapter_config.json"));
    for (key, wanted) in [("rank_pattern", "ranks"), ("alpha_pattern", "alphas")] {
        let plain = |v: &serde_json::Value| -> std::collections::BTreeMap<String, f64> {
            let entries = v.as_object().unwrap().iter();
            entries
                .map(|(k, v)| (k.replace('\\', ""), v.as_f64().unwrap()))
                // The patterns of the recipe, which stay behind the full names.
                .filter(|(k, _)| k.contains("layers."))
                .collect()
        };
        assert_eq!(plain(&config[key]), plain(&info[wanted]), "{key}");
        assert!(!plain(&config[key]).is_empty());
    }
    let got = tensors(&run.join("final/adapter_model.safetensors"));
    let want = tensors(&golden.join("golden.safetensors"));
    assert_eq!(got.len(), 2 * want.len());
    for (name, theirs) in &want {
        let ours = &got[&format!("base_model.model.{name}")];
        let b = &got[&format!("base_model.model.{}", name.replace("lora_A", "lora_B"))];
        assert!(b.iter().all(|x| *x == 0.0), "{name}");
        let rank = info["ranks"].get(name.trim_end_matches(".lora_A.weight"));
        let inputs = theirs.len() / rank.map_or(4, |r| r.as_u64().unwrap() as usize);
        assert_eq!(ours.len(), theirs.len(), "{name}");
        assert!(
            up_to_sign(ours, theirs, inputs) < 1e-3,
            "{name}: {}",
            up_to_sign(ours, theirs, inputs)
        );
    }
    let rows = data(&text(&info, "data"));
    let (with, _) = eval(model.path(), Some(&run.join("final")), &rows);
    close(
        with,
        eval(model.path(), None, &rows).0,
        1e-5,
        "the model before training",
    );
}

#[test]
fn twenty_steps_follow_peft_from_every_adapter_and_start() {
    let names: Vec<String> = kinds(true).into_iter().chain(kinds(false)).collect();
    assert_eq!(names.len(), 23);
    for name in names {
        let golden = goldens().join("adapters").join(&name);
        let info = json(&golden.join("golden.json"));
        let model = training_model(&text(&info, "model"));
        let work = TempDir::new().unwrap();
        let run = work.path().join("run");
        let mut recipe = info.clone();
        if recipe["recipe"].get("tune.lora.adapter").is_some() {
            recipe["recipe"]["tune.lora.adapter"] = format!("../../adapters/{name}").into();
        }
        let file = work.path().join("recipe.toml");
        std::fs::write(&file, crate::training::recipe(&recipe, model.path(), &run)).unwrap();
        ft(&["train", "--recipe", path(&file)]);
        let steps = crate::training::steps(&run);
        for (key, wanted) in [("loss", "losses"), ("grad_norm", "grad_norms")] {
            let wanted = crate::support::numbers(&info[wanted]);
            assert_eq!(steps.len(), wanted.len(), "{name}");
            for (i, (step, want)) in steps.iter().zip(wanted).enumerate() {
                let got = step[key].as_f64().unwrap();
                close(got, want, 1e-4, &format!("{name}: {key} of step {}", i + 1));
            }
        }
        // The saved adapter applies to the original weights and gives the loss of the trained model.
        let (loss, _) = eval(model.path(), Some(&run.join("final")), &data(&text(&info, "data")));
        close(
            loss,
            info["after"].as_f64().unwrap(),
            1e-4,
            &format!("{name}: loss of final/"),
        );
        if name.starts_with("tied") {
            // PEFT reads such a file only if it has all tensors.
            let [given, saved] = [&golden, &run.join("final")].map(|d| tensors(&d.join("adapter_model.safetensors")));
            assert_eq!(
                given.keys().collect::<Vec<_>>(),
                saved.keys().collect::<Vec<_>>(),
                "{name}"
            );
        }
        if golden.join("kept.json").is_file() {
            let config = json(&run.join("final/adapter_config.json"));
            assert_eq!(config["rank_pattern"], json(&golden.join("kept.json")), "{name}: ranks");
        }
    }
}
