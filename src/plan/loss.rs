//! The logits that exist at the same time while the loss is computed, what is in memory beside them, and how often the output head
//! is used.

use super::PlanInputs;
use crate::model::Spec;
use crate::ops::cross_entropy::{PIECE, PIECE_TOKENS, chunk_for, chunk_for_loss, kept_bytes, most_tokens, sums_bytes};
use crate::recipe::{Recipe, Stage};
use candle_core::DType;
use std::fmt;

/// Logits of `tokens` tokens and `width` ids, of all models together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LogitsChunk {
    pub tokens: usize,
    pub width: usize,
    /// Bytes of a token that are kept for the gradient of the head, and whether its logits lie in them.
    kept_per_token: usize,
    logits_in_kept: bool,
    distills: bool,
    /// The head is read in parts.
    in_parts: bool,
}

impl LogitsChunk {
    /// The head `trains`, or is frozen and perhaps read in parts.
    pub(super) fn new(spec: &Spec, recipe: &Recipe, inputs: &PlanInputs, trains: bool, in_parts: bool) -> Self {
        let distills = recipe.train.stage == Stage::Distill;
        // If one head is read in parts, the loss visits both in pieces.
        let in_parts = in_parts
            || inputs
                .teacher
                .as_ref()
                .is_some_and(|t| t.place.head_chunk(false).is_some());
        let piece = PIECE.min(spec.vocab);
        // The teacher's logits are cut to the ids of the student; those of a model with another tokenizer are not, and there both
        // are copied.
        let (all, aligned) = match &inputs.teacher {
            Some(teacher) if teacher.aligned => (2 * (spec.vocab + teacher.spec.vocab), true),
            Some(teacher) => (spec.vocab + teacher.spec.vocab.min(spec.vocab), false),
            None => (spec.vocab, false),
        };
        let whole = (chunk_for(all, inputs.on_gpu), all);
        let dtype = DType::from(recipe.model.dtype);
        let mut kept_per_token = 0;
        let (tokens, width) = match (inputs.on_gpu, in_parts) {
            _ if aligned => whole,
            (true, true) => (PIECE_TOKENS, piece),
            (false, true) if distills => (whole.0, if inputs.teacher.is_some() { 2 * piece } else { piece }),
            (on_gpu, _) if on_gpu || distills => whole,
            _ => {
                let trained = trains.then_some(dtype);
                kept_per_token = trained.map_or(0, |dtype| kept_bytes(spec.vocab, dtype));
                (chunk_for_loss(spec.vocab, trained, false), piece)
            }
        };
        Self {
            tokens: tokens.min(inputs.tokens),
            width,
            kept_per_token,
            logits_in_kept: kept_per_token > 0 && dtype == DType::F32,
            distills,
            in_parts,
        }
    }

    /// Bytes of the logits, and of the hidden states of their tokens with their gradients.
    pub(super) fn bytes(self, spec: &Spec, recipe: &Recipe, inputs: &PlanInputs) -> u64 {
        let own = self.of_stage(spec, recipe, inputs);
        if !self.distills || inputs.on_gpu {
            return own;
        }
        // An evaluation computes the cross-entropy of the student alone.
        let plain = Self {
            tokens: most_tokens(false).min(inputs.tokens),
            width: PIECE.min(spec.vocab),
            kept_per_token: 0,
            logits_in_kept: false,
            distills: false,
            ..self
        };
        own.max(plain.of_stage(spec, recipe, inputs))
    }

    fn of_stage(self, spec: &Spec, recipe: &Recipe, inputs: &PlanInputs) -> u64 {
        let tokens = if self.in_parts { inputs.tokens } else { self.tokens } as u64;
        let states = match (inputs.on_gpu || self.distills, self.in_parts) {
            (true, true) => 2,
            (true, false) => 1,
            // Hidden states, their gradients, the rows of the targets; with a head that trains, the hidden states with factors.
            (false, _) => 3 + u64::from(self.kept_per_token > 0),
        };
        let logits = (self.tokens * self.width) as u64;
        // On the CPU: the slopes of the cap, and their product with the head.
        let slopes = !inputs.on_gpu && recipe.train.label_smoothing_factor > 0.0 && spec.logit_softcap.is_some();
        let (copies, states) = if slopes { (2, states + 1) } else { (1, states) };
        let kept = (self.tokens * self.kept_per_token) as u64;
        let copies = copies - u64::from(self.logits_in_kept);
        4 * (copies * logits + states * tokens * spec.hidden as u64) + kept + sums_bytes(spec.vocab) * tokens
    }
}

impl fmt::Display for LogitsChunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tokens × {} at a time", self.tokens, self.width)?;
        match self.kept_per_token {
            0 => Ok(()),
            _ => write!(f, ", exponentials of all ids"),
        }
    }
}

/// How often the loss of one micro-batch uses the output head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HeadUses {
    /// Products of all trained tokens with it.
    pub products: u64,
    /// Reads of a head in parts.
    pub reads: u64,
}

