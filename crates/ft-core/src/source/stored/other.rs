//! Quantized weights in the files of other tools. Codes and scales stay as they are in the files; only their order
//! changes. Which weights are quantized is visible in the files; `quantization_config` adds what is not.
//!
//! For a weight `NAME.weight` `[O, I]`, G groups of columns:
//!
//! | tool | tensors |
//! |---|---|
//! | bitsandbytes int8 | `NAME.weight` I8 `[O, I]`, `NAME.SCB` F32 `[O]` |
//! | fp8 | `NAME.weight` F8_E4M3 `[O, I]`, `NAME.weight_scale_inv` `[O / 128, I / 128]` |
//! | GPTQ | `NAME.qweight` I32 `[I · bits / 32, O]` (3 bits: one stream of bits), `NAME.qzeros` I32 `[G, O · bits / 32]`, `NAME.scales` `[G, O]`, `NAME.g_idx` I32 `[I]` |
//! | AWQ | `NAME.qweight` I32 `[I, O / 8]`, `NAME.qzeros` I32 `[G, O / 8]`, `NAME.scales` `[G, O]` |
//! | compressed-tensors, packed | `NAME.weight_packed` I32 `[O, I · bits / 32]`, `NAME.weight_scale` `[O, G]`, `NAME.weight_zero_point` I32 `[O · bits / 32, G]`, `NAME.weight_shape`, `NAME.weight_g_idx` |
//! | compressed-tensors, ModelOpt | `NAME.weight` I8 or F8_E4M3, `NAME.weight_scale`, `NAME.weight_zero_point` |
//! | MXFP4 | `NAME_blocks` U8 `[.., G, 16]`, `NAME_scales` U8 `[.., G]` (NAME without `.weight`) |

use super::grid::{ScaleGrid, expected_grids, grid, grid_of, present, scale_type, wrong_scale};
use super::settings::QuantizationSettings;
use super::unpack::{self, PackedWords};
use crate::base::{Error, Result};
use crate::formats::StoredDtype;
use crate::formats::weights::{TensorInfo, Weights};
use crate::ops::Dtype;
use crate::ops::quantized::{CodeType, ProductType, ScaleType, ScaledKind};
use crate::quant::{Format, QDATA, QMatrix, ScaledFormat};
use crate::source::ParamInfo;

/// The layout of a weight in the files of another tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolLayout {
    /// `SCB`.
    Bitsandbytes8,
    /// 4 bits, with a scale for each block of this number of elements.
    Bitsandbytes4(usize),
    /// `qweight`, packed along the inputs.
    Gptq,
    /// `qweight`, packed along the outputs.
    Awq,
    /// `weight_packed`.
    Packed,
    /// A weight of one byte per element, with a scale of this suffix.
    Plain(&'static str),
    /// `_blocks` and `_scales`.
    Mxfp4,
}

/// Suffixes of tensors for the activations, which ft does not quantize.
const ACTIVATIONS: [&str; 5] = [
    "input_scale",
    "input_zero_point",
    "activation_scale",
    "output_scale",
    "weight_format",
];

