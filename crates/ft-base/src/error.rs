//! The error type of ft: message, place, found and expected values, cause, hint.

use std::fmt;
use std::path::Path;

pub type Result<T> = std::result::Result<T, Error>;

/// The class of an error; it decides the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// Usage or recipe error: exit code 2.
    Usage,
    /// The run or an input failed: exit code 1.
    Failed,
    /// Stopped by this signal after the state was saved: exit code 128 + signal.
    Signal(i32),
}

/// A message (`what`), then optional lines: place, found and expected, cause, hint.
#[derive(Debug)]
pub struct Error(Box<Parts>);

#[derive(Debug)]
struct Parts {
    kind: ErrorKind,
    what: String,
    place: Option<String>,
    found: Option<String>,
    expected: Option<String>,
    cause: Option<String>,
    hint: Option<String>,
}

impl Error {
    /// An input or the run failed (exit code 1). Lower case, no period: "tensor is truncated".
    pub fn new(what: impl Into<String>) -> Self {
        Self(Box::new(Parts {
            kind: ErrorKind::Failed,
            what: what.into(),
            place: None,
            found: None,
            expected: None,
            cause: None,
            hint: None,
        }))
    }

    /// The user's input is invalid (exit code 2).
    pub fn usage(what: impl Into<String>) -> Self {
        let mut e = Self::new(what);
        e.0.kind = ErrorKind::Usage;
        e
    }

    /// A signal ended the run; its state is saved.
    pub fn signal(signal: i32, what: impl Into<String>) -> Self {
        let mut e = Self::new(what);
        e.0.kind = ErrorKind::Signal(signal);
        e
    }

    /// Sets the place: `file:line:column`, a tensor, a row.
    pub fn at(mut self, place: impl fmt::Display) -> Self {
        self.0.place = Some(place.to_string());
        self
    }

    pub fn at_path(self, path: &Path) -> Self {
        self.at(path.display())
    }

    /// Sets the place only if none is set: an inner place is closer to the fault.
    pub fn or_at(mut self, place: impl fmt::Display) -> Self {
        self.0.place.get_or_insert_with(|| place.to_string());
        self
    }

    /// Adds an outer place to the place already set, for example the row for which line 3 of a template failed.
    pub fn within(mut self, outer: impl fmt::Display) -> Self {
        self.0.place = Some(match self.0.place.take() {
            Some(inner) => format!("{outer} ({inner})"),
            None => outer.to_string(),
        });
        self
    }

    pub fn found(mut self, found: impl fmt::Display) -> Self {
        self.0.found = Some(found.to_string());
        self
    }

    pub fn expected(mut self, expected: impl fmt::Display) -> Self {
        self.0.expected = Some(expected.to_string());
        self
    }

    pub fn cause(mut self, cause: impl fmt::Display) -> Self {
        self.0.cause = Some(cause.to_string());
        self
    }

    /// Sets the hint: a command to paste or a value to use.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// Puts a sentence before the message.
    pub fn after(mut self, first: &str) -> Self {
        self.0.what = format!("{first}, and {}", self.0.what);
        self
    }

    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    pub fn what(&self) -> &str {
        &self.0.what
    }

    pub fn hint_text(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// The error without its hint in one line, for lists of errors.
    pub fn line(&self) -> String {
        let p = &self.0;
        let place = p.place.as_ref().map_or(String::new(), |place| format!("{place}: "));
        let more = [("found", &p.found), ("expected", &p.expected), ("cause:", &p.cause)];
        let more = more
            .into_iter()
            .filter_map(|(name, text)| Some(format!(", {name} {}", text.as_ref()?)));
        format!("{place}{}{}", p.what, more.collect::<String>()).replace('\n', " ")
    }

    pub fn exit_code(&self) -> i32 {
        match self.0.kind {
            ErrorKind::Failed => 1,
            ErrorKind::Usage => 2,
            ErrorKind::Signal(s) => 128 + s,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let p = &self.0;
        write!(f, "{}", p.what)?;
        if let Some(place) = &p.place {
            write!(f, "\n  --> {place}")?;
        }
        match (&p.found, &p.expected) {
            (Some(found), Some(expected)) => write!(f, "\n  found {found}, expected {expected}")?,
            (Some(found), None) => write!(f, "\n  found {found}")?,
            (None, Some(expected)) => write!(f, "\n  expected {expected}")?,
            (None, None) => {}
        }
        if let Some(cause) = &p.cause {
            write!(f, "\n  cause: {cause}")?;
        }
        if let Some(hint) = &p.hint {
            write!(f, "\nhint: {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

impl From<candle_core::Error> for Error {
    /// A failed tensor operation is a fault of ft or a lack of memory, never a bad value of the user.
    fn from(e: candle_core::Error) -> Self {
        Error::new("tensor operation failed").cause(e)
    }
}
