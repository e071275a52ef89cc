//! Products with quantized weights on a GPU: W is dequantized block by block into one buffer, and each block is
//! multiplied by cuBLAS. For a few tokens a single kernel dequantizes in registers. Products of 8-bit operands are in
//! `eight_bit`.

use super::elementwise::cast;
use super::gemm::{GpuMatrix, gemm};
use super::linear::bias_rows;
use super::memory::{to_f32_vec, write};
use super::{Arg, FloatType, Gpu, Grid, KernelName, address, address_of, aligned, eight_bit, narrow};
use crate::dtype::Dtype;
use crate::quantized::{CodeType, FEW, FP4_TABLE, ProductType, QTensors, ScaleTensors, ScaleType, TILE};
use candle_core::cuda::DeviceId;
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, OnceLock};

/// `FEW` in the names of kernels.
const MOST: &str = "_8";
const WARPS: usize = 4;
/// Blocks of W start at multiples of this number of rows or columns.
const STEP: usize = 128;

/// The weight argument of the kernels: the structures of `cuda/decode.cu`.
enum WeightArg {
    /// bf16: address of the data, stride, columns.
    Halves([u64; 3]),
    /// int8 and int4. Addresses of data and scales, stride; columns and log2 of the group size in one word.
    Grouped([u64; 4]),
    /// Addresses of data, absmax, absmax codes, table, absmax scales; offset and columns in one word.
    Nf4([u64; 6]),
    /// Addresses of codes, scales, zero points (0: none), groups of the columns (0: none), stride; columns and log2 of the
    /// group size, code type and scale type, rounding and middle code in one word each.
    Scaled([u64; 8]),
}

impl WeightArg {
    /// The structure, word by word.
    fn words(&self) -> &[u64] {
        match self {
            WeightArg::Halves(words) => words,
            WeightArg::Grouped(words) => words,
            WeightArg::Nf4(words) => words,
            WeightArg::Scaled(words) => words,
        }
    }
}

fn pair(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

/// The name of the format in kernel names.
fn format(w: &QTensors) -> &'static str {
    match &w.scales {
        ScaleTensors::Bf16 { .. } => "half",
        ScaleTensors::Int8 { .. } => "int8",
        ScaleTensors::Int4 { .. } => "int4",
        ScaleTensors::Scaled { kind, .. } => match kind.code {
            CodeType::U4 => "u4",
            CodeType::E2m1 => "e2m1",
            CodeType::U8 => "u8",
            CodeType::I8 => "i8",
            CodeType::E4m3 => "e4m3",
        },
        ScaleTensors::Nf4 { levels, .. } | ScaleTensors::Nf4Double { levels, .. } if **levels == FP4_TABLE => "fp4",
        ScaleTensors::Nf4 { .. } | ScaleTensors::Nf4Double { .. } => "nf4",
    }
}

/// Returns the structure. The addresses are valid as long as `w` lives.
fn weight(gpu: &Gpu, w: &QTensors) -> Result<WeightArg> {
    const NAME: &str = "a quantized weight";
    let columns = narrow(w.columns, "a row of a weight")? as u32;
    let codes = address_of(&w.codes, NAME, DType::U8)?;
    Ok(match &w.scales {
        ScaleTensors::Bf16 { stride } => WeightArg::Halves([codes, *stride as u64, pair(columns, 0)]),
        ScaleTensors::Int8 { stride, group, scales } | ScaleTensors::Int4 { stride, group, scales } => {
            let dtype = match w.scales {
                ScaleTensors::Int8 { .. } => DType::F32,
                _ => DType::U32,
            };
            let shift = if *group < w.columns { group.ilog2() } else { 31 };
            let scales = address_of(scales, NAME, dtype)?;
            WeightArg::Grouped([codes, scales, *stride as u64, pair(columns, shift)])
        }
        ScaleTensors::Scaled {
            kind,
            stride,
            group,
            scales,
            zeros,
            order,
        } => {
            let shift = if *group < w.columns { group.ilog2() } else { 31 };
            let optional = |t: &Option<Tensor>, dtype| t.as_ref().map_or(Ok(0), |t| address_of(t, NAME, dtype));
            let scale = match kind.scale {
                ScaleType::F32 => 0,
                ScaleType::F16 => 1,
                ScaleType::Bf16 => 2,
                ScaleType::E8m0 => 3,
            };
            let product = match kind.product {
                ProductType::F32 => 0,
                ProductType::F16 => 1,
                ProductType::Bf16 => 2,
                ProductType::Absmax127 => 3,
            };
            WeightArg::Scaled([
                codes,
                address_of(scales, NAME, DType::U8)?,
                optional(zeros, DType::U8)?,
                optional(order, DType::U32)?,
                *stride as u64,
                pair(columns, shift),
                pair(scale, product),
                pair(u32::from(kind.code.middle()), 0),
            ])
        }
        ScaleTensors::Nf4 { absmax, .. } => {
            let absmax = address_of(absmax, NAME, DType::F32)?;
            WeightArg::Nf4([codes, absmax, 0, 0, 0, pair(0, columns)])
        }
        ScaleTensors::Nf4Double {
            codes: nested,
            table,
            scales,
            offset,
            ..
        } => WeightArg::Nf4([
            codes,
            0,
            address_of(nested, NAME, DType::U8)?,
            table_on(gpu, table)?,
            address_of(scales, NAME, DType::F32)?,
            pair(offset.to_bits(), columns),
        ]),
    })
}

