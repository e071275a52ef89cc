//! The number formats of GGUF tensors: encode rows of f32, and decode them. A block is a fixed number of neighboring
//! elements of a row with common scales.

use super::k_blocks;
use half::{bf16, f16};

/// Number format of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BlockType {
    /// 32-bit floats.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 32 signed bytes with one f16 scale: 8.5 bits per element.
    Q8_0,
    /// 32 times 4 bits with one f16 scale: 4.5 bits per element.
    Q4_0,
    /// 8 times 32 elements of 4 bits; 6-bit scales and minima, and f16 factors of them: 4.5 bits per element.
    Q4K,
    /// 16 times 16 elements of 6 bits; 8-bit scales and one f16 factor of them: 6.5625 bits per element.
    Q6K,
}

/// Type, number in the file, name, elements and bytes of a block.
const TABLE: [(BlockType, u32, &str, usize, usize); 7] = [
    (BlockType::F32, 0, "F32", 1, 4),
    (BlockType::F16, 1, "F16", 1, 2),
    (BlockType::Bf16, 30, "BF16", 1, 2),
    (BlockType::Q8_0, 8, "Q8_0", 32, 34),
    (BlockType::Q4_0, 2, "Q4_0", 32, 18),
    (BlockType::Q4K, 12, "Q4_K", k_blocks::ELEMENTS, k_blocks::Q4_BYTES),
    (BlockType::Q6K, 14, "Q6_K", k_blocks::ELEMENTS, k_blocks::Q6_BYTES),
];

impl BlockType {
    fn row(self) -> (u32, &'static str, usize, usize) {
        let found = TABLE.iter().find(|(own, ..)| *own == self);
        found.map_or((0, "", 1, 4), |(_, code, name, elements, bytes)| {
            (*code, *name, *elements, *bytes)
        })
    }

    /// The format with this number.
    pub fn of(code: u32) -> Option<Self> {
        TABLE.iter().find(|(_, own, ..)| *own == code).map(|(block, ..)| *block)
    }

    /// Its number in a file.
    pub fn code(self) -> u32 {
        self.row().0
    }

    /// Elements of a block.
    pub fn elements(self) -> usize {
        self.row().2
    }

    /// Bytes of `count` elements, a multiple of `elements`.
    pub fn bytes(self, count: usize) -> u64 {
        let (_, _, elements, bytes) = self.row();
        (count / elements) as u64 * bytes as u64
    }

    /// Appends the blocks of `values`, a whole number of them. All values are finite.
    pub fn encode(self, values: &[f32], out: &mut Vec<u8>) {
        match self {
            Self::F32 => append(values, out, f32::to_le_bytes),
            Self::F16 => append(values, out, |x| f16::from_f32(x).to_le_bytes()),
            Self::Bf16 => append(values, out, |x| bf16::from_f32(x).to_le_bytes()),
            Self::Q8_0 => values.as_chunks().0.iter().for_each(|block| q8_0(block, out)),
            Self::Q4_0 => values.as_chunks().0.iter().for_each(|block| q4_0(block, out)),
            Self::Q4K => values.as_chunks().0.iter().for_each(|block| k_blocks::q4(block, out)),
            Self::Q6K => values.as_chunks().0.iter().for_each(|block| k_blocks::q6(block, out)),
        }
    }

    /// The values of whole blocks.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            Self::F32 => blocks_of(bytes, |b| [f32::from_le_bytes(*b)]),
            Self::F16 => blocks_of(bytes, |b| [f16::from_le_bytes(*b).to_f32()]),
            Self::Bf16 => blocks_of(bytes, |b| [bf16::from_le_bytes(*b).to_f32()]),
            Self::Q8_0 => blocks_of(bytes, of_q8_0),
            Self::Q4_0 => blocks_of(bytes, of_q4_0),
            Self::Q4K => blocks_of(bytes, k_blocks::of_q4),
            Self::Q6K => blocks_of(bytes, k_blocks::of_q6),
        }
    }

    /// As `encode`; returns what the blocks have lost.
    pub fn encode_measured(self, values: &[f32], out: &mut Vec<u8>) -> EncodingErrors {
        let start = out.len();
        self.encode(values, out);
        EncodingErrors::new(values, &self.decode(&out[start..]))
    }
}

fn append<const BYTES: usize>(values: &[f32], out: &mut Vec<u8>, of: impl Fn(f32) -> [u8; BYTES]) {
    let start = out.len();
    out.resize(start + BYTES * values.len(), 0);
    for (to, x) in out[start..].as_chunks_mut().0.iter_mut().zip(values) {
        *to = of(*x);
    }
}

