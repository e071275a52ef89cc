//! `ft tune-lr`: a learning-rate range test. A run whose rate grows by the same factor in every step, in a directory that is
//! removed, and a suggestion from its losses.
//!
//! Smith 2017, "Cyclical Learning Rates for Training Neural Networks", arXiv 1506.01186, section 3.3. The rule is that of
//! fastai's `minimum`: a tenth of the rate at which the smoothed loss was lowest.

use crate::base::{Error, ErrorKind, Result, files};
use crate::commands::bench::{first_steps, folder};
use crate::history::{self, Curve, Curves};
use crate::recipe;
use crate::train::{self, RateSweep, TrainOptions};
use serde_json::{Value, json};
use std::path::Path;

/// Part of the rate at the lowest loss that is suggested.
const BELOW: f64 = 0.1;
/// Steps in which a suggestion can be found.
pub const LEAST_STEPS: u64 = 8;

/// The result of a range test.
pub struct RangeTestResult {
    /// The sweep.
    pub sweep: RateSweep,
    /// The metrics of the steps that were made.
    pub curves: Curves,
    /// The run ended with a loss or gradient that was not finite.
    pub diverged: bool,
}

/// Runs a recipe for the steps of `sweep`.
///
/// # Errors
/// Those of the run, except a loss or gradient that is not finite: it ends the test.
pub fn measure(file: &Path, overrides: &[String], sweep: RateSweep) -> Result<RangeTestResult> {
    let first = recipe::load(file, overrides)?;
    let place = folder(&first);
    let there = place.exists();
    let run = place.join(format!("tune-lr-{}", std::process::id()));
    let loaded = first_steps(file, overrides, &first, sweep.steps, &run)?;
    let options = TrainOptions {
        only_steps: true,
        sweep: Some(sweep),
        ..TrainOptions::default()
    };
    let trained = train::train(&loaded, &options);
    let curves = Curves::read(&run, usize::MAX);
    // Nothing stays of the run, not even the folder above it.
    let removed = files::remove_dir_all(&run);
    if !there {
        // Another process may have a run there too.
        let _ = files::remove_empty_dir(&place);
    }
    let diverged = match trained {
        Ok(_) => false,
        Err(e) if e.kind() == ErrorKind::NonFinite => true,
        Err(e) => return Err(e),
    };
    removed?;
    Ok(RangeTestResult {
        sweep,
        curves: curves?,
        diverged,
    })
}

/// The step with the lowest value after the start, of the smoothed curve. `None`: there are too few steps, or the loss never fell.
fn lowest(smoothed: &Curve) -> Option<(u64, f64)> {
    let first = smoothed.points.first()?.1;
    let of = smoothed.points.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1))?;
    (smoothed.points.len() as u64 >= LEAST_STEPS && of.1 < first).then_some(of)
}

impl RangeTestResult {
    fn loss(&self) -> Curve {
        self.curves.get("loss").cloned().unwrap_or_default()
    }

    /// The step of the lowest smoothed loss, and the rate that follows from it.
    pub fn suggestion(&self) -> Option<(u64, f64)> {
        let (step, _) = lowest(&self.loss().smoothed())?;
        Some((step, BELOW * self.sweep.rate(step)))
    }

    /// The meaning of the suggestion.
    pub fn rule(&self) -> String {
        match self.suggestion() {
            Some((step, _)) => {
                let end = self.loss().points.last().map_or(0, |(step, _)| *step);
                let high = if step >= end && !self.diverged {
                    "; the loss still fell at the end: try a higher `--to`"
                } else {
                    ""
                };
                format!(
                    "a tenth of the rate at which the smoothed loss was lowest (step {step}, {:.2e}){high}",
                    self.sweep.rate(step)
                )
            }
            None => format!(
                "no suggestion: the smoothed loss did not fall below its first value, or there are fewer than {LEAST_STEPS} steps; try a \
                 lower `--from`"
            ),
        }
    }

    /// All numbers.
    pub fn json(&self) -> Value {
        let loss = self.loss();
        let smoothed = loss.smoothed();
        let points = loss.points.iter().zip(&smoothed.points);
        let points = points.map(|((step, loss), (_, smoothed))| {
            json!({
                "step": step, "learning_rate": self.sweep.rate(*step), "loss": loss, "smoothed_loss": smoothed,
            })
        });
        json!({
            "format": "ft tune-lr 1", "from": self.sweep.from, "to": self.sweep.to, "steps": self.sweep.steps,
            "diverged": self.diverged, "suggestion": self.suggestion().map(|(_, rate)| rate), "rule": self.rule(),
            "points": points.collect::<Vec<_>>(),
        })
    }

    /// Plot and suggestion for a terminal of `width` columns.
    pub fn lines(&self, width: usize, colors: bool) -> Vec<String> {
        let loss = self.loss();
        let smoothed = loss.smoothed();
        let mut lines = history::plot(&[&loss, &smoothed], width, history::ROWS, colors);
        lines.push(format!(
            "loss and smoothed loss by step; the learning rate grows from {:.2e} to {:.2e} by the same factor in each of {} steps{}",
            self.sweep.from,
            self.sweep.to,
            self.sweep.steps,
            if self.diverged { ", and the loss diverged" } else { "" }
        ));
        if let Some((_, rate)) = self.suggestion() {
            lines.push(format!("suggestion: optimizer.learning_rate={rate:.2e}"));
        }
        lines.push(format!("rule: {}", self.rule()));
        lines
    }

    /// The picture, with loss and learning rate by step.
    pub fn svg(&self) -> String {
        history::svg("learning-rate range test", &self.curves, None)
    }
}

/// # Errors
/// The rates do not rise.
pub fn check(sweep: &RateSweep) -> Result<()> {
    if !(sweep.from > 0.0 && sweep.to > sweep.from && sweep.to.is_finite()) {
        return Err(Error::usage("the learning rates of the test must rise")
            .found(format!("--from {} --to {}", sweep.from, sweep.to))
            .expected("0 < from < to"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_loss_after_the_start_counts() {
        let curve = |values: &[f64]| Curve {
            points: (1..).zip(values.iter().copied()).collect(),
        };
        let bowl = [3.0, 2.9, 2.5, 2.0, 1.5, 1.4, 1.6, 4.0, 9.0];
        assert_eq!(lowest(&curve(&bowl)), Some((6, 1.4)));
        assert_eq!(lowest(&curve(&bowl[..6])), None, "too few steps");
        assert_eq!(lowest(&curve(&[1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7])), None);
        let sweep = RateSweep {
            from: 1e-6,
            to: 1.0,
            steps: 7,
        };
        assert!((sweep.rate(1) - 1e-6).abs() < 1e-18 && (sweep.rate(7) - 1.0).abs() < 1e-12);
        assert!((sweep.rate(4) / 1e-3 - 1.0).abs() < 1e-12);
        assert!(check(&sweep).is_ok() && check(&RateSweep { to: 1e-7, ..sweep }).is_err());
    }
}
