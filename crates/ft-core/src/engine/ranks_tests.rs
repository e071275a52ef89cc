//! A step on several ranks has the bits of the step on one: losses, norms, weights and metrics.

use super::active::CorrectedParams;
use super::step::{Engine, GradientStorage};
use super::{ActiveSet, Ema, EmaConfig, GradientExchange, StepStrategy, UpdateExchange, corrected_bytes, sent_bytes};
use crate::base::{Error, Result};
use crate::comm::threads::{self, CountingComm};
use crate::comm::{Collective, Patience, SingleRank};
use crate::data::{Batch, Example};
use crate::model::spec::{Mixer, Spec};
use crate::model::{TrainableNetwork, families, shapes};
use crate::ops::transfer::HostMemory;
use crate::ops::{Dtype, update};
use crate::optim::config::{Master, OptimizerConfig, StateDtype};
use crate::optim::{Optimizer, UpdateMasks};
use crate::quant::{Format, StorageDtype};
use crate::sft::CausalLm;
use crate::source::resident::{RandomWeights, draw_tensor};
use crate::source::sharded::{MatrixDivision, WeightOrigin};
use crate::source::{ParamInfo, ResidentWeights, ShardedWeights, TrainableStore, UploadedWeights};
use candle_core::Device;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// One way to train.
#[derive(Clone, Copy)]
pub(super) struct Case {
    pub(super) dtype: Dtype,
    pub(super) state: StateDtype,
    pub(super) master: Master,
    /// Only the parameters whose names contain this text.
    pub(super) part: &'static str,
    pub(super) masked: bool,
    pub(super) max_grad_norm: f64,
    pub(super) saved_layers: usize,
    pub(super) exchange: GradientExchange,
    /// Each rank stores a part of the matrices.
    pub(super) sharded: bool,
    /// As `sharded`, but all ranks of a machine together have all weights.
    pub(super) in_node: bool,
    /// Layers are brought to a device; the host acts as the device.
    pub(super) uploaded: bool,
    /// All layers but the active ones are quantized.
    pub(super) format: Option<Format>,
    /// Corrects all other matrices of the layers.
    pub(super) corrected: bool,
    /// The first layer has a convolution in the place of attention.
    pub(super) convolution: bool,
}

pub(super) const FULL: Case = Case {
    dtype: Dtype::F32,
    state: StateDtype::F32,
    master: Master::F32,
    part: "",
    masked: false,
    max_grad_norm: 0.5,
    saved_layers: 0,
    exchange: GradientExchange {
        ordered: false,
        bf16: false,
        window: false,
    },
    sharded: false,
    in_node: false,
    uploaded: false,
    format: None,
    corrected: false,
    convolution: false,
};

/// The model of a case.
pub(super) fn spec_of(case: Case) -> Spec {
    let mut spec = families::read(&shapes::config("shape:small").unwrap().unwrap()).unwrap();
    if case.convolution {
        spec.layers[0].mixer = Mixer::ShortConv { kernel: 9, bias: true };
    }
    spec
}

pub(super) fn engine(case: Case, comm: Arc<dyn Collective>) -> (Engine, ActiveSet) {
    let spec = spec_of(case);
    let params = spec.params();
    let storage = |p: &ParamInfo| match case.format {
        Some(format) if p.name.contains("proj.weight") => StorageDtype::Quantized(format, case.dtype),
        _ => StorageDtype::Dense(case.dtype),
    };
    let (seed, std, norm) = (1, 0.02, 1.0);
    let random = RandomWeights { seed, std, norm };
    let origin = WeightOrigin::random(&params, random);
    let division = if case.in_node {
        MatrixDivision::InNode
    } else {
        MatrixDivision::Elements
    };
    let source: Arc<dyn TrainableStore> = if (case.sharded || case.in_node) && comm.world().size > 1 {
        Arc::new(ShardedWeights::open(params.clone(), origin, storage, comm.clone(), division, &Device::Cpu).unwrap())
    } else {
        let source = ResidentWeights::random_stored(params.clone(), seed, std, norm, storage, &Device::Cpu).unwrap();
        let index: BTreeMap<_, _> = params.iter().map(|p| p.name.clone()).zip(1..).collect();
        Arc::new(source.with_originals(move |p, dtype| draw_tensor(p, index[&p.name], dtype, random)))
    };
    let source = if case.uploaded && comm.world().size > 1 {
        Arc::new(UploadedWeights::new(source, spec.head_name(), HostMemory::Temporary, &Device::Cpu).unwrap())
    } else {
        source
    };
    engine_of(case, comm, source)
}

