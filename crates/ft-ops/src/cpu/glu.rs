//! Gated linear units on slices.

use super::math::{fma, sigmoid, tanh, vectorized};
use crate::glu::Activation;
use candle_core::cpu::erf::erfc_f64;
use rayon::prelude::*;
use std::f64::consts::{FRAC_1_SQRT_2, PI};

const CHUNK: usize = 1 << 13;
/// Elements of gate and up that are copied before their gradients overwrite them.
const PIECE: usize = 512;
/// `sqrt(2 / π)` and the cubic coefficient of the tanh approximation.
const GELU_SCALE: f32 = 0.797_884_6;
const GELU_CUBIC: f32 = 0.044_715;

/// A function of one variable: computes its value, or value and slope.
trait Function {
    fn value<const FMA: bool>(x: f32) -> f32;
    fn slope<const FMA: bool>(x: f32) -> (f32, f32);
}

struct Silu;
struct GeluTanh;
struct Gelu;
struct Sigmoid;
struct Identity;
struct Relu2;

impl Function for Silu {
    #[inline(always)]
    fn value<const FMA: bool>(x: f32) -> f32 {
        x * sigmoid::<FMA>(x)
    }
    #[inline(always)]
    fn slope<const FMA: bool>(x: f32) -> (f32, f32) {
        // `1 - sigmoid` written without cancellation: e / (1 + e) with e = e^-x, kept finite.
        let s = sigmoid::<FMA>(x);
        let rest = sigmoid::<FMA>(-x);
        (x * s, s + x * s * rest)
    }
}

impl Function for Sigmoid {
    #[inline(always)]
    fn value<const FMA: bool>(x: f32) -> f32 {
        sigmoid::<FMA>(x)
    }
    #[inline(always)]
    fn slope<const FMA: bool>(x: f32) -> (f32, f32) {
        let s = sigmoid::<FMA>(x);
        (s, s * sigmoid::<FMA>(-x))
    }
}

impl Function for Identity {
    #[inline(always)]
    fn value<const FMA: bool>(x: f32) -> f32 {
        x
    }
    #[inline(always)]
    fn slope<const FMA: bool>(x: f32) -> (f32, f32) {
        (x, 1.0)
    }
}

impl Function for GeluTanh {
    #[inline(always)]
    fn value<const FMA: bool>(x: f32) -> f32 {
        let cubed = GELU_CUBIC * x * x * x;
        x * (0.5 + 0.5 * tanh::<FMA>(GELU_SCALE * (x + cubed)))
    }
    #[inline(always)]
    fn slope<const FMA: bool>(x: f32) -> (f32, f32) {
        let square = GELU_CUBIC * x * x;
        let t = tanh::<FMA>(GELU_SCALE * fma::<FMA>(x, square, x));
        let rise = fma::<FMA>(-t, t, 1.0);
        // If tanh is flat the slope is 0, even if `square` overflows.
        let inner = GELU_SCALE * x * fma::<FMA>(3.0, square, 1.0);
        let bend = if rise == 0.0 { 0.0 } else { rise * inner };
        let gate = 0.5 + 0.5 * t;
        (x * gate, gate + 0.5 * bend)
    }
}

impl Function for Gelu {
    #[inline(always)]
    fn value<const FMA: bool>(x: f32) -> f32 {
        let x = x as f64;
        (x * 0.5 * erfc_f64(-x * FRAC_1_SQRT_2)) as f32
    }
    #[inline(always)]
    fn slope<const FMA: bool>(x: f32) -> (f32, f32) {
        let x = x as f64;
        let gate = 0.5 * erfc_f64(-x * FRAC_1_SQRT_2);
        let density = (-0.5 * x * x).exp() / (2.0 * PI).sqrt();
        ((x * gate) as f32, (gate + x * density) as f32)
    }
}

impl Function for Relu2 {
    #[inline(always)]
    fn value<const FMA: bool>(x: f32) -> f32 {
        // NaN passes.
        if x < 0.0 { 0.0 } else { x * x }
    }
    #[inline(always)]
    fn slope<const FMA: bool>(x: f32) -> (f32, f32) {
        if x < 0.0 { (0.0, 0.0) } else { (x * x, 2.0 * x) }
    }
}

pub(crate) fn forward(gate: &[f32], up: &[f32], act: Activation, y: &mut [f32]) {
    let run = match act {
        Activation::Silu => silu::forward,
        Activation::GeluTanh => gelu_tanh::forward,
        Activation::Gelu => gelu::forward,
        Activation::Relu2 => relu2::forward,
        Activation::Sigmoid => logistic::forward,
        Activation::Identity => identity::forward,
    };
    y.par_chunks_mut(CHUNK)
        .zip(gate.par_chunks(CHUNK).zip(up.par_chunks(CHUNK)))
        .for_each(|(y, (gate, up))| run(gate, up, y));
}

pub(crate) fn backward(gate: &[f32], up: &[f32], dy: &[f32], act: Activation, dgate: &mut [f32], dup: &mut [f32]) {
    let run = match act {
        Activation::Silu => silu::backward,
        Activation::GeluTanh => gelu_tanh::backward,
        Activation::Gelu => gelu::backward,
        Activation::Relu2 => relu2::backward,
        Activation::Sigmoid => logistic::backward,
        Activation::Identity => identity::backward,
    };
    dgate
        .par_chunks_mut(CHUNK)
        .zip(dup.par_chunks_mut(CHUNK))
        .zip(gate.par_chunks(CHUNK).zip(up.par_chunks(CHUNK)))
        .zip(dy.par_chunks(CHUNK))
        .for_each(|(((dgate, dup), (gate, up)), dy)| run(gate, up, dy, dgate, dup));
}

