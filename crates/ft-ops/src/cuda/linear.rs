//! Linear layers on a GPU. x, dy and the results are bf16 or f32; a weight of the other type is cast for the call.

use super::elementwise::cast;
use super::gemm::{GpuMatrix, ProductBatch, gemm, gemm_batched};
use super::{Arg, FloatType, Gpu, Grid, address, address_of, columns};
use crate::quantized::part_rows;
use candle_core::{DType, Tensor};
use ft_base::Result;

/// Most bytes from one weight to the next in a batch: kernels that use the Tensor Memory Accelerator have strides below 2^40.
const LONGEST_STEP: u64 = 1 << 39;
/// Elements to which the outputs of two products are aligned: kernels read rows in units of 16 bytes.
const OUTPUT_STEP: usize = 128;

fn matrix(t: &Tensor, name: &str, columns: usize) -> Result<GpuMatrix> {
    Ok(GpuMatrix::new(address(t, name)?, FloatType::of(t, name)?, columns))
}

/// Computes `x·wᵀ + bias`, of the type of x; sizes are `(N, O, I)`.
pub(crate) fn forward(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    (rows, outputs, inputs): (usize, usize, usize),
) -> Result<Tensor> {
    let gpu = Gpu::of(x, "x of a linear")?;
    let kind = FloatType::of(x, "x of a linear")?;
    let y = match inputs {
        0 => gpu.zeros((rows, outputs), kind.dtype())?,
        _ => gpu.empty((rows, outputs), kind.dtype())?,
    };
    if let Some(bias) = bias {
        bias_rows(&gpu, bias, &y)?;
    }
    forward_into(&gpu, &y, x, w, (rows, outputs, inputs), bias.is_some())?;
    Ok(y)
}

/// Sets every row of y `[N, O]` to the bias `[O]`.
pub(super) fn bias_rows(gpu: &Gpu, bias: &Tensor, y: &Tensor) -> Result<()> {
    let (rows, outputs) = y.dims2()?;
    let kind = FloatType::of(y, "y of a linear")?;
    let name = [
        "rows_",
        kind.name(),
        "_",
        FloatType::of(bias, "the bias of a linear")?.name(),
    ];
    let args = [
        Arg::Address(address(bias, "the bias of a linear")?),
        Arg::Address(address(y, "y of a linear")?),
        Arg::size(rows),
        Arg::size(outputs),
    ];
    let mut grid = Grid::line(outputs.div_ceil(256), 256);
    grid.blocks.1 = rows.min(1024);
    // SAFETY: `bias` has `outputs` elements, y is [rows, outputs].
    unsafe { gpu.launch("elementwise", name, grid, &args) }
}

/// Computes `x [N, I]·wᵀ` in f32 for any type of x: logits.
pub(crate) fn forward_f32(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let gpu = Gpu::of(x, "x of a linear")?;
    let kind = FloatType::of(x, "x of a linear")?;
    let ((rows, inputs), (outputs, _)) = (x.dims2()?, w.dims2()?);
    if inputs == 0 || rows == 0 {
        return gpu.zeros((rows, outputs), DType::F32);
    }
    let (w, y) = (cast(w, kind)?, gpu.empty((rows, outputs), DType::F32)?);
    let (a, b) = (matrix(x, "x of a linear", inputs)?, matrix(&w, "a weight", inputs)?);
    // SAFETY: [N, I] · [I, O] into [N, O].
    unsafe {
        gemm(
            &gpu,
            (rows, outputs, inputs),
            a,
            b.t(),
            matrix(&y, "logits", outputs)?,
            false,
        )?
    };
    Ok(y)
}

/// Computes `y += x·wᵀ`.
pub(crate) fn forward_add(y: &Tensor, x: &Tensor, w: &Tensor, sizes: (usize, usize, usize)) -> Result<()> {
    forward_into(&Gpu::of(x, "x of a linear")?, y, x, w, sizes, true)
}

