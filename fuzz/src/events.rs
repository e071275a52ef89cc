//! A reader of TensorBoard event files that shares nothing with the writer: records of a length, its checksum, an `Event`
//! message and its checksum. It panics if the file is not as the format says.

/// Time, step, and the scalars with their tags.
pub type Event = (f64, u64, Vec<(String, f32)>);

/// The events of a file, without the first one, which has the version.
pub fn read(file: &[u8]) -> Vec<Event> {
    let (mut rest, mut all) = (file, Vec::new());
    while !rest.is_empty() {
        let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
        let (record, after) = rest.split_at(8 + 4 + length + 4);
        assert_eq!(masked(&record[..8]).to_le_bytes(), record[8..12]);
        let message = &record[12..12 + length];
        assert_eq!(masked(message).to_le_bytes(), record[12 + length..]);
        all.push(event(message));
        rest = after;
    }
    assert_eq!(all.remove(0).2, []);
    all
}

/// CRC-32C bit by bit, then rotated and shifted.
fn masked(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 * (crc & 1));
        }
    }
    let crc = !crc;
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

fn event(message: &[u8]) -> Event {
    let mut out = (0.0, 0, Vec::new());
    for (field, number, content) in fields(message) {
        match field {
            1 => out.0 = f64::from_bits(number),
            2 => out.1 = number,
            3 => assert_eq!(content, b"brain.Event:2"),
            // A summary has a value for each scalar: tag, number.
            5 => {
                for (field, _, value) in fields(content) {
                    let [(1, _, tag), (2, bits, _)] = fields(value)[..] else {
                        panic!("{field}: not a tag and a number");
                    };
                    let tag = std::str::from_utf8(tag).unwrap().to_string();
                    out.2.push((tag, f32::from_bits(bits as u32)));
                }
            }
            other => panic!("field {other}"),
        }
    }
    out
}

/// The fields of a message: number of the field, and its number or its bytes.
fn fields(mut rest: &[u8]) -> Vec<(u64, u64, &[u8])> {
    let mut out = Vec::new();
    while !rest.is_empty() {
        let key = varint(&mut rest);
        let (number, content) = match key & 7 {
            0 => (varint(&mut rest), &rest[..0]),
            1 => (u64::from_le_bytes(take(&mut rest, 8).try_into().unwrap()), &rest[..0]),
            2 => {
                let length = varint(&mut rest) as usize;
                (0, take(&mut rest, length))
            }
            5 => (
                u32::from_le_bytes(take(&mut rest, 4).try_into().unwrap()).into(),
                &rest[..0],
            ),
            kind => panic!("wire type {kind}"),
        };
        out.push((key >> 3, number, content));
    }
    out
}

fn take<'a>(rest: &mut &'a [u8], n: usize) -> &'a [u8] {
    let (first, later) = rest.split_at(n);
    *rest = later;
    first
}

fn varint(rest: &mut &[u8]) -> u64 {
    let mut out = 0;
    for shift in (0..64).step_by(7) {
        let byte = take(rest, 1)[0];
        out |= u64::from(byte & 127) << shift;
        if byte < 128 {
            break;
        }
    }
    out
}
