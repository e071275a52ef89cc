//! LoRA on rarer layouts of quantized files (GPTQ of 2 and 3 bits, AWQ without zero points, large blocks of bitsandbytes): losses and
//! adapters of three steps are those of the dequantized weights, from memory and from the disk.

use crate::bench::{Bench, number, said};
use crate::quantfiles::{self, Parts, Writer, bench, bytes_of, f16s, quantize};
use ft::formats::{StoredDtype, Weights};
use serde_json::{Value, json};
use std::fs;

/// Pseudo-random numbers below 1, from a seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) as f64 / (1u64 << 31) as f64
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() * n as f64) as usize
    }
}

/// Codes as one stream of bits, the low ones first, in words of 32 bits.
fn stream(codes: &[u32], bits: usize) -> Vec<u32> {
    let mut words = vec![0u32; codes.len() * bits / 32];
    for (i, code) in codes.iter().enumerate() {
        for bit in 0..bits {
            let at = i * bits + bit;
            words[at / 32] |= (code >> bit & 1) << (at % 32);
        }
    }
    words
}

/// Version 1 of the files of GPTQ with a zero point for each group; `order`: columns belong to groups in no order.
fn gptq(values: &[f32], (o, i): (usize, usize), bits: usize, order: bool) -> Parts {
    let most = ((1 << bits) - 1) as f32;
    let groups = i / 32;
    let mut random = Random(values.len() as u64);
    let mut group: Vec<usize> = (0..i).map(|c| c / 32).collect();
    if order {
        for c in (1..i).rev() {
            group.swap(c, random.below(c + 1));
        }
    }
    let (mut scales, mut zeros) = (vec![0f32; groups * o], vec![0u32; groups * o]);
    let mut codes = vec![0u32; i * o];
    for row in 0..o {
        for g in 0..groups {
            let own: Vec<usize> = (0..i).filter(|c| group[*c] == g).collect();
            let of = |c: usize| values[row * i + c];
            let low = own.iter().fold(0f32, |m, c| m.min(of(*c)));
            let high = own.iter().fold(1e-6f32, |m, c| m.max(of(*c)));
            let scale = half::f16::from_f32((high - low) / most).to_f32();
            // 1 at least: the file has 1 less.
            let zero = (-low / scale).round().clamp(1.0, most);
            (scales[g * o + row], zeros[g * o + row]) = (scale, zero as u32 - 1);
            for c in own {
                codes[row * i + c] = (of(c) / scale + zero).round().clamp(0.0, most) as u32;
            }
        }
    }
    let columns: Vec<Vec<u32>> = codes.chunks(i).map(|row| stream(row, bits)).collect();
    let height = i * bits / 32;
    let qweight = (0..height * o).map(|at| columns[at % o][at / o]);
    let qzeros = zeros.chunks(o).flat_map(|row| stream(row, bits));
    vec![
        (
            "qweight",
            StoredDtype::I32,
            vec![height, o],
            bytes_of(qweight, u32::to_le_bytes),
        ),
        (
            "qzeros",
            StoredDtype::I32,
            vec![groups, o * bits / 32],
            bytes_of(qzeros, u32::to_le_bytes),
        ),
        ("scales", StoredDtype::F16, vec![groups, o], f16s(scales)),
        (
            "g_idx",
            StoredDtype::I32,
            vec![i],
            bytes_of(group, |g| (g as i32).to_le_bytes()),
        ),
    ]
}

/// 4 bits of bitsandbytes in blocks of `block`, by the nearest of the 16 levels.
fn blocks(values: &[f32], (o, i): (usize, usize), kind: &str, block: usize) -> Parts {
    let fp4 = [0.0, 0.0052083333, 0.666_666_7, 1.0, 0.33333333, 0.5, 0.16666667, 0.25];
    let nf4 = [
        -1.0,
        -0.6961928,
        -0.52507305,
        -0.3949175,
        -0.28444138,
        -0.18477343,
        -0.091050036,
        0.0,
        0.0795803,
        0.1609302,
        0.2461123,
        0.33791524,
        0.44070983,
        0.562617,
        0.72295684,
        1.0,
    ];
    let levels: Vec<f32> = match kind {
        "fp4" => fp4.iter().copied().chain(fp4.iter().map(|x| -x)).collect(),
        _ => nf4.to_vec(),
    };
    let absmax: Vec<f32> = (values.chunks(block))
        .map(|b| b.iter().fold(1e-6f32, |m, x| m.max(x.abs())))
        .collect();
    let state = json!({"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": [o, i]});
    let mut parts = vec![(
        "weight.quant_map",
        StoredDtype::F32,
        vec![16],
        bytes_of(levels.clone(), f32::to_le_bytes),
    )];
    let bytes = bytes_of(absmax.clone(), f32::to_le_bytes);
    parts.push(("weight.absmax", StoredDtype::F32, vec![absmax.len()], bytes));
    let nearest = |x: f32| {
        let off = |n: &usize| (levels[*n] - x).abs();
        (0..16).min_by(|a, b| off(a).total_cmp(&off(b))).unwrap() as u8
    };
    let codes: Vec<u8> = (values.iter().enumerate())
        .map(|(at, x)| nearest(x / absmax[at / block]))
        .collect();
    let packed: Vec<u8> = codes
        .chunks(2)
        .map(|pair| pair[0] << 4 | pair.get(1).copied().unwrap_or(0))
        .collect();
    let state = state.to_string().into_bytes();
    let name = if kind == "fp4" {
        "weight.quant_state.bitsandbytes__fp4"
    } else {
        "weight.quant_state.bitsandbytes__nf4"
    };
    parts.extend([
        ("weight", StoredDtype::U8, vec![packed.len(), 1], packed),
        (name, StoredDtype::U8, vec![state.len()], state),
    ]);
    parts
}

