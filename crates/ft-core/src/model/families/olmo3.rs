//! OLMo 3: OLMo 2 with three sliding-window layers per full-attention layer; rope scaling in the latter only.

use super::{Config, Result, Spec};
use crate::model::rope::Rope;
use serde_json::{Map, Value, json};

const THETA: f64 = 500_000.0;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::olmo2::shared(config, spec)?;
    let window = if config.raw.contains_key("sliding_window") {
        config.opt_usize("sliding_window")?
    } else {
        Some(4096)
    };
    super::windows(config, spec, window, |l| (l + 1) % 4 != 0)?;
    let full = super::rope_parameters(config, Some("full_attention"), THETA)?;
    let sliding = match config.get("rope_parameters").and_then(Value::as_object) {
        Some(_) => super::rope_parameters(config, Some("sliding_attention"), THETA)?,
        // As transformers reads the form of transformers 4: `rope_theta` is that of the full-attention layers.
        None => Map::from_iter([("rope_theta".to_string(), json!(THETA))]),
    };
    let rope = |parameters, layers| {
        let place = super::place(config, layers);
        Rope::new(parameters, spec.head_dim, spec.max_positions, &place)
    };
    spec.ropes = vec![
        rope(&full, "rope_parameters.full_attention")?,
        rope(&sliding, "rope_parameters.sliding_attention")?,
    ];
    for layer in &mut spec.layers {
        layer.rope = usize::from(layer.window.is_some());
    }
    Ok(())
}
