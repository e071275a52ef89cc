//! Simulates the memory of one optimizer step in the order of `engine::step` and `engine::pass`.

use super::Inputs;
use super::ledger::{Allocation, Kind, Ledger};
use super::model::{Model, Stretch};
use super::weights;
use super::work::{self, Block};
use crate::engine::{Active, Gradients};
use crate::model::spec::{EMBEDDING, FINAL_NORM, LM_HEAD};
use crate::model::{Spec, tokens};
use crate::ops::cross_entropy::{PIECE, PIECE_TOKENS};
use crate::ops::{CpuBackend, attention};
use crate::recipe::{Dtype, Recipe};
use crate::sft::CausalLm;
use crate::source::Group;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of an element of a masked weight that is being updated: f32, or the two halves of bf16.
const MASKED: u64 = 4;
/// Bytes per thread that the `gemm` crate packs operands into.
const PACKING: u64 = 1 << 20;
/// Packing of one task of a matrix product (as in `ops`): up to this many rows of A and steps of k, elements of B.
const PACKED_ROWS: u64 = 518;
const PACKED_STEPS: u64 = 256;
const PACKED_B: u64 = 66_000;
/// The largest rank of a fused LoRA product (as in `ops`).
const RIDES: u64 = 64;
/// Largest size in bytes of an operand packed for the tile unit (as in `ops`).
const PACKED_TILES: u64 = 16 << 20;

/// Simulated gradient sink.
pub(super) struct Sink<'a> {
    pub active: &'a Active,
    model: &'a Model<'a>,
    keep: bool,
    kept: BTreeMap<String, Allocation>,
    /// Gradients of layers equal to those that were simulated.
    alike: Vec<Allocation>,
    /// Sums of gradients that are computed in pieces, while this is in progress.
    sums: Option<BTreeMap<String, Allocation>>,
}

impl Sink<'_> {
    /// From now on gradients are computed in pieces (as in `model::pieces`).
    pub fn start_sums(&mut self) {
        self.sums = Some(BTreeMap::new());
    }

    /// All pieces are complete.
    pub fn finish_sums(&mut self, l: &mut Ledger) {
        for (name, gradient) in self.sums.take().into_iter().flatten() {
            self.take(l, &name, gradient);
        }
    }

    pub fn wants(&self, name: &str) -> bool {
        self.active.wants(name)
    }

    fn bytes(&self, name: &str) -> u64 {
        4 * self.model.elements(name)
    }

    /// Allocates the gradient of `name`.
    pub fn compute(&self, l: &mut Ledger, name: &str) -> Allocation {
        l.alloc(Kind::Gradients, self.bytes(name))
    }

    /// Passes the gradient to the sink.
    pub fn take(&mut self, l: &mut Ledger, name: &str, gradient: Allocation) {
        if let Some(sums) = &mut self.sums {
            if sums.contains_key(name) {
                l.free(gradient)
            } else {
                sums.insert(name.to_string(), gradient);
            }
            return;
        }
        if self.active.corrects(name).is_some() {
            l.free(gradient);
            return;
        }
        let elements = self.model.elements(name) as usize;
        let part = self.active.subset(name, elements).map(|p| p.len as u64);
        // Of a masked parameter only the active part is kept.
        let gradient = match part {
            Some(part) => {
                let active = l.alloc(Kind::Gradients, 4 * part);
                l.free(gradient);
                active
            }
            None => gradient,
        };
        if self.keep && !self.kept.contains_key(name) {
            self.kept.insert(name.to_string(), gradient);
            return;
        }
        if !self.keep {
            l.touch(Kind::Scratch, MASKED * part.unwrap_or(0));
        }
        l.free(gradient);
    }

    /// Computes the gradient and passes it to the sink, if it is needed.
    pub fn give(&mut self, l: &mut Ledger, name: &str) {
        // A later part is added to the sum in place.
        let summed = self.sums.as_ref().is_some_and(|sums| sums.contains_key(name));
        if self.wants(name) && !summed {
            let gradient = self.compute(l, name);
            self.take(l, name, gradient);
        }
    }
}