fn forward_into(
    gpu: &Gpu,
    y: &Tensor,
    x: &Tensor,
    w: &Tensor,
    (rows, outputs, inputs): (usize, usize, usize),
    add: bool,
) -> Result<()> {
    if inputs == 0 {
        return Ok(());
    }
    let kind = FloatType::of(x, "x of a linear")?;
    let a = matrix(x, "x of a linear", inputs)?;
    let c = matrix(y, "y of a linear", outputs)?;
    // A large weight of the other type is cast in parts, never as a whole.
    let step = if FloatType::of(w, "the weight of a linear")? == kind {
        outputs
    } else {
        part_rows(inputs)
    };
    for first in (0..outputs).step_by(step.max(1)) {
        let count = step.min(outputs - first);
        let part = cast(&w.narrow(0, first, count)?, kind)?;
        let b = matrix(&part, "the weight of a linear", inputs)?.t();
        let c = GpuMatrix {
            address: c.address + (first * c.kind.bytes()) as u64,
            ..c
        };
        // SAFETY: columns first .. first + count of y; the sizes were checked by the caller.
        unsafe { gemm(gpu, (rows, count, inputs), a, b, c, add)? };
    }
    Ok(())
}

/// True if one call can compute the products with both weights: two of the type of x, which vector loads can read.
pub(crate) fn can_join(x: &Tensor, ws: [&Tensor; 2]) -> bool {
    let same = |w: &Tensor| w.dtype() == x.dtype() && w.dims() == ws[0].dims();
    let place = |w: &Tensor| address(w, "the weight of a linear").is_ok_and(|place| place.is_multiple_of(16));
    ws.iter().all(|w| same(w) && place(w)) && !ws[0].dims().contains(&0)
}

/// Computes `x·wᵀ + bias` for two weights that can be joined, in one call; both have a bias, or none has. Sizes are `(N, O, I)`.
pub(crate) fn forward_two(
    x: &Tensor,
    ws: [&Tensor; 2],
    biases: Option<[&Tensor; 2]>,
    sizes: (usize, usize, usize),
) -> Result<[Tensor; 2]> {
    let gpu = Gpu::of(x, "x of a linear")?;
    let ys = two_outputs(x, ws, (sizes.0, sizes.1))?;
    for (bias, y) in biases.iter().flatten().zip(&ys) {
        bias_rows(&gpu, bias, y)?;
    }
    two_into(&gpu, [&ys[0], &ys[1]], x, ws, sizes, biases.is_some())?;
    Ok(ys)
}

/// Two uninitialized outputs `[N, O]` of the type of x in one allocation, in the order of their weights in memory: then each step of a batch
/// of both products is positive.
pub(crate) fn two_outputs(x: &Tensor, ws: [&Tensor; 2], (rows, outputs): (usize, usize)) -> Result<[Tensor; 2]> {
    let step = (rows * outputs).next_multiple_of(OUTPUT_STEP);
    let both = Gpu::of(x, "x of a linear")?.empty(2 * step, x.dtype())?;
    let part = |i: usize| -> Result<Tensor> { Ok(both.narrow(0, i * step, rows * outputs)?.reshape((rows, outputs))?) };
    let [a, b] = ws.map(|w| address(w, "the weight of a linear"));
    let first = usize::from(a? > b?);
    Ok([part(first)?, part(1 - first)?])
}

/// Computes `y += x·wᵀ` for two weights that can be joined, in one call if the outputs are those of `two_outputs`.
pub(crate) fn forward_add_two(
    ys: [&Tensor; 2],
    x: &Tensor,
    ws: [&Tensor; 2],
    sizes: (usize, usize, usize),
) -> Result<()> {
    two_into(&Gpu::of(x, "x of a linear")?, ys, x, ws, sizes, true)
}

/// The second weight and output are those of a batch of two. cuBLAS does not document negative steps from one matrix to the next, so the
/// weight with the lower address is first; outputs in the other order, or a very long step, are two calls.
fn two_into(
    gpu: &Gpu,
    ys: [&Tensor; 2],
    x: &Tensor,
    ws: [&Tensor; 2],
    (rows, outputs, inputs): (usize, usize, usize),
    add: bool,
) -> Result<()> {
    let a = matrix(x, "x of a linear", inputs)?;
    let one = |i: usize| -> Result<(GpuMatrix, GpuMatrix)> {
        let (b, c) = (
            matrix(ws[i], "the weight of a linear", inputs)?,
            matrix(ys[i], "y of a linear", outputs)?,
        );
        Ok((b.t(), c))
    };
    let mut both = [one(0)?, one(1)?];
    both.sort_by_key(|(b, _)| b.address);
    let [(b, c), (second_b, second_c)] = both;
    if second_c.address < c.address || second_b.address - b.address > LONGEST_STEP {
        for (b, c) in both {
            // SAFETY: the sizes were checked by the caller.
            unsafe { gemm(gpu, (rows, outputs, inputs), a, b, c, add)? };
        }
        return Ok(());
    }
    let step = |from: GpuMatrix, to: GpuMatrix| (to.address - from.address) as i64 / from.kind.bytes() as i64;
    let batch = ProductBatch {
        count: 2,
        steps: [0, step(b, second_b), step(c, second_c)],
    };
    // SAFETY: the sizes were checked by the caller; the outputs are two tensors.
    unsafe { gemm_batched(gpu, (rows, outputs, inputs), [a, b, c], 1.0, add, batch) }
}

