//! The sum of the squares of gradients of which each rank has a part, with the bits of one rank: every rank gets the sums of
//! all runs of `QUANTUM` elements and adds them in their order.

use super::reduce::OwnSum;
use crate::base::Result;
use crate::comm::{Collective, QUANTUM};
use crate::ops::step_stats::{StepStats, StepSums};
use crate::ops::update;
use candle_core::Tensor;

/// Adds the squares of `sums` of all ranks to `step_stats`.
pub(super) fn add(comm: &dyn Collective, sums: &[OwnSum], step_stats: &StepStats) -> Result<()> {
    let own: Vec<&Tensor> = sums.iter().map(|sum| &sum.sum).collect();
    if let Some(own) = step_stats.squares_of_runs(&own)? {
        // A GPU makes f64 of each run, and adds those of all gradients at once.
        let own: Vec<[f32; 2]> = own.into_iter().map(halves).collect();
        let all = of_all(comm, sums, &own)?.concat();
        let all: Vec<f64> = all.into_iter().map(whole).collect();
        return step_stats.add_squares_of_runs(&all, sums.iter().map(OwnSum::elements).collect());
    }
    let mut runs = Vec::new();
    for own in own {
        runs.extend(update::squares_of_chunks(own)?.into_iter().map(|x| [x]));
    }
    for all in of_all(comm, sums, &runs)? {
        let all: Vec<f32> = all.into_iter().flatten().collect();
        step_stats.add(StepSums {
            squares: update::sum_of_chunks(&all),
            ..StepSums::default()
        });
    }
    Ok(())
}

/// The numbers of all runs of each gradient; `own`: those of this rank, one gradient after the other.
fn of_all<const N: usize>(comm: &dyn Collective, sums: &[OwnSum], own: &[[f32; N]]) -> Result<Vec<Vec<[f32; N]>>> {
    let size = comm.world().size;
    let part = |sum: &OwnSum, rank: usize| sum.parts[rank].clone();
    let runs = |rank| -> usize { sums.iter().map(|s| part(s, rank).len().div_ceil(QUANTUM)).sum() };
    let lengths: Vec<usize> = (0..size).map(|rank| N * runs(rank)).collect();
    debug_assert_eq!(N * own.len(), lengths[comm.world().rank]);
    let lists = comm
        .all_gather(sums.len() as u64, own.as_flattened().to_vec(), lengths)
        .wait()?;
    let mut rest: Vec<&[[f32; N]]> = lists.iter().map(|list| list.as_chunks().0).collect();
    let mut out = Vec::with_capacity(sums.len());
    for sum in sums {
        let mut all = vec![[0f32; N]; sum.elements().div_ceil(QUANTUM)];
        for (rank, rest) in rest.iter_mut().enumerate() {
            let range = part(sum, rank);
            let (found, after) = rest.split_at(range.len().div_ceil(QUANTUM));
            let first = range.start / QUANTUM;
            if !found.is_empty() {
                all[first..first + found.len()].copy_from_slice(found);
            }
            *rest = after;
        }
        out.push(all);
    }
    Ok(out)
}

/// An f64 travels in the bits of two f32.
fn halves(x: f64) -> [f32; 2] {
    [x.to_bits() as u32, (x.to_bits() >> 32) as u32].map(f32::from_bits)
}

fn whole(halves: [f32; 2]) -> f64 {
    let [low, high] = halves.map(|half| u64::from(half.to_bits()));
    f64::from_bits(high << 32 | low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_f64_travels_whole() {
        for x in [
            0.0,
            -0.0,
            1.0 / 3.0,
            f64::MAX,
            f64::MIN_POSITIVE / 3.0,
            f64::INFINITY,
            f64::NAN,
        ] {
            assert_eq!(whole(halves(x)).to_bits(), x.to_bits());
        }
    }
}
