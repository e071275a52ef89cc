//! The LoRA pairs of experts that are computed together: their copies, and their gradients in one launch.
//!
//! Letters as in `crate::expert_pairs`.

use super::{Arg, FloatType, Gpu, Grid, address, address_of, pairs};
use crate::expert_pairs::{ExpertPairs, columns};
use crate::lora_pairs::MatrixCopy;
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};

/// Same values as in `cuda/expert_pairs.cu`.
const THREADS: u32 = 128;
const WIDTH: usize = 256;
const RANKS: usize = 16;
const NAME: &str = "the pair of an expert";

/// Replaces the matrices by copies of type `dtype` with P in the place of R.
pub(crate) fn copy(all: &mut [ExpertPairs], dtype: DType) -> Result<()> {
    let mut copies = Vec::new();
    let mut made = Vec::with_capacity(2 * all.len());
    for pair in all.iter_mut() {
        let (experts, rank) = pair.sizes();
        let wide = columns(rank, dtype.size_in_bytes() as u64);
        for (i, matrix) in pair.matrices_mut().into_iter().enumerate() {
            let gpu = Gpu::of(matrix, NAME)?;
            let (rows, across) = matrix.dims2()?;
            // The rows of A of an expert are one row here, so that those of the filled rank follow them.
            let (lines, used, filled, shape) = match i {
                0 => (experts, rank * across, wide * across, (experts * wide, across)),
                _ => (rows, rank, wide, (rows, wide)),
            };
            let to = if wide == rank {
                gpu.empty((lines, filled), dtype)?
            } else {
                gpu.zeros((lines, filled), dtype)?
            };
            copies.push((matrix.reshape((lines, used))?, to.clone()));
            made.push(to.reshape(shape)?);
        }
    }
    let jobs: Vec<MatrixCopy<'_>> = (copies.iter())
        .map(|(from, to)| MatrixCopy {
            from,
            minus: None,
            to: to.clone(),
            first: 0,
        })
        .collect();
    pairs::copy(&jobs, dtype)?;
    let matrices = all.iter_mut().flat_map(ExpertPairs::matrices_mut);
    matrices.zip(made).for_each(|(matrix, copy)| *matrix = copy);
    Ok(())
}

/// Adds the gradients of groups of successive rows to `sum`, f32: for each the row of `sum` where its own begins, and its number
/// of rows. `of_a`: `sum` is `[E·R, I]` and the product lowᵀ·wide with `wide` `[M, I]`; else `[E·O, R]` and wideᵀ·low with `wide`
/// `[M, O / Q]`. Of `low` `[M, P]` the first `rank` columns count.
pub(crate) fn gradient(
    sum: &Tensor,
    of_a: bool,
    groups: &[(usize, usize)],
    wide: &Tensor,
    low: &Tensor,
    rank: usize,
) -> Result<()> {
    let (gpu, kind) = (Gpu::of(wide, NAME)?, FloatType::of(wide, NAME)?);
    let ((_, width), (_, stride), (lines, across)) = (wide.dims2()?, low.dims2()?, sum.dims2()?);
    let (own, expected) = if of_a { (rank, width) } else { (width, rank) };
    let outside = groups.iter().any(|(row, _)| row + own > lines);
    if outside || across != expected || rank > stride {
        return Err(Error::internal("the gradient of a pair of experts does not fit"));
    }
    let place = address_of(sum, NAME, DType::F32)?;
    let (mut table, mut count, mut first) = (Vec::new(), 0, 0);
    for (row, rows) in groups {
        if *rows > 0 {
            table.extend((place + 4 * (row * across) as u64).to_ne_bytes());
            table.extend((first as u32).to_ne_bytes());
            table.extend((*rows as u32).to_ne_bytes());
            count += 1;
        }
        first += rows;
    }
    if count == 0 || width == 0 {
        return Ok(());
    }
    let table = gpu.upload_bytes(&table)?;
    let args = [
        Arg::Address(address(wide, NAME)?),
        Arg::Address(address_of(low, NAME, kind.dtype())?),
        Arg::Address(address(&table, "a table of groups")?),
        Arg::small(width, NAME)?,
        Arg::small(rank, NAME)?,
        Arg::small(stride, NAME)?,
    ];
    let mut grid = Grid::line(count, THREADS);
    grid.blocks.1 = width.div_ceil(WIDTH) * rank.div_ceil(RANKS);
    let name = if of_a {
        "expert_gradient_a_"
    } else {
        "expert_gradient_b_"
    };
    // SAFETY: the groups are the rows of both operands, as the caller checked; their parts of the sum lie inside of it.
    unsafe { gpu.launch("expert_pairs", [name, kind.name()], grid, &args) }
}
