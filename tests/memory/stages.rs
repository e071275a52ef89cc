//! Whole runs of every stage and every start of adapters, each in a process of its own: the peak that `ft train` measures
//! against its forecast.
//!
//! `cargo test --release --test memory stages -- --nocapture` prints the rows.

mod cases;

use self::cases::{CASES, Case, FEW, JUDGED, LARGE_VOCABULARY, NEW_TOKENS, PAIRS, ROWS};
use crate::counting::{LIVE, MOST};
use crate::{RESULT, case as this_case, child};
use ft::base::allocator;
use ft::formats::Config;
use ft::model::families;
use ft::recipe::{self, Dtype};
use ft::source::disk;
use ft::train::teacher_cache::cache;
use ft::train::{Resume, TrainOptions, train};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny")
}

/// The config of a model wide enough that the program itself is not what is measured. `large`: with a large vocabulary; `kind`, the
/// first word of the name of a case: layers of another kind.
fn config(large: bool, kind: &str) -> String {
    let mut config = Config::load(&tiny()).unwrap().raw;
    for (key, size) in [
        ("hidden_size", 384),
        ("intermediate_size", 1024),
        ("num_attention_heads", 6),
        ("num_key_value_heads", 2),
        ("head_dim", 64),
        ("max_position_embeddings", 2048),
    ] {
        config.insert(key.into(), json!(size));
    }
    if large {
        config.insert("vocab_size".into(), json!(LARGE_VOCABULARY));
        config.insert("tie_word_embeddings".into(), json!(false));
    }
    if kind == "latent" {
        config.insert("model_type".into(), json!("minicpm3"));
        for (key, size) in [
            ("num_key_value_heads", 6),
            ("q_lora_rank", 128),
            ("kv_lora_rank", 64),
            ("qk_nope_head_dim", 64),
            ("qk_rope_head_dim", 32),
            ("v_head_dim", 64),
        ] {
            config.insert(key.into(), json!(size));
        }
    }
    if kind == "streams" {
        for (key, value) in [
            ("model_type", json!("gemma3n_text")),
            ("num_kv_shared_layers", json!(1)),
            ("layer_types", json!(vec!["sliding_attention"; 4])),
            ("activation_sparsity_pattern", json!([0.9, 0.9, 0.0, 0.0])),
            ("vocab_size_per_layer_input", json!(896)),
            ("hidden_size_per_layer_input", json!(64)),
        ] {
            config.insert(key.into(), value);
        }
    }
    if kind == "experts" {
        config.insert("model_type".into(), json!("qwen3_moe"));
        for (key, size) in [
            ("num_experts", 8),
            ("num_experts_per_tok", 2),
            ("moe_intermediate_size", 512),
        ] {
            config.insert(key.into(), json!(size));
        }
    }
    let more = match kind {
        "deltas" => json!({
            "model_type": "qwen3_5_text", "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 64,
            "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "linear_attention",
            "linear_attention", "full_attention"]}),
        "convolutions" => json!({
            "model_type": "lfm2", "norm_eps": 1e-5, "block_auto_adjust_ff_dim": false, "conv_L_cache": 3, "conv_bias": true,
            "layer_types": ["conv", "conv", "full_attention", "conv"]}),
        "sinks" => json!({
            "model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256, "sliding_window": 32,
            "attention_bias": true, "tie_word_embeddings": false,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}),
        _ => json!({}),
    };
    config.extend(more.as_object().cloned().unwrap_or_default());
    Value::Object(config).to_string()
}

/// A model with random weights and the tokenizer of the tiny one.
fn model(dir: &Path, config: &str) {
    fs::create_dir_all(dir).unwrap();
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ] {
        fs::copy(tiny().join(name), dir.join(name)).unwrap();
    }
    fs::write(dir.join("config.json"), config).unwrap();
    let spec = families::read(&Config::load(dir).unwrap()).unwrap();
    let file = dir.join("model.safetensors");
    disk::write_random(&file, &spec.params(), 3, 0.05, 1.0, Dtype::F32).unwrap();
}

/// The rows of a case, in the directory of the run.
fn rows(case: &Case, dir: &Path) -> String {
    let world = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/world");
    let text = |name: &str| fs::read_to_string(world.join(name)).unwrap();
    let lines = match case.rows {
        FEW => text(ROWS).lines().take(18).map(str::to_string).collect::<Vec<_>>(),
        JUDGED => text(PAIRS)
            .lines()
            .take(160)
            .enumerate()
            .map(|(i, line)| {
                let row: Value = serde_json::from_str(line).unwrap();
                let side = if i % 2 == 0 { "chosen" } else { "rejected" };
                json!({"prompt": row["prompt"], "completion": row[side], "label": i % 2 == 0}).to_string()
            })
            .collect(),
        // As many as a run of two steps has a use for: some stages look at all of them first.
        name => text(name).lines().take(160).map(str::to_string).collect(),
    };
    let file = dir.join(case.rows);
    fs::write(&file, lines.join("\n")).unwrap();
    file.display().to_string()
}

