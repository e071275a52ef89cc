//! The heads of latent attention against compositions of candle, and their gradients against autograd.

use super::*;
use crate::oracle::{assert_close, assert_same_on_any_threads, random};
use crate::rope;
use candle_core::Var;

fn sizes() -> Vec<LatentHeads> {
    let all = [(3, 8, 4, 6), (2, 4, 4, 14), (1, 5, 6, 11), (4, 2, 2, 4)];
    let of = |(heads, plain, rotary, value)| LatentHeads {
        heads,
        plain,
        rotary,
        value,
        pairing: RopePairing::Halves,
    };
    let halves = all.map(of);
    let neighbors = halves.map(|of| LatentHeads {
        pairing: RopePairing::Neighbors,
        ..of
    });
    halves.into_iter().chain(neighbors).collect()
}

/// Rotates heads of R elements, without a gradient: a linear map, whose gradient the tests take from
/// `RopeDirection::Backward`.
fn rotated(h: &LatentHeads, x: &Tensor, angles: Angles) -> Tensor {
    rope::apply(x, angles, h.rotary, h.pairing, RopeDirection::Forward).unwrap()
}

fn part(x: &Tensor, heads: usize, first: usize, width: usize) -> Tensor {
    let n = x.dim(0).unwrap();
    let x = x.reshape((n, heads, ())).unwrap();
    let x = x.narrow(2, first, width).unwrap().contiguous().unwrap();
    x.reshape((n, heads * width)).unwrap()
}

fn same(got: &Tensor, want: &Tensor) {
    assert_close(got, want, 1e-6);
}

#[test]
fn queries_are_rotated_first_then_filled() {
    for h in sizes() {
        let n = 21;
        let (cos, sin) = (random((n, h.rotary / 2), 2), random((n, h.rotary / 2), 3));
        let x = random((n, h.heads * h.query()), 1);
        let got = h.queries(&x, (&cos, &sin)).unwrap();
        let rotary = part(&x, h.heads, h.plain, h.rotary);
        same(&part(&got, h.heads, 0, h.rotary), &rotated(&h, &rotary, (&cos, &sin)));
        same(&part(&got, h.heads, h.rotary, h.plain), &part(&x, h.heads, 0, h.plain));
        let filling = h.width() - h.query();
        if filling > 0 {
            let zeros = part(&got, h.heads, h.query(), filling);
            assert_eq!(zeros.abs().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap(), 0.0);
        }
        // The transpose: <A x, y> = <x, Aᵀ y>.
        let y = random((n, h.heads * h.width()), 4);
        let back = h.queries_backward(&y, (&cos, &sin)).unwrap();
        same_product(&[(&got, &y)], &[(&x, &back)]);
        assert_same_on_any_threads(|| vec![h.queries(&x, (&cos, &sin)).unwrap()]);
    }
}

/// The sum of the products of each pair is the same on both sides.
fn same_product(left: &[(&Tensor, &Tensor)], right: &[(&Tensor, &Tensor)]) {
    let dot = |pairs: &[(&Tensor, &Tensor)]| -> f64 {
        let one = |(a, b): &(&Tensor, &Tensor)| {
            let (a, b) = (crate::oracle::flat(a), crate::oracle::flat(b));
            assert_eq!(a.len(), b.len());
            a.iter().zip(&b).map(|(a, b)| f64::from(a * b)).sum::<f64>()
        };
        pairs.iter().map(one).sum()
    };
    let (left, right) = (dot(left), dot(right));
    assert!((left - right).abs() < 1e-3 * left.abs().max(1.0), "{left} and {right}");
}

#[test]
fn keys_share_their_rotated_part_and_values_are_filled() {
    for h in sizes() {
        let (n, rank) = (19, 5);
        let (cos, sin) = (random((n, h.rotary / 2), 2), random((n, h.rotary / 2), 3));
        let (kv, low) = (random((n, h.heads * h.key_value()), 1), random((n, rank + h.rotary), 5));
        let (k, v) = h.keys_values(&kv, &low, (&cos, &sin)).unwrap();
        let shared = rotated(&h, &part(&low, 1, rank, h.rotary), (&cos, &sin));
        let shared = Tensor::cat(&vec![&shared; h.heads], 1).unwrap();
        same(&part(&k, h.heads, 0, h.rotary), &shared);
        same(&part(&k, h.heads, h.rotary, h.plain), &part(&kv, h.heads, 0, h.plain));
        same(&h.cut(&v).unwrap(), &part(&kv, h.heads, h.plain, h.value));
        // The transpose.
        let (dk, dv) = (random((n, h.heads * h.width()), 6), random((n, h.heads * h.width()), 7));
        let (d_kv, d_rotary) = h.keys_values_backward(&dk, &dv, (&cos, &sin)).unwrap();
        let low_rotary = part(&low, 1, rank, h.rotary);
        same_product(&[(&k, &dk), (&v, &dv)], &[(&kv, &d_kv), (&low_rotary, &d_rotary)]);
        assert_same_on_any_threads(|| {
            let (k, v) = h.keys_values(&kv, &low, (&cos, &sin)).unwrap();
            let (d_kv, d_rotary) = h.keys_values_backward(&dk, &dv, (&cos, &sin)).unwrap();
            vec![k, v, d_kv, d_rotary]
        });
    }
}

#[test]
fn filling_is_the_transpose_of_cutting() {
    for h in sizes() {
        let x = Var::from_tensor(&random((7, h.heads * h.width()), 1)).unwrap();
        let d = random((7, h.heads * h.value), 2);
        let want = part(&x, h.heads, 0, h.value);
        same(&h.cut(&x).unwrap(), &want);
        let grads = (&want * &d).unwrap().sum_all().unwrap().backward().unwrap();
        same(&h.fill(&d).unwrap(), grads.get(&x).unwrap());
    }
}

#[test]
fn wrong_shapes_are_errors() {
    let h = sizes()[0];
    let (cos, x) = (random((4, 2), 1), random((4, h.heads * h.query()), 2));
    assert!(h.queries(&x, (&cos, &cos)).is_ok());
    assert!(h.queries(&x, (&cos, &random((4, 3), 1))).is_err());
    assert!(h.queries(&random((4, 5), 1), (&cos, &cos)).is_err());
    let kv = random((4, h.heads * h.key_value()), 2);
    assert!(h.keys_values(&kv, &random((4, 2), 1), (&cos, &cos)).is_err());
    assert!(h.keys_values(&kv, &random((3, 9), 1), (&cos, &cos)).is_err());
    assert!(h.cut(&x.narrow(1, 0, 5).unwrap().contiguous().unwrap()).is_err());
    let odd = LatentHeads { rotary: 3, ..h };
    assert!(odd.queries(&random((4, 33), 1), (&cos, &cos)).is_err());
}
