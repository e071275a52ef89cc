//! Adds packed copies (`ops::prepacked`) to frozen weights, on top of a source that holds all weights on the CPU. A
//! group is packed when it is fetched. Active parameters have no copies; they get new ones when their block is
//! deactivated.

use super::policy::is_projection;
use super::{
    ExpertReads, Group, GroupWeights, MasterLowBits, NumbersSink, ParamInfo, RequantizedWeight, StoragePolicy,
    StreamedMatrix, TrainableStore, WeightSource, lock,
};
use crate::base::Result;
use crate::formats::weights::Weights;
use crate::ops::Dtype;
use crate::ops::prepacked::{PrepackedProducts, PrepackedTensor};
use crate::ops::transfer::CopyTimes;
use crate::quant::{StorageDtype, Weight};
use candle_core::Tensor;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

/// Selects the weights that get packed copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedCopies {
    /// The products that get a copy.
    pub orders: PrepackedProducts,
    /// Name of the output projection (LM head), unless some of its rows are trained.
    pub head: Option<String>,
    /// LoRA rank of each weight, by the weight's name.
    pub ranks: Arc<BTreeMap<String, usize>>,
}

impl PackedCopies {
    /// True if a parameter gets packed copies while it is frozen and dense.
    fn covers(&self, p: &ParamInfo) -> bool {
        is_projection(p) || self.head.as_deref() == Some(&*p.name)
    }

    fn rank(&self, name: &str) -> usize {
        self.ranks.get(name).copied().unwrap_or(0)
    }

    /// Bytes of the packed copies of a parameter in `storage`.
    pub fn bytes(&self, p: &ParamInfo, storage: &StoragePolicy) -> u64 {
        match p.shape[..] {
            [rows, columns] if self.covers(p) && storage.of(p) == StorageDtype::Dense(Dtype::Bf16) => {
                PrepackedTensor::bytes((rows, columns), self.orders, self.rank(&p.name))
            }
            _ => 0,
        }
    }
}

/// Adds packed copies of frozen weights to a source on the CPU.
pub struct PrepackingSource {
    below: Arc<dyn TrainableStore>,
    copies: PackedCopies,
    state: Mutex<PrepackingState>,
}

struct PrepackingState {
    /// Active parameters.
    active: BTreeSet<String>,
    /// Each group as fetched from `below`, and with packed copies.
    groups: BTreeMap<Group, (Arc<GroupWeights>, Arc<GroupWeights>)>,
}

impl PrepackingSource {
    /// `below` holds its weights on the CPU; `first` names the parameters that are trained first.
    pub fn new<'a>(below: Arc<dyn TrainableStore>, copies: PackedCopies, first: impl Iterator<Item = &'a str>) -> Self {
        let state = PrepackingState {
            active: first.map(str::to_string).collect(),
            groups: BTreeMap::new(),
        };
        Self {
            below,
            copies,
            state: Mutex::new(state),
        }
    }

    fn state(&self) -> MutexGuard<'_, PrepackingState> {
        lock(&self.state)
    }

    /// Invalidates the copies of all groups that contain these parameters.
    fn forget(&self, names: &[&str]) {
        let mut state = self.state();
        for p in self.below.params().iter().filter(|p| names.contains(&&*p.name)) {
            state.groups.remove(&p.group);
        }
    }

    fn packed(&self, group: Group, from: &GroupWeights, active: &BTreeSet<String>) -> Result<GroupWeights> {
        let covered = |name: &str| {
            let mut of_group = self.below.params().iter().filter(|p| p.group == group);
            !active.contains(name) && of_group.any(|p| &*p.name == name && self.copies.covers(p))
        };
        let mut out = GroupWeights::default();
        for (name, weight) in from.iter() {
            let copied = match weight {
                Weight::Dense(tensor) if covered(name) => {
                    PrepackedTensor::new(tensor, self.copies.orders, self.copies.rank(name))?
                }
                _ => None,
            };
            match copied {
                Some(copied) => out.insert(name.clone(), copied),
                None => out.insert(name.clone(), weight.clone()),
            }
        }
        Ok(out)
    }
}

impl WeightSource for PrepackingSource {
    fn fetch(&self, group: Group) -> Result<Arc<GroupWeights>> {
        let from = self.below.fetch(group)?;
        let mut state = self.state();
        if let Some((known, copied)) = state.groups.get(&group)
            && Arc::ptr_eq(known, &from)
        {
            return Ok(copied.clone());
        }
        // Free the old copies first.
        state.groups.remove(&group);
        let copied = Arc::new(self.packed(group, &from, &state.active)?);
        state.groups.insert(group, (from, copied.clone()));
        Ok(copied)
    }

    fn prefetch(&self, group: Group) {
        self.below.prefetch(group);
    }

    fn params(&self) -> &[ParamInfo] {
        self.below.params()
    }

    fn resident_bytes(&self) -> u64 {
        let state = self.state();
        let weights = state.groups.values().flat_map(|(_, copied)| copied.iter());
        let copies = weights.map(|(_, weight)| match weight {
            Weight::Prepacked(weight) => weight.copies(),
            _ => 0,
        });
        self.below.resident_bytes() + copies.sum::<u64>()
    }

    fn in_memory(&self, name: &str) -> Option<Tensor> {
        self.below.in_memory(name)
    }

    fn hold(&self, name: &str) -> Result<Tensor> {
        self.below.hold(name)
    }

    fn rows(&self, name: &str, ids: &[u32]) -> Result<(Tensor, Vec<u32>)> {
        self.below.rows(name, ids)
    }

