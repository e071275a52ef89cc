//! Every family: logits, loss, gradients, evaluation, greedy text.

use crate::support::{
    Form, all_close, close, copy_matching, data, directories, eval, family, ft, goldens, json, numbers, path, tensors,
    text,
};
use crate::wire::{self, Document};
use ft::formats::Config;
use ft::model::families::{self, NAMES};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

fn variants() -> Vec<String> {
    directories(&goldens().join("families"))
}

pub fn documents(golden: &BTreeMap<String, Vec<f64>>, count: u64) -> Vec<Document> {
    let document = |i: u64| {
        let ids = golden[&format!("input_ids.{i}")].iter().map(|x| *x as u32).collect();
        let labels = &golden[&format!("labels.{i}")];
        // Position 0 may have a label in the golden; the shift removes it there too.
        let trained = labels.iter().enumerate().map(|(t, l)| t > 0 && *l >= 0.0).collect();
        Document { ids, trained }
    };
    (0..count).map(document).collect()
}

#[test]
fn all_families_have_goldens() {
    let types: BTreeSet<String> = variants()
        .iter()
        .map(|v| {
            text(
                &json(&goldens().join("families").join(v).join("config.json")),
                "model_type",
            )
        })
        .collect();
    let wanted = [
        "arcee",
        "cohere",
        "cohere2",
        "cwm",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "flex_olmo",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gemma3n_text",
        "gemma4",
        "gemma4_text",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "granite",
        "granite_swa",
        "granitemoe",
        "granitemoehybrid",
        "granitemoeshared",
        "helium",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "hyperclovax",
        "internlm3",
        "iquestcoder",
        "jais2",
        "kimi_k2",
        "lfm2",
        "llama",
        "mellum",
        "minicpm3",
        "minimax_m2",
        "ministral",
        "ministral3",
        "mistral",
        "mistral3",
        "mixtral",
        "nanochat",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi3",
        "qwen2",
        "qwen2_5_vl",
        "qwen2_moe",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl",
        "qwen3_vl_moe",
        "seed_oss",
        "smollm3",
        "solar_open",
        "stablelm",
        "starcoder2",
        "vaultgemma",
        "youtu",
    ];
    assert_eq!(types.iter().map(String::as_str).collect::<Vec<_>>(), wanted);
    assert_eq!(variants().len(), 111);
}

#[test]
fn logits_loss_and_gradients_are_those_of_transformers() {
    for name in variants() {
        println!("{name}");
        let from = goldens().join("families").join(&name);
        let info = json(&from.join("golden.json"));
        let golden = tensors(&from.join("golden.safetensors"));
        let documents = documents(&golden, info["documents"].as_u64().unwrap());
        let dir = family(&name, Form::V5);
        let got = wire::logits_and_grads(dir.path(), &documents);
        for (i, logits) in got.logits.iter().enumerate() {
            all_close(
                logits,
                &golden[&format!("logits.{i}")],
                1e-4,
                &format!("{name}: logits of document {i}"),
            );
        }
        close(got.loss, golden["loss"][0], 1e-4, &format!("{name}: loss"));
        let wanted: Vec<&str> = golden.keys().filter_map(|k| k.strip_prefix("grad.")).collect();
        assert_eq!(
            got.gradients.keys().map(String::as_str).collect::<Vec<_>>(),
            wanted,
            "{name}: gradients"
        );
        for (parameter, gradient) in &got.gradients {
            all_close(
                gradient,
                &golden[&format!("grad.{parameter}")],
                1e-4,
                &format!("{name}: gradient of {parameter}"),
            );
        }
    }
}

/// transformers reads this key for Gemma 3 but never applies it.
#[test]
fn gemma3_has_no_soft_cap_of_attention() {
    let golden = tensors(&goldens().join("families/gemma3_text/golden.safetensors"));
    let dir = family("gemma3_text", Form::V5);
    let mut config = json(&dir.path().join("config.json"));
    config["attn_logit_softcapping"] = 0.5.into();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let got = wire::logits(dir.path(), None, &documents(&golden, 1));
    all_close(&got[0], &golden["logits.0"], 1e-4, "gemma3_text with a soft cap");
    let mut raw = config.clone();
    raw["attn_logit_softcapping"] = (-1.0).into();
    std::fs::write(dir.path().join("config.json"), raw.to_string()).unwrap();
    let refused = std::panic::catch_unwind(|| wire::logits(dir.path(), None, &documents(&golden, 1)));
    assert!(refused.is_err(), "a value without meaning is refused all the same");
}

#[test]
fn both_forms_of_config_mean_the_same() {
    for name in variants() {
        let from = goldens().join("families").join(&name);
        let info = json(&from.join("golden.json"));
        let golden = tensors(&from.join("golden.safetensors"));
        let documents = documents(&golden, info["documents"].as_u64().unwrap());
        let logits = |form| wire::logits(family(&name, form).path(), None, &documents);
        assert_eq!(logits(Form::V4), logits(Form::V5), "{name}");
    }
}

