//! Fused operations, each with a forward and a backward. They work on tensors, without layers, names or files.
//!
//! Letters: N tokens of a batch (all documents concatenated), D hidden size, H query heads, K key/value heads, E
//! head size, I intermediate size, O/I output/input features of a linear, V vocabulary size. Weights are f32, bf16 or
//! f16 (f16 on a GPU only). Activations `[N, ...]` are f32 on the CPU; on a GPU f32, bf16 or f16. Where a text names
//! bf16 for a tensor on a GPU, f16 is accepted too, unless the operation lists its types (such as `kv_block`). Every
//! argument tensor is contiguous. Results do not depend on the number of threads. An operation runs on the device of
//! its tensors; `cuda` has the GPU versions.
//!
//! # Errors
//!
//! Each operation checks its tensors before it computes. Unless a function says more, it fails with `ErrorKind::Shape`
//! if a tensor has another shape, element type or device than described, or is not contiguous; with `Unsupported` if
//! this device cannot run it; on a GPU also with `OutOfMemory`.

#![warn(missing_docs, unreachable_pub)]
// Outside of tests only errors may end the program: clippy denies calls that panic. Nothing is printed, and files and the environment
// are left to others (`clippy.toml`).
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::unreachable,
        clippy::todo,
        clippy::unimplemented,
        clippy::print_stdout,
        clippy::print_stderr,
        clippy::disallowed_methods,
        clippy::disallowed_types
    )
)]

/// Returns the result of `$call` from the function if the tensor is on a GPU. Does nothing without the feature `cuda`.
macro_rules! on_gpu {
    ($tensor:expr, $call:expr) => {
        #[cfg(feature = "cuda")]
        if $tensor.device().is_cuda() {
            return $call;
        }
        #[cfg(not(feature = "cuda"))]
        let _ = &$tensor;
    };
}

pub mod adapters;
pub mod altup;
pub mod attention;
#[cfg(any(test, feature = "cuda"))]
mod attention_schedule;
#[cfg(any(test, feature = "cuda"))]
mod cached_schedule;
pub mod clamped_glu;
mod cpu;
pub mod cross_entropy;
#[cfg(feature = "cuda")]
mod cuda;
pub mod delta_rule;
pub mod device;
pub mod distill;
mod dtype;
pub mod embedding;
pub mod expert_pairs;
pub mod glu;
pub mod graph;
pub mod grouped;
pub mod index_subset;
pub mod kv_block;
pub mod latent;
pub mod layer_norm;
pub mod linear;
pub mod lora_pairs;
pub mod low_rank;
pub mod master;
#[doc(hidden)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
pub mod oracle;
pub mod paged;
pub mod quantized;
pub mod rms_norm;
pub mod rope;
pub mod routing;
pub mod sample;
pub mod short_conv;
pub mod softmax;
pub mod sparse_gate;
pub mod step;
pub mod step_stats;
pub mod transfer;
pub mod update;

pub use cpu::product::CpuBackend;
#[cfg(feature = "nccl")]
pub use cuda::nccl;
pub use dtype::Dtype;
