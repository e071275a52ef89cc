//! A block of C: one task multiplies panels of rows with panels of columns, tile by tile.

use super::super::super::math::mask16;
use super::super::grid::part;
use super::super::{CpuBackend, Matrix, OperandBlock, ProductJob};
use super::pack::{self, PackFormat, transpose};
use super::tile_kernels::{STEP, TILE, TileCall, WRITING};
use super::unpacked_tiles::{self, UnpackedTileCall, multiply_16, multiply_32};
use super::{Depth, PackedView, configure, multiply_tile, release};
use half::bf16;
use rayon::prelude::*;
use std::arch::x86_64::*;

/// Steps of a panel of rows that stay in the L1 cache.
const NEAR: usize = WRITING;
/// Largest number of panels of a block: a chunk of its rows stays in the L2 cache. A weight is packed once for so many rows.
const BLOCK_ROWS: usize = 16;
pub(super) const BLOCK_COLUMNS: usize = 16;
/// Panels of a weight that a task packs together and multiplies with a panel of rows one after the other: so it writes long parts
/// of the rows of C, and touches each of their pages seldom.
const TOGETHER: usize = 8;
const _: () = assert!(TOGETHER * 32 <= pack::MOST_VECTORS);
/// Number of f32 of scratch memory of a task: the panels of a chunk, with a LoRA rank after it.
pub(in crate::cpu::product) const SCRATCH: usize =
    TOGETHER * (super::KC_STEPS + super::super::fused_lora::MAX_RANK.div_ceil(32)) * STEP / 4;

/// Operand B of a product.
#[derive(Clone, Copy)]
pub(super) enum Columns<'a> {
    /// Packed, with the steps of the product.
    Packed(PackedView),
    /// A weight of which each task packs a few panels at a time, just before it multiplies them with all its rows. If C has few
    /// rows, a bf16 weight that is contiguous in k is read where it lies (`unpacked_tiles.rs`).
    Weight {
        weight: &'a Matrix<'a>,
        /// The part of k.
        k0: usize,
        k: usize,
        /// The matrix of a fused LoRA rank, and the rank.
        up: Option<(&'a Matrix<'a>, usize)>,
    },
}

/// Columns `first..first + count` of C, and how they are computed.
#[derive(Clone, Copy)]
pub(super) struct ColumnPart<'a> {
    pub columns: Columns<'a>,
    pub first: usize,
    pub count: usize,
    /// The rows are packed as operand B of the tiles and the columns as operand A, so tiles are transposed.
    pub transposed: bool,
}

/// Returns into how many blocks (down, across) the panels of C are cut. The columns are cut for all threads, if there are so many
/// panels. The rows are cut as little as possible, because each block of rows packs the weight again: only if the threads then end
/// at least an eighth earlier.
fn blocks((down, across): (usize, usize), threads: usize) -> (usize, usize) {
    let columns = across.div_ceil(BLOCK_COLUMNS).next_multiple_of(threads).min(across);
    let least = down.div_ceil(BLOCK_ROWS);
    // Panels of rows that the busiest thread computes, one block after the other.
    let busiest = |rows: usize| (rows * columns).div_ceil(threads) * down.div_ceil(rows);
    let best = (least..=down).map(busiest).min().unwrap_or(0);
    let rows = (least..=down).find(|rows| busiest(*rows) * 7 <= best * 8);
    (rows.unwrap_or(least), columns)
}

/// Computes a part of the columns of C. `rows` has at least the steps of `depth`.
pub(super) fn multiply(
    backend: CpuBackend,
    job: &ProductJob,
    rows: PackedView,
    part_of_c: ColumnPart<'_>,
    depth: Depth,
    add: bool,
) {
    let down_panels = job.sizes.0.div_ceil(32);
    let across_panels = part_of_c.count.div_ceil(32);
    let (down, across) = blocks((down_panels, across_panels), rayon::current_num_threads());
    (0..down * across).into_par_iter().with_max_len(1).for_each(|task| {
        let block = BlockTask {
            backend,
            job,
            rows_packed: rows,
            part: part_of_c,
            depth,
            rows: part(down_panels, down, task / across, 1),
            columns: part(across_panels, across, task % across, 1),
        };
        if block.rows.1 > 0 && block.columns.1 > 0 {
            block.run(add);
        }
    });
}

