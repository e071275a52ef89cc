//! Learning-rate schedules compared with transformers, optimizers on one tensor compared with torch.

use crate::support::{all_close, goldens, json, numbers, text};
use crate::wire;
use serde_json::Value;

#[test]
fn schedules_are_those_of_transformers() {
    let golden = json(&goldens().join("tables/schedules.json"));
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 12);
    for case in cases {
        let (name, steps) = (text(case, "name"), case["max_steps"].as_u64().unwrap());
        let mut lines = format!(
            "[schedule]\nname = \"{name}\"\nwarmup_steps = {}\n",
            case["warmup_steps"]
        );
        for key in ["decay_ratio", "min_lr_ratio"] {
            if let Some(value) = case.get(key) {
                lines.push_str(&format!("{key} = {value}\n"));
            }
        }
        let (got, want) = (wire::multipliers(&lines, steps), numbers(&case["multipliers"]));
        assert_eq!(got.len(), want.len());
        for (k, (g, w)) in got.iter().zip(&want).enumerate() {
            assert!((g - w).abs() < 1e-12, "{lines}: {g} instead of {w} at step {}", k + 1);
        }
    }
}

#[test]
fn optimizers_are_those_of_torch_and_transformers() {
    let golden = json(&goldens().join("tables/optimizers.json"));
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 9);
    for case in cases {
        let (rule, options) = (text(case, "rule"), &case["options"]);
        let mut lines = format!("[optimizer]\nname = \"{rule}\"\nlearning_rate = {}\n", options["lr"]);
        for key in ["betas", "eps", "momentum", "weight_decay"] {
            if let Some(value) = options.get(key) {
                lines.push_str(&format!("{key} = {value}\n"));
            }
        }
        let narrow = |value: &Value| numbers(value).iter().map(|x| *x as f32).collect::<Vec<f32>>();
        let gradients: Vec<Vec<f32>> = case["gradients"].as_array().unwrap().iter().map(narrow).collect();
        let start = narrow(&case["start"]);
        let got = wire::optimizer_steps(&lines, &start, &gradients);
        let want = case["steps"].as_array().unwrap();
        assert_eq!(got.len(), want.len());
        for (k, ((weights, first, second), want)) in got.iter().zip(want).enumerate() {
            let what = |part: &str| format!("{lines}: {part} after step {}", k + 1);
            all_close(weights, &numbers(&want["weights"]), 1e-6, &what("weights"));
            for (key, means) in [("exp_avg_sq_row", first), ("exp_avg_sq_col", second)] {
                let Some(want) = want.get(key).map(numbers) else {
                    continue;
                };
                assert_eq!(means.len(), want.len());
                for (g, w) in means.iter().zip(want) {
                    assert!((g - w).abs() <= 1e-5 * w, "{}: {g} instead of {w}", what(key));
                }
            }
            for (key, moment) in [("exp_avg", first), ("momentum_buffer", first), ("exp_avg_sq", second)] {
                let Some(want) = want.get(key) else { continue };
                assert_eq!(moment.len(), 12);
                // Compares element by element, relative to the size of its inputs: the sizes differ by orders of
                // magnitude.
                for (i, (g, w)) in moment.iter().zip(numbers(want)).enumerate() {
                    let decay = options["weight_decay"].as_f64().unwrap() * start[i].abs() as f64;
                    let size = gradients.iter().fold(decay, |m, g| m.max(g[i].abs() as f64));
                    let size = if key == "exp_avg_sq" { size * size } else { size };
                    assert!((g - w).abs() <= 2e-6 * size, "{}: {g} instead of {w}", what(key));
                }
            }
        }
    }
}
