//! The tokenized rows of a dataset: in memory, or in a token file that is read row by row.

use super::batch::Example;
use super::dataset::RowOrigin;
use super::tokens::{RowEntry, TokenFile};
use ft_base::Result;
use std::borrow::Cow;
use std::sync::Arc;

/// Tokenized rows in file order.
#[derive(Debug, Clone)]
pub struct Examples(ExampleStore);

/// Sizes of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowMeasure {
    /// Tokens.
    pub length: u32,
    /// Tokens that are targets.
    pub trained: u32,
    /// The first target of the last answer.
    pub answer: u32,
}

impl RowMeasure {
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
enum ExampleStore {
    Memory(Vec<Example>),
    File {
        file: Arc<TokenFile>,
        /// Row numbers in the file; `None`: all rows.
        rows: Option<Arc<[u32]>>,
        lengths: Arc<[u32]>,
    },
    Joined {
        rows: Arc<Examples>,
        joins: Arc<[RowJoin]>,
        lengths: Arc<[u32]>,
    },
}

/// A row, followed by its prompt with the answer of another row.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowJoin {
    pub row: u32,
    /// Tokens of its prompt.
    pub prompt: u32,
    pub other: u32,
    /// The first token of the other row's answer, and the number of its tokens that are used.
    pub answer: u32,
    pub room: u32,
}

impl RowJoin {
    /// Tokens beyond those of the row.
    fn added(&self) -> u32 {
        self.prompt + self.room
    }

    /// The first target of the second prompt with its answer; a first token is never one.
    fn first_target(&self) -> u32 {
        self.prompt.max(1)
    }

    fn measure(&self, row: RowMeasure) -> RowMeasure {
        let answered = self.added().saturating_sub(self.first_target());
        RowMeasure {
            length: row.length + self.added(),
            trained: row.trained + answered,
            answer: match answered {
                0 => row.answer,
                _ => row.length + self.first_target(),
            },
        }
    }

    fn example(&self, rows: &Examples) -> Result<Example> {
        let mut out = rows.get(self.row as usize)?.into_owned();
        let other = rows.get(self.other as usize)?;
        let (prompt, answer) = (self.prompt as usize, self.answer as usize);
        out.ids.extend_from_within(..prompt);
        out.ids
            .extend_from_slice(&other.ids[answer..answer + self.room as usize]);
        let first = self.first_target();
        out.trained.extend((0..self.added()).map(|t| t >= first));
        Ok(out)
    }
}

impl Default for Examples {
    fn default() -> Self {
        Vec::new().into()
    }
}

impl From<Vec<Example>> for Examples {
    fn from(rows: Vec<Example>) -> Self {
        Self(ExampleStore::Memory(rows))
    }
}

impl Examples {
    /// All rows of a token file, in order, or in the order of these numbers.
    pub(super) fn of_file(file: TokenFile, rows: Option<Vec<u32>>, lengths: Vec<u32>) -> Self {
        Self(ExampleStore::File {
            file: Arc::new(file),
            rows: rows.map(Into::into),
            lengths: lengths.into(),
        })
    }

    /// Joined rows of these.
    pub(super) fn joined(self, joins: Vec<RowJoin>) -> Self {
        let length = |join: &RowJoin| self.length(join.row as usize) as u32 + join.added();
        let lengths = joins.iter().map(length).collect();
        Self(ExampleStore::Joined {
            rows: Arc::new(self),
            joins: joins.into(),
            lengths,
        })
    }

    /// The rows for which `second` is false, and the others.
    pub(super) fn split(self, second: &dyn Fn(usize) -> bool) -> [Self; 2] {
        match self.0 {
            ExampleStore::Memory(all) => {
                let mut parts = [Vec::new(), Vec::new()];
                for (row, example) in all.into_iter().enumerate() {
                    parts[usize::from(second(row))].push(example);
                }
                parts.map(Self::from)
            }
            ExampleStore::File { file, rows, lengths } => [false, true].map(|part| {
                let own: Vec<usize> = (0..lengths.len()).filter(|&row| second(row) == part).collect();
                let number = |row: usize| rows.as_ref().map_or(row as u32, |rows| rows[row]);
                Self(ExampleStore::File {
                    file: file.clone(),
                    rows: Some(own.iter().map(|&row| number(row)).collect()),
                    lengths: own.iter().map(|&row| lengths[row]).collect(),
                })
            }),
            ExampleStore::Joined { rows, joins, lengths } => [false, true].map(|part| {
                let own: Vec<usize> = (0..joins.len()).filter(|&row| second(row) == part).collect();
                Self(ExampleStore::Joined {
                    rows: rows.clone(),
                    joins: own.iter().map(|&row| joins[row]).collect(),
                    lengths: own.iter().map(|&row| lengths[row]).collect(),
                })
            }),
        }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        match &self.0 {
            ExampleStore::Memory(rows) => rows.len(),
            ExampleStore::File { lengths, .. } | ExampleStore::Joined { lengths, .. } => lengths.len(),
        }
    }

