//! The codes of a weight in tensors of a device: what a GPU computes with.

use super::coded::{Coded, check_format};
use super::dynamic;
use super::format::Format;
use crate::base::{Error, Result};
use crate::ops::coded::{self, Absmax, Codes, Scales};
use crate::recipe::Dtype;
use candle_core::{Device, Tensor};

/// The codes of a weight `[O, I]`. Never changed after it was made; share it in an `Arc`.
#[derive(Clone)]
pub struct Placed {
    format: Format,
    decoded: Dtype,
    codes: coded::Placed,
}

impl Coded {
    /// The codes as tensors of `device`: codes u8, then the scales (f32 of int8 and of NF4, u32 of int4, u8 and f32 of
    /// NF4 with double quantization). `Placed::new` takes them, and `nested_offset`.
    pub fn tensors(&self, device: &Device) -> Result<Vec<Tensor>> {
        let bytes = |v: &[u8]| Tensor::from_slice(v, v.len(), device);
        let floats = |v: &[f32]| Tensor::from_slice(v, v.len(), device);
        Ok(match self.view().codes {
            Codes::Int8 { codes, scales, .. } => vec![bytes(codes)?, floats(scales)?],
            Codes::Int4 { codes, scales, .. } => {
                vec![bytes(codes)?, Tensor::from_slice(scales, scales.len(), device)?]
            }
            Codes::Nf4 { codes, absmax } => match absmax {
                Absmax::Plain(values) => vec![bytes(codes)?, floats(values)?],
                Absmax::Double {
                    codes: nested, scales, ..
                } => vec![bytes(codes)?, bytes(nested)?, floats(scales)?],
            },
        })
    }

    /// The mean of the absmax that NF4 takes off before it codes them; 0 without double quantization.
    pub fn nested_offset(&self) -> f32 {
        match self.view().codes {
            Codes::Nf4 {
                absmax: Absmax::Double { offset, .. },
                ..
            } => offset,
            _ => 0.0,
        }
    }

    /// A copy on `device`.
    pub fn to_device(&self, device: &Device) -> Result<Placed> {
        let (tensors, offset) = (self.tensors(device)?, self.nested_offset());
        Placed::new(self.format(), self.dims(), self.decoded(), tensors, offset)
    }
}

impl Placed {
    /// `tensors` and `offset` as `Coded::tensors` and `Coded::nested_offset` gave them, on one device.
    ///
    /// Errors: tensors of another format or shape.
    pub fn new(
        format: Format,
        (rows, columns): (usize, usize),
        decoded: Dtype,
        tensors: Vec<Tensor>,
        offset: f32,
    ) -> Result<Self> {
        check_format(format)?;
        let (stride, group) = (format.stride(columns), format.group(columns));
        let mut tensors = tensors.into_iter();
        let mut next = || {
            let missing = || Error::new("a coded weight has too few parts").found(format);
            tensors.next().ok_or_else(missing)
        };
        let codes = next()?;
        let scales = match format {
            Format::Int8 { .. } => Scales::Int8 {
                stride,
                group,
                scales: next()?,
            },
            Format::Int4 { .. } => Scales::Int4 {
                stride,
                group,
                scales: next()?,
            },
            Format::Nf4 { double: false } => Scales::Nf4 { absmax: next()? },
            Format::Nf4 { double: true } => Scales::Nf4Double {
                codes: next()?,
                table: dynamic::signed(),
                scales: next()?,
                offset,
            },
        };
        let codes = coded::Placed {
            rows,
            columns,
            codes,
            scales,
            bf16: decoded == Dtype::Bf16,
        };
        codes.check()?;
        Ok(Self { format, decoded, codes })
    }

    pub fn format(&self) -> Format {
        self.format
    }

    /// `(O, I)`
    pub fn dims(&self) -> (usize, usize) {
        (self.codes.rows, self.codes.columns)
    }

    /// The type of the decoded values.
    pub fn decoded(&self) -> Dtype {
        self.decoded
    }

    /// Bytes of all parts.
    pub fn bytes(&self) -> u64 {
        self.format.bytes(self.codes.rows, self.codes.columns)
    }

    /// What `new` was given.
    pub fn tensors(&self) -> (Vec<Tensor>, f32) {
        let codes = self.codes.codes.clone();
        match &self.codes.scales {
            Scales::Int8 { scales, .. } | Scales::Int4 { scales, .. } => (vec![codes, scales.clone()], 0.0),
            Scales::Nf4 { absmax } => (vec![codes, absmax.clone()], 0.0),
            Scales::Nf4Double {
                codes: nested,
                scales,
                offset,
                ..
            } => (vec![codes, nested.clone(), scales.clone()], *offset),
        }
    }

    /// For products.
    pub(super) fn codes(&self) -> &coded::Placed {
        &self.codes
    }
}

impl std::fmt::Debug for Placed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (rows, columns) = self.dims();
        write!(f, "Placed({}, [{rows}, {columns}])", self.format)
    }
}
