//! Tests of names in configs: routers, experts, multimodal models, and what PEFT would leave out. The wanted names are those of
//! PEFT 0.21 on transformers 5.

use super::super::testing::{config, spec};
use super::super::{AdapterSet, BaseHashes, adapter, adapters_to_fill, load_adapter, new_adapters, tie};
use super::*;
use crate::base::ErrorKind;
use crate::formats::weights::Weights;
use crate::model::tokens;
use crate::peft::config::PeftType;
use candle_core::{Device, Tensor};
use std::collections::BTreeMap;
use std::path::Path;

/// The model of golden files.
fn family(name: &str) -> Spec {
    let path = format!("../../tests/parity/goldens/families/{name}/config.json");
    let text = std::fs::read_to_string(path).unwrap();
    spec(&serde_json::from_str(&text).unwrap())
}

fn list(names: &[&str]) -> Vec<String> {
    names.iter().map(|n| n.to_string()).collect()
}

/// Settings that also save these modules whole.
fn saving(modules: &[&str]) -> LoraConfig {
    LoraConfig {
        r: 2,
        modules_to_save: list(modules),
        ..LoraConfig::default()
    }
}

fn filled(shape: &[usize]) -> Tensor {
    Tensor::from_vec(vec![0.5f32; shape.iter().product()], shape, &Device::Cpu).unwrap()
}

/// Values of these parameters.
fn values(spec: &Spec, names: &[String]) -> BTreeMap<String, Tensor> {
    let params = spec
        .params()
        .into_iter()
        .filter(|p| names.contains(&p.name.to_string()));
    params.map(|p| (p.name.to_string(), filled(&p.shape))).collect()
}

/// Writes an adapter directory, and returns the names of its tensors without `base_model.model.`.
fn write(out: &Path, set: &AdapterSet, whole: &BTreeMap<String, Tensor>) -> Vec<String> {
    let config = set.config.as_ref().unwrap();
    let none = BaseHashes::default();
    adapter(out, config, &set.adapters, whole, out.parent().unwrap(), &none).unwrap();
    let weights = Weights::open_file(&out.join("adapter_model.safetensors")).unwrap();
    let names = weights.names().map(|n| n.replacen("base_model.model.", "", 1));
    names.collect()
}

#[test]
fn routers_have_the_names_of_transformers_5_in_files() {
    let dir = tempfile::tempdir().unwrap();
    let of = |layers: [usize; 2], names: &[&str]| -> Vec<String> {
        let names = |l| names.iter().map(move |n| format!("model.layers.{l}.{n}"));
        layers.into_iter().flat_map(names).collect()
    };
    let first = [0, 1];
    let cases = [
        ("mixtral", "gate", list(&["gate"]), of(first, &["mlp.gate.weight"])),
        (
            "mixtral",
            "block_sparse_moe.gate",
            of(first, &["mlp.gate"]),
            of(first, &["mlp.gate.weight"]),
        ),
        ("minimax_m2", "gate", list(&["gate"]), of(first, &["mlp.gate.weight"])),
        (
            "granitemoe",
            "router",
            list(&["router"]),
            of(first, &["block_sparse_moe.router.weight"]),
        ),
        (
            "granitemoe",
            "layer",
            of(first, &["block_sparse_moe.router"]),
            of(first, &["block_sparse_moe.router.weight"]),
        ),
        (
            "ernie4_5_moe",
            "gate",
            list(&["gate"]),
            of(
                [1, 2],
                &["mlp.gate.moe_statics.e_score_correction_bias", "mlp.gate.weight"],
            ),
        ),
        (
            "hunyuan_v1_moe",
            "gate",
            list(&["gate"]),
            of(first, &["mlp.gate.wg.weight"]),
        ),
        (
            "qwen2_moe",
            "gate",
            list(&["gate"]),
            of(first, &["mlp.gate.weight", "mlp.shared_expert_gate.weight"]),
        ),
    ];
    for (index, (name, module, modules, wanted)) in cases.into_iter().enumerate() {
        let spec = family(name);
        let set = new_adapters(&saving(&[module]), &spec, None, 0).unwrap();
        assert_eq!(set.config.as_ref().unwrap().modules_to_save, modules, "{name} {module}");
        let whole = values(&spec, &set.whole);
        let out = dir.path().join(index.to_string());
        let mut found = write(&out, &set, &whole);
        found.retain(|n| !n.contains(".lora_"));
        found.sort();
        assert_eq!(found, wanted, "{name} {module}");
        // The names of the model again; a file of PEFT has the same.
        let loaded = load_adapter(&out, &spec).unwrap();
        assert!(loaded.whole.keys().eq(whole.keys()), "{name} {module}");
        check_saved_again(&loaded, &spec).unwrap();
    }
}

