//! The library calls of the RL parity tests.

use crate::wire::loss_and_grads;
use candle_core::Device;
use ft::data::Batch;
use ft::model::Network;
use ft::ops::update;
use ft::recipe::{self, Dtype};
use ft::setup::ModelDir;
use ft::setup::vocabulary::TextChanges;
use ft::train::stage::advantages::{self, AdvantageComputer};
use ft::train::stage::rollout_buffer::{self, Trajectory};
use std::collections::BTreeMap;
use std::path::Path;

/// A rollout of a golden; values that it does not have are empty.
pub struct Rollout {
    /// Lines of a recipe.
    pub recipe: String,
    pub prompts: Vec<Vec<u32>>,
    pub answers: Vec<Vec<u32>>,
    pub finished: Vec<bool>,
    /// By answer, then by reward; NaN means no score.
    pub rewards: Vec<Vec<f64>>,
    /// Log-probabilities of the tokens: at the time of the rollout, of the reference, and at sampling.
    pub old: Vec<Vec<f64>>,
    pub reference: Vec<Vec<f64>>,
    pub sampling: Vec<Vec<f64>>,
    pub values: Vec<Vec<f64>>,
    pub value_head: Option<(Vec<f64>, f64)>,
}

pub struct Lessons {
    pub exact: Vec<Vec<f64>>,
    pub advantages: Vec<Vec<f64>>,
    pub returns: Vec<Vec<f64>>,
    pub ratios: Vec<Vec<f64>>,
    pub loss: f64,
    pub metrics: BTreeMap<&'static str, f64>,
    pub gradients: BTreeMap<String, Vec<f64>>,
}

fn singles(rows: &[Vec<f64>], i: usize) -> Vec<f32> {
    rows.get(i)
        .map_or_else(Vec::new, |row| row.iter().map(|x| *x as f32).collect())
}

fn doubles<'a>(rows: impl Iterator<Item = &'a Vec<f32>>) -> Vec<Vec<f64>> {
    rows.map(|row| row.iter().map(|x| f64::from(*x)).collect()).collect()
}

/// Runs the stages `grpo` and `ppo` on a rollout with this model. First it computes the exact log-probabilities; then
/// the golden's log-probabilities, which contain noise, replace them.
pub fn rl(dir: &Path, rollout: &Rollout) -> Lessons {
    let text = format!(
        "[model]\npath = \"unused\"\n[data]\ntrain = \"unused.jsonl\"\n{}",
        rollout.recipe
    );
    let recipe = recipe::parse(&text, "parity", &[])
        .unwrap_or_else(|e| panic!("{e}\n{text}"))
        .recipe;
    let model = ModelDir::open(dir.to_str().unwrap(), "main", &TextChanges::default()).unwrap();
    let mut network: Network = model.infer(None, Some(Dtype::F32), &Device::Cpu).unwrap();
    let objective = advantages::objective(&recipe, model.spec.hidden, &Device::Cpu).unwrap();
    network.objective_params = objective.params();
    if let Some((weight, bias)) = &rollout.value_head {
        for (param, numbers) in network.objective_params.iter().zip([weight.clone(), vec![*bias]]) {
            update::with_slice_mut(&param.tensor, |slot| {
                slot.iter_mut().zip(&numbers).for_each(|(s, x)| *s = *x as f32);
            })
            .unwrap();
        }
    }
    let mut kept: Vec<Trajectory> = rollout
        .prompts
        .iter()
        .zip(&rollout.answers)
        .map(|(prompt, answer)| Trajectory {
            ids: [&prompt[..], answer].concat(),
            prompt: prompt.len(),
            factor: 1.0,
            counts: 1.0,
            ..Trajectory::default()
        })
        .collect();
    let mut advantages = AdvantageComputer::new(&recipe);
    advantages.read(&mut kept, &network, None).unwrap();
    let exact = doubles(kept.iter().map(|k| &k.old));
    // GRPO's correction and RLOO's KL use the exact log-probabilities; the noise is added later.
    let ppo = rollout.value_head.is_some();
    for (i, k) in kept.iter_mut().enumerate() {
        k.reference = singles(&rollout.reference, i);
        if ppo {
            (k.old, k.values) = (singles(&rollout.old, i), singles(&rollout.values, i));
        }
    }
    let weights = &recipe.rl.reward_weights;
    let total = |row: &Vec<f64>| {
        let known = row.iter().zip(weights).filter(|(r, _)| !r.is_nan());
        known.map(|(r, w)| r * w).sum::<f64>()
    };
    let totals: Vec<f64> = rollout.rewards.iter().map(total).collect();
    let sampling: Vec<Vec<f32>> = (0..kept.len()).map(|i| singles(&rollout.sampling, i)).collect();
    let sampling: Vec<&[f32]> = sampling.iter().map(Vec::as_slice).collect();
    advantages.teach(&mut kept, &totals, &rollout.finished, &sampling);
    advantages.weigh(&mut kept);
    for (i, k) in kept.iter_mut().enumerate() {
        k.old = singles(&rollout.old, i);
    }

    let batch: Batch = rollout_buffer::batch(&kept.iter().collect::<Vec<_>>(), advantages.is_ppo());
    let (loss, gradients) = loss_and_grads(&network, &*objective, &[batch], 0, None);
    let mut metrics: BTreeMap<_, _> = advantages.metrics.iter().copied().collect();
    metrics.extend(objective.metrics());
    Lessons {
        exact,
        advantages: doubles(kept.iter().map(|k| &k.advantages)),
        returns: doubles(kept.iter().map(|k| &k.returns)),
        ratios: doubles(kept.iter().map(|k| &k.ratios)),
        loss,
        metrics,
        gradients,
    }
}
