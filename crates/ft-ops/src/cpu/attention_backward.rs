//! Attention backward on slices: one task per document and key head, or per part of its query heads.

use super::attention::{BLOCKS, Cutter, DocumentRange, HEADS, KEY_CHUNK, KeyChunk, QUERIES, QueryBlock, keys_of};
use super::math::{add_slice, dot, exp, fma, tanh, vectorized};
use super::product::task_gemm::{OperandSide, OutputTile, PackedOperand, TaskGemm, cache_friendly_stride};
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
            job.run(document.run(first, BLOCKS, spec.window, job.gemm.k_unit()), part);
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

/// A query head of a block, packed.
struct QueryHead<'a> {
    head: usize,
    /// q and dout, for the scores and the gradients of the probabilities.
    rows: [PackedOperand<'a>; 2],
    /// q and dout, for dk and dv.
    columns: [PackedOperand<'a>; 2],
    /// Sum of probability times gradient of each query.
    delta: [f32; QUERIES],
}

/// p, ds, and one of them packed, of a chunk of the keys.
type ScoreBuffers<'a> = [&'a mut [f32]; 3];

impl<'a> BackwardJob<'a> {
    /// Runs a few blocks, for the query heads of one part of a key head.
    fn run(&self, blocks: impl Iterator<Item = QueryBlock> + Clone, part: usize) {
        let BackwardJob { gemm, saved, spec, out } = *self;
        let e = spec.head_dim;
        let k_width = spec.kv_heads * e;
        let (low, keys) = keys_of(blocks.clone());
        let heads = spec.heads / spec.kv_heads / out.parts;
        with_scratch(scratch(gemm, e, keys, heads), |scratch| {
            let mut scratch = Cutter(scratch);
            let [scores, dq, values] = key_lens(gemm, e, keys).map(|len| scratch.take(len));
            let mut buffers = chunk_lens(gemm, keys).map(|len| scratch.take(len));
            let at = low * k_width + part / out.parts * e;
            let k_inner = |values| Matrix::k_inner(values, k_width);
            let keys = PackedKeys {
                low,
                scores: gemm.pack_operand(OperandSide::B, k_inner(&saved.k[at..]), (keys, e), scores),
                dq: gemm.pack_operand(OperandSide::B, Matrix::k_outer(&saved.k[at..], k_width), (e, keys), dq),
                values: gemm.pack_operand(OperandSide::B, k_inner(&saved.v[at..]), (keys, e), values),
            };
            let end = (part + 1) * heads;
            for b in blocks {
                for first in (part * heads..end).step_by(HEADS) {
                    let mut to = Cutter(&mut *scratch.0);
                    let packed: Vec<_> = (first..end.min(first + HEADS))
                        .map(|head| self.pack_head(&b, head, &mut to))
                        .collect();
                    for chunk in b.key_chunks() {
                        for head in &packed {
                            self.add_chunk((&b, chunk), (head, part), &keys, &mut buffers);
                        }
                    }
                }
            }
        });
    }

    /// Returns the index of the first element of query `i` in q, o and their gradients.
    fn at(&self, b: &QueryBlock, head: usize, i: usize) -> usize {
        ((b.query + i) * self.spec.heads + head) * self.spec.head_dim
    }

