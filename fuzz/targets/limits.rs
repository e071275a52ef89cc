//! Limits on the memory and on the processor time of one input. libFuzzer limits the memory of the whole process, which hides a file
//! that takes a thousand times its size, and counts the clock, which hides work that is short on a fast machine and finds a fault in a
//! process that was only stopped.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ffi::{c_int, c_long, c_ulong};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Bytes that an input may take whatever its size: what is made once counts for the first input. `FT_FUZZ_MEMORY` sets it, in MiB.
const BASE_BYTES: usize = 64 << 20;
/// Bytes more for each byte of the input.
const PER_BYTE: usize = 1 << 10;
/// Seconds of processor time. `FT_FUZZ_SECONDS` sets another limit.
const SECONDS: usize = 5;

/// The system's allocator, with the bytes that are out and the most that ever were. With AddressSanitizer the system's allocator is that
/// of the sanitizer; memory of code in C is not counted.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static COUNTING: Counting = Counting;

fn came(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Relaxed) + bytes;
    if live > MOST.load(Relaxed) {
        MOST.fetch_max(live, Relaxed);
    }
}

// SAFETY: every call goes to `System` as it came; only numbers are kept beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        came(layout.size());
        // SAFETY: as promised by the caller of this.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        came(layout.size());
        // SAFETY: as promised by the caller of this.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as promised by the caller of this.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        came(size);
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as promised by the caller of this.
        unsafe { System.realloc(at, layout, size) }
    }
}

unsafe extern "C" {
    safe fn clock() -> c_long;
    safe fn pthread_self() -> c_ulong;
    fn pthread_kill(thread: c_ulong, signal: c_int) -> c_int;
}

const SIGABRT: c_int = 6;
/// POSIX sets the unit of `clock`.
const PER_SECOND: i64 = 1_000_000;
/// No input runs.
const NOTHING: i64 = -1;

/// The processor time of the process when the input began.
static STARTED: AtomicI64 = AtomicI64::new(NOTHING);

fn number(name: &str, default: usize) -> usize {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|e| panic!("{name}={text}: {e}")),
        Err(_) => default,
    }
}

fn seconds() -> i64 {
    static LIMIT: OnceLock<i64> = OnceLock::new();
    *LIMIT.get_or_init(|| number("FT_FUZZ_SECONDS", SECONDS) as i64)
}

fn base_bytes() -> usize {
    static LIMIT: OnceLock<usize> = OnceLock::new();
    *LIMIT.get_or_init(|| number("FT_FUZZ_MEMORY", BASE_BYTES >> 20) << 20)
}

/// Watches the time of inputs that do not end. Called in the thread that runs them.
pub fn start() {
    let (thread, limit) = (pthread_self(), seconds());
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let started = STARTED.load(Relaxed);
            let is_over = started != NOTHING && clock() - started > limit * PER_SECOND;
            if is_over && STARTED.load(Relaxed) == started {
                eprintln!("this input has taken more than {limit} s of processor time, and is not at its end");
                // libFuzzer writes the input, with the place where that thread is.
                // SAFETY: the first thread lives as long as the process.
                unsafe { pthread_kill(thread, SIGABRT) };
            }
        }
    });
}

/// Runs an input of `size` bytes. A panic ends the process: libFuzzer writes the input.
pub fn within(size: usize, run: impl FnOnce()) {
    let before = LIVE.load(Relaxed);
    MOST.store(before, Relaxed);
    let started = clock();
    STARTED.store(started, Relaxed);
    run();
    STARTED.store(NOTHING, Relaxed);
    let used = clock() - started;
    assert!(
        used <= seconds() * PER_SECOND,
        "{size} bytes took {} ms of processor time: the limit is {} s",
        used / 1000,
        seconds()
    );
    let taken = MOST.load(Relaxed).saturating_sub(before);
    let most = base_bytes() + PER_BYTE * size;
    assert!(
        taken <= most,
        "{size} bytes took {} KiB of memory: the limit is {} KiB",
        taken >> 10,
        most >> 10
    );
}
