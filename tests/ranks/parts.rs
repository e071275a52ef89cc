//! Checkpoints in parts: each rank writes its own files. Resumed on other numbers of ranks, damaged, and with failures.

use crate::bench::{Bench, files, said};
use crate::faults::{LONG, assert_once, go_on, until_saved};
use crate::job::{self, ranks_of, wait};
use crate::same::{METHODS, assert_same};
use crate::same_bits::{BASE, SHARDED, train};
use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

pub const PARTS: &str = "distributed.checkpoint=parts";

const FULL: [&str; 2] = ["tune.method=full", "model.dtype=bf16"];

/// Names in a checkpoint.
fn names(bench: &Bench, checkpoint: &str) -> Vec<String> {
    files(&bench.path(checkpoint))
        .into_iter()
        .map(|(name, _)| name)
        .collect()
}

/// What the steps after `step` computed.
fn numbers(bench: &Bench, run: &str, step: u64) -> Vec<String> {
    let steps = bench.steps(run).into_iter();
    let later = steps.filter(|line| line["step"].as_u64().unwrap() > step);
    let keys = ["step", "loss", "grad_norm", "learning_rate", "trained_tokens"];
    later
        .map(|line| keys.map(|key| line[key].to_string()).join(" "))
        .collect()
}

/// The tensors of a checkpoint in one.
fn tensors(bench: &Bench, checkpoint: &str) -> Vec<(String, Vec<u8>)> {
    let mut all = files(&bench.path(checkpoint));
    all.retain(|(name, _)| name.ends_with(".safetensors"));
    assert!(all.len() > 1, "{checkpoint}");
    all
}

/// Three ranks save in parts; from there the run goes on with other numbers of ranks, and has the bits of one rank that was
/// never stopped. Files of a checkpoint that rank 0 writes alone: `of_root`.
fn check(method: &str, settings: &[&str], sizes: &[usize], of_root: &[&str]) {
    let bench = Bench::new();
    let apart = settings.iter().any(|setting| setting.contains("sync_every"));
    train(&bench, if apart { 3 } else { 1 }, settings, "one");
    train(&bench, 3, &[settings, &[PARTS]].concat(), "whole");
    assert_same(&bench, "one", "whole");
    let found = names(&bench, "whole/checkpoint-4");
    let mut want: Vec<String> = of_root.iter().map(|name| name.to_string()).collect();
    want.extend(["manifest.json", "state.json"].map(String::from));
    let averages = settings.iter().any(|setting| setting.contains("ema_decay"));
    for file in [
        &["optimizer", "weights"][..],
        if averages { &["averages"] } else { &[] },
    ]
    .concat()
    {
        want.extend((1..=3).map(|rank| format!("{file}-0000{rank}-of-00003.safetensors")));
    }
    want.sort();
    assert_eq!(found, want, "{method}");
    for size in sizes {
        let (name, from) = (format!("on-{size}"), bench.path("whole/checkpoint-4"));
        let from = format!("--resume={}", from.display());
        let whole_again = if *size == 2 {
            PARTS
        } else {
            "distributed.checkpoint=one"
        };
        train(&bench, *size, &[settings, &[&from, whole_again]].concat(), &name);
        let (steps, want) = (numbers(&bench, &name, 4), numbers(&bench, "one", 4));
        assert!(steps == want && steps.len() == 6, "{method}: steps on {size} ranks");
        let result = |run: &str| files(&bench.path(run).join("final"));
        assert!(result("one") == result(&name), "{method}: final/ on {size} ranks");
        if whole_again != PARTS {
            let [a, b] = ["one", &name].map(|run| tensors(&bench, &format!("{run}/checkpoint-8")));
            assert!(a == b, "{method}: tensors of a checkpoint on {size} ranks");
        }
    }
}

#[test]
fn a_run_saved_in_parts_goes_on_with_another_number_of_ranks() {
    let sharded = [&FULL[..], &[SHARDED, "train.ema_decay=0.9"]].concat();
    check("full", &sharded, &[1, 2, 3, 4], &[]);
    check("block", METHODS[0].1, &[1, 2], &[]);
}

#[test]
fn other_states_are_saved_in_parts() {
    let int8 = [METHODS[1].1, &["optimizer.state=int8"]].concat();
    check("block from the disk, 8-bit moments", &int8, &[1, 2], &[]);
    let (method, settings) = METHODS[10];
    let adalora = [settings, &["train.ema_decay=0.9"]].concat();
    check(method, &adalora, &[1, 2], &["ranks.safetensors"]);
    let adafactor = [&FULL[..], &["optimizer.name=adafactor"]].concat();
    check("adafactor", &adafactor, &[1, 2], &[]);
}

/// Each rank has moments of its own.
#[test]
fn ranks_that_train_alone_save_their_own_moments() {
    let apart = [
        &FULL[..],
        &["distributed.sync_every=2", "train.gradient_accumulation_steps=3"],
    ]
    .concat();
    check("apart", &apart, &[3], &[]);
}

