//! Products of 8-bit operands (`quantized/eight_bit`): kernels of `cuda/eight_bit.cu` around one product of cuBLASLt.

use super::gemm::GpuMatrix;
use super::{Arg, FloatType, Gpu, Grid, address, address_of, aligned, narrow};
use crate::quantized::{FEW, Products, QTensors, part};
use candle_core::cuda::DeviceId;
use candle_core::cuda::cudarc::cublas::sys::cublasOperation_t;
use candle_core::cuda::cudarc::cublaslt::{result, sys};
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, OnceLock};
use sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;

/// The type of the operands of a product.
#[derive(Clone, Copy, PartialEq)]
enum OperandType {
    Int8,
    E4m3,
}

impl OperandType {
    fn of(products: Products) -> Self {
        match products {
            Products::Fp8 => OperandType::E4m3,
            _ => OperandType::Int8,
        }
    }

    fn name(self) -> &'static str {
        match self {
            OperandType::Int8 => "int8",
            OperandType::E4m3 => "e4m3",
        }
    }

    fn data_type(self) -> sys::cudaDataType {
        match self {
            OperandType::Int8 => sys::cudaDataType_t::CUDA_R_8I,
            OperandType::E4m3 => sys::cudaDataType_t::CUDA_R_8F_E4M3,
        }
    }

    /// The type of the sums, for cuBLAS and in kernel names; and the type of the computation.
    fn sums(self) -> (sys::cudaDataType, &'static str, sys::cublasComputeType_t) {
        match self {
            OperandType::Int8 => (
                sys::cudaDataType_t::CUDA_R_32I,
                "s32",
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32I,
            ),
            OperandType::E4m3 => (
                sys::cudaDataType_t::CUDA_R_32F,
                "f32",
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            ),
        }
    }

    /// The number 1 or 0 as a factor of the product.
    fn factor(self, one: bool) -> [u8; 4] {
        match self {
            OperandType::Int8 => i32::from(one).to_ne_bytes(),
            OperandType::E4m3 => f32::from(u8::from(one)).to_ne_bytes(),
        }
    }
}

/// The codes of a matrix `[rows, k]`, and one scale for each row.
struct QuantizedRows {
    codes: Tensor,
    scales: Tensor,
    rows: usize,
    k: usize,
}

/// Quantizes x `[N, K]`, times `factors` `[K]` if given.
fn quantize(gpu: &Gpu, x: &Tensor, factors: Option<&Tensor>, operand: OperandType) -> Result<QuantizedRows> {
    const NAME: &str = "an operand of a product";
    let (rows, k) = x.dims2()?;
    let kind = FloatType::of(x, NAME)?;
    let (codes, scales) = (gpu.empty((rows, k), DType::U8)?, gpu.empty(rows, DType::F32)?);
    let factors = factors.map_or(Ok(0), |f| address_of(f, "the scales of a weight", DType::F32))?;
    let args = [
        Arg::Address(address(x, NAME)?),
        Arg::Address(factors),
        Arg::small(k, "a row of a product")?,
        Arg::Address(address(&codes, NAME)?),
        Arg::Address(address(&scales, NAME)?),
    ];
    let name = ["quantize_", operand.name(), "_", kind.name()];
    // A short row has no work for more warps.
    let threads = (k / kind.pack()).next_multiple_of(32).clamp(32, 256);
    // SAFETY: x and the codes are [rows, k], `factors` has k elements or is null, `scales` has one element for each row.
    unsafe { gpu.launch("eight_bit", name, Grid::line(rows, threads as u32), &args)? };
    Ok(QuantizedRows { codes, scales, rows, k })
}

/// True if this product has 8-bit operands: more than a few tokens, aligned to 16 bytes.
pub(super) fn applies(from: &Tensor, to: &Tensor, w: &QTensors) -> Result<bool> {
    if w.eight_bit().is_none() || from.dims()[0] <= FEW {
        return Ok(false);
    }
    let addresses = [
        address(from, "an operand of a product")?,
        address(to, "a product")?,
        address(&w.codes, "a quantized weight")?,
    ];
    Ok(aligned(&addresses))
}

