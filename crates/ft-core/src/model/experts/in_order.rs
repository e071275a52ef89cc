//! Gradients of experts that are computed together, in the order of experts that are computed one after the other: several ranks add
//! their gradients as they come, and which experts are together depends on the tokens of each rank.

use super::super::contracts::{GradSink, Param};
use super::reader::Expert;
use crate::base::Result;
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Keeps the gradients of some experts until `finish`.
pub(super) struct InOrder<'a> {
    inner: &'a mut dyn GradSink,
    /// The place of each parameter in the order.
    places: BTreeMap<Arc<str>, usize>,
    gradients: BTreeMap<usize, (Param, Tensor)>,
}

impl<'a> InOrder<'a> {
    pub(super) fn new(experts: &[Expert], inner: &'a mut dyn GradSink) -> Self {
        // As `expert_backward` and `zero_gradients`.
        let mut names = Vec::new();
        for expert in experts {
            for linear in expert.down.linears().iter().chain(expert.inputs.linears()) {
                names.push(linear.name.clone());
                names.extend(linear.bias.as_ref().map(|bias| bias.name.clone()));
            }
            names.extend(expert.down_bias.as_ref().map(|bias| bias.name.clone()));
        }
        Self {
            inner,
            places: names.into_iter().zip(0..).collect(),
            gradients: BTreeMap::new(),
        }
    }

    /// Passes the gradients on.
    pub(super) fn finish(self) -> Result<()> {
        let all = self.gradients.into_values();
        for (param, gradient) in all {
            self.inner.take(&param, gradient)?;
        }
        Ok(())
    }
}

impl GradSink for InOrder<'_> {
    fn wants(&self, name: &str) -> bool {
        self.inner.wants(name)
    }

    fn take(&mut self, param: &Param, gradient: Tensor) -> Result<()> {
        match self.places.get(&*param.name) {
            Some(place) => {
                self.gradients.insert(*place, (param.clone(), gradient));
                Ok(())
            }
            None => self.inner.take(param, gradient),
        }
    }

    fn sum(&self, name: &str) -> Option<Tensor> {
        self.inner.sum(name)
    }

    fn contributors(&self) -> usize {
        self.inner.contributors()
    }

    fn in_order(&self) -> bool {
        true
    }

    fn take_elsewhere(&mut self, name: &str, shape: Vec<usize>) -> Result<()> {
        self.inner.take_elsewhere(name, shape)
    }
}
