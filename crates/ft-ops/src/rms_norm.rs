//! RMSNorm: `y = x / sqrt(mean(x²) + eps) · w` over rows of E = `w.len()` elements. x is `[N, D]` with w `[D]`, or
//! `[N, H·E]` with w `[E]` (queries and keys normalized head by head). Gemma multiplies by `1 + w`.

use super::cpu::rms_norm as cpu;
use super::cpu::storage::{expect_dims, floats, tensor, unwritten, values, wrong_shape};
use super::update;
use candle_core::Tensor;
use ft_base::Result;

/// Checks that x consists of rows with as many elements as w.
fn check(x: &Tensor, w: &Tensor) -> Result<()> {
    let size = w.elem_count();
    expect_dims(w, "the weight of a norm", &[size])?;
    if size == 0 || x.dims().last().is_none_or(|last| last % size != 0) {
        return Err(wrong_shape(x, "x of a norm", &format!("rows of {size} elements")));
    }
    Ok(())
}

/// Returns the scale of each element, f32.
fn scale(w: &Tensor, plus_one: bool) -> Result<Vec<f32>> {
    let mut scale = values(w, "the weight of a norm", |w| Ok(w.to_f32()))?;
    if plus_one {
        scale.iter_mut().for_each(|w| *w += 1.0);
    }
    Ok(scale)
}

/// Normalizes x `[N, rows·E]` with w `[E]` f32 or bf16; the result has the shape and type of x.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn forward(x: &Tensor, w: &Tensor, eps: f64, plus_one: bool) -> Result<Tensor> {
    forward_plus(x, w, eps, plus_one, None)
}

/// As `forward`, plus `past`, what the residual stream carries past the norm, in the shape of x.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn forward_plus(x: &Tensor, w: &Tensor, eps: f64, plus_one: bool, past: Option<&Tensor>) -> Result<Tensor> {
    past.map_or(Ok(()), |past| expect_dims(past, "what passes by a norm", x.dims()))?;
    check(x, w)?;
    on_gpu!(x, super::cuda::rms_norm::forward(x, w, eps, plus_one, past));
    let scale = scale(w, plus_one)?;
    let mut y = unwritten(x.elem_count());
    floats(x, "x of a norm", |x| {
        cpu::forward(x, &scale, eps as f32, &mut y);
        Ok(())
    })?;
    plus(tensor(y, x.shape())?, past)
}

fn plus(y: Tensor, past: Option<&Tensor>) -> Result<Tensor> {
    past.map_or(Ok(()), |past| update::add_assign(&y, past))?;
    Ok(y)
}

/// Computes `dx` with the shape and type of x, and `dw [E]` f32 if `need_dw`. x and dy `[N, rows·E]`, w `[E]`.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn backward(
    x: &Tensor,
    w: &Tensor,
    dy: &Tensor,
    eps: f64,
    plus_one: bool,
    need_dw: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    backward_plus(x, w, dy, eps, plus_one, need_dw, None)
}

/// As `backward`; `dx` plus `past`, the gradient of what the residual stream carries past the norm, in the shape of x.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn backward_plus(
    x: &Tensor,
    w: &Tensor,
    dy: &Tensor,
    eps: f64,
    plus_one: bool,
    need_dw: bool,
    past: Option<&Tensor>,
) -> Result<(Tensor, Option<Tensor>)> {
    past.map_or(Ok(()), |past| expect_dims(past, "what passes by a norm", x.dims()))?;
    check(x, w)?;
    expect_dims(dy, "dy of a norm", x.dims())?;
    on_gpu!(
        x,
        super::cuda::rms_norm::backward(x, w, dy, eps, plus_one, need_dw, past)
    );
    let scale = scale(w, plus_one)?;
    let mut dx = unwritten(x.elem_count());
    let dw = floats(x, "x of a norm", |x| {
        floats(dy, "dy of a norm", |dy| {
            Ok(cpu::backward(x, &scale, dy, eps as f32, need_dw, &mut dx))
        })
    })?;
    let dw = dw.map(|dw| tensor(dw, scale.len())).transpose()?;
    Ok((plus(tensor(dx, x.shape())?, past)?, dw))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::{assert_close, assert_same_on_any_threads, bf16_pair, random};
    use candle_core::{D, Var};

    fn composed(x: &Tensor, w: &Tensor, eps: f64, plus_one: bool) -> Tensor {
        let size = w.elem_count();
        let rows = x.reshape(((), size)).unwrap();
        let mean = rows.sqr().unwrap().mean_keepdim(D::Minus1).unwrap();
        let w = if plus_one { (w + 1.0).unwrap() } else { w.clone() };
        rows.broadcast_div(&(mean + eps).unwrap().sqrt().unwrap())
            .unwrap()
            .broadcast_mul(&w)
            .unwrap()
            .reshape(x.shape())
            .unwrap()
    }

    #[test]
    fn matches_autograd() {
        // (tokens, width of x, size of w): whole rows, heads, sizes that are no multiple of a SIMD vector, many rows.
        for (n, d, e) in [(5, 64, 64), (7, 96, 24), (3, 37, 37), (1000, 12, 4)] {
            for (eps, plus_one) in [(1e-6, false), (1e-1, true)] {
                let x = Var::from_tensor(&random((n, d), 1)).unwrap();
                let w = Var::from_tensor(&random(e, 2)).unwrap();
                let dy = random((n, d), 3);
                let want = composed(&x, &w, eps, plus_one);
                let grads = (&want * &dy).unwrap().sum_all().unwrap().backward().unwrap();
                assert_close(&forward(&x, &w, eps, plus_one).unwrap(), &want, 1e-5);
                let (dx, dw) = backward(&x, &w, &dy, eps, plus_one, true).unwrap();
                assert_close(&dx, grads.get(&x).unwrap(), 1e-5);
                assert_close(&dw.unwrap(), grads.get(&w).unwrap(), 1e-5);
                let (again, none) = backward(&x, &w, &dy, eps, plus_one, false).unwrap();
                assert_close(&again, &dx, 0.0);
                assert!(none.is_none());
                let past = random((n, d), 4);
                let y = forward_plus(&x, &w, eps, plus_one, Some(&past)).unwrap();
                assert_close(&y, &(want + &past).unwrap(), 1e-5);
                let (plus, _) = backward_plus(&x, &w, &dy, eps, plus_one, false, Some(&past)).unwrap();
                assert_close(&plus, &(dx + &past).unwrap(), 0.0);
            }
        }
    }

    #[test]
    fn bf16_weights_are_used_as_they_are() {
        let (x, (w, wide)) = (random((9, 32), 1), bf16_pair(32, 2));
        assert_close(
            &forward(&x, &w, 1e-6, true).unwrap(),
            &forward(&x, &wide, 1e-6, true).unwrap(),
            0.0,
        );
    }

    #[test]
    fn bit_equal_on_any_number_of_threads() {
        let (x, w, dy) = (random((333, 48), 1), random(16, 2), random((333, 48), 3));
        assert_same_on_any_threads(|| {
            let (dx, dw) = backward(&x, &w, &dy, 1e-6, false, true).unwrap();
            vec![forward(&x, &w, 1e-6, false).unwrap(), dx, dw.unwrap()]
        });
    }

    #[test]
    fn rows_must_divide() {
        assert!(forward(&random((4, 10), 1), &random(4, 1), 1e-6, false).is_err());
    }
}
