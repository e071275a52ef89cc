//! Attention sinks, as in gpt-oss: each head has a learned logit s in the denominator of its softmax, to which no value
//! belongs. They are applied to the results of attention without sinks:
//!
//! ```text
//! lse' = log(e^lse + e^s),    o' = o · e^(lse - lse')
//! ```
//!
//! A probability is then e^(score - lse'), so `attention::backward` computes dq, dk and dv from o' and lse' as it is, and
//! ds = -Σ e^(s - lse') · (dout · o') over the queries.
//!
//! o and dout `[N, H·E]`, lse `[N, H]`, s `[H]` f32 or bf16.

use super::super::cpu::storage::{expect_dims, floats, tensor, values, wrong_shape};
use super::super::update;
use candle_core::Tensor;
use ft_base::Result;
use rayon::prelude::*;

/// Queries of a partial sum.
const ROWS: usize = 64;

/// Returns N, H and E.
fn sizes(o: &Tensor, lse: &Tensor, sinks: &Tensor) -> Result<(usize, usize, usize)> {
    let heads = sinks.elem_count();
    expect_dims(sinks, "the attention sinks", &[heads])?;
    let rows = o.dims().first().copied().unwrap_or(0);
    expect_dims(lse, "the log-sum-exp of attention", &[rows, heads])?;
    match o.dims() {
        &[_, width] if heads > 0 && width % heads == 0 => Ok((rows, heads, width / heads)),
        _ => Err(wrong_shape(o, "the output of attention", &format!("{heads} heads"))),
    }
}

/// log(e^a + e^b).
fn log_sum(a: f32, b: f32) -> f32 {
    let most = a.max(b);
    most + ((a - most).exp() + (b - most).exp()).ln()
}

/// Changes o `[N, H·E]` and lse `[N, H]` of `attention::forward` in place; `sinks` `[H]`.
///
/// # Errors
/// Shapes that do not fit.
pub fn apply(o: &Tensor, lse: &Tensor, sinks: &Tensor) -> Result<()> {
    let (_, heads, size) = sizes(o, lse, sinks)?;
    on_gpu!(o, crate::cuda::attention_sinks::apply(o, lse, sinks, size));
    let sinks = values(sinks, "the attention sinks", |s| Ok(s.to_f32()))?;
    let mut factors = Vec::new();
    update::with_slice_mut(lse, |lse| {
        factors = (lse.par_iter_mut().enumerate())
            .map(|(i, lse)| {
                let (before, sink) = (*lse, sinks[i % heads]);
                *lse = log_sum(before, sink);
                // The difference of lse' and lse would have their rounding errors.
                1.0 / (1.0 + (sink - before).exp())
            })
            .collect();
    })?;
    update::with_slice_mut(o, |o| {
        let rows = o.par_chunks_mut(size).zip(&factors);
        rows.for_each(|(head, factor)| head.iter_mut().for_each(|x| *x *= factor));
    })
}

/// The gradient of the sinks, `[H]` f32, from o and lse after `apply`.
///
/// # Errors
/// Shapes that do not fit.
pub fn backward(o: &Tensor, lse: &Tensor, dout: &Tensor, sinks: &Tensor) -> Result<Tensor> {
    let (_, heads, size) = sizes(o, lse, sinks)?;
    expect_dims(dout, "the gradient of attention", o.dims())?;
    on_gpu!(o, crate::cuda::attention_sinks::backward(o, lse, dout, sinks, size));
    let sinks = values(sinks, "the attention sinks", |s| Ok(s.to_f32()))?;
    let width = heads * size;
    let mut ds = vec![0f64; heads];
    floats(o, "the output of attention", |o| {
        floats(lse, "the log-sum-exp of attention", |lse| {
            floats(dout, "the gradient of attention", |dout| {
                // The parts are added in their order: equal on any number of threads.
                let parts: Vec<Vec<f64>> = (o.par_chunks(ROWS * width))
                    .zip(dout.par_chunks(ROWS * width))
                    .zip(lse.par_chunks(ROWS * heads))
                    .map(|((o, dout), lse)| {
                        let mut sums = vec![0f64; heads];
                        let rows = o.chunks(size).zip(dout.chunks(size)).zip(lse);
                        for (i, ((o, dout), lse)) in rows.enumerate() {
                            let dot: f64 = o.iter().zip(dout).map(|(a, b)| f64::from(a * b)).sum();
                            sums[i % heads] -= f64::from((sinks[i % heads] - lse).exp()) * dot;
                        }
                        sums
                    })
                    .collect();
                for part in parts {
                    ds.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
                }
                Ok(())
            })
        })
    })?;
    tensor(ds.into_iter().map(|x| x as f32).collect(), heads)
}

#[cfg(test)]
mod tests {
    use super::super::{
        AttentionGradInputs, AttentionSpec, backward as attention_backward, forward as attention_forward,
    };
    use super::*;
    use crate::oracle::{assert_close, assert_same_on_any_threads, random};
    use candle_core::{D, Device, Var};

