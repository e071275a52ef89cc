//! The first commands of a user: each runs in a pseudo-terminal of 80 and of 60 columns. No line is wider than the
//! window, no command is without output for long, Ctrl-C is answered at once.
#![cfg(target_os = "linux")]

#[path = "terminal/pty.rs"]
mod pty;

use pty::{Pty, Seen};
use std::path::Path;
use std::time::Duration;

/// A working directory with a link to `assets`: the recipes use paths relative to the root of the clone.
fn workplace() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets");
    std::os::unix::fs::symlink(assets, dir.path().join("assets")).unwrap();
    dir
}

/// Long timeout: a debug build is slow.
const PATIENCE: Duration = Duration::from_secs(500);

/// Runs a command to its end, checks the complete output, and returns it.
fn ft(dir: &Path, width: u16, arguments: &[&str], environment: &[(&str, &str)], code: i32) -> Seen {
    let mut pty = Pty::start(dir, width, arguments, environment);
    let seen = pty.finish(PATIENCE);
    assert_eq!(seen.code, code, "{arguments:?}\n{}", seen.text());
    seen.check(&format!("{arguments:?} at {width} columns"));
    seen
}

/// Steps of two seconds each: a large window of small micro-batches with kept gradients.
const SLOW: [&str; 9] = [
    "train.gradient_accumulation_steps=40",
    "train.batch_size=4",
    "train.max_steps=2",
    "train.logging_steps=1",
    "train.save_steps=0",
    "train.predict_with_generate=false",
    "train.sample_prompts=[]",
    "tune.method=full",
    "train.output_dir=runs/slow",
];

/// Arguments for `ft train` of the quickstart with the slow steps; `more` overrides them.
fn slow<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let key = |word: &str| word.split('=').next().map(str::to_string);
    let base = SLOW.into_iter().filter(|s| !more.iter().any(|m| key(m) == key(s)));
    ["train", "--recipe", "quickstart.toml"]
        .into_iter()
        .chain(base)
        .chain(more.iter().copied())
        .collect()
}

fn first_ten_minutes(width: u16) {
    let dir = workplace();
    let at = dir.path();
    // A hub that accepts connections and never answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let hub = format!("http://{}", silent.local_addr().unwrap());
    let seen = ft(at, width, &["doctor"], &[("HF_ENDPOINT", &hub), ("NO_PROXY", "*")], 0);
    assert!(seen.text().contains("verdict"), "{}", seen.text());
    assert!(seen.text().contains("no answer within 3 s"), "{}", seen.text());
    ft(at, width, &["recipes"], &[], 0);
    ft(at, width, &["recipes", "copy", "quickstart"], &[], 0);
    ft(at, width, &["data", "--recipe", "quickstart.toml"], &[], 0);
    ft(at, width, &["plan", "--recipe", "quickstart.toml"], &[], 0);
    let sweep = [
        &["tune-lr", "quickstart.toml", "--steps", "8", "train.batch_size=1"][..],
        &["train.gradient_accumulation_steps=1"],
    ]
    .concat();
    let seen = ft(at, width, &sweep, &[], 0);
    // A line of the plot that was broken has dots without the axis before them.
    let dots = |c: char| ('\u{2801}'..='\u{28ff}').contains(&c);
    let text = seen.text();
    let plot: Vec<&str> = text.lines().filter(|line| line.contains(dots)).collect();
    assert!(plot.len() > 3 && plot.iter().all(|line| line.contains('│')), "{text}");

    // ---- a run stopped in the middle of a step
    let mut pty = Pty::start(at, width, &slow(&[]), &[]);
    pty.wait_for("micro-batch", PATIENCE);
    pty.interrupt();
    let answered = pty.wait_for("stopping", PATIENCE);
    let seen = pty.finish(PATIENCE);
    let (text, allowed) = (seen.text(), seen.patience());
    assert!(answered < allowed, "Ctrl-C was answered after {answered:?}\n{text}");
    assert_eq!(seen.code, 130, "{text}");
    seen.check(&format!("a stop at {width} columns"));
    assert!(seen.flat().contains("is discarded (micro-batch "), "{text}");
    assert!(at.join("runs/slow/checkpoint-0").exists() || at.join("runs/slow/checkpoint-1").exists());

    // ---- resumes, in a window that becomes narrower
    let mut pty = Pty::start(at, width, &slow(&["--resume"]), &[]);
    pty.wait_for("micro-batch", PATIENCE);
    pty.resize(width - 15);
    let seen = pty.finish(PATIENCE);
    assert_eq!(seen.code, 0, "{}", seen.text());
    seen.check(&format!("a resume at {width} columns"));

    let model = "runs/slow/final";
    let data = "assets/world/eval.jsonl";
    let seen = ft(at, width, &["eval", "--model", model, "--data", data], &[], 0);
    assert!(seen.text().contains("perplexity"), "{}", seen.text());
    let ask = ["generate", "--model", model, "--chat", "--prompt", "What is 2 + 3?"];
    ft(at, width, &ask, &[], 0);
    let lora = [
        &["train", "--recipe", "quickstart.toml", "tune.method=lora"][..],
        &["train.max_steps=2", "train.save_steps=0", "train.sample_prompts=[]"],
        &["train.predict_with_generate=false", "train.output_dir=runs/lora"],
    ]
    .concat();
    ft(at, width, &lora, &[], 0);
    let merge = [
        "merge",
        "--model",
        "assets/tiny",
        "--adapter",
        "runs/lora/final",
        "--out",
        "merged",
    ];
    ft(at, width, &merge, &[], 0);
}

