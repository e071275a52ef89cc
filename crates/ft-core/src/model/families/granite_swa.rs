//! Granite with sliding windows, attention sinks, and a rope base for each layer.

use super::{Config, Result, Spec, place};
use crate::base::Error;
use crate::model::rope::Rope;
use serde_json::{Value, json};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::granite::apply(config, spec)?;
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-5);
    spec.tied = config.bool_or("tie_word_embeddings", true)?;
    if !config.raw.contains_key("num_key_value_heads") {
        spec.kv_heads = 4;
    }
    spec.attention_sinks = true;
    let window = if config.raw.contains_key("sliding_window") {
        config.opt_usize("sliding_window")?
    } else {
        Some(128)
    };
    super::windows(config, spec, window, |l| l % 4 != 0)?;
    let Some(bases) = bases(config, spec)? else {
        return Ok(());
    };
    spec.ropes.clear();
    let mut known: Vec<f64> = Vec::new();
    for (l, base) in bases.into_iter().enumerate() {
        let at = match known.iter().position(|k| *k == base) {
            Some(at) => at,
            None => {
                let rope = if base == 0.0 {
                    Rope::none()
                } else {
                    let mut parameters = super::rope_parameters(config, None, 10_000.0)?;
                    parameters.insert("rope_theta".into(), json!(base));
                    super::rope_of(config, spec, &parameters)?
                };
                spec.ropes.push(rope);
                known.push(base);
                known.len() - 1
            }
        };
        spec.layers[l].rope = at;
    }
    Ok(())
}

/// `layer_rope_theta`: the base of each layer; 0: a layer without positions.
fn bases(config: &Config, spec: &Spec) -> Result<Option<Vec<f64>>> {
    const KEY: &str = "layer_rope_theta";
    let list = match config.get(KEY) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(list)) if list.len() == spec.layers.len() => list,
        Some(other) => {
            return Err(Error::format(format!("`{KEY}` must have a number for every layer"))
                .at(place(config, KEY))
                .found(other)
                .expected(format!("{} entries", spec.layers.len())));
        }
    };
    let base = |value: &Value| {
        value.as_f64().filter(|x| x.is_finite() && *x >= 0.0).ok_or_else(|| {
            Error::format(format!("`{KEY}` must have numbers of at least 0"))
                .at(place(config, KEY))
                .found(value)
        })
    };
    list.iter().map(base).collect::<Result<_>>().map(Some)
}
