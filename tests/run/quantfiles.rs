//! Models in the files of other tools: LoRA keeps their codes, everything else trains and exports the dequantized values.

use crate::bench::{Bench, number, said};
use ft::formats::StoredDtype;
use ft::formats::config::Config;
use ft::formats::weights::Weights;
use ft::formats::writer::{TensorPlan, Values, write_file};
use ft::model::families;
use ft::recipe::Dtype;
use ft::source::{ParamInfo, policy, stored};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// The tensors of a quantized weight: suffix, type, shape, bytes.
pub type Parts = Vec<(&'static str, StoredDtype, Vec<usize>, Vec<u8>)>;

pub fn bytes_of<T, const N: usize>(values: impl IntoIterator<Item = T>, f: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.into_iter().flat_map(f).collect()
}

/// Codes of 4 bits around 8, and the step of each group, `[O, groups]`.
fn steps(values: &[f32], columns: usize, group: usize) -> (Vec<u8>, Vec<f32>) {
    let groups = values.chunks(columns).flat_map(|row| row.chunks(group));
    let steps: Vec<f32> = groups
        .map(|g| g.iter().fold(1e-6f32, |m, x| m.max(x.abs())) / 7.0)
        .collect();
    let rows = values.chunks(columns).enumerate();
    let width = columns.div_ceil(group);
    let code = |row: usize, c: usize, x: f32| (x / steps[row * width + c / group]).round().clamp(-8.0, 7.0) as i32 + 8;
    let codes = rows.flat_map(|(row, xs)| xs.iter().enumerate().map(move |(c, x)| (row, c, *x)));
    let codes = codes.map(|(row, c, x)| code(row, c, x) as u8).collect();
    (codes, steps)
}

/// Words of eight codes of 4 bits, `at(word, i)` being code number i of a word.
fn words(count: usize, at: impl Fn(usize, usize) -> u8) -> Vec<u8> {
    bytes_of(0..count, |w| {
        (0..8)
            .fold(0u32, |word, i| word | u32::from(at(w, i)) << (4 * i))
            .to_le_bytes()
    })
}

pub fn f16s(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    bytes_of(values, |x| half::f16::from_f32(x).to_le_bytes())
}

fn gptq(values: &[f32], (o, i): (usize, usize)) -> Parts {
    let (codes, steps) = steps(values, i, 32);
    let g = i / 32;
    vec![
        (
            "qweight",
            StoredDtype::I32,
            vec![i / 8, o],
            words(i / 8 * o, |w, k| codes[w % o * i + w / o * 8 + k]),
        ),
        ("qzeros", StoredDtype::I32, vec![g, o / 8], words(g * o / 8, |_, _| 7)),
        (
            "scales",
            StoredDtype::F16,
            vec![g, o],
            f16s((0..g * o).map(|at| steps[at % o * g + at / o])),
        ),
        (
            "g_idx",
            StoredDtype::I32,
            vec![i],
            bytes_of(0..i, |c| (c as i32 / 32).to_le_bytes()),
        ),
    ]
}

pub fn awq(values: &[f32], (o, i): (usize, usize)) -> Parts {
    const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
    let (codes, steps) = steps(values, i, 32);
    let g = i / 32;
    vec![
        (
            "qweight",
            StoredDtype::I32,
            vec![i, o / 8],
            words(i * o / 8, |w, k| codes[(w % (o / 8) * 8 + ORDER[k]) * i + w / (o / 8)]),
        ),
        ("qzeros", StoredDtype::I32, vec![g, o / 8], words(g * o / 8, |_, _| 8)),
        (
            "scales",
            StoredDtype::F16,
            vec![g, o],
            f16s((0..g * o).map(|at| steps[at % o * g + at / o])),
        ),
    ]
}

fn packed(values: &[f32], (o, i): (usize, usize)) -> Parts {
    let (codes, steps) = steps(values, i, 32);
    let bf16s = bytes_of(steps, |x| half::bf16::from_f32(x).to_le_bytes());
    vec![
        (
            "weight_packed",
            StoredDtype::I32,
            vec![o, i / 8],
            words(o * i / 8, |w, k| codes[8 * w + k]),
        ),
        ("weight_scale", StoredDtype::Bf16, vec![o, i / 32], bf16s),
        (
            "weight_shape",
            StoredDtype::I64,
            vec![2],
            bytes_of([o as i64, i as i64], i64::to_le_bytes),
        ),
    ]
}

fn int8(values: &[f32], (o, i): (usize, usize)) -> Parts {
    let most: Vec<f32> = values
        .chunks(i)
        .map(|r| r.iter().fold(1e-6f32, |m, x| m.max(x.abs())))
        .collect();
    let codes = values
        .iter()
        .enumerate()
        .map(|(at, x)| (127.0 * x / most[at / i]).round() as i8 as u8)
        .collect();
    vec![
        ("weight", StoredDtype::I8, vec![o, i], codes),
        ("SCB", StoredDtype::F32, vec![o], bytes_of(most, f32::to_le_bytes)),
    ]
}

fn fp8(values: &[f32], (o, i): (usize, usize)) -> Parts {
    // A sign, 4 bits of exponent, 3 of mantissa: the f32 with fewer bits.
    let code = |x: f32| {
        let bits = (x.abs() / 0.002).clamp(0.02, 440.0).to_bits();
        ((bits >> 20) - (120 << 3)) as u8 | if x < 0.0 { 0x80 } else { 0 }
    };
    let grid = [o.div_ceil(32), i.div_ceil(32)];
    let scales = bytes_of(0..grid[0] * grid[1], |n| (0.002 + 1e-5 * n as f32).to_le_bytes());
    vec![
        (
            "weight",
            StoredDtype::F8E4M3,
            vec![o, i],
            values.iter().map(|x| code(*x)).collect(),
        ),
        ("weight_scale_inv", StoredDtype::F32, grid.to_vec(), scales),
    ]
}

pub type Writer = fn(&[f32], (usize, usize)) -> Parts;

pub fn models() -> Vec<(&'static str, Value, Writer)> {
    vec![
        (
            "gptq",
            json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": false, "sym": true}),
            gptq as Writer,
        ),
        (
            "awq",
            json!({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": true, "version": "gemm"}),
            awq as Writer,
        ),
        (
            "packed",
            json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0":
            {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}}}),
            packed as Writer,
        ),
        (
            "int8",
            json!({"quant_method": "bitsandbytes", "load_in_8bit": true}),
            int8 as Writer,
        ),
        (
            "fp8",
            json!({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}),
            fp8 as Writer,
        ),
    ]
}

