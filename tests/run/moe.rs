//! Whole runs of mixtures of experts: the losses and metrics of routers, frozen routers, blocks of experts.

use crate::bench::{Bench, number, said};
use ft::formats::weights::Weights;
use std::collections::BTreeSet;
use std::fs;

const SHORT: [&str; 3] = ["train.max_steps=4", "train.batch_size=2", "data.max_length=64"];

fn train(bench: &Bench, run: &str, settings: &[&str]) {
    let out = format!("train.output_dir={run}");
    bench.train(&[&SHORT[..], settings, &[&out]].concat());
    assert_eq!(bench.steps(run).len(), 4, "{run}");
}

fn refused(bench: &Bench, settings: &[&str]) -> String {
    let out = bench.ft(&[&["train", "--recipe", "r.toml"], &SHORT[..], settings].concat());
    assert!(!out.status.success(), "{settings:?}");
    said(&out)
}

/// Names of the parameters that a run has changed.
fn changed(bench: &Bench, run: &str) -> BTreeSet<String> {
    let [before, after] =
        ["model".to_string(), format!("{run}/final")].map(|d| Weights::open(&bench.path(&d)).unwrap());
    let names = before.names().map(str::to_string);
    let differs = |name: &String| before.read_f32(name).unwrap() != after.read_f32(name).unwrap();
    names.filter(differs).collect()
}

const METRICS: [&str; 5] = [
    "router_aux_loss",
    "router_z_loss",
    "router_max_load",
    "router_idle_experts",
    "router_entropy",
];

#[test]
fn every_method_and_stage_reports_the_load_of_the_experts() {
    let bench = Bench::of_family("olmoe");
    let pairs: [&str; 6] = [
        "train.stage=dpo",
        "data.train=pairs.jsonl",
        "data.format=preference",
        "data.max_length=128",
        "data.render=plain",
        "tune.method=lora",
    ];
    let runs: [(&str, &[&str]); 5] = [
        ("full", &["tune.method=full"]),
        ("lora", &["tune.method=lora", "tune.lora.r=2"]),
        ("kept", &["tune.method=full", "memory.activations=keep"]),
        ("disk", &["tune.method=full", "memory.tier=disk"]),
        ("dpo", &pairs),
    ];
    for (run, settings) in runs {
        train(&bench, run, settings);
        for line in bench.steps(run) {
            let [aux, z, load, idle, entropy] = METRICS.map(|key| number(&line, key));
            // Six experts, two for each token: a balance loss of 2 is even, and 6 is the largest.
            assert!((1.5..=6.0).contains(&aux) && z > 0.0, "{run}: {line}");
            assert!(
                (1.0..=3.0).contains(&load) && (0.0..=8.0).contains(&idle),
                "{run}: {line}"
            );
            assert!(entropy > 0.0 && entropy <= 6f64.ln() + 1e-6, "{run}: {line}");
        }
    }
    // Two layers with four linears of attention each.
    let events = bench.lines("lora/events.jsonl");
    let said = |e: &serde_json::Value| {
        e["message"]
            .as_str()
            .is_some_and(|m| m.contains("attention") && m.contains("8 adapters"))
    };
    assert!(events.iter().any(said), "{events:?}");
    // The load of every expert, of each step that is printed: two experts for each token.
    let loads: Vec<_> = events.iter().filter(|e| e["event"] == "router_load").collect();
    assert!(!loads.is_empty());
    for load in loads {
        let layers = load["tokens_of_experts"].as_object().unwrap();
        let sums = layers.values().map(|l| {
            let tokens = l.as_array().unwrap();
            assert_eq!(tokens.len(), 6);
            tokens.iter().map(|n| n.as_u64().unwrap()).sum::<u64>()
        });
        let sums: BTreeSet<u64> = sums.collect();
        assert!(
            layers.len() == 2 && sums.len() == 1 && sums.iter().all(|n| n % 2 == 0 && *n > 0),
            "{load}"
        );
    }
    let curve = |run: &str| -> Vec<Vec<f64>> {
        let lines = bench.steps(run);
        lines
            .iter()
            .map(|l| METRICS.map(|key| number(l, key)).to_vec())
            .collect()
    };
    assert_eq!(curve("full"), curve("kept"));
    assert_eq!(curve("full"), curve("disk"));
    // A model without experts has no such metrics.
    let dense = Bench::new();
    train(&dense, "dense", &["tune.method=full"]);
    assert!(dense.steps("dense")[0].get("router_entropy").is_none());
}

