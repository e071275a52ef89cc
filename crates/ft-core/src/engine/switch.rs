//! Moves parameters between their store and the optimizer, and reads and sets exact values.

use super::active::ActiveSet;
use super::step::Engine;
use crate::base::{Error, Result};
use crate::formats::weights::Weights;
use crate::ops::master;
use crate::source::{ParamElements, RequantizedWeight};

/// Receives exact values in pieces.
pub(crate) type ExactSink<'a> = dyn FnMut(&[f32]) -> Result<()> + 'a;

impl Engine {
    /// Deactivates all parameters outside `active` and activates those in it. Moments are kept for the parameters that
    /// `survives` accepts; the low bits of fp32 masters are never lost. A parameter whose
    /// moments are dropped gets its average as value, if there are averages. Returns the requantized weights.
    ///
    /// # Errors
    /// A file of trained parameters cannot be read or written; not enough memory for the activated ones; another rank
    /// has failed.
    pub fn switch(&mut self, active: &ActiveSet, survives: impl Fn(&str) -> bool) -> Result<Vec<RequantizedWeight>> {
        self.settle_averages(active, &survives)?;
        if self.divided {
            self.gather_low(active)?;
        }
        self.optimizer.drop_moments_except(survives)?;
        let requantized = self
            .store
            .deactivate(&|name| active.contains(name), &mut self.optimizer)?;
        let names: Vec<&str> = active.names().collect();
        self.store.activate(&names, &mut self.optimizer)?;
        self.cut_low(active)?;
        Ok(requantized)
    }

    /// Passes the exact f32 values of a trained weight or of an adapter matrix to `sink`. On several ranks each has a part
    /// of them: for rank 0 within `by_root`.
    ///
    /// # Errors
    /// The model has no such parameter (`NotFound`); a file of trained parameters cannot be read; any error of `sink`.
    pub fn exact(&self, name: &str, sink: &mut ExactSink) -> Result<()> {
        let store = &self.store;
        if self.is_in_parts(name) {
            return self.exact_of_owners(name, sink);
        }
        if self.optimizer.low_part(name).is_some() {
            return self.exact_of_all(name, sink);
        }
        if self.is_exact_in_memory(name) {
            return sink(&self.optimizer.exact(name, &self.network.param(name)?.tensor)?);
        }
        store.read(name, &mut |numbers| match numbers {
            ParamElements::F32(values) => sink(values),
            ParamElements::Bf16(high, Some(low)) => {
                let pairs = high.iter().zip(low);
                sink(&pairs.map(|(h, l)| master::join(*h, *l as u16)).collect::<Vec<_>>())
            }
            ParamElements::F16(high, Some(low)) => {
                let pairs = high.iter().zip(low);
                sink(&pairs.map(|(h, l)| master::join_f16(*h, *l as u16)).collect::<Vec<_>>())
            }
            ParamElements::F16(high, None) => sink(&high.iter().map(|h| h.to_f32()).collect::<Vec<_>>()),
            ParamElements::Bf16(high, None) => sink(&high.iter().map(|h| h.to_f32()).collect::<Vec<_>>()),
        })
    }

    /// True if the exact values of a parameter are its weight in memory and the low bits that the optimizer has.
    pub(super) fn is_exact_in_memory(&self, name: &str) -> bool {
        let store = &self.store;
        store.param(name).is_err() || (store.master_in_optimizer(name) && store.in_memory(name).is_some())
    }

    /// Sets a weight or an adapter matrix to the exact values of the tensor of the same name in `saved`.
    ///
    /// # Errors
    /// The model has no such parameter, or its size differs.
    pub fn restore(&mut self, name: &str, saved: &Weights) -> Result<()> {
        if self.store.param(name).is_ok() {
            self.store.restore(name, saved, &mut self.optimizer)?;
            if let (true, Some(own)) = (self.is_in_parts(name), self.own_part(name, self.elements(name)?)) {
                self.optimizer.cut_low(name, &own)?;
            }
            return Ok(());
        }
        let param = self.network.param(name)?;
        self.optimizer
            .restore_weight(name, &param.tensor, &saved.read_f32(name)?)?;
        match self.network.tokens.iter().find(|t| &*t.param.name == name) {
            Some(rows) => rows.place(&self.network),
            None => Ok(()),
        }
    }

    /// Number of elements of a weight or an adapter matrix.
    ///
    /// # Errors
    /// The model has no such parameter (`NotFound`).
    pub fn elements(&self, name: &str) -> Result<usize> {
        if let Ok(info) = self.store.param(name) {
            return Ok(info.elements());
        }
        let param = self
            .network
            .param(name)
            .map_err(|_| Error::not_found("no such parameter").at(name))?;
        Ok(param.tensor.elem_count())
    }
}
