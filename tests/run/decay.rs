//! Damaged files of a run: each is found by its name, and a run goes on from an older checkpoint if that is allowed. A
//! damaged token cache is written again; stored outputs of a teacher are repaired by the command that stored them.

use crate::bench::{Bench, copy_all, files, said};
use crate::same::{assert_same, assert_same_final};
use std::fs;
use std::path::Path;
use std::process::Output;

const RUN: [&str; 6] = [
    "tune.method=lora",
    "tune.lora.r=4",
    "train.max_steps=4",
    "train.save_steps=2",
    "train.save_total_limit=3",
    "train.output_dir=run",
];

fn train(bench: &Bench, more: &[&str]) -> Output {
    bench.ft(&[&["train", "--recipe", "r.toml"][..], &RUN, more].concat())
}

/// A bit flipped in the middle, the end cut off, the file gone.
pub const DAMAGES: [&str; 3] = ["flipped", "cut", "gone"];

pub fn damage(path: &Path, how: &str) {
    let mut bytes = fs::read(path).unwrap();
    let (middle, end) = (bytes.len() / 2, bytes.len() - 2);
    match how {
        "flipped" => bytes[middle] ^= 1,
        "cut" => bytes.truncate(end),
        _ => return fs::remove_file(path).unwrap(),
    }
    fs::write(path, bytes).unwrap();
}

/// A finished run in `whole`, and the names of the files of its last checkpoint.
fn finished() -> (Bench, Vec<String>) {
    let bench = Bench::new();
    bench.train(&[&RUN[..], &["train.output_dir=whole"]].concat());
    let names = files(&bench.path("whole/checkpoint-4"))
        .into_iter()
        .map(|(name, _)| name);
    let names = names.collect();
    (bench, names)
}

fn restore(bench: &Bench) {
    let _ = fs::remove_dir_all(bench.path("run"));
    fs::create_dir(bench.path("run")).unwrap();
    for entry in fs::read_dir(bench.path("whole")).unwrap() {
        let path = entry.unwrap().path();
        let to = bench.path("run").join(path.file_name().unwrap());
        if path.is_dir() {
            copy_all(&path, &to)
        } else {
            fs::copy(&path, to).map(drop).unwrap()
        }
    }
}

/// Row C8.
#[test]
fn damage_in_a_checkpoint_is_named_and_an_older_one_is_used_only_if_allowed() {
    let (bench, names) = finished();
    assert_eq!(
        names,
        [
            "manifest.json",
            "optimizer.safetensors",
            "state.json",
            "weights.safetensors"
        ]
    );
    for name in &names {
        for how in DAMAGES {
            restore(&bench);
            let path = bench.path("run/checkpoint-4").join(name);
            damage(&path, how);
            let before = files(&bench.path("run/checkpoint-2"));
            let out = train(&bench, &["--resume"]);
            let text = said(&out);
            assert_eq!(out.status.code(), Some(1), "{name} {how}\n{text}");
            assert!(
                text.contains(name) && text.contains("--allow-older"),
                "{name} {how}\n{text}"
            );
            assert_eq!(files(&bench.path("run/checkpoint-2")), before);
            let out = train(&bench, &["--resume", "--allow-older"]);
            let text = said(&out);
            assert!(out.status.success(), "{name} {how}\n{text}");
            assert!(
                text.contains("a damaged checkpoint is not used") && text.contains(name),
                "{text}"
            );
            assert!(text.contains("resumed after step 2"), "{text}");
            assert!(bench.path("run/checkpoint-4.left").exists() && bench.path("run/checkpoint-4").exists());
            assert_same(&bench, "whole", "run");
        }
    }
    // None is whole: the error of the newest one.
    restore(&bench);
    for step in ["2", "4"] {
        damage(&bench.path(&format!("run/checkpoint-{step}/state.json")), "cut");
    }
    let out = train(&bench, &["--resume", "--allow-older"]);
    assert!(
        out.status.code() == Some(1) && said(&out).contains("checkpoint-4"),
        "{}",
        said(&out)
    );
    // The newest one is whole.
    restore(&bench);
    let out = train(&bench, &["--resume", "--allow-older"]);
    assert!(
        out.status.success() && said(&out).contains("resumed after step 4"),
        "{}",
        said(&out)
    );
    assert_eq!(train(&bench, &["--allow-older"]).status.code(), Some(2));
}

