//! Simulates the memory of one optimizer step in the order of `engine::step` and `engine::pass`.

use super::loss::LogitsChunk;
use super::model::{LayerStep, PlanModel};
use super::shared::SharedMemory;
use super::streams;
use super::weights::FetchedLayers;
use super::{PlanInputs, experts, layer_graphs};
use crate::base::ledger::{Allocation, Ledger, MemoryKind};
use crate::comm::share;
use crate::engine::{ActiveSet, GradientStorage};
use crate::model::block::memory::{LayerMemory, LayerMemorySettings, SavedActivationsMemory};
use crate::model::contracts::GradSinkMemory;
use crate::model::delta_net;
use crate::model::rope::{Rope, RopeTables};
use crate::model::spec::{EMBEDDING, LM_HEAD, LayerSpec, LinearSpec, Mixer};
use crate::model::{Spec, tokens};
use crate::ops::attention;
use crate::ops::cross_entropy::PIECE;
use crate::ops::delta_rule;
use crate::ops::embedding;
use crate::ops::linear::{self, ProductSizes};
use crate::recipe::{Dtype, Recipe};
use crate::source::{Group, Placement, Sublayer};
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// Bytes of an element of a masked weight that is being updated: f32, or the two halves of bf16.
const MASKED: u64 = 4;

impl PlanInputs {
    /// The settings of the memory of a layer. `is_active`: true for active parameters.
    pub(super) fn layer_memory<'a>(
        &'a self,
        spec: &'a Spec,
        is_active: &'a dyn Fn(&str) -> bool,
        dropout: bool,
    ) -> LayerMemorySettings<'a> {
        LayerMemorySettings {
            spec,
            tokens: self.tokens,
            sequence: self.sequence,
            documents: self.documents,
            element: self.element,
            on_gpu: self.on_gpu,
            experts_streamed: self.strategy.placement.streams_experts(),
            expert_ranks: match self.strategy.placement {
                Placement::ExpertParallel => self.ranks,
                _ => 1,
            },
            mlp_tokens: self.strategy.mlp_tokens,
            dropout,
            storage: &self.strategy.storage,
            adapters: &self.adapters,
            active: is_active,
        }
    }
}

/// `experts::is_here` of one rank.
type IsHere<'a> = Box<dyn Fn(&str) -> Option<bool> + 'a>;

/// Simulated gradient sink.
struct SimulatedSink<'a> {
    active: &'a ActiveSet,
    model: &'a PlanModel<'a>,
    keep: bool,
    /// Ranks that each keep a part of a gradient.
    parts: u64,
    ranks: usize,
    /// The sums are on the host until the update.
    on_host: bool,
    /// The ranks that have a part of a sum each, at the update.
    divided: u64,
    /// `experts::is_here`, on the rank that has most of the active experts.
    is_here: IsHere<'a>,
    kept: BTreeMap<String, Allocation>,
    /// Gradients of layers equal to those that were simulated.
    alike: Vec<Allocation>,
}

impl GradSinkMemory for SimulatedSink<'_> {
    fn wants(&self, name: &str) -> bool {
        self.active.wants(name)
    }

    fn elements(&self, name: &str) -> u64 {
        self.model.elements(name)
    }

    fn take(&mut self, l: &mut Ledger, name: &str, gradient: Allocation) {
        if self.active.corrects(name).is_some() {
            if self.ranks > 1 {
                // The sum over the ranks, and what it is made of.
                l.touch(MemoryKind::Gradients, 2 * 4 * self.model.elements(name));
            }
            l.free(gradient);
            return;
        }
        let here = (self.is_here)(name);
        if here == Some(false) {
            l.free(gradient);
            return;
        }
        let elements = self.model.elements(name) as usize;
        let part = self.active.subset(name, elements).map(|p| p.len as u64);
        // Of a masked parameter only the active part is kept.
        let gradient = match part {
            Some(part) => {
                let kind = if self.on_host {
                    MemoryKind::HostGradients
                } else {
                    MemoryKind::Gradients
                };
                let active = l.alloc(kind, 4 * part);
                l.free(gradient);
                active
            }
            None if self.on_host => {
                let own = l.alloc(MemoryKind::HostGradients, 4 * share(elements as u64, self.divided));
                l.free(gradient);
                own
            }
            None if self.parts > 1 && here.is_none() => {
                let own = l.alloc(MemoryKind::Gradients, 4 * share(elements as u64, self.parts));
                l.free(gradient);
                own
            }
            None => gradient,
        };
        if self.keep && !self.kept.contains_key(name) {
            self.kept.insert(name.to_string(), gradient);
            return;
        }
        if !self.keep {
            l.touch(MemoryKind::Scratch, MASKED * part.unwrap_or(0));
        }
        l.free(gradient);
    }
}

