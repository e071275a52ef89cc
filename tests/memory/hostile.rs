//! A `config.json` of a few bytes must not ask for memory that the weights do not account for: every number of the tiny
//! model's config is changed to absurd ones, with the weights and without them.

use crate::counting::{LIMIT, LIVE, MOST};
use crate::{RESULT, case};
use candle_core::Device;
use ft::commands::plan::plan;
use ft::recipe::{self, Recipe};
use ft::setup::ModelDir;
use ft::setup::vocabulary::TextChanges;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// The memory that a case may take: the tiny model has 1.7 MiB of weights.
const MOST_BYTES: usize = 64 << 20;
const LONGEST: Duration = Duration::from_secs(20);
const LONGEST_LIST: usize = 50_000;

/// `length`: of lists. Reading a long one takes more than all else of a case.
fn absurd(length: usize) -> Vec<Value> {
    let long = |value: Value| Value::Array(vec![value; length]);
    vec![
        json!(0),
        json!(-1),
        json!(1),
        json!(4097),
        json!(1_000_000_000u64),
        json!(1u64 << 31),
        json!(1u64 << 32),
        json!(u64::MAX),
        json!(1e300),
        json!(-1e300),
        json!(0.5),
        json!("9"),
        long(json!("full_attention")),
        long(json!(1e9)),
        json!({"rope_type": "yarn", "factor": 1e300, "original_max_position_embeddings": 1e300}),
        json!({"rope_type": "llama3", "factor": 1e9, "low_freq_factor": 1e300, "high_freq_factor": 1e-300,
            "original_max_position_embeddings": 4294967296u64}),
    ]
}

/// Every key with a number, and those that some family reads.
fn keys(config: &Map<String, Value>) -> Vec<String> {
    let own = config.iter().filter(|(_, v)| v.is_number()).map(|(k, _)| k.clone());
    let more = [
        "head_dim",
        "sliding_window",
        "max_window_layers",
        "layer_types",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "query_pre_attn_scalar",
        "final_logit_softcapping",
        "attn_logit_softcapping",
        "sliding_window_pattern",
        "rope_local_base_freq",
        "global_head_dim",
        "per_layer_config",
        "hidden_size_per_layer_input",
        "vocab_size_per_layer_input",
        "num_kv_shared_layers",
        "pad_token_id",
        "bos_token_id",
    ];
    let mut all: Vec<String> = own.chain(more.map(str::to_string)).collect();
    all.sort();
    all.dedup();
    all
}

/// One recipe for each method.
fn recipes(dir: &Path) -> [Recipe; 3] {
    let path = dir.display();
    ["block", "full", "lora"].map(|method| {
        let text = format!(
            "[model]\npath = \"{path}\"\ndevice = \"cpu\"\n[data]\ntrain = \"{path}/none.jsonl\"\nmax_length = 512\n\
             [tune]\nmethod = \"{method}\"\n[memory]\nbudget = \"1TiB\"\n"
        );
        recipe::parse(&text, "r.toml", &[]).unwrap().recipe
    })
}

/// Opens a model. Its result does not matter: only memory, time and panics count.
fn open(dir: &Path, recipe: &Recipe) {
    let path = dir.to_string_lossy().into_owned();
    if let Ok(described) = ModelDir::open(&path, "main", &TextChanges::default()) {
        let _ = described.check_weights(ft::recipe::ModelInit::Pretrained);
        let _ = described.infer(None, None, &Device::Cpu);
    }
    let _ = plan(recipe, None);
}

fn measured(dir: &Path, recipe: &Recipe, what: &str) {
    let (before, started) = (LIVE.load(Relaxed), Instant::now());
    MOST.store(before, Relaxed);
    // Beyond this the allocation fails, and the process ends.
    println!("{what}");
    LIMIT.store(before + 4 * MOST_BYTES, Relaxed);
    open(dir, recipe);
    LIMIT.store(usize::MAX, Relaxed);
    let (most, took) = (MOST.load(Relaxed) - before, started.elapsed());
    assert!(most < MOST_BYTES, "{what}: {most} bytes");
    assert!(took < LONGEST, "{what}: {took:?}");
}

/// As in tests/run/turn.rs.
fn turn() -> usize {
    std::env::var("FT_TEST_TURN").map_or(0, |n| n.parse().expect("FT_TEST_TURN is a number"))
}

