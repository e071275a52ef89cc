//! Cross-entropy with a streamed head. Logits are in memory for one chunk of tokens and one piece of the vocabulary. On the CPU the
//! parts of the head are read once. On a GPU they are read twice, first for the sums of the exponentials and then for the gradient; the
//! chunks are `PIECE_TOKENS` long, and sums have another order than with a whole head.

use super::{CrossEntropyOptions, CrossEntropyOutput, LossSums, PIECE, check, cpu};
use crate::cpu::storage::{expect_dims, floats, tensor};
use crate::linear;
use crate::step_stats::StepStats;
use candle_core::Tensor;
use ft_base::{Error, Result};

/// A streamed head `[V, D]`.
pub struct OutputPieces<'a> {
    /// V
    pub rows: usize,
    /// D
    pub width: usize,
    /// Rows of a part, a multiple of `PIECE`; the last part may have fewer.
    pub rows_of_part: usize,
    /// Returns the part that begins at this row.
    pub part: &'a dyn Fn(usize) -> Result<Tensor>,
}

impl OutputPieces<'_> {
    /// Calls `f` for every part, with its first row.
    pub(crate) fn each(&self, mut f: impl FnMut(usize, &Tensor) -> Result<()>) -> Result<()> {
        for first in (0..self.rows).step_by(self.rows_of_part) {
            f(first, &self.checked(first)?)?;
        }
        Ok(())
    }

    /// Returns the part that begins at row `first`.
    pub(crate) fn checked(&self, first: usize) -> Result<Tensor> {
        let part = (self.part)(first)?;
        let count = self.rows_of_part.min(self.rows - first);
        expect_dims(&part, "a part of the head", &[count, self.width])?;
        Ok(part)
    }

    /// Returns the rows that have a target, after all checks.
    fn trained_rows(&self, h: &Tensor, targets: &[u32], options: &CrossEntropyOptions) -> Result<Vec<usize>> {
        if self.rows_of_part == 0 || !self.rows_of_part.is_multiple_of(PIECE) {
            return Err(Error::shape("the parts of the output head have the wrong size")
                .found(self.rows_of_part)
                .expected(format!("a multiple of {PIECE}")));
        }
        if options.need_dw {
            return Err(Error::unsupported(
                "an output head that is read in parts cannot be trained",
            ));
        }
        let trained = check(h, (self.rows, self.width), targets, options.softcap)?;
        options.check(targets.len())?;
        Ok(trained)
    }
}

/// As `forward_backward`, or as `forward_only` if no gradient is requested; on the CPU with the same bits. The
/// gradient of the head is not available: a head that trains must be in memory as a whole.
///
/// # Errors
/// A target outside the vocabulary (`Argument`); tensors of other shapes, types or devices than described (`Shape`).
pub fn streamed(
    h: &Tensor,
    head: &OutputPieces,
    targets: &[u32],
    options: &CrossEntropyOptions,
    step_stats: &StepStats,
) -> Result<CrossEntropyOutput> {
    on_gpu!(h, gpu::streamed(h, head, targets, options, step_stats));
    let mut sum = LossSums::default();
    let dh = rows(h, head, targets, options, &mut |_, row| sum.add(row))?;
    step_stats.add(sum.sums());
    Ok(CrossEntropyOutput {
        trained: sum.trained,
        dh,
        dw: None,
    })
}

/// As `token_log_probs`, with a streamed head.
///
/// # Errors
/// A target outside the vocabulary (`Argument`); tensors of other shapes, types or devices than described (`Shape`).
pub fn streamed_log_probs(
    h: &Tensor,
    head: &OutputPieces,
    targets: &[u32],
    softcap: Option<f32>,
    chunk: usize,
) -> Result<Vec<f32>> {
    on_gpu!(
        h,
        gpu::of_each_token(h, head, targets, softcap, gpu::TokenQuantity::LogProbs)
    );
    let mut log_probs = vec![0f32; targets.len()];
    let options = CrossEntropyOptions::losses(softcap, chunk);
    rows(h, head, targets, &options, &mut |n, row| {
        log_probs[n] = -row.loss as f32
    })?;
    Ok(log_probs)
}