/// `fetched`: the layers that are brought to a GPU.
pub(super) fn walk(
    l: &mut Ledger,
    model: &PlanModel,
    recipe: &Recipe,
    inputs: &PlanInputs,
    active: &ActiveSet,
    mut fetched: FetchedLayers,
) {
    let spec = model.spec;
    let on_their_way = l.sizes()[MemoryKind::HostGradients];
    let busy = experts::busy_rank(model, inputs, active);
    let mut sink = SimulatedSink {
        is_here: Box::new(move |name| experts::is_here(model, inputs, busy, name)),
        active,
        model,
        keep: inputs.strategy.gradients == GradientStorage::Keep,
        ranks: inputs.ranks,
        on_host: inputs.on_gpu
            && inputs.ranks > 1
            && recipe.distributed.sync_every == 0
            && !recipe.distributed.exchange().window,
        divided: super::parts(recipe, inputs, active),
        // A rank that adds its own micro-batches first has whole sums.
        parts: if recipe.distributed.exchange().window {
            1
        } else {
            super::parts(recipe, inputs, active)
        },
        kept: BTreeMap::new(),
        alike: Vec::new(),
    };
    let tokens = inputs.tokens as u64;
    let rope = |tables: fn(&Rope) -> usize| -> u64 {
        spec.ropes
            .iter()
            .map(|r| 8 * (r.inv_freq.len() * tables(r)) as u64)
            .sum()
    };
    // On a GPU also the tables from which the rows of a micro-batch are gathered.
    let positions = if inputs.on_gpu {
        RopeTables::rows(inputs.longest) as u64
    } else {
        0
    };
    let is_active = |name: &str| active.contains(name);
    let graphs = inputs.strategy.layer_graphs.then(|| {
        let settings = inputs.layer_memory(spec, &is_active, false);
        layer_graphs::bytes(model, inputs, active, settings)
    });
    let held = [
        l.alloc(MemoryKind::LayerWork, graphs.unwrap_or(0)),
        // ids, positions, targets of every micro-batch; cos and sin of one.
        l.alloc(
            MemoryKind::Data,
            12 * tokens * (inputs.micro_batches * inputs.sequence.ranks) as u64
                + rope(|_| 1) * tokens
                + rope(Rope::tables) * positions,
        ),
        l.alloc(MemoryKind::Scratch, scratch(spec, recipe, inputs, active)),
        l.alloc(
            MemoryKind::Teacher,
            inputs.teacher.as_ref().map_or(0, |t| t.forward(inputs).0),
        ),
        l.alloc(
            MemoryKind::Gradients,
            inputs.teacher.as_ref().map_or(0, |t| t.projections(spec)),
        ),
    ];
    // The second micro-batch finds the sums of the first; those after it are like the second.
    for micro in 0..inputs.micro_batches.min(2) {
        micro_batch(l, model, recipe, inputs, &mut sink, &mut fetched, micro);
    }
    l.moment("the optimizer update");
    // Sums of the host are brought to the device.
    let sums = l.sizes()[MemoryKind::HostGradients].saturating_sub(on_their_way);
    l.touch(MemoryKind::Gradients, sums);
    if inputs.on_gpu && inputs.ranks > 1 && recipe.distributed.exchange().window {
        // The whole sums of a rank leave its GPU; the sums of all ranks are added on the host.
        let own = share(l.sizes()[MemoryKind::Gradients] / 4, sink.divided);
        l.touch(MemoryKind::HostGradients, 4 * own);
    }
    // A masked weight is changed in a copy of its active part.
    let largest = sink.kept.keys().filter_map(|n| {
        let elements = model.elements(n) as usize;
        active.subset(n, elements).map(|p| p.len as u64)
    });
    l.touch(MemoryKind::Scratch, MASKED * largest.max().unwrap_or(0));
    let kept: Vec<Allocation> = std::mem::take(&mut sink.kept).into_values().collect();
    l.free_all(kept);
    l.free_all(std::mem::take(&mut sink.alike));
    l.free_all(held);
    fetched.free(l);
}

