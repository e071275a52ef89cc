//! `ft export`: a checkpoint gives the same files as `final/` at that step; also runs and checkpoints as models.

use crate::bench::{Bench, files, number, said};
use crate::resume::METHODS;
use serde_json::Value;
use std::path::Path;

/// The files of a directory without the directory name: an adapter with its own base contains that name.
fn plain(dir: &Path, run: &str) -> Vec<(String, String)> {
    let hash = |bytes: &[u8]| blake3::hash(bytes).to_string();
    files(dir)
        .into_iter()
        .map(|(name, bytes)| {
            if name.ends_with("adapter_config.json") || name.ends_with("README.md") {
                (name, String::from_utf8_lossy(&bytes).replace(run, "DIR"))
            } else {
                (name, hash(&bytes))
            }
        })
        .collect()
}

#[test]
fn a_checkpoint_becomes_what_final_is() {
    let bench = Bench::new();
    for (name, overrides) in METHODS {
        let steps = if name == "adalora" { "12" } else { "6" };
        let run = format!("runs/{}", name.replace(' ', "-"));
        let (out, steps_key) = (format!("train.output_dir={run}"), format!("train.max_steps={steps}"));
        bench.train(
            &[
                overrides,
                &[&out, &steps_key, "train.save_steps=3", "train.batch_size=2"],
            ]
            .concat(),
        );
        let (from, to) = (format!("{run}/checkpoint-{steps}"), format!("{run}-out"));
        // The export does not read the rows.
        let rows = std::fs::read(bench.path("rows.jsonl")).unwrap();
        std::fs::remove_file(bench.path("rows.jsonl")).unwrap();
        let exported = bench.ft(&["export", &from, "--out", &to]);
        std::fs::write(bench.path("rows.jsonl"), rows).unwrap();
        assert!(exported.status.success(), "{name}: {}", said(&exported));
        assert!(
            said(&exported).contains(&format!("the state after step {steps}")),
            "{name}"
        );
        let want = plain(&bench.path(&run).join("final"), &format!("{run}/final"));
        assert_eq!(plain(&bench.path(&to), &to), want, "{name}");
    }
}

#[test]
fn an_earlier_checkpoint_is_the_model_of_its_step() {
    let bench = Bench::new();
    let method = ["tune.method=block", "tune.block.switch_every=2", "model.dtype=bf16"];
    let constant = ["schedule.name=constant", "schedule.warmup_steps=0"];
    let run = |out: &str, steps: &str| {
        let own = [format!("train.output_dir={out}"), format!("train.max_steps={steps}")];
        let own: Vec<&str> = own.iter().map(String::as_str).collect();
        bench.train(&[&method[..], &constant, &own, &["train.save_steps=3"]].concat());
    };
    run("long", "6");
    run("short", "3");
    let exported = bench.ft(&["export", "long/checkpoint-3", "--out", "at-3", "--json"]);
    assert!(exported.status.success(), "{}", said(&exported));
    let object: Value = serde_json::from_slice(&exported.stdout).unwrap();
    assert!(object["step"] == 3 && object["kind"] == "model", "{object}");
    assert_eq!(files(&bench.path("at-3")), files(&bench.path("short/final")));
    // Existing files are not overwritten; a model can be written in another type.
    let again = bench.ft(&["export", "long/checkpoint-3", "--out", "at-3"]);
    assert!(again.status.code() == Some(2) && said(&again).contains("not empty"));
    let wide = bench.ft(&[
        "export", "--model", "long", "--to", "hf", "--dtype", "f32", "--out", "wide",
    ]);
    assert!(wide.status.success(), "{}", said(&wide));
    let size = |p: &str| {
        std::fs::metadata(bench.path(p).join("model.safetensors"))
            .unwrap()
            .len()
    };
    assert!(size("wide") > size("long/final") * 19 / 10);
    // Without the base model the export fails.
    std::fs::rename(bench.path("model"), bench.path("moved")).unwrap();
    let lost = bench.ft(&["export", "long/checkpoint-3", "--out", "lost"]);
    assert!(
        said(&lost).contains("the base model of the checkpoint is needed"),
        "{}",
        said(&lost)
    );
    assert!(!bench.path("lost").exists());
}

