//! Shapes of well-known models by name: `shape:llama-3.1-8b`. Only the numbers of their `config.json`;
//! the weights of a shape are random.

use crate::base::{Error, Result};
use crate::formats::config::Config;
use serde_json::{Value, json};
use std::path::Path;

/// Start of a model path that names a built-in shape.
pub const PREFIX: &str = "shape:";

/// The numbers are from the `config.json` of the model of that name on the hub.
struct Shape {
    name: &'static str,
    model_type: &'static str,
    vocab: usize,
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    tied: bool,
}

#[rustfmt::skip]
const SHAPES: [Shape; 19] = [
    Shape { name: "llama-3.1-8b", model_type: "llama", vocab: 128_256, hidden: 4096, intermediate: 14_336, layers: 32, heads: 32, kv_heads: 8, tied: false },
    Shape { name: "llama-3.1-70b", model_type: "llama", vocab: 128_256, hidden: 8192, intermediate: 28_672, layers: 80, heads: 64, kv_heads: 8, tied: false },
    Shape { name: "llama-3.2-1b", model_type: "llama", vocab: 128_256, hidden: 2048, intermediate: 8192, layers: 16, heads: 32, kv_heads: 8, tied: true },
    Shape { name: "llama-3.2-3b", model_type: "llama", vocab: 128_256, hidden: 3072, intermediate: 8192, layers: 28, heads: 24, kv_heads: 8, tied: true },
    Shape { name: "qwen2.5-0.5b", model_type: "qwen2", vocab: 151_936, hidden: 896, intermediate: 4864, layers: 24, heads: 14, kv_heads: 2, tied: true },
    Shape { name: "qwen2.5-1.5b", model_type: "qwen2", vocab: 151_936, hidden: 1536, intermediate: 8960, layers: 28, heads: 12, kv_heads: 2, tied: true },
    Shape { name: "qwen2.5-3b", model_type: "qwen2", vocab: 151_936, hidden: 2048, intermediate: 11_008, layers: 36, heads: 16, kv_heads: 2, tied: true },
    Shape { name: "qwen2.5-7b", model_type: "qwen2", vocab: 152_064, hidden: 3584, intermediate: 18_944, layers: 28, heads: 28, kv_heads: 4, tied: false },
    Shape { name: "qwen2.5-72b", model_type: "qwen2", vocab: 152_064, hidden: 8192, intermediate: 29_568, layers: 80, heads: 64, kv_heads: 8, tied: false },
    Shape { name: "qwen3-0.6b", model_type: "qwen3", vocab: 151_936, hidden: 1024, intermediate: 3072, layers: 28, heads: 16, kv_heads: 8, tied: true },
    Shape { name: "qwen3-1.7b", model_type: "qwen3", vocab: 151_936, hidden: 2048, intermediate: 6144, layers: 28, heads: 16, kv_heads: 8, tied: true },
    Shape { name: "qwen3-4b", model_type: "qwen3", vocab: 151_936, hidden: 2560, intermediate: 9728, layers: 36, heads: 32, kv_heads: 8, tied: true },
    Shape { name: "qwen3-8b", model_type: "qwen3", vocab: 151_936, hidden: 4096, intermediate: 12_288, layers: 36, heads: 32, kv_heads: 8, tied: false },
    Shape { name: "qwen3-32b", model_type: "qwen3", vocab: 151_936, hidden: 5120, intermediate: 25_600, layers: 64, heads: 64, kv_heads: 8, tied: false },
    // `intermediate` is that of an expert.
    Shape { name: "qwen3-30b-a3b", model_type: "qwen3_moe", vocab: 151_936, hidden: 2048, intermediate: 768, layers: 48, heads: 32, kv_heads: 4, tied: false },
    // The shapes of `assets/tiny`, `assets/small` and `assets/moe`.
    Shape { name: "tiny", model_type: "qwen3", vocab: 896, hidden: 128, intermediate: 384, layers: 4, heads: 4, kv_heads: 2, tied: true },
    Shape { name: "tiny-student", model_type: "qwen3", vocab: 896, hidden: 64, intermediate: 192, layers: 2, heads: 2, kv_heads: 1, tied: true },
    Shape { name: "tiny-moe", model_type: "qwen3_moe", vocab: 896, hidden: 128, intermediate: 96, layers: 3, heads: 4, kv_heads: 2, tied: true },
    // For benchmarks.
    Shape { name: "small", model_type: "qwen2", vocab: 4096, hidden: 256, intermediate: 704, layers: 4, heads: 4, kv_heads: 4, tied: true },
];

