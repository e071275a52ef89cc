//! Biases of a mixture of experts (gpt-oss): of the router, and of the outputs of experts. The weight of a token multiplies
//! the output of an expert with its bias, so the bias of `down_proj` is not part of its linear:
//! `y_n = w_n · (down(m_n) + b) = down(w_n · m_n) + w_n · b`.
//!
//! Letters: n tokens of an expert, D hidden size, E experts.

use super::super::contracts::{GradSink, Param};
use crate::base::Result;
use crate::ops::{linear, routing};
use candle_core::Tensor;

/// Adds `w_n · b` to each row of `y` `[n, D]`; `bias` `[D]`, `weights` f32 `[n]`.
pub(super) fn add(bias: &Param, y: &Tensor, weights: &Tensor) -> Result<()> {
    let column = bias.tensor.reshape((y.dim(1)?, 1))?;
    linear::forward_add(y, &column_of(weights, y)?, &column)
}

/// The gradients of the weights are added to `d_weights`, f32 `[n]`; that of the bias goes to `sink`. `dy` `[n, D]`.
pub(super) fn backward(
    bias: &Param,
    dy: &Tensor,
    weights: &Tensor,
    d_weights: Option<&Tensor>,
    sink: &mut dyn GradSink,
) -> Result<()> {
    let width = dy.dim(1)?;
    if let Some(d_weights) = d_weights {
        routing::row_products_add(dy, &bias.tensor.reshape((1, width))?, d_weights)?;
    }
    if !sink.wants(&bias.name) {
        return Ok(());
    }
    let gradient = linear::grad_weight(&column_of(weights, dy)?, dy, bias.tensor.dtype())?;
    sink.take(bias, gradient.reshape(width)?)
}

/// `[n, 1]`, of the type of `like`.
fn column_of(weights: &Tensor, like: &Tensor) -> Result<Tensor> {
    Ok(weights.reshape((weights.dim(0)?, 1))?.to_dtype(like.dtype())?)
}

/// Passes the gradient of the bias of a router to `sink`; `dz` `[N, E]`.
pub(super) fn of_router(bias: &Param, dz: &Tensor, sink: &mut dyn GradSink) -> Result<()> {
    if sink.wants(&bias.name) {
        sink.take(bias, linear::grad_bias(dz)?)?;
    }
    Ok(())
}
