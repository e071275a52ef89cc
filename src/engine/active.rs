//! Which parameters are trained now, which part of each, which others are corrected, and how far down the backward
//! pass has to go.

use crate::ops::part::Places;
use crate::optim::Masks;
use crate::source::Group;
use std::collections::BTreeSet;

/// Parameters that are not active and change all the same: against their gradient, or its sign, the moment it
/// appears (BREAD).
#[derive(Debug, Clone, PartialEq)]
pub struct Corrected {
    pub names: BTreeSet<String>,
    /// Factor of the learning rate.
    pub scale: f64,
    pub sign: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Active {
    names: BTreeSet<String>,
    masks: Option<Masks>,
    corrected: Option<Corrected>,
    lowest: Group,
}

/// The group a parameter name belongs to; adapters belong to the layer they sit in.
pub fn group_of(name: &str) -> Group {
    let layer = name
        .strip_prefix("model.layers.")
        .and_then(|rest| rest.split('.').next()?.parse().ok());
    if let Some(l) = layer {
        return Group::Layer(l);
    }
    if name.starts_with("model.embed_tokens.") {
        Group::Embedding
    } else {
        Group::Head
    }
}

impl Active {
    pub fn new(names: impl IntoIterator<Item = String>) -> Self {
        let names: BTreeSet<String> = names.into_iter().collect();
        let lowest = names.iter().map(|n| group_of(n)).min().unwrap_or(Group::Head);
        Self {
            names,
            masks: None,
            corrected: None,
            lowest,
        }
    }

    /// Only these parts of the parameters.
    pub fn masked(mut self, masks: Option<Masks>) -> Self {
        self.masks = masks;
        self
    }

    /// Beside the active parameters these are corrected.
    pub fn correcting(mut self, corrected: Option<Corrected>) -> Self {
        let lowest = corrected.iter().flat_map(|c| &c.names).map(|n| group_of(n)).min();
        self.lowest = lowest.map_or(self.lowest, |l| l.min(self.lowest));
        self.corrected = corrected;
        self
    }

    /// Does anybody want the gradient of this parameter?
    pub fn wants(&self, name: &str) -> bool {
        self.contains(name) || self.corrects(name).is_some()
    }

    /// What happens to this parameter if it is not active.
    pub fn corrects(&self, name: &str) -> Option<&Corrected> {
        self.corrected.as_ref().filter(|c| c.names.contains(name))
    }

    /// Names of the parameters that are corrected.
    pub fn corrected(&self) -> impl Iterator<Item = &str> {
        self.corrected.iter().flat_map(|c| &c.names).map(String::as_str)
    }

    /// The active part of a parameter of `n` elements; `None`: all of it.
    pub fn places(&self, name: &str, n: usize) -> Option<Places> {
        self.masks.as_ref().and_then(|m| m.of(name, n))
    }

    pub fn is_masked(&self) -> bool {
        self.masks.is_some()
    }

    /// Is it trained by the optimizer?
    pub fn contains(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }

    /// Nothing below this group gets a gradient.
    pub fn lowest(&self) -> Group {
        self.lowest
    }

    /// The first layer whose input must be kept: `layers` if only the head trains.
    pub fn lowest_layer(&self, layers: usize) -> usize {
        match self.lowest {
            Group::Embedding => 0,
            Group::Layer(l) => l,
            Group::Head => layers,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_group_is_found() {
        let a = |names: &[&str]| Active::new(names.iter().map(|n| n.to_string()));
        assert_eq!(
            a(&["model.layers.11.mlp.up_proj.weight", "model.layers.3.x.lora_A.weight"]).lowest(),
            Group::Layer(3)
        );
        assert_eq!(a(&["model.norm.weight"]).lowest_layer(5), 5);
        assert_eq!(
            a(&["lm_head.weight", "model.embed_tokens.weight"]).lowest(),
            Group::Embedding
        );
        let corrected = Corrected {
            names: ["model.layers.1.mlp.up_proj.weight".to_string()].into(),
            scale: 1.0,
            sign: true,
        };
        let both = a(&["model.layers.3.mlp.up_proj.weight"]).correcting(Some(corrected));
        assert_eq!(both.lowest(), Group::Layer(1));
        assert!(both.wants("model.layers.1.mlp.up_proj.weight") && !both.contains("model.layers.1.mlp.up_proj.weight"));
    }
}
