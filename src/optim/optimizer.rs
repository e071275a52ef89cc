//! Updates of named parameters, with state keyed by name.

use super::{adamw, master, sgd};
use crate::base::{Error, Result};
use crate::ops::update;
use crate::recipe::{self, OptimizerName};
use crate::source::LowerHalves;
use candle_core::{DType, Tensor};
use rayon::prelude::*;
use std::collections::BTreeMap;

const CHUNK: usize = 1 << 14;

/// State of one parameter that is being trained.
#[derive(Debug, Clone, Default, PartialEq)]
struct State {
    step: u64,
    /// AdamW: first moment; SGD with momentum: the buffer.
    m: Vec<f32>,
    /// AdamW: second moment.
    v: Vec<f32>,
}

pub struct Optimizer {
    settings: recipe::Optimizer,
    states: BTreeMap<String, State>,
    /// Lower halves of the f32 masters of bf16 weights: kept when a block retires.
    low: BTreeMap<String, Vec<u16>>,
}

/// One vector of saved state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saved {
    First,
    Second,
    Low,
}

/// What a checkpoint keeps of one parameter.
pub struct SavedState<'a> {
    pub name: &'a str,
    pub step: u64,
    pub m: &'a [f32],
    pub v: &'a [f32],
}

impl Optimizer {
    pub fn new(settings: recipe::Optimizer) -> Self {
        Self {
            settings,
            states: BTreeMap::new(),
            low: BTreeMap::new(),
        }
    }

    /// Bytes of state per trained element beside the weight itself: moments, and the lower half of a bf16 master.
    pub fn bytes_per_element(settings: &recipe::Optimizer, bf16: bool) -> u64 {
        let moments = match settings.name {
            OptimizerName::Sgd if settings.momentum == 0.0 => 0,
            OptimizerName::Sgd => 4,
            _ => 8,
        };
        moments + if bf16 { 2 } else { 0 }
    }

    /// Drops the moments of every parameter but those `keep` names; what a master knows beyond bf16 stays.
    pub fn retire_all_but(&mut self, keep: impl Fn(&str) -> bool) {
        self.states.retain(|name, _| keep(name));
    }

    /// One update of `weight` (f32 or bf16, in place) by `gradient` (f32, same shape) times `coefficient`.
    pub fn update(&mut self, name: &str, weight: &Tensor, gradient: &Tensor, lr: f64, coefficient: f32) -> Result<()> {
        if weight.dims() != gradient.dims() {
            return Err(Error::new("gradient has another shape than its weight")
                .at(name)
                .found(format!("{:?}", gradient.dims()))
                .expected(format!("{:?}", weight.dims())));
        }
        let n = weight.elem_count();
        let weight_decay = if weight.rank() > 1 {
            self.settings.weight_decay
        } else {
            0.0
        };
        let state = match self.states.get_mut(name) {
            Some(state) => state,
            None => self.states.entry(name.to_string()).or_default(),
        };
        state.step += 1;
        let rule = match self.settings.name {
            OptimizerName::Adamw => {
                state.m.resize(n, 0.0);
                state.v.resize(n, 0.0);
                Rule::Adamw(
                    adamw::Step {
                        lr,
                        betas: self.settings.betas,
                        eps: self.settings.eps,
                        weight_decay,
                        step: state.step,
                        coefficient,
                    }
                    .ready(),
                )
            }
            OptimizerName::Sgd => {
                if self.settings.momentum != 0.0 {
                    state.m.resize(n, 0.0);
                }
                Rule::Sgd(sgd::Step {
                    lr: lr as f32,
                    momentum: self.settings.momentum as f32,
                    weight_decay: weight_decay as f32,
                    first: state.step == 1,
                    coefficient,
                })
            }
            other => {
                return Err(Error::usage(format!("optimizer `{}` is not built yet", other.name())).at("optimizer.name"));
            }
        };
        let (m, v) = (&mut state.m, &mut state.v);
        match weight.dtype() {
            DType::F32 => update::with_slice(gradient, |g| {
                update::with_slice_mut(weight, |w| rule.run_f32(w, g, m, v))
            })?,
            DType::BF16 => {
                let low = match self.low.get_mut(name) {
                    Some(low) => low,
                    None => self.low.entry(name.to_string()).or_insert_with(|| vec![0; n]),
                };
                update::with_slice(gradient, |g| {
                    update::store_bf16(weight, |w| rule.run_bf16(w, low, g, m, v))
                })?
            }
            other => Err(Error::new("weight type cannot be trained")
                .at(name)
                .found(format!("{other:?}"))),
        }
    }

    /// The exact f32 values of a trained weight.
    pub fn exact(&self, name: &str, weight: &Tensor) -> Result<Vec<f32>> {
        match (weight.dtype(), self.low.get(name)) {
            (DType::BF16, Some(low)) => {
                let high = weight.flatten_all()?.to_vec1::<half::bf16>()?;
                Ok(high.iter().zip(low).map(|(&h, &l)| master::join(h, l)).collect())
            }
            _ => update::to_f32_vec(weight),
        }
    }

