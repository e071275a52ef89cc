//! The bytes that ranks send in the steps of real jobs are those that `ft plan --ranks` says, to the byte.

use crate::bench::{Bench, said};
use crate::job;
use serde_json::Value;
use std::fs;

/// Two epochs of 8 steps; five micro-batches do not divide by 2, 3 or 4.
const BASE: [&str; 7] = [
    "model.init=random",
    "train.max_steps=16",
    "train.save_steps=0",
    "train.batch_size=1",
    "train.gradient_accumulation_steps=5",
    "data.max_length=64",
    "train.output_dir=out",
];

/// What decides the number of bytes.
struct Case {
    ranks: usize,
    /// The machine of each rank, if there are several.
    hosts: &'static [&'static str],
    settings: &'static [&'static str],
    /// Steps of a turn of a block.
    turn: usize,
}

const EXCHANGED: [Case; 8] = [
    Case {
        ranks: 3,
        hosts: &[],
        settings: &["tune.method=full"],
        turn: 16,
    },
    Case {
        ranks: 2,
        hosts: &[],
        settings: &["tune.method=full", "model.dtype=bf16", "distributed.reduce=bf16"],
        turn: 16,
    },
    // A rank adds its own micro-batches first.
    Case {
        ranks: 3,
        hosts: &[],
        settings: &["tune.method=full", "distributed.sum=window"],
        turn: 16,
    },
    // Whole gradients go to every rank.
    Case {
        ranks: 2,
        hosts: &[],
        settings: &["tune.method=full", "optimizer.name=adafactor"],
        turn: 16,
    },
    Case {
        ranks: 4,
        hosts: &[],
        settings: &["tune.method=lora", "model.dtype=bf16"],
        turn: 16,
    },
    Case {
        ranks: 2,
        hosts: &[],
        settings: &["tune.method=block", "model.dtype=bf16", "tune.block.switch_every=4"],
        turn: 4,
    },
    Case {
        ranks: 3,
        hosts: &[],
        settings: &[
            "tune.method=block",
            "tune.block.partition=module",
            "tune.block.switch_every=1",
        ],
        turn: 1,
    },
    // Frozen weights come from files.
    Case {
        ranks: 2,
        hosts: &[],
        settings: &[
            "tune.method=block",
            "model.dtype=bf16",
            "tune.block.switch_every=4",
            "distributed.weights=host",
        ],
        turn: 4,
    },
];

const COLLECTED: [Case; 4] = [
    Case {
        ranks: 3,
        hosts: &[],
        settings: &["tune.method=full", "distributed.weights=sharded"],
        turn: 16,
    },
    Case {
        ranks: 2,
        hosts: &[],
        settings: &[
            "tune.method=lora",
            "model.dtype=bf16",
            "memory.frozen_weights=nf4",
            "distributed.weights=sharded",
        ],
        turn: 16,
    },
    Case {
        ranks: 3,
        hosts: &[],
        settings: &[
            "tune.method=block",
            "model.dtype=bf16",
            "tune.block.switch_every=4",
            "distributed.weights=sharded",
        ],
        turn: 4,
    },
    Case {
        ranks: 4,
        hosts: &["a", "a", "b", "b"],
        settings: &[
            "tune.method=full",
            "model.dtype=bf16",
            "distributed.weights=sharded-in-node",
        ],
        turn: 16,
    },
];

const SHARED: [Case; 3] = [
    Case {
        ranks: 2,
        hosts: &[],
        settings: &["tune.method=full", "distributed.sequence=2"],
        turn: 16,
    },
    Case {
        ranks: 3,
        hosts: &[],
        settings: &[
            "tune.method=lora",
            "model.dtype=bf16",
            "distributed.sequence=3",
            "distributed.sequence_by=gather",
        ],
        turn: 16,
    },
    // Two groups of ranks: one of them has no micro-batch in the last round.
    Case {
        ranks: 4,
        hosts: &[],
        settings: &["tune.method=lora", "distributed.sequence=2"],
        turn: 16,
    },
];

const DIVIDED: [Case; 2] = [
    Case {
        ranks: 2,
        hosts: &[],
        settings: &[
            "tune.method=lora",
            "data.long=truncate",
            "distributed.weights=expert-parallel",
        ],
        turn: 16,
    },
    Case {
        ranks: 3,
        hosts: &[],
        settings: &[
            "tune.method=full",
            "model.dtype=bf16",
            "data.long=truncate",
            "distributed.weights=expert-parallel",
        ],
        turn: 16,
    },
];

/// A model whose matrices have several parts for each rank, and rows for whole windows.
fn bench() -> Bench {
    let bench = Bench::new();
    let path = bench.path("model/config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (key, value) in [("hidden_size", 160), ("intermediate_size", 640), ("head_dim", 40)] {
        config[key] = value.into();
    }
    fs::write(&path, config.to_string()).unwrap();
    let rows = fs::read_to_string(bench.path("rows.jsonl")).unwrap();
    let rows: Vec<&str> = rows.lines().cycle().take(40).collect();
    fs::write(bench.path("rows.jsonl"), rows.join("\n")).unwrap();
    bench
}

