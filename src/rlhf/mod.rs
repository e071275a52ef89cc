//! Objectives of preference and reinforcement learning: hidden states in, loss and gradient out.
//! Knows log-probabilities, advantages, values. Knows no files, no layers, no sampling.

pub mod advantage;
pub mod correction;
pub mod grpo;
pub mod policy;
pub mod ppo;
