//! The comparison with TRL is a parity test. Here: heads in parts, spans that do not fit, any number of threads.

use super::*;
use crate::cross_entropy::{OutputPieces, PIECE};
use crate::oracle::{assert_close, assert_same_on_any_threads, flat, random};
use candle_core::Device;

const SPANS: [[usize; 4]; 2] = [[0, 2, 1, 2], [3, 4, 2, 5]];

fn spans() -> Vec<AlignedSpan> {
    let span = |s: [usize; 4]| AlignedSpan {
        student: s[0]..s[1],
        teacher: s[2]..s[3],
    };
    SPANS.map(span).to_vec()
}

/// Loss, gradient of the hidden states, gradient of the head.
fn run(shared: Option<&SharedIds>, chunk: usize, in_parts: bool) -> (f64, Tensor, Option<Tensor>) {
    let (v, vt) = (PIECE + 7, PIECE + 900);
    let (h, head) = (random(&[5, 4], 1), random(&[v, 4], 2));
    let (other_h, other) = (random(&[6, 3], 3), random(&[vt, 3], 4));
    let part = |head: &Tensor, first: usize| Ok(head.narrow(0, first, PIECE.min(head.dim(0)? - first))?);
    let (own_part, other_part) = (|first| part(&head, first), |first| part(&other, first));
    let pieces = |rows, width, part| OutputPieces {
        rows,
        width,
        rows_of_part: PIECE,
        part,
    };
    let (own_pieces, other_pieces) = (pieces(v, 4, &own_part), pieces(vt, 3, &other_part));
    let side = |h, head, pieces| DistillSide {
        h,
        head: if in_parts {
            HeadMatrix::Parts(pieces)
        } else {
            HeadMatrix::Whole(head)
        },
        softcap: Some(5.0),
    };
    let options = AlignedOptions {
        comparison: shared.map_or(Comparison::Sorted, Comparison::Matched),
        common: DistillOptions {
            beta: 0.3,
            temperature: 1.5,
            alpha: 0.2,
            chunk,
            scale: 0.5,
            need_dh: true,
            need_dw: !in_parts,
        },
    };
    let stats = StepStats::new(&Device::Cpu).unwrap();
    let targets = [7, 4000, IGNORE, 2, 90];
    let teacher_targets = [IGNORE, 5, 4, 3000, 8, 1];
    let out = forward_backward(
        &side(&h, &head, &own_pieces),
        &side(&other_h, &other, &other_pieces),
        &targets,
        &teacher_targets,
        &spans(),
        &options,
        &stats,
    )
    .unwrap();
    assert_eq!(out.trained, 4);
    (stats.read().unwrap().loss, out.dh.unwrap(), out.dw)
}

#[test]
fn heads_in_parts_and_other_chunks_give_the_same() {
    let shared = SharedIds {
        pairs: (0..3000)
            .map(|i| (i + 5, 2 * i % 4990))
            .filter(|p| p.1 < 4900 && p.0 < 2400)
            .collect(),
    };
    for shared in [None, Some(&shared)] {
        let (loss, dh, dw) = run(shared, 100, false);
        for (chunk, in_parts) in [(1, false), (3, false), (100, true), (2, true)] {
            let other = run(shared, chunk, in_parts);
            assert!((loss - other.0).abs() < 1e-6, "{loss} {}", other.0);
            assert_close(&other.1, &dh, 1e-5);
            if let (Some(dw), Some(other)) = (&dw, &other.2) {
                assert_close(other, dw, 1e-5);
            }
        }
        // The token without a target has no gradient.
        let dh = flat(&dh);
        assert!(dh[8..12].iter().all(|x| *x == 0.0) && dh.iter().any(|x| *x != 0.0));
    }
}

#[test]
fn threads_do_not_change_the_result() {
    assert_same_on_any_threads(|| {
        let (loss, dh, dw) = run(None, 2, false);
        vec![Tensor::new(loss as f32, &Device::Cpu).unwrap(), dh, dw.unwrap()]
    });
}

#[test]
fn spans_that_do_not_fit_are_refused() {
    let span = |student, teacher| AlignedSpan { student, teacher };
    let good = [span(0..1, 0..1), span(1..2, 1..3)];
    let (own, other) = ([1, 2, IGNORE], [1, 2, 3]);
    assert_eq!(units(&good, &own, &other, &[0, 1]).unwrap().len(), 2);
    for bad in [
        vec![span(1..3, 0..1)],
        vec![span(0..1, 0..0)],
        vec![span(0..1, 2..4)],
        vec![span(1..2, 0..1), span(0..1, 1..2)],
    ] {
        assert!(units(&bad, &own, &other, &[0, 1]).is_err(), "{bad:?}");
    }
    let shared = SharedIds {
        pairs: vec![(1, 1), (1, 2)],
    };
    assert!(masks(Comparison::Matched(&shared), 5, 5).is_err());
}
