//! Tests of the planner: the published formula, and properties of every plan.

use super::*;
use crate::engine::StepStrategy;
use crate::model::rope::Rope;
use crate::model::spec::{LayerSpec, ModuleNames, NormNames, QkNorm};
use crate::ops::glu::Activation;
use crate::ops::rope::RopePairing;
use crate::peft::AdapterCost;
use crate::recipe;
use crate::setup::row_sizes::EvaluationSize;
use crate::source::StoragePolicy;
use std::collections::BTreeSet;
use weights::FetchedLayers;

pub(super) fn spec() -> Spec {
    Spec {
        model_type: "test".into(),
        vocab: 1000,
        hidden: 64,
        intermediate: 256,
        heads: 8,
        kv_heads: 8,
        head_dim: 8,
        norm_eps: 1e-6,
        norm_plus_one: false,
        plain_norms: false,
        layer_norm: None,
        norms: NormNames::BEFORE,
        qk_norm: None,
        output_gate: false,
        attention_sinks: false,
        value_norm: false,
        per_layer: None,
        streams: None,
        laurel: None,
        layer_scalar: false,
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
        fused_qkv: false,
        fused_gate_up: None,
        plain_mlp: None,
        modules: ModuleNames::LLAMA,
        parallel: false,
        activation: Activation::Silu,
        clamped_glu: None,
        attention_scale: 0.4,
        attention_softcap: None,
        logit_softcap: None,
        logit_scale: 1.0,
        embedding_scale: 1.0,
        embedding_scale_rounded: false,
        noise_scale: 1.0,
        residual_scale: 1.0,
        pairing: RopePairing::Halves,
        tied: false,
        padding: None,
        multimodal: false,
        warnings: Vec::new(),
        layers: vec![LayerSpec::default(); 6],
        ropes: vec![Rope {
            inv_freq: vec![1.0; 4],
            attention_factor: 1.0,
            ..Rope::default()
        }],
        max_positions: 4096,
        initializer_range: 0.02,
    }
}

pub(super) fn recipe(text: &str) -> Recipe {
    let text = format!("[model]\npath = \"m\"\n[data]\ntrain = \"t.jsonl\"\n{text}");
    recipe::parse(&text, "test", &[]).unwrap().recipe
}

pub(super) fn inputs(active: ActiveSet, gradients: GradientStorage) -> PlanInputs {
    PlanInputs {
        batch_tokens: 2048,
        tokens: 2048,
        longest: 512,
        documents: 4,
        micro_batches: 1,
        strategy: StepStrategy {
            gradients,
            ..StepStrategy::new(recipe::Dtype::Bf16)
        },
        threads: 1,
        element: 4,
        on_gpu: false,
        gpu_rates: &gpu_time::GPUS[0],
        turns: [ActivePeriod::alone(active)].into(),
        evaluation: EvaluationSize::default(),
        teacher: None,
        judges: Arc::default(),
        reference: ReferenceMemory::default(),
        rollout: 0,
        file_bytes: 2,
        adapters: Arc::default(),
        data_bytes: 0,
        process_bytes: 0,
        ranks: 1,
        machines: 1,
        sequence: Default::default(),
    }
}

fn layer(index: usize) -> ActiveSet {
    let prefix = format!("model.layers.{index}.");
    let params = spec().params();
    let names = params.iter().map(|p| p.name.to_string());
    ActiveSet::new(names.filter(|n| n.starts_with(&prefix)))
}

fn all() -> ActiveSet {
    ActiveSet::new(spec().params().iter().map(|p| p.name.to_string()))
}

fn line(plan: &Plan, key: &str) -> u64 {
    plan.lines.iter().find(|l| l.key == key).unwrap().bytes
}

#[test]
fn a_gpu_holds_narrow_activations_and_the_host_is_apart() {
    let recipe = recipe("[tune]\nmethod = \"block\"\n[optimizer]\nname = \"adamw\"");
    let mut inputs = inputs(layer(2), GradientStorage::Keep);
    inputs.process_bytes = 1000;
    let cpu = forecast(&spec(), &recipe, &inputs);
    (inputs.element, inputs.on_gpu) = (2, true);
    let gpu = forecast(&spec(), &recipe, &inputs);
    assert_eq!(2 * line(&gpu, "layer_inputs"), line(&cpu, "layer_inputs"));
    assert_eq!(line(&gpu, "gradients"), line(&cpu, "gradients"));
    // 1024 tokens of logits instead of 512; see `lines_follow_the_published_formula`.
    assert_eq!(line(&gpu, "logits"), 1024 * (1064 * 4 + 20) + 2048 * (2 * 64 * 2 + 8));
    assert_eq!((cpu.peak_host_bytes, line(&gpu, "scratch")), (None, 0));
    assert!(gpu.peak_host_bytes.is_some_and(|host| host >= 1000));
    assert!(gpu.peak_bytes < cpu.peak_bytes);
    let at_peak: u64 = gpu.lines.iter().map(|l| l.at_peak).sum();
    assert_eq!(
        at_peak - line(&gpu, "process") - line(&gpu, "data") - line(&gpu, "retired_halves"),
        gpu.peak_bytes
    );
}

