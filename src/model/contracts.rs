//! Three of the four contracts of the engine: `Layer`, `GradSink`, `Objective` (`LayerSource` stands in
//! `source`), and what is handed from one to the other.

use super::head::Head;
use crate::base::{Error, Result};
use crate::data::Batch;
use crate::ops::attention::Spec;
use crate::ops::tally::Tally;
use crate::peft::Dropout;
use candle_core::Tensor;
use std::sync::Arc;

/// A named weight.
#[derive(Debug, Clone)]
pub struct Param {
    pub name: Arc<str>,
    pub tensor: Tensor,
}

/// What happens to a gradient the moment it exists?
pub trait GradSink {
    /// Is this parameter trained now? If not, its gradient is never computed.
    fn wants(&self, name: &str) -> bool;

    /// Takes the gradient (f32, the parameter's shape). Called after the parameter's last use in this
    /// backward pass, so the sink may change the weight at once.
    fn take(&mut self, param: &Param, gradient: Tensor) -> Result<()>;

    /// The gradient of `name` so far (f32), where it comes in parts and this is not the first: the next part is added
    /// to it in place instead of being handed over.
    fn sum(&self, _name: &str) -> Option<Tensor> {
        None
    }
}

/// Keys and values of earlier tokens, for decoding.
pub trait KvStore {
    /// Adds keys and values `[N, K·E]` of the new tokens of layer `layer`, and lets their queries `[N, H·E]` attend to
    /// everything that their documents hold: o and lse as `ops::attention::forward` gives them.
    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor, spec: &Spec) -> Result<(Tensor, Tensor)>;
}

/// What a layer needs to know of the batch.
pub struct Context<'a> {
    /// Offsets of the documents, `[documents + 1]`.
    pub documents: &'a [usize],
    /// For each rope of the model: cos and sin, `[N, R/2]`.
    pub ropes: Vec<(Tensor, Tensor)>,
    /// Key of the dropout masks; `None` outside training.
    pub dropout: Option<Dropout>,
    /// Is told the input of every linear.
    pub observer: Option<&'a dyn Observer>,
    /// Tokens that go through an MLP at a time; `None`: all.
    pub mlp_tokens: Option<usize>,
}

/// Looks at a forward pass.
pub trait Observer {
    /// `x` `[N, I]` goes into the linear with this weight.
    fn input(&self, weight: &str, x: &Tensor) -> Result<()>;
}

impl Context<'_> {
    /// For piece number `index` of the tokens, in a half without attention: it has dropout masks of its own.
    pub fn piece(&self, index: usize) -> Context<'_> {
        let dropout = self.dropout.map(|key| Dropout {
            micro: key.micro + ((index as u64) << 32),
            ..key
        });
        Context {
            documents: self.documents,
            ropes: Vec::new(),
            dropout,
            observer: self.observer,
            mlp_tokens: None,
        }
    }

    pub fn seen(&self, weight: &str, x: &Tensor) -> Result<()> {
        match self.observer {
            Some(observer) => observer.input(weight, x),
            None => Ok(()),
        }
    }
}

/// Forward, and the vector-Jacobian product, of one layer.
pub trait Layer {
    /// Activations of a forward pass that the backward pass would else compute again.
    type Kept;

    /// `x` `[N, D]` to `[N, D]`; keeps nothing.
    fn forward(&self, x: &Tensor, ctx: &Context) -> Result<Tensor>;

    /// As `forward`, the same bits, and what the backward pass needs.
    fn forward_kept(&self, x: &Tensor, ctx: &Context) -> Result<(Tensor, Self::Kept)>;

    /// Goes back from the layer's input `x` `[N, D]`, recomputing what was not `kept`: gradients of the parameters
    /// that `sink` wants go to it one by one; returns `∂loss/∂x` if `need_dx`.
    fn vjp(
        &self,
        x: &Tensor,
        kept: Option<Self::Kept>,
        dy: Tensor,
        ctx: &Context,
        need_dx: bool,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>>;
}

/// Which gradients an objective has to deliver.
#[derive(Debug, Clone, Copy)]
pub struct Need {
    /// Factor of every gradient: 1 / weight of the whole window (its trained tokens, for most objectives).
    pub scale: f64,
    pub dh: bool,
    pub dw: bool,
}

/// LossGradients that an objective delivers, where they are needed.
#[derive(Debug, Default)]
pub struct LossGradients {
    /// `[N, D]`: gradient at the hidden states.
    pub dh: Option<Tensor>,
    /// `[V, D]`: gradient of the output projection.
    pub dw: Option<Tensor>,
    /// f32 gradients of the objective's own parameters.
    pub own: Vec<(Param, Tensor)>,
}

/// What is the loss, and its gradient at the last hidden states?
pub trait Objective {
    /// `h` `[N, D]`: hidden states after the final norm. The loss and the correct predictions of the trained tokens
    /// go to `tally`.
    fn evaluate(&self, h: &Tensor, head: &Head, batch: &Batch, need: Need, tally: &Tally) -> Result<LossGradients>;

    /// What a batch adds to the number by which the loss and the gradients of a window are divided.
    fn weight(&self, batch: &Batch) -> usize {
        batch.trained()
    }

    /// Layers at whose inputs it looks too: 0 is the embedding's output, l the output of layer l - 1.
    fn inner_layers(&self) -> &[usize] {
        &[]
    }

    /// `x` `[N, D]`: the input of layer `layer`, one of `inner_layers`. Its `dh` is added to the gradient there.
    fn inner(&self, layer: usize, x: &Tensor, batch: &Batch, need: Need, tally: &Tally) -> Result<LossGradients> {
        let _ = (x, batch, need, tally);
        Err(Error::new("this objective does not look at inner layers").at(format!("layer {layer}")))
    }

    /// Small weights of its own (a score head, projections), named `objective.*`: always trained, saved with the run.
    fn params(&self) -> Vec<Param> {
        Vec::new()
    }

    /// Means since the last call, by the names of `metrics.jsonl`.
    fn metrics(&self) -> Vec<(&'static str, f64)> {
        Vec::new()
    }
}
