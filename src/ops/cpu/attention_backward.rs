//! Attention on slices, backward: one task for a document and a key head, or a part of its query heads.

use super::attention::{Block, QUERIES};
use super::math::{add_slice, dot, exp, tanh, vectorized};
use super::product::gemm;
use super::{Shared, with_scratch};
use crate::ops::attention::Spec;
use rayon::prelude::*;

/// With fewer tasks than this the query heads of a key head are shared out, each part with its own dk and dv.
const ENOUGH_TASKS: usize = 8;

/// What the backward pass reads.
pub(crate) struct Saved<'a> {
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub o: &'a [f32],
    pub lse: &'a [f32],
    pub dout: &'a [f32],
}

/// dq, dk, dv.
pub(crate) fn backward(saved: &Saved<'_>, spec: &Spec, documents: &[usize]) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let group = spec.heads / spec.kv_heads;
    let filled = documents.windows(2).filter(|d| d[1] > d[0]).count();
    // Depends on shapes alone: sums keep their order on any number of threads.
    let parts = (1..=group)
        .find(|p| group.is_multiple_of(*p) && filled * spec.kv_heads * p >= ENOUGH_TASKS)
        .unwrap_or(group);
    let mut dq = vec![0f32; saved.q.len()];
    let mut dk = vec![0f32; saved.k.len() * parts];
    let mut dv = vec![0f32; saved.k.len() * parts];
    let mut tasks = Vec::new();
    for d in documents.windows(2).filter(|d| d[1] > d[0]) {
        tasks.extend((0..spec.kv_heads * parts).map(|part| (d[0], d[1] - d[0], part)));
    }
    let out = Out {
        dq: Shared::new(&mut dq),
        dk: Shared::new(&mut dk),
        dv: Shared::new(&mut dv),
        parts,
    };
    tasks.into_par_iter().with_max_len(1).for_each(|(start, tokens, part)| {
        let heads = group / parts;
        for head in part * heads..(part + 1) * heads {
            for first in (0..tokens).step_by(QUERIES) {
                let queries = (start, first, QUERIES.min(tokens - first));
                let block = Block::new(queries, start, 0, spec.window);
                with_scratch(2 * block.queries * block.keys, |scratch| {
                    block_backward(saved, spec, block, head, part, &out, scratch)
                });
            }
        }
    });
    if parts > 1 {
        dk = join(&dk, parts, spec.head_dim);
        dv = join(&dv, parts, spec.head_dim);
    }
    (dq, dk, dv)
}

#[derive(Clone, Copy)]
struct Out {
    dq: Shared,
    /// `[N, K·parts·E]`
    dk: Shared,
    dv: Shared,
    parts: usize,
}

fn block_backward(saved: &Saved<'_>, spec: &Spec, b: Block, head: usize, part: usize, out: &Out, scratch: &mut [f32]) {
    let (heads, e) = (spec.heads, spec.head_dim);
    let (q_width, k_width) = (heads * e, spec.kv_heads * e);
    let part_width = k_width * out.parts;
    let at_q = b.query * q_width + head * e;
    let at_k = b.key * k_width + head / (heads / spec.kv_heads) * e;
    let at_part = b.key * part_width + part * e;
    let (p, ds) = scratch.split_at_mut(b.queries * b.keys);
    // SAFETY (all products below): rows lie inside their tensors; the scratch, the rows of this head in dq and
    // the columns of this part in dk and dv belong to this task alone.
    let scores = |dst: &mut [f32], a: &[f32], b_: &[f32], alpha: f32| unsafe {
        gemm(
            (b.queries, b.keys, e),
            dst.as_mut_ptr(),
            (b.keys, 1),
            false,
            a[at_q..].as_ptr(),
            (q_width, 1),
            b_[at_k..].as_ptr(),
            (1, k_width),
            alpha,
        )
    };
    scores(p, saved.q, saved.k, spec.scale);
    scores(ds, saved.dout, saved.v, 1.0);
    let rows = p.chunks_exact_mut(b.keys).zip(ds.chunks_exact_mut(b.keys));
    for (i, (p, ds)) in rows.enumerate() {
        let seen = b.visible(i, spec.window);
        for row in [&mut *p, &mut *ds] {
            row[..seen.start].fill(0.0);
            row[seen.end..].fill(0.0);
        }
        let at = at_q + i * q_width;
        let delta = dot_rows(&saved.dout[at..][..e], &saved.o[at..][..e]);
        let lse = saved.lse[(b.query + i) * heads + head];
        let cap = spec.softcap.unwrap_or(0.0);
        softmax_backward(&mut p[seen.clone()], &mut ds[seen], lse, delta, spec.scale, cap);
    }
    // SAFETY: as above.
    unsafe {
        gemm(
            (b.queries, e, b.keys),
            out.dq.at(at_q),
            (q_width, 1),
            false,
            ds.as_ptr(),
            (b.keys, 1),
            saved.k[at_k..].as_ptr(),
            (k_width, 1),
            1.0,
        );
    }
    let keys = |dst: Shared, a: &[f32], b_: &[f32]| unsafe {
        gemm(
            (b.keys, e, b.queries),
            dst.at(at_part),
            (part_width, 1),
            true,
            a.as_ptr(),
            (1, b.keys),
            b_[at_q..].as_ptr(),
            (q_width, 1),
            1.0,
        )
    };
    keys(out.dk, ds, saved.q);
    keys(out.dv, p, saved.dout);
}

/// Sums the parts of each key head, in order: `[N, K, parts, E]` to `[N, K, E]`.
fn join(partial: &[f32], parts: usize, e: usize) -> Vec<f32> {
    const HEADS: usize = 64;
    let mut sum = vec![0f32; partial.len() / parts];
    sum.par_chunks_mut(HEADS * e)
        .zip(partial.par_chunks(HEADS * parts * e))
        .for_each(|(sum, partial)| {
            let heads = sum.chunks_exact_mut(e).zip(partial.chunks_exact(parts * e));
            for (sum, partial) in heads {
                for part in partial.chunks_exact(e) {
                    add_slice(sum, part);
                }
            }
        });
    sum
}

#[inline(always)]
fn dot_body<const FMA: bool>(a: &[f32], b: &[f32]) -> f32 {
    dot::<FMA>(a, b)
}
vectorized!(fn dot_rows(a: &[f32], b: &[f32]) -> f32 = dot_body);

/// p: scores (scaled, not capped) become probabilities. ds: gradients of the probabilities become gradients of
/// `q·k`. `delta` is the sum of probability times gradient over the row.
#[inline(always)]
fn softmax_backward_body<const FMA: bool>(p: &mut [f32], ds: &mut [f32], lse: f32, delta: f32, scale: f32, cap: f32) {
    if cap == 0.0 {
        for (p, ds) in p.iter_mut().zip(ds) {
            *p = exp::<FMA>(*p - lse);
            *ds = *p * (*ds - delta) * scale;
        }
    } else {
        for (p, ds) in p.iter_mut().zip(ds) {
            let t = tanh::<FMA>(*p / cap);
            *p = exp::<FMA>(cap * t - lse);
            *ds = *p * (*ds - delta) * scale * (1.0 - t * t);
        }
    }
}
vectorized!(
    fn softmax_backward(
        p: &mut [f32],
        ds: &mut [f32],
        lse: f32,
        delta: f32,
        scale: f32,
        cap: f32,
    ) = softmax_backward_body
);
