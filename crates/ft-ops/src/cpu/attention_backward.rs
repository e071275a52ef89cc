//! Attention backward on slices: one task per document and key head, or per part of its query heads.

use super::attention::{BLOCKS, Cutter, DocumentRange, QUERIES, QueryBlock, keys_of};
use super::math::{add_slice, dot, exp, fma, tanh, vectorized};
use super::product::task_gemm::{OperandSide, OutputTile, PACK_UNIT, PackedOperand, TaskGemm, cache_friendly_stride};
use super::product::{CpuBackend, Matrix};
use super::{SharedSlice, with_scratch};
use crate::attention::{AttentionGradInputs, AttentionSpec};
use rayon::prelude::*;

/// With fewer tasks than this the query heads of a key head are split into parts, each with its own dk and dv.
const ENOUGH_TASKS: usize = 8;

/// Number of parts into which the query heads of a key head are split. Depends on shapes alone: sums keep their order
/// on any number of threads.
pub(crate) fn parts(heads: usize, kv_heads: usize, documents: usize) -> usize {
    let group = heads / kv_heads.max(1);
    (1..=group)
        .find(|p| group.is_multiple_of(*p) && documents * kv_heads * p >= ENOUGH_TASKS)
        .unwrap_or(group)
}

/// Computes dq, dk, dv. The queries of a document are aligned with its last keys.
pub(crate) fn backward(
    backend: CpuBackend,
    saved: &AttentionGradInputs<&[f32]>,
    spec: &AttentionSpec,
    q_documents: &[usize],
    k_documents: &[usize],
) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let filled = q_documents.windows(2).filter(|d| d[1] > d[0]).count();
    let parts = parts(spec.heads, spec.kv_heads, filled);
    let mut dq = vec![0f32; saved.q.len()];
    let mut dk = vec![0f32; saved.k.len() * parts];
    let mut dv = vec![0f32; saved.k.len() * parts];
    let mut tasks = Vec::new();
    let documents = q_documents.windows(2).zip(k_documents.windows(2));
    for (q, k) in documents.filter(|(q, _)| q[1] > q[0]) {
        let document = DocumentRange {
            query: q[0],
            queries: q[1] - q[0],
            key: k[0],
            keys: k[1] - k[0],
        };
        tasks.extend((0..spec.kv_heads * parts).map(|part| (document, part)));
    }
    let out = GradientSlices {
        dq: SharedSlice::new(&mut dq),
        dk: SharedSlice::new(&mut dk),
        dv: SharedSlice::new(&mut dv),
        parts,
    };
    let job = BackwardJob {
        gemm: TaskGemm::new(backend, spec.rounding()),
        saved,
        spec,
        out,
    };
    tasks.into_par_iter().with_max_len(1).for_each(|(document, part)| {
        for first in (0..document.blocks()).step_by(BLOCKS) {
            job.run(document.run(first, BLOCKS, spec.window, PACK_UNIT), part);
        }
    });
    if parts > 1 {
        dk = join(&dk, parts, spec.head_dim);
        dv = join(&dv, parts, spec.head_dim);
    }
    (dq, dk, dv)
}

/// The gradients.
#[derive(Clone, Copy)]
struct GradientSlices {
    dq: SharedSlice,
    /// `[N, K·parts·E]`
    dk: SharedSlice,
    dv: SharedSlice,
    parts: usize,
}

/// The packed keys and values of a run of blocks.
struct PackedKeys<'a> {
    /// First key, counted over all documents.
    low: usize,
    /// K for the scores, K for dq, V for the gradients of the probabilities.
    scores: PackedOperand<'a>,
    dq: PackedOperand<'a>,
    values: PackedOperand<'a>,
}

/// The inputs and outputs that all tasks share.
struct BackwardJob<'a> {
    gemm: TaskGemm,
    saved: &'a AttentionGradInputs<&'a [f32]>,
    spec: &'a AttentionSpec,
    out: GradientSlices,
}

/// The heads of a block: a query head, and the part of a key head to which it belongs.
#[derive(Clone, Copy)]
struct QueryHead {
    head: usize,
    part: usize,
}

