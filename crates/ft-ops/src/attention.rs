//! Causal attention over concatenated documents, with grouped queries, a sliding window and a softcap. Memory is
//! linear in the length: scores exist for a block of queries and a part of its keys only. Of the softmax only the log-sum-exp is saved,
//! and the backward pass recomputes the probabilities.
//!
//! q `[Nq, H·E]`, k and v `[Nk, K·E]`, o `[Nq, H·E]`, lse `[Nq, H]`. Query head h uses key head h / (H / K). A
//! score is `q·k scale`, then `cap tanh(score / cap)` if there is a softcap, then the mask.

pub mod sinks;

use super::cpu::product::task_gemm::TaskGemm;
use super::cpu::product::{CpuBackend, Rounding};
use super::cpu::storage::{expect_dims, expect_f32, floats, tensor};
use super::cpu::{attention as cpu, attention_backward};
use candle_core::Tensor;
use ft_base::{Error, Result};

/// Sums over keys are made in chunks of this many keys, from the first key of a document. If keys before a window are
/// left out up to a multiple of it, the sums have the same bits.
pub const KEY_CHUNK: usize = cpu::KEY_CHUNK;

/// Parameters of an attention layer.
#[derive(Debug, Clone)]
pub struct AttentionSpec {
    /// H: query heads.
    pub heads: usize,
    /// K: key/value heads; each serves H / K query heads.
    pub kv_heads: usize,
    /// E: elements of a head.
    pub head_dim: usize,
    /// Factor of the scores before the softmax.
    pub scale: f32,
    /// Scores s become cap · tanh(s / cap).
    pub softcap: Option<f32>,
    /// With window w, query i attends to the keys j with i - w < j <= i.
    pub window: Option<usize>,
    /// The model is held in bf16: products may round their operands to bf16 if that is faster.
    pub bf16: bool,
}

impl AttentionSpec {
    pub(super) fn check(&self) -> Result<()> {
        if self.kv_heads == 0 || self.heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return Err(
                Error::shape("the number of query heads is not a multiple of the number of key heads")
                    .found(format!("{} and {}", self.heads, self.kv_heads)),
            );
        }
        if self.head_dim == 0 {
            return Err(Error::shape("an attention head has no elements"));
        }
        if self.window == Some(0) {
            return Err(Error::argument("an attention window must be at least 1"));
        }
        if self.softcap.is_some_and(|cap| cap.is_nan() || cap <= 0.0) {
            return Err(Error::argument("an attention soft cap must be positive"));
        }
        Ok(())
    }

    pub(super) fn rounding(&self) -> Rounding {
        if self.bf16 { Rounding::Bf16 } else { Rounding::Exact }
    }

    /// True if q, k, v and the probabilities are rounded to bf16 on the current backend.
    pub(super) fn rounds(&self) -> bool {
        CpuBackend::current().rounds(self.rounding())
    }

    pub(crate) fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    fn key_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// The inputs of the backward pass: the inputs of `forward`, its results, and the gradient of o. T: tensors, or their
/// values.
#[derive(Debug, Clone, Copy)]
pub struct AttentionGradInputs<T> {
    /// `[Nq, H·E]`
    pub q: T,
    /// `[Nk, K·E]`
    pub k: T,
    /// `[Nk, K·E]`
    pub v: T,
    /// `[Nq, H·E]`
    pub o: T,
    /// `[Nq, H]`
    pub lse: T,
    /// `[Nq, H·E]`
    pub dout: T,
}

/// Returns the number of f32 of scratch memory per CPU thread, forward or backward, for documents of up to
/// `longest` tokens.
pub fn scratch(spec: &AttentionSpec, longest: usize) -> usize {
    let gemm = TaskGemm::new(CpuBackend::current(), spec.rounding());
    let seen = |queries: usize| {
        spec.window
            .map_or(longest, |w| longest.min(w + queries + gemm.k_unit()))
    };
    let (keys, heads) = (seen(cpu::BLOCKS * cpu::QUERIES), spec.heads / spec.kv_heads.max(1));
    let backward = attention_backward::scratch(gemm, spec.head_dim, keys, heads);
    backward.max(cpu::scratch(gemm, spec.head_dim, keys, heads))
}

