//! Divergences, compared with their definition by autograd and with each other, and on any number of threads.

use super::super::cross_entropy;
use super::*;
use crate::oracle::{assert_close, assert_same_on_any_threads, bf16_pair, flat, random};
use candle_core::{D, Device, Var};

fn targets(n: usize, v: usize) -> Vec<u32> {
    let id = |i: usize| if i % 3 == 1 { IGNORE } else { (i * 7 % v) as u32 };
    (0..n).map(id).collect()
}

fn options(beta: f32, temperature: f32, alpha: f32, chunk: usize) -> DistillOptions {
    DistillOptions {
        beta,
        temperature,
        alpha,
        chunk,
        scale: 0.25,
        need_dh: true,
        need_dw: true,
    }
}

fn step_stats() -> StepStats {
    StepStats::new(&Device::Cpu).unwrap()
}

fn side<'a>(h: &'a Tensor, head: &'a Tensor, softcap: Option<f32>) -> DistillSide<'a> {
    DistillSide {
        h,
        head: HeadMatrix::Whole(head),
        softcap,
    }
}

/// Returns the logits of the trained rows, with softcap.
fn logits(h: &Tensor, head: &Tensor, targets: &[u32], cap: Option<f32>) -> Tensor {
    let rows: Vec<u32> = (0..targets.len() as u32)
        .filter(|i| targets[*i as usize] != IGNORE)
        .collect();
    let count = rows.len();
    let rows = Tensor::from_vec(rows, count, &Device::Cpu).unwrap();
    let h = h.index_select(&rows, 0).unwrap();
    let logits = h.matmul(&head.t().unwrap()).unwrap();
    match cap {
        Some(cap) => ((logits / cap as f64).unwrap().tanh().unwrap() * cap as f64).unwrap(),
        None => logits,
    }
}

fn log_softmax(x: &Tensor) -> Tensor {
    let sum = x.exp().unwrap().sum_keepdim(D::Minus1).unwrap();
    x.broadcast_sub(&sum.log().unwrap()).unwrap()
}

fn kl(p: &Tensor, q: &Tensor) -> Tensor {
    let all = (p.exp().unwrap() * (p - q).unwrap()).unwrap();
    all.sum_all().unwrap()
}

/// Returns the divergence by its definition, and the cross-entropy.
fn composed(z: &Tensor, t: &Tensor, targets: &[u32], o: &DistillOptions) -> (Tensor, Tensor) {
    let common = z.dim(1).unwrap().min(t.dim(1).unwrap());
    let soft = |x: &Tensor| {
        let x = x.narrow(1, 0, common).unwrap().contiguous().unwrap();
        log_softmax(&(x / o.temperature as f64).unwrap())
    };
    let (q, p, beta) = (soft(z), soft(t), o.beta as f64);
    let divergence = match o.beta {
        0.0 => kl(&p, &q),
        1.0 => kl(&q, &p),
        _ => {
            let m = ((q.exp().unwrap() * (1.0 - beta)).unwrap() + (p.exp().unwrap() * beta).unwrap()).unwrap();
            let m = m.log().unwrap();
            ((kl(&p, &m) * beta).unwrap() + (kl(&q, &m) * (1.0 - beta)).unwrap()).unwrap()
        }
    };
    let ids: Vec<u32> = targets.iter().copied().filter(|t| *t != IGNORE).collect();
    let ids = Tensor::from_vec(ids.clone(), (ids.len(), 1), &Device::Cpu).unwrap();
    let hard = log_softmax(z).gather(&ids, 1).unwrap().sum_all().unwrap();
    (divergence, hard.neg().unwrap())
}

const BETAS: [f32; 4] = [0.0, 1.0, 0.5, 0.2];

/// Student vocabulary, teacher vocabulary, N, D, Dt.
const SHAPES: [(usize, usize, usize, usize, usize); 4] = [
    (5, 5, 1, 8, 6),
    (37, 40, 11, 16, 24),
    (300, 270, 40, 24, 16),
    (4099, 4097, 9, 8, 8),
];

