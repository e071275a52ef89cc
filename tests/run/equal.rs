//! Settings that must not change the result of training.

use crate::bench::{Bench, number, said};

fn close(a: f64, b: f64, what: &str) {
    assert!((a - b).abs() <= 1e-5 * b.abs(), "{what}: {a} and {b}");
}

/// Row R9.
#[test]
fn eight_rows_at_once_are_one_row_eight_times() {
    let bench = Bench::new();
    let base = [
        "tune.method=full",
        "data.shuffle=false",
        "train.max_steps=4",
        "train.save_steps=0",
        "optimizer.learning_rate=1e-4",
    ];
    let run = |name: &str, batch: &str, accumulation: &str| {
        let out = format!("train.output_dir={name}");
        let more = [&base[..], &[batch, accumulation, &out]].concat();
        bench.train(&more);
        bench.steps(name)
    };
    let wide = run("wide", "train.batch_size=8", "train.gradient_accumulation_steps=1");
    let long = run("long", "train.batch_size=1", "train.gradient_accumulation_steps=8");
    assert_eq!((wide.len(), long.len()), (4, 4));
    for (a, b) in wide.iter().zip(&long) {
        close(number(a, "loss"), number(b, "loss"), "loss");
        close(number(a, "grad_norm"), number(b, "grad_norm"), "gradient norm");
        assert_eq!(a["trained_tokens"], b["trained_tokens"]);
    }
}

#[test]
fn packed_rows_give_the_loss_of_the_same_rows_unpacked() {
    let bench = Bench::new();
    // All rows in one window: four of them fit in one bin of 512 tokens.
    let rows = std::fs::read_to_string(bench.path("rows.jsonl")).unwrap();
    let few: Vec<&str> = rows.lines().take(4).collect();
    std::fs::write(bench.path("rows.jsonl"), few.join("\n")).unwrap();
    let base = [
        "tune.method=full",
        "train.max_steps=1",
        "train.save_steps=0",
        "train.gradient_accumulation_steps=1",
    ];
    let run = |name: &str, more: &[&str]| {
        let out = format!("train.output_dir={name}");
        bench.train(&[&base[..], more, &[&out]].concat());
        bench.steps(name).remove(0)
    };
    let packed = run("packed", &["data.packing=true", "train.batch_size=1"]);
    let apart = run("apart", &["data.packing=false", "train.batch_size=4"]);
    assert_eq!(packed["trained_tokens"], apart["trained_tokens"], "all rows in both");
    close(number(&packed, "loss"), number(&apart, "loss"), "loss");
    close(
        number(&packed, "grad_norm"),
        number(&apart, "grad_norm"),
        "gradient norm",
    );
}

#[test]
fn fused_updates_learn_what_kept_gradients_learn() {
    let bench = Bench::new();
    let run = |name: &str, more: &[&str]| {
        let out = format!("train.output_dir={name}");
        let base = [
            "tune.method=full",
            "train.max_steps=5",
            "train.save_steps=0",
            "train.batch_size=2",
        ];
        bench.train(&[&base[..], more, &[&out]].concat());
        bench
            .steps(name)
            .iter()
            .map(|l| number(l, "loss"))
            .collect::<Vec<f64>>()
    };
    // Without clipping, a window of one micro-batch is updated layer by layer; a very high clip value keeps gradients.
    let fused = run(
        "fused",
        &["train.gradient_accumulation_steps=1", "train.max_grad_norm=0"],
    );
    let kept = run(
        "kept",
        &["train.gradient_accumulation_steps=1", "train.max_grad_norm=1e9"],
    );
    assert_eq!(fused, kept);
}

#[test]
fn kept_and_recomputed_activations_give_the_same_bits() {
    let bench = Bench::new();
    for method in ["full", "block", "lora"] {
        let run = |name: &str, activations: &str| {
            let out = format!("train.output_dir={name}");
            let method = format!("tune.method={method}");
            let activations = format!("memory.activations={activations}");
            let base = ["train.max_steps=3", "train.save_steps=0", "train.batch_size=2"];
            bench.train(&[&base[..], &[&method, &activations, &out]].concat());
            bench
                .steps(name)
                .iter()
                .map(|l| (number(l, "loss").to_bits(), number(l, "grad_norm").to_bits()))
                .collect::<Vec<_>>()
        };
        let kept = run(&format!("{method}-kept"), "keep");
        assert_eq!(kept, run(&format!("{method}-again"), "recompute"), "{method}");
        assert_eq!(kept, run(&format!("{method}-auto"), "auto"), "{method}");
    }
}

