//! Code World Model: Llama with three sliding-window layers after each layer of full attention.

use super::{Config, Result, Spec};
use serde_json::{Value, json};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-5);
    spec.mlp_bias = config.bool_or("mlp_bias", false)?;
    super::default_head_dim(config, spec, 128)?;
    let window = if config.raw.contains_key("sliding_window") {
        config.opt_usize("sliding_window")?
    } else {
        Some(8192)
    };
    super::windows(config, spec, window, |l| l % 4 != 0)?;
    let mut parameters = super::rope_parameters(config, None, 1_000_000.0)?;
    let given = |key: &str| config.get(key).is_some_and(Value::is_object);
    if !given("rope_parameters") && !given("rope_scaling") {
        // Without rope parameters transformers ignores `rope_theta` too.
        let default = [
            ("rope_theta", json!(1_000_000.0)),
            ("rope_type", json!("llama3")),
            ("factor", json!(16.0)),
            ("high_freq_factor", json!(4.0)),
            ("low_freq_factor", json!(1.0)),
            ("original_max_position_embeddings", json!(8192)),
        ];
        parameters.extend(default.map(|(key, value)| (key.to_string(), value)));
    }
    spec.ropes = vec![super::rope_of(config, spec, &parameters)?];
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::families;
    use std::path::Path;

    fn read(model_type: &str, changes: Value) -> Spec {
        let mut config = json!({
            "model_type": model_type, "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16});
        let map = config.as_object_mut().unwrap();
        map.extend(changes.as_object().unwrap().clone());
        families::read(&Config::from_map(map.clone(), Path::new("config.json"))).unwrap()
    }

    /// transformers reads `rope_theta` beside the scaling only.
    #[test]
    fn without_scaling_the_base_is_that_of_the_family() {
        for family in ["cwm", "ministral3"] {
            let (with, without) = (read(family, json!({"rope_theta": 100.0})), read(family, json!({})));
            assert_eq!(with.ropes, without.ropes, "{family}");
            let scaled = json!({"rope_theta": 100.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0,
                "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1}});
            assert_ne!(read(family, scaled).ropes, without.ropes, "{family}");
        }
    }

    #[test]
    fn the_mlp_can_have_biases() {
        let biases = |spec: Spec| spec.params().iter().filter(|p| p.name.ends_with("_proj.bias")).count();
        assert_eq!(biases(read("cwm", json!({"mlp_bias": true}))), 2 * 3);
        assert_eq!(biases(read("cwm", json!({}))), 0);
    }
}
