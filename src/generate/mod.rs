//! Decoding: requests of different lengths continued together, one token a row at a time.
//! Knows the network, a cache of keys and values, and how to draw a token. Knows no tokenizer, no files.
//!
//! Letters: N new tokens of a step (all rows end to end), W width of the keys of a token (K·E), V vocabulary.

mod cache;
mod coded_copy;
mod decode;
mod prefix;
mod sampler;
mod schedule;

pub use crate::ops::paged::Stored;
pub use coded_copy::{CodedCopy, Formats};
pub use decode::{Answer, Limits, Policy, Request, Session, Settings, Speed, answer, generate, rollout};
pub use sampler::{Drawn, Sampler};

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_cache;
#[cfg(test)]
mod tests_rows;
