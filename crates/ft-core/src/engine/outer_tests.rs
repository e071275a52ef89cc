//! Ranks that train alone between averages, against ranks that are trained one after the other and averaged by hand; the
//! bytes and seconds of an average and of a step.

use super::outer::OuterConfig;
use super::ranks_tests::{self, Case, FULL, batches};
use super::{ActiveSet, Engine, GradientExchange, UpdateExchange, sent_bytes};
use crate::comm::threads::CountingComm;
use crate::comm::{Collective, SingleRank, threads};
use crate::data::Batch;
use crate::ops::Dtype;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

const EVERY: u64 = 2;
const LAST: u64 = 3;

const PAPER: OuterConfig = OuterConfig {
    every: EVERY,
    last: LAST,
    learning_rate: 0.7,
    momentum: 0.9,
    nesterov: true,
    proximal: 0.0,
};

/// Without noise on the embeddings, which depends on the number of a row among the rows of all ranks.
fn engine(case: Case, comm: Arc<dyn Collective>) -> (Engine, ActiveSet) {
    let (mut engine, active) = ranks_tests::engine(case, comm);
    engine.neftune_noise_alpha = 0.0;
    (engine, active)
}

fn exact(engine: &Engine, active: &ActiveSet) -> BTreeMap<String, Vec<f32>> {
    let of = |name: &str| {
        let tensor = engine.network.param(name).unwrap().tensor;
        (name.to_string(), engine.optimizer.exact(name, &tensor).unwrap())
    };
    active.names().map(of).collect()
}

/// The micro-batches of one rank of `size`.
fn own(all: &[Batch], rank: usize, size: usize) -> Vec<Batch> {
    let filled = all.iter().filter(|batch| !batch.is_empty());
    filled.skip(rank).step_by(size).cloned().collect()
}

/// `size` engines that know nothing of each other, and the average written out: the weights after each step on rank 0.
fn by_hand(case: Case, outer: OuterConfig, size: usize) -> Vec<BTreeMap<String, Vec<f32>>> {
    let mut engines: Vec<_> = (0..size)
        .map(|_| engine(case, Arc::new(SingleRank::default())))
        .collect();
    let mut start = exact(&engines[0].0, &engines[0].1);
    let mut momentum: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    let mut out = Vec::new();
    for step in 1..=LAST {
        for (rank, (engine, active)) in engines.iter_mut().enumerate() {
            let batches = own(&batches(4, step as u32), rank, size);
            engine.step(step, &batches, active, 1e-3).unwrap();
        }
        if step % EVERY == 0 || step == LAST {
            let all: Vec<_> = engines.iter().map(|(engine, active)| exact(engine, active)).collect();
            for (name, start) in &mut start {
                let first = !momentum.contains_key(name);
                let buffer = momentum.entry(name.clone()).or_insert(vec![0.0; start.len()]);
                for (i, w) in start.iter_mut().enumerate() {
                    let mut mean = all[0][name][i];
                    all[1..].iter().for_each(|rank| mean += rank[name][i]);
                    mean /= size as f32;
                    let (rate, factor, gradient) = (outer.learning_rate as f32, outer.momentum as f32, *w - mean);
                    buffer[i] = if first { gradient } else { factor * buffer[i] + gradient };
                    *w -= rate
                        * if outer.nesterov {
                            gradient + factor * buffer[i]
                        } else {
                            buffer[i]
                        };
                }
                for (engine, _) in &mut engines {
                    let tensor = engine.network.param(name).unwrap().tensor;
                    engine.optimizer.restore_weight(name, &tensor, start).unwrap();
                }
            }
        }
        out.push(exact(&engines[0].0, &engines[0].1));
    }
    out
}

