//! A teacher beside the student: its weights, its hidden states, and the work of its forward pass.

use super::ledger::{Kind, Ledger};
use super::work::Block;
use super::{Inputs, Place, weights};
use crate::engine::Active;
use crate::model::Spec;
use crate::ops::cross_entropy::PIECE;
use crate::source::Policy;

/// What a distillation runs beside the student.
#[derive(Debug, Clone)]
pub struct Teacher {
    pub spec: Spec,
    pub storage: Policy,
    pub place: Place,
    /// Unquantized weights are bf16.
    pub bf16: bool,
    /// Hidden states of inner layers that are kept.
    pub states: usize,
    /// Rows that the student answers together; 0: none.
    pub answers: usize,
}

impl Teacher {
    fn stored(&self) -> u64 {
        if self.bf16 { 2 } else { 4 }
    }

    fn nothing() -> Active {
        Active::new([])
    }

    /// Bytes of the weights that stay.
    pub(super) fn weights(&self) -> u64 {
        weights::held(&self.spec, &self.storage, self.stored(), self.place, &Self::nothing())
    }

    /// Bytes that stay on the host, or are read ahead there, where the device is another.
    pub(super) fn on_host(&self, on_gpu: bool) -> u64 {
        match self.place {
            Place::Host => self.storage.bytes(&self.spec.params()),
            Place::Disk { .. } if on_gpu => self.weights(),
            _ => 0,
        }
    }

    /// Keys, values and logits while the student `spec` writes its answers, before the step.
    pub(super) fn answers(&self, spec: &Spec, inputs: &Inputs) -> u64 {
        self.answers as u64 * (inputs.cache(spec) + 8 * spec.vocab as u64)
    }

    /// The forward pass and what stays of it until the next batch: bytes that are held, and the most beside them. The
    /// teacher's logits share the chunk of the student's.
    pub(super) fn forward(&self, inputs: &Inputs) -> (u64, u64) {
        let mut own = inputs.clone();
        own.adapters.clear();
        own.storage = self.storage.clone();
        own.place = self.place;
        (own.mlp_tokens, own.parked) = (None, false);
        let state = inputs.element * (inputs.tokens * self.spec.hidden) as u64;
        let mut ledger = Ledger::new(false);
        let nothing = Self::nothing();
        let x = ledger.hold(Kind::Layer, state);
        for layer in 0..self.spec.layers.len() {
            let (y, _) = Block::new(&self.spec, layer, &own, &nothing, false).forward(&mut ledger, false);
            ledger.drop(y);
        }
        ledger.drop(x);
        let rows = match weights::head_in_pieces(&self.spec, self.place, &nothing) {
            // The trained tokens once more, and a piece of logits.
            Some(_) => state + 4 * (PIECE.min(self.spec.vocab) * inputs.tokens.min(512)) as u64,
            None => 4 * (inputs.tokens.min(512) * self.spec.hidden) as u64,
        };
        (state * (1 + self.states as u64), ledger.peak.max(rows))
    }
}
