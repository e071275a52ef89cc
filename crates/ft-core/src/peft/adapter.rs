//! An adapter of any kind: the trait of all kinds, and the one `match` over them.
//!
//! Letters: N tokens, I input features, O output features, R rank.

use super::frozen::{Dx, FrozenLinear};
use super::{Adalora, Dora, ExpertLora, Ia3, Loha, Lokr, Lora, Oft, Vera};
use crate::base::Result;
use candle_core::{Device, Tensor};
use std::sync::Arc;

/// Key of the dropout masks of one micro-batch.
#[derive(Debug, Clone, Copy)]
pub struct DropoutKey {
    /// Seed of the run.
    pub seed: u64,
    /// The optimizer step, from 1.
    pub step: u64,
    /// Index of the micro-batch in the step.
    pub micro: u64,
}

/// A named tensor: a weight of a model, or a part of an adapter (f32).
#[derive(Debug, Clone)]
pub struct Param {
    /// For example `model.layers.0.self_attn.q_proj.lora_A.weight`; a PEFT file adds the prefix `base_model.model.`.
    pub name: Arc<str>,
    /// The values, f32.
    pub tensor: Tensor,
}

impl Param {
    /// The tensor `below` the module of an adapter.
    pub fn new(module: &str, below: &str, tensor: Tensor) -> Self {
        Self {
            name: format!("{module}.{below}").into(),
            tensor,
        }
    }
}

/// The gradient of a parameter, in its shape.
#[derive(Debug)]
pub struct ParamGradient {
    /// The parameter.
    pub param: Param,
    /// f32, in the shape of the parameter.
    pub gradient: Tensor,
}

/// Inputs of a backward pass through a linear with its adapter.
pub struct BackwardInput<'a> {
    /// The linear without the adapter.
    pub base: &'a dyn FrozenLinear,
    /// `[N, I]`: present if gradients of the adapter are needed.
    pub x: Option<&'a Tensor>,
    /// `[N, O]`
    pub dy: &'a Tensor,
    /// Where the input gradient goes.
    pub dx: Dx<'a>,
    /// The key of the dropout mask in the forward pass.
    pub dropout: Option<DropoutKey>,
}

/// `∂x` `[N, I]`, if it is needed, and the gradients of the trained parts, if `x` is present.
pub type BackwardOutput = (Option<Tensor>, Vec<ParamGradient>);

/// The sizes of a new adapter.
#[derive(Debug, Clone, Copy)]
pub struct AdapterShape {
    /// R: the rank.
    pub rank: usize,
    /// I: input features of the linear.
    pub input: usize,
    /// O: output features of the linear.
    pub output: usize,
}

/// Memory of an adapter beside its linear, for the planner.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AdapterCost {
    /// Name and shape of every trained part.
    pub trained: Vec<(Arc<str>, Vec<usize>)>,
    /// Elements that are stored and not trained.
    pub fixed: u64,
    /// R of a low-rank update that is applied as two thin products; 0 for other kinds.
    pub rank: usize,
    /// Temporary elements of forward and backward: per token, and in total.
    pub per_token: u64,
    /// Temporary elements in total.
    pub whole: u64,
    /// True if it multiplies f32 matrices with W: on a GPU with dropout a bf16 W is then widened, block by block.
    pub widens: bool,
}

/// Operations of every adapter kind.
pub(super) trait AdapterMethod {
    /// The trained tensors, in file order.
    fn parts(&self) -> Vec<Param>;

    /// Maps `x` `[N, I]` to the output of the linear with the adapter, `[N, O]`.
    fn forward(&self, base: &dyn FrozenLinear, x: &Tensor, dropout: Option<DropoutKey>) -> Result<Tensor>;

    fn backward(&self, b: BackwardInput<'_>) -> Result<BackwardOutput>;

    /// W `[O, I]` with the adapter merged, f32 on the CPU.
    fn merged(&self, w: &Tensor) -> Result<Tensor>;

    /// The bias `[O]` with the adapter merged; only some kinds change it.
    fn merged_bias(&self, bias: &Tensor) -> Result<Tensor> {
        Ok(bias.clone())
    }

    /// The memory; `trained` is left empty.
    fn cost(&self) -> AdapterCost;
}

/// One adapter: of one linear, or of a parameter with the matrices of all experts.
#[derive(Debug, Clone)]
pub enum Adapter {
    /// A low-rank pair.
    Lora(Lora),
    /// A LoRA with a trained magnitude.
    Dora(Dora),
    /// A factor per feature.
    Ia3(Ia3),
    /// Two vectors around a shared random pair.
    Vera(Vera),
    /// An elementwise product of two low-rank products.
    Loha(Loha),
    /// A Kronecker product.
    Lokr(Lokr),
    /// A rotation of the input.
    Oft(Oft),
    /// A LoRA with singular values that are pruned.
    Adalora(Adalora),
    /// The low-rank pairs of all experts of a layer on one parameter.
    Experts(ExpertLora),
}

impl Adapter {
    fn method(&self) -> &dyn AdapterMethod {
        match self {
            Self::Lora(k) => k,
            Self::Dora(k) => k,
            Self::Ia3(k) => k,
            Self::Vera(k) => k,
            Self::Loha(k) => k,
            Self::Lokr(k) => k,
            Self::Oft(k) => k,
            Self::Adalora(k) => k,
            Self::Experts(k) => k,
        }
    }

