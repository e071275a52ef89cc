//! Distillation from a teacher with another tokenizer: the tokens of both models are grouped to spans that cover the same
//! bytes, and the distributions at the last token of a span are compared.
//!
//! Letters: N tokens, D and V hidden size and vocabulary of the student, Nt, Dt and Vt those of the teacher; c tokens of a
//! chunk.
//!
//! The distribution of a span is `q(v) = Π p(earlier token of the span) · p_last(v)`, by the chain rule: the probability
//! that the span continues with its earlier tokens and ends with v. The loss of a span is
//!
//! - `Comparison::Sorted`: the sum of |q - p| over both distributions in descending order (ULD, Boizard et al. 2024, arXiv
//!   2402.12030, equation 5);
//! - `Comparison::Matched`: with m the share of the teacher's ids that the student has too, m · the generalized
//!   Jensen-Shannon divergence over these ids + (1 - m) · the sorted distance over all others (GOLD; the loss of
//!   `GOLDTrainer` of TRL with `uld_token_merge_strategy = "bayesian"`).
//!
//! A span counts as many times as it has tokens of the student, so that the loss stays a mean over tokens. Logits are
//! computed on the device, and compared on the host: a distribution is sorted as a whole.

use super::{DistillOptions, DistillOutput, DistillSide, HeadMatrix, check_temperature, trained};
use crate::linear;
use crate::step_stats::{StepStats, StepSums};
use crate::update::to_f32_vec;
use candle_core::{DType, Tensor};
use ft_base::{Error, IGNORE, Result};
use rayon::prelude::*;
use std::ops::Range;

/// The least probability, as in TRL.
const LEAST: f32 = 1e-8;

/// Rows of hidden states of both models whose next tokens cover the same bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AlignedSpan {
    /// Rows of the student.
    pub student: Range<usize>,
    /// Rows of the teacher.
    pub teacher: Range<usize>,
}

/// Ids of both vocabularies that stand for the same text.
#[derive(Debug, Clone, Default)]
pub struct SharedIds {
    /// `(student, teacher)`: each id once.
    pub pairs: Vec<(u32, u32)>,
}

/// How two distributions over different vocabularies are compared.
#[derive(Debug, Clone, Copy)]
pub enum Comparison<'a> {
    /// By rank.
    Sorted,
    /// By id where both have it, else by rank.
    Matched(&'a SharedIds),
}

/// The options of the loss.
#[derive(Debug, Clone)]
pub struct AlignedOptions<'a> {
    /// The comparison of a span.
    pub comparison: Comparison<'a>,
    /// As for teachers with the same tokens. `beta` is that of the divergence of `Comparison::Matched`, `alpha` weighs the
    /// cross-entropy against the distance, and `chunk` counts tokens of the student.
    pub common: DistillOptions,
}

/// A span, or a trained token outside of all spans.
struct AlignedUnit {
    student: Range<usize>,
    teacher: Range<usize>,
}

/// Membership of ids in the shared part.
struct Masks<'a> {
    pairs: &'a [(u32, u32)],
    /// Ids that only one of them has.
    student: Vec<u32>,
    teacher: Vec<u32>,
}