    fn streamed(&self, name: &str) -> Option<Box<dyn StreamedMatrix + '_>> {
        self.below.streamed(name)
    }
}

impl TrainableStore for PrepackingSource {
    fn master_in_optimizer(&self, name: &str) -> bool {
        self.below.master_in_optimizer(name)
    }

    fn activate(&self, names: &[&str], low: &mut dyn MasterLowBits) -> Result<()> {
        self.state().active.extend(names.iter().map(|n| n.to_string()));
        self.forget(names);
        self.below.activate(names, low)
    }

    fn deactivate(&self, keep: &dyn Fn(&str) -> bool, low: &mut dyn MasterLowBits) -> Result<Vec<RequantizedWeight>> {
        let requantized = self.below.deactivate(keep, low)?;
        let active = std::mem::take(&mut self.state().active);
        let (kept, leaving): (BTreeSet<String>, BTreeSet<String>) = active.into_iter().partition(|name| keep(name));
        self.state().active = kept;
        self.forget(&leaving.iter().map(String::as_str).collect::<Vec<_>>());
        Ok(requantized)
    }

    fn requantize(&self, name: &str, values: &[f32]) -> Result<()> {
        self.below.requantize(name, values)
    }

    fn upload_times(&self) -> Result<Option<CopyTimes>> {
        self.below.upload_times()
    }

    fn expert_reads(&self) -> Option<ExpertReads> {
        self.below.expert_reads()
    }

    fn read(&self, name: &str, sink: &mut NumbersSink) -> Result<()> {
        self.below.read(name, sink)
    }

    fn restore(&self, name: &str, saved: &Weights, low: &mut dyn MasterLowBits) -> Result<()> {
        self.forget(&[name]);
        self.below.restore(name, saved, low)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::CpuBackend;
    use crate::source::{ResidentWeights, Sublayer};
    use candle_core::Device;

    fn params() -> Vec<ParamInfo> {
        let param = |name: &str, shape: &[usize], group| ParamInfo {
            name: name.into(),
            shape: shape.to_vec(),
            group,
            sublayer: Sublayer::Other,
        };
        vec![
            param("embed", &[50, 40], Group::Embedding),
            param("layers.0.a", &[40, 70], Group::Layer(0)),
            param("layers.0.norm", &[40], Group::Layer(0)),
            param("layers.1.a", &[40, 70], Group::Layer(1)),
            param("norm", &[40], Group::Head),
        ]
    }

    fn copies(orders: PrepackedProducts) -> PackedCopies {
        PackedCopies {
            orders,
            head: Some("embed".into()),
            ranks: Arc::new([("layers.0.a".to_string(), 16)].into()),
        }
    }

    fn source(dtype: Dtype) -> PrepackingSource {
        let below = ResidentWeights::random(params(), 1, 0.1, 1.0, dtype, &Device::Cpu).unwrap();
        PrepackingSource::new(Arc::new(below), copies(PrepackedProducts::Both), std::iter::empty())
    }

    fn has_copies(source: &PrepackingSource, group: Group, name: &str) -> bool {
        matches!(
            source.fetch(group).unwrap().weight(name).unwrap().1,
            Weight::Prepacked(_)
        )
    }

    #[test]
    fn bytes_are_those_of_whole_panels() {
        let (params, bf16) = (params(), StoragePolicy::dense(Dtype::Bf16));
        let bytes = |orders, p: &ParamInfo, policy: &StoragePolicy| copies(orders).bytes(p, policy);
        // 40 vectors of 70 elements: 2 panels of 3 steps, and one more for LoRA; transposed, 3 panels of 2 and 1.
        assert_eq!(bytes(PrepackedProducts::Forward, &params[1], &bf16), 2 * 4 * 2048);
        assert_eq!(
            bytes(PrepackedProducts::Both, &params[1], &bf16),
            (2 * 4 + 3 * 3) * 2048
        );
        assert_eq!(
            bytes(PrepackedProducts::Both, &params[3], &bf16),
            (2 * 3 + 3 * 2) * 2048
        );
        assert_eq!(bytes(PrepackedProducts::Both, &params[0], &bf16), 8 * 2048);
        for other in [&params[2], &params[4]] {
            assert_eq!(bytes(PrepackedProducts::Both, other, &bf16), 0);
        }
        assert_eq!(
            bytes(PrepackedProducts::Both, &params[1], &StoragePolicy::dense(Dtype::F32)),
            0
        );
    }

    #[test]
    fn what_trains_has_no_copies() {
        if !CpuBackend::Avx512.available() {
            return eprintln!("skipped: packing for the tile unit needs AVX-512");
        }
        let low = &mut BTreeMap::<String, Tensor>::new();
        let s = source(Dtype::Bf16);
        let below = s.resident_bytes();
        assert!(has_copies(&s, Group::Embedding, "embed") && has_copies(&s, Group::Layer(0), "layers.0.a"));
        assert!(!has_copies(&s, Group::Layer(0), "layers.0.norm"));
        assert_eq!(s.resident_bytes(), below + (8 + 17) * 2048);
        s.activate(&["layers.0.a"], low).unwrap();
        assert!(!has_copies(&s, Group::Layer(0), "layers.0.a") && has_copies(&s, Group::Layer(1), "layers.1.a"));
        assert_eq!(s.resident_bytes(), below + (8 + 12) * 2048);
        s.deactivate(&|_| false, low).unwrap();
        assert!(has_copies(&s, Group::Layer(0), "layers.0.a"));
        assert!(!has_copies(&source(Dtype::F32), Group::Layer(0), "layers.0.a"));
    }
}
