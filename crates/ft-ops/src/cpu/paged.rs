//! Paged attention. A task is a document, a key head and a few queries. All its query heads use each page while the
//! page is in the L1 cache; values that are not f32 are widened there once.

use super::attention::softmax_body;
use super::math::{LANES, fma, nearest_bf16, vectorized, widen};
use super::{SharedSlice, with_scratch};
use crate::attention::AttentionSpec;
use crate::paged::{PAGE, Page, PageData, PagedDocument};
use rayon::prelude::*;

/// Approximate number of score rows (queries times heads) of a task.
const ROWS: usize = 32;
/// Score rows that share one load of keys or values.
const TOGETHER: usize = 4;

/// A key head and some queries of a document.
struct PagedTask<'a> {
    pages: &'a [&'a Page],
    head: usize,
    /// First query, counted over all documents, and number of queries.
    query: usize,
    queries: usize,
    /// Position of the first query among the tokens of its document.
    place: usize,
}

/// Shapes: q and o `[N, H·E]`, lse `[N, H]`.
pub(crate) fn attend(q: &[f32], documents: &[PagedDocument], spec: &AttentionSpec, o: &mut [f32], lse: &mut [f32]) {
    let step = (ROWS * spec.kv_heads / spec.heads).max(1);
    let mut tasks = Vec::new();
    for d in documents {
        let (all, offset) = (d.queries.len(), d.tokens() - d.queries.len());
        for first in (0..all).step_by(step) {
            tasks.extend((0..spec.kv_heads).map(|head| PagedTask {
                pages: &d.pages,
                head,
                query: d.queries.start + first,
                queries: step.min(all - first),
                place: offset + first,
            }));
        }
    }
    let (o, lse) = (SharedSlice::new(o), SharedSlice::new(lse));
    tasks.into_par_iter().with_max_len(1).for_each(|task| {
        let (rows, e) = (task.queries * (spec.heads / spec.kv_heads), spec.head_dim);
        let padded = e.next_multiple_of(LANES);
        let seen = task.place + task.queries - task.low(spec);
        let sizes = [rows * e, PAGE * padded, rows * padded, rows * seen];
        with_scratch(sizes.iter().sum(), |scratch| {
            run(&task, spec, q, sizes, scratch, o, lse)
        });
    });
}

impl PagedTask<'_> {
    /// Returns the first token that any of the queries attends to.
    fn low(&self, spec: &AttentionSpec) -> usize {
        spec.window.map_or(0, |w| (self.place + 1).saturating_sub(w))
    }
}

