//! Tests of model directories: files, exact values, shards, and errors.

use super::testing::{base, config, names, numbers, spec};
use super::*;
use crate::base::Error;
use crate::formats::StoredDtype;
use crate::formats::adapter::wrapped;
use crate::formats::config::Config;
use crate::formats::weights::Weights;
use crate::formats::writer::{self, TensorPlan, Values};
use crate::model::families;
use crate::ops::Dtype;
use crate::quant::{Format, QMatrix, quantize};
use crate::source::policy::is_projection;
use crate::source::stored::{self as quantized, QuantizedLayout};
use fancy_regex::Regex;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

fn read_config(dir: &Path) -> Map<String, Value> {
    Config::load(dir).unwrap().raw
}

#[test]
fn a_model_directory_has_every_file_and_the_exact_numbers() {
    for (tied, dtype, name, stored) in [
        (false, Dtype::F32, "float32", StoredDtype::F32),
        (true, Dtype::Bf16, "bfloat16", StoredDtype::Bf16),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let base = base(dir.path(), tied, StoredDtype::F32);
        let out = dir.path().join("final");
        let config = config(tied);
        let params = spec(&config).params();
        let export = ModelExport {
            out: &out,
            base_dir: &base,
            config: config.clone(),
            tied,
            dtype,
            params: &params,
            more: None,
        };
        let size = |name: &str| params.iter().find(|p| &*p.name == name).unwrap().elements();
        let path = model(&export, &mut |name, sink| sink(Values::F32(&numbers(name, size(name))))).unwrap();
        assert_eq!(path, out);
        assert_eq!(
            names(&out),
            [
                "LICENSE",
                "chat_template.jinja",
                "config.json",
                "generation_config.json",
                "model.safetensors",
                "tokenizer.json",
                "tokenizer_config.json"
            ]
        );
        assert_eq!(names(dir.path()), ["base", "final"], "no temporary directory stays");
        let mut expected = config.clone();
        expected.insert("torch_dtype".into(), name.into());
        let written = read_config(&out);
        assert_eq!(written, expected);
        assert!(written.keys().eq(expected.keys()), "keys keep their order");
        assert_eq!(
            std::fs::read(out.join("tokenizer.json")).unwrap(),
            std::fs::read(base.join("tokenizer.json")).unwrap()
        );
        let weights = Weights::open(&out).unwrap();
        assert_eq!(weights.metadata().get("format").unwrap(), "pt");
        assert_eq!(weights.len(), params.len());
        assert_eq!(weights.info("lm_head.weight").is_none(), tied);
        for p in &params {
            assert_eq!(weights.require(&p.name, &p.shape).unwrap().dtype, stored);
            assert_eq!(weights.read_f32(&p.name).unwrap(), numbers(&p.name, p.elements()));
        }
    }
}

