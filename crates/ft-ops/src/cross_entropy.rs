//! Fused linear and cross-entropy: hidden states `[N, D]` and head `[V, D]` in, loss and gradients out. Logits are
//! in memory for one chunk of trained tokens at a time; tokens without a target cost nothing.

mod chunk;
mod entropy;
mod streamed;

use super::cpu::cross_entropy as cpu;
use super::cpu::storage::{dims2, expect_dims, expect_f32, floats, tensor, wrong_shape};
use super::prepacked::Dense;
use super::step_stats::{StepStats, StepSums};
use candle_core::Tensor;
use ft_base::IGNORE;
use ft_base::{Error, Result};

pub use chunk::{chunk_for, most_tokens};
pub use entropy::{streamed_entropies, token_entropies};
pub use streamed::{Pieces, streamed, streamed_log_probs};

/// Rows of the head per product. The parts of a streamed head are multiples of it: then, on the CPU, the results
/// are bit-equal to those of the whole head.
pub const PIECE: usize = cpu::PIECE;

/// Tokens that a GPU multiplies with one piece of the head.
pub const PIECE_TOKENS: usize = chunk::LOGITS_BYTES / (4 * PIECE);

/// Bytes of the block sums and maxima of a token's logits.
pub fn sums_bytes(vocab: usize) -> u64 {
    16 * vocab.div_ceil(cpu::BLOCK) as u64
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
pub fn forward_backward<'w>(
    h: &Tensor,
    head: impl Into<Dense<'w>>,
    targets: &[u32],
    options: &CrossEntropyOptions,
    step_stats: &StepStats,
) -> Result<CrossEntropyOutput> {
    let head = head.into();
    let ((n, d), (v, _)) = (dims2(h, "the hidden states")?, dims2(head.tensor, "the head")?);
    on_gpu!(h, {
        let wanted = super::cuda::cross_entropy::GradientOptions {
            scale: options.scale as f32,
            dh: options.need_dh,
            dw: options.need_dw,
        };
        let wanted = (options.need_dh || options.need_dw).then_some(wanted);
        gpu::forward_backward(h, head.tensor, targets, options, wanted, step_stats)
    });
    let mut sum = Sum::default();
    let mut gradients = cpu::CrossEntropyGradients {
        scale: options.scale as f32,
        dh: options.need_dh.then(|| vec![0f32; n * d]),
        dw: options.need_dw.then(|| vec![0f32; v * d]),
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
pub fn forward_only<'w>(
    h: &Tensor,
    head: impl Into<Dense<'w>>,
    targets: &[u32],
    softcap: Option<f32>,
    chunk: usize,
    step_stats: &StepStats,
) -> Result<usize> {
    let head = head.into();
    on_gpu!(
        h,
        gpu::forward_backward(
            h,
            head.tensor,
            targets,
            &CrossEntropyOptions::losses(softcap, chunk),
            None,
            step_stats
        )
        .map(|out| out.trained)
    );
    let mut sum = Sum::default();
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
pub fn token_log_probs<'w>(
    h: &Tensor,
    head: impl Into<Dense<'w>>,
    targets: &[u32],
    softcap: Option<f32>,
    chunk: usize,
) -> Result<Vec<f32>> {
    let head = head.into();
    on_gpu!(h, gpu::token_log_probs(h, head.tensor, targets, softcap, chunk));
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
struct Sum {
    loss: f64,
    trained: usize,
    correct: usize,
}

impl Sum {
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
    head: Dense<'_>,
    targets: &[u32],
    options: &CrossEntropyOptions,
    gradients: Option<&mut cpu::CrossEntropyGradients>,
    mut each: impl FnMut(usize, &cpu::TokenLoss),
) -> Result<()> {
    let trained = trained_rows(h, head.tensor, targets, options.softcap)?;
    options.check(targets.len())?;
    expect_f32(h, "the hidden states")?;
    let (v, d) = dims2(head.tensor, "the head")?;
    floats(h, "the hidden states", |h| {
        head.with_rows("the head", |head| {
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
mod tests {
    use super::*;
    use crate::oracle::{as_operand, assert_close, assert_same_on_any_threads, bf16_pair, flat, random};
    use candle_core::{D, Device, Var};

    const SHAPES: [(usize, usize, usize); 3] = [(1, 8, 5), (11, 16, 37), (70, 40, 300)];

    /// Returns the output and its sums: loss, trained, correct.
    fn with_gradients(
        h: &Tensor,
        head: &Tensor,
        targets: &[u32],
        options: &CrossEntropyOptions,
    ) -> (CrossEntropyOutput, (f64, usize, usize)) {
        let step_stats = StepStats::new(&Device::Cpu).unwrap();
        let out = forward_backward(h, head, targets, options, &step_stats).unwrap();
        let (sums, trained) = (step_stats.read().unwrap(), out.trained);
        (out, (sums.loss, trained, sums.correct as usize))
    }

    fn without(
        h: &Tensor,
        head: &Tensor,
        targets: &[u32],
        cap: Option<f32>,
        chunk: usize,
    ) -> Result<(f64, usize, usize)> {
        let step_stats = StepStats::new(&Device::Cpu)?;
        let trained = forward_only(h, head, targets, cap, chunk, &step_stats)?;
        let sums = step_stats.read()?;
        Ok((sums.loss, trained, sums.correct as usize))
    }

    fn targets(n: usize, v: usize) -> Vec<u32> {
        (0..n)
            .map(|i| if i % 3 == 1 { IGNORE } else { (i * 7 % v) as u32 })
            .collect()
    }

    /// Returns the log-probabilities of the targets of the trained rows.
    fn composed(h: &Tensor, head: &Tensor, targets: &[u32], cap: Option<f32>) -> Tensor {
        let rows: Vec<u32> = (0..targets.len() as u32)
            .filter(|i| targets[*i as usize] != IGNORE)
            .collect();
        let ids: Vec<u32> = rows.iter().map(|i| targets[*i as usize]).collect();
        let count = rows.len();
        let rows = Tensor::from_vec(rows, count, &Device::Cpu).unwrap();
        let ids = Tensor::from_vec(ids, (count, 1), &Device::Cpu).unwrap();
        let h = h.index_select(&rows, 0).unwrap();
        let mut logits = h.matmul(&head.t().unwrap()).unwrap();
        if let Some(cap) = cap {
            logits = ((logits / cap as f64).unwrap().tanh().unwrap() * cap as f64).unwrap();
        }
        let sum = logits.exp().unwrap().sum_keepdim(D::Minus1).unwrap();
        let log_probs = logits.broadcast_sub(&sum.log().unwrap()).unwrap();
        log_probs.gather(&ids, 1).unwrap().squeeze(1).unwrap()
    }

    #[test]
    fn weights_of_tokens_match_autograd() {
        for (n, d, v) in SHAPES {
            for cap in [None, Some(2.5)] {
                let h = Var::from_tensor(&random((n, d), 1)).unwrap();
                let head = Var::from_tensor(&random((v, d), 2)).unwrap();
                let targets = targets(n, v);
                let weights: Vec<f32> = flat(&random(n, 3));
                let kept: Vec<f32> = (0..n).filter(|i| targets[*i] != IGNORE).map(|i| weights[i]).collect();
                let kept = Tensor::from_vec(kept.clone(), kept.len(), &Device::Cpu).unwrap();
                let log_probs = composed(&h, &head, &targets, cap);
                let loss = (log_probs * kept).unwrap().sum_all().unwrap().neg().unwrap();
                let grads = (loss * 0.25).unwrap().backward().unwrap();
                let options = CrossEntropyOptions {
                    softcap: cap,
                    chunk: 3,
                    scale: 0.25,
                    need_dh: true,
                    need_dw: true,
                    weights: Some(&weights),
                    smoothing: 0.0,
                };
                let (out, _) = with_gradients(&h, &head, &targets, &options);
                assert_close(&out.dh.unwrap(), grads.get(&h).unwrap(), 2e-5);
                assert_close(&out.dw.unwrap(), grads.get(&head).unwrap(), 2e-5);
                let short = CrossEntropyOptions {
                    weights: Some(&weights[1..]),
                    ..options
                };
                let step_stats = StepStats::new(&Device::Cpu).unwrap();
                assert!(forward_backward(&h, head.as_tensor(), &targets, &short, &step_stats).is_err());
            }
        }
    }

    #[test]
    fn matches_autograd() {
        for (n, d, v) in SHAPES {
            for cap in [None, Some(2.5)] {
                for chunk in [1, 4, 1000] {
                    let h = Var::from_tensor(&random((n, d), 1)).unwrap();
                    let head = Var::from_tensor(&random((v, d), 2)).unwrap();
                    let targets = targets(n, v);
                    let log_probs = composed(&h, &head, &targets, cap);
                    let loss = log_probs.sum_all().unwrap().neg().unwrap();
                    let grads = (&loss * 0.25).unwrap().backward().unwrap();
                    let loss = loss.to_scalar::<f32>().unwrap() as f64;
                    let options = CrossEntropyOptions {
                        softcap: cap,
                        chunk,
                        scale: 0.25,
                        need_dh: true,
                        need_dw: true,
                        weights: None,
                        smoothing: 0.0,
                    };
                    let (out, sums) = with_gradients(&h, &head, &targets, &options);
                    assert!((sums.0 - loss).abs() <= 1e-5 * loss, "{} {loss}", sums.0);
                    assert_eq!(sums.1, targets.iter().filter(|t| **t != IGNORE).count());
                    assert_close(&out.dh.unwrap(), grads.get(&h).unwrap(), 1e-5);
                    assert_close(&out.dw.unwrap(), grads.get(&head).unwrap(), 1e-5);
                    assert_eq!(without(&h, &head, &targets, cap, chunk).unwrap(), sums);
                    let got = token_log_probs(&h, head.as_tensor(), &targets, cap, chunk).unwrap();
                    let kept: Vec<f32> = (0..n).filter(|i| targets[*i] != IGNORE).map(|i| got[i]).collect();
                    let kept = Tensor::from_vec(kept, log_probs.dims(), &Device::Cpu).unwrap();
                    assert_close(&kept, &log_probs, 1e-5);
                    assert!((0..n).all(|i| targets[i] != IGNORE || got[i] == 0.0));
                }
            }
        }
    }

    #[test]
    fn only_wanted_gradients() {
        let (h, head) = (random((6, 8), 1), random((9, 8), 2));
        let targets = targets(6, 9);
        let run = |need_dh, need_dw| {
            let options = CrossEntropyOptions {
                softcap: None,
                chunk: 3,
                scale: 1.0,
                need_dh,
                need_dw,
                weights: None,
                smoothing: 0.0,
            };
            let out = with_gradients(&h, &head, &targets, &options).0;
            (out.dh.map(|t| flat(&t)), out.dw.map(|t| flat(&t)))
        };
        let (dh, dw) = run(true, true);
        assert!(dh.is_some() && dw.is_some());
        assert_eq!(run(true, false), (dh, None));
        assert_eq!(run(false, true), (None, dw));
        assert_eq!(run(false, false), (None, None));
    }

    #[test]
    fn counts_hits() {
        // Logits are the rows of h; the target is the maximum in rows 0 and 2, and one of two equal ones in row 3.
        let h = Tensor::new(
            &[[3f32, 1., 2.], [0., 1., 2.], [0., 0., 9.], [4., 4., 0.]],
            &Device::Cpu,
        )
        .unwrap();
        let eye = Tensor::eye(3, candle_core::DType::F32, &Device::Cpu).unwrap();
        let (_, trained, correct) = without(&h, &eye, &[0, 0, 2, 1], None, 3).unwrap();
        assert_eq!((trained, correct), (4, 2));
        assert_eq!(without(&h, &eye, &[0, 0, 2, 0], None, 3).unwrap().2, 3);
    }

    #[test]
    fn bf16_heads_are_used_as_they_are() {
        let (h, (head, wide)) = (random((20, 600), 1), bf16_pair((90, 600), 2));
        let targets = targets(20, 90);
        let options = CrossEntropyOptions {
            softcap: None,
            chunk: 7,
            scale: 1.0,
            need_dh: true,
            need_dw: true,
            weights: None,
            smoothing: 0.0,
        };
        let (out, (loss, ..)) = with_gradients(&h, &head, &targets, &options);
        // The reference uses an f32 head and rounds each operand as a product with a bf16 head does: hidden states,
        // gradients of logits.
        let x = as_operand(&h);
        let want = composed(&x, &wide, &targets, None)
            .sum_all()
            .unwrap()
            .to_scalar::<f32>();
        let want = -f64::from(want.unwrap());
        assert!((loss - want).abs() < 1e-5 * want, "{loss} {want}");
        let logits = x.matmul(&wide.t().unwrap()).unwrap();
        let exp = logits.exp().unwrap();
        let p = exp.broadcast_div(&exp.sum_keepdim(D::Minus1).unwrap()).unwrap();
        let rows = p.to_vec2::<f32>().unwrap();
        let dl = rows.into_iter().zip(&targets).flat_map(|(mut p, target)| {
            match *target {
                IGNORE => p.fill(0.0),
                target => p[target as usize] -= 1.0,
            }
            p
        });
        let dl = Tensor::from_vec(dl.collect::<Vec<f32>>(), (20, 90), &Device::Cpu).unwrap();
        let dl = as_operand(&dl);
        assert_close(&out.dh.unwrap(), &dl.matmul(&wide).unwrap(), 1e-5);
        assert_close(&out.dw.unwrap(), &dl.t().unwrap().matmul(&x).unwrap(), 1e-5);
    }

    #[test]
    fn a_logit_that_is_not_finite_shows_in_the_loss() {
        let head = random((40, 4), 2);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38] {
            for cap in [None, Some(30.0)] {
                let mut data = flat(&random((3, 4), 1));
                data[5] = bad;
                let h = Tensor::from_vec(data, (3, 4), &Device::Cpu).unwrap();
                let (loss, ..) = without(&h, &(&head * 4.0).unwrap(), &[1, 2, 3], cap, 2).unwrap();
                assert!(!loss.is_finite(), "{bad} {cap:?}: {loss}");
                // The ignored row is not evaluated.
                assert!(without(&h, &head, &[1, IGNORE, 3], cap, 2).unwrap().0.is_finite());
            }
        }
    }

    #[test]
    fn nothing_trained_and_targets_outside() {
        let (h, head) = (random((3, 4), 1), random((5, 4), 2));
        let options = CrossEntropyOptions {
            softcap: None,
            chunk: 2,
            scale: 1.0,
            need_dh: true,
            need_dw: true,
            weights: None,
            smoothing: 0.0,
        };
        let (out, sums) = with_gradients(&h, &head, &[IGNORE; 3], &options);
        assert_eq!(sums, (0.0, 0, 0));
        assert!(
            flat(&out.dh.unwrap())
                .iter()
                .chain(&flat(&out.dw.unwrap()))
                .all(|x| *x == 0.0)
        );
        let e = without(&h, &head, &[0, 5, 1], None, 2).unwrap_err();
        assert!(e.to_string().contains("token 1"), "{e}");
        assert!(without(&h, &head, &[0, 1], None, 2).is_err());
    }

    #[test]
    fn bit_equal_on_any_number_of_threads() {
        for (n, d, v) in SHAPES {
            let (h, head) = (random((n, d), 1), bf16_pair((v, d), 2).0);
            let targets = targets(n, v);
            let options = CrossEntropyOptions {
                softcap: Some(9.0),
                chunk: 16,
                scale: 0.1,
                need_dh: true,
                need_dw: true,
                weights: None,
                smoothing: 0.0,
            };
            assert_same_on_any_threads(|| {
                let (out, (loss, ..)) = with_gradients(&h, &head, &targets, &options);
                let loss = Tensor::new(loss as f32, &Device::Cpu).unwrap();
                vec![loss, out.dh.unwrap(), out.dw.unwrap()]
            });
        }
    }
}
