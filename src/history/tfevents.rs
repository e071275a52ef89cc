//! TensorBoard event files: records of a length, a checksum, an `Event` message and its checksum (TFRecord). Only the fields
//! that scalars need are written and read.

/// Polynomial of CRC-32C (Castagnoli), with reflected bits.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// Table of CRC-32C for one byte.
const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut n = 0;
    while n < 256 {
        let (mut crc, mut bit) = (n as u32, 0);
        while bit < 8 {
            crc = if crc & 1 == 1 {
                (crc >> 1) ^ POLYNOMIAL
            } else {
                crc >> 1
            };
            bit += 1;
        }
        table[n] = crc;
        n += 1;
    }
    table
};

fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| TABLE[((crc ^ u32::from(*byte)) & 255) as usize] ^ (crc >> 8);
    !bytes.iter().fold(!0, step)
}

/// A checksum as the records have it: rotated and shifted, because the data may have checksums of its own.
fn masked(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn record(message: &[u8]) -> Vec<u8> {
    let length = (message.len() as u64).to_le_bytes();
    [
        &length[..],
        &masked(&length).to_le_bytes(),
        message,
        &masked(message).to_le_bytes(),
    ]
    .concat()
}

fn varint(mut n: u64, out: &mut Vec<u8>) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// A field with a length: a text or a message.
fn field(number: u8, bytes: &[u8], out: &mut Vec<u8>) {
    out.push((number << 3) | 2);
    varint(bytes.len() as u64, out);
    out.extend(bytes);
}

/// `Event.wall_time`, in seconds.
fn wall_time(time: f64) -> Vec<u8> {
    [&[(1 << 3) | 1][..], &time.to_le_bytes()].concat()
}

/// The first record of a file.
pub fn header(time: f64) -> Vec<u8> {
    let mut event = wall_time(time);
    field(3, b"brain.Event:2", &mut event);
    record(&event)
}

/// A record that says: what another file of this run has is written again from here.
pub fn start(time: f64) -> Vec<u8> {
    let mut event = wall_time(time);
    // `SessionLog.status` is START.
    field(7, &[1 << 3, 1], &mut event);
    record(&event)
}

/// A record with the scalars of a step: tags and values.
pub fn scalars(time: f64, step: u64, values: &[(String, f64)]) -> Vec<u8> {
    let mut event = wall_time(time);
    event.push(2 << 3);
    varint(step, &mut event);
    let mut summary = Vec::new();
    for (tag, value) in values {
        let mut one = Vec::new();
        field(1, tag.as_bytes(), &mut one);
        // `simple_value`, a float.
        one.push((2 << 3) | 5);
        one.extend((*value as f32).to_le_bytes());
        field(1, &one, &mut summary);
    }
    field(5, &summary, &mut event);
    record(&event)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Time, step and scalars of an event.
    pub type Event = (f64, u64, Vec<(String, f32)>);

    /// Number and content of each field of a message; a varint as 8 bytes.
    fn fields(mut bytes: &[u8]) -> Vec<(u8, Vec<u8>)> {
        let varint = |bytes: &mut &[u8]| {
            let (mut n, mut shift) = (0u64, 0);
            loop {
                let byte = bytes[0];
                *bytes = &bytes[1..];
                n |= u64::from(byte & 0x7f) << shift;
                shift += 7;
                if byte < 0x80 {
                    return n;
                }
            }
        };
        let mut out = Vec::new();
        while !bytes.is_empty() {
            let key = varint(&mut bytes);
            let content = match key & 7 {
                0 => varint(&mut bytes).to_le_bytes().to_vec(),
                kind => {
                    let length = match kind {
                        1 => 8,
                        5 => 4,
                        2 => varint(&mut bytes) as usize,
                        other => panic!("wire type {other}"),
                    };
                    let (content, rest) = bytes.split_at(length);
                    bytes = rest;
                    content.to_vec()
                }
            };
            out.push((key as u8 >> 3, content));
        }
        out
    }

    fn word<const N: usize>(bytes: &[u8]) -> [u8; N] {
        bytes[..N].try_into().unwrap()
    }

    /// The events of a file. Checks every checksum.
    pub fn read(mut bytes: &[u8]) -> Vec<Event> {
        let mut out = Vec::new();
        while !bytes.is_empty() {
            let length = u64::from_le_bytes(word(bytes)) as usize;
            assert_eq!(u32::from_le_bytes(word(&bytes[8..])), masked(&bytes[..8]));
            let message = &bytes[12..12 + length];
            assert_eq!(u32::from_le_bytes(word(&bytes[12 + length..])), masked(message));
            bytes = &bytes[16 + length..];
            let mut event = (0.0, 0, Vec::new());
            for (number, content) in fields(message) {
                match number {
                    1 => event.0 = f64::from_le_bytes(word(&content)),
                    2 => event.1 = u64::from_le_bytes(word(&content)),
                    3 => assert_eq!(content, b"brain.Event:2"),
                    7 => assert_eq!(content, [8, 1]),
                    5 => event.2.extend(fields(&content).into_iter().map(|(_, value)| {
                        let parts = fields(&value);
                        let value = f32::from_le_bytes(word(&parts[1].1));
                        (String::from_utf8(parts[0].1.clone()).unwrap(), value)
                    })),
                    other => panic!("field {other}"),
                }
            }
            out.push(event);
        }
        out
    }

    #[test]
    fn checksums_are_those_of_the_definition() {
        // RFC 3720, B.4.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    }

    #[test]
    fn what_is_written_is_read() {
        let values = vec![("train/loss".to_string(), 2.5), ("eval/é".to_string(), -1e-3)];
        let file = [
            header(1.5),
            start(2.0),
            scalars(2.5, 300, &values),
            scalars(3.0, 1 << 40, &[]),
        ];
        let events = read(&file.concat());
        assert_eq!(events[..2], [(1.5, 0, Vec::new()), (2.0, 0, Vec::new())]);
        let floats = vec![("train/loss".to_string(), 2.5f32), ("eval/é".to_string(), -1e-3)];
        assert_eq!(events[2], (2.5, 300, floats));
        assert_eq!(events[3].1, 1 << 40);
    }
}
