//! Biases of a mixture of experts (gpt-oss): of the router, and of the outputs of experts. The weight of a token multiplies
//! the output of an expert with its bias, so the bias of `down_proj` is not part of its linear:
//! `y_n = w_n · (down(m_n) + b) = down(w_n · m_n) + w_n · b`.
//!
//! Letters: n tokens of an expert, D hidden size, E experts.

use super::super::contracts::{GradSink, Param};
use crate::base::Result;
use crate::ops::{linear, update};
use candle_core::Tensor;

/// Adds `w_n · b` to each row of `y` `[n, D]`; `bias` `[D]`.
pub(super) fn add(bias: &Param, y: &Tensor, weights: &[f32]) -> Result<()> {
    let column = bias.tensor.reshape((y.dim(1)?, 1))?;
    linear::forward_add(y, &of_tokens(weights, y)?, &column)
}

/// The gradients of the weights `[n]` are added to `d_weights`; that of the bias goes to `sink`. `dy` `[n, D]`.
pub(super) fn backward(
    bias: &Param,
    dy: &Tensor,
    weights: &[f32],
    d_weights: Option<&mut Vec<f32>>,
    sink: &mut dyn GradSink,
) -> Result<()> {
    let width = dy.dim(1)?;
    if let Some(d_weights) = d_weights {
        let products = linear::forward(dy, &bias.tensor.reshape((1, width))?, None)?;
        let products = update::to_f32_vec(&products)?;
        d_weights
            .iter_mut()
            .zip(products)
            .for_each(|(d, product)| *d += product);
    }
    if !sink.wants(&bias.name) {
        return Ok(());
    }
    let gradient = linear::grad_weight(&of_tokens(weights, dy)?, dy, bias.tensor.dtype())?;
    sink.take(bias, gradient.reshape(width)?)
}

/// `[n, 1]`
fn of_tokens(weights: &[f32], like: &Tensor) -> Result<Tensor> {
    Ok(Tensor::from_vec(weights.to_vec(), (weights.len(), 1), like.device())?)
}

/// Passes the gradient of the bias of a router to `sink`; `dz` `[N, E]`.
pub(super) fn of_router(bias: &Param, dz: &Tensor, sink: &mut dyn GradSink) -> Result<()> {
    if sink.wants(&bias.name) {
        sink.take(bias, linear::grad_bias(dz)?)?;
    }
    Ok(())
}
