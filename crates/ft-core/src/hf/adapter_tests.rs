//! Tests of adapter directories: written and read back, and every kind of mismatch.

use super::testing::{adapter_config, adapters, base, config, names, spec};
use super::*;
use crate::base::ErrorKind;
use crate::formats::StoredDtype;
use crate::formats::adapter::{AdapterConfig, Targets, WEIGHTS, file_key};
use crate::formats::weights::Weights;
use crate::formats::writer::{self, TensorPlan, Values};
use crate::model::Adapters;
use crate::ops::update;
use crate::peft::Adapter;
use crate::peft::config::{LoraConfig, LoraInit, PeftType};
use candle_core::{Device, Tensor};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn load(dir: &Path) -> Result<LoadedAdapter> {
    load_adapter(dir, &spec(&config(true)))
}

fn lora_key(module: &str, side: &str) -> String {
    file_key(&format!("{module}.lora_{side}.weight"))
}

/// Without full parameters beside the adapters.
fn write(out: &Path, config: &AdapterConfig, adapters: &Adapters, base: &Path, print: &str) -> Result<PathBuf> {
    let named = BaseHashes {
        sampled: print.into(),
        ..BaseHashes::default()
    };
    adapter(out, config, adapters, &BTreeMap::new(), base, &named)
}

fn bits(t: &Tensor) -> Vec<u32> {
    update::to_f32_vec(t).unwrap().iter().map(|x| x.to_bits()).collect()
}

fn assert_same(a: &Adapters, b: &Adapters) {
    assert!(a.keys().eq(b.keys()));
    for (x, y) in a.values().zip(b.values()) {
        let (x, y) = (x.lora().unwrap(), y.lora().unwrap());
        assert_eq!(
            (bits(&x.a), bits(&x.b), x.scale, x.mask),
            (bits(&y.a), bits(&y.b), y.scale, y.mask)
        );
        assert_eq!(
            (x.a.dims(), x.b.dims(), &x.a_name, &x.b_name),
            (y.a.dims(), y.b.dims(), &y.a_name, &y.b_name)
        );
    }
}

#[test]
fn an_adapter_comes_back_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let base = base(dir.path(), true, StoredDtype::F32);
    let out = dir.path().join("final");
    let mut config = adapter_config();
    for rslora in [false, true] {
        config.use_rslora = rslora;
        let written = adapters(&config, |_| (2, 3.0));
        assert_eq!(write(&out, &config, &written, &base, "blake3:base").unwrap(), out);
        assert_eq!(
            names(&out),
            [
                "README.md",
                "adapter_config.json",
                WEIGHTS,
                "chat_template.jinja",
                "tokenizer.json",
                "tokenizer_config.json"
            ]
        );
        let LoadedAdapter {
            config: read_config,
            adapters: read,
            ..
        } = load(&out).unwrap();
        assert_eq!(
            (read_config.r, read_config.use_rslora, &read_config.target_modules),
            (2, rslora, &config.target_modules)
        );
        assert_same(&read, &written);
        let expected = if rslora { 3.0 / 2f32.sqrt() } else { 1.5 };
        assert!((read.values().next().unwrap().lora().unwrap().scale - expected).abs() < 1e-6);
        let weights = Weights::open_file(&out.join(WEIGHTS)).unwrap();
        assert_eq!(weights.len(), 8);
        let key = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight";
        let info = weights.info(key).unwrap();
        assert_eq!((info.dtype, info.shape.as_slice()), (StoredDtype::F32, &[2, 12][..]));
        let readme = files::read_text(&out.join("README.md")).unwrap();
        assert!(
            readme.starts_with("---\nbase_model: someone/tiny\n") && readme.contains("library_name: peft"),
            "{readme}"
        );
    }
    let named = |sampled: &str| BaseHashes {
        weights: "blake3-all:1".into(),
        sampled: sampled.into(),
    };
    check_base(&out, &named("blake3:base")).unwrap();
    let e = check_base(&out, &named("blake3:other")).unwrap_err().to_string();
    assert!(e.contains("another base") && e.contains("blake3:other"), "{e}");
    config.base_model_name_or_path = Some("/mnt/someone/models/x".into());
    write(&out, &config, &adapters(&config, |_| (2, 3.0)), &base, "").unwrap();
    assert!(!files::read_text(&out.join("README.md")).unwrap().contains("/mnt"));
}

