//! A prepacked weight as operand B: bf16, as [chunk of k][panel of 32][step].
//!
//! After the last chunk of every panel there is space for a fused LoRA matrix. It changes with every training step,
//! so each product packs it again. Therefore only one product at a time can use the panels; a concurrent one packs
//! the weight itself.

use super::super::{Matrix, OperandBlock};
use super::buffer::GrowingBuffer;
use super::pack::PackFormat;
use super::tile_kernels::STEP;
use super::{Depth, KC_STEPS, PackedView, pack_all};
use std::sync::{Mutex, MutexGuard};

/// Elements of k in a chunk: a product with a part of k begins at a multiple of it.
const CHUNK_ELEMENTS: usize = 32 * KC_STEPS;

#[derive(Debug)]
pub(crate) struct Panels {
    vectors: usize,
    k: usize,
    depth: Depth,
    memory: Mutex<GrowingBuffer>,
}

/// Panels locked by one product, from the vector and the element of k at which its operand begins.
pub(in crate::cpu::product) struct LockedPanels<'a> {
    panels: &'a Panels,
    memory: MutexGuard<'a, GrowingBuffer>,
    first: usize,
    k0: usize,
}

/// Returns the bytes of `vectors` packed vectors of `k` elements, with space for `rank` more.
pub(crate) fn bytes(vectors: usize, k: usize, rank: usize) -> usize {
    vectors.div_ceil(32) * (k.div_ceil(32) + rank.div_ceil(32)) * STEP
}

impl Panels {
    /// Packs `vectors` vectors of `k` elements (both must not be 0), with space for a LoRA rank of `rank`. The CPU
    /// must have AVX-512, which is always present with AMX.
    pub(crate) fn new(m: &Matrix, (vectors, k): (usize, usize), rank: usize) -> Self {
        m.check(vectors, k);
        let depth = Depth {
            steps: k.div_ceil(32),
            extra: rank.div_ceil(32),
        };
        let memory = GrowingBuffer::of(bytes(vectors, k, rank));
        let to = PackedView {
            memory: memory.address(),
            panels: vectors.div_ceil(32),
            depth,
            first_panel: 0,
            first_chunk: 0,
        };
        let whole = OperandBlock {
            first: 0,
            count: vectors,
            k0: 0,
            k,
        };
        pack_all(m, whole, PackFormat::B, to);
        Self {
            vectors,
            k,
            depth,
            memory: Mutex::new(memory),
        }
    }

    /// Locks the panels for a product with `vectors` of its vectors from `first` on, their elements `k0..k0 + k`,
    /// and `fused_steps` steps of a fused LoRA rank. None if this part does not begin and end with whole panels and
    /// chunks, if there is no space for the rank, or if another product uses the panels.
    pub(in crate::cpu::product) fn lock(
        &self,
        (first, vectors): (usize, usize),
        (k0, k): (usize, usize),
        fused_steps: usize,
    ) -> Option<LockedPanels<'_>> {
        let ends_whole =
            |at: usize, tile_kernels: usize, all: usize| at == all || (at < all && at.is_multiple_of(tile_kernels));
        let fits = first.is_multiple_of(32)
            && ends_whole(first + vectors, 32, self.vectors)
            && k0.is_multiple_of(CHUNK_ELEMENTS)
            && ends_whole(k0 + k, CHUNK_ELEMENTS, self.k);
        let fuses = fused_steps == 0 || (fused_steps <= self.depth.extra && k0 + k == self.k);
        if !fits || !fuses {
            return None;
        }
        Some(LockedPanels {
            panels: self,
            memory: self.memory.try_lock().ok()?,
            first,
            k0,
        })
    }
}

impl LockedPanels<'_> {
    /// Returns the operand from index `k0` of the product on, a multiple of `CHUNK_ELEMENTS`.
    pub(super) fn view_at(&self, k0: usize) -> PackedView {
        PackedView {
            memory: self.memory.address(),
            panels: self.panels.vectors.div_ceil(32),
            depth: self.panels.depth,
            first_panel: self.first / 32,
            first_chunk: (self.k0 + k0) / CHUNK_ELEMENTS,
        }
    }
}