struct BlockTask<'a> {
    backend: CpuBackend,
    job: &'a ProductJob<'a>,
    rows_packed: PackedView,
    part: ColumnPart<'a>,
    depth: Depth,
    /// Panels of rows of C: the first, and how many.
    rows: (usize, usize),
    columns: (usize, usize),
}

#[repr(C, align(64))]
struct Sums([[f32; TILE]; 2]);

/// A tile whose sums are complete but not yet written to C.
#[derive(Clone, Copy)]
struct FinishedTile {
    which: usize,
    row: usize,
    column: usize,
    add: bool,
}

impl BlockTask<'_> {
    fn run(&self, add: bool) {
        let mut writer = TileWriter {
            task: self,
            sums: Sums([[0.0; TILE]; 2]),
            finished: None,
            next: 0,
        };
        // SAFETY: this path is taken only if the backend is available (tests: emulated).
        unsafe { configure(self.backend) };
        let (first, count) = self.columns;
        match self.part.columns {
            Columns::Packed(columns) => {
                for chunk in 0..self.depth.count() {
                    let address = |column| columns.at(column, chunk);
                    self.sweep(&mut writer, (first, count), address, chunk, add);
                }
            }
            Columns::Weight { weight, .. } => {
                let most = (0..self.depth.count())
                    .map(|c| self.depth.chunk(c).room)
                    .max()
                    .unwrap_or(0);
                let unpacked = unpacked_tiles::elements(weight, self.job.sizes.0);
                let panels = if unpacked.is_some() { 1 } else { TOGETHER };
                super::super::super::with_scratch(panels * most * STEP / 4, |scratch| {
                    let scratch: *mut u8 = scratch.as_mut_ptr().cast();
                    if let Some(elements) = unpacked {
                        return self.multiply_unpacked(elements, &mut writer.sums.0[0], scratch, add);
                    }
                    for chunk in 0..self.depth.count() {
                        let room = self.depth.chunk(chunk).room * STEP;
                        for column in (first..first + count).step_by(TOGETHER) {
                            let here = (column, TOGETHER.min(first + count - column));
                            self.pack_columns(here, chunk, 0, scratch, room);
                            let address = |i| scratch.wrapping_add((i - column) * room).cast_const();
                            self.sweep(&mut writer, here, address, chunk, add);
                        }
                    }
                });
            }
        }
        writer.write_finished();
        // SAFETY: as above.
        unsafe { release(self.backend) };
    }

    /// Multiplies panels of columns, which lie at `address`, with all rows of the task, for one chunk of k.
    fn sweep(
        &self,
        writer: &mut TileWriter,
        (column, count): (usize, usize),
        address: impl Fn(usize) -> *const u8,
        chunk: usize,
        add: bool,
    ) {
        let steps = self.depth.chunk(chunk).room;
        let near = steps.min(NEAR);
        for row in self.rows.0..self.rows.0 + self.rows.1 {
            let rows = self.rows_packed.at(row, chunk);
            for column in column..column + count {
                let panel = address(column);
                let (a, b) = if self.part.transposed {
                    (panel, rows)
                } else {
                    (rows, panel)
                };
                let call = TileCall {
                    a,
                    b,
                    sums: std::ptr::null_mut(),
                    near,
                    far: steps - near,
                    finished: std::ptr::null(),
                    c: std::ptr::null_mut(),
                    c_row: self.job.sizes.1 * 4,
                    rows: 32.min(self.job.sizes.0 - row * 32),
                };
                let finished = FinishedTile {
                    which: 0,
                    row,
                    column,
                    add: add || chunk > 0,
                };
                writer.multiply(call, finished);
            }
        }
    }

    /// Multiplies a weight where it lies, panel by panel, with all rows of the task. `scratch` holds a panel of what has to be packed:
    /// incomplete steps and panels, and the LoRA rank.
    fn multiply_unpacked(&self, elements: &[bf16], sums: &mut [f32; TILE], scratch: *mut u8, add: bool) {
        let Columns::Weight { weight, k0, k, .. } = self.part.columns else {
            return;
        };
        debug_assert!(self.part.transposed);
        for column in self.columns.0..self.columns.0 + self.columns.1 {
            let panel = (self.part.first + column * 32) * weight.stride + k0;
            let is_whole = self.part.count - column * 32 >= 32;
            for chunk in 0..self.depth.count() {
                let own = self.depth.chunk(chunk);
                let steps = if is_whole { own.own.min(k / 32 - own.first) } else { 0 };
                self.pack_columns((column, 1), chunk, steps, scratch, own.room * STEP);
                for row in self.rows.0..self.rows.0 + self.rows.1 {
                    let call = UnpackedTileCall {
                        weight: elements.as_ptr().wrapping_add(panel + own.first * 32).cast(),
                        weight_row: weight.stride * 2,
                        steps,
                        packed_weight: scratch,
                        packed_steps: own.room - steps,
                        activations: self.rows_packed.at(row, chunk),
                        sums: sums.as_mut_ptr(),
                    };
                    // SAFETY: `run` configured AMX. The job was checked: a whole panel has 32 rows of the weight with `steps` whole
                    // steps. `pack_columns` wrote the others; the packed activations have all of them.
                    unsafe {
                        if self.job.sizes.0 - row * 32 <= 16 {
                            multiply_16(&call);
                        } else {
                            multiply_32(&call);
                        }
                    }
                    let tile = FinishedTile {
                        which: 0,
                        row,
                        column,
                        add: add || chunk > 0,
                    };
                    self.write(sums, &tile);
                }
            }
        }
    }

    /// Packs panels of the weight for a chunk of k, from its step `done` on; they are `room` bytes apart.
    fn pack_columns(&self, (column, count): (usize, usize), chunk: usize, done: usize, to: *mut u8, room: usize) {
        let Columns::Weight { weight, k0, k, up } = self.part.columns else {
            return;
        };
        let format = if self.part.transposed {
            PackFormat::A
        } else {
            PackFormat::B
        };
        let own = self.depth.chunk(chunk);
        let vectors = |k0, k| OperandBlock {
            first: self.part.first + column * 32,
            count: (count * 32).min(self.part.count - column * 32),
            k0,
            k,
        };
        let start = own.first + done;
        let (k0, k) = (k0 + start * 32, (own.own * 32).min(k - own.first * 32) - done * 32);
        let address = |i: usize| to.wrapping_add(i * room);
        // SAFETY: the job was checked; the buffer of this task holds these panels.
        unsafe {
            pack::panels(weight, vectors(k0, k), format, address);
            if let Some((up, rank)) = up.filter(|_| chunk + 1 == self.depth.count()) {
                let after = |i| address(i).wrapping_add((own.own - done) * STEP);
                pack::panels(up, vectors(0, rank), format, after);
            }
        }
    }

    /// Writes the part of a tile that lies inside C.
    fn write(&self, sums: &[f32; TILE], tile: &FinishedTile) {
        // SAFETY: packing needs AVX-512 too; the tile lies in the block of this task.
        unsafe {
            write_tile(
                sums,
                self.part.transposed,
                tile.add,
                self.job.c.at(self.c_index(tile)),
                self.job.sizes.1,
                32.min(self.job.sizes.0 - tile.row * 32),
                32.min(self.part.count - tile.column * 32),
            )
        }
    }

    /// Returns the index in C of the first element of a tile.
    fn c_index(&self, tile: &FinishedTile) -> usize {
        tile.row * 32 * self.job.sizes.1 + self.part.first + tile.column * 32
    }

    fn is_whole(&self, tile: &FinishedTile) -> bool {
        tile.row * 32 + 32 <= self.job.sizes.0 && tile.column * 32 + 32 <= self.part.count
    }
}