#[inline(always)]
fn run_body<const FMA: bool>(
    task: &PagedTask<'_>,
    spec: &AttentionSpec,
    q: &[f32],
    sizes: [usize; 4],
    scratch: &mut [f32],
    o: SharedSlice,
    lse: SharedSlice,
) {
    let (group, e) = (spec.heads / spec.kv_heads, spec.head_dim);
    let rounds = spec.rounds();
    let (rows, padded) = (task.queries * group, e.next_multiple_of(LANES));
    let (queries, rest) = scratch.split_at_mut(sizes[0]);
    let (tile, rest) = rest.split_at_mut(sizes[1]);
    let (sums, scores) = rest.split_at_mut(sizes[2]);
    let (low, high) = (task.low(spec), task.place + task.queries);
    let seen = high - low;
    let row_of = |row: usize| (task.query + row / group) * spec.heads + task.head * group + row % group;
    for (row, to) in queries.chunks_exact_mut(e).enumerate() {
        for (to, x) in to.iter_mut().zip(&q[row_of(row) * e..][..e]) {
            let x = if rounds { nearest_bf16(*x) } else { *x };
            *to = x * spec.scale;
        }
    }
    // Scores of the tokens low..high, `[rows, seen]`.
    for (page, tokens, at) in pages(task, low, high) {
        let keys = head_of(&page.keys, task.head, e, PAGE, true, tile);
        for row in (0..rows).step_by(TOGETHER) {
            let count = TOGETHER.min(rows - row);
            let q = &queries[row * e..][..count * e];
            let mut got = [[0f32; PAGE]; TOGETHER];
            score(q, count, keys, &mut got);
            for (j, got) in got[..count].iter().enumerate() {
                scores[(row + j) * seen + at..][..tokens.len()].copy_from_slice(&got[tokens.clone()]);
            }
        }
    }
    let mut inverse = [0f32; ROWS];
    let mut more = Vec::new();
    let inverse = if rows > ROWS {
        more.resize(rows, 0.0);
        &mut more[..]
    } else {
        &mut inverse[..]
    };
    for (row, scores) in scores.chunks_exact_mut(seen).enumerate().take(rows) {
        let end = task.place + row / group + 1 - low;
        let start = spec.window.map_or(0, |w| end.saturating_sub(w));
        scores[..start].fill(0.0);
        scores[end..].fill(0.0);
        let (max, sum) = softmax_body::<FMA>(
            &mut scores[start..end],
            1.0,
            spec.softcap.unwrap_or(0.0),
            f32::NEG_INFINITY,
        );
        inverse[row] = 1.0 / sum;
        if rounds {
            scores[start..end].iter_mut().for_each(|p| *p = nearest_bf16(*p));
        }
        // SAFETY: this element belongs to this task alone.
        unsafe { *lse.at(row_of(row)) = max + sum.ln() };
    }
    // Weighted sums of values, `[rows, padded]`.
    sums.fill(0.0);
    for (page, tokens, at) in pages(task, low, high) {
        let values = head_of(&page.values, task.head, PAGE, padded, false, tile);
        for row in (0..rows).step_by(TOGETHER) {
            let count = TOGETHER.min(rows - row);
            let sums = &mut sums[row * padded..][..count * padded];
            let weights = &scores[row * seen + at..];
            let values = &values[tokens.start * padded..tokens.end * padded];
            gather(sums, count, weights, seen, values, padded);
        }
    }
    for (row, sums) in sums.chunks_exact(padded).enumerate() {
        // SAFETY: these elements belong to this task alone.
        let o = unsafe { o.part(row_of(row) * e, e) };
        for (o, x) in o.iter_mut().zip(sums) {
            *o = x * inverse[row];
        }
    }
}
vectorized!(
    fn run(
        task: &PagedTask<'_>,
        spec: &AttentionSpec,
        q: &[f32],
        sizes: [usize; 4],
        scratch: &mut [f32],
        o: SharedSlice,
        lse: SharedSlice,
    ) = run_body
);

/// Returns the pages that hold some of the tokens `low..high`: page, range of these tokens in the page, and
/// position of the first of them relative to `low`. (An iterator, not a function with a closure: closures are
/// compiled without the wide instructions.)
fn pages<'a>(
    task: &PagedTask<'a>,
    low: usize,
    high: usize,
) -> impl Iterator<Item = (&'a Page, std::ops::Range<usize>, usize)> {
    let mut end = 0;
    task.pages.iter().filter_map(move |page| {
        let start = end;
        end += page.len();
        let (first, last) = (low.max(start), high.min(end));
        (first < last).then(|| (*page, first - start..last - start, first - low))
    })
}

/// Returns the matrix `[rows, columns]` of a head in f32, in place or widened into `tile`. `scale_of_column`: true
/// if a token is a column, false if it is a row.
#[inline(always)]
fn head_of<'a>(
    numbers: &'a PageData,
    head: usize,
    rows: usize,
    columns: usize,
    scale_of_column: bool,
    tile: &'a mut [f32],
) -> &'a [f32] {
    let n = rows * columns;
    let part = head * n..(head + 1) * n;
    match numbers {
        PageData::F32(v) => &v[part],
        PageData::Bf16(v) => {
            for (to, from) in tile.iter_mut().zip(&v[part]) {
                *to = widen(*from);
            }
            &tile[..n]
        }
        PageData::Int8 { codes, scales } => {
            let scales = &scales[head * PAGE..][..PAGE];
            let lines = codes[part].chunks_exact(columns).zip(tile.chunks_exact_mut(columns));
            for (row, (from, to)) in lines.enumerate() {
                if scale_of_column {
                    for ((to, from), scale) in to.iter_mut().zip(from).zip(scales) {
                        *to = *from as f32 * scale;
                    }
                } else {
                    for (to, from) in to.iter_mut().zip(from) {
                        *to = *from as f32 * scales[row];
                    }
                }
            }
            &tile[..n]
        }
    }
}

