//! Gather and scatter of a subset of a tensor on a GPU.

use super::{Arg, Gpu, Grid, address_of};
use crate::index_subset::IndexSubset;
use candle_core::Tensor;
use ft_base::Result;

/// The structure `Places` of `cuda/part.cu`.
fn numbers(subset: &IndexSubset) -> [u64; 5] {
    let (key, half) = subset.scattered.map_or((0, 0), |permutation| permutation.network());
    let start = subset.start % subset.n.max(1);
    [start as u64, subset.len as u64, subset.n as u64, key, half as u64]
}

fn run(kernel: &'static str, from: &Tensor, to: &Tensor, subset: &IndexSubset) -> Result<()> {
    const NAME: &str = "a part of a tensor";
    if subset.len == 0 {
        return Ok(());
    }
    let gpu = Gpu::of(from, NAME)?;
    let args = [
        Arg::Address(address_of(from, NAME, from.dtype())?),
        Arg::Address(address_of(to, NAME, from.dtype())?),
    ];
    let name = [kernel, if from.dtype().size_in_bytes() == 2 { "_2" } else { "_4" }];
    // SAFETY: the caller checked the sizes; every index lies inside the whole tensor and occurs once.
    unsafe { gpu.launch_with("part", name, Grid::stride(subset.len), &args, Some(&numbers(subset))) }
}

/// Gathers the elements of `whole` (f32, bf16 or i16) at `subset`.
pub(crate) fn gather(whole: &Tensor, subset: &IndexSubset) -> Result<Tensor> {
    let part = Gpu::of(whole, "a part of a tensor")?.empty(subset.len, whole.dtype())?;
    run("part_gather", whole, &part, subset)?;
    Ok(part)
}

/// Scatters `part` back into `whole`, of the same type.
pub(crate) fn put(part: &Tensor, whole: &Tensor, subset: &IndexSubset) -> Result<()> {
    run("part_put", part, whole, subset)
}
