//! The whole model: embedding, blocks, final norm, head, and the adapters on their linears.
//! A block is created from its weights when it is needed, and dropped afterwards.

mod block;
mod layer_tensors;

use super::contracts::{Context, Param};
use super::experts::adapters::JoinedAdapters;
use super::experts::reader::ExpertReader;
use super::head::{Head, HeadWeight, StreamedHead};
use super::linear::Linear;
use super::noise::EmbeddingNoise;
use super::norm::{Norm, UnitWeights};
use super::projections::LayerPairs;
use super::rope::RopeTables;
use super::sequence::SequenceRanks;
use super::spec::{EMBEDDING, LM_HEAD, NormSpec, Spec};
use super::tokens::TokenRows;
use crate::base::sync::lock;
use crate::base::{Error, Result, progress};
use crate::data::Batch;
use crate::ops::embedding;
use crate::ops::quantized::Products;
use crate::peft::{Adapter, DropoutKey};
use crate::source::{Group, GroupWeights, TrainableStore, WeightSource};
use candle_core::{DType, Device, Tensor};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

pub(crate) use layer_tensors::LayerTensors;

/// Adapters by the module name of their linear: `model.layers.0.self_attn.q_proj`.
pub type Adapters = BTreeMap<String, Arc<Adapter>>;

/// A model: its options, its weights and its adapters.
/// Errors of its functions: a weight cannot be read, there is none of this name, or its values are not in memory.
pub struct Network {
    /// Sizes and options.
    pub spec: Arc<Spec>,
    /// Delivers the weights, layer by layer.
    pub source: Arc<dyn WeightSource>,
    /// The adapters, by module name.
    pub adapters: Adapters,
    /// Trained rows of the embedding or the head.
    pub tokens: Vec<TokenRows>,
    /// Parameters of the objective: `objective.*`.
    pub objective_params: Vec<Param>,
    /// The device of the computation.
    pub device: Device,
    /// Number of tokens per MLP piece; `None`: all.
    pub mlp_tokens: Option<usize>,
    /// How a GPU multiplies with frozen int8 weights.
    pub products: Products,
    /// True while the adapters are disabled.
    adapters_disabled: AtomicBool,
    rope_tables: RopeTables,
    /// The factors of the layers that were read: a factor never changes.
    scales: Mutex<BTreeMap<usize, f32>>,
    ones: UnitWeights,
    /// The copies of LoRA pairs by layer, while the adapters are fixed.
    pair_copies: Mutex<Option<BTreeMap<usize, Option<LayerPairs>>>>,
}

/// A network whose weights can be trained.
pub struct TrainableNetwork {
    /// The network.
    pub network: Network,
    /// The source of the network.
    pub store: Arc<dyn TrainableStore>,
}

impl TrainableNetwork {
    /// A network without adapters over this store.
    pub fn new(spec: Spec, store: Arc<dyn TrainableStore>, device: Device) -> Self {
        Self {
            network: Network::new(spec, store.clone(), device),
            store,
        }
    }
}

pub(super) fn param(weights: &GroupWeights, name: &str) -> Result<Param> {
    let (name, tensor) = weights.get(name)?;
    Ok(Param { name, tensor })
}

impl Network {
    /// A network without adapters over this source.
    pub fn new(spec: Spec, source: Arc<dyn WeightSource>, device: Device) -> Self {
        Self {
            spec: Arc::new(spec),
            source,
            adapters: Adapters::new(),
            tokens: Vec::new(),
            objective_params: Vec::new(),
            device,
            mlp_tokens: None,
            products: Products::Dequantized,
            adapters_disabled: AtomicBool::new(false),
            rope_tables: RopeTables::default(),
            scales: Mutex::default(),
            ones: UnitWeights::default(),
            pair_copies: Mutex::default(),
        }
    }

    /// Runs `f` with the adapters disabled.
    pub fn with_adapters_disabled<R>(&self, f: impl FnOnce() -> R) -> R {
        let before = self.adapters_disabled.swap(true, Ordering::Relaxed);
        let result = f();
        self.adapters_disabled.store(before, Ordering::Relaxed);
        result
    }

