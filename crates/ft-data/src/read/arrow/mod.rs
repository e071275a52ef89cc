//! Reads Arrow IPC files: the stream format (Hugging Face `datasets`) and the file format (Feather version 2). One record
//! batch is in memory at a time, with the dictionaries. Everything that the file says about sizes is checked first.
//!
//! The crates of Arrow are not used: compiling what they need takes 114 seconds of processor time (24 without
//! optimization), and they allocate as many bytes as the header of a compressed buffer names.

mod column;
mod flat;
mod schema;

#[cfg(test)]
mod tests;

use super::{Row, RowPosition, RowReceiver};
use column::{Column, Dictionaries, RowReader};
use flat::FlatTable;
use ft_base::{Error, Result, catch_panic, progress::Phase};
use schema::{Field, StoredType};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Begins and ends a file of the file format; the messages between are those of the stream format.
const MAGIC: &[u8] = b"ARROW1";
/// Stands before the length of a message.
const MESSAGE: u32 = u32::MAX;
/// Most bytes of a batch when it is not compressed, and most rows: it is in memory as a whole.
const MAX_BATCH_BYTES: u64 = 2 << 30;
const MAX_BATCH_ROWS: usize = 1 << 27;
/// Values without bytes (nulls) that a batch may have, if it has no more bits than that.
const FREE_VALUES: usize = 1 << 14;

/// A file, and the position of its next message.
struct Messages<'a> {
    file: File,
    path: &'a str,
    at: u64,
    end: u64,
}

/// The body of a batch.
struct BatchBody<'a> {
    messages: &'a Messages<'a>,
    first: u64,
    length: u64,
    /// `None`: not compressed.
    codec: Option<u8>,
    nodes: std::vec::IntoIter<(i64, i64)>,
    buffers: std::vec::IntoIter<(i64, i64)>,
    /// Numbers of buffers with texts of views.
    views: std::vec::IntoIter<i64>,
    /// Bytes that the buffers may still have, stored and not compressed.
    left: (u64, u64),
}

pub(super) fn read_arrow(path: &str, file: File, size: u64, phase: &Phase, each: &mut RowReceiver) -> Result<()> {
    let mut messages = Messages {
        file,
        path,
        at: 0,
        end: size,
    };
    let start = messages.bytes(0, size.min(8))?;
    if start.starts_with(b"FEA1") {
        return Err(Error::unsupported("the file is Feather version 1")
            .at(path)
            .hint("save it again: `pyarrow.feather.write_feather(table, path)`"));
    }
    if start.starts_with(MAGIC) {
        let tail = size.saturating_sub(MAGIC.len() as u64);
        if messages.bytes(tail, size - tail)? != MAGIC {
            return Err(messages.cut());
        }
        messages.at = 8;
    }
    let mut place = RowPosition {
        file: Arc::from(path),
        number: 0,
        is_line: false,
    };
    let mut fields: Option<Vec<Field>> = None;
    let mut dictionaries = Dictionaries::new();
    while let Some((metadata, first, length)) = messages.next()? {
        phase.set(messages.at);
        let broken = || messages.broken("a message without a header");
        let message = FlatTable::root(&metadata).ok_or_else(broken)?;
        let header = message.table(2).ok_or_else(broken)?;
        match (message.byte(1).unwrap_or(0), &fields) {
            (1, None) => fields = Some(schema::read(header).map_err(|e| e.or_at(path))?),
            (2, Some(fields)) => {
                let id = header.i64(0).unwrap_or(0);
                let data = header.table(1).ok_or_else(broken)?;
                let Some(field) = with_dictionary(fields, id) else {
                    continue;
                };
                let mut body = messages.body(data, first, length)?;
                let values = body.column(field, true)?;
                body.check(std::slice::from_ref(&values), 0)?;
                let parts = dictionaries.entry(id).or_default();
                if header.byte(2).unwrap_or(0) == 0 {
                    parts.clear();
                }
                parts.push(values);
            }
            (3, Some(fields)) => {
                let rows = usize::try_from(header.i64(0).unwrap_or(0)).unwrap_or(usize::MAX);
                if rows > MAX_BATCH_ROWS {
                    return Err(messages.broken(format!("a batch of {rows} rows")));
                }
                let mut body = messages.body(header, first, length)?;
                let columns = fields.iter().map(|field| body.column(field, false));
                let columns: Vec<Column> = columns.collect::<Result<_>>()?;
                body.check(&columns, rows)?;
                for row in 0..rows {
                    place.number += 1;
                    let fields = RowReader::new(&dictionaries).object(fields, &columns, row);
                    let fields = fields.map_err(|e| e.or_at(&place));
                    each(fields.map(|fields| Row::of(fields, place.clone())))?;
                }
            }
            (kind, _) => return Err(messages.broken(format!("a message of type {kind}"))),
        }
    }
    match fields {
        Some(_) => Ok(()),
        None => Err(messages.broken("no list of columns")),
    }
}