/// Returns the layout and the format of a weight that another tool has quantized.
///
/// # Errors
/// A format that ft does not read; a scale that is missing.
pub(crate) fn find(weights: &Weights, name: &str) -> Result<Option<(ToolLayout, Format)>> {
    let base = name.strip_suffix(".weight").unwrap_or(name);
    let has = |suffix: &str| weights.info(&format!("{base}.{suffix}")).is_some();
    let settings = QuantizationSettings::of(weights);
    if has("qweight") {
        return qweight(weights, base, &settings).map(Some);
    }
    if has("weight_packed") {
        return packed(weights, name, &settings).map(Some);
    }
    if weights.info(&format!("{name}_blocks")).is_some() {
        let kind = ScaledKind {
            code: CodeType::E2m1,
            scale: ScaleType::E8m0,
            product: ProductType::F32,
        };
        return Ok(Some((ToolLayout::Mxfp4, scaled(kind, 32, false, false))));
    }
    let Some(info) = weights.info(name).filter(|info| info.dtype.size() == 1) else {
        return Ok(None);
    };
    if info.dtype == StoredDtype::I8 && has("SCB") {
        let kind = ScaledKind {
            code: CodeType::I8,
            scale: ScaleType::F32,
            product: ProductType::Absmax127,
        };
        return Ok(Some((ToolLayout::Bitsandbytes8, scaled(kind, 0, false, false))));
    }
    let code = match info.dtype {
        StoredDtype::F8E4M3 => CodeType::E4m3,
        StoredDtype::I8 if has("weight_zero_point") => CodeType::U8,
        StoredDtype::I8 => CodeType::I8,
        _ => return Err(unreadable(weights, info)),
    };
    let suffix = ["weight_scale_inv", "weight_scale"].into_iter().find(|s| has(s));
    let Some(suffix) = suffix else {
        return Err(
            Error::format(format!("the scale of the quantized weight `{name}` is missing"))
                .at_path(&weights.files()[info.file])
                .found(format!("{} without a scale", info.dtype))
                .expected(format!(
                    "`{base}.weight_scale_inv`, `{base}.weight_scale` or `{base}.SCB`"
                ))
                .hint("the file is not complete: download it again, or give the unquantized model"),
        );
    };
    let grid = grid(weights, info, &format!("{base}.{suffix}"), &settings)?;
    // The FP8 of transformers multiplies in f32, compressed-tensors in the type of the scale.
    let product = match grid.scale {
        ScaleType::F16 if suffix == "weight_scale" => ProductType::F16,
        ScaleType::Bf16 if suffix == "weight_scale" => ProductType::Bf16,
        _ => ProductType::F32,
    };
    let (scale, ordered) = (grid.scale, grid.group > 0 && has("weight_g_idx"));
    let kind = ScaledKind { code, scale, product };
    Ok(Some((
        ToolLayout::Plain(suffix),
        scaled(kind, grid.group, code == CodeType::U8, ordered),
    )))
}

fn scaled(kind: ScaledKind, group: usize, zeros: bool, ordered: bool) -> Format {
    Format::Scaled(ScaledFormat {
        kind,
        group,
        zeros,
        ordered,
    })
}

fn unreadable(weights: &Weights, info: &TensorInfo) -> Error {
    Error::unsupported(format!(
        "the quantized weight `{}` has a type that ft does not read",
        info.name
    ))
    .at_path(&weights.files()[info.file])
    .found(info.dtype)
    .expected("F8_E4M3 or I8, or a layout of docs/quantization.md")
    .hint("give the model's unquantized weights")
}

/// The tensors of a weight: those that must be there, and those that are.
pub(crate) fn names(weights: &Weights, tool: ToolLayout, name: &str) -> Vec<String> {
    let base = name.strip_suffix(".weight").unwrap_or(name);
    let (needed, optional): (&[&str], &[&str]) = match tool {
        ToolLayout::Mxfp4 => return vec![format!("{name}_blocks"), format!("{name}_scales")],
        ToolLayout::Bitsandbytes8 => (&["weight", "SCB"], &[]),
        ToolLayout::Bitsandbytes4(_) => return super::wide::names(weights, name),
        ToolLayout::Gptq | ToolLayout::Awq => (&["qweight", "qzeros", "scales"], &["g_idx"]),
        ToolLayout::Packed => (
            &["weight_packed", "weight_scale", "weight_shape"],
            &["weight_zero_point", "weight_g_idx"],
        ),
        ToolLayout::Plain("weight_scale") => (&["weight", "weight_scale"], &["weight_zero_point", "weight_g_idx"]),
        ToolLayout::Plain(suffix) => return plain_names(weights, base, suffix),
    };
    let all = |list: &[&str]| list.iter().map(|suffix| format!("{base}.{suffix}")).collect::<Vec<_>>();
    let mut found = all(needed);
    found.extend(all(optional).into_iter().filter(|n| weights.info(n).is_some()));
    found.extend(all(&ACTIVATIONS).into_iter().filter(|n| weights.info(n).is_some()));
    found
}

fn plain_names(weights: &Weights, base: &str, suffix: &str) -> Vec<String> {
    let mut found = vec![format!("{base}.weight"), format!("{base}.{suffix}")];
    let rest = ACTIVATIONS.map(|suffix| format!("{base}.{suffix}"));
    found.extend(rest.into_iter().filter(|n| weights.info(n).is_some()));
    found
}

