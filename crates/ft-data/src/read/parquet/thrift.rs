//! The compact protocol of Thrift, in which a file has its footer and pages have their headers, and what else is written
//! with its integers.

use super::schema::{FOOTER, Fields, Kind, PAGE};

/// Most structs and lists in one another.
const MAX_NESTED: usize = 16;

/// Whether the decoder can read `bytes` as the footer of a file, and in a time that goes with their number.
pub(super) fn is_footer(bytes: &[u8]) -> bool {
    Thrift { bytes, at: 0 }.fields(FOOTER, 0, &mut |_, _| {}).is_some()
}

/// The start of a page: a struct in the compact protocol of Thrift.
pub(super) struct PageHeader {
    pub(super) bytes: u64,
    pub(super) uncompressed: i64,
    pub(super) compressed: i64,
}

impl PageHeader {
    /// `None` if it is not all there, or damaged.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let mut thrift = Thrift { bytes, at: 0 };
        let (mut uncompressed, mut compressed) = (None, None);
        thrift.fields(PAGE, 0, &mut |field, value| match field {
            2 => uncompressed = Some(value),
            3 => compressed = Some(value),
            _ => {}
        })?;
        Some(Self {
            bytes: thrift.at as u64,
            uncompressed: uncompressed?,
            compressed: compressed?,
        })
    }
}

pub(super) struct Thrift<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) at: usize,
}

impl Thrift<'_> {
    pub(super) fn byte(&mut self) -> Option<u8> {
        let byte = *self.bytes.get(self.at)?;
        self.at += 1;
        Some(byte)
    }

    pub(super) fn skip(&mut self, n: u64) -> Option<()> {
        let left = (self.bytes.len() - self.at) as u64;
        (n <= left).then(|| self.at += n as usize)
    }

    pub(super) fn unsigned(&mut self) -> Option<u64> {
        let mut out = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            out |= u64::from(byte & 127) << shift;
            if byte < 128 {
                return Some(out);
            }
        }
        None
    }

    fn signed(&mut self) -> Option<i64> {
        self.unsigned().map(|n| (n >> 1) as i64 ^ -((n & 1) as i64))
    }

    /// The fields of a struct, those in `known` by their kind; `integer` gets number and value of those that are one.
    /// `None` if they are not all there, or another reader could take the same bytes for something else.
    fn fields(&mut self, known: Fields, depth: usize, integer: &mut dyn FnMut(i16, i64)) -> Option<()> {
        let mut field = 0i16;
        loop {
            let start = self.byte()?;
            if start == 0 {
                return Some(());
            }
            field = match start >> 4 {
                0 => i16::try_from(self.signed()?).ok()?,
                more => field.checked_add(i16::from(more))?,
            };
            let kind = known.iter().find(|(number, _)| *number == field).map(|(_, kind)| *kind);
            if kind.is_some_and(|kind| !kind.is(start & 15)) {
                return None;
            }
            match start & 15 {
                4..=6 => integer(field, self.signed()?),
                // The value is in the type.
                1 | 2 => {}
                wire => self.value(wire, kind, depth)?,
            }
        }
    }

    /// A value of type `wire`; `kind` where it is known.
    fn value(&mut self, wire: u8, kind: Option<Kind>, depth: usize) -> Option<()> {
        match wire {
            3 => self.skip(1),
            4..=6 => self.unsigned().map(|_| ()),
            7 => self.skip(8),
            8 => {
                let n = self.unsigned()?;
                self.skip(n)
            }
            9 | 10 if depth < MAX_NESTED => self.list(kind, depth + 1),
            12 if depth < MAX_NESTED => {
                let known = match kind {
                    Some(Kind::Struct(fields)) => fields,
                    _ => &[],
                };
                self.fields(known, depth + 1, &mut |_, _| {})
            }
            // Also booleans of a list: readers differ in whether one takes a byte, and the decoder would pass 2^31 of them
            // without reading any.
            _ => None,
        }
    }

    fn list(&mut self, kind: Option<Kind>, depth: usize) -> Option<()> {
        let start = self.byte()?;
        // Some writers give an empty list no type.
        if start == 0 {
            return Some(());
        }
        let element = match kind {
            Some(Kind::List(element)) => Some(*element),
            _ => None,
        };
        if element.is_some_and(|element| !element.is(start & 15)) {
            return None;
        }
        let n = match start >> 4 {
            15 => self.unsigned()?,
            n => u64::from(n),
        };
        // Each value has a byte at least.
        (0..n).try_for_each(|_| self.value(start & 15, element, depth))
    }
}

/// The start of values in delta encoding, whose integers are written as those of Thrift.
pub(super) struct Delta {
    /// Parts of a block, and values of a part.
    parts: u64,
    each: u64,
    pub(super) count: u64,
}

impl Thrift<'_> {
    pub(super) fn part(&mut self) -> Option<Delta> {
        let (block, parts, count) = (self.unsigned()?, self.unsigned()?, self.unsigned()?);
        self.signed()?;
        let each = block.checked_div(parts).filter(|each| *each > 0)?;
        Some(Delta { parts, each, count })
    }

    /// To the end of these values.
    pub(super) fn pass(&mut self, delta: &Delta) -> Option<()> {
        let mut left = delta.count.saturating_sub(1);
        while left > 0 {
            self.signed()?;
            let widths = self.at;
            self.skip(delta.parts)?;
            for part in 0..delta.parts as usize {
                if left == 0 {
                    break;
                }
                let bits = u64::from(self.bytes[widths + part]);
                self.skip((delta.each / 8).checked_mul(bits)?)?;
                left = left.saturating_sub(delta.each);
            }
        }
        Some(())
    }
}
