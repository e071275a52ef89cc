//! Where a layer's weights live, and how they get here.
//! Knows names, shapes and storage. Knows no mathematics of layers.

pub mod policy;
pub mod resident;
pub mod stored;

use crate::base::{Error, Result};
use crate::quant::Weight;
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::sync::Arc;

pub use policy::Policy;
pub use resident::Resident;

/// What is fetched as one piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Group {
    /// The token embedding.
    Embedding,
    /// One decoder layer, counted from the input.
    Layer(usize),
    /// The final norm and the output projection.
    Head,
}

/// Which half of a layer a parameter belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    Attention,
    Mlp,
    Other,
}

/// A parameter as the checkpoint names it.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamInfo {
    pub name: Arc<str>,
    pub shape: Vec<usize>,
    pub group: Group,
    pub part: Part,
}

impl ParamInfo {
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Norm weights and biases: never decayed.
    pub fn is_vector(&self) -> bool {
        self.shape.len() == 1
    }
}

/// The weights of one group, ready for use on the device. Cloning a tensor shares its storage, so an
/// update in place is seen by every holder. The weights of frozen linears can be codes.
#[derive(Debug, Default)]
pub struct GroupWeights {
    weights: BTreeMap<Arc<str>, Weight>,
}

impl GroupWeights {
    /// `weight`: a tensor or codes.
    pub fn insert(&mut self, name: Arc<str>, weight: impl Into<Weight>) {
        self.weights.insert(name, weight.into());
    }

    /// The tensor of a dense weight.
    ///
    /// Errors: no such weight in this group (a fault in ft: shapes were checked when the source was opened); codes.
    pub fn get(&self, name: &str) -> Result<(Arc<str>, Tensor)> {
        let (name, weight) = self.weight(name)?;
        let tensor = weight.dense().map_err(|e| e.or_at(&*name))?.clone();
        Ok((name, tensor))
    }

    /// A weight, dense or coded. Errors: no such weight in this group.
    pub fn weight(&self, name: &str) -> Result<(Arc<str>, Weight)> {
        self.weights
            .get_key_value(name)
            .map(|(n, w)| (n.clone(), w.clone()))
            .ok_or_else(|| Error::new("weight is not part of its group").at(name))
    }

    pub fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &Weight)> {
        self.weights.iter()
    }
}

/// Delivers the weights of one group at a time. One of the four contracts of the engine.
pub trait LayerSource: Send {
    /// The weights of `group`, on the device, for as long as the handle lives.
    fn fetch(&self, group: Group) -> Result<Arc<GroupWeights>>;

    /// Says which group is needed next, so that it can travel while another computes.
    fn prefetch(&self, _group: Group) {}

    /// Every parameter, in the order of the model.
    fn params(&self) -> &[ParamInfo];

    /// Bytes held on the device for as long as the source lives.
    fn resident_bytes(&self) -> u64;
}
