//! Round trips within their theoretical error, parts, errors, products of a linear layer.

use super::*;
use crate::base::rng::{Rng, Stream};
use crate::ops::Dtype;
use crate::ops::linear;
use candle_core::{Device, Tensor};
use half::bf16;

const SHAPES: [(usize, usize); 6] = [(64, 256), (40, 320), (7, 100), (5, 77), (1, 1), (3, 4097)];

fn normal(n: usize, seed: u64) -> Vec<f32> {
    let rng = Rng::new(seed, Stream::Init, &[]);
    (0..n as u64).map(|i| 0.03 * rng.normal(i)).collect()
}

/// Values with hard cases: a large outlier, a constant row, zeros.
fn hard(rows: usize, columns: usize) -> Vec<f32> {
    let mut values = normal(rows * columns, 7);
    values[0] = 3.0;
    if rows > 4 {
        values[columns..2 * columns].fill(0.1);
        values[3 * columns..4 * columns].fill(0.0);
        values[2 * columns] = -50.0;
    }
    values
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |m, x| m.max(x.abs()))
}

/// Half the distance between two quantized values, in the group or block that contains element `at`.
fn half_step(format: Format, values: &[f32], columns: usize, at: usize) -> f32 {
    let group = format.group(columns);
    let (row, column) = (at / columns, at % columns);
    let start = row * columns + column / group * group;
    let members = &values[start..(start + group).min((row + 1) * columns)];
    match format {
        // Of 8 bits, the first is not stored.
        Format::Bf16 => values[at].abs() / 256.0,
        Format::Int8 { .. } => largest(members) / 127.0 / 2.0,
        Format::Int4 { .. } => {
            let (least, most) = members
                .iter()
                .fold((f32::MAX, f32::MIN), |(a, b), x| (a.min(*x), b.max(*x)));
            (most - least + least.abs() / 128.0) / 15.0 / 2.0 * (1.0 + 1.0 / 64.0)
        }
        _ => {
            let block = &values[at / 64 * 64..(at / 64 * 64 + 64).min(values.len())];
            // The widest gap between two levels is the one between -1 and the next level.
            largest(block) * (1.0 - 0.696_192_8) / 2.0
        }
    }
}

#[test]
fn round_trips_stay_within_half_a_step() {
    for (rows, columns) in SHAPES {
        let values = hard(rows, columns);
        for format in Format::ALL.into_iter().filter(|f| *f != Format::Nf4 { double: true }) {
            let quantized = quantize(&values, (rows, columns), format, Dtype::F32).unwrap();
            for (at, (got, want)) in quantized.dequantize().iter().zip(&values).enumerate() {
                let bound = half_step(format, &values, columns, at) * 1.00001 + 1e-12;
                assert!(
                    (got - want).abs() <= bound,
                    "{format} [{rows}, {columns}] at {at}: {got} {want} {bound}"
                );
            }
        }
    }
}

/// Double quantization changes the absmax of a block by at most half the widest gap of the dynamic code.
#[test]
fn double_quantization_stays_within_its_error() {
    let (rows, columns) = (64, 512);
    let values = normal(rows * columns, 3);
    let plain = quantize(&values, (rows, columns), Format::Nf4 { double: false }, Dtype::F32).unwrap();
    let double = quantize(&values, (rows, columns), Format::Nf4 { double: true }, Dtype::F32).unwrap();
    let absmax: Vec<f32> = values.chunks(64).map(largest).collect();
    let mean = absmax.iter().sum::<f32>() / absmax.len() as f32;
    let mut different = 0;
    for (block, (a, b)) in plain
        .dequantize()
        .chunks(64)
        .zip(double.dequantize().chunks(64))
        .enumerate()
    {
        let range = absmax[block / 256 * 256..]
            .iter()
            .take(256)
            .fold(0f32, |m, x| m.max((x - mean).abs()));
        let bound = range * 0.9 / 64.0 / 2.0 + 1e-6;
        for (a, b) in a.iter().zip(b) {
            assert!((a - b).abs() <= bound, "block {block}: {a} {b}, at most {bound} apart");
            different += usize::from(a != b);
        }
    }
    assert!(different > 0, "the absmax were not coded");
}

