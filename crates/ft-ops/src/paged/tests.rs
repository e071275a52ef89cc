//! Paged attention, compared with attention on tensors; page boundaries and other documents do not change a bit.

use super::*;
use crate::CpuBackend;
use crate::attention;
use crate::oracle::{assert_close, assert_same_on_any_threads, flat, random, read_back};

fn specs() -> Vec<AttentionSpec> {
    let plain = AttentionSpec {
        heads: 6,
        kv_heads: 2,
        head_dim: 8,
        scale: 0.3,
        softcap: None,
        window: None,
        bf16: false,
    };
    let exact = [
        plain.clone(),
        AttentionSpec {
            head_dim: 48,
            window: Some(70),
            ..plain.clone()
        },
        AttentionSpec {
            heads: 7,
            kv_heads: 1,
            head_dim: 64,
            softcap: Some(1.5),
            window: Some(5),
            ..plain.clone()
        },
        // More heads than rows per task.
        AttentionSpec {
            heads: 40,
            kv_heads: 1,
            ..plain
        },
    ];
    let narrow = exact.iter().map(|spec| AttentionSpec {
        bf16: true,
        ..spec.clone()
    });
    narrow.chain(exact.iter().cloned()).collect()
}

fn form(spec: &AttentionSpec, stored: KvDtype) -> PageForm {
    PageForm {
        stored,
        kv_heads: spec.kv_heads,
        head_dim: spec.head_dim,
    }
}

/// Stores the tokens of `k` and `v` in pages; a page ends early before each of `cuts`.
fn pages(spec: &AttentionSpec, stored: KvDtype, k: &Tensor, v: &Tensor, cuts: &[usize]) -> Vec<Page> {
    let form = form(spec, stored);
    let (k, v) = (k.to_vec2::<f32>().unwrap(), v.to_vec2::<f32>().unwrap());
    let mut pages: Vec<Page> = Vec::new();
    for (t, (k, v)) in k.iter().zip(&v).enumerate() {
        if pages.last().is_none_or(Page::is_full) || cuts.contains(&t) {
            pages.push(Page::new(form));
        }
        pages.last_mut().unwrap().push(k, v, spec);
    }
    pages
}

fn keys(spec: &AttentionSpec, n: usize, seed: u64) -> (Tensor, Tensor) {
    let width = spec.kv_heads * spec.head_dim;
    (random((n, width), seed), random((n, width), seed + 1))
}

#[test]
fn as_attention_on_tensors() {
    for spec in specs() {
        // Decoding steps, a continued prompt, a whole prompt, a row without new tokens.
        let (qd, kd) = (vec![0, 1, 2, 72, 72, 162], vec![0, 1, 131, 271, 281, 371]);
        let q = random((162, spec.heads * spec.head_dim), 1);
        let (k, v) = keys(&spec, 371, 2);
        let all: Vec<Vec<Page>> = kd
            .windows(2)
            .map(|d| {
                let rows = |t: &Tensor| t.narrow(0, d[0], d[1] - d[0]).unwrap();
                pages(&spec, KvDtype::F32, &rows(&k), &rows(&v), &[3, 70])
            })
            .collect();
        let documents: Vec<PagedDocument> = all
            .iter()
            .zip(qd.windows(2))
            .map(|(pages, q)| PagedDocument {
                queries: q[0]..q[1],
                pages: pages.iter().collect(),
            })
            .collect();
        let (o, lse) = attend(&q, &documents, &spec).unwrap();
        let (want, want_lse) = attention::forward(&q, &k, &v, &spec, &qd, &kd).unwrap();
        assert_close(&lse, &want_lse, 1e-5);
        if !spec.rounds() {
            assert_close(&o, &want, 1e-5);
        } else {
            // The operands are the same, but a probability that differs through the order of a sum may be rounded
            // in the other direction: by a step of 2^-8 of it, and no probability is above 1.
            assert_close(&o, &want, 2f32.powi(-8));
            let (o, want) = (flat(&o), flat(&want));
            let largest = want.iter().fold(0f32, |m, x| m.max(x.abs()));
            let off = o.iter().zip(&want).filter(|(a, b)| (*a - *b).abs() > 1e-5 * largest);
            assert!(off.count() * 20 < o.len(), "few are rounded the other way");
        }
        assert_same_on_any_threads(|| {
            let (o, lse) = attend(&q, &documents, &spec).unwrap();
            vec![o, lse]
        });
    }
}

