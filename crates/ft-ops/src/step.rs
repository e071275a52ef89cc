//! Optimizer updates: the input is a list of parameters with gradients and states; every weight and state is
//! updated in place. One pass over memory; results do not depend on the number of threads.

use super::cpu::step::adafactor::{self, AdafactorUpdate};
use super::cpu::step::code::{self, SIGNED, UNSIGNED};
use super::cpu::step::{self as cpu, PreparedRule, rules};
use super::cpu::storage::{expect_dims, floats};
use super::update::{self, with_mut};
use candle_core::{DType, Device, Tensor};
use ft_base::rng::Rng;
use ft_base::{Error, Result};
use half::{bf16, f16};
use rayon::prelude::*;

/// Elements of an 8-bit moment that share one scale.
pub const BLOCK: usize = code::BLOCK;

/// An update rule. The code of each rule states its source and arithmetic.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum UpdateRule {
    /// Adam with decoupled weight decay.
    Adamw {
        /// Decay of the first and of the second moment.
        betas: [f64; 2],
        /// Added to the root of the second moment.
        eps: f64,
    },
    /// Stochastic gradient descent.
    Sgd {
        /// Decay of the momentum; 0: no momentum, no state.
        momentum: f64,
    },
    /// The sign of an interpolated momentum.
    Lion {
        /// Factor of the momentum in the update, and its decay.
        betas: [f64; 2],
    },
    /// Factored second moments.
    Adafactor,
    /// Sign descent: against the sign of the gradient; no state, no decay.
    Sign,
}

/// A moment of one parameter of n elements.
#[derive(Debug, Clone)]
pub enum Moment {
    /// f32 `[n]`.
    F32(Tensor),
    /// Quantized data u8 `[n]`, scales f32 `[n / BLOCK]`, rounded up.
    Int8 {
        /// u8 `[n]`
        codes: Tensor,
        /// f32 `[n / BLOCK]`, rounded up
        scales: Tensor,
    },
}

impl Moment {
    /// Returns a moment of zeros.
    ///
    /// # Errors
    /// Not enough memory on the device.
    pub fn zeros(n: usize, int8: bool, device: &Device) -> Result<Self> {
        Ok(if int8 {
            Self::Int8 {
                codes: update::zeros(n, DType::U8, device)?,
                scales: update::zeros(n.div_ceil(BLOCK), DType::F32, device)?,
            }
        } else {
            Self::F32(update::zeros(n, DType::F32, device)?)
        })
    }

    /// Returns the bytes of `n` elements.
    pub fn bytes(n: usize, int8: bool) -> u64 {
        if int8 {
            (n + 4 * n.div_ceil(BLOCK)) as u64
        } else {
            4 * n as u64
        }
    }
}

/// How a weight keeps updates that are smaller than its last bit. T: how a tensor is stored.
#[derive(Debug, Clone, Copy)]
pub enum Precision<T> {
    /// f32: nothing more is needed.
    Whole,
    /// bf16: the low 16 bits of its fp32 master, i16 `[n]` (see `ops::master`).
    Master(T),
    /// bf16 with stochastic rounding by these random numbers; element `e` uses bits `16·(e % 4)..` of number `e / 4`.
    Stochastic(Rng),
}

impl Precision<Tensor> {
    /// The same with references.
    pub fn as_ref(&self) -> Precision<&Tensor> {
        match self {
            Precision::Whole => Precision::Whole,
            Precision::Master(low) => Precision::Master(low),
            Precision::Stochastic(rng) => Precision::Stochastic(*rng),
        }
    }
}

/// One parameter of a list. Tensors are contiguous and on one device.
#[derive(Debug, Clone, Copy)]
pub struct ParameterStep<'a> {
    /// f32, bf16 or f16, n elements.
    pub weight: &'a Tensor,
    /// How the weight keeps small updates.
    pub precision: Precision<&'a Tensor>,
    /// f32, the shape of `weight`.
    pub gradient: &'a Tensor,
    /// AdamW, Lion, SGD with momentum: the first moment. Adafactor: row means f32 `[R]` of a matrix `[R, C]`.
    pub first: Option<&'a Moment>,
    /// AdamW: the second moment. Adafactor: column means f32 `[C]` of a matrix, the whole `[n]` of a vector.
    pub second: Option<&'a Moment>,
    /// Learning rate.
    pub lr: f64,
    /// Decoupled weight decay, as a fraction of the weight per unit of learning rate.
    pub weight_decay: f64,
    /// Number of updates of this parameter, including this one.
    pub step: u64,
    /// Elements of the parameter before those of `weight`: 0, or a multiple of the elements that stay together
    /// (`comm::QUANTUM`). Then the tensors hold a part of the parameter, and its bits are those of an update of the whole.
    pub begin: usize,
}

