//! The divergences of the module above, composed of tensor operations, for tensors on a GPU. Heads must be in
//! memory as a whole. Sums are copied to the host after every chunk. It also runs on the CPU, where tests compare
//! it with the fused form.
//!
//! Letters as in the module above; c tokens of a chunk.

use super::{Matrix, Options, Output, Side, Teacher, TopK, cpu};
use crate::linear;
use crate::step_stats::{StepStats, StepSums};
use crate::update::{self, to_f32_vec};
use candle_core::{D, DType, Tensor};
use ft_base::{Error, Result};

/// The hidden states h of one model, and its head.
struct Here<'a> {
    h: &'a Tensor,
    head: &'a Tensor,
    cap: Option<f32>,
}

impl<'a> Here<'a> {
    fn new(side: &Side<'a>) -> Result<Self> {
        match side.head {
            Matrix::Whole(head) => Ok(Self {
                h: side.h,
                head,
                cap: side.softcap,
            }),
            Matrix::Parts(_) => Err(Error::unsupported(
                "distillation on a GPU needs the full output heads in GPU memory",
            )
            .hint("keep the whole output heads in GPU memory, or compute on the CPU")),
        }
    }

    fn rows(&self, rows: &Tensor) -> Result<Tensor> {
        Ok(self.h.index_select(rows, 0)?.contiguous()?)
    }

    /// Computes the logits with softcap, `[c, V]` f32.
    fn logits(&self, rows: &Tensor) -> Result<Tensor> {
        let logits = logits(rows, self.head)?;
        match self.cap {
            Some(cap) => Ok(((logits / cap as f64)?.tanh()? * cap as f64)?),
            None => Ok(logits),
        }
    }
}

/// Computes `h [c, D] · headᵀ` in f32 for any type of h.
fn logits(h: &Tensor, head: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if h.device().is_cuda() && h.dtype() != DType::F32 {
        return crate::cuda::linear::forward_f32(h, head);
    }
    linear::forward(h, head, None)
}

fn log_softmax(logits: &Tensor) -> Result<Tensor> {
    let x = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)?;
    let sum = x.exp()?.sum_keepdim(D::Minus1)?.log()?;
    Ok(x.broadcast_sub(&sum)?)
}

/// Computes `ln((1 - beta) q + beta p)`.
fn ln_mixture(lq: &Tensor, lp: &Tensor, beta: f64) -> Result<Tensor> {
    let (a, b) = ((lq + (1.0 - beta).ln())?, (lp + beta.ln())?);
    let small = (&a - &b)?.abs()?.neg()?.exp()?;
    Ok((a.maximum(&b)? + (small + 1.0)?.log()?)?)
}

/// For each outcome: its part of the loss, its part of the sum k, and the slope divided by q before k is subtracted.
struct Outcomes {
    loss: Tensor,
    k: Option<Tensor>,
    slope: Tensor,
}

/// Computes the outcomes from `lq`, `lp` `[c, outcomes]`.
fn outcomes(lq: &Tensor, lp: &Tensor, beta: f64) -> Result<Outcomes> {
    let (q, p) = (lq.exp()?, lp.exp()?);
    if beta == 0.0 {
        let difference = (lp - lq)?;
        return Ok(Outcomes {
            loss: (&p * &difference)?,
            k: None,
            slope: (1.0 - difference.exp()?)?,
        });
    }
    if beta == 1.0 {
        let difference = (lq - lp)?;
        let k = (&q * &difference)?;
        return Ok(Outcomes {
            loss: k.clone(),
            k: Some(k),
            slope: difference,
        });
    }
    let lm = ln_mixture(lq, lp, beta)?;
    let difference = (lq - &lm)?;
    let k = (&q * &difference)?;
    let loss = (((lp - &lm)? * p)? * beta)?;
    Ok(Outcomes {
        loss: (loss + (&k * (1.0 - beta))?)?,
        k: Some(k),
        slope: difference,
    })
}

