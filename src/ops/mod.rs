//! Fused operations, each with a forward and a backward. Knows tensors; knows no layers, no names, no files.
//!
//! Letters: N tokens of a batch (all documents end to end), D hidden size, H query heads, K key/value heads,
//! E head size, I intermediate size, O/I output/input features of a linear, V vocabulary size.
//! Activations are f32 `[N, ...]`; weights are f32 or bf16. Every tensor given here is contiguous.
//! Only the CPU so far: a tensor on another device is an error. Results do not depend on the number of threads.

pub mod attention;
pub mod cross_entropy;
pub mod device;
pub mod embedding;
pub mod glu;
pub mod linear;
pub mod rms_norm;
pub mod rope;
pub mod tally;
pub mod update;

mod cpu;

pub use cpu::product::Path as CpuPath;
#[cfg(test)]
pub(crate) mod oracle;