pub(super) fn walk(l: &mut Ledger, model: &Model, recipe: &Recipe, inputs: &Inputs, active: &Active) {
    let spec = model.spec;
    let bf16 = recipe.model.dtype == Dtype::Bf16;
    let mut sink = Sink {
        active,
        model,
        keep: inputs.strategy.gradients == Gradients::Keep,
        kept: BTreeMap::new(),
        alike: Vec::new(),
        sums: None,
    };
    let tokens = inputs.tokens as u64;
    let rope: u64 = spec.ropes.iter().map(|r| 8 * r.inv_freq.len() as u64).sum();
    let held = [
        // ids, positions, targets of every micro-batch; the rope tables of one.
        l.alloc(Kind::Data, 12 * tokens * inputs.micro_batches as u64 + rope * tokens),
        l.alloc(Kind::Scratch, scratch(spec, inputs, bf16)),
        l.alloc(
            Kind::Teacher,
            inputs.teacher.as_ref().map_or(0, |t| t.forward(inputs).0),
        ),
        l.alloc(
            Kind::Gradients,
            inputs.teacher.as_ref().map_or(0, |t| t.projections(spec)),
        ),
    ];
    // The second micro-batch finds the sums of the first; those after it are like the second.
    for micro in 0..inputs.micro_batches.min(2) {
        micro_batch(l, model, recipe, inputs, &mut sink, micro);
    }
    l.moment("the optimizer update");
    // A masked weight is changed in a copy of its active part.
    let largest = sink.kept.keys().filter_map(|n| {
        let elements = model.elements(n) as usize;
        active.subset(n, elements).map(|p| p.len as u64)
    });
    l.touch(Kind::Scratch, MASKED * largest.max().unwrap_or(0));
    let kept: Vec<Allocation> = std::mem::take(&mut sink.kept).into_values().collect();
    l.free_all(kept);
    l.free_all(std::mem::take(&mut sink.alike));
    l.free_all(held);
}

/// An evaluation: a forward pass that keeps nothing, and a loss.
pub(super) fn evaluate(l: &mut Ledger, model: &Model, recipe: &Recipe, inputs: &Inputs) {
    let evaluation = inputs.evaluation;
    l.during("an evaluation, ");
    if evaluation.answers > 0 {
        l.moment("its answers");
        let answers = inputs.answers(model, evaluation.answers, evaluation.answer);
        l.touch(Kind::Rollout, answers);
    }
    // With fewer tokens than a step has it needs less in every part.
    if evaluation.tokens > inputs.tokens || evaluation.longest > inputs.longest {
        let mut own = inputs.clone();
        (own.tokens, own.longest, own.documents) = (evaluation.tokens, evaluation.longest, 1);
        (
            own.strategy.saved_layers,
            own.micro_batches,
            own.strategy.offload_inputs,
        ) = (0, 1, false);
        // The student alone is measured.
        own.teacher = None;
        walk(l, model, recipe, &own, &Active::new([]));
    }
    l.during("");
}

/// Buffers of the CPU's products and attention; a GPU packs nothing.
fn scratch(spec: &Spec, inputs: &Inputs, bf16: bool) -> u64 {
    if inputs.on_gpu {
        return 0;
    }
    let tiles = if bf16 { tile_buffers(spec, inputs) } else { 0 };
    let packing = if CpuBackend::current() == CpuBackend::Portable {
        PACKING
    } else {
        0
    };
    inputs.threads as u64 * (packing + 4 * thread_scratch(spec, inputs, bf16)) + tiles
}

