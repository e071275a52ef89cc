//! The rows of a distillation in the tokens of a teacher with another tokenizer. The teacher reads every row with its own
//! chat template and its own tokenizer; the answers of both are aligned by their text.

use crate::base::units::count;
use crate::base::{Error, Result};
use crate::data::dataset::Origin;
use crate::data::{Batch, Dataset, Example, Examples, IGNORE};
use crate::distill::spans::{self, TokenBytes};
use crate::distill::{AlignedBatch, AlignedRows};
use crate::ops::distill::aligned::{SharedIds, Span};
use crate::recipe::{Alignment, Recipe};
use crate::setup::ModelDir;
use crate::setup::rows;
use crate::setup::sources::RowSet;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

type Hash = [u8; 16];

/// A row of the teacher may have so many times as many tokens as one of the student.
const LONGER: usize = 2;

/// Finds the teacher's tokens for rows of the student.
pub struct Aligner {
    /// The teacher's rows.
    examples: Examples,
    /// Row of the teacher, by the tokens and targets of the student, and by the prompt of its last answer.
    rows: HashMap<Hash, u32>,
    prompts: HashMap<Hash, u32>,
    student: TokenBytes,
    teacher: TokenBytes,
    tokenizer: Arc<crate::formats::Tokenizer>,
    shared: Option<SharedIds>,
    longest: usize,
    /// Trained tokens of the student, those in spans, and the number of spans.
    counts: [u64; 3],
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
        let place = |row: usize| Ok((read.origin(row)?, row as u32));
        let places: BTreeMap<Origin, u32> = (0..read.examples.len()).map(place).collect::<Result<_>>()?;
        let mut out = Self {
            examples: read.examples,
            rows: HashMap::new(),
            prompts: HashMap::new(),
            student: student.tokenizer.token_bytes(),
            teacher: teacher.tokenizer.token_bytes(),
            tokenizer: Arc::new(crate::formats::Tokenizer::load(&teacher.dir)?),
            shared: None,
            longest,
            counts: [0; 3],
        };
        let mut ends: BTreeMap<(u32, u32), usize> = BTreeMap::new();
        for (at, example) in train.examples.iter().enumerate() {
            let example = example?;
            out.counts[0] += example.trained.iter().skip(1).filter(|t| **t).count() as u64;
            let Some(&row) = places.get(&train.origin(at)?) else {
                continue;
            };
            out.rows.insert(hash(&example.ids, &example.trained), row);
            if let Some(last) = runs(&example.trained).pop() {
                out.prompts.insert(hash(&example.ids[..last.start], &[]), row);
            }
            let other = out.examples.get(row as usize)?.into_owned();
            for (a, b) in out.aligned(&example, &other) {
                out.counts[1] += a.len() as u64;
                out.counts[2] += 1;
                let last = (example.ids[a.end - 1], other.ids[b.end - 1]);
                let no_text = |bytes: &TokenBytes, id: u32| bytes.get(id as usize).is_none_or(Vec::is_empty);
                if no_text(&out.student, last.0) && no_text(&out.teacher, last.1) {
                    *ends.entry(last).or_default() += 1;
                }
            }
        }
        if out.counts[2] == 0 {
            return Err(
                Error::new("no answer has the same text for the teacher and for the student")
                    .at("distill.teacher")
                    .found(format!(
                        "{} trained tokens, none of them in a common span",
                        count(out.counts[0])
                    ))
                    .hint(
                        "compare the rows of both: `ft data --recipe R`, and the same with `model.path` of the teacher",
                    ),
            );
        }
        if recipe.distill.alignment == Alignment::Gold {
            let mut ends: Vec<_> = ends.into_iter().collect();
            // The most frequent pairs first.
            ends.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
            let ends: Vec<_> = ends.into_iter().map(|(pair, _)| pair).collect();
            out.shared = Some(spans::shared(&out.student, &out.teacher, &ends));
        }
        Ok(out)
    }

    /// A warning if most of the rows is not aligned.
    pub fn warning(&self) -> Option<String> {
        let [trained, aligned, _] = self.counts;
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
        let [trained, aligned, spans] = self.counts;
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

    /// Spans of tokens of both rows.
    fn aligned(&self, own: &Example, other: &Example) -> Vec<(Range<usize>, Range<usize>)> {
        let bytes = (&self.student, &self.teacher);
        let mut out = Vec::new();
        for (a, b) in runs(&own.trained).into_iter().zip(runs(&other.trained)) {
            let found = spans::align(&own.ids[a.clone()], &other.ids[b.clone()], bytes);
            let shift = |r: Range<usize>, by: usize| r.start + by..r.end + by;
            out.extend(found.into_iter().map(|(x, y)| (shift(x, a.start), shift(y, b.start))));
        }
        out
    }

    /// The teacher's row for a row that the student answered: its own prompt, and the text of the answer.
    fn answered(&self, own: &Example) -> Result<Option<Example>> {
        let Some(run) = runs(&own.trained).pop() else {
            return Ok(None);
        };
        let Some(row) = self.prompts.get(&hash(&own.ids[..run.start], &[])) else {
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
        let ends = |bytes: &TokenBytes, id: Option<&u32>| id.is_some_and(|id| bytes[*id as usize].is_empty());
        let end = example.ids[last.clone()].last();
        if ends(&self.student, own.ids.last()) && ends(&self.teacher, end) {
            ids.extend(end);
        }
        ids.truncate(self.longest);
        Ok((ids.len() > last.start).then(|| Example {
            trained: (0..ids.len()).map(|t| t >= last.start).collect(),
            ids,
        }))
    }
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
            let known = self.rows.get(&hash(&own.ids, &own.trained));
            let other = match known {
                Some(row) => Some(self.examples.get(*row as usize)?.into_owned()),
                None => self.answered(&own)?,
            };
            let Some(other) = other else { continue };
            let rows = |r: Range<usize>, first: usize| first + r.start - 1..first + r.end - 1;
            let found = self.aligned(&own, &other).into_iter();
            spans.extend(found.map(|(a, b)| Span {
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

/// Runs of trained tokens; the first token of a row is never a target.
fn runs(trained: &[bool]) -> Vec<Range<usize>> {
    let (mut out, mut t): (Vec<Range<usize>>, usize) = (Vec::new(), 1);
    while t < trained.len() {
        let end = t + trained[t..].iter().take_while(|x| **x).count();
        if end > t {
            out.push(t..end);
        }
        t = end + 1;
    }
    out
}

/// Hash of tokens and targets.
fn hash(ids: &[u32], trained: &[bool]) -> Hash {
    let mut hasher = blake3::Hasher::new();
    for id in ids {
        hasher.update(&id.to_le_bytes());
    }
    // The first token is never a target.
    let mask: Vec<u8> = trained.iter().skip(1).map(|t| u8::from(*t)).collect();
    hasher.update(&mask);
    let mut out = [0; 16];
    out.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    out
}
