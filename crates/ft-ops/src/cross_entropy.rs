//! Fused linear and cross-entropy: hidden states `[N, D]` and head `[V, D]` in, loss and gradients out. Logits are
//! in memory for one chunk of trained tokens at a time, and for one piece of the vocabulary if the head is streamed, or on
//! the CPU; tokens without a target cost nothing.

mod chunk;
mod entropy;
mod streamed;

use super::cpu::cross_entropy as cpu;
use super::cpu::storage::{dims2, expect_dims, expect_f32, floats, tensor, unwritten, wrong_shape};
use super::linear;
use super::step_stats::{StepStats, StepSums};
use candle_core::Tensor;
use ft_base::IGNORE;
use ft_base::{Error, Result};

pub use chunk::{chunk_for, chunk_for_loss, kept_bytes, most_tokens};
pub use entropy::{streamed_entropies, token_entropies};
pub use streamed::{OutputPieces, streamed, streamed_log_probs};

/// Rows of the head per product. The parts of a streamed head are multiples of it: then, on the CPU, the results
/// are bit-equal to those of the whole head.
pub const PIECE: usize = cpu::PIECE;

/// Tokens that a GPU multiplies with one piece of the head.
pub const PIECE_TOKENS: usize = chunk::LOGITS_BYTES_STREAMED / (4 * PIECE);

/// Bytes of the block sums and maxima of a token's logits.
pub fn sums_bytes(vocab: usize) -> u64 {
    16 * vocab.div_ceil(cpu::BLOCK) as u64 + 4 * vocab.div_ceil(PIECE) as u64
}

/// Options of the loss, and the gradients to compute.
#[derive(Debug, Clone)]
pub struct CrossEntropyOptions<'a> {
    /// Logits become `cap tanh(logit / cap)`.
    pub softcap: Option<f32>,
    /// Tokens per chunk; 0 counts as 1.
    pub chunk: usize,
    /// Factor of the gradients (not of the loss): 1 / tokens of the window.
    pub scale: f64,
    /// Compute the gradient of h.
    pub need_dh: bool,
    /// Compute the gradient of the head.
    pub need_dw: bool,
    /// `[N]`: a factor of each token's gradient, of any sign; the loss stays the unweighted sum.
    pub weights: Option<&'a [f32]>,
    /// Label smoothing ε, as in `torch.nn.CrossEntropyLoss`: the target distribution is ε/V for every id, plus 1 - ε for
    /// the target. It applies to the loss and the gradients.
    pub smoothing: f32,
}

impl CrossEntropyOptions<'_> {
    /// Options for losses without gradients.
    pub fn losses(softcap: Option<f32>, chunk: usize) -> Self {
        Self {
            softcap,
            chunk,
            scale: 1.0,
            need_dh: false,
            need_dw: false,
            weights: None,
            smoothing: 0.0,
        }
    }

    fn check(&self, tokens: usize) -> Result<()> {
        if !(0.0..=1.0).contains(&self.smoothing) {
            return Err(Error::argument("label smoothing is a number from 0 to 1").found(self.smoothing));
        }
        match self.weights {
            Some(weights) if weights.len() != tokens => Err(Error::shape(
                "the number of loss weights differs from the number of tokens",
            )
            .found(weights.len())
            .expected(tokens)),
            _ => Ok(()),
        }
    }
}

/// The requested gradients.
#[derive(Debug)]
pub struct CrossEntropyOutput {
    /// Number of tokens with a target.
    pub trained: usize,
    /// `[N, D]` of the type of h, zero for tokens without a target.
    pub dh: Option<Tensor>,
    /// `[V, D]` f32.
    pub dw: Option<Tensor>,
}