#[test]
fn a_gpu_holds_the_two_layers_that_were_fetched_last() {
    let (recipe, spec) = (recipe("[tune]\nmethod = \"freeze\""), spec());
    let names = [4, 5].map(layer);
    let active = ActiveSet::new(names.iter().flat_map(|l| l.names().map(str::to_string)));
    let mut inputs = inputs(active.clone(), GradientStorage::Keep);
    (inputs.element, inputs.on_gpu) = (2, true);
    (inputs.strategy.placement, inputs.strategy.saved_layers) = (Placement::Host, 6);
    let one: u64 = (4 * 64 * 64 + 3 * 64 * 256 + 2 * 64) as u64;
    let model = PlanModel::new(&spec, &inputs.strategy.storage, &inputs.adapters);
    let (mut l, mut fetched) = (Ledger::new(true), FetchedLayers::new(true));
    for (layers, frozen) in [([0, 1], 2), ([1, 2], 2), ([3, 4], 1), ([4, 5], 0), ([4, 0], 1)] {
        fetched.hold(&mut l, &model, &inputs, &active, layers);
        assert_eq!(l.total(), frozen * 2 * one, "{layers:?}");
    }
    fetched.free(&mut l);
    assert_eq!(l.total(), 0);
    // At the peak, above the frozen layers, there are the active ones and what stays: the final norm and the head.
    let plan = forecast(&spec, &recipe, &inputs);
    let weights = plan.lines.iter().find(|l| l.key == "weights").unwrap();
    let stays = 2 * one + 64 * 1000 + 64;
    assert_eq!(weights.at_peak, 2 * stays, "{}", plan.peak_moment);
    // Before the step and in its forward pass there are two frozen ones too, and the rows of the embedding.
    assert!(weights.bytes >= 2 * (stays + 2 * one), "{}", weights.bytes);
}

#[test]
fn lines_follow_the_published_formula() {
    let recipe = recipe("[tune]\nmethod = \"block\"\n[optimizer]\nname = \"adamw\"");
    let plan = forecast(&spec(), &recipe, &inputs(layer(2), GradientStorage::Keep));
    let one: u64 = (4 * 64 * 64 + 3 * 64 * 256 + 2 * 64) as u64;
    let all = 6 * one + 2 * 64 * 1000 + 64;
    assert_eq!((plan.parameters, plan.trained_parameters), (all, one));
    assert_eq!(line(&plan, "weights"), 2 * all);
    // AdamW: two moments; the lower half of the master of a bf16 weight.
    assert_eq!(line(&plan, "optimizer"), 10 * one);
    assert_eq!(line(&plan, "gradients"), 4 * one);
    // Layers 2 to 5 keep their inputs.
    assert_eq!(line(&plan, "layer_inputs"), 4 * 2048 * 64 * 4);
    // Peak of the MLP backward pass: gate, up, their product, dm; x1, h, dy; of attention q, k, v, o, lse.
    let wide = 4 * 256 + 3 * 64 + 4 * 64 + 8;
    assert_eq!(line(&plan, "layer_work"), 2048 * 4 * wide as u64);
    // 512 tokens of logits, a sum for every 2048 of a row and a maximum for every 4096; their hidden states, gradients and the rows of their targets. Then all
    // hidden states, their gradients and an index.
    assert_eq!(
        line(&plan, "logits"),
        512 * (4 * (1000 + 3 * 64) + 20) + 2048 * (2 * 64 * 4 + 8)
    );
}

#[test]
fn the_lines_at_the_peak_add_up_and_none_is_above_its_largest() {
    let recipe = recipe("[tune]\nmethod = \"full\"");
    for gradients in [
        GradientStorage::Keep,
        GradientStorage::Fused,
        GradientStorage::NormFirst,
    ] {
        let plan = forecast(&spec(), &recipe, &inputs(all(), gradients));
        assert_eq!(plan.lines.iter().map(|l| l.at_peak).sum::<u64>(), plan.peak_bytes);
        assert!(plan.lines.iter().all(|l| l.at_peak <= l.bytes));
        let json = plan.json();
        assert_eq!(json["peak_bytes"].as_u64(), Some(plan.peak_bytes));
        assert!(plan.lines.iter().all(|l| json[l.key].as_u64() == Some(l.bytes)));
        assert!(plan.table().contains("trained at a time"), "{}", plan.table());
    }
}

