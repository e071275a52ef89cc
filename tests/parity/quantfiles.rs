//! The files of other tools: values bit by bit as their references decode them (`tests/parity/make_quantfiles.py`), and as
//! the formulas of the formats do for odd variants (`make_quantodd.py`); and files that are not what they should be.

use crate::support::goldens;
use ft::base::Result;
use ft::formats::weights::Weights;
use ft::formats::writer::{TensorPlan, Values, write_file};
use ft::quant::Format;
use ft::recipe::Dtype;
use ft::source::stored::{QuantizedLayout, check_config, find, names, read, values};
use ft::source::{Group, ParamInfo, Sublayer};
use half::bf16;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn param(shape: &[usize]) -> ParamInfo {
    ParamInfo {
        name: "a.weight".into(),
        shape: shape.to_vec(),
        group: Group::Layer(0),
        sublayer: Sublayer::Mlp,
    }
}

fn cases() -> Vec<(String, PathBuf)> {
    let folders = std::fs::read_dir(goldens().join("quantfiles"))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut all: Vec<_> = folders
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), path))
        .collect();
    all.sort();
    assert!(all.len() > 50, "{}", all.len());
    all
}

/// The parts are found, and decode to the values of the reference in its own type, rounded once more in a bf16 model.
#[test]
fn files_of_other_tools_have_the_values_of_their_references() {
    for (case, dir) in cases() {
        let weights = Weights::open(&dir).unwrap();
        let quantization = Value::Object(weights.quantization().unwrap().clone());
        check_config(&quantization, "config.json").unwrap();
        let shape = weights.info("decoded").unwrap().shape.clone();
        let p = param(&shape);
        let (layout, format) = stored_of(&weights, &case);
        for name in names(&weights, layout, format, &p.name, (shape[0], shape[1])) {
            assert!(weights.info(&name).is_some(), "{case}: {name}");
        }
        let want = weights.read_f32("decoded").unwrap();
        for dequantized_dtype in [Dtype::F32, Dtype::Bf16] {
            let matrix = read(&weights, &p, layout, format, dequantized_dtype).unwrap();
            let parts: usize = matrix.parts().iter().map(|part| part.bytes.len()).sum();
            assert_eq!(parts as u64, matrix.bytes(), "{case}");
            let got = matrix.dequantize();
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let want = match dequantized_dtype {
                    Dtype::F32 | Dtype::F16 => *want,
                    Dtype::Bf16 => bf16::from_f32(*want).to_f32(),
                };
                assert!(
                    got.to_bits() == want.to_bits() || (*got == 0.0 && want == 0.0),
                    "{case} {dequantized_dtype:?}: element {i} is {got}, not {want}"
                );
            }
            // Any part of a row has the same values.
            let columns = shape[1];
            for (start, count) in [(0, 1), (columns / 3, columns / 2), (columns - 1, 1)] {
                let mut part = vec![0.0; count];
                matrix.dequantize_into(shape[0] - 1, start, &mut part);
                assert_eq!(part, got[(shape[0] - 1) * columns + start..][..count], "{case}");
            }
        }
        assert_eq!(values(&weights, &p).unwrap().unwrap(), want, "{case}");
    }
}

fn stored_of(weights: &Weights, case: &str) -> (QuantizedLayout, Format) {
    find(weights, "a.weight")
        .unwrap_or_else(|e| panic!("{case}: {e}"))
        .unwrap_or_else(|| panic!("{case}: not found"))
}

/// A copy of a golden file with one tensor left out, or with another shape.
fn changed(dir: &Path, name: &str, change: impl Fn(&mut TensorPlan) -> bool) -> tempfile::TempDir {
    let out = tempfile::tempdir().unwrap();
    std::fs::copy(dir.join("config.json"), out.path().join("config.json")).unwrap();
    let weights = Weights::open(dir).unwrap();
    let mut plans = Vec::new();
    for info in weights.names().filter_map(|n| weights.info(n)) {
        let mut plan = TensorPlan {
            name: info.name.clone(),
            dtype: info.dtype,
            shape: info.shape.clone(),
        };
        if info.name != name || change(&mut plan) {
            plans.push(plan);
        }
    }
    write_file(&out.path().join("model.safetensors"), &plans, &[], |plan, sink| {
        let mut bytes = weights.read_bytes(&plan.name)?;
        bytes.resize(plan.dtype.size() * plan.shape.iter().product::<usize>(), 0);
        sink(Values::Raw(&bytes))
    })
    .unwrap();
    out
}

