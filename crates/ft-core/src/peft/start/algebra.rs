//! Dense decompositions in f64, one thread each: bit-equal on all machines with the same instructions.
//!
//! Letters: M rows, N columns, R rank.

use super::krylov;
use crate::base::rng::{Rng, Stream};
use crate::base::{Error, Result};
use crate::ops::update;
use crate::peft::Lora;
use faer::linalg::solvers::Solve;
use faer::linalg::{evd, svd};
use faer::{Mat, MatRef, Par, Side};

/// Converts row-major f32 `[M, N]` to f64.
pub fn matrix(values: &[f32], rows: usize, columns: usize) -> Mat<f64> {
    Mat::from_fn(rows, columns, |i, j| f64::from(values[i * columns + j]))
}

/// Converts a matrix `[rows, columns]` to row-major f32.
pub fn values(m: MatRef<'_, f64>) -> Vec<f32> {
    let mut out = Vec::with_capacity(m.nrows() * m.ncols());
    for i in 0..m.nrows() {
        out.extend((0..m.ncols()).map(|j| m[(i, j)] as f32));
    }
    out
}

/// Bytes that `svd` of a matrix `[M, N]` takes beside it: its factors, and the work of finding them.
pub fn svd_bytes(m: usize, n: usize) -> u64 {
    use svd::ComputeSvdVectors::Thin;
    let work = svd::svd_scratch::<f64>(m, n, Thin, Thin, Par::Seq, Default::default());
    (work.size_bytes() + 8 * (m + n) * m.min(n)) as u64
}

/// Bytes that `eigen` of a matrix `[N, N]` takes beside it.
pub fn eigen_bytes(n: usize) -> u64 {
    let work = evd::self_adjoint_evd_scratch::<f64>(n, evd::ComputeEigenvectors::Yes, Par::Seq, Default::default());
    (work.size_bytes() + 8 * n * n) as u64
}

/// U `[M, K]`, the singular values in descending order, V `[N, K]`, with K = min(M, N).
pub struct Svd {
    /// Left singular vectors, as columns.
    pub u: Mat<f64>,
    /// Singular values, descending.
    pub s: Vec<f64>,
    /// Right singular vectors, as columns.
    pub v: Mat<f64>,
}

/// The thin singular value decomposition, exact.
///
/// # Errors
/// Values that are not finite, or no convergence.
pub fn svd(m: MatRef<'_, f64>) -> Result<Svd> {
    let fault = |what: String| Error::new("a weight cannot be decomposed into singular values").cause(what);
    let found = m.thin_svd().map_err(|e| fault(format!("{e:?}")))?;
    let s: Vec<f64> = found.S().column_vector().iter().copied().collect();
    if s.iter().any(|x| !x.is_finite()) {
        return Err(fault("a singular value is not finite".into()));
    }
    Ok(Svd {
        u: found.U().to_owned(),
        s,
        v: found.V().to_owned(),
    })
}

/// At least the `r` largest singular triplets: of a large matrix only these, with an error of 1e-6 of the largest singular
/// value (`krylov`).
///
/// # Errors
/// As `svd`.
pub fn leading_svd(m: MatRef<'_, f64>, r: usize, seed: u64, site: u64) -> Result<Svd> {
    if krylov::pays(m.nrows(), m.ncols(), r)
        && let Some(found) = krylov::largest(&m, r, seed, site)?
    {
        return Ok(found);
    }
    svd(m)
}

/// The largest R singular values by power iterations on a random basis (Halko, Martinsson, Tropp 2011, "Finding
/// structure with randomness", algorithm 4.4), with `OVERSAMPLING` extra columns.
///
/// # Errors
/// As `svd`.
pub fn fast_svd(m: MatRef<'_, f64>, r: usize, iterations: usize, seed: u64, site: u64) -> Result<Svd> {
    const OVERSAMPLING: usize = 8;
    let width = (r + OVERSAMPLING).min(m.nrows()).min(m.ncols());
    let rng = Rng::new(seed, Stream::Init, &[u64::MAX, site, 9]);
    let random = Mat::from_fn(m.ncols(), width, |i, j| f64::from(rng.normal((i * width + j) as u64)));
    let mut q = basis((m * &random).as_ref());
    for _ in 0..iterations {
        let back = basis((m.transpose() * &q).as_ref());
        q = basis((m * &back).as_ref());
    }
    let small = svd((q.transpose() * m).as_ref())?;
    Ok(Svd {
        u: &q * &small.u,
        ..small
    })
}

