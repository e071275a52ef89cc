//! The numbers of `metrics.jsonl` as curves: one value for each step.

use super::each_own_line;
use crate::base::Result;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Values of one metric.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Curve {
    /// Step and value, in order; only finite values.
    pub points: Vec<(u64, f64)>,
}

impl Curve {
    /// The last value.
    pub fn last(&self) -> Option<f64> {
        self.points.last().map(|(_, y)| *y)
    }

    /// The lowest value after the start: an evaluation before the first step is no result of the run.
    pub fn lowest(&self) -> Option<f64> {
        let after = self.points.iter().filter(|(step, _)| *step > 0);
        after.map(|(_, y)| *y).reduce(f64::min)
    }

    /// Mean of the last `n` values.
    pub fn recent(&self, n: usize) -> Option<f64> {
        let last = &self.points[self.points.len().saturating_sub(n)..];
        (!last.is_empty()).then(|| last.iter().map(|(_, y)| y).sum::<f64>() / last.len() as f64)
    }

    /// Exponential moving average. Its memory is a twentieth of the curve, at least 2 values; the start is corrected for
    /// the missing values before it, as in Adam.
    pub fn smoothed(&self) -> Self {
        let decay = 1.0 - 1.0 / (self.points.len() as f64 / 20.0).max(2.0);
        let (mut mean, mut weight) = (0.0, 0.0);
        let smooth = |&(x, y): &(u64, f64)| {
            mean = decay * mean + (1.0 - decay) * y;
            weight = decay * weight + (1.0 - decay);
            (x, mean / weight)
        };
        Self {
            points: self.points.iter().map(smooth).collect(),
        }
    }

    /// At most `n` points, or 3: the lowest and the highest of each part of the curve, so that no peak is lost, and the last one.
    pub fn thinned(&self, n: usize) -> Self {
        if self.points.len() <= n.max(4) {
            return self.clone();
        }
        let each = self.points.len().div_ceil((n.saturating_sub(1) / 2).max(1));
        let mut points = Vec::new();
        for part in self.points.chunks(each) {
            let by = |a: &&(u64, f64), b: &&(u64, f64)| a.1.total_cmp(&b.1);
            let ends = [part.iter().min_by(by), part.iter().max_by(by)];
            let mut ends: Vec<(u64, f64)> = ends.into_iter().flatten().copied().collect();
            ends.sort_by_key(|(x, _)| *x);
            ends.dedup();
            points.extend(ends);
        }
        let last = self.points.last().filter(|last| points.last() != Some(last));
        points.extend(last.copied());
        Self { points }
    }
}

/// Most metrics of a run, most switches of the active block, and most bytes of their names: a run may be somebody else's.
const METRICS: usize = 1000;
const SWITCHES: usize = 1_000_000;
const NAME: usize = 1000;

/// All curves of a run.
#[derive(Debug, Clone, Default)]
pub struct Curves {
    by_name: BTreeMap<String, Curve>,
    /// Steps at which another block became active, and its name.
    pub switches: Vec<(u64, String)>,
    /// The last step.
    pub steps: u64,
    /// Bytes of the complete lines.
    pub bytes: u64,
}

impl Curves {
    /// Reads `metrics.jsonl` of a run, line by line; a line that is incomplete is left out. No file: no curves. A curve has
    /// at most `most` points (`thinned`), however long the run is.
    ///
    /// Errors: the file cannot be read.
    pub fn read(run: &Path, most: usize) -> Result<Self> {
        let path = run.join("metrics.jsonl");
        let mut curves = Self::default();
        if !path.exists() {
            return Ok(curves);
        }
        each_own_line(&path, |line, length| {
            if line.is_empty() {
                // Too long for a line of numbers; a reader that follows the file begins behind it.
                curves.bytes += length;
            } else {
                curves.line(line, most);
            }
            Ok(())
        })?;
        Ok(curves)
    }

    /// Adds a line of `metrics.jsonl`; `most` as in `read`.
    pub fn line(&mut self, line: &[u8], most: usize) {
        if line.ends_with(b"\n") {
            self.bytes += line.len() as u64;
        }
        if let Ok(line) = serde_json::from_slice(line) {
            self.add(&line, most);
        }
    }

    /// Adds the numbers of a line of `metrics.jsonl`. A curve with more than `most` points is thinned.
    fn add(&mut self, line: &Value, most: usize) {
        let Some((fields, step)) = line.as_object().zip(line["step"].as_u64()) else {
            return;
        };
        if let Some(block) = line["active_block"].as_str()
            && block.len() <= NAME
            && self.switches.len() < SWITCHES
            && self.switches.last().is_none_or(|(_, last)| last != block)
        {
            self.switches.push((step, block.to_string()));
        }
        self.steps = self.steps.max(step);
        for (name, value) in fields.iter().filter(|(name, _)| *name != "step") {
            if let Some(value) = value.as_f64().filter(|y| y.is_finite()) {
                let known = self.by_name.contains_key(name);
                if !known && (name.len() > NAME || self.by_name.len() >= METRICS) {
                    continue;
                }
                let curve = self.by_name.entry(name.clone()).or_default();
                curve.points.push((step, value));
                if curve.points.len() > most {
                    *curve = curve.thinned(most / 2);
                }
            }
        }
    }

