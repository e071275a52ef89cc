//! Distillation: the divergence from a network and from stored outputs, with whole heads and with heads in parts.

use crate::support::{KINDS, Pair, assert_close, assert_same_bits, gpu, short};
use candle_core::{DType, Tensor};
use ft::base::Result;
use ft::data::IGNORE;
use ft::ops::cross_entropy::{OutputPieces, PIECE};
use ft::ops::distill::{
    DistillOptions, DistillOutput, DistillSide, DistillTeacher, HeadMatrix, TopK, forward_backward, likeliest,
};
use ft::ops::step_stats::{StepStats, StepSums};

fn targets(n: usize, v: usize) -> Vec<u32> {
    (0..n)
        .map(|i| if i % 3 == 1 { IGNORE } else { (i * 113 % v) as u32 })
        .collect()
}

fn side<'a>(h: &'a Tensor, head: &'a Tensor, softcap: Option<f32>) -> DistillSide<'a> {
    DistillSide {
        h,
        head: HeadMatrix::Whole(head),
        softcap,
    }
}

fn run(
    own: &DistillSide,
    other: &DistillTeacher,
    targets: &[u32],
    options: &DistillOptions,
) -> (DistillOutput, StepSums) {
    let step_stats = StepStats::new(own.h.device()).unwrap();
    let out = forward_backward(own, other, targets, options, &step_stats).unwrap();
    (out, step_stats.read().unwrap())
}

/// One result of a GPU and that of the CPU.
fn compare(got: &(DistillOutput, StepSums), want: &(DistillOutput, StepSums), tolerance: f32, what: &str) {
    let near = |a: f64, b: f64| {
        let most = f64::from(tolerance) * b.abs().max(1.0);
        assert!((a - b).abs() <= most, "{what}: {a}, on the CPU {b}");
    };
    near(got.0.divergence, want.0.divergence);
    near(got.0.cross_entropy, want.0.cross_entropy);
    near(got.1.loss, want.1.loss);
    assert_eq!(got.0.trained, want.0.trained, "{what}");
    assert_eq!(got.1.correct, want.1.correct, "{what}");
    for (got, want) in [(&got.0.dh, &want.0.dh), (&got.0.dw, &want.0.dw)] {
        assert_eq!(got.is_some(), want.is_some());
        if let (Some(got), Some(want)) = (got, want) {
            assert_close(got, want, tolerance);
        }
    }
}

/// A model on both devices: hidden states and head.
struct Model(Pair, Pair);

impl Model {
    fn new(gpu: &crate::support::Gpu, (n, d, v): (usize, usize, usize), dtype: DType, seed: u64) -> Self {
        let head = gpu.random((v, d), dtype, seed + 1);
        // Small logits: in the flat part of a softcap the largest one would depend on the last bit.
        let head = gpu.pair(&(head.cpu * 0.3).unwrap(), dtype);
        Self(gpu.random((n, d), dtype, seed), head)
    }
}

/// As a source streams it: each part has its own memory.
fn part(head: &Tensor, rows: usize) -> impl Fn(usize) -> Result<Tensor> {
    let head = head.clone();
    move |first| Ok(head.narrow(0, first, rows.min(head.dim(0)? - first))?.copy()?)
}

