//! Weights that the ranks of each machine divide. The machines are one in truth, with a name for some of the ranks.

use crate::bench::{Bench, files, said};
use crate::job;
use crate::same::{METHODS, assert_same};
use crate::same_bits::{BASE, assert_same_checkpoints, checkpoints, train};
use std::fs;

const IN_NODE: &str = "distributed.weights=sharded-in-node";
/// Two machines of two ranks each, in an order that a launcher may choose.
const MACHINES: [&str; 4] = ["a", "b", "a", "b"];

/// As `train`, on machines of these names.
fn train_on(bench: &Bench, hosts: &[&str], settings: &[&str], name: &str) {
    let arguments = [&BASE[..], settings, &[IN_NODE, "train.output_dir=out"]].concat();
    let out = job::run_on(bench, hosts, &arguments);
    assert!(out.status.success(), "{hosts:?}, {settings:?}\n{}", said(&out));
    fs::rename(bench.path("out"), bench.path(name)).unwrap();
}

#[test]
fn two_machines_have_the_bits_of_one_rank() {
    if !job::can_name_machines() {
        return;
    }
    let nf4 = [METHODS[4].1, &["memory.frozen_weights=nf4", "model.dtype=bf16"]].concat();
    let averages = ["tune.method=full", "model.dtype=bf16", "train.ema_decay=0.9"];
    let requantized = [METHODS[0].1, &["memory.frozen_weights=nf4"]].concat();
    let all: [(&str, &[&str]); 4] = [
        METHODS[0],
        ("lora over nf4", &nf4),
        ("averages", &averages),
        ("block over nf4", &requantized),
    ];
    for (method, settings) in all {
        let bench = Bench::new();
        train(&bench, 1, settings, "one");
        train_on(&bench, &MACHINES, settings, "two-machines");
        assert_same_checkpoints(&bench, "one", "two-machines", method);
        assert_same(&bench, "one", "two-machines");
    }
}

/// A run of two machines is continued on one rank and on two other machines, and the other way round.
#[test]
fn a_run_of_two_machines_goes_on_elsewhere() {
    if !job::can_name_machines() {
        return;
    }
    let (_, settings) = METHODS[0];
    let bench = Bench::new();
    train_on(&bench, &MACHINES, settings, "whole");
    let from = format!("--resume={}", bench.path("whole/checkpoint-4").display());
    let resumed = [settings, &[&from]].concat();
    train(&bench, 1, &resumed, "on-one");
    train_on(&bench, &["a", "b"], &resumed, "on-two");
    let whole = checkpoints(&bench, "whole");
    for name in ["on-one", "on-two"] {
        assert!(whole == checkpoints(&bench, name), "{name}");
        let result = |run: &str| files(&bench.path(run).join("final"));
        assert!(result("whole") == result(name), "{name}: final/");
    }
}

#[test]
fn machines_with_different_numbers_of_ranks_are_refused() {
    if !job::can_name_machines() {
        return;
    }
    let bench = Bench::new();
    let arguments = [&BASE[..], &[IN_NODE, "train.output_dir=out"]].concat();
    let out = job::run_on(&bench, &["a", "b", "a"], &arguments);
    let text = said(&out);
    assert!(!out.status.success() && !bench.path("out").exists(), "{text}");
    for part in [
        "the same number of ranks on every machine",
        "2 on a, 1 on b",
        "distributed.weights = \"sharded\"",
    ] {
        assert_eq!(text.matches(part).count(), 1, "{part} in:\n{text}");
    }
}