    fn pack_head<'b>(&self, b: &QueryBlock, head: usize, to: &mut Cutter<'b>) -> QueryHead<'b>
    where
        'a: 'b,
    {
        let BackwardJob { gemm, saved, spec, .. } = *self;
        let (e, at, width) = (spec.head_dim, self.at(b, head, 0), spec.heads * spec.head_dim);
        let from = [&saved.q[at..], &saved.dout[at..]];
        let rows = from.map(|from| {
            let to = to.take(gemm.packed_len(OperandSide::A, b.queries, e));
            gemm.pack_operand(OperandSide::A, Matrix::k_inner(from, width), (b.queries, e), to)
        });
        let columns = from.map(|from| {
            let to = to.take(gemm.packed_len(OperandSide::B, e, b.queries));
            gemm.pack_operand(OperandSide::B, Matrix::k_outer(from, width), (e, b.queries), to)
        });
        let mut delta = [0f32; QUERIES];
        for (i, delta) in delta.iter_mut().enumerate().take(b.queries) {
            let at = self.at(b, head, i);
            *delta = dot_rows(&saved.dout[at..][..e], &saved.o[at..][..e]);
        }
        QueryHead {
            head,
            rows,
            columns,
            delta,
        }
    }

    /// Adds the gradients of a block and a chunk of its keys. `head`: a packed query head, and the part of dk and dv to which it adds.
    fn add_chunk(
        &self,
        (b, chunk): (&QueryBlock, KeyChunk),
        (head, part): (&QueryHead, usize),
        keys: &PackedKeys<'_>,
        [p, ds, packed]: &mut ScoreBuffers<'_>,
    ) {
        let BackwardJob { gemm, saved, spec, out } = *self;
        let (heads, e) = (spec.heads, spec.head_dim);
        let (first, stride) = (b.key + chunk.first - keys.low, cache_friendly_stride(chunk.keys));
        let score = |scores: &mut [f32], rows: &PackedOperand, keys: PackedOperand| {
            let to = OutputTile {
                c: SharedSlice::new(scores),
                at: 0,
                stride,
                add: false,
            };
            // SAFETY: the scores belong to this task alone.
            unsafe { gemm.multiply((b.queries, chunk.keys, e), to, rows, &keys) }
        };
        score(p, &head.rows[0], keys.scores.part(first, 0));
        score(ds, &head.rows[1], keys.values.part(first, 0));
        let pairs = p.chunks_exact_mut(stride).zip(ds.chunks_exact_mut(stride));
        for (i, (p, ds)) in pairs.enumerate().take(b.queries) {
            let seen = b.visible(i, spec.window, chunk);
            for row in [&mut *p, &mut *ds] {
                row[..seen.start].fill(0.0);
                row[seen.end..chunk.keys].fill(0.0);
            }
            let lse = saved.lse[(b.query + i) * heads + head.head];
            let cap = spec.softcap.unwrap_or(0.0);
            softmax_backward(&mut p[seen.clone()], &mut ds[seen], lse, head.delta[i], spec.scale, cap);
        }
        let a = gemm.pack_operand(
            OperandSide::ScratchA,
            Matrix::k_inner(&**ds, stride),
            (b.queries, chunk.keys),
            packed,
        );
        let to = OutputTile {
            c: out.dq,
            at: self.at(b, head.head, 0),
            stride: heads * e,
            add: chunk.first > 0,
        };
        // SAFETY: these rows of this head belong to this task alone.
        unsafe { gemm.multiply((b.queries, e, chunk.keys), to, &a, &keys.dq.part(0, first)) };
        let width = spec.kv_heads * e * out.parts;
        // Computes `dst [keys, E] += scores [queries, keys]ᵀ · rows of a head`.
        let mut add = |dst: SharedSlice, scores: &[f32], columns: &PackedOperand| {
            let a = gemm.pack_operand(
                OperandSide::ScratchA,
                Matrix::k_outer(scores, stride),
                (chunk.keys, b.queries),
                packed,
            );
            let to = OutputTile {
                c: dst,
                at: (b.key + chunk.first) * width + part * e,
                stride: width,
                add: true,
            };
            // SAFETY: the columns of this part belong to this task alone.
            unsafe { gemm.multiply((chunk.keys, e, b.queries), to, &a, columns) };
        };
        add(out.dk, ds, &head.columns[0]);
        add(out.dv, p, &head.columns[1]);
    }
}

/// Returns the scratch elements of a task with `heads` query heads, whose blocks attend to `keys` keys.
pub(crate) fn scratch(gemm: TaskGemm, e: usize, keys: usize, heads: usize) -> usize {
    let [rows, columns] = [(OperandSide::A, QUERIES, e), (OperandSide::B, e, QUERIES)]
        .map(|(side, vectors, k)| gemm.packed_len(side, vectors, k));
    let [keys, chunk] = [key_lens(gemm, e, keys), chunk_lens(gemm, keys)].map(|lens| lens.iter().sum::<usize>());
    keys + chunk + 2 * heads.min(HEADS) * (rows + columns)
}

/// Returns the elements of the packed keys and values, in the order of `PackedKeys`.
fn key_lens(gemm: TaskGemm, e: usize, keys: usize) -> [usize; 3] {
    [(keys, e), (e, keys), (keys, e)].map(|(vectors, k)| gemm.packed_len(OperandSide::B, vectors, k))
}

/// Returns the elements of `ScoreBuffers`, for chunks of up to `keys` keys.
fn chunk_lens(gemm: TaskGemm, keys: usize) -> [usize; 3] {
    let keys = keys.min(KEY_CHUNK);
    let scores = QUERIES * cache_friendly_stride(keys);
    let packed = [(QUERIES, keys), (keys, QUERIES)].map(|(m, k)| gemm.packed_len(OperandSide::ScratchA, m, k));
    [scores, scores, packed[0].max(packed[1])]
}

/// Sums the parts of each key head, in order: `[N, K, parts, E]` to `[N, K, E]`.
fn join(partial: &[f32], parts: usize, e: usize) -> Vec<f32> {
    const TOGETHER: usize = 64;
    let mut sum = vec![0f32; partial.len() / parts];
    sum.par_chunks_mut(TOGETHER * e)
        .zip(partial.par_chunks(TOGETHER * parts * e))
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