#[test]
fn dequantized_values_of_a_bf16_model_are_rounded_once() {
    let values = hard(20, 192);
    for format in Format::ALL {
        let exact = quantize(&values, (20, 192), format, Dtype::F32).unwrap().dequantize();
        let rounded = quantize(&values, (20, 192), format, Dtype::Bf16).unwrap().dequantize();
        for (a, b) in exact.iter().zip(&rounded) {
            assert_eq!(bf16::from_f32(*a).to_f32().to_bits(), b.to_bits(), "{format}");
        }
    }
}

#[test]
fn rows_and_parts_of_rows_are_those_of_the_whole() {
    let (rows, columns) = (6, 333);
    let values = hard(rows, columns);
    for format in Format::ALL {
        let quantized = quantize(&values, (rows, columns), format, Dtype::Bf16).unwrap();
        let all = quantized.dequantize();
        let mut row = vec![0f32; columns];
        quantized.dequantize_row(4, &mut row);
        assert_eq!(row, all[4 * columns..5 * columns]);
        let mut part = vec![0f32; 100];
        quantized.dequantize_into(5, 31, &mut part);
        assert_eq!(part, all[5 * columns + 31..][..100]);
    }
}

#[test]
fn codes_do_not_depend_on_threads_or_on_the_type_of_the_source() {
    let narrow: Vec<bf16> = hard(70, 640).iter().map(|x| bf16::from_f32(*x)).collect();
    let wide: Vec<f32> = narrow.iter().map(|x| x.to_f32()).collect();
    let bytes = |c: &QMatrix| c.parts().iter().map(|p| p.bytes.to_vec()).collect::<Vec<_>>();
    for format in Format::ALL {
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| bytes(&quantize(&wide, (70, 640), format, Dtype::F32).unwrap()))
        };
        let one = run(1);
        assert!(one == run(2) && one == run(5), "{format}");
        assert!(
            one == bytes(&quantize(&narrow, (70, 640), format, Dtype::F32).unwrap()),
            "{format}"
        );
    }
}

#[test]
fn parts_go_to_a_file_and_back() {
    for (rows, columns) in SHAPES {
        let values = hard(rows, columns);
        for format in Format::ALL {
            let quantized = quantize(&values, (rows, columns), format, Dtype::Bf16).unwrap();
            let parts = quantized.parts();
            let sizes: Vec<_> = parts.iter().map(|p| (p.name, p.bytes.len())).collect();
            assert_eq!(sizes, format.parts(rows, columns), "{format}");
            assert_eq!(quantized.bytes(), sizes.iter().map(|(_, n)| *n as u64).sum::<u64>());
            let take = |name: &str| Ok(parts.iter().find(|p| p.name == name).unwrap().bytes.to_vec());
            let again = QMatrix::from_parts(format, (rows, columns), Dtype::Bf16, take).unwrap();
            assert_eq!(again.dequantize(), quantized.dequantize());
        }
    }
}

#[test]
fn damaged_parts_are_refused() {
    for format in Format::ALL {
        let quantized = quantize(&normal(4 * 128, 1), (4, 128), format, Dtype::F32).unwrap();
        for (which, (name, _)) in format.parts(4, 128).into_iter().enumerate() {
            let damaged = |change: &dyn Fn(&mut Vec<u8>)| {
                let take = |wanted: &str| {
                    let parts = quantized.parts();
                    let mut bytes = parts.iter().find(|p| p.name == wanted).unwrap().bytes.to_vec();
                    if wanted == name {
                        change(&mut bytes);
                    }
                    Ok(bytes)
                };
                QMatrix::from_parts(format, (4, 128), Dtype::F32, take)
            };
            let e = damaged(&|bytes| bytes.truncate(bytes.len() - 1))
                .unwrap_err()
                .to_string();
            assert!(e.contains(name) && e.contains("bytes"), "{e}");
            let codes = which == 0 || (format == Format::Nf4 { double: true } && name == "absmax");
            if !codes || format == Format::Bf16 {
                let e = damaged(&|bytes| bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes())).unwrap_err();
                assert!(e.to_string().contains("not finite"), "{format} {name}: {e}");
            }
        }
    }
    assert!(QMatrix::from_parts(Format::Int4 { group: 7 }, (1, 1), Dtype::F32, |_| Ok(vec![])).is_err());
}

