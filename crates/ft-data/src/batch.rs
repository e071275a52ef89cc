//! Batches of tokenized rows, as the engine uses them.
//!
//! Letters: N tokens of a batch, all its documents concatenated. ft uses no padding: rows of different lengths are
//! adjacent, and attention never crosses a document boundary.

pub use ft_base::IGNORE;
use ft_base::{Error, Result};
use std::borrow::Borrow;
use std::collections::BTreeMap;

/// One tokenized row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// `[T]`
    pub ids: Vec<u32>,
    /// `[T]`: token t is a target. The first token never is.
    pub trained: Vec<bool>,
}

/// Numbers that a stage passes to its own objective: reference log-probabilities, advantages, margins. The stage
/// defines the names.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Columns {
    /// Each `[N]`: the value of position n belongs to its target.
    pub tokens: BTreeMap<&'static str, Vec<f32>>,
    /// Each `[documents]`.
    pub documents: BTreeMap<&'static str, Vec<f32>>,
}

impl Columns {
    /// A token column: `[N]`.
    ///
    /// # Errors
    /// The batch does not have this column.
    pub fn token(&self, name: &str) -> Result<&[f32]> {
        let column = self.tokens.get(name).map(Vec::as_slice);
        column.ok_or_else(|| Error::argument("a batch has no such column of numbers").at(name))
    }

    /// A document column: `[documents]`.
    ///
    /// # Errors
    /// The batch does not have this column.
    pub fn document(&self, name: &str) -> Result<&[f32]> {
        let column = self.documents.get(name).map(Vec::as_slice);
        column.ok_or_else(|| Error::argument("a batch has no such column of numbers").at(name))
    }
}

/// Concatenated documents.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// `[N]`
    pub ids: Vec<u32>,
    /// `[N]`, restarting at 0 in each document.
    pub positions: Vec<u32>,
    /// `[N]`: the id to predict after position n, or `IGNORE`.
    pub targets: Vec<u32>,
    /// Offsets of the documents: `[documents + 1]`, from 0 to N.
    pub documents: Vec<usize>,
    /// Extra numbers for the objective.
    pub columns: Columns,
}

impl Batch {
    /// Concatenates the examples, each a document of its own; the targets are the ids, shifted by one.
    pub fn from_examples(examples: impl IntoIterator<Item: Borrow<Example>>) -> Self {
        let mut batch = Batch {
            documents: vec![0],
            ..Default::default()
        };
        for e in examples {
            let e = e.borrow();
            let t = e.ids.len();
            batch.ids.extend_from_slice(&e.ids);
            batch.positions.extend(0..t as u32);
            for i in 1..t {
                batch.targets.push(if e.trained[i] { e.ids[i] } else { IGNORE });
            }
            if t > 0 {
                batch.targets.push(IGNORE);
            }
            batch.documents.push(batch.ids.len());
        }
        batch
    }

    /// Number of tokens, N.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// True for a batch without tokens.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Number of positions that have a target.
    pub fn trained(&self) -> usize {
        self.targets.iter().filter(|&&t| t != IGNORE).count()
    }
}
