//! Near duplicates: MinHash (Broder 1997) with banding (locality-sensitive hashing).
//!
//! A row is the set of its sequences of five words, each with its role. The signature has 120 minima; the share of equal
//! minima of two rows estimates the Jaccard similarity of their sets (standard error 0.04 at 0.8). Two rows are compared
//! if one of 20 bands of 6 minima is equal: at a similarity of 0.8 with probability 0.998, at 0.7 with 0.92. FineWeb
//! (Penedo et al. 2024, arXiv 2406.17557) uses the same sequences, with 14 bands of 8 for a similarity of 0.75.
//!
//! Memory for a row that is kept: 240 bytes of signature, 20 entries of about 14 bytes in the bands.

use super::parts::{RowText, fnv, mixed, words};
use std::collections::HashMap;

/// Words of a sequence.
const WORDS: usize = 5;
const BANDS: usize = 20;
const ROWS: usize = 6;
const MINIMA: usize = BANDS * ROWS;
/// Smallest threshold: rows that are less similar are rarely compared.
pub(super) const LEAST: f64 = 0.7;

/// The signature of a row.
pub(super) struct Signature {
    minima: [u32; MINIMA],
}

impl Signature {
    pub(super) fn of(parts: &[RowText]) -> Self {
        // Equal answers with different labels are different rows.
        let label = parts.iter().find(|p| p.role == "label").map_or(0, |p| fnv(&p.text));
        let mut out = Self {
            minima: [u32::MAX; MINIMA],
        };
        for part in parts.iter().filter(|p| p.role != "label") {
            // The same conversation may be there once for each answer that it trains.
            let untrained = u64::from(part.is_untrained);
            let seed = mixed(fnv(&part.role) ^ label ^ untrained);
            let words = words(&part.text);
            if words.is_empty() {
                out.add(mixed(seed ^ fnv(part.text.trim())));
                continue;
            }
            for sequence in words.windows(WORDS.min(words.len())) {
                let sum = |hash: u64, word: &u64| mixed(hash ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
                out.add(sequence.iter().fold(seed, sum));
            }
        }
        out
    }

    fn add(&mut self, element: u64) {
        let (low, high) = (element as u32, (element >> 32) as u32);
        for (i, least) in self.minima.iter_mut().enumerate() {
            // The i-th hash function: a combination of both halves, mixed (the finalizer of MurmurHash3).
            let mut x = low.wrapping_add(high.wrapping_mul(2 * i as u32 + 1));
            x = (x ^ (x >> 16)).wrapping_mul(0x85eb_ca6b);
            x = (x ^ (x >> 13)).wrapping_mul(0xc2b2_ae35);
            *least = (*least).min(x ^ (x >> 16));
        }
    }

    fn band(&self, band: usize) -> u32 {
        let minima = &self.minima[band * ROWS..][..ROWS];
        minima.iter().fold(band as u64, |hash, m| mixed(hash ^ u64::from(*m))) as u32
    }
}

/// The signatures of the rows that were kept, in order.
#[derive(Debug)]
pub(super) struct Signatures {
    /// `[rows, MINIMA]`: the low halves of the minima.
    stored: Vec<u16>,
    /// For each band: its first row with a value.
    bands: Vec<HashMap<u32, u32>>,
}

impl Default for Signatures {
    fn default() -> Self {
        Self {
            stored: Vec::new(),
            bands: vec![HashMap::new(); BANDS],
        }
    }
}

impl Signatures {
    /// The most similar earlier row that shares a band, and its similarity, if that is at least `threshold`.
    pub(super) fn find(&self, row: &Signature, threshold: f64) -> Option<(u32, f64)> {
        let mut best: Option<(u32, f64)> = None;
        for (band, rows) in self.bands.iter().enumerate() {
            let Some(&other) = rows.get(&row.band(band)) else {
                continue;
            };
            if best.is_some_and(|(known, _)| known == other) {
                continue;
            }
            let stored = &self.stored[other as usize * MINIMA..][..MINIMA];
            let equal = row.minima.iter().zip(stored).filter(|(a, b)| **a as u16 == **b).count();
            let similarity = equal as f64 / MINIMA as f64;
            if similarity >= threshold && best.is_none_or(|(_, known)| similarity > known) {
                best = Some((other, similarity));
            }
        }
        best
    }

    pub(super) fn push(&mut self, row: &Signature) {
        let index = (self.stored.len() / MINIMA) as u32;
        self.stored.extend(row.minima.iter().map(|m| *m as u16));
        for (band, rows) in self.bands.iter_mut().enumerate() {
            rows.entry(row.band(band)).or_insert(index);
        }
    }
}
