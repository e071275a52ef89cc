//! ft: fine-tune large language models on little memory, one layer at a time.
//!
//! The rooms, from the top down. A room may use what stands below it, never what stands above
//! (`tests/tidy.rs` holds this order). `ARCHITECTURE.md` says what each room knows.

// Outside of tests nothing may end the program but an error: the compiler counts these, in every build that is linted.
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

pub mod cli; // one file a subcommand: text in, exit code out
pub mod run; // the programs: train, evaluate, generate, merge
pub mod plan; // memory forecast from recipe and shapes
pub mod checkpoint; // save, verify, rotate and load a training state
pub mod export; // merged Hugging Face directory, PEFT adapter
pub mod generate; // decoding: KV cache, sampling
pub mod engine; // the step: forward, reverse vjp, sinks, accumulate, clip
pub mod rlhf; // objectives of preferences, rewards and reinforcement
pub mod distill; // a teacher's distributions and hidden states in, loss and gradient out
pub mod sft; // objectives: hidden states in, loss and gradient out
pub mod optim; // optimizers, schedules and the block schedule
pub mod model; // one decoder block with options; one file a family
pub mod source; // where a layer's weights live
pub mod quant; // storage types of frozen weights: int8, int4, nf4
pub mod peft; // adapters on a linear
pub use ft_data as data; // readers, chat rendering, loss mask, packing, order
pub use ft_formats as formats;
pub use ft_hub as hub;
pub use ft_ops as ops; // fused operations, forward and backward // a hub id or a path to local files // bytes to validated types
pub mod recipe; // what was written, and what it means
pub mod report; // metrics, events, progress
pub use ft_base as base; // errors with hints, atomic files, locks, random numbers, units
