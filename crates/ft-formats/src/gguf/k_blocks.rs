//! Q4_K and Q6_K: blocks of 256 elements whose parts have scales of their own, which are quantized too.
//!
//! The scale of a part is searched: of some candidates, each followed by a weighted least-squares fit, the one with the
//! smallest weighted error is taken.

use super::blocks::{half, inverse, largest, nearest};
use half::f16;

/// Elements of a block.
pub(super) const ELEMENTS: usize = 256;
/// Bytes of a block of Q4_K: factor, factor of the minima, 12 bytes of scales and minima, 128 bytes of numbers.
pub(super) const Q4_BYTES: usize = 144;
/// Bytes of a block of Q6_K: 128 bytes of low bits, 64 of high bits, 16 scales, factor.
pub(super) const Q6_BYTES: usize = 210;

/// Elements of a part of Q4_K, and number of parts.
const Q4_PART: usize = 32;
const Q4_PARTS: usize = 8;
/// Elements of a part of Q6_K, and number of parts.
const Q6_PART: usize = 16;
const Q6_PARTS: usize = 16;

/// Candidates of the search on each side of the plain scale, and the distance of two in units of the numbers.
const CANDIDATES: i32 = 10;
const DISTANCE: f32 = 0.1;

/// x ≈ scale · number - minimum with numbers from 0 to 15; scale and minimum are not negative.
#[derive(Clone, Copy, Default)]
struct Affine {
    scale: f32,
    minimum: f32,
}

impl Affine {
    fn number(self, x: f32) -> f32 {
        self.number_by(inverse(self.scale), x)
    }

    /// As `number`; `factor` is the inverse of the scale.
    #[inline(always)]
    fn number_by(self, factor: f32, x: f32) -> f32 {
        nearest((x + self.minimum) * factor).clamp(0.0, 15.0)
    }
}

/// The affine map of one part.
fn affine(x: &[f32; Q4_PART]) -> Affine {
    let mean = (x.iter().map(|x| x * x).sum::<f32>() / Q4_PART as f32).sqrt();
    let weights: [f32; Q4_PART] = std::array::from_fn(|i| mean + x[i].abs());
    let least = x.iter().copied().fold(0.0, f32::min);
    let most = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if most <= least {
        return Affine {
            scale: 0.0,
            minimum: -least,
        };
    }
    let error = |map: Affine| -> f32 {
        let factor = inverse(map.scale);
        let mut parts = [0f32; Q4_PART];
        for i in 0..Q4_PART {
            let off = map.scale * map.number_by(factor, x[i]) - map.minimum - x[i];
            parts[i] = weights[i] * (off * off);
        }
        parts.iter().sum()
    };
    let plain = Affine {
        scale: (most - least) / 15.0,
        minimum: -least,
    };
    let mut best = (error(plain), plain);
    for step in -CANDIDATES..=CANDIDATES {
        let start = Affine {
            scale: (most - least) / (15.0 + DISTANCE * step as f32),
            minimum: -least,
        };
        let factor = inverse(start.scale);
        let mut numbers = [0f32; Q4_PART];
        for i in 0..Q4_PART {
            numbers[i] = start.number_by(factor, x[i]);
        }
        let fitted = fit(x, &weights, &numbers);
        let found = error(fitted);
        if found < best.0 {
            best = (found, fitted);
        }
    }
    best.1
}

/// The scale and the minimum with the smallest weighted error for given numbers.
fn fit(x: &[f32; Q4_PART], weights: &[f32; Q4_PART], numbers: &[f32; Q4_PART]) -> Affine {
    let (mut w, mut wx, mut wn, mut wnn, mut wnx) = (0f32, 0f32, 0f32, 0f32, 0f32);
    for i in 0..Q4_PART {
        let (x, weight, n) = (x[i], weights[i], numbers[i]);
        w += weight;
        wx += weight * x;
        wn += weight * n;
        wnn += weight * n * n;
        wnx += weight * n * x;
    }
    let determinant = w * wnn - wn * wn;
    let scale = (w * wnx - wx * wn) * inverse(determinant);
    let minimum = (wn * wnx - wnn * wx) * inverse(determinant);
    if minimum < 0.0 || determinant <= 0.0 {
        // A negative minimum cannot be stored.
        return Affine {
            scale: (wnx * inverse(wnn)).max(0.0),
            minimum: 0.0,
        };
    }
    Affine {
        scale: scale.max(0.0),
        minimum,
    }
}

