//! A few singular triplets of a large matrix, without a decomposition of the whole: block Lanczos bidiagonalization with
//! full reorthogonalization (Golub, Luk, Overton 1981) from a random start, whose subspace grows until a bound of the
//! error is small.
//!
//! All products are cut in the same way for any number of threads, so the bits do not depend on it.
//!
//! Letters: M rows, N columns, B width of a block, P size of the subspace.

use super::algebra::{Svd, svd};
use super::tiles;
use crate::base::Result;
use crate::base::rng::{Rng, Stream};
use faer::{Mat, MatRef};

/// Columns of a block beyond those that are wanted.
const MORE: usize = 8;
/// Largest accepted ‖Mᵀ·u - s·v‖, relative to the largest singular value.
const ERROR: f64 = 1e-6;
/// Largest subspace.
const MOST: usize = 1536;

/// A matrix `[M, N]` that is only multiplied.
pub(crate) trait Operator: Sync {
    /// (M, N)
    fn dims(&self) -> (usize, usize);
    /// M·X for X `[N, B]`.
    fn times(&self, x: MatRef<'_, f64>) -> Mat<f64>;
    /// Mᵀ·Y for Y `[M, B]`.
    fn transposed_times(&self, y: MatRef<'_, f64>) -> Mat<f64>;
}

impl Operator for MatRef<'_, f64> {
    fn dims(&self) -> (usize, usize) {
        (self.nrows(), self.ncols())
    }

    fn times(&self, x: MatRef<'_, f64>) -> Mat<f64> {
        tiles::product(*self, x)
    }

    fn transposed_times(&self, y: MatRef<'_, f64>) -> Mat<f64> {
        tiles::product(self.transpose(), y)
    }
}

/// W·C, which is never formed.
pub(crate) struct WeightedMatrix<'a> {
    /// `[O, I]`
    pub w: MatRef<'a, f64>,
    /// `[I, I]`, symmetric.
    pub c: MatRef<'a, f64>,
}

impl Operator for WeightedMatrix<'_> {
    fn dims(&self) -> (usize, usize) {
        (self.w.nrows(), self.c.ncols())
    }

    fn times(&self, x: MatRef<'_, f64>) -> Mat<f64> {
        tiles::product(self.w, tiles::product(self.c, x).as_ref())
    }

    fn transposed_times(&self, y: MatRef<'_, f64>) -> Mat<f64> {
        tiles::product(self.c, tiles::product(self.w.transpose(), y).as_ref())
    }
}

/// The inverse of an upper triangular matrix.
struct Inverse<'a>(MatRef<'a, f64>);

impl Operator for Inverse<'_> {
    fn dims(&self) -> (usize, usize) {
        (self.0.nrows(), self.0.ncols())
    }

    fn times(&self, x: MatRef<'_, f64>) -> Mat<f64> {
        tiles::solve_upper(self.0, x)
    }

    fn transposed_times(&self, y: MatRef<'_, f64>) -> Mat<f64> {
        tiles::solve_lower(self.0.transpose(), y)
    }
}

/// True if a few triplets of a matrix of this size are found faster than all.
pub(crate) fn pays(m: usize, n: usize, count: usize) -> bool {
    m.min(n) >= 512 && 8 * (count + MORE) <= m.min(n)
}

/// Most bytes that `largest` takes beside the operator.
pub(crate) fn bytes(m: usize, n: usize, count: usize) -> u64 {
    let size = most(m, n, count) + count + MORE;
    (8 * (size * (m + n) + 4 * size * size + 6 * (m + n) * (count + MORE))) as u64
}

fn most(m: usize, n: usize, count: usize) -> usize {
    MOST.min(m.min(n) / 2).max(count + MORE)
}

