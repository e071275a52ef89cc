//! Steps of ranks that share micro-batches.

use super::ranks_tests::{Case, FULL, batches, engine};
use super::sinks::CollectGradients;
use super::{GradientPass, UpdateExchange, sent_bytes};
use crate::base::{Error, Result};
use crate::comm::threads::CountingComm;
use crate::comm::{Collective, SingleRank, threads};
use crate::data::Batch;
use crate::distill::{Distill, DistillTerms, StoredOutputs, Teacher};
use crate::model::sequence::sequence_bytes;
use crate::model::{SequenceBy, SequenceConfig};
use crate::ops::distill::TopK;
use crate::ops::step_stats::StepStats;
use crate::ops::{Dtype, update};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// Two steps: losses and norms, the evaluated loss, the weights, and the bytes that the second step sent and should send.
fn train(case: Case, config: SequenceConfig, comm: Arc<dyn Collective>) -> (Vec<f64>, Vec<f32>, [u64; 2]) {
    let (rank, size) = (comm.world().rank, comm.world().size);
    let sent = Arc::new(AtomicU64::new(0));
    let (mut engine, active) = engine(case, Arc::new(CountingComm::new(comm, sent.clone(), Arc::default())));
    engine.sequence = config;
    let mut numbers = Vec::new();
    let mut bytes = [0, 0];
    for step in 1..=2 {
        sent.store(0, SeqCst);
        let all = batches(3, step);
        let report = engine.step(step.into(), &all, &active, 1e-3).unwrap();
        bytes[0] = 4 * sent.load(SeqCst);
        numbers.extend([report.totals.loss(), report.grad_norm, report.totals.correct as f64]);
        let filled: Vec<_> = all.iter().filter(|batch| !batch.is_empty()).collect();
        let teams = size / config.ranks;
        let (lowest, saved) = (active.lowest_layer(engine.network.layers()), case.saved_layers);
        let shared = (0..filled.len().div_ceil(teams)).map(|round| {
            let micro = (round * teams + rank / config.ranks).min(filled.len() - 1);
            sequence_bytes(
                &engine.network.spec,
                config,
                &filled[micro].documents,
                lowest,
                saved,
                rank,
            )
        });
        let sizes = active
            .names()
            .map(|name| (name, engine.elements(name).unwrap() as u64, UpdateExchange::F32));
        let contributions = (filled.len() * config.ranks) as u64;
        bytes[1] = shared.sum::<u64>()
            + sent_bytes(
                sizes,
                contributions,
                (rank, size),
                engine.is_divided(),
                case.exchange,
                false,
            );
    }
    let evaluated = engine.evaluate(&batches(3, 9)[0]).unwrap();
    numbers.push(evaluated.loss_sum);
    // Weights in parts are in no one's memory as a whole.
    let weights = active
        .names()
        .filter(|_| !case.sharded)
        .flat_map(|name| update::to_f32_vec(&engine.network.param(name).unwrap().tensor).unwrap());
    let weights = weights.collect();
    (numbers, weights, bytes)
}

/// A batch with fewer tokens than ranks is evaluated by one rank, and then the other group does not share its batch either.
#[test]
fn a_short_batch_of_one_group_keeps_the_ranks_in_step() {
    let whole = batches(3, 9).swap_remove(0);
    let short = Batch {
        ids: whole.ids[..1].to_vec(),
        positions: whole.positions[..1].to_vec(),
        targets: whole.targets[..1].to_vec(),
        documents: vec![0, 1],
        columns: Default::default(),
    };
    let both = [whole, short];
    let want = both.each_ref().map(|batch| {
        let (engine, _) = engine(FULL, Arc::new(SingleRank::default()));
        engine.evaluate(batch).unwrap().loss_sum
    });
    let found = threads::run(4, |comm| {
        let group = comm.world().rank / 2;
        let (mut engine, _) = engine(FULL, comm);
        engine.sequence = SequenceConfig {
            ranks: 2,
            by: SequenceBy::Keys,
        };
        engine.evaluate(&both[group]).unwrap().loss_sum
    });
    assert_eq!([found[0] + found[1], found[2] + found[3]], want);
}

/// A teacher whose outputs must not be read.
struct NoOutputs;

impl StoredOutputs for NoOutputs {
    fn of(&self, _: &Batch) -> Result<TopK> {
        Err(Error::internal("the outputs of the teacher were read"))
    }

    fn common(&self) -> usize {
        1
    }
}

/// The part of a document that one rank has would give the teacher another context than the student.
#[test]
fn a_teacher_of_tokens_that_ranks_share_is_refused() {
    let errors = threads::run(2, |comm| {
        let (engine, active) = engine(FULL, comm.clone());
        let (teacher, vocab) = (Teacher::Stored(Box::new(NoOutputs)), engine.network.spec.vocab);
        let distill = Distill::new(teacher, DistillTerms::default(), None, vocab).unwrap();
        let step_stats = StepStats::new(&engine.network.device).unwrap();
        let config = SequenceConfig {
            ranks: 2,
            by: SequenceBy::Auto,
        };
        let pass = GradientPass {
            comm: &*comm,
            sequence: config,
            ..GradientPass::new(&engine.network, &distill, &active, &step_stats)
        };
        let mut sink = CollectGradients {
            active: &active,
            gradients: BTreeMap::new(),
        };
        pass.window(&batches(2, 1), &mut sink).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("reads whole documents"), "{error}");
    }
}

#[test]
fn ranks_that_share_micro_batches_train_as_one() {
    let block = Case {
        part: "layers.1.",
        saved_layers: 1,
        ..FULL
    };
    let convolution = Case {
        convolution: true,
        ..FULL
    };
    let plain = SequenceConfig::default();
    for (case, size, ranks, by) in [
        (FULL, 2, 2, SequenceBy::Auto),
        (FULL, 4, 2, SequenceBy::Keys),
        (block, 4, 4, SequenceBy::Auto),
        (Case { sharded: true, ..FULL }, 2, 2, SequenceBy::Keys),
        (convolution, 2, 2, SequenceBy::Auto),
        (
            Case {
                saved_layers: 2,
                ..convolution
            },
            4,
            4,
            SequenceBy::Keys,
        ),
    ] {
        assert!(case.dtype == Dtype::F32);
        let (want, want_weights, _) = train(Case { sharded: false, ..case }, plain, Arc::new(SingleRank::default()));
        let config = SequenceConfig { ranks, by };
        let found = threads::run(size, |comm| train(case, config, comm));
        let evaluated: f64 = found[..ranks].iter().map(|(numbers, ..)| numbers[6]).sum();
        for (rank, (mut numbers, weights, bytes)) in found.into_iter().enumerate() {
            numbers[6] = evaluated;
            for (found, want) in numbers.iter().zip(&want) {
                assert!(
                    (found - want).abs() <= 1e-6 * want.abs(),
                    "{size} ranks by {ranks}, {by:?}: {numbers:?}, {want:?}"
                );
            }
            if case.sharded {
                continue;
            }
            // Adam divides by the gradient, so a tiny one may change the sign of its update of 1e-3.
            let far = weights
                .iter()
                .zip(&want_weights)
                .filter(|(a, b)| (*a - *b).abs() > 1e-5)
                .count();
            assert!(
                far * 10_000 < weights.len(),
                "rank {rank}: {far} of {} weights",
                weights.len()
            );
            assert_eq!(bytes[0], bytes[1], "bytes of rank {rank} of {size}, {by:?}");
        }
    }
}