/// The sums of two tiles: one is computed while the other one is written.
struct TileWriter<'a> {
    task: &'a BlockTask<'a>,
    sums: Sums,
    finished: Option<FinishedTile>,
    next: usize,
}

impl TileWriter<'_> {
    /// Computes a tile, and writes the one before it.
    fn multiply(&mut self, mut call: TileCall, tile: FinishedTile) {
        let BlockTask { backend, part, .. } = *self.task;
        call.sums = self.sums.0[self.next].as_mut_ptr();
        let before = self.finished.replace(FinishedTile {
            which: self.next,
            ..tile
        });
        self.next ^= 1;
        match before {
            Some(before) if call.near == WRITING && self.task.is_whole(&before) => {
                call.finished = self.sums.0[before.which].as_ptr();
                call.c = self.task.job.c.at(self.task.c_index(&before));
                // SAFETY: panels hold the steps of the call; the whole finished tile lies in the block of this task.
                unsafe { multiply_tile(backend, &call, before.add, part.transposed) }
            }
            before => {
                if let Some(before) = before {
                    self.task.write(&self.sums.0[before.which], &before);
                }
                // SAFETY: as above.
                unsafe { multiply_tile(backend, &call, false, part.transposed) }
            }
        }
    }

    fn write_finished(&mut self) {
        if let Some(last) = self.finished.take() {
            self.task.write(&self.sums.0[last.which], &last);
        }
    }
}

