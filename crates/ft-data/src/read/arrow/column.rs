//! The values of a record batch: buffers of bytes, and rows of them as JSON values.

use super::schema::{Field, StoredType};
use crate::read::MAX_ROW_BYTES;
use ft_base::{Error, Result};
use half::f16;
use serde_json::{Map, Number, Value};
use std::collections::BTreeMap;

/// Bytes of a row that a value counts, beside its text, and a field beside its name: a broken file can name one long list
/// many times.
const VALUE_BYTES: usize = 32;

/// The values of a column in a batch.
#[derive(Debug)]
pub(super) struct Column {
    pub kind: StoredType,
    pub length: usize,
    /// First a bit for each value that is not null (empty: no value is null), then the buffers that the type has.
    pub buffers: Vec<Vec<u8>>,
    pub children: Vec<Column>,
}

/// The parts of each dictionary, by its id.
pub(super) type Dictionaries = BTreeMap<i64, Vec<Column>>;

/// Reads the values of one row.
pub(super) struct RowReader<'a> {
    pub dictionaries: &'a Dictionaries,
    /// Bytes that the row may still have.
    left: usize,
}

fn outside() -> Error {
    Error::format("a value is outside of the stored bytes").hint("check that the file is complete, or save it again")
}

fn part(bytes: &[u8], at: usize, length: usize) -> Result<&[u8]> {
    let end = at.checked_add(length);
    end.and_then(|end| bytes.get(at..end)).ok_or_else(outside)
}

/// Integer `index` of a buffer, each of `size` bytes.
fn int(bytes: &[u8], size: usize, index: usize, signed: bool) -> Result<i128> {
    let found = part(bytes, index.checked_mul(size).ok_or_else(outside)?, size)?;
    let negative = signed && found.last().is_some_and(|byte| byte & 0x80 != 0);
    let mut all = [if negative { 0xff } else { 0 }; 16];
    all[..size].copy_from_slice(found);
    Ok(i128::from_le_bytes(all))
}

/// A position or a size.
fn place(bytes: &[u8], wide: bool, index: usize) -> Result<usize> {
    let number = int(bytes, if wide { 8 } else { 4 }, index, true)?;
    usize::try_from(number).map_err(|_| outside())
}

fn bit(bytes: &[u8], index: usize) -> Result<bool> {
    Ok(part(bytes, index / 8, 1)?[0] >> (index % 8) & 1 == 1)
}

impl Column {
    /// True if the buffers have bytes for all values, and no two lists share a value: then a batch has no more values than bits, so
    /// a small file cannot take much memory. `most_free`: the largest number of values that store no bytes.
    pub(super) fn is_backed(&self, most_free: usize) -> bool {
        self.length == 0 || self.has_bytes(most_free) && self.children.iter().all(|child| child.is_backed(most_free))
    }

    fn has_bytes(&self, most_free: usize) -> bool {
        let bytes = |n: usize| self.buffers.get(n).map_or(0, Vec::len);
        let holds = |n: usize, size: usize| self.length.checked_mul(size).is_some_and(|all| all <= bytes(n));
        let bits = self.length.div_ceil(8);
        let values = self.children.first().map_or(0, |child| child.length);
        let is_free = self.length <= most_free;
        let valid = bytes(0) == 0 || bits <= bytes(0);
        valid
            && match self.kind {
                StoredType::Null => is_free,
                StoredType::Bool => bits <= bytes(1),
                StoredType::Int { bytes, .. } | StoredType::Float { bytes } | StoredType::Decimal { bytes, .. } => {
                    holds(1, bytes)
                }
                StoredType::Bytes { wide } => self.offsets_rise(wide, bytes(2)),
                StoredType::FixedBytes(size) => holds(1, size) && (size > 0 || is_free),
                StoredType::View => holds(1, 16),
                StoredType::List { wide } => self.offsets_rise(wide, values),
                StoredType::Map => self.offsets_rise(false, values),
                StoredType::ListView { wide } => self.sizes_are_of(wide, values),
                StoredType::FixedList(size) => {
                    self.length.checked_mul(size).is_some_and(|all| all <= values) && (size > 0 || is_free)
                }
                StoredType::Struct => {
                    self.children.iter().all(|child| child.length >= self.length)
                        && (!self.children.is_empty() || is_free)
                }
            }
    }