#[test]
fn the_first_ten_minutes_at_80_columns() {
    first_ten_minutes(80);
}

#[test]
fn the_first_ten_minutes_at_60_columns() {
    first_ten_minutes(60);
}

/// Completes words in an interactive bash. `^A` goes to the start of the line, where `printf` makes a text of it.
#[test]
fn bash_completes_with_the_tab_key() {
    let dir = workplace();
    std::fs::write(dir.path().join("mine.toml"), "").unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_ft")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let environment = [("PATH", path.as_str()), ("PS1", "$ "), ("INPUTRC", "/dev/null")];
    let mut bash = Pty::program("bash", dir.path(), 100, &["--norc", "--noprofile", "-i"], &environment);
    bash.wait_for("$ ", PATIENCE);
    bash.press("source <(ft completions bash); echo lo''aded\n");
    bash.wait_for("loaded", PATIENCE);
    for (typed, completed) in [
        ("ft wat\t", "<ft watch >"),
        ("ft train mi\t", "<ft train mine.toml >"),
        (
            "ft train mine.toml train.max_st\t5 tune.method=bl\t",
            "<ft train mine.toml train.max_steps=5 tune.method=block >",
        ),
        ("ft recipes copy quick\t", "<ft recipes copy quickstart >"),
    ] {
        bash.press(typed);
        bash.press("\x01printf '<%s>' \"\x05\"\n");
        bash.wait_for(completed, PATIENCE);
    }
    bash.press("exit\n");
    assert_eq!(bash.finish(PATIENCE).code, 0);
}

/// Row S3.
#[test]
fn a_second_interrupt_says_what_is_lost() {
    let dir = workplace();
    ft(dir.path(), 80, &["recipes", "copy", "quickstart"], &[], 0);
    // Gradients are applied immediately, so the step must be finished.
    let train = slow(&[
        "train.gradient_accumulation_steps=1",
        "train.batch_size=200",
        "train.max_grad_norm=0",
        "train.max_steps=2",
    ]);
    let mut pty = Pty::start(dir.path(), 80, &train, &[]);
    pty.wait_for("backward", PATIENCE);
    pty.interrupt();
    let first = pty.wait_for("stopping after this step", PATIENCE);
    pty.interrupt();
    let second = pty.wait_for("stopped now: step 1 lost", PATIENCE);
    let seen = pty.finish(PATIENCE);
    assert!(
        first < seen.patience() && second < seen.patience(),
        "{first:?} {second:?}"
    );
    assert_eq!(seen.code, 131, "{}", seen.text());
    seen.check("two interrupts");
    let text = seen.flat();
    assert!(text.contains("Ctrl-C again stops now and loses step 1"), "{text}");
}

#[test]
fn without_utf8_everything_is_ascii() {
    let dir = workplace();
    let ascii = [("LC_ALL", "C")];
    ft(dir.path(), 80, &["recipes", "copy", "quickstart"], &ascii, 0);
    for arguments in [
        &["plan", "--recipe", "quickstart.toml"][..],
        &["data", "--recipe", "quickstart.toml"],
        &[
            "train",
            "--recipe",
            "quickstart.toml",
            "train.max_steps=2",
            "train.save_steps=0",
        ],
    ] {
        let seen = ft(dir.path(), 80, arguments, &ascii, 0);
        assert!(seen.raw().is_ascii(), "{arguments:?}\n{}", seen.text());
    }
}

