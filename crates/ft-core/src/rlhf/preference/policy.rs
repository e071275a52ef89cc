//! The objective of the stages that train a language model on preferences: `dpo`, `orpo`, `simpo`, `kto`.
//!
//! Two products with the output projection: one for the log-probabilities of the answers, then one for the gradients,
//! with the derivatives from `losses` or `unpaired`. Logits exist for one chunk of tokens at a time.
//!
//! The documents of a batch are in pairs: chosen and rejected; for KTO a judged answer and its mismatched pair.

use super::columns::{LABEL, PROMPT, REFERENCE};
use super::losses::{AnswerLogProbs, LogProbPair, PairwiseLoss, PreferenceTerms};
use super::unpaired::{self, JudgedAnswer, KtoSettings, KtoTerms};
use crate::base::means::NamedMeans;
use crate::base::{Error, Result};
use crate::data::{Batch, IGNORE};
use crate::model::{Head, LossGradients, Objective, ObjectiveNeeds};
use crate::ops::step_stats::{StepStats, StepSums};
use crate::rlhf::policy::gradients;
use candle_core::Tensor;
use std::ops::Range;

/// Kind of training data, with its loss.
#[derive(Debug, Clone, PartialEq)]
pub enum PreferenceAlgorithm {
    /// Pairs of a chosen and a rejected answer.
    Pairs {
        /// The loss of a pair.
        loss: PairwiseLoss,
        /// Weight of an answer's tokens beyond the length of the shorter answer (LD-DPO: Liu et al. 2024,
        /// arXiv 2409.06411); 1: off.
        ld_alpha: f64,
    },
    /// Single answers, each desirable or not.
    Judged(KtoSettings),
}

impl PreferenceAlgorithm {
    /// True if the log-probabilities of the reference are needed.
    pub fn has_reference(&self) -> bool {
        match self {
            PreferenceAlgorithm::Pairs { loss, .. } => loss.has_reference(),
            PreferenceAlgorithm::Judged(_) => true,
        }
    }

    fn ld_alpha(&self) -> f64 {
        match self {
            PreferenceAlgorithm::Pairs { ld_alpha, .. } => *ld_alpha,
            PreferenceAlgorithm::Judged(_) => 1.0,
        }
    }

    /// Positions and token weights of the answers. Errors: the batch lacks a column.
    fn answers(&self, batch: &Batch) -> Result<Vec<AnswerSpan>> {
        let prompts = batch.columns.document(PROMPT)?;
        if prompts.len() + 1 != batch.documents.len() {
            return Err(Error::shape("the length of a batch column differs from the number of documents").at(PROMPT));
        }
        let mut answers = Vec::with_capacity(prompts.len());
        for (document, &prompt) in batch.documents.windows(2).zip(prompts) {
            let (start, end, prompt) = (document[0], document[1], prompt as usize);
            // Position n predicts token n + 1.
            let first = (start + prompt.max(1)).min(end) - 1;
            let length = (end - start).saturating_sub(prompt) as f64;
            answers.push(AnswerSpan {
                document: start..end,
                targets: first..end.saturating_sub(1).max(first),
                length,
                shared: usize::MAX,
            });
        }
        if self.ld_alpha() < 1.0 {
            for pair in answers.chunks_mut(2) {
                let shared = pair.iter().map(|a| a.targets.len()).min().unwrap_or(0);
                pair.iter_mut().for_each(|a| a.shared = shared);
            }
        }
        Ok(answers)
    }

    /// Log-probability of each answer, `[documents]`, from those of the targets, `[N]`.
    ///
    /// # Errors
    /// The batch lacks the column with the lengths of the prompts, or it has another length (`Shape`).
    pub fn logps(&self, batch: &Batch, log_probs: &[f32]) -> Result<Vec<f64>> {
        let answers = self.answers(batch)?;
        Ok(answers.iter().map(|a| a.sum(log_probs, self.ld_alpha())).collect())
    }
}

/// The answer of a document.
struct AnswerSpan {
    document: Range<usize>,
    /// Positions whose targets are the answer tokens.
    targets: Range<usize>,
    /// Number of answer tokens, including one that no position predicts.
    length: f64,
    /// Tokens beyond this number have a lower weight.
    shared: usize,
}

