//! The operations of experts, latent attention and AltUp: the numbers of the CPU.

use crate::support::{KINDS, Pair, assert_close, assert_same_bits, formats, gpu, quantized};
use candle_core::{DType, Device, Tensor};
use ft::ops::clamped_glu::{self, ClampedGlu};
use ft::ops::expert_pairs::{self, JoinedPair, Members};
use ft::ops::grouped::{self, GroupWeight};
use ft::ops::latent::LatentHeads;
use ft::ops::quantized::TILE;
use ft::ops::rope::RopePairing;
use ft::ops::routing::{self, ExpertGroups, GroupScore, RouterSpec, Routing, Score};
use ft::ops::{altup, linear, sparse_gate};
use ft::quant::{Format, Weight, quantize};
use ft::recipe::Dtype;

#[test]
fn rows_of_experts_are_those_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let spec = RouterSpec {
        score: Score::Softmax,
        top_k: 2,
        renormalize: true,
        scale: 1.5,
        groups: None,
    };
    for (dtype, tolerance) in KINDS {
        for (n, e, d) in [(1, 3, 7), (33, 5, 64), (70, 4, 300)] {
            let logits = gpu.random((n, e), DType::F32, 1);
            let routing = spec.route(&logits.cpu, None).unwrap();
            let on_gpu = spec.route(&logits.gpu, None).unwrap();
            assert_eq!(routing.counts(), on_gpu.counts());
            let here = routing.assign(&Device::Cpu, false).unwrap();
            let there = on_gpu.assign(&gpu.device, false).unwrap();
            let (x, y, bias) = (
                gpu.random((n, d), dtype, 2),
                gpu.random((n, d), dtype, 3),
                gpu.random((1, d), dtype, 4),
            );
            let numbers = [here.numbers().unwrap(), there.numbers().unwrap()];
            for expert in 0..e {
                let (Some(here), Some(there)) = (
                    here.of(expert..expert + 1).unwrap(),
                    there.of(expert..expert + 1).unwrap(),
                ) else {
                    assert_eq!(routing.counts()[expert], 0);
                    continue;
                };
                let rows = Pair {
                    cpu: here.gather(&x.cpu).unwrap(),
                    gpu: there.gather(&x.gpu).unwrap(),
                };
                assert_close(&rows.gpu, &rows.cpu, 0.0);
                for (of, rows, y, bias, numbers) in [
                    (&here, &rows.cpu, &y.cpu, &bias.weight(), &numbers[0]),
                    (&there, &rows.gpu, &y.gpu, &bias.gpu, &numbers[1]),
                ] {
                    routing::row_products(rows, rows, &of.part(numbers).unwrap()).unwrap();
                    routing::row_products_add(rows, bias, &of.part(numbers).unwrap()).unwrap();
                    routing::scale_rows(rows, &of.weights).unwrap();
                    of.add_to(y, rows).unwrap();
                }
                assert_close(&rows.gpu, &rows.cpu, tolerance);
            }
            assert_close(&numbers[1], &numbers[0], 1e-4);
            assert_close(&y.gpu, &y.cpu, tolerance);
            let balance = routing::LogitLoss {
                balance: vec![0.1; e],
                z: 0.01,
                two_level: None,
            };
            let weights = gpu.random(numbers[0].dims1().unwrap(), DType::F32, 9);
            let want = routing.backward(&weights.cpu, &balance).unwrap();
            assert_close(&on_gpu.backward(&weights.gpu, &balance).unwrap(), &want, 1e-5);
            // Logits and gates are f32 for every type.
            let w = gpu.random((e, d), dtype, 5);
            let b = gpu.random(e, dtype, 6);
            let got = linear::forward_f32(&x.gpu, &w.gpu, Some(&b.gpu)).unwrap();
            assert_eq!(got.dtype(), DType::F32);
            assert_close(&got, &linear::forward_f32(&x.cpu, &w.cpu, Some(&b.cpu)).unwrap(), 1e-4);
            // Several blocks.
            let z = gpu.random((300, 1), dtype, 7);
            let (g, want) = (routing::gates(&z.gpu).unwrap(), routing::gates(&z.cpu).unwrap());
            assert_close(&g, &want, 1e-5);
            let d = gpu.random(300, DType::F32, 8);
            routing::gates_backward(&g, &d.gpu).unwrap();
            routing::gates_backward(&want, &d.cpu).unwrap();
            assert_close(&d.gpu, &d.cpu, 1e-5);
        }
    }
}

