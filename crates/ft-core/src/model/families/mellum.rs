//! Mellum 2: Qwen3-MoE with sliding windows, a rope for each kind of attention, and a list of the layers with experts.

use super::{Config, QkNorm, Result, Spec, place};
use crate::base::Error;
use serde_json::Value;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::default_head_dim(config, spec, 128)?;
    spec.qk_norm = Some(QkNorm::HEADS);
    super::attention_biases(config, spec, false)?;
    let window = if config.raw.contains_key("sliding_window") {
        config.opt_usize("sliding_window")?
    } else {
        Some(1024)
    };
    super::windows(config, spec, window, |_| false)?;
    for key in [
        "decoder_sparse_step",
        "mlp_only_layers",
        "rope_scaling",
        "use_sliding_window",
    ] {
        let harmless =
            |v: &Value| v.is_null() || *v == Value::Bool(false) || *v == 1 || v.as_array().is_some_and(Vec::is_empty);
        if config.get(key).is_some_and(|v| !harmless(v)) {
            return Err(Error::unsupported(format!("`{key}` is not supported in mellum"))
                .at(place(config, key))
                .hint(format!(
                    "remove `{key}` from `config.json`: transformers does not apply it in this family"
                )));
        }
    }
    let rope = |kind: &str, theta: f64| {
        let parameters = super::rope_parameters(config, Some(kind), theta)?;
        super::rope_of(config, spec, &parameters)
    };
    spec.ropes = vec![rope("full_attention", 500_000.0)?, rope("sliding_attention", 10_000.0)?];
    for layer in &mut spec.layers {
        layer.rope = usize::from(layer.window.is_some());
    }
    let mut experts = super::qwen3_moe::experts(config, 64, 896, 8)?;
    experts.router.renormalize = config.bool_or("norm_topk_prob", true)?;
    super::experts::of_list(config, spec, experts, |_| true)
}
