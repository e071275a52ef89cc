//! Reorders packed codes: rows of outputs, a row a multiple of 16 bytes, the first of two 4-bit codes in the high half.

use rayon::prelude::*;

/// Rows that a task reorders together: neighbors in the file.
const ROWS: usize = 16;

/// Little-endian words `[rows, width]`.
pub(super) struct PackedWords<'a> {
    bytes: &'a [u8],
    width: usize,
    /// Added to each word.
    plus: u32,
}

impl<'a> PackedWords<'a> {
    pub(super) fn new(bytes: &'a [u8], width: usize, plus: u32) -> Self {
        Self { bytes, width, plus }
    }

    pub(super) fn word(&self, row: usize, column: usize) -> u32 {
        let at = 4 * (row * self.width + column);
        let bytes = self.bytes.get(at..at + 4).and_then(|b| b.try_into().ok());
        u32::from_le_bytes(bytes.unwrap_or_default()).wrapping_add(self.plus)
    }

    /// Code number `at` of a row, of 2, 3, 4 or 8 bits, the first in the lowest bits. Codes of 3 bits cross the words.
    pub(super) fn code(&self, row: usize, at: usize, bits: usize) -> u8 {
        let (word, low) = (at * bits / 32, at * bits % 32);
        let next = if low + bits > 32 { self.word(row, word + 1) } else { 0 };
        across(self.word(row, word), next, low, bits)
    }

    /// As `code` of a column whose words are below each other.
    pub(super) fn code_down(&self, column: usize, at: usize, bits: usize) -> u8 {
        let (word, low) = (at * bits / 32, at * bits % 32);
        let next = if low + bits > 32 {
            self.word(word + 1, column)
        } else {
            0
        };
        across(self.word(word, column), next, low, bits)
    }
}

/// The `bits` from bit `low` on of two words.
fn across(word: u32, next: u32, low: usize, bits: usize) -> u8 {
    ((u64::from(next) << 32 | u64::from(word)) >> low) as u8 & (255 >> (8 - bits))
}

/// The number that GPTQ of version 1 adds to a word of zero points, stored minus 1; it carries from one to the next,
/// as in gptqmodel. 0 for 3 bits, which cross the words.
pub(super) fn ones(bits: usize) -> u32 {
    match bits {
        2 => 0x5555_5555,
        4 => 0x1111_1111,
        8 => 0x0101_0101,
        _ => 0,
    }
}

/// Outputs in a word of AWQ.
const IN_WORD: usize = 8;

/// The codes in a word of AWQ, in the order of their outputs: the word has the even outputs first.
fn awq_codes(word: u32) -> [u8; IN_WORD] {
    const PLACES: [u32; IN_WORD] = [0, 4, 1, 5, 2, 6, 3, 7];
    PLACES.map(|place| (word >> (4 * place)) as u8 & 15)
}

/// AWQ words `[columns, rows / 8]` to rows of 4-bit codes: two words at a time, whose columns share the bytes.
pub(super) fn awq_rows(words: &PackedWords, (rows, columns): (usize, usize), stride: usize) -> Vec<u8> {
    let mut out = vec![0u8; rows * stride];
    out.par_chunks_mut((ROWS * stride).max(1))
        .enumerate()
        .for_each(|(part, out)| {
            for at in 0..columns.div_ceil(2) {
                for (i, out) in out.chunks_mut(IN_WORD * stride).enumerate() {
                    let (index, odd) = (part * ROWS / IN_WORD + i, 2 * at + 1);
                    let first = awq_codes(words.word(2 * at, index));
                    let second = awq_codes(if odd < columns { words.word(odd, index) } else { 0 });
                    for (to, (a, b)) in out.chunks_exact_mut(stride).zip(first.into_iter().zip(second)) {
                        to[at] = a << 4 | b;
                    }
                }
            }
        });
    out
}

/// AWQ words `[groups, rows / 8]` to a matrix of bytes `[rows, groups]`.
pub(super) fn awq_table(words: &PackedWords, (rows, groups): (usize, usize)) -> Vec<u8> {
    let mut out = vec![0u8; rows * groups];
    for group in 0..groups {
        for (index, out) in out.chunks_mut(IN_WORD * groups).enumerate() {
            let codes = awq_codes(words.word(group, index));
            for (to, code) in out.chunks_exact_mut(groups).zip(codes) {
                to[group] = code;
            }
        }
    }
    out
}

