//! LoRA pairs on a GPU: copies of A and B in the type of the activations, and their products. The pairs of linears with
//! one input share a matrix [A₁; A₂; ...], so that one product computes u of all of them.
//!
//! A pair may subtract a start: s · (B·A - B₀·A₀). It is computed as s · ((B - B₀)·A + B₀·(A - A₀)), with both
//! differences taken in f32: a change of A or B that is smaller than a step of bf16 is not lost.
//!
//! Letters: N tokens, I input features, O output features, R rank, P columns of one pair in u (R, or 2R with a start),
//! T the sum of P over the pairs.

use candle_core::{DType, Tensor};
use ft_base::Result;

#[cfg(feature = "cuda")]
use super::cuda::pairs as gpu;

/// A LoRA pair, f32 on a GPU.
#[derive(Debug, Clone, Copy)]
pub struct LoraPair<'a> {
    /// A and B: `[R, I]` and `[O, R]`.
    pub matrices: (&'a Tensor, &'a Tensor),
    /// A₀ and B₀, subtracted.
    pub start: Option<(&'a Tensor, &'a Tensor)>,
    /// s
    pub scale: f32,
}

/// The pairs of linears with one input.
#[derive(Debug)]
pub struct PairStack {
    /// `[T, I]`
    a: Tensor,
    pairs: Vec<StackedPair>,
}

/// One LoRA pair of several with the same input.
#[derive(Debug)]
struct StackedPair {
    /// `[O, P]`
    b: Tensor,
    /// Where its columns begin in u = x·Aᵀ of all pairs.
    first: usize,
    /// P
    width: usize,
    /// R
    rank: usize,
    scale: f32,
}

/// Columns of a row-major matrix, as operand of a product.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct ColumnOperand<'a> {
    pub of: &'a Tensor,
    /// The first element.
    pub first: usize,
    pub transposed: bool,
}

impl<'a> ColumnOperand<'a> {
    fn all(of: &'a Tensor) -> Self {
        Self::from(of, 0)
    }

    fn from(of: &'a Tensor, first: usize) -> Self {
        Self {
            of,
            first,
            transposed: false,
        }
    }

    fn t(self) -> Self {
        Self {
            transposed: true,
            ..self
        }
    }
}

/// One matrix to copy: `to[r, c] = from[r, c] - minus[r, c]`, into columns of `to` from element `first` on.
#[derive(Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct MatrixCopy<'a> {
    pub from: &'a Tensor,
    pub minus: Option<&'a Tensor>,
    pub to: Tensor,
    pub first: usize,
}

