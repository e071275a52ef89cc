//! Products of uneven groups of rows with a weight for each group (the experts of a mixture), in one launch. On a GPU only.
//!
//! Letters: R rows of all groups, which follow each other; I inputs, O outputs.

use super::cpu::storage::{dims2, expect_dims};
use candle_core::Tensor;
use ft_base::{Error, Result};

/// The weight `[O, I]` and the number of rows of each group.
pub type Groups<'a> = [(&'a Tensor, usize)];

/// True if rows like `x` can be multiplied with these weights: on a GPU, of one type, in bf16 with sizes that are multiples of 8.
pub fn fits<'a>(x: &Tensor, weights: impl IntoIterator<Item = &'a Tensor>) -> bool {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return weights.into_iter().all(|w| super::cuda::grouped::fits(x.dtype(), w));
    }
    let _ = (x, weights);
    false
}

/// R, and O and I of all weights.
fn sizes(groups: &Groups) -> Result<(usize, usize, usize)> {
    let Some((first, _)) = groups.first() else {
        return Err(Error::argument("a grouped product has no groups"));
    };
    let (outputs, inputs) = dims2(first, "the weight of an expert")?;
    for (weight, _) in groups {
        expect_dims(weight, "the weight of an expert", &[outputs, inputs])?;
    }
    Ok((groups.iter().map(|(_, rows)| rows).sum(), outputs, inputs))
}

/// A tensor like `x` that a product writes.
fn unwritten(x: &Tensor, shape: (usize, usize)) -> Result<Tensor> {
    on_gpu!(
        x,
        super::cuda::Gpu::of(x, "the rows of experts")?.empty(shape, x.dtype())
    );
    let _ = shape;
    Err(Error::unsupported("grouped products run on a GPU only"))
}

fn product(x: &Tensor, groups: &Groups, y: &Tensor, (back, add): (bool, bool)) -> Result<()> {
    on_gpu!(x, super::cuda::grouped::product(x, groups, y, back, add));
    let _ = (groups, y, back, add);
    Err(Error::unsupported("grouped products run on a GPU only"))
}

/// x·Wᵀ of each group, `[R, O]`; x `[R, I]`.
///
/// # Errors
/// Weights that do not fit (`fits`).
pub fn forward(x: &Tensor, groups: &Groups) -> Result<Tensor> {
    let (rows, outputs, inputs) = sizes(groups)?;
    expect_dims(x, "the rows of experts", &[rows, inputs])?;
    let y = unwritten(x, (rows, outputs))?;
    product(x, groups, &y, (false, false))?;
    Ok(y)
}

/// dy·W of each group, `[R, I]`; dy `[R, O]`.
///
/// # Errors
/// As `forward`.
pub fn backward_input(dy: &Tensor, groups: &Groups) -> Result<Tensor> {
    let (rows, _, inputs) = sizes(groups)?;
    let dx = unwritten(dy, (rows, inputs))?;
    input(&dx, dy, groups, false)?;
    Ok(dx)
}

/// dx `[R, I]` += dy·W of each group; as `backward_input`.
///
/// # Errors
/// As `forward`.
pub fn backward_input_add(dx: &Tensor, dy: &Tensor, groups: &Groups) -> Result<()> {
    input(dx, dy, groups, true)
}

fn input(dx: &Tensor, dy: &Tensor, groups: &Groups, add: bool) -> Result<()> {
    let (rows, outputs, inputs) = sizes(groups)?;
    expect_dims(dy, "the gradient of experts", &[rows, outputs])?;
    expect_dims(dx, "the gradient of the rows of experts", &[rows, inputs])?;
    product(dy, groups, dx, (true, add))
}

/// Adds to each row of y `[N, D]` the rows of `part` `[R, D]` that belong to it: of `places` `[N, K]`, those from `first` on.
pub(crate) fn combine(y: &Tensor, part: &Tensor, places: &Tensor, first: usize) -> Result<()> {
    on_gpu!(y, super::cuda::grouped::combine(y, part, places, first));
    let _ = (part, places, first);
    Err(Error::unsupported("grouped products run on a GPU only"))
}
