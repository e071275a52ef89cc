//! Drops rows before they are tokenized: rows on which judges disagree, rows that also appear in an evaluation file, and
//! duplicates. Works on the columns that the layout of a file reads, so all row formats are handled alike.
//!
//! The decision for a row depends on the rows before it only: the first row of a group of duplicates is kept. Values that
//! depend on one row alone are computed in parallel.

pub mod judges;
mod near;
mod overlap;
mod parts;
pub mod stats;
pub(crate) mod waiting;
#[cfg(test)]
mod tests;

use super::layout::ColumnLayout;
use super::read::{Row, RowPosition};
use ft_base::named;
use ft_base::sync::lock;
use ft_base::units::count;
use ft_base::{Error, Result};
use judges::{Agreement, Judges, VoteCounts};
use near::{Signature, Signatures};
use overlap::Overlap;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use stats::RowStats;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use waiting::WaitingRow;

named!(
    /// Which repeated rows are dropped.
    Dedup {
        /// No row is dropped.
        None = "none",
        /// Rows with the same texts.
        Exact = "exact",
        /// Also rows with nearly the same words.
        Near = "near",
    }
);

/// Settings of a screen.
#[derive(Debug, Clone)]
pub struct ScreenSpec {
    /// Which repeated rows are dropped.
    pub dedup: Dedup,
    /// `Dedup::Near`: smallest Jaccard similarity of two duplicates.
    pub threshold: f64,
    /// Files with evaluation rows; a row that shares `ngram` consecutive words with one of them is dropped.
    pub evaluation: Vec<String>,
    /// Words of such a sequence.
    pub ngram: usize,
    /// Votes of several judges about each row.
    pub judges: Option<Judges>,
}

impl Default for ScreenSpec {
    fn default() -> Self {
        Self {
            dedup: Dedup::None,
            threshold: 0.8,
            evaluation: Vec::new(),
            ngram: 13,
            judges: None,
        }
    }
}

/// Why a row was dropped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum DropReason {
    /// The judges disagree, or contradict the label of the row: the share of votes for it.
    Judges(f64),
    /// It shares these words with a row of the evaluation files.
    Evaluation {
        /// The evaluation row.
        row: RowPosition,
        /// The shared words.
        words: String,
    },
    /// It has the same texts as this earlier row.
    Same(RowPosition),
    /// It has nearly the same words as this earlier row; with the estimated similarity.
    Near(RowPosition, f64),
}

/// A row that was dropped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DroppedRow {
    /// Its place.
    pub row: RowPosition,
    /// Why.
    pub reason: DropReason,
}

impl DroppedRow {
    /// One line of a list of dropped rows.
    pub fn json(&self) -> Value {
        let row = self.row.to_string();
        match &self.reason {
            DropReason::Judges(share) => json!({"row": row, "reason": "judges", "agreement": share}),
            DropReason::Evaluation { row: other, words } => {
                json!({"row": row, "reason": "evaluation", "other": other.to_string(), "words": words})
            }
            DropReason::Same(other) => json!({"row": row, "reason": "same", "other": other.to_string()}),
            DropReason::Near(other, similarity) => {
                json!({"row": row, "reason": "near", "other": other.to_string(), "similarity": similarity})
            }
        }
    }
}

/// The counts of a screen.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ScreenCounts {
    /// Rows that it saw.
    pub rows: usize,
    /// The dropped rows, in order.
    pub dropped: Vec<DroppedRow>,
    /// Agreement of the judges over all rows.
    pub agreement: Option<Agreement>,
    /// Texts of the evaluation files, and those with too few words to be compared.
    pub evaluation_texts: (usize, usize),
}

impl ScreenCounts {
    /// Number of dropped rows for each reason: judges, evaluation, same, near.
    pub fn counts(&self) -> [usize; 4] {
        let mut out = [0; 4];
        for d in &self.dropped {
            out[match d.reason {
                DropReason::Judges(_) => 0,
                DropReason::Evaluation { .. } => 1,
                DropReason::Same(_) => 2,
                DropReason::Near(..) => 3,
            }] += 1;
        }
        out
    }