#[test]
fn linears_of_single_experts_are_not_saved_whole() {
    for (name, module) in [
        ("mixtral", "w2"),
        ("olmoe", "down_proj"),
        ("gpt_oss", "up_proj"),
        ("qwen2_moe", "gate_proj"),
        ("qwen3_moe", "experts.1.up_proj"),
    ] {
        let e = new_adapters(&saving(&[module]), &family(name), None, 0).err().unwrap();
        assert_eq!(e.kind(), ErrorKind::Unsupported, "{name}: {e}");
        assert!(
            e.to_string()
                .contains(&format!("`{module}` names linear layers of single experts")),
            "{e}"
        );
        assert!(e.hint_text().unwrap().contains("LoraConfig::target_parameters"), "{e}");
        // A run of an earlier version goes on.
        let set = adapters_to_fill(&saving(&[module]), &family(name), None, 0).unwrap();
        assert!(set.left_out.is_some() && !set.whole.is_empty(), "{name}");
    }
    let shared = new_adapters(&saving(&["shared_expert.down_proj"]), &family("qwen2_moe"), None, 0).unwrap();
    assert_eq!(shared.whole.len(), 2);
}

/// They compared whole components, so they have fewer modules than the names mean now.
#[test]
fn files_of_earlier_versions_of_ft_are_read_with_the_modules_that_they_have() {
    let dir = tempfile::tempdir().unwrap();
    for (name, module, end) in [
        ("qwen3", "norm", "model.norm.weight"),
        ("gemma3", "norm", "model.norm.weight"),
        ("qwen2_moe", "gate", "mlp.gate.weight"),
        ("ernie4_5_moe", "gate", "mlp.gate.weight"),
    ] {
        let spec = family(name);
        let mut set = new_adapters(&saving(&[module]), &spec, None, 0).unwrap();
        let (all, mut names) = (set.whole.len(), set.whole.clone());
        names.retain(|name| name.ends_with(end));
        assert!(!names.is_empty() && names.len() < all, "{name}");
        set.config.as_mut().unwrap().modules_to_save = list(&[module]);
        let whole = values(&spec, &names);
        let out = dir.path().join(name);
        write(&out, &set, &whole);
        let mut loaded = load_adapter(&out, &spec).unwrap();
        assert!(loaded.whole.keys().eq(whole.keys()), "{name}");
        check_saved_again(&loaded, &spec).unwrap();
        // Saved again, it is read again.
        let modules = std::mem::take(&mut loaded.config.modules_to_save);
        assert_eq!(modules.len(), names.len(), "{name}: {modules:?}");
        set.config.as_mut().unwrap().modules_to_save = modules;
        let again = dir.path().join(format!("{name}-again"));
        write(&again, &set, &whole);
        assert!(
            load_adapter(&again, &spec).unwrap().whole.keys().eq(whole.keys()),
            "{name}"
        );
    }
}

/// As older versions of transformers have them.
#[test]
fn a_file_with_whole_experts_is_read_and_not_trained_further() {
    let dir = tempfile::tempdir().unwrap();
    let spec = family("olmoe");
    let mut set = new_adapters(&saving(&[]), &spec, None, 0).unwrap();
    let modules = list(&["down_proj"]);
    let whole = values(&spec, &saved_whole(&modules, &spec));
    set.config.as_mut().unwrap().modules_to_save = modules;
    let out = dir.path().join("out");
    write(&out, &set, &whole);
    let loaded = load_adapter(&out, &spec).unwrap();
    assert!(!whole.is_empty() && loaded.whole.keys().eq(whole.keys()));
    let e = check_saved_again(&loaded, &spec).unwrap_err().to_string();
    assert!(
        e.contains("PEFT would leave out") && e.contains("mlp.experts.0.down_proj.weight"),
        "{e}"
    );
}

#[test]
fn a_module_with_other_modules_in_it_is_not_saved_whole() {
    for (name, module) in [("qwen3_next", "linear_attn"), ("minimax_m2", "mlp"), ("lfm2", "conv")] {
        let e = new_adapters(&saving(&[module]), &family(name), None, 0).err().unwrap();
        assert!(e.to_string().contains("PEFT would save all of them"), "{name}: {e}");
    }
}

