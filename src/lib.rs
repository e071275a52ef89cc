//! ft: fine-tune large language models on little memory, one layer at a time.
//!
//! The modules, from the top down. A module may use those below it, never those above (`tests/tidy.rs` checks this
//! order). `ARCHITECTURE.md` describes each module.

// Outside of tests only errors may end the program: clippy denies calls that panic.
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::unreachable,
        clippy::todo,
        clippy::unimplemented
    )
)]

// The program: needs the feature `cli`. The library below it has no recipe keys and no command line.
#[cfg(feature = "cli")]
pub mod cli; // one file per subcommand: text in, exit code out
#[cfg(feature = "cli")]
pub mod commands; // evaluate, generate, merge, quantize, export, plan
#[cfg(feature = "cli")]
pub mod train; // the training program, its stages, the run directory
#[cfg(feature = "cli")]
pub mod plan; // memory forecast from shapes, and the choice of a strategy that fits
#[cfg(feature = "cli")]
pub mod setup; // opens and checks what a recipe names
#[cfg(feature = "cli")]
pub mod checkpoint; // save, verify, rotate and load a training state
#[cfg(feature = "cli")]
pub mod recipe; // parses and checks recipes
#[cfg(feature = "cli")]
pub mod report; // metrics, events, progress

// The library.
pub mod hf; // Hugging Face model directories, PEFT adapters
pub mod generate; // decoding: KV cache, sampling
pub mod engine; // the step: forward, reverse vjp, sinks, accumulate, clip
pub mod rlhf; // objectives of preferences, rewards and RL
pub mod distill; // objective of distillation: outputs of a teacher in, loss and gradient out
pub mod sft; // supervised objective: hidden states in, loss and gradient out
pub mod optim; // optimizers, schedules and the block schedule
pub mod model; // one decoder block with options; one file per family
pub mod source; // placement and loading of a layer's weights
pub mod quant; // storage types of frozen weights: int8, int4, nf4
pub mod peft; // adapters on a linear

// The crates below the modules.
pub use ft_base as base; // errors with hints, atomic files, locks, random numbers, units
pub use ft_data as data; // readers, chat rendering, loss mask, packing, order
pub use ft_formats as formats; // parses bytes into validated types
pub use ft_hub as hub; // resolves a hub id or a path to local files
pub use ft_ops as ops; // fused operations, forward and backward
