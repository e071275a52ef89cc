//! Writes safetensors. The header is known before the first element, so tensors are streamed through a small buffer and
//! a model is never in memory as a whole.
//!
//! A value that is not finite is an error: the file then does not appear under its name.

use crate::dtype::StoredDtype;
use crate::index::{INDEX, SINGLE};
use ft_base::{Error, Result, files, progress};
use half::{bf16, f16};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Default size limit of a shard that loaders expect, bytes.
pub const SHARD_BYTES: u64 = 5_000_000_000;

/// Elements converted at a time.
const PIECE: usize = 1 << 18;

/// A tensor to write.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorPlan {
    /// Name of the tensor.
    pub name: String,
    /// Number format in the file.
    pub dtype: StoredDtype,
    /// Sizes of the dimensions.
    pub shape: Vec<usize>,
}

impl TensorPlan {
    /// Stored bytes; `None` if the shape overflows.
    pub fn bytes(&self) -> Option<u64> {
        self.shape
            .iter()
            .try_fold(self.dtype.size() as u64, |n, &d| n.checked_mul(d as u64))
    }
}

/// Elements of (a part of) a tensor, in row-major order; converted to the plan's format during the write.
#[derive(Debug, Clone, Copy)]
pub enum Values<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// IEEE half precision.
    F16(&'a [f16]),
    /// Bytes already in the plan's format.
    Raw(&'a [u8]),
}

/// Writes one file: calls `fill` once per tensor, in order; it passes the elements to the sink in one or several
/// pieces. Returns the size of the file. The file appears at `path` only if there was no error.
///
/// # Errors
/// Any error of `fill`; a value that is not finite or not representable; more or fewer values than the shape has; a
/// file that cannot be written.
pub fn write_file(
    path: &Path,
    tensors: &[TensorPlan],
    metadata: &[(String, String)],
    mut fill: impl FnMut(&TensorPlan, &mut dyn FnMut(Values) -> Result<()>) -> Result<()>,
) -> Result<u64> {
    let refs: Vec<&TensorPlan> = tensors.iter().collect();
    write_one(path, &refs, metadata, &mut fill)
}

/// Writes `model.safetensors`, or shards of at most `shard_bytes` (a larger tensor gets its own) and
/// `model.safetensors.index.json`. Returns the files, the index last.
///
/// # Errors
/// As for `write_file`; two tensors of one name.
pub fn write_model(
    dir: &Path,
    tensors: &[TensorPlan],
    shard_bytes: u64,
    mut fill: impl FnMut(&TensorPlan, &mut dyn FnMut(Values) -> Result<()>) -> Result<()>,
) -> Result<Vec<PathBuf>> {
    let mut shards: Vec<Vec<&TensorPlan>> = Vec::new();
    let (mut room, mut total) = (0u64, 0u64);
    for t in tensors {
        let bytes = size_of(t)?;
        total += bytes;
        if shards.is_empty() || bytes > room {
            shards.push(Vec::new());
            room = shard_bytes;
        }
        room = room.saturating_sub(bytes);
        if let Some(last) = shards.last_mut() {
            last.push(t);
        }
    }
    if shards.len() <= 1 {
        let path = dir.join(SINGLE);
        write_one(&path, shards.first().map_or(&[], Vec::as_slice), &[], &mut fill)?;
        return Ok(vec![path]);
    }
    let mut out = Vec::new();
    let mut map = Map::new();
    for (i, shard) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
        let path = dir.join(&name);
        write_one(&path, shard, &[], &mut fill)?;
        for t in shard {
            map.insert(t.name.clone(), Value::String(name.clone()));
        }
        out.push(path);
    }
    map.sort_keys();
    let index = json!({"metadata": {"total_size": total}, "weight_map": map});
    let text = serde_json::to_string_pretty(&index).map_err(|e| Error::internal("cannot write the index").cause(e))?;
    let path = dir.join(INDEX);
    files::write_atomic(&path, format!("{text}\n").as_bytes())?;
    out.push(path);
    Ok(out)
}

