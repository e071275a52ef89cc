//! Products inside a task, compared with plain loops, on every backend.

use super::task_gemm::{OperandSide, OutputTile, TaskGemm, cache_friendly_stride};
use super::{CpuBackend, Matrix, Rounding, testable};
use crate::cpu::{LINE, SharedSlice, with_scratch};
use crate::oracle::{flat, random};
use half::bf16;

/// Rows have `width` elements; the products read some of them, from `AT` on.
const AT: usize = 3;

struct Case {
    sizes: (usize, usize, usize),
    /// The first column of B and the first index of k of the part that is multiplied.
    first: (usize, usize),
    /// The layout of A and of B: true if the elements of k are contiguous.
    k_contiguous: (bool, bool),
    side: OperandSide,
    add: bool,
}

fn check(backend: CpuBackend, rounding: Rounding, case: &Case) {
    let (m, n, k) = case.sizes;
    let (n0, k0) = case.first;
    let (whole_n, whole_k) = (n0 + n + 5, k0 + k);
    let gemm = TaskGemm::new(backend, rounding);
    let outer = |k_contiguous: bool, vectors: usize, steps: usize| {
        if k_contiguous {
            (vectors, steps)
        } else {
            (steps, vectors)
        }
    };
    let (a_rows, a_width) = outer(case.k_contiguous.0, m, k);
    let a_stride = if case.side == OperandSide::ScratchA {
        cache_friendly_stride(a_width)
    } else {
        a_width + 7
    };
    let (b_rows, b_width) = outer(case.k_contiguous.1, whole_n, whole_k);
    let b_stride = b_width + 9;
    let a = flat(&random(a_rows * a_stride + AT, 1));
    let b = flat(&random(b_rows * b_stride + AT, 2));
    let matrix = |values, stride, k_contiguous| {
        if k_contiguous {
            Matrix::k_inner(values, stride)
        } else {
            Matrix::k_outer(values, stride)
        }
    };
    let (a_at, b_at) = (&a[AT..], &b[AT..]);
    let c_stride = n + 4;
    let mut c = vec![0.5f32; (m - 1) * c_stride + n + AT];
    let lens = [
        gemm.packed_len(case.side, m, k),
        gemm.packed_len(OperandSide::B, whole_n, whole_k),
    ];
    with_scratch(lens.iter().sum(), |scratch| {
        assert!(lens.iter().all(|len| len.is_multiple_of(LINE)));
        scratch.fill(f32::NAN);
        let (packed_a, packed_b) = scratch.split_at_mut(lens[0]);
        let a = gemm.pack_operand(case.side, matrix(a_at, a_stride, case.k_contiguous.0), (m, k), packed_a);
        let b = gemm.pack_operand(
            OperandSide::B,
            matrix(b_at, b_stride, case.k_contiguous.1),
            (whole_n, whole_k),
            packed_b,
        );
        let to = OutputTile {
            c: SharedSlice::new(&mut c),
            at: AT,
            stride: c_stride,
            add: case.add,
        };
        // SAFETY: no other thread uses `c`.
        unsafe { gemm.multiply(case.sizes, to, &a, &b.part(n0, k0)) }
    });
    let narrow = backend.rounds(rounding);
    let value = |x: f32| if narrow { bf16::from_f32(x).to_f64() } else { x as f64 };
    let read = |from: &[f32], stride: usize, k_contiguous: bool, vector: usize, step: usize| {
        let (row, column) = if k_contiguous { (vector, step) } else { (step, vector) };
        value(from[row * stride + column])
    };
    for (at, got) in c.iter().enumerate() {
        let inner = at.checked_sub(AT).map(|at| (at / c_stride, at % c_stride));
        let want = match inner {
            Some((i, j)) if j < n => {
                let from = if case.add { 0.5 } else { 0.0 };
                let products = (0..k).map(|p| {
                    read(a_at, a_stride, case.k_contiguous.0, i, p)
                        * read(b_at, b_stride, case.k_contiguous.1, n0 + j, k0 + p)
                });
                from + products.sum::<f64>()
            }
            _ => 0.5,
        };
        let bound = 2e-6 * (k as f64).max(1.0);
        assert!(
            (*got as f64 - want).abs() < bound,
            "{backend:?} {rounding:?} {:?}: {got} {want} at {at}",
            case.sizes
        );
    }
}

#[test]
fn agrees_with_plain_loops() {
    for backend in testable() {
        for rounding in [Rounding::Exact, Rounding::Bf16] {
            for (number, sizes) in [
                (1, 1, 1),
                (64, 130, 80),
                (65, 33, 16),
                (17, 96, 300),
                (200, 64, 64),
                (13, 7, 129),
            ]
            .into_iter()
            .enumerate()
            {
                for form in 0..8 {
                    let case = Case {
                        sizes,
                        first: [(0, 0), (32, 0), (0, 64), (96, 32)][(form + number) % 4],
                        k_contiguous: (form & 1 == 0, form & 2 == 0),
                        side: if form & 4 == 0 {
                            OperandSide::A
                        } else {
                            OperandSide::ScratchA
                        },
                        add: (form + number) % 3 == 0,
                    };
                    check(backend, rounding, &case);
                }
            }
        }
    }
}

#[test]
fn a_part_that_is_not_there_is_refused() {
    let values = flat(&random(64 * 64, 1));
    let run = |first: (usize, usize)| {
        std::panic::catch_unwind(|| {
            let gemm = TaskGemm::new(CpuBackend::Portable, Rounding::Exact);
            let a = gemm.pack_operand(OperandSide::A, Matrix::k_inner(&values[..], 64), (64, 32), &mut []);
            let b = gemm.pack_operand(OperandSide::B, Matrix::k_inner(&values[..], 64), (64, 64), &mut []);
            let mut c = vec![0f32; 64 * 32];
            let to = OutputTile {
                c: SharedSlice::new(&mut c),
                at: 0,
                stride: 32,
                add: false,
            };
            // SAFETY: no other thread uses `c`.
            unsafe { gemm.multiply((64, 32, 32), to, &a, &b.part(first.0, first.1)) }
        })
    };
    assert!(run((32, 32)).is_ok());
    assert!(run((64, 0)).is_err());
    assert!(run((0, 64)).is_err());
    assert!(run((1, 0)).is_err());
}