/// Returns the number of partial sums of dk and of dv that the backward pass on the CPU keeps for each key head.
pub fn backward_parts(heads: usize, kv_heads: usize, documents: usize) -> usize {
    attention_backward::parts(heads, kv_heads, documents)
}

/// Returns the largest number of partial sums of dk and of dv that the backward pass on a GPU keeps for a batch of
/// `tokens`, however they are divided into documents.
pub fn gpu_backward_parts(heads: usize, kv_heads: usize, tokens: usize) -> usize {
    /// Blocks of the largest GPU at a time, and keys of a block.
    const SLOTS: f64 = 320.0;
    const BLOCK_KEYS: f64 = 64.0;
    // The heaviest block visits the longest document, h tokens, all of them together h²/128 and the other tokens; its
    // share is largest for h = sqrt(128 N). See `VisitedRows::parts`.
    let share = 1.0 / (2.0 * (tokens as f64 / (2.0 * BLOCK_KEYS)).sqrt() - 1.0).max(1.0);
    let group = heads / kv_heads.max(1);
    let parts = (1..=group).find(|p| group.is_multiple_of(*p) && SLOTS * share <= (kv_heads * p) as f64);
    parts.unwrap_or(group)
}

/// Checks that `documents` are non-decreasing offsets from 0 to `tokens`.
pub(crate) fn check_documents(documents: &[usize], tokens: usize) -> Result<()> {
    let whole = documents.first() == Some(&0) && documents.last() == Some(&tokens);
    if whole && documents.is_sorted() {
        Ok(())
    } else {
        Err(Error::shape("the document offsets do not cover all tokens")
            .found(format!("{documents:?}"))
            .expected(format!("0 to {tokens}, rising")))
    }
}

/// Checks that each document has at least as many keys as queries. `(nq, nk)`: queries and keys of all documents.
fn check_keys_of(q_documents: &[usize], k_documents: &[usize], (nq, nk): (usize, usize)) -> Result<()> {
    check_documents(q_documents, nq)?;
    check_documents(k_documents, nk)?;
    if q_documents.len() != k_documents.len() {
        return Err(Error::shape("queries and keys have different numbers of documents")
            .found(q_documents.len() - 1)
            .expected(k_documents.len() - 1));
    }
    for (d, (q, k)) in q_documents.windows(2).zip(k_documents.windows(2)).enumerate() {
        if q[1] - q[0] > k[1] - k[0] {
            return Err(Error::shape("a document has more queries than keys")
                .at(format!("document {d}"))
                .found(q[1] - q[0])
                .expected(format!("at most {}", k[1] - k[0])));
        }
    }
    Ok(())
}

/// Document d has the queries `q_documents[d]..q_documents[d + 1]` and the keys `k_documents[d]..`. Causal, aligned at
/// the end: its last query attends to its last key, so one query on a cache of T keys is a decoding step. q
/// `[Nq, H·E]`, k and v `[Nk, K·E]`. Returns o `[Nq, H·E]` and lse `[Nq, H]`.
///
/// # Errors
/// Shapes or offsets that do not fit, or a document with more queries than keys.
pub fn forward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &AttentionSpec,
    q_documents: &[usize],
    k_documents: &[usize],
) -> Result<(Tensor, Tensor)> {
    forward_on(CpuBackend::current(), q, k, v, spec, q_documents, k_documents)
}