/// Returns the address of the absmax table, uploaded once per device: there is only one table.
fn table_on(gpu: &Gpu, table: &'static [f32; 256]) -> Result<u64> {
    static KEPT: OnceLock<Mutex<HashMap<DeviceId, Tensor>>> = OnceLock::new();
    const NAME: &str = "a quantization table";
    let mut kept = KEPT
        .get_or_init(Mutex::default)
        .lock()
        .map_err(|_| Error::internal("another thread failed while it used the quantization table"))?;
    match kept.entry(gpu.device().id()) {
        Entry::Occupied(known) => address(known.get(), NAME),
        Entry::Vacant(place) => {
            let there = gpu.empty(table.len(), DType::F32)?;
            write(&there, NAME, DType::F32, table)?;
            address(place.insert(there), NAME)
        }
    }
}

/// Queues a kernel whose last argument is the weight.
///
/// # Safety
/// As `Gpu::launch`.
unsafe fn launch(gpu: &Gpu, kernel: impl Into<KernelName>, grid: Grid, args: &[Arg], weight: &WeightArg) -> Result<()> {
    // SAFETY: promised by the caller.
    unsafe {
        match weight {
            WeightArg::Halves(numbers) => gpu.launch_with("decode", kernel, grid, args, Some(numbers)),
            WeightArg::Grouped(numbers) => gpu.launch_with("decode", kernel, grid, args, Some(numbers)),
            WeightArg::Scaled(numbers) => gpu.launch_with("decode", kernel, grid, args, Some(numbers)),
            WeightArg::Nf4(numbers) => gpu.launch_with("decode", kernel, grid, args, Some(numbers)),
        }
    }
}

/// Returns the type of the dequantized values.
pub(super) fn dequantized_type(w: &QTensors) -> FloatType {
    match w.dequantized_dtype {
        Dtype::F32 => FloatType::F32,
        Dtype::Bf16 => FloatType::Bf16,
        Dtype::F16 => FloatType::F16,
    }
}

/// A range of rows or of columns of W: `(first, count)`.
type IndexRange = (usize, usize);

/// Dequantizes a part of W into the first elements of `to`, as a matrix `[count, width]`.
fn decode(gpu: &Gpu, w: &QTensors, (first, count): IndexRange, (from, width): IndexRange, to: &Tensor) -> Result<()> {
    let kind = dequantized_type(w);
    if count * width > to.elem_count() || first + count > w.rows || from + width > w.columns {
        return Err(Error::shape("a part of a quantized weight does not match its buffer"));
    }
    let args = [
        Arg::size(first),
        Arg::size(count),
        Arg::small(from, "a row of a weight")?,
        Arg::small(width, "a row of a weight")?,
        Arg::Address(address_of(to, "a dequantized weight", kind.dtype())?),
    ];
    let kernel = ["decode_", format(w), "_", kind.name()];
    let weight = weight(gpu, w)?;
    // SAFETY: the part lies inside W, whose tensors were checked on construction, and fits into `to`.
    unsafe { launch(gpu, kernel, Grid::stride(count * width / 8 + 1), &args, &weight) }
}

/// True if `dequantize_all` takes these weights in one launch: one format, type and shape.
pub(crate) fn alike(a: &QTensors, b: &QTensors) -> bool {
    (a.rows, a.columns, a.dequantized_dtype, format(a)) == (b.rows, b.columns, b.dequantized_dtype, format(b))
}

