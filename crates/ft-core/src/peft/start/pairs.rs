//! Inits from one matrix: the weight, the covariance of the inputs, or the gradient.
//!
//! Letters: I input features, O output features, R rank, K = min(O, I).

use super::algebra;
use super::corda::Covariance;
use super::{krylov, tiles};
use crate::base::{Error, Result};
use faer::{Mat, MatRef};

/// A `[R, I]` and B `[O, R]`, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct InitPair {
    /// `[R, I]`
    pub a: Vec<f32>,
    /// `[O, R]`
    pub b: Vec<f32>,
}

/// Errors: a rank larger than the matrix allows.
pub(super) fn check_rank(r: usize, rows: usize, columns: usize) -> Result<()> {
    if r <= rows.min(columns) {
        return Ok(());
    }
    Err(
        Error::argument("the rank of an adapter is too large for its weight with this initialization")
            .found(format!("rank {r} on a weight [{rows}, {columns}]"))
            .expected(format!("at most {}", rows.min(columns)))
            .hint("lower `LoraConfig::r`, or set a lower one for this module in `LoraConfig::rank_pattern`"),
    )
}

/// PiSSA (Meng et al. 2024, arXiv 2404.02948, section 3): the R largest components of W `[O, I]`,
/// A = √(S/s)·Vᵀ and B = U·√(S/s). Uses the fast SVD if `iterations` > 0.
///
/// # Errors
/// A rank larger than the matrix allows (`Argument`); as `algebra::svd`.
pub fn pissa(w: MatRef<'_, f64>, r: usize, scale: f32, iterations: usize, seed: u64, site: u64) -> Result<InitPair> {
    check_rank(r, w.nrows(), w.ncols())?;
    let found = match iterations {
        0 => algebra::leading_svd(w, r, seed, site)?,
        _ => algebra::fast_svd(w, r, iterations, seed, site)?,
    };
    let root = |k: usize| (found.s[k] / f64::from(scale)).sqrt();
    let a = Mat::from_fn(r, w.ncols(), |k, i| root(k) * found.v[(i, k)]);
    let b = Mat::from_fn(w.nrows(), r, |o, k| root(k) * found.u[(o, k)]);
    Ok(InitPair {
        a: algebra::values(a.as_ref()),
        b: algebra::values(b.as_ref()),
    })
}

/// OLoRA (Büyükakyüz 2024, arXiv 2406.01775, section 3): W = Q·R; B the first R columns of Q, A the first rows of R.
///
/// # Errors
/// A rank larger than the matrix allows (`Argument`).
pub fn olora(w: MatRef<'_, f64>, r: usize) -> Result<InitPair> {
    check_rank(r, w.nrows(), w.ncols())?;
    // The first R reflections are those of the first R columns.
    let (q, _) = algebra::qr(w.get(.., ..r));
    Ok(InitPair {
        a: algebra::values(tiles::product(q.transpose(), w).as_ref()),
        b: algebra::values(q.as_ref()),
    })
}

/// EVA (Paischer et al. 2024, arXiv 2410.07170, section 3.1): the principal directions of the inputs (around their
/// mean, as in PEFT), which become the rows of A (B is zero), and the fraction of the variance that each explains.
///
/// Returns `count` directions `[count, I]`, row-major.
///
/// # Errors
/// More directions than inputs.
pub fn eva(inputs: &Covariance, count: usize) -> Result<(Vec<f32>, Vec<f64>)> {
    check_rank(count, inputs.size(), inputs.size())?;
    let centered = inputs.centered();
    let n = centered.nrows();
    // Of a symmetric matrix without negative eigenvalues.
    let few = if krylov::pays(n, n, count) {
        krylov::largest(&centered.as_ref(), count, 0, 0)?
    } else {
        None
    };
    let (vectors, values, all) = match few {
        Some(found) => (found.v, found.s, (0..n).map(|i| centered[(i, i)]).sum()),
        None => {
            let (vectors, values) = algebra::eigen(centered.as_ref())?;
            let all = values.iter().map(|v| v.max(0.0)).sum::<f64>();
            (vectors, values, all)
        }
    };
    let all = all.max(f64::MIN_POSITIVE);
    let explained = values[..count].iter().map(|v| v.max(0.0) / all).collect();
    Ok((algebra::values(vectors.transpose().get(..count, ..)), explained))
}

/// EVA's ranks (section 3.2, allocated as in PEFT): the `budget` directions that explain most variance, among all
/// directions of all linears in model order. `first_of[m]` is the first linear with the same input as linear m: it gets
/// the highest of their ranks.
pub fn eva_ranks(explained: &[Vec<f64>], first_of: &[usize], budget: usize) -> Vec<usize> {
    let mut all: Vec<(usize, f64)> = Vec::new();
    for (m, values) in explained.iter().enumerate() {
        all.extend(values.iter().map(|v| (m, *v)));
    }
    // Stable sort: among equal values the first one wins.
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut ranks = vec![0; explained.len()];
    all.iter().take(budget).for_each(|(m, _)| ranks[*m] += 1);
    for (m, &first) in first_of.iter().enumerate() {
        if ranks[first] < ranks[m] {
            ranks.swap(first, m);
        }
    }
    ranks
}

/// LoRA-GA (Wang et al. 2024, arXiv 2407.05000, section 3.2), with PEFT's defaults: from the gradient `[O, I]`, A takes
/// the R largest right singular vectors, B the next R left ones times their singular values and O^¼ / √16.
///
/// # Errors
/// Twice the rank is larger than the matrix allows (`Argument`); as `algebra::svd`.
pub fn lora_ga(gradient: MatRef<'_, f64>, r: usize) -> Result<InitPair> {
    check_rank(2 * r, gradient.nrows(), gradient.ncols())?;
    let found = algebra::leading_svd(gradient, 2 * r, 0, 0)?;
    let outputs = gradient.nrows();
    let stable = (outputs as f64).powf(0.25) / 16f64.sqrt();
    let b = Mat::from_fn(outputs, r, |o, k| found.u[(o, r + k)] * found.s[r + k] * stable);
    Ok(InitPair {
        a: algebra::values(found.v.transpose().get(..r, ..)),
        b: algebra::values(b.as_ref()),
    })
}
