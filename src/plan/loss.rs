//! The logits that exist at the same time while the loss is computed, what is in memory beside them, and how often the output head
//! is used.

use super::PlanInputs;
use crate::model::Spec;
use crate::ops::cross_entropy::{PIECE, PIECE_TOKENS, chunk_for, chunk_for_loss, most_tokens, sums_bytes};
use crate::recipe::{Recipe, Stage};

/// Logits of `tokens` tokens and `width` ids, of all models together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LogitsChunk {
    pub tokens: usize,
    pub width: usize,
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
        let (tokens, width) = match (inputs.on_gpu, in_parts) {
            _ if aligned => whole,
            (true, true) => (PIECE_TOKENS, piece),
            (false, true) if distills => (whole.0, if inputs.teacher.is_some() { 2 * piece } else { piece }),
            (on_gpu, _) if on_gpu || trains || distills => whole,
            _ => (chunk_for_loss(spec.vocab, trains, false), piece),
        };
        Self {
            tokens: tokens.min(inputs.tokens),
            width,
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
            // Hidden states, their gradients, and the rows of the targets.
            (false, _) => 3,
        };
        let logits = (self.tokens * self.width) as u64;
        // On the CPU: the slopes of the cap, and their product with the head.
        let slopes = !inputs.on_gpu && recipe.train.label_smoothing_factor > 0.0 && spec.logit_softcap.is_some();
        let (copies, states) = if slopes { (2, states + 1) } else { (1, states) };
        4 * (copies * logits + states * tokens * spec.hidden as u64) + sums_bytes(spec.vocab) * tokens
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
