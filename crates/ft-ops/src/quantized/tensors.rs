//! Quantized weights as tensors, on the CPU or a GPU, and their products. On a GPU, W is dequantized block by block
//! into one bounded buffer, each block for the product that follows; for a few tokens in registers. The dequantized
//! values are bit-equal to those of the CPU.

use super::{Absmax, BLOCK, NESTED, Products, QData, QMatrixView, ScaledData, ScaledKind};
use crate::cpu::storage::{dims2, expect_dims};
use crate::dtype::Dtype;
use candle_core::{DType, Storage, Tensor, WithDType};
use ft_base::{Error, Result};

/// Largest number of elements of W `[O, I]` that a GPU dequantizes at a time.
pub const TILE: usize = 1 << 25;

/// Rows of a part of W with rows of `inputs` elements: in 16-byte units every part of the weight and of the result is
/// aligned, which cuBLAS needs for its fast kernels.
#[cfg(any(test, feature = "cuda"))]
pub(crate) fn part_rows(inputs: usize) -> usize {
    const UNIT: usize = 64;
    match TILE / inputs {
        rows if rows >= UNIT => rows / UNIT * UNIT,
        rows => rows.max(1),
    }
}

/// Returns the workspace in bytes that products with a weight `[O, I]` need on a GPU, without operands and results.
pub fn work_bytes(rows: usize, columns: usize, dequantized_dtype: Dtype) -> u64 {
    let lines = rows.max(columns).max(1);
    // A line is a row (forward) or a column (backward).
    let most = (rows * columns).min(TILE.max(lines));
    most as u64 * dequantized_dtype.bytes()
}

/// A quantized weight `[O, I]`, as `QMatrixView`, in tensors of one device.
#[derive(Debug, Clone)]
pub struct QTensors {
    /// O
    pub rows: usize,
    /// I
    pub columns: usize,
    /// u8
    pub codes: Tensor,
    /// The format, with its scales.
    pub scales: ScaleTensors,
    /// Type of the dequantized values.
    pub dequantized_dtype: Dtype,
    /// How a GPU multiplies with it.
    pub products: Products,
}

/// Scales and their layout, as in `QData`.
#[derive(Debug, Clone)]
pub enum ScaleTensors {
    /// No scales: `codes` has the bytes of bf16 numbers.
    Bf16 {
        /// Bytes from one row of `codes` to the next.
        stride: usize,
    },
    /// f32
    Int8 {
        /// Bytes from one row of `codes` to the next.
        stride: usize,
        /// Columns that share a scale.
        group: usize,
        /// `[O, ceil(I / group)]`
        scales: Tensor,
    },
    /// u32
    Int4 {
        /// Bytes from one row of `codes` to the next.
        stride: usize,
        /// Columns that share a scale and a minimum.
        group: usize,
        /// `[O, ceil(I / group)]`: a bf16 scale and a bf16 minimum.
        scales: Tensor,
    },
    /// f32
    Nf4 {
        /// `NF4_TABLE` or `FP4_TABLE`.
        levels: &'static [f32; 16],
        /// One value per block of 64 elements.
        absmax: Tensor,
    },
    /// `codes` u8, `scales` f32.
    Nf4Double {
        /// `NF4_TABLE` or `FP4_TABLE`.
        levels: &'static [f32; 16],
        /// One code per block of 64 elements.
        codes: Tensor,
        /// The values of the 256 codes.
        table: &'static [f32; 256],
        /// One scale per 256 blocks.
        scales: Tensor,
        /// The mean of the absmax values, subtracted before quantization.
        offset: f32,
    },
    /// As `ScaledData`: `scales` and `zeros` u8, `order` u32.
    Scaled {
        /// The arithmetic.
        kind: ScaledKind,
        /// Bytes from one row of `codes` to the next.
        stride: usize,
        /// Columns that share a scale and a zero point.
        group: usize,
        /// The bytes of `[O, ceil(I / group)]` scales.
        scales: Tensor,
        /// `[O, ceil(I / group)]`
        zeros: Option<Tensor>,
        /// `[I]`
        order: Option<Tensor>,
    },
}

