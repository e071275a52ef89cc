//! Operations of adapters other than LoRA. Those without a CPU version belong to code that only a GPU runs.
//!
//! Letters: N tokens, C columns, O output features, R rank, I = K·S features in K blocks of S.

use super::{linear, update};
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};

fn gpu_only<T>() -> Result<T> {
    Err(Error::unsupported("this operation of an adapter exists on a GPU only"))
}

/// Scales the columns of `x` `[N, C]` (f32, on a GPU also bf16) by the C elements of `v` f32, in the type of x.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn scale_columns(x: &Tensor, v: &Tensor) -> Result<Tensor> {
    scale_and_shift(x, v, None, x.dtype())
}

/// Computes `x ⊙ v + bias`, `[N, C]` in type `to`, from x f32 or bf16; `v` f32 and `bias` have C elements.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn scale_and_shift(x: &Tensor, v: &Tensor, bias: Option<&Tensor>, to: DType) -> Result<Tensor> {
    on_gpu!(x, super::cuda::adapters::scale_and_shift(x, v, bias, to));
    let scaled = x.to_dtype(DType::F32)?.broadcast_mul(&v.flatten_all()?)?;
    let sum = match bias {
        Some(bias) => scaled.broadcast_add(&bias.to_dtype(DType::F32)?)?,
        None => scaled,
    };
    Ok(sum.to_dtype(to)?)
}

/// Sums `a ⊙ b` (`[N, C]` each) over the rows, `[C]` f32.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn sum_products(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    on_gpu!(a, super::cuda::adapters::sum_products(a, b));
    linear::grad_bias(&(a.to_dtype(DType::F32)? * b.to_dtype(DType::F32)?)?)
}

/// The row norms of DoRA: the terms of ‖V‖², f32.
#[derive(Debug, Clone, Copy)]
pub struct DoraNorm<'a> {
    /// A·Wᵀ, `[R, O]`
    pub across: &'a Tensor,
    /// B·A·Aᵀ, `[O, R]`
    pub own: &'a Tensor,
    /// B, `[O, R]`
    pub b: &'a Tensor,
    /// ‖W‖² of each row, `[O]`
    pub squares: &'a Tensor,
    /// s
    pub scale: f32,
}

impl DoraNorm<'_> {
    /// Computes `m / ‖V‖`, `[O]` f32, from the magnitudes `m [O]`. On a GPU only.
    ///
    /// # Errors
    /// Shapes that do not fit; not on a GPU.
    pub fn factors(&self, m: &Tensor) -> Result<Tensor> {
        on_gpu!(m, super::cuda::adapters::dora_factors(self, m));
        gpu_only()
    }
}

/// Builds skew-symmetric blocks `[K, S, S]` from their upper triangles `[K, S·(S-1)/2]`, row by row, f32.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn skew(triangles: &Tensor, size: usize) -> Result<Tensor> {
    on_gpu!(triangles, super::cuda::adapters::skew(triangles, size));
    let k = triangles.dim(0)?;
    let from = update::to_f32_vec(triangles)?;
    let mut q = vec![0f32; k * size * size];
    let mut next = from.iter();
    for block in q.chunks_exact_mut((size * size).max(1)) {
        for row in 0..size {
            for (column, &value) in (row + 1..size).zip(&mut next) {
                block[row * size + column] = value;
                block[column * size + row] = -value;
            }
        }
    }
    Ok(Tensor::from_vec(q, (k, size, size), triangles.device())?)
}

/// The gradient of the triangles `[K, S·(S-1)/2]` from that of the blocks, `dq [K, S, S]` f32.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn skew_gradient(dq: &Tensor) -> Result<Tensor> {
    let (k, s, _) = dq.dims3()?;
    on_gpu!(dq, super::cuda::adapters::skew_gradient(dq, (k, s)));
    let whole = update::to_f32_vec(dq)?;
    let mut out = Vec::with_capacity(k * s * s.saturating_sub(1) / 2);
    for block in whole.chunks_exact((s * s).max(1)) {
        for row in 0..s {
            out.extend((row + 1..s).map(|column| block[row * s + column] - block[column * s + row]));
        }
    }
    let triangle = out.len() / k.max(1);
    Ok(Tensor::from_vec(out, (k, triangle), dq.device())?)
}

