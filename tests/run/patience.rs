//! A limit of time for a program that may hang, and signals to it.

use std::io::Read;
use std::process::{Child, Command, Output};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

fn read<R: Read + Send + 'static>(stream: Option<R>) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut all = Vec::new();
        if let Some(mut stream) = stream {
            let _ = stream.read_to_end(&mut all);
        }
        all
    })
}

/// Waits for the end of a program, and returns its output. Kills the program and panics if that takes longer than `limit`.
pub fn ended(mut child: Child, limit: Duration, what: &str) -> Output {
    let (stdout, stderr) = (read(child.stdout.take()), read(child.stderr.take()));
    let until = Instant::now() + limit;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        if Instant::now() > until {
            break None;
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    if status.is_none() {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let (stdout, stderr) = (stdout.join().unwrap(), stderr.join().unwrap());
    let text = String::from_utf8_lossy(&stderr);
    let status = status.unwrap_or_else(|| panic!("{what}: no end in {limit:?}\n{text}"));
    Output { status, stdout, stderr }
}

/// Waits for something that another process does.
pub fn until(what: &str, mut is_done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_done() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Sends a signal such as `-INT`.
pub fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([name, &child.id().to_string()]).status();
    assert!(sent.unwrap().success());
}
