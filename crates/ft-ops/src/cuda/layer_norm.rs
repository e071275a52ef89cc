//! LayerNorm on a GPU.

use super::{Arg, FloatType, Gpu, address, address_of, columns, rms_norm};
use crate::layer_norm::{LayerNorm, LayerNormGradients};
use candle_core::Tensor;
use ft_base::Result;

/// The addresses and types of x, weight and bias; the address of a parameter that is missing is 0.
fn operands(x: &Tensor, norm: &LayerNorm) -> Result<([u64; 3], (FloatType, FloatType))> {
    let kind = FloatType::of(x, "x of a norm")?;
    let stored = match norm.weight.or(norm.bias) {
        Some(w) => FloatType::of(w, "the weight of a norm")?,
        None => kind,
    };
    let of = |t: Option<&Tensor>, what| t.map_or(Ok(0), |t| address_of(t, what, stored.dtype()));
    let places = [
        address(x, "x of a norm")?,
        of(norm.weight, "the weight of a norm")?,
        of(norm.bias, "the bias of a norm")?,
    ];
    Ok((places, (kind, stored)))
}

/// The last arguments of both kernels.
fn numbers(rows: usize, norm: &LayerNorm) -> Result<[Arg; 5]> {
    Ok([
        Arg::size(rows),
        Arg::small(norm.size, "a row of a norm")?,
        Arg::small(norm.width() / norm.size, "the heads of a norm")?,
        Arg::F32(norm.eps as f32),
        Arg::F32(if norm.plus_one { 1.0 } else { 0.0 }),
    ])
}

/// x is cut into rows of `size` elements.
pub(crate) fn forward(x: &Tensor, norm: &LayerNorm) -> Result<Tensor> {
    let gpu = Gpu::of(x, "x of a norm")?;
    let ([x_place, w, b], kinds) = operands(x, norm)?;
    let rows = x.elem_count() / norm.size;
    let y = gpu.empty(x.shape(), x.dtype())?;
    let places = [x_place, w, b, address(&y, "y of a norm")?];
    let (name, grid) = rms_norm::plan("layer_norm_forward", kinds, rows, norm.size, &places);
    let args = [&places.map(Arg::Address)[..], &numbers(rows, norm)?[..]].concat();
    // SAFETY: x and y are rows of `size` elements; w and b are `width / size` rows, or null.
    unsafe { gpu.launch("layer_norm", name, grid, &args)? };
    Ok(y)
}

/// Computes dx, and the gradients of weight and bias as `need` says.
pub(crate) fn backward(x: &Tensor, norm: &LayerNorm, dy: &Tensor, need: [bool; 2]) -> Result<LayerNormGradients> {
    let gpu = Gpu::of(x, "x of a norm")?;
    let ([x_place, w, _], kinds) = operands(x, norm)?;
    let dy = super::elementwise::cast(dy, kinds.0)?;
    let rows = x.elem_count() / norm.size;
    let dx = gpu.empty(x.shape(), x.dtype())?;
    let places = [x_place, w, address(&dy, "dy of a norm")?, address(&dx, "dx of a norm")?];
    let (name, grid) = rms_norm::plan("layer_norm_backward", kinds, rows, norm.size, &places);
    let args = [&places.map(Arg::Address)[..], &numbers(rows, norm)?[..]].concat();
    // SAFETY: as in `forward`.
    unsafe { gpu.launch("layer_norm", name, grid, &args)? };
    let sizes = (x.elem_count() / norm.width(), norm.width());
    let shaped = |sum: Tensor, of: Option<&Tensor>| -> Result<Tensor> {
        match of {
            Some(of) => Ok(sum.reshape(of.shape())?),
            None => Ok(sum),
        }
    };
    let dw = if need[0] {
        // The normalized x: a norm without parameters.
        let plain = LayerNorm {
            weight: None,
            bias: None,
            ..*norm
        };
        let sum = columns::products(&gpu, &dy, &forward(x, &plain)?, sizes)?;
        Some(shaped(sum, norm.weight)?)
    } else {
        None
    };
    let db = if need[1] {
        Some(shaped(columns::sums(&gpu, &dy, None, sizes)?, norm.bias)?)
    } else {
        None
    };
    Ok(LayerNormGradients { dx, dw, db })
}
