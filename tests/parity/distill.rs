//! Distillation: divergences against TRL, distances of hidden states and whole runs against torch.

use crate::support::{all_close, close, ft, goldens, json, numbers, path, text, training_model};
use crate::training::{recipe, steps};
use crate::wire::{self, AlignedCase, Distillation};
use serde_json::Value;
use std::fs;
use tempfile::TempDir;

fn narrow(value: &Value) -> Vec<f32> {
    numbers(value).iter().map(|x| *x as f32).collect()
}

fn integers(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|x| x.as_i64().unwrap()).collect()
}

#[test]
fn divergences_are_those_of_trl() {
    let golden = json(&goldens().join("distill/divergences.json"));
    let sets = golden["sets"].as_array().unwrap();
    assert_eq!(sets.len(), 3);
    for set in sets {
        let sizes: Vec<usize> = integers(&set["sizes"]).iter().map(|n| *n as usize).collect();
        let data = ["h", "head", "teacher_h", "teacher_head"].map(|name| narrow(&set[name]));
        let labels = integers(&set["labels"]);
        let cases = set["cases"].as_array().unwrap();
        assert_eq!(cases.len(), 15);
        for case in cases {
            let number = |key: &str| case[key].as_f64().map(|x| x as f32);
            for chunk in [2, 100] {
                let (loss, dh, dw) = wire::divergence(&Distillation {
                    sizes: [sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]],
                    h: &data[0],
                    head: &data[1],
                    teacher_h: &data[2],
                    teacher_head: &data[3],
                    labels: &labels,
                    beta: number("beta").unwrap(),
                    temperature: number("temperature").unwrap(),
                    alpha: number("alpha").unwrap(),
                    softcap: number("softcap"),
                    teacher_softcap: number("teacher_softcap"),
                    chunk,
                });
                let what = |part: &str| {
                    let terms = ["beta", "temperature", "alpha", "softcap"].map(|k| format!("{k} {}", case[k]));
                    format!("{sizes:?} {terms:?}: {part}")
                };
                close(loss, case["loss"].as_f64().unwrap(), 1e-5, &what("loss"));
                all_close(&dh, &numbers(&case["dh"]), 1e-5, &what("dh"));
                all_close(&dw, &numbers(&case["dw"]), 1e-5, &what("dW"));
            }
        }
    }
}

/// ULD and GOLD; whole heads, and heads in parts.
#[test]
fn losses_of_another_tokenizer_are_those_of_trl() {
    let golden = json(&goldens().join("distill/aligned.json"));
    for set in golden["sets"].as_array().unwrap() {
        let sizes: Vec<usize> = integers(&set["sizes"]).iter().map(|n| *n as usize).collect();
        let data = ["h", "head", "teacher_h", "teacher_head"].map(|name| narrow(&set[name]));
        let (labels, teacher_labels) = (integers(&set["labels"]), integers(&set["teacher_labels"]));
        let lists = |key: &str| set[key].as_array().unwrap().iter().map(integers).collect::<Vec<_>>();
        let spans: Vec<[usize; 4]> = lists("spans")
            .iter()
            .map(|s| [s[0], s[1], s[2], s[3]].map(|x| x as usize))
            .collect();
        let shared: Vec<(u32, u32)> = lists("shared").iter().map(|p| (p[0] as u32, p[1] as u32)).collect();
        let cases = set["cases"].as_array().unwrap();
        assert_eq!(cases.len(), 15);
        for case in cases {
            let number = |key: &str| case[key].as_f64().map(|x| x as f32);
            for (chunk, parts) in [(3, None), (100, None), (4, Some(ft::ops::cross_entropy::PIECE))] {
                let (loss, dh, dw) = wire::aligned(&AlignedCase {
                    sizes: [sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]],
                    h: &data[0],
                    head: &data[1],
                    teacher_h: &data[2],
                    teacher_head: &data[3],
                    labels: &labels,
                    teacher_labels: &teacher_labels,
                    spans: &spans,
                    shared: (case["comparison"] == "gold").then(|| shared.clone()),
                    beta: number("beta").unwrap(),
                    temperature: number("temperature").unwrap(),
                    alpha: number("alpha").unwrap(),
                    softcap: number("softcap"),
                    teacher_softcap: number("teacher_softcap"),
                    chunk,
                    parts,
                });
                let what = |part: &str| {
                    let terms = ["comparison", "beta", "temperature", "alpha"].map(|k| format!("{k} {}", case[k]));
                    format!("{sizes:?} {terms:?} chunk {chunk} parts {parts:?}: {part}")
                };
                close(loss, case["loss"].as_f64().unwrap(), 1e-5, &what("loss"));
                all_close(&dh, &numbers(&case["dh"]), 1e-5, &what("dh"));
                if parts.is_none() {
                    all_close(&dw, &numbers(&case["dw"]), 1e-5, &what("dW"));
                }
            }
        }
    }
}

#[test]
fn distances_of_hidden_states_are_those_of_torch() {
    let golden = json(&goldens().join("distill/hidden.json"));
    let sizes = integers(&golden["sizes"]);
    for case in golden["cases"].as_array().unwrap() {
        let kind = text(case, "distance");
        let (loss, dx, dw) = wire::hidden_distance(
            [sizes[0] as usize, sizes[1] as usize, sizes[2] as usize],
            &narrow(&golden["x"]),
            &narrow(&golden["teacher"]),
            &narrow(&golden["projection"]),
            &integers(&golden["labels"]),
            golden["weight"].as_f64().unwrap(),
            kind == "cosine",
        );
        close(loss, case["loss"].as_f64().unwrap(), 1e-5, &kind);
        all_close(&dx, &numbers(&case["dx"]), 1e-5, &format!("{kind}: dx"));
        all_close(&dw, &numbers(&case["dw"]), 1e-5, &format!("{kind}: dW"));
    }
}

fn run(name: &str, more: &[&str]) {
    let golden = json(&goldens().join("distill/runs").join(format!("{name}.json")));
    let (model, teacher) = (
        training_model(&text(&golden, "model")),
        training_model(&text(&golden, "teacher")),
    );
    let work = TempDir::new().unwrap();
    let out = work.path().join("run");
    let file = work.path().join("recipe.toml");
    fs::write(&file, recipe(&golden, model.path(), &out)).unwrap();
    let named = format!("distill.teacher={}", path(teacher.path()));
    ft(&[&["train", "--recipe", path(&file), &named], more].concat());
    let steps = steps(&out);
    let wanted = numbers(&golden["losses"]);
    assert_eq!(steps.len(), wanted.len());
    for (key, all) in [("loss", wanted), ("grad_norm", numbers(&golden["grad_norms"]))] {
        for (i, (step, want)) in steps.iter().zip(all).enumerate() {
            close(
                step[key].as_f64().unwrap(),
                want,
                1e-4,
                &format!("{name} {more:?}: {key} of step {}", i + 1),
            );
        }
    }
}

#[test]
fn forward_divergence() {
    run("forward", &[]);
}

#[test]
fn reverse_divergence() {
    run("reverse", &[]);
}

#[test]
fn jensen_shannon_and_cross_entropy() {
    run("jsd", &[]);
}

#[test]
fn clipped() {
    run("jsd_clipped", &[]);
}

#[test]
fn hidden_states() {
    run("hidden", &[]);
    run("hidden_cosine", &[]);
}

/// The same numbers with weights on the disk.
#[test]
fn layers_of_both_from_the_disk() {
    run("jsd", &["distill.teacher_tier=disk", "tune.method=full"]);
    run("hidden", &["distill.teacher_tier=disk"]);
}
