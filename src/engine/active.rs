//! Which parameters are trained now, and how far down the backward pass has to go.

use crate::source::Group;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Clone, PartialEq)]
pub struct Active {
    names: BTreeSet<String>,
    /// Learning rates of single parameters over that of the step.
    rates: BTreeMap<String, f64>,
    lowest: Group,
}

/// The group a parameter name belongs to; adapters belong to the layer they sit in.
fn group_of(name: &str) -> Group {
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
            rates: BTreeMap::new(),
            lowest,
        }
    }

    /// With learning rates of their own for some names, as factors.
    pub fn with_rates(mut self, rates: BTreeMap<String, f64>) -> Self {
        self.rates = rates;
        self
    }

    /// The learning rate of a parameter over that of the step.
    pub fn rate(&self, name: &str) -> f64 {
        self.rates.get(name).copied().unwrap_or(1.0)
    }

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
    }
}