#[test]
fn runs_and_checkpoints_are_models() {
    let bench = Bench::new();
    let lora = [
        "tune.method=lora",
        "tune.lora.r=4",
        "train.max_steps=4",
        "train.save_steps=2",
    ];
    bench.train(&[&lora[..], &["train.output_dir=runs/lora"]].concat());
    let eval = |args: &[&str]| -> Value {
        let out = bench.ft(&[&["eval", "--data", "rows.jsonl", "--json"], args].concat());
        assert!(out.status.success(), "{args:?}: {}", said(&out));
        serde_json::from_slice(&out.stdout).unwrap()
    };
    let want = eval(&["--model", "model", "--adapter", "runs/lora/final"]);
    for model in ["runs/lora", "runs/lora/final", "runs/lora/checkpoint-4"] {
        assert_eq!(eval(&["--model", model]), want, "{model}");
    }
    assert_eq!(eval(&["--model", "model", "--adapter", "runs/lora"]), want);
    let earlier = eval(&["--model", "runs/lora/checkpoint-2"]);
    assert!(number(&earlier, "loss") > number(&want, "loss"), "{earlier} {want}");
    // No temporary files stay.
    let names: Vec<String> = files(&bench.path("runs")).into_iter().map(|(name, _)| name).collect();
    assert!(names.iter().all(|name| !name.contains("tmp")), "{names:?}");
    // A recipe defines its run and its rows.
    bench.recipe("[tune]\nmethod = \"lora\"\n[train]\noutput_dir = \"runs/lora\"\n");
    let of_recipe = bench.ft(&["eval", "--recipe", "r.toml", "--json"]);
    assert!(
        said(&of_recipe).contains("no rows to evaluate on"),
        "{}",
        said(&of_recipe)
    );
    let held = bench.ft(&["eval", "r.toml", "data.eval=rows.jsonl", "--json"]);
    let held: Value = serde_json::from_slice(&held.stdout).unwrap();
    assert_eq!(held["loss"], want["loss"]);
    // Generation finds the base of the adapter, and so does merging.
    let said_by = |model: &[&str]| {
        let args = [
            "generate",
            "--prompt",
            "the mill",
            "--temperature",
            "0",
            "--max-new-tokens",
            "8",
        ];
        let out = bench.ft(&[&args[..], model].concat());
        assert!(out.status.success(), "{}", said(&out));
        out.stdout
    };
    let with_base = said_by(&["--model", "model", "--adapter", "runs/lora/final"]);
    assert_eq!(said_by(&["--model", "runs/lora"]), with_base);
    assert_eq!(said_by(&["--model", "runs/lora/checkpoint-4"]), with_base);
    let merged = bench.ft(&["merge", "--adapter", "runs/lora", "--out", "merged"]);
    assert!(
        merged.status.success() && said(&merged).contains("next:"),
        "{}",
        said(&merged)
    );
    assert_eq!(eval(&["--model", "merged"])["rows"], want["rows"]);
    // The error names the missing item and a solution.
    for (args, wanted) in [
        (&["--model", "runs/lroa"][..], "did you mean `runs/lora`?"),
        (&["--model", "runs"], "no model in this directory"),
        (
            &["--model", "model", "--adapter", "model"],
            "a complete model, not an adapter",
        ),
    ] {
        let out = bench.ft(&[&["eval", "--data", "rows.jsonl"], args].concat());
        assert!(said(&out).contains(wanted), "{args:?}: {}", said(&out));
    }
}

