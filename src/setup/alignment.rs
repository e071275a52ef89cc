//! The rows of a distillation in the tokens of a teacher with another tokenizer. The teacher reads every row with its own
//! chat template and its own tokenizer; the answers of both are aligned by their text.

mod row_index;

use crate::base::units::count;
use crate::base::{Error, Result};
use crate::data::{Batch, Dataset, Example, Examples, IGNORE};
use crate::distill::spans::{self, TokenBytes, Vocabularies};
use crate::distill::{AlignedBatch, AlignedRows};
use crate::ops::distill::aligned::{AlignedSpan, SharedIds};
use crate::recipe::{Alignment, DistillSection, Recipe};
use crate::setup::ModelDir;
use crate::setup::rows;
use crate::setup::sources::RowSet;
use row_index::{RowIndex, aligned, hash, runs};
use std::ops::Range;
use std::sync::Arc;

/// A row of the teacher may have at most this many times the tokens of the row of the student.
const LONGER: usize = 2;

/// Finds the teacher's tokens for rows of the student.
pub struct Aligner {
    /// The teacher's rows.
    examples: Examples,
    found: RowIndex,
    student: TokenBytes,
    teacher: TokenBytes,
    tokenizer: Arc<crate::formats::Tokenizer>,
    shared: Option<SharedIds>,
    longest: usize,
}

impl Aligner {
    /// Reads the training rows for the teacher.
    ///
    /// Errors: the teacher cannot read the rows; no answer has the same text for both.
    pub fn new(recipe: &Recipe, student: &ModelDir, teacher: &ModelDir, train: &Dataset) -> Result<Self> {
        let mut own = recipe.clone();
        let longest = teacher.spec.max_positions;
        own.data.max_length = (LONGER * recipe.data.max_length).min(longest).max(2);
        let read = rows::read(&own, RowSet::Train, teacher)
            .map_err(|e| e.after("the rows are read again with the tokenizer and the chat template of the teacher"))?;
        let (own_bytes, bytes) = (student.tokenizer.token_bytes(), teacher.tokenizer.token_bytes());
        let texts = Vocabularies {
            student: &own_bytes,
            teacher: &bytes,
        };
        let found = RowIndex::cached(recipe, train, student, &read, teacher, texts)?;
        if found.counts[2] == 0 {
            return Err(
                Error::new("no answer has the same text for the teacher and for the student")
                    .at(DistillSection::teacher)
                    .found(format!(
                        "{} trained tokens, none of them in a common span",
                        count(found.counts[0])
                    ))
                    .hint(
                        "compare the rows of both: `ft data --recipe R`, and the same with `model.path` of the teacher",
                    ),
            );
        }
        let gold = recipe.distill.alignment == Alignment::Gold;
        Ok(Self {
            examples: read.examples,
            shared: gold.then(|| spans::shared(&own_bytes, &bytes, &found.ends)),
            found,
            student: own_bytes,
            teacher: bytes,
            tokenizer: Arc::new(crate::formats::Tokenizer::load(&teacher.dir)?),
            longest,
        })
    }

    /// A warning if most of the rows is not aligned.
    pub fn warning(&self) -> Option<String> {
        let [trained, aligned, _] = self.found.counts;
        (2 * aligned < trained).then(|| {
            format!(
                "only {} of {} trained tokens are in spans with the same text for the teacher: the others do not learn \
                 from it; compare the rows of both with `ft data`, and the same with `model.path` of the teacher",
                count(aligned),
                count(trained)
            )
        })
    }

    /// How much of the rows is aligned.
    pub fn describe(&self) -> String {
        let [trained, aligned, spans] = self.found.counts;
        let shared = self.shared.as_ref().map_or(String::new(), |s| {
            format!(
                "; {} ids have the same text in both vocabularies",
                count(s.pairs.len() as u64)
            )
        });
        format!(
            "alignment with the teacher's tokens: {} spans with {:.1} % of the trained tokens{shared}",
            count(spans),
            100.0 * aligned as f64 / trained.max(1) as f64,
        )
    }