/// Calls `each` with the result of every trained token, in order. Returns the requested gradient of the hidden states.
fn rows(
    h: &Tensor,
    head: &OutputPieces,
    targets: &[u32],
    options: &CrossEntropyOptions,
    each: &mut dyn FnMut(usize, &cpu::TokenLoss),
) -> Result<Option<Tensor>> {
    let (v, d) = (head.rows, head.width);
    let trained = head.trained_rows(h, targets, options)?;
    let settings = cpu::PassSettings {
        d,
        v,
        cap: options.softcap.unwrap_or(0.0),
        smoothing: options.smoothing,
        chunk: options.chunk,
        scale: options.scale as f32,
        weights: options.weights,
        need_dh: options.need_dh,
        trained_head: None,
    };
    let n = targets.len();
    let mut dh = options.need_dh.then(|| vec![0f32; n * d]);
    if !trained.is_empty() {
        let mut pass = floats(h, "the hidden states", |h| {
            Ok(cpu::VocabularyPass::new(h, targets, &trained, &settings))
        })?;
        head.each(|first, part| {
            linear::with_rows(part, "a part of the head", |part| {
                pass.add(part, first, None);
                Ok(())
            })
        })?;
        let (losses, of_trained) = pass.finish(None);
        for (n, row) in trained.iter().zip(&losses) {
            each(*n, row);
        }
        if let Some(dh) = &mut dh {
            for (row, n) in of_trained.chunks_exact(d.max(1)).zip(&trained) {
                dh[n * d..][..d].copy_from_slice(row);
            }
        }
    }
    dh.map(|dh| tensor(dh, (n, d))).transpose()
}

/// The GPU versions.
#[cfg(feature = "cuda")]
pub(super) mod gpu {
    use super::super::super::cuda::cross_entropy_parts::{PieceJob, run};
    use super::super::super::cuda::memory::to_f32_vec;
    use super::*;
    use crate::update;
    use candle_core::DType;

    pub(super) fn streamed(
        h: &Tensor,
        head: &OutputPieces,
        targets: &[u32],
        options: &CrossEntropyOptions,
        step_stats: &StepStats,
    ) -> Result<CrossEntropyOutput> {
        let trained = head.trained_rows(h, targets, options)?;
        let totals = step_stats
            .losses()?
            .ok_or_else(|| Error::internal("the statistics of a step are not on the GPU"))?;
        let job = PieceJob {
            h,
            trained: &trained,
            targets,
            weights: options.weights,
            softcap: options.softcap,
            smoothing: options.smoothing,
            totals: &totals,
            each: None,
            entropies: None,
        };
        let dh = run(&job, head, options.need_dh.then_some(options.scale as f32))?;
        Ok(CrossEntropyOutput {
            trained: trained.len(),
            dh,
            dw: None,
        })
    }

    /// The quantity to compute for each token.
    #[derive(Clone, Copy, PartialEq)]
    pub(in super::super) enum TokenQuantity {
        LogProbs,
        Entropies,
    }

    /// Returns the quantity for each token, `[N]`; 0 if the target is `IGNORE`.
    pub(in super::super) fn of_each_token(
        h: &Tensor,
        head: &OutputPieces,
        targets: &[u32],
        softcap: Option<f32>,
        which: TokenQuantity,
    ) -> Result<Vec<f32>> {
        let trained = head.trained_rows(h, targets, &CrossEntropyOptions::losses(softcap, 0))?;
        let each = update::zeros(targets.len(), DType::F32, h.device())?;
        let totals = update::zeros(2, DType::F64, h.device())?;
        let job = PieceJob {
            h,
            trained: &trained,
            targets,
            weights: None,
            softcap,
            smoothing: 0.0,
            totals: &totals,
            each: (which == TokenQuantity::LogProbs).then_some(&each),
            entropies: (which == TokenQuantity::Entropies).then_some(&each),
        };
        run(&job, head, None)?;
        to_f32_vec(&each)
    }
}

