//! Optimizer steps whose losses and norms are read after the next step is queued.

use crate::support::{gpu, short};
use candle_core::Device;
use ft::data::{Batch, Example};
use ft::engine::{ActiveSet, Engine, GradientStorage, StepStrategy};
use ft::model::{TrainableNetwork, families, shapes};
use ft::ops::Dtype;
use ft::ops::device::memory;
use ft::optim::Optimizer;
use ft::optim::config::{OptimizerConfig, OptimizerName, StateDtype};
use ft::sft::CausalLm;
use ft::source::ResidentWeights;
use std::sync::Arc;

/// How a step treats gradients, and its clipping.
const WAYS: [(GradientStorage, f64); 3] = [
    (GradientStorage::Keep, 0.5),
    (GradientStorage::Fused, 0.0),
    (GradientStorage::NormFirst, 0.5),
];

fn engine(device: &Device, way: (GradientStorage, f64)) -> (Engine, ActiveSet) {
    engine_with(device, way, Dtype::F32, OptimizerConfig::default())
}

fn engine_with(
    device: &Device,
    (gradients, max_grad_norm): (GradientStorage, f64),
    dtype: Dtype,
    config: OptimizerConfig,
) -> (Engine, ActiveSet) {
    let spec = families::read(&shapes::config("shape:tiny").unwrap().unwrap()).unwrap();
    let (params, vocab) = (spec.params(), spec.vocab);
    let source = ResidentWeights::random(params.clone(), 1, 0.02, 1.0, dtype, device).unwrap();
    let active = ActiveSet::new(params.iter().map(|p| p.name.to_string()));
    let model = TrainableNetwork::new(spec, Arc::new(source), device.clone());
    let strategy = StepStrategy {
        gradients,
        ..StepStrategy::new(dtype)
    };
    let optimizer = Optimizer::new(config);
    let mut engine = Engine::new(model, Box::new(CausalLm::new(vocab)), optimizer, strategy, &active).unwrap();
    engine.max_grad_norm = max_grad_norm;
    (engine, active)
}

fn batch(step: u64) -> [Batch; 1] {
    let row = Example {
        ids: (0..24).map(|t| (37 * t + 5 * step as u32) % 896).collect(),
        trained: vec![true; 24],
    };
    [Batch::from_examples([&row])]
}

/// All weights, and how many updates each optimizer state counts.
fn state(engine: &Engine, active: &ActiveSet) -> (Vec<u32>, Vec<u64>) {
    let mut weights = Vec::new();
    for name in active.names() {
        let add = &mut |some: &[f32]| {
            weights.extend(some.iter().map(|x| x.to_bits()));
            Ok(())
        };
        engine.exact(name, add).unwrap();
    }
    (weights, engine.optimizer.saved().map(|state| state.step).collect())
}

#[test]
fn numbers_that_are_read_late_are_the_same() {
    let Some(gpu) = gpu() else { return };
    for way in WAYS {
        let (mut at_once, active) = engine(&gpu.device, way);
        let (mut late, _) = engine(&gpu.device, way);
        let (mut want, mut found, mut before) = (Vec::new(), Vec::new(), None);
        for step in 1..=3 {
            want.push(at_once.step(step, &batch(step), &active, 1e-3).unwrap());
            let queued = late.queue_step(step, &batch(step), &active, 1e-3, false, before.as_ref());
            if let Some(before) = before.replace(queued.unwrap()) {
                found.push(late.finish(&before).unwrap());
            }
        }
        found.extend(before.map(|last| late.finish(&last).unwrap()));
        for (want, found) in want.iter().zip(&found) {
            assert_eq!(want.totals, found.totals, "{way:?}");
            assert_eq!(want.grad_norm.to_bits(), found.grad_norm.to_bits(), "{way:?}");
        }
        assert_eq!(found.len(), 3);
        assert!(state(&at_once, &active) == state(&late, &active), "{way:?}");
    }
}

