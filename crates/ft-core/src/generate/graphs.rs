//! Decoding steps as CUDA graphs (`ops::graph`): the layers, the final norm and the head of a step are recorded, and launched
//! again for later steps until their shape changes (the number of rows, the lengths of lists). The embedding, the rotary tables,
//! the tables of the KV cache and sampling depend on numbers of the host; they take few calls and stay outside.
//!
//! The first steps of a shape (`GenerateLimits::graphs_after`) run as they are: kernels are loaded, and when several
//! answers end within a few steps, not each of them causes a capture. States of layers (Gated DeltaNet, short
//! convolutions) are written over in a graph. A state that came from a prompt can still be shared with the prefix of
//! other texts; a step that runs as it is makes new ones.

use super::cache::DecodeStep;
use super::decode::SampledModel;
use crate::base::{Error, Result};
use crate::model::{Context, Network};
use crate::ops::graph::{self, Graph, UploadCache};
use crate::ops::kv_block::KvStep;
use crate::peft::Adapter;
use candle_core::{DType, Device, Tensor, TensorId};

/// Work from the embedded tokens to the logits.
pub(crate) type GraphWork<'a> = dyn Fn(&Tensor, &Context, &mut DecodeStep) -> Result<Tensor> + 'a;

/// Shapes and types of tensors.
type TensorShapes = Vec<(Vec<usize>, DType)>;

/// The values on which a graph depends, besides the tables of the cache and the states of layers.
#[derive(PartialEq)]
struct StepShape {
    /// Rows of logits.
    rows: usize,
    documents: Vec<usize>,
    inputs: TensorShapes,
}

/// The graph of the steps of one shape.
pub(crate) struct Graphs {
    device: Device,
    /// How many steps of a shape run as they are before one is captured.
    after: usize,
    /// The shape of the last steps that ran as they are, and that of their logits.
    warmed_up: Option<(StepShape, TensorShapes)>,
    /// How many steps these were.
    plain_steps: usize,
    /// The states of layers that the last such step made.
    states: Vec<TensorId>,
    captured: Option<CapturedGraph>,
    /// The tables of the KV cache, which stay.
    tables: Option<KvStep>,
    /// The driver refused.
    refused: bool,
    /// How many steps were launched as a graph.
    steps: u64,
}

struct CapturedGraph {
    graph: Graph,
    shape: StepShape,
    /// How many steps it was.
    steps: usize,
    inputs: Vec<Tensor>,
    logits: Tensor,
    /// It writes over these states of the texts.
    states: Vec<TensorId>,
}

/// Launches a graph on other inputs than those in its memory.
fn launch(graph: &Graph, inputs: &[Tensor], now: &[Tensor]) -> Result<()> {
    for (to, from) in inputs.iter().zip(now) {
        graph::overwrite(to, from)?;
    }
    graph.launch()
}

fn room(of: &TensorShapes, device: &Device) -> Result<Vec<Tensor>> {
    let each = of.iter().map(|(dims, dtype)| graph::room(dims, *dtype, device));
    each.collect()
}

fn sizes(tensors: &[Tensor]) -> TensorShapes {
    tensors.iter().map(|t| (t.dims().to_vec(), t.dtype())).collect()
}

/// The inputs of the layers in a step: the embedded tokens, cos and sin of each rope, the per-layer inputs.
fn inputs(x: &Tensor, ctx: &Context) -> Vec<Tensor> {
    let ropes = ctx.ropes.iter().flat_map(|(cos, sin)| [cos, sin]);
    [x].into_iter()
        .chain(ropes)
        .cloned()
        .chain(ctx.shared.inputs())
        .collect()
}

/// The context of a step that reads these inputs.
fn context<'a>(of: &Context<'a>, inputs: &[Tensor]) -> Context<'a> {
    let (ropes, rest) = inputs[1..].split_at(2 * of.ropes.len());
    let own = of.reading(
        ropes
            .chunks_exact(2)
            .map(|pair| (pair[0].clone(), pair[1].clone()))
            .collect(),
    );
    if let Some(inputs) = rest.first() {
        own.shared.set_inputs(inputs.clone());
    }
    own
}

/// True if no step depends on the host: the weights stay on the GPU, there are no experts (the host reads how many
/// tokens each expert gets), and the adapters are products.
fn can_be_captured(network: &Network) -> bool {
    let spec = &network.spec;
    let products = |adapter: &Adapter| match adapter {
        Adapter::Lora(_) => true,
        Adapter::Dora(_) => adapter.lora().is_some_and(|lora| lora.start.is_none()),
        _ => false,
    };
    graph::available(&network.device)
        && network.source.stays_in_place()
        && network.source.streamed(spec.head_name()).is_none()
        && spec.layers.iter().all(|l| l.experts.is_none())
        && network.adapters.values().all(|adapter| products(adapter))
}

