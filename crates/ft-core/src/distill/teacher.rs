//! The teacher: a network whose forward pass runs beside the student's, or precomputed outputs.

use crate::base::Result;
use crate::data::Batch;
use crate::model::{Layer, Network};
use crate::ops::distill::TopK;
use crate::ops::distill::aligned::{AlignedSpan, SharedIds};
use crate::source::Group;
use candle_core::Tensor;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Precomputed outputs of a teacher for the trained tokens of a batch.
pub trait StoredOutputs {
    /// One row per trained token, in order.
    ///
    /// # Errors
    /// A document that is not stored; a failed read.
    fn of(&self, batch: &Batch) -> Result<TopK>;

    /// The distributions cover the first `common` ids of the vocabulary.
    fn common(&self) -> usize;
}

/// The source of the teacher's distributions.
pub enum Teacher {
    /// A network beside the student.
    Live(Box<LiveTeacher>),
    /// Stored distributions.
    Stored(Box<dyn StoredOutputs>),
    /// A network with another tokenizer.
    Aligned(Box<AlignedTeacher>),
}

/// A network, and its states for the last batch: objectives need the same batch several times.
pub struct LiveTeacher {
    pub network: Network,
    wanted: BTreeSet<usize>,
    seen: RefCell<Option<(Batch, Rc<TeacherStates>)>>,
}

/// The rows of a batch in the tokens of a teacher with another tokenizer.
pub trait AlignedRows {
    /// The same rows for the teacher, and the spans in which both have the same text.
    ///
    /// # Errors
    /// A document that is not known.
    fn of(&self, batch: &Batch) -> Result<AlignedBatch>;

    /// Ids that stand for the same text in both vocabularies; `None`: probabilities are compared by rank.
    fn shared(&self) -> Option<&SharedIds>;
}

/// A batch for the teacher.
pub struct AlignedBatch {
    /// Its documents; some of the student's may be missing.
    pub teacher: Batch,
    /// Rows of both batches whose next tokens cover the same bytes, in order.
    pub spans: Vec<AlignedSpan>,
}

/// A network with another tokenizer, and its rows.
pub struct AlignedTeacher {
    pub(super) live: LiveTeacher,
    pub(super) rows: Box<dyn AlignedRows>,
}

/// Hidden states of a batch.
pub(crate) struct TeacherStates {
    /// `[N, Dt]`, after the final norm.
    pub last: Tensor,
    /// `[N, Dt]` at the inputs of layers; the states after the last layer are `last`.
    pub by_layer: BTreeMap<usize, Tensor>,
}

impl Teacher {
    /// A teacher that computes its outputs in each step.
    pub fn live(network: Network) -> Self {
        Self::Live(Box::new(LiveTeacher::new(network)))
    }

    /// A teacher with another tokenizer, that computes its outputs in each step.
    pub fn aligned(network: Network, rows: Box<dyn AlignedRows>) -> Self {
        let live = LiveTeacher::new(network);
        Self::Aligned(Box::new(AlignedTeacher { live, rows }))
    }

    /// The network of a live teacher with the tokens of the student.
    pub fn network(&self) -> Option<&Network> {
        match self {
            Self::Live(live) => Some(&live.network),
            Self::Stored(_) | Self::Aligned(_) => None,
        }
    }

    /// Requests the hidden states of these layers too.
    pub(super) fn watching(mut self, layers: BTreeSet<usize>) -> Self {
        if let Self::Live(live) = &mut self {
            live.wanted = layers;
        }
        self
    }
}

impl LiveTeacher {
    fn new(network: Network) -> Self {
        Self {
            network,
            wanted: BTreeSet::new(),
            seen: RefCell::default(),
        }
    }

    /// The teacher's states for a batch: one forward pass, layer by layer; saves only the requested states.
    pub(super) fn states(&self, batch: &Batch) -> Result<Rc<TeacherStates>> {
        if let Some((known, states)) = &*self.seen.borrow()
            && known.ids == batch.ids
            && known.documents == batch.documents
        {
            return Ok(states.clone());
        }
        // Free the memory before the new states are computed.
        self.seen.replace(None);
        let (network, mut by_layer) = (&self.network, BTreeMap::new());
        let layers = network.layers();
        let ctx = network.context(&batch.positions, &batch.documents, None)?;
        network.source.prefetch(Group::Layer(0));
        let mut x = network.embed(&batch.ids, &ctx)?;
        for l in 0..layers {
            network.source.prefetch(Group::Layer((l + 1) % layers));
            let y = network.block(l)?.forward(&x, &ctx)?;
            if self.wanted.contains(&l) {
                by_layer.insert(l, x);
            }
            x = y;
        }
        let last = network.normalize(&x, &ctx)?;
        if self.wanted.contains(&layers) {
            by_layer.insert(layers, last.clone());
        }
        let states = Rc::new(TeacherStates { last, by_layer });
        self.seen.replace(Some((batch.clone(), states.clone())));
        Ok(states)
    }
}
