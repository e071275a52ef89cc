//! Mutations inside of formats in which one changed byte mostly breaks a length or a mark: the footer and the headers of pages of a
//! Parquet file (Thrift's compact protocol), and the messages of an Arrow file or stream (FlatBuffers) with their buffers. The lengths
//! in front of these parts, and the marks at both ends, stay right.

use super::mutate::Draw;
use std::ops::Range;

const PARQUET: &[u8] = b"PAR1";
const ARROW: &[u8] = b"ARROW1";
/// Before the length of a message.
const MESSAGE: [u8; 4] = [0xff; 4];

/// A mutation of `bytes`, of at most `most` bytes. `None`: they are not such a file, or the result would be longer.
pub fn mutated(bytes: &[u8], most: usize, seed: u32) -> Option<Vec<u8>> {
    let mut draw = Draw(seed.into());
    let mut out = bytes.to_vec();
    let rounds = 1 + draw.below(3);
    if footer(bytes).is_some() {
        for _ in 0..rounds {
            let footer = footer(&out)?;
            change_parquet(&mut out, footer, &mut draw)?;
        }
    } else {
        change_arrow(&mut out, rounds, &mut draw)?;
    }
    (out.len() <= most).then_some(out)
}

/// The footer of a Parquet file: before it is the data, after it are its length and a mark.
pub fn footer(bytes: &[u8]) -> Option<Range<usize>> {
    let end = bytes.len().checked_sub(8)?;
    if !bytes.starts_with(PARQUET) || !bytes.ends_with(PARQUET) {
        return None;
    }
    let length = u32::from_le_bytes(*bytes[end..].first_chunk()?) as usize;
    let start = end.checked_sub(length).filter(|start| *start >= PARQUET.len())?;
    Some(start..end)
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// A number, or the number of elements of a list.
    Number,
    /// Bytes with their length.
    Text,
    /// A byte with a type, and the distance to the number of the field before, or the number of elements.
    Head,
}

/// A part of a structure.
struct Part {
    kind: Kind,
    place: Range<usize>,
    /// The numbers of the fields around it, and its own.
    path: Vec<u64>,
    /// Of a number.
    value: u64,
}

/// Reads Thrift's compact protocol.
struct Thrift<'a> {
    bytes: &'a [u8],
    at: usize,
    path: Vec<u64>,
    /// Structures and lists around this place.
    depth: usize,
    parts: Vec<Part>,
}

impl<'a> Thrift<'a> {
    /// The structure at the start of `bytes`; of a damaged one, what is before the damage.
    fn read(bytes: &'a [u8]) -> Self {
        let mut thrift = Self {
            bytes,
            at: 0,
            path: Vec::new(),
            depth: 0,
            parts: Vec::new(),
        };
        let _ = thrift.structure();
        thrift
    }

    fn byte(&mut self) -> Option<u8> {
        let byte = *self.bytes.get(self.at)?;
        self.at += 1;
        Some(byte)
    }

