//! A norm of a layer, or the final norm: RMSNorm or LayerNorm, with the parameters that its family has.

use super::contracts::{GradSink, Param};
use super::spec::{NormSpec, Spec};
use crate::base::sync::lock;
use crate::base::{Error, Result};
use crate::ops::layer_norm::{self, LayerNorm};
use crate::ops::{rms_norm, update};
use crate::source::GroupWeights;
use crate::trace;
use candle_core::{Device, Tensor};
use std::collections::BTreeMap;
use std::sync::Mutex;

/// A norm with its parameters on the device.
#[derive(Debug, Clone)]
pub struct Norm {
    /// `[E]`, or `[heads, E]`; OLMo has none.
    pub weight: Option<Param>,
    /// The shape of the weight; of a LayerNorm.
    pub bias: Option<Param>,
    /// The ones that an RMSNorm without a weight multiplies by, `[E]`.
    ones: Option<Tensor>,
    /// E: elements that are normalized together.
    size: usize,
    /// Factor of the output.
    scale: f32,
    /// The epsilon, if it is not that of the model.
    eps: Option<f64>,
}

/// The weights of RMSNorms that have none, `[E]`: made once for each E.
#[derive(Default)]
pub(super) struct UnitWeights(Mutex<BTreeMap<usize, Tensor>>);

impl UnitWeights {
    /// E ones, always the same tensor.
    ///
    /// # Errors
    /// Not enough memory on the device.
    pub(super) fn get(&self, size: usize, device: &Device) -> Result<Tensor> {
        let mut made = lock(&self.0);
        if let Some(ones) = made.get(&size) {
            return Ok(ones.clone());
        }
        let ones = Tensor::full(1f32, size, device)?;
        made.insert(size, ones.clone());
        Ok(ones)
    }
}

impl Norm {
    /// The norm `spec`, whose parameters start with `name`. `ones`: those of an RMSNorm without a weight.
    pub(super) fn read(weights: &GroupWeights, name: &str, spec: &NormSpec, ones: Option<Tensor>) -> Result<Self> {
        let param = |needed: bool, part: &str| {
            if needed {
                let (name, tensor) = weights.get(&format!("{name}.{part}"))?;
                Ok::<_, Error>(Some(Param { name, tensor }))
            } else {
                Ok(None)
            }
        };
        Ok(Self {
            weight: param(spec.weight, "weight")?,
            bias: param(spec.bias, "bias")?,
            ones,
            size: spec.size,
            scale: 1.0,
            eps: spec.eps,
        })
    }

    /// An RMSNorm over E elements without parameters; `ones` `[E]`.
    pub(super) fn plain(ones: Tensor) -> Self {
        Self {
            weight: None,
            bias: None,
            size: ones.elem_count(),
            ones: Some(ones),
            scale: 1.0,
            eps: None,
        }
    }

    /// The norm with a factor of its output.
    pub(super) fn scaled(self, scale: f32) -> Self {
        Self { scale, ..self }
    }

    /// True if a parameter gets a gradient.
    pub fn wanted(&self, sink: &dyn GradSink) -> bool {
        let mut params = self.weight.iter().chain(&self.bias);
        params.any(|p| sink.wants(&p.name))
    }

    /// Added to the mean square, or to the variance.
    fn eps(&self, spec: &Spec) -> f64 {
        self.eps.unwrap_or(spec.norm_eps)
    }

    /// Weight and bias times the factor of the output.
    fn parameters(&self, plus_one: bool) -> Result<[Option<Tensor>; 2]> {
        let times = |param: &Option<Param>, add: f64| match param {
            Some(p) if self.scale != 1.0 => Ok::<_, Error>(Some(p.tensor.affine(f64::from(self.scale), add)?)),
            other => Ok(other.as_ref().map(|p| p.tensor.clone())),
        };
        let add = if plus_one { f64::from(self.scale) - 1.0 } else { 0.0 };
        Ok([times(&self.weight, add)?, times(&self.bias, 0.0)?])
    }

    /// Normalizes x `[N, ·]`.
    pub(super) fn forward(&self, x: &Tensor, spec: &Spec) -> Result<Tensor> {
        self.forward_plus(x, None, spec)
    }

    /// As `forward`, plus what the residual stream carries past the norm.
    pub(super) fn forward_plus(&self, x: &Tensor, past: Option<&Tensor>, spec: &Spec) -> Result<Tensor> {
        let _span = trace::span("norm");
        let [weight, bias] = self.parameters(spec.norm_plus_one)?;
        match (spec.layer_norm, &weight) {
            (Some(_), _) => {
                let y = layer_norm::forward(x, &self.layer_norm(&weight, &bias, spec))?;
                past.map_or(Ok(()), |past| update::add_assign(&y, past))?;
                Ok(y)
            }
            (None, Some(weight)) => rms_norm::forward_plus(x, weight, self.eps(spec), spec.norm_plus_one, past),
            (None, None) => rms_norm::forward_plus(x, &self.ones()?, self.eps(spec), false, past),
        }
    }