/// A bench whose model is the tiny one of `assets`: its sizes are whole groups.
pub fn bench() -> Bench {
    let bench = Bench::new();
    fs::remove_dir_all(bench.path("model")).unwrap();
    crate::bench::copy_all(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny"),
        &bench.path("model"),
    );
    bench
}

fn params(model: &Path) -> Vec<ParamInfo> {
    families::read(&Config::read(model).unwrap()).unwrap().params()
}

/// Writes `name` with the projections of `model` quantized, and `name-decoded` with their dequantized values.
pub fn quantize(bench: &Bench, name: &str, quantization: &Value, writer: Writer) {
    let (from, to) = (bench.path("model"), bench.path(name));
    crate::bench::copy_all(&from, &to);
    let dequantized = bench.path(&format!("{name}-decoded"));
    crate::bench::copy_all(&from, &dequantized);
    let weights = Weights::open(&from).unwrap();
    let params = params(&from);
    let mut tensors = Vec::new();
    for p in &params {
        let base = p.name.trim_end_matches(".weight");
        let parts = if policy::is_projection(p) {
            writer(&weights.read_f32(&p.name).unwrap(), (p.shape[0], p.shape[1]))
        } else {
            let info = weights.info(&p.name).unwrap();
            vec![(
                "weight",
                info.dtype,
                info.shape.clone(),
                weights.read_bytes(&p.name).unwrap(),
            )]
        };
        let named = |suffix: &str| {
            if policy::is_projection(p) {
                format!("{base}.{suffix}")
            } else {
                p.name.to_string()
            }
        };
        tensors.extend(parts.into_iter().map(|(suffix, dtype, shape, bytes)| {
            let name = named(suffix);
            (TensorPlan { name, dtype, shape }, bytes)
        }));
    }
    let plans: Vec<TensorPlan> = tensors.iter().map(|(plan, _)| plan.clone()).collect();
    fs::remove_file(to.join("model.safetensors")).unwrap();
    write_file(&to.join("model.safetensors"), &plans, &[], |plan, sink| {
        let (_, bytes) = tensors.iter().find(|(p, _)| p.name == plan.name).unwrap();
        sink(Values::Raw(bytes))
    })
    .unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    config["quantization_config"] = quantization.clone();
    fs::write(to.join("config.json"), config.to_string()).unwrap();
    fs::remove_file(dequantized.join("model.safetensors")).unwrap();
    let weights = Weights::open(&to).unwrap();
    stored::write_dequantized(&weights, &params, Dtype::F32, &dequantized.join("model.safetensors")).unwrap();
}