/// Computes `dy·w`, of the type of dy; sizes are `(N, I, O)`.
pub(crate) fn backward_input(
    dy: &Tensor,
    w: &Tensor,
    (rows, inputs, outputs): (usize, usize, usize),
) -> Result<Tensor> {
    let gpu = Gpu::of(dy, "dy of a linear")?;
    let dtype = FloatType::of(dy, "dy of a linear")?.dtype();
    if outputs == 0 {
        return gpu.zeros((rows, inputs), dtype);
    }
    let dx = gpu.empty((rows, inputs), dtype)?;
    backward_into(&gpu, &dx, dy, w, (rows, inputs, outputs), false)?;
    Ok(dx)
}

/// Computes `dx += dy·w`.
pub(crate) fn backward_input_add(dx: &Tensor, dy: &Tensor, w: &Tensor, sizes: (usize, usize, usize)) -> Result<()> {
    backward_into(&Gpu::of(dy, "dy of a linear")?, dx, dy, w, sizes, true)
}

fn backward_into(
    gpu: &Gpu,
    dx: &Tensor,
    dy: &Tensor,
    w: &Tensor,
    (rows, inputs, outputs): (usize, usize, usize),
    add: bool,
) -> Result<()> {
    if outputs == 0 {
        return Ok(());
    }
    let w = cast(w, FloatType::of(dy, "dy of a linear")?)?;
    let (a, b) = (
        matrix(dy, "dy of a linear", outputs)?,
        matrix(&w, "the weight of a linear", inputs)?,
    );
    let c = matrix(dx, "dx of a linear", inputs)?;
    // SAFETY: the sizes were checked by the caller.
    unsafe { gemm(gpu, (rows, inputs, outputs), a, b, c, add) }
}

/// Computes `dyᵀ·x` in f32, added to `sum` or new; sizes are `(O, I, N)`.
pub(crate) fn grad_weight(
    dy: &Tensor,
    x: &Tensor,
    (outputs, inputs, rows): (usize, usize, usize),
    sum: Option<&Tensor>,
) -> Result<Tensor> {
    let gpu = Gpu::of(dy, "dy of a linear")?;
    let dw = match sum {
        Some(sum) => sum.clone(),
        None if rows == 0 => gpu.zeros((outputs, inputs), DType::F32)?,
        None => gpu.empty((outputs, inputs), DType::F32)?,
    };
    if rows == 0 {
        return Ok(dw);
    }
    // Uses the wider of the two types, so that an f32 gradient with bf16 or f16 activations keeps its precision.
    let kinds = (FloatType::of(dy, "dy of a linear")?, FloatType::of(x, "x of a linear")?);
    let kind = if kinds.0 == kinds.1 { kinds.0 } else { FloatType::F32 };
    let (dy, x) = (cast(dy, kind)?, cast(x, kind)?);
    let a = matrix(&dy, "dy of a linear", outputs)?.t();
    let b = matrix(&x, "x of a linear", inputs)?;
    let c = GpuMatrix::new(
        address_of(&dw, "the gradient of a weight", DType::F32)?,
        FloatType::F32,
        inputs,
    );
    // SAFETY: the sizes were checked by the caller.
    unsafe { gemm(&gpu, (outputs, inputs, rows), a, b, c, sum.is_some())? };
    Ok(dw)
}

/// Sums dy `[N, O]` over its rows: `[O]` f32.
pub(crate) fn grad_bias(dy: &Tensor) -> Result<Tensor> {
    columns::sums(&Gpu::of(dy, "dy of a linear")?, dy, None, dy.dims2()?)
}
