//! Products of uneven groups of rows with a weight for each group (the experts of a mixture), in one launch. Quantized
//! weights are dequantized before, as many at a time as have `TILE` elements. On a GPU only.
//!
//! Letters: R rows of all groups, which follow each other; I inputs, O outputs.

use super::cpu::storage::{dims2, expect_dims};
use super::dtype::Dtype;
use super::quantized::{QTensors, TILE, WeightView};
use candle_core::Tensor;
use ft_base::{Error, Result};

/// Columns of a tile of the result on a GPU, as `COLUMNS` in `cuda/grouped.cu`.
pub const DEVICE_COLUMNS: usize = 128;

/// The weight `[O, I]` of a group. A quantized one is dequantized for the product; with few rows in registers.
pub type GroupWeight<'a> = WeightView<&'a Tensor, &'a QTensors>;

impl<'a> From<&'a Tensor> for GroupWeight<'a> {
    fn from(weight: &'a Tensor) -> Self {
        GroupWeight::Dense(weight)
    }
}

impl<'a> From<&'a QTensors> for GroupWeight<'a> {
    fn from(weight: &'a QTensors) -> Self {
        GroupWeight::Quantized(weight)
    }
}

/// The weight and the number of rows of each group.
pub type Groups<'a> = [(GroupWeight<'a>, usize)];

/// Bytes of the dequantized weights of a product of `groups` groups with quantized weights `[O, I]`, which fit (`fits`).
pub fn work_bytes(groups: usize, (outputs, inputs): (usize, usize), dequantized_dtype: Dtype) -> u64 {
    let each = outputs * inputs;
    let most = TILE / each.max(1);
    (groups.min(most.max(1)) * each) as u64 * dequantized_dtype.bytes()
}

/// True if rows like `x` can be multiplied with these weights: on a GPU, of one type, in bf16 with sizes that are multiples of
/// 8. Of quantized weights the dequantized values count; a matrix of them has at most `TILE` elements.
pub fn fits<'a>(x: &Tensor, weights: impl IntoIterator<Item = GroupWeight<'a>>) -> bool {
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
    let of = |weight: &GroupWeight| match weight {
        GroupWeight::Dense(tensor) => dims2(tensor, "the weight of an expert"),
        GroupWeight::Quantized(weight) => Ok((weight.rows, weight.columns)),
    };
    let (outputs, inputs) = of(first)?;
    for (weight, _) in groups {
        let found = of(weight)?;
        if found != (outputs, inputs) {
            return Err(Error::shape("the weight of an expert has the wrong shape")
                .found(format!("{found:?}"))
                .expected(format!("({outputs}, {inputs})")));
        }
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

/// `back`: with W in place of Wᵀ; `add`: to y.
fn product(x: &Tensor, groups: &Groups, y: &Tensor, back: bool, add: bool) -> Result<()> {
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
    product(x, groups, &y, false, false)?;
    Ok(y)
}

/// y `[R, O]` += x·Wᵀ of each group; as `forward`.
///
/// # Errors
/// As `forward`.
pub fn forward_add(y: &Tensor, x: &Tensor, groups: &Groups) -> Result<()> {
    let (rows, outputs, inputs) = sizes(groups)?;
    expect_dims(x, "the rows of experts", &[rows, inputs])?;
    expect_dims(y, "the output of experts", &[rows, outputs])?;
    product(x, groups, y, false, true)
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
    product(dy, groups, dx, true, add)
}

/// The bias of the group of each row, times the factor of the row (f32 `[R]`) if there are factors: `[R, O]`, of the type of the
/// biases. `groups`: the bias `[O]` and the number of rows of each.
///
/// # Errors
/// Biases of several shapes or types; not on a GPU.
pub fn bias_rows(groups: &[(&Tensor, usize)], factors: Option<&Tensor>) -> Result<Tensor> {
    let (rows, bias) = biases(groups)?;
    if let Some(factors) = factors {
        expect_dims(factors, "the factors of rows", &[rows])?;
    }
    let y = unwritten(bias, (rows, bias.elem_count()))?;
    on_gpu!(bias, super::cuda::grouped::bias_rows(groups, factors, &y).map(|()| y));
    let _ = y;
    Err(Error::unsupported("grouped biases run on a GPU only"))
}

/// Adds the product of each row of x `[R, O]` with the bias of its group to `to`, f32 `[R]`. `groups` as in `bias_rows`.
///
/// # Errors
/// As `bias_rows`.
pub fn bias_products_add(x: &Tensor, groups: &[(&Tensor, usize)], to: &Tensor) -> Result<()> {
    let (rows, bias) = biases(groups)?;
    expect_dims(x, "the gradient of experts", &[rows, bias.elem_count()])?;
    expect_dims(to, "the products of rows", &[rows])?;
    on_gpu!(x, super::cuda::grouped::bias_products(groups, x, to));
    Err(Error::unsupported("grouped biases run on a GPU only"))
}

/// R, and the first bias, which has the shape of all.
fn biases<'a>(groups: &[(&'a Tensor, usize)]) -> Result<(usize, &'a Tensor)> {
    let Some((first, _)) = groups.first() else {
        return Err(Error::argument("grouped biases have no groups"));
    };
    for (bias, _) in groups {
        expect_dims(bias, "the bias of an expert", &[first.elem_count()])?;
    }
    Ok((groups.iter().map(|(_, rows)| rows).sum(), first))
}

/// Adds to each row of y `[N, D]` the rows of `part` `[R, D]` that belong to it: of `places` `[N, K]`, those from `first` on.
pub(crate) fn combine(y: &Tensor, part: &Tensor, places: &Tensor, first: usize) -> Result<()> {
    on_gpu!(y, super::cuda::grouped::combine(y, part, places, first));
    let _ = (part, places, first);
    Err(Error::unsupported("grouped products run on a GPU only"))
}