/// As `engine`, with weights of `source`.
pub(super) fn engine_of(case: Case, comm: Arc<dyn Collective>, source: Arc<dyn TrainableStore>) -> (Engine, ActiveSet) {
    let spec = spec_of(case);
    let vocab = spec.vocab;
    let settings = OptimizerConfig {
        state: case.state,
        master: case.master,
        ..OptimizerConfig::default()
    };
    let names = source.params().iter().map(|p| p.name.to_string());
    let (own, others): (Vec<String>, BTreeSet<String>) = partition(names, case.part);
    let mut active = ActiveSet::new(own);
    if case.corrected {
        active = active.with_corrections(Some(CorrectedParams {
            names: others.into_iter().filter(|name| name.contains("proj.weight")).collect(),
            scale: 300.0,
            sign: false,
        }));
    }
    if case.masked {
        active = active.masked(Some(UpdateMasks::new(0.1, false, 1, 0, BTreeSet::new())));
    }
    let model = TrainableNetwork::new(spec, source, Device::Cpu);
    let strategy = StepStrategy {
        gradients: GradientStorage::Keep,
        saved_layers: case.saved_layers,
        ..StepStrategy::new(case.dtype)
    };
    let (objective, optimizer) = (Box::new(CausalLm::new(vocab)), Optimizer::new(settings));
    let mut engine = Engine::new(model, objective, optimizer, strategy, &active).unwrap();
    engine.max_grad_norm = case.max_grad_norm;
    // Ranks draw the noise of their micro-batches only.
    engine.neftune_noise_alpha = 5.0;
    engine.join(comm, &active, case.exchange).unwrap();
    (engine, active)
}

/// The names with this text, and the others.
fn partition(names: impl Iterator<Item = String>, part: &str) -> (Vec<String>, BTreeSet<String>) {
    let (own, others): (Vec<_>, Vec<_>) = names.partition(|name| name.contains(part));
    (own, others.into_iter().collect())
}

/// `n` micro-batches of two documents, and one without tokens.
pub(super) fn batches(n: u32, step: u32) -> Vec<Batch> {
    let row = |seed: u32, length: u32| Example {
        ids: (0..length).map(|t| (37 * t + 5 * seed + step) % 4096).collect(),
        trained: (0..length).map(|t| t % (2 + seed % 3) > 0).collect(),
    };
    let batch = |m: u32| Batch::from_examples([&row(m, 9 + m), &row(m + 7, 4)]);
    let mut all: Vec<Batch> = (0..n).map(batch).collect();
    all.insert(1, Batch::from_examples(Vec::<Example>::new()));
    all
}

/// Three steps, the last with a short window: losses, norms and weights as bits.
fn train(case: Case, comm: Arc<dyn Collective>) -> Result<Vec<u64>> {
    let (mut engine, active) = engine(case, comm);
    let mut bits = Vec::new();
    for (step, micro_batches) in [(1, 5), (2, 5), (3, 1)] {
        let report = engine.step(step, &batches(micro_batches, step as u32), &active, 1e-3)?;
        bits.extend([report.totals.loss().to_bits(), report.grad_norm.to_bits()]);
        bits.extend([report.totals.correct, report.totals.trained]);
    }
    let add = |bits: &mut Vec<u64>, values: &[f32]| bits.extend(values.iter().map(|x| u64::from(x.to_bits())));
    for name in active.names() {
        add(&mut bits, &update::to_f32_vec(&engine.network.param(name)?.tensor)?);
    }
    // Only rank 0 gets the exact values.
    let read = || {
        let mut exact = Vec::new();
        for name in active.names() {
            engine.exact(name, &mut |values| {
                add(&mut exact, values);
                Ok(())
            })?;
        }
        Ok(exact)
    };
    let exact = engine.by_root(read)?;
    bits.extend(exact.into_iter().flatten());
    Ok(bits)
}

