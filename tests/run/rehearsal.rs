//! The rehearsal before the first step: what would fail in a save or the export fails at once. Slow disks.

use crate::bench::{Bench, number, said};
use crate::disk::{Fault, Operation, on_disk, recorded};
use crate::same::assert_same;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Instant;

const RUN: [&str; 8] = [
    "train",
    "--recipe",
    "r.toml",
    "train.max_steps=3",
    "train.save_steps=2",
    "data.eval_fraction=0.3",
    "train.eval_steps=2",
    "train.output_dir=run",
];

fn faulty(bench: &Bench, fault: Fault, at: usize, more: &[&str]) -> Output {
    let mut command = bench.command(&[&RUN[..], more].concat());
    on_disk(bench, &mut command, fault, at).unwrap();
    command.output().unwrap()
}

/// The file operations of a run; `None` if they cannot be recorded here.
fn operations(bench: &Bench) -> Option<Vec<Operation>> {
    let mut command = bench.command(&RUN);
    on_disk(bench, &mut command, Fault::Record, 0)?;
    assert!(command.output().unwrap().status.success());
    Some(recorded(bench))
}

/// Row C12: no permission, read-only, no inode, no quota in the directories of a save and of the export.
#[test]
fn what_would_fail_after_hours_fails_before_the_first_step() {
    let bench = Bench::new();
    let Some(all) = operations(&bench) else { return };
    let first = all
        .iter()
        .position(|o| o.path == "run/recipe.toml" || o.path.contains("recipe.toml.tmp-"))
        .unwrap();
    let tried: Vec<_> = (1..)
        .zip(&all[..first])
        .filter(|(_, o)| o.path.contains(".tmp-"))
        .collect();
    let of = |name: &str| {
        tried
            .iter()
            .filter(|(_, o)| o.path.contains(name))
            .map(|(at, _)| *at)
            .collect::<Vec<usize>>()
    };
    let (save, export) = (of("run/checkpoint-1.tmp-"), of("run/final.tmp-"));
    assert!(save.len() >= 5 && export.len() > save.len(), "{save:?} {export:?}");
    let room = tried.iter().find(|(_, o)| o.what == 'f').expect("space is reserved").0;
    for (n, (at, errno, word)) in [
        (save[0], 13, "Permission denied"),
        (save[2], 30, "Read-only file system"),
        (save[1], 28, "No space left"),
        (export[0], 122, "quota"),
        (room, 122, "quota"),
        (room, 28, "No space left"),
        (*export.last().unwrap() - 2, 5, "Input/output error"),
    ]
    .into_iter()
    .enumerate()
    {
        let _ = fs::remove_dir_all(bench.path("run"));
        let out = faulty(&bench, Fault::From(errno), at, &[]);
        let text = said(&out);
        assert_eq!(out.status.code(), Some(1), "{n}\n{text}");
        assert!(
            text.contains("before the first step") && text.contains(word),
            "{n}\n{text}"
        );
        assert!(
            text.contains("run/checkpoint-1") || text.contains("run/final"),
            "{n}\n{text}"
        );
        assert!(
            !bench.path("run/metrics.jsonl").exists() && !bench.path("run/recipe.toml").exists(),
            "{n}"
        );
    }
}

/// Row C12: one operation of the rehearsal fails. Nothing stays that would make a second start refuse the directory.
#[test]
fn a_rehearsal_that_fails_once_leaves_nothing() {
    let bench = Bench::new();
    let Some(all) = operations(&bench) else { return };
    let tried = |name: &str| -> Vec<usize> {
        let before = all.iter().position(|o| o.path.contains("recipe.toml")).unwrap();
        let of = (1..).zip(&all[..before]).filter(|(_, o)| o.path.contains(name));
        of.map(|(at, _)| at).collect()
    };
    let (save, export) = (tried("run/checkpoint-1.tmp-"), tried("run/final.tmp-"));
    // The marker, the last removal of a file, and one that a sync follows.
    for at in [save[1], save[save.len() - 2], *export.last().unwrap()] {
        let _ = fs::remove_dir_all(bench.path("run"));
        let out = faulty(&bench, Fault::Once(5), at, &[]);
        assert_eq!(out.status.code(), Some(1), "{at}\n{}", said(&out));
        let names = fs::read_dir(bench.path("run")).into_iter().flatten();
        let left: Vec<_> = names.map(|e| e.unwrap().file_name()).collect();
        assert!(left.is_empty(), "{at}: {left:?}\n{}", said(&out));
    }
    let out = bench.ft(&RUN);
    assert!(out.status.success(), "{}", said(&out));
}

