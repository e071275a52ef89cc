//! Rows in, batches of token ids out: readers, chat rendering, loss mask, packing, deterministic order.
//! Knows tokenizers and templates. Knows no tensors, no models.

pub mod batch;

pub use batch::{Batch, Example, IGNORE};
