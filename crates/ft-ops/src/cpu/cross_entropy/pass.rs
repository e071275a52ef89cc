//! One pass over the vocabulary, for the losses and for all gradients.
//!
//! The gradient of a hidden state is `Σ p(v) w(v) - w(target)`, where `w(v)` is a row of the head and p the softmax. The sum is
//! accumulated piece by piece from `e^(logit - m) w(v)`, where m is the largest logit so far; when m grows, the sum is scaled (the
//! online softmax, Milakov and Gimelshein 2018, arXiv 1805.02867, section 3, as in FlashAttention). So each piece of the head is read
//! once, and logits exist for one piece. The target is left out of the sum and added last in f32, with the factor p - 1: rounded to
//! bf16, a p near 1 would lose it.

use super::kernels::{combine, scale as scale_slice, slope};
use super::losses::{GroupLosses, RowExpSum, TokenLoss};
use super::{LogitsSizes, PIECE, back, gather, inside, multiply, pieces};
use crate::cpu::product::{CInit, Matrix, Rounding, WeightRows, product};
use crate::cpu::storage::{StoredElements, unwritten};
use rayon::prelude::*;

/// Inputs of a pass, for a group of tokens.
pub(crate) struct PassSettings<'a> {
    /// D: elements of a hidden state.
    pub d: usize,
    /// V: rows of the head.
    pub v: usize,
    /// 0: no softcap.
    pub cap: f32,
    /// See `CrossEntropyOptions::smoothing`.
    pub smoothing: f32,
    /// Tokens whose logits are computed at a time.
    pub chunk: usize,
    /// `[N]`: factors of the gradients of the tokens.
    pub weights: Option<&'a [f32]>,
    /// Compute the gradient of the hidden states.
    pub need_dh: bool,
    /// Keep what the gradient of the head needs: `V` values for each token.
    pub need_dw: bool,
}

/// The state of a pass.
pub(crate) struct VocabularyPass {
    /// `[tokens, D]`
    h: Vec<f32>,
    losses: GroupLosses,
    /// Factor of each token's gradient; empty: 1.
    weights: Vec<f32>,
    /// Logits of a chunk and a piece; with `need_dw` of all tokens and pieces, one piece after the other.
    logits: Vec<f32>,
    slopes: Slopes,
    hidden: Option<HiddenSums>,
    chunk: usize,
    d: usize,
    need_dw: bool,
}

/// The factors of the gradient's even part with label smoothing: the slopes of the cap at the logits.
enum Slopes {
    /// No smoothing, or no gradient.
    None,
    /// No cap: one row of ones.
    Ones(Vec<f32>),
    /// Laid out as the logits.
    Capped(Vec<f32>),
}

/// Sums over the vocabulary for the gradient of the hidden states.
struct HiddenSums {
    /// `[tokens, D]`: `Σ e^(logit - m) slope w(v)` without the target.
    sums: Vec<f32>,
    /// `[tokens, D]`: w(target).
    targets: Vec<f32>,
    /// With label smoothing, `Σ slope w(v)`: `[tokens, D]`, without a cap `[1, D]`; else empty.
    even: Vec<f32>,
}

/// Factors of a token's gradient.
#[derive(Clone, Copy)]
struct TokenFactors {
    /// The largest logit.
    max: f32,
    /// Of `e^(logit - max) slope`.
    exp: f32,
    /// Of the slope.
    even: f32,
    /// Of the target, in place of `exp`.
    target: f32,
}

impl VocabularyPass {
    /// Takes the tokens `trained` of `h` `[N, D]`; `targets` `[N]`.
    pub(crate) fn new(h: &[f32], targets: &[u32], trained: &[usize], settings: &PassSettings) -> Self {
        let PassSettings { d, v, cap, .. } = *settings;
        let tokens = trained.len();
        let chunk = if settings.need_dw {
            tokens
        } else {
            settings.chunk.min(tokens)
        }
        .max(1);
        let len = chunk * if settings.need_dw { v } else { PIECE.min(v) };
        let smooths = settings.smoothing != 0.0 && (settings.need_dh || settings.need_dw);
        let (slopes, even) = match (smooths, cap == 0.0) {
            (false, _) => (Slopes::None, 0),
            (true, true) => (Slopes::Ones(vec![1.0; PIECE.min(v)]), d),
            (true, false) => (Slopes::Capped(unwritten(len)), tokens * d),
        };
        let hidden = settings.need_dh.then(|| HiddenSums {
            sums: unwritten(tokens * d),
            targets: unwritten(tokens * d),
            even: unwritten(even),
        });
        let targets = trained.iter().map(|n| targets[*n]).collect();
        Self {
            h: gather(h, trained, d),
            losses: GroupLosses::new(targets, v, cap, settings.smoothing),
            weights: (settings.weights).map_or_else(Vec::new, |w| trained.iter().map(|n| w[*n]).collect()),
            logits: unwritten(len),
            slopes,
            hidden,
            chunk,
            d,
            need_dw: settings.need_dw,
        }
    }

