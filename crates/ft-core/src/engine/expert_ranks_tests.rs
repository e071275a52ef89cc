//! Experts that are divided among ranks: a step has the bits of the step on one rank, and sends the bytes that the routing asks for.

use super::ranks_tests::batches;
use super::step::{Engine, GradientStorage};
use super::{ActiveSet, GradientExchange, MomentValues, StepStrategy};
use crate::base::Result;
use crate::comm::{Collective, SingleRank, threads};
use crate::formats::config::Config;
use crate::model::{TrainableNetwork, expert_words, families};
use crate::ops::{Dtype, update};
use crate::optim::Optimizer;
use crate::optim::config::{OptimizerConfig, StateDtype};
use crate::quant::{Format, StorageDtype};
use crate::sft::CausalLm;
use crate::source::resident::{RandomWeights, draw_tensor};
use crate::source::sharded::{MatrixDivision, WeightOrigin, own_experts};
use crate::source::{Group, ParamInfo, ResidentWeights, ShardedWeights, TrainableStore, expert_of};
use candle_core::Device;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// One model and one way to train it.
#[derive(Clone)]
struct Case {
    config: Value,
    dtype: Dtype,
    format: Option<Format>,
    saved_layers: usize,
    state: StateDtype,
    /// Only the parameters whose names contain this text.
    part: &'static str,
    /// Experts are trained.
    experts: bool,
    /// Every rank has all experts.
    replicated: bool,
}

fn case(model_type: &str, changes: Value) -> Case {
    let mut config = json!({
        "model_type": model_type, "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": true, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "max_position_embeddings": 512, "tie_word_embeddings": true,
    });
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    if model_type == "mixtral" {
        config.as_object_mut().unwrap().remove("num_experts");
    }
    Case {
        config,
        dtype: Dtype::F32,
        format: None,
        saved_layers: 0,
        state: StateDtype::F32,
        part: "",
        experts: false,
        replicated: false,
    }
}

fn engine(case: &Case, comm: Arc<dyn Collective>) -> (Engine, ActiveSet) {
    let config = Config::from_map(case.config.as_object().unwrap().clone(), Path::new("config.json"));
    let spec = families::read(&config).unwrap();
    let (params, vocab) = (spec.params(), spec.vocab);
    let storage = |p: &ParamInfo| match case.format {
        Some(format) if p.name.contains("proj.weight") => StorageDtype::Quantized(format, case.dtype),
        _ => StorageDtype::Dense(case.dtype),
    };
    let (seed, std, norm) = (1, 0.1, 1.0);
    let random = RandomWeights { seed, std, norm };
    let store: Arc<dyn TrainableStore> = if comm.world().size > 1 && !case.replicated {
        let origin = WeightOrigin::random(&params, random);
        let division = MatrixDivision::Experts;
        Arc::new(ShardedWeights::open(params.clone(), origin, storage, comm.clone(), division, &Device::Cpu).unwrap())
    } else {
        let source = ResidentWeights::random_stored(params.clone(), seed, std, norm, storage, &Device::Cpu).unwrap();
        let index: BTreeMap<_, _> = params.iter().map(|p| p.name.clone()).zip(1..).collect();
        Arc::new(source.with_originals(move |p, dtype| draw_tensor(p, index[&p.name], dtype, random)))
    };
    let frozen = |name: &str| {
        !case.experts && expert_of(name).is_some() || case.format.is_some() && name.contains("proj.weight")
    };
    let trained = params.iter().map(|p| p.name.to_string());
    let active = ActiveSet::new(trained.filter(|name| !frozen(name) && name.contains(case.part)));
    let strategy = StepStrategy {
        gradients: GradientStorage::Keep,
        saved_layers: case.saved_layers,
        ..StepStrategy::new(case.dtype)
    };
    let optimizer = Optimizer::new(OptimizerConfig {
        state: case.state,
        ..OptimizerConfig::default()
    });
    let model = TrainableNetwork::new(spec, store, Device::Cpu);
    let mut engine = Engine::new(model, Box::new(CausalLm::new(vocab)), optimizer, strategy, &active).unwrap();
    engine.join(comm, &active, GradientExchange::default()).unwrap();
    (engine, active)
}

