//! Mutations of the text inside of a gzip or zstd file, which is compressed again. A byte of the file may be before it, which chooses
//! something.

use crate::mutate;
use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;
use std::io::{Read, Write};

const GZIP: &[u8] = b"\x1f\x8b\x08";
const ZSTD: &[u8] = b"\x28\xb5\x2f\xfd";
/// Bytes of a text. More are left out of a gzip file, and a zstd file with more is left to libFuzzer.
const LONGEST: usize = 32 << 10;
/// By which a mutation of libFuzzer may make a text longer.
const ROOM: usize = 256;

/// A mutation of `bytes`, of at most `most` bytes. `None`: they are not compressed, or the result would be longer.
pub fn mutated(bytes: &[u8], most: usize, seed: u32, words: &[String]) -> Option<Vec<u8>> {
    let is_packed = |at: &usize| {
        bytes
            .get(*at..)
            .is_some_and(|rest| rest.starts_with(GZIP) || rest.starts_with(ZSTD))
    };
    let start = [0, 1].into_iter().find(is_packed)?;
    let (first, packed) = bytes.split_at(start);
    let is_gzip = packed.starts_with(GZIP);
    let mut text = Vec::new();
    if is_gzip {
        // Of a damaged file, what is before the damage.
        let _ = MultiGzDecoder::new(packed).take(LONGEST as u64).read_to_end(&mut text);
    } else {
        text = zstd::bulk::decompress(packed, LONGEST).ok()?;
    }
    let json = (seed & 2 == 0).then(|| mutate::mutated(&text, LONGEST, seed, words));
    let new = json.flatten().unwrap_or_else(|| {
        let size = text.len();
        text.resize(size + ROOM, 0);
        let size = libfuzzer_sys::fuzzer_mutate(&mut text, size, size + ROOM);
        text.truncate(size);
        text
    });
    let level = (seed >> 2) % 10;
    let again = if is_gzip {
        // Level 0: stored as it is.
        let mut encoder = GzEncoder::new(Vec::new(), Compression::new(level));
        encoder.write_all(&new).ok()?;
        encoder.finish().ok()?
    } else {
        zstd::bulk::compress(&new, level as i32 + 1).ok()?
    };
    let out = [first, &again[..]].concat();
    (out.len() <= most).then_some(out)
}