/// Writes the sums of a tile to `rows` x `columns` elements of C, whose rows are `row` elements apart.
/// # Safety
/// The CPU must have AVX-512; no other task may access these elements.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn write_tile(
    sums: &[f32; TILE],
    transposed: bool,
    add: bool,
    c: *mut f32,
    row: usize,
    rows: usize,
    columns: usize,
) {
    for (down, across) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let block = if transposed {
            across * 2 + down
        } else {
            down * 2 + across
        };
        let mut words = [_mm512_setzero_si512(); 16];
        for (i, words) in words.iter_mut().enumerate() {
            // SAFETY: a row of one of the four blocks of the tile.
            *words = unsafe { _mm512_loadu_si512(sums[block * 256 + i * 16..][..16].as_ptr().cast()) };
        }
        if transposed {
            words = transpose(words);
        }
        let mask = mask16(columns.saturating_sub(16 * across));
        for (i, words) in words.iter().enumerate().take(rows.saturating_sub(16 * down)) {
            let to = c.wrapping_add((16 * down + i) * row + 16 * across);
            let mut sum = _mm512_castsi512_ps(*words);
            // SAFETY: promised by the caller; the mask keeps to the columns.
            unsafe {
                if add {
                    sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, to));
                }
                _mm512_mask_storeu_ps(to, mask, sum);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_threads_have_work() {
        // The share of the time in which a thread has work, if all panels take as long.
        let busy = |panels: (usize, usize), threads| {
            let (down, across) = blocks(panels, threads);
            assert!((1..=panels.0).contains(&down) && (1..=panels.1).contains(&across));
            let largest = panels.0.div_ceil(down) * panels.1.div_ceil(across);
            let rounds = (down * across).div_ceil(threads);
            (panels.0 * panels.1) as f64 / (threads * rounds * largest) as f64
        };
        // 512 and 2048 tokens; weights of 896, 4096, 4864 and 18944 rows.
        for down in [16, 64] {
            for across in [28, 128, 152, 592] {
                for threads in [1, 2, 8, 16, 32, 64] {
                    let share = busy((down, across), threads);
                    assert!(share > 0.6, "{down} x {across} panels, {threads} threads: {share}");
                }
            }
        }
        // A LoRA rank: one panel, so the rows are divided. Few rows: the columns are.
        assert_eq!(blocks((16, 1), 8), (8, 1));
        assert_eq!(blocks((1, 28), 8), (1, 8));
        assert_eq!(blocks((1, 3), 8), (1, 3));
    }
}