#[test]
fn a_checkpoint_in_parts_is_exported_and_verified_and_a_damaged_part_is_named() {
    let bench = Bench::new();
    train(&bench, 1, &[&FULL[..], &[PARTS]].concat(), "one");
    assert!(
        names(&bench, "one/checkpoint-8").contains(&"weights.safetensors".to_string()),
        "one rank writes one file"
    );
    train(&bench, 3, &[&FULL[..], &[PARTS]].concat(), "out");
    let export = |run: &str| {
        let (from, to) = (format!("{run}/checkpoint-8"), format!("{run}-exported"));
        let ran = bench.ft(&["export", &from, "--out", &to]);
        assert!(ran.status.success(), "{}", said(&ran));
        files(&bench.path(&to))
    };
    assert!(export("one") == export("out"));
    let verify = || bench.ft(&["runs", "verify", "out"]);
    assert!(verify().status.success(), "{}", said(&verify()));
    let part = "checkpoint-8/optimizer-00002-of-00003.safetensors";
    let path = bench.path("out").join(part);
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&path, bytes).unwrap();
    let out = verify();
    let text = format!("{}{}", said(&out), String::from_utf8_lossy(&out.stdout));
    assert!(out.status.code() == Some(1) && text.contains(part), "{text}");
    fs::remove_dir_all(bench.path("out/final")).unwrap();
    let resume = [&BASE[..], &FULL, &["train.output_dir=out", "--resume"]].concat();
    let ran = job::run(&bench, 2, &resume);
    let text = said(&ran);
    assert!(ran.status.code() == Some(1) && text.contains(part), "{text}");
    // The one before is whole.
    job::train(&bench, 2, &[&resume[..], &["--allow-older"]].concat());
    assert!(files(&bench.path("out/final")) == files(&bench.path("one/final")));
}

/// A full disk on one rank.
#[test]
fn a_failed_write_of_one_rank_ends_all_and_leaves_the_checkpoint_before() {
    let bench = Bench::new();
    let arguments = [&LONG[..], &[PARTS]].concat();
    let mut job = job::start(&bench, &vec![arguments; 3]);
    until_saved(&bench, &mut job);
    let rank = ranks_of(&job)[1].to_string();
    let limited = Command::new("prlimit").args(["--pid", &rank, "--fsize=16"]).status();
    assert!(limited.unwrap().success());
    let out = wait(job);
    let text = said(&out);
    assert_eq!(out.status.code(), Some(1), "{text}");
    assert_once(&text, "[rank 1 (host ");
    assert_once(&text, "cannot write");
    assert!(
        text.contains("-00002-of-00003.safetensors") && !text.contains("[rank 0"),
        "{text}"
    );
    let left = fs::read_dir(bench.path("out")).unwrap().flatten();
    let left: Vec<String> = left.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    assert!(!left.iter().any(|name| name.contains(".tmp-")), "{left:?}");
    let verified = bench.ft(&["runs", "verify", "out"]);
    assert!(verified.status.success(), "{}", said(&verified));
    go_on(&bench, 2);
}

/// Each rank has its own directory of runs under the same path, as on machines without shared files.
#[test]
fn ranks_that_do_not_share_the_run_directory_are_refused_before_the_first_step() {
    let bench = Bench::new();
    let places = ["first", "second"];
    for name in places {
        fs::create_dir_all(bench.path(name).join("runs")).unwrap();
        for shared in ["model", "rows.jsonl", "r.toml"] {
            symlink(bench.path(shared), bench.path(name).join(shared)).unwrap();
        }
    }
    symlink("/proc/self/cwd/runs", bench.path("runs")).unwrap();
    let out = format!("train.output_dir={}", bench.path("runs/out").display());
    let run = |more: &[&str]| {
        let arguments = [&BASE[..], &[&out], more].concat();
        let ranks = places.map(|name| (bench.path(name), arguments.clone()));
        job::wait(job::begin(job::mpirun_in(&bench, &ranks)))
    };
    let ran = run(&[PARTS]);
    let text = said(&ran);
    assert_eq!(ran.status.code(), Some(1), "{text}");
    assert_once(&text, "does not see the directory of a checkpoint in parts");
    assert_once(&text, "[rank 1 (host ");
    assert_once(&text, "distributed.checkpoint = \"one\"");
    let left = |name: &str| files(&bench.path(name).join("runs"));
    let traces: Vec<String> = left("first").into_iter().chain(left("second")).map(|f| f.0).collect();
    assert!(
        !traces
            .iter()
            .any(|name| name.contains("checkpoint") || name.contains("metrics")),
        "{traces:?}"
    );
    let ran = run(&["distributed.checkpoint=one", "--overwrite"]);
    assert!(ran.status.success(), "{}", said(&ran));
}