/// The recipe of a case, with other settings if there are.
fn recipe_of(case: &Case, dir: &Path, settings: &[&str]) -> recipe::LoadedRecipe {
    let text = format!(
        "[model]\npath = \"model\"\ndtype = \"f32\"\n[data]\ntrain = \"{}\"\nmax_length = 256\n{}\
         [optimizer]\nlearning_rate = 1e-5\n[train]\nstage = \"{}\"\nmax_steps = 2\ngradient_accumulation_steps = 1\n\
         save_steps = 0\noutput_dir = \"run\"\n",
        rows(case, dir),
        case.tables,
        case.stage
    );
    let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
    recipe::parse(&text, "r.toml", &settings).unwrap()
}

/// A whole run, in a process of its own.
fn measure(case: &Case, dir: &Path) -> Value {
    allocator::retain_freed();
    std::env::set_current_dir(dir).unwrap();
    let loaded = recipe_of(case, dir, case.settings);
    let before = LIVE.load(Relaxed);
    let outcome = train(&loaded, &TrainOptions::default()).unwrap();
    let process = outcome.plan.lines.iter().find(|l| l.key == "process").unwrap().bytes;
    json!({
        "forecast": outcome.plan.peak_bytes,
        "process": process,
        "resident": outcome.peak_memory_bytes,
        "allocated": MOST.load(Relaxed) - before,
        "moment": outcome.plan.peak_moment,
        "table": outcome.plan.table(),
    })
}

#[test]
#[ignore = "a process of its own for one run"]
fn run() {
    let Some(text) = this_case() else { return };
    let (name, dir) = text.split_once('|').unwrap();
    let case = CASES.iter().find(|c| c.name == name).unwrap();
    println!("{RESULT}{}", measure(case, Path::new(dir)));
}

/// The outputs of a teacher, for the case that learns from them.
#[test]
#[ignore = "a process of its own"]
fn teaches() {
    let Some(text) = this_case() else { return };
    let (name, dir) = text.split_once('|').unwrap();
    let case = CASES.iter().find(|c| c.name == name).unwrap();
    std::env::set_current_dir(dir).unwrap();
    let loaded = recipe_of(case, Path::new(dir), &["distill.teacher=model", "data.packing=false"]);
    let report = cache(&loaded.recipe, Path::new("cache"), &mut |_| {}).unwrap();
    println!("{RESULT}{}", json!({"tokens": report.tokens}));
}

