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

pub(crate) fn forward(gate: &[f32], up: &[f32], act: Activation, y: &mut [f32]) {
    let run = match act {
        Activation::Silu => silu,
        Activation::GeluTanh => gelu_tanh,
        Activation::Gelu => gelu,
        Activation::Sigmoid => logistic,
    };
    y.par_chunks_mut(CHUNK)
        .zip(gate.par_chunks(CHUNK).zip(up.par_chunks(CHUNK)))
        .for_each(|(y, (gate, up))| run(gate, up, y));
}

pub(crate) fn backward(gate: &[f32], up: &[f32], dy: &[f32], act: Activation, dgate: &mut [f32], dup: &mut [f32]) {
    let run = match act {
        Activation::Silu => silu_backward,
        Activation::GeluTanh => gelu_tanh_backward,
        Activation::Gelu => gelu_backward,
        Activation::Sigmoid => logistic_backward,
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
        Activation::Silu => silu_backward,
        Activation::GeluTanh => gelu_tanh_backward,
        Activation::Gelu => gelu_backward,
        Activation::Sigmoid => logistic_backward,
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
    ($function:ty, $forward:ident, $forward_body:ident, $backward:ident, $backward_body:ident) => {
        #[inline(always)]
        fn $forward_body<const FMA: bool>(gate: &[f32], up: &[f32], y: &mut [f32]) {
            forward_all::<FMA, $function>(gate, up, y)
        }
        vectorized!(fn $forward(gate: &[f32], up: &[f32], y: &mut [f32]) = $forward_body);

        #[inline(always)]
        fn $backward_body<const FMA: bool>(
            gate: &[f32],
            up: &[f32],
            dy: &[f32],
            dgate: &mut [f32],
            dup: &mut [f32],
        ) {
            backward_all::<FMA, $function>(gate, up, dy, dgate, dup)
        }
        vectorized!(
            fn $backward(gate: &[f32], up: &[f32], dy: &[f32], dgate: &mut [f32], dup: &mut [f32])
                = $backward_body
        );
    };
}

for_function!(Silu, silu, silu_body, silu_backward, silu_backward_body);
for_function!(
    GeluTanh,
    gelu_tanh,
    gelu_tanh_body,
    gelu_tanh_backward,
    gelu_tanh_backward_body
);
for_function!(Gelu, gelu, gelu_body, gelu_backward, gelu_backward_body);
for_function!(
    Sigmoid,
    logistic,
    logistic_body,
    logistic_backward,
    logistic_backward_body
);
