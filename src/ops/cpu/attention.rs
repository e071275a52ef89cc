//! Attention on slices, forward: one task for a document, a head and a block of queries.

use super::math::{LANES, exp, sum_lanes, tanh, vectorized};
use super::product::gemm;
use super::{Shared, with_scratch};
use crate::ops::attention::Spec;
use rayon::prelude::*;

/// Queries of one task.
pub(crate) const QUERIES: usize = 64;

/// A block of queries of a document and the keys it can see at all.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    /// First query and number of queries, counted over all documents.
    pub query: usize,
    pub queries: usize,
    /// First key counted over all documents, and number of keys.
    pub key: usize,
    pub keys: usize,
    /// Place of the first query among the keys of the block.
    pub place: usize,
}

impl Block {
    /// Queries `first..first + queries` of the document with queries from `q0` and keys `k0..k0 + keys`; its
    /// first query stands at `offset` among its keys.
    pub(crate) fn new(
        (q0, first, queries): (usize, usize, usize),
        k0: usize,
        offset: usize,
        window: Option<usize>,
    ) -> Self {
        let place = offset + first;
        let low = window.map_or(0, |w| (place + 1).saturating_sub(w));
        Self {
            query: q0 + first,
            queries,
            key: k0 + low,
            keys: place + queries - low,
            place: place - low,
        }
    }

    /// The keys that query `i` of the block sees, as a range inside the block.
    pub(crate) fn visible(&self, i: usize, window: Option<usize>) -> std::ops::Range<usize> {
        let end = self.place + i + 1;
        window.map_or(0, |w| end.saturating_sub(w))..end
    }
}

#[allow(clippy::too_many_arguments)]
pub(crate) fn forward(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    spec: &Spec,
    q_documents: &[usize],
    k_documents: &[usize],
    o: &mut [f32],
    lse: &mut [f32],
) {
    let (heads, e) = (spec.heads, spec.head_dim);
    let group = heads / spec.kv_heads;
    let (q_width, k_width) = (heads * e, spec.kv_heads * e);
    let mut tasks = Vec::new();
    for (qd, kd) in q_documents.windows(2).zip(k_documents.windows(2)) {
        let (queries, keys) = (qd[1] - qd[0], kd[1] - kd[0]);
        for first in (0..queries).step_by(QUERIES) {
            let part = (qd[0], first, QUERIES.min(queries - first));
            let block = Block::new(part, kd[0], keys - queries, spec.window);
            tasks.extend((0..heads).map(|head| (head, block)));
        }
    }
    let (o, lse) = (Shared::new(o), Shared::new(lse));
    tasks.into_par_iter().with_max_len(1).for_each(|(head, b)| {
        let at_q = b.query * q_width + head * e;
        let at_k = b.key * k_width + head / group * e;
        with_scratch(b.queries * b.keys, |scores| {
            // SAFETY: all rows lie inside their tensors; the scratch and the rows of o are this task's alone.
            unsafe {
                gemm(
                    (b.queries, b.keys, e),
                    scores.as_mut_ptr(),
                    (b.keys, 1),
                    false,
                    q[at_q..].as_ptr(),
                    (q_width, 1),
                    k[at_k..].as_ptr(),
                    (1, k_width),
                    spec.scale,
                );
            }
            let mut inverse = [0f32; QUERIES];
            for (i, row) in scores.chunks_exact_mut(b.keys).enumerate() {
                let seen = b.visible(i, spec.window);
                row[..seen.start].fill(0.0);
                row[seen.end..].fill(0.0);
                let (max, sum) = softmax(&mut row[seen], spec.softcap.unwrap_or(0.0));
                inverse[i] = 1.0 / sum;
                // SAFETY: this task's own element.
                unsafe { *lse.at((b.query + i) * heads + head) = max + sum.ln() };
            }
            // SAFETY: as above.
            unsafe {
                gemm(
                    (b.queries, e, b.keys),
                    o.at(at_q),
                    (q_width, 1),
                    false,
                    scores.as_ptr(),
                    (b.keys, 1),
                    v[at_k..].as_ptr(),
                    (k_width, 1),
                    1.0,
                );
            }
            for (i, inverse) in inverse[..b.queries].iter().enumerate() {
                // SAFETY: as above.
                let row = unsafe { o.part(at_q + i * q_width, e) };
                row.iter_mut().for_each(|o| *o *= inverse);
            }
        });
    });
}

/// Replaces scores by `e^(score - max)`, capped first if `cap` is not 0; gives max and the sum.
#[inline(always)]
pub(super) fn softmax_body<const FMA: bool>(row: &mut [f32], cap: f32) -> (f32, f32) {
    if cap != 0.0 {
        for x in row.iter_mut() {
            *x = cap * tanh::<FMA>(*x / cap);
        }
    }
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (blocks, rest) = row.as_chunks::<LANES>();
    for block in blocks {
        for i in 0..LANES {
            lanes[i] = if block[i] > lanes[i] { block[i] } else { lanes[i] };
        }
    }
    let max = lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |m, x| m.max(*x));
    let mut lanes = [0f32; LANES];
    let (blocks, rest) = row.as_chunks_mut::<LANES>();
    for block in blocks {
        for i in 0..LANES {
            block[i] = exp::<FMA>(block[i] - max);
            lanes[i] += block[i];
        }
    }
    for (i, x) in rest.iter_mut().enumerate() {
        *x = exp::<FMA>(*x - max);
        lanes[i] += *x;
    }
    (max, sum_lanes(lanes))
}
vectorized!(fn softmax(row: &mut [f32], cap: f32) -> (f32, f32) = softmax_body);
