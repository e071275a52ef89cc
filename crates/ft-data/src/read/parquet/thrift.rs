//! The compact protocol of Thrift, in which pages have their headers, and what else is written with its integers.

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
        thrift.fields(0, &mut |field, value| match field {
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

    /// The fields of a struct; `integer` gets number and value of those that are one.
    fn fields(&mut self, depth: usize, integer: &mut dyn FnMut(i64, i64)) -> Option<()> {
        let mut field = 0i64;
        loop {
            let start = self.byte()?;
            if start == 0 {
                return Some(());
            }
            field = match start >> 4 {
                0 => self.signed()?,
                more => field.checked_add(i64::from(more))?,
            };
            match start & 15 {
                4..=6 => integer(field, self.signed()?),
                // The value is in the type.
                1 | 2 => {}
                kind => self.value(kind, depth)?,
            }
        }
    }

    fn value(&mut self, kind: u8, depth: usize) -> Option<()> {
        match kind {
            1..=3 => self.skip(1),
            4..=6 => self.unsigned().map(|_| ()),
            7 => self.skip(8),
            8 => {
                let n = self.unsigned()?;
                self.skip(n)
            }
            9 | 10 if depth < 8 => {
                let start = self.byte()?;
                let n = match start >> 4 {
                    15 => self.unsigned()?,
                    n => u64::from(n),
                };
                // Each value has a byte at least.
                (0..n).try_for_each(|_| self.value(start & 15, depth + 1))
            }
            12 if depth < 8 => self.fields(depth + 1, &mut |_, _| {}),
            _ => None,
        }
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