#[test]
fn ranks_and_alphas_by_module_are_used() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = adapter_config();
    config.rank_pattern.push(("layers.0.self_attn.q_proj".into(), 4));
    config.rank_pattern.push((r"layers\.[1-9]\.mlp\.down_proj".into(), 1));
    config.alpha_pattern.push(("q_proj".into(), 10.0));
    let written = adapters(&config, |module| {
        let r = match module {
            "model.layers.0.self_attn.q_proj" => 4,
            "model.layers.1.mlp.down_proj" => 1,
            _ => 2,
        };
        (r, if module.ends_with("q_proj") { 10.0 } else { 3.0 })
    });
    let out = write(&dir.path().join("a"), &config, &written, dir.path(), "").unwrap();
    let read = load(&out).unwrap().adapters;
    assert_same(&read, &written);
    assert_eq!(read["model.layers.0.self_attn.q_proj"].lora().unwrap().scale, 2.5);
    assert_eq!(read["model.layers.1.mlp.down_proj"].lora().unwrap().scale, 3.0);
    // PEFT would compute a different result from this config: refused.
    config.alpha_pattern.clear();
    let e = write(&dir.path().join("b"), &config, &written, dir.path(), "")
        .unwrap_err()
        .to_string();
    assert!(
        e.contains("does not match its config") && !dir.path().join("b").exists(),
        "{e}"
    );
    config.rank_pattern.push(("(q_".into(), 4));
    assert!(
        write(&dir.path().join("b"), &config, &written, dir.path(), "")
            .unwrap_err()
            .to_string()
            .contains("(q_")
    );
    assert!(write(&dir.path().join("b"), &config, &Adapters::new(), dir.path(), "").is_err());
}

/// Writes an adapter file with these tensors; all numbers are `value`.
fn write_raw(dir: &Path, config: &AdapterConfig, tensors: &[(String, Vec<usize>)], dtype: StoredDtype, value: f32) {
    std::fs::create_dir_all(dir).unwrap();
    config.save(dir).unwrap();
    let plans: Vec<TensorPlan> = tensors
        .iter()
        .map(|(name, shape)| TensorPlan {
            name: name.clone(),
            dtype,
            shape: shape.clone(),
        })
        .collect();
    writer::write_file(&dir.join(WEIGHTS), &plans, &[], |plan, sink| {
        sink(Values::F32(&vec![value; plan.shape.iter().product()]))
    })
    .unwrap();
}

fn tensors(config: &AdapterConfig) -> Vec<(String, Vec<usize>)> {
    let all = adapters(config, |_| (config.r, config.lora_alpha));
    all.iter()
        .flat_map(|(m, l)| {
            [
                (lora_key(m, "A"), l.lora().unwrap().a.dims().to_vec()),
                (lora_key(m, "B"), l.lora().unwrap().b.dims().to_vec()),
            ]
        })
        .collect()
}

#[test]
fn half_precision_adapters_are_widened() {
    let dir = tempfile::tempdir().unwrap();
    let config = adapter_config();
    for dtype in [StoredDtype::F16, StoredDtype::Bf16, StoredDtype::F64] {
        write_raw(dir.path(), &config, &tensors(&config), dtype, 0.75);
        let read = load(dir.path()).unwrap().adapters;
        assert!(
            read.values()
                .all(|l| bits(&l.lora().unwrap().a).iter().all(|b| f32::from_bits(*b) == 0.75))
        );
    }
    let anything = BaseHashes {
        weights: "anything".into(),
        sampled: "anything".into(),
    };
    check_base(dir.path(), &anything).unwrap();
}