/// Each tensor in turn is missing, too long, or of another type: an error that names it or its weight, and no panic.
#[test]
fn damaged_files_are_refused_by_name() {
    for (case, dir) in cases() {
        let whole = Weights::open(&dir).unwrap();
        let shape = whole.info("decoded").unwrap().shape.clone();
        let (layout, format) = stored_of(&whole, &case);
        let p = param(&shape);
        let load = |dir: &Path| -> Result<()> {
            let weights = Weights::open(dir)?;
            let Some((layout, format)) = find(&weights, &p.name)? else {
                return weights.require(&p.name, &p.shape).map(|_| ());
            };
            read(&weights, &p, layout, format, Dtype::F32).map(|_| ())
        };
        for name in names(&whole, layout, format, &p.name, (shape[0], shape[1])) {
            let optional = [
                "g_idx",
                "input_scale",
                "weight_format",
                "zero_point",
                "quant_map",
                "nested_absmax",
            ];
            if optional.iter().any(|o| name.ends_with(o)) {
                continue;
            }
            let missing = load(changed(&dir, &name, |_| false).path()).unwrap_err().to_string();
            assert!(
                missing.contains("a.") || missing.contains("`a"),
                "{case} without {name}: {missing}"
            );
            if name.ends_with("quant_state.bitsandbytes__fp4") {
                continue;
            }
            let longer = |plan: &mut TensorPlan| {
                match plan.shape.first_mut() {
                    Some(n) => *n += 3,
                    None => plan.shape = vec![4],
                }
                true
            };
            let wrong = load(changed(&dir, &name, longer).path()).unwrap_err().to_string();
            assert!(
                wrong.contains("a.") || wrong.contains("part `"),
                "{case} with a longer {name}: {wrong}"
            );
        }
        // Another matrix than the config describes.
        let other = param(&[shape[0] + 8, shape[1]]);
        assert!(read(&whole, &other, layout, format, Dtype::F32).is_err(), "{case}");
    }
}

#[test]
fn scales_and_groups_that_mean_nothing_are_refused() {
    let spoiled = |case: &str, name: &str, bytes: &[u8]| {
        let dir = goldens().join("quantfiles").join(case);
        let out = changed(&dir, "", |_| true);
        let file = out.path().join("model.safetensors");
        let info = Weights::open(out.path()).unwrap().info(name).unwrap().clone();
        let mut all = std::fs::read(&file).unwrap();
        all[info.offset as usize..][..bytes.len()].copy_from_slice(bytes);
        std::fs::write(&file, all).unwrap();
        let weights = Weights::open(out.path()).unwrap();
        let p = param(&weights.info("decoded").unwrap().shape);
        let (layout, format) = stored_of(&weights, case);
        read(&weights, &p, layout, format, Dtype::F32).unwrap_err().to_string()
    };
    let said = spoiled("gptq-4", "a.scales", &[0, 0x7E]);
    assert!(said.contains("not finite"), "{said}");
    let said = spoiled("gptq-4-order", "a.g_idx", &99i32.to_le_bytes());
    assert!(said.contains("group") && said.contains("99"), "{said}");
    let said = spoiled("gptq-4", "a.g_idx", &3i32.to_le_bytes());
    assert!(said.contains("desc_act"), "{said}");
    let said = spoiled("fp8-block", "a.weight", &[0x7F]);
    assert!(said.contains("not a number"), "{said}");
    let said = spoiled("mxfp4", "a.weight_scales", &[255]);
    assert!(said.contains("not finite"), "{said}");
    let state = br#"{"quant_type": "nf4", "blocksize": 32"#;
    let said = spoiled("odd-nf4-cut", "a.weight.quant_state.bitsandbytes__nf4", state);
    assert!(said.contains("blocks of 64"), "{said}");
    let said = spoiled("bnb-int8", "a.weight_format", &[1]);
    assert!(said.contains("weight_format"), "{said}");
}

#[test]
fn configs_are_refused_by_the_setting_that_ft_does_not_read() {
    for (config, words) in [
        (json!({"quant_method": "gptq", "bits": 5}), &["bits", "5", "4 or 8"][..]),
        (json!({"quant_method": "gptq", "bits": 6}), &["bits", "6", "4 or 8"]),
        (
            json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}),
            &["checkpoint_format", "marlin"],
        ),
        (
            json!({"quant_method": "awq", "bits": 4, "version": "gemv"}),
            &["version", "gemv"],
        ),
        (json!({"quant_method": "awq", "bits": 3}), &["bits", "3"]),
        (json!({"quant_method": "hqq"}), &["quant_method", "hqq", "gptq"]),
        (json!({"quant_method": "fp8", "fmt": "e5m2"}), &["fmt", "e5m2"]),
        (
            json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}),
            &["quant_algo", "NVFP4"],
        ),
        (
            json!({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
            &["format", "nvfp4"],
        ),
        (
            json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"g": {"weights": {"num_bits": 3, "type": "int"}}}}),
            &["config_groups.g.weights", "3"],
        ),
        (
            json!({"quant_method": "compressed-tensors", "format": "int-quantized",
            "sparsity_config": {"format": "sparse-24-bitmask"}}),
            &["sparsity_config", "sparse-24"],
        ),
        (
            json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "af4"}),
            &["af4"],
        ),
        (json!("gptq"), &["gptq"]),
    ] {
        let said = check_config(&config, "config.json").unwrap_err().to_string();
        assert!(
            said.contains("quantization_config") && words.iter().all(|w| said.contains(w)),
            "{said}"
        );
    }
}
