//! Reads text files. A row is a line, a paragraph or the whole file, as its column `text`.

use super::json::cannot_read;
use super::{MAX_ROW_BYTES, Row, RowPosition, RowReceiver, TextUnit, not_utf8};
use ft_base::{Error, Result};
use serde_json::{Map, Value};
use std::io::{BufRead, BufReader, Read};
use std::sync::Arc;

const BOM: &str = "\u{feff}";

pub(super) fn read_text(path: &str, file: impl Read, unit: TextUnit, each: &mut RowReceiver) -> Result<()> {
    let mut input = BufReader::with_capacity(1 << 18, file);
    let mut place = RowPosition {
        file: Arc::from(path),
        number: 0,
        is_line: true,
    };
    // The text of the row so far, and its first line.
    let (mut row, mut first) = (String::new(), 1);
    let mut line = Vec::new();
    loop {
        line.clear();
        place.number += 1;
        let n = (&mut input)
            .take(MAX_ROW_BYTES as u64 + 1)
            .read_until(b'\n', &mut line)
            .map_err(|e| cannot_read(path, e))?;
        if row.len() + n > MAX_ROW_BYTES {
            return Err(Error::format("the row is too long")
                .at(&place)
                .found(format!("over {MAX_ROW_BYTES} bytes"))
                .expected("shorter texts")
                .hint("set `data::Source::text_unit` to `paragraph` or `line`, or split the file"));
        }
        let text = match std::str::from_utf8(&line) {
            Ok(text) if place.number == 1 => text.trim_start_matches(BOM),
            Ok(text) => text,
            Err(e) => {
                each(Err(not_utf8(&place, &line, e.valid_up_to())))?;
                continue;
            }
        };
        let is_blank = text.trim().is_empty();
        let ends = match unit {
            TextUnit::File => n == 0,
            TextUnit::Paragraph => n == 0 || is_blank,
            TextUnit::Line | TextUnit::Auto => true,
        };
        match unit {
            TextUnit::Line | TextUnit::Auto => row.push_str(text),
            TextUnit::Paragraph if is_blank => {}
            TextUnit::Paragraph | TextUnit::File => {
                if row.is_empty() {
                    first = place.number;
                }
                row.push_str(text);
            }
        }
        if ends {
            // The line break between two rows belongs to neither; a file keeps its text as it is.
            let text = match unit {
                TextUnit::File => row.as_str(),
                _ => row.trim_end_matches(['\n', '\r']),
            };
            if !text.trim().is_empty() {
                let fields = Map::from_iter([("text".to_string(), Value::String(text.to_string()))]);
                let number = match unit {
                    TextUnit::Line | TextUnit::Auto => place.number,
                    _ => first,
                };
                each(Ok(Row::of(
                    fields,
                    RowPosition {
                        number,
                        ..place.clone()
                    },
                )))?;
            }
            row.clear();
        }
        if n == 0 {
            return Ok(());
        }
    }
}
