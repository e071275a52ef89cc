//! Gated linear unit: `y = act(gate) · up`, elementwise, all `[N, I]` of one type; and the function alone, `y = act(x)`.

use super::cpu::glu as cpu;
use super::cpu::storage::{expect_dims, floats, tensor, unwritten};
use super::update::{with_slice_mut, with_slices};
use candle_core::Tensor;
use ft_base::Result;

/// The activation function of the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`
    Silu,
    /// The tanh approximation of GELU.
    GeluTanh,
    /// `x Φ(x)` with the exact error function.
    Gelu,
    /// `max(x, 0)²`
    Relu2,
    /// `1 / (1 + e^-x)`: the output gate of an attention.
    Sigmoid,
    /// x: the gates of short convolutions (LFM2).
    Identity,
}

/// Computes `act(gate) · up`, all `[N, I]`.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn forward(gate: &Tensor, up: &Tensor, act: Activation) -> Result<Tensor> {
    expect_dims(up, "up of a gated unit", gate.dims())?;
    on_gpu!(gate, super::cuda::glu::forward(gate, up, act));
    let mut y = unwritten(gate.elem_count());
    floats(gate, "gate of a gated unit", |gate| {
        floats(up, "up of a gated unit", |up| {
            cpu::forward(gate, up, act, &mut y);
            Ok(())
        })
    })?;
    tensor(y, gate.shape())
}

/// Computes dgate and dup from dy, all `[N, I]`.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn backward(gate: &Tensor, up: &Tensor, dy: &Tensor, act: Activation) -> Result<(Tensor, Tensor)> {
    expect_dims(up, "up of a gated unit", gate.dims())?;
    expect_dims(dy, "dy of a gated unit", gate.dims())?;
    on_gpu!(gate, super::cuda::glu::backward(gate, up, dy, act));
    let mut dgate = unwritten(gate.elem_count());
    let mut dup = unwritten(gate.elem_count());
    floats(gate, "gate of a gated unit", |gate| {
        floats(up, "up of a gated unit", |up| {
            floats(dy, "dy of a gated unit", |dy| {
                cpu::backward(gate, up, dy, act, &mut dgate, &mut dup);
                Ok(())
            })
        })
    })?;
    Ok((tensor(dgate, gate.shape())?, tensor(dup, gate.shape())?))
}

/// As `backward`, with the same bits, for a gate and an up that are no longer needed: on the CPU dgate and dup
/// overwrite them. gate, up and dy must not share storage.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn backward_in_place(gate: Tensor, up: Tensor, dy: &Tensor, act: Activation) -> Result<(Tensor, Tensor)> {
    expect_dims(&up, "up of a gated unit", gate.dims())?;
    expect_dims(dy, "dy of a gated unit", gate.dims())?;
    on_gpu!(&gate, super::cuda::glu::backward(&gate, &up, dy, act));
    let mut inner = Ok(());
    with_slices(&gate, dy, |gate, dy| {
        inner = with_slice_mut(&up, |up| cpu::backward_in_place(gate, up, dy, act));
    })?;
    inner?;
    Ok((gate, up))
}

/// Computes `act(x)` in the shape of x.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn activate(x: &Tensor, act: Activation) -> Result<Tensor> {
    on_gpu!(x, super::cuda::glu::activate(x, act));
    let mut y = unwritten(x.elem_count());
    floats(x, "x of an activation", |x| {
        cpu::activate(x, act, &mut y);
        Ok(())
    })?;
    tensor(y, x.shape())
}

