//! Adafactor updates on a GPU: a few small kernels per parameter, with no synchronization.
//!
//! Letters: R rows and C columns of a matrix; a vector has no rows, and its elements are columns.

use super::reduce::SHARE;
use super::{Arg, FloatType, Gpu, Grid, address, address_of, aligned};
use crate::step::{FoundInf, Moment, ParameterStep, Precision};
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};

/// Smallest number of rows that a thread sums, and largest number of stripes of rows.
const STRIPE: usize = 64;
const STRIPES: usize = 128;
const THREADS: usize = 256;

/// Updates the parameters in place.
pub(crate) fn run(items: &[ParameterStep], coefficient: f32, gate: FoundInf) -> Result<()> {
    let scalar = |t: Option<&Tensor>, dtype| t.map_or(Ok(0), |t| address_of(t, "a number of an optimizer step", dtype));
    let finite = [
        Arg::Address(scalar(gate.finite, DType::F64)?),
        Arg::small(
            gate.finite.map_or(0, Tensor::elem_count),
            "the numbers of a found_inf guard",
        )?,
    ];
    let factor = [
        Arg::F32(coefficient),
        Arg::Address(scalar(gate.coefficient, DType::F32)?),
    ];
    let common = CommonArgs { finite, factor };
    let all = items.iter().filter(|item| item.weight.elem_count() > 0);
    all.into_iter().try_for_each(|item| common.step(item))
}

/// The last arguments of the kernels: the `found_inf` guard, and the factor of the gradients.
struct CommonArgs {
    finite: [Arg; 2],
    factor: [Arg; 2],
}

fn wrong(what: &str) -> Error {
    Error::shape(format!("an optimizer step was given {what}"))
}

/// Returns the second moment of a parameter, f32: the address of the row means (0 for a vector) and of the other
/// means; R and C.
fn moments(item: &ParameterStep) -> Result<(u64, u64, usize, usize)> {
    let place = |t: &Tensor, n: usize| {
        if t.elem_count() == n {
            address_of(t, "an optimizer state", DType::F32)
        } else {
            Err(wrong("a state of another size").found(t.elem_count()).expected(n))
        }
    };
    match (item.first, item.second, item.weight.dims()) {
        (Some(Moment::F32(rows)), Some(Moment::F32(columns)), &[r, c]) => {
            Ok((place(rows, r)?, place(columns, c)?, r, c))
        }
        (None, Some(Moment::F32(whole)), _) => {
            let n = item.weight.elem_count();
            Ok((0, place(whole, n)?, 1, n))
        }
        _ => Err(wrong("the wrong moments")),
    }
}

/// Returns the weight arguments of `change` in `cuda/weight.cuh`: address, address of the low 16 bits, random key
/// and form. `gradient` is read together with the weight.
fn weight(item: &ParameterStep, gradient: u64) -> Result<[Arg; 4]> {
    let kind = FloatType::of(item.weight, "a weight")?;
    let (low, key, random) = match item.precision {
        Precision::Whole => (0, 0, false),
        Precision::Master(low) if low.elem_count() == item.weight.elem_count() => (
            address_of(low, "the low 16 bits of a master weight", DType::I16)?,
            0,
            false,
        ),
        Precision::Master(_) => return Err(wrong("tensors of different sizes")),
        Precision::Stochastic(rng) => (0, rng.key(), true),
    };
    if (kind == FloatType::F32) != matches!(item.precision, Precision::Whole) {
        return Err(wrong("a weight whose dtype differs from its precision setting"));
    }
    let place = address(item.weight, "a weight")?;
    let form = kind.is_short() as i32 | (aligned(&[place, low, gradient]) as i32) << 2 | (random as i32) << 3;
    Ok([Arg::Address(place), Arg::Address(low), Arg::U64(key), Arg::I32(form)])
}

