//! Keys, values and per-layer inputs that layers share: a gradient does not depend on what else is active, saved, offloaded or
//! recomputed.

use super::active::ActiveSet;
use super::pass::GradientPass;
use crate::base::Result;
use crate::data::{Batch, Example};
use crate::formats::config::Config;
use crate::model::spec::is_constant;
use crate::model::{GradSink, Network, Param, families};
use crate::ops::step_stats::StepStats;
use crate::ops::transfer::Copier;
use crate::ops::{Dtype, update};
use crate::sft::CausalLm;
use crate::source::{DiskWeights, ResidentWeights, StoragePolicy, disk};
use candle_core::{Device, Tensor};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Keeps the gradients of the active parameters.
struct ActiveGradients<'a>(&'a ActiveSet, BTreeMap<String, Vec<f32>>);

impl GradSink for ActiveGradients<'_> {
    fn wants(&self, name: &str) -> bool {
        self.0.wants(name)
    }

    fn take(&mut self, param: &Param, gradient: Tensor) -> Result<()> {
        self.1.insert(param.name.to_string(), update::to_f32_vec(&gradient)?);
        Ok(())
    }
}

/// Gemma 3n: several streams, Laurel, sparse gates.
fn streams() -> Config {
    let value = json!({
        "model_type": "gemma3n_text", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 5,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "sliding_window": 4, "laurel_rank": 4,
        "max_position_embeddings": 64, "num_kv_shared_layers": 3, "altup_num_inputs": 3, "altup_active_idx": 1,
        "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 32,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"],
    });
    Config::from_map(value.as_object().unwrap().clone(), Path::new("config.json"))
}

fn config() -> Config {
    let value = json!({
        "model_type": "gemma4_text", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 5,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "global_head_dim": 8, "sliding_window": 4,
        "max_position_embeddings": 64, "num_kv_shared_layers": 3, "use_double_wide_mlp": true,
        "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"],
    });
    Config::from_map(value.as_object().unwrap().clone(), Path::new("config.json"))
}

fn batch() -> Batch {
    let row = |n: u32, seed: u32| Example {
        ids: (0..n).map(|t| (7 * t + seed) % 32).collect(),
        trained: vec![true; n as usize],
    };
    Batch::from_examples([&row(11, 3), &row(6, 1)])
}

fn gradients(network: &Network, active: &ActiveSet, saved_layers: usize, offload: bool) -> BTreeMap<String, Vec<f32>> {
    let (objective, stats) = (CausalLm::new(32), StepStats::new(&Device::Cpu).unwrap());
    let copier = Copier::new(&Device::Cpu).unwrap();
    let mut sink = ActiveGradients(active, BTreeMap::new());
    let pass = GradientPass {
        saved_layers,
        input_offload: offload.then_some(&copier),
        ..GradientPass::new(network, &objective, active, &stats)
    };
    pass.window(&[batch()], &mut sink).unwrap();
    sink.1
}

#[test]
fn gradients_flow_back_to_the_layer_that_made_the_keys() {
    compare(&config());
}

#[test]
fn gradients_of_streams_do_not_depend_on_what_is_active() {
    compare(&streams());
}

fn compare(config: &Config) {
    let spec = families::read(config).unwrap();
    let params = spec.params();
    let source = ResidentWeights::random(params.clone(), 5, 0.3, 0.8, Dtype::F32, &Device::Cpu).unwrap();
    let network = Network::new(spec, Arc::new(source), Device::Cpu);
    let trained = params
        .iter()
        .map(|p| p.name.to_string())
        .filter(|name| !is_constant(name));
    let all = ActiveSet::new(trained.clone());
    let want = gradients(&network, &all, 0, false);
    assert!(want.keys().cloned().eq(all.names().map(str::to_string)));
    assert!(want.values().all(|g| g.iter().any(|x| *x != 0.0)));
    for (saved, offload) in [(5, false), (2, true), (0, true)] {
        assert!(
            gradients(&network, &all, saved, offload) == want,
            "{saved} saved, offload {offload}"
        );
    }
    // Blocks: the layers between them are frozen, and so may be the layer that made the keys.
    let blocks: [&[&str]; 6] = [
        &["model.layers.1.self_attn.k_proj."],
        &["model.layers.0.self_attn.v_proj.", "model.layers.4."],
        &["model.layers.2."],
        &["model.layers.1.", "model.layers.3.mlp."],
        &["model.per_layer_"],
        &["model.embed_tokens.", "model.layers.4.per_layer_input_gate."],
    ];
    let of_streams: [&[&str]; 6] = [
        &["model.altup_projections."],
        &["model.altup_unembed_projections.1."],
        &["model.layers.0.altup."],
        &["model.layers.3.altup.modality_router."],
        &["model.layers.1.laurel.", "model.layers.4.altup.correct"],
        &["model.layers.2.altup.router_norm.", "model.norm."],
    ];
    let of_streams = of_streams.into_iter().filter(|_| network.spec.streams.is_some());
    for prefixes in blocks.into_iter().chain(of_streams) {
        let chosen = trained
            .clone()
            .filter(|name| prefixes.iter().any(|p| name.starts_with(p)));
        let active = ActiveSet::new(chosen);
        for saved in [0, 5] {
            let got = gradients(&network, &active, saved, false);
            assert!(got.len() == active.names().count() && !got.is_empty(), "{prefixes:?}");
            assert!(
                got.iter().all(|(name, g)| &want[name] == g),
                "{prefixes:?}, {saved} saved"
            );
        }
    }
}

#[test]
fn the_table_of_a_model_on_the_disk_is_read_by_rows() {
    let spec = families::read(&config()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.safetensors");
    let params = spec.params();
    disk::write_random(&file, &params, 5, 0.3, 0.8, Dtype::F32).unwrap();
    let weights = || crate::formats::weights::Weights::open_file(&file).unwrap();
    let options = disk::DiskOptions {
        dtype: Dtype::F32,
        storage: StoragePolicy::dense(Dtype::F32),
        device: Device::Cpu,
        trained: dir.path().join("trained"),
        codes: dir.path().join("codes.safetensors"),
        head: spec.head_name().to_string(),
        head_rows: None,
    };
    let on_disk = DiskWeights::open(params.clone(), weights(), options).unwrap();
    let resident = ResidentWeights::random(params, 5, 0.3, 0.8, Dtype::F32, &Device::Cpu).unwrap();
    let active = ActiveSet::new(["model.layers.1.self_attn.k_proj.weight".to_string()]);
    let run = |network: Network| gradients(&network, &active, 0, false);
    let want = run(Network::new(spec.clone(), Arc::new(resident), Device::Cpu));
    assert!(run(Network::new(spec, Arc::new(on_disk), Device::Cpu)) == want);
}
