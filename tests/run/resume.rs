//! Runs that are stopped, killed, or started twice.

use crate::bench::{Bench, files, said};
pub use crate::same::{METHODS, assert_same};
use ft::base::rng::{Rng, Stream};
use std::fs;
use std::io::Read;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Rows C1, R4.
#[test]
fn a_run_killed_at_random_points_resumes_to_the_same_bits() {
    for (n, (method, settings)) in METHODS.iter().enumerate() {
        let bench = Bench::new();
        let base = [
            "train.max_steps=40",
            "train.save_steps=3",
            "train.batch_size=2",
            "train.gradient_accumulation_steps=2",
        ];
        let with = |out: &'static str| [&base[..], settings, &[out]].concat();
        bench.train(&with("train.output_dir=whole"));
        let rng = Rng::new(11, Stream::Sampling, &[n as u64]);
        let mut kills = 0;
        for attempt in 0..60 {
            let resume = bench.path("broken").join("run.json").exists();
            let arguments = with("train.output_dir=broken");
            let saved = fs::read_dir(bench.path("broken"))
                .map(|d| {
                    d.flatten().any(|e| {
                        e.path().join("manifest.json").exists() && !e.file_name().to_string_lossy().contains(".tmp-")
                    })
                })
                .unwrap_or(false);
            // A run that was killed before its first checkpoint starts again, with either flag.
            let flag: &[&str] = match (resume, saved) {
                (true, true) => &["--resume"],
                (true, false) if attempt % 2 == 0 => &["--resume"],
                (true, false) => &["--overwrite"],
                _ => &[],
            };
            let mut child = bench.start(&[&arguments[..], flag].concat());
            let patience = Duration::from_millis(20 + 15 * attempt + rng.below(attempt, 250));
            if wait(&mut child, patience).is_none() {
                child.kill().unwrap();
                child.wait().unwrap();
                kills += 1;
                continue;
            }
            if bench.path("broken/final").exists() {
                break;
            }
        }
        // If every attempt was killed, the last one runs to its end.
        if !bench.path("broken/final").exists() {
            bench.train(&[&with("train.output_dir=broken")[..], &["--resume"]].concat());
        }
        assert!(kills > 0, "{method}: no attempt was killed");
        assert_same(&bench, "whole", "broken");
    }
}

fn wait(child: &mut Child, patience: Duration) -> Option<i32> {
    let until = Instant::now() + patience;
    while Instant::now() < until {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status.code().unwrap_or(-1));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    None
}

fn signal(child: &Child, name: &str) {
    assert!(
        Command::new("kill")
            .args([name, &child.id().to_string()])
            .status()
            .unwrap()
            .success()
    );
}

/// Signals that stop a run, with its exit code.
const SIGNALS: [(&str, i32); 6] = [
    ("-INT", 130),
    ("-TERM", 143),
    ("-HUP", 129),
    ("-USR1", 138),
    ("-USR2", 140),
    ("-XCPU", 152),
];

/// Row S3.
#[test]
fn signals_save_the_state_and_exit_with_their_code() {
    for (name, code) in SIGNALS {
        let bench = Bench::new();
        let base = [
            "tune.method=block",
            "tune.block.switch_every=5",
            "train.save_steps=0",
            "train.max_steps=100000",
            "schedule.name=constant",
            "schedule.warmup_ratio=0",
        ];
        let mut child = bench.start(&[&base[..], &["train.output_dir=run"]].concat());
        let until = Instant::now() + Duration::from_secs(60);
        while bench.steps("run").len() < 5 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        signal(&child, name);
        let status = wait(&mut child, Duration::from_secs(60)).expect("stops after a signal");
        assert_eq!(status, code);
        let done = bench.steps("run").len();
        assert!(
            bench.path(&format!("run/checkpoint-{done}/manifest.json")).exists(),
            "state after step {done}"
        );
        let events = fs::read_to_string(bench.path("run/events.jsonl")).unwrap();
        assert!(events.lines().last().unwrap().contains("signal"), "{events}");
        assert!(!bench.path("run/final").exists());

        // The resumed run equals an uninterrupted run.
        let end = format!("train.max_steps={}", done + 10);
        let end = end.as_str();
        let shorter = [
            "tune.method=block",
            "tune.block.switch_every=5",
            "train.save_steps=0",
            "schedule.name=constant",
            "schedule.warmup_ratio=0",
            end,
        ];
        bench.train(&[&shorter[..], &["train.output_dir=run", "--resume"]].concat());
        bench.train(&[&shorter[..], &["train.output_dir=whole"]].concat());
        assert_same(&bench, "whole", "run");
    }
}

