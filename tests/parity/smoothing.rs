//! Label smoothing against `LabelSmoother` of transformers and `cross_entropy` of torch (`make_smoothing.py`).

use candle_core::{Device, Tensor};
use ft::data::IGNORE;
use ft::ops::cross_entropy::{self, CrossEntropyOptions, OutputPieces, PIECE};
use ft::ops::step_stats::StepStats;
use serde_json::Value;

fn numbers(value: &Value) -> Vec<f64> {
    let all = value.as_array().unwrap().iter();
    all.map(|x| x.as_f64().unwrap()).collect()
}

fn matrix(value: &Value, rows: usize, columns: usize) -> Tensor {
    let values: Vec<f32> = numbers(value).into_iter().map(|x| x as f32).collect();
    Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap()
}

fn assert_close(found: &Tensor, want: &Value) {
    let want = numbers(want);
    let found: Vec<f32> = found.flatten_all().unwrap().to_vec1().unwrap();
    let largest = want.iter().fold(0f64, |m, x| m.max(x.abs()));
    assert_eq!(found.len(), want.len());
    for (found, want) in found.iter().zip(&want) {
        assert!((*found as f64 - want).abs() <= 1e-6 * largest, "{found} {want}");
    }
}

#[test]
fn label_smoothing_is_that_of_transformers_and_torch() {
    let golden: Value = serde_json::from_str(include_str!("goldens/smoothing.json")).unwrap();
    let [n, d, v] = numbers(&golden["sizes"])[..] else {
        panic!("three sizes")
    };
    let (n, d, v) = (n as usize, d as usize, v as usize);
    let (hidden, head) = (matrix(&golden["hidden"], n, d), matrix(&golden["head"], v, d));
    let labels = numbers(&golden["labels"]).into_iter();
    let targets: Vec<u32> = labels.map(|x| if x < 0.0 { IGNORE } else { x as u32 }).collect();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 3);
    for case in cases {
        let number = |name: &str| case[name].as_f64().unwrap();
        let cap = number("cap");
        let options = CrossEntropyOptions {
            smoothing: number("smoothing") as f32,
            softcap: (cap > 0.0).then_some(cap as f32),
            scale: 1.0 / number("items"),
            need_dh: true,
            need_dw: true,
            ..CrossEntropyOptions::losses(None, 2)
        };
        let loss = |stats: &StepStats| {
            let (found, want) = (stats.read().unwrap().loss / number("items"), number("loss"));
            assert!((found - want).abs() <= 1e-6 * want, "{found} {want}");
        };
        let stats = StepStats::new(&Device::Cpu).unwrap();
        let out = cross_entropy::forward_backward(&hidden, &head, &targets, &options, &stats).unwrap();
        loss(&stats);
        assert_close(&out.dh.unwrap(), &case["hidden_gradient"]);
        assert_close(&out.dw.unwrap(), &case["head_gradient"]);
        let parts = OutputPieces {
            rows: v,
            width: d,
            rows_of_part: PIECE,
            part: &|_| Ok(head.clone()),
        };
        let options = CrossEntropyOptions {
            need_dw: false,
            ..options
        };
        let stats = StepStats::new(&Device::Cpu).unwrap();
        let out = cross_entropy::streamed(&hidden, &parts, &targets, &options, &stats).unwrap();
        loss(&stats);
        assert_close(&out.dh.unwrap(), &case["hidden_gradient"]);
    }
}
