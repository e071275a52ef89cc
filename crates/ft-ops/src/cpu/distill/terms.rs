//! Elementwise functions on two rows of logits. A log-probability is (logit - max) / T - ln sum: the maximum is
//! subtracted first, so that no large number is rounded.

use crate::cpu::math::{LANES, exp, fma, sum_lanes, vectorized};

/// The kinds of divergence; MIXTURE is any beta between 0 and 1.
pub(super) const FORWARD: u8 = 0;
pub(super) const REVERSE: u8 = 1;
pub(super) const MIXTURE: u8 = 2;

/// Parameters of a row that turn logits into log-probabilities.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowScale {
    pub max: f32,
    /// 1 / T
    pub inverse: f32,
    pub ln_sum: f32,
}

impl RowScale {
    #[inline(always)]
    pub(super) fn log(self, logit: f32) -> f32 {
        (logit - self.max) * self.inverse - self.ln_sum
    }
}

/// ln (1 - beta) and ln beta.
#[derive(Debug, Clone, Copy)]
pub(super) struct MixLogs {
    pub own: f32,
    pub other: f32,
}

/// `ln(1 + x)` for 0 <= x <= 1, relative error below 1e-6: 2 artanh(x / (2 + x)) by its series.
#[inline(always)]
fn ln_1p<const FMA: bool>(x: f32) -> f32 {
    let s = x / (2.0 + x);
    let z = s * s;
    let p = fma::<FMA>(z, 1.0 / 15.0, 1.0 / 13.0);
    let p = fma::<FMA>(p, z, 1.0 / 11.0);
    let p = fma::<FMA>(p, z, 1.0 / 9.0);
    let p = fma::<FMA>(p, z, 1.0 / 7.0);
    let p = fma::<FMA>(p, z, 1.0 / 5.0);
    let p = fma::<FMA>(p, z, 1.0 / 3.0);
    let p = fma::<FMA>(p, z, 1.0);
    2.0 * s * p
}

/// `ln((1 - beta) q + beta p)` from the logarithms of q and p.
#[inline(always)]
pub(super) fn ln_mixture<const FMA: bool>(lq: f32, lp: f32, mix: MixLogs) -> f32 {
    let (a, b) = (lq + mix.own, lp + mix.other);
    let (high, low) = if a > b { (a, b) } else { (b, a) };
    high + ln_1p::<FMA>(exp::<FMA>(low - high))
}

/// Returns the two terms of one element: p ln(p/m) and q ln(q/m). m is q if only the first is used, p if only the
/// second.
#[inline(always)]
fn pair<const FMA: bool, const MODE: u8>(lq: f32, lp: f32, mix: MixLogs) -> (f32, f32) {
    match MODE {
        FORWARD => (exp::<FMA>(lp) * (lp - lq), 0.0),
        REVERSE => (0.0, exp::<FMA>(lq) * (lq - lp)),
        _ => {
            let lm = ln_mixture::<FMA>(lq, lp, mix);
            (exp::<FMA>(lp) * (lp - lm), exp::<FMA>(lq) * (lq - lm))
        }
    }
}

#[inline(always)]
fn sums_of<const FMA: bool, const MODE: u8>(
    ours: &[f32],
    theirs: &[f32],
    q: RowScale,
    p: RowScale,
    mix: MixLogs,
) -> (f64, f64) {
    let (mut a, mut b) = ([0f32; LANES], [0f32; LANES]);
    let (x, x_rest) = ours.as_chunks::<LANES>();
    let (y, y_rest) = theirs.as_chunks::<LANES>();
    for (x, y) in x.iter().zip(y) {
        for i in 0..LANES {
            let (s, t) = pair::<FMA, MODE>(q.log(x[i]), p.log(y[i]), mix);
            a[i] += s;
            b[i] += t;
        }
    }
    for (i, (x, y)) in x_rest.iter().zip(y_rest).enumerate() {
        let (s, t) = pair::<FMA, MODE>(q.log(*x), p.log(*y), mix);
        a[i] += s;
        b[i] += t;
    }
    (sum_lanes(&a) as f64, sum_lanes(&b) as f64)
}

/// Sums over a block of `p ln(p/m)` and `q ln(q/m)`.
#[inline(always)]
fn sums_body<const FMA: bool>(
    ours: &[f32],
    theirs: &[f32],
    q: RowScale,
    p: RowScale,
    mix: MixLogs,
    mode: u8,
) -> (f64, f64) {
    match mode {
        FORWARD => sums_of::<FMA, FORWARD>(ours, theirs, q, p, mix),
        REVERSE => sums_of::<FMA, REVERSE>(ours, theirs, q, p, mix),
        _ => sums_of::<FMA, MIXTURE>(ours, theirs, q, p, mix),
    }
}
vectorized!(pub(super) fn sums(ours: &[f32], theirs: &[f32], q: RowScale, p: RowScale, mix: MixLogs, mode: u8) -> (f64, f64) = sums_body);

/// Returns the slope of the divergence with respect to logit / T: for KL(p|q) it is q - p, else w q (ln(q/m) - k),
/// where k is the sum of q ln(q/m); `w` is part of `GradientTerms::factor`.
#[inline(always)]
pub(super) fn slope<const FMA: bool, const MODE: u8>(lq: f32, lp: f32, k: f32, mix: MixLogs) -> f32 {
    let q = exp::<FMA>(lq);
    match MODE {
        FORWARD => q - exp::<FMA>(lp),
        REVERSE => q * ((lq - lp) - k),
        _ => q * ((lq - ln_mixture::<FMA>(lq, lp, mix)) - k),
    }
}

