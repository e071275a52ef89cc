//! Subcommands that get hub ids in place of directories.

use super::{COMMIT, Hub};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Output;

const MODEL: &str = "tester/base";
const ADAPTER: &str = "tester/skill";
/// The hub answers no request without it.
const TOKEN: &str = "hf_planted1111111111111111111111";

/// The files of a directory.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let named = |path: std::path::PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        (name, std::fs::read(path).unwrap())
    };
    files.filter(|path| path.is_file()).map(named).collect()
}

struct World {
    hub: Hub,
    dir: tempfile::TempDir,
}

impl World {
    /// A hub with a model, and a recipe for it.
    fn untrained() -> Self {
        let (hub, dir) = (Hub::start(), tempfile::tempdir().unwrap());
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        hub.state().token = Some(TOKEN.into());
        hub.put(&format!("models/{MODEL}"), files(&root.join("assets/tiny")));
        let world = Self { hub, dir };
        let rows = root.join("assets/world/train.jsonl");
        let recipe = format!(
            "[model]\npath = \"{MODEL}@{COMMIT}\"\ndtype = \"f32\"\n[data]\ntrain = \"{}\"\nmax_length = 64\n\
             [tune]\nmethod = \"lora\"\n[tune.lora]\nr = 2\ninit_lora_weights = \"gaussian\"\n\
             [train]\nmax_steps = 1\n",
            rows.display()
        );
        std::fs::write(world.dir.path().join("r.toml"), recipe).unwrap();
        world
    }

    /// A hub with a model, and with an adapter that was trained on it.
    fn new() -> Self {
        let world = Self::untrained();
        world.good(&["train", "r.toml", "train.output_dir=run"]);
        let adapter = files(&world.dir.path().join("run/final"));
        world.hub.put(&format!("models/{ADAPTER}"), adapter);
        world
    }

    /// Runs a command with the token; it must not be in the output.
    fn ft(&self, arguments: &[&str]) -> Output {
        let out = std::process::Command::new(env!("CARGO_BIN_EXE_ft"))
            .args(arguments)
            .current_dir(self.dir.path())
            .env("HF_HUB_CACHE", self.dir.path().join("cache"))
            .env("FT_CACHE_DIR", self.dir.path().join("cache-of-ft"))
            .env("HF_ENDPOINT", &self.hub.address)
            .env_remove("HF_HUB_OFFLINE")
            .env("HF_TOKEN", TOKEN)
            .output()
            .unwrap();
        for shown in [&out.stdout, &out.stderr] {
            assert!(!has_token(shown), "{arguments:?}: {}", String::from_utf8_lossy(shown));
        }
        out
    }

    /// No file that the commands wrote has the token: runs, results, the caches.
    fn keeps_no_token(&self) {
        let (mut waiting, mut searched) = (vec![self.dir.path().to_path_buf()], 0);
        while let Some(path) = waiting.pop() {
            assert!(!has_token(path.as_os_str().as_encoded_bytes()), "{}", path.display());
            if path.is_dir() {
                waiting.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            } else {
                assert!(!has_token(&std::fs::read(&path).unwrap()), "{}", path.display());
                searched += 1;
            }
        }
        assert!(searched > 10, "{searched} files");
    }

    fn good(&self, arguments: &[&str]) -> String {
        let out = self.ft(arguments);
        assert!(
            out.status.success(),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&out.stderr)
        );
        String::from_utf8(out.stdout).unwrap()
    }

    fn weights(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.dir.path().join(name).join("model.safetensors")).unwrap()
    }
}

fn has_token(bytes: &[u8]) -> bool {
    bytes.windows(TOKEN.len()).any(|part| part == TOKEN.as_bytes())
}

/// Row W5.
#[test]
fn a_run_from_the_hub_with_a_token_keeps_no_token() {
    let world = World::new();
    assert!(world.hub.state().tokens > 0);
    for file in ["environment.json", "events.jsonl", "resolved.toml", "final"] {
        assert!(world.dir.path().join("run").join(file).exists(), "{file}");
    }
    world.keeps_no_token();
}

/// The held-out rows are found with the tokenizer of the recipe's model.
#[test]
fn an_evaluation_of_another_model_downloads_no_weights_of_the_recipe() {
    let world = World::untrained();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny");
    let out = world.ft(&[
        "eval",
        "--recipe",
        "r.toml",
        "--json",
        "--model",
        tiny.to_str().unwrap(),
        "data.limit=10",
        "data.max_length=500",
        "data.eval_fraction=0.3",
    ]);
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && !text.contains("the model of the run"), "{text}");
    let found: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(found["rows"], 3, "{found}");
    let state = world.hub.state();
    let asked = |file: &str| state.log.iter().any(|(_, path, _)| path.ends_with(file));
    assert!(
        asked("tokenizer.json") && !asked("model.safetensors"),
        "{:?}",
        state.log
    );
}

