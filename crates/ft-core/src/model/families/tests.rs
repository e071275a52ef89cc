//! Options that several families share.

use super::{read, rope_of_config};
use crate::base::Result;
use crate::formats::config::Config;
use crate::model::Spec;
use candle_core::DType;
use serde_json::{Map, Value, json};
use std::path::Path;

/// The config of a golden model, with these keys changed.
fn changed_config(family: &str, keys: &Value) -> Config {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/goldens/families");
    let mut config = Config::load(&dir.join(family)).unwrap();
    let keys: Map<String, Value> = keys.as_object().unwrap().clone();
    config.raw.extend(keys);
    config
}

fn changed(family: &str, keys: &Value) -> Result<Spec> {
    read(&changed_config(family, keys))
}

fn refused(family: &str, keys: &Value, words: &[&str]) {
    let said = changed(family, keys).unwrap_err().to_string();
    assert!(words.iter().all(|word| said.contains(word)), "{said}");
}

/// transformers 5.23 multiplies by `embed_scale.to(self.weight.dtype)`; the numbers are those of torch 2.13.
#[test]
fn the_embedding_factor_of_gemma_is_rounded_as_its_weights_are() {
    for (hidden, bf16, f16) in [
        (1152, 34.0, 33.9375),
        (1536, 39.25, 39.1875),
        (2560, 50.5, 50.59375),
        (3072, 55.5, 55.4375),
        (3584, 59.75, 59.875),
        (5376, 73.5, 73.3125),
    ] {
        for family in [
            "gemma",
            "gemma2",
            "gemma3_text",
            "gemma3n_text",
            "gemma4_text",
            "vaultgemma",
        ] {
            let spec = changed(family, &json!({"hidden_size": hidden})).unwrap();
            let factors = [DType::BF16, DType::F16, DType::F32].map(|dtype| spec.embedding_factor(dtype));
            assert_eq!(factors, [bf16, f16, (hidden as f32).sqrt()], "{family}");
        }
    }
    // A number of the config is not rounded.
    let spec = changed("granite", &json!({"embedding_multiplier": 12.1})).unwrap();
    assert_eq!(spec.embedding_factor(DType::BF16), 12.1);
}

/// transformers 5 takes `rope_scaling` if a file has both.
#[test]
fn two_descriptions_of_the_positions_must_agree() {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
    let plain = json!({"rope_type": "default", "rope_theta": 100.0});
    let with_base =
        json!({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "rope_theta": 100.0});
    let words = ["rope_scaling", "rope_parameters"];
    refused(
        "qwen3",
        &json!({"rope_parameters": plain, "rope_scaling": yarn}),
        &words,
    );
    // Without a base of its own it gets that of the config.
    refused(
        "qwen3",
        &json!({"rope_parameters": with_base, "rope_scaling": yarn}),
        &words,
    );
    let same = changed(
        "qwen3",
        &json!({"rope_parameters": with_base, "rope_scaling": yarn, "rope_theta": 100.0}),
    );
    let alone = changed("qwen3", &json!({"rope_parameters": with_base}));
    assert_eq!(same.unwrap().ropes, alone.unwrap().ropes);
    let none = changed("qwen3", &json!({"rope_parameters": plain, "rope_scaling": null})).unwrap();
    assert_eq!(
        none.ropes,
        changed("qwen3", &json!({"rope_parameters": plain})).unwrap().ropes
    );
}

/// Gemma 3 and OLMo 3 in transformers 5.23: `rope_parameters["full_attention"].update(rope_scaling)`.
#[test]
fn of_ropes_by_kind_of_layer_only_that_of_full_attention_must_agree() {
    let ropes = |factor: Option<f64>, scaling: Value| {
        let full = match factor {
            Some(factor) => json!({"rope_type": "linear", "factor": factor, "rope_theta": 2000.0}),
            None => json!({"rope_type": "default", "rope_theta": 2000.0}),
        };
        let sliding = json!({"rope_type": "default", "rope_theta": 50.0});
        let both = json!({"full_attention": full, "sliding_attention": sliding});
        let keys = json!({"rope_parameters": both, "rope_scaling": scaling});
        changed("gemma3_text", &keys).map(|spec| spec.ropes)
    };
    let eight = json!({"rope_type": "linear", "factor": 8});
    let wanted = ropes(Some(8.0), Value::Null).unwrap();
    assert_ne!(wanted, ropes(None, Value::Null).unwrap());
    assert_eq!(ropes(Some(8.0), eight.clone()).unwrap(), wanted);
    assert_eq!(ropes(Some(8.0), json!({"factor": 8.0})).unwrap(), wanted);
    let keys = json!({"rope_scaling": {"rope_type": "default"}});
    let parameters = rope_of_config(&changed_config("gemma3_text", &keys)).unwrap();
    assert_eq!(parameters["rope_theta"], 2000.0);
    for (factor, scaling) in [
        (None, eight.clone()),
        (Some(4.0), eight),
        (Some(8.0), json!({"factor": 8.0, "rope_theta": 50.0})),
    ] {
        let e = ropes(factor, scaling).unwrap_err().to_string();
        assert!(e.contains("rope_scaling") && e.contains("rope_parameters"), "{e}");
    }
}