#[test]
fn every_set_of_cpu_operations_learns_the_same() {
    let bench = Bench::new();
    for method in ["full", "lora"] {
        let mut curves = Vec::new();
        for path in ["amx", "amx-emulated", "avx512-bf16", "avx512", "avx2", "portable"] {
            for dtype in ["f32", "bf16"] {
                let name = format!("{method}-{path}-{dtype}");
                let base = [
                    "train",
                    "--recipe",
                    "r.toml",
                    "train.max_steps=10",
                    "train.save_steps=0",
                ];
                let more = [
                    "train.batch_size=2".to_string(),
                    format!("tune.method={method}"),
                    format!("model.dtype={dtype}"),
                    format!("train.output_dir={name}"),
                ];
                let args: Vec<&str> = base.into_iter().chain(more.iter().map(String::as_str)).collect();
                let ran = bench.command(&args).env("FT_CPU", path).output().unwrap();
                if said(&ran).contains("this CPU cannot run") {
                    eprintln!("skipped: this CPU has no {path}");
                    break;
                }
                assert!(ran.status.success(), "{name}\n{}", said(&ran));
                let environment = std::fs::read_to_string(bench.path(&format!("{name}/environment.json"))).unwrap();
                let environment: serde_json::Value = serde_json::from_str(&environment).unwrap();
                let operations = path.strip_suffix("-emulated").unwrap_or(path);
                assert_eq!(environment["cpu"]["operations"], operations);
                let losses: Vec<f64> = bench.steps(&name).iter().map(|l| number(l, "loss")).collect();
                assert_eq!(losses.len(), 10);
                curves.push((name, losses));
            }
        }
        let (reference, want) = curves.iter().rfind(|(name, _)| name.ends_with("portable-f32")).unwrap();
        for (name, got) in &curves {
            let tolerance = if name.ends_with("f32") { 1e-4 } else { 2e-2 };
            for (a, b) in got.iter().zip(want) {
                assert!((a - b).abs() <= tolerance * b, "{name} {a}, {reference} {b}");
            }
        }
    }
    let unknown = bench.command(&["doctor"]).env("FT_CPU", "mmx").output().unwrap();
    assert_ne!(unknown.status.code(), Some(0));
    assert!(
        said(&unknown).contains("expected amx, amx-emulated, avx512-bf16, avx512, avx2 or portable"),
        "{}",
        said(&unknown)
    );
}

/// Rows longer than the model's positions: training and evaluation use the same tokens of them, and both report it.
#[test]
fn evaluation_takes_the_rows_that_training_takes() {
    let bench = Bench::new();
    let config = std::fs::read_to_string(bench.path("model/config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["max_position_embeddings"] = 16.into();
    std::fs::write(bench.path("model/config.json"), config.to_string()).unwrap();
    let rows = std::fs::read_to_string(bench.path("rows.jsonl")).unwrap();
    let few: Vec<&str> = rows.lines().take(4).collect();
    std::fs::write(bench.path("rows.jsonl"), few.join("\n")).unwrap();
    let args = [
        "train",
        "--recipe",
        "r.toml",
        "tune.method=full",
        "train.max_steps=1",
        "train.save_steps=0",
        "train.batch_size=4",
        "train.gradient_accumulation_steps=1",
        "train.output_dir=run",
    ];
    let trained = bench.ft(&args);
    assert!(trained.status.success(), "{}", said(&trained));
    let evaluated = bench.ft(&["eval", "--model", "model", "--data", "rows.jsonl", "--json"]);
    assert!(evaluated.status.success(), "{}", said(&evaluated));
    for out in [&trained, &evaluated] {
        assert!(
            said(out).contains("the model 16 positions (`max_position_embeddings`): rows are not truncated"),
            "{}",
            said(out)
        );
    }
    let report: serde_json::Value = serde_json::from_slice(&evaluated.stdout).unwrap();
    let step = bench.steps("run").remove(0);
    assert_eq!(report["tokens"], step["trained_tokens"]);
    close(
        number(&report, "loss"),
        number(&step, "loss"),
        "loss before the first step",
    );
}
