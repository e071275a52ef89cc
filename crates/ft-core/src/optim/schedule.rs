//! Learning-rate multipliers, equal to transformers' `get_constant_schedule_with_warmup`,
//! `get_linear_schedule_with_warmup`, `get_cosine_schedule_with_warmup`, `get_cosine_with_min_lr_schedule_with_warmup`,
//! `get_cosine_with_hard_restarts_schedule_with_warmup`, `get_polynomial_decay_schedule_with_warmup`,
//! `get_inverse_sqrt_schedule` and `get_wsd_schedule`.

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
    cycles: f64,
    power: f64,
}

/// Steps after which the rate of `inverse_sqrt` without warmup is divided by √2.
const TIMESCALE: f64 = 10_000.0;

impl Schedule {
    /// `total` is the number of optimizer steps of the run.
    pub fn new(config: &ScheduleConfig, total: u64) -> Self {
        let part = |ratio: f64| ratio * total as f64;
        // Rounded down: warmup starts at rate 0, so rounding up would only add a step without an update.
        // (0.29 * 100 is slightly below 29 in floating point.)
        let warmup = (part(config.warmup_ratio) + 1e-6).floor() as u64;
        Self {
            name: config.name,
            warmup: config.warmup_steps.map_or(warmup, |n| n as u64),
            // Rounded up. (0.07 * 100 is slightly above 7 in floating point.)
            decay: (part(config.decay_ratio) - 1e-6).ceil() as u64,
            total,
            floor: config.min_lr_ratio,
            cycles: config.num_cycles as f64,
            power: config.power,
        }
    }

    /// Number of warmup steps.
    pub fn warmup(&self) -> u64 {
        self.warmup
    }

    /// Multiplier of the learning rate at optimizer step `step`, counted from 1.
    pub fn multiplier(&self, step: u64) -> f64 {
        let (s, w, t) = (step.saturating_sub(1) as f64, self.warmup as f64, self.total as f64);
        let rising = s / w.max(1.0);
        let progress = (s - w) / (t - w).max(1.0);
        let lift = |factor: f64| (factor * (1.0 - self.floor) + self.floor).max(0.0);
        let cosine = |progress: f64| 0.5 * (1.0 + (PI * progress).cos());
        match self.name {
            _ if s < w && self.name != ScheduleName::Wsd => rising,
            ScheduleName::Constant => 1.0,
            ScheduleName::Linear => ((t - s) / (t - w).max(1.0)).max(0.0),
            ScheduleName::Cosine => lift(0.5 * (1.0 + (PI * (s - w) / (t - w).max(1.0)).cos())),
            ScheduleName::CosineWithRestarts if progress >= 1.0 => self.floor,
            ScheduleName::CosineWithRestarts => lift(cosine((self.cycles * progress).fract())),
            ScheduleName::Polynomial => lift((1.0 - progress).max(0.0).powf(self.power)),
            ScheduleName::InverseSqrt => {
                let timescale = if w > 0.0 { w } else { TIMESCALE };
                (timescale / (s - w + timescale)).sqrt()
            }
            ScheduleName::Wsd => {
                let decay = self.decay as f64;
                let stable_end = (t - decay).max(w);
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
        let config = ScheduleConfig {
            name,
            warmup_ratio: 0.0,
            warmup_steps: Some(warmup),
            decay_ratio: 0.2,
            min_lr_ratio: 0.1,
            num_cycles: 2,
            power: 2.0,
        };
        Schedule::new(&config, total)
    }

    #[test]
    fn a_ratio_of_few_steps_is_no_warm_up() {
        let config = |warmup_ratio| ScheduleConfig {
            name: ScheduleName::Cosine,
            warmup_ratio,
            warmup_steps: None,
            ..ScheduleConfig::default()
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
                Schedule::new(&config(ratio), total).warmup(),
                warmup,
                "{ratio} of {total}"
            );
        }
        assert_eq!(Schedule::new(&config(0.03), 1).multiplier(1), 1.0);
    }

    #[test]
    fn a_decay_is_rounded_up_but_not_because_of_floating_point() {
        for (ratio, total, decay) in [
            (0.07, 100, 7),
            (0.07, 101, 8),
            (0.2, 11, 3),
            (0.1, 30, 3),
            (0.0, 9, 0),
            (1.0, 9, 9),
        ] {
            let config = ScheduleConfig {
                name: ScheduleName::Wsd,
                decay_ratio: ratio,
                ..ScheduleConfig::default()
            };
            assert_eq!(Schedule::new(&config, total).decay, decay, "{ratio} of {total}");
        }
    }

    #[test]
    fn ends_and_middles_are_those_of_the_definitions() {
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
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

    /// Rates of transformers 5.23, divided by the highest one, with 2 steps of warmup in 10, a minimum of 0.1, 2 cycles
    /// and the power 2; two steps more than the run has.
    #[test]
    fn the_curves_are_those_of_transformers() {
        let curves: [(ScheduleName, [f64; 12]); 6] = [
            (
                ScheduleName::Constant,
                [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
            ),
            (
                ScheduleName::Linear,
                [0.0, 0.5, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0, 0.0],
            ),
            (
                ScheduleName::Wsd,
                [0.1, 0.55, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.55, 0.1, 0.1],
            ),
            (
                ScheduleName::Cosine,
                [
                    0.0,
                    0.5,
                    1.0,
                    0.9657457896300791,
                    0.8681980515339464,
                    0.7222075445642904,
                    0.55,
                    0.3777924554357096,
                    0.23180194846605365,
                    0.13425421036992097,
                    0.1,
                    0.1342542103699209,
                ],
            ),
            (
                ScheduleName::Polynomial,
                [
                    0.0, 0.5, 1.0, 0.7890625, 0.60625, 0.4515625, 0.325, 0.2265625, 0.15625, 0.1140625, 0.1, 0.1,
                ],
            ),
            (
                ScheduleName::InverseSqrt,
                [
                    0.0,
                    0.5,
                    1.0,
                    0.8164965809277261,
                    0.7071067811865475,
                    0.6324555320336759,
                    0.5773502691896258,
                    0.5345224838248488,
                    0.5,
                    0.47140452079103173,
                    0.4472135954999579,
                    0.4264014327112208,
                ],
            ),
        ];
        for (name, rates) in curves {
            let schedule = schedule(name, 2, 10);
            for (step, rate) in (1..).zip(rates) {
                let found = schedule.multiplier(step);
                assert!((found - rate).abs() < 1e-12, "{name:?}, step {step}: {found} {rate}");
            }
        }
        // That function has no minimum.
        let whole = [
            0.0,
            0.5,
            1.0,
            0.8535533905932737,
            0.5,
            0.14644660940672627,
            1.0,
            0.8535533905932737,
            0.5,
            0.14644660940672627,
            0.0,
            0.0,
        ];
        let restarts = Schedule {
            floor: 0.0,
            ..schedule(ScheduleName::CosineWithRestarts, 2, 10)
        };
        for (step, rate) in (1..).zip(whole) {
            assert!((restarts.multiplier(step) - rate).abs() < 1e-12, "step {step}");
        }
        let none = schedule(ScheduleName::InverseSqrt, 0, 10);
        assert!((none.multiplier(4) - 0.9998500337415648).abs() < 1e-12);
    }
}
