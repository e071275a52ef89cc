//! Nothing leaves the machine: no socket is opened and no name is looked up without a hub id. Secrets of the environment are in no
//! file, and those of a command in no record, output and card.

use crate::bench::{Bench, files, said};
use crate::disk::report_sockets;
use std::fs;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

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

/// The environment of a command with secrets in a hub address, a proxy, other variables and a stored token.
fn with_secrets(bench: &Bench, home: &Path, arguments: &[&str]) -> Command {
    let mut command = bench.command(arguments);
    for name in [
        "HF_TOKEN",
        "HF_TOKEN_PATH",
        "HF_HUB_CACHE",
        "ALL_PROXY",
        "all_proxy",
        "NO_PROXY",
        "no_proxy",
    ] {
        command.env_remove(name);
    }
    command
        .env("HF_HOME", home)
        .env(
            "HF_ENDPOINT",
            "https://me:PLANTEDendpoint@mirror.example/?key=PLANTEDquery",
        )
        .env("HTTPS_PROXY", "http://me:PLANTEDproxy@127.0.0.1:9")
        .env("DATABASE_URL", "postgres://me:PLANTEDdatabase@db/x")
        .env("OPENAI_API_KEY_2", "PLANTEDkey");
    command
}

/// Standard output and standard error, without a planted secret.
fn without_secret(mut command: Command, succeeds: bool) -> String {
    let out = command.output().unwrap();
    let text = String::from_utf8_lossy(&[&out.stdout[..], &out.stderr].concat()).into_owned();
    assert_eq!(out.status.success(), succeeds, "{command:?}\n{text}");
    assert!(!text.contains("PLANTED"), "{command:?}\n{text}");
    text
}

/// Rows W5, W8. Secrets in the command of a reward, in a comment of the recipe and in the environment.
#[test]
fn a_secret_of_a_command_is_in_no_record_no_output_and_no_card() {
    let (bench, home) = (Bench::new(), TempDir::new().unwrap());
    fs::write(home.path().join("token"), "hf_PLANTEDstored000000000000000000000\n").unwrap();
    fs::write(
        bench.path("judge.sh"),
        "env >seen\nwhile read -r line; do echo 1; done\n",
    )
    .unwrap();
    bench.recipe(
        "# export JUDGE_KEY=PLANTEDcomment\n[rlhf]\nrewards = [\"program:sh judge.sh --api-key sk-PLANTEDrecipe0123456789\"]\n",
    );
    let ft =
        |arguments: &[&str], succeeds: bool| without_secret(with_secrets(&bench, home.path(), arguments), succeeds);
    let reward = "rlhf.rewards=[\"program:sh judge.sh --api-key sk-PLANTEDargument0123456789 --url https://me:PLANTEDurl@host/x\"]";
    let settings = [
        "train",
        "--recipe",
        "r.toml",
        "train.output_dir=run",
        "train.stage=grpo",
        "tune.method=lora",
        "tune.lora.r=4",
        "train.max_steps=2",
        "train.save_steps=1",
        "rlhf.num_generations=4",
        "rlhf.max_completion_length=4",
    ];
    let train = |more: &[&str], succeeds: bool| ft(&[&settings[..], more].concat(), succeeds);
    let plan = train(&["--dry-run"], true);
    let note = "values of the recipe that look like secrets are `<secret>` in this output";
    assert!(
        plan.contains("judge.sh --api-key <secret>") && plan.contains(note),
        "{plan}"
    );
    let plan = train(&["--dry-run", "--json", reward], true);
    assert!(plan.contains("\"masked\":true") && plan.contains(note), "{plan}");
    train(&[reward], true);
    let events = fs::read_to_string(bench.path("run/events.jsonl")).unwrap();
    assert!(
        events.contains("judge.sh --api-key <secret> --url https://<secret>@host/x"),
        "{events}"
    );

    // A resume compares the values, so these files have them.
    let own = |name: &str| {
        ["recipe.toml", "resolved.toml", "state.json"]
            .iter()
            .any(|file| name.ends_with(file))
    };
    let has = |bytes: &[u8]| bytes.windows(7).any(|part| part == b"PLANTED");
    let records = files(&bench.path("run"));
    assert!(
        records
            .iter()
            .any(|(name, bytes)| name == "resolved.toml" && has(bytes))
    );
    for (name, bytes) in records.iter().filter(|(name, _)| !own(name)) {
        assert!(!has(bytes), "{name}");
    }
    let seen = fs::read(bench.path("seen")).unwrap();
    assert!(!has(&seen) && !seen.is_empty(), "{}", String::from_utf8_lossy(&seen));

    // ---- what shows and publishes a run
    for arguments in [
        &["runs", "show", "run"][..],
        &["runs", "show", "run", "--json"],
        &["runs", "list", "run", "--json"],
        &["runs", "export", "run", "--to", "wandb", "--out", "logs"],
    ] {
        ft(arguments, true);
    }
    for (name, bytes) in files(&bench.path("logs")) {
        assert!(!has(&bytes), "{name}");
    }
    let pushed = ft(&["push", "run", "me/x", "--dry-run"], true);
    assert!(
        pushed.contains("judge.sh --api-key <secret> --url https://<secret>@host/x")
            && pushed.contains("# export JUDGE_KEY=<secret>")
            && pushed.contains("look like secrets"),
        "{pushed}"
    );
    let pushed = ft(&["push", "run", "me/x", "--dry-run", "--json"], true);
    assert!(pushed.contains("\"https://mirror.example/me/x\""), "{pushed}");

    // ---- errors
    let other = "rlhf.rewards=[\"program:sh judge.sh --api-key sk-PLANTEDother0123456789\"]";
    let refused = train(&[other, "train.max_steps=3", "--resume"], false);
    assert!(refused.contains("rlhf.rewards: "), "{refused}");
    for wrong in [
        "model.hf_token=hf_PLANTEDtoken0000000000000000000000",
        "train.stage=hf_PLANTEDvalue0000000000000000000000",
        "rlhf.rewards=[\"program:sh 'judge.sh --api-key PLANTEDquote\"]",
        "rlhf.rewards=[\"programm:sh judge.sh --api-key PLANTEDname\"]",
        "data.train=https://me:PLANTEDrows@host/x.jsonl",
        "model.path=https://me:PLANTEDmodel@host/x",
    ] {
        let text = train(&[wrong, "--overwrite"], false);
        let key = wrong.split('=').next().unwrap();
        assert!(text.contains(key) || text.contains("<secret>"), "{text}");
    }
    train(
        &["model.hf_token=hf_PLANTEDtoken0000000000000000000000", "--json"],
        false,
    );
}

