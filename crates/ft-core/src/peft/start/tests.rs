//! Compares adapter inits with their definitions.

use super::algebra::{CompressedPair, compressed, eigen, fast_svd, matrix, qr, solve, svd, values};
use super::*;
use crate::ops::oracle::{flat, random};
use crate::peft::config::CordaMethod;
use crate::peft::{DropoutMask, Lora};
use faer::Mat;

fn weight(rows: usize, columns: usize, seed: u64) -> Mat<f64> {
    matrix(&flat(&random((rows, columns), seed)), rows, columns)
}

fn product(pair: &InitPair, r: usize, outputs: usize, inputs: usize) -> Mat<f64> {
    matrix(&pair.b, outputs, r) * matrix(&pair.a, r, inputs)
}

fn close(a: &Mat<f64>, b: &Mat<f64>, tolerance: f64) {
    let distance = (a - b).norm_l2();
    assert!(distance <= tolerance * b.norm_l2().max(1e-9), "{distance}");
}

fn covariance(inputs: usize, tokens: usize, seed: u64) -> (Covariance, Mat<f64>) {
    let mut x = weight(tokens, inputs, seed);
    // Directions with different variances.
    for j in 0..inputs {
        for i in 0..tokens {
            x[(i, j)] *= 1.0 / (1.0 + j as f64);
        }
    }
    let products = values((x.transpose() * &x).as_ref());
    let sums: Vec<f32> = (0..inputs)
        .map(|j| (0..tokens).map(|i| x[(i, j)]).sum::<f64>() as f32)
        .collect();
    let mut c = Covariance::new(inputs);
    c.add(&products, &sums, 1.0, tokens);
    (c, x)
}

#[test]
fn decompositions_multiply_back() {
    for (rows, columns) in [(7, 4), (4, 7), (6, 6)] {
        let m = weight(rows, columns, 1);
        let found = svd(m.as_ref()).unwrap();
        let k = rows.min(columns);
        let s = Mat::from_fn(k, k, |i, j| if i == j { found.s[i] } else { 0.0 });
        close(&(&found.u * s * found.v.transpose()), &m, 1e-12);
        assert!(found.s.windows(2).all(|w| w[0] >= w[1]));
        let (q, r) = qr(m.as_ref());
        close(&(&q * &r), &m, 1e-12);
        let fast = fast_svd(m.as_ref(), 2, 4, 7, 1).unwrap();
        for k in 0..2 {
            assert!((fast.s[k] - found.s[k]).abs() < 1e-9 * found.s[0], "{k}");
        }
    }
    let (c, _) = covariance(5, 40, 2);
    let mean = c.mean();
    let (vectors, sizes) = eigen(mean.as_ref()).unwrap();
    let diagonal = Mat::from_fn(5, 5, |i, j| if i == j { sizes[i] } else { 0.0 });
    close(&(&vectors * diagonal * vectors.transpose()), &mean, 1e-12);
    assert!(sizes.windows(2).all(|w| w[0] >= w[1]));
    let b = weight(5, 3, 3);
    close(&(&mean * solve(mean.as_ref(), b.as_ref()).unwrap()), &b, 1e-9);
    let indefinite = Mat::from_fn(2, 2, |i, j| if i == j { 0.0 } else { 1.0 });
    assert!(solve(indefinite.as_ref(), b.get(..2, ..)).is_none());
    let broken = Mat::from_fn(2, 2, |_, _| f64::NAN);
    assert!(svd(broken.as_ref()).is_err());
}

#[test]
fn pissa_takes_the_largest_components() {
    let w = weight(6, 9, 1);
    let found = svd(w.as_ref()).unwrap();
    for (iterations, tolerance) in [(0, 1e-6), (8, 1e-4)] {
        let pair = pissa(w.as_ref(), 2, 0.5, iterations, 7, 1).unwrap();
        let best = Mat::from_fn(6, 9, |i, j| {
            (0..2)
                .map(|k| found.u[(i, k)] * found.s[k] * found.v[(j, k)])
                .sum::<f64>()
        });
        let mut got = product(&pair, 2, 6, 9);
        got *= faer::Scale(0.5);
        close(&got, &best, tolerance);
    }
    let e = pissa(w.as_ref(), 7, 0.5, 0, 7, 1).unwrap_err().to_string();
    assert!(e.contains("rank 7") && e.contains("at most 6"), "{e}");
}

#[test]
fn olora_starts_from_an_orthonormal_basis() {
    let w = weight(6, 9, 1);
    let pair = olora(w.as_ref(), 3).unwrap();
    let b = matrix(&pair.b, 6, 3);
    close(&(b.transpose() * &b), &Mat::identity(3, 3), 1e-6);
    // The first columns of W equal those of Q·R.
    let whole = product(&pair, 3, 6, 9);
    close(&whole.get(.., ..3).to_owned(), &w.get(.., ..3).to_owned(), 1e-6);
}

