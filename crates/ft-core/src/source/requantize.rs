//! Requantization: weights that are quantized while they are frozen, their values in the type of the model while they
//! are trained, and the conversion between both.

use super::{NumbersSink, ParamElements, ParamInfo};
use crate::base::{Error, Result};
use crate::ops::Dtype;
use crate::ops::{master, step, update};
use crate::quant::{self, Format, QMatrix};
use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;
use std::sync::Arc;

/// A weight that was requantized after its training.
#[derive(Debug, Clone, PartialEq)]
pub struct RequantizedWeight {
    /// Name of the weight.
    pub name: Arc<str>,
    /// Relative RMS error: RMS of the quantization error divided by the RMS of the weight.
    pub error: f64,
}

/// The exact value of a parameter: the weight in the model's type, and the low 16 bits of its fp32 master (i16).
pub(super) struct ExactParam {
    pub weight: Tensor,
    pub low: Option<Tensor>,
}

impl ExactParam {
    /// Splits f32 `values`.
    pub(super) fn new(values: Vec<f32>, shape: &[usize], dtype: Dtype, device: &Device) -> Result<Self> {
        match dtype {
            Dtype::F32 => Ok(Self {
                weight: Tensor::from_vec(values, shape, device)?,
                low: None,
            }),
            Dtype::Bf16 => {
                let count = values.len();
                let halves = values.into_par_iter().map(master::split);
                let (high, low): (Vec<bf16>, Vec<i16>) = halves.map(|(h, l)| (h, l as i16)).unzip();
                Ok(Self {
                    weight: Tensor::from_vec(high, shape, device)?,
                    low: Some(Tensor::from_vec(low, count, device)?),
                })
            }
            Dtype::F16 => {
                let count = values.len();
                let halves = values.into_par_iter().map(master::split_f16);
                let (high, low): (Vec<f16>, Vec<i16>) = halves.map(|(h, l)| (h, l as i16)).unzip();
                Ok(Self {
                    weight: Tensor::from_vec(high, shape, device)?,
                    low: Some(Tensor::from_vec(low, count, device)?),
                })
            }
        }
    }

    /// The exact f32 values, `[elements]`.
    pub(super) fn values(&self) -> Result<Vec<f32>> {
        match &self.low {
            Some(low) => step::join(&self.weight, low),
            None => update::to_f32_vec(&self.weight),
        }
    }

    pub(super) fn send(&self, sink: &mut NumbersSink) -> Result<()> {
        match (self.weight.dtype(), &self.low) {
            (DType::BF16, low) => {
                let low = low.as_ref().map(|l| l.flatten_all()?.to_vec1::<i16>()).transpose()?;
                update::with_bf16(&self.weight, |v| sink(ParamElements::Bf16(v, low.as_deref())))?
            }
            (DType::F16, low) => {
                let low = low.as_ref().map(|l| l.flatten_all()?.to_vec1::<i16>()).transpose()?;
                update::with_f16(&self.weight, |v| sink(ParamElements::F16(v, low.as_deref())))?
            }
            _ => update::with_slice(&self.weight, |v| sink(ParamElements::F32(v)))?,
        }
    }
}

/// Quantizes exact values; also returns the quantization error.
pub(super) fn requantize(
    values: &[f32],
    p: &ParamInfo,
    format: Format,
    dequantized_dtype: Dtype,
) -> Result<(QMatrix, RequantizedWeight)> {
    let quantized = quantize(values, p, format, dequantized_dtype)?;
    let (width, rows) = (quantized.dims().1.max(1), values.par_chunks(quantized.dims().1.max(1)));
    let sums: Vec<(f64, f64)> = rows
        .enumerate()
        .map_init(
            || vec![0f32; width],
            |buffer, (row, values)| {
                quantized.dequantize_row(row, buffer);
                let pairs = values.iter().zip(buffer.iter());
                pairs.fold((0.0, 0.0), |(lost, all), (x, y)| {
                    let (x, d) = (*x as f64, (*x - *y) as f64);
                    (lost + d * d, all + x * x)
                })
            },
        )
        .collect();
    let (lost, all) = sums.iter().fold((0.0, 0.0), |(a, b), (x, y)| (a + x, b + y));
    let error = if all > 0.0 { (lost / all).sqrt() } else { 0.0 };
    let requantized = RequantizedWeight {
        name: p.name.clone(),
        error,
    };
    Ok((quantized, requantized))
}

/// Errors: the parameter is not a matrix; the values cannot be quantized.
pub(super) fn quantize<V: quant::Quantizable>(
    values: &[V],
    p: &ParamInfo,
    format: Format,
    dequantized_dtype: Dtype,
) -> Result<QMatrix> {
    let &[rows, columns] = p.shape.as_slice() else {
        return Err(Error::new("only a matrix can be quantized")
            .at(&*p.name)
            .found(format!("shape {:?}, {format}", p.shape)));
    };
    quant::quantize(values, (rows, columns), format, dequantized_dtype).map_err(|e| e.or_at(&*p.name))
}
