//! 8-bit quantization of optimizer states with the dynamic tree code of Dettmers et al. 2021 (arXiv 2110.02861,
//! section 1.3 and appendix F): seven decades of exponent; the fewer exponent digits, the more fraction bits.
//!
//! A moment is quantized in blocks of `BLOCK` elements as (table value) · absmax of the block. The first moment is
//! signed. The second is unsigned, and a value above zero never becomes zero, because the update divides by its root.

use super::super::math::LANES;
#[cfg(target_arch = "x86_64")]
use super::super::product::{CpuBackend, VectorIsa};
#[cfg(target_arch = "x86_64")]
use super::code_avx512;
use std::sync::LazyLock;

/// Elements that share one absmax.
pub(crate) const BLOCK: usize = 256;

/// Buckets of the lookup: exponents from 2^-25 up to 2^0, `FINE` buckets each; no bucket contains two midpoints.
const EXPONENTS: usize = 26;
const FINE: usize = 128;
pub(super) const BUCKETS: usize = EXPONENTS * FINE;
/// Bits of an f32 that are dropped to get a bucket.
pub(super) const CUT: u32 = 23 - FINE.ilog2();
/// Those bits, which place a number inside its bucket.
pub(super) const INSIDE: u32 = (1 << CUT) - 1;
/// The bucket index of 2^-25.
pub(super) const LOWEST: u32 = (127 - 25) * FINE as u32;

/// A sorted quantization table of 256 values from -1 (or 0) to 1.
pub(crate) struct QuantizationTable {
    pub(crate) values: [f32; 256],
    /// `middles[i]` is the midpoint of `values[i]` and `values[i + 1]`.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // the GPU searches it
    pub(crate) middles: [f32; 256],
    /// For the numbers in a bucket, positive ones and then negative ones: in the lowest 8 bits the smallest table index, above
    /// them a place in the bucket. For numbers whose `place` is above it, the index is one more.
    pub(super) buckets: [u32; 2 * BUCKETS],
    pub(super) signed: bool,
}

pub(crate) static SIGNED: LazyLock<QuantizationTable> = LazyLock::new(|| QuantizationTable::dynamic(true));
pub(crate) static UNSIGNED: LazyLock<QuantizationTable> = LazyLock::new(|| QuantizationTable::dynamic(false));

/// Returns the lower edge of a bucket.
fn edge(bucket: usize) -> f32 {
    f32::from_bits((LOWEST + bucket as u32) << CUT)
}

/// Returns the index of the bucket of `x`.
#[inline(always)]
fn bucket(x: f32) -> usize {
    let bits = x.to_bits();
    let size = ((bits & 0x7FFF_FFFF) >> CUT).saturating_sub(LOWEST);
    (bits >> 31) as usize * BUCKETS + size.min(BUCKETS as u32 - 1) as usize
}

/// Returns the place of `x` inside its bucket: larger for larger numbers, also if they are negative.
#[inline(always)]
fn place(x: f32) -> u32 {
    let bits = x.to_bits();
    (bits ^ ((bits as i32) >> 31) as u32) & INSIDE
}

