//! Where the values of a model come from: files, or a generator of random numbers. Any range of them can be read.

use crate::base::Result;
use crate::formats::weights::Weights;
use crate::ops::Dtype;
use crate::quant::{Format, StorageDtype, Weight};
use crate::source::requantize::quantize;
use crate::source::resident::{RandomWeights, check_finite, draw, draw_tensor, read, read_dense};
use crate::source::{ParamInfo, stored};
use candle_core::{Device, Tensor};
use half::{bf16, f16};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The values of all parameters of a model.
pub enum WeightOrigin {
    /// Model files.
    Files(Arc<Weights>),
    /// Random weights, as `ResidentWeights::random`.
    Random {
        /// The distribution.
        random: RandomWeights,
        /// Positions of the parameters in the model, from 1 on.
        index: BTreeMap<Arc<str>, u64>,
    },
}

impl WeightOrigin {
    /// Random weights of these parameters, all of the model.
    pub fn random(params: &[ParamInfo], random: RandomWeights) -> Self {
        let index = params.iter().map(|p| p.name.clone()).zip(1..).collect();
        Self::Random { random, index }
    }

    /// A parameter as it is stored while it is frozen.
    pub(super) fn weight(&self, p: &ParamInfo, storage: StorageDtype) -> Result<Weight> {
        match (self, storage) {
            (Self::Files(weights), storage) => read(weights, p, storage, &Device::Cpu),
            (_, StorageDtype::Dense(dtype)) => Ok(self.values(p, dtype)?.into()),
            (Self::Random { random, index }, StorageDtype::Quantized(format, dequantized_dtype)) => {
                let values = draw(p, position(index, p), 0..p.elements(), *random);
                Ok(quantize(&values, p, format, dequantized_dtype)?.into())
            }
        }
    }

    /// The format in which a parameter is stored while it is frozen, and the type of its dequantized values; `None`: not quantized.
    pub(super) fn format(&self, p: &ParamInfo, storage: StorageDtype) -> Result<Option<(Format, Dtype)>> {
        let (StorageDtype::Dense(dequantized_dtype) | StorageDtype::Quantized(_, dequantized_dtype)) = storage;
        let in_files = match self {
            Self::Files(weights) => stored::find(weights, &p.name)?.map(|(_, format)| format),
            Self::Random { .. } => None,
        };
        let own = match storage {
            StorageDtype::Quantized(format, _) => Some(format),
            StorageDtype::Dense(_) => None,
        };
        Ok(in_files.or(own).map(|format| (format, dequantized_dtype)))
    }

    /// True if the files have this parameter quantized.
    pub(super) fn is_quantized(&self, p: &ParamInfo) -> Result<bool> {
        match self {
            Self::Files(weights) => Ok(stored::find(weights, &p.name)?.is_some()),
            Self::Random { .. } => Ok(false),
        }
    }

    /// All values of a parameter, not quantized.
    pub(super) fn values(&self, p: &ParamInfo, dtype: Dtype) -> Result<Tensor> {
        match self {
            Self::Files(weights) => read_dense(weights, p, dtype, &Device::Cpu),
            Self::Random { random, index } => draw_tensor(p, position(index, p), dtype, *random),
        }
    }

    /// Some values of a parameter, flat; only these are read, unless the files have it quantized.
    pub(super) fn part(&self, p: &ParamInfo, dtype: Dtype, range: &Range<usize>) -> Result<Tensor> {
        let n = range.len();
        match (self, dtype) {
            // Nothing is read of what another rank has.
            (_, Dtype::F32) if n == 0 => Ok(Tensor::from_vec(Vec::<f32>::new(), 0, &Device::Cpu)?),
            (_, Dtype::Bf16) if n == 0 => Ok(Tensor::from_vec(Vec::<bf16>::new(), 0, &Device::Cpu)?),
            (_, Dtype::F16) if n == 0 => Ok(Tensor::from_vec(Vec::<f16>::new(), 0, &Device::Cpu)?),
            (Self::Random { random, index }, _) => {
                let values = draw(p, position(index, p), range.clone(), *random);
                Ok(match dtype {
                    Dtype::F32 => Tensor::from_vec(values, n, &Device::Cpu)?,
                    Dtype::Bf16 => {
                        let values: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
                        Tensor::from_vec(values, n, &Device::Cpu)?
                    }
                    Dtype::F16 => {
                        let values: Vec<f16> = values.into_iter().map(f16::from_f32).collect();
                        Tensor::from_vec(values, n, &Device::Cpu)?
                    }
                })
            }
            (Self::Files(weights), Dtype::F32) if !self.is_quantized(p)? => {
                let mut values = vec![0f32; n];
                weights.read_f32_at(&p.name, range.start, &mut values)?;
                let values = check_finite(values, |x| x.is_finite(), weights, p)?;
                Ok(Tensor::from_vec(values, n, &Device::Cpu)?)
            }
            (Self::Files(weights), Dtype::Bf16) if !self.is_quantized(p)? => {
                let mut values = vec![bf16::ZERO; n];
                weights.read_bf16_at(&p.name, range.start, &mut values)?;
                let values = check_finite(values, |x| x.is_finite(), weights, p)?;
                Ok(Tensor::from_vec(values, n, &Device::Cpu)?)
            }
            // f16 needs the largest value of the whole for its error.
            (Self::Files(_), _) => {
                let all = self.values(p, dtype)?.flatten_all()?;
                // A copy, so that the rest is freed.
                Ok(all.narrow(0, range.start, n)?.force_contiguous()?)
            }
        }
    }
}

fn position(index: &BTreeMap<Arc<str>, u64>, p: &ParamInfo) -> u64 {
    index.get(&p.name).copied().unwrap_or(0)
}
