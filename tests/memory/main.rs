//! The forecast against what is measured: an allocator that counts, and the memory of the process. Everything is measured
//! in a process of its own, so that the tests can run side by side.

mod counting;
mod hostile;
mod layer;
mod parsers;
mod peak;
mod stages;
mod table;

use std::process::Command;

/// The case of a child; a child without one does nothing.
const CASE: &str = "FT_TEST_MEMORY_CASE";
/// Starts the line with the result of a child.
const RESULT: &str = "measured: ";

/// The case of this process, if `child` started it.
fn case() -> Option<String> {
    std::env::var(CASE).ok()
}

/// Runs an ignored test in a process of its own: its result, or all of its output.
fn child(test: &str, case: &str) -> Result<String, String> {
    let out = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--ignored", "--nocapture"])
        .env(CASE, case)
        .env("RAYON_NUM_THREADS", "2")
        // Symbols for the trace of a panic that is caught take memory too.
        .env("RUST_BACKTRACE", "0")
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    match said.lines().find_map(|line| line.split_once(RESULT)) {
        Some((_, result)) if out.status.success() => Ok(result.to_string()),
        _ => Err(format!("{said}\n{}", String::from_utf8_lossy(&out.stderr))),
    }
}

/// As `child`, for a test that must pass; prints its result.
fn passes(test: &str) {
    match child(test, "all") {
        Ok(result) => println!("{result}"),
        Err(said) => panic!("{said}"),
    }
}
