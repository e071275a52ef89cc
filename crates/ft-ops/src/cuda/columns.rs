//! Column sums of a matrix, in two stages with a fixed order.

use super::{Arg, FloatType, Gpu, Grid, address, address_of, aligned};
use candle_core::{DType, Tensor};
use ft_base::Result;

/// Same values as in `cuda/columns.cu`.
const ACROSS: usize = 32;
const DOWN: usize = 8;
/// Elements that a thread reads at a time.
const PACK: usize = 4;
/// Number of blocks that keeps a large GPU busy.
const BLOCKS: usize = 1024;
const MOST_PARTS: usize = 256;

/// Sums the rows of `a` `[rows, columns]`, or with `Some((b, factor))` of `a · b · factor`, with b of the shape of
/// a and factor f32 `[rows]`. Returns `[columns]` f32.
pub(crate) fn sums(
    gpu: &Gpu,
    a: &Tensor,
    product: Option<(&Tensor, &Tensor)>,
    sizes: (usize, usize),
) -> Result<Tensor> {
    sum(gpu, a, product.map(|(b, factor)| (b, Some(factor))), sizes)
}

/// Sums the rows of `a · b`, `[rows, columns]` each, of one type. Returns `[columns]` f32.
pub(crate) fn products(gpu: &Gpu, a: &Tensor, b: &Tensor, sizes: (usize, usize)) -> Result<Tensor> {
    sum(gpu, a, Some((b, None)), sizes)
}

fn sum(
    gpu: &Gpu,
    a: &Tensor,
    product: Option<(&Tensor, Option<&Tensor>)>,
    (rows, columns): (usize, usize),
) -> Result<Tensor> {
    if rows == 0 || columns == 0 {
        return gpu.zeros(columns, DType::F32);
    }
    let kind = FloatType::of(a, "a summed matrix")?;
    let first = address(a, "a summed matrix")?;
    let (second, factor) = match product {
        Some((b, factor)) => {
            let factor = factor.map_or(Ok(0), |f| address_of(f, "factors of rows", DType::F32))?;
            (address_of(b, "a summed matrix", kind.dtype())?, factor)
        }
        None => (0, 0),
    };
    let packed = columns.is_multiple_of(PACK) && aligned(&[first, second]);
    let across = columns.div_ceil(ACROSS * if packed { PACK } else { 1 });
    let parts = (BLOCKS / across).clamp(1, MOST_PARTS).min(rows.div_ceil(DOWN));
    let part = rows.div_ceil(parts);
    let parts = rows.div_ceil(part);
    let partial = gpu.empty((parts, columns), DType::F32)?;
    let sum = gpu.empty(columns, DType::F32)?;
    let name = [
        if product.is_some() {
            "column_products_"
        } else {
            "column_sums_"
        },
        kind.name(),
        if packed { "_packed" } else { "_single" },
    ];
    let grid = Grid {
        blocks: (across, parts),
        threads: (ACROSS as u32, DOWN as u32),
        shared: 0,
    };
    let args = [
        Arg::Address(first),
        Arg::Address(second),
        Arg::Address(factor),
        Arg::Address(address(&partial, "partial sums")?),
        Arg::size(rows),
        Arg::size(columns),
        Arg::size(part),
    ];
    // SAFETY: a and b are [rows, columns], factor [rows], partial [parts, columns].
    unsafe { gpu.launch("columns", name, grid, &args)? };
    let args = [
        Arg::Address(address(&partial, "partial sums")?),
        Arg::Address(address(&sum, "a sum")?),
        Arg::size(parts),
        Arg::size(columns),
    ];
    // SAFETY: as above, sum is [columns].
    unsafe {
        gpu.launch(
            "columns",
            "column_totals",
            Grid::line(columns.div_ceil(128), 128),
            &args,
        )?
    };
    Ok(sum)
}
