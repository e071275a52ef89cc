//! Layers of a training step as CUDA graphs (`ops::graph`): the work of one layer is recorded, and launched for every other
//! layer of the same form. A small layer with few tokens takes the host longer to queue, kernel by kernel, than the GPU to
//! compute.
//!
//! A graph has fixed addresses. So one launch copies the tensors of a layer and its inputs to the memory that the graph reads,
//! another one runs the graph, and a third one copies what it computed. The layers recompute their activations in the
//! backward pass: saved ones would be more copies.
//!
//! A graph is for the documents of a micro-batch, whose offsets are in its launches. The first layer of a form runs as it is: this loads
//! kernels and fills caches. The second one is recorded.

use crate::base::{Error, Result};
use crate::model::network::LayerTensors;
use crate::model::spec::{KeySource, LayerSpec};
use crate::model::{Context, GradSink, Layer, Network, Param, Spec};
use crate::ops::graph::{self, Graph, UploadCache};
use crate::ops::update;
use candle_core::{DType, Device, Tensor};
use std::cell::RefCell;
use std::rc::Rc;

/// Fewest layers of one form that are recorded.
const LEAST: usize = 4;
/// The gradients of a layer are in one tensor; each begins at a multiple of so many elements.
const GRADIENT_STEP: usize = 64;

/// The recorded layers of an engine.
pub struct LayerGraphs {
    device: Device,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    forms: Vec<Rc<LayerForm>>,
    /// Offsets of the documents of the micro-batch.
    documents: Vec<usize>,
    /// cos and sin of each rope, which the graphs read.
    ropes: Vec<(Tensor, Tensor)>,
    layers: Vec<RecordedLayer>,
    /// The driver refused.
    refused: bool,
    launches: u64,
}

/// The layers whose tensors have the same names, shapes and types.
struct LayerForm {
    /// The first of them.
    layer: usize,
    spec: LayerSpec,
    /// The memory for the tensors of the layer that runs, under the names of the first layer.
    memory: LayerTensors,
    /// The first layer, over this memory.
    network: Network,
}

/// What is done with a layer.
#[derive(Clone, Copy, PartialEq)]
enum Direction {
    Forward,
    Backward,
}

/// One direction of the layers of a form.
struct RecordedLayer {
    form: Rc<LayerForm>,
    direction: Direction,
    /// For each parameter of the layer: it gets a gradient.
    wanted: Vec<bool>,
    /// Memory for x, and in the backward pass for the gradient of the output.
    inputs: Vec<Tensor>,
    /// For each gradient the index of its parameter, and its shape; known after the first run.
    gradients: Option<Vec<(usize, Vec<usize>)>>,
    graph: Option<LayerGraph>,
}

struct LayerGraph {
    graph: Graph,
    /// The output of the layer, or the gradient of x.
    output: Tensor,
    /// All gradients.
    gradients: Option<Tensor>,
}

/// What a layer computed: its output or the gradient of x; gradients with the indices of their parameters.
struct LayerResult {
    output: Tensor,
    gradients: Vec<(usize, Tensor)>,
}

/// Collects the gradients of a layer.
struct LayerSink<'a> {
    params: &'a [Param],
    wanted: &'a [bool],
    gradients: Vec<(usize, Tensor)>,
}

impl LayerSink<'_> {
    fn index(&self, name: &str) -> Option<usize> {
        self.params.iter().position(|p| &*p.name == name)
    }
}

impl GradSink for LayerSink<'_> {
    fn wants(&self, name: &str) -> bool {
        self.index(name).is_some_and(|at| self.wanted[at])
    }

    fn take(&mut self, param: &Param, gradient: Tensor) -> Result<()> {
        let at = self.index(&param.name);
        let at = at.ok_or_else(|| Error::internal("a layer has a gradient of another layer").at(&param.name))?;
        self.gradients.push((at, gradient));
        Ok(())
    }
}

