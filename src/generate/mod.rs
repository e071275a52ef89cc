//! Decoding: prompts of different lengths continued together, one token a row at a time.
//! Knows the network, a cache of keys and values, and how to draw a token. Knows no tokenizer, no files.
//!
//! Letters: N new tokens of a step (all rows end to end), W width of the keys of a token (K·E), V vocabulary.

mod cache;
mod decode;
mod sampler;

pub use cache::Cache;
pub use decode::{Answer, Request, Settings, generate, rollout};
pub use sampler::{Drawn, Sampler};

#[cfg(test)]
mod tests;