    /// True without rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens of a row; `row` < `len`.
    pub fn length(&self, row: usize) -> usize {
        match &self.0 {
            ExampleStore::Memory(rows) => rows[row].ids.len(),
            ExampleStore::File { lengths, .. } | ExampleStore::Joined { lengths, .. } => lengths[row] as usize,
        }
    }

    /// Tokens of each row.
    pub fn lengths(&self) -> Arc<[u32]> {
        match &self.0 {
            ExampleStore::Memory(rows) => rows.iter().map(|e| e.ids.len() as u32).collect(),
            ExampleStore::File { lengths, .. } | ExampleStore::Joined { lengths, .. } => lengths.clone(),
        }
    }

    /// The number of a row in its file.
    fn number(&self, row: usize) -> u32 {
        match &self.0 {
            ExampleStore::File { rows: Some(rows), .. } => rows[row],
            _ => row as u32,
        }
    }

    /// A row; `row` < `len`.
    ///
    /// # Errors
    /// The token file cannot be read.
    pub fn get(&self, row: usize) -> Result<Cow<'_, Example>> {
        match &self.0 {
            ExampleStore::Memory(rows) => Ok(Cow::Borrowed(&rows[row])),
            ExampleStore::File { file, .. } => file.example(self.number(row)).map(Cow::Owned),
            ExampleStore::Joined { rows, joins, .. } => joins[row].example(rows).map(Cow::Owned),
        }
    }

    /// The place of a row in the data files. `None`: the rows are in memory, and the dataset has their places.
    pub(super) fn origin(&self, row: usize) -> Result<Option<RowOrigin>> {
        match &self.0 {
            ExampleStore::Memory(_) => Ok(None),
            ExampleStore::File { file, .. } => file.entry(self.number(row)).map(|entry| Some(entry.origin)),
            ExampleStore::Joined { rows, joins, .. } => rows.origin(joins[row].row as usize),
        }
    }

    /// The place of each row, as `origin`.
    pub(super) fn origins(&self) -> Result<Option<Vec<RowOrigin>>> {
        if let ExampleStore::Joined { rows, joins, .. } = &self.0 {
            let all = rows.origins()?;
            return Ok(all.map(|all| joins.iter().map(|join| all[join.row as usize]).collect()));
        }
        if self.file().is_none() {
            return Ok(None);
        }
        let mut out = Vec::with_capacity(self.len());
        self.entries(&mut |entry| out.push(entry.origin))?;
        Ok(Some(out))
    }

    /// Calls `each` with the entries of all rows of a file, in order.
    fn entries(&self, each: &mut dyn FnMut(RowEntry)) -> Result<()> {
        match &self.0 {
            ExampleStore::Memory(_) | ExampleStore::Joined { .. } => Ok(()),
            ExampleStore::File {
                file, rows: Some(rows), ..
            } => file.entries_of(rows.iter().copied(), each),
            ExampleStore::File { file, lengths, .. } => file.entries_of(0..lengths.len() as u32, each),
        }
    }

    /// The sizes of each row; the tokens of a file are not read.
    ///
    /// # Errors
    /// The token file cannot be read.
    pub fn measures(&self) -> Result<Vec<RowMeasure>> {
        match &self.0 {
            ExampleStore::Memory(rows) => return Ok(rows.iter().map(RowMeasure::of).collect()),
            ExampleStore::Joined { rows, joins, .. } => {
                let all = rows.measures()?;
                return Ok(joins.iter().map(|join| join.measure(all[join.row as usize])).collect());
            }
            ExampleStore::File { .. } => {}
        }
        let mut out = Vec::with_capacity(self.len());
        self.entries(&mut |entry| out.push(entry.measure))?;
        Ok(out)
    }

    /// The file with the rows, if they are not in memory.
    pub(super) fn file(&self) -> Option<&TokenFile> {
        match &self.0 {
            ExampleStore::Memory(_) => None,
            ExampleStore::File { file, .. } => Some(file),
            ExampleStore::Joined { rows, .. } => rows.file(),
        }
    }

    /// True if the rows are in a token file.
    pub fn in_file(&self) -> bool {
        self.file().is_some()
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

    /// The rows, if they are in memory as they are.
    pub fn in_memory(&self) -> Option<&[Example]> {
        match &self.0 {
            ExampleStore::Memory(rows) => Some(rows),
            ExampleStore::File { .. } | ExampleStore::Joined { .. } => None,
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
