//! Tests of merging against W + s·B·A in plain loops.

#[path = "../../../crates/ft-core/src/hf/testing.rs"]
mod testing;

use super::*;
use crate::base::ErrorKind;
use crate::model::Adapters;
use crate::ops::update;
use std::collections::BTreeMap;
use testing::{adapter_config, adapters, base, names, numbers};

/// A base model with a tokenizer of two tokens.
fn model(dir: &Path, tied: bool, dtype: StoredDtype) -> PathBuf {
    let base = base(dir, tied, dtype);
    let tokenizer = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}"#;
    std::fs::write(base.join("tokenizer.json"), tokenizer).unwrap();
    base
}

fn expected(name: &str, p: &ParamInfo, adapters: &Adapters) -> Vec<f32> {
    let mut w = numbers(name, p.elements());
    if let Some(adapter) = name.strip_suffix(".weight").and_then(|m| adapters.get(m)) {
        let lora = adapter.lora().unwrap();
        let (a, b) = (
            update::to_f32_vec(&lora.a).unwrap(),
            update::to_f32_vec(&lora.b).unwrap(),
        );
        let (r, input) = lora.a.dims2().unwrap();
        for (i, w) in w.iter_mut().enumerate() {
            let (o, c) = (i / input, i % input);
            let dot: f64 = (0..r)
                .map(|k| f64::from(b[o * r + k]) * f64::from(a[k * input + c]))
                .sum();
            *w = (f64::from(*w) + f64::from(lora.scale) * dot) as f32;
        }
    }
    w
}

fn one(dir: &Path) -> [(PathBuf, f32); 1] {
    [(dir.to_path_buf(), 1.0)]
}

/// Row A6.
#[test]
fn merging_adds_the_delta_and_touches_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let config = adapter_config();
    let adapters = adapters(&config, |_| (2, 3.0));
    for (i, (stored, dtype, written, name)) in [
        (StoredDtype::F32, None, StoredDtype::F32, "float16"),
        (StoredDtype::Bf16, None, StoredDtype::Bf16, "float16"),
        (StoredDtype::F16, None, StoredDtype::F16, "float16"),
        (StoredDtype::F16, Some(Dtype::Bf16), StoredDtype::Bf16, "bfloat16"),
        (StoredDtype::Bf16, Some(Dtype::F32), StoredDtype::F32, "float32"),
    ]
    .into_iter()
    .enumerate()
    {
        let d = dir.path().join(i.to_string());
        let base = model(&d, true, stored);
        let print = hf::fingerprint(&base).unwrap().base();
        let adapter = hf::adapter(&d.join("adapter"), &config, &adapters, &BTreeMap::new(), &base, &print).unwrap();
        hf::set_chat_template(&adapter, "trained with this").unwrap();
        let out = d.join("merged");
        std::fs::create_dir(&out).unwrap();
        let report = merge(&base, &one(&adapter), &out, dtype).unwrap();
        let spec = families::read(&Config::load(&out).unwrap()).unwrap();
        let weights = Weights::open(&out).unwrap();
        assert_eq!(
            (report.tensors, report.merged, report.bytes),
            (weights.len(), 4, weights.total_bytes())
        );
        assert_eq!(report.dtypes, [written.name()]);
        for p in &spec.params() {
            assert_eq!(weights.require(&p.name, &p.shape).unwrap().dtype, written);
            let found = weights.read_f32(&p.name).unwrap();
            let whole = expected(&p.name, p, &adapters);
            let changed = whole != numbers(&p.name, p.elements());
            for (x, y) in found.iter().zip(&whole) {
                // Half a unit in the last place of the stored type; f32 sums in another order.
                let unit = match written {
                    StoredDtype::Bf16 => 1.0 / 256.0,
                    StoredDtype::F16 => 1.0 / 2048.0,
                    _ => 1e-6,
                };
                let bound = if changed {
                    unit * y.abs().max(0.01)
                } else {
                    f32::from(u8::from(written == StoredDtype::F16)) * 1e-7
                };
                assert!((x - y).abs() <= bound, "{} {x} {y}", p.name);
            }
        }
        match written {
            StoredDtype::F32 => assert_eq!(report.rounding, 0.0),
            _ => assert!(report.rounding > 1e-4 && report.rounding < 0.5, "{}", report.rounding),
        }
        assert_eq!(Config::load(&out).unwrap().raw["torch_dtype"], name);
        assert_eq!(
            files::read_text(&out.join("chat_template.jinja")).unwrap(),
            "trained with this"
        );
        assert!(names(&out).contains(&"tokenizer.json".to_string()) && !names(&out).contains(&"README.md".to_string()));
        assert_eq!(names(&d), ["adapter", "base", "merged"]);
    }
}

