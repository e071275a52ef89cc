//! Merges adapters into one weight.

use super::LoadedAdapter;
use crate::base::{Error, Result};
use crate::formats::weights::Weights;
use crate::ops::update;
use crate::source::{ParamInfo, stored};
use candle_core::{Device, Tensor};

/// An adapter and the factor of its update: 1 adds it, -1 subtracts it.
#[derive(Debug, Clone)]
pub struct WeightedAdapter {
    /// The loaded adapter.
    pub adapter: LoadedAdapter,
    /// The factor.
    pub weight: f32,
}

impl WeightedAdapter {
    /// True if the adapter changes this parameter.
    pub fn changes(&self, name: &str) -> bool {
        let held = self.adapter.whole.contains_key(name) || self.adapter.rows.contains_key(name);
        held || self.of(name).is_some()
    }

    fn of(&self, name: &str) -> Option<(&crate::peft::Adapter, bool)> {
        let (module, last) = name.rsplit_once('.')?;
        let own = self.adapter.adapters.get(module);
        let adapter = own.or_else(|| self.adapter.of_experts.get(module))?;
        let bias = last == "bias";
        let scales_bias = matches!(&**adapter, crate::peft::Adapter::Ia3(ia3) if !ia3.feedforward);
        (!bias || scales_bias).then_some((adapter, bias))
    }

    /// The parameter `w` after merging this adapter alone.
    fn after(&self, name: &str, w: &Tensor) -> Result<Option<Tensor>> {
        if let Some(whole) = self.adapter.whole.get(name) {
            return Ok(Some(whole.clone()));
        }
        if let Some((ids, rows)) = self.adapter.rows.get(name) {
            let (mut values, width) = (update::to_f32_vec(w)?, w.dim(1)?);
            for (&id, row) in ids.iter().zip(update::to_f32_vec(rows)?.chunks_exact(width)) {
                values[id as usize * width..][..width].copy_from_slice(row);
            }
            return Ok(Some(Tensor::from_vec(values, w.shape(), &Device::Cpu)?));
        }
        match self.of(name) {
            Some((adapter, true)) => Ok(Some(adapter.merged_bias(w)?)),
            Some((adapter, false)) => Ok(Some(adapter.merged(w)?)),
            None => Ok(None),
        }
    }
}

/// W + Σ weight · (W with the adapter - W), in f32 `[elements]`: each update is relative to the original W.
///
/// # Errors
/// The tensor is missing or has another shape than the parameter or an adapter.
pub fn merged(weights: &Weights, param: &ParamInfo, adapters: &[WeightedAdapter]) -> Result<Vec<f32>> {
    let before = match stored::values(weights, param)? {
        Some(dequantized) => dequantized,
        None => {
            weights.require(&param.name, &param.shape)?;
            weights.read_f32(&param.name)?
        }
    };
    if !adapters.iter().any(|a| a.changes(&param.name)) {
        return Ok(before);
    }
    let w = Tensor::from_vec(before, param.shape.as_slice(), &Device::Cpu)?;
    let mut sum: Option<Tensor> = None;
    for adapter in adapters {
        let Some(after) = adapter.after(&param.name, &w)? else {
            continue;
        };
        if after.dims() != param.shape {
            return Err(Error::shape("adapter has another shape than its weight")
                .at(&param.name)
                .found(format!("{:?}", after.dims()))
                .expected(format!("{:?}", param.shape)));
        }
        sum = Some(match sum {
            None if adapter.weight == 1.0 => after,
            sum => {
                let change = ((after - &w)? * f64::from(adapter.weight))?;
                (sum.unwrap_or_else(|| w.clone()) + change)?
            }
        });
    }
    update::to_f32_vec(&sum.unwrap_or(w))
}
