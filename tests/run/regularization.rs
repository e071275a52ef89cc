//! NEFTune and label smoothing: what they change in a run, what they leave alone, and where they are refused.

use crate::bench::{Bench, number, said};

/// Loss and gradient norm of the first step, and the evaluation before it.
fn first(bench: &Bench, run: &str, settings: &[&str]) -> (f64, f64, f64) {
    let out = format!("train.output_dir={run}");
    let shared = [
        "train.max_steps=1",
        "train.save_steps=0",
        "data.eval=rows.jsonl",
        "model.dtype=f32",
        &out,
    ];
    bench.train(&[&shared[..], settings].concat());
    let step = &bench.steps(run)[0];
    let lines = bench.lines(&format!("{run}/metrics.jsonl"));
    let eval = lines.iter().find(|line| line.get("eval_loss").is_some()).unwrap();
    (
        number(step, "loss"),
        number(step, "grad_norm"),
        number(eval, "eval_loss"),
    )
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-5 * b.abs()
}

#[test]
fn noise_is_that_of_the_row_and_only_in_training() {
    let bench = Bench::new();
    let rows = |batch: &str, windows: &str| {
        [
            format!("train.batch_size={batch}"),
            format!("train.gradient_accumulation_steps={windows}"),
        ]
    };
    let of = |run: &str, cut: &[String; 2], more: &[&str]| {
        first(
            &bench,
            run,
            &[&[&cut[0], &cut[1], "tune.method=full"][..], more].concat(),
        )
    };
    let noise = "train.neftune_noise_alpha=20";
    let plain = of("plain", &rows("4", "1"), &[]);
    let noisy = of("noisy", &rows("4", "1"), &[noise]);
    assert!(
        !near(noisy.0, plain.0) && !near(noisy.1, plain.1),
        "{noisy:?} {plain:?}"
    );
    assert_eq!(noisy.2, plain.2, "an evaluation has no noise");
    let cut = of("cut", &rows("1", "4"), &[noise]);
    assert!(near(cut.0, noisy.0) && near(cut.1, noisy.1), "{cut:?} {noisy:?}");
    let seed = of("seed", &rows("4", "1"), &[noise, "data.shuffle=false", "train.seed=1"]);
    let other = of("other", &rows("4", "1"), &[noise, "data.shuffle=false", "train.seed=2"]);
    assert!(!near(seed.0, other.0), "the rows are the same, the noise is not");
    let ran = bench.ft(&["train", "--recipe", "r.toml", "train.stage=grpo", noise]);
    assert!(!ran.status.success());
    assert!(said(&ran).contains("without noise"), "{}", said(&ran));
}

#[test]
fn label_smoothing_mixes_two_losses() {
    let bench = Bench::new();
    let of = |run: &str, factor: f64, method: &str| {
        let factor = format!("train.label_smoothing_factor={factor}");
        first(&bench, run, &[&factor, &format!("tune.method={method}")])
    };
    // (1 - e) A + e B for each part e.
    let [none, some, more] = [("0", 0.0), ("2", 0.2), ("4", 0.4)].map(|(run, factor)| of(run, factor, "full"));
    let linear = |a: f64, b: f64, c: f64| near(c - b, b - a) && !near(a, b);
    assert!(linear(none.0, some.0, more.0), "{none:?} {some:?} {more:?}");
    assert!(linear(none.2, some.2, more.2), "{none:?} {some:?} {more:?}");
    // A frozen head and adapters have the same loss; `ft eval` has no smoothing.
    let lora = of("lora", 0.2, "lora");
    assert!(near(lora.0, some.0), "{lora:?} {some:?}");
    let ran = bench.ft(&[
        "eval",
        "--model",
        "model",
        "--data",
        "rows.jsonl",
        "--dtype",
        "f32",
        "--json",
    ]);
    assert!(ran.status.success(), "{}", said(&ran));
    let evaluated: serde_json::Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert!(near(number(&evaluated, "loss"), none.2), "{evaluated} {none:?}");
    for (stage, said_of_it) in [
        ("dpo", "rlhf.label_smoothing"),
        ("distill", "teacher"),
        ("reward", "no distribution"),
    ] {
        let stage = format!("train.stage={stage}");
        let ran = bench.ft(&[
            "train",
            "--recipe",
            "r.toml",
            &stage,
            "train.label_smoothing_factor=0.1",
        ]);
        assert!(
            !ran.status.success() && said(&ran).contains(said_of_it),
            "{}",
            said(&ran)
        );
    }
}
