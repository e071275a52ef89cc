//! Memory of what several layers of one batch use, as `model::shared`: keys and values, per-layer inputs, and the gradients
//! of both.
//!
//! Letters: N tokens, D hidden size, L layers, P width of a per-layer input, K·E width of keys.

use super::streams;
use crate::base::ledger::{Allocation, Ledger, MemoryKind};
use crate::model::Spec;
use crate::model::block::memory::LayerMemorySettings;
use crate::model::contracts::GradSinkMemory;
use crate::model::spec::{KeySource, PER_LAYER_NORM, PER_LAYER_PROJECTION, PER_LAYER_TABLE};
use std::collections::BTreeMap;

pub(super) struct SharedMemory<'a> {
    spec: &'a Spec,
    /// Bytes of `[N, 1]`.
    column: u64,
    /// `[N, L·P]`, and its gradient.
    inputs: Vec<Allocation>,
    /// Keys and values by layer, and their gradients.
    keys: BTreeMap<usize, Allocation>,
    gradients: BTreeMap<usize, Allocation>,
}

impl<'a> SharedMemory<'a> {
    /// Computes the per-layer inputs.
    pub fn new(l: &mut Ledger, settings: &LayerMemorySettings<'a>) -> Self {
        let spec = settings.spec;
        let mut out = Self {
            spec,
            column: settings.element * settings.tokens as u64,
            inputs: Vec::new(),
            keys: BTreeMap::new(),
            gradients: BTreeMap::new(),
        };
        if spec.per_layer.is_some() {
            l.moment("the per-layer inputs");
            out.inputs.push(l.alloc(MemoryKind::LayerInputs, out.wide()));
            // The rows of the table as read, and scaled; before them the projection.
            l.touch(MemoryKind::LayerWork, 2 * out.wide() + out.column * spec.hidden as u64);
            streams::adapter_forward(l, settings, PER_LAYER_PROJECTION.trim_end_matches(".weight"));
        }
        out
    }

    /// Bytes of `[N, L·P]`.
    fn wide(&self) -> u64 {
        let width = self.spec.per_layer.map_or(0, |p| p.width);
        self.column * (self.spec.layers.len() * width) as u64
    }

    /// Bytes of the keys and values of a layer.
    fn of_keys(&self, layer: usize) -> u64 {
        2 * self.column * self.spec.kv_width(layer) as u64
    }

    /// Before the forward pass of a layer: its keys and values stay if later layers read them.
    pub fn forward(&mut self, l: &mut Ledger, layer: usize) {
        if self.spec.shares_keys(layer) {
            let keys = l.alloc(MemoryKind::LayerInputs, self.of_keys(layer));
            self.keys.insert(layer, keys);
        }
    }

    pub fn start_backward(&mut self, l: &mut Ledger, to_embedding: bool) {
        if to_embedding && self.spec.per_layer.is_some() {
            self.inputs.push(l.alloc(MemoryKind::LayerInputs, self.wide()));
        }
    }

    /// Before the backward pass of a layer.
    pub fn backward(&mut self, l: &mut Ledger, layer: usize, lowest: usize) {
        l.free_all(self.keys.remove(&layer));
        if let KeySource::Layer(from) = self.spec.layers[layer].keys
            && from >= lowest
            && !self.gradients.contains_key(&from)
        {
            let gradients = l.alloc(MemoryKind::LayerInputs, self.of_keys(from));
            self.gradients.insert(from, gradients);
        }
    }

    /// After the backward pass of a layer.
    pub fn done(&mut self, l: &mut Ledger, layer: usize) {
        l.free_all(self.gradients.remove(&layer));
    }

    /// The backward pass of the per-layer inputs.
    pub fn end(&mut self, l: &mut Ledger, settings: &LayerMemorySettings, sink: &mut dyn GradSinkMemory) {
        if self.spec.per_layer.is_some() {
            l.moment("the gradient of the per-layer inputs");
            let work = 2 * self.wide() + self.column * self.spec.hidden as u64;
            let work = l.alloc(MemoryKind::LayerWork, work);
            sink.give(l, PER_LAYER_TABLE);
            sink.give(l, PER_LAYER_NORM);
            streams::linear_backward(l, settings, PER_LAYER_PROJECTION.trim_end_matches(".weight"), sink);
            l.free(work);
        }
    }

    pub fn free(self, l: &mut Ledger) {
        l.free_all(self.inputs);
        l.free_all(self.keys.into_values());
        l.free_all(self.gradients.into_values());
    }
}