#[test]
fn matches_autograd() {
    for (v, vt, n, d, dt) in SHAPES {
        let targets = targets(n, v);
        let teacher = [random((n, dt), 3), random((vt, dt), 4)];
        for (i, beta) in BETAS.into_iter().enumerate() {
            let (temperature, alpha) = ([1.0, 2.5, 0.7, 1.0][i], [0.0, 0.3, 0.5, 1.0][(i + v) % 4]);
            for cap in [None, Some(2.5)] {
                let h = Var::from_tensor(&random((n, d), 1)).unwrap();
                let head = Var::from_tensor(&random((v, d), 2)).unwrap();
                let o = options(beta, temperature, alpha, 4);
                let z = logits(&h, &head, &targets, cap);
                let t = logits(&teacher[0], &teacher[1], &targets, Some(3.0));
                let (divergence, hard) = composed(&z, &t, &targets, &o);
                let loss = ((&divergence * (1.0 - alpha as f64)).unwrap() + (&hard * alpha as f64).unwrap()).unwrap();
                let grads = (&loss * 0.25).unwrap().backward().unwrap();
                let own = side(&h, &head, cap);
                let other = DistillTeacher::Live(side(&teacher[0], &teacher[1], Some(3.0)));
                let sums = step_stats();
                let out = forward_backward(&own, &other, &targets, &o, &sums).unwrap();
                let read = |t: &Tensor| t.to_scalar::<f32>().unwrap() as f64;
                let near = |a: f64, b: f64| (a - b).abs() <= 2e-5 * b.abs().max(0.1);
                assert!(
                    near(out.divergence, read(&divergence)),
                    "{} {divergence}",
                    out.divergence
                );
                assert!(near(out.cross_entropy, read(&hard)), "{} {hard}", out.cross_entropy);
                assert!(near(sums.read().unwrap().loss, read(&loss)));
                assert_close(out.dh.as_ref().unwrap(), grads.get(&h).unwrap(), 2e-5);
                assert_close(out.dw.as_ref().unwrap(), grads.get(&head).unwrap(), 2e-5);
            }
        }
    }
}

#[test]
fn with_alpha_one_it_is_the_cross_entropy() {
    let (n, d, v) = (20, 16, 5000);
    let (h, head, targets) = (random((n, d), 1), random((v, d), 2), targets(n, v));
    let (a, b) = (step_stats(), step_stats());
    let out = forward_backward(
        &side(&h, &head, None),
        &DistillTeacher::Live(side(&h, &head, None)),
        &targets,
        &options(0.5, 1.0, 1.0, 6),
        &a,
    )
    .unwrap();
    let plain = cross_entropy::CrossEntropyOptions {
        smoothing: 0.0,
        softcap: None,
        chunk: 6,
        scale: 0.25,
        weights: None,
        need_dh: true,
        need_dw: true,
    };
    let want = cross_entropy::forward_backward(&h, &head, &targets, &plain, &b).unwrap();
    let (a, b) = (a.read().unwrap(), b.read().unwrap());
    assert!((a.loss - b.loss).abs() < 1e-6 * b.loss && a.correct == b.correct);
    assert_close(&out.dh.unwrap(), &want.dh.unwrap(), 1e-5);
    assert_close(&out.dw.unwrap(), &want.dw.unwrap(), 1e-5);
    // A teacher with the same distribution gives a divergence of zero.
    assert!(out.divergence.abs() < 1e-6);
}

#[test]
fn all_stored_ids_are_the_whole_teacher_and_fewer_say_less() {
    let (n, d, v, vt) = (14, 12, 4200, 4150);
    let (h, head) = (random((n, d), 1), random((v, d), 2));
    let (th, thead) = (random((n, 20), 3), random((vt, 20), 4));
    let targets = targets(n, v);
    let teacher = side(&th, &thead, Some(4.0));
    for beta in BETAS {
        let o = options(beta, 1.5, 0.25, 5);
        let whole = forward_backward(
            &side(&h, &head, None),
            &DistillTeacher::Live(teacher),
            &targets,
            &o,
            &step_stats(),
        )
        .unwrap();
        let mut last = 0.0;
        for k in [1, 40, 4149, vt] {
            let top = likeliest(&teacher, &targets, vt, k, 1.5, 3).unwrap();
            let other = DistillTeacher::Stored { top: &top, common: vt };
            let out = forward_backward(&side(&h, &head, None), &other, &targets, &o, &step_stats()).unwrap();
            assert!(
                out.divergence >= last - 1e-5 && out.divergence <= whole.divergence + 1e-4,
                "{beta} {k}"
            );
            last = out.divergence;
            if k >= 4149 {
                assert!((out.divergence - whole.divergence).abs() < 2e-5 * whole.divergence);
                assert_close(out.dh.as_ref().unwrap(), whole.dh.as_ref().unwrap(), 1e-4);
            }
        }
    }
}

