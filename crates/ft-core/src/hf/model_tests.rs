//! Tests of model directories: files, exact values, shards, and errors.

use super::testing::{base, config, names, numbers, spec};
use super::*;
use crate::base::Error;
use crate::formats::StoredDtype;
use crate::formats::config::Config;
use crate::formats::weights::Weights;
use crate::formats::writer::{TensorPlan, Values};
use crate::ops::Dtype;
use serde_json::{Map, Value, json};
use std::path::Path;

fn read_config(dir: &Path) -> Map<String, Value> {
    Config::load(dir).unwrap().raw
}

#[test]
fn a_model_directory_has_every_file_and_the_exact_numbers() {
    for (tied, dtype, name, stored) in [
        (false, Dtype::F32, "float32", StoredDtype::F32),
        (true, Dtype::Bf16, "bfloat16", StoredDtype::Bf16),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let base = base(dir.path(), tied, StoredDtype::F32);
        let out = dir.path().join("final");
        let config = config(tied);
        let params = spec(&config).params();
        let export = ModelExport {
            out: &out,
            base_dir: &base,
            config: config.clone(),
            tied,
            dtype,
            params: &params,
            more: None,
        };
        let size = |name: &str| params.iter().find(|p| &*p.name == name).unwrap().elements();
        let path = model(&export, &mut |name, sink| sink(Values::F32(&numbers(name, size(name))))).unwrap();
        assert_eq!(path, out);
        assert_eq!(
            names(&out),
            [
                "LICENSE",
                "chat_template.jinja",
                "config.json",
                "generation_config.json",
                "model.safetensors",
                "tokenizer.json",
                "tokenizer_config.json"
            ]
        );
        assert_eq!(names(dir.path()), ["base", "final"], "no temporary directory stays");
        let mut expected = config.clone();
        expected.insert("torch_dtype".into(), name.into());
        let written = read_config(&out);
        assert_eq!(written, expected);
        assert!(written.keys().eq(expected.keys()), "keys keep their order");
        assert_eq!(
            std::fs::read(out.join("tokenizer.json")).unwrap(),
            std::fs::read(base.join("tokenizer.json")).unwrap()
        );
        let weights = Weights::open(&out).unwrap();
        assert_eq!(weights.metadata().get("format").unwrap(), "pt");
        assert_eq!(weights.len(), params.len());
        assert_eq!(weights.info("lm_head.weight").is_none(), tied);
        for p in &params {
            assert_eq!(weights.require(&p.name, &p.shape).unwrap().dtype, stored);
            assert_eq!(weights.read_f32(&p.name).unwrap(), numbers(&p.name, p.elements()));
        }
    }
}

