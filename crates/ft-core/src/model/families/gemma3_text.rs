//! Gemma 3, text only: norms on q and k, five sliding-window layers per full-attention layer, a separate rope for the
//! sliding-window layers.

use super::{Config, QkNorm, Result, Spec};
use crate::base::Error;
use crate::model::rope::Rope;
use serde_json::{Map, Value, json};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::gemma2::shared(config, spec)?;
    spec.qk_norm = Some(QkNorm::HEADS);
    // transformers reads this key and never applies it; ft does the same. An invalid value is still refused.
    if let Some(cap) = super::gemma2::softcap(config, "attn_logit_softcapping", None)? {
        spec.warnings.push(format!(
            "{}: `attn_logit_softcapping` {cap} has no effect in gemma3_text, as in transformers",
            config.path.display()
        ));
    }
    spec.logit_softcap = super::gemma2::softcap(config, "final_logit_softcapping", None)?;
    let window = config.opt_usize("sliding_window")?.or(Some(4096));
    let pattern = match config.opt_usize("sliding_window_pattern")? {
        Some(0) => return Err(Error::format("`sliding_window_pattern` is 0").at(config.path.display())),
        Some(n) => n,
        None => config
            .opt_usize("_sliding_window_pattern")?
            .filter(|n| *n > 0)
            .unwrap_or(6),
    };
    super::windows(config, spec, window, |l| (l + 1) % pattern != 0)?;
    let (e, positions) = (spec.head_dim, spec.max_positions);
    let full = super::rope_parameters(config, Some("full_attention"), 1_000_000.0)?;
    let full = Rope::new(
        &full,
        e,
        positions,
        &super::place(config, "rope_parameters.full_attention"),
    )?;
    // In configs of transformers 4 the sliding-window layers use `rope_local_base_freq` and no scaling.
    let local = match config.get("rope_parameters").and_then(Value::as_object) {
        Some(_) => super::rope_parameters(config, Some("sliding_attention"), 10_000.0)?,
        None => {
            let theta = config.opt_f64("rope_local_base_freq")?.unwrap_or(10_000.0);
            Map::from_iter([("rope_theta".to_string(), json!(theta))])
        }
    };
    let local = Rope::new(
        &local,
        e,
        positions,
        &super::place(config, "rope_parameters.sliding_attention"),
    )?;
    spec.ropes = vec![full, local];
    for layer in &mut spec.layers {
        layer.rope = usize::from(layer.window.is_some());
    }
    Ok(())
}