#[test]
fn a_null_beside_the_description_of_the_positions_is_no_difference() {
    let plain = json!({"rope_type": "default", "rope_theta": 100.0});
    let with_null = json!({"rope_type": "default", "rope_theta": 100.0, "factor": null});
    let wanted = changed("qwen3", &json!({"rope_parameters": plain})).unwrap().ropes;
    for (parameters, scaling) in [(&with_null, &plain), (&plain, &with_null)] {
        let keys = json!({"rope_parameters": parameters, "rope_scaling": scaling});
        assert_eq!(changed("qwen3", &keys).unwrap().ropes, wanted);
    }
}

/// transformers sets the number in the rope to that of the config.
#[test]
fn the_original_length_of_the_config_goes_before_that_of_the_rope() {
    let rope = |inner: usize| json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": inner, "rope_theta": 100.0});
    let with = |inner, outer: Value| {
        let keys = json!({"rope_parameters": rope(inner), "original_max_position_embeddings": outer});
        changed("qwen3", &keys).unwrap().ropes
    };
    assert_eq!(with(64, json!(32)), with(32, Value::Null));
    assert_ne!(with(64, json!(32)), with(64, Value::Null));
}

#[test]
fn dropout_of_a_published_model_is_a_warning() {
    for (family, key) in [
        ("granite", "attention_dropout"),
        ("hunyuan_v1_dense", "attention_dropout"),
        ("llama", "attention_dropout"),
        ("phi3", "resid_pdrop"),
        ("stablelm", "hidden_dropout"),
        ("starcoder2", "embedding_dropout"),
    ] {
        let plain = changed(family, &json!({key: 0.0})).unwrap();
        assert!(!plain.warnings.iter().any(|w| w.contains(key)), "{family}");
        let spec = changed(family, &json!({key: 0.1})).unwrap();
        let said = spec.warnings.iter().find(|w| w.contains(key)).unwrap();
        assert!(said.contains("0.1 is not applied"), "{said}");
    }
    refused("llama", &json!({"attention_dropout": "high"}), &["attention_dropout"]);
}

#[test]
fn hunyuan_may_list_its_numbers_of_experts_by_layer() {
    let wanted = changed("hunyuan_v1_moe", &json!({})).unwrap();
    let experts = wanted.layers[0].experts.unwrap();
    let (count, chosen) = (experts.count, experts.router.top_k);
    let n = wanted.layers.len();
    let same = changed(
        "hunyuan_v1_moe",
        &json!({"num_experts": vec![count; n], "num_local_experts": vec![count; n], "moe_topk": vec![chosen; n], "num_experts_per_tok": vec![chosen; n]}),
    );
    assert_eq!(same.unwrap().layers, wanted.layers);
    let mut other = vec![chosen; n];
    other[n - 1] += 1;
    refused(
        "hunyuan_v1_moe",
        &json!({"num_experts_per_tok": other}),
        &["num_experts_per_tok", "different numbers"],
    );
}

#[test]
fn granite_4_with_experts_or_state_space_layers_is_refused_by_name() {
    let family = "granitemoehybrid";
    let without = "supported only without experts";
    refused(
        family,
        &json!({"num_local_experts": 4}),
        &[family, without, "num_local_experts"],
    );
    refused(family, &json!({"num_local_experts": null}), &[family, without]);
    // As published with both: the layers come first.
    let published = json!({"layer_types": ["mamba", "attention"], "num_local_experts": 64});
    refused(
        family,
        &published,
        &["supported only without state-space layers", "layer_types"],
    );
    let mixed = json!({"layer_types": ["full_attention", "mamba"]});
    refused(family, &mixed, &[family, "state-space", "layer_types"]);
    refused(family, &json!({"layer_types": null}), &[family, "state-space"]);
    refused(
        family,
        &json!({"position_embedding_type": "alibi"}),
        &[family, "positions"],
    );
    // transformers 5.23 has no `GraniteMoeHybridForSequenceClassification`.
    assert!(!changed(family, &json!({})).unwrap().has_classifier());
    // The name of transformers 4.
    let old = changed(family, &json!({"layer_types": ["attention", "attention"]})).unwrap();
    assert_eq!(old.layers, changed(family, &json!({})).unwrap().layers);
}