#[test]
fn eva_takes_the_directions_in_which_inputs_vary_most() {
    let (c, x) = covariance(5, 60, 2);
    let (rows, explained) = eva(&c, 2).unwrap();
    let (_, all) = eva(&c, 5).unwrap();
    assert!((all.iter().sum::<f64>() - 1.0).abs() < 1e-9 && all[..2] == explained[..]);
    assert!(eva(&c, 6).is_err());
    let mean = |j: usize| (0..60).map(|i| x[(i, j)]).sum::<f64>() / 60.0;
    let centered = Mat::from_fn(60, 5, |i, j| x[(i, j)] - mean(j));
    let found = svd(centered.as_ref()).unwrap();
    for k in 0..2 {
        let dot: f64 = (0..5).map(|i| f64::from(rows[k * 5 + i]) * found.v[(i, k)]).sum();
        assert!((dot.abs() - 1.0).abs() < 1e-4, "{dot}");
    }
}

#[test]
fn lora_ga_follows_the_gradient() {
    let g = weight(6, 9, 4);
    let found = svd(g.as_ref()).unwrap();
    let pair = lora_ga(g.as_ref(), 2).unwrap();
    let stable = 6f64.powf(0.25) / 4.0;
    let best = Mat::from_fn(6, 9, |i, j| {
        (0..2)
            .map(|k| found.u[(i, 2 + k)] * found.s[2 + k] * stable * found.v[(j, k)])
            .sum::<f64>()
    });
    // Signs of the singular vectors are arbitrary, but consistent within one decomposition.
    close(&product(&pair, 2, 6, 9), &best, 1e-6);
    assert!(lora_ga(g.as_ref(), 4).is_err());
}

#[test]
fn corda_parts_the_weight_by_its_inputs() {
    let (w, (c, x)) = (weight(6, 9, 5), covariance(9, 200, 6));
    let scale = 0.5f32;
    let all = |method| {
        let found = components(w.as_ref(), &c, method, 6, true).unwrap();
        let pair = pair_of(&found, method, 6, scale);
        let mut whole = product(&pair, 6, 6, 9);
        whole *= faer::Scale(f64::from(scale));
        close(&whole, &w, 1e-5);
        found
    };
    let (kpm, ipm) = (all(CordaMethod::Kpm), all(CordaMethod::Ipm));
    assert!((kpm.total - ipm.total).abs() < 1e-9);
    // On these inputs the components of kpm have the least effect, those of ipm the most; plain SVD is in between.
    let moved = |method, r| {
        let found = components(w.as_ref(), &c, method, r, true).unwrap();
        let mut delta = product(&pair_of(&found, method, r, scale), r, 6, 9);
        delta *= faer::Scale(f64::from(scale));
        (&x * delta.transpose()).norm_l2()
    };
    let plain = {
        let found = svd(w.as_ref()).unwrap();
        let smallest = Mat::from_fn(6, 9, |i, j| {
            (4..6)
                .map(|k| found.u[(i, k)] * found.s[k] * found.v[(j, k)])
                .sum::<f64>()
        });
        (&x * smallest.transpose()).norm_l2()
    };
    assert!(
        moved(CordaMethod::Kpm, 2) < 0.9 * plain,
        "{} {plain}",
        moved(CordaMethod::Kpm, 2)
    );
    assert!(moved(CordaMethod::Ipm, 2) > 5.0 * moved(CordaMethod::Kpm, 2));
    let nothing = Covariance::new(9);
    assert!(components(w.as_ref(), &nothing, CordaMethod::Kpm, 2, true).is_err());
    assert!(components(w.as_ref(), &c, CordaMethod::Kpm, 7, true).is_err());
    // Fewer tokens than directions: damping makes the covariance invertible.
    assert!(components(w.as_ref(), &covariance(9, 3, 8).0, CordaMethod::Kpm, 2, true).is_ok());
}

#[test]
fn ranks_are_spent_where_they_count() {
    let modules = vec![(vec![8.0, 4.0, 2.0, 1.0], 15.0), (vec![5.0, 5.0, 5.0, 0.1], 15.1)];
    assert_eq!(allocate(&modules, CordaMethod::Ipm, 4), [1, 3]);
    assert_eq!(allocate(&modules, CordaMethod::Ipm, 5), [2, 3]);
    assert_eq!(allocate(&modules, CordaMethod::Kpm, 4), [3, 1]);
    assert_eq!(allocate(&modules, CordaMethod::Kpm, 100), [4, 4]);
    assert_eq!(allocate(&modules, CordaMethod::Kpm, 0), [1, 1]);
}