/// The `found_inf` guard: values that stay on a device, so that a step needs no synchronization.
#[derive(Debug, Clone, Copy, Default)]
pub struct FoundInf<'a> {
    /// f32 `[1]`: an additional factor of all gradients.
    pub coefficient: Option<&'a Tensor>,
    /// f64 `[n]`: the step is skipped if one of them is not finite.
    pub finite: Option<&'a Tensor>,
}

/// Updates every parameter of the list. `coefficient` is the factor of all gradients (clipping).
///
/// # Errors
/// A tensor whose size, type or device does not match its weight; a part of a parameter with Adafactor, whose means are
/// sums over the whole.
pub fn step(rule: UpdateRule, items: &[ParameterStep], coefficient: f32) -> Result<()> {
    step_gated(rule, items, coefficient, FoundInf::default())
}

/// As `step`; on a GPU in one launch without synchronization. A step that the guard skips still counts as a step of
/// the state.
///
/// # Errors
/// Tensors of an item that do not fit (`Shape`); Adafactor for a part of a parameter (`Unsupported`).
pub fn step_gated(rule: UpdateRule, items: &[ParameterStep], coefficient: f32, gate: FoundInf) -> Result<()> {
    let Some(first) = items.first() else {
        return Ok(());
    };
    if rule == UpdateRule::Adafactor && items.iter().any(|item| item.begin > 0) {
        return Err(Error::unsupported("Adafactor updates whole parameters only"));
    }
    on_gpu!(first.weight, super::cuda::step::run(rule, items, coefficient, gate));
    let finite = match gate.finite {
        Some(t) => t.to_vec1::<f64>()?.iter().all(|x| x.is_finite()),
        None => true,
    };
    let further = match gate.coefficient {
        Some(t) => t.to_vec1::<f32>()?.iter().product(),
        None => 1.0,
    };
    if !finite {
        return Ok(());
    }
    items.iter().try_for_each(|item| one(rule, item, coefficient * further))
}

fn one(rule: UpdateRule, item: &ParameterStep, coefficient: f32) -> Result<()> {
    expect_dims(item.gradient, "a gradient", item.weight.dims())?;
    let (lr, decay) = (item.lr, item.weight_decay);
    floats(item.gradient, "a gradient", |g| {
        let ready = match rule {
            UpdateRule::Adamw { betas, eps } => {
                PreparedRule::Adamw(rules::Adamw::new(lr, betas, eps, decay, item.step, coefficient))
            }
            UpdateRule::Sgd { momentum } => PreparedRule::Sgd(rules::Sgd {
                lr: lr as f32,
                momentum: momentum as f32,
                weight_decay: decay as f32,
                first: item.step == 1,
                coefficient,
            }),
            UpdateRule::Lion { betas: [b1, b2] } => PreparedRule::Lion(rules::Lion {
                lr: lr as f32,
                keep: (1.0 - lr * decay) as f32,
                b1: b1 as f32,
                b2: b2 as f32,
                coefficient,
            }),
            UpdateRule::Sign => PreparedRule::Sign(lr as f32),
            UpdateRule::Adafactor => PreparedRule::Adafactor(factored(item, g, coefficient)?),
        };
        // The means of Adafactor are already updated; the pass over the weight needs no moments.
        let kept = |moment| if rule == UpdateRule::Adafactor { None } else { moment };
        let (first, second) = (kept(item.first), kept(item.second));
        let wanted = match rule {
            UpdateRule::Adamw { .. } => (true, true),
            UpdateRule::Sgd { momentum } => (momentum != 0.0, false),
            UpdateRule::Lion { .. } => (true, false),
            UpdateRule::Sign | UpdateRule::Adafactor => (false, false),
        };
        if (first.is_some(), second.is_some()) != wanted {
            return Err(Error::shape("an optimizer state has the wrong parts"));
        }
        let n = g.len();
        with_moment(first, &SIGNED, n, |m| {
            with_moment(second, &UNSIGNED, n, |v| {
                with_weight(item, |w| {
                    cpu::run(&ready, item.begin, w, g, m, v);
                    Ok(())
                })
            })
        })
    })
}

fn factored(item: &ParameterStep, g: &[f32], coefficient: f32) -> Result<AdafactorUpdate> {
    let (lr, decay, t) = (item.lr, item.weight_decay, item.step);
    match (item.first, item.second, item.weight.dims()) {
        (Some(Moment::F32(rows)), Some(Moment::F32(columns)), &[r, c]) => {
            expect_dims(rows, "an optimizer state", &[r])?;
            expect_dims(columns, "an optimizer state", &[c])?;
            with_mut(rows, |rows: &mut [f32]| {
                with_mut(columns, |columns: &mut [f32]| {
                    adafactor::matrix(g, rows, columns, lr, decay, t, coefficient)
                })
            })?
        }
        (None, Some(Moment::F32(v)), _) => {
            expect_dims(v, "an optimizer state", &[g.len()])?;
            with_mut(v, |v: &mut [f32]| adafactor::vector(g, v, lr, decay, t, coefficient))
        }
        _ => Err(Error::shape("an optimizer state has the wrong parts")),
    }
}

