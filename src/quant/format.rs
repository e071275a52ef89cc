//! The formats, and what they weigh.

use crate::ops::coded::{BLOCK, NESTED};
use crate::recipe::Dtype;
use std::fmt;

/// How the elements of a weight `[O, I]` are coded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// Signed bytes times a f32 scale: symmetric, the largest magnitude is 127. `group` columns share a scale; 0: a
    /// whole row does.
    Int8 { group: usize },
    /// Codes 0 to 15 times a scale, plus a minimum, both bf16, for `group` columns.
    Int4 { group: usize },
    /// NF4 of QLoRA (Dettmers et al. 2023, arXiv 2305.14314, section 3) with the tables and the packing of
    /// bitsandbytes: blocks of 64 of the flattened weight. `double`: their absmax are coded too, in blocks of 256.
    Nf4 { double: bool },
}

/// How a parameter is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    Dense(Dtype),
    /// Codes; products see the decoded values in this type.
    Coded(Format, Dtype),
}

impl Storage {
    pub fn is_coded(self) -> bool {
        matches!(self, Storage::Coded(..))
    }

    /// Bytes of a parameter of this shape.
    pub fn bytes(self, shape: &[usize]) -> u64 {
        let elements: usize = shape.iter().product();
        match (self, shape) {
            (Storage::Coded(format, _), [rows, columns]) => format.bytes(*rows, *columns),
            (Storage::Dense(dtype) | Storage::Coded(_, dtype), _) => dtype.bytes() * elements as u64,
        }
    }
}

impl Format {
    /// Every one there is.
    pub const ALL: [Self; 6] = [
        Format::Int8 { group: 0 },
        Format::Int8 { group: 128 },
        Format::Int4 { group: 64 },
        Format::Int4 { group: 128 },
        Format::Nf4 { double: false },
        Format::Nf4 { double: true },
    ];

    /// As recipes and files name it.
    pub fn name(self) -> &'static str {
        match self {
            Format::Int8 { .. } => "int8",
            Format::Int4 { .. } => "int4",
            Format::Nf4 { .. } => "nf4",
        }
    }

    /// One word that says everything: `int8`, `int8:128`, `int4:64`, `nf4`, `nf4:double`.
    pub fn tag(self) -> String {
        match self {
            Format::Int8 { group: 0 } | Format::Nf4 { double: false } => self.name().to_string(),
            Format::Int8 { group } | Format::Int4 { group } => format!("{}:{group}", self.name()),
            Format::Nf4 { double: true } => "nf4:double".to_string(),
        }
    }

    /// The way back from `tag`.
    pub fn from_tag(tag: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.tag() == tag)
    }

    /// Columns that share a scale, of a weight with `columns` columns.
    pub fn group(self, columns: usize) -> usize {
        match self {
            Format::Int8 { group: 0 } => columns.max(1),
            Format::Int8 { group } | Format::Int4 { group } => group,
            Format::Nf4 { .. } => BLOCK,
        }
    }

    /// Names and bytes of the parts of a coded weight, in order.
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

    /// Bytes of a coded weight.
    pub fn bytes(self, rows: usize, columns: usize) -> u64 {
        self.parts(rows, columns).iter().map(|(_, n)| *n as u64).sum()
    }

    /// Bytes from one row of codes to the next, a multiple of 16; the rows of NF4 follow each other without a gap.
    pub fn stride(self, columns: usize) -> usize {
        match self {
            Format::Int8 { .. } => columns.next_multiple_of(16),
            Format::Int4 { .. } => columns.div_ceil(2).next_multiple_of(16),
            Format::Nf4 { .. } => columns.div_ceil(2),
        }
    }
}

impl fmt::Display for Format {
    /// With everything that tells two formats apart: `int4 (groups of 64)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Format::Int8 { group: 0 } => write!(f, "int8 (one scale a row)"),
            Format::Int8 { group } => write!(f, "int8 (groups of {group})"),
            Format::Int4 { group } => write!(f, "int4 (groups of {group})"),
            Format::Nf4 { double: false } => write!(f, "nf4"),
            Format::Nf4 { double: true } => write!(f, "nf4 (double quantization)"),
        }
    }
}
