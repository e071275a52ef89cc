//! How a step trades memory for speed. The planner chooses a strategy, and the engine takes it as a whole. Except for
//! the storage of frozen weights, a strategy does not change the results of training.

use super::layer_graphs::LayerGraphs;
use super::step::GradientStorage;
use crate::model::Network;
use crate::ops::Dtype;
use crate::source::{Placement, StoragePolicy};
use candle_core::Device;

/// The settings of a training step that depend on the available memory.
#[derive(Debug, Clone, PartialEq)]
pub struct StepStrategy {
    /// Lifetime of gradients between backward pass and update.
    pub gradients: GradientStorage,
    /// Number of uppermost layers that save their activations; the others recompute them.
    pub saved_layers: usize,
    /// Layer inputs are copied to host memory until the backward pass needs them.
    pub offload_inputs: bool,
    /// Largest number of tokens that the MLP of a layer processes at once; `None`: no limit.
    pub mlp_tokens: Option<usize>,
    /// Where the weights are that are inactive.
    pub placement: Placement,
    /// The storage type of each weight.
    pub storage: StoragePolicy,
    /// Layers run as CUDA graphs, where they can be recorded (`LayerGraphs`); such layers save no activations.
    pub layer_graphs: bool,
}

impl StepStrategy {
    /// All weights on the device in `dtype`. Gradients are kept until the update. Every layer recomputes its
    /// activations.
    pub fn new(dtype: Dtype) -> Self {
        Self {
            gradients: GradientStorage::Keep,
            saved_layers: 0,
            offload_inputs: false,
            mlp_tokens: None,
            placement: Placement::Device,
            storage: StoragePolicy::dense(dtype),
            layer_graphs: false,
        }
    }

    /// Sets how `network` computes. Results are the same in every strategy with these storage types.
    pub fn apply(&self, network: &mut Network) {
        network.mlp_tokens = self.mlp_tokens;
        network.products = self.storage.products();
    }

    /// The graphs of layers, if they are wanted and the device can record work.
    pub(super) fn graphs_on(&self, device: &Device) -> Option<LayerGraphs> {
        self.layer_graphs.then(|| LayerGraphs::on(device)).flatten()
    }

    /// Every setting in words, for a model of `layers` layers.
    pub fn describe(&self, layers: usize) -> Vec<(&'static str, String)> {
        let gradients = match self.gradients {
            GradientStorage::Keep => "kept until the update",
            GradientStorage::Fused => "applied as soon as they are computed",
            GradientStorage::NormFirst => "computed twice: for the norm, then applied as soon as they are computed",
        };
        let inputs = if self.offload_inputs {
            "in host memory"
        } else {
            "on the device"
        };
        let tokens = |n: usize| format!("in chunks of {n} tokens");
        let mut all = vec![
            ("weights", format!("{}, {}", self.placement, self.storage.describe())),
            (
                "saved activations",
                format!("{} of {layers} layers", self.saved_layers.min(layers)),
            ),
            ("layer inputs", inputs.into()),
            ("MLP", self.mlp_tokens.map_or("all tokens at once".into(), tokens)),
            ("gradients", gradients.into()),
        ];
        if self.layer_graphs {
            all.push(("layers", "as CUDA graphs".into()));
        }
        all
    }
}
