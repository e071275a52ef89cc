//! Trained rows of the embedding or of an untied head, beside adapters (PEFT's `trainable_token_indices`): new tokens
//! are trained without the whole matrix. Their exact values are f32; the matrix holds them rounded to its type, so the
//! forward pass is unchanged, and a tied head uses them too.
//!
//! Letters: N tokens, D hidden size, V vocabulary rows, T trained rows.

use super::contracts::GradSink;
use super::network::Network;
use crate::base::{Error, Result};
use crate::ops::{embedding, update};
use crate::peft::Param;
use candle_core::{DType, Tensor};
use std::sync::Arc;

/// Name below the matrix's module, as in PEFT.
pub const BELOW: &str = "token_adapter.trainable_tokens_delta";

/// Trained rows of the embedding or of the output projection.
#[derive(Debug, Clone)]
pub struct TokenRows {
    /// Name of the matrix `[V, D]`.
    pub table: Arc<str>,
    /// T distinct rows of it.
    pub ids: Vec<u32>,
    /// Their values, f32 `[T, D]`.
    pub param: Param,
}

/// Parameter name of the trained rows of the matrix `table`.
pub fn name_of(table: &str) -> String {
    format!("{}.{BELOW}", table.trim_end_matches(".weight"))
}

impl TokenRows {
    /// Rows `ids` of `table` with their current values, or with `given` `[T, D]`, which is copied into the matrix. The
    /// matrix stays on the device from now on, also if the others are read from the disk.
    ///
    /// # Errors
    /// An id outside the matrix; a matrix that cannot be read.
    pub fn new(network: &Network, table: &str, ids: &[u32], given: Option<&Tensor>) -> Result<Self> {
        let held = network.source.hold(table)?;
        let (vocab, width) = held.dims2()?;
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
            return Err(
                Error::argument("the model has no row for a token of `trainable_token_indices`")
                    .at(table)
                    .found(format!("token {id}"))
                    .expected(format!("less than {vocab}"))
                    .hint("if tokens were added to the vocabulary, resize the embedding first"),
            );
        }
        let values = match given {
            Some(given) => update::to_f32_vec(given)?,
            None => {
                let mut values = Vec::with_capacity(ids.len() * width);
                for &id in ids {
                    values.extend(update::to_f32_vec(&held.narrow(0, id as usize, 1)?)?);
                }
                values
            }
        };
        let rows = Self {
            table: table.into(),
            ids: ids.to_vec(),
            param: Param {
                name: name_of(table).into(),
                tensor: Tensor::from_vec(values, (ids.len(), width), held.device())?,
            },
        };
        rows.place(network)?;
        Ok(rows)
    }

    /// Copies the values into the matrix.
    ///
    /// # Errors
    /// The matrix is not in memory (`Unsupported`).
    pub fn place(&self, network: &Network) -> Result<()> {
        let Some(table) = network.source.in_memory(&self.table) else {
            return Err(Error::unsupported("a matrix with trained rows is not in memory").at(&*self.table));
        };
        let width = table.dim(1)?;
        let values = update::to_f32_vec(&self.param.tensor)?;
        for (&id, row) in self.ids.iter().zip(values.chunks_exact(width.max(1))) {
            update::set(&table.narrow(0, id as usize, 1)?, row)?;
        }
        Ok(())
    }

    /// Selects the gradient of the rows, `[T, D]`, from the gradient of the whole matrix `[V, D]`.
    ///
    /// # Errors
    /// A gradient with fewer rows than an id needs; not enough memory on the device.
    pub fn of_whole(&self, gradient: &Tensor) -> Result<Tensor> {
        let ids = Tensor::from_slice(&self.ids, self.ids.len(), gradient.device())?;
        Ok(gradient.index_select(&ids, 0)?.contiguous()?)
    }

    /// Adds the embedding gradient of the tokens `ids` `[N]` of `network`, from `dx` `[N, D]`, to `gradient` `[T, D]`.
    ///
    /// # Errors
    /// `dx` or `gradient` of another shape (`Shape`).
    pub fn add_embedded(&self, network: &Network, gradient: &Tensor, ids: &[u32], dx: &Tensor) -> Result<()> {
        let padding = network.spec.padding;
        let row_of = |id: &u32| self.ids.iter().position(|own| own == id && padding != Some(*id));
        add_rows(gradient, ids, dx, network.embedding_factor()?, row_of)
    }

    /// True if the sink wants the gradient of these rows.
    pub fn wanted(&self, sink: &dyn GradSink) -> bool {
        sink.wants(&self.param.name)
    }

    /// A gradient of zeros, `[T, D]`.
    ///
    /// # Errors
    /// Not enough memory on the device.
    pub fn zeros(&self) -> Result<Tensor> {
        update::zeros(self.param.tensor.shape(), DType::F32, self.param.tensor.device())
    }
}

impl Network {
    /// Adds the gradient of a lookup of `ids` `[N]` in a table, from `dx` `[N, D]`, to `gradient` `[V, D]`: for all tokens
    /// except the padding token.
    pub(crate) fn add_lookups(&self, gradient: &Tensor, ids: &[u32], dx: &Tensor, scale: f32) -> Result<()> {
        match self.spec.padding.filter(|padding| ids.contains(padding)) {
            None => embedding::scatter_add(gradient, ids, dx, scale),
            Some(padding) => add_rows(gradient, ids, dx, scale, |id| (*id != padding).then_some(*id as usize)),
        }
    }
}

/// Adds the rows of `dx` `[N, D]` to the rows `row_of` of `gradient`; those of other tokens are left out.
fn add_rows(
    gradient: &Tensor,
    ids: &[u32],
    dx: &Tensor,
    scale: f32,
    row_of: impl Fn(&u32) -> Option<usize>,
) -> Result<()> {
    let found = (0..).zip(ids).filter_map(|(n, id)| Some((n, row_of(id)? as u32)));
    let (tokens, rows): (Vec<u32>, Vec<u32>) = found.unzip();
    if rows.is_empty() {
        return Ok(());
    }
    let tokens = Tensor::from_vec(tokens, rows.len(), dx.device())?;
    embedding::scatter_add(gradient, &rows, &dx.index_select(&tokens, 0)?.contiguous()?, scale)
}
