//! 4-bit weights of bitsandbytes in blocks larger than 64: the absmax of a block is that of each 64 elements in it. A nested absmax is
//! dequantized, because its own blocks would not be those of the parts.

use super::{check_state, quant};
use crate::base::{Error, Result};
use crate::formats::weights::Weights;
use crate::ops::Dtype;
use crate::ops::quantized::{BLOCK, NESTED};
use crate::quant::{Format, QDATA, QMatrix};
use crate::source::ParamInfo;
use serde_json::Value;

/// The block of a quantization state, if it is a larger one.
pub(super) fn block(state: &[u8]) -> Option<usize> {
    let state: Value = serde_json::from_slice(state).ok()?;
    let block = state.get("blocksize")?.as_u64()?;
    [128, 256, 512, 1024, 2048, 4096]
        .into_iter()
        .find(|b| *b as u64 == block)
}

/// The tensors of a weight.
pub(super) fn names(weights: &Weights, name: &str) -> Vec<String> {
    let rest = [
        "quant_map",
        "nested_absmax",
        "nested_quant_map",
        super::STATE,
        super::FP4_STATE,
    ];
    let rest = rest.map(|suffix| format!("{name}.{suffix}"));
    let mut found = vec![name.to_string(), format!("{name}.absmax")];
    found.extend(rest.into_iter().filter(|n| weights.info(n).is_some()));
    found
}

/// Reads a weight in blocks of `block`.
pub(super) fn read(
    weights: &Weights,
    p: &ParamInfo,
    (rows, columns): (usize, usize),
    format: Format,
    block: usize,
    dequantized_dtype: Dtype,
) -> Result<QMatrix> {
    let offset = check_state(weights, p, format, (rows, columns), block)?;
    let blocks = (rows * columns).div_ceil(block);
    let absmax_name = format!("{}.absmax", p.name);
    let nested_name = format!("{}.nested_absmax", p.name);
    let absmax: Vec<f32> = if weights.info(&nested_name).is_some() {
        let offset = offset.ok_or_else(|| Error::format("`nested_offset` is missing").at(&*p.name))? as f32;
        let (codes, nested) = (weights.read_bytes(&absmax_name)?, weights.read_f32(&nested_name)?);
        if nested.len() != codes.len().div_ceil(NESTED) {
            return Err(wrong(&nested_name, nested.len(), codes.len().div_ceil(NESTED)));
        }
        let table = quant::tables().1;
        let parts = codes.chunks(NESTED).zip(&nested);
        parts
            .flat_map(|(codes, scale)| codes.iter().map(move |c| table[usize::from(*c)] * scale + offset))
            .collect()
    } else {
        weights.read_f32(&absmax_name)?
    };
    if absmax.len() != blocks {
        return Err(wrong(&absmax_name, absmax.len(), blocks));
    }
    let parts = (rows * columns).div_ceil(BLOCK);
    let absmax: Vec<u8> = (0..parts)
        .flat_map(|part| absmax[part * BLOCK / block].to_le_bytes())
        .collect();
    QMatrix::from_parts(format, (rows, columns), dequantized_dtype, |part| match part {
        QDATA => weights.read_bytes(&p.name),
        _ => Ok(absmax.clone()),
    })
    .map_err(|e| e.or_at(&*p.name))
}

fn wrong(name: &str, found: usize, expected: usize) -> Error {
    Error::shape(format!("tensor `{name}` does not fit its quantized weight"))
        .found(format!("{found} values"))
        .expected(format!("{expected}"))
}