/// True if the work of layer `layer` depends only on its tensors and inputs: no tensors of other layers, nothing that the host reads.
fn depends_on_inputs_only(spec: &Spec, layer: usize) -> bool {
    let of = &spec.layers[layer];
    of.keys == KeySource::Own
        && !spec.shares_keys(layer)
        && of.experts.is_none()
        && spec.per_layer.is_none()
        && spec.streams.is_none()
        && !spec.layer_scalar
}

/// How many layers of the model have the options of layer `layer`.
fn equal_layers(spec: &Spec, layer: usize) -> usize {
    let of = &spec.layers[layer];
    spec.layers.iter().filter(|other| *other == of).count()
}

fn room(like: &Tensor) -> Result<Tensor> {
    graph::room(like.dims(), like.dtype(), like.device())
}

/// The tensors of these shapes in `all`, one after the other.
fn parts(all: &Tensor, shapes: &[(usize, Vec<usize>)]) -> Result<Vec<(usize, Tensor)>> {
    let mut from = 0;
    let part = |(param, dims): &(usize, Vec<usize>)| {
        let elements = dims.iter().product();
        let part = all.narrow(0, from, elements)?.reshape(&dims[..])?;
        from += usize::next_multiple_of(elements, GRADIENT_STEP);
        Ok((*param, part))
    };
    shapes.iter().map(part).collect()
}

impl RecordedLayer {
    /// Computes the layer as it is, from the memory of the graph.
    fn compute(&self, ctx: &Context) -> Result<LayerResult> {
        let block = self.form.network.block(self.form.layer)?;
        let params = self.form.memory.params();
        let mut sink = LayerSink {
            params: &params,
            wanted: &self.wanted,
            gradients: Vec::new(),
        };
        let output = match &self.inputs[..] {
            [x] => block.forward(x, ctx)?,
            [x, dy] => block
                .vjp(x, None, dy.clone(), ctx, true, &mut sink)?
                .ok_or_else(|| Error::internal("a layer returned no gradient of its input"))?,
            _ => return Err(Error::internal("a layer has an input, or input and gradient")),
        };
        Ok(LayerResult {
            output,
            gradients: sink.gradients,
        })
    }

    /// Records the work. `None`: the driver refuses.
    fn record(&self, ctx: &Context, gradients: &[(usize, Vec<usize>)]) -> Result<Option<LayerGraph>> {
        let x = &self.inputs[0];
        let output = room(x)?;
        let elements: usize = (gradients.iter())
            .map(|(_, dims)| dims.iter().product::<usize>().next_multiple_of(GRADIENT_STEP))
            .sum();
        let all = (elements > 0).then(|| graph::room(&[elements], DType::F32, x.device()));
        let all = all.transpose()?;
        let places = match &all {
            Some(all) => parts(all, gradients)?,
            None => Vec::new(),
        };
        let graph = Graph::capture(x.device(), || {
            let computed = self.compute(ctx)?;
            let mut copies = vec![(&output, &computed.output)];
            if computed.gradients.len() != places.len() {
                return Err(Error::internal("a layer has other gradients than the layers before"));
            }
            for ((at, place), (of, gradient)) in places.iter().zip(&computed.gradients) {
                if at != of {
                    return Err(Error::internal("a layer has its gradients in another order"));
                }
                copies.push((place, gradient));
            }
            graph::overwrite_all(&copies)
        })?;
        Ok(graph.map(|graph| LayerGraph {
            graph,
            output,
            gradients: all,
        }))
    }

    /// Copies what the graph computes.
    fn result(&self, of: &LayerGraph) -> Result<LayerResult> {
        let output = room(&of.output)?;
        let mut copies = vec![(&output, &of.output)];
        let gradients = of.gradients.as_ref().map(room).transpose()?;
        copies.extend(gradients.iter().zip(&of.gradients));
        graph::overwrite_all(&copies)?;
        let gradients = match (gradients, &self.gradients) {
            (Some(all), Some(shapes)) => parts(&all, shapes)?,
            _ => Vec::new(),
        };
        Ok(LayerResult { output, gradients })
    }
}

