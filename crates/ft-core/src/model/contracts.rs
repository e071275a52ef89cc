//! Three of the four contracts of the engine: `Layer`, `GradSink`, `Objective` (`WeightSource` is in `source`), and the
//! types that they exchange.

use super::head::Head;
use super::noise::EmbeddingNoise;
use super::sequence::SequenceRanks;
use super::shared::SharedStates;
use crate::base::ledger::{Allocation, Ledger, MemoryKind};
use crate::base::means::NamedMeans;
use crate::base::{Error, Result};
use crate::data::Batch;
use crate::ops::attention::{self, AttentionGradInputs, AttentionSpec};
use crate::ops::step_stats::StepStats;
use crate::peft::DropoutKey;
pub use crate::peft::{Param, ParamGradient};
use candle_core::Tensor;
use std::rc::Rc;

/// Receives each gradient as soon as it is computed.
pub trait GradSink {
    /// True if this parameter is trained now. If not, its gradient is never computed.
    fn wants(&self, name: &str) -> bool;

    /// Takes the gradient (f32, the parameter's shape). Called after the last use of the parameter in this backward
    /// pass, so the sink may change the weight at once.
    ///
    /// # Errors
    /// A gradient that is not finite (`NonFinite`; a sink that only adds finds this later); a second gradient of one
    /// parameter, for a sink that needs all at once (`Internal`); not enough memory on the device (`OutOfMemory`).
    fn take(&mut self, param: &Param, gradient: Tensor) -> Result<()>;

    /// The gradient of `name` accumulated so far (f32), if it is computed in parts and this is not the first: the
    /// caller adds the next part to it in place instead of calling `take`.
    fn sum(&self, _name: &str) -> Option<Tensor> {
        None
    }

    /// A round of micro-batches begins, one on each rank: those of the first `contributors` ranks count. Other ranks
    /// compute one that does not count, to keep step.
    fn begin_round(&mut self, _contributors: usize) {}

    /// Ranks, from rank 0 on, whose micro-batches count in this round.
    fn contributors(&self) -> usize {
        usize::MAX
    }

    /// True if the order of the parameters that get gradients must not depend on the tokens: several ranks exchange
    /// each gradient as soon as it is computed, so all of them need the same order.
    fn in_order(&self) -> bool {
        false
    }

    /// The parameter `name` of this shape is trained, but another rank has it and takes its gradients.
    ///
    /// # Errors
    /// There is no such parameter (`NotFound`); not enough memory on the device (`OutOfMemory`).
    fn take_elsewhere(&mut self, _name: &str, _shape: Vec<usize>) -> Result<()> {
        Ok(())
    }

