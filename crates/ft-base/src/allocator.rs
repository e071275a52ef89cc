//! Caching allocator for blocks >= 1 MiB. Freed blocks are reused, so that a training step seldom asks the system for
//! pages again; blocks of 8 MiB and more use huge pages. Cached plus live bytes never exceed the peak of live bytes, so
//! the resident memory stays close to the size of the tensors. Smaller blocks go to the system's allocator.
//!
//! `#[global_allocator] static HEAP: CachingAllocator = CachingAllocator;`

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The allocator. A program may install it as its global allocator; the library works with any other one too.
pub struct CachingAllocator;

/// Smallest block that this allocator serves.
#[cfg(target_os = "linux")]
const LARGE: usize = 1 << 20;

// SAFETY: the size alone decides whether a block belongs to the system or to the pool, both in `alloc` and in
// `dealloc`.
unsafe impl GlobalAlloc for CachingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        #[cfg(target_os = "linux")]
        if is_large(layout) {
            return noted(pool::lock().take(layout.size()).0, layout.size());
        }
        // SAFETY: the caller upholds the contract of `alloc`.
        noted(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        #[cfg(target_os = "linux")]
        if is_large(layout) {
            let (at, is_fresh) = pool::lock().take(layout.size());
            if !at.is_null() && !is_fresh {
                // SAFETY: a block of at least this size that only this call owns.
                unsafe { at.write_bytes(0, layout.size()) };
            }
            return noted(at, layout.size());
        }
        // SAFETY: the caller upholds the contract of `alloc_zeroed`.
        noted(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        #[cfg(target_os = "linux")]
        if is_large(layout) {
            return pool::lock().put(at, layout.size());
        }
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promises that `size` is a valid size for this alignment.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        if !is_large(layout) && !is_large(new) {
            // SAFETY: the caller upholds the contract of `realloc`; both sizes belong to the system's allocator.
            return noted(unsafe { System.realloc(at, layout, size) }, size);
        }
        #[cfg(target_os = "linux")]
        if is_large(layout) && is_large(new) {
            let moved = pool::lock().resize(at, layout.size(), size);
            if !moved.is_null() {
                return moved;
            }
        }
        // SAFETY: two different blocks, both at least as large as the copied bytes.
        unsafe {
            let to = self.alloc(new);
            if !to.is_null() {
                to.copy_from_nonoverlapping(at, layout.size().min(size));
                self.dealloc(at, layout);
            }
            to
        }
    }
}

thread_local! {
    /// Size of the last block that the system refused to this thread.
    static REFUSED: Cell<usize> = const { Cell::new(0) };
}

/// A block of this size, or null if the system refused it.
fn noted(block: *mut u8, size: usize) -> *mut u8 {
    if block.is_null() {
        REFUSED.set(size);
    }
    block
}

/// Size of the last block that the system refused to this thread; 0: none.
pub fn refused() -> usize {
    REFUSED.get()
}

#[cfg(target_os = "linux")]
fn is_large(layout: Layout) -> bool {
    layout.size() >= LARGE && layout.align() <= pool::GRAIN
}

#[cfg(not(target_os = "linux"))]
fn is_large(_: Layout) -> bool {
    false
}

/// Makes the system's allocator keep small freed blocks for the next step. Otherwise they return to the system and come
/// back page by page, each zeroed by the kernel. Call it once, before the large allocations.
pub fn retain_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: sets parameters of the system's allocator.
    unsafe {
        // Larger blocks come from `mmap`; this is the largest value that is allowed.
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 30);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
    }
}

#[cfg(target_os = "linux")]
mod pool {
    use std::ptr::null_mut;
    use std::sync::{Mutex, MutexGuard, PoisonError};

    /// Block sizes are multiples of it.
    pub(super) const GRAIN: usize = 1 << 16;
    /// Size of a huge page.
    const HUGE: usize = 2 << 20;
    /// Smallest block on huge pages: for smaller ones the rounding would waste too much memory.
    const ON_HUGE: usize = 4 * HUGE;
    /// Capacity of the free list; it is fixed because the allocator itself cannot allocate.
    const PLACES: usize = 512;

    #[derive(Clone, Copy)]
    struct FreeBlock {
        at: usize,
        bytes: usize,
    }

    pub(super) struct Pool {
        /// Free list: the first `count` entries are valid, the longest free first.
        free: [FreeBlock; PLACES],
        count: usize,
        /// Total bytes in the free list.
        idle: usize,
        /// Live bytes, and their peak.
        out: usize,
        most: usize,
    }