/// Rows A1, A3, F9.
#[test]
fn all_differences_stand_in_one_error() {
    let dir = tempfile::tempdir().unwrap();
    let config = adapter_config();
    let mut list = tensors(&config);
    let q0 = "model.layers.0.self_attn.q_proj";
    let at = |list: &[(String, Vec<usize>)], name: &str| list.iter().position(|(n, _)| n == name).unwrap();
    let i = at(&list, &lora_key(q0, "A"));
    list[i].1 = vec![4, 8]; // another rank
    let i = at(&list, &lora_key("model.layers.1.self_attn.q_proj", "B"));
    list[i].1 = vec![16, 2]; // another output size
    let i = at(&list, &lora_key("model.layers.0.mlp.down_proj", "B"));
    list.remove(i); // half a pair
    list.retain(|(n, _)| !n.contains("layers.1.mlp.down_proj")); // a whole target
    list.push((lora_key("model.layers.7.mlp.up_proj", "A"), vec![2, 8])); // a layer that does not exist
    list.push((lora_key("lm_head", "A"), vec![2, 8]));
    list.push(("base_model.model.model.embed_tokens.weight".into(), vec![16, 8]));
    list.push((format!("base_model.model.{q0}.lora_magnitude_vector"), vec![8]));
    list.push((format!("base_model.model.{q0}.lora_B.default.weight"), vec![8, 2]));
    write_raw(dir.path(), &config, &list, StoredDtype::F32, 0.5);
    let e = load(dir.path()).unwrap_err().to_string();
    for part in [
        "found [4, 8], expected [2, 8]",
        "found [16, 2], expected [8, 2]",
        "model.layers.0.mlp.down_proj.lora_B.weight: missing",
        "model.layers.1.mlp.down_proj: a target of the config",
        "model.layers.7.mlp.up_proj: this model has no such linear",
        "lm_head: this model has no such linear",
        "embed_tokens.weight: a full tensor",
        "lora_magnitude_vector: not a tensor of a LoRA adapter",
        "the same tensor as",
        "9 differences",
        "someone/tiny",
    ] {
        assert!(e.contains(part), "{part} not in\n{e}");
    }
}

/// Row F4.
#[test]
fn numbers_that_are_not_finite_and_missing_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let config = adapter_config();
    write_raw(dir.path(), &config, &tensors(&config), StoredDtype::F32, 0.5);
    let path = dir.path().join(WEIGHTS);
    let mut bytes = std::fs::read(&path).unwrap();
    let n = bytes.len();
    bytes[n - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let e = load(dir.path()).unwrap_err().to_string();
    assert!(e.contains("1 difference:") && e.contains("is not finite"), "{e}");
    write_raw(dir.path(), &config, &[], StoredDtype::F32, 0.0);
    assert!(load(dir.path()).unwrap_err().to_string().contains("4 differences"));
    std::fs::remove_file(&path).unwrap();
    assert!(load(dir.path()).is_err());
}

/// A config of a few bytes must not choose the size of a rotation.
#[test]
fn a_rotation_has_blocks_of_the_size_of_its_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let name = file_key("model.layers.0.self_attn.q_proj.oft_R.weight");
    let load_with = |block: u64, shape: &[usize]| {
        let config = format!(
            "{{\"peft_type\": \"OFT\", \"oft_block_size\": {block}, \"target_modules\": [\"q_proj\"], \
             \"layers_to_transform\": [0]}}"
        );
        std::fs::write(dir.path().join("adapter_config.json"), config).unwrap();
        let plan = TensorPlan {
            name: name.clone(),
            dtype: StoredDtype::F32,
            shape: shape.to_vec(),
        };
        writer::write_file(&dir.path().join(WEIGHTS), &[plan], &[], |plan, sink| {
            sink(Values::F32(&vec![0.5; plan.shape.iter().product()]))
        })
        .unwrap();
        load(dir.path())
    };
    // A tensor without blocks has no bytes, whatever its second size is.
    for (block, elements) in [(1 << 20, (1 << 19) * ((1 << 20) - 1)), (10_000_000_000, 1)] {
        let e = load_with(block, &[0, elements]).unwrap_err().to_string();
        let found = format!("found [0, {elements}], expected [1, 28]");
        assert!(e.contains(&found), "{e}");
    }
    // Three blocks of two do not cover eight features.
    let e = load_with(2, &[3, 1]).unwrap_err().to_string();
    assert!(e.contains("found [3, 1], expected [4, 1]"), "{e}");
    load_with(10_000_000_000, &[4, 1]).unwrap();
}