/// Runs the cases and prints a row for each; those whose forecast is more than a tenth off fail.
fn compare(cases: &[Case]) {
    let mut wrong = Vec::new();
    let (models, mut configs) = (tempfile::tempdir().unwrap(), Vec::new());
    for case in cases {
        let dir = tempfile::tempdir().unwrap();
        let kind = case.name.split([',', ' ']).next().unwrap_or_default();
        let config = config(case.settings.contains(&NEW_TOKENS), kind);
        // Cases with the same model share its files.
        let number = configs
            .iter()
            .position(|known| *known == config)
            .unwrap_or(configs.len());
        let files = models.path().join(number.to_string());
        if number == configs.len() {
            model(&files, &config);
            configs.push(config);
        }
        std::os::unix::fs::symlink(&files, dir.path().join("model")).unwrap();
        let id = format!("{}|{}", case.name, dir.path().display());
        if case.settings.contains(&"distill.teacher_cache=cache") {
            alone("stages::teaches", &id).unwrap_or_else(|said| panic!("{said}"));
        }
        // Which thread allocates a small block first depends on time, and the peak with it: 0.5 % between runs of one case.
        let off = |result: &Value| result["forecast"].as_f64().unwrap() / result["resident"].as_f64().unwrap() - 1.0;
        let measured = || {
            let _ = fs::remove_dir_all(dir.path().join("run"));
            alone("stages::run", &id)
        };
        let first = measured();
        let again = first.as_ref().is_ok_and(|result| off(result).abs() > 0.1);
        let result = match if again { measured() } else { first } {
            Ok(result) => result,
            Err(said) => {
                wrong.push(format!("{}\n{said}", case.name));
                continue;
            }
        };
        let number = |key: &str| result[key].as_f64().unwrap();
        let off = off(&result);
        let own = number("forecast") - number("process");
        let mib = |bytes: f64| bytes / (1 << 20) as f64;
        let row = format!(
            "{}: resident {:.1} MiB, forecast {:.1} MiB ({:+.1} %); allocator {:.1}, forecast without the program {:.1}; {}",
            case.name,
            mib(number("resident")),
            mib(number("forecast")),
            100.0 * off,
            mib(number("allocated")),
            mib(own),
            result["moment"].as_str().unwrap(),
        );
        println!("{row}");
        if off.abs() > 0.1 {
            wrong.push(format!("{row}\n{}", result["table"].as_str().unwrap()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The run that passes its budget, with `more` settings.
fn budgeted(more: &[&str]) -> recipe::LoadedRecipe {
    let text = format!(
        "[model]\npath = \"model\"\n[data]\ntrain = \"{}\"\n[tune]\nmethod = \"lora\"\n[train]\n\
         max_steps = 100000\nsave_steps = 0\noutput_dir = \"run\"\ngradient_accumulation_steps = 1\n\
         [memory]\nbudget = \"400MiB\"\n",
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("assets/world")
            .join(ROWS)
            .display()
    );
    let more: Vec<String> = more.iter().map(|s| s.to_string()).collect();
    recipe::parse(&text, "r.toml", &more).unwrap()
}

/// Memory that no plan can know of is taken in the middle of a run: it stops and saves its state.
#[test]
#[ignore = "a process of its own"]
fn above_the_budget() {
    let Some(dir) = this_case() else { return };
    std::env::set_current_dir(dir).unwrap();
    let taken = std::thread::spawn(|| {
        let steps = || {
            fs::read_to_string("run/metrics.jsonl")
                .unwrap_or_default()
                .lines()
                .count()
        };
        while steps() < 2 {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        // Every page is written to, so that it is there.
        vec![1u8; 500 << 20]
    });
    let error = train(&budgeted(&[]), &TrainOptions::default())
        .err()
        .unwrap()
        .to_string();
    assert!(taken.join().unwrap().iter().all(|b| *b == 1));
    for word in [
        "memory than its budget",
        "measured peak",
        "forecast",
        "440.0 MiB",
        "--resume memory.budget=",
    ] {
        assert!(error.contains(word), "`{word}` is not in {error}");
    }
    let events = fs::read_to_string("run/events.jsonl").unwrap();
    assert!(events.lines().last().unwrap().contains("memory budget"), "{events}");
    let budget = error.split("memory.budget=").nth(1).unwrap().split('`').next().unwrap();
    println!("{RESULT}{}", json!({"budget": budget}));
}

/// A process that does not hold that memory goes on from there.
#[test]
#[ignore = "a process of its own"]
fn below_the_next_budget() {
    let Some(case) = this_case() else { return };
    let [dir, budget, steps] = case.split('|').collect::<Vec<_>>()[..] else {
        panic!("{case}")
    };
    std::env::set_current_dir(dir).unwrap();
    let resume = TrainOptions {
        resume: Resume::Newest,
        ..TrainOptions::default()
    };
    let settings = [format!("memory.budget={budget}"), format!("train.max_steps={steps}")];
    let outcome = train(&budgeted(&settings.each_ref().map(|s| &s[..])), &resume).unwrap();
    assert!(outcome.final_dir.is_some());
    println!("{RESULT}{}", json!({}));
}

/// As `child`, with a result in JSON.
fn alone(test: &str, case: &str) -> Result<Value, String> {
    child(test, case).map(|result| serde_json::from_str(&result).unwrap())
}

/// Row S5.
#[test]
fn a_run_that_passes_its_budget_stops_and_saves_its_state() {
    let dir = tempfile::tempdir().unwrap();
    model(&dir.path().join("model"), &config(false, ""));
    let at = dir.path().display();
    let stopped = alone("stages::above_the_budget", &at.to_string()).unwrap_or_else(|said| panic!("{said}"));
    let checkpoints = fs::read_dir(dir.path().join("run")).unwrap().filter_map(|e| {
        let name = e.unwrap().file_name().to_string_lossy().into_owned();
        name.strip_prefix("checkpoint-")?.parse::<u64>().ok()
    });
    let step = checkpoints.max().expect("the state is saved");
    // With the budget that the hint names the run goes on: one step more, and the end.
    let budget = stopped["budget"].as_str().unwrap();
    let case = format!("{at}|{budget}|{}", step + 1);
    alone("stages::below_the_next_budget", &case).unwrap_or_else(|said| panic!("{said}"));
    let metrics = fs::read_to_string(dir.path().join("run/metrics.jsonl")).unwrap();
    assert_eq!(metrics.lines().count() as u64, step + 1, "{metrics}");
}

/// Row S9.
#[test]
fn the_peak_of_a_run_is_within_a_tenth_of_the_forecast() {
    compare(&CASES);
}
