//! Layers that run as CUDA graphs (`engine::LayerGraphs`): their memory and their calls.

use super::PlanInputs;
use super::model::PlanModel;
use crate::base::ledger::{Allocation, Ledger, MemoryKind};
use crate::engine::{ActiveSet, LayerGraphs};
use crate::model::Adapters;
use crate::model::block::memory::{LayerMemory, LayerMemorySettings};
use crate::model::contracts::GradSinkMemory;
use crate::model::spec::Spec;
use crate::peft::Adapter;
use crate::source::StoragePolicy;

/// Calls of a layer as a graph: one copies its tensors, one launches it, one allocates and one copies what it computed.
const CALLS: f64 = 4.0;
/// A layer that runs as it is, and one that is recorded: to capture and create a graph took 17 to 31 µs for each of its nodes on an
/// H200 (docs/benchmarks-gpu.md, decoding), and a call has three nodes (kernel or product, allocation, free). As if every
/// micro-batch had lengths of its own.
const RUNS_TO_RECORD: f64 = 6.0;

/// The driver gives graphs memory in pieces of this size.
const GRAPH_UNIT: u64 = 2 << 20;

/// True if all layers of this model can be recorded with these weights and adapters.
pub(super) fn apply(spec: &Spec, adapters: &Adapters, storage: &StoragePolicy) -> bool {
    let recorded = |adapter: &Adapter| matches!(adapter, Adapter::Lora(pair) if pair.mask.p == 0.0);
    storage.quantized().is_empty()
        && adapters.values().all(|adapter| recorded(adapter))
        && LayerGraphs::forms(spec).is_some()
}

/// The calls of a pass through `layers` layers in one direction, of which each makes `plain` as it is.
pub(super) fn calls(spec: &Spec, layers: f64, plain: f64) -> f64 {
    let forms = LayerGraphs::forms(spec).map_or(0, |forms| forms.len()) as f64;
    let recorded = forms.min(layers);
    (RUNS_TO_RECORD * recorded * plain + (layers - recorded) * CALLS).min(layers * plain)
}

/// Keeps the gradients of a layer until its end.
struct LayerSinkMemory<'a> {
    active: &'a ActiveSet,
    model: &'a PlanModel<'a>,
    gradients: Vec<Allocation>,
}

impl GradSinkMemory for LayerSinkMemory<'_> {
    fn wants(&self, name: &str) -> bool {
        self.active.wants(name)
    }

    fn elements(&self, name: &str) -> u64 {
        self.model.elements(name)
    }

    fn take(&mut self, _: &mut Ledger, _: &str, gradient: Allocation) {
        self.gradients.push(gradient);
    }
}

/// Bytes that stay during a step: the tensors that graphs read and write, and the memory inside of graphs.
pub(super) fn bytes(model: &PlanModel, inputs: &PlanInputs, active: &ActiveSet, settings: LayerMemorySettings) -> u64 {
    let row = inputs.element * (inputs.tokens * model.spec.row()) as u64;
    let (mut tensors, mut most) = (0, 0);
    for layer in LayerGraphs::forms(model.spec).unwrap_or_default() {
        let prefix = format!("model.layers.{layer}.");
        tensors += model
            .layer(layer)
            .map(|p| inputs.element * p.elements() as u64)
            .sum::<u64>();
        let pairs = inputs.adapters.range(prefix.clone()..);
        for (_, cost) in pairs.take_while(|(module, _)| module.starts_with(&prefix)) {
            let trained: usize = cost
                .trained
                .iter()
                .map(|(_, dims)| dims.iter().product::<usize>())
                .sum();
            tensors += 4 * (trained as u64 + cost.fixed);
        }
    }
    for run in model.runs(active) {
        let memory = LayerMemory::new(settings, run.first);
        // The input and the output of both directions, and the gradient of the output.
        tensors += 5 * row;
        let mut forward = Ledger::new(false);
        let (y, _) = memory.forward(&mut forward, false);
        forward.free(y);
        let mut backward = Ledger::new(false);
        let mut sink = LayerSinkMemory {
            active,
            model,
            gradients: Vec::new(),
        };
        let dy = backward.alloc(MemoryKind::LayerWork, row);
        let dx = memory.vjp(&mut backward, None, dy, true, &mut sink);
        tensors += backward.sizes()[MemoryKind::Gradients];
        backward.free_all(dx);
        backward.free_all(sink.gradients);
        most = most.max(forward.peak).max(backward.peak);
    }
    tensors + most.next_multiple_of(GRAPH_UNIT)
}