impl Graphs {
    /// `None`: the steps of this model cannot be captured.
    pub(crate) fn of(model: &SampledModel, after: usize) -> Option<Self> {
        can_be_captured(model.network).then(|| Self {
            device: model.network.device.clone(),
            after: after.max(1),
            warmed_up: None,
            plain_steps: 0,
            states: Vec::new(),
            captured: None,
            tables: None,
            refused: false,
            steps: 0,
        })
    }

    /// How many steps were launched as a graph.
    pub(crate) fn steps(&self) -> u64 {
        self.steps
    }

    /// The tables of the last step. They must come back with `keep`.
    pub(crate) fn take_tables(&mut self) -> Option<KvStep> {
        self.tables.take()
    }

    /// Keeps the tables for the next step.
    pub(crate) fn keep(&mut self, tables: Option<KvStep>) {
        self.tables = tables;
    }

    /// The logits `[rows, V]` of a step: `work` on these inputs, or the graph of a step of the same shape.
    pub(crate) fn run(
        &mut self,
        x: &Tensor,
        rows: usize,
        ctx: &Context,
        cache: &mut DecodeStep,
        work: &GraphWork,
    ) -> Result<Tensor> {
        let (inputs, states) = (inputs(x, ctx), cache.states_now(rows));
        let shape = StepShape {
            rows,
            documents: ctx.documents.to_vec(),
            inputs: sizes(&inputs),
        };
        // Its memory is free for the next one.
        let outgrown = self
            .captured
            .take_if(|of| !cache.has_same_tables() || of.shape != shape || of.states != states);
        // Lists that change so often are not worth a capture each time.
        if outgrown.is_some_and(|of| of.steps < self.after) {
            self.plain_steps = 0;
        }
        if let Some(mut captured) = self.captured.take() {
            match launch(&captured.graph, &captured.inputs, &inputs) {
                Ok(()) => {
                    self.steps += 1;
                    captured.steps += 1;
                    return Ok(self.captured.insert(captured).logits.clone());
                }
                // Nothing has run: the step runs as it is.
                Err(e) => {
                    graph::refused(e);
                    self.refused = true;
                }
            }
        }
        let warmed_up = self.warmed_up.as_ref();
        let known = warmed_up.filter(|(of, _)| *of == shape && states == self.states && !self.refused);
        if known.is_none() {
            self.plain_steps = 0;
        }
        // In the last step before a capture, and in the capture.
        let _uploads = (self.plain_steps + 1 >= self.after).then(|| UploadCache::on(&self.device));
        let known = known.filter(|_| self.plain_steps >= self.after);
        if let Some(logits) = known.map(|(_, logits)| room(logits, &self.device)).transpose()? {
            match self.capture(logits, &inputs, ctx, cache, work)? {
                Some((graph, inputs, logits)) => {
                    self.steps += 1;
                    let captured = self.captured.insert(CapturedGraph {
                        graph,
                        shape,
                        steps: 1,
                        inputs,
                        logits,
                        states,
                    });
                    return Ok(captured.logits.clone());
                }
                None => self.refused = true,
            }
        }
        let logits = work(x, ctx, cache)?;
        self.warmed_up = Some((shape, sizes(std::slice::from_ref(&logits))));
        self.plain_steps += 1;
        self.states = cache.states_now(rows);
        Ok(logits)
    }

    /// Captures `work` and launches it on the inputs `now`. `None`: the driver refused.
    fn capture(
        &self,
        logits: Vec<Tensor>,
        now: &[Tensor],
        ctx: &Context,
        cache: &mut DecodeStep,
        work: &GraphWork,
    ) -> Result<Option<(Graph, Vec<Tensor>, Tensor)>> {
        let inputs = room(&sizes(now), &self.device)?;
        let (Some(x), Some(logits)) = (inputs.first(), logits.into_iter().next()) else {
            return Err(Error::internal("a step has no tokens or no logits"));
        };
        let own = context(ctx, &inputs);
        cache.keep_states_in_place(true);
        let graph = Graph::capture(&self.device, || graph::overwrite(&logits, &work(x, &own, cache)?))?;
        cache.keep_states_in_place(false);
        let Some(graph) = graph else { return Ok(None) };
        match launch(&graph, &inputs, now) {
            Ok(()) => Ok(Some((graph, inputs, logits))),
            Err(e) => {
                graph::refused(e);
                Ok(None)
            }
        }
    }
}

impl Drop for Graphs {
    fn drop(&mut self) {
        self.captured = None;
        if self.steps > 0 || self.refused {
            // A device that is lost says so at the next call.
            let _ = graph::release_memory(&self.device);
        }
    }
}