/// As `backward`, with the same bits: dgate overwrites gate, dup overwrites up.
pub(crate) fn backward_in_place(gate: &mut [f32], up: &mut [f32], dy: &[f32], act: Activation) {
    let run = match act {
        Activation::Silu => silu::backward,
        Activation::GeluTanh => gelu_tanh::backward,
        Activation::Gelu => gelu::backward,
        Activation::Relu2 => relu2::backward,
        Activation::Sigmoid => logistic::backward,
        Activation::Identity => identity::backward,
    };
    let chunks = gate.par_chunks_mut(CHUNK).zip(up.par_chunks_mut(CHUNK));
    chunks.zip(dy.par_chunks(CHUNK)).for_each(|((gate, up), dy)| {
        let (mut old_gate, mut old_up) = ([0f32; PIECE], [0f32; PIECE]);
        let pieces = gate.chunks_mut(PIECE).zip(up.chunks_mut(PIECE));
        for ((gate, up), dy) in pieces.zip(dy.chunks(PIECE)) {
            let (old_gate, old_up) = (&mut old_gate[..gate.len()], &mut old_up[..up.len()]);
            old_gate.copy_from_slice(gate);
            old_up.copy_from_slice(up);
            run(old_gate, old_up, dy, gate, up);
        }
    });
}

/// The function alone.
pub(crate) fn activate(x: &[f32], act: Activation, y: &mut [f32]) {
    let run = match act {
        Activation::Silu => silu::alone,
        Activation::GeluTanh => gelu_tanh::alone,
        Activation::Gelu => gelu::alone,
        Activation::Relu2 => relu2::alone,
        Activation::Sigmoid => logistic::alone,
        Activation::Identity => identity::alone,
    };
    y.par_chunks_mut(CHUNK)
        .zip(x.par_chunks(CHUNK))
        .for_each(|(y, x)| run(x, y));
}

/// Backward of `activate`: dx overwrites x.
pub(crate) fn activate_backward(x: &mut [f32], dy: &[f32], act: Activation) {
    let run = match act {
        Activation::Silu => silu::alone_backward,
        Activation::GeluTanh => gelu_tanh::alone_backward,
        Activation::Gelu => gelu::alone_backward,
        Activation::Relu2 => relu2::alone_backward,
        Activation::Sigmoid => logistic::alone_backward,
        Activation::Identity => identity::alone_backward,
    };
    x.par_chunks_mut(CHUNK)
        .zip(dy.par_chunks(CHUNK))
        .for_each(|(x, dy)| run(x, dy));
}

#[inline(always)]
fn alone_all<const FMA: bool, F: Function>(x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = F::value::<FMA>(*x);
    }
}

#[inline(always)]
fn alone_backward_all<const FMA: bool, F: Function>(x: &mut [f32], dy: &[f32]) {
    for (x, dy) in x.iter_mut().zip(dy) {
        *x = dy * F::slope::<FMA>(*x).1;
    }
}

#[inline(always)]
fn forward_all<const FMA: bool, F: Function>(gate: &[f32], up: &[f32], y: &mut [f32]) {
    for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
        *y = F::value::<FMA>(*gate) * up;
    }
}

#[inline(always)]
fn backward_all<const FMA: bool, F: Function>(
    gate: &[f32],
    up: &[f32],
    dy: &[f32],
    dgate: &mut [f32],
    dup: &mut [f32],
) {
    let inputs = gate.iter().zip(up).zip(dy);
    for ((dgate, dup), ((gate, up), dy)) in dgate.iter_mut().zip(dup).zip(inputs) {
        let (value, slope) = F::slope::<FMA>(*gate);
        *dgate = dy * up * slope;
        *dup = dy * value;
    }
}

macro_rules! for_function {
    ($module:ident, $function:ty) => {
        mod $module {
            use super::*;

            #[inline(always)]
            fn forward_body<const FMA: bool>(gate: &[f32], up: &[f32], y: &mut [f32]) {
                forward_all::<FMA, $function>(gate, up, y)
            }
            vectorized!(pub(super) fn forward(gate: &[f32], up: &[f32], y: &mut [f32]) = forward_body);

            #[inline(always)]
            fn backward_body<const FMA: bool>(
                gate: &[f32],
                up: &[f32],
                dy: &[f32],
                dgate: &mut [f32],
                dup: &mut [f32],
            ) {
                backward_all::<FMA, $function>(gate, up, dy, dgate, dup)
            }
            vectorized!(
                pub(super) fn backward(gate: &[f32], up: &[f32], dy: &[f32], dgate: &mut [f32], dup: &mut [f32])
                    = backward_body
            );

            #[inline(always)]
            fn alone_body<const FMA: bool>(x: &[f32], y: &mut [f32]) {
                alone_all::<FMA, $function>(x, y)
            }
            vectorized!(pub(super) fn alone(x: &[f32], y: &mut [f32]) = alone_body);

            #[inline(always)]
            fn alone_backward_body<const FMA: bool>(x: &mut [f32], dy: &[f32]) {
                alone_backward_all::<FMA, $function>(x, dy)
            }
            vectorized!(pub(super) fn alone_backward(x: &mut [f32], dy: &[f32]) = alone_backward_body);
        }
    };
}

for_function!(silu, Silu);
for_function!(gelu_tanh, GeluTanh);
for_function!(gelu, Gelu);
for_function!(relu2, Relu2);
for_function!(logistic, Sigmoid);
for_function!(identity, Identity);
