//! Progress of the program: any module opens a phase, the terminal shows it.
//!
//! A phase ends when it is dropped. Phases that are open at the same time are nested. This module prints nothing.

use super::signal;
use super::{Error, Result};
use crate::sync::lock;
use std::borrow::Cow;
use std::cell::Cell;
use std::io::Read;
use std::marker::PhantomData;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// The counted unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgressUnit {
    /// `batches`, `tensors`, `layers`
    Count(&'static str),
    /// Bytes, shown as MB and GB.
    Bytes,
}

#[derive(Debug)]
struct Counter {
    label: Cow<'static, str>,
    unit: ProgressUnit,
    /// True if its fraction is a part of the next unit of the enclosing phase.
    part: bool,
    started: Instant,
    done: AtomicU64,
    total: AtomicU64,
    note: Mutex<String>,
}

/// An open phase.
#[derive(Debug)]
pub struct Phase(Arc<Counter>);

/// Snapshot of a phase.
#[derive(Debug, Clone)]
pub struct PhaseSnapshot {
    /// The name of the phase: `evaluating`.
    pub label: String,
    /// The unit of `done` and `total`.
    pub unit: ProgressUnit,
    /// True if it counts a part of one unit of the enclosing phase.
    pub part: bool,
    /// The time at which the phase was opened.
    pub started: Instant,
    /// Units that are complete.
    pub done: u64,
    /// 0: unknown.
    pub total: u64,
    /// A short text beside the numbers; empty if there is none.
    pub note: String,
}

impl PhaseSnapshot {
    /// Fraction done, between 0 and 1; `None` if the total is unknown.
    pub fn fraction(&self) -> Option<f64> {
        (self.total > 0).then(|| (self.done as f64 / self.total as f64).min(1.0))
    }
}

static OPEN: Mutex<Vec<Arc<Counter>>> = Mutex::new(Vec::new());

thread_local! {
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

/// While it exists, phases of this thread are not shown: work in the background.
#[must_use]
pub struct QuietGuard(PhantomData<*const ()>);

/// See `QuietGuard`.
pub fn quiet() -> QuietGuard {
    IS_QUIET.set(true);
    QuietGuard(PhantomData)
}

impl Drop for QuietGuard {
    fn drop(&mut self) {
        IS_QUIET.set(false);
    }
}

fn open(label: Cow<'static, str>, total: u64, unit: ProgressUnit, part: bool) -> Phase {
    let counter = Arc::new(Counter {
        label,
        unit,
        part,
        started: Instant::now(),
        done: AtomicU64::new(0),
        total: AtomicU64::new(total),
        note: Mutex::default(),
    });
    if !IS_QUIET.get() {
        lock(&OPEN).push(counter.clone());
    }
    Phase(counter)
}

/// Opens a phase of `total` units (0: unknown), such as `saving`, `evaluating`.
pub fn phase(label: impl Into<Cow<'static, str>>, total: usize, unit: &'static str) -> Phase {
    open(label.into(), total as u64, ProgressUnit::Count(unit), false)
}

/// Opens a phase of `total` bytes (0: unknown).
pub fn bytes(label: impl Into<Cow<'static, str>>, total: u64) -> Phase {
    open(label.into(), total, ProgressUnit::Bytes, false)
}

/// Opens a phase that is a part of one unit of the enclosing phase, such as the micro-batches of a step.
pub fn part(label: &'static str, total: usize) -> Phase {
    open(label.into(), total as u64, ProgressUnit::Count(""), true)
}

/// A label such as `reading rows.jsonl`.
pub fn about(what: &str, path: &Path) -> String {
    let name = path.file_name().unwrap_or(path.as_os_str());
    format!("{what} {}", name.to_string_lossy())
}

impl Phase {
    /// Counts `n` more units as done.
    pub fn add(&self, n: u64) {
        self.0.done.fetch_add(n, Relaxed);
    }

    /// As `add`, at a point where the work may stop.
    ///
    /// # Errors
    /// A signal asked to stop.
    pub fn advance(&self, n: u64) -> Result<()> {
        self.add(n);
        self.unless_stopped()
    }

    /// Call this where the work may stop.
    ///
    /// # Errors
    /// A signal asked to stop.
    pub fn unless_stopped(&self) -> Result<()> {
        match signal::received() {
            Some(s) => Err(Error::signal(s, format!("stopped while {}", self.0.label))),
            None => Ok(()),
        }
    }

    /// Sets the number of complete units.
    pub fn set(&self, done: u64) {
        self.0.done.store(done, Relaxed);
    }

    /// Sets the number of units in all.
    pub fn total(&self, total: u64) {
        self.0.total.store(total, Relaxed);
    }

    /// Sets a short text that is shown beside the numbers.
    pub fn note(&self, text: impl Into<String>) {
        *lock(&self.0.note) = text.into();
    }

    /// Wraps a reader and counts its bytes.
    pub fn reader<R: Read>(&self, inner: R) -> CountingReader<R> {
        CountingReader {
            inner,
            counter: self.0.clone(),
        }
    }
}

impl Drop for Phase {
    fn drop(&mut self) {
        let mut open = lock(&OPEN);
        if let Some(at) = open.iter().rposition(|c| Arc::ptr_eq(c, &self.0)) {
            open.remove(at);
        }
    }
}

/// A reader that counts its bytes in a phase.
pub struct CountingReader<R> {
    inner: R,
    counter: Arc<Counter>,
}

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.counter.done.fetch_add(n as u64, Relaxed);
        Ok(n)
    }
}

