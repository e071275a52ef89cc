//! Weights in memory.

use super::{Group, GroupWeights, ParamInfo, StreamedMatrix, WeightSource, lock, no_such};
use crate::base::{Error, Result};
use crate::quant::Weight;
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// A source whose weights are in memory, frozen.
pub struct InMemoryWeights {
    params: Vec<ParamInfo>,
    groups: Mutex<BTreeMap<Group, Arc<GroupWeights>>>,
    /// Reads matrices that are not in memory, in rows or in pieces.
    below: Option<Arc<dyn WeightSource>>,
}

impl InMemoryWeights {
    /// Without weights: each group must be set before it is fetched.
    pub fn new(params: Vec<ParamInfo>) -> Self {
        Self {
            params,
            groups: Mutex::default(),
            below: None,
        }
    }

    /// As `new`, for the weights of `below`: matrices of groups without them are read from there.
    pub fn over(below: Arc<dyn WeightSource>) -> Self {
        Self {
            below: Some(below.clone()),
            ..Self::new(below.params().to_vec())
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Group, Arc<GroupWeights>>> {
        lock(&self.groups)
    }

    /// Sets or replaces a group; existing handles keep the old weights.
    pub fn set(&self, group: Group, weights: impl Into<Arc<GroupWeights>>) {
        self.lock().insert(group, weights.into());
    }

    /// True if `is` is true for any weight.
    pub fn any(&self, is: impl Fn(&Weight) -> bool) -> bool {
        self.lock().values().flat_map(|g| g.iter()).any(|(_, w)| is(w))
    }

    /// Sum of `of` over all weights.
    pub fn sum(&self, of: impl Fn(&Weight) -> u64) -> u64 {
        let groups = self.lock();
        groups.values().flat_map(|g| g.iter()).map(|(_, w)| of(w)).sum()
    }
}

impl WeightSource for InMemoryWeights {
    fn fetch(&self, group: Group) -> Result<Arc<GroupWeights>> {
        let found = self.lock().get(&group).cloned();
        // A tied head after a norm without parameters has none of its own.
        let empty = || group == Group::Head && self.params.iter().all(|p| p.group != group);
        match found {
            None if empty() => Ok(Arc::default()),
            found => found.ok_or_else(|| Error::new(format!("the model has no {group:?}"))),
        }
    }

    fn stays_in_place(&self) -> bool {
        true
    }

    fn params(&self) -> &[ParamInfo] {
        &self.params
    }

    fn resident_bytes(&self) -> u64 {
        self.sum(Weight::bytes)
    }

    fn in_memory(&self, name: &str) -> Option<Tensor> {
        let param = self.param(name).ok()?;
        Some(self.fetch(param.group).ok()?.get(name).ok()?.1)
    }

    fn rows(&self, name: &str, ids: &[u32]) -> Result<(Tensor, Vec<u32>)> {
        match (self.in_memory(name), &self.below) {
            (Some(table), _) => Ok((table, ids.to_vec())),
            (None, Some(below)) => below.rows(name, ids),
            (None, None) => Err(no_such(name)),
        }
    }

    fn streamed(&self, name: &str) -> Option<Box<dyn StreamedMatrix + '_>> {
        let below = self.below.as_ref().filter(|_| self.in_memory(name).is_none())?;
        below.streamed(name)
    }
}