#[test]
fn compressing_keeps_what_fits_and_tells_what_is_lost() {
    let mut lora = Lora::new(
        "m",
        (random((2, 12), 1), random((6, 2), 2)),
        0.7,
        DropoutMask::default(),
    );
    lora.start = Some((random((2, 12), 3), random((6, 2), 4)));
    let delta = matrix(&flat(&lora.delta().unwrap()), 6, 12);
    for (r, least, most) in [(4, 0.0, 1e-5), (5, 0.0, 1e-5), (2, 1e-3, 0.9)] {
        let CompressedPair { a, b, error: lost } = compressed(&lora, r, 0.3).unwrap();
        let mut got = matrix(&b, 6, r) * matrix(&a, r, 12);
        got *= faer::Scale(f64::from(0.3f32));
        let error = (&got - &delta).norm_l2() / delta.norm_l2();
        assert!(
            (error - lost).abs() < 1e-5 && lost >= least && lost <= most,
            "{r} {error} {lost}"
        );
    }
}

#[test]
fn eva_spends_ranks_where_directions_explain_most() {
    let explained = vec![vec![0.5, 0.1], vec![0.5, 0.1], vec![0.9, 0.4], vec![0.05, 0.01]];
    // The first two have the same input: among equal values the first one wins.
    assert_eq!(eva_ranks(&explained, &[0, 0, 2, 3], 4), [1, 1, 2, 0]);
    assert_eq!(eva_ranks(&explained, &[0, 0, 2, 3], 5), [2, 1, 2, 0]);
    assert_eq!(eva_ranks(&explained, &[0, 0, 2, 3], 100), [2, 2, 2, 2]);
    let late = vec![vec![0.1], vec![0.2]];
    assert_eq!(
        eva_ranks(&late, &[0, 0], 1),
        [1, 0],
        "who is first gets the highest rank"
    );
}

#[test]
fn a_large_weight_has_the_components_of_the_exact_way() {
    let (rows, columns, r) = (520, 600, 4);
    let (w, c) = (weight(rows, columns, 9), covariance(columns, 700, 10).0);
    for method in [CordaMethod::Ipm, CordaMethod::Kpm] {
        let of = |all| components(w.as_ref(), &c, method, r, all).unwrap();
        let (few, exact) = (of(false), of(true));
        assert!(few.total < exact.total, "the others are not computed");
        let pair = |found| product(&pair_of(found, method, r, 1.0), r, rows, columns);
        close(&pair(&few), &pair(&exact), 1e-4);
    }
    let (few, exact) = (pissa(w.as_ref(), r, 1.0, 0, 1, 2).unwrap(), svd(w.as_ref()).unwrap());
    let best = Mat::from_fn(rows, columns, |i, j| {
        (0..r)
            .map(|k| exact.u[(i, k)] * exact.s[k] * exact.v[(j, k)])
            .sum::<f64>()
    });
    close(&product(&few, r, rows, columns), &best, 1e-4);
    let (rows, explained) = eva(&c, r).unwrap();
    let (vectors, values) = eigen(c.centered().as_ref()).unwrap();
    for k in 0..r {
        let dot: f64 = (0..columns)
            .map(|i| f64::from(rows[k * columns + i]) * vectors[(i, k)])
            .sum();
        assert!((dot.abs() - 1.0).abs() < 1e-5, "{dot}");
        assert!((explained[k] * values.iter().sum::<f64>() / values[k] - 1.0).abs() < 1e-6);
    }
}

/// Prints a table; `FT_TEST_ROWS` and `FT_TEST_COLUMNS` are the shape of the weight.
#[test]
#[ignore = "minutes and gigabytes"]
fn seconds_of_the_inits_of_a_wide_weight() {
    let number = |name: &str, default: usize| std::env::var(name).map_or(default, |n| n.parse().unwrap());
    let (rows, columns, r) = (number("FT_TEST_ROWS", 4096), number("FT_TEST_COLUMNS", 4096), 16);
    let w = weight(rows, columns, 1);
    // Inputs of 512 tokens whose directions have different variances, over a floor.
    let x = weight(512, columns, 2);
    let x = Mat::from_fn(512, columns, |i, j| (x[(i, j)] / (1.0 + j as f64 / 64.0)) as f32);
    let mut products = vec![0f32; columns * columns];
    let gram = x.transpose() * &x;
    for i in 0..columns {
        for j in 0..columns {
            products[i * columns + j] = gram[(i, j)] + if i == j { 0.01 } else { 0.0 };
        }
    }
    let mut c = Covariance::new(columns);
    c.add(&products, &vec![0.0; columns], 1.0, 512);
    let time = |name: &str, f: &dyn Fn()| {
        let start = std::time::Instant::now();
        f();
        println!(
            "{rows} x {columns}, rank {r}, {name}: {:.1} s",
            start.elapsed().as_secs_f64()
        );
    };
    for method in [CordaMethod::Ipm, CordaMethod::Kpm] {
        time(&format!("corda {method:?}"), &|| {
            components(w.as_ref(), &c, method, r, false).unwrap();
        });
    }
    time("eva", &|| {
        eva(&c, 2 * r).unwrap();
    });
    time("pissa", &|| {
        pissa(w.as_ref(), r, 1.0, 0, 1, 2).unwrap();
    });
    time("lora_ga", &|| {
        lora_ga(w.as_ref(), r).unwrap();
    });
    time("olora", &|| {
        olora(w.as_ref(), r).unwrap();
    });
}