/// PEFT decides by the model type, also for a model without a layer of experts.
#[test]
fn lora_has_no_targets_that_peft_takes_for_experts() {
    let dir = tempfile::tempdir().unwrap();
    let spec = family("qwen3_next");
    assert!(spec.layers.iter().all(|layer| layer.experts.is_none()));
    let on = |peft_type, targets: &[&str]| LoraConfig {
        peft_type,
        target_modules: list(targets),
        ..saving(&[])
    };
    let set = new_adapters(&on(PeftType::Lora, &[]), &spec, None, 0).unwrap();
    assert!(!set.adapters.is_empty() && set.adapters.keys().all(|module| !module.contains(".mlp.")));
    assert!(
        set.warnings.iter().any(|w| w.contains("`qwen3_next`")),
        "{:?}",
        set.warnings
    );
    let Targets::List(names) = set.config.unwrap().target_modules else {
        panic!("no list of names");
    };
    assert!(
        names.iter().all(|name| !EXPERT_LINEARS.contains(&name.as_str())),
        "{names:?}"
    );

    let lora = on(PeftType::Lora, &["o_proj", "down_proj"]);
    let e = new_adapters(&lora, &spec, None, 0).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
    assert!(e.to_string().contains("`model.layers.0.mlp.down_proj`"), "{e}");
    let pattern = on(PeftType::Lora, &[r".*\.(o|up)_proj"]);
    assert!(new_adapters(&pattern, &spec, None, 0).is_err());
    // Another type of adapter, another type of model.
    let ia3 = new_adapters(&on(PeftType::Ia3, &["o_proj", "down_proj"]), &spec, None, 0).unwrap();
    assert!(ia3.adapters.contains_key("model.layers.0.mlp.down_proj"));
    let mut other = spec.clone();
    other.model_type = "another".into();
    let set = new_adapters(&lora, &other, None, 0).unwrap();
    assert!(set.adapters.contains_key("model.layers.0.mlp.down_proj"));
    // A file with them is read, and not trained further.
    let out = dir.path().join("out");
    write(&out, &set, &BTreeMap::new());
    let loaded = load_adapter(&out, &spec).unwrap();
    assert!(loaded.adapters.keys().eq(set.adapters.keys()));
    check_saved_again(&loaded, &other).unwrap();
    assert!(check_saved_again(&loaded, &spec).is_err());
}

/// PEFT compares names with the modules of all parts of a multimodal model.
#[test]
fn whole_modules_of_a_multimodal_model_are_paths() {
    let dir = tempfile::tempdir().unwrap();
    let spec = family("gemma3");
    assert!(spec.multimodal && spec.tied);
    let set = new_adapters(&saving(&["norm"]), &spec, None, 0).unwrap();
    let modules = &set.config.as_ref().unwrap().modules_to_save;
    // Six norms of a layer, and the last one.
    assert_eq!(modules.len(), 6 * spec.layers.len() + 1);
    assert!(
        modules.iter().all(|m| m.starts_with("model.language_model.")),
        "{modules:?}"
    );
    let whole = values(&spec, &set.whole);
    assert_eq!(whole.len(), modules.len());
    let out = dir.path().join("norms");
    write(&out, &set, &whole);
    assert!(load_adapter(&out, &spec).unwrap().whole.keys().eq(whole.keys()));

    let one = new_adapters(&saving(&["model.language_model.norm"]), &spec, None, 0).unwrap();
    assert_eq!(one.whole, ["model.norm.weight"]);
    let table = new_adapters(&saving(&["embed_tokens"]), &spec, None, 0).unwrap();
    assert_eq!(table.config.unwrap().modules_to_save, ["embed_tokens"]);

    // Names as PEFT users write them.
    let mut set = new_adapters(&saving(&[]), &spec, None, 0).unwrap();
    let config = set.config.as_mut().unwrap();
    config.modules_to_save = list(&["language_model.embed_tokens"]);
    assert!(tie::config_unties(config, &spec));
    config.modules_to_save.clear();
    config.token_rows = vec![("language_model.embed_tokens".into(), vec![3])];
    let rows = BTreeMap::from([(tokens::name_of(EMBEDDING), filled(&[1, spec.hidden]))]);
    let out = dir.path().join("rows");
    write(&out, &set, &rows);
    let loaded = load_adapter(&out, &spec).unwrap();
    assert_eq!(loaded.rows[EMBEDDING].0, [3]);
}

#[test]
fn rows_of_a_matrix_that_trains_whole_are_refused_by_any_name_of_it() {
    let spec = spec(&config(true));
    for module in ["embed_tokens", "model.embed_tokens", "tokens", "lm_head"] {
        let lora = LoraConfig {
            trainable_token_indices: vec![7],
            ..saving(&[module])
        };
        let e = new_adapters(&lora, &spec, None, 0).err().unwrap().to_string();
        assert!(
            e.contains("trains the full matrix `model.embed_tokens`"),
            "{module}: {e}"
        );
    }
}

