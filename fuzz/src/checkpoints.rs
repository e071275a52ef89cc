//! Checkpoints: the manifest with its hash, and the state that it lists.

use super::caches::parts;
use super::models::small_model;
use super::{dir, put, said};
use candle_core::Device;
use ft::checkpoint::{self, LoadedState};
use ft::engine::{ActiveSet, EmaConfig, Engine, LossScaleConfig, StepStrategy, TrainConfig};
use ft::ops::Dtype;
use ft::optim::{Optimizer, OptimizerConfig};
use ft::recipe::Train;
use ft::sft::CausalLm;
use ft::train::{best_again, resumed, state};
use ft::{hf, recipe};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;

/// The hash of a manifest: its fields, each with its length. `None`: a field is missing, or has another type.
fn seal(manifest: &Value) -> Option<String> {
    let mut hasher = blake3::Hasher::new();
    let mut field = |of: &Value, key: &str| {
        let text = match of.get(key)? {
            Value::String(text) => text.clone(),
            other => other.as_u64()?.to_string(),
        };
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
        Some(())
    };
    for key in ["format", "ft", "step"] {
        field(manifest, key)?;
    }
    for file in manifest.get("files")?.as_array()? {
        for key in ["name", "size", "blake3"] {
            field(file, key)?;
        }
    }
    Some(hasher.finalize().to_hex().to_string())
}

/// A file with tensors, each with its number format and shape; the bytes of their values count up.
fn tensors(of_file: &[(&str, &str, Vec<usize>)]) -> Vec<u8> {
    let (mut head, mut data): (Map<String, Value>, Vec<u8>) = (Map::new(), Vec::new());
    for (name, dtype, shape) in of_file {
        let first = data.len();
        let size = match *dtype {
            "F64" | "I64" | "U64" => 8,
            "F16" | "BF16" | "I16" | "U16" => 2,
            "U8" | "I8" | "BOOL" => 1,
            _ => 4,
        };
        let bytes = size * shape.iter().product::<usize>();
        data.extend((first..first + bytes).map(|at| (at % 120) as u8));
        let place = json!({"dtype": dtype, "shape": shape, "data_offsets": [first, data.len()]});
        head.insert(name.to_string(), place);
    }
    let mut head = Value::Object(head).to_string();
    head += &" ".repeat(head.len().next_multiple_of(8) - head.len());
    [&(head.len() as u64).to_le_bytes()[..], head.as_bytes(), &data].concat()
}

/// `manifest.json`, then after a byte 0 `state.json`: as they are, with the right hash of the manifest, and also with the right
/// sizes and hashes of the files that there are.
pub fn manifest(bytes: &[u8]) {
    let (text, state) = parts(bytes);
    let state = if state.is_empty() { &b"{}"[..] } else { state };
    let weights = tensors(&[("w", "F32", vec![2, 3])]);
    let (stage, moments) = (
        tensors(&[("state", "U8", vec![4])]),
        tensors(&[("w#m", "F32", vec![6])]),
    );
    let files: [(&str, &[u8]); 4] = [
        ("state.json", state),
        ("weights.safetensors", &weights),
        ("optimizer.safetensors", &moments),
        ("stage.safetensors", &stage),
    ];
    for (name, content) in files {
        put(&format!("checkpoint-1/{name}"), content);
    }
    let path = put("checkpoint-1/manifest.json", text);
    let dir = path.parent().unwrap();
    said(checkpoint::verify(dir));
    let Ok(mut sealed) = serde_json::from_slice::<Value>(text) else {
        return;
    };
    for is_exact in [false, true] {
        let entries = sealed
            .get_mut("files")
            .and_then(Value::as_array_mut)
            .filter(|_| is_exact);
        for entry in entries.into_iter().flatten() {
            let name = entry.get("name").and_then(Value::as_str);
            let known = files.iter().find(|(known, _)| name == Some(*known));
            if let Some((_, content)) = known {
                entry["size"] = content.len().into();
                entry["blake3"] = blake3::hash(content).to_hex().as_str().into();
            }
        }
        let Some(hash) = seal(&sealed) else { continue };
        sealed["seal"] = hash.into();
        put("checkpoint-1/manifest.json", sealed.to_string().as_bytes());
        if let Some(loaded) = said(checkpoint::load(dir)) {
            assert_eq!(loaded.step, 1);
            read(&loaded);
        }
    }
}

