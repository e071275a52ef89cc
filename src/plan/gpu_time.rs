//! Estimates the time of a training step on a GPU: operations, bytes and calls are counted, and divided by the rates that
//! ft reaches. Letters as in `plan`.
//!
//! Memory bandwidth, link to the host and peak rate of the products of an H100 are measured. `CALL`, `CALLS` and `ELEMENTWISE` are fitted to the
//! five steps in docs/benchmarks-gpu.md: the estimate is within 10 % of them. Products and bandwidth of other GPUs are those
//! of data sheets, times the fraction that the H100 reaches; their attention rates are guesses. The rates of 8-bit operands
//! are predictions for every GPU.

use super::model::PlanModel;
use super::{PlanInputs, layer_graphs, time};
use crate::base::{Error, Result};
use crate::engine::{ActiveSet, GradientStorage};
use crate::model::pieces::pieces;
use crate::model::spec::ExpertsSpec;
use crate::ops::cross_entropy::chunk_for;
use crate::ops::quantized::{Products, TILE};
use crate::peft::AdapterCost;
use crate::recipe::{Dtype, Memory, Recipe};
use crate::source::{Group, ParamInfo, Placement, Sublayer};

/// The speed of a GPU in a computer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GpuRates {
    pub name: &'static str,
    /// Bytes that a process can allocate.
    pub memory: u64,
    /// FLOP/s of a bf16 product that is not limited by its bytes.
    products: f64,
    /// The same of the grouped products of experts (`mma.sync`): measured on an H200 (Nsight Compute, 4 × 2048 tokens of
    /// Qwen3-30B-A3B: 1.24 TFLOP in 7.9 ms); on other kinds of GPU 0.4 of the rate of cuBLAS, assumed.
    grouped: f64,
    /// The same for int8 and for e4m3 operands: the dense rates of data sheets (TOPS: H100 and H200 1979 and 1979, A100 624,
    /// RTX 4090 661 and 330 with f32 sums, RTX 3090 284) times the fraction 0.81 that the H100 and the A100 reach in bf16.
    eight_bit: [f64; 2],
    /// FLOP/s of causal attention with bf16 inputs; a backward pass counts 2.5 times the operations of a forward pass.
    attention: [f64; 2],
    /// Bytes per second of the GPU's memory, and from page-locked host memory.
    bandwidth: f64,
    link: f64,
    /// True if ft was measured on it.
    pub measured: bool,
}

const GIB: u64 = 1 << 30;
/// Seconds that the host needs for one kernel or product, with the allocation of its result (fitted).
const CALL: f64 = 15e-6;
/// Kernels and products, forward and backward: of a layer, of each further chunk of its MLP, of a LoRA pair in addition.
const CALLS: [f64; 2] = [20.0, 28.0];
const CHUNK_CALLS: [f64; 2] = [5.0, 9.0];
const PAIR_CALLS: [f64; 2] = [11.0 / 7.0, 20.0 / 7.0];
/// The same of experts that are computed together, and of an expert that is computed alone (without its pair); and the wait of a
/// forward pass for the number of tokens of each expert, which ends the overlap of host and GPU. Calls are counted, the wait is assumed.
const UNIT_CALLS: [f64; 2] = [10.0, 13.0];
const EXPERT_CALLS: [f64; 2] = [7.0, 10.0];
/// In addition, for gate, up and down: a table and a kernel that dequantizes as many experts as have room in a buffer; table and
/// product of each further bufferful; table and kernel of biases; and the dequantizations of an expert alone.
const DEQUANTIZE_CALLS: f64 = 6.0;
const BUFFER_CALLS: f64 = 6.0;
const BIAS_CALLS: f64 = 6.0;
const ALONE_CALLS: [f64; 2] = [3.0, 5.0];
/// In addition, for the pairs on a joined parameter of the experts: of a unit, and of an expert that is computed alone (counted, the
/// means of both parameters); and the columns and the summed dimension of a grouped product with A or B are multiples of these.
const JOINED_PAIR_CALLS: [f64; 2] = [6.0, 13.5];
const EXPERT_PAIR_CALLS: [f64; 2] = [7.5, 18.0];
const LOW_COLUMNS: usize = crate::ops::grouped::DEVICE_COLUMNS;
const LOW_DEPTH: usize = 32;
const ROUTER_WAIT: f64 = 100e-6;
/// Elements of each token that norms, RoPE, the gated unit and additions read and write, in units of I and of D.
const ELEMENTWISE: [[f64; 2]; 2] = [[6.0, 14.0], [5.0, 15.0]];
/// Bytes that AdamW and the norm of the gradients read and write for each trained parameter.
const UPDATE: f64 = 32.0;
/// Products with f32 operands, without TF32, take this many times as long (data sheets: 14 to 16; not measured).
const F32_PRODUCTS: f64 = 15.0;
/// Calls that a product of 8-bit operands makes besides it: quantize, convert or transpose, scale.
const EIGHT_BIT_CALLS: f64 = 3.0;

