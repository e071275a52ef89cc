//! The objective of `distill`: the student learns the teacher's next-token distribution and, optionally, its hidden
//! states. Depends on hidden states, heads and batches. Independent of optimizers; opens no files.
//!
//! Letters: N tokens, D hidden size of the student, Dt of the teacher, V and Vt their vocabularies.
//!
//! In an evaluation the loss is the cross-entropy of the student alone, so that it is comparable with other stages; the
//! teacher is not evaluated.

pub mod hidden;
pub mod spans;
mod teacher;
#[cfg(test)]
mod tests;

use crate::base::means::NamedMeans;
use crate::base::{Error, Result};
use crate::data::Batch;
use crate::model::head::{HeadWeight, with_pieces};
use crate::model::{Head, LossGradients, Network, Objective, ObjectiveNeeds, Param};
use crate::ops::cross_entropy;
use crate::ops::distill::aligned::{self, AlignedOptions, Comparison};
use crate::ops::distill::{self as ops, DistillSide, HeadMatrix};
use crate::ops::step_stats::{StepStats, StepSums};
use crate::sft::CausalLm;
use candle_core::Tensor;
use hidden::HiddenDistance;
pub use teacher::{AlignedBatch, AlignedRows, AlignedTeacher, StoredOutputs, Teacher};

/// Parameters of the divergence between the distributions; see `ops::distill`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DistillTerms {
    /// 0: KL(teacher, student); 1: KL(student, teacher); between: generalized Jensen-Shannon.
    pub beta: f32,
    /// Divides the logits of both models.
    pub temperature: f32,
    /// Weight of the cross-entropy with the tokens of the data.
    pub alpha: f32,
}

/// The divergence alone, symmetric (the default of TRL).
impl Default for DistillTerms {
    fn default() -> Self {
        Self {
            beta: 0.5,
            temperature: 1.0,
            alpha: 0.0,
        }
    }
}

/// Distillation from one teacher.
pub struct Distill {
    teacher: Teacher,
    terms: DistillTerms,
    hidden: Option<HiddenDistance>,
    plain: CausalLm,
    means: NamedMeans,
}

impl Distill {
    /// `vocab`: V.
    ///
    /// # Errors
    /// Hidden states are requested, but only outputs of the teacher are stored.
    pub fn new(teacher: Teacher, terms: DistillTerms, hidden: Option<HiddenDistance>, vocab: usize) -> Result<Self> {
        if hidden.is_some() && teacher.network().is_none() {
            let what = match teacher {
                Teacher::Aligned(_) => "the tokens of a teacher with another tokenizer have other hidden states",
                _ => "stored outputs of a teacher have no hidden states",
            };
            return Err(Error::usage(what)
                .at("Teacher::Stored")
                .hint("use `Teacher::live` instead, or leave out `HiddenDistance::new`"));
        }
        let wanted = hidden.iter().flat_map(HiddenDistance::teacher_layers).collect();
        Ok(Self {
            teacher: teacher.watching(wanted),
            terms,
            hidden,
            plain: CausalLm::new(vocab),
            means: NamedMeans::default(),
        })
    }

    /// Tokens per chunk: the logits of both models exist for one chunk.
    pub fn chunk_for(vocab: usize, teacher: usize, on_gpu: bool) -> usize {
        cross_entropy::chunk_for(vocab + teacher.min(vocab), on_gpu)
    }
}

/// Calls `f` with a head in the form that the operations expect.
fn with_matrix<R>(head: &HeadWeight, f: impl FnOnce(HeadMatrix) -> Result<R>) -> Result<R> {
    match head {
        HeadWeight::Whole(w) => f(HeadMatrix::Whole(w.dense()?)),
        HeadWeight::Streamed(head) => with_pieces(head, |pieces| f(HeadMatrix::Parts(pieces))),
    }
}

/// Log-probabilities of the `k` most likely ids at each trained position of a batch, among the first `common` ids, for
/// a network without a student.
///
/// # Errors
/// `k` or `common` is out of range, or the temperature is not positive (`Argument`); as `Network::hidden_states`.
pub fn likeliest(
    network: &Network,
    batch: &Batch,
    common: usize,
    k: usize,
    temperature: f32,
) -> Result<crate::ops::distill::TopK> {
    let ctx = network.context(&batch.positions, &batch.documents, None)?;
    let h = network.hidden_states(&batch.ids, &ctx)?;
    let head = network.head()?;
    let chunk = Distill::chunk_for(network.spec.vocab, 0, h.device().is_cuda());
    with_matrix(&head.weight, |matrix| {
        let side = DistillSide {
            h: &h,
            head: matrix,
            softcap: head.softcap,
        };
        ops::likeliest(&side, &batch.targets, common, k, temperature, chunk)
    })
}

