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

pub mod cli; // command line: arguments in, exit code out; one file per subcommand
pub mod run; // the programs: train, evaluate, generate, merge
pub mod plan; // memory forecast from recipe and shapes
pub mod checkpoint; // save, verify, rotate and load a training state
pub mod export; // merged Hugging Face directory, PEFT adapter
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
pub mod recipe; // parses and checks recipes
pub mod report; // metrics, events, progress

// The crates below the modules.
pub use ft_base as base; // errors with hints, atomic files, locks, random numbers, units
pub use ft_data as data; // readers, chat rendering, loss mask, packing, order
pub use ft_formats as formats; // parses bytes into validated types
pub use ft_hub as hub; // resolves a hub id or a path to local files
pub use ft_ops as ops; // fused operations, forward and backward
