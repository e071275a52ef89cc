//! ft: fine-tune large language models on little memory, one layer at a time.
//!
//! The rooms, from the top down. A room may use what stands below it, never what stands above
//! (`tests/tidy.rs` holds this order). `ARCHITECTURE.md` says what each room knows.

pub mod base;
pub mod checkpoint; // L7  save, verify, rotate and load a training state
pub mod cli; // L9  one file a subcommand: text in, exit code out
pub mod data; // L2  readers, chat rendering, loss mask, packing, order
pub mod engine; // L6  the step: forward, reverse vjp, sinks, accumulate, clip
pub mod export; // L7  merged Hugging Face directory, PEFT adapter
pub mod formats; // L1  bytes to validated types
pub mod generate; // L6  decoding: KV cache, sampling
pub mod hub; // L1  a hub id or a path to local files
pub mod model; // L4  one decoder block with options; one file a family
pub mod ops; // L2  fused operations, forward and backward
pub mod optim; // L5  optimizers, schedules and the block schedule
pub mod peft; // L3  adapters on a linear
pub mod plan; // L7  memory forecast from recipe and shapes
pub mod recipe; // L1  what was written, and what it means
pub mod report; // L1  metrics, events, progress
pub mod run; // L8  the programs: train, evaluate, generate, merge
pub mod sft; // L5  objectives: hidden states in, loss and gradient out
pub mod source; // L4  where a layer's weights live // L0  errors with hints, atomic files, locks, random numbers, units