/// Checks that a file can have these tensors, without writing it. Returns its size in bytes.
///
/// # Errors
/// Two tensors of one name; a shape that overflows.
pub fn rehearse(path: &Path, tensors: &[TensorPlan]) -> Result<u64> {
    let all: Vec<&TensorPlan> = tensors.iter().collect();
    let head = header(&all, &[], path)?.len() as u64;
    tensors.iter().try_fold(head, |sum, t| Ok(sum + size_of(t)?))
}

fn size_of(t: &TensorPlan) -> Result<u64> {
    t.bytes().ok_or_else(|| {
        Error::shape(format!("tensor `{}` has a shape that overflows", t.name)).found(format!("{:?}", t.shape))
    })
}

type Fill<'a> = &'a mut dyn FnMut(&TensorPlan, &mut dyn FnMut(Values) -> Result<()>) -> Result<()>;

fn write_one(path: &Path, tensors: &[&TensorPlan], metadata: &[(String, String)], fill: Fill) -> Result<u64> {
    let mut file = files::AtomicFile::create(path)?;
    let total = tensors.iter().filter_map(|t| t.bytes()).sum();
    let phase = progress::bytes(progress::about("writing", path), total);
    file.write(&header(tensors, metadata, path)?)?;
    for plan in tensors {
        let expected = size_of(plan)?;
        let before = file.written();
        let mut buffer = Vec::new();
        fill(plan, &mut |values| {
            let put = put(&mut file, plan, values, &mut buffer, before, expected);
            phase.set(file.written());
            put.map_err(|e| e.or_at(path.display()))
        })?;
        let written = file.written() - before;
        if written != expected {
            return Err(
                Error::internal(format!("tensor `{}` was not written completely", plan.name))
                    .at_path(path)
                    .found(format!("{written} bytes"))
                    .expected(format!("{expected} bytes for {} {:?}", plan.dtype, plan.shape)),
            );
        }
    }
    let written = file.written();
    file.commit()?;
    Ok(written)
}

/// Length word and JSON, padded with spaces so that the data starts at a multiple of 8.
fn header(tensors: &[&TensorPlan], metadata: &[(String, String)], path: &Path) -> Result<Vec<u8>> {
    let mut map = Map::new();
    let mut meta = Map::new();
    meta.insert("format".into(), "pt".into());
    for (key, value) in metadata {
        meta.insert(key.clone(), value.clone().into());
    }
    map.insert("__metadata__".into(), Value::Object(meta));
    let mut at = 0u64;
    for t in tensors {
        let end = at + size_of(t)?;
        let entry = json!({"dtype": t.dtype.name(), "shape": t.shape, "data_offsets": [at, end]});
        if map.insert(t.name.clone(), entry).is_some() {
            return Err(Error::internal(format!("tensor `{}` would be written twice", t.name)).at_path(path));
        }
        at = end;
    }
    let mut text = Value::Object(map).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.append(&mut text);
    Ok(out)
}

fn put(
    file: &mut files::AtomicFile,
    plan: &TensorPlan,
    values: Values,
    buffer: &mut Vec<u8>,
    before: u64,
    expected: u64,
) -> Result<()> {
    let done = (file.written() - before) / plan.dtype.size() as u64;
    let mut at = done as usize;
    let mut flush = |buffer: &mut Vec<u8>| -> Result<()> {
        if file.written() - before + buffer.len() as u64 > expected {
            return Err(Error::shape(format!(
                "tensor `{}` received more values than its shape has",
                plan.name
            ))
            .expected(format!("{} {:?}", plan.dtype, plan.shape)));
        }
        file.write(buffer)?;
        buffer.clear();
        Ok(())
    };
    macro_rules! convert {
        ($values:expr, $finite:expr, $to_f32:expr) => {
            for piece in $values.chunks(PIECE) {
                if let Some(i) = piece.iter().position(|x| !$finite(*x)) {
                    return Err(not_finite(plan, at + i));
                }
                encode(plan, piece.iter().map(|x| $to_f32(*x)), buffer, at)?;
                at += piece.len();
                flush(buffer)?;
            }
        };
    }
    match values {
        Values::F32(v) => convert!(v, f32::is_finite, |x: f32| x),
        Values::Bf16(v) => convert!(v, bf16::is_finite, bf16::to_f32),
        Values::F16(v) => convert!(v, f16::is_finite, f16::to_f32),
        Values::Raw(bytes) => {
            if let Some(i) = raw_not_finite(plan.dtype, bytes) {
                return Err(not_finite(plan, at + i));
            }
            for piece in bytes.chunks(PIECE * 8) {
                buffer.extend_from_slice(piece);
                flush(buffer)?;
            }
        }
    }
    Ok(())
}