/// Backward of `activate` for an x that is no longer needed: on the CPU dx overwrites it. x and dy must not share storage.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn activate_backward(x: Tensor, dy: &Tensor, act: Activation) -> Result<Tensor> {
    expect_dims(dy, "dy of an activation", x.dims())?;
    on_gpu!(&x, super::cuda::glu::activate_backward(&x, dy, act));
    with_slices(&x, dy, |x, dy| cpu::activate_backward(x, dy, act))?;
    Ok(x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::{assert_close, assert_same_on_any_threads, differences, flat, random};
    use candle_core::{Device, Var};

    const ALL: [Activation; 4] = [
        Activation::Silu,
        Activation::GeluTanh,
        Activation::Gelu,
        Activation::Relu2,
    ];

    /// `x / (1 + e^-2z)` with z the argument of the tanh; candle has no exact GELU with an exact derivative.
    fn composed(x: &Tensor, act: Activation) -> Tensor {
        let z = match act {
            Activation::Silu => (x * 0.5).unwrap(),
            _ => {
                let cubed = (x.powf(3.0).unwrap() * 0.044_715).unwrap();
                ((x + cubed).unwrap() * (2.0 / std::f64::consts::PI).sqrt()).unwrap()
            }
        };
        let half = (z.tanh().unwrap() * 0.5).unwrap();
        (x * (half + 0.5).unwrap()).unwrap()
    }

    #[test]
    fn matches_autograd() {
        for act in [Activation::Silu, Activation::GeluTanh] {
            for shape in [(3, 7), (33, 1000)] {
                let gate = Var::from_tensor(&(random(shape, 1) * 3.0).unwrap()).unwrap();
                let up = Var::from_tensor(&random(shape, 2)).unwrap();
                let dy = random(shape, 3);
                let want = (composed(&gate, act) * up.as_tensor()).unwrap();
                let grads = (&want * &dy).unwrap().sum_all().unwrap().backward().unwrap();
                assert_close(&forward(&gate, &up, act).unwrap(), &want, 1e-5);
                let (dgate, dup) = backward(&gate, &up, &dy, act).unwrap();
                assert_close(&dgate, grads.get(&gate).unwrap(), 1e-5);
                assert_close(&dup, grads.get(&up).unwrap(), 1e-5);
            }
        }
    }

    #[test]
    fn exact_gelu_has_known_values_and_the_slope_of_differences() {
        // x Φ(x) at 1, -1, 2, -3 (tables of the normal distribution).
        let gate = Tensor::new(&[[1f32, -1.0, 2.0, -3.0, 0.0]], &Device::Cpu).unwrap();
        let one = gate.ones_like().unwrap();
        let y = forward(&gate, &one, Activation::Gelu).unwrap();
        let want = [0.841_344_8, -0.158_655_25, 1.954_499_7, -0.004_049_694, 0.0];
        for (y, want) in flat(&y).iter().zip(want) {
            assert!((y - want).abs() < 1e-6, "{y} {want}");
        }
        let (gate, up, dy) = (random((2, 9), 1), random((2, 9), 2), random((2, 9), 3));
        let (dgate, dup) = backward(&gate, &up, &dy, Activation::Gelu).unwrap();
        // Computed in f64, so that the differences are accurate to 1e-6.
        let exact = |x: f64| x * 0.5 * candle_core::cpu::erf::erfc_f64(-x / 2f64.sqrt());
        let slope: Vec<f32> = flat(&gate)
            .iter()
            .zip(flat(&up).iter().zip(flat(&dy)))
            .map(|(x, (u, d))| {
                let (x, h) = (*x as f64, 1e-5);
                ((exact(x + h) - exact(x - h)) / (2.0 * h) * *u as f64 * d as f64) as f32
            })
            .collect();
        assert_close(&dgate, &Tensor::from_vec(slope, (2, 9), &Device::Cpu).unwrap(), 1e-5);
        let act = forward(&gate, &up.ones_like().unwrap(), Activation::Gelu).unwrap();
        assert_close(&dup, &(act * dy).unwrap(), 1e-6);
    }

    #[test]
    fn gradients_in_place_are_the_same_bits() {
        for act in ALL {
            for shape in [(1, 1), (3, 700), (40, 999)] {
                let (gate, up, dy) = (random(shape, 7), random(shape, 8), random(shape, 9));
                let (want_gate, want_up) = backward(&gate, &up, &dy, act).unwrap();
                // Only the middle rows of a larger tensor change.
                let around = |t: &Tensor| Tensor::cat(&[t, t, t], 0).unwrap().contiguous().unwrap();
                let (wide_gate, wide_up) = (around(&gate), around(&up));
                let middle = |t: &Tensor| t.narrow(0, shape.0, shape.0).unwrap();
                let (got_gate, got_up) = backward_in_place(middle(&wide_gate), middle(&wide_up), &dy, act).unwrap();
                assert_eq!(flat(&got_gate.copy().unwrap()), flat(&want_gate));
                assert_eq!(flat(&got_up.copy().unwrap()), flat(&want_up));
                for (t, old) in [(&wide_gate, &gate), (&wide_up, &up)] {
                    assert_eq!(
                        flat(&t.narrow(0, 2 * shape.0, shape.0).unwrap().copy().unwrap()),
                        flat(old)
                    );
                }
            }
        }
    }

    #[test]
    fn slopes_match_differences() {
        let (gate, up, dy) = (random((1, 8), 4), random((1, 8), 5), random((1, 8), 6));
        for act in ALL.into_iter().chain([Activation::Sigmoid]) {
            let slope = differences(&gate, 1e-2, |g| {
                let y = forward(g, &up, act)?;
                let dot: f64 = flat(&y).iter().zip(flat(&dy)).map(|(y, d)| *y as f64 * d as f64).sum();
                Ok(dot)
            });
            let (dgate, _) = backward(&gate, &up, &dy, act).unwrap();
            assert_close(&dgate, &slope, 2e-4);
        }
    }

    #[test]
    fn far_values_stay_finite_and_nan_passes() {
        let gate = Tensor::new(&[[-200f32, 200.0, -1e30, f32::NAN]], &Device::Cpu).unwrap();
        let one = gate.ones_like().unwrap();
        for act in ALL {
            let (large, slope) = match act {
                Activation::Relu2 => (40_000.0, 400.0),
                _ => (200.0, 1.0),
            };
            let y = flat(&forward(&gate, &one, act).unwrap());
            assert_eq!(y[0].abs(), 0.0, "{act:?}");
            assert_eq!((y[1], y[2].abs()), (large, 0.0), "{act:?}");
            assert!(y[3].is_nan());
            let (d, _) = backward(&gate, &one, &one, act).unwrap();
            let d = flat(&d);
            assert_eq!((d[0].abs(), d[1], d[2].abs()), (0.0, slope, 0.0), "{act:?}");
            assert!(d[3].is_nan());
        }
    }

    #[test]
    fn bit_equal_on_any_number_of_threads() {
        let (gate, up, dy) = (random((50, 999), 1), random((50, 999), 2), random((50, 999), 3));
        for act in ALL {
            assert_same_on_any_threads(|| {
                let (a, b) = backward(&gate, &up, &dy, act).unwrap();
                vec![forward(&gate, &up, act).unwrap(), a, b]
            });
        }
    }

    /// The function alone is a gated unit whose up is 1.
    #[test]
    fn alone_is_with_an_up_of_one() {
        for act in ALL {
            let (x, dy) = (random((40, 999), 7), random((40, 999), 9));
            let one = x.ones_like().unwrap();
            assert_eq!(
                flat(&activate(&x, act).unwrap()),
                flat(&forward(&x, &one, act).unwrap())
            );
            let want = flat(&backward(&x, &one, &dy, act).unwrap().0);
            assert_eq!(
                flat(&activate_backward(x.copy().unwrap(), &dy, act).unwrap()),
                want,
                "{act:?}"
            );
        }
    }
}