#[test]
fn models_and_adapters_of_the_hub_are_used_by_their_ids() {
    let world = World::new();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny");
    let tiny = tiny.to_str().unwrap();
    // The adapter names its base, with the revision of the training.
    let config = std::fs::read_to_string(world.dir.path().join("run/final/adapter_config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(
        (&config["base_model_name_or_path"], &config["revision"]),
        (&MODEL.into(), &COMMIT.into())
    );

    world.good(&["merge", "--adapter", &format!("{ADAPTER}@{COMMIT}"), "--out", "by-id"]);
    world.good(&["merge", "--model", tiny, "--adapter", "run/final", "--out", "by-path"]);
    assert_eq!(world.weights("by-id"), world.weights("by-path"));
    world.good(&[
        "merge",
        "--model",
        MODEL,
        "--adapter",
        &format!("{ADAPTER}=0.5"),
        "--out",
        "half",
    ]);
    world.good(&[
        "merge",
        "--model",
        tiny,
        "--adapter",
        "run/final=0.5",
        "--out",
        "half-by-path",
    ]);
    assert_eq!(world.weights("half"), world.weights("half-by-path"));

    world.good(&[
        "quantize",
        "--model",
        &format!("{MODEL}@main"),
        "--to",
        "int8",
        "--out",
        "q",
    ]);
    world.good(&["quantize", "--model", tiny, "--to", "int8", "--out", "q-by-path"]);
    assert_eq!(world.weights("q"), world.weights("q-by-path"));

    world.good(&["export", ADAPTER, "--out", "copied"]);
    assert!(world.dir.path().join("copied/adapter_model.safetensors").is_file());
    world.good(&["export", MODEL, "--out", "exported", "--dtype", "f32"]);

    let shown = world.good(&["adapter", "show", ADAPTER, "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&shown).unwrap()["base"], MODEL);
    assert!(world.good(&["adapter", "diff", ADAPTER, "run"]).contains("identical"));
    world.good(&["adapter", "combine", &format!("{ADAPTER}=0.5"), "--out", "combined"]);

    let answer =
        |arguments: &[&str]| world.good(&[&["generate", "--prompt", "a", "--max-new-tokens", "4"], arguments].concat());
    assert_eq!(
        answer(&["--model", MODEL, "--adapter", ADAPTER]),
        answer(&["--model", tiny, "--adapter", "run/final"])
    );
    world.keeps_no_token();
}

/// Row R7.
#[test]
fn a_run_starts_from_an_adapter_and_a_teacher_of_the_hub() {
    let world = World::new();
    let given = format!("tune.lora.adapter={ADAPTER}");
    let said = |more: &[&str]| {
        let out = world.ft(&[&["train", "r.toml", &given][..], more].concat());
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{said}");
        said
    };
    let fresh = format!("the weights of {ADAPTER}; optimizer and data start anew");
    let told = said(&["train.max_steps=0", "train.output_dir=again"]);
    assert!(told.contains(&fresh), "{told}");
    let tensors =
        |name: &str| std::fs::read(world.dir.path().join(name).join("final/adapter_model.safetensors")).unwrap();
    assert_eq!(tensors("again"), tensors("run"));
    // Row R7: weights only; steps, rate and moments are those of a new run.
    let metrics = |name: &str, more: &[&str]| -> Vec<Value> {
        let out = format!("train.output_dir={name}");
        let base = ["train", "r.toml", "train.max_steps=2", "train.save_steps=1", &out];
        world.good(&[&base[..], more].concat());
        let text = std::fs::read_to_string(world.dir.path().join(name).join("metrics.jsonl")).unwrap();
        let lines = text.lines().map(|l| serde_json::from_str(l).unwrap());
        lines.filter(|l: &Value| !l["loss"].is_null()).collect()
    };
    let (first, on) = (metrics("first", &[]), metrics("on", &[&given]));
    for (a, b) in first.iter().zip(&on) {
        assert_eq!((&a["step"], &a["learning_rate"]), (&b["step"], &b["learning_rate"]));
    }
    assert_eq!((on.len(), &on[0]["step"]), (2, &1.into()));
    assert_ne!(on[0]["loss"], first[0]["loss"], "the weights are those of the adapter");
    let state = std::fs::read_to_string(world.dir.path().join("on/checkpoint-1/state.json")).unwrap();
    let state: Value = serde_json::from_str(&state).unwrap();
    assert!(state["optimizer_steps"].as_object().unwrap().values().all(|n| *n == 1));
    // A resume continues with the moments and the rows of the checkpoint.
    let told = said(&[
        "train.max_steps=3",
        "train.save_steps=1",
        "train.output_dir=on",
        "--resume",
    ]);
    assert!(!told.contains("start anew"), "{told}");
    let teacher = format!("distill.teacher={MODEL}@{COMMIT}");
    world.good(&[
        "train",
        "r.toml",
        "train.stage=distill",
        &teacher,
        "train.output_dir=distilled",
    ]);
    let resolved = std::fs::read_to_string(world.dir.path().join("distilled/resolved.toml")).unwrap();
    assert!(resolved.contains(COMMIT), "{resolved}");
}

#[test]
fn wrong_revisions_are_named() {
    let world = World::new();
    let out = world.ft(&[
        "merge",
        "--model",
        MODEL,
        "--adapter",
        &format!("{ADAPTER}@v9"),
        "--out",
        "x",
    ]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(
        out.status.code() == Some(1) && said.contains(ADAPTER) && said.contains("v9"),
        "{said}"
    );
    assert!(!world.dir.path().join("x").exists());
    let out = world.ft(&["train", "r.toml", "model.revision=v2"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(
        out.status.code() == Some(2) && said.contains("name different revisions"),
        "{said}"
    );
}
