//! Products with a quantized weight: `y = x Wᵀ + b` and `dx = dy W`, as `linear` for dense weights. W `[O, I]` is
//! dequantized while the operands of a product are packed, panel by panel; for a few tokens row by row, in the L1
//! cache. Forward and backward use the same dequantized values. Dequantization to f32 is exact (one rounding of
//! scale times quantized value); a weight of a bf16 model is rounded to the nearest bf16 once more.

use super::cpu::dequantize::{round_bf16, round_table};
use super::cpu::math::ROUND;
use super::cpu::product::{CInit, Matrix, Operand, product};
use super::cpu::storage::{dims2, expect_dims, floats, tensor, unwritten};
use super::linear::read_bias;
use super::update::with_slices;
use candle_core::Tensor;
use ft_base::Result;

mod eight_bit;
mod scaled;
mod tensors;
#[cfg(feature = "cuda")]
pub(crate) use eight_bit::part;
pub use eight_bit::{FEW, Products};
pub use scaled::{CodeType, ProductType, ScaleType, ScaledData, ScaledKind};
#[cfg(feature = "cuda")]
pub(crate) use tensors::part_rows;
pub use tensors::{QTensors, ScaleTensors, TILE, work_bytes};

pub use super::cpu::dequantize::{FP4_TABLE, NF4_TABLE};
pub use super::cpu::quantize::{DenseValues, all_below, to_bf16, to_int4, to_int8, to_nf4};

/// Returns the nearest integer, ties to even, for `|x| < 2^22`. (`round_ties_even` is a function call if SSE4.1 is
/// not guaranteed, and then loops are not vectorized.)
pub fn nearest(x: f32) -> f32 {
    (x + ROUND) - ROUND
}

/// The bf16 number with these bytes, the low one first.
#[inline(always)]
pub(crate) fn widen(low: u8, high: u8) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes([low, high])) << 16)
}

/// The scale and the minimum of a group of int4 codes, both bf16: the low and the high half of `word`.
#[inline(always)]
pub fn scale_and_minimum(word: u32) -> (f32, f32) {
    (f32::from_bits(word << 16), f32::from_bits(word & 0xFFFF_0000))
}

/// A borrowed quantized weight `[O, I]`.
#[derive(Debug, Clone, Copy)]
pub struct QMatrixView<'a> {
    /// O
    pub rows: usize,
    /// I
    pub columns: usize,
    /// The integers and their scales.
    pub codes: QData<'a>,
    /// Dequantized values are rounded to bf16.
    pub bf16: bool,
    /// The product with a few rows may round these to 15 bits, to multiply integers: faster, and not equal to the product with
    /// the dequantized values.
    pub rounds_rows: bool,
}

/// The quantized data of a weight, in one of the formats.
#[derive(Debug, Clone, Copy)]
pub enum QData<'a> {
    /// value = code · scale, code a signed byte. Rows of `codes` are `stride` bytes apart; `group` columns share a
    /// scale; `scales` is `[O, ceil(I / group)]`.
    Int8 {
        /// Signed bytes, a row after the other.
        codes: &'a [u8],
        /// Bytes from one row to the next.
        stride: usize,
        /// Columns that share a scale.
        group: usize,
        /// One scale per row and group.
        scales: &'a [f32],
    },
    /// value = minimum + code · scale, two codes per byte, the first in the high half. `scales` is
    /// `[O, ceil(I / group)]`: a bf16 scale in the low 16 bits of a word, a bf16 minimum in the high 16 bits.
    Int4 {
        /// Two codes per byte.
        codes: &'a [u8],
        /// Bytes from one row to the next.
        stride: usize,
        /// Columns that share a scale and a minimum.
        group: usize,
        /// One scale and minimum per row and group.
        scales: &'a [u32],
    },
    /// `value = levels[code] · absmax`, two codes per byte, the first in the high half; blocks of 64 elements of the
    /// flattened weight share an absmax.
    Nf4 {
        /// Two codes per byte.
        codes: &'a [u8],
        /// The values of the codes: `NF4_TABLE` or `FP4_TABLE`.
        levels: &'static [f32; 16],
        /// The largest magnitude of each block.
        absmax: Absmax<'a>,
    },
    /// Codes of another tool.
    Scaled(ScaledData<'a>),
    /// bf16 numbers, little-endian; rows are `stride` bytes apart.
    Bf16 {
        /// Two bytes per number.
        codes: &'a [u8],
        /// Bytes from one row to the next.
        stride: usize,
    },
}

/// The absmax of each NF4 block, plain or with double quantization.
#[derive(Debug, Clone, Copy)]
pub enum Absmax<'a> {
    /// One f32 per block.
    Plain(&'a [f32]),
    /// The absmax of block b is `table[codes[b]] · scales[b / 256] + offset`.
    Double {
        /// One code per block.
        codes: &'a [u8],
        /// The values of the 256 codes.
        table: &'a [f32; 256],
        /// One scale per 256 blocks.
        scales: &'a [f32],
        /// The mean of the absmax values, subtracted before quantization.
        offset: f32,
    },
}

