//! The part of a matrix that a rank stores, and how the parts of all ranks become the matrix.

use crate::base::{Error, Result};
use crate::comm::{Shard, Whole, World, part_of};
use crate::ops::Dtype;
use crate::quant::{Format, QMatrix, Weight};
use crate::source::{ParamInfo, tensor_bytes};
use candle_core::{Device, Tensor};
use std::ops::Range;

/// The own part of a matrix.
pub(super) enum Own {
    /// Flat, the elements of `comm::part_of`.
    Dense(Tensor),
    /// Quantized data, cut by bytes.
    Codes {
        format: Format,
        decoded: Dtype,
        parts: Vec<CodePart>,
    },
}

/// A part of the quantized data (`QMatrix::parts`), of which a rank has some bytes.
pub(super) struct CodePart {
    name: &'static str,
    /// All bytes.
    length: usize,
    /// u8
    own: Tensor,
}

/// The bytes of rank `rank`. Quantized data is never updated in parts, so it is cut anywhere.
pub fn bytes_of(length: usize, rank: usize, size: usize) -> Range<usize> {
    let each = length.div_ceil(size);
    (rank * each).min(length)..((rank + 1) * each).min(length)
}

impl Own {
    /// The part of this rank of a quantized matrix.
    pub fn cut(codes: &QMatrix, world: &World) -> Result<Self> {
        let mut parts = Vec::new();
        for part in codes.parts() {
            let range = bytes_of(part.bytes.len(), world.rank, world.size);
            let own = part.bytes[range.clone()].to_vec();
            parts.push(CodePart {
                name: part.name,
                length: part.bytes.len(),
                own: Tensor::from_vec(own, range.len(), &Device::Cpu)?,
            });
        }
        Ok(Self::Codes {
            format: codes.format(),
            decoded: codes.decoded(),
            parts,
        })
    }

    pub fn bytes(&self) -> u64 {
        match self {
            Self::Dense(part) => tensor_bytes(part),
            Self::Codes { parts, .. } => parts.iter().map(|part| tensor_bytes(&part.own)).sum(),
        }
    }

    /// What every rank contributes to the whole.
    pub fn shards(&self, p: &ParamInfo, size: usize) -> Vec<Shard> {
        match self {
            Self::Dense(own) => vec![dense(p, own, size)],
            Self::Codes { parts, .. } => {
                let shard = |part: &CodePart| Shard {
                    own: part.own.clone(),
                    ranges: (0..size).map(|rank| bytes_of(part.length, rank, size)).collect(),
                };
                parts.iter().map(shard).collect()
            }
        }
    }

    pub fn form(&self) -> Form {
        match self {
            Self::Dense(_) => Form::Dense,
            Self::Codes { format, decoded, parts } => Form::Codes {
                format: *format,
                decoded: *decoded,
                parts: parts.iter().map(|part| part.name).collect(),
            },
        }
    }
}

/// A list with one number for each element of a parameter.
pub(super) fn dense(p: &ParamInfo, own: &Tensor, size: usize) -> Shard {
    let range = |rank| part_of(&p.name, p.elements(), rank, size);
    Shard {
        own: own.clone(),
        ranges: (0..size).map(range).collect(),
    }
}

/// How a matrix is made of the collected lists.
pub(super) enum Form {
    Dense,
    Codes {
        format: Format,
        decoded: Dtype,
        parts: Vec<&'static str>,
    },
}

impl Form {
    /// Takes the lists of the matrix and builds it.
    pub fn build(self, p: &ParamInfo, lists: &mut impl Iterator<Item = Whole>) -> Result<Weight> {
        let missing = || Error::internal("a stored part of a weight is missing").at(&*p.name);
        match self {
            Self::Dense => Ok(lists.next().ok_or_else(missing)?.into_tensor(&p.shape)?.into()),
            Self::Codes { format, decoded, parts } => {
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
                let codes = QMatrix::from_parts(format, (rows, columns), decoded, take);
                Ok(codes.map_err(|e| e.or_at(&*p.name))?.into())
            }
        }
    }
}
