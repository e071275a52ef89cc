//! The dense weight `[O, I]` of a linear as operations take it: a tensor, and on the CPU perhaps copies of it in the orders
//! in which the tile unit reads it. The copies change no bit of a product; it only has one operand less to pack.

use super::cpu::product::{Packed, Path, WeightRows};
use super::cpu::storage::{dims2, values};
use candle_core::{DType, Tensor};
use ft_base::Result;

/// A weight and its packed copies. It must not change while they exist.
#[derive(Debug)]
pub struct Prepacked {
    tensor: Tensor,
    packed: Packed,
    copies: u64,
}

/// Which products get a copy: `x·Wᵀ`, or `dy·W` too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Orders {
    Forward,
    Both,
}

/// A dense weight, borrowed.
#[derive(Clone, Copy)]
pub struct Dense<'a> {
    pub tensor: &'a Tensor,
    packed: Option<&'a Packed>,
}

/// Does any product on this machine read packed copies?
pub fn is_of_use() -> bool {
    Path::current().packs_bf16()
}

impl Prepacked {
    /// `w [O, I]`, with room for a delta of rank `rank` that rides on its products. None where no tile unit could read them:
    /// an f32 weight, a GPU, a CPU without AVX-512.
    pub fn new(w: &Tensor, orders: Orders, rank: usize) -> Result<Option<Self>> {
        if !w.device().is_cpu() || w.dtype() != DType::BF16 {
            return Ok(None);
        }
        let dims = dims2(w, "the weight of a linear")?;
        let packed = Dense::from(w).with_rows("the weight of a linear", |rows| {
            Ok(Packed::new(rows, dims, orders == Orders::Both, rank))
        })?;
        Ok(packed.map(|packed| Self {
            tensor: w.clone(),
            packed,
            copies: Self::bytes(dims, orders, rank),
        }))
    }

    /// Bytes of its copies.
    pub fn copies(&self) -> u64 {
        self.copies
    }

    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Bytes of the copies of a weight `[O, I]`, beside its tensor.
    pub fn bytes(dims: (usize, usize), orders: Orders, rank: usize) -> u64 {
        Packed::bytes(dims, orders == Orders::Both, rank) as u64
    }
}

impl<'a> From<&'a Tensor> for Dense<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self { tensor, packed: None }
    }
}

impl<'a> From<&'a Prepacked> for Dense<'a> {
    fn from(weight: &'a Prepacked) -> Self {
        Self {
            tensor: &weight.tensor,
            packed: Some(&weight.packed),
        }
    }
}

impl Dense<'_> {
    /// Runs `f` on the rows of the weight, holding the read lock of its tensor.
    pub(crate) fn with_rows<R>(self, name: &str, f: impl FnOnce(WeightRows<'_>) -> Result<R>) -> Result<R> {
        let (_, columns) = dims2(self.tensor, name)?;
        values(self.tensor, name, |v| f(WeightRows::new(v, columns).with(self.packed)))
    }
}