#[test]
fn quiet_leaves_results_only() {
    let dir = workplace();
    ft(dir.path(), 80, &["recipes", "copy", "quickstart"], &[], 0);
    let arguments = ["train", "--recipe", "quickstart.toml", "train.max_steps=2", "--quiet"];
    let more = [
        "train.save_steps=0",
        "train.sample_prompts=[]",
        "train.predict_with_generate=false",
    ];
    let mut pty = Pty::start(dir.path(), 80, &[&arguments[..], &more].concat(), &[]);
    let seen = pty.finish(PATIENCE);
    assert_eq!(seen.code, 0, "{}", seen.text());
    let lines: Vec<String> = seen.text().lines().map(str::to_string).collect();
    let results: Vec<&String> = lines
        .iter()
        .filter(|l| !l.starts_with("warning:") && !l.starts_with("  "))
        .collect();
    assert_eq!(results, ["runs/quickstart/final"], "{}", seen.text());

    // Without progress output no line is redrawn.
    let train = slow(&["train.gradient_accumulation_steps=10", "train.max_steps=1"]);
    let mut pty = Pty::start(dir.path(), 80, &train, &[("FT_NO_PROGRESS", "1")]);
    let seen = pty.finish(PATIENCE);
    let redrawn = ["\x1b[K", "\x1b[J"].iter().any(|code| seen.raw().contains(code));
    assert!(seen.code == 0 && !redrawn, "{}", seen.raw());
    assert!(seen.text().contains("step 1/1"), "{}", seen.text());
}

/// The codes that leave the view.
const LEFT: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";

#[test]
fn a_watched_run_is_followed_and_the_terminal_is_given_back() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("runs/a");
    std::fs::create_dir_all(&run).unwrap();
    std::fs::write(run.join("resolved.toml"), "[train]\nstage = \"sft\"  # recipe\n").unwrap();
    std::fs::write(
        run.join("events.jsonl"),
        "{\"event\":\"start\",\"steps\":50,\"time\":1.0}\n",
    )
    .unwrap();
    let metrics = |steps: u64| {
        let line = |s| {
            format!(
                "{{\"step\":{s},\"loss\":{}.5,\"grad_norm\":1.5,\"time\":{s}.0}}\n",
                90 - s
            )
        };
        std::fs::write(run.join("metrics.jsonl"), (1..=steps).map(line).collect::<String>()).unwrap();
    };
    metrics(20);
    let mut pty = Pty::start(dir.path(), 80, &["watch"], &[]);
    pty.wait_for("step 20 of 50", PATIENCE);
    pty.wait_for("q quit", PATIENCE);
    metrics(30);
    pty.wait_for("step 30 of 50", PATIENCE);
    // A resume cuts lines.
    metrics(10);
    pty.wait_for("step 10 of 50", PATIENCE);
    pty.press("m");
    pty.wait_for("grad_norm", PATIENCE);
    pty.resize(50);
    pty.press("q");
    let seen = pty.finish(PATIENCE);
    assert_eq!(seen.code, 0, "{}", seen.raw());
    assert!(seen.raw().ends_with(LEFT), "{:?}", seen.raw());

    // Ctrl-C ends it too, and gives the terminal back.
    let mut pty = Pty::start(dir.path(), 80, &["watch", "runs/a"], &[]);
    pty.wait_for("q quit", PATIENCE);
    pty.interrupt();
    let seen = pty.finish(PATIENCE);
    assert_eq!(seen.code, 130, "{}", seen.raw());
    assert!(seen.raw().contains(LEFT), "{:?}", seen.raw());
}

/// Row S3: the window of a run is closed. The state is saved, and the run goes on elsewhere.
#[test]
fn a_run_whose_terminal_is_closed_saves_its_state() {
    let dir = workplace();
    ft(dir.path(), 80, &["recipes", "copy", "quickstart"], &[], 0);
    let endless = slow(&[
        "train.gradient_accumulation_steps=1",
        "train.max_steps=100000",
        "schedule.name=constant",
    ]);
    let mut pty = Pty::start(dir.path(), 80, &endless, &[]);
    pty.wait_for("3/100000", PATIENCE);
    assert_eq!(pty.close(), Some(129));
    let runs = std::fs::read_dir(dir.path().join("runs/slow")).unwrap();
    let steps = runs.filter_map(|e| {
        e.unwrap()
            .file_name()
            .to_str()?
            .strip_prefix("checkpoint-")?
            .parse()
            .ok()
    });
    let saved: u64 = steps.max().expect("a checkpoint");
    let more = format!("train.max_steps={}", saved + 1);
    let resume = slow(&[
        "train.gradient_accumulation_steps=1",
        &more,
        "schedule.name=constant",
        "--resume",
    ]);
    let seen = ft(dir.path(), 80, &resume, &[], 0);
    assert!(
        seen.flat().contains(&format!("resumed after step {saved}")),
        "{}",
        seen.text()
    );
}