/// Writes the model in directory `from` to `to` with its dequantized values in f32.
fn decode(bench: &Bench, from: &str, to: &str) {
    let (from, to) = (bench.path(from), bench.path(to));
    crate::bench::copy_all(&bench.path("model"), &to);
    let file = to.join("model.safetensors");
    fs::remove_file(&file).unwrap();
    stored::write_dequantized(&Weights::open(&from).unwrap(), &params(&from), Dtype::F32, &file).unwrap();
}

fn losses(bench: &Bench, name: &str, more: &[&str]) -> Vec<f64> {
    let out = format!("train.output_dir={name}");
    bench.train(
        &[
            &[&out, "train.max_steps=2", "train.gradient_accumulation_steps=1"],
            more,
        ]
        .concat(),
    );
    bench.steps(name).iter().map(|line| number(line, "loss")).collect()
}

#[test]
fn adapters_train_on_the_files_of_other_tools() {
    for (name, quantization, writer) in models() {
        let bench = bench();
        quantize(&bench, name, &quantization, writer);
        let (coded, dequantized) = (format!("model.path={name}"), format!("model.path={name}-decoded"));
        let lora =
            |run: &str, more: &[&str]| losses(&bench, run, &[&["tune.method=lora", "tune.lora.r=4"], more].concat());
        let want = lora("want", &[&dequantized]);
        assert_eq!(want.len(), 2);
        for tier in ["device", "disk"] {
            let tier_key = format!("memory.tier={tier}");
            let got = lora(tier, &[&coded, &tier_key]);
            for (a, b) in got.iter().zip(&want) {
                assert!((a - b).abs() < 1e-5, "{name} {tier}: {got:?} {want:?}");
            }
        }
        // In bf16 both have the same rounded weights.
        let (got, want) = (
            lora("bf16", &[&coded, "model.dtype=bf16"]),
            lora("want-bf16", &[&dequantized, "model.dtype=bf16"]),
        );
        for (a, b) in got.iter().zip(&want) {
            assert!((a - b).abs() < 1e-5, "{name} bf16: {got:?} {want:?}");
        }
        // Merged into the dequantized values; the directory is not quantized.
        let merged = bench.ft(&["merge", "--model", name, "--adapter", "device/final", "--out", "merged"]);
        assert!(merged.status.success(), "{name}: {}", said(&merged));
        let config: Value = serde_json::from_slice(&fs::read(bench.path("merged/config.json")).unwrap()).unwrap();
        assert!(config.get("quantization_config").is_none(), "{name}");
        let all = Weights::open(&bench.path("merged")).unwrap();
        assert!(
            all.names().all(|n| all.info(n).unwrap().dtype == StoredDtype::Bf16),
            "{name}"
        );
    }
}