    /// Passes the gradients of the parameters to the sink, returns `∂x`.
    pub(crate) fn backward(&self, x: &Tensor, dy: &Tensor, spec: &Spec, sink: &mut dyn GradSink) -> Result<Tensor> {
        self.backward_plus(x, dy, None, spec, sink)
    }

    /// As `backward`, plus the gradient of what the residual stream carries past the norm.
    pub(super) fn backward_plus(
        &self,
        x: &Tensor,
        dy: &Tensor,
        past: Option<&Tensor>,
        spec: &Spec,
        sink: &mut dyn GradSink,
    ) -> Result<Tensor> {
        let _span = trace::span("norm backward");
        let [weight, bias] = self.parameters(spec.norm_plus_one)?;
        let need = [&self.weight, &self.bias].map(|p| p.as_ref().is_some_and(|p| sink.wants(&p.name)));
        let (dx, gradients) = match (spec.layer_norm, &weight) {
            (Some(_), _) => {
                let got = layer_norm::backward(x, &self.layer_norm(&weight, &bias, spec), dy, need)?;
                past.map_or(Ok(()), |past| update::add_assign(&got.dx, past))?;
                (got.dx, [got.dw, got.db])
            }
            (None, Some(weight)) => {
                let (eps, plus_one) = (self.eps(spec), spec.norm_plus_one);
                let (dx, dw) = rms_norm::backward_plus(x, weight, dy, eps, plus_one, need[0], past)?;
                (dx, [dw, None])
            }
            (None, None) => {
                let (dx, _) = rms_norm::backward_plus(x, &self.ones()?, dy, self.eps(spec), false, false, past)?;
                (dx, [None, None])
            }
        };
        for (param, gradient) in [&self.weight, &self.bias].into_iter().zip(gradients) {
            if let (Some(param), Some(gradient)) = (param, gradient) {
                if self.scale != 1.0 {
                    update::scale_assign(&gradient, self.scale)?;
                }
                sink.take(param, gradient)?;
            }
        }
        Ok(dx)
    }

    /// The weight of an RMSNorm that has none, with the factor of the output.
    fn ones(&self) -> Result<Tensor> {
        match &self.ones {
            Some(ones) if self.scale != 1.0 => Ok((ones * f64::from(self.scale))?),
            Some(ones) => Ok(ones.clone()),
            None => Err(Error::internal("an RMSNorm has no weight")),
        }
    }

    fn layer_norm<'a>(&self, weight: &'a Option<Tensor>, bias: &'a Option<Tensor>, spec: &Spec) -> LayerNorm<'a> {
        LayerNorm {
            size: self.size,
            weight: weight.as_ref(),
            bias: bias.as_ref(),
            eps: self.eps(spec),
            plus_one: spec.norm_plus_one,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::config::Config;
    use crate::model::{Network, families};
    use crate::ops::Dtype;
    use crate::source::ResidentWeights;
    use serde_json::json;
    use std::path::Path;
    use std::sync::Arc;

    /// The ones of the norms that a layer, the embedding and the end of a model have.
    fn ones_of(network: &Network, layer: usize) -> Vec<Tensor> {
        let block = network.block(layer).unwrap();
        let final_norm = network.final_norm().unwrap();
        let norms = [
            &block.input_norm,
            &block.mlp_norm,
            &block.q_norm,
            &block.k_norm,
            &block.value_norm,
        ];
        let norms = norms.into_iter().flatten().chain([&final_norm]);
        norms.filter_map(|norm| norm.ones.clone()).collect()
    }

    #[test]
    fn the_ones_of_norms_without_weights_are_made_once() {
        let sizes = json!({
            "vocab_size": 32, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 64});
        for (model_type, count) in [("nanochat", 5), ("gemma4_text", 1), ("llama", 0)] {
            let mut map = sizes.as_object().unwrap().clone();
            map.insert("model_type".into(), json!(model_type));
            map.insert("layer_types".into(), json!(vec!["full_attention"; 2]));
            let spec = families::read(&Config::from_map(map, Path::new("config.json"))).unwrap();
            let source = ResidentWeights::random(spec.params(), 5, 0.3, 0.8, Dtype::F32, &Device::Cpu).unwrap();
            let network = Network::new(spec, Arc::new(source), Device::Cpu);
            let first = ones_of(&network, 0);
            assert_eq!(first.len(), count, "{model_type}");
            for (a, b) in first.iter().zip(ones_of(&network, 1)) {
                assert_eq!(a.id(), b.id(), "{model_type}");
            }
        }
    }
}