/// Computes `y [N, O] (+)= x·wᵀ`, if `applies`.
pub(super) fn forward_into(gpu: &Gpu, y: &Tensor, x: &Tensor, w: &QTensors, add: bool) -> Result<()> {
    let operand = OperandType::of(w.products);
    let Some(scales) = w.eight_bit() else { return Ok(()) };
    let x = quantize(gpu, x, None, operand)?;
    let codes = address_of(&w.codes, "a quantized weight", DType::U8)?;
    let step = part(x.rows, w.rows, w.columns);
    let tile = match operand {
        OperandType::Int8 => None,
        OperandType::E4m3 => Some(gpu.empty(step * w.columns, DType::U8)?),
    };
    let sums = gpu.empty(x.rows * step, DType::F32)?;
    for first in (0..w.rows).step_by(step) {
        let count = step.min(w.rows - first);
        let from = codes + (first * w.columns) as u64;
        let part = match &tile {
            None => from,
            Some(tile) => {
                let to = address(tile, "a part of a weight")?;
                let packs = count * w.columns / 16;
                let args = [Arg::Address(from), Arg::size(packs), Arg::Address(to)];
                // SAFETY: `count` rows of W lie behind each other, and fit into the tile.
                unsafe { gpu.launch("eight_bit", "converted_e4m3", Grid::stride(packs), &args)? };
                to
            }
        };
        // SAFETY: `part` is the address of the `count` rows of K codes that lie in W or were written to the tile.
        unsafe { product(gpu, operand, &x, part, count, &sums)? };
        let across = Some(&scales.narrow(0, first, count)?).map(|s| address(s, "the scales of a weight"));
        let product = ScaledSums {
            operand,
            rows: &x,
            columns: across.transpose()?,
            sums: &sums,
        };
        product.write(gpu, y, (first, count), add)?;
    }
    Ok(())
}

/// Computes `dx [N, I] (+)= dy·w`, if `applies`.
pub(super) fn backward_into(gpu: &Gpu, dx: &Tensor, dy: &Tensor, w: &QTensors, add: bool) -> Result<()> {
    let operand = OperandType::of(w.products);
    let Some(scales) = w.eight_bit() else { return Ok(()) };
    let dy = quantize(gpu, dy, Some(scales), operand)?;
    let step = part(dy.rows, w.columns, w.rows);
    let tile = gpu.empty(w.rows * step, DType::U8)?;
    let to = address(&tile, "a part of a weight")?;
    let sums = gpu.empty(dy.rows * step, DType::F32)?;
    let name = match operand {
        OperandType::Int8 => "transposed_int8",
        OperandType::E4m3 => "transposed_e4m3",
    };
    for from in (0..w.columns).step_by(step) {
        let width = step.min(w.columns - from);
        let args = [
            Arg::Address(address_of(&w.codes, "a quantized weight", DType::U8)?),
            Arg::size(w.rows),
            Arg::small(w.columns, "a row of a weight")?,
            Arg::small(from, "a row of a weight")?,
            Arg::small(width, "a row of a weight")?,
            Arg::Address(to),
        ];
        let grid = Grid {
            blocks: (width.div_ceil(64), w.rows.div_ceil(64)),
            threads: (16, 16),
            shared: 0,
        };
        // SAFETY: these columns of W fit into the tile.
        unsafe { gpu.launch("eight_bit", name, grid, &args)? };
        // SAFETY: the part is [width, K].
        unsafe { product(gpu, operand, &dy, to, width, &sums)? };
        let product = ScaledSums {
            operand,
            rows: &dy,
            columns: None,
            sums: &sums,
        };
        product.write(gpu, dx, (from, width), add)?;
    }
    Ok(())
}

/// The sums of a product `[N, count]`, and the scales that its operands have.
struct ScaledSums<'a> {
    operand: OperandType,
    /// With a scale for each row of the product.
    rows: &'a QuantizedRows,
    /// Address of a scale for each column.
    columns: Option<u64>,
    sums: &'a Tensor,
}

impl ScaledSums<'_> {
    /// Writes the product to columns `first..first + count` of `to`, or adds it.
    fn write(&self, gpu: &Gpu, to: &Tensor, (first, count): (usize, usize), add: bool) -> Result<()> {
        let (rows, columns) = to.dims2()?;
        let kind = FloatType::of(to, "a product")?;
        let to = GpuMatrix::new(address(to, "a product")?, kind, columns);
        let args = [
            Arg::Address(address(self.sums, "the sums of a product")?),
            Arg::Address(address(&self.rows.scales, "the scales of a product")?),
            Arg::Address(self.columns.unwrap_or(0)),
            Arg::size(rows),
            Arg::small(count, "a row of a product")?,
            Arg::Address(to.address + (first * kind.bytes()) as u64),
            Arg::size(columns),
            Arg::I32(add as i32),
        ];
        let name = ["scaled_", self.operand.sums().1, "_", kind.name()];
        // SAFETY: the sums are [rows, count]; the columns lie inside of the result.
        unsafe { gpu.launch("eight_bit", name, Grid::stride(rows * count / kind.pack()), &args) }
    }
}