/// The `count` largest singular triplets, descending; `None` if the subspace is as large as allowed and the error is not
/// small.
///
/// # Errors
/// Values that are not finite.
pub(crate) fn largest(m: &dyn Operator, count: usize, seed: u64, site: u64) -> Result<Option<Svd>> {
    let (rows, columns) = m.dims();
    let (width, most) = (count + MORE, most(rows, columns, count));
    let rng = Rng::new(seed, Stream::Init, &[u64::MAX, site, 11]);
    let start = Mat::from_fn(columns, width, |i, j| f64::from(rng.normal((i * width + j) as u64)));
    // M·Q = P·B with B upper block bidiagonal: `diagonal[j]`, and `above[j]` right of it.
    let (mut q, mut p) = (Basis::new(columns, width, most), Basis::new(rows, width, most));
    let (mut diagonal, mut above) = (Vec::<Mat<f64>>::new(), Vec::<Mat<f64>>::new());
    q.push(start);
    let mut look = 2;
    loop {
        let last = diagonal.len();
        let mut image = m.times(q.block(last));
        if last > 0 {
            image -= p.block(last - 1) * &above[last - 1];
        }
        diagonal.push(p.push(image));
        let mut back = m.transposed_times(p.block(last));
        back -= q.block(last) * diagonal[last].transpose();
        let full = (last + 2) * width > most;
        // The last block of Q is not part of the subspace yet.
        let upper = q.push(back);
        if last + 1 == look || full {
            look = look * 3 / 2 + 1;
            let small = svd(bidiagonal(&diagonal, &above, width).as_ref())?;
            // The part that Mᵀ maps out of the subspace: of P, the last block alone reaches the next block of Q.
            let left = &upper * small.u.get(last * width.., ..count);
            let error = (0..count).map(|k| left.col(k).norm_l2()).fold(0.0, f64::max);
            if error <= ERROR * small.s[0] {
                let size = (last + 1) * width;
                return Ok(Some(Svd {
                    u: tiles::product(p.all.as_ref(), small.u.get(.., ..count)),
                    s: small.s[..count].to_vec(),
                    v: tiles::product(q.all.get(.., ..size), small.v.get(.., ..count)),
                }));
            }
            if full {
                return Ok(None);
            }
        }
        above.push(upper.transpose().to_owned());
    }
}

/// The `count` smallest singular triplets of the matrix that is given, descending: inverse iterations on R of Q·R. `None`
/// if the matrix has no full rank, or as `largest`.
///
/// # Errors
/// As `largest`.
pub(crate) fn smallest(m: Mat<f64>, count: usize, seed: u64, site: u64) -> Result<Option<Svd>> {
    if m.nrows() < m.ncols() {
        let found = smallest(m.transpose().to_owned(), count, seed, site)?;
        return Ok(found.map(|f| Svd { u: f.v, s: f.s, v: f.u }));
    }
    let n = m.ncols();
    let factors = tiles::Qr::new(m);
    let r = factors.upper();
    let diagonal = || (0..n).map(|i| r[(i, i)].abs());
    let largest_of_r = diagonal().fold(0.0, f64::max);
    if !diagonal().all(|x| x.is_finite() && x > 1e-14 * largest_of_r) {
        return Ok(None);
    }
    let Some(found) = largest(&Inverse(r), count, seed, site)? else {
        return Ok(None);
    };
    let order = |k: usize| count - 1 - k;
    let left = Mat::from_fn(n, count, |i, k| found.v[(i, order(k))]);
    Ok(Some(Svd {
        u: factors.times(left.as_ref()),
        s: (0..count).map(|k| 1.0 / found.s[order(k)]).collect(),
        v: Mat::from_fn(n, count, |i, k| found.u[(i, order(k))]),
    }))
}

/// An orthonormal basis, block by block.
struct Basis {
    /// `[rows, P]`
    all: Mat<f64>,
    width: usize,
}

impl Basis {
    fn new(rows: usize, width: usize, most: usize) -> Self {
        let all = Mat::with_capacity(rows, most + width);
        Self { all, width }
    }

    fn block(&self, n: usize) -> MatRef<'_, f64> {
        self.all.get(.., n * self.width..(n + 1) * self.width)
    }

    /// Orthogonalizes `m` against the basis and appends the result Q; returns R with Q·R = the part of `m` outside the
    /// basis.
    fn push(&mut self, mut m: Mat<f64>) -> Mat<f64> {
        let mut upper = Mat::identity(self.width, self.width);
        // Twice is enough (Parlett), and a third time if columns are dependent.
        for _ in 0..3 {
            if self.all.ncols() > 0 {
                let part = tiles::product(self.all.transpose(), m.as_ref());
                m -= tiles::product(self.all.as_ref(), part.as_ref());
            }
            let factors = m.qr();
            upper = factors.thin_R() * &upper;
            m = factors.compute_thin_Q();
        }
        let before = self.all.ncols();
        self.all
            .resize_with(m.nrows(), before + self.width, |i, j| m[(i, j - before)]);
        upper
    }
}

