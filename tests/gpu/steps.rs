//! Optimizer steps: bit-equal to the CPU, many parameters in one call, the `FoundInf`, index subsets of tensors.

use crate::support::{Gpu, flat, gpu};
use candle_core::{DType, Device, Tensor};
use ft::base::rng::{Permutation, Rng, Stream};
use ft::ops::index_subset::{self, IndexSubset};
use ft::ops::step::{self, FoundInf, Moment, ParameterStep, Precision, UpdateRule};

const RULES: [UpdateRule; 5] = [
    UpdateRule::Adamw {
        betas: [0.9, 0.999],
        eps: 1e-8,
    },
    UpdateRule::Sgd { momentum: 0.9 },
    UpdateRule::Sgd { momentum: 0.0 },
    UpdateRule::Lion { betas: [0.9, 0.99] },
    UpdateRule::Sign,
];

#[derive(Clone, Copy, PartialEq)]
enum Form {
    Whole,
    Master,
    Stochastic,
}

/// A parameter with its state, on one device.
struct Parameter {
    form: Form,
    weight: Tensor,
    low: Tensor,
    gradient: Tensor,
    first: Option<Moment>,
    second: Option<Moment>,
}

impl Parameter {
    fn new(gpu: &Gpu, n: usize, form: Form, rule: UpdateRule, int8: bool, device: &Device) -> Self {
        let values = flat(&gpu.random(n, DType::F32, n as u64).cpu);
        let there = |t: Tensor| t.to_device(device).unwrap();
        let (weight, low) = match form {
            Form::Whole => (Tensor::new(&values[..], device).unwrap(), None),
            _ => {
                let weight = Tensor::zeros(n, DType::BF16, device).unwrap();
                let low = Tensor::zeros(n, DType::I16, device).unwrap();
                step::split(&values, &weight, &low).unwrap();
                (weight, Some(low))
            }
        };
        let moment = |there: bool| there.then(|| Moment::zeros(n, int8 && n >= 4096, device).unwrap());
        let (first, second) = match rule {
            UpdateRule::Adamw { .. } => (true, true),
            UpdateRule::Sgd { momentum } => (momentum != 0.0, false),
            UpdateRule::Lion { .. } => (true, false),
            _ => (false, false),
        };
        Self {
            form,
            weight,
            low: low.unwrap_or_else(|| there(Tensor::zeros(n, DType::I16, &Device::Cpu).unwrap())),
            gradient: there(gpu.random(n, DType::F32, 7 + n as u64).cpu),
            first: moment(first),
            second: moment(second),
        }
    }

    fn item(&self, weight_decay: f64, step: u64) -> ParameterStep<'_> {
        ParameterStep {
            weight: &self.weight,
            precision: match self.form {
                Form::Whole => Precision::Whole,
                Form::Master => Precision::Master(&self.low),
                Form::Stochastic => Precision::Stochastic(Rng::new(1, Stream::Rounding, &[step])),
            },
            gradient: &self.gradient,
            first: self.first.as_ref(),
            second: self.second.as_ref(),
            lr: 1e-2,
            weight_decay,
            step,
            begin: 0,
        }
    }

    /// Views of `n` elements from `begin` on.
    fn part(&self, begin: usize, n: usize) -> Self {
        let view = |t: &Tensor, begin: usize, n: usize| t.narrow(0, begin, n).unwrap();
        let moment = |moment: &Option<Moment>| {
            moment.as_ref().map(|moment| match moment {
                Moment::F32(t) => Moment::F32(view(t, begin, n)),
                Moment::Int8 { codes, scales } => Moment::Int8 {
                    codes: view(codes, begin, n),
                    scales: view(scales, begin / step::BLOCK, n.div_ceil(step::BLOCK)),
                },
            })
        };
        Self {
            form: self.form,
            weight: view(&self.weight, begin, n),
            low: view(&self.low, begin, n),
            gradient: view(&self.gradient, begin, n),
            first: moment(&self.first),
            second: moment(&self.second),
        }
    }

    /// Exact values of the weight, then the optimizer state.
    fn values(&self) -> Vec<u32> {
        let mut values = match self.form {
            Form::Master => step::join(&self.weight, &self.low).unwrap(),
            _ => flat(&self.weight),
        };
        for moment in [&self.first, &self.second].into_iter().flatten() {
            match moment {
                Moment::F32(t) => values.extend(flat(t)),
                Moment::Int8 { codes, scales } => {
                    values.extend(flat(codes));
                    values.extend(flat(scales));
                }
            }
        }
        values.iter().map(|x| x.to_bits()).collect()
    }
}