/// Dequantizes weights that are alike, each whole, one after the other into the first elements of `to`.
pub(crate) fn dequantize_all(gpu: &Gpu, weights: &[&QTensors], to: &Tensor) -> Result<()> {
    let Some(first) = weights.first() else { return Ok(()) };
    let (elements, kind) = (first.rows * first.columns, dequantized_type(first));
    if weights.len() * elements > to.elem_count() || !weights.iter().all(|w| alike(first, w)) {
        return Err(Error::internal("quantized weights do not match their buffer"));
    }
    let mut table: Vec<u8> = Vec::new();
    for w in weights {
        table.extend(weight(gpu, w)?.words().iter().flat_map(|word| word.to_ne_bytes()));
    }
    let table = gpu.upload_bytes(&table)?;
    let args = [
        Arg::Address(address(&table, "a table of weights")?),
        Arg::size(first.rows),
        Arg::Address(address_of(to, "dequantized weights", kind.dtype())?),
    ];
    let mut grid = Grid::stride(elements / 8 + 1);
    grid.blocks.1 = weights.len();
    // SAFETY: `to` has room for all weights, whose tensors were checked on construction.
    unsafe { gpu.launch("decode", ["decode_all_", format(first), "_", kind.name()], grid, &args) }
}

/// Returns dequantized rows in f32 on the host. Synchronizes with the GPU.
pub(crate) fn rows(w: &QTensors, first: usize, n: usize) -> Result<Vec<f32>> {
    let gpu = Gpu::of(&w.codes, "a quantized weight")?;
    let to = gpu.empty((n, w.columns), dequantized_type(w).dtype())?;
    decode(&gpu, w, (first, n), (0, w.columns), &to)?;
    to_f32_vec(&to)
}

/// Returns how many of `lines`, each of `length` elements, are dequantized at a time.
fn step(lines: usize, length: usize) -> usize {
    let most = TILE / length.max(1);
    let whole = most / STEP * STEP;
    lines.min(if whole > 0 { whole } else { most.max(1) }).max(1)
}

/// Computes `x·wᵀ + bias` for `x [N, I]`: `[N, O]` of the type of x.
pub(crate) fn forward(x: &Tensor, w: &QTensors, bias: Option<&Tensor>) -> Result<Tensor> {
    let gpu = Gpu::of(x, "x of a linear")?;
    let (n, dtype) = (x.dims()[0], FloatType::of(x, "x of a linear")?.dtype());
    let y = match w.columns {
        0 => gpu.zeros((n, w.rows), dtype)?,
        _ => gpu.empty((n, w.rows), dtype)?,
    };
    if let Some(bias) = bias {
        bias_rows(&gpu, bias, &y)?;
    }
    forward_into(&gpu, &y, x, w, bias.is_some())?;
    Ok(y)
}

/// Computes `y += x·wᵀ`.
pub(crate) fn forward_add(y: &Tensor, x: &Tensor, w: &QTensors) -> Result<()> {
    forward_into(&Gpu::of(x, "x of a linear")?, y, x, w, true)
}

pub(super) fn forward_into(gpu: &Gpu, y: &Tensor, x: &Tensor, w: &QTensors, add: bool) -> Result<()> {
    let (n, outputs, inputs) = (x.dims()[0], w.rows, w.columns);
    if n == 0 || outputs == 0 || inputs == 0 {
        return Ok(());
    }
    let kind = FloatType::of(x, "x of a linear")?;
    if n <= FEW && kind == dequantized_type(w) && y.dtype() == kind.dtype() {
        return few(gpu, y, x, w, add);
    }
    if eight_bit::applies(x, y, w)? {
        return eight_bit::forward_into(gpu, y, x, w, add);
    }
    let a = GpuMatrix::new(address(x, "x of a linear")?, kind, inputs);
    let to = GpuMatrix::new(
        address(y, "y of a linear")?,
        FloatType::of(y, "y of a linear")?,
        outputs,
    );
    let step = step(outputs, inputs);
    let tile = gpu.empty(step * inputs, dequantized_type(w).dtype())?;
    for first in (0..outputs).step_by(step) {
        let count = step.min(outputs - first);
        decode(gpu, w, (first, count), (0, inputs), &tile)?;
        let part = cast(&tile.narrow(0, 0, count * inputs)?, kind)?;
        let b = GpuMatrix::new(address(&part, "a dequantized weight")?, kind, inputs).t();
        let c = GpuMatrix {
            address: to.address + (first * to.kind.bytes()) as u64,
            ..to
        };
        // SAFETY: columns first .. first + count of y; the tile holds as many rows of W.
        unsafe { gemm(gpu, (n, count, inputs), a, b, c, add)? };
    }
    Ok(())
}

