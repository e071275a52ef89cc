//! Block training with quantized frozen weights: trained values are exact, never lost, and of the same quality.

use crate::bench::{Bench, number, said};
use crate::resume::assert_same;
use ft::formats::weights::Weights;
use ft::ops::master;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

fn tensors(path: &Path) -> Weights {
    Weights::open_file(path).unwrap()
}

/// The checkpoint holds the exact f32 value of every trained parameter; `final/` has that value rounded to bf16.
#[test]
fn final_weights_in_bf16_are_the_exact_values_of_every_block_that_trained() {
    let bench = Bench::new();
    for (format, tier) in [("nf4", "device"), ("nf4", "disk"), ("int8", "device"), ("int4", "disk")] {
        let run = format!("{format}-{tier}");
        let (frozen, place) = (format!("memory.frozen_weights={format}"), format!("memory.tier={tier}"));
        let out = format!("train.output_dir={run}");
        bench.train(&[
            "model.dtype=bf16",
            "tune.block.switch_every=2",
            "tune.block.order=ascending",
            "train.max_steps=7",
            "train.save_steps=7",
            "train.gradient_accumulation_steps=1",
            &frozen,
            &place,
            &out,
        ]);
        let saved = tensors(&bench.path(&format!("{run}/checkpoint-7/weights.safetensors")));
        let last = tensors(&bench.path(&format!("{run}/final/model.safetensors")));
        let first = tensors(&bench.path("model/model.safetensors"));
        let (mut trained, mut finer) = (0, 0);
        for name in last.names() {
            let got = last.read_f32(name).unwrap();
            let Some(_) = saved.info(name) else {
                let rounded: Vec<f32> = first
                    .read_f32(name)
                    .unwrap()
                    .iter()
                    .map(|x| half::bf16::from_f32(*x).to_f32())
                    .collect();
                assert_eq!(got, rounded, "{run}: {name} never trained");
                continue;
            };
            let exact = saved.read_f32(name).unwrap();
            let rounded: Vec<f32> = exact.iter().map(|x| master::split(*x).0.to_f32()).collect();
            assert_eq!(got, rounded, "{run}: {name}");
            trained += 1;
            finer += exact.iter().zip(&rounded).filter(|(a, b)| a != b).count();
        }
        // Four blocks were active, and their fp32 masters are more precise than bf16.
        assert!(trained >= 4 * 9 && finer > 1000, "{run}: {trained} {finer}");
    }
}

/// Number of files in a directory; 0 if it does not exist.
fn count(dir: &Path) -> usize {
    fs::read_dir(dir).map_or(0, Iterator::count)
}

#[test]
fn a_run_killed_while_a_block_is_written_back_loses_nothing() {
    let bench = Bench::new();
    let settings = |out: &'static str| {
        [
            "model.dtype=bf16",
            "memory.tier=disk",
            "memory.frozen_weights=int8",
            "tune.block.switch_every=4",
            "tune.block.order=ascending",
            "train.max_steps=12",
            "train.save_steps=3",
            "train.gradient_accumulation_steps=1",
            out,
        ]
    };
    bench.train(&settings("train.output_dir=whole"));
    let mut halfway = 0;
    for _ in 0..20 {
        let run = bench.path("broken");
        if run.exists() {
            fs::remove_dir_all(&run).unwrap();
        }
        let mut child = bench.start(&settings("train.output_dir=broken"));
        let patience = Instant::now() + Duration::from_secs(120);
        // Step 4 was the last update of block 0; its parameters are written one file after the other.
        while count(&run.join("trained")) == 0 && child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < patience, "nothing is written back");
            std::thread::sleep(Duration::from_micros(100));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let written = count(&run.join("trained"));
        assert!(!run.join("final").exists());
        bench.train(&[&settings("train.output_dir=broken")[..], &["--resume"]].concat());
        assert_same(&bench, "whole", "broken");
        halfway += (written > 0 && written < 9) as usize;
        if halfway == 2 {
            return;
        }
    }
    panic!("no attempt was killed between the first and the last file of a block");
}

/// The quickstart with quantized weights: as many correct answers as without.
#[test]
#[ignore = "three times the quickstart"]
fn answers_are_as_good_over_codes() {
    let bench = Bench::new();
    let run = |name: &str, more: &[&str]| -> f64 {
        bench.shipped("quickstart", name, more);
        // Evaluates the exported result.
        let data = format!("{}/assets/world/eval.jsonl", env!("CARGO_MANIFEST_DIR"));
        let eval = bench.ft(&["eval", "--model", &format!("{name}/final"), "--data", &data, "--json"]);
        assert!(eval.status.success(), "{}", said(&eval));
        let report: Value = serde_json::from_slice(&eval.stdout).unwrap();
        println!("{name}: {report}");
        number(&report, "accuracy")
    };
    let plain = run("plain", &[]);
    for format in ["int8", "nf4"] {
        let quantized = run(format, &[&format!("memory.frozen_weights={format}")]);
        // More correct answers are no loss: 200 answers move by a few in both directions.
        assert!(
            quantized >= plain - 0.01,
            "{format}: {quantized}, without codes {plain}"
        );
    }
}
