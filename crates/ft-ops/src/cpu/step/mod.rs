//! The optimizer update in one pass over weight, gradient and state: each element is read once, updated, and
//! written once. The work is cut into chunks by the number of elements alone.

pub(crate) mod adafactor;
pub(crate) mod code;
#[cfg(target_arch = "x86_64")]
mod code_avx512;
pub(crate) mod rules;

use super::math::vectorized;
#[cfg(target_arch = "x86_64")]
use super::product::{CpuBackend, VectorIsa};
use crate::master;
use code::{BLOCK, QuantizationTable};
#[cfg(target_arch = "x86_64")]
use code_avx512::QuantizedBlock;
use ft_base::rng::Rng;
use half::bf16;
use rayon::prelude::*;
use std::mem::take;

/// Elements of a task: whole blocks of the 8-bit quantization.
const CHUNK: usize = 64 * BLOCK;

/// A weight, and the storage of the low 16 bits that bf16 cannot hold.
pub(crate) enum WeightSlices<'a> {
    F32(&'a mut [f32]),
    /// High and low 16 bits of an f32 master weight.
    Master(&'a mut [bf16], &'a mut [i16]),
    /// Stochastic rounding: element `e` uses lane `e % 4` of random draw `e / 4`.
    Stochastic(&'a mut [bf16], Rng),
}

/// A moment in its storage type.
pub(crate) enum MomentSlices<'a> {
    None,
    F32(&'a mut [f32]),
    /// Quantized data, and the absmax of each block.
    Int8(&'a mut [u8], &'a mut [f32], &'static QuantizationTable),
}

/// An update rule with all values that do not depend on the element precomputed.
pub(crate) enum PreparedRule {
    Adamw(rules::Adamw),
    Sgd(rules::Sgd),
    Lion(rules::Lion),
    /// Sign descent: a step of this size against the sign of the gradient.
    Sign(f32),
    Adafactor(adafactor::AdafactorUpdate),
}

fn cut<'a, T>(slice: &mut &'a mut [T], n: usize) -> &'a mut [T] {
    let (head, tail) = take(slice).split_at_mut(n);
    *slice = tail;
    head
}

impl<'a> WeightSlices<'a> {
    /// Splits off the first `n` elements.
    fn cut(&mut self, n: usize) -> WeightSlices<'a> {
        match self {
            Self::F32(w) => WeightSlices::F32(cut(w, n)),
            Self::Master(w, low) => WeightSlices::Master(cut(w, n), cut(low, n)),
            Self::Stochastic(w, rng) => WeightSlices::Stochastic(cut(w, n), *rng),
        }
    }
}

impl<'a> MomentSlices<'a> {
    fn cut(&mut self, n: usize) -> MomentSlices<'a> {
        match self {
            Self::None => MomentSlices::None,
            Self::F32(m) => MomentSlices::F32(cut(m, n)),
            Self::Int8(codes, most, code) => MomentSlices::Int8(cut(codes, n), cut(most, n.div_ceil(BLOCK)), code),
        }
    }

    /// Returns elements `at..at + n`, in place or dequantized into `buffer`.
    fn values<'b>(&'b mut self, at: usize, n: usize, buffer: &'b mut [f32; BLOCK]) -> &'b mut [f32] {
        match self {
            Self::None => &mut [],
            Self::F32(m) => &mut m[at..at + n],
            Self::Int8(codes, most, code) => {
                code.dequantize(&codes[at..at + n], most[at / BLOCK], &mut buffer[..n]);
                &mut buffer[..n]
            }
        }
    }

    /// Returns a quantized block for the kernels in AVX-512; `None` where those cannot run.
    #[cfg(target_arch = "x86_64")]
    fn block(&mut self, at: usize, n: usize) -> Option<QuantizedBlock<'_>> {
        match self {
            Self::Int8(codes, most, table) if CpuBackend::current().vector_isa() == Some(VectorIsa::Avx512) => {
                Some(QuantizedBlock {
                    codes: &mut codes[at..at + n],
                    absmax: &mut most[at / BLOCK],
                    table,
                })
            }
            _ => None,
        }
    }

    /// Requantizes `buffer`, which `values` filled.
    fn store(&mut self, at: usize, n: usize, buffer: &[f32; BLOCK]) {
        if let Self::Int8(codes, most, code) = self {
            most[at / BLOCK] = code.quantize(&buffer[..n], &mut codes[at..at + n]);
        }
    }
}

struct UpdateTask<'a> {
    first: usize,
    weight: WeightSlices<'a>,
    gradient: &'a [f32],
    m: MomentSlices<'a>,
    v: MomentSlices<'a>,
}

