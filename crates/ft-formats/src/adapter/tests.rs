//! Tests of `adapter`: valid files, written files, and all refused inconsistencies.

use super::*;
use serde_json::json;

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
    assert_eq!(c.rank_pattern, [("layers.0.self_attn.q_proj".to_string(), 4)]);
    assert_eq!(c.layers_to_transform, Some(vec![3]));
    let json = c.to_json();
    assert_eq!(json["lora_alpha"].to_string(), "32");
    for key in TYPED.iter().chain(own_keys("LORA")).chain(&[
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
    let c = read(r#"{"peft_type":"LORA","target_modules":".*q_proj"}"#).unwrap();
    assert_eq!(c.target_modules, Targets::Pattern(".*q_proj".into()));
}

#[test]
fn what_changes_the_mathematics_is_refused_by_name() {
    for (key, value) in [
        ("peft_type", json!("BOFT")),
        ("bias", json!("all")),
        ("fan_in_fan_out", json!(true)),
        ("lora_bias", json!(true)),
        ("trainable_token_indices", json!([1, 1])),
        ("trainable_token_indices", json!({"embed_tokens": [-1]})),
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

/// Row A1.
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

/// Row F7.
#[test]
fn a_pickle_adapter_is_refused_and_not_opened() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(CONFIG), GOOD).unwrap();
    std::fs::create_dir(dir.path().join("adapter_model.bin")).unwrap(); // a read attempt would fail with another error
    let e = AdapterConfig::load(dir.path()).unwrap_err().to_string();
    assert!(e.contains("pickle") && e.contains("safe_serialization"), "{e}");
    std::fs::write(dir.path().join(WEIGHTS), b"").unwrap();
    AdapterConfig::load(dir.path()).unwrap();
}

#[test]
fn names_round_trip() {
    let module = "model.layers.0.self_attn.q_proj";
    let kinds = [
        (AdapterKind::Lora, true),
        (
            AdapterKind::Ia3 {
                feedforward: Targets::List(vec![]),
            },
            false,
        ),
        (AdapterKind::Vera { d_initial: 0.1 }, false),
        (AdapterKind::Loha, false),
        (
            AdapterKind::Lokr {
                factor: -1,
                both: false,
            },
            false,
        ),
        (
            AdapterKind::Oft {
                block: 4,
                blocks: 0,
                neumann: None,
            },
            false,
        ),
        (
            AdapterKind::Adalora(RankAllocation {
                target_r: 2,
                tfinal: 3,
                total_step: 9,
                kept: vec![("model.layers.0.self_attn.q_proj".into(), vec![true, false])],
                ..RankAllocation::default()
            }),
            false,
        ),
    ];
    for (kind, dora) in &kinds {
        for below in below(kind, *dora) {
            let name = file_key(&format!("{module}.{below}"));
            assert_eq!(parse(&name, kind, *dora), Some(AdapterKey::Of(module.into(), below)));
        }
        assert_eq!(
            parse("base_model.model.lm_head.weight", kind, *dora),
            Some(AdapterKey::Whole("lm_head.weight".into()))
        );
    }
    let lora = |name: &str| parse(name, &AdapterKind::Lora, false);
    assert_eq!(
        lora("base_model.model.model.x.lora_A.default.weight"),
        Some(AdapterKey::Of("model.x".into(), "lora_A.weight"))
    );
    assert_eq!(
        lora("base_model.model.lm_head.modules_to_save.default.weight"),
        Some(AdapterKey::Whole("lm_head.weight".into()))
    );
    for stranger in [
        "base_model.model.x.lora_magnitude_vector",
        "base_model.model.x.lora_embedding_A",
        "base_model.model.x.ia3_l",
        "model.layers.0.weight",
    ] {
        assert_eq!(lora(stranger), None, "{stranger}");
    }
}

#[test]
fn every_kind_is_read_and_written_back() {
    for text in [
        r#"{"peft_type":"LORA","use_dora":true,"r":4,"target_modules":["q_proj"]}"#,
        r#"{"peft_type":"IA3","target_modules":["k_proj","down_proj"],"feedforward_modules":["down_proj"]}"#,
        r#"{"peft_type":"IA3","target_modules":["k_proj","down_proj"],"feedforward_modules":".*\\.down_proj"}"#,
        r#"{"peft_type":"VERA","r":32,"target_modules":["q_proj"],"d_initial":0.2,"save_projection":true,"projection_prng_key":0}"#,
        r#"{"peft_type":"LOHA","r":4,"alpha":6,"target_modules":["q_proj"],"alpha_pattern":{"q_proj":3}}"#,
        r#"{"peft_type":"LOKR","r":4,"alpha":6,"target_modules":["q_proj"],"decompose_both":true,"decompose_factor":8}"#,
        r#"{"peft_type":"OFT","r":0,"oft_block_size":16,"target_modules":["q_proj"],"use_cayley_neumann":true,"num_cayley_neumann_terms":7}"#,
        r#"{"peft_type":"OFT","r":0,"oft_block_size":16,"target_modules":["q_proj"],"use_cayley_neumann":false}"#,
        r#"{"peft_type":"OFT","r":4,"oft_block_size":0,"target_modules":["q_proj"],"use_cayley_neumann":true}"#,
        r#"{"peft_type":"ADALORA","init_r":6,"target_r":3,"lora_alpha":12,"target_modules":["q_proj"],"rank_pattern":{"a":[true,false]}}"#,
    ] {
        let config = read(text).unwrap();
        let again = AdapterConfig::from_map(config.to_json().as_object().unwrap(), Path::new("y")).unwrap();
        assert_eq!(
            again,
            AdapterConfig {
                peft_version: again.peft_version.clone(),
                ..config
            },
            "{text}"
        );
    }
    let oft = read(r#"{"peft_type":"OFT","r":4,"oft_block_size":0}"#)
        .unwrap()
        .to_json();
    assert_eq!((&oft["r"], &oft["oft_block_size"]), (&json!(4), &json!(0)));
    let ia3 = read(r#"{"peft_type":"IA3","feedforward_modules":".*down_proj"}"#).unwrap();
    assert_eq!(ia3.to_json()["feedforward_modules"], json!(".*down_proj"));
    for (text, part) in [
        (r#"{"peft_type":"VERA","save_projection":false}"#, "save_projection"),
        (r#"{"peft_type":"OFT","coft":true}"#, "`coft`"),
        (r#"{"peft_type":"OFT","block_share":true}"#, "`block_share`"),
        (r#"{"peft_type":"LOHA","module_dropout":0.5}"#, "`module_dropout`"),
        (r#"{"peft_type":"LOKR","rank_dropout":0.5}"#, "in training only"),
        (r#"{"peft_type":"LOKR","lora_alpha":3}"#, "`lora_alpha`"),
    ] {
        assert!(read(text).unwrap_err().to_string().contains(part), "{text}");
    }
}

/// `VeraConfig` of PEFT warns about keys that it does not have.
#[test]
fn the_config_of_vera_has_no_excluded_modules() {
    let has = |text: &str| read(text).unwrap().to_json().get("exclude_modules").is_some();
    assert!(!has(r#"{"peft_type":"VERA","r":4,"target_modules":["q_proj"]}"#));
    assert!(has(r#"{"peft_type":"LOHA","r":4,"target_modules":["q_proj"]}"#));
}

#[test]
fn names_of_routers_are_those_of_transformers_5_in_a_file() {
    fn names(parts: &'static [(&'static str, &'static str)]) -> PeftNames {
        PeftNames {
            multimodal: false,
            parts,
        }
    }
    let nested = names(&[("mlp.statics", "mlp.gate.statics")]);
    let shorter = names(&[("moe.router.layer", "moe.router")]);
    let other = names(&[("moe.gate", "mlp.gate")]);
    for (names, file, peft) in [
        (
            nested,
            "model.layers.0.mlp.statics.bias",
            "model.layers.0.mlp.gate.statics.bias",
        ),
        (shorter, "model.layers.0.moe.router.layer", "model.layers.0.moe.router"),
        (
            other,
            "model.layers.0.moe.gate.weight",
            "model.layers.0.mlp.gate.weight",
        ),
        (
            other,
            "model.layers.0.moe.gates.weight",
            "model.layers.0.moe.gates.weight",
        ),
        (other, "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.gate_proj"),
    ] {
        assert_eq!(names.in_peft(file), peft);
        assert_eq!(names.in_files(peft), file);
        assert_eq!(names.in_files(file), file, "names of older files");
    }
    let multimodal = PeftNames {
        multimodal: true,
        parts: &[],
    };
    assert_eq!(multimodal.in_peft("model.norm"), "model.language_model.norm");
    assert_eq!(multimodal.in_files("language_model.model.norm"), "model.norm");
}

#[test]
fn parameters_of_experts_are_wrapped_from_the_inside_out() {
    let c = read(r#"{"peft_type":"LORA","target_modules":[],"target_parameters":["mlp.experts.down_proj"]}"#).unwrap();
    assert_eq!(c.target_modules, Targets::List(Vec::new()));
    assert_eq!(c.target_parameters, ["mlp.experts.down_proj"]);
    assert_eq!(c.to_json()["target_parameters"], json!(["mlp.experts.down_proj"]));
    let e = read(
        r#"{"peft_type":"LORA","target_modules":[],"target_parameters":["mlp.experts.down_proj"],"lora_dropout":0.1}"#,
    );
    let e = e.unwrap_err().to_string();
    assert!(e.contains("`lora_dropout`") && e.contains("target_parameters"), "{e}");
    let e = read(r#"{"peft_type":"LOHA","target_parameters":["mlp.experts.down_proj"]}"#).unwrap_err();
    assert!(e.to_string().contains("`target_parameters`"), "{e}");
    let both = |_: &str| true;
    assert_eq!(wrapper("l.0.mlp.experts.down_proj", &both), "l.0.mlp.experts");
    assert_eq!(
        wrapper("l.0.mlp.experts.gate_up_proj", &both),
        "l.0.mlp.experts.base_layer"
    );
    assert_eq!(wrapper("l.0.mlp.experts.gate_up_proj", &|_| false), "l.0.mlp.experts");
}