/// Every rule of a router: choices, rows, sums and gradients of the CPU.
#[test]
fn routers_choose_what_they_choose_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let groups = |count, chosen, score| Some(ExpertGroups { count, chosen, score });
    for (score, renormalize, groups, corrected) in [
        (Score::Softmax, true, None, false),
        (Score::Sigmoid, true, groups(8, 3, GroupScore::TwoLargest), true),
        (Score::Softmax, false, groups(4, 2, GroupScore::Largest), false),
        (Score::Sigmoid, false, groups(2, 1, GroupScore::Sum), true),
        (Score::TwoLevel, true, groups(4, 2, GroupScore::Sum), false),
    ] {
        for (n, e, top_k) in [(1, 16, 4), (65, 32, 1), (200, 64, 4), (70, 160, 32)] {
            let spec = RouterSpec {
                score,
                top_k,
                renormalize,
                scale: 2.5,
                groups,
            };
            let logits = gpu.random((n, spec.outputs(e)), DType::F32, 1);
            let correction = gpu.random(e, DType::F32, 2);
            let by = |t| corrected.then_some(t);
            let here = spec.route(&logits.cpu, by(&correction.cpu)).unwrap();
            let there = spec.route(&logits.gpu, by(&correction.gpu)).unwrap();
            assert_eq!(
                (here.tokens(), here.counts(), here.group_visits()),
                (there.tokens(), there.counts(), there.group_visits())
            );
            assert_eq!(here.two_level_sums(), there.two_level_sums());
            let sums = |of: &Routing| [of.score_sums(), vec![of.entropy_sum(), of.log_sum_squares()]].concat();
            for (a, b) in sums(&here).iter().zip(sums(&there)) {
                assert!((a - b).abs() <= 1e-4 * (1.0 + a.abs()), "{score:?}: {a}, {b}");
            }
            // Rows and weights of all experts.
            let (a, b) = (
                here.assign(&Device::Cpu, false).unwrap(),
                there.assign(&gpu.device, false).unwrap(),
            );
            let x = gpu.random((n, 8), DType::F32, 3);
            for expert in 0..e {
                let (a, b) = (a.of(expert..expert + 1).unwrap(), b.of(expert..expert + 1).unwrap());
                assert_eq!(a.is_some(), b.is_some());
                let (Some(a), Some(b)) = (a, b) else { continue };
                assert_close(&b.gather(&x.gpu).unwrap(), &a.gather(&x.cpu).unwrap(), 0.0);
                assert_close(&b.weights, &a.weights, 1e-5);
            }
            let d = gpu.random(n * spec.top_k, DType::F32, 4);
            let mut loss = routing::LogitLoss::default();
            if score == Score::Softmax {
                loss.balance = (0..e).map(|i| 0.01 * i as f32).collect();
                loss.z = 0.02;
            }
            let want = here.backward(&d.cpu, &loss).unwrap();
            let got = there.backward(&d.gpu, &loss).unwrap();
            assert_close(&got.to_device(&gpu.device).unwrap(), &want, 1e-5);
            assert!(there.backward(&x.gpu, &loss).is_err());
        }
    }
    let spec = RouterSpec {
        score: Score::Softmax,
        top_k: 1,
        renormalize: false,
        scale: 1.0,
        groups: None,
    };
    let broken = Tensor::from_vec(vec![0.0, f32::NAN, 1.0, 2.0], (2, 2), &gpu.device).unwrap();
    let refused = spec.route(&broken, None).unwrap_err().to_string();
    assert!(refused.contains("not finite"), "{refused}");
}

