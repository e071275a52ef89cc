//! Adapter inits other than random and zero: from the weight (PiSSA, OLoRA), from the inputs (EVA), from both (CorDA),
//! from the first gradient (LoRA-GA).
//!
//! Letters: I input features, O output features, R rank.

pub mod algebra;
mod corda;
pub mod cost;
mod krylov;
mod pairs;
mod tiles;

pub use corda::{Component, Covariance, allocate, components, pair_of};
pub use pairs::{InitPair, eva, eva_ranks, lora_ga, olora, pissa};

#[cfg(test)]
mod tests;
