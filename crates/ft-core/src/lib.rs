//! The library below the program `ft`: model directories, training step, objectives, decoding, adapters. The crate `ft`
//! exports these modules; its documentation describes how they work together.
//!
//! # Errors
//!
//! Unless a function says more, it fails as what it uses. A computation fails as the operations of `ops`: with
//! `ErrorKind::Shape` if a tensor does not fit, with `Unsupported` if this device cannot run it, on a GPU also with
//! `OutOfMemory`. A call that needs the weights of a layer fails as its `source::WeightSource`: with `NotFound` if there is no such
//! weight, with `Io` or `Format` if a file cannot be read. On several ranks a call in which they exchange something fails if
//! another rank has failed. `Internal` is a bug, or a call in the wrong order.

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

pub mod gguf; // GGUF files for llama.cpp
pub mod hf; // Hugging Face model directories, PEFT adapters
pub mod generate; // decoding: KV cache, sampling
pub mod engine; // the step: forward, backward, sinks, accumulation, clipping
pub mod rlhf; // objectives of preferences, rewards and RL
pub mod distill; // objective of distillation: outputs of a teacher in, loss and gradient out
pub mod sft; // supervised objective: hidden states in, loss and gradient out
pub mod optim; // optimizers, schedules and the block schedule
pub mod model; // one decoder block with options; one file per family
pub mod source; // placement and loading of a layer's weights
pub mod quant; // storage types of frozen weights: int8, int4, nf4
pub mod peft; // adapters on a linear
pub mod comm; // exchange between the ranks of a job
pub mod trace; // spans of time, for a profile

// The crates below the modules.
use ft_base as base;
use ft_data as data;
use ft_formats as formats;
use ft_ops as ops;
