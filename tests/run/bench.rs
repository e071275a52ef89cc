//! A test directory with a small model, rows and a recipe.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use tempfile::TempDir;

pub struct Bench {
    pub dir: TempDir,
}

pub fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/goldens")
}

pub fn copy_all(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

/// Every file below `dir` with its relative name, in order.
pub fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            all.extend(
                files(&path)
                    .into_iter()
                    .map(|(below, bytes)| (format!("{name}/{below}"), bytes)),
            )
        } else {
            all.push((name, fs::read(&path).unwrap()))
        }
    }
    all.sort();
    all
}

impl Bench {
    /// A tiny Llama with the chat tokenizer in `model/`, chat rows in `rows.jsonl`, preference pairs in `pairs.jsonl`,
    /// a recipe in `r.toml`.
    pub fn new() -> Self {
        let bench = Self {
            dir: TempDir::new().unwrap(),
        };
        copy_all(&goldens().join("training/models/llama"), &bench.path("model"));
        copy_all(&goldens().join("tokenizers/chat"), &bench.path("model"));
        fs::copy(goldens().join("data/messages.jsonl"), bench.path("rows.jsonl")).unwrap();
        fs::copy(goldens().join("preference/text.jsonl"), bench.path("pairs.jsonl")).unwrap();
        bench.recipe("");
        bench
    }

    /// As `new`, with the model of a directory and rows of text.
    pub fn of_model(model: &Path) -> Self {
        let bench = Self::new();
        fs::remove_dir_all(bench.path("model")).unwrap();
        copy_all(model, &bench.path("model"));
        copy_all(&goldens().join("tokenizers/small"), &bench.path("model"));
        fs::copy(goldens().join("data/eval_text.jsonl"), bench.path("rows.jsonl")).unwrap();
        bench
    }

    /// As `of_model`, with the model of a golden of a family.
    pub fn of_family(family: &str) -> Self {
        Self::of_model(&goldens().join("families").join(family))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes `r.toml`; `more` are additional tables.
    pub fn recipe(&self, more: &str) {
        let text = format!(
            "[model]\npath = \"model\"\ndtype = \"f32\"\n[data]\ntrain = \"rows.jsonl\"\nmax_length = 512\n\
             packing = false\n[optimizer]\nlearning_rate = 1e-3\n{more}"
        );
        fs::write(self.path("r.toml"), text).unwrap();
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ft"));
        command
            .args(arguments)
            .current_dir(self.dir.path())
            .env("NO_COLOR", "1")
            .env("FT_CACHE_DIR", self.path("cache"))
            .env("HF_HUB_OFFLINE", "1");
        command
    }

    pub fn ft(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs a recipe of `recipes/` into `name`; it must succeed.
    pub fn shipped(&self, recipe: &str, name: &str, overrides: &[&str]) {
        let out = format!("train.output_dir={}", self.path(name).display());
        let recipe = format!("recipes/{recipe}.toml");
        let arguments = [&["train", "--recipe", &recipe, &out][..], overrides].concat();
        let mut command = self.command(&arguments);
        let ran = command.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
        assert!(ran.status.success(), "{overrides:?}\n{}", said(&ran));
    }

    /// Runs `ft train`, which must succeed.
    pub fn train(&self, overrides: &[&str]) {
        let mut arguments = vec!["train", "--recipe", "r.toml"];
        arguments.extend(overrides);
        let out = self.ft(&arguments);
        assert!(out.status.success(), "{overrides:?}\n{}", said(&out));
    }

    pub fn start(&self, overrides: &[&str]) -> Child {
        let mut arguments = vec!["train", "--recipe", "r.toml"];
        arguments.extend(overrides);
        self.command(&arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    /// The lines of a `.jsonl` file.
    pub fn lines(&self, file: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.path(file)).unwrap();
        text.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
    }

    /// The step lines of a run's metrics.
    pub fn steps(&self, run: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.path(run).join("metrics.jsonl")).unwrap_or_default();
        let lines = text.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
        lines.filter(|l| l.get("loss").is_some()).collect()
    }
}

pub fn said(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

pub fn number(line: &Value, key: &str) -> f64 {
    line[key].as_f64().unwrap_or_else(|| panic!("no {key} in {line}"))
}