/// Experts that are computed together: products, and rows added at their tokens.
#[test]
fn grouped_products_are_those_of_single_experts() {
    let Some(gpu) = gpu() else { return };
    let spec = RouterSpec {
        score: Score::Softmax,
        top_k: 3,
        renormalize: false,
        scale: 1.0,
        groups: None,
    };
    for (dtype, tolerance) in KINDS {
        for (n, e, inputs, outputs) in [(1, 4, 8, 16), (33, 5, 40, 136), (150, 7, 264, 72), (90, 3, 64, 128)] {
            let logits = gpu.random((n, e), DType::F32, 1);
            let alone = spec.route(&logits.cpu, None).unwrap();
            let alone = alone.assign(&Device::Cpu, false).unwrap();
            let assignment = spec.route(&logits.gpu, None).unwrap();
            let assignment = assignment.assign(&gpu.device, true).unwrap();
            let units = assignment.units();
            assert_eq!(units.iter().map(|u| u.len()).sum::<usize>(), e);
            let x = gpu.random((n, inputs), dtype, 2);
            let y = gpu.random((n, outputs), dtype, 3);
            let weights: Vec<Pair> = (0..e as u64)
                .map(|i| gpu.random((outputs, inputs), dtype, 10 + i))
                .collect();
            assert!(grouped::fits(&x.gpu, weights.iter().map(|w| (&w.gpu).into())));
            assert!(!grouped::fits(&x.cpu, weights.iter().map(|w| (&w.cpu).into())));
            for unit in units {
                let Some(of) = assignment.of(unit.clone()).unwrap() else {
                    continue;
                };
                assert!(of.counts.iter().sum::<usize>() <= n);
                let groups: Vec<(GroupWeight, usize)> = weights[unit.clone()]
                    .iter()
                    .map(|w| (&w.gpu).into())
                    .zip(of.counts.clone())
                    .collect();
                let part = grouped::forward(&of.gather(&x.gpu).unwrap(), &groups).unwrap();
                let back = grouped::backward_input(&part, &groups).unwrap();
                grouped::backward_input_add(&back, &part, &groups).unwrap();
                of.add_to(&y.gpu, &part).unwrap();
                let mut first = 0;
                for expert in unit {
                    let Some(own) = alone.of(expert..expert + 1).unwrap() else {
                        continue;
                    };
                    let w = &weights[expert].cpu;
                    let want = linear::forward(&own.gather(&x.cpu).unwrap(), w, None).unwrap();
                    let rows = own.counts[0];
                    assert_close(&part.narrow(0, first, rows).unwrap(), &want, tolerance);
                    let want_back = (linear::backward_input(&want, w).unwrap() * 2.0).unwrap();
                    assert_close(&back.narrow(0, first, rows).unwrap(), &want_back, tolerance);
                    own.add_to(&y.cpu, &want).unwrap();
                    first += rows;
                }
            }
            assert_close(&y.gpu, &y.cpu, tolerance);
        }
    }
    let odd = gpu.random((5, 12), DType::BF16, 1);
    assert!(!grouped::fits(&odd.gpu, [(&odd.gpu).into()]));
}

