//! Models beside the trained one: a teacher with its weights, hidden states and forward pass; reward models.

use super::model::PlanModel;
use super::{PlanInputs, weights};
use crate::base::ledger::{Ledger, MemoryKind};
use crate::engine::ActiveSet;
use crate::model::Spec;
use crate::model::block::memory::LayerMemory;
use crate::ops::cross_entropy::{PIECE, most_tokens};
use crate::ops::transfer::STAGING_BYTES;
use crate::setup::rewards::RewardModelSpec;
use crate::setup::teacher::TeacherSpec;
use crate::source::Placement;
use std::collections::BTreeMap;
use std::sync::Arc;

impl TeacherSpec {
    fn stored(&self) -> u64 {
        if self.bf16 { 2 } else { 4 }
    }

    /// Bytes of the resident weights.
    pub(super) fn weights(&self) -> u64 {
        weights::resident(
            &self.model(),
            &self.storage,
            self.stored(),
            self.place,
            1,
            &ActiveSet::new([]),
            &|_| false,
        )
        .bytes()
    }

    fn model(&self) -> PlanModel<'_> {
        PlanModel::new(&self.spec, &self.storage, &BTreeMap::new())
    }

    /// Bytes on the host if the device is a GPU: resident weights, or weights read ahead, and pinned buffers.
    pub(super) fn on_host(&self, on_gpu: bool) -> u64 {
        let model = self.model();
        match self.place {
            Placement::Host => STAGING_BYTES + model.sum(&ActiveSet::new([]), |p| self.storage.of(p).bytes(&p.shape)),
            Placement::Disk { .. } if on_gpu => STAGING_BYTES + self.weights(),
            _ => 0,
        }
    }

    /// The shape of what makes a hidden state of the student comparable with one of the teacher.
    pub(super) fn projection(&self, student: &Spec) -> [usize; 2] {
        [self.spec.hidden, student.hidden]
    }

    /// Bytes of all of these; their gradients take as many.
    pub(super) fn projections(&self, student: &Spec) -> u64 {
        let [outputs, inputs] = self.projection(student);
        4 * (self.states * outputs * inputs) as u64
    }

    /// The forward pass and what stays of it until the next batch: bytes that are held, and the most beside them. The
    /// teacher's logits share the chunk of the student's.
    pub(super) fn forward(&self, inputs: &PlanInputs) -> (u64, u64) {
        let mut own = inputs.clone();
        own.adapters = Arc::default();
        own.strategy.storage = self.storage.clone();
        own.strategy.placement = self.place;
        (own.strategy.mlp_tokens, own.strategy.offload_inputs) = (None, false);
        let mut sorting = 0;
        if self.aligned {
            // Assumed: the tokenizers differ by a quarter.
            (own.tokens, own.longest) = (own.tokens * 5 / 4, own.longest * 5 / 4);
            // Each thread sorts the distributions of a span: probabilities, slopes and keys of both models.
            sorting = 72 * (rayon::current_num_threads() * self.spec.vocab) as u64;
        }
        let state = inputs.element * (own.tokens * self.spec.hidden) as u64;
        let work = layer_work(&self.model(), &own);
        let tokens = own.tokens.min(most_tokens(inputs.on_gpu));
        let rows = match self.place.head_chunk(false) {
            // A second copy of the trained tokens, and a chunk of logits.
            Some(_) => state + 4 * (PIECE.min(self.spec.vocab) * tokens) as u64,
            None => 4 * (tokens * self.spec.hidden) as u64,
        };
        (state * (1 + self.states as u64), work.max(rows + sorting))
    }
}

impl RewardModelSpec {
    fn model(&self) -> PlanModel<'_> {
        PlanModel::new(&self.spec, &self.storage, &BTreeMap::new())
    }

    pub(super) fn weights(&self) -> u64 {
        self.model()
            .sum(&ActiveSet::new([]), |p| self.storage.of(p).bytes(&p.shape))
    }

    /// Peak memory beside its weights for `answers` of `longest` tokens each.
    pub(super) fn forward(&self, inputs: &PlanInputs, answers: usize, longest: usize) -> u64 {
        let mut own = inputs.clone();
        own.adapters = Arc::default();
        (own.strategy.storage, own.strategy.placement) = (self.storage.clone(), Placement::Device);
        (own.strategy.mlp_tokens, own.strategy.offload_inputs) = (None, false);
        own.tokens = (answers * longest).min(self.tokens.max(longest));
        own.longest = longest;
        layer_work(&self.model(), &own)
    }
}

/// The most that a forward pass takes which keeps nothing: the input of a layer and its work.
pub(super) fn layer_work(model: &PlanModel, inputs: &PlanInputs) -> u64 {
    let (nothing, mut ledger) = (ActiveSet::new([]), Ledger::new(false));
    let per_layer = model.spec.per_layer.map_or(0, |p| p.width * model.layers());
    let x = ledger.alloc(
        MemoryKind::LayerWork,
        inputs.element * (inputs.tokens * (model.spec.row() + per_layer)) as u64,
    );
    // A layer leaves nothing behind: one of each kind is enough.
    let settings = inputs.layer_memory(model.spec, &|_| false, false);
    for run in model.runs(&nothing) {
        let (y, _) = LayerMemory::new(settings, run.first).forward(&mut ledger, false);
        ledger.free(y);
    }
    ledger.free(x);
    ledger.peak
}
