//! Products inside one task: its thread multiplies parts of larger tensors, f32 in and out.
//!
//! An operand is packed once, in the order that its products read, into memory of the task. Every product that
//! needs the operand, or a part of it, reads the packed form. An element of C is summed in an order that depends on
//! k alone.

#[cfg(target_arch = "x86_64")]
use super::CInit;
#[cfg(target_arch = "x86_64")]
use super::VectorIsa;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use super::amx;
#[cfg(target_arch = "x86_64")]
use super::fma::MicroTile;
#[cfg(target_arch = "x86_64")]
use super::grid::part;
#[cfg(target_arch = "x86_64")]
use super::pack::{self, OperandPart, Panel, PanelLayout};
use super::portable::{StridedMatrix, gemm, unpacked};
use super::{CpuBackend, GemmSizes, Matrix, Operand, Rounding, SharedSlice};

/// A part of a packed operand begins at a multiple of this number, in both directions.
pub(crate) const PACK_UNIT: usize = 32;
/// Elements of k at a time: a panel of B stays in the L1 cache.
pub(crate) const KC: usize = 128;
/// Elements of B that are multiplied with all rows of A before the next ones are read.
#[cfg(target_arch = "x86_64")]
const NC_KC: usize = 4096;

/// The products of a task. A backend that rounds packs bf16 operands; other vector backends pack f32; `Portable` packs
/// nothing and calls the `gemm` crate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TaskGemm(CpuBackend);

/// The side of the product on which an operand is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OperandSide {
    /// Rows of A.
    A,
    /// Rows of A in memory of the task, with a stride from `cache_friendly_stride`.
    ScratchA,
    /// Columns of B.
    B,
}

/// Returns a row stride of at least `n` elements, such that rows start in different sets of the L1 cache and tiles
/// are whole.
pub(crate) fn cache_friendly_stride(n: usize) -> usize {
    const LINE: usize = 16;
    n.next_multiple_of(PACK_UNIT) + LINE
}

/// An operand in the order that its products read, or a part of it.
#[derive(Clone, Copy)]
pub(crate) struct PackedOperand<'a> {
    /// The original; read if nothing is packed.
    pub(super) matrix: Matrix<'a>,
    pub(super) packed: &'a [f32],
    /// Vectors and elements of k of the whole operand.
    pub(super) whole: (usize, usize),
    /// The vector and the index of k at which the part begins.
    pub(super) first: (usize, usize),
}

impl<'a> PackedOperand<'a> {
    /// Returns the part that begins at this vector and this index of k, both multiples of `PACK_UNIT`.
    pub(crate) fn part(self, vector: usize, step: usize) -> Self {
        let first = (self.first.0 + vector, self.first.1 + step);
        Self { first, ..self }
    }

    /// Panics unless `vectors` vectors of `k` elements lie inside the part.
    fn check(&self, vectors: usize, k: usize) {
        assert!(self.first.0.is_multiple_of(PACK_UNIT) && self.first.1.is_multiple_of(PACK_UNIT));
        assert!(self.first.0 + vectors <= self.whole.0 && self.first.1 + k <= self.whole.1);
    }
}

/// A part of C: its first element, its row stride, and whether the product is added to its values.
#[derive(Clone, Copy)]
pub(crate) struct OutputTile {
    pub c: SharedSlice,
    pub at: usize,
    pub stride: usize,
    pub add: bool,
}

impl TaskGemm {
    pub(crate) fn new(backend: CpuBackend, rounding: Rounding) -> Self {
        Self(backend.for_rounding(rounding))
    }

    /// Returns a multiple of `PACK_UNIT`. Sums over parts of k that begin at multiples of it have the same order as over
    /// the whole of k; zeros before the first value change nothing.
    pub(crate) fn k_unit(self) -> usize {
        match self.0.vector_isa() {
            #[cfg(target_arch = "x86_64")]
            Some(_) if !self.0.packs_bf16() => KC,
            _ => PACK_UNIT,
        }
    }

    /// Returns the number of f32 that `pack_operand` needs for `vectors` vectors of `k` elements, a multiple of 16.
    pub(crate) fn packed_len(self, side: OperandSide, vectors: usize, k: usize) -> usize {
        let elements: usize = match self.0.vector_isa() {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Some(_) if self.0.packs_bf16() => amx::task_gemm::packed_len(vectors, k),
            #[cfg(target_arch = "x86_64")]
            Some(_) if side == OperandSide::A => vectors * k,
            #[cfg(target_arch = "x86_64")]
            Some(isa) if side == OperandSide::B => vectors.next_multiple_of(isa.micro_tile().1) * k,
            _ => 0,
        };
        elements.next_multiple_of(16)
    }

