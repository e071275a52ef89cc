//! Attention sinks on a GPU.

use super::elementwise::cast;
use super::{Arg, FloatType, Gpu, Grid, address, address_of};
use candle_core::{DType, Tensor};
use ft_base::Result;

const THREADS: u32 = 256;
/// Rows of a block: a warp each.
const ROWS: usize = THREADS as usize / 32;

/// o `[N, H·E]` and lse `[N, H]` are changed in place; E is `size`.
pub(crate) fn apply(o: &Tensor, lse: &Tensor, sinks: &Tensor, size: usize) -> Result<()> {
    let gpu = Gpu::of(o, "the output of attention")?;
    let kind = FloatType::of(o, "the output of attention")?;
    let of_sinks = FloatType::of(sinks, "the attention sinks")?;
    let rows = lse.elem_count();
    let args = [
        Arg::Address(address(o, "the output of attention")?),
        Arg::Address(address_of(lse, "the log-sum-exp of attention", DType::F32)?),
        Arg::Address(address(sinks, "the attention sinks")?),
        Arg::size(rows),
        Arg::small(sinks.elem_count(), "the number of heads")?,
        Arg::small(size, "an attention head")?,
    ];
    let name = ["sinks_apply_", kind.name(), "_", of_sinks.name()];
    let grid = Grid::line(rows.div_ceil(ROWS), THREADS);
    // SAFETY: o has `size` elements for each element of lse, and lse a row of heads for each query.
    unsafe { gpu.launch("attention_sinks", name, grid, &args) }
}

/// The gradient of the sinks, `[H]` f32.
pub(crate) fn backward(o: &Tensor, lse: &Tensor, dout: &Tensor, sinks: &Tensor, size: usize) -> Result<Tensor> {
    let gpu = Gpu::of(o, "the output of attention")?;
    let kind = FloatType::of(o, "the output of attention")?;
    let of_sinks = FloatType::of(sinks, "the attention sinks")?;
    let dout = cast(dout, kind)?;
    let heads = sinks.elem_count();
    let ds = gpu.empty(heads, DType::F32)?;
    let args = [
        Arg::Address(address(o, "the output of attention")?),
        Arg::Address(address_of(lse, "the log-sum-exp of attention", DType::F32)?),
        Arg::Address(address(&dout, "the gradient of attention")?),
        Arg::Address(address(sinks, "the attention sinks")?),
        Arg::Address(address(&ds, "the gradient of the attention sinks")?),
        Arg::size(lse.elem_count()),
        Arg::small(heads, "the number of heads")?,
        Arg::small(size, "an attention head")?,
    ];
    let name = ["sinks_gradient_", kind.name(), "_", of_sinks.name()];
    // SAFETY: as in `apply`; dout has the shape and type of o, ds an element for each head.
    unsafe { gpu.launch("attention_sinks", name, Grid::line(heads, THREADS), &args)? };
    Ok(ds)
}
