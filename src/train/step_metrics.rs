//! Metrics of a step beside its loss: copies, experts, the loss scale. The perplexity of an evaluation.

use crate::base::Result;
use crate::engine::{Engine, LossScale};
use crate::ops::transfer::{Copier, CopyTimes};
use crate::recipe::Train;
use crate::source::ExpertReads;

/// The step's host-device copies.
pub fn copies(engine: &Engine) -> Result<CopyTimes> {
    let inputs = engine.input_offload.as_ref().map(Copier::times).transpose()?.flatten();
    let mut sum = engine.store.upload_times()?.unwrap_or_default();
    if let Some(inputs) = inputs {
        sum.copying += inputs.copying;
        sum.waiting += inputs.waiting;
    }
    Ok(sum)
}

/// Milliseconds of the copies, and the fraction that overlapped with computation.
pub fn copy_metrics(copied: &CopyTimes) -> Vec<(&'static str, f64)> {
    let hidden = copied.hidden();
    hidden.map_or_else(Vec::new, |hidden| {
        vec![("copy_ms", copied.copying), ("copy_hidden", hidden)]
    })
}

/// The experts that were brought to the device, their bytes, and their part of all experts; the bytes that this rank sent to and from
/// the experts of other ranks.
pub fn expert_metrics(reads: ExpertReads) -> Vec<(&'static str, f64)> {
    if reads.sent > 0 {
        return vec![("expert_bytes_sent", reads.sent as f64)];
    }
    let Some(share) = reads.share() else { return Vec::new() };
    let names = ["experts_read", "experts_read_bytes", "experts_read_share"];
    let numbers = [reads.brought as f64, reads.bytes as f64, share];
    names.into_iter().zip(numbers).collect()
}

/// On several ranks: the bytes of gradients, new values and weights that the rank with most of them sent in the step.
pub fn sent_metrics(sent: u64) -> Vec<(&'static str, f64)> {
    let sent = (sent > 0).then_some(("sent_bytes", sent as f64));
    sent.into_iter().collect()
}

/// With a loss scale: the scale that the step had (`before`), and the number of steps that were skipped so far.
pub fn scale_metrics(before: Option<LossScale>, engine: &Engine) -> Vec<(&'static str, f64)> {
    let used = before.map(|scale| ("loss_scale", f64::from(scale.scale)));
    let skipped = used.map(|_| ("skipped_steps", engine.skipped_steps() as f64));
    used.into_iter().chain(skipped).collect()
}

/// The perplexity that belongs to the loss of an evaluation. `None`: this loss is not the mean cross-entropy of the tokens.
pub fn perplexity(train: &Train, loss: f64) -> Option<f64> {
    train.has_perplexity().then(|| loss.exp())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::{self, Stage};

    #[test]
    fn only_a_plain_loss_of_tokens_has_a_perplexity() {
        let text = "[model]\npath = \"m\"\n[data]\ntrain = \"t\"\n";
        let mut train = recipe::parse(text, "r.toml", &[]).unwrap().recipe.train;
        for (stage, has) in [
            (Stage::Pretrain, true),
            (Stage::Sft, true),
            (Stage::Distill, true),
            (Stage::Reward, false),
            (Stage::Dpo, false),
            (Stage::Orpo, false),
            (Stage::Simpo, false),
            (Stage::Kto, false),
            (Stage::Ppo, false),
            (Stage::Grpo, false),
        ] {
            train.stage = stage;
            assert_eq!(perplexity(&train, 0.5), has.then(|| 0.5_f64.exp()), "{stage:?}");
        }
        train.stage = Stage::Sft;
        train.label_smoothing_factor = 0.1;
        assert_eq!(perplexity(&train, 0.5), None);
    }
}
