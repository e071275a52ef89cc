//! A dense weight `[O, I]` of a linear layer: a tensor, and on the CPU optional prepacked copies in the orders that
//! the AMX code reads. The copies change no bit of a product; they only save the packing of one operand.

use super::cpu::product::{CpuBackend, PrepackedWeight, WeightRows};
use super::cpu::storage::{dims2, values};
use candle_core::{DType, Tensor};
use ft_base::Result;

/// A weight and its prepacked copies. The weight must not change while they exist.
#[derive(Debug)]
pub struct PrepackedTensor {
    tensor: Tensor,
    packed: PrepackedWeight,
    copies: u64,
}

/// The products that get a prepacked copy: `x·Wᵀ`, or `dy·W` too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PrepackedProducts {
    /// `x·Wᵀ` only.
    Forward,
    /// `x·Wᵀ` and `dy·W`.
    Both,
}

/// A borrowed dense weight.
#[derive(Clone, Copy)]
pub struct DenseWeight<'a> {
    /// The weight, `[O, I]`.
    pub tensor: &'a Tensor,
    packed: Option<&'a PrepackedWeight>,
}

/// True if products on this machine can read prepacked copies. They are hardly faster for it: dot products of bf16 pairs read a
/// weight where it lies, and with AMX each task packs its part of it in the cache.
pub fn is_of_use() -> bool {
    CpuBackend::current().packs_bf16()
}

impl PrepackedTensor {
    /// Packs `w [O, I]`, with space for a fused LoRA rank of `rank`. None if no product can read the copies: an f32
    /// weight, a GPU, a CPU without AVX-512.
    ///
    /// # Errors
    /// `w` is not a contiguous matrix (`Shape`).
    pub fn new(w: &Tensor, orders: PrepackedProducts, rank: usize) -> Result<Option<Self>> {
        if !w.device().is_cpu() || w.dtype() != DType::BF16 {
            return Ok(None);
        }
        let dims = dims2(w, "the weight of a linear")?;
        let packed = DenseWeight::from(w).with_rows("the weight of a linear", |rows| {
            Ok(PrepackedWeight::new(
                rows,
                dims,
                orders == PrepackedProducts::Both,
                rank,
            ))
        })?;
        Ok(packed.map(|packed| Self {
            tensor: w.clone(),
            packed,
            copies: Self::bytes(dims, orders, rank),
        }))
    }

    /// Returns the bytes of the copies.
    pub fn copies(&self) -> u64 {
        self.copies
    }

    /// The weight, `[O, I]`.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Returns the bytes of the copies of a weight `[O, I]`, without its tensor.
    pub fn bytes(dims: (usize, usize), orders: PrepackedProducts, rank: usize) -> u64 {
        PrepackedWeight::bytes(dims, orders == PrepackedProducts::Both, rank) as u64
    }
}

impl<'a> From<&'a Tensor> for DenseWeight<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self { tensor, packed: None }
    }
}

impl<'a> From<&'a PrepackedTensor> for DenseWeight<'a> {
    fn from(weight: &'a PrepackedTensor) -> Self {
        Self {
            tensor: &weight.tensor,
            packed: Some(&weight.packed),
        }
    }
}

impl DenseWeight<'_> {
    /// Runs `f` on the rows of the weight while holding the read lock of its tensor.
    pub(crate) fn with_rows<R>(self, name: &str, f: impl FnOnce(WeightRows<'_>) -> Result<R>) -> Result<R> {
        let (_, columns) = dims2(self.tensor, name)?;
        values(self.tensor, name, |v| f(WeightRows::new(v, columns).with(self.packed)))
    }
}
