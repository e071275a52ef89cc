//! The reference of the KL terms is the policy before its first step, also if frozen weights are quantized.

use crate::bench::{Bench, number, said};
use serde_json::Value;
use std::fs;

const RL: [&str; 12] = [
    "train.stage=grpo",
    "train.batch_size=4",
    "train.gradient_accumulation_steps=2",
    "train.save_steps=0",
    "rlhf.rewards=[\"regex:[aeiou]\", \"length:4\"]",
    "rlhf.reward_weights=[1.0, 0.5]",
    "rlhf.num_generations=4",
    "rlhf.max_completion_length=8",
    "rlhf.grpo.beta=0.1",
    "schedule.name=constant",
    "schedule.warmup_steps=0",
    "optimizer.learning_rate=3e-3",
];

const NF4: &str = "memory.frozen_weights=nf4";

/// Given adapters: without and with a module that trains in full.
const GIVEN: [&[&str]; 2] = [
    &["tune.method=lora", "tune.lora.adapter=plain/final"],
    &["tune.method=lora", "tune.lora.adapter=with/final"],
];

const LOFTQ: [&str; 4] = [
    "tune.method=lora",
    "tune.lora.r=4",
    "tune.lora.init_lora_weights=loftq",
    "tune.lora.loftq_iter=2",
];

/// A directory with the adapters of `GIVEN`.
fn bench() -> Bench {
    let bench = Bench::new();
    let tuned = [
        "tune.method=lora",
        "tune.lora.r=4",
        "optimizer.learning_rate=1e-2",
        "schedule.warmup_steps=0",
        "train.batch_size=4",
        "train.max_steps=3",
        "train.save_steps=0",
    ];
    bench.train(&[&tuned[..], &["train.output_dir=plain"]].concat());
    let with = ["tune.lora.modules_to_save=lm_head", "train.output_dir=with"];
    bench.train(&[&tuned[..], &with].concat());
    bench
}

/// The KL divergence of each step of a run.
fn divergence(bench: &Bench, run: &str) -> Vec<f64> {
    bench.steps(run).iter().map(|step| number(step, "kl")).collect()
}

#[test]
fn the_policy_starts_at_its_reference_also_over_quantized_weights() {
    let bench = bench();
    let ways: [&[&str]; 8] = [
        GIVEN[0],
        GIVEN[1],
        &LOFTQ,
        &["tune.method=lora", "tune.lora.r=4", "tune.lora.init_lora_weights=pissa"],
        &["tune.method=lora", "tune.lora.r=4", "tune.lora.modules_to_save=lm_head"],
        &[
            "tune.method=lora",
            "tune.lora.r=4",
            "tune.lora.trainable_token_indices=[1, 2]",
        ],
        &["tune.method=freeze", "tune.freeze.trainable_layers=1"],
        &["tune.method=block", "tune.block.switch_every=2"],
    ];
    let mut moved = 0;
    for way in ways {
        let run = ["train.max_steps=3", "train.output_dir=run", "--overwrite", NF4];
        bench.train(&[&RL[..], way, &run].concat());
        let found = divergence(&bench, "run");
        // The weights before quantization are about 1e-2 away.
        assert!(found.len() == 3 && found[0].abs() < 1e-9, "{way:?}: {found:?}");
        moved += usize::from(found[1..].iter().any(|kl| *kl > 1e-8));
    }
    assert!(moved > 0, "no policy leaves its reference");
}

/// A resumed run begins with other adapters than its reference.
#[test]
fn a_resumed_run_has_the_reference_of_its_first_step() {
    let bench = bench();
    for way in [GIVEN[0], GIVEN[1], &LOFTQ] {
        let train = |run: &str, more: &[&str]| {
            let out = format!("train.output_dir={run}");
            bench.train(&[&RL[1..3], &RL[4..], &["train.stage=grpo", NF4], way, &[&out], more].concat());
        };
        train("whole", &["train.max_steps=3", "train.save_steps=0", "--overwrite"]);
        train("broken", &["train.max_steps=2", "train.save_steps=2", "--overwrite"]);
        fs::remove_dir_all(bench.path("broken/final")).unwrap();
        train("broken", &["train.max_steps=3", "train.save_steps=2", "--resume"]);
        let [whole, broken] = ["whole", "broken"].map(|run| divergence(&bench, run));
        assert!(whole.len() == 3 && whole == broken, "{way:?}: {whole:?} {broken:?}");
    }
}

#[test]
fn the_plan_counts_a_reference_as_it_is_stored() {
    let bench = bench();
    let plan = |way: &[&str], storage: &str| {
        let fixed = ["plan", "--recipe", "r.toml", "--json", "memory.tier=device"];
        let frozen = format!("memory.frozen_weights={storage}");
        let all = [&fixed[..], &RL, way];
        let mut all: Vec<&str> = all.concat();
        if storage != "auto" {
            all.push(&frozen);
        }
        let out = bench.ft(&all);
        assert!(out.status.success(), "{all:?}\n{}", said(&out));
        serde_json::from_slice::<Value>(&out.stdout).unwrap()
    };
    let bytes = |plan: &Value, key: &str| plan[key].as_u64().unwrap_or(0);
    // Only adapters train: the frozen weights are those of the policy.
    for storage in ["f32", "nf4"] {
        let given = plan(GIVEN[0], storage);
        assert!(bytes(&given, "adapters") > 0, "{given}");
        assert_eq!(given["reference"], given["adapters"], "{storage}");
        let new = plan(&["tune.method=lora", "tune.lora.r=4"], storage);
        assert_eq!(bytes(&new, "reference"), 0, "{storage}");
    }
    let whole = plan(&["tune.method=full"], "auto");
    assert_eq!(bytes(&whole, "reference"), 4 * bytes(&whole, "parameters"));
    for way in [GIVEN[1], &["tune.method=freeze", "tune.freeze.trainable_layers=1"]] {
        let [dense, quantized] = ["f32", "nf4"].map(|storage| bytes(&plan(way, storage), "reference"));
        assert!(
            quantized > 0 && quantized * 10 < dense * 7,
            "{way:?}: {quantized} {dense}"
        );
    }
}