/// As `bench`, and all rows fill their micro-batch: they are cut.
fn bench_of_long_rows() -> Bench {
    let bench = bench();
    let text = "the mill grinds rye in spring, oats in autumn and nothing at all in winter. ".repeat(9);
    let row =
        serde_json::json!({"messages": [{"role": "user", "content": "tell"}, {"role": "assistant", "content": text}]});
    fs::write(bench.path("rows.jsonl"), format!("{row}\n").repeat(40)).unwrap();
    bench
}

/// A model whose router sends each token to all experts, and rows that fill their micro-batch.
fn bench_of_experts() -> Bench {
    let bench = Bench::of_family("qwen3_moe");
    let path = bench.path("model/config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["num_experts_per_tok"] = config["num_local_experts"].clone();
    fs::write(&path, config.to_string()).unwrap();
    let text = "the mill grinds rye in spring, oats in autumn and nothing at all in winter. ".repeat(9);
    let row = serde_json::json!({"text": text});
    fs::write(bench.path("rows.jsonl"), format!("{row}\n").repeat(40)).unwrap();
    bench
}

/// Runs the job; returns the bytes of the rank with most of them, as planned and in each step.
fn sent(bench: &Bench, case: &Case, more: &[&str]) -> (u64, Vec<u64>) {
    let weights = case.settings.iter().any(|s| s.starts_with("distributed.weights="));
    let replicated = if weights {
        &[][..]
    } else {
        &["distributed.weights=replicated"]
    };
    let arguments = [&BASE[..], case.settings, replicated, more].concat();
    let machines = if case.hosts.is_empty() { "1" } else { "2" };
    let ranks = case.ranks.to_string();
    let plan = [
        "plan", "--recipe", "r.toml", "--json", "--ranks", &ranks, "--nodes", machines,
    ];
    let planned = bench.ft(&[&plan[..], &arguments].concat());
    let plan: Value = serde_json::from_slice(&planned.stdout).unwrap_or_else(|e| panic!("{e}: {}", said(&planned)));
    if case.hosts.is_empty() {
        job::train(bench, case.ranks, &arguments);
    } else {
        let out = job::run_on(bench, case.hosts, &arguments);
        assert!(out.status.success(), "{}", said(&out));
    }
    let steps = bench.steps("out");
    assert_eq!(steps.len(), 16);
    assert!(plan["sent_bytes"].as_u64() > Some(0));
    fs::remove_dir_all(bench.path("out")).unwrap();
    let sent = steps
        .iter()
        .map(|step| step["sent_bytes"].as_f64().unwrap_or(0.0) as u64);
    (plan["sent_bytes"].as_u64().unwrap(), sent.collect())
}

/// The plan is for the block that sends most, and for steps whose first layers were collected by the step before them.
fn check(cases: &[Case], bench: impl Fn() -> Bench) {
    for case in cases {
        if !case.hosts.is_empty() && !job::can_name_machines() {
            continue;
        }
        let bench = bench();
        let (planned, sent) = sent(&bench, case, &[]);
        let what = format!("{} ranks, {:?}", case.ranks, case.settings);
        println!("{what}: {planned} planned, {sent:?}");
        let settled = sent.chunks(case.turn).flat_map(|turn| &turn[turn.len().min(3) - 1..]);
        assert_eq!(settled.clone().max(), Some(&planned), "{what}: {sent:?}");
        // Without blocks all steps are alike.
        if case.turn == 16 {
            assert!(settled.clone().all(|sent| *sent == planned), "{what}: {sent:?}");
        }
    }
}

#[test]
fn a_job_sends_the_gradients_and_values_of_its_plan_to_the_byte() {
    check(&EXCHANGED, bench);
}

#[test]
fn a_job_sends_the_layers_of_its_plan_to_the_byte() {
    check(&COLLECTED, bench);
}

#[test]
fn a_job_sends_the_attention_of_its_plan_to_the_byte() {
    check(&SHARED, bench_of_long_rows);
}

#[test]
fn a_job_sends_the_tokens_of_experts_of_its_plan_to_the_byte() {
    check(&DIVIDED, bench_of_experts);
}

/// Between averages nothing but losses and signals travels.
#[test]
fn a_job_sends_the_averages_of_its_plan_to_the_byte() {
    let bench = bench();
    let case = Case {
        ranks: 3,
        hosts: &[],
        settings: &["tune.method=full", "model.dtype=bf16", "distributed.sync_every=4"],
        turn: 4,
    };
    let (planned, sent) = sent(&bench, &case, &[]);
    let want: Vec<u64> = (1..=16).map(|step| if step % 4 == 0 { planned } else { 0 }).collect();
    assert_eq!(sent, want);
}
