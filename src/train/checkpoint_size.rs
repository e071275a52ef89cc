//! The sizes of the files of a checkpoint, before the first step: for the check of free space and the rehearsal of a save.

use crate::engine::ActiveSet;
use crate::model::Adapters;
use crate::optim::Optimizer;
use crate::recipe::Recipe;
use crate::setup::active_schedule::ActiveSchedule;
use crate::source::{ParamInfo, StoragePolicy};
use std::collections::BTreeMap;

/// Bytes of the large files of the largest checkpoint of a run. Parameters of the objective (the value head of PPO, for example)
/// are not counted: their shapes are known only when the model is loaded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CheckpointSize {
    /// The exact f32 values of all weights that the run trains.
    pub weights: u64,
    /// The moments of the weights that train at the same time.
    pub moments: u64,
    /// Their moving averages; 0 for a run without.
    pub averages: u64,
}

/// Room for the small files.
const SMALL: u64 = 1 << 20;

impl CheckpointSize {
    /// After the last one of `steps` optimizer steps. `params`: all parameters of the model.
    pub fn new(
        recipe: &Recipe,
        schedule: &ActiveSchedule,
        steps: u64,
        params: &[ParamInfo],
        adapters: &Adapters,
    ) -> Self {
        let mut shapes: BTreeMap<&str, Vec<usize>> = params.iter().map(|p| (&*p.name, p.shape.to_vec())).collect();
        let parts: Vec<_> = adapters.values().flat_map(|a| a.saved()).collect();
        shapes.extend(parts.iter().map(|p| (&*p.name, p.tensor.dims().to_vec())));
        let active_shape = |active: &ActiveSet, name: &str| {
            let shape = shapes.get(name)?;
            let subset = active.subset(name, shape.iter().product());
            Some(subset.map_or_else(|| shape.clone(), |s| vec![s.len]))
        };
        let elements = |name: &str| shapes.get(name).map_or(0, |s| s.iter().product::<usize>() as u64);
        // Matrices of adapters can be trained in some blocks only, and a checkpoint also has the pair that is subtracted.
        let mut trained = schedule.trained_until(steps.max(1));
        trained.extend(parts.iter().map(|p| p.name.to_string()));
        let mut size = Self {
            weights: 4 * trained.iter().map(|name| elements(name)).sum::<u64>(),
            ..Self::default()
        };
        for turn in schedule.turns(steps, &StoragePolicy::dense(recipe.model.dtype)).iter() {
            let active = &turn.active;
            let shapes = active.names().filter_map(|name| active_shape(active, name));
            let moments = shapes
                .map(|shape| Optimizer::state_bytes(&recipe.optimizer, &shape))
                .sum();
            size.moments = size.moments.max(moments);
            if recipe.train.ema().is_some() {
                size.averages = size.averages.max(4 * active.names().map(elements).sum::<u64>());
            }
        }
        size
    }

    /// The whole checkpoint.
    pub fn total(&self) -> u64 {
        self.weights + self.moments + self.averages + SMALL
    }

    /// The large files, each one divided by `parts` ranks.
    pub fn files(&self, parts: usize) -> Vec<u64> {
        let parts = parts.max(1);
        let whole = [self.weights, self.moments, self.averages];
        let files = whole.into_iter().filter(|size| *size > 0);
        files
            .flat_map(|size| vec![size.div_ceil(parts as u64); parts])
            .collect()
    }
}
