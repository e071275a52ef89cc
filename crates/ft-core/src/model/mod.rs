//! One decoder block with options, for every model family; the math of a layer, forward and backward.
//! Depends on layers, norms and adapters. Independent of optimizers; opens no files.
//!
//! Letters: N tokens of a batch (all documents concatenated), D hidden size, H query heads, K key/value
//! heads, E head size, I intermediate size, V vocabulary rows, R rotary size.

mod attention;
pub mod block;
pub mod contracts;
pub mod delta_net;
pub mod experts;
pub mod families;
pub mod head;
pub mod latent;
pub mod linear;
pub mod mlp;
mod named_sums;
pub mod network;
mod noise;
pub mod norm;
mod per_layer;
pub mod pieces;
pub mod projections;
pub mod rope;
pub mod routers;
pub mod sequence;
pub mod shapes;
pub mod shared;
pub mod short_conv;
pub mod spec;
mod streams;
pub mod tokens;

pub use contracts::{
    Context, GradSink, KvStore, Layer, LossGradients, Objective, ObjectiveNeeds, Observer, Param, ParamGradient,
    RecurrentState,
};
pub use experts::expert_words;
pub use head::Head;
pub use named_sums::NamedSums;
pub use network::{Adapters, Network, TrainableNetwork};
pub use noise::EmbeddingNoise;
pub use routers::{RouterLosses, Routers};
pub use sequence::{SequenceBy, SequenceConfig, SequenceRanks};
pub use spec::Spec;
pub use tokens::TokenRows;