#[test]
fn cuts_and_other_rows_change_no_bit() {
    for spec in specs() {
        for stored in [KvDtype::F32, KvDtype::Bf16, KvDtype::Int8] {
            let q = random((100, spec.heads * spec.head_dim), 1);
            let (k, v) = keys(&spec, 200, 2);
            let run = |q: &Tensor, pages: &[Page]| {
                let document = PagedDocument {
                    queries: 0..q.dims()[0],
                    pages: pages.iter().collect(),
                };
                flat(&attend(q, &[document], &spec).unwrap().0)
            };
            let whole = run(&q, &pages(&spec, stored, &k, &v, &[]));
            assert_eq!(whole, run(&q, &pages(&spec, stored, &k, &v, &[1, 2, 90, 150, 199])));
            // The queries one by one, each at the time when its key is the last.
            let width = spec.heads * spec.head_dim;
            for i in [0, 17, 63, 99] {
                let (k, v) = (k.narrow(0, 0, 101 + i).unwrap(), v.narrow(0, 0, 101 + i).unwrap());
                let got = run(
                    &q.narrow(0, i, 1).unwrap().copy().unwrap(),
                    &pages(&spec, stored, &k, &v, &[7]),
                );
                assert_eq!(got, whole[i * width..(i + 1) * width]);
            }
        }
    }
}

/// Reading a prompt in blocks is attention on the tensors, bit for bit, however the prompt is cut into steps and pages.
#[test]
fn blocks_are_attention_on_tensors_however_a_prompt_is_cut() {
    for spec in specs() {
        let width = spec.heads * spec.head_dim;
        let q = random((300, width), 1);
        let (k, v) = keys(&spec, 300, 2);
        let (want, want_lse) = attention::forward(&q, &k, &v, &spec, &[0, 300], &[0, 300]).unwrap();
        let (want, want_lse) = (flat(&want), flat(&want_lse));
        for stored in [KvDtype::F32, KvDtype::Bf16] {
            // A bf16 page holds other numbers than the tensors, unless the products round them anyway.
            let exact = stored == KvDtype::F32 || spec.rounds();
            let mut whole = None;
            // Steps of the prompt beside the rows of a shorter one, and many prompts together.
            for (cuts, page_cuts) in [(vec![0, 300], vec![]), (vec![0, 1, 70, 71, 200, 300], vec![3, 129])] {
                let (mut o, mut lse) = (Vec::new(), Vec::new());
                for c in cuts.windows(2) {
                    let until = |t: &Tensor| t.narrow(0, 0, c[1]).unwrap();
                    let long = pages(&spec, stored, &until(&k), &until(&v), &page_cuts);
                    let short: Vec<Vec<Page>> = (0..30)
                        .map(|i| {
                            let part = |t: &Tensor| t.narrow(0, 0, 100 + i).unwrap();
                            pages(&spec, stored, &part(&k), &part(&v), &[])
                        })
                        .collect();
                    let new = c[1] - c[0];
                    let ends = [0, 2, 2 + new].into_iter().chain((1..30).map(|i| 2 + new + i));
                    let ends: Vec<usize> = ends.collect();
                    let texts = [&short[0], &long].into_iter().chain(&short[1..]);
                    let documents: Vec<PagedDocument> = texts
                        .zip(ends.windows(2))
                        .map(|(pages, d)| PagedDocument {
                            queries: d[0]..d[1],
                            pages: pages.iter().collect(),
                        })
                        .collect();
                    let part = |t: &Tensor, from: usize, n: usize| t.narrow(0, from, n).unwrap();
                    let rows = [part(&q, 98, 2), part(&q, c[0], new)].into_iter();
                    let rows: Vec<Tensor> = rows.chain((1..30).map(|i| part(&q, 99 + i, 1))).collect();
                    let (got, got_lse) = attend_in_blocks(&Tensor::cat(&rows, 0).unwrap(), &documents, &spec).unwrap();
                    o.extend(flat(&part(&got, 2, new).contiguous().unwrap()));
                    lse.extend(flat(&part(&got_lse, 2, new).contiguous().unwrap()));
                    // The rows of the other texts too.
                    for (at, row) in [(0, 98), (1, 99)]
                        .into_iter()
                        .chain((1..30).map(|i| (1 + new + i, 99 + i)))
                    {
                        let got = flat(&part(&got, at, 1).contiguous().unwrap());
                        if exact && CpuBackend::current() != CpuBackend::Portable {
                            assert_eq!(got, want[row * width..(row + 1) * width], "row {row}");
                        }
                    }
                }
                if CpuBackend::current() == CpuBackend::Portable {
                    // The order of the sums of the `gemm` crate depends on the sizes.
                    continue;
                }
                if exact {
                    assert_eq!((&o, &lse), (&want, &want_lse), "{stored:?} {cuts:?}");
                }
                let before = whole.get_or_insert((o.clone(), lse.clone()));
                assert_eq!(*before, (o, lse), "{stored:?} {cuts:?}");
            }
        }
    }
}

