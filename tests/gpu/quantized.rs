//! Quantized weights: values, products with many tokens and with few.

use crate::support::{Gpu, KINDS, Pair, assert_close, assert_same_bits, formats, gpu, quantized};
use candle_core::{DType, Tensor};
use ft::quant::{Format, Weight};

/// One weight `[O, I]` on both devices, with the same quantized data.
fn weights(gpu: &Gpu, (o, i): (usize, usize), format: Format, dtype: DType) -> (Weight, Weight) {
    let quantized = || quantized((o, i), format, dtype, 7);
    let there = Weight::quantized_on(quantized(), &gpu.device).unwrap();
    assert!(matches!(there, Weight::DeviceQuantized(_)));
    (there, quantized().into())
}

fn compare(gpu: &Gpu, (n, o, i): (usize, usize, usize), format: Format, dtype: DType, tolerance: f32) {
    let (there, here) = weights(gpu, (o, i), format, dtype);
    assert_eq!((there.dims(), there.bytes()), (here.dims(), here.bytes()));
    let (x, dy) = (gpu.random((n, i), dtype, 1), gpu.random((n, o), dtype, 2));
    let bias = gpu.random(o, dtype, 3);
    let check = |got: &Tensor, want: &Tensor| {
        assert_eq!(got.dtype(), dtype);
        assert_close(got, want, tolerance);
    };
    let y = there.forward(&x.gpu, None).unwrap();
    check(&y, &here.forward(&x.cpu, None).unwrap());
    assert_same_bits(&y, &there.forward(&x.gpu, None).unwrap());
    let y = there.forward(&x.gpu, Some(&bias.gpu)).unwrap();
    check(&y, &here.forward(&x.cpu, Some(&bias.weight())).unwrap());
    let dx = there.backward_input(&dy.gpu).unwrap();
    check(&dx, &here.backward_input(&dy.cpu).unwrap());
    assert_same_bits(&dx, &there.backward_input(&dy.gpu).unwrap());
    let sum = gpu.random((n, i), dtype, 4);
    there.backward_input_add(&sum.gpu, &dy.gpu).unwrap();
    here.backward_input_add(&sum.cpu, &dy.cpu).unwrap();
    check(&sum.gpu, &sum.cpu);
    let Pair { gpu: to, cpu: want } = gpu.random((n, o), dtype, 5);
    there.forward_add(&to, &x.gpu).unwrap();
    here.forward_add(&want, &x.cpu).unwrap();
    check(&to, &want);
}

#[test]
fn products_with_codes_match_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for (dtype, tolerance) in KINDS {
        for format in formats() {
            // Few tokens (packed and single), many tokens, sizes that are not divisible, no tokens.
            for sizes in [
                (1, 96, 256),
                (3, 70, 1024),
                (8, 33, 100),
                (1, 5, 77),
                (9, 64, 128),
                (130, 250, 600),
                (0, 16, 64),
            ] {
                compare(&gpu, sizes, format, dtype, tolerance);
            }
        }
    }
}

/// Weights larger than the dequantization buffer, in both directions.
#[test]
fn large_weights_are_dequantized_block_by_block() {
    let Some(gpu) = gpu() else { return };
    let format = Format::Nf4 { double: true };
    for (o, i) in [(18_000, 2080), (2080, 18_000)] {
        assert!(o * i > ft::ops::quantized::TILE);
        compare(&gpu, (12, o, i), format, DType::BF16, 1e-2);
    }
}

#[test]
fn rows_are_bit_equal() {
    let Some(gpu) = gpu() else { return };
    for (dtype, _) in KINDS {
        for format in formats() {
            for (o, i) in [(9, 256), (7, 100), (5, 77)] {
                let (there, here) = weights(&gpu, (o, i), format, dtype);
                for (first, n) in [(0, o), (2, 3)] {
                    assert_eq!(there.rows(first, n).unwrap(), here.rows(first, n).unwrap());
                }
                assert!(there.rows(o, 1).is_err());
            }
        }
    }
}

/// Adapters are f32 beside bf16 activations; the type of the model may differ from the dequantized type.
#[test]
fn activations_of_another_type_are_met_by_a_cast() {
    let Some(gpu) = gpu() else { return };
    for (activations, dequantized_dtype) in [(DType::F32, DType::BF16), (DType::BF16, DType::F32)] {
        let (there, here) = weights(&gpu, (40, 128), Format::Int8 { group: 0 }, dequantized_dtype);
        for n in [2, 33] {
            let (x, dy) = (
                gpu.random((n, 128), activations, 1),
                gpu.random((n, 40), activations, 2),
            );
            let y = there.forward(&x.gpu, None).unwrap();
            assert_eq!(y.dtype(), activations);
            assert_close(&y, &here.forward(&x.cpu, None).unwrap(), 1e-2);
            let dx = there.backward_input(&dy.gpu).unwrap();
            assert_close(&dx, &here.backward_input(&dy.cpu).unwrap(), 1e-2);
        }
    }
}