#[test]
fn the_number_format_is_set_under_the_key_that_is_there() {
    let set = |value: Value| {
        let mut map = value.as_object().unwrap().clone();
        set_dtype(&mut map, StoredDtype::Bf16);
        Value::Object(map)
    };
    assert_eq!(
        set(json!({"torch_dtype": "float32"})),
        json!({"torch_dtype": "bfloat16"})
    );
    assert_eq!(
        set(json!({"dtype": null, "x": 1})),
        json!({"dtype": "bfloat16", "x": 1})
    );
    assert_eq!(
        set(json!({"dtype": "a", "torch_dtype": "b"})),
        json!({"dtype": "bfloat16", "torch_dtype": "bfloat16"})
    );
    assert_eq!(set(json!({})), json!({"torch_dtype": "bfloat16"}));
    // The vision part keeps its own.
    assert_eq!(
        set(json!({"dtype": "float32", "text_config": {"dtype": "float32"}, "vision_config": {"dtype": "float32"}})),
        json!({"dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}, "vision_config": {"dtype": "float32"}})
    );
    assert_eq!(
        set(json!({"dtype": "float32", "text_config": {}})),
        json!({"dtype": "bfloat16", "text_config": {}})
    );
}

#[test]
fn a_key_of_the_language_model_is_set_where_it_is_read() {
    let set = |value: Value| {
        let mut map = value.as_object().unwrap().clone();
        set_language_key(&mut map, "vocab_size", &json!(9));
        Value::Object(map)
    };
    assert_eq!(set(json!({"vocab_size": 8, "x": 1})), json!({"vocab_size": 9, "x": 1}));
    assert_eq!(
        set(json!({"text_config": {"vocab_size": 8}, "x": 1})),
        json!({"text_config": {"vocab_size": 9}, "x": 1})
    );
    // The config may leave out a default, and old files have the keys in both places.
    assert_eq!(
        set(json!({"text_config": {}})),
        json!({"text_config": {"vocab_size": 9}})
    );
    assert_eq!(
        set(json!({"vocab_size": 8, "text_config": {"vocab_size": 8}})),
        json!({"vocab_size": 9, "text_config": {"vocab_size": 9}})
    );
    assert_eq!(
        set(json!({"text_config": null, "vision_config": {}})),
        json!({"text_config": null, "vision_config": {}, "vocab_size": 9})
    );
}

#[test]
fn an_older_directory_is_replaced_whole_or_stays_whole() {
    let dir = tempfile::tempdir().unwrap();
    let base = base(dir.path(), true, StoredDtype::F32);
    let out = dir.path().join("final");
    let config = config(true);
    let params = spec(&config).params();
    let export = ModelExport {
        out: &out,
        base_dir: &base,
        config: config.clone(),
        tied: true,
        dtype: Dtype::F32,
        params: &params,
        more: None,
    };
    let size = |name: &str| params.iter().find(|p| &*p.name == name).unwrap().elements();
    model(&export, &mut |name, sink| sink(Values::F32(&vec![1.0; size(name)]))).unwrap();
    std::fs::write(out.join("model-00001-of-00002.safetensors"), "of an older export").unwrap();
    let before = names(&out);
    let last = params.last().unwrap().name.clone();
    type Fill<'a> = &'a dyn Fn(&str) -> Result<Vec<f32>>;
    let faults: [(&str, Fill); 3] = [
        ("not finite", &|name| {
            Ok(vec![if *name == *last { f32::NAN } else { 2.0 }; size(name)])
        }),
        ("not written completely", &|name| {
            Ok(vec![2.0; size(name) - usize::from(*name == *last)])
        }),
        ("no such weight", &|name| {
            if *name == *last {
                Err(Error::new("no such weight"))
            } else {
                Ok(vec![2.0; size(name)])
            }
        }),
    ];
    for (what, fill) in faults {
        let e = model(&export, &mut |name, sink| sink(Values::F32(&fill(name)?)))
            .unwrap_err()
            .to_string();
        assert!(e.contains(what), "{e}");
        assert_eq!((names(&out), names(dir.path()).len()), (before.clone(), 2));
        assert_eq!(
            Weights::open_file(&out.join("model.safetensors"))
                .unwrap()
                .read_f32(&last)
                .unwrap(),
            vec![1.0; 8]
        );
    }
    model(&export, &mut |name, sink| sink(Values::F32(&vec![3.0; size(name)]))).unwrap();
    assert_eq!(Weights::open(&out).unwrap().read_f32(&last).unwrap(), vec![3.0; 8]);
    assert_eq!(names(&out).len(), before.len() - 1);
    // The previous directory is kept: it may contain files that are not ft's.
    assert_eq!(names(dir.path()), ["base", "final", "final.left"]);
    assert_eq!(names(&dir.path().join("final.left")), before);
}

#[test]
fn large_models_are_sharded_with_an_index() {
    let dir = tempfile::tempdir().unwrap();
    let base = base(dir.path(), false, StoredDtype::F32);
    let config = config(false);
    let params = spec(&config).params();
    let tensors: Vec<TensorPlan> = params
        .iter()
        .map(|p| TensorPlan {
            name: p.name.to_string(),
            dtype: StoredDtype::F32,
            shape: p.shape.clone(),
        })
        .collect();
    let out = dir.path().join("out");
    let directory = OutputModel {
        out: &out,
        base_dir: &base,
        config: &config,
        tensors: &tensors,
        shard_bytes: 2000,
        chat_template: Some("{{ messages }}"),
    };
    let count = |plan: &TensorPlan| plan.shape.iter().product();
    directory
        .write(&mut |plan, sink| sink(Values::F32(&numbers(&plan.name, count(plan)))))
        .unwrap();
    let shards: Vec<String> = names(&out).into_iter().filter(|n| n.starts_with("model-")).collect();
    assert!(shards.len() > 2);
    assert!(
        shards
            .iter()
            .enumerate()
            .all(|(i, s)| *s == format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len()))
    );
    let weights = Weights::open(&out).unwrap();
    for p in &params {
        assert_eq!(weights.read_f32(&p.name).unwrap(), numbers(&p.name, p.elements()));
    }
    assert_eq!(
        files::read_text(&out.join("chat_template.jinja")).unwrap(),
        "{{ messages }}"
    );
}

#[test]
fn stop_ids_are_written_beside_settings_that_only_python_reads() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("generation_config.json");
    let config = config(true);
    let text = r#"{"temperature": 0.5, "top_p": NaN, "sequence_bias": [[[1], -Infinity]], "eos_token_id": 1}"#;
    std::fs::write(&path, text).unwrap();
    rehearse_stop_ids(dir.path(), &config).unwrap();
    let left_out = set_stop_ids(dir.path(), &config, &[1, 7]).unwrap();
    assert_eq!(left_out, ["top_p", "sequence_bias"]);
    let written: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(written, json!({"temperature": 0.5, "eos_token_id": [1, 7]}));
    // The file is JSON now; the ids take the place of any value.
    assert!(set_stop_ids(dir.path(), &config, &[1]).unwrap().is_empty());
    std::fs::write(&path, r#"{"eos_token_id": NaN}"#).unwrap();
    assert!(set_stop_ids(dir.path(), &config, &[1]).unwrap().is_empty());
    std::fs::remove_file(&path).unwrap();
    assert!(set_stop_ids(dir.path(), &config, &[1]).unwrap().is_empty());
    // What cannot be parsed at all is found before the run.
    for bad in ["{\"top_p\": }", "[1]", ""] {
        std::fs::write(&path, bad).unwrap();
        let e = rehearse_stop_ids(dir.path(), &config).unwrap_err().to_string();
        assert!(e.contains("generation_config.json"), "{e}");
        let same = set_stop_ids(dir.path(), &config, &[1]).unwrap_err().to_string();
        assert_eq!(same, e);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), bad);
    }
}