/// Copies the pairs of each group, all in one launch: `dtype` is that of the activations.
///
/// # Errors
/// Shapes that do not fit; tensors that are not on a GPU.
pub fn stacks(groups: &[Vec<LoraPair<'_>>], dtype: DType) -> Result<Vec<PairStack>> {
    let mut copies = Vec::new();
    let mut all = Vec::with_capacity(groups.len());
    for pairs in groups {
        all.push(PairStack::new(pairs, dtype, &mut copies)?);
    }
    gpu::copy(&copies, dtype)?;
    Ok(all)
}

impl PairStack {
    fn new<'a>(pairs: &[LoraPair<'a>], dtype: DType, copies: &mut Vec<MatrixCopy<'a>>) -> Result<Self> {
        let Some(LoraPair { matrices: (a, _), .. }) = pairs.first() else {
            return Err(ft_base::Error::internal("a group of LoRA pairs is empty"));
        };
        let (device, inputs) = (a.device(), a.dim(1)?);
        let parts = |pair: &LoraPair<'_>| if pair.start.is_some() { 2 } else { 1 };
        let mut total = 0;
        for pair in pairs {
            total += parts(pair) * pair.matrices.0.dim(0)?;
        }
        let stacked = gpu::empty((total, inputs), dtype, device)?;
        let mut own = Vec::with_capacity(pairs.len());
        let mut first = 0;
        for pair in pairs {
            let (a, b) = pair.matrices;
            let (rank, outputs) = (a.dim(0)?, b.dim(0)?);
            let width = parts(pair) * rank;
            let there = gpu::empty((outputs, width), dtype, device)?;
            let mut copy = |from, minus, to: &Tensor, first| {
                let to = to.clone();
                copies.push(MatrixCopy { from, minus, to, first })
            };
            copy(a, None, &stacked, first * inputs);
            copy(b, pair.start.map(|(_, b)| b), &there, 0);
            if let Some((a0, b0)) = pair.start {
                copy(a, Some(a0), &stacked, (first + rank) * inputs);
                copy(b0, None, &there, rank);
            }
            own.push(StackedPair {
                b: there,
                first,
                width,
                rank,
                scale: pair.scale,
            });
            first += width;
        }
        Ok(Self { a: stacked, pairs: own })
    }

    /// Allocates `[N, T]`, to be filled by `down_one` or `up_backward`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn columns(&self, rows: usize) -> Result<Tensor> {
        gpu::empty((rows, self.a.dim(0)?), self.a.dtype(), self.a.device())
    }

    /// Computes u = s · x·Aᵀ of all pairs, `[N, T]`, from `x [N, I]`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn down(&self, x: &Tensor) -> Result<Tensor> {
        let u = self.columns(x.dim(0)?)?;
        let scale = self.pairs.first().map_or(1.0, |pair| pair.scale);
        if self.pairs.iter().any(|pair| pair.scale != scale) {
            for pair in 0..self.pairs.len() {
                self.down_one(pair, x, &u)?;
            }
            return Ok(u);
        }
        let sizes = (x.dim(0)?, self.a.dim(0)?, self.a.dim(1)?);
        gpu::product(
            sizes,
            ColumnOperand::all(x),
            ColumnOperand::all(&self.a).t(),
            ColumnOperand::all(&u),
            scale,
            false,
        )?;
        Ok(u)
    }

    /// As `down`, for one pair: from `x [N, I]` to its columns of `u [N, T]`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn down_one(&self, pair: usize, x: &Tensor, u: &Tensor) -> Result<()> {
        let (p, inputs) = (&self.pairs[pair], self.a.dim(1)?);
        let a = ColumnOperand::from(&self.a, p.first * inputs).t();
        let sizes = (x.dim(0)?, p.width, inputs);
        gpu::product(
            sizes,
            ColumnOperand::all(x),
            a,
            ColumnOperand::from(u, p.first),
            p.scale,
            false,
        )
    }

    /// The copy of A of a pair, `[R, I]`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn a(&self, pair: usize) -> Result<Tensor> {
        let p = &self.pairs[pair];
        Ok(self.a.narrow(0, p.first, p.rank)?)
    }

    /// Computes u·Bᵀ of a pair, `[N, O]` in type `to` (that of u, or f32), from `u [N, T]`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn up(&self, pair: usize, u: &Tensor, to: DType) -> Result<Tensor> {
        let y = gpu::empty((u.dim(0)?, self.pairs[pair].b.dim(0)?), to, u.device())?;
        self.up_into(pair, u, &y)?;
        Ok(y)
    }

    /// As `up`, into `y [N, O]`.
    ///
    /// # Errors
    /// As `up`.
    pub fn up_into(&self, pair: usize, u: &Tensor, y: &Tensor) -> Result<()> {
        let p = &self.pairs[pair];
        let sizes = (u.dim(0)?, p.b.dim(0)?, p.width);
        let (u, b) = (ColumnOperand::from(u, p.first), ColumnOperand::all(&p.b).t());
        gpu::product(sizes, u, b, ColumnOperand::all(y), 1.0, false)
    }

    /// Computes ∂u = s · ∂y·B of a pair from `dy [N, O]`, into its columns of `du [N, T]`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn up_backward(&self, pair: usize, dy: &Tensor, du: &Tensor) -> Result<()> {
        let p = &self.pairs[pair];
        let sizes = (dy.dim(0)?, p.width, p.b.dim(0)?);
        let to = ColumnOperand::from(du, p.first);
        gpu::product(
            sizes,
            ColumnOperand::all(dy),
            ColumnOperand::all(&p.b),
            to,
            p.scale,
            false,
        )
    }

    /// Computes ∂u·A of all pairs, `[N, I]`, from `du [N, T]`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn down_backward(&self, du: &Tensor) -> Result<Tensor> {
        self.back(du, 0, self.a.dim(0)?)
    }

    /// As `down_backward`, for one pair: `[N, I]` from `du [N, T]`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn back_up_one(&self, pair: usize, du: &Tensor) -> Result<Tensor> {
        let p = &self.pairs[pair];
        self.back(du, p.first, p.width)
    }

    fn back(&self, du: &Tensor, first: usize, width: usize) -> Result<Tensor> {
        let (rows, inputs) = (du.dim(0)?, self.a.dim(1)?);
        let dx = gpu::empty((rows, inputs), du.dtype(), du.device())?;
        let a = ColumnOperand::from(&self.a, first * inputs);
        gpu::product(
            (rows, inputs, width),
            ColumnOperand::from(du, first),
            a,
            ColumnOperand::all(&dx),
            1.0,
            false,
        )?;
        Ok(dx)
    }

    /// Computes the gradients of A of all pairs, `[R, I]` each, f32, from `du [N, T]` and `x [N, I]`: one product.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn grads_a(&self, du: &Tensor, x: &Tensor) -> Result<Vec<Tensor>> {
        let (total, inputs) = (self.a.dim(0)?, self.a.dim(1)?);
        let all = gpu::empty((total, inputs), DType::F32, du.device())?;
        let sizes = (total, inputs, x.dim(0)?);
        gpu::product(
            sizes,
            ColumnOperand::all(du).t(),
            ColumnOperand::all(x),
            ColumnOperand::all(&all),
            1.0,
            false,
        )?;
        let one = |p: &StackedPair| -> Result<Tensor> {
            let gradient = all.narrow(0, p.first, p.rank)?;
            if p.width > p.rank {
                super::update::add_assign(&gradient, &all.narrow(0, p.first + p.rank, p.rank)?)?;
            }
            Ok(gradient)
        };
        self.pairs.iter().map(one).collect()
    }

    /// Computes the gradient of A of one pair, `[R, I]` f32, added to `sum` if given.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn grad_a(&self, pair: usize, du: &Tensor, x: &Tensor, sum: Option<&Tensor>) -> Result<Tensor> {
        let p = &self.pairs[pair];
        let sizes = (p.rank, self.a.dim(1)?, x.dim(0)?);
        let gradient = match sum {
            Some(sum) => sum.clone(),
            None => gpu::empty((sizes.0, sizes.1), DType::F32, du.device())?,
        };
        // ∂u with respect to A is the sum of both parts: s · ∂y·(B - B₀) and s · ∂y·B₀.
        for first in (p.first..p.first + p.width).step_by(p.rank.max(1)) {
            let du = ColumnOperand::from(du, first).t();
            let add = sum.is_some() || first > p.first;
            gpu::product(
                sizes,
                du,
                ColumnOperand::all(x),
                ColumnOperand::all(&gradient),
                1.0,
                add,
            )?;
        }
        Ok(gradient)
    }

    /// Computes the gradient of B of one pair, `[O, R]` f32, from `dy [N, O]` and `u [N, T]`, added to `sum` if given.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn grad_b(&self, pair: usize, dy: &Tensor, u: &Tensor, sum: Option<&Tensor>) -> Result<Tensor> {
        let p = &self.pairs[pair];
        let sizes = (p.b.dim(0)?, p.rank, dy.dim(0)?);
        let gradient = match sum {
            Some(sum) => sum.clone(),
            None => gpu::empty((sizes.0, sizes.1), DType::F32, dy.device())?,
        };
        let u = ColumnOperand::from(u, p.first);
        gpu::product(
            sizes,
            ColumnOperand::all(dy).t(),
            u,
            ColumnOperand::all(&gradient),
            1.0,
            sum.is_some(),
        )?;
        Ok(gradient)
    }
}

/// Stands in for the GPU where the program is built without it; nothing calls it.
#[cfg(not(feature = "cuda"))]
mod gpu {
    use super::{ColumnOperand, DType, MatrixCopy, Result, Tensor};
    use candle_core::Device;
    use ft_base::Error;

    fn refused<T>() -> Result<T> {
        Err(Error::unsupported(
            "this build has no CUDA support: build with the feature `cuda`",
        ))
    }

    pub(super) fn empty(_: (usize, usize), _: DType, _: &Device) -> Result<Tensor> {
        refused()
    }

    pub(super) fn copy(_: &[MatrixCopy<'_>], _: DType) -> Result<()> {
        refused()
    }

    pub(super) fn product(
        _: (usize, usize, usize),
        _: ColumnOperand<'_>,
        _: ColumnOperand<'_>,
        _: ColumnOperand<'_>,
        _: f32,
        _: bool,
    ) -> Result<()> {
        refused()
    }
}
