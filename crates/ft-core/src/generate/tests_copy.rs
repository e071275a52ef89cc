//! Quantized copies of bf16 weights: products of few rows round the rows.

use super::tests::{furthest, network, spec};
use super::tests_rows::same_bits;
use super::*;
use crate::model::{Network, Spec};
use crate::ops::oracle::random;
use crate::ops::{Dtype, linear};
use crate::quant::{Format, Weight};
use crate::source::Group;
use candle_core::{Device, Tensor};

const FORMATS: [Format; 3] = [
    Format::Int8 { group: 0 },
    Format::Int4 { group: 64 },
    Format::Nf4 { double: false },
];

const NAME: &str = "model.layers.1.mlp.down_proj.weight";

/// Sizes that the products of integers support.
fn wide(dtype: Dtype) -> Network {
    network(
        Spec {
            hidden: 64,
            intermediate: 128,
            ..spec()
        },
        dtype,
    )
}

/// How far the products of a copy's weight are from those with its dequantized values, as a part of the largest result, for one
/// row and for many.
fn distances(dtype: Dtype, format: Format) -> [f32; 2] {
    let exact = wide(dtype);
    let copy = QuantizedCopy::new(&exact, CopyFormats::of(format)).unwrap();
    let model = SampledModel::from(&copy);
    let layer = model.network.source.fetch(Group::Layer(1)).unwrap();
    let (_, weight) = layer.weight(NAME).unwrap();
    let values = Tensor::from_vec(weight.rows(0, 64).unwrap(), (64, 128), &Device::Cpu).unwrap();
    let dense = Weight::from(values.to_dtype(exact.source.in_memory(NAME).unwrap().dtype()).unwrap());
    [1, linear::many_rounded_rows()].map(|rows| {
        let x = random((rows, 128), 1);
        let [got, want] = [&weight, &dense].map(|w| {
            w.forward(&x, None)
                .unwrap()
                .flatten_all()
                .unwrap()
                .to_vec1::<f32>()
                .unwrap()
        });
        furthest(&got, &want) / want.iter().fold(0f32, |most, y| most.max(y.abs()))
    })
}

#[test]
fn only_copies_of_bf16_weights_round_a_few_rows() {
    for format in FORMATS {
        let [one, many] = distances(Dtype::F32, format);
        assert!(one.max(many) < 1e-6, "{format:?} {one} {many}");
        let [one, many] = distances(Dtype::Bf16, format);
        let rounds = !matches!(format, Format::Nf4 { .. });
        assert_eq!(one > 1e-6, rounds, "{format:?} {one}");
        assert!(one < 1e-2 && many < 1e-6, "{format:?} {one} {many}");
    }
}

#[test]
fn copies_give_the_same_bits_in_any_company() {
    for (dtype, many) in [
        (Dtype::Bf16, linear::many_rounded_rows()),
        (Dtype::F32, linear::MANY_ROWS),
    ] {
        let exact = wide(dtype);
        for format in FORMATS {
            let copy = QuantizedCopy::new(&exact, CopyFormats::of(format)).unwrap();
            // The head of a copy is int8, also of NF4.
            assert_eq!(SampledModel::from(&copy).many_rows, many, "{dtype:?} {format:?}");
            same_bits(&copy, None, &format!("{dtype:?} {format:?}"));
        }
    }
}
