//! The rows of experts: each expert gets copies of the rows of its tokens, and its results are added at the tokens. The tokens
//! and weights of all experts are on the device of the rows.
//!
//! Letters as in `routing`; n tokens of an expert.

use super::super::cpu::storage::{dims2, expect_dims, floats, tensor, unwritten};
use super::super::grouped;
use super::super::update::{self, with_slice, with_slice_mut};
use super::host::HostRouting;
use super::sigmoid;
use candle_core::{Device, Tensor};
use ft_base::{Error, Result};
use rayon::prelude::*;
use std::ops::Range;

/// The tokens of all experts, in the order of the experts, then of the tokens.
#[derive(Debug, Clone)]
pub struct ExpertAssignment {
    /// N
    pub(crate) rows: usize,
    /// Where an expert begins, `[E + 1]`.
    pub(crate) starts: Vec<usize>,
    /// u32 `[N·K]`
    pub(crate) tokens: Tensor,
    /// f32 `[N·K]`
    pub(crate) weights: Tensor,
    /// Experts are computed together: where the rows of each token are, u32 `[N, K]`, ascending in a row.
    pub(crate) places: Option<Tensor>,
}

/// The tokens of all experts on the host, in the order of the experts.
#[derive(Debug, Clone)]
pub struct AssignmentLists<'a> {
    /// Where each expert begins, `[E + 1]`.
    pub starts: &'a [usize],
    /// The tokens, `[N·K]`.
    pub tokens: Vec<u32>,
    /// Their weights, `[N·K]`.
    pub weights: Vec<f32>,
}

/// The tokens of one expert, or of successive experts that are computed together.
#[derive(Debug, Clone)]
pub struct AssignedTokens {
    rows: usize,
    start: usize,
    /// Number of tokens of each expert.
    pub counts: Vec<usize>,
    /// u32 `[n]`, ascending in each expert.
    tokens: Tensor,
    /// The weight of the expert for each of them, f32 `[n]`.
    pub weights: Tensor,
    /// As in `ExpertAssignment`.
    places: Option<Tensor>,
}

impl HostRouting {
    /// As `Routing::assign`.
    pub(super) fn assign(&self, device: &Device, together: bool) -> Result<ExpertAssignment> {
        let k = self.spec.top_k as u32;
        let tokens: Vec<u32> = self.order.iter().map(|place| place / k).collect();
        let weights: Vec<f32> = self.order.iter().map(|place| self.weights[*place as usize]).collect();
        let count = tokens.len();
        let places = together.then(|| {
            let mut places = vec![0u32; count];
            let mut filled = vec![0; self.tokens()];
            // In the order of the rows, so those of a token are ascending.
            for (row, token) in tokens.iter().map(|t| *t as usize).enumerate() {
                places[token * self.spec.top_k + filled[token]] = row as u32;
                filled[token] += 1;
            }
            Tensor::from_vec(places, (self.tokens(), self.spec.top_k), device)
        });
        Ok(ExpertAssignment {
            places: places.transpose()?,
            rows: self.tokens(),
            starts: self.starts.clone(),
            tokens: Tensor::from_vec(tokens, count, device)?,
            weights: Tensor::from_vec(weights, count, device)?,
        })
    }
}

impl ExpertAssignment {
    /// The experts that are computed together, in order: as many as have at most N rows, so that the memory is that of one
    /// expert which all tokens choose; or one by one.
    pub fn units(&self) -> Vec<Range<usize>> {
        let experts = self.starts.len() - 1;
        let mut units: Vec<Range<usize>> = Vec::new();
        for expert in 0..experts {
            match units.last_mut() {
                Some(unit)
                    if self.places.is_some() && self.starts[expert + 1] - self.starts[unit.start] <= self.rows =>
                {
                    unit.end = expert + 1;
                }
                _ => units.push(expert..expert + 1),
            }
        }
        units
    }

    /// The tokens of these experts; `None`: they have none.
    ///
    /// # Errors
    /// An expert that does not exist.
    pub fn of(&self, experts: Range<usize>) -> Result<Option<AssignedTokens>> {
        let Some(starts) = self.starts.get(experts.start..experts.end + 1) else {
            return Err(Error::argument("an expert does not exist").found(experts.end));
        };
        let (start, end) = (starts[0], starts[starts.len() - 1]);
        if start == end {
            return Ok(None);
        }
        let counts: Vec<usize> = starts.windows(2).map(|w| w[1] - w[0]).collect();
        Ok(Some(AssignedTokens {
            rows: self.rows,
            start,
            tokens: self.tokens.narrow(0, start, end - start)?,
            weights: self.weights.narrow(0, start, end - start)?,
            places: self.places.clone().filter(|_| counts.len() > 1),
            counts,
        }))
    }

    /// The tokens of all experts on the host.
    ///
    /// # Errors
    /// A copy from the device fails.
    pub fn lists(&self) -> Result<AssignmentLists<'_>> {
        Ok(AssignmentLists {
            starts: &self.starts,
            tokens: self.tokens.to_vec1()?,
            weights: self.weights.to_vec1()?,
        })
    }

    /// Zeros, one for each pair of a token and one of its K experts, f32 `[N·K]`.
    ///
    /// # Errors
    /// Not enough memory on the device.
    pub fn numbers(&self) -> Result<Tensor> {
        update::zeros(self.weights.shape(), self.weights.dtype(), self.weights.device())
    }
}

impl AssignedTokens {
    fn len(&self) -> Result<usize> {
        Ok(self.tokens.dims1()?)
    }

