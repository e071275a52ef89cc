//! Invalid inputs: a clear error, a hint, exit code 1 or 2, no partial files.

use crate::bench::{Bench, files, said};
use std::fs;

/// Asserts that `ft train` fails with `code`, that the message has all `words`, and that no run directory appears.
fn refused(bench: &Bench, more: &[&str], code: i32, words: &[&str]) {
    let mut arguments = vec!["train", "--recipe", "r.toml", "train.output_dir=out"];
    arguments.extend(more);
    let out = bench.ft(&arguments);
    let said = said(&out);
    assert_eq!(out.status.code(), Some(code), "{said}");
    for word in words {
        assert!(said.contains(word), "`{word}` is not in:\n{said}");
    }
    assert!(out.stdout.is_empty());
    assert!(
        !bench.path("out/final").exists() && !bench.path("out/metrics.jsonl").exists(),
        "{said}"
    );
}

fn weights(bench: &Bench) -> std::path::PathBuf {
    bench.path("model/model.safetensors")
}

/// Splits the model's single file into two shards with an index.
fn shard(bench: &Bench, second: &str) {
    fs::rename(weights(bench), bench.path("model/model-00001-of-00002.safetensors")).unwrap();
    let index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": {
        "model.norm.weight": "model-00001-of-00002.safetensors", "lm_head.weight": second}});
    fs::write(bench.path("model/model.safetensors.index.json"), index.to_string()).unwrap();
}

/// Row F7.
#[test]
fn weights_that_lie() {
    let bench = Bench::new();
    shard(&bench, "model-00002-of-00002.safetensors");
    refused(&bench, &[], 1, &["model-00002-of-00002.safetensors"]);

    let bench = Bench::new();
    shard(&bench, "../model-00002-of-00002.safetensors");
    refused(&bench, &[], 1, &["../model-00002-of-00002.safetensors"]);

    let bench = Bench::new();
    let bytes = fs::read(weights(&bench)).unwrap();
    fs::write(weights(&bench), &bytes[..bytes.len() / 2]).unwrap();
    refused(&bench, &[], 1, &["model.safetensors", "truncated"]);

    let bench = Bench::new();
    fs::write(
        weights(&bench),
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    )
    .unwrap();
    refused(&bench, &[], 1, &["Git LFS", "hint:"]);

    let bench = Bench::new();
    fs::rename(weights(&bench), bench.path("model/pytorch_model.bin")).unwrap();
    refused(&bench, &[], 1, &["pickle", "hint:"]);
}

/// Row F9: one error has a line for a missing tensor, one of another shape, and one that the model does not have.
#[test]
fn all_differences_of_weights_and_config_stand_in_one_error() {
    let bench = Bench::new();
    let bytes = fs::read(weights(&bench)).unwrap();
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&bytes[8..end]).unwrap();
    let of = |name: &str| format!("model.layers.0.{name}.weight");
    let all = header.as_object_mut().unwrap();
    let moved = all.remove(&of("post_attention_layernorm")).unwrap();
    all.insert(of("unknown"), moved);
    let norm = &mut all[&of("input_layernorm")]["shape"];
    let n = norm[0].as_u64().unwrap();
    *norm = serde_json::json!([2, n / 2]);
    let header = header.to_string();
    let changed = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &bytes[end..]].concat();
    fs::write(weights(&bench), changed).unwrap();
    let shape = format!("{}: found [2, {}], expected [{n}]", of("input_layernorm"), n / 2);
    refused(
        &bench,
        &[],
        1,
        &[
            "config.json and the weights are inconsistent",
            "3 differences",
            &format!("{}: missing", of("post_attention_layernorm")),
            &shape,
            &format!("{}: not a weight of this model", of("unknown")),
        ],
    );
}

