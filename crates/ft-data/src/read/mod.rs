//! Reads files to rows: jsonl, json, csv, parquet. A row is a JSON object with its place.
//! Rows are passed on one at a time; no reader holds all rows of a file.

mod json;
mod parquet;
mod table;

#[cfg(test)]
mod tests;

use ft_base::{Error, Result, files, progress};
use serde_json::{Map, Value};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// Largest row in bytes: a longer one is a file without line breaks, not a row.
pub(crate) const MAX_ROW_BYTES: usize = 64 << 20;

/// Position of a row in its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowPosition {
    /// The path of the file.
    pub file: Arc<str>,
    /// The line or row, from 1.
    pub number: u64,
    /// True if the number counts lines (from 1), false if it counts rows (from 1).
    pub is_line: bool,
}

impl fmt::Display for RowPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RowPosition { file, number, is_line } = self;
        match is_line {
            true => write!(f, "{file}:{number}"),
            false => write!(f, "{file}:row {number}"),
        }
    }
}

/// One row with its original fields.
#[derive(Debug, Clone)]
pub struct Row {
    /// The columns and their values.
    pub fields: Map<String, Value>,
    /// Position in the file.
    pub place: RowPosition,
}

impl Row {
    /// Converts a value that must be an object. Errors: it is not.
    fn new(value: Value, place: RowPosition) -> Result<Self> {
        match value {
            Value::Object(fields) => Ok(Self { fields, place }),
            other => Err(Error::format("the row is not an object")
                .at(&place)
                .found(format!("{}: {}", kind(&other), clip(&other.to_string())))
                .expected("an object such as {\"text\": \"...\"}")
                .hint("write one JSON object per row; a .json file may contain one array of objects")),
        }
    }
}

/// Receives rows, and the errors of broken ones.
pub(crate) type Each<'a> = dyn FnMut(Result<Row>) -> Result<()> + 'a;

/// Passes each row of a file to `each`, in order. The extension selects the reader; `.json` may contain an array or
/// lines. A broken row is passed to `each` as an error (place, clipped row) if the rows after it can be read.
///
/// Errors: the file cannot be read, or not beyond a row; or `each` stops the reading.
pub(crate) fn read_rows(path: &str, each: &mut Each) -> Result<()> {
    let file = Path::new(path);
    let extension = file
        .extension()
        .map(|e| e.to_string_lossy().to_ascii_lowercase())
        .unwrap_or_default();
    if file.is_dir() {
        return Err(Error::format("this is a directory, not a data file")
            .at_path(file)
            .hint("name the files in `data::Spec::files`: `[\"a.jsonl\", \"b.jsonl\"]`"));
    }
    // Rows are tokenized between two reads.
    let phase = progress::bytes(progress::about("reading", file), files::size(file).unwrap_or(0));
    let open = || Ok::<_, Error>(phase.reader(files::open(file)?));
    match extension.as_str() {
        "jsonl" | "ndjson" => json::read_lines(path, open()?, each),
        "json" => json::read_json(path, open()?, each),
        "csv" => table::read_table(path, open()?, b',', each),
        "tsv" => table::read_table(path, open()?, b'\t', each),
        "parquet" => parquet::read_parquet(path, files::open(file)?, each),
        _ => Err(Error::unsupported("unknown kind of data file")
            .at_path(file)
            .found(match extension.as_str() {
                "" => "no extension".to_string(),
                e => format!("extension .{e}"),
            })
            .expected("jsonl, json, csv, tsv or parquet")
            .hint("convert the file, or unpack it first if it is compressed")),
    }
}

/// The kind of a JSON value, for messages.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// At most 80 characters of a row; control characters are replaced.
pub(super) fn clip(text: &str) -> String {
    let mut out: String = text
        .trim()
        .chars()
        .take(80)
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect();
    if text.trim().chars().nth(80).is_some() {
        out.push_str("...");
    }
    out
}

/// The error for a row that is not UTF-8.
pub(super) fn not_utf8(place: &RowPosition, bytes: &[u8], valid_up_to: usize) -> Error {
    let utf16 = bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]);
    let what = if utf16 { "UTF-16 text" } else { "bytes" };
    let hex: Vec<String> = bytes[valid_up_to..]
        .iter()
        .take(4)
        .map(|b| format!("{b:02x}"))
        .collect();
    Error::format("the row is not UTF-8 text")
        .at(format!("{place}:{}", valid_up_to + 1))
        .found(format!(
            "{what} {} in: {}",
            hex.join(" "),
            clip(&String::from_utf8_lossy(bytes))
        ))
        .expected("UTF-8")
        .hint("save the file as UTF-8")
}