    /// Packs the first `vectors` vectors of `k` elements of `matrix`, which holds f32. `to` begins on a cache line.
    pub(crate) fn pack_operand<'a>(
        self,
        side: OperandSide,
        matrix: Matrix<'a>,
        (vectors, k): (usize, usize),
        to: &'a mut [f32],
    ) -> PackedOperand<'a> {
        matrix.check(vectors, k);
        assert!(matches!(matrix.values, Operand::F32(_)));
        let to = &mut to[..self.packed_len(side, vectors, k)];
        match self.0.vector_isa() {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Some(_) if self.0.packs_bf16() => amx::task_gemm::pack_operand(side, &matrix, (vectors, k), to),
            #[cfg(target_arch = "x86_64")]
            Some(isa) if side == OperandSide::A => {
                let panels = rows_of(isa, vectors).map(|(start, count)| Panel {
                    start,
                    count,
                    width: count,
                });
                let packed_len = PanelLayout::of(k);
                pack::panels(
                    &matrix,
                    OperandPart { first: 0, k0: 0, k },
                    panels,
                    isa,
                    packed_len,
                    to,
                    &mut [],
                );
            }
            #[cfg(target_arch = "x86_64")]
            Some(isa) if side == OperandSide::B => {
                let columns = isa.micro_tile().1;
                let panels = (0..vectors).step_by(columns).map(|start| Panel {
                    start,
                    count: columns.min(vectors - start),
                    width: columns,
                });
                let packed_len = PanelLayout::of(k);
                pack::panels(
                    &matrix,
                    OperandPart { first: 0, k0: 0, k },
                    panels,
                    isa,
                    packed_len,
                    to,
                    &mut [],
                );
            }
            _ => {}
        }
        PackedOperand {
            matrix,
            packed: to,
            whole: (vectors, k),
            first: (0, 0),
        }
    }

    /// Computes `C [m, n] (+)= A [m, k] · B [k, n]`. A packed A must be used as a whole.
    /// # Safety
    /// No other task may access these elements of C at the same time; both operands were packed by `self`, for
    /// their sides.
    pub(crate) unsafe fn multiply(self, sizes: GemmSizes, to: OutputTile, a: &PackedOperand, b: &PackedOperand) {
        let (m, n, k) = sizes;
        if m == 0 || n == 0 {
            return;
        }
        a.check(m, k);
        b.check(n, k);
        assert!(a.packed.is_empty() || (a.first == (0, 0) && a.whole == (m, k)));
        assert!(n <= to.stride);
        // Checks that the end of C is in bounds.
        to.c.at(to.at + (m - 1) * to.stride + n);
        // SAFETY: C and both operands were checked; the CPU features were detected.
        unsafe {
            match self.0.vector_isa() {
                #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
                Some(_) if self.0.packs_bf16() => amx::task_gemm::multiply(self.0, sizes, to, a, b),
                #[cfg(target_arch = "x86_64")]
                Some(isa) => fma(isa, sizes, to, a, b),
                _ => {
                    let ((a, a_row, a_k), (b, b_column, b_k)) = (unpacked(a), unpacked(b));
                    let c = StridedMatrix {
                        at: to.c.at(to.at),
                        row: to.stride,
                        column: 1,
                    };
                    let a = StridedMatrix {
                        at: a,
                        row: a_row,
                        column: a_k,
                    };
                    let b = StridedMatrix {
                        at: b,
                        row: b_k,
                        column: b_column,
                    };
                    gemm(sizes, c, to.add, a, b)
                }
            }
        }
    }
}

/// Returns panels of rows of nearly equal size: (start, count).
#[cfg(target_arch = "x86_64")]
fn rows_of(isa: VectorIsa, rows: usize) -> impl Iterator<Item = (usize, usize)> + Clone {
    let panels = rows.div_ceil(isa.micro_tile().0);
    (0..panels).map(move |p| part(rows, panels, p, 1))
}

/// # Safety
/// As `multiply`, and all elements that the operands describe are in bounds.
#[cfg(target_arch = "x86_64")]
unsafe fn fma(isa: VectorIsa, (m, n, k): GemmSizes, to: OutputTile, a: &PackedOperand, b: &PackedOperand) {
    let (_, nr, lanes) = isa.micro_tile();
    for k0 in (0..k).step_by(KC) {
        let steps = KC.min(k - k0);
        let nc = (NC_KC / steps / nr).max(1) * nr;
        let add = to.add || k0 > 0;
        for n0 in (0..n).step_by(nc) {
            for (row, rows) in rows_of(isa, m) {
                let (at, a_row, a_k) = if a.packed.is_empty() {
                    let (at, a_row, a_k) = unpacked(a);
                    (at.wrapping_add(row * a_row + k0 * a_k), a_row, a_k)
                } else {
                    (a.packed[row * k + k0 * rows..].as_ptr(), 1, rows)
                };
                for column in (n0..n.min(n0 + nc)).step_by(nr) {
                    let columns = nr.min(n - column);
                    let tile = MicroTile {
                        k: steps,
                        a: at,
                        a_row,
                        a_k,
                        b: b.packed[(b.first.0 + column) * b.whole.1 + (b.first.1 + k0) * nr..].as_ptr(),
                        b_k: nr,
                        c: to.c.at(to.at + row * to.stride + column),
                        c_row: to.stride,
                        columns,
                        from: if add { CInit::C } else { CInit::Zero },
                    };
                    // SAFETY: promised by the caller; panels of B are whole.
                    unsafe { isa.kernel(rows, columns.div_ceil(lanes))(&tile) }
                }
            }
        }
    }
}