    /// The part of `all` `[N·K]` that belongs to this expert: a view `[n]`.
    ///
    /// # Errors
    /// A tensor that is shorter.
    pub fn part(&self, all: &Tensor) -> Result<Tensor> {
        Ok(all.narrow(0, self.start, self.len()?)?)
    }

    /// Copies the rows of x `[N, D]`, f32 or on a GPU bf16: `[n, D]`.
    ///
    /// # Errors
    /// Another number of rows.
    pub fn gather(&self, x: &Tensor) -> Result<Tensor> {
        let (_, d) = dims2(x, "the input of experts")?;
        expect_dims(x, "the input of experts", &[self.rows, d])?;
        on_gpu!(x, super::super::cuda::experts::gather(x, &self.tokens));
        let tokens = self.tokens.to_vec1::<u32>()?;
        let mut to = unwritten(tokens.len() * d);
        floats(x, "the input of experts", |x| {
            to.par_chunks_mut(d.max(1)).zip(&tokens).for_each(|(to, &token)| {
                to.copy_from_slice(&x[token as usize * d..][..d]);
            });
            Ok(())
        })?;
        tensor(to, (tokens.len(), d))
    }

    /// Adds `part` `[n, D]` to the rows of y `[N, D]`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn add_to(&self, y: &Tensor, part: &Tensor) -> Result<()> {
        let (_, d) = dims2(y, "the output of experts")?;
        expect_dims(y, "the output of experts", &[self.rows, d])?;
        expect_dims(part, "the output of an expert", &[self.len()?, d])?;
        if let Some(places) = &self.places {
            return grouped::combine(y, part, places, self.start);
        }
        on_gpu!(y, super::super::cuda::experts::add_at(y, part, &self.tokens));
        let tokens = self.tokens.to_vec1::<u32>()?;
        update::with_slices(y, part, |y, part| {
            for (token, part) in tokens.iter().zip(part.chunks(d.max(1))) {
                let y = &mut y[*token as usize * d..][..d];
                y.iter_mut().zip(part).for_each(|(y, part)| *y += part);
            }
        })
    }
}

/// Multiplies each row of `t [n, D]` with its factor, f32 `[n]`.
///
/// # Errors
/// Shapes that do not fit.
pub fn scale_rows(t: &Tensor, factors: &Tensor) -> Result<()> {
    let (n, d) = dims2(t, "rows that are scaled")?;
    expect_dims(factors, "the factors of rows", &[n])?;
    on_gpu!(t, super::super::cuda::experts::scale_rows(t, factors));
    update::with_slices(t, factors, |t, factors| {
        t.par_chunks_mut(d.max(1)).zip(factors).for_each(|(row, factor)| {
            row.iter_mut().for_each(|x| *x *= factor);
        });
    })
}

/// Stores the product of each row of `a [n, D]` with the same row of `b` in `to`, f32 `[n]`.
///
/// # Errors
/// Shapes that do not fit.
pub fn row_products(a: &Tensor, b: &Tensor, to: &Tensor) -> Result<()> {
    let (n, d) = dims2(a, "the gradient of an expert")?;
    expect_dims(b, "the output of an activation", &[n, d])?;
    products(a, b, d, to, false)
}

/// Adds the product of each row of `a [n, D]` with `b` `[1, D]`, f32 or bf16, to `to`, f32 `[n]`.
///
/// # Errors
/// Shapes that do not fit.
pub fn row_products_add(a: &Tensor, b: &Tensor, to: &Tensor) -> Result<()> {
    let (_, d) = dims2(a, "the gradient of an expert")?;
    expect_dims(b, "the bias of an expert", &[1, d])?;
    products(a, b, 0, to, true)
}

/// `step`: the distance of the rows of b.
fn products(a: &Tensor, b: &Tensor, step: usize, to: &Tensor, add: bool) -> Result<()> {
    let (n, d) = dims2(a, "the gradient of an expert")?;
    expect_dims(to, "the products of rows", &[n])?;
    on_gpu!(a, super::super::cuda::experts::row_products(a, b, to, add));
    let b = update::to_f32_vec(b)?;
    let values: Vec<f32> = with_slice(a, |a| {
        let rows = a.par_chunks(d.max(1)).enumerate();
        rows.map(|(r, a)| {
            let products = a.iter().zip(&b[r * step..][..d]).map(|(a, b)| f64::from(a * b));
            products.sum::<f64>() as f32
        })
        .collect()
    })?;
    with_slice_mut(to, |to| {
        to.iter_mut()
            .zip(&values)
            .for_each(|(to, value)| *to = if add { *to + value } else { *value });
    })
}

/// The sigmoids of the logits z `[n, 1]`, f32 `[n]`.
///
/// # Errors
/// A tensor of another type.
pub fn gates(z: &Tensor) -> Result<Tensor> {
    on_gpu!(z, super::super::cuda::experts::gates(z));
    let gates: Vec<f32> = update::to_f32_vec(z)?.into_iter().map(sigmoid).collect();
    let n = gates.len();
    tensor(gates, n)
}

/// From the gradient d of `gates` g to that of the logits, in place; f32 `[n]`.
///
/// # Errors
/// Shapes that do not fit.
pub fn gates_backward(g: &Tensor, d: &Tensor) -> Result<()> {
    expect_dims(d, "the gradient of a gate", g.dims())?;
    on_gpu!(g, super::super::cuda::experts::gates_backward(g, d));
    update::with_slices(d, g, |d, g| {
        d.iter_mut().zip(g).for_each(|(d, g)| *d = *d * g * (1.0 - g));
    })
}
