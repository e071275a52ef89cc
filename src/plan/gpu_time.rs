//! Estimates the time of a training step on a GPU: operations, bytes and calls are counted, and divided by the rates that
//! ft reaches. Letters as in `plan`.
//!
//! The rates of the H100 are measured (docs/benchmarks-gpu.md): the estimate is within 10 % of the steps measured there.
//! Rates of other GPUs are those of data sheets, times the fraction that the H100 reaches.

use super::model::Model;
use super::{Inputs, time};
use crate::engine::{Active, Gradients};
use crate::recipe::{Dtype, Recipe};
use crate::source::Placement;

/// The speed of a GPU in a computer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GpuRates {
    pub name: &'static str,
    /// Bytes that a process can allocate.
    pub memory: u64,
    /// FLOP/s of a bf16 product that is not limited by its bytes.
    products: f64,
    /// FLOP/s of causal attention with bf16 inputs; a backward pass counts 2.5 times the operations of a forward pass.
    attention: [f64; 2],
    /// Bytes per second of the GPU's memory, and from page-locked host memory.
    bandwidth: f64,
    link: f64,
    /// True if ft was measured on it.
    pub measured: bool,
}

const GIB: u64 = 1 << 30;
/// Seconds that the host needs for one kernel or product, with the allocation of its result (measured).
const CALL: f64 = 15e-6;
/// Kernels and products of a layer, forward and backward, and of the pairs of LoRA in addition.
const CALLS: [f64; 2] = [20.0, 28.0];
const ADAPTER_CALLS: [f64; 2] = [11.0, 20.0];
/// Elements of each token that norms, RoPE, the gated unit and additions read and write, in units of I and of D.
const ELEMENTWISE: [[f64; 2]; 2] = [[6.0, 14.0], [5.0, 15.0]];
/// Bytes that AdamW and the norm of the gradients read and write for each trained parameter.
const UPDATE: f64 = 32.0;

/// The GPUs of `ft plan --device-like`.
pub const GPUS: [GpuRates; 5] = [
    GpuRates {
        name: "h100",
        memory: 78 * GIB,
        products: 800e12,
        attention: [219e12, 192e12],
        bandwidth: 2.9e12,
        link: 52e9,
        measured: true,
    },
    GpuRates {
        name: "h200",
        memory: 139 * GIB,
        products: 800e12,
        attention: [219e12, 192e12],
        bandwidth: 4.16e12,
        link: 52e9,
        measured: false,
    },
    GpuRates {
        name: "a100",
        memory: 78 * GIB,
        products: 253e12,
        attention: [147e12, 97e12],
        bandwidth: 1.77e12,
        link: 24e9,
        measured: false,
    },
    GpuRates {
        name: "4090",
        memory: 23 * GIB,
        products: 134e12,
        attention: [107e12, 86e12],
        bandwidth: 873e9,
        link: 24e9,
        measured: false,
    },
    GpuRates {
        name: "3090",
        memory: 23 * GIB,
        products: 57.5e12,
        attention: [46e12, 37e12],
        bandwidth: 811e9,
        link: 24e9,
        measured: false,
    },
];

/// The estimated time of an optimizer step, in seconds; the mean over the parts of the model that are trained in turn.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepTime {
    pub tokens: f64,
    /// On the GPU.
    pub products: f64,
    pub attention: f64,
    pub adapters: f64,
    pub elementwise: f64,
    pub head: f64,
    pub update: f64,
    /// Of the host, for the calls of the driver.
    pub calls: f64,
    /// Copies of weights to the GPU.
    pub copies: f64,
}

impl StepTime {
    /// The parts that the GPU computes one after the other, by name.
    pub fn parts(&self) -> [(&'static str, f64); 6] {
        [
            ("products", self.products),
            ("attention", self.attention),
            ("adapters", self.adapters),
            ("norms and activations", self.elementwise),
            ("head and loss", self.head),
            ("update", self.update),
        ]
    }

    fn computing(&self) -> f64 {
        self.parts().iter().map(|part| part.1).sum()
    }

    /// Computation, calls and copies overlap: the longest decides.
    pub fn seconds(&self) -> f64 {
        self.computing().max(self.calls).max(self.copies)
    }

    pub fn tokens_per_second(&self) -> f64 {
        self.tokens / self.seconds().max(f64::MIN_POSITIVE)
    }

    /// What limits the step.
    pub fn limit(&self) -> &'static str {
        match self.seconds() {
            all if all <= self.computing() => "computation",
            all if all <= self.calls => "calls of the host",
            _ => "copies of weights",
        }
    }

    fn each(self, f: impl Fn(f64) -> f64) -> Self {
        Self {
            tokens: f(self.tokens),
            products: f(self.products),
            attention: f(self.attention),
            adapters: f(self.adapters),
            elementwise: f(self.elementwise),
            head: f(self.head),
            update: f(self.update),
            calls: f(self.calls),
            copies: f(self.copies),
        }
    }

