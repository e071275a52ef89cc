//! Quantization of weights. Rows or blocks are quantized by themselves: the result does not depend on the number of threads or on
//! the set of CPU operations.

use super::dequantize::NF4_TABLE;
use super::math::{LANES, ROUND, max_lanes, vectorized};
use crate::quantized::BLOCK;
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;

/// The values of a weight before quantization, row after row.
#[derive(Debug, Clone, Copy)]
pub enum DenseValues<'a> {
    /// Read where they lie.
    F32(&'a [f32]),
    /// Converted to f32, which is exact.
    Bf16(&'a [bf16]),
}

impl<'a> DenseValues<'a> {
    /// The number of values.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(self) -> usize {
        match self {
            DenseValues::F32(values) => values.len(),
            DenseValues::Bf16(values) => values.len(),
        }
    }

    /// Returns the values of a range; `buffer` holds those that have to be converted.
    fn read<'b>(self, range: Range<usize>, buffer: &'b mut Vec<f32>) -> &'b [f32]
    where
        'a: 'b,
    {
        match self {
            DenseValues::F32(values) => &values[range],
            DenseValues::Bf16(values) => {
                buffer.clear();
                buffer.extend(
                    values[range]
                        .iter()
                        .map(|x| f32::from_bits(u32::from(x.to_bits()) << 16)),
                );
                buffer
            }
        }
    }

    /// Calls `each` for pieces of `piece` values (the last one can be shorter) and what belongs to them.
    fn for_each<T: Send>(
        self,
        piece: usize,
        places: impl IndexedParallelIterator<Item = T>,
        each: impl Fn(&[f32], T) + Sync + Send,
    ) {
        places.enumerate().for_each_init(Vec::new, |buffer, (i, place)| {
            let range = i * piece..((i + 1) * piece).min(self.len());
            each(self.read(range, buffer), place);
        });
    }
}

/// Values of a task, where they are not divided into rows.
const PIECE: usize = 64 * BLOCK;

/// Returns true if the size of every value is below `limit`: none is infinite or not a number.
pub fn all_below(values: DenseValues<'_>, limit: f32) -> bool {
    let pieces = 0..values.len().div_ceil(PIECE);
    let below = pieces.into_par_iter().map_init(Vec::new, |buffer, i| {
        let range = i * PIECE..((i + 1) * PIECE).min(values.len());
        piece_below(values.read(range, buffer), limit)
    });
    below.all(|below| below)
}

#[inline(always)]
fn piece_below_body<const FMA: bool>(values: &[f32], limit: f32) -> bool {
    values.iter().fold(true, |below, x| below & (x.abs() < limit))
}
vectorized!(fn piece_below(values: &[f32], limit: f32) -> bool = piece_below_body);

/// Rounds to bf16, nearest and ties to even, in rows of `stride` bytes.
pub fn to_bf16(values: DenseValues<'_>, columns: usize, stride: usize) -> Vec<u8> {
    let mut codes = vec![0u8; values.len() / columns * stride];
    values.for_each(columns, codes.par_chunks_mut(stride), |row, codes| {
        for (code, x) in codes.as_chunks_mut::<2>().0.iter_mut().zip(row) {
            *code = bf16::from_f32(*x).to_le_bytes();
        }
    });
    codes
}

/// Returns codes in rows of `stride` bytes and their scales, one for each `group` columns of a row: absmax / 127, and the code is
/// the nearest integer to value / scale.
pub fn to_int8(values: DenseValues<'_>, columns: usize, stride: usize, group: usize) -> (Vec<u8>, Vec<f32>) {
    let (rows, groups) = (values.len() / columns, columns.div_ceil(group));
    let (mut codes, mut scales) = (vec![0u8; rows * stride], vec![0f32; rows * groups]);
    let places = codes.par_chunks_mut(stride).zip(scales.par_chunks_mut(groups));
    values.for_each(columns, places, |row, (codes, scales)| {
        int8_row(row, group, codes, scales)
    });
    (codes, scales)
}

