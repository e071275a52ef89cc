//! Fused distillation through two output projections: hidden states of a student and of a teacher in, the
//! divergence between their next-token distributions and its gradients out. The logits of either model are in
//! memory for at most a chunk of tokens.
//!
//! Letters: N tokens, D and V hidden size and vocabulary of the student, Dt and Vt of the teacher, C = min(V, Vt)
//! the number of common ids, k stored ids per token.
//!
//! Loss of a token: `alpha · cross-entropy + (1 - alpha) · divergence`. The divergence is between the distributions
//! over the C common ids at temperature T, q of the student and p of the teacher: KL(p‖q) for beta = 0, KL(q‖p) for
//! beta = 1, else the generalized Jensen-Shannon divergence beta KL(p‖m) + (1 - beta) KL(q‖m), m = (1 - beta)
//! q + beta p (Agarwal et al. 2024, arXiv 2306.13649, section 3). It is not multiplied by T². The cross-entropy is
//! over all V ids at T = 1.

pub mod aligned;
#[cfg(test)]
mod tests;

use super::cpu::cross_entropy::PIECE;
use super::cpu::distill as cpu;
use super::cpu::storage::{dims2, expect_dims, expect_f32, floats, tensor};
use super::cross_entropy::OutputPieces;
use super::step_stats::{StepStats, StepSums};
use candle_core::Tensor;
use ft_base::IGNORE;
use ft_base::{Error, Result};
use std::cell::RefCell;

/// An output projection `[rows, D]`.
#[derive(Clone, Copy)]
pub enum HeadMatrix<'a> {
    /// A head in memory.
    Whole(&'a Tensor),
    /// A streamed head; each part is a multiple of `cross_entropy::PIECE` rows.
    Parts(&'a OutputPieces<'a>),
}

/// One model: hidden states after the final norm, `[N, D]`, and its head.
#[derive(Clone, Copy)]
pub struct DistillSide<'a> {
    /// Hidden states after the final norm, `[N, D]`.
    pub h: &'a Tensor,
    /// The output projection.
    pub head: HeadMatrix<'a>,
    /// Logits z become cap · tanh(z / cap).
    pub softcap: Option<f32>,
}

/// The top-k ids of each trained token, in order, as `likeliest` returns them. I and F: how the numbers are stored.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TopK<I = Vec<u32>, F = Vec<f32>> {
    /// Ids per token.
    pub k: usize,
    /// `[trained, k]`, ascending in each row.
    pub ids: I,
    /// `[trained, k]`: log-probabilities over the C common ids at the temperature.
    pub log_probs: F,
    /// `[trained]`: logarithm of the probability of all other ids together; -infinity if there are none.
    pub rest: F,
}

/// Some tokens of a `TopK`.
pub(crate) type TopKSlices<'a> = TopK<&'a [u32], &'a [f32]>;

impl TopK {
    /// Returns `count` tokens from `first` on.
    pub(crate) fn tokens(&self, first: usize, count: usize) -> TopKSlices<'_> {
        TopK {
            k: self.k,
            ids: &self.ids[first * self.k..][..count * self.k],
            log_probs: &self.log_probs[first * self.k..][..count * self.k],
            rest: &self.rest[first..][..count],
        }
    }
}

/// The teacher. S: how a model is given.
pub enum DistillTeacher<'a, S = DistillSide<'a>> {
    /// A model: its logits are computed.
    Live(S),
    /// Stored distributions over the first `common` ids.
    Stored {
        /// The stored rows.
        top: &'a TopK,
        /// C: ids that both vocabularies have.
        common: usize,
    },
}

/// The options of the loss: the divergence, its mix with the cross-entropy, the gradients.
#[derive(Debug, Clone)]
pub struct DistillOptions {
    /// 0: KL(teacher, student); 1: KL(student, teacher); between: generalized Jensen-Shannon.
    pub beta: f32,
    /// Divides the logits of both models; positive.
    pub temperature: f32,
    /// Weight of the cross-entropy; that of the divergence is 1 - `alpha`.
    pub alpha: f32,
    /// Tokens per chunk; 0 counts as 1.
    pub chunk: usize,
    /// Factor of the gradients (not of the loss): 1 / tokens of the window.
    pub scale: f64,
    /// Compute the gradient of h.
    pub need_dh: bool,
    /// Compute the gradient of the head.
    pub need_dw: bool,
}