#[test]
fn whole_heads_and_heads_in_parts_match_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let shapes = [
        (1, 8, 5, 8, 5),
        (11, 16, 37, 24, 40),
        (23, 24, PIECE + 777, 16, PIECE + 100),
        (14, 8, 2 * PIECE + 5, 8, 90),
        (220, 8, 37, 8, 40),
    ];
    for (dtype, tolerance) in KINDS {
        for (n, d, v, dt, vt) in shapes {
            let (own, other) = (
                Model::new(&gpu, (n, d, v), dtype, 1),
                Model::new(&gpu, (n, dt, vt), dtype, 5),
            );
            let (targets, common) = (targets(n, v), v.min(vt));
            for (i, beta) in [0.0, 1.0, 0.3].into_iter().enumerate() {
                if short() && v > PIECE && i > 1 {
                    continue;
                }
                let (cap, their_cap) = if i == 1 { (Some(2.5), Some(4.0)) } else { (None, None) };
                let temperature = [1.0, 2.0, 0.7][i];
                let options = DistillOptions {
                    beta,
                    temperature,
                    alpha: [0.3, 0.0, 0.5][i],
                    // The last shape has several blocks of rows with a target.
                    chunk: if n > 100 { 140 } else { 4 },
                    scale: 0.25,
                    need_dh: true,
                    need_dw: true,
                };
                let (own_head, other_head) = (own.1.weight(), other.1.weight());
                let here = (
                    side(&own.0.cpu, &own_head, cap),
                    side(&other.0.cpu, &other_head, their_cap),
                );
                let there = (
                    side(&own.0.gpu, &own.1.gpu, cap),
                    side(&other.0.gpu, &other.1.gpu, their_cap),
                );
                let what = format!("{dtype:?} {v} {beta}");
                let want = run(&here.0, &DistillTeacher::Live(here.1), &targets, &options);
                let got = run(&there.0, &DistillTeacher::Live(there.1), &targets, &options);
                compare(&got, &want, tolerance, &what);
                let again = run(&there.0, &DistillTeacher::Live(there.1), &targets, &options);
                assert_same_bits(&again.0.dh.unwrap(), got.0.dh.as_ref().unwrap());
                assert_same_bits(&again.0.dw.unwrap(), got.0.dw.as_ref().unwrap());

                // Stored outputs of the CPU: a few ids, and all of them.
                let tops: Vec<TopK> = [3.min(common), common]
                    .map(|k| likeliest(&here.1, &targets, common, k, temperature, 4).unwrap())
                    .into();
                for top in &tops {
                    let teacher = DistillTeacher::Stored { top, common };
                    let want = run(&here.0, &teacher, &targets, &options);
                    let got = run(&there.0, &teacher, &targets, &options);
                    compare(&got, &want, tolerance, &format!("{what}, {} stored", top.k));
                }

                // Both heads in parts, or one of them; the head of the student does not train then.
                for (own_rows, other_rows) in [(PIECE, 2 * PIECE), (2 * PIECE, 0), (0, PIECE)] {
                    let parts = (part(&own.1.gpu, own_rows.max(1)), part(&other.1.gpu, other_rows.max(1)));
                    let pieces = |rows, width, rows_of_part, part| OutputPieces {
                        rows,
                        width,
                        rows_of_part,
                        part,
                    };
                    let pieces = (pieces(v, d, own_rows, &parts.0), pieces(vt, dt, other_rows, &parts.1));
                    let (mut student, mut teacher) = there;
                    if own_rows > 0 {
                        student.head = HeadMatrix::Parts(&pieces.0);
                    }
                    if other_rows > 0 {
                        teacher.head = HeadMatrix::Parts(&pieces.1);
                    }
                    let options = DistillOptions {
                        need_dw: own_rows == 0,
                        ..options.clone()
                    };
                    let what = format!("{what}, in parts of {own_rows} and {other_rows}");
                    let want = run(&here.0, &DistillTeacher::Live(here.1), &targets, &options);
                    let got = run(&student, &DistillTeacher::Live(teacher), &targets, &options);
                    compare(&got, &want, tolerance, &what);
                    let stored = DistillTeacher::Stored { top: &tops[0], common };
                    let want = run(&here.0, &stored, &targets, &options);
                    compare(&run(&student, &stored, &targets, &options), &want, tolerance, &what);
                    let top = likeliest(&teacher, &targets, common, 3.min(common), temperature, 4).unwrap();
                    same_top(&top, &tops[0], tolerance);
                }
                let top = likeliest(&there.1, &targets, common, 3.min(common), temperature, 4).unwrap();
                same_top(&top, &tops[0], tolerance);
            }
        }
    }
}