/// The GPUs of `ft plan --device-like`.
pub static GPUS: [GpuRates; 5] = [
    GpuRates {
        name: "h100",
        memory: 78 * GIB,
        products: 800e12,
        grouped: 157e12,
        eight_bit: [1600e12, 1600e12],
        attention: [219e12, 192e12],
        bandwidth: 2.9e12,
        link: 52e9,
        measured: true,
    },
    GpuRates {
        name: "h200",
        memory: 139 * GIB,
        products: 800e12,
        grouped: 157e12,
        eight_bit: [1600e12, 1600e12],
        attention: [219e12, 192e12],
        bandwidth: 4.16e12,
        link: 52e9,
        measured: false,
    },
    GpuRates {
        name: "a100",
        memory: 78 * GIB,
        products: 253e12,
        grouped: 101e12,
        eight_bit: [505e12, 0.0],
        attention: [147e12, 97e12],
        bandwidth: 1.77e12,
        link: 24e9,
        measured: false,
    },
    GpuRates {
        name: "4090",
        memory: 23 * GIB,
        products: 134e12,
        grouped: 54e12,
        eight_bit: [534e12, 267e12],
        attention: [107e12, 86e12],
        bandwidth: 873e9,
        link: 24e9,
        measured: false,
    },
    GpuRates {
        name: "3090",
        memory: 23 * GIB,
        products: 57.5e12,
        grouped: 23e12,
        eight_bit: [230e12, 0.0],
        attention: [46e12, 37e12],
        bandwidth: 811e9,
        link: 24e9,
        measured: false,
    },
];

/// Names of the parts of a step that the GPU computes one after the other.
const PARTS: [&str; 7] = [
    "products",
    "attention",
    "adapters",
    "norms and activations",
    "head and loss",
    "update",
    "copies for graphs",
];

impl GpuRates {
    /// The rates of the GPU with this name; of an H100 if it is not in the list.
    pub fn of_name(name: &str) -> &'static Self {
        let name = name.to_lowercase();
        GPUS.iter().find(|gpu| name.contains(gpu.name)).unwrap_or(&GPUS[0])
    }

    /// # Errors
    /// Products that this GPU does not have.
    pub fn check(&self, products: Products) -> Result<()> {
        if products != Products::Fp8 || self.eight_bit[1] > 0.0 {
            return Ok(());
        }
        let (major, minor) = products.least_compute();
        Err(Error::unsupported("products in fp8 are not available on this GPU")
            .at(Memory::frozen_products)
            .found(self.name)
            .expected(format!("compute capability {major}.{minor} or more"))
            .hint("use `int8`"))
    }
}

/// The estimated time of an optimizer step, in seconds; the mean over the sets of parameters that are trained in turn.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepTime {
    tokens: f64,
    parts: [f64; PARTS.len()],
    /// Seconds of the host for calls of the driver.
    pub calls: f64,
    /// Copies of weights and layer inputs between host and GPU.
    pub copies: f64,
    seconds: f64,
}

impl StepTime {
    /// The parts that the GPU computes one after the other, by name.
    pub fn parts(&self) -> impl Iterator<Item = (&'static str, f64)> {
        PARTS.into_iter().zip(self.parts)
    }

    pub fn seconds(&self) -> f64 {
        self.seconds
    }

    pub fn tokens_per_second(&self) -> f64 {
        self.tokens / self.seconds.max(f64::MIN_POSITIVE)
    }

    /// The limit of the speed of the step.
    pub fn limit(&self) -> &'static str {
        let computing: f64 = self.parts.iter().sum();
        if computing >= self.calls.max(self.copies) {
            "computation"
        } else if self.calls >= self.copies {
            "calls of the host"
        } else {
            "copies of weights"
        }
    }

    fn add(&mut self, other: &Self, times: f64) {
        self.tokens += times * other.tokens;
        self.parts
            .iter_mut()
            .zip(other.parts)
            .for_each(|(part, more)| *part += times * more);
        self.calls += times * other.calls;
        self.copies += times * other.copies;
        self.seconds += times * other.seconds;
    }
}