#[cfg(test)]
mod tests {
    use crate::model::{families, shapes};
    use crate::plan::gpu_time::GPUS;
    use crate::plan::memory_plan::{MemoryLimits, ProcessState};
    use crate::plan::search::{PlanContext, PlannedStrategy};
    use crate::recipe;
    use crate::setup::StoredWeights;
    use crate::setup::active_schedule::ActiveSchedule;
    use crate::setup::adapters;
    use std::sync::Arc;

    /// The strategy of a run on an H100.
    fn chosen(shape: &str, settings: &str, graphs: bool) -> PlannedStrategy {
        let text = format!("[model]\npath = \"{shape}\"\n{settings}");
        let recipe = recipe::parse(&text, "r.toml", &[]).unwrap().recipe;
        let spec = families::read(&shapes::config(shape).unwrap().unwrap()).unwrap();
        let adapters = adapters::with(&recipe, &spec, adapters::AdapterValues::Shapes).unwrap();
        let schedule = ActiveSchedule::new(&recipe, &spec, &spec.params(), &adapters).unwrap();
        let context = PlanContext {
            spec: &spec,
            adapters: &adapters.adapters,
            schedule: &schedule,
            rows: None,
            stored: &StoredWeights::default(),
            on_gpu: true,
            gpu_rates: &GPUS[0],
            graphs,
            teacher: None,
            judges: &Arc::default(),
            process: ProcessState {
                available: Some(64 << 30),
                resident: 0,
                threads: 8,
                ranks: 1,
                machines: 1,
            },
        };
        let free = Some(GPUS[0].memory);
        let limits = MemoryLimits {
            goal: free,
            most: free,
            host: Some(64 << 30),
        };
        context.choose(&recipe, limits).unwrap()
    }

    fn row(tokens: usize) -> String {
        format!("[data]\nmax_length = {tokens}\n[train]\nbatch_size = 1\n[tune]\nmethod = \"lora\"\n")
    }

    /// Where the calls of the host are the limit, and nowhere else.
    #[test]
    fn small_layers_with_few_tokens_run_as_graphs() {
        let small = "shape:qwen2.5-0.5b";
        let (with, without) = (chosen(small, &row(512), true), chosen(small, &row(512), false));
        assert!(with.inputs.strategy.layer_graphs && !without.inputs.strategy.layer_graphs);
        println!("{} s with graphs, {} s without", with.seconds, without.seconds);
        assert!(
            with.seconds < 0.5 * without.seconds,
            "{} {}",
            with.seconds,
            without.seconds
        );
        assert!(with.plan.peak_bytes < without.plan.peak_bytes);
        assert!(!chosen(small, &row(32_768), true).inputs.strategy.layer_graphs);
        assert!(
            !chosen("shape:llama-3.1-8b", &row(2048), true)
                .inputs
                .strategy
                .layer_graphs
        );
        // What cannot be recorded, or is asked to be saved.
        for other in [
            "[tune.lora]\nlora_dropout = 0.1\n",
            "[tune.lora]\nuse_dora = true\n",
            "[memory]\nfrozen_weights = \"nf4\"\n",
            "[memory]\nactivations = \"keep\"\n",
        ] {
            let settings = format!("{}{other}", row(512));
            assert!(!chosen(small, &settings, true).inputs.strategy.layer_graphs, "{other}");
        }
    }
}
