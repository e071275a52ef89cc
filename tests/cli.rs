//! Tests of the binary: exit codes, output streams, and the files it writes.

#[path = "cli/browser.rs"]
mod browser;
#[path = "cli/completions.rs"]
mod completions;
#[path = "cli/cookbook.rs"]
mod cookbook;
#[path = "cli/damaged.rs"]
mod damaged;
#[path = "cli/dash.rs"]
mod dash;
#[path = "cli/events.rs"]
mod events;
#[path = "cli/page.rs"]
mod page;
#[path = "run/unprivileged.rs"]
mod unprivileged;
#[path = "cli/unreadable.rs"]
mod unreadable;

use std::path::Path;
use std::process::{Command, Output, Stdio};

fn ft(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ft"))
        .args(arguments)
        .current_dir(folder)
        .env("NO_COLOR", "1")
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Row R1.
#[test]
fn recipe_faults_exit_2_and_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = "[model]\npath = \"m\"\n[data]\ntrain = \"t\"\n[optimizer]\nlearnin_rate = 1\n[train]\nr = 8\n";
    std::fs::write(dir.path().join("r.toml"), recipe).unwrap();
    for command in ["train", "plan", "data"] {
        let out = ft(dir.path(), &[command, "--recipe", "r.toml", "train.seed=x"]);
        assert_eq!(out.status.code(), Some(2), "{command}");
        assert!(out.stdout.is_empty());
        let said = text(&out.stderr);
        assert!(said.starts_with("error: the recipe has 3 errors\n"), "{said}");
        assert!(
            said.contains("r.toml:6:1\nhint: did you mean `learning_rate`?"),
            "{said}"
        );
        assert!(
            said.contains("r.toml:8:1\nhint: this key belongs in [tune.lora]"),
            "{said}"
        );
        assert!(said.contains("--> argument `train.seed=x`"), "{said}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is written");
    for bad in [
        &["train", "--recipe", "none.toml"][..],
        &["train"],
        &["trian"],
        &["train", "--recipe", "r.toml", "other.toml"],
        &["recipes", "show", "quikstart"],
    ] {
        assert_eq!(ft(dir.path(), bad).status.code(), Some(2), "{bad:?}");
    }
}

#[test]
fn recipes_are_listed_shown_and_copied() {
    let dir = tempfile::tempdir().unwrap();
    let list = text(&ft(dir.path(), &["recipes"]).stdout);
    assert!(list.lines().any(|l| l.starts_with("quickstart ")), "{list}");
    let shown = ft(dir.path(), &["recipes", "show", "quickstart"]);
    let copied = ft(dir.path(), &["recipes", "copy", "quickstart"]);
    assert_eq!(text(&copied.stdout), "quickstart.toml\n");
    let said = text(&copied.stderr);
    assert!(said.contains("`ft recipes copy quickstart --with-data`"), "{said}");
    assert!(said.contains("next:\n  ft data quickstart.toml\n"), "{said}");
    assert_eq!(std::fs::read(dir.path().join("quickstart.toml")).unwrap(), shown.stdout);
    let again = ft(dir.path(), &["recipes", "copy", "quickstart"]);
    assert_eq!(again.status.code(), Some(2));
    assert!(text(&again.stderr).contains("hint: give another name with `--to FILE`"));
}

#[test]
fn a_copied_recipe_runs_where_it_was_copied() {
    let dir = tempfile::tempdir().unwrap();
    let plan = |args: &[&str]| {
        ft(
            dir.path(),
            &[&["train", "quickstart.toml", "--dry-run", "--json"], args].concat(),
        )
    };
    ft(dir.path(), &["recipes", "copy", "quickstart"]);
    let said = text(&plan(&[]).stderr);
    assert!(said.contains("no directory `assets/tiny` here"), "{said}");
    assert!(said.contains("ft recipes copy NAME --with-data"), "{said}");
    let copied = ft(dir.path(), &["recipes", "copy", "quickstart", "--with-data"]);
    assert_eq!(copied.status.code(), Some(0), "{}", text(&copied.stderr));
    let planned = plan(&[]);
    assert_eq!(planned.status.code(), Some(0), "{}", text(&planned.stderr));
    let object: serde_json::Value = serde_json::from_slice(&planned.stdout).unwrap();
    assert!(object["plan"]["peak_bytes"].as_u64().unwrap() > 0 && object["recipe"]["train.max_steps"] == "400");
    assert!(object.get("masked").is_none(), "{object}");
    // Writes only the files that the recipe uses, and does not overwrite existing files.
    assert!(dir.path().join("assets/world/train.jsonl").is_file() && !dir.path().join("assets/small").exists());
    std::fs::write(dir.path().join("assets/world/eval.jsonl"), "mine").unwrap();
    let again = ft(dir.path(), &["recipes", "copy", "quickstart", "--with-data"]);
    assert!(again.status.code() == Some(2) && text(&again.stderr).contains("assets/world/eval.jsonl"));
    for (typed, meant) in [("assets/tinny", "assets/tiny"), ("asets/tiny", "assets/tiny")] {
        let said = text(&plan(&[&format!("model.path={typed}")]).stderr);
        assert!(
            said.contains(&format!("no directory `{typed}` here")) || typed == "asets/tiny",
            "{said}"
        );
        assert!(said.contains(&format!("did you mean `{meant}`?")), "{said}");
    }
    let said = text(&plan(&["data.train=assets/world/trian.jsonl"]).stderr);
    assert!(said.contains("did you mean `assets/world/train.jsonl`?"), "{said}");
    let said = text(&plan(&["tune.method=lora", "tune.lora.adapter=runs/none"]).stderr);
    assert!(said.contains("no directory `runs/none` here"), "{said}");
}

#[test]
fn the_list_says_what_fits_and_what_comes_first() {
    let dir = tempfile::tempdir().unwrap();
    let started = std::time::Instant::now();
    let list = ft(dir.path(), &["recipes", "--json"]);
    println!("{:?} for the list", started.elapsed());
    let said = text(&list.stdout);
    let lines: Vec<serde_json::Value> = said.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let of = |name: &str| lines.iter().find(|l| l["name"] == name).unwrap();
    assert_eq!(of("quickstart")["fit"], "fits", "{said}");
    assert!(
        of("grpo-tiny")["first"][0]
            .as_str()
            .unwrap()
            .contains("grpo-start-tiny")
    );
    assert!(lines.iter().all(|l| l["peak_bytes"].as_u64().unwrap() > 0));
}

#[test]
fn flags_that_are_keys_and_words_that_are_recipes() {
    let dir = tempfile::tempdir().unwrap();
    let said = |args: &[&str]| {
        let out = ft(dir.path(), args);
        assert_eq!(out.status.code(), Some(2), "{args:?}");
        text(&out.stderr)
    };
    for (args, wanted) in [
        (&["train", "--max_steps", "3"][..], "`train.max_steps=3`"),
        (&["train", "r.toml", "--train.max_steps", "3"], "`train.max_steps=3`"),
        (
            &["train", "r.toml", "--learning_rate=1e-4"],
            "`optimizer.learning_rate=1e-4`",
        ),
        (&["plan", "r.toml", "--lora-rank", "8"], "`tune.lora.r=8`"),
        (
            &["train", "r.toml", "--load_in_4bit"],
            "memory.frozen_weights = \"nf4\"",
        ),
        (&["train", "r.toml", "--epochs=3"], "`train.num_epochs=3`"),
        (&["train"], "`ft recipes`"),
        (&["train", "none.toml"], "there is no recipe `none.toml`"),
        (&["train", "--recipe", "a.toml", "b.toml"], "two recipes"),
    ] {
        let said = said(args);
        assert!(said.contains(wanted), "{args:?}: {said}");
    }
    std::fs::write(dir.path().join("r.yaml"), "model_name_or_path: m\nlora_rank: 8\n").unwrap();
    let yaml = said(&["train", "r.yaml"]);
    assert!(
        yaml.contains("a recipe is TOML") && yaml.contains("`ft import r.yaml --to r.toml`"),
        "{yaml}"
    );
    ft(dir.path(), &["recipes", "copy", "quickstart", "--with-data"]);
    for command in ["plan", "data"] {
        let out = ft(dir.path(), &[command, "quickstart.toml", "--json", "train.max_steps=3"]);
        assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    }
    let misspelled = ft(dir.path(), &["plan", "quickstrat.toml"]);
    assert!(text(&misspelled.stderr).contains("did you mean `quickstart.toml`?"));
}

#[test]
fn families_that_are_not_there_are_named() {
    let dir = tempfile::tempdir().unwrap();
    for (config, wanted) in [
        (
            r#"{"model_type": "gpt2", "n_embd": 768}"#,
            "it would need learned positions",
        ),
        (
            r#"{"model_type": "paligemma", "text_config": {"model_type": "gemma2"}}"#,
            "its language model is a `gemma2`",
        ),
        (
            r#"{"model_type": "jetmoe"}"#,
            "it would need other mixture-of-experts layers",
        ),
    ] {
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let out = ft(dir.path(), &["generate", "--model", ".", "--prompt", "x"]);
        let said = text(&out.stderr);
        assert!(said.contains(wanted) && !said.contains("is missing"), "{said}");
    }
}

#[test]
fn every_error_has_a_code_also_for_programs() {
    let dir = tempfile::tempdir().unwrap();
    for (arguments, code, said) in [
        (&["plan", "none.toml"][..], "FT108", "there is no recipe"),
        (&["export", "none", "--out", "x", "--nothing"], "FT110", "--nothing"),
        (&["export", "none"], "FT199", "--out <DIR>"),
    ] {
        let out = ft(dir.path(), arguments);
        let line = format!("code: {code}, see `ft explain {code}`");
        assert_eq!(text(&out.stderr).lines().last(), Some(&*line), "{arguments:?}");
        let out = ft(dir.path(), &[arguments, &["--json"]].concat());
        let error = text(&out.stderr);
        let last: serde_json::Value = serde_json::from_str(error.lines().last().unwrap()).unwrap();
        assert_eq!(last["code"], code, "{error}");
        let explained = ft(dir.path(), &["explain", code, "--json"]);
        let row: serde_json::Value = serde_json::from_slice(&explained.stdout).unwrap();
        assert_eq!(last["title"], row["title"], "{error}");
        assert!(last["error"].as_str().unwrap().contains(said), "{error}");
        assert!(error.contains(&line) && out.stdout.is_empty(), "{error}");
    }
    let out = ft(dir.path(), &["export", "--help"]);
    assert!(out.stderr.is_empty() && out.status.success());
}

#[test]
fn doctor_tells_lines_of_json() {
    let dir = tempfile::tempdir().unwrap();
    let out = Command::new(env!("CARGO_BIN_EXE_ft"))
        .args(["doctor", "--json", "--threads", "1"])
        .current_dir(dir.path())
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(0));
    let said = text(&out.stdout);
    let lines: Vec<serde_json::Value> = said.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let cpu = lines.iter().find(|l| l["name"] == "cpu").unwrap();
    assert!(cpu["value"].as_str().unwrap().contains("with 1 threads"), "{cpu}");
    let named = |name: &str| lines.iter().find(|l| l["name"] == name).unwrap();
    assert!(named("hub")["value"].as_str().unwrap().starts_with("not checked"));
    for key in ["write_bytes_per_second", "read_bytes_per_second"] {
        assert!(named("writable")["data"][key].as_f64().unwrap() > 0.0, "{said}");
    }
    assert!(named("bandwidth")["data"]["bytes_per_second"].as_f64().unwrap() > 0.0);
    assert_eq!(named("ranks")["data"]["mpi"].is_null(), !cfg!(feature = "mpi"));
    assert_eq!(lines.last().unwrap()["name"], "verdict");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// Row S7.
#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_ft"))
        .args(["recipes", "show", "quickstart"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(0));
    assert!(out.stderr.is_empty());
}

/// Weights that the ranks of each machine divide: more memory than divided among all, and nothing but new values between machines.
#[test]
fn a_plan_can_be_for_several_machines() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let plan = |weights: &str, ranks: &[&str]| {
        let first = ["plan", "recipes/block-llama3-8b-24gb.toml", "--json"];
        let settings = [
            "model.path=shape:llama-3.1-8b",
            "model.init=random",
            "model.device=cpu",
            "memory.tier=device",
            "memory.budget=1TB",
            weights,
        ];
        ft(root, &[&first[..], ranks, &settings].concat())
    };
    let (all, near) = ("distributed.weights=sharded", "distributed.weights=sharded-in-node");
    let number = |out: &Output, key: &str| -> u64 {
        let plan: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        plan[key].as_u64().unwrap_or_else(|| panic!("{key}: {plan}"))
    };
    let eight = plan(all, &["--ranks", "8"]);
    let two = plan(near, &["--ranks", "8", "--nodes", "2"]);
    let one = plan(near, &["--ranks", "8"]);
    assert!(number(&two, "peak_bytes") > number(&eight, "peak_bytes") + (1 << 30));
    // A layer is sent to three ranks, in parts of twice the size.
    assert!(number(&two, "sent_bytes") < number(&eight, "sent_bytes"));
    assert_eq!(number(&one, "sent_bytes"), number(&eight, "sent_bytes"));
    let said = text(&two.stderr);
    assert!(said.contains("no layer travels between the 2 machines"), "{said}");
    assert!(!text(&one.stderr).contains("machines"));
    let uneven = plan(near, &["--ranks", "8", "--nodes", "3"]);
    let said = text(&uneven.stderr);
    assert!(
        !uneven.status.success() && said.contains("8 ranks on 3 machines"),
        "{said}"
    );
    let refused = plan(near, &["--ranks", "8", "--nodes", "2", "optimizer.name=adafactor"]);
    let said = text(&refused.stderr);
    assert!(
        said.contains("`distributed.weights = \"sharded-in-node\"` needs an update"),
        "{said}"
    );
}

