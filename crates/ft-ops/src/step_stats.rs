//! Statistics of one optimizer step that are read once, at its end: reading a number from a device synchronizes.

use super::update;
use candle_core::{DType, Device, Tensor};
use ft_base::{Error, Result};
use std::cell::Cell;

/// The accumulated statistics.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepSums {
    /// Losses of the trained tokens in nats, not scaled.
    pub loss: f64,
    /// Trained tokens whose target has the largest logit.
    pub correct: f64,
    /// Squares of gradients.
    pub squares: f64,
}

impl StepSums {
    /// The sums of both.
    pub fn plus(self, other: Self) -> Self {
        Self {
            loss: self.loss + other.loss,
            correct: self.correct + other.correct,
            squares: self.squares + other.squares,
        }
    }
}

/// Accumulates the statistics on the device that produces them.
pub struct StepStats {
    host: Cell<StepSums>,
    /// f64 `[4]` on a GPU: loss, correct, squares; and 0 as long as an earlier pass was finite (`follow`).
    device: Option<Tensor>,
    /// On a GPU, of the last list of gradients: sums of squares of their parts, and the size of each gradient.
    #[cfg(feature = "cuda")]
    parts: std::cell::RefCell<Option<(Tensor, Vec<usize>)>>,
}

/// Sums that may be on their way from the device.
pub struct PendingSums {
    host: StepSums,
    #[cfg(feature = "cuda")]
    device: Option<super::cuda::memory::PendingDownload>,
}

impl PendingSums {
    /// The sums; on a GPU after the work that was queued before `start_reading`.
    ///
    /// # Errors
    /// The device has failed.
    pub fn wait(&self) -> Result<StepSums> {
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.device {
            let [loss, correct, squares, _] = device.wait()?;
            return Ok(self.host.plus(StepSums { loss, correct, squares }));
        }
        Ok(self.host)
    }
}

impl StepStats {
    /// Sums of zero, on this device.
    ///
    /// # Errors
    /// Not enough memory on the device.
    pub fn new(device: &Device) -> Result<Self> {
        let device = if device.is_cuda() {
            Some(update::zeros(4, DType::F64, device)?)
        } else {
            None
        };
        Ok(Self {
            host: Cell::default(),
            device,
            #[cfg(feature = "cuda")]
            parts: Default::default(),
        })
    }

    /// Adds values that are on the host.
    pub fn add(&self, sums: StepSums) {
        self.host.set(self.host.get().plus(sums));
    }