    /// The trained tensors.
    pub fn parts(&self) -> Vec<Param> {
        self.method().parts()
    }

    /// Tensors that a resumed run needs: the trained ones, and the first pair if its product is subtracted.
    pub fn saved(&self) -> Vec<Param> {
        let mut all = self.parts();
        if let Some(lora) = self.lora() {
            all.extend(lora.start_parts());
        }
        all
    }

    /// Maps `x` `[N, I]` to the output of the linear with the adapter, `[N, O]`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn forward(&self, base: &dyn FrozenLinear, x: &Tensor, dropout: Option<DropoutKey>) -> Result<Tensor> {
        self.method().forward(base, x, dropout)
    }

    /// Backward pass through linear and adapter; `∂x` is computed before any gradient is returned.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn backward(&self, b: BackwardInput<'_>) -> Result<BackwardOutput> {
        self.method().backward(b)
    }

    /// W `[O, I]` with the adapter merged, f32 on the CPU.
    ///
    /// # Errors
    /// A weight that does not fit the adapter (`Shape`); an adapter whose update cannot be computed.
    pub fn merged(&self, w: &Tensor) -> Result<Tensor> {
        self.method().merged(w)
    }

    /// The bias `[O]` with the adapter merged.
    ///
    /// # Errors
    /// As for `merged`.
    pub fn merged_bias(&self, bias: &Tensor) -> Result<Tensor> {
        self.method().merged_bias(bias)
    }

    /// Parameters and temporary memory, for the memory forecast.
    pub fn cost(&self) -> AdapterCost {
        let trained = self.parts().into_iter();
        AdapterCost {
            trained: trained.map(|p| (p.name, p.tensor.dims().to_vec())).collect(),
            ..self.method().cost()
        }
    }

    /// A copy of the adapter on this device.
    ///
    /// # Errors
    /// Not enough memory on the device.
    pub fn on(&self, device: &Device) -> Result<Self> {
        let to = |t: &mut Tensor| -> Result<()> {
            *t = t.to_device(device)?;
            Ok(())
        };
        let lora = |l: &mut Lora| -> Result<()> {
            to(&mut l.a)?;
            to(&mut l.b)?;
            match &mut l.start {
                Some((a, b)) => to(a).and_then(|()| to(b)),
                None => Ok(()),
            }
        };
        let mut own = self.clone();
        match &mut own {
            Self::Lora(k) => lora(k)?,
            Self::Dora(k) => {
                lora(&mut k.lora)?;
                to(&mut k.magnitude)?;
            }
            Self::Ia3(k) => to(&mut k.factors.tensor)?,
            Self::Vera(k) => {
                for t in [
                    &mut k.shared.a,
                    &mut k.shared.b,
                    &mut k.lambda_b.tensor,
                    &mut k.lambda_d.tensor,
                ] {
                    to(t)?;
                }
            }
            Self::Loha(k) => k.factors.iter_mut().try_for_each(|p| to(&mut p.tensor))?,
            Self::Lokr(k) => {
                let both = k.first.parts_mut().into_iter().chain(k.second.parts_mut());
                both.into_iter().try_for_each(|p| to(&mut p.tensor))?;
            }
            Self::Oft(k) => to(&mut k.triangles.tensor)?,
            Self::Adalora(k) => {
                for t in [&mut k.a.tensor, &mut k.b.tensor, &mut k.e.tensor] {
                    to(t)?;
                }
            }
            Self::Experts(k) => {
                to(&mut k.a.tensor)?;
                to(&mut k.b.tensor)?;
            }
        }
        Ok(own)
    }

    /// The LoRA pair, if the kind has one.
    pub fn lora(&self) -> Option<&Lora> {
        match self {
            Self::Lora(lora) => Some(lora),
            Self::Dora(dora) => Some(&dora.lora),
            _ => None,
        }
    }

    /// Number of trained elements.
    pub fn elements(&self) -> usize {
        self.parts().iter().map(|p| p.tensor.elem_count()).sum()
    }
}
