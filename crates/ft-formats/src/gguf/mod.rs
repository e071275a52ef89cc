//! GGUF, the file format of llama.cpp (version 3): typed keys, tensor table, aligned tensor data; little-endian. Knows
//! the layout of the file and of its number blocks, not what a model family needs.

pub mod blocks;
mod k_blocks;
mod read;
mod write;

pub use blocks::{BlockType, EncodingErrors};
pub use read::GgufReader;
pub use write::{TensorEntry, write};

/// First four bytes of a file.
const MAGIC: [u8; 4] = *b"GGUF";
/// Version of the format that is written and read.
const VERSION: u32 = 3;
/// Tensor data begins at multiples of this, bytes.
const ALIGNMENT: u64 = 32;
/// Most dimensions of a tensor.
const DIMENSIONS: usize = 4;

/// The value of a key.
#[derive(Debug, Clone, PartialEq)]
pub enum MetadataValue {
    /// An unsigned integer of 8 to 64 bits; written with 32 bits.
    U32(u32),
    /// A signed integer; written with 32 bits.
    I32(i32),
    /// A float; written with 32 bits.
    F32(f32),
    /// A flag.
    Bool(bool),
    /// A text in UTF-8.
    Text(String),
    /// A list of texts.
    Texts(Vec<String>),
    /// A list of signed 32-bit integers.
    I32s(Vec<i32>),
    /// A list of unsigned 32-bit integers.
    U32s(Vec<u32>),
    /// A list of 32-bit floats.
    F32s(Vec<f32>),
    /// A list of flags.
    Bools(Vec<bool>),
}

/// Numbers of the types of values.
mod code {
    pub(super) const U8: u32 = 0;
    pub(super) const U32: u32 = 4;
    pub(super) const I32: u32 = 5;
    pub(super) const F32: u32 = 6;
    pub(super) const BOOL: u32 = 7;
    pub(super) const TEXT: u32 = 8;
    pub(super) const LIST: u32 = 9;
    pub(super) const U64: u32 = 10;
}

impl From<u32> for MetadataValue {
    fn from(x: u32) -> Self {
        Self::U32(x)
    }
}

impl From<f32> for MetadataValue {
    fn from(x: f32) -> Self {
        Self::F32(x)
    }
}

impl From<bool> for MetadataValue {
    fn from(x: bool) -> Self {
        Self::Bool(x)
    }
}

impl From<&str> for MetadataValue {
    fn from(x: &str) -> Self {
        Self::Text(x.into())
    }
}

#[cfg(test)]
mod tests;
