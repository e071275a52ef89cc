//! Which rows are dropped before training: duplicates, rows of evaluation files, rows on which judges disagree.

use super::*;
use crate::data::screen;

section! {
    /// The keys of `data` that drop rows.
    pub struct Quality in "data" {
        /// Drop repeated training rows; the first one is kept. `exact`: the same texts in the same roles; `near`: also
        /// rows with nearly the same words.
        dedup: Dedup = "none", "every row is trained";
        /// With `dedup = "near"`: the smallest similarity of two duplicates, the fraction of common sequences of five words
        /// (Jaccard), estimated by MinHash.
        dedup_threshold: f64 = 0.8, "a few words of a hundred differ; below 0.7 pairs would be missed", in SIMILAR,
            when Quality::dedup = ["near"];
        /// File or list of files with evaluation rows (any columns), or a hub dataset: training rows that share a
        /// sequence of `decontaminate_ngram` words with one of them are dropped, and listed in `dropped_rows.jsonl`.
        decontaminate: Vec<String> = [], "no evaluation file is known";
        /// Number of words of such a sequence, without punctuation and case. A shorter evaluation text of at least 8
        /// words is one sequence.
        decontaminate_ngram: usize = 13, "as in GPT-3", in between(8, 1000);
        with judges: JudgeKeys;
    }
}

section! {
    /// Votes of several judges about each row, in columns of the data.
    pub struct JudgeKeys in "data.judges" {
        /// Columns with votes, one for each judge, or one with a list of votes. Votes about a pair: `chosen`,
        /// `rejected`, `tie`, a truth value, a number, or scores `{"chosen": 7, "rejected": 3}`; about other rows: any
        /// texts, truth values or numbers.
        columns: Vec<String> = [], "the rows have no votes";
        /// Rows whose agreement is smaller are dropped: the fraction of votes for `chosen` of a pair, for the `label` of a judged
        /// answer, else for the most frequent vote.
        min_agreement: f64 = 0.0, "no row is dropped; the agreement is shown", in PART;
    }
}

/// The similarities for which near duplicates are found.
const SIMILAR: KeyRange = KeyRange { min: 0.7, ..PART };

pub use screen::Dedup;

impl Quality {
    /// The settings of the screen, with local files of evaluation rows.
    pub fn screen(&self, evaluation: Vec<String>) -> screen::ScreenSpec {
        screen::ScreenSpec {
            dedup: self.dedup,
            threshold: self.dedup_threshold,
            evaluation,
            ngram: self.decontaminate_ngram,
            judges: (!self.judges.columns.is_empty()).then(|| screen::judges::Judges {
                columns: self.judges.columns.clone(),
                min_agreement: self.judges.min_agreement,
            }),
        }
    }
}

/// The setting because of which a key has no effect.
pub(super) fn unused(s: &RecipeSections, key: KeyPath) -> Option<String> {
    let keys = &s.data.quality;
    match key {
        Quality::decontaminate_ngram if keys.decontaminate.is_empty() => Some("data.decontaminate = []".into()),
        JudgeKeys::min_agreement if keys.judges.columns.is_empty() => Some("data.judges.columns = []".into()),
        _ => None,
    }
}
