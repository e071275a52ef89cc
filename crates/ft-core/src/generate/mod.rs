//! Decoding: continues requests of different lengths together, one token per row and step. Works on the network, a
//! KV cache and a sampler, without tokenizer or files.
//!
//! Letters: N new tokens of a step (all rows concatenated), W width of the keys of a token (K·E), V vocabulary.

mod cache;
mod decode;
mod device_cache;
mod graphs;
mod prefix;
mod quantized_copy;
mod sampler;
mod schedule;

pub use crate::ops::paged::KvDtype;
pub use crate::ops::sample::SampledToken;
pub use cache::{cache_bytes, latent_work, reading_work};
pub use decode::{
    Answer, GenerateLimits, GenerateSettings, GenerateStats, Request, SampledModel, Session, answer, generate, rollout,
};
pub use quantized_copy::{CopyFormats, QuantizedCopy};
pub use sampler::Sampler;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_cache;
#[cfg(test)]
mod tests_copy;
#[cfg(test)]
mod tests_hybrid;
#[cfg(test)]
mod tests_rows;
