//! The model for the planner. Equal layers (same storage, same adapters, the same active parameters) are counted, not
//! simulated one by one: a plan costs the same for ten such layers and for a thousand.

use crate::engine::ActiveSet;
use crate::model::Spec;
use crate::peft::AdapterCost;
use crate::source::sharded::is_in_parts;
use crate::source::{Group, ParamInfo, StoragePolicy};
use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, HashMap};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// Memory of the adapter on each linear, by module.
pub type AdapterCosts = Arc<BTreeMap<String, AdapterCost>>;

pub struct PlanModel<'a> {
    pub spec: &'a Spec,
    /// For each layer the first one with the same parameters.
    alike: Vec<usize>,
    /// Parameters of each of these first layers by their names within the layer.
    below: BTreeMap<usize, Vec<(String, ParamInfo)>>,
    /// Embedding, final norm, head.
    outside: Vec<ParamInfo>,
    /// Shapes of the adapters' matrices.
    adapters: HashMap<Arc<str>, Vec<usize>>,
    /// Equal numbers for layers with the same storage and the same adapters.
    kinds: Vec<u64>,
    /// Description of the storage of the weights.
    pub stored: String,
}

/// A run of equal neighboring layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerRun {
    pub first: usize,
    pub count: usize,
}

/// One step of the simulation through the layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerStep {
    One(usize),
    /// This many layers that are equal to the one before and the one after.
    Same(usize),
}

impl<'a> PlanModel<'a> {
    pub fn new(spec: &'a Spec, storage: &StoragePolicy, adapters: &BTreeMap<String, AdapterCost>) -> Self {
        let layers = spec.layers.len();
        let alike = spec.alike();
        let mut below = BTreeMap::new();
        for &first in &alike {
            below.entry(first).or_insert_with(|| {
                let prefix = format!("model.layers.{first}.");
                let params = spec.layer_params(first).into_iter();
                params
                    .map(|p| (p.name.trim_start_matches(&prefix).to_string(), p))
                    .collect()
            });
        }
        let mut hashers = vec![DefaultHasher::new(); layers];
        for (hasher, (l, first)) in hashers.iter_mut().zip(alike.iter().enumerate()) {
            (first, spec.shares_keys(l)).hash(hasher);
        }
        let mut at = |name: &str, what: &dyn Fn(&str, &mut DefaultHasher)| {
            let Some((layer, rest)) = name.strip_prefix("model.layers.").and_then(|n| n.split_once('.')) else {
                return;
            };
            if let Some(hasher) = layer.parse().ok().and_then(|l: usize| hashers.get_mut(l)) {
                what(rest, hasher);
            }
        };
        for (name, format) in storage.quantized().iter() {
            at(name, &|rest, hasher| (rest, format.to_string()).hash(hasher));
        }
        let mut shapes = HashMap::new();
        for (module, cost) in adapters {
            at(module, &|rest, hasher| {
                let numbers = (cost.fixed, cost.rank, cost.per_token, cost.whole, cost.widens);
                (rest, numbers).hash(hasher);
                // Names differ only in their layer, so the part after the module is compared.
                let parts = cost
                    .trained
                    .iter()
                    .map(|(name, shape)| (name.strip_prefix(module.as_str()), shape));
                parts.for_each(|part| part.hash(hasher));
            });
            shapes.extend(cost.trained.iter().cloned());
        }
        Self {
            spec,
            alike,
            below,
            outside: spec.params_outside(),
            adapters: shapes,
            kinds: hashers.into_iter().map(|h| h.finish()).collect(),
            stored: storage.describe(),
        }
    }

    /// A number for the storage and the adapters of a layer.
    pub fn kind(&self, layer: usize) -> u64 {
        self.kinds.get(layer).copied().unwrap_or(0)
    }

    pub fn layers(&self) -> usize {
        self.spec.layers.len()
    }

    /// The parameters of a layer.
    pub fn layer(&self, layer: usize) -> impl Iterator<Item = ParamInfo> {
        self.below_of(layer).iter().map(move |(below, p)| ParamInfo {
            name: format!("model.layers.{layer}.{below}").into(),
            group: Group::Layer(layer),
            ..p.clone()
        })
    }

    fn below_of(&self, layer: usize) -> &[(String, ParamInfo)] {
        let first = self.alike.get(layer);
        first.and_then(|first| self.below.get(first)).map_or(&[], Vec::as_slice)
    }

