//! The CUDA kernels of ft: one fat binary for each file of `cuda/` (and one with f16 in the place of bf16), embedded by
//! the build script. Without the feature `cuda` this crate is empty. `cuda` of ft-ops launches the kernels.

#![warn(missing_docs, unreachable_pub)]

#[cfg(feature = "cuda")]
include!(concat!(env!("OUT_DIR"), "/modules.rs"));

/// Returns the fat binary of `cuda/NAME.cu`; of `NAME_f16`: with f16 in the place of bf16.
#[cfg(feature = "cuda")]
pub fn module(name: &str) -> Option<&'static [u8]> {
    MODULES
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, binary)| *binary)
}

/// Returns the CUDA version of the toolkit that compiled the kernels, as 1000 · major + 10 · minor.
#[cfg(feature = "cuda")]
pub fn toolkit() -> Option<i32> {
    TOOLKIT
}
