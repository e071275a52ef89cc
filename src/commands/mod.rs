//! The programs of the other subcommands; each reads from top to bottom.
//! Prints nothing: `cli` receives the results, `report` shows the progress.

pub mod adapter_tools;
pub mod bench;
pub mod convert;
pub mod data;
pub mod evaluate;
pub mod export;
pub mod generate;
pub mod gguf;
pub mod logits;
pub mod merge;
pub mod mlx;
pub mod named;
pub mod plan;
pub mod push;
pub mod quantize;
pub mod sensitivity;
pub mod tune_lr;
