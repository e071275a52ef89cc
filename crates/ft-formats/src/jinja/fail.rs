//! How a template fails, and the work that it may do before it is stopped.

use std::cell::Cell;
use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailKind {
    /// The text is not a template.
    Syntax,
    /// A statement or expression fails; it would under jinja2.
    Failed,
    /// The template called `raise_exception`.
    Raised,
    /// jinja2 has it, ft has not.
    Unsupported,
    /// Too much work, memory, output or nesting.
    Limit,
}

#[derive(Debug, Clone)]
pub(crate) struct Fail {
    pub kind: FailKind,
    pub text: String,
    pub line: Option<u32>,
}

pub(super) type JinjaResult<T> = Result<T, Fail>;

impl Fail {
    fn new(kind: FailKind, text: impl Into<String>) -> Self {
        Self {
            kind,
            text: text.into(),
            line: None,
        }
    }

    pub(crate) fn syntax(text: impl Into<String>) -> Self {
        Self::new(FailKind::Syntax, text)
    }

    pub(crate) fn failed(text: impl Into<String>) -> Self {
        Self::new(FailKind::Failed, text)
    }

    pub(crate) fn raised(text: impl Into<String>) -> Self {
        Self::new(FailKind::Raised, text)
    }

    pub(crate) fn unsupported(text: impl Into<String>) -> Self {
        Self::new(FailKind::Unsupported, text)
    }

    pub(crate) fn limit(text: impl Into<String>) -> Self {
        Self::new(FailKind::Limit, text)
    }

    /// The innermost line stays.
    pub(crate) fn at(mut self, line: u32) -> Self {
        self.line.get_or_insert(line);
        self
    }
}

impl fmt::Display for Fail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

pub(super) const TOO_LONG: &str = "the template does too much work";

/// Longest text that a template can make, bytes.
pub(crate) const LONGEST: usize = 64 << 20;
/// Work of any template, and more for each byte that it is given. One unit is about a nanosecond.
const WORK: u64 = 100_000_000;
const WORK_PER_BYTE: u64 = 1_000;
/// Work of the largest input.
const MOST_WORK: u64 = 20_000_000_000;
/// Work of one node of the tree.
pub(super) const NODE: usize = 50;
/// Stack of one rendering, bytes.
const STACK: usize = 1 << 20;

thread_local! {
    static LEFT: Cell<u64> = const { Cell::new(0) };
    static STACK_TOP: Cell<usize> = const { Cell::new(0) };
}

fn here() -> usize {
    let mark = 0u8;
    std::hint::black_box(&raw const mark) as usize
}

/// Starts the account of one rendering on this thread.
pub(super) fn begin(input_bytes: usize) {
    LEFT.set((WORK + WORK_PER_BYTE * input_bytes as u64).min(MOST_WORK));
    STACK_TOP.set(here());
}

/// Takes `units` of work from the account. Errors: nothing is left.
pub(super) fn charge(units: usize) -> JinjaResult<()> {
    let left = LEFT.get();
    match left.checked_sub(units as u64) {
        Some(rest) => {
            LEFT.set(rest);
            Ok(())
        }
        None => Err(Fail::limit(TOO_LONG)),
    }
}

/// Accounts for a text of `bytes` before it is made. Errors: it is too long, or too much work.
pub(super) fn charge_text(bytes: usize) -> JinjaResult<()> {
    if bytes > LONGEST {
        return Err(Fail::limit(format!(
            "the template makes a text of more than {} MiB",
            LONGEST >> 20
        )));
    }
    charge(bytes)
}

/// Errors: a text that grows has become too long.
pub(super) fn check_text(text: &str) -> JinjaResult<()> {
    if text.len() > LONGEST {
        charge_text(text.len())
    } else {
        Ok(())
    }
}

/// Accounts for a list of `items` before it is made.
pub(super) fn charge_items(items: usize) -> JinjaResult<()> {
    const MOST: usize = 1 << 22;
    if items > MOST {
        return Err(Fail::limit(format!(
            "the template makes a list of more than {MOST} elements"
        )));
    }
    charge(items.saturating_mul(32))
}

/// Errors: the calls of this rendering have used up their stack.
pub(super) fn check_stack() -> JinjaResult<()> {
    if STACK_TOP.get().abs_diff(here()) > STACK {
        Err(Fail::limit(
            "the template's calls are nested too deeply (recursion limit)",
        ))
    } else {
        Ok(())
    }
}