fn with_moment(
    moment: Option<&Moment>,
    code: &'static code::QuantizationTable,
    n: usize,
    f: impl FnOnce(cpu::MomentSlices) -> Result<()>,
) -> Result<()> {
    match moment {
        None => f(cpu::MomentSlices::None),
        Some(Moment::F32(m)) => {
            expect_dims(m, "an optimizer state", &[n])?;
            with_mut(m, |m: &mut [f32]| f(cpu::MomentSlices::F32(m)))?
        }
        Some(Moment::Int8 { codes, scales }) => {
            expect_dims(codes, "an optimizer state", &[n])?;
            expect_dims(scales, "an optimizer state", &[n.div_ceil(BLOCK)])?;
            with_mut(codes, |codes: &mut [u8]| {
                with_mut(scales, |scales: &mut [f32]| {
                    f(cpu::MomentSlices::Int8(codes, scales, code))
                })?
            })?
        }
    }
}

fn with_weight(item: &ParameterStep, f: impl FnOnce(cpu::WeightSlices) -> Result<()>) -> Result<()> {
    match item.precision {
        Precision::Whole => with_mut(item.weight, |w: &mut [f32]| f(cpu::WeightSlices::F32(w)))?,
        Precision::Master(low) => {
            expect_dims(low, "the low 16 bits of a master weight", &[item.weight.elem_count()])?;
            with_mut(item.weight, |w: &mut [bf16]| {
                with_mut(low, |low: &mut [i16]| f(cpu::WeightSlices::Master(w, low)))?
            })?
        }
        Precision::Stochastic(rng) => with_mut(item.weight, |w: &mut [bf16]| f(cpu::WeightSlices::Stochastic(w, rng)))?,
    }
}

/// Splits f32 values into a bf16 weight and its low 16 bits (i16 `[n]`), without loss; or an f16 weight (`master::split_f16`).
///
/// # Errors
/// Tensors of different sizes or of another type (`Shape`).
pub fn split(values: &[f32], weight: &Tensor, low: &Tensor) -> Result<()> {
    if values.len() != weight.elem_count() || values.len() != low.elem_count() {
        return Err(Error::shape("a weight and its values differ in size"));
    }
    on_gpu!(weight, super::cuda::step::split(values, weight, low));
    if weight.dtype() == DType::F16 {
        return with_mut(weight, |w: &mut [f16]| {
            with_mut(low, |low: &mut [i16]| {
                for ((w, low), x) in w.iter_mut().zip(low).zip(values) {
                    let (high, rest) = super::master::split_f16(*x);
                    (*w, *low) = (high, rest as i16);
                }
            })
        })?;
    }
    with_mut(weight, |w: &mut [bf16]| {
        with_mut(low, |low: &mut [i16]| cpu::split(values, w, low))
    })?
}

/// Returns the exact f32 values of a bf16 or f16 weight and its low 16 bits, an i16 tensor of as many elements.
///
/// # Errors
/// Tensors of another type (`Shape`).
pub fn join(weight: &Tensor, low: &Tensor) -> Result<Vec<f32>> {
    let low = low.flatten_all()?.to_vec1::<i16>()?;
    let weight = weight.to_device(&Device::Cpu)?.flatten_all()?;
    match weight.dtype() {
        DType::F16 => update::with_f16(&weight, |high| joined(high, &low, super::master::join_f16)),
        _ => update::with_bf16(&weight, |high| joined(high, &low, super::master::join)),
    }
}

fn joined<T: Copy + Sync>(high: &[T], low: &[i16], join: impl Fn(T, u16) -> f32 + Sync) -> Vec<f32> {
    const CHUNK: usize = 1 << 14;
    let mut out = vec![0f32; high.len()];
    out.par_chunks_mut(CHUNK)
        .zip(high.par_chunks(CHUNK).zip(low.par_chunks(CHUNK)))
        .for_each(|(out, (high, low))| {
            for (out, (high, low)) in out.iter_mut().zip(high.iter().zip(low)) {
                *out = join(*high, *low as u16);
            }
        });
    out
}

/// Returns the table of the 8-bit quantization: signed for first moments, unsigned for second ones.
pub fn code_table(signed: bool) -> [f32; 256] {
    if signed { SIGNED.values } else { UNSIGNED.values }
}

/// Quantizes `values` in blocks of `BLOCK`: returns the quantized data and the scales.
pub fn quantize_moment(values: &[f32], signed: bool) -> (Vec<u8>, Vec<f32>) {
    let code: &code::QuantizationTable = if signed { &SIGNED } else { &UNSIGNED };
    let mut codes = vec![0u8; values.len()];
    let scales = values
        .chunks(BLOCK)
        .zip(codes.chunks_mut(BLOCK))
        .map(|(x, c)| code.quantize(x, c))
        .collect();
    (codes, scales)
}

#[cfg(test)]
mod tests;
