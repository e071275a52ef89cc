//! Recorded runs: reads the files of a run directory, and draws its curves. Knows no tensors and trains nothing.

mod curves;
mod plot;
mod record;
mod svg;

pub use curves::{Curve, Curves, each_line};
pub use plot::{color, plot};
pub use record::{Record, find};
pub use svg::{CURVES, svg, write};
