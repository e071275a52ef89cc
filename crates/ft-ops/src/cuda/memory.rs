//! Copies between host and GPU.

use super::{Gpu, address_of};
use candle_core::cuda::cudarc::driver::{DeviceRepr, result};
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};
use half::bf16;

fn failed(e: impl std::fmt::Debug) -> Error {
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
    let gpu = Gpu::of(t, name)?;
    let stream = gpu.device().cuda_stream();
    stream.context().bind_to_thread().map_err(failed)?;
    // SAFETY: the tensor has space for the values; from memory that is not pinned the driver copies before it returns.
    unsafe { result::memcpy_htod_async(to, values, stream.cu_stream()) }.map_err(failed)
}

/// Reads the elements of an f32 or bf16 tensor, widened. Synchronizes with the GPU.
pub(crate) fn to_f32_vec(t: &Tensor) -> Result<Vec<f32>> {
    const NAME: &str = "a tensor that is read";
    match t.dtype() {
        DType::BF16 => Ok(read::<bf16>(t, NAME, DType::BF16)?.iter().map(|x| x.to_f32()).collect()),
        _ => read::<f32>(t, NAME, DType::F32),
    }
}
