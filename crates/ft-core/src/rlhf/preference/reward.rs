//! The objective of a reward model: a linear score head on the hidden state of the last token, trained so that the
//! chosen text of a pair scores higher (Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155, equation 1;
//! margins: Touvron et al. 2023, arXiv 2307.09288, section 3.2.2; centering: Eisenstein et al. 2023,
//! arXiv 2312.09244, section 2).
//!
//! The head is that of transformers' sequence classification: `score.weight` `[1, D]`, no bias, read at the last token
//! that is not padding.

use super::columns::MARGIN;
use super::losses::{log_sigmoid, sigmoid};
use crate::base::means::NamedMeans;
use crate::base::rng::{Rng, Stream};
use crate::base::{Error, Result};
use crate::data::Batch;
use crate::model::{Head, LossGradients, Objective, ObjectiveNeeds, Param, ParamGradient};
use crate::ops::step_stats::{StepStats, StepSums};
use crate::ops::update;
use candle_core::{DType, Device, Tensor};

/// Name of the score head in a run's checkpoints.
pub const SCORE: &str = "objective.score.weight";

/// The reward objective.
pub struct RewardObjective {
    /// f32 `[1, D]`
    score: Param,
    /// The padding id in transformers: trailing padding tokens are skipped, as there.
    pad: Option<u32>,
    center: f64,
    means: NamedMeans,
}

/// Scores of documents, `[documents]`. `h` `[N, D]`: hidden states after the final norm; `score` `[1, D]`.
///
/// # Errors
/// A document without tokens (`Argument`); hidden states of fewer tokens than the batch has.
pub fn scores(h: &Tensor, batch: &Batch, pad: Option<u32>, score: &Tensor) -> Result<Vec<f64>> {
    let (_, rows) = last_states(h, batch, pad)?;
    let weight = update::to_f32_vec(score)?;
    Ok(rows
        .chunks_exact(weight.len().max(1))
        .map(|row| dot(row, &weight))
        .collect())
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
}

/// The position of each document's last token that is not padding, and the hidden states there, `[documents · D]`.
fn last_states(h: &Tensor, batch: &Batch, pad: Option<u32>) -> Result<(Tensor, Vec<f32>)> {
    let mut positions = Vec::with_capacity(batch.documents.len());
    for document in batch.documents.windows(2) {
        let (start, end) = (document[0], document[1]);
        if start == end {
            return Err(Error::argument("a document without tokens has no score"));
        }
        let last = (start..end).rev().find(|n| Some(batch.ids[*n]) != pad);
        positions.push(last.unwrap_or(start) as u32);
    }
    let n = positions.len();
    let positions = Tensor::from_vec(positions, n, h.device())?;
    let rows = update::to_f32_vec(&h.index_select(&positions, 0)?)?;
    Ok((positions, rows))
}

impl RewardObjective {
    /// A new head of width D, drawn from a normal distribution with standard deviation `std`. `center` is TRL's
    /// `center_rewards_coefficient`.
    ///
    /// # Errors
    /// Not enough memory on the device.
    pub fn new(width: usize, std: f64, pad: Option<u32>, center: f64, seed: u64, device: &Device) -> Result<Self> {
        let rng = Rng::new(seed, Stream::Init, &[u64::from_le_bytes(*b"score   ")]);
        let values: Vec<f32> = (0..width as u64)
            .map(|i| (f64::from(rng.normal(i)) * std) as f32)
            .collect();
        Ok(Self::with_head(
            Tensor::from_vec(values, (1, width), device)?,
            pad,
            center,
        ))
    }

    /// Uses this head, f32 `[1, D]`.
    pub fn with_head(score: Tensor, pad: Option<u32>, center: f64) -> Self {
        Self {
            score: Param {
                name: SCORE.into(),
                tensor: score,
            },
            pad,
            center,
            means: NamedMeans::default(),
        }
    }
}

impl Objective for RewardObjective {
    fn evaluate(
        &self,
        h: &Tensor,
        _: &Head,
        batch: &Batch,
        need: ObjectiveNeeds,
        step_stats: &StepStats,
    ) -> Result<LossGradients> {
        let (n, d) = h.dims2()?;
        let (positions, rows) = last_states(h, batch, self.pad)?;
        let weight = update::to_f32_vec(&self.score.tensor)?;
        let scores: Vec<f64> = rows.chunks_exact(d).map(|row| dot(row, &weight)).collect();
        let margins = batch.columns.document(MARGIN)?;
        let (mut loss, mut slopes) = (0.0, Vec::with_capacity(scores.len()));
        let (mut correct, mut differences) = (0.0, 0.0);
        for (pair, margin) in scores.chunks_exact(2).zip(margins.chunks(2)) {
            let (chosen, rejected) = (pair[0], pair[1]);
            let (x, sum) = (chosen - rejected - f64::from(margin[0]), chosen + rejected);
            loss += self.center * sum * sum - log_sigmoid(x);
            let (slope, pull) = (-sigmoid(-x), 2.0 * self.center * sum);
            slopes.extend([slope + pull, pull - slope]);
            correct += f64::from(u8::from(chosen > rejected));
            differences += chosen - rejected;
        }
        step_stats.add(StepSums {
            loss,
            correct,
            ..StepSums::default()
        });
        let pairs = (scores.len() / 2) as f64;
        let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
        scores
            .iter()
            .for_each(|s| (least, most) = (least.min(*s), most.max(*s)));
        for (name, value) in [
            ("min_reward", least * pairs),
            ("mean_reward", scores.iter().sum::<f64>() / 2.0),
            ("max_reward", most * pairs),
            ("accuracy", correct),
            ("margin", differences),
        ] {
            self.means.add(name, value, pairs);
        }

        let slopes: Vec<f32> = slopes.iter().map(|s| (s * need.scale) as f32).collect();
        let mut gradient = vec![0f32; d];
        for (row, slope) in rows.chunks_exact(d).zip(&slopes) {
            gradient.iter_mut().zip(row).for_each(|(g, x)| *g += slope * x);
        }
        let dh = if need.dh {
            let of_rows: Vec<f32> = slopes.iter().flat_map(|s| weight.iter().map(move |w| s * w)).collect();
            let of_rows = Tensor::from_vec(of_rows, (slopes.len(), d), h.device())?;
            let zeros = update::zeros((n, d), DType::F32, h.device())?;
            Some(zeros.index_add(&positions, &of_rows, 0)?.to_dtype(h.dtype())?)
        } else {
            None
        };
        let gradient = Tensor::from_vec(gradient, (1, d), h.device())?;
        Ok(LossGradients {
            dh,
            dw: None,
            objective_params: vec![ParamGradient {
                param: self.score.clone(),
                gradient,
            }],
        })
    }

    fn reads_whole_documents(&self) -> bool {
        true
    }

    /// Number of pairs.
    fn weight(&self, batch: &Batch) -> usize {
        batch.documents.len().saturating_sub(1) / 2
    }

    fn params(&self) -> Vec<Param> {
        vec![self.score.clone()]
    }

    fn means(&self) -> Option<&NamedMeans> {
        Some(&self.means)
    }

    fn metrics(&self) -> Vec<(&'static str, f64)> {
        self.means.take()
    }
}