/// The column, or the column inside another one, with this dictionary.
fn with_dictionary(fields: &[Field], id: i64) -> Option<&Field> {
    let own = fields
        .iter()
        .find(|field| field.dictionary.is_some_and(|(own, _)| own == id));
    own.or_else(|| fields.iter().find_map(|field| with_dictionary(&field.children, id)))
}

impl Messages<'_> {
    fn broken(&self, found: impl std::fmt::Display) -> Error {
        Error::format("cannot read the Arrow data")
            .at(self.path)
            .found(found)
            .hint("check that the file is complete, or save the rows again: `dataset.save_to_disk(...)`")
    }

    fn cut(&self) -> Error {
        self.broken("the file ends early: its end mark is missing")
    }

    /// Errors: the bytes are outside of the file.
    fn bytes(&self, at: u64, length: u64) -> Result<Vec<u8>> {
        if at.checked_add(length).is_none_or(|end| end > self.end) {
            return Err(self.cut());
        }
        let mut out = vec![0; usize::try_from(length).unwrap_or(0)];
        let read = self.file.read_exact_at(&mut out, at);
        read.map_err(|e| self.broken("bytes that cannot be read").cause(e))?;
        Ok(out)
    }

    fn word(&mut self) -> Result<u32> {
        let word = self.bytes(self.at, 4)?;
        self.at += 4;
        Ok(word.iter().rev().fold(0, |all, byte| all << 8 | u32::from(*byte)))
    }

    /// The metadata of the next message, and the position and length of its body. `None`: the end mark.
    fn next(&mut self) -> Result<Option<(Vec<u8>, u64, u64)>> {
        // Files of before 2019 have the length only.
        let length = match self.word()? {
            MESSAGE => self.word()?,
            length => length,
        };
        if length == 0 {
            return Ok(None);
        }
        let metadata = self.bytes(self.at, length.into())?;
        let body = FlatTable::root(&metadata).map_or(0, |message| message.i64(3).unwrap_or(0));
        let first = self.at + u64::from(length);
        let body = u64::try_from(body).map_err(|_| self.broken("a body of negative length"))?;
        if first.checked_add(body).is_none_or(|end| end > self.end) {
            return Err(self.cut());
        }
        self.at = first + body;
        Ok(Some((metadata, first, body)))
    }

    fn body<'b>(&'b self, batch: FlatTable, first: u64, length: u64) -> Result<BatchBody<'b>> {
        if length > MAX_BATCH_BYTES {
            return Err(Error::unsupported("a record batch is too large")
                .at(self.path)
                .found(format!("{length} bytes"))
                .expected(format!("at most {MAX_BATCH_BYTES}"))
                .hint("save the rows in smaller batches: `writer.write_table(table, max_chunksize=1000)`"));
        }
        Ok(BatchBody {
            messages: self,
            first,
            length,
            codec: batch.table(3).map(|of| of.byte(0).unwrap_or(0)),
            nodes: batch.pairs(1).into_iter(),
            buffers: batch.pairs(2).into_iter(),
            views: batch.numbers(4).into_iter(),
            left: (length, MAX_BATCH_BYTES),
        })
    }
}