#[test]
fn a_config_with_numbers_that_only_python_reads_is_written_as_json_without_them() {
    let dir = tempfile::tempdir().unwrap();
    let base = base(dir.path(), true, StoredDtype::F32);
    let path = base.join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let more =
        r#"{"time_step_limit": [0.0, Infinity], "inner": {"a": -Infinity, "b": 1, "c": {"d": [NaN]}}, "word": "NaN","#;
    std::fs::write(&path, text.replacen('{', more, 1)).unwrap();
    let config = read_config(&base);
    assert!(config["time_step_limit"][1].is_string());
    let params = spec(&config).params();
    let out = dir.path().join("out");
    let export = ModelExport {
        out: &out,
        base_dir: &base,
        config: config.clone(),
        tied: true,
        dtype: Dtype::F16,
        params: &params,
        more: None,
    };
    let size = |name: &str| params.iter().find(|p| &*p.name == name).unwrap().elements();
    model(&export, &mut |name, sink| sink(Values::F32(&numbers(name, size(name))))).unwrap();
    let written: Map<String, Value> = serde_json::from_slice(&std::fs::read(out.join("config.json")).unwrap()).unwrap();
    let mut expected = config.clone();
    expected.retain(|key, _| key != "time_step_limit");
    expected.insert("inner".into(), json!({"b": 1, "c": {}}));
    assert_eq!(written, expected);
    assert!(written.keys().eq(expected.keys()), "keys keep their order");
    let (_, left_out) = writable_config(&config, &base);
    assert_eq!(left_out, ["time_step_limit", "inner.a", "inner.c.d"]);
    let note = config_note(&config, &base).unwrap();
    let expected = "config.json is written without time_step_limit, inner.a, inner.c.d: ";
    assert!(note.starts_with(expected), "{note}");
    // Strings in a file that is JSON stay, and so does a value that ft set instead.
    let mut changed = config.clone();
    changed.insert("time_step_limit".into(), json!([0.0, 1.0]));
    assert_eq!(writable_config(&changed, &base).0["time_step_limit"], json!([0.0, 1.0]));
    std::fs::write(&path, Value::Object(config.clone()).to_string()).unwrap();
    assert_eq!(writable_config(&config, &base), (config.clone(), Vec::new()));
    assert_eq!(config_note(&config, &base), None);
    assert_eq!(writable_config(&config, dir.path()), (config, Vec::new()));
}

