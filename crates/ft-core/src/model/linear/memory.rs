//! Memory of a linear: each tensor that `Linear` allocates and frees, its adapter included.

use super::super::block::memory::{LayerMemory, LayerMemorySettings};
use super::super::contracts::GradSinkMemory;
use crate::base::ledger::MemoryKind::LayerWork;
use crate::base::ledger::{Allocation, Ledger};
use crate::model::spec::LinearSpec;
use crate::ops::{Dtype, quantized};
use crate::peft::AdapterCost;

/// The name and the sizes of a linear.
#[derive(Clone, Copy, Default)]
pub(in crate::model) struct LinearShape {
    /// Within the layer.
    pub name: &'static str,
    /// I: input features.
    pub input: usize,
    /// O: output features.
    pub output: usize,
}

impl LinearShape {
    pub(in crate::model) fn new(name: &'static str, input: usize, output: usize) -> Self {
        Self { name, input, output }
    }
}

impl From<LinearSpec> for LinearShape {
    fn from(linear: LinearSpec) -> Self {
        Self::new(linear.name, linear.input, linear.output)
    }
}

impl LayerMemorySettings<'_> {
    /// Bytes of `[N, width]`.
    fn bytes(&self, width: usize) -> u64 {
        self.element * (self.tokens * width) as u64
    }

    /// Temporary memory of an adapter kind other than LoRA.
    fn temporary(&self, cost: &AdapterCost) -> u64 {
        4 * (self.tokens as u64 * cost.per_token + cost.whole)
    }

    /// The copy of the input that dropout needs.
    fn copy(&self, input: usize) -> u64 {
        if self.dropout { self.bytes(input) } else { 0 }
    }

    /// The memory that an adapter allocates and frees in the forward pass of its linear with `input` features.
    pub fn adapter_forward(&self, l: &mut Ledger, cost: &AdapterCost, input: usize) {
        l.touch(
            LayerWork,
            self.copy(input) + self.bytes(cost.rank) + self.temporary(cost),
        );
    }

    /// As `adapter_forward`, in the backward pass. `temporary`: counts the temporary memory of kinds other than LoRA
    /// here; false if the caller counts it.
    pub fn adapter_backward(
        &self,
        l: &mut Ledger,
        cost: &AdapterCost,
        input: usize,
        need_dx: bool,
        temporary: bool,
        sink: &mut dyn GradSinkMemory,
    ) {
        let wanted = cost.trained.iter().any(|(part, _)| sink.wants(part));
        if !wanted && !need_dx {
            return;
        }
        if temporary {
            l.touch(LayerWork, self.temporary(cost));
        }
        let du = l.alloc(LayerWork, self.bytes(cost.rank));
        let mut gradients = Vec::new();
        if wanted {
            let copy = l.alloc(LayerWork, self.copy(input));
            let u = l.alloc(LayerWork, self.bytes(cost.rank));
            for (part, _) in &cost.trained {
                gradients.push((sink.compute(l, part), part));
            }
            l.free_all([copy, u]);
        }
        if need_dx {
            l.touch(LayerWork, self.copy(input));
        }
        l.free(du);
        for (gradient, part) in gradients {
            sink.take(l, part, gradient);
        }
    }
}

