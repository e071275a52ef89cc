//! Sparse activations (Gemma 3n): of each row u of a gate only what is far above its mean stays, `s = max(u - cut, 0)` with
//! `cut = mean(u) + m · std(u)`. m is the quantile of a normal distribution below which a given part of the values lies.
//!
//! u and s `[N, I]`; the standard deviation divides by I. f32, on a GPU also bf16.

use super::cpu::storage::{dims2, expect_dims, floats, tensor, unwritten};
use super::update::with_slice_mut;
use candle_core::Tensor;
use ft_base::Result;
use rayon::prelude::*;
use std::f64::consts::PI;

/// The quantile of a standard normal distribution: `part` (between 0 and 1) of the values are below it.
pub fn quantile(part: f32) -> f32 {
    let (part, mut x) = (f64::from(part), 0.0f64);
    let density = |x: f64| (-x * x / 2.0).exp() / (2.0 * PI).sqrt();
    // Φ(x) = 1/2 + φ(x) · (x + x³/3 + x⁵/15 + ...)
    let below = |x: f64| {
        let (mut term, mut sum) = (x, x);
        for k in 1..400 {
            term *= x * x / f64::from(2 * k + 1);
            sum += term;
        }
        0.5 + density(x) * sum
    };
    // Newton's method, in steps of 1 at most.
    for _ in 0..100 {
        x -= ((below(x) - part) / density(x)).clamp(-1.0, 1.0);
    }
    x as f32
}

/// Mean and standard deviation.
fn moments(u: &[f32]) -> (f32, f32) {
    let n = u.len() as f32;
    let mean = u.iter().sum::<f32>() / n;
    let variance = u.iter().map(|u| (u - mean) * (u - mean)).sum::<f32>() / n;
    (mean, variance.sqrt())
}

/// s from u `[N, I]` and m.
///
/// # Errors
/// A tensor of another type.
pub fn forward(u: &Tensor, m: f32) -> Result<Tensor> {
    let (n, width) = dims2(u, "a gate")?;
    on_gpu!(u, super::cuda::altup::sparse(u, m, (n, width)));
    let mut s = unwritten(n * width);
    floats(u, "a gate", |u| {
        let rows = s.par_chunks_mut(width.max(1)).zip(u.par_chunks(width.max(1)));
        rows.for_each(|(s, u)| {
            let (mean, std) = moments(u);
            let cut = mean + std * m;
            for (s, u) in s.iter_mut().zip(u) {
                let x = u - cut;
                // `max` would hide NaN.
                *s = if x < 0.0 { 0.0 } else { x };
            }
        });
        Ok(())
    })?;
    tensor(s, (n, width))
}

/// Backward: the gradient `d` of s `[N, I]` becomes that of u in place.
///
/// # Errors
/// As `forward`; a gradient of another shape.
pub fn backward_assign(u: &Tensor, d: &Tensor, m: f32) -> Result<()> {
    let (_, width) = dims2(u, "a gate")?;
    expect_dims(d, "the gradient of a gate", u.dims())?;
    on_gpu!(u, super::cuda::altup::sparse_backward(u, d, m, u.dims2()?));
    floats(u, "a gate", |u| {
        with_slice_mut(d, move |d| {
            let rows = d.par_chunks_mut(width.max(1)).zip(u.par_chunks(width.max(1)));
            rows.for_each(|(d, u)| {
                let (mean, std) = moments(u);
                let cut = mean + std * m;
                let mut all = 0.0;
                for (d, u) in d.iter_mut().zip(u) {
                    *d = if *u > cut { *d } else { 0.0 };
                    all += *d;
                }
                let n = u.len() as f32;
                let slope = if std > 0.0 { m * all / (n * std) } else { 0.0 };
                for (d, u) in d.iter_mut().zip(u) {
                    *d -= all / n + slope * (u - mean);
                }
            });
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::{assert_close, random};
    use candle_core::{D, Var};

    #[test]
    fn quantiles_are_those_of_a_normal_distribution() {
        for (part, want) in [
            (0.5, 0.0),
            (0.95, 1.644_853_6),
            (0.1, -1.281_551_6),
            (0.999_938_96, 3.841_930_7),
        ] {
            assert!((quantile(part) - want).abs() < 2e-6, "{part}");
        }
    }

    #[test]
    fn a_number_that_is_not_finite_stays_visible() {
        for bad in [f32::NAN, f32::INFINITY] {
            let u = Tensor::new(&[[1.0, bad, -2.0], [1.0, 2.0, 9.0]], &candle_core::Device::Cpu).unwrap();
            let s = forward(&u, quantile(0.5)).unwrap().to_vec2::<f32>().unwrap();
            assert!(s[0].iter().any(|x| x.is_nan()), "{s:?}");
            assert!(s[1].iter().all(|x| x.is_finite()) && s[1][2] == 5.0, "{s:?}");
        }
    }

    #[test]
    fn matches_autograd() {
        for (n, width, part) in [(5, 64, 0.8), (3, 7, 0.3), (200, 33, 0.95)] {
            let m = quantile(part);
            let u = Var::from_tensor(&random((n, width), 1)).unwrap();
            let d = random((n, width), 2);
            let mean = u.mean_keepdim(D::Minus1).unwrap();
            let variance = u
                .broadcast_sub(&mean)
                .unwrap()
                .sqr()
                .unwrap()
                .mean_keepdim(D::Minus1)
                .unwrap();
            let cut = (mean + (variance.sqrt().unwrap() * f64::from(m)).unwrap()).unwrap();
            let want = u.broadcast_sub(&cut).unwrap().relu().unwrap();
            let grads = (&want * &d).unwrap().sum_all().unwrap().backward().unwrap();
            assert_close(&forward(&u, m).unwrap(), &want, 1e-5);
            backward_assign(&u, &d, m).unwrap();
            assert_close(&d, grads.get(&u).unwrap(), 1e-5);
        }
    }
}
