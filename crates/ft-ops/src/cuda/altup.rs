//! AltUp and sparse gates on a GPU. Shapes are checked by `ops::altup` and `ops::sparse_gate`, whose letters are used here. All
//! tensors of a call have one type.

use super::{Arg, FloatType, Gpu, Grid, address_of};
use crate::altup::DEVICE_STREAMS;
use candle_core::Tensor;
use ft_base::{Error, Result};
use std::ops::Range;

const NAME: &str = "a tensor of AltUp";

/// A tensor or a number.
enum AltUpOperand<'a> {
    All(&'a Tensor),
    Small(usize),
    Factor(f32),
}
use AltUpOperand::{All, Factor, Small};

/// Launches a kernel with a block for each of n rows of `d` elements.
fn launch(name: &'static str, (n, d): (usize, usize), operands: &[AltUpOperand]) -> Result<()> {
    let Some(All(first)) = operands.first() else {
        return Err(Error::internal("a kernel of AltUp has no tensor"));
    };
    let (gpu, kind) = (Gpu::of(first, NAME)?, FloatType::of(first, NAME)?);
    let mut args = Vec::with_capacity(operands.len());
    for operand in operands {
        args.push(match operand {
            All(t) => Arg::Address(address_of(t, NAME, kind.dtype())?),
            Small(x) => Arg::small(*x, NAME)?,
            Factor(x) => Arg::F32(*x),
        });
    }
    let threads = d.div_ceil(32).clamp(1, 8) as u32 * 32;
    // SAFETY: the shapes were checked by the caller.
    unsafe { gpu.launch("altup", [name, kind.name()], Grid::line(n, threads), &args) }
}

fn like(t: &Tensor, shape: (usize, usize)) -> Result<Tensor> {
    Gpu::of(t, NAME)?.empty(shape, t.dtype())
}

fn check(streams: usize) -> Result<()> {
    if streams > DEVICE_STREAMS {
        return Err(Error::unsupported("AltUp with so many streams does not run on a GPU")
            .found(streams)
            .expected(format!("at most {DEVICE_STREAMS}, or the CPU")));
    }
    Ok(())
}

/// As `altup::predict`, of the streams `wanted`.
pub(crate) fn predict(
    h: &Tensor,
    c: &Tensor,
    streams: usize,
    wanted: Range<usize>,
    (n, d): (usize, usize),
) -> Result<Tensor> {
    let y = like(h, (n, wanted.len() * d))?;
    let numbers = [streams, wanted.start, wanted.len(), d].map(Small);
    let [a, b, e, f] = numbers;
    launch("altup_predict_", (n, d), &[All(h), All(c), a, b, e, f, All(&y)])?;
    Ok(y)
}

/// As `altup::predict_backward`.
pub(crate) fn predict_backward(
    h: &Tensor,
    c: &Tensor,
    dy: &Tensor,
    streams: usize,
    (n, d): (usize, usize),
) -> Result<Tensor> {
    check(streams)?;
    let dc = like(c, (n, streams * streams))?;
    let operands = [All(h), All(c), Small(streams), Small(d), All(dy), All(&dc)];
    launch("altup_predict_backward_", (n, d), &operands)?;
    Ok(dc)
}

/// As `altup::correct_assign`.
pub(crate) fn correct(h: &Tensor, y: &Tensor, f: &Tensor, active: usize, (n, d): (usize, usize)) -> Result<()> {
    let streams = f.dims2()?.1;
    let operands = [All(h), All(y), All(f), Small(streams), Small(active), Small(d)];
    launch("altup_correct_", (n, d), &operands)
}

/// As `altup::corrected`.
pub(crate) fn corrected(p: &Tensor, y: &Tensor, f: &Tensor, active: usize, (n, d): (usize, usize)) -> Result<Tensor> {
    let (streams, out) = (f.dims2()?.1, like(p, (n, d))?);
    let sizes = [streams, active, d].map(Small);
    let [a, b, e] = sizes;
    launch(
        "altup_corrected_",
        (n, d),
        &[All(p), All(y), All(f), a, b, e, All(&out)],
    )?;
    Ok(out)
}

/// As `altup::correct_backward`.
pub(crate) fn correct_backward(
    dy: &Tensor,
    p: &Tensor,
    y: &Tensor,
    f: &Tensor,
    active: usize,
    (n, d): (usize, usize),
) -> Result<(Tensor, Tensor)> {
    let streams = f.dims2()?.1;
    check(streams)?;
    let (dx, df) = (like(y, (n, d))?, like(f, (n, streams))?);
    let [a, b, e] = [streams, active, d].map(Small);
    let operands = [All(dy), All(p), All(y), All(f), a, b, e, All(&dx), All(&df)];
    launch("altup_correct_backward_", (n, d), &operands)?;
    Ok((dx, df))
}

/// As `altup::add_to`.
pub(crate) fn add_to(h: &Tensor, x: &Tensor, which: Range<usize>, (n, d): (usize, usize)) -> Result<()> {
    let streams = h.dims2()?.1 / d.max(1);
    let [a, b, e, f] = [streams, which.start, which.len(), d].map(Small);
    launch("altup_add_", (n, d), &[All(h), All(x), a, b, e, f])
}

/// As `altup::sum`.
pub(crate) fn sum(h: &Tensor, which: Range<usize>, factor: f32, (n, d): (usize, usize)) -> Result<Tensor> {
    let (streams, y) = (h.dims2()?.1 / d.max(1), like(h, (n, d))?);
    let [a, b, e, f] = [streams, which.start, which.len(), d].map(Small);
    launch("altup_sum_", (n, d), &[All(h), a, b, e, f, Factor(factor), All(&y)])?;
    Ok(y)
}

/// As `altup::matched`.
pub(crate) fn matched(p: &Tensor, of: &Tensor, (n, d): (usize, usize)) -> Result<Tensor> {
    let y = like(p, (n, d))?;
    launch("altup_matched_", (n, d), &[All(p), All(of), Small(d), All(&y)])?;
    Ok(y)
}

/// As `altup::matched_backward`.
pub(crate) fn matched_backward(
    p: &Tensor,
    of: &Tensor,
    dy: &Tensor,
    d_of: &Tensor,
    (n, d): (usize, usize),
) -> Result<Tensor> {
    let dp = like(p, (n, d))?;
    let operands = [All(p), All(of), All(dy), Small(d), All(&dp), All(d_of)];
    launch("altup_matched_backward_", (n, d), &operands)?;
    Ok(dp)
}

/// As `sparse_gate::forward`.
pub(crate) fn sparse(u: &Tensor, m: f32, (n, d): (usize, usize)) -> Result<Tensor> {
    let s = like(u, (n, d))?;
    launch("sparse_gate_", (n, d), &[All(u), Factor(m), Small(d), All(&s)])?;
    Ok(s)
}

/// As `sparse_gate::backward_assign`.
pub(crate) fn sparse_backward(u: &Tensor, dy: &Tensor, m: f32, (n, d): (usize, usize)) -> Result<()> {
    launch("sparse_gate_backward_", (n, d), &[All(u), Factor(m), Small(d), All(dy)])
}
