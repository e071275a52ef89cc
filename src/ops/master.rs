//! An f32 master in two halves: the weight itself holds the upper 16 bits as bf16, `low` the lower 16.
//!
//! Together they are the exact f32 value, so the master of a bf16 weight costs 2 bytes more, not 4, and
//! nothing learned is lost when a block retires: only `low` has to stay. The weight is the master rounded to
//! nearest, ties away from zero.

use half::bf16;

/// The exact value of weight and lower half.
#[inline(always)]
pub fn join(high: bf16, low: u16) -> f32 {
    // A lower half of 0x8000 or more was rounded up into the upper half.
    let bits = ((high.to_bits() as u32) << 16).wrapping_sub(((low >> 15) as u32) << 16) | low as u32;
    f32::from_bits(bits)
}

/// The weight and the lower half of `x`.
#[inline(always)]
pub fn split(x: f32) -> (bf16, u16) {
    let bits = x.to_bits();
    (bf16::from_bits((bits.wrapping_add(0x8000) >> 16) as u16), bits as u16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::rng::{Rng, Stream};

    #[test]
    fn join_undoes_split_exactly_and_the_weight_is_the_nearest() {
        let rng = Rng::new(3, Stream::Init, &[]);
        let mut values: Vec<f32> = (0..20_000)
            .map(|i| rng.normal(i) * 10f32.powi((i % 40) as i32 - 20))
            .collect();
        values.extend([
            0.0,
            -0.0,
            1.0,
            -1.0,
            f32::MIN_POSITIVE,
            1e-40,
            f32::from_bits(0x3F80_8000),
            f32::from_bits(0xBF81_8000),
        ]);
        for x in values {
            let (high, low) = split(x);
            assert_eq!(join(high, low).to_bits(), x.to_bits(), "{x}");
            let error = (high.to_f32() - x).abs();
            let ulp = f32::from_bits((x.to_bits() & 0x7F80_0000).max(0x0080_0000)) / 128.0;
            assert!(error <= ulp / 2.0, "{x} {error}");
        }
    }
}