/// The gradient with stored rows is the slope of their loss.
#[test]
fn stored_rows_have_the_gradient_of_their_loss() {
    let (n, d, v) = (3, 4, 30);
    let (h, head) = (random((n, d), 1), random((v, d), 2));
    let (th, thead) = (random((n, 5), 3), random((v, 5), 4));
    let targets = [4, IGNORE, 7];
    let top = likeliest(&side(&th, &thead, None), &targets, v, 6, 2.0, 3).unwrap();
    for beta in BETAS {
        for cap in [None, Some(3.0)] {
            let mut o = options(beta, 2.0, 0.25, 5);
            o.scale = 1.0;
            let other = DistillTeacher::Stored { top: &top, common: v };
            let loss = |h: &Tensor| {
                let sums = step_stats();
                forward_backward(&side(h, &head, cap), &other, &targets, &o, &sums)?;
                Ok(sums.read()?.loss)
            };
            let want = crate::oracle::differences(&h, 1e-2, loss);
            let out = forward_backward(&side(&h, &head, cap), &other, &targets, &o, &step_stats()).unwrap();
            assert_close(&out.dh.unwrap(), &want, 2e-3);
        }
    }
}

/// e^(ln p - ln q) of the ids that are not stored is too large for f32.
#[test]
fn a_rest_far_below_that_of_the_teacher_has_a_finite_gradient() {
    let first_column = |values: [f64; 3]| {
        let rows: Vec<f32> = values.iter().flat_map(|x| [*x as f32, 0.0, 0.0, 0.0]).collect();
        Tensor::from_vec(rows, (3, 4), &Device::Cpu).unwrap()
    };
    let head = first_column([0.0, -101.0, -100.5]);
    let h = first_column([1.0; 3]).narrow(0, 0, 1).unwrap();
    let rest = (-2f64).exp();
    let top = TopK {
        k: 1,
        ids: vec![0],
        log_probs: vec![(1.0 - rest).ln() as f32],
        rest: vec![-2.0],
    };
    let mut o = options(0.0, 1.0, 0.0, 2);
    o.scale = 1.0;
    let other = DistillTeacher::Stored { top: &top, common: 3 };
    let sums = step_stats();
    let out = forward_backward(&side(&h, &head, None), &other, &[0], &o, &sums).unwrap();
    // q is 1 for the first id; the others share the teacher's rest as they share the student's.
    let share = 1.0 / (1.0 + (-0.5f64).exp());
    let want = first_column([rest, -rest * (1.0 - share), -rest * share]);
    assert_close(&out.dw.unwrap(), &want, 1e-4);
    assert!(flat(&out.dh.unwrap())[0].is_finite() && sums.read().unwrap().loss.is_finite());
}

#[test]
fn the_likeliest_are_those_of_a_sort() {
    let (n, d, v) = (6, 8, 9000);
    let (h, head) = (random((n, d), 3), random((v, d), 4));
    let targets = targets(n, v);
    for k in [1, 7, 100] {
        let top = likeliest(&side(&h, &head, None), &targets, v - 5, k, 2.0, 3).unwrap();
        let t = logits(&h, &head, &targets, None).narrow(1, 0, v - 5).unwrap();
        let all = log_softmax(&(t.contiguous().unwrap() / 2.0).unwrap())
            .to_vec2::<f32>()
            .unwrap();
        for (i, row) in all.iter().enumerate() {
            let mut order: Vec<u32> = (0..row.len() as u32).collect();
            order.sort_by(|a, b| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b)));
            let mut kept = order[..k].to_vec();
            kept.sort_unstable();
            assert_eq!(top.ids[i * k..][..k], kept);
            for (id, lp) in kept.iter().zip(&top.log_probs[i * k..][..k]) {
                assert!((row[*id as usize] - lp).abs() < 1e-5);
            }
            let rest: f64 = order[k..].iter().map(|id| (row[*id as usize] as f64).exp()).sum();
            assert!((rest.ln() - top.rest[i] as f64).abs() < 1e-5);
        }
    }
}

