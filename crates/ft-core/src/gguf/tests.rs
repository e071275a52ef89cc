//! Tests of keys, of refused models, of warnings, and of values that a format cannot hold.

use super::adapter::{AdapterFile, adapter};
use super::{arch, keys, model};
use crate::base::{ErrorKind, Result, files};
use crate::formats::adapter::AdapterConfig;
use crate::formats::config::Config;
use crate::formats::gguf::{BlockType, MetadataValue};
use crate::formats::weights::Weights;
use crate::formats::writer::{self, TensorPlan, Values};
use crate::hf;
use crate::hf::testing::{adapter_config, adapters, base};
use crate::model::{Spec, families};
use crate::ops::rope::RopePairing;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/goldens/families")
}

/// The config of a golden with changes; `null` removes a key.
fn golden(variant: &str, changes: &Value) -> Config {
    let config = Config::read(&goldens().join(variant)).unwrap();
    changed(config.raw, changes)
}

/// A config of Llama without rope parameters, with changes.
fn llama(changes: &Value) -> Config {
    let mut raw = hf::testing::config(true);
    raw.retain(|key, _| key != "rope_theta");
    changed(raw, changes)
}

fn changed(mut raw: Map<String, Value>, changes: &Value) -> Config {
    raw.extend(changes.as_object().unwrap().clone());
    raw.retain(|_, value| !value.is_null());
    Config::from_map(raw, Path::new("config.json"))
}

fn read(config: &Config) -> Spec {
    families::read(config).unwrap()
}

/// The keys of the file, without the name of the architecture.
fn written(config: &Config) -> Result<BTreeMap<String, MetadataValue>> {
    let spec = read(config);
    let arch = arch::of(&spec)?;
    let (keys, _) = keys::of_model(&spec, config, &arch, 1.0)?;
    let below = |key: String| key.split_once('.').unwrap().1.to_string();
    Ok(keys.into_iter().map(|(key, value)| (below(key), value)).collect())
}

#[track_caller]
fn assert_floats(config: &Config, wanted: &[(&str, f32)]) {
    let keys = written(config).unwrap();
    for (key, value) in wanted {
        assert_eq!(keys.get(*key), Some(&MetadataValue::F32(*value)), "{key}");
    }
}

/// llama.cpp divides by the factor itself. Published configs leave the base out where it is the default of the family.
#[test]
fn the_base_of_scaled_frequencies_is_that_before_the_scaling() {
    let linear = json!({"rope_type": "linear", "factor": 8.0});
    let gemma = json!({
        "model_type": "gemma3", "vision_config": {"model_type": "siglip_vision_model"},
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
            "max_position_embeddings": 131_072, "sliding_window": 8, "rope_scaling": linear}});
    assert_floats(
        &changed(Map::new(), &gemma),
        &[
            ("rope.freq_base", 1_000_000.0),
            ("rope.freq_base_swa", 10_000.0),
            ("rope.scaling.factor", 8.0),
        ],
    );
    assert_floats(
        &llama(&json!({"rope_scaling": {"type": "linear", "factor": 4.0}})),
        &[("rope.freq_base", 10_000.0), ("rope.scaling.factor", 4.0)],
    );
    assert_floats(
        &llama(&json!({"rope_theta": 123_456.75})),
        &[("rope.freq_base", 123_456.75)],
    );
    // `alpha` of Hunyuan is another base.
    let base = 100.0 * 20f64.powf(16.0 / 14.0);
    assert_floats(
        &golden("hunyuan_v1_dense", &json!({})),
        &[("rope.freq_base", base as f32)],
    );
}

#[test]
fn a_base_that_is_no_finite_number_above_1_is_refused() {
    for theta in [0.5, 1.0, 1e39] {
        let e = written(&llama(&json!({"rope_theta": theta}))).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported, "{theta}");
        assert!(e.to_string().contains("the base of the rotary frequencies"), "{e}");
    }
}

