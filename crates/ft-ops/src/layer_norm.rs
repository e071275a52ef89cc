//! LayerNorm: `y = (x - mean(x)) / sqrt(var(x) + eps) · w + b` over rows of E elements. x is `[N, D]` with D = E, or
//! `[N, H·E]` (queries and keys normalized head by head), with parameters for each head (`[H, E]`) or one for all (`[E]`).
//! Nemotron multiplies by `1 + w`.

use super::cpu::layer_norm::{self as cpu, NormParams};
use super::cpu::storage::{expect_dims, floats, tensor, unwritten, values, wrong_shape};
use candle_core::Tensor;
use ft_base::Result;

/// A norm: its parameters and options.
#[derive(Debug, Clone, Copy)]
pub struct LayerNorm<'a> {
    /// E: elements that are normalized together.
    pub size: usize,
    /// `[E]` or `[H, E]`, f32 or bf16; `None`: 1.
    pub weight: Option<&'a Tensor>,
    /// `[E]` or `[H, E]`, f32 or bf16; `None`: 0.
    pub bias: Option<&'a Tensor>,
    /// Added to the variance.
    pub eps: f64,
    /// Multiplies by 1 + w.
    pub plus_one: bool,
}

/// The gradients of a norm.
#[derive(Debug)]
pub struct LayerNormGradients {
    /// The shape and type of x.
    pub dx: Tensor,
    /// f32, the shape of the weight, if it was requested.
    pub dw: Option<Tensor>,
    /// f32, the shape of the bias, if it was requested.
    pub db: Option<Tensor>,
}

impl LayerNorm<'_> {
    /// Elements of the parameters; of a norm without parameters: of a row.
    pub(crate) fn width(&self) -> usize {
        self.weight.or(self.bias).map_or(self.size, Tensor::elem_count)
    }

    /// Checks that x consists of rows with as many elements as the parameters.
    fn check(&self, x: &Tensor) -> Result<()> {
        let width = self.width();
        for (t, what) in [(self.weight, "the weight of a norm"), (self.bias, "the bias of a norm")] {
            if let Some(t) = t {
                expect_dims(t, what, t.dims())?;
                if t.elem_count() != width || self.size == 0 || !width.is_multiple_of(self.size) {
                    return Err(wrong_shape(t, what, &format!("a multiple of {} elements", self.size)));
                }
            }
        }
        if width == 0 || x.dims().last().is_none_or(|last| last % width != 0) {
            return Err(wrong_shape(x, "x of a norm", &format!("rows of {width} elements")));
        }
        Ok(())
    }

    fn affine(&self) -> Result<NormParams> {
        let width = self.width();
        let read = |t: Option<&Tensor>, what: &str, otherwise: f32| match t {
            Some(t) => values(t, what, |v| Ok(v.to_f32())),
            None => Ok(vec![otherwise; width]),
        };
        let mut scale = read(self.weight, "the weight of a norm", 1.0)?;
        if self.plus_one && self.weight.is_some() {
            scale.iter_mut().for_each(|w| *w += 1.0);
        }
        Ok(NormParams {
            size: self.size,
            scale,
            shift: read(self.bias, "the bias of a norm", 0.0)?,
            eps: self.eps as f32,
        })
    }
}

/// Normalizes x `[N, rows·E]`; the result has the shape and type of x.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn forward(x: &Tensor, norm: &LayerNorm) -> Result<Tensor> {
    norm.check(x)?;
    on_gpu!(x, super::cuda::layer_norm::forward(x, norm));
    let affine = norm.affine()?;
    let mut y = unwritten(x.elem_count());
    floats(x, "x of a norm", |x| {
        cpu::forward(x, &affine, &mut y);
        Ok(())
    })?;
    tensor(y, x.shape())
}