impl LayerGraphs {
    /// `None`: work on this device cannot be recorded.
    pub fn on(device: &Device) -> Option<Self> {
        graph::available(device).then(|| Self {
            device: device.clone(),
            state: RefCell::default(),
        })
    }

    /// The layers of a model by their form: the first layer of each. `None`: some layer cannot be recorded.
    pub fn forms(spec: &Spec) -> Option<Vec<usize>> {
        let layers = 0..spec.layers.len();
        let recorded = |layer| depends_on_inputs_only(spec, layer) && equal_layers(spec, layer) >= LEAST;
        let is_first = |layer: &usize| !spec.layers[..*layer].contains(&spec.layers[*layer]);
        layers.clone().all(recorded).then(|| layers.filter(is_first).collect())
    }

    /// How many layers were launched as a graph.
    pub fn launches(&self) -> u64 {
        self.state.borrow().launches
    }

    /// Begins a micro-batch: graphs of other documents are dropped.
    ///
    /// # Errors
    /// Not enough memory on the device.
    pub(super) fn begin(&self, ctx: &Context) -> Result<()> {
        let state = &mut *self.state.borrow_mut();
        let same = |a: &Tensor, b: &Tensor| a.dims() == b.dims() && a.dtype() == b.dtype();
        let as_before = state.documents == ctx.documents
            && state.ropes.len() == ctx.ropes.len()
            && (state.ropes.iter().zip(&ctx.ropes)).all(|(a, b)| same(&a.0, &b.0) && same(&a.1, &b.1));
        if !as_before {
            state.layers.clear();
            state.documents = ctx.documents.to_vec();
            let rooms = ctx.ropes.iter().map(|(cos, sin)| Ok((room(cos)?, room(sin)?)));
            state.ropes = rooms.collect::<Result<_>>()?;
        }
        let pairs = state.ropes.iter().zip(&ctx.ropes);
        let copies: Vec<_> = pairs
            .flat_map(|(to, from)| [(&to.0, &from.0), (&to.1, &from.1)])
            .collect();
        graph::overwrite_all(&copies)
    }

    /// The output of layer `layer` for its input `x` `[N, D]`. `None`: the layer cannot be recorded.
    ///
    /// # Errors
    /// As `Layer::forward`.
    pub(super) fn forward(&self, network: &Network, layer: usize, x: &Tensor, ctx: &Context) -> Result<Option<Tensor>> {
        let Some(tensors) = self.tensors(network, layer, ctx)? else {
            return Ok(None);
        };
        let wanted = vec![false; tensors.params().len()];
        let computed = self.run(network, layer, &tensors, wanted, &[x], ctx)?;
        Ok(computed.map(|computed| computed.output))
    }