/// Frozen weights in files that the ranks of a machine share: the memory of a rank is that with weights on the disk, and the
/// plan says what the page cache needs.
#[test]
fn a_plan_says_what_shared_files_need_in_memory() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let plan = |settings: &[&str]| {
        let first = [
            "plan",
            "recipes/block-llama3-8b-24gb.toml",
            "--json",
            "--ranks",
            "2",
            "model.path=shape:llama-3.1-8b",
            "model.init=random",
            "model.device=cpu",
            "memory.budget=1TB",
        ];
        ft(root, &[&first[..], settings].concat())
    };
    let bytes = |out: &Output| -> [u64; 2] {
        let plan: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        ["peak_bytes", "sent_bytes"].map(|key| plan[key].as_u64().unwrap_or_else(|| panic!("{key}: {plan}")))
    };
    let host = "distributed.weights=host";
    let shared = plan(&[host]);
    let own = plan(&["memory.tier=disk", "distributed.weights=replicated"]);
    let ([peak, sent], [own_peak, own_sent]) = (bytes(&shared), bytes(&own));
    // Each process measures its own memory before it plans.
    assert!(peak.abs_diff(own_peak) < 4 << 20, "{peak}, {own_peak}");
    assert_eq!(sent, own_sent);
    let said = text(&shared.stderr);
    assert!(
        said.contains("the ranks of a machine share its page cache: up to 15.0 GiB"),
        "{said}"
    );
    assert!(!text(&own.stderr).contains("page cache"));
    for settings in [[host, "memory.tier=device"], [host, "tune.block.correction=sgd"]] {
        let refused = plan(&settings);
        let said = text(&refused.stderr);
        assert!(
            !refused.status.success() && said.contains("`distributed.weights = \"host\"`"),
            "{settings:?}: {said}"
        );
    }
}