/// Runs in which an operation takes so many seconds: a sync of the state, then a line of metrics.
fn stalls(seconds: i32) {
    let bench = Bench::new();
    let Some(all) = operations(&bench) else { return };
    fs::rename(bench.path("run"), bench.path("whole")).unwrap();
    let saved = |o: &Operation| o.what == 's' && o.path.contains("checkpoint-2.tmp-") && o.path.contains("weights");
    let logged = |o: &Operation| o.what == 'w' && o.path == "run/metrics.jsonl";
    for (of, shown) in [
        (&saved as &dyn Fn(&_) -> bool, "writing weights.safetensors"),
        (&logged, "training: 3 of 3 steps"),
    ] {
        let _ = fs::remove_dir_all(bench.path("run"));
        let at = 1 + all.iter().rposition(of).unwrap();
        let started = Instant::now();
        let out = faulty(&bench, Fault::Stall(seconds), at, &[]);
        assert!(out.status.success(), "{}", said(&out));
        assert!(started.elapsed().as_secs() >= seconds as u64, "nothing stalled");
        assert!(said(&out).contains(shown), "{shown}\n{}", said(&out));
        assert_same(&bench, "whole", "run");
    }
}

/// Row C13: a write that takes long delays the run, is shown, and changes nothing.
#[test]
fn a_disk_that_stalls_is_shown_and_loses_nothing() {
    stalls(12);
}

/// Row C13.
#[test]
#[ignore = "by hand: two minutes"]
fn a_disk_that_stalls_for_a_minute_is_shown_and_loses_nothing() {
    stalls(60);
}

/// Row C12: a new run begins with an evaluation. A resume between two of them tries the longest held-out batch before its first
/// step, also if the next one comes after the last step only.
#[test]
fn a_resume_tries_an_evaluation_first() {
    let bench = Bench::new();
    let run = |more: &[&'static str]| {
        bench.train(
            &[
                &["train.save_steps=1", "data.eval_fraction=0.3", "train.output_dir=run"][..],
                more,
            ]
            .concat(),
        );
        let events = bench.lines("run/events.jsonl");
        let begun = |e: &serde_json::Value| e["event"] == "start" || e["event"] == "resume";
        let last = events.iter().rposition(begun).unwrap();
        let tried = events[last..].iter().filter(|e| e["event"] == "rehearsal");
        tried.map(|e| number(e, "loss")).collect::<Vec<_>>()
    };
    assert!(run(&["train.eval_steps=0", "train.max_steps=1"]).is_empty());
    let mut steps = ["train.max_steps=2", "train.max_steps=3"].into_iter();
    for every in ["train.eval_steps=0", "train.eval_steps=5"] {
        let tried = run(&[every, steps.next().unwrap(), "--resume"]);
        let evaluated = bench.lines("run/metrics.jsonl");
        let mean = evaluated.iter().rev().find_map(|l| l["eval_loss"].as_f64()).unwrap();
        assert!(
            tried.len() == 1 && (tried[0] / mean - 1.0).abs() < 0.5,
            "{tried:?}, all {mean}"
        );
    }
    // An evaluation that is due at the checkpoint itself was made by another process.
    let made = run(&["train.eval_steps=3", "train.max_steps=4", "--resume"]);
    assert_eq!(made.len(), 1);
}

/// Row C12: a resume also begins an answer to the longest sample prompt, the longest question of `eval_accuracy` and the longest
/// held-out prompt of GRPO. The run has the bits of one that was not stopped.
#[test]
fn a_resume_begins_an_answer_to_the_longest_prompt_and_has_the_same_bits() {
    let sft = [
        "train.predict_with_generate=true",
        "train.sample_prompts=[\"Is it raining?\", \"Add 17 and 25, and then 8 more, please.\"]",
    ];
    let dpo = [
        "train.stage=dpo",
        "data.train=pairs.jsonl",
        "tune.method=lora",
        "train.sample_prompts=[\"Is it raining?\"]",
    ];
    let grpo = [
        "train.stage=grpo",
        "rlhf.rewards=[\"regex:[aeiou]\", \"length:4\"]",
        "rlhf.num_generations=2",
        "rlhf.max_completion_length=6",
        "rlhf.num_iterations=2",
        "train.batch_size=4",
    ];
    for (settings, answers) in [(&sft[..], 2), (&dpo[..], 1), (&grpo[..], 1)] {
        let bench = Bench::new();
        let command = [&RUN[..], settings].concat();
        let mut whole = bench.command(&command);
        let Some(()) = on_disk(&bench, &mut whole, Fault::Record, 0) else {
            return;
        };
        let out = whole.output().unwrap();
        assert!(out.status.success(), "{}", said(&out));
        let all = recorded(&bench);
        fs::rename(bench.path("run"), bench.path("whole")).unwrap();
        // Saved and evaluated after step 2.
        let third = |o: &Operation| o.what == 'w' && o.path == "run/metrics.jsonl" && o.text().contains("\"step\":3");
        let at = 1 + all.iter().position(third).unwrap();
        assert!(!faulty(&bench, Fault::Kill, at, settings).status.success());
        let out = bench.ft(&[&command[..], &["--resume"]].concat());
        assert!(out.status.success(), "{}", said(&out));
        let events = bench.lines("run/events.jsonl");
        let last = events.iter().rposition(|e| e["event"] == "resume").unwrap();
        assert_eq!(events[last]["step"], 2);
        let tried = events[last..].iter().filter_map(|e| e["prompt_tokens"].as_u64());
        let tried: Vec<u64> = tried.collect();
        assert!(tried.len() == answers && tried.iter().all(|n| *n > 4), "{tried:?}");
        assert_same(&bench, "whole", "run");
    }
}

