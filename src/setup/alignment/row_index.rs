//! Which row of the teacher belongs to a row of the student, and how much of both is aligned. It is found once, and kept
//! in the token cache: at a later start neither all rows nor all spans are compared again.

use crate::base::{Error, Result, files, progress};
use crate::data::dataset::RowOrigin;
use crate::data::{Dataset, Example, TextCodec, TokenCache};
use crate::distill::spans::{self, TokenBytes, Vocabularies};
use crate::recipe::Recipe;
use crate::setup::ModelDir;
use crate::setup::rows;
use crate::setup::sources::{RowSet, sources};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;

pub(super) type Hash = [u8; 16];

/// Rows of student and teacher by their content.
#[derive(Debug, Default, PartialEq)]
pub(super) struct RowIndex {
    /// Row of the teacher, by the tokens and targets of the student, and by the prompt of its last answer.
    pub rows: HashMap<Hash, u32>,
    pub prompts: HashMap<Hash, u32>,
    /// Trained tokens of the student, those in spans, and the number of spans.
    pub counts: [u64; 3],
    /// Pairs of tokens without text that end spans of both, the most frequent first.
    pub ends: Vec<(u32, u32)>,
}

impl RowIndex {
    /// From the cache, if it was found before: the rows `own` of the student and `other` of the teacher.
    ///
    /// Errors: the rows or the cache cannot be read.
    pub fn cached(
        recipe: &Recipe,
        own: &Dataset,
        student: &ModelDir,
        other: &Dataset,
        teacher: &ModelDir,
        bytes: Vocabularies<'_>,
    ) -> Result<Self> {
        let find = || Self::find(own, other, bytes);
        // The rows of both are paired by their places in the files.
        let (mut size, mut stamps) = (0, String::new());
        for path in sources(recipe, RowSet::Train)?.iter().flat_map(|s| &s.files) {
            size += files::size(Path::new(path))?;
            stamps += &files::stamp(Path::new(path))?;
        }
        let (Some(from), Some(to)) = (
            TextCodec::identity(&student.tokenizer),
            TextCodec::identity(&teacher.tokenizer),
        ) else {
            return find();
        };
        let names = ["alignment 1", &stamps, &own.fingerprint, &other.fingerprint, &from, &to];
        rows::with_cache(recipe, |cache: Option<&TokenCache>| {
            let Some(cache) = cache.filter(|cache| size >= cache.least_bytes) else {
                return find();
            };
            match cache.made(&names, &|| Ok(find()?.to_bytes()))? {
                Some(bytes) => {
                    let found = Self::of_bytes(&bytes).filter(|found| found.is_within(other.examples.len()));
                    found.ok_or_else(|| {
                        Error::internal("a cached alignment of the rows of student and teacher is not valid")
                    })
                }
                None => find(),
            }
        })
    }

    fn find(own: &Dataset, other: &Dataset, bytes: Vocabularies<'_>) -> Result<Self> {
        let place = |row: usize| Ok((other.origin(row)?, row as u32));
        let places: BTreeMap<RowOrigin, u32> = (0..other.examples.len()).map(place).collect::<Result<_>>()?;
        let mut out = Self::default();
        let mut ends: BTreeMap<(u32, u32), usize> = BTreeMap::new();
        let phase = progress::phase("aligning the rows of student and teacher", own.examples.len(), "rows");
        for (at, example) in own.examples.iter().enumerate() {
            let example = example?;
            phase.advance(1)?;
            out.counts[0] += example.trained.iter().skip(1).filter(|t| **t).count() as u64;
            let Some(&row) = places.get(&own.origin(at)?) else {
                continue;
            };
            out.rows.insert(hash(&example.ids, &example.trained), row);
            if let Some(last) = runs(&example.trained).pop() {
                out.prompts.insert(hash(&example.ids[..last.start], &[]), row);
            }
            let other = other.examples.get(row as usize)?.into_owned();
            for (a, b) in aligned(&example, &other, bytes) {
                out.counts[1] += a.len() as u64;
                out.counts[2] += 1;
                let last = (example.ids[a.end - 1], other.ids[b.end - 1]);
                let no_text = |bytes: &TokenBytes, id: u32| bytes.get(id as usize).is_none_or(Vec::is_empty);
                if no_text(bytes.student, last.0) && no_text(bytes.teacher, last.1) {
                    *ends.entry(last).or_default() += 1;
                }
            }
        }
        let mut ends: Vec<_> = ends.into_iter().collect();
        ends.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
        out.ends = ends.into_iter().map(|(pair, _)| pair).collect();
        Ok(out)
    }

