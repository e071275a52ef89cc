//! Memory for packed operands: aligned, reused by later products, on huge pages if the system has them.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::sync::Mutex;

const PAGE: usize = 2 << 20;

/// A buffer that grows and never shrinks; its contents are arbitrary.
#[derive(Debug, Default)]
pub(super) struct GrowingBuffer {
    memory: Option<(*mut u8, Layout)>,
}

impl GrowingBuffer {
    /// Returns the address of at least `bytes` bytes.
    pub(super) fn at_least(&mut self, bytes: usize) -> *const u8 {
        if let Some((address, layout)) = self.memory
            && layout.size() >= bytes
        {
            return address;
        }
        self.free();
        let align = if bytes >= PAGE { PAGE } else { 4096 };
        let address = self.renew(bytes, align);
        if align == PAGE {
            // SAFETY: the range was just allocated; `madvise` changes no contents, and may be refused.
            unsafe { libc::madvise(address.cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        address
    }

    fn renew(&mut self, bytes: usize, align: usize) -> *mut u8 {
        let Ok(layout) = Layout::from_size_align(bytes.next_multiple_of(4096).max(4096), align) else {
            handle_alloc_error(Layout::new::<u8>())
        };
        // SAFETY: the size is not 0.
        let address = unsafe { alloc(layout) };
        if address.is_null() {
            handle_alloc_error(layout);
        }
        self.memory = Some((address, layout));
        address
    }

    fn free(&mut self) {
        if let Some((address, layout)) = self.memory.take() {
            // SAFETY: allocated above with this layout.
            unsafe { dealloc(address, layout) };
        }
    }
}

impl Drop for GrowingBuffer {
    fn drop(&mut self) {
        self.free();
    }
}

// SAFETY: the buffer is the only owner of the memory.
unsafe impl Send for GrowingBuffer {}

static BUFFERS: Mutex<Option<(GrowingBuffer, GrowingBuffer)>> = Mutex::new(None);

/// Frees the two buffers of the process.
pub(in crate::cpu::product) fn free_buffers() {
    if let Ok(mut buffers) = BUFFERS.lock() {
        *buffers = None;
    }
}

/// Runs `f` with the two buffers of the process, or with new ones if another thread is using them.
pub(super) fn with_buffers<R>(f: impl FnOnce(&mut GrowingBuffer, &mut GrowingBuffer) -> R) -> R {
    let kept = BUFFERS.lock().ok().and_then(|mut b| b.take());
    let (mut a, mut b) = kept.unwrap_or_default();
    let result = f(&mut a, &mut b);
    if let Ok(mut place) = BUFFERS.lock() {
        *place = Some((a, b));
    }
    result
}