impl QTensors {
    /// Checks that the tensors fit the format and the shape.
    ///
    /// # Errors
    /// A tensor that is too small or of the wrong type; rows or groups that the kernels do not support.
    pub fn check(&self) -> Result<()> {
        let (rows, columns) = (self.rows, self.columns);
        let blocks = (rows * columns).div_ceil(BLOCK);
        let (codes, wanted) = match &self.scales {
            ScaleTensors::Bf16 { stride } if *stride < 2 * columns || *stride % 16 != 0 => {
                return Err(Error::shape("the rows of a weight in bf16 do not match its shape"));
            }
            ScaleTensors::Bf16 { stride } => (rows * stride, Vec::new()),
            ScaleTensors::Int8 { stride, group, scales } | ScaleTensors::Int4 { stride, group, scales } => {
                let int8 = matches!(self.scales, ScaleTensors::Int8 { .. });
                let (width, dtype) = if int8 {
                    (columns, DType::F32)
                } else {
                    (columns.div_ceil(2), DType::U32)
                };
                // A kernel dequantizes up to 32 columns with one scale.
                let regular = *group >= columns || group.is_power_of_two() && *group >= 32;
                if *stride < width || *stride % 16 != 0 || !regular {
                    return Err(Error::shape(
                        "the rows or groups of a quantized weight do not match its shape",
                    ));
                }
                let groups = rows * columns.div_ceil((*group).max(1));
                (rows * stride, vec![(scales, dtype, groups)])
            }
            ScaleTensors::Scaled {
                kind,
                stride,
                group,
                scales,
                zeros,
                order,
            } => {
                let nibble = kind.code.is_nibble();
                let width = if nibble { columns.div_ceil(2) } else { columns };
                let regular = *group >= columns || group.is_power_of_two() && *group >= 32;
                if *stride < width || *stride % 16 != 0 || !regular {
                    return Err(Error::shape(
                        "the rows or groups of a quantized weight do not match its shape",
                    ));
                }
                let groups = rows * columns.div_ceil((*group).max(1));
                let mut parts = vec![(scales, DType::U8, groups * kind.scale.bytes())];
                parts.extend(zeros.iter().map(|zeros| (zeros, DType::U8, groups)));
                parts.extend(order.iter().map(|order| (order, DType::U32, columns)));
                (rows * stride, parts)
            }
            ScaleTensors::Nf4 { absmax, .. } => ((rows * columns).div_ceil(2), vec![(absmax, DType::F32, blocks)]),
            ScaleTensors::Nf4Double { codes, scales, .. } => {
                let nested = blocks.div_ceil(NESTED);
                let parts = vec![(codes, DType::U8, blocks), (scales, DType::F32, nested)];
                ((rows * columns).div_ceil(2), parts)
            }
        };
        for (tensor, dtype, least) in wanted.into_iter().chain([(&self.codes, DType::U8, codes)]) {
            if tensor.dtype() != dtype || tensor.elem_count() < least || !tensor.is_contiguous() {
                return Err(Error::shape("a part of a quantized weight does not match its shape")
                    .found(format!("{} {:?}", tensor.dtype().as_str(), tensor.dims()))
                    .expected(format!("{} {least}", dtype.as_str())));
            }
        }
        Ok(())
    }

    /// Runs `f` on the quantized data, which must be on the CPU.
    fn with_view<R>(&self, f: impl FnOnce(QMatrixView) -> Result<R>) -> Result<R> {
        let (rows, columns, bf16) = (self.rows, self.columns, self.dequantized_dtype == Dtype::Bf16);
        self.with_codes(|codes| {
            f(QMatrixView {
                rows,
                columns,
                codes,
                bf16,
                rounds_rows: false,
            })
        })
    }

    fn with_codes<R>(&self, f: impl FnOnce(QData) -> Result<R>) -> Result<R> {
        slice(&self.codes, |codes: &[u8]| match &self.scales {
            ScaleTensors::Bf16 { stride } => f(QData::Bf16 { codes, stride: *stride }),
            ScaleTensors::Int8 { stride, group, scales } => slice(scales, |scales| {
                let (stride, group) = (*stride, *group);
                f(QData::Int8 {
                    codes,
                    stride,
                    group,
                    scales,
                })
            }),
            ScaleTensors::Int4 { stride, group, scales } => slice(scales, |scales| {
                let (stride, group) = (*stride, *group);
                f(QData::Int4 {
                    codes,
                    stride,
                    group,
                    scales,
                })
            }),
            ScaleTensors::Scaled {
                kind,
                stride,
                group,
                scales,
                zeros,
                order,
            } => slice(scales, |scales| {
                let data = ScaledData {
                    kind: *kind,
                    codes,
                    stride: *stride,
                    group: *group,
                    scales,
                    zeros: &[],
                    order: &[],
                };
                optional(zeros, |zeros| {
                    optional(order, |order| f(QData::Scaled(ScaledData { zeros, order, ..data })))
                })
            }),
            ScaleTensors::Nf4 { levels, absmax } => slice(absmax, |absmax| {
                let absmax = Absmax::Plain(absmax);
                f(QData::Nf4 { codes, levels, absmax })
            }),
            ScaleTensors::Nf4Double {
                levels,
                codes: nested,
                table,
                scales,
                offset,
            } => slice(nested, |nested| {
                slice(scales, |scales| {
                    let absmax = Absmax::Double {
                        codes: nested,
                        table,
                        scales,
                        offset: *offset,
                    };
                    f(QData::Nf4 { codes, levels, absmax })
                })
            }),
        })
    }

