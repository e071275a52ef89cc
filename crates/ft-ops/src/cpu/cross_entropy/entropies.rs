//! The entropy of the softmax of each row of logits, from one piece of the vocabulary after the other.

use super::kernels::{entropy_sums, largest};
use super::{BLOCK, LogitsSizes, PIECE, gather, multiply, pieces};
use crate::cpu::product::WeightRows;
use crate::cpu::storage::unwritten;
use rayon::prelude::*;

/// Sums of a row over a part of the vocabulary, with m its largest logit.
#[derive(Clone, Copy)]
struct RowSums {
    max: f32,
    /// `Σ e^(logit - m)`
    sum: f64,
    /// `Σ (logit - m) e^(logit - m)`
    product: f64,
}

impl RowSums {
    /// The sums over both parts.
    fn with(self, other: Self) -> Self {
        let max = if other.max > self.max { other.max } else { self.max };
        let at = |of: Self| {
            let shift = (of.max - max) as f64;
            let factor = shift.exp();
            // Nothing was added yet: the largest logit is -∞.
            match of.sum {
                0.0 => (0.0, 0.0),
                sum => (factor * sum, factor * (of.product + shift * sum)),
            }
        };
        let ((a, b), (c, d)) = (at(self), at(other));
        Self {
            max,
            sum: a + c,
            product: b + d,
        }
    }
}

/// The state of a group of tokens.
pub(crate) struct EntropySums {
    /// `[tokens, D]`
    h: Vec<f32>,
    rows: Vec<RowSums>,
    logits: Vec<f32>,
    d: usize,
    cap: f32,
    chunk: usize,
}

impl EntropySums {
    /// Takes the tokens `tokens` of `h` `[N, D]`, and computes the logits of `chunk` at a time; the head is `[V, D]`. `cap` 0 means no
    /// softcap.
    pub(crate) fn new(h: &[f32], tokens: &[usize], (d, v): (usize, usize), cap: f32, chunk: usize) -> Self {
        let chunk = chunk.min(tokens.len()).max(1);
        let none = RowSums {
            max: f32::NEG_INFINITY,
            sum: 0.0,
            product: 0.0,
        };
        Self {
            h: gather(h, tokens, d),
            rows: vec![none; tokens.len()],
            logits: unwritten(chunk * PIECE.min(v)),
            d,
            cap,
            chunk,
        }
    }

    /// Processes the next rows of the head, whole pieces.
    pub(crate) fn add(&mut self, head: WeightRows<'_>) {
        let (d, cap) = (self.d, self.cap);
        for (first, width) in pieces(head.count()) {
            let head = head.part(first, width);
            for (rows, h) in self
                .rows
                .chunks_mut(self.chunk)
                .zip(self.h.chunks((self.chunk * d).max(1)))
            {
                let count = rows.len();
                let logits = &mut self.logits[..count * width];
                multiply(h, head, LogitsSizes { count, width, d }, logits);
                logits.par_chunks_mut(width).zip(rows).for_each(|(logits, row)| {
                    for block in logits.chunks_mut(BLOCK) {
                        let (max, _) = largest(block, cap);
                        let (sum, product) = entropy_sums(block, max);
                        *row = row.with(RowSums { max, sum, product });
                    }
                });
            }
        }
    }

    /// Returns the entropies in nats.
    pub(crate) fn finish(self) -> impl Iterator<Item = f32> {
        self.rows
            .into_iter()
            .map(|row| (row.sum.ln() - row.product / row.sum) as f32)
    }
}