    static POOL: Mutex<Pool> = Mutex::new(Pool::new());

    pub(super) fn lock() -> MutexGuard<'static, Pool> {
        POOL.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Rounds `bytes` up to a block size.
    pub(super) fn whole(bytes: usize) -> usize {
        bytes.saturating_add(GRAIN - 1) & !(GRAIN - 1)
    }

    impl Pool {
        pub(super) const fn new() -> Self {
            Self {
                free: [FreeBlock { at: 0, bytes: 0 }; PLACES],
                count: 0,
                idle: 0,
                out: 0,
                most: 0,
            }
        }

        /// Returns a block for `bytes`, and whether it is fresh from the system (all zeros). Null: out of memory.
        pub(super) fn take(&mut self, bytes: usize) -> (*mut u8, bool) {
            let bytes = whole(bytes);
            let fits = (0..self.count).filter(|i| self.free[*i].bytes >= bytes);
            if let Some(i) = fits.min_by_key(|i| self.free[*i].bytes) {
                let block = self.free[i];
                if block.bytes == bytes {
                    self.remove(i)
                } else {
                    self.free[i] = FreeBlock {
                        at: block.at + bytes,
                        bytes: block.bytes - bytes,
                    };
                }
                self.idle -= bytes;
                self.out += bytes;
                self.most = self.most.max(self.out);
                return (block.at as *mut u8, false);
            }
            let most = self.most.max(self.out + bytes);
            self.shrink(most - self.out - bytes);
            let mut at = map(bytes);
            if at.is_null() && self.idle > 0 {
                self.shrink(0);
                at = map(bytes);
            }
            if !at.is_null() {
                self.out += bytes;
                self.most = most;
            }
            (at, true)
        }

        /// Frees a block that `take` returned for `bytes`.
        pub(super) fn put(&mut self, at: *mut u8, bytes: usize) {
            let mut block = FreeBlock {
                at: at as usize,
                bytes: whole(bytes),
            };
            self.out -= block.bytes;
            self.idle += block.bytes;
            // Merges the block with its free neighbors.
            let mut i = 0;
            while i < self.count {
                let other = self.free[i];
                if other.at + other.bytes == block.at || block.at + block.bytes == other.at {
                    block = FreeBlock {
                        at: other.at.min(block.at),
                        bytes: other.bytes + block.bytes,
                    };
                    self.remove(i);
                } else {
                    i += 1;
                }
            }
            if self.count == PLACES {
                let oldest = self.free[0];
                self.remove(0);
                self.idle -= oldest.bytes;
                unmap(oldest);
            }
            self.free[self.count] = block;
            self.count += 1;
        }

        /// Resizes a block from `from` to `to` bytes without a copy. Null: not possible.
        pub(super) fn resize(&mut self, at: *mut u8, from: usize, to: usize) -> *mut u8 {
            let (old, new) = (whole(from), whole(to));
            if new <= old {
                if new < old {
                    self.put(at.wrapping_add(new), old - new);
                }
                return at;
            }
            let most = self.most.max(self.out + new - old);
            self.shrink(most - self.out - (new - old));
            // SAFETY: a whole block whose owner passed it in.
            let moved = unsafe { libc::mremap(at.cast(), old, new, libc::MREMAP_MAYMOVE) };
            if moved == libc::MAP_FAILED {
                return null_mut();
            }
            self.out += new - old;
            self.most = most;
            moved.cast()
        }

        fn remove(&mut self, i: usize) {
            self.free.copy_within(i + 1..self.count, i);
            self.count -= 1;
        }

        /// Returns the longest free blocks to the system until at most `bytes` are idle.
        fn shrink(&mut self, bytes: usize) {
            while self.idle > bytes && self.count > 0 {
                let block = self.free[0];
                let gone = block.bytes.min(self.idle - bytes);
                self.idle -= gone;
                self.free[0].bytes -= gone;
                unmap(FreeBlock {
                    at: block.at + block.bytes - gone,
                    bytes: gone,
                });
                if self.free[0].bytes == 0 {
                    self.remove(0);
                }
            }
        }

        #[cfg(test)]
        pub(super) fn numbers(&self) -> (usize, usize, usize) {
            (self.idle, self.out, self.most)
        }
    }