/// Elements that one thread keeps for attention or for packed operands.
fn thread_scratch(spec: &Spec, inputs: &Inputs, bf16: bool) -> u64 {
    let form = |window: Option<usize>| attention::Spec {
        heads: spec.heads,
        kv_heads: spec.kv_heads,
        head_dim: spec.head_dim,
        scale: spec.attention_scale,
        softcap: spec.attention_softcap,
        window,
        bf16,
    };
    let windows: BTreeSet<Option<usize>> = spec.layers.iter().map(|s| s.window).collect();
    let windows = windows
        .into_iter()
        .map(|w| attention::scratch(&form(w), inputs.longest));
    let attention = windows.max().unwrap_or(0) as u64;
    // The larger operand decides: activations in the forward pass, a gradient's rows in the backward pass.
    let widest = spec
        .linears()
        .into_iter()
        .map(|(_, input, output, ..)| input.max(output))
        .max();
    let widest = widest.unwrap_or(0).max(spec.vocab) as u64;
    let packed = |rows: u64, steps: u64| rows.min(PACKED_ROWS) * steps.min(PACKED_STEPS);
    let n = inputs.tokens as u64;
    // Fused LoRA: its rows, and as many more steps of k in A.
    let fuses = 2 * n.min(PACKED_ROWS) * fused_steps(inputs);
    attention.max(packed(n, widest).max(packed(widest, n)) + PACKED_B.min(widest * PACKED_STEPS) + fuses)
}

/// Bytes of the operands packed for the tile unit, if there is one: an activation and a weight.
fn tile_buffers(spec: &Spec, inputs: &Inputs) -> u64 {
    if !CpuBackend::current().packs_bf16() {
        return 0;
    }
    let linears = spec.linears().into_iter().map(|(_, input, output, ..)| (input, output));
    let (mut wide, mut large) = (0, spec.vocab * spec.hidden);
    for (input, output) in linears {
        wide = wide.max(input).max(output);
        large = large.max(input * output);
    }
    let bytes = |elements: usize| PACKED_TILES.min(2 * elements as u64);
    // A fused LoRA product extends both operands, in steps of 32.
    let fuses = 2 * fused_steps(inputs).next_multiple_of(32) * (inputs.tokens + wide) as u64;
    bytes(inputs.tokens * wide) + bytes(large) + fuses
}

/// The largest rank that is fused with a product.
fn fused_steps(inputs: &Inputs) -> u64 {
    let ranks = inputs.adapters.values().map(|c| c.rank as u64);
    ranks.filter(|r| *r <= RIDES).max().unwrap_or(0)
}

fn micro_batch(l: &mut Ledger, model: &Model, recipe: &Recipe, inputs: &Inputs, sink: &mut Sink, micro: usize) {
    // With offloading, two layer inputs are on the device at a time: one in a copy, one in use.
    let parked = if inputs.strategy.offload_inputs { 2 } else { 0 };
    let here = l.alloc(
        Kind::Inputs,
        parked * inputs.element * (inputs.tokens * model.spec.hidden) as u64,
    );
    pass(l, model, recipe, inputs, sink, micro);
    l.free(here);
}

/// Tensors saved for the backward pass.
enum Waiting {
    Layer(usize, Allocation, Option<work::SavedActivations>),
    /// Saved tensors of this many equal layers.
    Alike(usize, Vec<Allocation>),
}