#[test]
fn what_cannot_be_coded_is_refused() {
    for format in Format::ALL {
        for bad in [f32::NAN, f32::INFINITY, -3e38] {
            let mut values = normal(128, 1);
            values[77] = bad;
            assert!(
                quantize(&values, (1, 128), format, Dtype::F32).is_err(),
                "{format} {bad}"
            );
        }
        assert!(quantize(&normal(128, 1), (2, 128), format, Dtype::F32).is_err());
        assert!(
            quantize::<f32>(&[], (0, 128), format, Dtype::F32)
                .unwrap()
                .dequantize()
                .is_empty()
        );
    }
    let e = quantize(&normal(128, 1), (1, 128), Format::Int8 { group: 64 }, Dtype::F32).unwrap_err();
    assert!(e.to_string().contains("64"), "{e}");
}

#[test]
fn bytes_a_weight() {
    let bits = |format: Format| format.bytes(4096, 4096) as f64 * 8.0 / (4096.0 * 4096.0);
    assert!((bits(Format::Int8 { group: 0 }) - 8.0078).abs() < 1e-3);
    assert_eq!(bits(Format::Int8 { group: 128 }), 8.25);
    assert_eq!(bits(Format::Bf16), 16.0);
    assert_eq!(bits(Format::Int4 { group: 64 }), 4.5);
    assert_eq!(bits(Format::Int4 { group: 128 }), 4.25);
    assert_eq!(bits(Format::Nf4 { double: false }), 4.5);
    assert!((bits(Format::Nf4 { double: true }) - 4.127).abs() < 1e-3);
}

fn tensor(values: Vec<f32>, shape: (usize, usize)) -> Tensor {
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn flat(t: &Tensor) -> Vec<f32> {
    t.flatten_all().unwrap().to_vec1().unwrap()
}

/// Forward and backward with quantized weights, compared with the dense operations on the dequantized values.
#[test]
fn a_linear_with_codes_is_one_with_the_dequantized_weight() {
    let (o, i) = (96, 160);
    let values = normal(o * i, 5);
    for format in Format::ALL {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let quantized = quantize(&values, (o, i), format, dtype).unwrap();
            let mut dense = tensor(quantized.dequantize(), (o, i));
            if dtype == Dtype::Bf16 {
                dense = dense.to_dtype(candle_core::DType::BF16).unwrap();
            }
            assert_eq!(Weight::from(dense.clone()).is_bf16(), dtype == Dtype::Bf16);
            let placed = Weight::from(quantized.to_device(&Device::Cpu).unwrap());
            assert_eq!(placed.is_bf16(), dtype == Dtype::Bf16);
            let weight = Weight::from(quantized);
            assert_eq!(weight.is_bf16(), dtype == Dtype::Bf16);
            assert_eq!(weight.dims(), [o, i]);
            assert!(weight.dense().is_err() && weight.bytes() <= (2 * o * i) as u64);
            for n in [1, 5, 40] {
                let (x, dy) = (tensor(normal(n * i, 1), (n, i)), tensor(normal(n * o, 2), (n, o)));
                let bias = Tensor::from_vec(normal(o, 3), o, &Device::Cpu).unwrap();
                let pairs = [
                    (
                        weight.forward(&x, Some(&bias)).unwrap(),
                        linear::forward(&x, &dense, Some(&bias)).unwrap(),
                    ),
                    (
                        weight.backward_input(&dy).unwrap(),
                        linear::backward_input(&dy, &dense).unwrap(),
                    ),
                ];
                for (got, want) in pairs {
                    for (a, b) in flat(&got).iter().zip(flat(&want)) {
                        assert!((a - b).abs() < 1e-6, "{format} {dtype:?} {n}: {a} {b}");
                    }
                }
                let (y, dx) = (tensor(normal(n * o, 8), (n, o)), tensor(normal(n * i, 9), (n, i)));
                let (y2, dx2) = (y.copy().unwrap(), dx.copy().unwrap());
                let Weight::Quantized(quantized) = &weight else {
                    unreachable!()
                };
                forward_add(&y, &x, quantized).unwrap();
                linear::forward_add(&y2, &x, &dense).unwrap();
                weight.backward_input_add(&dx, &dy).unwrap();
                linear::backward_input_add(&dx2, &dy, &dense).unwrap();
                for (got, want) in [(&y, &y2), (&dx, &dx2)] {
                    for (a, b) in flat(got).iter().zip(flat(want)) {
                        assert!((a - b).abs() < 1e-6, "{format} {dtype:?} {n}, adding: {a} {b}");
                    }
                }
                let (got, want) = (
                    weight.grad(&dy, &x).unwrap(),
                    Weight::Dense(dense.clone()).grad(&dy, &x).unwrap(),
                );
                assert_eq!(flat(&got), flat(&want), "{format} {dtype:?} {n}, gradient");
            }
            assert!(weight.forward(&tensor(vec![0.0; 2 * o], (2, o)), None).is_err());
            assert!(weight.backward_input(&tensor(vec![0.0; 2 * i], (2, i))).is_err());
        }
    }
}

