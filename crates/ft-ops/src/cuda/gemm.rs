//! Matrix products with cuBLAS: operands f32, bf16 or f16, sums always f32, no TF32.

use super::{FloatType, Gpu, narrow};
use candle_core::cuda::cudarc::cublas::{result, sys};
use ft_base::{Error, Result};
use std::ffi::c_void;

/// A row-major matrix of a product.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GpuMatrix {
    pub address: u64,
    pub kind: FloatType,
    /// Distance between rows, in elements.
    pub stride: usize,
    /// True if the transpose is stored.
    pub transposed: bool,
}

impl GpuMatrix {
    pub(crate) fn new(address: u64, kind: FloatType, stride: usize) -> Self {
        Self {
            address,
            kind,
            stride,
            transposed: false,
        }
    }

    pub(crate) fn t(self) -> Self {
        Self {
            transposed: !self.transposed,
            ..self
        }
    }

    fn data_type(self) -> sys::cudaDataType_t {
        match self.kind {
            FloatType::F32 => sys::cudaDataType_t::CUDA_R_32F,
            FloatType::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
            FloatType::F16 => sys::cudaDataType_t::CUDA_R_16F,
        }
    }

    fn operation(self) -> sys::cublasOperation_t {
        if self.transposed {
            sys::cublasOperation_t::CUBLAS_OP_T
        } else {
            sys::cublasOperation_t::CUBLAS_OP_N
        }
    }
}

/// Computes `C [m, n] = A [m, k] · B [k, n]`, or `C += A · B` if `add`. `k` > 0.
///
/// # Safety
/// The addresses are matrices of these sizes in the memory of this GPU, and C does not overlap A and B.
pub(crate) unsafe fn gemm(
    gpu: &Gpu,
    sizes: (usize, usize, usize),
    a: GpuMatrix,
    b: GpuMatrix,
    c: GpuMatrix,
    add: bool,
) -> Result<()> {
    // SAFETY: promised by the caller.
    unsafe { gemm_scaled(gpu, sizes, a, b, c, 1.0, add) }
}

/// As `gemm`, with `alpha · A · B`.
///
/// # Safety
/// As `gemm`.
pub(crate) unsafe fn gemm_scaled(
    gpu: &Gpu,
    sizes: (usize, usize, usize),
    a: GpuMatrix,
    b: GpuMatrix,
    c: GpuMatrix,
    alpha: f32,
    add: bool,
) -> Result<()> {
    let one = ProductBatch {
        count: 1,
        steps: [0; 3],
    };
    // SAFETY: promised by the caller.
    unsafe { gemm_batched(gpu, sizes, [a, b, c], alpha, add, one) }
}

/// Several products of one shape.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProductBatch {
    pub count: usize,
    /// Elements from one A, B and C to the next, which may lie in another allocation. Not negative.
    pub steps: [i64; 3],
}

/// As `gemm_scaled`, for each of a batch.
///
/// # Safety
/// As `gemm`, for each product.
pub(crate) unsafe fn gemm_batched(
    gpu: &Gpu,
    (m, n, k): (usize, usize, usize),
    [a, b, c]: [GpuMatrix; 3],
    alpha: f32,
    add: bool,
    batch: ProductBatch,
) -> Result<()> {
    if m == 0 || n == 0 || batch.count == 0 {
        return Ok(());
    }
    if a.kind != b.kind {
        return Err(Error::shape("matrix product: A and B have different dtypes"));
    }
    if c.transposed {
        return Err(Error::internal("matrix product: the result must not be transposed"));
    }
    let size = |x| narrow(x, "a matrix");
    let beta = if add { 1f32 } else { 0f32 };
    let number = |x: &f32| (x as *const f32).cast::<c_void>();
    let device = gpu.device();
    let failed = |e: &dyn std::fmt::Debug| {
        let text = format!("{e:?}");
        Error::device("cuBLAS failed on a product of matrices", &text)
            .found(text)
            .at(format!("[{m}, {k}] · [{k}, {n}]"))
    };
    device
        .cuda_stream()
        .context()
        .bind_to_thread()
        .map_err(|e| failed(&e))?;
    let blas = device.cublas_handle();
    let handle = *blas.handle();
    // cuBLAS is column-major: it sees the transposes of A, B and C, so the call computes Cᵀ = Bᵀ · Aᵀ.
    // SAFETY: promised by the caller; the handle belongs to candle and works on its stream.
    unsafe {
        // Partial sums of a split-K reduction must not be rounded to bf16 or f16.
        sys::cublasSetMathMode(
            handle,
            sys::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION,
        )
        .result()
        .map_err(|e| failed(&e))?;
        // A batch has a step after the stride of each matrix, and its count.
        macro_rules! product {
            ($function:ident $(, $a_step:expr, $b_step:expr, $c_step:expr, $count:expr)?) => {
                result::$function(
                    handle,
                    b.operation(),
                    a.operation(),
                    size(n)?,
                    size(m)?,
                    size(k)?,
                    number(&alpha),
                    b.address as *const c_void,
                    b.data_type(),
                    size(b.stride)?,
                    $($b_step,)?
                    a.address as *const c_void,
                    a.data_type(),
                    size(a.stride)?,
                    $($a_step,)?
                    number(&beta),
                    c.address as *mut c_void,
                    c.data_type(),
                    size(c.stride)?,
                    $($c_step, $count,)?
                    sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                    sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
                )
            };
        }
        let [a_step, b_step, c_step] = batch.steps;
        match batch.count {
            1 => product!(gemm_ex),
            count => product!(gemm_strided_batched_ex, a_step, b_step, c_step, size(count)?),
        }
        .map_err(|e| failed(&e))?;
    }
    gpu.check("a product of matrices")
}