/// Memory that a step takes is free after it: neither the tensors nor the peak grow from step to step.
#[test]
fn steps_leave_the_pool_as_it_was() {
    let Some(gpu) = gpu() else { return };
    let adafactor = OptimizerConfig {
        name: OptimizerName::Adafactor,
        ..OptimizerConfig::default()
    };
    let int8 = OptimizerConfig {
        state: StateDtype::Int8,
        ..OptimizerConfig::default()
    };
    let ways = WAYS.map(|way| (way, Dtype::Bf16, OptimizerConfig::default()));
    let further = [
        (WAYS[0], Dtype::F32, OptimizerConfig::default()),
        (WAYS[0], Dtype::Bf16, int8),
        (WAYS[0], Dtype::Bf16, adafactor),
    ];
    for (way, dtype, config) in ways.into_iter().chain(further) {
        let (mut engine, active) = engine_with(&gpu.device, way, dtype, config.clone());
        let mut pool = Vec::new();
        for step in 1..=if short() { 8 } else { 20 } {
            engine.step(step, &batch(step), &active, 1e-4).unwrap();
            gpu.device.synchronize().unwrap();
            let memory = memory(&gpu.device).unwrap().unwrap();
            pool.push((memory.used, memory.peak_used));
        }
        // The first steps create optimizer state and tables of addresses.
        assert!(pool[3..].iter().all(|p| *p == pool[3]), "{way:?} {config:?}: {pool:?}");
    }
}

/// A step with a rate of zero changes no bit: the fp32 masters begin as the bf16 weights.
#[test]
fn masters_begin_at_the_weights() {
    let Some(gpu) = gpu() else { return };
    let (mut engine, active) = engine_with(&gpu.device, WAYS[0], Dtype::Bf16, OptimizerConfig::default());
    let (before, _) = state(&engine, &active);
    engine.step(1, &batch(1), &active, 0.0).unwrap();
    let (after, steps) = state(&engine, &active);
    assert!(before == after && !steps.is_empty());
}

#[test]
fn after_a_step_that_is_not_finite_nothing_changes() {
    let Some(gpu) = gpu() else { return };
    for way in WAYS {
        let (mut engine, active) = engine(&gpu.device, way);
        // The weights are as large as the rate then, and products of two overflow.
        engine.step(1, &batch(1), &active, 1e15).unwrap();
        let after = state(&engine, &active);
        let bad = engine.queue_step(2, &batch(2), &active, 1e-3, false, None).unwrap();
        let next = engine.queue_step(3, &batch(3), &active, 1e-3, false, Some(&bad));
        assert_eq!(next.is_err(), way.0 == GradientStorage::Keep);
        let error = engine.finish(&bad).unwrap_err().to_string();
        assert!(error.contains("not finite"), "{error}");
        if let Ok(next) = next {
            assert!(engine.finish(&next).is_err());
        }
        let (weights, counts) = state(&engine, &active);
        assert!(weights == after.0, "{way:?}");
        // With the other ways the state of a failed run is not saved.
        if way.0 == GradientStorage::Keep {
            assert_eq!(counts, after.1);
        }
    }
}

#[test]
fn noise_on_embeddings_is_that_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let run = |device: &Device, alpha: f64| {
        let (mut engine, active) = engine(device, WAYS[0]);
        (engine.neftune_noise_alpha, engine.seed) = (alpha, 3);
        let reports: Vec<_> = (1..=2)
            .map(|step| engine.step(step, &batch(step), &active, 1e-3).unwrap())
            .map(|report| [report.totals.loss(), report.grad_norm])
            .collect();
        let evaluated = engine.evaluate(&batch(9)[0]).unwrap().loss();
        (reports.concat(), evaluated)
    };
    let (here, there) = (run(&Device::Cpu, 50.0), run(&gpu.device, 50.0));
    for (a, b) in here.0.iter().chain([&here.1]).zip(there.0.iter().chain([&there.1])) {
        assert!((a - b).abs() <= 1e-4 * a.abs(), "{here:?} {there:?}");
    }
    let without = run(&gpu.device, 0.0);
    for (a, b) in there.0.iter().zip(&without.0) {
        assert!((a - b).abs() > 1e-3 * a.abs(), "{there:?} {without:?}");
    }
}