#[test]
fn ranks_that_train_alone_have_the_bits_of_an_average_by_hand() {
    let bf16 = Case {
        dtype: Dtype::Bf16,
        part: "layers.1.",
        ..FULL
    };
    let small = Case {
        part: "layers.0.mlp",
        ..FULL
    };
    let heavy = OuterConfig {
        nesterov: false,
        ..PAPER
    };
    for (case, outer, size) in [(bf16, heavy, 3), (small, PAPER, 2)] {
        let want = by_hand(case, outer, size);
        let found = threads::run(size, |comm| {
            let (mut engine, active) = engine(case, comm);
            engine.train_apart(outer);
            let mut steps = Vec::new();
            for step in 1..=LAST {
                engine.step(step, &batches(4, step as u32), &active, 1e-3).unwrap();
                assert_eq!(engine.is_synchronized(), step % EVERY == 0 || step == LAST);
                steps.push(exact(&engine, &active));
            }
            steps
        });
        assert!(found[0] == want, "{:?} on {size} ranks, {outer:?}", case.dtype);
        assert!(found[1][0] != want[0], "the ranks train on other rows");
        assert!(found.iter().all(|rank| rank[1] == want[1] && rank[2] == want[2]));
    }
}

#[test]
fn a_proximal_term_pulls_each_rank_to_the_last_average() {
    let case = Case {
        part: "layers.0.mlp",
        max_grad_norm: 0.0,
        ..FULL
    };
    let distance = |proximal: f64| {
        let found = threads::run(2, |comm| {
            let (mut engine, active) = engine(case, comm);
            engine.train_apart(OuterConfig {
                every: 100,
                last: 100,
                proximal,
                ..PAPER
            });
            let start = exact(&engine, &active);
            for step in 1..=4 {
                engine.step(step, &batches(2, 1), &active, 1e-3).unwrap();
            }
            let end = exact(&engine, &active);
            let squares = |(name, end): (&String, &Vec<f32>)| -> f64 {
                let pairs = end.iter().zip(&start[name]);
                pairs.map(|(a, b)| f64::from(a - b).powi(2)).sum()
            };
            end.iter().map(squares).sum::<f64>().sqrt()
        });
        found[1]
    };
    let (free, held) = (distance(0.0), distance(1e4));
    assert!(held < 0.7 * free, "{held} with the term, {free} without");
}

/// Bytes per second of the connection.
const RATE: f64 = 1e6;

/// The seconds of a step, or of `EVERY` steps and their average, on a slow connection, and the bytes of the rank that sends
/// most. Checks the bytes.
fn seconds(apart: bool) -> (f64, u64) {
    let case = Case {
        part: "layers.3.mlp.down",
        ..FULL
    };
    let sent = Arc::new(AtomicU64::new(0));
    let clocks = Arc::new(threads::Clocks::default());
    let found = threads::run(2, |comm| {
        let place = (comm.world().rank, 2);
        let counting: Arc<dyn Collective> = Arc::new(CountingComm::new(comm, sent.clone(), Arc::default()));
        let slowed = Arc::new(threads::SlowComm::new(counting, RATE, clocks.clone()));
        let (mut engine, active) = engine(case, slowed.clone());
        if apart {
            engine.train_apart(OuterConfig { last: 2, ..PAPER });
        }
        let elements = |name: &str| engine.elements(name).unwrap() as u64;
        let names = active.names().map(|name| (name, elements(name), UpdateExchange::F32));
        let exchange = GradientExchange {
            window: apart,
            ..GradientExchange::default()
        };
        let planned = sent_bytes(names, 2, place, !apart, exchange, false);
        for step in 1..=if apart { EVERY } else { 1 } {
            engine.step(step, &batches(2, 1), &active, 1e-3).unwrap();
        }
        (slowed.seconds(), planned)
    });
    let planned: u64 = found.iter().map(|(_, planned)| planned).sum();
    assert_eq!(4 * sent.load(SeqCst), planned, "apart: {apart}");
    let slowest = found.iter().map(|(seconds, _)| *seconds).fold(0.0, f64::max);
    (slowest, found.iter().map(|(_, planned)| *planned).max().unwrap())
}

/// The bytes of a step or an average, and the seconds of the plan: a lower bound, because in an operation every rank waits for the
/// one that sends most.
#[test]
fn a_slow_connection_takes_the_seconds_that_the_plan_says() {
    for apart in [false, true] {
        let (seconds, bytes) = seconds(apart);
        let ratio = seconds * RATE / bytes as f64;
        assert!(
            (1.0 - 1e-9..1.1).contains(&ratio),
            "{seconds} s for {bytes} bytes, apart: {apart}"
        );
    }
}
