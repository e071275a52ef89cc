//! Dequantization of a part of a row to f32. Every instruction set gives the same bits: an int8 value is one
//! product; a 4-bit value is a lookup in a table of 16, which is computed once for the elements that share a scale.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) mod bf16;
#[cfg(target_arch = "x86_64")]
pub(crate) mod dots;
#[cfg(target_arch = "x86_64")]
mod dots_avx2;
#[cfg(target_arch = "x86_64")]
mod vectors;
#[cfg(test)]
pub(crate) mod tests;

use super::product::VectorIsa;
use crate::quantized::{QData, QMatrixView, ScaleRun, widen};

/// The 16 levels of NF4 (Dettmers et al. 2023, arXiv 2305.14314, appendix E).
pub const NF4_TABLE: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The 16 levels of FP4 as bitsandbytes orders them: sign, then 2 exponent bits and 1 mantissa bit, divided by 12.
pub const FP4_TABLE: [f32; 16] = [
    0.0,
    0.005_208_333_5,
    0.666_666_7,
    1.0,
    0.333_333_34,
    0.5,
    0.166_666_67,
    0.25,
    -0.0,
    -0.005_208_333_5,
    -0.666_666_7,
    -1.0,
    -0.333_333_34,
    -0.5,
    -0.166_666_67,
    -0.25,
];

/// Dequantizes columns `start..start + to.len()` of row `row`. The CPU must have the instructions of `isa`; `None`
/// needs none. Panics outside the weight.
pub(crate) fn dequantize(isa: Option<VectorIsa>, view: &QMatrixView<'_>, row: usize, start: usize, to: &mut [f32]) {
    assert!(row < view.rows && start <= view.columns && to.len() <= view.columns - start);
    debug_assert!(view.fits());
    match isa {
        // SAFETY: the caller detected these instructions.
        #[cfg(target_arch = "x86_64")]
        Some(VectorIsa::Avx512) => unsafe { vectors::wide(view, row, start, to) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Some(VectorIsa::Avx2) => unsafe { vectors::narrow(view, row, start, to) },
        _ => runs::<PortableKernel>(view, row, start, to),
    }
}

/// Dequantizes elements that share a scale.
trait DequantizeKernel {
    /// # Safety
    /// The CPU must have the instructions of the kernel.
    unsafe fn int8(codes: &[u8], scale: f32, bf16: bool, to: &mut [f32]);
    /// Two elements per byte, the first in the high half; `to` has twice as many elements as `codes` has bytes.
    /// # Safety
    /// As above.
    unsafe fn nibbles(codes: &[u8], table: &[f32; 16], to: &mut [f32]);
}

/// Dequantizes a part of a row, run by run (elements with one scale).
#[inline(always)]
fn runs<K: DequantizeKernel>(view: &QMatrixView<'_>, row: usize, start: usize, to: &mut [f32]) {
    let bytes = view.bytes();
    if let QData::Scaled(data) = view.codes
        && !data.order.is_empty()
    {
        return data.ordered(view.columns, row, start, view.bf16, to);
    }
    let mut done = 0;
    while done < to.len() {
        let (n, run) = view.run(row, start + done, to.len() - done);
        let mut to = &mut to[done..done + n];
        done += n;
        match run {
            // SAFETY: promised by the caller of `dequantize`.
            ScaleRun::Int8(at, scale) => unsafe { K::int8(&bytes[at..at + n], scale, view.bf16, to) },
            ScaleRun::Bytes(at, scale, zero) => {
                if let QData::Scaled(data) = view.codes {
                    data.bytes(&bytes[at..at + n], (scale, zero), view.bf16, to);
                }
            }
            ScaleRun::Halves(at) => {
                for (to, from) in to.iter_mut().zip(bytes[at..].as_chunks::<2>().0) {
                    *to = widen(from[0], from[1]);
                }
            }
            ScaleRun::Nibbles(mut at, table) => {
                if at % 2 == 1 {
                    to[0] = table[(bytes[at / 2] & 15) as usize];
                    to = &mut to[1..];
                    at += 1;
                }
                let pairs = to.len() / 2;
                // SAFETY: as above.
                unsafe { K::nibbles(&bytes[at / 2..][..pairs], &table, &mut to[..2 * pairs]) };
                if to.len() % 2 == 1 {
                    to[2 * pairs] = table[(bytes[at / 2 + pairs] >> 4) as usize];
                }
            }
        }
    }
}

/// Returns the nearest bf16, ties to even, as f32. For finite numbers only.
#[inline(always)]
pub(crate) fn round_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits + (0x7FFF + (bits >> 16 & 1))) & 0xFFFF_0000)
}

/// Returns the nearest f16, ties to even, as f32. For numbers that f16 can hold.
#[inline(always)]
pub(crate) fn round_f16(x: f32) -> f32 {
    let bits = x.to_bits();
    let normal = f32::from_bits((bits + (0x0FFF + (bits >> 13 & 1))) & 0xFFFF_E000);
    // Below 2^-14 the distance of two numbers is 2^-24, as that of f32 above 0.5.
    let small = ((x.abs() + 0.5) - 0.5).copysign(x);
    if x.abs() < 6.103_515_6e-5 { small } else { normal }
}

#[inline(always)]
pub(crate) fn round_table(table: &mut [f32; 16]) {
    for value in table {
        *value = round_bf16(*value);
    }
}

struct PortableKernel;

impl DequantizeKernel for PortableKernel {
    #[inline(always)]
    unsafe fn int8(codes: &[u8], scale: f32, bf16: bool, to: &mut [f32]) {
        for (to, code) in to.iter_mut().zip(codes) {
            *to = *code as i8 as f32 * scale;
        }
        if bf16 {
            to.iter_mut().for_each(|x| *x = round_bf16(*x));
        }
    }

    #[inline(always)]
    unsafe fn nibbles(codes: &[u8], table: &[f32; 16], to: &mut [f32]) {
        for (to, byte) in to.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
            *to = [table[(byte >> 4) as usize], table[(byte & 15) as usize]];
        }
    }
}
