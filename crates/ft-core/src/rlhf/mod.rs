//! Objectives of preference learning and reinforcement learning: hidden states in, loss and gradient out. Depends on
//! heads and batches. Independent of files and of the engine.

pub mod advantage;
pub mod correction;
pub mod grpo;
pub mod policy;
pub mod ppo;
pub mod preference;