/// Updates elements of one parameter, from `position` on. All slices have the length of `gradient`; a moment that the
/// rule does not use is `MomentSlices::None`.
pub(crate) fn run(
    rule: &PreparedRule,
    position: usize,
    mut weight: WeightSlices,
    gradient: &[f32],
    mut m: MomentSlices,
    mut v: MomentSlices,
) {
    let tasks: Vec<UpdateTask> = gradient
        .chunks(CHUNK)
        .enumerate()
        .map(|(i, gradient)| UpdateTask {
            first: position + i * CHUNK,
            weight: weight.cut(gradient.len()),
            gradient,
            m: m.cut(gradient.len()),
            v: v.cut(gradient.len()),
        })
        .collect();
    tasks.into_par_iter().for_each(|task| one(rule, task));
}

fn one(rule: &PreparedRule, mut task: UpdateTask) {
    let mut wide = [0f32; BLOCK];
    let mut moments = MomentBuffers {
        first: [0.0; BLOCK],
        second: [0.0; BLOCK],
    };
    let mut at = 0;
    for g in task.gradient.chunks(BLOCK) {
        let (n, index) = (g.len(), task.first + at);
        let mut update = |w: &mut [f32]| moments.update(rule, index, w, g, (&mut task.m, &mut task.v, at));
        match &mut task.weight {
            WeightSlices::F32(w) => update(&mut w[at..at + n]),
            WeightSlices::Master(high, low) => {
                let (high, low, wide) = (&mut high[at..at + n], &mut low[at..at + n], &mut wide[..n]);
                join(high, low, wide);
                update(wide);
                split(wide, high, low);
            }
            WeightSlices::Stochastic(high, rng) => {
                let (high, wide) = (&mut high[at..at + n], &mut wide[..n]);
                super::math::widen_slice(wide, high);
                update(wide);
                round(rng, index, wide, high);
            }
        }
        at += n;
    }
}

/// Buffers for the dequantized moments of a block.
struct MomentBuffers {
    first: [f32; BLOCK],
    second: [f32; BLOCK],
}

impl MomentBuffers {
    /// Updates a block of weights and its moments, which begin at element `at` of `m` and `v`. `index`: of the first weight in its
    /// parameter.
    fn update<'a>(
        &mut self,
        rule: &PreparedRule,
        index: usize,
        w: &mut [f32],
        g: &[f32],
        (m, v, at): (&mut MomentSlices<'a>, &mut MomentSlices<'a>, usize),
    ) {
        let n = g.len();
        #[cfg(target_arch = "x86_64")]
        if let (PreparedRule::Adamw(rule), Some(m), Some(v)) = (rule, m.block(at, n), v.block(at, n)) {
            // SAFETY: `block` found the instructions; all slices have n elements, `BLOCK` at most.
            return unsafe { code_avx512::adamw(rule, w, g, [m, v]) };
        }
        apply(
            rule,
            index,
            w,
            g,
            m.values(at, n, &mut self.first),
            v.values(at, n, &mut self.second),
        );
        m.store(at, n, &self.first);
        v.store(at, n, &self.second);
    }
}

fn apply(rule: &PreparedRule, first: usize, w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
    match rule {
        PreparedRule::Adamw(s) => rules::adamw(s, w, g, m, v),
        PreparedRule::Sgd(s) if m.is_empty() => rules::sgd(s, w, g),
        PreparedRule::Sgd(s) => rules::momentum(s, w, g, m),
        PreparedRule::Lion(s) => rules::lion(s, w, g, m),
        PreparedRule::Sign(lr) => rules::descend(*lr, w, g),
        PreparedRule::Adafactor(d) => adafactor::apply(d, first, w, g),
    }
}

#[inline(always)]
fn join_body<const FMA: bool>(high: &[bf16], low: &[i16], wide: &mut [f32]) {
    for ((x, h), l) in wide.iter_mut().zip(high).zip(low) {
        *x = master::join(*h, *l as u16);
    }
}
vectorized!(fn join(high: &[bf16], low: &[i16], wide: &mut [f32]) = join_body);

#[inline(always)]
fn split_body<const FMA: bool>(wide: &[f32], high: &mut [bf16], low: &mut [i16]) {
    for ((x, h), l) in wide.iter().zip(high).zip(low) {
        let halves = master::split(*x);
        (*h, *l) = (halves.0, halves.1 as i16);
    }
}
vectorized!(pub(crate) fn split(wide: &[f32], high: &mut [bf16], low: &mut [i16]) = split_body);

