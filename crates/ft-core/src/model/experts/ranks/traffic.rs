//! The words that travel to and from the experts of other ranks, for a forecast: those of tokens that an even router sends to
//! experts.
//!
//! Letters: E experts, W ranks, D hidden size.

use super::{ADDED, sent};
use crate::base::Result;
use crate::base::rng::{Rng, Stream};
use crate::model::spec::ExpertsSpec;
use crate::source::sharded::own_experts;
use candle_core::{Device, Tensor};

/// Tokens whose routing is drawn: the mean over them is within about 1 %.
const DRAWN: usize = 2048;

/// f32 numbers that rank `rank` of `size` sends in one layer for a micro-batch of `tokens` tokens on each rank, forward and backward.
/// An estimate with random router logits: all experts are equally likely.
pub fn expert_words(sizes: &ExpertsSpec, d: usize, (rank, size): (usize, usize), tokens: usize) -> [f64; 2] {
    if size < 2 || tokens == 0 {
        return [0.0; 2];
    }
    // There is no error: a router that chooses more experts than it has is refused when the model is read.
    words(sizes, d, (rank, size), tokens).unwrap_or_default()
}

fn words(sizes: &ExpertsSpec, d: usize, (rank, size): (usize, usize), tokens: usize) -> Result<[f64; 2]> {
    let outputs = sizes.router.outputs(sizes.count);
    let rng = Rng::new(0, Stream::Init, &[]);
    let logits = (0..(DRAWN * outputs) as u64).map(|i| rng.normal(i)).collect();
    let logits = Tensor::from_vec(logits, (DRAWN, outputs), &Device::Cpu)?;
    let assignment = sizes.router.route(&logits, None)?.assign(&Device::Cpu, false)?;
    let experts: Vec<_> = (0..size).map(|rank| own_experts(sizes.count, rank, size)).collect();
    let sent = sent(&experts, &assignment, DRAWN, sizes.shared.is_none())?;
    let [mut forward, mut backward] = [0.0; 2];
    let scale = tokens as f64 / DRAWN as f64;
    let header = |rank: usize| 1.0 + experts[rank].len() as f64;
    for to in (0..size).filter(|to| *to != rank) {
        let (entries, rows) = (sent[to].places.len() as f64, sent[to].tokens.len() as f64);
        forward += header(to) + scale * (2.0 * entries + rows * d as f64);
        backward += header(to) + scale * (2.0 * entries + 2.0 * rows * d as f64);
    }
    // The tokens of every other rank are like these.
    let own = &sent[rank];
    let others = own.places.iter().filter(|place| **place & ADDED == 0).count();
    let back = (own.sums() + others) as f64 * d as f64;
    let others = (size - 1) as f64;
    forward += others * scale * back;
    backward += others * scale * (own.places.len() as f64 + back);
    Ok([forward, backward])
}