#[test]
fn settings_of_quantized_weights_are_removed_from_both_places() {
    let mut config = config(true);
    config.insert("quantization_config".into(), json!({"bits": 4}));
    config.insert(
        "text_config".into(),
        json!({"a": 1, "quantization_config": {"bits": 8}, "b": 2}),
    );
    let order: Vec<String> = config
        .keys()
        .filter(|key| *key != "quantization_config")
        .cloned()
        .collect();
    unquantized(&mut config);
    assert_eq!(config["text_config"], json!({"a": 1, "b": 2}));
    assert!(config.keys().eq(order.iter()), "keys keep their order");
}

/// The rules of transformers 5 and 4 for `llm_int8_skip_modules`.
struct Skipped {
    entries: Vec<String>,
    /// Each entry at the start of a name.
    starts: Vec<Regex>,
    /// As `starts`, up to a point or the end.
    bounded: Vec<Regex>,
}

impl Skipped {
    fn new(entries: Vec<String>) -> Self {
        let with = |end: &str| -> Vec<Regex> {
            let of = |entry: &String| Regex::new(&format!("^(?:{entry}){end}")).unwrap();
            entries.iter().map(of).collect()
        };
        let (starts, bounded) = (with(""), with(r"(?:(?<=\.)|(?=\.|$))"));
        Self {
            entries,
            starts,
            bounded,
        }
    }

    fn in_5(&self, starts: &[Regex], module: &str) -> bool {
        starts.iter().any(|regex| regex.is_match(module).unwrap())
            || self.entries.iter().any(|entry| module.ends_with(entry.as_str()))
    }

    /// In every version.
    fn in_all(&self, module: &str) -> bool {
        self.in_5(&self.bounded, module) && self.in_4(module)
    }

    /// In one of the versions.
    fn in_some(&self, module: &str) -> bool {
        self.in_5(&self.starts, module) || self.in_4(module)
    }

    fn in_4(&self, module: &str) -> bool {
        let is = |entry: &String| module == entry || module.contains(&format!("{entry}."));
        self.entries.iter().any(is)
    }
}

