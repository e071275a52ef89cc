//! A folder of runs of which some cannot be read: the others are listed, compared, plotted, exported and verified, and each damaged
//! one has its reason.

use super::dash::Dash;
use super::text;
use super::unprivileged::unprivileged;
use serde_json::Value;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output};

/// A damaged run, a change that damages it, and the start of its reason.
type Damage = (&'static str, fn(&Path), &'static str);

const DAMAGES: [Damage; 6] = [
    (
        "no-table",
        |run| fs::write(run.join("resolved.toml"), "= no table").unwrap(),
        "resolved.toml: the file is damaged, cause: ",
    ),
    (
        "no-settings",
        |run| fs::remove_file(run.join("resolved.toml")).unwrap(),
        "",
    ),
    (
        "link",
        |run| {
            fs::remove_file(run.join("metrics.jsonl")).unwrap();
            symlink("../../secret", run.join("metrics.jsonl")).unwrap();
        },
        "metrics.jsonl: cannot open the file, found a symbolic link",
    ),
    (
        "pipe",
        |run| pipe(&run.join("metrics.jsonl")),
        "metrics.jsonl: cannot open the file, found a named pipe",
    ),
    (
        "events",
        |run| pipe(&run.join("events.jsonl")),
        "events.jsonl: cannot open the file, found a named pipe",
    ),
    (
        "closed",
        |run| fs::set_permissions(run, Permissions::from_mode(0o000)).unwrap(),
        "cannot list the directory, cause: Permission denied",
    ),
];

fn pipe(path: &Path) {
    fs::remove_file(path).unwrap();
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

fn whole(dir: &Path, name: &str) {
    let run = dir.join("runs").join(name);
    fs::create_dir_all(run.join("final")).unwrap();
    let write = |name: &str, text: &str| fs::write(run.join(name), text).unwrap();
    write("run.json", "{\"format\": \"ft run 1\"}");
    write("resolved.toml", "[train]\nstage = \"sft\"  # recipe\n");
    let start = "{\"event\":\"start\",\"steps\":9,\"time\":1.5}\n";
    write(
        "events.jsonl",
        &format!("{start}{{\"event\":\"stop\",\"reason\":\"done\",\"time\":4.5}}\n"),
    );
    write("metrics.jsonl", "{\"step\":9,\"loss\":2.5,\"time\":3.0}\n");
}

/// `a-whole`, the damaged ones, and `z-whole`, in `runs`. Dropped, they can be removed.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("secret"), "{\"step\":1,\"loss\":7.25}\n").unwrap();
        for name in ["a-whole", "z-whole"] {
            whole(dir.path(), name);
        }
        for (name, damage, _) in DAMAGES {
            whole(dir.path(), name);
            damage(&dir.path().join("runs").join(name));
        }
        Self(dir)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ft"));
        command.args(arguments).current_dir(self.0.path()).env("NO_COLOR", "1");
        unprivileged(&command)
    }

    fn ft(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::set_permissions(self.0.path().join("runs/closed"), Permissions::from_mode(0o700));
    }
}