/// Quantized experts: none, few (dequantized in registers) and many rows, formats that one launch cannot dequantize.
#[test]
fn grouped_products_with_quantized_weights_are_those_of_single_experts() {
    let Some(gpu) = gpu() else { return };
    let (outputs, inputs) = (72, 136);
    let counts = [0, 3, 20, 8, 9, 40];
    let rows: usize = counts.iter().sum();
    for (dtype, tolerance) in [&KINDS[..], &[(DType::F16, 2e-3)]].concat() {
        for format in formats() {
            let weight = |seed: usize, format| {
                let there = quantized((outputs, inputs), format, dtype, 20 + seed as u64);
                Weight::quantized_on(there, &gpu.device).unwrap()
            };
            let mut weights: Vec<Weight> = (0..counts.len()).map(|seed| weight(seed, format)).collect();
            weights[4] = weight(4, Format::Int8 { group: 0 });
            let groups: Vec<(GroupWeight, usize)> = weights.iter().map(|w| w.grouped().unwrap()).zip(counts).collect();
            let x = gpu.random((rows, inputs), dtype, 1).gpu;
            assert!(grouped::fits(&x, groups.iter().map(|g| g.0)));
            let y = grouped::forward(&x, &groups).unwrap();
            let back = grouped::backward_input(&y, &groups).unwrap();
            grouped::backward_input_add(&back, &y, &groups).unwrap();
            let twice = y.copy().unwrap();
            grouped::forward_add(&twice, &x, &groups).unwrap();
            let mut first = 0;
            for (w, n) in weights.iter().zip(counts).filter(|(_, n)| *n > 0) {
                let want = w.forward(&x.narrow(0, first, n).unwrap(), None).unwrap();
                let want_back = w.backward_input(&want).unwrap();
                // In f32 and bf16 products with one expert are compared with the CPU in tests/gpu/quantized.rs.
                let [want, want_back] =
                    [&want, &want_back].map(|t| t.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap());
                assert_close(&y.narrow(0, first, n).unwrap(), &want, tolerance);
                assert_close(
                    &back.narrow(0, first, n).unwrap(),
                    &(want_back * 2.0).unwrap(),
                    tolerance,
                );
                assert_close(&twice.narrow(0, first, n).unwrap(), &(want * 2.0).unwrap(), tolerance);
                first += n;
            }
        }
    }
    let f32_rows = gpu.random((8, 16), DType::F32, 1).gpu;
    let values = vec![0.5; 16 * 16];
    let other = quantize(&values, (16, 16), Format::Int8 { group: 0 }, Dtype::Bf16).unwrap();
    let other = Weight::quantized_on(other, &gpu.device).unwrap();
    assert!(!grouped::fits(&f32_rows, other.grouped()));
}

/// The dequantized weights of three experts do not fit into the buffer.
#[test]
fn grouped_products_take_a_buffer_several_times() {
    let Some(gpu) = gpu() else { return };
    let (size, rows) = (3352, 9);
    assert!(2 * size * size <= TILE && 3 * size * size > TILE);
    let weights: Vec<Weight> = (0..3)
        .map(|seed| quantized((size, size), Format::Int8 { group: 0 }, DType::BF16, seed))
        .map(|weight| Weight::quantized_on(weight, &gpu.device).unwrap())
        .collect();
    let groups: Vec<(GroupWeight, usize)> = weights.iter().map(|w| (w.grouped().unwrap(), rows)).collect();
    let x = gpu.random((3 * rows, size), DType::BF16, 1).gpu;
    let y = grouped::forward(&x, &groups).unwrap();
    let back = grouped::backward_input(&x, &groups).unwrap();
    for (i, w) in weights.iter().enumerate() {
        let of = |t: &Tensor| t.narrow(0, i * rows, rows).unwrap();
        let want = [w.forward(&of(&x), None).unwrap(), w.backward_input(&of(&x)).unwrap()];
        for (found, want) in [&y, &back].into_iter().zip(want) {
            let want = want.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
            assert_close(&of(found), &want, 1e-2);
        }
    }
}

