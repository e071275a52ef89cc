//! Recorded runs: reads the files of a run directory, draws its curves, and writes its numbers for other tools. Knows no tensors and trains nothing.

mod curves;
mod export;
mod lines;
mod plot;
mod record;
mod svg;
mod tfevents;

#[cfg(test)]
pub use tfevents::tests::read as read_events;

pub use curves::{Curve, Curves};
pub use export::{ExportFormat, empty_event_files, event, export, is_event_file, new_event_file};
pub use lines::{each_line, each_own_line, open_own, read_own_text};
pub use plot::{ROWS, color, plot};
pub use record::{RunRecord, find, settings};
pub use svg::{CURVES, svg, write};
