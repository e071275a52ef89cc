//! Distillation from a teacher with another tokenizer.

use crate::bench::{Bench, copy_all, goldens, number, said};
use crate::resume::assert_same;
use std::fs;

const BASE: [&str; 8] = [
    "train.stage=distill",
    "train.max_steps=8",
    "train.batch_size=2",
    "train.gradient_accumulation_steps=2",
    "train.save_steps=0",
    "distill.teacher=teacher",
    "tune.method=full",
    "optimizer.learning_rate=3e-3",
];

/// A test directory with a teacher of another family and with another tokenizer in `teacher/`.
fn bench() -> Bench {
    let bench = Bench::new();
    copy_all(&goldens().join("training/models/qwen3"), &bench.path("teacher"));
    copy_all(&goldens().join("tokenizers/small"), &bench.path("teacher"));
    // The small tokenizer has no capital letters.
    let rows = fs::read_to_string(bench.path("rows.jsonl")).unwrap();
    fs::write(bench.path("rows.jsonl"), rows.to_lowercase()).unwrap();
    bench
}

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&BASE[..], more].concat()
}

fn train(bench: &Bench, more: &[&str]) -> String {
    let settings = with(more);
    let out = bench.ft(&[&["train", "--recipe", "r.toml"], &settings[..]].concat());
    assert!(out.status.success(), "{}", said(&out));
    said(&out)
}

fn divergences(bench: &Bench, run: &str) -> Vec<f64> {
    bench.steps(run).iter().map(|s| number(s, "divergence")).collect()
}

#[test]
fn a_teacher_with_another_tokenizer_teaches() {
    let bench = bench();
    for kind in ["uld", "gold"] {
        let key = format!("distill.alignment={kind}");
        let (plain, out) = (format!("runs/{kind}"), format!("train.output_dir=runs/{kind}"));
        let shown = train(&bench, &[&key, &out]);
        assert!(shown.contains("alignment with the teacher's tokens:"), "{shown}");
        assert_eq!(shown.contains("ids have the same text"), kind == "gold", "{shown}");
        let all = divergences(&bench, &plain);
        assert!(
            all.len() == 8 && all[7] < all[0] && all.iter().all(|x| *x > 0.0),
            "{kind}: {all:?}"
        );
        // From the disk, layer by layer, with heads in parts; the rows of packed sequences are found too.
        let disk = format!("train.output_dir=runs/{kind}-disk");
        train(
            &bench,
            &[
                &key,
                &disk,
                "tune.method=lora",
                "memory.tier=disk",
                "distill.teacher_tier=disk",
                "data.packing=true",
            ],
        );
        let device = format!("train.output_dir=runs/{kind}-device");
        train(&bench, &[&key, &device, "tune.method=lora", "data.packing=true"]);
        let (a, b) = (
            divergences(&bench, &format!("runs/{kind}-disk")),
            divergences(&bench, &format!("runs/{kind}-device")),
        );
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-4 * b), "{a:?} {b:?}");
    }
}

#[test]
fn answers_of_the_student_are_aligned() {
    let bench = bench();
    train(
        &bench,
        &[
            "distill.alignment=gold",
            "distill.lmbda=1",
            "distill.max_new_tokens=12",
            "data.packing=false",
            "train.max_steps=3",
            "train.output_dir=runs/own",
        ],
    );
    let steps = bench.steps("runs/own");
    assert!(
        steps.len() == 3 && number(&steps[0], "student_rows") == 4.0,
        "{steps:?}"
    );
    assert!(steps.iter().any(|s| number(s, "divergence") > 0.0), "{steps:?}");
}

#[test]
fn what_cannot_be_aligned_is_refused_with_the_reason() {
    let bench = bench();
    let refused = |arguments: &[&str]| {
        let out = bench.ft(arguments);
        assert!(!out.status.success(), "{arguments:?}");
        said(&out)
    };
    let of = |more: &[&str]| refused(&[&["train", "--recipe", "r.toml"], &with(more)[..]].concat());
    let e = of(&[]);
    assert!(
        e.contains("tokenizers of teacher and student differ") && e.contains("distill.alignment"),
        "{e}"
    );
    let e = of(&["distill.alignment=uld", "distill.hidden_weight=0.5"]);
    assert!(e.contains("belong to other tokens"), "{e}");
    let e = of(&["distill.alignment=uld", "distill.teacher_cache=x"]);
    assert!(e.contains("cannot be aligned"), "{e}");
    let settings = with(&["distill.alignment=gold"]);
    let e = refused(&[&["distill", "cache", "--recipe", "r.toml", "--out", "x"], &settings[..]].concat());
    assert!(e.contains("another tokenizer cannot be stored"), "{e}");
}

/// The second run finds tokens and alignment in the cache, and learns the same.
#[test]
fn an_alignment_in_the_token_cache_is_the_one_in_memory() {
    let bench = bench();
    for kind in ["uld", "gold"] {
        let key = format!("distill.alignment={kind}");
        let mut shown = Vec::new();
        for (name, cache) in [("memory", "false"), ("first", "true"), ("second", "true")] {
            let (cache, out) = (format!("data.cache={cache}"), format!("train.output_dir={kind}-{name}"));
            let said = train(&bench, &[&key, &cache, &out, "train.max_steps=4"]);
            let line = said
                .lines()
                .find(|line| line.contains("alignment with the teacher's tokens:"));
            shown.push(line.unwrap().trim().to_string());
            assert_same(&bench, &format!("{kind}-memory"), &format!("{kind}-{name}"));
        }
        assert!(shown.iter().all(|line| *line == shown[0]), "{shown:?}");
    }
    // Tokens for the student and for the teacher, and one alignment for both kinds.
    assert_eq!(fs::read_dir(bench.path(".ft-tokens")).unwrap().count(), 3);
}
