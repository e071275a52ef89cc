//! Divergences between the next-token distributions of two models, on slices. As in `cross_entropy` the vocabulary
//! is cut into pieces, both for a head that is in memory as a whole and for a streamed head: the same products, the
//! same sums, the same bits.
//!
//! Letters: D, V hidden size and vocabulary of the student, C the number of ids that both models share (C <= V), T
//! temperature; q the student's probabilities and p the teacher's, both over C at T; m = (1 - beta) q + beta p.

mod rows;
mod stored;
mod terms;
mod top;

use super::cross_entropy::{LogitsSizes, PIECE, back, gather, multiply, pieces};
use super::product::{CInit, Matrix, WeightRows, product};
use super::storage::{StoredElements, unwritten, values};
use crate::distill::{DistillTeacher, TopK};
use candle_core::Tensor;
use ft_base::Result;
use rows::{LogitsTeacher, LogitsTile, StudentRows, cap_rows};

pub(crate) use top::Selection;

/// Returns rows of a head: arguments are the first row and the number of rows.
pub(crate) type ReadHeadRows<'a> = dyn Fn(usize, usize) -> Result<Tensor> + 'a;

/// One model: hidden states `[N, D]` and a head `[rows, D]`. `cap` 0 means no softcap.
#[derive(Clone, Copy)]
pub(crate) struct SideSlices<'a> {
    pub h: &'a [f32],
    pub width: usize,
    pub rows: usize,
    pub piece: &'a ReadHeadRows<'a>,
    pub cap: f32,
}

/// The divergence and the weights of the loss.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DivergenceTerms {
    /// 0: KL(p|q), 1: KL(q|p), between: beta KL(p|m) + (1 - beta) KL(q|m).
    pub beta: f32,
    pub temperature: f32,
    /// Weight of the cross-entropy in the loss; the divergence has the rest.
    pub alpha: f32,
    /// C.
    pub common: usize,
}

/// The output gradients, initially zero.
pub(crate) struct DistillGradients {
    pub scale: f32,
    pub dh: Option<Vec<f32>>,
    pub dw: Option<Vec<f32>>,
}

/// The result of one token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TokenDivergence {
    pub divergence: f64,
    pub cross_entropy: f64,
    pub correct: bool,
}

/// Logits of a group of tokens: saved for all pieces, or recomputed for each.
struct Logits {
    data: Vec<f32>,
    kept: bool,
}

impl Logits {
    /// Allocates for `count` tokens and `rows` ids, or for `chunk` tokens and one piece.
    fn new(kept: bool, count: usize, chunk: usize, rows: usize) -> Self {
        let len = if kept { count * rows } else { chunk * PIECE.min(rows) };
        Self {
            data: unwritten(len),
            kept,
        }
    }

    fn part(&mut self, tokens: usize, first: usize, width: usize) -> &mut [f32] {
        let start = if self.kept { tokens * first } else { 0 };
        &mut self.data[start..start + tokens * width]
    }
}

/// One model with the hidden states of a group of tokens.
struct ModelTokens<'a> {
    side: &'a SideSlices<'a>,
    /// `[count, D]`
    h: Vec<f32>,
    logits: Logits,
}

impl<'a> ModelTokens<'a> {
    fn new(side: &'a SideSlices<'a>, tokens: &[usize], rows: usize, kept: bool, chunk: usize) -> Self {
        let d = side.width;
        Self {
            side,
            h: gather(side.h, tokens, d),
            logits: Logits::new(kept, tokens.len(), chunk, rows),
        }
    }

    /// Computes the logits `[count, width]` of the tokens from `start` on, without the softcap.
    fn multiply(&mut self, head: StoredElements<'_>, (start, count): (usize, usize), first: usize) -> &mut [f32] {
        let d = self.side.width;
        let width = head.len() / d.max(1);
        let logits = self.logits.part(count, first, width);
        let head = WeightRows::new(head, d);
        let sizes = LogitsSizes { count, width, d };
        multiply(&self.h[start * d..][..count * d], head, sizes, logits);
        logits
    }