    /// The curve of a metric, if it has a value.
    pub fn get(&self, name: &str) -> Option<&Curve> {
        self.by_name.get(name)
    }

    /// Names of the metrics.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(values: &[f64]) -> Curve {
        Curve {
            points: (1..).zip(values.iter().copied()).collect(),
        }
    }

    #[test]
    fn lines_become_curves() {
        let dir = tempfile::tempdir().unwrap();
        let text = "{\"step\":0,\"eval_loss\":3.0}\n{\"step\":1,\"loss\":2.0,\"active_block\":\"a\"}\n\
                    {\"step\":2,\"loss\":null,\"active_block\":\"a\"}\n{\"step\":3,\"loss\":1.0,\"active_block\":\"b\"}\n\
                    {\"step\":4,\"lo";
        std::fs::write(dir.path().join("metrics.jsonl"), text).unwrap();
        let curves = Curves::read(dir.path(), 100).unwrap();
        assert_eq!(curves.get("loss").unwrap().points, [(1, 2.0), (3, 1.0)]);
        assert_eq!(curves.get("eval_loss").unwrap().last(), Some(3.0));
        assert_eq!(curves.switches, [(1, "a".to_string()), (3, "b".to_string())]);
        assert_eq!(curves.names().collect::<Vec<_>>(), ["eval_loss", "loss"]);
        assert!(
            Curves::read(&dir.path().join("none"), 100)
                .unwrap()
                .get("loss")
                .is_none()
        );
    }

    #[test]
    fn smoothing_keeps_a_constant_and_thinning_keeps_peaks() {
        assert_eq!(curve(&[2.0; 50]).smoothed().points[0], (1, 2.0));
        let constant = curve(&[2.0; 50]).smoothed();
        assert!(constant.points.iter().all(|(_, y)| (y - 2.0).abs() < 1e-12));
        let mut values = vec![1.0; 10_000];
        (values[5000], values[7001]) = (9.0, -9.0);
        let thin = curve(&values).thinned(100);
        assert!(thin.points.len() <= 100);
        assert!(thin.points.contains(&(5001, 9.0)) && thin.points.contains(&(7002, -9.0)));
        let mut curves = Curves::default();
        (1..5000).for_each(|step| curves.add(&serde_json::json!({"step": step, "loss": step % 7}), 200));
        assert!((50..=200).contains(&curves.get("loss").unwrap().points.len()));
        assert_eq!(curve(&[1.0, 2.0, 6.0]).recent(2), Some(4.0));
        assert_eq!(curves.get("loss").unwrap().points.last(), Some(&(4999, 1.0)));
        for n in 3..40 {
            let waves: Vec<f64> = (0..500).map(|i| f64::from(i % 7)).collect();
            let thin = curve(&waves).thinned(n).points;
            assert!(thin.len() <= n.max(3), "{n}");
            assert_eq!(thin.last(), Some(&(500, waves[499])), "{n}");
        }
    }

    #[test]
    fn the_evaluation_before_the_first_step_is_not_the_best_one() {
        let of = |points: &[(u64, f64)]| {
            Curve {
                points: points.to_vec(),
            }
            .lowest()
        };
        assert_eq!(of(&[(0, 1.0), (10, 3.0), (20, 2.0)]), Some(2.0));
        assert_eq!(of(&[(0, 1.0)]), None);
    }

    #[test]
    fn metrics_of_somebody_else_have_limits() {
        let mut curves = Curves::default();
        for step in 0..5 {
            let names = (0..300).map(|n| (format!("m{step}-{n}"), Value::from(1.0)));
            let mut line: serde_json::Map<String, Value> = names.collect();
            line.insert("step".into(), Value::from(step));
            line.insert("x".repeat(2000), Value::from(1.0));
            curves.add(&Value::Object(line), 100);
        }
        assert_eq!(curves.names().count(), 1000);
        let dir = tempfile::tempdir().unwrap();
        let long = format!("{{\"step\":1,\"loss\":2.0,\"text\":\"{}\"}}\n", "x".repeat(1 << 20));
        let text = format!("{long}{{\"step\":2,\"loss\":1.0}}\n");
        std::fs::write(dir.path().join("metrics.jsonl"), &text).unwrap();
        let curves = Curves::read(dir.path(), 100).unwrap();
        assert_eq!(curves.get("loss").unwrap().points, [(2, 1.0)]);
        assert_eq!(curves.bytes, text.len() as u64);
    }
}
