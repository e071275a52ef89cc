//! Reads csv and tsv with a header row. Every value is a string.

use super::json::BOM;
use super::{MAX_ROW_BYTES, Row, RowPosition, RowReceiver, clip, not_utf8};
use ft_base::{Error, Result};
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Cursor, Read};
use std::rc::Rc;
use std::sync::Arc;

/// Place of a byte in a cell, as the csv reader sees it.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum CellPlace {
    /// No byte of the cell yet.
    #[default]
    Start,
    /// In a text without quotes, or after its quotes.
    Plain,
    /// Inside quotes.
    Quoted,
    /// After a quote inside quotes: their end, or the first one of two.
    Quote,
}

impl CellPlace {
    fn after(self, byte: u8, delimiter: u8) -> Self {
        match (self, byte) {
            (Self::Quoted, b'"') => Self::Quote,
            (Self::Quoted, _) | (Self::Start | Self::Quote, b'"') => Self::Quoted,
            (_, b'\n' | b'\r') => Self::Start,
            _ if byte == delimiter => Self::Start,
            _ => Self::Plain,
        }
    }
}

/// What was seen of the bytes that are read. The csv reader itself takes an open quote up to the end of the file as one
/// text, reads rows of any size, and its line numbers are too small with CRLF and blank lines.
#[derive(Debug, Default)]
struct SeenBytes {
    /// Offset of a line break's byte, and whether it ends a line (`\n`, not the `\r` before it).
    breaks: VecDeque<(u64, bool)>,
    place: CellPlace,
    /// Offset of the first byte of the row.
    row: u64,
    /// The file has no more bytes.
    is_end: bool,
    /// The row is longer than `MAX_ROW_BYTES`.
    is_long: bool,
}

type Seen = Rc<RefCell<SeenBytes>>;

/// Passes bytes on, and records what they are.
struct SeenReader<R> {
    input: R,
    offset: u64,
    delimiter: u8,
    seen: Seen,
}

impl<R: Read> Read for SeenReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let n = self.input.read(buffer)?;
        let seen = &mut *self.seen.borrow_mut();
        seen.is_end = n == 0;
        for (at, &byte) in (self.offset..).zip(&buffer[..n]) {
            let is_break = byte == b'\n' || byte == b'\r';
            if is_break {
                seen.breaks.push_back((at, byte == b'\n'));
            }
            // The csv reader skips a byte order mark.
            if at < 3 && BOM.contains(&byte) {
                continue;
            }
            seen.place = seen.place.after(byte, self.delimiter);
            if is_break && seen.place == CellPlace::Start {
                seen.row = at + 1;
            }
        }
        self.offset += n as u64;
        if self.offset - seen.row > MAX_ROW_BYTES as u64 {
            seen.is_long = true;
            return Err(std::io::Error::other("the row is too long"));
        }
        Ok(n)
    }
}

/// Physical line (from 1) of the text at or after `offset`, after skipping line breaks; offsets must ascend.
fn line_at(seen: &Seen, line: &mut u64, mut offset: u64) -> u64 {
    let breaks = &mut seen.borrow_mut().breaks;
    while let Some(&(at, counts)) = breaks.front().filter(|(at, _)| *at <= offset) {
        breaks.pop_front();
        *line += u64::from(counts);
        offset += u64::from(at == offset);
    }
    *line
}

/// Most bytes of a header row.
const HEADER: u64 = 1 << 16;

