//! The teacher: a network whose forward pass runs beside the student's, or rows that were stored before.

use crate::base::Result;
use crate::data::Batch;
use crate::model::{Layer, Network};
use crate::ops::distill::TopK;
use crate::source::Group;
use candle_core::Tensor;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Outputs of a teacher for the trained tokens of any batch of its rows.
pub trait Stored {
    /// One row a trained token, in order. Errors: a document that is not stored; the disk.
    fn of(&self, batch: &Batch) -> Result<TopK>;

    /// The distributions are over so many first ids.
    fn common(&self) -> usize;
}

pub enum Teacher {
    Live(Box<Live>),
    Stored(Box<dyn Stored>),
}

/// A network, and what it said of the batch it saw last: objectives are asked several times about one batch.
pub struct Live {
    pub network: Network,
    wanted: BTreeSet<usize>,
    seen: RefCell<Option<(Batch, Rc<States>)>>,
}

/// Hidden states of a batch.
pub struct States {
    /// `[N, Dt]` after the final norm.
    pub last: Tensor,
    /// `[N, Dt]` at the inputs of layers; those of the layer after the last are `last`.
    pub inner: BTreeMap<usize, Tensor>,
}

impl Teacher {
    pub fn live(network: Network) -> Self {
        Self::Live(Box::new(Live {
            network,
            wanted: BTreeSet::new(),
            seen: RefCell::default(),
        }))
    }

    pub fn network(&self) -> Option<&Network> {
        match self {
            Self::Live(live) => Some(&live.network),
            Self::Stored(_) => None,
        }
    }

    /// Hidden states of these layers are wanted too.
    pub(super) fn watching(mut self, layers: BTreeSet<usize>) -> Self {
        if let Self::Live(live) = &mut self {
            live.wanted = layers;
        }
        self
    }
}

impl Live {
    /// What the teacher says of a batch: its forward pass runs once, layer by layer, keeping nothing else.
    pub(super) fn states(&self, batch: &Batch) -> Result<Rc<States>> {
        if let Some((known, states)) = &*self.seen.borrow()
            && known.ids == batch.ids
            && known.documents == batch.documents
        {
            return Ok(states.clone());
        }
        // Its memory is needed for what comes.
        self.seen.replace(None);
        let (network, mut inner) = (&self.network, BTreeMap::new());
        let layers = network.layers();
        let ctx = network.context(&batch.positions, &batch.documents, None)?;
        network.source.prefetch(Group::Layer(0));
        let mut x = network.embed(&batch.ids)?;
        for l in 0..layers {
            network.source.prefetch(Group::Layer((l + 1) % layers));
            let y = network.block(l)?.forward(&x, &ctx)?;
            if self.wanted.contains(&l) {
                inner.insert(l, x);
            }
            x = y;
        }
        let last = network.normalize(&x)?;
        if self.wanted.contains(&layers) {
            inner.insert(layers, last.clone());
        }
        let states = Rc::new(States { last, inner });
        self.seen.replace(Some((batch.clone(), states.clone())));
        Ok(states)
    }
}
