//! Keys and values as int8 on a GPU.

use super::{Arg, FloatType, Gpu, Grid, address, address_of};
use crate::kv_block::KvBlock;
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};

const NAME: &str = "a block of the KV cache";

pub(crate) fn empty(x: &Tensor, room: usize, head_dim: usize) -> Result<KvBlock> {
    let gpu = Gpu::of(x, NAME)?;
    let width = x.dims2()?.1;
    if head_dim == 0 || !width.is_multiple_of(head_dim) {
        return Err(Error::shape("the width of keys is not a number of heads").found(width));
    }
    Ok(KvBlock {
        codes: gpu.empty((room, width), DType::U8)?,
        scales: gpu.empty((room, width / head_dim), DType::F32)?,
        head_dim,
    })
}

/// Addresses of codes and scales of the tokens from `first` on.
fn places(block: &KvBlock, first: usize) -> Result<[Arg; 2]> {
    let (codes, scales) = (&block.codes, &block.scales);
    let codes_at = address_of(codes, NAME, DType::U8)? + (first * codes.dims()[1]) as u64;
    let scales_at = address_of(scales, NAME, DType::F32)? + (4 * first * scales.dims()[1]) as u64;
    Ok([Arg::Address(codes_at), Arg::Address(scales_at)])
}

pub(crate) fn put(block: &KvBlock, first: usize, x: &Tensor) -> Result<()> {
    const THREADS: usize = 256;
    let (gpu, kind) = (Gpu::of(x, NAME)?, FloatType::of(x, NAME)?);
    let rows = x.elem_count() / block.head_dim;
    let [codes, scales] = places(block, first)?;
    let args = [
        Arg::Address(address(x, NAME)?),
        codes,
        scales,
        Arg::size(rows),
        Arg::small(block.head_dim, "a head")?,
    ];
    let grid = Grid::line(rows.div_ceil(THREADS / 32), THREADS as u32);
    // SAFETY: the caller checked that the tokens lie in the block.
    unsafe { gpu.launch("kv_block", ["kv_quantize_", kind.name()], grid, &args) }
}

pub(crate) fn get(block: &KvBlock, y: &Tensor) -> Result<()> {
    let (gpu, kind) = (Gpu::of(y, NAME)?, FloatType::of(y, NAME)?);
    let count = y.elem_count();
    if count == 0 {
        return Ok(());
    }
    let [codes, scales] = places(block, 0)?;
    let args = [
        codes,
        scales,
        Arg::Address(address(y, NAME)?),
        Arg::size(count),
        Arg::small(block.head_dim, "a head")?,
    ];
    // SAFETY: as above; y has `count` elements.
    unsafe { gpu.launch("kv_block", ["kv_dequantize_", kind.name()], Grid::stride(count), &args) }
}
