//! The factor of the gradients by which their global norm is limited.

use crate::base::Result;
use crate::ops::step_stats::StepStats;
use crate::ops::update;
use candle_core::Tensor;

/// The clipping factor of the squares so far, on the GPU.
pub(super) fn device_coefficient(step_stats: &StepStats, max: f64) -> Result<Option<Tensor>> {
    match step_stats.squares()?.filter(|_| max > 0.0) {
        Some(squares) => Ok(Some(update::clip_coefficient(&squares, max)?)),
        None => Ok(None),
    }
}

/// As `torch.nn.utils.clip_grad_norm_`: min(1, max / (norm + 1e-6)).
pub(super) fn clip_coefficient(norm: f64, max: f64) -> f32 {
    if max > 0.0 {
        (max / (norm + 1e-6)).min(1.0) as f32
    } else {
        1.0
    }
}