    /// Runs `f`, which changes no adapter and does not disable any: on a GPU the LoRA pairs of a layer are copied once.
    pub fn with_fixed_adapters<R>(&self, f: impl FnOnce() -> R) -> R {
        let set = |copies| *lock(&self.pair_copies) = copies;
        set(Some(BTreeMap::new()));
        let result = f();
        set(None);
        result
    }

    /// Number of decoder layers.
    pub fn layers(&self) -> usize {
        self.spec.layers.len()
    }

    /// Rope tables and document offsets of one batch.
    ///
    /// # Errors
    /// Not enough memory on the device.
    pub fn context<'a>(
        &self,
        positions: &[u32],
        documents: &'a [usize],
        dropout: Option<DropoutKey>,
    ) -> Result<Context<'a>> {
        Ok(Context {
            documents,
            ropes: self
                .rope_tables
                .gather(&self.spec.ropes, positions, documents, &self.device)?,
            dropout,
            noise: None,
            observer: None,
            mlp_tokens: self.mlp_tokens,
            shared: Rc::default(),
            sequence: None,
        })
    }

    /// As `context`, for the tokens that this rank has of a batch: rope tables of those only.
    ///
    /// # Errors
    /// As `context`.
    pub fn context_of<'a>(
        &self,
        sequence: &'a SequenceRanks<'a>,
        batch: &'a Batch,
        dropout: Option<DropoutKey>,
    ) -> Result<Context<'a>> {
        let own = sequence.own();
        let mut ctx = if self.spec.ropes.iter().any(|rope| rope.long.is_some()) {
            // The frequencies depend on the length of the whole document.
            let mut ctx = self.context(&batch.positions, &batch.documents, dropout)?;
            for (cos, sin) in &mut ctx.ropes {
                *cos = cos.narrow(0, own.start, own.len())?.copy()?;
                *sin = sin.narrow(0, own.start, own.len())?.copy()?;
            }
            ctx
        } else {
            self.context(&batch.positions[own], &batch.documents, dropout)?
        };
        ctx.sequence = Some(sequence);
        Ok(ctx)
    }

    /// `[N]` ids to what the first layer reads: `[N, D]`, or `[N, A·D]` if tokens have A streams. Sets the per-layer inputs of `ctx`, if the family has them.
    ///
    /// # Errors
    /// An id outside the vocabulary (`Argument`); a failed read of the weights.
    pub fn embed(&self, ids: &[u32], ctx: &Context) -> Result<Tensor> {
        let x = self.embedded(ids, ctx)?;
        if let Some(inputs) = self.per_layer_inputs(ids, &x, ctx)? {
            ctx.shared.set_inputs(inputs);
        }
        self.spread(x, ctx)
    }

    /// The rows of the embedding, `[N, D]`, with the noise of a training step.
    pub(super) fn embedded(&self, ids: &[u32], ctx: &Context) -> Result<Tensor> {
        let (table, ids) = self.source.rows(EMBEDDING, ids)?;
        let x = embedding::gather(&table, &ids, self.spec.embedding_factor(table.dtype()))?;
        EmbeddingNoise::add(&x, ctx, &self.spec)?;
        Ok(x)
    }

    /// The token embedding, `[V, D]`.
    ///
    /// # Errors
    /// The weights cannot be read.
    pub fn embedding(&self) -> Result<Param> {
        param(&*self.source.fetch(Group::Embedding)?, EMBEDDING)
    }

    /// The factor of the embedding's output.
    ///
    /// # Errors
    /// The weights cannot be read.
    pub(crate) fn embedding_factor(&self) -> Result<f32> {
        Ok(self.spec.embedding_factor(self.dtype()?))
    }

    /// The type of the weights that are not quantized.
    ///
    /// # Errors
    /// The weights cannot be read.
    pub fn dtype(&self) -> Result<DType> {
        Ok(self.source.rows(EMBEDDING, &[0])?.0.dtype())
    }

    /// The final norm. It has the factor of the logits: the head is linear, so the factor can be applied to its input.
    ///
    /// # Errors
    /// The weights cannot be read; not enough memory on the device.
    pub fn final_norm(&self) -> Result<Norm> {
        let spec = self.spec.final_norm();
        let norm = Norm::read(
            &*self.source.fetch(Group::Head)?,
            spec.name,
            &spec,
            self.ones_of(&spec)?,
        )?;
        Ok(norm.scaled(self.spec.logit_scale))
    }

    /// A norm over `size` elements without parameters.
    pub(super) fn plain_norm(&self, size: usize) -> Result<Norm> {
        Ok(Norm::plain(self.ones.get(size, &self.device)?))
    }

    /// The ones of a norm, if it is an RMSNorm without a weight.
    fn ones_of(&self, norm: &NormSpec) -> Result<Option<Tensor>> {
        let plain = !norm.weight && self.spec.layer_norm.is_none();
        plain.then(|| self.ones.get(norm.size, &self.device)).transpose()
    }

    /// Hidden states after the final norm, `[N, D]`, from the output of the last layer.
    ///
    /// # Errors
    /// The weights cannot be read; `x` of another width (`Shape`); not enough memory on the device.
    pub fn normalize(&self, x: &Tensor, ctx: &Context) -> Result<Tensor> {
        self.final_norm()?.forward(&self.merge(x, ctx)?, &self.spec)
    }

    /// The output projection; that of a tied model is the embedding.
    ///
    /// # Errors
    /// The weights cannot be read.
    pub fn head(&self) -> Result<Head<'_>> {
        let (group, name) = if self.spec.tied {
            (Group::Embedding, EMBEDDING)
        } else {
            (Group::Head, LM_HEAD)
        };
        let (name, weight) = match self.source.streamed(name) {
            Some(matrix) => {
                let name: Arc<str> = name.into();
                let streamed = StreamedHead::new(matrix, name.clone(), self.spec.vocab, self.spec.hidden);
                (name, HeadWeight::Streamed(Rc::new(streamed)))
            }
            None => {
                let (name, weight) = self.source.fetch(group)?.weight(name)?;
                (name, HeadWeight::Whole(weight))
            }
        };
        Ok(Head {
            name,
            weight,
            softcap: self.spec.logit_softcap,
        })
    }

    /// A weight that is in memory, or an adapter matrix, by its name.
    ///
    /// # Errors
    /// There is no such parameter (`NotFound`), or it is not in memory (`Unsupported`).
    pub fn param(&self, name: &str) -> Result<Param> {
        if let Ok(info) = self.source.param(name) {
            return match self.source.in_memory(name) {
                Some(tensor) => Ok(Param {
                    name: info.name.clone(),
                    tensor,
                }),
                None => Err(Error::unsupported(
                    "this weight is not in memory: its values must be read from its source",
                )
                .at(name)),
            };
        }
        if let Some(rows) = self.tokens.iter().find(|t| &*t.param.name == name) {
            return Ok(rows.param.clone());
        }
        if let Some(param) = self.objective_params.iter().find(|p| &*p.name == name) {
            return Ok(param.clone());
        }
        // The module name of the adapter is a prefix of the parameter name.
        let mut module = name;
        while let Some((shorter, _)) = module.rsplit_once('.') {
            module = shorter;
            if let Some(adapter) = self.adapters.get(module) {
                let part = adapter.saved().into_iter().find(|p| &*p.name == name);
                if let Some(part) = part {
                    return Ok(part);
                }
            }
        }
        Err(Error::not_found("the model has no such parameter").at(name))
    }

    /// Groups of linears for `linears`: the layers, and one for the linears outside of them if there are any.
    pub fn linear_groups(&self) -> usize {
        self.layers() + usize::from(!self.spec.linears_outside().is_empty())
    }

    /// The linears of layer `index`, with or without an adapter, each with its module name; after the last layer those outside
    /// of the layers. Those of routed experts: see `expert_linears`.
    ///
    /// # Errors
    /// The weights cannot be read.
    pub fn linears(&self, index: usize) -> Result<Vec<(String, Linear)>> {
        if index < self.layers() {
            return Ok(self.block(index)?.into_linears());
        }
        let outside = self.spec.linears_outside().into_iter();
        outside
            .map(|site| Ok((site.module.clone(), self.linear_outside(&site.module)?)))
            .collect()
    }

    /// The linear of this module, which is not in a layer.
    pub(super) fn linear_outside(&self, module: &str) -> Result<Linear> {
        let (name, weight) = self.source.fetch(Group::Head)?.weight(&format!("{module}.weight"))?;
        Ok(Linear {
            name,
            weight,
            bias: None,
            adapter: self.adapter_of(module),
        })
    }

    /// As `linears`, of one routed expert.
    ///
    /// # Errors
    /// The layer has no such expert, or its weights cannot be read.
    pub fn expert_linears(&self, index: usize, expert: usize) -> Result<Vec<(String, Linear)>> {
        let reader = self.expert_reader(index).filter(|of| expert < of.sizes.count);
        let reader = reader.ok_or_else(|| {
            Error::argument("the layer has no such expert").at(format!("layer {index}, expert {expert}"))
        })?;
        reader.linears(expert)
    }

    /// The adapter of a linear or of a parameter, unless adapters are disabled.
    fn adapter_of(&self, module: &str) -> Option<Arc<Adapter>> {
        let disabled = self.adapters_disabled.load(Ordering::Relaxed);
        self.adapters.get(module).filter(|_| !disabled).cloned()
    }

    /// Reads the experts of layer `index`, if it has any.
    fn expert_reader(&self, index: usize) -> Option<ExpertReader> {
        let sizes = self.spec.layers.get(index)?.experts?;
        let adapter_of = |module: &str| self.adapter_of(module);
        let path = format!("model.layers.{index}.{}.", sizes.names.experts);
        let own = self
            .adapters
            .range(path.clone()..)
            .take_while(|(module, _)| module.starts_with(&path));
        let enabled = !self.adapters_disabled.load(Ordering::Relaxed);
        Some(ExpertReader {
            source: self.source.clone(),
            sizes,
            index,
            products: self.products,
            adapters: own
                .filter(|_| enabled)
                .map(|(module, a)| (module.clone(), a.clone()))
                .collect(),
            joined: JoinedAdapters::new(&self.spec, index, &adapter_of),
        })
    }

    /// Hidden states of all tokens after the final norm, `[N, D]`: no gradients, no saved activations.
    ///
    /// # Errors
    /// An id outside the vocabulary (`Argument`); a failed read of the weights; not enough memory on the device.
    pub fn hidden_states(&self, ids: &[u32], ctx: &Context) -> Result<Tensor> {
        self.hidden_states_seen(ids, ctx, &mut |_, _| Ok(()))
    }

    /// As `hidden_states`; calls `see` with the index and the input of every layer, `[N, D]` or `[N, A·D]`.
    ///
    /// # Errors
    /// As `hidden_states`; those of `see`.
    pub fn hidden_states_seen(
        &self,
        ids: &[u32],
        ctx: &Context,
        see: &mut dyn FnMut(usize, &Tensor) -> Result<()>,
    ) -> Result<Tensor> {
        use super::contracts::Layer;
        self.source.prefetch(Group::Layer(0));
        let mut x = self.embed(ids, ctx)?;
        let phase = progress::part("layer", self.layers());
        for l in 0..self.layers() {
            phase.set(l as u64);
            // After the last layer, layer 0 is prefetched for the next batch.
            self.source.prefetch(Group::Layer((l + 1) % self.layers()));
            see(l, &x)?;
            x = self.block(l)?.forward(&x, ctx)?;
        }
        self.normalize(&x, ctx)
    }
}
