//! SmolLM3: Llama with layers without positions; optional sliding windows.

use super::{Config, Result, Spec};
use crate::base::Error;
use crate::model::rope::Rope;
use serde_json::Value;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::attention_biases(config, spec, false)?;
    spec.mlp_bias = config.bool_or("mlp_bias", false)?;
    spec.tied = config.bool_or("tie_word_embeddings", true)?;
    if config.opt_usize("num_key_value_heads")?.is_none() && !config.raw.contains_key("num_key_value_heads") {
        spec.kv_heads = 4;
    }
    spec.ropes = vec![super::rope(config, spec, 2_000_000.0)?, Rope::none()];
    let interval = config.opt_usize("no_rope_layer_interval")?.unwrap_or(4);
    // 1: the layer has positions.
    let listed = match config.get("no_rope_layers") {
        None => None,
        Some(Value::Array(list)) if list.len() == spec.layers.len() => Some(list),
        Some(other) => {
            return Err(Error::format("`no_rope_layers` must have a 0 or 1 for every layer")
                .at(config.path.display())
                .found(other));
        }
    };
    for (l, layer) in spec.layers.iter_mut().enumerate() {
        let rotated = match listed {
            Some(list) => list[l].as_u64() != Some(0) && list[l] != Value::Bool(false),
            None => (l + 1) % interval != 0,
        };
        layer.rope = usize::from(!rotated);
    }
    if config.bool_or("use_sliding_window", false)? {
        let unrotated: Vec<bool> = spec.layers.iter().map(|layer| layer.rope == 1).collect();
        let window = config.opt_usize("sliding_window")?;
        super::windows(config, spec, window, |l| window.is_some() && unrotated[l])?;
    }
    Ok(())
}