/// Row W5. A password in the address of a hub or of a proxy, and in the configuration of another tool.
#[test]
fn a_password_of_an_address_is_in_no_message_and_no_recipe() {
    let (bench, home) = (Bench::new(), TempDir::new().unwrap());
    fs::write(home.path().join("token"), "hf_PLANTEDstored000000000000000000000\n").unwrap();
    let ft = |arguments: &[&str]| {
        let mut command = with_secrets(&bench, home.path(), arguments);
        command.env("HF_HUB_OFFLINE", "0").env_remove("TRANSFORMERS_OFFLINE");
        command
    };
    let hub = ["plan", "--recipe", "r.toml", "model.path=none/such"];
    let text = without_secret(ft(&hub), false);
    assert!(
        text.contains("the hub address cannot be used") && text.contains("mirror.example"),
        "{text}"
    );
    // Through the proxy, which does not answer.
    let mut command = ft(&["doctor"]);
    command.env("HF_ENDPOINT", NAMED_HUB);
    let text = without_secret(command, true);
    assert!(text.contains("cannot be reached"), "{text}");

    fs::write(
        bench.path("axolotl.yml"),
        "base_model: model\nadapter: lora\nlora_r: https://me:PLANTEDrank@host\nlr_scheduler: https://me:PLANTEDschedule@host\n\
         output_dir: sk-europarl-newstest2021-train\n\
         hub_token: hf_PLANTEDtoken0000000000000000000000\nwandb_api_key: PLANTEDwandb\ndatasets:\n  - path: https://user:PLANTEDrows@host/x.jsonl\n",
    )
    .unwrap();
    let text = without_secret(ft(&["import", "axolotl.yml"]), true);
    assert!(
        text.contains("https://<secret>@host/x.jsonl")
            && text.contains("in the place of a secret")
            // The name of a directory is not taken for a token.
            && text.contains("output_dir = \"sk-europarl-newstest2021-train\""),
        "{text}"
    );
}

fn has_secret(bytes: &[u8]) -> bool {
    let has = |secret: &str| bytes.windows(secret.len()).any(|w| w == secret.as_bytes());
    SECRETS.iter().any(|s| has(s))
}
