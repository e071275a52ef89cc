//! A full disk where the run can go on without the checkpoint: that of the best evaluation, and that of the last step.

use crate::bench::{Bench, files, number, said};
use crate::disk::{Fault, on_disk, ran_on_disk};
use crate::same::assert_same;
use std::collections::BTreeMap;
use std::fs;
use std::process::Output;

const EIO: i32 = 5;
const ENOSPC: i32 = 28;
/// LoRA on one half of the rows. The loss on the other half rises again after a few steps, and later comes down a little.
const SETTINGS: [&str; 10] = [
    "tune.method=lora",
    "tune.lora.r=4",
    "data.train=train.jsonl",
    "data.eval=eval.jsonl",
    "optimizer.learning_rate=0.02",
    "schedule.name=constant",
    "train.eval_steps=1",
    "train.save_steps=4",
    "train.save_total_limit=1",
    "train.load_best_model_at_end=true",
];

fn bench() -> Bench {
    let bench = Bench::new();
    let rows = fs::read_to_string(bench.path("rows.jsonl")).unwrap();
    let rows: Vec<&str> = rows.lines().collect();
    let (train, eval) = rows.split_at(rows.len() / 2);
    fs::write(bench.path("train.jsonl"), train.join("\n")).unwrap();
    fs::write(bench.path("eval.jsonl"), eval.join("\n")).unwrap();
    bench
}

/// Runs into `run`; the fault is that of the first operation on a path that begins with `place`. `None` without a C compiler.
fn faulty(bench: &Bench, place: &str, fault: Fault, more: &[&str]) -> Option<Output> {
    let run = ["train", "--recipe", "r.toml", "train.output_dir=run"];
    let mut command = bench.command(&[&run[..], &SETTINGS, more].concat());
    on_disk(bench, &mut command, fault, 1)?;
    let root = bench.dir.path().canonicalize().unwrap().join(place);
    command.env("FT_DISK_ROOT", format!("{}*", root.display()));
    Some(command.output().unwrap())
}

/// The undisturbed run.
fn train(bench: &Bench, run: &str, more: &[&str]) {
    let out = format!("train.output_dir={run}");
    bench.train(&[&SETTINGS[..], &[&out], more].concat());
}

/// The steps of the checkpoints.
fn saved(bench: &Bench) -> Vec<u64> {
    let names = fs::read_dir(bench.path("run")).unwrap();
    let names = names.map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut steps: Vec<u64> = names
        .filter_map(|name| name.strip_prefix("checkpoint-")?.parse().ok())
        .collect();
    steps.sort();
    steps
}

/// Values of `eval_loss` by step, without the evaluation before the run.
fn evaluations(bench: &Bench, run: &str) -> BTreeMap<u64, f64> {
    let lines = bench.lines(&format!("{run}/metrics.jsonl"));
    let evaluated = lines.iter().filter(|line| line.get("eval_loss").is_some());
    let all = evaluated.map(|line| (line["step"].as_u64().unwrap(), number(line, "eval_loss")));
    all.filter(|(step, _)| *step > 0).collect()
}

fn best(all: &BTreeMap<u64, f64>) -> u64 {
    *all.iter().min_by(|a, b| a.1.total_cmp(b.1)).unwrap().0
}

/// Asserts that `final/` is the model of the checkpoint after `step`.
fn assert_final(bench: &Bench, step: u64) {
    let _ = fs::remove_dir_all(bench.path("exported"));
    let ran = bench.ft(&["export", &format!("run/checkpoint-{step}"), "--out", "exported"]);
    assert!(ran.status.success(), "{}", said(&ran));
    let same = files(&bench.path("exported")) == files(&bench.path("run/final"));
    assert!(same, "final/ is not the model after step {step}");
}

/// Row C3: the run goes on with the best model that is saved, also after a resume.
#[test]
fn a_full_disk_at_the_best_evaluation_does_not_end_the_run() {
    let bench = bench();
    // The model that was saved before stays the best one; or one that follows is better, and early stopping counts as before.
    let long = ["train.max_steps=20", "train.early_stopping_patience=5"];
    for (more, follows) in [(&["train.max_steps=4"][..], false), (&long[..], true)] {
        for run in ["whole", "run"] {
            let _ = fs::remove_dir_all(bench.path(run));
        }
        train(&bench, "whole", more);
        let mut left = evaluations(&bench, "whole");
        let (last, lost) = (*left.keys().next_back().unwrap(), best(&left));
        left.remove(&lost);
        let second = best(&left);
        assert!(
            lost > 1 && lost != 4 && lost < last && second != last && (second > lost) == follows,
            "{left:?} without {lost}"
        );
        let place = format!("run/checkpoint-{lost}.");
        let Some(out) = faulty(&bench, &place, Fault::From(ENOSPC), more) else {
            return;
        };
        let text = said(&out);
        assert!(out.status.success(), "{text}");
        for part in [
            format!(
                "after step {lost} is not saved for `final/`. The run goes on, and the best saved model stays the one"
            ),
            "No space left".into(),
            format!("after step {lost}) could not be saved: `final/` gets the one with eval_loss"),
        ] {
            assert_eq!(text.matches(&*part).count(), 1, "{part}\n{text}");
        }
        assert_eq!(evaluations(&bench, "run"), evaluations(&bench, "whole"));
        assert_eq!(saved(&bench), [second, last]);
        assert_final(&bench, second);
        let state = bench.path(&format!("run/checkpoint-{last}/state.json"));
        let state: serde_json::Value = serde_json::from_slice(&fs::read(state).unwrap()).unwrap();
        assert_eq!(state["best"]["unsaved"], serde_json::json!([lost]));
        // The metrics say that the evaluation was the best one.
        let before = files(&bench.path("run/final"));
        fs::remove_dir_all(bench.path("run/final")).unwrap();
        train(&bench, "run", &[more, &["--resume"]].concat());
        assert_eq!(saved(&bench), [second, last]);
        assert!(
            files(&bench.path("run/final")) == before,
            "another model after a resume"
        );
    }
    // Another error of the disk ends the run.
    fs::remove_dir_all(bench.path("run")).unwrap();
    let out = faulty(&bench, "run/checkpoint-2.", Fault::From(EIO), &["train.max_steps=4"]).unwrap();
    let text = said(&out);
    assert!(
        out.status.code() == Some(1) && text.contains("Input/output error"),
        "{text}"
    );
    assert!(!bench.path("run/final").exists(), "{text}");
}

