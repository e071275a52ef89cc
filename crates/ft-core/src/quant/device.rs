//! Quantized weights as tensors of a device, for products on a GPU.

use super::dynamic;
use super::format::Format;
use super::qmatrix::{QMatrix, check_format, levels};
use crate::base::{Error, Result};
use crate::ops::Dtype;
use crate::ops::quantized::{self, Absmax, Products, QData, ScaleTensors};
use candle_core::{Device, Tensor};

/// A quantized weight `[O, I]` on a device. Immutable; share it in an `Arc`.
#[derive(Clone)]
pub struct DeviceQMatrix {
    format: Format,
    dequantized_dtype: Dtype,
    codes: quantized::QTensors,
}

impl QMatrix {
    /// Returns the quantized data as tensors of `device`: data u8, then the scales (f32 for int8 and NF4, u32 for
    /// int4, u8 and f32 for NF4 with double quantization, u8 and u32 for the quantized values of other tools). They are the
    /// input of `DeviceQMatrix::new`, with `nested_offset`.
    ///
    /// # Errors
    /// Not enough memory on the device.
    pub fn tensors(&self, device: &Device) -> Result<Vec<Tensor>> {
        let bytes = |v: &[u8]| Tensor::from_slice(v, v.len(), device);
        let floats = |v: &[f32]| Tensor::from_slice(v, v.len(), device);
        Ok(match self.view().codes {
            QData::Bf16 { codes, .. } => vec![bytes(codes)?],
            QData::Int8 { codes, scales, .. } => vec![bytes(codes)?, floats(scales)?],
            QData::Int4 { codes, scales, .. } => {
                vec![bytes(codes)?, Tensor::from_slice(scales, scales.len(), device)?]
            }
            QData::Scaled(data) => {
                let mut all = vec![bytes(data.codes)?, bytes(data.scales)?];
                if !data.zeros.is_empty() {
                    all.push(bytes(data.zeros)?);
                }
                if !data.order.is_empty() {
                    all.push(Tensor::from_slice(data.order, data.order.len(), device)?);
                }
                all
            }
            QData::Nf4 { codes, absmax, .. } => match absmax {
                Absmax::Plain(values) => vec![bytes(codes)?, floats(values)?],
                Absmax::Double {
                    codes: nested, scales, ..
                } => vec![bytes(codes)?, bytes(nested)?, floats(scales)?],
            },
        })
    }

    /// Returns the mean of the absmax, which NF4 with double quantization subtracts before it quantizes them; else 0.
    pub fn nested_offset(&self) -> f32 {
        match self.view().codes {
            QData::Nf4 {
                absmax: Absmax::Double { offset, .. },
                ..
            } => offset,
            _ => 0.0,
        }
    }

    /// Copies the weight to `device`.
    ///
    /// # Errors
    /// Not enough memory on the device.
    pub fn to_device(&self, device: &Device) -> Result<DeviceQMatrix> {
        let (tensors, offset) = (self.tensors(device)?, self.nested_offset());
        DeviceQMatrix::new(self.format(), self.dims(), self.dequantized_dtype(), tensors, offset)
    }
}

impl DeviceQMatrix {
    /// Takes `tensors` and `offset` from `QMatrix::tensors` and `QMatrix::nested_offset`, on one device.
    ///
    /// # Errors
    /// Tensors of another format or shape.
    pub fn new(
        format: Format,
        (rows, columns): (usize, usize),
        dequantized_dtype: Dtype,
        tensors: Vec<Tensor>,
        offset: f32,
    ) -> Result<Self> {
        check_format(format)?;
        let (stride, group) = (format.stride(columns), format.group(columns));
        let mut tensors = tensors.into_iter();
        let mut next = || {
            let missing = || Error::shape("a quantized weight has too few parts").found(format);
            tensors.next().ok_or_else(missing)
        };
        let codes = next()?;
        let scales = match format {
            Format::Bf16 => ScaleTensors::Bf16 { stride },
            Format::Int8 { .. } => ScaleTensors::Int8 {
                stride,
                group,
                scales: next()?,
            },
            Format::Int4 { .. } => ScaleTensors::Int4 {
                stride,
                group,
                scales: next()?,
            },
            Format::Scaled(scaled) => ScaleTensors::Scaled {
                kind: scaled.kind,
                stride,
                group,
                scales: next()?,
                zeros: scaled.zeros.then(&mut next).transpose()?,
                order: scaled.ordered.then(&mut next).transpose()?,
            },
            Format::Nf4 { double: false } | Format::Fp4 { double: false } => ScaleTensors::Nf4 {
                levels: levels(format),
                absmax: next()?,
            },
            Format::Nf4 { double: true } | Format::Fp4 { double: true } => ScaleTensors::Nf4Double {
                levels: levels(format),
                codes: next()?,
                table: dynamic::signed(),
                scales: next()?,
                offset,
            },
        };
        let codes = quantized::QTensors {
            rows,
            columns,
            codes,
            scales,
            dequantized_dtype,
            products: Products::Dequantized,
        };
        codes.check()?;
        Ok(Self {
            format,
            dequantized_dtype,
            codes,
        })
    }

    /// As `QMatrix::tensors`, for a copy to another device.
    pub fn tensors(&self) -> Vec<&Tensor> {
        let scales = match &self.codes.scales {
            ScaleTensors::Bf16 { .. } => vec![],
            ScaleTensors::Int8 { scales, .. } | ScaleTensors::Int4 { scales, .. } => vec![scales],
            ScaleTensors::Nf4 { absmax, .. } => vec![absmax],
            ScaleTensors::Scaled {
                scales, zeros, order, ..
            } => [Some(scales), zeros.as_ref(), order.as_ref()]
                .into_iter()
                .flatten()
                .collect(),
            ScaleTensors::Nf4Double { codes, scales, .. } => vec![codes, scales],
        };
        [vec![&self.codes.codes], scales].concat()
    }

    /// Returns the same weight in other tensors, in the order of `tensors`.
    ///
    /// # Errors
    /// As `new`.
    pub fn with_tensors(&self, tensors: Vec<Tensor>) -> Result<Self> {
        let offset = match self.codes.scales {
            ScaleTensors::Nf4Double { offset, .. } => offset,
            _ => 0.0,
        };
        Self::new(self.format, self.dims(), self.dequantized_dtype, tensors, offset)
    }

    /// Returns the same weight with other products. Weights in other formats than int8 with one scale per row are always
    /// dequantized.
    pub fn with_products(&self, products: Products) -> Self {
        let mut changed = self.clone();
        changed.codes.products = products;
        changed
    }

    /// The quantized format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Returns `(O, I)`.
    pub fn dims(&self) -> (usize, usize) {
        (self.codes.rows, self.codes.columns)
    }

    /// Returns the type of the dequantized values.
    pub fn dequantized_dtype(&self) -> Dtype {
        self.dequantized_dtype
    }

    /// Returns the bytes of all parts.
    pub fn bytes(&self) -> u64 {
        self.format.bytes(self.codes.rows, self.codes.columns)
    }

    /// Returns the tensors for products.
    pub(super) fn codes(&self) -> &quantized::QTensors {
        &self.codes
    }
}

impl std::fmt::Debug for DeviceQMatrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (rows, columns) = self.dims();
        write!(f, "DeviceQMatrix({}, [{rows}, {columns}])", self.format)
    }
}