    /// Sets a weight to exact f32 values, as `exact` gave them.
    pub fn restore_weight(&mut self, name: &str, weight: &Tensor, values: &[f32]) -> Result<()> {
        if values.len() != weight.elem_count() {
            return Err(Error::new("saved weight has another size").at(name));
        }
        match weight.dtype() {
            DType::BF16 => {
                let mut low = vec![0u16; values.len()];
                update::store_bf16(weight, |w| {
                    for ((w, l), x) in w.iter_mut().zip(&mut low).zip(values) {
                        (*w, *l) = master::split(*x);
                    }
                })?;
                self.low.insert(name.to_string(), low);
                Ok(())
            }
            _ => update::with_slice_mut(weight, |w| w.copy_from_slice(values)),
        }
    }

    pub fn saved(&self) -> impl Iterator<Item = SavedState<'_>> {
        self.states.iter().map(|(name, s)| SavedState {
            name,
            step: s.step,
            m: &s.m,
            v: &s.v,
        })
    }

    pub fn restore_state(&mut self, name: &str, step: u64, m: Vec<f32>, v: Vec<f32>) {
        self.states.insert(name.to_string(), State { step, m, v });
    }

    /// Bytes held now.
    pub fn bytes(&self) -> u64 {
        let states: usize = self.states.values().map(|s| 4 * (s.m.len() + s.v.len())).sum();
        let low: usize = self.low.values().map(|l| 2 * l.len()).sum();
        (states + low) as u64
    }
}

impl LowerHalves for Optimizer {
    fn put_low(&mut self, name: &str, low: Tensor) {
        if let Ok(low) = low.flatten_all().and_then(|t| t.to_vec1::<i16>()) {
            self.low
                .insert(name.to_string(), low.into_iter().map(|x| x as u16).collect());
        }
    }

    fn take_low(&mut self, name: &str) -> Option<Tensor> {
        let low: Vec<i16> = self.low.remove(name)?.into_iter().map(|x| x as i16).collect();
        let count = low.len();
        Tensor::from_vec(low, count, &candle_core::Device::Cpu).ok()
    }
}

#[derive(Clone, Copy)]
enum Rule {
    Adamw(adamw::Ready),
    Sgd(sgd::Step),
}

impl Rule {
    fn run_f32(self, w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
        match self {
            Rule::Adamw(step) => w
                .par_chunks_mut(CHUNK)
                .zip(g.par_chunks(CHUNK))
                .zip(m.par_chunks_mut(CHUNK).zip(v.par_chunks_mut(CHUNK)))
                .for_each(|((w, g), (m, v))| {
                    for (((w, g), m), v) in w.iter_mut().zip(g).zip(m).zip(v) {
                        *w = step.apply(*w, *g, m, v);
                    }
                }),
            Rule::Sgd(step) if m.is_empty() => w
                .par_chunks_mut(CHUNK)
                .zip(g.par_chunks(CHUNK))
                .for_each(|(w, g)| w.iter_mut().zip(g).for_each(|(w, g)| *w = step.apply(*w, *g, None))),
            Rule::Sgd(step) => w
                .par_chunks_mut(CHUNK)
                .zip(g.par_chunks(CHUNK))
                .zip(m.par_chunks_mut(CHUNK))
                .for_each(|((w, g), m)| {
                    w.iter_mut()
                        .zip(g)
                        .zip(m)
                        .for_each(|((w, g), m)| *w = step.apply(*w, *g, Some(m)))
                }),
        }
    }

    fn run_bf16(self, w: &mut [half::bf16], low: &mut [u16], g: &[f32], m: &mut [f32], v: &mut [f32]) {
        let mut buffer = vec![0f32; 0];
        // One chunk at a time is widened, updated like an f32 weight, and split again.
        buffer.resize(w.len().min(CHUNK * rayon::current_num_threads()), 0.0);
        let width = buffer.len().max(1);
        let empty = |s: &[f32]| s.is_empty();
        for (c, (w, low)) in w.chunks_mut(width).zip(low.chunks_mut(width)).enumerate() {
            let (at, n) = (c * width, w.len());
            let part = &mut buffer[..n];
            for ((x, h), l) in part.iter_mut().zip(w.iter()).zip(low.iter()) {
                *x = master::join(*h, *l);
            }
            let m = if empty(m) { &mut [][..] } else { &mut m[at..at + n] };
            let v = if empty(v) { &mut [][..] } else { &mut v[at..at + n] };
            self.run_f32(part, &g[at..at + n], m, v);
            for ((x, h), l) in part.iter().zip(w.iter_mut()).zip(low.iter_mut()) {
                (*h, *l) = master::split(*x);
            }
        }
    }
}