/// Computes the gradients of the fused linear and cross-entropy. h `[N, D]`, head f32 or bf16 `[V, D]`, targets
/// `[N]`, each below V or `IGNORE` (else an error). Adds to `step_stats` the loss (not finite if a logit is not), and
/// the number of tokens whose target has the largest logit (the first of equals).
///
/// # Errors
/// A target outside the vocabulary (`Argument`); tensors of other shapes, types or devices than described (`Shape`).
pub fn forward_backward(
    h: &Tensor,
    head: &Tensor,
    targets: &[u32],
    options: &CrossEntropyOptions,
    step_stats: &StepStats,
) -> Result<CrossEntropyOutput> {
    let ((n, d), (v, _)) = (dims2(h, "the hidden states")?, dims2(head, "the head")?);
    on_gpu!(h, {
        let wanted = super::cuda::cross_entropy::GradientOptions {
            scale: options.scale as f32,
            dh: options.need_dh,
            dw: options.need_dw,
        };
        let wanted = (options.need_dh || options.need_dw).then_some(wanted);
        gpu::forward_backward(h, head, targets, options, wanted, step_stats)
    });
    let mut sum = LossSums::default();
    let mut gradients = cpu::CrossEntropyGradients {
        scale: options.scale as f32,
        dh: options.need_dh.then(|| vec![0f32; n * d]),
        dw: options.need_dw.then(|| unwritten(v * d)),
    };
    let wanted = (options.need_dh || options.need_dw).then_some(&mut gradients);
    run(h, head, targets, options, wanted, |_, row| sum.add(row))?;
    step_stats.add(sum.sums());
    Ok(CrossEntropyOutput {
        trained: sum.trained,
        dh: gradients.dh.map(|dh| tensor(dh, (n, d))).transpose()?,
        dw: gradients.dw.map(|dw| tensor(dw, (v, d))).transpose()?,
    })
}

/// As `forward_backward` without gradients; returns the number of trained tokens.
///
/// # Errors
/// A target outside the vocabulary (`Argument`); tensors of other shapes, types or devices than described (`Shape`).
pub fn forward_only(
    h: &Tensor,
    head: &Tensor,
    targets: &[u32],
    softcap: Option<f32>,
    chunk: usize,
    step_stats: &StepStats,
) -> Result<usize> {
    on_gpu!(
        h,
        gpu::forward_backward(
            h,
            head,
            targets,
            &CrossEntropyOptions::losses(softcap, chunk),
            None,
            step_stats
        )
        .map(|out| out.trained)
    );
    let mut sum = LossSums::default();
    run(
        h,
        head,
        targets,
        &CrossEntropyOptions::losses(softcap, chunk),
        None,
        |_, row| sum.add(row),
    )?;
    step_stats.add(sum.sums());
    Ok(sum.trained)
}

/// Returns the log-probability of each target, `[N]`; 0 if the target is `IGNORE`.
///
/// # Errors
/// A target outside the vocabulary (`Argument`); tensors of other shapes, types or devices than described (`Shape`).
pub fn token_log_probs(
    h: &Tensor,
    head: &Tensor,
    targets: &[u32],
    softcap: Option<f32>,
    chunk: usize,
) -> Result<Vec<f32>> {
    on_gpu!(h, gpu::token_log_probs(h, head, targets, softcap, chunk));
    let mut log_probs = vec![0f32; targets.len()];
    run(
        h,
        head,
        targets,
        &CrossEntropyOptions::losses(softcap, chunk),
        None,
        |n, row| log_probs[n] = -row.loss as f32,
    )?;
    Ok(log_probs)
}

#[derive(Default)]
struct LossSums {
    loss: f64,
    trained: usize,
    correct: usize,
}

impl LossSums {
    fn add(&mut self, row: &cpu::TokenLoss) {
        self.loss += row.loss;
        self.trained += 1;
        self.correct += row.correct as usize;
    }

    fn sums(&self) -> StepSums {
        StepSums {
            loss: self.loss,
            correct: self.correct as f64,
            squares: 0.0,
        }
    }
}

/// Returns the rows that have a target, after all checks.
fn trained_rows(h: &Tensor, head: &Tensor, targets: &[u32], softcap: Option<f32>) -> Result<Vec<usize>> {
    let (v, d) = dims2(head, "the head")?;
    check(h, (v, d), targets, softcap)
}