    /// The counts in words, with an example of each; empty if nothing was screened.
    pub fn lines(&self) -> Vec<String> {
        let mut out = Vec::new();
        if let Some(a) = &self.agreement {
            out.push(a.text());
        }
        let names = [
            "rows with too few votes for them",
            "rows that share words with the evaluation files",
            "exact duplicates",
            "near duplicates",
        ];
        for (kind, (n, name)) in self.counts().into_iter().zip(names).enumerate() {
            let first = self.dropped.iter().find(|d| match d.reason {
                DropReason::Judges(_) => kind == 0,
                DropReason::Evaluation { .. } => kind == 1,
                DropReason::Same(_) => kind == 2,
                DropReason::Near(..) => kind == 3,
            });
            let Some(first) = first else { continue };
            let example = match &first.reason {
                DropReason::Judges(share) => format!("{} ({:.0} % of the votes)", first.row, 100.0 * share),
                DropReason::Evaluation { row, words } => format!("{} and {row}: \"{words}\"", first.row),
                DropReason::Same(other) => format!("{} is {other}", first.row),
                DropReason::Near(other, similarity) => {
                    format!("{} is like {other}, similarity {similarity:.2}", first.row)
                }
            };
            out.push(format!(
                "dropped {} of {} rows: {name} (e.g. {example})",
                count(n as u64),
                count(self.rows as u64)
            ));
        }
        out
    }

    /// Warnings for the user.
    pub fn warnings(&self) -> Vec<String> {
        let (all, short) = self.evaluation_texts;
        let mut out = Vec::new();
        if short > 0 {
            out.push(format!(
                "{} of {} texts of the evaluation files have fewer than {} words: they are too short to be compared",
                count(short as u64),
                count(all as u64),
                overlap::FEWEST
            ));
        }
        out
    }
}

/// Decides which rows are dropped. One screen may read several datasets: they are screened together.
#[derive(Debug)]
pub struct Screen {
    spec: ScreenSpec,
    overlap: Option<Overlap>,
    counts_texts: bool,
    state: Mutex<ScreenState>,
}

#[derive(Debug, Default)]
struct ScreenState {
    out: ScreenCounts,
    exact: HashMap<[u8; 16], u32>,
    near: Option<Signatures>,
    /// The rows that `exact` and `near` refer to.
    kept: Vec<(RowPosition, u32)>,
    vote_counts: VoteCounts,
    /// The report of an earlier process, which dropped the rows.
    restored: Option<ScreenCounts>,
    /// The texts of all rows, if they are counted.
    texts: Option<RowStats>,
    /// Rows are read again in each epoch: a kept row is not a duplicate of itself.
    rereads: bool,
}

/// The values that are computed from a row alone.
struct Print {
    votes: Result<Option<judges::Votes>>,
    texts: Vec<stats::TextMeasure>,
    compared: Compared,
}

/// What a row is compared by.
struct Compared {
    /// Position of the row, and the index of its file over all sources (two sources may name the same file).
    place: (RowPosition, u32),
    /// The evaluation row with the same words, and the words.
    shared: Option<(RowPosition, String)>,
    /// Hash of the texts; with `Dedup::None` zeros.
    exact: [u8; 16],
    /// With `Dedup::Near`: estimates the similarity.
    near: Option<Signature>,
}

impl ScreenSpec {
    fn drops(&self) -> bool {
        self.dedup != Dedup::None || !self.evaluation.is_empty() || self.judges.is_some()
    }
}

impl Screen {
    /// Reads the evaluation files. `None`: the settings drop nothing.
    ///
    /// # Errors
    /// An evaluation file cannot be read; settings out of range.
    pub fn new(spec: ScreenSpec) -> Result<Option<Self>> {
        if !spec.drops() {
            return Ok(None);
        }
        Self::open(spec, None).map(Some)
    }

    /// Also counts the texts of all rows that it sees. It may drop nothing.
    ///
    /// # Errors
    /// As `new`.
    pub fn with_texts(spec: ScreenSpec) -> Result<Self> {
        Self::open(spec, Some(RowStats::default()))
    }

    fn open(spec: ScreenSpec, texts: Option<RowStats>) -> Result<Self> {
        if !(near::LEAST..=1.0).contains(&spec.threshold) {
            return Err(Error::usage("the similarity of near duplicates is out of range")
                .at("ScreenSpec::threshold")
                .found(spec.threshold)
                .expected(format!("{} to 1", near::LEAST)));
        }
        let overlap = if spec.evaluation.is_empty() {
            None
        } else {
            Some(Overlap::read(&spec.evaluation, spec.ngram)?)
        };
        let mut state = ScreenState::default();
        if let Some(overlap) = &overlap {
            state.out.evaluation_texts = (overlap.texts, overlap.short);
        }
        state.near = (spec.dedup == Dedup::Near).then(Signatures::default);
        state.texts = texts;
        Ok(Self {
            counts_texts: state.texts.is_some(),
            spec,
            overlap,
            state: Mutex::new(state),
        })
    }

    /// True if it may drop rows.
    pub fn drops(&self) -> bool {
        self.spec.drops()
    }

    /// The texts of the rows that it saw; `None`: they are not counted, or it saw none.
    pub fn texts(&self) -> Option<RowStats> {
        let mut state = lock(&self.state);
        match state.out.rows {
            0 => None,
            _ => state.texts.take(),
        }
    }