#[test]
fn kept_activations_are_those_of_the_uppermost_active_layers() {
    let recipe = recipe("[tune]\nmethod = \"block\"");
    let mut inputs = inputs(layer(2), GradientStorage::Keep);
    for (keep, kept) in [(0, 0), (3, 3), (4, 4), (6, 4)] {
        inputs.strategy.saved_layers = keep;
        let plan = forecast(&spec(), &recipe, &inputs);
        // q, k, v, o, lse, the stream between the halves, gate and up.
        assert_eq!(line(&plan, "activations"), kept * 2048 * 4 * (5 * 64 + 8 + 2 * 256));
    }
}

#[test]
fn gradients_that_are_not_kept_are_one_at_a_time() {
    let recipe = recipe("[tune]\nmethod = \"full\"");
    let kept = forecast(&spec(), &recipe, &inputs(all(), GradientStorage::Keep));
    let fused = forecast(&spec(), &recipe, &inputs(all(), GradientStorage::Fused));
    assert_eq!(line(&kept, "gradients"), 4 * kept.parameters);
    assert_eq!(line(&fused, "gradients"), 4 * 1000 * 64);
    assert!(fused.peak_bytes < kept.peak_bytes);
    // A second micro-batch makes a gradient beside its sum.
    let mut twice = inputs(all(), GradientStorage::Keep);
    twice.micro_batches = 3;
    let twice = forecast(&spec(), &recipe, &twice);
    assert_eq!(line(&twice, "gradients"), 4 * kept.parameters + 4 * 1000 * 64);
}

#[test]
fn the_worst_block_counts_and_a_lower_one_keeps_more_inputs() {
    let recipe = recipe("[tune]\nmethod = \"block\"");
    let top = forecast(&spec(), &recipe, &inputs(layer(5), GradientStorage::Keep));
    let bottom = forecast(&spec(), &recipe, &inputs(layer(0), GradientStorage::Keep));
    assert_eq!(
        (line(&top, "layer_inputs"), line(&bottom, "layer_inputs")),
        (2048 * 256, 6 * 2048 * 256)
    );
    let mut both = inputs(layer(5), GradientStorage::Keep);
    let sets = vec![layer(5), layer(0)];
    let (model, storage) = (spec(), both.strategy.storage.clone());
    both.turns = turns_of(&PlanModel::new(&model, &storage, &both.adapters), &storage, sets).into();
    let both = forecast(&spec(), &recipe, &both);
    // The inactive block keeps the low 16 bits of its masters.
    assert_eq!(line(&both, "retired_halves"), 2 * both.trained_parameters);
    assert_eq!(both.peak_bytes, bottom.peak_bytes + line(&both, "retired_halves"));
}

#[test]
fn everything_that_is_held_is_given_back() {
    let spec = Spec {
        norms: NormNames::SANDWICH,
        qk_norm: Some(QkNorm::HEADS),
        fused_qkv: true,
        fused_gate_up: Some(["mlp.gate_up_proj", "mlp.down_proj"]),
        kv_heads: 2,
        tied: true,
        ..spec()
    };
    let recipes = ["0.0", "0.1"].map(|dropout| {
        recipe(&format!(
            "[tune]\nmethod = \"lora\"\n[tune.lora]\nlora_dropout = {dropout}"
        ))
    });
    let name = |l: usize, part: &str| format!("model.layers.{l}.{part}");
    let sets = [
        vec![
            name(3, "self_attn.qkv_proj.lora_A.weight"),
            name(3, "self_attn.qkv_proj.lora_B.weight"),
        ],
        vec![name(5, "mlp.down_proj.weight")],
        vec![name(5, "post_feedforward_layernorm.weight")],
        vec!["model.norm.weight".to_string()],
        vec!["model.embed_tokens.weight".to_string()],
        spec.params().iter().map(|p| p.name.to_string()).collect(),
    ];
    for names in sets {
        let mut inputs = inputs(ActiveSet::new(names), GradientStorage::Keep);
        let part = |side: &str| {
            (
                name(3, &format!("self_attn.qkv_proj.lora_{side}.weight")).into(),
                vec![4, 64],
            )
        };
        let cost = crate::peft::AdapterCost {
            trained: vec![part("A"), part("B")],
            rank: 4,
            fixed: 64,
            per_token: 3,
            whole: 5,
            widens: true,
        };
        for module in ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.down_proj"] {
            Arc::make_mut(&mut inputs.adapters).insert(name(3, module), cost.clone());
        }
        inputs.micro_batches = 2;
        for (keep, on_gpu, r) in [
            (0, false, 1),
            (2, false, 1),
            (6, false, 1),
            (0, true, 0),
            (2, true, 0),
            (0, true, 1),
        ] {
            (inputs.strategy.saved_layers, inputs.on_gpu) = (keep, on_gpu);
            let recipe = &recipes[r];
            let mut ledger = Ledger::default();
            let model = PlanModel::new(&spec, &inputs.strategy.storage, &inputs.adapters);
            let fetched = FetchedLayers::new(on_gpu);
            step::walk(&mut ledger, &model, recipe, &inputs, &inputs.turns[0].active, fetched);
            assert_eq!(ledger.total(), 0, "{:?}", inputs.turns[0].active);
        }
    }
}