/// True if a rank has the bits of `want`: rank 0 all of them, the others those before the exact values.
fn has(found: &[u64], want: &[u64], rank: usize) -> bool {
    let of_others = 12 + (want.len() - 12) / 2;
    found == if rank == 0 { want } else { &want[..of_others] }
}

#[test]
fn a_step_has_the_same_bits_on_any_number_of_ranks() {
    let bf16 = Case {
        dtype: Dtype::Bf16,
        state: StateDtype::Int8,
        saved_layers: 2,
        ..FULL
    };
    let block = Case {
        dtype: Dtype::Bf16,
        master: Master::Stochastic,
        part: "layers.1.",
        max_grad_norm: 0.0,
        ..FULL
    };
    let masked = Case {
        part: "layers.0.mlp",
        masked: true,
        ..FULL
    };
    for case in [FULL, bf16, block, masked] {
        let want = train(case, Arc::new(SingleRank::default())).unwrap();
        for size in if case.part.is_empty() { 2..=4 } else { 3..=3 } {
            for (rank, found) in threads::run(size, |comm| train(case, comm).unwrap())
                .into_iter()
                .enumerate()
            {
                let same = has(&found, &want, rank);
                assert!(same, "{:?} {}: rank {rank} of {size}", case.dtype, case.part);
            }
        }
    }
}

/// Steps with averages: the loss on the averages, the averages as rank 0 saves them, the weights as stored with the averages in
/// their place and without, and after the end of the turn of the first layer.
pub(super) fn averaged(case: Case, comm: Arc<dyn Collective>) -> Result<(Vec<u64>, Vec<u64>)> {
    let (mut engine, active) = engine(case, comm);
    let config = EmaConfig { decay: 0.9, ramp: true };
    engine.ema = Some(Ema::new(config));
    let stored = |engine: &Engine, bits: &mut Vec<u64>| -> Result<()> {
        for name in engine.ema.iter().flat_map(Ema::saved).map(|(name, _)| name) {
            if !engine.is_in_parts(name) {
                let values = update::to_f32_vec(&engine.network.param(name)?.tensor)?;
                bits.extend(values.iter().map(|x| u64::from(x.to_bits())));
            }
        }
        Ok(())
    };
    let (mut bits, mut saved) = (Vec::new(), Vec::new());
    for step in 1..=2 {
        engine.step(step, &batches(3, step as u32), &active, 1e-2)?;
    }
    engine.with_averages(|engine| {
        bits.push(engine.evaluate(&batches(1, 9)[0])?.loss().to_bits());
        stored(engine, &mut bits)
    })?;
    stored(&engine, &mut bits)?;
    let names: Vec<String> = engine
        .ema
        .iter()
        .flat_map(Ema::saved)
        .map(|(n, _)| n.to_string())
        .collect();
    assert!(names.iter().map(String::as_str).eq(active.names()) || case.sharded || case.in_node);
    let read = |engine: &Engine, average: bool| -> Result<Vec<u64>> {
        let mut values = Vec::new();
        let mut add = |some: &[f32]| {
            values.extend(some.iter().map(|x| u64::from(x.to_bits())));
            Ok(())
        };
        for name in &names {
            if average {
                engine.average_values(name, &mut add)?;
            } else {
                engine.exact(name, &mut add)?;
            }
        }
        Ok(values)
    };
    saved.extend(engine.by_root(|| read(&engine, true))?.into_iter().flatten());
    saved.extend(engine.by_root(|| read(&engine, false))?.into_iter().flatten());
    // The next block: what is no longer active has its average as value.
    let (gone, left): (Vec<_>, Vec<_>) = names.iter().cloned().partition(|name| name.contains("layers.0."));
    let rest = ActiveSet::new(left);
    engine.switch(&rest, |_| true)?;
    assert_eq!(engine.ema.iter().flat_map(Ema::saved).count(), names.len() - gone.len());
    saved.extend(engine.by_root(|| read(&engine, false))?.into_iter().flatten());
    Ok((bits, saved))
}

