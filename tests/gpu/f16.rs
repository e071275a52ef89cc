//! Training in f16: the losses are those of f32 on the CPU, and a loss scale that is too large falls.

use crate::support::gpu;
use crate::train::{close, number, train};
use tempfile::TempDir;

/// Settings of each run in addition to the shared ones.
const RUNS: [(&str, &[&str]); 3] = [
    ("full", &["tune.method=full"]),
    ("lora", &["tune.method=lora", "optimizer.learning_rate=1e-3"]),
    (
        "blocks from the disk",
        &["tune.method=block", "tune.block.switch_every=2", "memory.tier=disk"],
    ),
];

#[test]
fn every_method_loses_what_it_loses_in_f32() {
    let Some(_gpu) = gpu() else { return };
    for (name, settings) in RUNS {
        let dir = TempDir::new().unwrap();
        let run = |device, dtype: &str, out: &str| {
            let dtype = format!("model.dtype={dtype}");
            // A loss over fewer tokens differs by more than 2e-4 from that in f32.
            let sizes = ["train.max_steps=3", "data.max_length=256"];
            train(
                device,
                &[settings, &[dtype.as_str()], &sizes].concat(),
                &dir.path().join(out),
            )
        };
        let (here, there) = (run("cpu", "f32", "cpu"), run("cuda:0", "f16", "gpu"));
        assert_eq!((here.len(), there.len()), (3, 3), "{name}");
        for (a, b) in here.iter().zip(&there) {
            let what = format!("{name}, step {}", a["step"]);
            // The first step has the same weights; trained ones are rounded to f16.
            let (loss, norm) = match (number(a, "step") as u64, name) {
                (1, _) | (_, "lora") => (2e-4, 2e-3),
                _ => (5e-3, 2e-2),
            };
            close(number(a, "loss"), number(b, "loss"), loss, &format!("{what}: loss"));
            close(
                number(a, "grad_norm"),
                number(b, "grad_norm"),
                norm,
                &format!("{what}: norm"),
            );
            assert_eq!(
                (number(b, "loss_scale"), number(b, "skipped_steps")),
                (65536.0, 0.0),
                "{what}"
            );
        }
        // The stored weights are f16, and load again.
        let stored = std::fs::read(dir.path().join("gpu/final").join(match name {
            "lora" => "adapter_config.json",
            _ => "config.json",
        }));
        let stored = String::from_utf8(stored.unwrap()).unwrap();
        assert_eq!(
            stored.contains("float16") && !stored.contains("bfloat16"),
            name != "lora",
            "{stored}"
        );
    }
}

/// An adapter and an optimizer with kernels of their own, and a stage with a head of its own.
const OTHERS: [(&str, &[&str]); 3] = [
    (
        "dora",
        &[
            "tune.method=lora",
            "tune.lora.use_dora=true",
            "optimizer.learning_rate=1e-3",
        ],
    ),
    ("adafactor", &["tune.method=full", "optimizer.name=adafactor"]),
    (
        "reward",
        &[
            "tune.method=full",
            "train.stage=reward",
            "data.train=assets/world/preference-train.jsonl",
            "data.eval=[]",
            "data.format=preference",
        ],
    ),
];

#[test]
fn adapters_optimizers_and_stages_lose_what_they_lose_in_f32() {
    let Some(_gpu) = gpu() else { return };
    for (name, settings) in OTHERS {
        let dir = TempDir::new().unwrap();
        let run = |device, dtype: &str| {
            let settings = [settings, &[dtype, "train.max_steps=2"]].concat();
            train(device, &settings, &dir.path().join(device))
        };
        let (here, there) = (run("cpu", "model.dtype=f32"), run("cuda:0", "model.dtype=f16"));
        assert_eq!((here.len(), there.len()), (2, 2), "{name}");
        for (a, b) in here.iter().zip(&there) {
            let what = format!("{name}, step {}", a["step"]);
            // The second step has weights that are rounded to f16.
            let (loss, norm) = if number(a, "step") < 2.0 {
                (2e-3, 5e-3)
            } else {
                (5e-3, 2e-2)
            };
            close(number(a, "loss"), number(b, "loss"), loss, &format!("{what}: loss"));
            close(
                number(a, "grad_norm"),
                number(b, "grad_norm"),
                norm,
                &format!("{what}: norm"),
            );
            assert!(
                number(a, "grad_norm") > 0.0 && number(b, "skipped_steps") == 0.0,
                "{what}"
            );
        }
    }
}

#[test]
fn a_loss_scale_that_is_too_large_falls_and_the_run_goes_on() {
    let Some(_gpu) = gpu() else { return };
    let dir = TempDir::new().unwrap();
    let settings = [
        "tune.method=full",
        "model.dtype=f16",
        "train.max_steps=7",
        "train.save_steps=2",
        "train.save_total_limit=9",
        "train.loss_scale=1048576",
        "train.loss_scale_interval=2",
        "optimizer.learning_rate=1e-3",
    ];
    let lines = train("cuda:0", &settings, &dir.path().join("run"));
    assert_eq!(lines.len(), 7);
    let (mut scale, mut steps, mut skipped) = (1048576.0, 0, 0);
    for line in &lines {
        assert_eq!(number(line, "loss_scale"), scale, "{line}");
        assert!(number(line, "loss").is_finite());
        if line["grad_norm"].is_null() {
            (scale, steps, skipped) = (scale / 2.0, 0, skipped + 1);
        } else {
            steps += 1;
            if steps == 2 {
                (scale, steps) = (scale * 2.0, 0);
            }
        }
        assert_eq!(number(line, "skipped_steps"), f64::from(skipped), "{line}");
    }
    assert!(lines[0]["grad_norm"].is_null(), "the first step was not skipped");
    assert!(number(&lines[6], "loss") < number(&lines[0], "loss"));
    assert!((2..7).contains(&skipped), "{skipped} of 7 steps were skipped");
    // A run that is resumed within the skipped steps, and after them.
    for stop in [2, 4] {
        let checkpoint = dir.path().join(format!("run/checkpoint-{stop}"));
        let resume = ["--resume", checkpoint.to_str().unwrap()];
        let rest = train(
            "cuda:0",
            &[&settings[..], &resume].concat(),
            &dir.path().join(format!("from-{stop}")),
        );
        // With those of the run before.
        assert_eq!(rest.len(), 7);
        for (a, b) in lines.iter().zip(&rest) {
            for key in ["loss", "loss_scale", "skipped_steps", "learning_rate"] {
                assert_eq!(number(a, key).to_bits(), number(b, key).to_bits(), "{key}: {a} {b}");
            }
        }
    }
}
