//! Attention forward on slices. One task computes a few blocks of queries of a document for the query heads of one
//! key head, so that keys and values are packed once for all of them.
//!
//! The keys of a block are visited in parts, so that the scores stay in the L2 cache. Each query has a running maximum and sum of its
//! softmax; if the maximum grows, what was summed before is scaled (Milakov and Gimelshein, arXiv:1805.02867; Dao et al.,
//! FlashAttention, arXiv:2205.14135, algorithm 1).

use super::math::{LANES, exp, fma, max_lanes, sum_lanes, tanh, vectorized};
use super::product::task_gemm::{KC, OperandSide, OutputTile, PackedOperand, TaskGemm, cache_friendly_stride};
use super::product::{CpuBackend, Matrix};
use super::{LINE, SharedSlice, with_scratch};
use crate::attention::AttentionSpec;
use rayon::prelude::*;
use std::ops::Range;

/// Queries per block.
pub(crate) const QUERIES: usize = 64;
/// Largest number of query blocks that share packed keys.
pub(crate) const BLOCKS: usize = 8;
/// Keys of a chunk.
pub(crate) const KEY_CHUNK: usize = 1024;
const _: () = assert!(KEY_CHUNK.is_multiple_of(KC));
/// Most query heads whose packed queries are kept, so that a chunk of the keys is read from the cache for all of them.
pub(crate) const HEADS: usize = 8;
/// Smallest number of tasks per thread, if the work can be cut into so many.
const TASKS: usize = 4;

/// A block of queries of a document and the range of keys that any of its queries attends to.
#[derive(Clone, Copy)]
pub(crate) struct QueryBlock {
    /// First query and number of queries, counted over all documents.
    pub query: usize,
    pub queries: usize,
    /// First key counted over all documents, and number of keys.
    pub key: usize,
    pub keys: usize,
    /// Position of the first key in the document.
    low: usize,
    /// Position of the first query among the keys of the block.
    pub place: usize,
}

/// Some of the keys of a block: the first one, and how many.
#[derive(Clone, Copy)]
pub(crate) struct KeyChunk {
    pub first: usize,
    pub keys: usize,
}

impl QueryBlock {
    /// The block from query `first` of the document on. The distance of its first key from the first one of the document
    /// is a multiple of `unit`, which is one of `PACK_UNIT`.
    fn new(document: &DocumentRange, first: usize, window: Option<usize>, unit: usize) -> Self {
        let queries = QUERIES.min(document.queries - first);
        // The last query and the last key of a document have the same position.
        let place = document.keys - document.queries + first;
        let low = window.map_or(0, |w| (place + 1).saturating_sub(w)) / unit * unit;
        Self {
            query: document.query + first,
            queries,
            key: document.key + low,
            keys: place + queries - low,
            low,
            place: place - low,
        }
    }

    /// Returns the chunks of the keys. They begin at multiples of `KEY_CHUNK` of the document, so that the sums of a query do not depend
    /// on its block.
    pub(crate) fn key_chunks(self) -> impl Iterator<Item = KeyChunk> {
        let mut first = 0;
        std::iter::from_fn(move || {
            let end = (self.low + first + 1).next_multiple_of(KEY_CHUNK) - self.low;
            let keys = end.min(self.keys) - first;
            let chunk = KeyChunk { first, keys };
            first += keys;
            (keys > 0).then_some(chunk)
        })
    }

    /// Returns the keys of a chunk that query `i` of the block attends to, as a range inside the chunk.
    pub(crate) fn visible(&self, i: usize, window: Option<usize>, chunk: KeyChunk) -> Range<usize> {
        let end = self.place + i + 1;
        let start = window.map_or(0, |w| end.saturating_sub(w));
        let inside = |key: usize| key.saturating_sub(chunk.first).min(chunk.keys);
        inside(start)..inside(end)
    }
}

/// A document of the batch.
#[derive(Clone, Copy)]
pub(crate) struct DocumentRange {
    /// First query and number of queries, then first key and number of keys, counted over all documents.
    pub query: usize,
    pub queries: usize,
    pub key: usize,
    pub keys: usize,
}

impl DocumentRange {
    pub(crate) fn blocks(&self) -> usize {
        self.queries.div_ceil(QUERIES)
    }

