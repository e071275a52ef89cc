//! Adapters on the joined parameters of experts: each linear of an expert gets a view of their pairs, and the gradients of
//! the views are joined again.
//!
//! Letters: E experts, R rank, I input features, O output features of the joined matrix.

use super::super::contracts::{GradSink, Param};
use super::super::linear::Linear;
use super::super::spec::Spec;
use crate::base::{Error, Result};
use crate::ops::expert_pairs::{self, ExpertPairs, JoinedPair};
use crate::ops::update;
use crate::peft::experts::part_of;
use crate::peft::{Adapter, ExpertLora, ExpertSite};
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The adapters of a layer on the parameters of all its experts.
#[derive(Default)]
pub(in crate::model) struct JoinedAdapters(Vec<(ExpertSite, Arc<Adapter>)>);

impl JoinedAdapters {
    /// Those of layer `index`; `adapter` finds the adapter of a parameter by its path.
    pub(in crate::model) fn new(spec: &Spec, index: usize, adapter: &dyn Fn(&str) -> Option<Arc<Adapter>>) -> Self {
        let sites = spec.expert_sites_of(index).into_iter();
        Self(
            sites
                .filter_map(|site| adapter(&site.site.module).map(|a| (site, a)))
                .collect(),
        )
    }

    fn pairs(&self) -> impl Iterator<Item = (&ExpertSite, &ExpertLora)> {
        self.0.iter().filter_map(|(site, adapter)| match &**adapter {
            Adapter::Experts(pairs) => Some((site, pairs)),
            _ => None,
        })
    }

    /// Gives projection `projection` of expert `expert` its pair.
    pub(super) fn place(&self, linear: &mut Linear, expert: usize, projection: usize) -> Result<()> {
        for (ExpertSite { projections: all, .. }, pairs) in self.pairs() {
            if all.contains(&projection) {
                let own = pairs.part(expert, projection - all.start, all.len())?;
                linear.adapter = Some(Arc::new(Adapter::Lora(own)));
            }
        }
        Ok(())
    }

    /// True if projection `projection` has a pair of a joined parameter.
    pub(super) fn has(&self, projection: usize) -> bool {
        self.pairs().any(|(site, _)| site.projections.contains(&projection))
    }

    /// The pairs for experts that are computed together, for activations of type `dtype`.
    pub(super) fn together(&self, dtype: DType) -> Result<Vec<PairsTogether<'_>>> {
        let all: Vec<JoinedPair<'_>> = self.pairs().map(|(_, p)| p.joined()).collect();
        let made = expert_pairs::new(&all, dtype)?;
        let all = self.pairs().zip(made).map(|((site, p), pairs)| PairsTogether {
            projections: site.projections.clone(),
            a: &p.a,
            b: &p.b,
            pairs,
        });
        Ok(all.collect())
    }

    /// True if a pair gets a gradient.
    pub(super) fn wanted(&self, sink: &dyn GradSink) -> bool {
        self.pairs()
            .any(|(_, p)| sink.wants(&p.a.name) || sink.wants(&p.b.name))
    }

    /// The sink for the experts of this layer; `JoinedSink::finish` passes the gradients on.
    pub(super) fn sink<'a>(&'a self, inner: &'a mut dyn GradSink) -> JoinedSink<'a> {
        let parts = self.pairs().flat_map(|(_, p)| [&p.a, &p.b]);
        let wanted = parts.filter(|p| inner.wants(&p.name)).map(|p| (&*p.name, (p, None)));
        JoinedSink {
            parts: wanted.collect(),
            inner,
        }
    }
}

/// The pairs on one parameter, for experts that are computed together.
pub(super) struct PairsTogether<'a> {
    /// As in `ExpertSite`.
    pub projections: Range<usize>,
    /// A and B of all experts, for the sink.
    pub a: &'a Param,
    pub b: &'a Param,
    pub pairs: ExpertPairs,
}

/// Joins the gradients of views: adds each to its rows of the gradient of the whole. All others pass.
pub(super) struct JoinedSink<'a> {
    /// By name: the whole, and its gradient after `start`.
    parts: BTreeMap<&'a str, (&'a Param, Option<Tensor>)>,
    inner: &'a mut dyn GradSink,
}

impl JoinedSink<'_> {
    /// Allocates the joined gradients. Experts that are computed together add theirs in place (`sum`).
    pub(super) fn start(&mut self) -> Result<()> {
        for (param, gradient) in self.parts.values_mut() {
            *gradient = Some(zeros(param)?);
        }
        Ok(())
    }

    /// Passes the joined gradients on. That of an expert without tokens is zero.
    pub(super) fn finish(self) -> Result<()> {
        for (param, gradient) in self.parts.into_values() {
            self.inner.take(param, gradient.ok_or_else(|| not_started(param))?)?;
        }
        Ok(())
    }
}

fn not_started(whole: &Param) -> Error {
    Error::internal("the joined gradient of experts was not allocated").at(&*whole.name)
}

fn zeros(param: &Param) -> Result<Tensor> {
    update::zeros(param.tensor.shape(), DType::F32, param.tensor.device())
}

impl GradSink for JoinedSink<'_> {
    fn wants(&self, name: &str) -> bool {
        match part_of(name) {
            Some((whole, _)) => self.parts.contains_key(whole),
            None => self.inner.wants(name),
        }
    }

    fn take(&mut self, param: &Param, gradient: Tensor) -> Result<()> {
        let Some((whole, row)) = part_of(&param.name) else {
            return self.inner.take(param, gradient);
        };
        match self.parts.get(whole) {
            Some((_, Some(sum))) => update::add_assign(&sum.narrow(0, row, gradient.dim(0)?)?, &gradient),
            Some((whole, None)) => Err(not_started(whole)),
            None => Ok(()),
        }
    }

    fn contributors(&self) -> usize {
        self.inner.contributors()
    }

    fn in_order(&self) -> bool {
        self.inner.in_order()
    }

    fn take_elsewhere(&mut self, name: &str, shape: Vec<usize>) -> Result<()> {
        self.inner.take_elsewhere(name, shape)
    }

    fn sum(&self, name: &str) -> Option<Tensor> {
        match part_of(name) {
            Some(_) => None,
            None => match self.parts.get(name) {
                Some((_, sum)) => sum.clone(),
                None => self.inner.sum(name),
            },
        }
    }
}