    /// Returns the logits with the softcap, as after `survey`: saved, or recomputed.
    fn again(&mut self, head: StoredElements<'_>, tokens: (usize, usize), first: usize) -> &mut [f32] {
        let (d, cap) = (self.side.width, self.side.cap);
        let width = head.len() / d.max(1);
        if self.logits.kept {
            self.logits.part(tokens.1, first, width)
        } else {
            let logits = self.multiply(head, tokens, first);
            cap_rows(logits, width, cap);
            logits
        }
    }
}

/// The inputs of a comparison.
pub(crate) struct DistillJob<'a> {
    pub student: &'a SideSlices<'a>,
    pub teacher: &'a DistillTeacher<'a, SideSlices<'a>>,
    /// Of all tokens.
    pub targets: &'a [u32],
    /// The tokens that are compared.
    pub trained: &'a [usize],
    pub terms: DivergenceTerms,
    /// Tokens whose logits are computed at a time; at least 1.
    pub chunk: usize,
    /// The logits of a chunk are in memory for the whole vocabulary, and heads are read for every chunk. Else only the
    /// logits of one piece are in memory, and every head is read three times in all.
    pub keep_logits: bool,
}

/// Computes loss and gradients; `each` is called with the results of the tokens in order.
pub(crate) fn run(
    job: &DistillJob<'_>,
    mut gradients: Option<&mut DistillGradients>,
    each: &mut impl FnMut(&TokenDivergence),
) -> Result<()> {
    let tokens = job.trained.len().max(1);
    let size = if job.keep_logits { job.chunk.min(tokens) } else { tokens };
    for (index, tokens) in job.trained.chunks(size).enumerate() {
        let rows = group(job, tokens, index * size, gradients.as_deref_mut())?;
        rows.iter().for_each(&mut *each);
    }
    Ok(())
}

