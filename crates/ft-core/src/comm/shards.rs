//! Which elements of a parameter belong to which rank.

use std::ops::Range;

/// Elements that stay together: a task of the optimizer, blocks of its 8-bit states, a term of a norm.
pub const QUANTUM: usize = 1 << 14;

/// The elements of a parameter with `n` elements that belong to rank `rank` of `size`. Equal parts but for the end.
pub fn part(n: usize, rank: usize, size: usize) -> Range<usize> {
    let each = n.div_ceil(QUANTUM).div_ceil(size) * QUANTUM;
    (rank * each).min(n)..((rank + 1) * each).min(n)
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
            }
        }
    }
}
