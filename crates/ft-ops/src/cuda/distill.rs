//! Fused distillation on a GPU: cuBLAS computes the logits, kernels the divergence and, in the place of the student's
//! logits, their gradient. Whole heads: the logits of a chunk of tokens are computed once. A head in parts: logits exist
//! for some tokens and one piece of the vocabulary, and each head is read up to three times.
//!
//! Letters: D and V hidden size and vocabulary of the student, C the number of ids that both models have.

use super::cross_entropy_parts::{SEEN, piece_grid};
use super::distill_model::DistillModel;
use super::elementwise::cast;
use super::embedding::{RowNumbers, put_rows};
use super::gemm::{self, gemm};
use super::memory::to_f32_vec;
use super::{Arg, FloatType, Gpu, Grid, address};
use crate::cross_entropy::PIECE_TOKENS;
use crate::distill::{DistillOptions, DistillSide, DistillTeacher, TopK};
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};

const MODULE: &str = "distill";

/// The inputs.
pub(crate) struct GpuDistillJob<'a> {
    pub student: &'a DistillSide<'a>,
    pub teacher: &'a DistillTeacher<'a>,
    /// `[N]`
    pub targets: &'a [u32],
    /// Rows that have a target, ascending.
    pub trained: &'a [usize],
    /// C
    pub common: usize,
    pub options: &'a DistillOptions,
}

/// The results of the trained tokens, and the gradients that were requested.
#[derive(Default)]
pub(crate) struct DistillResult {
    pub divergence: Vec<f32>,
    pub cross_entropy: Vec<f32>,
    /// 1 where the target has the largest logit.
    pub correct: Vec<f32>,
    pub dh: Option<Tensor>,
    pub dw: Option<Tensor>,
}

pub(crate) fn run(job: &GpuDistillJob) -> Result<DistillResult> {
    let (h, options) = (job.student.h, job.options);
    let gpu = Gpu::of(h, "the hidden states")?;
    let kind = FloatType::of(h, "the hidden states")?;
    let ((n, d), v) = (h.dims2()?, job.student.sizes()?.0);
    let parts = job.student.in_parts() || matches!(job.teacher, DistillTeacher::Live(side) if side.in_parts());
    let mut found = DistillResult {
        dh: options.need_dh.then(|| gpu.zeros((n, d), kind.dtype())).transpose()?,
        dw: options.need_dw.then(|| gpu.zeros((v, d), DType::F32)).transpose()?,
        ..DistillResult::default()
    };
    if d == 0 {
        return Err(Error::shape("the hidden states have no columns"));
    }
    let size = if parts {
        job.trained.len().max(1)
    } else {
        options.chunk.max(1)
    };
    let mut first = 0;
    for tokens in job.trained.chunks(size) {
        let rows = GpuTokenGroup::new(&gpu, job, tokens, first, parts)?.run(&found)?;
        let rows = to_f32_vec(&rows)?;
        let (divergence, rest) = rows.split_at(tokens.len());
        let (cross_entropy, correct) = rest.split_at(tokens.len());
        found.divergence.extend_from_slice(divergence);
        found.cross_entropy.extend_from_slice(cross_entropy);
        found.correct.extend_from_slice(correct);
        first += tokens.len();
    }
    Ok(found)
}

/// Calls `f` with logits `[tokens, width]` f32 on the host, without the softcap: first token, first id, width.
pub(crate) fn each_logits(
    side: &DistillSide,
    chosen: &[usize],
    common: usize,
    chunk: usize,
    mut f: impl FnMut(usize, &mut [f32], usize, usize),
) -> Result<()> {
    let gpu = Gpu::of(side.h, "the hidden states")?;
    let step = if side.in_parts() { PIECE_TOKENS } else { chunk.max(1) };
    let mut model = DistillModel::new(&gpu, side, chosen, common, 0, side.in_parts())?;
    for (first, width) in model.pieces(common) {
        for start in (0..chosen.len()).step_by(step) {
            let count = step.min(chosen.len() - start);
            let logits = gpu.empty((count, width), DType::F32)?;
            model.product_into(&gpu, (start, count), (first, width), address(&logits, "logits")?, width)?;
            f(start, &mut to_f32_vec(&logits)?, first, width);
        }
    }
    Ok(())
}