/// (I + Q)⁻¹ of skew-symmetric blocks `q [K, S, S]`, f32: Gaussian elimination in f64, on the CPU with pivoting.
///
/// # Errors
/// Tensors of other shapes or types than described (`Shape`); not enough memory on the device; on the CPU a block that is not finite.
pub fn inverse_of_sum(q: &Tensor) -> Result<Tensor> {
    let (k, s, _) = q.dims3()?;
    on_gpu!(q, super::cuda::adapters::inverse_of_sum(q, (k, s)));
    let mut from = update::to_f32_vec(q)?;
    for block in from.chunks_exact_mut((s * s).max(1)) {
        block.iter_mut().step_by(s + 1).for_each(|x| *x += 1.0);
    }
    let mut out = Vec::with_capacity(from.len());
    for block in from.chunks_exact((s * s).max(1)) {
        let mut left: Vec<f64> = block.iter().map(|&x| f64::from(x)).collect();
        let mut right = vec![0f64; s * s];
        (0..s).for_each(|i| right[i * s + i] = 1.0);
        for column in 0..s {
            let size = |row: &usize| left[row * s + column].abs();
            let pivot = (column..s).max_by(|a, b| size(a).total_cmp(&size(b))).unwrap_or(column);
            let value = left[pivot * s + column];
            if value == 0.0 || !value.is_finite() {
                return Err(Error::new("a rotation of an OFT adapter cannot be computed")
                    .found("a block that is not finite, or has no inverse"));
            }
            for i in 0..s {
                left.swap(pivot * s + i, column * s + i);
                right.swap(pivot * s + i, column * s + i);
            }
            for i in 0..s {
                left[column * s + i] /= value;
                right[column * s + i] /= value;
            }
            for row in (0..s).filter(|&row| row != column) {
                let times = left[row * s + column];
                for i in 0..s {
                    left[row * s + i] -= times * left[column * s + i];
                    right[row * s + i] -= times * right[column * s + i];
                }
            }
        }
        out.extend(right.into_iter().map(|x| x as f32));
    }
    Ok(Tensor::from_vec(out, (k, s, s), q.device())?)
}

/// Computes `y [N, I] += x·D`, or `x·Dᵀ`, with D block-diagonal: `d [K, S, S]`, x of the type of y. On a GPU only.
///
/// # Errors
/// Shapes that do not fit; not on a GPU.
pub fn add_blocks(y: &Tensor, x: &Tensor, d: &Tensor, transposed: bool) -> Result<()> {
    on_gpu!(y, super::cuda::adapters::add_blocks(y, x, d, transposed));
    let _ = (x, d, transposed);
    gpu_only()
}

/// Computes the diagonal blocks of xᵀ·dy, `[K, S, S]` f32, from `x` and `dy` `[N, I]`, in blocks of `size`. On a GPU
/// only.
///
/// # Errors
/// Shapes that do not fit; not on a GPU.
pub fn blocks_gradient(x: &Tensor, dy: &Tensor, size: usize) -> Result<Tensor> {
    on_gpu!(x, super::cuda::adapters::blocks_gradient(x, dy, size));
    let _ = (dy, size);
    gpu_only()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::{flat, random};

    #[test]
    fn triangles_and_skew_blocks() {
        let triangles = random((3, 6), 1);
        let q = skew(&triangles, 4).unwrap();
        assert_eq!(q.dims(), [3, 4, 4]);
        let opposite = q.transpose(1, 2).unwrap().neg().unwrap();
        assert_eq!(flat(&q), flat(&opposite.contiguous().unwrap()));
        let twice = (&triangles * 2.0).unwrap();
        assert_eq!(flat(&skew_gradient(&q).unwrap()), flat(&twice));
        let one = Tensor::new(&[[1f32, 2.0, 3.0]], triangles.device()).unwrap();
        let want = [0.0, 1.0, 2.0, -1.0, 0.0, 3.0, -2.0, -3.0, 0.0];
        assert_eq!(flat(&skew(&one, 3).unwrap()), want);
    }

    #[test]
    fn columns_are_scaled_and_shifted() {
        let row = |row: &[f32]| Tensor::new(row, &candle_core::Device::Cpu).unwrap();
        let x = row(&[1.0, 2.0, 3.0, 4.0]).reshape((2, 2)).unwrap();
        let (v, bias) = (row(&[2.0, -1.0]), row(&[0.5, 1.0]));
        assert_eq!(flat(&scale_columns(&x, &v).unwrap()), [2.0, -2.0, 6.0, -4.0]);
        let shifted = scale_and_shift(&x, &v, Some(&bias), DType::BF16).unwrap();
        assert_eq!(shifted.dtype(), DType::BF16);
        assert_eq!(update::to_f32_vec(&shifted).unwrap(), [2.5, -1.0, 6.5, -3.0]);
        assert_eq!(flat(&sum_products(&x, &x).unwrap()), [10.0, 20.0]);
    }
}
