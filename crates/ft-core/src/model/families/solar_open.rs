//! Solar Open: the attention of Llama, and the experts of GLM-4.5 in every layer.

use super::{Config, Result, Spec, place};
use crate::base::Error;
use serde_json::json;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    // transformers has no such options in this family, and reads over them.
    for (key, value) in [("first_k_dense_replace", json!(0)), ("use_qk_norm", json!(false))] {
        if config.get(key).is_some_and(|v| !v.is_null() && *v != value) {
            return Err(Error::unsupported(format!("`{key}` is not supported in solar_open"))
                .at(place(config, key))
                .expected(value)
                .hint(format!(
                    "remove `{key}` from `config.json`: transformers does not apply it in this family"
                )));
        }
    }
    super::default_head_dim(config, spec, 128)?;
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-5);
    spec.qkv_bias = config.bool_or("attention_bias", false)?;
    spec.ropes = vec![super::rope(config, spec, 1e6)?];
    let experts = super::glm4_moe::experts(config, 1280)?;
    for layer in &mut spec.layers {
        layer.experts = Some(experts);
    }
    super::experts::check(config, &experts)
}