#[test]
fn everything_else_trains_the_dequantized_values() {
    let bench = bench();
    let (name, quantization, writer) = models().swap_remove(0);
    quantize(&bench, name, &quantization, writer);
    for method in ["full", "block"] {
        let method = format!("tune.method={method}");
        for tier in ["memory.tier=device", "memory.tier=disk"] {
            let more =
                |model: &'static str| [model, "memory.frozen_weights=f32", method.as_str(), tier].map(String::from);
            let run = |run: &str, more: [String; 4]| losses(&bench, run, &more.each_ref().map(String::as_str));
            let (coded, dequantized) = (format!("{method}-{tier}"), format!("{method}-{tier}-want"));
            let (got, want) = (
                run(&coded, more("model.path=gptq")),
                run(&dequantized, more("model.path=gptq-decoded")),
            );
            assert_eq!(got, want, "{method} {tier}");
            let config = fs::read_to_string(bench.path(&coded).join("final/config.json")).unwrap();
            assert!(!config.contains("quantization_config"), "{config}");
            assert!(!bench.path(&coded).join("decoded").exists());
        }
    }
    let plan = bench.ft(&["plan", "--recipe", "r.toml", "model.path=gptq", "tune.method=full"]);
    assert!(
        plan.status.success() && said(&plan).contains("dequantized values"),
        "{}",
        said(&plan)
    );
}

/// The files of `ft quantize`, in both layouts, train and merge like the model with their dequantized values.
#[test]
fn files_of_ft_quantize_train_and_merge_as_dequantized() {
    let bench = bench();
    for format in ["nf4", "int4"] {
        let made = bench.ft(&["quantize", "--model", "model", "--to", format, "--out", format]);
        assert!(made.status.success(), "{}", said(&made));
        let dequantized = format!("{format}-decoded");
        decode(&bench, format, &dequantized);
        let models = [format!("model.path={format}"), format!("model.path={dequantized}")];
        for method in ["full", "freeze", "block"] {
            let tune = format!("tune.method={method}");
            let run = |model: &String, run: &str, tier: &str| {
                let more = [model, "model.dtype=f32", "memory.frozen_weights=f32", &tune, tier].map(String::from);
                losses(&bench, run, &more.each_ref().map(String::as_str))
            };
            let name = |what: &str| format!("{format}-{method}-{what}");
            let want = run(&models[1], &name("want"), "memory.tier=device");
            for tier in ["device", "disk"] {
                let got = run(&models[0], &name(tier), &format!("memory.tier={tier}"));
                assert_eq!(got, want, "{format} {method} {tier}");
                assert_same_weights(&bench, &name(tier), &name("want"));
            }
        }
        let lora = ["tune.method=lora", "tune.lora.r=4", "model.dtype=f32"];
        let got = losses(&bench, &format!("{format}-lora"), &[&lora[..], &[&models[0]]].concat());
        let want = losses(
            &bench,
            &format!("{format}-lora-want"),
            &[&lora[..], &[&models[1]]].concat(),
        );
        assert_eq!(got, want, "{format}");
        let adapter = format!("{format}-lora/final");
        let out = format!("{format}-merged");
        let merged = bench.ft(&[
            "merge",
            "--model",
            format,
            "--adapter",
            &adapter,
            "--out",
            &out,
            "--dtype",
            "f32",
        ]);
        assert!(merged.status.success(), "{}", said(&merged));
        assert!(said(&merged).contains("dequantized values"), "{}", said(&merged));
        let adapter = format!("{format}-lora-want/final");
        let other = format!("{out}-want");
        let want = [
            "merge",
            "--model",
            &dequantized,
            "--adapter",
            &adapter,
            "--out",
            &other,
            "--dtype",
            "f32",
        ];
        assert!(bench.ft(&want).status.success());
        let open = |dir: &str| Weights::open(&bench.path(dir)).unwrap();
        let (got, want) = (open(&out), open(&other));
        for name in want.names() {
            assert_eq!(got.read_f32(name).unwrap(), want.read_f32(name).unwrap(), "{name}");
        }
    }
}