#[test]
fn of_a_masked_parameter_gradient_and_moments_are_parts() {
    let recipe = recipe("[tune]\nmethod = \"block\"\n[tune.block]\npartition = \"ratio\"");
    let layers: Vec<String> = (0..6)
        .flat_map(|l| layer(l).names().map(str::to_string).collect::<Vec<_>>())
        .collect();
    let masks = crate::optim::UpdateMasks::new(0.1, true, 1, 0, BTreeSet::new());
    let active = ActiveSet::new(layers).masked(Some(masks));
    let plan = forecast(&spec(), &recipe, &inputs(active, GradientStorage::Keep));
    // Norms have fewer than 100 elements: whole.
    let part = 6 * (4 * (64 * 64 / 10) + 3 * (64 * 256 / 10) + 2 * 64) as u64;
    let all = 6 * (4 * 64 * 64 + 3 * 64 * 256 + 2 * 64) as u64;
    assert_eq!(plan.trained_parameters, part);
    assert_eq!(line(&plan, "optimizer"), 8 * part + 2 * all);
    // The active parts, and one complete gradient: when the last large one is computed, the earlier parts are held.
    let gradients = line(&plan, "gradients");
    assert!(
        gradients > 4 * (64 * 256) && gradients < 4 * (part + 64 * 256),
        "{gradients}"
    );
    assert_eq!(line(&plan, "layer_inputs"), 6 * 2048 * 64 * 4);
}

#[test]
fn what_is_corrected_costs_no_state_but_the_way_to_the_bottom() {
    let corrected = |scope: std::ops::Range<usize>| {
        let names = scope
            .filter(|l| *l != 3)
            .flat_map(|l| layer(l).names().map(str::to_string).collect::<Vec<_>>());
        crate::engine::active::CorrectedParams {
            names: names.collect(),
            scale: 1.0,
            sign: false,
        }
    };
    let with = |master: &str, scope| {
        let recipe = recipe(&format!(
            "[tune]\nmethod = \"block\"\n[optimizer]\nmaster = \"{master}\""
        ));
        let active = layer(3).with_corrections(Some(corrected(scope)));
        forecast(&spec(), &recipe, &inputs(active, GradientStorage::Keep))
    };
    let plain = forecast(
        &spec(),
        &recipe("[tune]\nmethod = \"block\""),
        &inputs(layer(3), GradientStorage::Keep),
    );
    let (all, partial, rounded) = (with("f32", 0..6), with("f32", 3..6), with("stochastic", 0..6));
    let one = plain.trained_parameters;
    assert_eq!(all.trained_parameters, one);
    assert_eq!(
        [&plain, &partial, &all].map(|p| line(p, "layer_inputs") / (2048 * 256)),
        [3, 3, 6]
    );
    assert_eq!(
        [&plain, &partial, &all].map(|p| line(p, "optimizer")),
        [10 * one, 14 * one, 20 * one]
    );
    assert_eq!(line(&rounded, "optimizer"), 8 * one);
    // One gradient more than are kept.
    assert_eq!(line(&all, "gradients"), line(&plain, "gradients") + 4 * 64 * 256);
}