#[test]
fn eval_gives_the_loss_of_transformers() {
    for name in variants() {
        let info = json(&goldens().join("families").join(&name).join("golden.json"));
        let forms: &[Form] = if name == "llama" {
            &[Form::V5, Form::V4]
        } else {
            &[Form::V5]
        };
        for form in forms {
            let dir = family(&name, *form);
            for (rows, wanted) in info["eval"].as_object().unwrap() {
                let (loss, tokens) = eval(dir.path(), None, &data(rows));
                assert_eq!(
                    Some(tokens),
                    wanted["tokens"].as_u64(),
                    "{name}: trained tokens of {rows}"
                );
                close(
                    loss,
                    wanted["loss"].as_f64().unwrap(),
                    1e-4,
                    &format!("{name}: loss of {rows}"),
                );
            }
        }
    }
}

#[test]
fn greedy_text_is_that_of_transformers() {
    for name in variants() {
        let info = json(&goldens().join("families").join(&name).join("golden.json"));
        let dir = family(&name, Form::V5);
        for wanted in info["generate"].as_array().unwrap() {
            assert!(!numbers(&wanted["new_ids"]).is_empty());
            let prompt = text(wanted, "prompt");
            let out = ft(&[
                "generate",
                "--model",
                path(dir.path()),
                "--prompt",
                &prompt,
                "--max-new-tokens",
                "16",
                "--temperature",
                "0",
                "--dtype",
                "f32",
            ]);
            // The program adds one newline after the text.
            let out = out.strip_suffix('\n').unwrap_or(&out);
            assert_eq!(out, text(wanted, "text"), "{name}: after {prompt:?}");
        }
    }
}

/// The experts of gpt-oss as published, in MXFP4: dequantized as transformers does it.
#[test]
fn gpt_oss_in_mxfp4_has_the_logits_of_transformers() {
    let from = goldens().join("mxfp4");
    let golden = tensors(&from.join("golden.safetensors"));
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(from.join(file), dir.path().join(file)).unwrap();
    }
    copy_matching(&goldens().join("tokenizers/small"), dir.path(), |_| true);
    let documents = documents(&golden, 3);
    for (i, logits) in wire::logits(dir.path(), None, &documents).iter().enumerate() {
        all_close(logits, &golden[&format!("logits.{i}")], 1e-4, &format!("document {i}"));
    }
    // Merged without an adapter: dequantized to bf16, in the tensors that transformers opens, each value the same.
    let weights = ft::formats::Weights::open(dir.path()).unwrap();
    let wanted = &golden["gate_up"];
    for (parity, projection) in ["gate_proj", "up_proj"].into_iter().enumerate() {
        let name = format!("model.layers.0.mlp.experts.1.{projection}.weight");
        let (rows, columns) = (64, 32);
        let info = ft::source::ParamInfo {
            name: name.as_str().into(),
            shape: vec![rows, columns],
            group: ft::source::Group::Layer(0),
            sublayer: ft::source::Sublayer::Mlp,
        };
        let values = ft::source::stored::values(&weights, &info).unwrap().unwrap();
        for (i, value) in values.iter().enumerate() {
            let (row, column) = (i / columns, i % columns);
            let at = column * 2 * rows + 2 * row + parity;
            assert_eq!(f64::from(*value), wanted[at], "{name}: {row}, {column}");
        }
    }
}

/// The types and options of transformers that ft does not have, made by check_options.py.
#[test]
fn other_types_and_options_are_refused_by_name() {
    let refused = json(&goldens().join("refused.json"));
    let read = |config: Map<String, Value>| families::read(&Config::from_map(config, Path::new("config.json")));
    let mut needs = 0;
    for model_type in refused["types"].as_array().unwrap() {
        let model_type = model_type[0].as_str().unwrap();
        if NAMES.contains(&model_type) {
            continue;
        }
        let config = serde_json::json!({"model_type": model_type, "hidden_size": 0});
        let said = read(config.as_object().unwrap().clone()).unwrap_err().to_string();
        let by_name = said.contains(&format!("model type `{model_type}` is not supported"));
        assert!(by_name && said.contains("it would need"), "{model_type}: {said}");
        needs += 1;
    }
    assert!(needs > 80, "{needs}");
    let options = refused["options"].as_array().unwrap();
    assert!(options.len() > 30, "{}", options.len());
    for option in options {
        let (family, key) = (option[0].as_str().unwrap(), option[1].as_str().unwrap());
        let mut config = refused["configs"][family].as_object().unwrap().clone();
        config.insert(key.into(), option[2].clone());
        let said = read(config)
            .map(|_| "nothing".to_string())
            .unwrap_or_else(|e| e.to_string());
        assert!(said.contains(key), "{family} {key} = {}: {said}", option[2]);
    }
}