/// The tensors of both runs in `final/` are equal.
fn assert_same_weights(bench: &Bench, run: &str, other: &str) {
    let open = |run: &str| Weights::open(&bench.path(run).join("final")).unwrap();
    let (got, want) = (open(run), open(other));
    assert!(got.names().eq(want.names()), "{run}");
    for name in want.names() {
        assert_eq!(
            got.read_f32(name).unwrap(),
            want.read_f32(name).unwrap(),
            "{run} {name}"
        );
    }
}

/// LoRA-GA: the gradient of a quantized weight is that of its values, in files and in memory.
#[test]
fn gradients_of_quantized_weights_start_adapters() {
    let bench = bench();
    let own = [
        "tune.method=lora",
        "tune.lora.init_lora_weights=lora_ga",
        "tune.lora.r=4",
        "model.dtype=f32",
    ];
    let run = |name: &str, more: &[&str]| {
        let losses = losses(&bench, name, &[&own[..], more].concat());
        let adapter = Weights::open_file(&bench.path(name).join("final/adapter_model.safetensors")).unwrap();
        let tensors: Vec<Vec<f32>> = adapter.names().map(|n| adapter.read_f32(n).unwrap()).collect();
        (losses, tensors)
    };
    for (format, memory) in [
        ("nf4", "memory.frozen_weights=nf4"),
        ("int4", "memory.frozen_weights=int4"),
    ] {
        let made = bench.ft(&["quantize", "--model", "model", "--to", format, "--out", format]);
        assert!(made.status.success(), "{}", said(&made));
        decode(&bench, format, &format!("{format}-decoded"));
        let want = run(&format!("{format}-want"), &[&format!("model.path={format}-decoded")]);
        assert!(want.0[1] < want.0[0] && want.1.iter().all(|t| t.iter().any(|x| *x != 0.0)));
        for (name, more) in [
            ("files", [&*format!("model.path={format}"), "memory.tier=device"]),
            ("disk", [&*format!("model.path={format}"), "memory.tier=disk"]),
            ("memory", [memory, "memory.tier=device"]),
            ("pieces", [memory, "memory.mlp_chunk=16"]),
        ] {
            let got = run(&format!("{format}-{name}"), &more);
            if name == "pieces" {
                assert!(
                    (got.0[1] - want.0[1]).abs() < 1e-4,
                    "{format} {name}: {:?} {:?}",
                    got.0,
                    want.0
                );
            } else {
                assert!(got == want, "{format} {name}: {:?} {:?}", got.0, want.0);
            }
        }
    }
}

