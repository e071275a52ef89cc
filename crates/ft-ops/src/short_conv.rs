//! Causal depthwise convolution over the last K tokens of a document: `y_t = Σ_k w_k ⊙ x_{t-K+1+k}`, or SiLU of that sum
//! (`silu`). The inputs before the first token of a document are 0.
//!
//! x and y `[N, C]`, w `[C, 1, K]` as in a file of the model.

use super::attention::check_documents;
use super::cpu::short_conv as cpu;
use super::cpu::storage::{dims2, expect_dims, floats, tensor, unwritten, values, wrong_shape};
use candle_core::Tensor;
use ft_base::Result;

/// Most taps on a GPU, as `TAPS` in `cuda/short_conv.cu`.
pub const DEVICE_TAPS: usize = 8;

/// Returns C and K.
fn sizes(x: &Tensor, w: &Tensor, documents: &[usize]) -> Result<(usize, usize)> {
    let (tokens, channels) = dims2(x, "x of a convolution")?;
    check_documents(documents, tokens)?;
    match *w.dims() {
        [c, 1, kernel] if c == channels && kernel > 0 => Ok((c, kernel)),
        _ => Err(wrong_shape(
            w,
            "the weight of a convolution",
            &format!("[{channels}, 1, K]"),
        )),
    }
}

/// Returns w in f32, transposed to `[K, C]`.
fn taps(w: &Tensor, kernel: usize) -> Result<Vec<f32>> {
    let w = values(w, "the weight of a convolution", |w| Ok(w.to_f32()))?;
    Ok((0..kernel)
        .flat_map(|k| w.iter().skip(k).step_by(kernel).copied())
        .collect())
}

/// Computes y `[N, C]` from x `[N, C]` and w `[C, 1, K]`. `documents`: offsets of the documents, in tokens.
///
/// # Errors
/// Shapes or offsets that do not fit; on a GPU more than 8 taps.
pub fn forward(x: &Tensor, w: &Tensor, documents: &[usize], silu: bool) -> Result<Tensor> {
    let (channels, kernel) = sizes(x, w, documents)?;
    on_gpu!(x, super::cuda::short_conv::forward(x, w, documents, silu));
    let taps = taps(w, kernel)?;
    let mut y = unwritten(x.elem_count());
    floats(x, "x of a convolution", |x| {
        cpu::forward(x, &taps, channels, documents, silu, &mut y);
        Ok(())
    })?;
    tensor(y, x.shape())
}

/// Computes dx, and dw f32 `[C, 1, K]` if `need_dw`, from dy `[N, C]`.
///
/// # Errors
/// As `forward`.
pub fn backward(
    x: &Tensor,
    w: &Tensor,
    dy: &Tensor,
    documents: &[usize],
    silu: bool,
    need_dw: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let (channels, kernel) = sizes(x, w, documents)?;
    expect_dims(dy, "dy of a convolution", x.dims())?;
    on_gpu!(x, super::cuda::short_conv::backward(x, w, dy, documents, silu, need_dw));
    let taps = taps(w, kernel)?;
    let mut dx = unwritten(x.elem_count());
    let dw = floats(x, "x of a convolution", |x| {
        floats(dy, "dy of a convolution", |dy| {
            let mut sums = unwritten(if silu { x.len() } else { 0 });
            let du = if silu {
                cpu::before_silu(x, &taps, channels, documents, dy, &mut sums);
                &sums
            } else {
                dy
            };
            cpu::backward(du, &taps, channels, documents, &mut dx);
            Ok(need_dw.then(|| cpu::weight_gradient(x, du, channels, kernel, documents)))
        })
    })?;
    let dw = dw.map(|dw| tensor(dw, w.shape())).transpose()?;
    Ok((tensor(dx, x.shape())?, dw))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::{assert_close, assert_same_on_any_threads, random};
    use candle_core::Var;

    fn composed(x: &Tensor, w: &Tensor, documents: &[usize], silu: bool) -> Tensor {
        let (channels, _, kernel) = w.dims3().unwrap();
        let mut parts = Vec::new();
        for d in documents.windows(2).filter(|d| d[1] > d[0]) {
            let n = d[1] - d[0];
            let zeros = Tensor::zeros((kernel - 1, channels), x.dtype(), x.device()).unwrap();
            let padded = Tensor::cat(&[&zeros, &x.narrow(0, d[0], n).unwrap()], 0).unwrap();
            let mut sum = x.narrow(0, d[0], n).unwrap().zeros_like().unwrap();
            for k in 0..kernel {
                let w = w.narrow(2, k, 1).unwrap().reshape((1, channels)).unwrap();
                sum = (sum + padded.narrow(0, k, n).unwrap().broadcast_mul(&w).unwrap()).unwrap();
            }
            if !silu {
                parts.push(sum);
                continue;
            }
            let half = ((&sum * 0.5).unwrap().tanh().unwrap() * 0.5).unwrap();
            parts.push((sum * (half + 0.5).unwrap()).unwrap());
        }
        Tensor::cat(&parts, 0).unwrap()
    }

    #[test]
    fn matches_autograd() {
        for (documents, channels, kernel, silu) in [
            (vec![0, 9], 7, 4, true),
            (vec![0, 1, 1, 3, 200, 261], 40, 4, true),
            (vec![0, 5], 3, 1, true),
            (vec![0, 2, 70], 130, 6, true),
            (vec![0, 2, 2, 70], 130, 3, false),
            (vec![0, 9], 7, 5, false),
        ] {
            let n = *documents.last().unwrap();
            let x = Var::from_tensor(&random((n, channels), 1)).unwrap();
            let w = Var::from_tensor(&random((channels, 1, kernel), 2)).unwrap();
            let dy = random((n, channels), 3);
            let want = composed(&x, &w, &documents, silu);
            let grads = (&want * &dy).unwrap().sum_all().unwrap().backward().unwrap();
            assert_close(&forward(&x, &w, &documents, silu).unwrap(), &want, 1e-5);
            let (dx, dw) = backward(&x, &w, &dy, &documents, silu, true).unwrap();
            assert_close(&dx, grads.get(&x).unwrap(), 1e-5);
            assert_close(&dw.unwrap(), grads.get(&w).unwrap(), 1e-5);
            assert_same_on_any_threads(|| {
                let (dx, dw) = backward(&x, &w, &dy, &documents, silu, true).unwrap();
                vec![forward(&x, &w, &documents, silu).unwrap(), dx, dw.unwrap()]
            });
        }
    }

    #[test]
    fn wrong_shapes_are_errors() {
        let (x, w) = (random((4, 6), 1), random((6, 1, 3), 2));
        assert!(forward(&x, &random((5, 1, 3), 1), &[0, 4], true).is_err());
        assert!(forward(&x, &random((6, 3), 1), &[0, 4], true).is_err());
        assert!(forward(&x, &w, &[0, 3], false).is_err());
        assert!(backward(&x, &w, &random((3, 6), 1), &[0, 4], true, true).is_err());
    }
}
