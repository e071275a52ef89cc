//! Learning-rate multipliers, equal to transformers' `get_constant_schedule_with_warmup`,
//! `get_linear_schedule_with_warmup`, `get_cosine_schedule_with_warmup` and `get_wsd_schedule`.

use super::config::{ScheduleConfig, ScheduleName};
use std::f64::consts::PI;

/// The multiplier of the learning rate at each step of a run.
#[derive(Debug, Clone, Copy)]
pub struct Schedule {
    name: ScheduleName,
    warmup: u64,
    decay: u64,
    total: u64,
    floor: f64,
}

impl Schedule {
    /// `total` is the number of optimizer steps of the run.
    pub fn new(recipe: &ScheduleConfig, total: u64) -> Self {
        let part = |ratio: f64| ratio * total as f64;
        // Rounded down: the first step of a warm-up has rate 0, and in a short run it could be the only one.
        // (0.29 * 100 is slightly below 29 in floating point.)
        let warmup = (part(recipe.warmup_ratio) + 1e-6).floor() as u64;
        Self {
            name: recipe.name,
            warmup: recipe.warmup_steps.map_or(warmup, |n| n as u64),
            decay: part(recipe.decay_ratio).ceil() as u64,
            total,
            floor: recipe.min_lr_ratio,
        }
    }

    /// Number of warm-up steps.
    pub fn warmup(&self) -> u64 {
        self.warmup
    }

    /// Multiplier of the learning rate at optimizer step `step`, counted from 1.
    pub fn multiplier(&self, step: u64) -> f64 {
        let (s, w, t) = (step.saturating_sub(1) as f64, self.warmup as f64, self.total as f64);
        let rising = s / w.max(1.0);
        match self.name {
            _ if s < w && self.name != ScheduleName::Wsd => rising,
            ScheduleName::Constant => 1.0,
            ScheduleName::Linear => ((t - s) / (t - w).max(1.0)).max(0.0),
            ScheduleName::Cosine => (0.5 * (1.0 + (PI * (s - w) / (t - w).max(1.0)).cos())).max(0.0),
            ScheduleName::Wsd => {
                let decay = self.decay as f64;
                let stable_end = (t - decay).max(w);
                let lift = |factor: f64| (factor * (1.0 - self.floor) + self.floor).max(0.0);
                if s < w {
                    lift(rising)
                } else if s < stable_end {
                    1.0
                } else if s < stable_end + decay {
                    lift(0.5 * (1.0 + (PI * (s - stable_end) / decay.max(1.0)).cos()))
                } else {
                    self.floor
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(name: ScheduleName, warmup: usize, total: u64) -> Schedule {
        let recipe = ScheduleConfig {
            name,
            warmup_ratio: 0.0,
            warmup_steps: Some(warmup),
            decay_ratio: 0.2,
            min_lr_ratio: 0.1,
        };
        Schedule::new(&recipe, total)
    }

    #[test]
    fn a_ratio_of_few_steps_is_no_warm_up() {
        let recipe = |warmup_ratio| ScheduleConfig {
            name: ScheduleName::Cosine,
            warmup_ratio,
            warmup_steps: None,
            decay_ratio: 0.1,
            min_lr_ratio: 0.0,
        };
        for (ratio, total, warmup) in [
            (0.03, 1, 0),
            (0.03, 33, 0),
            (0.03, 34, 1),
            (0.03, 75, 2),
            (0.29, 100, 29),
            (1.0, 4, 4),
        ] {
            assert_eq!(
                Schedule::new(&recipe(ratio), total).warmup(),
                warmup,
                "{ratio} of {total}"
            );
        }
        assert_eq!(Schedule::new(&recipe(0.03), 1).multiplier(1), 1.0);
    }

    #[test]
    fn ends_and_middles_are_those_of_the_definitions() {
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
        let c = schedule(ScheduleName::Cosine, 2, 10);
        close(c.multiplier(1), 0.0);
        close(c.multiplier(2), 0.5);
        close(c.multiplier(3), 1.0);
        close(c.multiplier(7), 0.5);
        let l = schedule(ScheduleName::Linear, 0, 10);
        close(l.multiplier(1), 1.0);
        close(l.multiplier(10), 0.1);
        let w = schedule(ScheduleName::Wsd, 2, 10);
        close(w.multiplier(1), 0.1);
        close(w.multiplier(8), 1.0);
        close(w.multiplier(10), 0.55);
        close(w.multiplier(12), 0.1);
        close(schedule(ScheduleName::Constant, 4, 10).multiplier(3), 0.5);
    }
}
