//! Eight-bit optimizer states compared with bitsandbytes: code tables, one quantized tensor, twenty steps of AdamW.

use crate::support::{goldens, json, numbers};
use crate::wire;
use serde_json::Value;

/// Parses a text of numbers.
fn listed(value: &Value) -> Vec<f64> {
    let text = value.as_str().unwrap();
    text.split_whitespace().map(|x| x.parse().unwrap()).collect()
}

/// Decodes values stored as integers: x / 2^20.
fn exact(value: &Value) -> Vec<f32> {
    listed(value).iter().map(|x| (x / (1 << 20) as f64) as f32).collect()
}

#[test]
fn the_code_is_that_of_bitsandbytes() {
    let golden = json(&goldens().join("tables/int8.json"));
    assert_eq!(golden["block"], wire::INT8_BLOCK);
    for (key, signed) in [("signed", true), ("unsigned", false)] {
        let (got, want) = (wire::code_table(signed), listed(&golden[key]));
        assert_eq!(want.len(), 256);
        for (g, w) in got.iter().zip(&want) {
            assert!((*g as f64 - w).abs() <= 1e-6 * w.abs(), "{key}: {g} instead of {w}");
        }
    }
    for tensor in golden["tensors"].as_array().unwrap() {
        let signed = tensor["signed"].as_bool().unwrap();
        let values = exact(&tensor["values"]);
        let (codes, scales) = wire::encode(&values, signed);
        assert_eq!(
            scales.iter().map(|x| *x as f64).collect::<Vec<_>>(),
            numbers(&tensor["scales"])
        );
        let want = listed(&tensor["codes"]);
        let table = wire::code_table(signed);
        for (i, (g, w)) in codes.iter().zip(&want).enumerate() {
            if *g as f64 == *w {
                continue;
            }
            // ft never rounds a non-zero second moment to zero; apart from that only ties may differ.
            let x = (values[i] / scales[i / 256]) as f64;
            let away = |code: usize| (table[code] as f64 - x).abs();
            let tie = (away(*g as usize) - away(*w as usize)).abs() <= 1e-6 * x.abs();
            assert!(
                tie || (!signed && *w == 0.0 && *g == 1 && x > 0.0),
                "element {i}: {g} instead of {w}"
            );
        }
    }
}

#[test]
fn twenty_steps_stay_with_those_of_bitsandbytes_code() {
    let golden = json(&goldens().join("tables/int8.json"));
    let run = &golden["adamw"];
    let options = &run["options"];
    let lines = format!(
        "[optimizer]\nname = \"adamw\"\nstate = \"int8\"\nlearning_rate = {}\nbetas = {}\neps = {}\n",
        options["lr"], options["betas"], options["eps"]
    );
    let gradients: Vec<Vec<f32>> = run["gradients"].as_array().unwrap().iter().map(exact).collect();
    let got = wire::int8_steps(&lines, &exact(&run["start"]), &gradients);
    let start = exact(&run["start"]);
    let wanted = run["weights"].as_object().unwrap();
    assert_eq!((got.len(), wanted.len()), (20, 4));
    for (step, want) in wanted {
        let (got, want) = (&got[step.parse::<usize>().unwrap() - 1], listed(want));
        let way: f64 = want.iter().zip(&start).map(|(w, s)| (w - *s as f64).powi(2)).sum();
        let off: f64 = want.iter().zip(got).map(|(w, g)| (w - *g as f64).powi(2)).sum();
        // A value near the midpoint between two codes may be rounded to the other one, which moves one element by one
        // code.
        assert!((off / way).sqrt() < 1e-4, "step {step}: {}", (off / way).sqrt());
    }
}
