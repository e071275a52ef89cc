//! Which elements of a parameter belong to which rank.

use std::ops::Range;

/// Elements that stay together: a task of the optimizer, blocks of its 8-bit states, a term of a norm.
pub const QUANTUM: usize = 1 << 14;

/// The elements of a parameter with `n` elements that belong to rank `rank` of `size`, if the first part is that of rank
/// 0. Equal parts but for the end.
fn part(n: usize, rank: usize, size: usize) -> Range<usize> {
    let each = n.div_ceil(QUANTUM).div_ceil(size) * QUANTUM;
    (rank * each).min(n)..((rank + 1) * each).min(n)
}

/// The elements of the parameter `name` with `n` elements that belong to rank `rank` of `size`. The rank of the first part
/// depends on the name, and the same parameter of the next layer begins at the next rank: otherwise rank 0 would have
/// all of the small parameters.
pub fn part_of(name: &str, n: usize, rank: usize, size: usize) -> Range<usize> {
    part(n, (rank + turn(name, size)) % size, size)
}

/// Elements of a parameter with `n` elements that a rank has, on the average over the layers of a model.
pub fn share(n: u64, size: u64) -> u64 {
    if size < 2 {
        return n;
    }
    let largest = n.div_ceil(QUANTUM as u64).div_ceil(size) * QUANTUM as u64;
    if largest * size > n + n / 4 {
        n.div_ceil(size)
    } else {
        largest
    }
}

fn turn(name: &str, size: usize) -> usize {
    // FNV-1a of the text without its numbers, and their sum: the same on every machine.
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let (mut numbers, mut number) = (0u64, 0u64);
    for byte in name.bytes() {
        if byte.is_ascii_digit() {
            number = number.wrapping_mul(10).wrapping_add(u64::from(byte - b'0'));
        } else {
            numbers = numbers.wrapping_add(std::mem::take(&mut number));
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    let sum = (hash >> 32).wrapping_add(numbers).wrapping_add(number);
    (sum % size as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_every_element_once() {
        for n in [0, 1, QUANTUM - 1, QUANTUM, QUANTUM + 1, 5 * QUANTUM + 3, 64 * QUANTUM] {
            for size in 1..=5 {
                let mut next = 0;
                for rank in 0..size {
                    let range = part(n, rank, size);
                    assert_eq!(range.start, next);
                    assert!(range.start == n || range.start.is_multiple_of(QUANTUM));
                    next = range.end;
                }
                assert_eq!(next, n);
                let mut named: Vec<_> = (0..size).map(|rank| part_of("a.7.b", n, rank, size)).collect();
                named.sort_by_key(|range| (range.start, range.end));
                assert_eq!(named, (0..size).map(|rank| part(n, rank, size)).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn small_parameters_of_layers_are_spread_over_the_ranks() {
        for size in 2..=5 {
            for n in [100, QUANTUM, 3 * QUANTUM] {
                let of = |rank| -> usize {
                    let name = |layer| format!("model.layers.{layer}.mlp.up_proj.lora_A.weight");
                    (0..60).map(|layer| part_of(&name(layer), n, rank, size).len()).sum()
                };
                assert!((0..size).all(|rank| of(rank) == 60 * n / size), "{size} ranks, {n}");
            }
        }
    }
}
