//! Weights that each rank stores in parts: the bits of whole weights, and the bytes that the plan says; also if layers are then
//! brought to a device.

use super::ActiveSet;
use super::GradientExchange;
use super::ranks_tests::{Case, FULL, batches, engine};
use super::step::Engine;
use crate::base::Result;
use crate::comm::threads::{self, CountingComm};
use crate::comm::{Collective, SingleRank, part_of};
use crate::ops::Dtype;
use crate::quant::Format;
use crate::source::ParamInfo;
use crate::source::sharded::{collections, is_in_parts};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// Blocks: layer 0 and embedding, the last layer, all layers, layer 0 again. Exact values at the end as bits.
pub(super) fn train_in_parts(case: Case, comm: Arc<dyn Collective>) -> Result<Vec<u64>> {
    train_blocks(engine(case, comm).0)
}

/// As `train_in_parts`, with this engine.
pub(super) fn train_blocks(mut engine: Engine) -> Result<Vec<u64>> {
    let names: Vec<String> = engine.store.params().iter().map(|p| p.name.to_string()).collect();
    let block = |parts: &[&str]| {
        let own = names.iter().filter(|name| parts.iter().any(|part| name.contains(part)));
        ActiveSet::new(own.cloned())
    };
    let mut bits = Vec::new();
    let blocks = [
        &["embed", "layers.0."][..],
        &["layers.3."],
        &["layers."],
        &["layers.0."],
    ];
    for (step, parts) in (1..).zip(blocks) {
        let active = block(parts);
        for requantized in engine.switch(&active, |_| true)? {
            bits.push(requantized.error.to_bits());
        }
        let report = engine.step(step, &batches(5, step as u32), &active, 1e-3)?;
        bits.extend([report.totals.loss().to_bits(), report.grad_norm.to_bits()]);
    }
    let read = || {
        let mut exact = Vec::new();
        for name in &names {
            engine.exact(name, &mut |values| {
                exact.extend(values.iter().map(|x| u64::from(x.to_bits())));
                Ok(())
            })?;
        }
        // Rank 0 fetches layers alone, and all ranks together after it.
        let weights = engine.network.source.fetch(crate::source::Group::Layer(2))?;
        exact.push(weights.iter().map(|(_, weight)| weight.bytes()).sum());
        Ok(exact)
    };
    let exact = engine.by_root(read)?;
    let report = engine.step(5, &batches(2, 9), &block(&["layers.0."]), 1e-3)?;
    bits.push(report.grad_norm.to_bits());
    bits.extend(exact.into_iter().flatten());
    Ok(bits)
}

#[test]
fn weights_in_parts_have_the_bits_of_whole_weights() {
    let bf16 = Case {
        dtype: Dtype::Bf16,
        sharded: true,
        ..FULL
    };
    let nf4 = Case {
        format: Some(Format::Nf4 { double: true }),
        ..bf16
    };
    let int8 = Case {
        dtype: Dtype::F32,
        format: Some(Format::Int8 { group: 0 }),
        ..bf16
    };
    let window = Case {
        exchange: GradientExchange {
            window: true,
            ..GradientExchange::default()
        },
        ..bf16
    };
    let [up_bf16, up_nf4] = [bf16, nf4].map(|case| Case { uploaded: true, ..case });
    let cases = [
        (bf16, 2..=4),
        (nf4, 3..=3),
        (int8, 2..=2),
        (window, 2..=2),
        (up_bf16, 2..=3),
        (up_nf4, 2..=2),
    ];
    for (case, sizes) in cases {
        // The order of the additions of a window is that of two ranks with whole weights.
        let want = if case.exchange.window {
            let whole = Case { sharded: false, ..case };
            threads::run(2, |comm| train_in_parts(whole, comm).unwrap()).swap_remove(0)
        } else {
            train_in_parts(case, Arc::new(SingleRank::default())).unwrap()
        };
        for size in sizes {
            let found = threads::run(size, |comm| train_in_parts(case, comm).unwrap());
            assert!(found[0] == want, "{:?} {:?} on {size} ranks", case.dtype, case.format);
            assert!(
                found[1..]
                    .iter()
                    .all(|found| want.starts_with(found) && found.len() > 8)
            );
        }
    }
}

#[test]
fn collected_bytes_and_resident_bytes_are_those_of_the_plan() {
    // Active layers from 1 on, and all of them.
    let cases = [
        ("layers.1.", 1, 2, 4u32, false),
        ("", 0, 3, 5, false),
        ("layers.1.", 1, 2, 4, true),
        ("", 0, 3, 5, true),
    ];
    for (part, lowest, size, micro_batches, uploaded) in cases {
        let found = threads::run(size, |comm| {
            let (rank, sent) = (comm.world().rank, Arc::new(AtomicU64::new(0)));
            let case = Case {
                part,
                sharded: true,
                uploaded,
                ..FULL
            };
            let (mut engine, active) = engine(case, Arc::new(CountingComm::new(comm, Arc::default(), sent.clone())));
            let own = |p: &ParamInfo| 4 * part_of(&p.name, p.elements(), rank, size).len() as u64;
            let params = engine.store.params().to_vec();
            let of_all = params.iter().map(|p| {
                if is_in_parts(p) {
                    own(p)
                } else {
                    4 * p.elements() as u64
                }
            });
            if !uploaded {
                assert_eq!(engine.store.resident_bytes(), of_all.sum::<u64>());
            }
            engine.step(1, &batches(micro_batches, 1), &active, 1e-3).unwrap();
            engine.step(2, &batches(micro_batches, 2), &active, 1e-3).unwrap();
            let before = sent.load(SeqCst);
            engine.step(3, &batches(micro_batches, 3), &active, 1e-3).unwrap();
            let layers = engine.network.layers();
            let rounds = (micro_batches as usize).div_ceil(size);
            let counts = collections(layers, lowest, rounds, uploaded, |layer| {
                part.is_empty() || layer == lowest
            });
            let planned: u64 = (params.iter().filter(|p| is_in_parts(p)))
                .map(|p| match p.group {
                    crate::source::Group::Layer(layer) => counts[layer] * own(p) * (size as u64 - 1),
                    _ => 0,
                })
                .sum();
            (sent.load(SeqCst) - before, planned)
        });
        for (sent, planned) in found {
            assert!(
                sent == planned && sent > 0,
                "{part} {uploaded}: {sent} bytes, {planned} planned"
            );
        }
    }
}
