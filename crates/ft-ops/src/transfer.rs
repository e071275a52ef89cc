//! Asynchronous copies between host memory and the compute device.
//!
//! On a GPU the copies run on a separate stream (`cuda::transfer`). If host and device are the same, each call
//! makes a plain copy, so that the tests can use the same code.

use candle_core::{Device, Tensor};
use ft_base::{Error, Result};

/// Size and number of the pinned buffers of a copier to a GPU: for small tensors, and for pieces of large ones.
pub(crate) const STAGING: [(usize, usize); 2] = [(1 << 17, 64), (8 << 20, 16)];
/// Largest host memory of the pinned buffers of a copier to a GPU.
pub const STAGING_BYTES: u64 = (STAGING[0].0 * STAGING[0].1 + STAGING[1].0 * STAGING[1].1) as u64;

/// Time of the copies to the device, and time that the computation waited for them, in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CopyTimes {
    /// Copies to the device.
    pub copying: f64,
    /// Waiting for copies.
    pub waiting: f64,
    /// Bytes of host memory that the system refused to page-lock: their copies are slower, and overlap with nothing.
    pub refused: u64,
}

impl CopyTimes {
    /// Returns the fraction of the copy time that overlapped with computation.
    pub fn hidden(&self) -> Option<f64> {
        (self.copying > 0.0).then(|| (1.0 - self.waiting / self.copying).clamp(0.0, 1.0))
    }
}

/// The use of the memory of a host tensor after it is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostMemory {
    /// It is neither changed nor freed while the copier lives: a GPU reads it directly.
    Stable,
    /// It is not freed while the copier lives, and changed only after `ArrivingTensor::read`: a GPU reads it directly.
    Reused,
    /// Anything: its bytes are copied before `send` returns.
    Temporary,
}