impl BatchBody<'_> {
    /// The next column. `decoded`: the entries of its dictionary, not their numbers.
    fn column(&mut self, field: &Field, decoded: bool) -> Result<Column> {
        let missing = || self.messages.broken(format!("column `{}` is not complete", field.name));
        let (length, _) = self.nodes.next().ok_or_else(missing)?;
        let length = usize::try_from(length).map_err(|_| missing())?;
        let (kind, children) = match field.dictionary {
            Some((_, index)) if !decoded => (index, &[][..]),
            _ => (field.kind, &field.children[..]),
        };
        let mut count = kind.buffers();
        if kind == StoredType::View {
            let texts = self.views.next().and_then(|n| usize::try_from(n).ok());
            count += texts.filter(|n| *n <= self.buffers.len()).ok_or_else(missing)?;
        }
        let buffers: Vec<Vec<u8>> = (0..count).map(|_| self.buffer()).collect::<Result<_>>()?;
        let children = children.iter().map(|child| self.column(child, false));
        Ok(Column {
            kind,
            length,
            buffers,
            children: children.collect::<Result<_>>()?,
        })
    }

    /// Errors: a column has fewer values than the batch has rows, or more than its bytes have.
    fn check(&self, columns: &[Column], rows: usize) -> Result<()> {
        let bytes = (self.length - self.left.0).saturating_add(MAX_BATCH_BYTES - self.left.1);
        let most_free = usize::try_from(bytes.saturating_mul(8)).unwrap_or(usize::MAX);
        let most_free = most_free.max(FREE_VALUES);
        if columns.is_empty() && rows > most_free || columns.iter().any(|column| column.length < rows) {
            return Err(self
                .messages
                .broken(format!("a batch of {rows} rows without their values")));
        }
        if !columns.iter().all(|column| column.is_backed(most_free)) {
            return Err(Error::format("cannot read the Arrow data")
                .at(self.messages.path)
                .found("a column that names more values than it has bytes for")
                .hint("check that the file is complete; of lists of nulls, or lists that share their values, save fewer in a batch"));
        }
        Ok(())
    }

    fn buffer(&mut self) -> Result<Vec<u8>> {
        let broken = || self.messages.broken("a buffer outside of its batch");
        let (at, length) = self.buffers.next().ok_or_else(broken)?;
        let (at, length) = (u64::try_from(at), u64::try_from(length));
        let (Ok(at), Ok(length)) = (at, length) else {
            return Err(broken());
        };
        let inside = at.checked_add(length).is_some_and(|end| end <= self.length);
        // Buffers do not overlap.
        self.left.0 = self.left.0.checked_sub(length).filter(|_| inside).ok_or_else(broken)?;
        let stored = self.messages.bytes(self.first + at, length)?;
        match (self.codec, stored.split_first_chunk()) {
            (Some(codec), Some((size, rest))) => self.unpacked(codec, i64::from_le_bytes(*size), rest),
            (None, _) => Ok(stored),
            (Some(_), None) if stored.is_empty() => Ok(stored),
            (Some(_), None) => Err(broken()),
        }
    }

    /// `size`: that of the bytes before they were compressed; -1: they were not.
    fn unpacked(&mut self, codec: u8, size: i64, bytes: &[u8]) -> Result<Vec<u8>> {
        if size == -1 {
            return Ok(bytes.to_vec());
        }
        let broken = || self.messages.broken("compressed bytes that are damaged");
        let size = u64::try_from(size).map_err(|_| broken())?;
        self.left.1 = self.left.1.checked_sub(size).ok_or_else(broken)?;
        let mut out = Vec::new();
        let read = catch_panic(|| match codec {
            0 => lz4_flex::frame::FrameDecoder::new(bytes)
                .take(size)
                .read_to_end(&mut out),
            _ => zstd::Decoder::new(bytes)?.take(size).read_to_end(&mut out),
        });
        match read {
            Some(Ok(_)) if out.len() as u64 == size => Ok(out),
            _ => Err(broken()),
        }
    }
}