#[test]
fn heads_in_parts_give_the_bits_of_whole_heads() {
    let (n, d, dt, v, vt) = (23, 12, 20, 2 * PIECE + 777, 2 * PIECE + 100);
    let (h, th, targets) = (random((n, d), 1), random((n, dt), 2), targets(n, v));
    for (head, thead) in [
        (random((v, d), 3), random((vt, dt), 4)),
        (bf16_pair((v, d), 3).0, bf16_pair((vt, dt), 4).0),
    ] {
        for (own_part, other_part) in [
            (None, Some(PIECE)),
            (Some(2 * PIECE), None),
            (Some(PIECE), Some(3 * PIECE)),
        ] {
            let give = |w: &Tensor, size: usize| {
                let w = w.clone();
                move |first: usize| Ok(w.narrow(0, first, size.min(w.dim(0)? - first))?)
            };
            let (own, other) = (
                give(&head, own_part.unwrap_or(PIECE)),
                give(&thead, other_part.unwrap_or(PIECE)),
            );
            let pieces = |rows, width, size: Option<usize>, part| OutputPieces {
                rows,
                width,
                rows_of_part: size.unwrap_or(PIECE),
                part,
            };
            let own_pieces = pieces(v, d, own_part, &own);
            let other_pieces = pieces(vt, dt, other_part, &other);
            let matrix = |w, pieces, size: Option<usize>| match size {
                Some(_) => HeadMatrix::Parts(pieces),
                None => HeadMatrix::Whole(w),
            };
            let student = DistillSide {
                head: matrix(&head, &own_pieces, own_part),
                ..side(&h, &head, Some(3.0))
            };
            let teacher = DistillSide {
                head: matrix(&thead, &other_pieces, other_part),
                ..side(&th, &thead, None)
            };
            for beta in [0.0, 0.3] {
                let mut o = options(beta, 1.3, 0.4, 5);
                o.need_dw = own_part.is_none();
                let (a, b) = (step_stats(), step_stats());
                let whole = (
                    side(&h, &head, Some(3.0)),
                    DistillTeacher::Live(side(&th, &thead, None)),
                );
                let want = forward_backward(&whole.0, &whole.1, &targets, &o, &a).unwrap();
                let got = forward_backward(&student, &DistillTeacher::Live(teacher), &targets, &o, &b).unwrap();
                assert_eq!(a.read().unwrap(), b.read().unwrap());
                assert_eq!(flat(&want.dh.unwrap()), flat(&got.dh.unwrap()));
                assert_eq!(want.dw.map(|w| flat(&w)), got.dw.map(|w| flat(&w)));
                let k = likeliest(&teacher, &targets, vt, 9, 1.3, 4).unwrap();
                assert_eq!(k, likeliest(&side(&th, &thead, None), &targets, vt, 9, 1.3, 4).unwrap());
                let stored = DistillTeacher::Stored { top: &k, common: vt };
                let want = forward_backward(&whole.0, &stored, &targets, &o, &a).unwrap();
                let got = forward_backward(&student, &stored, &targets, &o, &b).unwrap();
                assert_eq!(a.read().unwrap(), b.read().unwrap());
                assert_eq!(flat(&want.dh.unwrap()), flat(&got.dh.unwrap()));
            }
        }
    }
}

