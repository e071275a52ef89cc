//! Moving averages of the weights (`train.ema_decay`): which weights an evaluation, `final/` and a checkpoint have, and the
//! memory. Their numbers are compared with torch in `tests/parity/training.rs`, resumes in `resumes.rs`.

use crate::bench::{Bench, number, said};
use serde_json::Value;
use std::fs;

const SETTINGS: [&str; 6] = [
    "tune.method=full",
    "train.max_steps=6",
    "train.eval_steps=3",
    "train.save_steps=6",
    "data.eval=rows.jsonl",
    "optimizer.learning_rate=3e-3",
];

fn losses(bench: &Bench, run: &str) -> Vec<f64> {
    bench.steps(run).iter().map(|step| number(step, "loss")).collect()
}

#[test]
fn evaluations_and_results_have_the_average_and_training_has_the_weights() {
    let bench = Bench::new();
    for (run, more) in [
        ("f32", &["model.dtype=f32"][..]),
        // These weights cannot have the exact average.
        ("rounded", &["model.dtype=bf16", "optimizer.master=stochastic"]),
    ] {
        let plain = format!("{run}-plain");
        for (out, average) in [(run, &["train.ema_decay=0.9"][..]), (&plain, &[])] {
            let out = format!("train.output_dir={out}");
            bench.train(&[&SETTINGS[..], more, average, &[&out]].concat());
        }
        assert_eq!(losses(&bench, run), losses(&bench, &plain), "training is the same");
        let evals = |run: &str| -> Vec<f64> {
            let lines = bench.lines(&format!("{run}/metrics.jsonl"));
            let evals = lines.iter().filter(|line| line.get("eval_loss").is_some());
            evals.map(|line| number(line, "eval_loss")).collect()
        };
        let (found, without) = (evals(run), evals(&plain));
        assert_eq!(found.len(), 3);
        assert_eq!(found[0], without[0], "no step was made");
        assert!(found[1] > without[1] && found[2] > without[2], "{found:?} {without:?}");
        let model = format!("{run}/final");
        let eval = ["eval", "--model", &model, "--data", "rows.jsonl", "--json"];
        let ran = bench.ft(&eval);
        assert!(ran.status.success(), "{}", said(&ran));
        let evaluated: Value = serde_json::from_slice(&ran.stdout).unwrap();
        let (loss, want) = (number(&evaluated, "loss"), found[2]);
        assert!((loss - want).abs() <= 1e-5 * want, "{loss} {want}");
        let ran = bench.ft(&[
            "export",
            &format!("{run}/checkpoint-6"),
            "--out",
            &format!("{run}-again"),
        ]);
        assert!(ran.status.success(), "{}", said(&ran));
        let file = |dir: &str| fs::read(bench.path(&format!("{dir}/model.safetensors"))).unwrap();
        assert!(file(&format!("{run}/final")) == file(&format!("{run}-again")));
    }
    let ran = bench.ft(&["plan", "--recipe", "r.toml", "tune.method=full", "train.ema_ramp=false"]);
    assert!(said(&ran).contains("`train.ema_ramp` has no effect"), "{}", said(&ran));
}
