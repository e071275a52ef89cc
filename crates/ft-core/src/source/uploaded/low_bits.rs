//! The low 16 bits of masters on their way between a GPU and the host.

use crate::base::{Error, Result};
use crate::source::MasterLowBits;
use candle_core::{Device, Tensor};

/// The optimizer's low 16 bits for a source on the host: copies them between host and device.
pub(super) struct DeviceLowBits<'a> {
    optimizer: &'a mut dyn MasterLowBits,
    device: &'a Device,
    failed: Option<Error>,
}

impl<'a> DeviceLowBits<'a> {
    pub(super) fn new(optimizer: &'a mut dyn MasterLowBits, device: &'a Device) -> Self {
        Self {
            optimizer,
            device,
            failed: None,
        }
    }

    fn moved(&mut self, low: Tensor, device: &Device) -> Option<Tensor> {
        match low.to_device(device) {
            Ok(low) => Some(low),
            Err(e) => {
                self.failed = Some(e.into());
                None
            }
        }
    }

    pub(super) fn done(self) -> Result<()> {
        self.failed.map_or(Ok(()), Err)
    }
}

impl MasterLowBits for DeviceLowBits<'_> {
    fn put_low(&mut self, name: &str, low: Tensor) {
        if let Some(low) = self.moved(low, self.device) {
            self.optimizer.put_low(name, low);
        }
    }

    fn take_low(&mut self, name: &str) -> Option<Tensor> {
        let low = self.optimizer.take_low(name)?;
        self.moved(low, &Device::Cpu)
    }
}