impl BackwardJob<'_> {
    /// Runs a few blocks, for the query heads of one part of a key head.
    fn run(&self, blocks: impl Iterator<Item = QueryBlock> + Clone, part: usize) {
        let BackwardJob { gemm, saved, spec, out } = *self;
        let e = spec.head_dim;
        let k_width = spec.kv_heads * e;
        let (low, keys) = keys_of(blocks.clone());
        let longest = blocks.clone().map(|b| b.keys).max().unwrap_or(0);
        let lens = key_lens(gemm, e, keys);
        with_scratch(scratch(gemm, e, keys, longest), |scratch| {
            let mut scratch = Cutter(scratch);
            let at = low * k_width + part / out.parts * e;
            let [scores, dq, values] = lens.map(|len| scratch.take(len));
            let k_inner = |values| Matrix::k_inner(values, k_width);
            let keys = PackedKeys {
                low,
                scores: gemm.pack_operand(OperandSide::B, k_inner(&saved.k[at..]), (keys, e), scores),
                dq: gemm.pack_operand(OperandSide::B, Matrix::k_outer(&saved.k[at..], k_width), (e, keys), dq),
                values: gemm.pack_operand(OperandSide::B, k_inner(&saved.v[at..]), (keys, e), values),
            };
            let heads = spec.heads / spec.kv_heads / out.parts;
            for head in part * heads..(part + 1) * heads {
                for b in blocks.clone() {
                    self.block(b, QueryHead { head, part }, &keys, &mut *scratch.0);
                }
            }
        });
    }

    fn block(&self, b: QueryBlock, QueryHead { head, part }: QueryHead, keys: &PackedKeys<'_>, scratch: &mut [f32]) {
        let BackwardJob { gemm, saved, spec, out } = *self;
        let (heads, e) = (spec.heads, spec.head_dim);
        let q_width = heads * e;
        let part_width = spec.kv_heads * e * out.parts;
        let at_q = b.query * q_width + head * e;
        let at_part = b.key * part_width + part * e;
        let (first, stride) = (b.key - keys.low, cache_friendly_stride(b.keys));
        let mut scratch = Cutter(scratch);
        let [rows, columns, p, ds, packed] = block_lens(gemm, e, b.keys).map(|len| scratch.take(len));
        // Computes `scores [queries, keys]` = rows of a head · packed keys.
        let mut score = |scores: &mut [f32], from: &[f32], keys: PackedOperand| {
            let from = Matrix::k_inner(&from[at_q..], q_width);
            let a = gemm.pack_operand(OperandSide::A, from, (b.queries, e), rows);
            let to = OutputTile {
                c: SharedSlice::new(scores),
                at: 0,
                stride,
                add: false,
            };
            // SAFETY: the scores belong to this task alone.
            unsafe { gemm.multiply((b.queries, b.keys, e), to, &a, &keys) }
        };
        score(p, saved.q, keys.scores.part(first, 0));
        score(ds, saved.dout, keys.values.part(first, 0));
        let pairs = p.chunks_exact_mut(stride).zip(ds.chunks_exact_mut(stride));
        for (i, (p, ds)) in pairs.enumerate().take(b.queries) {
            let seen = b.visible(i, spec.window);
            for row in [&mut *p, &mut *ds] {
                row[..seen.start].fill(0.0);
                row[seen.end..b.keys].fill(0.0);
            }
            let at = at_q + i * q_width;
            let delta = dot_rows(&saved.dout[at..][..e], &saved.o[at..][..e]);
            let lse = saved.lse[(b.query + i) * heads + head];
            let cap = spec.softcap.unwrap_or(0.0);
            softmax_backward(&mut p[seen.clone()], &mut ds[seen], lse, delta, spec.scale, cap);
        }
        let a = gemm.pack_operand(
            OperandSide::ScratchA,
            Matrix::k_inner(&*ds, stride),
            (b.queries, b.keys),
            &mut *packed,
        );
        let to = OutputTile {
            c: out.dq,
            at: at_q,
            stride: q_width,
            add: false,
        };
        // SAFETY: these rows of this head belong to this task alone.
        unsafe { gemm.multiply((b.queries, e, b.keys), to, &a, &keys.dq.part(0, first)) };
        // Computes `dst [keys, E] += scores [queries, keys]ᵀ · rows of a head`.
        let mut add = |dst: SharedSlice, scores: &[f32], from: &[f32]| {
            let from = Matrix::k_outer(&from[at_q..], q_width);
            let rows = gemm.pack_operand(OperandSide::B, from, (e, b.queries), columns);
            let transposed = Matrix::k_outer(scores, stride);
            let a = gemm.pack_operand(OperandSide::ScratchA, transposed, (b.keys, b.queries), &mut *packed);
            let to = OutputTile {
                c: dst,
                at: at_part,
                stride: part_width,
                add: true,
            };
            // SAFETY: the columns of this part belong to this task alone.
            unsafe { gemm.multiply((b.keys, e, b.queries), to, &a, &rows) };
        };
        add(out.dk, ds, saved.q);
        add(out.dv, p, saved.dout);
    }
}

/// Returns the scratch elements of a task: its run of blocks attends to `keys` keys, each block to at most `longest`.
pub(crate) fn scratch(gemm: TaskGemm, e: usize, keys: usize, longest: usize) -> usize {
    key_lens(gemm, e, keys).iter().sum::<usize>() + block_lens(gemm, e, longest).iter().sum::<usize>()
}

/// Returns the elements of the packed keys and values, in the order of `PackedKeys`.
fn key_lens(gemm: TaskGemm, e: usize, keys: usize) -> [usize; 3] {
    [(keys, e), (e, keys), (keys, e)].map(|(vectors, k)| gemm.packed_len(OperandSide::B, vectors, k))
}

/// Returns the elements of a block with up to `keys` keys: the rows of q and dout as A and as B, p, ds, and p or ds
/// packed.
fn block_lens(gemm: TaskGemm, e: usize, keys: usize) -> [usize; 5] {
    [
        gemm.packed_len(OperandSide::A, QUERIES, e),
        gemm.packed_len(OperandSide::B, e, QUERIES),
        QUERIES * cache_friendly_stride(keys),
        QUERIES * cache_friendly_stride(keys),
        gemm.packed_len(OperandSide::ScratchA, QUERIES, keys)
            .max(gemm.packed_len(OperandSide::ScratchA, keys, QUERIES)),
    ]
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

/// Turns the scores p (neither scaled nor capped) into probabilities, and the gradients ds of the probabilities
/// into gradients of `q·k`. `delta` is the sum of probability times gradient over the row.
#[inline(always)]
fn softmax_backward_body<const FMA: bool>(p: &mut [f32], ds: &mut [f32], lse: f32, delta: f32, scale: f32, cap: f32) {
    if cap == 0.0 {
        for (p, ds) in p.iter_mut().zip(ds) {
            *p = exp::<FMA>(fma::<FMA>(*p, scale, -lse));
            *ds = *p * (*ds - delta) * scale;
        }
    } else {
        for (p, ds) in p.iter_mut().zip(ds) {
            let t = tanh::<FMA>(*p * scale / cap);
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
