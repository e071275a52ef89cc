//! Fused linear and cross-entropy on a GPU with a streamed head. The head is read twice: once for the statistics of
//! each row, and once for the gradient. Only logits of some tokens and one piece of the vocabulary are in memory.

use super::elementwise::cast;
use super::embedding::{RowNumbers, gather_rows, put_rows};
use super::gemm::{GpuMatrix, gemm};
use super::{Arg, FloatType, Gpu, Grid, address, address_of};
use crate::cross_entropy::{OutputPieces, PIECE, PIECE_TOKENS};
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};

/// 32-bit words of the statistics of a row: `Seen` of the kernels.
pub(super) const SEEN: usize = 7;

/// The grid of a kernel that reads `width` logits of each token.
pub(super) fn piece_grid(tokens: usize, width: usize) -> Grid {
    let threads = width.div_ceil(4).div_ceil(32).clamp(1, 16) as u32 * 32;
    Grid::line(tokens, threads)
}

/// The inputs and outputs.
pub(crate) struct PieceJob<'a> {
    /// `[N, D]`
    pub h: &'a Tensor,
    /// Rows of h that have a target, ascending.
    pub trained: &'a [usize],
    /// `[N]`
    pub targets: &'a [u32],
    /// `[N]`: factors of the gradients of the tokens.
    pub weights: Option<&'a [f32]>,
    pub softcap: Option<f32>,
    /// See `CrossEntropyOptions::smoothing`.
    pub smoothing: f32,
    /// f64: the loss is added to element 0, the number of correct predictions to element 1.
    pub totals: &'a Tensor,
    /// f32 `[N]`: output of the log-probabilities.
    pub each: Option<&'a Tensor>,
    /// f32 `[N]`: output of the entropies.
    pub entropies: Option<&'a Tensor>,
}

/// Returns dh `[N, D]` of the type of h if its factor is given.
pub(crate) fn run(job: &PieceJob, head: &OutputPieces, scale: Option<f32>) -> Result<Option<Tensor>> {
    let gpu = Gpu::of(job.h, "the hidden states")?;
    let kind = FloatType::of(job.h, "the hidden states")?;
    let (n, d) = job.h.dims2()?;
    let count = job.trained.len();
    if count == 0 || d == 0 {
        return scale.map(|_| gpu.zeros((n, d), kind.dtype())).transpose();
    }
    let mut numbers: Vec<u32> = job.trained.iter().map(|row| *row as u32).collect();
    numbers.extend(job.trained.iter().map(|row| job.targets[*row]));
    let numbers = gpu.upload_u32(&numbers)?;
    let rows = RowNumbers {
        address: address(&numbers, "trained tokens")?,
        count,
    };
    let weights = job.weights.map(|all| {
        let bits: Vec<u32> = job.trained.iter().map(|row| all[*row].to_bits()).collect();
        gpu.upload_u32(&bits)
    });
    let weights = weights.transpose()?;
    let weights = weights.as_ref().map(|w| address(w, "weights of tokens")).transpose()?;

    // No copy is needed if every row has a target.
    let gathered = if count == n {
        job.h.clone()
    } else {
        let to = gpu.empty((count, d), kind.dtype())?;
        let (from, place) = (address(job.h, "the hidden states")?, address(&to, "gathered rows")?);
        // SAFETY: the rows lie in h, the copy has space for all of them.
        unsafe { gather_rows(&gpu, kind, from, rows, 1.0, d, place)? };
        to
    };
    let stride = PIECE.min(head.rows).next_multiple_of(8);
    let step = PIECE_TOKENS.min(count);
    let logits = gpu.empty(step * stride, DType::F32)?;
    let seen = gpu.empty(count * SEEN, DType::U32)?;
    let places = ChunkAddresses {
        gpu: &gpu,
        kind,
        d,
        count,
        step,
        stride,
        hidden: address(&gathered, "the hidden states")?,
        logits: address(&logits, "logits")?,
        targets: rows.address + 4 * count as u64,
        seen: address(&seen, "the row statistics")?,
        softcap: job.softcap.unwrap_or(0.0),
        smoothing: job.smoothing,
        vocab: head.rows,
    };
    places.each(head, |start, tokens, first, part| {
        places.survey(start, tokens, first, part)
    })?;
    places.finish(job, rows.address)?;

    let Some(scale) = scale else { return Ok(None) };
    let sum = gpu.empty((count, d), DType::F32)?;
    let to = address(&sum, "dh")?;
    let factors = TokenFactors {
        scale,
        weights: weights.unwrap_or(0),
    };
    places.each(head, |start, tokens, first, part| {
        places.turn(start, tokens, first, part, factors, to)
    })?;
    let dh = cast(&sum, kind)?;
    drop(sum);
    if count == n {
        return Ok(Some(dh));
    }
    // Rows without a target stay zero.
    let all = gpu.zeros((n, d), kind.dtype())?;
    let (from, to) = (address(&dh, "dh")?, address(&all, "dh")?);
    // SAFETY: no row occurs twice, and each lies in dh.
    unsafe { put_rows(&gpu, kind, from, rows, d, to)? };
    Ok(Some(all))
}