    /// Returns the existing blocks among `first..first + count`.
    pub(crate) fn run(
        self,
        first: usize,
        count: usize,
        window: Option<usize>,
        unit: usize,
    ) -> impl Iterator<Item = QueryBlock> + Clone {
        (first..(first + count).min(self.blocks()))
            .map(move |block| QueryBlock::new(&self, block * QUERIES, window, unit))
    }
}

/// Returns the first key and the number of keys that any block of a run attends to.
pub(crate) fn keys_of(run: impl Iterator<Item = QueryBlock>) -> (usize, usize) {
    let (low, high) = run.fold((usize::MAX, 0), |(low, high), b| {
        (low.min(b.key), high.max(b.key + b.keys))
    });
    (low, high.saturating_sub(low))
}

/// Splits a scratch buffer into parts that begin on cache lines.
pub(crate) struct Cutter<'a>(pub &'a mut [f32]);

impl<'a> Cutter<'a> {
    pub(crate) fn take(&mut self, len: usize) -> &'a mut [f32] {
        let (part, rest) = std::mem::take(&mut self.0).split_at_mut(len.next_multiple_of(LINE));
        self.0 = rest;
        part
    }
}

/// The query heads and the query blocks of one task.
struct AttentionTask {
    document: DocumentRange,
    kv_head: usize,
    heads: Range<usize>,
    first: usize,
    blocks: usize,
}

fn tasks(spec: &AttentionSpec, q_documents: &[usize], k_documents: &[usize]) -> Vec<AttentionTask> {
    let group = spec.heads / spec.kv_heads;
    let documents = || {
        let offsets = q_documents.windows(2).zip(k_documents.windows(2));
        offsets.map(|(q, k)| DocumentRange {
            query: q[0],
            queries: q[1] - q[0],
            key: k[0],
            keys: k[1] - k[0],
        })
    };
    // Fewer tasks repeat less packing. No sum crosses tasks: their number may depend on the number of threads.
    let count = |blocks: usize, parts: usize| {
        let runs: usize = documents().map(|d| d.blocks().div_ceil(blocks)).sum();
        runs * spec.kv_heads * parts
    };
    let enough = TASKS * rayon::current_num_threads();
    let cuts = (0..=BLOCKS.ilog2()).map(|halved| (BLOCKS >> halved, 1));
    let parts = (2..=group).filter(|p| group.is_multiple_of(*p)).map(|p| (1, p));
    let (blocks, parts) = cuts
        .chain(parts)
        .find(|(blocks, parts)| count(*blocks, *parts) >= enough)
        .unwrap_or((1, group));
    let heads = group / parts;
    let mut tasks = Vec::new();
    for document in documents() {
        for first in (0..document.blocks()).step_by(blocks) {
            tasks.extend((0..spec.kv_heads * parts).map(|part| AttentionTask {
                document,
                kv_head: part / parts,
                heads: part * heads..(part + 1) * heads,
                first,
                blocks,
            }));
        }
    }
    tasks
}

/// The inputs of a forward pass, and its backend.
#[derive(Clone, Copy)]
pub(crate) struct ForwardJob<'a> {
    pub backend: CpuBackend,
    pub spec: &'a AttentionSpec,
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
}

pub(crate) fn forward(
    job: &ForwardJob<'_>,
    q_documents: &[usize],
    k_documents: &[usize],
    o: &mut [f32],
    lse: &mut [f32],
) {
    let (o, lse) = (SharedSlice::new(o), SharedSlice::new(lse));
    let tasks = tasks(job.spec, q_documents, k_documents);
    tasks
        .into_par_iter()
        .with_max_len(1)
        .for_each(|task| run(job, &task, o, lse));
}

/// Returns the scratch elements of a task with `heads` query heads, whose blocks attend to `keys` keys.
pub(crate) fn scratch(gemm: TaskGemm, e: usize, keys: usize, heads: usize) -> usize {
    lens(gemm, e, keys, heads).iter().sum()
}

