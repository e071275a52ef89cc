//! Gated delta rule (Yang et al. 2024, arXiv 2412.06464), the token mixer of Gated DeltaNet. Each value head has a state
//! S `[P, Q]`, 0 at the start of a document:
//!
//! ```text
//! S_t = e^g_t S_{t-1} + k_t δ_tᵀ        δ_t = β_t (v_t - (e^g_t S_{t-1})ᵀ k_t)        o_t = S_tᵀ q_t / √P
//! g = -e^A_log softplus(a + dt_bias)    β = sigmoid(b)                                  |q| = |k| = 1
//! ```
//!
//! Chunks of 64 tokens are computed together, by products and a triangular system. The backward pass computes the states
//! at the chunk boundaries again and keeps them for the heads of one task: nothing but the inputs is saved.
//!
//! Letters: H key heads, V value heads (value head j uses key head j / (V / H)), P elements of a key, Q of a value. qkv
//! `[N, 2·H·P + V·Q]` (q, k, v side by side), a and b `[N, V]`, A_log and dt_bias `[V]`, o `[N, V·Q]`.

use super::attention::check_documents;
use super::cpu::product::task_gemm::TaskGemm;
use super::cpu::product::{CpuBackend, Rounding};
use super::cpu::storage::{expect_dims, floats, tensor, unwritten, values};
use super::cpu::{delta_rule as cpu, delta_rule_backward};
use candle_core::Tensor;
use ft_base::{Error, Result};

/// Sizes of the heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaHeads {
    /// H
    pub key_heads: usize,
    /// V
    pub value_heads: usize,
    /// P
    pub key_dim: usize,
    /// Q
    pub value_dim: usize,
}

/// The tensors of the operation; see the module.
#[derive(Debug, Clone, Copy)]
pub struct DeltaInputs<'a> {
    /// q, k and v side by side.
    pub qkv: &'a Tensor,
    /// Decides the decay.
    pub a: &'a Tensor,
    /// Decides the step size β.
    pub b: &'a Tensor,
    /// Logarithm of the decay rate of each head.
    pub a_log: &'a Tensor,
    /// Added to a.
    pub dt_bias: &'a Tensor,
}

/// Gradients of `DeltaInputs`, in their shapes: f32; on a GPU those of qkv, a and b have the type of qkv.
#[derive(Debug)]
pub struct DeltaGradients {
    /// Gradients of q, k and v.
    pub qkv: Tensor,
    /// Gradient of a.
    pub a: Tensor,
    /// Gradient of b.
    pub b: Tensor,
    /// Gradient of A_log.
    pub a_log: Tensor,
    /// Gradient of dt_bias.
    pub dt_bias: Tensor,
}

/// Tokens of a chunk on a GPU, as `C` in `cuda/delta_rule.cuh`.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) const DEVICE_CHUNK: usize = 32;
/// Most elements of a key on a GPU, as `KEY` in `cuda/delta_rule.cuh`.
pub const DEVICE_KEY: usize = 128;
/// Numbers that are kept of a chunk and value head on a GPU for the scans: two triangles, four numbers of each token, and the
/// decay. As `PREPARED` in `cuda/delta_rule.cuh`.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) const DEVICE_PREPARED: usize = 2 * DEVICE_CHUNK * DEVICE_CHUNK + 4 * DEVICE_CHUNK + 4;
/// Bytes that the states of the chunks may have on a GPU while gradients are computed, and what is kept for a forward scan;
/// one key head has more if it needs more.
const DEVICE_STATES: usize = 512 << 20;

impl DeltaHeads {
    /// On a GPU: bytes of one key head, with its value heads, that a forward scan reads.
    fn prepared_bytes_of_key_head(&self, tokens: usize, documents: usize) -> usize {
        let chunks = tokens / DEVICE_CHUNK + documents;
        4 * self.value_heads / self.key_heads.max(1) * chunks * DEVICE_PREPARED
    }