/// A loss that is not finite is found in the sums of all ranks, also by those whose own loss is finite.
#[test]
fn a_loss_of_one_rank_that_is_not_finite_is_an_error_of_all() {
    let found = threads::run(2, |comm| {
        let (mut engine, active) = engine(FULL, comm.clone());
        engine.step(1, &batches(3, 1), &active, 1e-3).unwrap();
        if comm.world().rank == 1 {
            let norm = active
                .names()
                .find(|name| name.contains("norm") && !name.contains("layers."));
            let norm = engine.network.param(norm.unwrap()).unwrap().tensor;
            update::set(&norm, &vec![f32::NAN; norm.elem_count()]).unwrap();
        }
        let e = engine.step(2, &batches(3, 2), &active, 1e-3).unwrap_err();
        (engine.is_of_all_ranks(&e), e.what().to_string())
    });
    assert!(found[0] == found[1] && found[0].0, "{found:?}");
}

/// The other rank does not know of the error, so nothing is exchanged after it.
#[test]
fn an_error_of_one_rank_with_averages_in_place_reaches_the_others() {
    let found = threads::run(2, |comm| {
        let (mut engine, active) = engine(FULL, comm.clone());
        engine.ema = Some(Ema::new(EmaConfig { decay: 0.9, ramp: true }));
        let batches = batches(3, 1);
        engine.step(1, &batches, &active, 1e-3).unwrap();
        let mut failed = Vec::new();
        for evaluation in 1..=2 {
            let done = engine.with_averages(|_| match (evaluation, comm.world().rank) {
                (2, 1) => Err(Error::new("rank 1 cannot evaluate")),
                _ => comm.all_gather_bytes(Vec::new(), Patience::Step).map(drop),
            });
            if let Err(e) = done {
                failed = comm.fail(1, e.to_string());
            }
        }
        failed
    });
    for faults in found {
        assert_eq!(faults.len(), 1, "{faults:?}");
        assert_eq!(faults[0].text, "rank 1 cannot evaluate");
    }
}

#[test]
fn averages_have_the_bits_of_one_rank() {
    let bf16 = Case {
        dtype: Dtype::Bf16,
        ..FULL
    };
    let rounded = Case {
        dtype: Dtype::Bf16,
        master: Master::Stochastic,
        ..FULL
    };
    let whole = Case {
        part: "layers.0.mlp",
        masked: true,
        ..FULL
    };
    let sharded = Case { sharded: true, ..bf16 };
    for case in [FULL, bf16, rounded, whole, sharded] {
        let alone = Case { sharded: false, ..case };
        let (bits, saved) = averaged(alone, Arc::new(SingleRank::default())).unwrap();
        let all = threads::run(3, |comm| averaged(case, comm).unwrap());
        for (rank, (own, stored)) in all.iter().enumerate() {
            let what = format!("{:?} {} {}: rank {rank}", case.dtype, case.part, case.sharded);
            assert!(case.sharded || *own == bits, "{what}");
            assert_eq!(own[0], bits[0], "{what}");
            assert!(rank > 0 || *stored == saved, "{what}");
        }
    }
}

#[test]
fn other_exchanges_have_nearly_the_numbers_of_one_rank() {
    let numbers = |bits: &[u64]| -> Vec<f64> {
        // Losses and norms of three steps.
        let found = bits[..12].chunks(4).flat_map(|step| &step[..2]);
        found.map(|bits| f64::from_bits(*bits)).collect()
    };
    let want = numbers(&train(FULL, Arc::new(SingleRank::default())).unwrap());
    for (bf16, window, error) in [(true, false, 2e-3), (false, true, 1e-5)] {
        let case = Case {
            exchange: GradientExchange {
                bf16,
                window,
                ..GradientExchange::default()
            },
            ..FULL
        };
        let of = |size| threads::run(size, |comm| train(case, comm).unwrap());
        let all = [of(2), of(4)];
        for ranks in &all {
            let same = ranks.iter().enumerate().all(|(rank, bits)| has(bits, &ranks[0], rank));
            assert!(same, "all ranks have the same weights");
            for (found, want) in numbers(&ranks[0]).iter().zip(&want) {
                assert!((found / want - 1.0).abs() < error, "{found}, {want} on one rank");
            }
        }
        // Rounded, but in the same order.
        assert_eq!(all[0][0] == all[1][0], !window);
    }
}