/// Row A3.
#[test]
fn targets_limit_what_must_be_there() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = adapter_config();
    let all = tensors(&config);
    let only = |part: &str| {
        all.iter()
            .filter(|(n, _)| n.contains(part))
            .cloned()
            .collect::<Vec<_>>()
    };
    config.layers_to_transform = Some(vec![1]);
    write_raw(dir.path(), &config, &only("layers.1."), StoredDtype::F32, 0.5);
    assert_eq!(load(dir.path()).unwrap().adapters.len(), 2);
    config.layers_to_transform = None;
    config.exclude_modules = Some(Targets::List(vec!["down_proj".into()]));
    write_raw(dir.path(), &config, &only("q_proj"), StoredDtype::F32, 0.5);
    assert_eq!(load(dir.path()).unwrap().adapters.len(), 2);
    config.exclude_modules = None;
    assert!({
        write_raw(dir.path(), &config, &only("q_proj"), StoredDtype::F32, 0.5);
        load(dir.path()).is_err()
    });
    config.target_modules = Targets::Pattern(".*q_proj".into());
    write_raw(dir.path(), &config, &only("q_proj"), StoredDtype::F32, 0.5);
    assert_eq!(load(dir.path()).unwrap().adapters.len(), 2);
    config.target_modules = Targets::AllLinear;
    write_raw(dir.path(), &config, &all, StoredDtype::F32, 0.5);
    let e = load(dir.path()).unwrap_err().to_string();
    assert!(e.contains("10 differences") && e.contains("up_proj"), "{e}");
}

#[test]
fn layers_that_peft_does_not_find_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = adapter_config();
    let all = tensors(&config).into_iter();
    let of_layer: Vec<_> = all.filter(|(name, _)| name.contains("layers.1.")).collect();
    config.layers_to_transform = Some(vec![1]);
    for (pattern, found) in [
        (&["layers"][..], true),
        (&["h", "layers"], true),
        (&["model.layers"], true),
        (&["h"], false),
    ] {
        config.layers_pattern = pattern.iter().map(|p| p.to_string()).collect();
        write_raw(dir.path(), &config, &of_layer, StoredDtype::F32, 0.5);
        match load(dir.path()) {
            Ok(read) => assert!(found && read.adapters.len() == 2, "{pattern:?}"),
            Err(e) => assert!(!found && e.to_string().contains("`layers_pattern`"), "{e}"),
        }
    }
    // PEFT takes a whole path, whatever the two keys say.
    let paths = ["mlp.down_proj", "self_attn.q_proj"].map(|module| format!("model.layers.1.{module}"));
    config.layers_to_transform = Some(vec![0]);
    config.target_modules = Targets::List(paths.to_vec());
    write_raw(dir.path(), &config, &of_layer, StoredDtype::F32, 0.5);
    assert_eq!(load(dir.path()).unwrap().adapters.len(), 2);
    let without_one: Vec<_> = of_layer.iter().filter(|(n, _)| n.contains("q_proj")).cloned().collect();
    write_raw(dir.path(), &config, &without_one, StoredDtype::F32, 0.5);
    let e = load(dir.path()).unwrap_err().to_string();
    assert!(
        e.contains("model.layers.1.mlp.down_proj") && e.contains("missing"),
        "{e}"
    );
}

#[test]
fn layers_beside_a_regular_expression_are_refused() {
    let lora = |target: &str| LoraConfig {
        r: 4,
        target_modules: vec![target.into()],
        layers_to_transform: vec![0, 1],
        ..LoraConfig::default()
    };
    let spec = spec(&config(true));
    let e = adapter_shapes(&lora(r".*\.q_proj"), &spec, None).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::Usage);
    assert!(e.to_string().contains(r"`.*\.layers\.(?:0|1)\..*_proj`"), "{e}");
    assert_eq!(adapter_shapes(&lora("q_proj"), &spec, None).unwrap().adapters.len(), 2);
}

/// PEFT has no list of layers for IA3: the file names each module.
#[test]
fn ia3_on_some_layers_comes_back_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(&config(true));
    for (targets, inputs) in [
        (&["k_proj", "down_proj"][..], &["model.layers.1.mlp.down_proj"][..]),
        (&[], &["model.layers.1.mlp.down_proj"]),
        (&["k_proj"], &[]),
    ] {
        let lora = LoraConfig {
            peft_type: PeftType::Ia3,
            target_modules: targets.iter().map(|t| t.to_string()).collect(),
            layers_to_transform: vec![1],
            ..LoraConfig::default()
        };
        let made = new_adapters(&lora, &spec, None, 0).unwrap();
        let config = made.config.unwrap();
        let out = adapter(
            &dir.path().join(targets.len().to_string()),
            &config,
            &made.adapters,
            &BTreeMap::new(),
            dir.path(),
            &BaseHashes::default(),
        )
        .unwrap();
        let read = load(&out).unwrap();
        assert!(read.adapters.keys().eq(made.adapters.keys()), "{targets:?}");
        let written = config.to_json();
        let list = |key: &str| -> Vec<String> { serde_json::from_value(written[key].clone()).unwrap() };
        // PEFT compares these as sets of strings.
        assert_eq!(list("feedforward_modules"), inputs);
        let modules = list("target_modules");
        assert_eq!(modules.len(), made.adapters.len());
        assert!(modules.iter().all(|m| m.starts_with("model.layers.1.")), "{modules:?}");
        assert!(inputs.iter().all(|i| modules.iter().any(|m| m == i)), "{modules:?}");
    }
}

