//! The data of a row of preferences beside its tokens: 16 bytes in the file `pairs`.

use super::{PAIR_BYTES, TokenFile, row_count};
use crate::load::PreferenceSide;
use crate::preference::PreferenceDocuments;
use ft_base::Result;
use std::os::unix::fs::FileExt;

/// Bits of the last word.
const LABEL: u32 = 1;
const LAST: u32 = 2;
const MARGIN: u32 = 4;

pub(super) fn bytes(side: &PreferenceSide) -> [u8; PAIR_BYTES] {
    let PreferenceDocuments {
        first,
        prompt,
        margin,
        label,
    } = side.preference;
    let flag = |is_set: bool, bit: u32| if is_set { bit } else { 0 };
    let flags = flag(label, LABEL) | flag(side.is_last, LAST) | flag(side.has_margin, MARGIN);
    let mut out = [0; PAIR_BYTES];
    let words = [first as u32, prompt as u32, margin.to_bits(), flags];
    for (to, word) in out.as_chunks_mut().0.iter_mut().zip(words) {
        *to = word.to_le_bytes();
    }
    out
}

/// As `bytes` wrote it.
pub(super) fn of(bytes: &[u8; PAIR_BYTES]) -> PreferenceSide {
    let mut words = [0; 4];
    for (word, from) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word = u32::from_le_bytes(*from);
    }
    let [first, prompt, margin, flags] = words;
    PreferenceSide {
        preference: PreferenceDocuments {
            first: first as usize,
            prompt: prompt as usize,
            margin: f32::from_bits(margin),
            label: flags & LABEL != 0,
        },
        is_last: flags & LAST != 0,
        has_margin: flags & MARGIN != 0,
    }
}

impl TokenFile {
    /// The order of the rows in the dataset (`None`: that of the file), the number of rows before those that are placed
    /// last, and the documents of the rows in this order. Errors: there are too many rows; the file cannot be read.
    pub(super) fn preferences(&self, rows: u64) -> Result<(Option<Vec<u32>>, usize, Vec<PreferenceDocuments>)> {
        let rows = row_count(rows)?;
        let mut bytes = vec![0; rows as usize * PAIR_BYTES];
        if let Some(pairs) = &self.pairs {
            pairs.read_exact_at(&mut bytes, 0).map_err(|e| self.cannot_read(e))?;
        }
        let sides: Vec<PreferenceSide> = bytes.as_chunks().0.iter().map(of).collect();
        let mut order: Vec<u32> = (0..rows).collect();
        // Stable: both groups stay in the order of the file.
        order.sort_by_key(|row| sides[*row as usize].is_last);
        let preferences = order.iter().map(|row| sides[*row as usize].preference).collect();
        let first_last = sides.iter().filter(|side| !side.is_last).count();
        Ok(((first_last < sides.len()).then_some(order), first_last, preferences))
    }
}
