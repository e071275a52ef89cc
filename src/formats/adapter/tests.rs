//! Tests of `adapter`: what is read and written, and every kind of lie that is refused.

use super::*;

const GOOD: &str = r#"{"peft_type":"LORA","task_type":"CAUSAL_LM","r":16,"lora_alpha":32,"lora_dropout":0.05,
    "target_modules":["v_proj","q_proj"],"bias":"none","use_rslora":true,"fan_in_fan_out":false,"use_dora":false,
    "rank_pattern":{"layers.0.self_attn.q_proj":4},"alpha_pattern":{},"modules_to_save":null,"lora_bias":false,
    "layer_replication":null,"loftq_config":{},"megatron_core":"megatron.core","init_lora_weights":true,
    "qalora_group_size":16,"use_qalora":false,"inference_mode":true,"eva_config":null,"layers_to_transform":3,
    "base_model_name_or_path":"org/base","peft_version":"0.17.0","some_new_flag":false}"#;

fn read(text: &str) -> Result<AdapterConfig> {
    let map: Map<String, Value> = serde_json::from_str(text).unwrap();
    AdapterConfig::from_map(&map, Path::new("x/adapter_config.json"))
}

fn with(key: &str, value: Value) -> Result<AdapterConfig> {
    let mut map: Map<String, Value> = serde_json::from_str(GOOD).unwrap();
    map.insert(key.into(), value);
    AdapterConfig::from_map(&map, Path::new("x/adapter_config.json"))
}

#[test]
fn a_peft_config_is_read_and_written_back() {
    let c = read(GOOD).unwrap();
    assert_eq!(
        (c.r, c.lora_alpha, c.lora_dropout, c.use_rslora),
        (16, 32.0, 0.05, true)
    );
    assert_eq!(c.target_modules, Targets::List(vec!["q_proj".into(), "v_proj".into()]));
    assert_eq!(c.rank_pattern["layers.0.self_attn.q_proj"], 4);
    assert_eq!(c.layers_to_transform, Some(vec![3]));
    let json = c.to_json();
    assert_eq!(json["lora_alpha"].to_string(), "32");
    for key in TYPED.iter().chain(&[
        "peft_type",
        "bias",
        "inference_mode",
        "layer_replication",
        "loftq_config",
    ]) {
        assert!(json.get(key).is_some(), "`{key}` is not written");
    }
    assert_eq!(
        AdapterConfig::from_map(json.as_object().unwrap(), Path::new("y")).unwrap(),
        c
    );
}

#[test]
fn the_smallest_config_gets_the_defaults_of_peft() {
    let c = read(r#"{"peft_type":"LORA","target_modules":"all-linear"}"#).unwrap();
    assert_eq!((c.r, c.lora_alpha), (8, 8.0));
    assert_eq!(c.target_modules, Targets::AllLinear);
    assert_eq!(c.scale(8.0, 4), 2.0);
    let c = read(r#"{"peft_type":"LORA","target_modules":".*q_proj"}"#).unwrap();
    assert_eq!(c.target_modules, Targets::Pattern(".*q_proj".into()));
}

#[test]
fn what_changes_the_mathematics_is_refused_by_name() {
    for (key, value) in [
        ("peft_type", json!("IA3")),
        ("bias", json!("all")),
        ("use_dora", json!(true)),
        ("fan_in_fan_out", json!(true)),
        ("lora_bias", json!(true)),
        ("trainable_token_indices", json!([1, 2])),
        ("target_parameters", json!(["experts.w1"])),
        ("layer_replication", json!([[0, 4], [2, 5]])),
        ("init_lora_weights", json!("pissa_niter_16")),
        ("alora_invocation_tokens", json!([5])),
        ("use_qalora", json!(true)),
        ("some_new_flag", json!({"x": 1})),
    ] {
        let e = with(key, value).unwrap_err().to_string();
        assert!(
            e.contains(&format!("`{key}`")) && e.contains("adapter_config.json"),
            "{e}"
        );
    }
}

#[test]
fn wrong_values_are_refused_by_name() {
    for (key, value) in [
        ("r", json!(0)),
        ("r", json!(-4)),
        ("r", json!(1.5)),
        ("lora_alpha", json!("16")),
        ("lora_dropout", json!(1.0)),
        ("target_modules", json!([1])),
        ("rank_pattern", json!({"a": 0})),
        ("alpha_pattern", json!({"a": "b"})),
        ("layers_to_transform", json!([-1])),
    ] {
        let e = with(key, value).unwrap_err().to_string();
        assert!(e.contains(&format!("`{key}`")), "{e}");
    }
    assert!(read("{}").unwrap_err().to_string().contains("`peft_type`"));
}

#[test]
fn a_pickle_adapter_is_refused_and_not_opened() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(CONFIG), GOOD).unwrap();
    std::fs::create_dir(dir.path().join("adapter_model.bin")).unwrap(); // opening it would fail otherwise
    let e = AdapterConfig::load(dir.path()).unwrap_err().to_string();
    assert!(e.contains("pickle") && e.contains("safe_serialization"), "{e}");
    std::fs::write(dir.path().join(WEIGHTS), b"").unwrap();
    AdapterConfig::load(dir.path()).unwrap();
}

#[test]
fn names_round_trip() {
    let module = "model.layers.0.self_attn.q_proj";
    let a = lora_key(module, "A");
    assert_eq!(a, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight");
    assert_eq!(parse_key(&a), Some(AdapterKey::A(module.into())));
    assert_eq!(parse_key(&lora_key(module, "B")), Some(AdapterKey::B(module.into())));
    assert_eq!(
        parse_key("base_model.model.lm_head.weight"),
        Some(AdapterKey::Whole("lm_head.weight".into()))
    );
    assert_eq!(
        parse_key("base_model.model.lm_head.modules_to_save.default.weight"),
        Some(AdapterKey::Whole("lm_head.weight".into()))
    );
    assert_eq!(parse_key("base_model.model.x.lora_magnitude_vector"), None);
    assert_eq!(parse_key("base_model.model.x.lora_embedding_A"), None);
    assert_eq!(parse_key("model.layers.0.weight"), None);
}
