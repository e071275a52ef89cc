//! Objectives of preference learning and reinforcement: hidden states in, loss and gradient out. Knows heads and
//! batches. Knows no files, no engine.

pub mod preference;
