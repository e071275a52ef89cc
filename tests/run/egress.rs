//! Nothing leaves the machine: no socket is opened and no name is looked up without a hub id, and secrets of the environment are
//! in no file.

use crate::bench::{Bench, files, said};
use crate::disk::report_sockets;
use std::fs;

const SECRETS: [&str; 3] = [
    "hf_planted0000000000000000000000",
    "key-planted-1111",
    "user-planted-2222",
];

/// A hub with a name, which no machine has (RFC 2606); a test that reports sockets looks no name up.
const NAMED_HUB: &str = "https://hub.invalid";

/// Rows W1, W5.
#[test]
fn no_program_opens_a_socket_and_no_secret_is_kept() {
    let bench = Bench::new();
    let seen = bench.path("socket");
    // Without biases, as a mixture of experts needs it.
    let tiny = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/tiny");
    let lora = [
        "train.output_dir=lora",
        "tune.method=lora",
        "tune.lora.r=4",
        "train.max_steps=2",
    ];
    let train = |more: &[&'static str]| [&["train", "--recipe", "r.toml"][..], &lora, more].concat();
    let commands = [
        vec!["models"],
        vec!["recipes"],
        vec!["plan", "--recipe", "r.toml"],
        vec!["data", "--recipe", "r.toml"],
        train(&["train.save_steps=1", "train.eval_steps=1", "data.eval_fraction=0.3"]),
        train(&[
            "train.save_steps=1",
            "train.eval_steps=1",
            "data.eval_fraction=0.3",
            "--resume",
        ]),
        vec![
            "eval",
            "--model",
            "model",
            "--adapter",
            "lora/final",
            "--data",
            "rows.jsonl",
        ],
        vec![
            "generate",
            "--model",
            "lora/final",
            "--prompt",
            "a",
            "--max-new-tokens",
            "2",
        ],
        vec!["merge", "--adapter", "lora/final", "--out", "merged"],
        vec!["export", "lora", "--out", "exported"],
        vec!["export", "merged", "--to", "gguf", "--out", "gguf"],
        vec!["quantize", "--model", "model", "--to", "int8", "--out", "int8"],
        vec![
            "convert",
            "--model",
            tiny,
            "--to",
            "moe",
            "--experts",
            "2",
            "--out",
            "moe",
        ],
        vec!["adapter", "show", "lora/final"],
        vec![
            "distill",
            "cache",
            "--recipe",
            "r.toml",
            "distill.teacher=model",
            "train.stage=distill",
            "--out",
            "teacher",
        ],
        vec!["runs", "show", "lora"],
        vec!["runs", "verify", "lora"],
        vec!["runs", "export", "lora", "--to", "tensorboard", "--out", "logs"],
        vec!["tune-lr", "r.toml", "--steps", "8"],
        vec!["bench", "r.toml", "--steps", "2"],
        vec!["import", "axolotl.yml"],
        vec![
            "init",
            "--model",
            "model",
            "--data",
            "rows.jsonl",
            "--output-dir",
            "first",
            "--to",
            "first.toml",
        ],
        vec!["explain", "FT601"],
        vec!["completions", "bash"],
        train(&["train.stage=dpo", "data.train=pairs.jsonl", "train.output_dir=dpo"]),
        train(&[
            "train.stage=grpo",
            "train.output_dir=grpo",
            "train.max_steps=1",
            "rlhf.rewards=[\"length:2\"]",
            "rlhf.num_generations=4",
            "rlhf.max_completion_length=4",
        ]),
        train(&[
            "train.output_dir=template",
            "train.max_steps=1",
            "data.chat_template=template.jinja",
        ]),
        // Errors.
        train(&["model.path=none/of/these"]),
        train(&["data.train=none.jsonl", "--overwrite"]),
        train(&["nothing=1"]),
    ];
    fs::copy(bench.path("model/chat_template.jinja"), bench.path("template.jinja")).unwrap();
    fs::write(
        bench.path("axolotl.yml"),
        "base_model: model\nadapter: lora\nlora_r: 8\n",
    )
    .unwrap();
    let failing = 3;
    let last = commands.len() - failing;
    for (n, arguments) in commands.iter().enumerate() {
        let mut command = bench.command(arguments);
        command.env_remove("HF_HUB_OFFLINE").env("HF_TOKEN", SECRETS[0]);
        command
            .env("SERVICE_API_KEY", SECRETS[1])
            .env("USER", SECRETS[2])
            .env("LOGNAME", SECRETS[2]);
        if report_sockets(&mut command, &seen).is_none() {
            return;
        }
        let out = command.output().unwrap();
        assert_eq!(out.status.success(), n < last, "{arguments:?}\n{}", said(&out));
        assert!(!seen.exists(), "{arguments:?} uses the network");
        let shown = [&out.stdout[..], &out.stderr].concat();
        assert!(!has_secret(&shown), "{arguments:?}\n{}", said(&out));
    }
    for (name, bytes) in files(bench.dir.path()) {
        assert!(!has_secret(&bytes), "{name}");
    }
    // A hub id opens one.
    let mut command = bench.command(&["plan", "--recipe", "r.toml", "model.path=none/such"]);
    command
        .env_remove("HF_HUB_OFFLINE")
        .env("NO_PROXY", "*")
        .env("HF_ENDPOINT", "http://127.0.0.1:9");
    command.env("HF_HOME", bench.path("hub"));
    report_sockets(&mut command, &seen).unwrap();
    assert!(!command.output().unwrap().status.success() && seen.exists());
    fs::remove_file(&seen).unwrap();
    // `ft doctor` asks the hub, which has a name here: this name is looked up before there is a socket. Not if it is offline.
    for (offline, says) in [("1", "HF_HUB_OFFLINE is set"), ("0", "cannot be reached")] {
        let mut command = bench.command(&["doctor"]);
        command
            .env("HF_HUB_OFFLINE", offline)
            .env_remove("TRANSFORMERS_OFFLINE")
            .env("HF_ENDPOINT", NAMED_HUB)
            .env("HF_TOKEN", SECRETS[0])
            .env("NO_PROXY", "*");
        report_sockets(&mut command, &seen).unwrap();
        let out = command.output().unwrap();
        let shown = String::from_utf8([&out.stdout[..], &out.stderr].concat()).unwrap();
        assert!(out.status.success() && shown.contains(says), "{shown}");
        assert_eq!(seen.exists(), offline == "0", "{shown}");
        assert!(!has_secret(shown.as_bytes()), "{shown}");
    }
}

/// Row W1. The base of an adapter directory can be a hub id that the user did not type.
#[test]
fn the_base_that_an_adapter_names_is_requested_only_online_and_after_a_note() {
    let bench = Bench::new();
    let seen = bench.path("socket");
    let config = r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"],
        "base_model_name_or_path": "none/such-base"}"#;
    fs::create_dir(bench.path("adapter")).unwrap();
    fs::write(bench.path("adapter/adapter_config.json"), config).unwrap();
    // Read only after the base.
    fs::write(bench.path("adapter/adapter_model.safetensors"), "").unwrap();
    let generate = ["generate", "--model", "adapter", "--prompt", "a"];
    let commands = [
        &generate[..],
        &["eval", "--model", "adapter", "--data", "rows.jsonl"],
        &["merge", "--adapter", "adapter", "--out", "merged"],
        &["export", "adapter", "--to", "gguf", "--out", "gguf"],
        &["export", "adapter", "--to", "mlx", "--out", "mlx"],
    ];
    let run = |arguments: &[&str], offline: Option<&str>| {
        let mut command = bench.command(arguments);
        command.env_remove("HF_HUB_OFFLINE").env_remove("TRANSFORMERS_OFFLINE");
        command
            .env("HF_HOME", bench.path("hub"))
            .env_remove("HF_HUB_CACHE")
            .env("HF_ENDPOINT", NAMED_HUB)
            .env("NO_PROXY", "*");
        if let Some(name) = offline {
            command.env(name, "1");
        }
        report_sockets(&mut command, &seen)?;
        let out = command.output().unwrap();
        assert!(!out.status.success(), "{arguments:?}");
        let said = said(&out);
        // A command that fails does not print the notes of its result: this one was printed before.
        let note = said.find("the base model that the adapter names, none/such-base, is loaded from the hub");
        let error = said.find("error:");
        assert!(note.is_some() && note < error, "{arguments:?}\n{said}");
        Some(said)
    };
    for (n, arguments) in commands.iter().enumerate() {
        let name = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"][n % 2];
        let Some(said) = run(arguments, Some(name)) else { return };
        assert!(!seen.exists(), "{arguments:?} uses the network");
        assert!(
            said.contains("none/such-base") && said.contains("offline mode"),
            "{arguments:?}\n{said}"
        );
    }
    let said = run(&generate, None).unwrap();
    assert!(seen.exists() && said.contains("cannot reach the hub"), "{said}");
}

fn has_secret(bytes: &[u8]) -> bool {
    let has = |secret: &str| bytes.windows(secret.len()).any(|w| w == secret.as_bytes());
    SECRETS.iter().any(|s| has(s))
}
