//! Attention of ranks that share the tokens: the outputs of one rank as bits, and its gradients.

use super::*;
use crate::base::rng::{Rng, Stream};
use crate::comm::threads;
use crate::data::Example;
use crate::ops::CpuBackend;

fn random(rows: usize, width: usize, seed: u64) -> Tensor {
    let rng = Rng::new(seed, Stream::Init, &[]);
    let values: Vec<f32> = (0..rows * width).map(|i| rng.normal(i as u64)).collect();
    Tensor::from_vec(values, (rows, width), &Device::Cpu).unwrap()
}

fn grad_inputs([q, k, v, o, lse, dout]: [&Tensor; 6]) -> AttentionGradInputs<&Tensor> {
    AttentionGradInputs { q, k, v, o, lse, dout }
}

/// Documents of these lengths.
fn batch(lengths: &[usize]) -> Batch {
    let row = |t: &usize| Example {
        ids: vec![1; *t],
        trained: vec![true; *t],
    };
    Batch::from_examples(lengths.iter().map(row))
}

fn bits(t: &Tensor) -> Vec<u32> {
    let values: Vec<f32> = t.flatten_all().unwrap().to_vec1().unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

/// Largest difference, relative to the largest value.
fn difference(found: &Tensor, want: &Tensor) -> f32 {
    let largest = |t: &Tensor| t.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
    largest(&(found - want).unwrap()) / largest(want)
}

#[test]
fn attention_has_the_bits_of_one_rank_and_its_gradients() {
    let spec = |heads, kv_heads, window| Heads {
        heads,
        kv_heads,
        head_dim: 8,
        scale: 0.3,
        softcap: None,
        window,
        bf16: false,
    };
    // The ends of documents are between, at and outside of the cuts; rows of 130 tokens are several blocks.
    let batches = [batch(&[5, 20, 1, 14]), batch(&[40, 130, 70]), batch(&[4])];
    // Several chunks of keys (`KEY_CHUNK`), and windows that begin in one of them.
    let long = [batch(&[40, 2400])];
    let short = [
        (spec(4, 2, None), 2, SequenceBy::Heads),
        (spec(4, 2, Some(33)), 4, SequenceBy::Heads),
        // A key head serves query heads of two ranks, together with others.
        (spec(12, 4, None), 2, SequenceBy::Heads),
        (spec(6, 2, None), 3, SequenceBy::Heads),
        (spec(4, 2, None), 2, SequenceBy::Keys),
        (spec(3, 1, Some(33)), 4, SequenceBy::Auto),
        (spec(3, 3, None), 4, SequenceBy::Auto),
    ];
    let long_cases = [
        (spec(2, 1, Some(700)), 4, SequenceBy::Keys),
        (spec(2, 1, None), 4, SequenceBy::Keys),
        (spec(2, 2, Some(700)), 2, SequenceBy::Heads),
    ];
    let short = short.into_iter().map(|case| (case, &batches[..]));
    for ((spec, ranks, by), batches) in short.chain(long_cases.map(|case| (case, &long[..]))) {
        for batch in batches {
            let (n, wide, narrow) = (batch.len(), spec.heads * 8, spec.kv_heads * 8);
            let (q, k, v) = (random(n, wide, 1), random(n, narrow, 2), random(n, narrow, 3));
            let d = random(n, wide, 4);
            let docs = &batch.documents[..];
            let (o, lse) = attention::forward(&q, &k, &v, &spec, docs, docs).unwrap();
            let (dq, dk, dv) = attention::backward(grad_inputs([&q, &k, &v, &o, &lse, &d]), &spec, docs).unwrap();
            // Two groups of ranks share a micro-batch each.
            let size = if ranks == 2 { 4 } else { ranks };
            let inputs = [&q, &k, &v, &d].map(|t| t.to_vec2::<f32>().unwrap());
            let found = threads::run(size, |comm| {
                let sequence = SequenceRanks::new(&*comm, SequenceConfig { ranks, by }, batch).unwrap();
                let own = sequence.own();
                assert_eq!(sequence.part(batch).unwrap().len(), own.len());
                let cut = |i: usize| Tensor::new(inputs[i][own.clone()].to_vec(), &Device::Cpu).unwrap();
                let (q, k, v, d) = (cut(0), cut(1), cut(2), cut(3));
                let (o, lse) = sequence.forward(&q, &k, &v, &spec).unwrap();
                let (dq, dk, dv) = sequence
                    .backward(grad_inputs([&q, &k, &v, &o, &lse, &d]), &spec)
                    .unwrap();
                [o, lse, dq, dk, dv]
            });
            for team in found.chunks(ranks) {
                let whole = |i: usize| {
                    let parts: Vec<&Tensor> = team.iter().map(|rank| &rank[i]).collect();
                    Tensor::cat(&parts, 0).unwrap()
                };
                let case = format!(
                    "{} heads, {} keys, {ranks} ranks, {by:?}, {docs:?}",
                    spec.heads, spec.kv_heads
                );
                if CpuBackend::current() == CpuBackend::Portable {
                    // The `gemm` crate chooses the order of a sum by the size of a product.
                    assert!(difference(&whole(0), &o) < 1e-6, "o: {case}");
                    assert!(difference(&whole(1), &lse) < 1e-6, "lse: {case}");
                } else {
                    assert!(bits(&whole(0)) == bits(&o), "o: {case}");
                    assert!(bits(&whole(1)) == bits(&lse), "lse: {case}");
                }
                assert!(difference(&whole(2), &dq) < 1e-6, "dq: {case}");
                for (i, want) in [(3, &dk), (4, &dv)] {
                    let difference = difference(&whole(i), want);
                    assert!(difference < 1e-6, "gradient {i}: {difference}, {case}");
                }
            }
        }
    }
}

#[test]
fn what_cannot_be_shared_is_an_error() {
    let config = SequenceConfig {
        ranks: 2,
        by: SequenceBy::Auto,
    };
    for error in threads::run(2, |comm| {
        let few = batch(&[1]);
        let mut columns = batch(&[4]);
        columns.columns.documents.insert("x", vec![1.0]);
        let error = SequenceRanks::new(&*comm, config, &few).err().unwrap().to_string();
        let sequence = SequenceRanks::new(&*comm, config, &columns).unwrap();
        error + &sequence.part(&columns).err().unwrap().to_string()
    }) {
        assert!(
            error.contains("fewer tokens than ranks") && error.contains("whole documents"),
            "{error}"
        );
    }
}