/// A stored teacher: ids, log-probabilities, the logarithm of the rest; then the student's logits at these ids, and the
/// slopes of the rest.
struct StoredTeacher {
    k: usize,
    ids: Tensor,
    log_probs: Tensor,
    rest: Tensor,
    picked: Tensor,
    slopes: Tensor,
}

impl StoredTeacher {
    fn new(gpu: &Gpu, top: &TopK, first: usize, count: usize) -> Result<Self> {
        let bits = |all: &[f32]| all.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
        let top = top.tokens(first, count);
        Ok(Self {
            k: top.k,
            ids: gpu.upload_u32(top.ids)?,
            log_probs: gpu.upload_u32(&bits(top.log_probs))?,
            rest: gpu.upload_u32(&bits(top.rest))?,
            picked: gpu.empty(count * top.k, DType::F32)?,
            slopes: gpu.empty(count, DType::F32)?,
        })
    }
}

/// The logits of a model over a piece, and where their sums over the common ids go.
struct SoftSurvey {
    logits: u64,
    /// Elements between two rows of logits.
    stride: usize,
    cap: Arg,
    sums: Arg,
    /// Ids of a stored teacher: how many, and the addresses of the ids and of the logits at them.
    stored: (usize, Arg, Arg),
}

/// A group of tokens on the way through all pieces.
struct GpuTokenGroup<'a> {
    gpu: &'a Gpu,
    job: &'a GpuDistillJob<'a>,
    count: usize,
    own: DistillModel<'a>,
    other: Option<DistillModel<'a>>,
    stored: Option<StoredTeacher>,
    /// Row numbers in h, then the targets.
    numbers: Tensor,
    /// The numbers that the cross-entropy needs of each row.
    seen: Tensor,
    /// Largest logit and sum of the exponentials of each row: of the student, then of the teacher.
    soft: Tensor,
    /// f64: two sums of each row.
    sums: Tensor,
}

impl<'a> GpuTokenGroup<'a> {
    fn new(gpu: &'a Gpu, job: &'a GpuDistillJob<'a>, tokens: &[usize], first: usize, parts: bool) -> Result<Self> {
        let count = tokens.len();
        // The logits of two models take as much as those of one.
        let models = if matches!(job.teacher, DistillTeacher::Live(_)) {
            2
        } else {
            1
        };
        let step = if parts {
            (PIECE_TOKENS / models).min(count)
        } else {
            count
        };
        let mut numbers: Vec<u32> = tokens.iter().map(|row| *row as u32).collect();
        numbers.extend(tokens.iter().map(|row| job.targets[*row]));
        let (other, stored) = match job.teacher {
            DistillTeacher::Live(side) => (
                Some(DistillModel::new(gpu, side, tokens, job.common, step, parts)?),
                None,
            ),
            DistillTeacher::Stored { top, .. } => (None, Some(StoredTeacher::new(gpu, top, first, count)?)),
        };
        Ok(Self {
            gpu,
            job,
            count,
            own: DistillModel::new(gpu, job.student, tokens, job.student.sizes()?.0, step, parts)?,
            other,
            stored,
            numbers: gpu.upload_u32(&numbers)?,
            seen: gpu.empty(count * SEEN, DType::U32)?,
            soft: gpu.empty(4 * count, DType::F32)?,
            sums: gpu.empty(2 * count, DType::F64)?,
        })
    }