/// Losses, norms, weights, a loss without gradients; then on rank 0 what it computes alone.
fn train(case: &Case, comm: Arc<dyn Collective>) -> Result<(Vec<u64>, Vec<u64>)> {
    let (mut engine, active) = engine(case, comm);
    let mut bits = Vec::new();
    // Five micro-batches do not divide by 2, 3 or 4.
    for (step, micro_batches) in [(1, 5), (2, 1), (3, 5)] {
        let report = engine.step(step, &batches(micro_batches, step as u32), &active, 1e-2)?;
        bits.extend([report.totals.loss().to_bits(), report.grad_norm.to_bits()]);
    }
    for name in active.names().filter(|name| expert_of(name).is_none()) {
        let values = update::to_f32_vec(&engine.network.param(name)?.tensor)?;
        bits.extend(values.iter().map(|x| u64::from(x.to_bits())));
    }
    bits.push(engine.evaluate(&batches(1, 9)[0])?.loss().to_bits());
    let alone = engine.by_root(|| {
        let mut alone = Vec::new();
        // The experts are collected, layer by layer.
        alone.push(engine.evaluate(&batches(1, 9)[0])?.loss().to_bits());
        for p in engine.store.params() {
            engine.exact(&p.name, &mut |values| {
                alone.extend(values.iter().map(|x| u64::from(x.to_bits())));
                Ok(())
            })?;
        }
        for moment in engine.saved_moments() {
            alone.extend(moment.name.bytes().map(u64::from));
            engine.moment(&moment, &mut |values| {
                match values {
                    MomentValues::F32(values) => alone.extend(values.iter().map(|x| u64::from(x.to_bits()))),
                    MomentValues::U8(values) => alone.extend(values.iter().map(|x| u64::from(*x))),
                }
                Ok(())
            })?;
        }
        let bytes = engine
            .network
            .source
            .fetch(Group::Layer(1))?
            .iter()
            .map(|(_, w)| w.bytes())
            .sum();
        alone.push(bytes);
        Ok(alone)
    })?;
    // Together again.
    bits.push(engine.evaluate(&batches(2, 9)[2])?.loss().to_bits());
    Ok((bits, alone.unwrap_or_default()))
}

fn compare(case: &Case, sizes: impl IntoIterator<Item = usize>) {
    let (want, alone) = train(case, Arc::new(SingleRank::default())).unwrap();
    assert!(f64::from_bits(want[1]) > 1e-3 && want[0] != want[4]);
    for size in sizes {
        for (rank, found) in threads::run(size, |comm| train(case, comm).unwrap())
            .into_iter()
            .enumerate()
        {
            let what = format!("{} {:?}: rank {rank} of {size}", case.config["model_type"], case.dtype);
            assert!(found.0 == want, "{what}");
            assert!(rank > 0 || found.1 == alone, "{what}: what rank 0 reads alone");
        }
    }
}

#[test]
fn divided_experts_have_the_bits_of_one_rank() {
    compare(&case("qwen3_moe", json!({})), 2..=4);
}

/// A router that is not finite is found within the forward pass, so the other ranks are at another place.
#[test]
fn a_router_of_one_rank_that_is_not_finite_is_an_error_of_this_rank() {
    let case = Case {
        replicated: true,
        ..case("qwen3_moe", json!({}))
    };
    let found = threads::run(2, |comm| {
        let (mut engine, active) = engine(&case, comm.clone());
        engine.step(1, &batches(3, 1), &active, 1e-3).unwrap();
        if comm.world().rank == 1 {
            let router = active.names().find(|name| name.ends_with("mlp.gate.weight")).unwrap();
            let router = engine.network.param(router).unwrap().tensor;
            update::set(&router, &vec![f32::NAN; router.elem_count()]).unwrap();
        }
        let e = engine.step(2, &batches(3, 2), &active, 1e-3).unwrap_err();
        assert!(!engine.is_of_all_ranks(&e), "{e}");
        comm.fail(1, e.to_string())
    });
    for faults in found {
        assert_eq!(faults.len(), 1, "{faults:?}");
        assert!(
            faults[0].text.starts_with("the logits of a router are not finite"),
            "{faults:?}"
        );
    }
}