fn blocks_of<const BYTES: usize, const VALUES: usize>(
    bytes: &[u8],
    of: impl Fn(&[u8; BYTES]) -> [f32; VALUES],
) -> Vec<f32> {
    let mut out = vec![0f32; bytes.len() / BYTES * VALUES];
    for (to, block) in out.as_chunks_mut().0.iter_mut().zip(bytes.as_chunks().0) {
        *to = of(block);
    }
    out
}

/// How encoded values differ from the exact ones.
#[derive(Debug, Clone, Copy, Default)]
pub struct EncodingErrors {
    /// The sum of the squares of the differences.
    pub squares: f64,
    /// The sum of the squares of the exact values: not finite if a value is not.
    pub values: f64,
    /// The largest difference; one that is not a number does not count.
    pub largest: f64,
}

impl EncodingErrors {
    fn new(exact: &[f32], decoded: &[f32]) -> Self {
        const LANES: usize = 8;
        let (blocks, rest) = exact.as_chunks::<LANES>();
        let (decoded_blocks, decoded_rest) = decoded.as_chunks::<LANES>();
        let mut lanes = [[0f64; LANES]; 3];
        for (x, y) in blocks.iter().zip(decoded_blocks) {
            for lane in 0..LANES {
                let error = f64::from(x[lane] - y[lane]).abs();
                lanes[0][lane] += error * error;
                lanes[1][lane] += f64::from(x[lane]) * f64::from(x[lane]);
                lanes[2][lane] = if error > lanes[2][lane] { error } else { lanes[2][lane] };
            }
        }
        let mut out = Self {
            squares: lanes[0].iter().sum(),
            values: lanes[1].iter().sum(),
            largest: lanes[2].into_iter().fold(0.0, f64::max),
        };
        for (x, y) in rest.iter().zip(decoded_rest) {
            let error = f64::from(x - y).abs();
            out = out.and(Self {
                squares: error * error,
                values: f64::from(*x).powi(2),
                largest: error,
            });
        }
        out
    }

    /// The errors of both parts together.
    pub fn and(self, other: Self) -> Self {
        Self {
            squares: self.squares + other.squares,
            values: self.values + other.values,
            largest: self.largest.max(other.largest),
        }
    }
}

impl std::fmt::Display for BlockType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.row().1)
    }
}

/// The f16 in the first two bytes.
pub(super) fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// The nearest integer, ties to even, for `|x| < 2^22`, and about x for others. (`round_ties_even` is a function call if SSE4.1
/// is not guaranteed.)
pub(super) fn nearest(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0;
    (x + ROUND) - ROUND
}

/// As `f32::round`, ties away from zero, under the same condition.
fn nearest_away(x: f32) -> f32 {
    let even = nearest(x);
    let off = x - even;
    if off.abs() == 0.5 && (off > 0.0) == (x > 0.0) {
        even + 2.0 * off
    } else {
        even
    }
}

/// 1 / x, and 0 for 0.
pub(super) fn inverse(x: f32) -> f32 {
    if x == 0.0 { 0.0 } else { 1.0 / x }
}

/// The value of largest magnitude, with its sign; of equal ones the first.
pub(super) fn largest(values: &[f32]) -> f32 {
    values
        .iter()
        .fold(0.0, |most: f32, x| if x.abs() > most.abs() { *x } else { most })
}

/// The scale is the largest magnitude / 127.
fn q8_0(block: &[f32; 32], out: &mut Vec<u8>) {
    let scale = largest(block).abs() / 127.0;
    let factor = inverse(scale);
    out.extend(f16::from_f32(scale).to_le_bytes());
    out.extend(block.iter().map(|x| nearest_away(x * factor) as i8 as u8));
}

fn of_q8_0(block: &[u8; 34]) -> [f32; 32] {
    let scale = half(block);
    std::array::from_fn(|i| scale * f32::from(block[2 + i] as i8))
}

/// The value of largest magnitude becomes -8; elements i and i + 16 share a byte.
fn q4_0(block: &[f32; 32], out: &mut Vec<u8>) {
    let scale = largest(block) / -8.0;
    let factor = inverse(scale);
    out.extend(f16::from_f32(scale).to_le_bytes());
    let number = |x: f32| ((x * factor + 8.5) as i32).clamp(0, 15) as u8;
    out.extend((0..16).map(|i| number(block[i]) | number(block[i + 16]) << 4));
}

fn of_q4_0(block: &[u8; 18]) -> [f32; 32] {
    let scale = half(block);
    std::array::from_fn(|i| {
        let byte = block[2 + i % 16];
        let number = if i < 16 { byte & 15 } else { byte >> 4 };
        scale * (f32::from(number) - 8.0)
    })
}
