//! `ft generate`: chats, the KV cache between their turns, storage types, signals.

use crate::bench::{Bench, said};
use std::io::{Read, Write};
use std::process::{Command, Output, Stdio};

const CHAT: [&str; 7] = [
    "generate",
    "--model",
    "model",
    "--chat",
    "--temperature",
    "0",
    "--max-new-tokens",
];

fn piped(mut command: Command, input: &str) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn chat(bench: &Bench, more: &[&str], input: &str) -> Output {
    let mut arguments = CHAT.to_vec();
    arguments.push("12");
    arguments.extend(more);
    piped(bench.command(&arguments), input)
}

/// The answer to a raw ChatML prompt.
fn answer(bench: &Bench, prompt: &str) -> String {
    let out = bench.ft(&[
        "generate",
        "--model",
        "model",
        "--prompt",
        prompt,
        "--temperature",
        "0",
        "--max-new-tokens",
        "12",
    ]);
    assert!(out.status.success(), "{}", said(&out));
    String::from_utf8(out.stdout)
        .unwrap()
        .trim_end_matches('\n')
        .to_string()
}

fn turn(role: &str, text: &str) -> String {
    format!("<|im_start|>{role}\n{text}<|im_end|>\n")
}

#[test]
fn every_line_is_a_turn_of_one_conversation() {
    let bench = Bench::new();
    let mut text = turn("system", "Be short.");
    let mut want = String::new();
    for message in ["Add 17 and 25.", "Now sort 9 4 7."] {
        text.push_str(&turn("user", message));
        let said = answer(&bench, &format!("{text}<|im_start|>assistant\n"));
        text.push_str(&turn("assistant", &said));
        want.push_str(&format!("{said}\n"));
    }
    let input = "/speed\nAdd 17 and 25.\n\n  \nNow sort 9 4 7.\n/exit\nnot said\n";
    let out = chat(&bench, &["--system", "Be short."], input);
    assert!(out.status.success(), "{}", said(&out));
    assert_eq!(String::from_utf8_lossy(&out.stdout), want);
    // The speed of each answer; in the second turn prefill reads only the new tokens.
    let output = said(&out);
    let lines: Vec<&str> = output.lines().filter(|l| l.starts_with("prefill ")).collect();
    assert_eq!(lines.len(), 2, "{output}");
    assert!(
        lines.iter().all(|l| l.contains("tokens/s") && l.contains("decode ")),
        "{output}"
    );
    assert!(
        !lines[0].contains("cached") && lines[1].contains("more were cached"),
        "{output}"
    );
}

#[test]
fn storage_can_be_chosen() {
    let bench = Bench::new();
    let plain = chat(&bench, &[], "Add 17 and 25.\n");
    for more in [
        ["--kv-cache", "f32", "--dtype", "f32"],
        ["--kv-cache", "bf16", "--weights", "int8"],
        ["--kv-cache", "int8", "--weights", "int4"],
    ] {
        let out = chat(&bench, &more, "Add 17 and 25.\n");
        assert!(out.status.success(), "{}", said(&out));
        assert!(more[1] != "f32" || out.stdout == plain.stdout);
    }
    for more in [["--kv-cache", "f8"], ["--weights", "f32"]] {
        assert_eq!(chat(&bench, &more, "").status.code(), Some(2));
    }
    let out = bench.ft(&["generate", "--model", "model", "--prompt", "x", "--system", "y"]);
    assert_eq!(out.status.code(), Some(2), "{}", said(&out));
}

#[test]
fn what_does_not_fit_is_said() {
    let bench = Bench::new();
    let long = "word ".repeat(4000);
    let out = chat(&bench, &[], &format!("{long}\n"));
    assert_eq!(out.status.code(), Some(1));
    assert!(
        said(&out).contains("longer than the context length of the model") && said(&out).contains("hint"),
        "{}",
        said(&out)
    );
    std::fs::remove_file(bench.path("model/chat_template.jinja")).unwrap();
    let out = chat(&bench, &[], "hello\n");
    assert_eq!(out.status.code(), Some(1));
    assert!(said(&out).contains("no chat template"), "{}", said(&out));
}

/// Row S3.
/// A signal stops the answer, not the conversation; if no answer is in progress it ends the program.
#[test]
#[cfg(unix)]
fn a_signal_stops_an_answer() {
    let bench = Bench::new();
    let config = std::fs::read_to_string(bench.path("model/config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["num_hidden_layers"] = 40.into();
    config["max_position_embeddings"] = 32_768.into();
    std::fs::write(bench.path("model/config.json"), config.to_string()).unwrap();
    // The weight files have other sizes: random weights do not come from them.
    bench.train(&[
        "model.init=random",
        "tune.method=full",
        "train.max_steps=0",
        "train.output_dir=run",
    ]);
    let mut child = bench
        .command(&[
            "generate",
            "--model",
            "run/final",
            "--chat",
            "--temperature",
            "0",
            "--max-new-tokens",
            "30000",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    // The first byte of the answer shows that generation has started.
    let mut byte = [0u8];
    input.write_all(b"Tell me more.\n").unwrap();
    output.read_exact(&mut byte).unwrap();
    // SAFETY: the process is a child of this test and was not waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    drop(input);
    let mut rest = String::new();
    let _ = output.read_to_string(&mut rest);
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", said(&out));
    assert_eq!(said(&out).matches("stopped").count(), 1, "{}", said(&out));
}
