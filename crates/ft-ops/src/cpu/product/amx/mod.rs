//! Products with bf16 operands and f32 sums on AMX, or with AVX512-BF16 dot products instead.
//!
//! Tasks own blocks of C (`block.rs`). Activations are packed completely and in parallel, as [chunk of k][panel of 32][step]; memory
//! is bounded, so a product with larger operands is computed in parts. On AMX a weight is packed by the tasks, a few panels at a
//! time, into the L2 cache: so its packed form never goes to memory, and it is read once for each 512 rows. With at most 64 rows of
//! C, a bf16 weight of x·Wᵀ is read where it lies (`unpacked_tiles.rs`).
//!
//! A fused LoRA product (`fused_lora.rs`) first multiplies the packed A with its `down`. Then its rank is appended after
//! the last chunk of both operands. Its matrices and u are rounded to bf16 here, as the operands of the product are.
//!
//! Dot products read a bf16 weight where it lies if k is even (`unpacked.rs`), with the bits of packed products.

pub(super) mod avx512_bf16;
mod block;
mod buffer;
mod emulate;
mod pack;
pub(super) mod task_gemm;
pub(super) mod tile_kernels;
mod unpacked;
mod unpacked_tiles;
#[cfg(test)]
mod tests;

use super::grid::part;
use super::{CInit, CpuBackend, Matrix, Operand, OperandBlock, ProductJob};
pub(super) use block::SCRATCH;
use block::{BLOCK_COLUMNS, ColumnPart, Columns, multiply};
pub(super) use buffer::free_buffers;
use buffer::{GrowingBuffer, with_buffers};
use pack::PackFormat;
use rayon::prelude::*;
use tile_kernels::{STEP, TileCall};

/// Steps (of 32 elements of k) in a chunk of k: 16 panels of rows (1 MB) and 8 of a weight stay in the L2 cache.
const KC_STEPS: usize = 32;
/// Bytes of a panel in a chunk.
pub(super) const CHUNK: usize = KC_STEPS * STEP;
/// Largest number of bytes of a packed operand.
pub(super) const PACKED: usize = 16 << 20;
/// The same limit for a quantized operand with dot products, so that its dequantized values do not fill memory.
pub(super) const DEQUANTIZED: usize = 4 << 20;

/// Prepares the CPU for the tile products of a task.
/// # Safety
/// `backend` is `Amx` or `Avx512Bf16`, and available.
unsafe fn configure(backend: CpuBackend) {
    if backend == CpuBackend::Amx {
        // SAFETY: promised by the caller.
        unsafe { tile_kernels::configure() }
    }
}

/// Undoes `configure` after the tile products of a task.
/// # Safety
/// As `configure`.
unsafe fn release(backend: CpuBackend) {
    if backend == CpuBackend::Amx {
        // SAFETY: promised by the caller.
        unsafe { tile_kernels::release() }
    }
}

/// Computes the sums of a tile. Writes the finished tile of `call`, if any, to C; adds it to the values in C if `add`.
/// # Safety
/// As `configure` and `tile_kernels::multiply_and_set`. `transposed` is for AMX only.
unsafe fn multiply_tile(backend: CpuBackend, call: &TileCall, add: bool, transposed: bool) {
    // SAFETY: promised by the caller.
    unsafe {
        match (backend, transposed, add) {
            (CpuBackend::Amx, false, true) => tile_kernels::multiply_and_add(call),
            (CpuBackend::Amx, false, false) => tile_kernels::multiply_and_set(call),
            (CpuBackend::Amx, true, true) => tile_kernels::multiply_and_add_transposed(call),
            (CpuBackend::Amx, true, false) => tile_kernels::multiply_and_set_transposed(call),
            _ => avx512_bf16::multiply(call, add),
        }
    }
}

/// A tile of C in place.
#[derive(Clone, Copy)]
struct TileOfC {
    /// Address of its first element.
    c: *mut f32,
    /// Elements from a row to the next one.
    row: usize,
}

/// Computes a tile in C itself; only its first `rows` rows are needed.
/// # Safety
/// As `configure` and `tile_kernels::multiply_in_place`.
unsafe fn multiply_tile_in_place(
    backend: CpuBackend,
    a: *const u8,
    b: *const u8,
    steps: usize,
    to: TileOfC,
    rows: usize,
    add: bool,
) {
    // SAFETY: promised by the caller.
    unsafe {
        match backend {
            CpuBackend::Amx => tile_kernels::multiply_in_place(a, b, steps, to.c, to.row, add),
            _ => avx512_bf16::multiply_in_place(a, b, steps, to, rows, add),
        }
    }
}

