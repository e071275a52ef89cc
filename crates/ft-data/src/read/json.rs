//! Readers for jsonl (one object per line) and json (one array of objects).

use super::{MAX_ROW_BYTES, Row, RowPosition, RowReceiver, clip, not_utf8};
use ft_base::{Error, Result};
use serde::de::{DeserializeSeed, Deserializer, SeqAccess, Visitor};
use serde_json::Value;
use std::cell::Cell;
use std::fmt;
use std::io::{self, BufRead, BufReader, Chain, Cursor, Read};
use std::rc::Rc;
use std::sync::Arc;

const SURROGATE: &str = "escapes from \\ud800 to \\udfff are halves of a surrogate pair (often of an emoji): write \
                         both halves (\\ud83d\\ude00), or remove the half; a text that is cut inside a character \
                         contains such a half";
pub(super) const BOM: &[u8] = b"\xef\xbb\xbf";

pub(super) fn cannot_read(path: &str, e: std::io::Error) -> Error {
    Error::io("cannot read the file").at(path).cause(e)
}

/// Reads one object per line; skips blank lines; line numbers are physical.
pub(super) fn read_lines(path: &str, file: impl Read, each: &mut RowReceiver) -> Result<()> {
    lines(path, BufReader::with_capacity(1 << 18, file), each)
}

fn lines(path: &str, mut input: impl BufRead, each: &mut RowReceiver) -> Result<()> {
    let mut place = RowPosition {
        file: Arc::from(path),
        number: 0,
        is_line: true,
    };
    let mut line = Vec::new();
    loop {
        line.clear();
        place.number += 1;
        let limit = MAX_ROW_BYTES as u64 + 2;
        let n = input
            .by_ref()
            .take(limit)
            .read_until(b'\n', &mut line)
            .map_err(|e| cannot_read(path, e))?;
        if n == 0 {
            return Ok(());
        }
        if n as u64 == limit && line.last() != Some(&b'\n') {
            return Err(Error::format("the row is too long")
                .at(&place)
                .found(format!(
                    "over {MAX_ROW_BYTES} bytes in one line: {}",
                    clip(&head(&line))
                ))
                .expected("one object per line")
                .hint("split the text over several rows"));
        }
        let start = if place.number == 1 && line.starts_with(BOM) {
            BOM.len()
        } else {
            0
        };
        let text = match std::str::from_utf8(&line) {
            Ok(text) => &text[start..],
            Err(e) => {
                each(Err(not_utf8(&place, &line, e.valid_up_to())))?;
                continue;
            }
        };
        if text.trim().is_empty() {
            continue;
        }
        let value = serde_json::from_str(text).map_err(|e| bad_json(&place, start, text, &e));
        each(value.and_then(|value| Row::new(value, place.clone())))?;
    }
}

/// The first part of a line as text; a split character at the end does not matter, because the text is clipped later.
fn head(line: &[u8]) -> String {
    String::from_utf8_lossy(&line[..line.len().min(400)]).into_owned()
}

fn bad_json(place: &RowPosition, start: usize, text: &str, e: &serde_json::Error) -> Error {
    let column = e.column().max(1) + start;
    let hint = match text.trim() {
        _ if is_surrogate(e) => SURROGATE,
        "{" | "[" => "a .jsonl file has one complete object per line; an array of objects must be in a .json file",
        _ => "check the quotes and commas of this line; text inside a string needs \\n for a line break",
    };
    Error::format("the row is not valid JSON")
        .at(format!("{place}:{column}"))
        .found(clip(text))
        .expected("one JSON object")
        .cause(message(e))
        .hint(hint)
}

/// True for an unpaired surrogate in an escape. The parser has two messages, for a high and for a low surrogate.
fn is_surrogate(e: &serde_json::Error) -> bool {
    let text = e.to_string();
    text.contains("surrogate") || text.contains("unexpected end of hex escape")
}