impl CommonArgs {
    fn step(&self, item: &ParameterStep) -> Result<()> {
        let gpu = Gpu::of(item.weight, "a weight")?;
        let n = item.weight.elem_count();
        if item.gradient.elem_count() != n {
            return Err(wrong("tensors of different sizes")
                .found(item.gradient.elem_count())
                .expected(n));
        }
        let gradient = address_of(item.gradient, "a gradient", DType::F32)?;
        let weight = weight(item, gradient)?;
        let (rows, columns, r, c) = moments(item)?;
        let beta2 = 1.0 - (item.step as f64).powf(-0.8);
        let [keep, take] = [Arg::F32(beta2 as f32), Arg::F32((1.0 - beta2) as f32)];
        let g = Arg::Address(gradient);

        let half = FloatType::of(item.weight, "a weight")?.module();
        let launch = |kernel: &'static str, grid: Grid, args: &[Arg], factor: bool| {
            let factor = if factor { &self.factor[..] } else { &[] };
            let args = [args, &self.finite, factor].concat();
            // SAFETY: the sizes of gradient, weight and means were checked above against each other; the buffers of
            // sums have one element per block.
            unsafe { gpu.launch("adafactor", [kernel, half], grid, &args) }
        };
        if rows != 0 {
            let args = [g, Arg::size(c), Arg::Address(rows), keep, take];
            launch("adafactor_rows", Grid::line(r, threads(c)), &args, true)?;
        }
        // Columns: sums within stripes of rows, then over the stripes.
        let count = STRIPE.max(r.div_ceil(STRIPES));
        let stripes = r.div_ceil(count);
        let sums = gpu.empty(stripes * c, DType::F32)?;
        let sums = Arg::Address(address(&sums, "sums of columns")?);
        let line = Grid::line(c.div_ceil(THREADS), THREADS as u32);
        let grid = Grid {
            blocks: (line.blocks.0, stripes),
            ..line
        };
        let args = [g, Arg::size(r), Arg::size(c), Arg::size(count), sums];
        launch("adafactor_stripes", grid, &args, true)?;
        let (row, column) = (Arg::Address(rows), Arg::Address(columns));
        let args = [sums, Arg::size(stripes), Arg::size(r), Arg::size(c), column, keep, take];
        launch("adafactor_columns", line, &args, false)?;

        let scalars = gpu.empty(2, DType::F32)?;
        let scalars = address(&scalars, "numbers of a step")?;
        let (mean, size) = (Arg::Address(scalars), Arg::Address(scalars + 4));
        if rows != 0 {
            let args = [Arg::Address(rows), Arg::size(r), mean];
            // SAFETY: `rows` has r elements, and `mean` is one number.
            unsafe { gpu.launch("adafactor", "adafactor_mean", Grid::line(1, 1024), &args)? };
        }
        let shares = c.div_ceil(SHARE);
        let partial = gpu.empty(r * shares, DType::F64)?;
        let partial = Arg::Address(address(&partial, "partial sums")?);
        let grid = Grid {
            blocks: (r, shares),
            ..Grid::line(r, threads(c))
        };
        let args = [g, Arg::size(c), row, mean, column, partial];
        launch("adafactor_squares", grid, &args, true)?;
        let args = [partial, Arg::size(r * shares), Arg::size(n), Arg::F64(item.lr), size];
        launch("adafactor_size", Grid::line(1, 1024), &args, true)?;
        let keep = Arg::F32((1.0 - item.weight_decay * item.lr) as f32);
        let args = [g, Arg::size(n), Arg::size(c), row, mean, column, keep, size];
        let args = [&weight[..], &args].concat();
        launch(
            "adafactor_apply",
            Grid::line(n.div_ceil(SHARE), THREADS as u32),
            &args,
            false,
        )
    }
}

/// Returns the number of threads for a row of `c` elements.
fn threads(c: usize) -> u32 {
    c.div_ceil(4).div_ceil(32).clamp(1, 8) as u32 * 32
}
