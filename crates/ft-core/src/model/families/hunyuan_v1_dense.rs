//! Hunyuan dense: Llama with norms on the rotated heads of q and k.

use super::{Config, QkNorm, Result, Spec};
use crate::base::Error;
use serde_json::json;

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.qk_norm = Some(QkNorm::ROTATED);
    spec.norm_eps = config.opt_f64("rms_norm_eps")?.unwrap_or(1e-5);
    super::attention_biases(config, spec, false)?;
    for (key, expected) in [("use_cla", false), ("use_qk_norm", true)] {
        if config.bool_or(key, expected)? != expected {
            return Err(
                Error::unsupported(format!("config option `{key}` changes the model and is not supported"))
                    .at(config.path.display())
                    .expected(expected),
            );
        }
    }
    let mut parameters = super::rope_parameters(config, None, 10_000.0)?;
    // With `alpha` the checkpoints call a fixed, larger base `dynamic`.
    let number = |key: &str| {
        parameters
            .get(key)
            .and_then(serde_json::Value::as_f64)
            .filter(|x| *x > 0.0)
    };
    let kind = parameters.get("rope_type").or_else(|| parameters.get("type"));
    if kind == Some(&json!("dynamic"))
        && let (Some(alpha), Some(theta)) = (number("alpha"), number("rope_theta"))
        && spec.head_dim > 2
    {
        let e = spec.head_dim as f64;
        parameters.insert("rope_theta".into(), json!(theta * alpha.powf(e / (e - 2.0))));
        parameters.insert("rope_type".into(), json!("default"));
    }
    spec.ropes = vec![super::rope_of(config, spec, &parameters)?];
    Ok(())
}
