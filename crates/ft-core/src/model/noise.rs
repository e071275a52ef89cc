//! NEFTune: uniform noise on the embeddings of a training step.
//!
//! Jain et al. 2023, "NEFTune: Noisy Embeddings Improve Instruction Finetuning", arXiv 2310.05914, section 2: each element
//! gets a number from the uniform distribution over [-m, m), m = alpha / sqrt(L D), where L is the number of tokens of the row.
//! A row here is a document of a batch, without padding, also with packing. A number depends on seed, step, row of the step,
//! token and column only: not on how the rows are divided into micro-batches, on threads or on ranks.

use super::contracts::Context;
use super::spec::Spec;
use crate::base::Result;
use crate::base::rng::{Rng, Stream};
use crate::ops::embedding::{self, NoiseRow};
use candle_core::Tensor;

/// The noise of one micro-batch.
#[derive(Debug, Clone, Copy)]
pub struct EmbeddingNoise {
    /// Factor of the noise.
    pub alpha: f64,
    /// Seed of the run.
    pub seed: u64,
    /// The optimizer step, from 1.
    pub step: u64,
    /// Number of the first row of the micro-batch among the rows of the step.
    pub first_row: u64,
}

impl EmbeddingNoise {
    /// Adds the noise to the embeddings `x` `[N, D]` in place, if `ctx` has any.
    pub(super) fn add(x: &Tensor, ctx: &Context, spec: &Spec) -> Result<()> {
        let Some(noise) = ctx.noise else { return Ok(()) };
        let mut rows = Vec::with_capacity(ctx.documents.last().copied().unwrap_or(0));
        for (number, span) in (noise.first_row..).zip(ctx.documents.windows(2)) {
            let length = span[1] - span[0];
            let rng = Rng::new(noise.seed, Stream::Noise, &[noise.step, number]);
            let magnitude = noise.alpha / ((length * spec.hidden) as f64).sqrt();
            let magnitude = magnitude as f32 * spec.noise_scale;
            rows.extend((0..length as u32).map(|position| NoiseRow {
                rng,
                position,
                magnitude,
            }));
        }
        let own = ctx.sequence.map_or(0..rows.len(), |sequence| sequence.own());
        embedding::add_noise(x, &rows[own])
    }
}
