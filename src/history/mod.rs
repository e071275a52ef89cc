//! Recorded runs: reads the files of a run directory, draws its curves, and writes its numbers for other tools. Knows no tensors and trains nothing.

mod curves;
mod export;
mod plot;
mod record;
mod svg;
mod tfevents;

pub use curves::{Curve, Curves, each_line};
pub use export::{Form, export};
pub use plot::{ROWS, color, plot};
pub use record::{Record, find};
pub use svg::{CURVES, svg, write};
