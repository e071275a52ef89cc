//! Bad rows: all are counted and the first ones are shown, so that the user can repair a file in one pass.

use crate::rows;
use ft_base::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Number of bad rows that are shown.
const SHOWN: usize = 10;
/// If there is no good row among this many rows, or after this time, reading stops: the cause is not in single rows.
const HOPELESS_ROWS: u64 = 1000;
const HOPELESS_TIME: Duration = Duration::from_secs(5);

pub(crate) struct BadRows {
    good: u64,
    bad: u64,
    first: Vec<Error>,
    since: Instant,
}

impl BadRows {
    pub(crate) fn new() -> Self {
        Self {
            good: 0,
            bad: 0,
            first: Vec::new(),
            since: Instant::now(),
        }
    }

    pub(crate) fn good(&mut self) {
        self.good += 1;
    }

    /// True if no row was bad so far.
    pub(crate) fn is_clean(&self) -> bool {
        self.bad == 0
    }

    /// True if it is useless to try more rows.
    pub(crate) fn hopeless(&self) -> bool {
        self.good == 0 && (self.bad >= HOPELESS_ROWS || self.since.elapsed() > HOPELESS_TIME)
    }

    /// Records the error of a row. Errors: the row is not the cause (a signal, a setting), or no row is good.
    pub(crate) fn add(&mut self, e: Error) -> Result<()> {
        if matches!(e.kind(), ErrorKind::Usage | ErrorKind::Signal(_)) {
            return Err(e);
        }
        self.bad += 1;
        if self.first.len() < SHOWN {
            self.first.push(e);
        }
        if self.hopeless() { Err(self.error()) } else { Ok(()) }
    }

    /// Errors: there were bad rows.
    pub(crate) fn end(&mut self) -> Result<()> {
        match self.bad {
            0 => Ok(()),
            _ => Err(self.error()),
        }
    }

    /// A single error unchanged; several as a list.
    fn error(&mut self) -> Error {
        if self.first.len() == 1 {
            return self.first.remove(0);
        }
        let lines: Vec<String> = self.first.iter().map(|e| format!("\n    {}", e.line())).collect();
        let more = self.bad - self.first.len() as u64;
        let more = if more > 0 {
            format!("\n    and {more} more")
        } else {
            String::new()
        };
        let what = match self.good {
            0 => format!("none of the first {} rows can be used", self.bad),
            good => format!("{} of {} rows cannot be used", self.bad, self.bad + good),
        };
        let error = Error::format(what + &lines.concat() + &more);
        match self.first.iter().find_map(Error::hint_text) {
            // The first row too has not these columns.
            Some(rows::SAME_COLUMNS) if self.good == 0 => error.hint(
                "`data::Source::format` does not fit this file: remove it, or name its columns with `Mapping::columns`",
            ),
            Some(hint) => error.hint(hint),
            None => error,
        }
    }
}

/// Decides whether further rows of a chunk, encoded in parallel, should be tried.
pub(super) struct TrialState<'a> {
    before: &'a BadRows,
    good: AtomicBool,
    failed: AtomicBool,
}

impl<'a> TrialState<'a> {
    pub(crate) fn new(before: &'a BadRows) -> Self {
        let failed = AtomicBool::new(before.bad > 0);
        Self {
            before,
            good: AtomicBool::new(false),
            failed,
        }
    }

    /// False if rows failed, none was good and `BadRows` gives up. Before the first error there is nothing to report.
    pub(crate) fn go_on(&self) -> bool {
        self.good.load(Ordering::Relaxed) || !self.failed.load(Ordering::Relaxed) || !self.before.hopeless()
    }

    pub(crate) fn note<T>(&self, row: &Result<T>) {
        match row {
            Ok(_) => self.good.store(true, Ordering::Relaxed),
            Err(_) => self.failed.store(true, Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_row_is_always_tried() {
        let mut rows = BadRows::new();
        rows.since -= 2 * HOPELESS_TIME;
        let tried = TrialState::new(&rows);
        assert!(tried.go_on());
        tried.note::<()>(&Err(bad(1)));
        assert!(!tried.go_on());
        tried.note(&Ok(()));
        assert!(tried.go_on());
    }

    fn bad(line: usize) -> Error {
        Error::new("is bad")
            .at(format!("a.jsonl:{line}"))
            .found("x")
            .expected("y")
            .hint("fix it")
    }

    #[test]
    fn one_fault_is_as_it_was_and_many_are_counted() {
        let mut rows = BadRows::new();
        rows.good();
        assert!(rows.end().is_ok());
        rows.add(bad(3)).unwrap();
        assert_eq!(rows.end().unwrap_err().to_string(), bad(3).to_string());

        let mut rows = BadRows::new();
        (0..30).for_each(|_| rows.good());
        (1..=12).for_each(|line| rows.add(bad(line)).unwrap());
        let e = rows.end().unwrap_err().to_string();
        assert!(e.starts_with("12 of 42 rows cannot be used"), "{e}");
        assert!(
            e.contains("\n    a.jsonl:10: is bad, found x, expected y\n    and 2 more\n"),
            "{e}"
        );
        assert!(!e.contains("a.jsonl:11") && e.ends_with("hint: fix it"), "{e}");
    }

    #[test]
    fn what_is_not_the_fault_of_a_row_ends_the_reading() {
        let mut rows = BadRows::new();
        assert_eq!(rows.add(Error::usage("no template")).unwrap_err().exit_code(), 2);
        let end = (0..HOPELESS_ROWS).find_map(|i| rows.add(bad(i as usize)).err());
        assert!(end.unwrap().to_string().contains("none of the first 1000 rows"));
    }
}
