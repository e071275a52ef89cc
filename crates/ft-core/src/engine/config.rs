//! The settings of a training run that do not depend on the available memory; `StepStrategy` has those that do.

use super::ema::EmaConfig;
use super::hook::StepHook;
use super::loss_scale::LossScaleConfig;
use super::outer::OuterConfig;
use super::reduce::GradientExchange;
use crate::comm::Collective;
use crate::model::{RouterLosses, SequenceConfig};
use std::sync::Arc;

/// The settings of the training steps of an `Engine`.
pub struct TrainConfig {
    /// Gradients are clipped to this global norm; 0: no clipping.
    pub max_grad_norm: f64,
    /// Seed of dropout and stochastic rounding.
    pub seed: u64,
    /// Factor of the noise on the embeddings in training (`EmbeddingNoise`); 0: none.
    pub neftune_noise_alpha: f64,
    /// Factors of the losses of the routers of a mixture of experts.
    pub router_losses: RouterLosses,
    /// The trained weights are averaged.
    pub ema: Option<EmaConfig>,
    /// Dynamic loss scaling, for f16.
    pub loss_scale: Option<LossScaleConfig>,
    /// Runs around each update.
    pub step_hook: Option<Box<dyn StepHook>>,
    /// The ranks of the job; `None`: this process alone.
    pub ranks: Option<RankConfig>,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            max_grad_norm: 1.0,
            seed: 0,
            neftune_noise_alpha: 0.0,
            router_losses: RouterLosses::default(),
            ema: None,
            loss_scale: None,
            step_hook: None,
            ranks: None,
        }
    }
}

/// How the ranks of a job train together.
pub struct RankConfig {
    /// The ranks.
    pub comm: Arc<dyn Collective>,
    /// How gradients are added.
    pub exchange: GradientExchange,
    /// Ranks that share one micro-batch.
    pub sequence: SequenceConfig,
    /// The ranks train alone between averages.
    pub outer: Option<OuterConfig>,
}
