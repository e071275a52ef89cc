//! Reads the weights of one expert when it is computed. They are dropped before those of the next are fetched, so a source
//! with slow storage has two experts of a layer in memory: the current one and the next.

use super::super::contracts::{GradSink, Param};
use super::super::linear::Linear;
use super::super::network::{Adapters, param};
use super::super::projections::Projections;
use super::adapters::JoinedAdapters;
use crate::base::{Error, Result};
use crate::model::spec::ExpertsSpec;
use crate::ops::quantized::Products;
use crate::source::{GroupWeights, WeightSource};
use std::sync::Arc;

/// Reads the experts of a layer.
pub(in crate::model) struct ExpertReader {
    pub source: Arc<dyn WeightSource>,
    pub sizes: ExpertsSpec,
    /// The layer, from 0.
    pub index: usize,
    pub products: Products,
    /// The adapters on linears of experts.
    pub adapters: Adapters,
    /// The adapters on the parameters of all experts.
    pub joined: JoinedAdapters,
}

/// One expert, with its weights on the device.
pub(super) struct Expert {
    /// gate and up.
    pub inputs: Projections,
    pub down: Projections,
    /// `[D]`
    pub down_bias: Option<Param>,
    /// Handle that keeps the weights' memory from being reused.
    _weights: Arc<GroupWeights>,
}

impl ExpertReader {
    /// The layer reads these experts next, in this order.
    pub(super) fn expect(&self, experts: &[usize]) {
        self.source.expect_experts(self.index, experts);
    }

    /// Reads expert `e`.
    pub(super) fn read(&self, e: usize) -> Result<Expert> {
        let weights = self.source.fetch_expert(self.index, e)?;
        let bias = self.sizes.bias;
        let down_bias = bias.then(|| param(&weights, &format!("{}.bias", self.module(e, 2))));
        Ok(Expert {
            inputs: Projections::separate(vec![
                self.linear(&weights, e, 0, bias)?,
                self.linear(&weights, e, 1, bias)?,
            ]),
            down: Projections::separate(vec![self.linear(&weights, e, 2, false)?]),
            down_bias: down_bias.transpose()?,
            _weights: weights,
        })
    }

    /// The linears of expert `e`, each with its module name.
    pub(in crate::model) fn linears(&self, e: usize) -> Result<Vec<(String, Linear)>> {
        let weights = self.source.fetch_expert(self.index, e)?;
        let one = |p| {
            Ok::<_, Error>((
                self.module(e, p),
                self.linear(&weights, e, p, self.sizes.bias && p < 2)?,
            ))
        };
        (0..3).map(one).collect()
    }

    /// The path of projection `projection` of expert `e`.
    fn module(&self, e: usize, projection: usize) -> String {
        format!("model.layers.{}.{}", self.index, self.sizes.linear_name(e, projection))
    }

    fn linear(&self, weights: &GroupWeights, e: usize, projection: usize, bias: bool) -> Result<Linear> {
        let module = self.module(e, projection);
        let bias = bias.then(|| param(weights, &format!("{module}.bias"))).transpose()?;
        let adapter = self.adapters.get(&module).cloned();
        let (name, weight) = weights.weight(&format!("{module}.weight"))?;
        let mut linear = Linear {
            name,
            weight: weight.with_products(self.products),
            bias,
            adapter,
        };
        self.joined.place(&mut linear, e, projection)?;
        Ok(linear)
    }

    /// True if a parameter of expert `e` gets a gradient; without the adapters on the parameters of all experts.
    pub(super) fn wanted(&self, e: usize, sink: &dyn GradSink) -> bool {
        (0..3).any(|projection| {
            let module = self.module(e, projection);
            let adapter = self.adapters.get(&module);
            sink.wants(&format!("{module}.weight"))
                || self.sizes.bias && sink.wants(&format!("{module}.bias"))
                || adapter.is_some_and(|a| a.parts().iter().any(|p| sink.wants(&p.name)))
        })
    }
}