/// Reads a weight.
///
/// # Errors
/// A tensor that is missing or has another shape or type than the weight requires; numbers that are not finite.
pub(crate) fn read(
    weights: &Weights,
    p: &ParamInfo,
    dims: (usize, usize),
    tool: ToolLayout,
    format: Format,
    dequantized_dtype: Dtype,
) -> Result<QMatrix> {
    if let ToolLayout::Bitsandbytes4(block) = tool {
        return super::wide::read(weights, p, dims, format, block, dequantized_dtype);
    }
    let Format::Scaled(scaled) = format else {
        return Err(Error::internal("a weight of another tool has no scales").at(&*p.name));
    };
    let file = PartReader {
        weights,
        base: p.name.strip_suffix(".weight").unwrap_or(&p.name),
        name: &p.name,
        dims,
        groups: dims.1.div_ceil(format.group(dims.1)),
        stride: format.stride(dims.1),
        scaled,
    };
    let mut parts = match tool {
        ToolLayout::Gptq => file.gptq()?,
        ToolLayout::Awq => file.awq()?,
        ToolLayout::Packed => file.packed()?,
        ToolLayout::Mxfp4 => file.mxfp4()?,
        ToolLayout::Bitsandbytes8 => file.plain("SCB")?,
        ToolLayout::Bitsandbytes4(_) => {
            return Err(Error::internal("4-bit weights of bitsandbytes are read in `wide`, not here").at(&*p.name));
        }
        ToolLayout::Plain(suffix) => file.plain(suffix)?,
    };
    QMatrix::from_parts(format, dims, dequantized_dtype, |part| {
        Ok(std::mem::take(match part {
            QDATA => &mut parts.codes,
            "scales" => &mut parts.scales,
            "zeros" => &mut parts.zeros,
            _ => &mut parts.order,
        }))
    })
    .map_err(|e| e.or_at(&*p.name))
}

/// The parts of `QMatrix`.
#[derive(Default)]
struct MatrixParts {
    codes: Vec<u8>,
    scales: Vec<u8>,
    zeros: Vec<u8>,
    order: Vec<u8>,
}

/// Reads the tensors of one weight.
struct PartReader<'a> {
    weights: &'a Weights,
    /// The name of the module.
    base: &'a str,
    name: &'a str,
    dims: (usize, usize),
    groups: usize,
    stride: usize,
    scaled: ScaledFormat,
}

const INTEGERS: [StoredDtype; 2] = [StoredDtype::I32, StoredDtype::U32];

