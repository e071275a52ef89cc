//! Memory of a mixture of experts: each tensor that `experts.rs` allocates and frees. The number of tokens of an expert is
//! not known before the run: all tokens may choose the same, so the work of one expert is that of all tokens. The size of
//! the saved activations does not depend on the choice.

use super::super::block::memory::LayerMemory;
use super::super::contracts::GradSinkMemory;
use crate::base::ledger::MemoryKind::{Activations, LayerWork};
use crate::base::ledger::{Allocation, Ledger};
use crate::formats::adapter::EXPERT_PARAMETERS;
use crate::model::spec::ExpertsSpec;
use crate::ops::quantized::TILE;
use crate::ops::routing::Score;
use crate::ops::{expert_pairs, grouped};
use crate::peft::AdapterCost;
use std::sync::Arc;

/// Gradients that the backward pass of the experts must compute.
#[derive(Clone, Copy)]
struct ExpertNeeds {
    /// The gradient of the rows that the experts read.
    dh: bool,
    /// The gradient of the input of `down_proj`.
    dm: bool,
}

impl LayerMemory<'_> {
    /// Chooses the experts; the routing stays.
    fn route(&self, l: &mut Ledger, sizes: &ExpertsSpec) -> Allocation {
        let (tokens, k, outputs) = (
            self.settings.tokens,
            sizes.router.top_k,
            sizes.router.outputs(sizes.count),
        );
        let (scores, choices) = (tokens * outputs, tokens * k);
        // Tokens and weights of all experts.
        let rows = 2 * choices;
        let (work, stays) = if !self.settings.on_gpu {
            // Scores, choices, weights and their order.
            (scores, rows + tokens * (sizes.count + 3 * k + 1) + 2 * sizes.count)
        } else if sizes.router.score == Score::TwoLevel {
            // The routing is in host memory. Here are the rows of each token, for experts that are computed together.
            (scores, rows + choices)
        } else {
            // The logits become scores. Choices, their rows in two orders, the logarithms.
            (choices + 3 * tokens, rows + scores + 3 * choices + tokens)
        };
        let work = l.alloc(LayerWork, 4 * work as u64);
        let routing = l.alloc(LayerWork, 4 * stays as u64);
        l.free(work);
        routing
    }

    /// The list of the tokens of an expert: on a GPU a view.
    fn assigned_bytes(&self) -> u64 {
        if self.settings.on_gpu {
            0
        } else {
            4 * self.settings.tokens as u64
        }
    }

    /// A product with projection `p` of an expert.
    fn dequantize_expert(&self, l: &mut Ledger, sizes: &ExpertsSpec, p: usize) {
        let (d, i) = (self.settings.spec.hidden, sizes.intermediate);
        let (input, output) = if p == 2 { (i, d) } else { (d, i) };
        let name = sizes.linear_name(0, p);
        if !self.together() || output * input > TILE {
            return self.dequantize(l, &name, input, output);
        }
        let (storage, weight) = (&self.settings.storage, self.name(&format!("{name}.weight")));
        if storage.quantized().contains_key(weight.as_str()) && !(self.settings.active)(&weight) {
            l.touch(
                LayerWork,
                grouped::work_bytes(sizes.count, (output, input), storage.dtype()),
            );
        }
    }

    /// True if the experts are computed together.
    fn together(&self) -> bool {
        let settings = &self.settings;
        ExpertsSpec::together(settings.on_gpu, settings.experts_streamed, settings.storage.products())
    }

    /// The rows of `tensors` tensors for experts of other ranks and for the own ones, and the results, with an even router: those of K
    /// experts for each token. They exist as received lists, then as tensors.
    fn travel(&self, l: &mut Ledger, sizes: &ExpertsSpec, tensors: u64) -> Option<Allocation> {
        let ranks = self.settings.expert_ranks;
        (ranks > 1).then(|| {
            let k = sizes.router.top_k;
            let (rows, results) = (tensors * k.min(ranks) as u64, k as u64);
            let held = l.alloc(LayerWork, self.nd * (rows + results));
            l.touch(LayerWork, self.nd * (rows.max(2 * results) - results));
            held
        })
    }

    /// On a GPU the gradients of gate and up do not overwrite them.
    fn gate_gradients(&self, l: &mut Ledger, parts: Vec<Allocation>, bytes: u64) -> Vec<Allocation> {
        if !self.settings.on_gpu || self.settings.spec.clamped_glu.is_some() {
            return parts;
        }
        let gradients = vec![l.alloc(LayerWork, 2 * bytes)];
        l.free_all(parts);
        gradients
    }

    /// The adapter on a parameter of all experts.
    fn joined(&self, sizes: &ExpertsSpec, parameter: &str) -> Option<&AdapterCost> {
        let name = format!("{}.{parameter}", sizes.names.module);
        self.settings.adapters.get(&self.name(&name))
    }

    /// Bytes of u of an adapter on the parameter of a projection.
    fn low_bytes(&self, sizes: &ExpertsSpec, parameter: &str) -> u64 {
        let columns = |cost: &AdapterCost| expert_pairs::columns(cost.rank, self.settings.element);
        self.joined(sizes, parameter)
            .map_or(0, |cost| self.bytes(columns(cost)))
    }

    /// The copies of all pairs, for experts that are computed together.
    fn pair_copies_together(&self, l: &mut Ledger, sizes: &ExpertsSpec) -> Allocation {
        let bytes = |cost: &AdapterCost| {
            let elements = cost.trained.iter().map(|(_, dims)| dims.iter().product::<usize>());
            expert_pairs::copied_bytes(elements.sum(), cost.rank, self.settings.element)
        };
        let costs = EXPERT_PARAMETERS.iter().filter_map(|name| self.joined(sizes, name));
        let all = if self.together() { costs.map(bytes).sum() } else { 0 };
        l.alloc(LayerWork, all)
    }

    /// From x1, which the caller holds, to the output of the half; also the saved activations.
    pub(in crate::model) fn experts(
        &self,
        l: &mut Ledger,
        sizes: &ExpertsSpec,
        keep: bool,
    ) -> (Allocation, Vec<Allocation>) {
        let h = self.settings.spec.norms.before_mlp.map(|_| l.alloc(LayerWork, self.nd));
        let (mut y, mut saved, routing) = self.experts_sum(l, sizes, keep);
        if keep {
            saved.push(l.relabel(routing, Activations));
        } else {
            l.free(routing);
        }
        if self.settings.spec.norms.after_mlp.is_some() {
            let normed = l.alloc(LayerWork, self.nd);
            let sum = std::mem::replace(&mut y, normed);
            if keep {
                saved.push(l.relabel(sum, Activations));
            } else {
                l.free(sum);
            }
        }
        l.free_all(h);
        (y, saved)
    }

    /// The sum of the experts, the saved activations, and the routing; the caller holds h.
    fn experts_sum(
        &self,
        l: &mut Ledger,
        sizes: &ExpertsSpec,
        keep: bool,
    ) -> (Allocation, Vec<Allocation>, Allocation) {
        let copies = self.pair_copies_together(l, sizes);
        let routing = self.route(l, sizes);
        let mut saved = Vec::new();
        let y = match sizes.shared {
            Some(shared) => {
                let (linears, down) = self.linears(false);
                let factors = l.alloc(LayerWork, 8 * self.settings.tokens as u64);
                let width = self.bytes(shared.intermediate);
                let parts = self.projections(l, &linears, &[width, width]);
                let m = l.alloc(LayerWork, width);
                if keep {
                    saved.extend(parts);
                } else {
                    l.free_all(parts);
                }
                let y = self.linear(l, down);
                l.free_all([m, factors]);
                y
            }
            None => l.alloc(LayerWork, self.nd),
        };
        let rows = self.travel(l, sizes, 1);
        let width = self.bytes(sizes.intermediate);
        if keep && self.settings.expert_ranks == 1 {
            saved.push(l.alloc(LayerWork, 2 * width * sizes.router.top_k as u64));
        }
        let work = l.alloc(
            LayerWork,
            self.assigned_bytes()
                + self.nd
                + if keep && self.settings.expert_ranks == 1 {
                    0
                } else {
                    2 * width
                },
        );
        let [gate_up, down] = EXPERT_PARAMETERS.map(|name| self.low_bytes(sizes, name));
        l.touch(LayerWork, gate_up);
        self.dequantize_expert(l, sizes, 0);
        let m = l.alloc(LayerWork, width);
        l.touch(LayerWork, self.nd + down);
        let part = l.alloc(LayerWork, self.nd);
        self.dequantize_expert(l, sizes, 2);
        l.free(part);
        l.free_all([work, m, copies].into_iter().chain(rows));
        let saved = saved.into_iter().map(|s| l.relabel(s, Activations)).collect();
        (y, saved, routing)
    }

    fn expert_wanted(&self, sink: &dyn GradSinkMemory, sizes: &ExpertsSpec, expert: usize, projection: usize) -> bool {
        self.wants(sink, &sizes.linear_name(expert, projection))
    }

    fn router_wanted(&self, sink: &dyn GradSinkMemory, sizes: &ExpertsSpec) -> bool {
        let gate = sizes.shared.and_then(|s| s.gate);
        self.wants(sink, sizes.names.router) || gate.is_some_and(|gate| self.wants(sink, gate))
    }

    /// The parts of the adapter on a parameter of all experts that get a gradient.
    fn joined_wanted(&self, sink: &dyn GradSinkMemory, sizes: &ExpertsSpec, parameter: &str) -> Vec<&Arc<str>> {
        let parts = self.joined(sizes, parameter).into_iter().flat_map(|cost| &cost.trained);
        parts.map(|(part, _)| part).filter(|part| sink.wants(part)).collect()
    }

    /// True if a parameter of the router or of a routed expert gets a gradient.
    pub(in crate::model) fn experts_wanted(&self, sink: &dyn GradSinkMemory, sizes: &ExpertsSpec) -> bool {
        let mut all = (0..sizes.count).flat_map(|e| (0..3).map(move |p| (e, p)));
        let mut joined = EXPERT_PARAMETERS.iter();
        self.router_wanted(sink, sizes)
            || joined.any(|name| !self.joined_wanted(sink, sizes, name).is_empty())
            || all.any(|(e, p)| self.expert_wanted(sink, sizes, e, p))
    }

    fn give_bias(&self, l: &mut Ledger, sizes: &ExpertsSpec, below: &str, sink: &mut dyn GradSinkMemory) {
        if sizes.bias {
            sink.give(l, &self.name(&format!("{below}.bias")));
        }
    }

    fn give_weight(&self, l: &mut Ledger, below: &str, sink: &mut dyn GradSinkMemory) {
        sink.give(l, &self.name(&format!("{below}.weight")));
    }

    /// The caller holds `dy`; the returned `∂x`, if there is one, is held.
    pub(in crate::model) fn experts_backward(
        &self,
        l: &mut Ledger,
        sizes: &ExpertsSpec,
        saved: Vec<Allocation>,
        need_dx: bool,
        sink: &mut dyn GradSinkMemory,
    ) -> Option<Allocation> {
        let norm = self.settings.spec.norms.before_mlp;
        let (linears, down) = self.linears(false);
        let norm_wanted = norm.is_some_and(|n| self.norm_wanted(sink, n));
        let after = self.settings.spec.norms.after_mlp;
        let after_wanted = after.is_some_and(|n| self.norm_wanted(sink, n));
        let shared_wanted = |sink: &dyn GradSinkMemory| {
            let mut all = linears.iter().chain(sizes.shared.map(|_| &down));
            all.any(|&x| self.linear_wanted(sink, x))
        };
        if !need_dx && !norm_wanted && !after_wanted && !self.experts_wanted(sink, sizes) && !shared_wanted(sink) {
            l.free_all(saved);
            return None;
        }
        let h = norm.map(|_| l.alloc(LayerWork, self.nd));
        let need_dh = need_dx || norm_wanted;
        let kept = !saved.is_empty();
        let mut routing = None;
        let scaled = match after {
            Some(norm) => {
                let sum = (!kept).then(|| {
                    let (sum, _, routed) = self.experts_sum(l, sizes, false);
                    routing = Some(routed);
                    sum
                });
                let d = self.norm_backward(l, norm, self.nd, sink);
                l.free_all(sum);
                Some(d)
            }
            None => self.scaled_gradient(l),
        };
        let copies = self.pair_copies_together(l, sizes);
        if !kept && routing.is_none() {
            routing = Some(self.route(l, sizes));
        }
        let needs = ExpertNeeds {
            dh: need_dh,
            dm: need_dh || self.router_wanted(sink, sizes),
        };
        let mut dh = None;
        if let Some(shared) = sizes.shared {
            let width = self.bytes(shared.intermediate);
            let factors = l.alloc(LayerWork, 8 * self.settings.tokens as u64);
            let parts = if kept {
                Vec::new()
            } else {
                self.projections(l, &linears, &[width, width])
            };
            let m = [width, width].map(|bytes| l.alloc(LayerWork, bytes));
            let dm = self.linear_backward(l, down, true, sink);
            l.free_all(m);
            let parts = self.gate_gradients(l, parts, width);
            // Of a fused linear: both gradients in one tensor.
            let whole = shared.is_fused().then(|| l.alloc(LayerWork, 2 * width));
            dh = need_dh.then(|| l.alloc(LayerWork, self.nd));
            for &linear in &linears {
                self.linear_gradients(l, linear, need_dh, sink);
            }
            l.free_all(dm);
            l.free_all(whole);
            l.free_all(parts);
            l.free(factors);
            if let Some(gate) = shared.gate {
                self.give_weight(l, gate, sink);
            }
        }
        let dh = dh.or_else(|| need_dh.then(|| l.alloc(LayerWork, self.nd)));
        let parts = EXPERT_PARAMETERS.map(|name| self.joined_wanted(sink, sizes, name));
        let joined: Vec<_> = parts
            .iter()
            .flatten()
            .map(|part| (sink.compute(l, part), *part))
            .collect();
        let d_weights = l.alloc(LayerWork, 4 * (self.settings.tokens * sizes.router.top_k) as u64);
        let rows = self.travel(l, sizes, 2);
        // Experts that compute the rows of other ranks save nothing.
        let kept = kept && self.settings.expert_ranks == 1;
        for e in 0..sizes.count {
            self.one_expert_backward(l, sizes, e, kept, needs, sink);
        }
        l.free_all(rows);
        if needs.dm {
            // On a GPU also in bf16.
            let outputs = sizes.router.outputs(sizes.count);
            let narrow = if self.settings.element < 4 {
                self.bytes(outputs)
            } else {
                0
            };
            let dz = l.alloc(LayerWork, 4 * (self.settings.tokens * outputs) as u64 + narrow);
            self.give_weight(l, sizes.names.router, sink);
            self.give_bias(l, sizes, sizes.names.router, sink);
            l.free(dz);
        }
        l.free_all([d_weights, copies]);
        for (gradient, part) in joined {
            sink.take(l, part, gradient);
        }
        l.free_all(routing);
        l.free_all(saved);
        l.free_all(scaled);
        l.free_all(h);
        let dx = dh.map(|dh| self.normed_backward(l, norm, dh, sink));
        if need_dx {
            dx
        } else {
            l.free_all(dx);
            None
        }
    }

    fn one_expert_backward(
        &self,
        l: &mut Ledger,
        sizes: &ExpertsSpec,
        expert: usize,
        kept: bool,
        needs: ExpertNeeds,
        sink: &mut dyn GradSinkMemory,
    ) {
        // The work is that of the last expert, when most gradients are stored.
        let busy = expert + 1 == sizes.count;
        let [gate, up, down] = [0, 1, 2].map(|p| self.expert_wanted(sink, sizes, expert, p));
        let adapters = EXPERT_PARAMETERS.map(|name| !self.joined_wanted(sink, sizes, name).is_empty());
        let (gate, down) = (gate || adapters[0], down || adapters[1]);
        if !needs.dm && !gate && !up && !down {
            return;
        }
        let width = if busy { self.bytes(sizes.intermediate) } else { 0 };
        let nd = if busy { self.nd } else { 0 };
        let lists = if busy { self.assigned_bytes() } else { 0 };
        // The rows of h and of dy.
        let rows = l.alloc(LayerWork, lists + 2 * nd);
        // With u of experts that are computed together.
        let low = if busy && self.together() {
            self.low_bytes(sizes, EXPERT_PARAMETERS[0])
        } else {
            0
        };
        let parts = l.alloc(LayerWork, if kept { 0 } else { 2 * width });
        let low = l.alloc(LayerWork, if kept { 0 } else { low });
        let m = l.alloc(LayerWork, width);
        let scaled = l.alloc(LayerWork, if down { width } else { 0 });
        let dm = l.alloc(LayerWork, width);
        if busy {
            self.dequantize_expert(l, sizes, 2);
        }
        self.pair_backward(l, sizes, 1, busy, adapters[1]);
        self.give_weight(l, &sizes.linear_name(expert, 2), sink);
        self.give_bias(l, sizes, &sizes.linear_name(expert, 2), sink);
        l.free_all([scaled, m]);
        let parts = self.gate_gradients(l, vec![parts], width);
        l.free(dm);
        let dh = l.alloc(LayerWork, if needs.dh { nd } else { 0 });
        if busy {
            self.dequantize_expert(l, sizes, 0);
        }
        for projection in [0, 1] {
            self.pair_backward(l, sizes, 0, busy, adapters[0]);
            self.give_weight(l, &sizes.linear_name(expert, projection), sink);
            self.give_bias(l, sizes, &sizes.linear_name(expert, projection), sink);
        }
        l.free_all(parts);
        l.free_all([dh, low, rows]);
    }

    /// The pair of one expert on a projection of parameter `which`: ∂u and u, and the gradients of its views, which experts that are
    /// computed together do not have; on a GPU one that most tokens choose is computed alone.
    fn pair_backward(&self, l: &mut Ledger, sizes: &ExpertsSpec, which: usize, busy: bool, wanted: bool) {
        let Some(cost) = self.joined(sizes, EXPERT_PARAMETERS[which]).filter(|_| busy) else {
            return;
        };
        let elements = cost.trained.iter().map(|(_, shape)| shape.iter().product::<usize>());
        let gradients = if wanted {
            4 * elements.sum::<usize>() / sizes.count
        } else {
            0
        };
        let u = self.low_bytes(sizes, EXPERT_PARAMETERS[which]);
        l.touch(LayerWork, gradients as u64 + if wanted { 2 * u } else { u });
    }
}