/// Row W6: a color code can hide text, so nothing of an answer acts on the terminal.
#[test]
fn an_answer_with_escapes_is_shown_as_text() {
    let dir = workplace();
    let model = dir.path().join("model");
    std::fs::create_dir(&model).unwrap();
    for entry in std::fs::read_dir(dir.path().join("assets/tiny")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
    }
    let file = model.join("tokenizer.json");
    let mut tokenizer: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let hide = serde_json::json!({"type": "Replace", "pattern": {"Regex": "[a-z]"}, "content": "\u{1b}[8m\u{1b}[2Jx"});
    tokenizer["decoder"] = serde_json::json!({"type": "Sequence", "decoders": [tokenizer["decoder"], hide]});
    std::fs::write(&file, tokenizer.to_string()).unwrap();
    let words = [
        "generate",
        "--model",
        "model",
        "--prompt",
        "What is",
        "--max-new-tokens",
        "8",
    ];
    for chat in [&[][..], &["--chat"]] {
        let seen = Pty::start(dir.path(), 80, &[&words[..], chat].concat(), &[]).finish(PATIENCE);
        assert_eq!(seen.code, 0, "{}", seen.text());
        assert!(seen.raw().contains("\\u{1b}[8m\\u{1b}[2Jx"), "{:?}", seen.raw());
        assert!(
            !seen.raw().contains("\x1b[8m") && !seen.raw().contains("\x1b[2J"),
            "{:?}",
            seen.raw()
        );
    }
}

/// A text that on a terminal is hidden and red, sets the title and clears the window; how it is shown; and what ft never writes
/// itself.
const HOSTILE: &str = "seen\u{1b}[8m\u{1b}[31m\u{1b}]0;x\u{7}\u{9b}2Jend";
const SHOWN: &str = "seen\\u{1b}[8m\\u{1b}[31m\\u{1b}]0;x\\u{7}\\u{9b}2Jend";
const ACTS: [&str; 5] = ["\u{1b}[8m", "\u{1b}[31m", "\u{1b}]", "\u{7}", "\u{9b}"];

/// An adapter directory with one tensor.
fn write_adapter(dir: &Path, base: &str, tensor: &str) {
    let config = serde_json::json!({
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "base_model_name_or_path": base,
    });
    let header = serde_json::json!({tensor: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).to_string();
    let weights = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 4]].concat();
    std::fs::create_dir(dir).unwrap();
    std::fs::write(dir.join("adapter_config.json"), config.to_string()).unwrap();
    std::fs::write(dir.join("adapter_model.safetensors"), weights).unwrap();
}

/// A run directory with this text in its events; `path` is the setting `model.path`, in TOML.
fn write_run(dir: &Path, path: &str, text: &str) {
    let resolved = format!("[train]\nstage = \"sft\"  # recipe\n[model]\npath = {path}  # recipe\n");
    let events = [
        serde_json::json!({"event": "start", "steps": 2, "time": 1.0}),
        serde_json::json!({"event": "warning", "message": text, "time": 2.0}),
        serde_json::json!({"event": text, "time": 3.0}),
        serde_json::json!({"event": "stop", "reason": text, "time": 4.0}),
    ];
    let events: String = events.iter().map(|event| format!("{event}\n")).collect();
    let metrics = "{\"step\":1,\"loss\":2.0,\"time\":2.0}\n{\"step\":2,\"loss\":1.0,\"time\":3.0}\n";
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(dir.join("resolved.toml"), resolved).unwrap();
    std::fs::write(dir.join("events.jsonl"), events).unwrap();
    std::fs::write(dir.join("metrics.jsonl"), metrics).unwrap();
}

