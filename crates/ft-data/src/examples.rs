//! The tokenized rows of a data set: in memory, or in a token file that is read row by row.

use super::batch::Example;
use super::dataset::Origin;
use super::tokens::{Entry, TokenFile};
use ft_base::Result;
use std::borrow::Cow;
use std::sync::Arc;

/// Tokenized rows in file order.
#[derive(Debug, Clone)]
pub struct Examples(Store);

/// Sizes of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measure {
    /// Tokens.
    pub length: u32,
    /// Tokens that are targets.
    pub trained: u32,
    /// The first target of the last answer.
    pub answer: u32,
}

impl Measure {
    /// Counts the tokens of a row.
    pub fn of(row: &Example) -> Self {
        let last = row.trained.iter().rposition(|t| *t).unwrap_or(0);
        let before = row.trained[..last].iter().rposition(|t| !*t);
        Self {
            length: row.ids.len() as u32,
            trained: row.trained.iter().filter(|t| **t).count() as u32,
            answer: before.map_or(0, |at| at as u32 + 1),
        }
    }
}

#[derive(Debug, Clone)]
enum Store {
    Memory(Vec<Example>),
    File {
        file: Arc<TokenFile>,
        /// Row numbers in the file; `None`: all rows.
        rows: Option<Arc<[u32]>>,
        lengths: Arc<[u32]>,
    },
}

impl Default for Examples {
    fn default() -> Self {
        Vec::new().into()
    }
}

impl From<Vec<Example>> for Examples {
    fn from(rows: Vec<Example>) -> Self {
        Self(Store::Memory(rows))
    }
}

impl Examples {
    /// All rows of a token file, in order, or in the order of these numbers.
    pub(super) fn of_file(file: TokenFile, rows: Option<Vec<u32>>, lengths: Vec<u32>) -> Self {
        Self(Store::File {
            file: Arc::new(file),
            rows: rows.map(Into::into),
            lengths: lengths.into(),
        })
    }

    /// The rows for which `second` is false, and the others.
    pub(super) fn split(self, second: &dyn Fn(usize) -> bool) -> [Self; 2] {
        match self.0 {
            Store::Memory(all) => {
                let mut parts = [Vec::new(), Vec::new()];
                for (row, example) in all.into_iter().enumerate() {
                    parts[usize::from(second(row))].push(example);
                }
                parts.map(Self::from)
            }
            Store::File { file, rows, lengths } => [false, true].map(|part| {
                let own: Vec<usize> = (0..lengths.len()).filter(|&row| second(row) == part).collect();
                let number = |row: usize| rows.as_ref().map_or(row as u32, |rows| rows[row]);
                Self(Store::File {
                    file: file.clone(),
                    rows: Some(own.iter().map(|&row| number(row)).collect()),
                    lengths: own.iter().map(|&row| lengths[row]).collect(),
                })
            }),
        }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        match &self.0 {
            Store::Memory(rows) => rows.len(),
            Store::File { lengths, .. } => lengths.len(),
        }
    }

    /// True without rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens of a row; `row` < `len`.
    pub fn length(&self, row: usize) -> usize {
        match &self.0 {
            Store::Memory(rows) => rows[row].ids.len(),
            Store::File { lengths, .. } => lengths[row] as usize,
        }
    }

    /// Tokens of each row.
    pub fn lengths(&self) -> Arc<[u32]> {
        match &self.0 {
            Store::Memory(rows) => rows.iter().map(|e| e.ids.len() as u32).collect(),
            Store::File { lengths, .. } => lengths.clone(),
        }
    }

    /// The number of a row in its file.
    fn number(&self, row: usize) -> u32 {
        match &self.0 {
            Store::File { rows: Some(rows), .. } => rows[row],
            _ => row as u32,
        }
    }

    /// A row; `row` < `len`.
    ///
    /// # Errors
    /// The token file cannot be read.
    pub fn get(&self, row: usize) -> Result<Cow<'_, Example>> {
        match &self.0 {
            Store::Memory(rows) => Ok(Cow::Borrowed(&rows[row])),
            Store::File { file, .. } => file.example(self.number(row)).map(Cow::Owned),
        }
    }

    /// The place of a row in the data files. `None`: the rows are in memory, and the data set has their places.
    pub(super) fn origin(&self, row: usize) -> Result<Option<Origin>> {
        match &self.0 {
            Store::Memory(_) => Ok(None),
            Store::File { file, .. } => file.entry(self.number(row)).map(|entry| Some(entry.origin)),
        }
    }

    /// Calls `each` with the entries of all rows, in order; not at all if the rows are in memory.
    pub(super) fn entries(&self, each: &mut dyn FnMut(Entry)) -> Result<()> {
        match &self.0 {
            Store::Memory(_) => Ok(()),
            Store::File {
                file, rows: Some(rows), ..
            } => file.entries_of(rows.iter().copied(), each),
            Store::File { file, lengths, .. } => file.entries_of(0..lengths.len() as u32, each),
        }
    }

    /// The sizes of each row; the tokens of a file are not read.
    ///
    /// # Errors
    /// The token file cannot be read.
    pub fn measures(&self) -> Result<Vec<Measure>> {
        if let Store::Memory(rows) = &self.0 {
            return Ok(rows.iter().map(Measure::of).collect());
        }
        let mut out = Vec::with_capacity(self.len());
        self.entries(&mut |entry| out.push(entry.measure))?;
        Ok(out)
    }

    /// The file with the rows, if they are not in memory.
    pub(super) fn file(&self) -> Option<&TokenFile> {
        match &self.0 {
            Store::Memory(_) => None,
            Store::File { file, .. } => Some(file),
        }
    }

    /// All rows in order; an error is that of `get`.
    pub fn iter(&self) -> impl Iterator<Item = Result<Cow<'_, Example>>> {
        (0..self.len()).map(|row| self.get(row))
    }

    /// The first `n` rows, or all if there are fewer.
    ///
    /// # Errors
    /// As for `get`.
    pub fn head(&self, n: usize) -> Result<Vec<Example>> {
        self.iter().take(n).map(|row| row.map(Cow::into_owned)).collect()
    }

    /// The rows, if they are in memory.
    pub fn in_memory(&self) -> Option<&[Example]> {
        match &self.0 {
            Store::Memory(rows) => Some(rows),
            Store::File { .. } => None,
        }
    }
}

/// Tests of this crate index rows that are in memory.
#[cfg(test)]
impl std::ops::Deref for Examples {
    type Target = [Example];

    fn deref(&self) -> &[Example] {
        self.in_memory().unwrap()
    }
}