/// Returns the rows that have a target, if all shapes and values fit a head `[V, D]`.
fn check(h: &Tensor, (v, d): (usize, usize), targets: &[u32], softcap: Option<f32>) -> Result<Vec<usize>> {
    let (n, _) = dims2(h, "the hidden states")?;
    expect_dims(h, "the hidden states", &[n, d])?;
    if targets.len() != n {
        return Err(wrong_shape(h, "the hidden states", &format!("{} rows", targets.len())));
    }
    if let Some((at, id)) = targets
        .iter()
        .enumerate()
        .find(|(_, t)| **t != IGNORE && **t as usize >= v)
    {
        return Err(Error::argument("a target is outside the vocabulary")
            .at(format!("token {at}"))
            .found(id)
            .expected(format!("below {v}")));
    }
    if softcap.is_some_and(|cap| cap.is_nan() || cap <= 0.0) {
        return Err(Error::argument("the soft cap of the logits must be positive"));
    }
    Ok((0..n).filter(|i| targets[*i] != IGNORE).collect())
}

/// Calls `each` with the result of every trained token, in order.
fn run(
    h: &Tensor,
    head: &Tensor,
    targets: &[u32],
    options: &CrossEntropyOptions,
    gradients: Option<&mut cpu::CrossEntropyGradients>,
    mut each: impl FnMut(usize, &cpu::TokenLoss),
) -> Result<()> {
    let trained = trained_rows(h, head, targets, options.softcap)?;
    options.check(targets.len())?;
    expect_f32(h, "the hidden states")?;
    let (v, d) = dims2(head, "the head")?;
    floats(h, "the hidden states", |h| {
        linear::with_rows(head, "the head", |head| {
            let job = cpu::CrossEntropyJob {
                h,
                head,
                targets,
                sizes: (d, v),
                cap: options.softcap.unwrap_or(0.0),
                smoothing: options.smoothing,
                weights: options.weights,
            };
            cpu::run(&job, &trained, options.chunk.max(1), gradients, &mut each);
            Ok(())
        })
    })
}

/// The GPU versions.
#[cfg(feature = "cuda")]
mod gpu {
    use super::super::cuda::cross_entropy::{GpuCrossEntropyJob, GradientOptions, run};
    use super::super::cuda::memory::to_f32_vec;
    use super::*;
    use crate::update;
    use candle_core::DType;

    pub(super) fn forward_backward(
        h: &Tensor,
        head: &Tensor,
        targets: &[u32],
        options: &CrossEntropyOptions,
        wanted: Option<GradientOptions>,
        step_stats: &StepStats,
    ) -> Result<CrossEntropyOutput> {
        let trained = trained_rows(h, head, targets, options.softcap)?;
        options.check(targets.len())?;
        let totals = step_stats
            .losses()?
            .ok_or_else(|| Error::internal("the statistics of a step are not on the GPU"))?;
        let job = GpuCrossEntropyJob {
            h,
            head,
            trained: &trained,
            targets,
            weights: options.weights,
            softcap: options.softcap,
            smoothing: options.smoothing,
            chunk: options.chunk,
            totals: &totals,
            each: None,
        };
        let (dh, dw) = run(&job, wanted)?;
        Ok(CrossEntropyOutput {
            trained: trained.len(),
            dh,
            dw,
        })
    }

    pub(super) fn token_log_probs(
        h: &Tensor,
        head: &Tensor,
        targets: &[u32],
        softcap: Option<f32>,
        chunk: usize,
    ) -> Result<Vec<f32>> {
        let trained = trained_rows(h, head, targets, softcap)?;
        let each = update::zeros(targets.len(), DType::F32, h.device())?;
        let totals = update::zeros(2, DType::F64, h.device())?;
        let job = GpuCrossEntropyJob {
            h,
            head,
            trained: &trained,
            targets,
            weights: None,
            softcap,
            smoothing: 0.0,
            chunk,
            totals: &totals,
            each: Some(&each),
        };
        run(&job, None)?;
        to_f32_vec(&each)
    }
}

#[cfg(test)]
mod pieces_tests;
#[cfg(test)]
mod tests;
