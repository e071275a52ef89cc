//! Quantization, one weight at a time. The loops over the values are in `ops::quantized`.

use super::dynamic;
use super::format::Format;
use super::qmatrix::{BlockScales, QMatrix, check_format};
use crate::base::{Error, Result};
use crate::ops::Dtype;
use crate::ops::quantized::{self, DenseValues, NESTED};
use half::bf16;

/// A number type that can be quantized.
pub trait Quantizable: Copy + Send + Sync {
    /// The values for the operations.
    fn dense(values: &[Self]) -> DenseValues<'_>;
}

impl Quantizable for f32 {
    fn dense(values: &[Self]) -> DenseValues<'_> {
        DenseValues::F32(values)
    }
}

impl Quantizable for bf16 {
    fn dense(values: &[Self]) -> DenseValues<'_> {
        DenseValues::Bf16(values)
    }
}

/// Quantizes `values` `[rows, columns]`; products dequantize them to `dequantized_dtype`.
///
/// The error of an element is at most half the distance between two quantized values. This distance is absmax / 127
/// (int8), (max - min) / 15 of its group, widened by less than 2^-6 for the rounding of scale and minimum to bf16
/// (int4), or the gap between two levels (NF4).
///
/// # Errors
/// A number of values that does not fit the shape, an unknown group size, a value that is not finite.
pub fn quantize<V: Quantizable>(
    values: &[V],
    (rows, columns): (usize, usize),
    format: Format,
    dequantized_dtype: Dtype,
) -> Result<QMatrix> {
    check_format(format)?;
    if values.len() != rows * columns {
        return Err(
            Error::shape("the number of values of a weight does not match its shape")
                .found(format!("{} values", values.len()))
                .expected(format!("[{rows}, {columns}]")),
        );
    }
    let dense = V::dense(values);
    // Dequantization to bf16 rounds up at most to the next power of two, which must be finite.
    if !quantized::all_below(dense, 1e38) {
        return Err(Error::non_finite(
            "a weight cannot be quantized: a value is infinite, not a number, or above 1e38",
        )
        .hint("the model file is damaged: check its source"));
    }
    let (codes, scales) = match format {
        Format::Fp4 { .. } | Format::Scaled(_) => {
            return Err(Error::unsupported("a weight cannot be quantized to this format")
                .found(format)
                .expected(Format::ALL.map(Format::tag).join(", "))
                .hint("ft only reads this format"));
        }
        _ if values.is_empty() => empty(format),
        Format::Bf16 => (
            quantized::to_bf16(dense, columns, format.stride(columns)),
            BlockScales::None,
        ),
        Format::Int8 { .. } => {
            let (codes, scales) = quantized::to_int8(dense, columns, format.stride(columns), format.group(columns));
            (codes, BlockScales::F32(scales))
        }
        Format::Int4 { .. } => {
            let (codes, scales) = quantized::to_int4(dense, columns, format.stride(columns), format.group(columns));
            (codes, BlockScales::Pairs(scales))
        }
        Format::Nf4 { double } => {
            let (codes, absmax) = quantized::to_nf4(dense);
            let scales = if double {
                nested(&absmax)
            } else {
                BlockScales::F32(absmax)
            };
            (codes, scales)
        }
    };
    Ok(QMatrix::new(format, (rows, columns), dequantized_dtype, codes, scales))
}

fn empty(format: Format) -> (Vec<u8>, BlockScales) {
    let scales = match format {
        Format::Bf16 => BlockScales::None,
        Format::Int8 { .. } | Format::Nf4 { double: false } => BlockScales::F32(Vec::new()),
        Format::Int4 { .. } => BlockScales::Pairs(Vec::new()),
        _ => BlockScales::Double {
            absmax: Vec::new(),
            nested: Vec::new(),
            offset: 0.0,
        },
    };
    (Vec::new(), scales)
}

/// Quantizes the absmax of the blocks of NF4.
fn nested(absmax: &[f32]) -> BlockScales {
    let mean = absmax.iter().map(|x| *x as f64).sum::<f64>() / absmax.len() as f64;
    let offset = mean as f32;
    let table = dynamic::signed();
    let mut nested = Vec::with_capacity(absmax.len().div_ceil(NESTED));
    let mut quantized = Vec::with_capacity(absmax.len());
    for block in absmax.chunks(NESTED) {
        let largest = block.iter().fold(0f32, |m, x| m.max((x - offset).abs()));
        nested.push(largest);
        let by = if largest > 0.0 { 1.0 / largest } else { 0.0 };
        quantized.extend(
            block
                .iter()
                .map(|x| dynamic::nearest(table, ((x - offset) * by).clamp(-1.0, 1.0))),
        );
    }
    BlockScales::Double {
        absmax: quantized,
        nested,
        offset,
    }
}
