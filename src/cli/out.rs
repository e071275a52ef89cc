//! Standard output. A closed pipe (`ft data | head`) is not an error.
//!
//! On a terminal no control character acts, color codes included: text of a file could hide itself or what comes after it.
//! `out_colored` alone lets color codes pass. A pipe or a file gets the text as it is.

use crate::base::{Error, Result};
use crate::report;
use std::borrow::Cow;
use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

/// Exit code if standard output is closed.
static IF_CLOSED: AtomicI32 = AtomicI32::new(0);

/// Sets the exit code for a closed standard output: that of a command which has done its work before it prints.
pub fn exit_code_if_closed(code: i32) {
    IF_CLOSED.store(code, Relaxed);
}

/// Prints one line of results.
pub fn out(line: impl Display) -> Result<()> {
    out_raw(&format!("{line}\n"))
}

/// Prints text for the user: if standard output is a terminal, long lines are wrapped at spaces.
pub fn out_text(text: impl Display) -> Result<()> {
    print_lines(&text.to_string(), report::visible)
}

/// As `out_text`, for lines that ft colors itself: the caller applies `report::visible` to every text of a file in them.
pub fn out_colored(text: impl Display) -> Result<()> {
    print_lines(&text.to_string(), report::visible_but_colors)
}

/// Prints text without a newline and flushes it.
pub fn out_raw(text: &str) -> Result<()> {
    print(text, report::visible)
}

fn print_lines(text: &str, escaped: fn(&str) -> String) -> Result<()> {
    let text = text.trim_end_matches('\n');
    let text = match report::result_width() {
        // Escaped first, because that makes a text longer.
        Some(width) => report::wrapped(&escaped(text), width, 2, false).join("\n"),
        None => text.to_string(),
    };
    print(&format!("{text}\n"), escaped)
}

fn print(text: &str, escaped: fn(&str) -> String) -> Result<()> {
    let text = if report::result_is_terminal() {
        let text = escaped(text);
        Cow::Owned(if report::style().unicode {
            text
        } else {
            report::ascii(&text)
        })
    } else {
        Cow::Borrowed(text)
    };
    let write = || {
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())
    };
    match report::above(write) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == ErrorKind::BrokenPipe => std::process::exit(IF_CLOSED.load(Relaxed)),
        Err(e) => Err(Error::new("cannot write to standard output").cause(e)),
    }
}