    /// The micro-batch of this rank has given its last gradient.
    ///
    /// # Errors
    /// Not enough memory on the device (`OutOfMemory`); another rank has failed.
    fn end_round(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Simulates the memory of a `GradSink`.
pub trait GradSinkMemory {
    /// As `GradSink::wants`.
    fn wants(&self, name: &str) -> bool;

    /// Number of elements of the parameter.
    fn elements(&self, name: &str) -> u64;

    /// As `GradSink::take`: stores or frees the gradient.
    fn take(&mut self, l: &mut Ledger, name: &str, gradient: Allocation);

    /// True if `GradSink::sum` returns a tensor.
    fn has_sum(&self, _name: &str) -> bool {
        false
    }

    /// Allocates the gradient of a parameter.
    fn compute(&self, l: &mut Ledger, name: &str) -> Allocation {
        l.alloc(MemoryKind::Gradients, 4 * self.elements(name))
    }

    /// Computes the gradient and passes it to the sink, if it is needed. A later part is added to the sum in place.
    fn give(&mut self, l: &mut Ledger, name: &str) {
        if self.wants(name) && !self.has_sum(name) {
            let gradient = self.compute(l, name);
            self.take(l, name, gradient);
        }
    }
}

/// KV cache of earlier tokens, for decoding.
pub trait KvStore {
    /// Appends `new`, the keys and values `[N, K·E]` of the new tokens, to those of layer `layer`. `None`: a later
    /// layer calls it, and reads what layer `layer` has appended. The queries `q` `[N, H·E]` of the new tokens attend
    /// to all tokens of their documents. Returns o and lse as `ops::attention::forward` does.
    ///
    /// # Errors
    /// The cache does not have this layer, or the tensors have the wrong shape (`Shape`); not enough memory for the
    /// new tokens (`OutOfMemory`).
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        new: Option<(&Tensor, &Tensor)>,
        spec: &AttentionSpec,
    ) -> Result<(Tensor, Tensor)>;

    /// True if the cache keeps the latent rows of a layer with latent attention: `attend` gets queries and rows of
    /// `LatentHeads::absorbed_queries` and `cached_rows`, with one key head.
    fn latent_rows(&self, _layer: usize) -> bool {
        false
    }

    /// For each document the state of a layer with Gated DeltaNet or a short convolution; `None` before its first token.
    ///
    /// # Errors
    /// A cache without such states (`Internal`); the cache has no state of this layer (`Shape`).
    fn states(&mut self, layer: usize) -> Result<Vec<Option<RecurrentState>>> {
        Err(Error::internal("this cache has no recurrent states").at(format!("layer {layer}")))
    }

    /// Replaces the states of such a layer, one for each document.
    ///
    /// # Errors
    /// As `states`.
    fn set_states(&mut self, layer: usize, _states: Vec<RecurrentState>) -> Result<()> {
        Err(Error::internal("this cache has no recurrent states").at(format!("layer {layer}")))
    }
}

/// The state of a layer with Gated DeltaNet or a short convolution after the tokens so far, instead of keys and values.
#[derive(Debug, Clone)]
pub struct RecurrentState {
    /// The last inputs of the convolution, `[kernel - 1, channels]`.
    pub inputs: Tensor,
    /// Gated DeltaNet: the state of all heads, f32 `[1, V·P·Q]`.
    pub state: Option<Tensor>,
}

/// The data of a batch that layers need.
pub struct Context<'a> {
    /// Offsets of the documents, `[documents + 1]`: of all tokens, also if ranks share them.
    pub documents: &'a [usize],
    /// For each rope of the model: cos and sin, `[N, R/2]`.
    pub ropes: Vec<(Tensor, Tensor)>,
    /// Key of the dropout masks; `None` outside training.
    pub dropout: Option<DropoutKey>,
    /// Noise on the embeddings; `None` outside training.
    pub noise: Option<EmbeddingNoise>,
    /// Receives the input of every linear.
    pub observer: Option<&'a dyn Observer>,
    /// Number of tokens per MLP piece; `None`: all.
    pub mlp_tokens: Option<usize>,
    /// Tensors that several layers use.
    pub shared: Rc<SharedStates>,
    /// The tokens of this rank, if several share them.
    pub sequence: Option<&'a SequenceRanks<'a>>,
}

impl Context<'_> {
    /// Attention of all tokens: o and lse, as `ops::attention::forward`.
    pub(super) fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor, spec: &AttentionSpec) -> Result<(Tensor, Tensor)> {
        match self.sequence {
            Some(sequence) => sequence.forward(q, k, v, spec),
            None => attention::forward(q, k, v, spec, self.documents, self.documents),
        }
    }

    /// dq, dk and dv.
    pub(super) fn attend_backward(
        &self,
        saved: AttentionGradInputs<&Tensor>,
        spec: &AttentionSpec,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        match self.sequence {
            Some(sequence) => sequence.backward(saved, spec),
            None => attention::backward(saved, spec, self.documents),
        }
    }
}

/// Observes a forward pass.
pub trait Observer {
    /// Called with the input `x` `[N, I]` of the linear with this weight.
    ///
    /// # Errors
    /// The observer cannot use this input, or has no memory for its result. The forward pass ends with this error.
    fn input(&self, weight: &str, x: &Tensor) -> Result<()>;
}

impl<'a> Context<'a> {
    /// The context of another step of the same sizes with these cos and sin; the shared states are empty.
    pub(crate) fn reading(&self, ropes: Vec<(Tensor, Tensor)>) -> Context<'a> {
        Context {
            documents: self.documents,
            ropes,
            dropout: self.dropout,
            noise: None,
            observer: self.observer,
            mlp_tokens: self.mlp_tokens,
            shared: Rc::default(),
            sequence: self.sequence,
        }
    }
}

impl Context<'_> {
    /// The context for piece number `index` of the tokens, in a half without attention; it has its own dropout masks.
    pub fn piece(&self, index: usize) -> Context<'_> {
        let dropout = self.dropout.map(|key| DropoutKey {
            micro: key.micro + ((index as u64) << 32),
            ..key
        });
        Context {
            documents: self.documents,
            ropes: Vec::new(),
            dropout,
            noise: self.noise,
            observer: self.observer,
            mlp_tokens: None,
            shared: self.shared.clone(),
            sequence: self.sequence,
        }
    }

    /// Reports the input `x` `[N, I]` of the linear with this weight to the observer, if there is one.
    ///
    /// # Errors
    /// Those of the observer.
    pub fn seen(&self, weight: &str, x: &Tensor) -> Result<()> {
        match self.observer {
            Some(observer) => observer.input(weight, x),
            None => Ok(()),
        }
    }
}