/// In every family without experts.
#[test]
fn transformers_replaces_exactly_the_linears_that_ft_quantizes() {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/goldens/families");
    let (mut read, mut outside, mut parts) = (0, 0, 0);
    for dir in files::list(&goldens).unwrap() {
        // The files of another family are used for some.
        let (Ok(config), Ok(weights)) = (Config::read(&dir), Weights::open(&dir)) else {
            continue;
        };
        let spec = families::read(&config).unwrap();
        if spec.layers.iter().any(|layer| layer.experts.is_some()) {
            continue;
        }
        read += 1;
        let params = spec.params();
        let kept = quantized::kept_modules(&weights, &params);
        let skipped = Skipped::new(kept.unwrap_or_else(|| panic!("{dir:?}: a linear has no entry of its own")));
        let module = |name: &str| name.trim_end_matches(".weight").to_string();
        // The names in the files, and those that transformers 5 has.
        let names = |name: &str| {
            let now = if spec.multimodal {
                wrapped(name)
            } else {
                name.to_string()
            };
            [module(&weights.stored_name(name)), module(&now)]
        };
        for p in params.iter().filter(|p| is_projection(p)) {
            for module in names(&p.name) {
                assert!(!skipped.in_some(&module), "{dir:?}: {module}");
            }
        }
        let altup = (0..spec.layers.len()).flat_map(|l| {
            let linears = spec.altup_linears().into_iter();
            linears.map(move |linear| format!("model.layers.{l}.{}", linear.name))
        });
        let others = spec.linears_outside().into_iter().map(|site| site.module);
        for linear in others.chain(altup).chain(["lm_head".to_string()]) {
            outside += usize::from(linear != "lm_head");
            for module in names(&format!("{linear}.weight")) {
                assert!(skipped.in_all(&module), "{dir:?}: {module}");
            }
        }
        for info in weights
            .other_parts()
            .iter()
            .filter(|info| info.name.ends_with(".weight"))
        {
            parts += 1;
            let stored = module(&info.name);
            let now = format!("model.{}", stored.trim_start_matches("model."));
            for module in [stored, now] {
                assert!(skipped.in_all(&module), "{dir:?}: {module}");
            }
        }
    }
    assert!(read > 30 && outside > 10 && parts > 50, "{read} {outside} {parts}");
}

/// A model with layers for multi-token prediction: tensors outside the language model. `more`: those beside it, with their bytes.
fn with_others(dir: &Path, more: &[(TensorPlan, Vec<u8>)]) -> PathBuf {
    let base = base(dir, true, StoredDtype::F32);
    let params = spec(&config(true)).params();
    let own = params.iter().map(|p| TensorPlan {
        name: p.name.to_string(),
        dtype: StoredDtype::F32,
        shape: p.shape.clone(),
    });
    let plans: Vec<TensorPlan> = own.chain(more.iter().map(|(plan, _)| plan.clone())).collect();
    writer::write_file(&base.join("model.safetensors"), &plans, &[], |plan, sink| {
        match more.iter().find(|(other, _)| other.name == plan.name) {
            Some((_, bytes)) => sink(Values::Raw(bytes)),
            None => sink(Values::F32(&numbers(&plan.name, plan.shape.iter().product()))),
        }
    })
    .unwrap();
    base
}

fn raw(name: &str, dtype: StoredDtype, shape: &[usize], bytes: Vec<u8>) -> (TensorPlan, Vec<u8>) {
    let plan = TensorPlan {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
    };
    (plan, bytes)
}

fn nf4(name: &str, dims: (usize, usize)) -> (QMatrix, Vec<(TensorPlan, Vec<u8>)>) {
    let layout = QuantizedLayout::Bitsandbytes;
    let format = Format::Nf4 { double: true };
    let matrix = quantize(&numbers(name, dims.0 * dims.1), dims, format, Dtype::F32).unwrap();
    let plans = quantized::tensors(layout, format, name, dims).into_iter();
    let with_bytes = |plan: TensorPlan| {
        let bytes = quantized::bytes(layout, &matrix, name, &plan).unwrap();
        (plan, bytes)
    };
    let tensors = plans.map(with_bytes).collect();
    (matrix, tensors)
}