/// Row W6.
/// Commands that succeed, on files of somebody else. The window is wide, so that no line is broken.
#[test]
fn text_of_files_is_shown_and_acts_on_no_terminal() {
    let dir = workplace();
    let at = dir.path();
    write_adapter(&at.join("hostile"), HOSTILE, HOSTILE);
    write_adapter(&at.join("plain"), "base", "tensor");
    let run = format!("runs/{HOSTILE}");
    // TOML allows control characters from U+0080 on.
    write_run(&at.join(&run), "\"p\u{9b}2J\\u001b[8m\"", HOSTILE);
    write_run(&at.join("runs/plain"), "\"p\"", "done");
    let yaml = format!("model_name_or_path: \"{HOSTILE}\"\nlearning_rate: 1e-4\n");
    std::fs::write(at.join("value.yaml"), yaml).unwrap();
    let unknown = serde_json::json!({"model_name_or_path": "m", HOSTILE: 1});
    std::fs::write(at.join("key.json"), unknown.to_string()).unwrap();
    let message = |role: &str| serde_json::json!({"role": role, "content": HOSTILE});
    let row = serde_json::json!({"messages": [message("user"), message("assistant")]});
    std::fs::write(at.join("rows.jsonl"), format!("{row}\n")).unwrap();
    ft(at, 200, &["recipes", "copy", "quickstart"], &[], 0);

    let run = run.as_str();
    let commands: [(&[&str], &str); 10] = [
        (&["adapter", "show", "hostile"], SHOWN),
        (&["adapter", "diff", "hostile", "plain"], SHOWN),
        (&["runs"], SHOWN),
        (&["runs", "show", run], SHOWN),
        (&["runs", "compare", "runs"], SHOWN),
        (
            &["runs", "diff", run, "runs/plain"],
            "\"p\\u{9b}2J\\u001b[8m\" -> \"p\"",
        ),
        (&["runs", "plot", "runs"], SHOWN),
        // The recipe has TOML's own escapes.
        (
            &["import", "value.yaml"],
            "seen\\u001B[8m\\u001B[31m\\u001B]0;x\\u0007\\u{9b}2Jend",
        ),
        (&["import", "key.json"], SHOWN),
        (&["data", "--recipe", "quickstart.toml", "data.train=rows.jsonl"], SHOWN),
    ];
    let plain = [("NO_COLOR", "1"), ("FT_NO_PROGRESS", "1")];
    for (arguments, shown) in commands {
        for environment in [&plain[..], &[]] {
            let seen = Pty::start(at, 200, arguments, environment).finish(PATIENCE);
            let raw = seen.raw();
            assert_eq!(seen.code, 0, "{arguments:?}: {raw:?}");
            assert!(raw.contains(shown), "{arguments:?}: {raw:?}");
            let acts = ACTS.iter().find(|code| raw.contains(**code));
            assert_eq!(acts, None, "{arguments:?}: {raw:?}");
            // Without colors and progress ft itself writes no control character except for line breaks.
            let control = raw.chars().any(|c| c.is_control() && !"\r\n".contains(c));
            assert!(environment.is_empty() || !control, "{arguments:?}: {raw:?}");
        }
    }

    let mut pty = Pty::start(at, 200, &["watch", run], &[]);
    pty.wait_for("q quit", PATIENCE);
    pty.press("q");
    let seen = pty.finish(PATIENCE);
    let raw = seen.raw();
    assert!(seen.code == 0 && raw.contains(SHOWN), "{raw:?}");
    assert!(!ACTS.iter().any(|code| raw.contains(code)), "{raw:?}");
}

/// Row W6.
/// The shell puts names of files into the arguments, and the refusal of an argument shows it.
#[test]
fn names_of_files_in_refused_arguments_act_on_no_terminal() {
    let dir = workplace();
    let (flag, value) = (format!("--{HOSTILE}"), format!("--threads={HOSTILE}"));
    let (flag, value) = (flag.as_str(), value.as_str());
    let commands: [&[&str]; 5] = [
        &["merge", HOSTILE],
        &["runs", "show", "runs/x", flag],
        &["doctor", value],
        &["train", flag],
        &[HOSTILE],
    ];
    for arguments in commands {
        for environment in [&[("NO_COLOR", "1")][..], &[]] {
            let seen = Pty::start(dir.path(), 200, arguments, environment).finish(PATIENCE);
            let raw = seen.raw();
            assert!(seen.code == 2 && raw.contains(SHOWN), "{arguments:?}: {raw:?}");
            // An error of ft is red.
            let acts = ACTS.iter().find(|code| **code != "\u{1b}[31m" && raw.contains(**code));
            assert_eq!(acts, None, "{arguments:?}: {raw:?}");
            let control = raw.chars().any(|c| c.is_control() && !"\r\n".contains(c));
            assert!(environment.is_empty() || !control, "{arguments:?}: {raw:?}");
        }
        for json in [false, true] {
            let out = std::process::Command::new(env!("CARGO_BIN_EXE_ft"))
                .args(arguments)
                .args(json.then_some("--json"))
                .current_dir(dir.path())
                .output()
                .unwrap();
            let text = String::from_utf8([out.stdout, out.stderr].concat()).unwrap();
            assert_eq!(out.status.code(), Some(2), "{text:?}");
            assert!(text.contains(SHOWN), "{arguments:?}: {text:?}");
            assert!(
                !text.chars().any(|c| c.is_control() && c != '\n'),
                "{arguments:?}: {text:?}"
            );
        }
    }
}