    /// The teacher's row for a row that the student answered: its own prompt, and the text of the answer.
    fn answered(&self, own: &Example) -> Result<Option<Example>> {
        let Some(run) = runs(&own.trained).pop() else {
            return Ok(None);
        };
        let Some(row) = self.found.prompts.get(&hash(&own.ids[..run.start], &[])) else {
            return Ok(None);
        };
        let example = self.examples.get(*row as usize)?;
        let Some(last) = runs(&example.trained).pop() else {
            return Ok(None);
        };
        let bytes = |id: &u32| self.student.get(*id as usize).cloned().unwrap_or_default();
        let text: Vec<u8> = own.ids[run.clone()].iter().flat_map(bytes).collect();
        // A character that the student did not finish has no text.
        let text = match std::str::from_utf8(&text) {
            Ok(text) => text,
            Err(e) => std::str::from_utf8(&text[..e.valid_up_to()]).unwrap_or_default(),
        };
        let mut ids = example.ids[..last.start].to_vec();
        ids.extend(self.tokenizer.encode(text, false)?);
        let end = example.ids[last.clone()].last();
        if is_special(&self.student, own.ids.last()) && is_special(&self.teacher, end) {
            ids.extend(end);
        }
        ids.truncate(self.longest);
        Ok((ids.len() > last.start).then(|| Example {
            trained: (0..ids.len()).map(|t| t >= last.start).collect(),
            ids,
        }))
    }
}

/// True for a special token, which has an entry without text. The embedding of a model may have more rows than its tokenizer
/// has ids, and a model can sample those too: they end nothing.
fn is_special(bytes: &TokenBytes, id: Option<&u32>) -> bool {
    id.and_then(|id| bytes.get(*id as usize)).is_some_and(Vec::is_empty)
}

/// For the fuzzer: the bytes of a cached alignment, read and written again.
#[doc(hidden)]
pub fn index_again(bytes: &[u8]) -> Option<Vec<u8>> {
    Some(RowIndex::of_bytes(bytes)?.to_bytes())
}

impl AlignedRows for Aligner {
    fn of(&self, batch: &Batch) -> Result<AlignedBatch> {
        let (mut examples, mut spans, mut offset) = (Vec::new(), Vec::new(), 0);
        for range in batch.documents.windows(2).map(|w| w[0]..w[1]) {
            // The target of a position is the token after it.
            let targets = &batch.targets[range.clone()];
            let trained = std::iter::once(false).chain(targets.iter().map(|t| *t != IGNORE));
            let own = Example {
                ids: batch.ids[range.clone()].to_vec(),
                trained: trained.take(range.len()).collect(),
            };
            let known = self.found.rows.get(&hash(&own.ids, &own.trained));
            let other = match known {
                Some(row) => Some(self.examples.get(*row as usize)?.into_owned()),
                None => self.answered(&own)?,
            };
            let Some(other) = other else { continue };
            let rows = |r: Range<usize>, first: usize| first + r.start - 1..first + r.end - 1;
            let texts = Vocabularies {
                student: &self.student,
                teacher: &self.teacher,
            };
            let found = aligned(&own, &other, texts).into_iter();
            spans.extend(found.map(|(a, b)| AlignedSpan {
                student: rows(a, range.start),
                teacher: rows(b, offset),
            }));
            offset += other.ids.len();
            examples.push(other);
        }
        Ok(AlignedBatch {
            teacher: Batch::from_examples(&examples),
            spans,
        })
    }

    fn shared(&self) -> Option<&SharedIds> {
        self.shared.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sampled_id_beyond_the_tokenizer_ends_no_answer() {
        let bytes: TokenBytes = vec![b"a".to_vec(), Vec::new()];
        let special = |id: Option<u32>| is_special(&bytes, id.as_ref());
        assert_eq!(
            [Some(0), Some(1), Some(2), None].map(special),
            [false, true, false, false]
        );
    }
}