    /// Returns the divergence, the cross-entropy and the hit of each row, `[3 · count]`, and adds the gradients.
    fn run(mut self, found: &DistillResult) -> Result<Tensor> {
        let v = self.job.student.sizes()?.0;
        self.each(v, Self::survey)?;
        if self.stored.is_some() {
            self.finish_stored()?;
        } else {
            self.each(self.job.common, Self::survey_teacher)?;
            self.each(self.job.common, Self::measure)?;
        }
        let rows = self.finish()?;
        if !(self.job.options.need_dh || self.job.options.need_dw) {
            return Ok(rows);
        }
        let (kind, d) = (self.own.kind, self.own.d);
        let sum = match &found.dh {
            Some(_) => Some(self.gpu.empty((self.count, d), DType::F32)?),
            None => None,
        };
        self.each(v, |group, tokens, piece| {
            group.turn(tokens, piece, sum.as_ref(), found.dw.as_ref())
        })?;
        if let (Some(sum), Some(dh)) = (&sum, &found.dh) {
            let dh_rows = cast(sum, kind)?;
            let (from, to) = (address(&dh_rows, "dh")?, address(dh, "dh")?);
            let places = RowNumbers {
                address: address(&self.numbers, "trained tokens")?,
                count: self.count,
            };
            // SAFETY: no row occurs twice, and each lies in dh.
            unsafe { put_rows(self.gpu, kind, from, places, d, to)? };
        }
        Ok(rows)
    }

    /// Calls `f` with each piece of `ids` ids and some tokens.
    fn each(
        &mut self,
        ids: usize,
        mut f: impl FnMut(&mut Self, (usize, usize), (usize, usize)) -> Result<()>,
    ) -> Result<()> {
        let step = self.own.step.max(1);
        for piece in self.own.pieces(ids) {
            for start in (0..self.count).step_by(step) {
                f(self, (start, step.min(self.count - start)), piece)?;
            }
        }
        Ok(())
    }

    fn launch(&self, kernel: impl Into<super::KernelName>, grid: Grid, args: &[Arg]) -> Result<()> {
        // SAFETY: addresses and sizes are those of this group: see the kernels.
        unsafe { self.gpu.launch(MODULE, kernel, grid, args) }
    }

    /// The address of an element of a tensor of four bytes each.
    fn at(t: &Tensor, index: usize) -> Result<Arg> {
        Ok(Arg::Address(address(t, "the numbers of a group")? + 4 * index as u64))
    }

    fn targets(&self, start: usize) -> Result<Arg> {
        Self::at(&self.numbers, self.count + start)
    }

    fn soft(&self, start: usize) -> Result<Arg> {
        Self::at(&self.soft, 2 * start)
    }

    fn their_soft(&self, start: usize) -> Result<Arg> {
        Self::at(&self.soft, 2 * (self.count + start))
    }

    fn sums(&self, start: usize) -> Result<Arg> {
        Self::at(&self.sums, 4 * start)
    }

    fn cap(side: &DistillSide) -> Arg {
        Arg::F32(side.softcap.unwrap_or(0.0))
    }

    fn their_cap(&self) -> Arg {
        match self.job.teacher {
            DistillTeacher::Live(side) => Self::cap(side),
            DistillTeacher::Stored { .. } => Arg::F32(0.0),
        }
    }

    fn inverse(&self) -> f32 {
        1.0 / self.job.options.temperature
    }

    fn terms(&self) -> Arg {
        let beta = self.job.options.beta;
        Arg::Four([(1.0 - beta).ln(), beta.ln(), self.inverse(), beta])
    }

    /// Ids of a piece that both models have.
    fn known(&self, (first, width): (usize, usize)) -> usize {
        self.job.common.saturating_sub(first).min(width)
    }