/// Loss and gradients; `targets` `[N]` and `teacher_targets` `[Nt]` hold the next ids. `spans` are in order and do not
/// overlap. Adds to `step_stats` as `forward_backward` does.
///
/// # Errors
/// Shapes that do not fit, spans outside of the trained tokens, settings out of range.
pub fn forward_backward(
    student: &DistillSide,
    teacher: &DistillSide,
    targets: &[u32],
    teacher_targets: &[u32],
    spans: &[AlignedSpan],
    options: &AlignedOptions,
    step_stats: &StepStats,
) -> Result<DistillOutput> {
    let n = targets.len();
    let (v, d) = student.check(n, "student")?;
    let (vt, _) = teacher.check(teacher_targets.len(), "teacher")?;
    let chosen = trained(targets, v)?;
    trained(teacher_targets, vt)?;
    check_temperature(options.common.temperature)?;
    for (what, value) in [("beta", options.common.beta), ("alpha", options.common.alpha)] {
        if !(0.0..=1.0).contains(&value) {
            return Err(Error::argument(format!("`{what}` of a distillation is out of range"))
                .found(value)
                .expected("0 to 1"));
        }
    }
    if options.common.need_dw && student.in_parts() {
        return Err(Error::unsupported(
            "an output head that is read in parts cannot be trained",
        ));
    }
    let units = units(spans, targets, teacher_targets, &chosen)?;
    let masks = masks(options.comparison, v, vt)?;
    let device = student.h.device();
    let mut out = DistillOutput {
        trained: chosen.len(),
        divergence: 0.0,
        cross_entropy: 0.0,
        dh: None,
        dw: match (options.common.need_dw, &student.head) {
            (true, HeadMatrix::Whole(_)) => Some(Tensor::zeros((v, d), DType::F32, device)?),
            _ => None,
        },
    };
    let (mut sums, mut gradients, mut rest) = (StepSums::default(), Vec::new(), &units[..]);
    while !rest.is_empty() {
        // A span is not cut.
        let mut count = 0;
        let fits = |u: &&AlignedUnit| {
            count += u.student.len().max(u.teacher.len());
            count <= options.common.chunk.max(1)
        };
        let (now, later) = rest.split_at(rest.iter().take_while(fits).count().max(1));
        rest = later;
        let rows = |of: fn(&AlignedUnit) -> &Range<usize>| -> Vec<u32> {
            now.iter().flat_map(|u| of(u).clone()).map(|r| r as u32).collect()
        };
        let (own, theirs) = (rows(|u| &u.student), rows(|u| &u.teacher));
        let h = pick(student.h, &own)?;
        let mut z = logits(&h, student, v)?;
        let t = if theirs.is_empty() {
            Vec::new()
        } else {
            logits(&pick(teacher.h, &theirs)?, teacher, vt)?
        };
        let mut jobs = Vec::new();
        let (mut left, mut taken) = (&mut z[..], 0);
        for unit in now {
            let (mine, others) = left.split_at_mut(unit.student.len() * v);
            let count = unit.teacher.len();
            jobs.push((unit, mine, &t[taken * vt..(taken + count) * vt]));
            (left, taken) = (others, taken + count);
        }
        let softcap = student.softcap;
        let losses: Vec<Losses> = jobs
            .into_par_iter()
            .map(|(unit, z, t)| {
                let own = UnitLogits {
                    logits: z,
                    ids: &targets[unit.student.clone()],
                    v,
                };
                let theirs = UnitLogits {
                    logits: t,
                    ids: &teacher_targets[unit.teacher.clone()],
                    v: vt,
                };
                compare(own, theirs, softcap, masks.as_ref(), options)
            })
            .collect();
        for l in losses {
            out.divergence += l.distance;
            out.cross_entropy += l.cross_entropy;
            sums.loss +=
                options.common.alpha as f64 * l.cross_entropy + (1.0 - options.common.alpha as f64) * l.distance;
            sums.correct += l.correct;
        }
        if !(options.common.need_dh || options.common.need_dw) {
            continue;
        }
        let g = Tensor::from_vec(z, (own.len(), v), device)?.to_dtype(h.dtype())?;
        if let (Some(dw), HeadMatrix::Whole(head)) = (&out.dw, student.head) {
            linear::grad_weight_add(dw, &g, &h, head.dtype())?;
        }
        if options.common.need_dh {
            gradients.push(match student.head {
                HeadMatrix::Whole(head) => linear::backward_input(&g, head)?,
                HeadMatrix::Parts(parts) => {
                    let mut dh: Option<Tensor> = None;
                    parts.each(|first, part| {
                        let g = g.narrow(1, first, part.dim(0)?)?.contiguous()?;
                        let own = linear::backward_input(&g, part)?;
                        dh = Some(match dh.take() {
                            Some(sum) => (sum + own)?,
                            None => own,
                        });
                        Ok(())
                    })?;
                    dh.ok_or_else(|| Error::internal("the output head has no parts"))?
                }
            });
        }
    }
    step_stats.add(sums);
    if options.common.need_dh {
        // A row of zeros is the gradient of all tokens that are not trained.
        gradients.push(Tensor::zeros((1, d), student.h.dtype(), device)?);
        let mut from = vec![chosen.len() as u32; n];
        let order = units.iter().flat_map(|u| u.student.clone());
        order.zip(0..).for_each(|(n, i)| from[n] = i);
        let from = Tensor::from_vec(from, n, device)?;
        out.dh = Some(Tensor::cat(&gradients, 0)?.index_select(&from, 0)?.contiguous()?);
    }
    Ok(out)
}