/// Rows S3, R4. Signals within a step or a rollout: the step is abandoned if no weight has changed yet, else it is finished.
#[test]
fn a_run_stopped_within_steps_resumes_to_the_same_bits() {
    let grpo: &[&str] = &[
        "train.stage=grpo",
        "tune.method=lora",
        "tune.lora.r=4",
        "rlhf.rewards=[\"regex:[aeiou]\", \"length:4\"]",
        "rlhf.num_generations=4",
        "rlhf.max_completion_length=8",
        "rlhf.num_iterations=2",
        "rlhf.grpo.beta=0.1",
    ];
    // The block switches before every second step.
    let block: &[&str] = &[
        "tune.method=block",
        "tune.block.switch_every=2",
        "memory.tier=disk",
        "model.dtype=bf16",
    ];
    let quantized: &[&str] = &[
        "tune.method=block",
        "tune.block.switch_every=1",
        "memory.frozen_weights=nf4",
    ];
    let at_once: &[&str] = &[
        "tune.method=full",
        "train.gradient_accumulation_steps=1",
        "train.batch_size=32",
        "train.max_grad_norm=0",
    ];
    let adalora: &[&str] = &[
        "tune.method=lora",
        "tune.lora.r=4",
        "tune.lora.peft_type=adalora",
        "tune.lora.adalora.target_r=1",
        "tune.lora.adalora.deltaT=2",
        "tune.lora.adalora.tfinal=2",
    ];
    let named = |name: &str| METHODS.iter().find(|m| m.0 == name).unwrap().1;
    let mut given_up = 0;
    for (n, settings) in [block, quantized, named("lora"), named("dpo"), adalora, grpo, at_once]
        .into_iter()
        .enumerate()
    {
        let bench = Bench::new();
        let base = ["train.max_steps=6", "train.save_steps=0", "train.batch_size=2"];
        let base = base.iter().chain(&["train.gradient_accumulation_steps=16"]);
        let key = |s: &str| s.split('=').next().unwrap().to_string();
        let base: Vec<&str> = base
            .copied()
            .filter(|b| !settings.iter().any(|s| key(s) == key(b)))
            .collect();
        let with = |out: &'static str| [&base[..], settings, &[out]].concat();
        bench.train(&with("train.output_dir=whole"));
        let rng = Rng::new(12, Stream::Sampling, &[n as u64]);
        for attempt in 0..40 {
            let saved = fs::read_dir(bench.path("broken"))
                .is_ok_and(|d| d.flatten().any(|e| e.path().join("manifest.json").exists()));
            let flag = if saved { "--resume" } else { "--overwrite" };
            let arguments = [&with("train.output_dir=broken")[..], &[flag]].concat();
            let mut child = bench
                .command(&[&["train", "--recipe", "r.toml"][..], &arguments].concat())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let patience = Duration::from_millis(30 + 25 * attempt + rng.below(attempt, 300));
            let (name, stopped) = SIGNALS[attempt as usize % SIGNALS.len()];
            if wait(&mut child, patience).is_none() {
                signal(&child, name);
            }
            let out = child.wait_with_output().unwrap();
            let stderr = String::from_utf8_lossy(&out.stderr);
            let code = out.status.code();
            // At its start the program has no signal handler yet.
            assert!([Some(0), Some(stopped), None].contains(&code), "{code:?}\n{stderr}");
            given_up += usize::from(stderr.contains("is discarded") && stderr.contains("is saved"));
            if code == Some(0) && bench.path("broken/final").exists() {
                break;
            }
        }
        if !bench.path("broken/final").exists() {
            bench.train(&[&with("train.output_dir=broken")[..], &["--resume"]].concat());
        }
        assert_same(&bench, "whole", "broken");
        for (a, b) in bench.steps("whole").iter().zip(&bench.steps("broken")) {
            for key in ["reward", "reward_std", "completion_length", "kl"] {
                assert_eq!(a[key], b[key], "{key} at step {}", a["step"]);
            }
        }
    }
    assert!(given_up > 7, "only {given_up} signals met a step");
}

