//! Decoding steps as CUDA graphs (`ops::graph`): the layers, the final norm and the head of a step are recorded, and launched
//! again for later steps until a size changes. The embedding, the rotary tables, the tables of the KV cache and sampling depend
//! on numbers of the host; they take few calls and stay outside.
//!
//! The first step with a number of rows runs as it is, so that kernels are loaded. The next one is captured. States of layers
//! (Gated DeltaNet, short convolutions) are written over in a graph, so after a change of the rows the first step runs as it is too:
//! it makes states that belong to one text alone.

use super::cache::Step;
use super::decode::SampledModel;
use crate::base::{Error, Result};
use crate::model::{Context, Network};
use crate::ops::graph::{self, Graph, Rehearsal};
use crate::ops::kv_block::KvStep;
use crate::peft::Adapter;
use candle_core::{DType, Device, Tensor, TensorId};

/// Work from the embedded tokens to the logits.
type Work<'a> = dyn Fn(&Tensor, &Context, &mut Step) -> Result<Tensor> + 'a;

/// Shapes and types of tensors.
type Sizes = Vec<(Vec<usize>, DType)>;

/// The graph of the steps of one size.
pub struct Graphs {
    device: Device,
    /// The inputs of the last step that ran as it is, and its logits.
    rehearsed: Option<(Sizes, Sizes)>,
    /// The states of layers that the last such step made.
    states: Vec<TensorId>,
    captured: Option<Captured>,
    /// The tables of the KV cache, which stay.
    tables: Option<KvStep>,
    /// The driver refused.
    refused: bool,
    /// How many steps were launched as a graph.
    steps: u64,
}

struct Captured {
    graph: Graph,
    inputs: Vec<Tensor>,
    logits: Tensor,
    /// It writes over these states of the texts.
    states: Vec<TensorId>,
}

impl Captured {
    fn launch(&self, inputs: &[Tensor]) -> Result<Tensor> {
        for (to, from) in self.inputs.iter().zip(inputs) {
            graph::overwrite(to, from)?;
        }
        self.graph.launch()?;
        Ok(self.logits.clone())
    }
}

fn sizes(tensors: &[Tensor]) -> Sizes {
    tensors.iter().map(|t| (t.dims().to_vec(), t.dtype())).collect()
}

/// What the layers read of a step: the embedded tokens, cos and sin of each rope, the per-layer inputs.
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

/// True if nothing in a step depends on the host: weights that stay on the GPU, no experts (the host reads the choice of a
/// router), and adapters that are products.
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
    pub fn of(policy: &SampledModel) -> Option<Self> {
        can_be_captured(policy.network).then(|| Self {
            device: policy.network.device.clone(),
            rehearsed: None,
            states: Vec::new(),
            captured: None,
            tables: None,
            refused: false,
            steps: 0,
        })
    }

    /// How many steps were launched as a graph.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The tables of the last step. They must come back with `keep`.
    pub fn take_tables(&mut self) -> Option<KvStep> {
        self.tables.take()
    }

    /// Keeps the tables for the next step.
    pub fn keep(&mut self, tables: Option<KvStep>) {
        self.tables = tables;
    }

    /// The logits of a step: `work` on these inputs, or the graph of a step with the same sizes.
    pub fn run(&mut self, x: &Tensor, ctx: &Context, cache: &mut Step, work: &Work) -> Result<Tensor> {
        let inputs = inputs(x, ctx);
        let (wanted, states) = (sizes(&inputs), cache.states_now());
        // Its memory is free for the next one.
        self.captured
            .take_if(|of| !cache.has_same_tables() || sizes(&of.inputs) != wanted || of.states != states);
        if let Some(captured) = &self.captured {
            self.steps += 1;
            return captured.launch(&inputs);
        }
        let _rehearsal = Rehearsal::on(&self.device);
        if let Some((_, logits)) = self
            .rehearsed
            .take_if(|(of, _)| *of == wanted && states == self.states && !self.refused)
        {
            match self.capture(&inputs, &logits, ctx, cache, work)? {
                Some(out) => {
                    self.rehearsed = Some((wanted, logits));
                    return Ok(out);
                }
                None => self.refused = true,
            }
        }
        let logits = work(x, ctx, cache)?;
        self.rehearsed = Some((wanted, sizes(std::slice::from_ref(&logits))));
        self.states = cache.states_now();
        Ok(logits)
    }

    /// Captures `work` and launches it. `None`: the driver refused.
    fn capture(
        &mut self,
        now: &[Tensor],
        logits: &Sizes,
        ctx: &Context,
        cache: &mut Step,
        work: &Work,
    ) -> Result<Option<Tensor>> {
        let room = |of: &Sizes| -> Result<Vec<Tensor>> {
            let tensors = of.iter();
            tensors
                .map(|(dims, dtype)| graph::room(dims, *dtype, &self.device))
                .collect()
        };
        let inputs = room(&sizes(now))?;
        let (Some(x), Some(logits)) = (inputs.first(), room(logits)?.pop()) else {
            return Err(Error::internal("a step has no tokens or no logits"));
        };
        let own = context(ctx, &inputs);
        cache.keep_states_in_place(true);
        let graph = Graph::capture(&self.device, || graph::overwrite(&logits, &work(x, &own, cache)?))?;
        cache.keep_states_in_place(false);
        let Some(graph) = graph else { return Ok(None) };
        self.steps += 1;
        let captured = Captured {
            graph,
            inputs,
            logits,
            states: cache.states_now(),
        };
        let out = captured.launch(now);
        if let Err(e) = &out {
            graph::refused(e);
            return Ok(None);
        }
        self.captured = Some(captured);
        out.map(Some)
    }
}

impl Drop for Graphs {
    fn drop(&mut self) {
        self.captured = None;
        if self.steps > 0 {
            // A device that is lost says so at the next call.
            let _ = graph::release_memory(&self.device);
        }
    }
}