/// The spans, and the trained tokens between them.
///
/// Errors: a span contains a token that is not trained; spans overlap or are not in order.
fn units(
    spans: &[AlignedSpan],
    targets: &[u32],
    teacher_targets: &[u32],
    chosen: &[usize],
) -> Result<Vec<AlignedUnit>> {
    let (mut out, mut next, mut after): (Vec<AlignedUnit>, usize, usize) = (Vec::new(), 0, 0);
    let single = |n: usize| AlignedUnit {
        student: n..n + 1,
        teacher: 0..0,
    };
    for span in spans {
        let good = |range: &Range<usize>, ids: &[u32]| {
            !range.is_empty() && range.end <= ids.len() && ids[range.clone()].iter().all(|id| *id != IGNORE)
        };
        if !good(&span.student, targets) || !good(&span.teacher, teacher_targets) || span.student.start < after {
            return Err(
                Error::argument("spans overlap, are out of order, or contain an untrained token")
                    .found(format!("{span:?}"))
                    .expected("spans of trained tokens, in order"),
            );
        }
        while chosen.get(next).is_some_and(|n| *n < span.student.start) {
            out.push(single(chosen[next]));
            next += 1;
        }
        next += span.student.len();
        after = span.student.end;
        out.push(AlignedUnit {
            student: span.student.clone(),
            teacher: span.teacher.clone(),
        });
    }
    out.extend(chosen.iter().skip(next).map(|n| single(*n)));
    Ok(out)
}

fn masks<'a>(comparison: Comparison<'a>, v: usize, vt: usize) -> Result<Option<Masks<'a>>> {
    let Comparison::Matched(shared) = comparison else {
        return Ok(None);
    };
    let (mut own, mut theirs) = (vec![true; v], vec![true; vt]);
    for &(s, t) in &shared.pairs {
        let (Some(s), Some(t)) = (own.get_mut(s as usize), theirs.get_mut(t as usize)) else {
            return Err(Error::argument("a shared id is outside of a vocabulary")
                .found(format!("{s} and {t}"))
                .expected(format!("below {v} and {vt}")));
        };
        if !(std::mem::take(s) && std::mem::take(t)) {
            return Err(Error::argument("a shared id appears twice"));
        }
    }
    let ids = |mask: Vec<bool>| (0..mask.len() as u32).filter(|i| mask[*i as usize]).collect();
    Ok(Some(Masks {
        pairs: &shared.pairs,
        student: ids(own),
        teacher: ids(theirs),
    }))
}

fn pick(h: &Tensor, rows: &[u32]) -> Result<Tensor> {
    let rows = Tensor::from_slice(rows, rows.len(), h.device())?;
    Ok(h.index_select(&rows, 0)?.contiguous()?)
}

