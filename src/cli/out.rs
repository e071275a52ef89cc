//! Standard output. A closed pipe (`ft data | head`) is not an error.

use crate::base::{Error, Result};
use crate::report;
use std::borrow::Cow;
use std::fmt::Display;
use std::io::{ErrorKind, Write};

/// Prints one line of results.
pub fn out(line: impl Display) -> Result<()> {
    out_raw(&format!("{line}\n"))
}

/// Prints text for the user: if standard output is a terminal, long lines are wrapped at spaces.
pub fn out_text(text: impl Display) -> Result<()> {
    let text = text.to_string();
    match report::result_width() {
        Some(width) => out(report::wrapped(text.trim_end_matches('\n'), width, 2, false).join("\n")),
        None => out(text.trim_end_matches('\n')),
    }
}

/// Prints text without a newline and flushes it. On a terminal it can only set colors.
pub fn out_raw(text: &str) -> Result<()> {
    print(text, report::visible_but_colors)
}

/// As `out_raw`, for a piece of an answer: on a terminal nothing of it acts, because colors can hide text.
pub fn out_answer(text: &str) -> Result<()> {
    print(text, report::visible)
}

fn print(text: &str, shown: fn(&str) -> String) -> Result<()> {
    let text = if report::result_is_terminal() {
        let text = shown(text);
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
        Err(e) if e.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        Err(e) => Err(Error::new("cannot write to standard output").cause(e)),
    }
}
