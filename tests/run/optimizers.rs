//! Every optimizer and every variant of the block optimizer: resumed to the same bits, and equal results.

use crate::bench::{Bench, number, said};
use crate::resume::assert_same;
use ft::formats::weights::Weights;

/// The variants; K = 2, so that block switches are before and after the checkpoint.
const WAYS: [&[&str]; 13] = [
    &["tune.method=full", "optimizer.state=int8"],
    &[
        "tune.method=full",
        "optimizer.name=lion",
        "optimizer.learning_rate=1e-4",
    ],
    &["tune.method=full", "optimizer.name=adafactor", "train.max_grad_norm=0"],
    &[
        "tune.method=full",
        "optimizer.name=sgd",
        "optimizer.momentum=0.9",
        "optimizer.state=int8",
    ],
    &[
        "tune.method=full",
        "model.dtype=bf16",
        "optimizer.master=stochastic",
        "train.max_grad_norm=0",
    ],
    &["tune.method=block", "model.dtype=bf16", "optimizer.master=stochastic"],
    &[
        "tune.method=block",
        "tune.block.partition=ratio",
        "tune.block.update_ratio=0.2",
        "model.dtype=bf16",
    ],
    &[
        "tune.method=block",
        "tune.block.partition=ratio",
        "tune.block.mask=scattered",
        "tune.block.include_lm_head=true",
        "optimizer.state=int8",
    ],
    &[
        "tune.method=block",
        "tune.block.order=importance",
        "tune.block.layers_per_block=2",
        "tune.block.include_embedding=true",
        "tune.block.include_lm_head=true",
        "tune.block.importance=[\"lm_head=2\"]",
    ],
    &["tune.method=block", "tune.block.correction=sgd", "model.dtype=bf16"],
    &[
        "tune.method=block",
        "tune.block.correction=signsgd",
        "tune.block.correction_scale=0.01",
        "tune.block.correction_scope=partial",
    ],
    &[
        "tune.method=block",
        "tune.block.correction=sgd",
        "model.dtype=bf16",
        "optimizer.master=stochastic",
        "train.gradient_accumulation_steps=3",
    ],
    &[
        "tune.method=block",
        "tune.block.correction=lora",
        "tune.lora.r=4",
        "tune.lora.lora_dropout=0.1",
        "model.dtype=bf16",
    ],
];

const BASE: [&str; 7] = [
    "tune.block.switch_every=2",
    "train.batch_size=2",
    "train.gradient_accumulation_steps=1",
    "train.save_steps=5",
    "schedule.name=constant",
    "schedule.warmup_ratio=0",
    "train.predict_with_generate=false",
];

/// If a key is in both lists, the variant's value is used.
fn settings<'a>(way: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    let key = |s: &str| s.split('=').next().unwrap().to_string();
    let base = BASE.into_iter().filter(|b| !way.iter().any(|w| key(w) == key(b)));
    let block = way.contains(&"tune.method=block");
    let base = base.filter(|b| block || !b.starts_with("tune.block"));
    base.chain(way.iter().copied()).chain(more.iter().copied()).collect()
}

#[test]
fn every_way_resumes_to_the_same_bits() {
    for way in WAYS {
        let bench = Bench::new();
        bench.train(&settings(way, &["train.max_steps=9", "train.output_dir=whole"]));
        bench.train(&settings(way, &["train.max_steps=5", "train.output_dir=broken"]));
        bench.train(&settings(
            way,
            &["train.max_steps=9", "train.output_dir=broken", "--resume"],
        ));
        assert_same(&bench, "whole", "broken");
        let losses: Vec<f64> = bench.steps("whole").iter().map(|l| number(l, "loss")).collect();
        assert!(losses.iter().all(|l| l.is_finite()), "{way:?} {losses:?}");
        // The exported weights differ from the initial ones.
        let read = |path: &str| Weights::open_file(&bench.path(path)).unwrap();
        let (a, b) = (read("model/model.safetensors"), read("whole/final/model.safetensors"));
        assert!(
            a.names().any(|n| a.read_f32(n).unwrap() != b.read_f32(n).unwrap()),
            "{way:?}"
        );
    }
}

#[test]
fn rounding_at_random_is_the_same_in_a_fused_step() {
    let bench = Bench::new();
    let run = |name: &str, norm: &str| {
        let out = format!("train.output_dir={name}");
        let way = ["tune.method=full", "model.dtype=bf16", "optimizer.master=stochastic"];
        bench.train(&settings(&way, &["train.max_steps=4", norm, &out]));
        let lines = bench.steps(name);
        lines.iter().map(|l| number(l, "loss").to_bits()).collect::<Vec<_>>()
    };
    // Without clipping, gradients are applied immediately; with a very high clip value they are kept.
    assert_eq!(
        run("fused", "train.max_grad_norm=0"),
        run("kept", "train.max_grad_norm=1e9")
    );
}