fn parameters(gpu: &Gpu, rule: UpdateRule, int8: bool, device: &Device) -> Vec<Parameter> {
    let list = [
        (1, Form::Whole),
        (1003, Form::Master),
        (70_001, Form::Whole),
        (40_000, Form::Master),
        (517, Form::Stochastic),
        (16_384, Form::Stochastic),
    ];
    list.map(|(n, form)| Parameter::new(gpu, n, form, rule, int8, device))
        .into()
}

fn run(rule: UpdateRule, parameters: &[Parameter], steps: u64, coefficient: f32, gate: FoundInf) {
    for k in 1..=steps {
        // Two groups: with and without weight decay.
        let items: Vec<ParameterStep> = parameters
            .iter()
            .enumerate()
            .map(|(i, p)| p.item(if i % 2 == 0 { 0.1 } else { 0.0 }, k))
            .collect();
        step::step_gated(rule, &items, coefficient, gate).unwrap();
    }
}

#[test]
fn a_parameter_in_parts_has_the_bits_of_the_whole() {
    let Some(gpu) = gpu() else { return };
    for rule in RULES {
        for (int8, form) in [
            (false, Form::Stochastic),
            (true, Form::Stochastic),
            (true, Form::Master),
        ] {
            let [whole, other] = [(); 2].map(|()| Parameter::new(&gpu, 40_000, form, rule, int8, &gpu.device));
            run(rule, std::slice::from_ref(&whole), 2, 0.7, FoundInf::default());
            for k in 1..=2 {
                let parts = [(0, 16_384), (16_384, 23_616)].map(|(begin, n)| (begin, other.part(begin, n)));
                let items = parts.each_ref().map(|(begin, part)| ParameterStep {
                    begin: *begin,
                    ..part.item(0.1, k)
                });
                step::step_gated(rule, &items, 0.7, FoundInf::default()).unwrap();
            }
            assert!(whole.values() == other.values(), "{rule:?}, {int8}");
        }
    }
}

#[test]
fn steps_are_bit_equal_to_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for rule in RULES {
        for int8 in [false, true] {
            let here = parameters(&gpu, rule, int8, &Device::Cpu);
            let there = parameters(&gpu, rule, int8, &gpu.device);
            run(rule, &here, 4, 0.7, FoundInf::default());
            run(rule, &there, 4, 0.7, FoundInf::default());
            for (here, there) in here.iter().zip(&there) {
                let n = here.weight.elem_count();
                assert!(here.values() == there.values(), "{rule:?}, {int8}: {n} elements");
            }
        }
    }
}

fn gate<'a>(coefficient: &'a Tensor, finite: &'a Tensor) -> FoundInf<'a> {
    FoundInf {
        coefficient: Some(coefficient),
        finite: Some(finite),
    }
}

#[test]
fn a_gate_scales_or_stops_a_step() {
    let Some(gpu) = gpu() else { return };
    for rule in RULES {
        for device in [&Device::Cpu, &gpu.device] {
            let scalar = |x: f64| Tensor::new(&[x], device).unwrap();
            let half = Tensor::new(&[0.5f32], device).unwrap();
            let (with, without) = (
                parameters(&gpu, rule, false, device),
                parameters(&gpu, rule, false, device),
            );
            run(rule, &with, 2, 0.8, gate(&half, &scalar(3.0)));
            run(rule, &without, 2, 0.4, FoundInf::default());
            let before: Vec<_> = with.iter().map(Parameter::values).collect();
            assert!(before == without.iter().map(Parameter::values).collect::<Vec<_>>());
            for bad in [f64::NAN, f64::INFINITY] {
                run(rule, &with, 1, 1.0, gate(&half, &scalar(bad)));
                for three in [[bad, 0.0, 1.0], [1.0, 0.0, bad]] {
                    run(rule, &with, 1, 1.0, gate(&half, &Tensor::new(&three, device).unwrap()));
                }
            }
            assert!(before == with.iter().map(Parameter::values).collect::<Vec<_>>());
        }
    }
}

