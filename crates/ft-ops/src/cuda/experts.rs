//! Rows of the experts of a mixture on a GPU, and the gated unit of gpt-oss.
//!
//! Letters: n rows, D columns of a row, N tokens.

use super::elementwise::grid;
use super::{Arg, FloatType, Gpu, Grid, address, address_of, aligned, embedding};
use crate::clamped_glu::ClampedGlu;
use candle_core::{DType, Tensor};
use ft_base::Result;

/// The threads of a row, and its packs of 16 bytes: none if a row may be unaligned.
pub(super) fn row(kind: FloatType, d: usize, places: &[u64]) -> (u32, Arg) {
    let packed = d.is_multiple_of(kind.pack()) && aligned(places);
    let packs = if packed { d / kind.pack() } else { 0 };
    let work = if packed { packs } else { d };
    (work.div_ceil(32).clamp(1, 8) as u32 * 32, Arg::size(packs))
}

/// The rows `tokens` (u32) of x `[N, D]`: `[n, D]`.
pub(crate) fn gather(x: &Tensor, tokens: &Tensor) -> Result<Tensor> {
    embedding::rows(x, tokens, 1.0, x.dims2()?.1)
}

/// y `[N, D]` += part `[n, D]` at `tokens` (u32), which are distinct.
pub(crate) fn add_at(y: &Tensor, part: &Tensor, tokens: &Tensor) -> Result<()> {
    const NAME: &str = "the output of experts";
    let (gpu, kind) = (Gpu::of(y, NAME)?, FloatType::of(y, NAME)?);
    let (n, d) = part.dims2()?;
    let places = [
        address_of(part, "the output of an expert", y.dtype())?,
        address(y, NAME)?,
    ];
    let (threads, packs) = row(kind, d, &places);
    let args = [
        Arg::Address(places[0]),
        Arg::Address(address_of(tokens, "the tokens of an expert", DType::U32)?),
        Arg::size(d),
        packs,
        Arg::Address(places[1]),
    ];
    // SAFETY: the caller checked the shapes; the tokens are rows of y, each of them once.
    unsafe { gpu.launch("experts", ["add_at_", kind.name()], Grid::line(n, threads), &args) }
}

/// Multiplies each row of t `[n, D]` with its factor, f32 `[n]`.
pub(crate) fn scale_rows(t: &Tensor, factors: &Tensor) -> Result<()> {
    const NAME: &str = "rows that are scaled";
    let (gpu, kind) = (Gpu::of(t, NAME)?, FloatType::of(t, NAME)?);
    let (n, d) = t.dims2()?;
    let place = address(t, NAME)?;
    let (threads, packs) = row(kind, d, &[place]);
    let factors = address_of(factors, "factors of rows", DType::F32)?;
    let args = [Arg::Address(place), Arg::Address(factors), Arg::size(d), packs];
    // SAFETY: the caller checked the shapes.
    unsafe { gpu.launch("experts", ["scale_rows_", kind.name()], Grid::line(n, threads), &args) }
}

/// `to[r] = a[r] · b[r]`, or added to it; a `[n, D]`, b of the same shape or `[1, D]`, `to` f32 `[n]`.
pub(crate) fn row_products(a: &Tensor, b: &Tensor, to: &Tensor, add: bool) -> Result<()> {
    const NAME: &str = "rows that are multiplied";
    let (gpu, kinds) = (Gpu::of(a, NAME)?, (FloatType::of(a, NAME)?, FloatType::of(b, NAME)?));
    let (n, d) = a.dims2()?;
    let step = if b.dims2()?.0 == n { d } else { 0 };
    let args = [
        Arg::Address(address(a, NAME)?),
        Arg::Address(address(b, NAME)?),
        Arg::size(step),
        Arg::size(d),
        Arg::I32(i32::from(add)),
        Arg::Address(address_of(to, "products of rows", DType::F32)?),
    ];
    let name = ["row_products_", kinds.0.name(), "_", kinds.1.name()];
    let threads = d.div_ceil(32).clamp(1, 8) as u32 * 32;
    // SAFETY: the caller checked the shapes.
    unsafe { gpu.launch("experts", name, Grid::line(n, threads), &args) }
}

/// The sigmoids of z, f32 `[n]`.
pub(crate) fn gates(z: &Tensor) -> Result<Tensor> {
    const NAME: &str = "the gate of a shared expert";
    let (gpu, kind, n) = (Gpu::of(z, NAME)?, FloatType::of(z, NAME)?, z.elem_count());
    let g = gpu.empty(n, DType::F32)?;
    let args = [
        Arg::Address(address(z, NAME)?),
        Arg::Address(address(&g, NAME)?),
        Arg::size(n),
    ];
    // SAFETY: both have n elements.
    unsafe {
        gpu.launch(
            "experts",
            ["gates_", kind.name()],
            Grid::line(n.div_ceil(256), 256),
            &args,
        )?
    };
    Ok(g)
}

/// From the gradient d of the sigmoids g to that of their arguments, in place; f32 `[n]`.
pub(crate) fn gates_backward(g: &Tensor, d: &Tensor) -> Result<()> {
    const NAME: &str = "the gate of a shared expert";
    let (gpu, n) = (Gpu::of(g, NAME)?, g.elem_count());
    let args = [
        Arg::Address(address_of(g, NAME, DType::F32)?),
        Arg::Address(address_of(d, NAME, DType::F32)?),
        Arg::size(n),
    ];
    // SAFETY: both have n elements (checked by the caller).
    unsafe { gpu.launch("experts", "gates_backward", Grid::line(n.div_ceil(256), 256), &args) }
}

fn clamped(operands: [&Tensor; 3], unit: ClampedGlu, name: &'static str) -> Result<()> {
    const NAME: &str = "an operand of a gated unit";
    let (gpu, kind) = (Gpu::of(operands[0], NAME)?, FloatType::of(operands[0], NAME)?);
    let n = operands[0].elem_count();
    let mut args = Vec::with_capacity(6);
    for t in operands {
        args.push(Arg::Address(address_of(t, NAME, kind.dtype())?));
    }
    args.extend([Arg::F32(unit.alpha), Arg::F32(unit.limit), Arg::size(n)]);
    // SAFETY: all have n elements of one type (shapes were checked by the caller).
    unsafe { gpu.launch("experts", [name, kind.name()], grid(n, 1), &args) }
}

/// As `clamped_glu::forward`.
pub(crate) fn clamped_forward(gate: &Tensor, up: &Tensor, unit: ClampedGlu) -> Result<Tensor> {
    let y = Gpu::of(gate, "gate of a gated unit")?.empty(gate.shape(), gate.dtype())?;
    clamped([gate, up, &y], unit, "clamped_forward_")?;
    Ok(y)
}

/// As `clamped_glu::backward_in_place`.
pub(crate) fn clamped_backward(gate: &Tensor, up: &Tensor, dy: &Tensor, unit: ClampedGlu) -> Result<()> {
    clamped([gate, up, dy], unit, "clamped_backward_")
}
