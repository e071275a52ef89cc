//! Reads csv and tsv with a header row. Every value is a string.

use super::{Row, RowPosition, RowReceiver, clip, not_utf8};
use ft_base::{Error, Result};
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Cursor, Read};
use std::rc::Rc;
use std::sync::Arc;

/// Offset of a line break's byte, and whether it ends a line (`\n`, not the `\r` before it).
type Breaks = Rc<RefCell<VecDeque<(u64, bool)>>>;

/// Records the offsets of line breaks. (The csv reader's own line numbers are too small with CRLF and blank lines.)
struct LineBreakReader<R> {
    input: R,
    offset: u64,
    breaks: Breaks,
}

impl<R: Read> Read for LineBreakReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let n = self.input.read(buffer)?;
        let mut breaks = self.breaks.borrow_mut();
        for (i, &byte) in buffer[..n].iter().enumerate() {
            if byte == b'\n' || byte == b'\r' {
                breaks.push_back((self.offset + i as u64, byte == b'\n'));
            }
        }
        self.offset += n as u64;
        Ok(n)
    }
}

/// Physical line (from 1) of the text at or after `offset`, after skipping line breaks; offsets must ascend.
fn line_at(breaks: &Breaks, line: &mut u64, mut offset: u64) -> u64 {
    let mut breaks = breaks.borrow_mut();
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
    let breaks = Breaks::default();
    let mut reader = csv::ReaderBuilder::new()
        .delimiter(delimiter)
        .has_headers(false)
        .flexible(true)
        .buffer_capacity(1 << 18)
        .from_reader(LineBreakReader {
            input: file,
            offset: 0,
            breaks: breaks.clone(),
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
        let more = reader.read_byte_record(&mut record).map_err(|e| {
            Error::format("cannot read the table")
                .at(&place)
                .cause(e)
                .hint("put a text with line breaks or quotes in double quotes, and double the quotes inside it")
        })?;
        if !more {
            return Ok(());
        }
        if let Some(position) = record.position() {
            place.number = line_at(&breaks, &mut line, position.byte());
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
    Ok(names
        .iter()
        .cloned()
        .zip(cells.into_iter().map(Value::String))
        .collect())
}