    /// Returns dequantized rows `first..first + n` in f32 on the host, `[n · I]`.
    ///
    /// # Errors
    /// The rows are outside of the weight (`Shape`).
    pub fn rows(&self, first: usize, n: usize) -> Result<Vec<f32>> {
        if first + n > self.rows {
            return Err(Error::shape("a row range is outside of its weight").found(first + n));
        }
        on_gpu!(self.codes, crate::cuda::quantized::rows(self, first, n));
        let mut values = vec![0f32; n * self.columns];
        self.with_view(|view| {
            let rows = values.chunks_exact_mut(self.columns.max(1)).enumerate();
            rows.for_each(|(row, to)| view.dequantize(first + row, 0, to));
            Ok(())
        })?;
        Ok(values)
    }

    /// Computes `x·wᵀ + bias`, `[N, O]`, from `x [N, I]` and `bias [O]`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn forward(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (rows, _) = dims2(x, "x of a linear")?;
        expect_dims(x, "x of a linear", &[rows, self.columns])?;
        if let Some(bias) = bias {
            expect_dims(bias, "the bias of a linear", &[self.rows])?;
        }
        on_gpu!(x, crate::cuda::quantized::forward(x, self, bias));
        self.with_view(|view| super::forward(x, view, bias))
    }

    /// Computes `y [N, O] += x·wᵀ` from `x [N, I]`. `y` must not share storage with `x`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn forward_add(&self, y: &Tensor, x: &Tensor) -> Result<()> {
        let (rows, _) = dims2(x, "x of a linear")?;
        expect_dims(x, "x of a linear", &[rows, self.columns])?;
        expect_dims(y, "y of a linear", &[rows, self.rows])?;
        on_gpu!(x, crate::cuda::quantized::forward_add(y, x, self));
        self.with_view(|view| super::forward_add(y, x, view))
    }

    /// Computes `dx = dy·w`, `[N, I]`, from `dy [N, O]`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn backward_input(&self, dy: &Tensor) -> Result<Tensor> {
        let (rows, _) = dims2(dy, "dy of a linear")?;
        expect_dims(dy, "dy of a linear", &[rows, self.rows])?;
        on_gpu!(dy, crate::cuda::quantized::backward_input(dy, self));
        self.with_view(|view| super::backward_input(dy, view))
    }

    /// Computes `dx [N, I] += dy·w` from `dy [N, O]`. `dx` must not share storage with `dy`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn backward_input_add(&self, dx: &Tensor, dy: &Tensor) -> Result<()> {
        let (rows, _) = dims2(dy, "dy of a linear")?;
        expect_dims(dy, "dy of a linear", &[rows, self.rows])?;
        expect_dims(dx, "dx of a linear", &[rows, self.columns])?;
        on_gpu!(dy, crate::cuda::quantized::backward_input_add(dx, dy, self));
        self.with_view(|view| super::backward_input_add(dx, dy, view))
    }
}

/// Runs `f` on the elements of a contiguous tensor on the CPU.
fn slice<T: WithDType, R>(t: &Tensor, f: impl FnOnce(&[T]) -> Result<R>) -> Result<R> {
    let (storage, layout) = t.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(storage), Some((start, end))) => f(&storage.as_slice::<T>()?[start..end]),
        _ => Err(Error::unsupported("quantized weights are not supported on this device")),
    }
}

/// Like `slice`; `None` is passed as an empty slice.
fn optional<T: WithDType, R>(t: &Option<Tensor>, f: impl FnOnce(&[T]) -> Result<R>) -> Result<R> {
    match t {
        Some(t) => slice(t, f),
        None => f(&[]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_weight_are_aligned() {
        assert_eq!(part_rows(4864), TILE / 4864 / 64 * 64);
        assert!(part_rows(4864).is_multiple_of(64) && part_rows(4864) * 4864 <= TILE);
        assert_eq!((part_rows(TILE / 3), part_rows(2 * TILE)), (3, 1));
    }
}