/// Installs the AMX emulator (for tests; needs AVX-512, as packing does). Returns false if it is unavailable.
pub(super) fn emulate() -> bool {
    emulate::install()
}

/// Computes a job on `Amx` or `Avx512Bf16`.
pub(super) fn run(job: &ProductJob, backend: CpuBackend) {
    let (m, n, k) = job.sizes;
    let fused_steps = job.fused_lora.map_or(0, |r| r.rank.div_ceil(32));
    if backend == CpuBackend::Avx512Bf16 && unpacked::fits(job) {
        return unpacked::run(job);
    }
    // A weight is packed by the tasks, panel by panel, or read where it lies. If it is contiguous in k, its rows are operand A: then
    // packing is a copy.
    let by_tasks = backend == CpuBackend::Amx && !matches!(job.b.values, Operand::F32(_));
    let transposed = by_tasks && job.b.k_contiguous;
    let (rows_format, columns_format) = if transposed {
        (PackFormat::B, PackFormat::A)
    } else {
        (PackFormat::A, PackFormat::B)
    };
    let c = job.c;
    let filled = match job.start {
        CInit::Zero => false,
        CInit::C => true,
        CInit::Bias(bias) => {
            (0..m).into_par_iter().for_each(|row| {
                // SAFETY: each task has its own row.
                unsafe { c.part(row * n, n) }.copy_from_slice(bias);
            });
            true
        }
    };
    // Keeps both operands within their bound: k is cut so that all of A fits, then n so that this part of B fits.
    let panels = |vectors: usize| vectors.div_ceil(32);
    let most_steps = (PACKED / STEP / panels(m)).max(KC_STEPS) / KC_STEPS * KC_STEPS;
    let k_parts = k.div_ceil(32).div_ceil(most_steps);
    with_buffers(|packed_a, packed_b| {
        for k_part in 0..k_parts {
            let (k0, k_len) = part(k, k_parts, k_part, 32 * KC_STEPS.min(k.div_ceil(32)));
            if k_len == 0 {
                continue;
            }
            let fused = job.fused_lora.as_ref().filter(|_| k_part + 1 == k_parts);
            let depth = Depth {
                steps: k_len.div_ceil(32),
                extra: if fused.is_some() { fused_steps } else { 0 },
            };
            let own = Depth { extra: 0, ..depth };
            let block = |first, count| OperandBlock {
                first,
                count,
                k0,
                k: k_len,
            };
            let a = pack_operand(&job.a, block(0, m), depth, rows_format, packed_a);
            let columns_of = |columns, first, count| ColumnPart {
                columns,
                first,
                count,
                transposed,
            };
            if let Some(fused_lora) = &job.fused_lora {
                let rank = fused_lora.rank;
                let down = pack_operand(&fused_lora.down, block(0, rank), own, columns_format, packed_b);
                let down = columns_of(Columns::Packed(down), 0, rank);
                multiply(backend, &fused_lora.job(job), a, down, own, k_part > 0);
            }
            if let Some(fused_lora) = fused {
                // SAFETY: the tasks that wrote u are complete.
                let u = unsafe { fused_lora.scaled(m) };
                pack_extra(&u, (0, m), fused_lora.rank, depth, rows_format, a);
            }
            let add = filled || k_part > 0;
            if by_tasks {
                let columns = Columns::Weight {
                    weight: &job.b,
                    k0,
                    k: k_len,
                    up: fused.map(|f| (&f.up, f.rank)),
                };
                multiply(backend, job, a, columns_of(columns, 0, n), depth, add);
                continue;
            }
            let bound = if job.b.is_quantized() { DEQUANTIZED } else { PACKED };
            let most_panels = (bound / STEP / depth.steps).max(BLOCK_COLUMNS);
            let n_parts = panels(n).div_ceil(most_panels);
            for n_part in 0..n_parts {
                let (n0, n_len) = part(n, n_parts, n_part, 32);
                let b = pack_operand(&job.b, block(n0, n_len), depth, PackFormat::B, packed_b);
                if let Some(fused_lora) = fused {
                    pack_extra(&fused_lora.up, (n0, n_len), fused_lora.rank, depth, PackFormat::B, b);
                }
                multiply(backend, job, a, columns_of(Columns::Packed(b), n0, n_len), depth, add);
            }
        }
    });
}