/// Keeps the lines of `metrics.jsonl` for which `keep` is true.
fn keep_lines(bench: &Bench, run: &str, keep: impl Fn(&serde_json::Value) -> bool) {
    let lines = bench.lines(&format!("{run}/metrics.jsonl"));
    let kept: String = lines.iter().filter(|l| keep(l)).map(|l| format!("{l}\n")).collect();
    fs::write(bench.path(run).join("metrics.jsonl"), kept).unwrap();
}

/// Row R5.
#[test]
fn an_evaluation_that_was_cut_off_is_made_up_for() {
    for stage in [
        &["tune.method=full"][..],
        &["train.stage=dpo", "data.train=pairs.jsonl", "tune.method=block"],
    ] {
        let bench = Bench::new();
        let base = [
            "train.max_steps=6",
            "train.save_steps=3",
            "train.eval_steps=3",
            "data.eval_fraction=0.3",
        ];
        let run = |out: &str, more: &[&str]| {
            let out = format!("train.output_dir={out}");
            bench.train(&[&base[..], stage, &[&out], more].concat());
        };
        run("whole", &[]);
        let is_eval = |l: &serde_json::Value| l.get("eval_loss").is_some();
        assert_eq!(
            bench.lines("whole/metrics.jsonl").iter().filter(|l| is_eval(l)).count(),
            3
        );
        // Killed between the save of step 3 and its evaluation.
        run("middle", &[]);
        fs::remove_dir_all(bench.path("middle/checkpoint-6")).unwrap();
        fs::remove_dir_all(bench.path("middle/final")).unwrap();
        keep_lines(&bench, "middle", |l| {
            l["step"].as_u64() < Some(3) || l["step"] == 3 && !is_eval(l)
        });
        run("middle", &["--resume"]);
        assert_same(&bench, "whole", "middle");
        // The same situation after the last step.
        run("end", &[]);
        fs::remove_dir_all(bench.path("end/final")).unwrap();
        keep_lines(&bench, "end", |l| l["step"].as_u64() < Some(6) || !is_eval(l));
        run("end", &["--resume"]);
        assert_same(&bench, "whole", "end");
        // A finished evaluation is not repeated.
        run("end", &["--resume"]);
        assert_same(&bench, "whole", "end");
    }
}

/// Rows S3, R5.
#[test]
fn a_signal_in_the_last_evaluation_leaves_it_to_the_resume() {
    let bench = Bench::new();
    let rows = fs::read_to_string(bench.path("rows.jsonl")).unwrap();
    fs::write(bench.path("eval.jsonl"), rows.repeat(40)).unwrap();
    let base = ["train.max_steps=2", "data.eval=eval.jsonl", "tune.method=full"];
    bench.train(&[&base[..], &["train.output_dir=whole"]].concat());
    for (name, code) in SIGNALS {
        let _ = fs::remove_dir_all(bench.path("run"));
        let mut child = bench.start(&[&base[..], &["train.output_dir=run"]].concat());
        let until = Instant::now() + Duration::from_secs(120);
        while bench.steps("run").len() < 2 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        signal(&child, name);
        assert_eq!(wait(&mut child, Duration::from_secs(60)), Some(code));
        assert!(bench.path("run/checkpoint-2").exists() && !bench.path("run/final").exists());
        bench.train(&[&base[..], &["train.output_dir=run", "--resume"]].concat());
        assert_same(&bench, "whole", "run");
    }
}