/// The parser's message without its position.
fn message(e: &serde_json::Error) -> String {
    let text = e.to_string();
    match text.rfind(" at line ") {
        Some(i) => text[..i].to_string(),
        None => text,
    }
}

/// Reads a `.json` file: an array of objects, or one object per line.
pub(super) fn read_json(path: &str, file: impl Read, each: &mut RowReceiver) -> Result<()> {
    let mut input = BufReader::with_capacity(1 << 18, file);
    let mut seen = Vec::new();
    let first = loop {
        let mut byte = [0u8];
        if input.read(&mut byte).map_err(|e| cannot_read(path, e))? == 0 {
            return Ok(());
        }
        seen.push(byte[0]);
        if !byte[0].is_ascii_whitespace() && !BOM.contains(&byte[0]) {
            break byte[0];
        }
    };
    if first != b'[' {
        return lines(path, rejoin(seen, input), each);
    }
    // The byte order mark is not JSON; spaces keep the column numbers right.
    let seen: Vec<u8> = seen
        .into_iter()
        .map(|b| if BOM.contains(&b) { b' ' } else { b })
        .collect();
    array(path, rejoin(seen, input), each)
}

fn rejoin<R: BufRead>(seen: Vec<u8>, rest: R) -> Chain<Cursor<Vec<u8>>, R> {
    Cursor::new(seen).chain(rest)
}

fn array(path: &str, input: impl BufRead, each: &mut RowReceiver) -> Result<()> {
    let mut place = RowPosition {
        file: Arc::from(path),
        number: 0,
        is_line: false,
    };
    let mut refused = None;
    let row_bytes = Rc::new(Cell::new(0));
    let mut parser = serde_json::Deserializer::from_reader(LimitedRows {
        input,
        row_bytes: row_bytes.clone(),
    });
    let rows = RowArray {
        place: &mut place,
        each,
        refused: &mut refused,
        row_bytes: &row_bytes,
    };
    let result = rows.deserialize(&mut parser).and_then(|()| parser.end());
    if let Some(e) = refused {
        return Err(e);
    }
    if row_bytes.get() > MAX_ROW_BYTES {
        return Err(Error::format("the row is too long")
            .at(format!("{path}, row {}", place.number + 1))
            .expected(format!("at most {MAX_ROW_BYTES} bytes"))
            .hint("split its texts into several rows"));
    }
    result.map_err(|e| {
        Error::format("the file is not valid JSON")
            .at(format!("{path}:{}:{}", e.line(), e.column()))
            .found(format!("an error after row {}", place.number))
            .expected("one array of objects")
            .cause(message(&e))
            .hint(if is_surrogate(&e) {
                SURROGATE
            } else {
                "check the quotes and commas before this position"
            })
    })
}

/// Ends the input in a row that is too long.
struct LimitedRows<R> {
    input: R,
    /// Bytes since the end of the last row.
    row_bytes: Rc<Cell<usize>>,
}

impl<R: Read> Read for LimitedRows<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let n = self.input.read(bytes)?;
        self.row_bytes.set(self.row_bytes.get() + n);
        if self.row_bytes.get() > MAX_ROW_BYTES {
            return Err(io::Error::other("the row is too long"));
        }
        Ok(n)
    }
}

/// Reads the elements of the outer array one by one, so that the whole array is never in memory.
struct RowArray<'a> {
    place: &'a mut RowPosition,
    each: &'a mut RowReceiver<'a>,
    refused: &'a mut Option<Error>,
    row_bytes: &'a Cell<usize>,
}

impl<'de> DeserializeSeed<'de> for RowArray<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> std::result::Result<(), D::Error> {
        d.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for RowArray<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an array of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<(), A::Error> {
        while let Some(value) = seq.next_element::<Value>()? {
            self.place.number += 1;
            self.row_bytes.set(0);
            if let Err(e) = (self.each)(Row::new(value, self.place.clone())) {
                *self.refused = Some(e);
                return Err(serde::de::Error::custom("row refused"));
            }
        }
        Ok(())
    }
}
