//! Run directories: which files a run may change, when it refuses, and that stored data is verified.

use crate::bench::{Bench, copy_all, files, number, said};
use crate::decay::{DAMAGES, damage};
use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;
use std::time::{Duration, Instant};

const SHORT: [&str; 3] = ["train.max_steps=4", "train.save_steps=2", "train.output_dir=run"];

fn train(bench: &Bench, more: &[&str]) -> std::process::Output {
    bench.ft(&[&["train", "--recipe", "r.toml"][..], &SHORT, more].concat())
}

fn put(bench: &Bench, names: &[&str]) {
    for name in names {
        let path = bench.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, name).unwrap();
    }
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(120);
    while !done() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(3));
    }
}

const THEIRS: [&str; 8] = [
    "run/photos/a.jpg",
    "run/photos.old-2023/a.jpg",
    "run/notes/a.txt",
    "run/notes.tmp-1999",
    "run/plan.json.tmp-7",
    "run/final.tmp-7/a.txt",
    "run/checkpoint-best/a.txt",
    "run/trained.old-12/a.txt",
];

/// Row C11.
#[test]
fn a_directory_of_someone_else_is_refused_and_untouched() {
    for flags in [&[][..], &["--overwrite"], &["--resume"]] {
        let bench = Bench::new();
        put(&bench, &THEIRS);
        let before = files(&bench.path("run"));
        let out = train(&bench, flags);
        assert_eq!(out.status.code(), Some(2), "{}", said(&out));
        assert!(
            said(&out).contains("not a run of ft") && said(&out).contains("photos"),
            "{}",
            said(&out)
        );
        assert_eq!(files(&bench.path("run")), before, "{flags:?}");
    }
}

