//! The tensors that a layer reads besides its input and its weights: its slice of the per-layer inputs, and the keys
//! and values of an earlier layer. The gradients of both are collected here, until the layer that made the tensors
//! takes them.
//!
//! Letters: L layers, P width of a per-layer input.

use super::routers::RouterTally;
use crate::base::{Error, Result};
use crate::ops::routing::{LogitLoss, Routing};
use crate::ops::update;
use candle_core::Tensor;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

/// Keys and values `[N, K·E]`, or their gradients.
type KeysValues = (Tensor, Tensor);

/// The tensors of one batch that several layers use.
#[derive(Default)]
pub struct SharedStates {
    /// `[N, L·P]`
    inputs: RefCell<Option<Tensor>>,
    input_gradients: RefCell<Option<Tensor>>,
    /// By the layer that made them.
    keys: RefCell<BTreeMap<usize, KeysValues>>,
    key_gradients: RefCell<BTreeMap<usize, KeysValues>>,
    /// The lowest layer of the backward pass: gradients of the keys of layers below it are dropped.
    lowest: Cell<usize>,
    /// Of a training step.
    routers: RefCell<Option<RouterTally>>,
}

impl SharedStates {
    /// Sets the per-layer inputs of all layers, `[N, L·P]`.
    pub fn set_inputs(&self, inputs: Tensor) {
        self.inputs.replace(Some(inputs));
    }

    /// The per-layer inputs of all layers, `[N, L·P]`, if the family has them.
    pub fn inputs(&self) -> Option<Tensor> {
        self.inputs.borrow().clone()
    }

    /// The input of layer `layer`, `[N, width]`: a copy that the caller may overwrite.
    ///
    /// # Errors
    /// The inputs were not computed (`Internal`); not enough memory on the device.
    pub fn input(&self, layer: usize, width: usize) -> Result<Tensor> {
        match &*self.inputs.borrow() {
            Some(all) => {
                let columns = all.narrow(1, layer * width, width)?;
                Ok(if columns.is_contiguous() {
                    columns.copy()?
                } else {
                    columns.contiguous()?
                })
            }
            None => Err(Error::internal("the per-layer inputs of this batch were not computed").at(layer)),
        }
    }

    /// Starts a backward pass down to layer `lowest`; `inputs`: the gradient of the per-layer inputs is needed.
    ///
    /// # Errors
    /// Not enough memory on the device.
    pub fn start_backward(&self, lowest: usize, inputs: bool) -> Result<()> {
        self.lowest.set(lowest);
        self.routers.borrow_mut().iter_mut().for_each(RouterTally::end);
        if let Some(all) = self.inputs.borrow().as_ref().filter(|_| inputs) {
            let zeros = update::zeros(all.shape(), all.dtype(), all.device())?;
            self.input_gradients.replace(Some(zeros));
        }
        Ok(())
    }

    /// True if the gradient of the per-layer inputs is needed.
    pub fn wants_input_gradients(&self) -> bool {
        self.input_gradients.borrow().is_some()
    }

    /// Stores the gradient of the input of layer `layer`, `[N, P]`.
    ///
    /// # Errors
    /// A gradient of another shape or type (`Shape`).
    pub fn put_input_gradient(&self, layer: usize, gradient: &Tensor) -> Result<()> {
        if let Some(all) = &*self.input_gradients.borrow() {
            all.slice_set(gradient, 1, layer * gradient.dim(1)?)?;
        }
        Ok(())
    }

    /// The gradient of the per-layer inputs, `[N, L·P]`, after the backward pass of all layers.
    pub fn take_input_gradients(&self) -> Option<Tensor> {
        self.input_gradients.take()
    }

    /// Counts what routers do from now on.
    pub fn watch_routers(&self, tally: RouterTally) {
        self.routers.replace(Some(tally));
    }

    /// The choices of the routers, if they were recorded.
    pub fn take_routers(&self) -> Option<RouterTally> {
        self.routers.take()
    }

    /// Counts the tokens of layer `layer`, if routers are watched.
    pub fn routed(&self, layer: usize, routing: &Routing) {
        self.routers
            .borrow_mut()
            .iter_mut()
            .for_each(|tally| tally.add(layer, routing));
    }

    /// The gradients of the losses of the routers.
    pub fn router_gradient(&self) -> LogitLoss {
        let routers = self.routers.borrow();
        routers.as_ref().map_or_else(LogitLoss::default, RouterTally::gradient)
    }

    /// Stores the keys and values of layer `layer`, `[N, K·E]` each, for later layers.
    pub fn put_keys(&self, layer: usize, k: &Tensor, v: &Tensor) {
        self.keys.borrow_mut().insert(layer, (k.clone(), v.clone()));
    }

    /// The keys and values of layer `layer`.
    ///
    /// # Errors
    /// The layer did not run in this pass.
    pub fn keys(&self, layer: usize) -> Result<KeysValues> {
        let found = self.keys.borrow().get(&layer).cloned();
        found.ok_or_else(|| Error::internal("a layer reads the keys of another layer, which did not run").at(layer))
    }

    /// Frees the keys and values of layer `layer`: no later layer needs them.
    pub fn drop_keys(&self, layer: usize) {
        self.keys.borrow_mut().remove(&layer);
    }

    /// Adds the gradients of a later layer for the keys and values of layer `layer`, `[N, K·E]` each.
    ///
    /// # Errors
    /// Gradients of another shape (`Shape`).
    pub fn add_key_gradients(&self, layer: usize, dk: Tensor, dv: Tensor) -> Result<()> {
        if layer < self.lowest.get() {
            return Ok(());
        }
        let mut all = self.key_gradients.borrow_mut();
        match all.get(&layer) {
            Some((sum_k, sum_v)) => {
                update::add_assign(sum_k, &dk)?;
                update::add_assign(sum_v, &dv)?;
            }
            None => drop(all.insert(layer, (dk, dv))),
        }
        Ok(())
    }

    /// The sums of the gradients of later layers for the keys and values of layer `layer`.
    pub fn take_key_gradients(&self, layer: usize) -> Option<KeysValues> {
        self.key_gradients.borrow_mut().remove(&layer)
    }
}
