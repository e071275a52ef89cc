//! One pass over the vocabulary, for the losses and for all gradients.
//!
//! The gradient of a hidden state is `Σ p(v) w(v) - w(target)`, where `w(v)` is a row of the head and p the softmax. The sum is
//! accumulated piece by piece from `e^(logit - m) w(v)`, where m is the largest logit so far; when m grows, the sum is scaled (the
//! online softmax, Milakov and Gimelshein 2018, arXiv 1805.02867, section 3, as in FlashAttention). So each piece of the head is read
//! once, and logits exist for one piece. The target is left out of the sum and added last in f32, with the factor p - 1: rounded to
//! bf16, a p near 1 would lose it.

use super::head_gradient::{HeadGradient, KeptExponentials};
use super::kernels::slope;
use super::losses::{GroupLosses, RowExpSum, RowOutputs, TokenLoss};
use super::{LogitsSizes, PIECE, back, gather, inside, multiply, pieces};
use crate::cpu::math::{add_scaled, scale_slice};
use crate::cpu::product::{Operand, Rounding, WeightRows};
use crate::cpu::storage::unwritten;
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
    /// Factor of all gradients.
    pub scale: f32,
    /// `[N]`: factors of the gradients of the tokens.
    pub weights: Option<&'a [f32]>,
    /// Compute the gradient of the hidden states.
    pub need_dh: bool,
    /// The rounding of products with a head whose gradient is computed: V values are kept for each token.
    pub trained_head: Option<Rounding>,
}

/// The state of a pass.
pub(crate) struct VocabularyPass {
    /// `[tokens, D]`
    h: Vec<f32>,
    losses: GroupLosses,
    /// Factor of each token's gradient.
    weights: Vec<f32>,
    /// Logits of a chunk and a piece; empty if they are computed in `kept`.
    logits: Vec<f32>,
    slopes: Slopes,
    hidden: Option<HiddenSums>,
    kept: Option<KeptExponentials>,
    chunk: usize,
    d: usize,
}

/// Label smoothing subtracts the same from the probability of every id. Its gradient has these factors: the slopes of the cap at the
/// logits.
enum Slopes {
    /// No smoothing, or no gradient.
    None,
    /// No cap: one row of ones.
    Ones(Vec<f32>),
    /// Laid out as the logits of a chunk and a piece.
    Capped(Vec<f32>),
}

/// Sums over the vocabulary for the gradient of the hidden states.
struct HiddenSums {
    /// `[tokens, D]`: `Σ e^(logit - m) slope w(v)` without the target.
    sums: Vec<f32>,
    /// `[tokens, D]`: w(target).
    targets: Vec<f32>,
    /// With label smoothing, `Σ slope w(v)`: `[tokens, D]`, without a cap `[1, D]`; else empty.
    uniform: Vec<f32>,
}

/// Factors of a token's gradient.
#[derive(Clone, Copy)]
pub(super) struct TokenFactors {
    /// The largest logit.
    pub max: f32,
    /// Factor of `e^(logit - max)`, with the slope of the token.
    pub exp: f32,
    /// The slope of every id, which label smoothing subtracts.
    pub uniform: f32,
    /// The factor of the target, in place of `exp`.
    pub target: f32,
}

impl VocabularyPass {
    /// Takes the tokens `trained` of `h` `[N, D]`; `targets` `[N]`.
    pub(crate) fn new(h: &[f32], targets: &[u32], trained: &[usize], settings: &PassSettings) -> Self {
        let PassSettings { d, v, cap, .. } = *settings;
        let tokens = trained.len();
        // Kept exponentials are laid out for all tokens at once.
        let is_kept = settings.trained_head.is_some();
        let chunk = if is_kept { tokens } else { settings.chunk.min(tokens) }.max(1);
        let len = chunk * PIECE.min(v);
        let smooths = settings.smoothing != 0.0 && (settings.need_dh || is_kept);
        let (slopes, uniform) = match (smooths, cap == 0.0) {
            (false, _) => (Slopes::None, 0),
            (true, true) => (Slopes::Ones(vec![1.0; PIECE.min(v)]), d),
            (true, false) => (Slopes::Capped(unwritten(len)), tokens * d),
        };
        let hidden = settings.need_dh.then(|| HiddenSums {
            sums: unwritten(tokens * d),
            targets: unwritten(tokens * d),
            uniform: unwritten(uniform),
        });
        let kept = settings
            .trained_head
            .map(|rounding| KeptExponentials::new(tokens * v, rounding));
        let logits_in_kept = matches!(kept, Some(KeptExponentials::F32(_)));
        let targets = trained.iter().map(|n| targets[*n]).collect();
        let weight = |n: &usize| settings.weights.map_or(settings.scale, |w| settings.scale * w[*n]);
        Self {
            h: gather(h, trained, d),
            losses: GroupLosses::new(targets, v, cap, settings.smoothing),
            weights: trained.iter().map(weight).collect(),
            logits: unwritten(if logits_in_kept { 0 } else { len }),
            slopes,
            hidden,
            kept,
            chunk,
            d,
        }
    }

    /// Processes rows of the head from row `first` on. The rows come in order, in parts of whole pieces. `gradient`: that of the head,
    /// if it was requested; with label smoothing and a cap a part of it is written here, the rest by `finish`.
    pub(crate) fn add(&mut self, head: WeightRows<'_>, first: usize, mut gradient: Option<&mut HeadGradient<'_>>) {
        let tokens = self.losses.targets.len();
        for (at, width) in pieces(head.count()) {
            let head = head.part(at, width);
            let piece = (first + at, width);
            for start in (0..tokens).step_by(self.chunk) {
                self.add_chunk(head, piece, (start, self.chunk.min(tokens - start)));
            }
            // The gradient of the head has one chunk for all tokens.
            if let (Slopes::Capped(slopes), Some(gradient)) = (&self.slopes, gradient.as_deref_mut()) {
                let slopes = Operand::F32(&slopes[..tokens * width]);
                let overwrite = !gradient.initialized;
                gradient.add_product(slopes, &self.h, |token| -self.uniform(token), piece, overwrite);
            }
        }
    }

