//! Sums of squares, and counts of non-finite elements, over many tensors in one launch.

use super::memory::{read, write};
use super::{Arg, FloatType, Gpu, Grid, address, address_of, aligned};
use candle_core::{DType, Device, Tensor};
use ft_base::{Error, Result};

/// Elements per block, as in `cuda/many.cuh`.
pub(super) const SHARE: usize = 16_384;

/// Numbers the shares (elements of one block) of several tensors consecutively.
#[derive(Default)]
pub(super) struct Shares(usize);

impl Shares {
    /// Returns the index of the first share of a tensor of n elements.
    pub(super) fn next(&mut self, n: usize) -> Result<u32> {
        let first = self.0;
        self.0 += n.div_ceil(SHARE);
        match i32::try_from(self.0) {
            Ok(_) => Ok(first as u32),
            Err(_) => Err(Error::unsupported("tensors are too large for one launch")),
        }
    }

    pub(super) fn count(&self) -> usize {
        self.0
    }
}

/// Returns the table of `Part` structures for `cuda/reduce.cu`, the number of shares, and the part of the kernel name that
/// selects the module.
fn table(tensors: &[&Tensor]) -> Result<(Vec<u8>, usize, &'static str)> {
    const NAME: &str = "a tensor that is summed";
    let mut shares = Shares::default();
    let mut table = Vec::with_capacity(24 * tensors.len());
    let mut kinds = Vec::with_capacity(tensors.len());
    for t in tensors {
        let n = t.elem_count();
        let place = address(t, NAME)?;
        let kind = FloatType::of(t, NAME)?;
        kinds.push(kind);
        let form = kind.is_short() as u32 | (aligned(&[place]) as u32) << 1;
        table.extend(place.to_ne_bytes());
        table.extend((n as i64).to_ne_bytes());
        table.extend(shares.next(n)?.to_ne_bytes());
        table.extend(form.to_ne_bytes());
    }
    Ok((table, shares.count(), FloatType::module_of(kinds)?))
}

/// Computes the sum of `kernel` over all elements. The f64 `total` (one element) is incremented or overwritten. Returns
/// the sum of each share, f64.
fn run(kernel: &'static str, tensors: &[&Tensor], total: &Tensor, add: bool) -> Result<Tensor> {
    let gpu = Gpu::of(total, "a total")?;
    let partial = shares(&gpu, kernel, tensors)?;
    totals(&gpu, &partial, total, add)?;
    Ok(partial)
}

/// The sum of `kernel` over each share of the tensors, f64.
fn shares(gpu: &Gpu, kernel: &'static str, tensors: &[&Tensor]) -> Result<Tensor> {
    let tensors: Vec<&Tensor> = tensors.iter().copied().filter(|t| t.elem_count() > 0).collect();
    let (table, shares, module) = table(&tensors)?;
    let parts = gpu.upload_bytes(&table)?;
    let partial = gpu.empty(shares, DType::F64)?;
    let args = [
        Arg::Address(address(&parts, "a table of tensors")?),
        Arg::small(tensors.len(), "a list of tensors")?,
        Arg::Address(address(&partial, "partial sums")?),
    ];
    // SAFETY: the table describes the tensors, which live until the launch is queued; `partial` has one element per
    // share.
    unsafe { gpu.launch("reduce", [kernel, module], Grid::line(shares, 256), &args)? };
    Ok(partial)
}

/// Computes the sum of the f64 `partial`, which is added to the f64 `total` (one element) or overwrites it.
fn totals(gpu: &Gpu, partial: &Tensor, total: &Tensor, add: bool) -> Result<()> {
    let args = [
        Arg::Address(address_of(partial, "partial sums", DType::F64)?),
        Arg::size(partial.elem_count()),
        Arg::Address(address_of(total, "a total", DType::F64)?),
        Arg::I32(add as i32),
    ];
    // SAFETY: the sizes are those of the tensors.
    unsafe { gpu.launch("reduce", "reduce_totals", Grid::line(1, 1024), &args) }
}

/// Sets the f64 `total` (one element) to the sum of the f64 `numbers`.
pub(crate) fn total(numbers: &Tensor, total: &Tensor) -> Result<()> {
    totals(&Gpu::of(numbers, "numbers that are summed")?, numbers, total, false)
}

fn one(kernel: &'static str, t: &Tensor) -> Result<f64> {
    let total = Gpu::of(t, "a tensor that is summed")?.empty(1, DType::F64)?;
    run(kernel, &[t], &total, false)?;
    let total: Vec<f64> = read(&total, "a total", DType::F64)?;
    total
        .first()
        .copied()
        .ok_or_else(|| Error::internal("a total is empty"))
}

/// Returns the sum of the squares of an f32, bf16 or f16 tensor. Synchronizes with the GPU.
pub(crate) fn sum_squares(t: &Tensor) -> Result<f64> {
    one("sum_squares", t)
}

/// True if every element is finite. Synchronizes with the GPU.
pub(crate) fn all_finite(t: &Tensor) -> Result<bool> {
    Ok(one("count_odd", t)? == 0.0)
}

/// Adds the squares of all elements of f32, bf16 or f16 tensors to the f64 `total` (one element). Returns the sum of each
/// share for `non_finite`.
pub(crate) fn add_squares(tensors: &[&Tensor], total: &Tensor) -> Result<Tensor> {
    run("sum_squares", tensors, total, true)
}

/// Returns the sums of the squares of the shares of tensors, one tensor after the other. Synchronizes with the GPU.
pub(crate) fn squares_of_shares(tensors: &[&Tensor], device: &Device) -> Result<Vec<f64>> {
    read(
        &shares(&Gpu::on(device)?, "sum_squares", tensors)?,
        "sums of squares",
        DType::F64,
    )
}

/// As `add_squares`, with sums of shares that are known.
pub(crate) fn add_shares(sums: &[f64], total: &Tensor) -> Result<Tensor> {
    let gpu = Gpu::of(total, "a total")?;
    let partial = gpu.empty(sums.len(), DType::F64)?;
    write(&partial, "partial sums", DType::F64, sums)?;
    totals(&gpu, &partial, total, true)?;
    Ok(partial)
}

/// Returns the indices of the tensors, of these sizes, whose squares were not finite. Synchronizes with the GPU.
pub(crate) fn non_finite(sums: &Tensor, sizes: &[usize]) -> Result<Vec<usize>> {
    let sums = read::<f64>(sums, "sums of squares", DType::F64)?;
    let (mut rest, mut faults) = (&sums[..], Vec::new());
    for (i, n) in sizes.iter().enumerate() {
        let (own, others) = rest.split_at(n.div_ceil(SHARE).min(rest.len()));
        if !own.iter().all(|x| x.is_finite()) {
            faults.push(i);
        }
        rest = others;
    }
    Ok(faults)
}

/// Computes `min(1, max / (√squares + 1e-6))` as an f32 tensor of one element; `squares` f64.
pub(crate) fn clip_coefficient(squares: &Tensor, max: f64) -> Result<Tensor> {
    let gpu = Gpu::of(squares, "a sum of squares")?;
    let coefficient = gpu.empty(1, DType::F32)?;
    let args = [
        Arg::Address(address_of(squares, "a sum of squares", DType::F64)?),
        Arg::F64(max),
        Arg::Address(address(&coefficient, "a clipping factor")?),
    ];
    // SAFETY: one element each.
    unsafe { gpu.launch("reduce", "clip_coefficient", Grid::line(1, 1), &args)? };
    Ok(coefficient)
}
