//! Where a layer's weights live, and how they get here.
//! Knows names, shapes and storage. Knows no mathematics of layers.

pub mod disk;
pub mod policy;
pub mod prepacking;
pub mod resident;
pub mod stored;
mod turns;
pub mod uploaded;

use crate::base::{Error, Result};
use crate::formats::weights::Weights;
use crate::ops::transfer::CopyTimes;
use crate::quant::Weight;
use candle_core::Tensor;
use half::bf16;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use disk::Disk;
pub use policy::Policy;
pub use prepacking::{Copies, Prepacking};
pub use resident::Resident;
pub use turns::Recoded;
pub use uploaded::Uploaded;

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

/// Every group of a model, where all of them are here.
#[derive(Debug, Default)]
pub struct Groups(Mutex<BTreeMap<Group, Arc<GroupWeights>>>);

impl Groups {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Group, Arc<GroupWeights>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn get(&self, group: Group) -> Result<Arc<GroupWeights>> {
        let found = self.lock().get(&group).cloned();
        found.ok_or_else(|| Error::new(format!("the model has no {group:?}")))
    }

    /// Who holds the group as it was keeps that.
    pub fn set(&self, group: Group, weights: GroupWeights) {
        self.lock().insert(group, Arc::new(weights));
    }

    /// The tensor of a parameter; `None`: it is codes.
    pub fn tensor(&self, param: &ParamInfo) -> Option<Tensor> {
        Some(self.get(param.group).ok()?.get(&param.name).ok()?.1)
    }

    /// Sum over all weights.
    pub fn sum(&self, of: impl Fn(&Weight) -> u64) -> u64 {
        let groups = self.lock();
        groups.values().flat_map(|g| g.iter()).map(|(_, w)| of(w)).sum()
    }
}

/// Some numbers of a parameter, in its order.
#[derive(Debug, Clone, Copy)]
pub enum Numbers<'a> {
    F32(&'a [f32]),
    /// With what their f32 masters know beyond them, where they were trained (see `ops::master`).
    Bf16(&'a [bf16], Option<&'a [i16]>),
}

/// Takes the numbers of a parameter, in pieces.
pub type NumbersSink<'a> = dyn FnMut(Numbers) -> Result<()> + 'a;

/// Lower halves of f32 masters (i16 `[n]`), by the name of their parameter: where the optimizer keeps them.
pub trait LowerHalves {
    fn put_low(&mut self, name: &str, low: Tensor);

    /// `None`: this parameter has no master beyond its weight.
    fn take_low(&mut self, name: &str) -> Option<Tensor>;
}

impl LowerHalves for BTreeMap<String, Tensor> {
    fn put_low(&mut self, name: &str, low: Tensor) {
        self.insert(name.to_string(), low);
    }

    fn take_low(&mut self, name: &str) -> Option<Tensor> {
        self.remove(name)
    }
}

/// Delivers the weights of one group at a time. One of the four contracts of the engine.
pub trait LayerSource: Send {
    /// The weights of `group`, on the device, for as long as the handle lives: their memory is used again after.
    fn fetch(&self, group: Group) -> Result<Arc<GroupWeights>>;

    /// Says which group is needed next, so that it can travel while another computes.
    fn prefetch(&self, _group: Group) {}

    /// Every parameter, in the order of the model.
    fn params(&self) -> &[ParamInfo];

    /// Bytes held on the device now.
    fn resident_bytes(&self) -> u64;

    /// A parameter that stays on the device (until the next `retire`); `None`: it has to be fetched.
    fn held(&self, name: &str) -> Option<Tensor>;

    /// Is what its master knows with the optimizer? So it is of what is trained now, and of whatever never leaves.
    fn master_is_out(&self, _name: &str) -> bool {
        true
    }

    /// A matrix with the rows `ids` of the matrix `name` `[R, C]`, and the row of each id in it.
    ///
    /// Errors: an id that is not below R; the disk.
    fn rows(&self, name: &str, ids: &[u32]) -> Result<(Tensor, Vec<u32>)>;

    /// How many rows of the matrix `name` come at a time, where it is never here whole.
    fn piece_rows(&self, _name: &str) -> Option<usize> {
        None
    }

    /// Rows of such a matrix from row `first` on, a multiple of `piece_rows`, as one tensor under its name.
    fn piece(&self, name: &str, _first: usize) -> Result<Arc<GroupWeights>> {
        Err(Error::new("this weight does not come in pieces").at(name))
    }

    /// These parameters are trained from now on, and held until `retire`. What their masters know goes to `low`.
    fn activate(&self, _names: &[&str], _low: &mut dyn LowerHalves) -> Result<()> {
        Ok(())
    }

    /// Ends the training of the active parameters that `keep` does not name. What they learned is written back
    /// exactly, with what `low` has of them, where their weights do not stay on the device. Returns what it cost
    /// to make codes of them again, where they are stored so.
    fn retire(&self, _keep: &dyn Fn(&str) -> bool, _low: &mut dyn LowerHalves) -> Result<Vec<Recoded>> {
        Ok(Vec::new())
    }

    /// Other values for a weight that is stored as codes: as many as it has elements. What it was is gone from the device.
    ///
    /// Errors: a weight that is no codes; a source whose weights do not stay on the device.
    fn recode(&self, name: &str, _values: &[f32]) -> Result<()> {
        Err(Error::new("codes that do not stay on the device cannot be made anew")
            .at(name)
            .hint("set `memory.tier = \"device\"`, or `tune.lora.loftq_iter = 1`"))
    }

    /// How long weights travelled to the device since the last call; `None` where they do not.
    fn copies(&self) -> Result<Option<CopyTimes>> {
        Ok(None)
    }

    /// All numbers of a parameter as they are now, a few at a time; with lower halves unless `master_is_out`.
    fn read(&self, name: &str, sink: &mut NumbersSink) -> Result<()>;

    /// Takes the exact f32 value of a parameter from the tensor of its name in `saved`. Not while it is active.
    fn restore(&self, name: &str, saved: &Weights, low: &mut dyn LowerHalves) -> Result<()>;
}
