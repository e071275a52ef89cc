//! Optimizer state of a parameter, for each rule: created, measured, saved and restored.

use super::config::{OptimizerConfig, OptimizerName, StateDtype};
use crate::base::{Error, Result};
use crate::ops::step::{BLOCK, Moment, UpdateRule};
use candle_core::{DType, Device, Tensor};
use std::collections::BTreeMap;

/// Smaller parameters keep f32 moments, as in bitsandbytes: norms and biases are small and sensitive.
const LEAST_FOR_INT8: usize = 4096;

/// The update rule of these settings.
pub(super) fn rule(settings: &OptimizerConfig) -> UpdateRule {
    match settings.name {
        OptimizerName::Adamw => UpdateRule::Adamw {
            betas: settings.betas,
            eps: settings.eps,
        },
        OptimizerName::Sgd => UpdateRule::Sgd {
            momentum: settings.momentum,
        },
        OptimizerName::Lion => UpdateRule::Lion { betas: settings.betas },
        OptimizerName::Adafactor => UpdateRule::Adafactor,
    }
}

/// Lengths of the two moments of a parameter of this shape; `None`: the rule does not use that moment.
fn lengths(settings: &OptimizerConfig, shape: &[usize]) -> (Option<usize>, Option<usize>) {
    let n = shape.iter().product();
    match (settings.name, shape) {
        (OptimizerName::Adamw, _) => (Some(n), Some(n)),
        (OptimizerName::Sgd, _) if settings.momentum == 0.0 => (None, None),
        (OptimizerName::Sgd | OptimizerName::Lion, _) => (Some(n), None),
        (OptimizerName::Adafactor, &[rows, columns]) => (Some(rows), Some(columns)),
        (OptimizerName::Adafactor, _) => (None, Some(n)),
    }
}

fn int8(settings: &OptimizerConfig, shape: &[usize]) -> bool {
    settings.state == StateDtype::Int8
        && settings.name != OptimizerName::Adafactor
        && shape.iter().product::<usize>() >= LEAST_FOR_INT8
}

/// Bytes of the moments of a parameter of this shape.
pub(super) fn bytes(settings: &OptimizerConfig, shape: &[usize]) -> u64 {
    let (first, second) = lengths(settings, shape);
    let int8 = int8(settings, shape);
    [first, second]
        .into_iter()
        .flatten()
        .map(|n| Moment::bytes(n, int8))
        .sum()
}

/// State of one active parameter.
#[derive(Debug, Clone)]
pub(super) struct ParamState {
    /// Number of updates so far.
    pub(super) step: u64,
    /// The run's step of the last update; 0 after a restore.
    pub(super) updated: u64,
    pub(super) first: Option<Moment>,
    pub(super) second: Option<Moment>,
    /// Elements of the whole parameter, if the moments are those of the part of this rank.
    pub(super) part_of: Option<usize>,
}

impl ParamState {
    pub(super) fn fresh(settings: &OptimizerConfig, shape: &[usize], device: &Device) -> Result<Self> {
        let (first, second) = lengths(settings, shape);
        Self::of_lengths(first, second, int8(settings, shape), device)
    }

    /// Of `len` elements of a parameter of this shape. The type of the moments is that of the whole parameter.
    pub(super) fn fresh_part(settings: &OptimizerConfig, shape: &[usize], len: usize, device: &Device) -> Result<Self> {
        let (first, second) = lengths(settings, shape);
        let [first, second] = [first, second].map(|length| length.map(|_| len));
        Ok(Self {
            part_of: Some(shape.iter().product()),
            ..Self::of_lengths(first, second, int8(settings, shape), device)?
        })
    }

    /// Zeros: moments of these lengths.
    fn of_lengths(first: Option<usize>, second: Option<usize>, int8: bool, device: &Device) -> Result<Self> {
        let zeros = |n: Option<usize>| n.map(|n| Moment::zeros(n, int8, device)).transpose();
        Ok(Self {
            step: 0,
            updated: 0,
            first: zeros(first)?,
            second: zeros(second)?,
            part_of: None,
        })
    }

    pub(super) fn bytes(&self) -> u64 {
        let moments = [&self.first, &self.second].into_iter().flatten();
        let tensors = moments.flat_map(|m| match m {
            Moment::F32(t) => vec![t],
            Moment::Int8 { codes, scales } => vec![codes, scales],
        });
        tensors
            .map(|t| (t.elem_count() * t.dtype().size_in_bytes()) as u64)
            .sum()
    }

    /// Its tensors by their names in a checkpoint: `m`, `v`; 8-bit: `m.codes`, `m.scales`, ...
    pub(super) fn parts(&self) -> Vec<(&'static str, Tensor)> {
        let names = [("m", "m.codes", "m.scales"), ("v", "v.codes", "v.scales")];
        let mut parts = Vec::new();
        for (moment, (whole, quantized, scaled)) in [&self.first, &self.second].into_iter().zip(names) {
            match moment {
                None => {}
                Some(Moment::F32(t)) => parts.push((whole, t.clone())),
                Some(Moment::Int8 { codes, scales }) => {
                    parts.extend([(quantized, codes.clone()), (scaled, scales.clone())])
                }
            }
        }
        parts
    }

    /// The inverse of `parts`. Errors: an incomplete 8-bit moment, a wrong type, an unknown name.
    pub(super) fn from_parts(step: u64, mut parts: BTreeMap<String, Tensor>) -> Result<Self> {
        let mut moment = |name: &str| -> Result<Option<Moment>> {
            let quantized = (
                parts.remove(&format!("{name}.codes")),
                parts.remove(&format!("{name}.scales")),
            );
            match (parts.remove(name), quantized) {
                (None, (None, None)) => Ok(None),
                (Some(t), (None, None)) if t.dtype() == DType::F32 => Ok(Some(Moment::F32(t))),
                (None, (Some(codes), Some(scales)))
                    if codes.dtype() == DType::U8
                        && scales.dtype() == DType::F32
                        && scales.elem_count() == codes.elem_count().div_ceil(BLOCK) =>
                {
                    Ok(Some(Moment::Int8 { codes, scales }))
                }
                _ => Err(Error::format("an optimizer state is incomplete").at(name)),
            }
        };
        let (first, second) = (moment("m")?, moment("v")?);
        match parts.into_keys().next() {
            Some(name) => Err(Error::format("an optimizer state has an unknown part").at(name)),
            None => Ok(Self {
                step,
                updated: 0,
                first,
                second,
                part_of: None,
            }),
        }
    }
}
