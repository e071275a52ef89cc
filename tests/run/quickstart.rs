//! The first command of the README reaches its documented accuracy.

use crate::bench::{Bench, number, said};
use serde_json::Value;

/// Exact answers on held-out rows: below 30 % before, above 85 % after.
#[test]
fn the_quickstart_learns_to_answer() {
    let bench = Bench::new();
    let out = format!("train.output_dir={}", bench.path("quickstart").display());
    let root = env!("CARGO_MANIFEST_DIR");
    let ran = bench
        .command(&["train", "--recipe", "recipes/quickstart.toml", &out])
        .current_dir(root)
        .output()
        .unwrap();
    assert!(ran.status.success(), "{}", said(&ran));
    let metrics = std::fs::read_to_string(bench.path("quickstart/metrics.jsonl")).unwrap();
    let accuracy: Vec<f64> = metrics
        .lines()
        .map(|l| serde_json::from_str::<Value>(l).unwrap())
        .filter(|l| l.get("eval_accuracy").is_some())
        .map(|l| number(&l, "eval_accuracy"))
        .collect();
    let (before, after) = (accuracy[0], accuracy[accuracy.len() - 1]);
    assert!(accuracy.len() == 2 && before < 0.30 && after > 0.85, "{accuracy:?}");
    let shown = said(&ran);
    assert!(String::from_utf8_lossy(&ran.stdout).contains("/final"), "{shown}");
    for part in ["before: ", "after: "] {
        assert!(shown.contains(part), "{part}\n{shown}");
    }
}
