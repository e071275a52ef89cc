//! In-place updates, sums, copies, dropout.

use crate::support::{KINDS, assert_close, assert_same_bits, flat, gpu};
use candle_core::{DType, Tensor};
use ft::base::rng::{Rng, Stream};
use ft::ops::step_stats::StepStats;
use ft::ops::update;

#[test]
fn sums_and_scaling_match_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for (dtype, tolerance) in KINDS {
        for (added, _) in KINDS {
            for shape in [(1, 1), (7, 9001), (64, 512)] {
                let (a, b) = (gpu.random(shape, dtype, 1), gpu.random(shape, added, 2));
                let want = update::add(&a.cpu, &b.cpu).unwrap();
                let sum = update::add(&a.gpu, &b.gpu).unwrap();
                assert_eq!(sum.dtype(), dtype);
                assert_close(&sum, &want, tolerance);
                update::add_assign(&a.gpu, &b.gpu).unwrap();
                assert_same_bits(&a.gpu, &sum);
                update::scale_assign(&a.gpu, 0.37).unwrap();
                update::scale_assign(&want, 0.37).unwrap();
                assert_close(&a.gpu, &want, tolerance);
            }
        }
        // Only the rows of the view change.
        let whole = gpu.random((6, 5), dtype, 1);
        let before = flat(&whole.gpu);
        update::scale_assign(&whole.rows(1, 3).gpu, 0.0).unwrap();
        let after = flat(&whole.gpu);
        assert_eq!((&after[..5], &after[20..]), (&before[..5], &before[20..]));
        assert!(after[5..20].iter().all(|x| *x == 0.0));
    }
}

#[test]
fn squares_and_what_is_not_finite() {
    let Some(gpu) = gpu() else { return };
    for (dtype, _) in KINDS {
        for n in [1, 1000, 16_384, 100_001] {
            let t = gpu.random(n, dtype, 1);
            let want: f64 = flat(&t.cpu).iter().map(|x| *x as f64 * *x as f64).sum();
            let got = update::sum_squares(&t.gpu).unwrap();
            assert!((got - want).abs() <= 1e-6 * want, "{got} {want}");
            assert_eq!(got.to_bits(), update::sum_squares(&t.gpu).unwrap().to_bits());
            assert!(update::all_finite(&t.gpu).unwrap());
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for at in [0, n / 2, n - 1] {
                    let mut values = flat(&t.cpu);
                    values[at] = bad;
                    update::set(&t.gpu, &values).unwrap();
                    assert!(!update::all_finite(&t.gpu).unwrap());
                    assert!(!update::sum_squares(&t.gpu).unwrap().is_finite());
                }
            }
        }
    }
    let step_stats = StepStats::new(&gpu.device).unwrap();
    let (a, b) = (gpu.random((3, 70_001), DType::F32, 1), gpu.random(9, DType::F32, 2));
    step_stats.add_squares_of(&[&a.gpu, &b.gpu]).unwrap();
    step_stats.add_squares(&b.gpu).unwrap();
    let want = update::sum_squares(&a.cpu).unwrap() + 2.0 * update::sum_squares(&b.cpu).unwrap();
    assert!((step_stats.read().unwrap().squares - want).abs() <= 1e-6 * want);
    let squares = step_stats.squares().unwrap().unwrap();
    let factor = flat(&update::clip_coefficient(&squares, 2.0).unwrap())[0];
    let want = (2.0 / (step_stats.read().unwrap().squares.sqrt() + 1e-6)).min(1.0) as f32;
    assert_eq!(factor, want);
}

#[test]
fn copies_to_and_from_the_host() {
    let Some(gpu) = gpu() else { return };
    for (dtype, _) in KINDS {
        let t = gpu.random((5, 7), dtype, 1);
        assert_eq!(update::to_f32_vec(&t.gpu).unwrap(), flat(&t.cpu));
        let part = t.rows(1, 2);
        assert_eq!(update::to_f32_vec(&part.gpu).unwrap(), flat(&part.cpu));
        let values: Vec<f32> = (0..14).map(|i| i as f32 / 3.0).collect();
        update::set(&part.gpu, &values).unwrap();
        update::set(&part.cpu, &values).unwrap();
        let want = t.cpu.to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap();
        assert_close(&t.gpu, &want, 0.0);
        assert!(update::set(&part.gpu, &values[1..]).is_err());
    }
}

#[test]
fn dropout_drops_the_same_elements() {
    let Some(gpu) = gpu() else { return };
    let rng = Rng::new(7, Stream::Dropout, &[3, 1, 4]);
    for n in [1, 1003, 50_000] {
        let t = gpu.random(n, DType::F32, 1);
        update::dropout_assign(&t.gpu, rng, 0.3).unwrap();
        update::dropout_assign(&t.cpu, rng, 0.3).unwrap();
        assert_close(&t.gpu, &t.cpu, 0.0);
        let half = gpu.random(n, DType::BF16, 1);
        update::dropout_assign(&half.gpu, rng, 0.3).unwrap();
        let dropped = |t: &Tensor| flat(t).iter().map(|x| *x == 0.0).collect::<Vec<_>>();
        assert_eq!(dropped(&half.gpu), dropped(&t.cpu));
    }
}
