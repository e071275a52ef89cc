//! The records of a run for its user: rows, samples, times, the command, a profile; and `ft bench`.

use crate::bench::{Bench, said};
use serde_json::Value;
use std::fs;

#[test]
fn a_run_records_its_rows_its_samples_and_its_profile() {
    let bench = Bench::new();
    fs::copy(bench.path("rows.jsonl"), bench.path("eval.jsonl")).unwrap();
    // A prompt that is in the rows for evaluation has its answer as reference.
    let first: Value = bench.lines("rows.jsonl").into_iter().next().unwrap();
    let text = |role: &str| {
        let messages = first["messages"].as_array().unwrap();
        let found = messages.iter().find(|m| m["role"] == role);
        found
            .and_then(|m| m["content"].as_str())
            .unwrap_or_default()
            .to_string()
    };
    let prompts = format!("train.sample_prompts=[{:?}, \"something else\"]", text("user"));
    let arguments = [
        "train",
        "r.toml",
        "train.max_steps=4",
        "train.save_steps=0",
        "train.output_dir=out",
        &prompts,
    ];
    let more = ["data.eval=eval.jsonl", "tune.method=full", "--profile", "steps=2"];
    let out = bench.ft(&[&arguments[..], &more].concat());
    assert!(out.status.success(), "{}", said(&out));

    let rows = bench.lines("out/rows.jsonl");
    let row = &rows[0];
    let parts = row["parts"].as_array().unwrap();
    assert!(
        parts.iter().any(|p| p[1] == true) && parts.iter().any(|p| p[1] == false),
        "{row}"
    );
    assert!(row["trained"].as_u64() < row["tokens"].as_u64(), "{row}");
    let trained: String = parts
        .iter()
        .filter(|p| p[1] == true)
        .filter_map(|p| p[0].as_str())
        .collect();
    assert!(trained.contains(text("assistant").trim()), "{trained}");

    let samples = bench.lines("out/samples.jsonl");
    let whens: Vec<_> = samples
        .iter()
        .map(|s| (s["when"].as_str().unwrap(), s["step"].as_u64().unwrap()))
        .collect();
    assert_eq!(whens, [("before", 0), ("before", 0), ("after", 4), ("after", 4)]);
    assert!(samples[1]["reference"].is_null() && samples[2]["completion"].is_string());

    let events = bench.lines("out/events.jsonl");
    let command = events.iter().find_map(|e| e["command"].as_str()).unwrap();
    assert!(command.starts_with("ft train r.toml train.max_steps=4"), "{command}");
    let times: Vec<f64> = bench
        .lines("out/metrics.jsonl")
        .iter()
        .filter_map(|l| l["time"].as_f64())
        .collect();
    assert!(times.len() >= 6 && times.is_sorted(), "{times:?}");

    let trace: Value = serde_json::from_slice(&fs::read(bench.path("out/trace.json")).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let named = |name: &str| events.iter().filter(|e| e["name"] == name).count();
    assert_eq!(
        (named("step 2"), named("step 3"), named("step 4"), named("step 1")),
        (1, 1, 0, 0)
    );
    for name in [
        "layer 0",
        "layer backward 0",
        "loss",
        "update",
        "attention",
        "linear self_attn.q_proj",
    ] {
        assert!(named(name) >= 2, "{name}");
    }
    let table = said(&out);
    assert!(
        table.contains("own ms") && table.contains("attention backward"),
        "{table}"
    );
}

#[test]
fn steps_are_measured_and_compared_with_an_earlier_measurement() {
    let bench = Bench::new();
    let run =
        |more: &[&str]| bench.ft(&[&["bench", "r.toml", "--steps", "2", "train.output_dir=runs/a"], more].concat());
    let out = run(&["--save", "base", "train.batch_size=2"]);
    let text = String::from_utf8(out.stdout.clone()).unwrap();
    assert!(
        out.status.success() && text.contains("median") && text.contains("tokens/s"),
        "{}",
        said(&out)
    );
    // Nothing is left but the measurement.
    let names = |dir: &str| -> Vec<String> {
        let entries = fs::read_dir(bench.path(dir)).unwrap();
        entries
            .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
            .collect()
    };
    assert_eq!(names("runs"), [".ft-bench"]);
    assert_eq!(names("runs/.ft-bench"), ["base.json"]);
    let saved: Value = serde_json::from_slice(&fs::read(bench.path("runs/.ft-bench/base.json")).unwrap()).unwrap();
    assert_eq!(saved["steps"], 2);
    assert!(saved["seconds_min"].as_f64().unwrap() > 0.0 && saved["peak_memory_bytes"].as_f64().unwrap() > 1e6);
    let out = run(&["--against", "base", "train.batch_size=4"]);
    let text = String::from_utf8(out.stdout.clone()).unwrap();
    assert!(text.contains("the baseline by the fastest step"), "{}", said(&out));
    assert!(
        text.contains(
            "warning: overrides differs: now [\"train.output_dir=runs/a\",\"train.batch_size=4\"], in the baseline "
        ),
        "{text}"
    );
    assert!(!said(&out).contains("the run has only"), "{}", said(&out));
    let out = run(&["--against", "none"]);
    assert_eq!(out.status.code(), Some(1), "{}", said(&out));
    let text = said(&out);
    assert!(
        text.contains("there is no measurement `none`") && text.contains("hint: saved are `base`"),
        "{text}"
    );
    // A file of somebody else is not replaced, and that is found before the steps.
    fs::write(bench.path("mine.json"), "{}").unwrap();
    let out = run(&["--save", "mine.json"]);
    assert_eq!(out.status.code(), Some(2), "{}", said(&out));
    assert!(out.stdout.is_empty() && fs::read(bench.path("mine.json")).unwrap() == b"{}");
    let out = run(&["--save", "base", "train.max_steps=9", "train.save_steps=1"]);
    let text = said(&out);
    assert!(out.status.success(), "{text}");
    for part in [
        "`train.max_steps` is not the number of steps here: `--steps`",
        "`train.save_steps` has no effect here",
    ] {
        assert!(text.contains(part), "{text}");
    }
    assert!(!text.contains("given twice"), "{text}");
}

#[test]
fn a_profile_of_a_run_that_is_too_short_says_so() {
    let bench = Bench::new();
    for (steps, said_of) in [
        ("train.max_steps=3", "the profile has 2 of 9 steps"),
        ("train.max_steps=1", "no step was profiled"),
    ] {
        let arguments = ["train", "r.toml", steps, "train.save_steps=0", "train.output_dir=out"];
        let out = bench.ft(&[&arguments[..], &["--overwrite", "--profile", "steps=9"]].concat());
        let text = said(&out);
        assert!(out.status.success() && text.contains(said_of), "{text}");
        assert_eq!(bench.path("out/trace.json").exists(), steps.ends_with('3'), "{text}");
    }
}
