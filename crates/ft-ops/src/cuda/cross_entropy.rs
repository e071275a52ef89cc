//! Fused linear and cross-entropy on a GPU: cuBLAS computes the products, one kernel does the rest of a chunk in place.

use super::elementwise::cast;
use super::embedding::{RowNumbers, gather_rows, put_rows};
use super::gemm::{GpuMatrix, gemm};
use super::{Arg, FloatType, Gpu, Grid, address, address_of};
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};

/// The inputs and outputs.
pub(crate) struct GpuCrossEntropyJob<'a> {
    /// `[N, D]`
    pub h: &'a Tensor,
    /// `[V, D]`
    pub head: &'a Tensor,
    /// Rows of h that have a target, ascending, and their targets.
    pub trained: &'a [usize],
    pub targets: &'a [u32],
    /// `[N]`: factors of the gradients of the tokens.
    pub weights: Option<&'a [f32]>,
    pub softcap: Option<f32>,
    /// See `CrossEntropyOptions::smoothing`.
    pub smoothing: f32,
    pub chunk: usize,
    /// f64: the loss is added to element 0, the number of correct predictions to element 1.
    pub totals: &'a Tensor,
    /// f32 `[N]`: output of the log-probabilities.
    pub each: Option<&'a Tensor>,
}

/// The gradients to compute, and their factor.
#[derive(Clone, Copy)]
pub(crate) struct GradientOptions {
    pub scale: f32,
    pub dh: bool,
    pub dw: bool,
}

/// Returns dh `[N, D]` of the type of h, and dw `[V, D]` f32, each if requested.
pub(crate) fn run(
    job: &GpuCrossEntropyJob,
    wanted: Option<GradientOptions>,
) -> Result<(Option<Tensor>, Option<Tensor>)> {
    let gpu = Gpu::of(job.h, "the hidden states")?;
    let kind = FloatType::of(job.h, "the hidden states")?;
    let (n, d) = job.h.dims2()?;
    let v = job.head.dims2()?.0;
    let trained = job.trained.len();
    let (need_dh, need_dw) = wanted.map_or((false, false), |w| (w.dh, w.dw));
    if trained == 0 || d == 0 {
        let dh = need_dh.then(|| gpu.zeros((n, d), kind.dtype())).transpose()?;
        let dw = need_dw.then(|| gpu.zeros((v, d), DType::F32)).transpose()?;
        return Ok((dh, dw));
    }
    let head = cast(job.head, kind)?;
    let head = GpuMatrix::new(address(&head, "the head")?, kind, d);
    // Rows without a target stay zero.
    let dh = if !need_dh {
        None
    } else if trained == n {
        Some(gpu.empty((n, d), kind.dtype())?)
    } else {
        Some(gpu.zeros((n, d), kind.dtype())?)
    };
    let dw = need_dw.then(|| gpu.empty((v, d), DType::F32)).transpose()?;

    let chunk = job.chunk.clamp(1, trained);
    // Rows of logits are aligned to 32 bytes.
    let stride = v.next_multiple_of(8);
    let logits = gpu.empty(chunk * stride, DType::F32)?;
    let gathered = gpu.empty(chunk * d, kind.dtype())?;
    let loss = gpu.empty(chunk, DType::F64)?;
    let correct = gpu.empty(chunk, DType::U32)?;
    let mut numbers: Vec<u32> = job.trained.iter().map(|row| *row as u32).collect();
    numbers.extend(job.trained.iter().map(|row| job.targets[*row]));
    let numbers = gpu.upload_u32(&numbers)?;
    let numbers = address(&numbers, "trained tokens")?;
    let weights = job.weights.map(|all| {
        let bits: Vec<u32> = job.trained.iter().map(|row| all[*row].to_bits()).collect();
        gpu.upload_u32(&bits)
    });
    let weights = weights.transpose()?;
    let weights = weights.as_ref().map(|w| address(w, "weights of tokens")).transpose()?;

    let row_bytes = (d * kind.bytes()) as u64;
    let buffers = Buffers {
        gpu: &gpu,
        kind,
        d,
        v,
        stride,
        logits: address(&logits, "logits")?,
        gathered: address(&gathered, "gathered rows")?,
        loss: address(&loss, "losses")?,
        correct: address(&correct, "hits")?,
    };
    let h = address(job.h, "the hidden states")?;
    let dh_place = dh.as_ref().map(|t| address(t, "dh")).transpose()?;
    let dw_place = dw.as_ref().map(|t| address(t, "dw")).transpose()?;
    for start in (0..trained).step_by(chunk) {
        let rows = &job.trained[start..(start + chunk).min(trained)];
        let count = rows.len();
        let row_numbers = RowNumbers {
            address: numbers + 4 * start as u64,
            count,
        };
        // Contiguous rows need no copy.
        let together = rows[count - 1] - rows[0] + 1 == count;
        let offset = rows[0] as u64 * row_bytes;
        let hidden = if together {
            h + offset
        } else {
            // SAFETY: the rows lie in h, `gathered` has space for a chunk.
            unsafe { gather_rows(&gpu, kind, h, row_numbers, 1.0, d, buffers.gathered)? };
            buffers.gathered
        };
        let hidden = GpuMatrix::new(hidden, kind, d);
        buffers.losses(
            hidden,
            head,
            row_numbers,
            TokenAddresses {
                targets: numbers + 4 * (trained + start) as u64,
                weights: weights.map_or(0, |w| w + 4 * start as u64),
            },
            job,
            wanted,
        )?;
        let dlogits = buffers.gradients();
        if let Some(dw) = dw_place {
            let dw = GpuMatrix::new(dw, FloatType::F32, d);
            // SAFETY: [V, count] · [count, D]; the first chunk overwrites dw.
            unsafe { gemm(&gpu, (v, d, count), dlogits.t(), hidden, dw, start > 0)? };
        }
        if let Some(dh) = dh_place {
            // The gathered rows are no longer needed: dh overwrites them.
            let to = if together { dh + offset } else { buffers.gathered };
            // SAFETY: [count, V] · [V, D] into rows of dh or a whole chunk.
            unsafe {
                gemm(&gpu, (count, d, v), dlogits, head, GpuMatrix::new(to, kind, d), false)?;
                if !together {
                    put_rows(&gpu, kind, to, row_numbers, d, dh)?;
                }
            }
        }
    }
    Ok((dh, dw))
}

