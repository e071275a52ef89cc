//! The elementwise update rules: AdamW, SGD, Lion, sign descent. `w`, `m`, `v` are updated in place.

use super::super::math::vectorized;

/// AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101, algorithm 2), with the arithmetic of `torch.optim.AdamW`:
/// decoupled decay, bias correction, eps outside the root.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Adamw {
    pub(crate) keep: f32,
    pub(crate) b1: f32,
    pub(crate) b2: f32,
    pub(crate) step_size: f32,
    pub(crate) correction2_sqrt: f32,
    pub(crate) eps: f32,
    pub(crate) coefficient: f32,
}

impl Adamw {
    /// `step` is the number of updates of this parameter, including this one.
    pub(crate) fn new(lr: f64, betas: [f64; 2], eps: f64, decay: f64, step: u64, coefficient: f32) -> Self {
        let [b1, b2] = betas;
        Self {
            keep: (1.0 - lr * decay) as f32,
            b1: b1 as f32,
            b2: b2 as f32,
            step_size: (lr / (1.0 - b1.powf(step as f64))) as f32,
            correction2_sqrt: (1.0 - b2.powf(step as f64)).sqrt() as f32,
            eps: eps as f32,
            coefficient,
        }
    }
}

// No fused multiply-add here: a run resumed on another machine must continue with the same bits.
#[inline(always)]
fn adamw_body<const FMA: bool>(s: &Adamw, w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
    for (((w, g), m), v) in w.iter_mut().zip(g).zip(m).zip(v) {
        let g = g * s.coefficient;
        *m += (g - *m) * (1.0 - s.b1);
        *v = *v * s.b2 + g * g * (1.0 - s.b2);
        let denominator = v.sqrt() / s.correction2_sqrt + s.eps;
        *w = *w * s.keep - s.step_size * (*m / denominator);
    }
}
vectorized!(pub(crate) fn adamw(s: &Adamw, w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) = adamw_body);

/// SGD with momentum, with the arithmetic of `torch.optim.SGD`: decay added to the gradient, no dampening.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sgd {
    pub(crate) lr: f32,
    pub(crate) momentum: f32,
    pub(crate) weight_decay: f32,
    /// True for the first update, which initializes the momentum buffer with the gradient itself.
    pub(crate) first: bool,
    pub(crate) coefficient: f32,
}

#[inline(always)]
fn sgd_body<const FMA: bool>(s: &Sgd, w: &mut [f32], g: &[f32]) {
    for (w, g) in w.iter_mut().zip(g) {
        let g = g * s.coefficient + s.weight_decay * *w;
        *w -= s.lr * g;
    }
}
vectorized!(pub(crate) fn sgd(s: &Sgd, w: &mut [f32], g: &[f32]) = sgd_body);

#[inline(always)]
fn momentum_body<const FMA: bool>(s: &Sgd, w: &mut [f32], g: &[f32], m: &mut [f32]) {
    for ((w, g), m) in w.iter_mut().zip(g).zip(m) {
        let g = g * s.coefficient + s.weight_decay * *w;
        *m = if s.first { g } else { s.momentum * *m + g };
        *w -= s.lr * *m;
    }
}
vectorized!(pub(crate) fn momentum(s: &Sgd, w: &mut [f32], g: &[f32], m: &mut [f32]) = momentum_body);

/// Returns -1, 0 or 1.
#[inline(always)]
fn sign(x: f32) -> f32 {
    f32::from(u8::from(x > 0.0)) - f32::from(u8::from(x < 0.0))
}

/// Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2): sign of a mean of gradient and momentum, decoupled decay.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lion {
    pub(crate) lr: f32,
    pub(crate) keep: f32,
    pub(crate) b1: f32,
    pub(crate) b2: f32,
    pub(crate) coefficient: f32,
}

#[inline(always)]
fn lion_body<const FMA: bool>(s: &Lion, w: &mut [f32], g: &[f32], m: &mut [f32]) {
    for ((w, g), m) in w.iter_mut().zip(g).zip(m) {
        let g = g * s.coefficient;
        let direction = sign(*m * s.b1 + g * (1.0 - s.b1));
        *w = *w * s.keep - s.lr * direction;
        *m = *m * s.b2 + g * (1.0 - s.b2);
    }
}
vectorized!(pub(crate) fn lion(s: &Lion, w: &mut [f32], g: &[f32], m: &mut [f32]) = lion_body);

#[inline(always)]
fn descend_body<const FMA: bool>(lr: f32, w: &mut [f32], g: &[f32]) {
    for (w, g) in w.iter_mut().zip(g) {
        *w -= lr * sign(*g);
    }
}
vectorized!(pub(crate) fn descend(lr: f32, w: &mut [f32], g: &[f32]) = descend_body);