fn pass(l: &mut Ledger, model: &Model, recipe: &Recipe, inputs: &Inputs, sink: &mut Sink, micro: usize) {
    let spec = model.spec;
    let n = inputs.tokens as u64;
    let nd = inputs.element * n * spec.hidden as u64;
    let layers = spec.layers.len();
    let lowest = sink.active.lowest_layer(layers);
    let to_embedding = sink.active.lowest() == Group::Embedding;
    let dropout = recipe.tune.lora.lora_dropout > 0.0;
    let active = sink.active;
    let block = |index| Block::new(spec, index, inputs, active, dropout);

    let stored = recipe.model.dtype.bytes();
    if weights::embedding_in_rows(spec, inputs.strategy.placement, sink.active) {
        l.moment("the embedding");
        l.touch(
            Kind::Weights,
            stored * (inputs.tokens.min(spec.vocab) * spec.hidden) as u64 + nd,
        );
    }
    let keep_from = layers.saturating_sub(inputs.strategy.saved_layers);
    let mut waiting: Vec<Waiting> = Vec::new();
    let mut before = l.sizes();
    for stretch in model.stretches(active, &[lowest, lowest + 1, keep_from]) {
        let layer = match stretch {
            Stretch::One(layer) => layer,
            Stretch::Same(count) => {
                waiting.push(Waiting::Alike(count, l.alloc_again(&before, count as u64)));
                continue;
            }
        };
        l.moment(format!("the forward pass of layer {layer}"));
        before = l.sizes();
        let keep = layer >= lowest && layer >= keep_from;
        let kind = match (layer >= lowest, inputs.strategy.offload_inputs && !keep) {
            (true, true) => Kind::Offloaded,
            (true, false) => Kind::Inputs,
            (false, _) => Kind::Layer,
        };
        let x = l.alloc(kind, nd);
        let (y, kept) = block(layer).forward(l, keep);
        l.free(y);
        if layer >= lowest {
            waiting.push(Waiting::Layer(layer, x, kept));
        } else {
            l.free(x);
        }
    }
    let x = l.alloc(Kind::Layer, nd);

    l.moment(match micro {
        0 => "the loss",
        _ => "the loss of a later micro-batch",
    });
    let head = if spec.tied { EMBEDDING } else { LM_HEAD };
    let dh = lowest < layers || to_embedding || sink.wants(FINAL_NORM);
    if let Some((_, work)) = inputs.teacher.as_ref().map(|t| t.forward(inputs)) {
        l.touch(Kind::Teacher, work);
    }
    let h = l.alloc(Kind::Loss, nd);
    let indices = l.alloc(Kind::Loss, 8 * n);
    let d_hidden = dh.then(|| l.alloc(Kind::Loss, nd));
    // The gradient of trained rows of the head is taken from the gradient of the whole head.
    let to_head = sink.wants(head) || sink.wants(&tokens::name_of(head));
    let d_head = to_head.then(|| sink.compute(l, head));
    let chunk = CausalLm::chunk_for(spec.vocab, to_head).min(inputs.tokens) as u64;
    // A number and a sum for each 2048 logits of a row.
    let sums = 16 * spec.vocab.div_ceil(2048) as u64;
    let logits = match weights::head_in_pieces(spec, inputs.strategy.placement, sink.active) {
        // The hidden states of the trained tokens, and their gradient.
        Some(_) => {
            let chunk = if inputs.on_gpu {
                PIECE_TOKENS.min(inputs.tokens) as u64
            } else {
                chunk
            };
            4 * chunk * PIECE.min(spec.vocab) as u64 + 2 * 4 * n * spec.hidden as u64 + sums * n
        }
        None => chunk * (4 * (spec.vocab + spec.hidden) as u64 + sums),
    };
    l.touch(Kind::Loss, logits);
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
        return;
    };
    let mut dx = l.alloc(Kind::Layer, nd);
    sink.give(l, FINAL_NORM);
    l.free_all([x, d_hidden]);

    let mut gradients = 0;
    while let Some(next) = waiting.pop() {
        let (layer, x, kept) = match next {
            Waiting::Layer(layer, x, kept) => (layer, x, kept),
            Waiting::Alike(count, held) => {
                l.free_all(held);
                let kept = l.alloc(Kind::Gradients, gradients * count as u64);
                sink.alike.push(kept);
                continue;
            }
        };
        l.moment(format!("the backward pass of layer {layer}"));
        let before = l.sizes()[Kind::Gradients];
        let need_dx = layer > lowest || to_embedding;
        let below = block(layer).vjp(l, kept, dx, need_dx, sink);
        l.free(x);
        gradients = l.sizes()[Kind::Gradients].saturating_sub(before);
        match below {
            Some(below) => dx = below,
            None => {
                l.free_all(tied);
                return;
            }
        }
    }
    if to_embedding && sink.wants(EMBEDDING) {
        l.moment("the gradient of the embedding");
        let gradient = tied.take().unwrap_or_else(|| sink.compute(l, EMBEDDING));
        sink.take(l, EMBEDDING, gradient);
    }
    l.free(dx);
    l.free_all(tied);
}