impl Absmax<'_> {
    /// Returns the absmax of block `block`.
    #[inline(always)]
    pub fn get(&self, block: usize) -> f32 {
        match self {
            Absmax::Plain(values) => values[block],
            Absmax::Double {
                codes,
                table,
                scales,
                offset,
            } => table[codes[block] as usize] * scales[block / NESTED] + offset,
        }
    }

    fn blocks(&self) -> usize {
        match self {
            Absmax::Plain(values) => values.len(),
            Absmax::Double { codes, scales, .. } => codes.len().min(scales.len() * NESTED),
        }
    }
}

/// A weight in one of two forms: D and Q are how an operation reads a dense and a quantized weight.
#[derive(Debug, Clone, Copy)]
pub enum WeightView<D, Q> {
    /// A dense weight.
    Dense(D),
    /// A quantized weight.
    Quantized(Q),
}

/// Elements of an NF4 block.
pub const BLOCK: usize = 64;
/// NF4 blocks that share a scale of their quantized absmax.
pub const NESTED: usize = 256;

/// Elements that share one scale, and the parameters of their dequantization.
pub(crate) enum ScaleRun {
    /// First byte, scale.
    Int8(usize, f32),
    /// Index of the first 4-bit value, table of the 16 values.
    Nibbles(usize, [f32; 16]),
    /// First byte, scale and zero point of `QData::Scaled`.
    Bytes(usize, f32, f32),
    /// First byte of bf16 numbers.
    Halves(usize),
}

/// True if `values` has `rows` times `each`, false if that number overflows.
pub(crate) fn holds<T>(values: &[T], rows: usize, each: usize) -> bool {
    rows.checked_mul(each).is_some_and(|n| values.len() >= n)
}

impl QMatrixView<'_> {
    /// True if all data that dequantization reads lies inside the slices.
    pub fn fits(&self) -> bool {
        let (rows, columns) = (self.rows, self.columns);
        match self.codes {
            QData::Int8 {
                codes,
                stride,
                group,
                scales,
            } => {
                let groups = columns.div_ceil(group.max(1));
                group > 0 && stride >= columns && holds(codes, rows, stride) && holds(scales, rows, groups)
            }
            QData::Int4 {
                codes,
                stride,
                group,
                scales,
            } => {
                let groups = columns.div_ceil(group.max(1));
                let inside = stride >= columns.div_ceil(2) && holds(codes, rows, stride);
                group > 0 && group % 2 == 0 && inside && holds(scales, rows, groups)
            }
            QData::Nf4 { codes, absmax, .. } => {
                let fits = |n: usize| codes.len() >= n.div_ceil(2) && absmax.blocks() >= n.div_ceil(BLOCK);
                rows.checked_mul(columns).is_some_and(fits)
            }
            QData::Scaled(data) => data.fits(rows, columns),
            QData::Bf16 { codes, stride } => stride / 2 >= columns && holds(codes, rows, stride),
        }
    }

    /// Returns the length of the run that begins at element (`row`, `column`), at most `left`, and how to
    /// dequantize it.
    #[inline(always)]
    pub(crate) fn run(&self, row: usize, column: usize, left: usize) -> (usize, ScaleRun) {
        match self.codes {
            QData::Int8 {
                stride, group, scales, ..
            } => {
                let scale = scales[row * self.columns.div_ceil(group) + column / group];
                let n = (group - column % group).min(left);
                (n, ScaleRun::Int8(row * stride + column, scale))
            }
            QData::Int4 {
                stride, group, scales, ..
            } => {
                let word = scales[row * self.columns.div_ceil(group) + column / group];
                let (scale, minimum) = scale_and_minimum(word);
                let mut table = [0f32; 16];
                for (code, value) in table.iter_mut().enumerate() {
                    // The product of 4 and 8 bits is exact: with or without FMA, the sum is the same.
                    *value = code as f32 * scale + minimum;
                }
                let n = (group - column % group).min(left);
                (n, ScaleRun::Nibbles(2 * row * stride + column, self.finish(table)))
            }
            QData::Scaled(data) => data.run(self.columns, (row, column), left, self.bf16),
            QData::Bf16 { stride, .. } => (left, ScaleRun::Halves(row * stride + 2 * column)),
            QData::Nf4 { absmax, levels, .. } => {
                let at = row * self.columns + column;
                let scale = absmax.get(at / BLOCK);
                let mut table = *levels;
                for value in &mut table {
                    *value *= scale;
                }
                let n = (BLOCK - at % BLOCK).min(left);
                (n, ScaleRun::Nibbles(at, self.finish(table)))
            }
        }
    }

    #[inline(always)]
    fn finish(&self, mut table: [f32; 16]) -> [f32; 16] {
        if self.bf16 {
            round_table(&mut table);
        }
        table
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match self.codes {
            QData::Int8 { codes, .. }
            | QData::Int4 { codes, .. }
            | QData::Nf4 { codes, .. }
            | QData::Bf16 { codes, .. } => codes,
            QData::Scaled(data) => data.codes,
        }
    }

    /// Dequantizes columns `start..start + to.len()` of row `row`. Panics outside the weight.
    pub fn dequantize(&self, row: usize, start: usize, to: &mut [f32]) {
        super::cpu::dequantize::dequantize(super::CpuBackend::current().vector_isa(), self, row, start, to)
    }

    /// Dequantizes one element, by the definition of the format.
    pub fn element(&self, row: usize, column: usize) -> f32 {
        match (self.run(row, column, 1).1, self.bf16) {
            (ScaleRun::Int8(at, scale), bf16) => {
                let value = self.bytes()[at] as i8 as f32 * scale;
                if bf16 { round_bf16(value) } else { value }
            }
            (ScaleRun::Bytes(at, scale, zero), bf16) => {
                let mut value = [0.0];
                if let QData::Scaled(data) = self.codes {
                    data.bytes(&self.bytes()[at..=at], (scale, zero), bf16, &mut value);
                }
                value[0]
            }
            (ScaleRun::Halves(at), _) => widen(self.bytes()[at], self.bytes()[at + 1]),
            (ScaleRun::Nibbles(at, table), _) => {
                let byte = self.bytes()[at / 2];
                table[(if at % 2 == 0 { byte >> 4 } else { byte & 15 }) as usize]
            }
        }
    }
}

