//! Ministral 3: Mistral whose queries grow with their position, as in Llama 4.

use super::{Config, Result, Spec};
use crate::base::Error;
use crate::model::rope::{Growth, Rope};
use serde_json::{Value, json};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-5);
    super::default_head_dim(config, spec, 128)?;
    let window = config.opt_usize("sliding_window")?;
    for layer in &mut spec.layers {
        layer.window = window;
    }
    let mut parameters = super::rope_parameters(config, None, 1_000_000.0)?;
    if config.get("rope_parameters").is_none() && config.get("rope_scaling").is_none() {
        // Without rope parameters transformers ignores `rope_theta` too.
        parameters.insert("rope_theta".into(), json!(1_000_000.0));
        for (key, value) in [
            ("rope_type", json!("yarn")),
            ("factor", json!(16.0)),
            ("original_max_position_embeddings", json!(16384)),
            ("mscale", json!(1.0)),
            ("mscale_all_dim", json!(1.0)),
            ("llama_4_scaling_beta", json!(0.1)),
        ] {
            parameters.entry(key).or_insert(value);
        }
    }
    let place = super::place(config, "rope_parameters");
    let rope = Rope::new(&parameters, spec.head_dim, spec.max_positions, &place)?;
    let number = |key: &str| match parameters.get(key).and_then(Value::as_f64) {
        Some(x) if x.is_finite() && x >= 0.0 => Ok(x as f32),
        _ => Err(Error::format(format!("rope option `{key}` must be a number")).at(&place)),
    };
    let (beta, original) = (
        number("llama_4_scaling_beta")?,
        number("original_max_position_embeddings")?,
    );
    if original < 1.0 {
        return Err(Error::format("`original_max_position_embeddings` must be at least 1").at(&place));
    }
    let queries = Rope {
        growth: Some(Growth { beta, original }),
        ..rope.clone()
    };
    spec.ropes = vec![rope, queries];
    for layer in &mut spec.layers {
        layer.query_rope = Some(1);
    }
    Ok(())
}
