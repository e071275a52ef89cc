//! Memory of the packed operands of a product, for memory plans.

use super::CpuBackend;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use super::amx::{CHUNK, DEQUANTIZED, PACKED};
use super::fused_lora::MAX_RANK;
use super::grid::{KC, MC, NC_KC};

/// Bytes that the `gemm` crate packs operands into, for each thread.
const GEMM_BYTES: u64 = 1 << 20;

/// Sizes of the largest products of a model.
#[derive(Debug, Clone, Copy)]
pub struct ProductSizes {
    /// Tokens of a product.
    pub tokens: usize,
    /// Largest number of input or output features of a linear.
    pub widest_linear: usize,
    /// The same with the rows of the head.
    pub widest: usize,
    /// Elements of the largest quantized weight; 0 if none is quantized.
    pub largest_quantized: usize,
    /// Largest rank of a LoRA product that can be fused.
    pub rank: usize,
    /// Largest rank of the others.
    pub unfused_rank: usize,
    /// Most elements of the activations of a product with a weight.
    pub activations: usize,
    /// Most elements of both operands of a weight gradient; 0 if no weight of a linear trains.
    pub gradient: usize,
}

/// True if a LoRA product of this rank can be fused with the product of its linear.
pub fn can_fuse(rank: usize) -> bool {
    rank <= MAX_RANK
}

/// Bytes that the `gemm` crate keeps for each thread, if it computes the products.
pub fn gemm_bytes() -> u64 {
    if CpuBackend::current() == CpuBackend::Portable {
        GEMM_BYTES
    } else {
        0
    }
}

/// Frees the memory that packed operands were kept in; the next product takes what it needs. For measurements of several runs in
/// one process.
pub fn free_packed_operands() {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    super::amx::free_buffers();
}

/// Number of f32 of a thread's packed part of a weight; 0 without AMX.
fn tile_scratch() -> usize {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    if CpuBackend::current() == CpuBackend::Amx {
        return super::amx::SCRATCH;
    }
    0
}

impl ProductSizes {
    /// Number of f32 of scratch memory per thread: a packed part of A and of B.
    pub fn thread_elements(&self) -> usize {
        let packed = |rows: usize, k: usize| rows.min(MC) * k.min(KC);
        // The larger operand decides: activations in the forward pass, a gradient's rows in the backward pass.
        let a = packed(self.tokens, self.widest).max(packed(self.widest, self.tokens));
        // Fused LoRA: its rows, and as many more elements of k in A.
        let fused = 2 * self.tokens.min(MC) * self.rank;
        (a + NC_KC.min(self.widest * KC) + fused).max(tile_scratch())
    }

    /// Bytes of the operands that are packed for tiles or dot products; 0 without them.
    pub fn tile_bytes(&self) -> u64 {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if CpuBackend::current().packs_bf16() {
            let bytes = |elements: usize| PACKED.min(2 * elements);
            // At least a chunk of each panel is packed.
            let bound = |vectors: usize| PACKED.max(vectors.div_ceil(32) * CHUNK);
            let gradient = 2 * bound(self.widest_linear).min(self.gradient);
            // The f32 matrices of an adapter that is not fused.
            let adapter = bytes(self.unfused_rank.next_multiple_of(32) * self.widest_linear);
            // A fused LoRA product extends both operands, in steps of 32.
            let fused = 2 * self.rank.next_multiple_of(32) * (self.tokens + self.widest_linear);
            let packed = match CpuBackend::current() {
                // Dot products pack a weight only if it is quantized.
                CpuBackend::Avx512Bf16 => {
                    bytes(self.activations) + adapter.max(DEQUANTIZED.min(2 * self.largest_quantized))
                }
                // AMX packs a weight in the memory of the threads.
                _ => bound(self.tokens).min(2 * self.activations) + adapter,
            };
            // Both operands of a gradient are packed.
            let packed = packed.max(gradient);
            return (packed + fused) as u64;
        }
        0
    }
}
