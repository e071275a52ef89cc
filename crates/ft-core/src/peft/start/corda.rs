//! CorDA (Yang et al. 2024, arXiv 2406.05223, section 3): the singular components of W·C, with C the covariance of the
//! inputs. The least important ones (kpm: preserves the knowledge in the calibration data) or the most important ones
//! (ipm: learns them faster) become the pair: A = √(S/s)·Vᵀ·C⁻¹, B = U·√(S/s).
//!
//! Adaptive ranks after CorDA++ (arXiv 2506.13187): one budget for the model, spent on the components that contribute
//! least (kpm) or most (ipm) to their own module.
//!
//! Letters: I input features, O output features, R rank, K = min(O, I).

use super::pairs::{InitPair, check_rank};
use super::{algebra, krylov, tiles};
use crate::base::{Error, Result};
use crate::peft::config::CordaMethod;
use faer::{Mat, MatRef};

/// Sums over the inputs of a linear, in f64.
#[derive(Debug, Clone)]
pub struct Covariance {
    size: usize,
    /// Σ x·xᵀ, `[I, I]`
    products: Vec<f64>,
    /// Σ x, `[I]`
    sums: Vec<f64>,
    /// Tokens, or rows of data with PEFT's arithmetic.
    count: f64,
}

impl Covariance {
    /// Sums of zero for `size` input features.
    pub fn new(size: usize) -> Self {
        Self {
            size,
            products: vec![0.0; size * size],
            sums: vec![0.0; size],
            count: 0.0,
        }
    }

    /// I: input features.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Adds `products` `[I, I]` (Σ x·xᵀ over some tokens) times `factor`² and `sums` `[I]` (Σ x) times `factor`; they
    /// count as `count` tokens.
    pub fn add(&mut self, products: &[f32], sums: &[f32], factor: f64, count: usize) {
        for (to, &from) in self.products.iter_mut().zip(products) {
            *to += f64::from(from) * factor * factor;
        }
        for (to, &from) in self.sums.iter_mut().zip(sums) {
            *to += f64::from(from) * factor;
        }
        self.count += count as f64;
    }

    /// Σ x·xᵀ / count.
    pub fn mean(&self) -> Mat<f64> {
        let n = self.count.max(1.0);
        Mat::from_fn(self.size, self.size, |i, j| self.products[i * self.size + j] / n)
    }

    /// As `mean`, around the mean.
    pub fn centered(&self) -> Mat<f64> {
        let n = self.count.max(1.0);
        let mean = |i: usize| self.sums[i] / n;
        Mat::from_fn(self.size, self.size, |i, j| {
            self.products[i * self.size + j] / n - mean(i) * mean(j)
        })
    }
}

/// Candidate components of one linear, in the order in which they are chosen.
#[derive(Debug, Clone)]
pub struct Component {
    /// Singular values of W·C in the order of choice.
    pub s: Vec<f64>,
    /// Sum of all singular values, or of these, if not all were asked for.
    pub total: f64,
    /// `[O, candidates]`
    pub u: Mat<f64>,
    /// C⁻¹·V, `[I, candidates]`
    pub v: Mat<f64>,
}

/// Initial damping, relative to the mean of C's diagonal; it doubles until C can be inverted.
const DAMPING: f64 = 0.01;
/// Largest distance of C·C⁻¹ from the identity that PEFT accepts.
const PEFT_ERROR: f64 = 0.05;

/// The first `candidates` components of W `[O, I]` for this method; `all`: with the sum of all singular values, which takes
/// the decomposition of the whole. C is damped as in the reference code: with a
/// hundredth of its mean diagonal, doubled until C can be inverted.
///
/// # Errors
/// Fewer components than requested; a covariance that is zero or not finite.
pub fn components(
    w: MatRef<'_, f64>,
    c: &Covariance,
    method: CordaMethod,
    candidates: usize,
    all: bool,
) -> Result<Component> {
    check_rank(candidates, w.nrows(), w.ncols())?;
    let plain = c.mean();
    let n = plain.nrows();
    let diagonal = (0..n).map(|i| plain[(i, i)]).sum::<f64>() / n.max(1) as f64;
    if !diagonal.is_finite() || diagonal <= 0.0 {
        return Err(
            Error::non_finite("the inputs of a linear layer are all zero, or not finite")
                .hint("use other rows for the covariance"),
        );
    }
    let mut damping = DAMPING;
    loop {
        let damped = Mat::from_fn(n, n, |i, j| {
            plain[(i, j)] + if i == j { damping * diagonal } else { 0.0 }
        });
        if !all && let Some(found) = few(w, damped.as_ref(), method, candidates)? {
            return Ok(found);
        }
        let found = algebra::svd((w * &damped).as_ref())?;
        let k = found.s.len();
        let chosen: Vec<usize> = match method {
            CordaMethod::Ipm => (0..candidates).collect(),
            CordaMethod::Kpm => (k - candidates..k).collect(),
        };
        let v = Mat::from_fn(n, candidates, |i, j| found.v[(i, chosen[j])]);
        if let Some(solved) = algebra::solve(damped.as_ref(), v.as_ref())
            && error(damped.as_ref(), solved.as_ref(), v.as_ref()) < PEFT_ERROR
        {
            return Ok(Component {
                s: chosen.iter().map(|&k| found.s[k]).collect(),
                total: found.s.iter().sum(),
                u: Mat::from_fn(w.nrows(), candidates, |o, j| found.u[(o, chosen[j])]),
                v: solved,
            });
        }
        damping *= 2.0;
        if damping > 1e6 {
            return Err(Error::new(
                "the covariance of the inputs of a linear layer cannot be inverted",
            ));
        }
    }
}