/// The sum of a token begins with the shared expert; another one with groups; a third with biases of the experts.
#[test]
fn other_mixtures_have_the_bits_of_one_rank() {
    let shared = json!({"shared_expert_intermediate_size": 48, "decoder_sparse_step": 1, "mlp_only_layers": []});
    compare(&case("qwen2_moe", shared), [3]);
    let smile = json!({"router_groups": 4, "router_groups_per_token": 2});
    compare(&case("qwen3_moe_smile", smile), [2, 4]);
    compare(&case("gpt_oss", json!({"intermediate_size": 32})), [2]);
    // More ranks than experts.
    compare(
        &case("mixtral", json!({"num_local_experts": 3, "num_experts_per_tok": 2})),
        [4],
    );
}

#[test]
fn stored_types_and_saved_activations_change_no_bits() {
    let base = case("qwen3_moe", json!({}));
    let bf16 = Case {
        dtype: Dtype::Bf16,
        saved_layers: 2,
        ..base.clone()
    };
    let nf4 = Case {
        format: Some(Format::Nf4 { double: true }),
        ..base.clone()
    };
    // Only attention of the middle layer, as adapters there.
    let attention = Case {
        part: "layers.1.self_attn",
        ..bf16.clone()
    };
    for case in [bf16, nf4, attention] {
        compare(&case, [3]);
    }
}

/// The rank of an expert takes its gradients and has its states.
#[test]
fn trained_experts_have_the_bits_of_one_rank() {
    let base = Case {
        experts: true,
        ..case("qwen3_moe", json!({}))
    };
    compare(&base, 2..=4);
    let bf16 = Case {
        dtype: Dtype::Bf16,
        state: StateDtype::Int8,
        saved_layers: 1,
        ..base.clone()
    };
    // Nothing but experts, of which only some have tokens in a micro-batch.
    let block = Case {
        part: "layers.1.mlp.experts",
        ..base.clone()
    };
    let few = Case {
        part: "experts.5",
        config: json!({"num_experts_per_tok": 1}),
        ..base.clone()
    };
    let few = Case {
        config: case("qwen3_moe", few.config).config,
        ..few
    };
    let shared = json!({"shared_expert_intermediate_size": 48, "decoder_sparse_step": 1, "mlp_only_layers": []});
    let shared = Case {
        experts: true,
        ..case("qwen2_moe", shared)
    };
    for case in [bf16, block, few, shared] {
        compare(&case, [3]);
    }
}

/// An expert may have tokens on one rank and none on another.
#[test]
fn experts_on_every_rank_have_the_bits_of_one_rank() {
    let one = json!({"num_experts_per_tok": 1, "num_experts": 8});
    let oss = json!({"num_experts_per_tok": 1, "intermediate_size": 32});
    for case in [case("qwen3_moe", one), case("gpt_oss", oss)] {
        let case = Case {
            experts: true,
            replicated: true,
            ..case
        };
        compare(&case, [3]);
    }
}

/// Trains blocks of experts one after the other; frozen experts are quantized. The bits of the losses, of the errors of
/// quantization and of the gradient norms in each step, then of the exact weights after the last one.
fn blocks(case: &Case, comm: Arc<dyn Collective>) -> Vec<u64> {
    let (mut engine, _) = engine(case, comm);
    let names: Vec<String> = engine.store.params().iter().map(|p| p.name.to_string()).collect();
    let mut bits = Vec::new();
    for (step, part) in (1..).zip([
        "layers.1.mlp.experts.2.",
        "layers.1.mlp.experts.7.",
        "layers.0.",
        "layers.1.mlp.experts.2.",
    ]) {
        let active = ActiveSet::new(names.iter().filter(|name| name.contains(part)).cloned());
        for requantized in engine.switch(&active, |_| false).unwrap() {
            bits.push(requantized.error.to_bits());
        }
        let report = engine.step(step, &batches(5, step as u32), &active, 1e-2).unwrap();
        bits.extend([report.totals.loss().to_bits(), report.grad_norm.to_bits()]);
    }
    engine
        .switch(&ActiveSet::new(["model.norm.weight".to_string()]), |_| false)
        .unwrap();
    let exact = engine.by_root(|| {
        let mut exact = Vec::new();
        for name in &names {
            engine.exact(name, &mut |values| {
                exact.extend(values.iter().map(|x| u64::from(x.to_bits())));
                Ok(())
            })?;
        }
        Ok(exact)
    });
    bits.extend(exact.unwrap().into_iter().flatten());
    bits
}

