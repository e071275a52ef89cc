//! An allocator that counts.

use ft::base::allocator::CachingAllocator;
use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The program's allocator, with the bytes that are out and the most that ever were.
struct Counting;

pub static LIVE: AtomicUsize = AtomicUsize::new(0);
pub static MOST: AtomicUsize = AtomicUsize::new(0);

/// Above this an allocation fails: a test of hostile sizes must not fill the machine.
pub static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);

fn came(bytes: usize) {
    MOST.fetch_max(LIVE.fetch_add(bytes, Relaxed) + bytes, Relaxed);
}

fn is_too_much(bytes: usize) -> bool {
    let limit = LIMIT.load(Relaxed);
    limit != usize::MAX && LIVE.load(Relaxed).saturating_add(bytes) > limit
}

// SAFETY: every call goes to `CachingAllocator` as it came; only numbers are kept beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_too_much(layout.size()) {
            return std::ptr::null_mut();
        }
        came(layout.size());
        // SAFETY: as promised by the caller of this.
        unsafe { CachingAllocator.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_too_much(layout.size()) {
            return std::ptr::null_mut();
        }
        came(layout.size());
        // SAFETY: as promised by the caller of this.
        unsafe { CachingAllocator.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as promised by the caller of this.
        unsafe { CachingAllocator.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if is_too_much(size) {
            return std::ptr::null_mut();
        }
        // Old and new lie side by side while the numbers move.
        came(size);
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as promised by the caller of this.
        unsafe { CachingAllocator.realloc(at, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;