/// The cuBLASLt handle of a GPU, made once. Handles live as long as the process.
fn handle(gpu: &Gpu) -> Result<sys::cublasLtHandle_t> {
    static HANDLES: OnceLock<Mutex<HashMap<DeviceId, usize>>> = OnceLock::new();
    let mut handles = HANDLES
        .get_or_init(Mutex::default)
        .lock()
        .map_err(|_| Error::internal("another thread failed while it used the list of cuBLASLt handles"))?;
    let id = gpu.device().id();
    if let Some(known) = handles.get(&id) {
        return Ok(*known as sys::cublasLtHandle_t);
    }
    let made = result::create_handle().map_err(|e| failed(&e, (0, 0, 0)))?;
    handles.insert(id, made as usize);
    Ok(made)
}

fn failed(e: &dyn std::fmt::Debug, (m, n, k): (usize, usize, usize)) -> Error {
    let text = format!("{e:?}");
    Error::device("cuBLASLt failed on a product of 8-bit matrices", &text)
        .found(text)
        .at(format!("[{m}, {k}] · [{k}, {n}]"))
}

/// Computes `sums [N, count] = A [N, K] · Bᵀ` for `B [count, K]`.
///
/// # Safety
/// `b` is the address of `count · K` codes in the memory of this GPU.
unsafe fn product(
    gpu: &Gpu,
    operand: OperandType,
    a: &QuantizedRows,
    b: u64,
    count: usize,
    sums: &Tensor,
) -> Result<()> {
    let (n, k) = (a.rows, a.k);
    let failed = |e: &dyn std::fmt::Debug| failed(e, (n, count, k));
    for size in [n, count, k] {
        narrow(size, "a matrix")?;
    }
    let (codes, to) = (
        address(&a.codes, "an operand of a product")?,
        address(sums, "the sums")?,
    );
    let stream = gpu.device().cuda_stream();
    stream.context().bind_to_thread().map_err(|e| failed(&e))?;
    let handle = handle(gpu)?;
    let (sum_type, _, compute) = operand.sums();
    let factors = [operand.factor(true), operand.factor(false)];
    let factor = |i: usize| factors[i].as_ptr().cast::<c_void>();
    // cuBLAS is column-major: B and A are [K, count] and [K, N], the sums [count, N]. 8-bit operands need Bᵀ · A.
    let layout = |kind, rows: usize, columns: usize| {
        result::create_matrix_layout(kind, rows as u64, columns as u64, rows as i64).map_err(|e| failed(&e))
    };
    let transposed = cublasOperation_t::CUBLAS_OP_T as i32;
    let describe = result::create_matmul_desc(compute, sum_type).map_err(|e| failed(&e))?;
    let layouts = [
        layout(operand.data_type(), k, count)?,
        layout(operand.data_type(), k, n)?,
        layout(sum_type, count, n)?,
    ];
    // SAFETY: the matrices have these sizes, and 1 and 0 the type of the sums. Without an algorithm, cuBLASLt chooses one
    // that needs no workspace. Each created object is destroyed once.
    let done = unsafe {
        let done = result::set_matmul_desc_attribute(
            describe,
            CUBLASLT_MATMUL_DESC_TRANSA,
            (&transposed as *const i32).cast(),
            size_of::<i32>(),
        )
        .and_then(|()| {
            result::matmul(
                handle,
                describe,
                factor(0),
                factor(1),
                b as *const c_void,
                layouts[0],
                codes as *const c_void,
                layouts[1],
                to as *const c_void,
                layouts[2],
                to as *mut c_void,
                layouts[2],
                std::ptr::null(),
                std::ptr::null_mut(),
                0,
                stream.cu_stream().cast(),
            )
        });
        for layout in layouts {
            let _ = result::destroy_matrix_layout(layout);
        }
        let _ = result::destroy_matmul_desc(describe);
        done
    };
    done.map_err(|e| failed(&e))?;
    gpu.check("a product of 8-bit matrices")
}