/// An orthonormal basis of the columns of `m`.
fn basis(m: MatRef<'_, f64>) -> Mat<f64> {
    m.qr().compute_thin_Q()
}

/// Q `[M, K]` and R `[K, N]`, K = min(M, N).
pub fn qr(m: MatRef<'_, f64>) -> (Mat<f64>, Mat<f64>) {
    let found = m.qr();
    (found.compute_thin_Q(), found.thin_R().to_owned())
}

/// The eigenvectors of a symmetric matrix as columns, and the eigenvalues, both in descending order.
///
/// # Errors
/// No convergence.
pub fn eigen(m: MatRef<'_, f64>) -> Result<(Mat<f64>, Vec<f64>)> {
    let fault = |what: String| Error::new("a covariance cannot be decomposed").cause(what);
    let found = m.self_adjoint_eigen(Side::Lower).map_err(|e| fault(format!("{e:?}")))?;
    let n = m.nrows();
    let values: Vec<f64> = found.S().column_vector().iter().rev().copied().collect();
    let vectors = Mat::from_fn(n, n, |i, j| found.U()[(i, n - 1 - j)]);
    Ok((vectors, values))
}

/// C⁻¹·B for a symmetric positive definite C by Cholesky; `None` if C is not positive definite.
pub fn solve(c: MatRef<'_, f64>, b: MatRef<'_, f64>) -> Option<Mat<f64>> {
    let found = c.llt(Side::Lower).ok()?.solve(b);
    let finite = (0..found.ncols()).all(|j| (0..found.nrows()).all(|i| found[(i, j)].is_finite()));
    finite.then_some(found)
}

/// A LoRA pair of a lower rank.
#[derive(Debug)]
pub struct CompressedPair {
    /// A `[R, I]`.
    pub a: Vec<f32>,
    /// B `[O, R]`.
    pub b: Vec<f32>,
    /// The relative error: a ratio of Frobenius norms.
    pub error: f64,
}

/// The pair of rank `r` nearest to s·(B·A - B₀·A₀), for the scale `scale`.
///
/// # Errors
/// As `svd`.
pub fn compressed(lora: &Lora, r: usize, scale: f32) -> Result<CompressedPair> {
    let (a, b) = lora.plain()?;
    let ((wide, inputs), (outputs, _)) = (a.dims2()?, b.dims2()?);
    let a = matrix(&update::to_f32_vec(&a)?, wide, inputs);
    let b = matrix(&update::to_f32_vec(&b)?, outputs, wide);
    let (qb, rb) = qr(b.as_ref());
    let (qa, ra) = qr(a.transpose());
    let middle = svd((&rb * ra.transpose()).as_ref())?;
    let (u, v) = (&qb * &middle.u, &qa * &middle.v);
    let root = |k: usize| {
        let s = middle.s.get(k).copied().unwrap_or(0.0);
        (s * f64::from(lora.scale) / f64::from(scale)).max(0.0).sqrt()
    };
    let at = |m: &Mat<f64>, i: usize, k: usize| if k < m.ncols() { m[(i, k)] } else { 0.0 };
    let new_a = Mat::from_fn(r, inputs, |k, i| root(k) * at(&v, i, k));
    let new_b = Mat::from_fn(outputs, r, |o, k| root(k) * at(&u, o, k));
    let squares = |from: usize| middle.s.iter().skip(from).map(|s| s * s).sum::<f64>();
    let error = match squares(0) {
        0.0 => 0.0,
        all => (squares(r) / all).sqrt(),
    };
    Ok(CompressedPair {
        a: values(new_a.as_ref()),
        b: values(new_b.as_ref()),
        error,
    })
}
