//! Directories with weights that ft did not write: adapters, quantized weights, models in several files.
//!
//! An input is a text. Its lines name tensors; the target writes the files, so that a changed input still has valid headers.

use super::{dir, put, quantized, said};
use ft::commands::adapter_tools;
use ft::formats::adapter::wrapped;
use ft::formats::writer::TensorPlan;
use ft::formats::{Config, StoredDtype, Weights, joined};
use ft::hf::{self, BaseHashes, WeightedAdapter};
use ft::model::{Spec, families};
use ft::peft::Adapter;
use ft::quant::Format;
use ft::recipe::ModelInit;
use ft::setup::ModelDir;
use ft::setup::vocabulary::TextChanges;
use ft::source::stored::{self, QuantizedLayout};
use ft::source::{Group, ParamInfo, Sublayer, resident};
use quantized::{COLUMNS, ROWS};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Configs of small models: dense, experts with tensors of their own, experts in joined tensors, a multimodal model.
const CONFIGS: [&str; 4] = [
    include_str!("../../tests/parity/goldens/families/qwen3/config.json"),
    include_str!("../../tests/parity/goldens/families/qwen3_moe/config.json"),
    include_str!("../../tests/parity/goldens/families/gpt_oss_plain/config.json"),
    include_str!("../../tests/parity/goldens/families/qwen3_vl_moe/config.json"),
];

/// A tokenizer of five words.
pub(super) const TOKENIZER: &str = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{"id":4,"content":"<|im_end|>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],"normalizer":null,"pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,"model":{"type":"WordLevel","vocab":{"a":0,"b":1,"<unk>":2,"c":3,"<|im_end|>":4},"unk_token":"<unk>"}}"#;

/// Most bytes of the tensors of an input.
const MOST: usize = 64 << 10;
/// A byte of which every float is finite.
const FILL: u8 = 0x3c;

#[derive(Clone)]
struct Tensor {
    /// As in the header; it may be one that does not exist.
    dtype: String,
    shape: Vec<u64>,
    data: Vec<u8>,
}

type Tensors = BTreeMap<String, Tensor>;

impl Tensor {
    /// `None`: it has more than `most` bytes.
    fn filled(dtype: &str, shape: Vec<u64>, fill: u8, most: usize) -> Option<Self> {
        let one = StoredDtype::from_name(dtype).map_or(1, StoredDtype::size) as u64;
        let bytes = shape.iter().try_fold(one, |n, size| n.checked_mul(*size))?;
        let bytes = usize::try_from(bytes).ok().filter(|bytes| *bytes <= most)?;
        Some(Self {
            dtype: dtype.into(),
            shape,
            data: vec![fill; bytes],
        })
    }
}

/// `4,16`; `-` is the shape of a single number.
fn shape(word: &str) -> Option<Vec<u64>> {
    if word == "-" {
        return Some(Vec::new());
    }
    word.split(',').map(|size| size.parse().ok()).collect()
}

/// `NAME DTYPE SHAPE`, and the byte that the tensor is filled with.
fn tensor(words: &[&str], left: &mut usize) -> Option<(String, Tensor)> {
    let [name, dtype, sizes, rest @ ..] = words else {
        return None;
    };
    let fill = rest.first().and_then(|fill| fill.parse().ok()).unwrap_or(FILL);
    let tensor = Tensor::filled(dtype, shape(sizes)?, fill, *left)?;
    *left -= tensor.data.len();
    Some(((*name).into(), tensor))
}

/// A safetensors file.
fn file(tensors: &Tensors, metadata: &BTreeMap<String, String>) -> Vec<u8> {
    let mut head = Map::new();
    if !metadata.is_empty() {
        head.insert("__metadata__".into(), json!(metadata));
    }
    let mut data = Vec::new();
    for (name, tensor) in tensors {
        let begin = data.len();
        data.extend_from_slice(&tensor.data);
        let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, data.len()]});
        head.insert(name.clone(), entry);
    }
    let head = Value::Object(head).to_string();
    [&(head.len() as u64).to_le_bytes()[..], head.as_bytes(), &data[..]].concat()
}

/// A model of `CONFIGS`.
struct Family {
    config: Map<String, Value>,
    spec: Spec,
    /// The tensors of its files.
    tensors: Tensors,
    /// The weights in a directory that no target changes.
    weights: Weights,
}