/// All that a run reads of a checkpoint before it has a model.
fn read(loaded: &LoadedState) {
    said(state::sizes(loaded));
    said(state::stage_state(loaded));
    for name in ["weights", "optimizer", "averages", "ranks", "stage"] {
        let Some(file) = said(loaded.open(&format!("{name}.safetensors"))) else {
            continue;
        };
        for tensor in file.names() {
            let info = file.info(tensor).unwrap();
            let bytes = file.read_bytes(tensor).unwrap();
            assert_eq!(bytes.len() as u64, info.bytes);
            if let Some(values) = said(file.read_f32(tensor)) {
                assert_eq!(values.len(), info.count());
            }
            // Over the ends of pieces.
            let middle = bytes.len() / 3;
            let mut part = vec![0; bytes.len() / 2];
            file.read_bytes_at(tensor, middle, &mut part).unwrap();
            assert_eq!(part, bytes[middle..middle + part.len()]);
        }
    }
}

/// Name, number format and shape.
type NamedTensor<'a> = (&'a str, &'a str, Vec<usize>);

/// A checkpoint of `state.json` in the first line and a tensor in each other line: its file, its name, its number format, its shape
/// (`2x3`). `None`: the lines are not such ones.
fn of_lines(bytes: &[u8]) -> Option<PathBuf> {
    const MOST: usize = 1 << 8;
    let text = std::str::from_utf8(bytes).ok()?;
    let mut lines = text.lines();
    let state = lines.next().unwrap_or_default();
    let mut files: BTreeMap<&str, Vec<NamedTensor>> = BTreeMap::new();
    for line in lines.take(64) {
        let words: Vec<&str> = line.split(' ').collect();
        let [file, name, dtype, shape] = words[..] else {
            return None;
        };
        let is_letter = |c: char| c.is_ascii_alphanumeric() || c == '-';
        let stem = file.strip_suffix(".safetensors");
        if !stem.is_some_and(|stem| (1..=64).contains(&stem.len()) && stem.chars().all(is_letter)) {
            return None;
        }
        let sizes: Vec<usize> = shape.split('x').map_while(|size| size.parse().ok()).take(8).collect();
        let count = sizes
            .iter()
            .try_fold(1usize, |product, size| product.checked_mul(*size));
        if count.is_none_or(|count| count > MOST) {
            return None;
        }
        files.entry(file).or_default().push((name, dtype, sizes));
    }
    let mut contents: Vec<(&str, Vec<u8>)> = vec![("state.json", state.as_bytes().to_vec())];
    contents.extend(files.iter().map(|(file, of_file)| (*file, tensors(of_file))));
    let path = put("checkpoint-3/state.json", b"");
    let dir = path.parent().unwrap();
    // Files of the last input.
    fs::remove_dir_all(dir).unwrap();
    for (name, content) in &contents {
        put(&format!("checkpoint-3/{name}"), content);
    }
    let entry = |(name, content): &(&str, Vec<u8>)| {
        let hash = blake3::hash(content).to_hex().to_string();
        json!({"name": name, "size": content.len(), "blake3": hash})
    };
    let entries: Vec<Value> = contents.iter().map(entry).collect();
    let mut manifest = json!({"format": 1, "ft": "0", "step": 3, "files": entries});
    manifest["seal"] = seal(&manifest).unwrap().into();
    put("checkpoint-3/manifest.json", manifest.to_string().as_bytes());
    checkpoint::verify(dir).unwrap();
    Some(dir.to_path_buf())
}

/// The tensors of a checkpoint, as they are read before there is a model.
pub fn checkpoint_tensors(bytes: &[u8]) {
    if let Some(dir) = of_lines(bytes)
        && let Some(loaded) = said(checkpoint::load(&dir))
    {
        read(&loaded);
    }
}

/// The weights that the engine of `restored` trains.
const TRAINED: [&str; 2] = ["model.norm.weight", "model.layers.1.input_layernorm.weight"];