/// The sums of the loss, and the requested gradients.
#[derive(Debug)]
pub struct DistillOutput {
    /// Number of tokens with a target.
    pub trained: usize,
    /// Sums over the trained tokens, in nats.
    pub divergence: f64,
    /// Sum over the trained tokens, in nats.
    pub cross_entropy: f64,
    /// `[N, D]` of the type of h, zero for tokens without a target.
    pub dh: Option<Tensor>,
    /// `[V, D]` f32.
    pub dw: Option<Tensor>,
}

impl DistillSide<'_> {
    /// Returns (rows, width) of the head.
    ///
    /// # Errors
    /// The head is not a matrix (`Shape`).
    pub fn sizes(&self) -> Result<(usize, usize)> {
        match self.head {
            HeadMatrix::Whole(w) => dims2(w, "the head"),
            HeadMatrix::Parts(parts) => Ok((parts.rows, parts.width)),
        }
    }

    pub(crate) fn in_parts(&self) -> bool {
        matches!(self.head, HeadMatrix::Parts(_))
    }

    /// Checks that hidden states, head and softcap fit together for `n` tokens; returns the sizes of the head.
    fn check(&self, n: usize, who: &str) -> Result<(usize, usize)> {
        let (rows, width) = self.sizes()?;
        expect_dims(self.h, &format!("the hidden states of the {who}"), &[n, width])?;
        if self.softcap.is_some_and(|cap| cap.is_nan() || cap <= 0.0) {
            return Err(Error::argument("the soft cap of the logits must be positive"));
        }
        if let HeadMatrix::Parts(parts) = self.head
            && (parts.rows_of_part == 0 || !parts.rows_of_part.is_multiple_of(PIECE))
        {
            return Err(Error::shape("the parts of the output head have the wrong size")
                .found(parts.rows_of_part)
                .expected(format!("a multiple of {PIECE}")));
        }
        Ok((rows, width))
    }

    /// Calls `f` with this side as slices. The last part of a streamed head is cached.
    fn on_cpu<R>(&self, who: &str, f: impl FnOnce(&cpu::SideSlices) -> Result<R>) -> Result<R> {
        let (rows, width) = self.sizes()?;
        let name = format!("the hidden states of the {who}");
        expect_f32(self.h, &name)?;
        let held: RefCell<Option<(usize, Tensor)>> = RefCell::new(None);
        let piece = |first: usize, count: usize| -> Result<Tensor> {
            let parts = match self.head {
                HeadMatrix::Whole(w) => return Ok(w.narrow(0, first, count)?),
                HeadMatrix::Parts(parts) => parts,
            };
            let start = first / parts.rows_of_part * parts.rows_of_part;
            let known = held.borrow().as_ref().map(|(at, _)| *at);
            if known != Some(start) {
                held.replace(None);
                held.replace(Some((start, parts.checked(start)?)));
            }
            let held = held.borrow();
            let (_, part) = held
                .as_ref()
                .ok_or_else(|| Error::internal("a part of the output head is missing"))?;
            Ok(part.narrow(0, first - start, count)?)
        };
        floats(self.h, &name, |h| {
            f(&cpu::SideSlices {
                h,
                width,
                rows,
                piece: &piece,
                cap: self.softcap.unwrap_or(0.0),
            })
        })
    }
}