    /// On a GPU: bytes of one key head, with its value heads, between the kernels of a backward pass: what the scans read,
    /// the states and deltas of the forward scan, and their gradients, f32.
    fn device_bytes_of_key_head(&self, tokens: usize, documents: usize) -> usize {
        let chunks = tokens / DEVICE_CHUNK + documents;
        let group = self.value_heads / self.key_heads.max(1);
        let kept = 8 * group * self.value_dim * (chunks * self.key_dim + tokens);
        kept + self.prepared_bytes_of_key_head(tokens, documents)
    }

    /// On a GPU: key heads whose outputs are computed together.
    pub(crate) fn key_heads_prepared_at_once(&self, tokens: usize, documents: usize) -> usize {
        let each = self.prepared_bytes_of_key_head(tokens, documents);
        (DEVICE_STATES / each.max(1)).clamp(1, self.key_heads.max(1))
    }

    /// Memory that `forward` needs on a GPU besides its results, at most; documents with few tokens have more chunks.
    pub fn device_bytes_forward(&self, tokens: usize, documents: usize) -> u64 {
        let heads = self.key_heads_prepared_at_once(tokens, documents);
        (heads * self.prepared_bytes_of_key_head(tokens, documents)) as u64
    }

    /// On a GPU: key heads whose gradients are computed together.
    pub(crate) fn key_heads_at_once(&self, tokens: usize, documents: usize) -> usize {
        let each = self.device_bytes_of_key_head(tokens, documents);
        (DEVICE_STATES / each.max(1)).clamp(1, self.key_heads.max(1))
    }

    /// As `device_bytes_forward`, of `backward`.
    pub fn device_bytes(&self, tokens: usize, documents: usize) -> u64 {
        let states = self.key_heads_at_once(tokens, documents) * self.device_bytes_of_key_head(tokens, documents);
        (states + 4 * tokens * self.value_heads) as u64
    }

    /// Elements of the states of all heads of a document.
    pub fn state(&self) -> usize {
        self.value_heads * self.key_dim * self.value_dim
    }

    /// 2·H·P + V·Q
    pub(crate) fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    fn check(&self) -> Result<()> {
        let positive = [self.key_heads, self.value_heads, self.key_dim, self.value_dim];
        if positive.contains(&0) || !self.value_heads.is_multiple_of(self.key_heads) {
            return Err(
                Error::shape("the number of value heads is not a multiple of the number of key heads")
                    .found(format!("{self:?}")),
            );
        }
        Ok(())
    }
}

/// Returns the number of f32 of scratch memory per CPU thread for documents of up to `longest` tokens.
pub fn scratch(heads: &DeltaHeads, longest: usize) -> usize {
    delta_rule_backward::scratch(TaskGemm::new(CpuBackend::current(), Rounding::Exact), heads, longest)
}

fn check(x: &DeltaInputs, heads: &DeltaHeads, documents: &[usize]) -> Result<usize> {
    heads.check()?;
    let tokens = x.qkv.dims().first().copied().unwrap_or(0);
    expect_dims(x.qkv, "qkv of the delta rule", &[tokens, heads.channels()])?;
    expect_dims(x.a, "a of the delta rule", &[tokens, heads.value_heads])?;
    expect_dims(x.b, "b of the delta rule", &[tokens, heads.value_heads])?;
    expect_dims(x.a_log, "A_log of the delta rule", &[heads.value_heads])?;
    expect_dims(x.dt_bias, "dt_bias of the delta rule", &[heads.value_heads])?;
    check_documents(documents, tokens)?;
    Ok(tokens)
}

/// Runs `f` on the slices of the inputs.
fn with_inputs<R>(x: &DeltaInputs, f: impl FnOnce(&cpu::DeltaSlices) -> R) -> Result<R> {
    let vector = |t: &Tensor| values(t, "a vector of the delta rule", |v| Ok(v.to_f32()));
    let (a_log, dt_bias) = (vector(x.a_log)?, vector(x.dt_bias)?);
    floats(x.qkv, "qkv of the delta rule", |qkv| {
        floats(x.a, "a of the delta rule", |a| {
            floats(x.b, "b of the delta rule", |b| {
                Ok(f(&cpu::DeltaSlices {
                    qkv,
                    a,
                    b,
                    a_log: &a_log,
                    dt_bias: &dt_bias,
                }))
            })
        })
    })
}

