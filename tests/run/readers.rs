//! The reader of the output ends before or after the first byte: `ft runs --json | head -1`.

use crate::bench::{Bench, said};
use crate::patience::ended;
use std::fs;
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

const COMMANDS: [&[&str]; 22] = [
    &["runs", "list", ".", "--json"],
    &["runs", "list", "."],
    &["runs", "show", "run"],
    &["runs", "show", "run", "--json"],
    &["runs", "compare", "run"],
    &["runs", "plot", "run"],
    &["runs", "verify", "run", "--json"],
    &["data", "r.toml", "--json"],
    &["data", "r.toml", "--rows", "500"],
    &["data", "r.toml", "--stats", "--json"],
    &["eval", "--model", "model", "--data", "few.jsonl", "--json"],
    &["eval", "--model", "model", "--data", "few.jsonl"],
    &["plan", "r.toml", "--json"],
    &["plan", "r.toml"],
    &["train", "r.toml", "train.output_dir=new", "--dry-run"],
    &[
        "generate",
        "--model",
        "model",
        "--prompt",
        "the mill",
        "--max-new-tokens",
        "60",
    ],
    &["explain"],
    &["explain", "--json"],
    &["explain", "FT601"],
    &["models"],
    &["adapter", "show", "run/final", "--json"],
    &["completions", "bash"],
];

/// Row S7.
#[test]
fn a_reader_that_goes_away_is_no_failure_of_any_command() {
    let bench = Bench::new();
    let lora = ["tune.method=lora", "tune.lora.r=2", "train.max_steps=2"];
    bench.train(&[&lora[..], &["train.output_dir=run"]].concat());
    // `ft data` writes more than a pipe holds.
    let rows = fs::read_to_string(bench.path("rows.jsonl")).unwrap();
    fs::write(bench.path("few.jsonl"), &rows).unwrap();
    fs::write(bench.path("rows.jsonl"), rows.repeat(20)).unwrap();
    let whole = bench.ft(&["data", "r.toml", "--json"]);
    assert!(whole.stdout.len() > 1 << 17, "{} bytes", whole.stdout.len());
    // A check has its result also without a reader.
    let verify = |code: i32| {
        let mut command = bench.command(&["runs", "verify", "damaged"]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let out = ended(child, Duration::from_secs(60), "verify");
        assert_eq!(out.status.code(), Some(code), "{}", said(&out));
    };
    assert!(
        Command::new("cp")
            .args(["-r", "run", "damaged"])
            .current_dir(bench.dir.path())
            .status()
            .unwrap()
            .success()
    );
    verify(0);
    fs::write(bench.path("damaged/final/adapter_config.json"), "{}").unwrap();
    verify(1);
    for words in COMMANDS {
        for bytes in [0, 1] {
            let what = format!("{words:?}, closed after {bytes}");
            let mut child = bench
                .command(words)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let mut output = child.stdout.take().unwrap();
            output.read_exact(&mut vec![0; bytes]).expect(&what);
            drop(output);
            let out = ended(child, Duration::from_secs(60), &what);
            let text = said(&out);
            assert_eq!(out.status.code(), Some(0), "{what}\n{text}");
            for word in ["error:", "panicked", "Broken pipe"] {
                assert!(!text.contains(word), "{what}\n{text}");
            }
        }
    }
}
