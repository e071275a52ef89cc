//! Weights as other tools store them: codes of 4 or 8 bits, a scale for each group of columns, perhaps a zero point.
//! `value = (level(code) - zero) · scale`, rounded as the tool rounds it. The codes and scales stay those of the file.

use super::{ScaleRun, holds};
use crate::cpu::dequantize::{round_bf16, round_f16};

/// The numbers that the codes stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CodeType {
    /// 0 to 15, two per byte, the first in the high half.
    U4,
    /// 4-bit floats with 2 exponent bits (OCP MX), two per byte, the first in the high half.
    E2m1,
    /// 0 to 255.
    U8,
    /// -128 to 127.
    I8,
    /// 8-bit floats with 4 exponent bits, without infinity.
    E4m3,
}

/// The stored type of the scales, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleType {
    /// 32-bit float.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// A power of two: the exponent plus 127 in a byte.
    E8m0,
}

/// The rounding of a product of level and scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ProductType {
    /// Rounded to f32.
    F32,
    /// Rounded to f16.
    F16,
    /// Rounded to bf16.
    Bf16,
    /// The scale is the absmax of 127 levels: the f32 product is multiplied by 1 / 127 and rounded again.
    Absmax127,
}

/// 1 / 127 as bitsandbytes writes it, rounded to f32.
const PER_LEVEL: f32 = 7.874_016e-3;

/// The arithmetic of a format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScaledKind {
    /// Type of the codes.
    pub code: CodeType,
    /// Type of the scales.
    pub scale: ScaleType,
    /// Rounding of a value.
    pub product: ProductType,
}

impl CodeType {
    /// True if a byte holds two codes.
    pub fn is_nibble(self) -> bool {
        matches!(self, Self::U4 | Self::E2m1)
    }

    /// The zero point of codes without stored ones: the middle of unsigned codes, else 0.
    pub fn middle(self) -> u8 {
        match self {
            Self::U4 => 8,
            Self::U8 => 128,
            Self::E2m1 | Self::I8 | Self::E4m3 => 0,
        }
    }

    /// The number that a code stands for; NaN for the two NaNs of E4M3.
    #[inline(always)]
    pub fn level(self, code: u8) -> f32 {
        match self {
            Self::U4 | Self::U8 => f32::from(code),
            Self::I8 => f32::from(code as i8),
            Self::E2m1 => E2M1[code as usize & 15],
            Self::E4m3 => E4M3[code as usize],
        }
    }
}

impl ScaleType {
    /// Bytes of a scale.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::E8m0 => 1,
        }
    }

    /// Scale number `at`. Panics outside of `scales`.
    #[inline(always)]
    pub fn get(self, scales: &[u8], at: usize) -> f32 {
        match self {
            Self::F32 => f32::from_bits(u32::from_le_bytes([
                scales[4 * at],
                scales[4 * at + 1],
                scales[4 * at + 2],
                scales[4 * at + 3],
            ])),
            Self::F16 => half_to_f32(u16::from_le_bytes([scales[2 * at], scales[2 * at + 1]])),
            Self::Bf16 => f32::from_bits(u32::from(u16::from_le_bytes([scales[2 * at], scales[2 * at + 1]])) << 16),
            Self::E8m0 => power_of_two(scales[at]),
        }
    }
}

/// 2^(code - 127); 255 is NaN.
#[inline(always)]
fn power_of_two(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        code => f32::from_bits(u32::from(code) << 23),
    }
}

/// Exact for all values, without a call. Multiplication by 2^112 moves the exponent, also that of subnormal numbers.
#[inline(always)]
fn half_to_f32(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7FFF) << 13;
    let value = if magnitude >= 0x0F80_0000 {
        f32::from_bits(magnitude | 0x7F80_0000)
    } else {
        f32::from_bits(magnitude) * f32::from_bits(0x7780_0000)
    };
    f32::from_bits(value.to_bits() | u32::from(bits & 0x8000) << 16)
}

/// The values of E2M1 codes.
const E2M1: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// The values of E4M3 codes.
static E4M3: [f32; 256] = e4m3();

const fn e4m3() -> [f32; 256] {
    let mut table = [0f32; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = ((code >> 3 & 15) as u32, (code & 7) as u32);
        let magnitude = match (exponent, mantissa) {
            (15, 7) => f32::NAN,
            // 2^-9 is the smallest subnormal number.
            (0, m) => m as f32 * f32::from_bits((127 - 9) << 23),
            (e, m) => f32::from_bits((e + 120) << 23 | m << 20),
        };
        table[code] = if code >= 128 { -magnitude } else { magnitude };
        code += 1;
    }
    table
}

/// A borrowed weight in codes with scales.
#[derive(Debug, Clone, Copy)]
pub struct ScaledData<'a> {
    /// The arithmetic.
    pub kind: ScaledKind,
    /// One or two codes per byte.
    pub codes: &'a [u8],
    /// Bytes from one row of `codes` to the next.
    pub stride: usize,
    /// Columns that share a scale and a zero point.
    pub group: usize,
    /// `[O, ceil(I / group)]`
    pub scales: &'a [u8],
    /// `[O, ceil(I / group)]`; empty: `CodeType::middle`.
    pub zeros: &'a [u8],
    /// The group of each column, `[I]`; empty: column / `group`.
    pub order: &'a [u32],
}

