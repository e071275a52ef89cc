//! Rotary position embeddings on a GPU.

use super::{Arg, FloatType, Gpu, Grid, address, address_of, aligned};
use crate::cpu::rope::RotationSizes;
use crate::rope::RopePairing;
use candle_core::{DType, Tensor};
use ft_base::Result;

/// Rotates x `[tokens, width]` in heads of `head` elements; cos and sin f32 `[tokens, half]`.
pub(crate) fn apply(
    x: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    sign: f32,
    tokens: usize,
    sizes: RotationSizes,
    pairing: RopePairing,
) -> Result<Tensor> {
    let RotationSizes { width, head, half } = sizes;
    let gpu = Gpu::of(x, "x of a rotation")?;
    let kind = FloatType::of(x, "x of a rotation")?;
    let y = gpu.empty((tokens, width), x.dtype())?;
    if width == 0 {
        return Ok(y);
    }
    let places = [
        address(x, "x of a rotation")?,
        address_of(cos, "the cosines of a rotation", DType::F32)?,
        address_of(sin, "the sines of a rotation", DType::F32)?,
    ];
    let to = address(&y, "y of a rotation")?;
    let pack = kind.pack();
    let halves = pairing == RopePairing::Halves;
    let packed = halves && half.is_multiple_of(pack) && head.is_multiple_of(pack) && aligned(&places) && aligned(&[to]);
    let work = (width / head) * (half / if packed { pack } else { 1 });
    let threads = work.div_ceil(32).clamp(1, 8) as u32 * 32;
    let form = match (halves, packed) {
        (true, true) => "_packed",
        (true, false) => "_single",
        (false, _) => "_neighbors",
    };
    let name = ["rope_", kind.name(), form];
    let args = [
        Arg::Address(places[0]),
        Arg::Address(places[1]),
        Arg::Address(places[2]),
        Arg::F32(sign),
        Arg::small(width, "a row of a rotation")?,
        Arg::small(head, "a head")?,
        Arg::small(half, "a head")?,
        Arg::Address(to),
    ];
    // SAFETY: the shapes were checked by the caller; y has the shape of x.
    unsafe { gpu.launch("rope", name, Grid::line(tokens, threads), &args)? };
    Ok(y)
}
