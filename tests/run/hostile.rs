//! Invalid inputs: a clear error, a hint, exit code 1 or 2, no partial files.

use crate::bench::{Bench, files, said};
use std::fs;
use std::io::{Seek, SeekFrom, Write};

/// Asserts that `ft train` fails with `code`, that the message has all `words`, and that no run directory appears. Returns the message.
fn refused(bench: &Bench, more: &[&str], code: i32, words: &[&str]) -> String {
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
    said
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

    // A line of 100 MB, most of it a hole of the file: ft names the line and shows its begin.
    let mut file = fs::File::create(bench.path("rows.jsonl")).unwrap();
    file.write_all(b"{\"text\": \"one\"}\n{\"text\": \"two").unwrap();
    file.seek(SeekFrom::Current(100 << 20)).unwrap();
    file.write_all(b"\"}\n{\"text\": \"three\"}\n").unwrap();
    let words = [
        "the row is too long",
        "rows.jsonl:2",
        "in one line: {\"text\": \"two",
        "hint:",
    ];
    let said = refused(&bench, &[], 1, &words);
    assert!(said.len() < 1000, "{} bytes: {said}", said.len());

    // As a row of an array.
    let mut file = fs::File::create(bench.path("rows.json")).unwrap();
    file.write_all(b"[{\"text\": \"one\"}, {\"text\": \"two").unwrap();
    file.write_all(&vec![b'a'; 65 << 20]).unwrap();
    file.write_all(b"\"}]").unwrap();
    let words = [
        "the row is too long",
        "rows.json, row 2",
        "at most 67108864 bytes",
        "hint:",
    ];
    refused(&bench, &["data.train=rows.json"], 1, &words);

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

/// Runs into `out`, which must fail. Returns what it says, the last event, and whether the state after step `step` is saved.
fn fails(bench: &Bench, settings: &[&str], step: u64) -> (String, serde_json::Value, bool) {
    let common = [
        "train",
        "--recipe",
        "r.toml",
        "--overwrite",
        "train.output_dir=out",
        "train.max_steps=4",
        "train.save_steps=10",
        "tune.method=full",
    ];
    let out = bench.ft(&[&common[..], settings].concat());
    let said = said(&out);
    assert_eq!(out.status.code(), Some(1), "{said}");
    let names = fs::read_dir(bench.path("out")).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let saved: Vec<String> = names.filter(|name| name.starts_with("checkpoint-")).collect();
    let there = saved == [format!("checkpoint-{step}")];
    assert!(there || saved.is_empty(), "{saved:?}");
    assert!(!there || bench.ft(&["runs", "verify", "out"]).status.success());
    (said, bench.lines("out/events.jsonl").pop().unwrap(), there)
}

/// Row S1: the loss is finite, and the backward pass overflows below the last layer.
#[test]
fn a_gradient_that_is_not_finite_names_its_tensor_and_the_rows_of_the_step() {
    let bench = Bench::new();
    let large = [
        "optimizer.learning_rate=2e8",
        "schedule.name=constant",
        "train.batch_size=10",
        "train.gradient_accumulation_steps=1",
    ];
    for (norm, place, left) in [
        ("1.0", "step 2: rows.jsonl:", "the state after step 1 is saved"),
        // The gradients of the output projection and of the last norm were applied.
        (
            "0",
            "step 2, micro-batch 1: rows.jsonl:",
            "no state is saved, because this run applies gradients as soon as they are computed",
        ),
    ] {
        let norm = format!("train.max_grad_norm={norm}");
        let (said, event, saved) = fails(&bench, &[&large[..], &[norm.as_str()]].concat(), 1);
        for word in [
            "a gradient is not finite",
            place,
            " and 2 more (model.layers.3.mlp.down_proj.weight)",
            left,
        ] {
            assert!(said.contains(word), "{norm}: `{word}` is not in:\n{said}");
        }
        assert_eq!(saved, norm.ends_with("1.0"), "{said}");
        assert!(event["event"] == "stop" && event["step"] == 2, "{event}");
        let rows = event["rows"].as_array().unwrap();
        let is_row = |row: &serde_json::Value| row.as_str().unwrap().starts_with("rows.jsonl:");
        assert!(
            rows.len() == 10 && event["row_count"] == 10 && rows.iter().all(is_row),
            "{event}"
        );
    }
}

/// Row S1: one row has a margin that is infinite in f32.
#[test]
fn a_loss_that_is_not_finite_names_the_row() {
    let bench = Bench::new();
    let text = fs::read_to_string(bench.path("pairs.jsonl")).unwrap();
    let margin = |at: usize| if at == 2 { "1e39" } else { "0.5" };
    let lines = text.lines().enumerate();
    let lines = lines.map(|(at, line)| line.replacen('{', &format!("{{\"margin\": {}, ", margin(at)), 1));
    fs::write(bench.path("pairs.jsonl"), lines.collect::<Vec<_>>().join("\n")).unwrap();
    let reward = ["train.stage=reward", "data.train=pairs.jsonl", "train.batch_size=1"];
    for (more, step, place) in [
        // The only step of an epoch, in any order.
        (&["train.gradient_accumulation_steps=4"][..], 1, "step 1, micro-batch "),
        // Gradients are applied at once, but the loss comes before them.
        (
            &[
                "train.gradient_accumulation_steps=1",
                "train.max_grad_norm=0",
                "data.shuffle=false",
            ],
            3,
            "step 3, micro-batch 1: ",
        ),
    ] {
        let (said, event, saved) = fails(&bench, &[&reward[..], more].concat(), step - 1);
        assert!(
            said.contains("the loss is not finite") && said.contains(place),
            "{said}"
        );
        let named: Vec<_> = said.match_indices("pairs.jsonl:").collect();
        assert!(named.len() == 1 && said.contains(": pairs.jsonl:3\n"), "{said}");
        assert_eq!(event["rows"], serde_json::json!(["pairs.jsonl:3"]));
        assert_eq!(saved, step == 3, "{said}");
        assert_eq!(said.contains("the state after step 2 is saved"), step == 3, "{said}");
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
