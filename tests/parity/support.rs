//! Goldens, model directories built from them, the `ft` program, comparisons.

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

pub fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/goldens")
}

pub fn json(path: &Path) -> Value {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

pub fn text(value: &Value, key: &str) -> String {
    value[key]
        .as_str()
        .unwrap_or_else(|| panic!("`{key}` is no text"))
        .to_string()
}

pub fn numbers(value: &Value) -> Vec<f64> {
    let list = value.as_array().expect("a list of numbers");
    list.iter().map(|x| x.as_f64().expect("a number")).collect()
}

pub fn ids(value: &Value) -> Vec<u32> {
    numbers(value).into_iter().map(|x| x as u32).collect()
}

/// Sorted names of the directories in `dir`.
pub fn directories(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap())
        .filter(|e| e.path().is_dir())
        .map(|e| e.file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// All tensors of a safetensors file as f64 (exact for i64 ids).
pub fn tensors(path: &Path) -> BTreeMap<String, Vec<f64>> {
    let bytes = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut out = BTreeMap::new();
    for (name, view) in file.tensors() {
        let data = view.data();
        let values = match view.dtype() {
            Dtype::F32 => data
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes(b.try_into().unwrap()) as f64)
                .collect(),
            Dtype::I64 => data
                .chunks_exact(8)
                .map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f64)
                .collect(),
            other => panic!("{name}: {other:?} in {}", path.display()),
        };
        out.insert(name, values);
    }
    out
}

/// The format version of `config.json`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Form {
    V5,
    V4,
}

pub fn copy_matching(from: &Path, to: &Path, wanted: impl Fn(&str) -> bool) {
    for entry in fs::read_dir(from).unwrap_or_else(|e| panic!("{}: {e}", from.display())) {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if wanted(&name) {
            fs::copy(entry.path(), to.join(&name)).unwrap();
        }
    }
}

fn is_weights(name: &str) -> bool {
    name.starts_with("model") && (name.ends_with(".safetensors") || name.ends_with(".index.json"))
}

/// Builds a Hugging Face directory: config and weights of a family golden with its tokenizer.
pub fn family(name: &str, form: Form) -> TempDir {
    let families = goldens().join("families");
    let from = families.join(name);
    let golden = json(&from.join("golden.json"));
    let dir = TempDir::new().unwrap();
    let config = if form == Form::V5 {
        "config.json"
    } else {
        "config.v4.json"
    };
    fs::copy(from.join(config), dir.path().join("config.json")).unwrap();
    fs::copy(
        from.join("generation_config.json"),
        dir.path().join("generation_config.json"),
    )
    .unwrap();
    let weights = golden["weights_from"]
        .as_str()
        .map_or(from.clone(), |w| families.join(w));
    copy_matching(&weights, dir.path(), is_weights);
    let tokenizer = goldens().join("tokenizers").join(text(&golden, "tokenizer"));
    copy_matching(&tokenizer, dir.path(), |_| true);
    dir
}

/// Builds a model directory of the training goldens with the chat tokenizer.
pub fn training_model(name: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    copy_matching(&goldens().join("training/models").join(name), dir.path(), |_| true);
    copy_matching(&goldens().join("tokenizers/chat"), dir.path(), |_| true);
    dir
}

pub fn data(name: &str) -> PathBuf {
    goldens().join("data").join(format!("{name}.jsonl"))
}

pub fn path(p: &Path) -> &str {
    p.to_str().expect("a path that is text")
}

/// Runs `ft`, which must succeed. Returns its standard output.
pub fn ft(args: &[&str]) -> String {
    let out = Command::new(env!("CARGO_BIN_EXE_ft"))
        .args(args)
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .expect("ft starts");
    let shown = args.join(" ");
    assert!(
        out.status.success(),
        "ft {shown}\n{}\n{}",
        out.status,
        String::from_utf8_lossy(&out.stderr)
    );
    String::from_utf8(out.stdout).expect("stdout is text")
}

/// Runs `ft eval --json` in f32; returns (loss, trained tokens).
pub fn eval(model: &Path, adapter: Option<&Path>, rows: &Path) -> (f64, u64) {
    let mut args = vec!["eval", "--model", path(model), "--data", path(rows)];
    if let Some(adapter) = adapter {
        args.extend(["--adapter", path(adapter)]);
    }
    // The goldens use prompts and completions as plain text.
    args.extend(["--render", "plain", "--dtype", "f32", "--json"]);
    let out = ft(&args);
    let value: Value = serde_json::from_str(out.trim()).unwrap_or_else(|e| panic!("ft eval --json: {e}\n{out}"));
    let loss = value["loss"].as_f64().expect("`loss`");
    let perplexity = value["perplexity"].as_f64().expect("`perplexity`");
    close(perplexity, loss.exp(), 1e-6, "perplexity is exp(loss)");
    (loss, value["tokens"].as_u64().expect("`tokens`"))
}

/// Asserts `|got - want| <= tolerance * |want|`.
pub fn close(got: f64, want: f64, tolerance: f64, what: &str) {
    let within = (got - want).abs() <= tolerance * want.abs().max(1e-12);
    assert!(within, "{what}: {got} instead of {want} (tolerance {tolerance:e})");
}

/// Asserts that the largest difference is at most `tolerance` of the largest expected value.
pub fn all_close(got: &[f64], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: number of values");
    let largest = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    let mut worst = (0, 0.0);
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(g.is_finite(), "{what}: value {i} is {g}");
        if (g - w).abs() > worst.1 {
            worst = (i, (g - w).abs());
        }
    }
    let (i, difference) = worst;
    assert!(
        difference <= tolerance * largest,
        "{what}: value {i} is {} instead of {}; relative to the largest {:e} (tolerance {tolerance:e})",
        got[i],
        want[i],
        difference / largest
    );
}
