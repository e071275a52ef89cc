//! A linear of the model: base weight, bias, adapter.

use super::contracts::{Context, GradSink, Param};
use crate::base::Result;
use crate::ops::linear;
use crate::peft::Lora;
use crate::quant::Weight;
use candle_core::Tensor;
use std::sync::Arc;

/// What becomes of `∂x`.
#[derive(Clone, Copy)]
pub enum Dx<'a> {
    NotNeeded,
    New,
    /// Added to this, which is returned: several linears read one input.
    AddTo(&'a Tensor),
}

impl Dx<'_> {
    pub fn new(needed: bool) -> Self {
        if needed { Dx::New } else { Dx::NotNeeded }
    }
}

pub struct Linear {
    /// The name of `weight`.
    pub name: Arc<str>,
    /// `[O, I]`; as codes where it is frozen.
    pub weight: Weight,
    /// `[O]`
    pub bias: Option<Param>,
    pub lora: Option<Arc<Lora>>,
}

impl Linear {
    /// `x` `[N, I]` to `[N, O]`.
    pub fn forward(&self, x: &Tensor, ctx: &Context) -> Result<Tensor> {
        let y = self.weight.forward(x, self.bias.as_ref().map(|b| &b.tensor))?;
        if let Some(lora) = &self.lora {
            lora.add_to(&y, x, ctx.dropout)?;
        }
        Ok(y)
    }

    /// Does anything of this linear get a gradient?
    pub fn wanted(&self, sink: &dyn GradSink) -> bool {
        sink.wants(&self.name)
            || self.bias.as_ref().is_some_and(|b| sink.wants(&b.name))
            || self.lora.as_ref().is_some_and(|l| sink.wants(&l.a_name))
    }

    /// `x` `[N, I]` (needed only where `wanted`), `dy` `[N, O]`; returns `∂x` `[N, I]` where needed. `∂x` is
    /// computed before any gradient reaches the sink: a sink that updates at once must not change the weight
    /// that `∂x` depends on. Errors: a gradient is wanted of a weight that is stored as codes.
    pub fn backward(
        &self,
        x: Option<&Tensor>,
        dy: &Tensor,
        ctx: &Context,
        dx: Dx<'_>,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        let dx = match dx {
            Dx::NotNeeded => None,
            Dx::New => Some(self.weight.backward_input(dy)?),
            Dx::AddTo(sum) => {
                self.weight.backward_input_add(sum, dy)?;
                Some(sum.clone())
            }
        };
        if let Some(lora) = &self.lora {
            let for_grads = x.filter(|_| sink.wants(&lora.a_name));
            let needed = for_grads.is_some() || dx.is_some();
            let grads = if needed {
                lora.backward(for_grads, dy, dx.as_ref(), ctx.dropout)?
            } else {
                None
            };
            if let Some(grads) = grads {
                sink.take(
                    &Param {
                        name: lora.a_name.clone(),
                        tensor: lora.a.clone(),
                    },
                    grads.a,
                )?;
                sink.take(
                    &Param {
                        name: lora.b_name.clone(),
                        tensor: lora.b.clone(),
                    },
                    grads.b,
                )?;
            }
        }
        if let Some(x) = x.filter(|_| sink.wants(&self.name)) {
            let param = Param {
                name: self.name.clone(),
                tensor: self.weight.dense().map_err(|e| e.or_at(&*self.name))?.clone(),
            };
            sink.take(&param, self.weight.grad(dy, x)?)?;
        }
        if let Some(bias) = self.bias.as_ref().filter(|b| sink.wants(&b.name)) {
            sink.take(bias, linear::grad_bias(dy)?)?;
        }
        Ok(dx)
    }
}