/// e^(ln p - ln q) of the ids that are not stored is too large for f32.
#[test]
fn a_rest_far_below_that_of_the_teacher_has_the_gradient_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let (d, v) = (8, 40);
    let here = &candle_core::Device::Cpu;
    let first_column = |values: Vec<f32>| {
        let rows = values.len();
        let rows_of = values.into_iter().flat_map(|x| std::iter::once(x).chain([0.0; 7]));
        Tensor::from_vec(rows_of.collect::<Vec<f32>>(), (rows, d), here).unwrap()
    };
    // Exact in every type.
    let head = first_column(
        (0..v)
            .map(|i| if i == 3 { 0.0 } else { -100.0 - (i % 4) as f32 })
            .collect(),
    );
    let h = first_column(vec![1.0, 1.0]);
    let top = TopK {
        k: 1,
        ids: vec![3, 3],
        log_probs: vec![(1.0 - (-2f32).exp()).ln(); 2],
        rest: vec![-2.0; 2],
    };
    for (dtype, tolerance) in KINDS {
        let (h, head) = (gpu.pair(&h, dtype), gpu.pair(&head, dtype));
        let options = DistillOptions {
            beta: 0.0,
            temperature: 1.0,
            alpha: 0.25,
            chunk: 2,
            scale: 1.0,
            need_dh: true,
            need_dw: true,
        };
        let teacher = DistillTeacher::Stored { top: &top, common: v };
        let own_head = head.weight();
        let want = run(&side(&h.cpu, &own_head, None), &teacher, &[1, 2], &options);
        let got = run(&side(&h.gpu, &head.gpu, None), &teacher, &[1, 2], &options);
        compare(&got, &want, tolerance, &format!("{dtype:?}"));
        assert!(want.1.loss.is_finite() && got.1.loss.is_finite(), "{dtype:?}");
    }
}

fn same_top(got: &TopK, want: &TopK, tolerance: f32) {
    assert_eq!(got.ids, want.ids);
    let pairs = got.log_probs.iter().zip(&want.log_probs);
    for (got, want) in pairs.chain(got.rest.iter().zip(&want.rest)) {
        assert!(
            got == want || (got - want).abs() <= tolerance * want.abs().max(1.0),
            "{got} {want}"
        );
    }
}

#[test]
fn a_logit_that_is_not_finite_shows_in_the_loss() {
    let Some(gpu) = gpu() else { return };
    for (dtype, _) in KINDS {
        let model = Model::new(&gpu, (3, 8, 40), dtype, 1);
        let row = Tensor::full(f32::NAN, (1, 8), &candle_core::Device::Cpu).unwrap();
        let bad = Tensor::cat(&[&model.0.cpu.narrow(0, 0, 2).unwrap(), &row], 0).unwrap();
        let bad = gpu.pair(&bad, dtype);
        for beta in [0.0, 1.0, 0.5] {
            let options = DistillOptions {
                beta,
                temperature: 2.0,
                alpha: 0.0,
                chunk: 2,
                scale: 1.0,
                need_dh: true,
                need_dw: false,
            };
            let loss = |h: &Tensor, t: &Tensor, targets: &[u32]| {
                let other = DistillTeacher::Live(side(t, &model.1.gpu, None));
                run(&side(h, &model.1.gpu, None), &other, targets, &options).1.loss
            };
            let good = &model.0.gpu;
            assert!(!loss(&bad.gpu, good, &[1, 2, 3]).is_finite() && !loss(good, &bad.gpu, &[1, 2, 3]).is_finite());
            assert!(loss(&bad.gpu, good, &[1, 2, IGNORE]).is_finite());
            assert_eq!(
                run(
                    &side(good, &model.1.gpu, None),
                    &DistillTeacher::Live(side(good, &model.1.gpu, None)),
                    &[IGNORE; 3],
                    &options
                )
                .0
                .trained,
                0
            );
        }
    }
}