pub(super) fn q4(block: &[f32; ELEMENTS], out: &mut Vec<u8>) {
    let parts = block.as_chunks::<Q4_PART>().0;
    let maps: [Affine; Q4_PARTS] = std::array::from_fn(|p| affine(&parts[p]));
    let factor = |of: fn(&Affine) -> f32| f16::from_f32(maps.iter().map(of).fold(0.0, f32::max) / 63.0);
    let (scales, minima) = (factor(|m| m.scale), factor(|m| m.minimum));
    let six_bits = |x: f32, factor: f16| nearest(x * inverse(factor.to_f32())).clamp(0.0, 63.0) as u8;
    out.extend(scales.to_le_bytes());
    out.extend(minima.to_le_bytes());
    let stored = maps.map(|map| [six_bits(map.scale, scales), six_bits(map.minimum, minima)]);
    let mut packed = [0u8; 12];
    for (p, [scale, minimum]) in stored.into_iter().enumerate() {
        if p < 4 {
            packed[p] |= scale;
            packed[p + 4] |= minimum;
        } else {
            packed[p + 4] = (scale & 15) | (minimum & 15) << 4;
            packed[p - 4] |= (scale >> 4) << 6;
            packed[p] |= (minimum >> 4) << 6;
        }
    }
    out.extend(packed);
    let numbers = |p: usize| {
        let map = Affine {
            scale: scales.to_f32() * f32::from(stored[p][0]),
            minimum: minima.to_f32() * f32::from(stored[p][1]),
        };
        parts[p].map(|x| map.number(x) as u8)
    };
    for p in (0..Q4_PARTS).step_by(2) {
        let (low, high) = (numbers(p), numbers(p + 1));
        out.extend(low.iter().zip(high).map(|(low, high)| low | high << 4));
    }
}

pub(super) fn of_q4(block: &[u8; Q4_BYTES]) -> [f32; ELEMENTS] {
    let (scales, minima) = (half(block), half(&block[2..]));
    let packed = &block[4..16];
    let stored = |p: usize| {
        if p < 4 {
            [packed[p] & 63, packed[p + 4] & 63]
        } else {
            let both = packed[p + 4];
            [
                (both & 15) | (packed[p - 4] >> 6) << 4,
                (both >> 4) | (packed[p] >> 6) << 4,
            ]
        }
    };
    let maps: [[f32; 2]; Q4_PARTS] = std::array::from_fn(|p| {
        let [scale, minimum] = stored(p);
        [scales * f32::from(scale), minima * f32::from(minimum)]
    });
    std::array::from_fn(|i| {
        let (p, e) = (i / Q4_PART, i % Q4_PART);
        let byte = block[16 + p / 2 * Q4_PART + e];
        let number = if p % 2 == 0 { byte & 15 } else { byte >> 4 };
        maps[p][0] * f32::from(number) - maps[p][1]
    })
}

/// The scale of one part of Q6_K: x ≈ scale · number, numbers from -32 to 31; large values weigh more.
fn symmetric(x: &[f32; Q6_PART]) -> f32 {
    let most = largest(x);
    if most == 0.0 {
        return 0.0;
    }
    let mut best = (f32::NEG_INFINITY, 0.0);
    for step in -CANDIDATES..=CANDIDATES {
        let factor = -(32.0 + DISTANCE * step as f32) / most;
        let (mut wnx, mut wnn) = (0f32, 0f32);
        for x in x {
            let number = nearest(x * factor).clamp(-32.0, 31.0);
            wnx += x * x * number * x;
            wnn += x * x * number * number;
        }
        // The weighted error of the best scale is smallest where this is largest.
        let gain = wnx * wnx * inverse(wnn);
        if gain > best.0 {
            best = (gain, wnx * inverse(wnn));
        }
    }
    best.1
}

pub(super) fn q6(block: &[f32; ELEMENTS], out: &mut Vec<u8>) {
    let parts = block.as_chunks::<Q6_PART>().0;
    let scales: [f32; Q6_PARTS] = std::array::from_fn(|p| symmetric(&parts[p]));
    let factor = f16::from_f32(largest(&scales) / -128.0);
    let stored = scales.map(|s| nearest(s * inverse(factor.to_f32())).clamp(-128.0, 127.0) as i8);
    let number = |i: usize| {
        let scale = factor.to_f32() * f32::from(stored[i / Q6_PART]);
        (nearest(block[i] * inverse(scale)).clamp(-32.0, 31.0) + 32.0) as u8
    };
    let numbers: [u8; ELEMENTS] = std::array::from_fn(number);
    for half in numbers.as_chunks::<128>().0 {
        out.extend((0..64).map(|i| (half[i] & 15) | (half[i + 64] & 15) << 4));
    }
    for half in numbers.as_chunks::<128>().0 {
        let high = |i: usize| (0..4).fold(0, |byte, part| byte | (half[i + 32 * part] >> 4) << (2 * part));
        out.extend((0..32).map(high));
    }
    out.extend(stored.map(|s| s as u8));
    out.extend(factor.to_le_bytes());
}

pub(super) fn of_q6(block: &[u8; Q6_BYTES]) -> [f32; ELEMENTS] {
    let factor = half(&block[208..]);
    std::array::from_fn(|i| {
        let (h, e) = (i / 128, i % 128);
        let low = block[64 * h + e % 64];
        let low = if e < 64 { low & 15 } else { low >> 4 };
        let high = block[128 + 32 * h + e % 32] >> (2 * (e / 32)) & 3;
        let scale = f32::from(block[192 + i / Q6_PART] as i8);
        factor * scale * (f32::from(low | high << 4) - 32.0)
    })
}