/// Forward pass and vector-Jacobian product of one layer.
pub trait Layer {
    /// Saved activations, which the backward pass would otherwise recompute.
    type SavedActivations;

    /// `x` `[N, D]` to `[N, D]`; saves no activations.
    ///
    /// # Errors
    /// A tensor of the wrong shape or type (`Shape`); not enough memory (`OutOfMemory`); the error of the observer,
    /// or of a source that cannot read the weights of an expert; another rank has failed.
    fn forward(&self, x: &Tensor, ctx: &Context) -> Result<Tensor>;

    /// As `forward`, bit-exactly, and returns the saved activations.
    ///
    /// # Errors
    /// As `forward`.
    fn forward_saving(&self, x: &Tensor, ctx: &Context) -> Result<(Tensor, Self::SavedActivations)>;

    /// Backward pass from the layer's input `x` `[N, D]`; recomputes the activations if `saved` is `None`. Passes to
    /// `sink`, one by one, the gradients of the parameters that it wants; returns `∂loss/∂x` if `need_dx`.
    ///
    /// # Errors
    /// As `forward`, and the error of `sink`; saved activations of another layer (`Internal`).
    fn vjp(
        &self,
        x: &Tensor,
        saved: Option<Self::SavedActivations>,
        dy: Tensor,
        ctx: &Context,
        need_dx: bool,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>>;
}

/// Gradients that an objective must compute.
#[derive(Debug, Clone, Copy)]
pub struct ObjectiveNeeds {
    /// Factor of every gradient: the loss scale (1 without one), divided by the weight of the whole window (its trained
    /// tokens, for most objectives).
    pub scale: f64,
    /// The gradient of the hidden states.
    pub dh: bool,
    /// The gradient of the output projection.
    pub dw: bool,
}

/// Gradients that an objective returns, if they are needed.
#[derive(Debug, Default)]
pub struct LossGradients {
    /// `[N, D]`: gradient with respect to the hidden states.
    pub dh: Option<Tensor>,
    /// `[V, D]`: gradient of the output projection.
    pub dw: Option<Tensor>,
    /// f32 gradients of `Objective::params`.
    pub objective_params: Vec<ParamGradient>,
}

/// Computes the loss and its gradient with respect to the last hidden states.
pub trait Objective {
    /// `h` `[N, D]`: hidden states after the final norm. Adds the loss and the number of correct predictions of trained
    /// tokens to `step_stats`.
    ///
    /// # Errors
    /// A batch without the data of this objective, or tensors of the wrong shape (`Shape`); a target outside the
    /// vocabulary (`Argument`); not enough memory (`OutOfMemory`); a failed read of the head.
    fn evaluate(
        &self,
        h: &Tensor,
        head: &Head,
        batch: &Batch,
        need: ObjectiveNeeds,
        step_stats: &StepStats,
    ) -> Result<LossGradients>;

    /// The batch's contribution to the divisor of the loss and the gradients of a window.
    fn weight(&self, batch: &Batch) -> usize {
        batch.trained()
    }

    /// True if the gradient of a token needs more of its document than the hidden state and the target of the token: ranks
    /// cannot share the tokens of a micro-batch then.
    fn reads_whole_documents(&self) -> bool {
        false
    }

    /// Layers whose inputs the objective uses too: 0 is the embedding's output, l the output of layer l - 1.
    fn hidden_layers(&self) -> &[usize] {
        &[]
    }

    /// `x` `[N, D]`: the input of layer `layer`, one of `hidden_layers`. The returned `dh` is added to the gradient
    /// there.
    ///
    /// # Errors
    /// As `evaluate`; the objective does not use this layer (`Unsupported`).
    fn evaluate_hidden(
        &self,
        layer: usize,
        x: &Tensor,
        batch: &Batch,
        need: ObjectiveNeeds,
        step_stats: &StepStats,
    ) -> Result<LossGradients> {
        let _ = (x, batch, need, step_stats);
        Err(Error::unsupported("this objective does not use hidden states of layers").at(format!("layer {layer}")))
    }

    /// Parameters of the objective (a score head, projections), named `objective.*`: always trained and saved.
    fn params(&self) -> Vec<Param> {
        Vec::new()
    }

    /// The sums behind `metrics`, if there are any: those of each micro-batch are added in its order.
    fn means(&self) -> Option<&NamedMeans> {
        None
    }

    /// Means since the last call, by their names in `metrics.jsonl`.
    fn metrics(&self) -> Vec<(&'static str, f64)> {
        Vec::new()
    }
}