/// `components` of a large weight, without the other components: `total` is the sum of these. From W·C = U·S·Vᵀ follows
/// C⁻¹·V = Wᵀ·U·S⁻¹, so nothing is inverted. `None`: it is small, or the exact way is needed.
fn few(w: MatRef<'_, f64>, c: MatRef<'_, f64>, method: CordaMethod, candidates: usize) -> Result<Option<Component>> {
    if !krylov::pays(w.nrows(), w.ncols(), candidates) {
        return Ok(None);
    }
    let found = match method {
        CordaMethod::Ipm => krylov::largest(&krylov::WeightedMatrix { w, c }, candidates, 0, 0)?,
        CordaMethod::Kpm => krylov::smallest(tiles::product(w, c), candidates, 0, 0)?,
    };
    let Some(found) = found else { return Ok(None) };
    let scaled = Mat::from_fn(w.nrows(), candidates, |o, k| found.u[(o, k)] / found.s[k]);
    let solved = tiles::product(w.transpose(), scaled.as_ref());
    let small = error(c, solved.as_ref(), found.v.as_ref()) < PEFT_ERROR;
    Ok(small.then(|| Component {
        total: found.s.iter().sum(),
        s: found.s,
        u: found.u,
        v: solved,
    }))
}

/// ‖C·X - V‖.
fn error(c: MatRef<'_, f64>, x: MatRef<'_, f64>, v: MatRef<'_, f64>) -> f64 {
    (c * x - v).norm_l2()
}

/// The pair of the first `r` components, for this scale.
pub fn pair_of(found: &Component, method: CordaMethod, r: usize, scale: f32) -> InitPair {
    // In kpm the last columns are the smallest.
    let first = match method {
        CordaMethod::Ipm => 0,
        CordaMethod::Kpm => found.s.len() - r.min(found.s.len()),
    };
    let root = |k: usize| (found.s[first + k] / f64::from(scale)).sqrt();
    let a = Mat::from_fn(r, found.v.nrows(), |k, i| root(k) * found.v[(i, first + k)]);
    let b = Mat::from_fn(found.u.nrows(), r, |o, k| root(k) * found.u[(o, first + k)]);
    InitPair {
        a: algebra::values(a.as_ref()),
        b: algebra::values(b.as_ref()),
    }
}

/// Ranks by module, `budget` in total, at least 1 and at most all candidates each: greedily adds one component to the
/// module whose next component contributes least (kpm) or most (ipm) to the module's sum.
pub fn allocate(modules: &[(Vec<f64>, f64)], method: CordaMethod, budget: usize) -> Vec<usize> {
    let mut ranks: Vec<usize> = modules.iter().map(|(s, _)| s.len().min(1)).collect();
    let share = |m: usize, rank: usize| {
        let (s, total) = &modules[m];
        let k = match method {
            CordaMethod::Ipm => rank,
            CordaMethod::Kpm => s.len().checked_sub(rank + 1)?,
        };
        Some(s.get(k)? / total.max(f64::MIN_POSITIVE))
    };
    let mut spent: usize = ranks.iter().sum();
    while spent < budget {
        let next = (0..modules.len()).filter_map(|m| Some((m, share(m, ranks[m])?)));
        let best = match method {
            CordaMethod::Kpm => next.min_by(|a, b| a.1.total_cmp(&b.1)),
            CordaMethod::Ipm => next.max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0))),
        };
        let Some((module, _)) = best else { break };
        ranks[module] += 1;
        spent += 1;
    }
    ranks
}
