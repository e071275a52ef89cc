//! The process that renders chat templates: its permissions, its end, and hostile templates.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

#[path = "../../crates/ft-formats/src/testdata/hostile.rs"]
mod hostile;

fn ft(dir: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ft"))
        .args(arguments)
        .current_dir(dir)
        .output()
        .unwrap()
}

fn worker() -> Child {
    Command::new(env!("CARGO_BIN_EXE_ft"))
        .arg("internal-worker")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn ask(child: &mut Child, request: &str) -> Vec<u8> {
    let input = child.stdin.as_mut().unwrap();
    input.write_all(&(request.len() as u64).to_le_bytes()).unwrap();
    input.write_all(request.as_bytes()).unwrap();
    let output = child.stdout.as_mut().unwrap();
    let mut length = [0u8; 8];
    output.read_exact(&mut length).unwrap();
    let mut answer = vec![0u8; u64::from_le_bytes(length) as usize];
    output.read_exact(&mut answer).unwrap();
    answer
}

const HELLO: &str = r#"{"program":1,"source":"Hi {{ messages[0].content }}{{ strftime_now('%Y')[:2] }}","variables":{},
    "jobs":[{"messages":[{"content":"ü"}],"tools":null,"renderings":[[1,false]]}]}"#;

/// Row D8.
#[test]
fn the_process_is_confined_and_ends_with_its_input() {
    let mut child = worker();
    let answer = ask(&mut child, HELLO);
    assert_eq!(answer[0], 0);
    assert_eq!(String::from_utf8_lossy(&answer[9..answer.len() - 8]), "Hi ü20");
    if cfg!(target_os = "linux") {
        let read = |name: &str| std::fs::read_to_string(format!("/proc/{}/{name}", child.id())).unwrap();
        let status = read("status");
        let field = |name: &str| {
            let line = status.lines().find(|l| l.starts_with(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().to_string()
        };
        assert_eq!(
            (field("Seccomp:"), field("NoNewPrivs:"), field("Threads:")),
            ("2".into(), "1".into(), "1".into())
        );
        let limits = read("limits");
        for (name, value) in [
            ("Max address space", "1073741824"),
            ("Max stack size", "8388608"),
            ("Max file size", "0"),
            ("Max core file size", "0"),
            ("Max open files", "3"),
        ] {
            let line = limits.lines().find(|l| l.starts_with(name)).unwrap();
            assert!(line[name.len()..].split_whitespace().next() == Some(value), "{line}");
        }
        let seconds = limits.lines().find(|l| l.starts_with("Max cpu time")).unwrap();
        let soft = seconds["Max cpu time".len()..].split_whitespace().next().unwrap();
        assert!(soft.parse::<u64>().is_ok(), "{seconds}");
    }
    drop(child.stdin.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_request_that_cannot_be_read_ends_the_process() {
    for request in [
        "",
        "{}",
        "[1]",
        r#"{"program":7,"source":null,"variables":{},"jobs":[]}"#,
    ] {
        let mut child = worker();
        let mut input = child.stdin.take().unwrap();
        let _ = input.write_all(&(request.len() as u64).to_le_bytes());
        let _ = input.write_all(request.as_bytes());
        drop(input);
        assert_eq!(child.wait().unwrap().code(), Some(3), "{request}");
    }
}

fn recipe(dir: &Path) {
    let root = env!("CARGO_MANIFEST_DIR");
    std::fs::write(
        dir.join("r.toml"),
        format!(
            "[model]\npath = \"{root}/assets/tiny\"\n[data]\ntrain = \"t.jsonl\"\nchat_template = \"t.jinja\"\n[train]\noutput_dir = \"out\"\n"
        ),
    )
    .unwrap();
    let row = r#"{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}"#;
    std::fs::write(dir.join("t.jsonl"), format!("{row}\n")).unwrap();
}

/// Row D8.
/// Runs every fifth template through the program; the interpreter's own tests run all of them.
#[test]
fn hostile_templates_end_the_command_with_an_error_and_leave_no_process() {
    let dir = tempfile::tempdir().unwrap();
    recipe(dir.path());
    for (name, source) in hostile::templates().into_iter().step_by(5) {
        std::fs::write(dir.path().join("t.jinja"), source).unwrap();
        let start = Instant::now();
        let out = ft(dir.path(), &["data", "--recipe", "r.toml"]);
        let said = String::from_utf8_lossy(&out.stderr).to_string();
        assert!(
            matches!(out.status.code(), Some(0 | 1)),
            "{name}: {:?} {said}",
            out.status
        );
        assert!(
            start.elapsed() < Duration::from_secs(90),
            "{name}: {:?}",
            start.elapsed()
        );
    }
}

#[test]
fn errors_of_the_process_name_template_and_row() {
    let dir = tempfile::tempdir().unwrap();
    recipe(dir.path());
    let template = "{% for m in messages %}\n{{ m.content + 1 }}{% endfor %}";
    std::fs::write(dir.path().join("t.jinja"), template).unwrap();
    let out = ft(dir.path(), &["data", "--recipe", "r.toml"]);
    let said = String::from_utf8_lossy(&out.stderr).to_string();
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("t.jinja:2") && said.contains("t.jsonl:1"), "{said}");
    assert!(said.contains("can only concatenate str"), "{said}");
}