/// The logits with softcap on the host, `[c, V]`.
fn logits(h: &Tensor, side: &DistillSide, v: usize) -> Result<Vec<f32>> {
    let product = |head: &Tensor| -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if h.device().is_cuda() && h.dtype() != DType::F32 {
            return crate::cuda::linear::forward_f32(h, head);
        }
        linear::forward(h, head, None)
    };
    let mut z = match side.head {
        HeadMatrix::Whole(head) => to_f32_vec(&product(head)?)?,
        HeadMatrix::Parts(parts) => {
            let c = h.dim(0)?;
            let mut z = vec![0f32; c * v];
            parts.each(|first, part| {
                let count = part.dim(0)?;
                let values = to_f32_vec(&product(part)?)?;
                for (row, values) in z.chunks_mut(v).zip(values.chunks(count)) {
                    row[first..first + count].copy_from_slice(values);
                }
                Ok(())
            })?;
            z
        }
    };
    if let Some(cap) = side.softcap {
        z.par_iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
    }
    Ok(z)
}

#[derive(Default)]
struct Losses {
    distance: f64,
    cross_entropy: f64,
    correct: f64,
}

/// Probabilities of one row of logits.
fn softmax(z: &[f32], temperature: f32) -> Vec<f32> {
    let largest = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut p: Vec<f32> = z.iter().map(|x| ((x - largest) / temperature).exp()).collect();
    let sum = p.iter().map(|x| f64::from(*x)).sum::<f64>();
    p.iter_mut().for_each(|x| *x = (f64::from(*x) / sum) as f32);
    p
}

/// The probability of the earlier tokens of a span, and the distribution at its last one.
fn merged(z: &[f32], ids: &[u32], v: usize, temperature: f32) -> (f32, Vec<f32>) {
    let mut rows = z.chunks(v).map(|row| softmax(row, temperature));
    let mut factor = 1.0;
    let mut last = rows.next().unwrap_or_default();
    for (next, id) in rows.zip(ids) {
        factor *= last[*id as usize].max(LEAST);
        last = next;
    }
    (factor, last)
}

/// The tokens of a unit in one of the models.
struct UnitLogits<'a, Z> {
    /// `[n, V]`
    logits: Z,
    /// The tokens, `[n]`.
    ids: &'a [u32],
    /// V: size of the vocabulary.
    v: usize,
}

/// Losses of a unit; replaces the student's logits by their gradients.
fn compare(
    student: UnitLogits<'_, &mut [f32]>,
    teacher: UnitLogits<'_, &[f32]>,
    softcap: Option<f32>,
    masks: Option<&Masks>,
    o: &AlignedOptions,
) -> Losses {
    let UnitLogits { logits: z, ids, v } = student;
    let UnitLogits {
        logits: t,
        ids: teacher_ids,
        v: vt,
    } = teacher;
    let mut out = Losses::default();
    let tokens = ids.len() as f64;
    // Gradients of the distance at the logits, without the weight of the span.
    let mut slopes: Vec<Vec<f32>> = Vec::new();
    if !teacher_ids.is_empty() {
        let (factor, last) = merged(z, ids, v, o.common.temperature);
        let (teacher_factor, teacher) = merged(t, teacher_ids, vt, o.common.temperature);
        let q: Vec<f32> = last.iter().map(|x| x * factor).collect();
        let p: Vec<f32> = teacher.iter().map(|x| x * teacher_factor).collect();
        let mut g = vec![0f32; v];
        let distance = match masks {
            None => sorted(&q, &p, 0..v as u32, 0..vt as u32, 1.0, &mut g),
            Some(masks) => {
                let share = masks.pairs.len() as f32 / vt.max(1) as f32;
                let mut sum = share as f64 * matched(&q, &p, masks.pairs, o.common.beta, share, &mut g);
                if !masks.student.is_empty() && !masks.teacher.is_empty() {
                    let (own, theirs) = (masks.student.iter().copied(), masks.teacher.iter().copied());
                    sum += f64::from(1.0 - share) * sorted(&q, &p, own, theirs, 1.0 - share, &mut g);
                }
                sum
            }
        };
        out.distance = tokens * distance;
        // d distance / d ln factor.
        let along = g
            .iter()
            .zip(&q)
            .map(|(g, q)| f64::from(*g) * f64::from(*q))
            .sum::<f64>() as f32;
        for (row, id) in z.chunks(v).take(ids.len() - 1).zip(ids) {
            let mut slope = softmax(row, o.common.temperature);
            let clamped = slope[*id as usize] < LEAST;
            slope.iter_mut().for_each(|p| *p *= -along);
            slope[*id as usize] += along;
            if clamped {
                slope.fill(0.0);
            }
            slopes.push(slope);
        }
        slopes.push(
            q.iter()
                .zip(&last)
                .zip(&g)
                .map(|((q, p), g)| q * g - p * along)
                .collect(),
        );
    }
    let weight = (1.0 - o.common.alpha) * tokens as f32 / o.common.temperature;
    for (i, (row, id)) in z.chunks_mut(v).zip(ids).enumerate() {
        let hard = softmax(row, 1.0);
        out.cross_entropy -= log_probability(row, *id as usize);
        let best = row.iter().enumerate().fold(
            (0, f32::NEG_INFINITY),
            |best, (i, x)| {
                if *x > best.1 { (i, *x) } else { best }
            },
        );
        out.correct += f64::from(u8::from(best.0 == *id as usize));
        for (j, x) in row.iter_mut().enumerate() {
            let mut slope = slopes.get(i).map_or(0.0, |s| weight * s[j]);
            slope += o.common.alpha * (hard[j] - f32::from(u8::from(j == *id as usize)));
            if let Some(cap) = softcap {
                slope *= 1.0 - (*x / cap).powi(2);
            }
            *x = slope * o.common.scale as f32;
        }
    }
    out
}

