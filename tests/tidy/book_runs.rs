//! The commands of the book, run in one folder with the tiny model in the place of the models of the pages. Each is run, or
//! listed here with the reason why not.

use super::book::{commands, pages, words};
use super::{assert_none, root};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// A part of commands that are only parsed here; a word with which they are run all the same (empty: there is none); why.
const NOT_RUN: [(&str, &str, &str); 7] = [
    ("ft push", "--dry-run", "needs a hub: tests/hub/push.rs"),
    ("Qwen/", "", "needs a model of a hub"),
    ("ft launch", "", "needs MPI: tests/ranks"),
    (
        "ft train --recipe job.toml",
        "",
        "12 jobs, each planned by tests/cli/cookbook.rs",
    ),
    (
        "--recipe job.toml",
        "",
        "12 jobs, each planned by tests/cli/cookbook.rs",
    ),
    ("ft watch", "", "goes on in a terminal: tests/terminal.rs"),
    ("ft dash", "--out", "goes on as a server: tests/cli/dash.rs"),
];

fn why_not(line: &str) -> Option<&'static str> {
    let applies = |part: &str, unless: &str| line.contains(part) && (unless.is_empty() || !line.contains(unless));
    let listed = NOT_RUN.iter().find(|(part, unless, _)| applies(part, unless));
    listed.map(|(.., why)| *why)
}

fn ft(dir: &Path, arguments: &[String]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ft"))
        .args(arguments)
        .current_dir(dir)
        .env("HF_HUB_OFFLINE", "1")
        .env("HOME", dir)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// The recipes, rows, models and runs that the pages name.
fn prepare(dir: &Path) {
    let assets = root().join("assets");
    let copy = |from: &Path, to: &str| {
        fs::create_dir_all(dir.join(to).parent().unwrap()).unwrap();
        fs::copy(from, dir.join(to)).unwrap();
    };
    let rows = fs::read_to_string(assets.join("world/train.jsonl")).unwrap();
    let few: String = rows.lines().take(16).map(|line| format!("{line}\n")).collect();
    fs::create_dir(dir.join("data")).unwrap();
    for name in ["rows.jsonl", "test.jsonl", "data/train.jsonl", "data/test.jsonl"] {
        fs::write(dir.join(name), &few).unwrap();
    }
    for entry in fs::read_dir(assets.join("tiny")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        copy(&path, &format!("base/{name}"));
    }
    let recipe = |more: &str| {
        format!(
            "[model]\npath = \"base\"\ndevice = \"cpu\"\n[data]\ntrain = \"rows.jsonl\"\nmax_length = 128\n[train]\nmax_steps = 1\n\
             output_dir = \"runs/my\"\n{more}"
        )
    };
    fs::write(dir.join("my.toml"), recipe("")).unwrap();
    fs::write(
        dir.join("distill.toml"),
        recipe("stage = \"distill\"\n[distill]\nteacher = \"base\"\n"),
    )
    .unwrap();
    for (run, more) in [
        ("sft", ""),
        ("a", ""),
        ("b", "train.seed=1"),
        ("lora", "tune.method=lora"),
    ] {
        let line = format!("ft train my.toml train.output_dir=runs/{run} {more}");
        run_one(dir, &line).unwrap();
    }
}

/// Runs a command; what it says if it fails.
fn run_one(dir: &Path, line: &str) -> Result<(), String> {
    // The pages name a later step than the runs here have.
    let mut arguments = words(&line.replace("checkpoint-400", "checkpoint-2")).split_off(1);
    // As a shell does.
    if let Some(at) = arguments.iter().position(|word| word == "runs/*") {
        let runs: BTreeSet<String> = fs::read_dir(dir.join("runs"))
            .unwrap()
            .map(|entry| format!("runs/{}", entry.unwrap().file_name().to_string_lossy()))
            .collect();
        arguments.splice(at..at + 1, runs);
    }
    let out = ft(dir, &arguments);
    if out.status.success() {
        return Ok(());
    }
    Err(format!(
        "`{line}`: {}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    ))
}

#[test]
fn the_commands_of_the_book_run() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    prepare(dir);
    let (mut faults, mut run, mut reasons) = (Vec::new(), 0, BTreeSet::new());
    let mut made = BTreeSet::new();
    for page in pages() {
        let name = page.file_name().unwrap().to_string_lossy().into_owned();
        // Its commands are history.
        if name == "lab-book.md" {
            continue;
        }
        for (number, line) in commands(&fs::read_to_string(&page).unwrap()).0 {
            if let Some(why) = why_not(&line) {
                reasons.insert(why);
                continue;
            }
            let words = words(&line);
            // Two pages begin with the same commands; their results are there already.
            let makes = words
                .iter()
                .any(|w| ["copy", "--out", "train", "--save", "cache"].contains(&&**w));
            if makes && !made.insert(words.join(" ")) {
                continue;
            }
            if let Err(said) = run_one(dir, &line) {
                faults.push(format!("{name}:{number}: {said}"));
            }
            run += 1;
            // "edit model, data and output"
            let copied = dir.join("sft-qwen.toml");
            if line.contains("recipes copy") {
                let text = fs::read_to_string(&copied).unwrap();
                let text = text
                    .replace("Qwen/Qwen2.5-0.5B-Instruct", "base")
                    .replace("num_epochs = 1", "max_steps = 2\nsave_steps = 1")
                    .replace("max_length = 2048", "max_length = 128")
                    .replace("gradient_accumulation_steps = 16", "gradient_accumulation_steps = 1");
                fs::write(&copied, text).unwrap();
            }
        }
    }
    assert!(run > 30, "{run} commands");
    let listed: BTreeSet<&str> = NOT_RUN.iter().map(|(.., why)| *why).collect();
    assert_eq!(reasons, listed, "a reason without a command");
    assert_none(&faults, "a command of the book fails");
}
