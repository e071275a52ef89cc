//! Hard limits on the memory of a run: `RLIMIT_DATA` limits the private memory of a process; allocation beyond it
//! fails. The large tests are ignored by default: they take minutes, and gigabytes of disk.
//!
//! `cargo test --release --test run caps:: -- --ignored --nocapture --test-threads=1`

use crate::bench::{Bench, number, said};
use crate::tiers::{curve, random_model, write_weights};
use ft::recipe::Dtype;
use serde_json::json;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Output;
use std::time::Instant;

const MIB: u64 = 1 << 20;

/// Runs `ft train` with a limit of `bytes` of private memory.
fn capped(bench: &Bench, bytes: u64, overrides: &[&str]) -> Output {
    let mut command = bench.command(&[&["train", "--recipe", "r.toml"], overrides].concat());
    let limit = libc::rlimit {
        rlim_cur: bytes,
        rlim_max: bytes,
    };
    // SAFETY: between fork and exec only one system call runs, on its own argument.
    unsafe {
        command.pre_exec(move || match libc::setrlimit(libc::RLIMIT_DATA, &limit) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    command.env("RAYON_NUM_THREADS", "2").output().unwrap()
}

/// The peak resident memory of a run, in MiB.
fn peak(bench: &Bench, run: &str) -> f64 {
    let lines = bench.steps(run);
    lines.iter().map(|l| number(l, "peak_memory_bytes")).fold(0.0, f64::max) / MIB as f64
}

/// Less than the weights of `wide` alone.
const CAP: u64 = 160 * MIB;

/// 171 MiB in bf16, most of it in layers.
fn wide() -> Bench {
    let bench = Bench::new();
    let changes = json!({"vocab_size": 5000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 28,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64});
    random_model(&bench, changes);
    bench
}

/// Three block steps of `wide`.
const STEPS: [&str; 6] = [
    "model.init=random",
    "model.dtype=bf16",
    "train.max_steps=3",
    "train.save_steps=0",
    "train.gradient_accumulation_steps=1",
    "tune.block.switch_every=1",
];

/// Everything is recomputed, and no weight becomes codes to save memory.
const EXACT: [&str; 2] = ["memory.activations=recompute", "memory.frozen_weights=bf16"];

/// Row S5.
#[test]
fn a_model_larger_than_the_cap_trains_from_the_disk_to_the_same_bits() {
    let bench = wide();
    let with = |more: &[&'static str]| [&STEPS[..], &EXACT, more].concat();
    bench.train(&with(&["memory.tier=device", "train.output_dir=device"]));
    for (run, partition) in [
        ("layer", "tune.block.partition=layer"),
        ("module", "tune.block.partition=module"),
    ] {
        let arguments = with(&["memory.tier=disk", "memory.head_chunk=4096", partition]);
        let out = format!("train.output_dir={run}");
        let ran = capped(&bench, CAP, &[&arguments[..], &[&out]].concat());
        assert!(ran.status.success(), "{run}\n{}", said(&ran));
        println!("{run}: peak {:.0} MiB", peak(&bench, run));
    }
    assert_eq!(curve(&bench, "device"), curve(&bench, "layer"));
}

/// Asserts that the run was aborted for lack of memory, and that its message says how it goes on and what to set.
fn assert_abort_message(ran: &Output, goes_on: &str) {
    let text = said(ran);
    assert_eq!(ran.status.signal(), Some(libc::SIGABRT), "{text}");
    for part in [
        "memory allocation of",
        "error: out of memory: the system refused ",
        goes_on,
        "memory.budget=SIZE",
        "train.batch_size",
    ] {
        assert!(text.contains(part), "`{part}` is not in {text}");
    }
}

/// Row S5.
#[test]
fn the_same_run_from_memory_does_not_fit_under_the_cap() {
    let bench = wide();
    let run = |out: &'static str, more: &[&'static str]| {
        capped(&bench, CAP, &[&STEPS[..], &["memory.tier=device", out], more].concat())
    };
    // The plan sees the cap and refuses, before anything is loaded.
    let ran = run("train.output_dir=refused", &EXACT);
    let text = said(&ran);
    assert!(!ran.status.success());
    for part in ["does not fit the free memory", "memory.tier=disk"] {
        assert!(text.contains(part), "`{part}` is not in {text}");
    }
    // A budget says that there is more than that: the cap holds all the same.
    let budget = [&EXACT[..], &["memory.budget=1GiB", "train.save_steps=1"]].concat();
    let out = "train.output_dir=stopped";
    let ran = run(out, &budget);
    assert_abort_message(&ran, "no state was saved: `--resume` starts the run again");
    assert!(bench.steps("stopped").is_empty());
    // It does, with more memory; then the words name its checkpoint.
    let first = [&budget[..], &["--resume", "train.max_steps=1"]].concat();
    bench.train(&[&STEPS[..], &["memory.tier=device", out], &first].concat());
    let ran = run(out, &[&budget[..], &["--resume"]].concat());
    assert_abort_message(&ran, "`--resume` continues from checkpoint-1\n");
    assert_eq!(bench.steps("stopped").len(), 1);
    assert!(bench.ft(&["runs", "verify", "stopped"]).status.success());
}

/// The weights do not fit as they are, so the plan takes codes for those that are not trained.
#[test]
fn with_the_storage_left_open_a_run_from_memory_fits_as_codes() {
    let bench = wide();
    let more = [
        "memory.tier=device",
        "memory.activations=recompute",
        "train.output_dir=codes",
    ];
    let ran = capped(&bench, CAP, &[&STEPS[..], &more].concat());
    assert!(ran.status.success(), "{}", said(&ran));
    let plan = std::fs::read_to_string(bench.path("codes/plan.json")).unwrap();
    let plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
    let storage = plan["chosen"]["memory.frozen_weights"]["value"].as_str().unwrap();
    assert!(["int8", "nf4"].contains(&storage), "{storage}");
}

/// Less than the mixture below needs in memory with experts of 4 bits, more than its layers without experts.
const EXPERT_CAP: u64 = 68 * MIB;

/// The number of experts and the choice of Qwen3-30B-A3B (128, of which a token gets 8) in narrow layers: 77 million
/// parameters.
fn mixture() -> Bench {
    let bench = Bench::new();
    let changes = json!({"model_type": "qwen3_moe", "hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64});
    random_model(&bench, changes);
    write_weights(&bench, Dtype::Bf16);
    bench
}

#[test]
fn a_mixture_trains_under_a_cap_from_the_experts_that_it_needs() {
    let bench = mixture();
    let base = [
        "model.dtype=bf16",
        "memory.frozen_weights=nf4",
        "memory.activations=recompute",
        "train.max_steps=2",
        "train.save_steps=0",
        "train.batch_size=1",
        "train.gradient_accumulation_steps=2",
        "data.max_length=48",
    ];
    let methods: [(&str, &[&str]); 2] = [
        (
            "lora",
            &[
                "tune.method=lora",
                "tune.lora.r=2",
                "tune.lora.target_parameters=[\"mlp.experts.gate_up_proj\", \"mlp.experts.down_proj\"]",
            ],
        ),
        (
            "block",
            &[
                "tune.method=block",
                "tune.block.partition=experts",
                "tune.block.experts_per_block=8",
                "tune.block.switch_every=1",
            ],
        ),
    ];
    for (name, settings) in methods {
        let here = format!("train.output_dir={name}-device");
        bench.train(&[&base[..], settings, &["memory.tier=device", &here]].concat());
        let there = format!("train.output_dir={name}-disk");
        let more = ["memory.tier=disk", "memory.head_chunk=4096", &there];
        let ran = capped(&bench, EXPERT_CAP, &[&base[..], settings, &more].concat());
        assert!(ran.status.success(), "{name}\n{}", said(&ran));
        let [device, disk] = ["device", "disk"].map(|place| format!("{name}-{place}"));
        assert_eq!(curve(&bench, &device), curve(&bench, &disk), "{name}");
        // 48 tokens choose 95 % of the experts, if they choose evenly; random routers do not.
        let plan = std::fs::read_to_string(bench.path(&disk).join("plan.json")).unwrap();
        let plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
        let share = plan["expert_share"].as_f64().unwrap();
        for line in bench.steps(&disk) {
            let read = number(&line, "experts_read_share");
            println!(
                "{name}: {read:.3} of the experts read, {share:.3} in the plan, peak {:.0} MiB",
                peak(&bench, &disk)
            );
            assert!(read > 0.1 && read <= share * 1.05, "{read} {share}");
            assert!(number(&line, "experts_read_bytes") <= 1.1 * 2.0 * plan["expert_bytes"].as_f64().unwrap());
        }
        println!("{name}: peak from memory {:.0} MiB", peak(&bench, &device));
    }
    // The same from memory does not fit under the cap.
    let out = ["memory.tier=device", "memory.budget=1GiB", "train.output_dir=stopped"];
    let ran = capped(&bench, EXPERT_CAP, &[&base[..], methods[0].1, &out].concat());
    assert_abort_message(&ran, "no state was saved");
}

/// Runs block steps of a built-in shape with a limit; with `compare` also from memory, and compares the losses.
fn shape(name: &str, cap: u64, settings: &[&str], compare: bool) {
    let bench = Bench::new();
    let path = format!("model.path=shape:{name}");
    std::fs::write(bench.path("r.toml"), "[model]\npath = \"shape:small\"\n").unwrap();
    let base = [
        &path[..],
        "data.max_length=512",
        "train.max_steps=2",
        "train.save_steps=0",
        "train.gradient_accumulation_steps=1",
        "tune.block.switch_every=1",
        "memory.activations=recompute",
    ];
    let arguments = [&base[..], settings].concat();
    let started = Instant::now();
    let more = ["memory.tier=disk", "memory.head_chunk=4096", "train.output_dir=disk"];
    let ran = capped(&bench, cap, &[&arguments[..], &more].concat());
    assert!(ran.status.success(), "{}", said(&ran));
    let seconds = started.elapsed().as_secs_f64();
    let tokens = bench
        .steps("disk")
        .iter()
        .map(|l| number(l, "tokens_per_second"))
        .collect::<Vec<_>>();
    println!(
        "{name} {settings:?}: under {} MiB, peak resident {:.0} MiB, {seconds:.0} s in all, tokens/s {tokens:.1?}",
        cap / MIB,
        peak(&bench, "disk")
    );
    if compare {
        bench.train(&[&arguments[..], &["memory.tier=device", "train.output_dir=device"]].concat());
        assert_eq!(curve(&bench, "device"), curve(&bench, "disk"));
        println!("{name}: peak from memory {:.0} MiB", peak(&bench, "device"));
    }
}

#[test]
fn a_small_shape_learns_the_same_from_the_disk() {
    shape("small", CAP, &["tune.block.partition=layer"], true);
    shape(
        "small",
        CAP,
        &["tune.block.partition=module", "optimizer.state=int8"],
        true,
    );
}

#[test]
#[ignore = "minutes, and 3 GB of disk"]
fn a_1_5b_shape_by_layers_under_1_6_gib() {
    shape("qwen2.5-1.5b", 1638 * MIB, &["tune.block.partition=layer"], true);
}

#[test]
#[ignore = "minutes, and 3 GB of disk"]
fn a_1_5b_shape_by_modules_under_0_8_gib() {
    let settings = ["tune.block.partition=module", "optimizer.state=int8"];
    shape("qwen2.5-1.5b", 819 * MIB, &settings, true);
}

#[test]
#[ignore = "many minutes, and 16 GB of disk"]
fn an_8b_shape_by_layers_under_8_gib() {
    shape("llama-3.1-8b", 8192 * MIB, &["tune.block.partition=layer"], false);
}

#[test]
#[ignore = "many minutes, and 16 GB of disk"]
fn an_8b_shape_by_modules_under_4_5_gib() {
    let settings = ["tune.block.partition=module", "optimizer.state=int8"];
    shape("llama-3.1-8b", 4608 * MIB, &settings, false);
}