    /// True if each value begins where the one before ends, and the last one ends at `end` or before.
    fn offsets_rise(&self, wide: bool, end: usize) -> bool {
        let Some(offsets) = self.buffers.get(1) else {
            return false;
        };
        let mut before = 0;
        (0..=self.length).all(|n| {
            place(offsets, wide, n).is_ok_and(|at| {
                let rises = at >= before && at <= end;
                before = at;
                rises
            })
        })
    }

    /// True if the sizes of the lists are plausible for this number of values. Lists of a view may share some values.
    fn sizes_are_of(&self, wide: bool, values: usize) -> bool {
        let Some(sizes) = self.buffers.get(2) else {
            return false;
        };
        let most = values.saturating_mul(16);
        let mut sum = 0_usize;
        (0..self.length).all(|n| {
            place(sizes, wide, n).is_ok_and(|size| {
                sum = sum.saturating_add(size);
                sum <= most
            })
        })
    }
}

impl<'a> RowReader<'a> {
    pub(super) fn new(dictionaries: &'a Dictionaries) -> Self {
        Self {
            dictionaries,
            left: MAX_ROW_BYTES,
        }
    }

    /// The values of these columns in a row. Errors: broken bytes, a text that is not UTF-8, a row that is too long.
    pub(super) fn object(&mut self, fields: &[Field], columns: &[Column], row: usize) -> Result<Map<String, Value>> {
        let one = |(field, column): (&Field, &Column)| {
            self.spend(VALUE_BYTES + field.name.len())?;
            let value = self.value(field, column, row);
            let value = value.map_err(|e| e.found(format!("column `{}`", field.name)))?;
            Ok((field.name.clone(), value))
        };
        fields.iter().zip(columns).map(one).collect()
    }

    fn spend(&mut self, bytes: usize) -> Result<()> {
        let left = self.left.checked_sub(bytes);
        self.left = left.ok_or_else(|| {
            Error::format("the row is too long")
                .expected(format!("at most {MAX_ROW_BYTES} bytes"))
                .hint("split its texts into several rows")
        })?;
        Ok(())
    }

    fn value(&mut self, field: &Field, column: &Column, row: usize) -> Result<Value> {
        self.spend(VALUE_BYTES)?;
        if row >= column.length {
            return Err(outside());
        }
        match column.buffers.first() {
            None => return Ok(Value::Null),
            Some(valid) if !valid.is_empty() && !bit(valid, row)? => return Ok(Value::Null),
            Some(_) => {}
        }
        let Some((id, StoredType::Int { bytes, signed })) = field.dictionary else {
            return self.plain(field, column, row);
        };
        let index = int(&column.buffers[1], bytes, row, signed)?;
        let mut index = usize::try_from(index).map_err(|_| outside())?;
        let dictionaries = self.dictionaries;
        for part in dictionaries.get(&id).into_iter().flatten() {
            if index < part.length {
                return match part.buffers.first() {
                    Some(valid) if valid.is_empty() || bit(valid, index)? => self.plain(field, part, index),
                    _ => Ok(Value::Null),
                };
            }
            index -= part.length;
        }
        Err(outside())
    }