impl QuantizationTable {
    /// Builds the dynamic code: decade d has 2^d fractions (2^(d+1) if unsigned), the midpoints of equal parts of
    /// 0.1 to 1; in addition 0 and 1.
    fn dynamic(signed: bool) -> Self {
        let mut all = vec![0.0, 1.0];
        for decade in 0..7i32 {
            let parts = 1usize << if signed { decade } else { decade + 1 };
            let size = 10f64.powi(decade - 6) as f32;
            // In f32 and from both ends, as torch's linspace: so the table is bit-equal to that of bitsandbytes.
            let (low, high) = (0.1f32, 1.0f32);
            let step = (high - low) / parts as f32;
            let edge = |i: usize| {
                if i < parts.div_ceil(2) {
                    step.mul_add(i as f32, low)
                } else {
                    (-step).mul_add((parts - i) as f32, high)
                }
            };
            for i in 0..parts {
                let value = size * ((edge(i) + edge(i + 1)) / 2.0);
                all.push(value);
                if signed {
                    all.push(-value);
                }
            }
        }
        all.sort_by(f32::total_cmp);
        let mut values = [0f32; 256];
        values.iter_mut().zip(all).for_each(|(to, from)| *to = from);
        let mut middles = [f32::INFINITY; 256];
        for i in 0..255 {
            middles[i] = (values[i] + values[i + 1]) / 2.0;
        }
        // All middles that are smaller than each number of the bucket, and the one inside it, if there is one.
        let bucket_of = |lowest: f32, smaller: &dyn Fn(f32) -> bool| {
            let code = middles[..255].iter().filter(|m| smaller(**m)).count();
            let inside = middles[code].is_finite() && bucket(middles[code]) == bucket(lowest);
            let place = if inside { place(middles[code]) } else { INSIDE };
            place << 8 | code as u32
        };
        let mut buckets = [0u32; 2 * BUCKETS];
        for index in 0..BUCKETS {
            // The first bucket also contains all smaller numbers, so no middle may be inside.
            let low = if index == 0 { 0.0 } else { edge(index) };
            buckets[index] = bucket_of(edge(index), &|m| m < low);
            buckets[BUCKETS + index] = bucket_of(-edge(index), &|m| m <= -edge(index + 1));
        }
        Self {
            values,
            middles,
            buckets,
            signed,
        }
    }

    /// Returns the index of the table value nearest to `x`, which is in -1..=1; ties go down.
    #[inline(always)]
    pub(crate) fn nearest(&self, x: f32) -> u8 {
        let word = self.buckets[bucket(x)];
        // Branch-free: on moments a branch would be unpredictable.
        word as u8 + u8::from(place(x) > word >> 8)
    }

    /// Quantizes one block; returns its absmax.
    pub(crate) fn quantize(&self, values: &[f32], codes: &mut [u8]) -> f32 {
        assert!(codes.len() == values.len());
        #[cfg(target_arch = "x86_64")]
        if CpuBackend::current().vector_isa() == Some(VectorIsa::Avx512) {
            // SAFETY: the instructions were detected; the lengths were compared above.
            return unsafe { code_avx512::quantize(self, values, codes) };
        }
        self.quantize_plainly(values, codes)
    }

    fn quantize_plainly(&self, values: &[f32], codes: &mut [u8]) -> f32 {
        let mut lanes = [0f32; LANES];
        for values in values.chunks(LANES) {
            for (most, x) in lanes.iter_mut().zip(values) {
                *most = if x.abs() > *most { x.abs() } else { *most };
            }
        }
        let most = lanes.into_iter().fold(0f32, f32::max);
        if most == 0.0 {
            codes.fill(0);
            return 0.0;
        }
        let least = |x: f32| u8::from(!self.signed && x > 0.0);
        for (codes, values) in codes.chunks_mut(LANES).zip(values.chunks(LANES)) {
            let mut parts = [0f32; LANES];
            parts.iter_mut().zip(values).for_each(|(part, x)| *part = x / most);
            for ((code, part), x) in codes.iter_mut().zip(parts).zip(values) {
                *code = self.nearest(part).max(least(*x));
            }
        }
        most
    }