    const SPEC: AttentionSpec = AttentionSpec {
        heads: 4,
        kv_heads: 2,
        head_dim: 6,
        scale: 0.7,
        softcap: None,
        window: Some(5),
        bf16: false,
    };
    const DOCUMENTS: [usize; 3] = [0, 9, 21];
    const N: usize = 21;

    /// Attention of all documents in plain tensor operations, with a column for the sink.
    fn composed(q: &Tensor, k: &Tensor, v: &Tensor, sinks: &Tensor) -> Tensor {
        let split = |t: &Tensor, heads: usize| t.reshape((N, heads, SPEC.head_dim)).unwrap().transpose(0, 1).unwrap();
        let repeat = |t: Tensor| {
            let shape = (SPEC.kv_heads, 2, N, SPEC.head_dim);
            let wide = t.unsqueeze(1).unwrap().broadcast_as(shape).unwrap();
            wide.reshape((SPEC.heads, N, SPEC.head_dim)).unwrap()
        };
        let (q, k, v) = (
            split(q, 4).contiguous().unwrap(),
            repeat(split(k, 2)),
            repeat(split(v, 2)),
        );
        let document = |i: usize| usize::from(i >= DOCUMENTS[1]);
        let mask: Vec<f32> = (0..N * N)
            .map(|at| {
                let (i, j) = (at / N, at % N);
                let seen = document(i) == document(j) && j <= i && i < j + 5;
                if seen { 0.0 } else { f32::NEG_INFINITY }
            })
            .collect();
        let mask = Tensor::from_vec(mask, (1, N, N), &Device::Cpu).unwrap();
        let scores = (q.matmul(&k.transpose(1, 2).unwrap().contiguous().unwrap()).unwrap() * 0.7).unwrap();
        let scores = scores.broadcast_add(&mask).unwrap();
        let sink = sinks.reshape((4, 1, 1)).unwrap().broadcast_as((4, N, 1)).unwrap();
        let all = Tensor::cat(&[&scores, &sink.contiguous().unwrap()], 2).unwrap();
        let most = all.max_keepdim(D::Minus1).unwrap().detach();
        let weights = all.broadcast_sub(&most).unwrap().exp().unwrap();
        let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1).unwrap()).unwrap();
        let o = weights
            .narrow(2, 0, N)
            .unwrap()
            .contiguous()
            .unwrap()
            .matmul(&v.contiguous().unwrap());
        o.unwrap().transpose(0, 1).unwrap().reshape((N, 24)).unwrap()
    }

    #[test]
    fn matches_autograd() {
        let var = |width: usize, seed| Var::from_tensor(&random((N, width), seed)).unwrap();
        let (q, k, v) = (var(24, 1), var(12, 2), var(12, 3));
        let sinks = Var::from_tensor(&Tensor::new(&[0.5f32, -2.0, 3.0, 40.0], &Device::Cpu).unwrap()).unwrap();
        let dout = random((N, 24), 4);
        let want = composed(&q, &k, &v, &sinks);
        let grads = (&want * &dout).unwrap().sum_all().unwrap().backward().unwrap();
        let (o, lse) = attention_forward(&q, &k, &v, &SPEC, &DOCUMENTS, &DOCUMENTS).unwrap();
        apply(&o, &lse, &sinks).unwrap();
        assert_close(&o, &want, 1e-5);
        let ds = backward(&o, &lse, &dout, &sinks).unwrap();
        assert_close(&ds, grads.get(&sinks).unwrap(), 1e-5);
        let inputs = AttentionGradInputs {
            q: q.as_tensor(),
            k: k.as_tensor(),
            v: v.as_tensor(),
            o: &o,
            lse: &lse,
            dout: &dout,
        };
        let (dq, dk, dv) = attention_backward(inputs, &SPEC, &DOCUMENTS).unwrap();
        assert_close(&dq, grads.get(&q).unwrap(), 1e-5);
        assert_close(&dk, grads.get(&k).unwrap(), 1e-5);
        assert_close(&dv, grads.get(&v).unwrap(), 1e-5);
    }

    #[test]
    fn bit_equal_on_any_number_of_threads() {
        let (lse, dout, sinks) = (random((333, 3), 2), random((333, 12), 3), random(3, 4));
        assert_same_on_any_threads(|| {
            let (o, lse) = (random((333, 12), 1), lse.copy().unwrap());
            apply(&o, &lse, &sinks).unwrap();
            let ds = backward(&o, &lse, &dout, &sinks).unwrap();
            vec![o, lse, ds]
        });
    }

    #[test]
    fn shapes_must_fit() {
        let (o, lse) = (random((4, 12), 1), random((4, 3), 2));
        assert!(apply(&o, &lse, &random(2, 3)).is_err());
        assert!(apply(&o, &random((5, 3), 2), &random(3, 3)).is_err());
        assert!(backward(&o, &lse, &random((4, 6), 1), &random(3, 3)).is_err());
    }
}