/// Row C3: no evaluation has a saved model, so `final/` is that of the last step.
#[test]
fn without_room_for_any_evaluation_the_model_of_the_last_step_is_the_result() {
    let bench = bench();
    let more = ["train.max_steps=4", "train.eval_steps=3", "train.save_steps=0"];
    train(
        &bench,
        "whole",
        &[&more[..], &["train.load_best_model_at_end=false"]].concat(),
    );
    let all = evaluations(&bench, "whole");
    assert_eq!(best(&all), 3, "{all:?}");
    let Some(out) = faulty(&bench, "run/checkpoint-3.", Fault::From(ENOSPC), &more) else {
        return;
    };
    let text = said(&out);
    assert!(out.status.success(), "{text}");
    assert!(
        text.contains("no evaluation has a saved model yet") && text.contains("after step 3) could not be saved"),
        "{text}"
    );
    assert_same(&bench, "whole", "run");
    assert!(saved(&bench).is_empty());
}

/// Row C3: the state after the last step is not saved, and `final/` is written.
#[test]
fn a_full_disk_at_the_save_of_the_last_step_leaves_the_result() {
    let bench = bench();
    let (refused, again) = (
        "the state after step 4 is not saved. It was the last one, and `final/` is written next",
        "the state after the last step could not be saved",
    );
    let more = [
        "train.max_steps=4",
        "train.save_steps=2",
        "train.load_best_model_at_end=false",
    ];
    train(&bench, "whole", &more);
    for (errno, word) in [(ENOSPC, "No space left"), (122, "quota")] {
        let _ = fs::remove_dir_all(bench.path("run"));
        let Some(out) = faulty(&bench, "run/checkpoint-4.", Fault::From(errno), &more) else {
            return;
        };
        let text = said(&out);
        assert!(out.status.success(), "{text}");
        assert!(
            text.contains(refused) && text.contains(word) && !text.contains(again),
            "{text}"
        );
        assert_eq!(saved(&bench), [2]);
        assert_same(&bench, "whole", "run");
    }
    // With the model of an earlier step as the result the save is tried again before that is written.
    let more = ["train.max_steps=4"];
    for (fault, tried, left) in [
        (Fault::From(ENOSPC), again, &[3][..]),
        (
            Fault::Once(ENOSPC),
            "the disk has room again: the state after step 4 is saved",
            &[3, 4][..],
        ),
    ] {
        fs::remove_dir_all(bench.path("run")).unwrap();
        let out = faulty(&bench, "run/checkpoint-4.", fault, &more).unwrap();
        let text = said(&out);
        assert!(out.status.success(), "{text}");
        assert!(text.contains(refused) && text.contains(tried), "{tried}\n{text}");
        assert_eq!((saved(&bench).as_slice(), best(&evaluations(&bench, "run"))), (left, 3));
        assert_final(&bench, 3);
    }
    // Another error of the disk ends the run.
    fs::remove_dir_all(bench.path("run")).unwrap();
    let out = faulty(&bench, "run/checkpoint-4.", Fault::From(EIO), &more).unwrap();
    let text = said(&out);
    assert!(
        out.status.code() == Some(1) && text.contains("Input/output error"),
        "{text}"
    );
    assert!(!bench.path("run/final").exists(), "{text}");
}

/// Row C3: the disk has no room from the save of the last step on. The error says so, and a later resume has the same result.
#[test]
fn a_disk_that_stays_full_after_the_last_step_ends_the_run_with_an_error() {
    let bench = bench();
    let more = ["train.max_steps=4", "train.load_best_model_at_end=false"];
    let start = |fault, at, run: &str| {
        let out = format!("train.output_dir={run}");
        let arguments = [&["train", "--recipe", "r.toml"][..], &SETTINGS, &more, &[&out]].concat();
        ran_on_disk(&bench, &mut bench.command(&arguments), fault, at)
    };
    let Some((whole, all)) = start(Fault::Record, 0, "whole") else {
        return;
    };
    assert!(whole.status.success(), "{}", said(&whole));
    // The first save of the run: the numbers of the operations before it do not depend on the time.
    let first = all.iter().position(|o| o.path.starts_with("whole/checkpoint-4.tmp-"));
    let _ = fs::remove_dir_all(bench.path("cache"));
    let (out, done) = start(Fault::From(ENOSPC), 1 + first.unwrap(), "run").unwrap();
    let failed = done.iter().find(|o| o.failed).unwrap();
    assert!(failed.path.starts_with("run/checkpoint-4.tmp-"), "{failed}");
    let text = said(&out);
    assert_eq!(out.status.code(), Some(1), "{text}");
    for part in [
        "the state after step 4 is not saved. It was the last one",
        "the state after the last step could not be saved",
        "error: ",
        "run/final",
        "free some disk space",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    assert!(!bench.path("run/final").exists() && saved(&bench).is_empty(), "{text}");
    train(&bench, "run", &[&more[..], &["--resume"]].concat());
    assert_eq!(saved(&bench), [4]);
    assert_same(&bench, "whole", "run");
}
