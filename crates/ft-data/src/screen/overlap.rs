//! Rows that share a sequence of words with evaluation rows, as in GPT-3 (Brown et al. 2020, arXiv 2005.14165, appendix
//! C): sequences of 13 words, in lower case and without punctuation; a shorter evaluation text of at least 8 words is one
//! sequence.
//!
//! A sequence that more than half of the evaluation rows contain is an instruction of the benchmark, and is ignored; so
//! are system messages and tools. Memory: about 25 bytes for each word of the evaluation files.

use super::parts::{RowText, mixed, shown, words};
use crate::TextUnit;
use crate::read::{self, RowPosition};
use ft_base::{Error, Result};
use serde_json::Value;
use std::collections::HashMap;

/// Fewest words of an evaluation text that is compared.
pub(super) const FEWEST: usize = 8;
/// Fields of evaluation rows that are no text of the task.
const FRAME: [&str; 9] = [
    "system",
    "system_prompt",
    "tools",
    "role",
    "from",
    "id",
    "source",
    "url",
    "type",
];

#[derive(Debug)]
pub(super) struct Overlap {
    /// The lengths of the sequences, descending.
    lengths: Vec<usize>,
    /// Hash of a sequence: its first evaluation row, or `COMMON`.
    sequences: HashMap<u64, u32>,
    rows: Vec<RowPosition>,
    /// Evaluation texts, and those that are too short.
    pub texts: usize,
    pub short: usize,
}

/// In place of a row: most evaluation rows contain the sequence.
const COMMON: u32 = u32::MAX;

impl Overlap {
    /// Reads the evaluation files.
    ///
    /// Errors: a file cannot be read; no text has enough words.
    pub(super) fn read(files: &[String], ngram: usize) -> Result<Self> {
        if ngram < FEWEST {
            return Err(Error::usage("the number of shared words is out of range")
                .at("ScreenSpec::ngram")
                .found(ngram)
                .expected(format!("at least {FEWEST}: shorter sequences are common phrases")));
        }
        let mut out = Self {
            lengths: Vec::new(),
            sequences: HashMap::new(),
            rows: Vec::new(),
            texts: 0,
            short: 0,
        };
        // For each sequence: its last row, and the number of rows.
        let mut seen: HashMap<u64, (u32, u32)> = HashMap::new();
        for path in files {
            read::read_rows(path, TextUnit::Auto, &mut |row| {
                let row = row?;
                let index = out.rows.len() as u32;
                out.rows.push(row.place.clone());
                let mut texts = Vec::new();
                row.fields
                    .iter()
                    .for_each(|(key, value)| collect(key, value, &mut texts));
                for text in texts {
                    let words = words(text);
                    out.texts += 1;
                    if words.len() < FEWEST {
                        out.short += 1;
                        continue;
                    }
                    let length = ngram.min(words.len());
                    if !out.lengths.contains(&length) {
                        out.lengths.push(length);
                    }
                    each_sequence(&words, length, &mut |_, hash| {
                        out.sequences.entry(hash).or_insert(index);
                        let (last, rows) = seen.entry(hash).or_insert((index, 1));
                        if *last != index {
                            (*last, *rows) = (index, *rows + 1);
                        }
                        true
                    });
                }
                Ok(())
            })?;
        }
        if out.sequences.is_empty() {
            return Err(Error::format("the evaluation files have no text that can be compared")
                .at(files.join(", "))
                .found(format!("{} rows, {} texts", out.rows.len(), out.texts))
                .expected(format!("texts of at least {FEWEST} words")));
        }
        if out.rows.len() >= 10 {
            let most = out.rows.len() as u32 / 2;
            for (hash, (_, rows)) in seen {
                if rows > most {
                    out.sequences.insert(hash, COMMON);
                }
            }
        }
        out.lengths.sort_unstable_by(|a, b| b.cmp(a));
        Ok(out)
    }

    /// The first shared sequence of these parts: its evaluation row, and its words.
    pub(super) fn find(&self, parts: &[RowText]) -> Option<(&RowPosition, String)> {
        for part in parts.iter().filter(|p| !p.is_frame()) {
            let words = words(&part.text);
            for &length in self.lengths.iter().filter(|l| **l <= words.len()) {
                let mut found = None;
                each_sequence(&words, length, &mut |first, hash| {
                    match self.sequences.get(&hash).filter(|row| **row != COMMON) {
                        Some(row) => found = Some((first, *row)),
                        None => return true,
                    }
                    false
                });
                if let Some((first, row)) = found {
                    return Some((self.rows.get(row as usize)?, shown(&part.text, first, length)));
                }
            }
        }
        None
    }
}

/// All strings in a value that may be text of the task.
fn collect<'a>(key: &str, value: &'a Value, out: &mut Vec<&'a str>) {
    if FRAME.contains(&key) {
        return;
    }
    match value {
        Value::String(text) => out.push(text),
        Value::Array(list) => list.iter().for_each(|v| collect(key, v, out)),
        Value::Object(fields) => {
            let role = ["role", "from"].iter().find_map(|k| fields.get(*k)?.as_str());
            if !matches!(role, Some("system" | "developer")) {
                fields.iter().for_each(|(key, value)| collect(key, value, out));
            }
        }
        _ => {}
    }
}

/// Calls `each` with the position and the hash of every sequence of `length` words, until it returns false.
fn each_sequence(words: &[u64], length: usize, each: &mut dyn FnMut(usize, u64) -> bool) {
    /// Odd, so that no bit of an early word is lost.
    const BASE: u64 = 0x9e37_79b9_7f4a_7c15;
    let top = (1..length).fold(1u64, |p, _| p.wrapping_mul(BASE));
    let mut sum = 0u64;
    for (i, word) in words.iter().enumerate() {
        if i >= length {
            sum = sum.wrapping_sub(words[i - length].wrapping_mul(top));
        }
        sum = sum.wrapping_mul(BASE).wrapping_add(*word);
        if i + 1 >= length && !each(i + 1 - length, mixed(sum ^ length as u64)) {
            return;
        }
    }
}
