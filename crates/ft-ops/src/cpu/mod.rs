//! The operations on slices. Every loop is split by shape alone, never by the number of threads, and every sum
//! has a fixed order: results are bit-equal for any number of threads.

use std::cell::Cell;

pub(crate) mod attention;
pub(crate) mod attention_backward;
pub(crate) mod cross_entropy;
pub(crate) mod delta_rule;
pub(crate) mod delta_rule_backward;
pub(crate) mod dequantize;
pub(crate) mod distill;
pub(crate) mod embedding;
pub(crate) mod glu;
pub(crate) mod layer_norm;
pub(crate) mod math;
pub(crate) mod paged;
pub(crate) mod product;
pub(crate) mod quantize;
pub(crate) mod rms_norm;
pub(crate) mod rope;
pub(crate) mod short_conv;
pub(crate) mod step;
pub(crate) mod storage;
pub(crate) mod update;

/// An output slice that several tasks write concurrently, each its own elements.
#[derive(Clone, Copy)]
pub(crate) struct SharedSlice(*mut f32, usize);

// SAFETY: only an address and a length; each writer owns the elements that it writes (see `part`).
unsafe impl Send for SharedSlice {}
// SAFETY: as above.
unsafe impl Sync for SharedSlice {}

impl SharedSlice {
    pub(crate) fn new(slice: &mut [f32]) -> Self {
        Self(slice.as_mut_ptr(), slice.len())
    }

    /// Returns the address of element `index`.
    pub(crate) fn at(self, index: usize) -> *mut f32 {
        assert!(index <= self.1);
        self.0.wrapping_add(index)
    }

    /// # Safety
    /// The slice must outlive the returned part, and no other task may access these elements at the same time.
    pub(crate) unsafe fn part<'a>(self, start: usize, len: usize) -> &'a mut [f32] {
        assert!(start <= self.1 && len <= self.1 - start);
        // SAFETY: inside the slice (checked above), not shared (promised by the caller).
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
}

/// Number of f32 in a cache line.
const LINE: usize = 16;
/// A thread keeps a scratch buffer of up to this many elements for its next task (4 MiB).
const KEEP: usize = 1 << 20;

thread_local! {
    static SCRATCH: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Runs `f` on `len` elements of scratch memory with arbitrary contents. `f` must not start parallel work.
pub(crate) fn with_scratch<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    let mut scratch = SCRATCH.take();
    if scratch.len() < len + LINE {
        scratch = vec![0.0; len + LINE];
    }
    // Begins on a cache line: a vector load that crosses a cache line costs twice.
    let start = scratch.as_ptr().align_offset(4 * LINE).min(LINE);
    let result = f(&mut scratch[start..start + len]);
    if scratch.len() <= KEEP {
        SCRATCH.set(scratch);
    }
    result
}