    /// For rows that are read again in each epoch.
    pub(crate) fn rereading(self) -> Self {
        let mut state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        state.rereads = true;
        Self {
            state: Mutex::new(state),
            ..self
        }
    }

    /// Leaves the rows that were dropped so far out of the report: a list of all of them would grow during the run.
    pub(crate) fn forget_dropped(&self) {
        let mut state = lock(&self.state);
        state.out.dropped.clear();
    }

    /// True if a row is compared with those before it.
    pub(crate) fn compares(&self) -> bool {
        self.spec.dedup != Dedup::None
    }

    /// The settings.
    pub(crate) fn spec(&self) -> &ScreenSpec {
        &self.spec
    }

    /// Reports what an earlier process dropped.
    pub(crate) fn restore(&self, screened: ScreenCounts) {
        let mut state = lock(&self.state);
        state.restored = Some(screened);
    }

    /// Columns that the judges of a row wrote.
    pub(crate) fn columns(&self) -> &[String] {
        self.spec.judges.as_ref().map_or(&[], |j| &j.columns)
    }

    /// For each row: whether it is kept, or the error of its votes.
    pub(crate) fn keep(&self, rows: &[(Row, WaitingRow)]) -> Vec<Result<bool>> {
        let prints: Vec<Print> = rows
            .par_iter()
            .map(|(row, WaitingRow(layout, origin))| self.print(row, layout, origin.file))
            .collect();
        let mut state = lock(&self.state);
        let rows = rows.iter().zip(prints);
        rows.map(|((row, _), print)| self.decide(row, print, &mut state))
            .collect()
    }

    fn print(&self, row: &Row, layout: &ColumnLayout, file: u32) -> Print {
        let parts = parts::of(row, layout);
        let shared = self.overlap.as_ref().and_then(|o| o.find(&parts));
        Print {
            votes: match &self.spec.judges {
                Some(judges) => judges.votes(row).map(Some),
                None => Ok(None),
            },
            compared: Compared {
                place: (row.place.clone(), file),
                shared: shared.map(|(row, words)| (row.clone(), words)),
                exact: match self.spec.dedup {
                    Dedup::None => [0; 16],
                    _ => parts::hash(&parts),
                },
                near: (self.spec.dedup == Dedup::Near).then(|| Signature::of(&parts)),
            },
            texts: if self.counts_texts {
                stats::measure(parts)
            } else {
                Vec::new()
            },
        }
    }

    fn decide(&self, row: &Row, print: Print, state: &mut ScreenState) -> Result<bool> {
        if let Some(texts) = &mut state.texts {
            print.texts.into_iter().for_each(|text| texts.add(text));
        }
        let votes = print.votes?;
        state.out.rows += 1;
        let reason = self.reason(votes, print.compared, state);
        let kept = reason.is_none();
        let dropped = reason.map(|reason| DroppedRow {
            row: row.place.clone(),
            reason,
        });
        state.out.dropped.extend(dropped);
        Ok(kept)
    }

    /// Why the row is dropped; `None`: it is kept.
    fn reason(&self, votes: Option<judges::Votes>, row: Compared, state: &mut ScreenState) -> Option<DropReason> {
        if let (Some(judges), Some(votes)) = (&self.spec.judges, votes) {
            state.vote_counts.add(&votes);
            if let Some(share) = votes.share
                && share < judges.min_agreement
            {
                return Some(DropReason::Judges(share));
            }
        }
        if let Some((row, words)) = row.shared {
            return Some(DropReason::Evaluation { row, words });
        }
        if self.spec.dedup == Dedup::None {
            return None;
        }
        let ScreenState {
            exact: seen,
            kept,
            near: signatures,
            rereads,
            ..
        } = state;
        let Compared { place, exact, near, .. } = row;
        if let Some(first) = seen.get(&exact) {
            let first = kept.get(*first as usize);
            if *rereads && first == Some(&place) {
                return None;
            }
            return first.map(|(first, _)| DropReason::Same(first.clone()));
        }
        if let (Some(signatures), Some(signature)) = (signatures, near) {
            if let Some((first, similarity)) = signatures.find(&signature, self.spec.threshold) {
                let first = kept.get(first as usize);
                return first.map(|(first, _)| DropReason::Near(first.clone(), similarity));
            }
            signatures.push(&signature);
        }
        seen.insert(exact, kept.len() as u32);
        kept.push(place);
        None
    }

    /// The counts of the rows dropped so far.
    pub fn report(&self) -> ScreenCounts {
        let state = lock(&self.state);
        if let Some(restored) = &state.restored {
            return restored.clone();
        }
        ScreenCounts {
            agreement: self.spec.judges.as_ref().map(|_| state.vote_counts.agreement()),
            ..state.out.clone()
        }
    }
}
