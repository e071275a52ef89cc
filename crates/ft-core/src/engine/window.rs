//! The micro-batches of a step on the ranks of a job. Micro-batch m of the window belongs to rank m mod W, and all sums
//! are made in the order of the micro-batches, so that a step has the same bits on any number of ranks.

use crate::base::means::NamedSum;
use crate::base::{Error, Result};
use crate::comm::{Collective, Patience, World};
use crate::model::Objective;
use crate::model::routers::Routers;
use crate::ops::step_stats::StepSums;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

/// The work of this rank in one round: a micro-batch on each rank at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Round {
    /// Index of the micro-batch in the window.
    pub micro: usize,
    /// Number of ranks, from rank 0 on, whose micro-batches count.
    pub contributors: usize,
    /// False if this rank only computes to stay synchronous with the others: it repeats the last micro-batch.
    pub counts: bool,
}

/// The first micro-batch of a step that failed, or whose loss is not finite.
#[derive(Debug)]
pub struct FailedMicroBatch {
    step: u64,
    micro: AtomicUsize,
}

impl FailedMicroBatch {
    /// Of this step; none so far.
    pub(super) fn of(step: u64) -> Self {
        Self {
            step,
            micro: AtomicUsize::new(usize::MAX),
        }
    }

    /// Its index in the window of `step`; `None`: there is none, or it is not known. On a GPU that computes alone the losses of the
    /// micro-batches are not known, and gradients are checked when their sums are complete. It is not known either if a later step
    /// was queued before this one was read.
    pub fn index(&self, step: u64) -> Option<usize> {
        let found = Some(self.micro.load(Relaxed)).filter(|micro| *micro < usize::MAX);
        found.filter(|_| self.step == step)
    }

    /// Keeps the first index.
    pub(super) fn note(&self, micro: usize) {
        let _ = self.micro.compare_exchange(usize::MAX, micro, Relaxed, Relaxed);
    }
}

/// The place of the group of `ranks` ranks that share a micro-batch, among all groups.
pub(crate) fn teams(world: &World, ranks: usize) -> World {
    World {
        rank: world.rank / ranks,
        size: world.size / ranks,
        host: world.host.clone(),
    }
}

/// The rounds of the rank `world`. `filled`: indices of the micro-batches that have tokens.
pub fn rounds(filled: &[usize], world: &World) -> Vec<Round> {
    let round = |micro: &[usize]| {
        let own = micro.get(world.rank);
        Some(Round {
            micro: *own.or(micro.last())?,
            contributors: micro.len(),
            counts: own.is_some(),
        })
    };
    filled.chunks(world.size).filter_map(round).collect()
}

/// The sums of one micro-batch or batch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MicroReport {
    /// Index of the micro-batch.
    pub micro: u64,
    /// Loss and correct predictions.
    pub sums: StepSums,
    /// Sums and counts of the objective's metrics.
    pub means: Vec<NamedSum>,
    /// `RouterTally::to_wire`
    pub routers: Vec<f64>,
}

/// Takes the sums of the objective's metrics.
pub fn take_means(objective: &dyn Objective) -> Vec<NamedSum> {
    objective.means().map(|means| means.take_sums()).unwrap_or_default()
}

