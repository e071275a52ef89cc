//! Operations of adapters on a GPU.

use super::elementwise::{cast, counts, grid};
use super::gemm::{Batch, Matrix, gemm_batched};
use super::{Arg, Gpu, Grid, Kind, address, address_of, aligned, columns};
use crate::adapters::DoraNorm;
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};

const NAME: &str = "a tensor of an adapter";

fn expect(t: &Tensor, dims: &[usize]) -> Result<()> {
    if t.dims() == dims {
        return Ok(());
    }
    Err(Error::shape("a tensor of an adapter has the wrong shape")
        .found(format!("{:?}", t.dims()))
        .expected(format!("{dims:?}")))
}

pub(crate) fn scale_columns(x: &Tensor, v: &Tensor, bias: Option<&Tensor>, to: DType) -> Result<Tensor> {
    const PACK: usize = 8;
    let gpu = Gpu::of(x, NAME)?;
    let (rows, columns) = x.dims2()?;
    let n = rows * columns;
    let y = gpu.empty((rows, columns), to)?;
    let bias = bias.map(|b| cast(b, Kind::F32)).transpose()?;
    for one in [Some(v), bias.as_ref()].into_iter().flatten() {
        if one.elem_count() != columns {
            return Err(
                Error::shape("a tensor of an adapter does not have one number for each column")
                    .found(one.elem_count())
                    .expected(columns),
            );
        }
    }
    let bias_at = bias.as_ref().map_or(Ok(0), |b| address_of(b, NAME, DType::F32))?;
    let places = [
        address(x, NAME)?,
        address_of(v, NAME, DType::F32)?,
        bias_at,
        address(&y, NAME)?,
    ];
    // A pack must not cross rows.
    let [count, packs] = match columns.is_multiple_of(PACK) && aligned(&places) {
        true => counts(n, PACK, &places),
        false => [Arg::size(n), Arg::size(0)],
    };
    let [x_at, v_at, bias_at, y_at] = places.map(Arg::Address);
    let name = format!(
        "scale_columns_{}_{}",
        Kind::of(x, NAME)?.name(),
        Kind::of(&y, NAME)?.name()
    );
    let args = [x_at, v_at, bias_at, y_at, count, Arg::size(columns), packs];
    // SAFETY: x and y are [rows, columns], v and the bias [columns].
    unsafe { gpu.launch("adapters", &name, grid(n, PACK), &args)? };
    Ok(y)
}

pub(crate) fn sum_products(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    expect(b, a.dims())?;
    let (gpu, kind) = (Gpu::of(a, NAME)?, Kind::of(a, NAME)?);
    match Kind::of(b, NAME)? == kind {
        true => columns::products(&gpu, a, b, a.dims2()?),
        false => columns::products(&gpu, &cast(a, Kind::F32)?, &cast(b, Kind::F32)?, a.dims2()?),
    }
}

pub(crate) fn dora_factors(norm: &DoraNorm<'_>, m: &Tensor) -> Result<Tensor> {
    let gpu = Gpu::of(m, NAME)?;
    let (outputs, rank) = norm.b.dims2()?;
    expect(norm.across, &[rank, outputs])?;
    expect(norm.own, &[outputs, rank])?;
    expect(norm.squares, &[outputs])?;
    expect(m, &[outputs])?;
    let factors = gpu.empty(outputs, DType::F32)?;
    let mut args = Vec::with_capacity(9);
    for t in [norm.across, norm.own, norm.b, norm.squares, m, &factors] {
        args.push(Arg::Address(address_of(t, NAME, DType::F32)?));
    }
    args.extend([Arg::size(outputs), Arg::small(rank, NAME)?, Arg::F32(norm.scale)]);
    let grid = Grid::line(outputs.div_ceil(128), 128);
    // SAFETY: the shapes were checked.
    unsafe { gpu.launch("adapters", "dora_factors", grid, &args)? };
    Ok(factors)
}

