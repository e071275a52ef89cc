//! Weights that the ranks of each machine store together: the bits of one rank also after everything that changes own parts,
//! and the bytes that travel between machines.

use super::ranks_tests::{Case, FULL, averaged, batches, engine};
use super::sharded_tests::train_in_parts;
use crate::base::Result;
use crate::comm::threads::{self, CountingComm};
use crate::comm::{Collective, SingleRank, part_of};
use crate::formats::weights::Weights;
use crate::ops::Dtype;
use crate::quant::Format;
use crate::source::sharded::{collections, is_in_parts};
use crate::source::{Group, ParamInfo};
use candle_core::{Device, Tensor};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

const BF16: Case = Case {
    dtype: Dtype::Bf16,
    in_node: true,
    ..FULL
};
const NF4: Case = Case {
    format: Some(Format::Nf4 { double: true }),
    ..BF16
};

/// Blocks with switches. Each change of own parts is followed by a forward pass that needs the copies.
#[test]
fn weights_in_each_machine_have_the_bits_of_whole_weights() {
    let int8 = Case {
        dtype: Dtype::F32,
        format: Some(Format::Int8 { group: 0 }),
        ..BF16
    };
    let [up_bf16, up_nf4] = [BF16, NF4].map(|case| Case { uploaded: true, ..case });
    let cases: [(Case, &[&[&str]]); 5] = [
        (
            BF16,
            &[
                &["a", "a", "b", "b"],
                &["a", "b", "c", "d"],
                &["a", "a"],
                &["a", "b", "b", "a"],
            ],
        ),
        (NF4, &[&["a", "a", "b", "b"], &["a", "b"]]),
        (int8, &[&["a", "b"]]),
        (up_bf16, &[&["a", "a", "b", "b"]]),
        (up_nf4, &[&["a", "b"]]),
    ];
    for (case, jobs) in cases {
        let want = train_in_parts(case, Arc::new(SingleRank::default())).unwrap();
        for hosts in jobs {
            let found = threads::run_on(hosts, |comm| train_in_parts(case, comm).unwrap());
            assert!(found[0] == want, "{:?} {:?} on {hosts:?}", case.dtype, case.format);
            assert!(
                found[1..]
                    .iter()
                    .all(|found| want.starts_with(found) && found.len() > 8)
            );
        }
    }
}

#[test]
fn averages_in_each_machine_have_the_bits_of_one_rank() {
    let (bits, saved) = averaged(BF16, Arc::new(SingleRank::default())).unwrap();
    let all = threads::run_on(&["a", "a", "b", "b"], |comm| averaged(BF16, comm).unwrap());
    for (rank, (own, stored)) in all.iter().enumerate() {
        assert_eq!(own[0], bits[0], "rank {rank}");
        assert!(rank > 0 || *stored == saved);
    }
}

/// The exact values of all parameters after a step, on rank 0.
fn exact_values(case: Case, comm: Arc<dyn Collective>) -> Result<Option<HashMap<String, Tensor>>> {
    let (mut engine, active) = engine(case, comm);
    engine.step(1, &batches(3, 1), &active, 1e-2)?;
    engine.by_root(|| {
        let mut all = HashMap::new();
        for name in active.names() {
            let mut values: Vec<f32> = Vec::new();
            engine.exact(name, &mut |some| {
                values.extend(some);
                Ok(())
            })?;
            let n = values.len();
            all.insert(name.to_string(), Tensor::from_vec(values, n, &Device::Cpu)?);
        }
        Ok(all)
    })
}

/// A step after exact values were restored: loss and norm.
fn resumed(case: Case, comm: Arc<dyn Collective>, saved: &Weights) -> Result<[u64; 2]> {
    let (mut engine, active) = engine(case, comm);
    for name in active.names() {
        engine.restore(name, saved)?;
    }
    let report = engine.step(2, &batches(3, 2), &active, 1e-2)?;
    Ok([report.totals.loss().to_bits(), report.grad_norm.to_bits()])
}

#[test]
fn restored_weights_are_restored_on_every_machine() {
    let saved = exact_values(BF16, Arc::new(SingleRank::default())).unwrap().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("saved.safetensors");
    candle_core::safetensors::save(&saved, &path).unwrap();
    let saved = Weights::open_file(&path).unwrap();
    let want = resumed(BF16, Arc::new(SingleRank::default()), &saved).unwrap();
    for hosts in [&["a", "a", "b", "b"][..], &["a", "b", "c"]] {
        let found = threads::run_on(hosts, |comm| resumed(BF16, comm, &saved).unwrap());
        assert!(
            found.iter().all(|found| *found == want),
            "{hosts:?}: {found:?}, {want:?}"
        );
    }
}

/// Bytes of each part of every matrix of the layers that `counts` accepts, times the factor of its layer.
fn bytes(params: &[ParamInfo], part: impl Fn(&ParamInfo) -> usize, factor: impl Fn(usize) -> u64) -> u64 {
    let matrices = params.iter().filter(|p| is_in_parts(p));
    let of = |p: &ParamInfo| match p.group {
        Group::Layer(layer) => 2 * part(p) as u64 * factor(layer),
        _ => 0,
    };
    matrices.map(of).sum()
}

/// Two machines of two ranks: layers travel inside of a machine, new values between them, and a rank stores half of the matrices.
#[test]
fn only_new_values_travel_between_machines() {
    for (part, lowest, uploaded) in [("layers.1.", 1, false), ("", 0, false), ("layers.1.", 1, true)] {
        let far = |own: usize, to: usize| own / 2 != to / 2;
        let run = |counts: fn(usize, usize) -> bool| {
            threads::run_on(&["a", "a", "b", "b"], |comm| {
                let (rank, sent) = (comm.world().rank, Arc::new(AtomicU64::new(0)));
                let case = Case { part, uploaded, ..BF16 };
                let counting = CountingComm::new(comm, Arc::default(), sent.clone()).between(counts);
                let (mut engine, active) = engine(case, Arc::new(counting));
                let params = engine.store.params().to_vec();
                let own = |p: &ParamInfo| part_of(&p.name, p.elements(), rank, 4).len();
                let stored = |p: &ParamInfo| own(p) + part_of(&p.name, p.elements(), (rank + 2) % 4, 4).len();
                if !uploaded {
                    let whole = params
                        .iter()
                        .filter(|p| !is_in_parts(p))
                        .map(|p| 2 * p.elements() as u64);
                    let all = bytes(&params, stored, |_| 1) + whole.sum::<u64>();
                    assert_eq!(engine.store.resident_bytes(), all);
                }
                for step in 1..=2 {
                    engine.step(step, &batches(6, step as u32), &active, 1e-3).unwrap();
                }
                let before = sent.load(SeqCst);
                engine.step(3, &batches(6, 3), &active, 1e-3).unwrap();
                let trains = |layer: usize| part.is_empty() || layer == lowest;
                let counts = collections(engine.network.layers(), lowest, 2, uploaded, trains);
                let near = bytes(&params, stored, |layer| counts[layer]);
                let renewed = bytes(&params, own, |layer| u64::from(trains(layer)));
                (sent.load(SeqCst) - before, near, renewed)
            })
        };
        for (sent, near, renewed) in run(|_, _| true) {
            assert_eq!(sent, near + renewed, "{part} {uploaded}");
        }
        for (sent, _, renewed) in run(far) {
            assert!(sent == renewed && sent > 0, "{part} {uploaded}: {sent}, {renewed}");
        }
    }
}
