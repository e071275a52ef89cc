//! RMSNorm on a GPU.

use super::{Arg, FloatType, Gpu, Grid, KernelName, address, aligned, columns};
use candle_core::{DType, Tensor};
use ft_base::Result;

/// Threads that share a short row, as in `cuda/norm.cuh`.
const LANES: usize = 16;
/// Threads of a block.
const THREADS: usize = 256;

/// Returns the kernel name and its grid, for `rows` of `size` elements.
pub(super) fn plan(
    direction: &'static str,
    kinds: (FloatType, FloatType),
    rows: usize,
    size: usize,
    addresses: &[u64],
) -> (KernelName, Grid) {
    let packed = size.is_multiple_of(kinds.0.pack()) && aligned(addresses);
    let pack = if packed { kinds.0.pack() } else { 1 };
    // A row with more than 4 packs per thread uses the wide kernel.
    let wide = size > 4 * LANES * pack;
    let grid = if wide {
        Grid::line(rows, size.div_ceil(pack).div_ceil(32).clamp(1, 8) as u32 * 32)
    } else {
        Grid::line(rows.div_ceil(THREADS / LANES), THREADS as u32)
    };
    let name = [
        direction,
        if wide { "_wide_" } else { "_narrow_" },
        kinds.0.name(),
        "_",
        kinds.1.name(),
        if packed { "_packed" } else { "_single" },
    ];
    (name.into(), grid)
}

/// The last arguments of both kernels.
fn numbers(rows: usize, size: usize, eps: f64, plus_one: bool) -> Result<[Arg; 4]> {
    Ok([
        Arg::size(rows),
        Arg::small(size, "a row of a norm")?,
        Arg::F32(eps as f32),
        Arg::F32(if plus_one { 1.0 } else { 0.0 }),
    ])
}

/// The address of what passes by a norm, in the type of its results; 0: nothing.
fn past_place(past: &Option<Tensor>) -> Result<u64> {
    past.as_ref()
        .map_or(Ok(0), |past| address(past, "what passes by a norm"))
}

/// x is cut into rows of `w.len()` elements, which divides its size.
pub(crate) fn forward(x: &Tensor, w: &Tensor, eps: f64, plus_one: bool, past: Option<&Tensor>) -> Result<Tensor> {
    let gpu = Gpu::of(x, "x of a norm")?;
    let kinds = (
        FloatType::of(x, "x of a norm")?,
        FloatType::of(w, "the weight of a norm")?,
    );
    let size = w.elem_count();
    let rows = x.elem_count() / size;
    let y = gpu.empty(x.shape(), x.dtype())?;
    let past = past.map(|past| super::elementwise::cast(past, kinds.0)).transpose()?;
    let places = [
        address(x, "x of a norm")?,
        address(w, "the weight of a norm")?,
        past_place(&past)?,
        address(&y, "y of a norm")?,
    ];
    let (name, grid) = plan("rms_norm_forward", kinds, rows, size, &places);
    let args = [&places.map(Arg::Address)[..], &numbers(rows, size, eps, plus_one)?[..]].concat();
    // SAFETY: x, y and `past` are rows of `size` elements, w is one row.
    unsafe { gpu.launch("rms_norm", name, grid, &args)? };
    Ok(y)
}

/// Computes dx, and dw f32 if requested.
pub(crate) fn backward(
    x: &Tensor,
    w: &Tensor,
    dy: &Tensor,
    eps: f64,
    plus_one: bool,
    need_dw: bool,
    past: Option<&Tensor>,
) -> Result<(Tensor, Option<Tensor>)> {
    let gpu = Gpu::of(x, "x of a norm")?;
    let kinds = (
        FloatType::of(x, "x of a norm")?,
        FloatType::of(w, "the weight of a norm")?,
    );
    let dy = super::elementwise::cast(dy, kinds.0)?;
    let size = w.elem_count();
    let rows = x.elem_count() / size;
    let dx = gpu.empty(x.shape(), x.dtype())?;
    let past = past.map(|past| super::elementwise::cast(past, kinds.0)).transpose()?;
    let inverse = need_dw.then(|| gpu.empty(rows, DType::F32)).transpose()?;
    let places = [
        address(x, "x of a norm")?,
        address(w, "the weight of a norm")?,
        address(&dy, "dy of a norm")?,
        past_place(&past)?,
        address(&dx, "dx of a norm")?,
    ];
    let (name, grid) = plan("rms_norm_backward", kinds, rows, size, &places);
    let inverse_place = match &inverse {
        Some(inverse) => address(inverse, "the inverse of a norm")?,
        None => 0,
    };
    let args = [
        &places.map(Arg::Address)[..],
        &[Arg::Address(inverse_place)],
        &numbers(rows, size, eps, plus_one)?[..],
    ]
    .concat();
    // SAFETY: as in `forward`; `inverse` has an element for each row or is null.
    unsafe { gpu.launch("rms_norm", name, grid, &args)? };
    let dw = inverse
        .map(|inverse| columns::sums(&gpu, &dy, Some((x, &inverse)), (rows, size)))
        .transpose()?;
    Ok((dx, dw))
}
