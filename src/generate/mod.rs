//! Decoding: continues requests of different lengths together, one token per row and step. Works on the network, a
//! KV cache and a sampler, without tokenizer or files.
//!
//! Letters: N new tokens of a step (all rows concatenated), W width of the keys of a token (K·E), V vocabulary.

mod cache;
mod coded_copy;
mod decode;
mod prefix;
mod sampler;
mod schedule;

pub use crate::ops::paged::Stored;
pub use coded_copy::{CodedCopy, Formats};
pub use decode::{Answer, Limits, Policy, Request, Session, Settings, Speed, answer, generate, rollout};
pub use sampler::{SampledToken, Sampler};

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_cache;
#[cfg(test)]
mod tests_rows;
