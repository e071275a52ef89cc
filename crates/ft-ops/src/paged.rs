//! Attention of new tokens on a paged KV cache. Keys and values are stored in pages of `PAGE` tokens; a document is
//! a list of pages, and a page can belong to several documents (a shared prompt). Values are stored as f32, as
//! bf16, or as int8 with a scale for each token and head (absmax / 127).
//!
//! q `[N, H·E]`, o `[N, H·E]`, lse `[N, H]`; query head h uses key head h / (H / K). A result depends on its query
//! and on the keys it attends to, in their order. It does not depend on the page boundaries or on the other
//! documents of the call. CPU only. If products round to bf16, queries, keys, values and probabilities are rounded
//! here too, as in attention on tensors (but dequantized int8 values are not): both give a query the same operands.

mod blocks;

pub use blocks::{attend_in_blocks, block_bytes};

use super::attention::AttentionSpec;
use super::cpu::math::nearest_bf16;
use super::cpu::storage::{expect_dims, floats, tensor};
use super::cpu::{math, paged as cpu};
use super::quantized::nearest;
use candle_core::Tensor;
use ft_base::{Error, Result};
use half::bf16;
use std::ops::Range;

/// Tokens per page.
pub const PAGE: usize = 64;
/// The row of a value is padded to a multiple of this number of elements.
pub(crate) const STEP: usize = math::LANES;

/// The storage type of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvDtype {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
    /// Signed bytes with one scale per head and token.
    Int8,
}

/// The storage type and the sizes of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageForm {
    /// The type of the stored numbers.
    pub stored: KvDtype,
    /// K
    pub kv_heads: usize,
    /// E
    pub head_dim: usize,
}

impl PageForm {
    /// Returns the padded length of a value of one head.
    pub(crate) fn padded(&self) -> usize {
        self.head_dim.next_multiple_of(STEP)
    }

    /// Returns the bytes of a page.
    pub fn page_bytes(&self) -> u64 {
        let numbers = self.kv_heads * PAGE * (self.head_dim + self.padded());
        let bytes = match self.stored {
            KvDtype::F32 => 4 * numbers,
            KvDtype::Bf16 => 2 * numbers,
            KvDtype::Int8 => numbers + 4 * 2 * self.kv_heads * PAGE,
        };
        bytes as u64
    }
}

/// Keys and values of up to `PAGE` tokens of one layer.
pub struct Page {
    form: PageForm,
    len: usize,
    /// `[K, E, PAGE]`: so the scores of many tokens are computed in SIMD lanes.
    pub(crate) keys: PageData,
    /// `[K, PAGE, padded E]`
    pub(crate) values: PageData,
}

pub(crate) enum PageData {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    /// Scales are `[K, PAGE]`.
    Int8 {
        codes: Vec<i8>,
        scales: Vec<f32>,
    },
}

impl PageData {
    fn new(form: &PageForm, width: usize) -> Self {
        let n = form.kv_heads * PAGE * width;
        match form.stored {
            KvDtype::F32 => Self::F32(vec![0.0; n]),
            KvDtype::Bf16 => Self::Bf16(vec![bf16::ZERO; n]),
            KvDtype::Int8 => Self::Int8 {
                codes: vec![0; n],
                scales: vec![0.0; form.kv_heads * PAGE],
            },
        }
    }

    /// Stores `x` from `start` on, `stride` elements apart; `scale` is the index of its scale. `rounds`: f32 is
    /// stored as the nearest bf16.
    fn put(&mut self, x: &[f32], start: usize, stride: usize, scale: usize, rounds: bool) {
        match self {
            Self::F32(to) if rounds => (0..x.len()).for_each(|i| to[start + i * stride] = nearest_bf16(x[i])),
            Self::F32(to) => (0..x.len()).for_each(|i| to[start + i * stride] = x[i]),
            Self::Bf16(to) => (0..x.len()).for_each(|i| to[start + i * stride] = bf16::from_f32(x[i])),
            Self::Int8 { codes, scales } => {
                let absmax = x.iter().fold(0f32, |m, x| m.max(x.abs()));
                // A non-finite input must not become a finite number.
                let finite = x.iter().all(|x| x.is_finite());
                let by = if absmax > 0.0 { 127.0 / absmax } else { 0.0 };
                scales[scale] = if finite { absmax / 127.0 } else { f32::NAN };
                (0..x.len()).for_each(|i| codes[start + i * stride] = nearest(x[i] * by) as i8);
            }
        }
    }
}