impl ScaledData<'_> {
    /// True if all data that dequantization of `[rows, columns]` reads lies inside the slices.
    pub(super) fn fits(&self, rows: usize, columns: usize) -> bool {
        let groups = columns.div_ceil(self.group.max(1));
        let width = if self.kind.code.is_nibble() {
            columns.div_ceil(2)
        } else {
            columns
        };
        let order = self.order.is_empty()
            || self.order.len() == columns && self.order.iter().all(|group| (*group as usize) < groups);
        let inside = self.stride >= width && holds(self.codes, rows, self.stride);
        let scales = holds(self.scales, rows, groups * self.kind.scale.bytes());
        self.group > 0 && inside && scales && order && (self.zeros.is_empty() || holds(self.zeros, rows, groups))
    }

    /// Scale and zero point of a group.
    #[inline(always)]
    fn scale(&self, at: usize) -> (f32, f32) {
        let zero = if self.zeros.is_empty() {
            self.kind.code.middle()
        } else {
            self.zeros[at]
        };
        (self.kind.scale.get(self.scales, at), f32::from(zero))
    }

    #[inline(always)]
    fn group_of(&self, column: usize) -> usize {
        if self.order.is_empty() {
            column / self.group
        } else {
            self.order[column] as usize
        }
    }

    /// As `QMatrixView::run`.
    #[inline(always)]
    pub(super) fn run(
        &self,
        columns: usize,
        (row, column): (usize, usize),
        left: usize,
        bf16: bool,
    ) -> (usize, ScaleRun) {
        let groups = columns.div_ceil(self.group);
        let (scale, zero) = self.scale(row * groups + self.group_of(column));
        let n = if self.order.is_empty() {
            (self.group - column % self.group).min(left)
        } else {
            1
        };
        if !self.kind.code.is_nibble() {
            return (n, ScaleRun::Bytes(row * self.stride + column, scale, zero));
        }
        let mut table = [0f32; 16];
        for (code, value) in table.iter_mut().enumerate() {
            *value = (self.kind.code.level(code as u8) - zero) * scale;
        }
        self.finish(&mut table, bf16);
        (n, ScaleRun::Nibbles(2 * row * self.stride + column, table))
    }

    /// Dequantizes codes of one byte that share a scale and a zero point.
    #[inline(always)]
    pub(crate) fn bytes(&self, codes: &[u8], (scale, zero): (f32, f32), bf16: bool, to: &mut [f32]) {
        let pairs = to.iter_mut().zip(codes);
        match self.kind.code {
            CodeType::I8 => pairs.for_each(|(to, code)| *to = f32::from(*code as i8) * scale),
            CodeType::E4m3 => pairs.for_each(|(to, code)| *to = E4M3[*code as usize] * scale),
            _ => pairs.for_each(|(to, code)| *to = (f32::from(*code) - zero) * scale),
        }
        self.finish(to, bf16);
    }

    /// Dequantizes columns `start..start + to.len()` of a row whose columns have their groups in `order`.
    #[inline(always)]
    pub(crate) fn ordered(&self, columns: usize, row: usize, start: usize, bf16: bool, to: &mut [f32]) {
        let first = row * columns.div_ceil(self.group);
        let codes = &self.codes[row * self.stride..];
        for (i, to) in to.iter_mut().enumerate() {
            let column = start + i;
            let (scale, zero) = self.scale(first + self.order[column] as usize);
            let code = if self.kind.code.is_nibble() {
                let byte = codes[column / 2];
                if column.is_multiple_of(2) { byte >> 4 } else { byte & 15 }
            } else {
                codes[column]
            };
            *to = (self.kind.code.level(code) - zero) * scale;
        }
        self.finish(to, bf16);
    }

    /// Rounds f32 products.
    #[inline(always)]
    fn finish(&self, values: &mut [f32], bf16: bool) {
        match self.kind.product {
            ProductType::F32 => {}
            ProductType::F16 => values.iter_mut().for_each(|x| *x = round_f16(*x)),
            ProductType::Bf16 => values.iter_mut().for_each(|x| *x = round_bf16(*x)),
            ProductType::Absmax127 => values.iter_mut().for_each(|x| *x *= PER_LEVEL),
        }
        if bf16 && self.kind.product != ProductType::Bf16 {
            values.iter_mut().for_each(|x| *x = round_bf16(*x));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn halves_are_read_exactly() {
        for bits in 0..=u16::MAX {
            let (own, theirs) = (half_to_f32(bits), f16::from_bits(bits).to_f32());
            assert!(
                own.to_bits() == theirs.to_bits() || own.is_nan() && theirs.is_nan(),
                "{bits:04x}"
            );
        }
    }

    #[test]
    fn small_floats_have_the_values_of_their_standards() {
        let level = |code| CodeType::E4m3.level(code);
        assert_eq!(
            (level(0x01), level(0x08), level(0x38), level(0x7E)),
            (0.001953125, 0.015625, 1.0, 448.0)
        );
        assert_eq!((level(0xB8), level(0x07)), (-1.0, 0.013671875));
        assert!(level(0x7F).is_nan() && level(0xFF).is_nan() && level(0x80).is_sign_negative());
        assert_eq!(
            (power_of_two(127), power_of_two(0), power_of_two(130)),
            (1.0, 2f32.powi(-127), 8.0)
        );
    }
}