    fn map(bytes: usize) -> *mut u8 {
        // Aligns the block to a huge page.
        let Some(room) = bytes.checked_add(HUGE) else {
            return null_mut();
        };
        // SAFETY: new memory of this process alone; the trimmed parts belong to it and are not in use yet.
        unsafe {
            let (prot, flags) = (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            );
            let at = libc::mmap(null_mut(), room, prot, flags, -1, 0);
            if at == libc::MAP_FAILED {
                return null_mut();
            }
            let (from, to) = (at as usize, at as usize + room);
            let start = from.next_multiple_of(HUGE);
            for (from, to) in [(from, start), (start + bytes, to)] {
                if to > from {
                    libc::munmap(from as *mut _, to - from);
                }
            }
            if bytes >= ON_HUGE {
                libc::madvise(start as *mut _, bytes, libc::MADV_HUGEPAGE);
            }
            start as *mut u8
        }
    }

    fn unmap(block: FreeBlock) {
        // SAFETY: a free block, or the end of one: not in use.
        unsafe { libc::munmap(block.at as *mut _, block.bytes) };
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::pool::{GRAIN, Pool, whole};
    use super::*;
    use crate::rng::{Rng, Stream};

    #[test]
    fn a_block_comes_back_where_it_was() {
        let mut pool = Pool::new();
        let (first, fresh) = pool.take(3 << 20);
        assert!(fresh && !first.is_null());
        pool.put(first, 3 << 20);
        assert_eq!(pool.take(3 << 20), (first, false));
        // A block is split in two and merged again.
        pool.put(first, 3 << 20);
        let (low, _) = pool.take(1 << 20);
        let (high, _) = pool.take(2 << 20);
        assert_eq!((low, high as usize), (first, first as usize + (1 << 20)));
        pool.put(low, 1 << 20);
        pool.put(high, 2 << 20);
        assert_eq!(pool.take(3 << 20), (first, false));
        pool.put(first, 3 << 20);
    }

    /// Many blocks of all sizes: no two overlap, and the pool never holds more than the peak of live bytes.
    #[test]
    fn what_is_held_never_exceeds_what_was_out() {
        let rng = Rng::new(3, Stream::Init, &[]);
        let mut pool = Pool::new();
        let mut out: Vec<(*mut u8, usize, u8)> = Vec::new();
        for i in 0..4000u64 {
            if out.len() < 40 && !rng.below(3 * i, 5).is_multiple_of(2) {
                let bytes = LARGE + rng.below(3 * i + 1, 3 << 20) as usize;
                let (at, fresh) = pool.take(bytes);
                assert_eq!(at as usize % GRAIN, 0);
                let mark = i as u8;
                // SAFETY: a block of `bytes`.
                unsafe {
                    let (first, last) = (at, at.add(bytes - 1));
                    assert!(!fresh || (first.read(), last.read()) == (0, 0));
                    first.write(mark);
                    last.write(mark);
                }
                out.push((at, bytes, mark));
            } else if !out.is_empty() {
                let (at, bytes, mark) = out.swap_remove(rng.below(3 * i + 2, out.len() as u64) as usize);
                // SAFETY: a live block of `bytes`.
                unsafe { assert_eq!((at.read(), at.add(bytes - 1).read()), (mark, mark)) };
                pool.put(at, bytes);
            }
            let (idle, used, most) = pool.numbers();
            assert_eq!(used, out.iter().map(|b| whole(b.1)).sum::<usize>());
            assert!(idle + used <= most, "{idle} + {used}, at most {most}");
        }
        assert!(pool.numbers().2 > 20 << 20);
        for (at, bytes, _) in out {
            pool.put(at, bytes);
        }
    }

    #[test]
    fn blocks_grow_and_shrink_over_the_border_with_what_they_hold() {
        let layout = |bytes| Layout::from_size_align(bytes, 8).unwrap();
        let sizes = [100, LARGE - 1, LARGE, LARGE + 1, 5 << 20, 40 << 20, LARGE, 1000];
        // SAFETY: every block is freed with its own layout, and written only inside its bounds.
        unsafe {
            let mut at = CachingAllocator.alloc(layout(50));
            at.write_bytes(7, 50);
            let mut size = 50;
            for next in sizes {
                at = CachingAllocator.realloc(at, layout(size), next);
                assert!(!at.is_null());
                size = next;
                assert!((0..50).all(|i| at.add(i).read() == 7));
                at.add(size - 1).write(9);
            }
            CachingAllocator.dealloc(at, layout(size));
            let at = CachingAllocator.alloc_zeroed(layout(2 << 20));
            at.write_bytes(1, 2 << 20);
            CachingAllocator.dealloc(at, layout(2 << 20));
            let again = CachingAllocator.alloc_zeroed(layout(2 << 20));
            assert!((0..2 << 20).all(|i| again.add(i).read() == 0));
            CachingAllocator.dealloc(again, layout(2 << 20));
        }
    }
}
