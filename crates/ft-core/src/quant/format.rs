//! The quantization formats, and their sizes in bytes.

use crate::ops::Dtype;
use crate::ops::quantized::{BLOCK, NESTED};
use std::fmt;

/// The quantization format of a weight `[O, I]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// Signed bytes times an f32 scale: symmetric, absmax maps to 127. `group` columns share a scale; 0: one scale
    /// per row.
    Int8 {
        /// Columns that share a scale; 0: a whole row.
        group: usize,
    },
    /// Integers 0 to 15 times a scale, plus a minimum, both bf16, per `group` columns.
    Int4 {
        /// Columns that share a scale and a minimum.
        group: usize,
    },
    /// NF4 of QLoRA (Dettmers et al. 2023, arXiv 2305.14314, section 3) with the tables and the packing of
    /// bitsandbytes: blocks of 64 of the flattened weight. `double`: the absmax are quantized too, in blocks of 256.
    Nf4 {
        /// The absmax are quantized too.
        double: bool,
    },
}

/// The storage type of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    /// Not quantized.
    Dense(Dtype),
    /// Quantized; products use the dequantized values in this type.
    Quantized(Format, Dtype),
}

impl Storage {
    /// True for a quantized type.
    pub fn is_quantized(self) -> bool {
        matches!(self, Storage::Quantized(..))
    }

    /// Returns the bytes of a parameter of this shape.
    pub fn bytes(self, shape: &[usize]) -> u64 {
        let elements: usize = shape.iter().product();
        match (self, shape) {
            (Storage::Quantized(format, _), [rows, columns]) => format.bytes(*rows, *columns),
            (Storage::Dense(dtype) | Storage::Quantized(_, dtype), _) => dtype.bytes() * elements as u64,
        }
    }
}

impl Format {
    /// All formats.
    pub const ALL: [Self; 6] = [
        Format::Int8 { group: 0 },
        Format::Int8 { group: 128 },
        Format::Int4 { group: 64 },
        Format::Int4 { group: 128 },
        Format::Nf4 { double: false },
        Format::Nf4 { double: true },
    ];

    /// Returns the name in recipes and files.
    pub fn name(self) -> &'static str {
        match self {
            Format::Int8 { .. } => "int8",
            Format::Int4 { .. } => "int4",
            Format::Nf4 { .. } => "nf4",
        }
    }

    /// Returns a unique tag with all settings: `int8`, `int8:128`, `int4:64`, `nf4`, `nf4:double`.
    pub fn tag(self) -> String {
        match self {
            Format::Int8 { group: 0 } | Format::Nf4 { double: false } => self.name().to_string(),
            Format::Int8 { group } | Format::Int4 { group } => format!("{}:{group}", self.name()),
            Format::Nf4 { double: true } => "nf4:double".to_string(),
        }
    }

    /// The inverse of `tag`.
    pub fn from_tag(tag: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.tag() == tag)
    }

    /// Returns the number of columns that share a scale, for a weight with `columns` columns.
    pub fn group(self, columns: usize) -> usize {
        match self {
            Format::Int8 { group: 0 } => columns.max(1),
            Format::Int8 { group } | Format::Int4 { group } => group,
            Format::Nf4 { .. } => BLOCK,
        }
    }

    /// Returns names and bytes of the parts of a quantized weight, in order.
    pub fn parts(self, rows: usize, columns: usize) -> Vec<(&'static str, usize)> {
        let groups = rows * columns.div_ceil(self.group(columns));
        let blocks = (rows * columns).div_ceil(BLOCK);
        match self {
            Format::Int8 { .. } => vec![("codes", rows * self.stride(columns)), ("scales", 4 * groups)],
            Format::Int4 { .. } => vec![("codes", rows * self.stride(columns)), ("scales", 4 * groups)],
            Format::Nf4 { double: false } => vec![("codes", (rows * columns).div_ceil(2)), ("absmax", 4 * blocks)],
            Format::Nf4 { double: true } => vec![
                ("codes", (rows * columns).div_ceil(2)),
                ("absmax", blocks),
                ("nested_absmax", 4 * blocks.div_ceil(NESTED)),
                ("nested_offset", 4),
            ],
        }
    }

    /// Returns the bytes of a quantized weight.
    pub fn bytes(self, rows: usize, columns: usize) -> u64 {
        self.parts(rows, columns).iter().map(|(_, n)| *n as u64).sum()
    }

    /// Returns the bytes from one quantized row to the next, a multiple of 16; NF4 rows follow each other without a
    /// gap.
    pub fn stride(self, columns: usize) -> usize {
        match self {
            Format::Int8 { .. } => columns.next_multiple_of(16),
            Format::Int4 { .. } => columns.div_ceil(2).next_multiple_of(16),
            Format::Nf4 { .. } => columns.div_ceil(2),
        }
    }
}

impl fmt::Display for Format {
    /// Includes all settings: `int4 (groups of 64)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Format::Int8 { group: 0 } => write!(f, "int8 (one scale per row)"),
            Format::Int8 { group } => write!(f, "int8 (groups of {group})"),
            Format::Int4 { group } => write!(f, "int4 (groups of {group})"),
            Format::Nf4 { double: false } => write!(f, "nf4"),
            Format::Nf4 { double: true } => write!(f, "nf4 (double quantization)"),
        }
    }
}
