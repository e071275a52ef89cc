//! AltUp against candle's autograd.

use super::*;
use crate::oracle::{assert_close, random};
use candle_core::{D, Var};

/// The streams of h `[N, A·D]`, `[N, D]` each.
fn streams(h: &Tensor, count: usize) -> Vec<Tensor> {
    let d = h.dim(1).unwrap() / count;
    (0..count).map(|i| h.narrow(1, i * d, d).unwrap()).collect()
}

fn composed_predictions(h: &Tensor, c: &Tensor, count: usize) -> Tensor {
    let parts = streams(h, count);
    let one = |i: usize| {
        let mut y = parts[i].clone();
        for (p, part) in parts.iter().enumerate() {
            let c = c.narrow(1, i * count + p, 1).unwrap();
            y = (y + part.broadcast_mul(&c).unwrap()).unwrap();
        }
        y
    };
    Tensor::cat(&(0..count).map(one).collect::<Vec<_>>(), 1).unwrap()
}

fn var(shape: (usize, usize), seed: u64) -> Var {
    Var::from_tensor(&random(shape, seed)).unwrap()
}

#[test]
fn predictions_match_autograd() {
    for (n, count, d) in [(5, 4, 6), (1, 2, 3), (70, 3, 1)] {
        let (h, c) = (var((n, count * d), 1), var((n, count * count), 2));
        let dy = random((n, count * d), 3);
        let want = composed_predictions(&h, &c, count);
        let grads = (&want * &dy).unwrap().sum_all().unwrap().backward().unwrap();
        assert_close(&predict(&h, &c, count).unwrap(), &want, 1e-5);
        for (i, want) in streams(&want, count).iter().enumerate() {
            assert_close(&predict_one(&h, &c, count, i).unwrap(), want, 1e-5);
        }
        let dc = predict_backward(&h, &c, &dy, count).unwrap();
        assert_close(&dy, grads.get(&h).unwrap(), 1e-5);
        assert_close(&dc, grads.get(&c).unwrap(), 1e-5);
    }
}

#[test]
fn corrections_match_autograd() {
    for (n, count, d, active) in [(5, 4, 6, 0), (3, 3, 2, 2), (1, 2, 5, 1)] {
        let (h, y, f) = (var((n, count * d), 1), var((n, d), 2), var((n, count), 3));
        let dy = random((n, count * d), 4);
        let parts = streams(&h, count);
        let found = (y.as_tensor() - &parts[active]).unwrap();
        let one = |i: usize| {
            let f = f.narrow(1, i, 1).unwrap();
            (&parts[i] + found.broadcast_mul(&f).unwrap()).unwrap()
        };
        let want = Tensor::cat(&(0..count).map(one).collect::<Vec<_>>(), 1).unwrap();
        let grads = (&want * &dy).unwrap().sum_all().unwrap().backward().unwrap();
        let p = parts[active].contiguous().unwrap();
        assert_close(
            &corrected(&p, &y, &f, active).unwrap(),
            &streams(&want, count)[active],
            1e-5,
        );
        let all = h.as_tensor().copy().unwrap();
        correct_assign(&all, &y, &f, active).unwrap();
        assert_close(&all, &want, 1e-5);
        let (dout, df) = correct_backward(&dy, &p, &y, &f, active).unwrap();
        assert_close(&dy, grads.get(&h).unwrap(), 1e-5);
        assert_close(&dout, grads.get(&y).unwrap(), 1e-5);
        assert_close(&df, grads.get(&f).unwrap(), 1e-5);
    }
}

#[test]
fn a_matched_stream_matches_autograd() {
    for (n, d, scale) in [(7, 12, 1.0), (3, 5, 1e-4)] {
        // A small row is divided by the limit.
        let p = Var::from_tensor(&(random((n, d), 1) * scale).unwrap()).unwrap();
        let (like, dy) = (var((n, d), 2), random((n, d), 3));
        let root = |x: &Tensor| x.sqr().unwrap().mean_keepdim(D::Minus1).unwrap();
        let own = root(&p).maximum(f64::from(SMALLEST)).unwrap().sqrt().unwrap();
        let target = root(&like).sqrt().unwrap();
        let want = p.broadcast_mul(&target).unwrap().broadcast_div(&own).unwrap();
        let grads = (&want * &dy).unwrap().sum_all().unwrap().backward().unwrap();
        assert_close(&matched(&p, &like).unwrap(), &want, 1e-5);
        let d_like = random((n, d), 4);
        let before = d_like.copy().unwrap();
        let dp = matched_backward(&p, &like, &dy, &d_like).unwrap();
        assert_close(&dp, grads.get(&p).unwrap(), 1e-4);
        assert_close(&d_like, &(before + grads.get(&like).unwrap()).unwrap(), 1e-4);
    }
}

#[test]
fn sums_of_streams() {
    let (h, x) = (random((4, 6), 1), random((4, 2), 2));
    let parts = streams(&h, 3);
    let want = ((&parts[1] + &parts[2]).unwrap() * 0.5).unwrap();
    assert_close(&sum(&h, 3, 1..3, 0.5).unwrap(), &want, 1e-6);
    let want = Tensor::cat(
        &[parts[0].clone(), (&parts[1] + &x).unwrap(), (&parts[2] + &x).unwrap()],
        1,
    )
    .unwrap();
    add_to(&h, &x, 1..3).unwrap();
    assert_close(&h, &want, 1e-6);
    assert!(add_to(&h, &random((4, 5), 1), 0..1).is_err());
    assert!(predict(&h, &x, 3).is_err());
}
