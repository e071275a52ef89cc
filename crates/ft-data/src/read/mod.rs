//! Reads files to rows: jsonl, json, csv, parquet, Arrow, text; text files also compressed. A row is a JSON object with its place.
//! Rows are passed on one at a time; no reader holds all rows of a file.

mod arrow;
mod json;
mod parquet;
mod table;
mod text;

#[cfg(test)]
mod tests;

use ft_base::units::beginning;
use ft_base::{Error, Result, files, named, progress};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fmt;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

/// Largest row in bytes: a longer one is a file without line breaks, not a row.
pub(crate) const MAX_ROW_BYTES: usize = 64 << 20;
/// Largest nesting depth of lists and structs in the columns of a table.
const MAX_DEPTH: usize = 64;

named!(
    /// The part of a text file (`.txt`, `.md`) that is a row.
    TextUnit {
        /// A line of `.txt`, all of `.md`.
        Auto = "auto",
        /// The whole file.
        File = "file",
        /// Each line that is not blank.
        Line = "line",
        /// Lines up to a blank one.
        Paragraph = "paragraph",
    }
);

/// Position of a row in its file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowPosition {
    /// The path of the file.
    #[serde(with = "shared_text")]
    pub file: Arc<str>,
    /// The line or row, from 1.
    pub number: u64,
    /// True if the number counts lines (from 1), false if it counts rows (from 1).
    pub is_line: bool,
}

mod shared_text {
    use super::Arc;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(text: &Arc<str>, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(text)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Arc<str>, D::Error> {
        String::deserialize(d).map(Arc::from)
    }
}

impl RowPosition {
    /// True if the file stores columns: its structs have the same fields in all rows, and are null where a row has none.
    pub(crate) fn is_columnar(&self) -> bool {
        let extension = self.file.rsplit_once('.').map_or("", |(_, extension)| extension);
        ["parquet", "arrow", "feather"]
            .iter()
            .any(|kind| extension.eq_ignore_ascii_case(kind))
    }
}

impl fmt::Display for RowPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RowPosition { file, number, is_line } = self;
        let unit = if *is_line { "" } else { "row " };
        write!(f, "{file}:{unit}{number}")
    }
}

/// One row with its original fields.
#[derive(Debug, Clone)]
pub struct Row {
    /// The columns and their values.
    pub fields: Map<String, Value>,
    /// Position in the file.
    pub place: RowPosition,
    /// Columns that are not read, because others are read in their place.
    pub rest: Map<String, Value>,
}

impl Row {
    fn of(fields: Map<String, Value>, place: RowPosition) -> Self {
        Self {
            fields,
            place,
            rest: Map::new(),
        }
    }

    /// All columns of the file's row, under their names in the file.
    pub(crate) fn columns(&self) -> Map<String, Value> {
        let mut all = self.fields.clone();
        all.extend(self.rest.clone());
        all
    }

    /// Converts a value that must be an object. Errors: it is not.
    fn new(value: Value, place: RowPosition) -> Result<Self> {
        match value {
            Value::Object(fields) => Ok(Self::of(fields, place)),
            other => Err(Error::format("the row is not an object")
                .at(&place)
                .found(format!("{}: {}", kind(&other), clip(&other.to_string())))
                .expected("an object such as {\"text\": \"...\"}")
                .hint("write one JSON object per row; a .json file may contain one array of objects")),
        }
    }
}

/// Receives rows, and the errors of broken ones.
pub(crate) type RowReceiver<'a> = dyn FnMut(Result<Row>) -> Result<()> + 'a;