/// Computes the gradient of x in its shape, which dy has too, and those of weight and bias as `need` says.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn backward(x: &Tensor, norm: &LayerNorm, dy: &Tensor, need: [bool; 2]) -> Result<LayerNormGradients> {
    norm.check(x)?;
    expect_dims(dy, "dy of a norm", x.dims())?;
    let need = [need[0] && norm.weight.is_some(), need[1] && norm.bias.is_some()];
    on_gpu!(x, super::cuda::layer_norm::backward(x, norm, dy, need));
    let affine = norm.affine()?;
    let mut dx = unwritten(x.elem_count());
    let [dw, db] = floats(x, "x of a norm", |x| {
        floats(dy, "dy of a norm", |dy| {
            Ok(cpu::backward(x, &affine, dy, need, &mut dx))
        })
    })?;
    let shaped = |gradient: Option<Vec<f32>>, of: Option<&Tensor>| match (gradient, of) {
        (Some(gradient), Some(of)) => tensor(gradient, of.shape()).map(Some),
        _ => Ok(None),
    };
    Ok(LayerNormGradients {
        dx: tensor(dx, x.shape())?,
        dw: shaped(dw, norm.weight)?,
        db: shaped(db, norm.bias)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::{assert_close, assert_same_on_any_threads, bf16_pair, random};
    use candle_core::{D, Var};

    fn composed(x: &Tensor, norm: &LayerNorm) -> Tensor {
        let heads = norm.width() / norm.size;
        let rows = x.reshape(((), heads, norm.size)).unwrap();
        let centered = rows.broadcast_sub(&rows.mean_keepdim(D::Minus1).unwrap()).unwrap();
        let variance = centered.sqr().unwrap().mean_keepdim(D::Minus1).unwrap();
        let mut y = centered
            .broadcast_div(&(variance + norm.eps).unwrap().sqrt().unwrap())
            .unwrap();
        if let Some(w) = norm.weight {
            let w = if norm.plus_one { (w + 1.0).unwrap() } else { w.clone() };
            y = y.broadcast_mul(&w.reshape((heads, norm.size)).unwrap()).unwrap();
        }
        if let Some(b) = norm.bias {
            y = y.broadcast_add(&b.reshape((heads, norm.size)).unwrap()).unwrap();
        }
        y.reshape(x.shape()).unwrap()
    }

    #[test]
    fn matches_autograd() {
        // (tokens, width of x, heads with parameters, size): whole rows, heads, sizes that are no multiple of a SIMD vector.
        for (n, d, heads, size) in [
            (5, 64, 1, 64),
            (7, 96, 4, 24),
            (7, 96, 1, 24),
            (3, 37, 1, 37),
            (1000, 12, 3, 4),
        ] {
            for (eps, plus_one) in [(1e-6, false), (1e-1, true)] {
                let x = Var::from_tensor(&(random((n, d), 1) + 0.7).unwrap()).unwrap();
                let w = Var::from_tensor(&random((heads, size), 2)).unwrap();
                let b = Var::from_tensor(&random((heads, size), 4)).unwrap();
                let dy = random((n, d), 3);
                for (weight, bias) in [(Some(&*w), Some(&*b)), (Some(&*w), None), (None, None)] {
                    let norm = LayerNorm {
                        size,
                        weight,
                        bias,
                        eps,
                        plus_one,
                    };
                    let want = composed(&x, &norm);
                    let grads = (&want * &dy).unwrap().sum_all().unwrap().backward().unwrap();
                    assert_close(&forward(&x, &norm).unwrap(), &want, 1e-5);
                    let got = backward(&x, &norm, &dy, [true; 2]).unwrap();
                    assert_close(&got.dx, grads.get(&x).unwrap(), 2e-5);
                    for (got, of) in [(&got.dw, weight), (&got.db, bias)] {
                        assert_eq!(got.is_some(), of.is_some());
                        if let (Some(got), Some(of)) = (got, of) {
                            assert_close(got, grads.get(of).unwrap(), 1e-5);
                        }
                    }
                    let again = backward(&x, &norm, &dy, [false; 2]).unwrap();
                    assert_close(&again.dx, &got.dx, 0.0);
                    assert!(again.dw.is_none() && again.db.is_none());
                }
            }
        }
    }

    #[test]
    fn bf16_parameters_are_used_as_they_are() {
        let (x, (w, wide), (b, wide_b)) = (random((9, 32), 1), bf16_pair(32, 2), bf16_pair(32, 3));
        let norm = |w, b| LayerNorm {
            size: 32,
            weight: Some(w),
            bias: Some(b),
            eps: 1e-5,
            plus_one: true,
        };
        let (narrow, wide) = (norm(&w, &b), norm(&wide, &wide_b));
        assert_close(&forward(&x, &narrow).unwrap(), &forward(&x, &wide).unwrap(), 0.0);
    }

    #[test]
    fn bit_equal_on_any_number_of_threads() {
        let (x, w, dy) = (random((333, 48), 1), random((3, 16), 2), random((333, 48), 3));
        assert_same_on_any_threads(|| {
            let norm = LayerNorm {
                size: 16,
                weight: Some(&w),
                bias: Some(&w),
                eps: 1e-6,
                plus_one: false,
            };
            let got = backward(&x, &norm, &dy, [true; 2]).unwrap();
            vec![forward(&x, &norm).unwrap(), got.dx, got.dw.unwrap(), got.db.unwrap()]
        });
    }

    #[test]
    fn rows_must_divide() {
        let w = random(4, 1);
        let norm = LayerNorm {
            size: 4,
            weight: Some(&w),
            bias: None,
            eps: 1e-6,
            plus_one: false,
        };
        assert!(forward(&random((4, 10), 1), &norm).is_err());
        assert!(forward(&random((4, 12), 1), &LayerNorm { size: 3, ..norm }).is_err());
        let b = random(8, 1);
        assert!(forward(&random((4, 8), 1), &LayerNorm { bias: Some(&b), ..norm }).is_err());
    }
}
