//! A linear of the model: base weight, bias, adapter.

pub(super) mod memory;

use super::contracts::{Context, GradSink, Param};
use crate::base::Result;
use crate::ops::low_rank::LowRank;
use crate::ops::{linear, update};
use crate::peft::{Adapter, BackwardInput, Dora, FrozenLinear, Lora};
use crate::quant::Weight;
use crate::trace;
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

pub use crate::peft::Dx;

/// y = x·Wᵀ + b, with an adapter or without.
pub struct Linear {
    /// Name of `weight`.
    pub name: Arc<str>,
    /// `[O, I]`; may be quantized while it is frozen.
    pub weight: Weight,
    /// `[O]`
    pub bias: Option<Param>,
    /// The adapter of this linear.
    pub adapter: Option<Arc<Adapter>>,
}

/// The linear without its adapter.
impl FrozenLinear for Linear {
    fn dims(&self) -> (usize, usize) {
        match self.weight.dims()[..] {
            [outputs, inputs] => (outputs, inputs),
            _ => (0, 0),
        }
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.weight.forward(x, self.bias.as_ref().map(|b| &b.tensor))
    }

    fn product(&self, x: &Tensor) -> Result<Tensor> {
        self.weight.forward(x, None)
    }

    fn forward_add(&self, y: &Tensor, x: &Tensor) -> Result<()> {
        self.weight.forward_add(y, x)?;
        match &self.bias {
            Some(bias) => update::add_rows(y, &bias.tensor),
            None => Ok(()),
        }
    }

    fn backward(&self, dy: &Tensor, dx: Dx<'_>) -> Result<Option<Tensor>> {
        Ok(match dx {
            Dx::NotNeeded => None,
            Dx::New => Some(self.weight.backward_input(dy)?),
            Dx::AddTo(sum) => {
                self.weight.backward_input_add(sum, dy)?;
                Some(sum.clone())
            }
        })
    }

    fn forward_with(&self, x: &Tensor, low: LowRank<'_>) -> Result<Tensor> {
        self.weight.forward_with(x, self.bias.as_ref().map(|b| &b.tensor), low)
    }

    fn backward_with(&self, dy: &Tensor, dx: Dx<'_>, low: LowRank<'_>) -> Result<(Tensor, Tensor)> {
        match dx {
            Dx::AddTo(sum) => self.weight.backward_with(dy, Some(sum), low),
            _ => self.weight.backward_with(dy, None, low),
        }
    }

    fn rows(&self, first: usize, n: usize) -> Result<Vec<f32>> {
        self.weight.rows(first, n)
    }
}

impl Linear {
    /// The weight with its adapter, dense, `[O, I]`.
    pub(super) fn whole(&self) -> Result<Tensor> {
        let (outputs, inputs) = self.dims();
        let dense = match self.weight.dense() {
            Ok(weight) => weight.clone(),
            Err(_) => Tensor::from_vec(self.weight.rows(0, outputs)?, (outputs, inputs), &Device::Cpu)?,
        };
        match &self.adapter {
            Some(adapter) => adapter.merged(&dense.to_dtype(DType::F32)?),
            None => Ok(dense),
        }
    }

    /// `x` `[N, I]` to `[N, O]`.
    ///
    /// # Errors
    /// `x` has another width (`Shape`); any error of an observer of the pass.
    pub fn forward(&self, x: &Tensor, ctx: &Context) -> Result<Tensor> {
        ctx.seen(&self.name, x)?;
        let _span = trace::weight("linear", &self.name);
        match &self.adapter {
            Some(adapter) => adapter.forward(self, x, ctx.dropout),
            None => FrozenLinear::forward(self, x),
        }
    }

    /// The LoRA pair, if `Projections` computes it: on a GPU.
    pub(super) fn pair_on_gpu(&self) -> Option<&Lora> {
        let lora = self.adapter.as_ref()?.lora()?;
        let plain = lora.start.is_none() || self.dora().is_none();
        (plain && lora.a.device().is_cuda()).then_some(lora)
    }

    pub(super) fn dora(&self) -> Option<&Dora> {
        match self.adapter.as_deref() {
            Some(Adapter::Dora(dora)) => Some(dora),
            _ => None,
        }
    }

    /// True if any parameter of this linear gets a gradient.
    pub fn wanted(&self, sink: &dyn GradSink) -> bool {
        sink.wants(&self.name) || self.bias.as_ref().is_some_and(|b| sink.wants(&b.name)) || self.adapter_wanted(sink)
    }

    pub(super) fn adapter_wanted(&self, sink: &dyn GradSink) -> bool {
        let wants = |a: &Arc<Adapter>| a.parts().iter().any(|p| sink.wants(&p.name));
        self.adapter.as_ref().is_some_and(wants)
    }

    /// `x` `[N, I]` (needed only if `wanted`), `dy` `[N, O]`; returns `∂x` `[N, I]` if needed. `∂x` is computed before
    /// any gradient is passed to the sink: a sink that updates at once must not change the weight on which `∂x`
    /// depends.
    ///
    /// # Errors
    /// Tensors of other shapes; a sink that cannot take a gradient.
    pub fn backward(
        &self,
        x: Option<&Tensor>,
        dy: &Tensor,
        ctx: &Context,
        dx: Dx<'_>,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        let span = trace::weight("linear backward", &self.name);
        let dx = match &self.adapter {
            None => FrozenLinear::backward(self, dy, dx)?,
            Some(adapter) => {
                let for_gradients = x.filter(|_| self.adapter_wanted(sink));
                let (dx, gradients) = adapter.backward(BackwardInput {
                    base: self,
                    x: for_gradients,
                    dy,
                    dx,
                    dropout: ctx.dropout,
                })?;
                for g in gradients {
                    if sink.wants(&g.param.name) {
                        sink.take(&g.param, g.gradient)?;
                    }
                }
                dx
            }
        };
        drop(span);
        self.own_gradients(x, dy, sink)?;
        Ok(dx)
    }

    /// Passes the gradients of weight and bias to the sink. The gradient of a quantized weight is that of its dequantized
    /// values, and its `Param` has an empty tensor.
    pub(super) fn own_gradients(&self, x: Option<&Tensor>, dy: &Tensor, sink: &mut dyn GradSink) -> Result<()> {
        if let Some(x) = x.filter(|_| sink.wants(&self.name)) {
            let _span = trace::weight("weight gradient", &self.name);
            // A quantized weight has no tensor that a sink could update.
            let tensor = match self.weight.format() {
                None => self.weight.dense()?.clone(),
                Some(_) => Tensor::zeros(0, DType::F32, dy.device())?,
            };
            let param = Param {
                name: self.name.clone(),
                tensor,
            };
            match sink.sum(&self.name) {
                Some(sum) => self.weight.grad_add(&sum, dy, x)?,
                None => sink.take(&param, self.weight.grad(dy, x)?)?,
            }
        }
        if let Some(bias) = self.bias.as_ref().filter(|b| sink.wants(&b.name)) {
            sink.take(bias, linear::grad_bias(dy)?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