/// The factor of all gradients, and the address of the weights of the tokens (f32 `[count]`; 0: all are 1).
#[derive(Clone, Copy)]
struct TokenFactors {
    scale: f32,
    weights: u64,
}

/// Addresses and sizes: hidden states `[count, D]`, logits `[step, stride]`, targets and row statistics `[count]`.
struct ChunkAddresses<'a> {
    gpu: &'a Gpu,
    kind: FloatType,
    d: usize,
    count: usize,
    step: usize,
    stride: usize,
    hidden: u64,
    logits: u64,
    targets: u64,
    seen: u64,
    softcap: f32,
    smoothing: f32,
    vocab: usize,
}

/// Rows of the head: the address of the first, and their number.
type HeadPart = (u64, usize);

impl ChunkAddresses<'_> {
    /// Calls `f` for every piece of the head and every group of tokens: first token, number of tokens, first row of
    /// the piece, and the piece. The work that `f` queues completes before the memory of the piece is reused,
    /// because it is freed on this stream.
    fn each(&self, head: &OutputPieces, mut f: impl FnMut(usize, usize, usize, HeadPart) -> Result<()>) -> Result<()> {
        head.each(|first, part| {
            let part = cast(part, self.kind)?;
            let from = address(&part, "a part of the head")?;
            let rows = part.dims2()?.0;
            for at in (0..rows).step_by(PIECE) {
                let piece = (from + (at * self.d * self.kind.bytes()) as u64, PIECE.min(rows - at));
                for start in (0..self.count).step_by(self.step) {
                    f(start, self.step.min(self.count - start), first + at, piece)?;
                }
            }
            Ok(())
        })
    }

    fn hidden(&self, start: usize) -> GpuMatrix {
        let offset = start * self.d * self.kind.bytes();
        GpuMatrix::new(self.hidden + offset as u64, self.kind, self.d)
    }

    /// Computes the logits of some tokens for a piece of the head.
    fn product(&self, start: usize, tokens: usize, (head, width): HeadPart) -> Result<()> {
        let head = GpuMatrix::new(head, self.kind, self.d).t();
        let logits = GpuMatrix::new(self.logits, FloatType::F32, self.stride);
        // SAFETY: [tokens, D] · [D, width] into rows of `stride` elements.
        unsafe {
            gemm(
                self.gpu,
                (tokens, width, self.d),
                self.hidden(start),
                head,
                logits,
                false,
            )
        }
    }

    /// Returns the common arguments of the kernels of both passes.
    fn args(&self, start: usize, first: usize, width: usize) -> Result<[Arg; 7]> {
        Ok([
            Arg::Address(self.logits),
            Arg::Address(self.targets + 4 * start as u64),
            Arg::Address(self.seen + (4 * SEEN * start) as u64),
            Arg::small(width, "a piece of the vocabulary")?,
            Arg::size(self.stride),
            Arg::size(first),
            Arg::F32(self.softcap),
        ])
    }

    fn survey(&self, start: usize, tokens: usize, first: usize, part: HeadPart) -> Result<()> {
        self.product(start, tokens, part)?;
        let args = self.args(start, first, part.1)?;
        let args: Vec<Arg> = args.into_iter().chain([Arg::F32(self.smoothing)]).collect();
        let grid = piece_grid(tokens, part.1);
        // SAFETY: `tokens` rows of logits with their targets; pieces come in order, the first one first.
        unsafe {
            self.gpu
                .launch("cross_entropy_parts", "cross_entropy_survey", grid, &args)
        }
    }

    /// Computes losses, correct predictions and entropies of all rows; `rows` are their indices in h.
    fn finish(&self, job: &PieceJob, rows: u64) -> Result<()> {
        let loss = self.gpu.empty(self.count, DType::F64)?;
        let correct = self.gpu.empty(self.count, DType::U32)?;
        let (loss, correct) = (address(&loss, "losses")?, address(&correct, "hits")?);
        let count = Arg::small(self.count, "a batch")?;
        let optional = |t: Option<&Tensor>, name| t.map_or(Ok(0), |t| address_of(t, name, DType::F32));
        if job.totals.elem_count() < 2 {
            return Err(Error::internal("the buffer for the loss totals is too small"));
        }
        let args = [
            Arg::Address(self.seen),
            Arg::Address(self.targets),
            count,
            Arg::F32(self.smoothing),
            Arg::small(self.vocab, "the vocabulary")?,
            Arg::Address(loss),
            Arg::Address(correct),
            Arg::Address(rows),
            Arg::Address(optional(job.entropies, "entropies")?),
        ];
        let grid = Grid::line(self.count.div_ceil(64), 64);
        // SAFETY: all have an element for each row, entropies one for each row of h.
        unsafe {
            self.gpu
                .launch("cross_entropy_parts", "cross_entropy_finish", grid, &args)?
        };
        let args = [
            Arg::Address(loss),
            Arg::Address(correct),
            count,
            Arg::Address(address_of(job.totals, "the totals of a loss", DType::F64)?),
            Arg::Address(rows),
            Arg::Address(optional(job.each, "log-probabilities")?),
        ];
        // SAFETY: as above.
        unsafe {
            self.gpu
                .launch("cross_entropy", "cross_entropy_totals", Grid::line(1, 256), &args)
        }
    }

    /// Adds the contribution of a piece to dh `[count, D]` f32; the first piece overwrites it.
    fn turn(
        &self,
        start: usize,
        tokens: usize,
        first: usize,
        part: HeadPart,
        factors: TokenFactors,
        dh: u64,
    ) -> Result<()> {
        self.product(start, tokens, part)?;
        let weights = match factors.weights {
            0 => 0,
            all => all + 4 * start as u64,
        };
        let args = self.args(start, first, part.1)?;
        let more = [
            Arg::F32(factors.scale),
            Arg::F32(self.smoothing),
            Arg::small(self.vocab, "the vocabulary")?,
            Arg::Address(weights),
        ];
        let args: Vec<Arg> = args.into_iter().chain(more).collect();
        let kernel = ["cross_entropy_turn_", self.kind.name()];
        let grid = piece_grid(tokens, part.1);
        // SAFETY: as in `survey`; every row was finished.
        unsafe { self.gpu.launch("cross_entropy_parts", kernel, grid, &args)? };
        // bf16 fills the first half of each row.
        let stride = match self.kind {
            FloatType::F32 => self.stride,
            FloatType::Bf16 | FloatType::F16 => 2 * self.stride,
        };
        let dlogits = GpuMatrix::new(self.logits, self.kind, stride);
        let head = GpuMatrix::new(part.0, self.kind, self.d);
        let to = GpuMatrix::new(dh + (4 * start * self.d) as u64, FloatType::F32, self.d);
        // SAFETY: [tokens, width] · [width, D] into rows of dh.
        unsafe { gemm(self.gpu, (tokens, self.d, part.1), dlogits, head, to, first > 0) }
    }
}
