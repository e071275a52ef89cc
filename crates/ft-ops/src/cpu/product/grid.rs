//! Cuts C into blocks.

/// Largest number of rows of a block: bounds the packed part of A.
pub(super) const MC: usize = 518;
/// Largest chunk of k: a panel of A stays in the L1 cache.
pub(super) const KC: usize = 256;
/// Largest number of elements of a packed part of B.
pub(super) const NC_KC: usize = 66_000;
/// Packing one element costs about this many multiply-adds.
const PACK: f64 = 24.0;
const FEWEST_ROWS: usize = 14;
const FEWEST_COLUMNS: usize = 64;

/// Returns the number of blocks (down, across) of an `m · n` matrix for `threads` threads: enough blocks for all
/// threads, with as few elements packed twice as possible.
pub(super) fn grid(m: usize, n: usize, threads: usize) -> (usize, usize) {
    let least = m.div_ceil(MC);
    let mut best = (f64::MAX, (least, 1));
    for down in least..=least + 2 * threads {
        for across in 1..=2 * threads {
            if (down > least && m / down < FEWEST_ROWS) || (across > 1 && n / across < FEWEST_COLUMNS) {
                continue;
            }
            let (rows, columns) = (m.div_ceil(down) as f64, n.div_ceil(across) as f64);
            let waves = (down * across).div_ceil(threads) as f64;
            let cost = waves * (rows * columns + PACK * (rows + columns));
            if cost < best.0 {
                best = (cost, (down, across));
            }
        }
    }
    best.1
}

/// Returns part `index` of `parts` of `total`, cut into multiples of `unit` that are as equal as possible: (start,
/// length).
pub(super) fn part(total: usize, parts: usize, index: usize, unit: usize) -> (usize, usize) {
    let units = total.div_ceil(unit);
    let at = |i: usize| (units * i / parts * unit).min(total);
    (at(index), at(index + 1) - at(index))
}