#[test]
fn same_bits_on_any_threads() {
    let (n, d, v) = (70, 16, 4500);
    let (h, head, targets) = (random((n, d), 1), random((v, d), 2), targets(n, v));
    let (th, thead) = (random((n, 8), 3), random((v, 8), 4));
    assert_same_on_any_threads(|| {
        let teacher = side(&th, &thead, None);
        let top = likeliest(&teacher, &targets, v, 20, 1.0, 9).unwrap();
        let mut out = vec![Tensor::new(&top.log_probs[..], &Device::Cpu).unwrap()];
        for other in [
            DistillTeacher::Live(teacher),
            DistillTeacher::Stored { top: &top, common: v },
        ] {
            let got = forward_backward(
                &side(&h, &head, None),
                &other,
                &targets,
                &options(0.5, 2.0, 0.5, 11),
                &step_stats(),
            );
            let got = got.unwrap();
            out.push(Tensor::new(&[got.divergence as f32], &Device::Cpu).unwrap());
            out.extend([got.dh.unwrap(), got.dw.unwrap()]);
        }
        out
    });
}

#[test]
fn a_logit_that_is_not_finite_shows_in_the_loss() {
    let (h, head) = (random((3, 4), 1), random((40, 4), 2));
    let mut bad = flat(&h);
    bad[5] = f32::NAN;
    let bad = Tensor::from_vec(bad, (3, 4), &Device::Cpu).unwrap();
    for beta in BETAS {
        let o = options(beta, 2.0, 0.0, 2);
        let loss = |h: &Tensor, t: &Tensor, targets: &[u32]| {
            let sums = step_stats();
            forward_backward(
                &side(h, &head, None),
                &DistillTeacher::Live(side(t, &head, None)),
                targets,
                &o,
                &sums,
            )
            .unwrap();
            sums.read().unwrap().loss
        };
        assert!(!loss(&bad, &h, &[1, 2, 3]).is_finite() && !loss(&h, &bad, &[1, 2, 3]).is_finite());
        assert!(loss(&bad, &h, &[1, IGNORE, 3]).is_finite() && loss(&h, &bad, &[1, IGNORE, 3]).is_finite());
    }
}

#[test]
fn what_is_wrong_is_refused() {
    let (h, head) = (random((3, 4), 1), random((9, 4), 2));
    let (own, other) = (side(&h, &head, None), DistillTeacher::Live(side(&h, &head, None)));
    let run = |own: &DistillSide, other: &DistillTeacher, targets: &[u32], o: DistillOptions| {
        forward_backward(own, other, targets, &o, &step_stats()).map(|out| out.trained)
    };
    assert_eq!(run(&own, &other, &[IGNORE; 3], options(0.5, 1.0, 0.5, 2)).unwrap(), 0);
    assert!(run(&own, &other, &[9, 1, 1], options(0.5, 1.0, 0.5, 2)).is_err());
    for (beta, temperature, alpha) in [(1.5, 1.0, 0.0), (0.0, 0.0, 0.0), (0.0, 1.0, -0.1), (0.0, f32::NAN, 0.0)] {
        assert!(run(&own, &other, &[1, 2, 3], options(beta, temperature, alpha, 2)).is_err());
    }
    let short = random((2, 4), 1);
    assert!(
        run(
            &side(&short, &head, None),
            &other,
            &[1, 2, 3],
            options(0.0, 1.0, 0.0, 2)
        )
        .is_err()
    );
    assert!(
        run(
            &own,
            &DistillTeacher::Live(side(&short, &head, None)),
            &[1, 2, 3],
            options(0.0, 1.0, 0.0, 2)
        )
        .is_err()
    );
    let top = likeliest(&own, &[1, 2, 3], 9, 4, 1.0, 2).unwrap();
    let stored = |top: &TopK| {
        run(
            &own,
            &DistillTeacher::Stored { top, common: 9 },
            &[1, 2, 3],
            options(0.0, 1.0, 0.0, 2),
        )
    };
    assert_eq!(stored(&top).unwrap(), 3);
    let mut few = top.clone();
    few.rest.pop();
    assert!(stored(&few).is_err());
    let mut odd = top.clone();
    odd.ids[1] = odd.ids[0];
    assert!(stored(&odd).is_err());
    let mut odd = top;
    odd.log_probs[2] = f32::NEG_INFINITY;
    assert!(stored(&odd).is_err());
}
