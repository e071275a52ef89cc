//! Weight storage: where the weights of a layer are, and how they get to the device.
//! Handles names, shapes and storage types; independent of the mathematics of layers.

pub mod disk;
mod experts;
mod in_memory;
pub mod memory;
mod placement;
pub mod policy;
mod requantize;
pub mod resident;
pub mod sharded;
mod slots;
pub mod stored;
pub mod uploaded;

use crate::base::sync::lock;
use crate::base::{Error, Result};
use crate::formats::weights::Weights;
use crate::ops::transfer::{CopyTimes, HostRead};
use crate::quant::Weight;
use candle_core::Tensor;
use half::{bf16, f16};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

pub use disk::DiskWeights;
pub use experts::{ExpertReads, expert_of};
pub use in_memory::InMemoryWeights;
pub use placement::Placement;
pub use policy::StoragePolicy;
pub use requantize::RequantizedWeight;
pub use resident::ResidentWeights;
pub use sharded::{ExpertRanks, ShardedWeights};
pub use uploaded::UploadedWeights;

/// Slots of a double buffer: the current item and the next one.
const SLOTS: usize = 2;

/// The unit of a fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Group {
    /// The token embedding.
    Embedding,
    /// One decoder layer, counted from the input.
    Layer(usize),
    /// The final norm and the output projection.
    Head,
    /// A table of which only rows are read: it stays where the inactive weights are, unless it is trained.
    Table,
}

/// The half of a decoder layer to which a parameter belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Sublayer {
    /// Attention and its norms.
    Attention,
    /// The MLP and its norms.
    Mlp,
    /// The router of a mixture of experts, beside the MLP: it is never quantized.
    Router,
    /// Outside the decoder layers.
    Other,
}

/// A parameter, by its name in the checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamInfo {
    /// Name in the checkpoint.
    pub name: Arc<str>,
    /// Sizes of the dimensions.
    pub shape: Vec<usize>,
    /// The group that delivers it.
    pub group: Group,
    /// The half of its layer.
    pub sublayer: Sublayer,
}

impl ParamInfo {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Norm weights, biases and other vectors (DoRA magnitudes, attention sinks): never decayed.
    pub fn is_vector(&self) -> bool {
        is_vector(&self.name, self.shape.len())
    }

    /// The routed expert of its layer to which it belongs.
    pub fn expert(&self) -> Option<usize> {
        expert_of(&self.name)
    }
}

/// As `ParamInfo::is_vector`. A norm with a weight for each head is a matrix in the file.
pub fn is_vector(name: &str, dimensions: usize) -> bool {
    dimensions < 2 || name.ends_with("_norm.weight")
}

/// The weights of one group, ready for use on the device. A cloned tensor shares its storage, so every holder sees an
/// in-place update. The weights of frozen linears may be quantized.
#[derive(Debug, Default)]
pub struct GroupWeights {
    weights: BTreeMap<Arc<str>, Weight>,
    /// Copies that may still read the memory of the weights.
    reads: Mutex<Vec<HostRead>>,
}

impl GroupWeights {
    /// A source that reuses the memory of this group waits for `read` first.
    pub fn read_by(&self, read: Option<HostRead>) {
        lock(&self.reads).extend(read);
    }

    /// Returns the copies of `read_by`.
    pub(crate) fn take_reads(&self) -> Vec<HostRead> {
        std::mem::take(&mut *lock(&self.reads))
    }

    /// Inserts a weight, dense or quantized.
    pub fn insert(&mut self, name: Arc<str>, weight: impl Into<Weight>) {
        self.weights.insert(name, weight.into());
    }

    /// Returns the tensor of a dense weight.
    ///
    /// # Errors
    /// The group has no such weight (a bug: names are checked when the source is opened); a quantized weight.
    pub fn get(&self, name: &str) -> Result<(Arc<str>, Tensor)> {
        let (name, weight) = self.weight(name)?;
        let tensor = weight.dense().map_err(|e| e.or_at(&*name))?.clone();
        Ok((name, tensor))
    }

    /// Returns a weight, dense or quantized.
    ///
    /// # Errors
    /// The group has no such weight.
    pub fn weight(&self, name: &str) -> Result<(Arc<str>, Weight)> {
        self.weights
            .get_key_value(name)
            .map(|(n, w)| (n.clone(), w.clone()))
            .ok_or_else(|| Error::new("weight is not part of its group").at(name))
    }

    /// The weights with their names, sorted.
    pub fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &Weight)> {
        self.weights.iter()
    }
}

/// A run of elements of a parameter, in order.
#[derive(Debug, Clone, Copy)]
pub enum ParamElements<'a> {
    /// The stored values.
    F32(&'a [f32]),
    /// For trained weights also the low 16 bits of their fp32 masters (see `ops::master`).
    Bf16(&'a [bf16], Option<&'a [i16]>),
    /// The same for f16 weights.
    F16(&'a [f16], Option<&'a [i16]>),
}