    /// Adds the squares of a gradient; the sum stays non-finite once an element is not finite.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn add_squares(&self, gradient: &Tensor) -> Result<()> {
        self.add_squares_of(&[gradient])
    }

    /// Adds the squares of gradients that are all on one device; on a GPU in one launch.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn add_squares_of(&self, gradients: &[&Tensor]) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(squares) = self.squares()? {
            let parts = super::cuda::reduce::add_squares(gradients, &squares)?;
            let sizes = gradients.iter().map(|gradient| gradient.elem_count()).collect();
            self.parts.replace(Some((parts, sizes)));
            return Ok(());
        }
        for gradient in gradients {
            self.add(StepSums {
                squares: update::sum_squares(gradient)?,
                ..StepSums::default()
            });
        }
        Ok(())
    }

    /// Sums of the squares of the runs of 16,384 elements of tensors on a GPU, one tensor after the other, as `add_squares_of`
    /// makes them; synchronizes. `None` if the sum of squares is on the host.
    ///
    /// # Errors
    /// A driver that does not answer; not enough memory.
    pub fn squares_of_runs(&self, tensors: &[&Tensor]) -> Result<Option<Vec<f64>>> {
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.device {
            return super::cuda::reduce::squares_of_shares(tensors, device.device()).map(Some);
        }
        let _ = tensors;
        Ok(None)
    }

    /// As `add_squares_of` on a GPU, for gradients of these sizes of which the sums of all runs are known (`squares_of_runs`):
    /// the bits are the same.
    ///
    /// # Errors
    /// A driver that does not answer; not enough memory.
    pub fn add_squares_of_runs(&self, runs: &[f64], sizes: Vec<usize>) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(squares) = self.squares()? {
            let parts = super::cuda::reduce::add_shares(runs, &squares)?;
            self.parts.replace(Some((parts, sizes)));
            return Ok(());
        }
        let _ = (runs, sizes);
        Err(Error::internal("sums of runs belong to a GPU"))
    }

    /// Sets losses and correct predictions of the whole step, where the guard reads them.
    ///
    /// # Errors
    /// A driver that does not answer.
    pub fn set_losses(&self, sums: StepSums) -> Result<()> {
        match &self.device {
            #[cfg(feature = "cuda")]
            Some(device) => {
                let losses = device.narrow(0, 0, 2)?;
                super::cuda::memory::write(&losses, "the losses of a step", DType::F64, &[sums.loss, sums.correct])
            }
            _ => {
                self.add(sums);
                Ok(())
            }
        }
    }

    /// Returns the indices of the gradients of the last `add_squares_of` on a GPU that were not finite; synchronizes.
    ///
    /// # Errors
    /// A driver that does not answer.
    pub fn non_finite(&self) -> Result<Vec<usize>> {
        #[cfg(feature = "cuda")]
        if let Some((parts, sizes)) = &*self.parts.borrow() {
            return super::cuda::reduce::non_finite(parts, sizes);
        }
        Ok(Vec::new())
    }

    /// Returns the GPU accumulators of losses and correct predictions: f64 `[2]`.
    #[cfg(feature = "cuda")]
    pub(super) fn losses(&self) -> Result<Option<Tensor>> {
        Ok(self.device.as_ref().map(|t| t.narrow(0, 0, 2)).transpose()?)
    }

    /// Returns the sum of squares on a GPU, f64 `[1]`, for code that must not synchronize. `None` if the sum is on
    /// the host.
    ///
    /// # Errors
    /// None: the tensor has this element.
    pub fn squares(&self) -> Result<Option<Tensor>> {
        Ok(self.device.as_ref().map(|t| t.narrow(0, 2, 1)).transpose()?)
    }

    /// Extends `gate` to the sums of an earlier pass, if there is one; the host need not have read them.
    ///
    /// # Errors
    /// A driver that does not answer.
    pub fn follow(&self, earlier: Option<&StepStats>) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let (Some(own), Some(earlier)) = (&self.device, earlier.and_then(|earlier| earlier.device.as_ref())) {
            return super::cuda::reduce::total(earlier, &own.narrow(0, 3, 1)?);
        }
        let _ = earlier;
        Ok(())
    }

    /// Returns all sums on a GPU, f64 `[4]`: a step with this guard (`step::FoundInf`) changes nothing once one is not
    /// finite.
    pub fn gate(&self) -> Option<&Tensor> {
        self.device.as_ref()
    }

    /// Returns the sums so far, if this needs no synchronization.
    pub fn known(&self) -> Option<StepSums> {
        self.device.is_none().then(|| self.host.get())
    }

    /// Starts to read the sums so far, without synchronization.
    ///
    /// # Errors
    /// A driver that does not answer; not enough memory.
    pub fn start_reading(&self) -> Result<PendingSums> {
        Ok(PendingSums {
            host: self.host.get(),
            #[cfg(feature = "cuda")]
            device: match &self.device {
                Some(device) => Some(super::cuda::memory::PendingDownload::start(device)?),
                None => None,
            },
        })
    }

    /// Returns the sums so far; synchronizes with the device.
    ///
    /// # Errors
    /// A driver that does not answer.
    pub fn read(&self) -> Result<StepSums> {
        self.start_reading()?.wait()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adds_up_and_keeps_what_is_not_finite() {
        let step_stats = StepStats::new(&Device::Cpu).unwrap();
        let two = Tensor::new(&[1f32, 2.0], &Device::Cpu).unwrap();
        step_stats.add_squares(&two).unwrap();
        step_stats.add(StepSums {
            loss: 0.5,
            correct: 3.0,
            squares: 0.0,
        });
        step_stats.add_squares(&two).unwrap();
        let want = StepSums {
            loss: 0.5,
            correct: 3.0,
            squares: 10.0,
        };
        assert_eq!((step_stats.known(), step_stats.read().unwrap()), (Some(want), want));
        let bad = Tensor::new(&[f32::NAN], &Device::Cpu).unwrap();
        step_stats.add_squares(&bad).unwrap();
        step_stats.add_squares(&two).unwrap();
        assert!(step_stats.read().unwrap().squares.is_nan());
    }
}