/// A run with preferences, averages of the weights and a token cache.
const PREFERENCES: [&str; 4] = [
    "train.stage=dpo",
    "data.train=pairs.jsonl",
    "train.ema_decay=0.9",
    "data.cache=true",
];

/// Row C8.
/// The files that only some checkpoints have.
#[test]
fn damage_in_the_averages_and_in_the_state_of_a_stage_is_named() {
    let bench = Bench::new();
    bench.train(&[&RUN[..], &PREFERENCES, &["train.output_dir=whole"]].concat());
    let resume = |more: &[&str]| train(&bench, &[&PREFERENCES[..], &["--resume"], more].concat());
    for name in ["averages.safetensors", "stage.safetensors"] {
        for how in DAMAGES {
            restore(&bench);
            damage(&bench.path("run/checkpoint-4").join(name), how);
            let out = resume(&[]);
            let text = said(&out);
            assert_eq!(out.status.code(), Some(1), "{name} {how}\n{text}");
            assert!(
                text.contains(name) && text.contains("--allow-older"),
                "{name} {how}\n{text}"
            );
        }
        let out = resume(&["--allow-older"]);
        assert!(
            out.status.success() && said(&out).contains("resumed after step 2"),
            "{name}\n{}",
            said(&out)
        );
        assert_same(&bench, "whole", "run");
    }
}

/// Row C8.
/// The rows of a run, and the hash of them that a resume compares, are not those of a damaged cache.
#[test]
fn a_damaged_token_cache_is_written_again_and_the_run_resumes() {
    let bench = Bench::new();
    bench.train(&[&RUN[..], &PREFERENCES, &["train.output_dir=whole"]].concat());
    let cache = bench.path(".ft-tokens");
    let kinds = ["chunks.jsonl", "index", "pairs", "rows.json", "tokens"];
    let kind = |name: &str| name.rsplit('/').next().unwrap_or_default().to_string();
    let written = || {
        let mut all = files(&cache);
        all.retain(|(name, _)| kinds.contains(&kind(name).as_str()));
        all
    };
    let right = written();
    let found: Vec<String> = right.iter().map(|(name, _)| kind(name)).collect();
    assert_eq!(found, kinds);
    for (name, bytes) in &right {
        for how in DAMAGES {
            restore(&bench);
            damage(&cache.join(name), how);
            let out = train(&bench, &[&PREFERENCES[..], &["--resume", "run/checkpoint-2"]].concat());
            let text = said(&out);
            assert!(out.status.success(), "{name} {how}\n{text}");
            // The list of the parts is read only after a stop, and without `rows.json` nothing was finished.
            let kind = kind(name);
            let is_silent = kind == "chunks.jsonl" || kind == "rows.json" && how == "gone";
            let is_said = text.contains("is damaged: its rows are tokenized again");
            assert_eq!(is_said, !is_silent, "{name} {how}\n{text}");
            assert_same(&bench, "whole", "run");
            if kind == "chunks.jsonl" {
                fs::write(cache.join(name), bytes).unwrap();
            }
            assert!(written() == right, "{name} {how}: the files are others");
        }
    }
}

/// Row C8.
#[test]
fn damage_in_stored_outputs_is_named_and_the_same_command_repairs_it() {
    let bench = Bench::new();
    let store = || {
        let settings = ["train.stage=distill", "distill.teacher=model"];
        let command = ["distill", "cache", "--recipe", "r.toml", "--out", "outputs"];
        let out = bench.ft(&[&command[..], &settings].concat());
        assert!(out.status.success(), "{}", said(&out));
    };
    let learn = || train(&bench, &["train.stage=distill", "distill.teacher_cache=outputs"]);
    store();
    let right = files(&bench.path("outputs"));
    let names: Vec<&str> = right.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["cache.json", "rows-00000.safetensors"]);
    for name in names {
        for how in DAMAGES {
            damage(&bench.path("outputs").join(name), how);
            let out = learn();
            let text = said(&out);
            assert_eq!(out.status.code(), Some(1), "{name} {how}\n{text}");
            assert!(
                text.contains(name) && text.contains("`ft distill cache"),
                "{name} {how}\n{text}"
            );
            store();
            assert!(files(&bench.path("outputs")) == right, "{name} {how}");
        }
    }
    let out = learn();
    assert!(out.status.success(), "{}", said(&out));
}