/// An evaluation: a forward pass that keeps nothing, and a loss.
pub(super) fn evaluate(l: &mut Ledger, model: &PlanModel, recipe: &Recipe, inputs: &PlanInputs) {
    let evaluation = inputs.evaluation;
    l.set_prefix("an evaluation, ");
    if evaluation.answers > 0 {
        l.moment("its answers");
        let answers = inputs.answers(model, evaluation.answers, evaluation.answer);
        l.touch(MemoryKind::Rollout, answers);
    }
    // With fewer tokens than a step has it needs less in every part.
    let tokens = evaluation.tokens.div_ceil(inputs.sequence.ranks);
    if tokens > inputs.tokens || evaluation.longest > inputs.longest {
        let mut own = inputs.clone();
        (own.tokens, own.longest, own.documents) = (tokens, evaluation.longest, 1);
        (
            own.strategy.saved_layers,
            own.micro_batches,
            own.strategy.offload_inputs,
        ) = (0, 1, false);
        // The student alone is measured.
        own.teacher = None;
        walk(l, model, recipe, &own, &ActiveSet::new([]), FetchedLayers::new(false));
    }
    l.set_prefix("");
}

/// Buffers of the CPU's products and attention; a GPU packs nothing.
fn scratch(spec: &Spec, recipe: &Recipe, inputs: &PlanInputs, active: &ActiveSet) -> u64 {
    let bf16 = recipe.model.dtype == Dtype::Bf16;
    if inputs.on_gpu {
        return 0;
    }
    let firsts: BTreeSet<usize> = spec.alike().into_iter().collect();
    let linears = || {
        let all = firsts
            .iter()
            .flat_map(|l| spec.linears(*l))
            .map(|l| (l.input, l.output));
        let experts = firsts.iter().filter_map(|l| spec.layers[*l].experts);
        all.chain(experts.map(|e| (spec.hidden, e.intermediate)))
    };
    let widest = linears().map(|(input, output)| input.max(output)).max().unwrap_or(0);
    let largest = linears().map(|(input, output)| input * output).max().unwrap_or(0);
    let ranks = inputs.adapters.values().map(|c| c.rank);
    // The MLP may compute its tokens in chunks.
    let rows = |linear: &LinearSpec| match linear.sublayer {
        Sublayer::Mlp => inputs.strategy.mlp_tokens.unwrap_or(inputs.tokens).min(inputs.tokens),
        _ => inputs.tokens,
    };
    let activations = firsts.iter().flat_map(|l| spec.linears(*l));
    let activations = activations.map(|linear| rows(&linear) * linear.input.max(linear.output));
    // The loss multiplies the gradient of a chunk of logits with the head.
    let head = spec.head_name();
    let head_trains = active.wants(head) || active.wants(&tokens::name_of(head));
    let chunk = LogitsChunk::new(
        spec,
        recipe,
        inputs,
        head_trains,
        inputs.head_chunk(spec, active).is_some(),
    );
    let logits = chunk.tokens * PIECE.min(spec.vocab);
    let trained = active.layers().flat_map(|l| {
        let trains = move |linear: &LinearSpec| {
            let weight = format!("{}.weight", linear.name);
            active.of_layer(l).any(|name| name.ends_with(&weight))
        };
        spec.linears(l).into_iter().filter(trains)
    });
    let gradients = trained.map(|linear| rows(&linear) * (linear.input + linear.output));
    let of_head = head_trains.then(|| chunk.tokens * (PIECE.min(spec.vocab) + spec.hidden));
    let products = ProductSizes {
        tokens: inputs.tokens,
        widest_linear: widest,
        widest: widest.max(spec.vocab),
        // Only projections are quantized.
        largest_quantized: if inputs.strategy.storage.quantized().is_empty() {
            0
        } else {
            largest
        },
        rank: ranks.clone().filter(|rank| linear::can_fuse(*rank)).max().unwrap_or(0),
        unfused_rank: ranks.filter(|rank| !linear::can_fuse(*rank)).max().unwrap_or(0),
        activations: activations.max().unwrap_or(0).max(logits),
        gradient: gradients.chain(of_head).max().unwrap_or(0),
    };
    let mixers = mixer_scratch(spec, inputs, bf16);
    let elements = products.thread_elements().max(mixers);
    let tiles = if bf16 { products.tile_bytes() } else { 0 };
    inputs.threads as u64 * (linear::gemm_bytes() + 4 * elements as u64) + tiles
}