impl AnswerSpan {
    fn weight(&self, position: usize, ld_alpha: f64) -> f64 {
        if position - self.targets.start < self.shared {
            1.0
        } else {
            ld_alpha
        }
    }

    fn sum(&self, log_probs: &[f32], ld_alpha: f64) -> f64 {
        let targets = self.targets.clone();
        targets
            .map(|n| self.weight(n, ld_alpha) * f64::from(log_probs[n]))
            .sum()
    }
}

/// The preference objective.
pub struct PreferenceObjective {
    algorithm: PreferenceAlgorithm,
    means: NamedMeans,
}

impl PreferenceObjective {
    /// The objective of this algorithm.
    pub fn new(algorithm: PreferenceAlgorithm) -> Self {
        Self {
            algorithm,
            means: NamedMeans::default(),
        }
    }

    /// Derivatives of the loss with respect to the answers' sums and to the trained tokens of each document,
    /// `[documents]`, the sum of the losses, and the number of correct units.
    fn slopes(&self, batch: &Batch, answers: &[AnswerSpan], log_probs: &[f32]) -> Result<Slopes> {
        let ld_alpha = self.algorithm.ld_alpha();
        let none = vec![0f32; answers.len()];
        let reference = if self.algorithm.has_reference() {
            batch.columns.document(REFERENCE)?
        } else {
            &none
        };
        let side = |d: usize| {
            let answer = &answers[d];
            let texts = answer.document.clone().filter(|n| batch.targets[*n] != IGNORE);
            AnswerLogProbs {
                // Rounded like the reference: the difference is exactly zero for unchanged weights.
                logp: f64::from(answer.sum(log_probs, ld_alpha) as f32),
                reference: f64::from(reference[d]),
                length: answer.length,
                predicted: answer.targets.len() as f64,
                text_logp: texts.clone().map(|n| f64::from(log_probs[n])).sum(),
                text_tokens: texts.count() as f64,
            }
        };
        let sides: Vec<AnswerLogProbs> = (0..answers.len()).map(side).collect();
        match &self.algorithm {
            PreferenceAlgorithm::Pairs { loss, .. } => {
                let pairs: Vec<LogProbPair> = sides
                    .chunks_exact(2)
                    .map(|p| LogProbPair {
                        chosen: p[0],
                        rejected: p[1],
                    })
                    .collect();
                let terms = loss.evaluate(&pairs);
                let correct = terms.rewards.iter().filter(|[c, r]| c > r).count() as f64;
                self.measure(loss, &pairs, &terms, correct);
                Ok(Slopes {
                    loss: terms.loss,
                    correct,
                    answers: terms.slopes.concat(),
                    texts: pairs.iter().flat_map(|_| [terms.text_slope, 0.0]).collect(),
                })
            }
            PreferenceAlgorithm::Judged(kto) => self.judged(kto, batch.columns.document(LABEL)?, &sides),
        }
    }

    fn measure(&self, loss: &PairwiseLoss, pairs: &[LogProbPair], terms: &PreferenceTerms, correct: f64) {
        let count = pairs.len() as f64;
        let sum = |f: &dyn Fn(usize) -> f64| (0..pairs.len()).map(f).sum::<f64>();
        // TRL reports sums over the tokens if the loss uses sums.
        let logp = |s: &AnswerLogProbs| match loss {
            PairwiseLoss::Dpo(_) => s.logp,
            _ => s.logp / s.predicted.max(1.0),
        };
        for (name, value) in [
            ("rewards/chosen", sum(&|i| terms.rewards[i][0])),
            ("rewards/rejected", sum(&|i| terms.rewards[i][1])),
            ("rewards/accuracies", correct),
            ("rewards/margins", sum(&|i| terms.rewards[i][0] - terms.rewards[i][1])),
            ("logps/chosen", sum(&|i| logp(&pairs[i].chosen))),
            ("logps/rejected", sum(&|i| logp(&pairs[i].rejected))),
        ]
        .into_iter()
        .chain(terms.metrics.iter().map(|(name, mean)| (*name, mean * count)))
        {
            self.means.add(name, value, count);
        }
    }

