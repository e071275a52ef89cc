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
            Self::F32 => values.iter().for_each(|x| out.extend(x.to_le_bytes())),
            Self::F16 => values.iter().for_each(|x| out.extend(f16::from_f32(*x).to_le_bytes())),
            Self::Bf16 => values.iter().for_each(|x| out.extend(bf16::from_f32(*x).to_le_bytes())),
            Self::Q8_0 => values.as_chunks().0.iter().for_each(|block| q8_0(block, out)),
            Self::Q4_0 => values.as_chunks().0.iter().for_each(|block| q4_0(block, out)),
            Self::Q4K => values.as_chunks().0.iter().for_each(|block| k_blocks::q4(block, out)),
            Self::Q6K => values.as_chunks().0.iter().for_each(|block| k_blocks::q6(block, out)),
        }
    }

    /// The values of whole blocks.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            Self::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Self::F16 => bytes
                .as_chunks()
                .0
                .iter()
                .map(|b| f16::from_le_bytes(*b).to_f32())
                .collect(),
            Self::Bf16 => bytes
                .as_chunks()
                .0
                .iter()
                .map(|b| bf16::from_le_bytes(*b).to_f32())
                .collect(),
            Self::Q8_0 => bytes.as_chunks::<34>().0.iter().flat_map(of_q8_0).collect(),
            Self::Q4_0 => bytes.as_chunks::<18>().0.iter().flat_map(of_q4_0).collect(),
            Self::Q4K => bytes.as_chunks().0.iter().flat_map(k_blocks::of_q4).collect(),
            Self::Q6K => bytes.as_chunks().0.iter().flat_map(k_blocks::of_q6).collect(),
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
    out.extend(block.iter().map(|x| (x * factor).round() as i8 as u8));
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
