//! Steps: ways of gradients, steps that are held back, and loss scaling.

use super::active::ActiveSet;
use super::loss_scale::{LossScale, LossScaleConfig};
use super::step::*;
use super::strategy::StepStrategy;
use crate::base::rng::{Rng, Stream};
use crate::base::{Error, ErrorKind};
use crate::data::Batch;
use crate::data::Example;
use crate::formats::config::Config;
use crate::model::spec::EMBEDDING;
use crate::model::{Spec, TrainableNetwork};
use crate::model::{families, shapes};
use crate::ops::Dtype;
use crate::ops::step_stats::{StepStats, StepSums};
use crate::ops::update;
use crate::optim::Optimizer;
use crate::optim::config::{OptimizerConfig, OptimizerName};
use crate::sft::CausalLm;
use crate::source::{ResidentWeights, StoragePolicy};
use candle_core::Device;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;

/// A small model, trained with SGD, and its parameters.
fn engine(gradients: GradientStorage) -> (Engine, ActiveSet) {
    engine_of(gradients, 0.02, true)
}

/// As `engine`, with weights of this standard deviation; `tied`: the head is the embedding.
fn engine_of(gradients: GradientStorage, std: f32, tied: bool) -> (Engine, ActiveSet) {
    let mut spec = families::read(&shapes::config("shape:small").unwrap().unwrap()).unwrap();
    spec.tied = tied;
    engine_with(spec, gradients, std)
}

/// As `engine`, for this model.
fn engine_with(spec: Spec, gradients: GradientStorage, std: f32) -> (Engine, ActiveSet) {
    let (params, vocab) = (spec.params(), spec.vocab);
    let settings = OptimizerConfig {
        name: OptimizerName::Sgd,
        ..OptimizerConfig::default()
    };
    let source = ResidentWeights::random(params.clone(), 1, std, 1.0, Dtype::F32, &Device::Cpu).unwrap();
    let active = ActiveSet::new(params.iter().map(|p| p.name.to_string()));
    let model = TrainableNetwork::new(spec, Arc::new(source), Device::Cpu);
    let strategy = StepStrategy {
        gradients,
        ..StepStrategy::new(Dtype::F32)
    };
    let (objective, optimizer) = (Box::new(CausalLm::new(vocab)), Optimizer::new(settings));
    (
        Engine::new(model, objective, optimizer, strategy, &active).unwrap(),
        active,
    )
}

/// As `engine`, with experts in two layers: a token has three of eight.
fn engine_with_experts(gradients: GradientStorage) -> (Engine, ActiveSet) {
    let config = json!({
        "model_type": "qwen3_moe", "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": true, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "max_position_embeddings": 512, "tie_word_embeddings": true,
    });
    let config = Config::from_map(config.as_object().unwrap().clone(), Path::new("config.json"));
    engine_with(families::read(&config).unwrap(), gradients, 0.1)
}

fn batches() -> [Batch; 1] {
    let row = Example {
        ids: (0..24).map(|t| (37 * t + 5) % 4096).collect(),
        trained: vec![true; 24],
    };
    [Batch::from_examples([&row])]
}

/// The exact values of all active weights, one after the other.
fn exact_weights(engine: &Engine, active: &ActiveSet) -> Vec<f32> {
    let mut all = Vec::new();
    for name in active.names() {
        let add = &mut |some: &[f32]| {
            all.extend_from_slice(some);
            Ok(())
        };
        engine.exact(name, add).unwrap();
    }
    all
}

/// Two steps of SGD on one micro-batch: the change of every weight, and the reported norm.
fn way(gradients: GradientStorage, max_grad_norm: f64) -> (Vec<f32>, f64) {
    scaled_way(gradients, max_grad_norm, None)
}

