//! csv and tsv with a header row. Every value is a string.

use super::{Place, Row, clip, not_utf8};
use crate::base::{Error, Result};
use serde_json::{Map, Value};
use std::io::Read;
use std::sync::Arc;

pub(super) fn read_table(
    path: &str,
    file: impl Read,
    delimiter: u8,
    each: &mut dyn FnMut(Row) -> Result<()>,
) -> Result<()> {
    let mut reader = csv::ReaderBuilder::new()
        .delimiter(delimiter)
        .has_headers(false)
        .flexible(true)
        .buffer_capacity(1 << 18)
        .from_reader(file);
    let mut place = Place {
        file: Arc::from(path),
        number: 1,
        is_line: true,
    };
    let mut record = csv::ByteRecord::new();
    let mut header: Option<Vec<String>> = None;
    loop {
        let more = reader.read_byte_record(&mut record).map_err(|e| {
            Error::new("cannot read the table")
                .at(&place)
                .cause(e)
                .hint("a text with line breaks or quotes stands in double quotes, quotes inside it are doubled")
        })?;
        if !more {
            return Ok(());
        }
        place.number = record.position().map_or(place.number, |p| p.line());
        let cells = cells(&record, &place)?;
        match &header {
            None => header = Some(check_header(cells, &place)?),
            Some(names) => each(Row {
                fields: fields(names, cells, &place)?,
                place: place.clone(),
            })?,
        }
    }
}

fn cells(record: &csv::ByteRecord, place: &Place) -> Result<Vec<String>> {
    record
        .iter()
        .map(|cell| match std::str::from_utf8(cell) {
            Ok(text) => Ok(text.to_string()),
            Err(e) => Err(not_utf8(place, cell, e.valid_up_to())),
        })
        .collect()
}

fn check_header(mut names: Vec<String>, place: &Place) -> Result<Vec<String>> {
    for name in &mut names {
        *name = name.trim().trim_start_matches('\u{feff}').to_string();
    }
    for (i, name) in names.iter().enumerate() {
        if names[..i].contains(name) {
            return Err(Error::new(format!("two columns are named `{name}`"))
                .at(place)
                .found(clip(&names.join(",")))
                .expected("a header row with a different name for each column")
                .hint("the first line of a csv file names its columns, e.g. `prompt,completion`"));
        }
    }
    Ok(names)
}

fn fields(names: &[String], cells: Vec<String>, place: &Place) -> Result<Map<String, Value>> {
    if names.len() != cells.len() {
        return Err(Error::new("the row has another number of columns than the header")
            .at(place)
            .found(format!("{} columns: {}", cells.len(), clip(&cells.join(","))))
            .expected(format!("{} columns: {}", names.len(), clip(&names.join(","))))
            .hint("a text with commas stands in double quotes"));
    }
    Ok(names
        .iter()
        .cloned()
        .zip(cells.into_iter().map(Value::String))
        .collect())
}