fn models() -> Vec<(&'static str, Value, Writer)> {
    let gptq_config = |bits: u32, order: bool| json!({"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": order, "sym": false, "checkpoint_format": "gptq"});
    let four_bit = |kind: &str| json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": false});
    vec![
        (
            "gptq-2",
            gptq_config(2, false),
            (|v: &[f32], s: (usize, usize)| gptq(v, s, 2, false)) as Writer,
        ),
        (
            "gptq-3",
            gptq_config(3, true),
            (|v: &[f32], s: (usize, usize)| gptq(v, s, 3, true)) as Writer,
        ),
        (
            "awq",
            json!({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": false, "version": "gemm"}),
            crate::quantfiles::awq as Writer,
        ),
        ("nf4-128", four_bit("nf4"), |v, s| blocks(v, s, "nf4", 128)),
        ("nf4-1024", four_bit("nf4"), |v, s| blocks(v, s, "nf4", 1024)),
        ("fp4-4096", four_bit("fp4"), |v, s| blocks(v, s, "fp4", 4096)),
    ]
}

/// Losses, and the tensors of the adapter by name.
fn lora(bench: &Bench, run: &str, more: &[&str]) -> (Vec<f64>, Vec<(String, Vec<f32>)>) {
    let out = format!("train.output_dir={run}");
    let own = [
        &out,
        "tune.method=lora",
        "tune.lora.r=4",
        "train.max_steps=3",
        "train.gradient_accumulation_steps=1",
        "optimizer.learning_rate=1e-2",
        "model.dtype=f32",
    ];
    bench.train(&[&own, more].concat());
    let losses = bench.steps(run).iter().map(|line| number(line, "loss")).collect();
    let adapter = Weights::open_file(&bench.path(run).join("final/adapter_model.safetensors")).unwrap();
    let tensors = adapter.names().map(|n| (n.to_string(), adapter.read_f32(n).unwrap()));
    (losses, tensors.collect())
}

#[test]
fn adapters_on_rarer_layouts_are_those_of_the_dequantized_weights() {
    for (name, quantization, writer) in models() {
        let bench = bench();
        quantize(&bench, name, &quantization, writer);
        let (coded, dequantized) = (format!("model.path={name}"), format!("model.path={name}-decoded"));
        let plain = lora(&bench, "plain", &[]);
        let want = lora(&bench, "want", &[&dequantized]);
        assert_eq!(want.0.len(), 3);
        // The dequantized weights are not those of the model, and the adapters train.
        assert!(
            (want.0[0] - plain.0[0]).abs() > 1e-3,
            "{name}: {:?} {:?}",
            want.0,
            plain.0
        );
        assert!(want.1.iter().all(|(_, t)| t.iter().any(|x| *x != 0.0)), "{name}");
        for tier in ["device", "disk"] {
            let got = lora(&bench, tier, &[&coded, &format!("memory.tier={tier}")]);
            assert_eq!(got.0, want.0, "{name} {tier}");
            for ((parameter, got), (other, want)) in got.1.iter().zip(&want.1) {
                assert!(parameter == other && got == want, "{name} {tier}: {parameter} differs");
            }
        }
    }
}

/// Row F4. In the last layer, so that it would be read last.
#[test]
fn a_number_that_is_not_finite_in_a_quantized_base_is_named_before_the_first_step() {
    let bench = bench();
    for (name, suffix) in [
        ("gptq", ".scales"),
        ("int8", ".SCB"),
        ("fp8", ".weight_scale_inv"),
        // A code.
        ("fp8", "proj.weight"),
        ("nf4-128", ".absmax"),
    ] {
        let mut all = quantfiles::models().into_iter().chain(models());
        let (_, quantization, writer) = all.find(|model| model.0 == name).unwrap();
        let model = bench.path(name);
        if !model.exists() {
            quantize(&bench, name, &quantization, writer);
        }
        let file = model.join("model.safetensors");
        let whole = fs::read(&file).unwrap();
        let weights = Weights::open(&model).unwrap();
        let tensor = weights
            .names()
            .filter(|tensor| tensor.ends_with(suffix))
            .last()
            .unwrap();
        assert!(tensor.contains("layers.3."), "{tensor}");
        let info = weights.info(tensor).unwrap();
        let end = (info.offset + info.bytes) as usize;
        // All bits: NaN in each of these types.
        let mut bytes = whole.clone();
        bytes[end - info.dtype.size()..end].fill(0xff);
        fs::write(&file, bytes).unwrap();
        let path = format!("model.path={name}");
        for tier in ["memory.tier=device", "memory.tier=disk"] {
            let own = ["tune.method=lora", "train.output_dir=out"];
            let refused = bench.ft(&[&["train", "--recipe", "r.toml", path.as_str(), tier], &own[..]].concat());
            let text = said(&refused);
            assert_eq!(refused.status.code(), Some(1), "{text}");
            let expected = format!("tensor `{tensor}` has a value that is not finite");
            let place = format!("{name}/model.safetensors");
            assert!(text.contains(&expected) && text.contains(&place), "{text}");
            assert!(!bench.path("out").exists(), "{name} {tier}");
        }
        fs::write(&file, whole).unwrap();
    }
}