/// As `way`, with a loss scale.
fn scaled_way(gradients: GradientStorage, max_grad_norm: f64, scale: Option<LossScale>) -> (Vec<f32>, f64) {
    let (mut engine, active) = engine(gradients);
    engine.loss_scale = scale;
    engine.max_grad_norm = max_grad_norm;
    let weights = |engine: &Engine| exact_weights(engine, &active);
    let before = weights(&engine);
    let mut norm = 0.0;
    for step in 1..=2 {
        norm = engine.step(step, &batches(), &active, 0.1).unwrap().grad_norm;
    }
    let moved = weights(&engine).iter().zip(&before).map(|(a, b)| a - b).collect();
    (moved, norm)
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    let squares = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2));
    squares.sum::<f64>().sqrt()
}

#[test]
fn every_way_of_gradients_goes_the_same_way() {
    let kept = way(GradientStorage::Keep, 0.0);
    let size = distance(&kept.0, &vec![0.0; kept.0.len()]);
    let fused = way(GradientStorage::Fused, 0.0);
    assert!(fused == kept, "applied as they come");
    // A clip that halves the update.
    let max = 0.5 * kept.1;
    let (kept, twice) = (way(GradientStorage::Keep, max), way(GradientStorage::NormFirst, max));
    assert!(distance(&kept.0, &fused.0) > 0.3 * size, "nothing was clipped");
    assert!(twice == kept, "in two passes");
}

#[test]
fn two_passes_count_the_tokens_of_an_expert_once() {
    let counted = |gradients| {
        let (mut engine, active) = engine_with_experts(gradients);
        engine.routers.losses.balance = 0.01;
        engine.max_grad_norm = 0.5;
        engine.step(1, &batches(), &active, 0.1).unwrap();
        (engine.routers.loads(), engine.routers.metrics())
    };
    let kept = counted(GradientStorage::Keep);
    let tokens: Vec<u64> = kept.0.iter().map(|(_, load)| load.iter().sum()).collect();
    assert_eq!(tokens, [3 * batches()[0].len() as u64; 2]);
    assert_eq!(counted(GradientStorage::NormFirst), kept);
    assert_eq!(counted(GradientStorage::Fused), kept);
}

#[test]
fn the_advice_for_numbers_that_are_not_finite_depends_on_the_type_of_the_weights() {
    for (dtype, wider) in [(Dtype::F32, false), (Dtype::Bf16, true)] {
        let (mut engine, active) = engine(GradientStorage::Keep);
        engine.strategy.storage = StoragePolicy::dense(dtype);
        let advises = |error: Error| {
            assert_eq!(error.kind(), ErrorKind::NonFinite);
            let hint = error.hint_text().unwrap();
            assert!(hint.contains("lower the learning rate"), "{hint}");
            assert_eq!(hint.contains("Dtype::F32"), wider, "{dtype:?}: {hint}");
        };
        // Read later, as on a GPU: the loss, and a gradient.
        for (loss, squares) in [(f64::NAN, 1.0), (1.0, f64::NAN)] {
            let mut queued = engine.queue_step(1, &batches(), &active, 0.1, false, None).unwrap();
            let sums = StepStats::new(&Device::Cpu).unwrap();
            sums.add(StepSums {
                loss,
                squares,
                ..StepSums::default()
            });
            queued.sums = sums.start_reading().unwrap();
            advises(engine.finish(&queued).unwrap_err());
        }
        // Known while the step is made.
        let norm = engine.network.param("model.norm.weight").unwrap().tensor;
        update::set(&norm, &vec![f32::NAN; norm.elem_count()]).unwrap();
        advises(engine.step(2, &batches(), &active, 0.1).unwrap_err());
    }
}

#[test]
fn a_step_that_was_held_back_is_not_counted() {
    for (gradients, counted) in [
        (GradientStorage::Keep, 1),
        (GradientStorage::Fused, 2),
        (GradientStorage::NormFirst, 2),
    ] {
        let (mut engine, active) = engine(gradients);
        engine.step(1, &batches(), &active, 0.1).unwrap();
        let mut queued = engine.queue_step(2, &batches(), &active, 0.1, false, None).unwrap();
        // As a GPU reports it, after it has skipped the updates.
        let sums = StepStats::new(&Device::Cpu).unwrap();
        sums.add(StepSums {
            squares: f64::NAN,
            ..StepSums::default()
        });
        queued.sums = sums.start_reading().unwrap();
        let error = engine.finish(&queued).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NonFinite);
        let counts: Vec<u64> = engine.optimizer.saved().map(|state| state.step).collect();
        assert!(
            !counts.is_empty() && counts.iter().all(|count| *count == counted),
            "{gradients:?}"
        );
    }
}

