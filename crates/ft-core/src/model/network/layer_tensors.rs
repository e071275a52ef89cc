//! All tensors that a layer reads besides its input, and the same layer over other tensors. So the work of one layer can be
//! recorded once, and done for every layer of the same form (`engine::layer_graphs`).

use super::{Adapters, Network};
use crate::base::Result;
use crate::model::contracts::Param;
use crate::peft::{Adapter, Lora};
use crate::quant::Weight;
use crate::source::{Group, GroupWeights, InMemoryWeights};
use candle_core::Tensor;
use std::sync::Arc;

/// The weights and the LoRA pairs of a layer.
pub(crate) struct LayerTensors {
    layer: usize,
    /// Length of the prefix of its names, `model.layers.0.`.
    prefix: usize,
    /// Handle that keeps the weights' memory from being reused.
    _weights: Arc<GroupWeights>,
    /// The weights, sorted by name.
    dense: Vec<Param>,
    /// By module name.
    pairs: Vec<(String, Lora)>,
}

impl LayerTensors {
    /// Those of layer `layer`. `None`: it has quantized weights, or adapters other than LoRA without dropout.
    ///
    /// # Errors
    /// The source cannot deliver the weights of this layer.
    pub(crate) fn of(network: &Network, layer: usize) -> Result<Option<Self>> {
        let prefix = format!("model.layers.{layer}.");
        let mut pairs = Vec::new();
        let adapters = network.adapters.range(prefix.clone()..);
        for (module, _) in adapters.take_while(|(module, _)| module.starts_with(&prefix)) {
            match network.adapter_of(module).as_deref() {
                Some(Adapter::Lora(pair)) if pair.mask.p == 0.0 => pairs.push((module.clone(), pair.clone())),
                None => {}
                Some(_) => return Ok(None),
            }
        }
        let weights = network.source.fetch_dense(layer)?;
        let mut dense = Vec::new();
        for (name, weight) in weights.iter() {
            let Weight::Dense(tensor) = weight else { return Ok(None) };
            if !name.starts_with(&prefix) {
                return Ok(None);
            }
            dense.push(Param {
                name: name.clone(),
                tensor: tensor.clone(),
            });
        }
        Ok(Some(Self {
            layer,
            prefix: prefix.len(),
            _weights: weights,
            dense,
            pairs,
        }))
    }

    /// The tensors, always in the same order.
    pub(crate) fn tensors(&self) -> Vec<&Tensor> {
        let pairs = self.pairs.iter().flat_map(|(_, pair)| {
            let start = pair.start.iter().flat_map(|(a, b)| [a, b]);
            [&pair.a, &pair.b].into_iter().chain(start)
        });
        self.dense.iter().map(|p| &p.tensor).chain(pairs).collect()
    }

    /// The parameters that can be trained, always in the same order.
    pub(crate) fn params(&self) -> Vec<Param> {
        let pairs = self.pairs.iter().flat_map(|(_, pair)| {
            [(&pair.a_name, &pair.a), (&pair.b_name, &pair.b)].map(|(name, tensor)| Param {
                name: name.clone(),
                tensor: tensor.clone(),
            })
        });
        self.dense.iter().cloned().chain(pairs).collect()
    }

    /// True if the layers have tensors of the same names (within the layer), shapes and types, and the pairs the same factors.
    pub(crate) fn alike(&self, other: &Self) -> bool {
        let same = |a: &Tensor, b: &Tensor| a.dims() == b.dims() && a.dtype() == b.dtype();
        let (ours, theirs) = (self.tensors(), other.tensors());
        self.dense.len() == other.dense.len()
            && self.pairs.len() == other.pairs.len()
            && ours.len() == theirs.len()
            && ours.into_iter().zip(theirs).all(|(a, b)| same(a, b))
            && (self.dense.iter().zip(&other.dense)).all(|(a, b)| a.name[self.prefix..] == b.name[other.prefix..])
            && (self.pairs.iter().zip(&other.pairs)).all(|((module, a), (other_module, b))| {
                module[self.prefix..] == other_module[other.prefix..]
                    && a.scale == b.scale
                    && a.start.is_some() == b.start.is_some()
            })
    }

    /// A network that has this layer only, with `tensors` in the place of its tensors, in the order of `tensors`.
    pub(crate) fn over(&self, network: &Network, tensors: &[Tensor]) -> Network {
        let mut tensors = tensors.iter().cloned();
        let mut next = |old: &Tensor| tensors.next().unwrap_or_else(|| old.clone());
        let mut weights = GroupWeights::default();
        for p in &self.dense {
            weights.insert(p.name.clone(), next(&p.tensor));
        }
        let mut adapters = Adapters::new();
        for (module, pair) in &self.pairs {
            let mut pair = pair.clone();
            (pair.a, pair.b) = (next(&pair.a), next(&pair.b));
            pair.start = pair.start.map(|(a, b)| (next(&a), next(&b)));
            adapters.insert(module.clone(), Arc::new(Adapter::Lora(pair)));
        }
        let source = InMemoryWeights::over(network.source.clone());
        source.set(Group::Layer(self.layer), weights);
        Network {
            spec: network.spec.clone(),
            source: Arc::new(source),
            adapters,
            tokens: Vec::new(),
            objective_params: Vec::new(),
            device: network.device.clone(),
            mlp_tokens: network.mlp_tokens,
            products: network.products,
            adapters_disabled: Default::default(),
            rope_tables: Default::default(),
            scales: Default::default(),
            ones: Default::default(),
            pair_copies: Default::default(),
        }
    }
}