#[test]
fn losses_of_routers_change_the_run_in_every_way_of_gradients() {
    let bench = Bench::of_family("olmoe");
    let losses = ["train.router_aux_loss_coef=0.5", "train.router_z_loss_coef=0.1"];
    train(&bench, "plain", &["tune.method=full"]);
    let ways: [(&str, &[&str]); 3] = [
        ("with", &["tune.method=full"]),
        ("kept", &["tune.method=full", "memory.activations=keep"]),
        ("lora", &["tune.method=lora", "tune.lora.r=2"]),
    ];
    for (run, settings) in ways {
        train(&bench, run, &[&losses[..], settings].concat());
    }
    let last = |run: &str, key: &str| number(&bench.steps(run)[3], key);
    assert_eq!(
        number(&bench.steps("plain")[0], "loss"),
        number(&bench.steps("with")[0], "loss")
    );
    assert!(number(&bench.steps("with")[0], "grad_norm") != number(&bench.steps("plain")[0], "grad_norm"));
    assert_eq!(last("with", "loss"), last("kept", "loss"));
    assert!(last("with", "router_z_loss") < last("plain", "router_z_loss"));
    // Adapters on attention get the gradient of the losses too.
    train(&bench, "lora-plain", &["tune.method=lora", "tune.lora.r=2"]);
    let norms = |run: &str| {
        bench
            .steps(run)
            .iter()
            .map(|l| number(l, "grad_norm"))
            .collect::<Vec<_>>()
    };
    assert!(norms("lora") != norms("lora-plain"));
}

#[test]
fn what_has_no_such_routers_is_refused() {
    let dense = Bench::new();
    for setting in ["train.router_aux_loss_coef=0.1", "train.router_z_loss_coef=0.1"] {
        let said = refused(&dense, &["tune.method=full", setting]);
        assert!(
            said.contains("experts") && said.contains("train.router_z_loss_coef"),
            "{said}"
        );
    }
    let said = refused(&dense, &["tune.method=full", "tune.train_router=false"]);
    assert!(said.contains("no routers"), "{said}");
    let said = refused(&dense, &["tune.method=block", "tune.block.partition=experts"]);
    assert!(
        said.contains("no experts") && said.contains("tune.block.partition"),
        "{said}"
    );
    let said = refused(
        &Bench::of_family("glm4_moe"),
        &["tune.method=full", "train.router_aux_loss_coef=0.1"],
    );
    assert!(said.contains("sigmoid"), "{said}");
}

#[test]
fn frozen_routers_stay_as_they_are() {
    let bench = Bench::of_family("mixtral");
    let is_router = |name: &String| name.ends_with("block_sparse_moe.gate.weight");
    let rate = "optimizer.learning_rate=1e-2";
    for method in ["tune.method=full", "tune.method=freeze"] {
        train(&bench, "trained", &[method, rate]);
        assert_eq!(
            changed(&bench, "trained").iter().filter(|n| is_router(n)).count(),
            2,
            "{method}"
        );
        train(&bench, "frozen", &[method, rate, "tune.train_router=false"]);
        let found = changed(&bench, "frozen");
        assert!(found.len() > 10 && !found.iter().any(is_router), "{method}: {found:?}");
        fs::remove_dir_all(bench.path("trained")).unwrap();
        fs::remove_dir_all(bench.path("frozen")).unwrap();
    }
}

