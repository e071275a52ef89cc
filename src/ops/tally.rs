//! Sums of one optimizer step that are read once, at its end: reading a number from a device waits for it.

use super::update;
use crate::base::Result;
use candle_core::{Device, Tensor};
use std::cell::Cell;

/// What is added up.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Sums {
    /// Losses of the trained tokens in nats, not scaled.
    pub loss: f64,
    /// Trained tokens whose target has the largest logit.
    pub correct: f64,
    /// Squares of gradients.
    pub squares: f64,
}

impl Sums {
    fn plus(self, other: Self) -> Self {
        Self {
            loss: self.loss + other.loss,
            correct: self.correct + other.correct,
            squares: self.squares + other.squares,
        }
    }
}

/// Adds up where the numbers are made: on the CPU at once, on another device there.
pub struct Tally {
    host: Cell<Sums>,
}

impl Tally {
    pub fn new(_device: &Device) -> Result<Self> {
        Ok(Self { host: Cell::default() })
    }

    /// Numbers that the host has already.
    pub fn add(&self, sums: Sums) {
        self.host.set(self.host.get().plus(sums));
    }

    /// Adds the squares of an f32 gradient; not finite from then on if an element is not.
    pub fn add_squares(&self, gradient: &Tensor) -> Result<()> {
        self.add(Sums {
            squares: update::sum_squares(gradient)?,
            ..Sums::default()
        });
        Ok(())
    }

    /// The sums so far, if no device has to be waited for.
    pub fn known(&self) -> Option<Sums> {
        Some(self.host.get())
    }

    /// The sums so far; waits for the device.
    pub fn read(&self) -> Result<Sums> {
        Ok(self.host.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adds_up_and_keeps_what_is_not_finite() {
        let tally = Tally::new(&Device::Cpu).unwrap();
        let two = Tensor::new(&[1f32, 2.0], &Device::Cpu).unwrap();
        tally.add_squares(&two).unwrap();
        tally.add(Sums {
            loss: 0.5,
            correct: 3.0,
            squares: 0.0,
        });
        tally.add_squares(&two).unwrap();
        let want = Sums {
            loss: 0.5,
            correct: 3.0,
            squares: 10.0,
        };
        assert_eq!((tally.known(), tally.read().unwrap()), (Some(want), want));
        let bad = Tensor::new(&[f32::NAN], &Device::Cpu).unwrap();
        tally.add_squares(&bad).unwrap();
        tally.add_squares(&two).unwrap();
        assert!(tally.read().unwrap().squares.is_nan());
    }
}