/// The config of an export has no settings of quantized weights: other parts are not left quantized.
#[test]
fn quantized_tensors_outside_the_language_model_are_dequantized_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let params = spec(&config(true)).params();
    let size = |name: &str| params.iter().find(|p| &*p.name == name).unwrap().elements();
    let export = |base: &Path, out: &Path, rehearsed: bool| {
        let export = ModelExport {
            out,
            base_dir: base,
            config: config(true),
            tied: true,
            dtype: Dtype::F32,
            params: &params,
            more: None,
        };
        let fill: &mut ParamFill = &mut |name, sink| sink(Values::F32(&numbers(name, size(name))));
        if rehearsed {
            rehearse_model(&export, fill)
        } else {
            model(&export, fill).map(drop)
        }
    };
    let (matrix, mut more) = nf4("mtp.fc.weight", (6, 64));
    let scales: Vec<u8> = [127f32, 254.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    let same = vec![7; 16];
    more.extend([
        raw(
            "mtp.proj.weight",
            StoredDtype::I8,
            &[2, 3],
            vec![1, 2, 3, 255, 254, 253],
        ),
        raw("mtp.proj.SCB", StoredDtype::F32, &[2], scales),
        raw("mtp.norm.weight", StoredDtype::Bf16, &[8], same.clone()),
    ]);
    let base = with_others(&dir.path().join("a"), &more);
    let out = dir.path().join("out");
    export(&base, &out, true).unwrap();
    export(&base, &out, false).unwrap();
    let written = Weights::open(&out).unwrap().into_other_parts();
    let names: Vec<&str> = written.names().collect();
    assert_eq!(names, ["mtp.fc.weight", "mtp.norm.weight", "mtp.proj.weight"]);
    assert_eq!(written.read_f32("mtp.fc.weight").unwrap(), matrix.dequantize());
    let eight_bits = written.read_f32("mtp.proj.weight").unwrap();
    for (found, wanted) in eight_bits.iter().zip([1.0f32, 2.0, 3.0, -2.0, -4.0, -6.0]) {
        assert!((found - wanted).abs() < 1e-5, "{eight_bits:?}");
    }
    assert_eq!(written.read_bytes("mtp.norm.weight").unwrap(), same);
    // The space that is needed: of the dequantized values.
    let own = params.iter().filter(|p| &*p.name != "lm_head.weight");
    let tensors: Vec<TensorPlan> = own
        .map(|p| TensorPlan {
            name: p.name.to_string(),
            dtype: StoredDtype::F32,
            shape: p.shape.clone(),
        })
        .collect();
    let output = OutputModel {
        out: &out,
        base_dir: &base,
        config: &config(true),
        tensors: &tensors,
        shard_bytes: writer::SHARD_BYTES,
        chat_template: None,
    };
    let own: u64 = tensors.iter().filter_map(TensorPlan::bytes).sum();
    let of_others = written.total_bytes();
    assert_eq!(of_others, 4 * (6 * 64 + 2 * 3) + 16);
    assert_eq!(output.bytes().unwrap(), own + of_others);
    assert_eq!(bytes_of_other_parts(&base, StoredDtype::F32), of_others);
    let halves = bytes_of_other_parts(&base, StoredDtype::Bf16);
    assert_eq!(halves, 2 * (6 * 64 + 2 * 3) + 16);
    assert_eq!(bytes_of_other_parts(&out.join("nothing"), StoredDtype::F32), 0);
    let shape = |name: &str| written.info(name).unwrap().shape.clone();
    assert_eq!(
        (shape("mtp.fc.weight"), shape("mtp.proj.weight")),
        (vec![6, 64], vec![2, 3])
    );

    // Before the first step of a training, and then again.
    let (_, mut without_absmax) = nf4("mtp.fc.weight", (6, 64));
    without_absmax.retain(|(plan, _)| !plan.name.ends_with("weight.absmax"));
    for (place, more, part) in [
        (
            "b",
            vec![raw("mtp.experts", StoredDtype::F8E4M3, &[2, 2, 2], vec![0; 8])],
            "mtp.experts",
        ),
        (
            "c",
            vec![raw("mtp.fc.weight_packed", StoredDtype::I32, &[1, 1], vec![0; 4])],
            "mtp.fc.weight_packed",
        ),
        ("d", without_absmax, "mtp.fc.weight.absmax"),
    ] {
        let base = with_others(&dir.path().join(place), &more);
        let out = dir.path().join(place).join("out");
        for rehearsed in [true, false] {
            let e = export(&base, &out, rehearsed).unwrap_err().to_string();
            assert!(e.contains(part) && e.contains("unquantized weights"), "{e}");
            assert!(!out.exists(), "{place}");
        }
    }
}