/// Computes `x·wᵀ + bias`, `[N, O]` f32, from `x [N, I]` f32, `w [O, I]`, `bias [O]` f32 or bf16.
///
/// # Errors
/// Shapes that do not fit, tensors that are not contiguous or not on the CPU.
pub fn forward(x: &Tensor, w: QMatrixView<'_>, bias: Option<&Tensor>) -> Result<Tensor> {
    let (rows, inputs) = (dims2(x, "x of a linear")?.0, w.columns);
    expect_dims(x, "x of a linear", &[rows, inputs])?;
    let bias = read_bias(bias, w.rows)?;
    let mut y = unwritten(rows * w.rows);
    floats(x, "x of a linear", |x| {
        let start = bias.as_deref().map_or(CInit::Zero, CInit::Bias);
        forward_slices(rows, &mut y, start, x, w);
        Ok(())
    })?;
    tensor(y, (rows, w.rows))
}

/// Computes `y [N, O] += x·wᵀ`, `x [N, I]`, both f32. `y` must not share storage with `x`.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn forward_add(y: &Tensor, x: &Tensor, w: QMatrixView<'_>) -> Result<()> {
    let rows = dims2(x, "x of a linear")?.0;
    expect_dims(x, "x of a linear", &[rows, w.columns])?;
    expect_dims(y, "y of a linear", &[rows, w.rows])?;
    with_slices(y, x, |y, x| forward_slices(rows, y, CInit::C, x, w))
}

fn forward_slices(rows: usize, y: &mut [f32], start: CInit<&[f32]>, x: &[f32], w: QMatrixView<'_>) {
    let (n, k) = (w.rows, w.columns);
    let (a, b) = (
        Matrix::k_inner(Operand::F32(x), k),
        Matrix::k_inner(Operand::Quantized(w), k),
    );
    product((rows, n, k), y, start, a, b, b.rounding());
}

/// Computes `dx = dy·w`, `[N, I]` f32, from `dy [N, O]` f32 and `w [O, I]`.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn backward_input(dy: &Tensor, w: QMatrixView<'_>) -> Result<Tensor> {
    let rows = dims2(dy, "dy of a linear")?.0;
    expect_dims(dy, "dy of a linear", &[rows, w.rows])?;
    let mut dx = unwritten(rows * w.columns);
    floats(dy, "dy of a linear", |dy| {
        backward_slices(rows, &mut dx, CInit::Zero, dy, w);
        Ok(())
    })?;
    tensor(dx, (rows, w.columns))
}

/// Computes `dx [N, I] += dy·w`; as `backward_input`. `dx` must not share storage with `dy`.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn backward_input_add(dx: &Tensor, dy: &Tensor, w: QMatrixView<'_>) -> Result<()> {
    let rows = dims2(dy, "dy of a linear")?.0;
    expect_dims(dy, "dy of a linear", &[rows, w.rows])?;
    expect_dims(dx, "dx of a linear", &[rows, w.columns])?;
    with_slices(dx, dy, |dx, dy| backward_slices(rows, dx, CInit::C, dy, w))
}

fn backward_slices(rows: usize, dx: &mut [f32], start: CInit<&[f32]>, dy: &[f32], w: QMatrixView<'_>) {
    let (n, k) = (w.columns, w.rows);
    let (a, b) = (
        Matrix::k_inner(Operand::F32(dy), k),
        Matrix::k_outer(Operand::Quantized(w), n),
    );
    product((rows, n, k), dx, start, a, b, b.rounding());
}