/// Row W6.
/// Text of untrusted files in messages is escaped for the terminal.
#[test]
fn nothing_from_a_file_acts_on_the_terminal() {
    let evil = "\\u001b]0;mine\\u0007\\u001b[2J\\u009b31m";
    let config = |bench: &Bench, key: &str| {
        let path = bench.path("model/config.json");
        let text = fs::read_to_string(&path).unwrap();
        let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
        value[key] = serde_json::from_str(&format!("\"x{evil}\"")).unwrap();
        fs::write(&path, value.to_string()).unwrap();
    };
    let bench = Bench::new();
    let mut said_all = Vec::new();
    for key in ["model_type", "hidden_act", "quantization_config", "num_attention_heads"] {
        let bench = Bench::new();
        config(&bench, key);
        said_all.push(bench.ft(&["train", "--recipe", "r.toml", "train.output_dir=out"]));
        said_all.push(bench.ft(&["plan", "--recipe", "r.toml"]));
        said_all.push(bench.ft(&["generate", "--model", "model", "--prompt", "x"]));
    }
    let escape = "\u{1b}[2J";
    fs::write(bench.path(&format!("{escape}.jsonl")), "{\"messages\": 1}\n").unwrap();
    said_all.push(bench.ft(&["train", "--recipe", "r.toml", &format!("data.train={escape}.jsonl")]));
    said_all.push(bench.ft(&["eval", "--model", escape, "--data", "rows.jsonl"]));
    for out in said_all {
        let said = said(&out);
        assert!(!out.status.success() && said.starts_with("error:"), "{said:?}");
        assert!(!said.chars().any(|c| c.is_control() && c != '\n'), "{said:?}");
    }
}

/// Row F8.
#[test]
fn configs_that_ft_cannot_compute() {
    for (key, value, words) in [
        ("model_type", "\"mamba2\"", &["mamba2", "llama"][..]),
        ("hidden_act", "\"relu\"", &["relu"][..]),
        (
            "rope_scaling",
            "{\"rope_type\": \"xpos\", \"factor\": 2.0}",
            &["xpos"][..],
        ),
        ("attention_dropout", "0.1", &["attention_dropout"][..]),
        (
            "quantization_config",
            "{\"quant_method\": \"gptq\"}",
            &["quantization_config"][..],
        ),
        ("num_local_experts", "8", &["num_local_experts"][..]),
        ("num_attention_heads", "-1", &["num_attention_heads"][..]),
        ("num_hidden_layers", "2", &["config.json"][..]),
        (
            "num_hidden_layers",
            "1000000000",
            &["num_hidden_layers", "at most 4"][..],
        ),
        ("head_dim", "4294967296", &["head_dim", "64"][..]),
        ("vocab_size", "64", &["vocab_size", "320"][..]),
    ] {
        let bench = Bench::new();
        let path = bench.path("model/config.json");
        let mut config: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        if key == "rope_scaling" {
            config.as_object_mut().unwrap().remove("rope_parameters");
        }
        config[key] = serde_json::from_str(value).unwrap();
        fs::write(&path, config.to_string()).unwrap();
        refused(&bench, &[], 1, words);
    }
}

/// Row F8.
#[test]
fn names_of_code_in_a_config_are_ignored_with_a_warning() {
    let bench = Bench::new();
    let path = bench.path("model/config.json");
    let mut config: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    for key in ["auto_map", "model_file", "_attn_implementation_internal"] {
        config[key] = "evil.py".into();
    }
    fs::write(&path, config.to_string()).unwrap();
    fs::write(bench.path("model/evil.py"), "open('ran', 'w')").unwrap();
    let out = bench.ft(&[
        "train",
        "--recipe",
        "r.toml",
        "train.output_dir=out",
        "train.max_steps=1",
    ]);
    let said = said(&out);
    let named = "`auto_map`, `model_file`, `_attn_implementation_internal`";
    assert!(out.status.success() && said.contains(named), "{said}");
    assert!(!bench.path("ran").exists());
}