fn forward_on(
    backend: CpuBackend,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &AttentionSpec,
    q_documents: &[usize],
    k_documents: &[usize],
) -> Result<(Tensor, Tensor)> {
    spec.check()?;
    let (nq, nk) = (
        q.dims().first().copied().unwrap_or(0),
        k.dims().first().copied().unwrap_or(0),
    );
    expect_dims(q, "the queries", &[nq, spec.query_width()])?;
    expect_dims(k, "the keys", &[nk, spec.key_width()])?;
    expect_dims(v, "the values", &[nk, spec.key_width()])?;
    check_keys_of(q_documents, k_documents, (nq, nk))?;
    on_gpu!(
        q,
        super::cuda::attention::forward(q, k, v, spec, q_documents, k_documents)
    );
    let mut o = vec![0f32; nq * spec.query_width()];
    let mut lse = vec![0f32; nq * spec.heads];
    floats(q, "the queries", |q| {
        floats(k, "the keys", |k| {
            floats(v, "the values", |v| {
                let job = cpu::ForwardJob { backend, spec, q, k, v };
                cpu::forward(&job, q_documents, k_documents, &mut o, &mut lse);
                Ok(())
            })
        })
    })?;
    Ok((tensor(o, (nq, spec.query_width()))?, tensor(lse, (nq, spec.heads))?))
}

/// Computes dq `[Nq, H·E]`, dk and dv `[Nk, K·E]`; queries and keys are in the same documents.
///
/// # Errors
/// As `forward`.
pub fn backward(
    inputs: AttentionGradInputs<&Tensor>,
    spec: &AttentionSpec,
    documents: &[usize],
) -> Result<(Tensor, Tensor, Tensor)> {
    backward_on(CpuBackend::current(), inputs, spec, documents, documents)
}

/// As `backward`, for documents whose keys begin before their queries, as in `forward`. On the CPU.
///
/// # Errors
/// As `forward`; a tensor on a GPU.
pub fn backward_after(
    inputs: AttentionGradInputs<&Tensor>,
    spec: &AttentionSpec,
    q_documents: &[usize],
    k_documents: &[usize],
) -> Result<(Tensor, Tensor, Tensor)> {
    backward_on(CpuBackend::current(), inputs, spec, q_documents, k_documents)
}

fn backward_on(
    backend: CpuBackend,
    inputs: AttentionGradInputs<&Tensor>,
    spec: &AttentionSpec,
    q_documents: &[usize],
    k_documents: &[usize],
) -> Result<(Tensor, Tensor, Tensor)> {
    spec.check()?;
    let AttentionGradInputs { q, k, v, o, lse, dout } = inputs;
    let rows = |t: &Tensor| t.dims().first().copied().unwrap_or(0);
    let (nq, nk) = (rows(q), rows(k));
    let (wide, narrow) = ([nq, spec.query_width()], [nk, spec.key_width()]);
    let all = [
        (q, "the queries", wide),
        (k, "the keys", narrow),
        (v, "the values", narrow),
        (o, "the output of attention", wide),
        (lse, "the log-sum-exp of attention", [nq, spec.heads]),
        (dout, "the gradient of attention", wide),
    ];
    for (t, name, dims) in all {
        expect_dims(t, name, &dims)?;
    }
    check_keys_of(q_documents, k_documents, (nq, nk))?;
    if q_documents == k_documents {
        on_gpu!(q, super::cuda::attention::backward(inputs, spec, q_documents));
    }
    for (t, name, _) in all {
        expect_f32(t, name)?;
    }
    let guard = |i: usize, f: &mut dyn FnMut(&[f32]) -> Result<()>| floats(all[i].0, all[i].1, f);
    let mut result = None;
    guard(0, &mut |q| {
        guard(1, &mut |k| {
            guard(2, &mut |v| {
                guard(3, &mut |o| {
                    guard(4, &mut |lse| {
                        guard(5, &mut |dout| {
                            let saved = AttentionGradInputs { q, k, v, o, lse, dout };
                            result = Some(attention_backward::backward(
                                backend,
                                &saved,
                                spec,
                                q_documents,
                                k_documents,
                            ));
                            Ok(())
                        })
                    })
                })
            })
        })
    })?;
    let (dq, dk, dv) = result.ok_or_else(|| Error::internal("attention did not run"))?;
    Ok((
        tensor(dq, &wide[..])?,
        tensor(dk, &narrow[..])?,
        tensor(dv, &narrow[..])?,
    ))
}

#[cfg(test)]
mod tests;
