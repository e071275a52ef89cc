//! Reads weights that a model directory holds quantized, and writes them in two layouts. `other` reads those of other
//! tools.
//!
//! `bitsandbytes`, for NF4 and FP4 (written by transformers with `load_in_4bit`): for a weight NAME `[O, I]` the quantized data
//! `NAME` U8 `[O·I/2, 1]`, `NAME.absmax`, with double quantization `NAME.nested_absmax` and `NAME.nested_quant_map`,
//! the table `NAME.quant_map`, and JSON in the bytes of `NAME.quant_state.bitsandbytes__nf4` (or `__fp4`).
//!
//! `ft`: one tensor for each part of `quant::QMatrix`, `NAME.codes` and so on; `NAME.format` contains the format as text,
//! for example `int4:64`, padded with spaces.

mod finite;
mod grid;
mod kept_modules;
mod other;
mod settings;
mod unpack;
mod wide;

pub(crate) use finite::StoredNumbers;
pub use kept_modules::kept_modules;
pub use other::ToolLayout;
pub use settings::check as check_config;

use super::ParamInfo;
use crate::base::{Error, Result, progress};
use crate::formats::StoredDtype;
use crate::formats::weights::Weights;
use crate::formats::writer::{TensorPlan, Values, write_file};
use crate::ops::Dtype;
use crate::quant::{self, Format, QDATA, QMatrix};
use serde_json::{Value, json};
use std::path::Path;

const STATE: &str = "quant_state.bitsandbytes__nf4";
const FP4_STATE: &str = "quant_state.bitsandbytes__fp4";
/// Bytes of the bitsandbytes JSON, padded: its offset is known only after the weight is quantized.
const STATE_BYTES: usize = 320;
const FORMAT: &str = "format";
const FORMAT_BYTES: usize = 16;

/// The layout of quantized weights in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuantizedLayout {
    /// The parts of `quant`.
    Ft,
    /// The tensors of bitsandbytes, 4 bits.
    Bitsandbytes,
    /// The tensors of another tool; read only.
    Other(ToolLayout),
}

/// Returns layout and format of a parameter that is quantized in the files, or `None`.
///
/// # Errors
/// A format that ft does not support.
pub fn find(weights: &Weights, name: &str) -> Result<Option<(QuantizedLayout, Format)>> {
    for (suffix, floats) in [(STATE, false), (FP4_STATE, true)] {
        let state = format!("{name}.{suffix}");
        if weights.info(&state).is_none() {
            continue;
        }
        let format = |double| {
            if floats {
                Format::Fp4 { double }
            } else {
                Format::Nf4 { double }
            }
        };
        let double = weights.info(&format!("{name}.nested_absmax")).is_some();
        return Ok(Some(match wide::block(&weights.read_bytes(&state)?) {
            Some(block) => (QuantizedLayout::Other(ToolLayout::Bitsandbytes4(block)), format(false)),
            None => (QuantizedLayout::Bitsandbytes, format(double)),
        }));
    }
    let tag = format!("{name}.{FORMAT}");
    if weights.info(&tag).is_none() {
        let other = other::find(weights, name)?;
        return Ok(other.map(|(tool, format)| (QuantizedLayout::Other(tool), format)));
    }
    let bytes = weights.read_bytes(&tag)?;
    let text = String::from_utf8_lossy(&bytes).trim_end().to_string();
    match Format::from_tag(&text) {
        Some(format) => Ok(Some((QuantizedLayout::Ft, format))),
        None => Err(
            Error::unsupported("a weight is stored in a format that ft does not support")
                .at(name)
                .found(text)
                .expected(Format::ALL.map(Format::tag).join(", ")),
        ),
    }
}

/// The names of the tensors that hold a quantized parameter; also of those that are missing.
pub fn names(
    weights: &Weights,
    layout: QuantizedLayout,
    format: Format,
    name: &str,
    dims: (usize, usize),
) -> Vec<String> {
    match layout {
        QuantizedLayout::Other(tool) => other::names(weights, tool, name),
        _ => tensors(layout, format, name, dims)
            .into_iter()
            .map(|t| t.name)
            .collect(),
    }
}