/// Returns the divergence of each token `[c]`, and its slope with respect to the common logits / T, `[c, C]`.
fn live(lq: &Tensor, lp: &Tensor, beta: f64) -> Result<(Tensor, Tensor)> {
    let all = outcomes(lq, lp, beta)?;
    let divergence = all.loss.sum(D::Minus1)?;
    let slope = match &all.k {
        // q (1 - p / q) would lose a small q to rounding.
        None => (lq.exp()? - lp.exp()?)?,
        Some(k) => (lq.exp()? * all.slope.broadcast_sub(&k.sum_keepdim(D::Minus1)?)?)?,
    };
    let share = if beta == 0.0 || beta == 1.0 { 1.0 } else { 1.0 - beta };
    Ok((divergence, (slope * share)?))
}

/// As `live`, with a stored teacher: `ids`, `lp` `[c, k]`, `rest` `[c, 1]`; `others`: true if there are ids outside
/// `ids`.
fn stored(
    lq: &Tensor,
    (ids, lp, rest): (&Tensor, &Tensor, &Tensor),
    others: bool,
    beta: f64,
) -> Result<(Tensor, Tensor)> {
    let own = lq.gather(ids, 1)?;
    let mut all = outcomes(&own, lp, beta)?;
    let mut other = None;
    if others {
        // Adds a large negative number, so that the stored ids vanish from the sum.
        let gone = own.ones_like()?.affine(-1e9, 0.0)?;
        let left = lq.scatter_add(ids, &gone, 1)?.exp()?.sum_keepdim(D::Minus1)?;
        let o = outcomes(&left.log()?, rest, beta)?;
        all.loss = Tensor::cat(&[&all.loss, &o.loss], 1)?;
        all.k = match (&all.k, &o.k) {
            (Some(a), Some(b)) => Some(Tensor::cat(&[a, b], 1)?),
            _ => None,
        };
        other = Some(o.slope);
    }
    let divergence = all.loss.sum(D::Minus1)?;
    let (mut slope, q) = (all.slope, lq.exp()?);
    let mut base = q.zeros_like()?;
    if let Some(k) = &all.k {
        let k = k.sum_keepdim(D::Minus1)?;
        slope = slope.broadcast_sub(&k)?;
        other = other.map(|o| o.broadcast_sub(&k)).transpose()?;
    }
    if let Some(other) = other {
        base = q.broadcast_mul(&other)?;
    }
    let change = ((own.exp()? * slope)? - base.gather(ids, 1)?)?;
    let share = if beta == 0.0 || beta == 1.0 { 1.0 } else { 1.0 - beta };
    Ok((divergence, (base.scatter_add(ids, &change, 1)? * share)?))
}