#[test]
fn parts_are_those_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let n = 3000;
    for dtype in [DType::F32, DType::BF16] {
        for (start, len) in [(0, 17), (2990, 500), (5, n)] {
            for scattered in [false, true] {
                let places = IndexSubset {
                    start,
                    len,
                    n,
                    scattered: scattered.then(|| Permutation::new(Rng::new(5, Stream::Mask, &[1]), n as u64)),
                };
                let whole = gpu.random(n, dtype, 1);
                let stored = whole.weight();
                let index_subset = index_subset::gather(&whole.gpu, &places).unwrap();
                assert_eq!(
                    flat(&index_subset),
                    flat(&index_subset::gather(&stored, &places).unwrap())
                );
                let other = gpu.random(len, dtype, 2);
                index_subset::scatter(&whole.gpu, &other.gpu, &places).unwrap();
                index_subset::scatter(&stored, &other.weight(), &places).unwrap();
                assert_eq!(flat(&whole.gpu), flat(&stored));
            }
        }
    }
}

/// A matrix with Adafactor, or a vector if it has one row.
fn factored(gpu: &Gpu, (r, c): (usize, usize), form: Form, device: &Device) -> Parameter {
    let mut p = Parameter::new(gpu, r * c, form, UpdateRule::Adafactor, false, device);
    if r > 1 {
        for t in [&mut p.weight, &mut p.gradient] {
            *t = t.reshape((r, c)).unwrap();
        }
    }
    let state = |n| Some(Moment::zeros(n, false, device).unwrap());
    (p.first, p.second) = (if r > 1 { state(r) } else { None }, state(c));
    p
}

/// The order of sums differs from the CPU: means and changes of the weights are equal up to f32 rounding.
#[test]
fn adafactor_does_what_it_does_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for shape in [(1, 1), (1, 70_001), (3, 5), (300, 517), (9000, 64), (16, 40_000)] {
        for form in [Form::Whole, Form::Master, Form::Stochastic] {
            let [here, there] = [&Device::Cpu, &gpu.device].map(|device| factored(&gpu, shape, form, device));
            let before = flat(&here.weight);
            for p in [&here, &there] {
                for k in 1..=3 {
                    step::step(UpdateRule::Adafactor, &[p.item(0.1, k)], 0.7).unwrap();
                }
            }
            let exact = |p: &Parameter| match form {
                Form::Master => step::join(&p.weight, &p.low).unwrap(),
                _ => flat(&p.weight),
            };
            let largest = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0f32, f32::max);
            let (a, b) = (exact(&here), exact(&there));
            // A value near the midpoint between two bf16 values may be rounded to the other one.
            let most = match form {
                Form::Stochastic => a.iter().fold(0f32, |m, x| m.max(x.abs())) / 128.0,
                _ => 1e-4 * largest(&a, &before) + 1e-6,
            };
            assert!(largest(&a, &b) <= most, "{shape:?}: {} above {most}", largest(&a, &b));
            for (a, b) in [(&here.first, &there.first), (&here.second, &there.second)] {
                if let (Some(Moment::F32(a)), Some(Moment::F32(b))) = (a, b) {
                    let (a, b) = (flat(a), flat(b));
                    let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * a.abs();
                    assert!(a.iter().zip(&b).all(close), "the means of {shape:?}");
                }
            }
            // A closed gate blocks all updates.
            let values = there.values();
            let bad = Tensor::new(&[1.0, f64::NAN], &gpu.device).unwrap();
            let gate = FoundInf {
                finite: Some(&bad),
                ..FoundInf::default()
            };
            step::step_gated(UpdateRule::Adafactor, &[there.item(0.1, 4)], 0.7, gate).unwrap();
            assert!(there.values() == values);
        }
    }
}
