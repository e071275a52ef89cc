//! A quantized weight.

use super::dynamic;
use super::format::{Format, QDATA, ScaledFormat};
use crate::base::{Error, Result};
use crate::ops::Dtype;
use crate::ops::quantized::{
    Absmax, CodeType, FP4_TABLE, NF4_TABLE, QData, QMatrixView, ScaledData, scale_and_minimum,
};
use half::bf16;
use rayon::prelude::*;
use std::borrow::Cow;

/// The quantized data and scales of a weight `[O, I]`. Immutable; share it in an `Arc`.
pub struct QMatrix {
    format: Format,
    rows: usize,
    columns: usize,
    dequantized_dtype: Dtype,
    rounds_rows: bool,
    codes: Vec<u8>,
    pub(super) scales: BlockScales,
}

/// Scales, in the form of each format.
pub(super) enum BlockScales {
    /// bf16: none.
    None,
    /// int8 `[O, groups]`; NF4 absmax of each block.
    F32(Vec<f32>),
    /// int4: scale and minimum, `[O, groups]`.
    Pairs(Vec<u32>),
    /// NF4, double quantization.
    Double {
        absmax: Vec<u8>,
        nested: Vec<f32>,
        offset: f32,
    },
    /// Those of a file: bytes of the scales, zero points, the group of each column.
    Scaled {
        scales: Vec<u8>,
        zeros: Vec<u8>,
        order: Vec<u32>,
    },
}

/// A named part of a quantized weight, little-endian, as in a file.
pub struct MatrixPart<'a> {
    /// `codes`, `scales`, `zeros`, `order`, `absmax`, `nested_absmax` or `nested_offset`.
    pub name: &'static str,
    /// The values.
    pub bytes: Cow<'a, [u8]>,
}

impl QMatrix {
    pub(super) fn new(
        format: Format,
        (rows, columns): (usize, usize),
        dequantized_dtype: Dtype,
        codes: Vec<u8>,
        scales: BlockScales,
    ) -> Self {
        Self {
            format,
            rows,
            columns,
            dequantized_dtype,
            rounds_rows: false,
            codes,
            scales,
        }
    }

    /// Lets products with a few rows on a CPU round these to 15 bits: for weights of which only answers are computed, and which are
    /// dequantized to bf16 (`linear::many_rounded_rows` counts on it); others stay as they are.
    #[must_use]
    pub fn with_rounded_rows(self) -> Self {
        Self {
            rounds_rows: self.dequantized_dtype == Dtype::Bf16,
            ..self
        }
    }

    /// True if products with a few rows may round them.
    pub fn rounds_rows(&self) -> bool {
        self.rounds_rows && matches!(self.format, Format::Int8 { .. } | Format::Int4 { .. })
    }

    /// The quantized format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Returns `(O, I)`.
    pub fn dims(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    /// Returns the type of the dequantized values: for a bf16 model they are rounded to bf16, for an f32 model they
    /// are not.
    pub fn dequantized_dtype(&self) -> Dtype {
        self.dequantized_dtype
    }

    /// Returns the bytes of all parts.
    pub fn bytes(&self) -> u64 {
        self.format.bytes(self.rows, self.columns)
    }

    /// Returns a view for products.
    pub(crate) fn view(&self) -> QMatrixView<'_> {
        let (stride, group) = (self.format.stride(self.columns), self.format.group(self.columns));
        let codes = self.codes.as_slice();
        let levels = levels(self.format);
        let codes = match (&self.scales, self.format) {
            (BlockScales::None, _) => QData::Bf16 { codes, stride },
            (BlockScales::Scaled { scales, zeros, order }, Format::Scaled(scaled)) => QData::Scaled(ScaledData {
                kind: scaled.kind,
                codes,
                stride,
                group,
                scales,
                zeros,
                order,
            }),
            (BlockScales::Pairs(scales), _) => QData::Int4 {
                codes,
                stride,
                group,
                scales,
            },
            (BlockScales::F32(scales), Format::Int8 { .. }) => QData::Int8 {
                codes,
                stride,
                group,
                scales,
            },
            (BlockScales::F32(values), _) => QData::Nf4 {
                codes,
                levels,
                absmax: Absmax::Plain(values),
            },
            // No constructor makes scales of another format.
            (BlockScales::Scaled { .. }, _) => QData::Nf4 {
                codes: &[],
                levels,
                absmax: Absmax::Plain(&[]),
            },
            (BlockScales::Double { absmax, nested, offset }, _) => QData::Nf4 {
                codes,
                levels,
                absmax: Absmax::Double {
                    codes: absmax,
                    table: dynamic::signed(),
                    scales: nested,
                    offset: *offset,
                },
            },
        };
        QMatrixView {
            rows: self.rows,
            columns: self.columns,
            codes,
            bf16: self.dequantized_dtype == Dtype::Bf16,
            rounds_rows: self.rounds_rows(),
        }
    }