/// Rows and columns of a quantized weight as its tensors say them. `None`: they do not.
///
/// # Errors
/// A failed read.
pub fn dims(weights: &Weights, name: &str, layout: QuantizedLayout) -> Result<Option<(usize, usize)>> {
    let Some(info) = weights.info(name) else {
        return Ok(None);
    };
    match layout {
        QuantizedLayout::Bitsandbytes | QuantizedLayout::Other(ToolLayout::Bitsandbytes4(_)) => {
            let states = [STATE, FP4_STATE].map(|state| format!("{name}.{state}"));
            let Some(state) = states.iter().find(|state| weights.info(state).is_some()) else {
                return Ok(None);
            };
            let state: Value = serde_json::from_slice(&weights.read_bytes(state)?).unwrap_or_default();
            let side = |i: usize| state["shape"].get(i).and_then(Value::as_u64).map(|n| n as usize);
            let fits = |(rows, columns): &(usize, usize)| {
                let codes = rows.checked_mul(*columns).map(|n| n.div_ceil(2) as u64);
                codes == Some(info.bytes)
            };
            Ok(side(0).zip(side(1)).filter(fits))
        }
        QuantizedLayout::Other(ToolLayout::Bitsandbytes8 | ToolLayout::Plain(_)) => match info.shape.as_slice() {
            &[rows, columns] => Ok(Some((rows, columns))),
            _ => Ok(None),
        },
        _ => Ok(None),
    }
}

/// The tensors that hold a quantized parameter `[rows, columns]` in a layout that ft writes.
pub fn tensors(
    layout: QuantizedLayout,
    format: Format,
    name: &str,
    (rows, columns): (usize, usize),
) -> Vec<TensorPlan> {
    let plan = |name: String, dtype, shape: &[usize]| TensorPlan {
        name,
        dtype,
        shape: shape.to_vec(),
    };
    let mut all: Vec<TensorPlan> = Vec::new();
    for (part, bytes) in format.parts(rows, columns) {
        let tensor = tensor_name(layout, name, part);
        let Some(tensor) = tensor else { continue };
        let groups = columns.div_ceil(format.group(columns));
        all.push(match (part, format) {
            (QDATA, Format::Nf4 { .. } | Format::Fp4 { .. }) if layout == QuantizedLayout::Bitsandbytes => {
                plan(tensor, StoredDtype::U8, &[bytes, 1])
            }
            (QDATA, Format::Nf4 { .. }) => plan(tensor, StoredDtype::U8, &[bytes]),
            (QDATA, _) => plan(tensor, StoredDtype::U8, &[rows, format.stride(columns)]),
            ("scales", Format::Int4 { .. }) => plan(tensor, StoredDtype::U32, &[rows, groups]),
            ("scales", _) => plan(tensor, StoredDtype::F32, &[rows, groups]),
            ("absmax", Format::Nf4 { double: true } | Format::Fp4 { double: true }) => {
                plan(tensor, StoredDtype::U8, &[bytes])
            }
            _ => plan(tensor, StoredDtype::F32, &[bytes / 4]),
        });
    }
    match layout {
        QuantizedLayout::Ft => all.push(plan(format!("{name}.{FORMAT}"), StoredDtype::U8, &[FORMAT_BYTES])),
        QuantizedLayout::Other(_) => {}
        QuantizedLayout::Bitsandbytes => {
            all.push(plan(format!("{name}.quant_map"), StoredDtype::F32, &[16]));
            if matches!(format, Format::Nf4 { double: true } | Format::Fp4 { double: true }) {
                all.push(plan(format!("{name}.nested_quant_map"), StoredDtype::F32, &[256]));
            }
            let state = if matches!(format, Format::Fp4 { .. }) {
                FP4_STATE
            } else {
                STATE
            };
            all.push(plan(format!("{name}.{state}"), StoredDtype::U8, &[STATE_BYTES]));
        }
    }
    all
}

/// Name of the tensor of a part; `None` for the offset of bitsandbytes, which is in the JSON.
fn tensor_name(layout: QuantizedLayout, name: &str, part: &str) -> Option<String> {
    match (layout, part) {
        (QuantizedLayout::Bitsandbytes, QDATA) => Some(name.to_string()),
        (QuantizedLayout::Bitsandbytes, "nested_offset") => None,
        _ => Some(format!("{name}.{part}")),
    }
}