impl PartReader<'_> {
    /// The bytes of a tensor, which must have this shape and one of these types.
    fn tensor(&self, suffix: &str, dtypes: &[StoredDtype], shape: &[usize]) -> Result<Vec<u8>> {
        self.named(&format!("{}.{suffix}", self.base), dtypes, shape)
    }

    fn named(&self, name: &str, dtypes: &[StoredDtype], shape: &[usize]) -> Result<Vec<u8>> {
        let info = present(self.weights, name)?;
        if !dtypes.contains(&info.dtype) || info.shape != shape {
            let names: Vec<&str> = dtypes.iter().map(|d| d.name()).collect();
            return Err(
                Error::shape(format!("tensor `{name}` does not fit its quantized weight"))
                    .at_path(&self.weights.files()[info.file])
                    .found(format!("{} {:?}", info.dtype, info.shape))
                    .expected(format!("{} {shape:?}", names.join(" or ")))
                    .hint("`config.json` and the weights are not from the same model, or the file is damaged"),
            );
        }
        let mut bytes = vec![0u8; info.bytes as usize];
        self.weights.read_bytes_at(name, 0, &mut bytes)?;
        Ok(bytes)
    }

    fn bits(&self) -> usize {
        if self.scaled.kind.code.is_nibble() { 4 } else { 8 }
    }

    fn scale_type(&self) -> StoredDtype {
        match self.scaled.kind.scale {
            ScaleType::F32 => StoredDtype::F32,
            ScaleType::F16 => StoredDtype::F16,
            ScaleType::Bf16 => StoredDtype::Bf16,
            ScaleType::E8m0 => StoredDtype::F8E8M0,
        }
    }

    /// Words `[count]` with whole codes. Errors: the codes do not fill them.
    fn words(&self, codes: usize, of: &str) -> Result<usize> {
        self.words_of(self.bits(), codes, of)
    }

    fn words_of(&self, bits: usize, codes: usize, of: &str) -> Result<usize> {
        let each = if bits == 3 { 32 } else { 32 / bits };
        if codes.is_multiple_of(each) {
            return Ok(codes * bits / 32);
        }
        Err(Error::shape(format!(
            "the {of} of the quantized weight `{}` do not fill whole words",
            self.name
        ))
        .found(codes)
        .expected(format!("a multiple of {each}")))
    }

    /// The group of each column as stored. Errors: one that does not exist; another order than the format says.
    fn order(&self, suffix: &str) -> Result<Vec<u8>> {
        let columns = self.dims.1;
        if self.weights.info(&format!("{}.{suffix}", self.base)).is_none() {
            return Ok(Vec::new());
        }
        let bytes = self.tensor(suffix, &INTEGERS, &[columns])?;
        let groups: Vec<i32> = bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|b| i32::from_le_bytes(*b))
            .collect();
        let group = columns.div_ceil(self.groups.max(1));
        let size = if self.scaled.group > 0 {
            self.scaled.group
        } else {
            group
        };
        let regular = |column: usize| (column / size.max(1)) as i32;
        // compressed-tensors writes -1 for columns in their usual order.
        let usual = groups.iter().all(|g| *g == -1) || groups.iter().enumerate().all(|(i, g)| *g == regular(i));
        let wrong = groups.iter().find(|g| **g < 0 || **g as usize >= self.groups);
        match (self.scaled.ordered, wrong) {
            (true, _) if usual => Ok((0..columns).flat_map(|i| regular(i).to_le_bytes()).collect()),
            (false, _) if usual => Ok(Vec::new()),
            (true, None) => Ok(bytes),
            (_, Some(g)) => Err(
                Error::format(format!("`{}.{suffix}` names a group that does not exist", self.base))
                    .found(g)
                    .expected(format!("0 to {}", self.groups.saturating_sub(1))),
            ),
            (false, None) => Err(Error::format(format!(
                "`{}.{suffix}` orders the columns, but `quantization_config` does not",
                self.base
            ))
            .expected("`desc_act: true`")
            .hint("`config.json` and the weights are not from the same model")),
        }
    }

    fn gptq(&self) -> Result<MatrixParts> {
        let (rows, columns) = self.dims;
        let settings = QuantizationSettings::of(self.weights);
        let bits = settings.bits(self.base)? as usize;
        let (down, across) = (
            self.words_of(bits, columns, "inputs")?,
            self.words_of(bits, rows, "outputs")?,
        );
        let words = self.tensor("qweight", &INTEGERS, &[down, rows])?;
        let zeros = self.tensor("qzeros", &INTEGERS, &[self.groups, across])?;
        let scales = self.tensor("scales", &[self.scale_type()], &[self.groups, rows])?;
        let zeros = PackedWords::new(
            &zeros,
            across,
            if settings.is_gptq_v1() { unpack::ones(bits) } else { 0 },
        );
        // Codes of 3 bits cross the words, so that 1 is added to each.
        let plus = u8::from(bits == 3 && settings.is_gptq_v1());
        let codes = if bits < 4 {
            let words = PackedWords::new(&words, rows, 0);
            unpack::nibbles((rows, columns), self.stride, |row, column| {
                words.code_down(row, column, bits)
            })
        } else {
            unpack::transpose_words(&words, (rows, down), self.stride, bits == 4)
        };
        Ok(MatrixParts {
            codes,
            scales: unpack::transpose(&scales, (self.groups, rows), self.scaled.kind.scale.bytes()),
            zeros: unpack::table((rows, self.groups), |row, group| {
                zeros.code(group, row, bits).wrapping_add(plus) & (255 >> (8 - bits))
            }),
            order: self.order("g_idx")?,
        })
    }

    fn awq(&self) -> Result<MatrixParts> {
        let (rows, columns) = self.dims;
        let across = self.words(rows, "outputs")?;
        let words = self.tensor("qweight", &INTEGERS, &[columns, across])?;
        let zeros = self.tensor("qzeros", &INTEGERS, &[self.groups, across])?;
        let scales = self.tensor("scales", &[self.scale_type()], &[self.groups, rows])?;
        let (words, zeros) = (PackedWords::new(&words, across, 0), PackedWords::new(&zeros, across, 0));
        Ok(MatrixParts {
            codes: unpack::awq_rows(&words, (rows, columns), self.stride),
            scales: unpack::transpose(&scales, (self.groups, rows), self.scaled.kind.scale.bytes()),
            zeros: unpack::awq_table(&zeros, (rows, self.groups)),
            order: Vec::new(),
        })
    }

    fn packed(&self) -> Result<MatrixParts> {
        let (rows, columns) = self.dims;
        let bits = self.bits();
        let words = self.tensor("weight_packed", &INTEGERS, &[rows, (columns * bits).div_ceil(32)])?;
        let zeros = if self.scaled.zeros {
            let down = (rows * bits).div_ceil(32);
            let zeros = self.tensor("weight_zero_point", &INTEGERS, &[down, self.groups])?;
            let zeros = PackedWords::new(&zeros, self.groups, 0);
            let each = 32 / bits;
            unpack::table((rows, self.groups), |row, group| {
                (zeros.word(row / each, group) >> (row % each * bits)) as u8 & (255 >> (8 - bits))
            })
        } else {
            Vec::new()
        };
        Ok(MatrixParts {
            codes: unpack::rows(&words, (rows, columns), self.stride, bits == 4),
            scales: self.scales("weight_scale")?,
            zeros,
            order: self.order("weight_g_idx")?,
        })
    }

    fn plain(&self, suffix: &str) -> Result<MatrixParts> {
        let (rows, columns) = self.dims;
        let unsigned = self.scaled.kind.code == CodeType::U8;
        let dtype = match self.scaled.kind.code {
            CodeType::E4m3 => StoredDtype::F8E4M3,
            _ => StoredDtype::I8,
        };
        let bytes = self.tensor("weight", &[dtype], &[rows, columns])?;
        if suffix == "SCB" && self.weights.info(&format!("{}.weight_format", self.base)).is_some() {
            let order = self.weights.read_bytes(&format!("{}.weight_format", self.base))?;
            if order.iter().any(|b| *b != 0) {
                return Err(
                    Error::unsupported("an int8 weight of bitsandbytes is not stored by rows")
                        .at(self.name)
                        .found(format!("`weight_format` {order:?}"))
                        .expected("0: by rows")
                        .hint("save the model again with a current bitsandbytes"),
                );
            }
        }
        let zero_point = format!("{}.weight_zero_point", self.base);
        let zeros = match self.weights.info(&zero_point) {
            Some(info) if unsigned => {
                let stored = self.named(&zero_point, &[StoredDtype::I8], &info.shape.clone())?;
                let grid = self.grid("weight_zero_point")?;
                unpack::table((rows, self.groups), |row, group| stored[grid.at(row, group)] ^ 0x80)
            }
            // Old versions of compressed-tensors store zero points of 0 for symmetric weights.
            Some(_) if self.weights.read_bytes(&zero_point)?.iter().any(|b| b & 0x7F != 0) => {
                return Err(Error::unsupported("an 8-bit float weight has zero points")
                    .at(&zero_point)
                    .expected("0"));
            }
            _ => Vec::new(),
        };
        let mut codes = unpack::rows(&bytes, (rows, columns), self.stride, false);
        if unsigned {
            codes.iter_mut().for_each(|code| *code ^= 0x80);
        }
        let scales = self.scales(suffix)?;
        let order = self.order("weight_g_idx")?;
        Ok(MatrixParts {
            codes,
            scales,
            zeros,
            order,
        })
    }

    fn mxfp4(&self) -> Result<MatrixParts> {
        let (rows, columns) = self.dims;
        // Leading dimensions, such as that of the experts, count as rows.
        let flat = |suffix: &str, last: &[usize]| -> Result<Vec<u8>> {
            let name = format!("{}{suffix}", self.name);
            let shape = present(self.weights, &name)?.shape.clone();
            let lead = shape.len().saturating_sub(last.len());
            if shape[lead..] != *last || shape[..lead].iter().product::<usize>() != rows || !columns.is_multiple_of(32)
            {
                return Err(
                    Error::shape(format!("tensor `{name}` does not fit its quantized weight"))
                        .found(format!("{shape:?}"))
                        .expected(format!("{rows} rows of {last:?}, for [{rows}, {columns}]")),
                );
            }
            self.named(&name, &[StoredDtype::U8], &shape)
        };
        let blocks = flat("_blocks", &[self.groups, 16])?;
        Ok(MatrixParts {
            codes: unpack::rows(&blocks, (rows, columns), self.stride, true),
            scales: flat("_scales", &[self.groups])?,
            ..MatrixParts::default()
        })
    }

    fn grid(&self, suffix: &str) -> Result<ScaleGrid> {
        let shape = &present(self.weights, &format!("{}.{suffix}", self.base))?.shape;
        grid_of(
            shape,
            self.dims,
            QuantizationSettings::of(self.weights).block(),
            self.scaled.kind.scale,
        )
        .ok_or_else(|| {
            Error::shape(format!("`{}.{suffix}` does not fit its quantized weight", self.base))
                .found(format!("{shape:?}"))
                .expected(expected_grids(self.dims))
        })
    }

    /// The scales of every row and group.
    fn scales(&self, suffix: &str) -> Result<Vec<u8>> {
        let grid = self.grid(suffix)?;
        let name = format!("{}.{suffix}", self.base);
        let info = present(self.weights, &name)?;
        let bytes = self.named(&name, &[info.dtype], &info.shape.clone())?;
        let (rows, size) = (self.dims.0, self.scaled.kind.scale.bytes());
        if grid.group != self.scaled.group || bytes.len() < size * grid.len {
            return Err(Error::shape(format!("`{name}` does not fit its quantized weight"))
                .found(format!("{:?}", info.shape))
                .expected(expected_grids(self.dims)));
        }
        let mut out = Vec::with_capacity(rows * self.groups * size);
        for row in 0..rows {
            for group in 0..self.groups {
                let at = size * grid.at(row, group);
                out.extend_from_slice(&bytes[at..at + size]);
            }
        }
        Ok(out)
    }
}