    /// Processes the tokens `start..start + count` and the piece `first..first + width`.
    fn add_chunk(&mut self, head: WeightRows<'_>, (first, width): (usize, usize), (start, count): (usize, usize)) {
        let d = self.d;
        let (place, len) = (count * first, count * width);
        let is_kept = self.kept.is_some();
        let mut in_bf16: &mut [_] = &mut [];
        let logits = match &mut self.kept {
            Some(KeptExponentials::F32(kept)) => &mut kept[place..][..len],
            Some(KeptExponentials::Bf16(kept)) => {
                in_bf16 = &mut kept[place..][..len];
                &mut self.logits[..len]
            }
            None => &mut self.logits[..len],
        };
        let sizes = LogitsSizes { count, width, d };
        multiply(&self.h[start * d..][..count * d], head, sizes, logits);
        if self.hidden.is_none() && !is_kept {
            return self.losses.add(start, logits, (first, width));
        }
        let slopes = match &mut self.slopes {
            Slopes::Capped(slopes) => &mut slopes[..len],
            _ => &mut [],
        };
        let outputs = row_outputs(slopes, in_bf16, (count, width));
        self.losses.add_and_replace(start, logits, outputs, (first, width));
        let Some(hidden) = &mut self.hidden else { return };
        hidden.prepare(&self.losses, head, (start, count), (first, width), d);
        back(logits, head, sizes, first, &mut hidden.sums[start * d..][..count * d]);
        match &self.slopes {
            Slopes::Capped(slopes) => {
                back(
                    &slopes[..len],
                    head,
                    sizes,
                    first,
                    &mut hidden.uniform[start * d..][..count * d],
                );
            }
            // The same for all tokens.
            Slopes::Ones(ones) if start == 0 => {
                let one = LogitsSizes { count: 1, ..sizes };
                back(&ones[..width], head, one, first, &mut hidden.uniform);
            }
            _ => {}
        }
    }

    /// Returns the result of every token, and the gradient of the hidden states if it was requested. All rows of the head were added.
    /// `gradient`: that of the head, if it was requested; this group of tokens is added.
    pub(crate) fn finish(self, gradient: Option<&mut HeadGradient<'_>>) -> (Vec<TokenLoss>, Vec<f32>) {
        let (rows, ends) = self.losses.finish();
        let factors: Vec<TokenFactors> = (0..rows.len()).map(|i| self.factors(i, ends[i])).collect();
        if let (Some(gradient), Some(kept)) = (gradient, &self.kept) {
            let uniform = matches!(self.slopes, Slopes::Ones(_));
            let overwrite = !gradient.initialized && !matches!(self.slopes, Slopes::Capped(_));
            gradient.finish(kept, &self.h, &self.losses, &factors, (uniform, overwrite));
        }
        let dh = self
            .hidden
            .map_or_else(Vec::new, |hidden| hidden.finish(&factors, self.d));
        (rows, dh)
    }

    /// Returns the factor of what label smoothing subtracts from a token's gradient.
    fn uniform(&self, token: usize) -> f32 {
        self.weights[token] * self.losses.smoothing / self.losses.vocab as f32
    }

    fn factors(&self, token: usize, RowExpSum { max, sum }: RowExpSum) -> TokenFactors {
        let GroupLosses { cap, smoothing, .. } = self.losses;
        let scale = self.weights[token];
        let logit = self.losses.hits[token].logit;
        let p = ((logit - max) as f64).exp() / sum;
        let slope = if cap == 0.0 { 1.0 } else { slope(logit, cap) };
        TokenFactors {
            max,
            exp: scale / sum as f32,
            uniform: self.uniform(token),
            target: slope * scale * (p - (1.0 - smoothing as f64)) as f32,
        }
    }
}

/// Cuts `slopes` and `in_bf16`, each `[count, width]` or empty, into the rows of the tokens.
fn row_outputs<'a>(
    slopes: &'a mut [f32],
    in_bf16: &'a mut [half::bf16],
    (count, width): (usize, usize),
) -> Vec<RowOutputs<'a>> {
    let mut slopes = slopes.chunks_mut(width.max(1));
    let mut in_bf16 = in_bf16.chunks_mut(width.max(1));
    let row = |_| RowOutputs {
        slopes: slopes.next().unwrap_or_default(),
        in_bf16: in_bf16.next().unwrap_or_default(),
    };
    (0..count).map(row).collect()
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
            if first > 0 {
                let before = losses.largest_before(token, first);
                let now = losses.largest_before(token, first + width);
                if now > before {
                    scale_slice(sums, ((before - now) as f64).exp() as f32);
                }
            }
            if let Some(at) = inside(losses.targets[token], first, width) {
                head.copy_row(at, target);
            }
        });
    }

    /// Returns the gradient of the hidden states, `[tokens, D]`.
    fn finish(mut self, factors: &[TokenFactors], d: usize) -> Vec<f32> {
        let (targets, uniform) = (&self.targets, &self.uniform);
        let rows = self.sums.par_chunks_mut(d.max(1)).zip(factors).enumerate();
        rows.for_each(|(i, (sums, factors))| {
            scale_slice(sums, factors.exp);
            add_scaled(sums, factors.target, &targets[i * d..][..d]);
            if !uniform.is_empty() {
                add_scaled(sums, -factors.uniform, &uniform[i * d % uniform.len()..][..d]);
            }
        });
        self.sums
    }
}