/// Says why the time of this run cannot be estimated.
pub fn not_known(recipe: &Recipe, inputs: &PlanInputs) -> Option<&'static str> {
    // Of all adapters, only LoRA has a rank and multiplies W in its own type.
    if !recipe.model.dtype.is_short() {
        Some("a model in f32")
    } else if inputs.adapters.values().any(|cost| cost.rank == 0 || cost.widens) {
        Some("adapters other than LoRA")
    } else {
        None
    }
}

/// Estimates a step; `not_known` says when this is only good for ranking settings.
pub fn step_time(model: &PlanModel, recipe: &Recipe, inputs: &PlanInputs) -> StepTime {
    let mut mean = StepTime::default();
    for turn in inputs.turns.iter() {
        let time = turn_time(model, recipe, inputs, &turn.active);
        mean.add(&time, 1.0 / inputs.turns.len() as f64);
    }
    mean
}

/// A step that trains this set of parameters.
pub(super) fn turn_time(model: &PlanModel, recipe: &Recipe, inputs: &PlanInputs, active: &ActiveSet) -> StepTime {
    let (spec, strategy, gpu) = (model.spec, &inputs.strategy, inputs.gpu_rates);
    let (n, element) = (inputs.tokens as f64, inputs.element as f64);
    let layers = spec.layers.len();
    let lowest = active.lowest_layer(layers);
    let recomputed = lowest..layers.saturating_sub(strategy.saved_layers).max(lowest);
    let above = (layers - lowest) as f64;
    let forward = (layers + recomputed.len()) as f64;
    let both = |[once, back]: [f64; 2]| forward * once + above * back;
    let products_per_second = match recipe.model.dtype {
        Dtype::Bf16 | Dtype::F16 => gpu.products,
        Dtype::F32 => gpu.products / F32_PRODUCTS,
    };
    // A product reads its input, writes its result, and reads the weight once for each chunk of tokens.
    let product = |i: f64, o: f64, result: f64, chunks: f64| {
        let bytes = element * (n * i + chunks * i * o) + result * n * o;
        2.0 * n * i * o / products_per_second + bytes / gpu.bandwidth
    };
    // Bytes for each element of W that is dequantized, converted or transposed to memory before a product.
    let products_of = strategy.storage.products();
    let changed = match products_of {
        _ if strategy.storage.quantized().is_empty() => [0.0; 2],
        Products::Dequantized => [3.0; 2],
        Products::Int8 => [0.0, 2.0],
        Products::Fp8 => [2.0; 2],
    };
    // Operands of one byte: x is read, its codes are written and read, and the sums are written and read.
    let eight_bit = |i: f64, o: f64, chunks: f64| {
        let rate = gpu.eight_bit[usize::from(products_of == Products::Fp8)];
        let bytes = n * ((element + 2.0) * i + (8.0 + element) * o) + chunks * i * o;
        2.0 * n * i * o / rate + bytes / gpu.bandwidth
    };
    let mut eight_bit_calls = 0.0;
    let mlp_chunks = pieces(inputs.tokens, strategy.mlp_tokens).len() as f64;
    // Means of all layers.
    let all = spec.layers.len();
    let mean = |of: &dyn Fn(usize) -> usize| (0..all).map(of).sum::<usize>() as f64 / all as f64;
    let (query_width, intermediate) = (mean(&|l| spec.query_width(l)), mean(&|l| spec.intermediate_of(l)));
    let mut products = [0.0; 2];
    for linear in spec.alike().into_iter().flat_map(|l| spec.linears(l)) {
        let (i, o) = (linear.input as f64, linear.output as f64);
        let chunks = match linear.sublayer {
            Sublayer::Mlp => mlp_chunks,
            _ => 1.0,
        };
        let extra = changed.map(|bytes| chunks * bytes * i * o / gpu.bandwidth);
        let [once, back] = match products_of {
            Products::Dequantized => [product(i, o, element, chunks), product(o, i, element, chunks)],
            _ => [eight_bit(i, o, chunks), eight_bit(o, i, chunks)],
        };
        products[0] += (once + extra[0]) / all as f64;
        products[1] += (back + extra[1]) / all as f64;
        if products_of != Products::Dequantized {
            eight_bit_calls += EIGHT_BIT_CALLS * chunks / all as f64;
        }
    }
    // Experts: each has its part of the rows, and is read once. As many have tokens as with a uniform choice.
    let (mut expert_calls, mut waits, mut expert_rows) = ([0.0; 2], 0.0, 0.0);
    let quantized = !strategy.storage.quantized().is_empty();
    let used_of = |experts: &ExpertsSpec| {
        let (count, k) = (experts.count as f64, experts.router.top_k as f64);
        count * (1.0 - (1.0 - k / count).powf(n))
    };
    // Those that are computed together are in units of N rows.
    let units_of = |experts: &ExpertsSpec| {
        let streamed = strategy.placement.streams_experts();
        let fit = !quantized || spec.hidden * experts.intermediate <= TILE;
        let (count, k) = (experts.count as f64, experts.router.top_k as f64);
        let units = (count / (count / k).floor()).ceil().min(used_of(experts));
        (ExpertsSpec::together(true, streamed, products_of) && fit).then_some(units)
    };
    let grouped_rate = gpu.grouped / gpu.products;
    for experts in spec.layers.iter().filter_map(|layer| layer.experts) {
        let (count, k, used) = (experts.count as f64, experts.router.top_k as f64, used_of(&experts));
        let matrix = spec.hidden * experts.intermediate;
        let biases = if experts.bias { BIAS_CALLS } else { 0.0 };
        let (units, calls_of, rate) = if let Some(units) = units_of(&experts) {
            let dequantize_calls = if quantized {
                let buffers = (count / units / (TILE / matrix.max(1)) as f64).ceil();
                DEQUANTIZE_CALLS * buffers + BUFFER_CALLS * (buffers - 1.0)
            } else {
                0.0
            };
            (
                units,
                UNIT_CALLS.map(|calls| calls + dequantize_calls + biases),
                grouped_rate,
            )
        } else {
            let dequantize_calls = if quantized { ALONE_CALLS } else { [0.0; 2] };
            let calls = [0, 1].map(|side| EXPERT_CALLS[side] + dequantize_calls[side]);
            (used, calls, 1.0)
        };
        let (d, i) = (spec.hidden as f64, experts.intermediate as f64);
        let work =
            3.0 * (2.0 * n * k * d * i / (rate * products_per_second) + element * n * k * (d + i) / gpu.bandwidth);
        let read = |bytes: f64| 3.0 * used * d * i * (element + bytes) / gpu.bandwidth;
        for side in [0, 1] {
            products[side] += (work + read(changed[side])) / all as f64;
            expert_calls[side] += units * calls_of[side] / all as f64;
        }
        waits += ROUTER_WAIT / all as f64;
        expert_rows += k * (2.0 * i + 2.0 * d) / all as f64;
    }
    // Half of the scores are masked.
    let scores = 2.0 * n * inputs.longest as f64 * query_width;
    let attention = [scores / gpu.attention[0], 2.5 * scores / gpu.attention[1]];
    let elementwise = ELEMENTWISE
        .map(|[i, d]| element * n * (i * intermediate + d * spec.hidden as f64 + i * expert_rows) / gpu.bandwidth);
    // Of the forward pass alone, and of the backward pass without recomputation.
    let mut pair_calls = [0.0; 2];
    let mut adapters = 0.0;
    for (module, cost) in inputs.adapters.iter() {
        let [i, mut o] = widths(cost);
        let layer = layer_of(module).unwrap_or(lowest);
        let (times, back) = (
            if recomputed.contains(&layer) { 2.0 } else { 1.0 },
            if layer >= lowest { 1.0 } else { 0.0 },
        );
        let joined = spec
            .layers
            .get(layer)
            .and_then(|l| l.experts.filter(|_| module.contains(".experts")));
        let (mut rows, mut calls) = (n, PAIR_CALLS);
        if let Some(experts) = &joined {
            // B has the outputs of all experts.
            o /= experts.count as f64;
            rows *= experts.router.top_k as f64;
            let units = units_of(experts);
            let (each, of_each) = match units {
                Some(units) => (units, JOINED_PAIR_CALLS),
                None => (used_of(experts), EXPERT_PAIR_CALLS),
            };
            calls = of_each.map(|calls| each * calls);
            if units.is_some() {
                let [columns, depth] = [LOW_COLUMNS, LOW_DEPTH].map(|of| cost.rank.next_multiple_of(of) as f64);
                let low = |wide: f64, deep: f64| 2.0 * rows * (columns * wide + depth * deep);
                let products = times * low(i, o) + back * (low(o, i) + low(i, 0.0));
                let gradients = back * 2.0 * rows * cost.rank as f64 * (i + o);
                adapters += products / (grouped_rate * products_per_second) + gradients * F32_PRODUCTS / gpu.products;
            }
        }
        adapters += element * rows * (times * (i + o) + back * (i + 2.0 * o)) / gpu.bandwidth;
        pair_calls[0] += times * calls[0];
        pair_calls[1] += back * calls[1];
    }
    // Gradients of trained weights are products with f32 results, summed over the chunks of tokens.
    let gradients =
        |elements: f64, chunks: f64| 2.0 * n * elements / products_per_second + 8.0 * chunks * elements / gpu.bandwidth;
    let in_layers = |p: &ParamInfo| matches!(p.group, Group::Layer(_)) && active.wants(&p.name);
    // Of the weight of an expert only its part of the rows is read.
    let part_of_rows = |p: &ParamInfo| match (p.group, p.name.contains(".experts.")) {
        (Group::Layer(l), true) => spec.layers[l]
            .experts
            .map_or(1.0, |e| e.router.top_k as f64 / e.count as f64),
        _ => 1.0,
    };
    let trained = |p: &ParamInfo| (part_of_rows(p) * p.elements() as f64) as u64;
    let trained_in_layers = model.sum(active, |p| if in_layers(p) { trained(p) } else { 0 }) as f64;
    let (v, d) = (spec.vocab as f64, spec.hidden as f64);
    let head_trained = active.contains(spec.head_name());
    let chunk = chunk_for(spec.vocab, true).max(1);
    let chunks = inputs.tokens.div_ceil(chunk) as f64;
    // The loss uses a head that is copied in parts twice.
    let passes_of_head = match inputs.head_chunk(spec, active) {
        Some(_) => 2.0,
        None => 1.0,
    };
    let mut head = passes_of_head * product(d, v, 4.0, chunks) + product(v, d, element, chunks);
    head += 10.0 * v * n / gpu.bandwidth;
    if head_trained {
        head += gradients(v * d, chunks);
    }
    let more_chunks = (mlp_chunks - 1.0) * both(CHUNK_CALLS);
    let mut calls =
        both(CALLS) + more_chunks + pair_calls.iter().sum::<f64>() + both([eight_bit_calls; 2]) + both(expert_calls);
    let mut graph_bytes = 0.0;
    if strategy.layer_graphs {
        // Every layer above the lowest recomputes its forward pass, so `pair_calls` has it once or twice.
        let once = CALLS[0] + pair_calls[0] / forward;
        let back = CALLS[1] + pair_calls[1] / above.max(1.0);
        calls = layer_graphs::calls(spec, all as f64, once) + layer_graphs::calls(spec, above, once + back);
        // Weights and gradients are read and written.
        let in_layers: f64 = (0..all).flat_map(|l| model.layer(l)).map(|p| p.elements() as f64).sum();
        graph_bytes = 2.0 * element * in_layers * (1.0 + above / all as f64) + 8.0 * trained_in_layers;
    }
    let calls = CALL * calls;
    let from = match strategy.placement {
        Placement::Host => gpu.link,
        Placement::ShardedHost => time::RANKS_RATE.min(gpu.link),
        _ => time::DISK_RATE.min(gpu.link),
    };
    let offloaded = if strategy.offload_inputs {
        2.0 * above * element * n * d
    } else {
        0.0
    };
    let copies = time::bytes_read(model, recipe, inputs, active, lowest) / from + offloaded / gpu.link;
    let passes = match strategy.gradients {
        GradientStorage::NormFirst => 2.0,
        _ => 1.0,
    };
    let times = passes * inputs.rounds() as f64;
    let trained = model.sum_trained(active, |name| model.elements(name)) as f64;
    let parts = [
        times * (both(products) + gradients(trained_in_layers, mlp_chunks)),
        times * both(attention),
        times * adapters,
        times * both(elementwise),
        times * head,
        trained * UPDATE / gpu.bandwidth,
        times * graph_bytes / gpu.bandwidth,
    ];
    let (calls, copies, waits) = (times * calls, times * copies, times * both([waits, 0.0]));
    StepTime {
        tokens: (inputs.tokens * inputs.sequence.ranks * inputs.micro_batches) as f64,
        parts,
        calls,
        copies,
        // Computation and calls overlap, and most of the copies.
        seconds: time::overlapping(parts.iter().sum::<f64>().max(calls), copies) + waits,
    }
}

/// I and O of the linear of a LoRA pair, A `[R, I]` and B `[O, R]`.
fn widths(cost: &AdapterCost) -> [f64; 2] {
    match &cost.trained[..] {
        [(_, a), (_, b), ..] => [a.last(), b.first()].map(|n| n.map_or(0.0, |n| *n as f64)),
        _ => [0.0; 2],
    }
}

fn layer_of(module: &str) -> Option<usize> {
    module.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}
