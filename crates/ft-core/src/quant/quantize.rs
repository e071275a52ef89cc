//! Quantization, one weight at a time. Rows or blocks are quantized in parallel and independently: the result does
//! not depend on the number of threads.

use super::dynamic;
use super::format::Format;
use super::qmatrix::{BlockScales, QMatrix, check_format};
use crate::base::{Error, Result};
use crate::ops::Dtype;
use crate::ops::quantized::{BLOCK, NESTED, NF4_TABLE, nearest};
use half::bf16;
use rayon::prelude::*;

/// A number type that can be quantized.
pub trait Quantizable: Copy + Send + Sync {
    /// The number as f32.
    fn f32(self) -> f32;
}

impl Quantizable for f32 {
    fn f32(self) -> f32 {
        self
    }
}

impl Quantizable for bf16 {
    fn f32(self) -> f32 {
        self.to_f32()
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
    // Dequantization to bf16 rounds up at most to the next power of two, which must be finite.
    if !values.par_iter().all(|x| x.f32().abs() < 1e38) {
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
        Format::Bf16 => (halves(values, columns, format.stride(columns)), BlockScales::None),
        Format::Int8 { .. } => int8(values, columns, format),
        Format::Int4 { .. } => int4(values, columns, format),
        Format::Nf4 { double } => nf4(values, double),
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

/// Rounds to bf16, nearest and ties to even; rows of `stride` bytes.
fn halves<V: Quantizable>(values: &[V], columns: usize, stride: usize) -> Vec<u8> {
    let mut codes = vec![0u8; values.len() / columns * stride];
    let rows = codes.par_chunks_mut(stride).zip(values.par_chunks(columns));
    rows.for_each(|(codes, row)| {
        for (code, x) in codes.as_chunks_mut::<2>().0.iter_mut().zip(row) {
            *code = bf16::from_f32(x.f32()).to_le_bytes();
        }
    });
    codes
}

/// Returns the absmax, computed in SIMD lanes.
fn absmax<V: Quantizable>(values: &[V]) -> f32 {
    let mut lanes = [0f32; 16];
    for block in values.chunks(16) {
        for (most, x) in lanes.iter_mut().zip(block) {
            let x = x.f32().abs();
            *most = if x > *most { x } else { *most };
        }
    }
    lanes.into_iter().fold(0.0, f32::max)
}

fn int8<V: Quantizable>(values: &[V], columns: usize, format: Format) -> (Vec<u8>, BlockScales) {
    let (rows, stride, group) = (values.len() / columns, format.stride(columns), format.group(columns));
    let groups = columns.div_ceil(group);
    let mut codes = vec![0u8; rows * stride];
    let mut scales = vec![0f32; rows * groups];
    let places = codes.par_chunks_mut(stride).zip(scales.par_chunks_mut(groups));
    places
        .zip(values.par_chunks(columns))
        .for_each(|((codes, scales), row)| {
            for ((codes, scale), row) in codes.chunks_mut(group).zip(scales).zip(row.chunks(group)) {
                *scale = absmax(row) / 127.0;
                if *scale > 0.0 {
                    for (code, x) in codes.iter_mut().zip(row) {
                        *code = nearest(x.f32() / *scale).clamp(-127.0, 127.0) as i8 as u8;
                    }
                }
            }
        });
    (codes, BlockScales::F32(scales))
}

fn int4<V: Quantizable>(values: &[V], columns: usize, format: Format) -> (Vec<u8>, BlockScales) {
    let (rows, stride, group) = (values.len() / columns, format.stride(columns), format.group(columns));
    let groups = columns.div_ceil(group);
    let mut codes = vec![0u8; rows * stride];
    let mut scales = vec![0u32; rows * groups];
    let places = codes.par_chunks_mut(stride).zip(scales.par_chunks_mut(groups));
    places
        .zip(values.par_chunks(columns))
        .for_each(|((codes, scales), row)| {
            for ((codes, word), row) in codes.chunks_mut(group / 2).zip(scales).zip(row.chunks(group)) {
                let (least, most) = row.iter().fold((f32::MAX, f32::MIN), |(least, most), x| {
                    (least.min(x.f32()), most.max(x.f32()))
                });
                // Rounded outward: the quantized range must include both ends.
                let minimum = down_to_bf16(least);
                let scale = -down_to_bf16(-((most as f64 - minimum as f64) / 15.0) as f32);
                *word = scale.to_bits() >> 16 | minimum.to_bits();
                for (i, x) in row.iter().enumerate() {
                    let code = if scale > 0.0 {
                        nearest((x.f32() - minimum) / scale).clamp(0.0, 15.0) as u8
                    } else {
                        0
                    };
                    codes[i / 2] |= if i % 2 == 0 { code << 4 } else { code };
                }
            }
        });
    (codes, BlockScales::Pairs(scales))
}

/// Returns the largest bf16 that is not above `x`. `x` is finite.
fn down_to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let cut = bits & 0xFFFF_0000;
    if x < 0.0 && bits != cut {
        f32::from_bits(cut + 0x1_0000)
    } else {
        f32::from_bits(cut)
    }
}

fn nf4<V: Quantizable>(values: &[V], double: bool) -> (Vec<u8>, BlockScales) {
    let mut codes = vec![0u8; values.len().div_ceil(2)];
    let mut absmax = vec![0f32; values.len().div_ceil(BLOCK)];
    let places = codes.par_chunks_mut(BLOCK / 2).zip(absmax.par_iter_mut());
    places
        .zip(values.par_chunks(BLOCK))
        .for_each(|((codes, absmax), block)| {
            *absmax = self::absmax(block);
            let by = 1.0 / *absmax;
            for (i, x) in block.iter().enumerate() {
                let code = nf4_code((x.f32() * by).clamp(-1.0, 1.0));
                codes[i / 2] |= if i % 2 == 0 { code << 4 } else { code };
            }
            if block.len() % 2 == 1 {
                // Padding with a zero, as in bitsandbytes.
                codes[block.len() / 2] |= nf4_code(0.0);
            }
        });
    if !double {
        return (codes, BlockScales::F32(absmax));
    }
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
    let scales = BlockScales::Double {
        absmax: quantized,
        nested,
        offset,
    };
    (codes, scales)
}

/// Returns the index of the level nearest to `x`; the lower one in a tie. A block of zeros gives NaN, which is
/// quantized as 0 (bitsandbytes quantizes it as -1, and its absmax may dequantize to a value other than 0).
fn nf4_code(x: f32) -> u8 {
    if x.is_nan() {
        return 7;
    }
    let mut best = (f32::MAX, 0);
    for (code, level) in NF4_TABLE.iter().enumerate() {
        let distance = (x - level).abs();
        if distance < best.0 {
            best = (distance, code);
        }
    }
    best.1 as u8
}