/// Row C8.
/// The files beside the checkpoints describe a run; damage in them does not change its result.
#[test]
fn damage_beside_the_checkpoints_changes_no_result() {
    let (bench, _) = finished();
    let beside = fs::read_dir(bench.path("whole")).unwrap().map(|e| e.unwrap().path());
    for path in beside.filter(|p| p.is_file()) {
        for how in DAMAGES {
            restore(&bench);
            let name = path.file_name().unwrap().to_str().unwrap();
            damage(&bench.path("run").join(name), how);
            let out = train(&bench, &["--resume"]);
            if out.status.success() {
                assert_same_final(&bench, "whole", "run");
            } else {
                assert!(said(&out).contains(name), "{name} {how}\n{}", said(&out));
            }
        }
    }
}

/// Row C8.
/// A file of `final/` that was cut off or is gone is an error that names it, if the program reads it.
#[test]
fn damage_in_a_result_is_named() {
    let (bench, _) = finished();
    let eval = || {
        bench.ft(&[
            "eval",
            "--model",
            "model",
            "--adapter",
            "run/final",
            "--data",
            "rows.jsonl",
            "--json",
        ])
    };
    restore(&bench);
    let right = eval();
    assert!(right.status.success(), "{}", said(&right));
    for (name, how) in [
        ("adapter_model.safetensors", "cut"),
        ("adapter_model.safetensors", "gone"),
        ("adapter_config.json", "flipped"),
        ("adapter_config.json", "cut"),
        ("tokenizer.json", "flipped"),
        ("tokenizer.json", "cut"),
        ("tokenizer_config.json", "flipped"),
    ] {
        restore(&bench);
        damage(&bench.path("run/final").join(name), how);
        let out = eval();
        assert!(
            !out.status.success() && said(&out).contains(name),
            "{name} {how}\n{}",
            said(&out)
        );
    }
}

/// Row C8.
/// Every file of a result and of a checkpoint has a hash: `ft runs verify` names the file that is not as it was written.
#[test]
fn a_flipped_bit_in_a_result_is_named() {
    let (bench, _) = finished();
    let verify = |more: &[&str]| bench.ft(&[&["runs", "verify", "run"][..], more].concat());
    restore(&bench);
    let right = verify(&[]);
    assert!(right.status.success(), "{}", said(&right));
    let shown = String::from_utf8(right.stdout).unwrap();
    for whole in ["checkpoint-2: whole, 3 files", "checkpoint-4: whole", "final: whole"] {
        assert!(shown.contains(whole), "{shown}");
    }
    let mut names: Vec<String> = files(&bench.path("run/final"))
        .into_iter()
        .map(|f| format!("final/{}", f.0))
        .collect();
    assert!(names.len() >= 4, "{names:?}");
    names.push("checkpoint-2/optimizer.safetensors".into());
    for name in &names {
        for how in DAMAGES {
            restore(&bench);
            damage(&bench.path("run").join(name), how);
            let out = verify(&["--json"]);
            assert_eq!(out.status.code(), Some(1), "{name} {how}\n{}", said(&out));
            let text = String::from_utf8(out.stdout).unwrap();
            let lines: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
            let wrong: Vec<&str> = lines
                .iter()
                .flat_map(|l| l["errors"].as_array().unwrap())
                .map(|e| e.as_str().unwrap())
                .collect();
            assert!(
                wrong.len() == 1 && wrong[0].contains(name.as_str()),
                "{name} {how}: {wrong:?}"
            );
        }
    }
    // Files that someone added are no damage; a directory of something else is refused.
    restore(&bench);
    fs::write(bench.path("run/final/notes.txt"), "mine").unwrap();
    assert!(verify(&[]).status.success());
    let other = bench.ft(&["runs", "verify", "model"]);
    assert_eq!(other.status.code(), Some(2), "{}", said(&other));
}