impl LayerMemory<'_> {
    pub(in crate::model) fn adapter(&self, linear: LinearShape) -> Option<&AdapterCost> {
        self.settings.adapters.get(&self.name(linear.name))
    }

    /// True if this is a DoRA adapter that is computed with the LoRA pairs: `SavedLow` holds the output of the linear.
    pub(in crate::model) fn output_in_low(&self, linear: LinearShape) -> bool {
        self.settings.on_gpu && !self.settings.dropout && self.adapter(linear).is_some_and(|c| c.widens)
    }

    /// On a GPU, `SavedLow` of linears with one input: u of the LoRA pairs, and for DoRA the output and g. An adapter
    /// that subtracts its first product B₀·A₀ has a second u.
    pub(in crate::model) fn low(&self, l: &mut Ledger, linears: &[LinearShape]) -> Allocation {
        let bytes = |&linear: &LinearShape| match self.adapter(linear) {
            Some(c) if self.output_in_low(linear) => self.bytes(c.rank + linear.output) + 4 * linear.output as u64,
            Some(c) if c.fixed > 0 && !c.widens => self.bytes(2 * c.rank),
            Some(c) => self.bytes(c.rank),
            None => 0,
        };
        let all: u64 = linears.iter().map(bytes).sum();
        l.alloc(LayerWork, if self.settings.on_gpu { all } else { 0 })
    }

    /// The sum of a linear and an input of the residual stream: in place, unless `SavedLow` holds the output.
    pub(in crate::model) fn add_residual(&self, l: &mut Ledger, y: Allocation, linear: LinearShape) -> Allocation {
        if self.output_in_low(linear) {
            l.alloc(LayerWork, self.bytes(linear.output))
        } else {
            y
        }
    }

    /// On a GPU: copies of the LoRA pairs in the type of the activations, while the layer computes.
    pub(in crate::model) fn pair_copies(&self, l: &mut Ledger) -> Allocation {
        let costs = self.settings.spec.linears(self.index).into_iter();
        let costs = costs.filter_map(|linear| self.adapter(linear.into()));
        let elements = |c: &AdapterCost| {
            // DoRA's magnitude is a vector, so it is not counted. An adapter that subtracts its first product B₀·A₀
            // (PiSSA, OLoRA, CorDA, LoRA-GA) also copies A₀ and B₀ (`fixed`).
            let matrices = c.trained.iter().filter(|(_, dims)| dims.len() == 2);
            let trained: usize = matrices.map(|(_, dims)| dims.iter().product::<usize>()).sum();
            trained as u64 + if c.widens { 0 } else { c.fixed }
        };
        let all: u64 = costs.filter(|c| c.rank > 0).map(elements).sum();
        l.alloc(
            LayerWork,
            if self.settings.on_gpu {
                self.settings.element * all
            } else {
                0
            },
        )
    }

    /// A product with a weight of another type than the activation. On a GPU the weight is dequantized, or widened from
    /// bf16 to f32, block by block; on the CPU both happen during packing.
    pub(in crate::model) fn dequantize(&self, l: &mut Ledger, name: &str, input: usize, output: usize) {
        let weight = self.name(&format!("{name}.weight"));
        let quantized = self.settings.storage.quantized().contains_key(weight.as_str());
        let dequantized_dtype = self.settings.storage.dtype();
        let mut bytes = 0;
        if quantized && !(self.settings.active)(&weight) {
            let products = self.settings.storage.products_of(&weight);
            bytes += match products.work_bytes(self.settings.tokens, output, input) {
                0 => quantized::work_bytes(output, input, dequantized_dtype),
                eight_bit => eight_bit,
            };
        }
        let adapter = self.settings.adapters.get(&self.name(name));
        if dequantized_dtype.is_short() && self.settings.dropout && adapter.is_some_and(|c| c.widens) {
            bytes += quantized::work_bytes(output, input, Dtype::F32);
        }
        if self.settings.on_gpu {
            l.touch(LayerWork, bytes);
        }
    }

    /// Computes a DoRA linear together with the LoRA pairs: A·Wᵀ, A·Aᵀ and B·A·Aᵀ for g, then the sum in f32.
    fn dora(&self, l: &mut Ledger, linear: LinearShape, rank: usize) {
        let output = linear.output;
        l.touch(LayerWork, 4 * (rank * (2 * output + rank)) as u64);
        let sum = l.alloc(LayerWork, 4 * (self.settings.tokens * output) as u64);
        self.dequantize(l, linear.name, linear.input, output);
        l.free(sum);
    }

    /// The output, unless `SavedLow` holds it.
    pub(in crate::model) fn linear(&self, l: &mut Ledger, linear: LinearShape) -> Allocation {
        let LinearShape { name, input, output } = linear;
        if let Some(cost) = self.adapter(linear).filter(|_| self.output_in_low(linear)) {
            self.dora(l, linear, cost.rank);
            return l.alloc(LayerWork, 0);
        }
        let y = l.alloc(LayerWork, self.bytes(output));
        self.dequantize(l, name, input, output);
        if let Some(cost) = self.adapter(linear) {
            self.settings.adapter_forward(l, cost, input);
        }
        y
    }

    pub(in crate::model) fn linear_wanted(&self, sink: &dyn GradSinkMemory, linear: LinearShape) -> bool {
        let name = linear.name;
        let parts = |c: &AdapterCost| c.trained.iter().any(|(part, _)| sink.wants(part));
        self.adapter(linear).is_some_and(parts)
            || self.wants(sink, name)
            || sink.wants(&self.name(&format!("{name}.bias")))
    }

    /// The caller holds the input and `∂y`; the returned `∂x`, if it is needed, is held.
    pub(in crate::model) fn linear_backward(
        &self,
        l: &mut Ledger,
        linear: LinearShape,
        need_dx: bool,
        sink: &mut dyn GradSinkMemory,
    ) -> Option<Allocation> {
        // DoRA replaces a copy of ∂y by g ⊙ ∂y.
        let scaled = if self.output_in_low(linear) {
            self.bytes(linear.output)
        } else {
            0
        };
        let scaled = l.alloc(LayerWork, scaled);
        let dx = need_dx.then(|| l.alloc(LayerWork, self.bytes(linear.input)));
        self.linear_gradients(l, linear, need_dx, sink);
        l.free(scaled);
        dx
    }

    pub(in crate::model) fn linear_gradients(
        &self,
        l: &mut Ledger,
        linear: LinearShape,
        need_dx: bool,
        sink: &mut dyn GradSinkMemory,
    ) {
        let LinearShape { name, input, output } = linear;
        if need_dx {
            self.dequantize(l, name, input, output);
        }
        if let Some(cost) = self.adapter(linear) {
            let temporary = !self.output_in_low(linear);
            self.settings.adapter_backward(l, cost, input, need_dx, temporary, sink);
        }
        sink.give(l, &self.name(&format!("{name}.weight")));
        sink.give(l, &self.name(&format!("{name}.bias")));
    }
}