    fn plus(self, b: Self) -> Self {
        Self {
            tokens: self.tokens + b.tokens,
            products: self.products + b.products,
            attention: self.attention + b.attention,
            adapters: self.adapters + b.adapters,
            elementwise: self.elementwise + b.elementwise,
            head: self.head + b.head,
            update: self.update + b.update,
            calls: self.calls + b.calls,
            copies: self.copies + b.copies,
        }
    }
}

/// Estimates a step; `None` for a model in f32, whose products have other rates.
pub fn step_time(model: &Model, recipe: &Recipe, inputs: &Inputs, gpu: &GpuRates) -> Option<StepTime> {
    if recipe.model.dtype != Dtype::Bf16 || inputs.turns.is_empty() {
        return None;
    }
    let passes = match inputs.strategy.gradients {
        Gradients::NormFirst => 2.0,
        _ => 1.0,
    };
    let turns = inputs.turns.iter().map(|turn| {
        let batch = micro_batch(model, recipe, inputs, gpu, &turn.active);
        let trained = model.sum_trained(&turn.active, |name| model.elements(name)) as f64;
        StepTime {
            tokens: (inputs.tokens * inputs.micro_batches) as f64,
            update: trained * UPDATE / gpu.bandwidth,
            ..batch.each(|x| x * passes * inputs.micro_batches as f64)
        }
    });
    let sum = turns.fold(StepTime::default(), StepTime::plus);
    Some(sum.each(|x| x / inputs.turns.len() as f64))
}

/// One forward and backward pass.
fn micro_batch(model: &Model, recipe: &Recipe, inputs: &Inputs, gpu: &GpuRates, active: &Active) -> StepTime {
    let (spec, strategy) = (model.spec, &inputs.strategy);
    let (n, element) = (inputs.tokens as f64, inputs.element as f64);
    let layers = spec.layers.len();
    let lowest = active.lowest_layer(layers);
    let above = (layers - lowest) as f64;
    let forward = layers as f64 + (above - strategy.saved_layers as f64).max(0.0);
    // A product reads both matrices once, and writes its result.
    let product = |i: f64, o: f64, result: f64| {
        2.0 * n * i * o / gpu.products + (element * (n * i + i * o) + result * n * o) / gpu.bandwidth
    };
    // A quantized weight is dequantized to memory before each product.
    let dequantized = if strategy.storage.quantized().is_empty() {
        0.0
    } else {
        3.0
    };
    let (mut products, mut adapters) = ([0.0; 2], [0.0; 2]);
    let mut adapted = false;
    for linear in spec.linears() {
        let (i, o) = (linear.input as f64, linear.output as f64);
        let extra = dequantized * i * o / gpu.bandwidth;
        products[0] += product(i, o, element) + extra;
        products[1] += product(o, i, element) + extra;
        let module = format!("model.layers.0.{}", linear.name);
        if inputs.adapters.contains_key(&module) {
            adapted = true;
            adapters[0] += element * n * (i + o) / gpu.bandwidth;
            adapters[1] += element * n * (i + 2.0 * o) / gpu.bandwidth;
        }
    }
    // Half of the scores are masked.
    let scores = 2.0 * n * (inputs.longest * spec.query_width()) as f64;
    let attention = [scores / gpu.attention[0], 2.5 * scores / gpu.attention[1]];
    let elementwise =
        ELEMENTWISE.map(|[i, d]| element * n * (i * spec.intermediate as f64 + d * spec.hidden as f64) / gpu.bandwidth);
    let both = |[once, back]: [f64; 2]| forward * once + above * back;
    // Gradients of trained weights: products with f32 results.
    let wanted = |p: &crate::source::ParamInfo| if active.wants(&p.name) { p.elements() as u64 } else { 0 };
    let head_trained = active.contains(spec.head_name());
    let (v, d) = (spec.vocab as f64, spec.hidden as f64);
    let head_elements = if head_trained { v * d } else { 0.0 };
    let trained = (model.sum(active, wanted) as f64 - head_elements).max(0.0);
    let gradients = |elements: f64| 2.0 * n * elements / gpu.products + 8.0 * elements / gpu.bandwidth;
    let loss = 10.0 * v * n / gpu.bandwidth;
    let head = product(d, v, 4.0) + product(v, d, element) + loss + gradients(head_elements);
    let calls = if adapted {
        [CALLS[0] + ADAPTER_CALLS[0], CALLS[1] + ADAPTER_CALLS[1]]
    } else {
        CALLS
    };
    let from = match strategy.placement {
        Placement::Host => gpu.link,
        _ => time::DISK_RATE.min(gpu.link),
    };
    StepTime {
        tokens: 0.0,
        products: both(products) + gradients(trained),
        attention: both(attention),
        adapters: both(adapters),
        elementwise: both(elementwise),
        head,
        update: 0.0,
        calls: CALL * both(calls),
        copies: time::bytes_read(model, recipe, inputs, active, lowest) / from,
    }
}
