//! `ft import` and `ft init`: their recipes are plans that fit.

use crate::bench::{Bench, said};
use std::fs;

#[test]
fn a_configuration_of_another_tool_becomes_a_recipe() {
    let bench = Bench::new();
    let yaml = "model_name_or_path: model\nstage: sft\nfinetuning_type: lora\nlora_rank: 4\ndataset: rows.jsonl\ncutoff_len: 64\n\
                output_dir: runs/x\nmax_steps: 2\nbf16: true\nplugins:\n  - a.b\n";
    fs::write(bench.path("other.yaml"), yaml).unwrap();
    let made = bench.ft(&["import", "other.yaml", "--to", "made.toml"]);
    assert!(
        made.status.success() && said(&made).contains("plugins: ft has no plugins"),
        "{}",
        said(&made)
    );
    assert!(
        said(&made).contains("9 keys with a counterpart, 1 without"),
        "{}",
        said(&made)
    );
    let text = fs::read_to_string(bench.path("made.toml")).unwrap();
    assert!(
        text.contains("# lora_rank") && text.contains("#   plugins: ft has no plugins"),
        "{text}"
    );
    let plan = bench.ft(&["plan", "made.toml"]);
    assert!(plan.status.success(), "{}", said(&plan));
    let again = bench.ft(&["import", "other.yaml", "--to", "made.toml"]);
    assert!(again.status.code() == Some(2) && said(&again).contains("already exists"));
    let printed = bench.ft(&["import", "other.yaml"]);
    assert_eq!(String::from_utf8(printed.stdout).unwrap(), text);
}

#[test]
fn a_first_recipe_from_flags() {
    let bench = Bench::new();
    let made = bench.ft(&[
        "init",
        "--model",
        "model",
        "--data",
        "rows.jsonl",
        "--method",
        "block",
        "--to",
        "first.toml",
    ]);
    assert!(made.status.success(), "{}", said(&made));
    let plan = bench.ft(&["plan", "first.toml"]);
    assert!(plan.status.success(), "{}", said(&plan));
    // Without a terminal nothing is asked.
    let missing = bench.ft(&["init", "--model", "model", "--to", "second.toml"]);
    assert!(
        missing.status.code() == Some(2) && said(&missing).contains("`--data` is missing"),
        "{}",
        said(&missing)
    );
    assert!(!bench.path("second.toml").exists());
}
