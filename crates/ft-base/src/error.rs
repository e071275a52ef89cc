//! The error type of ft: message, place, found and expected values, cause, hint.

use std::fmt;
use std::path::Path;

/// The result of a function that can fail with an [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// The class of an error, for a program that handles classes differently. The text of the error has the details.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// A setting is invalid. The program ends with exit code 2 for this class only.
    Usage,
    /// The operating system refused an operation on a file: permissions, a full disk, a failed read or write.
    Io,
    /// A file, a directory or a data row does not exist in the form that it must have: damaged, truncated, inconsistent.
    Format,
    /// A tensor has the wrong shape, size, element type, layout or device.
    Shape,
    /// The value of an argument or setting is out of its range.
    Argument,
    /// A file, a directory, a hub repository, a device, a layer or a parameter does not exist.
    NotFound,
    /// A weight, a loss, a gradient or a logit is NaN or infinite.
    NonFinite,
    /// A device has no free memory.
    OutOfMemory,
    /// The hub cannot be reached, refuses the request, or sends something that is not usable.
    Network,
    /// The request is valid, but ft, this build or this machine does not support it.
    Unsupported,
    /// An internal state is inconsistent: a bug in ft, or calls in the wrong order.
    Internal,
    /// Stopped by this signal after the state was saved: exit code 128 + signal.
    Signal(i32),
    /// Any other failure.
    Failed,
}

/// A message ([`what`](Error::what)), then optional lines: place, found and expected value, cause, hint.
///
/// ```
/// use ft_base::{Error, ErrorKind, files};
/// use std::path::Path;
///
/// let error: Error = files::read(Path::new("no/such/file")).unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::NotFound);
/// assert_eq!(error.exit_code(), 1);
/// ```
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

macro_rules! constructors {
    ($($name:ident: $kind:ident;)*) => {
        $(
            #[doc = concat!("An error of the kind [`", stringify!($kind), "`](ErrorKind::", stringify!($kind), ").")]
            pub fn $name(what: impl Into<String>) -> Self {
                Self::of(ErrorKind::$kind, what)
            }
        )*
    };
}

impl Error {
    /// An error of this kind. The text is in lower case, without a period: "tensor is truncated".
    pub fn of(kind: ErrorKind, what: impl Into<String>) -> Self {
        Self(Box::new(Parts {
            kind,
            what: what.into(),
            place: None,
            found: None,
            expected: None,
            cause: None,
            hint: None,
        }))
    }

    constructors! {
        new: Failed;
        usage: Usage;
        io: Io;
        format: Format;
        shape: Shape;
        argument: Argument;
        not_found: NotFound;
        non_finite: NonFinite;
        out_of_memory: OutOfMemory;
        network: Network;
        unsupported: Unsupported;
        internal: Internal;
    }

    /// A signal ended the run; its state is saved.
    pub fn signal(signal: i32, what: impl Into<String>) -> Self {
        Self::of(ErrorKind::Signal(signal), what)
    }

    /// A device or its library failed: `OutOfMemory` if the text of the driver says so, otherwise `Failed`.
    pub fn device(what: impl Into<String>, text: &str) -> Self {
        let full = text.contains("CUDA_ERROR_OUT_OF_MEMORY") || text.contains("ALLOC_FAILED");
        Self::of(
            if full {
                ErrorKind::OutOfMemory
            } else {
                ErrorKind::Failed
            },
            what,
        )
    }

    /// Sets the place: `file:line:column`, a tensor, a row.
    pub fn at(mut self, place: impl fmt::Display) -> Self {
        self.0.place = Some(place.to_string());
        self
    }

    /// Sets the place to a path.
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

    /// Sets the value that was found.
    pub fn found(mut self, found: impl fmt::Display) -> Self {
        self.0.found = Some(found.to_string());
        self
    }

    /// Sets the value that was expected.
    pub fn expected(mut self, expected: impl fmt::Display) -> Self {
        self.0.expected = Some(expected.to_string());
        self
    }

    /// Sets the error of the library or system below.
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

    /// The class of the error.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The message alone.
    pub fn what(&self) -> &str {
        &self.0.what
    }

    /// The hint, if there is one.
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

    /// The exit code of the program `ft` for this error.
    pub fn exit_code(&self) -> i32 {
        match self.0.kind {
            ErrorKind::Usage => 2,
            ErrorKind::Signal(s) => 128 + s,
            _ => 1,
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
    fn from(e: candle_core::Error) -> Self {
        let text = e.to_string();
        let mut error = Error::device("tensor operation failed", &text);
        if error.kind() == ErrorKind::Failed {
            error.0.kind = kind_of(&e);
        }
        error.cause(text)
    }
}

/// The class of candle's error, inside its wrappers.
fn kind_of(e: &candle_core::Error) -> ErrorKind {
    use candle_core::Error as E;
    match e {
        E::WithBacktrace { inner, .. } | E::WithPath { inner, .. } | E::Context { inner, .. } => kind_of(inner),
        E::UnexpectedDType { .. }
        | E::DTypeMismatchBinaryOp { .. }
        | E::DimOutOfRange { .. }
        | E::UnexpectedNumberOfDims { .. }
        | E::UnexpectedShape { .. }
        | E::ShapeMismatch { .. }
        | E::ShapeMismatchBinaryOp { .. }
        | E::ShapeMismatchCat { .. }
        | E::ShapeMismatchSplit { .. }
        | E::DeviceMismatchBinaryOp { .. }
        | E::NarrowInvalidArgs { .. }
        | E::BroadcastIncompatibleShapes { .. }
        | E::MatMulUnexpectedStriding(_)
        | E::RequiresContiguous { .. } => ErrorKind::Shape,
        E::InvalidIndex { .. } => ErrorKind::Argument,
        E::UnsupportedDTypeForOp(..) | E::NotCompiledWithCudaSupport => ErrorKind::Unsupported,
        E::Io(_) => ErrorKind::Io,
        E::SafeTensor(_) => ErrorKind::Format,
        _ => ErrorKind::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, Tensor};

    #[test]
    fn errors_of_candle_keep_their_class() {
        let a = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
        let e: Error = a.matmul(&a).unwrap_err().into();
        assert_eq!(e.kind(), ErrorKind::Shape);
        let e: Error = a.narrow(0, 5, 1).unwrap_err().with_path("x").into();
        assert_eq!(e.kind(), ErrorKind::Shape);
        let text = "DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")";
        let e: Error = candle_core::Error::Msg(text.into()).into();
        assert_eq!(e.kind(), ErrorKind::OutOfMemory);
        assert!(e.to_string().ends_with(&format!("cause: {text}")));
        let e: Error = candle_core::Error::Msg("no".into()).into();
        assert_eq!(e.kind(), ErrorKind::Failed);
    }

    #[test]
    fn only_usage_and_signals_have_exit_codes_of_their_own() {
        assert_eq!(Error::usage("x").exit_code(), 2);
        assert_eq!(Error::signal(15, "x").exit_code(), 143);
        for e in [
            Error::new("x"),
            Error::format("x"),
            Error::internal("x"),
            Error::out_of_memory("x"),
        ] {
            assert_eq!(e.exit_code(), 1, "{e}");
        }
    }
}