#[test]
fn blocks_of_quantized_experts_have_the_bits_of_one_rank() {
    let case = Case {
        dtype: Dtype::Bf16,
        format: Some(Format::Nf4 { double: true }),
        experts: true,
        ..case("qwen3_moe", json!({}))
    };
    let want = blocks(&case, Arc::new(SingleRank::default()));
    for size in [2, 3] {
        let found = threads::run(size, |comm| blocks(&case, comm));
        assert!(found[0] == want, "{size} ranks");
        assert!(
            found[1..]
                .iter()
                .all(|found| want.starts_with(found) && found.len() > 8)
        );
    }
}

#[test]
fn a_rank_has_its_experts_only() {
    let case = case("qwen3_moe", json!({}));
    threads::run(3, |comm| {
        let rank = comm.world().rank;
        let (engine, _) = engine(&case, comm);
        let own = own_experts(8, rank, 3);
        let here = |p: &&ParamInfo| p.expert().is_none_or(|expert| own.contains(&expert));
        let elements: usize = engine.store.params().iter().filter(here).map(ParamInfo::elements).sum();
        assert_eq!(engine.store.resident_bytes(), 4 * elements as u64);
    });
    let oss = Case {
        experts: true,
        ..self::case("gpt_oss", json!({"intermediate_size": 32}))
    };
    let found = threads::run(2, |comm| {
        let (mut engine, active) = engine(&oss, comm);
        engine.step(1, &batches(2, 1), &active, 1e-3).err().unwrap().to_string()
    });
    assert!(
        found.iter().all(|error| error.contains("biases of experts")),
        "{found:?}"
    );
}

/// The bytes of rows of one step, of all ranks: as many ranks as groups.
fn sent(config: &Value, ranks: usize) -> (u64, f64) {
    let case = Case {
        part: "layers.0.self_attn",
        ..case("qwen3_moe_smile", config.clone())
    };
    let all = threads::run(ranks, |comm| {
        let rank = comm.world().rank;
        let (mut engine, active) = engine(&case, comm);
        let one = &batches(1, 1)[0];
        let batches: Vec<_> = (0..ranks).map(|_| one.clone()).collect();
        engine.step(1, &batches, &active, 1e-3).unwrap();
        let spec = engine.network.spec.clone();
        let sizes = spec.layers[0].experts.unwrap();
        let words = expert_words(&sizes, spec.hidden, (rank, ranks), one.len());
        let planned = 3.0 * 4.0 * words.iter().sum::<f64>();
        (engine.store.expert_reads().unwrap().sent, planned)
    });
    let planned = all.iter().map(|(_, planned)| planned).sum();
    (all.iter().map(|(sent, _)| sent).sum(), planned)
}

#[test]
fn groups_of_experts_limit_what_travels() {
    let config =
        |groups: usize| json!({"num_experts_per_tok": 2, "router_groups": 4, "router_groups_per_token": groups});
    let (one, one_planned) = sent(&config(1), 4);
    let (any, any_planned) = sent(&config(4), 4);
    assert!(one < any, "{one} bytes with one group, {any} without a limit");
    // The router is random, with few tokens.
    for (sent, planned) in [(one, one_planned), (any, any_planned)] {
        let ratio = sent as f64 / planned;
        assert!((0.8..1.25).contains(&ratio), "{sent} bytes, {planned} planned");
    }
}