/// The family of the first byte of an input, and the rest of the input.
fn family(bytes: &[u8]) -> Option<(&'static Family, &[u8])> {
    static ALL: OnceLock<Vec<Family>> = OnceLock::new();
    let all = ALL.get_or_init(|| {
        CONFIGS
            .iter()
            .enumerate()
            .map(|(n, text)| read_family(n, text))
            .collect()
    });
    let (first, rest) = bytes.split_first()?;
    Some((&all[usize::from(*first) % all.len()], rest))
}

/// A directory with a dense model of two layers and 32 values in each state.
pub(super) fn small_model() -> &'static Path {
    static MODEL: OnceLock<PathBuf> = OnceLock::new();
    MODEL.get_or_init(|| {
        family(&[0]).unwrap();
        let path = put("family-0/tokenizer.json", TOKENIZER.as_bytes());
        path.parent().unwrap().to_path_buf()
    })
}

fn read_family(n: usize, text: &str) -> Family {
    let config: Map<String, Value> = serde_json::from_str(text).unwrap();
    let spec = families::read(&Config::from_map(config.clone(), Path::new("config.json"))).unwrap();
    let params: Vec<TensorPlan> = spec
        .params()
        .iter()
        .map(|param| TensorPlan {
            name: param.name.to_string(),
            dtype: StoredDtype::Bf16,
            shape: param.shape.clone(),
        })
        .collect();
    let in_file = |plan: &TensorPlan| {
        let name = if spec.multimodal {
            wrapped(&plan.name)
        } else {
            plan.name.clone()
        };
        let sizes = plan.shape.iter().map(|size| *size as u64).collect();
        (name, Tensor::filled(plan.dtype.name(), sizes, FILL, 1 << 20).unwrap())
    };
    let outputs = joined::outputs(&params, joined::usual(&config));
    let tensors: Tensors = outputs.iter().map(|output| in_file(&output.plan)).collect();
    put(&format!("family-{n}/config.json"), text.as_bytes());
    let path = put(
        &format!("family-{n}/model.safetensors"),
        &file(&tensors, &BTreeMap::new()),
    );
    let weights = Weights::open(path.parent().unwrap()).unwrap();
    Family {
        config,
        spec,
        tensors,
        weights,
    }
}

/// A downloaded adapter: a byte for the model, `adapter_config.json`, a zero byte, and lines `NAME DTYPE SHAPE` or
/// `__metadata__ KEY VALUE`.
pub fn adapter_weights(bytes: &[u8]) {
    let Some((family, rest)) = family(bytes) else { return };
    let mut parts = rest.splitn(2, |byte| *byte == 0);
    let path = put("adapter-weights/adapter_config.json", parts.next().unwrap_or_default());
    let dir = path.parent().unwrap();
    let list = String::from_utf8_lossy(parts.next().unwrap_or_default());
    let (mut tensors, mut metadata, mut left) = (Tensors::new(), BTreeMap::new(), MOST);
    for line in list.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        if let ["__metadata__", key, value] = words[..] {
            metadata.insert(key.to_string(), value.to_string());
        } else {
            tensors.extend(tensor(&words, &mut left));
        }
    }
    put("adapter-weights/adapter_model.safetensors", &file(&tensors, &metadata));
    said(hf::check_base(dir, &BaseHashes::default()));
    if let Some(shown) = said(adapter_tools::show(dir)) {
        assert!(shown.bytes as usize <= MOST);
        assert!(shown.json().is_object());
    }
    if let Some(difference) = said(adapter_tools::diff(dir, dir)) {
        assert!(difference.same(), "{:?}", difference.lines());
    }
    let spec = &family.spec;
    let Some(loaded) = said(hf::load_adapter(dir, spec)) else {
        return;
    };
    let sites = spec.sites();
    for (module, adapter) in &loaded.adapters {
        if let Adapter::Oft(rotation) = &**adapter {
            let site = sites.iter().find(|site| site.module == *module).unwrap();
            assert!(
                site.input.is_multiple_of(rotation.block),
                "{module}: {}",
                rotation.block
            );
        }
    }
    let no_base = super::dir();
    said(hf::rehearse_adapter(
        &no_base.join("rehearsed"),
        &loaded.config,
        &loaded.adapters,
        &loaded.whole,
        no_base,
    ));
    let merged = [WeightedAdapter {
        adapter: loaded,
        weight: 0.5,
    }];
    for param in spec.params().iter().filter(|param| merged[0].changes(&param.name)) {
        if let Some(values) = said(hf::merged(&family.weights, param, &merged)) {
            assert_eq!(values.len(), param.elements(), "{}", param.name);
        }
    }
}