#[test]
fn states_in_eight_bits_are_eight_bits_on_disk_and_learn_the_same() {
    let bench = Bench::new();
    let run = |name: &str, state: &str| {
        let out = format!("train.output_dir={name}");
        let way = ["tune.method=full", state];
        bench.train(&settings(&way, &["train.max_steps=10", &out]));
        number(bench.steps(name).last().unwrap(), "loss")
    };
    let (wide, narrow) = (
        run("wide", "optimizer.state=f32"),
        run("narrow", "optimizer.state=int8"),
    );
    assert!((wide - narrow).abs() < 0.02 * wide, "{wide} {narrow}");
    let file = Weights::open_file(&bench.path("narrow/checkpoint-10/optimizer.safetensors")).unwrap();
    let codes = file.info("lm_head.weight#m.codes").unwrap();
    assert_eq!(codes.shape, [320 * 32]);
    assert_eq!(file.info("lm_head.weight#v.scales").unwrap().shape, [40]);
    assert!(file.info("model.norm.weight#m").is_some(), "small ones stay f32");
}

#[test]
fn a_part_of_every_matrix_changes_in_its_window_only() {
    let bench = Bench::new();
    let way = [
        "tune.method=block",
        "tune.block.partition=ratio",
        "tune.block.order=ascending",
        "tune.block.update_ratio=0.25",
    ];
    bench.train(&settings(&way, &["train.max_steps=2", "train.output_dir=run"]));
    let read = |path: &str| Weights::open_file(&bench.path(path)).unwrap();
    let (a, b) = (read("model/model.safetensors"), read("run/final/model.safetensors"));
    for name in a.names() {
        let (a, b) = (a.read_f32(name).unwrap(), b.read_f32(name).unwrap());
        let n = a.len();
        let changed: Vec<usize> = (0..n).filter(|i| a[*i] != b[*i]).collect();
        let window = match (name.starts_with("model.layers."), n < 100) {
            (false, _) => 0,
            (true, true) => n,
            (true, false) => n / 4,
        };
        assert!(changed.iter().all(|i| *i < window), "{name}");
        assert!(
            changed.len() * 10 >= window * 9,
            "{name}: {} of {window}",
            changed.len()
        );
    }
}

#[test]
fn corrections_reach_the_blocks_of_their_scope() {
    for (scope, reached) in [
        ("all", [true, false, true, true]),
        ("partial", [false, false, true, true]),
    ] {
        let bench = Bench::new();
        let scope = format!("tune.block.correction_scope={scope}");
        let way = [
            "tune.method=block",
            "tune.block.order=fixed",
            "tune.block.start_block=1",
            "tune.block.correction=sgd",
            &scope,
        ];
        bench.train(&settings(&way, &["train.max_steps=1", "train.output_dir=run"]));
        let state = Weights::open_file(&bench.path("run/checkpoint-1/optimizer.safetensors"));
        assert!(state.is_err(), "saved at multiples of 5 only");
        let read = |path: &str| Weights::open_file(&bench.path(path)).unwrap();
        let (a, b) = (read("model/model.safetensors"), read("run/final/model.safetensors"));
        for name in a.names() {
            let changed = a.read_f32(name).unwrap() != b.read_f32(name).unwrap();
            let layer = name
                .strip_prefix("model.layers.")
                .and_then(|rest| rest[..1].parse::<usize>().ok());
            let want = layer.is_some_and(|l| l == 1 || reached[l]);
            assert_eq!(changed, want, "{scope} {name}");
        }
    }
}

#[test]
fn what_does_not_go_together_is_refused() {
    let bench = Bench::new();
    for (settings, words) in [
        (
            &["tune.block.partition=ratio", "tune.block.correction=sgd"][..],
            "every matrix is active",
        ),
        (
            &["tune.block.order=importance", "tune.block.importance=[\"head=2\"]"][..],
            "matches no block",
        ),
        (
            &["tune.block.order=importance", "tune.block.layers_per_block=9"][..],
            "larger than the number of blocks",
        ),
        (
            &["tune.block.correction=sgd", "memory.frozen_weights=nf4"],
            "smaller than the distance between two quantized values",
        ),
    ] {
        let base = ["train", "--recipe", "r.toml", "tune.method=block", "train.max_steps=1"];
        let out = bench.ft(&[&base[..], settings].concat());
        assert_eq!(out.status.code(), Some(2), "{}", said(&out));
        assert!(said(&out).contains(words), "{}", said(&out));
    }
}
