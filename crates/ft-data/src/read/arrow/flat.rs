//! Reads flatbuffers, the encoding of the metadata of Arrow files. Every position is checked: a field that is outside of
//! the bytes is a field that is missing.

/// A table of the metadata.
#[derive(Clone, Copy)]
pub(super) struct FlatTable<'a> {
    bytes: &'a [u8],
    /// Position of the table; its fields are relative to it.
    at: usize,
    /// Position and size of the list of its fields.
    fields: (usize, usize),
}

fn le<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn position(bytes: &[u8], at: usize) -> Option<usize> {
    at.checked_add(u32::from_le_bytes(le(bytes, at)?) as usize)
}

impl<'a> FlatTable<'a> {
    pub(super) fn root(bytes: &'a [u8]) -> Option<Self> {
        Self::new(bytes, position(bytes, 0)?)
    }

    fn new(bytes: &'a [u8], at: usize) -> Option<Self> {
        let back = i32::from_le_bytes(le(bytes, at)?);
        let fields = usize::try_from(i64::try_from(at).ok()? - i64::from(back)).ok()?;
        let size = u16::from_le_bytes(le(bytes, fields)?) as usize;
        Some(Self {
            bytes,
            at,
            fields: (fields, size),
        })
    }

    fn field(&self, id: usize) -> Option<usize> {
        let (first, size) = self.fields;
        let slot = 4 + 2 * id;
        let offset = u16::from_le_bytes(le(self.bytes, first + slot)?) as usize;
        (slot + 2 <= size && offset > 0).then(|| self.at + offset)
    }

    pub(super) fn byte(&self, id: usize) -> Option<u8> {
        self.bytes.get(self.field(id)?).copied()
    }

    pub(super) fn i16(&self, id: usize) -> Option<i16> {
        le(self.bytes, self.field(id)?).map(i16::from_le_bytes)
    }

    pub(super) fn i32(&self, id: usize) -> Option<i32> {
        le(self.bytes, self.field(id)?).map(i32::from_le_bytes)
    }

    pub(super) fn i64(&self, id: usize) -> Option<i64> {
        le(self.bytes, self.field(id)?).map(i64::from_le_bytes)
    }

    pub(super) fn table(&self, id: usize) -> Option<Self> {
        Self::new(self.bytes, position(self.bytes, self.field(id)?)?)
    }

    /// The elements of a list, each of `size` bytes, with their positions. Empty if the field is missing.
    fn list(&self, id: usize, size: usize) -> impl Iterator<Item = (usize, &'a [u8])> + use<'a> {
        let found = || {
            let at = position(self.bytes, self.field(id)?)?;
            let length = u32::from_le_bytes(le(self.bytes, at)?) as usize;
            let first = at + 4;
            let bytes = self.bytes.get(first..first.checked_add(length.checked_mul(size)?)?)?;
            Some((first, bytes))
        };
        let (first, bytes) = found().unwrap_or_default();
        let elements = bytes.chunks_exact(size).enumerate();
        elements.map(move |(i, element)| (first + i * size, element))
    }

    pub(super) fn text(&self, id: usize) -> Option<String> {
        let bytes = self.list(id, 1).map(|(_, byte)| byte[0]).collect();
        String::from_utf8(bytes).ok()
    }

    /// `None`: an element is broken.
    pub(super) fn tables(&self, id: usize) -> Option<Vec<Self>> {
        let table = |(at, _)| Self::new(self.bytes, position(self.bytes, at)?);
        self.list(id, 4).map(table).collect()
    }

    pub(super) fn numbers(&self, id: usize) -> Vec<i64> {
        let number = |(_, bytes): (usize, &[u8])| le(bytes, 0).map(i64::from_le_bytes);
        self.list(id, 8).filter_map(number).collect()
    }

    /// Structs of two numbers.
    pub(super) fn pairs(&self, id: usize) -> Vec<(i64, i64)> {
        let number = |bytes: &[u8], at: usize| le(bytes, at).map(i64::from_le_bytes);
        let pair = |(_, bytes): (usize, &[u8])| Some((number(bytes, 0)?, number(bytes, 8)?));
        self.list(id, 16).filter_map(pair).collect()
    }
}