/// Rounds at most `BLOCK` elements stochastically; the first has index `first` in the parameter, a multiple of 4.
#[inline(always)]
fn round_body<const FMA: bool>(rng: &Rng, first: usize, wide: &[f32], high: &mut [bf16]) {
    // Whole draws first: this loop becomes vector instructions.
    let mut draws = [0u64; BLOCK / 4];
    for (i, draw) in draws[..wide.len().div_ceil(4)].iter_mut().enumerate() {
        *draw = rng.bits((first / 4 + i) as u64);
    }
    let mut lanes = [0u16; BLOCK];
    for (draw, lanes) in draws.iter().zip(lanes.as_chunks_mut::<4>().0) {
        *lanes = [*draw, draw >> 16, draw >> 32, draw >> 48].map(|x| x as u16);
    }
    for ((x, h), draw) in wide.iter().zip(high).zip(&lanes) {
        *h = master::round(*x, *draw);
    }
}
vectorized!(fn round(rng: &Rng, first: usize, wide: &[f32], high: &mut [bf16]) = round_body);

#[cfg(test)]
mod tests {
    use super::*;
    use ft_base::rng::Stream;

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_kernel_for_eight_bit_adamw_has_the_bits_of_separate_steps() {
        if !CpuBackend::Avx512.available() {
            return;
        }
        let rng = Rng::new(4, Stream::Init, &[]);
        for n in [1, 15, 16, 17, 255, BLOCK] {
            for round in 0..20u64 {
                let values =
                    |k: u64, size: f32| (0..n as u64).map(move |i| rng.normal(i + 1000 * (k + 4 * round)) * size);
                let mut w: Vec<f32> = values(0, 1.0).collect();
                let mut g: Vec<f32> = values(1, 10f32.powi(-(round as i32))).collect();
                let mut parts =
                    [(&*code::SIGNED, values(2, 0.1)), (&*code::UNSIGNED, values(3, 0.01))].map(|(table, x)| {
                        let x: Vec<f32> = x.map(|x| if table.signed { x } else { x.abs() }).collect();
                        let mut codes = vec![0u8; n];
                        let most = table.quantize(&x, &mut codes);
                        (table, codes, if round == 0 { 0.0 } else { most })
                    });
                match round {
                    0 => g.fill(0.0),
                    1 => g[n / 2] = f32::NAN,
                    2 => g[n / 2] = f32::INFINITY,
                    _ => {}
                }
                let rule = rules::Adamw::new(1e-3, [0.9, 0.999], 1e-8, 0.1, 1 + round, 0.7);
                let mut want_parts = parts.clone();
                let mut want_w = w.clone();
                let [mut m, mut v] = want_parts.each_ref().map(|(table, codes, most)| {
                    let mut x = vec![0f32; n];
                    table.dequantize(codes, *most, &mut x);
                    x
                });
                rules::adamw(&rule, &mut want_w, &g, &mut m, &mut v);
                for ((table, codes, most), x) in want_parts.iter_mut().zip([&m, &v]) {
                    *most = table.quantize(x, codes);
                }
                let moments = parts.each_mut().map(|(table, codes, most)| QuantizedBlock {
                    codes,
                    absmax: most,
                    table,
                });
                // SAFETY: the instructions were detected; the slices have n elements.
                unsafe { code_avx512::adamw(&rule, &mut w, &g, moments) };
                let same = w
                    .iter()
                    .zip(&want_w)
                    .all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan());
                assert!(same, "{n} {round}");
                for ((_, codes, most), (_, want_codes, want_most)) in parts.iter().zip(&want_parts) {
                    assert!(
                        (codes, most.to_bits()) == (want_codes, want_most.to_bits()),
                        "{n} {round}"
                    );
                }
            }
        }
    }

    #[test]
    fn each_element_has_its_own_random_bits() {
        let rng = Rng::new(3, Stream::Init, &[]);
        for n in [1, 3, 4, 255, BLOCK] {
            let first = 8 * n.next_multiple_of(4);
            let wide: Vec<f32> = (0..n as u64).map(|i| rng.normal(i)).collect();
            let mut high = vec![bf16::ZERO; n];
            round(&rng, first, &wide, &mut high);
            for (i, (x, got)) in wide.iter().zip(high).enumerate() {
                let element = first + i;
                let draw = rng.bits(element as u64 / 4) >> (16 * (element % 4));
                assert_eq!(got.to_bits(), master::round(*x, draw as u16).to_bits(), "{n} {i}");
            }
        }
    }
}
