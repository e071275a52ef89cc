//! Lists of numbers of which each rank stores a part, brought together.

use crate::base::{Error, Result};
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use half::{bf16, f16};
use std::ops::Range;

/// A list of which ranks store parts.
#[derive(Debug, Clone)]
pub struct Shard {
    /// The own parts: flat, on the CPU, of one type: f32, bf16, f16, i16 or u8.
    pub own: Vec<Tensor>,
    /// The elements of each rank, in the order of the ranks; those of this rank in the order of `own`. Together they are the
    /// whole list. An own part whose range is empty is sent only.
    pub ranges: Vec<Vec<Range<usize>>>,
}

impl Shard {
    /// A list of which each rank stores one part.
    pub fn one(own: Tensor, ranges: &[Range<usize>]) -> Self {
        Self {
            own: vec![own],
            ranges: ranges.iter().map(|range| vec![range.clone()]).collect(),
        }
    }

    /// Elements of the whole list.
    pub fn elements(&self) -> usize {
        let all = self.ranges.iter().flatten();
        all.map(|range| range.end).max().unwrap_or(0)
    }

    /// The type of the numbers.
    pub(super) fn dtype(&self) -> DType {
        self.own.first().map_or(DType::U8, Tensor::dtype)
    }

    /// The whole list of a job of one rank.
    pub(super) fn alone(&self) -> Result<WholeList> {
        let mut whole = WholeList::zeros(self.dtype(), self.elements())?;
        let mut rest = whole.bytes();
        for own in &self.own {
            let guard = own.storage_and_layout();
            let own = own_bytes(&guard.0, own)?;
            let (part, after) = rest.split_at_mut(own.len());
            part.copy_from_slice(own);
            rest = after;
        }
        Ok(whole)
    }
}

/// All numbers of a list.
#[derive(Debug)]
pub enum WholeList {
    /// f32 numbers.
    F32(Vec<f32>),
    /// bf16 numbers.
    Bf16(Vec<bf16>),
    /// f16 numbers.
    F16(Vec<f16>),
    /// Low bits of masters.
    I16(Vec<i16>),
    /// Bytes.
    U8(Vec<u8>),
}

impl WholeList {
    /// Errors: another type than those of `Shard::own`.
    pub(super) fn zeros(dtype: DType, n: usize) -> Result<Self> {
        Ok(match dtype {
            DType::F32 => Self::F32(vec![0.0; n]),
            DType::BF16 => Self::Bf16(vec![bf16::ZERO; n]),
            DType::F16 => Self::F16(vec![f16::ZERO; n]),
            DType::I16 => Self::I16(vec![0; n]),
            DType::U8 => Self::U8(vec![0; n]),
            other => return Err(unknown(other)),
        })
    }

    /// The memory of the numbers.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        match self {
            Self::F32(v) => as_bytes_mut(v),
            Self::Bf16(v) => as_bytes_mut(v),
            Self::F16(v) => as_bytes_mut(v),
            Self::I16(v) => as_bytes_mut(v),
            Self::U8(v) => v,
        }
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        match self {
            Self::F32(v) => v.len(),
            Self::Bf16(v) => v.len(),
            Self::F16(v) => v.len(),
            Self::I16(v) => v.len(),
            Self::U8(v) => v.len(),
        }
    }

    /// A tensor of this shape on the CPU, without a copy.
    ///
    /// # Errors
    /// Another number of elements.
    pub fn into_tensor(self, shape: &[usize]) -> Result<Tensor> {
        Ok(match self {
            Self::F32(v) => Tensor::from_vec(v, shape, &Device::Cpu)?,
            Self::Bf16(v) => Tensor::from_vec(v, shape, &Device::Cpu)?,
            Self::F16(v) => Tensor::from_vec(v, shape, &Device::Cpu)?,
            Self::I16(v) => Tensor::from_vec(v, shape, &Device::Cpu)?,
            Self::U8(v) => Tensor::from_vec(v, shape, &Device::Cpu)?,
        })
    }

    /// The bytes of a list of bytes.
    ///
    /// # Errors
    /// Another type.
    pub fn into_bytes(self) -> Result<Vec<u8>> {
        match self {
            Self::U8(v) => Ok(v),
            _ => Err(Error::internal("a list of numbers is no list of bytes")),
        }
    }
}

/// Numbers without padding, of which every bit pattern is valid.
pub(super) trait PlainNumber: Copy {}
impl PlainNumber for f32 {}
impl PlainNumber for bf16 {}
impl PlainNumber for f16 {}
impl PlainNumber for i16 {}

fn as_bytes_mut<T: PlainNumber>(numbers: &mut [T]) -> &mut [u8] {
    let length = size_of_val(numbers);
    // SAFETY: the same memory for the same lifetime; every bit pattern of a `PlainNumber` type is valid.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), length) }
}

fn as_bytes<T: PlainNumber>(numbers: &[T]) -> &[u8] {
    // SAFETY: the same memory for the same lifetime; a `PlainNumber` type has no padding.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

/// The memory of `tensor`, whose storage this is. Errors: not contiguous; on a GPU; another type.
pub(super) fn own_bytes<'a>(storage: &'a Storage, tensor: &Tensor) -> Result<&'a [u8]> {
    let Some((start, end)) = tensor.layout().contiguous_offsets() else {
        return Err(Error::internal("a part of a weight needs a contiguous tensor"));
    };
    let Storage::Cpu(storage) = storage else {
        return Err(
            Error::unsupported("weights that are divided among ranks must be in host memory")
                .found("a tensor on a GPU"),
        );
    };
    Ok(match storage {
        CpuStorage::F32(v) => as_bytes(&v[start..end]),
        CpuStorage::BF16(v) => as_bytes(&v[start..end]),
        CpuStorage::F16(v) => as_bytes(&v[start..end]),
        CpuStorage::I16(v) => as_bytes(&v[start..end]),
        CpuStorage::U8(v) => &v[start..end],
        _ => return Err(unknown(tensor.dtype())),
    })
}

fn unknown(dtype: DType) -> Error {
    Error::internal("numbers of this type do not travel").found(format!("{dtype:?}"))
}
