//! Each adapter kind on each storage type of the weight gives the same results as on the dequantized weight.

use super::*;
use crate::ops::Dtype;
use crate::ops::oracle::{assert_close, random};
use crate::ops::update;
use crate::peft::tests::{I, KEY, N, O, dora, kinds};
use crate::quant::{self, Format};
use candle_core::{DType, Device};
use std::collections::BTreeMap;

/// A sink that wants all gradients of adapters.
#[derive(Default)]
struct All(BTreeMap<String, Tensor>);

impl GradSink for All {
    fn wants(&self, name: &str) -> bool {
        name.starts_with("m.")
    }

    fn take(&mut self, param: &Param, gradient: Tensor) -> Result<()> {
        self.0.insert(param.name.to_string(), gradient);
        Ok(())
    }
}

fn storages(w: &Tensor) -> Vec<(String, Weight, f32)> {
    let values = update::to_f32_vec(w).unwrap();
    let quantized = |format: Format| {
        let codes = quant::quantize(&values, (O, I), format, Dtype::F32).unwrap();
        (format.to_string(), Weight::from(codes), 1e-5)
    };
    vec![
        ("f32".into(), w.clone().into(), 1e-6),
        // On processors with bf16 matrix instructions, the activations are rounded to bf16.
        ("bf16".into(), w.to_dtype(DType::BF16).unwrap().into(), 2e-2),
        quantized(Format::Int8 { group: 0 }),
        quantized(Format::Int8 { group: 128 }),
        quantized(Format::Int4 { group: 64 }),
        quantized(Format::Nf4 { double: false }),
        quantized(Format::Nf4 { double: true }),
    ]
}

#[test]
fn adapters_over_codes_are_adapters_over_what_the_codes_stand_for() {
    let (x, dy, w) = (random((N, I), 31), random((N, O), 32), random((O, I), 33));
    let bias = Param {
        name: "bias".into(),
        tensor: random(O, 34),
    };
    for (storage, weight, tolerance) in storages(&w) {
        let dequantized = Tensor::from_vec(weight.rows(0, O).unwrap(), (O, I), &Device::Cpu).unwrap();
        for key in [None, KEY] {
            let mut all = kinds(0.5);
            all.push(("dora", Adapter::Dora(dora(0.5))));
            for (kind, adapter) in all {
                let run = |weight: &Weight| {
                    // DoRA caches the row norms of the first weight it is used with.
                    let adapter = match &adapter {
                        Adapter::Dora(_) => Adapter::Dora(dora(0.5)),
                        other => other.clone(),
                    };
                    let linear = Linear {
                        name: "w".into(),
                        weight: weight.clone(),
                        bias: Some(bias.clone()),
                        adapter: Some(Arc::new(adapter)),
                    };
                    let ctx = Context {
                        sequence: None,
                        noise: None,
                        documents: &[0, N],
                        ropes: Vec::new(),
                        dropout: key,
                        observer: None,
                        mlp_tokens: None,
                        shared: Default::default(),
                    };
                    let mut sink = All::default();
                    let y = linear.forward(&x, &ctx).unwrap();
                    let dx = linear
                        .backward(Some(&x), &dy, &ctx, Dx::New, &mut sink)
                        .unwrap()
                        .unwrap();
                    (y, dx, sink.0)
                };
                let (got, want) = (run(&weight), run(&Weight::from(dequantized.clone())));
                assert_close(&got.0, &want.0, tolerance);
                assert_close(&got.1, &want.1, tolerance);
                assert!(
                    !got.2.is_empty() && got.2.keys().eq(want.2.keys()),
                    "{kind} over {storage}"
                );
                for (name, gradient) in &got.2 {
                    assert_close(gradient, &want.2[name], tolerance);
                }
            }
        }
    }
}
