//! Code World Model: Llama with three sliding-window layers after each layer of full attention.

use super::{Config, Result, Spec};
use serde_json::{Value, json};

pub fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-5);
    super::default_head_dim(config, spec, 128)?;
    let window = config.opt_usize("sliding_window")?.or(Some(8192));
    super::windows(config, spec, window, |l| l % 4 != 0)?;
    let mut parameters = super::rope_parameters(config, None, 1_000_000.0)?;
    let given = |key: &str| config.get(key).is_some_and(Value::is_object);
    if !given("rope_parameters") && !given("rope_scaling") {
        let default = [
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
