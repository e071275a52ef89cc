//! Operations of adapters on a GPU.

use super::elementwise::{cast, grid, row_counts};
use super::gemm::{GpuMatrix, ProductBatch, gemm_batched};
use super::{Arg, FloatType, Gpu, Grid, address, address_of, columns};
use crate::adapters::DoraNorm;
use crate::cpu::storage::expect_dims;
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};

const NAME: &str = "a tensor of an adapter";

pub(crate) fn scale_and_shift(x: &Tensor, v: &Tensor, bias: Option<&Tensor>, to: DType) -> Result<Tensor> {
    const PACK: usize = 8;
    let gpu = Gpu::of(x, NAME)?;
    let (rows, columns) = x.dims2()?;
    let y = gpu.empty((rows, columns), to)?;
    let bias = bias.map(|b| cast(b, FloatType::F32)).transpose()?;
    for one in [Some(v), bias.as_ref()].into_iter().flatten() {
        expect_dims(&one.flatten_all()?, NAME, &[columns])?;
    }
    let bias_at = bias.as_ref().map_or(Ok(0), |b| address_of(b, NAME, DType::F32))?;
    let places = [
        address(x, NAME)?,
        address_of(v, NAME, DType::F32)?,
        bias_at,
        address(&y, NAME)?,
    ];
    let [count, packs] = row_counts((rows, columns), PACK, &places);
    let [x_at, v_at, bias_at, y_at] = places.map(Arg::Address);
    let name = [
        "scale_columns_",
        FloatType::of(x, NAME)?.name(),
        "_",
        FloatType::of(&y, NAME)?.name(),
    ];
    let args = [x_at, v_at, bias_at, y_at, count, Arg::size(columns), packs];
    // SAFETY: x and y are [rows, columns], v and the bias [columns].
    unsafe { gpu.launch("adapters", name, grid(rows * columns, PACK), &args)? };
    Ok(y)
}

pub(crate) fn sum_products(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    expect_dims(b, NAME, a.dims())?;
    let (gpu, kind) = (Gpu::of(a, NAME)?, FloatType::of(a, NAME)?);
    if FloatType::of(b, NAME)? == kind {
        columns::products(&gpu, a, b, a.dims2()?)
    } else {
        columns::products(&gpu, &cast(a, FloatType::F32)?, &cast(b, FloatType::F32)?, a.dims2()?)
    }
}

pub(crate) fn dora_factors(norm: &DoraNorm<'_>, m: &Tensor) -> Result<Tensor> {
    let gpu = Gpu::of(m, NAME)?;
    let (outputs, rank) = norm.b.dims2()?;
    expect_dims(norm.across, NAME, &[rank, outputs])?;
    expect_dims(norm.own, NAME, &[outputs, rank])?;
    expect_dims(norm.squares, NAME, &[outputs])?;
    expect_dims(m, NAME, &[outputs])?;
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
    expect_dims(triangles, NAME, &[k, size * size.saturating_sub(1) / 2])?;
    let gpu = Gpu::of(triangles, NAME)?;
    let q = gpu.empty((k, size, size), DType::F32)?;
    blocks("skew", &gpu, triangles, &q, q.elem_count(), size)?;
    Ok(q)
}

pub(crate) fn skew_gradient(dq: &Tensor, (k, size): (usize, usize)) -> Result<Tensor> {
    expect_dims(dq, NAME, &[k, size, size])?;
    let gpu = Gpu::of(dq, NAME)?;
    let triangles = gpu.empty((k, size * size.saturating_sub(1) / 2), DType::F32)?;
    blocks("skew_gradient", &gpu, dq, &triangles, dq.elem_count(), size)?;
    Ok(triangles)
}

pub(crate) fn inverse_of_sum(q: &Tensor, (k, size): (usize, usize)) -> Result<Tensor> {
    expect_dims(q, NAME, &[k, size, size])?;
    let gpu = Gpu::of(q, NAME)?;
    let work = gpu.empty((k, size, size), DType::F64)?;
    let inverse = gpu.empty((k, size, size), DType::F32)?;
    let args = [
        Arg::Address(address_of(q, NAME, DType::F32)?),
        Arg::Address(address_of(&work, NAME, DType::F64)?),
        Arg::Address(address_of(&inverse, NAME, DType::F32)?),
        Arg::small(size, "a block of an adapter")?,
    ];
    // SAFETY: three tensors of k blocks of size · size.
    unsafe { gpu.launch("adapters", "inverse_of_sum", Grid::line(k, 256), &args) }?;
    Ok(inverse)
}

fn blocks(kernel: &'static str, gpu: &Gpu, from: &Tensor, to: &Tensor, n: usize, size: usize) -> Result<()> {
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
    expect_dims(y, NAME, x.dims())?;
    expect_dims(d, NAME, &[k, size, size])?;
    let (gpu, kind) = (Gpu::of(x, NAME)?, FloatType::of(x, NAME)?);
    let d = cast(d, kind)?;
    let a = GpuMatrix::new(address(x, NAME)?, kind, features);
    let b = GpuMatrix {
        transposed,
        ..GpuMatrix::new(address(&d, NAME)?, kind, size)
    };
    let c = GpuMatrix::new(address_of(y, NAME, x.dtype())?, kind, features);
    let batch = ProductBatch {
        count: k,
        steps: [size, size * size, size].map(|step| step as i64),
    };
    // SAFETY: block k of x and y starts at column k · size; the shapes were checked.
    unsafe { gemm_batched(&gpu, (rows, size, size), [a, b, c], 1.0, true, batch) }
}

pub(crate) fn blocks_gradient(x: &Tensor, dy: &Tensor, size: usize) -> Result<Tensor> {
    let (rows, features) = x.dims2()?;
    let k = count(x, size)?;
    expect_dims(dy, NAME, x.dims())?;
    let (gpu, kind) = (Gpu::of(x, NAME)?, FloatType::of(x, NAME)?);
    if rows == 0 {
        return gpu.zeros((k, size, size), DType::F32);
    }
    let gradient = gpu.empty((k, size, size), DType::F32)?;
    let a = GpuMatrix::new(address(x, NAME)?, kind, features).t();
    let b = GpuMatrix::new(address_of(dy, NAME, x.dtype())?, kind, features);
    let c = GpuMatrix::new(address(&gradient, NAME)?, FloatType::F32, size);
    let batch = ProductBatch {
        count: k,
        steps: [size, size, size * size].map(|step| step as i64),
    };
    // SAFETY: block k of x and dy starts at column k · size; the shapes were checked.
    unsafe { gemm_batched(&gpu, (size, size, rows), [a, b, c], 1.0, false, batch)? };
    Ok(gradient)
}
