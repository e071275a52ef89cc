//! Causal attention over documents laid end to end, with grouped queries, a sliding window and a soft cap.
//! Memory is linear in the length: scores exist for a block of queries only; of the softmax the log-sum-exp is
//! kept, and the backward pass computes the probabilities again.
//!
//! q `[Nq, H·E]`, k and v `[Nk, K·E]`, o `[Nq, H·E]`, lse `[Nq, H]`. Query head h reads key head h / (H / K).
//! A score is `q·k scale`, then `cap tanh(score / cap)` if there is a cap, then the mask.

use super::cpu::storage::{expect_dims, expect_f32, floats, tensor};
use super::cpu::{attention as cpu, attention_backward};
use crate::base::{Error, Result};
use candle_core::Tensor;

/// The form of an attention.
#[derive(Debug, Clone)]
pub struct Spec {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub scale: f32,
    pub softcap: Option<f32>,
    /// With window w, query i sees the keys j with i - w < j <= i.
    pub window: Option<usize>,
}

impl Spec {
    pub(super) fn check(&self) -> Result<()> {
        if self.kv_heads == 0 || self.heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return Err(Error::new("query heads do not share the key heads evenly")
                .found(format!("{} and {}", self.heads, self.kv_heads)));
        }
        if self.head_dim == 0 {
            return Err(Error::new("an attention head has no elements"));
        }
        if self.window == Some(0) {
            return Err(Error::new("an attention window of 0 sees nothing"));
        }
        if self.softcap.is_some_and(|cap| cap.is_nan() || cap <= 0.0) {
            return Err(Error::new("an attention soft cap must be positive"));
        }
        Ok(())
    }

    fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    fn key_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// `documents` must be offsets from 0 to `tokens`, never falling.
fn check_documents(documents: &[usize], tokens: usize) -> Result<()> {
    let whole = documents.first() == Some(&0) && documents.last() == Some(&tokens);
    if whole && documents.is_sorted() {
        Ok(())
    } else {
        Err(Error::new("document offsets do not cover the tokens")
            .found(format!("{documents:?}"))
            .expected(format!("0 to {tokens}, rising")))
    }
}

/// Document d has the queries `q_documents[d]..q_documents[d + 1]` and the keys `k_documents[d]..`. Causal,
/// aligned at the end: its last query sees its last key, so one query on a cache of T keys is a decoding step.
/// Gives o and lse. Fails when shapes or offsets do not fit, or a document has more queries than keys.
pub fn forward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &Spec,
    q_documents: &[usize],
    k_documents: &[usize],
) -> Result<(Tensor, Tensor)> {
    spec.check()?;
    let (nq, nk) = (
        q.dims().first().copied().unwrap_or(0),
        k.dims().first().copied().unwrap_or(0),
    );
    expect_dims(q, "the queries", &[nq, spec.query_width()])?;
    expect_dims(k, "the keys", &[nk, spec.key_width()])?;
    expect_dims(v, "the values", &[nk, spec.key_width()])?;
    check_documents(q_documents, nq)?;
    check_documents(k_documents, nk)?;
    if q_documents.len() != k_documents.len() {
        return Err(Error::new("queries and keys have different numbers of documents")
            .found(q_documents.len() - 1)
            .expected(k_documents.len() - 1));
    }
    for (d, (q, k)) in q_documents.windows(2).zip(k_documents.windows(2)).enumerate() {
        if q[1] - q[0] > k[1] - k[0] {
            return Err(Error::new("a document has more queries than keys")
                .at(format!("document {d}"))
                .found(q[1] - q[0])
                .expected(format!("at most {}", k[1] - k[0])));
        }
    }
    on_gpu!(
        q,
        super::cuda::attention::forward(q, k, v, spec, q_documents, k_documents)
    );
    let mut o = vec![0f32; nq * spec.query_width()];
    let mut lse = vec![0f32; nq * spec.heads];
    floats(q, "the queries", |q| {
        floats(k, "the keys", |k| {
            floats(v, "the values", |v| {
                cpu::forward(q, k, v, spec, q_documents, k_documents, &mut o, &mut lse);
                Ok(())
            })
        })
    })?;
    Ok((tensor(o, (nq, spec.query_width()))?, tensor(lse, (nq, spec.heads))?))
}