/// The steps of k in the packed operands.
#[derive(Debug, Clone, Copy)]
struct Depth {
    steps: usize,
    /// Space for the LoRA rank after the last chunk.
    extra: usize,
}

/// Contiguous steps of a panel, from step `first` on.
#[derive(Clone, Copy)]
struct PanelChunk {
    first: usize,
    /// Steps of the operands themselves.
    own: usize,
    /// Steps including the space after them.
    room: usize,
}

impl Depth {
    fn count(self) -> usize {
        self.steps.div_ceil(KC_STEPS)
    }

    fn chunk(self, index: usize) -> PanelChunk {
        let first = index * KC_STEPS;
        let own = KC_STEPS.min(self.steps - first);
        let is_last = index + 1 == self.count();
        PanelChunk {
            first,
            own,
            room: own + if is_last { self.extra } else { 0 },
        }
    }
}

/// A packed operand; many tasks read it.
#[derive(Clone, Copy)]
struct PackedView {
    memory: *const u8,
    /// Panels of the whole operand.
    panels: usize,
    depth: Depth,
}
// SAFETY: only read between packing and the end of the product.
unsafe impl Send for PackedView {}
// SAFETY: as above.
unsafe impl Sync for PackedView {}

impl PackedView {
    /// Returns the address of chunk `chunk` of panel `panel`.
    fn at(self, panel: usize, chunk: usize) -> *const u8 {
        let chunk = self.depth.chunk(chunk);
        let step = chunk.first * self.panels + panel * chunk.room;
        self.memory.wrapping_add(step * STEP)
    }
}

fn pack_operand(
    m: &Matrix,
    block: OperandBlock,
    depth: Depth,
    format: PackFormat,
    buffer: &mut GrowingBuffer,
) -> PackedView {
    let panels = block.count.div_ceil(32);
    let to = PackedView {
        memory: buffer.at_least(panels * (depth.steps + depth.extra) * STEP),
        panels,
        depth,
    };
    pack_all(m, block, format, to);
    to
}

/// Packs a block into all panels of `to`.
fn pack_all(m: &Matrix, block: OperandBlock, format: PackFormat, to: PackedView) {
    let OperandBlock { first, count, k0, k } = block;
    // If the operand is not contiguous in k, neighboring panels share its rows: one task packs a few panels.
    let group = if m.k_contiguous { 4 } else { 8 };
    let (panels, chunks) = (to.panels, to.depth.count());
    (0..panels.div_ceil(group) * chunks)
        .into_par_iter()
        .with_max_len(1)
        .for_each(|task| {
            let (chunk_index, group_index) = (task % chunks, task / chunks);
            let chunk = to.depth.chunk(chunk_index);
            let elements = (chunk.own * 32).min(k - chunk.first * 32);
            let address = |p| to.at(p, chunk_index).cast_mut();
            let block = |start: usize, most: usize| OperandBlock {
                first: first + start,
                count: most.min(count - start),
                k0: k0 + chunk.first * 32,
                k: elements,
            };
            let block = block(group_index * group * 32, group * 32);
            // SAFETY: the job was checked; each task writes its own panels, which lie in the buffer.
            unsafe { pack::panels(m, block, format, |i| address(group_index * group + i)) }
        });
}

/// Packs a LoRA operand, `rank` elements of every vector, after the last chunk of an operand of depth `depth`.
fn pack_extra(
    m: &Matrix,
    (first, count): (usize, usize),
    rank: usize,
    depth: Depth,
    format: PackFormat,
    to: PackedView,
) {
    let last = depth.count() - 1;
    let own = depth.chunk(last).own;
    (0..count.div_ceil(32)).into_par_iter().for_each(|p| {
        let block = OperandBlock {
            first: first + p * 32,
            count: 32.min(count - p * 32),
            k0: 0,
            k: rank,
        };
        let address = to.at(p, last).wrapping_add(own * STEP);
        // SAFETY: the job was checked; each task writes after its own panel, where space is reserved.
        unsafe { pack::panel(m, block, format, address.cast_mut()) }
    });
}