#[test]
fn a_reference_and_a_rollout_have_lines_of_their_own() {
    let recipe = recipe("[tune]\nmethod = \"full\"\n");
    let plain = inputs(all(), GradientStorage::Keep);
    let without = forecast(&spec(), &recipe, &plain);
    let rollout = |rollout| {
        let inputs = PlanInputs {
            reference: ReferenceMemory {
                held: 2 * without.parameters,
                read: 0,
            },
            rollout,
            longest: 500,
            ..plain.clone()
        };
        forecast(&spec(), &recipe, &inputs)
    };
    let with = rollout(1 << 20);
    let line = |plan: &Plan, key: &str| plan.lines.iter().find(|l| l.key == key).map(|l| l.bytes);
    assert_eq!((line(&without, "reference"), line(&without, "rollout")), (None, None));
    assert_eq!(line(&with, "reference"), Some(2 * with.parameters));
    // 500 tokens lie in eight pages of 64; a value of a head is stored in steps of 32 numbers.
    let head = spec().head_dim + spec().head_dim.next_multiple_of(32);
    let token = spec().layers.len() * spec().kv_heads * head * 4;
    let answer = (512 * token + 8 * spec().vocab) as u64;
    let bytes = |plan: &Plan| line(plan, "rollout").unwrap();
    assert_eq!(bytes(&with) - bytes(&rollout((1 << 20) - 1)), answer);
    // And the work of a layer while prompts are read, 1024 tokens at a time: gate and up at least.
    let work = bytes(&with) - (answer << 20);
    assert!((1024 * 4 * 2 * 256..1024 * 4 * 5 * 256).contains(&work), "{work}");
    assert_eq!(with.peak_moment, "the rollout");
}

#[test]
fn on_a_gpu_codes_need_room_to_be_dequantized_and_on_the_cpu_none() {
    let recipe = recipe("[tune]\nmethod = \"block\"\n[memory]\nfrozen_weights = \"int8\"");
    let policy = StoragePolicy::new(
        &recipe.memory.storage_rules(),
        recipe.model.dtype,
        &spec().params(),
        |_| false,
    )
    .unwrap();
    let tokens = 10;
    let work = |on_gpu: bool, quantized: bool, active: ActiveSet| {
        let mut inputs = inputs(active, GradientStorage::Keep);
        // So few tokens that a dequantized weight is larger than the activations.
        (inputs.tokens, inputs.longest, inputs.documents) = (tokens, tokens, 1);
        inputs.on_gpu = on_gpu;
        if quantized {
            inputs.strategy.storage = policy.clone();
        }
        line(&forecast(&spec(), &recipe, &inputs), "layer_work")
    };
    assert_eq!(work(false, true, layer(2)), work(false, false, layer(2)));
    // The layer that trains: gate, up, dm, their gradients; x1, h, dy, q, k, v, o; lse.
    let dense = tokens * 4 * (5 * 256 + 7 * 64 + 8);
    assert_eq!(work(true, false, layer(2)), dense as u64);
    // A layer above it: gate, up, dm; x1, dy, q, k, v, o; lse; and the output projection, dequantized to bf16.
    let quantized = tokens * 4 * (3 * 256 + 6 * 64 + 8) + 2 * 64 * 256;
    assert_eq!(work(true, true, layer(2)), quantized as u64);
    // Active parameters are not quantized.
    assert_eq!(work(true, true, all()), work(true, false, all()));
}

#[test]
fn noise_on_embeddings_needs_16_bytes_for_a_token() {
    let data = |alpha: &str| {
        let recipe = recipe(&format!("[train]\nneftune_noise_alpha = {alpha}"));
        let mut inputs = inputs(layer(2), GradientStorage::Keep);
        (inputs.tokens, inputs.longest, inputs.documents) = (10, 10, 1);
        line(&forecast(&spec(), &recipe, &inputs), "data")
    };
    assert_eq!(data("5.0"), data("0.0") + 16 * 10);
}

#[test]
fn a_bf16_weight_that_is_multiplied_in_f32_is_widened_on_a_gpu() {
    // DoRA without dropout has copies of its pair in the type of W.
    let recipe = recipe("[tune]\nmethod = \"lora\"\n[tune.lora]\nlora_dropout = 0.1");
    let work = |on_gpu: bool, widens: bool| {
        let mut inputs = inputs(layer(2), GradientStorage::Keep);
        (inputs.tokens, inputs.longest, inputs.documents) = (10, 10, 1);
        inputs.on_gpu = on_gpu;
        let cost = AdapterCost {
            widens,
            ..AdapterCost::default()
        };
        Arc::make_mut(&mut inputs.adapters).insert("model.layers.4.mlp.up_proj".into(), cost);
        line(&forecast(&spec(), &recipe, &inputs), "layer_work")
    };
    // x1, dy, h, q, k, v, o; lse; gate and up; and the whole weight as f32.
    assert_eq!(
        work(true, true),
        (10 * 4 * (7 * 64 + 8 + 2 * 256) + 4 * 64 * 256) as u64
    );
    assert!(work(true, false) < work(true, true));
    assert_eq!(work(false, true), work(false, false));
}