/// The micro-batches of a round are corrected like one that has all of their rows.
#[test]
fn corrections_are_made_with_the_sum_of_a_round() {
    let case = Case {
        part: "layers.3.",
        corrected: true,
        ..FULL
    };
    let rows = |m: u32| Example {
        ids: (0..12).map(|t| (37 * t + 5 * m) % 4096).collect(),
        trained: vec![true; 12],
    };
    let run = |comm, batches: &[Batch]| {
        let (mut engine, active) = engine(case, comm);
        let steps = (1..=3).map(|step| engine.step(step, batches, &active, 1e-3).unwrap().totals.loss());
        steps.collect::<Vec<f64>>()
    };
    let whole = [Batch::from_examples([&rows(1), &rows(2)])];
    let want = run(Arc::new(SingleRank::default()), &whole);
    let found = threads::run(2, |comm| {
        run(
            comm,
            &[Batch::from_examples([&rows(1)]), Batch::from_examples([&rows(2)])],
        )
    });
    assert!(want[0] - want[2] > 1e-3, "nothing was learned: {want:?}");
    assert_eq!(found[0], found[1]);
    for (found, want) in found[0].iter().zip(&want) {
        assert!((found - want).abs() < 1e-5 * want, "{found}, {want}");
    }
}

#[test]
fn a_rank_that_fails_in_a_step_stops_all() {
    let found = threads::run(3, |comm| {
        let (mut engine, active) = engine(FULL, comm.clone());
        if comm.world().rank == 2 {
            return comm.fail(1, "out of memory".into()).len();
        }
        let error = engine.step(1, &batches(5, 1), &active, 1e-3).err().unwrap().to_string();
        assert!(error.contains("rank 2 (host here): out of memory"), "{error}");
        comm.fail(1, String::new()).len()
    });
    assert_eq!(found, [1, 1, 1]);
}

#[test]
fn a_loss_that_is_not_finite_is_the_error_of_all_ranks() {
    let found = threads::run(2, |comm| {
        let (mut engine, active) = engine(FULL, comm);
        // The weights overflow in the first step.
        engine.max_grad_norm = 0.0;
        engine.step(1, &batches(2, 1), &active, 1e30).unwrap();
        engine.step(2, &batches(3, 1), &active, 1e-3).err().unwrap().to_string()
    });
    assert!(found[0].contains("is not finite") && found[0] == found[1], "{found:?}");
}

#[test]
fn a_step_sends_the_bytes_that_the_plan_says() {
    let bf16 = |window| GradientExchange {
        bf16: true,
        window,
        ..GradientExchange::default()
    };
    for (size, micro_batches, exchange) in [
        (2, 4, bf16(false)),
        (3, 4, GradientExchange::default()),
        (4, 7, bf16(true)),
    ] {
        let sent = Arc::new(AtomicU64::new(0));
        let planned = threads::run(size, |comm| {
            let place = (comm.world().rank, size);
            let case = Case {
                part: "layers.1.",
                exchange,
                corrected: size == 3,
                dtype: if size == 4 { Dtype::Bf16 } else { Dtype::F32 },
                ..FULL
            };
            let counting = CountingComm::new(comm.clone(), sent.clone(), Arc::default());
            let (mut engine, active) = engine(case, Arc::new(counting));
            engine.step(1, &batches(micro_batches, 1), &active, 1e-3).unwrap();
            let bf16 = if case.dtype == Dtype::Bf16 {
                UpdateExchange::Bf16
            } else {
                UpdateExchange::F32
            };
            let sizes = active
                .names()
                .map(|name| (name, engine.elements(name).unwrap() as u64, bf16));
            let corrected = active.corrected();
            let corrected = corrected.map(|name| (name, engine.elements(name).unwrap() as u64));
            let planned = sent_bytes(sizes, micro_batches.into(), place, engine.is_divided(), exchange, false)
                + corrected_bytes(corrected, micro_batches.into(), place, exchange);
            // All operations have ended.
            comm.all_gather_bytes(Vec::new(), Patience::Step).unwrap();
            assert_eq!(comm.sent(), planned, "rank {} of {size}", place.0);
            planned
        });
        // Of all ranks together, to the byte.
        assert_eq!(4 * sent.load(SeqCst), planned.iter().sum::<u64>(), "{size} ranks");
    }
}
