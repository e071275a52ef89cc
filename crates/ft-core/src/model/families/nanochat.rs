//! nanochat: norms without weights, also after the embedding and on the rotated heads; heads that turn the other way; an MLP
//! without a gate.

use super::{Config, QkNorm, Result, Spec};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    spec.plain_norms = true;
    spec.qk_norm = Some(QkNorm::ROTATED);
    spec.activation = super::activation(config, "hidden_act", "relu2")?;
    spec.plain_mlp = Some(["mlp.fc1", "mlp.fc2"]);
    spec.logit_softcap = super::gemma2::softcap(config, "final_logit_softcapping", Some(15.0))?;
    super::attention_biases(config, spec, false)?;
    let mut rope = super::rope(config, spec, 10_000.0)?;
    rope.inv_freq.iter_mut().for_each(|f| *f = -*f);
    if let Some(frequencies) = rope.long.as_mut().and_then(|long| long.inv_freq.as_mut()) {
        frequencies.iter_mut().for_each(|f| *f = -*f);
    }
    spec.ropes = vec![rope];
    Ok(())
}