/// Row C12: a prompt beyond the context length would end the run after its last step.
#[test]
fn a_sample_prompt_that_cannot_be_answered_fails_a_resume_before_its_first_step() {
    let bench = Bench::new();
    bench.train(&[&RUN[3..], &["train.save_steps=1", "train.max_steps=1"]].concat());
    let long = format!("train.sample_prompts=[\"{}\"]", "raining ".repeat(600));
    let out = bench.ft(&[&RUN[..], &[long.as_str(), "--resume"]].concat());
    let text = said(&out);
    assert_eq!(out.status.code(), Some(1), "{text}");
    assert!(
        text.contains("before the first step an answer") && text.contains("longer than the context length"),
        "{text}"
    );
    assert_eq!(bench.steps("run").len(), 1);
}

/// Some tokenizers append an end-of-sequence token to every text: behind it a model begins another text.
#[test]
fn a_sample_prompt_without_a_template_does_not_end_with_an_appended_token() {
    let prompt_tokens = |single: &str| {
        let bench = Bench::of_family("qwen3");
        let path = bench.path("model/tokenizer.json");
        let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let piece = |kind: &str, id: &str| json!({kind: {"id": id, "type_id": 0}});
        let end = "<|endoftext|>";
        let parts: Vec<Value> = single
            .split(' ')
            .map(|part| match part {
                "text" => piece("Sequence", "A"),
                _ => piece("SpecialToken", end),
            })
            .collect();
        tokenizer["post_processor"] = json!({"type": "TemplateProcessing", "single": parts,
            "pair": [piece("Sequence", "A"), piece("Sequence", "B")],
            "special_tokens": {end: {"id": end, "ids": [0], "tokens": [end]}}});
        fs::write(&path, tokenizer.to_string()).unwrap();
        let run = [
            "train.output_dir=run",
            "train.save_steps=1",
            "train.sample_prompts=[\"Is it raining?\"]",
        ];
        bench.train(&[&run[..], &["train.max_steps=1"]].concat());
        bench.train(&[&run[..], &["train.max_steps=2", "--resume"]].concat());
        let events = bench.lines("run/events.jsonl");
        let tokens: Vec<u64> = events.iter().filter_map(|e| e["prompt_tokens"].as_u64()).collect();
        assert_eq!(tokens.len(), 1, "{tokens:?}");
        tokens[0]
    };
    assert_eq!(prompt_tokens("text end"), prompt_tokens("text"));
}

fn is_memory(dir: &Path) -> bool {
    let kind = Command::new("stat").args(["-f", "-c", "%T"]).arg(dir).output().unwrap();
    kind.stdout.trim_ascii() == b"tmpfs"
}

/// The bytes of the tensors in a file of a checkpoint.
fn tensor_bytes(file: &Path) -> usize {
    let bytes = fs::read(file).unwrap();
    bytes.len() - 8 - u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize
}

