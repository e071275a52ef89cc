//! The set of active parameters, their masks, the corrected inactive parameters, and the lowest layer that the backward
//! pass must reach.

use crate::ops::index_subset::IndexSubset;
use crate::optim::UpdateMasks;
use crate::source::Group;
use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// Inactive parameters that change nevertheless: each is corrected with its gradient, or the sign of it, as soon as the
/// gradient is computed (BREAD).
#[derive(Debug, Clone, PartialEq)]
pub struct CorrectedParams {
    /// Names of the corrected parameters.
    pub names: BTreeSet<String>,
    /// Factor of the learning rate.
    pub scale: f64,
    /// True if only the sign of the gradient is used.
    pub sign: bool,
}

/// The parameters that change in a step.
#[derive(Debug, Clone, PartialEq)]
pub struct ActiveSet {
    names: Arc<BTreeSet<String>>,
    masks: Option<UpdateMasks>,
    corrected: Option<Arc<CorrectedParams>>,
    lowest: Group,
    /// A fingerprint of the changing parameters of each layer.
    layers: Arc<BTreeMap<usize, u64>>,
}

/// A fingerprint cannot contain the whole mask. It contains the number of elements that the mask would make active in a
/// parameter with this many elements.
const SAMPLE: usize = 1 << 20;

/// The parameter name without its layer prefix.
fn below(name: &str) -> &str {
    let rest = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    rest.map_or(name, |(_, below)| below)
}

/// The group of a parameter name; adapters belong to the layer of their linear.
pub fn group_of(name: &str) -> Group {
    let layer = name
        .strip_prefix("model.layers.")
        .and_then(|rest| rest.split('.').next()?.parse().ok());
    if let Some(l) = layer {
        return Group::Layer(l);
    }
    // The projections of the embedding (per-layer inputs, other streams) are used before the layers, as its tables.
    if name.starts_with("model.embed_tokens.")
        || name.starts_with("model.embed_tokens_per_layer.")
        || name.starts_with("model.per_layer_")
        || name.starts_with("model.altup_projections.")
    {
        Group::Embedding
    } else {
        Group::Head
    }
}

fn is_outside(name: &str) -> bool {
    !matches!(group_of(name), Group::Layer(_))
}

impl ActiveSet {
    /// Trains these parameters, and no others.
    pub fn new(names: impl IntoIterator<Item = String>) -> Self {
        let names: BTreeSet<String> = names.into_iter().collect();
        let lowest = names.iter().map(|n| group_of(n)).min().unwrap_or(Group::Head);
        let active = Self {
            names: Arc::new(names),
            masks: None,
            corrected: None,
            lowest,
            layers: Arc::default(),
        };
        active.fingerprinted()
    }

    /// Names of one layer are adjacent in a sorted set, so one pass is enough.
    fn fingerprinted(mut self) -> Self {
        let mut layers: BTreeMap<usize, DefaultHasher> = BTreeMap::new();
        for (name, corrected) in self
            .names()
            .map(|n| (n, false))
            .chain(self.corrected().map(|n| (n, true)))
        {
            if let Group::Layer(l) = group_of(name) {
                let part = self.masks.as_ref().map(|m| m.len(name, SAMPLE));
                (below(name), corrected, part).hash(layers.entry(l).or_default());
            }
        }
        self.layers = Arc::new(layers.into_iter().map(|(l, h)| (l, h.finish())).collect());
        self
    }

    /// Restricts the active parameters to masks.
    pub fn masked(mut self, masks: Option<UpdateMasks>) -> Self {
        self.masks = masks;
        self.fingerprinted()
    }

    /// Adds parameters that are corrected beside the active ones.
    pub fn with_corrections(mut self, corrected: Option<CorrectedParams>) -> Self {
        let lowest = corrected.iter().flat_map(|c| &c.names).map(|n| group_of(n)).min();
        self.lowest = lowest.map_or(self.lowest, |l| l.min(self.lowest));
        self.corrected = corrected.map(Arc::new);
        self.fingerprinted()
    }

    /// Equal for layers in which the same parameters change; 0 if nothing changes.
    pub fn fingerprint(&self, layer: usize) -> u64 {
        self.layers.get(&layer).copied().unwrap_or(0)
    }

    /// The names of the active parameters.
    pub(super) fn all(&self) -> Arc<BTreeSet<String>> {
        self.names.clone()
    }

    /// Layers with changing parameters, in ascending order.
    pub fn layers(&self) -> impl Iterator<Item = usize> {
        self.layers.keys().copied()
    }

