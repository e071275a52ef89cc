//! The programs behind the subcommands, each read from top to bottom.
//! Knows every room below. Prints nothing: results go back to `cli`, progress through `report`.

pub mod adapter_tools;
pub mod adapters;
mod advice;
mod allocation;
mod choose;
pub mod defaults;
pub mod directory;
pub mod evaluate;
pub mod finish;
pub mod forecast;
pub mod generate;
mod header;
pub mod inputs;
pub mod logits;
mod learning;
mod loftq;
pub mod merge;
mod next;
pub mod plan;
pub mod prompts;
pub mod quantize;
pub mod rewards;
pub mod row_sizes;
pub mod rows;
mod running;
pub mod samples;
pub mod sensitivity;
pub mod setup;
pub mod stage;
pub mod start_cache;
pub mod starts;
pub mod state;
pub mod teacher;
pub mod teacher_cache;
pub mod train;
pub mod tuning;