#[test]
fn blocks_of_experts_train_what_they_name() {
    let bench = Bench::of_family("qwen2_moe");
    let settings = [
        "tune.method=block",
        "tune.block.partition=experts",
        "tune.block.experts_per_block=3",
        "tune.block.order=fixed",
        "optimizer.learning_rate=1e-2",
        "schedule.warmup_steps=0",
    ];
    // Blocks of a layer: attention, the shared part, experts 0-2, experts 3-4.
    for (block, label, inside, count) in [
        (0, "model.layers.0.self_attn", ".0.self_attn.", 7),
        (1, "model.layers.0.mlp", ".0.mlp.", 5),
        (2, "model.layers.0.experts.0-2", ".0.mlp.experts.", 9),
        (7, "model.layers.1.experts.3-4", ".1.mlp.experts.", 6),
    ] {
        let run = format!("block-{block}");
        train(
            &bench,
            &run,
            &[&settings[..], &[&format!("tune.block.start_block={block}")]].concat(),
        );
        assert_eq!(bench.steps(&run)[0]["active_block"], label);
        let found = changed(&bench, &run);
        let others = found.iter().filter(|n| !n.contains(inside) && !n.contains("layernorm"));
        assert_eq!(others.count(), 0, "{label}: {found:?}");
        assert!(
            found.len() <= count + 1 && found.len() + 2 >= count,
            "{label}: {found:?}"
        );
    }
    // All blocks in turn, resumed, on the disk.
    let turns = [
        "tune.method=block",
        "tune.block.partition=experts",
        "tune.block.switch_every=1",
        "tune.block.order=ascending",
    ];
    train(&bench, "memory", &turns);
    train(&bench, "disk", &[&turns[..], &["memory.tier=disk"]].concat());
    let losses = |run: &str| bench.steps(run).iter().map(|l| number(l, "loss")).collect::<Vec<_>>();
    assert_eq!(losses("memory"), losses("disk"));
}

/// With a norm after the experts (FlexOlmo) their sum is computed again in the backward pass, unless it was saved.
#[test]
fn the_experts_that_are_read_are_those_of_the_forecast() {
    let lora: &[&str] = &["tune.method=lora", "tune.lora.r=2"];
    // Below or beside the experts nothing is trained in the lowest layer.
    let last: &[&str] = &[
        "tune.method=freeze",
        "tune.freeze.trainable=[\"model.layers.1.mlp.experts.0.\"]",
        "tune.freeze.trainable_layers=0",
    ];
    for (family, method, kept) in [
        ("flex_olmo", lora, "recompute"),
        ("flex_olmo", lora, "keep"),
        ("olmoe", lora, "recompute"),
        ("flex_olmo", last, "recompute"),
        ("olmoe", last, "recompute"),
    ] {
        let bench = Bench::of_family(family);
        let kept = format!("memory.activations={kept}");
        let settings = [
            &SHORT[..],
            method,
            &["memory.tier=disk", &kept, "train.gradient_accumulation_steps=1"],
        ]
        .concat();
        let out = bench.ft(&[&["plan", "--json", "--recipe", "r.toml"], &settings[..]].concat());
        assert!(out.status.success(), "{}", said(&out));
        let plan: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        train(&bench, "run", &settings[3..]);
        // The forecast is of a batch whose tokens choose every expert.
        let steps = bench.steps("run");
        let even: Vec<_> = steps
            .iter()
            .filter(|line| number(line, "router_idle_experts") == 0.0)
            .collect();
        assert!(!even.is_empty(), "{family}");
        for line in even {
            let read = number(line, "experts_read_bytes");
            let forecast = number(&plan, "expert_bytes");
            assert!(
                (read - forecast).abs() <= 1e-6 * read,
                "{family} {method:?} {kept}: {read}, forecast {forecast}"
            );
        }
    }
}

#[test]
fn the_tiny_mixture_learns_with_an_even_load() {
    let bench = Bench::new();
    bench.shipped("moe-tiny", "moe-tiny", &["train.max_steps=50"]);
    let lines = bench.steps("moe-tiny");
    let mean =
        |part: &[serde_json::Value], key: &str| part.iter().map(|l| number(l, key)).sum::<f64>() / part.len() as f64;
    let (first, last) = (&lines[..5], &lines[45..]);
    let (before, after) = (mean(first, "loss"), mean(last, "loss"));
    let (idle, balance) = (mean(last, "router_idle_experts"), mean(last, "router_aux_loss"));
    println!("loss {before:.3} -> {after:.3}, {idle} of 24 experts idle, balance {balance:.3}");
    assert!(after < 0.6 * before, "{before} -> {after}");
    // Two of eight experts for each token: an even balance is 2, and the worst is 8.
    assert!(idle < 8.0 && balance < 2.3, "{idle} {balance}");
}