/// Row C12: the space that is reserved before the first step is that of the last checkpoint and of the export, and of the checkpoints
/// that are kept beside it.
#[test]
fn the_rehearsal_reserves_what_a_save_and_the_export_write() {
    let bench = Bench::new();
    if is_memory(bench.dir.path()) {
        println!("skipped: on tmpfs no space is reserved");
        return;
    }
    for more in [
        &["tune.method=lora"][..],
        &["tune.method=full", "optimizer.state=int8", "train.ema_decay=0.9"],
        &["tune.method=full", "optimizer.name=adafactor"],
        &["tune.method=block", "tune.block.switch_every=1", "train.max_steps=8"],
    ] {
        let _ = fs::remove_dir_all(bench.path("run"));
        let command = [&RUN[..], &["train.save_total_limit=1"], more].concat();
        let mut command = bench.command(&command);
        let Some(()) = on_disk(&bench, &mut command, Fault::Record, 0) else {
            return;
        };
        let out = command.output().unwrap();
        assert!(out.status.success(), "{}", said(&out));
        let all = recorded(&bench);
        let reserved = all.iter().filter(|o| o.what == 'f');
        let mut reserved: Vec<usize> = reserved.map(|o| o.offset).collect();
        let later = reserved.pop().unwrap();
        let entries = fs::read_dir(bench.path("run")).unwrap().map(|e| e.unwrap().path());
        let named = |path: &Path| path.file_name().unwrap().to_string_lossy().starts_with("checkpoint-");
        let last = entries.filter(|path| named(path)).max().unwrap();
        let mut written: Vec<usize> = ["weights", "optimizer", "averages"]
            .iter()
            .map(|name| last.join(format!("{name}.safetensors")))
            .filter(|file| file.exists())
            .map(|file| tensor_bytes(&file))
            .collect();
        // A second checkpoint, beside the newest one.
        let of_checkpoint: usize = written.iter().sum();
        assert!(later >= of_checkpoint, "{more:?}: {later} {of_checkpoint}");
        let result = ["model", "adapter_model"].map(|name| bench.path("run/final").join(format!("{name}.safetensors")));
        written.extend(
            result
                .iter()
                .filter(|file| file.exists())
                .map(|file| tensor_bytes(file)),
        );
        assert!(
            written.len() > 2 && reserved.len() == written.len(),
            "{more:?}: {reserved:?} {written:?}"
        );
        if more[0] == "tune.method=block" {
            // The largest block is not the last one.
            assert!(reserved[1] >= written[1], "{reserved:?} {written:?}");
            (reserved[1], written[1]) = (0, 0);
        }
        assert_eq!(reserved, written, "{more:?}");
    }
}

/// Row C12: a limit on the size of files between those of the weights and of the optimizer state.
#[test]
fn a_file_of_moments_above_the_limit_is_refused_before_the_first_step() {
    let bench = Bench::new();
    let run = [&RUN[..], &["tune.method=full"]].concat();
    let out = bench.ft(&run);
    assert!(out.status.success(), "{}", said(&out));
    let size = |name: &str| fs::metadata(bench.path("run/checkpoint-2").join(name)).unwrap().len();
    let (weights, moments) = (size("weights.safetensors"), size("optimizer.safetensors"));
    let limit = (weights + moments) / 2;
    assert!(weights < limit && size("manifest.json") < limit, "{weights} {moments}");
    fs::remove_dir_all(bench.path("run")).unwrap();
    let mut command = bench.command(&run);
    // SAFETY: one system call between fork and exec.
    unsafe {
        command.pre_exec(move || {
            let limit = libc::rlimit {
                rlim_cur: limit,
                rlim_max: limit,
            };
            match libc::setrlimit(libc::RLIMIT_FSIZE, &limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    let out = command.output().unwrap();
    let text = said(&out);
    assert_eq!(out.status.code(), Some(1), "{text}");
    assert!(
        text.contains("before the first step") && text.contains("ulimit -f"),
        "{text}"
    );
    assert!(!bench.path("run/metrics.jsonl").exists(), "{text}");
}

/// Row C3: the disk is full in a save, and has room in the next one.
#[test]
fn a_full_disk_in_a_save_does_not_end_the_run() {
    let bench = Bench::new();
    let mut whole = bench.command(&[&RUN[..], &["train.save_steps=1"]].concat());
    let Some(()) = on_disk(&bench, &mut whole, Fault::Record, 0) else {
        return;
    };
    let out = whole.output().unwrap();
    assert!(out.status.success(), "{}", said(&out));
    let all = recorded(&bench);
    fs::rename(bench.path("run"), bench.path("whole")).unwrap();
    // The rehearsal writes to the same name before.
    let written = |o: &Operation| o.what == 'w' && o.path.contains("checkpoint-1.tmp-") && o.path.contains("weights");
    let at = 1 + all.iter().rposition(written).unwrap();
    for (errno, word) in [(28, "No space left"), (122, "quota")] {
        let _ = fs::remove_dir_all(bench.path("run"));
        let out = faulty(&bench, Fault::Once(errno), at, &["train.save_steps=1"]);
        let text = said(&out);
        assert!(out.status.success(), "{text}");
        let warnings = text.matches("the state after step 1 is not saved").count();
        assert!(warnings == 1 && text.contains(word), "{text}");
        assert!(text.contains("the state after step 2 is saved"), "{text}");
        let names = fs::read_dir(bench.path("run")).unwrap();
        let mut names: Vec<String> = names.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| name.contains("checkpoint-"));
        names.sort();
        assert_eq!(names, ["checkpoint-2", "checkpoint-3"]);
        assert_same(&bench, "whole", "run");
    }
    // Another error of the disk ends the run.
    let _ = fs::remove_dir_all(bench.path("run"));
    let out = faulty(&bench, Fault::Once(5), at, &["train.save_steps=1"]);
    assert_eq!(out.status.code(), Some(1), "{}", said(&out));
    assert!(said(&out).contains("Input/output error"), "{}", said(&out));
}