fn log_probability(z: &[f32], id: usize) -> f64 {
    let largest = f64::from(z.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum = z.iter().map(|x| (f64::from(*x) - largest).exp()).sum::<f64>();
    f64::from(z[id]) - largest - sum.ln()
}

/// The sum of |q - p| in descending order over these ids; adds `weight` times the slopes to `g`.
fn sorted(
    q: &[f32],
    p: &[f32],
    own: impl Iterator<Item = u32>,
    theirs: impl Iterator<Item = u32>,
    weight: f32,
    g: &mut [f32],
) -> f64 {
    // Probabilities are not negative: their bits have the order of the numbers.
    let key = |x: f32, id: u32| (u64::from(!x.to_bits()) << 32) | u64::from(id);
    let mut own: Vec<u64> = own.map(|id| key(q[id as usize], id)).collect();
    let mut theirs: Vec<u64> = theirs.map(|id| key(p[id as usize], id)).collect();
    own.sort_unstable();
    theirs.sort_unstable();
    let mut sum = 0.0;
    for rank in 0..own.len().max(theirs.len()) {
        let id = own.get(rank).map(|k| *k as u32 as usize);
        let a = id.map_or(0.0, |id| q[id]);
        let b = theirs.get(rank).map_or(0.0, |k| p[*k as u32 as usize]);
        sum += f64::from((a - b).abs());
        if let Some(id) = id
            && a != b
        {
            g[id] += weight * (a - b).signum();
        }
    }
    sum
}

/// The generalized Jensen-Shannon divergence over shared ids; adds `weight` times the slopes to `g`.
fn matched(q: &[f32], p: &[f32], pairs: &[(u32, u32)], beta: f32, weight: f32, g: &mut [f32]) -> f64 {
    let mut sum = 0.0;
    let b = f64::from(beta);
    for &(s, t) in pairs {
        let raw = q[s as usize];
        let (q, p) = (f64::from(raw.max(LEAST)), f64::from(p[t as usize].max(LEAST)));
        let (lq, lp) = (q.ln(), p.ln());
        let (loss, slope) = match beta {
            0.0 => (p * (lp - lq), -p / q),
            1.0 => (q * (lq - lp), lq - lp + 1.0),
            _ => {
                let lm = ((1.0 - b) * q + b * p).ln();
                (b * p * (lp - lm) + (1.0 - b) * q * (lq - lm), (1.0 - b) * (lq - lm))
            }
        };
        sum += loss;
        if raw >= LEAST {
            g[s as usize] += weight * slope as f32;
        }
    }
    sum
}

#[cfg(test)]
mod tests;