/// Passes each row of a file to `each`, in order. The extension selects the reader; `.json` may contain an array or
/// lines; `.gz` and `.zst` behind it are decompressed. A broken row is passed to `each` as an error (place, clipped row)
/// if the rows after it can be read.
///
/// Errors: the file cannot be read, or not beyond a row; or `each` stops the reading.
pub(crate) fn read_rows(path: &str, unit: TextUnit, each: &mut RowReceiver) -> Result<()> {
    let file = Path::new(path);
    if file.is_dir() {
        return Err(Error::format("this is a directory, not a data file")
            .at_path(file)
            .hint("name the files in `data::Source::files`: `[\"a.jsonl\", \"b.jsonl\"]`"));
    }
    let name = file.file_name().map(|n| n.to_string_lossy().to_ascii_lowercase());
    let name = name.unwrap_or_default();
    let (name, compression) = match name.rsplit_once('.') {
        Some((inner, "gz")) => (inner, Some(Compression::Gzip)),
        Some((inner, "zst")) => (inner, Some(Compression::Zstd)),
        _ => (name.as_str(), None),
    };
    let extension = name.rsplit_once('.').map_or("", |(_, extension)| extension);
    // Rows are tokenized between two reads.
    let size = files::size(file).unwrap_or(0);
    let phase = progress::bytes(progress::about("reading", file), size);
    let open = || -> Result<Box<dyn Read + '_>> {
        let plain = phase.reader(files::open(file)?);
        Ok(match compression {
            None => Box::new(plain),
            Some(Compression::Gzip) => Box::new(flate2::read::MultiGzDecoder::new(plain)),
            Some(Compression::Zstd) => {
                let decoder = zstd::Decoder::new(plain);
                Box::new(decoder.map_err(|e| json::cannot_read(path, e))?)
            }
        })
    };
    match (extension, compression) {
        ("jsonl" | "ndjson", _) => json::read_lines(path, open()?, each),
        ("json", _) => json::read_json(path, open()?, each),
        ("csv", _) => table::read_csv(path, open()?, each),
        ("tsv", _) => table::read_table(path, open()?, b'\t', each),
        ("txt", _) => text::read_text(path, open()?, unit, each),
        ("md", _) => {
            let unit = match unit {
                TextUnit::Auto => TextUnit::File,
                unit => unit,
            };
            text::read_text(path, open()?, unit, each)
        }
        ("parquet", None) => parquet::read_parquet(path, files::open(file)?, each),
        ("arrow" | "feather", None) => arrow::read_arrow(path, files::open(file)?, size, &phase, each),
        _ => Err(Error::unsupported("unknown kind of data file")
            .at_path(file)
            .found(match extension {
                "" => "no extension".to_string(),
                e => format!("extension .{e}"),
            })
            .expected(format!(
                "{}; a text file may be compressed (.gz, .zst)",
                KINDS.join(", ")
            ))
            .hint("convert the file, or rename it if its extension is wrong")),
    }
}

/// File extensions of data files.
pub(crate) const KINDS: [&str; 10] = [
    "jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow", "feather", "txt", "md",
];

#[derive(Debug, Clone, Copy)]
enum Compression {
    Gzip,
    Zstd,
}

/// What `read_rows` takes from the name of a file: the extension, and that of the compression.
pub(crate) fn reader_of(path: &Path) -> String {
    let name = path.file_name().map(|n| n.to_string_lossy().to_ascii_lowercase());
    let name = name.unwrap_or_default();
    let (inner, compression) = match name.rsplit_once('.') {
        Some((inner, end @ ("gz" | "zst"))) => (inner, end),
        _ => (&*name, ""),
    };
    let extension = inner.rsplit_once('.').map_or("", |(_, extension)| extension);
    format!("{extension} {compression}")
}

/// True for the name of a file that `read_rows` reads.
pub fn is_data_file(path: &Path) -> bool {
    let name = path.file_name().map(|n| n.to_string_lossy().to_ascii_lowercase());
    let name = name.unwrap_or_default();
    let inner = name.strip_suffix(".gz").or(name.strip_suffix(".zst"));
    let kind = |name: &str| name.rsplit_once('.').map(|(_, kind)| kind.to_string());
    match (inner, kind(inner.unwrap_or(&name))) {
        (Some(_), Some(kind)) if ["parquet", "arrow", "feather"].contains(&kind.as_str()) => false,
        (_, Some(kind)) => KINDS.contains(&kind.as_str()),
        (_, None) => false,
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
    beginning(text.trim(), 80)
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
