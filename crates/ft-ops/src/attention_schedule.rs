//! Work lists for the GPU attention kernels: the rows that a block owns and the rows that it visits. Built on the
//! host for each call; blocks without any visible pair are not in a list.

use ft_base::{Error, Result};

/// Same layout as `attention::AttentionTile` in `cuda/attention.cuh`. Positions count from the first key of the document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AttentionTile {
    /// First own token in the whole batch, and number of own rows (tokens times packed heads).
    pub token: usize,
    pub rows: usize,
    /// Position of the first own token.
    pub place: usize,
    /// Token of the other side at position 0; of a KV cache the number of the block.
    pub other: usize,
    /// Range of positions of the other side to visit.
    pub low: usize,
    pub high: usize,
    /// First row in the partial results.
    pub slot: usize,
}

impl AttentionTile {
    /// Returns the fields in the layout of the kernels. `DocumentOffsets::check` ensures that the numbers fit.
    pub(crate) fn numbers(&self) -> [i32; 8] {
        [
            self.token, self.rows, self.place, self.other, self.low, self.high, self.slot, 0,
        ]
        .map(|n| n as i32)
    }
}

/// Sorted with the heaviest tile first, so that the last blocks of a launch are short.
pub(crate) struct TileSchedule(pub Vec<AttentionTile>);

/// Numbers of rows that tiles visit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct VisitedRows {
    pub heaviest: usize,
    pub all: usize,
}

/// Documents as offsets, as in `ops::attention::forward`.
pub(crate) struct DocumentOffsets<'a> {
    pub queries: &'a [usize],
    pub keys: &'a [usize],
    pub window: Option<usize>,
}

impl DocumentOffsets<'_> {
    /// Checks the number of tokens, which the kernels count in 32 bits.
    pub(crate) fn check(&self) -> Result<()> {
        const MOST: usize = 1 << 28;
        let tokens = self.queries.last().max(self.keys.last()).copied().unwrap_or(0);
        if tokens > MOST {
            return Err(Error::unsupported("too many tokens for attention on the GPU")
                .found(tokens)
                .expected(format!("at most {MOST}")));
        }
        Ok(())
    }

    /// Returns tiles of up to `rows` rows (each query is `pack` rows), with the keys that they attend to.
    pub(crate) fn query_tiles(&self, rows: usize, pack: usize) -> TileSchedule {
        let step = (rows / pack).max(1);
        let mut tiles = Vec::new();
        for (q, k) in self.queries.windows(2).zip(self.keys.windows(2)) {
            let (queries, keys) = (q[1] - q[0], k[1] - k[0]);
            for first in (0..queries).step_by(step) {
                let n = step.min(queries - first);
                let place = keys - queries + first;
                tiles.push(AttentionTile {
                    token: q[0] + first,
                    rows: n * pack,
                    place,
                    other: k[0],
                    low: self.window.map_or(0, |w| (place + 1).saturating_sub(w)),
                    high: place + n,
                    slot: 0,
                });
            }
        }
        TileSchedule::sorted(tiles)
    }

    /// Returns tiles of up to `rows` keys, with the queries that attend to them. Queries and keys are the same tokens.
    pub(crate) fn key_tiles(&self, rows: usize) -> TileSchedule {
        let mut tiles = Vec::new();
        for d in self.keys.windows(2) {
            let tokens = d[1] - d[0];
            for first in (0..tokens).step_by(rows) {
                let n = rows.min(tokens - first);
                tiles.push(AttentionTile {
                    token: d[0] + first,
                    rows: n,
                    place: first,
                    other: d[0],
                    low: first,
                    high: self
                        .window
                        .map_or(tokens, |w| (first + n - 1).saturating_add(w).min(tokens)),
                    slot: 0,
                });
            }
        }
        TileSchedule::sorted(tiles)
    }
}

impl TileSchedule {
    fn sorted(mut tiles: Vec<AttentionTile>) -> Self {
        // A kernel visits at least one row: it waits for the copies of its own rows together with the first ones.
        debug_assert!(tiles.iter().all(|t| t.rows > 0 && t.low < t.high));
        tiles.sort_by_key(|t| std::cmp::Reverse(t.high - t.low));
        Self(tiles)
    }

    pub(crate) fn visited(&self) -> VisitedRows {
        let rows = self.0.iter().map(|t| t.high - t.low);
        VisitedRows {
            heaviest: rows.clone().max().unwrap_or(0),
            all: rows.sum(),
        }
    }
}