/// Computes the products of up to `TOGETHER` queries `[count, E]` with the keys `[E, PAGE]` of a page. A function of its own: inside
/// of `run` the compiler does not use vectors for it.
#[inline(always)]
fn score_body<const FMA: bool>(q: &[f32], count: usize, keys: &[f32], to: &mut [[f32; PAGE]; TOGETHER]) {
    match count {
        1 => score_rows::<FMA, 1>(q, keys, to),
        2 => score_rows::<FMA, 2>(q, keys, to),
        3 => score_rows::<FMA, 3>(q, keys, to),
        _ => score_rows::<FMA, TOGETHER>(q, keys, to),
    }
}
vectorized!(fn score(q: &[f32], count: usize, keys: &[f32], to: &mut [[f32; PAGE]; TOGETHER]) = score_body);

#[inline(always)]
fn score_rows<const FMA: bool, const R: usize>(q: &[f32], keys: &[f32], to: &mut [[f32; PAGE]; TOGETHER]) {
    let e = q.len() / R;
    for half in (0..PAGE).step_by(LANES) {
        let mut acc = [[0f32; LANES]; R];
        for (i, keys) in keys.chunks_exact(PAGE).enumerate() {
            let keys: &[f32] = &keys[half..half + LANES];
            for (j, acc) in acc.iter_mut().enumerate() {
                let x = q[j * e + i];
                for l in 0..LANES {
                    acc[l] = fma::<FMA>(x, keys[l], acc[l]);
                }
            }
        }
        for (to, acc) in to.iter_mut().zip(&acc) {
            to[half..half + LANES].copy_from_slice(acc);
        }
    }
}

/// Computes `sums [count, padded] += weights · values [tokens, padded]`; rows of weights are `seen` elements apart.
#[inline(always)]
fn gather_body<const FMA: bool>(
    sums: &mut [f32],
    count: usize,
    weights: &[f32],
    seen: usize,
    values: &[f32],
    padded: usize,
) {
    match count {
        1 => gather_rows::<FMA, 1>(sums, weights, seen, values, padded),
        2 => gather_rows::<FMA, 2>(sums, weights, seen, values, padded),
        3 => gather_rows::<FMA, 3>(sums, weights, seen, values, padded),
        _ => gather_rows::<FMA, TOGETHER>(sums, weights, seen, values, padded),
    }
}
vectorized!(
    fn gather(
        sums: &mut [f32],
        count: usize,
        weights: &[f32],
        seen: usize,
        values: &[f32],
        padded: usize,
    ) = gather_body
);

#[inline(always)]
fn gather_rows<const FMA: bool, const R: usize>(
    sums: &mut [f32],
    weights: &[f32],
    seen: usize,
    values: &[f32],
    padded: usize,
) {
    for column in (0..padded).step_by(LANES) {
        let mut acc = [[0f32; LANES]; R];
        for (j, acc) in acc.iter_mut().enumerate() {
            acc.copy_from_slice(&sums[j * padded + column..][..LANES]);
        }
        for (t, values) in values.chunks_exact(padded).enumerate() {
            let values: &[f32] = &values[column..column + LANES];
            for (j, acc) in acc.iter_mut().enumerate() {
                let w = weights[j * seen + t];
                for l in 0..LANES {
                    acc[l] = fma::<FMA>(w, values[l], acc[l]);
                }
            }
        }
        for (j, acc) in acc.iter().enumerate() {
            sums[j * padded + column..][..LANES].copy_from_slice(acc);
        }
    }
}