/// Runs the tokens of one group; `first_token` is the position of the first among all trained tokens.
fn group(
    job: &DistillJob<'_>,
    tokens: &[usize],
    first_token: usize,
    gradients: Option<&mut DistillGradients>,
) -> Result<Vec<TokenDivergence>> {
    let DistillJob {
        student,
        teacher,
        terms,
        ..
    } = *job;
    let (chunk, kept) = (job.chunk.min(job.trained.len().max(1)), job.keep_logits);
    let targets: Vec<u32> = tokens.iter().map(|n| job.targets[*n]).collect();
    let (all, d, v) = (tokens.len(), student.width, student.rows);
    let parts = || (0..all).step_by(chunk).map(|start| (start, chunk.min(all - start)));
    let tile = |(start, count), first, wide, width| LogitsTile {
        start,
        count,
        first,
        wide,
        width,
    };
    let mut own = ModelTokens::new(student, tokens, v, kept, chunk);
    let stored = match teacher {
        DistillTeacher::Live(_) => None,
        DistillTeacher::Stored { top, .. } => Some(top.tokens(first_token, all)),
    };
    let mut state = StudentRows::new(targets, v, student.cap, terms, stored);
    for (first, width) in pieces(v) {
        let head = (student.piece)(first, width)?;
        values(&head, "the head", |head| {
            for part in parts() {
                let logits = own.multiply(head, part, first);
                state.survey(part.0, logits, first, width);
            }
            Ok(())
        })?;
    }
    state.finish();
    let mut live = match teacher {
        DistillTeacher::Stored { .. } => None,
        DistillTeacher::Live(side) => {
            let mut group = ModelTokens::new(side, tokens, terms.common, kept, chunk);
            let mut live = LogitsTeacher::new(all, terms, side.cap);
            for (first, width) in pieces(terms.common) {
                let head = (side.piece)(first, width)?;
                values(&head, "the teacher's head", |head| {
                    for part in parts() {
                        let logits = group.multiply(head, part, first);
                        live.survey(part.0, logits, first, width);
                    }
                    Ok(())
                })?;
            }
            live.finish();
            for (first, width) in pieces(terms.common) {
                // A piece of the student may contain ids beyond the common ones.
                let wide = PIECE.min(v - first);
                let head = (student.piece)(first, wide)?;
                let other = (side.piece)(first, width)?;
                values(&head, "the head", |head| {
                    values(&other, "the teacher's head", |other| {
                        for part in parts() {
                            let theirs = group.again(other, part, first);
                            let ours = own.again(head, part, first);
                            live.measure(&state, tile(part, first, wide, width), ours, theirs);
                        }
                        Ok(())
                    })
                })?;
            }
            Some((live, group))
        }
    };
    let rows = match &mut live {
        Some((live, _)) => live.rows(&state),
        None => state.stored_rows(),
    };
    let Some(gradients) = gradients else { return Ok(rows) };
    let scale = gradients.scale;
    let mut dh = gradients.dh.is_some().then(|| unwritten(all * d));
    for (first, wide) in pieces(v) {
        let head = (student.piece)(first, wide)?;
        let width = terms.common.saturating_sub(first).min(wide);
        let other = match teacher {
            DistillTeacher::Live(side) if width > 0 => Some((side.piece)(first, width)?),
            _ => None,
        };
        values(&head, "the head", |head| {
            for part in parts() {
                let (start, count) = part;
                match (&mut live, &other) {
                    (Some((live, group)), Some(other)) => {
                        values(other, "the teacher's head", |other| {
                            let theirs = group.again(other, part, first);
                            let ours = own.again(head, part, first);
                            live.turn(&state, tile(part, first, wide, width), ours, theirs, scale);
                            Ok(())
                        })?;
                    }
                    (Some((live, _)), None) => {
                        let ours = own.again(head, part, first);
                        live.turn(&state, tile(part, first, wide, 0), ours, &[], scale);
                    }
                    (None, _) => {
                        let ours = own.again(head, part, first);
                        state.turn_stored(part.0, ours, first, wide, scale);
                    }
                }
                let ModelTokens { h, logits, .. } = &mut own;
                let dlogits = &*logits.part(count, first, wide);
                let h = &h[start * d..][..count * d];
                if let Some(dw) = &mut gradients.dw {
                    product(
                        (wide, d, count),
                        &mut dw[first * d..][..wide * d],
                        CInit::C,
                        Matrix::k_outer(StoredElements::F32(dlogits), wide),
                        Matrix::k_outer(StoredElements::F32(h), d),
                        head.rounding(),
                    );
                }
                if let Some(dh) = &mut dh {
                    let sizes = LogitsSizes { count, width: wide, d };
                    let dh = &mut dh[start * d..][..count * d];
                    back(dlogits, WeightRows::new(head, d), sizes, first, dh);
                }
            }
            Ok(())
        })?;
    }
    if let (Some(to), Some(from)) = (&mut gradients.dh, &dh) {
        for (row, n) in from.chunks_exact(d.max(1)).zip(tokens) {
            to[n * d..][..d].copy_from_slice(row);
        }
    }
    Ok(rows)
}

/// Returns the log-probabilities at `temperature` of the `k` most likely of the first `common` ids, for the tokens
/// `chosen`, and the log-probability of all others. The head is read once.
pub(crate) fn likeliest(
    side: &SideSlices<'_>,
    chosen: &[usize],
    common: usize,
    k: usize,
    temperature: f32,
    chunk: usize,
) -> Result<TopK> {
    let all = chosen.len();
    let chunk = chunk.clamp(1, all.max(1));
    // Logits are used once: none are saved.
    let mut group = ModelTokens::new(side, chosen, common, false, chunk);
    let mut selection = Selection::new(all, common, k, temperature, side.cap);
    for (first, width) in pieces(common) {
        let head = (side.piece)(first, width)?;
        values(&head, "the head", |head| {
            for start in (0..all).step_by(chunk) {
                let logits = group.multiply(head, (start, chunk.min(all - start)), first);
                selection.survey(start, logits, first, width);
            }
            Ok(())
        })?;
    }
    Ok(selection.finish())
}