    fn add(&mut self, kind: Kind, from: usize, value: u64) {
        self.parts.push(Part {
            kind,
            place: from..self.at,
            path: self.path.clone(),
            value,
        });
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    fn number(&mut self) -> Option<u64> {
        let from = self.at;
        let value = self.varint()?;
        self.add(Kind::Number, from, value);
        Some(value)
    }

    fn head(&mut self) -> Option<u8> {
        let from = self.at;
        let head = self.byte()?;
        self.add(Kind::Head, from, head.into());
        Some(head)
    }

    fn structure(&mut self) -> Option<()> {
        let mut field = 0u64;
        loop {
            let head = self.head()?;
            if head == 0 {
                return Some(());
            }
            field = match head >> 4 {
                // The number of the field is written, in zigzag.
                0 => self.varint()? >> 1,
                distance => field.wrapping_add(distance.into()),
            };
            self.path.push(field);
            self.value(head & 15)?;
            self.path.pop();
        }
    }

    fn value(&mut self, kind: u8) -> Option<()> {
        match kind {
            // Truth values stand in the head.
            1 | 2 => {}
            3 => drop(self.byte()?),
            4..=6 => drop(self.number()?),
            7 => {
                self.at += 8;
                self.bytes.get(..self.at)?;
            }
            8 => {
                let from = self.at;
                let length = self.varint()?;
                self.at = usize::try_from(length).ok()?.checked_add(self.at)?;
                self.bytes.get(..self.at)?;
                self.add(Kind::Text, from, length);
            }
            9 | 10 | 12 => {
                self.depth += 1;
                if self.depth > 16 {
                    return None;
                }
                match kind {
                    12 => self.structure()?,
                    _ => self.list()?,
                }
                self.depth -= 1;
            }
            _ => return None,
        }
        Some(())
    }

    fn list(&mut self) -> Option<()> {
        let head = self.head()?;
        let count = match head >> 4 {
            15 => self.number()?,
            count => count.into(),
        };
        // Each element has at least a byte, so that a damaged number of them ends.
        for _ in 0..count {
            match head & 15 {
                1 | 2 => drop(self.byte()?),
                kind => self.value(kind)?,
            }
        }
        Some(())
    }
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
    out
}

/// A varint of `length` bytes, with as many bits of the value as they have.
fn varint_in(mut value: u64, length: usize) -> Vec<u8> {
    let mut out = Vec::new();
    for n in 1..=length {
        out.push(value as u8 & 0x7f | if n < length { 0x80 } else { 0 });
        value >>= 7;
    }
    out
}

fn change_parquet(bytes: &mut Vec<u8>, footer: Range<usize>, draw: &mut Draw) -> Option<()> {
    let thrift = Thrift::read(&bytes[footer.clone()]);
    if draw.below(2) == 0
        && let Some(page) = page(bytes, &footer, &thrift.parts, draw)
    {
        change_page(bytes, page, draw);
        return Some(());
    }
    let part = thrift.parts.get(draw.below(thrift.parts.len()))?;
    let old = &bytes[footer.start + part.place.start..footer.start + part.place.end];
    let other = thrift.parts[draw.below(thrift.parts.len())].value;
    let new = match part.kind {
        Kind::Number => varint(changed(part.value, other, draw)),
        Kind::Head => vec![changed_head(part.value as u8, draw)],
        Kind::Text => {
            let mut text = old[old.len() - part.value as usize..].to_vec();
            match draw.below(4) {
                0 => text.truncate(draw.below(text.len())),
                1 => text.extend(text.clone()),
                2 => text.clear(),
                _ => change_words(&mut text, draw),
            }
            [varint(text.len() as u64), text].concat()
        }
    };
    let (from, to) = (footer.start + part.place.start, footer.start + part.place.end);
    let length = footer.len() - (to - from) + new.len();
    bytes.splice(from..to, new);
    let end = footer.start + length;
    bytes[end..end + 4].copy_from_slice(&(length as u32).to_le_bytes());
    Some(())
}

/// Near to the old value, at a limit, or that of another part.
fn changed(old: u64, other: u64, draw: &mut Draw) -> u64 {
    match draw.below(10) {
        0 => 0,
        // -1 and 1 in zigzag.
        1 => 1,
        2 => 2,
        3 => old.wrapping_add(1 + draw.below(4) as u64),
        4 => old.wrapping_sub(1 + draw.below(4) as u64),
        5 => old.wrapping_mul(2),
        6 => old ^ 1 << draw.below(64),
        7 => u64::MAX >> (8 * draw.below(8)),
        8 => 1 << draw.below(64),
        _ => other,
    }
}

fn changed_head(old: u8, draw: &mut Draw) -> u8 {
    match draw.below(3) {
        0 => old & 0xf0 | draw.below(16) as u8,
        1 => old & 0x0f | (draw.below(16) as u8) << 4,
        _ => draw.below(256) as u8,
    }
}

/// The header and the values of a page.
struct Page {
    parts: Vec<Part>,
    header: Range<usize>,
    values: Range<usize>,
}

/// A page of which the footer says the place, or one after it.
fn page(bytes: &[u8], footer: &Range<usize>, parts: &[Part], draw: &mut Draw) -> Option<Page> {
    // FileMetaData.row_groups.columns.meta_data, and in it the places of the first page of values and of that of the dictionary.
    let is_place = |part: &&Part| part.kind == Kind::Number && matches!(part.path[..], [4, 1, 3, 9 | 11]);
    let places: Vec<u64> = parts.iter().filter(is_place).map(|part| part.value >> 1).collect();
    let mut from = usize::try_from(*places.get(draw.below(places.len()))?).ok()?;
    let mut found = None;
    for _ in 0..1 + draw.below(4) {
        let Some(rest) = bytes[..footer.start].get(from..) else {
            break;
        };
        let thrift = Thrift::read(rest);
        let size = thrift
            .parts
            .iter()
            .find(|part| part.kind == Kind::Number && part.path == [3]);
        let Some(size) = size.map(|part| (part.value >> 1) as usize) else {
            break;
        };
        let start = (from + thrift.at).min(footer.start);
        let end = start.saturating_add(size).min(footer.start);
        found = Some(Page {
            parts: thrift.parts,
            header: from..start,
            values: start..end,
        });
        from = end;
    }
    found
}

/// No byte moves, because the footer has the places of the pages.
fn change_page(bytes: &mut [u8], page: Page, draw: &mut Draw) {
    let values = &mut bytes[page.values];
    if draw.below(2) == 0 && !values.is_empty() {
        // The lengths at the start say how the rest is read.
        let most = if draw.below(2) == 0 { 16 } else { usize::MAX };
        let length = values.len().min(most);
        change_words(&mut values[..length], draw);
        return;
    }
    let Some(part) = page.parts.get(draw.below(page.parts.len())) else {
        return;
    };
    let other = page.parts[draw.below(page.parts.len())].value;
    let place = page.header.start + part.place.start..page.header.start + part.place.end;
    let old = &mut bytes[place];
    match part.kind {
        Kind::Number => {
            let new = varint_in(changed(part.value, other, draw), old.len());
            old.copy_from_slice(&new);
        }
        Kind::Head => old[0] = changed_head(old[0], draw),
        Kind::Text => change_words(old, draw),
    }
}

/// Changes a number of 1, 2, 4 or 8 bytes, at a place that is a multiple of its size.
fn change_words(bytes: &mut [u8], draw: &mut Draw) {
    let width = [1, 2, 4, 8][draw.below(4)];
    let word = |draw: &mut Draw| {
        let place = width * draw.below(bytes.len() / width);
        let mut value = [0; 8];
        let word = bytes.get(place..place + width)?;
        value[..width].copy_from_slice(word);
        Some((place, u64::from_le_bytes(value)))
    };
    if let (Some((place, old)), Some((_, other))) = (word(draw), word(draw)) {
        let new = changed(old, other, draw).to_le_bytes();
        bytes[place..place + width].copy_from_slice(&new[..width]);
    }
}

/// A message without its mark and its length, and its buffers.
pub struct Message {
    pub fields: Range<usize>,
    pub buffers: Range<usize>,
}

/// The messages of an Arrow file or stream; of a file, also its footer.
pub fn messages(bytes: &[u8]) -> Vec<Message> {
    let mut at = if bytes.starts_with(ARROW) { 8 } else { 0 };
    let number = |at: usize| bytes.get(at..)?.first_chunk().copied().map(u32::from_le_bytes);
    let mut found = Vec::new();
    while bytes.get(at..).is_some_and(|rest| rest.starts_with(&MESSAGE)) {
        let start = at + 8;
        let Some(length) = number(at + 4)
            .map(|length| length as usize)
            .filter(|length| *length > 0)
        else {
            break;
        };
        let Some(fields) = bytes.get(start..start + length) else {
            break;
        };
        let end = start + length;
        let size = buffers_of(fields).unwrap_or(0).min(bytes.len() - end);
        found.push(Message {
            fields: start..end,
            buffers: end..end + size,
        });
        at = end + size;
    }
    let tail = bytes.len().saturating_sub(ARROW.len() + 4);
    if at > 0
        && bytes.ends_with(ARROW)
        && let Some(length) = number(tail)
        && let Some(start) = tail.checked_sub(length as usize).filter(|start| *start >= at)
    {
        found.push(Message {
            fields: start..tail,
            buffers: tail..tail,
        });
    }
    found
}

/// The length of the buffers after a message: field 3 of the table at its start.
fn buffers_of(fields: &[u8]) -> Option<usize> {
    let number = |at: usize| Some(u32::from_le_bytes(*fields.get(at..)?.first_chunk()?));
    let table = number(0)? as usize;
    // The list of the places of the fields is before the table, or after it.
    let list = table.checked_add_signed(-(number(table)?.cast_signed() as isize))?;
    let short = |at: usize| Some(u16::from_le_bytes(*fields.get(at..)?.first_chunk()?));
    let (size, place) = (short(list)?, short(list + 10)?);
    if size < 12 || place == 0 {
        return None;
    }
    let length = fields.get(table + usize::from(place)..)?.first_chunk()?;
    usize::try_from(i64::from_le_bytes(*length)).ok()
}

fn change_arrow(bytes: &mut Vec<u8>, rounds: usize, draw: &mut Draw) -> Option<()> {
    // Found once: a changed message may have another length of its buffers.
    let found = messages(bytes);
    let message = found.get(draw.below(found.len()))?;
    // A file has the places of its messages, a stream has not.
    if !bytes.starts_with(ARROW) && draw.below(8) == 0 {
        let whole = message.fields.start - 8..message.buffers.end;
        let to = found[draw.below(found.len())].fields.start - 8;
        match draw.below(2) {
            0 => drop(bytes.drain(whole)),
            _ => {
                let copy = bytes[whole].to_vec();
                drop(bytes.splice(to..to, copy));
            }
        }
        return Some(());
    }
    for _ in 0..rounds {
        let message = &found[draw.below(found.len())];
        let part = match draw.below(2) {
            0 if !message.buffers.is_empty() => message.buffers.clone(),
            _ => message.fields.clone(),
        };
        change_words(&mut bytes[part], draw);
    }
    Some(())
}