/// Computes the product in one kernel. x, y and the dequantized values have one type.
fn few(gpu: &Gpu, y: &Tensor, x: &Tensor, w: &QTensors, add: bool) -> Result<()> {
    let (n, outputs, inputs) = (x.dims()[0], w.rows, w.columns);
    let (format, weight) = (format(w), weight(gpu, w)?);
    let kind = dequantized_type(w);
    let from = address(x, "x of a linear")?;
    let codes = address(&w.codes, "a quantized weight")?;
    // Columns in 16 bytes of quantized data.
    let wide = match weight {
        WeightArg::Scaled(_) | WeightArg::Halves(_) => 8,
        _ if format == "int8" => 16,
        _ => 32,
    };
    let form = if inputs.is_multiple_of(wide) && aligned(&[from, codes]) {
        "_packed"
    } else {
        "_single"
    };
    let most = if n == 1 { "_1" } else { MOST };
    let kernel = ["few_", format, "_", kind.name(), most, form];
    let args = [
        Arg::size(outputs),
        Arg::Address(from),
        Arg::Address(address_of(y, "y of a linear", kind.dtype())?),
        Arg::small(n, "a batch")?,
        Arg::I32(add as i32),
    ];
    let grid = Grid::line(outputs.div_ceil(WARPS), 32 * WARPS as u32);
    // SAFETY: x is [n, inputs], y [n, outputs], n at most FEW; the tensors of W were checked on construction.
    unsafe { launch(gpu, kernel, grid, &args, &weight) }
}

/// Computes `dy·w` for `dy [N, O]`: `[N, I]` of the type of dy.
pub(crate) fn backward_input(dy: &Tensor, w: &QTensors) -> Result<Tensor> {
    let gpu = Gpu::of(dy, "dy of a linear")?;
    let (n, dtype) = (dy.dims()[0], FloatType::of(dy, "dy of a linear")?.dtype());
    if w.rows == 0 {
        return gpu.zeros((n, w.columns), dtype);
    }
    let dx = gpu.empty((n, w.columns), dtype)?;
    backward_into(&gpu, &dx, dy, w, false)?;
    Ok(dx)
}

/// Computes `dx += dy·w`.
pub(crate) fn backward_input_add(dx: &Tensor, dy: &Tensor, w: &QTensors) -> Result<()> {
    backward_into(&Gpu::of(dy, "dy of a linear")?, dx, dy, w, true)
}

/// Loops over columns of W, so that each element of dx is rounded once.
fn backward_into(gpu: &Gpu, dx: &Tensor, dy: &Tensor, w: &QTensors, add: bool) -> Result<()> {
    let (n, outputs, inputs) = (dy.dims()[0], w.rows, w.columns);
    if n == 0 || outputs == 0 || inputs == 0 {
        return Ok(());
    }
    if eight_bit::applies(dy, dx, w)? {
        return eight_bit::backward_into(gpu, dx, dy, w, add);
    }
    let kind = FloatType::of(dy, "dy of a linear")?;
    let a = GpuMatrix::new(address(dy, "dy of a linear")?, kind, outputs);
    let to = GpuMatrix::new(
        address(dx, "dx of a linear")?,
        FloatType::of(dx, "dx of a linear")?,
        inputs,
    );
    let step = step(inputs, outputs);
    let tile = gpu.empty(outputs * step, dequantized_type(w).dtype())?;
    for from in (0..inputs).step_by(step) {
        let width = step.min(inputs - from);
        decode(gpu, w, (0, outputs), (from, width), &tile)?;
        let part = cast(&tile.narrow(0, 0, outputs * width)?, kind)?;
        let b = GpuMatrix::new(address(&part, "a dequantized weight")?, kind, width);
        let c = GpuMatrix {
            address: to.address + (from * to.kind.bytes()) as u64,
            ..to
        };
        // SAFETY: columns from .. from + width of dx; the tile holds as many columns of W.
        unsafe { gemm(gpu, (n, width, outputs), a, b, c, add)? };
    }
    Ok(())
}