#[cfg(test)]
mod tests {
    use super::super::forward_backward;
    use super::*;
    use crate::oracle::{bf16_pair, flat, random};
    use candle_core::Device;
    use ft_base::IGNORE;

    #[test]
    fn a_head_in_parts_gives_the_bits_of_the_whole_head() {
        let (n, d, v) = (37, 24, 2 * PIECE + 777);
        let h = random((n, d), 1);
        let targets: Vec<u32> = (0..n as u32)
            .map(|i| if i % 5 == 1 { IGNORE } else { i * 2399 % v as u32 })
            .collect();
        for weight in [random((v, d), 2), bf16_pair((v, d), 2).0] {
            for (softcap, chunk, smoothing) in [
                (None, 1000, 0.0),
                (Some(3.0), 16, 0.1),
                (None, 5, 0.2),
                (Some(3.0), 5, 0.0),
            ] {
                for rows_of_part in [PIECE, 2 * PIECE, 3 * PIECE] {
                    let part = |first: usize| {
                        let count = rows_of_part.min(v - first);
                        Ok(weight.narrow(0, first, count)?)
                    };
                    let head = OutputPieces {
                        rows: v,
                        width: d,
                        rows_of_part,
                        part: &part,
                    };
                    let factors = flat(&random(targets.len(), 9));
                    let mut options = CrossEntropyOptions {
                        softcap,
                        chunk,
                        scale: 0.3,
                        need_dh: true,
                        need_dw: false,
                        weights: Some(&factors),
                        smoothing,
                    };
                    let (a, b, c, e) = (step_stats(), step_stats(), step_stats(), step_stats());
                    let whole = forward_backward(&h, &weight, &targets, &options, &a).unwrap();
                    let parts = streamed(&h, &head, &targets, &options, &b).unwrap();
                    assert_eq!(a.read().unwrap(), b.read().unwrap());
                    assert_eq!(whole.trained, parts.trained);
                    assert_eq!(flat(&whole.dh.unwrap()), flat(&parts.dh.unwrap()));
                    options.need_dh = false;
                    let none = streamed(&h, &head, &targets, &options, &c).unwrap();
                    forward_backward(&h, &weight, &targets, &options, &e).unwrap();
                    assert!(none.dh.is_none());
                    assert_eq!(
                        (c.read().unwrap(), a.read().unwrap()),
                        (e.read().unwrap(), e.read().unwrap())
                    );
                }
            }
        }
    }

    fn step_stats() -> StepStats {
        StepStats::new(&Device::Cpu).unwrap()
    }

    #[test]
    fn what_is_wrong_is_refused() {
        let (h, weight) = (random((3, 4), 1), random((PIECE + 5, 4), 2));
        let part = |first: usize| Ok(weight.narrow(0, first, PIECE.min(PIECE + 5 - first))?);
        let mut head = OutputPieces {
            rows: PIECE + 5,
            width: 4,
            rows_of_part: PIECE,
            part: &part,
        };
        let mut options = CrossEntropyOptions {
            softcap: None,
            chunk: 2,
            scale: 1.0,
            need_dh: true,
            need_dw: false,
            weights: None,
            smoothing: 0.0,
        };
        let targets = [IGNORE; 3];
        let out = streamed(&h, &head, &targets, &options, &step_stats()).unwrap();
        assert!(out.trained == 0 && flat(&out.dh.unwrap()).iter().all(|x| *x == 0.0));
        assert!(streamed(&h, &head, &[0, PIECE as u32 + 5, 1], &options, &step_stats()).is_err());
        options.need_dw = true;
        assert!(streamed(&h, &head, &targets, &options, &step_stats()).is_err());
        options.need_dw = false;
        head.rows_of_part = PIECE / 2;
        assert!(streamed(&h, &head, &targets, &options, &step_stats()).is_err());
        head.rows_of_part = PIECE;
        head.width = 5;
        assert!(streamed(&h, &head, &targets, &options, &step_stats()).is_err());
    }
}
