//! Nothing leaves the machine: no socket is opened without a hub id, and secrets of the environment are in no file.

use crate::bench::{Bench, files, said};
use crate::disk::tell_sockets;

const SECRETS: [&str; 3] = [
    "hf_planted0000000000000000000000",
    "key-planted-1111",
    "user-planted-2222",
];

/// Rows W1, W5.
#[test]
fn no_program_opens_a_socket_and_no_secret_is_kept() {
    let bench = Bench::new();
    let told = bench.path("socket");
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
        vec!["doctor"],
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
    std::fs::copy(bench.path("model/chat_template.jinja"), bench.path("template.jinja")).unwrap();
    std::fs::write(
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
        if tell_sockets(&mut command, &told).is_none() {
            return;
        }
        let out = command.output().unwrap();
        assert_eq!(out.status.success(), n < last, "{arguments:?}\n{}", said(&out));
        assert!(!told.exists(), "{arguments:?} opens a socket");
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
        .env("HF_ENDPOINT", "http://127.0.0.1:9");
    command.env("HF_HOME", bench.path("hub"));
    tell_sockets(&mut command, &told).unwrap();
    assert!(!command.output().unwrap().status.success() && told.exists());
}

fn has_secret(bytes: &[u8]) -> bool {
    let has = |secret: &str| bytes.windows(secret.len()).any(|w| w == secret.as_bytes());
    SECRETS.iter().any(|s| has(s))
}
