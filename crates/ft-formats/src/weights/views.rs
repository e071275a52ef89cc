//! Parts of joined tensors: matrices whose rows or columns are not next to each other in the file.

use super::{TensorInfo, Weights};
use crate::joined::{self, JoinedLayout, JoinedView};
use serde_json::{Map, Value};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Most bytes of a file that are read at once to pick elements from them.
const BUFFER: usize = 1 << 20;
/// Columns that are transposed together.
const COLUMNS: usize = 32;

impl Weights {
    /// Gives each projection of an expert a tensor of its own, if the files have joined ones.
    pub(super) fn single_experts(mut self, config: &Map<String, Value>) -> Self {
        let tensors = self.tensors.iter().map(|(name, info)| (name.as_str(), &info.shape[..]));
        self.joined = joined::of_files(config, tensors);
        let Some(layout) = self.joined else { return self };
        for (name, info) in std::mem::take(&mut self.tensors) {
            let Some(parts) = layout.parts(&name, &info.shape) else {
                self.tensors.insert(name, info);
                continue;
            };
            let size = info.dtype.size();
            for part in parts {
                let of_part = TensorInfo {
                    offset: info.offset + (part.first * size) as u64,
                    bytes: (part.shape.iter().product::<usize>() * size) as u64,
                    shape: part.shape,
                    view: part.view,
                    ..info.clone()
                };
                self.tensors.insert(part.name, of_part);
            }
        }
        self
    }

    /// The layout in which a copy of this model is written. `config`: its `config.json`.
    pub fn experts_layout(&self, config: &Map<String, Value>) -> Option<&'static JoinedLayout> {
        let usual = joined::usual(config);
        let own = |layout: &&JoinedLayout| {
            let dense = |(name, info): (&String, &TensorInfo)| info.dtype.is_weight() && layout.is_of_one_expert(name);
            layout.is_optional() && self.tensors.iter().any(dense)
        };
        self.joined.or(usual.filter(|layout| !own(layout)))
    }

    /// Reads stored bytes of a tensor of these files; the first is its byte `at`.
    ///
    /// # Errors
    /// A failed read.
    pub fn read_part(&self, info: &TensorInfo, at: u64, out: &mut [u8]) -> io::Result<()> {
        let file = &self.handles[info.file];
        match info.view {
            None => file.read_exact_at(out, info.offset + at),
            Some(view) => read(file, info, view, at, out),
        }
    }
}

/// Reads the bytes of whole elements of a view; the first is its byte `at`.
fn read(file: &File, info: &TensorInfo, view: JoinedView, at: u64, out: &mut [u8]) -> io::Result<()> {
    let size = info.dtype.size();
    let (first, rest) = (at as usize / size, at as usize % size);
    if rest != 0 || !out.len().is_multiple_of(size) {
        return Err(io::Error::other("a read of a part of an element"));
    }
    let range = first..first + out.len() / size;
    let rows = range.start / view.columns..range.end.div_ceil(view.columns);
    let by_row = view.column_stride == 1;
    let columns_at_once = if by_row { view.columns } else { COLUMNS };
    let runs_at_once = if by_row { 1 } else { COLUMNS };
    let rows_at_once = (BUFFER / size / (view.row_stride * runs_at_once).max(1)).max(1);
    let mut buffer = Vec::new();
    for first_row in rows.clone().step_by(rows_at_once) {
        let end_row = (first_row + rows_at_once).min(rows.end);
        for first_column in (0..view.columns).step_by(columns_at_once) {
            let end_column = (first_column + columns_at_once).min(view.columns);
            // A run of the file: these rows of one column, or of all columns if they are next to each other.
            let (runs, width) = if by_row {
                (1, view.columns)
            } else {
                (end_column - first_column, 1)
            };
            let run = ((end_row - first_row - 1) * view.row_stride + width) * size;
            buffer.resize(runs * run, 0u8);
            for (i, run) in buffer.chunks_exact_mut(run).enumerate() {
                let element = first_row * view.row_stride + (first_column + i) * view.column_stride;
                file.read_exact_at(run, info.offset + (element * size) as u64)?;
            }
            for row in first_row..end_row {
                let begin = (row * view.columns + first_column).max(range.start);
                let end = (row * view.columns + end_column).min(range.end);
                let inside = (row - first_row) * view.row_stride * size;
                if begin >= end {
                    continue;
                }
                let to = &mut out[(begin - range.start) * size..(end - range.start) * size];
                let column = begin - row * view.columns - first_column;
                if by_row {
                    to.copy_from_slice(&buffer[inside + column * size..][..to.len()]);
                    continue;
                }
                for (i, to) in to.chunks_exact_mut(size).enumerate() {
                    to.copy_from_slice(&buffer[(column + i) * run + inside..][..size]);
                }
            }
        }
    }
    Ok(())
}
