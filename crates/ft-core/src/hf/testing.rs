//! Model and adapter directories for tests; the program's tests of merging include this file too.

use crate::base::files;
use crate::formats::StoredDtype;
use crate::formats::adapter::{AdapterConfig, Targets};
use crate::formats::config::Config;
use crate::formats::writer::{TensorPlan, Values};
use crate::model::{Adapters, Spec, families};
use crate::peft::lora::scaling;
use crate::peft::targets::Site;
use crate::peft::{Adapter, DropoutMask, Lora};
use candle_core::{Device, Tensor};
use half::bf16;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A llama config with two layers, hidden size 8.
pub(crate) fn config(tied: bool) -> Map<String, Value> {
    let value = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 12,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 16,
        "rms_norm_eps": 9.999999974752427e-7, "rope_theta": 10000.0, "max_position_embeddings": 64,
        "tie_word_embeddings": tied, "torch_dtype": "float16", "some_future_key": {"a": [1, 2.5, null]},
    });
    value.as_object().unwrap().clone()
}

pub(crate) fn spec(config: &Map<String, Value>) -> Spec {
    families::read(&Config::from_map(config.clone(), Path::new("config.json"))).unwrap()
}

/// Values that bf16 can represent, different for every parameter.
pub(crate) fn numbers(name: &str, n: usize) -> Vec<f32> {
    let seed = name
        .bytes()
        .fold(7u32, |h, b| h.wrapping_mul(31).wrapping_add(u32::from(b)));
    (0..n)
        .map(|i| {
            bf16::from_f32((seed.wrapping_add((i as u32).wrapping_mul(2_654_435_761)) >> 8) as f32 / 3e7 - 0.25)
                .to_f32()
        })
        .collect()
}

/// A base model directory with all the files that an export copies.
pub(crate) fn base(dir: &Path, tied: bool, dtype: StoredDtype) -> PathBuf {
    let config = config(tied);
    let base = dir.join("base");
    std::fs::create_dir_all(&base).unwrap();
    std::fs::write(base.join("config.json"), Value::Object(config.clone()).to_string()).unwrap();
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "LICENSE",
    ] {
        std::fs::write(base.join(name), format!("{{\"is\": \"{name}\"}}")).unwrap();
    }
    for name in ["pytorch_model.bin", "modeling.py", "README.md"] {
        std::fs::write(base.join(name), "stays behind").unwrap();
    }
    let params = spec(&config).params();
    let plans: Vec<TensorPlan> = params
        .iter()
        .map(|p| TensorPlan {
            name: p.name.to_string(),
            dtype,
            shape: p.shape.clone(),
        })
        .collect();
    crate::formats::writer::write_model(&base, &plans, 1 << 30, |plan, sink| {
        sink(Values::F32(&numbers(&plan.name, plan.shape.iter().product())))
    })
    .unwrap();
    base
}

pub(crate) fn names(dir: &Path) -> Vec<String> {
    let name = |p: &PathBuf| p.file_name().unwrap().to_string_lossy().into_owned();
    files::list(dir).unwrap().iter().map(name).collect()
}

fn sites() -> Vec<Site> {
    spec(&config(true)).sites()
}

pub(crate) fn adapter_config() -> AdapterConfig {
    AdapterConfig {
        r: 2,
        lora_alpha: 3.0,
        lora_dropout: 0.25,
        target_modules: Targets::List(vec!["down_proj".into(), "q_proj".into()]),
        base_model_name_or_path: Some("someone/tiny".into()),
        ..AdapterConfig::default()
    }
}

/// Adapters on the config's targets; all values differ.
pub(crate) fn adapters(config: &AdapterConfig, r_of: impl Fn(&str) -> (usize, f64)) -> Adapters {
    let mut out = Adapters::new();
    for (index, site) in sites()
        .iter()
        .enumerate()
        .filter(|(_, s)| s.module.ends_with("q_proj") || s.module.ends_with("down_proj"))
    {
        let (r, alpha) = r_of(&site.module);
        let fill = |n: usize, shift: f32| {
            (0..n)
                .map(|i| (i as f32 + shift + index as f32 * 0.37).sin() * 0.1)
                .collect::<Vec<f32>>()
        };
        let a = Tensor::from_vec(fill(r * site.input, 0.1), (r, site.input), &Device::Cpu).unwrap();
        let b = Tensor::from_vec(fill(site.output * r, 0.7), (site.output, r), &Device::Cpu).unwrap();
        let mask = DropoutMask {
            p: config.lora_dropout as f32,
            site: index as u64,
        };
        let lora = Lora::new(&site.module, (a, b), scaling(alpha, r, config.use_rslora), mask);
        out.insert(site.module.clone(), Arc::new(Adapter::Lora(lora)));
    }
    out
}