/// Appends values in the format of the file.
///
/// # Errors
/// A value that is not finite or not representable.
pub(crate) fn append(plan: &TensorPlan, values: Values, out: &mut Vec<u8>) -> Result<()> {
    let at = out.len() / plan.dtype.size();
    let bad = |found: Option<usize>| found.map_or(Ok(()), |i| Err(not_finite(plan, at + i)));
    match values {
        Values::F32(v) => {
            bad(v.iter().position(|x| !x.is_finite()))?;
            encode(plan, v.iter().copied(), out, at)
        }
        Values::Bf16(v) => {
            bad(v.iter().position(|x| !x.is_finite()))?;
            encode(plan, v.iter().map(|x| x.to_f32()), out, at)
        }
        Values::F16(v) => {
            bad(v.iter().position(|x| !x.is_finite()))?;
            encode(plan, v.iter().map(|x| x.to_f32()), out, at)
        }
        Values::Raw(bytes) => {
            bad(raw_not_finite(plan.dtype, bytes))?;
            out.extend_from_slice(bytes);
            Ok(())
        }
    }
}

/// Appends the elements in the plan's format; a finite value may still be too large for f16 or bf16.
fn encode(plan: &TensorPlan, values: impl Iterator<Item = f32>, out: &mut Vec<u8>, at: usize) -> Result<()> {
    let mut lost = None;
    match plan.dtype {
        StoredDtype::F32 => values.for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
        StoredDtype::F64 => values.for_each(|x| out.extend_from_slice(&f64::from(x).to_le_bytes())),
        StoredDtype::Bf16 => values.enumerate().for_each(|(i, x)| {
            let y = bf16::from_f32(x);
            if !y.is_finite() && lost.is_none() {
                lost = Some((i, x));
            }
            out.extend_from_slice(&y.to_le_bytes());
        }),
        StoredDtype::F16 => values.enumerate().for_each(|(i, x)| {
            let y = f16::from_f32(x);
            if !y.is_finite() && lost.is_none() {
                lost = Some((i, x));
            }
            out.extend_from_slice(&y.to_le_bytes());
        }),
        other => {
            return Err(
                Error::argument(format!("tensor `{}`: values cannot be written as {other}", plan.name))
                    .expected("F32, F16, BF16 or F64, or bytes in that format"),
            );
        }
    }
    match lost {
        None => Ok(()),
        Some((i, x)) => Err(Error::argument(format!(
            "tensor `{}` has a value that {} cannot represent",
            plan.name, plan.dtype
        ))
        .found(format!("{x} at position {}", at + i))
        .hint("save in f32 or bf16")),
    }
}

fn not_finite(plan: &TensorPlan, at: usize) -> Error {
    Error::non_finite(format!("tensor `{}` has a number that is not finite", plan.name))
        .found(format!("NaN or infinity at position {at}"))
        .hint("the training diverged: go back to an earlier checkpoint and lower the learning rate")
}

/// Index of the first value in raw bytes that is not finite.
fn raw_not_finite(dtype: StoredDtype, bytes: &[u8]) -> Option<usize> {
    match dtype {
        StoredDtype::F32 => bytes
            .as_chunks::<4>()
            .0
            .iter()
            .position(|b| !f32::from_le_bytes(*b).is_finite()),
        StoredDtype::F64 => bytes
            .as_chunks::<8>()
            .0
            .iter()
            .position(|b| !f64::from_le_bytes(*b).is_finite()),
        StoredDtype::Bf16 => bytes
            .as_chunks::<2>()
            .0
            .iter()
            .position(|b| !bf16::from_le_bytes(*b).is_finite()),
        StoredDtype::F16 => bytes
            .as_chunks::<2>()
            .0
            .iter()
            .position(|b| !f16::from_le_bytes(*b).is_finite()),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