/// As the function of the same name above, after its checks.
pub(super) fn forward_backward(
    student: &Side,
    teacher: &Teacher,
    targets: &[u32],
    trained: &[usize],
    common: usize,
    options: &Options,
    step_stats: &StepStats,
) -> Result<Output> {
    let own = Here::new(student)?;
    let theirs = match teacher {
        Teacher::Live(side) => Some(Here::new(side)?),
        Teacher::Stored { .. } => None,
    };
    let (device, (n, d)) = (own.h.device(), own.h.dims2()?);
    let v = own.head.dim(0)?;
    let (alpha, beta, inverse) = (
        options.alpha as f64,
        options.beta as f64,
        1.0 / options.temperature as f64,
    );
    let mut out = Output {
        trained: trained.len(),
        divergence: 0.0,
        cross_entropy: 0.0,
        dh: None,
        dw: options
            .need_dw
            .then(|| update::zeros((v, d), DType::F32, device))
            .transpose()?,
    };
    let (mut sums, mut gradients) = (StepSums::default(), Vec::new());
    let chunk = options.chunk.max(1);
    for (index, tokens) in trained.chunks(chunk).enumerate() {
        let (c, first) = (tokens.len(), index * chunk);
        let rows: Vec<u32> = tokens.iter().map(|n| *n as u32).collect();
        let rows = Tensor::from_vec(rows, c, device)?;
        let ids: Vec<u32> = tokens.iter().map(|n| targets[*n]).collect();
        let goal = Tensor::from_vec(ids.clone(), (c, 1), device)?;
        let h = own.rows(&rows)?;
        let z = own.logits(&h)?;
        let hard = log_softmax(&z)?;
        let lq = log_softmax(&(z.narrow(1, 0, common)?.contiguous()? * inverse)?)?;
        let (divergence, slope) = match (teacher, &theirs) {
            (Teacher::Stored { top, .. }, _) => {
                let part = first * top.k..(first + c) * top.k;
                let shape = (c, top.k);
                let ids = Tensor::from_slice(&top.ids[part.clone()], shape, device)?;
                let lp = Tensor::from_slice(&top.log_probs[part], shape, device)?;
                let rest = Tensor::from_slice(&top.rest[first..first + c], (c, 1), device)?;
                stored(&lq, (&ids, &lp, &rest), top.k < common, beta)?
            }
            (_, Some(theirs)) => {
                let t = theirs.logits(&theirs.rows(&rows)?)?;
                let lp = log_softmax(&(t.narrow(1, 0, common)?.contiguous()? * inverse)?)?;
                live(&lq, &lp, beta)?
            }
            _ => return Err(Error::internal("the teacher is missing")),
        };
        let losses = hard.gather(&goal, 1)?.neg()?;
        let (divergence, losses) = (to_f32_vec(&divergence)?, to_f32_vec(&losses.flatten_all()?)?);
        let best = z.argmax(D::Minus1)?.to_vec1::<u32>()?;
        for ((divergence, loss), hit) in divergence.iter().zip(&losses).zip(best.iter().zip(&ids)) {
            out.divergence += *divergence as f64;
            out.cross_entropy += *loss as f64;
            sums.loss += alpha * *loss as f64 + (1.0 - alpha) * *divergence as f64;
            sums.correct += f64::from(hit.0 == hit.1);
        }
        if !(options.need_dh || options.need_dw) {
            continue;
        }
        let mut g = (slope * ((1.0 - alpha) * inverse))?;
        if common < v {
            g = g.pad_with_zeros(1, 0, v - common)?;
        }
        if alpha != 0.0 {
            let minus = Tensor::new(-1f32, device)?.broadcast_as((c, 1))?.contiguous()?;
            let difference = hard.exp()?.scatter_add(&goal, &minus, 1)?;
            g = (g + (difference * alpha)?)?;
        }
        if let Some(cap) = student.softcap {
            let t = (&z / cap as f64)?;
            g = (g * (1.0 - t.sqr()?)?)?;
        }
        let g = (g * options.scale)?.to_dtype(own.h.dtype())?.contiguous()?;
        if let Some(dw) = &out.dw {
            linear::grad_weight_add(dw, &g, &h, own.head.dtype())?;
        }
        if options.need_dh {
            gradients.push(linear::backward_input(&g, own.head)?);
        }
    }
    step_stats.add(sums);
    if options.need_dh {
        // A row of zeros is the gradient of all tokens that are not trained.
        gradients.push(update::zeros((1, d), own.h.dtype(), device)?);
        let mut from = vec![trained.len() as u32; n];
        trained.iter().zip(0..).for_each(|(n, i)| from[*n] = i);
        let from = Tensor::from_vec(from, n, device)?;
        out.dh = Some(Tensor::cat(&gradients, 0)?.index_select(&from, 0)?.contiguous()?);
    }
    Ok(out)
}

/// As the function of the same name above; the host selects from the logits.
pub(super) fn likeliest(
    side: &Side,
    chosen: &[usize],
    common: usize,
    k: usize,
    temperature: f32,
    chunk: usize,
) -> Result<TopK> {
    let here = Here::new(side)?;
    let mut found = cpu::TopLogProbs::default();
    for tokens in chosen.chunks(chunk.max(1)) {
        let rows: Vec<u32> = tokens.iter().map(|n| *n as u32).collect();
        let rows = here.rows(&Tensor::from_vec(rows, tokens.len(), here.h.device())?)?;
        let logits = here.logits(&rows)?.narrow(1, 0, common)?.contiguous()?;
        let mut selection = cpu::Selection::new(tokens.len(), common, k, temperature, 0.0);
        selection.survey(0, &mut to_f32_vec(&logits)?, 0, common);
        selection.finish(&mut found);
    }
    Ok(TopK {
        k: k.min(common),
        ids: found.ids,
        log_probs: found.log_probs,
        rest: found.rest,
    })
}
