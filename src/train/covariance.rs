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
    parts(examples).into_iter().map(Batch::from_examples).collect()
}

/// The rows of each batch.
fn parts(examples: &[Example]) -> Vec<&[Example]> {
    let mut out = Vec::new();
    let (mut first, mut tokens) = (0, 0);
    for (i, e) in examples.iter().enumerate() {
        if i > first && tokens + e.ids.len() > TOKENS {
            out.push(&examples[first..i]);
            (first, tokens) = (i, 0);
        }
        tokens += e.ids.len();
    }
    if first < examples.len() {
        out.push(&examples[first..]);
    }
    out
}

/// A batch, and those of its tokens whose inputs count.
pub struct ObservedBatch {
    batch: Batch,
    /// Numbers of the tokens, ascending; `None`: all.
    counted: Option<Vec<u32>>,
}

impl ObservedBatch {
    /// All tokens count.
    pub fn whole(batch: Batch) -> Self {
        Self { batch, counted: None }
    }

    /// The rows in batches. Tokens that are trained count, as with the labels of PEFT: the inputs at the token itself, not
    /// those at the token before it, which predict it.
    pub fn trained(examples: &[Example]) -> Vec<Self> {
        let one = |rows: &[Example]| {
            let trained = rows.iter().flat_map(|row| &row.trained);
            let counted = (0u32..).zip(trained).filter(|(_, trained)| **trained);
            Self {
                counted: Some(counted.map(|(token, _)| token).collect()),
                batch: Batch::from_examples(rows),
            }
        };
        parts(examples).into_iter().map(one).collect()
    }

    /// Number of tokens that count.
    pub fn count(&self) -> usize {
        self.counted.as_ref().map_or(self.batch.len(), Vec::len)
    }

    /// The rows of `x` that count; `first`: the token of its first row. `None`: there are none.
    fn rows(&self, x: &Tensor, first: usize) -> Result<Option<Tensor>> {
        let end = first + x.dim(0)?;
        // An expert sees other rows. No linear of an expert is initialized from them.
        let Some(counted) = self.counted.as_ref().filter(|_| end <= self.batch.len()) else {
            return Ok(Some(x.clone()));
        };
        let place = |token: usize| counted.partition_point(|t| (*t as usize) < token);
        let rows = &counted[place(first)..place(end)];
        if rows.is_empty() {
            return Ok(None);
        }
        let rows: Vec<u32> = rows.iter().map(|t| t - first as u32).collect();
        let rows = Tensor::from_vec(rows, place(end) - place(first), x.device())?;
        Ok(Some(x.index_select(&rows, 0)?.contiguous()?))
    }
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
    /// Tokens of the current batch that are done: an input may come in pieces, and a linear may run more than once.
    done: usize,
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
struct CovarianceObserver<'a> {
    arithmetic: CordaArithmetic,
    found: RefCell<CovarianceSums<'a>>,
}

#[derive(Default)]
struct CovarianceSums<'a> {
    all: Covariances,
    last: Option<(TensorId, usize)>,
    batch: Option<&'a ObservedBatch>,
}

impl<'a> CovarianceObserver<'a> {
    fn new(arithmetic: CordaArithmetic) -> Self {
        Self {
            arithmetic,
            found: RefCell::default(),
        }
    }

    /// The next inputs are those of this batch.
    fn begin(&self, batch: &'a ObservedBatch) {
        let mut found = self.found.borrow_mut();
        found.batch = Some(batch);
        found.all.groups.iter_mut().for_each(|group| group.done = 0);
    }

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

impl Observer for CovarianceObserver<'_> {
    fn input(&self, weight: &str, x: &Tensor) -> Result<()> {
        let module = weight.trim_end_matches(".weight");
        let mut found = self.found.borrow_mut();
        let CovarianceSums {
            all: Covariances { groups },
            last,
            batch,
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
                    done: 0,
                });
                groups.len() - 1
            }
        };
        *last = Some((x.id(), at));
        let InputGroup { covariance, done, .. } = &mut groups[at];
        let counted = match batch {
            Some(batch) => {
                let first = *done % batch.batch.len().max(1);
                *done += x.dim(0)?;
                batch.rows(x, first)?
            }
            None => Some(x.clone()),
        };
        match counted {
            Some(x) => self.add(covariance, &x).map_err(|e| e.or_at(module)),
            None => Ok(()),
        }
    }
}

/// Calls `each` with the covariances of each layer, from the first layer up; then of the linears outside of the layers, if
/// there are any.
pub fn observe(
    network: &Network,
    batches: &[ObservedBatch],
    arithmetic: CordaArithmetic,
    each: &mut dyn FnMut(usize, &Covariances) -> Result<()>,
) -> Result<()> {
    let outside = CovarianceObserver::new(arithmetic);
    let mut states = Vec::with_capacity(batches.len());
    for observed in batches {
        let batch = &observed.batch;
        outside.begin(observed);
        let mut ctx = network.context(&batch.positions, &batch.documents, None)?;
        ctx.observer = Some(&outside);
        states.push((network.embed(&batch.ids, &ctx)?, ctx.shared));
    }
    for layer in 0..network.layers() {
        let phase = progress::part("batch", batches.len());
        let seen = CovarianceObserver::new(arithmetic);
        let block = network.block(layer)?;
        for (observed, (x, shared)) in batches.iter().zip(&mut states) {
            let batch = &observed.batch;
            seen.begin(observed);
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
    for (observed, (x, _)) in batches.iter().zip(&states) {
        let batch = &observed.batch;
        outside.begin(observed);
        let mut ctx = network.context(&batch.positions, &batch.documents, None)?;
        ctx.observer = Some(&outside);
        network.normalize(x, &ctx)?;
    }
    each(network.layers(), &outside.found.into_inner().all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn inputs_of_trained_tokens_count_also_if_they_come_in_pieces() {
        let row = |trained: &[bool]| Example {
            ids: vec![1; trained.len()],
            trained: trained.to_vec(),
        };
        let rows = [row(&[false, true, false]), row(&[true, false, true, true])];
        let all = ObservedBatch::trained(&rows);
        assert_eq!((all.len(), all[0].count()), (1, 4));
        let found = |first: usize, values: &[f32]| {
            let x = Tensor::from_slice(values, (values.len(), 1), &Device::Cpu).unwrap();
            let rows = all[0].rows(&x, first).unwrap();
            rows.map(|x| update::to_f32_vec(&x).unwrap())
        };
        assert_eq!(
            found(0, &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
            Some(vec![1.0, 3.0, 5.0, 6.0])
        );
        assert_eq!(found(0, &[0.0, 1.0]), Some(vec![1.0]));
        assert_eq!(found(2, &[2.0, 3.0, 4.0]), Some(vec![3.0]));
        assert_eq!(found(4, &[4.0]), None);
        let whole = ObservedBatch::whole(Batch::from_examples(&rows));
        assert_eq!(whole.count(), 7);
        let x = Tensor::from_slice(&[1.0f32, 2.0], (2, 1), &Device::Cpu).unwrap();
        assert_eq!(whole.rows(&x, 0).unwrap().unwrap().dims(), [2, 1]);
    }
}