#[test]
fn eval_measures_every_kind_of_rows() {
    let bench = Bench::new();
    let eval = |args: &[&str]| -> Value {
        let out = bench.ft(&[&["eval", "--json"], args].concat());
        assert!(out.status.success(), "{args:?}: {}", said(&out));
        serde_json::from_slice(&out.stdout).unwrap()
    };
    // Pairs without a reference: log-probabilities are compared.
    let pairs = eval(&["--model", "model", "--data", "pairs.jsonl"]);
    assert_eq!(pairs["kind"], "pairs");
    assert!(
        pairs["margin"].is_f64() && pairs.get("reward_margin").is_none(),
        "{pairs}"
    );
    // Pairs with a reference: DPO's implicit reward, equal to the value at the end of the run.
    let dpo = [
        "train.stage=dpo",
        "data.train=pairs.jsonl",
        "data.eval=pairs.jsonl",
        "tune.method=lora",
        "train.max_steps=4",
        "train.output_dir=dpo",
    ];
    bench.train(&dpo);
    let measured = eval(&["--model", "dpo", "--data", "pairs.jsonl", "--max-length", "512"]);
    let lines = bench.lines("dpo/metrics.jsonl");
    let last = lines.iter().rev().find(|l| l.get("eval_loss").is_some()).unwrap();
    assert_eq!(
        measured["reward_accuracy"], last["eval_rewards/accuracies"],
        "{measured} {last}"
    );
    let (ours, theirs) = (number(&measured, "reward_margin"), number(last, "eval_rewards/margins"));
    assert!((ours - theirs).abs() < 1e-5, "{ours} {theirs}");
    let against_base = eval(&["--model", "dpo", "--data", "pairs.jsonl", "--reference", "model"]);
    assert!((number(&against_base, "reward_margin") - ours).abs() < 1e-6);
    // KTO rows and prompts.
    let row = |row: &str, name: &str| std::fs::write(bench.path(name), row).unwrap();
    row(
        "{\"prompt\": \"a\", \"completion\": \" mill\", \"label\": true}\n\
         {\"prompt\": \"a\", \"completion\": \" river\", \"label\": false}\n",
        "judged.jsonl",
    );
    let judged = eval(&["--model", "model", "--data", "judged.jsonl"]);
    assert!(
        number(&judged, "desirable_logp") < 0.0 && number(&judged, "undesirable_logp") < 0.0,
        "{judged}"
    );
    let greedy = bench.ft(&[
        "generate",
        "--model",
        "model",
        "--prompt",
        "the mill",
        "--temperature",
        "0",
        "--max-new-tokens",
        "3",
    ]);
    let answer = String::from_utf8(greedy.stdout).unwrap();
    let rows = [("the mill", answer.trim()), ("the river", "certainly not this")];
    let rows: Vec<String> = rows
        .iter()
        .map(|(p, a)| serde_json::json!({"prompt": p, "answer": a}).to_string())
        .collect();
    row(&rows.join("\n"), "prompts.jsonl");
    let plain = "data.render=plain";
    let prompts = eval(&[
        "--model",
        "model",
        "--data",
        "prompts.jsonl",
        "--max-new-tokens",
        "3",
        plain,
    ]);
    assert_eq!(
        (prompts["kind"].as_str(), prompts["accuracy"].as_f64()),
        (Some("prompts"), Some(0.5))
    );
    // Formats and lengths as flags or as recipe keys.
    let short = eval(&["--model", "model", "--data", "rows.jsonl", "--max-length", "64"]);
    let pair = eval(&["--model", "model", "--data", "rows.jsonl", "data.max_length=64"]);
    assert_eq!(short, pair);
    let wrong = bench.ft(&["eval", "--model", "model", "--data", "rows.jsonl", "--format", "chatml"]);
    assert!(said(&wrong).contains("did you mean `messages`?"), "{}", said(&wrong));
}

/// Row W6: a link in a directory of somebody else brings no file of another place into a copy or an upload.
#[test]
fn links_to_other_places_are_not_exported_merged_or_uploaded() {
    let bench = Bench::new();
    std::fs::create_dir(bench.path("secrets")).unwrap();
    std::fs::write(bench.path("secrets/token"), "hf_secret").unwrap();
    bench.train(&["tune.method=lora", "train.max_steps=1", "train.output_dir=run"]);
    let adapter = bench.path("run/final");
    let links = [
        (adapter.join("notes.txt"), "secrets/token"),
        (adapter.join("more"), "secrets"),
        (adapter.join("loop"), "run/final"),
        (bench.path("model/LICENSE"), "secrets/token"),
    ];
    for (link, target) in links {
        std::os::unix::fs::symlink(bench.path(target), &link).unwrap();
        for command in [
            &["export", "run/final", "--out", "out"][..],
            &["merge", "--adapter", "run/final", "--out", "out"],
            &["push", "run/final", "a/b", "--dry-run"],
            &["push", "model", "a/b", "--dry-run"],
        ] {
            let out = bench.ft(command);
            let text = said(&out);
            let of_model = link.ends_with("LICENSE");
            // A command that does not touch the link works.
            let touches = match command[0] {
                "export" => !of_model,
                "merge" => of_model,
                _ => of_model == (command[1] == "model"),
            };
            assert!(!touches || text.contains("link"), "{link:?} {command:?}\n{text}");
            assert!(!touches || out.status.code() == Some(1), "{link:?} {command:?}\n{text}");
            if bench.path("out").exists() {
                let copied = files(&bench.path("out"));
                assert!(
                    copied.iter().all(|(_, bytes)| bytes != b"hf_secret"),
                    "{link:?} {command:?}"
                );
                std::fs::remove_dir_all(bench.path("out")).unwrap();
            }
        }
        std::fs::remove_file(&link).unwrap();
    }
}

