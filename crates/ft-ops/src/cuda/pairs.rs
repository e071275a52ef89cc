//! LoRA pairs on a GPU: copies of their matrices, and products with columns of a matrix.

use super::gemm::{GpuMatrix, gemm_scaled};
use super::{Arg, FloatType, Gpu, Grid, address, address_of, aligned, narrow};
use crate::lora_pairs::{ColumnOperand, MatrixCopy};
use candle_core::cuda::cudarc::driver::DeviceRepr;
use candle_core::{DType, Device, Tensor};
use ft_base::{Error, Result};

/// Copies in one launch, as `MOST_COPIES` in `cuda/pairs.cu`.
const MOST: usize = 32;
/// Words of a copy there.
const WORDS: usize = 6;
/// Elements in a vector of a copy.
const PACK: usize = 4;

/// The argument of the kernel: for each copy the addresses, rows, columns and stride, and whether it is packed.
#[repr(C)]
struct Copies([[u64; WORDS]; MOST]);

// SAFETY: plain words, in the layout of `Copies` of the kernel.
unsafe impl DeviceRepr for Copies {}

pub(crate) fn empty(dims: (usize, usize), dtype: DType, device: &Device) -> Result<Tensor> {
    Gpu::on(device)?.empty(dims, dtype)
}

/// Copies all matrices into tensors of type `dtype`.
pub(crate) fn copy(copies: &[MatrixCopy<'_>], dtype: DType) -> Result<()> {
    const NAME: &str = "a matrix of an adapter";
    let Some(first) = copies.first() else { return Ok(()) };
    let (gpu, kind) = (Gpu::of(first.from, NAME)?, FloatType::of(&first.to, NAME)?);
    for part in copies.chunks(MOST) {
        let mut jobs = Copies([[0; WORDS]; MOST]);
        let mut most = 0;
        for (job, copy) in jobs.0.iter_mut().zip(part) {
            let (rows, columns) = copy.from.dims2()?;
            let stride = copy.to.dim(1)?;
            if columns > stride || rows > 0 && copy.first + (rows - 1) * stride + columns > copy.to.elem_count() {
                return Err(Error::shape("a matrix of an adapter does not fit").found(format!("[{rows}, {columns}]")));
            }
            let from = address_of(copy.from, NAME, DType::F32)?;
            let minus = match copy.minus {
                Some(minus) if minus.dims() == copy.from.dims() => address_of(minus, NAME, DType::F32)?,
                Some(minus) => {
                    return Err(Error::shape("two matrices of an adapter differ in shape")
                        .found(format!("{:?}", minus.dims()))
                        .expected(format!("[{rows}, {columns}]")));
                }
                None => 0,
            };
            let to = address_of(&copy.to, NAME, dtype)? + (copy.first * kind.bytes()) as u64;
            let even = columns.is_multiple_of(PACK) && stride.is_multiple_of(PACK);
            let packed = even && aligned(&[from, minus]) && to.is_multiple_of((PACK * kind.bytes()) as u64);
            let widths = narrow(columns, NAME)? as u64 | (narrow(stride, NAME)? as u64) << 32;
            *job = [from, minus, to, rows as u64, widths, packed as u64];
            most = most.max(rows * columns);
        }
        let mut grid = Grid::line(most.div_ceil(PACK * 256).clamp(1, 256), 256);
        grid.blocks.1 = part.len();
        let name = ["copy_pairs_", kind.name()];
        // SAFETY: every matrix lies inside of its tensor, as checked above.
        unsafe { gpu.launch_with("pairs", name, grid, &[] as &[Arg], Some(&jobs))? };
    }
    Ok(())
}

/// Computes C `[m, n]` = alpha · A `[m, k]` · B `[k, n]`, or `C +=` if `add`.
pub(crate) fn product(
    (m, n, k): (usize, usize, usize),
    a: ColumnOperand<'_>,
    b: ColumnOperand<'_>,
    c: ColumnOperand<'_>,
    alpha: f32,
    add: bool,
) -> Result<()> {
    const NAME: &str = "an operand of a LoRA product";
    // Lines in memory, and elements of each that the product uses.
    let matrix = |of: ColumnOperand<'_>, lines: usize, used: usize| -> Result<GpuMatrix> {
        let (kind, stride) = (FloatType::of(of.of, NAME)?, of.of.dim(1)?);
        if used > stride || lines > 0 && of.first + (lines - 1) * stride + used > of.of.elem_count() {
            return Err(Error::shape("the matrices of a LoRA product do not fit")
                .found(format!("{:?}", of.of.dims()))
                .expected(format!("{lines} rows with {used} columns")));
        }
        let first = address(of.of, NAME)? + (of.first * kind.bytes()) as u64;
        Ok(GpuMatrix {
            transposed: of.transposed,
            ..GpuMatrix::new(first, kind, stride)
        })
    };
    let lines = |of: &ColumnOperand<'_>, rows: usize, columns: usize| {
        if of.transposed {
            (columns, rows)
        } else {
            (rows, columns)
        }
    };
    let ((a_lines, a_used), (b_lines, b_used)) = (lines(&a, m, k), lines(&b, k, n));
    let gpu = Gpu::of(c.of, NAME)?;
    if k == 0 {
        return Err(Error::internal("a LoRA product without a rank"));
    }
    let (a, b, c) = (
        matrix(a, a_lines, a_used)?,
        matrix(b, b_lines, b_used)?,
        matrix(c, m, n)?,
    );
    // SAFETY: the matrices lie inside of their tensors; the result is a tensor of its own.
    unsafe { gemm_scaled(&gpu, (m, n, k), a, b, c, alpha, add) }
}
