//! Rank allocation of AdaLoRA adapters (Zhang et al. 2023, arXiv 2303.10512, sections 3.2 and 3.3): after each step
//! every singular value with its two vectors gets a score, and the model as a whole keeps the best ones within a budget
//! that shrinks with every allocation; also the orthogonality regularization. Arithmetic and moments as in PEFT.
//!
//! Letters: I input features, O output features, R rank.

use super::adalora::Adalora;
use super::adapter::Param;
use super::small;
use crate::base::{Error, Result};
use crate::ops::{linear, update};
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Names as in PEFT.
#[derive(Debug, Clone, PartialEq)]
pub struct RankSchedule {
    /// Final mean rank; if it equals the rank of the adapters, ranks never shrink.
    pub target_r: usize,
    /// Steps before the first pruning.
    pub tinit: u64,
    /// Steps after the last pruning.
    pub tfinal: u64,
    /// Steps between two prunings.
    pub delta_t: u64,
    /// Decay of the average of the sensitivity.
    pub beta1: f64,
    /// Decay of the average of the uncertainty.
    pub beta2: f64,
    /// Weight of the orthogonality regularization.
    pub orth_reg_weight: f64,
    /// Steps of the run.
    pub total_steps: u64,
}

/// Smoothed importance of each element of a part, and its uncertainty.
#[derive(Debug, Clone, PartialEq)]
struct Moments {
    importance: Vec<f32>,
    uncertainty: Vec<f32>,
}

/// The three parts of an AdaLoRA adapter.
struct Triplet {
    module: String,
    a: Param,
    b: Param,
    e: Param,
}

/// Gradients of a step by part name.
pub type StepGradients<'a> = dyn Fn(&str) -> Option<Tensor> + 'a;

/// Suffix of the names of the flags in a saved state.
const KEPT: &str = "#kept";

/// Scores the singular values of all AdaLoRA adapters of a model, and prunes the lowest ones.
pub struct RankAllocator {
    /// When and how far ranks shrink.
    pub schedule: RankSchedule,
    triplets: Vec<Triplet>,
    moments: BTreeMap<Arc<str>, Moments>,
    /// By module: the singular values that the last allocation kept.
    kept: BTreeMap<String, Vec<bool>>,
}