#[test]
fn a_refused_run_leaves_nothing_behind() {
    let bench = Bench::new();
    let out = train(&bench, &["--resume"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(said(&out).contains("no run to resume"), "{}", said(&out));
    // Detected late: a checkpoint of another run.
    assert!(train(&bench, &["train.output_dir=first"]).status.success());
    for (made, resume) in [(false, "first"), (true, "first/checkpoint-4")] {
        if made {
            fs::create_dir(bench.path("run")).unwrap();
        }
        let out = train(&bench, &["train.seed=9", "--resume", resume]);
        assert_eq!(out.status.code(), Some(1), "{}", said(&out));
        assert!(said(&out).contains("differ from the saved run"), "{}", said(&out));
        assert_eq!(bench.path("run").exists(), made);
    }
    assert!(files(&bench.path("run")).is_empty());
}

/// Row C11.
#[test]
fn overwriting_removes_the_run_says_so_and_keeps_the_rest() {
    let bench = Bench::new();
    assert!(train(&bench, &[]).status.success());
    put(&bench, &THEIRS);
    put(&bench, &["run/checkpoint-2/notes.txt", "run/checkpoint-9/photo.jpg"]);
    symlink(bench.path("model"), bench.path("run/checkpoint-7")).unwrap();
    let model = files(&bench.path("model"));
    let out = train(
        &bench,
        &["--overwrite", "train.save_steps=0", "train.save_total_limit=1"],
    );
    assert!(out.status.success(), "{}", said(&out));
    for name in THEIRS
        .iter()
        .chain(&["run/checkpoint-2/notes.txt", "run/checkpoint-9/photo.jpg"])
    {
        assert_eq!(fs::read_to_string(bench.path(name)).unwrap(), *name);
    }
    assert_eq!(files(&bench.path("model")), model);
    assert!(bench.path("run/checkpoint-7").is_symlink() && !bench.path("run/checkpoint-4").exists());
    let said = said(&out);
    assert!(
        said.contains("removed from the earlier run: checkpoint-4") && said.contains("final"),
        "{said}"
    );
    assert!(
        said.contains("not removed, because") && said.contains("checkpoint-9"),
        "{said}"
    );
}

/// Row R6.
#[test]
fn what_someone_added_to_final_is_kept_when_it_is_replaced() {
    let bench = Bench::new();
    assert!(train(&bench, &[]).status.success());
    // Its own `final/` is replaced without leftovers.
    let longer = train(&bench, &["--resume", "train.max_steps=5"]);
    assert!(longer.status.success());
    assert!(
        said(&longer).contains("changed since checkpoint-4: train.max_steps 4 -> 5")
            && said(&longer).contains("the run has 5 steps now, and had 4"),
        "{}",
        said(&longer)
    );
    let shorter = train(&bench, &["--resume", "train.max_steps=3"]);
    assert_eq!(shorter.status.code(), Some(2), "{}", said(&shorter));
    assert!(
        said(&shorter).contains("would end before the checkpoint"),
        "{}",
        said(&shorter)
    );
    assert!(!bench.path("run/final.left").exists());
    put(&bench, &["run/final/mine.gguf"]);
    let out = train(&bench, &["--resume", "train.max_steps=6"]);
    assert!(
        out.status.success() && said(&out).contains("final.left"),
        "{}",
        said(&out)
    );
    assert!(bench.path("run/final.left/mine.gguf").exists() && !bench.path("run/final/mine.gguf").exists());
}

/// Row R8.
#[test]
fn a_run_of_an_earlier_version_is_known_and_goes_on() {
    let bench = Bench::new();
    assert!(train(&bench, &[]).status.success());
    // An old run: no manifest, and a lock with unix time.
    fs::remove_file(bench.path("run/run.json")).unwrap();
    fs::write(bench.path("run/run.lock"), "process 4242 since unix time 1763000000\n").unwrap();
    let partial = bench.path("run/checkpoint-6.tmp-4242");
    fs::create_dir(&partial).unwrap();
    fs::write(bench.path("run/plan.json.tmp-4242"), "{").unwrap();
    let out = train(&bench, &["--resume", "train.max_steps=6"]);
    assert!(out.status.success(), "{}", said(&out));
    assert!(!partial.exists() && !bench.path("run/plan.json.tmp-4242").exists());
    assert!(said(&out).contains("plan.json.tmp-4242"), "{}", said(&out));
    assert!(bench.path("run/final").exists() && bench.path("run/final.left").exists());
}

/// Row R8: `versions/` has a checkpoint of each layout that was released or is about to be, with LoRA on `q_proj`. Each is read.
#[test]
fn a_kept_checkpoint_of_an_earlier_version_goes_on() {
    let settings = [
        "tune.method=lora",
        "tune.lora.r=1",
        "tune.lora.target_modules=[\"q_proj\"]",
        "schedule.name=constant",
        "schedule.warmup_ratio=0",
    ];
    let kept = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run/versions");
    let versions: Vec<_> = fs::read_dir(kept).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(!versions.is_empty());
    for version in versions {
        let bench = Bench::new();
        assert!(
            train(&bench, &[&settings[..], &["train.output_dir=whole"]].concat())
                .status
                .success()
        );
        copy_all(&version.join("checkpoint-2"), &bench.path("run/checkpoint-2"));
        let out = train(&bench, &[&settings[..], &["--resume"]].concat());
        let text = said(&out);
        assert!(
            out.status.success() && text.contains("resumed after step 2"),
            "{version:?}\n{text}"
        );
        // Numbers of another machine: not bit for bit.
        let (whole, run) = (bench.steps("whole"), bench.steps("run"));
        assert_eq!(run.len(), 2);
        for (a, b) in whole[2..].iter().zip(&run) {
            let (a, b) = (number(a, "loss"), number(b, "loss"));
            assert!((a - b).abs() <= 1e-4 * a, "{version:?}: {b}, a new run {a}");
        }
    }
}

/// Row C11.
#[test]
fn a_run_that_ended_before_its_first_checkpoint_starts_again() {
    let bench = Bench::new();
    let endless = ["train.max_steps=100000", "train.save_steps=0", "train.output_dir=run"];
    let mut child = bench.start(&endless);
    wait_for("no first step", || !bench.steps("run").is_empty());
    child.kill().unwrap();
    child.wait().unwrap();
    let out = train(&bench, &[]);
    assert_eq!(out.status.code(), Some(2));
    assert!(
        said(&out).contains("no checkpoint yet") && said(&out).contains("--resume"),
        "{}",
        said(&out)
    );
    let out = train(&bench, &["--resume"]);
    assert!(
        out.status.success() && said(&out).contains("starts from the beginning"),
        "{}",
        said(&out)
    );
    assert_eq!(bench.steps("run").len(), 4);
    // A finished run without checkpoints does not start again without a flag.
    let bench = Bench::new();
    assert!(train(&bench, &["train.save_steps=0"]).status.success());
    let final_dir = files(&bench.path("run/final"));
    let out = train(&bench, &["--resume"]);
    assert!(
        said(&out).contains("is finished") && !out.status.success(),
        "{}",
        said(&out)
    );
    assert_eq!(files(&bench.path("run/final")), final_dir);
}

/// Row C7.
#[test]
fn a_run_directory_that_moves_away_stops_the_run() {
    let bench = Bench::new();
    let endless = ["train.max_steps=100000", "train.save_steps=5", "train.output_dir=run"];
    let mut command = bench.command(&[&["train", "--recipe", "r.toml"][..], &endless].concat());
    let child = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
    wait_for("no checkpoint", || bench.path("run/checkpoint-5").exists());
    fs::rename(bench.path("run"), bench.path("moved")).unwrap();
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(1), "{}", said(&out));
    assert!(
        said(&out).contains("was moved") && said(&out).contains("moved"),
        "{}",
        said(&out)
    );
    assert!(!bench.path("run").exists(), "no second run directory");
    let steps = fs::read_dir(bench.path("moved")).unwrap().filter_map(|e| {
        let name = e.unwrap().file_name().into_string().unwrap();
        name.strip_prefix("checkpoint-")?.parse::<u64>().ok()
    });
    let end = format!("train.max_steps={}", steps.max().unwrap() + 2);
    bench.train(&["train.output_dir=moved", &end, "--resume"]);
}

/// Row C7: a file in the place of the run directory is refused and kept. The directory may be a link; what is in it may not be
/// someone else's.
#[test]
fn a_file_or_a_link_in_the_place_of_the_run_directory() {
    let bench = Bench::new();
    fs::write(bench.path("run"), "notes").unwrap();
    for flags in [&[][..], &["--overwrite"], &["--resume"]] {
        let out = train(&bench, flags);
        assert!(matches!(out.status.code(), Some(1 | 2)), "{}", said(&out));
        assert!(said(&out).contains("run"), "{}", said(&out));
        assert_eq!(fs::read_to_string(bench.path("run")).unwrap(), "notes");
    }
    fs::remove_file(bench.path("run")).unwrap();
    fs::create_dir(bench.path("elsewhere")).unwrap();
    symlink(bench.path("elsewhere"), bench.path("run")).unwrap();
    assert!(train(&bench, &[]).status.success());
    assert!(train(&bench, &["--resume", "train.max_steps=5"]).status.success());
    assert!(bench.path("run").is_symlink() && bench.path("elsewhere/final").exists());
    fs::remove_file(bench.path("run")).unwrap();
    fs::create_dir(bench.path("theirs")).unwrap();
    fs::write(bench.path("theirs/photo.jpg"), "x").unwrap();
    symlink(bench.path("theirs"), bench.path("run")).unwrap();
    let out = train(&bench, &["--overwrite"]);
    assert!(said(&out).contains("not a run of ft"), "{}", said(&out));
    assert_eq!(files(&bench.path("theirs")), [("photo.jpg".to_string(), b"x".to_vec())]);
}

/// Rows F4, R6.
#[test]
fn a_moved_model_is_known_by_its_weights_and_a_changed_number_is_not() {
    let bench = Bench::new();
    assert!(train(&bench, &[]).status.success());
    let resume = |path: &str| train(&bench, &["--resume", "train.max_steps=6", path]);
    fs::rename(bench.path("model"), bench.path("elsewhere")).unwrap();
    fs::rename(bench.path("rows.jsonl"), bench.path("moved.jsonl")).unwrap();
    let out = train(
        &bench,
        &[
            "--resume",
            "train.max_steps=6",
            "model.path=elsewhere",
            "data.train=moved.jsonl",
        ],
    );
    assert!(out.status.success(), "{}", said(&out));
    fs::rename(bench.path("moved.jsonl"), bench.path("rows.jsonl")).unwrap();
    // Flips one bit in the middle of the largest tensor.
    let file = bench.path("elsewhere/model.safetensors");
    let whole = fs::read(&file).unwrap();
    let mut bytes = whole.clone();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, &bytes).unwrap();
    let out = resume("model.path=elsewhere");
    assert_eq!(out.status.code(), Some(1), "{}", said(&out));
    assert!(said(&out).contains("base model"), "{}", said(&out));
    // A NaN is reported by name before the first step.
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let nan = 8 + header + (whole.len() - 8 - header) / 2 / 4 * 4;
    bytes = whole;
    bytes[nan..nan + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&file, &bytes).unwrap();
    for command in [
        &[
            "train",
            "--recipe",
            "r.toml",
            "model.path=elsewhere",
            "train.output_dir=nan",
        ][..],
        &[
            "train",
            "--recipe",
            "r.toml",
            "model.path=elsewhere",
            "train.output_dir=nan",
            "memory.tier=disk",
        ],
        &["generate", "--model", "elsewhere", "--prompt", "a"],
    ] {
        let out = bench.ft(command);
        assert_eq!(out.status.code(), Some(1), "{}", said(&out));
        let text = said(&out);
        assert!(text.contains("not finite") && text.contains("tensor `"), "{text}");
    }
    assert!(!bench.path("nan").exists());
}