    /// Processes rows of the head from row `first` on. The rows come in order, in parts of whole pieces.
    pub(crate) fn add(&mut self, head: WeightRows<'_>, first: usize) {
        let (d, tokens) = (self.d, self.losses.targets.len());
        for (at, width) in pieces(head.count()) {
            let head = head.part(at, width);
            let first = first + at;
            for start in (0..tokens).step_by(self.chunk) {
                let count = self.chunk.min(tokens - start);
                let place = if self.need_dw { count * first } else { 0 };
                let logits = &mut self.logits[place..][..count * width];
                let sizes = LogitsSizes { count, width, d };
                multiply(&self.h[start * d..][..count * d], head, sizes, logits);
                if self.hidden.is_none() && !self.need_dw {
                    self.losses.add(start, logits, (first, width));
                    continue;
                }
                let slopes = match &mut self.slopes {
                    Slopes::Capped(slopes) => &mut slopes[place..][..count * width],
                    _ => &mut [],
                };
                self.losses.add_and_replace(start, logits, slopes, (first, width));
                let Some(hidden) = &mut self.hidden else { continue };
                hidden.prepare(&self.losses, head, (start, count), (first, width), d);
                back(logits, head, sizes, first, &mut hidden.sums[start * d..][..count * d]);
                match &self.slopes {
                    Slopes::Capped(slopes) => {
                        let slopes = &slopes[place..][..count * width];
                        back(slopes, head, sizes, first, &mut hidden.even[start * d..][..count * d]);
                    }
                    // The same for all tokens.
                    Slopes::Ones(ones) if start == 0 => {
                        let one = LogitsSizes { count: 1, ..sizes };
                        back(&ones[..width], head, one, first, &mut hidden.even);
                    }
                    _ => {}
                }
            }
        }
    }

    /// Returns the result of every token, and the gradients that were requested. All rows of the head were added. The gradient of the
    /// head, `[V, D]`, is added to `dw`, rounded as products with the head are.
    pub(crate) fn finish(mut self, scale: f32, dw: Option<(&mut [f32], Rounding)>) -> (Vec<TokenLoss>, Vec<f32>) {
        let (rows, ends) = self.losses.finish();
        let factors: Vec<TokenFactors> = (0..rows.len()).map(|i| self.factors(i, ends[i], scale)).collect();
        if let Some((dw, rounding)) = dw {
            self.add_head_gradient(&factors, rounding, dw);
        }
        let dh = self
            .hidden
            .map_or_else(Vec::new, |hidden| hidden.finish(&factors, self.d));
        (rows, dh)
    }

    fn factors(&self, token: usize, RowExpSum { max, sum }: RowExpSum, scale: f32) -> TokenFactors {
        let GroupLosses {
            cap, smoothing, vocab, ..
        } = self.losses;
        let scale = self.weights.get(token).map_or(scale, |w| scale * w);
        let logit = self.losses.hits[token].logit;
        let p = ((logit - max) as f64).exp() / sum;
        let slope = if cap == 0.0 { 1.0 } else { slope(logit, cap) };
        TokenFactors {
            max,
            exp: scale / sum as f32,
            even: scale * smoothing / vocab as f32,
            target: slope * scale * (p - (1.0 - smoothing as f64)) as f32,
        }
    }

    fn add_head_gradient(&mut self, factors: &[TokenFactors], rounding: Rounding, dw: &mut [f32]) {
        let (d, losses, slopes) = (self.d, &self.losses, &self.slopes);
        let count = factors.len();
        for (first, width) in pieces(losses.vocab) {
            let place = count * first;
            let dlogits = &mut self.logits[place..][..count * width];
            dlogits.par_chunks_mut(width).enumerate().for_each(|(i, row)| {
                let TokenFactors {
                    max, exp, even, target, ..
                } = factors[i];
                let exp = exp * ((losses.largest_before(i, first + width) - max) as f64).exp() as f32;
                let at = inside(losses.targets[i], first, width);
                match slopes {
                    Slopes::None => scale_slice(row, exp),
                    Slopes::Ones(ones) => combine(row, exp, &ones[..width], -even),
                    Slopes::Capped(slopes) => combine(row, exp, &slopes[place + i * width..][..width], -even),
                }
                if let Some(at) = at {
                    row[at] += target;
                }
            });
            product(
                (width, d, count),
                &mut dw[first * d..][..width * d],
                CInit::C,
                Matrix::k_outer(StoredElements::F32(dlogits), width),
                Matrix::k_outer(StoredElements::F32(&self.h), d),
                rounding,
            );
        }
    }
}

impl HiddenSums {
    /// Prepares the sums of the tokens `start..start + count` for the piece `first..first + width`, after its logits: scales those whose
    /// largest logit has grown, and keeps the rows of the targets.
    fn prepare(
        &mut self,
        losses: &GroupLosses,
        head: WeightRows<'_>,
        (start, count): (usize, usize),
        (first, width): (usize, usize),
        d: usize,
    ) {
        let targets = self.targets[start * d..][..count * d].par_chunks_mut(d);
        let sums = self.sums[start * d..][..count * d].par_chunks_mut(d);
        sums.zip(targets).enumerate().for_each(|(i, (sums, target))| {
            let token = start + i;
            let before = losses.largest_before(token, first);
            let now = losses.largest_before(token, first + width);
            if first > 0 && now > before {
                scale_slice(sums, ((before - now) as f64).exp() as f32);
            }
            if let Some(at) = inside(losses.targets[token], first, width) {
                head.copy_row(at, target);
            }
        });
    }

    /// Returns the gradient of the hidden states, `[tokens, D]`.
    fn finish(mut self, factors: &[TokenFactors], d: usize) -> Vec<f32> {
        let (targets, even) = (&self.targets, &self.even);
        let rows = self.sums.par_chunks_mut(d.max(1)).zip(factors).enumerate();
        rows.for_each(|(i, (sums, factors))| {
            combine(sums, factors.exp, &targets[i * d..][..d], factors.target);
            if !even.is_empty() {
                combine(sums, 1.0, &even[i * d % even.len()..][..d], -factors.even);
            }
        });
        self.sums
    }
}