/// A window that begins in another part of the keys in each step.
#[test]
fn a_long_prompt_with_a_window_may_be_cut_anywhere() {
    if CpuBackend::current() == CpuBackend::Portable {
        // The order of the sums of the `gemm` crate depends on the sizes.
        return;
    }
    for bf16 in [false, true] {
        let (n, spec) = (
            1300,
            AttentionSpec {
                window: Some(700),
                bf16,
                ..specs()[0].clone()
            },
        );
        let (q, (k, v)) = (random((n, spec.heads * spec.head_dim), 1), keys(&spec, n, 2));
        let step = |from: usize, to: usize| {
            let until = |t: &Tensor| t.narrow(0, 0, to).unwrap();
            let pages = pages(&spec, KvDtype::F32, &until(&k), &until(&v), &[]);
            let document = PagedDocument {
                queries: 0..to - from,
                pages: pages.iter().collect(),
            };
            flat(
                &attend_in_blocks(&q.narrow(0, from, to - from).unwrap(), &[document], &spec)
                    .unwrap()
                    .0,
            )
        };
        let cuts = [0, 1030, 1200, n];
        let parts: Vec<f32> = cuts.windows(2).flat_map(|c| step(c[0], c[1])).collect();
        assert!(parts == step(0, n), "bf16 {bf16}");
    }
}

#[test]
fn attention_sees_what_is_stored_and_what_is_no_number_stays_so() {
    // An f32 model: in a bf16 model, products could round again the values that are stored as f32.
    for spec in specs().iter().filter(|spec| !spec.bf16) {
        let width = spec.heads * spec.head_dim;
        let (q, (k, v)) = (random((9, width), 1), keys(spec, 130, 2));
        let run = |stored, k: &Tensor, v: &Tensor| {
            let pages = pages(spec, stored, k, v, &[]);
            let document = PagedDocument {
                queries: 0..9,
                pages: pages.iter().collect(),
            };
            attend(&q, &[document], spec).unwrap().0
        };
        let exact = run(KvDtype::F32, &k, &v);
        for stored in [KvDtype::Bf16, KvDtype::Int8] {
            let got = run(stored, &k, &v);
            let want = run(
                KvDtype::F32,
                &read_back(&k, spec.head_dim, stored),
                &read_back(&v, spec.head_dim, stored),
            );
            assert_close(&got, &want, 1e-5);
            assert_ne!(flat(&got), flat(&exact));
            let mut bad = flat(&k);
            bad[129 * spec.kv_heads * spec.head_dim + 5] = f32::NAN;
            let bad = Tensor::from_vec(bad, k.dims(), &candle_core::Device::Cpu).unwrap();
            let got = flat(&run(stored, &bad, &v));
            let heads = spec.heads / spec.kv_heads * spec.head_dim;
            assert!(got[8 * width..][..heads].iter().all(|x| x.is_nan()));
            assert!(got[..8 * width].iter().all(|x| x.is_finite()));
        }
    }
    let bytes = |stored| form(&specs()[2], stored).page_bytes();
    assert_eq!(bytes(KvDtype::F32), 2 * 64 * 64 * 4);
    assert_eq!(bytes(KvDtype::Bf16), 2 * 64 * 64 * 2);
    assert_eq!(bytes(KvDtype::Int8), 2 * 64 * (64 + 4));
}

#[test]
fn a_page_can_be_cut_and_what_does_not_fit_is_an_error() {
    let spec = &specs()[0];
    let (form, stored) = (form(spec, KvDtype::F32), KvDtype::F32);
    let (k, v) = keys(spec, 30, 2);
    let q = random((1, 48), 1);
    let (mut long, short) = (
        pages(spec, stored, &k, &v, &[]),
        pages(
            spec,
            stored,
            &k.narrow(0, 0, 20).unwrap(),
            &v.narrow(0, 0, 20).unwrap(),
            &[],
        ),
    );
    long[0].truncate(20);
    let run = |pages: &[Page], queries: Range<usize>| {
        let document = PagedDocument {
            queries,
            pages: pages.iter().collect(),
        };
        attend(&q, &[document], spec)
    };
    assert_eq!(flat(&run(&long, 0..1).unwrap().0), flat(&run(&short, 0..1).unwrap().0));
    assert!(run(&[], 0..1).is_err());
    assert!(run(&short, 0..2).is_err());
    assert!(run(&short, 1..1).is_err());
    let other = Page::new(PageForm { head_dim: 4, ..form });
    assert!(run(&[other], 0..1).is_err());
}