impl Page {
    /// An empty page.
    pub fn new(form: PageForm) -> Self {
        Self {
            form,
            len: 0,
            keys: PageData::new(&form, form.head_dim),
            values: PageData::new(&form, form.padded()),
        }
    }

    /// Returns the number of tokens in the page.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a page without tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True if no token fits any more.
    pub fn is_full(&self) -> bool {
        self.len == PAGE
    }

    /// Removes all tokens from index `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Appends a token with key `k` and value `v`, `[K·E]`, of a model with the attention `spec`: they are rounded
    /// if products round. Panics if the page is full or the sizes differ.
    pub fn push(&mut self, k: &[f32], v: &[f32], spec: &AttentionSpec) {
        let rounds = spec.rounds();
        let (t, e) = (self.len, self.form.head_dim);
        assert!(t < PAGE && k.len() == self.form.kv_heads * e && v.len() == k.len());
        for head in 0..self.form.kv_heads {
            let part = head * e..(head + 1) * e;
            let scale = head * PAGE + t;
            self.keys
                .put(&k[part.clone()], head * e * PAGE + t, PAGE, scale, rounds);
            self.values
                .put(&v[part], (head * PAGE + t) * self.form.padded(), 1, scale, rounds);
        }
        self.len += 1;
    }
}

/// New tokens of a document, and all pages of the document including the new tokens: the last query attends to the
/// last token.
pub struct PagedDocument<'a> {
    /// The rows of the new tokens in the batch.
    pub queries: Range<usize>,
    /// The pages of the document, in order.
    pub pages: Vec<&'a Page>,
}

impl PagedDocument<'_> {
    /// Returns the number of tokens in the pages.
    pub fn tokens(&self) -> usize {
        self.pages.iter().map(|p| p.len).sum()
    }
}

/// Computes causal attention of the queries `[N, H·E]` of each document on its pages: o `[N, H·E]` and lse `[N, H]`.
///
/// # Errors
/// Shapes that do not fit, query ranges that are not consecutive, more queries than tokens.
pub fn attend(q: &Tensor, documents: &[PagedDocument], spec: &AttentionSpec) -> Result<(Tensor, Tensor)> {
    let n = check_documents(q, documents, spec)?;
    let width = spec.heads * spec.head_dim;
    let mut o = vec![0f32; n * width];
    let mut lse = vec![0f32; n * spec.heads];
    floats(q, "the queries", |q| {
        cpu::attend(q, documents, spec, &mut o, &mut lse);
        Ok(())
    })?;
    Ok((tensor(o, (n, width))?, tensor(lse, (n, spec.heads))?))
}

/// Checks that the documents belong to `q` and the attention `spec`; returns the number of queries.
fn check_documents(q: &Tensor, documents: &[PagedDocument], spec: &AttentionSpec) -> Result<usize> {
    spec.check()?;
    let n = documents.last().map_or(0, |d| d.queries.end);
    let width = spec.heads * spec.head_dim;
    expect_dims(q, "the queries", &[n, width])?;
    let mut at = 0;
    for d in documents {
        let fits = |p: &&Page| p.form.kv_heads == spec.kv_heads && p.form.head_dim == spec.head_dim;
        if d.queries.start != at || d.queries.end < at || d.queries.len() > d.tokens() || !d.pages.iter().all(fits) {
            return Err(Error::shape("queries do not match the cached keys")
                .found(format!("queries {:?}, {} tokens", d.queries, d.tokens()))
                .expected(format!("queries from {at} on, at most one per token")));
        }
        at = d.queries.end;
    }
    Ok(n)
}

#[cfg(test)]
pub(crate) mod tests;