/// The output head is read in parts, or is in memory as a whole.
pub(super) fn head_uses(spec: &Spec, recipe: &Recipe, inputs: &PlanInputs, in_parts: bool) -> HeadUses {
    // The forward pass, and the gradient of the hidden states.
    let both = HeadUses { products: 2, reads: 1 };
    let teacher = inputs.teacher.as_ref();
    let more = match (recipe.train.stage, in_parts) {
        (Stage::Reward, _) => return HeadUses { products: 0, reads: 0 },
        (Stage::Distill, true) => match teacher {
            // Each chunk reads it twice.
            Some(teacher) if teacher.aligned => {
                let chunk = chunk_for(2 * (spec.vocab + teacher.spec.vocab), inputs.on_gpu).max(1);
                let reads = 2 * inputs.tokens.div_ceil(chunk) as u64;
                return HeadUses { products: 2, reads };
            }
            Some(_) => 2,
            None => 1,
        },
        (Stage::Sft | Stage::Pretrain | Stage::Distill, _) => 0,
        // Entropies too.
        (Stage::Grpo | Stage::Ppo, _) => 2,
        // Log-probabilities come first.
        _ => 1,
    };
    // On a GPU the gradient computes the logits of a piece again.
    let again = u64::from(in_parts && inputs.on_gpu && recipe.train.stage != Stage::Distill);
    HeadUses {
        products: both.products + more + again,
        reads: both.reads + more + again,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{inputs, recipe, spec};
    use super::*;
    use crate::engine::{ActiveSet, GradientStorage};
    use crate::recipe::Dtype;

    const VOCAB: usize = 152_064;

    fn large() -> Spec {
        Spec {
            vocab: VOCAB,
            hidden: 896,
            ..spec()
        }
    }

    fn plain() -> PlanInputs {
        inputs(ActiveSet::new([]), GradientStorage::Fused)
    }

    #[test]
    fn a_frozen_head_has_logits_of_one_piece_and_a_trained_one_keeps_exponentials() {
        let (spec, mut recipe, inputs) = (large(), recipe(""), plain());
        let of = |recipe: &Recipe, trains| {
            let chunk = LogitsChunk::new(&spec, recipe, &inputs, trains, false);
            (chunk.tokens, chunk.width, chunk.bytes(&spec, recipe, &inputs))
        };
        let (tokens, piece) = (512, PIECE as u64);
        let rows = |n: u64| 4 * (tokens as u64 * piece + n * tokens as u64 * 896) + sums_bytes(VOCAB) * tokens as u64;
        recipe.model.dtype = Dtype::Bf16;
        assert_eq!(of(&recipe, false), (tokens, PIECE, rows(3)));
        let kept = 2 * tokens as u64 * VOCAB as u64;
        assert_eq!(of(&recipe, true), (tokens, PIECE, rows(4) + kept));
        // In f32 half as many tokens have room.
        recipe.model.dtype = Dtype::F32;
        let tokens = (160 << 20) / (4 * VOCAB);
        let bytes = 4 * 4 * tokens * 896 + 4 * tokens * VOCAB;
        let sums = sums_bytes(VOCAB) * tokens as u64;
        assert_eq!(of(&recipe, true), (tokens, PIECE, bytes as u64 + sums));
        assert_eq!(of(&recipe, false), (512, PIECE, rows(3)));
    }

    #[test]
    fn few_tokens_need_few_logits() {
        let (spec, recipe) = (large(), recipe(""));
        let inputs = PlanInputs { tokens: 7, ..plain() };
        for trains in [false, true] {
            assert_eq!(LogitsChunk::new(&spec, &recipe, &inputs, trains, false).tokens, 7);
        }
    }

    #[test]
    fn distillation_without_a_teacher_in_memory_has_whole_logits_unless_the_head_is_in_parts() {
        let (spec, inputs) = (large(), plain());
        let recipe = Recipe {
            train: crate::recipe::Train {
                stage: Stage::Distill,
                ..recipe("").train
            },
            ..recipe("")
        };
        let of = |in_parts| LogitsChunk::new(&spec, &recipe, &inputs, false, in_parts);
        let tokens = (128 << 20) / (4 * VOCAB);
        assert_eq!((of(false).tokens, of(false).width), (tokens, VOCAB));
        assert_eq!((of(true).tokens, of(true).width), (tokens, PIECE));
        // At least what an evaluation needs, which computes the cross-entropy.
        let plain = LogitsChunk {
            tokens: 512,
            width: PIECE,
            distills: false,
            ..of(true)
        };
        assert!(of(true).bytes(&spec, &recipe, &inputs) >= plain.of_stage(&spec, &recipe, &inputs));
    }

    #[test]
    fn uses_of_the_head_by_stage() {
        let spec = large();
        let uses = |stage, on_gpu, in_parts| {
            let mut recipe = recipe("");
            recipe.train.stage = stage;
            let inputs = PlanInputs { on_gpu, ..plain() };
            let HeadUses { products, reads } = head_uses(&spec, &recipe, &inputs, in_parts);
            (products, reads)
        };
        assert_eq!(uses(Stage::Sft, false, false), (2, 1));
        assert_eq!(uses(Stage::Sft, false, true), (2, 1));
        assert_eq!(uses(Stage::Sft, true, true), (3, 2));
        assert_eq!(uses(Stage::Dpo, false, true), (3, 2));
        assert_eq!(uses(Stage::Grpo, false, true), (4, 3));
        assert_eq!(uses(Stage::Distill, false, true), (3, 2));
        assert_eq!(uses(Stage::Reward, false, false), (0, 0));
    }
}