/// B `[P, P]` of its blocks.
fn bidiagonal(diagonal: &[Mat<f64>], above: &[Mat<f64>], width: usize) -> Mat<f64> {
    let size = diagonal.len() * width;
    let mut b = Mat::zeros(size, size);
    for (j, block) in diagonal.iter().enumerate() {
        b.get_mut(j * width..(j + 1) * width, j * width..(j + 1) * width)
            .copy_from(block);
    }
    for (j, block) in above.iter().enumerate().take(diagonal.len() - 1) {
        b.get_mut(j * width..(j + 1) * width, (j + 1) * width..(j + 2) * width)
            .copy_from(block);
    }
    b
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Singular values that fall by four decades, with random vectors.
    fn example(m: usize, n: usize) -> (Mat<f64>, Vec<f64>) {
        let rng = Rng::new(1, Stream::Init, &[m as u64, n as u64]);
        let random = |rows: usize, columns: usize, from: u64| {
            let at = |i: usize, j: usize| f64::from(rng.normal(from + (i * columns + j) as u64));
            Mat::from_fn(rows, columns, at).qr().compute_thin_Q()
        };
        let k = m.min(n);
        let s: Vec<f64> = (0..k).map(|i| 10f64.powf(-4.0 * i as f64 / k as f64)).collect();
        let (u, v) = (random(m, k, 0), random(n, k, 1 << 40));
        let scaled = Mat::from_fn(m, k, |i, j| u[(i, j)] * s[j]);
        (scaled * v.transpose(), s)
    }

    fn check(m: &Mat<f64>, found: &Svd, want: &[f64]) {
        for (k, (s, want)) in found.s.iter().zip(want).enumerate() {
            assert!((s / want - 1.0).abs() < 1e-8, "{k}: {s} {want}");
            let off = (m * found.v.col(k) - found.u.col(k) * faer::Scale(*s)).norm_l2();
            let back = (m.transpose() * found.u.col(k) - found.v.col(k) * faer::Scale(*s)).norm_l2();
            assert!(off < 2e-6 && back < 2e-6, "{k}: {off} {back}");
        }
        let gram = found.u.transpose() * &found.u;
        assert!((gram - Mat::<f64>::identity(want.len(), want.len())).norm_max() < 1e-10);
    }

    #[test]
    fn both_ends_are_those_of_the_exact_decomposition() {
        for (rows, columns) in [(300, 300), (420, 240), (240, 420)] {
            let (m, s) = example(rows, columns);
            let found = largest(&m.as_ref(), 5, 1, 2).unwrap().unwrap();
            check(&m, &found, &s[..5]);
            let found = smallest(m.clone(), 5, 1, 2).unwrap().unwrap();
            check(&m, &found, &s[s.len() - 5..]);
        }
    }

    #[test]
    fn a_product_with_a_covariance_is_not_formed() {
        let ((w, _), (c, _)) = (example(240, 300), example(300, 300));
        let c = &c * c.transpose();
        let plain = &w * &c;
        let operator = WeightedMatrix {
            w: w.as_ref(),
            c: c.as_ref(),
        };
        let found = largest(&operator, 4, 1, 2).unwrap().unwrap();
        check(&plain, &found, &svd(plain.as_ref()).unwrap().s[..4]);
    }

    #[test]
    fn a_matrix_without_full_rank_has_no_smallest_triplets_here() {
        let (mut m, _) = example(300, 300);
        m.col_mut(7).fill(0.0);
        assert!(smallest(m.clone(), 3, 1, 2).unwrap().is_none());
        // The largest are not concerned; a matrix of rank 2 neither.
        assert!(largest(&m.as_ref(), 3, 1, 2).unwrap().is_some());
        let (a, _) = example(300, 2);
        let low = &a * a.transpose();
        let found = largest(&low.as_ref(), 3, 1, 2).unwrap().unwrap();
        assert!((found.s[0] - 1.0).abs() < 1e-9 && found.s[2] < 1e-12, "{:?}", found.s);
    }

    #[test]
    fn the_bits_do_not_depend_on_the_number_of_threads() {
        let (m, _) = example(600, 520);
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let large = largest(&m.as_ref(), 3, 1, 2).unwrap().unwrap();
                let small = smallest(m.clone(), 3, 1, 2).unwrap().unwrap();
                (large.u, large.s, small.v, small.s)
            })
        };
        let one = run(1);
        assert!(run(2) == one && run(3) == one);
    }
}