/// Elements that one thread needs for attention or for Gated DeltaNet.
fn mixer_scratch(spec: &Spec, inputs: &PlanInputs, bf16: bool) -> usize {
    let scratch = |(mixer, window, kv_heads, head_dim)| match mixer {
        Mixer::DeltaNet(sizes) => delta_rule::scratch(&delta_net::heads(&sizes), inputs.longest),
        Mixer::ShortConv { .. } => 0,
        Mixer::Attention | Mixer::Latent(_) => {
            let form = attention::AttentionSpec {
                heads: spec.heads,
                kv_heads,
                head_dim,
                scale: spec.attention_scale,
                softcap: spec.attention_softcap,
                window,
                bf16,
            };
            attention::scratch(&form, inputs.longest)
        }
    };
    let of_layer = |(l, s): (usize, &LayerSpec)| (s.mixer, s.window, spec.kv_heads_of(l), spec.head_dim_of(l));
    let different: HashSet<_> = spec.layers.iter().enumerate().map(of_layer).collect();
    different.into_iter().map(scratch).max().unwrap_or(0)
}

fn micro_batch(
    l: &mut Ledger,
    model: &PlanModel,
    recipe: &Recipe,
    inputs: &PlanInputs,
    sink: &mut SimulatedSink,
    fetched: &mut FetchedLayers,
    micro: usize,
) {
    // With offloading, two layer inputs are on the device at a time: one is copied, one is in use.
    let offloaded = if inputs.strategy.offload_inputs { 2 } else { 0 };
    let here = l.alloc(
        MemoryKind::LayerInputs,
        offloaded * inputs.element * (inputs.tokens * model.spec.row()) as u64,
    );
    pass(l, model, recipe, inputs, sink, fetched, micro);
    l.free(here);
}

/// Tensors saved for the backward pass.
enum SavedAllocations {
    Layer(usize, Allocation, Option<SavedActivationsMemory>),
    /// Saved tensors of this many equal layers.
    Alike(usize, Vec<Allocation>),
}