/// Returns the bytes of the tensor `plan` of the quantized parameter `name`.
///
/// # Errors
/// A tensor that `tensors` does not list.
pub fn bytes(layout: QuantizedLayout, quantized: &QMatrix, name: &str, plan: &TensorPlan) -> Result<Vec<u8>> {
    let rest = plan.name.strip_prefix(name).unwrap_or_default().trim_start_matches('.');
    let padded = |text: String, len: usize| {
        let mut bytes = text.into_bytes();
        bytes.resize(len.max(bytes.len()), b' ');
        bytes
    };
    let floats = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let (table, nested) = quant::tables();
    match rest {
        FORMAT => Ok(padded(quantized.format().tag(), FORMAT_BYTES)),
        STATE => Ok(padded(state(quantized).to_string(), STATE_BYTES)),
        "quant_map" => Ok(floats(&table)),
        "nested_quant_map" => Ok(floats(&nested)),
        _ => {
            let mut parts = quantized.parts().into_iter();
            let found = parts.find(|p| tensor_name(layout, name, p.name).as_deref() == Some(plan.name.as_str()));
            let found = found.map(|p| p.bytes.into_owned());
            found.ok_or_else(|| Error::format("a quantized weight does not have this tensor").at(&plan.name))
        }
    }
}

/// The name in torch.
fn dtype_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "float32",
        Dtype::Bf16 => "bfloat16",
        Dtype::F16 => "float16",
    }
}

/// The quantization state of a weight, as bitsandbytes expects it.
fn state(quantized: &QMatrix) -> Value {
    let (rows, columns) = quantized.dims();
    let dtype = dtype_name(quantized.dequantized_dtype());
    let mut state = json!({"quant_type": "nf4", "blocksize": 64, "dtype": dtype, "shape": [rows, columns]});
    if let Some(offset) = quantized.parts().into_iter().find(|p| p.name == "nested_offset") {
        let offset = offset.bytes.as_ref().try_into().map_or(0.0, f32::from_le_bytes);
        state["nested_blocksize"] = json!(256);
        state["nested_dtype"] = json!("float32");
        state["nested_offset"] = json!(f64::from(offset));
    }
    state
}

/// Reads a quantized parameter in the layout and format returned by `find`.
///
/// # Errors
/// A tensor whose size does not match the shape; a block size or a table that is not NF4's.
pub fn read(
    weights: &Weights,
    p: &ParamInfo,
    layout: QuantizedLayout,
    format: Format,
    dequantized_dtype: Dtype,
) -> Result<QMatrix> {
    CheckedParam::new(weights, p, layout, format)?.read(weights, p, dequantized_dtype)
}

/// A quantized parameter of the files whose description was checked, so that it can be read many times.
pub(super) struct CheckedParam {
    layout: QuantizedLayout,
    format: Format,
    /// The offset of the absmax codes of bitsandbytes.
    offset: Option<f64>,
}

impl CheckedParam {
    /// Errors: as `read`, except for sizes.
    pub(super) fn new(weights: &Weights, p: &ParamInfo, layout: QuantizedLayout, format: Format) -> Result<Self> {
        let offset = match layout {
            QuantizedLayout::Ft | QuantizedLayout::Other(_) => None,
            QuantizedLayout::Bitsandbytes => check_state(weights, p, format, matrix(p)?, 64)?,
        };
        Ok(Self { layout, format, offset })
    }

    pub(super) fn read(&self, weights: &Weights, p: &ParamInfo, dequantized_dtype: Dtype) -> Result<QMatrix> {
        if let QuantizedLayout::Other(tool) = self.layout {
            return other::read(weights, p, matrix(p)?, tool, self.format, dequantized_dtype);
        }
        let take = |part: &str| match (tensor_name(self.layout, &p.name, part), self.offset) {
            (Some(tensor), _) => weights.read_bytes(&tensor),
            (None, Some(offset)) => Ok((offset as f32).to_le_bytes().to_vec()),
            (None, None) => Err(Error::format("`nested_offset` is missing")),
        };
        QMatrix::from_parts(self.format, matrix(p)?, dequantized_dtype, take).map_err(|e| e.or_at(&*p.name))
    }
}

fn matrix(p: &ParamInfo) -> Result<(usize, usize)> {
    match p.shape.as_slice() {
        &[rows, columns] => Ok((rows, columns)),
        _ => Err(Error::format("only a matrix can be quantized").at(&*p.name)),
    }
}