/// Reads a csv file. Its columns are separated by commas, or by semicolons or tabs if the header row has no comma.
pub(super) fn read_csv(path: &str, file: impl Read, each: &mut RowReceiver) -> Result<()> {
    let mut input = BufReader::new(file);
    let mut header = Vec::new();
    let read = input.by_ref().take(HEADER).read_until(b'\n', &mut header);
    read.map_err(|e| super::json::cannot_read(path, e))?;
    let mut quoted = false;
    let mut counts = [(b',', 0), (b';', 0), (b'\t', 0)];
    for byte in &header {
        quoted ^= *byte == b'"';
        for (_, count) in counts.iter_mut().filter(|(c, _)| c == byte && !quoted) {
            *count += 1;
        }
    }
    let found = counts.into_iter().find(|(_, count)| *count > 0);
    let delimiter = found.map_or(b',', |(delimiter, _)| delimiter);
    read_table(path, Cursor::new(header).chain(input), delimiter, each)
}

pub(super) fn read_table(path: &str, file: impl Read, delimiter: u8, each: &mut RowReceiver) -> Result<()> {
    let seen = Seen::default();
    let mut reader = csv::ReaderBuilder::new()
        .delimiter(delimiter)
        .has_headers(false)
        .flexible(true)
        .buffer_capacity(1 << 18)
        .from_reader(SeenReader {
            input: file,
            offset: 0,
            delimiter,
            seen: seen.clone(),
        });
    let mut line = 1;
    let mut place = RowPosition {
        file: Arc::from(path),
        number: 1,
        is_line: true,
    };
    let mut record = csv::ByteRecord::new();
    let mut header: Option<Vec<String>> = None;
    loop {
        let more = reader.read_byte_record(&mut record);
        if !matches!(more, Ok(false))
            && let Some(position) = record.position()
        {
            place.number = line_at(&seen, &mut line, position.byte());
        }
        let (place_at_end, is_end, is_long) = {
            let seen = seen.borrow();
            (seen.place, seen.is_end, seen.is_long)
        };
        match more {
            Err(_) if is_long => {
                return Err(Error::format("the row is too long")
                    .at(&place)
                    .found(match place_at_end {
                        CellPlace::Quoted => format!("over {MAX_ROW_BYTES} bytes in quotes that are not closed"),
                        _ => format!("over {MAX_ROW_BYTES} bytes in one line"),
                    })
                    .expected("a row per line, and a quote at both ends of a text with line breaks")
                    .hint("close the quotes, or split the text over several rows"));
            }
            Err(e) => {
                return Err(Error::format("cannot read the table")
                    .at(&place)
                    .cause(e)
                    .hint("put a text with line breaks or quotes in double quotes, and double the quotes inside it"));
            }
            Ok(false) => return Ok(()),
            Ok(true) if is_end && place_at_end == CellPlace::Quoted => {
                let text = String::from_utf8_lossy(record.iter().next_back().unwrap_or_default());
                return Err(
                    Error::format("a quote opens a text and is not closed before the end of the file")
                        .at(&place)
                        .found(clip(&text))
                        .expected("a quote at both ends of the text")
                        .hint(
                            "close the quote; if the quote belongs to the text, put the text in quotes and double each quote \
                             inside: \"\"\"so\"\" it is\"",
                        ),
                );
            }
            Ok(true) => {}
        }
        let cells = cells(&record, &place);
        match &header {
            None => header = Some(check_header(cells?, &place)?),
            Some(names) => each(cells.and_then(|cells| Ok(Row::of(fields(names, cells, &place)?, place.clone()))))?,
        }
    }
}

fn cells(record: &csv::ByteRecord, place: &RowPosition) -> Result<Vec<String>> {
    record
        .iter()
        .map(|cell| match std::str::from_utf8(cell) {
            Ok(text) => Ok(text.to_string()),
            Err(e) => Err(not_utf8(place, cell, e.valid_up_to())),
        })
        .collect()
}

fn check_header(mut names: Vec<String>, place: &RowPosition) -> Result<Vec<String>> {
    for name in &mut names {
        *name = name.trim().trim_start_matches('\u{feff}').to_string();
    }
    for (i, name) in names.iter().enumerate() {
        if names[..i].contains(name) {
            return Err(Error::format(format!("two columns are named `{name}`"))
                .at(place)
                .found(clip(&names.join(",")))
                .expected("a header row with a different name for each column")
                .hint("the first line of a csv file names its columns, e.g. `prompt,completion`"));
        }
    }
    Ok(names)
}