pub(crate) fn skew(triangles: &Tensor, size: usize) -> Result<Tensor> {
    let k = triangles.dim(0)?;
    expect(triangles, &[k, size * size.saturating_sub(1) / 2])?;
    let gpu = Gpu::of(triangles, NAME)?;
    let q = gpu.empty((k, size, size), DType::F32)?;
    blocks("skew", &gpu, triangles, &q, q.elem_count(), size)?;
    Ok(q)
}

pub(crate) fn skew_gradient(dq: &Tensor, (k, size): (usize, usize)) -> Result<Tensor> {
    expect(dq, &[k, size, size])?;
    let gpu = Gpu::of(dq, NAME)?;
    let triangles = gpu.empty((k, size * size.saturating_sub(1) / 2), DType::F32)?;
    blocks("skew_gradient", &gpu, dq, &triangles, dq.elem_count(), size)?;
    Ok(triangles)
}

fn blocks(kernel: &str, gpu: &Gpu, from: &Tensor, to: &Tensor, n: usize, size: usize) -> Result<()> {
    let args = [
        Arg::Address(address_of(from, NAME, DType::F32)?),
        Arg::Address(address_of(to, NAME, DType::F32)?),
        Arg::size(n),
        Arg::small(size, "a block of an adapter")?,
    ];
    // SAFETY: n elements in blocks of size · size, and their triangles.
    unsafe { gpu.launch("adapters", kernel, Grid::stride(n), &args) }
}

/// K of `[N, K·S]`. Errors: features that are no whole number of blocks.
fn count(x: &Tensor, size: usize) -> Result<usize> {
    let features = x.dim(1)?;
    if size == 0 || !features.is_multiple_of(size) {
        return Err(Error::shape("the features are no whole number of blocks")
            .found(format!("{features} features, blocks of {size}")));
    }
    Ok(features / size)
}

pub(crate) fn add_blocks(y: &Tensor, x: &Tensor, d: &Tensor, transposed: bool) -> Result<()> {
    let (rows, features) = x.dims2()?;
    let size = d.dim(1)?;
    let k = count(x, size)?;
    expect(y, x.dims())?;
    expect(d, &[k, size, size])?;
    let (gpu, kind) = (Gpu::of(x, NAME)?, Kind::of(x, NAME)?);
    let d = cast(d, kind)?;
    let a = Matrix::new(address(x, NAME)?, kind, features);
    let b = Matrix {
        transposed,
        ..Matrix::new(address(&d, NAME)?, kind, size)
    };
    let c = Matrix::new(address_of(y, NAME, x.dtype())?, kind, features);
    let batch = Batch {
        count: k,
        steps: [size, size * size, size],
    };
    // SAFETY: block k of x and y starts at column k · size; the shapes were checked.
    unsafe { gemm_batched(&gpu, (rows, size, size), [a, b, c], 1.0, true, batch) }
}

pub(crate) fn blocks_gradient(x: &Tensor, dy: &Tensor, size: usize) -> Result<Tensor> {
    let (rows, features) = x.dims2()?;
    let k = count(x, size)?;
    expect(dy, x.dims())?;
    let (gpu, kind) = (Gpu::of(x, NAME)?, Kind::of(x, NAME)?);
    if rows == 0 {
        return gpu.zeros((k, size, size), DType::F32);
    }
    let gradient = gpu.empty((k, size, size), DType::F32)?;
    let a = Matrix::new(address(x, NAME)?, kind, features).t();
    let b = Matrix::new(address_of(dy, NAME, x.dtype())?, kind, features);
    let c = Matrix::new(address(&gradient, NAME)?, Kind::F32, size);
    let batch = Batch {
        count: k,
        steps: [size, size, size * size],
    };
    // SAFETY: block k of x and dy starts at column k · size; the shapes were checked.
    unsafe { gemm_batched(&gpu, (size, size, rows), [a, b, c], 1.0, false, batch)? };
    Ok(gradient)
}