/// Row F5.
#[test]
fn a_pipe_in_the_place_of_a_file_is_an_error_at_once() {
    for (name, more) in [
        ("model/model.safetensors", ""),
        ("model/config.json", ""),
        ("model/tokenizer.json", ""),
        ("model/generation_config.json", ""),
        ("rows.jsonl", ""),
        ("r.toml", ""),
        ("template.jinja", "data.chat_template=template.jinja"),
    ] {
        let bench = Bench::new();
        let path = bench.path(name);
        let _ = fs::remove_file(&path);
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let arguments: Vec<&str> = ["train", "--recipe", "r.toml", more]
            .into_iter()
            .filter(|a| !a.is_empty())
            .collect();
        let mut child = bench
            .command(&arguments)
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        wait_for(name, || child.try_wait().unwrap().is_some());
        let out = child.wait_with_output().unwrap();
        assert!(
            !out.status.success() && said(&out).contains("named pipe"),
            "{name}: {}",
            said(&out)
        );
    }
}

/// Row D5.
#[test]
fn end_tokens_that_disagree_are_told() {
    let bench = Bench::new();
    let config = bench.path("model/config.json");
    let text = fs::read_to_string(&config).unwrap();
    let mut config_json: serde_json::Value = serde_json::from_str(&text).unwrap();
    config_json["eos_token_id"] = serde_json::json!(5);
    fs::write(&config, config_json.to_string()).unwrap();
    fs::write(
        bench.path("model/generation_config.json"),
        r#"{"eos_token_id": [6, 7]}"#,
    )
    .unwrap();
    let out = train(&bench, &[]);
    let text = said(&out);
    assert!(out.status.success() && text.contains("different end tokens"), "{text}");
    assert!(
        text.contains(", config.json has 5") && text.contains("generation_config.json has 6"),
        "{text}"
    );
}