impl MicroReport {
    /// Adds the metrics to those of the objective.
    pub fn put_back(&self, objective: &dyn Objective) {
        if let Some(all) = objective.means() {
            self.means.iter().for_each(|sum| all.put_back(sum));
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        let number = |out: &mut Vec<u8>, x: u64| out.extend(x.to_le_bytes());
        let float = |out: &mut Vec<u8>, x: f64| out.extend(x.to_le_bytes());
        number(out, self.micro);
        [self.sums.loss, self.sums.correct, self.sums.squares]
            .into_iter()
            .for_each(|x| float(out, x));
        number(out, self.means.len() as u64);
        for NamedSum { name, sum, count } in &self.means {
            number(out, name.len() as u64);
            out.extend(name.as_bytes());
            float(out, *sum);
            float(out, *count);
        }
        number(out, self.routers.len() as u64);
        self.routers.iter().for_each(|x| float(out, *x));
    }

    fn read(rest: &mut &[u8]) -> Option<Self> {
        let micro = number(rest)?;
        let sums = StepSums {
            loss: float(rest)?,
            correct: float(rest)?,
            squares: float(rest)?,
        };
        let mut means = Vec::new();
        for _ in 0..number(rest)? {
            let length = number(rest)? as usize;
            let (name, after) = rest.split_at_checked(length)?;
            *rest = after;
            let name = String::from_utf8(name.to_vec()).ok()?;
            means.push(NamedSum {
                name,
                sum: float(rest)?,
                count: float(rest)?,
            });
        }
        let routers = (0..number(rest)?).map(|_| float(rest)).collect::<Option<_>>()?;
        Some(Self {
            micro,
            sums,
            means,
            routers,
        })
    }
}

fn number(rest: &mut &[u8]) -> Option<u64> {
    let (bytes, after) = rest.split_first_chunk::<8>()?;
    *rest = after;
    Some(u64::from_le_bytes(*bytes))
}

fn float(rest: &mut &[u8]) -> Option<f64> {
    number(rest).map(f64::from_bits)
}

/// The reports of all ranks, in the order of the micro-batches.
///
/// # Errors
/// Another rank has failed.
pub fn all(comm: &dyn Collective, own: Vec<MicroReport>) -> Result<Vec<MicroReport>> {
    let mut all = own;
    if comm.world().size > 1 {
        let mut bytes = Vec::new();
        all.iter().for_each(|report| report.write(&mut bytes));
        all = Vec::new();
        for bytes in comm.all_gather_bytes(bytes, Patience::Step)? {
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let report = MicroReport::read(&mut rest);
                all.push(report.ok_or_else(|| Error::internal("the sums of a rank are not readable"))?);
            }
        }
    }
    all.sort_by_key(|report| report.micro);
    Ok(all)
}

/// Adds the metrics of the routers. `reports`: those of `all`; ranks that share a micro-batch have a report each.
pub(super) fn add_routers(routers: Option<&Routers>, reports: &[MicroReport]) {
    let Some(routers) = routers else { return };
    for parts in reports.chunk_by(|a, b| a.micro == b.micro) {
        routers.add_parts(parts.iter().map(|part| &part.routers[..]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_micro_batch_is_the_first_one_of_its_step() {
        let failed = FailedMicroBatch::of(7);
        assert_eq!(failed.index(7), None);
        [2, 1].into_iter().for_each(|micro| failed.note(micro));
        assert_eq!([6, 7, 8].map(|step| failed.index(step)), [None, Some(2), None]);
    }

    #[test]
    fn every_micro_batch_counts_once() {
        let filled = [0, 1, 3, 4, 7];
        for size in 1..=6 {
            let mut counted = Vec::new();
            let mut lengths = Vec::new();
            for rank in 0..size {
                let host = String::new();
                let rounds = rounds(&filled, &World { rank, size, host });
                lengths.push(rounds.len());
                for (i, round) in rounds.iter().enumerate() {
                    assert_eq!(round.contributors, (filled.len() - i * size).min(size));
                    assert_eq!(round.counts, rank < round.contributors);
                    if round.counts {
                        counted.push(round.micro);
                    }
                }
            }
            counted.sort_unstable();
            assert_eq!(counted, filled);
            assert!(
                lengths.iter().all(|n| *n == filled.len().div_ceil(size)),
                "all keep step"
            );
        }
    }

    #[test]
    fn reports_travel_whole() {
        let report = |micro| MicroReport {
            micro,
            sums: StepSums {
                loss: f64::NAN,
                correct: 2.0,
                squares: 0.25,
            },
            means: vec![NamedSum {
                name: "kl".into(),
                sum: 0.1,
                count: 3.0,
            }],
            routers: vec![1.0, -0.0],
        };
        let mut bytes = Vec::new();
        [report(1), report(2)].iter().for_each(|r| r.write(&mut bytes));
        let mut rest = &bytes[..];
        for micro in [1, 2] {
            let found = MicroReport::read(&mut rest).unwrap();
            assert_eq!((found.micro, found.means), (micro, report(0).means));
            assert!(found.sums.loss.is_nan() && found.routers[1].is_sign_negative());
        }
        assert!(rest.is_empty() && MicroReport::read(&mut &bytes[..9]).is_none());
    }
}
