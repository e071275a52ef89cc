//! Attention of prompts on pages with the products of attention on tensors: blocks of queries and of keys. The keys and values
//! of a few documents at a time are copied out of their pages, as f32.
//!
//! An element is a sum over the keys of its document in their order, so a result does not depend on how the prompt is cut
//! into steps or pages, nor on other documents. It is not bit-equal to `attend`, whose sums have another order.

use super::{AttentionSpec, PAGE, Page, PageData, PagedDocument, check_documents, floats, tensor};
use crate::attention::KEY_CHUNK;
use crate::cpu::attention as cpu;
use crate::cpu::product::CpuBackend;
use candle_core::Tensor;
use ft_base::Result;
use rayon::prelude::*;

/// Keys that are copied at a time, if a document does not have more.
const COPIED_KEYS: usize = 2048;

/// Returns the bytes that `attend_in_blocks` takes beside its results for documents of at most `longest` tokens, `keys` in all.
pub fn block_bytes(kv_heads: usize, head_dim: usize, longest: usize, keys: usize) -> u64 {
    8 * (kv_heads * head_dim * keys.min(longest.max(COPIED_KEYS))) as u64
}

/// A document and the part of its tokens that its queries attend to.
struct AttendedTokens<'a, 'b> {
    document: &'a PagedDocument<'b>,
    /// The first of these tokens, where a sum over the keys can begin, and their number.
    first: usize,
    count: usize,
}

impl<'a, 'b> AttendedTokens<'a, 'b> {
    fn new(document: &'a PagedDocument<'b>, spec: &AttentionSpec) -> Self {
        let tokens = document.tokens();
        let place = tokens - document.queries.len();
        let first = spec.window.map_or(0, |w| (place + 1).saturating_sub(w)) / KEY_CHUNK * KEY_CHUNK;
        let first = if document.queries.is_empty() { tokens } else { first };
        Self {
            document,
            first,
            count: tokens - first,
        }
    }

    /// The pages with some of these tokens, and the first of them in the page.
    fn pages(&self) -> impl Iterator<Item = (&'b Page, usize)> {
        let (first, mut end) = (self.first, 0);
        self.document.pages.iter().filter_map(move |page| {
            let start = end;
            end += page.len();
            (end > first).then(|| (*page, first.max(start) - start))
        })
    }
}

/// As `attend` (q and o `[N, H·E]`, lse `[N, H]`), for many queries of each document. Int8 pages are not supported: a
/// product could round their values again.
///
/// # Errors
/// As `attend`.
pub fn attend_in_blocks(q: &Tensor, documents: &[PagedDocument], spec: &AttentionSpec) -> Result<(Tensor, Tensor)> {
    let n = check_documents(q, documents, spec)?;
    let (width, k_width) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
    let mut o = vec![0f32; n * width];
    let mut lse = vec![0f32; n * spec.heads];
    let all: Vec<AttendedTokens> = documents.iter().map(|d| AttendedTokens::new(d, spec)).collect();
    floats(q, "the queries", |q| {
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        let mut rest = &all[..];
        while let Some(first) = rest.first() {
            let mut count = first.count;
            let more = rest[1..].iter().take_while(|seen| {
                count += seen.count;
                count <= COPIED_KEYS
            });
            let (group, others) = rest.split_at(1 + more.count());
            rest = others;
            let k_documents = offsets(group.iter().map(|seen| seen.count));
            let q_documents = offsets(group.iter().map(|seen| seen.document.queries.len()));
            let tokens = k_documents.last().copied().unwrap_or(0);
            keys.resize(tokens * k_width, 0f32);
            values.resize(tokens * k_width, 0f32);
            gather(group, spec, &mut keys, &mut values);
            let rows = first.document.queries.start..group[group.len() - 1].document.queries.end;
            let job = cpu::ForwardJob {
                backend: CpuBackend::current(),
                spec,
                q: &q[rows.start * width..rows.end * width],
                k: &keys,
                v: &values,
            };
            cpu::forward(
                &job,
                &q_documents,
                &k_documents,
                &mut o[rows.start * width..rows.end * width],
                &mut lse[rows.start * spec.heads..rows.end * spec.heads],
            );
        }
        Ok(())
    })?;
    Ok((tensor(o, (n, width))?, tensor(lse, (n, spec.heads))?))
}

fn offsets(lengths: impl Iterator<Item = usize>) -> Vec<usize> {
    let ends = lengths.scan(0, |end, n| {
        *end += n;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// Copies the tokens of `group` to `keys` and `values`, `[tokens, K·E]`.
fn gather(group: &[AttendedTokens], spec: &AttentionSpec, keys: &mut [f32], values: &mut [f32]) {
    let width = spec.kv_heads * spec.head_dim;
    let mut parts = Vec::new();
    let (mut keys, mut values) = (keys, values);
    for (page, from) in group.iter().flat_map(AttendedTokens::pages) {
        let len = (page.len() - from) * width;
        let (k, v);
        (k, keys) = keys.split_at_mut(len);
        (v, values) = values.split_at_mut(len);
        parts.push((page, from, k, v));
    }
    parts.into_par_iter().for_each(|(page, from, k, v)| {
        let padded = page.form.padded();
        for head in 0..spec.kv_heads {
            let at = head * spec.head_dim;
            copy(
                &page.keys,
                k,
                (at, width),
                |t, e| (head * spec.head_dim + e) * PAGE + from + t,
                spec.head_dim,
            );
            copy(
                &page.values,
                v,
                (at, width),
                |t, e| (head * PAGE + from + t) * padded + e,
                spec.head_dim,
            );
        }
    });
}

/// Copies a head of each token from the page: element e of token t is at `index(t, e)`.
fn copy(
    from: &PageData,
    to: &mut [f32],
    (at, width): (usize, usize),
    index: impl Fn(usize, usize) -> usize,
    head_dim: usize,
) {
    for (t, row) in to.chunks_exact_mut(width).enumerate() {
        let row = &mut row[at..at + head_dim];
        match from {
            PageData::F32(v) => row.iter_mut().enumerate().for_each(|(e, x)| *x = v[index(t, e)]),
            PageData::Bf16(v) => row
                .iter_mut()
                .enumerate()
                .for_each(|(e, x)| *x = v[index(t, e)].to_f32()),
            PageData::Int8 { .. } => row.fill(f32::NAN),
        }
    }
}
