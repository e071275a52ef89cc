//! The heads of latent attention on a GPU. Shapes are checked by `ops::latent`, whose letters are used here.

use super::{Arg, FloatType, Gpu, Grid, address, address_of, narrow};
use crate::latent::{Angles, LatentHeads};
use crate::rope::RopePairing;
use candle_core::{DType, Tensor};
use ft_base::Result;

fn table((cos, sin): Angles) -> Result<[Arg; 2]> {
    Ok([
        Arg::Address(address_of(cos, "the cosines of a rotation", DType::F32)?),
        Arg::Address(address_of(sin, "the sines of a rotation", DType::F32)?),
    ])
}

/// The sizes as arguments; the elements of a token have 32-bit indices in the kernels.
fn sizes(h: &LatentHeads) -> Result<Vec<Arg>> {
    narrow(2 * h.heads * h.width(), "a row of latent attention")?;
    let numbers = [h.heads, h.plain, h.rotary, h.value, h.width()];
    let mut args = Vec::with_capacity(6);
    for n in numbers {
        args.push(Arg::small(n, "a head")?);
    }
    args.push(Arg::I32(i32::from(h.pairing == RopePairing::Neighbors)));
    Ok(args)
}

fn launch(
    name: &'static str,
    inputs: &[&Tensor],
    middle: &[Arg],
    outputs: &[&Tensor],
    (tokens, width): (usize, usize),
) -> Result<()> {
    const NAME: &str = "a tensor of latent attention";
    let (gpu, kind) = (Gpu::of(inputs[0], NAME)?, FloatType::of(inputs[0], NAME)?);
    let mut args = Vec::with_capacity(inputs.len() + middle.len() + outputs.len());
    for t in inputs {
        args.push(Arg::Address(address_of(t, NAME, kind.dtype())?));
    }
    args.extend_from_slice(middle);
    for t in outputs {
        args.push(Arg::Address(address(t, NAME)?));
    }
    let threads = width.div_ceil(32).clamp(1, 8) as u32 * 32;
    // SAFETY: the shapes were checked by the callers, and the outputs have the sizes that the kernels write.
    unsafe { gpu.launch("latent", [name, kind.name()], Grid::line(tokens, threads), &args) }
}

fn like(t: &Tensor, width: usize) -> Result<Tensor> {
    Gpu::of(t, "a tensor of latent attention")?.empty((t.dims2()?.0, width), t.dtype())
}

/// As `LatentHeads::queries`, or `queries_backward`.
pub(crate) fn queries(h: &LatentHeads, x: &Tensor, angles: Angles, back: bool) -> Result<Tensor> {
    let (name, width) = if back {
        ("latent_queries_backward_", h.heads * (h.plain + h.rotary))
    } else {
        ("latent_queries_", h.heads * h.width())
    };
    let y = like(x, width)?;
    let middle = [&table(angles)?[..], &sizes(h)?].concat();
    launch(name, &[x], &middle, &[&y], (x.dims2()?.0, width))?;
    Ok(y)
}

/// As `LatentHeads::keys_values`.
pub(crate) fn keys_values(h: &LatentHeads, kv: &Tensor, low: &Tensor, angles: Angles) -> Result<(Tensor, Tensor)> {
    let (n, wide) = low.dims2()?;
    let width = h.heads * h.width();
    let (k, v) = (like(kv, width)?, like(kv, width)?);
    let wide = [Arg::small(wide, "a latent row")?];
    let middle = [&table(angles)?[..], &sizes(h)?, &wide].concat();
    launch("latent_keys_values_", &[kv, low], &middle, &[&k, &v], (n, width))?;
    Ok((k, v))
}

/// As `LatentHeads::keys_values_backward`.
pub(crate) fn keys_values_backward(
    h: &LatentHeads,
    dk: &Tensor,
    dv: &Tensor,
    angles: Angles,
) -> Result<(Tensor, Tensor)> {
    let width = h.heads * (h.plain + h.value);
    let (d_kv, d_rotary) = (like(dk, width)?, like(dk, h.rotary)?);
    let middle = [&table(angles)?[..], &sizes(h)?].concat();
    let outputs = [&d_kv, &d_rotary];
    launch(
        "latent_keys_values_backward_",
        &[dk, dv],
        &middle,
        &outputs,
        (dk.dims2()?.0, width),
    )?;
    Ok((d_kv, d_rotary))
}

/// Heads of `from` elements to heads of `to`.
pub(crate) fn resize(x: &Tensor, heads: usize, from: usize, to: usize) -> Result<Tensor> {
    let y = like(x, heads * to)?;
    narrow(heads * from.max(to), "a row of latent attention")?;
    let middle = [
        Arg::small(heads, "heads")?,
        Arg::small(from, "a head")?,
        Arg::small(to, "a head")?,
    ];
    launch("latent_resize_", &[x], &middle, &[&y], (x.dims2()?.0, heads * to))?;
    Ok(y)
}