    fn judged(&self, kto: &KtoSettings, labels: &[f32], sides: &[AnswerLogProbs]) -> Result<Slopes> {
        let (mut answers, mut mismatched, mut at) = (Vec::new(), Vec::new(), Vec::new());
        for (d, (side, &label)) in sides.iter().zip(labels).enumerate() {
            let ratio = side.logp - side.reference;
            if label < 0.0 {
                mismatched.push(ratio);
                continue;
            }
            at.push(d);
            answers.push(JudgedAnswer {
                ratio,
                desirable: label > 0.0,
            });
        }
        let KtoTerms { loss, slopes, kl } = unpaired::evaluate(kto, &answers, &mismatched);
        let mut out = vec![0.0; sides.len()];
        at.iter().zip(slopes).for_each(|(&d, slope)| out[d] = slope);
        let mut means = Vec::new();
        for (desirable, reward, logp) in [
            (true, "rewards/chosen", "logps/chosen"),
            (false, "rewards/rejected", "logps/rejected"),
        ] {
            let of: Vec<usize> = (0..answers.len())
                .filter(|&i| answers[i].desirable == desirable)
                .collect();
            let count = of.len() as f64;
            if of.is_empty() {
                continue;
            }
            let rewards = of.iter().map(|&i| kto.beta * answers[i].ratio).sum::<f64>();
            self.means.add(reward, rewards, count);
            self.means.add(logp, of.iter().map(|&i| sides[at[i]].logp).sum(), count);
            means.push(rewards / count);
        }
        let count = answers.len() as f64;
        if let [chosen, rejected] = means[..] {
            self.means.add("rewards/margins", (chosen - rejected) * count, count);
        }
        // Correct: a desirable answer became more likely than with the reference, or an undesirable one less likely.
        let correct = answers.iter().filter(|a| (a.ratio > kl) == a.desirable).count() as f64;
        self.means.add("rewards/accuracies", correct, count);
        self.means.add("kl", kl * count, count);
        Ok(Slopes {
            loss,
            correct,
            answers: out,
            texts: vec![0.0; sides.len()],
        })
    }
}

struct Slopes {
    /// Sum over the units.
    loss: f64,
    correct: f64,
    /// `[documents]`: with respect to the answers' sums.
    answers: Vec<f64>,
    /// `[documents]`: with respect to each trained token.
    texts: Vec<f64>,
}

impl Objective for PreferenceObjective {
    fn evaluate(
        &self,
        h: &Tensor,
        head: &Head,
        batch: &Batch,
        need: ObjectiveNeeds,
        step_stats: &StepStats,
    ) -> Result<LossGradients> {
        let log_probs = head.log_probs(h, &batch.targets)?;
        let answers = self.algorithm.answers(batch)?;
        let slopes = self.slopes(batch, &answers, &log_probs)?;
        step_stats.add(StepSums {
            loss: slopes.loss,
            correct: slopes.correct,
            ..StepSums::default()
        });
        if !need.dh && !need.dw {
            return Ok(LossGradients::default());
        }
        let ld_alpha = self.algorithm.ld_alpha();
        let mut along = vec![0f32; batch.len()];
        for ((answer, slope), text) in answers.iter().zip(&slopes.answers).zip(&slopes.texts) {
            for n in answer.document.clone() {
                let of_answer = if answer.targets.contains(&n) {
                    slope * answer.weight(n, ld_alpha)
                } else {
                    0.0
                };
                along[n] = (of_answer + text) as f32;
            }
        }
        gradients(h, head, &batch.targets, &along, need)
    }

    fn reads_whole_documents(&self) -> bool {
        true
    }

    /// Number of units: pairs, or judged answers.
    fn weight(&self, batch: &Batch) -> usize {
        match &self.algorithm {
            PreferenceAlgorithm::Pairs { .. } => batch.documents.len().saturating_sub(1) / 2,
            PreferenceAlgorithm::Judged(_) => batch
                .columns
                .document(LABEL)
                .map_or(0, |labels| labels.iter().filter(|l| **l >= 0.0).count()),
        }
    }

    fn means(&self) -> Option<&NamedMeans> {
        Some(&self.means)
    }

    fn metrics(&self) -> Vec<(&'static str, f64)> {
        self.means.take()
    }
}
