//! Which instructions the CPU operations use: found at run time, or forced to test them all on one machine.

use crate::base::{Error, Result};
use std::sync::atomic::{AtomicU8, Ordering};

/// Best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Path {
    /// AVX-512, with the tile unit for products of bf16 weights.
    Amx = 1,
    Avx512,
    Avx2,
    Portable,
}

/// 0: not decided yet.
static CHOSEN: AtomicU8 = AtomicU8::new(0);

impl Path {
    pub const ALL: [Path; 4] = [Path::Amx, Path::Avx512, Path::Avx2, Path::Portable];

    pub fn name(self) -> &'static str {
        match self {
            Path::Amx => "amx",
            Path::Avx512 => "avx512",
            Path::Avx2 => "avx2",
            Path::Portable => "portable",
        }
    }

    /// Can this machine run it?
    pub fn available(self) -> bool {
        match self {
            Path::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Path::Avx512 => {
                Path::Avx2.available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Path::Amx => Path::Avx512.available() && super::tiles::available(),
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    /// The path in use.
    #[inline]
    pub fn current() -> Path {
        match CHOSEN.load(Ordering::Relaxed) {
            0 => Self::detect(),
            n => Self::ALL[n as usize - 1],
        }
    }

    #[cold]
    fn detect() -> Path {
        let best = Self::ALL.into_iter().find(|p| p.available()).unwrap_or(Path::Portable);
        CHOSEN.store(best as u8, Ordering::Relaxed);
        best
    }

    /// Uses `name` from now on: that of a path, or `amx-emulated`, so that the code for the tile unit is tested on machines
    /// without one. Errors: an unknown name, or instructions that this machine lacks.
    pub fn force(name: &str) -> Result<()> {
        let lacks = || {
            Error::new(format!("this CPU cannot run the {name} operations"))
                .hint("leave FT_CPU unset: the best that it can run is found at the start")
        };
        if name == "amx-emulated" {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            if Path::Avx512.available() && super::tiles::emulate() {
                CHOSEN.store(Path::Amx as u8, Ordering::Relaxed);
                return Ok(());
            }
            return Err(lacks());
        }
        let Some(path) = Self::ALL.into_iter().find(|p| p.name() == name) else {
            return Err(Error::new("there is no such set of CPU operations")
                .found(name)
                .expected("amx, avx512, avx2 or portable"));
        };
        if !path.available() {
            return Err(lacks());
        }
        CHOSEN.store(path as u8, Ordering::Relaxed);
        Ok(())
    }
}
