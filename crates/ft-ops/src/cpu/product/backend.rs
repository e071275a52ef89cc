//! The backend of the CPU operations: detected at run time, or forced, so that all of them are tested on one machine.

use super::Rounding;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use super::amx;
use ft_base::{Error, Result};
use std::sync::atomic::{AtomicU8, Ordering};

/// The CPU backends, the fastest first. Each uses the instructions of those after it, except that AMX needs no
/// AVX512-BF16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum CpuBackend {
    /// AVX-512, with AMX for products of bf16 weights.
    Amx = 1,
    /// AVX-512, with dot products of bf16 pairs for products of bf16 weights.
    Avx512Bf16,
    /// AVX-512 with f32 products.
    Avx512,
    /// AVX2 and FMA.
    Avx2,
    /// Plain Rust, on every processor.
    Portable,
}

/// The vector instructions of the f32 micro-kernels, of packing and of dequantization.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VectorIsa {
    Avx512,
    Avx2,
}

/// 0: not detected yet.
static CHOSEN: AtomicU8 = AtomicU8::new(0);

impl CpuBackend {
    /// All backends, the fastest first.
    pub const ALL: [CpuBackend; 5] = [
        CpuBackend::Amx,
        CpuBackend::Avx512Bf16,
        CpuBackend::Avx512,
        CpuBackend::Avx2,
        CpuBackend::Portable,
    ];

    /// The name in `FT_CPU`.
    pub fn name(self) -> &'static str {
        match self {
            CpuBackend::Amx => "amx",
            CpuBackend::Avx512Bf16 => "avx512-bf16",
            CpuBackend::Avx512 => "avx512",
            CpuBackend::Avx2 => "avx2",
            CpuBackend::Portable => "portable",
        }
    }

    /// True if this machine can run the backend.
    pub fn available(self) -> bool {
        match self {
            CpuBackend::Portable => true,
            #[cfg(target_arch = "x86_64")]
            CpuBackend::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            CpuBackend::Avx512 => {
                CpuBackend::Avx2.available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            CpuBackend::Amx => CpuBackend::Avx512.available() && amx::tile_kernels::available(),
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            CpuBackend::Avx512Bf16 => CpuBackend::Avx512.available() && amx::avx512_bf16::available(),
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    /// Returns the backend in use.
    #[inline]
    pub fn current() -> CpuBackend {
        match CHOSEN.load(Ordering::Relaxed) {
            0 => Self::detect(),
            n => Self::ALL[n as usize - 1],
        }
    }

    /// Returns the instructions of the f32 micro-kernels. None: plain Rust.
    pub(crate) fn vector_isa(self) -> Option<VectorIsa> {
        match self {
            CpuBackend::Amx | CpuBackend::Avx512Bf16 | CpuBackend::Avx512 => Some(VectorIsa::Avx512),
            CpuBackend::Avx2 => Some(VectorIsa::Avx2),
            CpuBackend::Portable => None,
        }
    }

    /// Returns the backend whose micro-kernels compute products with this rounding: bf16 instructions only if operands
    /// are rounded.
    pub(crate) fn for_rounding(self, rounding: Rounding) -> CpuBackend {
        if self.packs_bf16() && rounding == Rounding::Exact {
            CpuBackend::Avx512
        } else {
            self
        }
    }

    /// True if products of bf16 weights use packed bf16 operands.
    pub fn packs_bf16(self) -> bool {
        matches!(self, CpuBackend::Amx | CpuBackend::Avx512Bf16)
    }

    /// True if the f32 operands of a product with this rounding are rounded to bf16. This never depends on a size:
    /// an activation is the same operand alone and in a batch (but see `integer`).
    pub(crate) fn rounds(self, rounding: Rounding) -> bool {
        self.for_rounding(rounding).packs_bf16()
    }

    /// True if this backend is faster here than the next one that the machine can run.
    fn is_fast(self) -> bool {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        return self != CpuBackend::Avx512Bf16 || amx::avx512_bf16::is_fast();
        #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
        true
    }

    #[cold]
    #[allow(clippy::disallowed_methods)] // `FT_CPU` is valid for every program that uses the operations
    fn detect() -> CpuBackend {
        // A name that cannot be used is an error in `force`, which the program calls first.
        if let Some(name) = std::env::var_os("FT_CPU")
            && Self::force(&name.to_string_lossy()).is_ok()
        {
            return Self::current();
        }
        let mut best = Self::ALL.into_iter().filter(|p| p.available() && p.is_fast());
        let best = best.next().unwrap_or(CpuBackend::Portable);
        CHOSEN.store(best as u8, Ordering::Relaxed);
        best
    }

    /// Uses the backend `name` from now on. `amx-emulated` tests the AMX code on machines without AMX.
    ///
    /// # Errors
    /// An unknown name, or instructions that this machine lacks.
    pub fn force(name: &str) -> Result<()> {
        let lacks = || {
            Error::unsupported(format!("this CPU cannot run the {name} operations"))
                .hint("unset FT_CPU: the best supported operations are detected at the start")
        };
        if name == "amx-emulated" {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            if CpuBackend::Avx512.available() && amx::emulate() {
                CHOSEN.store(CpuBackend::Amx as u8, Ordering::Relaxed);
                return Ok(());
            }
            return Err(lacks());
        }
        let Some(backend) = Self::ALL.into_iter().find(|p| p.name() == name) else {
            return Err(Error::unsupported("this set of CPU operations does not exist")
                .found(name)
                .expected("amx, amx-emulated, avx512-bf16, avx512, avx2 or portable"));
        };
        if !backend.available() {
            return Err(lacks());
        }
        CHOSEN.store(backend as u8, Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests of the crates above run on the backend that `FT_CPU` names: a name that means nothing must not pass.
    #[test]
    fn the_backend_in_use_is_that_of_the_environment() {
        if let Ok(name) = std::env::var("FT_CPU") {
            assert_eq!(CpuBackend::current().name(), name.trim_end_matches("-emulated"));
        }
    }
}