/// Row C8.
#[test]
fn a_stored_start_that_was_damaged_is_computed_again() {
    let bench = Bench::new();
    let run = |out: &str| {
        let out_dir = format!("train.output_dir={out}");
        let corda = [
            "tune.method=lora",
            "tune.lora.r=4",
            "tune.lora.init_lora_weights=corda",
            &out_dir,
        ];
        let ran = train(&bench, &corda);
        assert!(ran.status.success(), "{}", said(&ran));
        said(&ran)
    };
    assert!(!run("one").contains("again"));
    assert!(run("two").contains("of an earlier run"));
    let mut stored = fs::read_dir(bench.path(".ft-starts")).unwrap();
    let file = stored.next().unwrap().unwrap().path();
    for how in DAMAGES {
        damage(&file, how);
        let text = run(how);
        assert_eq!(text.contains("its content is computed again"), how != "gone", "{text}");
        assert!(!text.contains("of an earlier run"), "{text}");
    }
    assert!(run("last").contains("of an earlier run"));
    let adapter = |run: &str| fs::read(bench.path(run).join("final/adapter_model.safetensors")).unwrap();
    for other in ["two", "last"].iter().chain(&DAMAGES) {
        assert!(adapter("one") == adapter(other), "{other}");
    }
}

#[test]
fn a_run_on_random_weights_of_a_shape_ends_without_a_final_directory() {
    let bench = Bench::new();
    fs::write(bench.path("t.jsonl"), "{\"text\": \"one two three\"}\n".repeat(4)).unwrap();
    for method in ["full", "lora"] {
        let (out_dir, method) = (format!("train.output_dir={method}"), format!("tune.method={method}"));
        let out = bench.ft(&[
            "train",
            "--recipe",
            "r.toml",
            "model.path=shape:tiny",
            "data.train=t.jsonl",
            "train.max_steps=2",
            &out_dir,
            &method,
        ]);
        assert_eq!(out.status.code(), Some(0), "{}", said(&out));
        assert!(said(&out).contains("no `final/` is written"), "{}", said(&out));
    }
}

/// Row C11: a run that goes on from the checkpoint of another one leaves the results of a third one alone.
#[test]
fn a_resume_from_elsewhere_changes_no_results_in_the_output_directory() {
    let bench = Bench::new();
    assert!(train(&bench, &["train.output_dir=first"]).status.success());
    assert!(train(&bench, &["train.seed=2"]).status.success());
    let before = files(&bench.path("run"));
    for from in ["first", "first/checkpoint-2"] {
        let out = train(&bench, &["--resume", from]);
        let text = said(&out);
        assert!(out.status.code() == Some(2) && text.contains("another run"), "{text}");
        assert!(files(&bench.path("run")) == before, "{from}");
    }
    // Its own checkpoint, and a new directory.
    assert!(
        train(&bench, &["train.seed=2", "--resume", "run/checkpoint-2"])
            .status
            .success()
    );
    assert!(
        train(&bench, &["train.output_dir=new", "--resume", "first/checkpoint-2"])
            .status
            .success()
    );
}