/// The product in the type of the scales.
fn kind(code: CodeType, scale: ScaleType) -> ScaledKind {
    let product = match scale {
        ScaleType::F16 => ProductType::F16,
        ScaleType::Bf16 => ProductType::Bf16,
        ScaleType::F32 | ScaleType::E8m0 => ProductType::F32,
    };
    ScaledKind { code, scale, product }
}

fn qweight(weights: &Weights, base: &str, settings: &QuantizationSettings) -> Result<(ToolLayout, Format)> {
    let scales = present(weights, &format!("{base}.scales"))?;
    let scale = scale_type(scales).filter(|s| *s != ScaleType::E8m0);
    let scale = scale.ok_or_else(|| wrong_scale(weights, scales))?;
    let groups = scales.shape.first().copied().unwrap_or_default();
    let (tool, bits) = (settings.qweight_tool(base)?, settings.bits(base)?);
    let code = if bits == 8 { CodeType::U8 } else { CodeType::U4 };
    let group = if groups == 1 { 0 } else { settings.group_size(base)? };
    let ordered = tool == ToolLayout::Gptq
        && settings.is_ordered()
        && group > 0
        && weights.info(&format!("{base}.g_idx")).is_some();
    Ok((tool, scaled(kind(code, scale), group, true, ordered)))
}