/// Receives the elements of a parameter in pieces.
pub type NumbersSink<'a> = dyn FnMut(ParamElements) -> Result<()> + 'a;

/// Access to the optimizer's low 16 bits of fp32 masters (i16 `[n]`), by parameter name.
pub trait MasterLowBits {
    /// Stores the low 16 bits.
    fn put_low(&mut self, name: &str, low: Tensor);

    /// `None`: this parameter has no master.
    fn take_low(&mut self, name: &str) -> Option<Tensor>;
}

impl MasterLowBits for BTreeMap<String, Tensor> {
    fn put_low(&mut self, name: &str, low: Tensor) {
        self.insert(name.to_string(), low);
    }

    fn take_low(&mut self, name: &str) -> Option<Tensor> {
        self.remove(name)
    }
}

/// Delivers the weights of a model, one group at a time. One of the four contracts of the engine.
pub trait WeightSource: Send + Sync {
    /// Returns the weights of `group` on the device. Their memory is reused after the handle is dropped. A layer has all its
    /// experts: a pass fetches them with `fetch_expert`.
    ///
    /// # Errors
    /// The model has no such group; a failed read from the disk (`Io`), or a file that is damaged (`Format`); not
    /// enough memory on the device (`OutOfMemory`); another rank has failed.
    fn fetch(&self, group: Group) -> Result<Arc<GroupWeights>>;

    /// True if every fetch returns the same memory on the device, until a weight is replaced (`TrainableStore`).
    fn stays_in_place(&self) -> bool {
        false
    }

    /// A hint: `group` is fetched next, a layer with `fetch_dense`. A source with slow storage starts to copy it during the
    /// computation.
    fn prefetch(&self, _group: Group) {}

    /// As `fetch` of a layer, but its routed experts may be missing.
    ///
    /// # Errors
    /// As `fetch`.
    fn fetch_dense(&self, layer: usize) -> Result<Arc<GroupWeights>> {
        self.fetch(Group::Layer(layer))
    }

    /// As `fetch` of a layer, but all except its routed expert `expert` may be missing.
    ///
    /// # Errors
    /// As `fetch`.
    fn fetch_expert(&self, layer: usize, _expert: usize) -> Result<Arc<GroupWeights>> {
        self.fetch(Group::Layer(layer))
    }

    /// True if routed experts are brought one at a time.
    fn streams_experts(&self) -> bool {
        false
    }

    /// A hint: layer `layer` fetches these experts next, in this order, and drops each before it fetches the next. A
    /// source with slow storage reads an expert while the one before it is computed.
    fn expect_experts(&self, _layer: usize, _experts: &[usize]) {}

    /// The ranks among which the routed experts are divided: `fetch_expert` has those of this rank only. `None`: it has all.
    fn expert_ranks(&self) -> Option<&ExpertRanks> {
        None
    }

    /// The weights that contain this parameter: its expert, its layer without experts, or its group.
    ///
    /// # Errors
    /// As `fetch`.
    fn fetch_with(&self, p: &ParamInfo) -> Result<Arc<GroupWeights>> {
        match (p.group, p.expert()) {
            (Group::Layer(layer), Some(expert)) => self.fetch_expert(layer, expert),
            (Group::Layer(layer), None) => self.fetch_dense(layer),
            (group, _) => self.fetch(group),
        }
    }

    /// All parameters, in the order of the model.
    fn params(&self) -> &[ParamInfo];

    /// The parameter of this name.
    ///
    /// # Errors
    /// There is none.
    fn param(&self, name: &str) -> Result<&ParamInfo> {
        let found = self.params().iter().find(|p| &*p.name == name);
        found.ok_or_else(|| no_such(name))
    }

    /// Bytes on the device now.
    fn resident_bytes(&self) -> u64;

    /// The tensor of a parameter that stays on the device (until the next `deactivate`); `None`: it must be fetched.
    fn in_memory(&self, name: &str) -> Option<Tensor>;

    /// As `in_memory`, but loads the parameter if it is not there: it stays on the device from now on. For a frozen matrix
    /// with trained rows.
    ///
    /// # Errors
    /// There is no such parameter, or a read from the disk fails; a source that cannot keep it (`Unsupported`).
    fn hold(&self, name: &str) -> Result<Tensor> {
        self.in_memory(name)
            .ok_or_else(|| Error::unsupported("this matrix is not in memory and cannot be kept there").at(name))
    }

    /// Gathers rows of the matrix `name` `[R, C]`: returns a matrix with the rows `ids`, and the row index of each id.
    ///
    /// # Errors
    /// An id that is not below R; a failed read from the disk.
    fn rows(&self, name: &str, ids: &[u32]) -> Result<(Tensor, Vec<u32>)>;

    /// The matrix `name` as pieces, if it is streamed and never in memory as a whole.
    fn streamed(&self, name: &str) -> Option<Box<dyn StreamedMatrix + '_>>;
}

/// A matrix that is never in memory as a whole.
pub trait StreamedMatrix {
    /// Number of rows per piece.
    fn piece_rows(&self) -> usize;