/// The pairs of successive experts, one of them without rows: products and gradients of each alone.
#[test]
fn pairs_of_experts_are_those_of_single_experts() {
    let Some(gpu) = gpu() else { return };
    let (experts, first, counts) = (6, 1, [3, 0, 20, 40]);
    let rows: usize = counts.iter().sum();
    let on_cpu = |t: &Tensor| t.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
    for (dtype, tolerance) in [&KINDS[..], &[(DType::F16, 2e-3)]].concat() {
        for (rank, parts, inputs, outputs) in [
            (1, 1, 40, 264),
            (4, 2, 264, 24),
            (8, 2, 72, 136),
            (12, 1, 136, 8),
            (20, 2, 32, 40),
        ] {
            let what = format!("{dtype:?}, rank {rank}");
            // Matrices that a copy does not round.
            let matrix = |shape, seed| {
                let rounded = gpu.random(shape, dtype, seed).cpu;
                gpu.pair(&rounded, DType::F32)
            };
            let a = matrix((experts * rank, inputs), 1);
            let b = matrix((experts * parts * outputs, rank), 2);
            let scale = 0.5;
            let joined = JoinedPair {
                matrices: (&a.gpu, &b.gpu),
                experts,
                scale,
            };
            let pairs = expert_pairs::new(&[joined], dtype).unwrap().pop().unwrap();
            let members = Members { first, counts: &counts };
            let x = gpu.random((rows, inputs), dtype, 3);
            let dys: Vec<Pair> = (0..parts as u64)
                .map(|p| gpu.random((rows, outputs), dtype, 4 + p))
                .collect();
            let ys: Vec<Pair> = (0..parts as u64)
                .map(|p| gpu.random((rows, outputs), dtype, 6 + p))
                .collect();
            let dx = gpu.random((rows, inputs), dtype, 8);
            let (grad_a, grad_b) = (
                gpu.random(a.cpu.shape(), DType::F32, 9),
                gpu.random(b.cpu.shape(), DType::F32, 10),
            );
            let u = pairs.down(&x.gpu, members).unwrap();
            let there: Vec<Tensor> = dys.iter().map(|dy| dy.gpu.clone()).collect();
            let du = pairs.up_backward(&there, members).unwrap();
            let low = [rows, expert_pairs::columns(rank, dtype.size_in_bytes() as u64)];
            assert_eq!((u.dims(), du.dims()), (&low[..], &low[..]));
            pairs.down_backward_add(&dx.gpu, &du, members).unwrap();
            pairs.grad_a_add(&grad_a.gpu, &du, &x.gpu, members).unwrap();
            for (part, (y, dy)) in ys.iter().zip(&dys).enumerate() {
                pairs.up_add(&y.gpu, &u, members, (part, parts)).unwrap();
                pairs
                    .grad_b_add(&grad_b.gpu, &dy.gpu, &u, members, (part, parts))
                    .unwrap();
            }
            // The products read what the GPU has rounded. Columns that fill the rank are zero.
            let [u, du] = [&u, &du].map(|t| {
                let all = on_cpu(t);
                let wide = all.dim(1).unwrap();
                let rest = all.narrow(1, rank, wide - rank).unwrap().flatten_all().unwrap();
                assert!(rest.to_vec1::<f32>().unwrap().iter().all(|x| *x == 0.0), "{what}");
                t.narrow(1, 0, rank).unwrap()
            });
            let (mut want_u, mut want_du) = (Vec::new(), Vec::new());
            let (mut want_dx, mut want_ys) = (Vec::new(), vec![Vec::new(); parts]);
            let mut start = 0;
            for (expert, n) in (first..).zip(counts).filter(|(_, n)| *n > 0) {
                let of = |t: &Tensor| on_cpu(t).narrow(0, start, n).unwrap().contiguous().unwrap();
                let (x, u, du, dx) = (of(&x.cpu), of(&u), of(&du), of(&dx.cpu));
                let own_a = a.cpu.narrow(0, expert * rank, rank).unwrap();
                want_u.push((linear::forward(&x, &own_a, None).unwrap() * f64::from(scale)).unwrap());
                want_dx.push((dx + linear::backward_input(&du, &own_a).unwrap()).unwrap());
                let sum = grad_a.cpu.narrow(0, expert * rank, rank).unwrap();
                linear::grad_weight_add(&sum, &du, &x, DType::F32).unwrap();
                let mut back: Option<Tensor> = None;
                for part in 0..parts {
                    let row = (expert * parts + part) * outputs;
                    let own_b = b.cpu.narrow(0, row, outputs).unwrap();
                    let (y, dy) = (of(&ys[part].cpu), of(&dys[part].cpu));
                    want_ys[part].push((y + linear::forward(&u, &own_b, None).unwrap()).unwrap());
                    let d = (linear::backward_input(&dy, &own_b).unwrap() * f64::from(scale)).unwrap();
                    back = Some(back.map_or(d.clone(), |back| (back + d).unwrap()));
                    let sum = grad_b.cpu.narrow(0, row, outputs).unwrap();
                    linear::grad_weight_add(&sum, &dy, &u, DType::F32).unwrap();
                }
                want_du.extend(back);
                start += n;
            }
            let all = |parts: &[Tensor]| Tensor::cat(parts, 0).unwrap();
            assert_close(&u, &all(&want_u), tolerance);
            assert_close(&du, &all(&want_du), tolerance);
            assert_close(&dx.gpu, &all(&want_dx), tolerance);
            for (y, want) in ys.iter().zip(&want_ys) {
                assert_close(&y.gpu, &all(want), tolerance);
            }
            // The sums are f32 of the same operands in every type; those of experts without rows do not change.
            assert_close(&grad_a.gpu, &grad_a.cpu, 1e-5);
            assert_close(&grad_b.gpu, &grad_b.cpu, 1e-5);
        }
    }
    let a = gpu.random((8, 16), DType::F32, 1).gpu;
    let odd = JoinedPair {
        matrices: (&a, &a),
        experts: 3,
        scale: 1.0,
    };
    assert!(expert_pairs::new(&[odd], DType::BF16).is_err());
}