/// A checkpoint as in `checkpoint_tensors` that a run restores: all of it, and as an export does it.
pub fn restored(bytes: &[u8]) {
    let Some(loaded) = of_lines(bytes).and_then(|dir| said(checkpoint::load(&dir))) else {
        return;
    };
    let active = ActiveSet::new(TRAINED.map(String::from));
    let engine = || {
        let model = hf::open(small_model(), Dtype::F32, &Device::Cpu).unwrap().model;
        let objective = Box::new(CausalLm::new(model.network.spec.vocab));
        let config = TrainConfig {
            ema: Some(EmaConfig {
                decay: 0.9,
                ramp: false,
            }),
            loss_scale: Some(LossScaleConfig::default()),
            ..TrainConfig::default()
        };
        let optimizer = Optimizer::new(OptimizerConfig::default());
        Engine::with_config(
            model,
            objective,
            optimizer,
            StepStrategy::new(Dtype::F32),
            &active,
            config,
        )
        .unwrap()
    };
    let mut exported = engine();
    said(state::restore_weights(&loaded, &mut exported));
    let mut resumed = engine();
    if said(state::restore(&loaded, &mut resumed, &active)).is_none() {
        return;
    }
    let weights = loaded.open("weights.safetensors").unwrap();
    for name in weights.names() {
        // An average takes the place of a weight that is not trained any more.
        if loaded.state["averages"].get(name).is_some() {
            continue;
        }
        let (mut found, bits) = (Vec::new(), |values: &[f32]| {
            values.iter().map(|x| x.to_bits()).collect::<Vec<u32>>()
        });
        let read = resumed.exact(name, &mut |values| {
            found.extend_from_slice(values);
            Ok(())
        });
        read.unwrap();
        assert_eq!(bits(&found), bits(&weights.read_f32(name).unwrap()), "{name}");
    }
    for saved in resumed.optimizer.saved() {
        if let Some(step) = loaded.state["optimizer_steps"].get(saved.name) {
            assert_eq!(*step, saved.step, "{}", saved.name);
        }
    }
    let scale = resumed.loss_scale.as_ref().unwrap();
    assert_eq!(loaded.state["loss_scale"]["steps"], scale.steps);
}

/// What a checkpoint keeps of the evaluations, and after a byte 0 `metrics.jsonl`.
pub fn best(bytes: &[u8]) {
    static TRAIN: OnceLock<Train> = OnceLock::new();
    let train = TRAIN.get_or_init(|| {
        let text = "[model]\npath = \"m\"\n[data]\ntrain = \"t.jsonl\"\n";
        recipe::parse(text, "r.toml", &[]).unwrap().recipe.train
    });
    let (text, metrics) = parts(bytes);
    let Ok(saved) = serde_json::from_slice::<Value>(text) else {
        return;
    };
    let path = put("evaluated/metrics.jsonl", metrics);
    let (run, new) = (path.parent().unwrap(), dir().join("evaluated/new"));
    for (metric, patience, is_final) in [
        ("auto", 0, true),
        ("auto", 2, false),
        ("accuracy", 1, true),
        ("auto", 0, false),
    ] {
        let train = Train {
            metric_for_best_model: metric.into(),
            early_stopping_patience: patience,
            load_best_model_at_end: is_final,
            ..train.clone()
        };
        let kept = best_again(&train, run, &saved, 7);
        if !kept.is_null() {
            assert_eq!(best_again(&train, &new, &kept, 7), kept, "{metric}");
        }
    }
}

/// A checkpoint of which every file is the same bytes, then one with a manifest that fits.
pub fn state(bytes: &[u8]) {
    let path = put("checkpoint-2/state.json", bytes);
    let dir = path.parent().unwrap();
    put("checkpoint-2/manifest.json", bytes);
    said(checkpoint::load(dir));
    let hash = blake3::hash(bytes).to_hex().to_string();
    let files = json!([{"name": "state.json", "size": bytes.len(), "blake3": hash}]);
    let mut manifest = json!({"format": 1, "ft": "0", "step": 2, "files": files});
    manifest["seal"] = seal(&manifest).unwrap().into();
    put("checkpoint-2/manifest.json", manifest.to_string().as_bytes());
    let loaded = said(checkpoint::load(dir));
    // A mark at the start of a text is no part of it.
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let wanted = serde_json::from_slice::<Value>(text).ok();
    assert_eq!(loaded.as_ref().map(|loaded| &loaded.state), wanted.as_ref());
    if let Some(loaded) = loaded {
        let own = state::fingerprint(&loaded);
        resumed::check_same(&own, &own).unwrap();
        assert_eq!(resumed::other_bits(&loaded, &own), None);
        assert_eq!(resumed::allowed_changes(&loaded, &own), None);
        assert_eq!(resumed::other_program(&loaded, &own), None);
        said(resumed::check_length(&loaded, 1));
        resumed::other_rates(&loaded, 7, &Default::default());
        said(state::stage_state(&loaded));
    }
}