    /// As `Layer::vjp` with recomputation; returns the gradient of `x`. `None`: the layer cannot be recorded.
    ///
    /// # Errors
    /// As `Layer::vjp`.
    pub(super) fn backward(
        &self,
        network: &Network,
        layer: usize,
        (x, dy): (&Tensor, &Tensor),
        ctx: &Context,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor>> {
        let Some(tensors) = self.tensors(network, layer, ctx)? else {
            return Ok(None);
        };
        let params = tensors.params();
        let wanted = params.iter().map(|p| sink.wants(&p.name)).collect();
        let Some(computed) = self.run(network, layer, &tensors, wanted, &[x, dy], ctx)? else {
            return Ok(None);
        };
        for (at, gradient) in computed.gradients {
            match sink.sum(&params[at].name) {
                Some(sum) => update::add_assign(&sum, &gradient)?,
                None => sink.take(&params[at], gradient)?,
            }
        }
        Ok(Some(computed.output))
    }

    /// The tensors of a layer that can be recorded.
    fn tensors(&self, network: &Network, layer: usize, ctx: &Context) -> Result<Option<LayerTensors>> {
        if self.state.borrow().refused
            || ctx.sequence.is_some()
            || ctx.observer.is_some()
            || !depends_on_inputs_only(&network.spec, layer)
            || equal_layers(&network.spec, layer) < LEAST
        {
            return Ok(None);
        }
        LayerTensors::of(network, layer)
    }

    fn run(
        &self,
        network: &Network,
        layer: usize,
        tensors: &LayerTensors,
        wanted: Vec<bool>,
        inputs: &[&Tensor],
        ctx: &Context,
    ) -> Result<Option<LayerResult>> {
        let state = &mut *self.state.borrow_mut();
        let direction = match inputs.len() {
            1 => Direction::Forward,
            _ => Direction::Backward,
        };
        let form = state.form(network, layer, tensors)?;
        let known = state.layers.iter().position(|of| {
            Rc::ptr_eq(&of.form, &form)
                && of.direction == direction
                && of.wanted == wanted
                && (of.inputs.iter().zip(inputs)).all(|(a, b)| a.dims() == b.dims() && a.dtype() == b.dtype())
        });
        let at = match known {
            Some(at) => at,
            None => {
                state.layers.push(RecordedLayer {
                    form: form.clone(),
                    direction,
                    wanted,
                    inputs: inputs.iter().map(|input| room(input)).collect::<Result<_>>()?,
                    gradients: None,
                    graph: None,
                });
                state.layers.len() - 1
            }
        };
        let mut copies: Vec<_> = form.memory.tensors().into_iter().zip(tensors.tensors()).collect();
        copies.extend(state.layers[at].inputs.iter().zip(inputs.iter().copied()));
        graph::overwrite_all(&copies)?;
        let own = ctx.reading(state.ropes.clone());
        let recorded = &mut state.layers[at];
        if recorded.graph.is_none()
            && let Some(gradients) = &recorded.gradients
        {
            let _uploads = UploadCache::on(&self.device);
            recorded.graph = recorded.record(&own, gradients)?;
            state.refused = recorded.graph.is_none();
        }
        if let Some(graph) = &recorded.graph {
            match graph.graph.launch() {
                // Later errors end the step: the graph may have overwritten its inputs.
                Ok(()) => {
                    state.launches += 1;
                    return recorded.result(graph).map(Some);
                }
                // Nothing has run: the layer runs as it is.
                Err(e) => {
                    graph::refused(e);
                    state.refused = true;
                }
            }
        }
        let _uploads = recorded.gradients.is_none().then(|| UploadCache::on(&self.device));
        let mut computed = recorded.compute(&own)?;
        // It may have the memory of an input.
        computed.output = computed.output.copy()?;
        let shapes = computed.gradients.iter();
        recorded.gradients = Some(shapes.map(|(at, gradient)| (*at, gradient.dims().to_vec())).collect());
        Ok(Some(computed))
    }
}

impl State {
    /// The form of this layer.
    fn form(&mut self, network: &Network, layer: usize, tensors: &LayerTensors) -> Result<Rc<LayerForm>> {
        let spec = network.spec.layers[layer];
        if let Some(known) = (self.forms.iter()).find(|form| form.spec == spec && form.memory.alike(tensors)) {
            return Ok(known.clone());
        }
        let memory: Vec<Tensor> = tensors.tensors().into_iter().map(room).collect::<Result<_>>()?;
        let network = tensors.over(network, &memory);
        let Some(memory) = LayerTensors::of(&network, layer)? else {
            return Err(Error::internal("a layer cannot be recorded"));
        };
        let form = Rc::new(LayerForm {
            layer,
            spec,
            memory,
            network,
        });
        self.forms.push(form.clone());
        Ok(form)
    }
}

impl Drop for LayerGraphs {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        state.layers.clear();
        if state.launches > 0 || state.refused {
            // A device that is lost says so at the next call.
            let _ = graph::release_memory(&self.device);
        }
    }
}