/// Products with quantized tensors are bit-equal to those with quantized data in memory; damaged tensors are refused.
#[test]
fn placed_codes_are_the_codes() {
    for (o, i) in SHAPES {
        for format in Format::ALL {
            let quantized = quantize(&hard(o, i), (o, i), format, Dtype::Bf16).unwrap();
            let placed = quantized.to_device(&Device::Cpu).unwrap();
            let (tensors, offset) = (quantized.tensors(&Device::Cpu).unwrap(), quantized.nested_offset());
            let held: usize = tensors.iter().map(|t| t.elem_count() * t.dtype().size_in_bytes()).sum();
            assert!(held as u64 + 4 >= placed.bytes() && held as u64 <= placed.bytes());
            for which in 0..tensors.len() {
                let mut less = tensors.clone();
                less[which] = less[which].narrow(0, 0, less[which].elem_count() - 1).unwrap();
                assert!(
                    DeviceQMatrix::new(format, (o, i), Dtype::Bf16, less, offset).is_err(),
                    "{format} {which}"
                );
            }
            let few = tensors[1..].to_vec();
            assert!(DeviceQMatrix::new(format, (o, i), Dtype::Bf16, few, offset).is_err());
            let (here, there) = (Weight::from(quantized), Weight::from(placed));
            assert_eq!((there.dims(), there.bytes()), (here.dims(), here.bytes()));
            assert!(there.dense().is_err() && there.format() == Some(format));
            assert_eq!(there.rows(0, o).unwrap(), here.rows(0, o).unwrap());
            assert!(there.rows(o, 1).is_err());
            for n in [1, 20] {
                let (x, dy) = (tensor(normal(n * i, 1), (n, i)), tensor(normal(n * o, 2), (n, o)));
                let run = |w: &Weight| {
                    let (y, dx) = (w.forward(&x, None).unwrap(), w.backward_input(&dy).unwrap());
                    w.forward_add(&y, &x).unwrap();
                    w.backward_input_add(&dx, &dy).unwrap();
                    (flat(&y), flat(&dx))
                };
                assert_eq!(run(&there), run(&here), "{format} [{o}, {i}]");
            }
            assert!(there.forward(&tensor(vec![0.0; 2 * i + 2], (2, i + 1)), None).is_err());
        }
    }
}