    /// Dequantizes row `row`, `[I]`. Panics outside the weight.
    pub fn dequantize_row(&self, row: usize, to: &mut [f32]) {
        self.dequantize_into(row, 0, to)
    }

    /// Dequantizes columns `start..start + to.len()` of row `row`. Panics outside the weight.
    pub fn dequantize_into(&self, row: usize, start: usize, to: &mut [f32]) {
        self.view().dequantize(row, start, to)
    }

    /// Dequantizes the whole weight, `[O · I]`: for exports, tests and error measurements; products do not need it.
    pub fn dequantize(&self) -> Vec<f32> {
        let mut out = vec![0f32; self.rows * self.columns];
        if self.columns > 0 {
            let view = self.view();
            let rows = out.par_chunks_mut(self.columns).enumerate();
            rows.for_each(|(row, to)| view.dequantize(row, 0, to));
        }
        out
    }

    /// Serializes the weight to named parts, in the order of `Format::parts`; `from_parts` is the inverse.
    pub fn parts(&self) -> Vec<MatrixPart<'_>> {
        let owned = |name, bytes: Vec<u8>| MatrixPart {
            name,
            bytes: Cow::Owned(bytes),
        };
        let borrowed = |name, bytes| MatrixPart {
            name,
            bytes: Cow::Borrowed(bytes),
        };
        let floats = |v: &[f32]| v.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut parts = vec![borrowed(QDATA, self.codes.as_slice())];
        match &self.scales {
            BlockScales::None => {}
            BlockScales::F32(v) if matches!(self.format, Format::Int8 { .. }) => parts.push(owned("scales", floats(v))),
            BlockScales::F32(v) => parts.push(owned("absmax", floats(v))),
            BlockScales::Pairs(v) => parts.push(owned("scales", v.iter().flat_map(|x| x.to_le_bytes()).collect())),
            BlockScales::Double { absmax, nested, offset } => {
                parts.push(borrowed("absmax", absmax));
                parts.push(owned("nested_absmax", floats(nested)));
                parts.push(owned("nested_offset", offset.to_le_bytes().to_vec()));
            }
            BlockScales::Scaled { scales, zeros, order } => {
                parts.push(borrowed("scales", scales));
                if !zeros.is_empty() {
                    parts.push(borrowed("zeros", zeros));
                }
                if !order.is_empty() {
                    parts.push(owned("order", order.iter().flat_map(|x| x.to_le_bytes()).collect()));
                }
            }
        }
        parts
    }

    /// Builds the weight from the named parts of `parts`; `take` returns a part by its name.
    ///
    /// # Errors
    /// A part that is missing or has another size than the shape requires; a scale that is not finite.
    pub fn from_parts(
        format: Format,
        (rows, columns): (usize, usize),
        dequantized_dtype: Dtype,
        mut take: impl FnMut(&str) -> Result<Vec<u8>>,
    ) -> Result<Self> {
        check_format(format)?;
        let mut found = Vec::new();
        for (name, size) in format.parts(rows, columns) {
            let bytes = take(name)?;
            if bytes.len() != size {
                return Err(Error::shape("the size of a quantized weight does not match its shape")
                    .at(format!("part `{name}`"))
                    .found(format!("{} bytes", bytes.len()))
                    .expected(format!("{size} bytes for {format} [{rows}, {columns}]")));
            }
            found.push(bytes);
        }
        let mut found = found.into_iter();
        let mut next = || found.next().unwrap_or_default();
        let codes = next();
        let scales = match format {
            Format::Bf16
                if codes
                    .as_chunks::<2>()
                    .0
                    .iter()
                    .any(|b| !bf16::from_le_bytes(*b).is_finite()) =>
            {
                return Err(Error::non_finite("a weight has a number that is not finite").at("part `codes`"));
            }
            Format::Bf16 => BlockScales::None,
            Format::Scaled(scaled) => {
                let scales = next();
                let zeros = if scaled.zeros { next() } else { Vec::new() };
                let order = if scaled.ordered { next() } else { Vec::new() };
                let order = order
                    .as_chunks::<4>()
                    .0
                    .iter()
                    .map(|b| u32::from_le_bytes(*b))
                    .collect();
                check_scaled(scaled, &codes, &scales, &zeros)?;
                BlockScales::Scaled { scales, zeros, order }
            }
            Format::Int8 { .. } | Format::Nf4 { double: false } | Format::Fp4 { double: false } => {
                BlockScales::F32(finite(&next(), "scales")?)
            }
            Format::Int4 { .. } => {
                let words: Vec<u32> = next()
                    .as_chunks::<4>()
                    .0
                    .iter()
                    .map(|b| u32::from_le_bytes(*b))
                    .collect();
                if !words.iter().all(|word| is_finite_pair(*word)) {
                    return Err(not_finite("scales"));
                }
                BlockScales::Pairs(words)
            }
            Format::Nf4 { double: true } | Format::Fp4 { double: true } => BlockScales::Double {
                absmax: next(),
                nested: finite(&next(), "nested_absmax")?,
                offset: finite(&next(), "nested_offset")?[0],
            },
        };
        let quantized = Self::new(format, (rows, columns), dequantized_dtype, codes, scales);
        if quantized.view().fits() {
            Ok(quantized)
        } else {
            Err(Error::shape("a quantized weight is smaller than its shape").at(format.to_string()))
        }
    }
}