/// Parameters that turn a row of logits into its gradient.
#[derive(Debug, Clone, Copy)]
pub(super) struct GradientTerms {
    pub q: RowScale,
    pub mix: MixLogs,
    pub mode: u8,
    /// k of `slope`.
    pub k: f32,
    /// Factor of the slope of the divergence.
    pub factor: f32,
    /// For the cross-entropy: its largest logit, and its weight divided by the sum of the exponentials.
    pub hard_max: f32,
    pub hard: f32,
    pub cap: f32,
}

impl GradientTerms {
    #[inline(always)]
    fn hard<const FMA: bool>(&self, logit: f32) -> f32 {
        self.hard * exp::<FMA>(logit - self.hard_max)
    }

    /// Returns the slope of the softcap at a capped logit.
    #[inline(always)]
    pub(super) fn cap_slope(&self, logit: f32) -> f32 {
        if self.cap == 0.0 {
            return 1.0;
        }
        let t = logit / self.cap;
        1.0 - t * t
    }
}

#[inline(always)]
fn turn_of<const FMA: bool, const MODE: u8, const HARD: bool>(
    ours: &mut [f32],
    theirs: &[f32],
    p: RowScale,
    t: &GradientTerms,
) {
    for (x, y) in ours.iter_mut().zip(theirs) {
        let mut g = t.factor * slope::<FMA, MODE>(t.q.log(*x), p.log(*y), t.k, t.mix);
        if HARD {
            g += t.hard::<FMA>(*x);
        }
        *x = g * t.cap_slope(*x);
    }
}

/// Replaces logits of the common ids by their gradients.
#[inline(always)]
fn turn_body<const FMA: bool>(ours: &mut [f32], theirs: &[f32], p: RowScale, t: &GradientTerms) {
    match (t.mode, t.hard != 0.0) {
        (FORWARD, false) => turn_of::<FMA, FORWARD, false>(ours, theirs, p, t),
        (FORWARD, true) => turn_of::<FMA, FORWARD, true>(ours, theirs, p, t),
        (REVERSE, false) => turn_of::<FMA, REVERSE, false>(ours, theirs, p, t),
        (REVERSE, true) => turn_of::<FMA, REVERSE, true>(ours, theirs, p, t),
        (_, false) => turn_of::<FMA, MIXTURE, false>(ours, theirs, p, t),
        (_, true) => turn_of::<FMA, MIXTURE, true>(ours, theirs, p, t),
    }
}
vectorized!(pub(super) fn turn(ours: &mut [f32], theirs: &[f32], p: RowScale, t: &GradientTerms) = turn_body);

/// Replaces logits by their gradients where the slope is a number of the row times their own probability: `rest`, or for
/// FORWARD 1 - e^`rest`. Used for ids of the student alone (`rest` is 0), and for the ids outside a stored top-k.
#[inline(always)]
fn turn_rest_body<const FMA: bool>(ours: &mut [f32], rest: f32, t: &GradientTerms) {
    // q (1 - p/q), where p/q may be too large for f32, is q e^rest (e^-rest - 1).
    let (slope, shift) = match t.mode {
        FORWARD if rest > 0.0 => ((-rest).exp_m1(), rest),
        FORWARD => (-rest.exp_m1(), 0.0),
        _ => (rest, 0.0),
    };
    let factor = t.factor * slope;
    for x in ours {
        let mut g = t.hard::<FMA>(*x);
        if factor != 0.0 {
            g += factor * exp::<FMA>(t.q.log(*x) + shift);
        }
        *x = g * t.cap_slope(*x);
    }
}
vectorized!(pub(super) fn turn_rest(ours: &mut [f32], rest: f32, t: &GradientTerms) = turn_rest_body);

/// Computes the sum of `e^((x - max) / T)`.
#[inline(always)]
fn sum_exp_body<const FMA: bool>(part: &[f32], max: f32, inverse: f32) -> f64 {
    let mut lanes = [0f32; LANES];
    let (blocks, rest) = part.as_chunks::<LANES>();
    for block in blocks {
        for i in 0..LANES {
            lanes[i] += exp::<FMA>((block[i] - max) * inverse);
        }
    }
    for (i, x) in rest.iter().enumerate() {
        lanes[i] += exp::<FMA>((*x - max) * inverse);
    }
    sum_lanes(&lanes) as f64
}
vectorized!(pub(super) fn sum_exp(part: &[f32], max: f32, inverse: f32) -> f64 = sum_exp_body);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_of_mixtures_are_accurate() {
        for i in 0..=1000 {
            let x = i as f32 / 1000.0;
            let want = (x as f64).ln_1p();
            assert!((ln_1p::<false>(x) as f64 - want).abs() <= 1e-6 * want, "{x}");
        }
        let mix = MixLogs {
            own: 0.7f32.ln(),
            other: 0.3f32.ln(),
        };
        for (lq, lp) in [(-1.0, -2.0), (-60.0, -0.01), (-0.5, -90.0), (-3.0, -3.0)] {
            let (q, p) = ((lq as f64).exp(), (lp as f64).exp());
            let want = (0.7 * q + 0.3 * p).ln();
            assert!(
                (ln_mixture::<true>(lq, lp, mix) as f64 - want).abs() < 1e-5,
                "{lq} {lp}"
            );
        }
    }
}