/// VeRA of PEFT has no `exclude_modules`.
#[test]
fn excluded_modules_of_vera_are_left_out_of_its_targets() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(&config(true));
    let lora = LoraConfig {
        peft_type: PeftType::Vera,
        target_modules: list(&["q_proj", "down_proj"]),
        exclude_modules: list(&["layers.0.mlp.down_proj"]),
        ..saving(&[])
    };
    let set = new_adapters(&lora, &spec, None, 0).unwrap();
    let wanted = [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
    ];
    let config = set.config.as_ref().unwrap();
    assert_eq!(config.target_modules, Targets::List(list(&wanted)));
    assert!(config.exclude_modules.is_none() && config.to_json().get("exclude_modules").is_none());
    let out = dir.path().join("out");
    write(&out, &set, &BTreeMap::new());
    assert_eq!(load_adapter(&out, &spec).unwrap().adapters.len(), 3);
    // A file of an older version of ft, which has the key.
    let path = out.join("adapter_config.json");
    let mut old: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    old["target_modules"] = serde_json::json!(["q_proj", "down_proj"]);
    old["exclude_modules"] = serde_json::json!(["layers.0.mlp.down_proj"]);
    std::fs::write(&path, old.to_string()).unwrap();
    let loaded = load_adapter(&out, &spec).unwrap().config;
    assert!(loaded.exclude_modules.is_none() && loaded.to_json().get("exclude_modules").is_none());
    let Targets::List(mut paths) = loaded.target_modules else {
        panic!("no list of paths");
    };
    let mut wanted = list(&wanted);
    paths.sort();
    wanted.sort();
    assert_eq!(paths, wanted);
}

/// PEFT: a text is an expression for the whole path, an item of a list is the end of a path.
#[test]
fn inputs_that_ia3_scales_may_be_a_regular_expression() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(&config(true));
    let lora = LoraConfig {
        peft_type: PeftType::Ia3,
        target_modules: list(&["k_proj", "down_proj"]),
        ..saving(&[])
    };
    let mut set = new_adapters(&lora, &spec, None, 0).unwrap();
    for (index, (feedforward, reads)) in [
        (Targets::Pattern(r".*\.mlp\.down_proj".into()), true),
        (Targets::List(list(&["n_proj"])), true),
        (Targets::Pattern("down_proj".into()), false),
        (Targets::List(list(&["k_proj"])), false),
    ]
    .into_iter()
    .enumerate()
    {
        set.config.as_mut().unwrap().kind = AdapterKind::Ia3 { feedforward };
        let out = dir.path().join(index.to_string());
        write(&out, &set, &BTreeMap::new());
        assert_eq!(load_adapter(&out, &spec).is_ok(), reads, "{index}");
    }
}

#[test]
fn an_adapter_on_modules_without_adapters_here_is_not_said_to_be_of_another_model() {
    let dir = tempfile::tempdir().unwrap();
    let hint = |name: &str, set: &AdapterSet, whole: BTreeMap<String, Tensor>, spec: &Spec| {
        let out = dir.path().join(name);
        write(&out, set, &whole);
        let e = load_adapter(&out, spec).unwrap_err();
        (e.to_string(), e.hint_text().unwrap().to_string())
    };
    let untied = spec(&config(false));
    let mut set = new_adapters(&saving(&[]), &untied, None, 0).unwrap();
    let other = "ft has no adapters on some of its modules";
    let head = BTreeMap::from([("lm_head.base_layer.weight".to_string(), filled(&[16, 8]))]);
    let (e, text) = hint("head", &set, head, &untied);
    assert!(text.contains(other), "{e}");
    let strange = BTreeMap::from([("model.norm.weight".to_string(), filled(&[8]))]);
    let (e, text) = hint("strange", &set, strange, &untied);
    assert!(text.contains("use the base model"), "{e}");
    set.config.as_mut().unwrap().modules_to_save = list(&["mlp"]);
    let names = saved_whole(&list(&["down_proj"]), &untied);
    let (e, text) = hint("mlp", &set, values(&untied, &names), &untied);
    assert!(text.contains(other), "{e}");

    // A dense layer beside layers of experts.
    let spec = family("deepseek_v3");
    assert!(spec.layers[0].experts.is_none());
    let mut dense = spec.clone();
    dense.layers.iter_mut().for_each(|layer| layer.experts = None);
    let lora = LoraConfig {
        peft_type: PeftType::Ia3,
        target_modules: list(&["down_proj"]),
        layers_to_transform: vec![0],
        ..saving(&[])
    };
    let set = new_adapters(&lora, &dense, None, 0).unwrap();
    let (e, text) = hint("dense", &set, BTreeMap::new(), &spec);
    assert!(
        e.contains("model.layers.0.mlp.down_proj: ft has no adapters on this module"),
        "{e}"
    );
    assert!(text.contains(other), "{e}");
}