/// Exchanges the halves of a byte: files have the first of two codes in the low half.
fn exchanged(byte: u8) -> u8 {
    byte.rotate_left(4)
}

/// Words `[down, rows]` to rows of codes.
pub(super) fn transpose_words(words: &[u8], (rows, down): (usize, usize), stride: usize, nibbles: bool) -> Vec<u8> {
    let mut out = vec![0u8; rows * stride];
    out.par_chunks_mut((ROWS * stride).max(1))
        .enumerate()
        .for_each(|(part, out)| {
            for word in 0..down {
                for (i, to) in out.chunks_exact_mut(stride).enumerate() {
                    let from = &words[4 * (word * rows + part * ROWS + i)..][..4];
                    for (to, from) in to[4 * word..].iter_mut().zip(from) {
                        *to = if nibbles { exchanged(*from) } else { *from };
                    }
                }
            }
        });
    out
}

/// A matrix `[rows, columns]` of elements of `size` bytes to `[columns, rows]`.
pub(super) fn transpose(from: &[u8], (rows, columns): (usize, usize), size: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(from.len());
    for column in 0..columns {
        for row in 0..rows {
            out.extend_from_slice(&from[size * (row * columns + column)..][..size]);
        }
    }
    out
}

/// A matrix of bytes.
pub(super) fn table((rows, columns): (usize, usize), of: impl Fn(usize, usize) -> u8) -> Vec<u8> {
    let mut out = Vec::with_capacity(rows * columns);
    for row in 0..rows {
        out.extend((0..columns).map(|column| of(row, column)));
    }
    out
}

/// Rows of 4-bit codes.
pub(super) fn nibbles(
    (rows, columns): (usize, usize),
    stride: usize,
    code: impl Fn(usize, usize) -> u8 + Sync,
) -> Vec<u8> {
    let mut out = vec![0u8; rows * stride];
    out.par_chunks_mut((ROWS * stride).max(1))
        .enumerate()
        .for_each(|(part, out)| {
            for column in 0..columns {
                for (i, to) in out.chunks_exact_mut(stride).enumerate() {
                    let code = code(part * ROWS + i, column);
                    to[column / 2] |= if column % 2 == 0 { code << 4 } else { code };
                }
            }
        });
    out
}

/// Rows that follow each other without a gap, with `stride` bytes each.
pub(super) fn rows(from: &[u8], (rows, columns): (usize, usize), stride: usize, nibbles: bool) -> Vec<u8> {
    let width = if nibbles { columns.div_ceil(2) } else { columns };
    let between = from.len() / rows.max(1);
    let mut out = vec![0u8; rows * stride];
    if between == 0 || stride == 0 {
        return out;
    }
    out.par_chunks_mut(stride)
        .zip(from.par_chunks(between))
        .for_each(|(to, from)| {
            for (to, from) in to.iter_mut().zip(&from[..width.min(between)]) {
                *to = if nibbles { exchanged(*from) } else { *from };
            }
            // A code after the last column, which the file may pad with anything.
            if nibbles && columns % 2 == 1 {
                to[columns / 2] &= 0xF0;
            }
        });
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The outputs of the codes of a word, from its lowest bits on, as AutoAWQ packs them.
    const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

    #[test]
    fn awq_words_are_unpacked_as_their_codes_one_by_one() {
        for (rows, columns) in [(8, 1), (8, 2), (16, 7), (24, 33), (40, 64), (72, 130), (8, 0), (0, 3)] {
            let across = rows / 8;
            let bytes: Vec<u8> = (0..4 * across * columns)
                .map(|i| ((i as u32).wrapping_mul(2_654_435_761) >> 13) as u8)
                .collect();
            let words = PackedWords::new(&bytes, across, 0);
            let code = |row: usize, column: usize| {
                let low = 4 * ORDER.iter().position(|output| *output == row % 8).unwrap();
                (words.word(column, row / 8) >> low) as u8 & 15
            };
            let stride = columns.div_ceil(2).next_multiple_of(16);
            let mut wanted = vec![0u8; rows * stride];
            for row in 0..rows {
                for column in 0..columns {
                    let high = column % 2 == 0;
                    wanted[row * stride + column / 2] |= code(row, column) << if high { 4 } else { 0 };
                }
            }
            assert!(
                awq_rows(&words, (rows, columns), stride) == wanted,
                "{rows} x {columns}"
            );
            assert_eq!(awq_table(&words, (rows, columns)), table((rows, columns), code));
        }
    }
}