#[test]
fn merging_refuses_what_it_must_not_touch_or_does_not_know() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let config = adapter_config();
    let adapters = adapters(&config, |_| (2, 3.0));
    let base = model(d, true, StoredDtype::F32);
    let print = hf::fingerprint(&base).unwrap().base();
    let adapter = hf::adapter(&d.join("adapter"), &config, &adapters, &BTreeMap::new(), &base, &print).unwrap();
    let error = |out: &str| merge(&base, &one(&adapter), &d.join(out), None).unwrap_err();
    let e = error("base");
    assert_eq!(e.kind(), ErrorKind::Usage);
    assert!(e.to_string().contains("not empty"), "{e}");
    assert_eq!(error("base/config.json").kind(), ErrorKind::Usage);

    hf::adapter(
        &d.join("adapter"),
        &config,
        &adapters,
        &BTreeMap::new(),
        &base,
        &hf::BaseHashes {
            sampled: "blake3:of another".into(),
            ..hf::BaseHashes::default()
        },
    )
    .unwrap();
    assert!(error("out").to_string().contains("another base"));
    hf::adapter(&d.join("adapter"), &config, &adapters, &BTreeMap::new(), &base, &print).unwrap();

    // A weight that is not in the config: with tied embeddings a head is a copy; other weights are refused.
    let weights = Weights::open(&base).unwrap();
    let names: Vec<String> = weights.names().map(str::to_string).collect();
    let mut plans: Vec<TensorPlan> = names
        .iter()
        .map(|n| TensorPlan {
            name: n.clone(),
            dtype: StoredDtype::F32,
            shape: weights.info(n).unwrap().shape.clone(),
        })
        .collect();
    plans.push(TensorPlan {
        name: "model.layers.9.extra".into(),
        dtype: StoredDtype::F32,
        shape: vec![2],
    });
    writer::write_file(&base.join("model.safetensors"), &plans, &[], |plan, sink| {
        let n: usize = plan.shape.iter().product();
        sink(Values::F32(&numbers(&plan.name, n)))
    })
    .unwrap();
    let e = error("out").to_string();
    assert!(e.contains("model.layers.9.extra"), "{e}");
    assert!(!d.join("out").exists());
}

#[test]
fn a_merged_model_has_the_files_of_its_adapters_or_does_not_exist() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let base = model(d, true, StoredDtype::F32);
    let config = Config::load(&base).unwrap();
    let params = families::read(&config).unwrap().params();
    let tensors: Vec<TensorPlan> = params
        .iter()
        .map(|p| TensorPlan {
            name: p.name.to_string(),
            dtype: StoredDtype::F32,
            shape: p.shape.clone(),
        })
        .collect();
    let out = d.join("out");
    let directory = OutputModel {
        out: &out,
        base_dir: &base,
        config: &config.raw,
        tensors: &tensors,
        shard_bytes: writer::SHARD_BYTES,
        chat_template: None,
    };
    let write = |settings: &str| {
        let own = OwnFiles {
            tokenizer: vec![("tokenizer.json", b"with new tokens".to_vec())],
            settings: Some(d.join(settings)),
        };
        own.write_with(&directory, &mut |plan, sink| {
            sink(Values::F32(&numbers(&plan.name, plan.shape.iter().product())))
        })
    };
    // Like a full disk, or a kill, at the last of the files.
    std::fs::create_dir(d.join("no-file")).unwrap();
    let e = write("no-file").unwrap_err().to_string();
    assert!(e.contains("no-file"), "{e}");
    assert_eq!(names(d), ["base", "no-file"]);
    std::fs::write(d.join("settings.json"), r#"{"top_k": 7}"#).unwrap();
    assert_eq!(write("settings.json").unwrap(), out);
    let text = |name: &str| files::read_text(&out.join(name)).unwrap();
    assert_eq!(text("tokenizer.json"), "with new tokens");
    assert_eq!(text("generation_config.json"), r#"{"top_k": 7}"#);
}

#[test]
fn the_config_of_a_merged_model_is_json_also_if_that_of_its_base_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let base = model(d, true, StoredDtype::F32);
    let path = base.join("config.json");
    let config = files::read_text(&path).unwrap();
    std::fs::write(&path, config.replacen('{', "{\"time_step_limit\": [0.0, Infinity],", 1)).unwrap();
    let out = d.join("out");
    merge(&base, &[], &out, None).unwrap();
    let config: serde_json::Value = serde_json::from_str(&files::read_text(&out.join("config.json")).unwrap()).unwrap();
    assert!(
        config.get("time_step_limit").is_none() && config["hidden_size"] == 8,
        "{config}"
    );
}