/// From o and lse of `forward` (queries and keys in the same documents) and dout `[N, H·E]`: dq, dk and dv.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    o: &Tensor,
    lse: &Tensor,
    dout: &Tensor,
    spec: &Spec,
    documents: &[usize],
) -> Result<(Tensor, Tensor, Tensor)> {
    spec.check()?;
    let n = q.dims().first().copied().unwrap_or(0);
    let (wide, narrow) = ([n, spec.query_width()], [n, spec.key_width()]);
    let all = [
        (q, "the queries", wide),
        (k, "the keys", narrow),
        (v, "the values", narrow),
        (o, "the output of attention", wide),
        (lse, "the log-sum-exp of attention", [n, spec.heads]),
        (dout, "the gradient of attention", wide),
    ];
    for (t, name, dims) in all {
        expect_dims(t, name, &dims)?;
    }
    check_documents(documents, n)?;
    on_gpu!(
        q,
        super::cuda::attention::backward(q, k, v, o, lse, dout, spec, documents)
    );
    for (t, name, _) in all {
        expect_f32(t, name)?;
    }
    let guard = |i: usize, f: &mut dyn FnMut(&[f32]) -> Result<()>| floats(all[i].0, all[i].1, f);
    let mut result = None;
    guard(0, &mut |q| {
        guard(1, &mut |k| {
            guard(2, &mut |v| {
                guard(3, &mut |o| {
                    guard(4, &mut |lse| {
                        guard(5, &mut |dout| {
                            let saved = attention_backward::Saved { q, k, v, o, lse, dout };
                            result = Some(attention_backward::backward(&saved, spec, documents));
                            Ok(())
                        })
                    })
                })
            })
        })
    })?;
    let (dq, dk, dv) = result.ok_or_else(|| Error::new("attention did not run"))?;
    Ok((
        tensor(dq, &wide[..])?,
        tensor(dk, &narrow[..])?,
        tensor(dv, &narrow[..])?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::oracle::{assert_close, assert_same_on_any_threads, flat, random};
    use candle_core::{D, Device, Var};

    fn spec(heads: usize, kv_heads: usize, head_dim: usize) -> Spec {
        let scale = 1.0 / (head_dim as f32).sqrt();
        Spec {
            heads,
            kv_heads,
            head_dim,
            scale,
            softcap: None,
            window: None,
        }
    }

    /// 0 where query i of `queries` sees key j of `keys`, else far below every score.
    fn mask(queries: usize, keys: usize, window: Option<usize>) -> Tensor {
        let data: Vec<f32> = (0..queries * keys)
            .map(|at| (at / keys + keys - queries, at % keys))
            .map(|(i, j)| {
                let seen = j <= i && window.is_none_or(|w| j + w > i);
                if seen { 0.0 } else { -1e30 }
            })
            .collect();
        Tensor::from_vec(data, (queries, keys), &Device::Cpu).unwrap()
    }

    /// Whole score matrices, head by head: o `[Nq, H·E]` and lse `[Nq, H]`.
    fn composed(q: &Tensor, k: &Tensor, v: &Tensor, spec: &Spec, qd: &[usize], kd: &[usize]) -> (Tensor, Tensor) {
        let e = spec.head_dim;
        let (mut outs, mut sums) = (Vec::new(), Vec::new());
        for d in 0..qd.len() - 1 {
            let (queries, keys) = (qd[d + 1] - qd[d], kd[d + 1] - kd[d]);
            if queries == 0 {
                continue;
            }
            let mask = mask(queries, keys, spec.window);
            let (mut out, mut sum) = (Vec::new(), Vec::new());
            for head in 0..spec.heads {
                let kv = head / (spec.heads / spec.kv_heads);
                let q = q.narrow(0, qd[d], queries).unwrap().narrow(1, head * e, e).unwrap();
                let k = k.narrow(0, kd[d], keys).unwrap().narrow(1, kv * e, e).unwrap();
                let v = v.narrow(0, kd[d], keys).unwrap().narrow(1, kv * e, e).unwrap();
                let (q, v) = (q.contiguous().unwrap(), v.contiguous().unwrap());
                let k = k.t().unwrap().contiguous().unwrap();
                let mut s = (q.matmul(&k).unwrap() * spec.scale as f64).unwrap();
                if let Some(cap) = spec.softcap {
                    s = ((s / cap as f64).unwrap().tanh().unwrap() * cap as f64).unwrap();
                }
                let exp = (s + &mask).unwrap().exp().unwrap();
                let total = exp.sum_keepdim(D::Minus1).unwrap();
                out.push(exp.broadcast_div(&total).unwrap().matmul(&v).unwrap());
                sum.push(total.log().unwrap());
            }
            outs.push(Tensor::cat(&out, 1).unwrap());
            sums.push(Tensor::cat(&sum, 1).unwrap());
        }
        (Tensor::cat(&outs, 0).unwrap(), Tensor::cat(&sums, 0).unwrap())
    }

    fn cases() -> Vec<(Spec, Vec<usize>)> {
        let plain = spec(2, 2, 16);
        let grouped = spec(6, 2, 8);
        let window = Spec {
            window: Some(5),
            ..spec(4, 1, 12)
        };
        let wide_window = Spec {
            window: Some(70),
            ..spec(2, 1, 8)
        };
        let capped = Spec {
            softcap: Some(1.5),
            ..spec(4, 2, 16)
        };
        let both = Spec {
            softcap: Some(2.0),
            window: Some(3),
            scale: 0.7,
            ..spec(10, 5, 6)
        };
        vec![
            (plain.clone(), vec![0, 1]),
            (plain, vec![0, 40]),
            (grouped.clone(), vec![0, 3, 3, 70, 71, 200]),
            (grouped, vec![0, 130]),
            (window.clone(), vec![0, 150, 153]),
            (window, vec![0, 64, 128]),
            (wide_window, vec![0, 260]),
            (capped, vec![0, 65, 90]),
            (both, vec![0, 7, 80]),
        ]
    }

    #[test]
    fn matches_autograd() {
        for (spec, documents) in cases() {
            let n = documents[documents.len() - 1];
            let var = |width, seed| Var::from_tensor(&random((n, width), seed)).unwrap();
            let (q, k, v) = (
                var(spec.query_width(), 1),
                var(spec.key_width(), 2),
                var(spec.key_width(), 3),
            );
            let dout = random((n, spec.query_width()), 4);
            let (want, want_lse) = composed(&q, &k, &v, &spec, &documents, &documents);
            let grads = (&want * &dout).unwrap().sum_all().unwrap().backward().unwrap();
            let (o, lse) = forward(&q, &k, &v, &spec, &documents, &documents).unwrap();
            assert_close(&o, &want, 1e-5);
            assert_close(&lse, &want_lse, 1e-5);
            let (dq, dk, dv) = backward(&q, &k, &v, &o, &lse, &dout, &spec, &documents).unwrap();
            assert_close(&dk, grads.get(&k).unwrap(), 1e-5);
            assert_close(&dv, grads.get(&v).unwrap(), 1e-5);
            if n > 1 {
                assert_close(&dq, grads.get(&q).unwrap(), 1e-5);
            } else {
                // One key: the probability is 1 whatever q is; only rounding is left on either side.
                assert!(flat(&dq).iter().all(|x| x.abs() < 1e-5));
            }
        }
    }

    #[test]
    fn queries_after_cached_keys_are_aligned_at_the_end() {
        // A decoding step, a continued prompt, a document without queries, a whole document.
        let (qd, kd) = (vec![0, 1, 71, 71, 81], vec![0, 90, 190, 200, 210]);
        for spec in [
            spec(6, 2, 8),
            Spec {
                window: Some(20),
                ..spec(6, 3, 8)
            },
            Spec {
                softcap: Some(1.0),
                window: Some(1),
                ..spec(2, 1, 8)
            },
        ] {
            let q = random((81, spec.query_width()), 1);
            let (k, v) = (random((210, spec.key_width()), 2), random((210, spec.key_width()), 3));
            let (want, want_lse) = composed(&q, &k, &v, &spec, &qd, &kd);
            let (o, lse) = forward(&q, &k, &v, &spec, &qd, &kd).unwrap();
            assert_close(&o, &want, 1e-5);
            assert_close(&lse, &want_lse, 1e-5);
        }
    }

    #[test]
    fn documents_do_not_see_each_other() {
        let spec = spec(4, 2, 8);
        let run = |seed| {
            let rows = |width, s| {
                let own = random((30, width), s);
                Tensor::cat(&[&own, &random((20, width), seed + s)], 0).unwrap()
            };
            let (q, k, v) = (rows(32, 1), rows(16, 2), rows(16, 3));
            forward(&q, &k, &v, &spec, &[0, 30, 50], &[0, 30, 50]).unwrap().0
        };
        let first = |t: Tensor| flat(&t.narrow(0, 0, 30).unwrap());
        assert_eq!(first(run(10)), first(run(20)));
    }

    #[test]
    fn large_scores_stay_finite_and_nan_passes() {
        let spec = Spec {
            scale: 500.0,
            ..spec(1, 1, 4)
        };
        let (q, k, v) = (random((9, 4), 1), random((9, 4), 2), random((9, 4), 3));
        let (o, lse) = forward(&q, &k, &v, &spec, &[0, 9], &[0, 9]).unwrap();
        assert!(flat(&o).iter().chain(&flat(&lse)).all(|x| x.is_finite()));
        let mut bad = flat(&q);
        bad[8] = f32::NAN;
        let q = Tensor::from_vec(bad, (9, 4), &Device::Cpu).unwrap();
        let o = flat(&forward(&q, &k, &v, &spec, &[0, 9], &[0, 9]).unwrap().0);
        assert!(o[8..12].iter().all(|x| x.is_nan()) && o[12..].iter().all(|x| x.is_finite()));
    }

    #[test]
    fn bit_equal_on_any_number_of_threads() {
        for (spec, documents) in cases() {
            let n = documents[documents.len() - 1];
            let (q, dout) = (random((n, spec.query_width()), 1), random((n, spec.query_width()), 4));
            let (k, v) = (random((n, spec.key_width()), 2), random((n, spec.key_width()), 3));
            assert_same_on_any_threads(|| {
                let (o, lse) = forward(&q, &k, &v, &spec, &documents, &documents).unwrap();
                let (dq, dk, dv) = backward(&q, &k, &v, &o, &lse, &dout, &spec, &documents).unwrap();
                vec![o, lse, dq, dk, dv]
            });
        }
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let good = spec(4, 2, 8);
        let (q, k) = (random((5, 32), 1), random((5, 16), 2));
        let run = |spec: &Spec, qd: &[usize], kd: &[usize]| forward(&q, &k, &k, spec, qd, kd);
        assert!(run(&good, &[0, 5], &[0, 5]).is_ok());
        assert!(run(&good, &[0, 4], &[0, 5]).is_err());
        assert!(run(&good, &[0, 4, 2, 5], &[0, 2, 4, 5]).is_err());
        assert!(run(&good, &[0, 3, 5], &[0, 2, 5]).is_err());
        assert!(run(&good, &[0, 2, 5], &[0, 5]).is_err());
        assert!(
            run(
                &Spec {
                    window: Some(0),
                    ..good.clone()
                },
                &[0, 5],
                &[0, 5]
            )
            .is_err()
        );
        assert!(run(&spec(4, 3, 8), &[0, 5], &[0, 5]).is_err());
        assert!(run(&spec(8, 2, 8), &[0, 5], &[0, 5]).is_err());
    }
}
