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