/// A copy to a GPU that reads the memory of a host tensor.
#[derive(Debug, Clone)]
pub struct HostRead(#[cfg(feature = "cuda")] super::cuda::transfer::GpuHostRead);

impl HostRead {
    /// Waits until the memory is no longer read.
    ///
    /// # Errors
    /// The GPU has failed.
    pub fn wait(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        super::cuda::transfer::wait(&self.0)?;
        Ok(())
    }
}

/// A copy engine for one device.
pub struct Copier {
    #[cfg(feature = "cuda")]
    gpu: Option<super::cuda::transfer::GpuCopier>,
    device: Device,
}

/// A tensor during its copy to the device.
pub struct ArrivingTensor(OnDevice<Tensor>);

/// A tensor that is offloaded to the host.
pub struct OffloadedTensor(OffloadedCopy);

enum OnDevice<T> {
    Here(T),
    #[cfg(feature = "cuda")]
    Gpu(super::cuda::transfer::GpuArriving),
}

enum OffloadedCopy {
    Here(Tensor),
    #[cfg(feature = "cuda")]
    Gpu(super::cuda::transfer::GpuOffloaded),
}

impl ArrivingTensor {
    /// The copy, if it reads the memory of the host tensor.
    pub fn read(&self) -> Option<HostRead> {
        match &self.0 {
            OnDevice::Here(_) => None,
            #[cfg(feature = "cuda")]
            OnDevice::Gpu(arriving) => arriving.read().map(HostRead),
        }
    }
}

impl Copier {
    /// A copy engine for this device; on a CPU it makes plain copies.
    ///
    /// # Errors
    /// The GPU cannot create a second stream.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            #[cfg(feature = "cuda")]
            gpu: if device.is_cuda() {
                Some(super::cuda::transfer::GpuCopier::new(device)?)
            } else {
                None
            },
            device: device.clone(),
        })
    }

    /// The device of the copies.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Starts the upload of a contiguous host tensor.
    ///
    /// # Errors
    /// `host` is not on the host (`Unsupported`); not enough memory.
    pub fn send(&self, host: &Tensor, memory: HostMemory) -> Result<ArrivingTensor> {
        if !host.device().is_cpu() {
            return Err(Error::unsupported("only a host tensor can be copied to a device"));
        }
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.gpu {
            return Ok(ArrivingTensor(OnDevice::Gpu(gpu.send(host, memory)?)));
        }
        let _ = memory;
        Ok(ArrivingTensor(OnDevice::Here(host.copy()?)))
    }

    /// Revokes `HostMemory::Stable` of an earlier `send`: the memory of this tensor may be changed or freed.
    ///
    /// # Errors
    /// A driver that does not answer.
    pub fn forget(&self, host: &Tensor) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.gpu {
            return gpu.forget(host);
        }
        let _ = host;
        Ok(())
    }

    /// Returns the tensor on the device, for all work that is queued from now on.
    ///
    /// # Errors
    /// A driver that does not answer.
    pub fn receive(&self, arriving: ArrivingTensor) -> Result<Tensor> {
        match arriving.0 {
            OnDevice::Here(tensor) => Ok(tensor),
            #[cfg(feature = "cuda")]
            OnDevice::Gpu(arriving) => self.gpu()?.receive(arriving),
        }
    }

    /// Starts the offload of a device tensor to the host; the tensor must not be changed afterwards.
    ///
    /// # Errors
    /// A driver that does not answer; not enough memory.
    pub fn offload(&self, tensor: Tensor) -> Result<OffloadedTensor> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.gpu {
            return Ok(OffloadedTensor(OffloadedCopy::Gpu(gpu.offload(tensor)?)));
        }
        Ok(OffloadedTensor(OffloadedCopy::Here(tensor.copy()?)))
    }

    /// Releases the device memory of an offloaded tensor: later work may reuse it, after the copy.
    ///
    /// # Errors
    /// A driver that does not answer.
    pub fn release(&self, offloaded: &mut OffloadedTensor) -> Result<()> {
        match &mut offloaded.0 {
            OffloadedCopy::Here(_) => Ok(()),
            #[cfg(feature = "cuda")]
            OffloadedCopy::Gpu(offloaded) => self.gpu()?.release(offloaded),
        }
    }

    /// Waits for an offloaded f32 tensor, and adds its elements to the list.
    ///
    /// # Errors
    /// The tensor is not f32 (`Shape`); a driver that does not answer.
    pub fn read(&self, offloaded: OffloadedTensor, list: &mut Vec<f32>) -> Result<()> {
        match offloaded.0 {
            OffloadedCopy::Here(tensor) => super::update::with_slice(&tensor, |values| list.extend_from_slice(values)),
            #[cfg(feature = "cuda")]
            OffloadedCopy::Gpu(offloaded) => self.gpu()?.read(offloaded, list),
        }
    }

    /// Starts the copy of an offloaded tensor back to the device.
    ///
    /// # Errors
    /// A driver that does not answer; not enough memory.
    pub fn fetch(&self, offloaded: OffloadedTensor) -> Result<ArrivingTensor> {
        match offloaded.0 {
            OffloadedCopy::Here(tensor) => Ok(ArrivingTensor(OnDevice::Here(tensor))),
            #[cfg(feature = "cuda")]
            OffloadedCopy::Gpu(offloaded) => Ok(ArrivingTensor(OnDevice::Gpu(self.gpu()?.fetch(offloaded)?))),
        }
    }

    /// Returns the times of the copies to the device that were completed since the last call. `None` if host and device
    /// are the same.
    ///
    /// # Errors
    /// A driver that does not answer.
    pub fn times(&self) -> Result<Option<CopyTimes>> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.gpu {
            return gpu.times().map(Some);
        }
        Ok(None)
    }

    #[cfg(feature = "cuda")]
    fn gpu(&self) -> Result<&super::cuda::transfer::GpuCopier> {
        self.gpu
            .as_ref()
            .ok_or_else(|| Error::internal("internal: a host copy engine received a GPU tensor"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_or_parked_is_a_copy() {
        let copier = Copier::new(&Device::Cpu).unwrap();
        let host = Tensor::new(&[1f32, 2.0, 3.0], &Device::Cpu).unwrap();
        let sent = copier.receive(copier.send(&host, HostMemory::Stable).unwrap()).unwrap();
        let mut offloaded = copier.offload(host.clone()).unwrap();
        copier.release(&mut offloaded).unwrap();
        super::super::update::with_slice_mut(&host, |x| x.fill(0.0)).unwrap();
        let back = copier.receive(copier.fetch(offloaded).unwrap()).unwrap();
        for t in [sent, back] {
            assert_eq!(t.to_vec1::<f32>().unwrap(), [1.0, 2.0, 3.0]);
        }
        assert_eq!(copier.times().unwrap(), None);
        let mut list = vec![4.0];
        copier.read(copier.offload(host).unwrap(), &mut list).unwrap();
        assert_eq!(list, [4.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn the_hidden_part_is_what_did_not_wait() {
        let times = |copying, waiting| CopyTimes {
            copying,
            waiting,
            refused: 0,
        };
        assert_eq!(times(10.0, 2.5).hidden(), Some(0.75));
        assert_eq!(times(10.0, 12.0).hidden(), Some(0.0));
        assert_eq!(times(0.0, 0.0).hidden(), None);
    }
}