    /// Parameters outside of the layers: the embedding comes before the layers, the others after them.
    pub fn outside(&self) -> &[ParamInfo] {
        &self.outside
    }

    /// Number of parameters of the whole model, without adapters.
    pub fn parameters(&self) -> u64 {
        let elements = |(_, p): &(String, ParamInfo)| p.elements() as u64;
        let layer = |l: usize| -> u64 { self.below_of(l).iter().map(elements).sum() };
        let outside: u64 = self.outside.iter().map(|p| p.elements() as u64).sum();
        (0..self.layers()).map(layer).sum::<u64>() + outside
    }

    /// Elements of all adapters that train.
    pub fn adapter_elements(&self) -> u64 {
        let count = |shape: &Vec<usize>| shape.iter().product::<usize>() as u64;
        self.adapters.values().map(count).sum()
    }

    pub fn is_adapter(&self, name: &str) -> bool {
        self.adapters.contains_key(name)
    }

    /// The shape of a parameter or of an adapter's matrix.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        if let Some(shape) = self.adapters.get(name) {
            return Some(shape);
        }
        match name.strip_prefix("model.layers.").and_then(|n| n.split_once('.')) {
            Some((layer, rest)) => {
                let mut params = self.below_of(layer.parse().ok()?).iter();
                params.find(|(b, _)| b == rest).map(|(_, p)| &p.shape[..])
            }
            None => self.outside.iter().find(|p| &*p.name == name).map(|p| &p.shape[..]),
        }
    }

    /// Routed experts of a layer.
    pub fn experts(&self) -> usize {
        let mut all = self.spec.layers.iter().filter_map(|layer| layer.experts);
        all.next().map_or(0, |sizes| sizes.count)
    }

    /// True for a parameter that ranks can store in parts.
    pub fn is_in_parts(&self, name: &str) -> bool {
        let layer = name.strip_prefix("model.layers.").and_then(|n| n.split_once('.'));
        layer.is_some_and(|(layer, rest)| {
            let layer = layer.parse().ok();
            let mut params = layer.map_or(&[][..], |layer| self.below_of(layer)).iter();
            params.any(|(below, p)| below == rest && is_in_parts(p))
        })
    }

    pub fn elements(&self, name: &str) -> u64 {
        self.shape(name)
            .map_or(0, |shape| shape.iter().product::<usize>() as u64)
    }

    /// Elements of the largest parameter or adapter matrix.
    pub fn largest(&self) -> u64 {
        let params = self.below.values().flatten().map(|(_, p)| p).chain(&self.outside);
        let adapters = self.adapters.values().map(|s| s.iter().product::<usize>());
        params.map(ParamInfo::elements).chain(adapters).max().unwrap_or(0) as u64
    }

    /// Groups the layers into runs of neighbors that are equal under `active`.
    pub fn runs(&self, active: &ActiveSet) -> Vec<LayerRun> {
        let mut runs: Vec<LayerRun> = Vec::new();
        let mut last = None;
        for layer in 0..self.layers() {
            let kind = Some((self.kind(layer), active.fingerprint(layer)));
            match runs.last_mut().filter(|_| kind == last) {
                Some(run) => run.count += 1,
                None => runs.push(LayerRun { first: layer, count: 1 }),
            }
            last = kind;
        }
        runs
    }

    /// The layers to simulate: only the first and the last of a run. Runs also end at each of `cuts`.
    pub fn stretches(&self, active: &ActiveSet, cuts: &[usize]) -> Vec<LayerStep> {
        let mut out = Vec::new();
        for LayerRun { first, count } in self.runs(active) {
            let end = first + count;
            let mut edges = vec![first, end];
            edges.extend(cuts.iter().filter(|c| (first + 1..end).contains(c)));
            edges.sort_unstable();
            edges.dedup();
            for piece in edges.windows(2) {
                out.push(LayerStep::One(piece[0]));
                match piece[1] - piece[0] {
                    1 => {}
                    2 => out.push(LayerStep::One(piece[1] - 1)),
                    n => out.extend([LayerStep::Same(n - 2), LayerStep::One(piece[1] - 1)]),
                }
            }
        }
        out
    }

    /// Calls `f` for every distinct parameter, with the number of equal ones.
    pub fn each(&self, active: &ActiveSet, mut f: impl FnMut(&ParamInfo, u64)) {
        self.outside.iter().for_each(|p| f(p, 1));
        for run in self.runs(active) {
            self.layer(run.first).for_each(|p| f(&p, run.count as u64));
        }
    }

    /// The sum over every parameter.
    pub fn sum(&self, active: &ActiveSet, mut f: impl FnMut(&ParamInfo) -> u64) -> u64 {
        let mut sum = 0u64;
        self.each(active, |p, count| sum = sum.saturating_add(f(p).saturating_mul(count)));
        sum
    }

    /// The sum over the names of all active parameters.
    pub fn sum_trained(&self, active: &ActiveSet, f: impl Fn(&str) -> u64) -> u64 {
        let mut sum: u64 = active.outside().map(&f).sum();
        for run in self.runs(active) {
            let one: u64 = active.of_layer(run.first).map(&f).sum();
            sum = sum.saturating_add(one.saturating_mul(run.count as u64));
        }
        sum
    }

    /// The sum over the names of all corrected parameters.
    pub fn sum_corrected(&self, active: &ActiveSet, f: impl Fn(&str) -> u64) -> u64 {
        if active.corrected().next().is_none() {
            return 0;
        }
        let mut sum = 0u64;
        self.each(active, |p, count| {
            if !active.contains(&p.name) && active.corrects(&p.name).is_some() {
                sum = sum.saturating_add(f(&p.name).saturating_mul(count));
            }
        });
        sum
    }

    /// Elements of the largest active parameter.
    pub fn largest_trained(&self, active: &ActiveSet) -> u64 {
        let runs = self.runs(active);
        let names = runs
            .iter()
            .flat_map(|run| active.of_layer(run.first))
            .chain(active.outside());
        names.map(|name| self.elements(name)).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{families, shapes};
    use crate::recipe::Dtype;

    fn layers(of: impl Iterator<Item = usize>) -> ActiveSet {
        ActiveSet::new(of.map(|l| format!("model.layers.{l}.mlp.up_proj.weight")))
    }

    #[test]
    fn alike_layers_are_one_run_and_sums_count_each_of_them() {
        let spec = families::read(&shapes::config("shape:qwen2.5-1.5b").unwrap().unwrap()).unwrap();
        let mut storage = StoragePolicy::dense(Dtype::Bf16);
        let model = PlanModel::new(&spec, &storage, &BTreeMap::new());
        let run = |first, count| LayerRun { first, count };
        assert_eq!(model.runs(&layers(0..28)), [run(0, 28)]);
        assert_eq!(model.runs(&layers(5..7)), [run(0, 5), run(5, 2), run(7, 21)]);
        let all: u64 = spec.params().iter().map(|p| p.elements() as u64).sum();
        assert_eq!(
            (model.parameters(), model.sum(&layers(5..7), |p| p.elements() as u64)),
            (all, all)
        );
        let up = (spec.hidden * spec.intermediate) as u64;
        assert_eq!(model.sum_trained(&layers(5..7), |n| model.elements(n)), 2 * up);
        assert_eq!(model.largest(), (spec.vocab * spec.hidden) as u64);
        assert_eq!(model.largest_trained(&layers(3..4)), up);
        // A layer with another storage is a separate run.
        let name = "model.layers.9.mlp.up_proj.weight";
        storage.set(name.into(), Some(crate::quant::Format::Int8 { group: 0 }));
        let model = PlanModel::new(&spec, &storage, &BTreeMap::new());
        assert_eq!(model.runs(&layers(0..28)), [run(0, 9), run(9, 1), run(10, 18)]);
    }

    #[test]
    fn a_walk_takes_the_ends_of_what_is_alike() {
        let spec = families::read(&shapes::config("shape:qwen2.5-1.5b").unwrap().unwrap()).unwrap();
        let model = PlanModel::new(&spec, &StoragePolicy::dense(Dtype::Bf16), &BTreeMap::new());
        use LayerStep::{One, Same};
        assert_eq!(model.stretches(&layers(0..28), &[]), [One(0), Same(26), One(27)]);
        let want = [One(0), One(1), One(2), Same(2), One(5), One(6), Same(20), One(27)];
        assert_eq!(model.stretches(&layers(0..28), &[2, 6, 40, 0]), want);
        let walked = |s: &LayerStep| match s {
            One(_) => 1,
            Same(n) => *n,
        };
        assert_eq!(want.iter().map(walked).sum::<usize>(), 28);
    }
}