#[test]
fn biases_of_experts_are_those_of_their_rows() {
    let Some(gpu) = gpu() else { return };
    let counts = [3, 0, 130, 2];
    let rows: usize = counts.iter().sum();
    for (dtype, tolerance) in KINDS {
        let biases: Vec<Pair> = (0..4).map(|seed| gpu.random(70, dtype, seed)).collect();
        let groups: Vec<(&Tensor, usize)> = biases.iter().map(|b| &b.gpu).zip(counts).collect();
        let of_rows: Vec<Tensor> = biases
            .iter()
            .zip(counts)
            .map(|(b, n)| b.cpu.broadcast_as((n, 70)).unwrap())
            .collect();
        let of_rows = Tensor::cat(&of_rows, 0).unwrap();
        let (factors, x) = (gpu.random(rows, DType::F32, 7), gpu.random((rows, 70), dtype, 8));
        let plain = grouped::bias_rows(&groups, None).unwrap();
        assert_close(&plain, &of_rows, 0.0);
        let scaled = grouped::bias_rows(&groups, Some(&factors.gpu)).unwrap();
        let column = factors.cpu.reshape((rows, 1)).unwrap();
        assert_close(&scaled, &of_rows.broadcast_mul(&column).unwrap(), tolerance);
        let to = gpu.random(rows, DType::F32, 9);
        grouped::bias_products_add(&x.gpu, &groups, &to.gpu).unwrap();
        let products = (&x.cpu * &of_rows).unwrap().sum(1).unwrap();
        assert_close(&to.gpu, &(&to.cpu + products).unwrap(), 1e-4);
    }
}

#[test]
fn clamped_units_match_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let unit = ClampedGlu {
        alpha: 1.702,
        limit: 0.8,
    };
    for (dtype, tolerance) in KINDS {
        let [gate, up, dy] = [1, 2, 3].map(|seed| gpu.random((33, 70), dtype, seed));
        let got = clamped_glu::forward(&gate.gpu, &up.gpu, unit).unwrap();
        assert_close(
            &got,
            &clamped_glu::forward(&gate.cpu, &up.cpu, unit).unwrap(),
            tolerance,
        );
        let want = clamped_glu::backward_in_place(gate.cpu, up.cpu, &dy.cpu, unit).unwrap();
        let got = clamped_glu::backward_in_place(gate.gpu, up.gpu, &dy.gpu, unit).unwrap();
        assert_close(&got.0, &want.0, tolerance);
        assert_close(&got.1, &want.1, tolerance);
    }
}

