//! Objectives of preference learning and reinforcement: hidden states in, loss and gradient out. Knows heads and
//! batches. Knows no files, no engine.

pub mod advantage;
pub mod correction;
pub mod grpo;
mod means;
pub mod policy;
pub mod ppo;
pub mod preference;