    /// Dequantizes one block.
    pub(crate) fn dequantize(&self, codes: &[u8], most: f32, values: &mut [f32]) {
        assert!(codes.len() == values.len());
        #[cfg(target_arch = "x86_64")]
        if CpuBackend::current().vector_isa() == Some(VectorIsa::Avx512) {
            // SAFETY: the instructions were detected; the lengths were compared above.
            return unsafe { code_avx512::dequantize(self, codes, most, values) };
        }
        for (x, code) in values.iter_mut().zip(codes) {
            *x = self.values[*code as usize] * most;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ft_base::rng::{Rng, Stream};

    fn searched(code: &QuantizationTable, x: f32) -> u8 {
        code.middles[..255].iter().filter(|m| **m < x).count() as u8
    }

    #[test]
    fn the_table_is_sorted_and_the_look_up_finds_the_nearest() {
        let rng = Rng::new(5, Stream::Init, &[]);
        for code in [&*SIGNED, &*UNSIGNED] {
            assert!(code.values.windows(2).all(|w| w[0] < w[1]));
            assert_eq!(code.values[255], 1.0);
            assert_eq!(code.values.iter().filter(|v| **v == 0.0).count(), 1);
            let mut all: Vec<f32> = code.values.iter().chain(&code.middles[..255]).copied().collect();
            all.extend((0..100_000).map(|i| {
                let x = rng.uniform(2 * i) * 10f32.powi(-((i % 10) as i32));
                if code.signed && i % 2 == 0 { -x } else { x }
            }));
            all.extend([0.0, -0.0, 1e-30, 1e-44]);
            // All boundaries: of buckets, and between table values.
            let borders = (0..25 * FINE).map(edge).chain(code.middles[..255].to_vec());
            all.extend(borders.flat_map(|x| [x.next_down(), x, x.next_up()]));
            if code.signed {
                all.extend(all.clone().into_iter().map(|x| -x));
            }
            for x in all {
                assert_eq!(code.nearest(x), searched(code, x), "{x}");
            }
        }
        for x in [-1.0, -1e-30, -1e-44] {
            assert_eq!(SIGNED.nearest(x), searched(&SIGNED, x));
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn vector_code_has_the_bits_of_plain_code() {
        if !CpuBackend::Avx512.available() {
            return;
        }
        let rng = Rng::new(7, Stream::Init, &[]);
        for n in [1, 15, 16, 17, 255, BLOCK] {
            for round in 0..40 {
                let number = |i: u64| rng.normal(i + 1000 * round) * 10f32.powi(-((i + round) as i32 % 12));
                let mut x: Vec<f32> = (0..n as u64).map(number).collect();
                match round {
                    0 => x.fill(0.0),
                    1 => x[n / 2] = f32::NAN,
                    2 => x[n / 2] = f32::INFINITY,
                    3 => x.iter_mut().for_each(|x| *x *= 1e-38),
                    4 => x[n / 2] = -0.0,
                    5 => x[n / 2] = f32::NEG_INFINITY,
                    6 => x.fill(-f32::NAN),
                    _ => {}
                }
                for (code, signed) in [(&*SIGNED, true), (&*UNSIGNED, false)] {
                    let x: Vec<f32> = x.iter().map(|x| if signed { *x } else { x.abs() }).collect();
                    let (mut got, mut want, mut back) = (vec![1u8; n], vec![2u8; n], vec![0f32; n]);
                    // SAFETY: the instructions were detected.
                    let most = unsafe { code_avx512::quantize(code, &x, &mut got) };
                    assert_eq!(most.to_bits(), code.quantize_plainly(&x, &mut want).to_bits());
                    assert!(got == want, "{n} {round} {signed}");
                    // SAFETY: as above.
                    unsafe { code_avx512::dequantize(code, &got, most, &mut back) };
                    for (back, c) in back.iter().zip(&got) {
                        assert_eq!(back.to_bits(), (code.values[*c as usize] * most).to_bits());
                    }
                }
            }
        }
    }

    #[test]
    fn a_round_trip_stays_within_half_a_step_and_keeps_what_is_not_zero() {
        let rng = Rng::new(6, Stream::Init, &[]);
        let x: Vec<f32> = (0..BLOCK as u64).map(|i| rng.normal(i)).collect();
        let squares: Vec<f32> = x.iter().map(|x| x * x * 1e-9).collect();
        let tiny: Vec<f32> = (0..BLOCK).map(|i| if i == 0 { 1.0 } else { 1e-20 }).collect();
        for (code, values) in [(&*SIGNED, &x), (&*UNSIGNED, &squares), (&*UNSIGNED, &tiny)] {
            let (mut codes, mut back) = ([0u8; BLOCK], [0f32; BLOCK]);
            let most = code.quantize(values, &mut codes);
            code.dequantize(&codes, most, &mut back);
            let widest = code.values.windows(2).map(|w| w[1] - w[0]).fold(0.0, f32::max);
            for (a, b) in values.iter().zip(&back) {
                assert!((a - b).abs() <= 0.51 * widest * most, "{a} {b}");
                assert!(code.signed || (*a > 0.0) == (*b > 0.0), "{a} {b}");
            }
        }
        let mut codes = [7u8; BLOCK];
        assert_eq!(SIGNED.quantize(&[0.0; BLOCK], &mut codes), 0.0);
    }
}