/// Returns the elements of the packed keys and values, the packed queries of up to `HEADS` heads, the scores of a chunk, and these packed.
fn lens(gemm: TaskGemm, e: usize, keys: usize, heads: usize) -> [usize; 5] {
    let chunk = keys.min(KEY_CHUNK);
    [
        gemm.packed_len(OperandSide::B, keys, e),
        gemm.packed_len(OperandSide::B, e, keys),
        heads.min(HEADS) * gemm.packed_len(OperandSide::A, QUERIES, e),
        QUERIES * cache_friendly_stride(chunk),
        gemm.packed_len(OperandSide::ScratchA, QUERIES, chunk),
    ]
}

/// A block of queries of one task.
struct BlockTask<'a> {
    spec: &'a AttentionSpec,
    gemm: TaskGemm,
    block: QueryBlock,
    o: SharedSlice,
}

/// A query head of a block.
struct QueryHead<'a> {
    head: usize,
    q: PackedOperand<'a>,
    softmax: [RunningSoftmax; QUERIES],
}

/// The softmax of a query over the keys so far.
#[derive(Clone, Copy)]
struct RunningSoftmax {
    max: f32,
    sum: f32,
}

/// The packed keys and values of a chunk.
#[derive(Clone, Copy)]
struct PackedChunk<'a> {
    chunk: KeyChunk,
    k: PackedOperand<'a>,
    v: PackedOperand<'a>,
}

fn run(job: &ForwardJob<'_>, task: &AttentionTask, o: SharedSlice, lse: SharedSlice) {
    let ForwardJob { backend, spec, q, k, v } = *job;
    let e = spec.head_dim;
    let (q_width, k_width) = (spec.heads * e, spec.kv_heads * e);
    let gemm = TaskGemm::new(backend, spec.rounding());
    let blocks = task.document.run(task.first, task.blocks, spec.window, gemm.k_unit());
    let (low, keys) = keys_of(blocks.clone());
    let lens = lens(gemm, e, keys, task.heads.len());
    with_scratch(lens.iter().sum(), |scratch| {
        let mut scratch = Cutter(scratch);
        let [packed_k, packed_v, packed_q, scores, packed] = lens.map(|len| scratch.take(len));
        let at = low * k_width + task.kv_head * e;
        let k = gemm.pack_operand(OperandSide::B, Matrix::k_inner(&k[at..], k_width), (keys, e), packed_k);
        let v = gemm.pack_operand(OperandSide::B, Matrix::k_outer(&v[at..], k_width), (e, keys), packed_v);
        for block in blocks {
            let block_task = BlockTask { spec, gemm, block, o };
            for first in task.heads.clone().step_by(HEADS) {
                let mut to = Cutter(&mut *packed_q);
                let mut heads: Vec<QueryHead> = (first..task.heads.end.min(first + HEADS))
                    .map(|head| {
                        let rows = Matrix::k_inner(&q[block_task.at(head, 0)..], q_width);
                        let to = to.take(gemm.packed_len(OperandSide::A, block.queries, e));
                        let start = RunningSoftmax {
                            max: f32::NEG_INFINITY,
                            sum: 0.0,
                        };
                        QueryHead {
                            head,
                            q: gemm.pack_operand(OperandSide::A, rows, (block.queries, e), to),
                            softmax: [start; QUERIES],
                        }
                    })
                    .collect();
                for chunk in block.key_chunks() {
                    let at = block.key - low + chunk.first;
                    let (k, v) = (k.part(at, 0), v.part(0, at));
                    let keys = PackedChunk { chunk, k, v };
                    for head in &mut heads {
                        block_task.add_chunk(head, &keys, &mut *scores, &mut *packed);
                    }
                }
                heads.iter().for_each(|head| block_task.finish(head, lse));
            }
        }
    });
}