/// Computes o `[N, V·Q]`. `documents`: offsets of the documents, in tokens.
///
/// # Errors
/// Shapes or offsets that do not fit; on a GPU keys of more than 128 elements.
pub fn forward(x: &DeltaInputs, heads: &DeltaHeads, documents: &[usize]) -> Result<Tensor> {
    check(x, heads, documents)?;
    on_gpu!(
        x.qkv,
        Ok(super::cuda::delta_rule::forward(x, heads, documents, None)?.0)
    );
    let states = vec![0f32; 0];
    Ok(run(x, heads, documents, states)?.0)
}

/// As `forward`, from the states f32 `[documents, V·P·Q]` before the first tokens; also returns those after the last ones.
///
/// # Errors
/// As `forward`.
pub fn forward_from(
    x: &DeltaInputs,
    heads: &DeltaHeads,
    documents: &[usize],
    states: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let count = documents.len().saturating_sub(1);
    expect_dims(states, "the states of the delta rule", &[count, heads.state()])?;
    check(x, heads, documents)?;
    on_gpu!(x.qkv, {
        let (o, after) = super::cuda::delta_rule::forward(x, heads, documents, Some(states))?;
        let after = after.ok_or_else(|| Error::internal("the delta rule returned no states"))?;
        Ok((o, after))
    });
    let states = floats(states, "the states of the delta rule", |s| Ok(s.to_vec()))?;
    let (o, states) = run(x, heads, documents, states)?;
    Ok((o, tensor(states, (count, heads.state()))?))
}

/// `states`: of every document, or empty: 0 at first, and not returned.
fn run(x: &DeltaInputs, heads: &DeltaHeads, documents: &[usize], mut states: Vec<f32>) -> Result<(Tensor, Vec<f32>)> {
    let tokens = x.qkv.dim(0)?;
    let width = heads.value_heads * heads.value_dim;
    let mut o = unwritten(tokens * width);
    let backend = CpuBackend::current();
    with_inputs(x, |x| cpu::forward(backend, x, heads, documents, &mut states, &mut o))?;
    Ok((tensor(o, (tokens, width))?, states))
}

/// Computes the gradients from `d_o` `[N, V·Q]`.
///
/// # Errors
/// As `forward`.
pub fn backward(x: &DeltaInputs, heads: &DeltaHeads, documents: &[usize], d_o: &Tensor) -> Result<DeltaGradients> {
    let tokens = check(x, heads, documents)?;
    expect_dims(
        d_o,
        "do of the delta rule",
        &[tokens, heads.value_heads * heads.value_dim],
    )?;
    on_gpu!(x.qkv, super::cuda::delta_rule::backward(x, heads, documents, d_o));
    let per_head = tokens * heads.value_heads;
    let (mut qkv, mut a, mut b) = (unwritten(x.qkv.elem_count()), unwritten(per_head), unwritten(per_head));
    let backend = CpuBackend::current();
    let (a_log, dt_bias) = floats(d_o, "do of the delta rule", |d_o| {
        let gradients = [&mut qkv[..], &mut a, &mut b];
        with_inputs(x, |x| {
            delta_rule_backward::backward(backend, x, heads, documents, d_o, gradients)
        })
    })?;
    Ok(DeltaGradients {
        qkv: tensor(qkv, x.qkv.shape())?,
        a: tensor(a, x.a.shape())?,
        b: tensor(b, x.b.shape())?,
        a_log: tensor(a_log, heads.value_heads)?,
        dt_bias: tensor(dt_bias, heads.value_heads)?,
    })
}

#[cfg(test)]
mod tests;