/// All open phases, outermost first.
pub fn now() -> Vec<PhaseSnapshot> {
    let open = lock(&OPEN);
    let see = |c: &Arc<Counter>| PhaseSnapshot {
        label: c.label.to_string(),
        unit: c.unit,
        part: c.part,
        started: c.started,
        done: c.done.load(Relaxed),
        total: c.total.load(Relaxed),
        note: lock(&c.note).clone(),
    };
    open.iter().map(see).collect()
}

/// The phase to show (the innermost that is not a part), and the parts of its next unit.
pub fn current(open: &[PhaseSnapshot]) -> Option<(&PhaseSnapshot, &[PhaseSnapshot])> {
    let head = open.iter().rposition(|s| !s.part)?;
    Some((&open[head], &open[head + 1..]))
}

/// Fraction done of a phase including the parts of its next unit; `None` if its total is unknown.
pub fn fraction(head: &PhaseSnapshot, parts: &[PhaseSnapshot]) -> Option<f64> {
    let mut inner = 0.0;
    for part in parts.iter().rev().filter(|p| p.total > 0) {
        inner = ((part.done as f64 + inner) / part.total as f64).min(1.0);
    }
    (head.total > 0).then(|| ((head.done as f64 + inner) / head.total as f64).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(label: &str, done: u64, total: u64, part: bool) -> PhaseSnapshot {
        PhaseSnapshot {
            label: label.into(),
            unit: ProgressUnit::Count("x"),
            part,
            started: Instant::now(),
            done,
            total,
            note: String::new(),
        }
    }

    #[test]
    fn parts_move_the_phase_around_them() {
        let open = [
            seen("training", 7, 10, false),
            seen("micro-batch", 1, 2, true),
            seen("backward", 3, 6, true),
        ];
        let (head, parts) = current(&open).unwrap();
        assert_eq!((head.label.as_str(), parts.len()), ("training", 2));
        assert!((fraction(head, parts).unwrap() - 0.775).abs() < 1e-9);
        let open = [seen("training", 7, 10, false), seen("evaluating", 1, 4, false)];
        let (head, parts) = current(&open).unwrap();
        assert_eq!((head.label.as_str(), fraction(head, parts)), ("evaluating", Some(0.25)));
        assert_eq!(fraction(&seen("reading", 5, 0, false), &[]), None);
        assert!(current(&[]).is_none());
    }

    #[test]
    fn a_phase_is_open_until_it_is_dropped() {
        let mine = || now().into_iter().find(|s| s.label == "a phase of this test");
        let phase = bytes("a phase of this test", 10);
        let mut read = Vec::new();
        phase.reader(&b"1234"[..]).read_to_end(&mut read).unwrap();
        phase.add(2);
        assert_eq!(mine().map(|s| (s.done, s.total)), Some((6, 10)));
        drop(phase);
        assert!(mine().is_none());
    }
}