fn mutate(families: &[&str]) -> usize {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny");
    let root = tempfile::tempdir().unwrap();
    let (with, without) = (root.path().join("with"), root.path().join("without"));
    for dir in [&with, &without] {
        fs::create_dir_all(dir).unwrap();
        for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
            fs::copy(tiny.join(name), dir.join(name)).unwrap();
        }
    }
    fs::copy(tiny.join("model.safetensors"), with.join("model.safetensors")).unwrap();
    let text = fs::read_to_string(tiny.join("config.json")).unwrap();
    let Value::Object(config) = serde_json::from_str(&text).unwrap() else {
        panic!("the config is an object")
    };
    // Each case plans one method, with weights or without them. Every value of every key is used with all methods and both ways, each
    // in other families; `FT_TEST_TURN` exchanges the families. In the first family each value is used both ways.
    let turn = turn();
    let methods = [recipes(&with), recipes(&without)];
    let mut count = 0;
    for (number, family) in families.iter().enumerate() {
        let length = if number == 0 { LONGEST_LIST } else { LONGEST_LIST / 20 };
        for key in keys(&config) {
            for (position, value) in absurd(length).into_iter().enumerate() {
                let mut changed = config.clone();
                changed.insert("model_type".into(), json!(family));
                changed.insert("use_sliding_window".into(), json!(true));
                changed.insert(key.clone(), value.clone());
                let shown: String = value.to_string().chars().take(40).collect();
                let places = [&with, &without].into_iter().zip(&methods).enumerate();
                for (place, (dir, recipes)) in places {
                    if number > 0 && (position + number + turn) % 2 != place {
                        continue;
                    }
                    let recipe = &recipes[(position + number / 2) % recipes.len()];
                    fs::write(dir.join("config.json"), Value::Object(changed.clone()).to_string()).unwrap();
                    measured(dir, recipe, &format!("{family} {key} {shown} in {}", dir.display()));
                    count += 1;
                }
            }
        }
    }
    // Numbers of the files beside it.
    fs::write(with.join("config.json"), &text).unwrap();
    for value in absurd(LONGEST_LIST) {
        for key in [
            "eos_token_id",
            "pad_token_id",
            "bos_token_id",
            "max_new_tokens",
            "max_length",
            "top_k",
        ] {
            fs::write(with.join("generation_config.json"), json!({key: value}).to_string()).unwrap();
            measured(&with, &methods[0][0], &format!("generation_config {key}"));
            count += 1;
        }
        fs::copy(tiny.join("generation_config.json"), with.join("generation_config.json")).unwrap();
        let text = fs::read_to_string(tiny.join("tokenizer.json")).unwrap();
        let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
        for at in ["/added_tokens/0/id", "/truncation", "/padding", "/model/vocab/a"] {
            let mut changed = tokenizer.clone();
            match changed.pointer_mut(at) {
                Some(place) => *place = value.clone(),
                None => continue,
            }
            fs::write(with.join("tokenizer.json"), changed.to_string()).unwrap();
            measured(
                &with,
                &methods[0][0],
                &format!(
                    "tokenizer {at} {}",
                    value.to_string().chars().take(40).collect::<String>()
                ),
            );
            count += 1;
        }
        tokenizer["truncation"] =
            json!({"max_length": value, "strategy": "LongestFirst", "stride": 0, "direction": "Right"});
        fs::write(with.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        measured(&with, &methods[0][0], "tokenizer truncation");
        fs::write(with.join("tokenizer.json"), text).unwrap();
    }
    count
}

#[test]
#[ignore = "a process of its own: a broken case ends it"]
fn child() {
    let Some(families) = case() else { return };
    println!("{RESULT}{}", mutate(&families.split(',').collect::<Vec<_>>()));
}

fn all_of(families: &str) {
    let count: usize = match crate::child("hostile::child", families) {
        Ok(count) => count.parse().unwrap(),
        Err(said) => {
            let last: Vec<&str> = said.lines().rev().take(8).collect();
            panic!("FT_TEST_TURN={}: {last:?}", turn())
        }
    };
    assert!(count > 7000, "{count} cases");
}

/// Row F8.
/// A family of each kind.
#[test]
fn numbers_of_a_config_take_no_memory_that_the_weights_do_not_have() {
    all_of(
        "llama,mistral,qwen2,qwen3,gemma2,gemma3_text,gemma3n_text,gemma4_text_shared,phi3,cohere_qk_norm,starcoder2,deepseek_v3,lfm2",
    );
}
