//! The options that families with latent attention share: its sizes, the rope of a part of each head, the factor of
//! the scores.

use super::experts::size;
use super::{Config, LARGEST, Result, Spec, out_of_range, place, rope_parameters};
use crate::base::Error;
use crate::model::rope::Rope;
use crate::model::spec::{LatentSpec, Mixer};
use serde_json::Value;

/// The families with latent attention.
pub(super) const FAMILIES: [&str; 5] = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"];

/// Sets latent attention in every layer. `defaults`: the sizes that a config may leave out.
pub(super) fn apply(config: &Config, spec: &mut Spec, defaults: LatentSpec) -> Result<()> {
    let head = |key: &str, default: usize| match config.opt_usize(key)?.unwrap_or(default) {
        n if (1..=largest()).contains(&n) => Ok(n),
        n => Err(out_of_range(key, n, largest(), &config.path.display().to_string())),
    };
    let sizes = LatentSpec {
        // `null` is a choice: one projection computes the queries.
        q_rank: match (config.raw.get("q_lora_rank"), defaults.q_rank) {
            (Some(Value::Null), _) | (None, None) => None,
            (_, default) => Some(size(config, "q_lora_rank", default.unwrap_or(0))?),
        },
        kv_rank: size(config, "kv_lora_rank", defaults.kv_rank)?,
        plain: head("qk_nope_head_dim", defaults.plain)?,
        rotary: head("qk_rope_head_dim", defaults.rotary)?,
        value: head("v_head_dim", defaults.value)?,
    };
    if spec.kv_heads != spec.heads {
        return Err(
            Error::format("latent attention has keys and values for every query head")
                .at(place(config, "num_key_value_heads"))
                .found(spec.kv_heads)
                .expected(format!("{}, as `num_attention_heads`", spec.heads)),
        );
    }
    let parameters = rope_parameters(config, None, 10_000.0)?;
    let number = |key: &str| parameters.get(key).and_then(Value::as_f64);
    if number("partial_rotary_factor").is_some_and(|part| part != 1.0) {
        return Err(Error::unsupported(format!(
            "`partial_rotary_factor` is not supported in {}",
            spec.model_type
        ))
        .at(place(config, "rope"))
        .found(number("partial_rotary_factor").unwrap_or_default())
        .hint("the rotated part of a head is `qk_rope_head_dim`"));
    }
    let query = sizes.plain + sizes.rotary;
    spec.head_dim = query.max(sizes.value);
    spec.attention_scale = (query as f64).powf(-0.5) as f32;
    let kind = parameters.get("rope_type").or_else(|| parameters.get("type"));
    if let (Some(all), true) = (
        number("mscale_all_dim").filter(|m| *m != 0.0),
        kind.and_then(Value::as_str).is_some_and(|kind| kind != "default"),
    ) {
        // YaRN's factor of the scores is not in cos and sin: they rotate only a part of a head.
        let Some(factor) = number("factor") else {
            return Err(Error::format("`mscale_all_dim` needs a `factor`").at(place(config, "rope")));
        };
        let scale = if factor > 1.0 {
            0.1 * all * factor.ln() + 1.0
        } else {
            1.0
        };
        spec.attention_scale = ((query as f64).powf(-0.5) * scale * scale) as f32;
    }
    spec.ropes = vec![Rope::new(
        &parameters,
        sizes.rotary,
        spec.max_positions,
        &place(config, "rope"),
    )?];
    spec.o_bias = config.bool_or("attention_bias", false)?;
    for layer in &mut spec.layers {
        layer.mixer = Mixer::Latent(sizes);
    }
    Ok(())
}

/// Most elements of a head.
fn largest() -> usize {
    let head = LARGEST.iter().find(|(key, _)| *key == "head_dim");
    head.map_or(0, |(_, most)| *most)
}