    /// True if the teacher has all of these rows.
    fn is_within(&self, rows: usize) -> bool {
        let mut all = self.rows.values().chain(self.prompts.values());
        all.all(|row| (*row as usize) < rows)
    }

    /// Numbers are little-endian.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out: Vec<u8> = self.counts.iter().flat_map(|n| n.to_le_bytes()).collect();
        for map in [&self.rows, &self.prompts] {
            out.extend((map.len() as u64).to_le_bytes());
            let mut sorted: Vec<_> = map.iter().collect();
            sorted.sort_unstable();
            for (hash, row) in sorted {
                out.extend(hash);
                out.extend(row.to_le_bytes());
            }
        }
        let ends = self.ends.iter().flat_map(|(a, b)| [a.to_le_bytes(), b.to_le_bytes()]);
        out.extend(ends.flatten());
        out
    }

    /// As `to_bytes` wrote it.
    pub fn of_bytes(bytes: &[u8]) -> Option<Self> {
        let mut left = bytes;
        let mut counts = [0; 3];
        for count in &mut counts {
            *count = number(&mut left)?;
        }
        let mut map = || -> Option<HashMap<Hash, u32>> {
            let rows = number(&mut left)? as usize;
            let (entries, rest) = left.split_at_checked(rows.checked_mul(20)?)?;
            left = rest;
            let one = |entry: &[u8; 20]| Some((*entry.first_chunk()?, u32::from_le_bytes(*entry.last_chunk()?)));
            entries.as_chunks().0.iter().map(one).collect()
        };
        let (rows, prompts) = (map()?, map()?);
        let pair = |b: &[u8; 8]| {
            Some((
                u32::from_le_bytes(*b.first_chunk()?),
                u32::from_le_bytes(*b.last_chunk()?),
            ))
        };
        let (pairs, []) = left.as_chunks() else { return None };
        let ends = pairs.iter().map(pair).collect::<Option<_>>()?;
        Some(Self {
            rows,
            prompts,
            counts,
            ends,
        })
    }
}

/// Takes a number from the start of `left`.
fn number(left: &mut &[u8]) -> Option<u64> {
    let (first, rest) = left.split_first_chunk()?;
    *left = rest;
    Some(u64::from_le_bytes(*first))
}

/// Spans of tokens of both rows with the same text.
pub(super) fn aligned(own: &Example, other: &Example, bytes: Vocabularies<'_>) -> Vec<(Range<usize>, Range<usize>)> {
    let mut out = Vec::new();
    for (a, b) in runs(&own.trained).into_iter().zip(runs(&other.trained)) {
        let found = spans::align(&own.ids[a.clone()], &other.ids[b.clone()], bytes);
        let shift = |r: Range<usize>, by: usize| r.start + by..r.end + by;
        out.extend(found.into_iter().map(|(x, y)| (shift(x, a.start), shift(y, b.start))));
    }
    out
}

/// Runs of trained tokens; the first token of a row is never a target.
pub(super) fn runs(trained: &[bool]) -> Vec<Range<usize>> {
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
pub(super) fn hash(ids: &[u32], trained: &[bool]) -> Hash {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_is_read_as_it_was_written() {
        let map = |n: u8| (0..n).map(|i| ([i; 16], u32::from(i) * 3)).collect();
        let index = RowIndex {
            rows: map(9),
            prompts: map(4),
            counts: [100, 90, 12],
            ends: vec![(7, 70_000), (1, 2)],
        };
        // The greatest row is 24.
        assert!(index.is_within(25) && !index.is_within(24));
        let bytes = index.to_bytes();
        assert_eq!(RowIndex::of_bytes(&bytes), Some(index));
        assert_eq!(RowIndex::of_bytes(&bytes[..100]), None);
        assert_eq!(RowIndex::of_bytes(&bytes[..bytes.len() - 1]), None);
    }
}