/// Row C8.
/// A command that uploads a result, or makes another directory of it, reads all of it, and names a file that is not as the run wrote it.
#[test]
fn a_damaged_result_is_not_uploaded_merged_or_exported() {
    let (bench, _) = finished();
    let whole: [&[&str]; 4] = [
        &["push", "run", "a/b", "--dry-run"],
        &["push", "run/final", "a/b", "--dry-run", "--keep-readme"],
        &["merge", "--model", "model", "--adapter", "run", "--out", "out"],
        &["export", "run", "--out", "out"],
    ];
    let done = |command: &[&str]| {
        let out = bench.ft(command);
        let written = bench.path("out").exists();
        let _ = fs::remove_dir_all(bench.path("out"));
        (out, written)
    };
    // A file that was added and an edited card are no damage.
    restore(&bench);
    fs::write(bench.path("run/final/notes.txt"), "mine").unwrap();
    fs::write(bench.path("run/final/README.md"), "my card").unwrap();
    for command in whole {
        let (out, _) = done(command);
        assert!(out.status.success(), "{command:?}\n{}", said(&out));
    }
    restore(&bench);
    let names: Vec<String> = files(&bench.path("run/final")).into_iter().map(|file| file.0).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).filter(|n| *n != "README.md").collect();
    assert!(
        names.contains(&"adapter_model.safetensors") && names.contains(&"tokenizer.json"),
        "{names:?}"
    );
    let weights = ["cut", "gone"].map(|how| ("adapter_model.safetensors", how));
    for (name, how) in names.into_iter().map(|name| (name, "flipped")).chain(weights) {
        restore(&bench);
        damage(&bench.path("run/final").join(name), how);
        for command in whole {
            let (out, written) = done(command);
            let text = said(&out);
            assert_eq!(out.status.code(), Some(1), "{name} {how} {command:?}\n{text}");
            assert!(!written, "{name} {how} {command:?}");
            let place = format!("run/final/{name}");
            let export = "ft export run/checkpoint-4 --out DIR";
            for part in ["file of the result", place.as_str(), export, "ft runs verify run"] {
                assert!(text.contains(part), "{name} {how} {command:?}: no {part:?}\n{text}");
            }
        }
    }
    // A whole model, and the other formats.
    bench.train(&["tune.method=full", "train.max_steps=1", "train.output_dir=full"]);
    damage(&bench.path("full/final/model.safetensors"), "flipped");
    restore(&bench);
    damage(&bench.path("run/final/adapter_model.safetensors"), "flipped");
    let others: [&[&str]; 8] = [
        &["adapter", "combine", "run=1", "--out", "out"],
        &["export", "full", "--out", "out"],
        &["export", "full", "--to", "gguf", "--out", "out"],
        &["export", "full", "--to", "mlx", "--out", "out"],
        &["export", "run", "--to", "gguf", "--out", "out"],
        &["export", "run", "--to", "mlx", "--out", "out"],
        &["quantize", "--model", "full/final", "--to", "int8", "--out", "out"],
        &[
            "convert",
            "--model",
            "full/final",
            "--to",
            "moe",
            "--experts",
            "4",
            "--out",
            "out",
        ],
    ];
    for command in others {
        let (out, written) = done(command);
        let text = said(&out);
        assert_eq!(out.status.code(), Some(1), "{command:?}\n{text}");
        assert!(
            !written && text.contains("file of the result is damaged"),
            "{command:?}\n{text}"
        );
    }
    // A copy with a change of its user is a model as any other.
    fs::rename(bench.path("run/final"), bench.path("mine")).unwrap();
    let (out, _) = done(&["export", "mine", "--out", "out"]);
    assert!(out.status.success(), "{}", said(&out));
}