/// Computes loss and gradients. Adds to `step_stats` the loss (not finite if a logit is not), and the number of tokens
/// whose target has the student's largest logit.
///
/// # Errors
/// Shapes that do not fit, targets outside the vocabulary, settings out of range, stored rows that do not match the
/// trained tokens.
pub fn forward_backward(
    student: &DistillSide,
    teacher: &DistillTeacher,
    targets: &[u32],
    options: &DistillOptions,
    step_stats: &StepStats,
) -> Result<DistillOutput> {
    let n = targets.len();
    let (v, d) = student.check(n, "student")?;
    let trained = trained(targets, v)?;
    check_terms(options)?;
    if options.need_dw && student.in_parts() {
        return Err(Error::unsupported(
            "an output head that is read in parts cannot be trained",
        ));
    }
    let common = match teacher {
        DistillTeacher::Live(side) => side.check(n, "teacher")?.0.min(v),
        DistillTeacher::Stored { top, common } => {
            check_stored(top, *common, trained.len(), v)?;
            *common
        }
    };
    on_gpu!(
        student.h,
        on_gpu::forward_backward(student, teacher, targets, &trained, common, options, step_stats)
    );
    let terms = cpu::DivergenceTerms {
        beta: options.beta,
        temperature: options.temperature,
        alpha: options.alpha,
        common,
    };
    let mut gradients = cpu::DistillGradients {
        scale: options.scale as f32,
        dh: options.need_dh.then(|| vec![0f32; n * d]),
        dw: options.need_dw.then(|| vec![0f32; v * d]),
    };
    let parts = student.in_parts() || matches!(teacher, DistillTeacher::Live(side) if side.in_parts());
    let mut sum = DistillSums::default();
    {
        let wanted = (options.need_dh || options.need_dw).then_some(&mut gradients);
        let each = &mut |row: &cpu::TokenDivergence| sum.add(row, options.alpha as f64);
        let run = |student: &cpu::SideSlices, teacher: DistillTeacher<cpu::SideSlices>| {
            let job = cpu::DistillJob {
                student,
                teacher: &teacher,
                targets,
                trained: &trained,
                terms,
                chunk: options.chunk.max(1),
                keep_logits: !parts,
            };
            cpu::run(&job, wanted, each)
        };
        student.on_cpu("student", |own| match teacher {
            DistillTeacher::Live(side) => side.on_cpu("teacher", |side| run(own, DistillTeacher::Live(*side))),
            DistillTeacher::Stored { top, common } => run(own, DistillTeacher::Stored { top, common: *common }),
        })?;
    }
    step_stats.add(sum.sums);
    Ok(DistillOutput {
        trained: trained.len(),
        divergence: sum.divergence,
        cross_entropy: sum.cross_entropy,
        dh: gradients.dh.map(|dh| tensor(dh, (n, d))).transpose()?,
        dw: gradients.dw.map(|dw| tensor(dw, (v, d))).transpose()?,
    })
}

/// Returns the `k` most likely of the first `common` ids at each trained position, with their log-probabilities at
/// `temperature`; fewer if there are fewer ids. NaN if a logit is not finite.
///
/// # Errors
/// `k` or `common` is out of range, or the temperature is not positive (`Argument`); tensors of other shapes (`Shape`).
pub fn likeliest(
    side: &DistillSide,
    targets: &[u32],
    common: usize,
    k: usize,
    temperature: f32,
    chunk: usize,
) -> Result<TopK> {
    let (v, _) = side.check(targets.len(), "teacher")?;
    if common == 0 || common > v || k == 0 {
        return Err(Error::argument("the number of ids to store is out of range")
            .found(format!("{k} of {common}"))
            .expected(format!("at most {v}, at least 1")));
    }
    check_temperature(temperature)?;
    let chosen: Vec<usize> = (0..targets.len()).filter(|n| targets[*n] != IGNORE).collect();
    on_gpu!(side.h, on_gpu::likeliest(side, &chosen, common, k, temperature, chunk));
    side.on_cpu("teacher", |side| {
        cpu::likeliest(side, &chosen, common, k, temperature, chunk)
    })
}

#[cfg(feature = "cuda")]
mod on_gpu {
    use super::*;
    use crate::cuda::distill::{GpuDistillJob, each_logits, run};

