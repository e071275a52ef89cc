//! The gated linear unit of gpt-oss, with limits:
//!
//! ```text
//! g = min(gate, limit),    u = clamp(up, -limit, limit),    y = (u + 1) · g · sigmoid(alpha · g)
//! ```
//!
//! Values beyond a limit get no gradient. All `[N, I]` f32, on a GPU also bf16.

use super::cpu::storage::{expect_dims, floats, tensor, unwritten};
use super::routing::sigmoid;
use super::update::{with_slice_mut, with_slices};
use candle_core::Tensor;
use ft_base::Result;
use rayon::prelude::*;

const CHUNK: usize = 1 << 13;

/// The numbers of the unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClampedGlu {
    /// Factor inside the sigmoid.
    pub alpha: f32,
    /// Largest gate, and largest magnitude of up.
    pub limit: f32,
}

impl ClampedGlu {
    fn value(self, gate: f32, up: f32) -> f32 {
        let (g, u) = (self.gate(gate), self.up(up));
        (u + 1.0) * g * sigmoid(self.alpha * g)
    }

    /// The derivatives with respect to gate and up.
    fn slopes(self, gate: f32, up: f32) -> (f32, f32) {
        let (g, u) = (self.gate(gate), self.up(up));
        let s = sigmoid(self.alpha * g);
        let rest = sigmoid(-self.alpha * g);
        let d_gate = (u + 1.0) * (s + self.alpha * g * s * rest);
        // A value at its limit has the gradient, as in PyTorch.
        let inside = |is: bool, d: f32| if is { d } else { 0.0 };
        (
            inside(gate.is_nan() || gate <= self.limit, d_gate),
            inside(up.is_nan() || up.abs() <= self.limit, g * s),
        )
    }

    /// NaN passes.
    fn gate(self, gate: f32) -> f32 {
        if gate > self.limit { self.limit } else { gate }
    }

    fn up(self, up: f32) -> f32 {
        if up.is_nan() {
            up
        } else {
            up.clamp(-self.limit, self.limit)
        }
    }
}

/// Computes y from gate and up, all `[N, I]`.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn forward(gate: &Tensor, up: &Tensor, unit: ClampedGlu) -> Result<Tensor> {
    expect_dims(up, "up of a gated unit", gate.dims())?;
    on_gpu!(gate, super::cuda::experts::clamped_forward(gate, up, unit));
    let mut y = unwritten(gate.elem_count());
    floats(gate, "gate of a gated unit", |gate| {
        floats(up, "up of a gated unit", |up| {
            let parts = gate.par_chunks(CHUNK).zip(up.par_chunks(CHUNK));
            y.par_chunks_mut(CHUNK).zip(parts).for_each(|(y, (gate, up))| {
                for (y, (gate, up)) in y.iter_mut().zip(gate.iter().zip(up)) {
                    *y = unit.value(*gate, *up);
                }
            });
            Ok(())
        })
    })?;
    tensor(y, gate.shape())
}

/// Computes dgate and dup from dy, all `[N, I]`. They overwrite gate and up, which must not share storage with dy.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn backward_in_place(gate: Tensor, up: Tensor, dy: &Tensor, unit: ClampedGlu) -> Result<(Tensor, Tensor)> {
    expect_dims(&up, "up of a gated unit", gate.dims())?;
    expect_dims(dy, "dy of a gated unit", gate.dims())?;
    on_gpu!(
        &gate,
        super::cuda::experts::clamped_backward(&gate, &up, dy, unit).map(|()| (gate, up))
    );
    let mut inner = Ok(());
    with_slices(&gate, dy, |gate, dy| {
        inner = with_slice_mut(&up, |up| {
            let parts = gate.par_chunks_mut(CHUNK).zip(up.par_chunks_mut(CHUNK));
            parts.zip(dy.par_chunks(CHUNK)).for_each(|((gate, up), dy)| {
                for ((gate, up), dy) in gate.iter_mut().zip(up).zip(dy) {
                    let (d_gate, d_up) = unit.slopes(*gate, *up);
                    (*gate, *up) = (d_gate * dy, d_up * dy);
                }
            });
        });
    })?;
    inner?;
    Ok((gate, up))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::{assert_close, assert_same_on_any_threads, flat, random};
    use candle_core::{Device, Var};

    const UNIT: ClampedGlu = ClampedGlu {
        alpha: 1.702,
        limit: 1.5,
    };

    fn composed(gate: &Tensor, up: &Tensor) -> Tensor {
        let g = gate.minimum(1.5).unwrap();
        let u = up.clamp(-1.5, 1.5).unwrap();
        // sigmoid(z) = (1 + tanh(z / 2)) / 2
        let s = (((&g * (1.702 / 2.0)).unwrap().tanh().unwrap() + 1.0).unwrap() * 0.5).unwrap();
        ((u + 1.0).unwrap() * (g * s).unwrap()).unwrap()
    }

    #[test]
    fn matches_autograd() {
        for shape in [(3, 7), (33, 1000)] {
            let gate = Var::from_tensor(&(random(shape, 1) * 2.0).unwrap()).unwrap();
            let up = Var::from_tensor(&(random(shape, 2) * 2.0).unwrap()).unwrap();
            let dy = random(shape, 3);
            let want = composed(&gate, &up);
            let grads = (&want * &dy).unwrap().sum_all().unwrap().backward().unwrap();
            assert_close(&forward(&gate, &up, UNIT).unwrap(), &want, 1e-5);
            let (gate_copy, up_copy) = (gate.as_tensor().copy().unwrap(), up.as_tensor().copy().unwrap());
            let (dgate, dup) = backward_in_place(gate_copy, up_copy, &dy, UNIT).unwrap();
            assert_close(&dgate, grads.get(&gate).unwrap(), 1e-5);
            assert_close(&dup, grads.get(&up).unwrap(), 1e-5);
            assert!(flat(&gate).iter().any(|x| *x > UNIT.limit) || shape.0 == 3);
        }
    }

    #[test]
    fn limits_and_nan() {
        let gate = Tensor::new(&[[9f32, 1.5, -1e30, f32::NAN]], &Device::Cpu).unwrap();
        let up = Tensor::new(&[[-9f32, 1.5, 9.0, 1.0]], &Device::Cpu).unwrap();
        let y = flat(&forward(&gate, &up, UNIT).unwrap());
        let top = 1.5 / (1.0 + (-1.702f32 * 1.5).exp());
        assert!((y[0] + 0.5 * top).abs() < 1e-6 && (y[1] - 2.5 * top).abs() < 1e-6);
        assert_eq!(y[2].abs(), 0.0);
        assert!(y[3].is_nan());
        let dy = gate.ones_like().unwrap();
        let (dgate, dup) = backward_in_place(gate, up, &dy, UNIT).unwrap();
        let (dgate, dup) = (flat(&dgate), flat(&dup));
        assert_eq!((dgate[0], dup[0], dup[2]), (0.0, 0.0, 0.0));
        assert!(dgate[1] > 0.0 && dup[1] > 0.0 && dgate[3].is_nan());
    }

    #[test]
    fn bit_equal_on_any_number_of_threads() {
        let (gate, up, dy) = (random((50, 999), 1), random((50, 999), 2), random((50, 999), 3));
        assert_same_on_any_threads(|| {
            let y = forward(&gate, &up, UNIT).unwrap();
            let (a, b) = backward_in_place(gate.copy().unwrap(), up.copy().unwrap(), &dy, UNIT).unwrap();
            vec![y, a, b]
        });
    }
}