impl VisitedRows {
    /// Returns the number of parts into which the `group` query heads of a key head are divided, for a GPU that runs
    /// `slots` blocks at a time; a tile is `blocks` blocks for each part. The smallest number with which the heaviest
    /// block takes no longer than an even share of all the work: then the last blocks end at about the same time.
    pub(crate) fn parts(self, blocks: usize, group: usize, slots: usize) -> usize {
        (1..=group)
            .find(|parts| group.is_multiple_of(*parts) && self.heaviest * slots <= self.all * blocks * parts)
            .unwrap_or(group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts the tiles that contain each pair. Every visible pair must be in exactly one tile; other pairs may be
    /// in one.
    fn pairs(tiles: &TileSchedule, queries: usize, keys: usize, own_queries: bool) -> Vec<u8> {
        let mut seen = vec![0; queries * keys];
        for t in &tiles.0 {
            for own in 0..t.rows {
                for other in t.low..t.high {
                    let (i, j) = if own_queries {
                        (t.token + own, t.other + other)
                    } else {
                        (t.other + other, t.token + own)
                    };
                    seen[i * keys + j] += 1;
                }
            }
        }
        seen
    }

    fn check(q: &[usize], k: &[usize], window: Option<usize>, tiles: &TileSchedule, own_queries: bool) {
        let (nq, nk) = (q[q.len() - 1], k[k.len() - 1]);
        let seen = pairs(tiles, nq, nk, own_queries);
        for d in 0..q.len() - 1 {
            let offset = (k[d + 1] - k[d]) - (q[d + 1] - q[d]);
            for i in 0..nq {
                for j in 0..nk {
                    let inside = (q[d]..q[d + 1]).contains(&i) && (k[d]..k[d + 1]).contains(&j);
                    if inside {
                        let (place, key) = (i - q[d] + offset, j - k[d]);
                        let visible = key <= place && window.is_none_or(|w| key + w > place);
                        let count = seen[i * nk + j];
                        assert!(count == 1 || (count == 0 && !visible), "query {i}, key {j}");
                    }
                }
            }
        }
        let across = (0..nq * nk).filter(|at| {
            let of = |offsets: &[usize], x: usize| offsets.windows(2).position(|d| (d[0]..d[1]).contains(&x));
            of(q, at / nk) != of(k, at % nk)
        });
        assert!(across.into_iter().all(|at| seen[at] == 0));
    }

    #[test]
    fn every_visible_pair_is_visited_once() {
        let same = vec![0, 1, 8, 73, 73, 203];
        let (q, k) = (vec![0, 1, 71, 71, 81], vec![0, 90, 190, 200, 210]);
        for window in [None, Some(1), Some(20), Some(64), Some(1000)] {
            let documents = DocumentOffsets {
                queries: &same,
                keys: &same,
                window,
            };
            check(&same, &same, window, &documents.query_tiles(64, 1), true);
            check(&same, &same, window, &documents.key_tiles(64), false);
            let documents = DocumentOffsets {
                queries: &q,
                keys: &k,
                window,
            };
            check(&q, &k, window, &documents.query_tiles(64, 1), true);
        }
    }

    #[test]
    fn the_heaviest_come_first_as_the_kernels_read_them() {
        let documents = DocumentOffsets {
            queries: &[0, 3, 73],
            keys: &[0, 10, 80],
            window: Some(66),
        };
        assert!(documents.check().is_ok());
        let tiles = documents.query_tiles(64, 1);
        let numbers: Vec<[i32; 8]> = tiles.0.iter().map(AttentionTile::numbers).collect();
        let want = [
            [3, 64, 0, 10, 0, 64, 0, 0],
            [67, 6, 64, 10, 0, 70, 0, 0],
            [0, 3, 7, 0, 0, 10, 0, 0],
        ];
        assert_eq!(numbers, [want[1], want[0], want[2]]);
        let too_many = [0, (1 << 28) + 1];
        let documents = DocumentOffsets {
            queries: &too_many,
            keys: &too_many,
            window: None,
        };
        assert!(documents.check().is_err());
    }

    #[test]
    fn heads_are_divided_until_the_heaviest_block_is_an_even_share() {
        let parts = |documents: &[usize], group, slots| {
            let documents = DocumentOffsets {
                queries: documents,
                keys: documents,
                window: None,
            };
            documents.key_tiles(64).visited().parts(8, group, slots)
        };
        // One document of 2048 tokens, 8 key heads: 256 blocks, of which the heaviest has twice the mean work.
        assert_eq!(parts(&[0, 2048], 4, 2 * 64), 1);
        assert_eq!(parts(&[0, 2048], 4, 2 * 128), 2);
        assert_eq!(parts(&[0, 2048], 4, 2 * 132), 2);
        assert_eq!(parts(&[0, 512], 4, 2 * 132), 4);
        // Only divisors of the group.
        assert_eq!(parts(&[0, 2048], 7, 2 * 132), 7);
        let rows: Vec<usize> = (0..=16).map(|row| 2048 * row).collect();
        assert_eq!(parts(&rows, 4, 2 * 132), 1);
        assert_eq!(parts(&[0], 4, 2 * 132), 1);
    }

    #[test]
    fn the_planner_counts_at_least_as_many_parts() {
        let mut random = 1u64;
        for tokens in [1, 100, 512, 2048, 8192, 32_768] {
            for _ in 0..50 {
                let mut documents = vec![0];
                while documents[documents.len() - 1] < tokens {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let len = 1 + (random >> 33) as usize % (tokens >> (random >> 60)).max(1);
                    documents.push((documents[documents.len() - 1] + len).min(tokens));
                }
                for (heads, kv_heads, window) in [(32, 8, None), (14, 2, None), (8, 1, Some(300)), (4, 4, None)] {
                    let list = DocumentOffsets {
                        queries: &documents,
                        keys: &documents,
                        window,
                    };
                    let parts = list.key_tiles(64).visited().parts(kv_heads, heads / kv_heads, 2 * 148);
                    let counted = crate::attention::gpu_backward_parts(heads, kv_heads, tokens);
                    assert!(parts <= counted, "{tokens} tokens: {parts} parts, {counted} counted");
                }
            }
        }
    }
}