impl AlignedTeacher {
    fn evaluate<'a>(
        &'a self,
        student: &DistillSide,
        batch: &Batch,
        mut options: AlignedOptions<'a>,
        step_stats: &StepStats,
    ) -> Result<ops::DistillOutput> {
        let found = self.rows.of(batch)?;
        if found.spans.is_empty() {
            // Only the cross-entropy is left: the teacher's side is not read.
            return aligned::forward_backward(
                student,
                student,
                &batch.targets,
                &batch.targets,
                &[],
                &options,
                step_stats,
            );
        }
        let shared = self.rows.shared();
        options.comparison = shared.map_or(Comparison::Sorted, Comparison::Matched);
        let states = self.live.states(&found.teacher)?;
        let head = self.live.network.head()?;
        with_matrix(&head.weight, |matrix| {
            let side = DistillSide {
                h: &states.last,
                head: matrix,
                softcap: head.softcap,
            };
            let targets = (&batch.targets, &found.teacher.targets);
            aligned::forward_backward(student, &side, targets.0, targets.1, &found.spans, &options, step_stats)
        })
    }
}

impl Objective for Distill {
    fn evaluate(
        &self,
        h: &Tensor,
        head: &Head,
        batch: &Batch,
        need: ObjectiveNeeds,
        step_stats: &StepStats,
    ) -> Result<LossGradients> {
        if !need.dh && !need.dw {
            return self.plain.evaluate(h, head, batch, need, step_stats);
        }
        let vocab = match &head.weight {
            HeadWeight::Whole(w) => w.dense()?.dim(0)?,
            HeadWeight::Streamed(head) => head.rows,
        };
        let options = |chunk: usize| ops::DistillOptions {
            beta: self.terms.beta,
            temperature: self.terms.temperature,
            alpha: self.terms.alpha,
            chunk,
            scale: need.scale,
            need_dh: need.dh,
            need_dw: need.dw,
        };
        let chunk_for = |teacher| Self::chunk_for(vocab, teacher, h.device().is_cuda());
        let out = with_matrix(&head.weight, |matrix| {
            let student = DistillSide {
                h,
                head: matrix,
                softcap: head.softcap,
            };
            match &self.teacher {
                Teacher::Stored(rows) => {
                    let top = rows.of(batch)?;
                    let common = rows.common();
                    let other = ops::DistillTeacher::Stored { top: &top, common };
                    let options = options(chunk_for(0));
                    ops::forward_backward(&student, &other, &batch.targets, &options, step_stats)
                }
                Teacher::Aligned(other) => {
                    let teacher = other.live.network.spec.vocab;
                    // The teacher's logits are not cut to common ids, and both are copied to the host.
                    let chunk = cross_entropy::chunk_for(2 * (vocab + teacher), h.device().is_cuda());
                    let options = AlignedOptions {
                        comparison: Comparison::Sorted,
                        common: options(chunk),
                    };
                    other.evaluate(&student, batch, options, step_stats)
                }
                Teacher::Live(live) => {
                    let states = live.states(batch)?;
                    let head = live.network.head()?;
                    with_matrix(&head.weight, |matrix| {
                        let side = DistillSide {
                            h: &states.last,
                            head: matrix,
                            softcap: head.softcap,
                        };
                        let options = options(chunk_for(live.network.spec.vocab));
                        ops::forward_backward(
                            &student,
                            &ops::DistillTeacher::Live(side),
                            &batch.targets,
                            &options,
                            step_stats,
                        )
                    })
                }
            }
        })?;
        let tokens = out.trained as f64;
        self.means.add("divergence", out.divergence, tokens);
        self.means.add("cross_entropy", out.cross_entropy, tokens);
        if self.hidden.is_some() {
            self.means.add("hidden_loss", 0.0, tokens);
        }
        Ok(LossGradients {
            dh: out.dh,
            dw: out.dw,
            objective_params: Vec::new(),
        })
    }

    /// The teacher computes a token from all earlier ones of its document, or has stored whole documents.
    fn reads_whole_documents(&self) -> bool {
        true
    }

    fn hidden_layers(&self) -> &[usize] {
        self.hidden.as_ref().map_or(&[], HiddenDistance::layers)
    }

    fn evaluate_hidden(
        &self,
        layer: usize,
        x: &Tensor,
        batch: &Batch,
        need: ObjectiveNeeds,
        step_stats: &StepStats,
    ) -> Result<LossGradients> {
        let (Some(hidden), Teacher::Live(live), true) = (&self.hidden, &self.teacher, need.dh || need.dw) else {
            return Ok(LossGradients::default());
        };
        let states = live.states(batch)?;
        let out = hidden.compare(layer, x, &states.by_layer, &batch.targets, need)?;
        step_stats.add(StepSums {
            loss: out.loss,
            ..StepSums::default()
        });
        self.means.add_sum("hidden_loss", out.loss);
        Ok(LossGradients {
            dh: out.dx,
            dw: None,
            objective_params: out.objective_params,
        })
    }

    fn params(&self) -> Vec<Param> {
        self.hidden.as_ref().map_or(Vec::new(), HiddenDistance::params)
    }

    fn means(&self) -> Option<&NamedMeans> {
        Some(&self.means)
    }

    fn metrics(&self) -> Vec<(&'static str, f64)> {
        let mut means = self.means.take();
        means.sort_by_key(|(name, _)| *name != "divergence");
        means
    }
}