#[test]
fn the_number_format_is_set_under_the_key_that_is_there() {
    let set = |value: Value| {
        let mut map = value.as_object().unwrap().clone();
        set_dtype(&mut map, StoredDtype::Bf16);
        Value::Object(map)
    };
    assert_eq!(
        set(json!({"torch_dtype": "float32"})),
        json!({"torch_dtype": "bfloat16"})
    );
    assert_eq!(
        set(json!({"dtype": null, "x": 1})),
        json!({"dtype": "bfloat16", "x": 1})
    );
    assert_eq!(
        set(json!({"dtype": "a", "torch_dtype": "b"})),
        json!({"dtype": "bfloat16", "torch_dtype": "bfloat16"})
    );
    assert_eq!(set(json!({})), json!({"torch_dtype": "bfloat16"}));
    // The vision part keeps its own.
    assert_eq!(
        set(json!({"dtype": "float32", "text_config": {"dtype": "float32"}, "vision_config": {"dtype": "float32"}})),
        json!({"dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}, "vision_config": {"dtype": "float32"}})
    );
    assert_eq!(
        set(json!({"dtype": "float32", "text_config": {}})),
        json!({"dtype": "bfloat16", "text_config": {}})
    );
}

#[test]
fn an_older_directory_is_replaced_whole_or_stays_whole() {
    let dir = tempfile::tempdir().unwrap();
    let base = base(dir.path(), true, StoredDtype::F32);
    let out = dir.path().join("final");
    let config = config(true);
    let params = spec(&config).params();
    let export = ModelExport {
        out: &out,
        base_dir: &base,
        config: config.clone(),
        tied: true,
        dtype: Dtype::F32,
        params: &params,
        more: None,
    };
    let size = |name: &str| params.iter().find(|p| &*p.name == name).unwrap().elements();
    model(&export, &mut |name, sink| sink(Values::F32(&vec![1.0; size(name)]))).unwrap();
    std::fs::write(out.join("model-00001-of-00002.safetensors"), "of an older export").unwrap();
    let before = names(&out);
    let last = params.last().unwrap().name.clone();
    type Fill<'a> = &'a dyn Fn(&str) -> Result<Vec<f32>>;
    let faults: [(&str, Fill); 3] = [
        ("not finite", &|name| {
            Ok(vec![if *name == *last { f32::NAN } else { 2.0 }; size(name)])
        }),
        ("not written completely", &|name| {
            Ok(vec![2.0; size(name) - usize::from(*name == *last)])
        }),
        ("no such weight", &|name| {
            if *name == *last {
                Err(Error::new("no such weight"))
            } else {
                Ok(vec![2.0; size(name)])
            }
        }),
    ];
    for (what, fill) in faults {
        let e = model(&export, &mut |name, sink| sink(Values::F32(&fill(name)?)))
            .unwrap_err()
            .to_string();
        assert!(e.contains(what), "{e}");
        assert_eq!((names(&out), names(dir.path()).len()), (before.clone(), 2));
        assert_eq!(
            Weights::open_file(&out.join("model.safetensors"))
                .unwrap()
                .read_f32(&last)
                .unwrap(),
            vec![1.0; 8]
        );
    }
    model(&export, &mut |name, sink| sink(Values::F32(&vec![3.0; size(name)]))).unwrap();
    assert_eq!(Weights::open(&out).unwrap().read_f32(&last).unwrap(), vec![3.0; 8]);
    assert_eq!(names(&out).len(), before.len() - 1);
    // The previous directory is kept: it may contain files that are not ft's.
    assert_eq!(names(dir.path()), ["base", "final", "final.left"]);
    assert_eq!(names(&dir.path().join("final.left")), before);
}

#[test]
fn large_models_are_sharded_with_an_index() {
    let dir = tempfile::tempdir().unwrap();
    let base = base(dir.path(), false, StoredDtype::F32);
    let config = config(false);
    let params = spec(&config).params();
    let tensors: Vec<TensorPlan> = params
        .iter()
        .map(|p| TensorPlan {
            name: p.name.to_string(),
            dtype: StoredDtype::F32,
            shape: p.shape.clone(),
        })
        .collect();
    let out = dir.path().join("out");
    let directory = OutputModel {
        out: &out,
        base_dir: &base,
        config: &config,
        tensors: &tensors,
        shard_bytes: 2000,
        chat_template: Some("{{ messages }}"),
    };
    let count = |plan: &TensorPlan| plan.shape.iter().product();
    directory
        .write(&mut |plan, sink| sink(Values::F32(&numbers(&plan.name, count(plan)))))
        .unwrap();
    let shards: Vec<String> = names(&out).into_iter().filter(|n| n.starts_with("model-")).collect();
    assert!(shards.len() > 2);
    assert!(
        shards
            .iter()
            .enumerate()
            .all(|(i, s)| *s == format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len()))
    );
    let weights = Weights::open(&out).unwrap();
    for p in &params {
        assert_eq!(weights.read_f32(&p.name).unwrap(), numbers(&p.name, p.elements()));
    }
    assert_eq!(
        files::read_text(&out.join("chat_template.jinja")).unwrap(),
        "{{ messages }}"
    );
}
