//! `ft tune-lr`: the sweep, the suggestion, and what it leaves behind.

use crate::bench::{Bench, files, number, said};
use serde_json::Value;

fn tested(bench: &Bench, more: &[&str]) -> String {
    let ran = bench.ft(&[&["tune-lr", "--recipe", "r.toml", "--steps", "24"][..], more].concat());
    assert!(ran.status.success(), "{}", said(&ran));
    String::from_utf8(ran.stdout).unwrap()
}

/// The accumulation is `auto` in the recipe, and another one for a short run.
const ROWS: &str = "train.gradient_accumulation_steps=8";

#[test]
fn a_step_of_the_test_has_the_rows_of_the_run() {
    let bench = Bench::new();
    let found = tested(
        &bench,
        &["--from", "1e-5", "--to", "1e-4", "optimizer.name=sgd", "--json"],
    );
    let found: Value = serde_json::from_str(&found).unwrap();
    bench.train(&["optimizer.name=sgd", "train.output_dir=run", "train.save_steps=0"]);
    assert_eq!(
        number(&found["points"][0], "loss"),
        number(&bench.steps("run")[0], "loss")
    );
}

#[test]
fn a_range_test_suggests_a_rate_and_leaves_nothing() {
    let bench = Bench::new();
    let before = files(bench.dir.path());
    let sweep = ["--from", "1e-5", "--to", "100", "optimizer.name=sgd", ROWS, "--json"];
    let found: Value = serde_json::from_str(&tested(&bench, &sweep)).unwrap();
    assert!(files(bench.dir.path()) == before, "files were written or changed");
    let points = found["points"].as_array().unwrap();
    // The same factor in every step.
    let rates: Vec<f64> = points.iter().map(|p| number(p, "learning_rate")).collect();
    assert!((rates[0] / 1e-5 - 1.0).abs() < 1e-12);
    let factor = 1e7f64.powf(1.0 / 23.0);
    assert!(rates.windows(2).all(|w| (w[1] / w[0] / factor - 1.0).abs() < 1e-9));
    assert!(found["diverged"] == true || points.len() == 24, "{found}");
    // The rule: a tenth of the rate with the lowest smoothed loss.
    let by_loss = |a: &&Value, b: &&Value| number(a, "smoothed_loss").total_cmp(&number(b, "smoothed_loss"));
    let lowest = points.iter().min_by(by_loss).unwrap();
    let suggestion = number(&found, "suggestion");
    assert!(
        (suggestion / number(lowest, "learning_rate") - 0.1).abs() < 1e-9,
        "{found}"
    );
    assert!(rates[0] < suggestion && suggestion < 10.0, "{found}");

    // The first steps are those of a run with these rates.
    let loss = number(&points[0], "loss");
    bench.train(&[
        "train.max_steps=1",
        ROWS,
        "optimizer.name=sgd",
        "train.output_dir=run",
        "train.save_steps=0",
    ]);
    assert_eq!(number(&bench.steps("run")[0], "loss"), loss);

    let text = tested(&bench, &["--from", "1e-5", "--to", "1", ROWS, "--svg", "lr.svg"]);
    assert!(
        text.contains("suggestion: optimizer.learning_rate=") && text.contains("rule: a tenth"),
        "{text}"
    );
    assert!(text.lines().count() > 12, "{text}");
    let svg = std::fs::read_to_string(bench.path("lr.svg")).unwrap();
    assert!(svg.contains("learning rate") && svg.contains("<svg"));
    let ran = bench.ft(&["tune-lr", "r.toml", "--from", "1", "--to", "0.1"]);
    assert_eq!(ran.status.code(), Some(2), "{}", said(&ran));
}
