//! Gated linear units on a GPU.

use super::elementwise::{counts, grid};
use super::{Arg, FloatType, Gpu};
use crate::glu::Activation;
use candle_core::Tensor;
use ft_base::Result;

fn prefix(act: Activation) -> &'static str {
    match act {
        Activation::Silu => "silu",
        Activation::GeluTanh => "gelu_tanh",
        Activation::Gelu => "gelu",
        Activation::Sigmoid => "sigmoid",
        Activation::Relu2 => "relu2",
        Activation::Identity => "identity",
    }
}

fn run(inputs: &[&Tensor], outputs: &[&Tensor], act: Activation, direction: &'static str) -> Result<()> {
    let gpu = Gpu::of(inputs[0], "gate of a gated unit")?;
    let kind = FloatType::of(inputs[0], "gate of a gated unit")?;
    let places: Vec<u64> = inputs
        .iter()
        .chain(outputs)
        .map(|t| super::address_of(t, "an operand of a gated unit", kind.dtype()))
        .collect::<Result<_>>()?;
    let n = inputs[0].elem_count();
    let mut args: Vec<Arg> = places.iter().map(|p| Arg::Address(*p)).collect();
    args.extend(counts(n, kind.pack(), &places));
    let name = [prefix(act), direction, kind.name()];
    // SAFETY: all have n elements of one type (shapes were checked by the caller).
    unsafe { gpu.launch("glu", name, grid(n, kind.pack()), &args) }
}

/// Computes `act(gate) · up`.
pub(crate) fn forward(gate: &Tensor, up: &Tensor, act: Activation) -> Result<Tensor> {
    let y = Gpu::of(gate, "gate of a gated unit")?.empty(gate.shape(), gate.dtype())?;
    run(&[gate, up], &[&y], act, "_forward_")?;
    Ok(y)
}

/// Computes dgate and dup.
pub(crate) fn backward(gate: &Tensor, up: &Tensor, dy: &Tensor, act: Activation) -> Result<(Tensor, Tensor)> {
    let gpu = Gpu::of(gate, "gate of a gated unit")?;
    let dgate = gpu.empty(gate.shape(), gate.dtype())?;
    let dup = gpu.empty(gate.shape(), gate.dtype())?;
    run(&[gate, up, dy], &[&dgate, &dup], act, "_backward_")?;
    Ok((dgate, dup))
}

/// Computes `act(x)`.
pub(crate) fn activate(x: &Tensor, act: Activation) -> Result<Tensor> {
    let y = Gpu::of(x, "x of an activation")?.empty(x.shape(), x.dtype())?;
    run(&[x], &[&y], act, "_alone_forward_")?;
    Ok(y)
}

/// Computes dx of `activate`.
pub(crate) fn activate_backward(x: &Tensor, dy: &Tensor, act: Activation) -> Result<Tensor> {
    let dx = Gpu::of(x, "x of an activation")?.empty(x.shape(), x.dtype())?;
    run(&[x, dy], &[&dx], act, "_alone_backward_")?;
    Ok(dx)
}