#[test]
fn yarn_in_the_file_is_the_one_of_training() {
    let yarn = |config: &Config, factor: f32, original: u32| {
        let keys = written(config).unwrap();
        let scaling = |key: &str| keys.get(&format!("rope.scaling.{key}")).cloned();
        assert_eq!(scaling("type"), Some("yarn".into()));
        assert_eq!(scaling("factor"), Some(MetadataValue::F32(factor)));
        assert_eq!(scaling("original_context_length"), Some(MetadataValue::U32(original)));
        assert_eq!(scaling("yarn_beta_fast"), Some(MetadataValue::F32(32.0)));
        assert_eq!(scaling("yarn_beta_slow"), Some(MetadataValue::F32(1.0)));
        let rope = &read(config).ropes[0];
        let own = rope.yarn.unwrap();
        assert_eq!((own.factor as f32, own.original as u32), (factor, original));
    };
    // 64 positions.
    yarn(
        &llama(&json!({"rope_scaling": {"type": "yarn", "factor": 4.0}})),
        4.0,
        64,
    );
    let original = json!({"type": "yarn", "original_max_position_embeddings": 16});
    yarn(&llama(&json!({"rope_scaling": original})), 4.0, 16);
    yarn(&llama(&json!({"rope_scaling": {"type": "yarn"}})), 1.0, 64);
    // gpt-oss has YaRN without any rope parameters.
    let plain = golden("gpt_oss", &json!({"rope_parameters": null, "swiglu_limit": 7.0}));
    yarn(&plain, 32.0, 4096);
    assert_floats(&plain, &[("rope.freq_base", 150_000.0)]);
    let unknown = llama(&json!({"max_position_embeddings": null, "rope_scaling": {"type": "yarn", "factor": 4.0}}));
    let e = written(&unknown).unwrap_err().to_string();
    assert!(e.contains("no context length of the pretraining"), "{e}");
}

#[test]
fn limits_of_yarn_that_are_not_rounded_give_a_warning_in_every_family() {
    let rounds = |config: &Config| {
        let spec = read(config);
        let all = model::differences(&spec, &arch::of(&spec).unwrap());
        all.iter().any(|text| text.contains("rounds the limits of YaRN"))
    };
    let of_llama = |truncate: Value| {
        let mut yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16});
        yarn["truncate"] = truncate;
        llama(&json!({"rope_scaling": yarn}))
    };
    assert!(rounds(&of_llama(json!(false))));
    assert!(!rounds(&of_llama(json!(true))));
    assert!(!rounds(&of_llama(Value::Null)));
    assert!(rounds(&golden("gpt_oss", &json!({"swiglu_limit": 7.0}))));
    assert!(!rounds(&golden("llama", &json!({}))));
}

#[test]
fn latent_attention_that_rotates_halves_is_refused() {
    for (variant, more) in [
        ("deepseek_v3", json!({"attention_bias": false})),
        (
            "glm4_moe_lite",
            json!({"mlp_layer_types": ["dense", "sparse", "sparse"]}),
        ),
        ("youtu", json!({"q_lora_rank": 10})),
    ] {
        let mut config = golden(variant, &more);
        arch::of(&read(&config)).unwrap();
        config.raw.insert("rope_interleave".into(), false.into());
        let e = arch::of(&read(&config)).unwrap_err().to_string();
        assert!(e.contains("rope_interleave"), "{variant}: {e}");
    }
}

/// llama.cpp has one base for all layers, and no scaling in those with windows.
#[test]
fn olmo_3_needs_one_base_and_no_scaling_in_windows() {
    let yarn = json!({
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 500_000.0, "original_max_position_embeddings": 32});
    let of = |changes: &Value| arch::of(&read(&golden("olmo3", changes)));
    let with = |sliding: Value| {
        let both = json!({"full_attention": yarn, "sliding_attention": sliding});
        of(&json!({"rope_parameters": both}))
    };
    let plain = json!({"rope_type": "default", "rope_theta": 500_000.0});
    assert_eq!(with(plain).unwrap().name, "olmo2");
    // Of transformers 4: `rope_theta` is that of the layers without windows.
    let older = |theta: f64| of(&json!({"rope_parameters": null, "rope_scaling": null, "rope_theta": theta}));
    older(500_000.0).unwrap();
    for refused in [
        with(json!({"rope_type": "default", "rope_theta": 10_000.0})),
        with(json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 500_000.0})),
        with(yarn.clone()),
        older(100.0),
        of(&json!({})),
    ] {
        let e = refused.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
        assert!(e.to_string().contains("another base of the rotary frequencies"), "{e}");
    }
}