/// The config of `path`, which is `shape:NAME`; `None` if it does not have that form.
///
/// # Errors
/// A name that is not in the table.
pub fn config(path: &str) -> Result<Option<Config>> {
    let Some(name) = path.strip_prefix(PREFIX) else {
        return Ok(None);
    };
    let Some(shape) = SHAPES.iter().find(|s| s.name == name) else {
        let names: Vec<&str> = SHAPES.iter().map(|s| s.name).collect();
        return Err(Error::usage(format!("the built-in shape `{name}` does not exist"))
            .at("shapes::config")
            .expected(format!("one of {}", names.join(", "))));
    };
    let Value::Object(raw) = shape.json() else {
        return Err(Error::internal("a built-in shape is not a JSON object"));
    };
    Ok(Some(Config::from_map(raw, Path::new(path))))
}

/// The built-in shape of a well-known model by its hub id or the last part of its path.
pub fn of_model(path: &str) -> Option<String> {
    let last = path.trim_end_matches('/').rsplit('/').next()?.to_lowercase();
    let name = ["-instruct", "-base", "-chat", "-it"]
        .iter()
        .fold(last.as_str(), |n, end| n.trim_end_matches(end));
    SHAPES.iter().any(|s| s.name == name).then(|| format!("{PREFIX}{name}"))
}

impl Shape {
    fn json(&self) -> Value {
        let mut config = json!({
            "model_type": self.model_type,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "max_position_embeddings": 32_768,
        });
        match self.model_type {
            "llama" => {
                config["rms_norm_eps"] = json!(1e-5);
                config["rope_theta"] = json!(5e5);
                config["max_position_embeddings"] = json!(131_072);
                config["rope_scaling"] = json!({
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                });
            }
            "qwen3" if self.name.starts_with("tiny") => {
                config["head_dim"] = json!(32);
                config["max_position_embeddings"] = json!(512);
            }
            "qwen3_moe" => {
                let tiny = self.name.starts_with("tiny");
                let (experts, chosen, head, longest) = if tiny { (8, 2, 32, 512) } else { (128, 8, 128, 40_960) };
                config["num_experts"] = json!(experts);
                config["num_experts_per_tok"] = json!(chosen);
                config["moe_intermediate_size"] = json!(self.intermediate);
                config["norm_topk_prob"] = json!(true);
                config["head_dim"] = json!(head);
                config["max_position_embeddings"] = json!(longest);
            }
            "qwen3" => {
                config["head_dim"] = json!(128);
                config["max_position_embeddings"] = json!(40_960);
            }
            _ => {}
        }
        config
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::families;

    #[test]
    fn parameters_are_those_of_the_models() {
        // From the model cards, in millions.
        let known = [
            ("llama-3.1-8b", 8_030),
            ("llama-3.1-70b", 70_554),
            ("llama-3.2-1b", 1_236),
            ("llama-3.2-3b", 3_213),
            ("qwen2.5-3b", 3_086),
            ("qwen3-0.6b", 596),
            ("qwen3-1.7b", 1_721),
            ("tiny", 1),
            ("qwen2.5-0.5b", 494),
            ("qwen2.5-1.5b", 1_544),
            ("qwen2.5-7b", 7_616),
            ("qwen2.5-72b", 72_706),
            ("qwen3-4b", 4_022),
            ("qwen3-8b", 8_191),
            ("qwen3-32b", 32_762),
            ("qwen3-30b-a3b", 30_532),
            ("tiny-moe", 1),
        ];
        for (name, millions) in known {
            let config = config(&format!("shape:{name}")).unwrap().unwrap();
            let params = families::read(&config).unwrap().params();
            let sum: usize = params.iter().map(|p| p.elements()).sum();
            assert_eq!((sum + 500_000) / 1_000_000, millions, "{name}");
        }
    }

    #[test]
    fn shapes_of_models() {
        for (model, shape) in [
            ("Qwen/Qwen2.5-0.5B-Instruct", "shape:qwen2.5-0.5b"),
            ("meta-llama/Llama-3.1-8B-Instruct", "shape:llama-3.1-8b"),
            ("Qwen/Qwen3-4B", "shape:qwen3-4b"),
            ("assets/tiny", "shape:tiny"),
            ("Qwen/Qwen3-30B-A3B", "shape:qwen3-30b-a3b"),
        ] {
            assert_eq!(of_model(model).as_deref(), Some(shape), "{model}");
        }
        assert_eq!(of_model("org/unknown"), None);
    }

    /// The shapes of the shipped models equal those in their files.
    #[test]
    fn shipped_models_have_their_shapes() {
        for (folder, name) in [("tiny", "tiny"), ("small", "tiny-student"), ("moe", "tiny-moe")] {
            let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets").join(folder);
            let of = |c: &Config| {
                families::read(c)
                    .unwrap()
                    .params()
                    .iter()
                    .map(|p| p.shape.clone())
                    .collect::<Vec<_>>()
            };
            let shape = config(&format!("shape:{name}")).unwrap().unwrap();
            assert_eq!(of(&Config::load(&dir).unwrap()), of(&shape));
        }
    }

    #[test]
    fn other_names() {
        assert!(config("models/llama").unwrap().is_none());
        let e = config("shape:llama").unwrap_err().to_string();
        assert!(e.contains("llama-3.1-8b"), "{e}");
    }
}
