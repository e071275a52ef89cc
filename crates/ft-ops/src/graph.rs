//! CUDA graphs: the work that a function queues is recorded once, and launched again as a whole. A launch costs the host one
//! call instead of one for each kernel, product, allocation and free.
//!
//! Recorded launches keep their addresses and numbers. So every input is in a tensor that stays, and is written
//! before a launch; what leaves is copied to such a tensor; and all tensors that are made within are dropped within.

use candle_core::{DType, Device, Tensor};
use ft_base::sync::lock;
use ft_base::{Error, Result};
use std::fmt::Display;
use std::sync::Mutex;

/// Work of a GPU that can be launched again.
pub struct Graph {
    #[cfg(feature = "cuda")]
    recorded: super::cuda::graph::RecordedGraph,
}

/// While it lives, candle keeps what it uploads (strides and other numbers, up to 4 KiB each) on the device until the thread ends,
/// and takes it from there again: a capture cannot upload.
pub struct UploadCache {
    #[cfg(feature = "cuda")]
    _kept: Option<super::cuda::graph::KeptStrides>,
}

impl UploadCache {
    /// Of work that is captured later, or of its capture.
    pub fn on(device: &Device) -> Self {
        let _ = device;
        Self {
            #[cfg(feature = "cuda")]
            _kept: super::cuda::graph::keep_strides(device),
        }
    }
}

/// True if work on this device can be captured: a GPU with memory pools, unless `FT_CUDA_GRAPHS=0` or `FT_CUDA_SYNC=1`.
pub fn available(device: &Device) -> bool {
    #[cfg(feature = "cuda")]
    return super::cuda::graph::available(device);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = device;
        false
    }
}

impl Graph {
    /// Records the work that `f` queues on `device`, without running it. What `f` calls for the first time may load code, which
    /// cannot be recorded: `f` must have run before. `None`: the driver refused (`take_refusal`).
    ///
    /// # Errors
    /// The driver does not answer.
    pub fn capture(device: &Device, f: impl FnOnce() -> Result<()>) -> Result<Option<Self>> {
        #[cfg(feature = "cuda")]
        if device.is_cuda() {
            let recorded = super::cuda::graph::capture(device, f)?;
            return Ok(recorded.map(|recorded| Self { recorded }));
        }
        let _ = f;
        gpu_only(device)
    }

    /// Queues the work.
    ///
    /// # Errors
    /// The driver refuses, for example because there is no memory for the tensors of the graph.
    pub fn launch(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        return self.recorded.launch();
        #[cfg(not(feature = "cuda"))]
        gpu_only(&Device::Cpu)
    }
}

/// Overwrites `to` with the elements of `from`, of the same shape and type on a GPU.
///
/// # Errors
/// Other shapes, types or devices.
pub fn overwrite(to: &Tensor, from: &Tensor) -> Result<()> {
    check(to, from)?;
    on_gpu!(to, super::cuda::graph::overwrite(to, from));
    gpu_only(to.device())
}

/// As `overwrite`, for pairs (to, from) of tensors, all on one GPU: up to 64 in one launch. No tensor overlaps another one.
///
/// # Errors
/// As `overwrite`.
pub fn overwrite_all(pairs: &[(&Tensor, &Tensor)]) -> Result<()> {
    let Some((first, _)) = pairs.first() else { return Ok(()) };
    pairs.iter().try_for_each(|(to, from)| check(to, from))?;
    on_gpu!(first, super::cuda::graph::overwrite_all(pairs));
    gpu_only(first.device())
}

fn check(to: &Tensor, from: &Tensor) -> Result<()> {
    if to.dims() == from.dims() && to.dtype() == from.dtype() {
        return Ok(());
    }
    Err(Error::shape("a tensor is overwritten with another shape or type")
        .found(format!("{:?} {:?}", from.dims(), from.dtype()))
        .expected(format!("{:?} {:?}", to.dims(), to.dtype())))
}

/// A tensor whose elements must be written before they are read.
///
/// # Errors
/// Not a GPU; no memory.
pub fn room(dims: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        return super::cuda::Gpu::on(device)?.empty(dims, dtype);
    }
    let _ = (dims, dtype);
    gpu_only(device)
}

static REFUSED: Mutex<Option<String>> = Mutex::new(None);

/// Notes why there are no graphs on a device that should have them: results are the same without.
pub fn refused(why: impl Display) {
    let mut known = lock(&REFUSED);
    known.get_or_insert_with(|| why.to_string());
}

/// The first reason that `refused` got since the last call.
pub fn take_refusal() -> Option<String> {
    lock(&REFUSED).take()
}

/// Returns the memory that graphs have taken from the device to it, as far as none runs.
///
/// # Errors
/// The driver refuses.
pub fn release_memory(device: &Device) -> Result<()> {
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        return super::cuda::graph::release_memory(device);
    }
    let _ = device;
    Ok(())
}

/// Bytes that graphs have taken from the device, in addition to those of `device::memory`: now, and at most.
///
/// # Errors
/// The driver does not answer.
pub fn memory(device: &Device) -> Result<(u64, u64)> {
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        return super::cuda::graph::memory(device);
    }
    let _ = device;
    Ok((0, 0))
}

fn gpu_only<T>(device: &Device) -> Result<T> {
    Err(Error::unsupported("CUDA graphs exist on a GPU only").found(format!("{:?}", device.location())))
}