/// Replaces the output projection of the model by a score head, as `ft train` writes a reward model.
fn reward_model(dir: &Path, tied: bool, dtype: StoredDtype) -> PathBuf {
    let base = model(dir, tied, dtype);
    let path = base.join("config.json");
    let config = files::read_text(&path).unwrap();
    std::fs::write(&path, config.replace("ForCausalLM", "ForSequenceClassification")).unwrap();
    let weights = Weights::open(&base).unwrap();
    let names = weights.names().filter(|name| *name != LM_HEAD);
    let mut plans: Vec<TensorPlan> = names
        .map(|name| TensorPlan {
            name: name.into(),
            dtype,
            shape: weights.info(name).unwrap().shape.clone(),
        })
        .collect();
    plans.push(TensorPlan {
        name: hf::SCORE.into(),
        dtype,
        shape: vec![1, 8],
    });
    writer::write_file(&base.join("model.safetensors"), &plans, &[], |plan, sink| {
        sink(Values::F32(&numbers(&plan.name, plan.shape.iter().product())))
    })
    .unwrap();
    base
}

#[test]
fn a_reward_model_keeps_its_score_head() {
    let dir = tempfile::tempdir().unwrap();
    let config = adapter_config();
    let adapters = adapters(&config, |_| (2, 3.0));
    for (tied, dtype, written) in [
        (false, None, StoredDtype::F32),
        (true, None, StoredDtype::F32),
        (false, Some(Dtype::Bf16), StoredDtype::Bf16),
    ] {
        let d = dir.path().join(format!("{tied}{}", written.name()));
        let base = reward_model(&d, tied, StoredDtype::F32);
        let before = Weights::open(&base).unwrap();
        let report = merge(&base, &[], &d.join("out"), dtype).unwrap();
        let after = Weights::open(&report.out).unwrap();
        assert!(before.names().eq(after.names()), "{tied}");
        assert_eq!((report.tensors, report.dtypes), (after.len(), vec![written.name()]));
        for name in before.names() {
            let info = before.info(name).unwrap();
            assert_eq!(after.require(name, &info.shape).unwrap().dtype, written, "{name}");
            // Values that bf16 can represent.
            assert_eq!(after.read_f32(name).unwrap(), before.read_f32(name).unwrap(), "{name}");
        }
        let raw = |dir: &Path| Config::load(dir).unwrap().raw;
        let (own, now) = (raw(&base), raw(&report.out));
        assert_eq!(now["architectures"][0], "LlamaForSequenceClassification");
        assert_eq!(now["architectures"], own["architectures"]);
        assert_eq!(now["tie_word_embeddings"], own["tie_word_embeddings"]);
        // The scores of the written model are compared, not logits.
        if dtype.is_none() {
            assert_eq!(report.logits.largest_change, 0.0);
            assert!(report.logits.largest_logit > 0.0);
        }

        let anything = hf::BaseHashes::default();
        let adapter = hf::adapter(
            &d.join("adapter"),
            &config,
            &adapters,
            &BTreeMap::new(),
            &base,
            &anything,
        )
        .unwrap();
        let report = merge(&base, &one(&adapter), &d.join("merged"), None).unwrap();
        assert_eq!(report.merged, 4);
        let merged = Weights::open(&report.out).unwrap();
        assert_eq!(
            merged.read_bytes(hf::SCORE).unwrap(),
            before.read_bytes(hf::SCORE).unwrap()
        );
    }
}

#[test]
fn a_reward_model_is_not_quantized() {
    let dir = tempfile::tempdir().unwrap();
    let base = reward_model(dir.path(), true, StoredDtype::F32);
    let out = dir.path().join("out");
    let request = crate::commands::quantize::QuantizeRequest {
        model: &base,
        out: &out,
        to: Format::Int8 { group: 0 },
        budget: None,
        calibration_tokens: 1,
    };
    let e = crate::commands::quantize::quantize(&request).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unsupported);
    assert!(e.to_string().contains("a reward model is not quantized"), "{e}");
    assert!(!out.exists());
}
