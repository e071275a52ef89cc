//! A weight that is kept packed, as B: bf16, as [chunk of k][panel of 32][step].
//!
//! Behind the last chunk of every panel is room for what rides: its rank changes with every step of training, and is
//! packed there anew in each product. So one product at a time has the panels; another packs for itself.

use super::super::Matrix;
use super::buffer::Buffer;
use super::pack::Format;
use super::unit::STEP;
use super::{CHUNK, Depth, Packed, pack_all};
use std::sync::{Mutex, MutexGuard};

/// Elements of k in a chunk: a product with a part of k begins at a multiple of it.
const CHUNK_ELEMENTS: usize = 32 * CHUNK;

#[derive(Debug)]
pub(crate) struct Panels {
    vectors: usize,
    k: usize,
    depth: Depth,
    memory: Mutex<Buffer>,
}

/// Panels that one product has, from the vector and the step of k on at which its operand begins.
pub(in crate::cpu::product) struct Held<'a> {
    panels: &'a Panels,
    memory: MutexGuard<'a, Buffer>,
    first: usize,
    k0: usize,
}

/// Bytes of `vectors` packed vectors of `k` elements, with room for `rank` more.
pub(crate) fn bytes(vectors: usize, k: usize, rank: usize) -> usize {
    vectors.div_ceil(32) * (k.div_ceil(32) + rank.div_ceil(32)) * STEP
}

impl Panels {
    /// Packs `vectors` vectors of `k` elements, none of the two 0, with room for `rank` more that ride. The CPU must have
    /// AVX-512, as it has with the tile unit.
    pub fn new(m: &Matrix, (vectors, k): (usize, usize), rank: usize) -> Self {
        m.check(vectors, k);
        let depth = Depth {
            steps: k.div_ceil(32),
            extra: rank.div_ceil(32),
        };
        let memory = Buffer::of(bytes(vectors, k, rank));
        let to = Packed {
            memory: memory.address(),
            panels: vectors.div_ceil(32),
            depth,
            first_panel: 0,
            first_chunk: 0,
        };
        pack_all(m, (0, vectors), (0, k), Format::B, to);
        Self {
            vectors,
            k,
            depth,
            memory: Mutex::new(memory),
        }
    }

    /// For a product with `vectors` of them from `first` on, their elements `k0..k0 + k`, and `riding` steps of a rider.
    /// None: they do not begin or end with a panel and a chunk, there is no room, or another product has them.
    pub(in crate::cpu::product) fn hold(
        &self,
        (first, vectors): (usize, usize),
        (k0, k): (usize, usize),
        riding: usize,
    ) -> Option<Held<'_>> {
        let ends_whole = |at: usize, unit: usize, all: usize| at == all || (at < all && at.is_multiple_of(unit));
        let fits = first.is_multiple_of(32)
            && ends_whole(first + vectors, 32, self.vectors)
            && k0.is_multiple_of(CHUNK_ELEMENTS)
            && ends_whole(k0 + k, CHUNK_ELEMENTS, self.k);
        let rides = riding == 0 || (riding <= self.depth.extra && k0 + k == self.k);
        if !fits || !rides {
            return None;
        }
        Some(Held {
            panels: self,
            memory: self.memory.try_lock().ok()?,
            first,
            k0,
        })
    }
}

impl Held<'_> {
    /// From step `k0` of the product on, a multiple of the elements of a chunk.
    pub(super) fn from(&self, k0: usize) -> Packed {
        Packed {
            memory: self.memory.address(),
            panels: self.panels.vectors.div_ceil(32),
            depth: self.panels.depth,
            first_panel: self.first / 32,
            first_chunk: (self.k0 + k0) / CHUNK_ELEMENTS,
        }
    }
}
