//! Standard output. A reader that went away (`ft data | head`) is no failure.

use crate::base::{Error, Result};
use std::fmt::Display;
use std::io::{ErrorKind, Write};

/// One line of results.
pub fn out(line: impl Display) -> Result<()> {
    out_raw(&format!("{line}\n"))
}

/// Text without a line end, flushed: for answers that appear as they are made.
pub fn out_raw(text: &str) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        Err(e) => Err(Error::new("cannot write to standard output").cause(e)),
    }
}
