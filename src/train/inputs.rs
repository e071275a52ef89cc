//! Computes the input covariance of every linear over some rows, one layer at a time. All rows go through a layer
//! before the next one is fetched, and the covariances of a layer are freed before those of the next one are allocated.
//!
//! Memory: the hidden states of all rows, N·D·4 bytes, and one layer's covariances, 8·I² bytes for each of its (up to
//! four) different inputs. The rows have no padding: they are concatenated.
//!
//! Letters: N tokens, D hidden size, I input features.

use crate::base::{Error, Result, progress};
use crate::data::{Batch, batch::Example};
use crate::model::{Layer, Network, Observer};
use crate::ops::{linear, update};
use crate::peft::config::CordaArithmetic;
use crate::peft::start::Covariance;
use crate::peft::start::cost::TOKENS;
use candle_core::{DType, Tensor, TensorId};
use std::cell::RefCell;

/// Puts the rows in batches and keeps their order.
pub fn batches(examples: &[Example]) -> Vec<Batch> {
    let mut out = Vec::new();
    let (mut first, mut tokens) = (0, 0);
    for (i, e) in examples.iter().enumerate() {
        if i > first && tokens + e.ids.len() > TOKENS {
            out.push(Batch::from_examples(&examples[first..i]));
            (first, tokens) = (i, 0);
        }
        tokens += e.ids.len();
    }
    if first < examples.len() {
        out.push(Batch::from_examples(&examples[first..]));
    }
    out
}

/// The covariances of one layer.
#[derive(Default)]
pub struct Covariances {
    groups: Vec<InputGroup>,
}

/// Linears with the same input share one covariance.
struct InputGroup {
    modules: Vec<String>,
    covariance: Covariance,
}

impl Covariances {
    pub fn of(&self, module: &str) -> Result<&Covariance> {
        let group = self.groups.iter().find(|g| g.modules.iter().any(|m| m == module));
        match group {
            Some(group) => Ok(&group.covariance),
            None => Err(Error::new("this linear layer received no input").at(module)),
        }
    }
}

/// Sums the covariances while a layer runs.
struct CovarianceObserver {
    arithmetic: CordaArithmetic,
    found: RefCell<CovarianceSums>,
}

#[derive(Default)]
struct CovarianceSums {
    all: Covariances,
    last: Option<(TensorId, usize)>,
}

impl CovarianceObserver {
    fn add(&self, covariance: &mut Covariance, x: &Tensor) -> Result<()> {
        let products = update::to_f32_vec(&linear::grad_weight(x, x, DType::F32)?)?;
        let sums = update::to_f32_vec(&linear::grad_bias(x)?)?;
        let (factor, count) = match self.arithmetic {
            CordaArithmetic::Ft => (1.0, x.dim(0)?),
            CordaArithmetic::Peft => {
                let largest = update::to_f32_vec(x)?.into_iter().fold(f32::NEG_INFINITY, f32::max);
                (1.0 / f64::from(largest.abs()), 1)
            }
        };
        if !factor.is_finite() || products.iter().any(|p| !p.is_finite()) {
            return Err(Error::new("the inputs of a linear layer are not finite, or all zero"));
        }
        covariance.add(&products, &sums, factor, count);
        Ok(())
    }
}

impl Observer for CovarianceObserver {
    fn input(&self, weight: &str, x: &Tensor) -> Result<()> {
        let module = weight.trim_end_matches(".weight");
        let mut found = self.found.borrow_mut();
        let CovarianceSums {
            all: Covariances { groups },
            last,
        } = &mut *found;
        if let Some((id, group)) = *last
            && id == x.id()
        {
            let modules = &mut groups[group].modules;
            if !modules.iter().any(|m| m == module) {
                modules.push(module.to_string());
            }
            return Ok(());
        }
        let at = match groups.iter().position(|g| g.modules.iter().any(|m| m == module)) {
            Some(at) => at,
            None => {
                groups.push(InputGroup {
                    modules: vec![module.to_string()],
                    covariance: Covariance::new(x.dim(1)?),
                });
                groups.len() - 1
            }
        };
        *last = Some((x.id(), at));
        self.add(&mut groups[at].covariance, x).map_err(|e| e.or_at(module))
    }
}

/// Calls `each` with the covariances of each layer, from the first layer up; then of the linears outside of the layers, if
/// there are any.
pub fn observe(
    network: &Network,
    batches: &[Batch],
    arithmetic: CordaArithmetic,
    each: &mut dyn FnMut(usize, &Covariances) -> Result<()>,
) -> Result<()> {
    let outside = CovarianceObserver {
        arithmetic,
        found: RefCell::default(),
    };
    let embed = |b: &Batch| {
        let mut ctx = network.context(&b.positions, &b.documents, None)?;
        ctx.observer = Some(&outside);
        Ok((network.embed(&b.ids, &ctx)?, ctx.shared))
    };
    let mut states = batches.iter().map(embed).collect::<Result<Vec<_>>>()?;
    for layer in 0..network.layers() {
        let phase = progress::part("batch", batches.len());
        let seen = CovarianceObserver {
            arithmetic,
            found: RefCell::default(),
        };
        let block = network.block(layer)?;
        for (batch, (x, shared)) in batches.iter().zip(&mut states) {
            let mut ctx = network.context(&batch.positions, &batch.documents, None)?;
            ctx.observer = Some(&seen);
            ctx.shared = shared.clone();
            *x = block.forward(x, &ctx)?;
            phase.add(1);
        }
        drop(phase);
        each(layer, &seen.found.into_inner().all)?;
    }
    if network.linear_groups() == network.layers() {
        return Ok(());
    }
    for (batch, (x, _)) in batches.iter().zip(&states) {
        let mut ctx = network.context(&batch.positions, &batch.documents, None)?;
        ctx.observer = Some(&outside);
        network.normalize(x, &ctx)?;
    }
    each(network.layers(), &outside.found.into_inner().all)
}