    fn teacher(&mut self) -> Result<&mut DistillModel<'a>> {
        let missing = || Error::internal("the teacher is missing");
        self.other.as_mut().ok_or_else(missing)
    }

    fn survey(&mut self, tokens: (usize, usize), piece: (usize, usize)) -> Result<()> {
        let (start, (first, width)) = (tokens.0, piece);
        let logits = self.own.product(self.gpu, tokens, piece, false)?;
        let args = [
            Arg::Address(logits),
            self.targets(start)?,
            Self::at(&self.seen, SEEN * start)?,
            Arg::small(width, "a piece of the vocabulary")?,
            Arg::size(self.own.stride),
            Arg::size(first),
            Self::cap(self.job.student),
            Arg::F32(0.0),
        ];
        let grid = piece_grid(tokens.1, width);
        // SAFETY: rows of logits with their targets; pieces come in order, the first one first.
        unsafe {
            self.gpu
                .launch("cross_entropy_parts", "cross_entropy_survey", grid, &args)?
        };
        let (k, ids, picked) = match &self.stored {
            Some(s) => (s.k, Self::at(&s.ids, start * s.k)?, Self::at(&s.picked, start * s.k)?),
            None => (0, Arg::Address(0), Arg::Address(0)),
        };
        let survey = SoftSurvey {
            logits,
            stride: self.own.stride,
            cap: Self::cap(self.job.student),
            sums: self.soft(start)?,
            stored: (k, ids, picked),
        };
        self.soft_survey(survey, tokens.1, piece)
    }

    fn survey_teacher(&mut self, tokens: (usize, usize), piece: (usize, usize)) -> Result<()> {
        let gpu = self.gpu;
        let other = self.teacher()?;
        let (logits, stride) = (other.product(gpu, tokens, piece, false)?, other.stride);
        let survey = SoftSurvey {
            logits,
            stride,
            cap: self.their_cap(),
            sums: self.their_soft(tokens.0)?,
            stored: (0, Arg::Address(0), Arg::Address(0)),
        };
        self.soft_survey(survey, tokens.1, piece)
    }

    fn soft_survey(&self, survey: SoftSurvey, tokens: usize, piece: (usize, usize)) -> Result<()> {
        let SoftSurvey {
            logits,
            stride,
            cap,
            sums,
            stored: (k, ids, picked),
        } = survey;
        let known = self.known(piece);
        if known == 0 {
            return Ok(());
        }
        let args = [
            Arg::Address(logits),
            sums,
            Arg::small(known, "a piece of the vocabulary")?,
            Arg::size(stride),
            Arg::size(piece.0),
            cap,
            Arg::F32(self.inverse()),
            ids,
            Arg::small(k, "the number of stored ids")?,
            picked,
        ];
        self.launch("distill_survey", piece_grid(tokens, known), &args)
    }

    fn measure(&mut self, tokens: (usize, usize), piece: (usize, usize)) -> Result<()> {
        let (gpu, start) = (self.gpu, tokens.0);
        let ours = self.own.product(gpu, tokens, piece, true)?;
        let other = self.teacher()?;
        let (theirs, their_stride) = (other.product(gpu, tokens, piece, true)?, other.stride);
        let args = [
            Arg::Address(ours),
            Arg::Address(theirs),
            self.soft(start)?,
            self.their_soft(start)?,
            self.sums(start)?,
            Arg::small(piece.1, "a piece of the vocabulary")?,
            Arg::size(self.own.stride),
            Arg::size(their_stride),
            Arg::size(piece.0),
            Self::cap(self.job.student),
            self.their_cap(),
            self.terms(),
        ];
        self.launch("distill_measure", piece_grid(tokens.1, piece.1), &args)
    }

    fn finish_stored(&self) -> Result<()> {
        let Some(s) = &self.stored else { return Ok(()) };
        let args = [
            self.soft(0)?,
            Self::at(&s.picked, 0)?,
            Self::at(&s.log_probs, 0)?,
            Self::at(&s.rest, 0)?,
            Arg::small(s.k, "the number of stored ids")?,
            Arg::small(self.count, "a batch")?,
            self.sums(0)?,
            Self::at(&s.slopes, 0)?,
            self.terms(),
        ];
        self.launch("distill_stored", Grid::line(self.count.div_ceil(128), 128), &args)
    }

    fn finish(&self) -> Result<Tensor> {
        let out = self.gpu.empty(3 * self.count, DType::F32)?;
        let beta = self.job.options.beta;
        let (first, second) = match beta {
            0.0 => (1.0, 0.0),
            1.0 => (0.0, 1.0),
            _ => (beta, 1.0 - beta),
        };
        let args = [
            Self::at(&self.seen, 0)?,
            self.targets(0)?,
            self.sums(0)?,
            Arg::small(self.count, "a batch")?,
            Arg::F32(first),
            Arg::F32(second),
            Self::at(&out, 0)?,
        ];
        self.launch("distill_finish", Grid::line(self.count.div_ceil(128), 128), &args)?;
        Ok(out)
    }

    /// Adds the contribution of a piece to `sum` `[count, D]` f32, which the first piece overwrites, and to dw `[V, D]`.
    fn turn(
        &mut self,
        tokens: (usize, usize),
        piece: (usize, usize),
        sum: Option<&Tensor>,
        dw: Option<&Tensor>,
    ) -> Result<()> {
        let (gpu, (start, count), (first, width)) = (self.gpu, tokens, piece);
        let known = self.known(piece);
        let ours = self.own.product(gpu, tokens, piece, true)?;
        let (mut theirs, mut their_stride) = (0, 0);
        if self.other.is_some() && known > 0 {
            let other = self.teacher()?;
            theirs = other.product(gpu, tokens, (first, known), true)?;
            their_stride = other.stride;
        }
        let options = self.job.options;
        let (alpha, beta, scale) = (options.alpha, options.beta, options.scale as f32);
        let share = if beta == 0.0 || beta == 1.0 { 1.0 } else { 1.0 - beta };
        let nothing = Arg::Address(0);
        let (ids, log_probs, slopes, k) = match &self.stored {
            Some(s) => (
                Self::at(&s.ids, start * s.k)?,
                Self::at(&s.log_probs, start * s.k)?,
                Self::at(&s.slopes, start)?,
                s.k,
            ),
            None => (nothing, nothing, nothing, 0),
        };
        let args = [
            Arg::Address(ours),
            self.targets(start)?,
            Self::at(&self.seen, SEEN * start)?,
            self.soft(start)?,
            self.sums(start)?,
            Arg::small(width, "a piece of the vocabulary")?,
            Arg::small(known, "a piece of the vocabulary")?,
            Arg::size(self.own.stride),
            Arg::size(first),
            Self::cap(self.job.student),
            Arg::F32(scale * (1.0 - alpha) * share * self.inverse()),
            Arg::F32(scale * alpha),
            self.terms(),
            Arg::Address(theirs),
            self.their_soft(start)?,
            ids,
            log_probs,
            slopes,
            Arg::size(their_stride),
            Arg::small(k, "the number of stored ids")?,
            self.their_cap(),
        ];
        let (kind, d) = (self.own.kind, self.own.d);
        // Numbers of 16 bits fill the first half of each row.
        let stride = if kind.is_short() {
            2 * self.own.stride
        } else {
            self.own.stride
        };
        let kernel = ["distill_turn_", kind.name()];
        self.launch(kernel, piece_grid(count, width), &args)?;
        let dlogits = gemm::GpuMatrix::new(ours, kind, stride);
        if let Some(dw) = dw {
            let to = address(dw, "dw")? + (4 * first * d) as u64;
            let (to, hidden) = (gemm::GpuMatrix::new(to, FloatType::F32, d), self.own.hidden(start)?);
            // SAFETY: [width, count] · [count, D] into rows of dw, which starts as zeros.
            unsafe { gemm(gpu, (width, d, count), dlogits.t(), hidden, to, true)? };
        }
        if let Some(sum) = sum {
            let to = address(sum, "dh")? + (4 * start * d) as u64;
            let (to, head) = (gemm::GpuMatrix::new(to, FloatType::F32, d), self.own.head(first)?);
            // SAFETY: [count, width] · [width, D] into rows of the sum.
            unsafe { gemm(gpu, (count, d, width), dlogits, head, to, first > 0)? };
        }
        Ok(())
    }
}