#[test]
fn a_fingerprint_tells_bases_apart_and_ignores_how_they_are_stored() {
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str, tied: bool, dtype: StoredDtype| base(&dir.path().join(name), tied, dtype);
    let first = of("a", true, StoredDtype::F32);
    let print = fingerprint(&first).unwrap();
    assert!(print.sampled.starts_with("blake3:") && print.sampled.len() == 71);
    let copy = fingerprint(&of("b", true, StoredDtype::Bf16)).unwrap();
    assert_eq!(copy.base(), print.base());
    assert_ne!(copy.exact, print.exact, "a resumed run has the same bytes");
    let other = fingerprint(&of("c", false, StoredDtype::F32)).unwrap();
    assert!(other.weights != print.weights && other.sampled != print.sampled);
    let edit = |from: &str, to: &str| {
        let path = first.join("config.json");
        let text = files::read_text(&path).unwrap();
        assert!(text.contains(from));
        std::fs::write(&path, text.replace(from, to)).unwrap();
    };
    edit("\"float16\"", "\"float32\"");
    assert_eq!(
        fingerprint(&first).unwrap(),
        print,
        "how a config is spelled does not matter"
    );
    edit("10000.0", "20000.0");
    assert_ne!(fingerprint(&first).unwrap(), print, "what is computed does");
    edit("20000.0", "10000.0");
    // A change of any bit of any value is detected, even if the bf16 copy stays the same.
    let path = first.join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for at in (header..whole.len()).step_by(4).flat_map(|at| [(at, 0), (at + 2, 4)]) {
        let mut bytes = whole.clone();
        bytes[at.0] ^= 1 << at.1;
        std::fs::write(&path, bytes).unwrap();
        let now = fingerprint(&first).unwrap();
        assert_ne!(now.exact, print.exact);
        assert!(at.1 == 0 || now.weights != print.weights);
    }
    // The error for a non-finite value names its tensor.
    for bits in [f32::NAN.to_bits(), f32::NEG_INFINITY.to_bits(), 0x7f80_0001] {
        let mut bytes = whole.clone();
        let n = bytes.len();
        bytes[n - 4..].copy_from_slice(&bits.to_le_bytes());
        std::fs::write(&path, bytes).unwrap();
        let e = fingerprint(&first).unwrap_err().to_string();
        assert!(e.contains("tensor `") && e.contains("not finite"), "{e}");
    }
}

#[test]
fn a_fingerprint_has_the_numbers_of_the_routers() {
    let dir = tempfile::tempdir().unwrap();
    let from = Path::new("../../tests/parity/goldens/families/olmoe");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(from.join(name), dir.path().join(name)).unwrap();
    }
    let path = dir.path().join("config.json");
    let (text, print) = (files::read_text(&path).unwrap(), fingerprint(dir.path()).unwrap());
    for (from, to) in [
        ("\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 3"),
        ("\"norm_topk_prob\": false", "\"norm_topk_prob\": true"),
    ] {
        assert!(text.contains(from));
        std::fs::write(&path, text.replace(from, to)).unwrap();
        let now = fingerprint(dir.path()).unwrap();
        assert!(now.exact != print.exact && !now.base().agrees(&print.base()), "{to}");
    }
    std::fs::write(&path, &text).unwrap();
    assert_eq!(fingerprint(dir.path()).unwrap(), print);
}

#[test]
fn adapters_of_older_versions_are_compared_as_they_can_be() {
    let base = |weights: &str, sampled: &str| BaseHashes {
        weights: weights.into(),
        sampled: sampled.into(),
    };
    let now = base("blake3-all:1", "blake3:7");
    assert!(now.agrees(&base("blake3-all:1", "blake3:7")) && now.agrees(&BaseHashes::default()));
    assert!(
        !now.agrees(&base("blake3-all:2", "blake3:7")),
        "all numbers count where both know them"
    );
    assert!(now.agrees(&base("", "blake3:7")) && !now.agrees(&base("", "blake3:8")));
}