/// Settings of quantized weights by a short name; each is of one weight of `stored_tensors`, or of several.
const SETTINGS: [(&str, &str); 13] = [
    ("gptq4", r#""gptq", "bits": 4, "group_size": 32"#),
    ("ordered", r#""gptq", "bits": 4, "group_size": 32, "desc_act": true"#),
    (
        "gptq3",
        r#""gptq", "bits": 3, "group_size": 32, "checkpoint_format": "gptq_v2""#,
    ),
    ("gptq2", r#""gptq", "bits": 2, "group_size": 32"#),
    ("gptq8", r#""gptq", "bits": 8, "group_size": -1"#),
    ("awq", r#""awq", "bits": 4, "group_size": 32"#),
    ("block", r#""fp8", "weight_block_size": [32, 32]"#),
    ("int8", r#""bitsandbytes", "load_in_8bit": true"#),
    (
        "nf4",
        r#""bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4""#,
    ),
    (
        "packed4",
        r#""compressed-tensors", "format": "pack-quantized", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}"#,
    ),
    (
        "packed8",
        r#""compressed-tensors", "format": "int-quantized", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int", "actorder": "group"}}}"#,
    ),
    ("mx", r#""mxfp4""#),
    ("ft", r#""ft""#),
];

/// The tensors of the weights of `quantized`, and of other layouts: blocks with a nested absmax, blocks above 64, FP4, MXFP4, and
/// the formats that ft writes (`own0`, `own1`, ..).
fn stored_tensors() -> &'static Tensors {
    static ALL: OnceLock<Tensors> = OnceLock::new();
    ALL.get_or_init(|| {
        let mut all: Tensors = quantized::tensors()
            .into_iter()
            .map(|(plan, data)| planned(&plan, data))
            .collect();
        let mut add = |name: &str, dtype: &str, shape: &[usize]| {
            let shape = shape.iter().map(|size| *size as u64).collect();
            all.insert(name.into(), Tensor::filled(dtype, shape, FILL, MOST).unwrap());
        };
        let blocks = ROWS * COLUMNS / 64;
        for name in ["nested", "wide", "fp4", "nestedwide"] {
            add(&format!("{name}.weight"), "U8", &[ROWS * COLUMNS / 2, 1]);
        }
        add("nested.weight.absmax", "U8", &[blocks]);
        add("nested.weight.nested_absmax", "F32", &[1]);
        add("wide.weight.absmax", "F32", &[blocks / 2]);
        add("nestedwide.weight.absmax", "U8", &[blocks / 4]);
        add("nestedwide.weight.nested_absmax", "F32", &[1]);
        add("fp4.weight.absmax", "F32", &[blocks]);
        add("mx.weight_blocks", "U8", &[ROWS, COLUMNS / 32, 16]);
        add("mx.weight_scales", "U8", &[ROWS, COLUMNS / 32]);
        let own = Format::ALL.into_iter().enumerate();
        for (n, format) in own.clone() {
            let name = format!("own{n}.weight");
            for plan in stored::tensors(QuantizedLayout::Ft, format, &name, (ROWS, COLUMNS)) {
                add(&plan.name, plan.dtype.name(), &plan.shape);
            }
        }
        let mut set = |name: &str, text: String| {
            let tensor = Tensor {
                dtype: "U8".into(),
                shape: vec![text.len() as u64],
                data: text.into_bytes(),
            };
            all.insert(name.into(), tensor);
        };
        for (name, kind, block, nested) in [
            ("nested", "nf4", 64, true),
            ("wide", "nf4", 128, false),
            ("nestedwide", "nf4", 256, true),
            ("fp4", "fp4", 64, false),
        ] {
            let mut state =
                json!({"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": [ROWS, COLUMNS]});
            if nested {
                state["nested_blocksize"] = 256.into();
                state["nested_dtype"] = "float32".into();
                state["nested_offset"] = json!(0.25);
            }
            set(
                &format!("{name}.weight.quant_state.bitsandbytes__{kind}"),
                state.to_string(),
            );
        }
        for (n, format) in own {
            set(&format!("own{n}.weight.format"), format!("{:16}", format.tag()));
        }
        all
    })
}

fn planned(plan: &TensorPlan, data: Vec<u8>) -> (String, Tensor) {
    let tensor = Tensor {
        dtype: plan.dtype.name().into(),
        shape: plan.shape.iter().map(|size| *size as u64).collect(),
        data,
    };
    (plan.name.clone(), tensor)
}

/// A quantized weight with one other tensor. The first line is `SETTINGS NAME DTYPE SHAPE`: DTYPE and SHAPE may be `=`, as the
/// tensor is; a shape `*` is that of the bytes after the line; DTYPE `-` is no tensor. The bytes replace the first ones.
pub fn quantized_weights(bytes: &[u8]) {
    let mut parts = bytes.splitn(2, |byte| *byte == b'\n');
    let head = String::from_utf8_lossy(parts.next().unwrap_or_default());
    let content = parts.next().unwrap_or_default();
    let words: Vec<&str> = head.split(' ').collect();
    let [settings, name, dtype, sizes] = words[..] else {
        return;
    };
    let Some((_, settings)) = SETTINGS.iter().find(|(own, _)| *own == settings) else {
        return;
    };
    let base = name.split('.').next().unwrap_or_default();
    let of_base = |(own, _): &(&String, &Tensor)| own.split('.').next() == Some(base);
    let mut tensors: Tensors = stored_tensors()
        .iter()
        .filter(of_base)
        .map(|(own, tensor)| (own.clone(), tensor.clone()))
        .collect();
    let before = tensors.remove(name);
    if dtype != "-" {
        let old = before.as_ref();
        let dtype = match (dtype, old) {
            ("=", Some(tensor)) => tensor.dtype.clone(),
            _ => dtype.into(),
        };
        let sizes = match (sizes, old) {
            ("=", Some(tensor)) => Some(tensor.shape.clone()),
            ("*", _) => Some(vec![content.len() as u64]),
            _ => shape(sizes),
        };
        let Some(mut new) = sizes.and_then(|sizes| Tensor::filled(&dtype, sizes, FILL, MOST)) else {
            return;
        };
        let data = old.map(|tensor| &tensor.data[..]).unwrap_or_default();
        for from in [data, content] {
            let n = from.len().min(new.data.len());
            new.data[..n].copy_from_slice(&from[..n]);
        }
        tensors.insert(name.into(), new);
    }
    let path = put(
        "quantized-weights/config.json",
        format!("{{\"quantization_config\": {{\"quant_method\": {settings}}}}}").as_bytes(),
    );
    put("quantized-weights/model.safetensors", &file(&tensors, &BTreeMap::new()));
    let Some(weights) = said(Weights::open(path.parent().unwrap())) else {
        return;
    };
    let param = ParamInfo {
        name: format!("{base}.weight").into(),
        shape: vec![ROWS, COLUMNS],
        group: Group::Layer(0),
        sublayer: Sublayer::Mlp,
    };
    if let Some(Some((layout, format))) = said(stored::find(&weights, &param.name)) {
        let names = stored::names(&weights, layout, format, &param.name, (ROWS, COLUMNS));
        assert!(!names.is_empty(), "{base}");
    }
    if let Some(Some(values)) = said(stored::values(&weights, &param)) {
        assert_eq!(values.len(), param.elements(), "{base}");
    }
    said(resident::check_names(&[param], &weights));
}

/// File names of `shards`: two of an index, one that an index should list, and one that comes before an index.
const FILES: [&str; 4] = [
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model-00003-of-00002.safetensors",
    "model.safetensors",
];

/// A directory that changes, line by line.
struct Directory {
    config: Map<String, Value>,
    files: [Tensors; FILES.len()],
    index: BTreeMap<String, String>,
    left: usize,
}

impl Directory {
    fn new(family: &Family) -> Self {
        let mut out = Self {
            config: family.config.clone(),
            files: Default::default(),
            index: BTreeMap::new(),
            left: MOST,
        };
        for (n, (name, tensor)) in family.tensors.iter().enumerate() {
            out.files[n % 2].insert(name.clone(), tensor.clone());
            out.index.insert(name.clone(), FILES[n % 2].into());
        }
        out
    }

    /// Unknown commands change nothing.
    fn change(&mut self, line: &str) -> Option<()> {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |word: &str| -> Option<usize> { word.parse().ok().filter(|n| *n < FILES.len()) };
        match words[..] {
            // A tensor in a file, which the index lists.
            ["tensor", at, ..] => {
                let at = number(at)?;
                let (name, new) = tensor(words.get(2..)?, &mut self.left)?;
                self.index.insert(name.clone(), FILES[at].into());
                self.files[at].insert(name, new);
            }
            // To another file, which the index does not know; `copy` leaves it in the first one too.
            [how @ ("move" | "copy"), name, at] => {
                let at = number(at)?;
                let holder = self.files.iter_mut().find(|file| file.contains_key(name))?;
                let tensor = holder.get(name)?.clone();
                if how == "move" {
                    holder.remove(name);
                }
                self.files[at].insert(name.into(), tensor);
            }
            // From all files; `unlist`: only from the index.
            ["drop", name] => {
                self.files.iter_mut().for_each(|file| drop(file.remove(name)));
                self.index.remove(name);
            }
            ["unlist", name] => drop(self.index.remove(name)),
            ["list", name, file] => drop(self.index.insert(name.into(), file.into())),
            // All tensors in one file.
            ["one", at] => {
                let all: Tensors = std::mem::take(&mut self.files).into_iter().flatten().collect();
                self.index.values_mut().for_each(|file| *file = FILES[0].into());
                self.files[number(at).unwrap_or(0)] = all;
            }
            // A value of the config; a key `text.KEY` is of the language model.
            ["config", key, ..] => {
                let value = serde_json::from_str(&words[2..].join(" ")).ok()?;
                let (map, key) = match key.strip_prefix("text.") {
                    Some(key) => (self.config.get_mut("text_config")?.as_object_mut()?, key),
                    None => (&mut self.config, key),
                };
                map.insert(key.into(), value);
            }
            _ => {}
        }
        Some(())
    }

    fn write(&self, to: &str) {
        put(
            &format!("{to}/config.json"),
            Value::Object(self.config.clone()).to_string().as_bytes(),
        );
        put(&format!("{to}/tokenizer.json"), TOKENIZER.as_bytes());
        for (name, tensors) in FILES.iter().zip(&self.files) {
            if tensors.is_empty() {
                drop(fs::remove_file(dir().join(to).join(name)));
            } else {
                put(&format!("{to}/{name}"), &file(tensors, &BTreeMap::new()));
            }
        }
        let index = json!({"metadata": {}, "weight_map": self.index}).to_string();
        put(&format!("{to}/model.safetensors.index.json"), index.as_bytes());
    }
}

/// A model in two files: a byte for the family, then a change of `Directory` on each line.
pub fn shards(bytes: &[u8]) {
    let Some((family, rest)) = family(bytes) else { return };
    let mut directory = Directory::new(family);
    for line in String::from_utf8_lossy(rest).lines() {
        directory.change(line);
    }
    directory.write("shards");
    let path = dir().join("shards");
    let opened = ModelDir::open(&path.to_string_lossy(), "main", &TextChanges::default());
    let Some(model) = said(opened) else { return };
    let Some(weights) = said(model.weights()) else { return };
    for name in weights.names() {
        let info = weights.info(name).unwrap();
        if let Some(data) = said(weights.read_bytes(name)) {
            assert_eq!(data.len() as u64, info.bytes, "{name}");
        }
        if let Some(values) = said(weights.read_f32(name)) {
            assert_eq!(values.len(), info.count(), "{name}");
        }
    }
    said(model.stored(ModelInit::Pretrained));
    if said(model.check_weights(ModelInit::Pretrained)).is_none() {
        return;
    }
    for param in model.spec.params() {
        if let Ok(None) = stored::find(&weights, &param.name) {
            assert_eq!(weights.info(&param.name).unwrap().shape, param.shape, "{}", param.name);
        }
    }
    if let Some(first) = said(model.fingerprint()) {
        assert_eq!(model.fingerprint().unwrap().base(), first.base());
    }
}