impl RankAllocator {
    /// The allocator for these adapters, by module name.
    pub fn new<'a>(adapters: impl Iterator<Item = (&'a String, &'a Adalora)>, schedule: RankSchedule) -> Self {
        let triplet = |(module, k): (&String, &Adalora)| Triplet {
            module: module.clone(),
            a: k.a.clone(),
            b: k.b.clone(),
            e: k.e.clone(),
        };
        Self {
            schedule,
            triplets: adapters.map(triplet).collect(),
            moments: BTreeMap::new(),
            kept: BTreeMap::new(),
        }
    }

    /// Sum of the initial ranks.
    fn first_budget(&self) -> usize {
        self.triplets.iter().map(|t| t.e.tensor.elem_count()).sum()
    }

    fn target_budget(&self) -> usize {
        self.schedule.target_r * self.triplets.len()
    }

    fn prunes(&self) -> bool {
        self.target_budget() < self.first_budget()
    }

    /// Number of ranks to keep after `step` (from 1), and whether a new allocation is due.
    pub fn budget(&self, step: u64) -> (usize, bool) {
        let s = &self.schedule;
        let (first, target) = (self.first_budget(), self.target_budget());
        let end = s.total_steps.saturating_sub(s.tfinal);
        if step <= s.tinit || !self.prunes() {
            (first, false)
        } else if step > end {
            (target, true)
        } else {
            let left = 1.0 - (step - s.tinit) as f64 / (end - s.tinit) as f64;
            let budget = (first - target) as f64 * left.powi(3) + target as f64;
            (budget as usize, step.is_multiple_of(s.delta_t))
        }
    }

    /// Adds the gradient of weight · mean ‖A·Aᵀ - 1‖, ‖Bᵀ·B - 1‖ (Frobenius) over all A `[R, I]` and B `[O, R]` to
    /// `gradients`, which are f32 and updated in place.
    ///
    /// # Errors
    /// A gradient of another shape (`Shape`); not enough memory on the device.
    pub fn regularize(&self, gradients: &StepGradients) -> Result<()> {
        let weight = self.schedule.orth_reg_weight;
        if weight == 0.0 {
            return Ok(());
        }
        let each = weight / (2 * self.triplets.len()).max(1) as f64;
        for t in self.triplets.iter().filter(|t| t.e.tensor.elem_count() > 0) {
            let (a, b) = (&t.a.tensor, &t.b.tensor);
            let (of_a, far_a) = away(&linear::forward(a, a, None)?)?;
            let (of_b, far_b) = away(&linear::grad_weight(b, b, DType::F32)?)?;
            for (part, change, far) in [
                (&t.a, small::product(&of_a, a)?, far_a),
                (&t.b, small::product(b, &of_b)?, far_b),
            ] {
                if let Some(gradient) = gradients(&part.name)
                    && far > 0.0
                {
                    update::scale_assign(&change, (2.0 * each / far) as f32)?;
                    update::add_assign(&gradient, &change)?;
                }
            }
        }
        Ok(())
    }

    /// Call after the update of `step`: computes scores from the new weights and from `gradients` times `coefficient`
    /// (the clipping factor), and sets the singular values that are pruned to zero.
    ///
    /// # Errors
    /// A gradient or a weight of another type (`Shape`).
    pub fn after(&mut self, step: u64, gradients: &StepGradients, coefficient: f32) -> Result<()> {
        if !self.prunes() {
            return Ok(());
        }
        let end = self.schedule.total_steps.saturating_sub(self.schedule.tfinal);
        // In f16 the update of the last allocation may have been skipped: then its scores are still there, and it is made now.
        if step > end && self.moments.is_empty() {
            return self.mask();
        }
        if step < end {
            self.score(gradients, coefficient)?;
        }
        let (budget, due) = self.budget(step);
        if due || step == end {
            self.allocate(budget)?;
        }
        if step >= end {
            self.moments.clear();
        }
        Ok(())
    }

    fn score(&mut self, gradients: &StepGradients, coefficient: f32) -> Result<()> {
        let (beta1, beta2) = (self.schedule.beta1, self.schedule.beta2);
        let (keep1, new1) = (beta1 as f32, (1.0 - beta1) as f32);
        let (keep2, new2) = (beta2 as f32, (1.0 - beta2) as f32);
        for part in self.triplets.iter().flat_map(|t| [&t.a, &t.b, &t.e]) {
            let Some(gradient) = gradients(&part.name) else {
                continue;
            };
            let (weight, gradient) = (update::to_f32_vec(&part.tensor)?, update::to_f32_vec(&gradient)?);
            let n = weight.len();
            let m = self.moments.entry(part.name.clone()).or_insert_with(|| Moments {
                importance: vec![0.0; n],
                uncertainty: vec![0.0; n],
            });
            for (i, (w, g)) in weight.iter().zip(&gradient).enumerate() {
                let now = (w * (g * coefficient)).abs();
                m.importance[i] = keep1 * m.importance[i] + new1 * now;
                m.uncertainty[i] = keep2 * m.uncertainty[i] + new2 * (now - m.importance[i]).abs();
            }
        }
        Ok(())
    }

    /// Scores of the R singular values of an adapter: score of the value plus mean scores of its two vectors.
    fn scores(&self, t: &Triplet) -> Vec<f32> {
        let r = t.e.tensor.elem_count();
        let of = |part: &Param, i: usize| {
            let found = self.moments.get(&part.name);
            found.map_or(0.0, |m| m.importance[i] * m.uncertainty[i])
        };
        let (inputs, outputs) = (t.a.tensor.elem_count() / r.max(1), t.b.tensor.elem_count() / r.max(1));
        let mean = |n: usize, at: &dyn Fn(usize) -> f32| {
            ((0..n).map(|i| f64::from(at(i))).sum::<f64>() / n.max(1) as f64) as f32
        };
        let one = |k: usize| {
            let a = mean(inputs, &|i| of(&t.a, k * inputs + i));
            let b = mean(outputs, &|o| of(&t.b, o * r + k));
            of(&t.e, k) + (a + b)
        };
        (0..r).map(one).collect()
    }

    fn allocate(&mut self, budget: usize) -> Result<()> {
        let scores: Vec<Vec<f32>> = self.triplets.iter().map(|t| self.scores(t)).collect();
        let mut sorted: Vec<f32> = scores.iter().flatten().copied().collect();
        let drop = sorted.len().saturating_sub(budget);
        if drop == 0 {
            return Ok(());
        }
        sorted.sort_by(f32::total_cmp);
        let threshold = sorted[drop - 1];
        for (t, scores) in self.triplets.iter().zip(scores) {
            let kept = scores.iter().map(|s| *s > threshold).collect();
            self.kept.insert(t.module.clone(), kept);
        }
        self.mask()
    }

    /// Sets the pruned singular values to zero.
    fn mask(&self) -> Result<()> {
        for t in &self.triplets {
            let Some(kept) = self.kept.get(&t.module) else { continue };
            let values = update::to_f32_vec(&t.e.tensor)?;
            let masked = values.iter().zip(kept).map(|(x, k)| if *k { *x } else { 0.0 });
            small::fill(&t.e.tensor, &masked.collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// State for a resumed run, by name.
    pub fn saved(&self) -> BTreeMap<String, Vec<f32>> {
        let flag = |k: &bool| if *k { 1.0 } else { 0.0 };
        let kept = self
            .kept
            .iter()
            .map(|(m, k)| (format!("{m}{KEPT}"), k.iter().map(flag).collect()));
        let moments = self.moments.iter().flat_map(|(name, m)| {
            [
                (format!("{name}#importance"), m.importance.clone()),
                (format!("{name}#uncertainty"), m.uncertainty.clone()),
            ]
        });
        kept.chain(moments).collect()
    }

    /// Restores one entry of `saved`.
    ///
    /// # Errors
    /// A name or a size that does not belong to these adapters.
    pub fn restore(&mut self, name: &str, values: Vec<f32>) -> Result<()> {
        let wrong = || Error::shape("the state does not belong to these AdaLoRA ranks").at(name);
        let (of, what) = name.rsplit_once('#').ok_or_else(wrong)?;
        if what == "kept" {
            let triplet = self.triplets.iter().find(|t| t.module == of).ok_or_else(wrong)?;
            if triplet.e.tensor.elem_count() != values.len() {
                return Err(wrong());
            }
            let kept = values.iter().map(|v| *v != 0.0).collect();
            self.kept.insert(of.to_string(), kept);
            return Ok(());
        }
        let mut parts = self.triplets.iter().flat_map(|t| [&t.a, &t.b, &t.e]);
        let part = parts.find(|p| &*p.name == of).ok_or_else(wrong)?;
        if part.tensor.elem_count() != values.len() {
            return Err(wrong());
        }
        let m = self.moments.entry(part.name.clone()).or_insert_with(|| Moments {
            importance: vec![0.0; values.len()],
            uncertainty: vec![0.0; values.len()],
        });
        match what {
            "importance" => m.importance = values,
            "uncertainty" => m.uncertainty = values,
            _ => return Err(wrong()),
        }
        Ok(())
    }
}

/// Reads from a saved state of AdaLoRA, for each module, which singular values are kept. Empty before ranks are
/// allocated for the first time.
pub fn kept(state: &BTreeMap<String, Vec<f32>>) -> BTreeMap<String, Vec<bool>> {
    let flags = |(name, values): (&String, &Vec<f32>)| {
        let module = name.strip_suffix(KEPT)?;
        Some((module.to_string(), values.iter().map(|x| *x != 0.0).collect()))
    };
    state.iter().filter_map(flags).collect()
}

/// M minus the identity, `[R, R]`, and its Frobenius norm.
fn away(m: &Tensor) -> Result<(Tensor, f64)> {
    let r = m.dim(0)?;
    let mut values = update::to_f32_vec(m)?;
    values.iter_mut().step_by(r + 1).for_each(|x| *x -= 1.0);
    let far = values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    Ok((Tensor::from_vec(values, (r, r), m.device())?, far))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peft::small::DropoutMask;
    use candle_core::Device;

    /// The loss scale of f16 skips the update of the step in which the last allocation is due.
    #[test]
    fn the_last_allocation_is_made_up_for_after_a_skipped_step() {
        let adapter = |module: &str, scale: f32| {
            let full = |n: usize, shape: (usize, usize)| {
                let values: Vec<f32> = (0..n).map(|i| scale * (1 + i) as f32).collect();
                Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
            };
            let (a, b, e) = (full(6, (2, 3)), full(8, (4, 2)), full(2, (2, 1)));
            (
                module.to_string(),
                Adalora::new(module, a, b, e, 1.0, DropoutMask::default()),
            )
        };
        let adapters = BTreeMap::from([adapter("one", 0.1), adapter("two", 0.3)]);
        let schedule = RankSchedule {
            target_r: 1,
            tinit: 1,
            tfinal: 2,
            delta_t: 100,
            beta1: 0.85,
            beta2: 0.85,
            orth_reg_weight: 0.0,
            total_steps: 6,
        };
        let mut ranks = RankAllocator::new(adapters.iter(), schedule);
        let parts: Vec<Param> = adapters
            .values()
            .flat_map(|k| [k.a.clone(), k.b.clone(), k.e.clone()])
            .collect();
        let gradients = |name: &str| parts.iter().find(|p| &*p.name == name).map(|p| p.tensor.clone());
        for step in 1..4 {
            ranks.after(step, &gradients, 1.0).unwrap();
        }
        // Step 4 was skipped.
        assert!(kept(&ranks.saved()).is_empty());
        ranks.after(5, &gradients, 1.0).unwrap();
        let left = kept(&ranks.saved());
        assert_eq!(left.values().flatten().filter(|kept| **kept).count(), 2);
        ranks.after(6, &gradients, 1.0).unwrap();
        assert_eq!(kept(&ranks.saved()), left);
    }
}