    pub(super) fn forward_backward(
        student: &DistillSide,
        teacher: &DistillTeacher,
        targets: &[u32],
        trained: &[usize],
        common: usize,
        options: &DistillOptions,
        step_stats: &StepStats,
    ) -> Result<DistillOutput> {
        let found = run(&GpuDistillJob {
            student,
            teacher,
            targets,
            trained,
            common,
            options,
        })?;
        let mut sum = DistillSums::default();
        for (i, divergence) in found.divergence.iter().enumerate() {
            let row = cpu::TokenDivergence {
                divergence: f64::from(*divergence),
                cross_entropy: f64::from(found.cross_entropy[i]),
                correct: found.correct[i] != 0.0,
            };
            sum.add(&row, options.alpha as f64);
        }
        step_stats.add(sum.sums);
        Ok(DistillOutput {
            trained: trained.len(),
            divergence: sum.divergence,
            cross_entropy: sum.cross_entropy,
            dh: found.dh,
            dw: found.dw,
        })
    }

    /// The host selects from the logits.
    pub(super) fn likeliest(
        side: &DistillSide,
        chosen: &[usize],
        common: usize,
        k: usize,
        temperature: f32,
        chunk: usize,
    ) -> Result<TopK> {
        let cap = side.softcap.unwrap_or(0.0);
        let mut selection = cpu::Selection::new(chosen.len(), common, k, temperature, cap);
        each_logits(side, chosen, common, chunk, |start, logits, first, width| {
            selection.survey(start, logits, first, width)
        })?;
        Ok(selection.finish())
    }
}

#[derive(Default)]
struct DistillSums {
    sums: StepSums,
    divergence: f64,
    cross_entropy: f64,
}

impl DistillSums {
    fn add(&mut self, row: &cpu::TokenDivergence, alpha: f64) {
        self.sums.loss += alpha * row.cross_entropy + (1.0 - alpha) * row.divergence;
        self.sums.correct += f64::from(row.correct);
        self.divergence += row.divergence;
        self.cross_entropy += row.cross_entropy;
    }
}

fn trained(targets: &[u32], v: usize) -> Result<Vec<usize>> {
    let outside = |t: &u32| *t != IGNORE && *t as usize >= v;
    if let Some(at) = targets.iter().position(outside) {
        return Err(Error::argument("a target is outside the vocabulary")
            .at(format!("token {at}"))
            .found(targets[at])
            .expected(format!("below {v}")));
    }
    Ok((0..targets.len()).filter(|n| targets[*n] != IGNORE).collect())
}

fn check_temperature(temperature: f32) -> Result<()> {
    if temperature.is_finite() && temperature > 0.0 {
        Ok(())
    } else {
        Err(Error::argument("the temperature of a divergence must be a positive number").found(temperature))
    }
}

fn check_terms(options: &DistillOptions) -> Result<()> {
    check_temperature(options.temperature)?;
    for (what, value) in [("beta", options.beta), ("alpha", options.alpha)] {
        if !(0.0..=1.0).contains(&value) {
            return Err(Error::argument(format!("`{what}` of a distillation is out of range"))
                .found(value)
                .expected("0 to 1"));
        }
    }
    Ok(())
}

fn check_stored(top: &TopK, common: usize, trained: usize, v: usize) -> Result<()> {
    let lengths = [top.ids.len(), top.log_probs.len(), top.rest.len() * top.k];
    if top.k == 0 || common > v || lengths != [trained * top.k; 3] {
        return Err(
            Error::shape("the teacher's stored rows do not match the trained tokens")
                .found(format!("{} rows of {} ids below {common}", top.rest.len(), top.k))
                .expected(format!("{trained} rows, ids below {v}")),
        );
    }
    for (i, row) in top.ids.chunks(top.k).enumerate() {
        let rising = row.windows(2).all(|w| w[0] < w[1]) && row.last().is_none_or(|id| (*id as usize) < common);
        let rest = top.k >= common || top.rest[i].is_finite();
        if !rising || !rest || top.log_probs[i * top.k..][..top.k].iter().any(|x| !x.is_finite()) {
            return Err(
                Error::argument("a stored row of the teacher is not a probability distribution")
                    .at(format!("trained token {i}"))
                    .expected("ascending ids and finite log-probabilities"),
            );
        }
    }
    Ok(())
}
