//! Copies between host and GPU.

use super::{Gpu, address_of, graph};
use candle_core::cuda::cudarc::driver::{CudaEvent, DeviceRepr, PinnedHostSlice, result, sys};
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};
use half::{bf16, f16};
use std::cell::OnceCell;
use std::sync::{Mutex, PoisonError};

pub(super) fn failed(e: impl std::fmt::Debug) -> Error {
    let text = format!("{e:?}");
    Error::device("a copy between host and GPU failed", &text).found(text)
}

/// Reads the elements of `t`, which has the type `dtype`, as `T`. Synchronizes with the GPU.
pub(crate) fn read<T: DeviceRepr + Copy + Default>(t: &Tensor, name: &str, dtype: DType) -> Result<Vec<T>> {
    let from = address_of(t, name, dtype)?;
    let mut values = vec![T::default(); t.elem_count()];
    if values.is_empty() {
        return Ok(values);
    }
    if dtype.size_in_bytes() != size_of::<T>() {
        return Err(Error::internal("a tensor was read as another type").found(dtype.as_str()));
    }
    graph::forbid_copy(name)?;
    let gpu = Gpu::of(t, name)?;
    let stream = gpu.device().cuda_stream();
    stream.context().bind_to_thread().map_err(failed)?;
    // SAFETY: the tensor has this number of elements of this size, and the values live until the stream has finished.
    unsafe { result::memcpy_dtoh_async(&mut values, from, stream.cu_stream()) }.map_err(failed)?;
    stream.synchronize().map_err(failed)?;
    Ok(values)
}

/// Writes the elements of `t`, which has the type `dtype`, from `T`.
pub(crate) fn write<T: DeviceRepr>(t: &Tensor, name: &str, dtype: DType, values: &[T]) -> Result<()> {
    let to = address_of(t, name, dtype)?;
    if t.elem_count() != values.len() || dtype.size_in_bytes() != size_of::<T>() {
        return Err(Error::shape(format!("{name} and its values differ in size"))
            .found(values.len())
            .expected(t.elem_count()));
    }
    if values.is_empty() {
        return Ok(());
    }
    graph::forbid_copy(name)?;
    let gpu = Gpu::of(t, name)?;
    let stream = gpu.device().cuda_stream();
    stream.context().bind_to_thread().map_err(failed)?;
    // SAFETY: the tensor has space for the values; from memory that is not pinned the driver copies before it returns.
    unsafe { result::memcpy_htod_async(to, values, stream.cu_stream()) }.map_err(failed)
}

/// Reads the elements of an f32, bf16 or f16 tensor, widened. Synchronizes with the GPU.
pub(crate) fn to_f32_vec(t: &Tensor) -> Result<Vec<f32>> {
    const NAME: &str = "a tensor that is read";
    match t.dtype() {
        DType::BF16 => Ok(read::<bf16>(t, NAME, DType::BF16)?.iter().map(|x| x.to_f32()).collect()),
        DType::F16 => Ok(read::<f16>(t, NAME, DType::F16)?.iter().map(|x| x.to_f32()).collect()),
        _ => read::<f32>(t, NAME, DType::F32),
    }
}

/// Four f64 on their way to the host.
pub(crate) struct PendingDownload {
    /// None only after `drop`.
    host: Option<PinnedHostSlice<f64>>,
    done: CudaEvent,
    /// After the first `wait`.
    numbers: OnceCell<[f64; 4]>,
}

/// Pinned memory for downloads: to allocate it takes longer than a step should wait.
static FREE: Mutex<Vec<PinnedHostSlice<f64>>> = Mutex::new(Vec::new());

impl PendingDownload {
    const LENGTH: usize = 4;

    /// Starts the copy of an f64 tensor of four elements after the work that is queued now.
    pub(crate) fn start(t: &Tensor) -> Result<Self> {
        const NAME: &str = "numbers that are read";
        let from = address_of(t, NAME, DType::F64)?;
        if t.elem_count() != Self::LENGTH {
            return Err(Error::shape(format!("{NAME} have the wrong size"))
                .found(t.elem_count())
                .expected(Self::LENGTH));
        }
        let gpu = Gpu::of(t, NAME)?;
        let stream = gpu.device().cuda_stream();
        let free = FREE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut host = match free {
            Some(host) => host,
            // SAFETY: it is filled before it is read. Any context can use it.
            None => unsafe {
                stream
                    .context()
                    .alloc_pinned_with_flags(Self::LENGTH, sys::CU_MEMHOSTALLOC_PORTABLE)
            }
            .map_err(failed)?,
        };
        stream.context().bind_to_thread().map_err(failed)?;
        let to = host.as_mut_slice().map_err(failed)?;
        // SAFETY: both have four elements; the memory is not used again before `done`.
        unsafe { result::memcpy_dtoh_async(to, from, stream.cu_stream()) }.map_err(failed)?;
        let done = stream.record_event(None).map_err(failed)?;
        Ok(Self {
            host: Some(host),
            done,
            numbers: OnceCell::new(),
        })
    }

    /// Waits for the copy.
    pub(crate) fn wait(&self) -> Result<[f64; Self::LENGTH]> {
        if let Some(numbers) = self.numbers.get() {
            return Ok(*numbers);
        }
        self.done.synchronize().map_err(failed)?;
        let numbers = self.host.as_ref().map(PinnedHostSlice::as_slice).transpose();
        match numbers.map_err(failed)? {
            Some(&[a, b, c, d]) => Ok(*self.numbers.get_or_init(|| [a, b, c, d])),
            _ => Err(Error::internal("numbers of a device are incomplete")),
        }
    }
}

impl Drop for PendingDownload {
    fn drop(&mut self) {
        if let Some(host) = self.host.take()
            && (self.numbers.get().is_some() || self.done.synchronize().is_ok())
        {
            FREE.lock().unwrap_or_else(PoisonError::into_inner).push(host);
        }
    }
}