/// Frozen weights in bf16 below an f32 model: equal bits to f32 weights with the same values.
#[test]
fn frozen_bf16_weights_of_an_f32_model_are_exact() {
    // The files of this model are bf16.
    let bench = bench();
    for method in [
        &["tune.method=lora", "tune.lora.r=4"][..],
        &["tune.method=lora", "tune.lora.r=4", "tune.lora.use_dora=true"],
        &["tune.method=lora", "tune.lora.r=4", "tune.lora.init_lora_weights=pissa"],
        &["tune.method=freeze"],
    ] {
        let name = method.concat().replace(['=', '.'], "-");
        let run = |frozen: &str, tier: &str| {
            let name = format!("{name}-{frozen}-{tier}");
            let (frozen, tier) = (format!("memory.frozen_weights={frozen}"), format!("memory.tier={tier}"));
            let losses = losses(&bench, &name, &[method, &["model.dtype=f32", &frozen, &tier]].concat());
            let is_tensors = |file: &std::path::PathBuf| file.extension().is_some_and(|e| e == "safetensors");
            let files = fs::read_dir(bench.path(&name).join("final"))
                .unwrap()
                .map(|f| f.unwrap().path());
            let tensors: Vec<Vec<u8>> = files.filter(is_tensors).map(|f| fs::read(f).unwrap()).collect();
            assert_eq!(tensors.len(), 1);
            (losses, tensors)
        };
        let want = run("f32", "device");
        assert!(run("bf16", "device") == want, "{name}");
        assert!(run("bf16", "disk") == want, "{name}");
    }
    // A block that was trained is rounded while it is inactive, and its values stay exact.
    let more = [
        "tune.method=block",
        "tune.block.switch_every=1",
        "tune.block.order=ascending",
        "model.dtype=f32",
    ];
    let run = |frozen: &str| {
        losses(
            &bench,
            frozen,
            &[&more[..], &[&format!("memory.frozen_weights={frozen}")]].concat(),
        )
    };
    let (got, want) = (run("bf16"), run("f32"));
    assert_eq!(got[0], want[0]);
    assert!((got[1] - want[1]).abs() < 0.02, "{got:?} {want:?}");
    let plan = |frozen: &str| {
        let frozen = format!("memory.frozen_weights={frozen}");
        let plan = bench.ft(&[
            "plan",
            "--recipe",
            "r.toml",
            "--json",
            "tune.method=lora",
            "model.dtype=f32",
            &frozen,
        ]);
        let text = String::from_utf8(plan.stdout).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()["weights"]
            .as_u64()
            .unwrap()
    };
    let projections: usize = params(&bench.path("model"))
        .iter()
        .filter(|p| policy::is_projection(p))
        .map(|p| p.elements())
        .sum();
    assert_eq!(plan("f32") - plan("bf16"), 2 * projections as u64);
}

/// LoftQ starts from a quantization error, so it needs a storage that has one.
#[test]
fn loftq_without_quantized_weights_is_refused_before_the_run() {
    let bench = bench();
    for more in [&["memory.frozen_weights=auto"][..], &["memory.frozen_weights=bf16"]] {
        let base = [
            "tune.method=lora",
            "tune.lora.init_lora_weights=loftq",
            "train.output_dir=out",
        ];
        for command in ["plan", "train"] {
            let refused = bench.ft(&[&[command, "--recipe", "r.toml"], &base[..], more].concat());
            let said = said(&refused);
            assert!(
                !refused.status.success() && said.contains("needs quantized weights"),
                "{said}"
            );
        }
        assert!(!bench.path("out").exists());
    }
}

/// A file that ends too early, and one without scales: an error, and no run directory with results.
#[test]
fn damaged_files_of_other_tools_are_refused() {
    let bench = bench();
    let (name, quantization, writer) = models().swap_remove(0);
    quantize(&bench, name, &quantization, writer);
    let file = bench.path("gptq/model.safetensors");
    let whole = fs::read(&file).unwrap();
    let train = [
        "train",
        "--recipe",
        "r.toml",
        "model.path=gptq",
        "tune.method=lora",
        "train.output_dir=out",
    ];
    fs::write(&file, &whole[..whole.len() - 100]).unwrap();
    let cut = bench.ft(&train);
    assert!(
        !cut.status.success() && said(&cut).starts_with("error:"),
        "{}",
        said(&cut)
    );
    let at = whole.windows(13).position(|w| w == b"q_proj.scales").unwrap();
    let mut renamed = whole.clone();
    renamed[at..at + 13].copy_from_slice(b"q_proj.scaleX");
    fs::write(&file, renamed).unwrap();
    let missing = bench.ft(&train);
    let said = said(&missing);
    assert!(
        !missing.status.success() && said.contains("q_proj.scales") && said.contains("missing"),
        "{said}"
    );
    assert!(!bench.path("out/final").exists());
}
