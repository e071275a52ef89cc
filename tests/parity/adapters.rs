//! Adapters made by PEFT: loaded, evaluated, merged.

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
                "phi3" => family("phi3", Form::V5),
                trained => training_model(trained),
            };
            (name, from, model)
        })
        .collect();
    assert_eq!(all.len(), 5);
    all
}

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
    assert_eq!(compared, 28 + 8);
}
