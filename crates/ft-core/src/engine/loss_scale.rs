//! Dynamic loss scaling, which training in f16 needs: gradients below 6e-8 are 0 in f16, so every gradient of a step is
//! computed times a scale, and divided by it before clipping and update. A step with a gradient that is not finite is
//! skipped, and the scale falls; after many steps without one it grows (Micikevicius et al. 2018, arXiv 1710.03740, section
//! 3.2). The decisions are those of `torch.amp.GradScaler`.

use crate::base::{Error, Result};

/// Factor of the scale after `LossScaleConfig::growth_interval` steps.
const GROWTH: f32 = 2.0;
/// Factor of the scale after a step that was skipped.
const BACKOFF: f32 = 0.5;
/// A step that overflows at a smaller scale does so because of its values, not of the scale.
const SMALLEST: f32 = 1.0 / (1 << 24) as f32;

/// Settings of the loss scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScaleConfig {
    /// The scale of the first step.
    pub initial: f64,
    /// Number of steps without an overflow after which the scale is doubled.
    pub growth_interval: u64,
}

impl Default for LossScaleConfig {
    fn default() -> Self {
        Self {
            initial: 65536.0,
            growth_interval: 2000,
        }
    }
}

/// The scale of the next step, and what led to it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScale {
    /// The scale.
    pub scale: f32,
    /// Steps without an overflow since the scale was last changed.
    pub steps: u64,
    /// Steps that were skipped so far.
    pub skipped: u64,
    /// Number of steps without a skipped one after which the scale grows.
    growth_interval: u64,
}

impl LossScale {
    /// The scale before the first step.
    pub fn new(config: LossScaleConfig) -> Self {
        Self {
            scale: config.initial as f32,
            steps: 0,
            skipped: 0,
            growth_interval: config.growth_interval,
        }
    }

    /// Changes the scale after a step. `overflow`: a gradient or the loss was not finite, so the step is skipped.
    ///
    /// # Errors
    /// The step overflowed although the scale is far below 1.
    pub fn update(&mut self, overflow: bool) -> Result<()> {
        if overflow {
            if self.scale < SMALLEST {
                return Err(
                    Error::non_finite("the values of a step are too large for f16, at any loss scale")
                        .found(format!(
                            "a loss scale of {:e}, after {} skipped steps",
                            self.scale, self.skipped
                        ))
                        .hint("use `Dtype::Bf16` or `Dtype::F32`"),
                );
            }
            (self.scale, self.steps) = (self.scale * BACKOFF, 0);
            self.skipped += 1;
            return Ok(());
        }
        self.steps += 1;
        if self.steps == self.growth_interval {
            let more = self.scale * GROWTH;
            (self.scale, self.steps) = (if more.is_finite() { more } else { self.scale }, 0);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_that_fell_too_far_is_an_error() {
        let mut scale = LossScale::new(LossScaleConfig::default());
        let falls = (0..100).take_while(|_| scale.update(true).is_ok()).count();
        // From 2^16 to below 2^-24.
        assert_eq!(falls, 41);
    }
}