fn scale(initial: f64, growth_interval: u64) -> LossScale {
    LossScale::new(LossScaleConfig {
        initial,
        growth_interval,
    })
}

#[test]
fn a_loss_scale_changes_no_update() {
    for gradients in [
        GradientStorage::Keep,
        GradientStorage::Fused,
        GradientStorage::NormFirst,
    ] {
        let norm = way(GradientStorage::Keep, 0.0).1;
        for max in [0.0, 0.5 * norm] {
            let got = scaled_way(gradients, max, Some(scale(65536.0, 1)));
            // `Fused` alone cannot clip.
            let want = match gradients {
                GradientStorage::Fused => way(GradientStorage::NormFirst, max),
                other => way(other, max),
            };
            // The scale is a power of two: only numbers near the smallest of f32 are rounded.
            let size = distance(&want.0, &vec![0.0; want.0.len()]);
            assert!(distance(&got.0, &want.0) <= 1e-6 * size, "{gradients:?} {max}");
            assert!((got.1 - want.1).abs() <= 1e-6 * want.1, "{gradients:?} {max}");
        }
    }
}

#[test]
fn a_step_that_overflows_is_skipped_and_lowers_the_scale() {
    for gradients in [
        GradientStorage::Keep,
        GradientStorage::Fused,
        GradientStorage::NormFirst,
    ] {
        // Large weights have large gradients.
        let (mut engine, active) = engine_of(gradients, 1.0, true);
        // `NormFirst` squares scaled gradients: in f32 they overflow at a lower scale.
        let most = 2f64.powi(if gradients == GradientStorage::Keep { 127 } else { 72 });
        engine.loss_scale = Some(scale(most, 2));
        let (mut skipped, mut steps) = (0, 0);
        let weights = |engine: &Engine| exact_weights(engine, &active);
        let mut before = weights(&engine);
        while steps < 3 {
            let report = engine.step(skipped + steps + 1, &batches(), &active, 1e-6).unwrap();
            let now = weights(&engine);
            let same = std::mem::replace(&mut before, now.clone()) == now;
            assert_eq!(report.skipped, same, "{gradients:?}");
            assert_eq!(report.grad_norm.is_finite(), !report.skipped, "{gradients:?}");
            assert!(report.totals.loss().is_finite());
            (skipped, steps) = (skipped + u64::from(report.skipped), steps + u64::from(!report.skipped));
            assert!(skipped < 40, "{gradients:?}");
        }
        assert!(
            skipped > 1 && engine.skipped_steps() == skipped,
            "{gradients:?}: {skipped}"
        );
        // It grew again after the second of the three steps.
        let left = engine.loss_scale.unwrap();
        assert_eq!(
            f64::from(left.scale),
            most / 2f64.powi(skipped as i32 - 1),
            "{gradients:?}"
        );
        // The skipped steps are not counted.
        let counts: Vec<u64> = engine.optimizer.saved().map(|state| state.step).collect();
        assert!(
            !counts.is_empty() && counts.iter().all(|count| *count == 3),
            "{gradients:?}"
        );
    }
}

/// Four rows of 5 to 8 tokens, `cut` in a micro-batch.
fn rows_in(cut: usize) -> Vec<Batch> {
    let row = |r: u32| Example {
        ids: (0..5 + r).map(|t| (37 * t + 101 * r + 5) % 4096).collect(),
        trained: vec![true; 5 + r as usize],
    };
    let rows: Vec<Example> = (0..4).map(row).collect();
    rows.chunks(cut).map(Batch::from_examples).collect()
}