/// Buffers of a chunk: addresses of logits `[chunk, stride]`, rows `[chunk, D]`, losses and correct predictions
/// `[chunk]`.
struct Buffers<'a> {
    gpu: &'a Gpu,
    kind: FloatType,
    d: usize,
    v: usize,
    stride: usize,
    logits: u64,
    gathered: u64,
    loss: u64,
    correct: u64,
}

/// Addresses of the targets of a chunk (u32), and of the weights of its tokens (f32; 0: all are 1).
#[derive(Clone, Copy)]
struct TokenAddresses {
    targets: u64,
    weights: u64,
}

impl Buffers<'_> {
    /// Computes logits, losses and, if requested, the gradient of the logits of the tokens with these hidden states.
    fn losses(
        &self,
        hidden: GpuMatrix,
        head: GpuMatrix,
        rows: RowNumbers,
        tokens: TokenAddresses,
        job: &GpuCrossEntropyJob,
        wanted: Option<GradientOptions>,
    ) -> Result<()> {
        let RowNumbers { address: rows, count } = rows;
        let TokenAddresses { targets, weights } = tokens;
        let logits = GpuMatrix::new(self.logits, FloatType::F32, self.stride);
        // SAFETY: [count, D] · [D, V] into rows of `stride` elements.
        unsafe { gemm(self.gpu, (count, self.v, self.d), hidden, head.t(), logits, false)? };
        let kernel = match (wanted, self.kind) {
            (None, _) => ["cross_entropy_loss", ""],
            (Some(_), kind) => ["cross_entropy_", kind.name()],
        };
        let threads = self.v.div_ceil(4).div_ceil(32).clamp(1, 16) as u32 * 32;
        let args = [
            Arg::Address(self.logits),
            Arg::Address(targets),
            Arg::Address(self.loss),
            Arg::Address(self.correct),
            Arg::small(self.v, "the vocabulary")?,
            Arg::size(self.stride),
            Arg::F32(job.softcap.unwrap_or(0.0)),
            Arg::F32(wanted.map_or(0.0, |w| w.scale)),
            Arg::F32(job.smoothing),
            Arg::Address(weights),
        ];
        // SAFETY: `count` rows of logits, targets below V (checked by the caller), losses and correct predictions.
        unsafe {
            self.gpu
                .launch("cross_entropy", kernel, Grid::line(count, threads), &args)?
        };
        let each = match job.each {
            Some(each) => address_of(each, "log-probabilities", DType::F32)?,
            None => 0,
        };
        if job.totals.elem_count() < 2 {
            return Err(Error::internal("the buffer for the loss totals is too small"));
        }
        let args = [
            Arg::Address(self.loss),
            Arg::Address(self.correct),
            Arg::small(count, "a chunk")?,
            Arg::Address(address_of(job.totals, "the totals of a loss", DType::F64)?),
            Arg::Address(rows),
            Arg::Address(each),
        ];
        // SAFETY: as above; `each` has an element for each row of h.
        unsafe {
            self.gpu
                .launch("cross_entropy", "cross_entropy_totals", Grid::line(1, 256), &args)
        }
    }

    /// Returns the gradient of the logits, which overwrites the logits; bf16 fills the first half of each row.
    fn gradients(&self) -> GpuMatrix {
        let stride = match self.kind {
            FloatType::F32 => self.stride,
            FloatType::Bf16 | FloatType::F16 => 2 * self.stride,
        };
        GpuMatrix::new(self.logits, self.kind, stride)
    }
}
