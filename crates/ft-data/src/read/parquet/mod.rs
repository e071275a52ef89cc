//! Reads parquet with the record interface: nested lists and structs become JSON values.

mod budget;
mod limits;
mod schema;
mod thrift;

use super::{MAX_DEPTH, Row, RowPosition, RowReceiver};
use ft_base::{Error, Result, catch_panic, progress};
use limits::CheckedFile;
use parquet::file::reader::FileReader;
use parquet::record::{Field, Row as Record};
use serde_json::{Map, Number, Value};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

pub(super) fn read_parquet(path: &str, file: File, each: &mut RowReceiver) -> Result<()> {
    let mut place = RowPosition {
        file: Arc::from(path),
        number: 0,
        is_line: false,
    };
    let reader = guarded(path, || CheckedFile::open(file))?;
    let rows = usize::try_from(reader.metadata().file_metadata().num_rows()).unwrap_or(0);
    let phase = progress::phase(progress::about("reading", Path::new(path)), rows, "rows");
    let mut records = guarded(path, || reader.get_row_iter(None))?;
    loop {
        phase.set(place.number);
        place.number += 1;
        let Some(record) = guarded(&place.to_string(), || records.next().transpose())? else {
            return Ok(());
        };
        let fields = object(record, 0).map_err(|e| e.or_at(&place));
        each(fields.map(|fields| Row::of(fields, place.clone())))?;
    }
}

/// The decoder panics on some broken files and on unsupported types: both are faults of the input.
fn guarded<T>(place: &str, f: impl FnOnce() -> parquet::errors::Result<T>) -> Result<T> {
    let broken = || {
        Error::format("cannot read the parquet data")
            .at(place)
            .hint("check that the file is complete, or convert it to .jsonl")
    };
    match catch_panic(f) {
        Some(result) => result.map_err(|e| broken().cause(e)),
        None => Err(broken().cause("the decoder found a type or a value that it does not support")),
    }
}

fn object(record: Record, depth: usize) -> Result<Map<String, Value>> {
    record
        .into_columns()
        .into_iter()
        .map(|(name, field)| {
            let value = json(field, depth + 1).map_err(|e| e.found(format!("column `{name}`")))?;
            Ok((name, value))
        })
        .collect()
}

fn json(field: Field, depth: usize) -> Result<Value> {
    if depth > MAX_DEPTH {
        return Err(Error::format(format!("values are nested more than {MAX_DEPTH} deep")));
    }
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(b) => Value::Bool(b),
        Field::Byte(n) => n.into(),
        Field::Short(n) => n.into(),
        Field::Int(n) => n.into(),
        Field::Long(n) => n.into(),
        Field::UByte(n) => n.into(),
        Field::UShort(n) => n.into(),
        Field::UInt(n) => n.into(),
        Field::ULong(n) => n.into(),
        Field::Float16(x) => number(x.to_f64()),
        Field::Float(x) => number(x.into()),
        Field::Double(x) => number(x),
        Field::Str(s) => Value::String(s),
        // Some writers store text without marking it as text.
        Field::Bytes(bytes) => match std::str::from_utf8(bytes.data()) {
            Ok(text) => Value::String(text.to_string()),
            Err(_) => return Err(Error::format("binary data is not UTF-8 text").expected("text")),
        },
        Field::Group(record) => Value::Object(object(record, depth)?),
        Field::ListInternal(list) => Value::Array(
            list.elements()
                .iter()
                .map(|f| json(f.clone(), depth + 1))
                .collect::<Result<_>>()?,
        ),
        Field::MapInternal(map) => {
            let mut out = Map::new();
            for (key, value) in map.entries() {
                let key = match json(key.clone(), depth + 1)? {
                    Value::String(s) => s,
                    other => other.to_string(),
                };
                out.insert(key, json(value.clone(), depth + 1)?);
            }
            Value::Object(out)
        }
        // Dates, times and decimals are not training text; they use the library's own format.
        other => Value::String(other.to_string()),
    })
}

fn number(x: f64) -> Value {
    Number::from_f64(x).map_or(Value::Null, Value::Number)
}