/// Loss, norm and changes of the weights of the second step with this noise.
fn noisy(alpha: f64, seed: u64, cut: usize, gradients: GradientStorage) -> (f64, f64, Vec<f32>) {
    let (mut engine, active) = engine(gradients);
    (engine.neftune_noise_alpha, engine.seed) = (alpha, seed);
    engine.max_grad_norm = 0.5;
    let before = exact_weights(&engine, &active);
    let report = engine.step(2, &rows_in(cut), &active, 1.0).unwrap();
    let moved = exact_weights(&engine, &active);
    let moved = moved.iter().zip(&before).map(|(a, b)| a - b).collect();
    (report.totals.loss(), report.grad_norm, moved)
}

#[test]
fn noise_on_embeddings_does_not_depend_on_micro_batches() {
    let near = |a: f64, b: f64| (a - b).abs() <= 2e-6 * b.abs();
    let none = noisy(0.0, 7, 4, GradientStorage::Keep);
    let whole = noisy(5.0, 7, 4, GradientStorage::Keep);
    assert!(!near(whole.1, none.1) && !near(whole.0, none.0), "{whole:?} {none:?}");
    let size = distance(&whole.2, &vec![0.0; whole.2.len()]);
    for cut in [1, 3] {
        let (loss, norm, moved) = noisy(5.0, 7, cut, GradientStorage::Keep);
        assert!(near(loss, whole.0) && near(norm, whole.1), "{cut}: {loss} {norm}");
        assert!(distance(&moved, &whole.2) <= 1e-5 * size, "{cut}");
    }
    let other = noisy(5.0, 8, 4, GradientStorage::Keep);
    assert!(!near(other.0, whole.0), "another seed has another noise");
    // Both passes have the same noise.
    assert!(noisy(5.0, 7, 4, GradientStorage::NormFirst).2 == whole.2);
}

#[test]
fn noise_is_a_change_of_the_embedding_of_each_token() {
    // A tied head would change too.
    let untied = || engine_of(GradientStorage::Keep, 0.02, false);
    let ((mut noisy, active), (mut changed, _)) = (untied(), untied());
    (noisy.neftune_noise_alpha, noisy.seed) = (8.0, 3);
    // Every token of the batch has an id of its own: its row of the table gets the noise instead.
    let batches = batches();
    let (ids, width) = (&batches[0].ids, noisy.network.spec.hidden);
    let table = changed.network.embedding().unwrap();
    let mut values = update::to_f32_vec(&table.tensor).unwrap();
    let rng = Rng::new(3, Stream::Noise, &[1, 0]);
    let most = (8.0 / ((ids.len() * width) as f64).sqrt()) as f32;
    for (position, id) in ids.iter().enumerate() {
        for column in 0..width {
            let noise = most * (2.0 * rng.uniform((position * width + column) as u64) - 1.0);
            values[*id as usize * width + column] += noise;
        }
    }
    changed
        .optimizer
        .restore_weight(EMBEDDING, &table.tensor, &values)
        .unwrap();
    let before = |engine: &Engine| exact_weights(engine, &active);
    let (a, b) = (before(&noisy), before(&changed));
    let of_noise = noisy.step(1, &batches, &active, 0.1).unwrap();
    let of_change = changed.step(1, &batches, &active, 0.1).unwrap();
    assert_eq!(of_noise.totals, of_change.totals);
    assert_eq!(of_noise.grad_norm, of_change.grad_norm);
    let (after, other) = (before(&noisy), before(&changed));
    let same = |i: &usize| a[*i] == b[*i];
    assert!((0..a.len()).filter(same).all(|i| after[i] == other[i]));
    // An evaluation has no noise.
    let loss = |alpha: f64| {
        let (mut engine, _) = engine(GradientStorage::Keep);
        engine.neftune_noise_alpha = alpha;
        super::pass::evaluate(&engine.network, engine.objective.as_ref(), &batches[0]).unwrap()
    };
    assert_eq!(loss(0.0), loss(8.0));
}
