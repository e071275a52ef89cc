//! The part of a matrix that a rank stores, and how the parts of all ranks become the matrix.

use crate::base::{Error, Result};
use crate::comm::WholeList;
use crate::ops::Dtype;
use crate::quant::{Format, QMatrix, Weight};
use crate::source::{ParamInfo, tensor_bytes};
use candle_core::{Device, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// The own part of a matrix.
pub(super) enum OwnPart {
    /// Flat, the elements of `comm::part_of`; `copies`: those of the peers on other machines, in host memory.
    Dense { own: Tensor, copies: Option<Tensor> },
    /// Quantized data, cut by bytes.
    Codes {
        format: Format,
        dequantized_dtype: Dtype,
        parts: Vec<CodePart>,
    },
    /// All of a quantized expert.
    Whole(Arc<QMatrix>),
}

/// A part of the quantized data (`QMatrix::parts`), of which a rank has some bytes.
pub(super) struct CodePart {
    name: &'static str,
    /// All bytes.
    pub length: usize,
    /// u8
    pub own: Tensor,
}

/// The bytes of rank `rank`. Quantized data is never updated in parts, so it is cut anywhere.
pub(crate) fn bytes_of(length: usize, rank: usize, size: usize) -> Range<usize> {
    let each = length.div_ceil(size);
    (rank * each).min(length)..((rank + 1) * each).min(length)
}

impl OwnPart {
    /// The part of a quantized matrix that `range_of` says for a number of bytes.
    pub(super) fn cut(codes: &QMatrix, range_of: impl Fn(usize) -> Range<usize>) -> Result<Self> {
        let mut parts = Vec::new();
        for part in codes.parts() {
            let range = range_of(part.bytes.len());
            let own = part.bytes[range.clone()].to_vec();
            parts.push(CodePart {
                name: part.name,
                length: part.bytes.len(),
                own: Tensor::from_vec(own, range.len(), &Device::Cpu)?,
            });
        }
        Ok(Self::Codes {
            format: codes.format(),
            dequantized_dtype: codes.dequantized_dtype(),
            parts,
        })
    }

    /// Nothing of a quantized expert, which another rank has.
    pub(super) fn elsewhere(p: &ParamInfo, format: Format, dequantized_dtype: Dtype) -> Result<Self> {
        let &[rows, columns] = p.shape.as_slice() else {
            return Err(Error::internal("only a matrix is quantized").at(&*p.name));
        };
        let nothing = |(name, length)| {
            let own = Tensor::from_vec(Vec::<u8>::new(), 0, &Device::Cpu)?;
            Ok(CodePart { name, length, own })
        };
        let parts = format.parts(rows, columns).into_iter().map(nothing);
        Ok(Self::Codes {
            format,
            dequantized_dtype,
            parts: parts.collect::<Result<_>>()?,
        })
    }

    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Whole(codes) => Weight::Quantized(codes.clone()).bytes(),
            Self::Dense { own, copies } => tensor_bytes(own) + copies.as_ref().map_or(0, tensor_bytes),
            Self::Codes { parts, .. } => parts.iter().map(|part| tensor_bytes(&part.own)).sum(),
        }
    }

    pub(super) fn form(&self) -> MatrixForm {
        match self {
            Self::Dense { .. } => MatrixForm::Dense,
            Self::Whole(codes) => MatrixForm::Codes {
                format: codes.format(),
                dequantized_dtype: codes.dequantized_dtype(),
                parts: codes.parts().iter().map(|part| part.name).collect(),
            },
            Self::Codes {
                format,
                dequantized_dtype,
                parts,
            } => MatrixForm::Codes {
                format: *format,
                dequantized_dtype: *dequantized_dtype,
                parts: parts.iter().map(|part| part.name).collect(),
            },
        }
    }
}

/// How a matrix is made of the collected lists.
pub(super) enum MatrixForm {
    Dense,
    Codes {
        format: Format,
        dequantized_dtype: Dtype,
        parts: Vec<&'static str>,
    },
}

impl MatrixForm {
    /// Takes the lists of the matrix and builds it.
    pub(super) fn build(self, p: &ParamInfo, lists: &mut impl Iterator<Item = WholeList>) -> Result<Weight> {
        let missing = || Error::internal("a stored part of a weight is missing").at(&*p.name);
        match self {
            Self::Dense => Ok(lists.next().ok_or_else(missing)?.into_tensor(&p.shape)?.into()),
            Self::Codes {
                format,
                dequantized_dtype,
                parts,
            } => {
                let mut found = Vec::new();
                for name in parts {
                    found.push((name, lists.next().ok_or_else(missing)?.into_bytes()?));
                }
                let &[rows, columns] = p.shape.as_slice() else {
                    return Err(Error::internal("only a matrix is quantized").at(&*p.name));
                };
                let take = |name: &str| {
                    let part = found.iter_mut().find(|(part, _)| *part == name);
                    part.map(|(_, bytes)| std::mem::take(bytes)).ok_or_else(missing)
                };
                let codes = QMatrix::from_parts(format, (rows, columns), dequantized_dtype, take);
                Ok(codes.map_err(|e| e.or_at(&*p.name))?.into())
            }
        }
    }
}
