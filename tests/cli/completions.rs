//! `ft completions`: the script of bash in a real bash, and the answers for the other shells.
#![cfg(target_os = "linux")]

use super::{ft, text};
use std::path::Path;
use std::process::Command;

/// A folder with two recipes and two runs.
fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["mine.toml", "other.toml", "notes.txt"] {
        std::fs::write(dir.path().join(name), "").unwrap();
    }
    for run in ["runs/first", "runs/second"] {
        let run = dir.path().join(run);
        std::fs::create_dir_all(run.join("final")).unwrap();
        for name in ["resolved.toml", "events.jsonl"] {
            std::fs::write(run.join(name), "").unwrap();
        }
    }
    dir
}

/// The text that bash puts in the place of the word at the end of `line`: words as readline splits them, given to the
/// function of the script.
fn bash(dir: &Path, line: &str) -> Vec<String> {
    // `tests/terminal.rs` has the same with keys in a terminal; here the lists are seen.
    let script = "source <(ft completions bash)\n\
        words_of() { local IFS=$' \\t\\n'; COMP_LINE=$1 COMP_POINT=${#1}; COMP_WORDS=($(sed 's/[=:]/ & /g' <<< \"$1\"));\n\
        [[ $1 == *' ' ]] && COMP_WORDS+=(''); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); }\n\
        compopt() { :; }\n\
        words_of \"$LINE\"\n\
        current=${COMP_WORDS[COMP_CWORD]}; [[ $current == [=:] ]] && current=\n\
        _ft ft \"$current\" \"${COMP_WORDS[COMP_CWORD-1]}\"\n\
        printf '%s\\n' \"${COMPREPLY[@]}\"\n";
    let program = Path::new(env!("CARGO_BIN_EXE_ft"));
    let path = format!(
        "{}:{}",
        program.parent().unwrap().display(),
        std::env::var("PATH").unwrap()
    );
    let out = Command::new("bash")
        .args(["--norc", "-c", script])
        .env("PATH", path)
        .env("LINE", line)
        .current_dir(dir)
        .output()
        .unwrap();
    assert!(out.stderr.is_empty(), "{line}: {}", text(&out.stderr));
    text(&out.stdout).lines().map(str::to_string).collect()
}

#[test]
fn bash_completes_commands_recipes_keys_values_and_runs() {
    let dir = folder();
    let of = |line: &str| bash(dir.path(), line);
    assert_eq!(of("ft wat"), ["watch"]);
    let first = of("ft train ");
    assert_eq!(first[..2], ["mine.toml", "other.toml"]);
    assert!(
        first.contains(&"--resume".to_string()) && !first.contains(&"notes.txt".to_string()),
        "{first:?}"
    );
    assert_eq!(of("ft train --recipe m"), ["mine.toml"]);
    assert_eq!(of("ft train mine.toml train.max_s"), ["train.max_steps="]);
    // Readline replaces only what follows the `=`.
    assert_eq!(
        of("ft train mine.toml train.max_steps=2 train.stage=d"),
        ["distill", "dpo"]
    );
    let methods = of("ft plan mine.toml tune.method=");
    assert!(
        methods.contains(&"lora".to_string()) && methods.contains(&"block".to_string()),
        "{methods:?}"
    );
    assert_eq!(of("ft train mine.toml model.path=ru"), ["runs/"]);
    assert_eq!(of("ft runs show ")[..2], ["runs/first", "runs/second"]);
    assert_eq!(of("ft runs diff runs/first runs/s"), ["runs/second"]);
    assert_eq!(of("ft generate --model runs/f"), ["runs/first/final"]);
    assert_eq!(of("ft recipes copy quick"), ["quickstart"]);
    assert_eq!(
        of("ft explain FT60"),
        ["FT601", "FT602", "FT603", "FT604", "FT605", "FT606", "FT607", "FT608"]
    );
    assert_eq!(of("ft export --to "), ["hf", "gguf", "mlx"]);
}

#[test]
fn a_name_of_a_file_is_quoted_for_bash() {
    let dir = tempfile::tempdir().unwrap();
    for name in [
        "`id`.toml",
        "a $(id).toml",
        "a*.toml",
        "a'b\".toml",
        "x\u{b}y.toml",
        "x\ny.toml",
        "x.toml",
    ] {
        std::fs::write(dir.path().join(name), "").unwrap();
    }
    std::fs::create_dir_all(dir.path().join("runs/$(id>x) a")).unwrap();
    for name in ["resolved.toml", "events.jsonl"] {
        std::fs::write(dir.path().join("runs/$(id>x) a").join(name), "").unwrap();
    }
    let of = |line: &str| bash(dir.path(), line);
    let mut names = of("ft train --recipe ");
    names.retain(|name| name.ends_with(".toml"));
    names.sort();
    assert_eq!(
        names,
        [
            "\\`id\\`.toml",
            "a\\ \\$\\(id\\).toml",
            "a\\'b\\\".toml",
            "a\\*.toml",
            "x.toml"
        ]
    );
    assert_eq!(of("ft runs show r"), ["runs/\\$\\(id\\>x\\)\\ a"]);
    let values = of("ft train x.toml model.path=a");
    assert!(
        values.contains(&"a\\*.toml".to_string()) && values.len() == 3,
        "{values:?}"
    );
    // The answers for words in quotes would need other quotes.
    assert_eq!(of("ft train --recipe \"a"), [""]);
}

#[test]
fn other_shells_get_descriptions() {
    let dir = folder();
    let ask = |shell: &str, index: &str, words: &[&str]| {
        let out = Command::new(env!("CARGO_BIN_EXE_ft"))
            .arg("--")
            .args(words)
            .env("FT_COMPLETE", shell)
            .env("_CLAP_COMPLETE_INDEX", index)
            .current_dir(dir.path())
            .output()
            .unwrap();
        assert!(out.status.success());
        text(&out.stdout)
    };
    let words = ["ft", "train", "mine.toml", "train.max_steps"];
    let fish = ask("fish", "3", &words);
    assert!(
        fish.starts_with("train.max_steps=\t") && fish.lines().count() == 1,
        "{fish}"
    );
    let zsh = ask("zsh", "3", &words);
    assert!(
        zsh.starts_with("train.max_steps=:") && zsh.lines().count() == 1,
        "{zsh}"
    );
    for shell in ["bash", "zsh", "fish"] {
        let script = text(&ft(dir.path(), &["completions", shell]).stdout);
        assert!(
            script.contains(&format!("FT_COMPLETE=\"{shell}\"")) || script.contains(&format!("FT_COMPLETE={shell}")),
            "{script}"
        );
    }
}
