//! Softmax weights over a row of scores, for sampling.

use super::cpu::math::{exp, vectorized};

/// Computes `to[i] = e^((scores[i] - highest) / temperature)`, relative error below 3e-7. Both slices have the same
/// length.
pub fn weights(scores: &[f32], highest: f32, temperature: f32, to: &mut [f32]) {
    fill(scores, highest, 1.0 / temperature, to)
}

#[inline(always)]
fn fill_body<const FMA: bool>(scores: &[f32], highest: f32, by: f32, to: &mut [f32]) {
    for (to, x) in to.iter_mut().zip(scores) {
        *to = exp::<FMA>((*x - highest) * by);
    }
}
vectorized!(fn fill(scores: &[f32], highest: f32, by: f32, to: &mut [f32]) = fill_body);

/// Returns the maximum of `scores`; NaN if one is NaN, negative infinity if there are none.
pub fn highest(scores: &[f32]) -> f32 {
    largest(scores)
}

/// Sums weights in f64, in a fixed order.
pub fn sum(weights: &[f32]) -> f64 {
    total(weights)
}

#[inline(always)]
fn total_body<const FMA: bool>(weights: &[f32]) -> f64 {
    let mut lanes = [0f64; 16];
    for block in weights.chunks(16) {
        for (lane, w) in lanes.iter_mut().zip(block) {
            *lane += f64::from(*w);
        }
    }
    lanes.iter().sum()
}
vectorized!(fn total(weights: &[f32]) -> f64 = total_body);

const SIDE: usize = 32;

#[inline(always)]
fn largest_body<const FMA: bool>(scores: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; SIDE];
    let mut odd = [false; SIDE];
    let (blocks, rest) = scores.as_chunks::<SIDE>();
    for block in blocks {
        for i in 0..SIDE {
            lanes[i] = if block[i] > lanes[i] { block[i] } else { lanes[i] };
            odd[i] |= block[i].is_nan();
        }
    }
    let nan = odd.contains(&true) || rest.iter().any(|x| x.is_nan());
    if nan {
        f32::NAN
    } else {
        lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |m, x| m.max(*x))
    }
}
vectorized!(fn largest(scores: &[f32]) -> f32 = largest_body);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_f64() {
        let scores: Vec<f32> = (0..1000).map(|i| ((i * 37) % 101) as f32 * 0.31 - 20.0).collect();
        let top = highest(&scores);
        assert_eq!(top, 11.0);
        let mut got = vec![0f32; 1000];
        weights(&scores, top, 0.7, &mut got);
        for (x, got) in scores.iter().zip(&got) {
            let want = ((*x as f64 - top as f64) / 0.7).exp();
            assert!((*got as f64 - want).abs() <= 1e-5 * want, "{x} {got} {want}");
        }
        let plain: f64 = got.iter().map(|w| f64::from(*w)).sum();
        assert!((sum(&got) - plain).abs() <= 1e-12 * plain && sum(&[]) == 0.0);
        for n in [1, 33, 64] {
            for at in 0..n {
                let mut bad = scores[..n].to_vec();
                bad[at] = f32::NAN;
                assert!(highest(&bad).is_nan());
                bad[at] = 50.0;
                assert_eq!(highest(&bad), 50.0);
            }
        }
        assert_eq!(highest(&[]), f32::NEG_INFINITY);
    }
}