fn pass(
    l: &mut Ledger,
    model: &PlanModel,
    recipe: &Recipe,
    inputs: &PlanInputs,
    sink: &mut SimulatedSink,
    fetched: &mut FetchedLayers,
    micro: usize,
) {
    let spec = model.spec;
    let n = inputs.tokens as u64;
    let nd = inputs.element * n * spec.hidden as u64;
    let row = inputs.element * n * spec.row() as u64;
    let layers = spec.layers.len();
    let lowest = sink.active.lowest_layer(layers);
    let to_embedding = sink.active.lowest() == Group::Embedding;
    let dropout = recipe.tune.lora.lora_dropout > 0.0;
    let active = sink.active;
    let is_active = |name: &str| active.contains(name);
    let settings = inputs.layer_memory(spec, &is_active, dropout);
    let block = |index| LayerMemory::new(settings, index);

    let stored = recipe.model.dtype.bytes();
    if inputs.reads_embedding_rows(spec, sink.active) {
        l.moment("the embedding");
        l.touch(
            MemoryKind::Weights,
            stored * (inputs.tokens.min(spec.vocab) * spec.hidden) as u64 + nd,
        );
    }
    if recipe.train.neftune_noise_alpha > 0.0 {
        l.moment("the noise on the embeddings");
        let embedded = l.alloc(MemoryKind::LayerInputs, nd);
        // Stream, place and magnitude of each token.
        l.touch(MemoryKind::Data, embedding::NOISE_BYTES * n);
        l.free(embedded);
    }
    streams::spread(l, &settings, nd);
    let keep_from = layers.saturating_sub(inputs.strategy.saved_layers);
    let mut shared = SharedMemory::new(l, &settings);
    let mut waiting: Vec<SavedAllocations> = Vec::new();
    let mut before = l.sizes();
    for stretch in model.stretches(active, &[lowest, lowest + 1, keep_from]) {
        let layer = match stretch {
            LayerStep::One(layer) => layer,
            LayerStep::Same(count) => {
                waiting.push(SavedAllocations::Alike(count, l.alloc_again(&before, count as u64)));
                continue;
            }
        };
        l.moment(format!("the forward pass of layer {layer}"));
        // The next layer comes while one computes.
        let other = if layer + 1 < layers {
            layer + 1
        } else {
            layer.saturating_sub(1)
        };
        fetched.hold(l, model, inputs, sink.active, [layer, other]);
        before = l.sizes();
        let keep = layer >= lowest && layer >= keep_from;
        let kind = match (layer >= lowest, inputs.strategy.offload_inputs && !keep) {
            (true, true) => MemoryKind::OffloadedInputs,
            (true, false) => MemoryKind::LayerInputs,
            (false, _) => MemoryKind::LayerWork,
        };
        let x = l.alloc(kind, row);
        shared.forward(l, layer);
        let (y, kept) = block(layer).forward(l, keep);
        l.free(y);
        if layer >= lowest {
            waiting.push(SavedAllocations::Layer(layer, x, kept));
        } else {
            l.free(x);
        }
    }
    let x = l.alloc(MemoryKind::LayerWork, row);

    l.moment(match micro {
        0 => "the loss",
        _ => "the loss of a later micro-batch",
    });
    let head = if spec.tied { EMBEDDING } else { LM_HEAD };
    let final_norm = ["weight", "bias"].map(|part| format!("{}.{part}", spec.modules.final_norm));
    let dh = lowest < layers
        || to_embedding
        || final_norm.iter().any(|name| sink.wants(name))
        || streams::out_wanted(&settings, sink);
    if let Some((_, work)) = inputs.teacher.as_ref().map(|t| t.forward(inputs)) {
        l.touch(MemoryKind::Teacher, work);
    }
    streams::merge(l, &settings, nd);
    let h = l.alloc(MemoryKind::Loss, nd);
    let indices = l.alloc(MemoryKind::Loss, 8 * n);
    let d_hidden = dh.then(|| l.alloc(MemoryKind::Loss, nd));
    // The gradient of trained rows of the head is taken from the gradient of the whole head.
    let to_head = sink.wants(head) || sink.wants(&tokens::name_of(head));
    let d_head = to_head.then(|| sink.compute(l, head));
    let in_parts = inputs.head_chunk(spec, sink.active).is_some();
    let logits = LogitsChunk::new(spec, recipe, inputs, to_head, in_parts).bytes(spec, recipe, inputs);
    l.touch(MemoryKind::Loss, logits);
    l.free_all([h, indices]);
    let mut tied = None;
    match d_head {
        Some(gradient) if !sink.wants(head) => l.free(gradient),
        Some(gradient) if spec.tied => tied = Some(gradient),
        Some(gradient) => sink.take(l, head, gradient),
        None => {}
    }
    let Some(d_hidden) = d_hidden else {
        l.free(x);
        shared.free(l);
        return;
    };
    let mut dx = l.alloc(MemoryKind::LayerWork, row);
    streams::merge_backward(l, &settings, nd, sink);
    final_norm.iter().for_each(|name| sink.give(l, name));
    l.free_all([x, d_hidden]);

    shared.start_backward(l, to_embedding);
    let (mut gradients, mut sums) = (0, 0);
    while let Some(next) = waiting.pop() {
        let (layer, x, kept) = match next {
            SavedAllocations::Layer(layer, x, kept) => (layer, x, kept),
            SavedAllocations::Alike(count, held) => {
                l.free_all(held);
                let kept = [(MemoryKind::Gradients, gradients), (MemoryKind::HostGradients, sums)];
                sink.alike
                    .extend(kept.map(|(kind, bytes)| l.alloc(kind, bytes * count as u64)));
                continue;
            }
        };
        l.moment(format!("the backward pass of layer {layer}"));
        let next = if layer > lowest { layer - 1 } else { 0 };
        fetched.hold(l, model, inputs, sink.active, [layer, next]);
        let before = l.sizes();
        let need_dx = layer > lowest || to_embedding;
        shared.backward(l, layer, lowest);
        let below = block(layer).vjp(l, kept, dx, need_dx, sink);
        shared.done(l, layer);
        l.free(x);
        let more = |kind: MemoryKind| l.sizes()[kind].saturating_sub(before[kind]);
        (gradients, sums) = (more(MemoryKind::Gradients), more(MemoryKind::HostGradients));
        match below {
            Some(below) => dx = below,
            None => {
                l.free_all(tied);
                shared.free(l);
                return;
            }
        }
    }
    if to_embedding {
        dx = streams::spread_backward(l, &settings, nd, dx, sink);
        shared.end(l, &settings, sink);
    }
    shared.free(l);
    if to_embedding && sink.wants(EMBEDDING) {
        l.moment("the gradient of the embedding");
        let gradient = tied.take().unwrap_or_else(|| sink.compute(l, EMBEDDING));
        sink.take(l, EMBEDDING, gradient);
    }
    l.free(dx);
    l.free_all(tied);
}