/// Row S7. Who reads the messages of a run goes away after the first line: `ft train 2>&1 | head -1`.
#[test]
fn a_run_goes_on_if_nobody_reads_its_messages() {
    let bench = Bench::new();
    let base = [
        "train.max_steps=3",
        "data.eval_fraction=0.3",
        "train.eval_steps=1",
        "train.logging_steps=1",
    ];
    bench.train(&[&base[..], &["train.output_dir=whole"]].concat());
    let words = ["train", "--recipe", "r.toml", "train.output_dir=run"];
    let mut child = bench
        .command(&[&words[..], &base].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut first = [0];
    child.stderr.take().unwrap().read_exact(&mut first).unwrap();
    assert_eq!(wait(&mut child, Duration::from_secs(120)), Some(0));
    assert_same(&bench, "whole", "run");
}

/// Row C10.
#[test]
fn a_run_directory_belongs_to_one_run() {
    let bench = Bench::new();
    let base = ["train.max_steps=100000", "train.save_steps=0", "train.output_dir=run"];
    let mut child = bench.start(&base);
    let until = Instant::now() + Duration::from_secs(60);
    while bench.steps("run").is_empty() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    let second = bench.ft(&["train", "--recipe", "r.toml", "train.output_dir=run", "--overwrite"]);
    assert_eq!(second.status.code(), Some(1));
    assert!(said(&second).contains("in progress"), "{}", said(&second));
    child.kill().unwrap();
    child.wait().unwrap();

    let third = bench.ft(&["train", "--recipe", "r.toml", "train.output_dir=run"]);
    assert_eq!(third.status.code(), Some(2), "{}", said(&third));
    assert!(said(&third).contains("--overwrite"), "{}", said(&third));
}

/// Row R6: a resume with another program or other CPU operations continues, and warns that the last bits may differ.
#[test]
fn a_resume_by_another_program_or_processor_says_so() {
    let bench = Bench::new();
    let resume = |program: &std::path::Path, steps: &str, operations: Option<&str>| {
        let words = [
            "train",
            "--recipe",
            "r.toml",
            "train.save_steps=1",
            "train.output_dir=run",
            steps,
        ];
        let inner = bench.command(&words);
        let mut command = Command::new(program);
        command.args(inner.get_args()).current_dir(bench.dir.path());
        for (name, value) in inner.get_envs() {
            command.env(name, value.unwrap());
        }
        if bench.path("run").exists() {
            command.arg("--resume");
        }
        if let Some(operations) = operations {
            command.env("FT_CPU", operations);
        }
        let out = command.output().unwrap();
        assert!(out.status.success(), "{steps}\n{}", said(&out));
        // Lines are wrapped.
        said(&out).split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let ft = std::path::Path::new(env!("CARGO_BIN_EXE_ft"));
    let told = "the last bits of the numbers may differ from those of a run that was not stopped";
    for steps in ["train.max_steps=1", "train.max_steps=2"] {
        let text = resume(ft, steps, None);
        assert!(!text.contains("the last bits"), "{text}");
    }
    let environment = fs::read_to_string(bench.path("run/environment.json")).unwrap();
    let environment: serde_json::Value = serde_json::from_str(&environment).unwrap();
    let own = environment["cpu"]["operations"].as_str().unwrap();
    if own == "portable" {
        eprintln!("skipped: this CPU has one set of operations");
    } else {
        let text = resume(ft, "train.max_steps=3", Some("portable"));
        let changed = format!("(CPU instructions: {own} -> portable): {told}");
        assert!(text.contains("checkpoint-2") && text.contains(&changed), "{text}");
        let warnings = bench.lines("run/events.jsonl");
        let warned = |e: &&serde_json::Value| e["event"] == "warning" && e["message"].to_string().contains(told);
        assert_eq!(warnings.iter().filter(warned).count(), 1);
    }
    // Bytes behind the end of the program change nothing but its hash.
    let other = bench.path("other");
    let mut bytes = fs::read(ft).unwrap();
    bytes.push(0);
    fs::write(&other, bytes).unwrap();
    fs::set_permissions(&other, fs::metadata(ft).unwrap().permissions()).unwrap();
    let text = resume(&other, "train.max_steps=4", Some("portable"));
    assert!(
        text.contains("(the program file, by its hash: ") && text.contains(told),
        "{text}"
    );
}

/// Rows D10, R6.
#[test]
fn a_resume_of_another_run_is_refused() {
    let bench = Bench::new();
    fs::copy(bench.path("rows.jsonl"), bench.path("eval.jsonl")).unwrap();
    let base = [
        "train.max_steps=4",
        "train.save_steps=2",
        "train.output_dir=run",
        "data.eval=eval.jsonl",
    ];
    bench.train(&base);
    let again = |more: &[&str]| bench.ft(&[&["train", "--recipe", "r.toml", "--resume"][..], &base, more].concat());
    let result = || (files(&bench.path("run/checkpoint-4")), files(&bench.path("run/final")));
    let before = result();
    let refused = |out: Output, change: &str, name: &str| {
        let text = said(&out);
        assert_eq!(out.status.code(), Some(1), "{change}\n{text}");
        let mut lines = text.lines();
        assert!(
            lines.any(|line| line.trim_start().starts_with(&format!("{name}: ")) && line.contains(" -> ")),
            "{change}: {name} is not named\n{text}"
        );
    };
    for change in [
        "train.seed=7",
        "optimizer.learning_rate=1",
        "optimizer.name=adafactor",
        "model.dtype=bf16",
        "train.batch_size=3",
        "train.gradient_accumulation_steps=3",
        "data.max_length=500",
        "data.chat_template=chatml",
    ] {
        refused(again(&[change]), change, change.split('=').next().unwrap());
    }
    // Files that the recipe names, or that are beside the model. The rows are compared as the model reads them.
    let row = "{\"messages\": [{\"role\": \"user\", \"content\": \"More?\"}, {\"role\": \"assistant\", \"content\": \"Yes.\"}]}\n";
    let more = |text: &str| format!("{text}{row}");
    let token = |text: &str| {
        let mut json: serde_json::Value = serde_json::from_str(text).unwrap();
        let tokens = json["model"]["vocab"].as_object_mut().unwrap();
        let id = tokens.remove(".").unwrap();
        tokens.insert("\u{2603}".into(), id);
        json.to_string()
    };
    let template = |text: &str| text.replace("<|im_start|>", "<|im_start|>!");
    type Change<'a> = &'a dyn Fn(&str) -> String;
    let changes: [(&str, Change, &[&str]); 4] = [
        ("rows.jsonl", &more, &["training rows"]),
        ("eval.jsonl", &more, &["evaluation rows"]),
        ("model/tokenizer.json", &token, &["training rows", "evaluation rows"]),
        (
            "model/chat_template.jinja",
            &template,
            &["training rows", "evaluation rows"],
        ),
    ];
    for (file, change, names) in changes {
        let text = fs::read_to_string(bench.path(file)).unwrap();
        let changed = change(&text);
        assert_ne!(text, changed, "{file}");
        fs::write(bench.path(file), changed).unwrap();
        for name in names {
            refused(again(&[]), file, name);
        }
        fs::write(bench.path(file), text).unwrap();
    }
    assert!(result() == before, "a refused resume changes nothing");

    // What the steps do not depend on may change; `resolved.toml` has the new values.
    let harmless = [
        "train.logging_steps=2",
        "train.save_steps=3",
        "train.save_total_limit=1",
    ];
    let out = again(&harmless);
    let text = said(&out);
    assert!(out.status.success() && text.contains("resumed after step 4"), "{text}");
    let resolved = fs::read_to_string(bench.path("run/resolved.toml")).unwrap();
    for change in harmless {
        let (key, value) = change.strip_prefix("train.").unwrap().split_once('=').unwrap();
        let line = format!("{key} = {value}");
        assert!(resolved.lines().any(|l| l.starts_with(&line)), "{line}\n{resolved}");
    }
    assert!(result() == before, "nothing was left to do");

    // A flipped bit in a checkpoint is detected.
    let (bench, base) = (Bench::new(), &base[..3]);
    bench.train(base);
    let file = bench.path("run/checkpoint-4/weights.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&file, bytes).unwrap();
    let out = bench.ft(&[&["train", "--recipe", "r.toml", "--resume"][..], base].concat());
    assert_eq!(out.status.code(), Some(1));
    assert!(said(&out).contains("weights.safetensors"), "{}", said(&out));
}