/// Both pairings are right only where the rows of q and k change their order for llama.cpp.
#[test]
fn every_architecture_refuses_the_other_pairing() {
    let mut computed = Vec::new();
    for dir in files::list(&goldens()).unwrap() {
        let variant = dir.file_name().unwrap().to_string_lossy().into_owned();
        let spec = read(&Config::read(&dir).unwrap());
        let arch = match arch::of(&spec) {
            Ok(arch) => arch,
            Err(e) => {
                let is_pairing = e.to_string().contains("rope_interleave");
                assert_eq!(is_pairing, variant == "deepseek_v3_halves", "{variant}: {e}");
                continue;
            }
        };
        let pairing = match spec.pairing {
            RopePairing::Halves => RopePairing::Neighbors,
            RopePairing::Neighbors => RopePairing::Halves,
        };
        let other = arch::of(&Spec { pairing, ..spec });
        assert_eq!(other.is_ok(), arch.permuted, "{variant}");
        computed.push(variant);
    }
    println!("{} variants: {}", computed.len(), computed.join(" "));
    // Those that llama.cpp has read.
    let read_by_it = files::read_text(&goldens().join("../../../run/gguf.txt")).unwrap();
    for line in read_by_it.lines() {
        let (variant, _) = line.split_once(' ').unwrap();
        assert!(computed.iter().any(|other| other == variant), "{variant}");
    }
    assert!(read_by_it.lines().count() >= 31);
}

#[test]
fn an_adapter_with_values_beyond_f16_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let base = base(dir.path(), true, crate::formats::StoredDtype::F32);
    let config = AdapterConfig {
        lora_alpha: 3e6,
        ..adapter_config()
    };
    let print = hf::fingerprint(&base).unwrap().base();
    let all = adapters(&config, |_| (2, 3e6));
    let path = hf::adapter(
        &dir.path().join("adapter"),
        &config,
        &all,
        &BTreeMap::new(),
        &base,
        &print,
    )
    .unwrap();
    let write = |block, out: &str| {
        let file = AdapterFile {
            dir: &path,
            base: &base,
            name: "a",
            block,
        };
        adapter(&file, &dir.path().join(out))
    };
    let e = write(BlockType::F16, "f16.gguf").unwrap_err().to_string();
    assert!(e.contains("too large for this format"), "{e}");
    assert!(!dir.path().join("f16.gguf").exists());
    for (block, out) in [(BlockType::Bf16, "bf16.gguf"), (BlockType::F32, "f32.gguf")] {
        assert_eq!(write(block, out).unwrap().0, "llama");
    }
}

/// A tied reward model has every parameter of a language model: the difference is the score head.
#[test]
fn reward_models_and_weights_of_another_model_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let base = base(dir.path(), true, crate::formats::StoredDtype::F32);
    let weights = Weights::open(&base).unwrap();
    let plan = |name: &str, shape: &[usize]| TensorPlan {
        name: name.into(),
        dtype: crate::formats::StoredDtype::F32,
        shape: shape.to_vec(),
    };
    let own: Vec<TensorPlan> = weights
        .names()
        .map(|name| plan(name, &weights.info(name).unwrap().shape))
        .collect();
    let out = dir.path().join("model.gguf");
    for (more, shape, kind, part) in [
        (
            hf::SCORE,
            [1, 8],
            ErrorKind::Unsupported,
            "a reward model returns scores",
        ),
        ("model.layers.9.extra", [2, 2], ErrorKind::Shape, "model.layers.9.extra"),
    ] {
        let plans = [own.clone(), vec![plan(more, &shape)]].concat();
        writer::write_file(&base.join("model.safetensors"), &plans, &[], |plan, sink| {
            sink(Values::F32(&vec![0.5; plan.shape.iter().product()]))
        })
        .unwrap();
        let file = model::ModelFile {
            dir: &base,
            file_type: model::FileType::F32,
            name: "m",
            pre_tokenizer: None,
        };
        let e = model::model(&file, &out).unwrap_err();
        assert_eq!(e.kind(), kind, "{e}");
        assert!(e.to_string().contains(part), "{e}");
        assert!(!out.exists(), "{more}");
    }
}
