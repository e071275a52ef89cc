//! The binary from outside: exit codes, streams, and what it leaves behind.

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
        assert!(said.starts_with("error: 3 faults in the recipe\n"), "{said}");
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
    assert_eq!(std::fs::read(dir.path().join("quickstart.toml")).unwrap(), shown.stdout);
    let again = ft(dir.path(), &["recipes", "copy", "quickstart"]);
    assert_eq!(again.status.code(), Some(1));
    assert!(text(&again.stderr).contains("hint: give another name with `--to FILE`"));
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
    assert!(named("hub")["value"].as_str().unwrap().starts_with("not asked"));
    for key in ["write_bytes_per_second", "read_bytes_per_second"] {
        assert!(named("writable")["data"][key].as_f64().unwrap() > 0.0, "{said}");
    }
    assert!(named("bandwidth")["data"]["bytes_per_second"].as_f64().unwrap() > 0.0);
    assert_eq!(lines.last().unwrap()["name"], "verdict");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

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