fn fields(names: &[String], cells: Vec<String>, place: &RowPosition) -> Result<Map<String, Value>> {
    if names.len() != cells.len() {
        return Err(
            Error::format("the row and the header have different numbers of columns")
                .at(place)
                .found(format!("{} columns: {}", cells.len(), clip(&cells.join(","))))
                .expected(format!("{} columns: {}", names.len(), clip(&names.join(","))))
                .hint("put a text with commas in double quotes"),
        );
    }
    // As in pandas and Hugging Face datasets an empty cell has no value.
    let value = |cell: String| {
        if cell.is_empty() {
            Value::Null
        } else {
            Value::String(cell)
        }
    };
    Ok(names.iter().cloned().zip(cells.into_iter().map(value)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of rows, and the error that ended the reading.
    fn read(bytes: impl Read) -> (usize, String) {
        let mut rows = 0;
        let end = read_table("t.csv", bytes, b',', &mut |row| {
            rows += usize::from(row.is_ok());
            Ok(())
        });
        (rows, end.err().map(|e| e.to_string()).unwrap_or_default())
    }

    #[test]
    fn an_open_quote_is_an_error_in_the_row_that_opens_it() {
        let (rows, e) = read(&b"prompt,completion\n\nq0,\"a\n0\"\nq1,\"a1\nq2,a2\nq3,a3\n"[..]);
        assert_eq!(rows, 1);
        for part in ["t.csv:5", "is not closed", "a1\u{fffd}q2,a2", "hint:"] {
            assert!(e.contains(part), "no {part:?} in: {e}");
        }
        for (text, rows) in [
            ("a\n\"b\"", 1),
            ("a\n\"b\"\"\"\n", 1),
            ("\u{feff}\"a\"\n5\" pipe\n\"b\" c\"\n", 2),
        ] {
            assert_eq!(read(text.as_bytes()), (rows, String::new()), "{text:?}");
        }
        for text in ["\"", "\u{feff}\"a\n", "a\n\"b\"\"", "a,b\r\n1,\"\"\"\r\n"] {
            assert!(read(text.as_bytes()).1.contains("is not closed"), "{text:?}");
        }
    }

    #[test]
    fn quotes_are_seen_as_the_csv_reader_sees_them() {
        let mut texts = vec![String::new()];
        for from in 0..1365 {
            texts.extend(["a", ",", "\"", "\n"].map(|next| format!("{}{next}", texts[from])));
        }
        let (mut open, mut closed) = (0, 0);
        for text in &texts {
            let place = |place: CellPlace, byte| place.after(byte, b',');
            let is_open = text.bytes().fold(CellPlace::Start, place) == CellPlace::Quoted;
            // In an open quote a line break does not end the row.
            let all = format!("{text}\n!");
            let mut reader = csv::ReaderBuilder::new()
                .has_headers(false)
                .flexible(true)
                .from_reader(all.as_bytes());
            let last = reader.records().last().unwrap().unwrap();
            assert_eq!(last.iter().eq(["!"]), !is_open, "{text:?}");
            *(if is_open { &mut open } else { &mut closed }) += 1;
        }
        assert!(open > 1000 && closed > 1000 && texts.len() == 5461, "{open} {closed}");
    }

    #[test]
    fn a_row_that_does_not_end_is_refused_before_it_fills_the_memory() {
        for (start, part) in [
            ("text\nfirst\n\"", "quotes that are not closed"),
            ("text\nfirst\n", "in one line"),
        ] {
            let (rows, e) = read(start.as_bytes().chain(std::io::repeat(b'x')));
            assert_eq!(rows, 1);
            assert!(
                e.contains("too long") && e.contains("t.csv:3") && e.contains(part),
                "{e}"
            );
        }
    }
}
