//! The plan of a model in the hub cache.

use super::{Hub, ID};
use ft::hub::resolve_with;
use serde_json::Value;
use std::path::Path;

/// A model in the cache has the same plan as the same files in a directory: its tokenizer and weights are found.
#[test]
fn a_cached_model_is_planned_like_its_directory() {
    let (hub, cache) = (Hub::start(), tempfile::tempdir().unwrap());
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = std::fs::read_dir(root.join("assets/tiny")).unwrap().map(|entry| {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        (name, std::fs::read(path).unwrap())
    });
    hub.put(&format!("models/{ID}"), files.collect());
    resolve_with(&hub.settings(cache.path()), ID, "main").unwrap();
    let recipe = cache.path().join("r.toml");
    let rows = root.join("assets/world/train.jsonl");
    let text = format!(
        "[model]\npath = \"{ID}\"\ndtype = \"f32\"\n[data]\ntrain = \"{}\"\nmax_length = 256\n\
         [tune]\nmethod = \"lora\"\n[memory]\nfrozen_weights = \"int8\"\nbudget = \"4GiB\"\n",
        rows.display()
    );
    std::fs::write(&recipe, text).unwrap();
    let ft = |arguments: &[&str]| {
        let out = std::process::Command::new(env!("CARGO_BIN_EXE_ft"))
            .args(arguments)
            .current_dir(cache.path())
            .env("HF_HUB_CACHE", cache.path())
            .env("HF_HUB_OFFLINE", "1")
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        out
    };
    let of = |more: &[&str]| -> Value {
        let out = ft(&[&["plan", "--recipe", "r.toml", "--json"], more].concat());
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!said.contains("rows are not available"), "{said}");
        serde_json::from_slice(&out.stdout).unwrap()
    };
    // The memory of the program itself differs from start to start.
    let own = |plan: &Value| plan["peak_bytes"].as_u64().unwrap() - plan["process"].as_u64().unwrap();
    let directory = format!("model.path={}", root.join("assets/tiny").display());
    let (cached, local) = (of(&[]), of(&[&directory]));
    let parts = [
        "weights",
        "layer_work",
        "logits",
        "scratch",
        "adapters",
        "optimizer",
        "data",
    ];
    for part in parts {
        assert_eq!(cached[part], local[part], "{part}");
    }
    assert_eq!(own(&cached), own(&local));
    // A training run has the same plan, with new tokens too.
    for (name, more) in [("run", "train.seed=1"), ("tokens", "data.new_tokens=[\"<new>\"]")] {
        let arguments = ["train.max_steps=1", more, &format!("train.output_dir={name}")];
        ft(&[&["train", "--recipe", "r.toml"], &arguments[..]].concat());
        let text = std::fs::read_to_string(cache.path().join(name).join("plan.json")).unwrap();
        let run: Value = serde_json::from_str(&text).unwrap();
        let short = of(&arguments);
        for part in parts {
            assert_eq!(short[part], run[part], "{name} {part}");
        }
    }
}

/// Weights that cannot be read are named by the plan, as training refuses them; a plan needs no weights.
#[test]
fn weights_that_cannot_be_read_are_named_by_the_plan() {
    let dir = tempfile::tempdir().unwrap();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny");
    for file in [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ] {
        std::fs::copy(tiny.join(file), dir.path().join(file)).unwrap();
    }
    let plan = || {
        let out = std::process::Command::new(env!("CARGO_BIN_EXE_ft"))
            .args(["plan", "--recipe", "recipes/quickstart.toml"])
            .arg(format!("model.path={}", dir.path().display()))
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{said}");
        said
    };
    assert!(!plan().contains("would reject this model"));
    let weights = std::fs::read(tiny.join("model.safetensors")).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), &weights[..weights.len() / 2]).unwrap();
    let said = plan();
    assert!(
        said.contains("would reject this model") && said.contains("model.safetensors"),
        "{said}"
    );
}