/// Checks the quantization state; returns the offset of the absmax codes, if any.
fn check_state(
    weights: &Weights,
    p: &ParamInfo,
    format: Format,
    (rows, columns): (usize, usize),
    block: usize,
) -> Result<Option<f64>> {
    let floats = matches!(format, Format::Fp4 { .. });
    let place = format!("{}.{}", p.name, if floats { FP4_STATE } else { STATE });
    let bad = |what: &str, found: String| Error::format(what).at(&place).found(found);
    let state: Value = serde_json::from_slice(&weights.read_bytes(&place)?).map_err(|e| {
        Error::format("the quantization state of this weight (`quant_state` of bitsandbytes) is not valid JSON")
            .at(&place)
            .cause(e)
    })?;
    let is = |key: &str, value: Value| state.get(key).is_none_or(|v| *v == value);
    if !is("quant_type", json!(format.name())) || !is("blocksize", json!(block)) || !is("nested_blocksize", json!(256))
    {
        return Err(
            bad("this kind of 4-bit weight is not supported", state.to_string()).expected(format!(
                "{} in blocks of 64 to 4096, a power of two, their absmax in blocks of 256",
                format.name()
            )),
        );
    }
    if !is("shape", json!([rows, columns])) {
        return Err(bad("config.json and the weights are inconsistent", state.to_string())
            .expected(format!("shape [{rows}, {columns}]")));
    }
    let (mut table, nested) = quant::tables();
    if floats {
        table = crate::ops::quantized::FP4_TABLE;
    }
    for (map, own) in [("quant_map", table.as_slice()), ("nested_quant_map", nested.as_slice())] {
        let name = format!("{}.{map}", p.name);
        if weights.info(&name).is_none() {
            continue;
        }
        let theirs = weights.read_f32(&name)?;
        if theirs.len() != own.len() || theirs.iter().zip(own).any(|(a, b)| (a - b).abs() > 1e-6) {
            return Err(
                bad("the value table of a 4-bit weight is not that of bitsandbytes", name).expected(format.name()),
            );
        }
    }
    Ok(state.get("nested_offset").and_then(Value::as_f64))
}

/// The `quantization_config` of `config.json` for a directory whose projections have these `formats`. `kept`: for
/// bitsandbytes, the modules that are not quantized (`kept_modules`).
pub fn config(layout: QuantizedLayout, formats: &[Format], dequantized_dtype: Dtype, kept: &[String]) -> Value {
    match layout {
        QuantizedLayout::Ft | QuantizedLayout::Other(_) => {
            let mut names: Vec<String> = formats.iter().map(|f| f.tag()).collect();
            names.sort();
            names.dedup();
            json!({"quant_method": "ft", "formats": names})
        }
        QuantizedLayout::Bitsandbytes => json!({
            "quant_method": "bitsandbytes",
            "load_in_4bit": true,
            "load_in_8bit": false,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": formats.contains(&Format::Nf4 { double: true }),
            "bnb_4bit_compute_dtype": dtype_name(dequantized_dtype),
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": kept,
        }),
    }
}

/// Writes all parameters to one file, the quantized ones dequantized to `dtype`.
///
/// # Errors
/// As `read`; the file cannot be written.
pub fn write_dequantized(weights: &Weights, params: &[ParamInfo], dtype: Dtype, path: &Path) -> Result<()> {
    let stored = match dtype {
        Dtype::F32 => StoredDtype::F32,
        Dtype::Bf16 => StoredDtype::Bf16,
        Dtype::F16 => StoredDtype::F16,
    };
    let mut plans = Vec::new();
    for p in params {
        let dtype = match find(weights, &p.name)? {
            Some(_) => stored,
            None => weights.require(&p.name, &p.shape)?.dtype,
        };
        plans.push(TensorPlan {
            name: p.name.to_string(),
            dtype,
            shape: p.shape.clone(),
        });
    }
    let phase = progress::phase(
        "dequantizing the model",
        params.iter().map(|p| p.elements()).sum::<usize>(),
        "parameters",
    );
    let mut params = params.iter();
    write_file(path, &plans, &[], |_, sink| {
        let Some(p) = params.next() else { return Ok(()) };
        phase.add(p.elements() as u64);
        match values(weights, p)? {
            Some(dequantized) => sink(Values::F32(&dequantized)),
            None => sink(Values::Raw(&weights.read_bytes(&p.name)?)),
        }
    })?;
    Ok(())
}

/// The values of a quantized parameter of the files, f32 `[rows · columns]`; `None`: it is not quantized.
///
/// # Errors
/// As `read`.
pub fn values(weights: &Weights, p: &ParamInfo) -> Result<Option<Vec<f32>>> {
    match find(weights, &p.name)? {
        Some((layout, format)) => Ok(Some(read(weights, p, layout, format, Dtype::F32)?.dequantize())),
        None => Ok(None),
    }
}