impl BlockTask<'_> {
    /// Returns the index of the first element of query `i` in q and o.
    fn at(&self, head: usize, i: usize) -> usize {
        ((self.block.query + i) * self.spec.heads + head) * self.spec.head_dim
    }

    /// Multiplies the values of query `i` in o.
    fn scale(&self, head: usize, i: usize, factor: f32) {
        // SAFETY: these elements belong to this task alone.
        let row = unsafe { self.o.part(self.at(head, i), self.spec.head_dim) };
        row.iter_mut().for_each(|o| *o *= factor);
    }

    /// Adds the values of a chunk to o. Then o is the sum of `e^(score - max) · v` over the keys so far; `finish` divides it by `sum`.
    fn add_chunk(&self, head: &mut QueryHead, keys: &PackedChunk, scores: &mut [f32], packed: &mut [f32]) {
        let BlockTask { spec, gemm, block, o } = *self;
        let (chunk, e) = (keys.chunk, spec.head_dim);
        let stride = cache_friendly_stride(chunk.keys);
        let to = OutputTile {
            c: SharedSlice::new(scores),
            at: 0,
            stride,
            add: false,
        };
        // SAFETY: the scores belong to this task alone.
        unsafe { gemm.multiply((block.queries, chunk.keys, e), to, &head.q, &keys.k) };
        for (i, row) in scores.chunks_exact_mut(stride).enumerate().take(block.queries) {
            let seen = block.visible(i, spec.window, chunk);
            row[..seen.start].fill(0.0);
            row[seen.end..chunk.keys].fill(0.0);
            if seen.is_empty() {
                continue;
            }
            let before = head.softmax[i];
            let (max, sum) = softmax(&mut row[seen], spec.scale, spec.softcap.unwrap_or(0.0), before.max);
            head.softmax[i] = RunningSoftmax { max, sum };
            // o has the values of earlier parts.
            if before.sum != 0.0 {
                let factor = (before.max - max).exp();
                head.softmax[i].sum += before.sum * factor;
                if factor != 1.0 {
                    self.scale(head.head, i, factor);
                }
            }
        }
        let p = Matrix::k_inner(&*scores, stride);
        let p = gemm.pack_operand(OperandSide::ScratchA, p, (block.queries, chunk.keys), packed);
        let to = OutputTile {
            c: o,
            at: self.at(head.head, 0),
            stride: spec.heads * e,
            add: chunk.first > 0,
        };
        // SAFETY: these rows of this head belong to this task alone.
        unsafe { gemm.multiply((block.queries, e, chunk.keys), to, &p, &keys.v) };
    }

    /// Divides o by the sums of the softmax.
    fn finish(&self, head: &QueryHead, lse: SharedSlice) {
        for (i, softmax) in head.softmax[..self.block.queries].iter().enumerate() {
            self.scale(head.head, i, 1.0 / softmax.sum);
            // SAFETY: this element belongs to this task alone.
            unsafe { *lse.at((self.block.query + i) * self.spec.heads + head.head) = softmax.max + softmax.sum.ln() };
        }
    }
}

/// Scales scores (and caps them if `cap` is not 0), replaces them by `e^(score - max)`, and returns max, which is at least `least`,
/// and the sum.
#[inline(always)]
pub(super) fn softmax_body<const FMA: bool>(row: &mut [f32], scale: f32, cap: f32, least: f32) -> (f32, f32) {
    if cap != 0.0 {
        for x in row.iter_mut() {
            *x = cap * tanh::<FMA>(*x * scale / cap);
        }
    }
    let scale = if cap != 0.0 { 1.0 } else { scale };
    let mut lanes = [least; LANES];
    let (blocks, rest) = row.as_chunks::<LANES>();
    for block in blocks {
        for i in 0..LANES {
            let x = block[i] * scale;
            lanes[i] = if x > lanes[i] { x } else { lanes[i] };
        }
    }
    let rest = rest.iter().map(|x| x * scale);
    let max = rest.fold(max_lanes(&lanes), f32::max);
    // Of scores that are all -inf the exponentials are 0.
    let shift = if max == f32::NEG_INFINITY { 0.0 } else { max };
    let mut lanes = [0f32; LANES];
    let (blocks, rest) = row.as_chunks_mut::<LANES>();
    for block in blocks {
        for i in 0..LANES {
            block[i] = exp::<FMA>(fma::<FMA>(block[i], scale, -shift));
            lanes[i] += block[i];
        }
    }
    for (i, x) in rest.iter_mut().enumerate() {
        *x = exp::<FMA>(fma::<FMA>(*x, scale, -shift));
        lanes[i] += *x;
    }
    (max, sum_lanes(&lanes))
}
vectorized!(fn softmax(row: &mut [f32], scale: f32, cap: f32, least: f32) -> (f32, f32) = softmax_body);