    /// A value that is not null, without its dictionary.
    fn plain(&mut self, field: &Field, column: &Column, row: usize) -> Result<Value> {
        let buffer = |n: usize| column.buffers.get(n).map(Vec::as_slice).ok_or_else(outside);
        Ok(match field.kind {
            StoredType::Null => Value::Null,
            StoredType::Bool => bit(buffer(1)?, row)?.into(),
            StoredType::Int { bytes, signed } => number(int(buffer(1)?, bytes, row, signed)?),
            StoredType::Float { bytes } => {
                // The bits of the number, in the lower end.
                let bits = int(buffer(1)?, bytes, row, false)?;
                let value = match bytes {
                    2 => f16::from_bits(bits as u16).to_f64(),
                    4 => f32::from_bits(bits as u32).into(),
                    _ => f64::from_bits(bits as u64),
                };
                Number::from_f64(value).map_or(Value::Null, Value::Number)
            }
            StoredType::Decimal { bytes, scale } => Value::String(decimal(int(buffer(1)?, bytes, row, true)?, scale)),
            StoredType::Bytes { wide } => {
                let (first, end) = (place(buffer(1)?, wide, row)?, place(buffer(1)?, wide, row + 1)?);
                self.text(part(buffer(2)?, first, end.checked_sub(first).ok_or_else(outside)?)?)?
            }
            StoredType::FixedBytes(size) => {
                let at = row.checked_mul(size).ok_or_else(outside)?;
                self.text(part(buffer(1)?, at, size)?)?
            }
            StoredType::View => {
                let view = part(buffer(1)?, row.checked_mul(16).ok_or_else(outside)?, 16)?;
                let length = place(view, false, 0)?;
                if length <= 12 {
                    self.text(&view[4..4 + length])?
                } else {
                    let texts = buffer(place(view, false, 2)?.checked_add(2).ok_or_else(outside)?)?;
                    self.text(part(texts, place(view, false, 3)?, length)?)?
                }
            }
            StoredType::List { wide } => {
                let (first, end) = (place(buffer(1)?, wide, row)?, place(buffer(1)?, wide, row + 1)?);
                Value::Array(self.list(field, column, first, end)?)
            }
            StoredType::ListView { wide } => {
                let (first, size) = (place(buffer(1)?, wide, row)?, place(buffer(2)?, wide, row)?);
                Value::Array(self.list(field, column, first, first.checked_add(size).ok_or_else(outside)?)?)
            }
            StoredType::FixedList(size) => {
                let first = row.checked_mul(size).ok_or_else(outside)?;
                Value::Array(self.list(field, column, first, first.checked_add(size).ok_or_else(outside)?)?)
            }
            StoredType::Struct => Value::Object(self.object(&field.children, &column.children, row)?),
            StoredType::Map => {
                let (first, end) = (place(buffer(1)?, false, row)?, place(buffer(1)?, false, row + 1)?);
                let mut out = Map::new();
                for entry in self.list(field, column, first, end)? {
                    let Value::Object(pair) = entry else { continue };
                    let mut pair = pair.into_iter().map(|(_, value)| value);
                    let key = match pair.next() {
                        Some(Value::String(key)) => key,
                        key => key.unwrap_or_default().to_string(),
                    };
                    out.insert(key, pair.next().unwrap_or_default());
                }
                Value::Object(out)
            }
        })
    }

    fn list(&mut self, field: &Field, column: &Column, first: usize, end: usize) -> Result<Vec<Value>> {
        let (Some(of), Some(values)) = (field.children.first(), column.children.first()) else {
            return Err(outside());
        };
        if first > end || end > values.length {
            return Err(outside());
        }
        (first..end).map(|row| self.value(of, values, row)).collect()
    }

    fn text(&mut self, bytes: &[u8]) -> Result<Value> {
        self.spend(bytes.len())?;
        let text = std::str::from_utf8(bytes).map_err(|_| {
            Error::format("the value is not UTF-8 text")
                .expected("text")
                .hint("remove the column, or check that the file is complete")
        })?;
        Ok(Value::String(text.to_string()))
    }
}

fn number(n: i128) -> Value {
    match (i64::try_from(n), u64::try_from(n)) {
        (Ok(n), _) => n.into(),
        (_, Ok(n)) => n.into(),
        _ => Value::Null,
    }
}

/// A number with `scale` digits after the point.
fn decimal(n: i128, scale: i32) -> String {
    let scale = usize::try_from(scale).unwrap_or(0).min(64);
    let digits = format!("{:0>width$}", n.unsigned_abs(), width = scale + 1);
    let (whole, rest) = digits.split_at(digits.len() - scale);
    let sign = if n < 0 { "-" } else { "" };
    match rest {
        "" => format!("{sign}{whole}"),
        rest => format!("{sign}{whole}.{rest}"),
    }
}
