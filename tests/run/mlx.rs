//! `ft export --to mlx`: names, shapes and values of an adapter against the PEFT file, a model, refusals. The answers of
//! mlx-lm with them are in docs/lab-book.md.

use crate::bench::{Bench, files, said};
use candle_core::safetensors::load;
use candle_core::{Device, Tensor};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;

fn export(bench: &Bench, from: &str, out: &str) -> Value {
    let ran = bench.ft(&["export", from, "--to", "mlx", "--out", out, "--json"]);
    assert!(ran.status.success(), "{}", said(&ran));
    serde_json::from_slice(&ran.stdout).unwrap()
}

fn rows(tensor: &Tensor) -> Vec<Vec<f32>> {
    tensor.to_vec2().unwrap()
}

#[test]
fn an_adapter_has_the_layout_of_mlx_lm() {
    let bench = Bench::new();
    bench.train(&[
        "tune.method=lora",
        "tune.lora.r=4",
        "tune.lora.lora_alpha=8",
        "tune.lora.target_modules=[\"q_proj\", \"down_proj\"]",
        "tune.lora.rank_pattern=[\"q_proj=2\"]",
        "tune.lora.lora_dropout=0.1",
        "train.max_steps=2",
        "train.output_dir=runs/lora",
    ]);
    let report = export(&bench, "runs/lora", "mlx");
    assert_eq!((&report["kind"], &report["out"]), (&json!("adapter"), &json!("mlx")));
    let config: Value = serde_json::from_slice(&fs::read(bench.path("mlx/adapter_config.json")).unwrap()).unwrap();
    let layers = config["num_layers"].as_u64().unwrap() as usize;
    // alpha / rank of the first module by name: `mlp.down_proj`.
    let parameters = json!({"rank": 4, "scale": 2.0, "dropout": 0.1, "keys": ["mlp.down_proj", "self_attn.q_proj"]});
    assert_eq!(config["fine_tune_type"], "lora");
    assert_eq!(config["lora_parameters"], parameters);
    let names: Vec<String> = files(&bench.path("mlx")).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["adapter_config.json", "adapters.safetensors"]);

    let here = |file: &str| -> BTreeMap<String, Tensor> {
        let all = load(bench.path(file), &Device::Cpu).unwrap();
        all.into_iter().collect()
    };
    let (found, peft) = (
        here("mlx/adapters.safetensors"),
        here("runs/lora/final/adapter_model.safetensors"),
    );
    assert_eq!(found.len(), peft.len());
    assert_eq!(found.len(), 4 * layers);
    for (name, values) in &peft {
        let name = name.strip_prefix("base_model.model.").unwrap();
        let (module, side) = name.rsplit_once(".lora_").unwrap();
        let side = side.trim_end_matches(".weight").to_lowercase();
        let mut want = rows(&values.t().unwrap().contiguous().unwrap());
        if module.ends_with("q_proj") {
            // Rank 2 of 4, scale 4 of 2.
            match &*side {
                "a" => want.iter_mut().for_each(|row| row.extend([0.0, 0.0])),
                _ => {
                    want.iter_mut().flatten().for_each(|x| *x *= 2.0);
                    let zeros = vec![0.0; want[0].len()];
                    want.extend([zeros.clone(), zeros]);
                }
            }
        }
        assert_eq!(rows(&found[&format!("{module}.lora_{side}")]), want, "{name}");
    }
    assert!(
        found
            .values()
            .any(|tensor| rows(tensor).iter().flatten().any(|x| *x != 0.0))
    );

    bench.train(&[
        "tune.method=lora",
        "tune.lora.use_dora=true",
        "train.max_steps=0",
        "train.output_dir=runs/dora",
    ]);
    let refused = bench.ft(&["export", "runs/dora", "--to", "mlx", "--out", "no"]);
    assert!(
        !refused.status.success() && said(&refused).contains("merge the adapter"),
        "{}",
        said(&refused)
    );
    assert!(!bench.path("no").exists());
}

#[test]
fn a_model_is_the_directory_of_hugging_face() {
    let bench = Bench::new();
    let report = export(&bench, "model", "mlx");
    assert_eq!(report["kind"], "model");
    let ran = bench.ft(&["export", "model", "--out", "hf"]);
    assert!(ran.status.success(), "{}", said(&ran));
    let (mut mlx, mut hf) = (files(&bench.path("mlx")), files(&bench.path("hf")));
    let config = |all: &mut Vec<(String, Vec<u8>)>| -> Value {
        let at = all.iter().position(|(name, _)| name == "config.json").unwrap();
        serde_json::from_slice(&all.remove(at).1).unwrap()
    };
    // mlx-lm does not read `rope_parameters` for this family, and would compute with a base of 10000.
    let (found, mut want) = (config(&mut mlx), config(&mut hf));
    assert_eq!(want["rope_parameters"]["rope_theta"], 50.0);
    want["rope_theta"] = json!(50.0);
    assert_eq!(found, want);
    assert!(mlx == hf && mlx.iter().any(|(name, _)| name == "model.safetensors"));
    // A base model without these keys is named when its adapter is exported.
    bench.train(&["tune.method=lora", "train.max_steps=1", "train.output_dir=lora"]);
    let ran = bench.ft(&["export", "lora", "--to", "mlx", "--out", "adapter"]);
    let told = "`ft export model --to mlx --out DIR` writes";
    assert!(ran.status.success() && said(&ran).contains(told), "{}", said(&ran));
}