fn packed(weights: &Weights, name: &str, settings: &QuantizationSettings) -> Result<(ToolLayout, Format)> {
    let words = present(weights, &format!("{name}_packed"))?;
    let scales = present(weights, &format!("{name}_scale"))?;
    let scale = scale_type(scales).filter(|s| *s != ScaleType::E8m0);
    let scale = scale.ok_or_else(|| wrong_scale(weights, scales))?;
    let shape = format!("{name}_shape");
    let shape_info = present(weights, &shape)?;
    let wide = shape_info.dtype.size();
    let bytes = weights.read_bytes(&shape)?;
    let number = |b: &[u8]| b.iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b)) as usize;
    let sizes: Vec<usize> = bytes.chunks_exact(wide).map(number).collect();
    let bad = |found: String| {
        Error::shape(format!("`{name}_packed` does not fit its quantized weight"))
            .at_path(&weights.files()[words.file])
            .found(found)
            .expected("codes of 4 or 8 bits for the shape in `weight_shape`")
            .hint("ft reads compressed-tensors with 4 or 8 bits: give the model's unquantized weights")
    };
    let (&[rows, columns], &[found_rows, width]) = (sizes.as_slice(), words.shape.as_slice()) else {
        return Err(bad(format!("{:?} for {sizes:?}", words.shape)));
    };
    let bits = [4usize, 8]
        .into_iter()
        .find(|bits| columns.checked_mul(*bits).map(|n| n.div_ceil(32)) == Some(width));
    let code = match bits {
        Some(4) if rows == found_rows => CodeType::U4,
        Some(8) if rows == found_rows => CodeType::U8,
        _ => return Err(bad(format!("{:?} for {sizes:?}", words.shape))),
    };
    let grid = grid_of(&scales.shape, (rows, columns), settings.block(), scale)
        .ok_or_else(|| bad(format!("scales {:?} for {sizes:?}", scales.shape)))?;
    let has = |suffix: &str| weights.info(&format!("{name}_{suffix}")).is_some();
    let ordered = grid.group > 0 && has("g_idx");
    Ok((
        ToolLayout::Packed,
        scaled(kind(code, scale), grid.group, has("zero_point"), ordered),
    ))
}
