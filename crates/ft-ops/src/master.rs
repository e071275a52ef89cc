//! bf16 and f16 weights that keep updates smaller than their last bit, in two ways.
//!
//! An fp32 master weight in two halves: the weight itself holds the high 16 bits as bf16, `low` the low 16 bits.
//! Together they are the exact f32 value, so the master of a bf16 weight costs 2 bytes more, not 4. When a block is
//! deactivated, no precision is lost: only `low` must be kept. The weight is the master rounded to nearest, ties
//! away from zero.
//!
//! Or stochastic rounding, without a master: a value between two neighbors is rounded up with the probability of
//! its distance from the lower neighbor, so that the mean over the draws is the value itself.
//!
//! f16 weights do the same with a wider number (`wide_of`).

use half::{bf16, f16};

/// Returns the exact f32 value of a weight and its low 16 bits.
#[inline(always)]
pub fn join(high: bf16, low: u16) -> f32 {
    // If the low 16 bits are 0x8000 or more, the high bits were rounded up.
    let bits = ((high.to_bits() as u32) << 16).wrapping_sub(((low >> 15) as u32) << 16) | low as u32;
    f32::from_bits(bits)
}

/// Splits `x` into the weight and the low 16 bits.
#[inline(always)]
pub fn split(x: f32) -> (bf16, u16) {
    let bits = x.to_bits();
    (bf16::from_bits((bits.wrapping_add(0x8000) >> 16) as u16), bits as u16)
}

/// The number behind an f16 weight: its bits with 16 more bits of the mantissa, as sign and magnitude. It is exact from
/// 2^-17 on, and a multiple of 2^-40 below. A number that f16 cannot hold becomes the largest one that f16 rounds to a finite one.
fn wide_of(x: f32) -> u32 {
    let (sign, size) = (x.to_bits() & 0x8000_0000, x.to_bits() & 0x7FFF_FFFF);
    sign | match size {
        0x7F80_0001.. => 0x7E00_0000,
        0x477F_F000.. => 0x7BFF_7FFF,
        0x3880_0000.. => (size - 0x3800_0000) << 3,
        _ => (f32::from_bits(size) * 2f32.powi(40)).round_ties_even() as u32,
    }
}

fn of_wide(bits: u32) -> f32 {
    let (sign, size) = (bits & 0x8000_0000, bits & 0x7FFF_FFFF);
    let x = match size {
        0x7C00_0000.. => f32::NAN,
        0x0400_0000.. => f32::from_bits((size >> 3) + 0x3800_0000),
        _ => size as f32 * 2f32.powi(-40),
    };
    f32::from_bits(sign | x.to_bits())
}

/// As `join`, for an f16 weight.
pub fn join_f16(high: f16, low: u16) -> f32 {
    of_wide(((high.to_bits() as u32) << 16).wrapping_sub(((low >> 15) as u32) << 16) | low as u32)
}

/// As `split`, to an f16 weight: the value of both is that of `x` if it is at least 2^-17, and else differs by 2^-41 at most.
pub fn split_f16(x: f32) -> (f16, u16) {
    let bits = wide_of(x);
    (f16::from_bits((bits.wrapping_add(0x8000) >> 16) as u16), bits as u16)
}

/// Rounds `x` to one of its two neighbors in bf16 by `draw`, uniform in 0..2^16: the expected value is `x`.
#[inline(always)]
pub fn round(x: f32, draw: u16) -> bf16 {
    // In sign and magnitude the low 16 bits are the distance from the neighbor nearer to zero.
    bf16::from_bits((x.to_bits().wrapping_add(draw as u32) >> 16) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_draw_gives_an_adjacent_value_and_the_mean_is_the_value() {
        for x in [1.003_f32, -1.003, 3.1e-5, -7.77e12, 1.0, -0.0, 255.5, 1.9999999] {
            let (mut sum, mut most, mut least) = (0f64, f32::MIN, f32::MAX);
            for draw in 0..=u16::MAX {
                let y = round(x, draw).to_f32();
                (sum, most, least) = (sum + y as f64, most.max(y), least.min(y));
            }
            // All 65536 draws: the mean is exact up to the rounding of this sum.
            assert!((sum / 65536.0 - x as f64).abs() <= 1e-12 * x.abs() as f64, "{x}");
            assert!(least <= x && x <= most);
            let gap = f32::from_bits((x.to_bits() & 0x7F80_0000).max(0x0080_0000)) / 128.0;
            assert!(most - least <= gap, "{x} {least} {most}");
        }
    }
    use ft_base::rng::{Rng, Stream};

    #[test]
    fn an_f16_weight_and_its_low_bits_are_the_value() {
        let rng = Rng::new(5, Stream::Init, &[]);
        let mut values: Vec<f32> = (0..20_000)
            .map(|i| rng.normal(i) * 2f32.powi((i % 56) as i32 - 42))
            .collect();
        values.extend([0.0, -0.0, 1.0, -1.0, 65504.0, 65519.9, 6.1e-5, 5.9e-8, 2.9e-8, 1e-20]);
        for x in values {
            let (high, low) = split_f16(x);
            let y = join_f16(high, low);
            let error = if x.abs() < 2f32.powi(-17) { 2f32.powi(-41) } else { 0.0 };
            assert!((y - x).abs() <= error, "{x} {y}");
            assert_eq!(
                (y.is_sign_negative(), split_f16(y)),
                (x.is_sign_negative(), (high, low)),
                "{x}"
            );
            let nearest = (f16::from_f32(x).to_f32() - x).abs();
            assert!((high.to_f32() - x).abs() <= nearest + 2f32.powi(-40), "{x} {high}");
        }
        for (x, want) in [(65520.0, 65504.0), (-1e9, -65504.0), (f32::INFINITY, 65504.0)] {
            let (high, low) = split_f16(x);
            assert_eq!(high.to_f32(), want);
            assert!(join_f16(high, low).abs() < 65520.0);
        }
        let (high, low) = split_f16(f32::NAN);
        assert!(high.is_nan() && join_f16(high, low).is_nan());
    }

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
