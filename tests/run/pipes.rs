//! Named pipes, and links to a device without an end, in the place of files: no command waits for them, and none is read.

use crate::bench::{Bench, said};
use crate::patience::ended;
use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// A command ends in less than a second.
const LIMIT: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq)]
enum Odd {
    Pipe,
    /// A link to `/dev/zero`.
    Zeros,
}

const ALL: [Odd; 2] = [Odd::Pipe, Odd::Zeros];

/// Puts something else in the place of a file; returns the bytes of the file.
fn replace(bench: &Bench, name: &str, odd: Odd) -> Option<Vec<u8>> {
    let path = bench.path(name);
    let before = fs::read(&path).ok();
    let _ = fs::remove_file(&path);
    match odd {
        Odd::Pipe => assert!(Command::new("mkfifo").arg(&path).status().unwrap().success()),
        Odd::Zeros => symlink("/dev/zero", &path).unwrap(),
    }
    before
}

fn restore(bench: &Bench, name: &str, before: Option<Vec<u8>>) {
    fs::remove_file(bench.path(name)).unwrap();
    if let Some(bytes) = before {
        fs::write(bench.path(name), bytes).unwrap();
    }
}

fn run(bench: &Bench, words: &[&str], what: &str) -> Output {
    let mut command = bench.command(words);
    let command = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    ended(command.spawn().unwrap(), LIMIT, what)
}

/// Runs each command with a pipe and with a device in the place of `name`. Each fails, and says one of the `places`.
fn refused(bench: &Bench, name: &str, commands: &[&[&str]], places: &[&str]) {
    for odd in ALL {
        let before = replace(bench, name, odd);
        for words in commands {
            let what = format!("{odd:?} at {name}, {words:?}");
            let out = run(bench, words, &what);
            let text = said(&out);
            assert!(matches!(out.status.code(), Some(1 | 2)), "{what}\n{text}");
            let shown = String::from_utf8_lossy(&out.stdout) + text.as_str();
            assert!(places.iter().any(|place| shown.contains(place)), "{what}\n{shown}");
            assert!(
                !bench.path("out").exists() && !bench.path("new/final").exists(),
                "{what}"
            );
        }
        restore(bench, name, before);
    }
}

const TRAIN: &[&str] = &[
    "train",
    "--recipe",
    "r.toml",
    "train.max_steps=1",
    "train.output_dir=new",
];

/// Row F5.
#[test]
fn a_pipe_or_a_device_in_the_place_of_a_file_of_the_model_is_an_error() {
    let bench = Bench::new();
    let generate: &[&str] = &["generate", "--model", "model", "--prompt", "a", "--max-new-tokens", "1"];
    let export: &[&str] = &["export", "model", "--dtype", "bf16", "--out", "out"];
    for name in ["tokenizer_config.json", "chat_template.jinja"] {
        let name = format!("model/{name}");
        refused(&bench, &name, &[TRAIN], &[&name]);
    }
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        let name = format!("model/{name}");
        refused(&bench, &name, &[TRAIN, generate, export], &[&name, "--> model\n"]);
    }
    let index = "model/model.safetensors.index.json";
    let shard = "model/model-00001-of-00001.safetensors";
    fs::rename(bench.path("model/model.safetensors"), bench.path(shard)).unwrap();
    refused(&bench, index, &[TRAIN, generate, export], &[index]);
    let map = serde_json::json!({"metadata": {"total_size": 1},
        "weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}});
    fs::write(bench.path(index), map.to_string()).unwrap();
    refused(&bench, shard, &[TRAIN, generate, export], &[shard]);
}

/// Row F5.
#[test]
fn a_pipe_or_a_device_in_the_place_of_rows_is_an_error() {
    let bench = Bench::new();
    for name in ["rows.csv", "rows.parquet", "rows.arrow", "rows.json"] {
        let train = format!("data.train={name}");
        let eval = ["eval", "--model", "model", "--data", name];
        refused(
            &bench,
            name,
            &[&[TRAIN, &[&train]].concat(), &["data", "r.toml", &train], &eval],
            &[name],
        );
    }
}

/// Row F5.
#[test]
fn a_pipe_or_a_device_in_the_place_of_a_file_of_a_run_is_an_error_or_replaced() {
    let bench = Bench::new();
    let lora = ["tune.method=lora", "tune.lora.r=2"];
    let with = |more: &[&'static str]| [&["train", "--recipe", "r.toml"][..], &lora, more].concat();
    bench.train(
        &[
            &lora[..],
            &["train.max_steps=2", "train.save_steps=1", "train.output_dir=run"],
        ]
        .concat(),
    );
    let resume = with(&[
        "train.max_steps=4",
        "train.save_steps=1",
        "train.output_dir=run",
        "--resume",
    ]);

    // The adapter.
    let adapter: &[&[&str]] = &[
        &["generate", "--model", "run/final", "--prompt", "a"],
        &[
            "eval",
            "--model",
            "model",
            "--adapter",
            "run/final",
            "--data",
            "rows.jsonl",
        ],
        &["merge", "--model", "model", "--adapter", "run/final", "--out", "out"],
        &["export", "run/final", "--out", "out"],
        &["export", "run/final", "--to", "gguf", "--out", "out"],
        &["adapter", "show", "run/final"],
        &with(&[
            "tune.lora.adapter=run/final",
            "train.max_steps=1",
            "train.output_dir=new",
        ]),
    ];
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        let name = format!("run/final/{name}");
        refused(&bench, &name, adapter, &[&name, "run/final"]);
    }

    // The checkpoint. That before it is whole, and may be used if it is asked for.
    let checkpoint: &[&[&str]] = &[
        &resume,
        &["runs", "verify", "run"],
        &["export", "run/checkpoint-2", "--out", "out"],
        &["generate", "--model", "run/checkpoint-2", "--prompt", "a"],
    ];
    for name in ["state.json", "manifest.json"] {
        let name = format!("run/checkpoint-2/{name}");
        refused(&bench, &name, checkpoint, &[&name, "run/checkpoint-2"]);
    }

    // The path of `--resume`.
    refused(&bench, "odd", &[&[TRAIN, &["--resume", "odd"]].concat()], &["odd"]);
    refused(
        &bench,
        "odd",
        &[&[TRAIN, &["--resume", "odd", "--allow-older"]].concat()],
        &["odd"],
    );

    // A link is refused. The run writes `run.json` again: it only says which processes own the directory.
    let before = replace(&bench, "run/run.json", Odd::Zeros);
    for words in [
        &["runs", "list", "."][..],
        &["runs", "show", "run"],
        &["runs", "verify", "run"],
    ] {
        run(&bench, words, "a device at run.json");
    }
    let out = run(&bench, &resume, "a device at run.json");
    assert!(
        out.status.code() == Some(2) && said(&out).contains("run.json"),
        "{}",
        said(&out)
    );
    restore(&bench, "run/run.json", before);
    replace(&bench, "run/run.json", Odd::Pipe);
    for words in [
        &["runs", "list", "."][..],
        &["runs", "show", "run"],
        &["runs", "verify", "run"],
    ] {
        run(&bench, words, "a pipe at run.json");
    }
    let out = run(&bench, &resume, "a pipe at run.json");
    assert!(out.status.success(), "{}", said(&out));
    assert!(bench.path("run/run.json").symlink_metadata().unwrap().is_file());
    assert!(bench.path("run/checkpoint-4").exists());
}