/// Row C8.
#[test]
fn damaged_runs_are_rows_with_a_reason_and_do_not_hide_the_others() {
    let folder = Folder::new();
    let out = folder.ft(&["runs", "list", "runs"]);
    let said = text(&out.stdout);
    assert_eq!(out.status.code(), Some(0), "{said}{}", text(&out.stderr));
    assert!(!said.contains("7.25"), "a link was followed: {said}");
    for name in ["a-whole", "z-whole"] {
        assert!(said.contains(&format!("runs/{name}  done, 9 of 9 steps\n")), "{said}");
    }
    for (name, _, reason) in DAMAGES {
        assert!(
            said.contains(&format!("runs/{name}  unreadable: {reason}")),
            "{name}: {said}"
        );
    }
    assert!(said.lines().all(|line| line.chars().count() < 300), "{said}");

    let out = folder.ft(&["runs", "--json"]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let rows: Vec<Value> = text(&out.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(rows.len(), 2 + DAMAGES.len());
    let of = |name: &str| {
        let run = format!("runs/{name}");
        rows.iter().find(|row| row["run"] == run.as_str()).unwrap()
    };
    let keys = |row: &Value| -> Vec<String> { row.as_object().unwrap().keys().cloned().collect() };
    let fields = keys(of("a-whole"));
    assert!(!fields.contains(&"error".to_string()), "{fields:?}");
    for (name, _, reason) in DAMAGES {
        let row = of(name);
        assert_eq!(keys(row), [&fields[..], &["error".to_string()]].concat(), "{name}");
        let (state, error) = (row["state"].as_str().unwrap(), row["error"].as_str().unwrap());
        assert!(state.starts_with(&format!("unreadable: {reason}")), "{name}: {state}");
        assert!(error.contains(&format!("runs/{name}")), "{name}: {error}");
    }
    assert!(of("no-settings")["error"].as_str().unwrap().contains("resolved.toml"));

    // Each by its own name is an error, and so is a folder that cannot be listed.
    for (name, ..) in DAMAGES {
        let out = folder.ft(&["runs", "show", &format!("runs/{name}")]);
        let said = text(&out.stderr);
        assert!(out.status.code() == Some(1) && said.contains(name), "{name}: {said}");
    }
    let out = folder.ft(&["runs", "list", "runs/closed"]);
    let said = text(&out.stderr);
    assert!(
        out.status.code() == Some(1) && said.contains("cannot list the directory"),
        "{said}"
    );
}

/// Row C8.
#[test]
fn commands_over_a_folder_leave_damaged_runs_out_with_a_warning() {
    let folder = Folder::new();
    let commands = [
        &["runs", "compare"][..],
        &["runs", "compare", "--json"],
        &["runs", "plot"],
        &["runs", "export", "--to", "csv", "--out", "tables"],
    ];
    let ft = |command: &[&str], places: &[&str]| {
        let out = folder.ft(&[command, places].concat());
        (out.status.code(), text(&out.stdout), text(&out.stderr))
    };
    for command in commands {
        let (code, shown, said) = ft(command, &["runs"]);
        assert_eq!(code, Some(0), "{command:?}: {said}");
        for name in ["a-whole", "z-whole"] {
            assert!(
                shown.contains(name) && !said.contains(name),
                "{command:?}: {shown}{said}"
            );
        }
        assert!(!shown.contains("7.25"), "a link was followed: {shown}");
        for (name, _, reason) in DAMAGES {
            let warning = format!("warning: runs/{name} is left out, unreadable: {reason}");
            assert_eq!(said.matches(&warning).count(), 1, "{command:?} {name}: {said}");
            assert!(!shown.contains(&format!("/{name}")), "{command:?} {name}: {shown}");
            // One that was named itself is an error.
            let (code, _, said) = ft(command, &["runs/a-whole", &format!("runs/{name}")]);
            assert!(code == Some(1) && said.contains(name), "{command:?} {name}: {said}");
        }
    }
    let tables = fs::read_dir(folder.0.path().join("tables")).unwrap().count();
    assert_eq!(tables, 2);

    for name in ["a-whole", "z-whole"] {
        fs::remove_dir_all(folder.0.path().join("runs").join(name)).unwrap();
    }
    for command in commands {
        let (code, shown, said) = ft(command, &["runs"]);
        assert_eq!((code, shown), (Some(1), String::new()), "{command:?}: {said}");
        assert!(
            said.contains("none of the runs in this directory can be read"),
            "{command:?}: {said}"
        );
    }
}

/// Row C8.
#[test]
fn verify_goes_on_after_a_run_that_cannot_be_read() {
    let folder = Folder::new();
    let later = folder.0.path().join("runs/link/run.json");
    fs::write(later, "{\"format\": \"ft run 2\"}").unwrap();
    let out = folder.ft(&["runs", "verify", "runs"]);
    let said = text(&out.stdout);
    assert_eq!(out.status.code(), Some(1), "{said}{}", text(&out.stderr));
    let bad = [
        ("closed", "runs/closed: cannot list the directory"),
        (
            "link",
            "runs/link/run.json: the run directory was written by another version of ft",
        ),
    ];
    for (name, reason) in bad {
        let row = format!("runs/{name}: cannot be read\n  {reason}");
        assert!(said.contains(&row), "{name}: {said}");
    }
    for name in ["a-whole", "no-table", "z-whole"] {
        assert!(
            said.contains(&format!("runs/{name}/final: no hashes")),
            "{name}: {said}"
        );
    }

    let out = folder.ft(&["runs", "verify", "runs", "--json"]);
    assert_eq!(out.status.code(), Some(1), "{}", text(&out.stderr));
    let rows: Vec<Value> = text(&out.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(rows.len(), 2 + DAMAGES.len());
    for row in rows {
        let path = row["path"].as_str().unwrap();
        let reason = bad.iter().find(|(name, _)| path == format!("runs/{name}"));
        let errors = row["errors"].as_array().unwrap();
        assert_eq!(errors.len(), usize::from(reason.is_some()), "{row}");
        if let Some((_, reason)) = reason {
            assert!(
                row["files"].is_null() && errors[0].as_str().unwrap().starts_with(reason),
                "{row}"
            );
        }
    }
}

/// Row C8.
#[test]
fn the_page_and_the_completions_have_the_runs_beside_a_damaged_one() {
    let folder = Folder::new();
    let dash = Dash::start(folder.0.path());
    let listed = dash.json("runs.json");
    let listed = listed["runs"].as_array().unwrap();
    let of = |name: &str| {
        let run = format!("runs/{name}");
        listed.iter().find(|entry| entry["name"] == run.as_str())
    };
    assert_eq!(of("a-whole").unwrap()["state"], "done");
    // The page is started by root, perhaps, to whom nothing is closed.
    for (name, _, reason) in DAMAGES.into_iter().filter(|(name, ..)| *name != "closed") {
        let entry = of(name).unwrap();
        let state = entry["state"].as_str().unwrap();
        assert!(state.starts_with(&format!("unreadable: {reason}")), "{name}: {state}");
        assert!(entry["error"].is_string(), "{entry}");
        let (status, _, body) = dash.get(&dash.path(&format!("run/{}.json", entry["id"])));
        assert!(status == 500 && body.contains("error"), "{name}: {body}");
    }
    drop(dash);

    let out = folder.ft(&["dash", "--out", "page"]);
    assert_eq!(text(&out.stdout), "page/index.html\n", "{}", text(&out.stderr));
    let page = fs::read_to_string(folder.0.path().join("page/index.html")).unwrap();
    let (_, data) = page.split_once("id=\"data\">").unwrap();
    let data: Value = serde_json::from_str(data.split_once("</script>").unwrap().0).unwrap();
    let runs = data["runs"].as_array().unwrap();
    let errors = runs.iter().filter(|run| run["error"].is_string()).count();
    assert_eq!((runs.len(), errors), (2 + DAMAGES.len(), DAMAGES.len()));
    assert!(!page.contains("7.25"), "a link was followed");
    let alone = folder.ft(&["dash", "runs/pipe", "--out", "other"]);
    assert_eq!(alone.status.code(), Some(1), "{}", text(&alone.stderr));

    // The answers for fish are lines.
    let mut command = folder.command(&["--", "ft", "generate", "--model", ""]);
    let out = command
        .env("FT_COMPLETE", "fish")
        .env("_CLAP_COMPLETE_INDEX", "3")
        .output()
        .unwrap();
    let answers = text(&out.stdout);
    for name in ["a-whole", "z-whole"] {
        assert!(answers.contains(&format!("runs/{name}/final")), "{answers}");
    }
}