/// The largest size of a value.
#[inline(always)]
fn absmax(values: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    for block in values.chunks(LANES) {
        for (most, x) in lanes.iter_mut().zip(block) {
            *most = if x.abs() > *most { x.abs() } else { *most };
        }
    }
    max_lanes(&lanes)
}

#[inline(always)]
fn int8_row_body<const FMA: bool>(row: &[f32], group: usize, codes: &mut [u8], scales: &mut [f32]) {
    for ((codes, scale), row) in codes.chunks_mut(group).zip(scales).zip(row.chunks(group)) {
        *scale = absmax(row) / 127.0;
        if *scale > 0.0 {
            for (code, x) in codes.iter_mut().zip(row) {
                // Rounded to an integer in the lowest bits.
                *code = ((x / *scale).clamp(-127.0, 127.0) + ROUND).to_bits() as u8;
            }
        }
    }
}
vectorized!(fn int8_row(row: &[f32], group: usize, codes: &mut [u8], scales: &mut [f32]) = int8_row_body);

/// Returns codes, two in a byte, in rows of `stride` bytes, and for each `group` columns of a row (an even number) a word with the
/// scale and the minimum, as `scale_and_minimum` reads it. They are rounded outward, so the 16 levels include all values of the group.
pub fn to_int4(values: DenseValues<'_>, columns: usize, stride: usize, group: usize) -> (Vec<u8>, Vec<u32>) {
    let (rows, groups) = (values.len() / columns, columns.div_ceil(group));
    let (mut codes, mut scales) = (vec![0u8; rows * stride], vec![0u32; rows * groups]);
    let places = codes.par_chunks_mut(stride).zip(scales.par_chunks_mut(groups));
    values.for_each(columns, places, |row, (codes, scales)| {
        int4_row(row, group, codes, scales)
    });
    (codes, scales)
}

/// Writes the codes of up to `PAIRS` pairs of values, the first of a pair into the high half of a byte. What is missing in a pair is 0.
#[inline(always)]
fn put_pairs(codes: &mut [u8], values: &[f32], code: impl Fn(f32) -> u32) {
    let mut all = [0u32; 2 * PAIRS];
    all.iter_mut().zip(values).for_each(|(to, x)| *to = code(*x));
    for (to, pair) in codes.iter_mut().zip(all.as_chunks::<2>().0) {
        *to = (pair[0] << 4 | pair[1]) as u8;
    }
}
const PAIRS: usize = BLOCK / 2;

#[inline(always)]
fn int4_row_body<const FMA: bool>(row: &[f32], group: usize, codes: &mut [u8], scales: &mut [u32]) {
    for ((codes, word), row) in codes.chunks_mut(group / 2).zip(scales).zip(row.chunks(group)) {
        let (mut least, mut most) = ([f32::MAX; LANES], [f32::MIN; LANES]);
        for block in row.chunks(LANES) {
            for ((least, most), x) in least.iter_mut().zip(&mut most).zip(block) {
                *least = if *x < *least { *x } else { *least };
                *most = if *x > *most { *x } else { *most };
            }
        }
        let (least, most) = (-max_lanes(&least.map(|x| -x)), max_lanes(&most));
        let minimum = down_to_bf16(least);
        let scale = -down_to_bf16(-((f64::from(most) - f64::from(minimum)) / 15.0) as f32);
        *word = scale.to_bits() >> 16 | minimum.to_bits();
        if scale > 0.0 {
            for (codes, row) in codes.chunks_mut(PAIRS).zip(row.chunks(2 * PAIRS)) {
                put_pairs(codes, row, |x| {
                    (((x - minimum) / scale).clamp(0.0, 15.0) + ROUND).to_bits() & 15
                });
            }
        }
    }
}
vectorized!(fn int4_row(row: &[f32], group: usize, codes: &mut [u8], scales: &mut [u32]) = int4_row_body);

/// Returns the largest bf16 that is not above `x`. `x` is finite.
#[inline(always)]
fn down_to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let cut = bits & 0xFFFF_0000;
    if x < 0.0 && bits != cut {
        f32::from_bits(cut + 0x1_0000)
    } else {
        f32::from_bits(cut)
    }
}