/// Row W6: not even a file that is valid is read behind such a link.
#[test]
fn links_to_other_places_are_not_read() {
    let bench = Bench::new();
    std::fs::create_dir(bench.path("elsewhere")).unwrap();
    bench.train(&["tune.method=lora", "train.max_steps=1", "train.output_dir=run"]);
    // In the run itself other files than those that it wrote are refused first.
    crate::bench::copy_all(&bench.path("run/final"), &bench.path("adapter"));
    let train = [
        "train",
        "--recipe",
        "r.toml",
        "train.max_steps=1",
        "train.output_dir=out",
    ];
    let given = [&train[..], &["tune.method=lora", "tune.lora.adapter=adapter"]].concat();
    let generate = |model: &'static str| ["generate", "--model", model, "--prompt", "a", "--max-new-tokens", "1"];
    let (of_model, of_adapter) = (generate("model"), generate("adapter"));
    let merge = ["merge", "--adapter", "adapter", "--out", "out"];
    let all = [
        &of_model[..],
        &["plan", "--recipe", "r.toml"],
        &["data", "--recipe", "r.toml"],
        &train,
    ];
    let cases: [(&str, &[&[&str]]); 8] = [
        ("model/config.json", &all),
        ("model/tokenizer.json", &all),
        ("model/tokenizer_config.json", &all),
        ("model/generation_config.json", &all),
        ("model/chat_template.jinja", &all),
        ("model/model.safetensors", &[&of_model, &train]),
        ("adapter/adapter_config.json", &[&of_adapter, &given, &merge]),
        ("adapter/chat_template.jinja", &[&of_adapter, &merge]),
    ];
    for (name, commands) in cases {
        let (file, real) = (bench.path(name), bench.path("elsewhere/file"));
        std::fs::rename(&file, &real).unwrap();
        std::os::unix::fs::symlink(&real, &file).unwrap();
        for command in commands {
            let out = bench.ft(command);
            let text = said(&out);
            assert_eq!(out.status.code(), Some(1), "{name} {command:?}\n{text}");
            let words = ["a link to a path outside its directory", "elsewhere/file"];
            assert!(
                words.iter().all(|word| text.contains(word)),
                "{name} {command:?}\n{text}"
            );
            assert!(!bench.path("out").exists(), "{name} {command:?}");
        }
        std::fs::remove_file(&file).unwrap();
        std::fs::rename(&real, &file).unwrap();
    }
    for command in all.into_iter().chain([&of_adapter[..]]) {
        let out = bench.ft(command);
        assert!(out.status.success(), "{command:?}\n{}", said(&out));
    }
}