/// Rows D1, D2.
#[test]
fn rows_that_are_broken() {
    let bench = Bench::new();
    let rows = fs::read_to_string(bench.path("rows.jsonl")).unwrap();
    let mut lines: Vec<&str> = rows.lines().collect();
    lines[6] = "{\"messages\": [{\"role\": \"user\"";
    fs::write(bench.path("rows.jsonl"), lines.join("\n")).unwrap();
    refused(&bench, &[], 1, &["rows.jsonl:7", "hint:"]);

    fs::write(bench.path("rows.jsonl"), "{\"question\": \"a\", \"reply\": \"b\"}\n").unwrap();
    refused(&bench, &[], 1, &["rows.jsonl:1"]);

    fs::write(bench.path("rows.jsonl"), "").unwrap();
    refused(&bench, &[], 1, &["rows.jsonl", "no rows"]);

    let bench = Bench::new();
    refused(&bench, &["data.max_length=4"], 1, &["nothing", "max_length"]);
    refused(&bench, &["data.train=none.jsonl"], 1, &["none.jsonl"]);
}

/// Row D6.
#[test]
fn templates_that_are_missing() {
    let bench = Bench::new();
    fs::remove_file(bench.path("model/chat_template.jinja")).unwrap();
    let config = bench.path("model/tokenizer_config.json");
    let mut map: serde_json::Value = serde_json::from_str(&fs::read_to_string(&config).unwrap()).unwrap();
    map.as_object_mut().unwrap().remove("chat_template");
    fs::write(&config, map.to_string()).unwrap();
    refused(
        &bench,
        &[],
        2,
        &["chat template", "data.chat_template", "chatml, qwen2.5"],
    );
}

#[test]
fn a_template_that_does_not_end_is_named() {
    let bench = Bench::new();
    let endless = "{% for i in range(100000) %}{% for j in range(100000) %}{{ i }}{% endfor %}{% endfor %}";
    fs::write(bench.path("model/chat_template.jinja"), endless).unwrap();
    let started = std::time::Instant::now();
    refused(&bench, &[], 1, &["template"]);
    assert!(started.elapsed().as_secs() < 30, "an endless template is stopped");
}

/// The numbers of a safetensors file whose tensors are f32.
fn floats(bytes: &[u8]) -> Vec<f32> {
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let values = bytes[8 + header..].chunks_exact(4);
    values.map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect()
}

/// Row S1.
#[test]
fn numbers_that_are_not_finite_stop_the_run_and_save_nothing() {
    let bench = Bench::new();
    let arguments = [
        "train",
        "--recipe",
        "r.toml",
        "train.output_dir=out",
        "optimizer.learning_rate=1e30",
        "train.max_steps=20",
        "train.save_steps=1",
        "train.save_total_limit=20",
        "schedule.name=constant",
    ];
    let out = bench.ft(&arguments);
    assert_eq!(out.status.code(), Some(1), "{}", said(&out));
    assert!(
        said(&out).contains("not finite") && said(&out).contains("learning_rate"),
        "{}",
        said(&out)
    );
    assert!(!bench.path("out/final").exists());
    let events = fs::read_to_string(bench.path("out/events.jsonl")).unwrap();
    assert!(events.lines().last().unwrap().contains("\"stop\""), "{events}");
    // The step that failed is not saved, and what was saved before is whole and finite.
    let failed = bench.steps("out").len() + 1;
    assert!(!bench.path(&format!("out/checkpoint-{failed}")).exists());
    assert!(bench.ft(&["runs", "verify", "out"]).status.success());
    for (name, bytes) in files(&bench.path("out"))
        .iter()
        .filter(|f| f.0.ends_with(".safetensors"))
    {
        let values = floats(bytes);
        assert!(!values.is_empty() && values.iter().all(|x| x.is_finite()), "{name}");
    }
}

/// Row A2.
#[test]
fn adapters_that_do_not_fit() {
    let bench = Bench::new();
    refused(
        &bench,
        &["tune.method=lora", "tune.lora.target_modules=[\"q_prj\"]"],
        1,
        &["q_prj", "q_proj"],
    );
    bench.train(&[
        "tune.method=lora",
        "tune.lora.r=4",
        "train.max_steps=1",
        "train.output_dir=lora",
    ]);
    let adapter = bench.path("lora/final");
    fs::rename(
        adapter.join("adapter_model.safetensors"),
        adapter.join("adapter_model.bin"),
    )
    .unwrap();
    refused(
        &bench,
        &["tune.method=lora", "tune.lora.adapter=lora/final"],
        1,
        &["pickle"],
    );
}