    /// Returns the piece that starts at row `first`, a multiple of `piece_rows`, under the name of the matrix.
    ///
    /// # Errors
    /// As `WeightSource::fetch`.
    fn piece(&self, first: usize) -> Result<Arc<GroupWeights>>;
}

/// A source whose parameters can be trained: moves them between their storage and the optimizer, with exact values.
pub trait TrainableStore: WeightSource {
    /// Activates these parameters: they stay on the device until `deactivate`. The low 16 bits of their masters are
    /// moved to `low`.
    ///
    /// # Errors
    /// A failed read from the disk (`Io`); not enough memory on the device (`OutOfMemory`). Names that are no
    /// parameters of this source are not an error.
    fn activate(&self, names: &[&str], low: &mut dyn MasterLowBits) -> Result<()>;

    /// Deactivates the parameters that `keep` rejects: writes back their exact fp32 values (weight and low 16 bits) if
    /// they do not stay on the device, requantizes those stored quantized, and returns the quantization error of each.
    ///
    /// # Errors
    /// A failed write to the disk (`Io`); a weight that cannot be quantized again, because a number is not finite
    /// (`NonFinite`); not enough memory (`OutOfMemory`).
    fn deactivate(&self, keep: &dyn Fn(&str) -> bool, low: &mut dyn MasterLowBits) -> Result<Vec<RequantizedWeight>>;

    /// True if the optimizer has the low 16 bits of this parameter's fp32 master (active parameters, and those that
    /// never leave the device).
    fn master_in_optimizer(&self, name: &str) -> bool;

    /// Passes the current elements of a parameter to `sink` in pieces; with the low 16 bits unless
    /// `master_in_optimizer`.
    ///
    /// # Errors
    /// There is no such parameter (`NotFound`); a failed read from the disk (`Io`); the error of `sink`.
    fn read(&self, name: &str, sink: &mut NumbersSink) -> Result<()>;

    /// Restores the exact f32 value of an inactive parameter from the tensor of its name in `saved`.
    ///
    /// # Errors
    /// There is no such parameter (`NotFound`); `saved` has no tensor of its name (`Format`), or one of another
    /// size (`Shape`); a failed read or write (`Io`); not enough memory (`OutOfMemory`).
    fn restore(&self, name: &str, saved: &Weights, low: &mut dyn MasterLowBits) -> Result<()>;

    /// Quantizes `values` (one per element) as the new values of a frozen quantized weight, and drops the old data. `read`
    /// still returns the original values.
    ///
    /// # Errors
    /// The weight is not quantized.
    fn requantize(&self, name: &str, values: &[f32]) -> Result<()>;

    /// The source whose matrices are stored in parts on the ranks of a job, if this is one.
    fn sharded(&self) -> Option<&ShardedWeights> {
        None
    }

    /// The own parts of the matrices that `trained` accepts have changed: the collected layers with them are dropped, and
    /// copies on other ranks are renewed. All ranks call it for the same matrices.
    ///
    /// # Errors
    /// Another rank has failed.
    fn updated(&self, _trained: &dyn Fn(&str) -> bool) -> Result<()> {
        Ok(())
    }

    /// Drops the layers that were collected from other ranks.
    fn drop_collected(&self) {}

    /// Duration of the uploads to the device since the last call; `None` if there are no uploads.
    ///
    /// # Errors
    /// The GPU reports an error.
    fn upload_times(&self) -> Result<Option<CopyTimes>>;

    /// Experts that were brought to the device since the last call; `None`: they are always there.
    fn expert_reads(&self) -> Option<ExpertReads> {
        None
    }
}

/// True for the parameters that a source with slow storage always keeps on the device: the head group, and the output
/// projection `head` unless it is streamed.
fn stays_on_device(p: &ParamInfo, head: &str, head_is_streamed: bool) -> bool {
    if &*p.name == head {
        !head_is_streamed
    } else {
        p.group == Group::Head
    }
}

/// The distinct `ids` in ascending order, and the index of each id among them. Errors: an id that is not below `rows`.
fn distinct(ids: &[u32], rows: usize) -> Result<(Vec<u32>, Vec<u32>)> {
    let mut index: BTreeMap<u32, u32> = ids.iter().map(|id| (*id, 0)).collect();
    if let Some((&id, _)) = index.last_key_value().filter(|(id, _)| **id as usize >= rows) {
        return Err(Error::argument("a token id is outside the vocabulary")
            .found(id)
            .expected(format!("below {rows}")));
    }
    index.values_mut().zip(0..).for_each(|(at, i)| *at = i);
    let indices = ids.iter().map(|id| index[id]).collect();
    Ok((index.into_keys().collect(), indices))
}

fn tensor_bytes(t: &Tensor) -> u64 {
    (t.elem_count() * t.dtype().size_in_bytes()) as u64
}

fn not_quantized(name: &str) -> Error {
    Error::new("a weight that is not quantized cannot be requantized").at(name)
}

fn no_such(name: &str) -> Error {
    Error::not_found("the model has no such parameter").at(name)
}