/// An adapter with a base of its own names the one beside it, also in a copy.
#[test]
fn a_copied_adapter_names_its_own_base() {
    let bench = Bench::new();
    bench.train(&[
        "tune.method=lora",
        "tune.lora.init_lora_weights=pissa",
        "tune.lora.save_residual=true",
        "train.max_steps=1",
        "train.output_dir=run",
    ]);
    let out = bench.ft(&["export", "run", "--out", "out"]);
    assert!(out.status.success(), "{}", said(&out));
    let config = std::fs::read_to_string(bench.path("out/adapter_config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["base_model_name_or_path"], "out/base");
    // The copy would be copied too.
    let inside = bench.ft(&["export", "out", "--out", "out/copy"]);
    assert_eq!(inside.status.code(), Some(2), "{}", said(&inside));
    assert!(
        said(&inside).contains("the copy of a directory cannot lie inside it"),
        "{}",
        said(&inside)
    );
    std::os::unix::fs::symlink("out", bench.path("link")).unwrap();
    let link = bench.ft(&["export", "run", "--out", "link"]);
    assert!(
        link.status.code() == Some(2) && said(&link).contains("the output is a link"),
        "{}",
        said(&link)
    );
    // A pipe or a device is not replaced by a file.
    let pipe = bench.path("pipe");
    assert!(
        std::process::Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    let drawn = bench.ft(&["runs", "plot", "run", "--svg", "pipe"]);
    assert!(
        drawn.status.code() == Some(1) && said(&drawn).contains("a named pipe"),
        "{}",
        said(&drawn)
    );
    assert!(!pipe.is_file());
    std::fs::remove_dir_all(bench.path("run")).unwrap();
    let out = bench.ft(&["generate", "--model", "out", "--prompt", "a", "--max-new-tokens", "1"]);
    assert!(out.status.success(), "{}", said(&out));
}

/// Row R6.
#[test]
fn the_base_model_of_a_checkpoint_may_have_moved() {
    let bench = Bench::new();
    bench.train(&[
        "tune.method=block",
        "train.output_dir=run",
        "train.max_steps=2",
        "train.save_steps=2",
    ]);
    std::fs::rename(bench.path("model"), bench.path("moved")).unwrap();
    let export = |more: &[&str]| bench.ft(&[&["export", "run/checkpoint-2", "--out", "out"], more].concat());
    let missing = export(&[]);
    assert!(
        !missing.status.success() && said(&missing).contains("ft export --base"),
        "{}",
        said(&missing)
    );
    // Another model with the same shapes.
    crate::bench::copy_all(&bench.path("run/final"), &bench.path("another"));
    let another = export(&["--base", "another"]);
    assert!(
        !another.status.success() && said(&another).contains("the base model differs"),
        "{}",
        said(&another)
    );
    assert!(!bench.path("out").exists());
    let moved = export(&["--base", "moved"]);
    assert!(moved.status.success(), "{}", said(&moved));
    assert!(files(&bench.path("out")) == files(&bench.path("run/final")));
    for unused in [
        &["--base", "moved", "--to", "mlx"][..],
        &["--base", "moved", "--to", "gguf"],
    ] {
        let refused = bench.ft(&[&["export", "run/checkpoint-2", "--out", "more"], unused].concat());
        assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
    }
    let model = bench.ft(&["export", "run/final", "--out", "more", "--base", "moved"]);
    assert_eq!(model.status.code(), Some(2), "{}", said(&model));
}

#[test]
fn each_output_without_a_number_that_json_does_not_have_comes_with_a_note() {
    let add_number = |model: &Path| {
        let path = model.join("config.json");
        let config = std::fs::read_to_string(&path).unwrap();
        let config = config.replacen('{', "{\"time_step_limit\": [0.0, Infinity],", 1);
        std::fs::write(&path, config).unwrap();
    };
    let bench = Bench::new();
    add_number(&bench.path("model"));
    std::fs::write(
        bench.path("model/generation_config.json"),
        r#"{"eos_token_id": 0, "top_p": NaN}"#,
    )
    .unwrap();
    let train = |method: &str, out: &str| {
        // A template with another end of a turn: the settings of sampling are written again.
        let more = [
            "data.chat_template=gemma",
            "data.new_special_tokens=[\"<end_of_turn>\", \"<start_of_turn>\"]",
            "train.max_steps=1",
            "train.save_steps=1",
        ];
        bench.ft(&[&["train", "--recipe", "r.toml", method, out][..], &more].concat())
    };
    let noted = |out: &std::process::Output, files: &[&str]| {
        let text = said(out);
        assert!(out.status.success(), "{text}");
        for (file, key) in [("config.json", "time_step_limit"), ("generation_config.json", "top_p")] {
            let note =
                format!("{file} is written without {key}: the value there is a number that JSON does not have\n");
            let lines = text.split_inclusive('\n').filter(|line| *line == note).count();
            assert_eq!(lines, usize::from(files.contains(&file)), "{file}: {text}");
        }
    };
    let both = ["config.json", "generation_config.json"];
    noted(&train("tune.method=full", "train.output_dir=run"), &both);
    noted(&train("tune.method=lora", "train.output_dir=lora"), &[]);
    let (run, model) = ("run/checkpoint-1", "model");
    let other = Bench::of_family("qwen3");
    add_number(&other.path("model"));
    let to_moe = ["convert", "--model", model, "--to", "moe", "--experts", "4"];
    noted(&other.ft(&[&to_moe[..], &["--out", "moe"]].concat()), &both[..1]);
    add_number(&other.path("moe"));
    let to_smile = ["convert", "--model", "moe", "--to", "smile", "--groups", "2"];
    let commands: [(&Bench, &[&str], &[&str]); 6] = [
        (&bench, &["export", run], &both),
        (&bench, &["export", run, "--dtype", "bf16"], &both),
        (&bench, &["export", model], &both[..1]),
        (&bench, &["quantize", "--model", model, "--to", "nf4"], &both[..1]),
        (&other, &to_smile, &both[..1]),
        // What was written once is JSON.
        (&bench, &["quantize", "--model", "run/final", "--to", "nf4"], &[]),
    ];
    for (n, (bench, command, files)) in commands.into_iter().enumerate() {
        let out = format!("out-{n}");
        let to = ["--out", out.as_str()];
        noted(&bench.ft(&[command, &to[..]].concat()), files);
        let text = std::fs::read_to_string(bench.path(&out).join("config.json")).unwrap();
        assert!(serde_json::from_str::<Value>(&text).is_ok(), "{command:?}: {text}");
    }
}
