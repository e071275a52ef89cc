//! Access to tensors as slices: contiguous, on the CPU, f32 or bf16, or a clear error.

use super::product::Rounding;
use candle_core::{CpuStorage, DType, Device, Shape, Storage, Tensor};
use ft_base::{Error, Result};
use half::bf16;

/// Elements of a weight in their storage type.
#[derive(Clone, Copy)]
pub(crate) enum StoredElements<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

impl StoredElements<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            StoredElements::F32(v) => v.len(),
            StoredElements::Bf16(v) => v.len(),
        }
    }

    /// Returns the rounding of products with a weight of this type.
    pub(crate) fn rounding(self) -> Rounding {
        match self {
            StoredElements::F32(_) => Rounding::Exact,
            StoredElements::Bf16(_) => Rounding::Bf16,
        }
    }

    /// Widens to f32, for small vectors (a norm, a bias).
    pub(crate) fn to_f32(self) -> Vec<f32> {
        match self {
            StoredElements::F32(v) => v.to_vec(),
            StoredElements::Bf16(v) => v.iter().map(|x| x.to_f32()).collect(),
        }
    }
}

/// Runs `f` on the elements of `t` (f32 or bf16), holding the read lock.
pub(crate) fn values<R>(t: &Tensor, name: &str, f: impl FnOnce(StoredElements<'_>) -> Result<R>) -> Result<R> {
    let (storage, layout) = t.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        return Err(not_on_cpu(t, name));
    };
    let (start, end) = layout.contiguous_offsets().ok_or_else(|| not_contiguous(name))?;
    match storage {
        CpuStorage::F32(v) => f(StoredElements::F32(&v[start..end])),
        CpuStorage::BF16(v) => f(StoredElements::Bf16(&v[start..end])),
        _ => Err(wrong_type(t, name, "f32 or bf16")),
    }
}

/// Runs `f` on the f32 elements of `t`, holding the read lock.
pub(crate) fn floats<R>(t: &Tensor, name: &str, f: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    values(t, name, |v| match v {
        StoredElements::F32(v) => f(v),
        StoredElements::Bf16(_) => Err(wrong_type(t, name, "f32")),
    })
}

/// Types whose every bit pattern is a value.
///
/// # Safety
/// No bit pattern of the size of the type is invalid.
pub(crate) unsafe trait AnyBits: Copy {}
// SAFETY: every 32 bits are an f32.
unsafe impl AnyBits for f32 {}
// SAFETY: every 16 bits are a bf16.
unsafe impl AnyBits for bf16 {}

/// Returns `len` elements with arbitrary contents, which the caller must write before anyone reads them. Zeroing
/// them would cost a pass over memory in every operation.
pub(crate) fn unwritten<T: AnyBits>(len: usize) -> Vec<T> {
    let mut data = Vec::with_capacity(len);
    // SAFETY: the capacity is reserved, every bit pattern is a T, and every caller is an operation that fills it.
    #[allow(clippy::uninit_vec)]
    unsafe {
        data.set_len(len)
    };
    data
}

/// Wraps `data` in a CPU tensor without a copy.
pub(crate) fn tensor(data: Vec<f32>, shape: impl Into<Shape>) -> Result<Tensor> {
    Ok(Tensor::from_vec(data, shape.into(), &Device::Cpu)?)
}

/// Returns `[rows, columns]` of a matrix.
pub(crate) fn dims2(t: &Tensor, name: &str) -> Result<(usize, usize)> {
    match *t.dims() {
        [rows, columns] => Ok((rows, columns)),
        _ => Err(wrong_shape(t, name, "two dimensions")),
    }
}

/// Checks that `t` has the shape `dims`.
pub(crate) fn expect_dims(t: &Tensor, name: &str, dims: &[usize]) -> Result<()> {
    if t.dims() == dims {
        Ok(())
    } else {
        Err(wrong_shape(t, name, &format!("{dims:?}")))
    }
}

/// Checks that `t` is f32.
pub(crate) fn expect_f32(t: &Tensor, name: &str) -> Result<()> {
    if t.dtype() == DType::F32 {
        Ok(())
    } else {
        Err(wrong_type(t, name, "f32"))
    }
}

pub(crate) fn wrong_shape(t: &Tensor, name: &str, expected: &str) -> Error {
    Error::shape(format!("{name} has the wrong shape"))
        .found(format!("{:?}", t.dims()))
        .expected(expected)
}

fn wrong_type(t: &Tensor, name: &str, expected: &str) -> Error {
    Error::shape(format!("{name} has the wrong element type"))
        .found(t.dtype().as_str())
        .expected(expected)
}

fn not_on_cpu(t: &Tensor, name: &str) -> Error {
    Error::shape(format!("{name} is on a device that this operation does not support"))
        .found(format!("{:?}", t.device().location()))
        .expected("the CPU")
}

fn not_contiguous(name: &str) -> Error {
    Error::shape(format!("{name} is not contiguous"))
}