impl std::fmt::Debug for QMatrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "QMatrix({}, [{}, {}])", self.format, self.rows, self.columns)
    }
}

/// Errors: a group size that the format does not support.
pub(super) fn check_format(format: Format) -> Result<()> {
    let (group, known): (usize, &[usize]) = match format {
        Format::Int8 { group } => (group, &[0, 128]),
        Format::Int4 { group } => (group, &[64, 128]),
        // A GPU dequantizes up to 32 columns with one scale.
        Format::Scaled(scaled) => (scaled.group, &[0, 32, 64, 128, 256, 512, 1024]),
        Format::Nf4 { .. } | Format::Fp4 { .. } | Format::Bf16 => return Ok(()),
    };
    if known.contains(&group) {
        Ok(())
    } else {
        Err(
            Error::unsupported(format!("{} does not support this group size", format.name()))
                .found(group)
                .expected(format!("{known:?}")),
        )
    }
}

fn finite(bytes: &[u8], part: &str) -> Result<Vec<f32>> {
    let values: Vec<f32> = bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|b| f32::from_le_bytes(*b))
        .collect();
    if values.iter().all(|x| x.is_finite()) {
        Ok(values)
    } else {
        Err(not_finite(part))
    }
}

/// The values of the 4-bit codes of bitsandbytes.
pub(super) fn levels(format: Format) -> &'static [f32; 16] {
    match format {
        Format::Fp4 { .. } => &FP4_TABLE,
        _ => &NF4_TABLE,
    }
}

/// Checks that no value of a weight is infinite or NaN.
fn check_scaled(scaled: ScaledFormat, codes: &[u8], scales: &[u8], zeros: &[u8]) -> Result<()> {
    let kind = scaled.kind;
    let most = if kind.code.is_nibble() { 15 } else { 255 };
    let count = scales.len() / kind.scale.bytes();
    if !(0..count).all(|at| scaled.takes(kind.scale.get(scales, at))) {
        return Err(not_finite("scales"));
    }
    if zeros.iter().any(|zero| *zero > most) {
        return Err(Error::format("a zero point is outside of the range of the codes")
            .at("part `zeros`")
            .expected(format!("0 to {most}")));
    }
    if kind.code == CodeType::E4m3 && codes.par_iter().any(|code| code & 0x7F == 0x7F) {
        return Err(Error::non_finite("a quantized weight has a code that is not a number").at("part `codes`"));
    }
    Ok(())
}

/// True if the values of all codes with this scale and minimum are finite.
pub(crate) fn is_finite_pair(word: u32) -> bool {
    let (scale, minimum) = scale_and_minimum(word);
    scale.is_finite() && minimum.is_finite() && (15.0 * scale + minimum).is_finite()
}

fn not_finite(part: &str) -> Error {
    Error::non_finite("a quantized weight has a scale that is not finite").at(format!("part `{part}`"))
}
