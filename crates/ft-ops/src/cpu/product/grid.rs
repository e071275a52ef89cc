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

/// Tasks of a thread, so that one that is slower takes fewer.
const TASKS: usize = 4;
/// More tasks than that cost more than they save, unless all threads end this much earlier.
const EARLIER: f64 = 0.9;

/// Returns into how many parts the `blocks` of rows of C are cut, if its columns are cut into `across` tasks already: at least
/// so many that each thread has several tasks, and more if the threads then end more nearly at the same time.
pub(super) fn parts_of_rows(across: usize, blocks: usize, threads: usize) -> usize {
    let least = (TASKS * threads).div_ceil(across).min(blocks);
    // Blocks that the busiest thread computes.
    let busiest = |down: usize| (across * down).div_ceil(threads) * blocks.div_ceil(down.max(1));
    let best = (least..=blocks).min_by_key(|down| busiest(*down)).unwrap_or(least);
    if (busiest(best) as f64) < EARLIER * busiest(least) as f64 {
        best
    } else {
        least
    }
}

/// Returns part `index` of `parts` of `total`, cut into multiples of `unit` that are as equal as possible: (start,
/// length).
pub(super) fn part(total: usize, parts: usize, index: usize, unit: usize) -> (usize, usize) {
    let units = total.div_ceil(unit);
    let at = |i: usize| (units * i / parts * unit).min(total);
    (at(index), at(index + 1) - at(index))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The share of the time in which a thread has work, if all blocks take as long.
    fn busy(across: usize, blocks: usize, threads: usize) -> f64 {
        let down = parts_of_rows(across, blocks, threads);
        assert!((1..=blocks).contains(&down));
        let busiest = (across * down).div_ceil(threads) * blocks.div_ceil(down);
        (across * blocks) as f64 / (threads * busiest) as f64
    }

    #[test]
    fn many_threads_end_at_the_same_time() {
        // Weights of 896, 4096, 4864 and 14336 rows in tasks of 48, with 512 and 2048 tokens in blocks of 64.
        for across in [19, 86, 102, 299] {
            for blocks in [8, 32] {
                for threads in [2, 8, 16, 32, 64] {
                    let busy = busy(across, blocks, threads);
                    let least = if across == 19 && blocks == 8 { 0.79 } else { 0.89 };
                    assert!(busy >= least, "{across} x {blocks}, {threads} threads: {busy}");
                }
            }
        }
        // Two threads: no more tasks than they need.
        assert_eq!([parts_of_rows(19, 8, 2), parts_of_rows(1, 8, 2)], [1, 8]);
        // More threads than blocks.
        assert_eq!(parts_of_rows(1, 3, 64), 3);
        assert_eq!(parts_of_rows(3, 1, 64), 1);
    }
}
