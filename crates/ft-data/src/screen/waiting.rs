//! Rows that wait for the screen, which handles many at a time.

use super::Screen;
use crate::dataset::{EachRow, RowOrigin};
use crate::faults::BadRows;
use crate::layout::ColumnLayout;
use crate::load::unless_stopped;
use crate::read::Row;
use ft_base::Result;
use std::sync::Arc;

/// The layout and the origin of a row that waits for the screen.
pub(crate) struct WaitingRow(pub Arc<ColumnLayout>, pub RowOrigin);

/// Passes the rows that the screen keeps to `each`; the errors of votes go to `bad`.
pub(crate) fn screened(
    screen: &Screen,
    waiting: &mut Vec<(Row, WaitingRow)>,
    bad: &mut BadRows,
    each: &mut EachRow<'_>,
) -> Result<()> {
    let keep = screen.keep(waiting);
    for ((row, WaitingRow(layout, origin)), keep) in waiting.drain(..).zip(keep) {
        match keep {
            Ok(true) => each(row, &layout, origin, bad)?,
            Ok(false) => {}
            Err(e) => bad.add(e)?,
        }
    }
    unless_stopped()
}