#[test]
fn a_start_is_saved_as_plain_lora_of_twice_the_rank() {
    let dir = tempfile::tempdir().unwrap();
    for rslora in [false, true] {
        let mut config = adapter_config();
        config.use_rslora = rslora;
        config.rank_pattern.push(("layers.0.self_attn.q_proj".into(), 4));
        config.alpha_pattern.push(("down_proj".into(), 5.0));
        let r_of = |module: &str| {
            let r = if module == "model.layers.0.self_attn.q_proj" {
                4
            } else {
                2
            };
            (r, if module.ends_with("down_proj") { 5.0 } else { 3.0 })
        };
        let mut started = adapters(&config, r_of);
        for adapter in started.values_mut() {
            let mut lora = adapter.lora().unwrap().clone();
            lora.start = Some(((&lora.a * 0.5).unwrap(), (&lora.b * 3.0).unwrap()));
            *adapter = Arc::new(Adapter::Lora(lora));
        }
        let out = dir.path().join(rslora.to_string());
        let e = write(&out, &config, &started, dir.path(), "").unwrap_err().to_string();
        assert!(e.contains("was not merged into the adapter before it was saved"), "{e}");
        let (wide, plain) = plain_lora(&config, &started).unwrap();
        write(&out, &wide, &plain, dir.path(), "").unwrap();
        let read = load(&out).unwrap().adapters;
        for (module, adapter) in &started {
            let (own, again) = (adapter.lora().unwrap(), read[module].lora().unwrap());
            assert_eq!(again.rank(), 2 * own.rank());
            assert!((again.scale - own.scale).abs() < 1e-6 && again.start.is_none());
            crate::ops::oracle::assert_close(&again.delta().unwrap(), &own.delta().unwrap(), 1e-5);
        }
    }
}

#[test]
fn whole_modules_and_pickles() {
    let dir = tempfile::tempdir().unwrap();
    let (untied, tied_config) = (spec(&config(false)), config(true));
    let mut config = adapter_config();
    config.modules_to_save = vec!["lm_head".into()];
    let head = Tensor::from_vec(vec![0.5f32; 16 * 8], (16, 8), &Device::Cpu).unwrap();
    let whole = BTreeMap::from([("lm_head.weight".to_string(), head)]);
    let out = dir.path().join("a");
    adapter(
        &out,
        &config,
        &adapters(&config, |_| (2, 3.0)),
        &whole,
        dir.path(),
        &BaseHashes::default(),
    )
    .unwrap();
    let read = load_adapter(&out, &untied).unwrap();
    assert_eq!(bits(&read.whole["lm_head.weight"]), bits(&whole["lm_head.weight"]));
    // A model whose head is tied must be untied first.
    let e = load(&out).unwrap_err().to_string();
    assert!(e.contains("separate matrices, which is not supported here"), "{e}");
    assert!(super::unties(&out, &spec(&tied_config)).unwrap() && !super::unties(&out, &untied).unwrap());
    write(&out, &config, &adapters(&config, |_| (2, 3.0)), dir.path(), "").unwrap();
    let e = load_adapter(&out, &untied).unwrap_err().to_string();
    assert!(e.contains("lm_head.weight: in `modules_to_save`, but"), "{e}");
    config.modules_to_save.clear();
    write(&out, &config, &adapters(&config, |_| (2, 3.0)), dir.path(), "").unwrap();
    std::fs::write(out.join("optimizer.pt"), "of a trainer").unwrap();
    load(&out).unwrap();
    std::fs::write(out.join("adapter_model.bin"), "a pickle").unwrap();
    assert!(load(&out).unwrap_err().to_string().contains("pickle"));
}

#[test]
fn initial_values_that_depend_on_the_model_are_refused() {
    let spec = spec(&config(true));
    let make = |init_lora_weights, use_dora| {
        let lora = LoraConfig {
            r: 2,
            init_lora_weights,
            use_dora,
            ..LoraConfig::default()
        };
        new_adapters(&lora, &spec, None, 0).map(drop)
    };
    make(LoraInit::Gaussian, false).unwrap();
    for (init, dora) in [
        (LoraInit::Pissa, false),
        (LoraInit::Loftq, false),
        (LoraInit::Default, true),
    ] {
        let e = make(init, dora).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
        assert!(e.hint_text().unwrap().contains("adapters_to_fill"), "{e}");
    }
}