/// Returns codes, two in a byte, and the absmax of each block of `BLOCK` values, which can begin and end inside rows. The last
/// byte of an odd number of values has a zero beside the last one, as in bitsandbytes.
pub fn to_nf4(values: DenseValues<'_>) -> (Vec<u8>, Vec<f32>) {
    let mut codes = vec![0u8; values.len().div_ceil(2)];
    let mut absmax = vec![0f32; values.len().div_ceil(BLOCK)];
    let places = codes
        .par_chunks_mut(PIECE / 2)
        .zip(absmax.par_chunks_mut(PIECE / BLOCK));
    values.for_each(PIECE, places, |values, (codes, absmax)| {
        nf4_blocks(values, codes, absmax)
    });
    (codes, absmax)
}

#[inline(always)]
fn nf4_blocks_body<const FMA: bool>(values: &[f32], codes: &mut [u8], absmax: &mut [f32]) {
    const ZERO: u32 = 7;
    for ((codes, most), block) in codes.chunks_mut(PAIRS).zip(absmax).zip(values.chunks(BLOCK)) {
        *most = self::absmax(block);
        let by = 1.0 / *most;
        let mut padded = [0f32; BLOCK];
        padded
            .iter_mut()
            .zip(block)
            .for_each(|(to, x)| *to = (x * by).clamp(-1.0, 1.0));
        // The lower of two levels in a tie. A block of zeros gives NaN, whose code is that of 0 (bitsandbytes takes -1, and its
        // absmax may dequantize to a value other than 0).
        let (mut best, mut nearest) = ([f32::MAX; BLOCK], [ZERO; BLOCK]);
        for (code, level) in (0..).zip(NF4_TABLE) {
            for ((best, nearest), x) in best.iter_mut().zip(&mut nearest).zip(&padded) {
                let distance = (x - level).abs();
                let nearer = distance < *best;
                *best = if nearer { distance } else { *best };
                *nearest = if nearer { code } else { *nearest };
            }
        }
        for (to, pair) in codes.iter_mut().zip(nearest.as_chunks::<2>().0) {
            *to = (pair[0] << 4 | pair[1]) as u8;
        }
    }
}
vectorized!(fn nf4_blocks(values: &[f32], codes: &mut [u8], absmax: &mut [f32]) = nf4_blocks_body);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantized::nearest;
    use ft_base::rng::{Rng, Stream};

    /// Random values with zeros, a constant row, an outlier, small numbers and both signs of zero.
    fn values(rows: usize, columns: usize) -> Vec<f32> {
        let rng = Rng::new(11, Stream::Init, &[]);
        let mut out: Vec<f32> = (0..(rows * columns) as u64).map(|i| 0.03 * rng.normal(i)).collect();
        for (row, values) in out.chunks_mut(columns).enumerate() {
            match row % 7 {
                1 => values.fill(0.0),
                2 => values.fill(-0.1),
                3 => values[columns / 2] = 50.0,
                4 => values.iter_mut().for_each(|x| *x *= 2e-42),
                // The scale of 185 smallest numbers is one of them: the quotient has to be cut to 127.
                6 => values.iter_mut().for_each(|x| *x = x.signum() * f32::from_bits(185)),
                5 => values.iter_mut().for_each(|x| *x = if *x > 0.0 { 0.0 } else { -0.0 }),
                _ => {}
            }
        }
        out
    }

    /// Two codes in a byte.
    fn pairs(codes: &[u8]) -> Vec<u8> {
        let pairs = codes.chunks(2);
        pairs.map(|c| c[0] << 4 | c.get(1).copied().unwrap_or(0)).collect()
    }

    #[test]
    fn vector_code_has_the_bits_of_plain_code() {
        for (rows, columns) in [(9, 256), (14, 100), (8, 77), (7, 4097), (1, 1)] {
            let exact = values(rows, columns);
            let half: Vec<bf16> = exact.iter().map(|x| bf16::from_f32(*x)).collect();
            let wide: Vec<f32> = half.iter().map(|x| x.to_f32()).collect();
            for (dense, values) in [(DenseValues::F32(&exact), &exact), (DenseValues::Bf16(&half), &wide)] {
                for group in [columns, 64] {
                    let (codes, scales) = to_int8(dense, columns, columns + 3, group);
                    let mut at = scales.iter();
                    for (row, codes) in values.chunks(columns).zip(codes.chunks(columns + 3)) {
                        for (row, codes) in row.chunks(group).zip(codes.chunks(group)) {
                            let scale = row.iter().fold(0f32, |most, x| most.max(x.abs())) / 127.0;
                            assert_eq!(at.next(), Some(&scale));
                            for (x, code) in row.iter().zip(codes).filter(|_| scale > 0.0) {
                                assert_eq!(
                                    *code as i8,
                                    nearest(x / scale).clamp(-127.0, 127.0) as i8,
                                    "{x} {scale}"
                                );
                            }
                        }
                    }
                    assert!(at.next().is_none());
                }
                let (codes, words) = to_int4(dense, columns, columns.div_ceil(2), 64);
                let mut words = words.iter();
                for (row, codes) in values.chunks(columns).zip(codes.chunks(columns.div_ceil(2))) {
                    for (row, codes) in row.chunks(64).zip(codes.chunks(32)) {
                        let (scale, minimum) = crate::quantized::scale_and_minimum(*words.next().unwrap());
                        let least = row.iter().copied().fold(f32::MAX, f32::min);
                        let most = row.iter().copied().fold(f32::MIN, f32::max);
                        let below = f32::from_bits((minimum.to_bits() >> 16) << 16);
                        assert!(minimum == below && minimum <= least && least - minimum <= least.abs() / 128.0 + 1e-40);
                        let exact = (f64::from(most) - f64::from(minimum)) / 15.0;
                        assert!(f64::from(scale) >= exact * (1.0 - 1e-7) && f64::from(scale) <= exact * 1.008 + 1e-39);
                        let code = |x: &f32| nearest((x - minimum) / scale).clamp(0.0, 15.0) as u8;
                        assert!(
                            row.iter()
                                .all(|x| *x >= minimum && *x <= minimum + 15.0 * scale * 1.000_001)
                        );
                        let want: Vec<u8> = row.iter().map(|x| if scale > 0.0 { code(x) } else { 0 }).collect();
                        assert!(codes == pairs(&want), "{row:?}");
                    }
                }
                let (codes, absmax) = to_nf4(dense);
                for ((block, most), codes) in values.chunks(BLOCK).zip(&absmax).zip(codes.chunks(BLOCK / 2)) {
                    assert_eq!(*most, block.iter().fold(0f32, |most, x| most.max(x.abs())));
                    let by = 1.0 / most;
                    let mut want: Vec<u8> = block.iter().map(|x| nearest_level((x * by).clamp(-1.0, 1.0))).collect();
                    want.extend((block.len() % 2 == 1).then_some(7));
                    assert!(codes == pairs(&want));
                }
                let halves = to_bf16(dense, columns, 2 * columns + 2);
                for (row, bytes) in values.chunks(columns).zip(halves.chunks(2 * columns + 2)) {
                    let want: Vec<u8> = row.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
                    assert!(bytes[..2 * columns] == want && bytes[2 * columns..] == [0, 0]);
                }
            }
        }
    }

    /// The first of the nearest levels.
    fn nearest_level(x: f32) -> u8 {
        if x.is_nan() {
            return 7;
        }
        let distances = NF4_TABLE.map(|level| (x - level).abs());
        let least = distances.iter().fold(f32::MAX, |least, d| least.min(*d));
        distances.iter().position(|d| *d == least).unwrap() as u8
    }

    #[test]
    fn one_value_that_is_not_below_the_limit_is_found() {
        let mut x = vec![1.0f32; 2 * PIECE + 5];
        assert!(all_below(DenseValues::F32(&x), 1.5) && !all_below(DenseValues::F32(&x), 1.0));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.5] {
            for at in [0, PIECE, x.len() - 1] {
                x[at] = bad;
                assert!(!all_below(DenseValues::F32(&x), 1.5), "{bad} {at}");
                x[at] = 1.0;
            }
        }
    }
}