    /// Equal for sets that differ only in the index of their lowest layer.
    pub fn shape(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let first = self.layers().next().unwrap_or(0);
        for (layer, fingerprint) in self.layers.iter() {
            (layer - first, fingerprint).hash(&mut hasher);
        }
        for name in self.outside().chain(self.corrected().filter(|n| is_outside(n))) {
            name.hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Names of the active parameters of one layer.
    pub fn of_layer(&self, layer: usize) -> impl Iterator<Item = &str> {
        // `/` is the character after `.`: all names with the layer's prefix are in this range.
        let (first, end) = (format!("model.layers.{layer}."), format!("model.layers.{layer}/"));
        self.names.range(first..end).map(String::as_str)
    }

    /// Names of the active parameters outside the layers.
    pub fn outside(&self) -> impl Iterator<Item = &str> {
        let (first, end) = ("model.layers.".to_string(), "model.layers/".to_string());
        let (before, after) = (self.names.range(..first), self.names.range(end..));
        before.chain(after).map(String::as_str)
    }

    /// True if the gradient of this parameter is needed.
    pub fn wants(&self, name: &str) -> bool {
        self.contains(name) || self.corrects(name).is_some()
    }

    /// The correction of this parameter, if it is inactive and corrected.
    pub fn corrects(&self, name: &str) -> Option<&CorrectedParams> {
        self.corrected.as_deref().filter(|c| c.names.contains(name))
    }

    /// Names of the corrected parameters.
    pub fn corrected(&self) -> impl Iterator<Item = &str> {
        self.corrected.iter().flat_map(|c| &c.names).map(String::as_str)
    }

    /// The active elements of a parameter with `n` elements; `None`: all of them.
    pub fn subset(&self, name: &str, n: usize) -> Option<IndexSubset> {
        self.masks.as_ref().and_then(|m| m.of(name, n))
    }

    /// True if only some elements of the parameters are active.
    pub fn is_masked(&self) -> bool {
        self.masks.is_some()
    }

    /// True if the optimizer trains this parameter.
    pub fn contains(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// The names of the active parameters, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }

    /// The lowest group that gets a gradient.
    pub fn lowest(&self) -> Group {
        self.lowest
    }

    /// The first layer whose input must be saved; `layers` if only the head is trained.
    pub fn lowest_layer(&self, layers: usize) -> usize {
        match self.lowest {
            Group::Embedding => 0,
            Group::Layer(l) => l,
            Group::Head | Group::Table => layers,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_group_is_found() {
        let a = |names: &[&str]| ActiveSet::new(names.iter().map(|n| n.to_string()));
        assert_eq!(
            a(&["model.layers.11.mlp.up_proj.weight", "model.layers.3.x.lora_A.weight"]).lowest(),
            Group::Layer(3)
        );
        assert_eq!(a(&["model.norm.weight"]).lowest_layer(5), 5);
        assert_eq!(
            a(&["lm_head.weight", "model.embed_tokens.weight"]).lowest(),
            Group::Embedding
        );
        let corrected = CorrectedParams {
            names: ["model.layers.1.mlp.up_proj.weight".to_string()].into(),
            scale: 1.0,
            sign: true,
        };
        let both = a(&["model.layers.3.mlp.up_proj.weight"]).with_corrections(Some(corrected));
        assert_eq!(both.lowest(), Group::Layer(1));
        assert_eq!(both.layers().collect::<Vec<_>>(), [1, 3]);
        assert!(both.wants("model.layers.1.mlp.up_proj.weight") && !both.contains("model.layers.1.mlp.up_proj.weight"));
    }

    #[test]
    fn layers_with_the_same_parameters_have_the_same_fingerprint() {
        let names = |layer: usize, parts: &[&str]| {
            let names = parts.iter().map(|p| format!("model.layers.{layer}.{p}.weight"));
            names.collect::<Vec<_>>()
        };
        let parts = ["mlp.up_proj", "input_layernorm"];
        let more = ["lm_head.weight".to_string(), "model.norm.weight".to_string()];
        let set = |layer| ActiveSet::new(names(layer, &parts).into_iter().chain(more.clone()));
        let (a, b) = (set(3), set(12));
        assert_eq!(a.fingerprint(3), b.fingerprint(12));
        assert_eq!((a.shape(), a.fingerprint(12)), (b.shape(), 0));
        assert_ne!(a.shape(), ActiveSet::new(names(3, &parts)).shape());
        assert_ne!(a.fingerprint(3), ActiveSet::new(names(3, &parts[..1])).fingerprint(3));
        assert_eq!(a.of_layer(3).count(), 2);
        assert_eq!(a.of_layer(1).count(), 0, "layer 12 is not layer 1");
        assert!(a.outside().eq(more.iter().map(String::as_str)));
        // A parameter that is entirely active in one layer only.
        let whole = BTreeSet::from([names(3, &parts[..1])[0].clone()]);
        let both = ActiveSet::new([names(3, &parts), names(4, &parts)].concat());
        assert_eq!(both.fingerprint(3), both.fingerprint(4));
        let masked = both.masked(Some(UpdateMasks::new(0.1, false, 1, 0, whole)));
        assert_ne!(masked.fingerprint(3), masked.fingerprint(4));
    }
}