#[test]
fn heads_of_latent_attention_match_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for (dtype, tolerance) in KINDS {
        for (n, heads, plain, rotary, value, pairing) in [
            (5, 3, 8, 4, 6, RopePairing::Neighbors),
            (33, 2, 4, 6, 16, RopePairing::Halves),
            (2, 16, 128, 64, 128, RopePairing::Neighbors),
        ] {
            let h = LatentHeads {
                heads,
                plain,
                rotary,
                value,
                pairing,
            };
            let (cos, sin) = (
                gpu.random((n, rotary / 2), DType::F32, 1),
                gpu.random((n, rotary / 2), DType::F32, 2),
            );
            let (here, there) = ((&cos.cpu, &sin.cpu), (&cos.gpu, &sin.gpu));
            let x = gpu.random((n, heads * (plain + rotary)), dtype, 3);
            let kv = gpu.random((n, heads * (plain + value)), dtype, 4);
            let low = gpu.random((n, 9 + rotary), dtype, 5);
            let [a, b] = [6, 7].map(|seed| gpu.random((n, heads * h.width()), dtype, seed));
            assert_close(
                &h.queries(&x.gpu, there).unwrap(),
                &h.queries(&x.cpu, here).unwrap(),
                tolerance,
            );
            let got = h.queries_backward(&a.gpu, there).unwrap();
            assert_close(&got, &h.queries_backward(&a.cpu, here).unwrap(), tolerance);
            let (k, v) = h.keys_values(&kv.gpu, &low.gpu, there).unwrap();
            let want = h.keys_values(&kv.cpu, &low.cpu, here).unwrap();
            assert_close(&k, &want.0, tolerance);
            assert_close(&v, &want.1, 0.0);
            let (d_kv, d_rotary) = h.keys_values_backward(&a.gpu, &b.gpu, there).unwrap();
            let want = h.keys_values_backward(&a.cpu, &b.cpu, here).unwrap();
            assert_close(&d_kv, &want.0, 0.0);
            assert_close(&d_rotary, &want.1, tolerance);
            let cut = h.cut(&a.gpu).unwrap();
            assert_close(&cut, &h.cut(&a.cpu).unwrap(), 0.0);
            assert_close(&h.fill(&cut).unwrap(), &h.fill(&h.cut(&a.cpu).unwrap()).unwrap(), 0.0);
        }
    }
}

#[test]
fn streams_match_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for (dtype, tolerance) in KINDS {
        for (n, streams, d, active) in [(3, 4, 7, 0), (9, 2, 300, 1), (2, 8, 33, 3)] {
            let wide = |seed| gpu.random((n, streams * d), dtype, seed);
            let of = |width, seed| gpu.random((n, width), dtype, seed);
            let (h, dy) = (wide(1), wide(2));
            let (c, f) = (of(streams * streams, 3), of(streams, 4));
            let (p, y, like, d_like) = (of(d, 5), of(d, 6), of(d, 7), of(d, 8));
            let run = |gpu: bool| -> Vec<Tensor> {
                let t = |pair: &Pair| if gpu { pair.gpu.clone() } else { pair.cpu.clone() };
                let (h, c, f, p, y, like) = (t(&h), t(&c), t(&f), t(&p), t(&y), t(&like));
                let copy = |pair: &Pair| t(pair).copy().unwrap();
                let (first, second, d_like) = (copy(&dy), copy(&dy), copy(&d_like));
                let all = altup::predict(&h, &c, streams).unwrap();
                let mut out = vec![altup::predict_one(&h, &c, streams, active).unwrap()];
                out.push(altup::predict_backward(&h, &c, &first, streams).unwrap());
                altup::correct_assign(&all, &y, &f, active).unwrap();
                out.push(altup::corrected(&p, &y, &f, active).unwrap());
                let (dx, df) = altup::correct_backward(&second, &p, &y, &f, active).unwrap();
                out.push(altup::sum(&h, streams, 1..streams, 0.5).unwrap());
                altup::add_to(&all, &p, active..active + 1).unwrap();
                out.push(altup::matched(&p, &like).unwrap());
                out.push(altup::matched_backward(&p, &like, &y, &d_like).unwrap());
                out.push(sparse_gate::forward(&p, 0.3).unwrap());
                let d = y.copy().unwrap();
                sparse_gate::backward_assign(&p, &d, 0.3).unwrap();
                out.extend([all, first, second, dx, df, d_like, d]);
                out
            };
            let (got, want) = (run(true), run(false));
            for (got, want) in got.iter().zip(&want) {
                assert_close(got, want, tolerance);
            }
            for (got, again) in got.iter().zip(&run(true)) {
                assert_same_bits(got, again);
            }
        }
    }
}
