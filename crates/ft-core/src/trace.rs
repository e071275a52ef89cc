//! Spans of time for a profile: what a thread does, from when to when. While nothing is recorded, a span costs the load of one
//! atomic flag. On a GPU a span is the time of the host, which queues the work.

use crate::base::sync::lock;
use std::borrow::Cow;
use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Most spans of a recording; later ones are left out.
const MOST: usize = 1 << 20;

static ON: AtomicBool = AtomicBool::new(false);
static RECORDED: Mutex<Option<Recording>> = Mutex::new(None);

struct Recording {
    began: Instant,
    spans: Vec<Span>,
}

/// A piece of work of one thread.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    /// The work: `attention`.
    pub name: &'static str,
    /// Of what: the name of a linear, or the number of a layer or step.
    pub of: Option<Cow<'static, str>>,
    /// The thread, counted from 1.
    pub thread: u32,
    /// Since the start of the recording.
    pub from: Duration,
    /// Since the start of the recording.
    pub to: Duration,
}

/// A span that ends when this value is dropped.
#[must_use]
pub struct SpanGuard(Option<(&'static str, Option<Cow<'static, str>>, Instant)>);

/// Begins a span.
pub fn span(name: &'static str) -> SpanGuard {
    SpanGuard(ON.load(Relaxed).then(|| (name, None, Instant::now())))
}

/// Begins a span of a numbered thing.
pub fn numbered(name: &'static str, number: usize) -> SpanGuard {
    SpanGuard(
        ON.load(Relaxed)
            .then(|| (name, Some(number.to_string().into()), Instant::now())),
    )
}

/// Begins a span of the weight with this full name; the span has the part of it that is the same in each layer.
pub(crate) fn weight(name: &'static str, full: &str) -> SpanGuard {
    SpanGuard(
        ON.load(Relaxed)
            .then(|| (name, Some(short(full).into()), Instant::now())),
    )
}

/// `model.layers.3.self_attn.q_proj.weight` as `self_attn.q_proj`.
fn short(full: &str) -> String {
    let full = full.strip_suffix(".weight").unwrap_or(full);
    let parts: Vec<&str> = full.split('.').collect();
    let number = parts.iter().position(|part| part.bytes().all(|b| b.is_ascii_digit()));
    parts[number.map_or(0, |at| at + 1)..].join(".")
}

thread_local! {
    static THREAD: Cell<u32> = const { Cell::new(0) };
}

fn thread() -> u32 {
    static THREADS: AtomicU32 = AtomicU32::new(0);
    THREAD.with(|own| {
        if own.get() == 0 {
            own.set(THREADS.fetch_add(1, Relaxed) + 1);
        }
        own.get()
    })
}

impl Drop for SpanGuard {
    fn drop(&mut self) {
        let Some((name, of, began)) = self.0.take() else { return };
        let now = Instant::now();
        let mut recorded = lock(&RECORDED);
        // A span from before the recording, or that ends after it, is not part of it.
        if let Some(recording) = recorded.as_mut().filter(|r| began >= r.began && r.spans.len() < MOST) {
            let since = |at: Instant| at.duration_since(recording.began);
            let span = Span {
                name,
                of,
                thread: thread(),
                from: since(began),
                to: since(now),
            };
            recording.spans.push(span);
        }
    }
}

/// Begins a recording.
pub fn start() {
    *lock(&RECORDED) = Some(Recording {
        began: Instant::now(),
        spans: Vec::new(),
    });
    ON.store(true, Relaxed);
}

/// Ends the recording and returns its spans, in the order of their starts: a span is before the spans inside of it.
pub fn stop() -> Vec<Span> {
    ON.store(false, Relaxed);
    let recorded = lock(&RECORDED).take();
    let mut spans = recorded.map_or(Vec::new(), |recording| recording.spans);
    spans.sort_by_key(|span| (span.thread, span.from, std::cmp::Reverse(span.to)));
    spans
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_recorded_only_between_start_and_stop() {
        let before = span("before");
        start();
        drop(before);
        {
            let _outer = numbered("outer", 7);
            let _inner = weight("inner", "model.layers.3.self_attn.q_proj.weight");
        }
        let late = span("late");
        let spans = stop();
        drop(late);
        // Other tests of this program may run steps meanwhile, on other threads.
        let own: Vec<&Span> = spans.iter().filter(|s| s.thread == thread()).collect();
        let names: Vec<_> = own.iter().map(|s| (s.name, s.of.as_deref())).collect();
        assert_eq!(names, [("outer", Some("7")), ("inner", Some("self_attn.q_proj"))]);
        assert!(own[0].from <= own[1].from && own[1].to <= own[0].to);
        assert!(stop().is_empty());
        assert_eq!(short("lm_head.weight"), "lm_head");
        assert_eq!(short("model.layers.0.mlp.experts.5.up_proj"), "mlp.experts.5.up_proj");
    }
}
