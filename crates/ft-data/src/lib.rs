//! Converts rows to batches of token ids: readers, chat rendering, loss masks, packing, deterministic order.
//! Depends on tokenizers and templates. Independent of tensors and models.

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

pub mod batch;
mod chat;
mod choices;
pub mod codec;
pub mod content;
pub mod dataset;
pub mod describe;
pub mod encode;
mod examples;
mod faults;
mod layout;
mod load;
pub mod mapping;
pub mod mixture;
pub mod order;
mod pack;
pub mod peek;
pub mod preference;
mod prepare;
pub mod prompts;
mod read;
pub mod reading;
mod rows;
pub mod screen;
pub mod source;
pub mod streaming;
pub mod summary;
pub mod tokens;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use batch::{Batch, Columns, Example, IGNORE};
pub use choices::{Long, Render, RowFormat, TrainOn};
pub use codec::{ChatRender, TextCodec};
pub use dataset::{Dataset, DatasetSpec, DatasetStats, RowOrigin};
pub use encode::{Encoder, Question, plain_prompt};
pub use examples::{Examples, RowMeasure};
pub use layout::{ColumnLayout, Rendering};
pub use mapping::{ChatRole, ColumnRole, Mapping};
pub use mixture::{Mixture, SourceShare};
pub use order::{BatchStream, RunLength, StreamSpec, eval_batches};
pub use read::{Row, RowPosition, TextUnit};
pub use reading::ReadingReport;
pub use rows::{Chat, Sample};
pub use screen::{Dedup, Screen, ScreenCounts, ScreenSpec};
pub use source::Source;
pub use streaming::RowStream;
pub use tokens::TokenCache;
