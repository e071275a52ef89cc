//! Sums of one optimizer step that are read once, at its end: reading a number from a device waits for it.

use super::update;
use candle_core::{DType, Device, Tensor};
use ft_base::{Error, Result};
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
    /// f64 `[3]` on a GPU: loss, correct, squares.
    device: Option<Tensor>,
}

impl Tally {
    pub fn new(device: &Device) -> Result<Self> {
        let device = match device.is_cuda() {
            true => Some(Tensor::zeros(3, DType::F64, device)?),
            false => None,
        };
        Ok(Self {
            host: Cell::default(),
            device,
        })
    }

    /// Numbers that the host has already.
    pub fn add(&self, sums: Sums) {
        self.host.set(self.host.get().plus(sums));
    }

    /// Adds the squares of a gradient; not finite from then on if an element is not.
    pub fn add_squares(&self, gradient: &Tensor) -> Result<()> {
        self.add_squares_of(&[gradient])
    }

    /// Adds the squares of gradients that all lie on one device: there in one launch.
    pub fn add_squares_of(&self, gradients: &[&Tensor]) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(squares) = self.squares()? {
            return super::cuda::reduce::add_squares(gradients, &squares);
        }
        for gradient in gradients {
            self.add(Sums {
                squares: update::sum_squares(gradient)?,
                ..Sums::default()
            });
        }
        Ok(())
    }

    /// Where losses and hits are added on a GPU: f64 `[2]`.
    #[cfg(feature = "cuda")]
    pub(super) fn losses(&self) -> Result<Option<Tensor>> {
        Ok(self.device.as_ref().map(|t| t.narrow(0, 0, 2)).transpose()?)
    }

    /// The sum of squares on a GPU, f64 `[1]`: for what must not wait for it. `None` where the host knows it.
    pub fn squares(&self) -> Result<Option<Tensor>> {
        Ok(self.device.as_ref().map(|t| t.narrow(0, 2, 1)).transpose()?)
    }

    /// All sums on a GPU, f64 `[3]`: a step that asks them (`step::Gate`) changes nothing once one is not finite.
    pub fn gate(&self) -> Option<&Tensor> {
        self.device.as_ref()
    }

    /// The sums so far, if no device has to be waited for.
    pub fn known(&self) -> Option<Sums> {
        self.device.is_none().then(|| self.host.get())
    }

    /// The sums so far; waits for the device.
    pub fn read(&self) -> Result<Sums> {
        let host = self.host.get();
        let Some(device) = &self.device else {
            return Ok(host);
        };
        match device.to_vec1::<f64>()?[..] {
            [loss, correct, squares] => Ok(host.plus(Sums { loss, correct, squares })),
            _ => Err(Error::new("the sums of a step are not whole")),
        }
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
