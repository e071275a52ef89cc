//! The part of the training state that one rank writes to a checkpoint in parts. No data is exchanged: each rank writes
//! the state that it owns, and a part of the state that all ranks have.

use super::divided::{AVERAGE, MomentSink, PIECE, SavedMoment, give};
use super::outer::{OUTER, rank_of};
use super::step::Engine;
use super::switch::ExactSink;
use crate::base::Result;
use crate::comm::part_of;
use crate::optim::range_of_part;
use candle_core::Tensor;
use std::ops::Range;

/// The part of the state of an engine that its rank writes. The parts of all ranks are the whole state, without overlap.
pub struct OwnState<'a> {
    engine: &'a Engine,
}

impl Engine {
    /// The part of the state that this rank writes. On one rank it is all of it.
    pub fn own_state(&self) -> OwnState<'_> {
        OwnState { engine: self }
    }
}

impl OwnState<'_> {
    /// The elements of a weight and of its average that this rank writes.
    ///
    /// # Errors
    /// The model has no such parameter (`NotFound`).
    pub fn elements(&self, name: &str) -> Result<Range<usize>> {
        let n = self.engine.elements(name)?;
        Ok(self.engine.part(name, n, self.engine.comm.world().rank))
    }

    /// The elements of a tensor of an optimizer state that this rank writes.
    ///
    /// # Errors
    /// The model has no such parameter (`NotFound`).
    pub fn elements_of_moment(&self, moment: &SavedMoment) -> Result<Range<usize>> {
        let SavedMoment {
            name, part, elements, ..
        } = moment;
        let world = self.engine.comm.world();
        if *part == OUTER {
            return Ok(part_of(name, *elements, world.rank, world.size));
        }
        if self.engine.trains_apart() {
            let own = rank_of(name).0 == world.rank;
            return Ok(if own { 0..*elements } else { 0..0 });
        }
        if self.engine.is_divided() {
            return Ok(range_of_part(part, &self.elements(name)?));
        }
        Ok(part_of(name, *elements, world.rank, world.size))
    }

    /// Passes the exact f32 values of `elements` of a trained weight or of an adapter matrix to `sink`.
    ///
    /// # Errors
    /// The model has no such parameter (`NotFound`); a file of trained parameters cannot be read; any error of `sink`.
    pub fn exact(&self, name: &str, sink: &mut ExactSink) -> Result<()> {
        let engine = self.engine;
        let range = self.elements(name)?;
        if range.is_empty() {
            return Ok(());
        }
        if engine.is_in_parts(name) {
            return sink(&engine.exact_part(name)?.to_vec1::<f32>()?);
        }
        if engine.optimizer.low_part(name).is_some() || engine.is_exact_in_memory(name) {
            let weight = engine.network.param(name)?.tensor;
            for first in range.clone().step_by(PIECE) {
                let piece = first..range.end.min(first + PIECE);
                sink(&engine.optimizer.exact_range(name, &weight, &piece, range.start)?)?;
            }
            return Ok(());
        }
        let mut next = 0;
        engine.exact(name, &mut |values| {
            let first = next;
            next += values.len();
            let (begin, end) = (range.start.max(first), range.end.min(next));
            if begin < end {
                sink(&values[begin - first..end - first])
            } else {
                Ok(())
            }
        })
    }

    /// Passes `elements_of_moment` of a tensor of an optimizer state to `sink`.
    ///
    /// # Errors
    /// There is no such state; any error of `sink`.
    pub fn moment(&self, moment: &SavedMoment, sink: &mut MomentSink) -> Result<()> {
        let range = self.elements_of_moment(moment)?;
        if range.is_empty() {
            return Ok(());
        }
        let (held, _) = self.engine.held(&moment.name, moment.part)?;
        pass(&held, &range, sink)
    }

    /// Passes `elements` of the average of a weight to `sink`.
    ///
    /// # Errors
    /// There is no such average; any error of `sink`.
    pub fn average(&self, name: &str, sink: &mut MomentSink) -> Result<()> {
        let range = self.elements(name)?;
        if range.is_empty() {
            return Ok(());
        }
        let (held, _) = self.engine.held(name, AVERAGE)?;
        pass(&held, &range, sink)
    }
}

/// Passes the elements `range` to `sink` in pieces. `held`: the whole tensor, or these elements alone.
fn pass(held: &Tensor, range: &Range<usize>, sink: &mut MomentSink) -> Result<()> {
    let first = if held.elem_count() == range.len() {
        0
    } else {
        range.start
    };
    for at in (0..range.len()).step_by(PIECE) {
        give(&held.narrow(0, first + at, PIECE.min(range.len() - at))?, sink)?;
    }
    Ok(())
}
