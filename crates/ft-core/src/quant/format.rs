//! The quantization formats, and their sizes in bytes.

use crate::ops::Dtype;
use crate::ops::quantized::{BLOCK, CodeType, NESTED, ProductType, ScaledKind};

/// The part of a quantized weight with its quantized data; the other parts are scales.
pub const QDATA: &str = "codes";
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
    /// As NF4, with the 4-bit floats of bitsandbytes as levels. Read from files only.
    Fp4 {
        /// The absmax are quantized too.
        double: bool,
    },
    /// Codes and scales of another tool. Read from files only.
    Scaled(ScaledFormat),
    /// bf16 in an f32 model: products widen it to f32, which is exact.
    Bf16,
}

/// The layout of codes and scales of another tool; `ops::quantized::ScaledData` defines the values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScaledFormat {
    /// The arithmetic.
    pub kind: ScaledKind,
    /// Columns that share a scale; 0: a whole row.
    pub group: usize,
    /// Zero points are stored, one byte per scale.
    pub zeros: bool,
    /// The group of each column is stored (`desc_act`, `actorder`).
    pub ordered: bool,
}

impl ScaledFormat {
    /// True if the product of this scale and every code is finite in the type of the product.
    pub(crate) fn takes(self, scale: f32) -> bool {
        let highest = match self.kind.code {
            CodeType::U4 => 15.0,
            CodeType::U8 => 255.0,
            CodeType::I8 => 128.0,
            CodeType::E2m1 => 6.0,
            CodeType::E4m3 => 448.0,
        };
        let limit = match self.kind.product {
            ProductType::F16 => 65_504.0,
            _ => 1e38,
        };
        // NaN is not below the limit.
        scale.abs() * highest <= limit
    }
}

/// The storage type of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StorageDtype {
    /// Not quantized.
    Dense(Dtype),
    /// Quantized; products use the dequantized values in this type.
    Quantized(Format, Dtype),
}

impl StorageDtype {
    /// True for a quantized type.
    pub fn is_quantized(self) -> bool {
        matches!(self, StorageDtype::Quantized(..))
    }

    /// Returns the bytes of a parameter of this shape.
    pub fn bytes(self, shape: &[usize]) -> u64 {
        let elements: usize = shape.iter().product();
        match (self, shape) {
            (StorageDtype::Quantized(format, _), [rows, columns]) => format.bytes(*rows, *columns),
            (StorageDtype::Dense(dtype) | StorageDtype::Quantized(_, dtype), _) => dtype.bytes() * elements as u64,
        }
    }
}

impl Format {
    /// All formats that ft quantizes to.
    pub const ALL: [Self; 7] = [
        Format::Int8 { group: 0 },
        Format::Int8 { group: 128 },
        Format::Int4 { group: 64 },
        Format::Int4 { group: 128 },
        Format::Nf4 { double: false },
        Format::Nf4 { double: true },
        Format::Bf16,
    ];

    /// Returns the name in settings and files.
    pub fn name(self) -> &'static str {
        match self {
            Format::Int8 { .. } => "int8",
            Format::Int4 { .. } => "int4",
            Format::Nf4 { .. } => "nf4",
            Format::Fp4 { .. } => "fp4",
            Format::Bf16 => "bf16",
            Format::Scaled(scaled) => match scaled.kind.code {
                CodeType::U4 => "4-bit codes",
                CodeType::E2m1 => "mxfp4",
                CodeType::U8 | CodeType::I8 => "8-bit codes",
                CodeType::E4m3 => "fp8",
            },
        }
    }

    /// Returns a unique tag with all settings: `int8`, `int8:128`, `int4:64`, `nf4`, `nf4:double`, `bf16`.
    pub fn tag(self) -> String {
        match self {
            Format::Int8 { group: 0 }
            | Format::Nf4 { double: false }
            | Format::Fp4 { double: false }
            | Format::Bf16 => self.name().to_string(),
            Format::Int8 { group } | Format::Int4 { group } => format!("{}:{group}", self.name()),
            Format::Nf4 { double: true } | Format::Fp4 { double: true } => format!("{}:double", self.name()),
            Format::Scaled(f) => format!(
                "{:?}:{}:{:?}:{:?}{}{}",
                f.kind.code,
                f.group,
                f.kind.scale,
                f.kind.product,
                if f.zeros { ":zeros" } else { "" },
                if f.ordered { ":ordered" } else { "" }
            )
            .to_lowercase(),
        }
    }

    /// The inverse of `tag`.
    pub fn from_tag(tag: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.tag() == tag)
    }

    /// True if ft reads this format from files of other tools, and cannot quantize to it.
    pub fn is_read_only(self) -> bool {
        matches!(self, Format::Fp4 { .. } | Format::Scaled(_))
    }

    /// Returns the number of columns that share a scale, for a weight with `columns` columns.
    pub fn group(self, columns: usize) -> usize {
        match self {
            Format::Int8 { group: 0 } | Format::Scaled(ScaledFormat { group: 0, .. }) => columns.max(1),
            Format::Int8 { group } | Format::Int4 { group } | Format::Scaled(ScaledFormat { group, .. }) => group,
            Format::Nf4 { .. } | Format::Fp4 { .. } => BLOCK,
            Format::Bf16 => columns.max(1),
        }
    }

    /// Returns names and bytes of the parts of a quantized weight, in order.
    pub fn parts(self, rows: usize, columns: usize) -> Vec<(&'static str, usize)> {
        let groups = rows * columns.div_ceil(self.group(columns));
        let blocks = (rows * columns).div_ceil(BLOCK);
        match self {
            Format::Bf16 => vec![(QDATA, rows * self.stride(columns))],
            Format::Int8 { .. } => vec![(QDATA, rows * self.stride(columns)), ("scales", 4 * groups)],
            Format::Int4 { .. } => vec![(QDATA, rows * self.stride(columns)), ("scales", 4 * groups)],
            Format::Nf4 { double: false } | Format::Fp4 { double: false } => {
                vec![(QDATA, (rows * columns).div_ceil(2)), ("absmax", 4 * blocks)]
            }
            Format::Scaled(scaled) => {
                let mut parts = vec![
                    (QDATA, rows * self.stride(columns)),
                    ("scales", scaled.kind.scale.bytes() * groups),
                ];
                parts.extend(scaled.zeros.then_some(("zeros", groups)));
                parts.extend(scaled.ordered.then_some(("order", 4 * columns)));
                parts
            }
            Format::Nf4 { double: true } | Format::Fp4 { double: true } => vec![
                (QDATA, (rows * columns).div_ceil(2)),
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
            Format::Bf16 => (2 * columns).next_multiple_of(16),
            Format::Int4 { .. } => columns.div_ceil(2).next_multiple_of(16),
            Format::Scaled(scaled) if !scaled.kind.code.is_nibble() => columns.next_multiple_of(16),
            Format::Scaled(_) => columns.div_ceil(2).next_multiple_of(16),
            Format::Nf4 { .. } | Format::Fp4 { .. } => columns.div_ceil(2),
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
            Format::Fp4 { double: false } => write!(f, "fp4"),
            Format::Bf16 => write!(f, "bf16"),
            Format::Fp4 { double: true } => write!(f, "fp4 (double quantization)"),
            Format::Scaled(scaled) => {
                let order = if scaled.ordered { ", columns in any order" } else { "" };
                match scaled.group {
                    0 => write!(f, "{} (one scale per row{order})", self.name()),
                    group => write!(f, "{} (groups of {group}{order})", self.name()),
                }
            }
        }
    }
}
